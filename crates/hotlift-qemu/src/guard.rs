//! Ends a QEMU that waits for a migration if the command that started it is killed, and removes the command's folder. The guard
//! is a separate process, to survive a SIGKILL of the command. (`PR_SET_PDEATHSIG` would also end a QEMU that has its guest,
//! when the command exits.)

use std::io::{self, Read, Write};
use std::os::unix::process::CommandExt;
use std::path::Path;
use std::process::{Child, ChildStdin, Command, Stdio};
use std::time::{Duration, Instant};

use hotlift_qmp::{Qemu, QmpAddress, QmpError};

use crate::connect::QUERY_INTERVAL;

/// Timeout of QEMU's answer, and of a migration whose sockets are closed to end.
const END: Duration = Duration::from_secs(10);

/// The guard of one QEMU; dropping it dismisses the guard.
#[derive(Debug)]
pub struct Guard {
    process: Child,
    pipe: Option<ChildStdin>,
    is_dismissed: bool,
}

impl Guard {
    /// Starts a guard for the QEMU at this QMP socket, and for `folder`, which must exist as long as this process. The guard is
    /// this program with the arguments `guard --qmp ADDRESS --folder PATH`, which must call [`run`].
    ///
    /// # Errors
    /// If it cannot be started.
    pub fn start(qmp: &QmpAddress, folder: &Path) -> io::Result<Self> {
        let mut process = Command::new(std::env::current_exe()?)
            .args(["guard", "--qmp", &qmp.to_string(), "--folder"])
            .arg(folder)
            .stdin(Stdio::piped())
            .stdout(Stdio::null())
            .stderr(Stdio::null())
            // Ctrl-C only addresses the command, which then ends its QEMU itself.
            .process_group(0)
            .spawn()?;
        let pipe = process.stdin.take();
        Ok(Self {
            process,
            pipe,
            is_dismissed: false,
        })
    }

    /// Dismisses the guard: it does not end its QEMU, even if this process dies. Does not wait for the guard's end.
    pub fn dismiss(&mut self) {
        // A byte dismisses the guard; the end of the pipe without a byte means that this process died. A byte in the pipe is
        // read before its end, so the dismissal holds even if this process is killed right after it.
        if let (Some(pipe), false) = (&mut self.pipe, self.is_dismissed) {
            self.is_dismissed = true;
            let _ = pipe.write_all(b".");
        }
    }
}

impl Drop for Guard {
    fn drop(&mut self) {
        self.dismiss();
        drop(self.pipe.take());
        let _ = self.process.wait();
    }
}

/// Runs the guard's process: waits until its parent dismisses it or dies, and in the latter case ends the QEMU at `qmp`.
/// Removes `folder` once the parent has ended.
pub fn run(qmp: &QmpAddress, folder: &Path) {
    let mut word = [0; 1];
    if matches!(io::stdin().read(&mut word), Ok(0)) {
        // A QEMU that does not answer has ended, or another client controls it.
        let _ = end(qmp);
    }
    // A command that has dismissed its guard keeps running; its end closes the pipe.
    let _ = io::copy(&mut io::stdin(), &mut io::sink());
    // Usually the folder is already gone.
    let _ = std::fs::remove_dir_all(folder);
}

/// Ends a QEMU that waits for a guest, but not one that has its guest. (A QEMU that may have its guest no longer has a guard.)
fn end(address: &QmpAddress) -> Result<(), QmpError> {
    let deadline = Instant::now() + END;
    let mut qemu = Qemu::connect(address, END)?;
    while qemu.query_status()?.status == "inmigrate" {
        // An active migration ends by itself: it fails, or completes if the whole guest had arrived.
        if qemu.query_migrate()?.status() != "active" || Instant::now() >= deadline {
            qemu.quit()?;
            break;
        }
        qemu.client()
            .wait_for_event(&[], Instant::now() + QUERY_INTERVAL);
    }
    Ok(())
}

//! The guard ends a QEMU that waits for a guest if the command that started this QEMU is killed. The guard also removes the
//! command's folder. The guard is a separate process, to survive a SIGKILL of the command. (`PR_SET_PDEATHSIG` is not used:
//! when the command exits, it would also end a QEMU that has its guest.)

use std::io::{self, Read, Write};
use std::os::unix::process::CommandExt;
use std::path::Path;
use std::process::{Child, ChildStdin, Command, Stdio};
use std::time::{Duration, Instant};

use hotlift_qmp::{Qemu, QmpAddress, QmpError};

use crate::connect::QUERY_INTERVAL;

/// Timeout of QEMU's answer, and of the end of a migration whose sockets are closed.
const END: Duration = Duration::from_secs(10);

/// The guard process of one QEMU. Dropping this value dismisses the guard.
#[derive(Debug)]
pub struct Guard {
    process: Child,
    pipe: Option<ChildStdin>,
    is_dismissed: bool,
}

impl Guard {
    /// Starts a guard for the QEMU at the socket `qmp`, and for `folder`, which is removed after this process has ended. The
    /// guard runs this program with the arguments `guard --qmp ADDRESS --folder PATH`. That command must call [`run`].
    ///
    /// # Errors
    /// If the guard's process cannot be started.
    pub fn start(qmp: &QmpAddress, folder: &Path) -> io::Result<Self> {
        let mut process = Command::new(std::env::current_exe()?)
            .args(["guard", "--qmp", &qmp.to_string(), "--folder"])
            .arg(folder)
            .stdin(Stdio::piped())
            .stdout(Stdio::null())
            .stderr(Stdio::null())
            // Ctrl-C in a terminal must not end the guard: the command ends its QEMU itself.
            .process_group(0)
            .spawn()?;
        let pipe = process.stdin.take();
        Ok(Self {
            process,
            pipe,
            is_dismissed: false,
        })
    }

    /// Dismisses the guard: from now on it does not end QEMU, even if this process dies. Does not wait for the end of the
    /// guard.
    pub fn dismiss(&mut self) {
        // A byte in the pipe dismisses the guard. The end of the pipe without a byte means that this process has died. The
        // guard reads the byte before the end, so the dismissal holds even if this process is killed right after the write.
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

/// Runs in the guard's process. Waits until the parent dismisses the guard or dies. If the parent died, ends the QEMU at `qmp`.
/// Removes `folder` after the parent has ended.
pub fn run(qmp: &QmpAddress, folder: &Path) {
    let mut word = [0; 1];
    if matches!(io::stdin().read(&mut word), Ok(0)) {
        // An error means that QEMU has ended, or that another client controls it.
        let _ = end(qmp);
    }
    // After a dismissal the command keeps running. The pipe is closed when the command ends.
    let _ = io::copy(&mut io::stdin(), &mut io::sink());
    // Usually the command itself has already removed the folder.
    let _ = std::fs::remove_dir_all(folder);
}

/// Ends a QEMU that waits for a guest. A QEMU that may have its guest no longer has a guard.
fn end(address: &QmpAddress) -> Result<(), QmpError> {
    let deadline = Instant::now() + END;
    let mut qemu = Qemu::connect(address, END)?;
    while qemu.query_status()?.status == "inmigrate" {
        // An active migration ends by itself because its sockets are closed: it completes if the whole guest had arrived, and
        // fails otherwise.
        if qemu.query_migrate()?.status() != "active" || Instant::now() >= deadline {
            qemu.quit()?;
            break;
        }
        qemu.client()
            .wait_for_event(&[], Instant::now() + QUERY_INTERVAL);
    }
    Ok(())
}

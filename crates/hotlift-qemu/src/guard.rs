//! Ends a QEMU that waits for a migration, should the command that has started it be killed, and removes
//! the command's folder: a process of its own, since nothing else outlives a SIGKILL. (`PR_SET_PDEATHSIG`
//! would end a QEMU that has its guest, too, when the command is done.)

use std::io::{self, Read, Write};
use std::os::unix::process::CommandExt;
use std::path::Path;
use std::process::{Child, ChildStdin, Command, Stdio};
use std::time::{Duration, Instant};

use hotlift_qmp::{Qemu, QmpAddress, QmpError};

use crate::connect::QUERY_INTERVAL;

/// How long QEMU may take to answer, and a migration whose sockets are gone to end.
const END: Duration = Duration::from_secs(10);

/// The guard of one QEMU, dismissed when it goes out of scope.
#[derive(Debug)]
pub struct Guard {
    process: Child,
    pipe: Option<ChildStdin>,
    is_dismissed: bool,
}

impl Guard {
    /// Starts to watch over the QEMU at this QMP socket, and over `folder`, which is needed for as long as
    /// this process is there. The guard is this program with the arguments `guard --qmp ADDRESS --folder PATH`, which
    /// must call [`run`].
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
            // Ctrl-C is for the command, which then ends its QEMU itself.
            .process_group(0)
            .spawn()?;
        let pipe = process.stdin.take();
        Ok(Self {
            process,
            pipe,
            is_dismissed: false,
        })
    }

    /// From now on it does nothing to its QEMU, whatever becomes of this process. Does not wait for its end.
    pub fn dismiss(&mut self) {
        // A word says so; the end of the pipe without one, that nobody could say anything. A word that is in the pipe
        // is read before its end, so this holds even if this process is killed in the next moment.
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

/// The guard's process: waits until the process that has started it is done with the QEMU at `qmp`, or is there no more.
pub fn run(qmp: &QmpAddress, folder: &Path) {
    let mut word = [0; 1];
    if matches!(io::stdin().read(&mut word), Ok(0)) {
        // One that does not answer has ended, or is in other hands.
        let _ = end(qmp);
    }
    // A command that was dismissed has more to do; its end is that of the pipe.
    let _ = io::copy(&mut io::stdin(), &mut io::sink());
    // Mostly it is gone by now.
    let _ = std::fs::remove_dir_all(folder);
}

/// Ends a QEMU that waits for a guest. One that has its guest is left alone; one that might have it has no guard any
/// more.
fn end(address: &QmpAddress) -> Result<(), QmpError> {
    let deadline = Instant::now() + END;
    let mut qemu = Qemu::connect(address, END)?;
    while qemu.query_status()?.status == "inmigrate" {
        // What is under way ends by itself: badly, or with the guest if that was all there.
        if qemu.query_migrate()?.status() != "active" || Instant::now() >= deadline {
            qemu.quit()?;
            break;
        }
        qemu.client()
            .wait_for_event(&[], Instant::now() + QUERY_INTERVAL);
    }
    Ok(())
}

//! Waits for the first answer on the QMP socket of a QEMU that was just started.

use std::ffi::OsString;
use std::os::fd::AsFd;
use std::path::Path;
use std::process::{Child, ExitStatus};
use std::time::{Duration, Instant};

use hotlift_mem::end_of_process;
use hotlift_qmp::{Qemu, QmpAddress, QmpError};
use hotlift_terminal::signals::Interrupt;

/// Timeout of QEMU's first answer on its QMP socket.
const START: Duration = Duration::from_secs(60);

/// Timeout of the greeting on one connection, after which QEMU's process is checked again. QEMU sends the greeting only once
/// its machine exists.
const GREETING: Duration = Duration::from_millis(500);

/// Interval between checks whether QEMU has created the socket: no event reports this.
const SOCKET: Duration = Duration::from_millis(10);

/// Reason why a QEMU that was just started does not answer.
#[derive(Debug)]
pub enum NoAnswer {
    /// QEMU's process has ended.
    Ended(ExitStatus),
    /// A signal to this command arrived.
    Interrupted,
    /// The error of the last connection attempt.
    Qmp(QmpError),
}

/// Returns arguments that make a QEMU serve QMP at `socket` without waiting for a client.
#[must_use]
pub fn qmp_arguments(socket: &Path) -> [OsString; 2] {
    let mut option = OsString::from("unix:");
    option.push(socket);
    option.push(",server=on,wait=off");
    ["-qmp".into(), option]
}

/// Connects to the QMP socket of QEMU's process `child`, and retries until QEMU answers.
///
/// # Errors
/// If QEMU ends, does not answer within 60 s, or a signal arrives.
pub fn connect(child: &mut Child, socket: &Path, interrupt: &Interrupt) -> Result<Qemu, NoAnswer> {
    let address = QmpAddress::Unix(socket.to_owned());
    let deadline = Instant::now() + START;
    let end = end_of_process(child).ok();
    let ends: Vec<_> = end.iter().map(AsFd::as_fd).collect();
    loop {
        if socket.exists() || Instant::now() >= deadline {
            match Qemu::connect(&address, GREETING) {
                Ok(qemu) => return Ok(qemu),
                Err(
                    QmpError::Connect { .. } | QmpError::Timeout { .. } | QmpError::Closed { .. },
                ) if Instant::now() < deadline => {}
                Err(error) => return Err(NoAnswer::Qmp(error)),
            }
        }
        if let Ok(Some(status)) = child.try_wait() {
            return Err(NoAnswer::Ended(status));
        }
        if interrupt.wait(&ends, Some(Instant::now() + SOCKET)) {
            return Err(NoAnswer::Interrupted);
        }
    }
}

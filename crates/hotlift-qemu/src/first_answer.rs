//! The QMP socket of a QEMU that is started, and the wait for its first answer there.

use std::ffi::OsString;
use std::os::fd::AsFd;
use std::path::Path;
use std::process::{Child, ExitStatus};
use std::time::{Duration, Instant};

use hotlift_mem::end_of_process;
use hotlift_qmp::{Qemu, QmpAddress, QmpError};
use hotlift_terminal::signals::Interrupt;

/// How long a QEMU may take until it answers on its QMP socket.
const START: Duration = Duration::from_secs(60);

/// How long one connection waits for the greeting. QEMU answers only once its machine is made, and an end closes the connection.
const GREETING: Duration = Duration::from_millis(500);

/// Between two checks whether its socket is there yet, of which no descriptor tells.
const SOCKET: Duration = Duration::from_millis(10);

/// Why a QEMU that was started does not answer.
#[derive(Debug)]
pub enum NoAnswer {
    /// Its process has ended.
    Ended(ExitStatus),
    /// A signal came.
    Interrupted,
    /// The error of the last attempt.
    Qmp(QmpError),
}

/// Arguments with which a QEMU serves QMP at `socket`, and waits for no client.
#[must_use]
pub fn qmp_arguments(socket: &Path) -> [OsString; 2] {
    let mut option = OsString::from("unix:");
    option.push(socket);
    option.push(",server=on,wait=off");
    ["-qmp".into(), option]
}

/// Connects to the QEMU `child` at its QMP socket, as soon as it answers.
///
/// # Errors
/// If it ends instead, does not answer within 60 s, or a signal comes.
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

//! The QMP socket of a QEMU that is started, and the wait for its first answer there.

use std::ffi::OsString;
use std::path::Path;
use std::process::{Child, ExitStatus};
use std::time::{Duration, Instant};

use hotlift_console::signals::Interrupt;
use hotlift_qmp::{Qemu, QmpAddress, QmpError};

/// How long a QEMU may take until it answers on its QMP socket.
const START: Duration = Duration::from_secs(60);

/// How often it is looked whether it has ended instead.
const LOOK: Duration = Duration::from_millis(500);

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
    loop {
        let error = match Qemu::connect(&address, LOOK) {
            Ok(qemu) => return Ok(qemu),
            Err(error) => error,
        };
        if let Ok(Some(status)) = child.try_wait() {
            return Err(NoAnswer::Ended(status));
        }
        if interrupt.is_raised() {
            return Err(NoAnswer::Interrupted);
        }
        let is_late = matches!(
            error,
            QmpError::Connect { .. } | QmpError::Timeout { .. } | QmpError::Closed { .. }
        );
        if !is_late || Instant::now() >= deadline {
            return Err(NoAnswer::Qmp(error));
        }
    }
}

//! A QEMU that was started here to take a guest over, and that ends here unless it got it.

use std::ffi::{OsStr, OsString};
use std::os::unix::process::CommandExt;
use std::process::{Child, Command, ExitStatus, Stdio};
use std::time::{Duration, Instant};

use hotlift_qmp::{Qemu, QmpAddress, QmpError};
use tempfile::TempDir;

use super::guard::Guard;
use super::private_folder;
use crate::error::CommandError;
use crate::signals::Interrupt;

/// How long a QEMU may take until it answers on its QMP socket.
const START: Duration = Duration::from_secs(60);

/// How often it is looked whether it has ended instead.
const LOOK: Duration = Duration::from_millis(500);

/// How long it may take to end when it is asked to.
const END: Duration = Duration::from_secs(5);

/// A QEMU process. Killed when it goes out of scope, unless it was left running; ended by its guard if
/// this process is killed.
#[derive(Debug)]
pub struct Started {
    child: Child,
    guard: Option<Guard>,
    folder: Option<TempDir>,
    qmp: QmpAddress,
    has_own_qmp: bool,
    left: bool,
}

impl Started {
    /// Starts `command` with an incoming migration that waits for orders, and a QMP socket beside
    /// those that it may have.
    pub fn start(
        command: &[OsString],
        interrupt: &Interrupt,
    ) -> Result<(Self, Qemu), CommandError> {
        let arguments = waiting(command)?;
        let folder = private_folder()?;
        let socket = folder.path().join("qmp");
        let mut option = OsString::from("unix:");
        option.push(&socket);
        option.push(",server=on,wait=off");
        let (program, arguments) = arguments.split_first().ok_or(CommandError::NoQemu)?;
        let child = Command::new(program)
            .args(arguments)
            .arg("-qmp")
            .arg(option)
            .stdin(Stdio::null())
            // What reads this command's output is not to wait for the end of a QEMU that runs on.
            .stdout(std::io::stderr())
            // Away from the terminal's process group: Ctrl-C is for the command, and a QEMU that has
            // the guest is not ended by it.
            .process_group(0)
            .spawn()
            .map_err(|source| CommandError::Process {
                what: "QEMU",
                source,
            })?;
        let mut started = Self {
            child,
            guard: None,
            qmp: QmpAddress::Unix(socket),
            folder: Some(folder),
            has_own_qmp: names(command, "qmp").next().is_some(),
            left: false,
        };
        let guard = Guard::start(&started.qmp).map_err(|source| CommandError::Process {
            what: "hotlift guard",
            source,
        })?;
        started.guard = Some(guard);
        let qemu = started.connect(interrupt)?;
        Ok((started, qemu))
    }

    fn connect(&mut self, interrupt: &Interrupt) -> Result<Qemu, CommandError> {
        let deadline = Instant::now() + START;
        loop {
            match Qemu::connect(&self.qmp, LOOK) {
                Ok(qemu) => return Ok(qemu),
                Err(error) => {
                    if let Some(status) = self.has_ended() {
                        return Err(CommandError::QemuEnded { status });
                    }
                    if interrupt.is_raised() {
                        return Err(CommandError::Interrupted);
                    }
                    let is_late = matches!(
                        error,
                        QmpError::Connect { .. }
                            | QmpError::Timeout { .. }
                            | QmpError::Closed { .. }
                    );
                    if !is_late || Instant::now() >= deadline {
                        return Err(CommandError::qmp("destination", error));
                    }
                }
            }
        }
    }

    /// How it ended, if it has.
    pub fn has_ended(&mut self) -> Option<ExitStatus> {
        self.child.try_wait().ok().flatten()
    }

    /// Waits for its end, for a while.
    pub fn wait_end(&mut self) -> Option<ExitStatus> {
        let deadline = Instant::now() + END;
        loop {
            let status = self.has_ended();
            if status.is_some() || Instant::now() >= deadline {
                return status;
            }
            std::thread::sleep(crate::signals::TICK);
        }
    }

    /// Leaves it running for good; says where it is. Its QMP socket is kept for the operator if the
    /// command line gave none.
    pub fn leave(mut self) -> String {
        self.left = true;
        let pid = self.child.id();
        if self.has_own_qmp {
            return format!("process {pid}");
        }
        if let Some(folder) = self.folder.take() {
            let _ = folder.keep();
        }
        format!("process {pid}, QMP socket {}", self.qmp)
    }
}

impl Drop for Started {
    fn drop(&mut self) {
        if !self.left {
            let _ = self.child.kill();
            let _ = self.child.wait();
        }
    }
}

/// Options of a QEMU command line by the name `name`, with their place.
fn names<'a>(command: &'a [OsString], name: &'a str) -> impl Iterator<Item = usize> + 'a {
    command.iter().enumerate().filter_map(move |(index, word)| {
        let word = word.to_str()?;
        let option = word.strip_prefix("--").or_else(|| word.strip_prefix('-'))?;
        (option == name).then_some(index)
    })
}

/// `command` with `-incoming defer`.
///
/// # Errors
/// If it cannot be one that waits for a migration and is watched here.
pub fn waiting(command: &[OsString]) -> Result<Vec<OsString>, CommandError> {
    let problem = |problem: &str| {
        Err(CommandError::QemuCommand {
            problem: problem.to_owned(),
        })
    };
    if names(command, "daemonize").next().is_some() {
        return problem("-daemonize hides the process from hotlift; leave it out");
    }
    let mut arguments = command.to_vec();
    match names(command, "incoming").next() {
        Some(index)
            if command.get(index + 1).map(OsString::as_os_str) == Some(OsStr::new("defer")) => {}
        Some(_) => return problem("-incoming must be 'defer', or be left out"),
        None => arguments.extend(["-incoming".into(), "defer".into()]),
    }
    Ok(arguments)
}

#[cfg(test)]
mod tests {
    use super::*;

    fn words(line: &str) -> Vec<OsString> {
        line.split(' ').map(OsString::from).collect()
    }

    #[test]
    fn a_command_line_is_made_to_wait_and_one_that_cannot_is_refused() {
        let waits = words("qemu -m 1G -incoming defer");
        assert_eq!(waiting(&words("qemu -m 1G")).unwrap(), waits);
        assert_eq!(waiting(&waits).unwrap(), waits);
        for bad in [
            "qemu -incoming tcp::4444",
            "qemu --incoming",
            "qemu -daemonize",
        ] {
            assert!(waiting(&words(bad)).is_err(), "{bad}");
        }
    }
}

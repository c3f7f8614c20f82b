//! A QEMU that was started here to take a guest over, and that ends here unless it got it.

use std::ffi::{OsStr, OsString};
use std::os::unix::process::CommandExt;
use std::path::PathBuf;
use std::process::{Child, Command, ExitStatus, Stdio};
use std::sync::atomic::{AtomicBool, Ordering};
use std::sync::{Arc, Mutex, MutexGuard, PoisonError};
use std::time::{Duration, Instant};

use hotlift_qmp::{Qemu, QmpAddress, QmpError};

use super::guard::Guard;
use super::private_folder;
use crate::error::CommandError;
use crate::signals::Interrupt;

/// How long a QEMU may take until it answers on its QMP socket.
const START: Duration = Duration::from_secs(60);

/// How often it is looked whether it has ended instead.
const LOOK: Duration = Duration::from_millis(500);

/// A QEMU process. Killed when it goes out of scope, and ended by its guard if this process is killed, unless it may
/// have its guest ([`Custody::give_up`]) or was left running.
#[derive(Debug)]
pub struct Started {
    child: Child,
    custody: Custody,
    /// Made for the QMP socket; gone from here when it is to stay.
    folder: Option<PathBuf>,
    socket: PathBuf,
    has_own_qmp: bool,
}

/// Whether this process may still end a QEMU that it has started. Clones are of the same QEMU.
#[derive(Debug, Clone, Default)]
pub struct Custody(Arc<Bond>);

#[derive(Debug, Default)]
struct Bond {
    is_given_up: AtomicBool,
    guard: Mutex<Option<Guard>>,
}

impl Custody {
    /// The QEMU may run its guest from now on: neither this process nor the guard ends it any more, whatever happens
    /// to either.
    pub fn give_up(&self) {
        self.0.is_given_up.store(true, Ordering::SeqCst);
        if let Some(guard) = &mut *self.guard() {
            guard.dismiss();
        }
    }

    /// Whether it was given up.
    pub fn is_given_up(&self) -> bool {
        self.0.is_given_up.load(Ordering::SeqCst)
    }

    /// The QEMU has said itself that it has no guest and never will.
    fn take_back(&self) {
        self.0.is_given_up.store(false, Ordering::SeqCst);
    }

    fn guard(&self) -> MutexGuard<'_, Option<Guard>> {
        self.0.guard.lock().unwrap_or_else(PoisonError::into_inner)
    }
}

impl Started {
    /// Starts `command` with an incoming migration that waits for orders, and a QMP socket beside
    /// those that it may have.
    pub fn start(
        command: &[OsString],
        interrupt: &Interrupt,
    ) -> Result<(Self, Qemu), CommandError> {
        let arguments = waiting(command)?;
        let (folder, socket) = place()?;
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
            custody: Custody::default(),
            folder,
            socket,
            has_own_qmp: names(command, "qmp").next().is_some(),
        };
        let guard = Guard::start(&started.qmp()).map_err(|source| CommandError::Process {
            what: "hotlift guard",
            source,
        })?;
        *started.custody.guard() = Some(guard);
        let qemu = started.connect(interrupt)?;
        Ok((started, qemu))
    }

    /// Where it is spoken to.
    fn qmp(&self) -> QmpAddress {
        QmpAddress::Unix(self.socket.clone())
    }

    /// To be given up when it may run its guest.
    pub fn custody(&self) -> Custody {
        self.custody.clone()
    }

    fn connect(&mut self, interrupt: &Interrupt) -> Result<Qemu, CommandError> {
        let deadline = Instant::now() + START;
        loop {
            match Qemu::connect(&self.qmp(), LOOK) {
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

    /// Leaves it running for good; says where it is. Its QMP socket is kept for the operator if the
    /// command line gave none.
    pub fn leave(mut self) -> String {
        self.custody.give_up();
        let pid = self.child.id();
        if self.has_own_qmp {
            self.remove_socket();
            return format!("process {pid}");
        }
        format!("process {pid}, QMP socket {}", self.qmp())
    }

    /// It has said that it has no guest and never will: it may be ended after all.
    pub fn take_back(&self) {
        self.custody.take_back();
    }

    fn remove_socket(&mut self) {
        let _ = std::fs::remove_file(&self.socket);
        if let Some(folder) = self.folder.take() {
            let _ = std::fs::remove_dir(folder);
        }
    }
}

impl Drop for Started {
    fn drop(&mut self) {
        if !self.custody.is_given_up() {
            let _ = self.child.kill();
            let _ = self.child.wait();
            self.remove_socket();
        }
        drop(self.custody.guard().take());
    }
}

/// Where QEMU makes the QMP socket that may outlive this command: a folder made for it, and the path. QEMU removes its
/// socket when it ends, but no folder. So there is only one where the file creation mask would let others connect.
fn place() -> Result<(Option<PathBuf>, PathBuf), CommandError> {
    let status = std::fs::read_to_string("/proc/self/status").unwrap_or_default();
    let mask = status
        .lines()
        .find_map(|line| line.strip_prefix("Umask:"))
        .and_then(|mask| u32::from_str_radix(mask.trim(), 8).ok());
    if mask.is_some_and(|mask| mask & 0o022 == 0o022) {
        let name = format!("hotlift-{:016x}.qmp", fastrand::u64(..));
        return Ok((None, std::env::temp_dir().join(name)));
    }
    let folder = private_folder()?.keep();
    let socket = folder.join("qmp");
    Ok((Some(folder), socket))
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

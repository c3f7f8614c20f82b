//! A QEMU that this process started for an incoming guest. This process ends QEMU unless QEMU receives the guest.

use std::ffi::{OsStr, OsString};
use std::fs::{self, DirBuilder};
use std::io;
use std::os::fd::AsFd;
use std::os::unix::ffi::OsStrExt;
use std::os::unix::fs::{DirBuilderExt, MetadataExt};
use std::os::unix::process::CommandExt;
use std::path::{Path, PathBuf};
use std::process::{Child, Command, ExitStatus, Stdio};
use std::sync::atomic::{AtomicBool, Ordering};
use std::sync::{Arc, Mutex, MutexGuard};
use std::time::{Duration, Instant};

use hotlift_qmp::{Qemu, QmpAddress};
use hotlift_terminal::error::TerminalError;
use hotlift_terminal::signals::{Interrupt, no_folder};
use rustix::fs::Access;
use rustix::io::Errno;
use rustix::process::{Pid, Signal, kill_process_group};

use crate::error::{QemuError, at_destination};
use crate::first_answer::{self, NoAnswer};
use crate::guard::Guard;
use crate::stderr::{ErrorOutput, Streams};
use hotlift_mem::{end_of_process, lock, wait_readable};

/// Timeout for the end of a killed QEMU: the kernel delays it while QEMU waits for hanging storage. This timeout must be below
/// the default of `settle-timeout`, for which the source waits for the result.
pub(crate) const END: Duration = Duration::from_secs(20);

/// A QEMU process. Dropping this value kills QEMU. If this process is killed, the guard process ends QEMU. After
/// [`Custody::release`] QEMU may have its guest: then neither the drop nor the guard ends QEMU.
#[derive(Debug)]
pub struct Started {
    child: Child,
    custody: Custody,
    /// QEMU's QMP socket, which may remain after this command.
    socket: PathBuf,
    has_own_qmp: bool,
    errors: ErrorOutput,
}

/// Right to end a QEMU that this process has started. All clones share one state.
#[derive(Debug, Clone, Default)]
pub struct Custody(Arc<GuardState>);

#[derive(Debug, Default)]
struct GuardState {
    is_released: AtomicBool,
    guard: Mutex<Option<Guard>>,
}

impl Custody {
    /// Ends the custody. Must be called before QEMU may run its guest: from now on neither a drop nor the guard ends QEMU.
    pub fn release(&self) {
        self.0.is_released.store(true, Ordering::SeqCst);
        if let Some(guard) = &mut *self.guard() {
            guard.dismiss();
        }
    }

    /// Returns true after [`Self::release`], until the custody is taken back.
    pub fn is_released(&self) -> bool {
        self.0.is_released.load(Ordering::SeqCst)
    }

    /// Restores the custody, after QEMU itself has reported that it has no guest and never will.
    fn take_back(&self) {
        self.0.is_released.store(false, Ordering::SeqCst);
    }

    fn guard(&self) -> MutexGuard<'_, Option<Guard>> {
        lock(&self.0.guard)
    }
}

impl Started {
    /// Starts `command` with `-incoming defer`, and with one more QMP socket than its command line has. Removes `folder` when
    /// this process ends, even if it is killed.
    ///
    /// # Errors
    /// If QEMU cannot be started, ends, or does not answer.
    pub fn start(
        command: &[OsString],
        folder: &Path,
        interrupt: &Interrupt,
    ) -> Result<(Self, Qemu), QemuError> {
        let arguments = waiting(command)?;
        let socket = place()?;
        let streams = Streams::make().map_err(TerminalError::process("a pipe for QEMU's words"))?;
        let (program, arguments) = arguments.split_first().ok_or(QemuError::NoQemu)?;
        let child = Command::new(program)
            .args(arguments)
            .args(first_answer::qmp_arguments(&socket))
            .stdin(Stdio::null())
            .stdout(streams.stdout)
            .stderr(streams.stderr)
            // QEMU leaves the terminal's process group. Ctrl-C must reach only this command, and must not end a QEMU that has
            // the guest.
            .process_group(0)
            .spawn()
            .map_err(|source| not_run(program, source))?;
        let mut started = Self {
            child,
            custody: Custody::default(),
            socket,
            has_own_qmp: names(command, "qmp").next().is_some(),
            errors: streams.errors,
        };
        let guard = Guard::start(&started.qmp(), folder)
            .map_err(TerminalError::process("hotlift guard"))?;
        *started.custody.guard() = Some(guard);
        let qemu = started.connect(interrupt)?;
        Ok((started, qemu))
    }

    /// Returns the address of the QMP socket that this process uses.
    fn qmp(&self) -> QmpAddress {
        QmpAddress::Unix(self.socket.clone())
    }

    /// Returns the custody (the right to end QEMU), which must be released before QEMU may run its guest.
    pub fn custody(&self) -> Custody {
        self.custody.clone()
    }

    fn connect(&mut self, interrupt: &Interrupt) -> Result<Qemu, QemuError> {
        first_answer::connect(&mut self.child, &self.socket, interrupt).map_err(|error| match error
        {
            NoAnswer::Ended(status) => match self.last_errors() {
                Some(errors) => QemuError::Ended { status, errors },
                None => QemuError::EndedAtStart { status },
            },
            NoAnswer::Interrupted => TerminalError::Interrupted.into(),
            NoAnswer::Qmp(error) => at_destination(error),
        })
    }

    /// Returns the exit status of the started process; `None` while it runs.
    pub fn has_ended(&mut self) -> Option<ExitStatus> {
        self.child.try_wait().ok().flatten()
    }

    /// Returns the last errors of a QEMU that has ended, in one line; `None` if it printed none.
    pub fn last_errors(&self) -> Option<String> {
        self.errors.last()
    }

    /// Leaves QEMU running, and returns its location for the operator. If QEMU's command line has no QMP socket, this process's
    /// socket is kept for the operator.
    pub fn keep_running(self) -> String {
        self.custody.release();
        if self.has_own_qmp {
            self.remove_socket();
        }
        self.place()
    }

    /// Returns the location of this QEMU, as text for the operator.
    pub fn place(&self) -> String {
        let pid = self.child.id();
        match self.kept_qmp() {
            Some(qmp) => format!("process {pid}, QMP socket {qmp}"),
            None => format!("process {pid}"),
        }
    }

    /// Returns the QMP socket that remains for the operator; `None` if the command line has its own.
    pub fn kept_qmp(&self) -> Option<QmpAddress> {
        (!self.has_own_qmp).then(|| self.qmp())
    }

    /// Kills QEMU and its children, regardless of the custody, and waits for the end of the started process.
    ///
    /// # Errors
    /// If the process does not end within 20 seconds.
    pub fn end(&mut self) -> io::Result<ExitStatus> {
        let deadline = Instant::now() + END;
        let pid = Pid::from_child(&self.child);
        // The process leads its own group, which also includes a QEMU started by a wrapper script.
        let _ = kill_process_group(pid, Signal::KILL);
        if self.child.try_wait()?.is_none() {
            let end = end_of_process(&self.child)?;
            wait_readable(&[end.as_fd()], Some(deadline));
        }
        let ended = self.child.try_wait()?;
        ended.ok_or_else(|| io::ErrorKind::TimedOut.into())
    }

    /// Restores the custody, after QEMU has reported that it has no guest and never will: QEMU may be ended again.
    pub fn take_back(&self) {
        self.custody.take_back();
    }

    fn remove_socket(&self) {
        let _ = fs::remove_file(&self.socket);
    }
}

impl Drop for Started {
    fn drop(&mut self) {
        if !self.custody.is_released() {
            let _ = self.child.kill();
            let _ = self.child.wait();
            self.remove_socket();
            self.errors.finish();
        } else if self.has_ended().is_some() {
            // A killed QEMU does not remove its socket.
            self.remove_socket();
        }
        drop(self.custody.guard().take());
    }
}

/// Returns a path for the QMP socket of a QEMU that may run longer than this command. QEMU removes its socket when it ends, but
/// not the folder of the socket. So a folder is used only if the umask would let other users connect. All QEMUs of this user
/// share that folder. The folder is never removed, because another command may be about to use it.
fn place() -> Result<PathBuf, QemuError> {
    let name = format!("hotlift-{:016x}.qmp", fastrand::u64(..));
    let status = fs::read_to_string("/proc/self/status").unwrap_or_default();
    let mask = status
        .lines()
        .find_map(|line| line.strip_prefix("Umask:"))
        .and_then(|mask| u32::from_str_radix(mask.trim(), 8).ok());
    if mask.is_some_and(|mask| mask & 0o022 == 0o022) {
        return Ok(std::env::temp_dir().join(name));
    }
    Ok(own_folder(&std::env::temp_dir())
        .map_err(no_folder)?
        .join(name))
}

/// Returns a folder in `place` that only this user can enter. Each call returns the same folder.
fn own_folder(place: &Path) -> io::Result<PathBuf> {
    let user = rustix::process::geteuid().as_raw();
    let folder = place.join(format!("hotlift-{user}"));
    match DirBuilder::new().mode(0o700).create(&folder) {
        Err(error) if error.kind() != io::ErrorKind::AlreadyExists => return Err(error),
        _ => {}
    }
    // Another user may have created a folder with this name.
    let there = fs::symlink_metadata(&folder)?;
    if !there.is_dir() || there.uid() != user || there.mode() & 0o077 != 0 {
        let problem = format!("{} can be accessed by other users", folder.display());
        return Err(io::Error::new(io::ErrorKind::PermissionDenied, problem));
    }
    Ok(folder)
}

/// Returns the positions of the option `name` in a QEMU command line; the option may occur several times.
fn names<'a>(command: &'a [OsString], name: &'a str) -> impl Iterator<Item = usize> + 'a {
    command.iter().enumerate().filter_map(move |(index, word)| {
        let word = word.to_str()?;
        let option = word.strip_prefix("--").or_else(|| word.strip_prefix('-'))?;
        (option == name).then_some(index)
    })
}

/// Returns true if QEMU was started with `-S`: then it runs a guest only after a `cont`. Returns `None` if unknown. `command`
/// is the command line if this process started QEMU. Otherwise the command line of the process at the QMP socket is read.
pub fn waits_for_cont(qemu: &mut Qemu, command: Option<&[OsString]>) -> Option<bool> {
    let line = qemu.client().peer().and_then(|pid| {
        let line = fs::read(format!("/proc/{pid}/cmdline")).ok()?;
        let words = line.split(|byte| *byte == 0);
        let words: Vec<OsString> = words.map(|word| OsStr::from_bytes(word).into()).collect();
        // The process may be a manager that created the socket for QEMU, not QEMU itself.
        let is_qemu = names(&words, "incoming").next().is_some();
        is_qemu.then_some(words)
    });
    let words = line.as_deref().or(command)?;
    Some(names(words, "S").next().is_some())
}

/// Returns `command` with `-incoming defer` added.
///
/// # Errors
/// If the command line cannot be used for an incoming migration that this process controls.
pub fn waiting(command: &[OsString]) -> Result<Vec<OsString>, QemuError> {
    let problem = |problem: &str| {
        Err(QemuError::Command {
            problem: problem.to_owned(),
        })
    };
    if names(command, "daemonize").next().is_some() {
        return problem("-daemonize hides the process from hotlift; remove it");
    }
    let mut arguments = command.to_vec();
    match names(command, "incoming").next() {
        Some(index)
            if command.get(index + 1).map(OsString::as_os_str) == Some(OsStr::new("defer")) => {}
        Some(_) => return problem("-incoming must be 'defer' or absent"),
        None => arguments.extend(["-incoming".into(), "defer".into()]),
    }
    Ok(arguments)
}

/// Checks that the program of `command` exists and can be executed. Searches the folders in `PATH` for it, as the start does.
///
/// # Errors
/// If the program does not exist, or is not executable.
pub fn find(command: &[OsString]) -> Result<(), QemuError> {
    let program = command.first().ok_or(QemuError::NoQemu)?;
    let paths = std::env::var_os("PATH").unwrap_or_else(|| "/bin:/usr/bin".into());
    found(program, &paths).map_err(|source| not_run(program, source))
}

/// Searches as `execvp` does: a name without a folder is searched in the folders of `paths`.
fn found(program: &OsStr, paths: &OsStr) -> io::Result<()> {
    let runs = |path: &Path| -> io::Result<()> {
        if fs::metadata(path)?.is_dir() {
            return Err(Errno::ACCESS.into());
        }
        Ok(rustix::fs::access(path, Access::EXEC_OK)?)
    };
    if program.as_bytes().contains(&b'/') {
        return runs(Path::new(program));
    }
    let mut failed = Errno::NOENT.into();
    for folder in std::env::split_paths(paths) {
        match runs(&folder.join(program)) {
            Ok(()) => return Ok(()),
            Err(error) if error.kind() == io::ErrorKind::PermissionDenied => failed = error,
            Err(_) => {}
        }
    }
    Err(failed)
}

fn not_run(program: &OsStr, source: io::Error) -> QemuError {
    let program = program.into();
    QemuError::Program { program, source }
}

#[cfg(test)]
mod tests {
    use std::fs::Permissions;
    use std::os::unix::fs::PermissionsExt;

    use super::*;

    #[test]
    fn the_runtime_folder_is_refused_if_other_users_can_enter_it() {
        let place = tempfile::tempdir().unwrap();
        let folder = own_folder(place.path()).unwrap();
        assert_eq!(fs::metadata(&folder).unwrap().mode() & 0o777, 0o700);
        assert_eq!(own_folder(place.path()).unwrap(), folder);
        fs::set_permissions(&folder, Permissions::from_mode(0o770)).unwrap();
        assert!(own_folder(place.path()).is_err(), "others can enter it");
        fs::remove_dir(&folder).unwrap();
        let elsewhere = tempfile::tempdir().unwrap();
        std::os::unix::fs::symlink(elsewhere.path(), &folder).unwrap();
        assert!(own_folder(place.path()).is_err(), "it is elsewhere");
    }

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

    #[test]
    fn a_program_is_found_on_path_and_only_if_executable() {
        let place = tempfile::tempdir().unwrap();
        let of = |name: &str| place.path().join(name);
        fs::write(of("plain"), "").unwrap();
        fs::set_permissions(of("plain"), Permissions::from_mode(0o644)).unwrap();
        fs::write(of("program"), "").unwrap();
        fs::set_permissions(of("program"), Permissions::from_mode(0o755)).unwrap();
        fs::create_dir(of("folder")).unwrap();
        let paths = std::env::join_paths([Path::new("/nowhere"), place.path()]).unwrap();
        let kind = |program: &OsStr| found(program, &paths).map_err(|error| error.kind());
        for (name, expected) in [
            ("program", Ok(())),
            ("plain", Err(io::ErrorKind::PermissionDenied)),
            ("folder", Err(io::ErrorKind::PermissionDenied)),
            ("missing", Err(io::ErrorKind::NotFound)),
        ] {
            assert_eq!(kind(OsStr::new(name)), expected, "{name}");
            assert_eq!(kind(of(name).as_os_str()), expected, "{name} by its path");
        }
    }
}

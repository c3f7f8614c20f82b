//! SIGINT, SIGTERM and SIGHUP set a flag, and make a descriptor readable, which ends waits. So the command ends in the normal
//! way, and cleans up.

use std::fs::Permissions;
use std::io::{self, PipeReader, PipeWriter};
use std::os::fd::{AsFd, BorrowedFd, OwnedFd};
use std::os::unix::fs::PermissionsExt;
use std::panic::resume_unwind;
use std::path::{Path, PathBuf};
use std::sync::atomic::{AtomicBool, Ordering};
use std::sync::{Arc, Condvar, Mutex};
use std::thread;
use std::time::{Duration, Instant};

use hotlift::Control;
use rustix::event::{EventfdFlags, eventfd};
use signal_hook::consts::{SIGHUP, SIGINT, SIGTERM, SIGXFSZ};
use signal_hook::iterator::Signals;
use tempfile::TempDir;

use crate::error::TerminalError;
use crate::output::{self, warn};
use hotlift_mem::{lock, wait_readable};

/// Folders that [`end`] must remove. If the process ends in another way, the drop of [`OwnFolder`] removes its folder.
static FOLDERS: Mutex<Vec<PathBuf>> = Mutex::new(Vec::new());

/// Folder of this process. The folder is removed on drop, and by a second signal, which ends the process at once.
#[derive(Debug)]
pub struct OwnFolder(TempDir);

impl OwnFolder {
    /// Creates a folder for sockets. Only this user can enter it.
    pub fn private() -> Result<Self, TerminalError> {
        let mut builder = tempfile::Builder::new();
        builder
            .prefix("hotlift-")
            .permissions(Permissions::from_mode(0o700));
        let folder = builder.tempdir().map_err(no_folder)?;
        let mut folders = lock(&FOLDERS);
        folders.push(folder.path().to_owned());
        drop(folders);
        Ok(Self(folder))
    }

    /// Returns the path of the folder.
    pub fn path(&self) -> &Path {
        self.0.path()
    }
}

impl Drop for OwnFolder {
    fn drop(&mut self) {
        // The folder leaves the list before it is removed: after the removal, any user can create a folder with this name.
        let mut folders = lock(&FOLDERS);
        folders.retain(|folder| folder != self.0.path());
    }
}

/// Returns the error that a folder for sockets cannot be created.
pub fn no_folder(source: io::Error) -> TerminalError {
    TerminalError::Process {
        what: "a folder for sockets",
        source,
    }
}

/// Exit code and message for the end of the process by a second signal; `None` for exit code 130 without a message.
static SECOND_SIGNAL: Mutex<Option<(u8, String)>> = Mutex::new(None);

/// Ends the process at once, after removing its folders.
fn end() -> ! {
    let folders = lock(&FOLDERS);
    for folder in folders.iter() {
        // Another thread may remove the same folder at this time.
        let _ = std::fs::remove_dir_all(folder);
    }
    drop(folders);
    let mut final_message = lock(&SECOND_SIGNAL);
    let Some((code, words)) = final_message.take() else {
        signal_hook::low_level::exit(130);
    };
    warn!("{words}");
    output::finish();
    signal_hook::low_level::exit(code.into())
}

/// Makes a write beyond the file size limit (`ulimit -f`) fail with EFBIG. Otherwise SIGXFSZ would end the process without a
/// message and without cleanup.
///
/// # Errors
/// If the signal cannot be caught.
pub fn survive_file_size_limit() -> Result<(), TerminalError> {
    // The flag is not used: the failed write itself reports the error.
    let caught = signal_hook::flag::register(SIGXFSZ, Arc::default());
    caught
        .map(|_| ())
        .map_err(TerminalError::process("signal handlers"))
}

/// Flag that the first signal sets. A second SIGINT or SIGTERM ends the process at once. SIGHUP does not count as a first or
/// second signal, because a closing terminal sends SIGHUP more than once.
#[derive(Clone)]
pub struct Interrupt(Arc<Flags>);

struct Flags {
    raised: AtomicBool,
    /// True after SIGINT or SIGTERM.
    ordered: AtomicBool,
    /// Locked by a wait from its check of the flags until it sleeps, so that no change is missed.
    waits: Mutex<()>,
    changed: Condvar,
    /// Readable while `raised` is true.
    wake_fd: OwnedFd,
}

impl Flags {
    fn new() -> io::Result<Self> {
        Ok(Self {
            raised: AtomicBool::default(),
            ordered: AtomicBool::default(),
            waits: Mutex::default(),
            changed: Condvar::default(),
            wake_fd: eventfd(0, EventfdFlags::NONBLOCK | EventfdFlags::CLOEXEC)?,
        })
    }

    fn raise(&self) {
        self.set(&self.raised);
        let _ = rustix::io::write(&self.wake_fd, &1_u64.to_ne_bytes());
    }

    fn set(&self, flag: &AtomicBool) {
        flag.store(true, Ordering::Release);
        drop(lock(&self.waits));
        self.changed.notify_all();
    }

    /// Waits until a signal arrives or `time` has passed, and returns the cause. Returns `None` if `over` is set first.
    fn wait(&self, time: Duration, over: &AtomicBool) -> Option<Cause> {
        let is_set = |flag: &AtomicBool| flag.load(Ordering::Acquire);
        let waits = |(): &mut ()| !is_set(&self.raised) && !is_set(over);
        let woken = self
            .changed
            .wait_timeout_while(lock(&self.waits), time, waits);
        drop(woken);
        match is_set(&self.raised) {
            true => Some(Cause::Signal),
            false => (!is_set(over)).then_some(Cause::Deadline),
        }
    }
}

/// Reason for which work should end early.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub enum Cause {
    /// A signal arrived.
    Signal,
    /// The deadline passed.
    Deadline,
}

/// Ends a watch when dropped: sets the flag, and wakes the watching thread.
struct Ends<'a>(&'a AtomicBool, &'a Flags);

impl Drop for Ends<'_> {
    fn drop(&mut self) {
        self.1.set(self.0);
    }
}

impl Interrupt {
    /// Starts to catch the signals. SIGHUP stays ignored if the process was started so (`nohup`).
    pub fn catch() -> Result<Self, TerminalError> {
        let failed = TerminalError::process("signal handlers");
        let this = Self(Arc::new(Flags::new().map_err(failed)?));
        let mut caught = vec![SIGINT, SIGTERM];
        caught.extend((!is_ignored(SIGHUP)).then_some(SIGHUP));
        let mut signals = Signals::new(caught).map_err(failed)?;
        let flags = Arc::clone(&this.0);
        let watch = move || {
            for signal in signals.forever() {
                if signal != SIGHUP && flags.ordered.swap(true, Ordering::Relaxed) {
                    end();
                }
                flags.raise();
            }
        };
        thread::Builder::new()
            .name("signals".to_owned())
            .spawn(watch)
            .map_err(failed)?;
        Ok(this)
    }

    /// Returns true after a signal, until [`Self::forget`].
    pub fn is_raised(&self) -> bool {
        self.0.raised.load(Ordering::Acquire)
    }

    /// Returns a descriptor that becomes readable when a signal arrives.
    pub fn wake_fd(&self) -> BorrowedFd<'_> {
        self.0.wake_fd.as_fd()
    }

    /// Returns true after SIGINT or SIGTERM, until [`Self::forget`]: the process must end, even if data is lost.
    pub fn is_ordered(&self) -> bool {
        self.0.ordered.load(Ordering::Relaxed)
    }

    /// Resets the flag after a signal was handled.
    pub fn forget(&self) {
        let _ = rustix::io::read(&self.0.wake_fd, &mut [0; 8]);
        self.0.raised.store(false, Ordering::Release);
        self.0.ordered.store(false, Ordering::Relaxed);
    }

    /// Sets the message on standard error, and the exit code, for the end of the process by a second signal. Used while the
    /// process would leave something that needs the operator. `None` restores the default.
    pub fn set_second_signal(&self, final_message: Option<(u8, String)>) {
        *lock(&SECOND_SIGNAL) = final_message;
    }

    /// Has the same effect as a signal.
    pub fn raise(&self) {
        self.0.raise();
    }

    /// Runs `work`. Calls `act` once if a signal arrives, or `limit` passes, before `work` returns.
    pub fn watching<T>(
        &self,
        limit: Option<Duration>,
        act: impl FnOnce(Cause) + Send,
        work: impl FnOnce() -> T,
    ) -> T {
        let done = AtomicBool::new(false);
        thread::scope(|scope| {
            scope.spawn(|| {
                if let Some(cause) = self.0.wait(limit.unwrap_or(Duration::MAX), &done) {
                    act(cause);
                }
            });
            // Also ends the watch if `work` panics; otherwise the watching thread would wait for a signal.
            let _ends = Ends(&done, &self.0);
            work()
        })
    }

    /// Runs `work`. Cancels `control` if a signal arrives before `work` returns.
    pub fn cancelling<T>(&self, control: &Control, work: impl FnOnce() -> T) -> T {
        self.watching(None, |_| control.cancel(), work)
    }

    /// Waits for a signal, until one of `others` is readable or closed, or until `deadline`. Returns true after a signal.
    pub fn wait(&self, others: &[BorrowedFd<'_>], deadline: Option<Instant>) -> bool {
        wait_readable(&[&[self.wake_fd()], others].concat(), deadline)
    }

    /// Sleeps for `time` (`None`: without a limit), or until a signal. Returns true after a signal.
    pub fn sleep(&self, time: Option<Duration>) -> bool {
        self.wait(&[], time.map(|time| Instant::now() + time))
    }
}

/// Runs `work` in a new thread, and `watch` in this one. `watch` receives a descriptor that is readable after `work` has ended.
///
/// # Errors
/// If the system cannot create a pipe.
pub fn run_alongside<R: Send, T>(
    work: impl FnOnce() -> R + Send,
    watch: impl FnOnce(BorrowedFd<'_>) -> T,
) -> Result<(R, T), TerminalError> {
    let (ended, ends) = end_of_thread()?;
    Ok(thread::scope(|scope| {
        let worker = scope.spawn(|| {
            let _ends = ends;
            work()
        });
        let watched = watch(ended.as_fd());
        let worked = worker.join().unwrap_or_else(|panic| resume_unwind(panic));
        (worked, watched)
    }))
}

/// Creates a pipe whose read end becomes readable when the write end is dropped. So a thread that owns the write end signals
/// its own end.
///
/// # Errors
/// If the system cannot create a pipe.
pub fn end_of_thread() -> Result<(PipeReader, PipeWriter), TerminalError> {
    io::pipe().map_err(TerminalError::process("a pipe"))
}

/// Returns true if the process was started with `signal` ignored.
fn is_ignored(signal: i32) -> bool {
    let status = std::fs::read_to_string("/proc/self/status").unwrap_or_default();
    let mask = status
        .lines()
        .find_map(|line| line.strip_prefix("SigIgn:"))
        .and_then(|mask| u64::from_str_radix(mask.trim(), 16).ok());
    mask.is_some_and(|mask| mask >> (signal - 1) & 1 == 1)
}

#[cfg(test)]
mod tests {
    use std::sync::mpsc::channel;

    use super::*;

    #[test]
    fn a_task_sees_its_limit_and_a_signal_and_a_poll_sees_its_end() {
        let interrupt = Interrupt::catch().unwrap();
        for (limit, expected) in [
            (Some(Duration::ZERO), Cause::Deadline),
            (None, Cause::Signal),
        ] {
            let (sender, receiver) = channel();
            let act = move |cause| sender.send(cause).unwrap();
            if expected == Cause::Signal {
                interrupt.raise();
            }
            let cause = interrupt.watching(limit, act, || receiver.recv());
            assert_eq!(cause, Ok(expected));
        }
        interrupt.watching(None, |_| (), || assert!(interrupt.wait(&[], None)));
        let seen = run_alongside(|| 7, |ended| wait_readable(&[ended], None));
        assert_eq!(seen.unwrap(), (7, true));
    }
}

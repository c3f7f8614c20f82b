//! Threads of a migration: named as `top -H` shows them, and a panic in one is an error of the migration.
//!
//! A migration runs inside the process that holds the guest. A panic that went on would end both.

use std::panic::{AssertUnwindSafe, catch_unwind};
use std::sync::Mutex;
use std::thread;

use hotlift_mem::thread_cpu_time;
use rustix::process::setpriority_process;

use crate::error::MigrationError;
use crate::figures::ThreadCpu;
use crate::lock::lock;

/// A thread that was started.
pub(crate) struct Running<'scope, T>(thread::ScopedJoinHandle<'scope, Option<T>>);

/// Starts a thread with a name of up to 15 bytes.
pub(crate) fn spawn<'scope, T: Send + 'scope>(
    scope: &'scope thread::Scope<'scope, '_>,
    name: String,
    work: impl FnOnce() -> T + Send + 'scope,
) -> Result<Running<'scope, T>, MigrationError> {
    thread::Builder::new()
        .name(name.clone())
        .spawn_scoped(scope, || catch_unwind(AssertUnwindSafe(work)).ok())
        .map(Running)
        .map_err(|source| MigrationError::Thread { name, source })
}

impl<T> Running<'_, T> {
    /// Waits for its end; what it has come to.
    ///
    /// # Errors
    /// [`MigrationError::Panicked`].
    pub(crate) fn join(self) -> Result<T, MigrationError> {
        let name = self.0.thread().name().unwrap_or_default().to_owned();
        let ended = self.0.join().ok().flatten();
        ended.ok_or(MigrationError::Panicked { thread: name })
    }
}

/// The threads of one migration. Each records its CPU time at its end.
#[derive(Debug, Default)]
pub(crate) struct ThreadTimes(Mutex<Vec<ThreadCpu>>);

impl ThreadTimes {
    /// Starts a thread with a name of up to 15 bytes. `failed` gets the error of its work, and a panic in it as one.
    pub(crate) fn spawn<'scope>(
        &'scope self,
        scope: &'scope thread::Scope<'scope, '_>,
        name: String,
        failed: &'scope (dyn Fn(MigrationError) + Sync),
        work: impl FnOnce() -> Result<(), MigrationError> + Send + 'scope,
    ) -> Result<(), MigrationError> {
        let started = spawn(scope, name.clone(), move || {
            let ended = caught(work);
            self.book(&name);
            if let Err(error) = ended {
                failed(error);
            }
        });
        started.map(drop)
    }

    /// Records the calling thread's CPU time.
    pub(crate) fn book(&self, name: &str) {
        lock(&self.0).push(ThreadCpu {
            name: name.to_owned(),
            cpu_s: thread_cpu_time().as_secs_f64(),
        });
    }

    /// The CPU times that were recorded so far, in the order of the names' numbers.
    pub(crate) fn read(&self) -> Vec<ThreadCpu> {
        let mut threads = lock(&self.0).clone();
        threads.sort_by(|a, b| (a.name.len(), &a.name).cmp(&(b.name.len(), &b.name)));
        threads
    }
}

/// Does a part of this thread's work, whose panic is its error.
pub(crate) fn caught<T, E: From<MigrationError>>(
    work: impl FnOnce() -> Result<T, E>,
) -> Result<T, E> {
    catch_unwind(AssertUnwindSafe(work))
        .unwrap_or_else(|_| Err(MigrationError::panicked_here().into()))
}

/// What a thread that nobody waits for is set to, of 0 to 19: next to one that somebody waits for it gets a tenth of a core,
/// and it still gets on where the guest's vCPUs take all that they can.
const NICE: i32 = 10;

/// From now on this thread gives way to others that want its core. One that may not change its priority keeps it.
pub(crate) fn give_way() {
    // To Linux a priority is a thread's, and without an id it is the caller's.
    let _ = setpriority_process(None, NICE);
}

/// A thread whose work becomes such that nobody waits for it.
#[derive(Debug, Default)]
pub(crate) struct Yielding {
    gives_way: bool,
}

impl Yielding {
    /// The thread gives way from the first time on that `unawaited` is true.
    pub(crate) fn once(&mut self, unawaited: bool) {
        if unawaited && !self.gives_way {
            self.gives_way = true;
            give_way();
        }
    }
}

/// Does something if its thread panics. The other threads of a migration wait for each other, and one
/// that went without a word would be waited for without end.
pub(crate) struct OnPanic<F: Fn()>(pub F);

impl<F: Fn()> Drop for OnPanic<F> {
    fn drop(&mut self) {
        if thread::panicking() {
            (self.0)();
        }
    }
}

#[cfg(test)]
mod tests {
    use rustix::process::getpriority_process;

    use super::*;

    #[test]
    fn an_error_and_a_panic_of_a_thread_are_reported_and_its_cpu_time_is_recorded() {
        let (threads, errors) = (ThreadTimes::default(), Mutex::new(Vec::new()));
        let failed = |error: MigrationError| lock(&errors).push(error.to_string());
        let works = [
            || Ok(()),
            || Err(MigrationError::Cancelled),
            || panic!("a thread's"),
        ];
        thread::scope(|scope| {
            for (number, work) in works.into_iter().enumerate() {
                let name = format!("relay/recv_{number}");
                threads.spawn(scope, name, &failed, work).unwrap();
            }
        });
        let mut errors = errors.into_inner().unwrap();
        errors.sort();
        assert_eq!(errors.len(), 2);
        let cancelled = MigrationError::Cancelled.to_string();
        assert!(errors.contains(&cancelled), "{errors:?}");
        assert!(errors.iter().any(|error| error.contains("relay/recv_2")));
        let names = threads.read().into_iter().map(|thread| thread.name);
        assert!(names.eq((0..3).map(|number| format!("relay/recv_{number}"))));
    }

    #[test]
    fn only_the_thread_that_says_so_gives_way() {
        let here = getpriority_process(None).unwrap();
        let there = thread::spawn(move || {
            let mut yielding = Yielding::default();
            yielding.once(false);
            assert_eq!(getpriority_process(None).unwrap(), here);
            yielding.once(true);
            getpriority_process(None).unwrap()
        });
        assert_eq!(there.join().unwrap(), here.max(NICE));
        assert_eq!(getpriority_process(None).unwrap(), here);
    }
}

//! Threads of a migration: named as `top -H` shows them, and a panic in one is an error of the migration.
//!
//! A migration runs inside the process that holds the guest. An uncaught panic would end both.

use std::panic::{AssertUnwindSafe, catch_unwind};
use std::sync::Mutex;
use std::thread;

use hotlift_mem::thread_cpu_time;
use rustix::process::setpriority_process;

use crate::error::MigrationError;
use crate::figures::ThreadCpu;
use crate::lock::lock;

/// A thread that was started.
pub(crate) struct RunningThread<'scope, T>(thread::ScopedJoinHandle<'scope, Option<T>>);

/// Starts a thread with a name of up to 15 bytes.
pub(crate) fn spawn<'scope, T: Send + 'scope>(
    scope: &'scope thread::Scope<'scope, '_>,
    name: String,
    work: impl FnOnce() -> T + Send + 'scope,
) -> Result<RunningThread<'scope, T>, MigrationError> {
    thread::Builder::new()
        .name(name.clone())
        .spawn_scoped(scope, || catch_unwind(AssertUnwindSafe(work)).ok())
        .map(RunningThread)
        .map_err(|source| MigrationError::Thread { name, source })
}

impl<T> RunningThread<'_, T> {
    /// Waits for the end of the thread, and returns its result.
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
    /// Starts a thread with a name of up to 15 bytes. `failed` receives the error of `work`; a panic counts as an error.
    pub(crate) fn spawn<'scope>(
        &'scope self,
        scope: &'scope thread::Scope<'scope, '_>,
        name: String,
        failed: &'scope (dyn Fn(MigrationError) + Sync),
        work: impl FnOnce() -> Result<(), MigrationError> + Send + 'scope,
    ) -> Result<(), MigrationError> {
        let started = spawn(scope, name.clone(), move || {
            let ended = caught(work);
            self.record_cpu_time(&name);
            if let Err(error) = ended {
                failed(error);
            }
        });
        started.map(drop)
    }

    /// Records the calling thread's CPU time.
    pub(crate) fn record_cpu_time(&self, name: &str) {
        lock(&self.0).push(ThreadCpu {
            name: name.to_owned(),
            cpu_s: thread_cpu_time().as_secs_f64(),
        });
    }

    /// Returns the CPU times recorded so far, in the order of the names' numbers.
    pub(crate) fn read(&self) -> Vec<ThreadCpu> {
        let mut threads = lock(&self.0).clone();
        threads.sort_by(|a, b| (a.name.len(), &a.name).cmp(&(b.name.len(), &b.name)));
        threads
    }
}

/// Runs `work` on this thread; a panic becomes an error.
pub(crate) fn caught<T, E: From<MigrationError>>(
    work: impl FnOnce() -> Result<T, E>,
) -> Result<T, E> {
    catch_unwind(AssertUnwindSafe(work))
        .unwrap_or_else(|_| Err(MigrationError::panicked_here().into()))
}

/// Nice value, of 0 to 19, of a thread that no other thread waits for. Beside an ordinary thread it gets a tenth of a core, and
/// still progresses where the guest's vCPUs take all that they can.
const NICE: i32 = 10;

/// Lowers the priority of the calling thread. A thread that may not change its priority keeps it.
pub(crate) fn lower_priority() {
    // In Linux a priority belongs to a thread, and no id means the calling one.
    let _ = setpriority_process(None, NICE);
}

/// Priority of a thread whose work is awaited at first, and later not any more.
#[derive(Debug, Default)]
pub(crate) struct DetachableThread {
    is_lowered: bool,
}

impl DetachableThread {
    /// Lowers the priority the first time that `unawaited` is true.
    pub(crate) fn once(&mut self, unawaited: bool) {
        if unawaited && !self.is_lowered {
            self.is_lowered = true;
            lower_priority();
        }
    }
}

/// Calls a function if its thread panics. The threads of a migration wait for each other, and a thread that ends without a
/// report would be waited for forever.
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
    fn only_the_requesting_thread_lowers_its_priority() {
        let here = getpriority_process(None).unwrap();
        let there = thread::spawn(move || {
            let mut yielding = DetachableThread::default();
            yielding.once(false);
            assert_eq!(getpriority_process(None).unwrap(), here);
            yielding.once(true);
            getpriority_process(None).unwrap()
        });
        assert_eq!(there.join().unwrap(), here.max(NICE));
        assert_eq!(getpriority_process(None).unwrap(), here);
    }
}

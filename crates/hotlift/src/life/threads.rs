//! Starts the threads of a migration. Each has a name, as `top -H` shows it. A panic in a thread is an error of the migration.
//!
//! A migration runs in the same process as the guest. Without this conversion, a panic would end the guest too.

use std::panic::{AssertUnwindSafe, catch_unwind};
use std::sync::Mutex;
use std::thread;

use hotlift_mem::thread_cpu_time;
use rustix::process::setpriority_process;

use crate::error::MigrationError;
use crate::figures::ThreadCpu;
use crate::lock::lock;

/// A started thread. Its result is `None` if it has panicked.
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
    /// [`MigrationError::Panicked`] if the thread has panicked.
    pub(crate) fn join(self) -> Result<T, MigrationError> {
        let name = self.0.thread().name().unwrap_or_default().to_owned();
        let ended = self.0.join().ok().flatten();
        ended.ok_or(MigrationError::Panicked { thread: name })
    }
}

/// CPU times of one migration's threads. Each thread records its time when it ends.
#[derive(Debug, Default)]
pub(crate) struct ThreadTimes(Mutex<Vec<ThreadCpu>>);

impl ThreadTimes {
    /// Starts a thread with a name of up to 15 bytes. If `work` returns an error or panics, calls `failed` with the error.
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

    /// Returns the CPU times of the ended threads, sorted by the numbers in their names.
    pub(crate) fn read(&self) -> Vec<ThreadCpu> {
        let mut threads = lock(&self.0).clone();
        threads.sort_by(|a, b| (a.name.len(), &a.name).cmp(&(b.name.len(), &b.name)));
        threads
    }
}

/// Runs `work` on the calling thread. Returns [`MigrationError::Panicked`] if `work` panics.
pub(crate) fn caught<T, E: From<MigrationError>>(
    work: impl FnOnce() -> Result<T, E>,
) -> Result<T, E> {
    catch_unwind(AssertUnwindSafe(work))
        .unwrap_or_else(|_| Err(MigrationError::panicked_here().into()))
}

/// Nice value, of 0 to 19, of a thread whose work is not urgent. Next to an ordinary thread it gets a tenth of a core. So it
/// still progresses on a host where the guest's vCPUs use all CPU time.
const NICE: i32 = 10;

/// Lowers the priority of the calling thread to [`NICE`]. A thread without permission to do this keeps its priority.
pub(crate) fn lower_priority() {
    // In Linux each thread has its own priority. No id means the calling thread.
    let _ = setpriority_process(None, NICE);
}

/// Priority of a thread whose work is urgent only at first.
#[derive(Debug, Default)]
pub(crate) struct DetachableThread {
    is_lowered: bool,
}

impl DetachableThread {
    /// Lowers the calling thread's priority at the first call with `unawaited` true. Other calls do nothing.
    pub(crate) fn once(&mut self, unawaited: bool) {
        if unawaited && !self.is_lowered {
            self.is_lowered = true;
            lower_priority();
        }
    }
}

/// Calls a function if its thread panics. Without the call, other threads of the migration would wait forever for the panicked
/// thread.
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

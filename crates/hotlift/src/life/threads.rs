//! Threads of a migration: named as `top -H` shows them, and a panic in one is an error of the migration.
//!
//! A migration runs inside the process that holds the guest. A panic that went on would end both.

use std::panic::{AssertUnwindSafe, catch_unwind};
use std::thread;

use rustix::process::setpriority_process;

use crate::error::MigrationError;

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

//! Threads of a migration: named as `top -H` shows them, and not missed when they panic.

use std::thread;

use crate::error::MigrationError;

/// Starts a thread with a name of up to 15 bytes.
pub(crate) fn spawn<'scope, T: Send + 'scope>(
    scope: &'scope thread::Scope<'scope, '_>,
    name: String,
    work: impl FnOnce() -> T + Send + 'scope,
) -> Result<thread::ScopedJoinHandle<'scope, T>, MigrationError> {
    thread::Builder::new()
        .name(name.clone())
        .spawn_scoped(scope, work)
        .map_err(|source| MigrationError::Thread { name, source })
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

//! Threads of a migration: named as `top -H` shows them, and not missed when they panic.

use std::thread;

use crate::control::{Control, Status};
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

/// Runs one side of a migration in a thread of its own called `name`, and keeps its status.
pub(crate) fn run_as<T: Send>(
    name: &str,
    control: &Control,
    work: impl FnOnce() -> Result<T, MigrationError> + Send,
) -> Result<T, MigrationError> {
    control.set_status(Status::Setup);
    let outcome = thread::scope(|scope| {
        spawn(scope, name.to_owned(), work)?
            .join()
            .unwrap_or_else(|panic| std::panic::resume_unwind(panic))
    });
    control.set_status(match &outcome {
        Ok(_) => Status::Completed,
        Err(MigrationError::Cancelled) => {
            control.set_status(Status::Cancelling);
            Status::Cancelled
        }
        Err(_) => Status::Failed,
    });
    outcome
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

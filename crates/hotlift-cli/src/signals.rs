//! SIGINT and SIGTERM as a flag that is looked at, so that every way out cleans up.

use std::sync::Arc;
use std::sync::atomic::{AtomicBool, Ordering};
use std::thread;
use std::time::Duration;

use hotlift::Control;
use signal_hook::consts::{SIGINT, SIGTERM};

use crate::error::CommandError;

/// How often the flag is looked at.
pub const TICK: Duration = Duration::from_millis(50);

/// Raised by the first signal; a second one ends the process at once.
#[derive(Clone)]
pub struct Interrupt(Arc<AtomicBool>);

/// Ends a watch when it goes out of scope.
struct Ends<'a>(&'a AtomicBool, &'a thread::Thread);

impl Drop for Ends<'_> {
    fn drop(&mut self) {
        self.0.store(true, Ordering::Release);
        self.1.unpark();
    }
}

impl Interrupt {
    /// Starts to catch both signals.
    pub fn catch() -> Result<Self, CommandError> {
        let raised = Arc::new(AtomicBool::new(false));
        for signal in [SIGINT, SIGTERM] {
            // In this order: the first signal finds the flag down and only raises it.
            signal_hook::flag::register_conditional_shutdown(signal, 130, Arc::clone(&raised))
                .and_then(|_| signal_hook::flag::register(signal, Arc::clone(&raised)))
                .map_err(|source| CommandError::Process {
                    what: "signal handlers",
                    source,
                })?;
        }
        Ok(Self(raised))
    }

    /// True after a signal.
    pub fn is_raised(&self) -> bool {
        self.0.load(Ordering::Relaxed)
    }

    /// Does what a signal does.
    pub fn raise(&self) {
        self.0.store(true, Ordering::Relaxed);
    }

    /// Runs `work` and cancels `control` if a signal comes meanwhile.
    pub fn cancelling<T>(&self, control: &Control, work: impl FnOnce() -> T) -> T {
        let done = AtomicBool::new(false);
        thread::scope(|scope| {
            let watch = scope.spawn(|| {
                while !done.load(Ordering::Acquire) {
                    if self.is_raised() {
                        control.cancel();
                        return;
                    }
                    thread::park_timeout(TICK);
                }
            });
            // However `work` ends: a panic must not wait for a watch that waits for a signal.
            let _ends = Ends(&done, watch.thread());
            work()
        })
    }

    /// Sleeps for `time` (for ever if there is none) or until a signal; true if it was a signal.
    pub fn sleep(&self, time: Option<Duration>) -> bool {
        let end = time.map(|time| std::time::Instant::now() + time);
        while !self.is_raised() {
            let left = end.map(|end| end.saturating_duration_since(std::time::Instant::now()));
            if left.is_some_and(|left| left.is_zero()) {
                return false;
            }
            thread::sleep(left.map_or(TICK, |left| left.min(TICK)));
        }
        true
    }
}

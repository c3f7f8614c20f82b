//! The agent's critical threads: if one of them ends early, the agent shuts down.

use std::sync::{Arc, OnceLock};
use std::thread::{self, JoinHandle};

use rustix::process::{Signal, getpid, kill_process};

use crate::error::AgentError;

/// Returns true while the agent is ending: then its threads may end, too.
type MayEnd = Arc<dyn Fn() -> bool + Send + Sync>;

/// The critical threads: the agent shuts down if one of them ends early.
pub struct CriticalThreads {
    threads: Vec<JoinHandle<()>>,
    may_end: MayEnd,
    /// Name of the first thread that ended early.
    lost: Arc<OnceLock<&'static str>>,
}

/// Guard of a critical thread. The drop, also after a panic, stops the agent unless it is already ending.
struct ThreadGuard {
    name: &'static str,
    may_end: MayEnd,
    lost: Arc<OnceLock<&'static str>>,
}

impl Drop for ThreadGuard {
    fn drop(&mut self) {
        if !(self.may_end)() && self.lost.set(self.name).is_ok() {
            // SIGTERM has the same effect as a stop by the operator: running migrations may finish.
            let _ = kill_process(getpid(), Signal::TERM);
        }
    }
}

impl CriticalThreads {
    /// Creates an empty set of threads. If a thread ends while `may_end` returns false, this process sends SIGTERM to itself.
    pub fn new(may_end: impl Fn() -> bool + Send + Sync + 'static) -> Self {
        Self {
            threads: Vec::new(),
            may_end: Arc::new(may_end),
            lost: Arc::default(),
        }
    }

    /// Starts a critical thread that runs `work`.
    ///
    /// # Errors
    /// If the system cannot start a thread.
    pub fn start(
        &mut self,
        name: &'static str,
        work: impl FnOnce() + Send + 'static,
    ) -> Result<(), AgentError> {
        let thread = self.thread(name, work)?;
        self.threads.push(thread);
        Ok(())
    }

    /// Starts a critical thread that [`join`](Self::join) does not wait for: it may block on its clients.
    ///
    /// # Errors
    /// As for [`start`](Self::start).
    pub fn start_alone(
        &self,
        name: &'static str,
        work: impl FnOnce() + Send + 'static,
    ) -> Result<(), AgentError> {
        self.thread(name, work).map(drop)
    }

    fn thread(
        &self,
        name: &'static str,
        work: impl FnOnce() + Send + 'static,
    ) -> Result<JoinHandle<()>, AgentError> {
        let end = ThreadGuard {
            name,
            may_end: Arc::clone(&self.may_end),
            lost: Arc::clone(&self.lost),
        };
        let thread = thread::Builder::new().name(name.to_owned());
        let thread = thread.spawn(move || {
            let _end = end;
            work();
        });
        thread.map_err(AgentError::system("a thread"))
    }

    /// Waits until all threads have ended.
    ///
    /// # Errors
    /// [`AgentError::Lost`] if a thread ended early.
    pub fn join(self) -> Result<(), AgentError> {
        for thread in self.threads {
            // The panic handler has already printed the message.
            let _ = thread.join();
        }
        match self.lost.get() {
            Some(part) => Err(AgentError::Lost { part }),
            None => Ok(()),
        }
    }
}

#[cfg(test)]
mod tests {
    use signal_hook::consts::SIGTERM;
    use signal_hook::iterator::Signals;

    use super::*;

    #[test]
    fn a_critical_thread_that_ends_or_panics_ends_the_process_and_is_named() {
        let mut signals = Signals::new([SIGTERM]).unwrap();
        let mut parts = CriticalThreads::new(|| true);
        parts.start("well", || ()).unwrap();
        parts.join().unwrap();
        assert_eq!(signals.pending().count(), 0);
        let works: [fn(); 2] = [|| (), || panic!("a part that panics, for this test")];
        for work in works {
            let mut parts = CriticalThreads::new(|| false);
            parts.start("lost", work).unwrap();
            assert_eq!(signals.forever().next(), Some(SIGTERM));
            let error = parts.join().expect_err("it is lost");
            assert!(
                matches!(error, AgentError::Lost { part: "lost" }),
                "{error}"
            );
        }
    }
}

//! Supervises a running relay, and exchanges messages about it with the other agent.

use std::sync::atomic::{AtomicBool, Ordering};
use std::thread;
use std::time::{Duration, Instant};

use hotlift::conversation::Conversation;
use hotlift::relay::RelayReport;
use hotlift::{Control, MigrationError};
use hotlift_qmp::one_line;

use crate::error::CarryError;
use crate::messages::Message;
use crate::session::Session;

/// Longest wait for the other agent's final message after the relay on this host has ended.
const FINAL_MESSAGE_TIMEOUT: Duration = Duration::from_secs(3);

/// Progress of a relay that its supervisor must know.
#[derive(Default)]
pub struct Progress {
    /// True once the source has connected, and its channels are known.
    pub has_begun: AtomicBool,
    /// True once the guest may run at the destination.
    pub is_committed: AtomicBool,
}

impl Progress {
    /// Returns true if a relay that has run for `age` must be cancelled, for one of two reasons:
    ///
    /// - The relay has not begun within `timeout`.
    /// - The relay depends on the other agent (`depends_on_peer`), which has disconnected (`peer_connected` is false), and the
    ///   guest cannot run at the destination yet.
    fn must_end(
        &self,
        age: Duration,
        (timeout, depends_on_peer): (Duration, bool),
        peer_connected: bool,
    ) -> bool {
        let is_late = age > timeout && !self.has_begun.load(Ordering::Acquire);
        is_late || depends_on_peer && !peer_connected && !self.is_committed.load(Ordering::Acquire)
    }

    /// Returns the time until [`Self::must_end`] must be called again if no event occurs. `age` is how long the relay has run.
    fn until_late(&self, age: Duration, timeout: Duration) -> Duration {
        match self.has_begun.load(Ordering::Acquire) || age > timeout {
            true => Duration::MAX,
            false => timeout.saturating_sub(age),
        }
    }
}

/// Wakes the supervisor when the relay ends, also after a panic.
struct RelayEndGuard<'a>(&'a AtomicBool, &'a Control);

impl Drop for RelayEndGuard<'_> {
    fn drop(&mut self) {
        self.0.store(true, Ordering::Release);
        self.1.wake();
    }
}

/// Runs `relay` and receives the other agent's messages until the relay ends. Then sends the result to the other agent.
/// `limits` are the conditions for a cancel:
///
/// - The time: the relay is cancelled if it has not begun within this time.
/// - The flag: if true, a disconnect of the other agent also cancels the relay, unless the guest may run at the destination.
///
/// # Errors
/// The errors of this relay and of the other agent's relay.
pub fn relay(
    session: &Session,
    conversation: &mut Conversation,
    progress: &Progress,
    limits: (Duration, bool),
    relay: &(dyn Fn() -> Result<RelayReport, MigrationError> + Sync),
) -> Result<RelayReport, CarryError> {
    let control = &session.control;
    let wake_fd = control
        .wake_fd()
        .map_err(CarryError::system("descriptor"))?;
    let has_ended = AtomicBool::new(false);
    let mut final_message = None;
    let outcome = thread::scope(|scope| {
        let running = thread::Builder::new()
            .name("agent/relay".to_owned())
            .spawn_scoped(scope, || {
                let _ends = RelayEndGuard(&has_ended, control);
                relay()
            })
            .map_err(CarryError::system("thread"))?;
        let begun = Instant::now();
        let mut peer_connected = true;
        while !has_ended.load(Ordering::Acquire) {
            let age = begun.elapsed();
            if progress.must_end(age, limits, peer_connected) && !control.is_cancelled() {
                control.cancel();
            }
            let wait = progress.until_late(age, limits.0);
            let waited = match peer_connected {
                true => match conversation.receive::<Message>(Duration::ZERO) {
                    Ok(None) => wake_fd.wait_readable(conversation.stream(), wait),
                    Ok(Some(message)) => {
                        final_message.get_or_insert(message);
                        continue;
                    }
                    Err(_) => {
                        peer_connected = false;
                        control.suspect_peer();
                        continue;
                    }
                },
                false => wake_fd.poll(&mut Vec::new(), wait).map(|()| true),
            };
            if waited.is_err() {
                control.cancel();
                break;
            }
        }
        let panicked = |_| {
            Err(MigrationError::Panicked {
                thread: "agent/relay".to_owned(),
            })
        };
        Ok::<_, CarryError>(running.join().unwrap_or_else(panicked))
    })?;
    let message = match &outcome {
        Ok(_) => Message::Completed,
        Err(error) => Message::Failed {
            reason: error.chain(),
        },
    };
    let is_sent = conversation.send(&message).is_ok();
    if final_message.is_none() && is_sent {
        final_message = conversation
            .receive::<Message>(FINAL_MESSAGE_TIMEOUT)
            .ok()
            .flatten();
    }
    match (outcome, final_message) {
        (Ok(report), Some(Message::Failed { reason })) => {
            session.log(
                crate::config::LogLevel::Warning,
                &format!("the other agent: {}", one_line(&reason)),
            );
            Ok(report)
        }
        (Ok(report), _) => Ok(report),
        (Err(error), Some(Message::Failed { reason })) => Err(CarryError::Both {
            own: Box::new(error),
            other: one_line(&reason),
        }),
        (Err(error), _) => Err(error.into()),
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn a_relay_is_cancelled_at_its_limit_or_with_the_peer_agent_but_not_after_the_commit() {
        const MS: Duration = Duration::from_millis(1);
        let timeout = Duration::from_secs(150);
        for depends_on_peer in [false, true] {
            let progress = Progress::default();
            let ends = |age, peer_connected| {
                progress.must_end(age, (timeout, depends_on_peer), peer_connected)
            };
            assert!(!ends(timeout, true));
            assert!(ends(timeout + MS, true));
            assert_eq!(progress.until_late(timeout - MS, timeout), MS);
            assert_eq!(progress.until_late(timeout + MS, timeout), Duration::MAX);
            progress.has_begun.store(true, Ordering::Release);
            assert_eq!(progress.until_late(MS, timeout), Duration::MAX);
            assert!(!ends(timeout * 100, true));
            assert_eq!(ends(MS, false), depends_on_peer);
            progress.is_committed.store(true, Ordering::Release);
            assert!(!ends(MS, false), "it may run there");
        }
    }
}

//! A relay at work, and what the two agents say to each other of it meanwhile.

use std::sync::atomic::{AtomicBool, Ordering};
use std::thread;
use std::time::{Duration, Instant};

use hotlift::MigrationError;
use hotlift::conversation::Conversation;
use hotlift::relay::RelayReport;
use hotlift_qmp::one_line;

use crate::error::CarryError;
use crate::messages::Message;
use crate::session::Session;

/// How often it is looked whether the relay has ended.
const LOOK: Duration = Duration::from_millis(100);

/// How long the other agent may take, once this side's relay has ended, to say how its own has.
const LAST_WORD: Duration = Duration::from_secs(3);

/// How a relay knows, and lets know, how far it is.
#[derive(Default)]
pub struct Progress {
    /// The source has connected and said what it has.
    pub has_begun: AtomicBool,
    /// The guest may run at the destination.
    pub is_committed: AtomicBool,
}

impl Progress {
    /// Returns true if a relay of this age is cancelled: it has not begun within `patience`, or `follows` the other agent, which
    /// has gone, and the guest cannot run at the destination.
    fn must_end(
        &self,
        age: Duration,
        (patience, follows): (Duration, bool),
        is_there: bool,
    ) -> bool {
        let is_late = age > patience && !self.has_begun.load(Ordering::Acquire);
        is_late || follows && !is_there && !self.is_committed.load(Ordering::Acquire)
    }
}

/// Runs `relay`, listens to the other agent until it has ended, and tells it how. A relay that has not begun within the first of
/// `limits` is cancelled; with the second one that is not committed is, too, when the other agent goes.
///
/// # Errors
/// What the relay says, and what the other agent says of its own.
pub fn relay(
    session: &Session,
    conversation: &mut Conversation,
    progress: &Progress,
    limits: (Duration, bool),
    relay: &(dyn Fn() -> Result<RelayReport, MigrationError> + Sync),
) -> Result<RelayReport, CarryError> {
    let control = &session.control;
    let mut said = None;
    let outcome = thread::scope(|scope| {
        let running = thread::Builder::new()
            .name("agent/relay".to_owned())
            .spawn_scoped(scope, relay)
            .map_err(|source| CarryError::System {
                what: "thread",
                source,
            })?;
        let begun = Instant::now();
        let mut is_there = true;
        while !running.is_finished() {
            if progress.must_end(begun.elapsed(), limits, is_there) {
                control.cancel();
            }
            if !is_there {
                thread::sleep(LOOK);
                continue;
            }
            match conversation.hear::<Message>(LOOK) {
                Ok(None) => {}
                Ok(Some(message)) => {
                    said.get_or_insert(message);
                }
                Err(_) => {
                    is_there = false;
                    control.suspect_peer();
                }
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
    let told = conversation.say(&message).is_ok();
    if said.is_none() && told {
        said = conversation.hear::<Message>(LAST_WORD).ok().flatten();
    }
    match (outcome, said) {
        (Ok(report), Some(Message::Failed { reason })) => {
            session.say(
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
    fn a_relay_is_cancelled_at_its_limit_or_with_the_other_agent_and_not_behind_the_commit() {
        const MS: Duration = Duration::from_millis(1);
        let patience = Duration::from_secs(150);
        for follows in [false, true] {
            let progress = Progress::default();
            let ends = |age, is_there| progress.must_end(age, (patience, follows), is_there);
            assert!(!ends(patience, true));
            assert!(ends(patience + MS, true));
            progress.has_begun.store(true, Ordering::Release);
            assert!(!ends(patience * 100, true));
            assert_eq!(ends(MS, false), follows);
            progress.is_committed.store(true, Ordering::Release);
            assert!(!ends(MS, false), "it may run there");
        }
    }
}

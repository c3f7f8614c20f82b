//! What an agent that is to end waits for, and what it cancels.
//!
//! A guest in postcopy runs at the destination, and some of its pages are at the source alone: a cancel would not bring it
//! back, and an agent that has gone leaves it without them.

use std::time::Duration;

use crate::agent::Agent;
use crate::config::LogLevel;
use crate::notify;

/// Between two looks whether a postcopy still goes on.
const LOOK: Duration = Duration::from_secs(1);

/// Waits for all that is under way for up to `limit`, cancels what is left, and waits for that up to `last`; for a postcopy for
/// as long as it goes on, which systemd is told.
pub fn wait(agent: &Agent, (limit, last): (Duration, Duration)) {
    let sessions = &agent.sessions;
    if sessions.wait_until(limit, <[_]>::is_empty) {
        return;
    }
    let under_way = sessions.under_way();
    let count = under_way.iter().filter(|it| it.is_in_postcopy()).count();
    let text = match count {
        0 => "what is still under way is cancelled".to_owned(),
        _ => format!(
            "what is still under way is cancelled, and waits for {count} in postcopy, whose guests need pages of their source"
        ),
    };
    agent.log.say(LogLevel::Warning, &text);
    cancel_all(agent);
    sessions.wait_until(last, |left| left.iter().all(|it| it.is_in_postcopy()));
    // Its end is told, and that its connection is lost is not.
    while !sessions.wait_until(LOOK, |left| !left.iter().any(|it| it.is_in_postcopy())) {
        notify::say(&notify::stopping(last.saturating_mul(2)));
    }
}

/// Cancels all that can be.
pub fn cancel_all(agent: &Agent) {
    for session in agent.sessions.under_way() {
        session.control.cancel();
    }
    agent.sessions.wake();
}

#[cfg(test)]
mod tests {
    use std::thread;

    use hotlift::Status;

    use super::*;
    use crate::fixture::{agent, session, subject, until};
    use crate::messages::Kind;
    use crate::session::Direction;

    /// Long enough for a wait that is none to end.
    const LOOKS: u32 = 30;

    #[test]
    fn what_is_cancelled_is_not_waited_for_without_end_and_a_postcopy_is() {
        let agent = agent("");
        let of = |id| session(subject(id, Direction::Outgoing, Kind::Migration)).0;
        let (stuck, postcopy) = (of(1), of(2));
        agent.sessions.add(&stuck).unwrap();
        agent.sessions.add(&postcopy).unwrap();
        postcopy.enter(Status::PostcopyActive.name());
        thread::scope(|scope| {
            let waits = scope.spawn(|| wait(&agent, (Duration::ZERO, Duration::ZERO)));
            until("it cancels", || stuck.control.is_cancelled());
            for _ in 0..LOOKS {
                assert!(!waits.is_finished(), "the guest has not all its pages");
                thread::sleep(Duration::from_millis(10));
            }
            agent.ended(&postcopy, Ok(None));
            until("it waits no more", || waits.is_finished());
        });
        assert_eq!(agent.sessions.under_way().len(), 1);
    }
}

//! The end of an agent: waits for running sessions, then cancels them.
//!
//! A guest in postcopy runs at the destination, while some of its pages are only at the source. A cancel cannot return the
//! guest to the source, and the end of the agent would leave the guest without these pages. So a session in postcopy is awaited
//! without a limit.

use std::sync::Arc;
use std::time::{Duration, Instant};

use crate::agent::Agent;
use crate::config::LogLevel;
use crate::error::CarryError;
use crate::notify;
use crate::session::Session;

/// Interval of the status reports to systemd while a postcopy runs.
const REPORT: Duration = Duration::from_secs(1);

/// State machine of the agent's shutdown. No I/O, no clock.
#[derive(Debug)]
struct Draining {
    /// Deadline of the current wait: until `is_cancelled`, for sessions to end by themselves; then for cancelled sessions to
    /// end.
    until: Instant,
    last: Duration,
    is_cancelled: bool,
}

/// Next action of the agent's shutdown.
#[derive(Debug, PartialEq, Eq)]
enum Step {
    /// Wait until a session ends, for at most this time.
    Wait(Duration),
    /// Cancel the remaining sessions.
    Cancel,
    /// Report to systemd that the shutdown continues.
    Report,
    /// The shutdown is complete.
    Done,
}

impl Draining {
    fn new(now: Instant, (limit, last): (Duration, Duration)) -> Self {
        Self {
            until: now + limit,
            last,
            is_cancelled: false,
        }
    }

    /// Returns the next action at `now`. `all` is the number of running sessions; `postcopies` of these are in postcopy.
    fn next(&mut self, now: Instant, all: usize, postcopies: usize) -> Step {
        let is_over = now >= self.until;
        match self.is_cancelled {
            false if all == 0 => Step::Done,
            false if is_over => {
                self.is_cancelled = true;
                self.until = now + self.last;
                Step::Cancel
            }
            true if postcopies == 0 && (is_over || all == 0) => Step::Done,
            // From this time on, only sessions in postcopy are awaited.
            true if is_over => {
                self.until = now + REPORT;
                Step::Report
            }
            _ => Step::Wait(self.until - now),
        }
    }
}

/// Shuts down the running sessions: waits up to `limit`, cancels the remaining ones, and waits up to `last` for their end. A
/// session in postcopy is awaited without a limit; in the meantime systemd gets status reports.
pub fn wait(agent: &Agent, (limit, last): (Duration, Duration)) {
    let sessions = &agent.sessions;
    let count = |left: &[Arc<Session>]| {
        let postcopies = left.iter().filter(|it| it.is_in_postcopy()).count();
        (left.len(), postcopies)
    };
    let mut draining = Draining::new(Instant::now(), (limit, last));
    loop {
        let (all, postcopies) = count(&sessions.running());
        match draining.next(Instant::now(), all, postcopies) {
            Step::Wait(time) => {
                sessions.wait_until(time, |left| count(left) != (all, postcopies));
            }
            Step::Cancel => {
                let text = match postcopies {
                    0 => "cancels the remaining migrations".to_owned(),
                    _ => format!(
                        "cancels the remaining migrations, and waits for {postcopies} in postcopy, whose guests need pages of \
                         their source"
                    ),
                };
                agent.log.write(LogLevel::Warning, &text);
                cancel_all(agent);
            }
            Step::Report => notify::notify(&notify::stopping(last.saturating_mul(2))),
            Step::Done => break,
        }
    }
    for session in sessions.running() {
        agent.ended(&session, Err(CarryError::Unsettled));
    }
}

/// Cancels all running sessions.
pub fn cancel_all(agent: &Agent) {
    for session in agent.sessions.running() {
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
    use crate::snapshot::State;

    const MS: Duration = Duration::from_millis(1);

    #[test]
    fn each_shutdown_limit_holds_to_the_millisecond() {
        let (limit, last) = (Duration::from_secs(300), Duration::from_secs(10));
        let begun = Instant::now();
        let at = |time: Duration| begun + time;
        let draining = || Draining::new(begun, (limit, last));
        assert_eq!(draining().next(begun, 0, 0), Step::Done);

        let mut one = draining();
        assert_eq!(one.next(at(limit - MS), 1, 0), Step::Wait(MS));
        assert_eq!(one.next(at(limit), 1, 0), Step::Cancel);
        assert_eq!(one.next(at(limit), 1, 0), Step::Wait(last));
        assert_eq!(one.next(at(limit + last - MS), 1, 0), Step::Wait(MS));
        assert_eq!(one.next(at(limit + last), 1, 0), Step::Done, "it is stuck");

        let mut both = draining();
        assert_eq!(both.next(at(limit), 2, 1), Step::Cancel);
        assert_eq!(both.next(at(limit), 1, 1), Step::Wait(last));
        // A postcopy is awaited without a limit, and systemd gets reports.
        let mut now = limit + last;
        for _ in 0..10_000 {
            assert_eq!(both.next(at(now), 2, 1), Step::Report);
            assert_eq!(both.next(at(now), 2, 1), Step::Wait(REPORT));
            now += REPORT - MS;
            assert_eq!(both.next(at(now), 2, 1), Step::Wait(MS));
            now += MS;
        }
        assert_eq!(both.next(at(now), 1, 0), Step::Done, "one is stuck");

        let mut postcopy = draining();
        assert_eq!(postcopy.next(at(limit), 1, 1), Step::Cancel);
        assert_eq!(postcopy.next(at(limit), 1, 1), Step::Wait(last));
        assert_eq!(postcopy.next(at(limit), 0, 0), Step::Done);
    }

    #[test]
    fn cancelled_sessions_are_awaited_up_to_a_limit_and_postcopies_without_limit() {
        let agent = agent("");
        let of = |id| session(subject(id, Direction::Outgoing, Kind::Migration)).0;
        let (stuck, postcopy) = (of(1), of(2));
        agent.sessions.add(&stuck).unwrap();
        agent.sessions.add(&postcopy).unwrap();
        postcopy.enter(State::Of(Status::PostcopyActive));
        thread::scope(|scope| {
            let waits = scope.spawn(|| wait(&agent, (Duration::ZERO, Duration::ZERO)));
            until("it cancels", || stuck.control.is_cancelled());
            assert!(!waits.is_finished(), "the guest lacks pages");
            agent.ended(&postcopy, Ok(None));
            waits.join().unwrap();
        });
        assert_eq!(agent.sessions.running().len(), 0, "its end is in the log");
    }
}

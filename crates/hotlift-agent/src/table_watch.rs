//! Restores the nftables table after another program changes it, and logs packets that miss the redirect.

use std::os::fd::AsFd;
use std::time::{Duration, Instant};

use hotlift::error::error_line;

use crate::agent::Agent;
use crate::config::{LogLevel, Plaintext};
use crate::missed_packets::{LoggedMisses, MissReports, REPEAT_INTERVAL};
use crate::table::{Changes, Table, counts};

/// Shortest interval between two restores: it limits the CPU time lost in a conflict with another program.
const PAUSE: Duration = Duration::from_millis(100);

/// Delay after a failed restore.
const RETRY: Duration = Duration::from_secs(1);

/// Schedule of two tasks: to log the packets that missed the redirect, and to restore the table. No I/O, no clock.
#[derive(Debug, Default)]
struct Schedule {
    log: Option<Instant>,
    retry: Option<Instant>,
    /// Earliest time of the next restore.
    pause: Option<Instant>,
}

impl Schedule {
    /// Returns the time until the next task is due.
    fn wait(&self, now: Instant) -> Duration {
        let first = self.log.into_iter().chain(self.retry).min();
        first.map_or(Duration::MAX, |at| at.saturating_duration_since(now))
    }

    /// Returns two flags: the log is due, the restore is due. `has_packets` makes the log due immediately. `changed` (the table
    /// changed) schedules a restore.
    fn due(&mut self, now: Instant, has_packets: bool, changed: bool) -> (bool, bool) {
        let is_due = |at: &mut Option<Instant>| at.take_if(|at| now >= *at).is_some();
        if changed {
            self.retry = Some(self.pause.map_or(now, |pause| pause.max(now)));
        }
        (has_packets | is_due(&mut self.log), is_due(&mut self.retry))
    }

    /// Records an attempt to restore the table at `now`. After a failure (`is_back` is false), schedules a retry.
    fn restored(&mut self, now: Instant, is_back: bool) {
        self.pause = Some(now + PAUSE);
        self.retry = (!is_back).then(|| now + RETRY);
    }
}

/// Runs until the agent ends: restores the table after another program changes it, and logs packets that miss the redirect.
pub fn keep(agent: &Agent, changes: &Changes) {
    let packets = MissReports::listen().inspect_err(|error| {
        let text = format!(
            "packets that bypass the redirect are counted, but not logged, as the kernel does not report them: {error}"
        );
        agent.log.write(LogLevel::Warning, &text);
    });
    let packets = packets.ok();
    let mut logged = LoggedMisses::default();
    let later = |waits: bool, now: Instant| waits.then(|| now + REPEAT_INTERVAL);
    let now = Instant::now();
    let mut schedule = Schedule {
        // The table may have counted packets while no agent was running.
        log: later(log_past(agent, &mut logged, now), now),
        ..Schedule::default()
    };
    while !agent.has_ended() {
        let fds = [changes.0.as_fd()].into_iter();
        let fds = fds.chain(packets.as_ref().map(AsFd::as_fd));
        agent.wait(fds, schedule.wait(Instant::now()));
        let now = Instant::now();
        let has_packets = packets.as_ref().is_some_and(MissReports::drain);
        let (logs, restores) = schedule.due(now, has_packets, changes.table_changed());
        if logs {
            // The kernel limits the rate of its reports, so a later packet may cause none: the log is checked again.
            schedule.log = later(log_past(agent, &mut logged, now) || has_packets, now);
        }
        if !restores {
            continue;
        }
        let restored = agent.table().as_mut().map_or(Ok(false), Table::restore);
        if !matches!(restored, Ok(false)) {
            schedule.restored(Instant::now(), restored.is_ok());
        }
        match restored {
            Ok(false) => {}
            Ok(true) => {
                let text = "another program changed or removed the nftables table: it is restored";
                agent.log.write(LogLevel::Warning, text);
            }
            Err(error) => {
                let text = format!("cannot restore the nftables table: {}", error_line(&error));
                agent.log.write(LogLevel::Error, &text);
            }
        }
    }
}

/// Logs the packets that missed the redirect since the last log. Returns true if some must wait for the interval between lines.
fn log_past(agent: &Agent, logged: &mut LoggedMisses, now: Instant) -> bool {
    // Errors of nft are ignored here: a failed restore reports them.
    let (new_counts, waits) = logged.due_for_log(counts().unwrap_or_default(), now);
    let plaintext = agent.config().plaintext;
    for count in new_counts {
        let line = count.line(plaintext);
        match plaintext {
            Plaintext::Refuse => agent.refuse(&line),
            Plaintext::Allow => agent.log.write(LogLevel::Warning, &line),
        }
    }
    waits
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn the_intervals_of_the_table_watch_hold_to_the_millisecond() {
        const MS: Duration = Duration::from_millis(1);
        let now = Instant::now();
        let mut schedule = Schedule::default();
        schedule.restored(now, true);
        assert_eq!(schedule.wait(now), Duration::MAX, "it is back");
        assert_eq!(schedule.due(now + PAUSE - MS, false, true), (false, false));
        assert_eq!(schedule.wait(now + PAUSE - MS), MS);
        assert_eq!(schedule.due(now + PAUSE, false, false), (false, true));
        schedule.restored(now, false);
        assert_eq!(schedule.wait(now), RETRY);
        let mut schedule = Schedule::default();
        assert_eq!(schedule.wait(now), Duration::MAX);
        assert_eq!(schedule.due(now, false, false), (false, false));
        assert_eq!(schedule.due(now, true, false), (true, false));
        assert_eq!(schedule.due(now, false, true), (false, true));
        (schedule.retry, schedule.log) = (Some(now + RETRY), Some(now + REPEAT_INTERVAL));
        assert_eq!(schedule.wait(now), RETRY.min(REPEAT_INTERVAL));
        assert_eq!(schedule.due(now + RETRY - MS, false, false), (false, false));
        assert_eq!(schedule.due(now + RETRY, false, false), (false, true));
        assert_eq!(
            schedule.due(now + REPEAT_INTERVAL - MS, false, false),
            (false, false)
        );
        assert_eq!(schedule.wait(now + REPEAT_INTERVAL - MS), MS);
        assert_eq!(
            schedule.due(now + REPEAT_INTERVAL, false, false),
            (true, false)
        );
        assert_eq!(schedule.wait(now), Duration::MAX);
    }
}

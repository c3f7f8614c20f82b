//! Decides when all multifd channels of a source have connected, even if the source does not state their number. No I/O and no
//! clock; `accept` reads and waits.

use std::time::{Duration, Instant};

/// Interval of checks for conditions without an event: the end of main, or a connection without a first byte that is too old to
/// be a channel.
const POLL_INTERVAL: Duration = Duration::from_millis(10);

/// Connections that have arrived so far.
#[derive(Debug, Clone, Copy, Default)]
pub(crate) struct ArrivedConnections {
    pub channels: usize,
    pub highest_id: Option<u8>,
    /// The number that a relay states.
    pub stated: Option<u8>,
    /// A new connection whose kind is not known yet.
    pub has_unidentified: bool,
    pub main_has_ended: bool,
}

/// Next step.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub(crate) enum Step {
    /// Wait up to this time for an event.
    Wait(Duration),
    /// All channels are there.
    Complete,
    /// No more channels will arrive: the source has closed main.
    MainEnded,
    /// Some channels are missing at the time limit.
    TimedOut,
}

/// The wait for a source's channels.
#[derive(Debug)]
pub(crate) struct ChannelWait {
    until: Instant,
    /// Time after the latest channel in which a further channel may arrive.
    settle_time: Duration,
    quiet_since: Instant,
    channels: usize,
}

impl ChannelWait {
    /// Begins the wait with `channels` connected channels; `timeout` is its limit.
    pub(crate) fn new(
        now: Instant,
        channels: usize,
        settle_time: Duration,
        timeout: Duration,
    ) -> Self {
        Self {
            until: now + timeout,
            settle_time,
            quiet_since: now,
            channels,
        }
    }

    /// Returns true if no further channel is expected: none arrived for the settle time, and every connection is identified.
    pub(crate) fn is_settled(&mut self, arrived: &ArrivedConnections, now: Instant) -> bool {
        if arrived.channels != self.channels {
            (self.channels, self.quiet_since) = (arrived.channels, now);
        }
        self.left(now).is_zero() && !arrived.has_unidentified
    }

    /// Returns the time after which [`ChannelWait::is_settled`] should be called again.
    pub(crate) fn wait(&self, arrived: &ArrivedConnections, now: Instant) -> Duration {
        match self.left(now) {
            left if left.is_zero() || arrived.has_unidentified => POLL_INTERVAL,
            left => left,
        }
    }

    fn left(&self, now: Instant) -> Duration {
        (self.quiet_since + self.settle_time).saturating_duration_since(now)
    }

    /// Returns the next step. If `expected` is true, the wait is not complete without a channel.
    pub(crate) fn next(
        &mut self,
        arrived: &ArrivedConnections,
        expected: bool,
        now: Instant,
    ) -> Step {
        let is_settled = self.is_settled(arrived, now);
        let is_complete = match arrived.stated {
            Some(stated) => arrived.channels >= usize::from(stated),
            // Ids count from 0, so a gap shows a missing channel. (Several channels may have one id, because of stale
            // connections.)
            None => {
                let has_all = |highest| usize::from(highest) < arrived.channels;
                is_settled && arrived.highest_id.map_or(!expected, has_all)
            }
        };
        if is_complete {
            Step::Complete
        } else if is_settled && arrived.main_has_ended {
            Step::MainEnded
        } else if now > self.until {
            Step::TimedOut
        } else {
            let left = self.until.saturating_duration_since(now).max(POLL_INTERVAL);
            Step::Wait(self.wait(arrived, now).min(left))
        }
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    const MS: Duration = Duration::from_millis(1);
    const SETTLE: Duration = Duration::from_millis(200);
    const TIMEOUT: Duration = Duration::from_secs(30);

    fn channels(channels: usize, highest_id: u8) -> ArrivedConnections {
        ArrivedConnections {
            channels,
            highest_id: Some(highest_id),
            ..ArrivedConnections::default()
        }
    }

    #[test]
    fn channels_without_announced_count_are_complete_once_no_other_arrives() {
        let begun = Instant::now();
        let mut wait = ChannelWait::new(begun, 0, SETTLE, TIMEOUT);
        let two = channels(2, 1);
        assert_eq!(
            wait.next(&ArrivedConnections::default(), true, begun),
            Step::Wait(SETTLE)
        );
        let latest = begun + 150 * MS;
        assert_eq!(wait.next(&two, true, latest), Step::Wait(SETTLE));
        assert_eq!(wait.next(&two, true, latest + SETTLE - MS), Step::Wait(MS));
        assert_eq!(wait.next(&two, true, latest + SETTLE), Step::Complete);
        let newcomer = ArrivedConnections {
            has_unidentified: true,
            ..two
        };
        let later = latest + 2 * SETTLE;
        assert_eq!(wait.next(&newcomer, true, later), Step::Wait(POLL_INTERVAL));
    }

    #[test]
    fn an_announced_count_needs_no_delay() {
        let now = Instant::now();
        let mut wait = ChannelWait::new(now, 0, SETTLE, TIMEOUT);
        let some = |channels| ArrivedConnections {
            channels,
            highest_id: Some(3),
            stated: Some(4),
            ..ArrivedConnections::default()
        };
        assert_eq!(wait.next(&some(3), true, now), Step::Wait(SETTLE));
        assert_eq!(
            wait.next(&some(3), true, now + SETTLE),
            Step::Wait(POLL_INTERVAL)
        );
        assert_eq!(wait.next(&some(4), true, now), Step::Complete);
    }

    #[test]
    fn a_missing_channel_is_awaited_until_the_timeout() {
        let begun = Instant::now();
        for arrived in [channels(1, 1), ArrivedConnections::default()] {
            let mut wait = ChannelWait::new(begun, arrived.channels, SETTLE, TIMEOUT);
            let end = begun + TIMEOUT;
            assert_eq!(
                wait.next(&arrived, true, begun + SETTLE),
                Step::Wait(POLL_INTERVAL)
            );
            assert_eq!(wait.next(&arrived, true, end), Step::Wait(POLL_INTERVAL));
            assert_eq!(wait.next(&arrived, true, end + MS), Step::TimedOut);
        }
        let mut wait = ChannelWait::new(begun, 0, SETTLE, TIMEOUT);
        let none = wait.next(&ArrivedConnections::default(), false, begun + SETTLE);
        assert_eq!(none, Step::Complete, "a source without multifd");
    }

    #[test]
    fn an_ended_main_channel_counts_once_no_channel_is_pending() {
        let begun = Instant::now();
        let mut wait = ChannelWait::new(begun, 0, SETTLE, TIMEOUT);
        let ended = ArrivedConnections {
            main_has_ended: true,
            ..ArrivedConnections::default()
        };
        let newcomer = ArrivedConnections {
            has_unidentified: true,
            ..ended
        };
        let settled = begun + SETTLE;
        assert_eq!(wait.next(&ended, true, settled - MS), Step::Wait(MS));
        assert_eq!(
            wait.next(&newcomer, true, settled),
            Step::Wait(POLL_INTERVAL)
        );
        assert_eq!(wait.next(&ended, true, settled), Step::MainEnded);
    }
}

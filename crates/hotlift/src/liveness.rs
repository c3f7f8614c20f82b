//! Decides if the host of a peer still answers, from the kernel's state of the connection.
//!
//! TCP_USER_TIMEOUT cannot decide this: it also ends a connection whose peer answers but reads slowly. Without TCP_USER_TIMEOUT
//! the kernel retransmits for 15 minutes (tcp_retries2). During retransmissions its keepalive sends no probe.
//!
//! `TCP_INFO` of a sender on Linux 6.18, with a peer that ...
//!
//! | peer | in flight | probes | waits | last packet | acknowledged |
//! |---|---|---|---|---|---|
//! | reads | changes | 0 | changes | 0 to 40 ms ago | grows |
//! | lost its power, or whose packets are dropped | stays above 0 | 0 | stays | grows without end | stays |
//! | gets small packets only (MTU black hole) | stays above 0 | 0 | stays | grows without end | stays |
//! | is stopped (its kernel has no room) | 0 | 1 until the answer | stays | grows up to the next probe | stays |
//! | is stopped, and then lost its power | 0 | counts up from the next probe on | stays | grows without end | stays |
//! | is idle, and then lost its power | 0 | counts up with each keepalive | 0 | grows without end | stays |
//!
//! The time since a peer's last packet means nothing by itself. The kernel probes an idle peer at the keepalive interval. It
//! probes a stopped reader at intervals that double up to 2 minutes (TCP_RTO_MAX). Since Linux 6.15 these intervals double only
//! up to an eighth of the limit.
//!
//! So a silence starts at the first sample with an unanswered segment or probe. The silence of an idle connection starts at its
//! last packet, because its keepalive interval is short. For a stopped reader, two probes must be unanswered, because one
//! packet may be lost. So a reader that stops first and loses its power later is found within 4 minutes.
//!
//! A peer behind an MTU black hole counts as silent, although its keepalive probes arrive. The kernel does not count these
//! probes as packets of the peer.

use std::net::IpAddr;
use std::time::{Duration, Instant};

use hotlift_mem::sock::TcpSending;
use hotlift_net::transport::Stream;

use crate::control::Control;
use crate::error::MigrationError;
use crate::progress::{Stall, StallKind};

/// Duration from which a stall is reported. Longer than a retransmission takes on a bad link, but short for an operator.
pub(crate) const REPORTED: Duration = Duration::from_secs(5);

/// Interval between two samples while data is in transit. A sample costs one system call per connection.
pub(crate) const INTERVAL: Duration = Duration::from_millis(250);

/// Interval between two samples while nothing is in transit. Then only a keepalive probe can show that the peer is lost. The
/// interval is shorter than [`REPORTED`], because a longer gap counts as a stop of this process.
const IDLE_INTERVAL: Duration = Duration::from_millis(2500);

/// State of a peer at the time of a sample.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
enum PeerState {
    /// The peer answers, or there is nothing to answer.
    Fine,
    /// The peer has not answered since this time.
    Silent(Instant),
    /// The peer's kernel answers, but has had no room for data since this time.
    NotReading(Instant),
}

/// State of one connection over its samples.
#[derive(Debug, Default)]
struct ConnectionSamples {
    /// Time since when the peer must answer a segment or probe; `None` if all are answered.
    asked: Option<Instant>,
    /// Time of the first sample with two unanswered probes; `None` without such a sample.
    probed_again: Option<Instant>,
    /// Count of bytes that the peer has acknowledged, and the last time when the count changed or no data waited.
    moved: Option<(u64, Instant)>,
    /// True if data was in transit at the last sample, or if data was acknowledged since the sample before.
    is_active: bool,
}

impl ConnectionSamples {
    /// Records a sample of the time `now`. Returns the peer's state.
    fn take(&mut self, now: Instant, facts: &TcpSending) -> PeerState {
        let last_packet = now.checked_sub(facts.since_last_packet).unwrap_or(now);
        let is_asked = facts.in_flight > 0 || facts.probes > 0;
        self.asked = is_asked.then(|| self.asked.map_or(now, |asked| asked.max(last_packet)));
        let is_probed_again = facts.probes > 1;
        self.probed_again = is_probed_again.then(|| self.probed_again.unwrap_or(now));
        let waits = facts.in_flight > 0 || facts.not_sent > 0;
        let has_moved = |(bytes, _)| bytes != facts.acknowledged;
        self.is_active = waits || facts.probes > 0 || self.moved.is_none_or(has_moved);
        let before = self
            .moved
            .filter(|(bytes, _)| waits && *bytes == facts.acknowledged);
        let (_, moved) = *self
            .moved
            .insert(before.unwrap_or((facts.acknowledged, now)));
        let has_no_room = facts.in_flight == 0 && waits;
        let question = if has_no_room {
            self.probed_again
        } else {
            self.asked
        };
        let is_due = |since: Instant| now.duration_since(since) >= REPORTED;
        match self.asked {
            Some(asked) if question.is_some_and(is_due) => {
                PeerState::Silent(if waits { asked } else { last_packet })
            }
            _ if has_no_room && is_due(moved) => PeerState::NotReading(moved),
            _ => PeerState::Fine,
        }
    }
}

/// Watches connections to other hosts, and finds hosts that no longer answer.
#[derive(Debug)]
pub struct Liveness {
    /// Maximum silence; zero for no limit.
    limit: Duration,
    samples: Vec<ConnectionSamples>,
    last_sample: Option<Instant>,
    stall: Option<Stall>,
    /// Interval to the next sample; `None` if all connections are on this host.
    interval: Option<Duration>,
}

impl Liveness {
    /// Starts to watch `streams`. A peer counts as lost after a silence of `limit`; zero means never.
    pub fn new<'s>(limit: Duration, streams: impl Iterator<Item = &'s Stream>) -> Self {
        let samples = streams.map(|stream| {
            stream.set_silence_limit(limit);
            ConnectionSamples::default()
        });
        Self {
            limit,
            samples: samples.collect(),
            last_sample: None,
            stall: None,
            interval: Some(INTERVAL),
        }
    }

    /// Samples `streams` if a sample is due. The order of `streams` must be the same as in [`Liveness::new`]. Returns the worst
    /// stall; `None` without a stall. `is_suspect` is true if other information suggests that a peer is lost. Then a peer
    /// counts as lost after a silence of 5 s, or of the limit if that is shorter.
    ///
    /// # Errors
    /// [`MigrationError::Silent`] if a peer counts as lost.
    pub fn poll<'s>(
        &mut self,
        streams: impl Iterator<Item = &'s Stream>,
        now: Instant,
        is_suspect: bool,
    ) -> Result<Option<Stall>, MigrationError> {
        let is_due = |last_sample| now.duration_since(last_sample) >= INTERVAL;
        if self.last_sample.is_none_or(is_due) {
            let facts = streams.map(|stream| stream.tcp_sending().zip(stream.peer_ip()));
            self.sample(facts, now);
        }
        match self.stall {
            Some(stall) if is_lost(&stall, self.limit, is_suspect) => Err(MigrationError::Silent {
                host: stall.peer.to_string(),
                waited: Duration::from_secs(stall.time.as_secs()),
            }),
            stall => Ok(stall),
        }
    }

    /// Samples all connections at the time `now`.
    fn sample(&mut self, facts: impl Iterator<Item = Option<(TcpSending, IpAddr)>>, now: Instant) {
        let is_stale = |last_sample| now.duration_since(last_sample) >= REPORTED;
        if self.last_sample.is_some_and(is_stale) {
            // This process was stopped in between. The activity of its peers in that time is unknown.
            self.samples.fill_with(ConnectionSamples::default);
        }
        self.last_sample = Some(now);
        let mut is_remote = false;
        let facts = facts.inspect(|facts| is_remote |= facts.is_some());
        self.stall = worst(&mut self.samples, facts, now);
        let is_active = self.samples.iter().any(|sample| sample.is_active);
        self.interval = is_remote.then_some(match self.limit {
            _ if is_active => INTERVAL,
            Duration::ZERO => IDLE_INTERVAL,
            limit => (limit / 4).clamp(INTERVAL, IDLE_INTERVAL),
        });
    }

    /// Returns the time of the next sample; `None` if no more samples are needed.
    #[must_use]
    pub fn next(&self, now: Instant) -> Option<Instant> {
        match self.last_sample {
            Some(last_sample) => Some(last_sample + self.interval?),
            None => Some(now),
        }
    }

    /// Samples the connections of the migration that `control` belongs to. Stores the stall in `control`, for progress reports.
    pub(crate) fn poll_for<'s>(
        &mut self,
        control: &Control,
        streams: impl Iterator<Item = &'s Stream>,
    ) -> Result<(), MigrationError> {
        let polled = self.poll(streams, control.life().now(), control.is_peer_suspect());
        control.set_stall(self.stall);
        polled.map(drop)
    }
}

/// Returns the longest silence. Without a silence, returns the longest time in which a peer has not read; `None` without a
/// stall.
fn worst(
    samples: &mut [ConnectionSamples],
    facts: impl Iterator<Item = Option<(TcpSending, IpAddr)>>,
    now: Instant,
) -> Option<Stall> {
    let stalls = samples.iter_mut().zip(facts).filter_map(|(sample, facts)| {
        let (facts, peer) = facts?;
        let (kind, since) = match sample.take(now, &facts) {
            PeerState::Fine => return None,
            PeerState::Silent(since) => (StallKind::Silent, since),
            PeerState::NotReading(since) => (StallKind::NotReading, since),
        };
        Some(Stall {
            kind,
            peer: peer.to_canonical(),
            time: now.duration_since(since),
        })
    });
    stalls.max_by_key(|stall| (stall.kind == StallKind::Silent, stall.time))
}

/// Returns true if the stall must end the migration.
fn is_lost(stall: &Stall, limit: Duration, is_suspect: bool) -> bool {
    let limit = match is_suspect {
        true if !limit.is_zero() => limit.min(REPORTED),
        _ => limit,
    };
    stall.kind == StallKind::Silent && !limit.is_zero() && stall.time >= limit
}

#[cfg(test)]
mod tests {
    use std::net::Ipv4Addr;

    use super::*;

    const MS: Duration = Duration::from_millis(1);
    const LIMIT: Duration = Duration::from_secs(40);
    const PEER: IpAddr = IpAddr::V4(Ipv4Addr::new(192, 0, 2, 2));

    /// A connection with a virtual clock.
    struct Virtual {
        begun: Instant,
        samples: [ConnectionSamples; 1],
    }

    impl Virtual {
        fn new() -> Self {
            Self {
                begun: Instant::now() + Duration::from_secs(3600),
                samples: [ConnectionSamples::default()],
            }
        }

        /// Evaluates the sample `facts`. Both times, of the sample and of the peer's last packet, are measured from the start.
        fn at(
            &mut self,
            time: Duration,
            last_packet: Duration,
            facts: TcpSending,
        ) -> Option<Stall> {
            let facts = TcpSending {
                since_last_packet: time - last_packet,
                ..facts
            };
            let facts = std::iter::once(Some((facts, PEER)));
            worst(&mut self.samples, facts, self.begun + time)
        }
    }

    fn secs(seconds: u64) -> Duration {
        Duration::from_secs(seconds)
    }

    fn in_flight() -> TcpSending {
        TcpSending {
            acknowledged: 1000,
            in_flight: 67,
            not_sent: 325_800,
            ..TcpSending::default()
        }
    }

    fn no_room(probes: u8) -> TcpSending {
        TcpSending {
            acknowledged: 1000,
            probes,
            not_sent: 325_800,
            ..TcpSending::default()
        }
    }

    fn idle(probes: u8) -> TcpSending {
        TcpSending {
            acknowledged: 1000,
            probes,
            ..TcpSending::default()
        }
    }

    fn silent(time: Duration) -> Stall {
        Stall {
            kind: StallKind::Silent,
            peer: PEER,
            time,
        }
    }

    fn not_reading(time: Duration) -> Stall {
        Stall {
            kind: StallKind::NotReading,
            ..silent(time)
        }
    }

    #[test]
    fn a_peer_without_acknowledgements_is_silent_after_5_s_and_lost_at_the_limit() {
        let mut peer = Virtual::new();
        assert_eq!(peer.at(secs(1), secs(1), in_flight()), None);
        assert_eq!(peer.at(secs(6) - MS, secs(1), in_flight()), None);
        let stall = peer.at(secs(6), secs(1), in_flight()).unwrap();
        assert_eq!(stall, silent(secs(5)));
        assert!(!is_lost(&stall, LIMIT, false));
        let before = peer.at(secs(41) - MS, secs(1), in_flight()).unwrap();
        assert!(!is_lost(&before, LIMIT, false));
        let stall = peer.at(secs(41), secs(1), in_flight()).unwrap();
        assert_eq!(stall, silent(LIMIT));
        assert!(is_lost(&stall, LIMIT, false));
        assert!(!is_lost(&stall, Duration::ZERO, false), "0 is never");
        assert!(!is_lost(&stall, Duration::ZERO, true), "0 is never");
        assert_eq!(peer.at(secs(42), secs(42), in_flight()), None, "it is back");
    }

    #[test]
    fn a_suspect_peer_is_lost_when_its_silence_is_reported() {
        assert!(is_lost(&silent(REPORTED), LIMIT, true));
        assert!(!is_lost(&not_reading(LIMIT), LIMIT, true));
        assert!(
            is_lost(&silent(secs(2)), secs(2), true),
            "a shorter limit stays"
        );
    }

    #[test]
    fn data_after_a_long_pause_starts_a_new_silence() {
        let mut peer = Virtual::new();
        assert_eq!(peer.at(secs(9), secs(0), idle(0)), None);
        assert_eq!(peer.at(secs(10), secs(0), in_flight()), None);
        assert_eq!(peer.at(secs(15) - MS, secs(0), in_flight()), None);
        let stall = peer.at(secs(15), secs(0), in_flight());
        assert_eq!(stall, Some(silent(secs(5))), "from the question on");
    }

    #[test]
    fn a_stopped_reader_that_answers_probes_is_never_lost() {
        let mut peer = Virtual::new();
        assert_eq!(peer.at(secs(1), secs(1), in_flight()), None);
        assert_eq!(peer.at(secs(2), secs(1), no_room(0)), None);
        assert_eq!(peer.at(secs(6) - MS, secs(5), no_room(0)), None);
        let stall = peer.at(secs(6), secs(5), no_room(0));
        assert_eq!(stall, Some(not_reading(secs(5))));
        // Two probes 100 s apart. Each is sampled before its answer.
        for (time, last_packet) in [(60, 10), (110, 60), (160, 111)] {
            let stall = peer.at(secs(time), secs(last_packet), no_room(1)).unwrap();
            assert_eq!(stall, not_reading(secs(time - 1)));
            assert!(!is_lost(&stall, LIMIT, true));
            peer.at(secs(time + 1), secs(time), no_room(0));
        }
        let reads = TcpSending {
            acknowledged: 2000,
            ..no_room(0)
        };
        assert_eq!(peer.at(secs(170), secs(170), reads), None, "it reads again");
    }

    #[test]
    fn a_stopped_reader_is_lost_after_an_unanswered_probe() {
        let mut peer = Virtual::new();
        peer.at(secs(0), secs(0), no_room(0));
        peer.at(secs(100), secs(1), no_room(1));
        // One packet may be lost.
        let stall = peer.at(secs(190), secs(1), no_room(1)).unwrap();
        assert_eq!(stall, not_reading(secs(190)));
        peer.at(secs(200), secs(1), no_room(2));
        let stall = peer.at(secs(205) - MS, secs(1), no_room(2)).unwrap();
        assert!(!is_lost(&stall, LIMIT, false));
        let stall = peer.at(secs(205), secs(1), no_room(2)).unwrap();
        assert_eq!(stall, silent(secs(105)));
        assert!(is_lost(&stall, LIMIT, false));
    }

    #[test]
    fn an_idle_connection_is_lost_by_its_keepalive_since_the_last_reply() {
        let mut peer = Virtual::new();
        assert_eq!(
            peer.at(secs(10), secs(0), idle(0)),
            None,
            "nothing is asked"
        );
        assert_eq!(peer.at(secs(11), secs(0), idle(1)), None, "just asked");
        assert_eq!(peer.at(secs(12), secs(11), idle(0)), None, "answered");
        peer.at(secs(22), secs(11), idle(1));
        let stall = peer.at(secs(27), secs(11), idle(1));
        assert_eq!(stall, Some(silent(secs(16))));
        let stall = peer.at(secs(51), secs(11), idle(3)).unwrap();
        assert!(is_lost(&stall, LIMIT, false));
    }

    #[test]
    fn a_socket_whose_peer_does_not_read_is_reported_and_not_lost() {
        use std::io::Write;
        use std::net::{TcpListener, TcpStream};
        let listener = TcpListener::bind("127.0.0.1:0").unwrap();
        let mut sender = TcpStream::connect(listener.local_addr().unwrap()).unwrap();
        let (_receiver, _) = listener.accept().unwrap();
        let streams = [Stream::of_tcp(sender.try_clone().unwrap()).unwrap()];
        let (unix, _other) = Stream::pair().unwrap();
        let streams = || streams.iter().chain([&unix]);
        sender.set_nonblocking(true).unwrap();
        while sender.write(&[0; 1 << 16]).is_ok() {}
        let control = Control::new();
        control.suspect_peer();
        let mut liveness = Liveness::new(Duration::from_secs(1), streams());
        while control.stall().is_none() {
            // Data that fits only after an acknowledgement is not progress of the reader.
            let _ = sender.write(&[0; 1 << 16]);
            liveness.poll_for(&control, streams()).unwrap();
            std::thread::sleep(INTERVAL);
        }
        let stall = control.stall().unwrap();
        assert_eq!(stall.kind, StallKind::NotReading);
        assert_eq!(stall.peer, Ipv4Addr::LOCALHOST);
        assert!(
            stall.to_string().starts_with("127.0.0.1 not reading for "),
            "{stall}"
        );
    }

    #[test]
    fn a_process_that_was_stopped_counts_silence_from_its_next_sample() {
        let begun = Instant::now() + secs(3600);
        let mut liveness = Liveness {
            limit: LIMIT,
            samples: vec![ConnectionSamples::default()],
            last_sample: None,
            stall: None,
            interval: Some(INTERVAL),
        };
        let mut at = |time: Duration| {
            let facts = TcpSending {
                since_last_packet: time,
                ..in_flight()
            };
            liveness.sample(std::iter::once(Some((facts, PEER))), begun + time);
            liveness.stall
        };
        for time in 0..5 {
            assert_eq!(at(secs(time)), None);
        }
        assert_eq!(at(secs(9) - MS), Some(silent(secs(9) - MS)), "no gap");
        assert_eq!(at(secs(60)), None, "a gap");
        assert_eq!(at(secs(64)), None);
        assert_eq!(at(secs(65)), Some(silent(secs(5))));
    }

    #[test]
    fn a_silence_takes_precedence_over_a_stopped_reader() {
        let now = Instant::now() + Duration::from_secs(3600);
        let mut samples = [
            ConnectionSamples::default(),
            ConnectionSamples::default(),
            ConnectionSamples::default(),
        ];
        let facts = |since_last_packet| {
            [no_room(0), in_flight(), idle(0)].map(|facts| {
                Some((
                    TcpSending {
                        since_last_packet,
                        ..facts
                    },
                    PEER,
                ))
            })
        };
        assert_eq!(
            worst(&mut samples, facts(Duration::ZERO).into_iter(), now),
            None
        );
        let stall = worst(&mut samples, facts(secs(20)).into_iter(), now + secs(20));
        assert_eq!(stall, Some(silent(secs(20))));
    }
}

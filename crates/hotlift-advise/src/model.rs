//! What a migration will take: arithmetic on measured numbers, and nothing else.
//!
//! A round is a pipeline of four stages: the channel threads find zero pages, encode and send; the wire carries
//! bytes; the channel threads of the other side receive and decode. The slowest sets the pace:
//!
//! ```text
//! source        CPU of a GiB / min(channels × share, cores)    a device's wait counts for the thread, not for the cores
//! wire          bytes of a GiB / bandwidth
//! destination   CPU of a GiB / min(channels × share, cores)
//! both          the sum of both CPUs / cores                   where both ends share a host
//! ```
//!
//! While a round lasts the guest dirties pages, which the next round sends: a geometric series with the ratio
//! dirty rate × seconds of a page. The guest stops when what is left fits into the downtime limit.

use hotlift_host::cost::{Codec, Costs, GIB, Relays, Work};
use serde::Serialize;

/// Pages of a GiB.
pub const PAGES_OF_A_GIB: f64 = GIB / 4096.0;

/// Bytes of a packet's header for each of its pages: an offset of 8 bytes, and its share of the rest.
const HEADER_OF_A_PAGE: f64 = 8.6;

/// Stopping the guest, its devices' state, and both sides' word that it runs there, in seconds, on a host that does
/// nothing else: downtimes of idle guests, 0.4 to 0.8 ms in most runs of bench/results/2026-11-21-pair.jsonl. Other work
/// adds what its time slices are long, for each of the dozen threads that wake each other up.
const SWITCHOVER: f64 = 0.0006;

/// The same with QEMUs and relays: 4 to 12 ms (bench/README.md, "Through the relay").
const SWITCHOVER_WITH_RELAYS: f64 = 0.008;

/// Ways over the link and back while the guest stands still: PING and PONG, commit and SHUT.
const ROUND_TRIPS: f64 = 2.0;

/// A round that leaves more than this share of what the one before left is no progress, as the engine has it.
pub const PROGRESS: f64 = 0.9;

/// Rounds without progress after which a migration is said not to converge.
const STALLED_ROUNDS: u32 = 3;

/// Fewer cores than that are none.
const LEAST_CORES: f64 = 0.01;

/// The most rounds that are followed.
const MOST_ROUNDS: u32 = 200;

/// The guest's memory.
#[derive(Debug, Clone, Copy, PartialEq, Serialize)]
pub struct Load {
    /// Pages of RAM.
    pub pages: f64,
    /// Share of the pages that were never touched.
    pub untouched_share: f64,
    /// Share of the pages that are zero, though touched.
    pub zero_share: f64,
    /// Pages that the guest dirties in a second.
    pub dirty_rate: f64,
    /// Pages that it writes to at all.
    pub working_set: f64,
}

/// The hosts, as measured; unless the other was asked it is taken to be like this one.
#[derive(Debug, Clone, Copy, PartialEq, Serialize)]
pub struct Machine {
    /// Cores that the source can have.
    pub source_cores: f64,
    /// Cores that the destination can have.
    pub destination_cores: f64,
    /// What a thread of the source gets of a core: other work has the rest.
    pub source_share: f64,
    /// The same at the destination.
    pub destination_share: f64,
    /// Both sides share the cores of one host.
    pub same_host: bool,
    /// Seconds of a core to find a GiB of zero pages.
    pub zero_scan: f64,
    /// Seconds of a core to see that the pages of a GiB are not zero.
    pub look: f64,
    /// Seconds of a core to send a GiB.
    pub send: f64,
    /// Seconds of a core to receive a GiB into memory that exists.
    pub receive: f64,
    /// Seconds of a core for the first touch of a GiB at the destination; 0 if it was populated before.
    pub first_touch: f64,
    /// Bytes a second that the link carries; infinite if it is not the limit.
    pub bandwidth: f64,
    /// Seconds over the link and back; 0 where it is not known.
    pub round_trip: f64,
    /// Both ends are QEMUs, with a relay beside each.
    pub relays: Option<Relays>,
}

/// Who looks for zero pages, with the names of `zero-page-detection`.
#[derive(Debug, Clone, Copy, PartialEq, Eq, Serialize)]
#[serde(rename_all = "kebab-case")]
pub enum ZeroPages {
    /// The channel threads.
    Multifd,
    /// Nobody: they are sent as if they had content.
    None,
    /// The migration thread, one for all.
    Legacy,
    /// DSA devices. Not measured; predicted as if it were the channel threads.
    DsaAccel,
}

impl ZeroPages {
    /// As the option is typed.
    pub fn name(self) -> &'static str {
        match self {
            Self::Multifd => "multifd",
            Self::None => "none",
            Self::Legacy => "legacy",
            Self::DsaAccel => "dsa-accel",
        }
    }
}

/// What an operator chooses beside the method.
#[derive(Debug, Clone, Copy, PartialEq, Serialize)]
pub struct Settings {
    /// Multifd channels.
    pub channels: u8,
    /// Who looks for zero pages.
    pub zero_pages: ZeroPages,
    /// Seconds that the guest may stand still.
    pub downtime_limit: f64,
}

/// What sets the pace of a round.
#[derive(Debug, Clone, Copy, PartialEq, Eq, Serialize)]
#[serde(rename_all = "kebab-case")]
pub enum Limit {
    /// Channel threads or cores of the source.
    Source,
    /// The link.
    Wire,
    /// Channel threads or cores of the destination.
    Destination,
    /// The cores of the one host that both sides share.
    SharedCores,
}

/// A migration that has not happened yet. Times in seconds.
#[derive(Debug, Clone, Copy, PartialEq, Serialize)]
pub struct Prediction {
    /// From the request until the destination runs the guest; of one that does not converge, until that is plain.
    pub total_s: f64,
    /// How long the guest stands still.
    pub downtime_s: f64,
    /// Passes over the dirty pages, the last one with the guest stopped.
    pub rounds: u32,
    /// Bytes on the wire.
    pub wire_bytes: f64,
    /// CPU time of the source.
    pub source_cpu_s: f64,
    /// CPU time of the destination.
    pub destination_cpu_s: f64,
    /// What is left comes to fit into the downtime limit.
    pub converges: bool,
    /// Dirty pages a second that each round is as fast as: below [`PROGRESS`] of it every round is shorter than the last
    /// by enough to converge.
    pub settles_pages_per_s: f64,
    /// What sets the pace.
    pub limit: Limit,
}

/// What pages take of each stage.
#[derive(Debug, Clone, Copy, Default)]
struct Stages {
    source: Work,
    /// Seconds of the source's migration thread, which is one.
    migration_thread: f64,
    /// Bytes.
    wire: f64,
    destination: Work,
}

impl Stages {
    /// A GiB of pages that are sent, into memory that is `fresh`.
    fn sent(codec: &Codec, costs: &Costs, machine: &Machine, fresh: bool) -> Self {
        let bytes = 1.0 / codec.ratio.max(f64::MIN_POSITIVE);
        let send = Work::of(machine.send);
        let receive = Work::of(machine.receive);
        let touch = Work::of(if fresh { machine.first_touch } else { 0.0 });
        let near = codec.encode.then(send.times(bytes));
        let far = receive.times(bytes).then(codec.decode);
        let (source, destination) = match machine.relays {
            None => (near, far.then(touch)),
            // Each QEMU has its side of the way to its relay besides.
            Some(relays) => {
                let (from, to) = (Work::of(relays.send), Work::of(relays.receive).then(touch));
                match costs.as_they_are {
                    true => (
                        from.beside(Work::of(relays.near)),
                        Work::of(relays.far).beside(to),
                    ),
                    // What passes through a method is received by the relay, and sent anew by the other.
                    false => (
                        from.beside(Work::of(relays.receive).then(near)),
                        far.then(Work::of(relays.send)).beside(to),
                    ),
                }
            }
        };
        Self {
            source,
            migration_thread: 0.0,
            wire: GIB * bytes + HEADER_OF_A_PAGE * PAGES_OF_A_GIB,
            destination,
        }
    }

    /// Looking at pages that take `seconds` for it, by whoever does it.
    fn looked_at(seconds: f64, zero_pages: ZeroPages) -> Self {
        match zero_pages {
            ZeroPages::Multifd | ZeroPages::DsaAccel => Self {
                source: Work::of(seconds),
                ..Self::default()
            },
            ZeroPages::Legacy => Self {
                source: Work {
                    cpu: seconds,
                    thread: 0.0,
                },
                migration_thread: seconds,
                ..Self::default()
            },
            ZeroPages::None => Self::default(),
        }
    }

    /// A GiB of pages with content.
    fn content(costs: &Costs, machine: &Machine, zero_pages: ZeroPages, first: bool) -> Self {
        Self::looked_at(machine.look, zero_pages).and(Self::sent(
            &costs.content,
            costs,
            machine,
            first,
        ))
    }

    /// The zero pages of the first round. One that was found costs nothing at a destination whose memory is fresh.
    fn zeros(load: &Load, costs: &Costs, machine: &Machine, zero_pages: ZeroPages) -> Self {
        let zeros = gib(load.pages * load.zero_share);
        let untouched = gib(load.pages * load.untouched_share);
        if zero_pages == ZeroPages::None {
            return Self::sent(&costs.zeros, costs, machine, true).times(zeros + untouched);
        }
        // The kernel tells a Hotlift what was never touched; a QEMU reads it.
        let looked_at = match machine.relays {
            Some(_) => zeros + untouched,
            None => zeros,
        };
        Self {
            wire: HEADER_OF_A_PAGE * PAGES_OF_A_GIB * (zeros + untouched),
            ..Self::looked_at(machine.zero_scan * looked_at, zero_pages)
        }
    }

    fn times(self, gib: f64) -> Self {
        Self {
            source: self.source.times(gib),
            migration_thread: self.migration_thread * gib,
            wire: self.wire * gib,
            destination: self.destination.times(gib),
        }
    }

    fn and(self, other: Self) -> Self {
        Self {
            source: self.source.then(other.source),
            migration_thread: self.migration_thread + other.migration_thread,
            wire: self.wire + other.wire,
            destination: self.destination.then(other.destination),
        }
    }

    /// How long the pipeline takes for it, and the stage that it waits for.
    fn time(&self, machine: &Machine, channels: u8) -> (f64, Limit) {
        // A thread that competes for its core takes longer for what it does there, and not for waiting for a device.
        let side = |work: &Work, cores: f64, share: f64| {
            let thread = work.thread - work.cpu + work.cpu / share.max(LEAST_CORES);
            (thread / f64::from(channels.max(1))).max(work.cpu / cores.max(LEAST_CORES))
        };
        let source = side(&self.source, machine.source_cores, machine.source_share)
            .max(self.migration_thread / machine.source_share.max(LEAST_CORES));
        let mut slowest = (source, Limit::Source);
        let shared = (self.source.cpu + self.destination.cpu)
            / machine
                .source_cores
                .min(machine.destination_cores)
                .max(LEAST_CORES);
        for other in [
            (self.wire / machine.bandwidth, Limit::Wire),
            (
                side(
                    &self.destination,
                    machine.destination_cores,
                    machine.destination_share,
                ),
                Limit::Destination,
            ),
            (
                if machine.same_host { shared } else { 0.0 },
                Limit::SharedCores,
            ),
        ] {
            if other.0 > slowest.0 {
                slowest = other;
            }
        }
        slowest
    }
}

fn gib(pages: f64) -> f64 {
    pages / PAGES_OF_A_GIB
}

/// Predicts a migration.
pub fn predict(load: &Load, costs: &Costs, machine: &Machine, settings: &Settings) -> Prediction {
    let zero_pages = settings.zero_pages;
    let first = Stages::content(costs, machine, zero_pages, true);
    let again = Stages::content(costs, machine, zero_pages, false);
    let content = load.pages * (1.0 - load.untouched_share - load.zero_share).max(0.0);
    let working_set = load.working_set.min(load.pages);
    let switchover = match machine.relays {
        Some(_) => SWITCHOVER_WITH_RELAYS,
        None => SWITCHOVER,
    } + ROUND_TRIPS * machine.round_trip;

    let mut round = first
        .times(gib(content))
        .and(Stages::zeros(load, costs, machine, zero_pages));
    let (mut time, limit) = round.time(machine, settings.channels);
    let a_page = again.times(gib(1.0)).time(machine, settings.channels).0;
    let mut prediction = Prediction {
        total_s: 0.0,
        downtime_s: 0.0,
        rounds: 0,
        wire_bytes: 0.0,
        source_cpu_s: 0.0,
        destination_cpu_s: 0.0,
        converges: true,
        settles_pages_per_s: if a_page > 0.0 { 1.0 / a_page } else { f64::MAX },
        limit,
    };
    let mut left = content;
    let mut stalled = 0;
    loop {
        prediction.add(&round, time);
        // Where the working set lies is not known: in the first round it is taken to lie first, which leaves
        // the guest the whole round to write to it again.
        let sent_again = if prediction.rounds == 1 { 0.0 } else { left };
        let dirty = dirtied(load.dirty_rate * time, working_set, sent_again);
        // What is left is reckoned with at the rate of the round before, all that it met included (`estimate.rs`).
        let expected = if left > 0.0 { time / left * dirty } else { 0.0 };
        stalled = if dirty < left * PROGRESS {
            0
        } else {
            stalled + 1
        };
        left = dirty;
        round = again.times(gib(dirty));
        time = round.time(machine, settings.channels).0;
        if expected <= settings.downtime_limit {
            break;
        }
        if stalled >= STALLED_ROUNDS || prediction.rounds >= MOST_ROUNDS {
            prediction.converges = false;
            break;
        }
    }
    if prediction.converges {
        prediction.add(&round, time);
        prediction.total_s += switchover;
    }
    // Of one that does not converge: if it were stopped now.
    prediction.downtime_s = time + switchover;
    prediction
}

impl Prediction {
    fn add(&mut self, round: &Stages, time: f64) {
        self.rounds += 1;
        self.total_s += time;
        self.wire_bytes += round.wire;
        self.source_cpu_s += round.source.cpu;
        self.destination_cpu_s += round.destination.cpu;
    }
}

/// Pages that are dirty at the end of a round in which a guest has written so often to random pages of `set`, and
/// `sent` of them were dirty at its start. A page that is sent counts from then on, on average for half of the round;
/// another for all of it.
fn dirtied(writes: f64, set: f64, sent: f64) -> f64 {
    if set <= 0.0 || writes <= 0.0 {
        return 0.0;
    }
    let of_a_page = writes / set;
    let all = -(-of_a_page).exp_m1();
    // The mean of 1 - exp(-t) for t from 0 to `of_a_page`.
    let half = 1.0 - all / of_a_page;
    let sent = sent.min(set);
    sent * half + (set - sent) * all
}

#[cfg(test)]
pub mod tests {
    use super::*;

    const NONE: Costs = Costs {
        as_they_are: true,
        content: Codec::NONE,
        zeros: Codec::NONE,
    };

    fn zstd() -> Costs {
        Costs {
            as_they_are: false,
            content: Codec {
                encode: Work::of(4.0),
                decode: Work::of(1.5),
                ratio: 3.0,
            },
            zeros: Codec {
                encode: Work::of(0.5),
                decode: Work::of(0.2),
                ratio: 1000.0,
            },
        }
    }

    /// Two hosts alike, with a link of so many bytes a second.
    pub fn machine(cores: f64, bandwidth: f64) -> Machine {
        Machine {
            source_cores: cores,
            destination_cores: cores,
            source_share: 1.0,
            destination_share: 1.0,
            same_host: false,
            zero_scan: 0.1,
            look: 0.0,
            send: 0.3,
            receive: 0.25,
            first_touch: 0.25,
            bandwidth,
            round_trip: 0.0,
            relays: None,
        }
    }

    /// Of 1 GiB without zeros.
    fn load(dirty_rate: f64) -> Load {
        Load {
            pages: PAGES_OF_A_GIB,
            untouched_share: 0.0,
            zero_share: 0.0,
            dirty_rate,
            working_set: PAGES_OF_A_GIB,
        }
    }

    const SETTINGS: Settings = Settings {
        channels: 2,
        zero_pages: ZeroPages::Multifd,
        downtime_limit: 0.3,
    };

    fn close(a: f64, b: f64) {
        assert!((a - b).abs() <= 0.01 * b.abs().max(0.01), "{a} is not {b}");
    }

    #[test]
    fn the_slowest_stage_is_the_time_of_an_idle_guest() {
        let slow = predict(&load(0.0), &NONE, &machine(4.0, 125e6), &SETTINGS);
        assert_eq!(slow.limit, Limit::Wire);
        close(slow.total_s, GIB / 125e6 + SWITCHOVER);
        let fast = predict(&load(0.0), &NONE, &machine(4.0, f64::INFINITY), &SETTINGS);
        assert_eq!(fast.limit, Limit::Destination);
        close(fast.total_s, 0.5 / 2.0 + SWITCHOVER);
        let encoding = predict(&load(0.0), &zstd(), &machine(4.0, f64::INFINITY), &SETTINGS);
        assert_eq!(encoding.limit, Limit::Source);
        close(encoding.total_s, (4.0 + 0.1) / 2.0 + SWITCHOVER);
        close(encoding.source_cpu_s, 4.1);
        close(encoding.destination_cpu_s, 1.5 + 0.25 / 3.0 + 0.25);
        close(encoding.wire_bytes, GIB / 3.0);
        assert_eq!(encoding.rounds, 2);
    }

    #[test]
    fn cores_limit_channels_and_one_host_has_its_cores_once() {
        let at = |channels, cores, same_host| {
            let settings = Settings {
                channels,
                ..SETTINGS
            };
            let machine = Machine {
                same_host,
                ..machine(cores, f64::INFINITY)
            };
            predict(&load(0.0), &zstd(), &machine, &settings).total_s - SWITCHOVER
        };
        close(at(1, 4.0, false), 4.1);
        close(at(8, 4.0, false), 4.1 / 4.0);
        close(at(8, 2.0, true), (4.1 + 1.5 + 0.25 + 0.25 / 3.0) / 2.0);
    }

    #[test]
    fn waiting_for_a_device_takes_threads_but_no_cores() {
        let mut device = zstd();
        device.content.encode = Work {
            cpu: 0.2,
            thread: 2.0,
        };
        let at = |channels| {
            let settings = Settings {
                channels,
                ..SETTINGS
            };
            predict(&load(0.0), &device, &machine(1.0, f64::INFINITY), &settings).total_s
                - SWITCHOVER
        };
        close(at(1), 2.1);
        // Then it is the destination, which has one core.
        close(at(8), 1.5 + 0.25 + 0.25 / 3.0);
    }

    #[test]
    fn zero_pages_cost_a_look_and_untouched_ones_nothing() {
        let of = |untouched_share, zero_share| {
            let load = Load {
                untouched_share,
                zero_share,
                ..load(0.0)
            };
            predict(&load, &NONE, &machine(2.0, f64::INFINITY), &SETTINGS)
        };
        close(of(1.0, 0.0).total_s, SWITCHOVER);
        close(of(0.0, 1.0).source_cpu_s, 0.1);
        close(of(0.0, 1.0).destination_cpu_s, 0.0);
        close(of(0.5, 0.25).wire_bytes, 0.25 * GIB);
    }

    #[test]
    fn relays_cost_a_way_more_at_each_side_and_see_pages_that_were_never_touched() {
        let relays = Relays {
            send: 0.4,
            near: 0.2,
            far: 0.15,
            receive: 0.35,
        };
        let of = |costs: &Costs, untouched_share| {
            let machine = Machine {
                relays: Some(relays),
                ..machine(8.0, f64::INFINITY)
            };
            let load = Load {
                untouched_share,
                ..load(0.0)
            };
            predict(&load, costs, &machine, &SETTINGS)
        };
        let none = of(&NONE, 0.0);
        close(none.source_cpu_s, 0.4 + 0.2);
        close(none.destination_cpu_s, 0.15 + 0.35 + 0.25);
        // QEMU and relay work beside each other: the slower one sets the pace.
        close(none.total_s, (0.35 + 0.25) / 2.0 + SWITCHOVER_WITH_RELAYS);
        let compressed = of(&zstd(), 0.0);
        close(compressed.source_cpu_s, 0.4 + 0.35 + 4.0 + 0.1);
        close(
            compressed.destination_cpu_s,
            0.25 / 3.0 + 1.5 + 0.4 + 0.35 + 0.25,
        );
        close(
            compressed.total_s,
            (0.35 + 4.1) / 2.0 + SWITCHOVER_WITH_RELAYS,
        );
        close(of(&NONE, 1.0).source_cpu_s, 0.1);
    }

    #[test]
    fn zero_pages_that_nobody_looks_for_are_sent_and_the_migration_thread_looks_alone() {
        let zeros = Load {
            zero_share: 1.0,
            ..load(0.0)
        };
        let of = |zero_pages, costs: &Costs| {
            let settings = Settings {
                zero_pages,
                ..SETTINGS
            };
            predict(&zeros, costs, &machine(4.0, f64::INFINITY), &settings)
        };
        close(of(ZeroPages::None, &NONE).source_cpu_s, 0.3);
        close(of(ZeroPages::None, &NONE).destination_cpu_s, 0.5);
        close(of(ZeroPages::None, &zstd()).source_cpu_s, 0.5);
        close(
            of(ZeroPages::Multifd, &NONE).total_s,
            0.1 / 2.0 + SWITCHOVER,
        );
        close(of(ZeroPages::Legacy, &NONE).total_s, 0.1 + SWITCHOVER);
    }

    #[test]
    fn threads_that_compete_for_cores_are_slower_and_more_of_them_get_more() {
        let at = |channels| {
            let settings = Settings {
                channels,
                ..SETTINGS
            };
            let machine = Machine {
                source_share: 0.5,
                ..machine(2.0, f64::INFINITY)
            };
            predict(&load(0.0), &zstd(), &machine, &settings).total_s - SWITCHOVER
        };
        close(at(1), 4.1 / 0.5);
        close(at(2), 4.1);
        close(at(8), 4.1 / 2.0);
    }

    #[test]
    fn rounds_are_a_geometric_series_of_the_dirty_rate() {
        // A page takes 1/30518 s at 125 MB/s: at half of that rate each round halves what is left.
        let pages_per_s = 125e6 / 4096.0;
        let half = predict(
            &load(pages_per_s / 2.0),
            &NONE,
            &machine(4.0, 125e6),
            &SETTINGS,
        );
        assert!(half.converges);
        close(half.settles_pages_per_s, pages_per_s);
        // Of so large a working set pages are met twice, so it is a little less than 2.
        let first = GIB / 125e6;
        assert!(
            half.total_s > 1.6 * first && half.total_s < 2.0 * first,
            "{half:?}"
        );
        assert!(half.downtime_s <= 0.3 + SWITCHOVER, "{half:?}");
        assert!(half.rounds > 4, "{half:?}");
    }

    #[test]
    fn a_guest_that_dirties_faster_than_pages_are_settled_does_not_converge() {
        let fast = predict(&load(200_000.0), &NONE, &machine(4.0, 125e6), &SETTINGS);
        assert!(!fast.converges, "{fast:?}");
        assert!(fast.settles_pages_per_s < 200_000.0);
        // Unless all that it writes to fits into the downtime limit.
        let hot_set = Load {
            working_set: 4096.0,
            ..load(200_000.0)
        };
        let hot_set = predict(&hot_set, &NONE, &machine(4.0, 125e6), &SETTINGS);
        assert!(hot_set.converges, "{hot_set:?}");
        // And compression makes room where the wire was the limit.
        let cores = machine(16.0, 125e6);
        let settings = Settings {
            channels: 16,
            ..SETTINGS
        };
        let moderate = load(40_000.0);
        assert!(!predict(&moderate, &NONE, &cores, &settings).converges);
        assert!(predict(&moderate, &zstd(), &cores, &settings).converges);
    }

    #[test]
    fn a_smaller_downtime_limit_costs_rounds() {
        let at = |downtime_limit| {
            let settings = Settings {
                downtime_limit,
                ..SETTINGS
            };
            predict(&load(10_000.0), &NONE, &machine(4.0, 125e6), &settings)
        };
        assert!(at(0.03).rounds > at(0.3).rounds);
        assert!(at(0.03).downtime_s < at(0.3).downtime_s);
    }

    #[test]
    fn no_number_makes_it_loop_or_panic() {
        for pages in [0.0, 1.0, 1e12] {
            for rate in [0.0, 1e12] {
                for cores in [0.0, 1e3] {
                    let load = Load {
                        pages,
                        ..load(rate)
                    };
                    let prediction = predict(&load, &zstd(), &machine(cores, 1.0), &SETTINGS);
                    assert!(prediction.rounds <= MOST_ROUNDS + 1);
                    assert!(prediction.total_s.is_finite());
                }
            }
        }
    }
}

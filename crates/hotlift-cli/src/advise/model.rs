//! What a migration will take: arithmetic on measured numbers, and nothing else.
//!
//! A round is a pipeline of four stages: the channel threads find zero pages, encode and send; the wire carries
//! bytes; the channel threads of the other side receive and decode. The slowest sets the pace:
//!
//! ```text
//! source        CPU of a GiB / min(channels, cores)    a device's wait counts for the thread, not for the cores
//! wire          bytes of a GiB / bandwidth
//! destination   CPU of a GiB / min(channels, cores)
//! both          the sum of both CPUs / cores           where both ends share a host
//! ```
//!
//! While a round lasts the guest dirties pages, which the next round sends: a geometric series with the ratio
//! dirty rate × seconds of a page. The guest stops when what is left fits into the downtime limit.

use serde::Serialize;

/// Bytes of a GiB, the unit of all costs.
pub const GIB: f64 = (1_u64 << 30) as f64;

/// Pages of a GiB.
pub const PAGES_OF_A_GIB: f64 = GIB / 4096.0;

/// Bytes of a packet's header for each of its pages: an offset of 8 bytes, and its share of the rest.
const HEADER_OF_A_PAGE: f64 = 8.6;

/// Stopping the guest, its devices' state, and both sides' word that it runs there, in seconds. An
/// estimate, not a measurement: the downtimes of idle guests seen here were some 5 to 30 ms.
const SWITCHOVER: f64 = 0.012;

/// A round that leaves more than this share of what the one before left is no progress, as the engine has it.
pub const PROGRESS: f64 = 0.9;

/// Rounds without progress after which a migration is said not to converge.
const STALLED_ROUNDS: u32 = 3;

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

/// What one side of a method takes of a GiB of pages with content.
#[derive(Debug, Clone, Copy, Default, PartialEq, Serialize)]
pub struct Work {
    /// Seconds of a core.
    pub cpu: f64,
    /// Seconds that the thread is held up: `cpu`, and waiting for a device.
    pub thread: f64,
}

/// A method at a level, as measured.
#[derive(Debug, Clone, Copy, PartialEq, Serialize)]
pub struct Codec {
    /// Encoding, with the private copy of the pages.
    pub encode: Work,
    /// Decoding into memory that exists.
    pub decode: Work,
    /// Bytes of the pages over bytes of the payload.
    pub ratio: f64,
}

/// The hosts, as measured on this one; the other is taken to be like it.
#[derive(Debug, Clone, Copy, PartialEq, Serialize)]
pub struct Machine {
    /// Cores that a side can have.
    pub cores: f64,
    /// Both sides share the cores of one host.
    pub same_host: bool,
    /// Seconds of a core to find a GiB of zero pages.
    pub zero_scan: f64,
    /// Seconds of a core to send a GiB.
    pub send: f64,
    /// Seconds of a core to receive a GiB into memory that exists.
    pub receive: f64,
    /// Seconds of a core for the first touch of a GiB at the destination; 0 if it was populated before.
    pub first_touch: f64,
    /// Bytes a second that the link carries; infinite if it is not the limit.
    pub bandwidth: f64,
}

/// What an operator chooses beside the method.
#[derive(Debug, Clone, Copy, PartialEq, Serialize)]
pub struct Settings {
    /// Multifd channels.
    pub channels: u8,
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
#[derive(Debug, Clone, Copy)]
struct Stages {
    source: Work,
    /// Bytes.
    wire: f64,
    destination: Work,
}

impl Stages {
    fn of_content(codec: &Codec, machine: &Machine, first: bool) -> Self {
        let bytes = 1.0 / codec.ratio.max(f64::MIN_POSITIVE);
        let plus = |work: Work, more: f64| Work {
            cpu: work.cpu + more,
            thread: work.thread + more,
        };
        let touch = if first { machine.first_touch } else { 0.0 };
        Self {
            source: plus(codec.encode, machine.send * bytes),
            wire: GIB * bytes + HEADER_OF_A_PAGE * PAGES_OF_A_GIB,
            destination: plus(codec.decode, machine.receive * bytes + touch),
        }
    }

    /// Zero pages cost the source a look, and nothing at a destination whose memory is fresh.
    fn of_zeros(machine: &Machine) -> Self {
        Self {
            source: Work {
                cpu: machine.zero_scan,
                thread: machine.zero_scan,
            },
            wire: HEADER_OF_A_PAGE * PAGES_OF_A_GIB,
            destination: Work::default(),
        }
    }

    fn times(self, gib: f64) -> Self {
        let times = |work: Work| Work {
            cpu: work.cpu * gib,
            thread: work.thread * gib,
        };
        Self {
            source: times(self.source),
            wire: self.wire * gib,
            destination: times(self.destination),
        }
    }

    fn and(self, other: Self) -> Self {
        let sum = |a: Work, b: Work| Work {
            cpu: a.cpu + b.cpu,
            thread: a.thread + b.thread,
        };
        Self {
            source: sum(self.source, other.source),
            wire: self.wire + other.wire,
            destination: sum(self.destination, other.destination),
        }
    }

    /// How long the pipeline takes for it, and the stage that it waits for.
    fn time(&self, machine: &Machine, channels: u8) -> (f64, Limit) {
        let cores = machine.cores.max(0.01);
        let side = |work: &Work| (work.thread / f64::from(channels.max(1))).max(work.cpu / cores);
        let mut slowest = (side(&self.source), Limit::Source);
        let shared = (self.source.cpu + self.destination.cpu) / cores;
        for other in [
            (self.wire / machine.bandwidth, Limit::Wire),
            (side(&self.destination), Limit::Destination),
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

/// Predicts a migration.
pub fn predict(load: &Load, codec: &Codec, machine: &Machine, settings: &Settings) -> Prediction {
    let gib = |pages: f64| pages / PAGES_OF_A_GIB;
    let first = Stages::of_content(codec, machine, true);
    let again = Stages::of_content(codec, machine, false);
    let content = load.pages * (1.0 - load.untouched_share - load.zero_share).max(0.0);
    let zeros = load.pages * load.zero_share;

    let mut round = first
        .times(gib(content))
        .and(Stages::of_zeros(machine).times(gib(zeros)));
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
        let dirty = distinct(load.dirty_rate * time, load.working_set.min(load.pages));
        stalled = if dirty < left * PROGRESS {
            0
        } else {
            stalled + 1
        };
        left = dirty;
        round = again.times(gib(dirty));
        time = round.time(machine, settings.channels).0;
        if time <= settings.downtime_limit {
            break;
        }
        if stalled >= STALLED_ROUNDS || prediction.rounds >= MOST_ROUNDS {
            prediction.converges = false;
            break;
        }
    }
    if prediction.converges {
        prediction.add(&round, time);
        prediction.total_s += SWITCHOVER;
    }
    // Of one that does not converge: if it were stopped now.
    prediction.downtime_s = time + SWITCHOVER;
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

/// Different pages among so many that are written at random in a set of pages.
fn distinct(writes: f64, set: f64) -> f64 {
    if set <= 0.0 {
        return 0.0;
    }
    -set * (-writes / set).exp_m1()
}

#[cfg(test)]
mod tests {
    use super::*;

    fn work(seconds: f64) -> Work {
        Work {
            cpu: seconds,
            thread: seconds,
        }
    }

    const NONE: Codec = Codec {
        encode: Work {
            cpu: 0.0,
            thread: 0.0,
        },
        decode: Work {
            cpu: 0.0,
            thread: 0.0,
        },
        ratio: 1.0,
    };

    fn zstd() -> Codec {
        Codec {
            encode: work(4.0),
            decode: work(1.5),
            ratio: 3.0,
        }
    }

    fn machine(cores: f64, bandwidth: f64) -> Machine {
        Machine {
            cores,
            same_host: false,
            zero_scan: 0.1,
            send: 0.3,
            receive: 0.25,
            first_touch: 0.25,
            bandwidth,
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
        let device = Codec {
            encode: Work {
                cpu: 0.2,
                thread: 2.0,
            },
            ..zstd()
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

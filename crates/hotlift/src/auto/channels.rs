//! State that all channels of one migration share: the controller, the link measurements, and statistics.

use std::sync::atomic::{AtomicU32, AtomicU64, Ordering};
use std::sync::{Mutex, MutexGuard, OnceLock};
use std::time::{Duration, Instant};

use hotlift_mem::PAGE_SIZE;
use hotlift_methods::Accelerator;
use hotlift_net::transport::Stream;
use hotlift_wire::multifd::Method;
use hotlift_wire::return_path::Load;

use crate::auto::candidates::{Candidate, RAW, Reader};
use crate::auto::controller::{Bottleneck, Choice, Controller, PacketProbe, PacketTime};
use crate::auto::link::LinkMeter;
use crate::figures::{MethodFigures, to_f64};
use crate::lock::lock;
use crate::options::{Goal, StreamOptions};

/// Minimum count of pages in a destination's report of a method's decoding time: one packet. Reports of fewer pages are
/// ignored.
const ENOUGH_PAGES: f64 = 128.0;

/// Maximum plausible decoding time in a destination's report, in ns per byte. A longer time is an error or a forged value.
const MAX_NANOS_PER_BYTE: f64 = 1000.0;

/// Shared state of method `auto` for all channels of one migration.
#[derive(Debug)]
pub(crate) struct Auto {
    begun: Instant,
    goal: Mutex<Goal>,
    accelerator: Accelerator,
    link: Mutex<LinkMeter>,
    /// Cached result of [`LinkMeter::bytes_in_flight`].
    in_flight: AtomicU32,
    /// Portion of the channels' waiting time that the wire causes, in thousandths.
    share_of_wire: AtomicU32,
    /// Last load report of the destination.
    destination: Mutex<Load>,
    /// Candidates; unset until the program that reads the channels is known.
    choices: OnceLock<Choices>,
}

/// The candidates, their controller, and their statistics.
#[derive(Debug)]
struct Choices {
    candidates: Vec<Candidate>,
    /// Index of the uncompressed candidate; `None` if the reader accepts no uncompressed packets.
    raw: Option<usize>,
    controller: Mutex<Controller>,
    tallies: Vec<CandidateStats>,
}

/// Recent state of the link.
#[derive(Debug, Clone, Copy)]
struct LinkState {
    /// Result of [`LinkMeter::wait_causes`]: the parts of the waiting time that the wire and the destination cause.
    wait_causes: [f64; 2],
    /// Time of the wire to transmit a byte, in ns; 0 while unknown.
    nanos_per_byte: f64,
    /// Fraction of the time, 0 to 1, in which no channel had data on the wire.
    idle: f64,
}

/// Statistics of one candidate.
#[derive(Debug, Default)]
struct CandidateStats {
    packets: AtomicU64,
    pages: AtomicU64,
    bytes_in: AtomicU64,
    bytes_out: AtomicU64,
    cpu_nanos: AtomicU64,
}

/// Cost of encoding a packet.
#[derive(Debug, Clone, Copy)]
pub(crate) struct EncodingCost {
    pub cpu: Duration,
    /// Elapsed time of the channel thread; includes its wait for an accelerator.
    pub thread: Duration,
}

/// Measurements of a sent packet. Times begin at the end of the channel thread's previous packet.
#[derive(Debug, Clone, Copy)]
pub(crate) struct Sent {
    pub candidate: usize,
    pub probe: PacketProbe,
    /// Cost of the encoding; `None` if the packet was sent uncompressed.
    pub encode: Option<EncodingCost>,
    pub pages: usize,
    /// Size of the packet's pages in bytes.
    pub bytes_in: usize,
    /// Size of the packet's payload in bytes.
    pub bytes_out: usize,
    /// CPU time of the system calls that wrote the packet.
    pub send: Duration,
    pub elapsed: Duration,
    /// Part of `elapsed` in which the rate limit `max-bandwidth` delayed the packet.
    pub paced: Duration,
    /// Part of `elapsed` in which the socket had no room for the packet.
    pub blocked: Duration,
}

impl Auto {
    /// Creates the state of method `auto`; returns `None` if the options select another method.
    pub(crate) fn of(options: &StreamOptions, goal: Goal) -> Option<Self> {
        let is_auto = options.multifd() && options.multifd_compression.is_auto();
        is_auto.then(|| Self::new(goal, options.accelerator))
    }

    fn new(goal: Goal, accelerator: Accelerator) -> Self {
        Self {
            begun: Instant::now(),
            goal: Mutex::new(goal),
            accelerator,
            link: Mutex::default(),
            in_flight: AtomicU32::new(0),
            share_of_wire: AtomicU32::new(0),
            destination: Mutex::default(),
            choices: OnceLock::new(),
        }
    }

    /// Sets the program that reads the channels. Must be called before the first packet; later calls are ignored.
    pub(crate) fn reader_is(&self, reader: Reader) {
        self.choices
            .get_or_init(|| self.among(Candidate::all_for(reader, self.accelerator)));
    }

    fn among(&self, candidates: Vec<Candidate>) -> Choices {
        let now = self.begun.elapsed();
        Choices {
            controller: Mutex::new(Controller::new(&candidates, *lock(&self.goal), now)),
            raw: candidates.iter().position(|one| *one == RAW),
            tallies: candidates
                .iter()
                .map(|_| CandidateStats::default())
                .collect(),
            candidates,
        }
    }

    fn choices(&self) -> &Choices {
        // While the reader is unknown, pages are sent uncompressed.
        self.choices.get_or_init(|| self.among(vec![RAW]))
    }

    fn controller(&self) -> MutexGuard<'_, Controller> {
        lock(&self.choices().controller)
    }

    /// Changes the optimization goal of the migration.
    pub(crate) fn set_goal(&self, goal: Goal) {
        *lock(&self.goal) = goal;
        if self.choices.get().is_some() {
            self.controller().set_goal(goal);
        }
    }

    pub(crate) fn candidate(&self, index: usize) -> Candidate {
        self.choices().candidates[index]
    }

    /// Returns the index of the uncompressed candidate; `None` if the reader accepts no uncompressed packets.
    pub(crate) fn raw(&self) -> Option<usize> {
        self.choices().raw
    }

    /// Returns the method to write into the header of a packet that has no payload or an uncompressed payload.
    pub(crate) fn unencoded_method(&self) -> Method {
        match self.raw() {
            Some(_) => Method::None,
            None => self.candidate(0).method,
        }
    }

    /// Excludes the time since the last packet from all measurements, after a pause in which there were no pages to send.
    pub(crate) fn resumed(&self) {
        lock(&self.link).resumed();
        let now = self.begun.elapsed();
        self.controller().resumed(now);
    }

    pub(crate) fn choose(&self, probe: PacketProbe) -> Choice {
        self.controller().choose(probe)
    }

    /// Returns the count of a channel's bytes that wait for the wire. Subtracts from `unacknowledged` the bytes in transit, and
    /// the bytes that wait for the destination. Returns 0 before the first measurements.
    pub(crate) fn waiting(&self, unacknowledged: u32) -> u32 {
        let waiting = unacknowledged.saturating_sub(self.in_flight.load(Ordering::Relaxed));
        let share = self.share_of_wire.load(Ordering::Relaxed);
        whole(f64::from(waiting) * f64::from(share) / 1000.0)
    }

    /// Records a sent packet and samples the sockets. `sockets` are the sockets of all channels. `paced` is the time per byte
    /// that the rate limit `max-bandwidth` enforces, in ns; 0 without a limit.
    pub(crate) fn sent<'s>(
        &self,
        sent: &Sent,
        sockets: impl Iterator<Item = &'s Stream>,
        paced: f64,
    ) {
        let (bytes_in, bytes_out) = (sent.bytes_in as u64, sent.bytes_out as u64);
        // Incompressible content is sent uncompressed.
        let is_raw = bytes_out == bytes_in;
        let sent_as = self.raw().filter(|_| is_raw).unwrap_or(sent.candidate);
        let tally = &self.choices().tallies[sent_as];
        tally.packets.fetch_add(1, Ordering::Relaxed);
        tally.pages.fetch_add(sent.pages as u64, Ordering::Relaxed);
        tally.bytes_in.fetch_add(bytes_in, Ordering::Relaxed);
        tally.bytes_out.fetch_add(bytes_out, Ordering::Relaxed);
        let cpu = sent.encode.map_or(Duration::ZERO, |took| took.cpu) + sent.send;
        let cpu = u64::try_from(cpu.as_nanos()).unwrap_or(u64::MAX);
        tally.cpu_nanos.fetch_add(cpu, Ordering::Relaxed);
        let seen = self.sample_link(sent, sockets, paced);
        let [for_wire, for_destination] = seen.wait_causes;
        let spent = PacketTime {
            probe: sent.probe,
            candidate: sent.candidate,
            elapsed: nanos(sent.elapsed),
            waited: nanos(sent.paced) + nanos(sent.blocked) * for_wire,
            held: nanos(sent.blocked) * for_destination,
            idle: nanos(sent.elapsed) * seen.idle,
        };
        let per_byte = |time: Duration, bytes: u64| nanos(time) / to_f64(bytes.max(1));
        let now = self.begun.elapsed();
        let mut controller = self.controller();
        controller.wire(seen.nanos_per_byte);
        let costs = controller.costs();
        costs.sent(per_byte(sent.send, bytes_out));
        if let (Some(class), Some(took)) = (sent.probe.class, sent.encode) {
            let left = to_f64(bytes_out) / to_f64(bytes_in.max(1));
            costs.encoded(sent.candidate, class, per_byte(took.thread, bytes_in), left);
        }
        controller.spent(spent, now);
    }

    fn sample_link<'s>(
        &self,
        sent: &Sent,
        sockets: impl Iterator<Item = &'s Stream>,
        paced: f64,
    ) -> LinkState {
        let mut link = lock(&self.link);
        link.sent(sent.elapsed, sent.blocked);
        let is_new = link.poll(sockets, Instant::now());
        let free = LinkState {
            wait_causes: link.wait_causes(),
            nanos_per_byte: link.nanos_per_byte(),
            idle: link.idle(),
        };
        if is_new {
            self.in_flight
                .store(whole(link.bytes_in_flight()), Ordering::Relaxed);
            self.share_of_wire
                .store(whole(free.wait_causes[0] * 1000.0), Ordering::Relaxed);
        }
        if paced > free.nanos_per_byte {
            let used = link.bytes_per_second() * paced / 1e9;
            return LinkState {
                nanos_per_byte: paced,
                idle: (1.0 - used).max(0.0),
                ..free
            };
        }
        free
    }

    /// Records the load report of the destination: its decoding times, and the time in which its threads had nothing to read.
    pub(crate) fn destination(&self, load: &Load) {
        let mut last = lock(&self.destination);
        let since = |now: u64, before: u64| to_f64(now.saturating_sub(before));
        let elapsed = since(load.elapsed, last.elapsed);
        if elapsed > 0.0 {
            let busy = since(load.busy, last.busy) / elapsed;
            lock(&self.link).starved((1.0 - busy).max(0.0));
        }
        (last.elapsed, last.busy) = (load.elapsed, load.busy);
        if self.choices.get().is_none() {
            return;
        }
        let mut controller = self.controller();
        let rows = load.methods.iter().zip(&mut last.methods);
        for (method, (now, before)) in Method::ALL.into_iter().zip(rows) {
            let pages = since(now.pages, before.pages);
            if pages >= ENOUGH_PAGES {
                let bytes = pages * to_f64(PAGE_SIZE as u64);
                let per_byte = (since(now.nanos, before.nanos) / bytes).min(MAX_NANOS_PER_BYTE);
                *before = *now;
                let candidates = self.choices().candidates.iter().enumerate();
                for (index, _) in candidates.filter(|(_, one)| one.method == method) {
                    controller.costs().decoded(index, per_byte);
                }
            }
        }
    }

    /// Returns the current bottleneck: the link or the CPUs.
    pub(crate) fn scarce(&self) -> Bottleneck {
        self.controller().scarce()
    }

    /// Returns the count of packets sent with a candidate that was not the best one, only to measure that candidate's cost.
    pub(crate) fn explored(&self) -> u64 {
        self.controller().explored()
    }

    /// Returns the bytes per second that the wire delivered recently.
    pub(crate) fn link_bytes_per_second(&self) -> f64 {
        lock(&self.link).bytes_per_second()
    }

    /// Returns the statistics of each method since the start of the migration. Omits unused methods.
    pub(crate) fn figures(&self) -> Vec<MethodFigures> {
        let Some(choices) = self.choices.get() else {
            return Vec::new();
        };
        let rows = choices.candidates.iter().zip(&choices.tallies);
        rows.filter_map(|(candidate, tally)| {
            let read = |count: &AtomicU64| count.load(Ordering::Relaxed);
            let has_levels = matches!(candidate.method, Method::Zstd | Method::Zlib);
            (read(&tally.packets) > 0).then(|| MethodFigures {
                name: candidate.method.name().to_owned(),
                level: has_levels.then_some(candidate.level),
                packets: read(&tally.packets),
                pages: read(&tally.pages),
                bytes_in: read(&tally.bytes_in),
                bytes_out: read(&tally.bytes_out),
                core_seconds: to_f64(read(&tally.cpu_nanos)) / 1e9,
            })
        })
        .collect()
    }
}

/// Returns the integer part of a non-negative value.
#[expect(
    clippy::cast_possible_truncation,
    clippy::cast_sign_loss,
    reason = "clamped"
)]
fn whole(figure: f64) -> u32 {
    figure.clamp(0.0, f64::from(u32::MAX)) as u32
}

fn nanos(time: Duration) -> f64 {
    time.as_secs_f64() * 1e9
}

//! What all channels of one migration share: the controller, what it has been told of the link, and figures.

use std::sync::atomic::{AtomicU32, AtomicU64, Ordering};
use std::sync::{Mutex, MutexGuard, OnceLock};
use std::time::{Duration, Instant};

use hotlift_mem::PAGE_SIZE;
use hotlift_methods::Accelerator;
use hotlift_net::transport::Stream;
use hotlift_wire::multifd::Method;
use hotlift_wire::return_path::Load;

use crate::auto::candidates::{Candidate, RAW, Reader};
use crate::auto::controller::{Choice, Controller, Look, Scarce, Spent};
use crate::auto::link::LinkMeter;
use crate::figures::{MethodFigures, to_f64};
use crate::lock::lock;
use crate::options::{Goal, Options};

/// Pages of a method over which a destination's word on it says something: those of one packet.
const ENOUGH_PAGES: f64 = 128.0;

/// What a destination says at most that a byte takes, in ns; more is an error, or a lie.
const MOST_NANOS_PER_BYTE: f64 = 1000.0;

/// Method `auto` of one migration.
#[derive(Debug)]
pub(crate) struct Auto {
    begun: Instant,
    goal: Mutex<Goal>,
    accelerator: Accelerator,
    link: Mutex<LinkMeter>,
    /// See [`LinkMeter::bytes_on_the_way`].
    on_the_way: AtomicU32,
    /// Thousandths of what channels wait that are for the wire.
    share_of_wire: AtomicU32,
    /// What the destination said last.
    destination: Mutex<Load>,
    /// What there is to choose from: known when the other side has said who it is.
    choices: OnceLock<Choices>,
}

/// What packets can be sent as, and what came of it.
#[derive(Debug)]
struct Choices {
    candidates: Vec<Candidate>,
    /// The one that sends pages as they are, if there is one.
    raw: Option<usize>,
    controller: Mutex<Controller>,
    tallies: Vec<Tally>,
}

/// The link, as it was of late.
#[derive(Debug, Clone, Copy)]
struct LinkNow {
    /// See [`LinkMeter::waits_for`].
    waits_for: [f64; 2],
    /// Time that the wire takes for a byte, in ns; 0 while it is not known.
    nanos_per_byte: f64,
    /// Share of the time in which no channel had anything on the wire.
    idle: f64,
}

/// What was sent as one candidate.
#[derive(Debug, Default)]
struct Tally {
    packets: AtomicU64,
    pages: AtomicU64,
    bytes_in: AtomicU64,
    bytes_out: AtomicU64,
    cpu_nanos: AtomicU64,
}

/// What encoding a packet took.
#[derive(Debug, Clone, Copy)]
pub(crate) struct Took {
    pub cpu: Duration,
    /// Of the thread: with an accelerator also the time that it waited for that.
    pub thread: Duration,
}

/// One packet that is on its way, and what the thread did from the end of the one before.
#[derive(Debug, Clone, Copy)]
pub(crate) struct Sent {
    pub candidate: usize,
    pub look: Look,
    /// What encoding took, if it was encoded.
    pub encode: Option<Took>,
    pub pages: usize,
    /// Bytes of its pages.
    pub bytes_in: usize,
    /// Bytes of its payload.
    pub bytes_out: usize,
    /// CPU time of writing it.
    pub send: Duration,
    pub elapsed: Duration,
    /// Of which `max-bandwidth` has held it back.
    pub paced: Duration,
    /// Of which the socket has.
    pub blocked: Duration,
}

impl Auto {
    /// Of a migration with these options, if it is to choose.
    pub(crate) fn of(options: &Options, goal: Goal) -> Option<Self> {
        let is_auto = options.multifd() && options.multifd_compression.is_auto();
        is_auto.then(|| Self::new(goal, options.accelerator))
    }

    fn new(goal: Goal, accelerator: Accelerator) -> Self {
        Self {
            begun: Instant::now(),
            goal: Mutex::new(goal),
            accelerator,
            link: Mutex::default(),
            on_the_way: AtomicU32::new(0),
            share_of_wire: AtomicU32::new(0),
            destination: Mutex::default(),
            choices: OnceLock::new(),
        }
    }

    /// Who reads the channels: to be said before the first packet. What is said first holds.
    pub(crate) fn reader_is(&self, reader: Reader) {
        self.choices
            .get_or_init(|| self.among(Candidate::all_for(reader, self.accelerator)));
    }

    fn among(&self, candidates: Vec<Candidate>) -> Choices {
        let now = self.begun.elapsed();
        Choices {
            controller: Mutex::new(Controller::new(&candidates, *lock(&self.goal), now)),
            raw: candidates.iter().position(|one| *one == RAW),
            tallies: candidates.iter().map(|_| Tally::default()).collect(),
            candidates,
        }
    }

    fn choices(&self) -> &Choices {
        // Without a word on who reads, pages as they are.
        self.choices.get_or_init(|| self.among(vec![RAW]))
    }

    fn controller(&self) -> MutexGuard<'_, Controller> {
        lock(&self.choices().controller)
    }

    /// From now on the migration is to be good at this.
    pub(crate) fn set_goal(&self, goal: Goal) {
        *lock(&self.goal) = goal;
        if self.choices.get().is_some() {
            self.controller().set_goal(goal);
        }
    }

    pub(crate) fn candidate(&self, index: usize) -> Candidate {
        self.choices().candidates[index]
    }

    /// The candidate that sends pages as they are, if there is one.
    pub(crate) fn raw(&self) -> Option<usize> {
        self.choices().raw
    }

    /// The method of packets that are not encoded: without content, or with pages as they are.
    pub(crate) fn unencoded_method(&self) -> Method {
        match self.raw() {
            Some(_) => Method::None,
            None => self.candidate(0).method,
        }
    }

    /// There was nothing to send for a while: that time is neither the wire's nor the threads'.
    pub(crate) fn resumed(&self) {
        lock(&self.link).resumed();
        let now = self.begun.elapsed();
        self.controller().resumed(now);
    }

    pub(crate) fn choose(&self, look: Look) -> Choice {
        self.controller().choose(look)
    }

    /// Of so many bytes that a channel has not had acknowledged, those that wait for the wire: not those on their way, and
    /// not those that wait for the destination. None before the first packets are through.
    pub(crate) fn waiting(&self, unacknowledged: u32) -> u32 {
        let waiting = unacknowledged.saturating_sub(self.on_the_way.load(Ordering::Relaxed));
        let share = self.share_of_wire.load(Ordering::Relaxed);
        whole(f64::from(waiting) * f64::from(share) / 1000.0)
    }

    /// Books a packet. `sockets` are those of all channels, and `paced` is the time for a byte that `max-bandwidth` allows, in
    /// ns; 0 without a limit.
    pub(crate) fn sent<'s>(
        &self,
        sent: &Sent,
        sockets: impl Iterator<Item = &'s Stream>,
        paced: f64,
    ) {
        let (bytes_in, bytes_out) = (sent.bytes_in as u64, sent.bytes_out as u64);
        // What does not shrink goes as it is.
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
        let seen = self.look_at_link(sent, sockets, paced);
        let [for_wire, for_destination] = seen.waits_for;
        let spent = Spent {
            look: sent.look,
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
        if let (Some(class), Some(took)) = (sent.look.class, sent.encode) {
            let left = to_f64(bytes_out) / to_f64(bytes_in.max(1));
            costs.encoded(sent.candidate, class, per_byte(took.thread, bytes_in), left);
        }
        controller.spent(spent, now);
    }

    fn look_at_link<'s>(
        &self,
        sent: &Sent,
        sockets: impl Iterator<Item = &'s Stream>,
        paced: f64,
    ) -> LinkNow {
        let mut link = lock(&self.link);
        link.sent(sent.elapsed, sent.blocked);
        let is_new = link.look(sockets, Instant::now());
        let free = LinkNow {
            waits_for: link.waits_for(),
            nanos_per_byte: link.nanos_per_byte(),
            idle: link.idle(),
        };
        if is_new {
            self.on_the_way
                .store(whole(link.bytes_on_the_way()), Ordering::Relaxed);
            self.share_of_wire
                .store(whole(free.waits_for[0] * 1000.0), Ordering::Relaxed);
        }
        if paced > free.nanos_per_byte {
            let used = link.bytes_per_second() * paced / 1e9;
            return LinkNow {
                nanos_per_byte: paced,
                idle: (1.0 - used).max(0.0),
                ..free
            };
        }
        free
    }

    /// What the destination says of itself.
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
                let per_byte = (since(now.nanos, before.nanos) / bytes).min(MOST_NANOS_PER_BYTE);
                *before = *now;
                let candidates = self.choices().candidates.iter().enumerate();
                for (index, _) in candidates.filter(|(_, one)| one.method == method) {
                    controller.costs().decoded(index, per_byte);
                }
            }
        }
    }

    /// What is scarce at present.
    pub(crate) fn scarce(&self) -> Scarce {
        self.controller().scarce()
    }

    /// Packets that went as something else than what was thought best, to learn what it costs.
    pub(crate) fn explored(&self) -> u64 {
        self.controller().explored()
    }

    /// Bytes a second that the wire has delivered of late.
    pub(crate) fn link_bytes_per_second(&self) -> f64 {
        lock(&self.link).bytes_per_second()
    }

    /// What went by which method so far; candidates that were never used are left out.
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

/// A figure that is not negative, without its fraction.
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

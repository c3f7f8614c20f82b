//! Discrete-event simulation of one migration. It computes the controller's observations, and the effects of its decisions.
//!
//! Between two events all progress is uniform: threads at their share of the CPUs, bytes at their channel's share of the wire.
//! Times are in ns, and rates in bytes per ns, so that 1 Gbit/s is 0.125.

use std::collections::VecDeque;
use std::time::Duration;

use super::truth::{KINDS, Random, Truth};
use crate::auto::candidates::Candidate;
use crate::auto::controller::{Choice, Controller, PacketProbe, PacketTime};
use crate::auto::costs::Class;
use crate::figures::to_f64;
use crate::options::Goal;

/// One second, in the simulation's unit of time.
pub(super) const SECOND: f64 = 1e9;

/// Maximum size of a packet's pages in bytes.
const PACKET: f64 = 524_288.0;

/// Bytes per write. The kernel's writes are smaller, but smaller writes would only make the simulation slower.
const CHUNK: f64 = 131_072.0;

/// Unsent bytes at which a channel's write blocks (`TCP_NOTSENT_LOWAT`). The write continues at half of this value.
const LOW_WATER: f64 = 262_144.0;

/// Size of a channel's receive buffer in bytes.
const RECEIVE_BUFFER: f64 = 4_194_304.0;

/// CPU time to sample a packet, in ns.
const SAMPLE_NANOS: f64 = 10_000.0;

/// Interval in ns at which a thread reads its channel's socket statistics.
const REPORT: f64 = 20e6;

/// Interval in ns of the destination's load reports, and of the measurements of the wire.
const FAR_REPORT: f64 = 100e6;

/// Resolution, in ns, of the kernel's statistics of a socket's waiting times.
const JIFFY: f64 = 4e6;

/// Observations before any sample, with an empty queue.
const NOTHING_KNOWN: PacketProbe = PacketProbe {
    class: None,
    queued: 0.0,
};

/// Duration of a slot of the results, in ns.
pub(super) const SLOT: f64 = 10e6;

/// Value that changes at given times. Each entry is a time and the value from then on.
pub(super) type Steps<T> = Vec<(f64, T)>;

fn at<T: Copy>(steps: &Steps<T>, now: f64) -> T {
    let last = steps.iter().rev().find(|(from, _)| *from <= now);
    last.unwrap_or(&steps[0]).1
}

fn next_step<T>(steps: &Steps<T>, now: f64) -> f64 {
    let next = steps.iter().map(|(from, _)| *from).find(|from| *from > now);
    next.unwrap_or(f64::INFINITY)
}

/// Hosts, wire and content of a simulated migration.
#[derive(Debug, Clone)]
pub(super) struct Scenario {
    pub candidates: Vec<Candidate>,
    pub truth: Truth,
    pub channels: usize,
    /// Count of the source's CPUs.
    pub cores: Steps<f64>,
    /// Count of the destination's CPUs; `None` if source and destination share one host.
    pub far_cores: Option<f64>,
    /// Rate of the wire in bytes per ns.
    pub rate: Steps<f64>,
    /// Maximum of a channel's bytes in transit. Bytes in transit do not count as unsent.
    pub window: f64,
    /// Kinds of content to send. A kind that is listed several times occurs more often.
    pub contents: Steps<&'static [usize]>,
    pub seed: u64,
}

/// Policy that selects each packet's encoding.
#[derive(Debug, Clone, Copy)]
pub(super) enum Policy {
    Fixed(usize),
    Auto(Goal),
}

/// Results of one slot of time.
#[derive(Debug, Clone, Default)]
pub(super) struct Slot {
    /// Bytes of pages that were received and decoded.
    pub delivered: f64,
    /// Delivered bytes of pages, by kind of content.
    pub kinds: [f64; KINDS],
    /// CPU time of source and destination in ns.
    pub cpu: f64,
    /// Count of packets by candidate.
    pub packets: Vec<u64>,
    pub explored: u64,
    /// Natural logarithm of the price at the slot's end.
    pub price: f64,
}

impl Slot {
    fn new(candidates: usize) -> Self {
        Self {
            packets: vec![0; candidates],
            ..Self::default()
        }
    }
}

#[derive(Debug, Clone, Copy, PartialEq)]
enum Step {
    Probe,
    Encode,
    Write,
    /// The thread waits for room in the channel's queue.
    Blocked,
}

#[derive(Debug, Clone, Copy)]
struct Packet {
    kind: usize,
    class: Class,
    bytes: f64,
    /// Factors on the usual values of the packet's kind of content: CPU time and size.
    noise: [f64; 2],
    candidate: usize,
    /// Bytes of the packet on the wire.
    left: f64,
    /// Position of the packet's end in the channel, in bytes.
    end: f64,
}

#[derive(Debug)]
struct Sender {
    step: Step,
    /// Remaining CPU time of the current step, in ns.
    work: f64,
    packet: Packet,
    to_write: f64,
    reported: f64,
    /// Idle time of the wire until the sender's last report.
    idle: f64,
    /// Time, since the sender's last report, in which its channel's queue was full.
    blocked: f64,
    /// Time when the sender last measured what limits its channel. The next fields count since this time.
    looked: f64,
    blocked_by_wire: f64,
    blocked_by_far: f64,
    /// Fraction of the waiting time that the wire caused, at that measurement.
    by_wire: f64,
    probe: PacketProbe,
}

#[derive(Debug, Default)]
struct Channel {
    written: f64,
    arrived: f64,
    read: f64,
    packets: VecDeque<Packet>,
    /// Packet that the destination's thread decodes, with the remaining CPU time in ns.
    decoding: Option<(f64, Packet)>,
}

impl Channel {
    fn backlog(&self) -> f64 {
        self.written - self.arrived
    }

    fn room(&self) -> f64 {
        RECEIVE_BUFFER - (self.arrived - self.read)
    }

    fn is_moving(&self) -> bool {
        self.backlog() > 0.5 && self.room() > 0.5
    }
}

/// Random sequence of pages to send.
#[derive(Debug)]
struct Pages {
    random: Random,
    kind: usize,
    run: f64,
}

impl Pages {
    fn next(&mut self, scenario: &Scenario, now: f64) -> Packet {
        if self.run < 1.0 {
            let kinds = at(&scenario.contents, now);
            self.kind = kinds[self.random.index(kinds.len())];
            // 64 KiB to 16 MiB, each order of magnitude with equal probability.
            self.run = 65_536.0 * 2_f64.powf(8.0 * self.random.unit()).floor();
        }
        let bytes = self.run.min(PACKET);
        self.run -= bytes;
        let sample = scenario.truth.sample(self.kind) * self.random.around(0.1);
        Packet {
            kind: self.kind,
            class: Class::of(sample),
            bytes,
            noise: [self.random.around(0.15), self.random.around(0.1)],
            candidate: 0,
            left: 0.0,
            end: 0.0,
        }
    }
}

#[derive(Debug)]
struct Simulation<'a> {
    scenario: &'a Scenario,
    policy: Policy,
    controller: Controller,
    pages: Pages,
    random: Random,
    now: f64,
    senders: Vec<Sender>,
    channels: Vec<Channel>,
    far_report: f64,
    /// Time in which the wire had no data.
    idle: f64,
    /// Since the last report: bytes that arrived, and the time in which the wire had data.
    arrived: [f64; 2],
    /// Since the last report: the destination's CPU time and bytes, by candidate.
    decoded: Vec<[f64; 2]>,
    slots: Vec<Slot>,
    delivered: f64,
}

fn clock(now: f64) -> Duration {
    Duration::from_secs_f64(now / SECOND)
}

/// Simulates until `bytes` bytes of pages are delivered, or until `duration` ns have passed. Returns the results in slots of
/// [`SLOT`].
pub(super) fn simulate(
    scenario: &Scenario,
    policy: Policy,
    duration: f64,
    bytes: f64,
) -> Vec<Slot> {
    let goal = match policy {
        Policy::Auto(goal) => goal,
        Policy::Fixed(_) => Goal::Fastest,
    };
    let mut simulation = Simulation {
        scenario,
        policy,
        controller: Controller::new(&scenario.candidates, goal, Duration::ZERO),
        pages: Pages {
            random: Random(scenario.seed),
            kind: 0,
            run: 0.0,
        },
        random: Random(scenario.seed ^ 0x5bd1_e995),
        now: 0.0,
        senders: Vec::new(),
        channels: (0..scenario.channels).map(|_| Channel::default()).collect(),
        far_report: FAR_REPORT,
        idle: 0.0,
        arrived: [0.0; 2],
        decoded: vec![[0.0; 2]; scenario.candidates.len()],
        slots: vec![Slot::new(scenario.candidates.len())],
        delivered: 0.0,
    };
    for index in 0..scenario.channels {
        let packet = simulation.pages.next(scenario, 0.0);
        simulation.senders.push(Sender {
            step: Step::Probe,
            work: 0.0,
            packet,
            to_write: 0.0,
            reported: 0.0,
            idle: 0.0,
            blocked: 0.0,
            looked: 0.0,
            blocked_by_wire: 0.0,
            blocked_by_far: 0.0,
            by_wire: 1.0,
            probe: NOTHING_KNOWN,
        });
        simulation.begin(index);
    }
    while simulation.now < duration && simulation.delivered < bytes {
        simulation.turn();
    }
    // The last slot is incomplete.
    simulation.slots.pop();
    simulation.slots
}

impl Simulation<'_> {
    /// Advances to the next event.
    fn turn(&mut self) {
        let scenario = self.scenario;
        let slot_end = SLOT * to_f64(u64::try_from(self.slots.len()).unwrap_or(0));
        let cores = at(&scenario.cores, self.now);
        let rate = at(&scenario.rate, self.now);
        let mut runnable = [0_u32; 2];
        let mut moving = 0_u32;
        for (sender, channel) in self.senders.iter().zip(&self.channels) {
            runnable[0] += u32::from(sender.step != Step::Blocked);
            runnable[1] += u32::from(channel.decoding.is_some());
            moving += u32::from(channel.is_moving());
        }
        let [near, far] = runnable.map(f64::from);
        let speed = match scenario.far_cores {
            None => [(cores / (near + far)).min(1.0); 2],
            Some(far_cores) => [(cores / near).min(1.0), (far_cores / far).min(1.0)],
        };
        let share = rate / f64::from(moving);

        let mut until = slot_end
            .min(self.far_report)
            .min(next_step(&scenario.rate, self.now))
            .min(next_step(&scenario.cores, self.now))
            - self.now;
        for (sender, channel) in self.senders.iter().zip(&self.channels) {
            if sender.step != Step::Blocked {
                until = until.min(sender.work / speed[0]);
            }
            if let Some((work, _)) = channel.decoding {
                until = until.min(work / speed[1]);
            }
            if channel.is_moving() {
                let mut bytes = channel.backlog().min(channel.room());
                if sender.step == Step::Blocked {
                    bytes = bytes.min(channel.backlog() - self.scenario.window - LOW_WATER / 2.0);
                }
                if let (None, Some(packet)) = (channel.decoding, channel.packets.front()) {
                    bytes = bytes.min(packet.end - channel.arrived);
                }
                until = until.min(bytes.max(0.0) / share);
            }
        }
        let until = until.max(0.0);

        self.now += until;
        let mut cpu = 0.0;
        for (sender, channel) in self.senders.iter_mut().zip(&mut self.channels) {
            if sender.step == Step::Blocked {
                sender.blocked += until;
                if channel.room() > 0.5 {
                    sender.blocked_by_wire += until;
                } else {
                    sender.blocked_by_far += until;
                }
            } else {
                sender.work -= until * speed[0];
                cpu += until * speed[0];
            }
            if channel.is_moving() {
                channel.arrived += until * share;
                self.arrived[0] += until * share;
            }
            if let Some((work, _)) = &mut channel.decoding {
                *work -= until * speed[1];
                cpu += until * speed[1];
            }
        }
        if moving > 0 {
            self.arrived[1] += until;
        } else {
            self.idle += until;
        }
        self.decode();
        for index in 0..self.senders.len() {
            self.step(index);
        }
        self.reserve(cpu, slot_end);
        if self.now >= self.far_report {
            self.report_far();
        }
    }

    /// Ends the decoding of packets that the destination's threads have finished, and starts their next packets.
    fn decode(&mut self) {
        let Some(slot) = self.slots.last_mut() else {
            return;
        };
        for channel in &mut self.channels {
            if let Some((work, packet)) = channel.decoding
                && work < 0.5
            {
                slot.delivered += packet.bytes;
                slot.kinds[packet.kind] += packet.bytes;
                self.delivered += packet.bytes;
                channel.decoding = None;
            }
            if channel.decoding.is_none()
                && let Some(packet) = channel.packets.front()
                && channel.arrived > packet.end - 0.5
            {
                let work = self.scenario.truth.decode(packet.kind, packet.candidate)
                    * packet.bytes
                    * packet.noise[0];
                let [sum, bytes] = &mut self.decoded[packet.candidate];
                *sum += work;
                *bytes += packet.bytes;
                channel.read = packet.end;
                channel.decoding = Some((work, *packet));
                channel.packets.pop_front();
            }
        }
    }

    /// Adds `cpu` ns of CPU time to the current slot, and closes the slot at its end.
    fn reserve(&mut self, cpu: f64, slot_end: f64) {
        if let Some(slot) = self.slots.last_mut() {
            slot.cpu += cpu;
            slot.price = self.controller.price().ln();
            slot.explored = self.controller.explored();
        }
        if self.now >= slot_end {
            self.slots.push(Slot::new(self.scenario.candidates.len()));
        }
    }

    /// Starts the sender's next step if its current step is done.
    fn step(&mut self, index: usize) {
        let channel = &self.channels[index];
        let unsent = channel.backlog() - self.scenario.window;
        let sender = &mut self.senders[index];
        match sender.step {
            Step::Blocked if unsent < LOW_WATER / 2.0 + 0.5 => self.write(index),
            Step::Probe if sender.work < 0.5 => {
                sender.probe = PacketProbe {
                    class: Some(sender.packet.class),
                    queued: unsent / LOW_WATER,
                };
                if let Choice::Send(candidate) = self.controller.choose(sender.probe) {
                    self.encode(index, candidate);
                }
            }
            Step::Encode if sender.work < 0.5 => {
                let Packet {
                    kind,
                    candidate,
                    noise,
                    class,
                    left,
                    bytes,
                    ..
                } = sender.packet;
                let encode = self.scenario.truth.encode(kind, candidate) * noise[0];
                if encode > 0.0 {
                    self.controller
                        .costs()
                        .encoded(candidate, class, encode, left / bytes);
                }
                self.write(index);
            }
            Step::Write if sender.work < 0.5 => {
                let written = sender.to_write.min(CHUNK);
                sender.to_write -= written;
                self.channels[index].written += written;
                if sender.to_write > 0.5 {
                    self.write(index);
                } else {
                    self.sent(index);
                }
            }
            _ => {}
        }
    }

    /// Starts a packet: selects its encoding.
    fn begin(&mut self, index: usize) {
        let candidate = match self.policy {
            Policy::Fixed(candidate) => candidate,
            Policy::Auto(_) => {
                let unsent = self.channels[index].backlog() - self.scenario.window;
                self.senders[index].probe = PacketProbe {
                    class: None,
                    queued: unsent / LOW_WATER,
                };
                match self.controller.choose(self.senders[index].probe) {
                    Choice::Send(candidate) => candidate,
                    Choice::SampleFirst => {
                        self.senders[index].step = Step::Probe;
                        self.senders[index].work = SAMPLE_NANOS;
                        return;
                    }
                }
            }
        };
        self.encode(index, candidate);
    }

    fn encode(&mut self, index: usize, candidate: usize) {
        let truth = &self.scenario.truth;
        if let Some(slot) = self.slots.last_mut() {
            slot.packets[candidate] += 1;
        }
        let sender = &mut self.senders[index];
        let packet = &mut sender.packet;
        packet.candidate = candidate;
        let left = truth.left(packet.kind, candidate);
        // Incompressible content does not vary.
        let left = if left < 0.99 {
            (left * packet.noise[1]).min(1.0)
        } else {
            left
        };
        packet.left = packet.bytes * left;
        let channel = &mut self.channels[index];
        packet.end = channel
            .packets
            .back()
            .map_or_else(|| channel.written.max(channel.read), |last| last.end)
            + packet.left;
        channel.packets.push_back(*packet);
        sender.step = Step::Encode;
        sender.work = truth.encode(packet.kind, candidate) * packet.bytes * packet.noise[0];
        sender.to_write = packet.left;
    }

    /// Writes the next chunk of the packet, or waits for room in the channel's queue.
    fn write(&mut self, index: usize) {
        let unsent = self.channels[index].backlog() - self.scenario.window;
        let sender = &mut self.senders[index];
        let was_blocked = sender.step == Step::Blocked;
        if unsent >= LOW_WATER && !was_blocked {
            sender.step = Step::Blocked;
        } else {
            sender.step = Step::Write;
            sender.work = sender.to_write.min(CHUNK) * self.scenario.truth.send();
        }
    }

    /// Records a written packet.
    fn sent(&mut self, index: usize) {
        let send = self.scenario.truth.send() * self.random.around(0.1);
        self.controller.costs().sent(send);
        let sender = &mut self.senders[index];
        if self.now - sender.looked >= REPORT {
            let mut jiffies = |time: f64| (time / JIFFY + self.random.unit()).floor();
            let [wire, far] = [sender.blocked_by_wire, sender.blocked_by_far].map(&mut jiffies);
            if wire + far > 0.0 {
                sender.by_wire = wire / (wire + far);
            }
            sender.looked = self.now;
            sender.blocked_by_wire = 0.0;
            sender.blocked_by_far = 0.0;
        }
        let spent = PacketTime {
            probe: sender.probe,
            candidate: sender.packet.candidate,
            elapsed: self.now - sender.reported,
            waited: sender.blocked * sender.by_wire,
            held: sender.blocked * (1.0 - sender.by_wire),
            idle: self.idle - sender.idle,
        };
        self.controller.spent(spent, clock(self.now));
        sender.reported = self.now;
        sender.idle = self.idle;
        sender.blocked = 0.0;
        sender.packet = self.pages.next(self.scenario, self.now);
        self.begin(index);
    }

    fn report_far(&mut self) {
        let [bytes, time] = self.arrived;
        if bytes > 0.0 {
            self.controller
                .wire(time / bytes * self.random.around(0.05));
        }
        for (candidate, [work, bytes]) in self.decoded.iter_mut().enumerate() {
            if *bytes > 0.0 {
                let noise = self.random.around(0.1);
                self.controller
                    .costs()
                    .decoded(candidate, *work / *bytes * noise);
            }
            (*work, *bytes) = (0.0, 0.0);
        }
        self.arrived = [0.0; 2];
        self.far_report += FAR_REPORT;
    }
}

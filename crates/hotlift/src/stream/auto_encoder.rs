//! Encoder of one channel with method `auto`. For each packet it takes a sample, asks the controller for an encoding, and
//! encodes.

use std::sync::Arc;
use std::time::{Duration, Instant};

use hotlift_mem::{PAGE_SIZE, RunQueue, thread_cpu_time};
use hotlift_methods::{Accelerator, EncoderSettings, compressed_ratio};
use hotlift_net::transport::{MAX_UNSENT, Stream};
use hotlift_wire::multifd::Method;

use crate::accelerator_stats::AcceleratorStats;
use crate::auto::channels::{Auto, EncodingCost, Sent};
use crate::auto::controller::{Choice, PacketProbe};
use crate::auto::costs::Class;
use crate::error::MigrationError;
use crate::stream::codec::{ByMethod, Encoder};
use crate::stream::pages::Pages;

/// Count of pages in a packet's sample. The pages are evenly spread over the packet and compressed together. To compress them
/// one by one costs more and is less accurate.
const SAMPLE_PAGES: usize = 4;

/// Minimum off-CPU time that is attributed to a cause. For a shorter time, it costs too much to distinguish a wait for the
/// network from a wait for a CPU.
const MIN_EXAMINED_WAIT: Duration = Duration::from_micros(100);

/// Selected encoding of one packet.
#[derive(Debug, Clone, Copy)]
pub(crate) struct Decided {
    candidate: usize,
    probe: PacketProbe,
    /// Cost of the encoding; `None` if the packet is not encoded.
    encode: Option<EncodingCost>,
}

/// State of the encoder of one channel.
pub(crate) struct AutoEncoder<'a> {
    auto: &'a Auto,
    id: u8,
    accelerator: Accelerator,
    stats: &'a Arc<AcceleratorStats>,
    /// Encoders by method, created on first use.
    encoders: ByMethod<Encoder>,
    sample: Vec<u8>,
    room: Vec<u8>,
    queue: RunQueue,
    /// The thread's clocks at the end of the previous packet; `None` before the first packet of a round.
    before: Option<Mark>,
    /// Time, since the previous packet, for which `cpu-limit` has blocked the thread.
    slept: Duration,
    /// Time, since the previous packet, for which `max-bandwidth` has delayed packets without content.
    paced: Duration,
    /// Off-CPU time that is not attributed to a cause yet, because it was short.
    unseen: Duration,
}

/// Values of the thread's clocks at one time.
#[derive(Debug, Clone, Copy)]
struct Mark {
    at: Instant,
    /// CPU time of the thread.
    cpu: Duration,
    /// Time that the thread has waited for a CPU in the run queue, when last read.
    queued: Duration,
}

impl<'a> AutoEncoder<'a> {
    /// Creates the encoder of channel `id`, for use in the calling thread.
    pub(crate) fn new(
        auto: &'a Auto,
        id: u8,
        accelerator: Accelerator,
        stats: &'a Arc<AcceleratorStats>,
    ) -> Self {
        Self {
            auto,
            id,
            accelerator,
            stats,
            encoders: ByMethod::new(id),
            sample: Vec::with_capacity(SAMPLE_PAGES * PAGE_SIZE),
            room: Vec::new(),
            queue: RunQueue::of_this_thread(),
            before: None,
            slept: Duration::ZERO,
            paced: Duration::ZERO,
            unseen: Duration::ZERO,
        }
    }

    /// Returns the state of method `auto` that all channels share.
    pub(crate) fn shared(&self) -> &'a Auto {
        self.auto
    }

    /// Selects the method of a packet with these pages. `queued` is the count of bytes in the channel's socket that were not
    /// sent; `None` if it is unknown.
    pub(crate) fn decide(&mut self, pages: Pages<'_, '_>, queued: Option<u32>) -> Decided {
        if self.before.is_none() {
            self.begin();
            self.auto.resumed();
        }
        let queued = queued.map_or(0.5, |bytes| f64::from(bytes) / f64::from(MAX_UNSENT));
        let mut probe = PacketProbe {
            class: None,
            queued,
        };
        loop {
            match self.auto.choose(probe) {
                Choice::Send(candidate) => {
                    return Decided {
                        candidate,
                        probe,
                        encode: None,
                    };
                }
                Choice::SampleFirst => probe.class = Some(self.class_of(pages)),
            }
        }
    }

    /// Starts the clock at the first packet of a round, so that earlier time does not count for the packet.
    pub(crate) fn begin(&mut self) {
        self.pause();
        self.before = Some(Mark {
            at: Instant::now(),
            cpu: thread_cpu_time(),
            queued: self.queue.waited(),
        });
    }

    fn class_of(&mut self, pages: Pages<'_, '_>) -> Class {
        self.sample.clear();
        pages.sample(SAMPLE_PAGES, &mut self.sample);
        Class::of(compressed_ratio(&self.sample, &mut self.room))
    }

    /// Returns the method that the packet's header names.
    pub(crate) fn method(&self, decided: &Decided) -> Method {
        self.auto.candidate(decided.candidate).method
    }

    /// Compresses packet `number` into `out`, as decided. Returns false if compression does not shrink the packet, which must
    /// then be sent uncompressed.
    pub(crate) fn encode(
        &mut self,
        decided: &mut Decided,
        number: u64,
        block: &str,
        pages: &[u8],
        out: &mut Vec<u8>,
    ) -> Result<bool, MigrationError> {
        let candidate = self.auto.candidate(decided.candidate);
        let encoder = self.encoders.get(candidate.method, |info| {
            let settings = EncoderSettings {
                accelerator: self.accelerator,
                ..EncoderSettings::software(info.default_level)
            };
            Encoder::of(info, self.id, &settings, self.stats)
        })?;
        let (began, before) = (Instant::now(), thread_cpu_time());
        encoder.set_level(candidate.level, number, block)?;
        encoder.encode(number, block, pages, out)?;
        let cpu = thread_cpu_time().saturating_sub(before);
        let thread = match candidate.is_on_a_device() {
            true => began.elapsed(),
            false => cpu,
        };
        decided.encode = Some(EncodingCost { cpu, thread });
        let shrinks = out.len() < pages.len() || self.auto.raw().is_none();
        Ok(shrinks)
    }

    /// Records a sent packet:
    ///
    /// - `send`: CPU time of the write
    /// - `paced`: delay by the rate limit `max-bandwidth`
    /// - `nanos_per_byte`: time per byte that this rate limit enforces
    /// - `sockets`: sockets of all channels
    pub(crate) fn sent<'s>(
        &mut self,
        decided: &Decided,
        (bytes_in, bytes_out): (usize, usize),
        (send, paced): (Duration, Duration),
        sockets: impl Iterator<Item = &'s Stream>,
        nanos_per_byte: f64,
    ) {
        let Some(before) = self.before else {
            return;
        };
        let mut now = Mark {
            at: Instant::now(),
            cpu: thread_cpu_time(),
            queued: before.queued,
        };
        let elapsed = now.at - before.at;
        let mut off = elapsed.saturating_sub(now.cpu.saturating_sub(before.cpu));
        if off > MIN_EXAMINED_WAIT && off > elapsed / 8 {
            now.queued = self.queue.waited();
            let queued = now.queued.saturating_sub(before.queued);
            let unseen = std::mem::take(&mut self.unseen);
            off = (off + unseen).saturating_sub(queued).min(off);
        } else {
            self.unseen += off;
            off = Duration::ZERO;
        }
        let paced = paced + std::mem::take(&mut self.paced);
        self.before = Some(now);
        let on_device = decided
            .encode
            .map_or(Duration::ZERO, |took| took.thread.saturating_sub(took.cpu));
        let elsewhere = paced + self.slept + on_device;
        self.auto.sent(
            &Sent {
                candidate: decided.candidate,
                probe: decided.probe,
                encode: decided.encode,
                pages: bytes_in / PAGE_SIZE,
                bytes_in,
                bytes_out,
                send,
                elapsed,
                paced: paced.min(off),
                blocked: off.saturating_sub(elsewhere),
            },
            sockets,
            nanos_per_byte,
        );
        self.slept = Duration::ZERO;
    }

    /// Records that `cpu-limit` has blocked the thread for `time`, which must not count as a wait for the network.
    pub(crate) fn slept(&mut self, time: Duration) {
        self.slept += time;
    }

    /// Records that the rate limit `max-bandwidth` has delayed packets without content for `time`.
    pub(crate) fn paced(&mut self, time: Duration) {
        self.paced += time;
    }

    /// Stops the clock at the end of a round, so that later time does not count for a packet.
    pub(crate) fn pause(&mut self) {
        self.before = None;
        (self.slept, self.paced) = (Duration::ZERO, Duration::ZERO);
        self.unseen = Duration::ZERO;
    }
}

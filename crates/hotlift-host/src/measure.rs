//! What the methods make of a sample on this host: ratio, rate and CPU of each, both ways.
//!
//! As many threads as there are cores work at once, as channels do: two cores may be halves of one, and other work
//! takes its part. The methods take turns packet by packet, another one first each time, so that a machine whose
//! speed drifts drifts for all.

use std::sync::Barrier;
use std::thread;
use std::time::{Duration, Instant};

use hotlift_mem::{Backing, GuestRun, RamBlock, thread_cpu_time};
use hotlift_methods::{Accelerator, Decode, Encode, EncoderSettings, METHODS, MethodInfo, RunsOn};
use serde::Serialize;

use crate::error::HostError;
use crate::sample::{PACKET, Packet, Sample};

/// Levels that are measured where a method has levels: its fastest, and those that trade CPU for bytes at a rate that
/// some link could ask for (bench/results/2026-11-22-codecs.txt). Of the others it is the default.
const LEVELS: &[(&str, &[u8])] = &[("zstd", &[1, 3, 6])];

/// How long the methods are measured at most. All of them meet the same packets: ratios of different ones could not be
/// compared. 64 MiB take a core of a Cascade Lake Xeon 5 seconds.
const BUDGET: Duration = Duration::from_secs(10);

/// Threads that measure, at most.
const MOST_THREADS: usize = 16;

const GIB: f64 = (1_u64 << 30) as f64;

/// A method at a level on this host.
#[derive(Debug, Clone, Serialize)]
pub struct Measured {
    /// The method's name.
    pub method: &'static str,
    /// Its level; `null` if it has none.
    pub level: Option<u8>,
    /// A library, or a device.
    pub done_by: String,
    /// On an accelerator.
    pub on_device: bool,
    /// Bytes of pages that it was measured with.
    pub measured_bytes: usize,
    /// Bytes of the pages over bytes of the payload.
    pub ratio: f64,
    /// With the private copy of the pages.
    pub compress: Cost,
    /// Into memory that exists.
    pub decompress: Cost,
}

/// What one direction of a method takes, by bytes of pages with content.
#[derive(Debug, Clone, Copy, PartialEq, Serialize)]
pub struct Cost {
    /// MB (10^6 bytes) a second of one thread, while as many as there are cores do the same. Without a device a thread is
    /// taken to be held up by its own work only.
    pub mb_per_s: f64,
    /// Seconds of a core for a GiB.
    pub core_s_per_gib: f64,
}

/// Threads that measure on a sample at once.
#[must_use]
pub fn threads(sample: &Sample) -> usize {
    let cores = thread::available_parallelism().map_or(1, usize::from);
    cores.min(MOST_THREADS).min(sample.packets.len())
}

/// Measures every method on the sample's pages with content, in the order of the table; nothing if there are none.
/// Method `none` has no work to do, and is not measured.
///
/// # Errors
/// If a method fails, or memory is refused.
pub fn measure(sample: &Sample, accelerators: bool) -> Result<Vec<Measured>, HostError> {
    let settings = settings();
    let threads = threads(sample);
    let barrier = Barrier::new(threads);
    let of_threads = thread::scope(|scope| {
        let handles: Vec<_> = (0..threads)
            .map(|number| {
                let (settings, barrier) = (&settings, &barrier);
                let packets = sample.packets.iter().skip(number).step_by(threads);
                scope.spawn(move || one_thread(packets, settings, accelerators, barrier))
            })
            .collect();
        let ended = handles.into_iter().map(|handle| handle.join());
        ended
            .map(|sums| sums.unwrap_or(Err(HostError::Thread)))
            .collect::<Result<Vec<_>, _>>()
    })?;
    let of_all = |number: usize| {
        let mut sums = of_threads.iter().map(|sums| &sums[number]);
        let first = sums.next()?.clone();
        Some(sums.fold(first, Sums::add))
    };
    let measured = settings.iter().enumerate();
    Ok(measured
        .filter_map(|(number, &(method, level))| Some(of_all(number)?.measured(method, level)))
        .collect())
}

/// What is measured.
fn settings() -> Vec<(&'static MethodInfo, Option<u8>)> {
    let mut settings = Vec::new();
    for method in METHODS.iter().filter(|method| method.name != "none") {
        let levels = LEVELS.iter().find(|(name, _)| *name == method.name);
        match (levels, &method.levels) {
            (Some((_, levels)), _) => {
                settings.extend(levels.iter().map(|&level| (method, Some(level))));
            }
            (None, Some(_)) => settings.push((method, Some(method.default_level))),
            (None, None) => settings.push((method, None)),
        }
    }
    settings
}

/// Seconds of work.
#[derive(Debug, Clone, Copy, Default)]
struct Work {
    /// Of a core.
    cpu: f64,
    /// That the thread was held up: `cpu`, waiting for a device, and for a core that others have.
    thread: f64,
}

impl Work {
    fn and(self, other: Self) -> Self {
        Self {
            cpu: self.cpu + other.cpu,
            thread: self.thread + other.thread,
        }
    }

    /// Runs `work` and books its time.
    fn time<T>(&mut self, work: impl FnOnce() -> T) -> T {
        let (cpu, wall) = (thread_cpu_time(), Instant::now());
        let result = work();
        *self = self.and(Self {
            cpu: (thread_cpu_time().saturating_sub(cpu)).as_secs_f64(),
            thread: wall.elapsed().as_secs_f64(),
        });
        result
    }

    fn cost(self, bytes: usize, on_device: bool) -> Cost {
        let held_up = if on_device { self.thread } else { self.cpu };
        Cost {
            mb_per_s: bytes as f64 / 1e6 / held_up.max(f64::MIN_POSITIVE),
            core_s_per_gib: self.cpu / (bytes.max(1) as f64 / GIB),
        }
    }
}

/// Sums of one method.
#[derive(Debug, Clone, Default)]
struct Sums {
    bytes: usize,
    payload: usize,
    encode: Work,
    decode: Work,
    runs_on: RunsOn,
}

impl Sums {
    fn add(mut self, other: &Self) -> Self {
        self.bytes += other.bytes;
        self.payload += other.payload;
        self.encode = self.encode.and(other.encode);
        self.decode = self.decode.and(other.decode);
        self
    }

    fn measured(self, method: &'static MethodInfo, level: Option<u8>) -> Measured {
        let on_device = matches!(self.runs_on, RunsOn::Hardware(_));
        Measured {
            method: method.name,
            level,
            done_by: match self.runs_on {
                RunsOn::Hardware(device) => device.to_string(),
                RunsOn::Software | RunsOn::Fallback(_) => (method.library)(),
            },
            on_device,
            measured_bytes: self.bytes,
            ratio: self.bytes as f64 / self.payload.max(1) as f64,
            compress: self.encode.cost(self.bytes, on_device),
            decompress: self.decode.cost(self.bytes, on_device),
        }
    }
}

/// All methods over one thread's packets.
fn one_thread<'a>(
    packets: impl Iterator<Item = &'a Packet>,
    settings: &[(&'static MethodInfo, Option<u8>)],
    accelerators: bool,
    barrier: &Barrier,
) -> Result<Vec<Sums>, HostError> {
    let accelerator = if accelerators {
        Accelerator::Auto
    } else {
        Accelerator::Off
    };
    let codecs = settings
        .iter()
        .map(|setting| Codec::new(setting, accelerator));
    let codecs = codecs.collect::<Result<Vec<_>, _>>();
    let target = RamBlock::new("target", PACKET, Backing::Private).map_err(HostError::Memory);
    // Whoever fails must not leave the others waiting.
    barrier.wait();
    let (mut codecs, mut buffers) = (codecs?, Buffers::new(target?));
    let begun = Instant::now();
    for (turn, packet) in packets.enumerate() {
        if turn > 0 && begun.elapsed() > BUDGET {
            break;
        }
        for number in 0..codecs.len() {
            let number = (number + turn) % codecs.len();
            codecs[number].pass(packet, &mut buffers)?;
        }
    }
    Ok(codecs.into_iter().map(|codec| codec.sums).collect())
}

/// Both halves of a method, and what they have done.
struct Codec {
    method: &'static str,
    encoder: Box<dyn Encode>,
    decoder: Box<dyn Decode>,
    sums: Sums,
}

/// What a packet passes. All methods of a thread have the same, so that it is in the cache as it is for a channel.
struct Buffers {
    private: Vec<u8>,
    payload: Vec<u8>,
    target: RamBlock,
}

impl Buffers {
    fn new(target: RamBlock) -> Self {
        Self {
            private: vec![0; PACKET],
            payload: Vec::with_capacity(2 * PACKET),
            target,
        }
    }
}

impl Codec {
    fn new(
        &(method, level): &(&'static MethodInfo, Option<u8>),
        accelerator: Accelerator,
    ) -> Result<Self, HostError> {
        let settings = EncoderSettings {
            level: level.unwrap_or(method.default_level),
            accelerator,
            to_hotlift: true,
            window_max: usize::MAX,
        };
        let failed = |source| HostError::Method {
            method: method.name,
            source,
        };
        Ok(Self {
            method: method.name,
            encoder: (method.encoder)(&settings).map_err(failed)?,
            decoder: (method.decoder)(accelerator).map_err(failed)?,
            sums: Sums::default(),
        })
    }

    /// Compresses a packet, and decompresses it.
    fn pass(&mut self, packet: &Packet, buffers: &mut Buffers) -> Result<(), HostError> {
        let method = self.method;
        let failed = |source| HostError::Method { method, source };
        let pages = &mut buffers.private[..packet.content.len()];
        let payload = &mut buffers.payload;
        let encoder = &mut self.encoder;
        let encoded = self.sums.encode.time(|| {
            pages.copy_from_slice(&packet.content);
            encoder.encode(pages, payload)
        });
        encoded.map_err(failed)?;
        // Where the pages lay: some methods decode neighbours faster.
        let target = &buffers.target;
        let runs = packet.runs.iter().map(|&(at, len)| target.run(at, len));
        let runs: Vec<GuestRun<'_>> = runs.collect::<Result<_, _>>()?;
        let decoder = &mut self.decoder;
        let decoded = self.sums.decode.time(|| decoder.decode(payload, &runs));
        decoded.map_err(failed)?;
        self.sums.bytes += packet.content.len();
        self.sums.payload += payload.len();
        self.sums.runs_on = self.encoder.runs_on();
        Ok(())
    }
}

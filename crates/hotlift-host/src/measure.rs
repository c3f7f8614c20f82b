//! Measurement of the methods with a sample on this host: ratio, rate and CPU of each, in both directions.
//!
//! One thread per core works at once, as channels do: cores may share hardware as hyperthreads, and other processes use them,
//! too. All methods process a packet before the next one, beginning with another method each time, so that changes of the
//! machine's speed affect all equally.

use std::sync::Barrier;
use std::thread;
use std::time::{Duration, Instant};

use hotlift_accel::HARDWARE;
use hotlift_mem::{Backing, GuestRun, RamBlock, thread_cpu_time};
use hotlift_methods::{Accelerator, Decode, Encode, EncoderSettings, METHODS, MethodInfo, RunsOn};
use serde::Serialize;

use crate::error::HostError;
use crate::sample::{PACKET, Packet, Sample};

/// Levels to measure where a method has levels: the fastest, and levels that trade CPU for bytes at a rate that some link needs
/// (bench/results/2026-11-22-codecs.txt). Other methods are measured at their default.
const LEVELS: &[(&str, &[u8])] = &[("zstd", &[1, 3, 6])];

/// Maximum duration of the measurement. All methods get the same packets, else ratios would not be comparable. 64 MiB take a
/// core of a Cascade Lake Xeon 5 seconds.
const BUDGET: Duration = Duration::from_secs(10);

/// Maximum number of measuring threads.
const MAX_THREADS: usize = 16;

const GIB: f64 = (1_u64 << 30) as f64;

/// Measurement of a method at a level on this host.
#[derive(Debug, Clone, Serialize)]
pub struct Measured {
    /// Name of the method.
    pub method: &'static str,
    /// Level; `null` if it has none.
    pub level: Option<u8>,
    /// Name of the library or device.
    pub done_by: String,
    /// True on an accelerator.
    pub on_device: bool,
    /// Bytes of the measured pages.
    pub measured_bytes: usize,
    /// Bytes of the pages divided by bytes of the payload.
    pub ratio: f64,
    /// Cost of compression, with the private copy of the pages.
    pub compress: Cost,
    /// Cost of decompression into existing memory.
    pub decompress: Cost,
}

/// Cost of one direction of a method, by bytes of pages with content.
#[derive(Debug, Clone, Copy, PartialEq, Serialize)]
pub struct Cost {
    /// MB (10^6 bytes) per second of one thread, while one thread per core does the same. With a device, per second of elapsed
    /// time; otherwise per second of the thread's CPU time.
    pub mb_per_s: f64,
    /// Core seconds per GiB.
    pub core_s_per_gib: f64,
}

/// Returns the number of threads that measure a sample at once.
#[must_use]
pub fn threads(sample: &Sample) -> usize {
    let cores = thread::available_parallelism().map_or(1, usize::from);
    cores.min(MAX_THREADS).min(sample.packets.len())
}

/// Measures every method on the sample's pages with content, in the order of the table; nothing if there are none. Method
/// `none` does no work and is not measured.
///
/// # Errors
/// A method fails, or memory cannot be allocated.
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

/// Returns the methods and levels to measure.
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

/// Duration of work in seconds.
#[derive(Debug, Clone, Copy, Default)]
struct Work {
    /// CPU time of the thread.
    cpu: f64,
    /// Elapsed time: `cpu`, the wait for a device, and the wait for a core that others use.
    thread: f64,
}

impl Work {
    fn and(self, other: Self) -> Self {
        Self {
            cpu: self.cpu + other.cpu,
            thread: self.thread + other.thread,
        }
    }

    /// Runs `work` and adds its time.
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

/// Measures all methods with one thread's packets.
fn one_thread<'a>(
    packets: impl Iterator<Item = &'a Packet>,
    settings: &[(&'static MethodInfo, Option<u8>)],
    accelerators: bool,
    barrier: &Barrier,
) -> Result<Vec<Sums>, HostError> {
    let accelerator = if accelerators {
        Accelerator::Auto(&HARDWARE)
    } else {
        Accelerator::Off
    };
    let codecs = settings
        .iter()
        .map(|setting| Codec::new(setting, accelerator));
    let codecs = codecs.collect::<Result<Vec<_>, _>>();
    let target = RamBlock::new("target", PACKET, Backing::Private).map_err(HostError::Memory);
    // Before the errors are returned: a failed thread must not leave the others waiting.
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

/// Both directions of a method, and their sums.
struct Codec {
    method: &'static str,
    encoder: Box<dyn Encode>,
    decoder: Box<dyn Decode>,
    sums: Sums,
}

/// Buffers of a packet. All methods of a thread share them, so that they are in the cache as for a channel.
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
        // At the pages' original positions: some methods decode neighbours faster.
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

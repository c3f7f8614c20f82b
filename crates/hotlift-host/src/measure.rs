//! Measures the compression methods with a sample of memory on this host: ratio, rate and CPU time, for compression and
//! decompression.
//!
//! One thread per core measures at the same time, as channels work. So the results include the effects of hyperthreads and of
//! other processes. Each thread processes a packet with all methods before the next packet, and begins with another method each
//! time. So changes of the machine's speed affect all methods equally.

use std::sync::Barrier;
use std::thread;
use std::time::{Duration, Instant};

use hotlift_accel::HARDWARE;
use hotlift_mem::{Backing, GuestRun, RamBlock, thread_cpu_time};
use hotlift_methods::{Accelerator, Decode, Encode, EncoderSettings, METHODS, MethodInfo, RunsOn};
use serde::Serialize;

use crate::error::HostError;
use crate::sample::{PACKET, Packet, Sample};

/// Levels to measure, by method; other methods are measured at their default level. Chosen are the fastest level, and levels
/// that save bytes for CPU time at a rate that some link needs (bench/results/2026-11-22-codecs.txt).
const LEVELS: &[(&str, &[u8])] = &[("zstd", &[1, 3, 6])];

/// Maximum duration of the measurement. All methods get the same packets, since ratios of different packets are not comparable.
/// For 64 MiB, a core of a Cascade Lake Xeon needs 5 seconds.
const BUDGET: Duration = Duration::from_secs(10);

/// Maximum number of threads that measure at the same time.
const MAX_THREADS: usize = 16;

const GIB: f64 = (1_u64 << 30) as f64;

/// Result of one method at one level on this host.
#[derive(Debug, Clone, Serialize)]
pub struct Measured {
    /// Name of the method.
    pub method: &'static str,
    /// Compression level; `null` if the method has no levels.
    pub level: Option<u8>,
    /// Name of the library or device that compressed.
    pub done_by: String,
    /// True if an accelerator compressed, false if the CPU did.
    pub on_device: bool,
    /// Size of the measured pages, in bytes.
    pub measured_bytes: usize,
    /// Size of the pages divided by the size of the compressed payload.
    pub ratio: f64,
    /// Cost of compression, including the private copy of the pages.
    pub compress: Cost,
    /// Cost of decompression into memory that was touched before.
    pub decompress: Cost,
}

/// Cost of compression or decompression, relative to the bytes of pages that are not zero.
#[derive(Debug, Clone, Copy, PartialEq, Serialize)]
pub struct Cost {
    /// Rate of one thread while one thread per core does the same, in MB (10^6 bytes) per second. The time is elapsed time for
    /// a device, and CPU time of the thread otherwise.
    pub mb_per_s: f64,
    /// CPU time per GiB, in core seconds.
    pub core_s_per_gib: f64,
}

/// Returns the number of threads that measure `sample` at the same time.
#[must_use]
pub fn threads(sample: &Sample) -> usize {
    let cores = thread::available_parallelism().map_or(1, usize::from);
    cores.min(MAX_THREADS).min(sample.packets.len())
}

/// Measures every method with the pages of `sample` that are not zero. Returns the results in the order of the table of
/// methods; none if the sample has no such pages. Does not measure the method `none`, which does no work.
///
/// # Errors
/// If a method fails, memory cannot be allocated, or a thread panics.
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

/// Time that work took, in seconds.
#[derive(Debug, Clone, Copy, Default)]
struct Work {
    /// CPU time of the thread, in seconds.
    cpu: f64,
    /// Elapsed time, in seconds: the CPU time, the wait for a device, and the wait for a core that other threads use.
    thread: f64,
}

impl Work {
    fn and(self, other: Self) -> Self {
        Self {
            cpu: self.cpu + other.cpu,
            thread: self.thread + other.thread,
        }
    }

    /// Runs `work`, and adds the time that it took.
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

/// Sums of one method's measurements over all packets.
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

/// Measures all methods with the packets of one thread.
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
    // Waits before errors are returned: a failed thread must not leave other threads waiting here.
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

/// Encoder and decoder of one method, and the sums of their measurements.
struct Codec {
    method: &'static str,
    encoder: Box<dyn Encode>,
    decoder: Box<dyn Decode>,
    sums: Sums,
}

/// Buffers for one packet. All methods of a thread share these buffers, so they are in the cache, as those of a channel are.
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

    /// Compresses `packet`, decompresses the result, and adds the costs to the sums.
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
        // Decompresses to the original positions of the pages: some methods decode adjacent pages faster.
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

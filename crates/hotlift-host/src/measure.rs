//! What this host does with the sample: each method both ways, zero pages, memory, a connection to itself.
//!
//! As many threads as there are cores work at once, as channels do: two cores may be halves of one, and other work
//! takes its part. The methods take turns packet by packet, another one first each time, so that a machine whose
//! speed drifts drifts for all.

use std::sync::Barrier;
use std::thread;
use std::time::{Duration, Instant};

use hotlift_mem::{Backing, GuestRun, PAGE_SIZE, RamBlock, thread_cpu_time, zero};
use hotlift_methods::{Accelerator, EncoderSettings, METHODS, MethodInfo, RunsOn};
use hotlift_qmp::Version;
use serde::Serialize;

use super::error::HostError;
use super::loopback::{self, Loopback};
use super::sample::{PACKET, Packet, Sample};
use super::survey::{Decoder, Host};
use crate::cost::{Codec, Costs, GIB, Work};

/// Levels that are measured where a method has levels: its fastest, and those that trade CPU for bytes at a rate that
/// some link could ask for (bench/results/2026-11-22-codecs.txt).
const LEVELS: &[(&str, &[u8])] = &[("zlib", &[1]), ("zstd", &[1, 3, 6]), ("qatzip", &[1])];

/// How long the methods are measured at most. All of them meet the same packets: ratios of different ones could not be
/// compared. 64 MiB take a core of a Cascade Lake Xeon 5 seconds.
const BUDGET: Duration = Duration::from_secs(10);

/// Threads that measure, at most.
const MOST_THREADS: usize = 16;

/// Memory that is scanned: more than a core's caches hold.
const STRETCH: usize = 64 << 20;

/// Seconds of work that tell what share of its core a thread gets; less may be a single time slice of somebody else's.
const LEAST_TO_TELL: f64 = 0.2;

/// Packets of zeros that each thread gives to each method.
const ZERO_PACKETS: usize = 2;

/// A method at a level on this host.
#[derive(Debug, Clone, Serialize)]
pub struct Candidate {
    /// The method's name.
    pub method: &'static str,
    /// Its level; `null` if it has none.
    pub level: Option<u8>,
    /// What ran: a library, or a device.
    pub runs_on: String,
    /// On an accelerator.
    pub on_device: bool,
    /// Bytes of the sample that it was measured with.
    pub measured_bytes: usize,
    /// Seconds of a core for a GiB both ways, and the ratio.
    pub costs: Costs,
}

impl Candidate {
    /// A QEMU of this version has the method too, as its `multifd-compression`.
    pub fn is_known_to(&self, qemu: Version) -> bool {
        let since = match self.method {
            "none" => (4, 0),
            "zlib" | "zstd" => (5, 0),
            "qpl" | "uadk" => (9, 1),
            "qatzip" => (9, 2),
            _ => return false,
        };
        (qemu.major, qemu.minor) >= since
    }

    /// As in "zstd 1".
    pub fn name(&self) -> String {
        match self.level {
            Some(level) => format!("{} {level}", self.method),
            None => self.method.to_owned(),
        }
    }
}

/// All that was measured. Costs are seconds of a core for a GiB.
#[derive(Debug, Clone, Serialize)]
pub struct Measured {
    /// Cores that this process may use.
    pub cores: usize,
    /// How many of them its threads got while all of them measured.
    pub cores_free: f64,
    /// Finding zero pages.
    pub zero_scan: f64,
    /// Seeing that pages with content are not zero.
    pub look: f64,
    /// Sockets of this host.
    #[serde(flatten)]
    pub loopback: Loopback,
    /// The methods, in the order of the table.
    pub candidates: Vec<Candidate>,
}

impl Measured {
    /// Takes what another host says of decoding for what this one found; methods that it does not name stay.
    pub fn decoded_by(&mut self, host: &Host) {
        for candidate in &mut self.candidates {
            let mut theirs = host.decoders.iter();
            let is_same = |decoder: &&Decoder| {
                decoder.method == candidate.method && decoder.level == candidate.level
            };
            if let Some(decoder) = theirs.find(is_same) {
                candidate.costs.content.decode = decoder.decode;
            }
        }
    }
}

/// Cores that this process may use.
pub fn cores() -> usize {
    thread::available_parallelism().map_or(1, usize::from)
}

/// Measures everything.
pub fn measure(sample: &Sample, accelerators: bool) -> Result<Measured, HostError> {
    let cores = cores();
    let loopback = loopback::measure(&sample.packets)?;
    let (candidates, cores_free) = methods(sample, cores, accelerators)?;
    Ok(Measured {
        cores,
        cores_free,
        zero_scan: zero_scan()?,
        look: look(sample),
        loopback,
        candidates,
    })
}

/// What is tried: method none costs nothing by itself and is not in it.
fn settings() -> Vec<(&'static MethodInfo, Option<u8>)> {
    METHODS
        .iter()
        .skip(1)
        .flat_map(|method| {
            let levels = LEVELS.iter().find(|(name, _)| *name == method.name);
            let levels: Vec<Option<u8>> = match (levels, &method.levels) {
                (Some((_, levels)), _) => levels.iter().copied().map(Some).collect(),
                (None, Some(_)) => vec![Some(method.default_level)],
                (None, None) => vec![None],
            };
            levels.into_iter().map(move |level| (method, level))
        })
        .collect()
}

/// Sums of one method on one thread.
#[derive(Debug, Clone, Default)]
struct Sums {
    content: Passed,
    zeros: Passed,
    runs_on: RunsOn,
}

/// What went through a method, and what it took.
#[derive(Debug, Clone, Copy, Default)]
struct Passed {
    pages: usize,
    payload: usize,
    encode: Work,
    decode: Work,
}

impl Passed {
    fn and(self, other: Self) -> Self {
        Self {
            pages: self.pages + other.pages,
            payload: self.payload + other.payload,
            encode: self.encode.then(other.encode),
            decode: self.decode.then(other.decode),
        }
    }

    fn codec(self) -> Codec {
        let gib = self.pages.max(1) as f64 / GIB;
        let a_gib = |work: Work| Work {
            cpu: work.cpu / gib,
            thread: work.thread / gib,
        };
        Codec {
            encode: a_gib(self.encode),
            decode: a_gib(self.decode),
            ratio: self.pages as f64 / self.payload.max(1) as f64,
        }
    }
}

fn methods(
    sample: &Sample,
    cores: usize,
    accelerators: bool,
) -> Result<(Vec<Candidate>, f64), HostError> {
    let settings = settings();
    let none = Candidate {
        method: METHODS[0].name,
        level: None,
        runs_on: (METHODS[0].library)(),
        on_device: false,
        measured_bytes: sample.content(),
        costs: Costs {
            as_they_are: true,
            content: Codec::NONE,
            zeros: Codec::NONE,
        },
    };
    let mut candidates = vec![none];
    let threads = cores.min(MOST_THREADS).min(sample.packets.len());
    if threads == 0 {
        return Ok((candidates, cores_free(cores)));
    }
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
    let mut got = Work::NOTHING;
    for (i, (method, level)) in settings.into_iter().enumerate() {
        let sums = of_threads.iter().map(|sums| &sums[i]);
        let all =
            |of: fn(&Sums) -> Passed| sums.clone().map(of).fold(Passed::default(), Passed::and);
        let (content, zeros) = (all(|sums| sums.content), all(|sums| sums.zeros));
        let runs_on = sums.clone().next().map(|sums| sums.runs_on.clone());
        let on_device = matches!(runs_on, Some(RunsOn::Hardware(_)));
        if !on_device {
            got = got.then(content.encode).then(content.decode);
        }
        // Without a device a thread is held up by its own work only; what else runs is counted in the cores.
        let codec = |passed: Passed| match on_device {
            true => passed.codec(),
            false => passed.codec().by_cpu_alone(),
        };
        candidates.push(Candidate {
            method: method.name,
            level,
            runs_on: match runs_on {
                Some(RunsOn::Hardware(device)) => device.to_string(),
                _ => (method.library)(),
            },
            on_device,
            measured_bytes: content.pages,
            costs: Costs {
                as_they_are: false,
                content: codec(content),
                zeros: codec(zeros),
            },
        });
    }
    if got.thread < LEAST_TO_TELL {
        return Ok((candidates, cores_free(cores)));
    }
    let share = got.cpu / got.thread;
    Ok((candidates, cores as f64 * share.min(1.0)))
}

/// What threads that do nothing else get of the cores.
fn cores_free(cores: usize) -> f64 {
    let threads = cores.clamp(1, MOST_THREADS);
    let shares = thread::scope(|scope| {
        let spin = || {
            let mut work = Work::NOTHING;
            let begun = Instant::now();
            timed(&mut work, || {
                while begun.elapsed().as_secs_f64() < LEAST_TO_TELL {
                    std::hint::spin_loop();
                }
            });
            work.cpu / work.thread
        };
        let spinning: Vec<_> = (0..threads).map(|_| scope.spawn(spin)).collect();
        let shares = spinning.into_iter().filter_map(|thread| thread.join().ok());
        shares.sum::<f64>() / threads as f64
    });
    cores as f64 * shares.min(1.0)
}

/// Runs `work` and books its time.
pub fn timed<T>(to: &mut Work, work: impl FnOnce() -> T) -> T {
    let (cpu, wall) = (thread_cpu_time(), Instant::now());
    let result = work();
    to.cpu += (thread_cpu_time().saturating_sub(cpu)).as_secs_f64();
    to.thread += wall.elapsed().as_secs_f64();
    result
}

/// All methods over one thread's packets, and then over zero pages.
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
    let made = make(settings, accelerator);
    let target = RamBlock::new("target", PACKET, Backing::Private).map_err(HostError::Memory);
    // Whoever fails must not leave the others waiting.
    barrier.wait();
    let (mut codecs, target) = (made?, target?);
    let mut sums = vec![Sums::default(); settings.len()];
    let begun = Instant::now();
    let mut private = vec![0; PACKET];
    let mut payload = Vec::with_capacity(2 * PACKET);
    let mut pass = |packet: &Packet, i: usize, (encoder, decoder): &mut BothWays| {
        let mut passed = Passed::default();
        let failed = |source| HostError::Method {
            method: settings[i].0.name,
            source,
        };
        let pages = &mut private[..packet.content.len()];
        timed(&mut passed.encode, || {
            pages.copy_from_slice(&packet.content);
            encoder.encode(pages, &mut payload)
        })
        .map_err(failed)?;
        // Where the pages lay: some methods decode neighbours faster.
        let runs = packet.runs.iter().map(|&(at, len)| target.run(at, len));
        let runs: Vec<GuestRun<'_>> = runs.collect::<Result<_, _>>()?;
        timed(&mut passed.decode, || decoder.decode(&payload, &runs)).map_err(failed)?;
        passed.pages = pages.len();
        passed.payload = payload.len();
        Ok::<_, HostError>(passed)
    };
    for (turn, packet) in packets.enumerate() {
        if turn > 0 && begun.elapsed() > BUDGET {
            break;
        }
        for i in 0..codecs.len() {
            let i = (i + turn) % codecs.len();
            sums[i].content = sums[i].content.and(pass(packet, i, &mut codecs[i])?);
            sums[i].runs_on = codecs[i].0.runs_on();
        }
    }
    let zeros = Packet::of_zeros();
    for _ in 0..ZERO_PACKETS {
        for (i, codec) in codecs.iter_mut().enumerate() {
            sums[i].zeros = sums[i].zeros.and(pass(&zeros, i, codec)?);
        }
    }
    Ok(sums)
}

type BothWays = (
    Box<dyn hotlift_methods::Encode>,
    Box<dyn hotlift_methods::Decode>,
);

fn make(
    settings: &[(&'static MethodInfo, Option<u8>)],
    accelerator: Accelerator,
) -> Result<Vec<BothWays>, HostError> {
    let both = |&(method, level): &(&'static MethodInfo, Option<u8>)| {
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
        let encoder = (method.encoder)(&settings).map_err(failed)?;
        Ok((encoder, (method.decoder)(accelerator).map_err(failed)?))
    };
    settings.iter().map(both).collect()
}

/// Seconds of a core for a GiB of zero pages.
fn zero_scan() -> Result<f64, HostError> {
    let block = RamBlock::new("stretch", STRETCH, Backing::Private)?;
    block.zero(0, STRETCH)?;
    let mut scan = Work::NOTHING;
    let zeros = timed(&mut scan, || {
        (0..block.pages())
            .filter(|page| block.page_is_zero(*page))
            .count()
    });
    std::hint::black_box(zeros);
    Ok(scan.cpu / (STRETCH as f64 / GIB))
}

/// Seconds of a core to see that the pages of a GiB are not zero. Most pages say so in their first bytes, so this is
/// the way to memory.
fn look(sample: &Sample) -> f64 {
    let mut look = Work::NOTHING;
    let pages = sample.packets.iter().flat_map(Packet::pages);
    let zeros = timed(&mut look, || {
        pages.filter(|page| zero::is_zero(*page)).count()
    });
    std::hint::black_box(zeros);
    look.cpu / (sample.content().max(PAGE_SIZE) as f64 / GIB)
}

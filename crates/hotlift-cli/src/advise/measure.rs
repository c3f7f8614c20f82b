//! What this host does with the sample: each method both ways, zero pages, memory, a connection to itself.
//!
//! As many threads as there are cores work at once, as channels do: two cores may be halves of one, and other work
//! takes its part. The methods take turns packet by packet, another one first each time, so that a machine whose
//! speed drifts drifts for all.

use std::io::{self, Read, Write};
use std::net::{Ipv4Addr, TcpListener, TcpStream};
use std::sync::Barrier;
use std::thread;
use std::time::{Duration, Instant};

use hotlift_mem::{Backing, GuestRun, PAGE_SIZE, RamBlock, thread_cpu_time};
use hotlift_methods::{Accelerator, EncoderSettings, METHODS, MethodInfo, RunsOn};
use serde::Serialize;

use super::error::AdviseError;
use super::model::{Codec, GIB, Work};
use super::sample::{PACKET, Sample};

/// Levels that are measured where a method has levels: its fastest, and those that trade CPU for bytes at a rate that
/// some link could ask for (bench/results/2026-11-22-codecs.txt).
const LEVELS: &[(&str, &[u8])] = &[("zlib", &[1]), ("zstd", &[1, 3, 6]), ("qatzip", &[1])];

/// How long the methods are measured at most. All of them meet the same packets: ratios of different ones could not be
/// compared. 64 MiB take a core of a Cascade Lake Xeon 5 seconds.
const BUDGET: Duration = Duration::from_secs(10);

/// Threads that measure, at most.
const MOST_THREADS: usize = 16;

/// Memory that is scanned, touched, and sent: more than a core's caches hold.
const STRETCH: usize = 64 << 20;

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
    pub costs: Codec,
}

impl Candidate {
    /// A QEMU has the method too, as its `multifd-compression`.
    pub fn qemu_knows(&self) -> bool {
        self.method != "lz4"
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
    /// First touch of memory.
    pub first_touch: f64,
    /// Sending over TCP to this host.
    pub send: f64,
    /// Receiving from it.
    pub receive: f64,
    /// The methods, in the order of the table.
    pub candidates: Vec<Candidate>,
}

/// Measures everything.
pub fn measure(sample: &Sample, accelerators: bool) -> Result<Measured, AdviseError> {
    let cores = thread::available_parallelism().map_or(1, usize::from);
    let (candidates, cores_free) = methods(sample, cores, accelerators)?;
    let (send, receive) = connection().map_err(AdviseError::Loopback)?;
    let (zero_scan, first_touch) = memory()?;
    Ok(Measured {
        cores,
        cores_free,
        zero_scan,
        first_touch,
        send,
        receive,
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
    pages: usize,
    payload: usize,
    encode: Work,
    decode: Work,
    runs_on: RunsOn,
}

fn methods(
    sample: &Sample,
    cores: usize,
    accelerators: bool,
) -> Result<(Vec<Candidate>, f64), AdviseError> {
    let settings = settings();
    let none = Candidate {
        method: METHODS[0].name,
        level: None,
        runs_on: (METHODS[0].library)(),
        on_device: false,
        measured_bytes: sample.content(),
        costs: Codec {
            encode: Work::default(),
            decode: Work::default(),
            ratio: 1.0,
        },
    };
    let mut candidates = vec![none];
    let threads = cores.min(MOST_THREADS).min(sample.packets.len());
    if threads == 0 {
        return Ok((candidates, cores as f64));
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
            .map(|sums| sums.unwrap_or(Err(AdviseError::Thread)))
            .collect::<Result<Vec<_>, _>>()
    })?;
    let mut got = Work::default();
    for (i, (method, level)) in settings.into_iter().enumerate() {
        let sums = of_threads.iter().map(|sums| &sums[i]);
        let pages: usize = sums.clone().map(|sums| sums.pages).sum();
        let payload: usize = sums.clone().map(|sums| sums.payload).sum();
        let runs_on = sums.clone().next().map(|sums| sums.runs_on.clone());
        let on_device = matches!(runs_on, Some(RunsOn::Hardware(_)));
        let per_gib = |of: fn(&Sums) -> Work| {
            let total = sums.clone().map(of).fold(Work::default(), add);
            let gib = pages as f64 / GIB;
            Work {
                cpu: total.cpu / gib,
                // Without a device a thread is held up by its own work only; what else runs is counted in the cores.
                thread: if on_device { total.thread } else { total.cpu } / gib,
            }
        };
        let (encode, decode) = (per_gib(|sums| sums.encode), per_gib(|sums| sums.decode));
        if !on_device {
            got = sums
                .clone()
                .fold(got, |got, sums| add(got, add(sums.encode, sums.decode)));
        }
        candidates.push(Candidate {
            method: method.name,
            level,
            runs_on: match runs_on {
                Some(RunsOn::Hardware(device)) => device.to_string(),
                _ => (method.library)(),
            },
            on_device,
            measured_bytes: pages,
            costs: Codec {
                encode,
                decode,
                ratio: pages as f64 / payload.max(1) as f64,
            },
        });
    }
    let share = if got.thread > 0.0 {
        got.cpu / got.thread
    } else {
        1.0
    };
    Ok((candidates, cores as f64 * share.min(1.0)))
}

fn add(a: Work, b: Work) -> Work {
    Work {
        cpu: a.cpu + b.cpu,
        thread: a.thread + b.thread,
    }
}

/// Runs `work` and books its time.
fn timed<T>(to: &mut Work, work: impl FnOnce() -> T) -> T {
    let (cpu, wall) = (thread_cpu_time(), Instant::now());
    let result = work();
    to.cpu += (thread_cpu_time().saturating_sub(cpu)).as_secs_f64();
    to.thread += wall.elapsed().as_secs_f64();
    result
}

/// All methods over one thread's packets.
fn one_thread<'a>(
    packets: impl Iterator<Item = &'a Vec<u8>>,
    settings: &[(&'static MethodInfo, Option<u8>)],
    accelerators: bool,
    barrier: &Barrier,
) -> Result<Vec<Sums>, AdviseError> {
    let accelerator = if accelerators {
        Accelerator::Auto
    } else {
        Accelerator::Off
    };
    let made = make(settings, accelerator);
    let target = RamBlock::new("target", PACKET, Backing::Private).map_err(AdviseError::Memory);
    // Whoever fails must not leave the others waiting.
    barrier.wait();
    let (mut codecs, target) = (made?, target?);
    let mut sums = vec![Sums::default(); settings.len()];
    let begun = Instant::now();
    let mut private = vec![0; PACKET];
    let mut payload = Vec::with_capacity(2 * PACKET);
    for (turn, packet) in packets.enumerate() {
        if turn > 0 && begun.elapsed() > BUDGET {
            break;
        }
        for i in 0..codecs.len() {
            let i = (i + turn) % codecs.len();
            let (sums, (encoder, decoder)) = (&mut sums[i], &mut codecs[i]);
            let failed = |source| AdviseError::Method {
                method: settings[i].0.name,
                source,
            };
            let pages = &mut private[..packet.len()];
            timed(&mut sums.encode, || {
                pages.copy_from_slice(packet);
                encoder.encode(pages, &mut payload)
            })
            .map_err(failed)?;
            let runs: Vec<GuestRun<'_>> = (0..packet.len())
                .step_by(PAGE_SIZE)
                .map(|at| target.run(at, PAGE_SIZE))
                .collect::<Result<_, _>>()?;
            timed(&mut sums.decode, || decoder.decode(&payload, &runs)).map_err(failed)?;
            sums.pages += packet.len();
            sums.payload += payload.len();
            sums.runs_on = encoder.runs_on();
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
) -> Result<Vec<BothWays>, AdviseError> {
    let both = |&(method, level): &(&'static MethodInfo, Option<u8>)| {
        let settings = EncoderSettings {
            level: level.unwrap_or(method.default_level),
            accelerator,
            to_hotlift: true,
        };
        let failed = |source| AdviseError::Method {
            method: method.name,
            source,
        };
        let encoder = (method.encoder)(&settings).map_err(failed)?;
        Ok((encoder, (method.decoder)(accelerator).map_err(failed)?))
    };
    settings.iter().map(both).collect()
}

/// Zero pages looked at, and memory touched first.
fn memory() -> Result<(f64, f64), AdviseError> {
    let block = RamBlock::new("stretch", STRETCH, Backing::Private)?;
    let gib = STRETCH as f64 / GIB;
    let (mut touch, mut scan) = (Work::default(), Work::default());
    timed(&mut touch, || block.populate(0, STRETCH))?;
    block.zero(0, STRETCH)?;
    let zeros = timed(&mut scan, || {
        (0..block.pages())
            .filter(|page| block.page_is_zero(*page))
            .count()
    });
    debug_assert_eq!(zeros, block.pages());
    Ok((scan.cpu / gib, touch.cpu / gib))
}

/// CPU of both ends of a connection over loopback, in packets.
fn connection() -> io::Result<(f64, f64)> {
    /// Times that the stretch is sent.
    const TIMES: usize = 3;
    let listener = TcpListener::bind((Ipv4Addr::LOCALHOST, 0))?;
    let mut sending = TcpStream::connect(listener.local_addr()?)?;
    let receiver = thread::spawn(move || -> io::Result<f64> {
        let (mut stream, _) = listener.accept()?;
        let mut memory = vec![1; STRETCH];
        let mut work = Work::default();
        timed(&mut work, || {
            (0..TIMES)
                .flat_map(|_| 0..STRETCH / PACKET)
                .try_for_each(|packet| stream.read_exact(&mut memory[packet * PACKET..][..PACKET]))
        })?;
        Ok(work.cpu)
    });
    let memory = vec![1; STRETCH];
    let mut work = Work::default();
    let sent = timed(&mut work, || {
        (0..TIMES)
            .flat_map(|_| memory.chunks_exact(PACKET))
            .try_for_each(|packet| sending.write_all(packet))
    });
    drop(sending);
    let received = receiver
        .join()
        .map_err(|_| io::Error::other("the receiver has ended"))?;
    sent?;
    let gib = (TIMES * STRETCH) as f64 / GIB;
    Ok((work.cpu / gib, received? / gib))
}

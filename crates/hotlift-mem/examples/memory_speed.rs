//! Measures the crate's main functions: `memory_speed zero|detect|copy|untouched|sockets`.
//!
//! Every figure is the best of several passes, in CPU time of the measured thread, because other load can only slow it down.
//! The rates of sockets are in wall time, which other load distorts.

#![allow(
    clippy::print_stdout,
    clippy::print_stderr,
    reason = "its output is what it is for"
)]

use std::hint::black_box;
use std::io;
use std::net::{TcpListener, TcpStream};
use std::os::fd::{AsFd, BorrowedFd};
use std::os::unix::net::UnixStream;
use std::thread;
use std::time::{Duration, Instant};

use hotlift_mem::Splicer;
use hotlift_mem::sock::{self, IoScratch};
use hotlift_mem::{Backing, GuestRun, PAGE_SIZE, RamBlock, thread_cpu_time, zero};

const GIB: usize = 1 << 30;

type Failure = Box<dyn std::error::Error>;

fn main() -> Result<(), Failure> {
    match std::env::args().nth(1).as_deref() {
        Some("zero") => zero_pages(),
        Some("detect") => detection(),
        Some("copy") => copies(),
        Some("untouched") => untouched(),
        Some("sockets") => sockets(),
        _ => Err("usage: memory_speed zero|detect|copy|untouched|sockets".into()),
    }
}

/// Returns the CPU time of the fastest of `passes` passes.
fn best(passes: usize, mut pass: impl FnMut()) -> Duration {
    let time = |_| {
        let start = thread_cpu_time();
        pass();
        thread_cpu_time() - start
    };
    (0..passes).map(time).min().unwrap_or_default()
}

fn gb_per_s(bytes: usize, time: Duration) -> f64 {
    bytes as f64 / 1e9 / time.as_secs_f64()
}

fn zero_pages() -> Result<(), Failure> {
    println!("chosen: {}", zero::detector().name);
    for (what, len, rounds) in [("DRAM, 1 GiB", GIB, 1), ("L2, 512 KiB", GIB >> 11, 512)] {
        let block = RamBlock::new("zeros", len, Backing::Private)?;
        block.zero(0, len)?;
        for d in zero::DETECTORS.iter().filter(|d| d.available()) {
            // SAFETY: no thread writes to this block while the slice is used.
            let bytes = unsafe { std::slice::from_raw_parts(block.host_addr(), len) };
            let time = best(8, || {
                for _ in 0..rounds {
                    for page in black_box(bytes).chunks_exact(PAGE_SIZE) {
                        assert_eq!(d.is_zero(page), Some(true));
                    }
                }
            });
            println!(
                "{what}, zero, {:9} {:6.1} GB/s",
                d.name,
                gb_per_s(len * rounds, time)
            );
        }
        let time = best(8, || {
            for _ in 0..rounds {
                assert!((0..block.pages()).all(|page| block.page_is_zero(page)));
            }
        });
        println!(
            "{what}, zero, page_is_zero {:4.1} GB/s",
            gb_per_s(len * rounds, time)
        );
        for at in [0, 8, 100, 300, 2048, PAGE_SIZE - 1] {
            for page in 0..block.pages() {
                block.write(page * PAGE_SIZE + at, &[1])?;
            }
            let time = best(8, || {
                for _ in 0..rounds {
                    assert!((0..block.pages()).all(|page| !block.page_is_zero(page)));
                }
            });
            for page in 0..block.pages() {
                block.write(page * PAGE_SIZE + at, &[0])?;
            }
            let pages = (block.pages() * rounds) as f64 / 1e6 / time.as_secs_f64();
            println!("{what}, byte {at} set: {pages:6.1} M pages/s");
        }
    }
    Ok(())
}

/// Measures the cost of zero page detection relative to the necessary work: a plain read for zero pages, a send for pages with
/// content. Passes alternate; quotients compare neighbours.
fn detection() -> Result<(), Failure> {
    const PASSES: usize = 15;
    let zeros = RamBlock::new("zeros", GIB, Backing::Private)?;
    zeros.zero(0, GIB)?;
    let content = RamBlock::new("content", GIB, Backing::Private)?;
    for page in 0..content.pages() {
        // The first nonzero byte is in the first line, as in most pages.
        content.store_u64(page * PAGE_SIZE, page as u64 + 1)?;
    }
    let time = |work: &mut dyn FnMut()| {
        let start = thread_cpu_time();
        work();
        (thread_cpu_time() - start).as_secs_f64()
    };
    let mut rates = Vec::new();
    for _ in 0..PASSES {
        // SAFETY: no thread writes to this block while the slice is used.
        let bytes = unsafe { std::slice::from_raw_parts(zeros.host_addr(), GIB) };
        let read = time(&mut || assert_eq!(read_all(black_box(bytes)), 0));
        let detect = time(&mut || assert!((0..zeros.pages()).all(|page| zeros.page_is_zero(page))));
        rates.push((read / detect, GIB as f64 / 1e9 / detect));
    }
    let (quotient, rate) = (
        median(rates.iter().map(|r| r.0)),
        median(rates.iter().map(|r| r.1)),
    );
    println!(
        "zero pages, 1 GiB: {rate:.2} GB/s, {quotient:.3} of a plain read ({PASSES} pairs, {})",
        zero::detector().name
    );

    let packets = packets(&content, 1)?;
    let into = RamBlock::new("destination", GIB, Backing::Private)?;
    into.populate(0, GIB)?;
    let arriving = self::packets(&into, 1)?;
    let listener = TcpListener::bind("127.0.0.1:0")?;
    let ours = TcpStream::connect(listener.local_addr()?)?;
    ours.set_nodelay(true)?;
    let (theirs, _) = listener.accept()?;
    let mut scratch = IoScratch::new();
    let mut send = |looks: bool| -> Result<f64, Failure> {
        thread::scope(|scope| {
            let reader = scope.spawn(|| -> io::Result<()> {
                let mut scratch = IoScratch::new();
                let mut head = [0; HEAD];
                for runs in &arriving {
                    io::Read::read_exact(&mut &theirs, &mut head)?;
                    sock::recv(theirs.as_fd(), runs, &mut scratch)?;
                }
                Ok(())
            });
            let start = thread_cpu_time();
            for runs in &packets {
                if looks {
                    assert!(!runs.iter().any(GuestRun::is_zero));
                }
                sock::send(ours.as_fd(), &[1; HEAD], runs, &mut scratch)?;
            }
            let spent = thread_cpu_time() - start;
            let read = reader.join().map_err(|_| "the reader panicked")?;
            read?;
            Ok(spent.as_secs_f64())
        })
    };
    let mut added = Vec::new();
    let mut seconds = Vec::new();
    for pass in 0..PASSES {
        // Every second pair is reversed, so that a drift favours neither.
        let looks_first = pass % 2 == 1;
        let first = send(looks_first)?;
        let second = send(!looks_first)?;
        let (plain, looking) = if looks_first {
            (second, first)
        } else {
            (first, second)
        };
        added.push(looking / plain - 1.0);
        seconds.push(plain);
    }
    let looks = time(&mut || {
        for runs in &packets {
            assert!(!black_box(runs).iter().any(GuestRun::is_zero));
        }
    });
    let plain = median(seconds.iter().copied());
    println!(
        "pages with content: sending {plain:.3} CPU s/GiB; a check of each first adds {:.1} % ({PASSES} pairs), alone it is {:.1} %",
        100.0 * median(added.iter().copied()),
        100.0 * looks / plain
    );
    Ok(())
}

fn median(values: impl Iterator<Item = f64>) -> f64 {
    let mut values: Vec<f64> = values.collect();
    values.sort_by(f64::total_cmp);
    values[values.len() / 2]
}

/// Returns the OR of all bytes, with the widest loads that the compiler generates for this CPU.
fn read_all(bytes: &[u8]) -> u64 {
    #[inline(always)]
    fn or(bytes: &[u8]) -> u64 {
        // SAFETY: any eight bytes are a valid number.
        let (_, words, _) = unsafe { bytes.align_to::<u64>() };
        words.iter().fold(0, |all, word| all | word)
    }
    #[cfg(target_arch = "x86_64")]
    {
        #[target_feature(enable = "avx512f")]
        fn avx512(bytes: &[u8]) -> u64 {
            or(bytes)
        }
        #[target_feature(enable = "avx2")]
        fn avx2(bytes: &[u8]) -> u64 {
            or(bytes)
        }
        if std::arch::is_x86_feature_detected!("avx512f") {
            // SAFETY: the CPU has AVX-512F.
            return unsafe { avx512(bytes) };
        }
        if std::arch::is_x86_feature_detected!("avx2") {
            // SAFETY: the CPU has AVX2.
            return unsafe { avx2(bytes) };
        }
    }
    or(bytes)
}

fn copies() -> Result<(), Failure> {
    let block = RamBlock::new("guest", GIB, Backing::Private)?;
    for page in 0..block.pages() {
        block.store_u64(page * PAGE_SIZE, 1)?;
    }
    let mut packet = vec![0; 128 * PAGE_SIZE];
    let time = best(8, || {
        for at in (0..GIB).step_by(packet.len()) {
            for (i, page) in packet.chunks_exact_mut(PAGE_SIZE).enumerate() {
                if let Ok(run) = block.run(at + i * PAGE_SIZE, PAGE_SIZE) {
                    run.copy_to(page);
                }
            }
            black_box(&packet);
        }
    });
    println!(
        "copy_to into a packet buffer {:6.1} GB/s",
        gb_per_s(GIB, time)
    );
    let time = best(8, || {
        for at in (0..GIB).step_by(packet.len()) {
            for (i, page) in packet.chunks_exact_mut(PAGE_SIZE).enumerate() {
                match block.run(at + i * PAGE_SIZE, PAGE_SIZE) {
                    Ok(run) if !run.is_zero() => run.copy_to(page),
                    _ => {}
                }
            }
            black_box(&packet);
        }
    });
    println!(
        "is_zero, then copy_to        {:6.1} GB/s",
        gb_per_s(GIB, time)
    );
    Ok(())
}

fn untouched() -> Result<(), Failure> {
    for backing in [Backing::Private, Backing::Shared] {
        let block = RamBlock::new("guest", 4 * GIB, backing)?;
        let pages = block.pages();
        let mut out = vec![0; pages.div_ceil(64)];
        for what in ["never touched", "one page in 1024 written"] {
            let time = best(5, || {
                assert!(block.untouched(0, pages, &mut out).unwrap_or(false))
            });
            let found: u32 = out.iter().map(|word| word.count_ones()).sum();
            println!("{backing:?}, 4 GiB, {what}: {time:?}, {found} of {pages} pages untouched");
            for page in (0..pages).step_by(1024) {
                block.write(page * PAGE_SIZE, &[1])?;
            }
        }
        let time = best(5, || {
            assert!(block.untouched(512, 2048, &mut out).unwrap_or(false))
        });
        println!("{backing:?}, 8 MiB of it: {time:?}");
    }
    Ok(())
}

/// Header length of a multifd packet with 128 pages, in bytes.
const HEAD: usize = 1344;
const PACKET_PAGES: usize = 128;

type Sender<'a> = &'a mut dyn FnMut(BorrowedFd<'_>, &[u8], &[GuestRun<'_>]) -> io::Result<()>;

fn sockets() -> Result<(), Failure> {
    let guests = [
        ("huge pages", RamBlock::new("huge", GIB, Backing::Private)?),
        ("4 KiB pages", RamBlock::new("small", GIB, Backing::Shared)?),
    ];
    for (_, guest) in &guests {
        for page in 0..guest.pages() {
            guest.store_u64(page * PAGE_SIZE, page as u64)?;
        }
    }
    println!("1 GiB in packets of 512 KiB: GB/s, CPU seconds a GiB of sender and receiver");
    for (memory, guest) in &guests {
        for (order, step) in [("neighbours", 1), ("scattered", 2)] {
            let runs = packets(guest, step)?;
            let mut scratch = IoScratch::new();
            let mut splicer = Splicer::new()?;
            let mut copy = |fd: BorrowedFd<'_>, head: &[u8], runs: &[GuestRun<'_>]| {
                sock::send(fd, head, runs, &mut scratch)
            };
            let mut refer = |fd: BorrowedFd<'_>, head: &[u8], runs: &[GuestRun<'_>]| {
                splicer.send(fd, head, runs)
            };
            let senders: [(&str, Sender<'_>); 2] = [("send", &mut copy), ("splice", &mut refer)];
            for (way, send) in senders {
                let listener = TcpListener::bind("127.0.0.1:0")?;
                let ours = TcpStream::connect(listener.local_addr()?)?;
                ours.set_nodelay(true)?;
                let (theirs, _) = listener.accept()?;
                let tcp = transfer(ours.as_fd(), theirs.as_fd(), send, &runs)?;
                let (ours, theirs) = UnixStream::pair()?;
                let unix = transfer(ours.as_fd(), theirs.as_fd(), send, &runs)?;
                println!("{memory:11} {order:10} {way:6} tcp {tcp}   unix {unix}");
            }
        }
    }
    Ok(())
}

/// Splits all of `guest` into packets whose pages are `step` pages apart.
fn packets(guest: &RamBlock, step: usize) -> Result<Vec<Vec<GuestRun<'_>>>, Failure> {
    let order = (0..step).flat_map(|first| (first..guest.pages()).step_by(step));
    let pages: Vec<_> = order
        .map(|page| guest.run(page * PAGE_SIZE, PAGE_SIZE))
        .collect::<Result<_, _>>()?;
    Ok(pages.chunks(PACKET_PAGES).map(<[_]>::to_vec).collect())
}

/// Returns the best of several transfers: the fastest time, and the least CPU time of either side.
fn transfer(
    ours: BorrowedFd<'_>,
    theirs: BorrowedFd<'_>,
    send: Sender<'_>,
    packets: &[Vec<GuestRun<'_>>],
) -> Result<String, Failure> {
    const PASSES: usize = 5;
    let into = RamBlock::new("destination", GIB, Backing::Private)?;
    into.populate(0, GIB)?;
    let head_into = RamBlock::new("head", PAGE_SIZE, Backing::Private)?;
    let arriving = self::packets(&into, 1)?;
    let (mut time, mut sender, mut receiver) = (Duration::MAX, Duration::MAX, Duration::MAX);
    for _ in 0..PASSES {
        let start = Instant::now();
        let cpu = thread_cpu_time();
        let spent = thread::scope(|scope| {
            let reader = scope.spawn(|| -> io::Result<Duration> {
                let mut scratch = IoScratch::new();
                let head = head_into.run(0, HEAD).map_err(io::Error::other)?;
                for runs in &arriving {
                    sock::recv(theirs, &[head], &mut scratch)?;
                    sock::recv(theirs, runs, &mut scratch)?;
                }
                Ok(thread_cpu_time())
            });
            for runs in packets {
                send(ours, &[1; HEAD], runs)?;
            }
            sender = sender.min(thread_cpu_time() - cpu);
            reader
                .join()
                .map_err(|_| io::Error::other("reader panicked"))?
        })?;
        time = time.min(start.elapsed());
        receiver = receiver.min(spent);
    }
    let (s, r) = (sender.as_secs_f64(), receiver.as_secs_f64());
    Ok(format!("{:4.1}, {s:.3} + {r:.3}", gb_per_s(GIB, time)))
}

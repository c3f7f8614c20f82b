//! Measures the remaining CPU time of channel threads if a device detects zero pages: `offload_cpu [PASSES]`.
//!
//! The device is the software model, on a thread of its own. Its speed is meaningless; the channels' CPU time for submission
//! and verdict counts, compared with the CPU's own check of the same page.

#![allow(
    clippy::print_stdout,
    clippy::print_stderr,
    reason = "its output is what it is for"
)]

use std::time::Duration;

use hotlift_accel::idxd::model::Behaviour;
use hotlift_accel::idxd::simulated;
use hotlift_accel::idxd::zero::{PageResult, ZeroFinder};
use hotlift_mem::{Backing, GuestRun, PAGE_SIZE, RamBlock, thread_cpu_time};

/// All zero, and written once.
const RAM: usize = 1 << 30;

/// Pages of a packet, as in QEMU.
const PACKET: usize = 128;

type Failure = Box<dyn std::error::Error>;

fn main() -> Result<(), Failure> {
    let passes = std::env::args().nth(1).map_or(Ok(5), |text| text.parse())?;
    let ram = RamBlock::new("zeros", RAM, Backing::Private)?;
    ram.zero(0, RAM)?;
    let pages = (0..ram.pages())
        .map(|page| ram.run(page * PAGE_SIZE, PAGE_SIZE))
        .collect::<Result<Vec<_>, _>>()?;
    for channels in [1, 2, 8] {
        let mut quotients = Vec::new();
        for _ in 0..passes {
            let alone = by_cpu(&pages, channels);
            let offloaded = by_device(&pages, channels)?;
            quotients.push(offloaded.as_secs_f64() / alone.as_secs_f64());
            println!(
                "{channels} channels: by CPU {:6.1} ns a page, by simulated device {:6.1}",
                per_page(alone),
                per_page(offloaded),
            );
        }
        quotients.sort_by(f64::total_cmp);
        println!(
            "{channels} channels: {:.2} of the CPU's own look (median of {passes})",
            quotients[quotients.len() / 2]
        );
    }
    Ok(())
}

fn per_page(time: Duration) -> f64 {
    time.as_secs_f64() * 1e9 / (RAM / PAGE_SIZE) as f64
}

/// Returns the CPU time of `channels` threads that each do `work` on a share of the pages.
fn channels<'a>(
    pages: &[GuestRun<'a>],
    channels: usize,
    work: impl Fn(&[GuestRun<'a>]) + Sync,
) -> Duration {
    std::thread::scope(|scope| {
        let threads: Vec<_> = pages
            .chunks(pages.len() / channels)
            .map(|share| {
                let work = &work;
                scope.spawn(move || {
                    let start = thread_cpu_time();
                    work(share);
                    thread_cpu_time() - start
                })
            })
            .collect();
        let ended = threads.into_iter().map(std::thread::ScopedJoinHandle::join);
        ended.map(|time| time.expect("a channel")).sum()
    })
}

fn by_cpu(pages: &[GuestRun<'_>], count: usize) -> Duration {
    channels(pages, count, |share| {
        assert!(share.iter().all(GuestRun::is_zero));
    })
}

fn by_device(pages: &[GuestRun<'_>], count: usize) -> Result<Duration, Failure> {
    let finder = ZeroFinder::new(vec![simulated::open(Behaviour::SOUND)?], None);
    Ok(std::thread::scope(|scope| {
        scope.spawn(|| finder.listen());
        let spent = channels(pages, count, |share| {
            // One batch is filled and drained while the device has the other.
            let mut batches = [finder.batch(PACKET), finder.batch(PACKET)];
            let mut zero = 0;
            for (at, packet) in share.chunks(PACKET).enumerate() {
                let batch = &mut batches[at % 2];
                for page in packet {
                    batch.push(*page);
                }
                batch.submit();
                batches[1 - at % 2]
                    .wait(|verdict| zero += usize::from(verdict == PageResult::Zero));
            }
            for batch in &mut batches {
                batch.wait(|verdict| zero += usize::from(verdict == PageResult::Zero));
            }
            assert_eq!(zero, share.len());
        });
        finder.close();
        spent
    }))
}

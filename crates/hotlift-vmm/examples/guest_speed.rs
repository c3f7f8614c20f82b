//! Prints cost and speed of the built-in guests on this machine.
//!
//! `cargo run --release -p hotlift-vmm --example guest_speed [kvm|threads]`

#![allow(
    clippy::print_stdout,
    clippy::print_stderr,
    reason = "its output is what it is for"
)]

use std::time::{Duration, Instant};

use hotlift_mem::{Backing, DirtyBitmap};
use hotlift_vmm::fill::{FillSettings, FillSource};
use hotlift_vmm::workload::{Pace, Workload};
use hotlift_vmm::{BuiltinGuest, GuestKind, GuestSettings, best_kind, create};

const RAM: u64 = 2 << 30;

fn settings(vcpus: u8, workload: Workload, rate: u64) -> GuestSettings {
    GuestSettings {
        ram_bytes: RAM,
        backing: Backing::Private,
        vcpus,
        workload,
        rate,
        working_set: Some(1 << 30),
        seed: 1,
        uuid: [0; 16],
    }
}

fn cpu_time() -> Duration {
    // SAFETY: `getrusage` fills the structure that it is given.
    let usage = unsafe {
        let mut usage = std::mem::zeroed::<libc::rusage>();
        libc::getrusage(libc::RUSAGE_SELF, &raw mut usage);
        usage
    };
    let time = |t: libc::timeval| {
        Duration::from_secs(t.tv_sec.unsigned_abs())
            + Duration::from_micros(t.tv_usec.unsigned_abs())
    };
    time(usage.ru_utime) + time(usage.ru_stime)
}

/// Runs for a second; returns the writes made and the CPU time used.
fn second(guest: &dyn BuiltinGuest) -> (u64, Duration) {
    let (writes, cpu, start) = (guest.writes(), cpu_time(), Instant::now());
    std::thread::sleep(Duration::from_secs(1));
    let seconds = start.elapsed().as_millis().max(1);
    let made = guest.writes() - writes;
    (
        u64::try_from(u128::from(made) * 1000 / seconds).unwrap_or(0),
        cpu_time() - cpu,
    )
}

fn main() {
    let kinds: Vec<GuestKind> = match std::env::args().nth(1) {
        Some(name) => vec![name.parse().expect("kvm or threads")],
        None => GuestKind::ALL.to_vec(),
    };
    println!("best guest here: {:?}", best_kind());
    for kind in kinds {
        for (vcpus, workload, rate) in [
            (1, Workload::Idle, 0),
            (1, Workload::Random, 1000),
            (1, Workload::Random, 100_000),
            (8, Workload::Random, 100_000),
            (1, Workload::Random, 1_000_000),
            (1, Workload::Random, Pace::MAX_RATE),
            (2, Workload::Sequential, Pace::MAX_RATE),
        ] {
            let start = Instant::now();
            let guest = create(kind, &settings(vcpus, workload, rate)).unwrap();
            let created = start.elapsed();
            let start = Instant::now();
            guest.start().unwrap();
            let started = start.elapsed();
            second(&*guest); // first touch of pages
            let (writes, cpu) = second(&*guest);
            let (mut worst, mut sum) = (Duration::ZERO, Duration::ZERO);
            for _ in 0..50 {
                let start = Instant::now();
                guest.pause().unwrap();
                let took = start.elapsed();
                (worst, sum) = (worst.max(took), sum + took);
                guest.resume().unwrap();
                std::thread::sleep(Duration::from_millis(2));
            }
            println!(
                "{kind} vcpus={vcpus} {workload} rate={rate}: created {created:?}, started {started:?}, \
                 {writes} writes/s, {cpu:?} of CPU a second, pause {:?} (worst {worst:?})",
                sum / 50
            );
        }
        let guest = create(kind, &settings(1, Workload::Random, 100_000)).unwrap();
        let fill = FillSettings {
            source: FillSource::Generated,
            zero_share: 0.1,
            zero_touched: false,
            seed: 1,
        };
        let start = Instant::now();
        guest.fill(&fill).unwrap();
        println!("{kind}: filled 2 GiB in {:?}", start.elapsed());
        guest.start().unwrap();
        second(&*guest);
        let start = Instant::now();
        guest.start_dirty_log().unwrap();
        println!("{kind}: dirty log started in {:?}", start.elapsed());
        let pages = guest.ram()[0].pages();
        for round in 0..4 {
            let dirty = DirtyBitmap::new(pages);
            let start = Instant::now();
            guest.sync_dirty_log(0, &dirty).unwrap();
            let fetched = start.elapsed();
            let start = Instant::now();
            for first in (0..pages).step_by(8192) {
                guest.clear_dirty_log(0, first, 8192).unwrap();
            }
            let cleared = start.elapsed();
            let (writes, cpu) = second(&*guest);
            println!(
                "{kind}: round {round}: {} pages fetched in {fetched:?}, cleared in {cleared:?}; then {writes} \
                 writes/s, {cpu:?} of CPU a second",
                dirty.count()
            );
        }
        guest.stop_dirty_log().unwrap();
        guest.pause().unwrap();
        let start = Instant::now();
        let verified = guest.verify().unwrap();
        println!("{kind}: {verified:?} in {:?}", start.elapsed());
    }
}

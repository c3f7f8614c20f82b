//! Tests auto-converge. A guest that dirties pages faster than they are sent is throttled until it can be migrated. The
//! throttle ends in every case.

use std::fs;
use std::sync::atomic::{AtomicU8, Ordering};
use std::time::{Duration, Instant};

use hotlift::options::{AutoConvergeOptions, StreamOptions, SwitchoverOptions};
use hotlift::{Control, Options};
use hotlift_testkit::alone;
use hotlift_vmm::{BuiltinGuest, GuestKind, GuestSettings, create};

use crate::census::Census;
use crate::probe::{Probe, Quirks, let_write};
use crate::rig::{self, settings};

/// Returns a guest that dirties its 4 MiB again in the half second of their transfer at the bandwidth of [`options`]. With a
/// hundredth of its time it dirties a tenth of what fits the downtime.
fn busy() -> GuestSettings {
    GuestSettings {
        ram_bytes: 16 << 20,
        working_set: Some(4 << 20),
        ..settings()
    }
}

fn options() -> Options {
    Options {
        stream: StreamOptions {
            max_bandwidth: 8 << 20,
            ..StreamOptions::default()
        },
        switchover: SwitchoverOptions {
            downtime_limit: Duration::from_millis(100),
            ..SwitchoverOptions::default()
        },
        auto_converge: AutoConvergeOptions {
            on: true,
            initial: 99,
            ..AutoConvergeOptions::default()
        },
        ..Options::default()
    }
}

/// Returns the threads of this process that throttle a guest.
fn throttling() -> usize {
    fs::read_dir("/proc/self/task")
        .unwrap()
        .flatten()
        .filter(|task| {
            fs::read_to_string(task.path().join("comm"))
                .is_ok_and(|name| name.trim() == "vcpu-throttle")
        })
        .count()
}

/// Waits until `threads` threads throttle a guest: a joined one may still be listed, and a new one sets its name itself.
fn expect_throttling(threads: usize, kind: GuestKind) {
    let start = Instant::now();
    while throttling() != threads {
        assert!(
            start.elapsed() < Duration::from_secs(60),
            "{kind}: {} threads throttle",
            throttling()
        );
        std::thread::yield_now();
    }
}

/// Returns the CPU time of all vCPUs of this process so far, in clock ticks (`man 5 proc_pid_stat`).
fn vcpu_ticks() -> u64 {
    fs::read_dir("/proc/self/task")
        .unwrap()
        .flatten()
        .filter_map(|task| fs::read_to_string(task.path().join("stat")).ok())
        .filter_map(|stat| {
            let (name, fields) = stat.rsplit_once(") ")?;
            let is_vcpu = name.contains("(vcpu-") && !name.ends_with("throttle");
            let mut times = fields
                .split(' ')
                .skip(11)
                .map_while(|it| it.parse::<u64>().ok());
            is_vcpu.then_some(times.next()? + times.next()?)
        })
        .sum()
}

fn pair(kind: GuestKind, quirks: Quirks) -> [Probe; 2] {
    [
        rig::source(kind, &busy(), quirks),
        rig::destination(kind, &busy(), Quirks::default()),
    ]
}

#[test]
fn a_guest_that_does_not_converge_is_throttled_until_it_does() {
    alone!();
    let census = Census::take();
    for kind in rig::kinds() {
        let [source, destination] = pair(kind, Quirks::default());
        let (listener, to) = rig::listen();
        let highest = AtomicU8::new(0);
        let ended = rig::run(
            &source,
            &destination,
            listener,
            &to,
            [&options(), &options()],
            &[Control::new(), Control::new()],
            &|progress| {
                highest.fetch_max(progress.throttle_percent, Ordering::Relaxed);
            },
        );
        let (report, _) = ended.arrived(&source, &destination, &kind.to_string());
        assert_eq!((report.throttle_percent, highest.into_inner()), (99, 99));
        assert_eq!(source.throttles(), [99, 0]);
        expect_throttling(0, kind);
        assert!(destination.throttles().is_empty());
    }
    census.expect_unchanged();
}

#[test]
fn a_cancel_ends_the_throttling_of_the_guest() {
    alone!();
    for kind in rig::kinds() {
        let [source, destination] = pair(kind, Quirks::default());
        let (listener, to) = rig::listen();
        let controls = [Control::new(), Control::new()];
        let never = Options {
            switchover: SwitchoverOptions {
                downtime_limit: Duration::ZERO,
                ..options().switchover
            },
            ..options()
        };
        let ended = rig::run(
            &source,
            &destination,
            listener,
            &to,
            [&never, &never],
            &controls,
            &|progress| {
                if progress.throttle_percent > 0 {
                    expect_throttling(1, kind);
                    controls[0].cancel();
                }
            },
        );
        ended.stayed(&source, &destination);
        assert_eq!(source.throttles(), [99, 0]);
        expect_throttling(0, kind);
    }
}

#[test]
fn a_guest_that_cannot_be_throttled_is_reported() {
    alone!();
    let quirks = Quirks {
        cannot_throttle: true,
        ..Quirks::default()
    };
    let [source, destination] = pair(rig::kinds()[0], quirks);
    let (listener, to) = rig::listen();
    let controls = [Control::new(), Control::new()];
    let ended = rig::run(
        &source,
        &destination,
        listener,
        &to,
        [&options(), &options()],
        &controls,
        &|progress| {
            if progress.throttle_refused && progress.stalled {
                let words = progress.stall_reason().unwrap();
                assert!(words.contains("auto-converge cannot"), "{words}");
                // With enough downtime it converges.
                controls[0].change(&Options {
                    switchover: SwitchoverOptions {
                        downtime_limit: Duration::from_secs(10),
                        ..options().switchover
                    },
                    ..options()
                });
            }
        },
    );
    let (report, _) = ended.arrived(&source, &destination, "it cannot be slowed down");
    assert_eq!(
        (report.throttle_percent, report.throttle_refused),
        (0, true)
    );
    assert_eq!(source.throttles(), [99]);
}

/// Lets `guest` run until it has lost `time` more of its time; returns the total loss.
fn let_lose(guest: &dyn BuiltinGuest, time: Duration) -> Duration {
    let (before, start) = (guest.throttled_time(), Instant::now());
    loop {
        let lost = guest.throttled_time().saturating_sub(before);
        if lost >= time {
            return lost;
        }
        guest.health().unwrap();
        assert!(start.elapsed() < Duration::from_secs(60), "only {lost:?}");
        std::thread::sleep(Duration::from_millis(5));
    }
}

#[test]
fn a_throttled_guest_runs_less_and_can_be_paused_at_once() {
    alone!();
    for kind in rig::kinds() {
        let guest = create(
            kind,
            &GuestSettings {
                rate: u64::MAX,
                vcpus: 2,
                ..settings()
            },
        )
        .unwrap();
        guest.start().unwrap();
        let ticks_a_second = rustix::param::clock_ticks_per_second();
        let (mut ran, mut lost) = (0, Duration::ZERO);
        for _ in 0..3 {
            assert!(guest.throttle(95));
            let before = vcpu_ticks();
            lost += let_lose(&*guest, Duration::from_secs(1));
            ran += vcpu_ticks() - before;
            // Probably in the middle of a sleep.
            guest.pause().unwrap();
            guest.verify().unwrap();
            guest.resume().unwrap();
            assert!(guest.throttle(0));
        }
        // A twentieth of the time is permitted; a busy machine may be late to throttle.
        let ran = Duration::from_millis(ran * 1000 / ticks_a_second);
        assert!(ran < lost / 3, "{kind}: ran {ran:?}, lost {lost:?}");
        expect_throttling(0, kind);
        let_write(&*guest, 100).unwrap();
        // It ends with its guest.
        assert!(guest.throttle(50));
        drop(guest);
        expect_throttling(0, kind);
    }
}

#[test]
fn a_throttled_guest_does_not_make_up_for_the_time_that_it_has_lost() {
    /// Maximum delay that the guests make up for.
    const DEBT: Duration = Duration::from_millis(100);
    alone!();
    for kind in rig::kinds() {
        let paced = settings();
        let guest = create(kind, &paced).unwrap();
        guest.start().unwrap();
        let_write(&*guest, 100).unwrap();
        // The measured time encloses the counted writes, however late this thread is.
        let start = Instant::now();
        let before = guest.writes();
        // In the remaining time it could do all its usual writes.
        assert!(guest.throttle(80));
        let lost = let_lose(&*guest, Duration::from_secs(2));
        let wrote = guest.writes() - before;
        // On any machine, it has at most the remaining time.
        let had = start.elapsed().saturating_sub(lost) + DEBT;
        let most = u128::from(paced.rate) * had.as_millis() / 1000;
        assert!(
            u128::from(wrote) <= most,
            "{kind}: {wrote} writes in {had:?}, at most {most} are due"
        );
    }
}

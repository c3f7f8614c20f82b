//! Submission and completion under a scheduler that draws who runs next: no batch is lost, none comes back
//! twice, nobody waits for ever, however the threads of channels, device and completion interleave.
//!
//! The files below are those of the crate, compiled once more against shuttle's locks and threads in place of
//! the system's; what is released is not touched by that. A failure prints its seed;
//! `SHUTTLE_RANDOM_SEED=N cargo test -p hotlift-idxd --test schedules` runs that schedule again, and
//! `HOTLIFT_SCHEDULES=N` draws so many.

#![allow(
    dead_code,
    clippy::duplicate_mod,
    clippy::wrong_self_convention,
    reason = "files of the crate, of which these tests use a part, private here"
)]

#[path = "../src/cpu.rs"]
mod cpu;
#[path = "../src/descriptor.rs"]
mod descriptor;
#[path = "../src/model.rs"]
mod model;
#[path = "../src/portal.rs"]
mod portal;
#[path = "../src/record.rs"]
mod record;
#[path = "../src/zero.rs"]
mod zero;

/// In place of the crate's `sync`. (A `OnceLock` is set and read in one step here.)
mod sync {
    use std::time::Duration;

    pub(crate) use shuttle::hint::spin_loop;
    pub(crate) use shuttle::sync::atomic::{AtomicU32, AtomicU64, AtomicUsize, Ordering};
    pub(crate) use shuttle::sync::{Arc, Condvar, Mutex, MutexGuard};
    pub(crate) use std::sync::{OnceLock, PoisonError};

    /// A clock that goes on when the completion thread has looked.
    #[derive(Clone, Copy)]
    pub(crate) struct Instant(u64);

    shuttle::lazy_static! {
        pub(crate) static ref LOOKS: AtomicU64 = AtomicU64::new(0);
    }

    impl Instant {
        pub(crate) fn now() -> Self {
            Self(LOOKS.load(Ordering::SeqCst))
        }

        pub(crate) fn elapsed(self) -> Duration {
            Duration::from_nanos(Self::now().0 - self.0)
        }
    }
}

/// In place of the crate's `wait`: a turn, and a tick of the clock.
mod wait {
    use crate::cpu::CpuFeatures;
    use crate::record::Record;
    use crate::sync::{LOOKS, Ordering, spin_loop};

    #[derive(Clone, Copy)]
    pub(crate) struct Waiter;

    impl Waiter {
        pub(crate) fn of(_: CpuFeatures) -> Self {
            Self
        }

        pub(crate) fn wait(self, _: &Record) {
            LOOKS.fetch_add(1, Ordering::SeqCst);
            spin_loop();
        }
    }
}

use std::sync::Arc as Shared;
use std::time::Duration;

use hotlift_mem::{Backing, RamBlock};
use shuttle::sync::Arc;
use shuttle::thread;

use cpu::CpuFeatures;
use model::{Behaviour, Model};
use zero::{Device, Verdict, ZeroBatch, ZeroFinder};

const PAGE: usize = 4096;
const PAGES: usize = 5;

/// Ticks that no device needs that answers at all.
const FOREVER: Duration = Duration::from_secs(1);
/// Ticks after which a device counts as dead: some answer later, some sooner.
const SOON: Duration = Duration::from_nanos(6);

/// Schedules that a test draws.
fn schedules() -> usize {
    let asked = std::env::var("HOTLIFT_SCHEDULES").ok();
    asked.and_then(|text| text.parse().ok()).unwrap_or(1500)
}

/// Pages of which every third is not zero.
fn pages() -> Shared<RamBlock> {
    let block = RamBlock::new("ram", PAGES * PAGE, Backing::Private).expect("memory");
    for page in (0..PAGES).step_by(3) {
        block.write(page * PAGE + page * 31, &[1]).expect("a byte");
    }
    Shared::new(block)
}

fn submit<'a>(batch: &mut ZeroBatch<'a>, block: &'a RamBlock) {
    for page in 0..PAGES {
        batch.push(block.run(page * PAGE, PAGE).expect("a page"));
    }
    batch.submit();
}

fn check(batch: &mut ZeroBatch<'_>, block: &RamBlock) {
    let mut answers = 0;
    batch.wait(|verdict| {
        let page = block.run(answers * PAGE, PAGE).expect("a page");
        let zero = match verdict {
            Verdict::Zero => true,
            Verdict::Normal => false,
            Verdict::LookFrom(at) => page.split_at(at).1.is_zero(),
        };
        assert_eq!(zero, page.is_zero(), "page {answers}: {verdict:?}");
        answers += 1;
    });
    assert_eq!(answers, PAGES);
}

/// Channels that each send some packets through two devices, as the engine does: the next batch is under
/// way while one is waited for.
fn channels_at_work(block: &Shared<RamBlock>, behaviours: [Behaviour; 2], deadline: Duration) {
    let models = behaviours.map(|behaviour| Arc::new(Model::new(behaviour)));
    let devices = models.each_ref().map(|model| Device {
        name: "model".to_owned(),
        portal: Box::new(Arc::clone(model)),
        max_batch: 3,
        node: None,
    });
    let finder = Arc::new(ZeroFinder::with_deadline(devices.into(), None, deadline));
    let listener = thread::spawn({
        let finder = Arc::clone(&finder);
        move || finder.listen()
    });
    let devices = models.each_ref().map(|model| {
        let model = Arc::clone(model);
        thread::spawn(move || model.run())
    });
    let channels = [(); 2].map(|()| {
        let (finder, block) = (Arc::clone(&finder), Shared::clone(block));
        thread::spawn(move || {
            let mut batches = [finder.batch(PAGES), finder.batch(PAGES)];
            submit(&mut batches[0], &block);
            for turn in 1..3 {
                submit(&mut batches[turn % 2], &block);
                check(&mut batches[(turn + 1) % 2], &block);
            }
            check(&mut batches[0], &block);
        })
    });
    for channel in channels {
        channel.join().expect("a channel");
    }
    finder.close();
    listener.join().expect("the listener");
    for (model, device) in models.iter().zip(devices) {
        model.close();
        device.join().expect("a device");
    }
    let jobs = finder.jobs();
    assert_eq!(
        jobs.hardware + jobs.software,
        2 * 3 * PAGES as u64,
        "each page once"
    );
}

fn run(behaviours: [Behaviour; 2], deadline: Duration) {
    let block = pages();
    shuttle::check_random(
        move || channels_at_work(&block, behaviours, deadline),
        schedules(),
    );
}

#[test]
fn sound_devices_settle_every_page_in_any_order_of_events() {
    run([Behaviour::SOUND; 2], FOREVER);
}

#[test]
fn full_queues_faults_and_answers_in_another_order_lose_nothing() {
    let crowded = Behaviour {
        depth: 1,
        full: 300,
        fault: 200,
        list_fault: 200,
        shuffled: true,
        ..Behaviour::SOUND
    };
    let seeded = Behaviour { seed: 7, ..crowded };
    run([crowded, seeded], FOREVER);
}

/// One that answers late, never, errs or dies, in the middle of others' work.
#[test]
fn a_device_that_is_left_leaves_no_batch_behind() {
    let late = Behaviour::SOUND;
    let silent = Behaviour {
        silent: 400,
        ..Behaviour::SOUND
    };
    run([late, silent], SOON);
    let errs = Behaviour {
        fail: 300,
        ..Behaviour::SOUND
    };
    let dies = Behaviour {
        dies: 3,
        ..Behaviour::SOUND
    };
    run([errs, dies], SOON);
}

/// The end may come at any time: [`ZeroFinder::close`] loses no batch, and the listener ends.
#[test]
fn closing_while_channels_submit_strands_nobody() {
    let block = pages();
    let scenario = move || {
        let model = Arc::new(Model::new(Behaviour::SOUND));
        let device = Device {
            name: "model".to_owned(),
            portal: Box::new(Arc::clone(&model)),
            max_batch: 3,
            node: None,
        };
        let finder = Arc::new(ZeroFinder::with_deadline(vec![device], None, FOREVER));
        let listener = thread::spawn({
            let finder = Arc::clone(&finder);
            move || finder.listen()
        });
        let device = thread::spawn({
            let model = Arc::clone(&model);
            move || model.run()
        });
        let channel = thread::spawn({
            let (finder, block) = (Arc::clone(&finder), Shared::clone(&block));
            move || {
                let mut batch = finder.batch(PAGES);
                for _ in 0..3 {
                    submit(&mut batch, &block);
                    check(&mut batch, &block);
                }
            }
        });
        finder.close();
        channel.join().expect("a channel");
        listener.join().expect("the listener");
        model.close();
        device.join().expect("a device");
    };
    shuttle::check_random(scenario, schedules());
}

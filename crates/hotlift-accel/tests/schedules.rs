//! Tests submission and completion of batches under a random thread scheduler. In every order of the threads:
//!
//! - no batch is lost,
//! - no batch is returned twice,
//! - no thread waits forever.
//!
//! The modules below are files of the crate, compiled again with the locks and threads of the crate shuttle. Releases
//! are unaffected. A failed test prints its seed. `SHUTTLE_RANDOM_SEED=N cargo test -p hotlift-accel --test schedules`
//! runs that order again, and `HOTLIFT_SCHEDULES=N` tries `N` orders.

#![allow(
    dead_code,
    clippy::duplicate_mod,
    clippy::wrong_self_convention,
    reason = "files of the crate, of which these tests use a part, private here"
)]

#[path = "../src/idxd/cpu.rs"]
mod cpu;
#[path = "../src/idxd/descriptor.rs"]
mod descriptor;
#[path = "../src/idxd/model.rs"]
mod model;
#[path = "../src/idxd/portal.rs"]
mod portal;
#[path = "../src/idxd/record.rs"]
mod record;
#[path = "../src/idxd/zero.rs"]
mod zero;

/// In place of the crate's `sync`. (A `OnceLock` is set and read in one step here.)
mod sync {
    use std::time::Duration;

    pub(crate) use shuttle::hint::spin_loop;
    pub(crate) use shuttle::sync::atomic::{AtomicU32, AtomicU64, AtomicUsize, Ordering};
    pub(crate) use shuttle::sync::{Arc, Condvar, Mutex, MutexGuard};
    pub(crate) use std::sync::{OnceLock, PoisonError};

    /// A clock that advances when the completion thread has polled.
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

/// Replaces the crate's `wait`: an iteration, and a tick of the clock.
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
use zero::{Device, PageResult, ZeroBatch, ZeroFinder};

const PAGE: usize = 4096;
/// A batch of three and one of one, or two of two.
const PAGES: usize = 4;
const MAX_BATCHES: [u32; 2] = [3, 2];
/// Batches of a channel.
const TURNS: usize = 4;

/// Ticks that exceed the delay of any device that answers.
const FOREVER: Duration = Duration::from_secs(1);
/// Ticks after which a device counts as dead: some answer later, some sooner.
const SOON: Duration = Duration::from_nanos(6);

/// Returns the number of schedules that a test draws.
fn schedules() -> usize {
    let asked = std::env::var("HOTLIFT_SCHEDULES").ok();
    asked.and_then(|text| text.parse().ok()).unwrap_or(1500)
}

/// Returns twice the pages of a batch. The first and the last page of the first half are nonzero, at their last byte, so that
/// the place of a fault matters; the second half has the opposite pattern.
fn pages() -> Shared<RamBlock> {
    let block = RamBlock::new("ram", 2 * PAGES * PAGE, Backing::Private).expect("memory");
    for page in [0, 3, 5, 6] {
        block.write((page + 1) * PAGE - 1, &[1]).expect("a byte");
    }
    Shared::new(block)
}

/// Returns the first page of a turn. A channel's two batches alternate; in consecutive turns, each batch has the other half of
/// the pages, so that an answer to its earlier turn is wrong.
fn first(turn: usize) -> usize {
    turn / 2 % 2 * PAGES
}

fn submit<'a>(batch: &mut ZeroBatch<'a>, block: &'a RamBlock, turn: usize) {
    for page in first(turn)..first(turn) + PAGES {
        batch.push(block.run(page * PAGE, PAGE).expect("a page"));
    }
    batch.submit();
}

fn check(batch: &mut ZeroBatch<'_>, block: &RamBlock, turn: usize) {
    let mut answers = 0;
    batch.wait(|verdict| {
        let page = block
            .run((first(turn) + answers) * PAGE, PAGE)
            .expect("a page");
        let zero = match verdict {
            PageResult::Zero => true,
            PageResult::Normal => false,
            PageResult::CheckFrom(at) => page.split_at(at).1.is_zero(),
        };
        assert_eq!(zero, page.is_zero(), "page {answers}: {verdict:?}");
        answers += 1;
    });
    assert_eq!(answers, PAGES);
}

fn device(model: &Arc<Model>, max_batch: u32) -> Device {
    Device {
        name: "model".to_owned(),
        portal: Box::new(Arc::clone(model)),
        max_batch,
        node: None,
    }
}

/// Runs channels that each send some packets through two devices, as the engine does: the next batch is in flight while they
/// wait for one. The channels check that every answer comes once. The models check that no record gets two answers, and that
/// completion is reported once and after the answer.
fn channels_at_work(block: &Shared<RamBlock>, behaviours: [Behaviour; 2], deadline: Duration) {
    let models = behaviours.map(|behaviour| Arc::new(Model::new(behaviour)));
    let devices = models.iter().zip(MAX_BATCHES);
    let devices = devices.map(|(model, max_batch)| device(model, max_batch));
    let finder = Arc::new(ZeroFinder::with_deadline(devices.collect(), None, deadline));
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
            submit(&mut batches[0], &block, 0);
            for turn in 1..TURNS {
                submit(&mut batches[turn % 2], &block, turn);
                check(&mut batches[(turn - 1) % 2], &block, turn - 1);
            }
            check(&mut batches[(TURNS - 1) % 2], &block, TURNS - 1);
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
        (2 * TURNS * PAGES) as u64,
        "each page once"
    );
    if deadline == FOREVER {
        for model in &models {
            assert_eq!(model.taken_back(), model.accepted(), "each descriptor once");
        }
        if behaviours == [Behaviour::SOUND; 2] {
            assert_eq!(jobs.software, 0, "nothing was left to the CPU");
        }
    }
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

/// A device that answers late, never, fails or dies, during the work of others.
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
        let devices = vec![device(&model, MAX_BATCHES[0])];
        let finder = Arc::new(ZeroFinder::with_deadline(devices, None, FOREVER));
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
                for turn in 0..TURNS {
                    submit(&mut batch, &block, turn);
                    check(&mut batch, &block, turn);
                }
            }
        });
        finder.close();
        channel.join().expect("a channel");
        listener.join().expect("the listener");
        model.close();
        device.join().expect("a device");
        assert_eq!(model.taken_back(), model.accepted(), "none is lost");
    };
    shuttle::check_random(scenario, schedules());
}

//! Zero pages by devices: whatever these do, every page gets the right answer once.

use std::sync::Arc;
use std::time::Duration;

use hotlift_idxd::descriptor::Descriptor;
use hotlift_idxd::model::{Behaviour, Model};
use hotlift_idxd::portal::{Portal, Submitted};
use hotlift_idxd::zero::{Device, Verdict, ZeroBatch, ZeroFinder};
use hotlift_mem::{Backing, RamBlock};

const PAGE: usize = 4096;
const PAGES: usize = 128;

/// Long enough for every model that answers at all, on a machine that does other things besides.
const DEADLINE: Duration = Duration::from_secs(20);
/// For one that does not.
const SOON: Duration = Duration::from_millis(50);

fn device(model: &Arc<Model>, max_batch: u32) -> Device {
    Device {
        name: "model".to_owned(),
        portal: Box::new(Arc::clone(model)),
        max_batch,
        node: None,
    }
}

/// Pages of which every third is not zero, at another byte each.
fn pages() -> RamBlock {
    let block = RamBlock::new("ram", PAGES * PAGE, Backing::Private).expect("memory");
    for page in (0..PAGES).step_by(3) {
        block.write(page * PAGE + page * 31, &[1]).expect("a byte");
    }
    block
}

/// Hands pages to the device.
fn submit<'a>(batch: &mut ZeroBatch<'a>, block: &'a RamBlock, pages: usize) {
    for page in 0..pages {
        batch.push(block.run(page * PAGE, PAGE).expect("a page"));
    }
    batch.submit();
}

/// Waits, does the CPU's part, and checks every answer.
fn check(batch: &mut ZeroBatch<'_>, block: &RamBlock, pages: usize) {
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
    assert_eq!(answers, pages);
}

/// Works with models in threads of their own.
fn with(behaviours: &[Behaviour], max_batch: u32, work: impl FnOnce(&ZeroFinder, &[Arc<Model>])) {
    let models: Vec<_> = behaviours
        .iter()
        .map(|b| Arc::new(Model::new(*b)))
        .collect();
    let devices = models
        .iter()
        .map(|model| device(model, max_batch))
        .collect();
    std::thread::scope(|scope| {
        for model in &models {
            scope.spawn(|| model.run());
        }
        listening(devices, DEADLINE, |finder| {
            let _closing = Closing(&models);
            work(finder, &models);
        });
    });
}

/// Works with devices that a thread listens to.
fn listening(devices: Vec<Device>, deadline: Duration, work: impl FnOnce(&ZeroFinder)) {
    listening_at(devices, None, deadline, work);
}

/// The same for memory of a NUMA node.
fn listening_at(
    devices: Vec<Device>,
    home: Option<u32>,
    deadline: Duration,
    work: impl FnOnce(&ZeroFinder),
) {
    struct Close<'a>(&'a ZeroFinder);
    impl Drop for Close<'_> {
        fn drop(&mut self) {
            self.0.close();
        }
    }
    let finder = ZeroFinder::with_deadline(devices, home, deadline);
    std::thread::scope(|scope| {
        scope.spawn(|| finder.listen());
        let _close = Close(&finder);
        work(&finder);
    });
}

/// Ends the models' threads, also when a test fails.
struct Closing<'a>(&'a [Arc<Model>]);

impl Drop for Closing<'_> {
    fn drop(&mut self) {
        for model in self.0 {
            model.close();
        }
    }
}

#[test]
fn a_sound_device_settles_every_page() {
    for max_batch in [0, 2, 3, 32, 1024] {
        with(&[Behaviour::default()], max_batch, |finder, _| {
            let pages = pages();
            let mut batch = finder.batch(PAGES);
            for count in [PAGES, 1, 2, 0, 77] {
                submit(&mut batch, &pages, count);
                check(&mut batch, &pages, count);
            }
            let jobs = finder.jobs();
            assert_eq!(
                (jobs.hardware, jobs.software),
                (128 + 1 + 2 + 77, 0),
                "{max_batch}"
            );
            assert_eq!(finder.out_of_service(), Vec::<String>::new());
        });
    }
}

#[test]
fn the_next_batch_is_under_way_while_one_is_looked_at() {
    let model = Arc::new(Model::new(Behaviour::default()));
    listening(vec![device(&model, 128)], DEADLINE, |finder| {
        let pages = pages();
        let mut batches = [finder.batch(PAGES), finder.batch(PAGES)];
        submit(&mut batches[0], &pages, PAGES);
        submit(&mut batches[1], &pages, PAGES);
        assert_eq!(model.accepted(), 2, "both are with the device");
        for batch in &mut batches {
            assert!(model.step());
            check(batch, &pages, PAGES);
        }
    });
}

#[test]
fn batches_go_to_the_devices_in_turn() {
    with(&[Behaviour::default(); 3], 128, |finder, models| {
        let pages = pages();
        let mut batch = finder.batch(PAGES);
        for _ in 0..6 {
            submit(&mut batch, &pages, PAGES);
            check(&mut batch, &pages, PAGES);
        }
        let accepted: Vec<u64> = models.iter().map(|model| model.accepted()).collect();
        assert_eq!(accepted, [2, 2, 2]);
    });
}

#[test]
fn devices_of_the_memorys_own_node_are_used_while_any_of_them_is_in_service() {
    let (home, away) = (Some(1), Some(0));
    for (nodes, expected) in [
        ([away, home, away, home], [0, 4, 0, 4]),
        ([home, away, None, away], [4, 0, 4, 0]),
        ([away, away, away, away], [2, 2, 2, 2]),
    ] {
        let models = [(); 4].map(|()| Arc::new(Model::new(Behaviour::default())));
        let devices = || {
            let placed = models.iter().zip(nodes);
            let placed = placed.map(|(model, node)| Device {
                node,
                ..device(model, 128)
            });
            placed.collect()
        };
        let pages = pages();
        listening_at(devices(), home, DEADLINE, |finder| {
            let mut batch = finder.batch(PAGES);
            for _ in 0..8 {
                submit(&mut batch, &pages, PAGES);
                models.iter().for_each(|model| while model.step() {});
                check(&mut batch, &pages, PAGES);
            }
        });
        let accepted = models.each_ref().map(|model| model.accepted());
        assert_eq!(accepted, expected, "{nodes:?}");
    }

    // The far one is better than none.
    let models = [(); 2].map(|()| Arc::new(Model::new(Behaviour::default())));
    let devices = [home, away].into_iter().zip(&models);
    let devices = devices.map(|(node, model)| Device {
        node,
        ..device(model, 128)
    });
    let pages = pages();
    listening_at(devices.collect(), home, DEADLINE, |finder| {
        let mut batch = finder.batch(PAGES);
        models[0].die();
        for _ in 0..3 {
            submit(&mut batch, &pages, PAGES);
            models[1].step();
            check(&mut batch, &pages, PAGES);
        }
        assert_eq!(models[1].accepted(), 2);
    });
}

/// A queue whose program fails: no device does this, and no channel may wait for it.
struct Panics {
    model: Arc<Model>,
    at_submit: bool,
}

impl Portal for Panics {
    unsafe fn submit(&self, descriptor: &Descriptor) -> std::io::Result<Submitted> {
        // SAFETY: the caller's promise.
        let submitted = unsafe { self.model.submit(descriptor) };
        assert!(!self.at_submit, "as it was told to");
        submitted
    }

    fn completed(&self) {
        panic!("as it was told to");
    }
}

#[test]
fn nobody_waits_for_a_completion_thread_that_panicked() {
    let model = Arc::new(Model::new(Behaviour::default()));
    let portal = Box::new(Panics {
        model: Arc::clone(&model),
        at_submit: false,
    });
    let devices = vec![Device {
        portal,
        ..device(&model, 128)
    }];
    let finder = ZeroFinder::with_deadline(devices, None, DEADLINE);
    std::thread::scope(|scope| {
        let listener = scope.spawn(|| finder.listen());
        let pages = pages();
        let mut batches = [finder.batch(PAGES), finder.batch(PAGES)];
        submit(&mut batches[0], &pages, PAGES);
        submit(&mut batches[1], &pages, PAGES);
        // The first lands, which ends the thread that would see the second.
        model.step();
        assert!(listener.join().is_err());
        for batch in &mut batches {
            check(batch, &pages, PAGES);
        }
        submit(&mut batches[0], &pages, PAGES);
        check(&mut batches[0], &pages, PAGES);
        assert_eq!(model.accepted(), 2, "no more is handed out");
    });
}

#[test]
fn a_submission_that_panics_leaves_the_completion_thread_able_to_end() {
    let model = Arc::new(Model::new(Behaviour::default()));
    let portal = Box::new(Panics {
        model: Arc::clone(&model),
        at_submit: true,
    });
    let devices = vec![Device {
        portal,
        ..device(&model, 128)
    }];
    // Returns when the listener has.
    listening(devices, DEADLINE, |finder| {
        let pages = pages();
        let panicked = std::thread::scope(|scope| {
            let channel = scope.spawn(|| {
                let mut batch = finder.batch(PAGES);
                submit(&mut batch, &pages, PAGES);
            });
            channel.join()
        });
        assert!(panicked.is_err());
    });
}

#[test]
fn faults_and_refusals_are_the_cpus_work() {
    for seed in 1..60 {
        let behaviour = Behaviour {
            seed,
            fault: 100,
            list_fault: 200,
            full: 300,
            shuffled: true,
            ..Behaviour::default()
        };
        with(&[behaviour, behaviour], 16, |finder, _| {
            let pages = pages();
            let mut batch = finder.batch(PAGES);
            for _ in 0..4 {
                submit(&mut batch, &pages, PAGES);
                check(&mut batch, &pages, PAGES);
            }
            let jobs = finder.jobs();
            assert_eq!(jobs.hardware + jobs.software, 4 * PAGES as u64);
            assert!(jobs.hardware > 0 && jobs.software > 0, "{jobs:?}");
            assert_eq!(
                finder.out_of_service(),
                Vec::<String>::new(),
                "faults are no error"
            );
        });
    }
}

#[test]
fn a_queue_that_stays_full_leaves_the_batch_to_the_cpu() {
    // Nobody executes.
    let model = Arc::new(Model::new(Behaviour {
        depth: 0,
        ..Behaviour::default()
    }));
    listening(vec![device(&model, 128)], DEADLINE, |finder| {
        let pages = pages();
        let mut batch = finder.batch(PAGES);
        submit(&mut batch, &pages, PAGES);
        check(&mut batch, &pages, PAGES);
        let jobs = finder.jobs();
        assert_eq!((jobs.hardware, jobs.software), (0, PAGES as u64));
        assert!(jobs.retries > 0);
        assert_eq!(finder.out_of_service(), Vec::<String>::new());
        // One that stays so for long is not asked any more.
        for _ in 1..80 {
            submit(&mut batch, &pages, PAGES);
            check(&mut batch, &pages, PAGES);
        }
        let reason = "model: its queue was full for 64 batches in a row";
        assert_eq!(finder.out_of_service(), [reason]);
        assert_eq!(finder.jobs().retries, 64 * jobs.retries);
    });
}

#[test]
fn a_device_that_errs_is_taken_out_of_service_and_others_go_on() {
    let bad = Behaviour {
        fail: 1000,
        ..Behaviour::default()
    };
    with(&[bad, Behaviour::default()], 128, |finder, models| {
        let pages = pages();
        let mut batch = finder.batch(PAGES);
        for _ in 0..6 {
            submit(&mut batch, &pages, PAGES);
            check(&mut batch, &pages, PAGES);
        }
        assert_eq!(models[0].accepted(), 1);
        assert_eq!(models[1].accepted(), 5);
        assert_eq!(finder.out_of_service(), ["model: status 0x20"]);
    });
}

#[test]
fn a_device_that_dies_leaves_its_pages_to_the_cpu() {
    with(&[Behaviour::default()], 128, |finder, models| {
        let pages = pages();
        let mut batch = finder.batch(PAGES);
        submit(&mut batch, &pages, PAGES);
        check(&mut batch, &pages, PAGES);
        models[0].die();
        for _ in 0..3 {
            submit(&mut batch, &pages, PAGES);
            check(&mut batch, &pages, PAGES);
        }
        let jobs = finder.jobs();
        assert_eq!((jobs.hardware, jobs.software), (128, 3 * 128));
        assert_eq!(finder.out_of_service().len(), 1);
    });
}

#[test]
fn a_device_that_does_not_answer_is_not_waited_for_twice() {
    // Nobody executes.
    let model = Arc::new(Model::new(Behaviour::default()));
    listening(vec![device(&model, 128)], SOON, |finder| {
        let pages = pages();
        let mut batch = finder.batch(PAGES);
        for _ in 0..3 {
            submit(&mut batch, &pages, PAGES);
            check(&mut batch, &pages, PAGES);
        }
        assert_eq!(model.accepted(), 1, "it got no second batch");
        assert_eq!(finder.jobs().software, 3 * PAGES as u64);
        assert_eq!(finder.out_of_service(), ["model: no answer within 50ms"]);
    });
}

#[test]
fn many_channels_share_devices_and_each_gets_its_own_answers() {
    let behaviour = |seed| Behaviour {
        seed,
        fault: 20,
        full: 100,
        shuffled: true,
        ..Behaviour::default()
    };
    with(&[behaviour(3), behaviour(4)], 32, |finder, _| {
        std::thread::scope(|scope| {
            for _ in 0..4 {
                scope.spawn(|| {
                    let pages = pages();
                    let mut batches = [finder.batch(PAGES), finder.batch(PAGES)];
                    submit(&mut batches[0], &pages, PAGES);
                    for turn in 1..40 {
                        submit(&mut batches[turn % 2], &pages, PAGES);
                        check(&mut batches[(turn + 1) % 2], &pages, PAGES);
                    }
                    check(&mut batches[1], &pages, PAGES);
                });
            }
        });
        let jobs = finder.jobs();
        assert_eq!(jobs.hardware + jobs.software, 4 * 40 * PAGES as u64);
    });
}

#[test]
fn a_finder_that_is_closed_leaves_everything_to_the_cpu() {
    with(&[Behaviour::default()], 128, |finder, models| {
        let pages = pages();
        let mut batches = [finder.batch(PAGES), finder.batch(PAGES)];
        submit(&mut batches[0], &pages, PAGES);
        finder.close();
        submit(&mut batches[1], &pages, PAGES);
        for batch in &mut batches {
            check(batch, &pages, PAGES);
        }
        assert_eq!(models[0].accepted(), 1);
    });
}

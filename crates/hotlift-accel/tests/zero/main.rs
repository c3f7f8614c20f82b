//! Tests zero page detection by devices: every page gets the correct result once, whatever the devices do.

mod device_memory;
mod panics;
mod rig;

use std::io;
use std::sync::Arc;

use hotlift_accel::idxd::descriptor::Descriptor;
use hotlift_accel::idxd::model::{Behaviour, Model};
use hotlift_accel::idxd::portal::{Portal, Submitted};
use hotlift_accel::idxd::zero::{Device, PageResult};

use rig::{
    DEADLINE, PAGE, PAGES, SOON, check, device, listening, listening_at, pages, submit, with,
};

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

/// A queue whose device meets a page fault after a difference that it has found.
struct FaultsTooLate;

impl Portal for FaultsTooLate {
    unsafe fn submit(&self, descriptor: &Descriptor) -> io::Result<Submitted> {
        // SAFETY: the caller guarantees the record.
        let record = unsafe { &*descriptor.record() };
        record.complete(0x03, 1, descriptor.size(), descriptor.source());
        Ok(Submitted::Accepted)
    }
}

#[test]
fn a_difference_before_a_fault_is_a_normal_page() {
    let model = Arc::new(Model::new(Behaviour::default()));
    let one_by_one = Device {
        portal: Box::new(FaultsTooLate),
        ..device(&model, 0)
    };
    listening(vec![one_by_one], DEADLINE, |finder| {
        let pages = pages();
        for page in 0..PAGES {
            pages.write(page * PAGE, &[1]).expect("a byte");
        }
        let mut batch = finder.batch(PAGES);
        submit(&mut batch, &pages, PAGES);
        let mut verdicts = Vec::new();
        batch.wait(|verdict| verdicts.push(verdict));
        assert_eq!(verdicts, [PageResult::Normal; PAGES]);
    });
}

#[test]
fn a_queue_that_stays_full_leaves_the_batch_to_the_cpu() {
    // No thread executes descriptors.
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
        // A queue that stays full for long is not used any more.
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
    // No thread executes descriptors.
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

//! Tests that a panic of one thread does not leave another thread waiting.

use std::panic::{AssertUnwindSafe, catch_unwind};
use std::sync::mpsc::{self, Receiver, Sender};
use std::sync::{Arc, Mutex};

use hotlift_accel::idxd::descriptor::Descriptor;
use hotlift_accel::idxd::model::{Behaviour, Model};
use hotlift_accel::idxd::portal::{Portal, Submitted};
use hotlift_accel::idxd::zero::{Device, ZeroFinder};

use crate::rig::{
    DEADLINE, Falters, PAGES, SOON, Then, check, device, in_time, listening, pages, submit, with,
};

/// A queue that reports each completion, and panics when it may.
struct PanicsAtLanding {
    model: Arc<Model>,
    landed: Sender<()>,
    may: Mutex<Receiver<()>>,
}

impl Portal for PanicsAtLanding {
    unsafe fn submit(&self, descriptor: &Descriptor) -> std::io::Result<Submitted> {
        // SAFETY: guaranteed by the caller.
        unsafe { self.model.submit(descriptor) }
    }

    fn completed(&self) {
        self.landed.send(()).expect("a test that listens");
        self.may.lock().expect("a lock").recv().expect("a word");
        panic!("as it was told to");
    }
}

/// Batches that the completion thread has polled before, and one that it does not know yet.
#[test]
fn nobody_waits_for_a_completion_thread_that_panicked() {
    in_time(|| {
        let model = Arc::new(Model::new(Behaviour::default()));
        let (landed, has_landed) = mpsc::channel();
        let (let_go, may) = mpsc::channel();
        let portal = Box::new(PanicsAtLanding {
            model: Arc::clone(&model),
            landed,
            may: Mutex::new(may),
        });
        let devices = vec![Device {
            portal,
            ..device(&model, 128)
        }];
        let finder = ZeroFinder::with_deadline(devices, None, DEADLINE);
        std::thread::scope(|scope| {
            let pages = pages();
            let mut batches = [(); 3].map(|()| finder.batch(PAGES));
            submit(&mut batches[0], &pages, PAGES);
            submit(&mut batches[1], &pages, PAGES);
            let listener = scope.spawn(|| finder.listen());
            // The first completes, which ends the thread that would poll the others.
            model.step();
            has_landed.recv().expect("a completion");
            submit(&mut batches[2], &pages, PAGES);
            let_go.send(()).expect("a listener");
            assert!(listener.join().is_err());
            for batch in &mut batches {
                check(batch, &pages, PAGES);
            }
            submit(&mut batches[0], &pages, PAGES);
            check(&mut batches[0], &pages, PAGES);
            assert_eq!(model.accepted(), 3, "no more is handed out");
        });
    });
}

#[test]
fn a_submission_that_panics_leaves_the_completion_thread_able_to_end() {
    in_time(|| {
        let model = Arc::new(Model::new(Behaviour::default()));
        let devices = vec![Falters::device(&model, Then::Panics)];
        // Returns after the listener has.
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
    });
}

/// Receives a verdict and panics; the batch is reused, and dropped.
fn takes_a_verdict_and_panics(finder: &ZeroFinder) {
    let pages = pages();
    let mut batch = finder.batch(PAGES);
    submit(&mut batch, &pages, PAGES);
    let taken = catch_unwind(AssertUnwindSafe(|| {
        batch.wait(|_| panic!("as it was told to"));
    }));
    assert!(taken.is_err());
    submit(&mut batch, &pages, PAGES);
    check(&mut batch, &pages, PAGES);
}

#[test]
fn a_verdict_that_panics_leaves_an_empty_batch_that_nobody_waits_for() {
    in_time(|| {
        with(&[Behaviour::default()], 128, |finder, _| {
            takes_a_verdict_and_panics(finder);
        });
        // No thread executes descriptors: the batch is lost.
        let model = Arc::new(Model::new(Behaviour::default()));
        listening(vec![device(&model, 128)], SOON, takes_a_verdict_and_panics);
    });
}

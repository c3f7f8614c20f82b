//! Tests that memory to which a device may write is not reused before the device has answered.

use std::panic::{AssertUnwindSafe, catch_unwind};
use std::sync::Arc;

use hotlift_accel::idxd::descriptor::Descriptor;
use hotlift_accel::idxd::model::{Behaviour, Model};
use hotlift_accel::idxd::portal::{Portal, Submitted};
use hotlift_accel::idxd::zero::Device;

use crate::rig::{
    DEADLINE, Falters, PAGES, SOON, Then, check, device, in_time, listening, pages, submit,
};

/// A queue that answers at once, so that no deadline counts here; but before that the other device completes its pending
/// descriptors.
struct AfterTheOther {
    model: Arc<Model>,
    other: Arc<Model>,
}

impl Portal for AfterTheOther {
    unsafe fn submit(&self, descriptor: &Descriptor) -> std::io::Result<Submitted> {
        while self.other.step() {}
        // SAFETY: guaranteed by the caller.
        let submitted = unsafe { self.model.submit(descriptor) };
        self.model.step();
        submitted
    }

    fn completed(&self) {
        self.model.completed();
    }
}

/// Ends a batch that the first device has not answered. The same channel's next batch, on the second device, must not receive
/// the first one's answers. (The model detects that.)
fn a_late_answer_hits_nothing(then: Then) {
    in_time(move || {
        let [first, second] = [(); 2].map(|()| Arc::new(Model::new(Behaviour::default())));
        let portal = Box::new(AfterTheOther {
            model: Arc::clone(&second),
            other: Arc::clone(&first),
        });
        let devices = vec![
            Falters::device(&first, then),
            Device {
                portal,
                ..device(&second, 128)
            },
        ];
        listening(devices, SOON, |finder| {
            let pages = pages();
            let mut batch = finder.batch(PAGES);
            let submitted = catch_unwind(AssertUnwindSafe(|| submit(&mut batch, &pages, PAGES)));
            assert_eq!(submitted.is_err(), then == Then::Panics);
            assert!(first.accepted() > 0);
            check(&mut batch, &pages, PAGES);
            assert_eq!(finder.jobs().hardware, 0, "it has not answered");
            submit(&mut batch, &pages, PAGES);
            check(&mut batch, &pages, PAGES);
            assert_eq!(finder.jobs().hardware, PAGES as u64);
        });
    });
}

#[test]
fn memory_of_a_batch_without_an_answer_is_not_used_again() {
    a_late_answer_hits_nothing(Then::Accepts);
}

#[test]
fn memory_of_a_batch_whose_submission_panicked_is_not_used_again() {
    a_late_answer_hits_nothing(Then::Panics);
}

#[test]
fn memory_of_what_was_accepted_before_an_error_is_not_used_again() {
    a_late_answer_hits_nothing(Then::Errs);
}

#[test]
fn what_was_accepted_before_an_error_is_waited_for() {
    in_time(|| {
        let model = Arc::new(Model::new(Behaviour::default()));
        let devices = vec![Falters::device(&model, Then::Errs)];
        listening(devices, DEADLINE, |finder| {
            let pages = pages();
            let mut batch = finder.batch(PAGES);
            submit(&mut batch, &pages, PAGES);
            model.step();
            check(&mut batch, &pages, PAGES);
            let jobs = finder.jobs();
            let half = PAGES as u64 / 2;
            assert_eq!((jobs.hardware, jobs.software), (half, half));
            assert_eq!(finder.out_of_service(), ["model: not connected"]);
        });
    });
}

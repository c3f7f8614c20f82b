//! Creates the batches, devices and threads that several tests use.

use std::io;
use std::sync::Arc;
use std::sync::mpsc::{self, RecvTimeoutError};
use std::time::Duration;

use hotlift_accel::idxd::descriptor::Descriptor;
use hotlift_accel::idxd::model::{Behaviour, Model};
use hotlift_accel::idxd::portal::{Portal, Submitted};
use hotlift_accel::idxd::zero::{Device, PageResult, ZeroBatch, ZeroFinder};
use hotlift_mem::{Backing, RamBlock};

pub(crate) const PAGE: usize = 4096;
pub(crate) const PAGES: usize = 128;

/// Long enough for every model that answers, on a busy machine.
pub(crate) const DEADLINE: Duration = Duration::from_secs(20);
/// For a model that never answers.
pub(crate) const SOON: Duration = Duration::from_millis(50);

pub(crate) fn device(model: &Arc<Model>, max_batch: u32) -> Device {
    Device {
        name: "model".to_owned(),
        portal: Box::new(Arc::clone(model)),
        max_batch,
        node: None,
    }
}

/// Returns pages of which every third is not zero, at another byte each.
pub(crate) fn pages() -> RamBlock {
    let block = RamBlock::new("ram", PAGES * PAGE, Backing::Private).expect("memory");
    for page in (0..PAGES).step_by(3) {
        block.write(page * PAGE + page * 31, &[1]).expect("a byte");
    }
    block
}

/// Submits pages to the device.
pub(crate) fn submit<'a>(batch: &mut ZeroBatch<'a>, block: &'a RamBlock, pages: usize) {
    for page in 0..pages {
        batch.push(block.run(page * PAGE, PAGE).expect("a page"));
    }
    batch.submit();
}

/// Waits, does the CPU's part, and checks every answer.
pub(crate) fn check(batch: &mut ZeroBatch<'_>, block: &RamBlock, pages: usize) {
    let mut answers = 0;
    batch.wait(|verdict| {
        let page = block.run(answers * PAGE, PAGE).expect("a page");
        let zero = match verdict {
            PageResult::Zero => true,
            PageResult::Normal => false,
            PageResult::CheckFrom(at) => page.split_at(at).1.is_zero(),
        };
        assert_eq!(zero, page.is_zero(), "page {answers}: {verdict:?}");
        answers += 1;
    });
    assert_eq!(answers, pages);
}

/// Runs `work` with models in threads of their own.
pub(crate) fn with(
    behaviours: &[Behaviour],
    max_batch: u32,
    work: impl FnOnce(&ZeroFinder, &[Arc<Model>]),
) {
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

/// Runs `work` with devices and a listening thread.
pub(crate) fn listening(devices: Vec<Device>, deadline: Duration, work: impl FnOnce(&ZeroFinder)) {
    listening_at(devices, None, deadline, work);
}

/// Runs `work` as [`listening`] does, for memory of a NUMA node.
pub(crate) fn listening_at(
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

/// A queue that accepts a batch's first half, and treats the other half as configured.
pub(crate) struct Falters {
    model: Arc<Model>,
    then: Then,
}

#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub(crate) enum Then {
    Accepts,
    Errs,
    Panics,
}

impl Falters {
    pub(crate) fn device(model: &Arc<Model>, then: Then) -> Device {
        let portal = Box::new(Self {
            model: Arc::clone(model),
            then,
        });
        let max_batch = u32::try_from(PAGES / 2).expect("some pages");
        Device {
            portal,
            ..device(model, max_batch)
        }
    }
}

impl Portal for Falters {
    unsafe fn submit(&self, descriptor: &Descriptor) -> io::Result<Submitted> {
        match self.then {
            Then::Errs if self.model.accepted() == 1 => {
                return Err(io::ErrorKind::NotConnected.into());
            }
            Then::Panics if self.model.accepted() == 1 => panic!("as it was told to"),
            _ => {}
        }
        // SAFETY: guaranteed by the caller.
        unsafe { self.model.submit(descriptor) }
    }

    fn completed(&self) {
        self.model.completed();
    }
}

/// Fails if `work` does not end: a thread that is never woken would block the tests forever.
pub(crate) fn in_time(work: impl FnOnce() + Send + 'static) {
    let (done, ended) = mpsc::channel();
    let worker = std::thread::spawn(move || {
        let _done = done;
        work();
    });
    // The sender ends with the thread.
    let ended = ended.recv_timeout(Duration::from_secs(60));
    let disconnected = Err::<(), _>(RecvTimeoutError::Disconnected);
    assert_eq!(ended, disconnected, "somebody waits for ever");
    if let Err(panic) = worker.join() {
        std::panic::resume_unwind(panic);
    }
}

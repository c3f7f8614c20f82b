//! A simulated queue, opened and tested like a real one. For tests: only programs that are built with the feature `simulated`
//! have it.

use std::io;
use std::panic::{AssertUnwindSafe, catch_unwind};
use std::path::Path;
use std::sync::Arc;
use std::thread::{self, JoinHandle};
use std::time::Duration;

use rustix::io::Errno;

use super::descriptor::{Descriptor, Opcode};
use super::model::{Behaviour, Model};
use super::portal::{Portal, Submitted};
use super::queue::{Node, QueueError, open_portal, takes_batches};
use super::{CpuFeatures, Mode, zero};

/// Timeout of the no-op test. It is long because a busy host may delay the model's thread.
const MODEL_PROBE_TIMEOUT: Duration = Duration::from_secs(60);

/// Opens a simulated queue with this behaviour. Its faults begin after the test of the queue.
///
/// # Errors
///
/// [`QueueError`], if the simulated kernel permits no access.
pub fn open(behaviour: Behaviour) -> Result<zero::Device, QueueError> {
    let path = Path::new("a simulated queue");
    let cpu = CpuFeatures {
        enqcmd: true,
        movdir64b: true,
        waitpkg: false,
    };
    let model = Model::new(behaviour);
    let open_portal = |running| {
        open_portal(running, Mode::Shared, 1, cpu).map_err(|source| QueueError::Open {
            path: path.to_owned(),
            source,
        })
    };
    let sound = open_portal(Running::start(model.without_faults()))?;
    sound.test_no_op(path, MODEL_PROBE_TIMEOUT)?;
    let batches = takes_batches(&*sound.portal, MODEL_PROBE_TIMEOUT);
    Ok(zero::Device {
        name: "simulated DSA".to_owned(),
        portal: open_portal(Running::start(model))?.portal,
        max_batch: if batches { behaviour.max_batch } else { 0 },
        node: None,
    })
}

/// A model and the thread that runs it. The thread ends when the last clone is dropped.
#[derive(Clone)]
struct Running(Arc<Thread>);

struct Thread {
    model: Arc<Model>,
    handle: Option<JoinHandle<()>>,
}

impl Running {
    fn start(model: Model) -> Self {
        let model = Arc::new(model);
        let runs = Arc::clone(&model);
        let run = move || {
            // The model panics if its user violates a condition of `Portal`. Threads that wait for answers would hang.
            if catch_unwind(AssertUnwindSafe(|| runs.run())).is_err() {
                std::process::abort();
            }
        };
        let handle = thread::Builder::new()
            .name("dsa_simulated".to_owned())
            .spawn(run)
            .ok();
        Self(Arc::new(Thread { model, handle }))
    }
}

impl Drop for Thread {
    fn drop(&mut self) {
        self.model.close();
        if let Some(handle) = self.handle.take() {
            let _ = handle.join();
        }
    }
}

impl Portal for Running {
    unsafe fn submit(&self, descriptor: &Descriptor) -> io::Result<Submitted> {
        // SAFETY: guaranteed by the caller.
        unsafe { self.0.model.submit(descriptor) }
    }

    fn completed(&self) {
        self.0.model.completed();
    }
}

impl Node for Running {
    unsafe fn map(&self, _: Mode, _: u32) -> io::Result<Box<dyn Portal>> {
        if self.0.model.behaviour().unmapped {
            return Err(Errno::PERM.into());
        }
        Ok(Box::new(self.clone()))
    }

    fn write(self) -> Box<dyn Portal> {
        Box::new(ByKernel(self))
    }
}

/// Simulated portal through `write`, with the kernel's restrictions.
struct ByKernel(Running);

impl Portal for ByKernel {
    unsafe fn submit(&self, descriptor: &Descriptor) -> io::Result<Submitted> {
        let behaviour = self.0.0.model.behaviour();
        let is_batch = descriptor.opcode() == Some(Opcode::Batch);
        if behaviour.unwritten || (is_batch && behaviour.unbatched) {
            return Err(Errno::INVAL.into());
        }
        // SAFETY: guaranteed by the caller.
        unsafe { self.0.submit(descriptor) }
    }

    fn completed(&self) {
        self.0.completed();
    }
}

#[cfg(test)]
mod tests {
    use super::super::queue::{PROBE_TIMEOUT, QueueAccess};
    use super::*;

    /// Runs `work` with access to a simulated queue.
    fn with<T>(behaviour: Behaviour, work: impl FnOnce(&QueueAccess) -> T) -> T {
        let cpu = CpuFeatures {
            enqcmd: true,
            ..CpuFeatures::default()
        };
        let running = Running::start(Model::new(behaviour));
        work(&open_portal(running, Mode::Shared, 1, cpu).expect("a way in"))
    }

    const SOUND: Behaviour = Behaviour::SOUND;

    #[test]
    fn a_queue_is_proven_by_what_it_does() {
        let path = Path::new("/dev/dsa/wq0.0");
        let no_batches = Behaviour {
            max_batch: 1,
            ..SOUND
        };
        for (behaviour, batches) in [(SOUND, true), (no_batches, false)] {
            with(behaviour, |access| {
                access
                    .test_no_op(path, MODEL_PROBE_TIMEOUT)
                    .expect("a sound device");
                assert_eq!(takes_batches(&*access.portal, MODEL_PROBE_TIMEOUT), batches);
            });
        }
        for (fault, says, within) in [
            (
                Behaviour {
                    silent: 1000,
                    ..SOUND
                },
                "no answer",
                PROBE_TIMEOUT,
            ),
            (
                Behaviour {
                    fail: 1000,
                    ..SOUND
                },
                "Failed(32)",
                MODEL_PROBE_TIMEOUT,
            ),
            (Behaviour { depth: 0, ..SOUND }, "full", PROBE_TIMEOUT),
        ] {
            with(fault, |access| {
                let error = access
                    .test_no_op(path, within)
                    .expect_err("no device")
                    .to_string();
                assert!(error.contains(says) && error.contains("wq0.0"), "{error}");
                assert!(!takes_batches(&*access.portal, within));
            });
        }
    }

    #[test]
    fn what_the_kernel_refuses_is_gone_about_in_another_way() {
        let path = Path::new("/dev/dsa/wq0.0");
        let unmapped = Behaviour {
            unmapped: true,
            ..SOUND
        };
        with(unmapped, |access| {
            assert!(access.map_error.is_some());
            access
                .test_no_op(path, MODEL_PROBE_TIMEOUT)
                .expect("by write");
            assert!(
                takes_batches(&*access.portal, MODEL_PROBE_TIMEOUT),
                "the kernel lets them pass"
            );
        });
        let single = Behaviour {
            unbatched: true,
            ..unmapped
        };
        with(single, |access| {
            access
                .test_no_op(path, MODEL_PROBE_TIMEOUT)
                .expect("by write");
            assert!(!takes_batches(&*access.portal, MODEL_PROBE_TIMEOUT));
        });
        // A mapped portal submits batches to the device even if the kernel accepts none.
        let mapped = Behaviour {
            unmapped: false,
            ..single
        };
        with(mapped, |access| {
            assert!(access.map_error.is_none());
            assert!(takes_batches(&*access.portal, MODEL_PROBE_TIMEOUT));
        });
        let neither = Behaviour {
            unwritten: true,
            ..unmapped
        };
        with(neither, |access| {
            let error = access
                .test_no_op(path, MODEL_PROBE_TIMEOUT)
                .expect_err("no way in")
                .to_string();
            assert!(
                error.contains("by write") && error.contains("CAP_SYS_RAWIO"),
                "{error}"
            );
        });
        let opened = open(neither);
        assert!(matches!(opened, Err(QueueError::Proof { .. })));
        let opened = open(single).expect("by write");
        assert_eq!(opened.max_batch, 0);
    }

    /// Without the CPU's instruction nothing is mapped.
    #[test]
    fn without_the_instruction_nothing_is_mapped() {
        struct Unmappable;
        impl Node for Unmappable {
            unsafe fn map(&self, mode: Mode, _: u32) -> io::Result<Box<dyn Portal>> {
                panic!("{mode:?} was mapped");
            }
            fn write(self) -> Box<dyn Portal> {
                Box::new(Arc::new(Model::new(SOUND)))
            }
        }
        for mode in [Mode::Shared, Mode::Dedicated] {
            let other = CpuFeatures {
                enqcmd: mode == Mode::Dedicated,
                movdir64b: mode == Mode::Shared,
                waitpkg: true,
            };
            for cpu in [CpuFeatures::default(), other] {
                let access = open_portal(Unmappable, mode, 1, cpu).expect("by write");
                assert!(access.map_error.is_some());
            }
        }
    }
}

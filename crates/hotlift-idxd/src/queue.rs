//! Opens a work queue for zero pages, and proves that it works.

use std::fs::{File, OpenOptions};
use std::io;
use std::path::{Path, PathBuf};
use std::sync::Arc;
use std::time::{Duration, Instant};

use rustix::io::Errno;

use crate::descriptor::{Descriptor, Opcode};
use crate::model::Model;
use crate::portal::{Enqcmd, Movdir64b, Portal, Submitted, Written};
use crate::record::{Completion, Record};
use crate::sysfs::{self, DeviceKind, Mode, State};
use crate::zero;
use crate::{CpuFeatures, SysfsError};

/// How long the no-op that proves a queue may take. A device needs some microseconds; a host that starts
/// many things at once may look away for long.
const PROOF: Duration = Duration::from_secs(1);

/// The same for a model, whose thread has to come to a CPU.
const MODEL_PROOF: Duration = Duration::from_secs(60);

/// Why a queue cannot be used.
#[derive(Debug, thiserror::Error)]
pub enum QueueError {
    /// There is no such queue.
    #[error("{} is no work queue of a device here", path.display())]
    Unknown {
        /// The path that was asked for.
        path: PathBuf,
    },
    /// The queue is not set up for this.
    #[error("{} {what}", path.display())]
    SetUp {
        /// The queue's node.
        path: PathBuf,
        /// What is wrong.
        what: &'static str,
    },
    /// The driver's description cannot be read.
    #[error("the work queues cannot be listed")]
    Sysfs(#[from] SysfsError),
    /// The queue cannot be opened or mapped.
    #[error("{} cannot be opened", path.display())]
    Open {
        /// The queue's node.
        path: PathBuf,
        /// The system's reason.
        #[source]
        source: io::Error,
    },
    /// It did not do nothing when it was asked to.
    #[error("{} did not complete a no-op: {what}", path.display())]
    Proof {
        /// The queue's node.
        path: PathBuf,
        /// What it did.
        what: String,
    },
}

/// Opens the queue of node `path` (as in "/dev/dsa/wq4.0") of the host under `root`, which is `/` but
/// for tests, and proves it by a no-op.
///
/// The process that opens a queue must be the one that uses it: the kernel binds it to the opener's
/// memory.
///
/// # Errors
///
/// [`QueueError`].
pub fn open(root: &Path, path: &Path, cpu: CpuFeatures) -> Result<zero::Device, QueueError> {
    let node = root.join(path.strip_prefix("/").unwrap_or(path));
    let set_up = |what| QueueError::SetUp {
        path: path.to_owned(),
        what,
    };
    let devices = sysfs::devices(root)?;
    let found = devices.iter().find_map(|device| {
        let queue = device.queues.iter().find(|queue| queue.node == node)?;
        Some((device, queue))
    });
    let (device, queue) = found.ok_or_else(|| QueueError::Unknown {
        path: path.to_owned(),
    })?;
    if device.kind != DeviceKind::Dsa {
        return Err(set_up("is a queue of IAA, which finds no zero pages"));
    }
    if device.state != Some(State::Enabled) || queue.state != Some(State::Enabled) {
        return Err(set_up("is not enabled"));
    }
    if queue.queue_type.as_deref() != Some("user") {
        return Err(set_up("is not of type user"));
    }
    let mut sets = [&device.op_cap, &queue.op_config].into_iter().flatten();
    if !sets.all(|set| set.has(Opcode::ComparePattern as u8)) {
        return Err(set_up("does not compare with a pattern"));
    }
    let opened = |source| QueueError::Open {
        path: path.to_owned(),
        source,
    };
    let file = OpenOptions::new().read(true).write(true).open(&node);
    let file = file.map_err(opened)?;
    let mode = queue.mode.unwrap_or(Mode::Shared);
    let entrance = enter(file, mode, queue.size.unwrap_or(1), cpu).map_err(opened)?;
    entrance.prove(path, PROOF)?;
    let longest = [queue.max_batch_size, device.max_batch_size];
    let longest = longest.into_iter().flatten().min();
    Ok(zero::Device {
        name: path.display().to_string(),
        max_batch: longest
            .filter(|_| takes_batches(&*entrance.portal, PROOF))
            .unwrap_or(0),
        portal: entrance.portal,
        node: device.place.numa_node,
    })
}

/// A simulated queue, entered and proven as a real one is; its faults begin after that.
///
/// # Errors
///
/// [`QueueError`], if what it simulates of the kernel leaves no way in.
pub fn open_model(model: &Arc<Model>) -> Result<zero::Device, QueueError> {
    let path = Path::new("a simulated queue");
    let cpu = CpuFeatures {
        enqcmd: true,
        movdir64b: true,
        waitpkg: false,
    };
    let enter = |model: &Arc<Model>| {
        enter(Arc::clone(model), Mode::Shared, 1, cpu).map_err(|source| QueueError::Open {
            path: path.to_owned(),
            source,
        })
    };
    let sound = Arc::new(model.without_faults());
    let proven = enter(&sound)?;
    let batches = std::thread::scope(|scope| {
        scope.spawn(|| sound.run());
        let batches = proven
            .prove(path, MODEL_PROOF)
            .map(|()| takes_batches(&*proven.portal, MODEL_PROOF));
        sound.close();
        batches
    })?;
    Ok(zero::Device {
        name: "simulated DSA".to_owned(),
        portal: enter(model)?.portal,
        max_batch: if batches {
            model.behaviour().max_batch
        } else {
            0
        },
        node: None,
    })
}

/// A queue's open node: what its opener may do.
pub trait Node {
    /// Maps the portal of a queue of that mode and so many entries.
    ///
    /// # Errors
    ///
    /// The system's reason: EPERM where CAP_SYS_RAWIO is demanded.
    ///
    /// # Safety
    ///
    /// The CPU must have the instruction of that mode.
    unsafe fn map(&self, mode: Mode, entries: u32) -> io::Result<Box<dyn Portal>>;

    /// Lets the kernel submit.
    fn write(self) -> Box<dyn Portal>;
}

impl Node for File {
    unsafe fn map(&self, mode: Mode, entries: u32) -> io::Result<Box<dyn Portal>> {
        // SAFETY: the caller's promise.
        unsafe {
            Ok(match mode {
                Mode::Shared => Box::new(Enqcmd::map(self)?),
                Mode::Dedicated => Box::new(Movdir64b::map(self, entries)?),
            })
        }
    }

    fn write(self) -> Box<dyn Portal> {
        Box::new(Written::new(self))
    }
}

impl Node for Arc<Model> {
    unsafe fn map(&self, _: Mode, _: u32) -> io::Result<Box<dyn Portal>> {
        if self.behaviour().unmapped {
            return Err(Errno::PERM.into());
        }
        Ok(Box::new(Self::clone(self)))
    }

    fn write(self) -> Box<dyn Portal> {
        Box::new(ByKernel(self))
    }
}

/// A model's queue behind the kernel's `write`.
struct ByKernel(Arc<Model>);

impl Portal for ByKernel {
    unsafe fn submit(&self, descriptor: &Descriptor) -> io::Result<Submitted> {
        let behaviour = self.0.behaviour();
        let is_batch = descriptor.opcode() == Some(Opcode::Batch);
        if behaviour.unwritten || (is_batch && behaviour.unbatched) {
            return Err(Errno::INVAL.into());
        }
        // SAFETY: the caller's promise.
        unsafe { self.0.submit(descriptor) }
    }

    fn completed(&self) {
        self.0.completed();
    }
}

/// A way into a queue.
struct Entrance {
    portal: Box<dyn Portal>,
    /// Why it is not mapped, if it is not.
    written: Option<io::Error>,
}

/// The best way into a queue that CPU and kernel leave.
fn enter(node: impl Node, mode: Mode, entries: u32, cpu: CpuFeatures) -> io::Result<Entrance> {
    let able = match mode {
        Mode::Shared => cpu.enqcmd,
        Mode::Dedicated => cpu.movdir64b,
    };
    let mapped = if able {
        // SAFETY: the CPU has the instruction, says CPUID.
        unsafe { node.map(mode, entries) }
    } else {
        Err(io::Error::new(
            io::ErrorKind::PermissionDenied,
            "the CPU has no instruction for it",
        ))
    };
    match mapped {
        Ok(portal) => Ok(Entrance {
            portal,
            written: None,
        }),
        // Since May 2024 mapping demands CAP_SYS_RAWIO of most devices; writing does not.
        Err(error) if error.kind() == io::ErrorKind::PermissionDenied => Ok(Entrance {
            portal: node.write(),
            written: Some(error),
        }),
        Err(error) => Err(error),
    }
}

impl Entrance {
    /// Lets the device do nothing.
    fn prove(&self, path: &Path, within: Duration) -> Result<(), QueueError> {
        let record = leaked(Record::default());
        let answer = match answer(&*self.portal, &Descriptor::noop(record), record, within) {
            Ok(Completion::Done { .. }) => return Ok(()),
            Ok(Completion::Pending) => format!("no answer within {within:?}"),
            Ok(other) => format!("{other:?}"),
            Err(what) => what,
        };
        let what = match &self.written {
            None => answer,
            Some(error) => format!(
                "{answer}, by write, which kernels have from 6.10 on; it cannot be mapped: {error} \
                 (CAP_SYS_RAWIO may be missing)"
            ),
        };
        Err(QueueError::Proof {
            path: path.to_owned(),
            what,
        })
    }
}

/// Whether the device does nothing twice, in one batch. The kernel takes batches of nobody by `write` on
/// the first hardware, and what it tells of operations differs with its version.
fn takes_batches(portal: &dyn Portal, within: Duration) -> bool {
    let records = leaked([Record::default(), Record::default(), Record::default()]);
    let list = leaked([0, 1].map(|at| Descriptor::noop(&raw const records[at])));
    let batch = Descriptor::batch(list.as_ptr(), 2, &raw const records[2]);
    let done = Ok(Completion::Done { differs: false });
    answer(portal, &batch, &records[2], within) == done
}

/// Memory that a device may write to at any time to come: one that answers too late still does.
fn leaked<T>(value: T) -> &'static T {
    Box::leak(Box::new(value))
}

/// What a device says of a descriptor whose memory lives as long as the process.
fn answer(
    portal: &dyn Portal,
    descriptor: &Descriptor,
    record: &'static Record,
    within: Duration,
) -> Result<Completion, String> {
    let begun = Instant::now();
    loop {
        // SAFETY: the callers' memory is leaked.
        match unsafe { portal.submit(descriptor) } {
            Ok(Submitted::Accepted) => break,
            Ok(Submitted::Full) if begun.elapsed() < within => std::thread::yield_now(),
            Ok(Submitted::Full) => return Err("its queue is full".to_owned()),
            Err(error) => return Err(error.to_string()),
        }
    }
    while record.read() == Completion::Pending && begun.elapsed() < within {
        std::thread::yield_now();
    }
    let answer = record.read();
    if answer != Completion::Pending {
        portal.completed();
    }
    Ok(answer)
}

#[cfg(test)]
mod tests {
    use super::*;
    use crate::model::Behaviour;

    /// Enters a model's queue and runs `work` beside its thread.
    fn with<T>(behaviour: Behaviour, work: impl FnOnce(&Entrance) -> T) -> T {
        let model = Arc::new(Model::new(behaviour));
        let cpu = CpuFeatures {
            enqcmd: true,
            ..CpuFeatures::default()
        };
        let entrance = enter(Arc::clone(&model), Mode::Shared, 1, cpu).expect("a way in");
        std::thread::scope(|scope| {
            scope.spawn(|| model.run());
            let done = work(&entrance);
            model.close();
            done
        })
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
            with(behaviour, |entrance| {
                entrance.prove(path, MODEL_PROOF).expect("a sound device");
                assert_eq!(takes_batches(&*entrance.portal, MODEL_PROOF), batches);
            });
        }
        for (fault, says, within) in [
            (
                Behaviour {
                    silent: 1000,
                    ..SOUND
                },
                "no answer",
                PROOF,
            ),
            (
                Behaviour {
                    fail: 1000,
                    ..SOUND
                },
                "Failed(32)",
                MODEL_PROOF,
            ),
            (Behaviour { depth: 0, ..SOUND }, "full", PROOF),
        ] {
            with(fault, |entrance| {
                let error = entrance
                    .prove(path, within)
                    .expect_err("no device")
                    .to_string();
                assert!(error.contains(says) && error.contains("wq0.0"), "{error}");
                assert!(!takes_batches(&*entrance.portal, within));
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
        with(unmapped, |entrance| {
            assert!(entrance.written.is_some());
            entrance.prove(path, MODEL_PROOF).expect("by write");
            assert!(
                takes_batches(&*entrance.portal, MODEL_PROOF),
                "the kernel lets them pass"
            );
        });
        let single = Behaviour {
            unbatched: true,
            ..unmapped
        };
        with(single, |entrance| {
            entrance.prove(path, MODEL_PROOF).expect("by write");
            assert!(!takes_batches(&*entrance.portal, MODEL_PROOF));
        });
        // Who may map the portal hands batches to the device, whatever the kernel takes.
        let mapped = Behaviour {
            unmapped: false,
            ..single
        };
        with(mapped, |entrance| {
            assert!(entrance.written.is_none());
            assert!(takes_batches(&*entrance.portal, MODEL_PROOF));
        });
        let neither = Behaviour {
            unwritten: true,
            ..unmapped
        };
        with(neither, |entrance| {
            let error = entrance
                .prove(path, MODEL_PROOF)
                .expect_err("no way in")
                .to_string();
            assert!(
                error.contains("by write") && error.contains("CAP_SYS_RAWIO"),
                "{error}"
            );
        });
        let opened = open_model(&Arc::new(Model::new(neither)));
        assert!(matches!(opened, Err(QueueError::Proof { .. })));
        let opened = open_model(&Arc::new(Model::new(single))).expect("by write");
        assert_eq!(opened.max_batch, 0);
    }

    /// Whatever a CPU has not is not tried: mapping is for the instruction that goes with it.
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
                let entrance = enter(Unmappable, mode, 1, cpu).expect("by write");
                assert!(entrance.written.is_some());
            }
        }
    }
}

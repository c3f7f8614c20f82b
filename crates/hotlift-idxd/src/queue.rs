//! Opens a work queue for zero pages, and proves that it works.

use std::fs::{File, OpenOptions};
use std::io;
use std::path::{Path, PathBuf};
use std::time::{Duration, Instant};

use crate::descriptor::{Descriptor, Opcode};
use crate::portal::{Enqcmd, Movdir64b, Portal, Submitted, Written};
use crate::record::{Completion, Record};
use crate::sysfs::{self, DeviceKind, Mode, State};
use crate::zero;
use crate::{CpuFeatures, SysfsError};

/// How long the no-op that proves a queue may take. A device needs some microseconds; a host that starts
/// many things at once may look away for long.
const PROOF: Duration = Duration::from_secs(1);

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
    let portal = portal(file, queue, cpu).map_err(opened)?;
    prove(&*portal, path)?;
    let longest = [queue.max_batch_size, device.max_batch_size];
    let longest = longest.into_iter().flatten().min();
    Ok(zero::Device {
        name: path.display().to_string(),
        max_batch: longest.filter(|_| takes_batches(&*portal)).unwrap_or(0),
        portal,
    })
}

/// The queue's entrance.
fn portal(file: File, queue: &sysfs::WorkQueue, cpu: CpuFeatures) -> io::Result<Box<dyn Portal>> {
    let mapped: io::Result<Box<dyn Portal>> = match queue.mode {
        Some(Mode::Shared) if cpu.enqcmd => {
            // SAFETY: the CPU has ENQCMD, says CPUID.
            unsafe { Enqcmd::map(&file) }.map(|portal| Box::new(portal) as _)
        }
        Some(Mode::Dedicated) if cpu.movdir64b => {
            let size = queue.size.unwrap_or(1);
            // SAFETY: the CPU has MOVDIR64B, says CPUID.
            unsafe { Movdir64b::map(&file, size) }.map(|portal| Box::new(portal) as _)
        }
        _ => Err(io::ErrorKind::PermissionDenied.into()),
    };
    match mapped {
        // Since May 2024 mapping demands CAP_SYS_RAWIO of most devices; writing does not.
        Err(error) if error.kind() == io::ErrorKind::PermissionDenied => {
            Ok(Box::new(Written::new(file)))
        }
        mapped => mapped,
    }
}

/// Lets the device do nothing.
fn prove(portal: &dyn Portal, path: &Path) -> Result<(), QueueError> {
    let record = leaked(Record::default());
    let answer = match answer(portal, &Descriptor::noop(record), record) {
        Ok(Completion::Done { .. }) => return Ok(()),
        Ok(Completion::Pending) => format!("no answer within {PROOF:?}"),
        Ok(other) => format!("{other:?}"),
        Err(what) => what,
    };
    Err(QueueError::Proof {
        path: path.to_owned(),
        what: answer,
    })
}

/// Whether the device does nothing twice, in one batch. The kernel takes batches of nobody by `write` on
/// the first hardware, and what it tells of operations differs with its version.
fn takes_batches(portal: &dyn Portal) -> bool {
    let records = leaked([Record::default(), Record::default(), Record::default()]);
    let list = leaked([0, 1].map(|at| Descriptor::noop(&raw const records[at])));
    let batch = Descriptor::batch(list.as_ptr(), 2, &raw const records[2]);
    let done = Ok(Completion::Done { differs: false });
    answer(portal, &batch, &records[2]) == done
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
) -> Result<Completion, String> {
    let begun = Instant::now();
    loop {
        // SAFETY: the callers' memory is leaked.
        match unsafe { portal.submit(descriptor) } {
            Ok(Submitted::Accepted) => break,
            Ok(Submitted::Full) if begun.elapsed() < PROOF => std::thread::yield_now(),
            Ok(Submitted::Full) => return Err("its queue is full".to_owned()),
            Err(error) => return Err(error.to_string()),
        }
    }
    while record.read() == Completion::Pending && begun.elapsed() < PROOF {
        std::hint::spin_loop();
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
    use crate::model::{Behaviour, Model};

    /// Runs `work` beside a model's thread.
    fn with<T>(behaviour: Behaviour, work: impl FnOnce(&Model) -> T) -> T {
        let model = Model::new(behaviour);
        std::thread::scope(|scope| {
            scope.spawn(|| model.run());
            let done = work(&model);
            model.close();
            done
        })
    }

    #[test]
    fn a_queue_is_proven_by_what_it_does() {
        let path = Path::new("/dev/dsa/wq0.0");
        with(Behaviour::default(), |model| {
            prove(model, path).expect("a sound device");
            assert!(takes_batches(model));
        });
        let no_batches = Behaviour {
            max_batch: 1,
            ..Behaviour::default()
        };
        with(no_batches, |model| {
            prove(model, path).expect("a device without batches");
            assert!(!takes_batches(model));
        });
        for (behaviour, says) in [
            (
                Behaviour {
                    silent: 1000,
                    ..Behaviour::default()
                },
                "no answer",
            ),
            (
                Behaviour {
                    fail: 1000,
                    ..Behaviour::default()
                },
                "Failed(32)",
            ),
            (
                Behaviour {
                    depth: 0,
                    ..Behaviour::default()
                },
                "full",
            ),
        ] {
            with(behaviour, |model| {
                let error = prove(model, path).expect_err("no device").to_string();
                assert!(error.contains(says) && error.contains("wq0.0"), "{error}");
                assert!(!takes_batches(model));
            });
        }
    }
}

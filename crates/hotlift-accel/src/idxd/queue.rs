//! Opens a work queue for the detection of zero pages, and tests it.

use std::fs::{File, OpenOptions};
use std::io;
use std::path::{Path, PathBuf};
use std::time::{Duration, Instant};

use super::descriptor::{Descriptor, Opcode};
use super::portal::{Enqcmd, Movdir64b, Portal, Submitted, Written};
use super::record::{Completion, Record};
use super::sysfs::{self, DeviceKind, Mode, State};
use super::zero;
use super::{CpuFeatures, SysfsError};

/// Timeout of the no-op that tests a queue. A device needs some microseconds, but a busy host may delay this thread much
/// longer.
pub(crate) const PROBE_TIMEOUT: Duration = Duration::from_secs(1);

/// Reason why a queue is unusable.
#[derive(Debug, thiserror::Error)]
pub enum QueueError {
    /// The queue does not exist.
    #[error("{} is not a work queue of a device of this host", path.display())]
    Unknown {
        /// The requested path.
        path: PathBuf,
    },
    /// The queue's setup is unsuitable.
    #[error("{} {what}", path.display())]
    SetUp {
        /// The queue's node.
        path: PathBuf,
        /// Description of the unsuitable setting, such as "is not enabled".
        what: &'static str,
    },
    /// The driver's attributes are unreadable.
    #[error("the work queues cannot be listed")]
    Sysfs(#[from] SysfsError),
    /// The queue cannot be opened or mapped.
    #[error("{} cannot be opened", path.display())]
    Open {
        /// The queue's node.
        path: PathBuf,
        /// The system's error.
        #[source]
        source: io::Error,
    },
    /// The no-op test failed.
    #[error("{} did not complete a no-op: {what}", path.display())]
    Proof {
        /// The queue's node.
        path: PathBuf,
        /// The observed result of the no-op.
        what: String,
    },
}

/// Opens the work queue with node `path`, as in "/dev/dsa/wq4.0", and tests it with a no-op. `root` is `/` except in tests.
///
/// The process that uses a queue must open it itself: the kernel binds the queue to the opener's memory.
///
/// # Errors
///
/// [`QueueError`] if the queue does not exist, is unsuitable, cannot be opened, or fails the test.
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
        return Err(set_up("is a queue of IAA, which cannot detect zero pages"));
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
    let access = open_portal(file, mode, queue.size.unwrap_or(1), cpu).map_err(opened)?;
    access.test_no_op(path, PROBE_TIMEOUT)?;
    let longest = [queue.max_batch_size, device.max_batch_size];
    let longest = longest.into_iter().flatten().min();
    Ok(zero::Device {
        name: path.display().to_string(),
        max_batch: longest
            .filter(|_| takes_batches(&*access.portal, PROBE_TIMEOUT))
            .unwrap_or(0),
        portal: access.portal,
        node: device.place.numa_node,
    })
}

/// An open queue node, and the two ways to submit through it.
pub trait Node {
    /// Maps the portal of a queue of that mode and number of entries.
    ///
    /// # Errors
    ///
    /// The system's error: EPERM if CAP_SYS_RAWIO is required.
    ///
    /// # Safety
    ///
    /// The CPU must have the instruction of that mode.
    unsafe fn map(&self, mode: Mode, entries: u32) -> io::Result<Box<dyn Portal>>;

    /// Returns a portal through which the kernel submits, with `write`.
    fn write(self) -> Box<dyn Portal>;
}

impl Node for File {
    unsafe fn map(&self, mode: Mode, entries: u32) -> io::Result<Box<dyn Portal>> {
        // SAFETY: guaranteed by the caller.
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

/// Portal of an opened queue: mapped, or written to with system calls.
pub(crate) struct QueueAccess {
    pub portal: Box<dyn Portal>,
    /// Reason why the portal is not mapped; `None` if it is mapped.
    pub map_error: Option<io::Error>,
}

/// Returns a mapped portal if CPU and kernel permit it, and otherwise a portal through `write`.
pub(crate) fn open_portal(
    node: impl Node,
    mode: Mode,
    entries: u32,
    cpu: CpuFeatures,
) -> io::Result<QueueAccess> {
    let able = match mode {
        Mode::Shared => cpu.enqcmd,
        Mode::Dedicated => cpu.movdir64b,
    };
    let mapped = if able {
        // SAFETY: CPUID reports the instruction.
        unsafe { node.map(mode, entries) }
    } else {
        Err(io::Error::new(
            io::ErrorKind::PermissionDenied,
            "the CPU has no instruction to use it",
        ))
    };
    match mapped {
        Ok(portal) => Ok(QueueAccess {
            portal,
            map_error: None,
        }),
        // Since May 2024 mapping requires CAP_SYS_RAWIO on most devices; writing does not.
        Err(error) if error.kind() == io::ErrorKind::PermissionDenied => Ok(QueueAccess {
            portal: node.write(),
            map_error: Some(error),
        }),
        Err(error) => Err(error),
    }
}

impl QueueAccess {
    /// Tests the device with a no-op, which must complete within the timeout `within`.
    pub(crate) fn test_no_op(&self, path: &Path, within: Duration) -> Result<(), QueueError> {
        let record = leaked(Record::default());
        let answer = match answer(&*self.portal, &Descriptor::noop(record), record, within) {
            Ok(Completion::Done { .. }) => return Ok(()),
            Ok(Completion::Pending) => format!("no answer within {within:?}"),
            Ok(other) => format!("{other:?}"),
            Err(what) => what,
        };
        let what = match &self.map_error {
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

/// Returns true if the device executes a batch of two no-ops. Only a test shows this. With the first hardware, the kernel
/// accepts no batches through `write`. The operations that the kernel reports differ between its versions.
pub(crate) fn takes_batches(portal: &dyn Portal, within: Duration) -> bool {
    let records = leaked([Record::default(), Record::default(), Record::default()]);
    let list = leaked([0, 1].map(|at| Descriptor::noop(&raw const records[at])));
    let batch = Descriptor::batch(list.as_ptr(), 2, &raw const records[2]);
    let done = Ok(Completion::Done { differs: false });
    answer(portal, &batch, &records[2], within) == done
}

/// Leaks memory that a device may write to at any later time, even after a timeout.
fn leaked<T>(value: T) -> &'static T {
    Box::leak(Box::new(value))
}

/// Submits a descriptor, whose memory must be leaked, and returns the device's answer: [`Completion::Pending`] after a timeout.
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

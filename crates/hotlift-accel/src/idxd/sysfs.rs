//! `/sys/bus/dsa/devices`: DSA and IAA devices, their engines and work queues. (The bus is called `dsa`
//! for both.)
//!
//! The kernel's `sysfs-driver-dma-idxd` documents the attributes. An absent attribute is `None`: older drivers have fewer
//! attributes, and a queue has none for operations that its device lacks.

use std::ffi::OsStr;
use std::io::ErrorKind;
use std::path::{Path, PathBuf};

use super::attribute::{OpSet, SysfsError, flag, index, number, op_set, parsed, text};
use hotlift_mem::FileError;

/// Function of a device.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub enum DeviceKind {
    /// DSA, `dsaN`: copies, compares, fills.
    Dsa,
    /// IAA, `iaxN`: compresses and decompresses.
    Iaa,
}

impl DeviceKind {
    /// Returns the prefix of device names. It is also the name of the folder in `/dev` with the nodes of the queues.
    #[must_use]
    pub fn prefix(self) -> &'static str {
        match self {
            Self::Dsa => "dsa",
            Self::Iaa => "iax",
        }
    }
}

/// Location of a device.
#[derive(Debug, Clone, Default, PartialEq, Eq)]
pub struct Place {
    /// NUMA node; `None` if the host has only one.
    pub numa_node: Option<u32>,
    /// PCI address, as in `0000:6a:01.0`.
    pub pci: Option<String>,
}

/// State of a device or a queue.
#[derive(Debug, Clone, PartialEq, Eq)]
pub enum State {
    /// Not enabled, and so not usable.
    Disabled,
    /// Enabled.
    Enabled,
    /// Any other state, as the driver reports it: `halted` after a hardware error.
    Other(String),
}

/// Kind of access to a queue.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub enum Mode {
    /// Any number of processes submit, by ENQCMD, which can report that the queue is full.
    Shared,
    /// One process opens the queue and submits, by MOVDIR64B. It must count the used entries itself.
    Dedicated,
}

/// A DSA or IAA device.
#[derive(Debug, Clone, PartialEq, Eq)]
pub struct Device {
    /// Name, as in `dsa0`.
    pub name: String,
    /// Function of the device.
    pub kind: DeviceKind,
    /// Location of the device.
    pub place: Place,
    /// Version of the hardware interface: 0x100 is 1.0.
    pub version: Option<u32>,
    /// State of the device.
    pub state: Option<State>,
    /// True if the device can use the address spaces of processes (PASID). Queues of type `user` require this.
    pub pasid_enabled: Option<bool>,
    /// True if the device's setup can be changed while the device is disabled.
    pub configurable: Option<bool>,
    /// The driver's last error; 0 for none.
    pub cmd_status: Option<u32>,
    /// Operations that the device supports.
    pub op_cap: Option<OpSet>,
    /// Maximum descriptors of a batch.
    pub max_batch_size: Option<u32>,
    /// Maximum bytes of one descriptor.
    pub max_transfer_size: Option<u64>,
    /// Number of queues that can be set up.
    pub max_work_queues: Option<u32>,
    /// Maximum number of entries of all queues together.
    pub max_work_queues_size: Option<u32>,
    /// Engines, sorted by name.
    pub engines: Vec<Engine>,
    /// Queues, sorted by name.
    pub queues: Vec<WorkQueue>,
}

/// An engine, which executes descriptors of its group's queues.
#[derive(Debug, Clone, PartialEq, Eq)]
pub struct Engine {
    /// Name, as in `engine0.1`.
    pub name: String,
    /// Group of the engine; `None` if it is in no group.
    pub group: Option<u32>,
}

/// A work queue of a device.
#[derive(Debug, Clone, PartialEq, Eq)]
pub struct WorkQueue {
    /// Name, as in `wq0.1`.
    pub name: String,
    /// Node in `/dev` that a process opens; exists while the queue is enabled and its type is user.
    pub node: PathBuf,
    /// State of the queue.
    pub state: Option<State>,
    /// Kind of access to the queue.
    pub mode: Option<Mode>,
    /// Type of the queue: `user`, `kernel`, or `none` until it is set up.
    pub queue_type: Option<String>,
    /// Driver: `user` for a node in `/dev`, `crypto` or `dmaengine` for the kernel itself.
    pub driver_name: Option<String>,
    /// Name given by the operator.
    pub label: Option<String>,
    /// Group of the queue; `None` if it is in no group.
    pub group: Option<u32>,
    /// Number of entries of the queue.
    pub size: Option<u32>,
    /// Entries that unprivileged submitters of a shared queue may use.
    pub threshold: Option<u32>,
    /// Priority among the queues of the group, 1 (lowest) to 15 (highest).
    pub priority: Option<u32>,
    /// True if the device may wait for an absent page of a descriptor.
    pub block_on_fault: Option<bool>,
    /// Maximum descriptors of a batch.
    pub max_batch_size: Option<u32>,
    /// Maximum bytes of one descriptor.
    pub max_transfer_size: Option<u64>,
    /// Operations that the queue permits.
    pub op_config: Option<OpSet>,
    /// True if the device must not request address translations from the IOMMU for this queue.
    pub ats_disable: Option<bool>,
    /// True if the device must not request absent pages for this queue.
    pub prs_disable: Option<bool>,
    /// Number of entries in use.
    pub occupancy: Option<u32>,
    /// Number of times that the kernel retries a `write` to a full queue.
    pub enqcmds_retries: Option<u32>,
}

/// Returns all devices, DSA before IAA, sorted by number; none if the driver is not loaded. `root` is `/` except in tests.
///
/// # Errors
///
/// [`SysfsError`] with the file that cannot be read or holds an unknown value.
pub fn devices(root: &Path) -> Result<Vec<Device>, SysfsError> {
    let bus = root.join("sys/bus/dsa/devices");
    let mut devices = Vec::new();
    for kind in [DeviceKind::Dsa, DeviceKind::Iaa] {
        for name in names(&bus, kind.prefix())? {
            devices.push(device(root, &bus.join(&name), kind, name)?);
        }
    }
    Ok(devices)
}

fn device(
    root: &Path,
    folder: &Path,
    kind: DeviceKind,
    name: String,
) -> Result<Device, SysfsError> {
    let nodes = root.join("dev").join(kind.prefix());
    Ok(Device {
        name,
        kind,
        place: Place {
            numa_node: index(folder, "numa_node")?,
            pci: pci_address(folder),
        },
        version: number(folder, "version")?,
        state: state(folder)?,
        pasid_enabled: flag(folder, "pasid_enabled")?,
        configurable: flag(folder, "configurable")?,
        cmd_status: number(folder, "cmd_status")?,
        op_cap: op_set(folder, "op_cap")?,
        max_batch_size: number(folder, "max_batch_size")?,
        max_transfer_size: number(folder, "max_transfer_size")?,
        max_work_queues: number(folder, "max_work_queues")?,
        max_work_queues_size: number(folder, "max_work_queues_size")?,
        engines: names(folder, "engine")?
            .into_iter()
            .map(|name| engine(&folder.join(&name), name))
            .collect::<Result<_, _>>()?,
        queues: names(folder, "wq")?
            .into_iter()
            .map(|name| work_queue(&folder.join(&name), nodes.join(&name), name))
            .collect::<Result<_, _>>()?,
    })
}

fn engine(folder: &Path, name: String) -> Result<Engine, SysfsError> {
    Ok(Engine {
        name,
        group: index(folder, "group_id")?,
    })
}

fn work_queue(folder: &Path, node: PathBuf, name: String) -> Result<WorkQueue, SysfsError> {
    let mode = parsed(folder, "mode", "shared or dedicated", |text| match text {
        "shared" => Some(Mode::Shared),
        "dedicated" => Some(Mode::Dedicated),
        _ => None,
    })?;
    let named =
        |attribute| Ok::<_, SysfsError>(text(folder, attribute)?.filter(|text| !text.is_empty()));
    Ok(WorkQueue {
        name,
        node,
        state: state(folder)?,
        mode,
        queue_type: named("type")?,
        driver_name: named("driver_name")?,
        label: named("name")?,
        group: index(folder, "group_id")?,
        size: number(folder, "size")?,
        threshold: number(folder, "threshold")?,
        priority: number(folder, "priority")?,
        block_on_fault: flag(folder, "block_on_fault")?,
        max_batch_size: number(folder, "max_batch_size")?,
        max_transfer_size: number(folder, "max_transfer_size")?,
        op_config: op_set(folder, "op_config")?,
        ats_disable: flag(folder, "ats_disable")?,
        prs_disable: flag(folder, "prs_disable")?,
        occupancy: number(folder, "occupancy")?,
        enqcmds_retries: number(folder, "enqcmds_retries")?,
    })
}

fn state(folder: &Path) -> Result<Option<State>, SysfsError> {
    Ok(text(folder, "state")?.map(|text| match text.as_str() {
        "disabled" => State::Disabled,
        "enabled" => State::Enabled,
        _ => State::Other(text),
    }))
}

/// Returns the PCI address of a device; `None` if it has none. The device's folder in sysfs is a link into the folder of its
/// PCI device.
fn pci_address(folder: &Path) -> Option<String> {
    let target = folder.canonicalize().ok()?;
    let parent = target.parent()?.file_name()?.to_str()?;
    parent.contains(':').then(|| parent.to_owned())
}

/// Returns the names in `folder` that are `prefix` and one number (`dsa0`), or two with a dot (`wq0.1`). Sorts by number.
fn names(folder: &Path, prefix: &str) -> Result<Vec<String>, SysfsError> {
    let failed = FileError::reading(folder);
    let entries = match std::fs::read_dir(folder) {
        Ok(entries) => entries,
        Err(error) if error.kind() == ErrorKind::NotFound => return Ok(Vec::new()),
        Err(error) => return Err(failed(error).into()),
    };
    let mut found = Vec::new();
    for entry in entries {
        let name = entry.map_err(failed)?.file_name();
        if let Some(number) = number_in(&name, prefix) {
            found.push((number, name.to_string_lossy().into_owned()));
        }
    }
    found.sort();
    Ok(found.into_iter().map(|(_, name)| name).collect())
}

fn number_in(name: &OsStr, prefix: &str) -> Option<(u32, u32)> {
    let digits = name.to_str()?.strip_prefix(prefix)?;
    let (major, minor) = digits.split_once('.').unwrap_or((digits, "0"));
    Some((major.parse().ok()?, minor.parse().ok()?))
}

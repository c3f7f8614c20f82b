//! `/sys/bus/dsa/devices`: DSA and IAA devices, their engines and work queues. (The bus is called `dsa`
//! for both.)
//!
//! Attributes are those of the kernel's `sysfs-driver-dma-idxd`. One that is absent is `None`: older
//! drivers have fewer, and no queue has those of an operation that its device lacks.

use std::ffi::OsStr;
use std::io::ErrorKind;
use std::path::{Path, PathBuf};

use crate::attribute::{OpSet, SysfsError, flag, index, number, op_set, parsed, text};
use hotlift_mem::FileError;

/// What a device computes.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub enum DeviceKind {
    /// DSA, `dsaN`: copies, compares, fills.
    Dsa,
    /// IAA, `iaxN`: compresses and decompresses.
    Iaa,
}

impl DeviceKind {
    /// First letters of such a device's name, and the folder of its queues' nodes under `/dev`.
    #[must_use]
    pub fn prefix(self) -> &'static str {
        match self {
            Self::Dsa => "dsa",
            Self::Iaa => "iax",
        }
    }
}

/// Where a device is.
#[derive(Debug, Clone, Default, PartialEq, Eq)]
pub struct Place {
    /// NUMA node; `None` if the host has one only.
    pub numa_node: Option<u32>,
    /// PCI address, as in `0000:6a:01.0`.
    pub pci: Option<String>,
}

/// Whether a device or a queue is switched on.
#[derive(Debug, Clone, PartialEq, Eq)]
pub enum State {
    /// Set up and not on.
    Disabled,
    /// On.
    Enabled,
    /// Anything else, in the driver's word: `halted` after a hardware error.
    Other(String),
}

/// Who may submit to a queue.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub enum Mode {
    /// Any number of processes, by ENQCMD, which may be told that the queue is full.
    Shared,
    /// One opener, by MOVDIR64B; it must count entries itself.
    Dedicated,
}

/// A device.
#[derive(Debug, Clone, PartialEq, Eq)]
pub struct Device {
    /// As in `dsa0`.
    pub name: String,
    /// What it computes.
    pub kind: DeviceKind,
    /// Where it is.
    pub place: Place,
    /// Version of the hardware interface: 0x100 is 1.0.
    pub version: Option<u32>,
    /// Whether it is on.
    pub state: Option<State>,
    /// Whether it knows processes' address spaces; no queue of type user without.
    pub pasid_enabled: Option<bool>,
    /// Whether its set-up can be changed while it is disabled.
    pub configurable: Option<bool>,
    /// The driver's last error; 0 is none.
    pub cmd_status: Option<u32>,
    /// Operations that it knows.
    pub op_cap: Option<OpSet>,
    /// Most descriptors of a batch.
    pub max_batch_size: Option<u32>,
    /// Most bytes of one descriptor.
    pub max_transfer_size: Option<u64>,
    /// Queues that can be set up.
    pub max_work_queues: Option<u32>,
    /// Entries of all its queues together.
    pub max_work_queues_size: Option<u32>,
    /// By name.
    pub engines: Vec<Engine>,
    /// By name.
    pub queues: Vec<WorkQueue>,
}

/// An engine: what works on descriptors of its group's queues.
#[derive(Debug, Clone, PartialEq, Eq)]
pub struct Engine {
    /// As in `engine0.1`.
    pub name: String,
    /// Group that it serves; `None` if it serves none.
    pub group: Option<u32>,
}

/// A work queue.
#[derive(Debug, Clone, PartialEq, Eq)]
pub struct WorkQueue {
    /// As in `wq0.1`.
    pub name: String,
    /// Node in `/dev` that a process opens, there while the queue is enabled and its type is user.
    pub node: PathBuf,
    /// Whether it is on.
    pub state: Option<State>,
    /// Who may submit.
    pub mode: Option<Mode>,
    /// `user`, `kernel`, or `none` until it is set up.
    pub queue_type: Option<String>,
    /// What drives it: `user` for a node in `/dev`, `crypto` or `dmaengine` for the kernel itself.
    pub driver_name: Option<String>,
    /// What the operator calls it.
    pub label: Option<String>,
    /// Its group; `None` if it has none.
    pub group: Option<u32>,
    /// Entries.
    pub size: Option<u32>,
    /// Entries that unprivileged submitters of a shared queue may fill.
    pub threshold: Option<u32>,
    /// 1 (last) to 15 (first) among the queues of its group.
    pub priority: Option<u32>,
    /// Whether a descriptor may make the device wait for a page.
    pub block_on_fault: Option<bool>,
    /// Most descriptors of a batch.
    pub max_batch_size: Option<u32>,
    /// Most bytes of one descriptor.
    pub max_transfer_size: Option<u64>,
    /// Operations that it takes.
    pub op_config: Option<OpSet>,
    /// Whether it must not ask the IOMMU for translations.
    pub ats_disable: Option<bool>,
    /// Whether it must not ask for pages that are not there.
    pub prs_disable: Option<bool>,
    /// Entries in use.
    pub occupancy: Option<u32>,
    /// Times that the kernel repeats a submission to a full queue by `write`.
    pub enqcmds_retries: Option<u32>,
}

/// All devices under `root` (`/` for this host), DSA before IAA, by number. None if the driver is not
/// loaded.
///
/// # Errors
///
/// [`SysfsError`] with the file that cannot be read or holds something unknown.
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

/// The device's folder is a link into that of its PCI device.
fn pci_address(folder: &Path) -> Option<String> {
    let target = folder.canonicalize().ok()?;
    let parent = target.parent()?.file_name()?.to_str()?;
    parent.contains(':').then(|| parent.to_owned())
}

/// Names in `folder` that are `prefix` and a number, or two with a dot between; by number.
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

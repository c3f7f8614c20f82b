//! Detects the accelerators of a host, and what is missing to use them.
//!
//! | file | subject |
//! |---|---|
//! | `host` | the host to inspect: its files, and the permissions of this process |
//! | `pci` | PCI devices |
//! | `queues` | work queues of the kernel driver idxd, which IAA and DSA share |
//! | `iaa`, `dsa`, `qat`, `uadk` | one accelerator each |
//! | `libraries` | the libraries of the accelerators' vendors |

mod dsa;
mod host;
mod iaa;
mod libraries;
mod pci;
mod qat;
mod queues;
mod uadk;

use std::collections::BTreeSet;
use std::path::Path;

use hotlift_accel::idxd::SysfsError;
use hotlift_mem::FileError;
use serde::Serialize;

use host::Host;
pub use libraries::Library;

/// Error while inspecting a host.
#[derive(Debug, thiserror::Error)]
pub enum AccelError {
    /// The host's folder cannot be read.
    #[error(transparent)]
    Look(#[from] FileError),
    /// Files of the kernel driver idxd cannot be read.
    #[error("unexpected content in the files of the driver idxd")]
    Idxd(#[from] SysfsError),
}

/// Usable devices of a host: the input of the [rules](crate::rules) that choose settings.
#[derive(Debug, Clone, Copy, Default, PartialEq, Eq, Serialize)]
pub struct Devices {
    /// Number of usable IAA devices.
    pub iaa: usize,
    /// Number of usable QAT devices.
    pub qat: usize,
    /// True if a DSA device can be used.
    pub dsa: bool,
    /// True if a device of idxd uses the addresses of processes (shared virtual memory, SVM).
    pub shared_virtual_memory: bool,
}

/// A kind of accelerator, with all its devices on a host.
#[derive(Debug, Serialize)]
pub struct Accelerator {
    /// Name of the kind, as in "Intel IAA".
    pub name: &'static str,
    /// Hotlift's use of the accelerator, as in "method qpl".
    pub serves: &'static str,
    /// True if Hotlift can use the accelerator now.
    pub usable: bool,
    /// Library of the vendor; `null` if none is needed.
    pub library: Option<Library>,
    /// Devices of this kind, and their queues.
    pub parts: Vec<Part>,
    /// Missing setup that does not belong to a device or queue.
    pub gaps: Vec<Gap>,
}

/// A device of an accelerator, or one of the device's queues.
#[derive(Debug, Serialize)]
pub struct Part {
    /// Name, as in `iax1/wq1.0`.
    pub name: String,
    /// Short description of the device or queue.
    pub what: String,
    /// True if Hotlift can use this device or queue now.
    pub usable: bool,
    /// Missing setup of this device or queue.
    pub gaps: Vec<Gap>,
}

/// A gap: setup that is missing, or that reduces performance.
#[derive(Debug, Clone, PartialEq, Eq, Serialize)]
pub struct Gap {
    /// Description of the problem.
    pub problem: String,
    /// True if the gap prevents the use of the accelerator.
    pub blocks: bool,
    /// Shell commands that close the gap, for an operator who is root.
    pub commands: Vec<String>,
}

impl Gap {
    /// Creates a gap that prevents the use of the accelerator; `commands` close it.
    fn new<S: Into<String>>(
        problem: impl Into<String>,
        commands: impl IntoIterator<Item = S>,
    ) -> Self {
        Self {
            problem: problem.into(),
            blocks: true,
            commands: commands.into_iter().map(Into::into).collect(),
        }
    }

    /// Returns the gap as one that does not prevent the use of the accelerator.
    fn minor(self) -> Self {
        Self {
            blocks: false,
            ..self
        }
    }
}

impl Part {
    fn new(name: impl Into<String>, what: impl Into<String>, gaps: Vec<Gap>) -> Self {
        Self {
            name: name.into(),
            what: what.into(),
            usable: !gaps.iter().any(|gap| gap.blocks),
            gaps,
        }
    }
}

impl Accelerator {
    fn new(
        name: &'static str,
        serves: &'static str,
        library: Option<Library>,
        parts: Vec<Part>,
        gaps: Vec<Gap>,
    ) -> Self {
        let here = parts.iter().any(|part| part.usable) && !gaps.iter().any(|gap| gap.blocks);
        // The library has tried a device or the emulation, so this result has precedence over the files.
        let usable = match library.as_ref().and_then(Library::works) {
            Some(works) => works,
            None => here,
        };
        Self {
            name,
            serves,
            usable,
            library,
            parts,
            gaps,
        }
    }

    /// Returns true if the host has a device of this kind, or its emulation works.
    pub fn is_there(&self) -> bool {
        !self.parts.is_empty() || self.usable
    }
}

/// Returns the usable devices of a host. The folder `root` contains the host's `/sys`, `/dev` and `/proc`.
///
/// # Errors
/// If the host cannot be inspected.
pub fn devices(root: &Path) -> Result<Devices, AccelError> {
    let host = Host::new(root)?;
    let idxd = hotlift_accel::idxd::devices(host.root())?;
    // The name of a queue begins with that of its device: iax1/wq1.0.
    let usable = |accelerator: &Accelerator| -> usize {
        let parts = accelerator.parts.iter().filter(|part| part.usable);
        let names: BTreeSet<_> = parts
            .filter_map(|part| part.name.split('/').next())
            .collect();
        if accelerator.usable {
            names.len().max(1)
        } else {
            0
        }
    };
    Ok(Devices {
        iaa: usable(&iaa::detect(&host)?),
        qat: usable(&qat::detect(&host)),
        dsa: dsa::detect(&host)?.usable,
        shared_virtual_memory: idxd.iter().any(|device| device.pasid_enabled == Some(true)),
    })
}

/// Returns true if a device of this host can be used for `method`.
///
/// # Errors
/// If the host cannot be inspected.
pub fn serves(method: &str) -> Result<bool, AccelError> {
    let host = Host::new(Path::new("/"))?;
    Ok(match method {
        "qpl" => iaa::detect(&host)?.usable,
        "qatzip" => qat::detect(&host).usable,
        "uadk" => uadk::detect(&host).usable,
        _ => false,
    })
}

/// Returns all kinds of accelerators, each with its devices on a host. The folder `root` contains the host's `/sys`, `/dev` and
/// `/proc`.
///
/// # Errors
/// If the host cannot be inspected.
pub fn accelerators(root: &Path) -> Result<[Accelerator; 4], AccelError> {
    let host = Host::new(root)?;
    Ok([
        iaa::detect(&host)?,
        qat::detect(&host),
        uadk::detect(&host),
        dsa::detect(&host)?,
    ])
}

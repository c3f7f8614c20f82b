//! The accelerators of this host, and the missing parts of their setup.
//!
//! | file | subject |
//! |---|---|
//! | `host` | the inspected host: its files, the permissions of this process |
//! | `pci` | PCI devices |
//! | `queues` | work queues of idxd, common to IAA and DSA |
//! | `iaa`, `dsa`, `qat`, `uadk` | one accelerator each |
//! | `libraries` | the vendors' libraries |

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

/// Error of inspecting a host.
#[derive(Debug, thiserror::Error)]
pub enum AccelError {
    /// The host's files cannot be read.
    #[error(transparent)]
    Look(#[from] FileError),
    /// Files of the driver idxd cannot be read.
    #[error("unexpected content in the files of the driver idxd")]
    Idxd(#[from] SysfsError),
}

/// Devices, the input of the [rules](crate::rules) of choosing.
#[derive(Debug, Clone, Copy, Default, PartialEq, Eq, Serialize)]
pub struct Devices {
    /// Number of IAA devices.
    pub iaa: usize,
    /// Number of QAT devices.
    pub qat: usize,
    /// True if DSA can be used.
    pub dsa: bool,
    /// True if devices share the address space of processes (SVM).
    pub shared_virtual_memory: bool,
}

/// One kind of accelerator.
#[derive(Debug, Serialize)]
pub struct Accelerator {
    /// Name, as in "Intel IAA".
    pub name: &'static str,
    /// Use of the accelerator in Hotlift.
    pub serves: &'static str,
    /// True if Hotlift can use it now.
    pub usable: bool,
    /// The vendor's library; `null` if none is needed.
    pub library: Option<Library>,
    /// Devices and queues.
    pub parts: Vec<Part>,
    /// Missing parts apart from the devices.
    pub gaps: Vec<Gap>,
}

/// A device or one of its queues.
#[derive(Debug, Serialize)]
pub struct Part {
    /// Name, as in `iax1/wq1.0`.
    pub name: String,
    /// Short description.
    pub what: String,
    /// True if this part can be used now.
    pub usable: bool,
    /// Missing setup of this part.
    pub gaps: Vec<Gap>,
}

/// Missing setup, or setup that reduces performance.
#[derive(Debug, Clone, PartialEq, Eq, Serialize)]
pub struct Gap {
    /// Description of the problem.
    pub problem: String,
    /// True if it prevents the use of the accelerator.
    pub blocks: bool,
    /// Commands that an operator runs as root.
    pub commands: Vec<String>,
}

impl Gap {
    /// Creates a gap that prevents the use, with the commands that close it.
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

    /// Turns it into a gap that does not prevent the use.
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
        // The library has tried the device or its emulation, so its result is decisive.
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

    /// Returns true if the host has any part of it.
    pub fn is_there(&self) -> bool {
        !self.parts.is_empty() || self.usable
    }
}

/// Returns the usable devices of the host whose `/sys`, `/dev` and `/proc` are in `root`.
///
/// # Errors
/// The host cannot be inspected.
pub fn devices(root: &Path) -> Result<Devices, AccelError> {
    let host = Host::new(root)?;
    let idxd = hotlift_accel::idxd::devices(host.root())?;
    // A queue's name contains its device: iax1/wq1.0.
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

/// Returns true if a device of this host can serve this method.
///
/// # Errors
/// The host cannot be inspected.
pub fn serves(method: &str) -> Result<bool, AccelError> {
    let host = Host::new(Path::new("/"))?;
    Ok(match method {
        "qpl" => iaa::detect(&host)?.usable,
        "qatzip" => qat::detect(&host).usable,
        "uadk" => uadk::detect(&host).usable,
        _ => false,
    })
}

/// Returns all accelerators of the host whose `/sys`, `/dev` and `/proc` are in `root`.
///
/// # Errors
/// The host cannot be inspected.
pub fn accelerators(root: &Path) -> Result<[Accelerator; 4], AccelError> {
    let host = Host::new(root)?;
    Ok([
        iaa::detect(&host)?,
        qat::detect(&host),
        uadk::detect(&host),
        dsa::detect(&host)?,
    ])
}

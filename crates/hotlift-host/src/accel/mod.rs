//! The accelerators of this host, and what is missing to use them.
//!
//! | file | subject |
//! |---|---|
//! | `host` | the host looked at: its files, what this process may do |
//! | `pci` | PCI devices |
//! | `queues` | work queues of idxd, which IAA and DSA have in common |
//! | `iaa`, `dsa`, `qat`, `uadk` | an accelerator each |
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

use hotlift_idxd::SysfsError;
use hotlift_mem::FileError;
use serde::Serialize;

use host::Host;
pub use libraries::Library;

/// Why a host could not be looked at.
#[derive(Debug, thiserror::Error)]
pub enum AccelError {
    /// Its files.
    #[error(transparent)]
    Look(#[from] FileError),
    /// Files of the driver idxd.
    #[error("the driver idxd says something unexpected")]
    Idxd(#[from] SysfsError),
}

/// What the [rules](crate::rules) of choosing look at.
#[derive(Debug, Clone, Copy, Default, PartialEq, Eq, Serialize)]
pub struct Devices {
    /// IAA devices.
    pub iaa: usize,
    /// QAT devices.
    pub qat: usize,
    /// DSA can be used.
    pub dsa: bool,
    /// Devices share the address space of processes (SVM).
    pub shared_virtual_memory: bool,
}

/// One sort of accelerator.
#[derive(Debug, Serialize)]
pub struct Accelerator {
    /// Its name, as in "Intel IAA".
    pub name: &'static str,
    /// What Hotlift does with it.
    pub serves: &'static str,
    /// Whether Hotlift can use it now.
    pub usable: bool,
    /// The vendor's library; `null` where none is needed.
    pub library: Option<Library>,
    /// Devices and queues.
    pub parts: Vec<Part>,
    /// What is missing apart from the devices.
    pub gaps: Vec<Gap>,
}

/// A device or one of its queues.
#[derive(Debug, Serialize)]
pub struct Part {
    /// As in `iax1/wq1.0`.
    pub name: String,
    /// What it is, in a few words.
    pub what: String,
    /// Whether it can be used now, as far as this part is concerned.
    pub usable: bool,
    /// What is missing.
    pub gaps: Vec<Gap>,
}

/// Something that is missing, or that costs something.
#[derive(Debug, Clone, PartialEq, Eq, Serialize)]
pub struct Gap {
    /// What.
    pub problem: String,
    /// Whether the accelerator cannot be used because of it.
    pub blocks: bool,
    /// What an operator runs, as root; several lines where it takes several.
    pub commands: Vec<String>,
}

impl Gap {
    /// A reason not to use it, and what to run.
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

    /// The same, for something that can be done without.
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
        // The library knows best: it has tried the device, or something that stands in for it.
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

    /// Whether there is anything of it on this host.
    pub fn is_there(&self) -> bool {
        !self.parts.is_empty() || self.usable
    }
}

/// The devices that can be used, of the host whose `/sys`, `/dev` and `/proc` are in `root`.
///
/// # Errors
/// If the host cannot be looked at.
pub fn devices(root: &Path) -> Result<Devices, AccelError> {
    let host = Host::new(root)?;
    let idxd = hotlift_idxd::devices(host.root())?;
    // A queue is named after its device: iax1/wq1.0.
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
        iaa: usable(&iaa::look(&host)?),
        qat: usable(&qat::look(&host)),
        dsa: dsa::look(&host)?.usable,
        shared_virtual_memory: idxd.iter().any(|device| device.pasid_enabled == Some(true)),
    })
}

/// Whether a device of this host would serve this method.
///
/// # Errors
/// If the host cannot be looked at.
pub fn serves(method: &str) -> Result<bool, AccelError> {
    let host = Host::new(Path::new("/"))?;
    Ok(match method {
        "qpl" => iaa::look(&host)?.usable,
        "qatzip" => qat::look(&host).usable,
        "uadk" => uadk::look(&host).usable,
        _ => false,
    })
}

/// All accelerators of the host whose `/sys`, `/dev` and `/proc` are in `root`.
///
/// # Errors
/// If the host cannot be looked at.
pub fn accelerators(root: &Path) -> Result<[Accelerator; 4], AccelError> {
    let host = Host::new(root)?;
    Ok([
        iaa::look(&host)?,
        qat::look(&host),
        uadk::look(&host),
        dsa::look(&host)?,
    ])
}

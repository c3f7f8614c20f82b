//! `hotlift accel`: the accelerators of this host, and what is missing to use them.
//!
//! | file | subject |
//! |---|---|
//! | `host` | the host looked at: its files, what this process may do |
//! | `pci` | PCI devices |
//! | `queues` | work queues of idxd, which IAA and DSA have in common |
//! | `iaa`, `dsa`, `qat`, `uadk` | an accelerator each |
//! | `libraries` | the vendors' libraries |
//! | `text` | all of it for people |

mod dsa;
mod host;
mod iaa;
mod libraries;
mod pci;
mod qat;
mod queues;
mod text;
mod uadk;

use std::collections::BTreeSet;
use std::path::{Path, PathBuf};

use clap::Args;
use serde::Serialize;

use crate::advise::Devices;
use crate::error::CommandError;
use host::Host;
use libraries::Library;

/// Flags of `hotlift accel`.
#[derive(Debug, Args)]
pub struct AccelArgs {
    /// Write JSON
    #[arg(long)]
    json: bool,
    /// Look at the /sys, /dev and /proc of this folder in place of the host's; libraries are not tried
    #[arg(long, value_name = "DIR", default_value = "/", hide = true)]
    root: PathBuf,
}

/// One sort of accelerator.
#[derive(Debug, Serialize)]
struct Accelerator {
    /// Its name, as in "Intel IAA".
    name: &'static str,
    /// What Hotlift does with it.
    serves: &'static str,
    /// Whether Hotlift can use it now.
    usable: bool,
    /// The vendor's library; `null` where none is needed.
    library: Option<Library>,
    /// Devices and queues.
    parts: Vec<Part>,
    /// What is missing apart from the devices.
    gaps: Vec<Gap>,
}

/// A device or one of its queues.
#[derive(Debug, Serialize)]
struct Part {
    /// As in `iax1/wq1.0`.
    name: String,
    /// What it is, in a few words.
    what: String,
    /// Whether it can be used now, as far as this part is concerned.
    usable: bool,
    /// What is missing.
    gaps: Vec<Gap>,
}

/// Something that is missing, or that costs something.
#[derive(Debug, Clone, PartialEq, Eq, Serialize)]
struct Gap {
    /// What.
    problem: String,
    /// Whether the accelerator cannot be used because of it.
    blocks: bool,
    /// What an operator runs, as root; several lines where it takes several.
    commands: Vec<String>,
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
    fn is_there(&self) -> bool {
        !self.parts.is_empty() || self.usable
    }
}

/// What the rules of choosing look at.
pub fn devices() -> Result<Devices, CommandError> {
    let host = Host::new(Path::new("/"))?;
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
pub fn serves(method: &str) -> Result<bool, CommandError> {
    let host = Host::new(Path::new("/"))?;
    Ok(match method {
        "qpl" => iaa::look(&host)?.usable,
        "qatzip" => qat::look(&host).usable,
        "uadk" => uadk::look(&host).usable,
        _ => false,
    })
}

/// Lists the accelerators.
pub fn run(args: &AccelArgs) -> Result<(), CommandError> {
    let host = Host::new(&args.root)?;
    let accelerators = [
        iaa::look(&host)?,
        qat::look(&host),
        uadk::look(&host),
        dsa::look(&host)?,
    ];
    let text = if args.json {
        let text = serde_json::to_string_pretty(&accelerators);
        text.map_err(|error| CommandError::Output(error.into()))?
    } else {
        text::listing(&accelerators)
    };
    crate::output::result(&text).map_err(CommandError::Output)
}

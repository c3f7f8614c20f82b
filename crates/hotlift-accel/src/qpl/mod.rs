//! Pages of `qpl` by Intel's IAA, through libqpl.

mod jobs;
mod sys;

use hotlift_methods::device::{Hardware, Open};
use hotlift_methods::qpl;

use jobs::{Path, Pool};
use sys::{Library, SONAME, VARIABLE};

/// Returns the accelerator.
pub(crate) const fn hardware() -> Hardware {
    let open = Open::Pages(|direction| Pool::open(Path::Hardware, direction));
    Hardware::new("qpl", [SONAME, VARIABLE], open, trial)
}

/// Passes a page through a hardware job and back.
fn trial(hardware: &Hardware) -> Result<String, String> {
    let name = Library::get()?.name();
    qpl::trial(hardware).map_err(|reason| format!("{name}: {reason}"))?;
    Ok(name)
}

/// Returns libqpl's own software in place of the accelerator.
pub(crate) const fn software() -> Hardware {
    let open = Open::Pages(|direction| Pool::open(Path::Software, direction));
    Hardware::new("qpl", [SONAME, VARIABLE], open, |_| {
        Ok(Library::get()?.name())
    })
}

//! Processes the pages of method `qpl` by Intel's IAA, through libqpl.

mod jobs;
mod sys;

use hotlift_methods::device::{Hardware, Open};
use hotlift_methods::qpl;

use jobs::{Path, Pool};
use sys::{Library, SONAME, VARIABLE};

/// Returns the accelerator of method `qpl`.
pub(crate) const fn hardware() -> Hardware {
    let open = Open::Pages(|direction| Pool::open(Path::Hardware, direction));
    Hardware::new("qpl", [SONAME, VARIABLE], open, trial)
}

/// Tests the hardware: compresses a page and decompresses the result.
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

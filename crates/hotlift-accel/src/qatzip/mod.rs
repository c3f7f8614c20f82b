//! Processes the gzip members of method `qatzip` by Intel's QAT, through libqatzip.
//!
//! | file | subject |
//! |---|---|
//! | `session` | sessions of libqatzip, and memory that the hardware reads and writes |
//! | `sys` | libqatzip, opened at run time |

mod session;
mod sys;

use hotlift_methods::device::{Hardware, Open};
use hotlift_methods::qatzip;

use session::{Backend, Session};
use sys::{Library, SONAME, VARIABLE};

/// Returns the accelerator of method `qatzip`.
pub(crate) const fn hardware() -> Hardware {
    let open = Open::Members(|direction, level| Session::open(Backend::Hardware, direction, level));
    Hardware::new("qatzip", [SONAME, VARIABLE], open, trial)
}

/// Tests the hardware: compresses members and decompresses the result.
fn trial(hardware: &Hardware) -> Result<String, String> {
    qatzip::trial(hardware)?;
    Ok(hardware.file())
}

/// Returns libqatzip's own software in place of the accelerator.
pub(crate) const fn software() -> Hardware {
    let open =
        Open::Members(|direction, level| Session::open(Backend::LibrarySoftware, direction, level));
    let trial = |_: &Hardware| Library::get().map(|_| "software".to_owned());
    Hardware::new("qatzip", [SONAME, VARIABLE], open, trial)
}

//! Processes the pages of method `uadk` by HiSilicon's accelerator, through libwd.

mod session;
mod sys;

use hotlift_methods::device::{Hardware, Open};
use hotlift_methods::uadk;

use session::{Session, ready};
use sys::{SONAME, VARIABLE};

/// Returns the accelerator of method `uadk`.
pub(crate) const fn hardware() -> Hardware {
    Hardware::new(
        "uadk",
        [SONAME, VARIABLE],
        Open::Pages(Session::open),
        trial,
    )
}

/// Tests the hardware: compresses a page and decompresses the result.
fn trial(hardware: &Hardware) -> Result<String, String> {
    ready()?;
    uadk::trial(hardware).map_err(|reason| format!("libwd_comp: {reason}"))?;
    Ok(hardware.file())
}

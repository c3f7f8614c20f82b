//! Intel IAA (In-Memory Analytics Accelerator), which compresses for the method `qpl`.

use hotlift_accel::idxd::DeviceKind;
use hotlift_mem::PAGE_SIZE;

use super::host::{Capability, Host};
use super::libraries::Library;
use super::queues::{self, QueueRequirement};
use super::{AccelError, Accelerator, Gap};

/// Largest transfer of one descriptor, in bytes: a page in each direction, and libqpl's own tables.
const TRANSFER: u64 = 16 * PAGE_SIZE as u64;

pub fn detect(host: &Host) -> Result<Accelerator, AccelError> {
    let requirement = QueueRequirement {
        kind: DeviceKind::Iaa,
        dedicated_too: false,
        // The device itself waits for a missing page. Without this setting, libqpl touches the page and retries.
        block_on_fault: true,
        batch: None,
        transfer: TRANSFER,
    };
    let parts = queues::parts(host, &requirement)?;
    let library = Library::of(host, "qpl");
    let mut gaps = Vec::new();
    if !parts.is_empty() {
        gaps.extend(submission(host));
        // Package of Debian 14 and later; elsewhere built from github.com/intel/qpl.
        gaps.extend(
            library
                .as_ref()
                .and_then(|library| library.gap(&["apt install libqpl1"])),
        );
    }
    Ok(Accelerator::new(
        "Intel IAA",
        "method qpl",
        library,
        parts,
        gaps,
    ))
}

/// Returns what is missing to submit work through a mapped portal. libqpl has no other way that works on all kernels.
fn submission(host: &Host) -> Vec<Gap> {
    let mut gaps = Vec::new();
    if !host.cpu().enqcmd {
        // A hypervisor hides this instruction, or a kernel without scalable mode.
        gaps.push(Gap::new::<String>("the CPU has no ENQCMD", []));
    }
    gaps.extend(raw_io(host));
    gaps
}

/// Returns the gap (missing setup) if this process lacks CAP_SYS_RAWIO; `None` otherwise. Kernels since May 2024 require this
/// capability to map portals of some devices (INTEL-SA-01084).
pub fn raw_io(host: &Host) -> Option<Gap> {
    if host.has(Capability::SysRawio) {
        return None;
    }
    let command = match std::env::current_exe() {
        Ok(file) if host.is_live() => format!("setcap cap_sys_rawio+ep {}", file.display()),
        _ => "setcap cap_sys_rawio+ep $(command -v hotlift)".to_owned(),
    };
    let problem = "no CAP_SYS_RAWIO, which kernels since May 2024 require for mapping a queue";
    Some(Gap::new(problem, [command]))
}

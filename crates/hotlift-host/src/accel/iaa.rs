//! Intel IAA, for method `qpl`.

use hotlift_accel::idxd::DeviceKind;
use hotlift_mem::PAGE_SIZE;

use super::host::{Capability, Host};
use super::libraries::Library;
use super::queues::{self, QueueRequirement};
use super::{AccelError, Accelerator, Gap};

/// A page in each direction, with room for libqpl's own tables.
const TRANSFER: u64 = 16 * PAGE_SIZE as u64;

pub fn detect(host: &Host) -> Result<Accelerator, AccelError> {
    let requirement = QueueRequirement {
        kind: DeviceKind::Iaa,
        dedicated_too: false,
        // The device waits for a missing page; without this, libqpl touches the page and retries.
        block_on_fault: true,
        batch: None,
        transfer: TRANSFER,
    };
    let parts = queues::parts(host, &requirement)?;
    let library = Library::of(host, "qpl");
    let mut gaps = Vec::new();
    if !parts.is_empty() {
        gaps.extend(submission(host));
        // Packaged from Debian 14 on; elsewhere from github.com/intel/qpl.
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

/// Returns the gaps for submission through a mapped portal, the only way that libqpl has on all kernels.
fn submission(host: &Host) -> Vec<Gap> {
    let mut gaps = Vec::new();
    if !host.cpu().enqcmd {
        // Hidden by a hypervisor, or by a kernel without scalable mode.
        gaps.push(Gap::new::<String>("the CPU has no ENQCMD", []));
    }
    gaps.extend(raw_io(host));
    gaps
}

/// Returns the gap without CAP_SYS_RAWIO: kernels since May 2024 require it for portals of present devices (INTEL-SA-01084).
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

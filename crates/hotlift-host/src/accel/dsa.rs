//! Intel DSA (Data Streaming Accelerator), which detects zero pages.

use hotlift_accel::idxd::DeviceKind;

use super::host::Host;
use super::iaa::raw_io;
use super::queues::{self, QueueRequirement};
use super::{AccelError, Accelerator, Gap};

/// Pages of a multifd packet: each packet is one batch of descriptors.
const BATCH: u32 = 128;

/// Largest transfer of one descriptor, in bytes: the size of a huge page.
const TRANSFER: u64 = 2 << 20;

pub fn detect(host: &Host) -> Result<Accelerator, AccelError> {
    let requirement = QueueRequirement {
        kind: DeviceKind::Dsa,
        dedicated_too: true,
        // The device handles page faults slowly, so the CPU finishes such a page instead.
        block_on_fault: false,
        batch: Some(BATCH),
        transfer: TRANSFER,
    };
    let parts = queues::parts(host, &requirement)?;
    let mut gaps = Vec::new();
    if !parts.is_empty() {
        // Without either of these instructions, the kernel submits the descriptors: one system call per group.
        let cpu = host.cpu();
        if !cpu.enqcmd && !cpu.movdir64b {
            let problem = "the CPU has neither ENQCMD nor MOVDIR64B: no batches";
            gaps.push(Gap::new::<String>(problem, []).minor());
        }
        gaps.extend(raw_io(host).map(Gap::minor));
    }
    let serves = "zero-page-detection=dsa-accel";
    Ok(Accelerator::new("Intel DSA", serves, None, parts, gaps))
}

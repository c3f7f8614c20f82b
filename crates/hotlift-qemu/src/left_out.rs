//! RAM that QEMU leaves out of a migration, because a device reports it as unplugged or free.

use hotlift::relay::LeftOut;
use hotlift_qmp::{Qemu, QmpError};

/// Lists what the devices of `qemu` report.
///
/// # Errors
/// Those of QMP.
pub fn left_out(qemu: &mut Qemu) -> Result<Vec<LeftOut>, QmpError> {
    let devices = qemu.virtio_mem()?.into_iter();
    let mut left_out: Vec<_> = devices
        .map(|device| LeftOut::Unplugged {
            // The RAM block has the path for its name in machine types up to 4.0, and the id in later ones.
            block: device.memdev.trim_start_matches("/objects/").to_owned(),
            bytes: device.max_size.saturating_sub(device.size),
        })
        .collect();
    if qemu.hints_free_pages()? {
        left_out.push(LeftOut::Free);
    }
    Ok(left_out)
}

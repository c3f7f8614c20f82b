//! RAM that QEMU does not migrate, because a device reports it as unplugged or free.

use hotlift::relay::LeftOut;
use hotlift_qmp::{Qemu, QmpError};

/// Lists the RAM that the devices of `qemu` report.
///
/// # Errors
/// QMP errors.
pub fn left_out(qemu: &mut Qemu) -> Result<Vec<LeftOut>, QmpError> {
    let devices = qemu.virtio_mem()?.into_iter();
    let mut left_out: Vec<_> = devices
        .map(|device| LeftOut::Unplugged {
            // In machine types up to 4.0 the RAM block's name is the path, in later ones the id.
            block: device.memdev.trim_start_matches("/objects/").to_owned(),
            bytes: device.max_size.saturating_sub(device.size),
        })
        .collect();
    if qemu.hints_free_pages()? {
        left_out.push(LeftOut::Free);
    }
    Ok(left_out)
}

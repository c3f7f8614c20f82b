//! RAM that QEMU does not migrate, because a device reports it as unplugged or free.

use hotlift::relay::UnusedRam;
use hotlift_qmp::{Qemu, QmpError};

/// Lists the RAM that devices of `qemu` report as unplugged or free.
///
/// # Errors
/// QMP errors.
pub fn unused_ram(qemu: &mut Qemu) -> Result<Vec<UnusedRam>, QmpError> {
    let devices = qemu.virtio_mem()?.into_iter();
    let mut unused_ram: Vec<_> = devices
        .map(|device| UnusedRam::Unplugged {
            // With machine types up to 4.0 the RAM block's name is the backend's path, with later ones its id.
            block: device.memdev.trim_start_matches("/objects/").to_owned(),
            bytes: device.max_size.saturating_sub(device.size),
        })
        .collect();
    if qemu.hints_free_pages()? {
        unused_ram.push(UnusedRam::Free);
    }
    Ok(unused_ram)
}

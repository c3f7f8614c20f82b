//! Locks a disk image from another QEMU process.

use std::path::Path;

use hotlift_qmp::{Qemu, QmpError};
use serde_json::json;

use crate::error::KitError;
use crate::qemu::Launched;

/// A QEMU process that can lock one disk image.
#[derive(Debug)]
pub struct DiskLock {
    qmp: Qemu,
    /// The QEMU process. It is killed on drop, which releases the lock.
    _process: Launched,
}

impl DiskLock {
    /// Starts the QEMU process without locking the image.
    ///
    /// # Errors
    /// If QEMU does not start, or cannot open the disk image.
    pub fn prepare(program: &Path, image: &Path) -> Result<Self, KitError> {
        let machine = "-S -machine pc -m 16M -accel kvm -accel tcg";
        let arguments: Vec<&str> = machine.split(' ').collect();
        let process = Launched::bare(program, &arguments)?;
        let mut qmp = process.connect()?;
        let node = json!({
            "driver": "raw",
            "node-name": "disk",
            "file": { "driver": "file", "filename": image.display().to_string() },
        });
        qmp.client().execute("blockdev-add", &node)?;
        Ok(Self {
            qmp,
            _process: process,
        })
    }

    /// Locks the disk image. Returns false if another process has locked it.
    ///
    /// # Errors
    /// If QEMU does not answer.
    pub fn take(&mut self) -> Result<bool, KitError> {
        // The lock is a device that denies writes of other processes. The device of an arriving guest checks only this
        // condition.
        let device = json!({ "driver": "virtio-blk-pci", "drive": "disk" });
        match self.qmp.client().execute("device_add", &device) {
            Ok(_) => Ok(true),
            Err(QmpError::Command { .. }) => Ok(false),
            Err(error) => Err(error.into()),
        }
    }
}

#[cfg(test)]
mod tests {
    use super::*;
    use crate::qemu::installed;

    #[test]
    fn a_second_user_of_an_image_is_refused_until_the_first_ends() {
        let Some(program) = installed() else { return };
        let folder = tempfile::tempdir().unwrap();
        let image = folder.path().join("disk");
        std::fs::write(&image, vec![0; 1 << 20]).unwrap();
        let mut holders = [(); 2].map(|()| DiskLock::prepare(&program, &image).unwrap());
        let [first, second] = &mut holders;
        assert!(first.take().unwrap());
        assert!(!second.take().unwrap());
        let [first, mut second] = holders;
        drop(first);
        assert!(second.take().unwrap());
    }
}

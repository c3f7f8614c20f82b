//! Another user of a disk image: a QEMU that exports it for writing, and so holds its lock.

use std::path::Path;

use hotlift_qmp::{Qemu, QmpError};
use serde_json::json;

use crate::error::KitError;
use crate::qemu::Launched;

/// A QEMU without a machine that can take the lock of one image.
#[derive(Debug)]
pub struct DiskLock {
    qmp: Qemu,
    /// Killed when it goes out of scope, and the lock with it.
    _process: Launched,
}

impl DiskLock {
    /// Starts it. It locks nothing yet.
    ///
    /// # Errors
    /// If QEMU does not start, or cannot open the image.
    pub fn prepare(program: &Path, image: &Path) -> Result<Self, KitError> {
        let process = Launched::bare(program, &["-machine", "none"])?;
        let mut qmp = process.connect()?;
        let socket = process.path("nbd").display().to_string();
        let address = json!({ "addr": { "type": "unix", "data": { "path": socket } } });
        qmp.client().execute("nbd-server-start", &address)?;
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

    /// Takes the lock; false if another process holds it.
    ///
    /// # Errors
    /// If QEMU does not answer.
    pub fn take(&mut self) -> Result<bool, KitError> {
        let export = json!({ "type": "nbd", "id": "lock", "node-name": "disk", "writable": true });
        match self.qmp.client().execute("block-export-add", &export) {
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
    fn a_second_lock_of_an_image_is_refused_until_the_first_holder_ends() {
        let Some(program) = installed() else { return };
        let folder = tempfile::tempdir().unwrap();
        let image = folder.path().join("disk");
        std::fs::write(&image, vec![0; 1 << 20]).unwrap();
        let mut first = DiskLock::prepare(&program, &image).unwrap();
        assert!(first.take().unwrap());
        // NBD exports share writing with each other: a device of a guest does not.
        let mut guest = Launched::bare(
            &program,
            &[
                "-S",
                "-machine",
                "pc",
                "-accel",
                "tcg",
                "-drive",
                &format!("file={},format=raw,if=virtio", image.display()),
            ],
        )
        .unwrap();
        let ended = guest.process_mut().wait(crate::qemu::PATIENCE).unwrap();
        assert!(!ended.success());
        assert!(
            guest.process().has_said("lock"),
            "{:?}",
            guest.process().said()
        );
        drop(first);
    }
}

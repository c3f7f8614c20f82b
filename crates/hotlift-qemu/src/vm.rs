//! What the VMs at both ends must have alike.

use hotlift_qmp::{Qemu, QmpError, Uuid};
use serde::{Deserialize, Serialize};

use crate::error::QemuError;

/// A VM, as far as both ends must have it alike; `None` where QEMU does not tell.
#[derive(Debug, Clone, Default, PartialEq, Serialize, Deserialize)]
#[serde(rename_all = "kebab-case")]
pub struct Vm {
    /// Machine type.
    pub machine: Option<String>,
    /// UUID; all zero if it has none.
    pub uuid: Uuid,
    /// Bytes of RAM, without what was plugged in.
    pub ram_bytes: Option<u64>,
    /// vCPUs.
    pub vcpus: Option<usize>,
}

impl Vm {
    /// That of `qemu`.
    ///
    /// # Errors
    /// Those of QMP.
    pub fn of(qemu: &mut Qemu) -> Result<Self, QmpError> {
        Ok(Self {
            machine: qemu.machine_type()?,
            uuid: qemu.query_uuid()?,
            ram_bytes: qemu.base_memory()?,
            vcpus: qemu.vcpus()?,
        })
    }

    /// Whether the guest of this VM can run in the VM `there` at all. QEMU itself finds out more, but only when it
    /// reads the stream.
    ///
    /// # Errors
    /// [`QemuError::Differs`].
    pub fn fits(&self, there: &Self) -> Result<(), QemuError> {
        if let (Some(here), Some(there)) = (&self.machine, &there.machine) {
            alike("the machine type", &hotlift_qmp::one_line(here), there)?;
        }
        // QEMU takes no multifd channel of another UUID.
        alike("the UUID (-uuid)", &self.uuid, &there.uuid)?;
        if let (Some(here), Some(there)) = (self.ram_bytes, there.ram_bytes) {
            alike("the RAM size in bytes (-m)", &here, &there)?;
        }
        if let (Some(here), Some(there)) = (self.vcpus, there.vcpus) {
            alike("the number of vCPUs (-smp)", &here, &there)?;
        }
        Ok(())
    }
}

fn alike<T: PartialEq + ToString>(
    what: &'static str,
    source_has: &T,
    destination_has: &T,
) -> Result<(), QemuError> {
    if source_has == destination_has {
        return Ok(());
    }
    Err(QemuError::Differs {
        what,
        source_has: source_has.to_string(),
        destination_has: destination_has.to_string(),
    })
}

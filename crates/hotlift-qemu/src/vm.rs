//! Properties of a QEMU's VM, which both hosts of a migration exchange and compare.

use hotlift_qmp::{
    Disk, MachineDevice, MemoryDevice, MemoryLimits, Qemu, QmpError, RamBlock, Uuid,
};
use serde::{Deserialize, Serialize};

/// Maximum length of the description in a message to the other host, in bytes of JSON: half of the message limit of a
/// conversation.
pub const MESSAGE_MAX: usize = 128 << 10;

/// Maximum length of the description in a save file, in bytes of JSON: half of the header's limit.
pub const FILE_MAX: usize = 32 << 10;

/// Properties of a VM that both hosts compare; `None` if QEMU does not report the value.
#[derive(Debug, Clone, Default, PartialEq, Serialize, Deserialize)]
#[serde(rename_all = "kebab-case", default)]
pub struct Vm {
    /// Machine type.
    pub machine: Option<String>,
    /// UUID; all zero if the VM has none.
    pub uuid: Uuid,
    /// Bytes of RAM at start, without plugged-in memory.
    pub ram_bytes: Option<u64>,
    /// Number of vCPUs.
    pub vcpus: Option<usize>,
    /// Maximum number of vCPUs.
    pub possible_vcpus: Option<usize>,
    /// True if the stream has a state for each possible vCPU; `None` if the machine has no ACPI device for vCPU hotplug.
    pub has_cpu_hotplug_state: Option<bool>,
    /// CPU model.
    pub cpu_model: Option<String>,
    /// CPUID registers with flags, in an order that is the same for the same CPU.
    pub cpu_registers: Option<String>,
    /// Enabled flags of the CPU, sorted.
    pub cpu_flags: Option<Vec<String>>,
    /// Number of memory slots.
    pub memory_slots: Option<u64>,
    /// Maximum bytes of RAM, including memory that can be plugged in.
    pub max_ram_bytes: Option<u64>,
    /// Plugged-in memory.
    pub memory_devices: Option<Vec<MemoryDevice>>,
    /// RAM blocks that migrate.
    pub ram_blocks: Option<Vec<RamBlock>>,
    /// Devices.
    pub devices: Option<Vec<MachineDevice>>,
    /// Disks.
    pub disks: Option<Vec<Disk>>,
}

impl Vm {
    /// Reads the properties of the VM of `qemu`. Values that are slow to read are copied from `other` if they must be equal.
    ///
    /// # Errors
    /// QMP errors.
    pub fn of(qemu: &mut Qemu, other: Option<&Self>) -> Result<Self, QmpError> {
        let cpu = qemu.cpu()?;
        let cpu_flags = cpu.as_ref().map(|cpu| {
            let is_alike =
                |it: &&Self| cpu.registers.is_some() && it.cpu_registers == cpu.registers;
            let alike = other.filter(is_alike);
            qemu.cpu_flags(cpu, alike.and_then(|it| it.cpu_flags.as_deref()))
        });
        let cpu_flags = cpu_flags.transpose()?;
        let (cpu_model, cpu_registers) = cpu.map(|cpu| (cpu.model, cpu.registers)).unzip();
        let limits = qemu.memory_limits()?;
        Ok(Self {
            ram_bytes: qemu.base_memory()?,
            vcpus: qemu.vcpus()?,
            possible_vcpus: qemu.possible_vcpus()?,
            has_cpu_hotplug_state: qemu.has_cpu_hotplug_state()?,
            cpu_model,
            cpu_registers: cpu_registers.flatten(),
            cpu_flags,
            memory_slots: limits.map(|MemoryLimits { slots, .. }| slots),
            max_ram_bytes: limits.map(|MemoryLimits { max_bytes, .. }| max_bytes),
            memory_devices: qemu.memory_devices()?,
            ram_blocks: qemu.ram_blocks()?,
            devices: qemu.machine_devices()?,
            disks: qemu.disks()?,
            ..Self::identity(qemu)?
        })
    }

    /// Reads only the machine type and the UUID of `qemu`.
    ///
    /// # Errors
    /// QMP errors.
    pub fn identity(qemu: &mut Qemu) -> Result<Self, QmpError> {
        Ok(Self {
            machine: qemu.machine_type()?,
            uuid: qemu.query_uuid()?,
            ..Self::default()
        })
    }

    /// Removes the longest lists if the description exceeds `limit` bytes as JSON.
    #[must_use]
    pub fn within(mut self, limit: usize) -> Self {
        let drops: [fn(&mut Self); 5] = [
            |vm| vm.devices = None,
            |vm| vm.cpu_flags = None,
            |vm| vm.disks = None,
            |vm| vm.ram_blocks = None,
            |vm| vm.memory_devices = None,
        ];
        for drop in drops {
            if serde_json::to_vec(&self).is_ok_and(|json| json.len() <= limit) {
                break;
            }
            drop(&mut self);
        }
        self
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn a_description_that_is_too_long_loses_only_its_longest_lists() {
        let device = MachineDevice {
            place: "pci.0/02.0".to_owned(),
            kind: "e1000".to_owned(),
            pci: None,
            vectors: None,
        };
        let vm = Vm {
            vcpus: Some(2),
            cpu_flags: Some(vec!["avx".to_owned()]),
            devices: Some(vec![device; 1000]),
            ..Vm::default()
        };
        assert_eq!(vm.clone().within(MESSAGE_MAX), vm);
        let shorter = vm.clone().within(10_000);
        assert_eq!(
            (&shorter.devices, &shorter.cpu_flags),
            (&None, &vm.cpu_flags)
        );
        assert_eq!(vm.within(0).vcpus, Some(2));
    }

    #[test]
    fn a_description_of_an_older_command_is_read() {
        let vm: Vm = serde_json::from_str(r#"{"machine":"pc","unknown":1}"#).unwrap();
        assert_eq!(vm.machine.as_deref(), Some("pc"));
        assert_eq!(vm.devices, None);
    }
}

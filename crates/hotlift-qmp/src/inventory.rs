//! Reads over QMP the properties of a machine that both hosts of a migration compare.

use std::collections::HashSet;

use serde::{Deserialize, Serialize};
use serde_json::{Value, json};

use crate::error::QmpError;
use crate::objects::{PERIPHERALS, Plugged};
use crate::qemu::{Qemu, optional_answer};
use crate::qtree::{self, MachineDevice};

/// Boolean CPU properties that are not compared as flags. These properties are no flags, or differ between releases of QEMU for
/// the same CPU of a machine type (found with 7.2, 10.0 and 11.1).
const NOT_FLAGS: [&str; 10] = [
    "check",
    "enforce",
    "fill-mtrr-mask",
    "full-cpuid-auto-level",
    "hotpluggable",
    "hotplugged",
    "ht",
    "legacy-multi-node",
    "realized",
    "start-powered-off",
];

/// Flags that are in no CPUID register of `feature-words`. The flags that [`is_beside_cpuid`] recognises by name are not
/// repeated here. Found with QEMU 7.2 and 10.0; newer versions list the values of all flags at once.
const BESIDE_CPUID: [&str; 22] = [
    "cpuid-0xb",
    "fb-clear",
    "full-width-write",
    "host-cache-info",
    "host-phys-bits",
    "ibrs-all",
    "kvm",
    "kvm-no-smi-migration",
    "kvm-pv-enforce-cpuid",
    "l3-cache",
    "legacy-cache",
    "lmce",
    "migratable",
    "pmu",
    "rfds-clear",
    "rsba",
    "skip-l1dfl-vmentry",
    "split-lock-detect",
    "tcg-cpuid",
    "tsx-ctrl",
    "vmware-cpuid-freq",
    "xen-vapic",
];

/// Types of memory devices, which have no bus. [`Qemu::memory_devices`] lists them, not [`Qemu::machine_devices`].
const MEMORY: [&str; 2] = ["nvdimm", "pc-dimm"];

/// The first vCPU of a machine.
#[derive(Debug, Clone, PartialEq, Eq)]
pub struct Cpu {
    /// Model, such as `qemu64`.
    pub model: String,
    /// CPUID registers with flags, in an order that is the same for the same CPU; `None` if QEMU does not report them.
    pub registers: Option<String>,
    path: String,
}

/// Limits of memory that can be plugged into a machine (`-m`).
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub struct MemoryLimits {
    /// Number of memory slots.
    pub slots: u64,
    /// Maximum bytes of RAM, including memory that can be plugged in.
    pub max_bytes: u64,
}

/// Memory that is plugged into a machine.
#[derive(Debug, Clone, PartialEq, Eq, Serialize, Deserialize)]
#[serde(rename_all = "kebab-case")]
pub struct MemoryDevice {
    /// Kind of the device, such as `dimm` or `virtio-mem`.
    pub kind: String,
    /// Id of the memory backend.
    pub memdev: String,
    /// Guest physical address.
    pub address: u64,
    /// Size in bytes; for virtio-mem the maximum size.
    pub bytes: u64,
    /// NUMA node.
    pub node: u64,
}

/// The disk of a block device.
#[derive(Debug, Clone, PartialEq, Eq, Serialize, Deserialize)]
#[serde(rename_all = "kebab-case")]
pub struct Disk {
    /// Id of the device, or of its drive.
    pub name: String,
    /// Size in bytes as the guest sees it.
    pub bytes: u64,
    /// True if the guest cannot write to the disk.
    pub read_only: bool,
}

/// A CPUID register, as an element of QEMU's CPU property `feature-words`.
#[derive(Deserialize)]
#[serde(rename_all = "kebab-case")]
struct FeatureWord {
    cpuid_input_eax: u32,
    #[serde(default)]
    cpuid_input_ecx: u32,
    cpuid_register: String,
    features: u32,
}

/// Formats the registers that are not 0. Registers that are 0 are left out, since QEMU's versions list different ones.
fn registers(words: &[FeatureWord]) -> String {
    let mut registers: Vec<_> = words
        .iter()
        .filter(|word| word.features != 0)
        .map(|it| {
            let (eax, ecx) = (it.cpuid_input_eax, it.cpuid_input_ecx);
            format!("{eax:x}.{ecx:x}.{}={:x}", it.cpuid_register, it.features)
        })
        .collect();
    registers.sort();
    registers.join(" ")
}

/// Returns true if a boolean CPU property is a flag of the CPU. Names with '_' are aliases of flags; names that begin with 'x-'
/// are internal to QEMU.
fn is_flag(name: &str) -> bool {
    !name.contains('_') && !name.starts_with("x-") && !NOT_FLAGS.contains(&name)
}

/// Returns true if a flag is in no CPUID register of `feature-words`: a flag of nested virtualisation, of Hyper-V, or of
/// IA32_ARCH_CAPABILITIES.
fn is_beside_cpuid(name: &str) -> bool {
    name.starts_with("vmx-")
        || name.starts_with("hv-")
        || name.ends_with("-no")
        || BESIDE_CPUID.contains(&name)
}

/// Returns the names of the properties whose value is true, and for which `is_meant` returns true.
fn on(
    values: impl IntoIterator<Item = (String, Value)>,
    is_meant: impl Fn(&str) -> bool,
) -> Vec<String> {
    let values = values.into_iter();
    let on = values.filter(|(name, value)| *value == Value::Bool(true) && is_meant(name));
    on.map(|(name, _)| name).collect()
}

impl Qemu {
    /// Returns the maximum number of vCPUs (`maxcpus` of `-smp`); `None` if this QEMU or its machine type does not report it.
    ///
    /// # Errors
    /// If the connection fails.
    pub fn possible_vcpus(&mut self) -> Result<Option<usize>, QmpError> {
        #[derive(Deserialize)]
        #[serde(rename_all = "kebab-case")]
        struct Slot {
            vcpus_count: usize,
        }
        let slots = self.ask::<Vec<Slot>>("query-hotpluggable-cpus", &Value::Null);
        let slots = optional_answer(slots)?;
        Ok(slots.map(|slots| slots.iter().map(|slot| slot.vcpus_count).sum()))
    }

    /// Returns true if the stream contains the state of the ACPI device for vCPU hotplug. The length of this state depends on
    /// the number of possible vCPUs. QEMU up to 10.0 omits the state until the guest uses the device. Returns `None` if the
    /// machine has no such device.
    ///
    /// # Errors
    /// If the connection fails.
    pub fn has_cpu_hotplug_state(&mut self) -> Result<Option<bool>, QmpError> {
        let device = self.property::<String>("/machine", "acpi-device")?;
        let Some(device) = device.filter(|path| !path.is_empty()) else {
            return Ok(None);
        };
        let is_legacy = self.property(&device, "cpu-hotplug-legacy")?;
        Ok(Some(!is_legacy.unwrap_or(false)))
    }

    /// Returns model and CPUID registers of the first vCPU; `None` if this QEMU does not report them.
    ///
    /// # Errors
    /// If the connection fails.
    pub fn cpu(&mut self) -> Result<Option<Cpu>, QmpError> {
        #[derive(Deserialize)]
        #[serde(rename_all = "kebab-case")]
        struct Vcpu {
            qom_path: String,
        }
        let vcpus = self.ask::<Vec<Vcpu>>("query-cpus-fast", &Value::Null);
        let Some(path) =
            optional_answer(vcpus)?.and_then(|vcpus| Some(vcpus.into_iter().next()?.qom_path))
        else {
            return Ok(None);
        };
        let Some(kind) = self.property::<String>(&path, "type")? else {
            return Ok(None);
        };
        // Examples of types: "qemu64-x86_64-cpu", "cortex-a57-arm-cpu".
        let model = kind.strip_suffix("-cpu").unwrap_or(&kind);
        let model = model.rsplit_once('-').map_or(model, |(model, _)| model);
        let words = self.property::<Vec<FeatureWord>>(&path, "feature-words")?;
        Ok(Some(Cpu {
            model: model.to_owned(),
            registers: words.map(|words| registers(&words)),
            path,
        }))
    }

    /// Returns the sorted names of the flags of `cpu`. `alike` are the flags of another CPU with the same registers, if known:
    /// flags in registers are copied from it instead of read. QEMU before 10.1 takes a third of a millisecond to read a flag.
    ///
    /// # Errors
    /// If the connection fails.
    pub fn cpu_flags(
        &mut self,
        cpu: &Cpu,
        alike: Option<&[String]>,
    ) -> Result<Vec<String>, QmpError> {
        let mut flags = match self.values(&cpu.path)? {
            Some(values) => on(values, is_flag),
            None => {
                // Flags of nested virtualisation are a third of all flags. They have no effect on a CPU without `vmx`, and are
                // not read for it.
                let is_nested = alike.is_some_and(|flags| flags.iter().any(|flag| flag == "vmx"));
                let is_read = |name: &str| {
                    let is_unknown = is_nested || !name.starts_with("vmx-");
                    alike.is_none() || (is_beside_cpuid(name) && is_unknown)
                };
                let names: Vec<String> = self
                    .entries(&cpu.path)?
                    .into_iter()
                    .filter(|entry| {
                        entry.kind == "bool" && is_flag(&entry.name) && is_read(&entry.name)
                    })
                    .map(|entry| entry.name)
                    .collect();
                let questions: Vec<_> = names
                    .iter()
                    .map(|name| json!({ "path": cpu.path, "property": name }))
                    .collect();
                let answers = self.client().execute_each("qom-get", &questions)?;
                let answers = answers.into_iter().map(Option::unwrap_or_default);
                let known = alike.unwrap_or_default().iter();
                let known = known.filter(|flag| !is_read(flag)).cloned();
                known
                    .chain(on(names.into_iter().zip(answers), |_| true))
                    .collect()
            }
        };
        flags.sort();
        Ok(flags)
    }

    /// Returns the limits of memory that can be plugged in; `None` if QEMU does not report them. If no memory can be plugged
    /// in, returns 0 slots and the present size.
    ///
    /// # Errors
    /// If the connection fails.
    pub fn memory_limits(&mut self) -> Result<Option<MemoryLimits>, QmpError> {
        #[derive(Deserialize)]
        #[serde(rename_all = "kebab-case")]
        struct Memory {
            size: u64,
            // QEMU omits both members if no memory can be plugged in.
            slots: Option<u64>,
            max_size: Option<u64>,
        }
        let memory = self.property::<Memory>("/machine", "memory")?;
        Ok(memory.map(|memory| MemoryLimits {
            slots: memory.slots.unwrap_or(0),
            max_bytes: memory.max_size.unwrap_or(memory.size),
        }))
    }

    /// Returns the plugged-in memory devices, each with the id of its memory backend; `None` if QEMU does not report them.
    ///
    /// # Errors
    /// If the connection fails.
    pub fn memory_devices(&mut self) -> Result<Option<Vec<MemoryDevice>>, QmpError> {
        let of = |Plugged { kind, data }| {
            let number = |names: [&str; 2]| {
                let values = names.iter().filter_map(|name| data[*name].as_u64());
                values.max().unwrap_or(0)
            };
            let memdev = data["memdev"].as_str().unwrap_or_default();
            MemoryDevice {
                memdev: memdev.trim_start_matches("/objects/").to_owned(),
                address: number(["addr", "memaddr"]),
                bytes: number(["size", "max-size"]),
                node: number(["node", "node"]),
                kind,
            }
        };
        let devices = self.plugged()?;
        Ok(devices.map(|devices| devices.into_iter().map(of).collect()))
    }

    /// Returns the devices of the machine; `None` if QEMU does not report them.
    ///
    /// # Errors
    /// If the connection fails.
    pub fn machine_devices(&mut self) -> Result<Option<Vec<MachineDevice>>, QmpError> {
        let Some(tree) = self.monitor("info qtree")? else {
            return Ok(None);
        };
        let mut devices = qtree::parse(&tree);
        let on_buses: HashSet<String> = devices.iter().map(|it| it.kind.clone()).collect();
        // Devices without a bus, such as 'vmgenid', are not in `info qtree`.
        for path in PERIPHERALS {
            for entry in self.entries(path)? {
                let kind = entry.kind.strip_prefix("child<");
                let Some(kind) = kind.and_then(|it| it.strip_suffix('>')) else {
                    continue;
                };
                let is_listed = on_buses.contains(kind) || MEMORY.contains(&kind);
                if !is_listed && !kind.ends_with("-cpu") {
                    devices.push(MachineDevice {
                        place: kind.to_owned(),
                        kind: kind.to_owned(),
                        pci: None,
                        vectors: None,
                    });
                }
            }
        }
        Ok(Some(devices))
    }

    /// Returns the disks of the machine, without removable media such as CDs; `None` if QEMU does not report them.
    ///
    /// # Errors
    /// If the connection fails.
    pub fn disks(&mut self) -> Result<Option<Vec<Disk>>, QmpError> {
        #[derive(Deserialize)]
        struct Block {
            device: String,
            qdev: Option<String>,
            removable: bool,
            inserted: Option<Inserted>,
        }
        #[derive(Deserialize)]
        struct Inserted {
            ro: bool,
            image: Image,
        }
        #[derive(Deserialize)]
        #[serde(rename_all = "kebab-case")]
        struct Image {
            virtual_size: u64,
        }
        let blocks = self.ask::<Vec<Block>>("query-block", &Value::Null);
        let of = |block: Block| {
            let inserted = block.inserted.filter(|_| !block.removable)?;
            let qdev = block.qdev.unwrap_or_default();
            let id = qdev.strip_prefix("/machine/peripheral/");
            let id = id.and_then(|path| path.split('/').next());
            let name = match (id, block.device.as_str()) {
                (Some(id), _) => id,
                (None, "") => &qdev,
                (None, drive) => drive,
            };
            Some(Disk {
                name: name.to_owned(),
                bytes: inserted.image.virtual_size,
                read_only: inserted.ro,
            })
        };
        Ok(optional_answer(blocks)?.map(|blocks| blocks.into_iter().filter_map(of).collect()))
    }
}

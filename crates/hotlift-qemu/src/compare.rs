//! Compares two VMs before a migration, and finds the differences that QEMU refuses. QEMU itself refuses most of them only when
//! it reads the device states, after all pages.
//!
//! | difference | QEMU 7.2, 10.0 and 11.1 |
//! |---|---|
//! | machine type, UUID (with multifd), RAM size | refuses |
//! | a RAM block or a device is missing at the destination | refuses, except devices without state (`STATELESS`) |
//! | size of a RAM block | refuses, except blocks that it resizes (ACPI tables) |
//! | other type, PCI id or number of vectors of a device | refuses |
//! | fewer vCPUs at the destination | refuses; Hotlift also refuses more vCPUs |
//! | possible vCPUs | refuses once the guest has used the ACPI device for them; 11.1 always |
//! | memory slots, on a machine with ACPI | refuses |
//! | address, size or node of a virtio-mem | refuses |
//! | an extra RAM block or device at the destination, largest RAM, CPU model and flags, disks, address of a DIMM | accepts |
//!
//! Other properties of devices are not compared.

use std::collections::{BTreeMap, BTreeSet, HashSet};

use hotlift_qmp::{Disk, MachineDevice, MemoryDevice, RamBlock, Uuid, general_type, one_line};
use serde::Serialize;

use crate::error::QemuError;
use crate::vm::Vm;

/// Device types without state in the stream. QEMU accepts a destination without these devices. Found by migrations of QEMU 7.2
/// and 10.0 with one device of each type.
const STATELESS: [&str; 11] = [
    "AMDVI-PCI",
    "adlib",
    "edu",
    "hyperv-testdev",
    "ide-cd",
    "ide-hd",
    "isa-applesmc",
    "isa-debug-exit",
    "isa-debugcon",
    "pci-testdev",
    "pvpanic",
];

/// Maximum number of listed differences of one kind; the others are only counted.
const MAX_LISTED: usize = 16;

/// Maximum number of CPU flags listed in one difference.
const MAX_FLAGS: usize = 24;

/// Maximum number of refused differences in an error. The error must fit into the failure reason that one host sends to the
/// other.
const MAX_IN_ERROR: usize = 3;

/// Text for a list entry that only one of the VMs has.
const NOTHING: &str = "none";

/// Result of the comparison of one value.
#[derive(Debug, Clone, Copy, PartialEq, Eq, Serialize)]
#[serde(rename_all = "kebab-case")]
pub enum Outcome {
    /// Both values are equal.
    Same,
    /// The values differ, and QEMU accepts it.
    Different,
    /// The values differ, and QEMU refuses it.
    Refused,
    /// At least one QEMU does not report the value.
    Unknown,
}

/// Comparison of one property of two VMs.
#[derive(Debug, Clone, PartialEq, Eq, Serialize)]
#[serde(rename_all = "kebab-case")]
pub struct Row {
    /// Name of the compared property.
    pub what: String,
    /// Value at the source.
    pub source: String,
    /// Value at the destination.
    pub destination: String,
    /// Result of the comparison.
    pub outcome: Outcome,
    /// Arguments for the destination's command line that remove the difference; empty if the arguments are not known.
    pub remedy: String,
}

impl Row {
    /// Creates a row. The values may come from another host, so each text is shortened, and its control characters are replaced
    /// by spaces.
    fn new(what: &str, values: [&str; 2], outcome: Outcome, remedy: &str) -> Self {
        let [source, destination] = values.map(one_line);
        Self {
            what: one_line(what),
            source,
            destination,
            outcome,
            remedy: one_line(remedy),
        }
    }

    /// Formats the difference as one line.
    #[must_use]
    pub fn line(&self) -> String {
        let Self {
            what,
            source,
            destination,
            remedy,
            ..
        } = self;
        let remedy = match remedy.as_str() {
            "" => String::new(),
            remedy => format!(" (start the destination's QEMU with {remedy})"),
        };
        format!("{what}: the source has {source}, the destination has {destination}{remedy}")
    }
}

/// Compares two VMs.
#[must_use]
pub fn compare(source: &Vm, destination: &Vm) -> Vec<Row> {
    use Outcome::{Different, Refused};
    let (s, d) = (source, destination);
    let bytes = |bytes: &u64| format!("{bytes} bytes");
    let kib = |bytes: &u64| format!("{}k", bytes >> 10);
    let of_hotplug = match s.has_cpu_hotplug_state {
        Some(true) => Refused,
        Some(false) | None => Different,
    };
    let of_slots = match s.has_cpu_hotplug_state {
        Some(_) => Refused,
        None => Different,
    };
    let mut rows = vec![
        value(
            "machine type",
            [&s.machine, &d.machine],
            Refused,
            String::clone,
            |it| format!("-machine {it}"),
        ),
        value(
            "UUID",
            [&Some(s.uuid), &Some(d.uuid)],
            Refused,
            Uuid::to_string,
            |it| format!("-uuid {it}"),
        ),
        value(
            "RAM size",
            [&s.ram_bytes, &d.ram_bytes],
            Refused,
            bytes,
            |it| format!("-m {}", kib(it)),
        ),
        value(
            "number of vCPUs",
            [&s.vcpus, &d.vcpus],
            Refused,
            usize::to_string,
            |it| format!("-smp {it}"),
        ),
        value(
            "number of possible vCPUs",
            [&s.possible_vcpus, &d.possible_vcpus],
            of_hotplug,
            usize::to_string,
            |it| format!("-smp …,maxcpus={it}"),
        ),
        value(
            "CPU model",
            [&s.cpu_model, &d.cpu_model],
            Different,
            String::clone,
            |it| format!("-cpu {it}"),
        ),
        cpu_flags(s, d),
        value(
            "number of memory slots",
            [&s.memory_slots, &d.memory_slots],
            of_slots,
            u64::to_string,
            |it| format!("-m …,slots={it}"),
        ),
        value(
            "largest RAM size",
            [&s.max_ram_bytes, &d.max_ram_bytes],
            Different,
            bytes,
            |it| format!("-m …,maxmem={}", kib(it)),
        ),
    ];
    rows.extend(memory_devices(s, d));
    rows.extend(ram_blocks(s, d));
    rows.extend(devices(s, d));
    rows.extend(disks(s, d));
    rows
}

/// Checks that no row has a difference that QEMU refuses.
///
/// # Errors
/// [`QemuError::Differs`] with the first `MAX_IN_ERROR` refused differences.
pub fn check(rows: &[Row]) -> Result<(), QemuError> {
    let refused = rows.iter().filter(|row| row.outcome == Outcome::Refused);
    let mut lines: Vec<_> = refused.map(Row::line).collect();
    if lines.is_empty() {
        return Ok(());
    }
    let more = lines.len().saturating_sub(MAX_IN_ERROR);
    lines.truncate(MAX_IN_ERROR);
    if more > 0 {
        lines.push(format!("{more} more differ"));
    }
    Err(QemuError::Differs {
        differences: lines.join("; "),
    })
}

/// Compares one value of both VMs.
fn value<T: PartialEq>(
    what: &str,
    [source, destination]: [&Option<T>; 2],
    if_different: Outcome,
    show: impl Fn(&T) -> String,
    remedy: impl Fn(&T) -> String,
) -> Row {
    let shown = |value: &Option<T>| value.as_ref().map_or("?".to_owned(), &show);
    let values = [shown(source), shown(destination)];
    let values = [values[0].as_str(), values[1].as_str()];
    match (source, destination) {
        (Some(source), Some(destination)) if source == destination => {
            Row::new(what, values, Outcome::Same, "")
        }
        (Some(source), Some(_)) => Row::new(what, values, if_different, &remedy(source)),
        _ => Row::new(what, values, Outcome::Unknown, ""),
    }
}

fn cpu_flags(source: &Vm, destination: &Vm) -> Row {
    let what = "CPU flags";
    let (Some(source), Some(destination)) = (&source.cpu_flags, &destination.cpu_flags) else {
        return Row::new(what, ["?"; 2], Outcome::Unknown, "");
    };
    let sets = [source, destination].map(|flags| flags.iter().collect::<BTreeSet<_>>());
    let only = |one: usize, other: usize| {
        let mut only = sets[one].difference(&sets[other]).map(|flag| flag.as_str());
        let shown: Vec<_> = only.by_ref().take(MAX_FLAGS).collect();
        match (shown.is_empty(), only.count()) {
            (true, _) => "none of its own".to_owned(),
            (false, 0) => shown.join(", "),
            (false, more) => format!("{} and {more} more", shown.join(", ")),
        }
    };
    if sets[0] == sets[1] {
        let count = format!("{} flags", sets[0].len());
        return Row::new(what, [&count, &count], Outcome::Same, "");
    }
    let values = [only(0, 1), only(1, 0)];
    let remedy = "the same -cpu";
    Row::new(what, [&values[0], &values[1]], Outcome::Different, remedy)
}

/// Compares two lists by key. Returns one row for each difference, or a single row if the lists are equal. `judge` returns the
/// result and the remedy of one entry.
fn list<'a, T>(
    (names, name): (&str, &str),
    [source, destination]: [&'a Option<Vec<T>>; 2],
    key: impl Fn(&T) -> &str,
    show: impl Fn(&T) -> String,
    mut judge: impl FnMut(Option<&'a T>, Option<&'a T>) -> (Outcome, String),
) -> Vec<Row> {
    let (Some(source), Some(destination)) = (source, destination) else {
        let count = |list: &Option<Vec<T>>| {
            list.as_ref()
                .map_or("?".to_owned(), |list| list.len().to_string())
        };
        let values = [count(source), count(destination)];
        return vec![Row::new(
            names,
            [&values[0], &values[1]],
            Outcome::Unknown,
            "",
        )];
    };
    // Entries with the same key are matched by their order.
    let mut entries: BTreeMap<(&str, usize), [Option<&T>; 2]> = BTreeMap::new();
    for (side, list) in [source, destination].into_iter().enumerate() {
        let mut seen: BTreeMap<&str, usize> = BTreeMap::new();
        for entry in list {
            let number = seen.entry(key(entry)).or_default();
            entries.entry((key(entry), *number)).or_default()[side] = Some(entry);
            *number += 1;
        }
    }
    let mut rows = Vec::new();
    let mut further = [0_usize; 2];
    for ((key, _), [here, there]) in entries {
        let (outcome, remedy) = judge(here, there);
        if outcome == Outcome::Same {
            continue;
        }
        // Refused differences are listed first.
        let is_refused = outcome == Outcome::Refused;
        let listed = |row: &&Row| (row.outcome == Outcome::Refused) == is_refused;
        if rows.iter().filter(listed).count() == MAX_LISTED {
            further[usize::from(is_refused)] += 1;
            continue;
        }
        let shown = |entry: Option<&T>| entry.map_or(NOTHING.to_owned(), &show);
        let values = [shown(here), shown(there)];
        let values = [values[0].as_str(), values[1].as_str()];
        rows.push(Row::new(&format!("{name} {key}"), values, outcome, &remedy));
    }
    for (count, outcome) in further
        .into_iter()
        .zip([Outcome::Different, Outcome::Refused])
    {
        if count > 0 {
            let more = format!("{count} more");
            rows.push(Row::new(names, [&more, "others"], outcome, ""));
        }
    }
    if rows.is_empty() {
        let counts = [source.len().to_string(), destination.len().to_string()];
        rows.push(Row::new(names, [&counts[0], &counts[1]], Outcome::Same, ""));
    }
    rows
}

fn same() -> (Outcome, String) {
    (Outcome::Same, String::new())
}

fn memory_devices(source: &Vm, destination: &Vm) -> Vec<Row> {
    list(
        ("memory devices", "memory device"),
        [&source.memory_devices, &destination.memory_devices],
        |device: &MemoryDevice| &device.memdev,
        |device| {
            let MemoryDevice {
                kind,
                address,
                bytes,
                node,
                ..
            } = device;
            format!("{kind} of {bytes} bytes at {address:#x}, node {node}")
        },
        |here, there| match (here, there) {
            (Some(here), Some(there)) if here == there => same(),
            (Some(here), Some(there)) => {
                let outcome = match [here, there].iter().all(|it| it.kind == "virtio-mem") {
                    true => Outcome::Refused,
                    // A difference in size is reported in the row of the RAM block.
                    false => Outcome::Different,
                };
                (outcome, format!("the same -device of {}", here.memdev))
            }
            // QEMU refuses this because the RAM block is missing, which is reported in a separate row.
            (Some(here), None) => {
                let remedy = format!("its -object and -device of {}", here.memdev);
                (Outcome::Different, remedy)
            }
            (None, _) => (Outcome::Different, String::new()),
        },
    )
}

fn ram_blocks(source: &Vm, destination: &Vm) -> Vec<Row> {
    list(
        ("RAM blocks", "RAM block"),
        [&source.ram_blocks, &destination.ram_blocks],
        |block: &RamBlock| &block.name,
        |block| format!("{} bytes", block.bytes),
        |here, there| match (here, there) {
            (Some(here), Some(there)) => match takes(there, here) {
                true => same(),
                false => (Outcome::Refused, block_remedy(here)),
            },
            (Some(here), None) => (Outcome::Refused, block_remedy(here)),
            (None, _) => (Outcome::Different, String::new()),
        },
    )
}

/// Returns true if the RAM block `there` of the destination can receive the pages of the source's block `here` of the same
/// name.
fn takes(there: &RamBlock, here: &RamBlock) -> bool {
    if there.bytes == here.bytes {
        return true;
    }
    // QEMU can resize only blocks of files that firmware loads. A block is recognised by its name, or by a size below its
    // maximum.
    let can_resize = there.bytes < there.max_bytes || there.name.starts_with("/rom@");
    can_resize && here.bytes <= there.max_bytes
}

/// Returns the command line arguments that add this RAM block to a QEMU.
fn block_remedy(block: &RamBlock) -> String {
    let name = block.name.as_str();
    let bytes = block.bytes;
    match name {
        "pc.bios" | "pc.rom" => "the same -bios".to_owned(),
        name if name.starts_with("/rom@") => "the same -machine options".to_owned(),
        name if name.contains('/') && name.ends_with(".rom") => {
            format!("the same romfile= of this device, or romsize={bytes}")
        }
        name if name.contains('/') => "the same -device options".to_owned(),
        name => format!("a memory backend '{name}' of size={bytes}"),
    }
}

fn devices(source: &Vm, destination: &Vm) -> Vec<Row> {
    // Devices on the bus of a missing device are not listed separately.
    let mut missing: HashSet<&str> = HashSet::new();
    list(
        ("devices", "device"),
        [&source.devices, &destination.devices],
        |device: &MachineDevice| &device.place,
        |device| {
            let mut text = device.kind.clone();
            if let Some(pci) = &device.pci {
                text += &format!(", {pci}");
            }
            if let Some(vectors) = device.vectors {
                text += &format!(", {vectors} vectors");
            }
            text
        },
        |here, there| {
            let place = here.or(there).map_or("", |device| device.place.as_str());
            let mut above = place.rmatch_indices('/').map(|(at, _)| &place[..at]);
            if above.any(|above| missing.contains(above)) {
                return same();
            }
            match (here, there) {
                (Some(here), Some(there)) if is_alike(here, there) => same(),
                (Some(here), there) => {
                    let is_same_type = there.is_some_and(|there| is_same_type(here, there));
                    if !is_same_type {
                        missing.insert(place);
                    }
                    match STATELESS.contains(&here.kind.as_str()) {
                        true => (Outcome::Different, device_remedy(here)),
                        false => (Outcome::Refused, device_remedy(here)),
                    }
                }
                (None, _) => {
                    missing.insert(place);
                    (Outcome::Different, String::new())
                }
            }
        },
    )
}

fn is_same_type(here: &MachineDevice, there: &MachineDevice) -> bool {
    // QEMU before 8.0 names the device `acpi-ged-x86`, later versions `acpi-ged`.
    let [here, there] = [here, there].map(|it| it.kind.trim_end_matches("-x86"));
    general_type(here) == general_type(there)
}

fn is_alike(here: &MachineDevice, there: &MachineDevice) -> bool {
    // QEMU 7.2 reports no number of vectors for some devices for which 10.0 reports a number.
    let vectors = here.vectors.zip(there.vectors);
    is_same_type(here, there)
        && here.pci == there.pci
        && vectors.is_none_or(|(here, there)| here == there)
}

/// Returns the command line arguments that add this device to a QEMU.
fn device_remedy(device: &MachineDevice) -> String {
    let MachineDevice {
        place,
        kind,
        vectors,
        ..
    } = device;
    let last = place.rsplit('/').next().unwrap_or_default();
    let vectors = vectors.map_or(String::new(), |vectors| format!(",vectors={vectors}"));
    match device.pci {
        Some(_) => format!("-device {kind},addr={last}{vectors} on the same bus"),
        None => format!("a {kind}, as the source has it"),
    }
}

fn disks(source: &Vm, destination: &Vm) -> Vec<Row> {
    list(
        ("disks", "disk"),
        [&source.disks, &destination.disks],
        |disk: &Disk| &disk.name,
        |disk| {
            let mode = if disk.read_only { ", read-only" } else { "" };
            format!("{} bytes{mode}", disk.bytes)
        },
        |here, there| match here == there {
            true => same(),
            false => (Outcome::Different, String::new()),
        },
    )
}

#[cfg(test)]
mod tests;

use super::*;

/// A change of a VM.
type Change = fn(&mut Vm);

fn device(place: &str, kind: &str, pci: Option<&str>, vectors: Option<u64>) -> MachineDevice {
    MachineDevice {
        place: place.to_owned(),
        kind: kind.to_owned(),
        pci: pci.map(str::to_owned),
        vectors,
    }
}

fn block(name: &str, bytes: u64, max_bytes: u64) -> RamBlock {
    RamBlock {
        name: name.to_owned(),
        page_size: 4096,
        bytes,
        max_bytes,
    }
}

fn memory(kind: &str, memdev: &str) -> MemoryDevice {
    MemoryDevice {
        kind: kind.to_owned(),
        memdev: memdev.to_owned(),
        address: 1 << 32,
        bytes: 64 << 20,
        node: 0,
    }
}

fn vm() -> Vm {
    Vm {
        machine: Some("pc-q35-10.0".to_owned()),
        uuid: Uuid::default(),
        ram_bytes: Some(64 << 20),
        vcpus: Some(2),
        possible_vcpus: Some(8),
        has_cpu_hotplug_state: Some(true),
        cpu_model: Some("qemu64".to_owned()),
        cpu_registers: None,
        cpu_flags: Some(["avx", "fpu", "sse"].map(str::to_owned).to_vec()),
        memory_slots: Some(2),
        max_ram_bytes: Some(1 << 30),
        memory_devices: Some(vec![memory("dimm", "d0"), memory("virtio-mem", "v0")]),
        ram_blocks: Some(vec![
            block("pc.ram", 64 << 20, 64 << 20),
            block("0000:00:02.0/virtio-net-pci.rom", 256 << 10, 256 << 10),
            block("/rom@etc/acpi/tables", 128 << 10, 2 << 20),
        ]),
        devices: Some(vec![
            device("hpet", "hpet", None, None),
            device("serial", "isa-serial", None, None),
            device("pit", "isa-pit", None, None),
            device("pvpanic", "pvpanic", None, None),
            device("host/02.0", "virtio-net-pci", Some("1af4:1000"), Some(4)),
            device("host/03.0", "virtio-scsi-pci", Some("1af4:1004"), Some(5)),
            device("host/03.0/0:0:0", "scsi-hd", None, None),
        ]),
        disks: Some(vec![Disk {
            name: "disk0".to_owned(),
            bytes: 1 << 20,
            read_only: false,
        }]),
    }
}

/// Changes the destination's VM, and returns the rows that differ.
fn rows(source: &Vm, change: Change) -> Vec<Row> {
    let mut there = vm();
    change(&mut there);
    let mut rows = compare(source, &there);
    rows.retain(|row| row.outcome != Outcome::Same);
    rows
}

/// Returns the property names and results of these rows.
fn found(rows: &[Row]) -> Vec<(&str, Outcome)> {
    let rows = rows.iter();
    rows.map(|row| (row.what.as_str(), row.outcome)).collect()
}

fn devices_of(vm: &mut Vm) -> &mut Vec<MachineDevice> {
    vm.devices.as_mut().unwrap()
}

fn blocks_of(vm: &mut Vm) -> &mut Vec<RamBlock> {
    vm.ram_blocks.as_mut().unwrap()
}

fn memory_of(vm: &mut Vm) -> &mut Vec<MemoryDevice> {
    vm.memory_devices.as_mut().unwrap()
}

#[test]
fn equal_vms_have_an_equal_row_for_each_subject() {
    let rows = compare(&vm(), &vm());
    assert!(
        rows.iter().all(|row| row.outcome == Outcome::Same),
        "{rows:#?}"
    );
    assert_eq!(rows.len(), 13);
    check(&rows).unwrap();
}

#[test]
fn each_difference_has_the_result_that_qemu_has() {
    use Outcome::{Different, Refused};
    const ROM: &str = "RAM block 0000:00:02.0/virtio-net-pci.rom";
    let cases: &[(Change, &[(&str, Outcome)])] = &[
        (
            |it| it.machine = Some("pc".to_owned()),
            &[("machine type", Refused)],
        ),
        (|it| it.uuid = Uuid([1; 16]), &[("UUID", Refused)]),
        (|it| it.ram_bytes = Some(1), &[("RAM size", Refused)]),
        (|it| it.vcpus = Some(1), &[("number of vCPUs", Refused)]),
        (|it| it.vcpus = Some(3), &[("number of vCPUs", Refused)]),
        (
            |it| it.possible_vcpus = Some(4),
            &[("number of possible vCPUs", Refused)],
        ),
        (
            |it| it.cpu_model = Some("max".to_owned()),
            &[("CPU model", Different)],
        ),
        (
            |it| it.cpu_flags = Some(vec!["fpu".to_owned()]),
            &[("CPU flags", Different)],
        ),
        (
            |it| it.memory_slots = Some(3),
            &[("number of memory slots", Refused)],
        ),
        (
            |it| it.max_ram_bytes = Some(2 << 30),
            &[("largest RAM size", Different)],
        ),
        (
            |it| memory_of(it)[0].address = 0,
            &[("memory device d0", Different)],
        ),
        (
            |it| memory_of(it)[1].address = 0,
            &[("memory device v0", Refused)],
        ),
        (
            |it| memory_of(it).clear(),
            &[
                ("memory device d0", Different),
                ("memory device v0", Different),
            ],
        ),
        (
            |it| blocks_of(it)[1] = block("0000:00:02.0/virtio-net-pci.rom", 1 << 19, 1 << 19),
            &[(ROM, Refused)],
        ),
        (|it| drop(blocks_of(it).remove(1)), &[(ROM, Refused)]),
        (
            |it| blocks_of(it).push(block("more", 1, 1)),
            &[("RAM block more", Different)],
        ),
        (
            |it| blocks_of(it)[2] = block("/rom@etc/acpi/tables", 64 << 10, 2 << 20),
            &[],
        ),
        (
            |it| blocks_of(it)[2] = block("/rom@etc/acpi/tables", 256 << 10, 256 << 10),
            &[],
        ),
        (
            |it| blocks_of(it)[2] = block("/rom@etc/acpi/tables", 4096, 4096),
            &[("RAM block /rom@etc/acpi/tables", Refused)],
        ),
        (
            |it| drop(devices_of(it).remove(0)),
            &[("device hpet", Refused)],
        ),
        (
            |it| devices_of(it).push(device("serial", "isa-serial", None, None)),
            &[("device serial", Different)],
        ),
        (
            |it| drop(devices_of(it).remove(1)),
            &[("device serial", Refused)],
        ),
        (|it| "kvm-pit".clone_into(&mut devices_of(it)[2].kind), &[]),
        (
            |it| drop(devices_of(it).remove(3)),
            &[("device pvpanic", Different)],
        ),
        (
            |it| "host/05.0".clone_into(&mut devices_of(it)[4].place),
            &[
                ("device host/02.0", Refused),
                ("device host/05.0", Different),
            ],
        ),
        (
            |it| "e1000".clone_into(&mut devices_of(it)[4].kind),
            &[("device host/02.0", Refused)],
        ),
        (|it| devices_of(it)[4].vectors = None, &[]),
        (
            |it| devices_of(it)[4].vectors = Some(2),
            &[("device host/02.0", Refused)],
        ),
        (
            |it| devices_of(it)[4].pci = Some("1af4:1041".to_owned()),
            &[("device host/02.0", Refused)],
        ),
        // Devices below a missing device are not listed again.
        (
            |it| devices_of(it).truncate(5),
            &[("device host/03.0", Refused)],
        ),
        (
            |it| devices_of(it).truncate(6),
            &[("device host/03.0/0:0:0", Refused)],
        ),
        (
            |it| it.disks = Some(Vec::new()),
            &[("disk disk0", Different)],
        ),
        (
            |it| it.disks.as_mut().unwrap()[0].bytes = 1,
            &[("disk disk0", Different)],
        ),
    ];
    for (number, (change, expected)) in cases.iter().enumerate() {
        let rows = rows(&vm(), *change);
        assert_eq!(found(&rows), *expected, "case {number}");
        let is_refused = expected.iter().any(|(_, outcome)| *outcome == Refused);
        assert_eq!(check(&rows).is_err(), is_refused, "case {number}");
        for row in rows.iter().filter(|row| row.outcome == Refused) {
            assert!(!row.remedy.is_empty(), "{row:?}");
        }
    }
}

#[test]
fn state_of_possible_vcpus_and_memory_slots_counts_only_where_the_stream_has_it() {
    let state = |state| Vm {
        has_cpu_hotplug_state: state,
        ..vm()
    };
    for (has_state, vcpus, slots) in [
        (Some(true), Outcome::Refused, Outcome::Refused),
        (Some(false), Outcome::Different, Outcome::Refused),
        (None, Outcome::Different, Outcome::Different),
    ] {
        let rows = rows(&state(has_state), |it| {
            it.possible_vcpus = Some(4);
            it.memory_slots = Some(0);
        });
        let expected = [
            ("number of possible vCPUs", vcpus),
            ("number of memory slots", slots),
        ];
        assert_eq!(found(&rows), expected, "{has_state:?}");
    }
}

#[test]
fn a_value_that_one_side_does_not_report_is_unknown_and_not_refused() {
    let rows = compare(&vm(), &Vm::default());
    // The UUID is always reported.
    let unknown = rows.iter().filter(|row| row.outcome == Outcome::Unknown);
    assert_eq!(unknown.count(), rows.len() - 1, "{rows:#?}");
    check(&rows).unwrap();
}

#[test]
fn a_refusal_has_both_values_and_the_line_to_change() {
    let rows = rows(&vm(), |it| {
        it.vcpus = Some(1);
        devices_of(it)[4].vectors = Some(2);
    });
    let error = check(&rows).unwrap_err().to_string();
    for words in [
        "number of vCPUs: the source has 2, the destination has 1 (start the destination's QEMU with -smp 2)",
        "device host/02.0: the source has virtio-net-pci, 1af4:1000, 4 vectors, the destination has virtio-net-pci, \
         1af4:1000, 2 vectors (start the destination's QEMU with -device virtio-net-pci,addr=02.0,vectors=4 on the same bus)",
        "--ignore-differences",
    ] {
        assert!(error.contains(words), "{error}");
    }
}

#[test]
fn long_lists_of_a_peer_are_cut_and_have_no_control_characters() {
    let mut there = vm();
    let devices = (0..2000).map(|at| device(&format!("host/{at}\u{1b}[2J"), "x\n", None, None));
    there.devices = Some(devices.collect());
    there.cpu_flags = Some((0..2000).map(|flag| format!("flag{flag}")).collect());
    let rows = compare(&vm(), &there);
    let error = check(&rows).unwrap_err().to_string();
    assert!(error.contains("2 more differ"), "{error}");
    let rows = rows.iter().filter(|row| row.outcome != Outcome::Same);
    assert!(rows.clone().count() <= 2 * MAX_LISTED + 3);
    for row in rows {
        let line = row.line();
        assert!(
            line.len() < 2000 && !line.contains(char::is_control),
            "{line:?}"
        );
    }
}

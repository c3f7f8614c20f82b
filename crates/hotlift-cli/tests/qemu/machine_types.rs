//! Tests machine types whose names show no version of QEMU, and types up to 2.3, whose streams contain no machine type.

use std::path::Path;
use std::sync::Arc;

use serde_json::json;

use crate::guest::{FIRMWARE_STACK_END, Guest};
use crate::hotlift::Hotlift;
use crate::need;
use crate::operator::{has_moved, machine, serve, succeeds};
use crate::vm::{Accelerator, Machine, Memory, PC_7, PC_10, Release, Vm, folder, until};

/// Microvm with the devices that the test's program uses.
pub const MICROVM: &str = "microvm,isa-serial=on,pit=on,pic=on,rtc=on";

/// Newest and oldest machine type of QEMU 7.2 without a configuration in their streams; later releases have none.
pub const WITHOUT_A_NAME: [&str; 2] = ["pc-i440fx-2.3", "pc-i440fx-1.4"];

/// Saves the guest of a machine; returns its number of writes by then.
fn save(here: &mut Vm, file: &str, options: &[&str]) -> u64 {
    let qmp = here.free_qmp();
    let save = ["save", "--qmp", &qmp, file, "--method=zstd"];
    succeeds(Hotlift::start(&[&save[..], options].concat()));
    here.count().expect("the guest has counted")
}

/// Restores it with each of `options`.
fn restores(release: Release, machine: &Machine, (here, file): (&mut Vm, &str)) -> Option<()> {
    for options in [&["--channels=4"][..], &["--channels=0"], &["--lazy"]] {
        println!("{release:?} {} {options:?}", machine.name);
        let mut there = Vm::waiting(release, machine)?;
        let qmp = there.free_qmp();
        let restore = ["restore", file, "--qmp", &qmp];
        succeeds(Hotlift::start(&[&restore[..], options].concat()));
        has_moved(here, &mut there);
    }
    Some(())
}

#[test]
fn a_qemu_reports_the_sync_points_of_its_machine_type() {
    use Release::{V7, V10, V11};
    for (release, name, expected) in [
        (V7, PC_7, true),
        (V7, MICROVM, true),
        (V10, PC_7, true),
        (V10, PC_10, false),
        (V10, MICROVM, false),
        (V11, PC_7, true),
        (V11, MICROVM, false),
    ] {
        let mut vm = need!(Vm::waiting(release, &machine(name)));
        let flushes = vm.qmp.flushes_after_each_section().expect("it answers");
        assert_eq!(flushes, Some(expected), "{release:?} {name}");
    }
}

#[test]
fn the_name_of_a_machine_type_predicts_its_sync_points() {
    for (release, name) in [
        (Release::V10, "pc-q35-8.0"),
        (Release::V10, "pc-i440fx-8.1"),
        (Release::V11, "pc-i440fx-8.0"),
        (Release::V11, "pc-q35-8.1"),
    ] {
        let mut vm = need!(Vm::waiting(release, &machine(name)));
        let machines = vm
            .qmp
            .client()
            .execute("query-machines", &json!({ "compat-props": true }))
            .expect("query-machines");
        let machines = machines.as_array().expect("a list");
        let it = machines.iter().find(|one| one["name"] == name);
        let properties = it.expect("it is there")["compat-props"].as_array();
        let flushes = properties.expect("properties").iter().any(|one| {
            one["property"] == "multifd-flush-after-each-section" && one["value"] == "on"
        });
        let flushes_reported = vm.qmp.flushes_after_each_section().expect("it answers");
        assert_eq!(flushes_reported, Some(flushes), "{release:?} {name}");
    }
}

#[test]
fn a_microvm_continues_from_its_file_in_each_qemu() {
    let files = folder();
    let file = files.path().join("vm").display().to_string();
    for release in [Release::V7, Release::V10, Release::V11] {
        let machine = machine(MICROVM);
        let mut here = need!(Vm::running(release, &machine));
        save(&mut here, &file, &[]);
        need!(restores(release, &machine, (&mut here, &file)));
    }
}

#[test]
fn a_machine_without_a_name_in_its_stream_moves_and_restores() {
    let files = folder();
    let path = |name: &str| files.path().join(name).display().to_string();
    for name in WITHOUT_A_NAME {
        let machine = Machine {
            name,
            accelerator: Accelerator::Tcg,
            memory: Memory::File,
            guest: Arc::new(Guest::Firmware),
        };
        let mut here = need!(Vm::running(Release::V7, &machine));
        // The firmware has ended its search for a disk once the ticks and its stack are all that changes.
        until(
            || "the firmware continues to write".to_owned(),
            || {
                let before = here.ram();
                here.continues_from(here.count()? + 4);
                let now = here.ram();
                (before[FIRMWARE_STACK_END..] == now[FIRMWARE_STACK_END..]).then_some(())
            },
        );
        let mut there = need!(Vm::waiting(Release::V7, &machine));
        let (serve, uri) = serve(&["--qmp", &there.free_qmp()]);
        let qmp = here.free_qmp();
        let migrate = ["migrate", "--qmp", &qmp, "--to", &uri, "--method=zstd"];
        succeeds(Hotlift::start(&migrate));
        succeeds(serve);
        has_moved(&mut here, &mut there);

        let file = path(name);
        save(&mut there, &file, &[]);
        let shown = succeeds(Hotlift::start(&["show", &file]));
        assert!(shown.contains("not in the stream"), "{shown}");
        need!(restores(Release::V7, &machine, (&mut there, &file)));

        let mapped = path("mapped");
        let mut again = need!(Vm::running(Release::V7, &machine));
        let qmp = again.free_qmp();
        let save = ["save", "--qmp", &qmp, &mapped, "--format=mapped-ram"];
        let (status, output) = Hotlift::start(&save).wait();
        assert_eq!(status.code(), Some(1), "{output:?}");
        assert!(output.join("\n").contains("up to 2.3"), "{output:?}");
        assert!(!Path::new(&mapped).exists());
        assert!(again.is_running());
    }
}

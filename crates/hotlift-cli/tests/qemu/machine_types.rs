//! Machine types whose names show no version of QEMU, and those up to 2.3, whose streams have no name.

use std::fs;
use std::path::Path;

use crate::hotlift::Hotlift;
use crate::need;
use crate::operator::{has_moved, machine, serve, succeeds};
use crate::vm::{PC_7, PC_10, Release, Vm, folder};

/// A microvm with the devices that the test's program uses.
const MICROVM: &str = "microvm,isa-serial=on,pit=on,pic=on,rtc=on";

/// The newest machine type without a configuration in its stream; QEMU 7.2 has it, later releases do not.
const PC_2_3: &str = "pc-i440fx-2.3";

/// Saves the guest of a machine; its number of writes by then.
fn save(here: &mut Vm, file: &str, options: &[&str]) -> u64 {
    let qmp = here.free_qmp();
    let save = ["save", "--qmp", &qmp, file, "--method=zstd"];
    succeeds(Hotlift::start(&[&save[..], options].concat()));
    here.count().expect("the guest has counted")
}

/// Restores it with each of `options`.
fn restores(release: Release, name: &'static str, (here, file): (&mut Vm, &str)) -> Option<()> {
    for options in [&["--channels=4"][..], &["--channels=0"], &["--lazy"]] {
        println!("{release:?} {name} {options:?}");
        let mut there = Vm::waiting(release, &machine(name))?;
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
fn a_microvm_goes_on_from_its_file_in_each_qemu() {
    let files = folder();
    let file = files.path().join("vm").display().to_string();
    for release in [Release::V7, Release::V10, Release::V11] {
        let mut here = need!(Vm::running(release, &machine(MICROVM)));
        save(&mut here, &file, &[]);
        need!(restores(release, MICROVM, (&mut here, &file)));
    }
}

#[test]
#[ignore = "the guest program prints nothing on this machine type; hotlift/tests/relay/dialects.rs has its stream"]
fn a_machine_without_a_name_in_its_stream_moves_and_goes_on_from_its_file() {
    let files = folder();
    let file = files.path().join("vm").display().to_string();
    let mut here = need!(Vm::running(Release::V7, &machine(PC_2_3)));
    let mut there = need!(Vm::waiting(Release::V7, &machine(PC_2_3)));
    let (serve, uri) = serve(&["--qmp", &there.free_qmp()]);
    let qmp = here.free_qmp();
    succeeds(Hotlift::start(&[
        "migrate",
        "--qmp",
        &qmp,
        "--to",
        &uri,
        "--method=zstd",
    ]));
    succeeds(serve);
    has_moved(&mut here, &mut there);

    save(&mut there, &file, &[]);
    let shown = succeeds(Hotlift::start(&["show", &file]));
    assert!(shown.contains("not in the stream"), "{shown}");
    need!(restores(Release::V7, PC_2_3, (&mut there, &file)));

    let mapped = files.path().join("mapped").display().to_string();
    let mut again = need!(Vm::running(Release::V7, &machine(PC_2_3)));
    let qmp = again.free_qmp();
    let save = ["save", "--qmp", &qmp, &mapped, "--format=mapped-ram"];
    let (status, said) = Hotlift::start(&save).wait();
    assert_eq!(status.code(), Some(1), "{said:?}");
    assert!(said.join("\n").contains("up to 2.3"), "{said:?}");
    assert!(!Path::new(&mapped).exists() && fs::metadata(&file).is_ok());
    assert!(again.is_running());
}

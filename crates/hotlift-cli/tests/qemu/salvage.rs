//! Tests damaged save files, and guests that run without the damaged pages.

use std::fs;
use std::path::Path;

use crate::files::{altered, machine};
use crate::hotlift::Hotlift;
use crate::need;
use crate::operator::succeeds;
use crate::vm::{Accelerator, Machine, Memory, PC_7, PC_10, Release, Vm, folder};

/// Returns a guest in a file with a flipped byte in a page, and its RAM when it was saved.
fn damaged(files: &Path, name: &'static str) -> Option<(String, Vec<u8>)> {
    let here = Vm::running(Release::V10, &machine(name, Accelerator::Kvm))?;
    let file = files.join("vm.save").display().to_string();
    succeeds(Hotlift::start(&["save", "--qmp", &here.free_qmp(), &file]));
    let whole = fs::read(&file).expect("the file");
    fs::write(&file, altered(&whole).0).expect("a damaged file");
    Some((file, here.ram()))
}

/// Checks that the pages named in `output` have changed to zero, except for at most one record of the guest.
fn are_zero(output: &str, before: &[u8], now: &[u8]) {
    let line = output.lines().find(|line| line.contains("lost: "));
    let line = line.unwrap_or_else(|| panic!("no page is named: {output}"));
    let of =
        |text: &str| usize::from_str_radix(text.trim_start_matches("0x"), 16).expect("an address");
    let places = line
        .split(", at ")
        .nth(1)
        .and_then(|places| places.split(':').next());
    for run in places.expect("pages").split(", ") {
        let (first, last) = run.split_once(" to ").unwrap_or((run, run));
        for page in (of(first)..=of(last)).step_by(4096) {
            let bytes = |ram: &[u8]| {
                ram[page..page + 4096]
                    .iter()
                    .filter(|byte| **byte != 0)
                    .count()
            };
            // A page may have only a few bytes: it was zero until the guest wrote to it.
            assert!(bytes(before) > 0, "{page:#x} was zero before");
            assert!(bytes(now) <= 16, "{page:#x} has something: {line}");
        }
    }
}

#[test]
fn damage_found_before_the_guest_runs_is_named_and_refused_or_replaced_by_zeros() {
    let files = folder();
    let (file, before) = need!(damaged(files.path(), PC_10));
    let machine = machine(PC_10, Accelerator::Kvm);
    let there = need!(Vm::waiting(Release::V10, &machine));
    let (status, output) = Hotlift::start(&["restore", &file, "--qmp", &there.free_qmp()]).wait();
    assert_eq!(status.code(), Some(1), "{output:?}");
    let output = output.join("\n");
    assert!(
        output.contains("a block of pages at byte") && output.contains("--salvage"),
        "{output}"
    );
    assert_eq!(there.count(), None, "the guest has run");

    let mut there = need!(Vm::waiting(Release::V10, &machine));
    let output = succeeds(Hotlift::start(&[
        "restore",
        "--salvage",
        &file,
        "--qmp",
        &there.free_qmp(),
    ]));
    there.reaches("completed");
    are_zero(&output, &before, &there.ram());
}

#[test]
fn damage_found_while_the_guest_runs_pauses_it_until_it_is_continued() {
    let files = folder();
    let (file, before) = need!(damaged(files.path(), PC_7));
    for (release, memory) in [
        (Release::V10, Memory::File),
        (Release::V7, Memory::File),
        (Release::V11, Memory::File),
        (Release::V11, Memory::HugePages),
    ] {
        let machine = Machine {
            memory,
            ..machine(PC_7, Accelerator::Kvm)
        };
        let mut there = need!(Vm::waiting(release, &machine));
        let qmp = there.free_qmp();
        let lazy = ["restore", "--lazy", &file, "--qmp", &qmp];
        let (status, output) = Hotlift::start(&lazy).wait();
        assert_eq!(status.code(), Some(3), "{output:?}");
        let output = output.join("\n");
        assert!(
            output.contains("a block of pages at byte") && output.contains("--salvage"),
            "{output}"
        );
        there.wait_for_status("postcopy-paused");

        let output = succeeds(Hotlift::start(
            &[&lazy[..], &["--resume", "--salvage"]].concat(),
        ));
        there.reaches("completed");
        are_zero(&output, &before, &there.ram());

        // Again from the beginning.
        let mut there = need!(Vm::waiting(release, &machine));
        let lazy = [
            "restore",
            "--lazy",
            "--salvage",
            &file,
            "--qmp",
            &there.free_qmp(),
        ];
        let output = succeeds(Hotlift::start(&lazy));
        there.reaches("completed");
        are_zero(&output, &before, &there.ram());
    }
}

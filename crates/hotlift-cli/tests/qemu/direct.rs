//! Tests migrations from QEMU to QEMU without relays, which validates the test harness.

use crate::guest::Guest;
use crate::need;
use crate::route::{Multifd, Route, Side};
use crate::vm::{Accelerator, Machine, Memory, PC_7, PC_10, Release, Vm, until};

fn straight(multifd: Multifd, live: bool) -> Route {
    Route {
        source: Side::new(multifd),
        destination: Side::new(multifd),
        relays: None,
        live,
    }
}

fn machine(name: &'static str, accelerator: Accelerator) -> Machine {
    Machine {
        name,
        accelerator,
        memory: Memory::File,
        guest: Guest::program(),
    }
}

#[test]
fn a_counting_program_moves_from_qemu_to_qemu_and_continues() {
    use Accelerator::{Kvm, Tcg};
    use Release::{V7, V10};
    for (from, to, name, accelerator, multifd, return_path, live) in [
        (V7, V7, PC_7, Kvm, Multifd::Off, false, true),
        (V10, V10, PC_10, Kvm, Multifd::Channels(4), true, true),
        (V10, V7, PC_7, Kvm, Multifd::Channels(1), true, true),
        (V7, V10, PC_7, Tcg, Multifd::Channels(4), false, false),
    ] {
        let mut route = straight(multifd, live);
        if return_path {
            route.source = route.source.with("return-path");
        }
        let here = need!(Vm::running(from, &machine(name, accelerator)));
        let moved = need!(route.take(here, to));
        assert!(moved.info.ram.is_some_and(|ram| ram.normal > 0));
    }
}

/// The test changes guest memory without QEMU's knowledge, like a lost page.
#[test]
fn a_stale_page_is_detected() {
    let mut vm = need!(Vm::running(Release::V10, &machine(PC_10, Accelerator::Kvm)));
    let before = vm.ram();
    let count = vm.prove();
    vm.qmp.cont().expect("cont");
    vm.continues_from(count + 10_000);
    vm.qmp.stop().expect("stop");
    let now = vm.ram();
    // The last page, which the program rarely writes.
    let written = (0..now.len() / 4096)
        .rev()
        .find(|page| now[page * 4096..][..4096] != before[page * 4096..][..4096]);
    let page = written.expect("a page that was written");
    let file = std::fs::OpenOptions::new()
        .write(true)
        .open(vm.path("ram"))
        .expect("RAM");
    std::os::unix::fs::FileExt::write_all_at(
        &file,
        &before[page * 4096..][..4096],
        page as u64 * 4096,
    )
    .expect("a page");
    let guest = vm.machine.guest.clone();
    let why = guest.prove(&mut vm).expect_err("a lost page was not found");
    assert!(why.contains("RAM differs at"), "{why}");

    // The guest also finds it when it reaches that page.
    vm.qmp.cont().expect("cont");
    until(
        || "the guest does not find it".to_owned(),
        || {
            let console = vm.console();
            console
                .lines()
                .any(|line| line.contains("errors=") && !line.ends_with("errors=0"))
                .then_some(())
        },
    );
}

#[test]
#[ignore = "linux_moves has more of it, through relays; this shows whose fault it is if that fails"]
fn a_linux_moves_from_qemu_to_qemu_and_continues() {
    let machine = Machine {
        name: PC_7,
        accelerator: Accelerator::Tcg,
        memory: Memory::File,
        guest: need!(Guest::linux()),
    };
    let here = need!(Vm::running(Release::V10, &machine));
    let moved = need!(straight(Multifd::Channels(2), true).take(here, Release::V10));
    let moved = need!(straight(Multifd::Off, true).take(moved.there, Release::V7));
    need!(straight(Multifd::Off, false).take(moved.there, Release::V7));
}

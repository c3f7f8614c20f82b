//! Tests machines with more device state than a relay may keep in memory.

use serde_json::json;

use crate::hotlift::Hotlift;
use crate::need;
use crate::operator::{has_moved, machine, serve, succeeds};
use crate::route::{Multifd, RelayOptions, Relays, Side};
use crate::vm::{PC_7, PC_10, Release, Vm, folder};

/// More than the default of `--memory-limit`.
const MIBS: usize = 80;

/// Minimum that a relay accepts.
const LIMIT: &str = "--memory-limit=1M";

/// Returns sound cards with 1 MiB of memory each, all of it device state.
pub fn large_devices() -> Vec<String> {
    let cards = (0..MIBS).flat_map(|_| ["-device", "gus,audiodev=sound"]);
    let line = ["-audiodev", "none,id=sound"].into_iter().chain(cards);
    line.map(str::to_owned).collect()
}

fn running(release: Release, name: &'static str) -> Option<Vm> {
    Vm::running_with(release, &machine(name), &large_devices())
}

fn waiting(release: Release, name: &'static str) -> Option<Vm> {
    Vm::waiting_with(release, &machine(name), &large_devices())
}

#[test]
fn large_devices_go_through_migrate_and_serve_within_the_memory_limit() {
    for (from, to, channels) in [
        (Release::V7, Release::V10, "--channels=2"),
        (Release::V10, Release::V7, "--multifd=off"),
    ] {
        let mut here = need!(running(from, PC_7));
        let mut there = need!(waiting(to, PC_7));
        let (serve, uri) = serve(&["--qmp", &there.free_qmp(), LIMIT]);
        let qmp = here.free_qmp();
        let migrate = ["migrate", "--qmp", &qmp, "--to", &uri, LIMIT, channels];
        succeeds(Hotlift::start(&migrate));
        succeeds(serve);
        has_moved(&mut here, &mut there);
    }
}

#[test]
fn large_devices_are_saved_and_restored_within_the_memory_limit() {
    let files = folder();
    for (format, ways) in [("hotlift", 2), ("mapped-ram", 1)] {
        let mut here = need!(running(Release::V10, PC_10));
        let file = files.path().join(format).display().to_string();
        let format = format!("--format={format}");
        let qmp = here.free_qmp();
        succeeds(Hotlift::start(&[
            "save", "--qmp", &qmp, &file, &format, LIMIT,
        ]));
        for lazy in [&[][..], &["--lazy"]].into_iter().take(ways) {
            let mut there = need!(waiting(Release::V10, PC_10));
            let qmp = there.free_qmp();
            let restore = ["restore", &file, "--qmp", &qmp, LIMIT];
            succeeds(Hotlift::start(&[&restore[..], lazy].concat()));
            has_moved(&mut here, &mut there);
        }
    }
}

#[test]
fn large_devices_switch_over_in_postcopy_within_the_memory_limit() {
    let mut here = need!(running(Release::V10, PC_10));
    let mut there = need!(waiting(Release::V10, PC_10));
    let slow = json!({ "max-bandwidth": 1 << 20 });
    let side = Side::new(Multifd::Off).with("return-path");
    let side = side.with("postcopy-ram").parameters(slow);
    side.apply(&mut here);
    side.apply(&mut there);
    let incoming = there.uri("incoming");
    let listens = there.qmp.migrate_incoming(&incoming, true);
    listens.expect("migrate-incoming");
    let mut options = RelayOptions::new("zstd", Multifd::Channels(2), Multifd::Off);
    for flags in [Some(&mut options.source), options.destination.as_mut()] {
        flags.expect("two relays").push(LIMIT.to_owned());
    }
    let relays = Relays::start(&here, &incoming, &options);
    here.qmp.migrate(relays.uri()).expect("migrate");
    here.reaches("active");
    here.start_postcopy();
    there.wait_for_status("postcopy-active");
    let fast = json!({ "max-bandwidth": 1_u64 << 40, "max-postcopy-bandwidth": 1_u64 << 40 });
    here.qmp.set_parameters(&fast).expect("parameters");
    here.reaches("completed");
    relays.finish();
    has_moved(&mut here, &mut there);
}

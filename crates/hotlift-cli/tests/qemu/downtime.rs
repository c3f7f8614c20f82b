//! Tests the downtime limit that Hotlift sets in QEMU during a migration: it begins low, increases as far as needed,
//! and is restored.

use std::sync::Arc;
use std::time::Duration;

use rustix::process::Signal;
use serde_json::json;

use crate::guest::Guest;
use crate::hotlift::{Hotlift, Running};
use crate::need;
use crate::operator::{has_moved, machine, serve, succeeds};
use crate::vm::{Machine, PC_7, PC_10, PC_11, Release, Vm, until};

/// The operator's limit: QEMU's default.
const MOST: u64 = 300;

/// The first limit.
const LOW: u64 = MOST / 32;

fn limit(vm: &mut Vm) -> u64 {
    let parameters = vm.qmp.query_parameters().expect("parameters");
    parameters["downtime-limit"].as_u64().expect("a limit")
}

/// Starts `migrate` with these options to a `serve`, and waits until the first round sends pages.
fn moves(here: &mut Vm, there: &Vm, options: &[&str]) -> (Running, Running) {
    let (serve, uri) = serve(&["--qmp", &there.free_qmp()]);
    let qmp = here.free_qmp();
    let migrate = [&["migrate", "--qmp", &qmp, "--to", &uri][..], options].concat();
    let migrate = Hotlift::start(&migrate);
    until(
        || "no pages are sent".to_owned(),
        || {
            let info = here.migration();
            info.ram.is_some_and(|ram| ram.normal > 200).then_some(())
        },
    );
    (serve, migrate)
}

#[test]
fn the_limit_starts_low_for_a_guest_that_writes_little_and_is_restored() {
    for (release, name) in [
        (Release::V7, PC_7),
        (Release::V10, PC_10),
        (Release::V11, PC_11),
    ] {
        println!("{release:?}");
        let Some(mut here) = Vm::running(release, &machine(name)) else {
            continue;
        };
        let mut there = need!(Vm::waiting(release, &machine(name)));
        // 64 MiB in two seconds, of which the guest dirties 2 MiB a second.
        let (serve, migrate) = moves(&mut here, &there, &["--max-bandwidth=32M"]);
        assert_eq!(limit(&mut here), LOW);
        let output = succeeds(migrate);
        succeeds(serve);
        assert!(
            output.contains("9 of 300 ms, low while rounds get shorter"),
            "{output}"
        );
        assert_eq!(limit(&mut here), MOST);
        has_moved(&mut here, &mut there);
    }
}

#[test]
fn without_the_ramp_the_limit_is_the_operators_from_the_start() {
    let mut here = need!(Vm::running(Release::V10, &machine(PC_10)));
    let there = need!(Vm::waiting(Release::V10, &machine(PC_10)));
    let options = [
        "--max-bandwidth=32M",
        "--downtime-limit=200",
        "--downtime-ramp=off",
    ];
    let (serve, migrate) = moves(&mut here, &there, &options);
    assert_eq!(limit(&mut here), 200);
    let output = succeeds(migrate);
    succeeds(serve);
    assert!(!output.contains("of 200 ms"), "{output}");
    assert_eq!(limit(&mut here), MOST);
}

#[test]
fn the_limit_rises_to_the_operators_for_a_guest_that_writes_faster_than_the_link() {
    let guest = Arc::new(Guest::with(32 << 20, 8 << 20, 20_000));
    let machine = Machine {
        guest,
        ..machine(PC_10)
    };
    let mut here = need!(Vm::running(Release::V10, &machine));
    let there = need!(Vm::waiting(Release::V10, &machine));
    let (_serve, mut migrate) = moves(&mut here, &there, &["--max-bandwidth=2M"]);
    assert_eq!(limit(&mut here), LOW);
    migrate.wait_for("300 of 300 ms, raised because the guest writes as fast");
    assert_eq!(limit(&mut here), MOST);
    migrate.signal(Signal::INT);
    let (status, output) = migrate.wait();
    assert!(!status.success(), "{output:?}");
    assert!(here.is_running());
    assert_eq!(limit(&mut here), MOST);
}

#[test]
fn a_limit_that_another_client_sets_during_the_migration_stays() {
    let mut here = need!(Vm::running(Release::V10, &machine(PC_10)));
    let there = need!(Vm::waiting(Release::V10, &machine(PC_10)));
    let (serve, mut migrate) = moves(&mut here, &there, &["--max-bandwidth=8M"]);
    // A value that the command itself might set later.
    let own = json!({ "downtime-limit": 75 });
    here.qmp.set_parameters(&own).expect("a limit");
    migrate.wait_for("as another client has set it");
    std::thread::sleep(Duration::from_secs(2));
    assert_eq!(limit(&mut here), 75);
    succeeds(migrate);
    succeeds(serve);
    assert_eq!(limit(&mut here), 75);
}

#[test]
fn a_limit_of_a_killed_migrate_is_restored_by_the_next_command() {
    let mut here = need!(Vm::running(Release::V10, &machine(PC_10)));
    let qmp = here.free_qmp();
    for raised in [LOW, 37, MOST] {
        let there = need!(Vm::waiting(Release::V10, &machine(PC_10)));
        let (_serve, migrate) = moves(&mut here, &there, &["--max-bandwidth=2M"]);
        migrate.signal(Signal::KILL);
        drop(migrate);
        until(
            || "the migration does not end".to_owned(),
            || here.migration().has_failed().then_some(()),
        );
        assert_eq!(limit(&mut here), LOW);
        // As if it had been killed later.
        let later = json!({ "downtime-limit": raised });
        here.qmp.set_parameters(&later).expect("a limit");
        let next = ["migrate", "--qmp", &qmp, "--to", "tcp:127.0.0.1:9"];
        let (status, output) = Hotlift::start(&next).wait();
        let output = output.join("\n");
        assert!(
            !status.success() && output.contains("downtime-limit 300"),
            "{output}"
        );
        assert_eq!(limit(&mut here), MOST);
    }
}

//! Postcopy: the relays do not understand it, and carry it untouched. The guest is switched over with
//! most of its pages still at the source, and fetches each that it touches through the relays.

use serde_json::{Value, json};

use crate::guest::Guest;
use crate::need;
use crate::route::{Multifd, RelayOptions, Relays, Side};
use crate::vm::{Accelerator, Machine, PC_10, Release, Vm};

/// So slow that precopy is far from its end when the guest is switched over, and postcopy from its own
/// until it is let go: of 64 MiB each sends 1 a second. What the guest asks for comes at once, but half
/// of its RAM it never touches.
const SLOW: u64 = 1 << 20;
const FAST: u64 = 1 << 40;

#[test]
fn a_guest_in_postcopy_fetches_its_pages_through_the_relays() {
    for preempt in [false, true] {
        println!("postcopy, preempt: {preempt}");
        let machine = Machine {
            name: PC_10,
            accelerator: Accelerator::Kvm,
            guest: Guest::program(),
        };
        let mut here = need!(Vm::running(Release::V10, &machine));
        let mut there = need!(Vm::waiting(Release::V10, &machine));
        for vm in [&mut here, &mut there] {
            let mut side = Side::new(Multifd::Off)
                .with("return-path")
                .with("postcopy-ram")
                .parameters(json!({ "max-bandwidth": SLOW, "max-postcopy-bandwidth": SLOW }));
            if preempt {
                side = side.with("postcopy-preempt");
            }
            side.apply(vm);
        }
        let incoming = there.uri("incoming");
        there
            .qmp
            .migrate_incoming(&incoming, true)
            .expect("migrate-incoming");
        let options = RelayOptions::new("zstd", Multifd::Channels(2), Multifd::Off);
        let relays = Relays::start(&here, &incoming, &options);
        here.qmp.migrate(relays.uri()).expect("migrate");
        here.reaches("active");
        let before = here.count().expect("the guest has counted");
        here.qmp
            .client()
            .execute("migrate-start-postcopy", &Value::Null)
            .expect("migrate-start-postcopy");
        there.says("postcopy-active");
        // It goes on there while its pages are here.
        there.counts_on_from(before);
        here.qmp
            .set_parameters(&json!({ "max-bandwidth": FAST, "max-postcopy-bandwidth": FAST }))
            .expect("parameters");
        here.reaches("completed");
        there.reaches("completed");
        assert!(!here.is_running(), "the source runs, too");
        for report in relays.finish() {
            let why = report["passed_through"].as_str().expect("a reason");
            assert!(why.contains("postcopy"), "{report}");
        }
        let proven = there.prove();
        there.qmp.cont().expect("cont");
        there.counts_on_from(proven);
    }
}

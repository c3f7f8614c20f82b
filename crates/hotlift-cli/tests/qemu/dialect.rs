//! Tests QEMU's own compression on either side of a relay.

use serde_json::json;

use crate::guest::Guest;
use crate::need;
use crate::route::{Multifd, RelayOptions, Route, Side};
use crate::vm::{Accelerator, Machine, Memory, PC_7, Release, Vm};

const CHANNELS: Multifd = Multifd::Channels(2);

/// QEMU, its `multifd-compression`, and the method between relays.
pub const COMPRESSED_BY_QEMU: [(Release, &str, &str); 5] = [
    (Release::V10, "zlib", "zstd"),
    (Release::V10, "zstd", "none"),
    (Release::V7, "zlib", "zlib"),
    (Release::V7, "zstd", "zstd"),
    (Release::V11, "zstd", "zlib"),
];

/// QEMU, its `multifd-compression`, and true for two relays in between, false for one.
pub const COMPRESSED_FOR_QEMU: [(Release, &str, bool); 5] = [
    (Release::V10, "zlib", false),
    (Release::V10, "zstd", true),
    (Release::V7, "zlib", true),
    (Release::V7, "zstd", false),
    (Release::V11, "zstd", false),
];

/// Capabilities of a 7.2 source without multifd.
pub const OLDER_RECORDS: [&str; 2] = ["xbzrle", "compress"];

/// Settings for a 7.2 that reads records of capability `compress`: true if the source QEMU writes them, true with relays in
/// between, and the number of threads of the last writer.
pub const COMPRESS_FOR_QEMU: [(bool, bool, u8); 3] =
    [(true, true, 8), (false, true, 1), (false, false, 8)];

fn machine(name: &'static str) -> Machine {
    Machine {
        name,
        accelerator: Accelerator::Kvm,
        memory: Memory::File,
        guest: Guest::program(),
    }
}

#[test]
fn pages_compressed_by_qemu_are_read_and_compressed_again() {
    for (from, theirs, ours) in COMPRESSED_BY_QEMU {
        println!("{from:?} {theirs} -> {ours}");
        let route = Route {
            source: Side::new(CHANNELS).method(theirs).with("return-path"),
            destination: Side::new(CHANNELS),
            relays: Some(RelayOptions::new(ours, CHANNELS, CHANNELS)),
            live: true,
        };
        let moved = need!(route.take(need!(Vm::running(from, &machine(from.machine()))), from));
        let reports = moved.reports.expect("reports");
        let read = reports[0]["received_bytes"].as_u64().expect("a number");
        let pages = reports[0]["normal_pages"].as_u64().expect("a number");
        assert!(read < pages * 4096, "QEMU has not compressed: {reports:?}");
    }
}

#[test]
fn qemu_reads_pages_that_a_relay_has_compressed_for_it() {
    for (to, method, two) in COMPRESSED_FOR_QEMU {
        println!("{method} -> {to:?}, two relays: {two}");
        let mut relays = RelayOptions::alone(method, CHANNELS);
        if two {
            relays = RelayOptions::new("zstd", CHANNELS, CHANNELS);
            let options = relays.destination.as_mut().expect("two relays");
            options.push(format!("--multifd-compression={method}"));
        }
        let route = Route {
            source: Side::new(Multifd::Channels(4)).with("return-path"),
            destination: Side::new(CHANNELS).method(method),
            relays: Some(relays),
            live: true,
        };
        let moved = need!(route.take(need!(Vm::running(to, &machine(to.machine()))), to));
        let reports = moved.reports.expect("reports");
        assert_eq!(reports.last().expect("a report")["method"], method);
    }
}

/// Returns parameters of a compressing QEMU: its threads are slow, and the guest must not overtake them.
fn slow_threads() -> serde_json::Value {
    json!({ "downtime-limit": 3000, "compress-threads": 2 })
}

/// A relay with `compress` sends to a QEMU whose threads exist if it has the capability.
#[test]
fn qemu_reads_the_compressed_pages_that_a_relay_has_made_for_it() {
    for (by_qemu, two, threads) in COMPRESS_FOR_QEMU {
        println!("compressed by QEMU: {by_qemu}, two relays: {two}, {threads} threads");
        let ours = [
            "--compress=on".to_owned(),
            format!("--compress-threads={threads}"),
        ];
        let mut relays = RelayOptions::new("none", Multifd::Off, Multifd::Off);
        if two {
            let options = relays.destination.as_mut().expect("two relays");
            options.extend(ours);
            relays.source.push("--compress=on".to_owned());
        } else {
            relays.destination = None;
            relays.source.extend(ours);
        }
        relays.configure_uuid(Multifd::Off, Multifd::Off);
        let mut source = Side::new(Multifd::Off).with("return-path");
        if by_qemu {
            source = source.with("compress").parameters(slow_threads());
        }
        let route = Route {
            source,
            destination: Side::new(Multifd::Off).with("compress"),
            relays: Some(relays),
            live: true,
        };
        let here = need!(Vm::running(Release::V7, &machine(PC_7)));
        let moved = need!(route.take(here, Release::V7));
        for report in moved.reports.expect("reports") {
            assert_eq!(report["method"], "compress", "{report}");
            let sent = report["sent_bytes"].as_u64().expect("a number");
            let pages = report["normal_pages"].as_u64().expect("a number");
            assert!(sent < pages * 4096, "{report}");
            assert_eq!(report["passed_through"], serde_json::Value::Null);
        }
    }
}

/// XBZRLE deltas and pages of the old capability `compress` arrive on the main channel.
#[test]
fn the_records_of_older_sources_are_read() {
    for capability in OLDER_RECORDS {
        let (parameters, sent) = if capability == "xbzrle" {
            // Slow, so that some rounds resend pages.
            let slow = json!({ "max-bandwidth": 48 << 20, "downtime-limit": 20 });
            (slow, "xbzrle-cache")
        } else {
            (slow_threads(), "compression")
        };
        for destination in [Multifd::Off, CHANNELS] {
            println!("{capability} -> {destination}");
            let mut relays = RelayOptions::new("zstd", CHANNELS, destination);
            relays.configure_uuid(Multifd::Off, CHANNELS);
            let route = Route {
                source: Side::new(Multifd::Off)
                    .with(capability)
                    .parameters(parameters.clone()),
                destination: Side::new(destination),
                relays: Some(relays),
                live: true,
            };
            let machine = Machine {
                guest: Guest::program_that_keeps_its_rate(),
                ..machine(PC_7)
            };
            let here = need!(Vm::running(Release::V7, &machine));
            let moved = need!(route.take(here, Release::V7));
            let figures = &moved.figures[sent];
            assert!(
                figures["pages"].as_u64() > Some(0),
                "no such page was sent: {}",
                moved.figures
            );
        }
    }
}

//! Tests a machine that migrates back and forth through the same relays.

use std::fs;

use rustix::process::Signal;

use crate::guest::Guest;
use crate::hotlift::Running;
use crate::need;
use crate::route::{Multifd, RelayOptions, Side, relay};
use crate::vm::{Accelerator, Machine, Memory, PC_10, Release, Vm, folder};

const TIMES: usize = 50;

/// Number of migrations after which the relays' buffers, allocator arenas and codecs are allocated.
const WARM: usize = 10;

/// Allowed difference of a relay's memory between two equal states: an allocator keeps memory freed by another thread. A leak
/// of one page per migration would be larger.
const SLACK: u64 = 16 << 20;

const CHANNELS: Multifd = Multifd::Channels(2);

/// Returns descriptors, threads, and bytes of memory of a process.
pub fn used(relay: &Running) -> (usize, usize, u64) {
    let process = format!("/proc/{}", relay.pid());
    let count = |what: &str| {
        fs::read_dir(format!("{process}/{what}"))
            .expect("a process")
            .count()
    };
    let statm = fs::read_to_string(format!("{process}/statm")).expect("a process");
    let pages: u64 = statm
        .split(' ')
        .nth(1)
        .and_then(|pages| pages.parse().ok())
        .expect("resident pages");
    (count("fd"), count("task"), pages * 4096)
}

#[test]
fn fifty_migrations_through_the_same_relays_lose_no_write_and_leak_nothing() {
    let folder = folder();
    let uri = |name: &str| format!("unix:{}", folder.path().join(name).display());
    let machine = Machine {
        name: PC_10,
        accelerator: Accelerator::Kvm,
        memory: Memory::File,
        guest: std::sync::Arc::new(Guest::with(40 << 20, 16 << 20, 500)),
    };
    let mut here = need!(Vm::running(Release::V10, &machine));
    let forever = |mut options: Vec<String>| {
        options.extend(["--forever", "--quiet"].map(str::to_owned));
        options
    };
    // There and back, each with its own pair.
    let mut ways = Vec::new();
    for (way, method) in [("there", "zstd"), ("back", "zlib")] {
        let mut options = RelayOptions::new(method, CHANNELS, CHANNELS);
        options.configure_uuid(Multifd::Off, CHANNELS);
        let (outgoing, incoming) = (uri(&format!("{way}.out")), uri(&format!("{way}.in")));
        let theirs = forever(options.destination.expect("two relays"));
        let (destination, between) = relay("destination", "tcp:127.0.0.1:0", &incoming, &theirs);
        let (source, _) = relay("source", &outgoing, &between, &forever(options.source));
        ways.push((outgoing, incoming, [source, destination]));
    }

    let mut warm = Vec::new();
    for time in 0..TIMES {
        let (outgoing, incoming, relays) = &mut ways[time % 2];
        let mut there = need!(Vm::waiting(Release::V10, &machine));
        // With and without multifd, so that the relays also change modes.
        let multifd = if time % 4 < 2 { CHANNELS } else { Multifd::Off };
        Side::new(multifd).with("return-path").apply(&mut here);
        Side::new(CHANNELS).apply(&mut there);
        there
            .qmp
            .migrate_incoming(incoming, true)
            .expect("migrate-incoming");
        here.qmp.migrate(outgoing).expect("migrate");
        here.reaches("completed");
        there.reaches("completed");
        for relay in relays {
            // Its report.
            relay.wait_for("{\"");
        }
        let before = here.count().expect("the guest has counted");
        let proven = there.prove();
        assert!(
            proven >= before,
            "after {time}: {proven} writes, {before} before"
        );
        there.qmp.cont().expect("cont");
        here = there;
        // It prints its count before it continues.
        here.continues_from(proven);
        let all = ways.iter().flat_map(|(.., relays)| relays);
        if time + 1 == WARM {
            warm = all.map(used).collect();
        } else if time + 1 == TIMES {
            for (before, relay) in warm.iter().zip(all) {
                let now = used(relay);
                println!("descriptors, threads, bytes of memory: {before:?}, then {now:?}");
                assert_eq!((now.0, now.1), (before.0, before.1), "descriptors, threads");
                assert!(now.2 < before.2 + SLACK, "memory");
            }
        }
    }
    for relay in ways.into_iter().flat_map(|(.., relays)| relays) {
        relay.signal(Signal::INT);
        let (status, output) = relay.wait();
        assert_eq!(status.code(), Some(130), "{}", output.join("\n"));
    }
    assert_eq!(
        fs::read_dir(folder.path())
            .expect("the folder")
            .flatten()
            .filter(|entry| !entry.file_name().to_string_lossy().ends_with(".in"))
            .count(),
        0,
        "a relay has left its socket"
    );
}

//! Tests libvirt domains that migrate between two hosts. Needs root, KVM and libvirt.
//!
//! | file | subject |
//! |---|---|
//! | `plain` | libvirt alone: validates the hosts of these tests |
//! | `agents` | the agents of both hosts |
//! | `carried` | every kind of libvirt migration, through the agents |
//! | `devices` | domains with memory and devices of each kind |
//! | `faults` | processes killed, links cut, migrations aborted, endpoints missing |
//! | `by_domain` | `hotlift migrate --domain` |
//! | `drain` | `hotlift drain` |
//! | `over_ssh` | all of these to a `qemu+ssh` URI |

#![allow(
    clippy::print_stdout,
    clippy::print_stderr,
    reason = "a test prints its progress"
)]

mod agents;
mod by_domain;
mod carried;
mod devices;
mod drain;
mod faults;
mod over_ssh;
mod plain;

use std::sync::{Arc, OnceLock};
use std::time::{Duration, Instant};

use hotlift_testkit::libvirt::{Disk, Domain, Host, Hosts, is_possible};
use hotlift_testkit::namespace::End;
use hotlift_testkit::process::Process;
use hotlift_testkit::program::Program;

/// Returns the program in 64 MiB; it writes to 16 MiB of them.
fn program() -> Arc<Program> {
    static SHARED: OnceLock<Arc<Program>> = OnceLock::new();
    let program = || Arc::new(Program::new(64 << 20, 16 << 20, 500).expect("a program"));
    Arc::clone(SHARED.get_or_init(program))
}

/// Returns two hosts, or skips the test.
fn hosts() -> Option<Hosts> {
    is_possible().then(|| Hosts::new().expect("two hosts"))
}

fn domain(hosts: &Hosts, name: &str) -> Domain {
    let domain = hosts.domain(name, &program(), Disk::Shared);
    domain.expect("a domain that runs")
}

/// Option of `virsh migrate` for disks on a file system that libvirt does not know as shared.
const UNSAFE: &str = "--unsafe";

/// Runs `virsh migrate --live` from the domain's host to the other.
fn migrate(hosts: &Hosts, from: End, domain: &Domain, options: &[&str]) -> Result<(), String> {
    let uri = hosts.host(other(from)).uri();
    let mut line = vec!["migrate", "--live", &domain.name, &uri];
    line.extend(options);
    let moved = hosts.host(from).virsh(&line);
    moved.map(drop).map_err(|error| error.to_string())
}

/// The built command.
const HOTLIFT: &str = env!("CARGO_BIN_EXE_hotlift");

/// Far above the duration of any step here on a busy machine.
const DEADLINE: Duration = Duration::from_secs(120);

/// Poll interval.
const POLL_INTERVAL: Duration = Duration::from_millis(50);

/// Polls `look` until it returns a value.
fn until<T>(what: &str, mut look: impl FnMut() -> Option<T>) -> T {
    until_ok(what, || look().ok_or("it is not so"))
}

/// Repeats `attempt` until it succeeds.
fn until_ok<T, E: std::fmt::Debug>(what: &str, mut attempt: impl FnMut() -> Result<T, E>) -> T {
    let deadline = Instant::now() + DEADLINE;
    loop {
        match attempt() {
            Ok(found) => return found,
            Err(error) => assert!(Instant::now() < deadline, "{what}: {error:?}"),
        }
        std::thread::sleep(POLL_INTERVAL);
    }
}

/// Link rate at which the guests of these tests do not move at once, compressed or not.
const SLOW_MBITS: u32 = 40;

/// The downtime limit of a domain on a host, in milliseconds.
fn downtime_limit(host: &Host, domain: &Domain) -> u64 {
    let output = host.virsh(&["migrate-getmaxdowntime", &domain.name]);
    output.expect("a limit").parse().expect("a number")
}

/// Default downtime limit, and the first limit of the ramp to it.
const MOST: u64 = 300;
const LOW: u64 = MOST / 32;

/// Link rate at which the guests of these tests move in seconds, uncompressed.
const MEDIUM_MBITS: u32 = 100;

/// Waits until the downtime limit of a domain at the source is low.
fn is_low(hosts: &Hosts, domain: &Domain) {
    until("the limit is low", || {
        (downtime_limit(&hosts.source, domain) == LOW).then_some(())
    });
}

/// Waits until libvirt reports a running migration of a domain.
fn is_under_way(host: &Host, domain: &Domain) {
    until("a migration is under way", || {
        let output = host.virsh(&["domjobinfo", &domain.name]).ok()?;
        output.contains("Memory remaining").then_some(())
    });
}

/// Returns the other end.
fn other(end: End) -> End {
    match end {
        End::Source => End::Destination,
        End::Destination => End::Source,
    }
}

/// Starts `virsh migrate --live` from the source.
fn begin(hosts: &Hosts, domain: &Domain, options: &[&str]) -> Process {
    let uri = hosts.destination.uri();
    let mut line = vec!["migrate", "--live", UNSAFE, &domain.name, &uri];
    line.extend(options);
    hosts.source.start("virsh", &line).expect("virsh starts")
}

/// Waits for the end of a migration from [`begin`]; returns its error.
fn outcome(mut migration: Process) -> Result<(), String> {
    let status = migration.wait(DEADLINE).expect("it ends");
    migration.read_last_output();
    match status.success() {
        true => Ok(()),
        false => Err(migration.output_lines().join("\n")),
    }
}

/// Verifies that the only guest runs at `end` and has lost no write.
fn is_at(hosts: &Hosts, end: End, domain: &Domain) {
    let (found, writes) = hosts.prove(domain).expect("one guest, and its memory");
    assert_eq!(found, end, "{} after {writes} writes", domain.name);
}

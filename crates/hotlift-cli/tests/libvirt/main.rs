//! Domains of libvirt that move between two hosts. Needs root, KVM and libvirt.
//!
//! | file | what |
//! |---|---|
//! | `plain` | libvirt alone: what the hosts of these tests are worth |
//! | `agents` | the agents of both hosts |
//! | `carried` | every way of libvirt's, through the agents |
//! | `devices` | domains with memory and devices of each kind |
//! | `faults` | what is killed, cut, aborted, or not there |
//! | `by_domain` | `hotlift migrate --domain` |
//! | `drain` | `hotlift drain` |
//! | `over_ssh` | all of these to a `qemu+ssh` URI |

#![allow(
    clippy::print_stdout,
    clippy::print_stderr,
    reason = "a test says what it does"
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

/// The program in 64 MiB, 16 MiB of it written to.
fn program() -> Arc<Program> {
    static SHARED: OnceLock<Arc<Program>> = OnceLock::new();
    let program = || Arc::new(Program::new(64 << 20, 16 << 20, 500).expect("a program"));
    Arc::clone(SHARED.get_or_init(program))
}

/// Two hosts, or a skip.
fn hosts() -> Option<Hosts> {
    is_possible().then(|| Hosts::new().expect("two hosts"))
}

fn domain(hosts: &Hosts, name: &str) -> Domain {
    let domain = hosts.domain(name, &program(), Disk::Shared);
    domain.expect("a domain that runs")
}

/// Options of `virsh migrate` for disks on a file system that libvirt does not know as shared.
const UNSAFE: &str = "--unsafe";

/// `virsh migrate --live` from where the domain is to the other host.
fn migrate(hosts: &Hosts, from: End, domain: &Domain, options: &[&str]) -> Result<(), String> {
    let uri = hosts.host(other(from)).uri();
    let mut line = vec!["migrate", "--live", &domain.name, &uri];
    line.extend(options);
    let moved = hosts.host(from).virsh(&line);
    moved.map(drop).map_err(|error| error.to_string())
}

/// The command, as built.
const HOTLIFT: &str = env!("CARGO_BIN_EXE_hotlift");

/// Far beyond what anything here takes on a machine that does other things besides.
const DEADLINE: Duration = Duration::from_secs(120);

/// Between two looks.
const LOOK: Duration = Duration::from_millis(50);

/// Looks until `look` finds something.
fn until<T>(what: &str, mut look: impl FnMut() -> Option<T>) -> T {
    until_ok(what, || look().ok_or("it is not so"))
}

/// Tries until `attempt` comes to something.
fn until_ok<T, E: std::fmt::Debug>(what: &str, mut attempt: impl FnMut() -> Result<T, E>) -> T {
    let deadline = Instant::now() + DEADLINE;
    loop {
        match attempt() {
            Ok(found) => return found,
            Err(error) => assert!(Instant::now() < deadline, "{what}: {error:?}"),
        }
        std::thread::sleep(LOOK);
    }
}

/// Slower than a guest of these tests is moved in a moment, compressed or not.
const SLOW_MBITS: u32 = 40;

/// Waits until libvirt has the migration of a domain under way.
fn is_under_way(host: &Host, domain: &Domain) {
    until("a migration is under way", || {
        let said = host.virsh(&["domjobinfo", &domain.name]).ok()?;
        said.contains("Memory remaining").then_some(())
    });
}

/// The other end.
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

/// Waits for the end of what [`begin`] has begun; what it says if it fails.
fn outcome(mut migration: Process) -> Result<(), String> {
    let status = migration.wait(DEADLINE).expect("it ends");
    migration.hear_out();
    match status.success() {
        true => Ok(()),
        false => Err(migration.said().join("\n")),
    }
}

/// Proves that the only guest runs at `end` and has lost no write.
fn is_at(hosts: &Hosts, end: End, domain: &Domain) {
    let (found, writes) = hosts.prove(domain).expect("one guest, and its memory");
    assert_eq!(found, end, "{} after {writes} writes", domain.name);
}

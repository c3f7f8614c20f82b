//! Tests `hotlift drain`: the plan, its order, failures, and a repeated command.

use std::sync::Arc;

use hotlift_testkit::libvirt::{Disk, Domain, Hosts};
use hotlift_testkit::namespace::End;
use hotlift_testkit::pki::Pki;
use hotlift_testkit::process::Process;
use hotlift_testkit::program::Program;
use rustix::process::Signal;

use crate::agents::{Agent, CONTROL};
use crate::{
    DEADLINE, HOTLIFT, MEDIUM_MBITS, MOST, SLOW_MBITS, UNSAFE, domain, downtime_limit, hosts,
    is_at, is_low, is_under_way, until,
};

const TO: &str = "--to=qemu+tcp://b/system";

fn drain(hosts: &Hosts, flags: &[&str]) -> Process {
    let mut line = vec!["drain", TO];
    line.extend(flags);
    line.extend(["--", UNSAFE]);
    let started = hosts.source.start(HOTLIFT, &line);
    started.expect("hotlift starts")
}

/// Returns the exit code and all output of a drain.
fn ended(mut drain: Process) -> (Option<i32>, String) {
    drain.wait(DEADLINE).expect("it ends");
    drain.read_last_output();
    (drain.exit_code(), drain.output_lines().join("\n"))
}

fn domains(hosts: &Hosts, names: &[&str]) -> Vec<Domain> {
    names.iter().map(|name| domain(hosts, name)).collect()
}

#[test]
fn a_drain_moves_every_domain_as_planned_and_a_second_one_finds_none() {
    let Some(hosts) = hosts() else { return };
    let all = domains(&hosts, &["web1", "web2", "db1"]);
    let (code, plan) = ended(drain(&hosts, &["--dry-run"]));
    assert_eq!(code, Some(0), "{plan}");
    for one in &all {
        assert!(plan.contains(&one.name), "{plan}");
        is_at(&hosts, End::Source, one);
    }
    let (code, output) = ended(drain(&hosts, &["--json"]));
    assert_eq!(code, Some(0), "{output}");
    assert_eq!(output.matches(r#""state":"moved""#).count(), 3, "{output}");
    for one in &all {
        is_at(&hosts, End::Destination, one);
    }
    let (code, output) = ended(drain(&hosts, &["--json"]));
    assert_eq!((code, output.as_str()), (Some(0), "[]"));
}

#[test]
fn a_plan_respects_the_limits_of_the_local_agent() {
    let Some(hosts) = hosts() else { return };
    let limits = "redirect = false\nmigrations = 1\nmax-bandwidth = \"50M\"";
    let agent = Agent::start(&hosts, &hosts.source, &Pki::new(), limits);
    let control = format!("--control={CONTROL}");
    for (flag, first) in [
        ("--quiet", "1 at once, 50.0 MiB/s for all"),
        ("--at-once=3", "3 at once, 50.0 MiB/s for all"),
    ] {
        let (code, plan) = ended(drain(&hosts, &["--dry-run", &control, flag]));
        assert_eq!(code, Some(0), "{plan}");
        assert!(plan.starts_with(first), "{plan}");
    }
    agent.end();
}

#[test]
fn a_drain_starts_no_move_once_a_destination_is_lost_and_continues_later() {
    let Some(hosts) = hosts() else { return };
    let all = domains(&hosts, &["web1", "web2"]);
    hosts.limit(SLOW_MBITS).expect("a slow link");
    let first = drain(&hosts, &["--at-once=1", "--parallel=0"]);
    is_under_way(&hosts.source, &all[0]);
    // A migration that ends before the drain aborts it has its guest on an unknown host: libvirt has ordered the destination's
    // to run it.
    let stopped = hosts.destination.signal_qemu(&all[0], "STOP");
    stopped.expect("it runs");
    hosts.destination.signal_libvirtd("KILL").expect("it runs");
    let (code, output) = ended(first);
    let continued = hosts.destination.signal_qemu(&all[0], "CONT");
    continued.expect("it is stopped");
    assert_eq!(code, Some(1), "{output}");
    assert!(output.contains("lost b: "), "{output}");
    assert!(output.contains("web1 to b: stayed"), "{output}");
    assert!(!output.contains("web2 to b: under way"), "{output}");
    hosts.destination.start_libvirtd().expect("it starts");
    // Running moves end on both hosts.
    until("one guest of each", || {
        let are_here = all
            .iter()
            .all(|one| matches!(hosts.guest_location(one), Ok(End::Source)));
        are_here.then_some(())
    });
    for one in &all {
        is_at(&hosts, End::Source, one);
    }
    hosts.limit(1000).expect("a fast link");
    let (code, output) = ended(drain(&hosts, &[]));
    assert_eq!(code, Some(0), "{output}");
    for one in &all {
        is_at(&hosts, End::Destination, one);
    }
}

#[test]
fn an_interrupted_drain_leaves_its_domains_running_here() {
    let Some(hosts) = hosts() else { return };
    let all = domains(&hosts, &["web1", "web2"]);
    hosts.limit(SLOW_MBITS).expect("a slow link");
    let drain = drain(&hosts, &["--at-once=1"]);
    is_under_way(&hosts.source, &all[0]);
    let interrupted = hosts.source.signal(&drain, Signal::INT);
    interrupted.expect("it runs");
    let (code, output) = ended(drain);
    assert_eq!(code, Some(130), "{output}");
    assert!(!output.contains("web2 to b: under way"), "{output}");
    for one in &all {
        is_at(&hosts, End::Source, one);
    }
}

#[test]
fn the_downtime_limit_of_a_domain_is_low_while_it_moves_and_restored_if_it_stays() {
    let Some(hosts) = hosts() else { return };
    let one = domain(&hosts, "web1");
    hosts.limit(SLOW_MBITS).expect("a slow link");
    let first = drain(&hosts, &["--parallel=0"]);
    is_low(&hosts, &one);
    let interrupted = hosts.source.signal(&first, Signal::INT);
    interrupted.expect("it runs");
    let (code, output) = ended(first);
    assert_eq!(code, Some(130), "{output}");
    is_at(&hosts, End::Source, &one);
    assert_eq!(downtime_limit(&hosts.source, &one), MOST);
    hosts.limit(MEDIUM_MBITS).expect("a faster link");
    let (code, output) = ended(drain(&hosts, &["--parallel=0", "--json"]));
    println!("{output}");
    assert_eq!(code, Some(0), "{output}");
    assert!(output.contains(r#""most_ms":300,"#), "{output}");
    is_at(&hosts, End::Destination, &one);
    assert_eq!(downtime_limit(&hosts.destination, &one), MOST);
}

#[test]
fn the_downtime_limit_rises_for_a_domain_that_writes_faster_than_the_link() {
    let Some(hosts) = hosts() else { return };
    let program = Arc::new(Program::new(32 << 20, 8 << 20, 20_000).expect("a program"));
    let one = hosts.domain("web1", &program, Disk::Shared);
    let one = one.expect("a domain that runs");
    hosts.limit(SLOW_MBITS).expect("a slow link");
    let mut drain = drain(&hosts, &["--parallel=0"]);
    is_low(&hosts, &one);
    let raised = "web1 to b: downtime-limit 300 of 300 ms, raised because";
    drain.wait_for(raised, DEADLINE).expect("it is raised");
    assert_eq!(downtime_limit(&hosts.source, &one), MOST);
    let interrupted = hosts.source.signal(&drain, Signal::INT);
    interrupted.expect("it runs");
    let (code, output) = ended(drain);
    assert_eq!(code, Some(130), "{output}");
    is_at(&hosts, End::Source, &one);
    assert_eq!(downtime_limit(&hosts.source, &one), MOST);
}

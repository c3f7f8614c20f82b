//! Tests faults during a migration through the agents. Afterwards exactly one intact guest runs, and nothing remains to
//! clean up.

use std::time::Duration;

use hotlift_testkit::libvirt::{Domain, Host, Hosts};
use hotlift_testkit::namespace::End;
use hotlift_testkit::pki::Pki;
use hotlift_testkit::process::Process;

use crate::agents::{Agent, both, carries, end};
use crate::{SLOW_MBITS, UNSAFE, begin, domain, hosts, is_at, migrate, outcome, until, until_ok};

/// Duration of a link failure: longer than a retransmission, shorter than any timeout here.
const OUTAGE: Duration = Duration::from_secs(5);

/// Error of QEMU 7.2 for a moment after broken connections: it reports "failed" before its cleanup.
const NOT_CLEAN: &str = "duplicate yank instance";

/// Starts a migration whose pages are being sent over a slow link. Without multifd where connections break: QEMU 7.2 with
/// multifd may then fail an assertion (`yank_unregister_instance`).
fn under_way(hosts: &Hosts, agent: &Agent<'_>, options: &[&str]) -> (Domain, Process) {
    let one = domain(hosts, "web1");
    hosts.limit(SLOW_MBITS).expect("a slow link");
    let migration = begin(hosts, &one, options);
    carries(agent);
    (one, migration)
}

/// Checks after a failure that the guest is at the source, and moves normally.
fn stayed_and_moves_again(hosts: &Hosts, one: &Domain) {
    until_ok("the guest is at the source alone", || {
        match hosts.guest_location(one) {
            Ok(End::Source) => Ok(()),
            elsewhere => Err(elsewhere),
        }
    });
    is_at(hosts, End::Source, one);
    hosts.limit(1000).expect("a fast link");
    until("its QEMU has cleaned up", || {
        match migrate(hosts, End::Source, one, &[UNSAFE, "--parallel"]) {
            Ok(()) => Some(()),
            Err(why) => {
                assert!(why.contains(NOT_CLEAN), "{why}");
                None
            }
        }
    });
    is_at(hosts, End::Destination, one);
}

#[test]
fn an_aborted_migration_leaves_the_guest_and_nothing_else() {
    let Some(hosts) = hosts() else { return };
    let agents = both(&hosts, "");
    let (one, migration) = under_way(&hosts, &agents[0], &["--parallel"]);
    let aborted = hosts.source.virsh(&["domjobabort", &one.name]);
    aborted.expect("it is under way");
    outcome(migration).expect_err("it was aborted");
    stayed_and_moves_again(&hosts, &one);
    end(agents);
}

#[test]
fn a_migration_that_foreign_rules_keep_from_the_agent_is_refused_and_sends_nothing() {
    let Some(hosts) = hosts() else { return };
    let agents = both(&hosts, "");
    let one = domain(&hosts, "web1");
    let nft = |host: &Host, rules: &str| {
        let loaded = host.tool("nft", &[rules]);
        loaded.expect("nft takes it")
    };
    let arrivals = "table inet arrivals {
        counter arrived { }
        chain i {
            type filter hook prerouting priority -400;
            iifname veth tcp dport 49152-49215 counter name arrived;
        }
    }";
    nft(&hosts.destination, arrivals);
    let notrack = "table inet others {
        chain o { type filter hook output priority raw; tcp dport 49152-49215 notrack; }
    }";
    nft(&hosts.source, notrack);
    for options in [
        &[UNSAFE][..],
        &[UNSAFE, "--parallel"],
        &[UNSAFE, "--p2p", "--parallel"],
    ] {
        let why = migrate(&hosts, End::Source, &one, options).expect_err("no way past the agent");
        assert!(why.contains("Connection refused"), "{options:?}: {why}");
        is_at(&hosts, End::Source, &one);
    }
    let found = agents[0].check().expect_err("it finds the rule");
    assert!(found.contains("notrack"), "{found}");
    let arrived = nft(&hosts.destination, "list counter inet arrivals arrived");
    assert!(arrived.contains("packets 0 "), "{arrived}");
    nft(&hosts.destination, "delete table inet arrivals");
    nft(&hosts.source, "delete table inet others");
    agents[0].check().expect("nothing is in the way");
    stayed_and_moves_again(&hosts, &one);
    end(agents);
}

#[test]
fn a_killed_agent_fails_the_migration_and_its_replacement_works() {
    let Some(hosts) = hosts() else { return };
    let pki = Pki::new();
    for killed in [End::Source, End::Destination] {
        let start = |at| Agent::start(&hosts, hosts.host(at), &pki, "");
        let (source, destination) = (start(End::Source), start(End::Destination));
        let (one, migration) = under_way(&hosts, &source, &[]);
        let (killed_agent, other) = match killed {
            End::Source => (source, destination),
            End::Destination => (destination, source),
        };
        killed_agent.kill();
        outcome(migration).expect_err("its agent was killed");
        drop(killed_agent);
        let again = start(killed);
        stayed_and_moves_again(&hosts, &one);
        again.end();
        other.end();
        let gone = hosts.destination.virsh(&["destroy", &one.name]);
        gone.expect("it is there");
    }
}

#[test]
fn a_killed_qemu_at_the_destination_leaves_the_guest_at_the_source() {
    let Some(hosts) = hosts() else { return };
    let agents = both(&hosts, "");
    let (one, migration) = under_way(&hosts, &agents[0], &[]);
    let killed = hosts.destination.signal_qemu(&one, "KILL");
    killed.expect("it runs");
    outcome(migration).expect_err("its QEMU was killed");
    stayed_and_moves_again(&hosts, &one);
    end(agents);
}

#[test]
fn a_killed_libvirtd_on_either_host_leaves_the_guest_at_the_source() {
    for killed in [End::Source, End::Destination] {
        let Some(hosts) = hosts() else { return };
        let agents = both(&hosts, "");
        // Both libvirtds notice each other's end.
        let (one, migration) = under_way(&hosts, &agents[0], &["--p2p"]);
        hosts.host(killed).signal_libvirtd("KILL").expect("it runs");
        outcome(migration).expect_err("its libvirtd was killed");
        hosts.host(killed).start_libvirtd().expect("it starts");
        stayed_and_moves_again(&hosts, &one);
        end(agents);
    }
}

#[test]
fn a_link_that_is_down_for_five_seconds_only_delays_the_migration() {
    let Some(hosts) = hosts() else { return };
    let agents = both(&hosts, "");
    let (one, migration) = under_way(&hosts, &agents[0], &["--parallel"]);
    hosts.link("down").expect("the link");
    std::thread::sleep(OUTAGE);
    hosts.link("up").expect("the link");
    hosts.limit(1000).expect("a fast link");
    outcome(migration).expect("it moves");
    is_at(&hosts, End::Destination, &one);
    end(agents);
}

#[test]
fn a_host_without_an_agent_gets_no_plaintext_unless_the_policy_allows_it() {
    let Some(hosts) = hosts() else { return };
    let pki = Pki::new();
    let one = domain(&hosts, "web1");
    let agent = Agent::start(&hosts, &hosts.source, &pki, "plaintext = \"refuse\"");
    migrate(&hosts, End::Source, &one, &[UNSAFE]).expect_err("it would be plaintext");
    is_at(&hosts, End::Source, &one);
    agent.end();
    let agent = Agent::start(&hosts, &hosts.source, &pki, "plaintext = \"allow\"");
    migrate(&hosts, End::Source, &one, &[UNSAFE, "--parallel"]).expect("it moves");
    is_at(&hosts, End::Destination, &one);
    agent.end();
}

#[test]
fn a_wrong_certificate_moves_nothing_whatever_the_policy() {
    let Some(hosts) = hosts() else { return };
    let allow = "plaintext = \"allow\"";
    let source = Agent::start(&hosts, &hosts.source, &Pki::new(), allow);
    let destination = Agent::start(&hosts, &hosts.destination, &Pki::new(), allow);
    let one = domain(&hosts, "web1");
    migrate(&hosts, End::Source, &one, &[UNSAFE]).expect_err("another CA");
    is_at(&hosts, End::Source, &one);
    end([source, destination]);
}

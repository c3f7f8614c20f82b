//! Tests every kind of libvirt migration through the agents of both hosts.

use std::fs;
use std::os::unix::fs::PermissionsExt;

use hotlift_testkit::libvirt::{Disk, Hosts};
use hotlift_testkit::namespace::End;
use hotlift_testkit::pki::Pki;

use crate::agents::{Agent, both, end};
use crate::{UNSAFE, begin, domain, hosts, is_at, migrate, other, outcome, program};

/// Options of an operator to move a domain whose disk both hosts have.
const WAYS: [&[&str]; 5] = [
    &[UNSAFE],
    &[UNSAFE, "--parallel"],
    &[UNSAFE, "--parallel", "--parallel-connections", "4"],
    &[UNSAFE, "--p2p"],
    &[UNSAFE, "--p2p", "--parallel"],
];

/// Moves a domain there and back with all options, `times` times.
fn there_and_back(hosts: &Hosts, [source, destination]: &[Agent<'_>; 2], times: usize) {
    let one = domain(hosts, "web1");
    let mut from = End::Source;
    for (count, options) in WAYS.iter().cycle().take(times).enumerate() {
        migrate(hosts, from, &one, options)
            .unwrap_or_else(|why| panic!("{count} {options:?}: {why}\n{}", source.output()));
        from = other(from);
        is_at(hosts, from, &one);
        for agent in [source, destination] {
            agent.is_idle_again();
        }
    }
}

#[test]
fn every_migration_mode_of_libvirt_passes_through_the_agents_both_ways() {
    let Some(hosts) = hosts() else { return };
    let agents = both(&hosts, "");
    there_and_back(&hosts, &agents, WAYS.len());
    for agent in &agents {
        agent.has_carried(WAYS.len());
    }
    end(agents);
}

#[test]
#[ignore = "minutes: 'make test-libvirt'"]
fn fifty_migrations_there_and_back_leak_nothing() {
    let Some(hosts) = hosts() else { return };
    let agents = both(&hosts, "");
    there_and_back(&hosts, &agents, 100);
    end(agents);
}

#[test]
fn migrations_over_ipv6_go_through_the_agents() {
    let Some(hosts) = hosts() else { return };
    let agents = both(&hosts, "");
    let one = domain(&hosts, "web1");
    let uri = "tcp:[2001:db8::2]";
    migrate(
        &hosts,
        End::Source,
        &one,
        &[UNSAFE, "--parallel", "--migrateuri", uri],
    )
    .expect("it moves");
    is_at(&hosts, End::Destination, &one);
    for agent in &agents {
        agent.has_carried(1);
    }
    end(agents);
}

#[test]
fn disks_that_are_copied_go_through_the_agents_too() {
    let Some(hosts) = hosts() else { return };
    let agents = both(&hosts, "");
    let disk = Disk::OfEachHost;
    let one = hosts.domain("db1", &program(), disk).expect("a domain");
    let content = vec![0xa5; 1 << 20];
    fs::write(hosts.source.path("/run/db1.disk"), &content).expect("a disk");
    fs::set_permissions(
        hosts.source.path("/run/db1.disk"),
        fs::Permissions::from_mode(0o666),
    )
    .expect("a disk");
    migrate(&hosts, End::Source, &one, &["--copy-storage-all"]).expect("it moves");
    is_at(&hosts, End::Destination, &one);
    let copy = fs::read(hosts.destination.path("/run/db1.disk")).expect("a disk");
    assert!(copy.starts_with(&content), "the disk's content");
    for agent in &agents {
        agent.has_carried(1);
        let output = agent.output();
        assert!(output.contains("state=completed kind=tunnel"), "{output}");
    }
    end(agents);
}

#[test]
fn eight_domains_migrate_at_once() {
    let Some(hosts) = hosts() else { return };
    let agents = both(&hosts, "");
    let names = (1..=8).map(|number| format!("web{number}"));
    let all: Vec<_> = names.map(|name| domain(&hosts, &name)).collect();
    let begun: Vec<_> = all
        .iter()
        .map(|one| begin(&hosts, one, &["--parallel"]))
        .collect();
    for (one, migration) in all.iter().zip(begun) {
        let moved = outcome(migration);
        assert_eq!(moved, Ok(()), "{}: {}", one.name, agents[0].output());
    }
    for one in &all {
        is_at(&hosts, End::Destination, one);
    }
    for agent in &agents {
        agent.has_carried(8);
    }
    end(agents);
}

#[test]
fn tls_and_tunnels_of_libvirt_work_next_to_the_agents() {
    let Some(hosts) = hosts() else { return };
    let agents = both(&hosts, "");
    let pki = Pki::new();
    for (host, address) in [
        (&hosts.source, "192.0.2.1"),
        (&hosts.destination, "192.0.2.2"),
    ] {
        let folder = hosts.folder().join(format!("{}.pki", host.name()));
        pki.host_in(&folder, &[host.name(), address]);
        // QEMU runs as a separate user.
        for file in fs::read_dir(&folder).expect("a folder") {
            let path = file.expect("a file").path();
            fs::set_permissions(path, fs::Permissions::from_mode(0o644)).expect("a file");
        }
    }
    let one = domain(&hosts, "web1");
    migrate(&hosts, End::Source, &one, &[UNSAFE, "--tls"]).expect("it moves by TLS");
    is_at(&hosts, End::Destination, &one);
    migrate(
        &hosts,
        End::Destination,
        &one,
        &[UNSAFE, "--p2p", "--tunnelled"],
    )
    .expect("it moves in a tunnel");
    is_at(&hosts, End::Source, &one);
    assert_eq!(
        agents[0].completed("migration"),
        0,
        "{}",
        agents[0].output()
    );
    end(agents);
}

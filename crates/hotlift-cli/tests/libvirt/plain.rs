//! Tests libvirt migrations without Hotlift, which validates the hosts of these tests.

use hotlift_testkit::libvirt::Disk;
use hotlift_testkit::namespace::End;

use crate::{UNSAFE, domain, hosts, is_at, migrate, other, program};

#[test]
fn domains_move_by_libvirt_alone() {
    let Some(hosts) = hosts() else { return };
    let one = domain(&hosts, "web1");
    is_at(&hosts, End::Source, &one);
    let ways: [&[&str]; 4] = [
        &[UNSAFE],
        &[UNSAFE, "--parallel"],
        &[UNSAFE, "--p2p"],
        &[UNSAFE, "--p2p", "--tunnelled"],
    ];
    let mut from = End::Source;
    for options in ways {
        migrate(&hosts, from, &one, options).unwrap_or_else(|why| panic!("{options:?}: {why}"));
        from = other(from);
        is_at(&hosts, from, &one);
    }
    let disk = Disk::OfEachHost;
    let copied = hosts.domain("db1", &program(), disk).expect("a domain");
    migrate(&hosts, End::Source, &copied, &["--copy-storage-all"]).expect("it moves");
    is_at(&hosts, End::Destination, &copied);
}

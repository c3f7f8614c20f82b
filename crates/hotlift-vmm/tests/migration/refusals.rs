//! Tests incompatible settings of source and destination. The migration is rejected with the values of both sides in
//! the error, and the guest continues.

use std::sync::Arc;

use hotlift::Options;
use hotlift::options::StreamOptions;
use hotlift_mem::{Backing, RamBlock};
use hotlift_testkit::alone;
use hotlift_testkit::proxy::units::{Action, Fault, Unit, Units};
use hotlift_testkit::proxy::{Proxy, Socket};
use hotlift_vmm::GuestSettings;

use crate::census::Census;
use crate::probe::{Probe, Quirks};
use crate::rig::{self, Ended, Holder, settings};

fn options() -> Options {
    Options {
        stream: StreamOptions {
            max_bandwidth: 0,
            ..StreamOptions::default()
        },
        ..Options::default()
    }
}

/// Checks that the source's guest continues and that one of the two errors contains all of `words`.
fn expect_refusal(what: &str, ended: &Ended, source: &Probe, destination: &Probe, words: &[&str]) {
    assert_eq!(
        ended.holder(source, destination),
        Ok(Holder::Source),
        "{what}"
    );
    let (here, there) = ended.errors();
    assert!(
        !here.contains('\n') && !there.contains('\n'),
        "{what}: {here} {there}"
    );
    for word in words {
        assert!(there.contains(word), "{what}: {word} is not in: {there}");
        assert!(here.contains(word), "{what}: {word} is not in: {here}");
    }
}

#[test]
fn a_guest_that_differs_is_refused_with_both_values() {
    alone!();
    let census = Census::take();
    for kind in rig::kinds() {
        let ram = |name: &str, bytes| {
            Some(vec![Arc::new(
                RamBlock::new(name, bytes, Backing::Private).unwrap(),
            )])
        };
        let quirks = Quirks::default;
        let cases: Vec<(&str, GuestSettings, Quirks, Vec<&str>)> = vec![
            (
                "machine name",
                settings(),
                Quirks {
                    machine: Some("another-machine"),
                    ..quirks()
                },
                vec!["machine", kind.machine(), "another-machine"],
            ),
            (
                "UUID",
                settings(),
                Quirks {
                    uuid: Some([0xab; 16]),
                    ..quirks()
                },
                vec!["UUID", "686f746c69667420", "abababababab"],
            ),
            (
                "name of the RAM block",
                settings(),
                Quirks {
                    ram: ram("other.ram", 8 << 20),
                    ..quirks()
                },
                vec!["RAM block", "pc.ram", "other.ram"],
            ),
            (
                "size of the RAM block",
                GuestSettings {
                    ram_bytes: 16 << 20,
                    ..settings()
                },
                quirks(),
                vec!["size of RAM block 'pc.ram'", "8388608", "16777216"],
            ),
            (
                "number of vCPUs",
                GuestSettings {
                    vcpus: 2,
                    ..settings()
                },
                quirks(),
                vec!["number of vCPUs", "1", "2"],
            ),
        ];
        for (what, settings_there, quirks_there, words) in cases {
            let source = rig::source(kind, &settings(), Quirks::default());
            let destination = rig::destination(kind, &settings_there, quirks_there);
            let ended = rig::between(&source, &destination, [&options(), &options()]);
            expect_refusal(what, &ended, &source, &destination, &words);
        }
    }
    census.expect_unchanged();
}

#[test]
fn options_that_differ_are_refused_with_both_values() {
    alone!();
    let census = Census::take();
    let cases = [
        ("multifd-channels", "4", vec!["multifd-channels", "2", "4"]),
        ("multifd-channels", "1", vec!["multifd-channels", "2", "1"]),
        (
            "multifd-compression",
            "zstd",
            vec!["multifd-compression", "none", "zstd"],
        ),
        (
            "multifd-compression",
            "zlib",
            vec!["multifd-compression", "none", "zlib"],
        ),
        (
            "multifd",
            "off",
            vec!["multifd differs: the source has on, the destination has off"],
        ),
    ];
    let kind = rig::kinds()[0];
    let source = rig::source(kind, &settings(), Quirks::default());
    for (name, value, words) in cases {
        let mut there = options();
        there.set(name, value).unwrap();
        let destination = rig::destination(kind, &settings(), Quirks::default());
        let ended = rig::between(&source, &destination, [&options(), &there]);
        expect_refusal(
            &format!("{name}={value}"),
            &ended,
            &source,
            &destination,
            &words,
        );
    }
    let mut here = options();
    here.set("multifd", "off").unwrap();
    let destination = rig::destination(kind, &settings(), Quirks::default());
    let ended = rig::between(&source, &destination, [&here, &options()]);
    let words = "multifd differs: the source has off, the destination has on";
    expect_refusal("multifd=off here", &ended, &source, &destination, &[words]);
    drop(destination);
    drop(source);
    census.expect_unchanged();
}

#[test]
fn another_version_of_the_stream_is_refused_with_both_values() {
    alone!();
    let census = Census::take();
    let unit = |back, name: &str| Unit {
        socket: Some(Socket::Main),
        back,
        name: name.to_owned(),
    };
    // QEMU's version; and ours, in the offer and in its answer.
    let cases = [
        (unit(false, "file header #1"), ["0x2", "0x3"]),
        (
            unit(false, "PING #1"),
            ["the source has 5", "the destination has 4"],
        ),
        (
            unit(true, "HELLO #1"),
            ["the source has 4", "the destination has 5"],
        ),
    ];
    let kind = rig::kinds()[0];
    let source = rig::source(kind, &settings(), Quirks::default());
    for (unit, words) in cases {
        let destination = rig::destination(kind, &settings(), Quirks::default());
        let (listener, address) = rig::listen();
        let action = Action::Flip { byte: 7, mask: 1 };
        let is_answer = unit.back;
        let rule = Units::new(Some(Fault { unit, action }));
        let (proxy, to) = Proxy::loopback(&address, rule).unwrap();
        let ended = rig::migrate(&source, &destination, listener, &to, &options());
        assert!(proxy.finish().into_log().fired);
        let (here, there) = ended.stayed(&source, &destination);
        let reader = if is_answer { here } else { there };
        for word in ["version"].iter().chain(&words) {
            assert!(reader.contains(word), "{reader}");
        }
    }
    drop(source);
    census.expect_unchanged();
}

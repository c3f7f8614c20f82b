//! Tests method `auto`. Each packet has its own method, the report counts the packets of each method, and limits are
//! respected.

use std::sync::Mutex;
use std::time::Duration;

use hotlift::options::Goal;
use hotlift::options::{StreamOptions, SwitchoverOptions};
use hotlift::{Control, Options};
use hotlift_methods::METHODS;
use hotlift_testkit::alone;
use hotlift_vmm::GuestSettings;

use crate::probe::Quirks;
use crate::rig::{self, Holder, settings};

fn options(given: &[(&str, &str)]) -> Options {
    let mut options = Options {
        stream: StreamOptions {
            max_bandwidth: 0,
            ..StreamOptions::default()
        },
        ..Options::default()
    };
    options.set("multifd-compression", "auto").unwrap();
    for (name, value) in given {
        options.set(name, value).unwrap();
    }
    options
}

/// Returns a guest whose first round has some hundred packets.
fn larger() -> GuestSettings {
    GuestSettings {
        ram_bytes: 64 << 20,
        ..settings()
    }
}

#[test]
fn a_slow_link_gets_fewer_bytes_and_every_page_is_counted() {
    alone!();
    for kind in rig::kinds() {
        // Compression takes a small part of the transfer time.
        let options = options(&[("max-bandwidth", "8M"), ("downtime-limit", "2000")]);
        let source = rig::source(kind, &larger(), Quirks::default());
        let destination = rig::destination(kind, &larger(), Quirks::default());
        let (listener, to) = rig::listen();
        let words = Mutex::new(Vec::new());
        let ended = rig::run(
            &source,
            &destination,
            listener,
            &to,
            [&options, &options],
            &[Control::new(), Control::new()],
            &|progress| words.lock().unwrap().extend(progress.methods.clone()),
        );
        let (sent, _) = ended.arrived(&source, &destination, &kind.to_string());
        let sum = |of: fn(&hotlift::figures::MethodFigures) -> u64| -> u64 {
            sent.methods.iter().map(of).sum()
        };
        assert_eq!(
            sum(|one| one.pages),
            sent.normal_pages,
            "{:?}",
            sent.methods
        );
        assert_eq!(sum(|one| one.bytes_in), sent.normal_pages * 4096);
        assert!(sum(|one| one.bytes_out) < sent.transferred_bytes);
        let raw = sent.methods.iter().find(|one| one.name == "none");
        let raw = raw.map_or(0, |one| one.pages);
        assert!(raw < sent.normal_pages / 2, "{:?}", sent.methods);

        let words = words.into_inner().unwrap();
        assert!(words.iter().any(|now| now.link_is_the_limit), "{words:?}");
        for moment in &sent.timeline {
            let all: f64 = moment.shares.values().sum();
            assert!(all == 0.0 || (all - 1.0).abs() < 1e-9, "{moment:?}");
        }
        assert!(!sent.timeline.is_empty());
    }
}

#[test]
fn a_destination_with_auto_accepts_every_method() {
    alone!();
    let kind = rig::kinds()[0];
    let there = options(&[]);
    for method in METHODS {
        let here = options(&[("multifd-compression", method.name)]);
        let source = rig::source(kind, &settings(), Quirks::default());
        let destination = rig::destination(kind, &settings(), Quirks::default());
        let ended = rig::between(&source, &destination, [&here, &there]);
        ended.arrived(&source, &destination, method.name);
    }
}

#[test]
fn a_destination_with_method_none_accepts_auto() {
    alone!();
    let kind = rig::kinds()[0];
    let there = options(&[("multifd-compression", "none")]);
    let source = rig::source(kind, &settings(), Quirks::default());
    let destination = rig::destination(kind, &settings(), Quirks::default());
    let here = options(&[("max-bandwidth", "8M")]);
    let ended = rig::between(&source, &destination, [&here, &there]);
    ended.arrived(&source, &destination, "");
}

#[test]
fn a_destination_with_one_method_refuses_auto_by_name() {
    alone!();
    let kind = rig::kinds()[0];
    let there = options(&[("multifd-compression", "zstd")]);
    let source = rig::source(kind, &settings(), Quirks::default());
    let destination = rig::destination(kind, &settings(), Quirks::default());
    let ended = rig::between(&source, &destination, [&options(&[]), &there]);
    assert_eq!(ended.holder(&source, &destination), Ok(Holder::Source));
    let (here, there) = ended.errors();
    for word in ["multifd-compression", "auto", "zstd"] {
        assert!(
            here.contains(word) && there.contains(word),
            "{here} {there}"
        );
    }
}

#[test]
fn channels_take_no_more_cpu_time_than_their_limit_on_either_side() {
    alone!();
    let kind = rig::kinds()[0];
    for (method, level) in [("auto", "1"), ("zstd", "9")] {
        let options = options(&[
            ("multifd-compression", method),
            ("multifd-zstd-level", level),
            ("cpu-limit", "0.2"),
            ("downtime-limit", "2000"),
        ]);
        let source = rig::source(kind, &larger(), Quirks::default());
        let destination = rig::destination(kind, &larger(), Quirks::default());
        let ended = rig::between(&source, &destination, [&options, &options]);
        let (sent, received) = ended.arrived(&source, &destination, method);
        for (side, names) in [
            (&sent.side, "mig/src/send_"),
            (&received.side, "mig/dst/recv_"),
        ] {
            let threads = side
                .threads
                .iter()
                .filter(|one| one.name.starts_with(names));
            let cpu: f64 = threads.map(|one| one.cpu_s).sum();
            // A thread's CPU time before its first packet and between packets is booked after them. A packet of level 9 takes
            // some 50 ms, more on a busy machine, and each thread has one.
            let most = 0.2 * sent.total_ms / 1e3 + 0.25;
            assert!(
                cpu <= most,
                "{method} {names}: {cpu} s in {} ms",
                sent.total_ms
            );
        }
    }
}

#[test]
fn the_shortest_downtime_setting_continues_while_the_remainder_shrinks() {
    alone!();
    let kind = rig::kinds()[0];
    let rounds = [Goal::Fastest, Goal::ShortestDowntime].map(|goal| {
        let options = Options {
            stream: StreamOptions {
                goal,
                ..options(&[("max-bandwidth", "24M")]).stream
            },
            switchover: SwitchoverOptions {
                downtime_limit: Duration::from_secs(100),
                ..options(&[("max-bandwidth", "24M")]).switchover
            },
            ..options(&[("max-bandwidth", "24M")])
        };
        let guest = GuestSettings {
            rate: 500,
            ..settings()
        };
        let source = rig::source(kind, &guest, Quirks::default());
        let destination = rig::destination(kind, &guest, Quirks::default());
        let ended = rig::between(&source, &destination, [&options, &options]);
        let (sent, _) = ended.arrived(&source, &destination, "");
        sent.rounds
    });
    assert_eq!(rounds[0], 2, "it fits after the first round");
    assert!((3..=11).contains(&rounds[1]), "{rounds:?}");
}

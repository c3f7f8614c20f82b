//! Tests XBZRLE: pages that were sent before are sent as deltas (differences), and arrive intact.

use std::sync::Mutex;
use std::time::Duration;

use hotlift::options::ZERO_PAGE_DETECTION;
use hotlift::options::{StreamOptions, SwitchoverOptions};
use hotlift::{Control, MigrationError, Options};

use crate::census::Census;
use crate::probe::{Quirks, busy_first_round, three_rounds};
use crate::rig::{self, settings};
use hotlift_testkit::alone;

fn options() -> Options {
    Options {
        stream: StreamOptions {
            xbzrle: true,
            max_bandwidth: 0,
            ..StreamOptions::default()
        },
        switchover: SwitchoverOptions {
            downtime_limit: Duration::ZERO,
            ..SwitchoverOptions::default()
        },
        ..Options::default()
    }
}

#[test]
fn a_guest_arrives_intact_as_deltas_with_any_cache_size() {
    alone!();
    let census = Census::take();
    for kind in rig::kinds() {
        for (mode, _, devices) in ZERO_PAGE_DETECTION {
            // More than the guest has, less than it writes to, and almost none.
            for cache in ["64M", "256K", "4K"] {
                if *devices {
                    continue;
                }
                let what = format!("{kind} {mode} {cache}");
                let mut options = options();
                options.set("zero-page-detection", mode).unwrap();
                options.set("xbzrle-cache-size", cache).unwrap();
                // Slow enough for rounds in which the guest writes all over its MiB.
                options.stream.max_bandwidth = 24 << 20;
                options.switchover.downtime_limit = Duration::from_millis(2);
                let settings = hotlift_vmm::GuestSettings {
                    rate: 1500,
                    ..settings()
                };
                let quirks = Quirks {
                    sync: Some(busy_first_round()),
                    ..Quirks::default()
                };
                let source = rig::source(kind, &settings, quirks);
                let destination = rig::destination(kind, &settings, Quirks::default());
                let (listener, to) = rig::listen();
                let ended = rig::migrate(&source, &destination, listener, &to, &options);
                let (sent, _) = ended.arrived(&source, &destination, &what);
                let figures = sent.xbzrle.unwrap();
                assert!(sent.rounds > 2, "{what}: {sent:?}");
                assert!(figures.cache_misses > 0, "{what}: {figures:?}");
                assert_eq!(figures.cache_bytes, options.xbzrle_cache_size, "{what}");
                if cache == "64M" && sent.rounds > 3 {
                    assert!(figures.pages > 0, "{what}: {figures:?}");
                    // A write is 16 bytes of a page.
                    assert!(figures.bytes < figures.pages * 400, "{what}: {figures:?}");
                }
            }
        }
    }
    census.expect_unchanged();
}

#[test]
fn the_first_round_sends_whole_pages_and_the_last_deltas() {
    alone!();
    for kind in rig::kinds() {
        let quirks = Quirks {
            sync: Some(three_rounds()),
            ..Quirks::default()
        };
        let source = rig::source(kind, &settings(), quirks);
        let destination = rig::destination(kind, &settings(), Quirks::default());
        let (listener, to) = rig::listen();
        let figures = Mutex::new(Vec::new());
        let ended = rig::run(
            &source,
            &destination,
            listener,
            &to,
            [&options(), &options()],
            &[Control::new(), Control::new()],
            &|progress| figures.lock().unwrap().push(progress.xbzrle),
        );
        let (report, _) = ended.arrived(&source, &destination, &kind.to_string());
        let figures = report.xbzrle.unwrap();
        // The counters and tables that the guest changes with every write: cached in round 2, and found in round 3.
        assert!(figures.cache_misses > 0 && figures.pages > 0, "{figures:?}");
        assert_eq!(report.rounds, 3);
        assert_eq!(report.bytes.multifd, 0);
    }
}

#[test]
fn a_cache_is_limited_to_guest_ram_and_channels_are_refused() {
    alone!();
    let kind = rig::kinds()[0];
    let source = rig::source(kind, &settings(), Quirks::default());
    let (listener, to) = rig::listen();
    let huge = Options {
        xbzrle_cache_size: 1 << 62,
        ..options()
    };
    let destination = rig::destination(kind, &settings(), Quirks::default());
    let ended = rig::migrate(&source, &destination, listener, &to, &huge);
    assert!(ended.source.is_ok(), "{:?}", ended.errors());

    let with_channels = Options {
        stream: StreamOptions {
            multifd: Some(true),
            ..options().stream
        },
        ..options()
    };
    let source = rig::source(kind, &settings(), Quirks::default());
    let refused = hotlift::migrate(&source, &to, &with_channels, &Control::new(), &|_| {});
    let error = refused.unwrap_err();
    assert!(matches!(error, MigrationError::Option(_)), "{error}");
    assert!(source.runs());
}

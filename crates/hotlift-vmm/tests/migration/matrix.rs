//! Tests every guest, method, number of channels and mode of zero page detection. The guest arrives intact and
//! continues, although it writes its whole working set in less time than the first round takes.

use std::time::Duration;

use hotlift::figures::{DestinationReport, SourceReport};
use hotlift::options::ZERO_PAGE_DETECTION;
use hotlift::options::{StreamOptions, SwitchoverOptions};
use hotlift::{Address, Listener, Options};
use hotlift_mem::Backing;
use hotlift_methods::selections;
use hotlift_testkit::alone;
use hotlift_vmm::workload::Workload;
use hotlift_vmm::{GuestKind, GuestSettings};

use crate::census::Census;
use crate::probe::{Quirks, busy_first_round};
use crate::rig;

/// Bytes per second, without and with compression. The first round takes at least 150 ms at this rate, in which the guest
/// dirties far more than the downtime limit permits. A page takes much less than the time in which the guest dirties another,
/// so the rounds get shorter.
const MAX_BANDWIDTH: [&str; 2] = ["24M", "6M"];

/// Pages per second.
const RATE: u64 = 1500;

#[test]
fn every_combination_arrives_intact_and_runs() {
    alone!();
    let census = Census::take();
    let folder = tempfile::tempdir().unwrap();
    let mut number = 0;
    for kind in rig::kinds() {
        for method in selections() {
            for channels in [1, 2, 4] {
                for (mode, _, devices) in ZERO_PAGE_DETECTION {
                    number += 1;
                    let mut options = Options {
                        switchover: SwitchoverOptions {
                            downtime_limit: Duration::from_millis(2),
                            ..SwitchoverOptions::default()
                        },
                        stream: StreamOptions {
                            multifd_channels: channels,
                            ..StreamOptions::default()
                        },
                        // The rest is rotated, so that each value meets each method.
                        mem_prealloc: number % 3 == 0,
                        ..Options::default()
                    };
                    let compresses = method.name != "none";
                    let bandwidth = MAX_BANDWIDTH[usize::from(compresses)];
                    options.set("max-bandwidth", bandwidth).unwrap();
                    options.set("multifd-compression", method.name).unwrap();
                    options.set("zero-page-detection", mode).unwrap();
                    let size = ["512K", "64K"][number / 4 % 2];
                    options.set("multifd-packet-size", size).unwrap();
                    if *devices {
                        options.set("accel-path", "dsa-model:").unwrap();
                    }
                    let settings = GuestSettings {
                        backing: [Backing::Private, Backing::Shared][number % 2],
                        vcpus: [1, 3][number / 2 % 2],
                        workload: [Workload::Random, Workload::Hotset, Workload::Sequential]
                            [number % 3],
                        rate: RATE,
                        ..rig::settings()
                    };
                    let address = if number % 4 < 2 {
                        "tcp:127.0.0.1:0".to_owned()
                    } else {
                        format!("unix:{}", folder.path().join("socket").display())
                    };
                    let what = format!("{kind} {} {channels} {mode} {size} {address}", method.name);

                    let listener = address.parse::<Address>().unwrap().listen().unwrap();
                    let (sent, received) =
                        runs_after_move(kind, &settings, &options, listener, &what);
                    assert_eq!(*mode == "none", sent.zero_pages == 0, "{what}: {sent:?}");
                    let content = sent.normal_pages * 4096;
                    let smaller = sent.transferred_bytes < content;
                    assert_eq!(smaller, compresses, "{what}: {sent:?}");
                    for side in [&sent.side, &received.side] {
                        assert!(side.threads.len() > usize::from(channels), "{what}");
                    }
                }
            }
        }
    }
    assert_eq!(std::fs::read_dir(folder.path()).unwrap().count(), 0);
    census.expect_unchanged();
}

/// Migrates a writing guest; asserts that it arrives whole and continues, and that the figures of both sides agree.
fn runs_after_move(
    kind: GuestKind,
    settings: &GuestSettings,
    options: &Options,
    listener: Listener,
    what: &str,
) -> (SourceReport, DestinationReport) {
    let quirks = Quirks {
        sync: Some(busy_first_round()),
        ..Quirks::default()
    };
    let source = rig::source(kind, settings, quirks);
    let destination = rig::destination(kind, settings, Quirks::default());
    let to = listener.address().unwrap();
    let ended = rig::migrate(&source, &destination, listener, &to, options);
    let (sent, received) = ended.arrived(&source, &destination, what);
    assert!(sent.rounds >= 3, "{what}: {sent:?}");
    let pages = sent.normal_pages + sent.zero_pages;
    assert!(pages > settings.ram_bytes / 4096, "{what}: {sent:?}");
    assert!(sent.total_ms >= sent.setup_ms + sent.downtime_ms, "{what}");
    for side in [&sent.side, &received.side] {
        let sum: f64 = side.threads.iter().map(|thread| thread.cpu_s).sum();
        assert!((sum - side.cpu_s).abs() < 1e-9 && sum > 0.0, "{what}");
    }
    (sent, received)
}

/// Capability `compress`: threads, levels and zero page modes, with and without waiting for threads.
#[test]
fn every_setting_of_compress_arrives_intact_and_runs() {
    alone!();
    let census = Census::take();
    for kind in rig::kinds() {
        for [compress, decompress] in [["1", "8"], ["8", "1"]] {
            for level in ["0", "1", "9"] {
                for wait in ["on", "off"] {
                    // Devices serve channels of multifd.
                    let modes = ZERO_PAGE_DETECTION.iter().filter(|(.., devices)| !devices);
                    for (mode, ..) in modes {
                        let what = format!(
                            "{kind} {compress} and {decompress} threads, level {level}, wait {wait}, {mode}"
                        );
                        let mut options = Options {
                            switchover: SwitchoverOptions {
                                downtime_limit: Duration::from_millis(2),
                                ..SwitchoverOptions::default()
                            },
                            ..Options::default()
                        };
                        let compresses = level != "0";
                        for (name, value) in [
                            ("compress", "on"),
                            ("compress-threads", compress),
                            ("decompress-threads", decompress),
                            ("compress-level", level),
                            ("compress-wait-thread", wait),
                            ("zero-page-detection", *mode),
                            ("max-bandwidth", MAX_BANDWIDTH[usize::from(compresses)]),
                        ] {
                            options.set(name, value).unwrap();
                        }
                        let settings = GuestSettings {
                            vcpus: 2,
                            rate: RATE,
                            ..rig::settings()
                        };
                        let (listener, _) = rig::listen();
                        let (sent, received) =
                            runs_after_move(kind, &settings, &options, listener, &what);
                        assert_eq!(*mode == "none", sent.zero_pages == 0, "{what}: {sent:?}");
                        // Pages without a free thread are not compressed; some always are.
                        let smaller = sent.transferred_bytes < sent.normal_pages * 4096;
                        assert_eq!(smaller, compresses, "{what}: {sent:?}");
                        for (side, prefix, threads) in [
                            (&sent.side, "compress_", compress),
                            (&received.side, "decompress_", decompress),
                        ] {
                            let names = side.threads.iter().map(|thread| &thread.name);
                            let count = names.filter(|name| name.starts_with(prefix)).count();
                            assert_eq!(count.to_string(), threads, "{what}: {side:?}");
                        }
                    }
                }
            }
        }
    }
    census.expect_unchanged();
}

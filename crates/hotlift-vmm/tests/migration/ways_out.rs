//! Tests migrations that end early without a fault of the network: cancel, a guest that fails, and unknown clients that
//! connect to the destination.

use std::io::Write;
use std::net::TcpStream;
use std::sync::atomic::{AtomicBool, Ordering};
use std::time::Duration;

use hotlift::options::{Levels, Limits, StreamOptions, TlsOptions};
use hotlift::{Address, Control, MigrationError, Options, Status};
use hotlift_testkit::alone;
use hotlift_testkit::namespace::{DESTINATION, End, Link, SOURCE};
use hotlift_testkit::proxy::units::{Action, Fault, Unit, Units};
use hotlift_testkit::proxy::{Proxy, Socket};
use hotlift_vmm::GuestSettings;

use crate::census::Census;
use crate::probe::{Obeys, Quirks};
use crate::rig::{self, settings};

fn options() -> Options {
    Options {
        stream: StreamOptions {
            max_bandwidth: 0,
            ..StreamOptions::default()
        },
        ..Options::default()
    }
}

/// Returns options with short timeouts, for faults that only a timeout detects.
fn short_timeouts() -> Options {
    Options {
        limits: Limits {
            handshake_timeout: Duration::from_secs(2),
            ..options().limits
        },
        ..options()
    }
}

/// Returns options so slow that the first round does not end before the test acts.
fn slow() -> Options {
    Options {
        stream: StreamOptions {
            max_bandwidth: 256 << 10,
            ..options().stream
        },
        ..options()
    }
}

#[test]
fn a_cancel_keeps_the_guest_running_and_a_second_migration_succeeds() {
    alone!();
    let census = Census::take();
    for kind in rig::kinds() {
        let source = rig::source(kind, &settings(), Quirks::default());
        for (who, compress) in [(0, false), (1, false), (0, true), (1, true)] {
            let destination = rig::destination(kind, &settings(), Quirks::default());
            let (listener, to) = rig::listen();
            let controls = [Control::new(), Control::new()];
            let slow = Options {
                stream: StreamOptions {
                    compress,
                    ..slow().stream
                },
                ..slow()
            };
            let ended = rig::run(
                &source,
                &destination,
                listener,
                &to,
                [&slow, &slow],
                &controls,
                &|progress| {
                    if progress.round >= 1 && progress.transferred_bytes > 64 << 10 {
                        controls[who].cancel();
                    }
                },
            );
            ended.stayed(&source, &destination);
            let (here, there) = (ended.source.unwrap_err(), ended.destination.unwrap_err());
            let [canceller, other] = if who == 0 {
                [here, there]
            } else {
                [there, here]
            };
            assert!(
                matches!(canceller, MigrationError::Cancelled),
                "{canceller}"
            );
            assert!(!matches!(other, MigrationError::Cancelled), "{other}");
            assert_eq!(controls[who].status(), Status::Cancelled);
            assert_eq!(controls[1 - who].status(), Status::Failed);
        }
        let destination = rig::destination(kind, &settings(), Quirks::default());
        let (listener, to) = rig::listen();
        let ended = rig::migrate(&source, &destination, listener, &to, &options());
        ended.arrived(&source, &destination, "it was cancelled before");
    }
    census.expect_unchanged();
}

#[test]
fn a_host_that_is_lost_in_precopy_fails_the_migration_on_both_sides_and_the_guest_stays() {
    if !rustix::process::geteuid().is_root() {
        hotlift_testkit::skip!("root", "network namespaces need it");
        return;
    }
    alone!();
    let kind = rig::kinds()[0];
    let link = Link::new(1500, 1).unwrap();
    let source = rig::source(kind, &settings(), Quirks::default());
    let destination = rig::destination(kind, &settings(), Quirks::default());
    let to: Address = format!("tcp:{DESTINATION}:7000").parse().unwrap();
    let listener = link.destination.within(|| to.listen()).unwrap().unwrap();
    let options = Options {
        limits: Limits {
            silence_timeout: Duration::from_secs(1),
            ..slow().limits
        },
        tls: TlsOptions {
            insecure: true,
            ..slow().tls
        },
        ..slow()
    };
    let is_down = AtomicBool::new(false);
    let controls = [Control::new(), Control::new()];
    let ended = link.source.within(|| {
        rig::run(
            &source,
            &destination,
            listener,
            &to,
            [&options, &options],
            &controls,
            &|progress| {
                let is_under_way = progress.transferred_bytes > 64 << 10;
                if is_under_way && !is_down.swap(true, Ordering::Relaxed) {
                    link.down(End::Destination).unwrap();
                }
            },
        )
    });
    let ended = ended.unwrap();
    ended.stayed(&source, &destination);
    let error = ended.source.unwrap_err();
    assert!(
        matches!(&error, MigrationError::Silent { host, .. } if host == DESTINATION),
        "{error}"
    );
    let error = ended.destination.unwrap_err();
    assert!(
        matches!(&error, MigrationError::Silent { host, .. } if host == SOURCE),
        "{error}"
    );
}

#[test]
fn a_cancel_before_any_connection_ends_the_wait() {
    alone!();
    let census = Census::take();
    let kind = rig::kinds()[0];
    let destination = rig::destination(kind, &settings(), Quirks::default());
    let folder = tempfile::tempdir().unwrap();
    let address = Address::Unix {
        path: folder.path().join("socket"),
    };
    let listener = address.listen().unwrap();
    let control = Control::new();
    std::thread::scope(|scope| {
        let waiting =
            scope.spawn(|| hotlift::receive(&destination, listener, &options(), &control));
        control.cancel();
        let error = waiting.join().unwrap().unwrap_err();
        assert!(matches!(error, MigrationError::Cancelled), "{error}");
    });
    assert_eq!(std::fs::read_dir(folder.path()).unwrap().count(), 0);
    drop(destination);
    census.expect_unchanged();
}

#[test]
fn a_destination_guest_that_does_not_load_or_resume_leaves_the_guest_with_the_source() {
    alone!();
    let census = Census::take();
    for kind in rig::kinds() {
        let source = rig::source(kind, &settings(), Quirks::default());
        for (load, resume) in [(Obeys::No, Obeys::Yes), (Obeys::Yes, Obeys::No)] {
            let quirks = Quirks {
                load,
                resume,
                ..Quirks::default()
            };
            let destination = rig::destination(kind, &settings(), quirks);
            let (listener, to) = rig::listen();
            let ended = rig::migrate(&source, &destination, listener, &to, &options());
            let (here, there) = ended.stayed(&source, &destination);
            assert!(there.contains("it was configured to fail"), "{there}");
            assert!(here.contains("it was configured to fail"), "{here}");
        }
    }
    census.expect_unchanged();
}

#[test]
fn a_source_guest_whose_devices_cannot_be_saved_keeps_running() {
    alone!();
    let census = Census::take();
    let kind = rig::kinds()[0];
    let quirks = Quirks {
        save: Obeys::No,
        ..Quirks::default()
    };
    let source = rig::source(kind, &settings(), quirks);
    let destination = rig::destination(kind, &settings(), Quirks::default());
    let (listener, to) = rig::listen();
    let ended = rig::migrate(&source, &destination, listener, &to, &options());
    let (here, _) = ended.stayed(&source, &destination);
    assert!(here.contains("it was configured to fail"), "{here}");
    drop((source, destination));
    census.expect_unchanged();
}

#[test]
fn a_panic_on_either_side_ends_the_migration_and_not_the_source() {
    alone!();
    let census = Census::take();
    let kind = rig::kinds()[0];
    for (save, load) in [(Obeys::Panics, Obeys::Yes), (Obeys::Yes, Obeys::Panics)] {
        let quirks = Quirks {
            save,
            ..Quirks::default()
        };
        let source = rig::source(kind, &settings(), quirks);
        let quirks = Quirks {
            load,
            ..Quirks::default()
        };
        let destination = rig::destination(kind, &settings(), quirks);
        let (listener, to) = rig::listen();
        let ended = rig::migrate(&source, &destination, listener, &to, &options());
        let (here, there) = ended.stayed(&source, &destination);
        let panicked = match save {
            Obeys::Panics => here,
            _ => {
                assert!(here.contains("panicked"), "the source received: {here}");
                there
            }
        };
        assert!(panicked.contains("panicked"), "{panicked}");
    }
    census.expect_unchanged();
}

#[test]
fn connections_that_close_without_data_are_ignored() {
    alone!();
    let census = Census::take();
    let kind = rig::kinds()[0];
    let source = rig::source(kind, &settings(), Quirks::default());
    let destination = rig::destination(kind, &settings(), Quirks::default());
    let (listener, to) = rig::listen();
    for _ in 0..3 {
        drop(to.connect(Duration::from_secs(10)).unwrap());
    }
    let ended = rig::migrate(&source, &destination, listener, &to, &options());
    ended.arrived(&source, &destination, "others hung up before");
    drop((source, destination));
    census.expect_unchanged();
}

#[test]
fn unknown_clients_end_no_migration() {
    alone!();
    let census = Census::take();
    let kind = rig::kinds()[0];
    let source = rig::source(kind, &settings(), Quirks::default());
    let destination = rig::destination(kind, &settings(), Quirks::default());
    let (listener, to) = rig::listen();
    let Address::Tcp { host, port } = &to else {
        panic!("{to}");
    };
    let opening = [&b"\x11\x22\x33\x44"[..], &[0xee; 60]].concat();
    let strangers = [
        &b"GET / HTTP/1.1\r\n\r\n"[..],
        &[0; 4096],
        &opening,
        // A partial message, and none.
        b"\x11\x22\x33",
        b"",
    ];
    let strangers = strangers.map(|words| {
        let mut stream = TcpStream::connect((host.as_str(), *port)).unwrap();
        stream.write_all(words).unwrap();
        stream
    });
    let options = options();
    let controls = [Control::new(), Control::new()];
    let both = [&options, &options];
    let ended = rig::run(
        &source,
        &destination,
        listener,
        &to,
        both,
        &controls,
        &|_| {},
    );
    ended.arrived(&source, &destination, "beside strangers");
    let turned_away: u64 = controls[1].rejected_connections().into_values().sum();
    assert_eq!(turned_away, 3, "{:?}", controls[1].rejected_connections());
    drop((strangers, source, destination));
    census.expect_unchanged();
}

/// With much data to send, only the length itself is in transit on main.
#[test]
fn a_damaged_length_on_main_does_not_hang_a_long_round() {
    alone!();
    let census = Census::take();
    let kind = rig::kinds()[0];
    let large = GuestSettings {
        ram_bytes: 96 << 20,
        ..settings()
    };
    let source = rig::source(kind, &large, Quirks::default());
    for (name, byte) in [("Start section #1", 5), ("list of RAM blocks #1", 8)] {
        let destination = rig::destination(kind, &large, Quirks::default());
        let (listener, address) = rig::listen();
        let unit = Unit {
            socket: Some(Socket::Main),
            back: false,
            name: name.to_owned(),
        };
        let action = Action::Flip { byte, mask: 0x80 };
        let rule = Units::new(Some(Fault { unit, action }));
        let (proxy, to) = Proxy::loopback(&address, rule).unwrap();
        let ended = rig::migrate(&source, &destination, listener, &to, &short_timeouts());
        assert!(proxy.finish().into_log().fired);
        let errors = ended.stayed(&source, &destination);
        assert!(
            errors.0.contains("a record of the main channel"),
            "{errors:?}"
        );
    }
    drop(source);
    census.expect_unchanged();
}

/// A separate thread detects it, while others work and the main thread continues to read.
#[test]
fn a_damaged_compressed_page_is_named_on_both_sides_and_the_guest_stays() {
    alone!();
    let census = Census::take();
    let kind = rig::kinds()[0];
    let source = rig::source(kind, &settings(), Quirks::default());
    for (threads, number) in [("1", 3), ("8", 40), ("8", 900)] {
        let mut options = options();
        for (name, value) in [
            ("compress", "on"),
            ("compress-threads", threads),
            ("decompress-threads", threads),
            // Pages of zeros are streams too: any record is suitable.
            ("zero-page-detection", "none"),
        ] {
            options.set(name, value).unwrap();
        }
        let destination = rig::destination(kind, &settings(), Quirks::default());
        let (listener, address) = rig::listen();
        let unit = Unit {
            socket: Some(Socket::Main),
            back: false,
            name: format!("page #{number}"),
        };
        // After offset and length: the first byte of the stream.
        let action = Action::Flip {
            byte: 12,
            mask: 0x80,
        };
        let rule = Units::new(Some(Fault { unit, action }));
        let (proxy, to) = Proxy::loopback(&address, rule).unwrap();
        let ended = rig::migrate(&source, &destination, listener, &to, &options);
        assert!(proxy.finish().into_log().fired);
        let errors = ended.stayed(&source, &destination);
        // A page that does not shrink is no stream: the section's checksum detects the damage.
        let named = |error: &str| {
            error.contains("of RAM block") && error.contains("no complete zlib stream")
                || error.contains("checksum of the main channel")
        };
        assert!(named(&errors.0) && named(&errors.1), "{errors:?}");
        assert!(!ended.timed_out(), "{errors:?}");
    }
    drop(source);
    census.expect_unchanged();
}

#[test]
fn a_thread_that_cannot_compress_fails_the_migration_with_its_reason_and_the_guest_keeps_running() {
    alone!();
    let census = Census::take();
    let kind = rig::kinds()[0];
    let source = rig::source(kind, &settings(), Quirks::default());
    for wait in [true, false] {
        let options = Options {
            stream: StreamOptions {
                compress: true,
                levels: Levels {
                    compress: 42,
                    ..Levels::default()
                },
                ..options().stream
            },
            compress_wait_thread: wait,
            ..options()
        };
        let destination = rig::destination(kind, &settings(), Quirks::default());
        let (listener, to) = rig::listen();
        let ended = rig::migrate(&source, &destination, listener, &to, &options);
        let errors = ended.stayed(&source, &destination);
        assert!(
            errors.0.contains("compress level 42 is out of range 0..=9"),
            "{errors:?}"
        );
    }
    drop(source);
    census.expect_unchanged();
}

/// Its own connections fill the whole accept queue.
#[test]
fn a_cancel_ends_a_migration_whose_connections_are_not_accepted() {
    alone!();
    let census = Census::take();
    let source = rig::source(rig::kinds()[0], &settings(), Quirks::default());
    let folder = tempfile::tempdir().unwrap();
    let path = folder.path().join("s");
    let patient = Options {
        limits: Limits {
            handshake_timeout: Duration::from_secs(600),
            ..options().limits
        },
        ..options()
    };
    for unix in [true, false] {
        let (socket, to) = rig::listen_without_room(unix.then_some(&path));
        let control = Control::new();
        let outcome = std::thread::scope(|scope| {
            let migrating =
                scope.spawn(|| hotlift::migrate(&source, &to, &patient, &control, &|_| {}));
            rig::wait_readable(&socket);
            control.cancel();
            migrating.join().unwrap()
        });
        assert!(
            matches!(outcome, Err(MigrationError::Cancelled)),
            "{outcome:?}"
        );
        assert!(source.runs());
    }
    drop(source);
    census.expect_unchanged();
}

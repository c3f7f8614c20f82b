//! Tests that a cancel ends a relay in every phase and in every wait.

use std::io::Write;
use std::thread;
use std::time::{Duration, Instant};

use hotlift::relay::{Ownership, RelaySettings};
use hotlift::transport::Stream;
use hotlift::{Address, MigrationError, Status};
use hotlift_wire::main_channel::{MainEncoder, MainEvent};
use hotlift_wire::{PAGE_SIZE, RamBlockEntry};

use super::destination::{Failure, Moment};
use super::log::{Event, Log};
use super::recording::{Recording, configuration, page_of};
use super::rig::{DEADLINE, Relay, accept, destination, listen, settings, until};
use super::source::{Ending, play};

/// Returns settings of a relay with timeouts longer than a test: only the cancel ends it.
fn long_timeouts(options: &[(&str, &str)]) -> RelaySettings {
    let mut settings = settings(options);
    settings.limits.handshake_timeout = 10 * DEADLINE;
    settings
}

fn ways() -> [RelaySettings; 2] {
    [
        long_timeouts(&[("multifd", "off")]),
        long_timeouts(&[("multifd-compression", "zstd")]),
    ]
}

/// Cancels `relay`, which must end with the cancel as its error.
fn cancel(relay: Relay, what: &str) {
    let control = relay.control.clone();
    control.cancel();
    let error = relay.outcome(what).unwrap_err();
    assert!(
        matches!(error, MigrationError::Cancelled),
        "{what}: {error}"
    );
    assert_eq!(control.status(), Status::Cancelled, "{what}");
}

#[test]
fn before_any_source_has_connected() {
    let relay = Relay::start(
        &"tcp:127.0.0.1:1".parse().unwrap(),
        &long_timeouts(&[]),
        true,
    );
    cancel(relay, "no source has connected");
}

#[test]
fn while_a_connection_is_silent() {
    let small = Recording::small_multifd(2);
    for sent in [0, 3, 8, 40] {
        let relay = Relay::start(
            &"tcp:127.0.0.1:1".parse().unwrap(),
            &long_timeouts(&[]),
            true,
        );
        let mut stream = &relay.address.connect(DEADLINE).unwrap();
        stream.write_all(&small.main[..sent]).unwrap();
        thread::sleep(Duration::from_millis(60));
        cancel(relay, &format!("{sent} bytes of main"));
    }
}

/// Runs a relay between `recording`'s source and a destination with these failures, and cancels it once `reached` returns true.
fn cancel_when(
    recording: &Recording,
    way: &RelaySettings,
    (ending, fails): (Ending, Option<(Moment, Failure)>),
    reached: impl Fn(&Relay, &Log) -> bool,
    what: &str,
) {
    let log = Log::default();
    let channels = way.outgoing.channels();
    let (_folder, destination) = destination(recording, channels, fails, &log);
    let relay = Relay::start(&destination.address, way, false);
    let to = relay.address.clone();
    thread::scope(|scope| {
        let arriving = scope.spawn(|| destination.run());
        let playing = scope.spawn(|| play(recording, &to, ending, &log));
        until(what, || {
            log.has(Event::SourceConnected) && reached(&relay, &log)
        });
        cancel(relay, what);
        log.note(Event::RelaysEnded);
        assert_ne!(playing.join().unwrap().shut, Some(0), "{what}");
        assert!(!arriving.join().unwrap().eof, "{what}");
    });
}

/// Returns a condition that becomes true after `time`: a thread's wait is not visible from outside.
fn after(time: Duration) -> impl Fn(&Relay, &Log) -> bool {
    let since = Instant::now();
    move |_, _| since.elapsed() > time
}

const PAUSE: Duration = Duration::from_millis(300);

#[test]
fn while_channels_are_missing() {
    let mut recording = Recording::small_multifd(2);
    recording.channels.truncate(1);
    recording.channels[0][24] = 1;
    let quiet = (Ending::FallsSilentAt(recording.main.len()), None);
    for way in ways() {
        cancel_when(
            &recording,
            &way,
            quiet,
            after(PAUSE),
            "a channel is missing",
        );
    }
}

#[test]
fn while_the_source_sends_nothing() {
    for recording in [Recording::small(), Recording::small_multifd(2)] {
        let ends = recording.events();
        let ends = ends.iter().filter(|(_, event)| *event == MainEvent::RamEos);
        for (at, _) in ends {
            for way in ways() {
                let quiet = (Ending::FallsSilentAt(*at), None);
                let active = |relay: &Relay, _: &Log| relay.control.status() == Status::Active;
                // The first EOS ends the set-up: the relay is not active before it.
                if *at == recording.position(|event| *event == MainEvent::RamEos) {
                    cancel_when(&recording, &way, quiet, after(PAUSE), "set-up");
                } else {
                    cancel_when(&recording, &way, quiet, active, "RAM");
                }
            }
        }
    }
}

#[test]
fn while_a_channel_does_not_reach_a_sync_point() {
    let mut recording = Recording::small_multifd(2);
    let length = recording.channels[1].len();
    recording.channels[1].truncate(length - 2 * 1344);
    // The connection stays open: a lost one would end the relay.
    let ending = (Ending::FallsSilentAt(recording.main.len()), None);
    for way in ways() {
        let active = |relay: &Relay, _: &Log| relay.control.status() == Status::Active;
        cancel_when(&recording, &way, ending, active, "no SYNC");
    }
}

/// Checks that main closes first, and that then each channel takes more than its buffers hold until its source closes it.
fn closes_main_and_reads_channels(main: &Stream, channels: Vec<Stream>) {
    while !matches!(main.read_some(&mut [0; 512]), Ok(0) | Err(_)) {}
    for channel in channels {
        (&channel).write_all(&vec![0; 8 << 20]).unwrap();
    }
}

#[test]
fn channels_of_a_qemu_stay_alive_until_it_closes_them() {
    let recording = Recording::small_multifd(2);
    let set_up = recording.position(|event| *event == MainEvent::RamEos);
    let rests_at = recording.boundaries().into_iter().find(|at| *at > set_up);
    let rests_at = rests_at.unwrap();
    // A relay that tries to connect its destination, and one at a sync point.
    for has_destination in [false, true] {
        let way = long_timeouts(&[("multifd-compression", "zstd")]);
        let log = Log::default();
        let (_folder, destination) = destination(&recording, way.outgoing.channels(), None, &log);
        let (_nowhere, listener, nowhere) = listen(true);
        drop(listener);
        let to = if has_destination {
            &destination.address
        } else {
            &nowhere
        };
        let relay = Relay::start(to, &way, false);
        let connect = || relay.address.connect(DEADLINE).unwrap();
        let mut main = &connect();
        let channels: Vec<Stream> = recording.channels.iter().map(|_| connect()).collect();
        for (mut channel, bytes) in channels.iter().zip(&recording.channels) {
            channel.write_all(&bytes[..bytes.len() / 2]).unwrap();
        }
        thread::scope(|scope| {
            let arriving = has_destination.then(|| scope.spawn(|| destination.run()));
            let _ = main.write_all(&recording.main[..rests_at]);
            thread::sleep(PAUSE);
            relay.control.cancel();
            closes_main_and_reads_channels(main, channels);
            let what = "a source that closes its channels";
            assert!(relay.outcome(what).is_err());
            log.note(Event::RelaysEnded);
            if let Some(arriving) = arriving {
                assert!(!arriving.join().unwrap().eof);
            }
        });
    }
}

#[test]
fn while_the_destination_sends_nothing() {
    let recording = Recording::small();
    for way in ways() {
        for moment in [Moment::Connected, Moment::Opening, Moment::Loaded] {
            let stalls = (Ending::LetsGo, Some((moment, Failure::Stalls)));
            let what = format!("{moment:?}");
            cancel_when(&recording, &way, stalls, after(PAUSE), &what);
        }
    }
}

/// Returns the start of a stream with many more pages than sockets hold.
fn large() -> Vec<u8> {
    let bytes = 8 << 20;
    let mut main = Vec::new();
    let mut encoder = MainEncoder::new(&configuration(), &mut main).unwrap();
    let block = RamBlockEntry::new("pc.ram", bytes);
    encoder.ram_start(&[block], false, &mut main).unwrap();
    encoder.ram_part(&mut main).unwrap();
    for number in 0..bytes / PAGE_SIZE as u64 {
        let at = number * PAGE_SIZE as u64;
        let page = page_of(0, number, 0);
        encoder.normal_page(0, at, &page, &mut main).unwrap();
    }
    encoder.ram_eos(&mut main).unwrap();
    main
}

#[test]
fn while_the_destination_reads_nothing() {
    let main = large();
    for way in ways() {
        let log = Log::default();
        let fails = Some((Moment::RamStart, Failure::Stalls));
        let channels = way.outgoing.channels();
        let (_folder, destination) = destination(&Recording::small(), channels, fails, &log);
        let relay = Relay::start(&destination.address, &way, false);
        let mut stream = &relay.address.connect(DEADLINE).unwrap();
        thread::scope(|scope| {
            let arriving = scope.spawn(|| destination.run());
            let writing = scope.spawn(|| stream.write_all(&main));
            until("RAM", || relay.control.status() == Status::Active);
            // Until all buffers are full.
            thread::sleep(PAUSE);
            cancel(relay, "the destination takes nothing");
            log.note(Event::RelaysEnded);
            assert!(writing.join().unwrap().is_err(), "the source was let go");
            assert!(!arriving.join().unwrap().eof);
        });
    }
}

#[test]
fn while_a_passed_through_stream_is_not_read() {
    let main = Recording::small().with_postcopy_advise().main;
    let folder = tempfile::tempdir().unwrap();
    let address = Address::Unix {
        path: folder.path().join("socket"),
    };
    let listener = address.listen().unwrap();
    let relay = Relay::start(&address, &ways()[0], false);
    let mut stream = &relay.address.connect(DEADLINE).unwrap();
    thread::scope(|scope| {
        let writing = scope.spawn(|| {
            stream.write_all(&main).unwrap();
            let zeros = vec![0; 1 << 20];
            while stream.write_all(&zeros).is_ok() {}
        });
        until("a stream that is passed through", || {
            relay.control.status() == Status::Active
        });
        let taken = accept(&listener, DEADLINE);
        // Until all buffers are full.
        thread::sleep(PAUSE);
        cancel(relay, "no process reads what is passed through");
        writing.join().unwrap();
        drop(taken);
    });
}

#[test]
fn a_cancel_after_the_commit_changes_nothing() {
    let recording = Recording::small();
    let log = Log::default();
    let (_folder, destination) = destination(&recording, 0, None, &log);
    let of_hook = log.clone();
    let hook = Box::new(move || match of_hook.has(Event::SourceMayClose) {
        true => Ownership::Released,
        false => Ownership::Unknown,
    });
    let relay = Relay::start_with(&destination.address, &ways()[0], false, Some(hook));
    let to = relay.address.clone();
    thread::scope(|scope| {
        let arriving = scope.spawn(|| destination.run());
        scope.spawn(|| play(&recording, &to, Ending::Keeps, &log));
        until("SHUT(0)", || log.has(Event::SourceToldShut(0)));
        relay.control.cancel();
        // The source releases the guest at the same moment: it must run somewhere.
        log.note(Event::SourceMayClose);
        relay.outcome("a late cancel").unwrap();
        assert!(arriving.join().unwrap().eof);
    });
}

//! Tests that the guest never runs on both sides, whatever fails at any time.

use std::sync::Arc;
use std::sync::atomic::{AtomicUsize, Ordering};
use std::thread;
use std::time::Duration;

use hotlift::MigrationError;
use hotlift::relay::{Ownership, RelaySettings};
use hotlift_wire::main_channel::{MainEvent, SectionKind};

use super::destination::{Failure, Moment};
use super::log::{Event, Log};
use super::recording::Recording;
use super::rig::{AsksOwnership, Relay, destination, migrate, settings, until};
use super::source::{Ending, play};

/// Count of concurrent migrations, which mostly wait.
const BESIDE: usize = 8;

fn channels() -> RelaySettings {
    settings(&[("multifd-compression", "zstd"), ("multifd-channels", "2")])
}

fn off() -> RelaySettings {
    settings(&[("multifd", "off")])
}

/// Calls `each` for all of `items`, some concurrently.
fn for_all<T: Sync>(items: &[T], each: impl Fn(&T) + Sync) {
    let next = AtomicUsize::new(0);
    thread::scope(|scope| {
        for _ in 0..BESIDE {
            scope.spawn(|| {
                while let Some(item) = items.get(next.fetch_add(1, Ordering::SeqCst)) {
                    each(item);
                }
            });
        }
    });
}

#[test]
fn a_destination_that_fails_early_leaves_the_guest_with_the_source() {
    let mut cases = Vec::new();
    for moment in [
        Moment::Connected,
        Moment::Opening,
        Moment::RamStart,
        Moment::RamEnd,
        Moment::Loaded,
    ] {
        for failure in [Failure::Dies, Failure::Refuses] {
            for way in [vec![channels()], vec![off()], vec![channels(), channels()]] {
                for recording in [Recording::small(), Recording::small_multifd(2)] {
                    cases.push((moment, failure, way.clone(), recording));
                }
            }
        }
    }
    for_all(&cases, |(moment, failure, way, recording)| {
        let fails = Some((*moment, *failure));
        let outcome = migrate(recording, way, fails, Ending::LetsGo);
        let what = format!("{failure:?} at {moment:?} behind {} relays", way.len());
        outcome.assert_kept(&what);
        assert!(
            outcome.received.shut.is_none_or(|value| value == 1),
            "{what}"
        );
    });
}

#[test]
fn a_destination_that_refuses_is_quoted_at_the_source() {
    let way = [channels(), off()];
    let fails = Some((Moment::Loaded, Failure::Refuses));
    let outcome = migrate(&Recording::small(), &way, fails, Ending::LetsGo);
    for relay in &outcome.relays {
        let line = relay.as_ref().unwrap_err().chain();
        // The line contains this once, however many relays have forwarded it.
        let count = line.matches("the destination aborted").count();
        assert_eq!(count, 1, "{line}");
    }
}

#[test]
fn a_destination_that_does_not_answer_the_opening_times_out() {
    let mut way = [off(), off()];
    for hop in &mut way {
        hop.limits.handshake_timeout = Duration::from_millis(500);
    }
    for count in [1, 2] {
        let fails = Some((Moment::Opening, Failure::Stalls));
        let outcome = migrate(&Recording::small(), &way[..count], fails, Ending::LetsGo);
        outcome.assert_kept("no PONG");
        let line = outcome.relays[count - 1].as_ref().unwrap_err().chain();
        assert!(line.contains("answer to the start of the stream"), "{line}");
    }
}

#[test]
fn a_destination_with_a_lost_channel_is_not_awaited() {
    let fails = Some((Moment::Loaded, Failure::LosesChannel));
    let outcome = migrate(&Recording::small(), &[channels()], fails, Ending::LetsGo);
    outcome.assert_kept("a channel is gone");
    let line = outcome.relays[0].as_ref().unwrap_err().chain();
    assert!(line.contains("multifd channel 0 was closed"), "{line}");
}

#[test]
fn a_destination_that_fails_after_the_commit_leaves_the_source_in_doubt() {
    for (mut way, failure) in [
        (vec![off()], Failure::Dies),
        (vec![off()], Failure::Refuses),
        (vec![channels(), off()], Failure::Dies),
        (vec![channels(), off()], Failure::Refuses),
    ] {
        let fails = Some((Moment::Eof, failure));
        for relay in &mut way {
            // A relay in doubt cannot answer queries.
            relay.limits.settle_timeout = Duration::from_secs(1);
            relay.limits.handshake_timeout = Duration::from_secs(5);
        }
        let outcome = migrate(&Recording::small(), &way, fails, Ending::LetsGo);
        assert_eq!(outcome.received.shut, Some(0), "{failure:?}");
        for relay in &outcome.relays {
            let error = relay.as_ref().unwrap_err();
            let wanted = match failure {
                Failure::Refuses => matches!(error, MigrationError::Destination { .. }),
                _ => matches!(error, MigrationError::InDoubt),
            };
            assert!(wanted, "{failure:?}: {}", error.chain());
        }
    }
}

/// Returns positions in main at which a source may be cut: after all records, and after every byte behind RAM.
fn cuts(recording: &Recording) -> Vec<usize> {
    let devices = recording.position(|event| {
        let kind = SectionKind::Full;
        matches!(event, MainEvent::SectionStart { kind: it, .. } if *it == kind)
    });
    let mut cuts = recording.boundaries();
    // A source that sends only magic and version is a port probe.
    cuts.retain(|at| (9..devices).contains(at));
    let text = recording.events().last().unwrap().0 + 12;
    cuts.extend(devices..text);
    cuts.extend((text..recording.main.len()).step_by(17));
    cuts
}

#[test]
fn a_source_with_return_path_that_cancels_anywhere_never_starts_the_destination() {
    for recording in [Recording::small(), Recording::small_multifd(2)] {
        let mut cuts = cuts(&recording);
        // Also after the last byte: the source was not asked to release the guest.
        cuts.push(recording.main.len());
        for_all(&cuts, |at| {
            let way = [if at % 2 == 0 { off() } else { channels() }];
            let outcome = migrate(&recording, &way, None, Ending::CancelsAt(*at));
            // If SHUT arrives at the moment of the cancel, the source looks like one that releases the guest.
            if *at < recording.main.len() || outcome.received.shut != Some(0) {
                outcome.assert_kept(&format!("{} cut to {at}", recording.name));
            }
        });
    }
}

#[test]
fn a_source_without_return_path_that_cancels_anywhere_never_starts_the_destination() {
    let recording = Recording::small().without_return_path();
    let eof = recording.position(|event| *event == MainEvent::Eof);
    let mut cuts = cuts(&recording);
    // A stream that ends with EOF is complete without a description.
    cuts.retain(|at| *at != eof + 1);
    for_all(&cuts, |at| {
        let way = [if at % 2 == 0 { off() } else { channels() }];
        let outcome = migrate(&recording, &way, None, Ending::CancelsAt(*at));
        outcome.assert_kept(&format!("cut to {at} of {}", recording.main.len()));
    });
}

#[test]
fn a_source_that_cancels_anywhere_in_a_recorded_stream_never_starts_the_destination() {
    let mut cases = Vec::new();
    for name in ["7.2-off", "7.2-zlib", "10.0-none"] {
        let recording = Recording::load(name).with_return_path();
        let cuts = cuts(&recording);
        let step = cuts.len() / 40;
        let chosen: Vec<_> = cuts.into_iter().step_by(step).collect();
        cases.extend(chosen.into_iter().map(|at| (recording.clone(), at)));
    }
    for_all(&cases, |(recording, at)| {
        let mut way = [channels(), off()];
        way[0].uuid = Some(super::recording::UUID);
        let outcome = migrate(recording, &way, None, Ending::CancelsAt(*at));
        outcome.assert_kept(&format!("{} cut to {at}", recording.name));
    });
}

#[test]
fn a_lost_channel_leaves_the_guest_with_the_source() {
    let recording = Recording::small_multifd(2);
    let length = recording.channels[1].len();
    // The cuts are before the last SYNC: between headers, in headers, in pages. (Only the source knows of a channel that has
    // not identified itself.)
    let cuts = (64..length - 1344).step_by(6007).chain([64 + 1344]);
    let cuts: Vec<usize> = cuts.collect();
    for_all(&cuts, |at| {
        let ending = Ending::LosesChannel(1, *at);
        let mut way = [channels()];
        way[0].limits.handshake_timeout = Duration::from_secs(2);
        let outcome = migrate(&recording, &way, None, ending);
        outcome.assert_kept(&format!("channel 1 cut to {at}"));
    });
}

/// Moves the small guest with a hook. Returns the relay's result, and true if the destination received EOF.
fn with_hook(hook: AsksOwnership, ending: Ending, log: &Log) -> (Result<(), MigrationError>, bool) {
    let recording = Recording::small();
    let (_folder, destination) = destination(&recording, 0, None, log);
    let relay = Relay::start_with(&destination.address, &off(), false, Some(hook));
    let to = relay.address.clone();
    thread::scope(|scope| {
        let arriving = scope.spawn(|| destination.run());
        play(&recording, &to, ending, log);
        let outcome = relay.outcome("with a hook").map(drop);
        log.note(Event::RelaysEnded);
        (outcome, arriving.join().unwrap().eof)
    })
}

#[test]
fn the_destination_starts_only_after_the_hook_reports_the_release() {
    let log = Log::default();
    let asked = Arc::new(AtomicUsize::new(0));
    let of_hook = (log.clone(), Arc::clone(&asked));
    // The source keeps its connection: only the hook knows the ownership.
    let hook: AsksOwnership = Box::new(move || {
        assert!(!of_hook.0.has(Event::DestinationReadsEof));
        match of_hook.1.fetch_add(1, Ordering::SeqCst) {
            0..20 => Ownership::Unknown,
            _ => Ownership::Released,
        }
    });
    let (outcome, eof) = with_hook(hook, Ending::Keeps, &log);
    outcome.unwrap();
    assert!(eof && asked.load(Ordering::SeqCst) == 21);
    assert!(log.has(Event::SourceToldShut(0)));
}

#[test]
fn a_source_that_takes_the_guest_back_by_the_hooks_report_keeps_it() {
    let log = Log::default();
    let (outcome, eof) = with_hook(Box::new(|| Ownership::Kept), Ending::LetsGo, &log);
    assert!(outcome.is_err());
    assert!(!eof);
}

#[test]
fn a_source_with_an_open_connection_has_not_released_the_guest() {
    let recording = Recording::small();
    let log = Log::default();
    let (_folder, destination) = destination(&recording, 0, None, &log);
    let relay = Relay::start(&destination.address, &off(), false);
    let to = relay.address.clone();
    thread::scope(|scope| {
        let arriving = scope.spawn(|| destination.run());
        scope.spawn(|| play(&recording, &to, Ending::Keeps, &log));
        until("SHUT(0)", || log.has(Event::SourceToldShut(0)));
        // Long enough to detect a relay that does not wait.
        assert!(relay.has_ended(Duration::from_millis(300)).is_none());
        assert!(!log.has(Event::DestinationReadsEof));
        log.note(Event::SourceMayClose);
        relay.outcome("a source that keeps").unwrap();
        assert!(arriving.join().unwrap().eof);
    });
}

#[test]
fn a_monitored_source_may_be_silent_during_setup() {
    let recording = Recording::small();
    let log = Log::default();
    let (_folder, destination) = destination(&recording, 0, None, &log);
    for is_watched in [true, false] {
        let hook = is_watched.then(|| Box::new(|| Ownership::Unknown) as AsksOwnership);
        let mut settings = off();
        settings.limits.handshake_timeout = Duration::from_millis(200);
        let relay = Relay::start_with(&destination.address, &settings, false, hook);
        let to = relay.address.clone();
        thread::scope(|scope| {
            let source = scope.spawn(|| play(&recording, &to, Ending::FallsSilentAt(60), &log));
            if is_watched {
                let ended = relay.has_ended(Duration::from_secs(1));
                assert!(ended.is_none(), "{ended:?}");
                relay.control.cancel();
            }
            let error = relay.outcome("with a silent source").unwrap_err();
            let timed_out = matches!(error, MigrationError::Timeout { .. });
            assert_eq!(timed_out, !is_watched, "{error}");
            source.join().unwrap();
        });
    }
}

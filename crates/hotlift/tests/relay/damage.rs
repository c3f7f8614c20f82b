//! Tests that a damaged byte between two relays never changes the guest.
//!
//! The unit tests in `stream/main_channel/tests.rs` damage each byte of main without connections. The tests here show
//! with a sample of bytes that relays act on the decoder's errors.

use std::io::{Read, Write};
use std::sync::atomic::{AtomicUsize, Ordering};
use std::thread;
use std::time::Duration;

use hotlift::relay::{RelayReport, RelaySettings};
use hotlift::{Address, Listener, MigrationError};
use hotlift_mem::PAGE_SIZE;
use hotlift_testkit::proxy::bytes::{Bytes, Carried, Direction, Flip};
use hotlift_testkit::proxy::{Proxy, Socket};
use hotlift_wire::RamBlockEntry;
use hotlift_wire::main_channel::postcopy::{PostcopyCommand, put_discard};
use hotlift_wire::main_channel::{
    Command, DeviceLengths, MainDecoder, MainEncoder, MainEvent, Step, put_packaged_head,
};
use hotlift_wire::multifd::MAGIC;
use hotlift_wire::return_path::ReturnMessage;

use super::destination::Guest;
use super::log::{Event, Log};
use super::recording::{Recording, configuration};
use super::rig::{DEADLINE, Relay, accept, destination, migrate, settings};
use super::source::{Ending, play};

/// Deadline of a damaged migration: one that takes longer waits for data that the damage has removed.
const STUCK: Duration = Duration::from_millis(1500);

/// Count of concurrent migrations, which mostly wait.
const BESIDE: usize = 12;

const MAIN: Direction = Direction::Forth(Socket::Main);

/// Direction of the only channel.
const CHANNEL: Direction = Direction::Forth(Socket::Channel(0));

/// Moves the small guest with `flip` between the relays, whose waits end after `patience`. Returns the outcome of the first
/// relay.
fn damaged(
    between: &RelaySettings,
    flip: Option<Flip>,
    patience: Duration,
    expected: &Guest,
) -> (Result<RelayReport, MigrationError>, Carried) {
    damaged_of(&Recording::small(), between, flip, patience, expected)
}

/// Does the same with `recording`'s guest.
fn damaged_of(
    recording: &Recording,
    between: &RelaySettings,
    flip: Option<Flip>,
    patience: Duration,
    expected: &Guest,
) -> (Result<RelayReport, MigrationError>, Carried) {
    let log = Log::default();
    let (_folder, destination) = destination(recording, 0, None, &log);
    let mut between = between.clone();
    let mut behind = settings(&[("multifd", "off")]);
    between.limits.handshake_timeout = patience;
    behind.limits.handshake_timeout = patience;
    let second = Relay::start(&destination.address, &behind, true);
    let (proxy, to_second) = Proxy::loopback(&second.address, Bytes::new(flip)).unwrap();
    let first = Relay::start(&to_second, &between, false);
    let to_first = first.address.clone();
    thread::scope(|scope| {
        let arriving = scope.spawn(|| destination.run());
        let playing = scope.spawn(|| play(recording, &to_first, Ending::LetsGo, &log));
        let outcomes = [first, second].map(|relay| {
            relay.has_ended(patience).unwrap_or_else(|| {
                relay.control.cancel();
                relay.outcome(&format!("{flip:?}"))
            })
        });
        log.note(Event::RelaysEnded);
        let received = playing.join().unwrap();
        let arrived = arriving.join().unwrap();
        let what = format!("{flip:?}: {outcomes:?}, {:?}", log.events());
        let devices = &arrived.guest.devices;
        let came_whole = expected.devices.starts_with(devices);
        assert!(came_whole, "{what}: a damaged byte of a device");
        if outcomes[0].is_ok() {
            assert!(arrived.eof, "{what}: success, and no EOF");
        }
        if arrived.eof {
            assert_eq!(
                received.shut,
                Some(0),
                "{what}: the source has the guest, too"
            );
            let events = log.events();
            let at = |event| events.iter().position(|&e| e == event);
            let closed = at(Event::SourceCloses);
            assert!(closed < at(Event::DestinationReadsEof), "{what}");
            assert!(arrived.guest == *expected, "{what}: another guest");
        }
        let [first, _] = outcomes;
        (first, proxy.finish().into_carried())
    })
}

/// Returns the bytes between the relays without damage. No relay is stuck then, so the deadline allows for a busy machine.
fn undamaged(between: &RelaySettings, expected: &Guest) -> Carried {
    let (outcome, carried) = damaged(between, None, DEADLINE, expected);
    outcome.unwrap();
    carried
}

/// Damages `flips`, one per migration. Returns how many of them did no harm.
fn damage_all(between: &RelaySettings, flips: &[Flip], expected: &Guest) -> usize {
    let (next, harmless) = (AtomicUsize::new(0), AtomicUsize::new(0));
    thread::scope(|scope| {
        for _ in 0..BESIDE {
            scope.spawn(|| {
                while let Some(flip) = flips.get(next.fetch_add(1, Ordering::SeqCst)) {
                    if damaged(between, Some(*flip), STUCK, expected).0.is_ok() {
                        harmless.fetch_add(1, Ordering::SeqCst);
                    }
                }
            });
        }
    });
    harmless.into_inner()
}

fn expected() -> Guest {
    let outcome = migrate(&Recording::small(), &[], None, Ending::LetsGo);
    assert_eq!(outcome.arrived.ended, Ok(()));
    outcome.arrived.guest
}

/// Returns one flip per position, with varying bits.
fn at(direction: Direction, positions: impl Iterator<Item = usize>) -> Vec<Flip> {
    positions
        .map(|at| Flip {
            direction,
            at,
            mask: 1 << (at % 8),
        })
        .collect()
}

#[test]
fn no_flipped_byte_of_main_alters_or_doubles_the_guest() {
    /// Count of samples of all bytes, and of those that may become EOF.
    const SAMPLE: usize = 12;
    let expected = expected();
    let between = settings(&[("multifd-compression", "zstd"), ("multifd-channels", "1")]);
    let carried = undamaged(&between, &expected);
    let main = &carried[&MAIN];
    let description = b"{\"devices\"";
    let mut places = main.windows(description.len());
    let text = places.position(|bytes| bytes == description).unwrap();
    let mut flips = at(MAIN, (0..text).step_by(text / SAMPLE));
    // A command that becomes EOF is the worst case.
    let commands: Vec<_> = (0..text).filter(|&at| main[at] == 8).collect();
    let sample = commands.into_iter().rev().take(SAMPLE);
    flips.extend(sample.map(|at| Flip {
        direction: MAIN,
        at,
        mask: 8,
    }));
    let harmless = damage_all(&between, &flips, &expected);
    assert!(harmless * 4 < flips.len(), "{harmless} of {}", flips.len());
}

/// If a section's type became EOF, a QEMU would run the guest without its remaining devices.
#[test]
fn no_damaged_byte_of_large_device_state_is_passed_on() {
    let recording = Recording::large_devices();
    let direct = migrate(&recording, &[], None, Ending::LetsGo);
    let expected = direct.arrived.guest;
    let between = settings(&[("multifd", "off"), ("memory-limit", "1M")]);
    let damaged = |flip| damaged_of(&recording, &between, flip, DEADLINE, &expected);
    let (outcome, carried) = damaged(None);
    outcome.unwrap();
    let main = &carried[&MAIN];
    let section = b"\x07display\0\0\0";
    let starts = (5..main.len()).filter(|&at| main[at..].starts_with(section));
    // The section's type precedes its id.
    let types: Vec<usize> = starts.map(|at| at - 5).collect();
    assert_eq!(types.len(), 5);
    for (at, mask) in [(types[0], 4), (types[2], 4), (types[3] + (6 << 20), 1)] {
        let direction = MAIN;
        let flip = Flip {
            direction,
            at,
            mask,
        };
        let (outcome, _) = damaged(Some(flip));
        let error = outcome.unwrap_err().chain();
        assert!(error.contains("CRC-32"), "{flip:?}: {error}");
    }
}

#[test]
fn no_flipped_byte_of_a_channel_or_an_answer_alters_the_guest() {
    let expected = expected();
    let between = settings(&[("multifd-compression", "zstd"), ("multifd-channels", "1")]);
    let carried = undamaged(&between, &expected);
    let channel = carried[&CHANNEL].len();
    // The opening and the first header's fields, then a sample of the rest.
    let mut flips = at(CHANNEL, (0..64 + 80).chain((144..channel).step_by(487)));
    flips.extend(at(Direction::Back, 0..carried[&Direction::Back].len()));
    let harmless = damage_all(&between, &flips, &expected);
    // Harmless: reserved bytes, the UUID of a single channel, and answers that are not awaited.
    assert!(harmless * 2 < flips.len(), "{harmless} of {}", flips.len());
}

/// Pages of method none pass from socket to socket unread. Their bytes have no checksum, so only headers are damaged: all
/// fields of the first ones, and the header bytes in a sample of the rest.
#[test]
fn no_flipped_byte_of_a_header_of_forwarded_pages_alters_the_guest() {
    let expected = expected();
    let between = settings(&[("multifd-compression", "none"), ("multifd-channels", "1")]);
    let carried = undamaged(&between, &expected);
    let channel = &carried[&CHANNEL];
    let magic = MAGIC.to_be_bytes();
    let headers = (1..channel.len()).filter(|&at| channel[at..].starts_with(&magic));
    let headers: Vec<usize> = headers.collect();
    assert!(headers.len() > 2, "{} headers", headers.len());
    let fields = headers.iter().flat_map(|&header| header..header + 80);
    let flips = at(CHANNEL, (0..64).chain(fields));
    let harmless = damage_all(&between, &flips, &expected);
    assert!(harmless * 2 < flips.len(), "{harmless} of {}", flips.len());
}

#[test]
fn no_flipped_byte_of_pages_on_main_alters_the_guest() {
    let expected = expected();
    let between = settings(&[("multifd", "off")]);
    let carried = undamaged(&between, &expected);
    let main = carried[&MAIN].len();
    let flips = at(MAIN, (0..main).step_by(main / 24));
    let harmless = damage_all(&between, &flips, &expected);
    assert!(harmless * 10 < flips.len(), "{harmless} of {}", flips.len());
}

#[test]
fn a_destination_of_another_version_is_refused_with_both_values() {
    // Last byte of the version in HELLO, after kind and length.
    let flip = Flip {
        direction: Direction::Back,
        at: 7,
        mask: 0x80,
    };
    let between = settings(&[("multifd", "off")]);
    let (outcome, _) = damaged(&between, Some(flip), DEADLINE, &expected());
    let output = outcome.unwrap_err().chain();
    for words in ["version", "the source has 4", "the destination has 132"] {
        assert!(output.contains(words), "{output}");
    }
}

/// Opaque content of a postcopy package.
const PACKAGE: &[u8] = b"LISTEN, the devices and RUN";

/// Returns the beginning of a postcopy, up to the package.
fn postcopy() -> Vec<u8> {
    let blocks = [RamBlockEntry::new("pc.ram", 16 * PAGE_SIZE as u64)];
    let mut main = Vec::new();
    let mut encoder = MainEncoder::new(&configuration(), &mut main).unwrap();
    let page_sizes = Some((PAGE_SIZE as u64, PAGE_SIZE as u64));
    for command in [
        Command::OpenReturnPath,
        Command::PostcopyAdvise { page_sizes },
    ] {
        encoder.command(command, &mut main).unwrap();
    }
    encoder.ram_start(&blocks, false, &mut main).unwrap();
    put_discard("pc.ram", 0, blocks[0].used_length, &mut main).unwrap();
    put_packaged_head(PACKAGE.len() as u64, &mut main).unwrap();
    main.extend_from_slice(PACKAGE);
    main
}

/// Answers PINGs as a QEMU does, and reads up to the package. Returns `None` if none comes.
fn package_of(listener: &Listener) -> Option<Vec<u8>> {
    let main = &accept(listener, DEADLINE).expect("a relay");
    let mut decoder = MainDecoder::new(DeviceLengths::LengthPrefixed).taking_postcopy();
    let mut unread = Vec::new();
    let mut package = None;
    loop {
        if let Some(length) = package
            && unread.len() >= length
        {
            unread.truncate(length);
            return Some(unread);
        }
        // The decoder does not accept a partial package.
        let step = package.is_none().then(|| decoder.next(&unread).unwrap());
        match step {
            Some(Step::Event { event, consumed }) => {
                match event {
                    MainEvent::Command(Command::Ping(value)) => {
                        let mut answer = Vec::new();
                        ReturnMessage::Pong(value).encode(&mut answer).unwrap();
                        { main }.write_all(&answer).unwrap();
                    }
                    MainEvent::Postcopy(PostcopyCommand::Packaged(length)) => {
                        package = Some(length as usize)
                    }
                    _ => {}
                }
                unread.drain(..consumed);
            }
            _ => {
                let mut more = [0; 4096];
                match { main }.read(&mut more) {
                    Ok(read @ 1..) => unread.extend_from_slice(&more[..read]),
                    _ => return None,
                }
            }
        }
    }
}

/// Switches over through two relays with `flip` between them. Returns the package at the destination, and the bytes between the
/// relays.
fn switched(flip: Option<Flip>) -> (Option<Vec<u8>>, Carried) {
    let there = "tcp:127.0.0.1:0".parse::<Address>().unwrap();
    let there = there.listen().unwrap();
    let second = Relay::start(
        &there.address().unwrap(),
        &settings(&[("multifd", "off")]),
        true,
    );
    let (proxy, to_second) = Proxy::loopback(&second.address, Bytes::new(flip)).unwrap();
    let first = Relay::start(&to_second, &settings(&[("multifd", "off")]), false);
    let here = first.address.connect(DEADLINE).unwrap();
    (&here).write_all(&postcopy()).unwrap();
    let package = package_of(&there);
    drop((here, there));
    for relay in [first, second] {
        let error = relay.outcome(&format!("{flip:?}")).unwrap_err();
        let may_run = matches!(error, MigrationError::PagesMissing { .. });
        assert_eq!(may_run, package.is_some(), "{flip:?}: {}", error.chain());
    }
    (package, proxy.finish().into_carried())
}

#[test]
fn no_flipped_byte_of_a_package_runs_a_guest() {
    let (package, carried) = switched(None);
    assert_eq!(package.as_deref(), Some(PACKAGE));
    let main = &carried[&MAIN];
    let mut places = main.windows(PACKAGE.len());
    let begins = places.position(|bytes| bytes == PACKAGE).unwrap();
    for flip in at(MAIN, (begins..main.len()).step_by(7)) {
        assert_eq!(switched(Some(flip)).0, None, "{flip:?}");
    }
}

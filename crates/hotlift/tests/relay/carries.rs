//! Tests that every stream of a QEMU arrives as the same guest, with any settings of the relays.

use std::io::{Read, Write};

use hotlift::relay::RelaySettings;
use hotlift_mem::PAGE_SIZE;
use hotlift_wire::main_channel::{Command, MainEncoder};
use hotlift_wire::return_path::ReturnMessage;

use super::destination::Guest;
use super::recording::{RECORDED, Recording, UUID, configuration};
use super::rig::{DEADLINE, Relay, migrate, settings};
use super::source::Ending;

/// Returns the guest that the stream gives without a relay.
fn direct(recording: &Recording) -> Guest {
    let outcome = migrate(recording, &[], None, Ending::LetsGo);
    assert_eq!(outcome.arrived.ended, Ok(()), "{}", recording.name);
    outcome.arrived.guest
}

/// Returns settings of a relay that knows the VM's UUID.
fn hop(method: &str, channels: &str) -> RelaySettings {
    let mut settings = match method {
        "off" => settings(&[("multifd", "off")]),
        "compress" => settings(&[("compress", "on"), ("compress-threads", channels)]),
        method => settings(&[
            ("multifd-compression", method),
            ("multifd-channels", channels),
        ]),
    };
    settings.uuid = Some(UUID);
    settings
}

/// Returns all kinds of outgoing sides: each method with one and three channels or threads, and no channels.
fn hops() -> Vec<RelaySettings> {
    let mut hops = vec![hop("off", "")];
    hops.extend(["1", "3"].map(|threads| hop("compress", threads)));
    for method in ["none", "zlib", "zstd"] {
        hops.extend(["1", "3"].map(|channels| hop(method, channels)));
    }
    hops
}

fn assert_same(recording: &Recording, expected: &Guest, way: &[RelaySettings]) {
    let outcome = migrate(recording, way, None, Ending::LetsGo);
    let options = way.iter().map(|hop| {
        let options = &hop.outgoing;
        let method = options.method_name();
        format!("{method} on {} channels", options.channels())
    });
    let what = format!("{} by {:?}", recording.name, options.collect::<Vec<_>>());
    outcome.assert_handed_over(&what);
    let guest = &outcome.arrived.guest;
    assert!(guest.ram == expected.ram, "{what}: RAM differs");
    assert!(guest.devices == expected.devices, "{what}: devices differ");
    assert_eq!(guest.switchover, expected.switchover, "{what}");
    if recording.has_return_path() {
        assert_eq!(outcome.received.shut, Some(0), "{what}");
        let pings: &[u32] = if recording.name.ends_with("return-path") {
            &[1]
        } else {
            &[]
        };
        assert_eq!(outcome.received.pongs, pings, "{what}");
    }
}

/// Asserts that the pages of the recorded guests equal those of the recording script and of hotlift-wire's tests; in pages 1 to
/// 15 only the first bytes count.
fn assert_is_the_recorded_guest(name: &str, guest: &Guest) {
    let (_, ram) = guest.ram.iter().find(|(name, _)| name == "pc.ram").unwrap();
    for (number, page) in ram.chunks(4096).enumerate() {
        if number / 8 % 2 == 1 {
            assert!(page[2..].iter().all(|&byte| byte == 0), "{name}: {number}");
        } else if number % 64 != 0 {
            let text = format!("tlift page {number} line 0\n");
            assert!(page[2..].starts_with(text.as_bytes()), "{name}: {number}");
        }
    }
    assert!(guest.devices.len() > 10_000, "{name}");
}

#[test]
fn every_recorded_stream_yields_the_same_guest_after_one_relay() {
    for name in RECORDED {
        let recording = Recording::load(name).with_return_path();
        let expected = direct(&recording);
        assert_is_the_recorded_guest(name, &expected);
        for hop in hops() {
            assert_same(&recording, &expected, &[hop]);
        }
    }
}

#[test]
fn every_recorded_stream_yields_the_same_guest_after_two_relays() {
    // Settings between the relays, and after them; the second relay has no data about the VM.
    let (between, behind) = (hops(), hops());
    for (number, name) in RECORDED.into_iter().enumerate() {
        let recording = Recording::load(name).with_return_path();
        let expected = direct(&recording);
        for (index, first) in between.iter().enumerate() {
            // Each stream uses another seventh of the pairs.
            let second = &behind[(index + number) % behind.len()];
            let way = [first.clone(), second.clone()];
            assert_same(&recording, &expected, &way);
        }
    }
}

#[test]
fn a_source_without_return_path_is_carried_to_its_close() {
    for name in RECORDED {
        let recording = Recording::load(name);
        let expected = direct(&recording);
        assert_same(&recording, &expected, &[hop("zstd", "3"), hop("off", "")]);
    }
}

#[test]
fn the_later_version_of_a_page_counts() {
    let recording = Recording::small();
    let expected = direct(&recording);
    for first in hops() {
        for second in hops() {
            assert_small(&recording, &expected, &[first.clone(), second]);
        }
    }
}

/// 65 MiB of device state, with a memory limit of 1 MiB for the source.
#[test]
fn device_state_is_passed_on_whatever_the_memory_limit() {
    let recording = Recording::large_devices();
    let expected = direct(&recording);
    let mut way = settings(&[("memory-limit", "1M"), ("multifd", "off")]);
    way.uuid = Some(UUID);
    for relays in 1..4 {
        let way = vec![way.clone(); relays];
        assert_small(&recording, &expected, &way);
    }
}

fn assert_small(recording: &Recording, expected: &Guest, way: &[RelaySettings]) {
    let outcome = migrate(recording, way, None, Ending::LetsGo);
    outcome.assert_handed_over("small");
    assert!(
        outcome.arrived.guest == *expected,
        "the small guest differs"
    );
    assert_eq!(outcome.received.pongs, [1]);
}

/// A QEMU with `postcopy-preempt` that switches over at once waits for an answer in its set-up, before it sends its RAM blocks.
#[test]
fn a_postcopy_source_is_answered_before_its_ram_is_known() {
    let mut main = Vec::new();
    let mut encoder = MainEncoder::new(&configuration(), &mut main).unwrap();
    let page = u64::try_from(PAGE_SIZE).unwrap();
    for command in [
        Command::OpenReturnPath,
        Command::Ping(1),
        Command::PostcopyAdvise {
            page_sizes: Some((page, page)),
        },
    ] {
        encoder.command(command, &mut main).unwrap();
    }
    // The destination is not contacted yet.
    let nobody = "tcp:192.0.2.1:1".parse().unwrap();
    let relay = Relay::start(&nobody, &settings(&[]), false);
    let stream = &relay.address.connect(DEADLINE).unwrap();
    stream.set_read_timeout(DEADLINE).unwrap();
    { stream }.write_all(&main).unwrap();
    let mut answer = [0; 8];
    { stream }.read_exact(&mut answer).unwrap();
    let (message, _) = ReturnMessage::decode(&answer).unwrap();
    assert_eq!(message, ReturnMessage::Pong(1));
    relay.control.cancel();
    relay.outcome("no process listens").unwrap_err();
}

//! Tests devices that send state before RAM. A relay forwards the state in order, with compressed RAM after it.
//! Otherwise the relay rejects the device by name, and the source keeps the guest.

use std::io::Write;
use std::thread;

use hotlift_wire::main_channel::{MainEvent, VmDescription};

use super::log::{Event, Log};
use super::recording::Recording;
use super::rig::{DEADLINE, Outcome, Relay, destination, migrate, settings};
use super::source::Ending;

/// Section id and name of the device.
const ID: u32 = 0x27;
const DEVICE: &str = "0000:00:09.0/early-device";

/// Position of the device's section.
#[derive(Debug, Clone, Copy)]
enum Place {
    BeforeStart,
    BehindStart,
}

const PLACES: [Place; 2] = [Place::BeforeStart, Place::BehindStart];

fn section(kind: u8, idstr: &str, payload: &[u8]) -> Vec<u8> {
    let mut out = vec![kind];
    out.extend(ID.to_be_bytes());
    out.push(u8::try_from(idstr.len()).unwrap());
    out.extend(idstr.as_bytes());
    out.extend([0, 0, 0, 0, 0, 0, 0, 1]);
    out.extend(payload);
    out.extend(footer());
    out
}

fn footer() -> Vec<u8> {
    [&[0x7e][..], &ID.to_be_bytes()].concat()
}

/// Returns the state of a device of 8 blocks of 2 MiB, two of which are plugged.
fn virtio_mem() -> Vec<u8> {
    let fields = [4_u64 << 30, 16 << 20, 2 << 20].map(u64::to_be_bytes);
    let behind_node = [4_u64 << 20, 0b0010_0100].map(u64::to_be_bytes);
    [fields.as_flattened(), &[0; 4], behind_node.as_flattened()].concat()
}

/// Inserts this section into `recording`, with a length of `described` bytes in the description.
fn with(mut recording: Recording, place: Place, section: &[u8], described: usize) -> Recording {
    let at = match place {
        Place::BeforeStart => {
            recording.position(|event| matches!(event, MainEvent::SectionStart { .. }))
        }
        Place::BehindStart => {
            recording.position(|event| matches!(event, MainEvent::SectionFooter)) + 5
        }
    };
    let json = VmDescription::find(&recording.main).unwrap();
    let name_length = usize::from(section[5]);
    let idstr = std::str::from_utf8(&section[6..6 + name_length]).unwrap();
    let fields = format!(r#"[{{"name":"a","type":"b","size":{described}}}]"#);
    let device = format!(r#""devices":[{{"name":"{idstr}","fields":{fields}}},"#);
    let json = String::from_utf8(json.to_vec()).unwrap();
    let longer = json.replacen(r#""devices":["#, &device, 1);
    recording
        .main
        .truncate(recording.main.len() - json.len() - 4);
    let length = u32::try_from(longer.len()).unwrap();
    recording.main.extend(length.to_be_bytes());
    recording.main.extend(longer.into_bytes());
    recording.main.splice(at..at, section.iter().copied());
    recording
}

fn with_device(recording: Recording, place: Place, payload: &[u8]) -> Recording {
    with(
        recording,
        place,
        &section(4, DEVICE, payload),
        payload.len(),
    )
}

fn through(recording: &Recording, hops: &[&[(&str, &str)]]) -> Outcome {
    let hops: Vec<_> = hops.iter().map(|options| settings(options)).collect();
    migrate(recording, &hops, None, Ending::LetsGo)
}

/// Asserts that a relay rejects the device by name, and names the solution. The destination has the devices of `honest`.
fn assert_refused(recording: &Recording, honest: &Recording, what: &str) {
    let log = Log::default();
    let (_folder, destination) = destination(honest, 2, None, &log);
    let relay = Relay::start(
        &destination.address,
        &settings(&[("multifd-channels", "2")]),
        false,
    );
    thread::scope(|scope| {
        let arriving = scope.spawn(|| destination.run());
        let connections = recording.channels.iter().chain([&recording.main]);
        let connections: Vec<_> = connections
            .map(|bytes| {
                let stream = relay.address.connect(DEADLINE).unwrap();
                let _ = { &stream }.write_all(bytes);
                stream
            })
            .collect();
        let line = relay.outcome(what).unwrap_err().chain();
        log.note(Event::RelaysEnded);
        drop(connections);
        assert!(!arriving.join().unwrap().eof, "{what}");
        assert!(line.contains(DEVICE), "{what}: {line}");
        assert!(line.contains("--multifd off"), "{what}: {line}");
    });
}

#[test]
fn a_device_of_an_unknown_layout_is_carried_in_its_place() {
    // The state has bytes that look like its end, or like a part of RAM.
    let payload = [
        b"state",
        &footer()[..],
        b"\0",
        &footer(),
        b"\x02\0\0\0\x05more",
    ]
    .concat();
    for place in PLACES {
        let recording = with_device(Recording::small_multifd(2), place, &payload);
        let direct = through(&recording, &[]);
        assert_eq!(direct.arrived.ended, Ok(()), "{place:?}");
        let zstd: &[_] = &[("multifd-compression", "zstd"), ("multifd-channels", "3")];
        let off: &[_] = &[("multifd", "off")];
        for hops in [&[zstd][..], &[off], &[zstd, zstd], &[zstd, off]] {
            let outcome = through(&recording, hops);
            let what = format!("{place:?} by {hops:?}");
            outcome.assert_handed_over(&what);
            assert!(outcome.arrived.guest == direct.arrived.guest, "{what}");
            let report = outcome.relays[0].as_ref().unwrap();
            assert_eq!(report.passed_through, None, "{what}");
        }
    }
}

#[test]
fn a_device_of_a_known_layout_is_carried_without_multifd() {
    let name = "0000:00:09.0/virtio-mem-device-early";
    for place in PLACES {
        let payload = virtio_mem();
        let section = section(4, name, &payload);
        let recording = with(Recording::small(), place, &section, payload.len());
        let direct = through(&recording, &[]);
        let outcome = through(&recording, &[&[("multifd-channels", "2")]]);
        let what = format!("{place:?}");
        outcome.assert_handed_over(&what);
        assert!(outcome.arrived.guest == direct.arrived.guest, "{what}");
        let report = outcome.relays[0].as_ref().unwrap();
        assert_eq!(report.passed_through, None, "{what}");
    }
}

#[test]
fn a_device_of_an_unknown_layout_is_passed_through_without_multifd() {
    for place in PLACES {
        let recording = with_device(Recording::small(), place, b"state");
        let outcome = through(&recording, &[&[("multifd", "off")]]);
        let report = outcome.relays[0].as_ref().unwrap();
        let why = report.passed_through.as_deref().unwrap_or_default();
        assert!(why.contains(DEVICE), "{place:?}: {why}");
        assert_eq!(outcome.arrived.ended, Ok(()), "{place:?}");
    }
}

#[test]
fn state_that_forges_its_own_end_is_refused() {
    // A whole part of RAM, as inserted by a guest that controls the state.
    let part = b"\x02\0\0\0\0\0\0\0\0\0\0\0\x10\x7e\0\0\0\0";
    let payload = [b"state", &footer()[..], part, b"more"].concat();
    let recording = with_device(Recording::small_multifd(2), Place::BehindStart, &payload);
    assert_refused(&recording, &recording, "a forged end");
}

#[test]
fn state_whose_length_is_not_in_the_description_is_refused() {
    let section = section(4, DEVICE, b"state");
    for place in PLACES {
        let described = |length| with(Recording::small_multifd(2), place, &section, length);
        assert_refused(&described(6), &described(5), &format!("{place:?}"));
    }
}

#[test]
fn a_device_that_sends_state_while_the_guest_runs_is_refused_by_name() {
    let section = section(1, DEVICE, b"state");
    let recording = with(Recording::small_multifd(2), Place::BehindStart, &section, 5);
    assert_refused(&recording, &recording, "a START section");
}

//! Tests the phase before a QEMU accepts the stream. A relay reads only the stream setup, whatever the channels do, and
//! rejects a stream that no QEMU accepts.

use std::io::Write;
use std::net::{Shutdown, TcpStream};
use std::thread;
use std::time::Duration;

use hotlift::Address;
use hotlift::relay::RelaySettings;
use hotlift::transport::Stream;

use super::log::{Event, Log};
use super::recording::Recording;
use super::rig::{DEADLINE, Relay, destination, settings};

/// Timeout for a silent destination.
const SOON: Duration = Duration::from_secs(2);

fn connect(to: &Address) -> Stream {
    to.connect(DEADLINE).unwrap()
}

/// Sends `recording` to a relay from a source that ends its channels before it writes on main. This happens without return path
/// if the channels fit into the sockets' buffers. `before` connects first.
fn channels_close_first<T>(
    recording: &Recording,
    over_tcp: bool,
    before: impl FnOnce(&Address) -> T,
) -> Result<bool, String> {
    let way = settings(&[("multifd-channels", "2"), ("multifd-compression", "none")]);
    let log = Log::default();
    let (_folder, destination) = destination(recording, 2, None, &log);
    let relay = Relay::start(&destination.address, &way, over_tcp);
    let before = before(&relay.address);
    thread::scope(|scope| {
        let arriving = scope.spawn(|| destination.run());
        for bytes in &recording.channels {
            let stream = &connect(&relay.address);
            { stream }.write_all(bytes).unwrap();
            stream.shutdown(Shutdown::Both);
        }
        let main = &connect(&relay.address);
        let _ = { main }.write_all(&recording.main);
        main.shutdown(Shutdown::Both);
        let outcome = relay.outcome(&recording.name);
        log.note(Event::RelaysEnded);
        let arrived = arriving.join().unwrap();
        drop(before);
        outcome
            .map(|_| arrived.ended == Ok(()))
            .map_err(|error| error.chain())
    })
}

#[test]
fn channels_closed_early_are_read_to_their_end() {
    for name in ["10.0-zstd", "7.2-zstd"] {
        let arrived = channels_close_first(&Recording::load(name), false, |_| ());
        assert_eq!(arrived, Ok(true), "{name}");
    }
}

#[test]
fn a_channel_of_a_failed_migration_is_replaced_by_that_of_the_source() {
    let recording = Recording::load("10.0-zstd");
    // The other connections are reset, so that the source's own, merely closed, are in a better state.
    let arrived = channels_close_first(&recording, true, |to| reset(&recording.channels[0], to));
    assert_eq!(arrived, Ok(true));
}

#[test]
fn a_channel_that_was_reset_is_named() {
    let mut recording = Recording::load("10.0-zstd");
    let lost = recording.channels.pop().unwrap();
    let arrived = channels_close_first(&recording, true, |to| reset(&lost, to));
    let line = arrived.unwrap_err();
    assert!(line.contains("a channel that was reset"), "{line}");
}

/// Sends `bytes` and resets the connection.
fn reset(bytes: &[u8], to: &Address) {
    let Address::Tcp { host, port } = to else {
        panic!("{to} is not TCP");
    };
    let mut stream = TcpStream::connect((host.as_str(), *port)).unwrap();
    stream.write_all(&bytes[..1000]).unwrap();
    rustix::net::sockopt::set_socket_linger(&stream, Some(Duration::ZERO)).unwrap();
}

/// Returns relay chains whose destination accepts connections and stays silent.
fn ways_to_a_silent_destination() -> [Vec<RelaySettings>; 2] {
    let mut off = settings(&[("multifd", "off")]);
    off.limits.handshake_timeout = SOON;
    let mut between = settings(&[("multifd-channels", "2")]);
    // The relay beside the destination must time out first.
    between.limits.handshake_timeout = DEADLINE;
    [vec![off.clone()], vec![between, off]]
}

/// Starts the relays of `way`, in order from the source.
fn start(way: &[RelaySettings], destination: &Address, over_tcp: bool) -> Vec<Relay> {
    let mut relays: Vec<Relay> = Vec::new();
    for (index, settings) in way.iter().enumerate().rev() {
        let to = relays.first().map_or(destination, |next| &next.address);
        let relay = Relay::start(to, settings, over_tcp || index > 0);
        relays.insert(0, relay);
    }
    relays
}

#[test]
fn a_source_without_return_path_keeps_a_small_guest_that_no_qemu_accepts() {
    // More than the buffer of a UNIX socket, and less than that plus one usual read.
    const LENGTH: usize = 480_000;
    let recording = Recording::load("10.0-off");
    assert!(!recording.has_return_path());
    for way in ways_to_a_silent_destination() {
        let hops = way.len();
        let folder = tempfile::tempdir().unwrap();
        let silent: Address = format!("unix:{}", folder.path().join("socket").display())
            .parse()
            .unwrap();
        let _listener = silent.listen().unwrap();
        let relays = start(&way, &silent, false);
        let main = &connect(&relays[0].address);
        let sent = { main }.write_all(&recording.main[..LENGTH]);
        for relay in relays {
            relay.outcome("a silent destination").unwrap_err();
        }
        assert!(sent.is_err(), "{hops} relays took everything");
    }
}

/// Returns a stream that cannot be parsed.
fn not_to_be_taken_apart() -> Vec<u8> {
    Recording::small().with_postcopy_advise().main
}

#[test]
fn a_stream_without_channels_is_not_passed_to_a_qemu_that_expects_them() {
    let mut to_qemu = settings(&[("multifd-channels", "3")]);
    to_qemu.to_qemu = true;
    let between = settings(&[("multifd-channels", "2")]);
    let nobody = "tcp:192.0.2.1:1".parse().unwrap();
    for way in [vec![to_qemu.clone()], vec![between, to_qemu]] {
        let relays = start(&way, &nobody, false);
        let main = &connect(&relays[0].address);
        { main }.write_all(&not_to_be_taken_apart()).unwrap();
        // A QEMU aborts at the unknown message.
        assert!(matches!(main.wait_readable(DEADLINE), Ok(true)));
        main.shutdown(Shutdown::Both);
        for relay in relays {
            let line = relay.outcome("refused").unwrap_err().chain();
            let expected = "waits for 3 channels";
            assert!(line.contains(expected), "{line}");
            assert!(line.contains("--multifd off"), "{line}");
        }
    }
}

#[test]
fn a_destination_that_does_not_answer_a_passed_through_stream_times_out() {
    let folder = tempfile::tempdir().unwrap();
    let silent: Address = format!("unix:{}", folder.path().join("socket").display())
        .parse()
        .unwrap();
    let _listener = silent.listen().unwrap();
    let mut off = settings(&[("multifd", "off")]);
    off.limits.handshake_timeout = SOON;
    let relay = Relay::start(&silent, &off, false);
    let main = &connect(&relay.address);
    { main }.write_all(&not_to_be_taken_apart()).unwrap();
    let line = relay.outcome("a silent destination").unwrap_err().chain();
    assert!(
        line.contains("turn multifd off at the destination"),
        "{line}"
    );
}

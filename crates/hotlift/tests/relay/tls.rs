//! Tests TLS connections to a relay: all connections of a migration must be from one host of the CA.

use std::io::{Read, Write};
use std::net::Shutdown;
use std::path::Path;
use std::sync::Arc;
use std::thread;

use hotlift::tls::{Profile, Tls, of_folder};
use hotlift::transport::Stream;
use hotlift::{Address, Options};
use hotlift_testkit::alone;
use hotlift_testkit::pki::Pki;
use hotlift_wire::main_channel::{MainEvent, SectionKind};
use hotlift_wire::return_path::ReturnMessage;

use super::log::Log;
use super::recording::Recording;
use super::rig::{DEADLINE, Relay, accept, destination, settings, until};
use super::source::{Ending, play_on};

/// Reason of the rejection of a connection from another host.
const ANOTHER: &str = "a connection from another host than the others";

/// Creates TLS with the certificates of `folder`; accepts the peers "a", "b" and the relay's host.
fn tls(folder: &Path, profile: Profile) -> Arc<Tls> {
    let mut options = Options::default();
    options.set("tls-authz", "a b localhost").unwrap();
    of_folder(folder, profile, &options.tls, &options.limits).unwrap()
}

/// Connects to a relay with the certificate of `folder`.
fn connect(to: &Address, folder: &Path, profile: Profile) -> Stream {
    let stream = to.connect(DEADLINE).unwrap();
    stream
        .secure(&tls(folder, profile), Some("localhost"))
        .unwrap()
}

fn until_turned_away(relay: &Relay, words: &str, count: u64) {
    until(words, || {
        let all = relay.control.rejected_connections();
        let matching = all.iter().filter(|(why, _)| why.contains(words));
        matching.map(|(_, count)| count).sum::<u64>() == count
    });
}

#[test]
fn a_channel_of_another_host_does_not_join_a_qemus_migration() {
    alone!();
    let pki = Pki::new();
    let [here, ours, other] = ["localhost", "a", "b"].map(|name| pki.host(name));
    let recording = Recording::small_multifd(2).with_carried_postcopy_advise();
    let log = Log::default();
    let (_folder, destination) = destination(&recording, 0, None, &log);
    let mut way = settings(&[("multifd", "off")]);
    way.incoming_tls = Some(tls(&here, Profile::Qemu));
    let relay = Relay::start(&destination.address, &way, true);
    let to = relay.address.clone();
    let connect = |folder| connect(&to, folder, Profile::Qemu);
    let open_as_b = |id: usize| {
        let channel = connect(&other);
        // The relay checks the certificate, and may have closed the connection by now.
        let _ = (&channel).write_all(&recording.channels[id]);
        channel
    };
    thread::scope(|scope| {
        let arriving = scope.spawn(|| destination.run());
        // Up to its first sync point: from there on a relay waits for channels without limit.
        let main = connect(&ours);
        let is_part = |event: &MainEvent<'_>| matches!(event, MainEvent::SectionStart { kind, .. } if *kind == SectionKind::Part);
        let sent = recording.position(is_part);
        (&main).write_all(&recording.main[..sent]).unwrap();
        // The answer to the PING: main is the first connection, and determines the host of the others.
        assert!(main.wait_readable(DEADLINE).unwrap());
        let _before = open_as_b(0);
        until_turned_away(&relay, ANOTHER, 1);
        let first = connect(&ours);
        let _between = open_as_b(1);
        until_turned_away(&relay, ANOTHER, 2);
        let channels = [first, connect(&ours)];
        play_on(&recording, (main, sent), &channels, Ending::LetsGo, &log);
        relay.outcome("with its own channels").unwrap();
        let arrived = arriving.join().unwrap();
        assert_eq!(arrived.ended, Ok(()));
        assert!(arrived.eof, "the guest has arrived");
    });
}

#[test]
fn a_connection_of_another_host_or_without_tls_is_not_passed_through() {
    alone!();
    let pki = Pki::new();
    let [here, ours, other] = ["localhost", "a", "b"].map(|name| pki.host(name));
    let folder = tempfile::tempdir().unwrap();
    let address = Address::Unix {
        path: folder.path().join("socket"),
    };
    let listener = address.listen().unwrap();
    let mut way = settings(&[("multifd", "off")]);
    way.incoming_tls = Some(tls(&here, Profile::Hotlift));
    let relay = Relay::start(&address, &way, true);
    let to = relay.address.clone();
    let connect = |folder| connect(&to, folder, Profile::Hotlift);
    let accepted = || accept(&listener, DEADLINE).unwrap();
    let expect = |mut from: &Stream, bytes: &[u8]| {
        let mut come = vec![0; bytes.len()];
        from.read_exact(&mut come).unwrap();
        assert_eq!(come, bytes);
    };
    let main = connect(&ours);
    let stream = Recording::small().with_postcopy_advise().main;
    (&main).write_all(&stream).unwrap();
    let main_there = accepted();
    expect(&main_there, &stream);

    let of_another = connect(&other);
    // As above: it may be closed by now.
    let _ = (&of_another).write_all(b"a page of b's");
    until_turned_away(&relay, ANOTHER, 1);
    let plain = to.connect(DEADLINE).unwrap();
    (&plain).write_all(b"a page without TLS").unwrap();
    until_turned_away(&relay, "does not use TLS", 1);
    // The next connection there is from our host.
    let extra = connect(&ours);
    (&extra).write_all(b"a page").unwrap();
    let extra_there = accepted();
    expect(&extra_there, b"a page");

    // The destination ends first, as in postcopy.
    let mut shut = Vec::new();
    ReturnMessage::Shut(0).encode(&mut shut).unwrap();
    (&main_there).write_all(&shut).unwrap();
    expect(&main, &shut);
    extra_there.shutdown(Shutdown::Both);
    main.shutdown(Shutdown::Write);
    assert_eq!(main_there.read_some(&mut [0]).unwrap(), 0);
    main_there.shutdown(Shutdown::Both);
    let report = relay.outcome("passed through").unwrap();
    assert!(report.passed_through.is_some());
}

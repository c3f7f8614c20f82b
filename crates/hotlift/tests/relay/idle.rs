//! Tests that a waiting thread sleeps until an event, so an idle process uses no CPU time.

use std::thread;

use hotlift::{Control, Status, file};
use hotlift_testkit::alone;
use hotlift_testkit::wake_ups::sleep_through;
use hotlift_wire::main_channel::MainEvent;

use super::log::{Event, Log};
use super::recording::Recording;
use super::rig::{DEADLINE, Relay, destination, listen, settings, until};
use super::source::{Ending, play};

/// Expected wake-ups in 10 s: the watch samples connections to other hosts every 2.5 s, since only unanswered keepalives in the
/// kernel reveal a peer that has lost power.
const SAMPLES: (&str, u64) = ("relay/watch", 4);

#[test]
fn idle_relays_never_wake_and_are_cancelled_at_once() {
    alone!();
    let recording = Recording::small_multifd(2);
    let ends = recording.events();
    let mut ends = ends
        .iter()
        .filter(|(_, event)| *event == MainEvent::RamEos)
        .map(|(at, _)| *at);
    // The first one ends the set-up.
    let quiet = Ending::FallsSilentAt(ends.nth(1).unwrap());
    let log = Log::default();
    let mut way = settings(&[("multifd-compression", "zstd")]);
    way.limits.handshake_timeout = 10 * DEADLINE;
    let channels = way.outgoing.channels();
    let (_there, destination) = destination(&recording, channels, None, &log);
    let active = Relay::start(&destination.address, &way, true);
    let to = active.address.clone();
    let unused = Relay::start(&"tcp:192.0.2.1:1".parse().unwrap(), &settings(&[]), true);
    let (folder, listener, _) = listen(true);
    let serving = Control::new();
    thread::scope(|scope| {
        let serves = || file::serve(&listener, None, folder.path(), &serving, &|_| ());
        let server = thread::Builder::new().name("server".to_owned());
        let server = server.spawn_scoped(scope, serves).unwrap();
        let arriving = scope.spawn(|| destination.run());
        let playing = scope.spawn(|| play(&recording, &to, quiet, &log));
        until("RAM", || active.control.status() == Status::Active);
        let this = std::process::id();
        let names = ["relay/", "server", "files/"].map(|name| (this, name));
        sleep_through(&names, &[SAMPLES]);
        let (control, unused_control) = (active.control.clone(), unused.control.clone());
        for control in [&control, &unused_control, &serving] {
            control.cancel();
        }
        active.outcome("an active relay").unwrap_err();
        unused.outcome("an unused relay").unwrap_err();
        server.join().unwrap().unwrap();
        log.note(Event::RelaysEnded);
        playing.join().unwrap();
        arriving.join().unwrap();
    });
}

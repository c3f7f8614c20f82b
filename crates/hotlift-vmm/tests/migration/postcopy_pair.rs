//! Tests a postcopy between two Hotlifts: the second connection, lost messages, and the admission of connections at a
//! recovery.

use std::io::{Read, Write};
use std::net::TcpStream;
use std::sync::atomic::{AtomicBool, Ordering};
use std::thread;

use hotlift::options::{PostcopyOptions, StreamOptions};
use hotlift::{Address, Control, Options, Status};
use hotlift_testkit::proxy::{Flow, Proxy, Rule, Socket, Stop};
use hotlift_vmm::GuestKind;

use crate::probe::{Probe, Quirks};
use crate::rig::{
    self, Ended, Holder, destination, has_userfault, kinds, listen, reaches, settings,
};
use crate::tls::until_turned_away;

fn options() -> Options {
    Options {
        stream: StreamOptions {
            multifd: Some(false),
            max_bandwidth: 0,
            ..StreamOptions::default()
        },
        postcopy: PostcopyOptions {
            ram: true,
            ..PostcopyOptions::default()
        },
        ..Options::default()
    }
}

/// A fault on the main channel, at the first place where these bytes pass.
struct Where {
    bytes: &'static [u8],
    /// True from the destination to the source.
    back: bool,
    then: Then,
    happened: AtomicBool,
}

#[derive(Clone, Copy, PartialEq, Eq)]
enum Then {
    /// Their last byte is changed.
    Flip,
    /// The same, and all later answers are dropped.
    FlipAndCut,
    /// They do not pass completely, and the connection ends.
    Cut,
}

impl Where {
    fn new(bytes: &'static [u8], back: bool, then: Then) -> Self {
        Self {
            bytes,
            back,
            then,
            happened: AtomicBool::new(false),
        }
    }
}

impl Rule for Where {
    /// The last bytes that have passed.
    type Direction = Vec<u8>;

    fn apply(&self, last: &mut Vec<u8>, came: &mut Vec<u8>, flow: &Flow<'_>) -> Result<(), Stop> {
        if flow.socket() != Some(Socket::Main) {
            return flow.pass_all(came);
        }
        let happened = self.happened.load(Ordering::SeqCst);
        if flow.is_back() != self.back {
            return match happened && self.then == Then::FlipAndCut {
                true => Err(Stop::Cut),
                false => flow.pass_all(came),
            };
        }
        let before = last.len();
        last.extend_from_slice(came);
        let found = last
            .windows(self.bytes.len())
            .position(|it| it == self.bytes);
        // A complete match ends in the new bytes.
        let end = found.map(|start| start + self.bytes.len() - before);
        let excess = last.len().saturating_sub(self.bytes.len() - 1);
        last.drain(..excess);
        if let Some(end) = end.filter(|_| !happened) {
            self.happened.store(true, Ordering::SeqCst);
            if self.then == Then::Cut {
                flow.pass(&came[..end - 1])?;
                return Err(Stop::Cut);
            }
            came[end - 1] ^= 0x20;
        }
        flow.pass_all(came)
    }
}

/// Runs a migration that switches to postcopy at once, through a proxy with this rule.
fn through(rule: Where, kind: GuestKind, options: &Options) -> (Probe, Probe, Ended) {
    let source = rig::source(kind, &settings(), Quirks::default());
    let target = destination(kind, &settings(), Quirks::default());
    let (listener, at) = listen();
    let (proxy, to) = Proxy::loopback(&at, rule).unwrap();
    let controls = [Control::new(), Control::new()];
    controls[0].start_postcopy();
    let both = [options, options];
    let ended = rig::run(&source, &target, listener, &to, both, &controls, &|_| {});
    assert!(
        proxy.finish().happened.load(Ordering::SeqCst),
        "nothing happened"
    );
    (source, target, ended)
}

/// SHUT(0).
const HAS_ALL: &[u8] = &[0, 1, 0, 4, 0, 0, 0, 0];

#[test]
fn a_source_learns_that_all_pages_arrived_though_the_statement_is_lost() {
    if !has_userfault() {
        return;
    }
    for kind in kinds() {
        let rule = Where::new(HAS_ALL, true, Then::Cut);
        let (source, target, ended) = through(rule, kind, &options());
        let holder = ended.holder(&source, &target);
        assert_eq!(holder, Ok(Holder::Destination), "{:?}", ended.errors());
        ended.source.expect("it knows that it is done");
    }
}

/// Name of the first device in the package; only the checksum covers it before it is loaded.
const DEVICE: &[u8] = b"hotlift/guest";

#[test]
fn a_damaged_package_is_refused_before_the_guest_runs_and_the_source_always_learns_it() {
    if !has_userfault() {
        return;
    }
    for then in [Then::Flip, Then::FlipAndCut] {
        let rule = Where::new(DEVICE, false, then);
        let (source, target, ended) = through(rule, kinds()[0], &options());
        let (here, there) = ended.stayed(&source, &target);
        assert!(there.contains("CRC-32"), "{there}; {here}");
    }
}

/// Returns a guest that runs at `target` with missing pages; `goes_on` defines the recovery.
fn paused(
    (source, target): (&Probe, &Probe),
    options: &Options,
    controls: &[Control; 2],
    goes_on: impl FnOnce() + Send,
) -> Ended {
    // The background transfer takes seconds.
    let slow = Options {
        postcopy: PostcopyOptions {
            max_bandwidth: 1 << 20,
            ..options.postcopy.clone()
        },
        ..options.clone()
    };
    let (listener, to) = listen();
    controls[0].start_postcopy();
    thread::scope(|scope| {
        scope.spawn(|| {
            reaches(&controls[1], Status::PostcopyActive);
            reaches(&controls[0], Status::PostcopyActive);
            assert!(controls[0].pause_postcopy());
            for control in controls {
                reaches(control, Status::PostcopyPaused);
            }
            assert!(target.runs() && !source.runs());
            controls[0].change(options);
            goes_on();
        });
        let both = [&slow, &slow];
        rig::run(source, target, listener, &to, both, controls, &|_| {})
    })
}

fn connect(to: &Address) -> TcpStream {
    TcpStream::connect(to.to_string().trim_start_matches("tcp:")).unwrap()
}

#[test]
fn a_paused_postcopy_resumes_with_its_source_after_other_connections() {
    if !has_userfault() {
        return;
    }
    for kind in kinds() {
        for postcopy_preempt in [false, true] {
            let options = Options {
                postcopy: PostcopyOptions {
                    preempt: postcopy_preempt,
                    ..options().postcopy
                },
                ..options()
            };
            let source = rig::source(kind, &settings(), Quirks::default());
            let target = destination(kind, &settings(), Quirks::default());
            let controls = [Control::new(), Control::new()];
            let ended = paused((&source, &target), &options, &controls, || {
                let (again, to) = listen();
                controls[1].recover(again).unwrap();
                let silent = connect(&to);
                // A recovering source that does not know its migration.
                for words in [
                    &b"\x08\0\x0a\0\x07\x06pc.ram"[..],
                    b"QEVM\0\0\0\x03\x07\0\0",
                ] {
                    let mut stranger = connect(&to);
                    stranger.write_all(words).unwrap();
                    let mut rest = Vec::new();
                    let _ = stranger.read_to_end(&mut rest);
                    assert_eq!(rest, b"", "it receives nothing");
                }
                assert!(controls[0].resume(&to));
                reaches(&controls[0], Status::PostcopyActive);
                drop(silent);
            });
            let holder = ended.holder(&source, &target);
            let what = format!("{kind:?}, preempt {postcopy_preempt}");
            assert_eq!(
                holder,
                Ok(Holder::Destination),
                "{what}: {:?}",
                ended.errors()
            );
            ended.source.expect("it has sent all pages");
        }
    }
}

#[test]
fn pages_of_one_guest_do_not_reach_another_waiting_guest() {
    if !has_userfault() {
        return;
    }
    let kind = kinds()[0];
    let guests = [(); 2].map(|()| {
        let source = rig::source(kind, &settings(), Quirks::default());
        (source, destination(kind, &settings(), Quirks::default()))
    });
    let controls = [(); 2].map(|()| [Control::new(), Control::new()]);
    let ended = thread::scope(|scope| {
        let (waits, waiting) = std::sync::mpsc::channel();
        let (guests, controls) = (&guests, &controls);
        let first = scope.spawn(move || {
            let (source, target) = &guests[0];
            paused((source, target), &options(), &controls[0], move || {
                let theirs = waiting.recv().unwrap();
                // The address where the other guest waits.
                assert!(controls[0][0].resume(&theirs));
                until_turned_away(&controls[1][1], "another migration's token");
                reaches(&controls[0][0], Status::PostcopyPaused);
                assert_eq!(controls[1][1].status(), Status::PostcopyPaused);
                assert!(controls[1][0].resume(&theirs));
                let (again, ours) = listen();
                controls[0][1].recover(again).unwrap();
                assert!(controls[0][0].resume(&ours));
            })
        });
        let (source, target) = &guests[1];
        let second = paused((source, target), &options(), &controls[1], || {
            let (again, to) = listen();
            controls[1][1].recover(again).unwrap();
            waits.send(to).unwrap();
        });
        [first.join().unwrap(), second]
    });
    for (ended, (source, target)) in ended.iter().zip(&guests) {
        let holder = ended.holder(source, target);
        assert_eq!(holder, Ok(Holder::Destination), "{:?}", ended.errors());
    }
}

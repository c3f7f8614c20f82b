//! Flips any byte or cuts the connection at any place. Afterwards:
//!
//! - exactly one side runs the guest, and its memory is intact,
//! - both sides return an error with the cause,
//! - no resource remains.
//!
//! A migration without a fault is recorded first. Then every unit (record, header, answer) on its connections is
//! damaged, one after the other. The same guest is used for all faults. If it arrives at the destination, the next
//! migration starts there.

use std::collections::HashSet;
use std::sync::Arc;
use std::time::Duration;

use hotlift::Options;
use hotlift::options::{Limits, StreamOptions, SwitchoverOptions};
use hotlift_testkit::alone;
use hotlift_testkit::proxy::units::{Action, Fault, Log, Unit, Units};
use hotlift_testkit::proxy::{Proxy, Socket};
use hotlift_vmm::GuestKind;

use crate::census::Census;
use crate::probe::{Probe, Quirks, three_rounds};
use crate::rig::{self, Ended, Holder, settings};

/// Attempts of a fault whose unit did not occur: once one connection has brought the message of the handover, the others may
/// end without it.
const ATTEMPTS: usize = 50;

/// Attempts of a fault that only a timeout detects, before it counts as a problem: a busy machine may pause for the short
/// timeout, but not for the 30 s of the last attempt.
const LATE: usize = 3;

/// Replaces the default of 30 s, so that a fault detected only by a timeout fails here soon.
const HANDSHAKE: Duration = Duration::from_secs(1);

/// Replaces the default of 60 s: a destination without confirmation that its message arrived waits for a query that long.
const SETTLE: Duration = Duration::from_secs(2);

/// Bytes of a packet header before the name and the offsets.
const FIXED_FIELDS: usize = 64;

fn options(method: &str) -> Options {
    let mut options = Options {
        limits: Limits {
            settle_timeout: SETTLE,
            ..Limits::default()
        },
        stream: StreamOptions {
            max_bandwidth: 0,
            ..StreamOptions::default()
        },
        switchover: SwitchoverOptions {
            downtime_limit: Duration::ZERO,
            ..SwitchoverOptions::default()
        },
        ..Options::default()
    };
    options.set("multifd-compression", method).unwrap();
    options
}

/// Units in which a fault may be detected only by a timeout; all other faults are detected directly. Nothing else on the wire
/// confirms the length of the name in these records, and the source waits for an answer after them. An opening may end halfway
/// although the source has sent it.
const NOTICED_BY_TIME_OUT: [&str; 5] = [
    "configuration",
    "Start section",
    "list of RAM blocks",
    "Full section",
    "opening",
];

/// Guests that go through a sequence of faults.
struct Course {
    kind: GuestKind,
    options: Options,
    source: Arc<Probe>,
    problems: Vec<String>,
    /// Faults detected only by a timeout.
    timed_out: Vec<String>,
    /// Faults that took one of the longer waits.
    slow: Vec<String>,
    held_by_destination: usize,
    done: usize,
}

impl Course {
    fn new(kind: GuestKind, options: Options) -> Self {
        Self {
            kind,
            options,
            source: Arc::new(rig::source(kind, &settings(), quirks())),
            problems: Vec::new(),
            timed_out: Vec::new(),
            slow: Vec::new(),
            held_by_destination: 0,
            done: 0,
        }
    }

    /// Migrates with `fault`; the guest is in `self.source` afterwards, on either side before.
    fn migrate(
        &mut self,
        fault: Option<&Fault>,
        handshake_timeout: Duration,
    ) -> (Ended, Log, Result<Holder, String>) {
        let options = Options {
            limits: Limits {
                handshake_timeout,
                ..self.options.limits.clone()
            },
            ..self.options.clone()
        };
        let destination = rig::destination(self.kind, &settings(), quirks());
        let (listener, address) = rig::listen();
        let (proxy, to) = Proxy::loopback(&address, Units::new(fault.cloned())).unwrap();
        let ended = rig::migrate(&self.source, &destination, listener, &to, &options);
        let log = proxy.finish().into_log();
        let holder = ended.holder(&self.source, &destination);
        match holder {
            Ok(Holder::Source) => {}
            Ok(Holder::Destination) => self.source = Arc::new(destination),
            Err(_) => self.source = Arc::new(rig::source(self.kind, &settings(), quirks())),
        }
        (ended, log, holder)
    }

    /// Records a migration without a fault.
    fn watch(&mut self) -> Log {
        // No short timeout is needed here: a busy machine may be slow.
        let (ended, log, holder) = self.migrate(None, Limits::default().handshake_timeout);
        assert_eq!(holder, Ok(Holder::Destination), "{:?}", ended.errors());
        assert_eq!(ended.source.as_ref().unwrap().rounds, 3);
        assert_eq!(ended.source.unwrap().transferred_bytes, log.bytes);
        log
    }

    fn inject(&mut self, fault: &Fault) {
        let mut late = 0;
        for _ in 0..ATTEMPTS {
            let is_last = late == LATE - 1;
            let handshake = if is_last {
                Limits::default().handshake_timeout
            } else {
                HANDSHAKE
            };
            let (ended, log, holder) = self.migrate(Some(fault), handshake);
            let what = || {
                let (source, destination) = ended.errors();
                format!("{fault:?}: source: {source}; destination: {destination}")
            };
            match holder {
                Ok(Holder::Destination) => self.held_by_destination += 1,
                Ok(Holder::Source) => {}
                Err(problem) => {
                    self.problems.push(format!("{problem}: {}", what()));
                    return;
                }
            }
            if ended.timed_out() {
                let name = &fault.unit.name;
                let is_known = NOTICED_BY_TIME_OUT
                    .iter()
                    .any(|kind| name.starts_with(kind));
                if !is_known {
                    late += 1;
                    if late < LATE {
                        continue;
                    }
                    self.problems
                        .push(format!("noticed by time-out only: {}", what()));
                }
                self.timed_out.push(what());
            } else if ended.took > HANDSHAKE {
                self.slow.push(format!("{:?} {}", ended.took, what()));
            }
            if log.fired {
                self.done += 1;
                return;
            }
        }
        self.problems
            .push(format!("{:?} never came by", fault.unit));
    }

    fn finish(self, census: &Census) {
        eprintln!(
            "{} guest: {} faults, the destination had the guest after {}, noticed by time-out: {}, slow: {}",
            self.kind,
            self.done,
            self.held_by_destination,
            self.timed_out.len(),
            self.slow.len(),
        );
        for line in self
            .timed_out
            .iter()
            .map(|l| format!("time-out: {l}"))
            .chain(self.slow.iter().map(|l| format!("slow: {l}")))
        {
            eprintln!("{line}");
        }
        drop(self.source);
        assert!(
            self.problems.is_empty(),
            "{} problems:\n{}",
            self.problems.len(),
            self.problems.join("\n")
        );
        census.expect_unchanged();
    }
}

fn quirks() -> Quirks {
    Quirks {
        sync: Some(three_rounds()),
        ..Quirks::default()
    }
}

/// Returns the units to damage: each once, and of the channels the first and the last.
fn places(log: &Log, channels: u8) -> Vec<(Unit, usize)> {
    let mut seen = HashSet::new();
    log.units
        .iter()
        .filter(|(unit, _)| match unit.socket {
            Some(Socket::Channel(id)) => id == 0 || id == channels - 1,
            Some(Socket::Main) => true,
            Some(Socket::Question) => false,
            // One packet of each round stands for all.
            None => unit.name.ends_with("#1"),
        })
        .filter(|(unit, _)| seen.insert(unit.clone()))
        .cloned()
        .collect()
}

/// Masks of the flips of one byte.
const MASKS: [u8; 3] = [0x01, 0x80, 0xff];

fn flip(unit: &Unit, byte: usize, mask: u8) -> Fault {
    Fault {
        unit: unit.clone(),
        action: Action::Flip { byte, mask },
    }
}

/// Returns all single-bit flips of the first byte of `unit`, mostly a type.
fn flips_of_type(unit: &Unit) -> impl Iterator<Item = Fault> + '_ {
    (0..8).map(|bit| flip(unit, 0, 1 << bit))
}

/// Unit tests without connections damage each byte (`hotlift/src/stream/main_channel/tests.rs`); one of each unit here checks
/// that both sides act on their decision.
#[test]
fn a_flipped_byte_of_each_unit_of_the_main_channel_leaves_one_guest() {
    alone!();
    let census = Census::take();
    let mut course = Course::new(GuestKind::Threads, options("none"));
    let log = course.watch();
    let forth = |unit: &Unit| !unit.back && unit.socket == Some(Socket::Main);
    let units = places(&log, 2).into_iter().filter(|(unit, _)| forth(unit));
    for (number, (unit, length)) in units.enumerate() {
        course.inject(&flip(&unit, length / 2, MASKS[number % 3]));
    }
    course.finish(&census);
}

#[test]
fn any_flipped_byte_of_a_channel_leaves_one_guest() {
    alone!();
    let census = Census::take();
    let mut course = Course::new(GuestKind::Threads, options("none"));
    let log = course.watch();
    let headers: Vec<_> = places(&log, 2)
        .into_iter()
        .filter(|(unit, _)| !unit.back && unit.socket != Some(Socket::Main))
        .filter(|(unit, _)| !unit.name.starts_with("data payload"))
        .collect();
    for (number, (unit, length)) in headers.iter().enumerate() {
        for fault in flips_of_type(unit) {
            course.inject(&fault);
        }
        // After the fixed fields all headers are alike: each byte is flipped in one of them.
        let here = |byte: &usize| *byte < FIXED_FIELDS || byte % headers.len() == number;
        for byte in (0..*length).filter(here) {
            course.inject(&flip(unit, byte, MASKS[byte % 3]));
        }
    }
    course.finish(&census);
}

#[test]
fn any_flipped_byte_of_an_answer_leaves_one_guest() {
    alone!();
    let census = Census::take();
    let mut course = Course::new(GuestKind::Threads, options("none"));
    let log = course.watch();
    for (unit, length) in places(&log, 2).into_iter().filter(|(unit, _)| unit.back) {
        for fault in flips_of_type(&unit) {
            course.inject(&fault);
        }
        for byte in 0..length {
            course.inject(&flip(&unit, byte, MASKS[byte % 3]));
        }
    }
    course.finish(&census);
}

#[test]
fn any_cut_connection_leaves_one_guest() {
    alone!();
    let census = Census::take();
    for kind in rig::kinds() {
        let mut course = Course::new(kind, options("none"));
        let log = course.watch();
        for (number, (unit, length)) in places(&log, 2).into_iter().enumerate() {
            let middle = length / 2;
            let mut actions = vec![
                Action::Cut { byte: 0 },
                Action::Cut { byte: middle },
                Action::HalfCut { byte: 0 },
                Action::HalfCut { byte: middle },
            ];
            if kind == GuestKind::Kvm {
                actions = vec![actions[number % 4]];
            }
            for action in actions {
                course.inject(&Fault {
                    unit: unit.clone(),
                    action,
                });
            }
        }
        course.finish(&census);
    }
}

#[test]
fn a_damaged_payload_and_damaged_zero_page_records_leave_one_guest() {
    alone!();
    let census = Census::take();
    for method in ["zlib", "zstd"] {
        let mut course = Course::new(GuestKind::Threads, options(method));
        let log = course.watch();
        for (unit, length) in places(&log, 2) {
            if unit.name.starts_with("data payload") {
                for byte in [0, 1, length / 2, length - 1] {
                    course.inject(&flip(&unit, byte, MASKS[byte % 3]));
                }
            }
        }
        course.finish(&census);
    }
    let mut legacy = options("none");
    legacy.set("zero-page-detection", "legacy").unwrap();
    let mut course = Course::new(GuestKind::Threads, legacy);
    let log = course.watch();
    for name in ["page #1", "page #2"] {
        let (unit, length) = log
            .units
            .iter()
            .find(|(unit, _)| unit.name == name)
            .unwrap();
        for byte in 0..*length {
            for mask in MASKS {
                course.inject(&flip(unit, byte, mask));
            }
        }
    }
    course.finish(&census);
}

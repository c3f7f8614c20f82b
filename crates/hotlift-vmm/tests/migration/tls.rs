//! Tests TLS between two guests. All data arrives, and unauthenticated peers receive nothing.

use std::io::Write;
use std::net::TcpStream;
use std::path::Path;
use std::sync::atomic::{AtomicBool, AtomicUsize, Ordering};
use std::sync::{Arc, Mutex};
use std::thread;
use std::time::{Duration, Instant};

use hotlift::tls::of_options;
use hotlift::transport::Stream;
use hotlift::{Address, Control, MigrationError, Options, migrate, receive};
use hotlift_testkit::alone;
use hotlift_testkit::pki::Pki;
use hotlift_testkit::proxy::records::{Action, Fault, Log, Records};
use hotlift_testkit::proxy::{Flow, Proxy, Rule, Stop};
use hotlift_vmm::GuestKind;
use hotlift_wire::multifd::{
    Hello, INITIAL_PACKET_LEN, InitialPacket, Method, PacketLayout, ZeroPageDetection,
};

use crate::census::Census;
use crate::probe::{Probe, Quirks, three_rounds};
use crate::rig::{self, BOUND, Ended, Holder, settings};

fn options(folder: &Path, set: &[(&str, &str)]) -> Options {
    let mut options = Options::default();
    options
        .set("tls-creds", &folder.display().to_string())
        .unwrap();
    for (name, value) in set {
        options.set(name, value).unwrap();
    }
    options
}

#[test]
fn a_guest_arrives_over_tls_with_every_setting() {
    alone!();
    let census = Census::take();
    let pki = Pki::new();
    let [here, there] = ["127.0.0.1", "localhost"].map(|name| pki.host(name));
    for set in [
        &[("multifd-compression", "none")][..],
        &[("multifd-compression", "zstd"), ("multifd-channels", "4")],
        &[("multifd", "off")],
        &[("compress", "on")],
        &[("zero-page-detection", "legacy")],
    ] {
        for kind in rig::kinds() {
            let source = rig::source(kind, &settings(), Quirks::default());
            let destination = rig::destination(kind, &settings(), Quirks::default());
            let mut ours = options(&here, set);
            ours.set("tls-hostname", "localhost").unwrap();
            let theirs = options(&there, set);
            let ended = rig::between(&source, &destination, [&ours, &theirs]);
            ended.arrived(&source, &destination, &format!("{kind:?} {set:?}"));
        }
    }
    census.expect_unchanged();
}

/// Migrates to a destination that rejects all clients; returns the source's error and the reason of the rejection.
fn rejected_connections(ours: &Options, theirs: &Options) -> (MigrationError, String) {
    let kind = rig::kinds()[0];
    let source = rig::source(kind, &settings(), Quirks::default());
    let destination = rig::destination(kind, &settings(), Quirks::default());
    let (listener, to) = rig::listen();
    let control = Control::new();
    let failed = thread::scope(|scope| {
        let waiting = scope.spawn(|| receive(&destination, listener, theirs, &control));
        let failed = migrate(&source, &to, ours, &Control::new(), &|_| {}).unwrap_err();
        // The source may learn of it first.
        until_turned_away(&control, "");
        control.cancel();
        assert!(matches!(
            waiting.join().unwrap(),
            Err(MigrationError::Cancelled)
        ));
        failed
    });
    assert!(source.runs() && !destination.runs());
    let reasons: Vec<_> = control.rejected_connections().into_keys().collect();
    (failed, reasons.join("; "))
}

#[test]
fn a_foreign_peer_is_refused_with_the_reason_on_both_sides() {
    alone!();
    let (pki, other_pki) = (Pki::new(), Pki::new());
    let [here, there] = ["a", "127.0.0.1"].map(|name| pki.host(name));
    let stranger = other_pki.host("stranger");
    let plain = Options::default();
    let theirs = options(&there, &[]);
    let picky = options(&there, &[("tls-authz", "b *.example.org")]);
    for (ours, theirs, here_says, there_says) in [
        (options(&stranger, &[]), &theirs, "CA", "CA"),
        (
            options(&here, &[]),
            &picky,
            "does not accept",
            "not on the list",
        ),
        (
            plain.clone(),
            &theirs,
            "accepts only TLS",
            "does not use TLS",
        ),
        (options(&here, &[]), &plain, "TLS", "TLS"),
        (
            options(&here, &[("tls-hostname", "b")]),
            &theirs,
            "is not for 'b' but for 127.0.0.1",
            "does not accept our certificate",
        ),
    ] {
        let (failed, reasons) = rejected_connections(&ours, theirs);
        let failed = failed.chain();
        println!("{failed}\n    {reasons}");
        assert!(failed.contains(here_says), "{failed}");
        assert!(reasons.contains(there_says), "{reasons}");
    }
}

#[test]
fn a_folder_without_certificates_is_an_error_that_names_it() {
    let folder = tempfile::tempdir().unwrap();
    let options = options(folder.path(), &[]);
    let error = of_options(
        &options.tls,
        &options.limits,
        &"tcp:127.0.0.1:0".parse().unwrap(),
    )
    .unwrap_err();
    let error = MigrationError::from(error).chain();
    assert!(error.contains("ca-cert.pem"), "{error}");
}

#[test]
fn key_changes_every_hundred_records_lose_nothing() {
    alone!();
    let pki = Pki::new();
    let host = pki.host("127.0.0.1");
    let mut options = options(&host, &[("multifd-compression", "none")]);
    options.tls.records_per_key = 100;
    let kind = rig::kinds()[0];
    let mut settings = settings();
    settings.ram_bytes = 64 << 20;
    let source = rig::source(kind, &settings, Quirks::default());
    let destination = rig::destination(kind, &settings, Quirks::default());
    let (listener, to) = rig::listen();
    let (proxy, to) = Proxy::loopback(&to, Records::default()).unwrap();
    let ended = rig::migrate(&source, &destination, listener, &to, &options);
    let log = proxy.finish().into_log();
    ended.arrived(&source, &destination, "keys");
    assert!(log.forth > 1000, "a key for all of them: {log:?}");
}

/// Length of the record with a channel's opening, including header, type and tag (RFC 8446, section 5.2).
const OPENING_RECORD: usize = 5 + INITIAL_PACKET_LEN + 1 + 16;

/// Connections of a source before that of channel 1.
const BEFORE_CHANNEL_1: usize = 2;

/// Holds channel 1 from its first byte on, once channel 0 is open.
#[derive(Default)]
struct HoldsChannel1 {
    connections: AtomicUsize,
    /// True after both connections before channel 1 have passed all data sent until then.
    is_channel_0_open: AtomicBool,
}

impl Rule for HoldsChannel1 {
    /// Number of connections before this one; `None` until the source's first bytes on it.
    type Direction = Option<usize>;

    fn apply(
        &self,
        before: &mut Option<usize>,
        came: &mut Vec<u8>,
        flow: &Flow<'_>,
    ) -> Result<(), Stop> {
        if flow.is_back() {
            return flow.pass_all(came);
        }
        let count = || self.connections.fetch_add(1, Ordering::SeqCst);
        let before = *before.get_or_insert_with(count);
        if before == BEFORE_CHANNEL_1 {
            while !self.is_channel_0_open.load(Ordering::SeqCst) {
                thread::yield_now();
            }
            flow.hold();
        }
        let is_opening = came.len() == OPENING_RECORD;
        flow.pass_all(came)?;
        if is_opening && before + 1 == BEFORE_CHANNEL_1 {
            self.is_channel_0_open.store(true, Ordering::SeqCst);
        }
        Ok(())
    }
}

/// Connects to `to` as channel 1 with the certificate of `folder`.
fn channel_1_of(folder: &Path, to: &Address) -> Stream {
    let options = options(folder, &[]);
    let tls = of_options(&options.tls, &options.limits, to);
    let tls = tls.unwrap().unwrap();
    let stream = to.connect(Duration::from_secs(10)).unwrap();
    let stream = stream.secure(&tls, Some(to.host())).unwrap();
    let opening = InitialPacket {
        uuid: settings().uuid,
        id: 1,
        hello: Some(Hello {
            channels: 2,
            method: Some(Method::None),
            layout: PacketLayout::QEMU,
            zero_page_detection: ZeroPageDetection::Multifd,
        }),
    };
    (&stream).write_all(&opening.encode()).unwrap();
    stream
}

/// Waits until `control` has rejected a client for a reason with these words.
pub fn until_turned_away(control: &Control, words: &str) {
    let deadline = Instant::now() + BOUND;
    while !control
        .rejected_connections()
        .keys()
        .any(|why| why.contains(words))
    {
        assert!(
            Instant::now() < deadline,
            "{:?}",
            control.rejected_connections()
        );
        thread::sleep(Duration::from_millis(2));
    }
}

/// Runs a migration whose channel 1 is held until `meanwhile` returns, and longer if that returns true. `meanwhile` gets the
/// destination's address and both controls. Returns the destination's control.
fn with_a_late_channel(
    [source, destination]: [&Probe; 2],
    [ours, theirs]: [&Options; 2],
    meanwhile: &(dyn Fn(&Address, &[Control; 2]) -> Late + Sync),
) -> (Ended, Control) {
    let (listener, address) = rig::listen();
    let (proxy, to) = Proxy::loopback(&address, HoldsChannel1::default()).unwrap();
    let controls = [Control::new(), Control::new()];
    let ended = thread::scope(|scope| {
        scope.spawn(|| {
            let deadline = Instant::now() + BOUND;
            while !proxy.is_held() {
                assert!(Instant::now() < deadline, "channel 1 has not come");
                thread::sleep(Duration::from_millis(2));
            }
            if meanwhile(&address, &controls) == Late::Comes {
                proxy.release();
            }
        });
        let both = [ours, theirs];
        rig::run(source, destination, listener, &to, both, &controls, &|_| {})
    });
    let [_, there] = controls;
    (ended, there)
}

/// Outcome of a late channel.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
enum Late {
    Comes,
    NeverComes,
}

#[test]
fn a_late_channel_is_awaited_and_no_other_client_takes_its_place() {
    alone!();
    let census = Census::take();
    let pki = Pki::new();
    let [here, there, other] = ["a", "127.0.0.1", "b"].map(|name| pki.host(name));
    let ours = options(&here, &[("multifd-channels", "2")]);
    let theirs = options(&there, &[("multifd-channels", "2"), ("tls-authz", "a b")]);
    let kind = rig::kinds()[0];
    let source = rig::source(kind, &settings(), Quirks::default());
    let destination = rig::destination(kind, &settings(), Quirks::default());
    let (ended, control) = with_a_late_channel([&source, &destination], [&ours, &theirs], &|to,
                                                                                            [
        _,
        control,
    ]| {
        let others = channel_1_of(&other, to);
        until_turned_away(control, "another host");
        let plain = to.connect(BOUND).unwrap();
        (&plain).write_all(b"QEVM\0\0\0\x03\x07").unwrap();
        until_turned_away(control, "does not use TLS");
        drop((others, plain));
        Late::Comes
    });
    ended.arrived(&source, &destination, "a late channel");
    let turned_away = control.rejected_connections();
    assert_eq!(turned_away.values().sum::<u64>(), 2, "{turned_away:?}");
    drop((source, destination));
    census.expect_unchanged();
}

#[test]
fn a_channel_that_never_comes_is_named_by_both_sides() {
    alone!();
    let census = Census::take();
    let pki = Pki::new();
    let [here, there, other] = ["a", "127.0.0.1", "b"].map(|name| pki.host(name));
    let patience = Duration::from_secs(1);
    let set = &[("multifd-channels", "2")];
    let mut all = [options(&here, set), options(&there, set)];
    for options in &mut all {
        options.limits.handshake_timeout = patience;
    }
    let kind = rig::kinds()[0];
    let source = rig::source(kind, &settings(), Quirks::default());
    for somebody_else_has_it in [false, true] {
        let destination = rig::destination(kind, &settings(), Quirks::default());
        let others = Mutex::new(None);
        let (ended, _) = with_a_late_channel(
            [&source, &destination],
            [&all[0], &all[1]],
            &|to, [_, control]| {
                if somebody_else_has_it {
                    *others.lock().unwrap() = Some(channel_1_of(&other, to));
                    until_turned_away(control, "another host");
                }
                Late::NeverComes
            },
        );
        let (here, there) = ended.stayed(&source, &destination);
        println!("{here}\n    {there}");
        for output in [here, there] {
            assert!(output.contains("multifd channel 1"), "{output}");
        }
        assert!(ended.took >= patience, "{:?}", ended.took);
    }
    drop(source);
    census.expect_unchanged();
}

#[test]
fn a_cancel_ends_the_handshake_of_a_late_channel() {
    alone!();
    let pki = Pki::new();
    let mut options = options(&pki.host("127.0.0.1"), &[("multifd-channels", "2")]);
    // So that the handshake timeout does not end it.
    options.limits.handshake_timeout = 2 * BOUND;
    let kind = rig::kinds()[0];
    let source = rig::source(kind, &settings(), Quirks::default());
    let destination = rig::destination(kind, &settings(), Quirks::default());
    let (ended, _) = with_a_late_channel([&source, &destination], [&options, &options], &|_,
                                                                                          [
        here,
        _,
    ]| {
        here.cancel();
        Late::NeverComes
    });
    ended.stayed(&source, &destination);
    let cancelled = matches!(ended.source, Err(MigrationError::Cancelled));
    assert!(cancelled, "{:?}", ended.errors());
}

#[test]
fn a_refusal_over_tls_is_received_while_channels_connect() {
    alone!();
    let pki = Pki::new();
    let host = pki.host("127.0.0.1");
    let ours = options(&host, &[("multifd-channels", "8")]);
    let kind = rig::kinds()[0];
    let source = rig::source(kind, &settings(), Quirks::default());
    for (name, value) in [("multifd-compression", "zstd"), ("multifd-channels", "2")] {
        let mut theirs = ours.clone();
        theirs.set(name, value).unwrap();
        let destination = rig::destination(kind, &settings(), Quirks::default());
        let ended = rig::between(&source, &destination, [&ours, &theirs]);
        let (here, there) = ended.stayed(&source, &destination);
        for output in [here, there] {
            assert!(output.contains(name) && output.contains(value), "{output}");
        }
    }
}

/// A guest that goes through a sequence of faults.
struct Course {
    options: Options,
    source: Arc<Probe>,
    to_destination: usize,
    problems: Vec<String>,
}

impl Course {
    fn new(options: Options) -> Self {
        Self {
            options,
            source: Arc::new(rig::source(GuestKind::Threads, &settings(), quirks())),
            to_destination: 0,
            problems: Vec::new(),
        }
    }

    /// Migrates with `fault`; the guest is in `self.source` afterwards, on either side before.
    fn migrate(&mut self, fault: Option<Fault>) -> (Log, Result<Holder, String>) {
        let destination = rig::destination(GuestKind::Threads, &settings(), quirks());
        let (listener, address) = rig::listen();
        let (proxy, to) = Proxy::loopback(&address, Records::new(fault)).unwrap();
        let ended: Ended = rig::migrate(&self.source, &destination, listener, &to, &self.options);
        let log = proxy.finish().into_log();
        let holder = ended.holder(&self.source, &destination);
        let holder = holder.map_err(|problem| format!("{problem}: {:?}", ended.errors()));
        match holder {
            Ok(Holder::Source) => {}
            Ok(Holder::Destination) => self.source = Arc::new(destination),
            Err(_) => {
                self.source = Arc::new(rig::source(GuestKind::Threads, &settings(), quirks()));
            }
        }
        (log, holder)
    }

    fn inject(&mut self, fault: Fault) {
        let (log, holder) = self.migrate(Some(fault));
        match holder {
            Ok(Holder::Destination) => self.to_destination += 1,
            Ok(Holder::Source) if log.fired => {}
            // The last records of a connection vary between migrations.
            Ok(Holder::Source) => self.problems.push(format!("{fault:?}: no fault, no guest")),
            Err(problem) => self.problems.push(format!("{fault:?}: {problem}")),
        }
    }
}

fn quirks() -> Quirks {
    Quirks {
        sync: Some(three_rounds()),
        ..Quirks::default()
    }
}

/// Faults of a migration: the first and the last [`EDGE`] records, and every [`STRIDE`]th between them.
const EDGE: usize = 24;
const STRIDE: usize = 16;

#[test]
fn any_tampering_with_a_record_leaves_one_guest() {
    alone!();
    let census = Census::take();
    let pki = Pki::new();
    let mut options = options(&pki.host("127.0.0.1"), &[("multifd-compression", "zstd")]);
    options.limits.handshake_timeout = Duration::from_secs(1);
    options.limits.settle_timeout = Duration::from_secs(2);
    options.stream.max_bandwidth = 0;
    options.switchover.downtime_limit = Duration::ZERO;
    let mut course = Course::new(options);
    let (watched, holder) = course.migrate(None);
    assert_eq!(holder, Ok(Holder::Destination));
    let actions = [
        Action::Cut,
        Action::Truncate,
        Action::Drop,
        Action::Double,
        Action::Swap,
        Action::Flip(0),
        Action::Flip(4),
        Action::Flip(9),
        Action::Flip(usize::MAX),
    ];
    let mut turn = 0;
    for (back, records) in [(false, watched.forth), (true, watched.back)] {
        let is_place = |number: &usize| {
            *number < EDGE || records - number <= EDGE || number.is_multiple_of(STRIDE)
        };
        for number in (0..records).filter(is_place) {
            // Each place gets some of them in turn, so that the course ends in time.
            for _ in 0..2 {
                let action = actions[turn % actions.len()];
                turn += 1;
                course.inject(Fault {
                    back,
                    number,
                    action,
                });
            }
        }
    }
    eprintln!(
        "{turn} faults in {watched:?}; the destination had the guest after {}",
        course.to_destination
    );
    let problems = std::mem::take(&mut course.problems);
    drop(course);
    assert!(
        problems.is_empty(),
        "{} problems:\n{}",
        problems.len(),
        problems.join("\n")
    );
    census.expect_unchanged();
}

/// Connections of unknown clients in a migration: a sample that takes each place several times.
/// `hotlift-net/src/admission/handshake_slots.rs` proves that any number of them takes at most all places.
const UNKNOWN_CLIENTS: usize = 512;

/// Concurrent connections. A connection that overflows the listener's queue takes a second.
const CROWD: usize = 16;

#[test]
fn unfinished_handshakes_of_unknown_clients_do_not_affect_a_migration() {
    alone!();
    let census = Census::take();
    let pki = Pki::new();
    // Slow enough that all of them connect while it runs.
    let mut ours = options(&pki.host("127.0.0.1"), &[("max-bandwidth", "1M")]);
    ours.switchover.downtime_limit = Duration::ZERO;
    let mut fast = ours.clone();
    fast.set("max-bandwidth", "0").unwrap();
    fast.switchover.downtime_limit = Duration::from_millis(300);
    let kind = rig::kinds()[0];
    let source = rig::source(kind, &settings(), Quirks::default());
    let destination = rig::destination(kind, &settings(), Quirks::default());
    let (listener, to) = rig::listen();
    let Address::Tcp { port, .. } = to else {
        panic!("{to}");
    };
    let (begun, over) = (AtomicBool::new(false), AtomicBool::new(false));
    let controls = [Control::new(), Control::new()];
    let come = || {
        let mut came = 0;
        while came < UNKNOWN_CLIENTS / CROWD && !over.load(Ordering::Relaxed) {
            if !begun.load(Ordering::Relaxed) {
                thread::yield_now();
                continue;
            }
            // A record header that announces a ClientHello, without data after it.
            let hello = [0x16, 0x03, 0x01, 0x02, 0x00, 0x01];
            let output = TcpStream::connect(("127.0.0.1", port))
                .and_then(|mut stranger| stranger.write_all(&hello));
            came += usize::from(output.is_ok());
        }
        came
    };
    let ended = thread::scope(|scope| {
        let strangers: Vec<_> = (0..CROWD).map(|_| scope.spawn(come)).collect();
        let all = scope.spawn(|| {
            let came: usize = strangers.into_iter().map(|one| one.join().unwrap()).sum();
            // The rest of the guest may be sent at full speed.
            controls[0].change(&fast);
            came
        });
        let ended = rig::run(
            &source,
            &destination,
            listener,
            &to,
            [&ours, &ours],
            &controls,
            &|_| begun.store(true, Ordering::Relaxed),
        );
        over.store(true, Ordering::Relaxed);
        assert_eq!(all.join().unwrap(), UNKNOWN_CLIENTS);
        ended
    });
    ended.arrived(&source, &destination, "strangers");
    let turned_away: u64 = controls[1].rejected_connections().into_values().sum();
    assert!(turned_away > 0, "they were counted");
    drop((source, destination));
    census.expect_unchanged();
}

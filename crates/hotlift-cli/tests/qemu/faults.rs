//! Kills any process or cuts any connection, at any time. Afterwards:
//!
//! - the guest runs on exactly one side,
//! - the QEMUs report the cause,
//! - no process, file or socket remains.

use std::cell::RefCell;
use std::panic::{AssertUnwindSafe, catch_unwind};
use std::path::Path;
use std::time::Duration;

use hotlift_qmp::{MigrationInfo, QmpError};
use hotlift_testkit::proxy::{Proxy, Socket};
use rustix::process::Signal;
use serde_json::json;
use tempfile::TempDir;

use crate::guest::Guest;
use crate::hotlift::{Running, errors};
use crate::need;
use crate::route::{Multifd, RelayOptions, Side, failed, relay};
use crate::vm::{Accelerator, Machine, Memory, PC_7, Release, Vm, folder, threads_of, until};

/// Phase of the migration at the time of the fault. Each phase lasts until the fault.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
enum Phase {
    /// The destination's relay is stopped: connections are accepted and not answered.
    Setup,
    /// At a rate at which the first round takes a minute.
    FirstRound,
    /// The guest writes at about the migration's rate.
    LaterRound,
    /// The guest is paused at the source, and no device state has been sent.
    BeforeSwitchover,
    /// The source has sent all that it can, and the destination QEMU is stopped.
    Switchover,
}

const PHASES: [Phase; 5] = [
    Phase::Setup,
    Phase::FirstRound,
    Phase::LaterRound,
    Phase::BeforeSwitchover,
    Phase::Switchover,
];

/// Prefix of the name of QEMU's migration thread: before 9.1 (7.2 is tested), and since.
const MIGRATION_THREAD: [&str; 2] = ["live_migration", "mig/src/main"];

/// Prefix of the names of the threads of a source QEMU's channels: before 9.1, and since.
const CHANNEL_THREADS: [&str; 2] = ["multifdsend_", "mig/src/send_"];

/// The processes of a migration.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
enum Party {
    SourceQemu,
    SourceRelay,
    DestinationRelay,
    DestinationQemu,
}

const PARTIES: [Party; 4] = [
    Party::SourceQemu,
    Party::SourceRelay,
    Party::DestinationRelay,
    Party::DestinationQemu,
];

/// Connection between two parties.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
enum Link {
    SourceQemuToRelay,
    RelayToRelay,
    RelayToDestinationQemu,
}

const LINKS: [Link; 3] = [
    Link::SourceQemuToRelay,
    Link::RelayToRelay,
    Link::RelayToDestinationQemu,
];

/// Time without an answer after which a QEMU is checked for a hang.
const SILENCE: Duration = Duration::from_secs(5);

/// Channels between all parties.
const CHANNELS: Multifd = Multifd::Channels(2);

/// A prepared migration.
struct Rig {
    here: Vm,
    there: Vm,
    source: Option<Running>,
    destination: Option<Running>,
    /// Proxies in the order of the links.
    proxies: Vec<Proxy>,
    /// Folder of their sockets.
    _folder: TempDir,
    /// Address to which the source QEMU sends.
    uri: String,
}

impl Rig {
    /// Creates a migration. `None`: it cannot be tested here.
    fn new(from: Release, to: Release) -> Option<Self> {
        let machine = Machine {
            name: PC_7,
            accelerator: Accelerator::Kvm,
            memory: Memory::File,
            guest: Guest::program(),
        };
        let mut here = Vm::running(from, &machine)?;
        let mut there = Vm::waiting(to, &machine)?;
        Side::new(CHANNELS)
            .with("return-path")
            .with("pause-before-switchover")
            .apply(&mut here);
        Side::new(CHANNELS).apply(&mut there);
        there
            .qmp
            .migrate_incoming(&there.uri("incoming"), true)
            .expect("migrate-incoming");

        let (between, outgoing) = (there.path("between"), here.path("outgoing"));
        let links = folder();
        let proxied = ["source", "between", "destination"].map(|name| links.path().join(name));
        let proxies = [&outgoing, &between, &there.path("incoming")]
            .into_iter()
            .zip(&proxied)
            .map(|(to, at)| Proxy::unix(at, to).expect("a proxy"))
            .collect();
        let [to_source_relay, to_relay, to_qemu] =
            proxied.map(|path| format!("unix:{}", path.display()));
        let uri = |path: &Path| format!("unix:{}", path.display());
        let options = RelayOptions::new("zstd", CHANNELS, CHANNELS);
        let (destination, _) = relay(
            "destination",
            &uri(&between),
            &to_qemu,
            options.destination.as_deref().unwrap_or_default(),
        );
        let (source, _) = relay("source", &uri(&outgoing), &to_relay, &options.source);
        Some(Self {
            uri: to_source_relay,
            here,
            there,
            source: Some(source),
            destination: Some(destination),
            proxies,
            _folder: links,
        })
    }

    fn link(&self, link: Link) -> &Proxy {
        let place = LINKS
            .iter()
            .position(|&one| one == link)
            .expect("one of them");
        &self.proxies[place]
    }

    /// Waits for a connection of a link.
    fn wait_for(&self, link: Link, socket: Socket) {
        until(
            || format!("{link:?} has no {socket:?}"),
            || self.link(link).has(socket).then_some(()),
        );
    }

    fn relay(&self, party: Party) -> &Running {
        let relay = match party {
            Party::SourceRelay => &self.source,
            _ => &self.destination,
        };
        relay.as_ref().expect("it runs")
    }

    fn signal(&self, party: Party, signal: Signal) {
        match party {
            Party::SourceQemu => self.here.signal(signal),
            Party::DestinationQemu => self.there.signal(signal),
            relay => self.relay(relay).signal(signal),
        }
    }

    /// Migrates up to a phase.
    fn reach(&mut self, phase: Phase) {
        let (bandwidth, downtime) = match phase {
            Phase::FirstRound => (1_u64 << 20, 1),
            // The guest dirties some 20 MiB per second.
            Phase::LaterRound => (24 << 20, 1),
            // The rest is so small that buffers on the path hold most of it.
            _ => (128 << 20, 10),
        };
        let parameters = json!({ "max-bandwidth": bandwidth, "downtime-limit": downtime });
        self.here
            .qmp
            .set_parameters(&parameters)
            .expect("parameters");
        if phase == Phase::Setup {
            self.signal(Party::DestinationRelay, Signal::STOP);
        }
        self.here.qmp.migrate(&self.uri).expect("migrate");
        let rounds = |here: &mut Vm| {
            here.migration().ram.map_or(0, |ram| {
                if ram.transferred > 0 {
                    ram.dirty_sync_count
                } else {
                    0
                }
            })
        };
        let here = &mut self.here;
        match phase {
            Phase::Setup => until(
                || "no connection".to_owned(),
                || here.migration().is_running().then_some(()),
            ),
            Phase::FirstRound => {
                until(
                    || "no first round".to_owned(),
                    || (rounds(here) == 1).then_some(()),
                );
                // All connections exist.
                self.wait_for(Link::RelayToDestinationQemu, Socket::Main);
            }
            Phase::LaterRound => until(
                || "no later round".to_owned(),
                || (rounds(here) >= 3).then_some(()),
            ),
            Phase::BeforeSwitchover => drop(here.reaches("pre-switchover")),
            Phase::Switchover => {
                here.reaches("pre-switchover");
                self.signal(Party::DestinationQemu, Signal::STOP);
                let arguments = json!({ "state": "pre-switchover" });
                self.here
                    .qmp
                    .client()
                    .execute("migrate-continue", &arguments)
                    .expect("migrate-continue");
                self.source_is_in_its_completion();
            }
        }
    }

    /// Continues all stopped parties except `but`.
    fn continue_except(&mut self, phase: Phase, but: Option<Party>) {
        let stopped = match phase {
            Phase::Setup => Party::DestinationRelay,
            Phase::Switchover => Party::DestinationQemu,
            Phase::FirstRound | Phase::LaterRound | Phase::BeforeSwitchover => return,
        };
        if but != Some(stopped) {
            self.signal(stopped, Signal::CONT);
        }
    }

    /// Checks the result after `killed` was killed, or a socket was cut.
    fn check(mut self, phase: Phase, killed: Option<Party>, may_hang: bool) {
        let mut dead: Vec<_> = killed.into_iter().collect();
        let mut ended = None;
        if killed != Some(Party::SourceQemu) {
            ended = self.source_has_ended();
            if ended.is_none() {
                self.signal(Party::SourceQemu, Signal::KILL);
                dead.push(Party::SourceQemu);
            }
        }
        if dead.contains(&Party::SourceQemu) {
            until(|| "it lives".to_owned(), || self.here.ended());
            if phase == Phase::Switchover {
                // It dies slowly: if the destination loads everything before its sockets close, this equals a normal release by
                // the source, and the guest runs there.
                let relay = self.source.take().expect("it was started");
                let (status, output) = relay.wait();
                if status.success() {
                    return self.has_moved();
                }
                assert_eq!(errors(&output).len(), 1, "{}", output.join("\n"));
            }
        }
        if let Some(info) = ended {
            if info.is_completed() && phase == Phase::Switchover && killed.is_none() {
                // All its pages had been sent when the channel was cut.
                return self.has_moved();
            }
            assert!(info.has_failed(), "{info:?}");
            until(
                || "the source does not go on".to_owned(),
                || self.here.is_running().then_some(()),
            );
            // 7.2 reports no error after the last page.
            let why = info.error_desc.unwrap_or_else(|| self.here.stderr());
            let has_words = !why.is_empty() || self.here.release == Release::V7;
            assert!(has_words, "the source reports no reason");
            let count = self.here.count().expect("it has printed something");
            self.here.continues_from(count);
            let proven = self.here.prove();
            self.here.qmp.cont().expect("cont");
            self.here.continues_from(proven);
        }
        for (party, relay) in [
            (Party::SourceRelay, self.source.take()),
            (Party::DestinationRelay, self.destination.take()),
        ] {
            let Some(relay) = relay else { continue };
            if dead.contains(&party) {
                relay.wait();
            } else if phase == Phase::Setup {
                // It may be waiting for a first connection.
                relay.signal(Signal::INT);
                let (status, output) = relay.wait();
                let ends = [Some(1), Some(130)].contains(&status.code());
                assert!(ends, "{party:?}: {status}\n{}", output.join("\n"));
            } else {
                let why = failed(&format!("{party:?}"), relay);
                assert!(why.contains("relay failed"), "{party:?}: {why}");
            }
        }
        if dead.contains(&Party::DestinationQemu) {
            until(|| "it lives".to_owned(), || self.there.ended());
        } else {
            let how = until(
                || "the destination does not end".to_owned(),
                || how_it_ended(&mut self.there, phase, may_hang),
            );
            assert!(!how.is_empty(), "the destination reports no reason");
            assert_eq!(self.there.count(), None, "the guest has run there");
        }
        self.proxies.clear();
        for (owner, file) in [
            (Party::SourceRelay, self.here.path("outgoing")),
            (Party::DestinationRelay, self.there.path("between")),
        ] {
            // A killed party cannot remove its own files.
            if !dead.contains(&owner) {
                assert!(!file.exists(), "{} is left", file.display());
            }
        }
    }
}

impl Rig {
    /// Waits until the source QEMU has begun its completion. If its last pages are not read, it holds its big lock and does not
    /// answer: its silence equals the state "device".
    fn source_is_in_its_completion(&mut self) {
        self.here.qmp.client().set_timeout(SILENCE);
        until(
            || "the source does not begin its completion".to_owned(),
            || match self.here.qmp.query_migrate() {
                Err(QmpError::Timeout { .. }) => Some(()),
                answer => (answer.expect("query-migrate").status() == "device").then_some(()),
            },
        );
    }

    /// Waits until the source QEMU has ended its migration. `None`: it never will.
    ///
    /// QEMU up to 10.0 may hang when its channels break in its completion (in one of four runs, some days). The first thread
    /// that notices ends all others. The migration thread may then wait for another's SYNC with the big lock held, and QMP does
    /// not answer. The guest is paused, and the process has to be killed.
    ///
    /// In a round (one of some hundred runs) it does not hold the lock: QEMU reports "failed" and the guest runs, but main
    /// stays open without a writer. `migrate_cancel` closes it, and changes nothing if the thread was about to end.
    fn source_has_ended(&mut self) -> Option<MigrationInfo> {
        self.here.qmp.client().set_timeout(SILENCE);
        let last = RefCell::new(String::new());
        let pid = self.here.pid();
        until(
            || {
                let threads = threads_of(pid).join(" ");
                let answer = last.borrow();
                format!("the source's migration does not end: {answer}; threads: {threads}")
            },
            || match self.here.qmp.query_migrate() {
                Err(QmpError::Timeout { .. }) => {
                    *last.borrow_mut() = "no answer".to_owned();
                    let threads = threads_of(pid);
                    let has = |names: [&str; 2]| {
                        threads
                            .iter()
                            .any(|thread| names.iter().any(|name| thread.starts_with(name)))
                    };
                    (has(MIGRATION_THREAD) && !has(CHANNEL_THREADS)).then_some(None)
                }
                // The source's manager does not know yet; the source may. A slowly writing guest also gets here from a round.
                Ok(info) if info.status() == "pre-switchover" => {
                    let arguments = json!({ "state": "pre-switchover" });
                    let client = self.here.qmp.client();
                    let _ = client.execute("migrate-continue", &arguments);
                    None
                }
                answer => {
                    let info = answer.expect("query-migrate");
                    *last.borrow_mut() = format!("{info:?}");
                    if info.has_failed() && self.here.has_thread("mig/src/main") {
                        self.here.qmp.migrate_cancel().expect("migrate_cancel");
                    }
                    (!info.is_running()).then_some(Some(info))
                }
            },
        )
    }

    /// Checks that the guest has moved to the destination nevertheless.
    fn has_moved(mut self) {
        let relays = [self.source.take(), self.destination.take()];
        for relay in relays.into_iter().flatten() {
            let (status, output) = relay.wait();
            assert!(status.success(), "{status}\n{}", output.join("\n"));
        }
        self.there.reaches("completed");
        assert!(!self.here.is_running(), "the source runs, too");
        let before = self.here.count().expect("it has printed something");
        self.there.continues_from(before);
        self.there.prove();
    }
}

/// Returns a destination's statement about a failed migration; `None` while it runs.
fn how_it_ended(there: &mut Vm, phase: Phase, may_hang: bool) -> Option<String> {
    if there.ended().is_some() {
        there.read_last_output();
        return Some(there.stderr());
    }
    there.qmp.client().set_timeout(SILENCE);
    let info = match there.qmp.query_migrate() {
        Ok(info) => info,
        Err(QmpError::Timeout { .. }) if may_hang => return Some("it hangs".to_owned()),
        // An exiting QEMU no longer answers.
        Err(_) => return None,
    };
    let state = there.qmp.query_status().ok()?;
    assert!(!state.running, "the guest runs there: {state:?} {info:?}");
    match info.status() {
        // Its error, or stderr if a connection closed without data.
        "failed" => Some(info.error_desc.unwrap_or_else(|| there.stderr())),
        // Connections that it needs for the start are missing, and may still come.
        "setup" | "active" if phase == Phase::Setup => Some(state.status),
        _ => None,
    }
}

/// Runs all of `cases`, and fails with the failed ones.
fn each<T: std::fmt::Debug + Copy>(cases: &[T], run: impl Fn(T) -> Option<()>) {
    let mut wrong = Vec::new();
    // Selects one case for debugging.
    let asked = std::env::var("HOTLIFT_QEMU_FAULT").unwrap_or_default();
    for &case in cases {
        if !format!("{case:?}").contains(&asked) {
            continue;
        }
        let start = std::time::Instant::now();
        match catch_unwind(AssertUnwindSafe(|| run(case))) {
            Ok(run) => need!(run),
            Err(panic) => wrong.push(format!(
                "{case:?}: {}",
                panic.downcast_ref::<String>().cloned().unwrap_or_default()
            )),
        }
        println!("{:.1?} {case:?}", start.elapsed());
    }
    assert!(
        wrong.is_empty(),
        "{} of {} failed:\n{}",
        wrong.len(),
        cases.len(),
        wrong.join("\n")
    );
}

fn killed_in(from: Release, to: Release, phases: &[Phase]) {
    let cases: Vec<_> = phases
        .iter()
        .flat_map(|&phase| PARTIES.map(|party| (party, phase)))
        .collect();
    each(&cases, |(party, phase)| {
        let mut rig = Rig::new(from, to)?;
        rig.reach(phase);
        rig.signal(party, Signal::KILL);
        rig.continue_except(phase, Some(party));
        rig.check(phase, Some(party), false);
        Some(())
    });
}

#[test]
fn a_killed_process_leaves_the_guest_on_one_side_or_ended_with_its_qemu() {
    killed_in(Release::V10, Release::V10, &PHASES);
}

#[test]
fn a_killed_process_between_mixed_qemus_leaves_the_guest_on_one_side() {
    for release in [Release::V7, Release::V11] {
        killed_in(release, release, &[Phase::FirstRound, Phase::Switchover]);
    }
}

/// One cut channel represents all.
const CHANNEL: Socket = Socket::Channel(0);

/// A socket of a link, cut in a phase.
type Cut = (Link, Socket, Phase);

/// They end by a timeout of 30 s: the relay has no main channel and QEMU none that fails, or vice versa.
const SLOW_CUTS: [Cut; 2] = [
    (Link::SourceQemuToRelay, Socket::Main, Phase::Setup),
    (Link::RelayToDestinationQemu, CHANNEL, Phase::Setup),
];

#[test]
fn a_cut_of_any_socket_leaves_the_guest_at_the_source() {
    let mut cases = Vec::new();
    for phase in PHASES {
        for link in LINKS {
            for socket in [Socket::Main, CHANNEL] {
                cases.push((link, socket, phase));
            }
        }
    }
    cases.retain(|case| !SLOW_CUTS.contains(case));
    guest_stays_after(&cases);
}

#[test]
#[ignore = "ends by time-outs of 30 s"]
fn a_socket_cut_in_setup_times_out_and_the_guest_stays_at_the_source() {
    guest_stays_after(&SLOW_CUTS);
}

fn guest_stays_after(cases: &[Cut]) {
    each(cases, |(link, socket, phase)| {
        let mut rig = Rig::new(Release::V10, Release::V10)?;
        if phase == Phase::Setup {
            rig.link(link).cut_when_recognised(socket);
            // Its status may be any by now, or final.
            rig.here.qmp.migrate(&rig.uri).expect("migrate");
            until(
                || format!("{link:?} has no {socket:?}"),
                || rig.link(link).has_cut_recognised().then_some(()),
            );
        } else {
            rig.reach(phase);
            rig.wait_for(link, socket);
            assert!(rig.link(link).cut_first(socket));
            rig.continue_except(phase, None);
        }
        // The thread of a broken channel ends, and QEMU's main thread, with QMP, may wait for its SYNC forever (7.2 and 10.0).
        // The guest is then not started, and the process has to be killed.
        let may_hang = link == Link::RelayToDestinationQemu && socket == CHANNEL;
        rig.check(phase, None, may_hang);
        Some(())
    });
}

#[test]
fn a_migration_that_is_cancelled_leaves_the_guest_and_another_can_follow() {
    let mut rig = need!(Rig::new(Release::V10, Release::V10));
    rig.reach(Phase::LaterRound);
    rig.here.qmp.migrate_cancel().expect("migrate_cancel");
    rig.here.reaches("cancelled");
    for (side, relay) in [
        ("source", rig.source.take()),
        ("destination", rig.destination.take()),
    ] {
        failed(side, relay.expect("it was started"));
    }
    assert!(rig.here.is_running());
    let Rig {
        here,
        there,
        proxies,
        ..
    } = rig;
    drop((there, proxies));
    let again = crate::route::Route {
        source: Side::new(CHANNELS),
        destination: Side::new(CHANNELS),
        relays: Some(RelayOptions::new("zlib", CHANNELS, CHANNELS)),
        live: true,
    };
    let mut here = here;
    here.qmp
        .set_capabilities(&[("pause-before-switchover", false)])
        .expect("capabilities");
    need!(again.take(here, Release::V10));
}

#[test]
fn an_interrupted_relay_ends_the_migration_and_reports_it() {
    each(&[Party::SourceRelay, Party::DestinationRelay], |party| {
        let mut rig = Rig::new(Release::V10, Release::V10)?;
        rig.reach(Phase::FirstRound);
        rig.signal(party, Signal::INT);
        let relay = match party {
            Party::SourceRelay => &mut rig.source,
            _ => &mut rig.destination,
        };
        let (status, output) = relay.take().expect("it runs").wait();
        assert_eq!(status.code(), Some(130), "{}", output.join("\n"));
        until(
            || "the source does not go on".to_owned(),
            || (rig.here.is_running() && rig.here.migration().has_failed()).then_some(()),
        );
        let count = rig.here.count().expect("it has printed something");
        rig.here.continues_from(count);
        Some(())
    });
}

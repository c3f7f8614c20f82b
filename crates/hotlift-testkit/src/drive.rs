//! Runs one case of the fault campaign: runs the migration, causes the faults in their phases, and watches both guests.

use std::time::{Duration, Instant};

use rustix::process::Signal;

use crate::case::{Asking, Case, Fault, Kind, Moment, Pair, Party, PowerChange, SETTLE};
use crate::error::KitError;
use crate::machine::{GuestState, Machine};
use crate::namespace::{End, Message};
use crate::process::{Output, Process};
use crate::qemu::PATIENCE;
use crate::rig::{DATA_PORT, PORT, Rig, index};
use crate::strangers::Strangers;

/// Interval between two polls of the state.
const TICK: Duration = Duration::from_millis(3);

/// Maximum duration of a case, in addition to its faults and `settle-timeout`.
const SLACK: Duration = Duration::from_secs(120);

/// Timeout for the end of the destination's side, after the end of the source's side.
const GRACE: Duration = Duration::from_secs(12);

/// Timeout for the destination's side that replaces [`GRACE`] if the guest runs at the source or is off. No source
/// connects again in these cases.
const GRACE_IF_STAYED: Duration = Duration::from_secs(2);

/// Timeout for a command to end after SIGINT.
const ASKED: Duration = Duration::from_secs(30);

/// Time after which a process that reported an error is assumed to continue with its guest paused.
const FAILED_SOURCE_STAYS_AFTER: Duration = Duration::from_secs(5);

/// Time for which an output stays full.
const FULL: Duration = Duration::from_secs(15);

/// Assumed duration of the page transfer, for a guest that does not report its switchover.
const ROUNDS: Duration = Duration::from_millis(600);

/// Observations made until the end of a case.
#[derive(Debug)]
pub struct Seen {
    /// Which faults occurred; an entry for each fault of the case.
    pub fired: Vec<bool>,
    /// True if all commands have started; otherwise no migration was requested.
    pub is_ready: bool,
    /// True if the guest ran on both sides at once.
    pub both: bool,
    /// True if the guest has run at the destination.
    pub arrived: bool,
    /// Number of TCP segments with data that left the source unencrypted, apart from connections between agents.
    pub plaintext: u64,
    /// True if no guest ran at the end of a full output, and no other fault was in effect.
    pub none_while_full: bool,
    /// True if the source's side did not end in time.
    pub hangs: bool,
    /// Names of the processes that had to be killed at the end.
    pub did_not_end: Vec<&'static str>,
    /// State of the guest at the source.
    pub here: GuestState,
    /// State of the guest at the destination.
    pub there: GuestState,
    /// Exit code of the source's side; `None` if unknown.
    pub source_exit: Option<i32>,
    /// Exit code of the destination's command; `None` if unknown.
    pub destination_exit: Option<i32>,
}

struct Drive<'a> {
    case: &'a Case,
    rig: &'a mut Rig,
    fired: Vec<bool>,
    /// True for each fault that was already caused, or could not be.
    tried: Vec<bool>,
    /// Faults to undo, each with its time.
    undone: Vec<(Instant, Kind)>,
    begun: Instant,
    active: Option<Instant>,
    stopped: Option<Instant>,
    arrived: Option<Instant>,
    over: Option<Instant>,
    /// Time when a source without a monitor reported an error; `None` before.
    failed: Option<Instant>,
    loses: bool,
    both: bool,
    none_while_full: bool,
    full_since: Option<Instant>,
    strangers: Option<Strangers>,
}

/// Runs the migration of a case to its end, and causes the faults.
///
/// # Errors
/// If the test machinery itself fails.
pub fn drive(case: &Case, rig: &mut Rig) -> Result<Seen, KitError> {
    let tried = case
        .faults
        .iter()
        .map(|fault| fault.kind.is_from_the_start());
    let tried: Vec<bool> = tried.collect();
    let fired = case.faults.iter().zip(&tried).map(|(fault, is_there)| {
        // QEMU may lack or reject the capability.
        let is_capability = matches!(fault.kind, Kind::CapabilityOn { .. });
        *is_there && (!is_capability || rig.capability_is_on)
    });
    let mut drive = Drive {
        case,
        fired: fired.collect(),
        tried,
        rig,
        undone: Vec::new(),
        begun: Instant::now(),
        active: None,
        stopped: None,
        arrived: None,
        over: None,
        failed: None,
        loses: false,
        both: false,
        none_while_full: false,
        full_since: None,
        strangers: None,
    };
    let mut hangs = false;
    if drive.rig.is_ready {
        drive.fire_due()?;
        drive.rig.migrate(case)?;
        drive.begun = Instant::now();
        hangs = !drive.run()?;
    }
    drive.finish(hangs)
}

impl Drive<'_> {
    /// Runs the migration. Returns false if it does not end in time.
    fn run(&mut self) -> Result<bool, KitError> {
        let deadline = self.begun + self.case.lasts() + SETTLE + SLACK;
        loop {
            self.watch();
            self.follow()?;
            self.fire_due()?;
            self.undo(false)?;
            self.read_on_in_time();
            if let Some(over) = self.over {
                let waits = |(fault, tried): (&Fault, &bool)| {
                    let delay = Duration::from_millis(fault.delay_ms);
                    !tried && fault.moment == Moment::After && over.elapsed() <= delay
                };
                let is_waited_for = self.case.faults.iter().zip(&self.tried).any(waits);
                if !is_waited_for && self.undone.is_empty() {
                    return Ok(true);
                }
            }
            if Instant::now() >= deadline {
                return Ok(false);
            }
            std::thread::sleep(TICK);
        }
    }

    /// Records whether both guests run at once, and returns the states of source and destination. Polls the destination
    /// first: a guest that arrives between the polls is then seen only once.
    fn watch(&mut self) -> (GuestState, GuestState) {
        let there = self.rig.there.guest_state();
        if there == GuestState::Running {
            self.arrived.get_or_insert_with(Instant::now);
        }
        let here = self.here();
        self.both |= there == GuestState::Running && here == GuestState::Running;
        (here, there)
    }

    /// Returns the state of the guest at the source. For a guest without a monitor, derives the state from its output.
    fn here(&mut self) -> GuestState {
        if !self.case.pair.is_unmonitored() {
            return self.rig.here.guest_state();
        }
        let ended = self.rig.here.has_ended();
        let goes_on = |machine: &mut Machine| {
            let process = machine.process();
            process.is_some_and(|process| {
                if ended {
                    process.read_last_output();
                }
                process.has_printed("the guest runs here again")
            })
        };
        match goes_on(&mut self.rig.here) {
            true => GuestState::Running,
            false if ended => GuestState::Ended,
            false => GuestState::Silent,
        }
    }

    /// Records the progress of the migration, and continues a migration that waits for the test.
    fn follow(&mut self) -> Result<(), KitError> {
        if self.over.is_none() && self.is_over() {
            self.over = Some(Instant::now());
        }
        if self.stopped.is_some() {
            return Ok(());
        }
        let is_plain = self.case.pair.is_unmonitored();
        let teller = match is_plain {
            true => &mut self.rig.there,
            false => &mut self.rig.here,
        };
        let Some(info) = teller.migration() else {
            return Ok(());
        };
        let status = info.status();
        let begun = matches!(status, "active" | "pre-switchover" | "device" | "completed");
        if begun && self.active.is_none() {
            self.active = Some(Instant::now());
        }
        let has_stopped = match is_plain {
            true => self.active.is_some_and(|active| active.elapsed() >= ROUNDS),
            false => {
                // A migration that waits is continued below, so its state must be read.
                let is_held = self.case.pair.is_held_before_switchover();
                matches!(status, "pre-switchover" | "device" | "completed")
                    || !is_held && self.rig.here.has_stopped()
            }
        };
        if has_stopped {
            self.stopped = Some(Instant::now());
            // A guest without a monitor may still send rounds.
            if let Some(kbits) = self.case.net.slow.filter(|_| !is_plain) {
                self.rig.link.limit(kbits)?;
            }
            if status == "pre-switchover" {
                if let Some(message) = self.message() {
                    self.rig.link.lose(message)?;
                    self.loses = true;
                }
                self.stopped = Some(Instant::now());
                // The migration may have ended in the meantime.
                let _ = self.rig.here.proceed();
            }
        }
        Ok(())
    }

    fn message(&self) -> Option<Message> {
        let lost = |fault: &Fault| match fault.moment {
            Moment::Lost(message) => Some(message),
            _ => None,
        };
        self.case.faults.iter().find_map(lost)
    }

    /// Returns true if the source's side has ended.
    fn is_over(&mut self) -> bool {
        let ended = |process: &mut Option<Process>| {
            process.as_mut().is_none_or(|one| one.ended().is_some())
        };
        let is_final = |machine: &mut Machine| match machine.migration() {
            Some(info) => info.is_completed() || info.has_failed(),
            None => machine.has_ended(),
        };
        match self.case.pair {
            Pair::BuiltIn {
                monitored: true, ..
            }
            | Pair::Agents { .. } => is_final(&mut self.rig.here),
            Pair::BuiltIn { .. } => {
                let printed = self.rig.here.output_lines();
                if printed.iter().any(|line| line.starts_with("hotlift: ")) {
                    self.failed.get_or_insert_with(Instant::now);
                }
                self.rig.here.has_ended()
                    || self
                        .failed
                        .is_some_and(|since| since.elapsed() >= FAILED_SOURCE_STAYS_AFTER)
            }
            Pair::Steered { .. } => ended(&mut self.rig.source_command),
            Pair::Relays { .. } => {
                // The source's relay must have ended. The migration of its QEMU must also have ended, unless the QEMU
                // hangs.
                ended(&mut self.rig.source_command)
                    && (is_final(&mut self.rig.here)
                        || self.rig.here.guest_state() == GuestState::Silent)
            }
        }
    }

    /// Causes the faults whose time has come.
    fn fire_due(&mut self) -> Result<(), KitError> {
        for number in 0..self.case.faults.len() {
            let fault = self.case.faults[number];
            if self.tried[number] {
                continue;
            }
            let since = match fault.moment {
                Moment::Setup => Some(self.begun),
                Moment::Round => self.active,
                Moment::Switchover => self.stopped,
                Moment::Arrived => self.arrived,
                Moment::After => self.over,
                Moment::Lost(_) => match self.loses && self.rig.link.has_lost()? {
                    true => Some(Instant::now()),
                    false => None,
                },
            };
            let delay = Duration::from_millis(fault.delay_ms);
            if since.is_some_and(|since| since.elapsed() >= delay) {
                self.tried[number] = true;
                self.fired[number] = self.fire(fault.kind)?;
            }
        }
        Ok(())
    }

    /// Causes a fault. Returns false if the fault has no target.
    fn fire(&mut self, kind: Kind) -> Result<bool, KitError> {
        let lasts = kind.lasts();
        if lasts > Duration::ZERO && !kind.outlasts_settling() {
            self.undone.push((Instant::now() + lasts, kind));
        }
        match kind {
            Kind::LinkDown { at, .. } => {
                self.rig.link.down(at)?;
                if std::mem::take(&mut self.loses) {
                    self.rig.link.stop_losing()?;
                }
            }
            Kind::PowerLoss { at, .. } => {
                self.rig.link.lose_power(at)?;
                if std::mem::take(&mut self.loses) {
                    self.rig.link.stop_losing()?;
                }
            }
            Kind::LockedDisk => {
                return match &mut self.rig.disk_lock {
                    Some(lock) => lock.take(),
                    None => Ok(false),
                };
            }
            // This capability was enabled when the processes were started.
            Kind::CapabilityOn { .. } => {}
            Kind::Power { change } => {
                let rig = &mut *self.rig;
                // With `-no-reboot`, a reset powers the guest off.
                let did_reset = rig.there.reset() || rig.here.reset();
                if did_reset && change == PowerChange::Reset {
                    rig.here.note_reset();
                    rig.there.note_reset();
                }
                return Ok(did_reset);
            }
            Kind::Foreign { rules } => self.rig.load_foreign(rules)?,
            Kind::Cut { how, after } => {
                for proxy in &self.rig.proxies {
                    proxy.cut(how, after);
                }
            }
            Kind::Delay { ms } => {
                for proxy in &self.rig.proxies {
                    proxy.delay(Duration::from_millis(ms));
                }
            }
            Kind::Kill { party } => self.rig.signal(party, Signal::KILL),
            Kind::Freeze { party, .. } => self.rig.signal(party, Signal::STOP),
            Kind::Signal { party, signal } => {
                let signal = match signal {
                    Asking::Int => Signal::INT,
                    Asking::Term => Signal::TERM,
                    Asking::Hup => Signal::HUP,
                };
                self.rig.signal(party, signal);
            }
            Kind::Cancel => self.rig.here.cancel(),
            Kind::QmpStall { at, .. } => match &self.rig.qmp[index(at)] {
                Some(proxy) => proxy.hold(lasts),
                // Only `serve` started this QEMU and has its QMP socket. SIGSTOP stops the QEMU's main loop.
                None => self.rig.signal(guest_of(at), Signal::STOP),
            },
            Kind::Output {
                party,
                stream,
                output,
            } => {
                if let Some(process) = self.rig.process(party) {
                    process.spoil(stream, output);
                }
                if output == Output::Full {
                    self.full_since = Some(Instant::now());
                }
            }
            Kind::Strangers { who } => {
                let ports = match self.case.pair {
                    Pair::Steered { .. } => &[PORT, DATA_PORT][..],
                    _ => &[PORT],
                };
                let host = &self.rig.link.source;
                self.strangers = Some(Strangers::start(host, ports, who, self.case.seed)?);
            }
        }
        Ok(true)
    }

    /// Undoes the faults whose duration has passed; with `all`, undoes every fault.
    fn undo(&mut self, all: bool) -> Result<(), KitError> {
        let now = Instant::now();
        let due = |(at, _): &mut (Instant, Kind)| all || *at <= now;
        for (_, kind) in self.undone.extract_if(.., due).collect::<Vec<_>>() {
            match kind {
                Kind::LinkDown { at, .. } => self.rig.link.up(at)?,
                Kind::PowerLoss { at, .. } => self.rig.link.restore_power(at)?,
                Kind::Freeze { party, .. } => self.rig.signal(party, Signal::CONT),
                Kind::QmpStall { at, .. } => match &self.rig.qmp[index(at)] {
                    Some(proxy) => proxy.hold(Duration::ZERO),
                    None => self.rig.signal(guest_of(at), Signal::CONT),
                },
                _ => {}
            }
        }
        Ok(())
    }

    /// Reads full outputs again after the time limit. A full output may block its process, but not a guest.
    fn read_on_in_time(&mut self) {
        if self.full_since.is_some_and(|since| since.elapsed() >= FULL) {
            self.full_since = None;
            let (here, there) = self.watch();
            // A guest without a monitor may run without showing it.
            let is_still =
                |state: &GuestState| matches!(state, GuestState::Paused(_) | GuestState::Ended);
            let none = is_still(&here) && (is_still(&there) || there == GuestState::Waiting);
            self.none_while_full = self.undone.is_empty() && none;
            self.read_on();
        }
    }

    fn read_on(&mut self) {
        for party in [
            Party::SourceGuest,
            Party::SourceCommand,
            Party::DestinationCommand,
            Party::DestinationGuest,
        ] {
            if let Some(process) = self.rig.process(party) {
                process.read_on();
            }
        }
    }

    /// Waits for the end of the destination's side, and returns the observations.
    fn finish(mut self, hangs: bool) -> Result<Seen, KitError> {
        let mut did_not_end = Vec::new();
        self.undo(true)?;
        if std::mem::take(&mut self.loses) {
            self.rig.link.stop_losing()?;
        }
        let over = Instant::now();
        let mut states;
        loop {
            states = self.watch();
            self.read_on_in_time();
            let one = (states.0 == GuestState::Running) != (states.1 == GuestState::Running);
            let command = self.rig.destination_command.as_mut();
            // An agent keeps running after a migration.
            let ended = matches!(self.case.pair, Pair::Agents { .. })
                || command.is_none_or(|command| command.ended().is_some());
            if (one && ended) || over.elapsed() >= GRACE {
                break;
            }
            let is_off = |kind: &Kind| kind.powers_off();
            let stays = states.0 == GuestState::Running
                || ended && self.case.happened(&self.fired).any(is_off);
            if stays && over.elapsed() >= GRACE_IF_STAYED {
                break;
            }
            std::thread::sleep(TICK * 10);
        }
        drop(self.strangers.take());
        self.read_on();
        for party in [Party::SourceCommand, Party::DestinationCommand] {
            let was_asked = self.case.happened(&self.fired).any(|kind| kind.asks(party));
            let Some(process) = self.rig.process(party) else {
                continue;
            };
            // A second signal would interrupt the command's cleanup.
            let is_ending = was_asked && process.wait(ASKED).is_ok();
            if !is_ending && process.ended().is_none() {
                process.signal(Signal::INT);
                if process.wait(ASKED).is_err() {
                    did_not_end.push(match party {
                        Party::SourceCommand => "the source's command",
                        _ => "the destination's command",
                    });
                    process.signal(Signal::KILL);
                }
            }
            process.read_last_output();
        }
        states = self.watch();
        // A monitor may answer late on a busy host.
        let has_monitor = !self.case.pair.is_unmonitored();
        let looked = Instant::now();
        while looked.elapsed() < PATIENCE
            && (states.1 == GuestState::Silent || (has_monitor && states.0 == GuestState::Silent))
        {
            std::thread::sleep(TICK * 10);
            states = self.watch();
        }
        let source_exit = self.source_exit(&states.0);
        let plaintext = match self.case.pair {
            Pair::Agents { .. } => self.rig.link.plaintext()?,
            _ => 0,
        };
        let command = self.rig.destination_command.as_mut();
        Ok(Seen {
            fired: self.fired,
            is_ready: self.rig.is_ready,
            both: self.both,
            arrived: self.arrived.is_some(),
            plaintext,
            none_while_full: self.none_while_full,
            hangs,
            did_not_end,
            source_exit,
            destination_exit: command.and_then(Process::exit_code),
            here: states.0,
            there: states.1,
        })
    }

    /// Returns the exit code of the source's side; `None` if unknown. A guest whose process keeps running has no exit
    /// code, so its migration status is converted.
    fn source_exit(&mut self, here: &GuestState) -> Option<i32> {
        match self.case.pair {
            Pair::BuiltIn {
                monitored: true, ..
            }
            | Pair::Agents { .. } => {
                let info = self.rig.here.migration()?;
                match info.status() {
                    "completed" => Some(0),
                    "cancelled" => Some(130),
                    // A guest that is powered off does not continue.
                    "failed"
                        if *here == GuestState::Running
                            || *here == GuestState::Paused("shutdown".to_owned()) =>
                    {
                        Some(1)
                    }
                    "failed" => Some(3),
                    _ => None,
                }
            }
            Pair::BuiltIn { .. } => self.rig.here.process()?.exit_code(),
            _ => self.rig.source_command.as_mut()?.exit_code(),
        }
    }
}

fn guest_of(end: End) -> Party {
    match end {
        End::Source => Party::SourceGuest,
        End::Destination => Party::DestinationGuest,
    }
}

//! Determines the outcome of a case, and compares it with the permitted outcomes.

use std::fs;
use std::path::Path;
use std::time::{Duration, Instant};

use hotlift_qmp::ANSWER_TIMEOUT;
use rustix::process::{Pid, Signal, kill_process};
use serde::{Deserialize, Serialize};

use crate::case::{Case, Kind, Pair, Party, PowerChange, SETTLE};
use crate::drive::{Seen, drive};
use crate::error::KitError;
use crate::machine::GuestState;
use crate::namespace::End;
use crate::rig::{Rig, Tools};

/// Timeout for the end of a case's processes. It includes 10 s for which a guard process waits for a silent QEMU.
const GONE: Duration = Duration::from_secs(15);

/// Kind of a problem in a case.
#[derive(Debug, Clone, Copy, PartialEq, Eq, PartialOrd, Ord, Serialize, Deserialize)]
#[serde(rename_all = "snake_case")]
pub enum Wrong {
    /// Both sides ran the guest, or the guest runs although it was powered off.
    TwoGuests,
    /// No side runs the guest, and the source has not kept it: paused, intact, with exit code 3.
    NoGuest,
    /// The guest's memory does not match its writes.
    LostWrites,
    /// A process, a file, a socket or a changed setting was not cleaned up.
    Leftover,
    /// Guest memory left the source unencrypted, although the source's agent forbids it.
    Plaintext,
    /// An exit code that the faults of the case do not explain, or success although the guest did not arrive.
    Exit,
    /// A side did not end, or a guest did not answer.
    Hangs,
    /// A wait timed out without a fault that explains it, and the guest stayed at the source. Such a case is counted,
    /// but is no defect of the product: the machine may stall. A kernel with starved workers (`workqueue lockup` in its
    /// log) delays the start of KVM's dirty log for a minute and more.
    TimedOut,
    /// The test machinery failed, so the case proves nothing.
    SetUp,
}

/// A problem in a case, with a description.
#[derive(Debug, Clone, PartialEq, Eq, Serialize, Deserialize)]
pub struct Problem {
    /// Kind of the problem.
    pub wrong: Wrong,
    /// Description with the details.
    pub what: String,
}

/// Final location and state of the guest.
#[derive(Debug, Clone, Copy, PartialEq, Eq, PartialOrd, Ord, Serialize, Deserialize)]
#[serde(rename_all = "snake_case")]
pub enum Outcome {
    /// The guest runs at the destination.
    Moved,
    /// The guest runs at the source.
    Stayed,
    /// The guest was paused and intact at the source, and continued on command.
    Kept,
    /// The guest's process ended because of a fault, or the guest was powered off.
    Ended,
    /// None of the permitted outcomes.
    Wrong,
}

/// State of a guest that runs on no side.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
enum Absent {
    /// The guest is at the source without a monitor, and waits for its operator.
    Waits,
    /// The guest is paused at the source, and its operator was informed.
    Paused,
    /// The guest ended because of a fault.
    Ended,
    /// The guest's QEMU does not answer.
    Silent,
    /// The guest does not run, for no known reason, and no command has reported it.
    Lost,
}

/// Result of a case: one line in the file of `--out`.
#[derive(Debug, Clone, Serialize, Deserialize)]
pub struct Record {
    /// Seed of the campaign.
    pub campaign: u64,
    /// The case that was run.
    #[serde(flatten)]
    pub case: Case,
    /// Which faults occurred; an entry for each fault of the case.
    pub fired: Vec<bool>,
    /// Final location and state of the guest.
    pub outcome: Outcome,
    /// Exit code of the source's side, or the negative number of the signal that ended it; `None` if unknown.
    pub source_exit: Option<i32>,
    /// Exit code of the destination's command; `None` if unknown.
    pub destination_exit: Option<i32>,
    /// State of the guest at the source.
    pub here: String,
    /// State of the guest at the destination.
    pub there: String,
    /// Problems of the case; empty if the outcome is permitted.
    pub problems: Vec<Problem>,
    /// If there are problems: the reasons from QMP, and the last output lines of the commands.
    pub words: Vec<String>,
    /// Duration of the case, in seconds.
    pub seconds: f64,
}

/// Runs a case, and returns the result.
#[must_use]
pub fn judge(tools: &Tools, campaign: u64, case: &Case) -> Record {
    let begun = Instant::now();
    let mut record = Record::new(campaign, case.clone());
    let mut rig = None;
    if let Err(error) = attempt(tools, case, &mut rig, &mut record) {
        record.note(Wrong::SetUp, error.to_string());
    }
    if let Some(rig) = &mut rig {
        match record.problems.is_empty() {
            true => record.words.clear(),
            false => record.words.extend(words(rig)),
        }
        record.excuse_time_outs();
    }
    drop(rig);
    record.sweep(tools);
    let folder = Rig::folder(tools, case);
    let paths = [
        (folder.display().to_string(), "CASE"),
        (tools.hotlift.display().to_string(), "hotlift"),
    ];
    let scrub = |text: &mut String| {
        for (path, name) in &paths {
            *text = text.replace(path, name);
        }
    };
    record.words.iter_mut().for_each(scrub);
    record
        .problems
        .iter_mut()
        .map(|one| &mut one.what)
        .for_each(scrub);
    // The folder has only files of the campaign.
    let _ = fs::remove_dir_all(&folder);
    record.seconds = (begun.elapsed().as_secs_f64() * 10.0).round() / 10.0;
    record
}

fn attempt(
    tools: &Tools,
    case: &Case,
    place: &mut Option<Rig>,
    record: &mut Record,
) -> Result<(), KitError> {
    let rig = place.insert(Rig::start(tools, case)?);
    let seen = drive(case, rig)?;
    record.fired.clone_from(&seen.fired);
    record.source_exit = seen.source_exit;
    record.destination_exit = seen.destination_exit;
    record.here = seen.here.name().to_owned();
    record.there = seen.there.name().to_owned();
    for (name, machine) in [("source", &mut rig.here), ("destination", &mut rig.there)] {
        if let Some(reason) = machine.migration().and_then(|info| info.error_desc) {
            record
                .words
                .push(format!("query-migrate of the {name}: {reason}"));
        }
    }
    record.weigh(&seen, rig);
    record.check_for_leftovers(tools, rig);
    Ok(())
}

impl Record {
    /// Creates a record of `case` without results.
    #[must_use]
    pub fn new(campaign: u64, case: Case) -> Self {
        Self {
            campaign,
            fired: vec![false; case.faults.len()],
            case,
            outcome: Outcome::Wrong,
            source_exit: None,
            destination_exit: None,
            here: String::new(),
            there: String::new(),
            problems: Vec::new(),
            words: Vec::new(),
            seconds: 0.0,
        }
    }

    fn note(&mut self, wrong: Wrong, what: impl Into<String>) {
        let what = what.into();
        self.problems.push(Problem { wrong, what });
    }

    /// Returns the faults that occurred.
    pub fn faults(&self) -> impl Iterator<Item = &Kind> {
        self.case.happened(&self.fired)
    }

    fn killed(&self, whom: Party) -> bool {
        self.faults()
            .any(|kind| matches!(kind, Kind::Kill { party } if *party == whom))
    }

    /// Returns true if QMP of side `whose` was silent for longer than a command waits for an answer.
    fn has_stalled(&self, whose: End) -> bool {
        self.faults().any(|kind| {
            matches!(kind, Kind::QmpStall { at, .. } if *at == whose)
                && kind.lasts() > ANSWER_TIMEOUT
        })
    }

    /// Returns true if a fault may have ended the process of guest `whom`, or has powered the guest off.
    fn may_have_ended(&self, whom: Party) -> bool {
        self.killed(whom) || self.has_powered_off() || self.faults().any(|kind| kind.asks(whom))
    }

    fn has_powered_off(&self) -> bool {
        self.faults().any(Kind::powers_off)
    }

    /// Returns the exit codes of the source's side that the faults explain. Without faults, only 0.
    fn explained(&self) -> Vec<i32> {
        let mut codes = vec![0];
        for kind in self.faults() {
            codes.extend(match kind {
                Kind::Delay { .. }
                | Kind::Strangers { .. }
                | Kind::Power {
                    change: PowerChange::Reset,
                } => &[][..],
                Kind::Foreign { rules } if !rules.bypass_redirect() => &[],
                // The exit code is 3 if the command had not started the destination's QEMU.
                Kind::LockedDisk => &[1, 3],
                Kind::LinkDown { .. }
                | Kind::PowerLoss { .. }
                | Kind::CapabilityOn { .. }
                | Kind::Power { .. }
                | Kind::Foreign { .. }
                | Kind::Cut { .. }
                | Kind::Freeze { .. }
                | Kind::QmpStall { .. }
                | Kind::Output { .. } => &[1],
                Kind::Kill {
                    party: Party::SourceCommand,
                } => &[-9],
                Kind::Kill {
                    party: Party::SourceGuest,
                } => &[1, -9],
                Kind::Kill { .. } => &[1, 3],
                Kind::Signal {
                    party: Party::SourceCommand | Party::SourceGuest,
                    ..
                } => &[130],
                Kind::Signal { .. } => &[1],
                Kind::Cancel => &[1, 130],
            });
        }
        let lasts: Duration = self.faults().map(Kind::lasts).sum();
        if lasts >= SETTLE || self.faults().any(Kind::outlasts_settling) {
            codes.push(3);
        }
        codes
    }

    /// Determines where the guest is, and checks that this outcome is permitted.
    fn weigh(&mut self, seen: &Seen, rig: &mut Rig) {
        self.weigh_run(seen);
        self.outcome = match (
            seen.here == GuestState::Running,
            seen.there == GuestState::Running,
        ) {
            (true, true) => Outcome::Wrong,
            (false, true) => self.proven(Outcome::Moved, rig),
            (true, false) => self.proven(Outcome::Stayed, rig),
            (false, false) => self.neither(seen, rig),
        };
        self.weigh_exits(seen);
    }

    /// Notes problems that are independent of the guest's final location.
    fn weigh_run(&mut self, seen: &Seen) {
        let runs = |state: &GuestState| *state == GuestState::Running;
        if seen.both || (runs(&seen.here) && runs(&seen.there)) {
            self.note(Wrong::TwoGuests, "both sides have run the guest");
        }
        let guests = [Party::SourceGuest, Party::DestinationGuest];
        let was_killed = guests.iter().any(|guest| self.may_have_ended(*guest));
        if seen.none_while_full && !was_killed {
            self.note(Wrong::NoGuest, "no host ran it while an output was full");
        }
        // A command may end because its output is `/dev/full` from the start.
        let is_explained = self
            .faults()
            .any(|kind| matches!(kind, Kind::Output { .. }) && kind.is_from_the_start());
        if !seen.is_ready && !is_explained {
            self.note(Wrong::SetUp, "a command did not start");
        }
        if seen.hangs {
            self.note(Wrong::Hangs, "the source's side comes to no end");
        }
        for who in &seen.did_not_end {
            self.note(Wrong::Leftover, format!("{who} did not end on SIGINT"));
        }
        if self.has_powered_off() && (runs(&seen.here) || runs(&seen.there)) {
            self.note(Wrong::TwoGuests, "the guest has powered off, and runs");
        }
        if seen.plaintext > 0 {
            let what = format!("{} segments left the source unencrypted", seen.plaintext);
            self.note(Wrong::Plaintext, what);
        }
    }

    /// Removes the problem from a case in which the source reports a timeout and has kept the guest, which is correct.
    fn excuse_time_outs(&mut self) {
        let waited = |line: &String| line.contains("did not arrive within");
        let is_safe = self.outcome == Outcome::Stayed && self.source_exit == Some(1);
        if is_safe && self.words.iter().any(waited) {
            let exits = self.problems.iter_mut();
            exits
                .filter(|problem| problem.wrong == Wrong::Exit)
                .for_each(|problem| problem.wrong = Wrong::TimedOut);
        }
    }

    fn weigh_exits(&mut self, seen: &Seen) {
        let explained = self.explained();
        let at_its_end = self.may_have_ended(Party::SourceGuest);
        match seen.source_exit {
            // A guest whose process was ended over its monitor reports no migration.
            None if at_its_end || seen.hangs || !seen.is_ready => {}
            None if seen.here == GuestState::Silent => {}
            Some(code) if explained.contains(&code) => {}
            code => self.note(
                Wrong::Exit,
                format!("the source's side ends with {code:?}, not one of {explained:?}"),
            ),
        }
        // A panic is never correct.
        if seen.destination_exit == Some(101) {
            self.note(Wrong::Exit, "the destination's command panics");
        }
        if seen.source_exit == Some(0) && self.outcome == Outcome::Stayed {
            self.note(Wrong::Exit, "exit code 0, and the guest is at the source");
        }
        if !self.may_never_arrive(seen) {
            let is_steered = matches!(self.case.pair, Pair::Steered { .. });
            for (side, exit, counts) in [
                ("source's side", seen.source_exit, true),
                // A relay reports its stream, not the state of the guest.
                ("destination's command", seen.destination_exit, is_steered),
            ] {
                if counts && exit == Some(0) {
                    let what = format!(
                        "the {side} ends with 0, and the guest never ran at the destination"
                    );
                    self.note(Wrong::Exit, what);
                }
            }
        }
    }

    /// Returns true if the guest has run at the destination, or a fault explains success without the guest's arrival.
    fn may_never_arrive(&self, seen: &Seen) -> bool {
        let commands = [Party::SourceCommand, Party::DestinationCommand];
        let is_bare_and_killed = self.case.pair.is_steered_by_others()
            && commands.into_iter().any(|one| self.killed(one));
        // The run state of a guest that has powered off is migrated.
        let is_off = seen.there == GuestState::Paused("shutdown".to_owned());
        seen.arrived
            || seen.there == GuestState::Silent
            || is_bare_and_killed
            || self.was_bypassed(seen)
            || (self.has_powered_off() && is_off)
            || self.killed(Party::DestinationGuest)
            || self.faults().any(|kind| kind.asks(Party::DestinationGuest))
    }

    /// Returns true if foreign firewall rules bypassed the source's agent. Then the agent did not see the end of the
    /// source's connection, and the destination's QEMU received no end of the stream. When this QEMU has ended, libvirt
    /// resumes the guest at the source.
    fn was_bypassed(&self, seen: &Seen) -> bool {
        let is_bypass =
            |kind: &Kind| matches!(kind, Kind::Foreign { rules } if rules.bypass_redirect());
        seen.there == GuestState::Ended && self.faults().any(is_bypass)
    }

    /// Proves the memory of the guest, which runs on one side. Returns the outcome, or [`Outcome::Wrong`] if the proof
    /// fails.
    fn proven(&mut self, outcome: Outcome, rig: &mut Rig) -> Outcome {
        let (party, machine) = match outcome {
            Outcome::Moved => (Party::DestinationGuest, &mut rig.there),
            _ => (Party::SourceGuest, &mut rig.here),
        };
        let proven = machine.prove();
        // A signal may have ended the guest in the meantime.
        if proven.is_err() && self.may_have_ended(party) && machine.has_ended() {
            return Outcome::Ended;
        }
        match proven {
            Ok(()) => outcome,
            Err(KitError::Memory { problem }) => {
                self.note(Wrong::LostWrites, problem);
                Outcome::Wrong
            }
            Err(error) => {
                self.note(Wrong::Hangs, format!("the guest cannot be proven: {error}"));
                Outcome::Wrong
            }
        }
    }

    /// Determines why the guest runs on no side.
    fn absent(&self, seen: &Seen) -> Absent {
        if seen.here == GuestState::Silent && matches!(self.case.pair, Pair::BuiltIn { .. }) {
            return Absent::Waits;
        }
        if self.has_powered_off() {
            return Absent::Ended;
        }
        let ended = [Party::SourceGuest, Party::DestinationGuest]
            .into_iter()
            .any(|party| self.may_have_ended(party));
        let is_paused = matches!(seen.here, GuestState::Paused(_));
        let commands = [Party::SourceCommand, Party::DestinationCommand];
        let command_killed = commands.into_iter().any(|party| self.killed(party));
        let is_bare = self.case.pair.is_steered_by_others();
        let is_told = seen.source_exit == Some(3) || self.killed(Party::SourceCommand);
        // Relays do not control QEMUs, so their failure must be reported to the operator.
        let is_for_others =
            is_bare && (command_killed || seen.source_exit != Some(0) || self.was_bypassed(seen));
        if is_paused && (is_told || is_for_others) {
            return Absent::Paused;
        }
        if ended {
            return Absent::Ended;
        }
        match seen.here {
            GuestState::Silent => Absent::Silent,
            _ => Absent::Lost,
        }
    }

    /// Handles a guest that runs on no side. Resumes it if it is paused and its operator would resume it.
    fn neither(&mut self, seen: &Seen, rig: &mut Rig) -> Outcome {
        match self.absent(seen) {
            Absent::Waits => Outcome::Kept,
            Absent::Paused => {
                if let Err(error) = rig.here.resume() {
                    self.note(Wrong::NoGuest, format!("it cannot be resumed: {error}"));
                    return Outcome::Wrong;
                }
                match self.proven(Outcome::Kept, rig) {
                    Outcome::Wrong => Outcome::Wrong,
                    _ => Outcome::Kept,
                }
            }
            Absent::Ended => Outcome::Ended,
            Absent::Silent => {
                self.note(Wrong::Hangs, "the source's QEMU answers nothing");
                Outcome::Wrong
            }
            Absent::Lost => {
                let (here, there) = (seen.here.name(), seen.there.name());
                self.note(
                    Wrong::NoGuest,
                    format!("no host runs it: the source is '{here}', the destination '{there}'"),
                );
                Outcome::Wrong
            }
        }
    }

    /// Checks that no files, sockets, changed settings or processes remain.
    fn check_for_leftovers(&mut self, tools: &Tools, rig: &mut Rig) {
        // Files that a killed process leaves are permitted.
        let was_killed = self.faults().any(|kind| matches!(kind, Kind::Kill { .. }));
        // The command reports which cleanup failed because of a silent QMP socket.
        let is_told = rig
            .process(Party::SourceCommand)
            .is_some_and(|process| process.has_printed("cannot restore the migration settings"));
        if let Some(before) = rig.settings.take()
            && !self.killed(Party::SourceCommand)
            && !(is_told && self.has_stalled(End::Source))
            && !rig.here.has_ended()
        {
            match rig.here.settings() {
                Ok(now) if now == before => {}
                Ok((capabilities, parameters)) => {
                    let mut differ: Vec<String> = capabilities
                        .into_iter()
                        .filter(|one| !before.0.contains(one))
                        .map(|(name, state)| format!("{name}={state}"))
                        .collect();
                    differ.extend(
                        parameters
                            .into_iter()
                            .filter(|(name, value)| before.1.get(name) != Some(value))
                            .map(|(name, value)| format!("{name}={value}")),
                    );
                    let what = format!("settings of the source's QEMU: {}", differ.join(", "));
                    self.note(Wrong::Leftover, what);
                }
                // A process that hangs was already noted.
                Err(_) => {}
            }
        }
        rig.here.end();
        rig.there.end();
        if was_killed {
            return;
        }
        let left = fs::read_dir(Rig::temporary(tools, &self.case));
        let left: Vec<String> = left
            .into_iter()
            .flatten()
            .flatten()
            .map(|entry| entry.file_name().to_string_lossy().into_owned())
            .collect();
        if !left.is_empty() {
            self.note(Wrong::Leftover, format!("files: {}", left.join(", ")));
        }
        for socket in &rig.sockets {
            if socket.exists() {
                let name = socket.file_name().unwrap_or_default().to_string_lossy();
                let what = format!("socket {name}");
                self.problems.push(Problem {
                    wrong: Wrong::Leftover,
                    what,
                });
            }
        }
    }

    /// Kills the remaining processes of a case.
    fn sweep(&mut self, tools: &Tools) {
        let temporary = Rig::temporary(tools, &self.case);
        let deadline = Instant::now() + GONE;
        let mut left = processes(&temporary);
        while !left.is_empty() && Instant::now() < deadline {
            std::thread::sleep(Duration::from_millis(20));
            left = processes(&temporary);
        }
        for (pid, name) in left {
            self.note(Wrong::Leftover, format!("process {name}"));
            let _ = kill_process(pid, Signal::KILL);
        }
    }
}

/// Returns ID and name of all processes whose environment has this `TMPDIR`, whichever process started them.
fn processes(temporary: &Path) -> Vec<(Pid, String)> {
    let mark = format!("TMPDIR={}\0", temporary.display());
    let entries = fs::read_dir("/proc").into_iter().flatten().flatten();
    let its = |entry: &fs::DirEntry| {
        let pid = Pid::from_raw(entry.file_name().to_str()?.parse().ok()?)?;
        // A process that has ended has no environment.
        let environment = fs::read(entry.path().join("environ")).ok()?;
        let has_it = environment
            .windows(mark.len())
            .any(|window| window == mark.as_bytes());
        let name = fs::read_to_string(entry.path().join("comm")).unwrap_or_default();
        has_it.then(|| (pid, name.trim().to_owned()))
    };
    entries.filter_map(|entry| its(&entry)).collect()
}

/// Returns the last output lines of each process.
fn words(rig: &mut Rig) -> Vec<String> {
    let mut words = Vec::new();
    for (name, party) in [
        ("source's guest", Party::SourceGuest),
        ("source's command", Party::SourceCommand),
        ("destination's command", Party::DestinationCommand),
        ("destination's guest", Party::DestinationGuest),
    ] {
        let Some(process) = rig.process(party) else {
            continue;
        };
        let printed = process.output_lines();
        let worth = printed
            .iter()
            .filter(|line| !line.contains("host doesn't support requested feature"));
        let lines: Vec<&String> = worth.collect();
        for line in &lines[lines.len().saturating_sub(4)..] {
            words.push(format!("{name}: {line}"));
        }
    }
    words
}

#[cfg(test)]
mod tests {
    use super::*;
    use crate::case::{Fault, ForeignRules, Moment};
    use crate::qemu::Release;

    const STEERED: Pair = Pair::Steered {
        from: Release::V10,
        to: Release::V10,
        started: true,
    };

    /// Returns the record of a case with one fault, which occurred.
    fn record(pair: Pair, kind: Kind) -> Record {
        let fault = Fault {
            kind,
            moment: Moment::Round,
            delay_ms: 0,
        };
        let case = Case {
            pair,
            faults: vec![fault],
            ..Case::draw(1, 1)
        };
        Record {
            fired: vec![true],
            ..Record::new(1, case)
        }
    }

    /// Returns observations with these final states of both guests, and exit codes of both commands.
    fn seen(here: GuestState, there: GuestState, source_exit: i32, destination_exit: i32) -> Seen {
        Seen {
            fired: vec![true],
            is_ready: true,
            both: false,
            arrived: there == GuestState::Running,
            plaintext: 0,
            none_while_full: false,
            hangs: false,
            did_not_end: Vec::new(),
            here,
            there,
            source_exit: Some(source_exit),
            destination_exit: Some(destination_exit),
        }
    }

    fn paused(state: &str) -> GuestState {
        GuestState::Paused(state.to_owned())
    }

    /// Returns the problems of a case, by the rules that need no process.
    fn wrongs(mut record: Record, seen: &Seen, outcome: Outcome) -> Vec<Wrong> {
        record.weigh_run(seen);
        record.outcome = outcome;
        record.weigh_exits(seen);
        record
            .problems
            .iter()
            .map(|problem| problem.wrong)
            .collect()
    }

    #[test]
    fn a_destination_that_cannot_lock_its_disk_leaves_no_success() {
        let locked = || record(STEERED, Kind::LockedDisk);
        let nobody = seen(paused("postmigrate"), paused("paused"), 0, 0);
        assert_eq!(locked().absent(&nobody), Absent::Lost);
        assert_eq!(
            wrongs(locked(), &nobody, Outcome::Wrong),
            [Wrong::Exit, Wrong::Exit]
        );
        let back = seen(GuestState::Running, GuestState::Ended, 1, 1);
        assert_eq!(wrongs(locked(), &back, Outcome::Stayed), []);
        let kept = seen(paused("postmigrate"), paused("inmigrate"), 3, 3);
        assert_eq!(locked().absent(&kept), Absent::Paused);
        assert_eq!(wrongs(locked(), &kept, Outcome::Kept), []);
        // The source has the guest, so the destination's command must not report that it arrived.
        let half = seen(GuestState::Running, GuestState::Ended, 1, 0);
        assert_eq!(wrongs(locked(), &half, Outcome::Stayed), [Wrong::Exit]);
    }

    #[test]
    fn a_guest_that_powered_off_runs_nowhere_and_its_migration_has_failed() {
        let off = |change| record(STEERED, Kind::Power { change });
        for change in [PowerChange::Off, PowerChange::OffKept] {
            let here = match change {
                PowerChange::Off => GuestState::Ended,
                _ => paused("shutdown"),
            };
            let failed = seen(here.clone(), GuestState::Ended, 1, 1);
            assert_eq!(off(change).absent(&failed), Absent::Ended);
            assert_eq!(wrongs(off(change), &failed, Outcome::Ended), []);
            let success = seen(here.clone(), GuestState::Ended, 0, 1);
            assert_eq!(wrongs(off(change), &success, Outcome::Ended), [Wrong::Exit]);
            let in_doubt = seen(here, GuestState::Ended, 3, 1);
            assert_eq!(
                wrongs(off(change), &in_doubt, Outcome::Ended),
                [Wrong::Exit]
            );
            let risen = seen(GuestState::Ended, GuestState::Running, 1, 1);
            assert_eq!(
                wrongs(off(change), &risen, Outcome::Moved),
                [Wrong::TwoGuests]
            );
        }
        let travelled = seen(paused("postmigrate"), paused("shutdown"), 0, 0);
        assert_eq!(
            wrongs(off(PowerChange::OffKept), &travelled, Outcome::Ended),
            []
        );
        // The guest arrived, and was powered off there.
        let mut there = seen(paused("postmigrate"), GuestState::Ended, 0, 0);
        there.arrived = true;
        assert_eq!(wrongs(off(PowerChange::Off), &there, Outcome::Ended), []);
    }

    #[test]
    fn cut_connections_leave_no_doubt_and_a_killed_command_may() {
        let cut = || {
            let (how, after) = (crate::proxy::Ending::Reset, 0);
            record(STEERED, Kind::Cut { how, after })
        };
        let moved = seen(paused("postmigrate"), GuestState::Running, 0, 0);
        assert_eq!(wrongs(cut(), &moved, Outcome::Moved), []);
        let in_doubt = seen(paused("postmigrate"), GuestState::Running, 3, 0);
        assert_eq!(wrongs(cut(), &in_doubt, Outcome::Moved), [Wrong::Exit]);
        let party = Party::DestinationCommand;
        let killed = record(STEERED, Kind::Kill { party });
        assert_eq!(wrongs(killed, &in_doubt, Outcome::Moved), []);
    }

    #[test]
    fn a_guest_that_is_reset_moves() {
        let reset = || {
            let change = PowerChange::Reset;
            record(STEERED, Kind::Power { change })
        };
        let moved = seen(paused("postmigrate"), GuestState::Running, 0, 0);
        assert_eq!(wrongs(reset(), &moved, Outcome::Moved), []);
        let failed = seen(GuestState::Running, GuestState::Ended, 1, 1);
        assert_eq!(wrongs(reset(), &failed, Outcome::Stayed), [Wrong::Exit]);
        let nobody = seen(GuestState::Ended, GuestState::Ended, 1, 1);
        assert_eq!(reset().absent(&nobody), Absent::Lost);
    }

    #[test]
    fn a_capability_that_is_on_is_refused_or_changes_nothing() {
        let on = || {
            let (at, name) = (End::Source, crate::case::Capability::XIgnoreShared);
            record(STEERED, Kind::CapabilityOn { at, name })
        };
        let refused = seen(GuestState::Running, GuestState::Ended, 1, 1);
        assert_eq!(wrongs(on(), &refused, Outcome::Stayed), []);
        let moved = seen(paused("postmigrate"), GuestState::Running, 0, 0);
        assert_eq!(wrongs(on(), &moved, Outcome::Moved), []);
        let in_doubt = seen(paused("postmigrate"), GuestState::Ended, 3, 1);
        assert_eq!(wrongs(on(), &in_doubt, Outcome::Kept), [Wrong::Exit]);
    }

    #[test]
    fn a_source_is_in_doubt_only_if_power_is_lost_for_as_long_as_it_asks() {
        let at = End::Destination;
        for (secs, may_be_in_doubt) in [
            (Some(5), false),
            (Some(20), false),
            (Some(32), false),
            (Some(60), true),
            (None, true),
        ] {
            let loss = record(STEERED, Kind::PowerLoss { secs, at });
            let kept = seen(paused("postmigrate"), GuestState::Ended, 3, 1);
            let wrong = wrongs(loss, &kept, Outcome::Kept);
            assert_eq!(wrong.is_empty(), may_be_in_doubt, "{secs:?}");
            let loss = record(STEERED, Kind::PowerLoss { secs, at });
            let stayed = seen(GuestState::Running, GuestState::Ended, 1, 1);
            assert_eq!(wrongs(loss, &stayed, Outcome::Stayed), []);
            let mut hangs = seen(GuestState::Running, GuestState::Ended, 1, 1);
            hangs.hangs = true;
            let loss = record(STEERED, Kind::PowerLoss { secs, at });
            assert_eq!(wrongs(loss, &hangs, Outcome::Stayed), [Wrong::Hangs]);
        }
    }

    #[test]
    fn foreign_rules_let_no_plaintext_out_and_harmless_ones_stop_no_migration() {
        let pair = Pair::Agents {
            from: Release::V10,
            to: Release::V10,
            channels: 2,
        };
        let foreign = |rules| record(pair, Kind::Foreign { rules });
        let mut plain = seen(paused("postmigrate"), GuestState::Running, 0, 0);
        plain.plaintext = 7;
        let bypass = foreign(ForeignRules::Notrack);
        assert_eq!(wrongs(bypass, &plain, Outcome::Moved), [Wrong::Plaintext]);
        let refused = seen(GuestState::Running, GuestState::Waiting, 1, 130);
        let bypass = foreign(ForeignRules::Notrack);
        assert_eq!(wrongs(bypass, &refused, Outcome::Stayed), []);
        let released = seen(paused("postmigrate"), GuestState::Ended, 0, 0);
        for (rules, absent) in [
            (ForeignRules::Notrack, Absent::Paused),
            (ForeignRules::Masquerade, Absent::Lost),
        ] {
            assert_eq!(foreign(rules).absent(&released), absent);
        }
        let bypass = foreign(ForeignRules::Notrack);
        assert_eq!(wrongs(bypass, &released, Outcome::Kept), []);
        let harmless = foreign(ForeignRules::Masquerade);
        assert_eq!(wrongs(harmless, &refused, Outcome::Stayed), [Wrong::Exit]);
    }

    #[test]
    fn a_command_that_does_not_start_is_a_failed_setup_unless_its_output_device_is_full() {
        let party = Party::DestinationCommand;
        let stream = crate::process::Stream::Stderr;
        for (output, wrong) in [
            (crate::process::Output::Device, &[][..]),
            (crate::process::Output::Closed, &[Wrong::SetUp]),
        ] {
            let spoilt = Kind::Output {
                party,
                stream,
                output,
            };
            let mut not_ready = seen(GuestState::Running, GuestState::Ended, 1, 2);
            (not_ready.is_ready, not_ready.source_exit) = (false, None);
            let found = wrongs(record(STEERED, spoilt), &not_ready, Outcome::Stayed);
            assert_eq!(found, wrong);
        }
    }

    #[test]
    fn a_fault_that_did_not_happen_explains_nothing() {
        let mut locked = record(STEERED, Kind::LockedDisk);
        locked.fired = vec![false];
        let back = seen(GuestState::Running, GuestState::Ended, 1, 1);
        assert_eq!(wrongs(locked, &back, Outcome::Stayed), [Wrong::Exit]);
    }
}

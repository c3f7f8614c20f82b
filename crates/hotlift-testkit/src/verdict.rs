//! What may come of a case, and what did.

use std::fs;
use std::path::Path;
use std::time::{Duration, Instant};

use hotlift_qmp::ANSWER_TIMEOUT;
use rustix::process::{Pid, Signal, kill_process};
use serde::{Deserialize, Serialize};

use crate::case::{Case, Kind, Pair, Party, SETTLE};
use crate::drive::{Seen, drive};
use crate::error::KitError;
use crate::machine::Look;
use crate::namespace::End;
use crate::rig::{Rig, Tools};

/// How long the processes of a case have to go: a guard waits 10 s for a QEMU that does not answer.
const GONE: Duration = Duration::from_secs(15);

/// What is wrong.
#[derive(Debug, Clone, Copy, PartialEq, Eq, PartialOrd, Ord, Serialize, Deserialize)]
#[serde(rename_all = "snake_case")]
pub enum Wrong {
    /// Both sides ran the guest.
    TwoGuests,
    /// No side runs it, and it is not whole and paused at the source with exit code 3.
    NoGuest,
    /// Its memory is not what it wrote.
    LostWrites,
    /// A process, a file, a socket or a setting is left.
    Leftover,
    /// An exit code that these faults do not explain.
    Exit,
    /// A side comes to no end, or a guest answers nothing.
    Hangs,
    /// A wait timed out that no fault prolongs, and the guest stayed at the source: a machine that stands still does
    /// that. Counted, and no fault of the product: a kernel whose workers are starved (`workqueue lockup` in its log)
    /// holds up the start of KVM's dirty log for a minute and more.
    TimedOut,
    /// The machinery failed: the case says nothing.
    SetUp,
}

/// Something that is wrong, in words.
#[derive(Debug, Clone, PartialEq, Eq, Serialize, Deserialize)]
pub struct Problem {
    /// Of what kind.
    pub wrong: Wrong,
    /// In words.
    pub what: String,
}

/// Where the guest was in the end.
#[derive(Debug, Clone, Copy, PartialEq, Eq, PartialOrd, Ord, Serialize, Deserialize)]
#[serde(rename_all = "snake_case")]
pub enum Outcome {
    /// At the destination, running.
    Moved,
    /// At the source, running.
    Stayed,
    /// At the source, paused and whole: it ran on when it was told to.
    Kept,
    /// It ended with the process that had it, which the fault has ended.
    Ended,
    /// None of these.
    Wrong,
}

/// What came of a case: one line of the raw list.
#[derive(Debug, Clone, Serialize, Deserialize)]
pub struct Record {
    /// Seed of the campaign.
    pub campaign: u64,
    /// The case.
    #[serde(flatten)]
    pub case: Case,
    /// Which of its faults happened.
    pub fired: Vec<bool>,
    /// Where the guest was in the end.
    pub outcome: Outcome,
    /// Exit code of the source's side (minus the signal that ended it).
    pub source_exit: Option<i32>,
    /// That of the destination's command.
    pub destination_exit: Option<i32>,
    /// The guest at the source.
    pub here: String,
    /// The guest at the destination.
    pub there: String,
    /// What is wrong.
    pub problems: Vec<Problem>,
    /// Reasons that QMP gives and last words of the commands, if something is wrong.
    pub words: Vec<String>,
    /// How long it took.
    pub seconds: f64,
}

/// Runs a case, and says what came of it.
#[must_use]
pub fn judge(tools: &Tools, campaign: u64, case: &Case) -> Record {
    let begun = Instant::now();
    let mut record = Record {
        campaign,
        case: case.clone(),
        fired: vec![false; case.faults.len()],
        outcome: Outcome::Wrong,
        source_exit: None,
        destination_exit: None,
        here: String::new(),
        there: String::new(),
        problems: Vec::new(),
        words: Vec::new(),
        seconds: 0.0,
    };
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
    // Only what the campaign has made itself is in it.
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
    record.look_for_leftovers(tools, rig);
    Ok(())
}

impl Record {
    fn note(&mut self, wrong: Wrong, what: impl Into<String>) {
        let what = what.into();
        self.problems.push(Problem { wrong, what });
    }

    /// The faults that happened.
    pub fn faults(&self) -> impl Iterator<Item = &Kind> {
        self.case.happened(&self.fired)
    }

    fn killed(&self, whom: Party) -> bool {
        self.faults()
            .any(|kind| matches!(kind, Kind::Kill { party } if *party == whom))
    }

    /// Whether QMP was silent there for longer than a command waits for an answer.
    fn has_stalled(&self, whose: End) -> bool {
        self.faults().any(|kind| {
            matches!(kind, Kind::QmpStall { at, .. } if *at == whose)
                && kind.lasts() > ANSWER_TIMEOUT
        })
    }

    /// Whether a fault was to end a guest's process.
    fn may_have_ended(&self, whom: Party) -> bool {
        self.killed(whom) || self.faults().any(|kind| kind.asks(whom))
    }

    /// Exit codes of the source's side that the faults explain. With none, only 0.
    fn explained(&self) -> Vec<i32> {
        let mut codes = vec![0];
        for kind in self.faults() {
            codes.extend(match kind {
                Kind::Delay { .. } | Kind::Strangers { .. } => &[][..],
                Kind::LinkDown { .. }
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
        if lasts >= SETTLE {
            codes.push(3);
        }
        codes
    }

    /// Decides where the guest is, and whether that is as it must be.
    fn weigh(&mut self, seen: &Seen, rig: &mut Rig) {
        let runs = |look: &Look| *look == Look::Running;
        if seen.both || (runs(&seen.here) && runs(&seen.there)) {
            self.note(Wrong::TwoGuests, "both sides have run the guest");
        }
        if seen.none_while_full && !self.may_have_ended(Party::SourceGuest) {
            self.note(Wrong::NoGuest, "nobody ran it while an output was full");
        }
        if seen.hangs {
            self.note(Wrong::Hangs, "the source's side comes to no end");
        }
        for who in &seen.did_not_end {
            self.note(Wrong::Leftover, format!("{who} did not end on SIGINT"));
        }
        self.outcome = match (runs(&seen.here), runs(&seen.there)) {
            (true, true) => Outcome::Wrong,
            (false, true) => self.proven(Outcome::Moved, rig),
            (true, false) => self.proven(Outcome::Stayed, rig),
            (false, false) => self.neither(seen, rig),
        };
        self.weigh_exits(seen);
    }

    /// A source that says that it waited in vain, and has the guest, has done as it should.
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
            // A guest with a monitor that was ended says nothing of a migration.
            None if at_its_end || seen.hangs || !seen.is_ready => {}
            None if seen.here == Look::Silent => {}
            Some(code) if explained.contains(&code) => {}
            code => self.note(
                Wrong::Exit,
                format!("the source's side ends with {code:?}, not one of {explained:?}"),
            ),
        }
        // A panic is no answer to anything.
        if seen.destination_exit == Some(101) {
            self.note(Wrong::Exit, "the destination's command panics");
        }
        if seen.source_exit == Some(0) && self.outcome == Outcome::Stayed {
            self.note(Wrong::Exit, "exit code 0, and the guest is at the source");
        }
    }

    /// The guest runs on one side: sees whether its memory is right.
    fn proven(&mut self, outcome: Outcome, rig: &mut Rig) -> Outcome {
        let (party, machine) = match outcome {
            Outcome::Moved => (Party::DestinationGuest, &mut rig.there),
            _ => (Party::SourceGuest, &mut rig.here),
        };
        let proven = machine.prove();
        // A signal may have ended it only now.
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

    /// The guest runs nowhere.
    fn neither(&mut self, seen: &Seen, rig: &mut Rig) -> Outcome {
        if seen.here == Look::Silent && matches!(self.case.pair, Pair::BuiltIn { .. }) {
            // Without a monitor: it is there, and waits to be told.
            return Outcome::Kept;
        }
        let ended = [Party::SourceGuest, Party::DestinationGuest]
            .into_iter()
            .any(|party| self.may_have_ended(party));
        let is_paused = matches!(seen.here, Look::Paused(_));
        let commands = [Party::SourceCommand, Party::DestinationCommand];
        let command_killed = commands.into_iter().any(|party| self.killed(party));
        let is_bare = matches!(self.case.pair, Pair::Relays { .. });
        let is_told = seen.source_exit == Some(3) || self.killed(Party::SourceCommand);
        // Bare relays steer no QEMU: who does must be told that they have failed.
        let is_for_others = is_bare && (command_killed || seen.source_exit != Some(0));
        if is_paused && (is_told || is_for_others) {
            let resumed = rig.here.resume();
            if let Err(error) = resumed {
                self.note(Wrong::NoGuest, format!("it cannot be resumed: {error}"));
                return Outcome::Wrong;
            }
            return match self.proven(Outcome::Kept, rig) {
                Outcome::Wrong => Outcome::Wrong,
                _ => Outcome::Kept,
            };
        }
        if ended {
            return Outcome::Ended;
        }
        if seen.here == Look::Silent {
            self.note(Wrong::Hangs, "the source's QEMU answers nothing");
            return Outcome::Wrong;
        }
        let (here, there) = (seen.here.name(), seen.there.name());
        self.note(
            Wrong::NoGuest,
            format!("nobody runs it: the source is '{here}', the destination '{there}'"),
        );
        Outcome::Wrong
    }

    /// Files, sockets and settings, and then processes.
    fn look_for_leftovers(&mut self, tools: &Tools, rig: &mut Rig) {
        // What a killed process leaves, nobody can take away.
        let was_killed = self.faults().any(|kind| matches!(kind, Kind::Kill { .. }));
        // The user is told of what a silent QMP socket has kept the command from.
        let is_told = rig
            .process(Party::SourceCommand)
            .is_some_and(|process| process.has_said("migration settings were not put back"));
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
                // One that hangs was noted.
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

    /// Ends what is left of the case's processes.
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

/// Processes that were started with this `TMPDIR`, whoever has started them: it is handed on.
fn processes(temporary: &Path) -> Vec<(Pid, String)> {
    let mark = format!("TMPDIR={}\0", temporary.display());
    let entries = fs::read_dir("/proc").into_iter().flatten().flatten();
    let its = |entry: &fs::DirEntry| {
        let pid = Pid::from_raw(entry.file_name().to_str()?.parse().ok()?)?;
        // One that has ended has none.
        let environment = fs::read(entry.path().join("environ")).ok()?;
        let has_it = environment
            .windows(mark.len())
            .any(|window| window == mark.as_bytes());
        let name = fs::read_to_string(entry.path().join("comm")).unwrap_or_default();
        has_it.then(|| (pid, name.trim().to_owned()))
    };
    entries.filter_map(|entry| its(&entry)).collect()
}

/// The last lines of each process.
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
        let said = process.said();
        let worth = said
            .iter()
            .filter(|line| !line.contains("host doesn't support requested feature"));
        let lines: Vec<&String> = worth.collect();
        for line in &lines[lines.len().saturating_sub(4)..] {
            words.push(format!("{name}: {line}"));
        }
    }
    words
}

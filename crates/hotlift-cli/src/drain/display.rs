//! What a drain shows: what becomes of each domain.

use std::io::IsTerminal;

use hotlift_terminal::output;
use hotlift_terminal::progress::bytes;
use hotlift_terminal::table::{align_with_words, new_table};
use serde::Serialize;

use crate::drain::plan::{Step, short};
use crate::libvirt::virsh::Job;

/// What has become of a domain.
#[derive(Debug, Clone, Serialize)]
#[serde(tag = "state", rename_all = "kebab-case")]
pub enum Fate {
    /// It has not begun.
    Waiting,
    /// It is on its way; what that costs so far.
    UnderWay {
        #[serde(skip)]
        job: Option<Job>,
    },
    /// The destination has it.
    Moved { job: Option<Job> },
    /// It stayed here, and runs.
    Stayed { reason: String },
    /// It ended before it could move, and is on neither host.
    Ended { reason: String },
    /// It was not begun.
    NotBegun { reason: String },
    /// Nobody knows.
    Unknown { reason: String },
}

/// A domain, and what has become of it.
#[derive(Debug, Clone, Serialize)]
pub struct Outcome {
    #[serde(flatten)]
    pub step: Step,
    #[serde(flatten)]
    pub fate: Fate,
}

/// The table of what has become of them.
pub fn table(outcomes: &[Outcome]) -> String {
    let mut table = new_table(&["domain", "to", "memory", "state", "seconds", "down ms"]);
    for Outcome { step, fate } in outcomes {
        let (state, job) = match fate {
            Fate::Waiting => ("waiting", None),
            Fate::UnderWay { .. } => ("under way", None),
            Fate::Moved { job } => ("moved", *job),
            Fate::Stayed { .. } => ("stayed", None),
            Fate::Ended { .. } => ("ended", None),
            Fate::NotBegun { .. } => ("not begun", None),
            Fate::Unknown { .. } => ("unknown", None),
        };
        let seconds = job.map(|job| format!("{}.{}", job.total_ms / 1000, job.total_ms / 100 % 10));
        let down = job.and_then(|job| job.downtime_ms);
        table.add_row([
            step.domain.name.clone(),
            step.to.as_deref().map_or("-".to_owned(), short),
            bytes(step.memory_bytes),
            state.to_owned(),
            seconds.unwrap_or("-".to_owned()),
            down.map_or("-".to_owned(), |down| down.to_string()),
        ]);
    }
    align_with_words(&mut table, 1);
    table.to_string()
}

/// What is shown while it runs: on a terminal the table, rewritten; elsewhere a line for each change.
pub struct Display {
    quiet: bool,
    terminal: bool,
    lines: usize,
}

impl Display {
    /// Shows nothing if `quiet`.
    pub fn new(quiet: bool) -> Self {
        Self {
            quiet,
            terminal: std::io::stderr().is_terminal(),
            lines: 0,
        }
    }

    /// It shows a table, with what migrations cost so far.
    pub fn is_table(&self) -> bool {
        self.terminal && !self.quiet
    }

    /// A line for what has become of a domain, where there is no table.
    pub fn note(&self, outcome: &Outcome) {
        if self.quiet || self.terminal {
            return;
        }
        let domain = &outcome.step.domain.name;
        let to = outcome.step.to.as_deref().map_or("-".to_owned(), short);
        let text = match &outcome.fate {
            Fate::Waiting => return,
            Fate::UnderWay { .. } => "under way".to_owned(),
            Fate::Moved { .. } => "moved".to_owned(),
            Fate::Stayed { reason } => format!("stayed: {reason}"),
            Fate::Ended { reason } => format!("ended: {reason}"),
            Fate::NotBegun { reason } => format!("not begun: {reason}"),
            Fate::Unknown { reason } => format!("unknown: {reason}"),
        };
        output::progress(&format!("{domain} to {to}: {text}\n"));
    }

    /// The table anew.
    pub fn show(&mut self, outcomes: &[Outcome]) {
        if !self.is_table() {
            return;
        }
        self.finish();
        let mut text = table(outcomes);
        for Outcome { step, fate } in outcomes {
            if let Fate::UnderWay { job: Some(job) } = fate
                // Of one that has only begun libvirt does not know how much it is.
                && job.memory_bytes > 0
            {
                let left = bytes(job.remaining_bytes);
                text += &format!("\n{}: {left} to go", step.domain.name);
            }
        }
        self.lines = text.lines().count();
        output::progress(&format!("{text}\n"));
    }

    /// Takes the table away.
    pub fn finish(&mut self) {
        if self.lines > 0 {
            // Up by so many lines, and all behind emptied.
            output::progress(&format!("\x1b[{}A\x1b[J", self.lines));
            self.lines = 0;
        }
    }
}

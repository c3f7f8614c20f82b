//! Prints the state of each domain during a drain.

use std::io::IsTerminal;

use hotlift_qemu::downtime_limit::DowntimeLimit;
use hotlift_terminal::output;
use hotlift_terminal::progress::bytes;
use hotlift_terminal::table::{align_with_words, new_table};
use serde::Serialize;

use crate::drain::plan::{Step, short};
use crate::libvirt::virsh::Job;

/// State of a domain in a drain.
#[derive(Debug, Clone, Serialize)]
#[serde(tag = "state", rename_all = "kebab-case")]
pub enum MoveState {
    /// The move has not started.
    Waiting,
    /// Its move is running.
    UnderWay {
        #[serde(skip)]
        progress: Option<MoveProgress>,
    },
    /// The domain is at the destination.
    Moved {
        job: Option<Job>,
        /// Downtime limit at the switchover; `null` if it was the operator's from the start.
        downtime_limit: Option<DowntimeLimit>,
    },
    /// The move failed, and the domain runs here.
    Stayed { reason: String },
    /// The domain ended before its move, and is on neither host.
    Ended { reason: String },
    /// The move was not started, for this reason.
    NotBegun { reason: String },
    /// The host that has the domain is unknown.
    Unknown { reason: String },
}

/// Progress of a running move.
#[derive(Debug, Clone)]
pub struct MoveProgress {
    /// Statistics so far.
    pub job: Option<Job>,
    /// The downtime limit, if it began low.
    pub limit: Option<DowntimeLimit>,
    /// A change of this limit.
    pub remark: Option<String>,
}

/// A domain of the plan, with its state.
#[derive(Debug, Clone, Serialize)]
pub struct Outcome {
    #[serde(flatten)]
    pub step: Step,
    #[serde(flatten)]
    pub move_state: MoveState,
}

/// Returns a table with the states of all domains.
pub fn table(outcomes: &[Outcome]) -> String {
    let mut table = new_table(&["domain", "to", "memory", "state", "seconds", "down ms"]);
    for Outcome { step, move_state } in outcomes {
        let (state, job) = match move_state {
            MoveState::Waiting => ("waiting", None),
            MoveState::UnderWay { .. } => ("under way", None),
            MoveState::Moved { job, .. } => ("moved", *job),
            MoveState::Stayed { .. } => ("stayed", None),
            MoveState::Ended { .. } => ("ended", None),
            MoveState::NotBegun { .. } => ("not started", None),
            MoveState::Unknown { .. } => ("unknown", None),
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

/// Output during a drain: on a terminal a table that is rewritten; elsewhere one line per change.
pub struct Display {
    quiet: bool,
    terminal: bool,
    lines: usize,
}

impl Display {
    /// Creates the output; prints nothing during the drain if `quiet`.
    pub fn new(quiet: bool) -> Self {
        Self {
            quiet,
            terminal: std::io::stderr().is_terminal(),
            lines: 0,
        }
    }

    /// Returns true if the output is a table, which needs statistics of the migrations.
    pub fn is_table(&self) -> bool {
        self.terminal && !self.quiet
    }

    /// Prints a line with the state of a domain; nothing if the output is a table.
    pub fn note(&self, outcome: &Outcome) {
        let text = match &outcome.move_state {
            MoveState::Waiting => return,
            MoveState::UnderWay { .. } => "under way".to_owned(),
            MoveState::Moved { .. } => "moved".to_owned(),
            MoveState::Stayed { reason } => format!("stayed: {reason}"),
            MoveState::Ended { reason } => format!("ended: {reason}"),
            MoveState::NotBegun { reason } => format!("not started: {reason}"),
            MoveState::Unknown { reason } => format!("unknown: {reason}"),
        };
        self.remark(outcome, &text);
    }

    /// Prints a line about the move of a domain, unless there is a table.
    pub fn remark(&self, outcome: &Outcome, text: &str) {
        if self.quiet || self.terminal {
            return;
        }
        let domain = &outcome.step.domain.name;
        let to = outcome.step.to.as_deref().map_or("-".to_owned(), short);
        output::progress(&format!("{domain} to {to}: {text}\n"));
    }

    /// Prints the table in the place of the previous one.
    pub fn show(&mut self, outcomes: &[Outcome]) {
        if !self.is_table() {
            return;
        }
        self.finish();
        let mut text = table(outcomes);
        for Outcome { step, move_state } in outcomes {
            if let MoveState::UnderWay {
                progress: Some(MoveProgress {
                    job: Some(job),
                    limit,
                    ..
                }),
            } = move_state
                // libvirt reports a size of 0 at the start of a migration.
                && job.memory_bytes > 0
            {
                let left = bytes(job.remaining_bytes);
                text += &format!("\n{}: {left} to go", step.domain.name);
                if let Some(limit) = limit {
                    text += &format!(", downtime-limit {limit}");
                }
            }
        }
        self.lines = text.lines().count();
        output::progress(&format!("{text}\n"));
    }

    /// Removes the table from the terminal.
    pub fn finish(&mut self) {
        if self.lines > 0 {
            // Moves the cursor to the first line of the table, and clears the rest of the screen.
            output::progress(&format!("\x1b[{}A\x1b[J", self.lines));
            self.lines = 0;
        }
    }
}

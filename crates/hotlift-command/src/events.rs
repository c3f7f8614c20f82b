//! Events that a process of `guest run` sends to its parent (`demo`): JSON, one line per event, on standard output.

use std::io::{BufRead, BufReader, Read};

use hotlift::figures::{DestinationReport, SourceReport};
use hotlift::progress::Progress;
use hotlift_terminal::output;
use hotlift_vmm::fill::Filled;
use serde::{Deserialize, Serialize};

/// Events of a child process, in order of arrival.
pub type Events = Box<dyn Iterator<Item = Event>>;

/// An event of a child process.
#[derive(Debug, Clone, Serialize, Deserialize)]
#[serde(tag = "event", rename_all = "kebab-case")]
pub enum Event {
    /// A destination is ready, and listens at this URI.
    Listening {
        /// Address, with the port that the system chose.
        uri: String,
    },
    /// The RAM of the source's guest was filled.
    Filled(Filling),
    /// Progress of the migration at the source.
    Progress {
        /// The current state.
        moment: ProgressSnapshot,
    },
    /// The migration completed at the source.
    Sent {
        /// Report of the source.
        report: Box<SourceReport>,
    },
    /// The guest runs at the destination.
    Received {
        /// Report of the destination.
        report: DestinationReport,
    },
    /// The guest ran at the destination, and its memory was checked.
    Checked(Check),
    /// The migration failed.
    Failed {
        /// Error in one line.
        error: String,
    },
}

/// Content of a guest's RAM at its start.
#[derive(Debug, Clone, Copy, PartialEq, Serialize, Deserialize)]
pub struct Filling {
    /// Number of pages that are not zero.
    pub data_pages: u64,
    /// Number of zero pages.
    pub zero_pages: u64,
    /// How often the fill's source fits into RAM: above 1 it was repeated; below 1 only its first part was used.
    pub laid: f64,
}

impl From<&Filled> for Filling {
    fn from(filled: &Filled) -> Self {
        Self {
            data_pages: filled.data_pages,
            zero_pages: filled.zero_pages,
            laid: filled.copies,
        }
    }
}

impl Filling {
    /// Returns the share of zero pages, in percent.
    pub fn zero_percent(&self) -> f64 {
        let pages = (self.data_pages + self.zero_pages).max(1);
        #[expect(clippy::cast_precision_loss, reason = "counts stay below 2^53")]
        let share = self.zero_pages as f64 / pages as f64;
        share * 100.0
    }

    /// Returns a text such as "25 % zero pages, laid 3.1 times and perturbed at each repetition".
    pub fn text(&self) -> String {
        let laid = match self.laid {
            times if times > 1.0 => {
                format!(", laid {times:.1} times and perturbed at each repetition")
            }
            times if times < 1.0 => ", of which the first part is used".to_owned(),
            _ => String::new(),
        };
        format!("{:.1} % zero pages{laid}", self.zero_percent())
    }
}

/// Snapshot of a migration's progress at the source.
#[derive(Debug, Clone, PartialEq, Serialize, Deserialize)]
pub struct ProgressSnapshot {
    /// Time since the start of the migration, in milliseconds.
    pub elapsed_ms: f64,
    /// State, by QEMU's name.
    pub status: String,
    /// Number of the current round (pass over the dirty pages), from 1.
    pub round: u64,
    /// Bytes of pages that this round still has to send.
    pub remaining_bytes: u64,
    /// Bytes written to all sockets so far.
    pub transferred_bytes: u64,
    /// Bytes written per second, since the last snapshot.
    pub bytes_per_second: f64,
    /// Pages processed per second (zero pages included), since the last snapshot.
    pub pages_per_second: f64,
    /// Pages that the guest dirties per second.
    pub dirty_pages_per_second: f64,
}

impl From<&Progress> for ProgressSnapshot {
    fn from(progress: &Progress) -> Self {
        Self {
            elapsed_ms: progress.elapsed.as_secs_f64() * 1e3,
            status: progress.status.name().to_owned(),
            round: progress.round,
            remaining_bytes: progress.remaining_bytes,
            transferred_bytes: progress.transferred_bytes,
            bytes_per_second: progress.bytes_per_second,
            pages_per_second: progress.pages_per_second,
            dirty_pages_per_second: progress.dirty_pages_per_second,
        }
    }
}

/// Result of a guest check after the migration.
#[derive(Debug, Clone, Serialize, Deserialize)]
pub struct Check {
    /// True if the guest runs. If its workload writes, its count of writes must also have grown.
    pub runs: bool,
    /// True if pages, write records and vCPU state agree: no write was lost.
    pub verified: bool,
    /// Problem that the check found; `None` if there is none.
    pub problem: Option<String>,
    /// Number of writes of all vCPUs.
    pub writes: u64,
    /// Number of pages compared with their write records.
    pub pages_checked: u64,
}

/// Sends `event` to the parent process.
pub fn send_to_parent(event: &Event) {
    if let Ok(line) = serde_json::to_string(event) {
        // Errors are ignored: if the parent has ended or does not read, the guest keeps running.
        match event {
            Event::Progress { .. } => output::progress_line(&line),
            _ => output::out(&line),
        }
    }
}

/// Returns the events of a child process until its output ends. Skips lines that are not events.
pub fn read(stdout: impl Read + 'static) -> Events {
    Box::new(
        BufReader::new(stdout)
            .lines()
            .map_while(Result::ok)
            .filter_map(|line| serde_json::from_str(&line).ok()),
    )
}

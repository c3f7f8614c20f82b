//! What a `guest run` process tells the `demo` that started it: JSON, one line an event, on its
//! standard output.

use std::io::{BufRead, BufReader, Read};

use hotlift::figures::{DestinationReport, SourceReport};
use hotlift::progress::Progress;
use hotlift_terminal::output;
use hotlift_vmm::fill::Filled;
use serde::{Deserialize, Serialize};

/// Events as they come.
pub type Events = Box<dyn Iterator<Item = Event>>;

/// One event.
#[derive(Debug, Clone, Serialize, Deserialize)]
#[serde(tag = "event", rename_all = "kebab-case")]
pub enum Event {
    /// A destination waits for its source at this URI.
    Listening {
        /// With the port that the system chose.
        uri: String,
    },
    /// The source's RAM was filled.
    Filled(Filling),
    /// The source's migration goes on.
    Progress {
        /// Where it is.
        moment: Moment,
    },
    /// The source's migration has completed.
    Sent {
        /// Its figures.
        report: Box<SourceReport>,
    },
    /// The destination runs the guest.
    Received {
        /// Its figures.
        report: DestinationReport,
    },
    /// The guest went on, and its memory was checked.
    Checked(Check),
    /// The migration failed.
    Failed {
        /// Why, in one line.
        error: String,
    },
}

/// What RAM holds at the start of a guest.
#[derive(Debug, Clone, Copy, PartialEq, Serialize, Deserialize)]
pub struct Filling {
    /// Pages that are not zero.
    pub data_pages: u64,
    /// Pages that are.
    pub zero_pages: u64,
    /// How often the source of its bytes was laid: above 1 it was repeated, below 1 it is its first part.
    pub laid: f64,
}

impl From<&Filled> for Filling {
    fn from(filled: &Filled) -> Self {
        Self {
            data_pages: filled.data_pages,
            zero_pages: filled.zero_pages,
            laid: filled.laid,
        }
    }
}

impl Filling {
    /// Zero pages in percent, as they were counted.
    pub fn zero_percent(&self) -> f64 {
        let pages = (self.data_pages + self.zero_pages).max(1);
        #[expect(clippy::cast_precision_loss, reason = "counts stay below 2^53")]
        let share = self.zero_pages as f64 / pages as f64;
        share * 100.0
    }

    /// "25 % zero pages, laid 3.1 times and perturbed at each repetition".
    pub fn text(&self) -> String {
        let laid = match self.laid {
            times if times > 1.0 => {
                format!(", laid {times:.1} times and perturbed at each repetition")
            }
            times if times < 1.0 => ", of which it takes the first part".to_owned(),
            _ => String::new(),
        };
        format!("{:.1} % zero pages{laid}", self.zero_percent())
    }
}

/// A moment of a migration, as its source saw it.
#[derive(Debug, Clone, PartialEq, Serialize, Deserialize)]
pub struct Moment {
    /// Time since the migration was asked for, in milliseconds.
    pub elapsed_ms: f64,
    /// State, by QEMU's name.
    pub status: String,
    /// Pass over the dirty pages, from 1.
    pub round: u64,
    /// Bytes of pages that this round has still to settle.
    pub remaining_bytes: u64,
    /// Bytes written to all sockets so far.
    pub transferred_bytes: u64,
    /// Bytes written a second, since the moment before.
    pub bytes_per_second: f64,
    /// Pages settled a second, since the moment before.
    pub pages_per_second: f64,
    /// Pages that the guest dirties a second.
    pub dirty_pages_per_second: f64,
}

impl From<&Progress> for Moment {
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

/// What a look at a guest has shown.
#[derive(Debug, Clone, Serialize, Deserialize)]
pub struct Check {
    /// It runs, and its count of writes has grown (if its workload writes at all).
    pub runs: bool,
    /// Pages, records and vCPU state agree: no write was lost.
    pub verified: bool,
    /// What is wrong, if something is.
    pub problem: Option<String>,
    /// Writes of all vCPUs.
    pub writes: u64,
    /// Pages that were compared.
    pub pages_checked: u64,
}

/// Tells `event` to the parent process.
pub fn tell(event: &Event) {
    if let Ok(line) = serde_json::to_string(event) {
        // A parent that has gone or sleeps hears nothing; the guest goes on.
        match event {
            Event::Progress { .. } => output::progress_line(&line),
            _ => output::out(&line),
        }
    }
}

/// The events of a child process, up to its end. Lines that are none are passed over.
pub fn read(stdout: impl Read + 'static) -> Events {
    Box::new(
        BufReader::new(stdout)
            .lines()
            .map_while(Result::ok)
            .filter_map(|line| serde_json::from_str(&line).ok()),
    )
}

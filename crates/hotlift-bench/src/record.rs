//! One migration run of a bench, as a line of `runs.jsonl`: its settings, its machine and its outcome.
//!
//! All tables and reports are made from these lines, so they can be made again from kept files.

use std::collections::{BTreeMap, BTreeSet};
use std::path::Path;
use std::time::Duration;

use hotlift::figures::{DestinationReport, SourceReport};
use hotlift::tls;
use hotlift_command::events::{Filling, ProgressSnapshot};
use hotlift_mem::FileError;
use serde::{Deserialize, Serialize};

use super::link::Link;

/// One run of a migration: settings, machine and outcome.
#[derive(Debug, Clone, PartialEq, Serialize, Deserialize)]
pub struct Record {
    /// "matrix", or the name of the suite.
    pub suite: String,
    /// Name of the call of `hotlift-bench` that this run belongs to. Runs of one call alternate between the rows.
    pub series: String,
    /// Number of the run in its call of `hotlift-bench`, from 1, in the order in which the runs started.
    pub number: u32,
    /// Repeat number: earlier runs of the same row in this call of `hotlift-bench`, plus 1. Two rows are compared by
    /// runs with equal repeat numbers, because these ran close in time.
    pub repeat: u32,
    /// Start time of the run: UTC, in the format of RFC 3339.
    pub time: String,
    /// Settings of the run.
    pub row: Row,
    /// Machine on which the source ran.
    pub machine: Machine,
    /// Outcome of the run.
    pub outcome: Outcome,
}

/// Settings of a run. Runs with equal rows are repeats of each other.
#[derive(Debug, Clone, PartialEq, Serialize, Deserialize)]
pub struct Row {
    /// Program that migrated the guest.
    pub engine: Engine,
    /// Page compression method; "compress" for compression threads on the main channel.
    pub method: String,
    /// Level of the method; `None` if the method has no levels.
    pub level: Option<u8>,
    /// Number of multifd channels; 0 without multifd.
    pub channels: u8,
    /// Value of the option `zero-page-detection`, as typed.
    pub zero_page_detection: String,
    /// Limit of the migration's bandwidth, in bytes per second; 0 is unlimited.
    pub max_bandwidth: u64,
    /// Limit of the network link, as typed ("1gbit"); `None` without a limit.
    pub link: Option<String>,
    /// Time after the request to migrate at which a busy thread occupied a core ("2s"); `None` without a busy thread.
    #[serde(default, skip_serializing_if = "Option::is_none")]
    pub neighbour: Option<String>,
    /// The guest that is migrated.
    pub guest: GuestRow,
    /// All other options that were set, as typed, by name.
    pub options: BTreeMap<String, String>,
}

/// Settings of the guest of a run.
#[derive(Debug, Clone, PartialEq, Serialize, Deserialize)]
pub struct GuestRow {
    /// Kind of guest: "kvm" or "threads"; for QEMU "kvm" or "tcg".
    pub kind: String,
    /// Number of vCPUs.
    pub vcpus: u8,
    /// RAM, in bytes.
    pub ram_bytes: u64,
    /// Content of RAM: "generated", "zero", or the path of the folder or file that RAM was filled from.
    pub fill: String,
    /// Share of pages that stay zero, 0 to 1; `None` for a memory image, which has its own zero pages.
    pub zero_share: Option<f64>,
    /// True if every zero page was written once, which allocates it.
    pub zero_touched: bool,
    /// Write pattern: "idle", "random", "sequential" or "hotset".
    pub workload: String,
    /// Pages that the guest writes per second; 0 if idle.
    pub rate: u64,
    /// Size of the working set, in bytes.
    pub working_set: u64,
}

/// Program that migrates a guest.
#[derive(Debug, Clone, Copy, PartialEq, Eq, PartialOrd, Ord, Serialize, Deserialize)]
#[serde(rename_all = "kebab-case")]
pub enum Engine {
    /// A Hotlift guest to a Hotlift guest.
    Hotlift,
    /// A QEMU to a QEMU.
    Qemu,
    /// A QEMU to a QEMU through two relays. The relays use the row's method; the QEMUs do not compress.
    Relay,
}

/// State of the machine at the time of a run.
#[derive(Debug, Clone, PartialEq, Serialize, Deserialize)]
pub struct Machine {
    /// Model name of the CPU.
    pub cpu: String,
    /// Number of CPU cores that the bench may use.
    pub cores: usize,
    /// Memory of the machine, in bytes.
    pub memory_bytes: u64,
    /// Release of the kernel.
    pub kernel: String,
    /// Load average of the last minute before the run; shows whether other programs used the machine.
    pub load: f64,
    /// Versions by program or library: hotlift, qemu, the method's library.
    pub versions: BTreeMap<String, String>,
    /// Command line of the bench.
    pub command: Vec<String>,
    /// Name of the destination host; `None` if the destination was on this machine.
    pub destination: Option<String>,
    /// Speed of the TLS cipher, measured just before a run over TLS; `None` for a run without TLS.
    #[serde(default, skip_serializing_if = "Option::is_none")]
    pub cipher: Option<CipherSpeed>,
}

/// CPU time of AES-128-GCM for memory outside the CPU caches, in core-seconds per GiB.
#[derive(Debug, Clone, Copy, PartialEq, Serialize, Deserialize)]
pub struct CipherSpeed {
    /// CPU time to encrypt, in core-seconds per GiB.
    pub seal: f64,
    /// CPU time to decrypt, in core-seconds per GiB.
    pub open: f64,
}

impl CipherSpeed {
    /// Bytes to encrypt in the measurement. They exceed the CPU caches: data in the caches takes half the time.
    const MEMORY: usize = 256 << 20;

    /// Measures the cipher in some tenths of a second. `None` if there is not enough memory.
    pub fn measure() -> Option<Self> {
        let mut memory = Vec::new();
        memory.try_reserve_exact(Self::MEMORY).ok()?;
        memory.resize(Self::MEMORY, 1_u8);
        let (seal, open) = tls::measure_cipher(&mut memory).ok()?;
        let of_a_gib =
            |time: Duration| time.as_secs_f64() * f64::from(1 << 30) / Self::MEMORY as f64;
        Some(Self {
            seal: of_a_gib(seal),
            open: of_a_gib(open),
        })
    }
}

/// Outcome of a run.
#[derive(Debug, Clone, PartialEq, Serialize, Deserialize)]
#[serde(rename_all = "kebab-case")]
pub enum Outcome {
    /// The migration succeeded: the destination runs the guest.
    Completed(Box<Completed>),
    /// The migration failed: the destination does not run the guest.
    Failed {
        /// Reason of the failure, in one line.
        error: String,
    },
    /// The run was not started.
    Skipped {
        /// The reason, in one line: this QEMU lacks the method, or this machine lacks memory.
        reason: String,
    },
}

/// Figures of a completed run. For QEMU, these are the figures that QEMU reports, with CPU times from the kernel. A
/// figure that QEMU does not report is 0 or empty.
#[derive(Debug, Clone, Default, PartialEq, Serialize, Deserialize)]
pub struct Completed {
    /// True if RAM at the destination has the expected content; `None` if the content could not be checked.
    pub verified: Option<bool>,
    /// Counts of the kinds of pages in RAM at the start; `None` in records of older versions.
    #[serde(default)]
    pub filled: Option<Filling>,
    /// The source's figures.
    pub source: SourceReport,
    /// The destination's figures.
    pub destination: DestinationReport,
    /// The kernel's counts for each thread of the source process.
    pub source_threads: Vec<ThreadCounts>,
    /// The kernel's counts for each thread of the destination process; empty if the destination is on another host.
    pub destination_threads: Vec<ThreadCounts>,
    /// Progress reports of the migration, in order of time.
    pub timeline: Vec<ProgressSnapshot>,
}

/// The kernel's counts for one thread (`proc_pid_stat(5)`, `proc_pid_status(5)`). They cover the time from the start of
/// the migration until the last sample, some milliseconds before the thread's end.
#[derive(Debug, Clone, Default, PartialEq, Serialize, Deserialize)]
pub struct ThreadCounts {
    /// Name of the thread.
    pub name: String,
    /// User and system CPU time, in seconds.
    pub cpu_s: f64,
    /// Voluntary context switches: the thread waited, for example for a futex or a socket.
    pub waits: u64,
    /// Involuntary context switches: the kernel preempted the thread.
    pub preempted: u64,
    /// Page faults, minor and major.
    pub page_faults: u64,
}

impl Machine {
    /// Returns the properties that distinguish machines: CPU model, number of cores, kernel, and the destination host.
    pub fn identity(&self) -> (&str, usize, &str, Option<&str>) {
        let other = self.destination.as_deref();
        (&self.cpu, self.cores, &self.kernel, other)
    }
}

impl Completed {
    /// Returns the accelerator devices that source and destination used.
    pub fn devices(&self) -> impl Iterator<Item = &str> {
        let sides = [&self.source.side, &self.destination.side].into_iter();
        let all = sides.flat_map(|side| side.jobs.devices.iter().chain(&side.zero_jobs.devices));
        all.map(String::as_str)
    }
}

impl Record {
    /// Returns the figures of a completed migration; `None` if the run failed or was skipped.
    pub fn completed(&self) -> Option<&Completed> {
        match &self.outcome {
            Outcome::Completed(completed) => Some(completed),
            Outcome::Failed { .. } | Outcome::Skipped { .. } => None,
        }
    }

    /// Returns the program and its version: "Hotlift", "QEMU 10.0.2".
    pub fn program_name(&self) -> String {
        let version = self.machine.versions.get("qemu");
        let number = version.and_then(|text| text.split([' ', '(']).next());
        match (self.row.program_name(), number) {
            (who, Some(number)) if self.row.engine != Engine::Hotlift => format!("{who} {number}"),
            (who, _) => who.to_owned(),
        }
    }
}

/// Returns the programs of `records`: Hotlift first, then QEMUs in order, then relays.
pub fn program_names<'a>(records: impl IntoIterator<Item = &'a Record>) -> Vec<String> {
    let of = |record: &Record| (record.row.engine, record.program_name());
    let program_names: BTreeSet<_> = records.into_iter().map(of).collect();
    program_names.into_iter().map(|(_, who)| who).collect()
}

impl Row {
    /// Returns the name of the program: "Hotlift", "QEMU", "relayed QEMU".
    pub fn program_name(&self) -> &'static str {
        match self.engine {
            Engine::Hotlift => "Hotlift",
            Engine::Qemu => "QEMU",
            Engine::Relay => "relayed QEMU",
        }
    }

    /// Returns true if Hotlift does the work, alone or as relays between QEMUs. Tables compare such rows with QEMU's
    /// rows.
    pub fn is_ours(&self) -> bool {
        self.engine != Engine::Qemu
    }

    /// Returns true if `other` has the same guest, link, bandwidth limit and busy thread. Only other migration options may
    /// differ. The kind of guest is not compared, because QEMU's kinds always differ from Hotlift's.
    pub fn is_comparable(&self, other: &Self) -> bool {
        fn wire(row: &Row) -> (&Option<String>, u64, &Option<String>) {
            (&row.link, row.max_bandwidth, &row.neighbour)
        }
        let mut guest = other.guest.clone();
        guest.kind.clone_from(&self.guest.kind);
        wire(self) == wire(other) && self.guest == guest
    }

    /// Returns the limited link of the run; `None` without a limit.
    pub fn link(&self) -> Option<Link> {
        self.link.as_ref()?.parse().ok()
    }

    /// Returns the method, with its level if it has one: "zstd 1", "none".
    pub fn method_and_level(&self) -> String {
        match self.level {
            Some(level) => format!("{} {level}", self.method),
            None => self.method.clone(),
        }
    }
}

/// Returns the records in a `runs.jsonl`, in the order of the file.
///
/// # Errors
/// If the file cannot be read, or a line is not a record. The error contains the line number.
pub fn read(path: &Path) -> Result<Vec<Record>, FileError> {
    let failed = FileError::of("inspect", path);
    let text = std::fs::read_to_string(path).map_err(failed)?;
    let parse = |(number, line)| {
        serde_json::from_str(line)
            .map_err(|error| failed(std::io::Error::other(format!("line {number}: {error}"))))
    };
    (1..).zip(text.lines()).map(parse).collect()
}

#[cfg(test)]
pub mod tests {
    use super::*;

    /// Returns a record that tests of tables can modify.
    pub fn example() -> Record {
        Record {
            suite: "matrix".to_owned(),
            series: "2026-11-22T06:40:00Z".to_owned(),
            number: 1,
            repeat: 1,
            time: "2026-11-22T06:40:01Z".to_owned(),
            row: Row {
                engine: Engine::Hotlift,
                method: "zstd".to_owned(),
                level: Some(1),
                channels: 2,
                zero_page_detection: "multifd".to_owned(),
                max_bandwidth: 0,
                link: None,
                neighbour: None,
                guest: GuestRow {
                    kind: "kvm".to_owned(),
                    vcpus: 1,
                    ram_bytes: 1 << 30,
                    fill: "generated".to_owned(),
                    zero_share: Some(0.25),
                    zero_touched: false,
                    workload: "random".to_owned(),
                    rate: 1000,
                    working_set: 128 << 20,
                },
                options: BTreeMap::new(),
            },
            machine: Machine {
                cpu: "a CPU".to_owned(),
                cores: 2,
                memory_bytes: 4 << 30,
                kernel: "6.18".to_owned(),
                load: 0.5,
                versions: BTreeMap::from([("hotlift".to_owned(), "0.1.0".to_owned())]),
                command: vec!["hotlift-bench".to_owned()],
                destination: None,
                cipher: None,
            },
            outcome: Outcome::Completed(Box::default()),
        }
    }

    #[test]
    fn every_version_of_qemu_is_listed_separately() {
        let run = |engine, qemu: Option<&str>| {
            let mut record = example();
            record.row.engine = engine;
            let version = qemu.map(|version| ("qemu".to_owned(), version.to_owned()));
            record.machine.versions.extend(version);
            record
        };
        let records = [
            run(Engine::Qemu, Some("7.2.22 (Debian 1:7.2+dfsg-7)")),
            run(Engine::Qemu, Some("2.11.1(Debian 1:2.11+dfsg-1ubuntu7)")),
            run(Engine::Hotlift, None),
            run(Engine::Qemu, None),
            run(Engine::Qemu, Some("7.2.22 (another build)")),
        ];
        assert_eq!(
            program_names(&records),
            ["Hotlift", "QEMU", "QEMU 2.11.1", "QEMU 7.2.22"]
        );
    }

    #[test]
    fn records_are_read_back_from_their_file_and_a_bad_line_is_named() {
        let folder = tempfile::tempdir().unwrap();
        let path = folder.path().join("runs.jsonl");
        let outcomes = [
            Outcome::Completed(Box::new(Completed {
                verified: Some(true),
                source_threads: vec![ThreadCounts::default()],
                ..Completed::default()
            })),
            Outcome::Failed {
                error: "no\nwhy".to_owned(),
            },
            Outcome::Skipped {
                reason: "no".to_owned(),
            },
        ];
        let records = outcomes.map(|outcome| Record {
            outcome,
            ..example()
        });
        let lines = records
            .iter()
            .map(|one| serde_json::to_string(one).unwrap());
        let text = lines.collect::<Vec<_>>().join("\n");
        std::fs::write(&path, &text).unwrap();
        assert_eq!(read(&path).unwrap(), records);
        std::fs::write(&path, format!("{text}\n{{}}\n")).unwrap();
        let error = hotlift_terminal::error::error_line(&read(&path).unwrap_err());
        assert!(error.contains("line 4"), "{error}");
    }
}

//! One migration of a bench, as a line of `runs.jsonl`: what was run, where, and what came of it.
//!
//! All that tables and reports say is made from such lines, so that kept runs can be read again.

use std::collections::{BTreeMap, BTreeSet};
use std::path::Path;
use std::time::Duration;

use hotlift::figures::{DestinationReport, SourceReport};
use hotlift::tls;
use hotlift_command::events::{Filling, Moment};
use hotlift_mem::FileError;
use serde::{Deserialize, Serialize};

use super::link::Link;

/// One run.
#[derive(Debug, Clone, PartialEq, Serialize, Deserialize)]
pub struct Record {
    /// "matrix", or the name of the suite.
    pub suite: String,
    /// Names the call of `hotlift-bench` that this run belongs to; runs of one series were interleaved.
    pub series: String,
    /// Number of the run in its series, from 1, in the order in which they ran.
    pub number: u32,
    /// How often the row had run before in this series, plus 1. The same repeat of two rows ran
    /// within one turn of the matrix, so quotients are made of runs with the same repeat.
    pub repeat: u32,
    /// When it began: UTC, as RFC 3339 has it.
    pub time: String,
    /// What was asked for.
    pub row: Row,
    /// Where.
    pub machine: Machine,
    /// What came of it.
    pub outcome: Outcome,
}

/// The settings of a run: two runs with equal rows repeat each other.
#[derive(Debug, Clone, PartialEq, Serialize, Deserialize)]
pub struct Row {
    /// What migrated.
    pub engine: Engine,
    /// Page compression method, "compress" for threads on the main channel.
    pub method: String,
    /// Level of the method, if it has levels.
    pub level: Option<u8>,
    /// multifd channels; 0 without multifd.
    pub channels: u8,
    /// As the option is typed.
    pub zero_page_detection: String,
    /// Limit of the migration, in bytes a second; 0 is unlimited.
    pub max_bandwidth: u64,
    /// Limit of the link itself, as typed ("1gbit"); `None` if nothing was limited.
    pub link: Option<String>,
    /// From when on a busy thread took a core, after the request to migrate ("2s").
    #[serde(default, skip_serializing_if = "Option::is_none")]
    pub neighbour: Option<String>,
    /// The guest.
    pub guest: GuestRow,
    /// Every other option that was given, by name, as typed.
    pub options: BTreeMap<String, String>,
}

/// The guest of a run.
#[derive(Debug, Clone, PartialEq, Serialize, Deserialize)]
pub struct GuestRow {
    /// "kvm" or "threads"; of a QEMU "kvm" or "tcg".
    pub kind: String,
    /// vCPUs.
    pub vcpus: u8,
    /// Bytes of RAM.
    pub ram_bytes: u64,
    /// "generated", "zero", or the folder or file that RAM was filled with.
    pub fill: String,
    /// Share of pages that are to stay zero, 0 to 1; `None` of a file whose own zero pages are meant.
    pub zero_share: Option<f64>,
    /// Zero pages were written once, so that they are allocated.
    pub zero_touched: bool,
    /// idle, random, sequential or hotset.
    pub workload: String,
    /// Pages written a second; 0 if idle.
    pub rate: u64,
    /// Bytes that are written to.
    pub working_set: u64,
}

/// What migrated.
#[derive(Debug, Clone, Copy, PartialEq, Eq, PartialOrd, Ord, Serialize, Deserialize)]
#[serde(rename_all = "kebab-case")]
pub enum Engine {
    /// Hotlift to Hotlift.
    Hotlift,
    /// QEMU to QEMU.
    Qemu,
    /// QEMU to QEMU, uncompressed, through two relays that use the row's method.
    Relay,
}

/// Where it ran, at the time.
#[derive(Debug, Clone, PartialEq, Serialize, Deserialize)]
pub struct Machine {
    /// Model name of the CPU.
    pub cpu: String,
    /// Cores that may be used.
    pub cores: usize,
    /// Bytes of memory.
    pub memory_bytes: u64,
    /// Release of the kernel.
    pub kernel: String,
    /// Load average of the last minute, just before the run: other work shows here.
    pub load: f64,
    /// Versions by name: hotlift, qemu, the method's library.
    pub versions: BTreeMap<String, String>,
    /// The command line of the bench.
    pub command: Vec<String>,
    /// The other host, if the destination was there.
    pub destination: Option<String>,
    /// What TLS's cipher takes by itself, measured just before a run over TLS.
    #[serde(default, skip_serializing_if = "Option::is_none")]
    pub cipher: Option<CipherSpeed>,
}

/// CPU time that AES-128-GCM takes for memory that is in no cache, in core-seconds per GiB.
#[derive(Debug, Clone, Copy, PartialEq, Serialize, Deserialize)]
pub struct CipherSpeed {
    /// To encrypt.
    pub seal: f64,
    /// To decrypt.
    pub open: f64,
}

impl CipherSpeed {
    /// How much memory it is measured with: larger than the caches, which would show half the time.
    const MEMORY: usize = 256 << 20;

    /// Measures it; some tenths of a second. `None` if there is no memory for it.
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

/// What came of a run.
#[derive(Debug, Clone, PartialEq, Serialize, Deserialize)]
#[serde(rename_all = "kebab-case")]
pub enum Outcome {
    /// The destination runs the guest.
    Completed(Box<Completed>),
    /// It does not.
    Failed {
        /// Why, in one line.
        error: String,
    },
    /// It was not tried.
    Skipped {
        /// Why, in one line: a method that this QEMU lacks, memory that this machine lacks.
        reason: String,
    },
}

/// Figures of a run that completed. Of a QEMU they are what QEMU itself reports, with CPU times as the
/// kernel has them; what it does not tell is 0 or empty.
#[derive(Debug, Clone, Default, PartialEq, Serialize, Deserialize)]
pub struct Completed {
    /// RAM is what it has to be; `None` where it could not be seen.
    pub verified: Option<bool>,
    /// What RAM held at the start, as it was counted; `None` of records from before there was one.
    #[serde(default)]
    pub filled: Option<Filling>,
    /// The source's figures.
    pub source: SourceReport,
    /// The destination's figures.
    pub destination: DestinationReport,
    /// What the kernel has counted for each thread of the source.
    pub source_threads: Vec<ThreadCounts>,
    /// The same at the destination; empty if that is on another host.
    pub destination_threads: Vec<ThreadCounts>,
    /// Moments of the migration, in order.
    pub timeline: Vec<Moment>,
}

/// What the kernel has counted for a thread (proc_pid_stat(5), proc_pid_status(5)), from the
/// begin of the migration until it was last looked at, some milliseconds before its end.
#[derive(Debug, Clone, Default, PartialEq, Serialize, Deserialize)]
pub struct ThreadCounts {
    /// Its name.
    pub name: String,
    /// User and system time, in seconds.
    pub cpu_s: f64,
    /// Switches that it asked for: it waited, for a futex or a socket.
    pub waits: u64,
    /// Switches that it did not ask for.
    pub preempted: u64,
    /// Page faults, of both kinds.
    pub page_faults: u64,
}

impl Machine {
    /// What tells machines apart, as far as a record knows: CPU, cores, kernel, and the other host.
    pub fn identity(&self) -> (&str, usize, &str, Option<&str>) {
        let other = self.destination.as_deref();
        (&self.cpu, self.cores, &self.kernel, other)
    }
}

impl Completed {
    /// Accelerators that took part, of both sides.
    pub fn devices(&self) -> impl Iterator<Item = &str> {
        let sides = [&self.source.side, &self.destination.side].into_iter();
        let all = sides.flat_map(|side| side.jobs.devices.iter().chain(&side.zero_jobs.devices));
        all.map(String::as_str)
    }
}

impl Record {
    /// The figures, if the migration completed.
    pub fn completed(&self) -> Option<&Completed> {
        match &self.outcome {
            Outcome::Completed(completed) => Some(completed),
            Outcome::Failed { .. } | Outcome::Skipped { .. } => None,
        }
    }

    /// "Hotlift", "QEMU 10.0.2".
    pub fn who(&self) -> String {
        let version = self.machine.versions.get("qemu");
        let number = version.and_then(|text| text.split([' ', '(']).next());
        match (self.row.who(), number) {
            (who, Some(number)) if self.row.engine != Engine::Hotlift => format!("{who} {number}"),
            (who, _) => who.to_owned(),
        }
    }
}

/// Who ran `records`: Hotlift first, then QEMUs in order, and then relays.
pub fn whos<'a>(records: impl IntoIterator<Item = &'a Record>) -> Vec<String> {
    let of = |record: &Record| (record.row.engine, record.who());
    let whos: BTreeSet<_> = records.into_iter().map(of).collect();
    whos.into_iter().map(|(_, who)| who).collect()
}

impl Row {
    /// Who migrates: "Hotlift", "QEMU", "relayed QEMU".
    pub fn who(&self) -> &'static str {
        match self.engine {
            Engine::Hotlift => "Hotlift",
            Engine::Qemu => "QEMU",
            Engine::Relay => "relayed QEMU",
        }
    }

    /// Hotlift's own work, by itself or between QEMUs: what a QEMU's is compared with.
    pub fn is_ours(&self) -> bool {
        self.engine != Engine::Qemu
    }

    /// Whether `other` is of the same guest in the same circumstances: they differ in how they migrate. A QEMU's guest is
    /// of another kind than Hotlift's, and that alone makes no other work.
    pub fn stands_beside(&self, other: &Self) -> bool {
        fn wire(row: &Row) -> (&Option<String>, u64, &Option<String>) {
            (&row.link, row.max_bandwidth, &row.neighbour)
        }
        let mut guest = other.guest.clone();
        guest.kind.clone_from(&self.guest.kind);
        wire(self) == wire(other) && self.guest == guest
    }

    /// The link, if it was limited.
    pub fn link(&self) -> Option<Link> {
        self.link.as_ref()?.parse().ok()
    }

    /// "zstd 1", "none".
    pub fn method_and_level(&self) -> String {
        match self.level {
            Some(level) => format!("{} {level}", self.method),
            None => self.method.clone(),
        }
    }
}

/// The records of a `runs.jsonl`, in its order.
///
/// # Errors
/// If it cannot be read, or a line is not a record; the line is named.
pub fn read(path: &Path) -> Result<Vec<Record>, FileError> {
    let failed = FileError::of("look at", path);
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

    /// A record to make tables of.
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
    fn every_version_of_qemu_is_somebody_else() {
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
            whos(&records),
            ["Hotlift", "QEMU", "QEMU 2.11.1", "QEMU 7.2.22"]
        );
    }

    #[test]
    fn records_survive_their_file_and_a_bad_line_is_named() {
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

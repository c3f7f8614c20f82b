//! Runs the same migrations with a real QEMU: two QEMU processes, RAM filled with the same bytes, controlled over QMP.
//!
//! | file | subject |
//! |---|---|
//! | `process` | a QEMU with our guest: start, fill, compare, end |
//! | `settings` | QEMU's settings, and settings that no QEMU has |
//! | `figures`, `cpu` | the figures that QEMU reports, and the kernel's counts |
//! | `relays` | two relays between two QEMUs |

mod cpu;
mod figures;
mod process;
mod relays;
mod settings;

use std::path::{Path, PathBuf};
use std::process::Command;
use std::time::{Duration, Instant};

use hotlift::Options;
use hotlift::figures::{DestinationReport, JobFigures, SideFigures, SourceReport};
use hotlift_command::events::ProgressSnapshot;
use hotlift_command::migration_args::Given;
use hotlift_command::pair::ProcessPlace;
use hotlift_host::accel::serves;
use hotlift_qemu::QemuError;
use hotlift_qmp::QmpError;
use hotlift_terminal::error::TerminalError;
use hotlift_terminal::signals::Interrupt;
use hotlift_vmm::layout::Layout;
use hotlift_vmm::workload::Workload;
use serde_json::Value;

use super::cell::Cell;
use super::certificates::Certificates;
use super::record::{Completed, Engine, Outcome};
use crate::error::BenchError;
use cpu::{Meter, SideCpu, cpu_of, without_vcpus};
use figures::{moment, number, source_report};
use process::{Image, Process, Start};
use relays::Relays;

/// Interval between two `query-migrate` commands, equal to the interval of Hotlift's reports.
const POLL_INTERVAL: Duration = Duration::from_millis(100);

/// Time for which a guest writes pages before its migration starts, as with `guest run`.
const RUN_IN: Duration = Duration::from_millis(200);

/// A QEMU executable and its version.
#[derive(Debug)]
pub struct Program {
    path: PathBuf,
    /// Version as QEMU prints it: "10.0.2 (Debian 1:10.0.2+ds-2)".
    pub version: String,
    image: Image,
}

/// Reason why a run did not complete.
enum Stop {
    /// This version of QEMU lacks the named feature.
    Lacks(String),
    /// The run failed with this error.
    Failed(String),
}

impl Stop {
    /// Appends the last messages of other processes to the error of a failure.
    fn with(self, others: Option<String>) -> Self {
        match (self, others) {
            (Self::Failed(why), Some(others)) if !others.is_empty() => {
                Self::Failed(format!("{why}; {others}"))
            }
            (stop, _) => stop,
        }
    }
}

impl From<BenchError> for Stop {
    fn from(error: BenchError) -> Self {
        Self::Failed(error.line())
    }
}

impl From<QmpError> for Stop {
    fn from(error: QmpError) -> Self {
        Self::Failed(hotlift_terminal::error::error_line(&error))
    }
}

impl Program {
    /// Finds the version of the QEMU at `path`.
    ///
    /// # Errors
    /// If the program does not start, or does not print a version of QEMU.
    pub fn find(path: &Path) -> Result<Self, BenchError> {
        let output = Command::new(path)
            .arg("--version")
            .output()
            .map_err(TerminalError::process("the QEMU of --with-qemu"))?;
        let output = String::from_utf8_lossy(&output.stdout).into_owned();
        let line = output.lines().next().unwrap_or_default();
        match line.split_once("version ") {
            Some((name, version)) if name.contains("QEMU") => Ok(Self {
                path: path.to_owned(),
                version: version.to_owned(),
                image: Image::default(),
            }),
            _ => Err(QemuError::Command {
                problem: format!("{} prints no version of QEMU", path.display()),
            }
            .into()),
        }
    }

    /// Returns true if QEMU counts the compressed bytes of multifd channels, as it does from 8.1 on. 7.2 counts 4096
    /// bytes for each page, so its compression ratio is 0.99 with every method.
    fn counts_packed_bytes(&self) -> bool {
        is_from(&self.version, (8, 1))
    }

    /// Migrates the guest of `cell` once with QEMU. `certificates` are used for TLS; `None` without TLS.
    pub fn run(
        &self,
        cell: &Cell,
        place: &ProcessPlace,
        certificates: Option<&Certificates>,
        limit: Duration,
        interrupt: &Interrupt,
        report: &mut dyn FnMut(&ProgressSnapshot),
    ) -> Outcome {
        match self.migrate(cell, place, certificates, limit, interrupt, report) {
            Ok(completed) => Outcome::Completed(Box::new(completed)),
            Err(Stop::Lacks(reason)) => Outcome::Skipped {
                reason: format!("QEMU {}: {reason}", self.version),
            },
            Err(Stop::Failed(error)) => Outcome::Failed {
                error: format!("QEMU {}: {error}", self.version),
            },
        }
    }

    /// Returns the options of `cell`, or an error if this QEMU does not support them.
    fn options(&self, cell: &Cell) -> Result<Options, Stop> {
        let options = cell.migration.options().map_err(BenchError::from)?;
        settings::refuse_what_is_ours(cell)?;
        let is_off = |given: &Given| given.option.name == "accelerator" && given.text == "off";
        if cell.migration.given().iter().any(is_off)
            && serves(options.stream.multifd_compression.name).map_err(BenchError::from)?
        {
            return Err(Stop::Lacks(
                "cannot be asked to leave its device".to_owned(),
            ));
        }
        let guest = cell.guest.settings();
        let writes = guest.workload != Workload::Idle && guest.rate > 0;
        if writes && !boots_pvh(&self.version) {
            let problem = "does not boot the guest that writes: QEMU 4.0 and later do";
            return Err(Stop::Lacks(problem.to_owned()));
        }
        Ok(options)
    }

    fn migrate(
        &self,
        cell: &Cell,
        place: &ProcessPlace,
        certificates: Option<&Certificates>,
        limit: Duration,
        interrupt: &Interrupt,
        report: &mut dyn FnMut(&ProgressSnapshot),
    ) -> Result<Completed, Stop> {
        let asked = cell;
        let relayed = cell.engine == Engine::Relay;
        let cell = &match relayed {
            true => relays::of_qemus(cell)?,
            false => cell.clone(),
        };
        let options = self.options(cell)?;
        let guest = cell.guest.settings();
        // The guest program starts only one vCPU under QEMU.
        let layout = Layout::new(guest.ram_bytes, 1, guest.working_set)
            .map_err(|error| Stop::Failed(error.to_string()))?;
        let writes = guest.workload != Workload::Idle && guest.rate > 0;
        let (image, filling) = self.image.of(&layout, &cell.guest.fill_settings())?;
        let start = |incoming, prefix| Start {
            program: &self.path,
            kind: cell.kind,
            guest: &guest,
            incoming,
            prealloc: incoming && options.mem_prealloc,
            prefix,
            interrupt,
        };
        let held = cell.held_memory(false);
        let mut source = Process::start(&start(false, &place.source_prefix))?;
        let mut destination = Process::start(&start(true, &place.destination_prefix))?;
        // TLS is checked first, because a QEMU that lacks a feature then fails early.
        let tls = certificates.filter(|_| !relayed);
        for (qemu, endpoint) in [(&mut source, "client"), (&mut destination, "server")] {
            if let Some(certificates) = tls {
                settings::add_certificates(qemu, certificates, endpoint)?;
            }
            settings::set(qemu, cell, &options)?;
        }
        source.fill(&image, &layout, cell.guest.zero_touched)?;
        let (uri, relays) = match relayed {
            true => {
                let folder =
                    tempfile::tempdir().map_err(|error| Stop::Failed(error.to_string()))?;
                let behind = Relays::destination_address(&folder);
                destination.qmp.migrate_incoming(&behind, false)?;
                let relays = Relays::start(
                    &certificates.map_or_else(|| asked.clone(), |some| some.fill_in(asked)),
                    place,
                    folder,
                )?;
                (relays.uri(), Some(relays))
            }
            false => {
                let host = place.address.as_deref().unwrap_or("127.0.0.1");
                let uri = format!("tcp:{host}:0");
                destination.qmp.migrate_incoming(&uri, false)?;
                (format!("tcp:{host}:{}", port(&mut destination)?), None)
            }
        };
        if writes {
            source.qmp.cont()?;
            source.await_writes(interrupt)?;
            interrupt.sleep(Some(RUN_IN));
        }
        drop(held);
        let mut processes = vec![source.pid(), destination.pid()];
        processes.extend(relays.iter().flat_map(Relays::pids));
        let meter = Meter::start(processes);
        source.qmp.migrate(&uri)?;
        let mut timeline = Vec::new();
        let ended = await_end(
            &mut source,
            &mut destination,
            limit,
            interrupt,
            &mut |moment| {
                report(moment);
                timeline.push(moment.clone());
            },
        );
        for qemu in [&source, &destination] {
            qemu.await_end_of_migration_threads();
        }
        if ended.is_ok()
            && let Some(relays) = &relays
        {
            relays.await_end();
        }
        let [source_used, destination_used] = meter.finish();
        ended.map_err(|stop| stop.with(relays.as_ref().map(Relays::output)))?;
        let info = query(&mut source)?;
        let verified = destination.holds(&image, &layout, writes)?;
        let total = Duration::from_millis(number(&info, "total-time"));
        let side = |used: &SideCpu, normal| {
            let threads = cpu_of(&used.threads, used.cpu);
            SideFigures::new(threads, total, normal, JobFigures::default())
        };
        let sent = relays.map(Relays::sent_bytes).transpose()?;
        let mut report = source_report(&info, total, sent);
        if options.stream.multifd()
            && options.stream.method_name() != "none"
            && !self.counts_packed_bytes()
        {
            // QEMU's figures are wrong here; 0 marks them as not reported.
            (
                report.transferred_bytes,
                report.throughput_mbps,
                report.ratio,
            ) = (0, 0.0, 0.0);
        }
        let normal = report.normal_pages;
        Ok(Completed {
            verified: Some(verified),
            filled: Some(filling),
            destination: DestinationReport {
                total_ms: report.total_ms,
                // QEMU's destination does not count pages.
                normal_pages: normal,
                zero_pages: report.zero_pages,
                postcopy: None,
                side: side(&destination_used, normal),
            },
            source: SourceReport {
                side: side(&source_used, normal),
                ..report
            },
            source_threads: without_vcpus(source_used.threads),
            destination_threads: without_vcpus(destination_used.threads),
            timeline,
        })
    }
}

/// Returns true if a QEMU of this version starts ELF programs by their PVH entry point.
fn boots_pvh(version: &str) -> bool {
    is_from(version, (4, 0))
}

/// Returns true if `version` is at least `first` (major, minor), or cannot be parsed.
fn is_from(version: &str, first: (u32, u32)) -> bool {
    let mut numbers = version.split(['.', ' ']).map(str::parse);
    match (numbers.next(), numbers.next()) {
        (Some(Ok(major)), Some(Ok(minor))) => (major, minor) >= first,
        _ => true,
    }
}

fn query(qemu: &mut Process) -> Result<Value, Stop> {
    Ok(qemu.qmp.client().execute("query-migrate", &Value::Null)?)
}

fn port(destination: &mut Process) -> Result<String, Stop> {
    let info = query(destination)?;
    let port = &info["socket-address"][0]["port"];
    // QEMU before 4.0 does not report the address that it listens on.
    port.as_str()
        .map(str::to_owned)
        .or_else(|| Some(destination.listens_on()?.to_string()))
        .ok_or_else(|| Stop::Failed("it does not report its address".to_owned()))
}

/// Waits until source and destination have completed, and reports the source's progress.
fn await_end(
    source: &mut Process,
    destination: &mut Process,
    limit: Duration,
    interrupt: &Interrupt,
    report: &mut dyn FnMut(&ProgressSnapshot),
) -> Result<(), Stop> {
    let started = Instant::now();
    let mut last: Option<(f64, u64)> = None;
    loop {
        let info = query(source)?;
        let elapsed_ms = started.elapsed().as_secs_f64() * 1e3;
        let moment = moment(&info, elapsed_ms, last);
        last = Some((elapsed_ms, moment.transferred_bytes));
        report(&moment);
        match moment.status.as_str() {
            "completed" => break,
            "failed" | "cancelled" => {
                let why = info["error-desc"]
                    .as_str()
                    .unwrap_or("it reports no reason");
                return Err(Stop::Failed(format!("migration {}: {why}", moment.status)));
            }
            _ => {}
        }
        if interrupt.is_raised() || started.elapsed() > limit {
            return Err(Stop::Failed(format!(
                "it did not finish within {:.0} s and was ended",
                limit.as_secs_f64()
            )));
        }
        // An event from QEMU ends the wait early.
        let next = Instant::now() + POLL_INTERVAL;
        source
            .qmp
            .client()
            .wait_for_event(&[interrupt.wake_fd()], next);
    }
    let deadline = Instant::now() + limit;
    loop {
        let info = query(destination)?;
        match info["status"].as_str() {
            Some("completed") => return Ok(()),
            // QEMU before 3.0 reports outgoing migrations only.
            None if destination.qmp.query_status()?.status != "inmigrate" => return Ok(()),
            Some("failed") => {
                return Err(Stop::Failed("the destination failed".to_owned()));
            }
            _ if Instant::now() > deadline => {
                return Err(Stop::Failed("the destination does not complete".to_owned()));
            }
            _ => {
                let next = Instant::now() + POLL_INTERVAL;
                destination.qmp.client().wait_for_event(&[], next);
            }
        }
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn a_guest_that_writes_is_for_qemu_4_and_later() {
        assert!(!boots_pvh("2.11.1(Debian 1:2.11+dfsg-1ubuntu7)"));
        assert!(!boots_pvh("3.1.0"));
        assert!(boots_pvh("4.0.0") && boots_pvh("10.0.2 (Debian 1:10.0.2+ds-2)"));
    }

    #[test]
    fn a_qemu_that_counts_compressed_pages_at_full_size_is_detected_by_its_version() {
        let counts = |version: &str| {
            let program = Program {
                path: PathBuf::new(),
                version: version.to_owned(),
                image: Image::default(),
            };
            program.counts_packed_bytes()
        };
        assert!(!counts("7.2.22 (Debian 1:7.2+dfsg-7+deb12u18)") && !counts("8.0.5"));
        assert!(counts("8.1.0") && counts("10.0.2 (Debian 1:10.0.2+ds-2)") && counts("?"));
    }
}

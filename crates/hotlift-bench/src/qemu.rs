//! The same work by a real QEMU: two of its processes, RAM filled with the same bytes, driven over QMP.

use std::path::{Path, PathBuf};
use std::process::Command;
use std::time::{Duration, Instant};

use hotlift::Options;
use hotlift::figures::{DestinationReport, JobFigures, SideFigures, SourceReport, ThreadCpu};
use hotlift::options::{Kind, option};
use hotlift_console::error::ConsoleError;
use hotlift_console::events::Moment;
use hotlift_console::pair::Place;
use hotlift_console::signals::Interrupt;
use hotlift_host::accel::serves;
use hotlift_qmp::QmpError;
use hotlift_vmm::layout::Layout;
use hotlift_vmm::workload::Workload;
use serde_json::{Value, json};

use super::cell::Cell;
use super::machines::{Image, Machine, Start};
use super::record::{Completed, Engine, Outcome, ThreadCounts};
use super::relays::{self, Relays};
use super::threads::{Sampler, process_cpu};
use super::warm::Warm;
use crate::error::BenchError;

/// Above any link: QEMU's default of 128 MiB/s would be the only thing measured.
const UNLIMITED: u64 = 1_000_000_000_000;

/// Between two looks at a migration, as Hotlift reports its own.
const LOOK: Duration = Duration::from_millis(100);

/// What a guest that writes does so before it is migrated, as with `guest run`.
const RUN_IN: Duration = Duration::from_millis(200);

/// Time that is not in any thread that was seen. QEMU's threads may end between two looks.
const BETWEEN: &str = "(between samples)";

/// A process's own clock has this resolution (USER_HZ); less of a rest is none.
const RESOLUTION_S: f64 = 0.02;

/// A QEMU that can be run.
#[derive(Debug)]
pub struct Program {
    path: PathBuf,
    /// As it says itself: "10.0.2 (Debian 1:10.0.2+ds-2)".
    pub version: String,
    image: Image,
}

/// A run did not come to its end.
enum Stop {
    /// This QEMU does not have what is asked for.
    Lacks(String),
    /// Something failed.
    Failed(String),
}

impl From<BenchError> for Stop {
    fn from(error: BenchError) -> Self {
        Self::Failed(error.line())
    }
}

impl From<QmpError> for Stop {
    fn from(error: QmpError) -> Self {
        Self::Failed(hotlift_console::error::error_line(&error))
    }
}

impl Program {
    /// The QEMU at `path`.
    ///
    /// # Errors
    /// If it does not run, or does not say that it is QEMU.
    pub fn find(path: &Path) -> Result<Self, BenchError> {
        let output = Command::new(path)
            .arg("--version")
            .output()
            .map_err(|source| ConsoleError::Process {
                what: "the QEMU of --with-qemu",
                source,
            })?;
        let said = String::from_utf8_lossy(&output.stdout).into_owned();
        let line = said.lines().next().unwrap_or_default();
        match line.split_once("version ") {
            Some((name, version)) if name.contains("QEMU") => Ok(Self {
                path: path.to_owned(),
                version: version.to_owned(),
                image: Image::default(),
            }),
            _ => Err(ConsoleError::QemuCommand {
                problem: format!(
                    "{} does not say which version of QEMU it is",
                    path.display()
                ),
            }
            .into()),
        }
    }

    /// Whether it knows how many bytes a method left: 7.2 counts 4096 for each page of a channel, whatever was
    /// sent for it (0.99 is its ratio of every method); from 8.1 on the bytes that a channel writes are counted.
    fn counts_packed_bytes(&self) -> bool {
        is_from(&self.version, (8, 1))
    }

    /// Runs `cell` once.
    pub fn run(
        &self,
        cell: &Cell,
        place: &Place,
        limit: Duration,
        interrupt: &Interrupt,
        tell: &mut dyn FnMut(&Moment),
    ) -> Outcome {
        match self.migrate(cell, place, limit, interrupt, tell) {
            Ok(completed) => Outcome::Completed(Box::new(completed)),
            Err(Stop::Lacks(reason)) => Outcome::Skipped {
                reason: format!("QEMU {}: {reason}", self.version),
            },
            Err(Stop::Failed(error)) => Outcome::Failed {
                error: format!("QEMU {}: {error}", self.version),
            },
        }
    }

    fn migrate(
        &self,
        cell: &Cell,
        place: &Place,
        limit: Duration,
        interrupt: &Interrupt,
        tell: &mut dyn FnMut(&Moment),
    ) -> Result<Completed, Stop> {
        let asked = cell;
        let relayed = cell.engine == Engine::Relay;
        if relayed
            && !cell
                .migration
                .options()
                .is_ok_and(|options| options.multifd())
        {
            return Err(Stop::Lacks("a relay sends by multifd".to_owned()));
        }
        let cell = &match relayed {
            true => relays::of_qemus(cell).map_err(BenchError::from)?,
            false => cell.clone(),
        };
        let options = cell.migration.options().map_err(BenchError::from)?;
        refuse_what_is_ours(cell)?;
        let is_off = |(name, value): &(String, String)| name == "accelerator" && value == "off";
        if cell.migration.given().iter().any(is_off)
            && serves(options.multifd_compression.name).map_err(BenchError::from)?
        {
            return Err(Stop::Lacks("cannot be told to leave its device".to_owned()));
        }
        let guest = cell.guest.settings();
        // The guest program of QEMU starts one vCPU.
        let layout = Layout::new(guest.ram_bytes, 1, guest.working_set)
            .map_err(|error| Stop::Failed(error.to_string()))?;
        let writes = guest.workload != Workload::Idle && guest.rate > 0;
        if writes && !boots_pvh(&self.version) {
            let problem = "does not boot the guest that writes: QEMU 4.0 and later do";
            return Err(Stop::Lacks(problem.to_owned()));
        }
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
        let warm = Warm::hold(cell, false);
        let mut source = Machine::start(&start(false, &place.source_prefix))?;
        let mut destination = Machine::start(&start(true, &place.destination_prefix))?;
        // First, since a QEMU that lacks something is done then.
        for machine in [&mut source, &mut destination] {
            set(machine, cell, &options)?;
        }
        source.fill(&image, &layout, cell.guest.zero_touched)?;
        let (uri, relays) = match relayed {
            true => {
                let folder =
                    tempfile::tempdir().map_err(|error| Stop::Failed(error.to_string()))?;
                let behind = Relays::behind(&folder);
                destination.qmp.migrate_incoming(&behind, false)?;
                let relays = Relays::start(asked, place, folder)?;
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
        drop(warm);
        // The source's processes and the destination's in turn.
        let mut pids = vec![source.pid(), destination.pid()];
        pids.extend(relays.iter().flat_map(Relays::pids));
        let clocks = || pids.iter().copied().map(process_cpu).collect::<Vec<_>>();
        let before = clocks();
        let sampler = Sampler::start(&pids);
        source.qmp.migrate(&uri)?;
        let mut timeline = Vec::new();
        let ended = await_end(
            &mut source,
            &mut destination,
            limit,
            interrupt,
            &mut |moment| {
                tell(moment);
                timeline.push(moment.clone());
            },
        );
        for machine in [&source, &destination] {
            machine.await_end_of_migration_threads();
        }
        if ended.is_ok()
            && let Some(relays) = &relays
        {
            relays.await_end();
        }
        let after = clocks();
        let counted = sampler.finish();
        ended?;
        let info = query(&mut source)?;
        let of_side = |side: usize| (side..pids.len()).step_by(2);
        let threads = |side| {
            let all = of_side(side).filter_map(|process| counted.get(process));
            all.flatten().cloned().collect::<Vec<_>>()
        };
        let used = |side| -> Duration {
            of_side(side)
                .map(|process| after[process].saturating_sub(before[process]))
                .sum()
        };
        let (source_threads, destination_threads) = (threads(0), threads(1));
        let verified = destination.holds(&image, &layout, writes)?;
        let total = Duration::from_millis(number(&info, "total-time"));
        let side = |threads: &[ThreadCounts], process: Duration, normal| {
            let threads = cpu_of(threads, process);
            SideFigures::new(threads, total, normal, JobFigures::default())
        };
        let sent = relays.map(Relays::sent_bytes).transpose()?;
        let mut report = source_report(&info, total, sent);
        if options.multifd() && options.method_name() != "none" && !self.counts_packed_bytes() {
            // Not told rather than told wrong.
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
                // QEMU's destination counts nothing.
                normal_pages: normal,
                zero_pages: report.zero_pages,
                side: side(&destination_threads, used(1), normal),
            },
            source: SourceReport {
                side: side(&source_threads, used(0), normal),
                ..report
            },
            source_threads: without_vcpus(source_threads),
            destination_threads: without_vcpus(destination_threads),
            timeline,
        })
    }
}

/// Whether a QEMU of that version starts ELF programs by their PVH entry.
fn boots_pvh(version: &str) -> bool {
    is_from(version, (4, 0))
}

/// Whether `version` is `first` (major, minor) or a later one; so is one that cannot be read.
fn is_from(version: &str, first: (u32, u32)) -> bool {
    let mut numbers = version.split(['.', ' ']).map(str::parse);
    match (numbers.next(), numbers.next()) {
        (Some(Ok(major)), Some(Ok(minor))) => (major, minor) >= first,
        _ => true,
    }
}

/// What no QEMU can be asked for.
fn refuse_what_is_ours(cell: &Cell) -> Result<(), Stop> {
    let (vcpus, workload) = (cell.guest.vcpus, cell.guest.workload);
    if vcpus > 1 && workload != Workload::Idle {
        return Err(Stop::Lacks(format!(
            "its guest that writes has one vCPU, not {vcpus}"
        )));
    }
    let options = cell.migration.options().map_err(BenchError::from)?;
    let method = options.method_name().to_owned();
    for (name, value) in cell.migration.given() {
        let ours = match name.as_str() {
            "accel-path" | "multifd-normal-page-ratio" | "multifd-packet-size" => true,
            // It takes what comes.
            "max-channels" | "memory-limit" | "settle-timeout" => true,
            "zero-page-detection" => !["none", "legacy", "multifd"].contains(&value.as_str()),
            // These use their device wherever there is one.
            "accelerator" => {
                value == "required" && !["qpl", "qatzip", "uadk"].contains(&method.as_str())
            }
            // Nobody would say migrate-continue.
            "pause-before-switchover" => value == "on",
            _ => false,
        };
        if ours {
            return Err(Stop::Lacks(format!("has no {name}={value}")));
        }
    }
    Ok(())
}

/// Sets capabilities and parameters of one side.
fn set(machine: &mut Machine, cell: &Cell, options: &Options) -> Result<(), Stop> {
    machine
        .qmp
        .set_capabilities(&capabilities(cell, options)?)
        .map_err(|error| lacks(&error))?;
    let known = machine.qmp.query_parameters()?;
    let wanted = parameters(cell, options, &|name| known.contains_key(name))?;
    machine
        .qmp
        .set_parameters(&wanted)
        .map_err(|error| lacks(&error))
}

/// What is on or off: the ways of a migration, and all that was asked for beside. With the return path a QEMU's downtime
/// ends as ours does, at the destination's word; without it, at the last byte that its source has written.
fn capabilities(cell: &Cell, options: &Options) -> Result<Vec<(&'static str, bool)>, Stop> {
    let mut wanted = vec![
        ("multifd", options.multifd()),
        ("compress", options.compress),
        ("xbzrle", options.xbzrle),
        ("auto-converge", options.auto_converge),
        ("events", true),
        (
            "return-path",
            options.return_path || !cell.migration.has("return-path"),
        ),
    ];
    for (name, _) in cell.migration.given() {
        let info = option(name).map_err(BenchError::from)?;
        if info.kind == Kind::Capability && !wanted.iter().any(|(known, _)| *known == info.name) {
            wanted.push((info.name, info.read_json(options) == json!(true)));
        }
    }
    Ok(wanted)
}

/// Parameters: a bandwidth above QEMU's default, the method, and all that was asked for beside. Which this
/// QEMU has is what it `knows`.
fn parameters(cell: &Cell, options: &Options, knows: &dyn Fn(&str) -> bool) -> Result<Value, Stop> {
    let bandwidth = match options.max_bandwidth {
        0 => UNLIMITED,
        limit => limit,
    };
    let mut wanted = json!({
        "max-bandwidth": bandwidth,
        "downtime-limit": u64::try_from(options.downtime_limit.as_millis()).unwrap_or(u64::MAX),
    });
    if options.multifd() {
        let method = options.multifd_compression.name;
        wanted["multifd-channels"] = options.channels().into();
        wanted["multifd-compression"] = method.into();
        if let Some(level) = options.level() {
            wanted[format!("multifd-{method}-level")] = level.into();
        }
    }
    let zero_pages = options.zero_page_detection_name();
    if knows("zero-page-detection") {
        wanted["zero-page-detection"] = zero_pages.into();
    } else if zero_pages == "none" {
        // QEMU before 9.0 looks for zero pages in the migration thread, and has no word for it.
        return Err(Stop::Lacks("has no zero-page-detection=none".to_owned()));
    }
    if options.compress {
        wanted["compress-level"] = options.compress_level.into();
        wanted["compress-threads"] = options.compress_threads.into();
        wanted["decompress-threads"] = options.decompress_threads.into();
        if knows("compress-wait-thread") {
            wanted["compress-wait-thread"] = options.compress_wait_thread.into();
        } else if !options.compress_wait_thread {
            // QEMU before 3.1 always waits.
            return Err(Stop::Lacks("has no compress-wait-thread=off".to_owned()));
        }
    }
    for (name, _) in cell.migration.given() {
        let info = option(name).map_err(BenchError::from)?;
        // Those of multifd stand above, or nothing uses them.
        let is_done = info.name == "zero-page-detection" || info.name.starts_with("multifd-");
        if info.kind == Kind::Parameter && !is_done && wanted.get(info.name).is_none() {
            wanted[info.name] = info.read_json(options);
        }
    }
    Ok(wanted)
}

/// A setting that is refused is one that this QEMU does not have: all are in range.
fn lacks(error: &QmpError) -> Stop {
    let words = hotlift_console::error::error_line(error);
    match error {
        QmpError::Command { .. } | QmpError::NoCapability { .. } => Stop::Lacks(words),
        _ => Stop::Failed(words),
    }
}

fn query(machine: &mut Machine) -> Result<Value, Stop> {
    Ok(machine
        .qmp
        .client()
        .execute("query-migrate", &Value::Null)?)
}

fn port(destination: &mut Machine) -> Result<String, Stop> {
    let info = query(destination)?;
    let port = &info["socket-address"][0]["port"];
    // QEMU before 4.0 does not say.
    port.as_str()
        .map(str::to_owned)
        .or_else(|| Some(destination.listens_on()?.to_string()))
        .ok_or_else(|| Stop::Failed("it does not say where it listens".to_owned()))
}

/// Waits until both sides have completed, and tells where the source is.
fn await_end(
    source: &mut Machine,
    destination: &mut Machine,
    limit: Duration,
    interrupt: &Interrupt,
    tell: &mut dyn FnMut(&Moment),
) -> Result<(), Stop> {
    let started = Instant::now();
    let mut last: Option<(f64, u64)> = None;
    loop {
        let info = query(source)?;
        let elapsed_ms = started.elapsed().as_secs_f64() * 1e3;
        let moment = moment(&info, elapsed_ms, last);
        last = Some((elapsed_ms, moment.transferred_bytes));
        tell(&moment);
        match moment.status.as_str() {
            "completed" => break,
            "failed" | "cancelled" => {
                let why = info["error-desc"].as_str().unwrap_or("it does not say why");
                return Err(Stop::Failed(format!("migration {}: {why}", moment.status)));
            }
            _ => {}
        }
        if interrupt.is_raised() || started.elapsed() > limit {
            return Err(Stop::Failed(format!(
                "it was not done after {:.0} s, and was ended",
                limit.as_secs_f64()
            )));
        }
        // An event is a reason to look before it is time to.
        source.qmp.wait_event(LOOK)?;
    }
    let deadline = Instant::now() + limit;
    loop {
        let info = query(destination)?;
        match info["status"].as_str() {
            Some("completed") => return Ok(()),
            // QEMU before 3.0 tells of what it sends only.
            None if destination.qmp.query_status()?.status != "inmigrate" => return Ok(()),
            Some("failed") => {
                return Err(Stop::Failed("the destination failed".to_owned()));
            }
            _ if Instant::now() > deadline => {
                return Err(Stop::Failed("the destination does not complete".to_owned()));
            }
            _ => {
                destination.qmp.wait_event(LOOK)?;
            }
        }
    }
}

fn number(info: &Value, name: &str) -> u64 {
    info[name].as_u64().unwrap_or(0)
}

fn moment(info: &Value, elapsed_ms: f64, last: Option<(f64, u64)>) -> Moment {
    let ram = &info["ram"];
    let transferred = number(ram, "transferred");
    let rate = last.map_or(0.0, |(then, before)| {
        let seconds = (elapsed_ms - then) / 1e3;
        if seconds > 0.0 {
            float(transferred.saturating_sub(before)) / seconds
        } else {
            0.0
        }
    });
    Moment {
        elapsed_ms,
        status: info["status"].as_str().unwrap_or("none").to_owned(),
        round: number(ram, "dirty-sync-count"),
        remaining_bytes: number(ram, "remaining"),
        transferred_bytes: transferred,
        bytes_per_second: rate,
        pages_per_second: float(number(ram, "pages-per-second")),
        dirty_pages_per_second: float(number(ram, "dirty-pages-rate")),
    }
}

/// QEMU's figures with Hotlift's definitions; bytes are those that a relay has `sent`, if there is one. CPU is added by
/// whoever has counted it.
fn source_report(info: &Value, total: Duration, sent: Option<u64>) -> SourceReport {
    let ram = &info["ram"];
    let setup = Duration::from_millis(number(info, "setup-time"));
    let transferred = sent.unwrap_or_else(|| number(ram, "transferred"));
    // Pages of capability compress are counted apart.
    let normal = number(ram, "normal") + number(&info["compression"], "pages");
    let zero = number(ram, "duplicate");
    let sending = total.saturating_sub(setup).as_secs_f64();
    let per = |what: f64, by: f64| if by > 0.0 { what / by } else { 0.0 };
    SourceReport {
        total_ms: total.as_secs_f64() * 1e3,
        setup_ms: setup.as_secs_f64() * 1e3,
        downtime_ms: float(number(info, "downtime")),
        rounds: number(ram, "dirty-sync-count"),
        transferred_bytes: transferred,
        throughput_mbps: per(float(transferred) * 8.0 / 1e6, sending),
        pages_per_second: per(float(normal + zero), total.as_secs_f64()),
        normal_pages: normal,
        zero_pages: zero,
        ratio: per(float(normal) * 4096.0, float(transferred)),
        dirty_syncs: number(ram, "dirty-sync-count"),
        ..SourceReport::default()
    }
}

#[expect(clippy::cast_precision_loss, reason = "counts stay below 2^53")]
fn float(count: u64) -> f64 {
    count as f64
}

fn is_vcpu(name: &str) -> bool {
    name.starts_with("CPU ")
}

fn without_vcpus(mut threads: Vec<ThreadCounts>) -> Vec<ThreadCounts> {
    threads.retain(|thread| !is_vcpu(&thread.name));
    threads
}

/// CPU time by thread; what the process has used beside the threads that were seen is a line too.
fn cpu_of(threads: &[ThreadCounts], process: Duration) -> Vec<ThreadCpu> {
    let seen: f64 = threads.iter().map(|thread| thread.cpu_s).sum();
    let rest = process.as_secs_f64() - seen;
    let rest = (rest > RESOLUTION_S).then(|| ThreadCpu {
        name: BETWEEN.to_owned(),
        cpu_s: rest,
    });
    threads
        .iter()
        .filter(|thread| !is_vcpu(&thread.name))
        .map(|thread| ThreadCpu {
            name: thread.name.clone(),
            cpu_s: thread.cpu_s,
        })
        .chain(rest)
        .collect()
}

#[cfg(test)]
mod tests {
    use super::*;
    use clap::Parser;
    use hotlift_console::args::GuestArgs;
    use hotlift_console::migration_args::MigrationArgs;

    fn cell(flags: &[&str], options: &[(&str, &str)]) -> Cell {
        #[derive(Parser)]
        struct Line {
            #[command(flatten)]
            guest: GuestArgs,
        }
        let migration = options
            .iter()
            .fold(MigrationArgs::default(), |all, (name, value)| {
                all.with(name, value)
            });
        Cell {
            engine: crate::record::Engine::Qemu,
            kind: hotlift_vmm::GuestKind::Threads,
            guest: Line::parse_from([&"t"].into_iter().chain(flags)).guest,
            migration,
            link: None,
        }
    }

    #[test]
    fn every_option_that_names_a_row_goes_to_the_qemu_or_it_lacks_it() {
        for info in hotlift::options::OPTIONS {
            let value = match info.name {
                "zero-page-detection" => "none",
                "accel-path" => "dsa:/dev/dsa/wq0.0",
                "max-cpu-throttle" => "99",
                "accelerator" => "required",
                _ if info.default == "off" => "on",
                name => info.default.trim_end_matches(name),
            };
            let cell = cell(&["--workload=idle"], &[(info.name, value)]);
            let Ok(options) = cell.migration.options() else {
                continue;
            };
            let refused = refuse_what_is_ours(&cell).is_err();
            let capabilities = capabilities(&cell, &options).ok().unwrap();
            let parameters = parameters(&cell, &options, &|_| true).ok().unwrap();
            let given = capabilities.contains(&(info.name, true))
                || parameters.get(info.name).is_some()
                // Of a method that is not the row's.
                || info.name.ends_with("-level")
                // Of the command line.
                || info.name == "mem-prealloc";
            assert!(refused || given, "{}: {parameters}", info.name);
        }
        let bandwidth = cell(&[], &[("avail-switchover-bandwidth", "1000")]);
        let options = bandwidth.migration.options().unwrap();
        let parameters = parameters(&bandwidth, &options, &|_| true).ok().unwrap();
        assert_eq!(parameters["avail-switchover-bandwidth"], 1000, "bytes/s");
    }

    #[test]
    fn a_qemus_downtime_ends_at_the_destinations_word_unless_that_is_not_wanted() {
        let return_path = |given: &[(&str, &str)]| {
            let cell = cell(&["--workload=idle"], given);
            let options = cell.migration.options().unwrap();
            let wanted = capabilities(&cell, &options).ok().unwrap();
            let mut found = wanted.iter().filter(|(name, _)| *name == "return-path");
            let (_, on) = *found.next().expect("it is set");
            assert_eq!(found.next(), None, "set once");
            on
        };
        assert!(return_path(&[]));
        assert!(return_path(&[("return-path", "on")]));
        assert!(!return_path(&[("return-path", "off")]));
    }

    #[test]
    fn a_qemu_that_cannot_do_the_work_lacks_it() {
        let none = cell(&[], &[("zero-page-detection", "none")]);
        let options = none.migration.options().unwrap();
        assert!(parameters(&none, &options, &|_| true).is_ok());
        assert!(matches!(
            parameters(&none, &options, &|_| false),
            Err(Stop::Lacks(_))
        ));
        for (waits, lacks) in [("on", false), ("off", true)] {
            let compress = cell(&[], &[("compress", "on"), ("compress-wait-thread", waits)]);
            let options = compress.migration.options().unwrap();
            let old = parameters(&compress, &options, &|_| false);
            assert_eq!(matches!(old, Err(Stop::Lacks(_))), lacks, "{waits}");
        }
        let refused = |flags: &[&str], options: &[(&str, &str)]| {
            matches!(
                refuse_what_is_ours(&cell(flags, options)),
                Err(Stop::Lacks(_))
            )
        };
        assert!(refused(&["--workload=random", "--vcpus=2"], &[]));
        assert!(!refused(&["--workload=idle", "--vcpus=2"], &[]));
        assert!(refused(
            &[],
            &[("accelerator", "required"), ("multifd-packet-size", "1M")]
        ));
        assert!(refused(&[], &[("pause-before-switchover", "on")]));
    }

    #[test]
    fn a_guest_that_writes_is_for_qemu_4_and_later() {
        assert!(!boots_pvh("2.11.1(Debian 1:2.11+dfsg-1ubuntu7)"));
        assert!(!boots_pvh("3.1.0"));
        assert!(boots_pvh("4.0.0") && boots_pvh("10.0.2 (Debian 1:10.0.2+ds-2)"));
    }

    #[test]
    fn a_qemu_that_counts_packed_pages_whole_is_known_by_its_version() {
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

    #[test]
    fn qemus_figures_follow_our_definitions() {
        let info = json!({
            "status": "completed", "total-time": 2100, "setup-time": 100, "downtime": 30,
            "ram": { "transferred": 1_u64 << 28, "normal": 1 << 17, "duplicate": 5,
                     "dirty-sync-count": 3, "remaining": 0 },
            "compression": { "pages": 1 << 17 },
        });
        let total = Duration::from_millis(2100);
        let relayed = source_report(&info, total, Some(1 << 27));
        assert_eq!(relayed.transferred_bytes, 1 << 27);
        assert!((relayed.ratio - 8.0).abs() < 1e-9);
        let report = source_report(&info, total, None);
        assert_eq!((report.normal_pages, report.rounds), (1 << 18, 3));
        assert!((report.ratio - 4.0).abs() < 1e-9);
        assert!((report.throughput_mbps - f64::from(1 << 28) * 8.0 / 2.0 / 1e6).abs() < 1e-6);
    }

    #[test]
    fn the_threads_and_the_rest_add_up_to_the_process_without_the_vcpus() {
        let thread = |name: &str, cpu_s| ThreadCounts {
            name: name.to_owned(),
            cpu_s,
            ..ThreadCounts::default()
        };
        let threads = [thread("mig/src/main", 0.5), thread("CPU 0/KVM", 1.0)];
        let cpu = cpu_of(&threads, Duration::from_secs(2));
        let sum: f64 = cpu.iter().map(|thread| thread.cpu_s).sum();
        assert!((sum - 1.0).abs() < 1e-9, "{cpu:?}");
        assert_eq!(cpu_of(&threads, Duration::from_millis(1500)).len(), 1);
    }
}

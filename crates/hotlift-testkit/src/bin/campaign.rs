//! The fault campaign: causes random faults in real migrations, and counts the outcomes.

#![allow(
    clippy::print_stdout,
    clippy::print_stderr,
    reason = "its output is what it is for"
)]

use std::collections::BTreeSet;
use std::fs::{self, File, OpenOptions};
use std::io::Write;
use std::os::unix::process::CommandExt;
use std::path::{Path, PathBuf};
use std::process::{Command, ExitCode};
use std::sync::{Arc, Mutex, MutexGuard, PoisonError};
use std::time::{Duration, Instant, SystemTime, UNIX_EPOCH};

use clap::Parser;
use hotlift_testkit::case::{BuiltIn, Case, Kind, Pair};
use hotlift_testkit::program::Program;
use hotlift_testkit::qemu::Release;
use hotlift_testkit::rig::Tools;
use hotlift_testkit::verdict::{Record, Wrong, judge};
use hotlift_testkit::{skip, summary};

/// Maximum duration of a case's faults if the whole campaign has a time limit.
const SHORT: Duration = Duration::from_secs(7);

/// Upper limit of the case numbers in a list.
const MAX_CASES: u64 = 100_000;

/// Assumed duration of a case without the duration of its faults.
const CASE: Duration = Duration::from_secs(6);

/// Cause random faults in real migrations, and count the outcomes
///
/// It needs root, because it creates network namespaces. It uses no other network.
#[derive(Debug, Parser)]
#[command(name = "campaign")]
struct Flags {
    /// Path of the hotlift to test [default: hotlift in the folder of this program]
    #[arg(long, value_name = "PATH")]
    hotlift: Option<PathBuf>,
    /// Seed of the list of cases; the same version makes the same list [default: the number of days since 1970]
    #[arg(long, value_name = "N")]
    seed: Option<u64>,
    /// Total number of faults in all cases
    #[arg(long, value_name = "N", default_value_t = 100)]
    faults: usize,
    /// Time limit of the run in seconds; leaves out long cases, and cases that would end later
    #[arg(long, value_name = "SECONDS")]
    seconds: Option<u64>,
    /// Run only the case with this number; repeatable
    #[arg(long, value_name = "N")]
    only: Vec<u64>,
    /// Run only cases with a fault whose name in the summary contains this text; repeatable
    #[arg(long, value_name = "TEXT", conflicts_with_all = ["only", "case"])]
    kind: Vec<String>,
    /// Run the case that this JSON describes; repeatable
    #[arg(long, value_name = "JSON", conflicts_with = "only")]
    case: Vec<String>,
    /// List the cases, and run none
    #[arg(long)]
    list: bool,
    /// Number of cases to run at once
    #[arg(long, value_name = "N", default_value_t = 4)]
    jobs: usize,
    /// Append a line of JSON for each case to this file, and skip the cases that are in it already
    #[arg(long, value_name = "FILE")]
    out: Option<PathBuf>,
    /// Stage of this process: all but the first run in a PID and a mount namespace, whose init ends all processes in it
    #[arg(long, hide = true)]
    stage: Option<Stage>,
}

#[derive(Debug, Clone, Copy, clap::ValueEnum)]
enum Stage {
    Init,
    Run,
}

fn main() -> ExitCode {
    let flags = Flags::parse();
    let outcome = match flags.stage {
        _ if flags.list => list(&flags),
        None => enter(),
        Some(Stage::Init) => init(),
        Some(Stage::Run) => run(&flags),
    };
    outcome.unwrap_or_else(|problem| {
        eprintln!("campaign: {problem}");
        ExitCode::from(2)
    })
}

/// Replaces this process by one in new PID and mount namespaces. When the new process ends for any reason, the kernel
/// kills all its children.
fn enter() -> Result<ExitCode, String> {
    if !rustix::process::geteuid().is_root() {
        return Err("network namespaces need root".to_owned());
    }
    let this = std::env::current_exe().map_err(|error| error.to_string())?;
    // This process may run under 'nohup', and children would inherit its setting for SIGHUP.
    let error = Command::new("env")
        .args(["--default-signal=HUP", "unshare"])
        .args(["--mount", "--pid", "--fork", "--kill-child", "--mount-proc"])
        .arg(this)
        .args(["--stage", "init"])
        .args(std::env::args_os().skip(1))
        .exec();
    Err(format!("cannot run 'unshare': {error}"))
}

/// Runs as process 1 of the PID namespace: mounts a private file system in memory, starts the campaign, and reaps
/// orphans. Returns the campaign's exit code.
fn init() -> Result<ExitCode, String> {
    let mounted = Command::new("mount")
        .args(["-t", "tmpfs", "campaign", "/dev/shm"])
        .status();
    if !mounted.is_ok_and(|status| status.success()) {
        return Err("cannot mount a file system for the cases' files".to_owned());
    }
    let this = std::env::current_exe().map_err(|error| error.to_string())?;
    let arguments = std::env::args_os().skip(1);
    let others = arguments.skip_while(|word| word == "--stage" || word == "init");
    let child = Command::new(this)
        .args(["--stage", "run"])
        .args(others)
        .spawn()
        .map_err(|error| error.to_string())?;
    let pid = rustix::process::Pid::from_child(&child);
    loop {
        match rustix::process::wait(rustix::process::WaitOptions::empty()) {
            Ok(Some((ended, status))) if ended == pid => {
                let code = status
                    .exit_status()
                    .and_then(|code| u8::try_from(code).ok());
                return Ok(ExitCode::from(code.unwrap_or(2)));
            }
            Ok(_) | Err(rustix::io::Errno::INTR) => {}
            Err(error) => return Err(error.to_string()),
        }
    }
}

/// Returns the default seed: the number of days since 1970.
fn today() -> u64 {
    let since = SystemTime::now().duration_since(UNIX_EPOCH);
    since.unwrap_or_default().as_secs() / 86_400
}

/// Returns the cases that the flags select, in their order.
fn cases(flags: &Flags, seed: u64) -> Result<Vec<Case>, String> {
    if !flags.case.is_empty() {
        let read =
            |text: &String| serde_json::from_str(text).map_err(|error| format!("--case: {error}"));
        return flags.case.iter().map(read).collect();
    }
    if !flags.only.is_empty() {
        return Ok(flags
            .only
            .iter()
            .map(|&number| Case::draw(seed, number))
            .collect());
    }
    let limited = flags.seconds.is_some();
    let mut list = Vec::new();
    let mut faults = 0;
    for number in 0.. {
        // With a time limit, the number of faults is unlimited.
        if faults >= flags.faults && !limited || number >= MAX_CASES {
            break;
        }
        let case = Case::draw(seed, number);
        let is_asked_for = |kind: &Kind| flags.kind.iter().any(|text| kind.name().contains(text));
        if !flags.kind.is_empty() && !case.has(is_asked_for) {
            continue;
        }
        if limited && case.lasts() > SHORT {
            continue;
        }
        faults += case.faults.len();
        list.push(case);
        if limited && list.len() >= 10_000 {
            break;
        }
    }
    if list.is_empty() {
        let kinds = flags.kind.join(", ");
        return Err(format!(
            "no case has a fault of --kind {kinds}: use a name from the summary"
        ));
    }
    Ok(list)
}

fn list(flags: &Flags) -> Result<ExitCode, String> {
    for case in cases(flags, flags.seed.unwrap_or_else(today))? {
        let line = serde_json::to_string(&case).map_err(|error| error.to_string())?;
        if writeln!(std::io::stdout(), "{line}").is_err() {
            break;
        }
    }
    Ok(ExitCode::SUCCESS)
}

/// Returns key and reason of the skip if this machine cannot run the case; `None` if the case can run.
fn missing(case: &Case, kvm: Option<&String>) -> Option<(&'static str, String)> {
    let kvm = kvm.map(|why| ("kvm", why.clone()));
    let qemu = |release: Release| match release.find() {
        Some(_) => None,
        None => Some(release.skip()).map(|(key, why)| (key, why.to_owned())),
    };
    match case.pair {
        Pair::BuiltIn {
            guest: BuiltIn::Threads,
            ..
        } => None,
        Pair::BuiltIn { .. } => kvm,
        Pair::Steered { from, to, .. }
        | Pair::Relays { from, to }
        | Pair::Agents { from, to, .. } => {
            let releases: [Release; 2] = [from, to];
            kvm.or_else(|| releases.into_iter().find_map(qemu))
        }
    }
}

struct Shared {
    waiting: Mutex<std::vec::IntoIter<Case>>,
    records: Mutex<Vec<Record>>,
    out: Option<Mutex<File>>,
    total: usize,
}

fn run(flags: &Flags) -> Result<ExitCode, String> {
    let begun = Instant::now();
    let seed = flags.seed.unwrap_or_else(today);
    let this = std::env::current_exe().map_err(|error| error.to_string())?;
    let hotlift = flags
        .hotlift
        .clone()
        .unwrap_or_else(|| this.with_file_name("hotlift"));
    let hotlift =
        fs::canonicalize(&hotlift).map_err(|error| format!("{}: {error}", hotlift.display()))?;
    let guest = Program::new(64 << 20, 32 << 20, 20).map_err(|error| error.to_string())?;
    let tools = Tools {
        hotlift,
        guest: Arc::new(guest),
        files: PathBuf::from("/dev/shm"),
    };
    let (out, known) = match &flags.out {
        Some(path) => {
            let known = known(path, seed)?;
            let is_drawn = |record: &Record| record.case == Case::draw(seed, record.case.number);
            if flags.case.is_empty() && !known.iter().all(is_drawn) {
                return Err(format!(
                    "{} has cases that another version has drawn: give another file",
                    path.display()
                ));
            }
            let opened = OpenOptions::new().append(true).create(true).open(path);
            let file = opened.map_err(|error| format!("{}: {error}", path.display()))?;
            (Some(Mutex::new(file)), known)
        }
        None => (None, Vec::new()),
    };
    let done: BTreeSet<u64> = known.iter().map(|record| record.case.number).collect();
    let kvm = hotlift_vmm::kvm::usable()
        .err()
        .map(|error| error.to_string());
    let mut list = cases(flags, seed)?;
    list.retain(|case| !done.contains(&case.number));
    let mut left_out = Vec::new();
    list.retain(|case| {
        let why = missing(case, kvm.as_ref());
        left_out.extend(why.clone());
        why.is_none()
    });
    left_out.sort_unstable();
    left_out.dedup();
    println!(
        "campaign: seed {seed}, {} cases are there already",
        done.len()
    );
    for (key, why) in left_out {
        skip!(key, "cases of the campaign are left out: {why}");
    }
    let shared = Shared {
        total: list.len(),
        waiting: Mutex::new(list.into_iter()),
        records: Mutex::new(known),
        out,
    };
    let end = flags
        .seconds
        .map(|seconds| begun + Duration::from_secs(seconds));
    let jobs = flags.jobs.clamp(1, 256);
    std::thread::scope(|scope| {
        for _ in 0..jobs {
            scope.spawn(|| work(&shared, &tools, seed, end));
        }
    });
    let mut records = shared
        .records
        .into_inner()
        .unwrap_or_else(PoisonError::into_inner);
    records.sort_by_key(|record| record.case.number);
    println!(
        "\ncampaign: seed {seed}, {:.0} s",
        begun.elapsed().as_secs_f64()
    );
    println!("{}", summary::tables(&records));
    Ok(match summary::is_clean(&records) {
        true => ExitCode::SUCCESS,
        false => ExitCode::FAILURE,
    })
}

/// Runs cases until none remains or the time `end` is reached.
fn work(shared: &Shared, tools: &Tools, seed: u64, end: Option<Instant>) {
    loop {
        let Some(case) = lock(&shared.waiting).next() else {
            return;
        };
        if end.is_some_and(|end| Instant::now() + CASE + case.lasts() > end) {
            return;
        }
        let mut record = judge(tools, seed, &case);
        if record.problems.iter().any(|one| one.wrong == Wrong::SetUp) {
            // A failed setup proves nothing, for example if a QEMU starts slowly on a busy host. The case is run again.
            record = judge(tools, seed, &case);
        }
        let line = serde_json::to_string(&record).unwrap_or_default();
        if let Some(out) = &shared.out
            && let Err(error) = writeln!(lock(out), "{line}")
        {
            eprintln!("campaign: the list cannot be written: {error}");
        }
        let kinds: Vec<_> = case.faults.iter().map(|fault| fault.kind.name()).collect();
        println!(
            "{:>6} of {}: {:>5.1} s  {}: {}",
            case.number,
            shared.total,
            record.seconds,
            case.pair.name(),
            kinds.join(", ")
        );
        for problem in &record.problems {
            println!("        {:?}: {}", problem.wrong, problem.what);
        }
        for words in &record.words {
            println!("        | {words}");
        }
        lock(&shared.records).push(record);
    }
}

/// Returns the records of an earlier run with this `seed` from the file `path`.
fn known(path: &Path, seed: u64) -> Result<Vec<Record>, String> {
    let Ok(text) = fs::read_to_string(path) else {
        return Ok(Vec::new());
    };
    let mut records = Vec::new();
    for (line, number) in text.lines().zip(1..) {
        let record: Record = serde_json::from_str(line)
            .map_err(|error| format!("{}, line {number}: {error}", path.display()))?;
        if record.campaign != seed {
            return Err(format!(
                "{} is of a campaign with seed {}: give that, or another file",
                path.display(),
                record.campaign
            ));
        }
        records.push(record);
    }
    Ok(records)
}

fn lock<T>(mutex: &Mutex<T>) -> MutexGuard<'_, T> {
    mutex.lock().unwrap_or_else(PoisonError::into_inner)
}

//! `hotlift advise`: which method for this memory on this host over this link, and what the migration will take.
//!
//! | file | subject |
//! |---|---|
//! | `memory` | memory of a process, an image, a folder |
//! | `qemu` | the process behind a QMP socket, its dirty rate |
//! | `sample` | pages drawn at random |
//! | `measure` | the methods, zero pages, memory and sockets on this host |
//! | `bandwidth` | a link's rate as it is typed |
//! | `model` | the arithmetic of a migration |
//! | `rules` | published advice on accelerators |
//! | `choose` | the best candidate for a goal |
//! | `text` | all of it for people |

mod bandwidth;
mod choose;
pub mod error;
mod measure;
mod memory;
mod model;
mod qemu;
mod rules;
mod sample;
mod text;

use std::path::PathBuf;

use clap::Args;
use hotlift::options::parse_size;
use hotlift_mem::PAGE_SIZE;
use hotlift_qmp::QmpAddress;
use serde::Serialize;

use crate::accel;
use crate::error::CommandError;
use crate::output_args::OutputArgs;
pub use bandwidth::parse as parse_rate;
use choose::{Choice, Goal, Question};
use measure::Measured;
use memory::{Folder, Image, Process};
use model::{Load, Machine};
pub use rules::Devices;
use rules::Rule;
use sample::{Memory, Sample};

/// Flags of `hotlift advise`.
#[derive(Debug, Args)]
pub struct AdviseArgs {
    #[command(flatten)]
    origin: Origin,
    /// Bytes to sample at most, with suffix K, M, G or T
    #[arg(long, value_name = "SIZE", default_value = "64M", value_parser = size)]
    sample: u64,
    /// What the migration is to be
    #[arg(long, value_enum, default_value = "fastest")]
    goal: Goal,
    /// The link to the other host: 10gbit, 500mbit, or bytes/s as in 1G [default: none, both ends on this host]
    #[arg(long, value_name = "RATE", value_parser = bandwidth::parse)]
    bandwidth: Option<f64>,
    /// Both ends are on this host and share its cores, though the bandwidth is limited
    #[arg(long)]
    same_host: bool,
    /// Cores that each host can spare, as in 2.5 [default: what was free here while measuring]
    #[arg(long, value_name = "N", value_parser = cores)]
    cores: Option<f64>,
    /// Channels at most, 1 to 255 [default: the cores of this host]
    #[arg(long, value_name = "N", value_parser = clap::value_parser!(u8).range(1..))]
    channels: Option<u8>,
    /// Pages that the guest dirties in a second [default: with --qmp QEMU is asked, else 0]
    #[arg(long, value_name = "PAGES/S")]
    dirty_rate: Option<u64>,
    /// Bytes that the guest writes to at all [default: all of its RAM]
    #[arg(long, value_name = "SIZE", value_parser = size)]
    working_set: Option<u64>,
    /// Bytes of RAM, if not those of what is sampled
    #[arg(long, value_name = "SIZE", value_parser = size)]
    ram: Option<u64>,
    /// How long the guest may stand still, in ms; goal shortest-downtime looks for less
    #[arg(long, value_name = "MS", default_value_t = 300)]
    downtime_limit: u32,
    /// The other side is a QEMU, not a Hotlift: only what QEMU knows
    #[arg(long)]
    to_qemu: bool,
    /// Measure the CPU only
    #[arg(long)]
    no_accelerators: bool,
    /// Start of all random numbers
    #[arg(long, value_name = "N", default_value_t = 1)]
    seed: u64,
    #[command(flatten)]
    output: OutputArgs,
}

/// Where the memory is.
#[derive(Debug, Args)]
#[group(required = true, multiple = false)]
struct Origin {
    /// Sample a process, such as a QEMU: its largest mappings are taken for RAM
    #[arg(long, value_name = "PID")]
    pid: Option<u32>,
    /// Sample the QEMU behind this QMP socket, and ask it for its dirty rate: PATH or unix:PATH
    #[arg(long, value_name = "ADDRESS")]
    qmp: Option<QmpAddress>,
    /// Sample a memory image, or the files of a folder as they would fill RAM (.zst files are unpacked)
    #[arg(long, value_name = "PATH")]
    file: Option<PathBuf>,
}

fn size(text: &str) -> Result<u64, String> {
    match parse_size(text) {
        Some(bytes) if bytes >= PAGE_SIZE as u64 => Ok(bytes),
        _ => Err(format!(
            "expected {PAGE_SIZE} bytes or more, with an optional suffix K, M, G or T"
        )),
    }
}

fn cores(text: &str) -> Result<f64, String> {
    match text.parse::<f64>() {
        Ok(cores) if (0.05..=4096.0).contains(&cores) => Ok(cores),
        _ => Err("expected a number of cores between 0.05 and 4096".to_owned()),
    }
}

/// The advice. Times in seconds, costs in seconds of a core for a GiB of pages with content.
#[derive(Debug, Serialize)]
struct Advice {
    goal: Goal,
    sample: Sample,
    load: Load,
    measured: Measured,
    /// What was predicted with. A link without limit has no bandwidth.
    machine: Machine,
    devices: Devices,
    rules: Vec<Rule>,
    /// As the option is typed.
    zero_page_detection: &'static str,
    /// Best first; the first is recommended.
    candidates: Vec<Choice>,
    /// Why.
    reasons: Vec<String>,
    /// For 'hotlift migrate'.
    command: String,
    /// What of that command is not in the figures.
    beyond: &'static str,
    /// For QEMU's own migration, with the best method that QEMU knows; `null` if there is none.
    qmp: serde_json::Value,
}

/// Runs the command.
pub fn run(args: &AdviseArgs) -> Result<(), CommandError> {
    let (memory, pid_of_qemu) = open(args)?;
    let mut sample = Sample::draw(memory.as_ref(), args.sample, args.seed)?;
    sample.ram_bytes = args.ram.unwrap_or(sample.ram_bytes);
    let dirty_rate = match (args.dirty_rate, &args.origin.qmp) {
        (Some(rate), _) => Some(rate as f64),
        (None, Some(address)) if pid_of_qemu => qemu::dirty_rate(address)?,
        (None, _) => None,
    };
    let measured = measure::measure(&sample, !args.no_accelerators)?;
    let advice = advise(args, sample, measured, dirty_rate)?;
    args.output.print(&advice, || text::text(&advice))
}

/// The memory, and whether a QEMU says how fast it is dirtied.
fn open(args: &AdviseArgs) -> Result<(Box<dyn Memory>, bool), CommandError> {
    let origin = &args.origin;
    Ok(match (origin.pid, &origin.qmp, &origin.file) {
        (Some(pid), ..) => (Box::new(Process::open(pid)?), false),
        (_, Some(address), _) => (Box::new(Process::open(qemu::process(address)?)?), true),
        (_, _, Some(path)) if path.is_dir() => {
            (Box::new(Folder::read(path, args.sample, args.seed)?), false)
        }
        (_, _, path) => {
            let path = path.clone().unwrap_or_default();
            (Box::new(Image::open(&path)?), false)
        }
    })
}

fn advise(
    args: &AdviseArgs,
    sample: Sample,
    measured: Measured,
    dirty_rate: Option<f64>,
) -> Result<Advice, CommandError> {
    let page = PAGE_SIZE as f64;
    let pages = sample.ram_bytes as f64 / page;
    let load = Load {
        pages,
        untouched_share: sample.share(sample.untouched),
        zero_share: sample.share(sample.zero),
        dirty_rate: dirty_rate.unwrap_or(0.0),
        working_set: args.working_set.map_or(pages, |bytes| bytes as f64 / page),
    };
    let machine = Machine {
        cores: args.cores.unwrap_or(measured.cores_free),
        same_host: args.same_host || args.bandwidth.is_none(),
        zero_scan: measured.zero_scan,
        send: measured.send,
        receive: measured.receive,
        first_touch: measured.first_touch,
        bandwidth: args.bandwidth.unwrap_or(f64::INFINITY),
    };
    let question = Question {
        goal: args.goal,
        most_channels: args
            .channels
            .unwrap_or(u8::try_from(measured.cores).unwrap_or(u8::MAX)),
        downtime_limit: f64::from(args.downtime_limit) / 1e3,
        to_qemu: args.to_qemu,
    };
    let devices = accel::devices()?;
    // A core sends this many bytes a second uncompressed: below that the wire is what is waited for.
    let limited = machine.bandwidth * machine.send < f64::from(question.most_channels);
    let zeros = load.zero_share + load.untouched_share;
    let rules = rules::rules(&devices, limited, zeros);
    let candidates = choose::choose(&question, &measured, &load, &machine, &devices, &rules);
    let zero_page_detection = match rules.last() {
        Some(rule) if rule.applies && !args.to_qemu => "dsa-accel",
        _ => "multifd",
    };
    let mut advice = Advice {
        goal: args.goal,
        sample,
        load,
        measured,
        machine,
        devices,
        rules,
        zero_page_detection,
        candidates,
        reasons: Vec::new(),
        command: String::new(),
        beyond: text::BEYOND,
        qmp: serde_json::Value::Null,
    };
    advice.reasons = text::reasons(&advice, dirty_rate.is_some());
    advice.command = text::command(&advice, &args.origin);
    advice.qmp = text::qmp(&advice);
    Ok(advice)
}

//! `hotlift advise`: which method for this memory on this host over this link, and what the migration will take.
//!
//! | file | subject |
//! |---|---|
//! | `qemu` | the process behind a QMP socket, its dirty rate |
//! | `model` | the arithmetic of a migration |
//! | `rules` | published advice on accelerators |
//! | `zero_pages` | who looks for zero pages |
//! | `choose` | the best candidate for a goal |
//! | `text` | all of it for people |
//! | `steps` | what is being measured |

mod choose;
pub mod error;
mod model;
mod qemu;
mod rules;
mod steps;
mod text;
mod zero_pages;

use std::path::PathBuf;

use clap::Args;
use hotlift::Address;
use hotlift::options::parse_size;
use hotlift_console::output_args::OutputArgs;
use hotlift_host::accel::{self, Devices};
use hotlift_host::bandwidth;
use hotlift_host::measure::{self, Measured};
use hotlift_host::memory::{self, Folder, Image, Process};
use hotlift_host::sample::{Memory, Sample};
use hotlift_host::survey::{self, Far};
use hotlift_mem::PAGE_SIZE;
use hotlift_qmp::{QmpAddress, Version};
use serde::Serialize;

use crate::error::CommandError;
use choose::{Choice, Goal, Question};
use error::AdviseError;
use model::{Load, Machine};
use qemu::Asked;
use rules::Rule;
use steps::Steps;
use zero_pages::Detection;

/// Flags of `hotlift advise`.
#[derive(Debug, Args)]
pub struct AdviseArgs {
    #[command(flatten)]
    origin: Origin,
    /// Bytes that the methods are measured on at most, with suffix K, M, G or T; four times as many are looked at for
    /// zero pages
    #[arg(long, value_name = "SIZE", default_value = "64M", value_parser = size)]
    sample: u64,
    /// What the migration is to be
    #[arg(long, value_enum, default_value = "fastest")]
    goal: Goal,
    /// Measure the other host and the link to it, where 'hotlift serve' or 'hotlift bench --serve' waits: tcp:HOST:PORT
    #[arg(long, value_name = "URI")]
    to: Option<Address>,
    /// The link to the other host: 10gbit, 500mbit, or bytes/s as in 1G [default: as --to measures it; else none, both
    /// ends on this host]
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
    /// Bytes of RAM, if not those of what is sampled; a folder needs it
    #[arg(long, value_name = "SIZE", value_parser = size)]
    ram: Option<u64>,
    /// How long the guest may stand still, in ms; goal shortest-downtime looks for less
    #[arg(long, value_name = "MS", default_value_t = 300)]
    downtime_limit: u32,
    /// The other side is a QEMU, not a Hotlift, of this version if it is given: only what that QEMU knows
    #[arg(long, value_name = "VERSION", num_args = 0..=1, require_equals = true,
          default_missing_value = "10.0", value_parser = version)]
    to_qemu: Option<Version>,
    /// The destination's memory is allocated before: mem-prealloc=on, -mem-prealloc of a QEMU
    #[arg(long)]
    mem_prealloc: bool,
    /// The guest is a QEMU's, and passes a relay at each host [default: with --qmp, and with --pid of a QEMU]
    #[arg(long)]
    relays: bool,
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

/// A QEMU's version, as in 7.2.
fn version(text: &str) -> Result<Version, String> {
    let parts = text.split_once('.').unwrap_or((text, "0"));
    match (parts.0.parse(), parts.1.parse()) {
        (Ok(major), Ok(minor)) => Ok(Version {
            major,
            minor,
            micro: 0,
        }),
        _ => Err("expected a version as in 7.2".to_owned()),
    }
}

/// The QEMU that is told what to do if none was asked for its version.
const USUAL: Version = Version {
    major: 10,
    minor: 0,
    micro: 0,
};

/// What the memory belongs to.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
enum Owner {
    /// A built-in guest, which migrates by itself.
    Hotlift,
    /// A QEMU; its version, if it was asked.
    Qemu(Option<Version>),
    /// Something that is to be a guest's, of whichever kind.
    Unknown,
}

/// The advice. Times in seconds, costs in seconds of a core for a GiB of pages with content.
#[derive(Debug, Serialize)]
struct Advice {
    goal: Goal,
    sample: Sample,
    load: Load,
    measured: Measured,
    /// The other host; `null` if none was asked.
    other: Option<Far>,
    /// What was predicted with. A link without limit has no bandwidth.
    machine: Machine,
    devices: Devices,
    rules: Vec<Rule>,
    zero_pages: Detection,
    /// Best first; the first is recommended.
    candidates: Vec<Choice>,
    /// Why.
    reasons: Vec<String>,
    /// For a QEMU between two hosts with relays; `null` where it does not apply.
    command: Option<String>,
    /// What of that command is not in the figures.
    beyond: Option<&'static str>,
    /// For the own migration of a QEMU, or of a built-in guest, with the best method that it knows; `null` if there is none.
    qmp: serde_json::Value,
    #[serde(skip)]
    owner: Owner,
    /// The older of the QEMUs at both ends, as far as they are known.
    #[serde(skip)]
    qemu: Version,
}

/// Runs the command.
pub fn run(args: &AdviseArgs) -> Result<(), CommandError> {
    let steps = Steps::new(args.output.quiet);
    let asked = match &args.origin.qmp {
        Some(address) => {
            steps.show("asking for the version, and for the dirty rate: 1 s");
            // Whose socket it is comes first: nothing is said to something else.
            let pid = qemu::process(address)?;
            Some((pid, qemu::ask(address, args.dirty_rate.is_none())?))
        }
        None => None,
    };
    steps.show("sampling memory");
    let (memory, owner) = open(args, asked.as_ref())?;
    let mut sample = Sample::draw(memory.as_ref(), args.sample, args.seed)?;
    sample.ram_bytes = args.ram.unwrap_or(sample.ram_bytes);
    let dirty_rate = asked.and_then(|(_, asked)| asked.dirty_rate);
    let dirty_rate = args.dirty_rate.map(|rate| rate as f64).or(dirty_rate);
    // The other host first: on the same one, memory that this process has had would come back warm.
    let other = match &args.to {
        Some(to) => {
            steps.show("measuring the link to the other host, and that host: some 5 s");
            Some(survey::ask(
                to,
                &sample,
                args.most_channels(measure::cores()),
            )?)
        }
        None => None,
    };
    steps.show("measuring every method on the sample: 10 s at most, and what a turn takes");
    let measured = measure::measure(&sample, !args.no_accelerators)?;
    drop(steps);
    let advice = advise(args, owner, sample, measured, other, dirty_rate)?;
    Ok(args.output.print(&advice, || text::text(&advice))?)
}

/// The memory, and whose it is. `asked` is what the process behind a QMP socket has said.
fn open(
    args: &AdviseArgs,
    asked: Option<&(u32, Asked)>,
) -> Result<(Box<dyn Memory>, Owner), CommandError> {
    let origin = &args.origin;
    let pid = asked.map(|(pid, _)| *pid).or(origin.pid);
    if let Some(pid) = pid {
        let owner = match memory::name_of(pid) {
            Some(name) if name.contains("hotlift") => Owner::Hotlift,
            Some(name) if name.contains("qemu") || name.contains("kvm") => {
                Owner::Qemu(asked.map(|(_, asked)| asked.version))
            }
            _ => Owner::Unknown,
        };
        let ram_bytes = asked.and_then(|(_, asked)| asked.ram_bytes);
        return Ok((Box::new(Process::open(pid, ram_bytes)?), owner));
    }
    let path = origin.file.clone().unwrap_or_default();
    Ok(match path.is_dir() {
        true if args.ram.is_none() => return Err(AdviseError::NoRam.into()),
        true => (
            Box::new(Folder::read(&path, args.sample, args.seed)?),
            Owner::Unknown,
        ),
        false => (Box::new(Image::open(&path)?), Owner::Unknown),
    })
}

impl AdviseArgs {
    /// Channels at most.
    fn most_channels(&self, cores: usize) -> u8 {
        let cores = u8::try_from(cores).unwrap_or(u8::MAX);
        self.channels.unwrap_or(cores)
    }

    /// What is predicted with.
    fn machine(&self, owner: Owner, measured: &Measured, other: Option<&Far>) -> Machine {
        let loopback = &measured.loopback;
        let (send, receive) = other
            .filter(|far| !far.over_loopback)
            .and_then(|far| far.cpu_a_gib)
            .unwrap_or((loopback.send, loopback.receive));
        let link = other.map(|far| match far.over_loopback {
            true => f64::INFINITY,
            false => far.bandwidth,
        });
        let relays = self.relays || (matches!(owner, Owner::Qemu(_)) && self.to_qemu.is_none());
        let source_cores = self.cores.unwrap_or(measured.cores_free);
        let (destination_cores, all_cores) = match other {
            Some(far) => (self.cores.unwrap_or(far.host.cores_free), far.host.cores),
            None => (source_cores, measured.cores),
        };
        // Cores that are given are not shared: they are what is spared.
        let share = |cores: f64, all: usize| match self.cores {
            Some(_) => 1.0,
            None => (cores / all.max(1) as f64).min(1.0),
        };
        Machine {
            source_cores,
            destination_cores,
            source_share: share(source_cores, measured.cores),
            destination_share: share(destination_cores, all_cores),
            same_host: self.same_host
                || other.map_or(self.bandwidth.is_none(), |far| far.same_host),
            zero_scan: measured.zero_scan,
            look: measured.look,
            send,
            receive,
            first_touch: match (self.mem_prealloc, other) {
                (true, _) => 0.0,
                (false, Some(far)) => far.host.first_touch,
                (false, None) => loopback.first_touch,
            },
            bandwidth: self.bandwidth.or(link).unwrap_or(f64::INFINITY),
            round_trip: other.map_or(0.0, |far| far.round_trip),
            relays: relays.then_some(loopback.relays),
        }
    }
}

fn advise(
    args: &AdviseArgs,
    owner: Owner,
    sample: Sample,
    mut measured: Measured,
    other: Option<Far>,
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
    let machine = args.machine(owner, &measured, other.as_ref());
    if let Some(far) = &other {
        measured.decoded_by(&far.host);
    }
    let devices = accel::devices()?;
    let question = Question {
        goal: args.goal,
        most_channels: args.most_channels(measured.cores),
        downtime_limit: f64::from(args.downtime_limit) / 1e3,
        to_qemu: args.to_qemu,
    };
    // A core sends this many bytes a second uncompressed: below that the wire is what is waited for.
    let limited = machine.bandwidth * machine.send < f64::from(question.most_channels);
    let zeros = load.zero_share + load.untouched_share;
    // A relay's pages come out of a socket, and a QEMU knows no DSA.
    let own_guest = machine.relays.is_none() && args.to_qemu.is_none();
    let looked_at = Devices {
        dsa: devices.dsa && own_guest,
        ..devices
    };
    let rules = rules::rules(&looked_at, limited, zeros);
    // The versions that it goes by: of the QEMU that sends, and of one that receives.
    let source = match owner {
        Owner::Qemu(version) => version,
        Owner::Hotlift | Owner::Unknown => None,
    };
    let old = [source, args.to_qemu].into_iter().flatten().min();
    let finders = zero_pages::finders(old, &rules);
    let all = |zero_pages| {
        choose::choose(
            &question, &measured, &load, &machine, &devices, &rules, zero_pages,
        )
    };
    let mut candidates = all(finders.detect);
    let zero_pages = zero_pages::decide(&finders, &candidates, args.goal, &load, &machine);
    if zero_pages.mode != finders.detect {
        candidates = all(zero_pages.mode);
    }
    let mut advice = Advice {
        goal: args.goal,
        sample,
        load,
        measured,
        other,
        machine,
        devices,
        rules,
        zero_pages,
        candidates,
        reasons: Vec::new(),
        command: None,
        beyond: None,
        qmp: serde_json::Value::Null,
        owner,
        qemu: old.unwrap_or(USUAL),
    };
    advice.reasons = text::reasons(&advice, dirty_rate.is_some());
    if owner != Owner::Hotlift && args.to_qemu.is_none() {
        advice.command = text::command(&advice, args);
        advice.beyond = machine.relays.is_none().then_some(text::BEYOND);
    }
    advice.qmp = text::qmp(&advice);
    Ok(advice)
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn a_version_is_two_numbers() {
        let of = |text| version(text).map(|version| (version.major, version.minor));
        assert_eq!(of("7.2"), Ok((7, 2)));
        assert_eq!(of("10"), Ok((10, 0)));
        for bad in ["", "x", "7.2.1", "-1.0"] {
            assert!(of(bad).is_err(), "{bad}");
        }
    }
}

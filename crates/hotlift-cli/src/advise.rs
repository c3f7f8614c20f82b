//! `hotlift advise`: which method for this memory on this host over this link, and what the migration will take.

use std::cell::Cell;
use std::io::IsTerminal;
use std::path::PathBuf;

use clap::Args;
use hotlift::Address;
use hotlift::options::parse_size;
use hotlift_advise::{Goal, Origin, Request};
use hotlift_console::error::ConsoleError;
use hotlift_console::output;
use hotlift_console::output_args::OutputArgs;
use hotlift_console::progress;
use hotlift_console::security::SecurityArgs;
use hotlift_host::bandwidth;
use hotlift_mem::PAGE_SIZE;
use hotlift_qmp::{QmpAddress, Version};

use crate::error::CommandError;

/// Flags of `advise`.
#[derive(Debug, Args)]
pub struct AdviseArgs {
    #[command(flatten)]
    origin: OriginArgs,
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
    security: SecurityArgs,
    #[command(flatten)]
    output: OutputArgs,
}

/// Where the memory is.
#[derive(Debug, Args)]
#[group(required = true, multiple = false)]
struct OriginArgs {
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

impl AdviseArgs {
    fn request(&self) -> Result<Request, ConsoleError> {
        let origin = match &self.origin {
            OriginArgs { pid: Some(pid), .. } => Origin::Process(*pid),
            OriginArgs { qmp: Some(qmp), .. } => Origin::Qmp(qmp.clone()),
            // One of the three is given.
            OriginArgs { file, .. } => Origin::File(file.clone().unwrap_or_default()),
        };
        Ok(Request {
            origin,
            sample_bytes: self.sample,
            goal: self.goal,
            tls: match &self.to {
                Some(to) => self.security.tls(to)?,
                None => None,
            },
            security: self.security.given_to_others(),
            to: self.to.clone(),
            bandwidth: self.bandwidth,
            same_host: self.same_host,
            cores: self.cores,
            channels: self.channels,
            dirty_rate: self.dirty_rate,
            working_set_bytes: self.working_set,
            ram_bytes: self.ram,
            downtime_limit_ms: self.downtime_limit,
            to_qemu: self.to_qemu,
            mem_prealloc: self.mem_prealloc,
            relays: self.relays,
            accelerators: !self.no_accelerators,
            seed: self.seed,
        })
    }
}

/// Runs the command.
pub fn run(args: &AdviseArgs) -> Result<(), CommandError> {
    let steps = Steps::new(args.output.quiet);
    let advice = hotlift_advise::advise(&args.request()?, &|step| steps.show(step))?;
    drop(steps);
    Ok(args.output.print(&advice, || advice.text())?)
}

/// What is being measured, on a terminal: one line of standard error that is rewritten, and goes away with its owner.
/// Elsewhere nothing.
#[derive(Debug)]
struct Steps {
    wanted: bool,
    shown: Cell<bool>,
}

impl Steps {
    /// Nothing is shown if it is to be `quiet`, or nobody watches.
    fn new(quiet: bool) -> Self {
        Self {
            wanted: !quiet && std::io::stderr().is_terminal(),
            shown: Cell::new(false),
        }
    }

    /// Shows what is done now.
    fn show(&self, what: &str) {
        if self.wanted {
            self.shown.set(true);
            output::progress(&progress::rewritten(what));
        }
    }
}

impl Drop for Steps {
    fn drop(&mut self) {
        if self.shown.get() {
            output::progress("\r\x1b[K");
        }
    }
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

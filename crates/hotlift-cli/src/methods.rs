//! `hotlift methods`: lists the compression methods, and measures them on the operator's memory.

mod folder;

use std::io::IsTerminal;
use std::path::{Path, PathBuf};

use clap::Args;
use hotlift::options::parse_size;
use hotlift_host::error::HostError;
use hotlift_host::measure::{Cost, Measured, measure, threads};
use hotlift_host::memory::{Image, Process};
use hotlift_host::qemu;
use hotlift_host::sample::{Memory, Sample};
use hotlift_mem::PAGE_SIZE;
use hotlift_methods::{METHODS, MethodInfo, Unit};
use hotlift_qmp::QmpAddress;
use hotlift_terminal::output;
use hotlift_terminal::progress::{self, bytes};
use hotlift_terminal::table::{align, new_table};
use hotlift_terminal::width;
use serde::Serialize;

use crate::error::CommandError;
use crate::methods::folder::Folder;
use crate::output_args::OutputArgs;

/// Flags of `methods`.
#[derive(Debug, Args)]
pub struct MethodsArgs {
    #[command(flatten)]
    memory: MemoryArgs,
    /// Limit of the measured pages with content, in bytes, with suffix K, M, G or T
    #[arg(long, value_name = "SIZE", default_value = "64M", value_parser = size, requires = "MemoryArgs")]
    sample: u64,
    /// Measure the methods on the CPU only, without accelerators
    #[arg(long, requires = "MemoryArgs")]
    no_accelerators: bool,
    /// Seed of the random choice of pages
    #[arg(long, value_name = "N", default_value_t = 1, requires = "MemoryArgs")]
    seed: u64,
    #[command(flatten)]
    output: OutputArgs,
}

/// The memory to measure with.
#[derive(Debug, Args)]
#[group(multiple = false)]
struct MemoryArgs {
    /// Measure on a memory image or on the files of a folder (.zst files are decompressed)
    #[arg(long, value_name = "PATH")]
    measure: Option<PathBuf>,
    /// Measure on the memory of the process with this id, such as a QEMU; the largest mappings count as RAM
    #[arg(long, value_name = "PID")]
    pid: Option<u32>,
    /// Measure on the memory of the QEMU behind this QMP socket: PATH or unix:PATH
    #[arg(long, value_name = "ADDRESS")]
    qmp: Option<QmpAddress>,
}

fn size(text: &str) -> Result<u64, String> {
    match parse_size(text) {
        Some(bytes) if bytes >= PAGE_SIZE as u64 => Ok(bytes),
        _ => Err(format!(
            "expected {PAGE_SIZE} bytes or more, with an optional suffix K, M, G or T"
        )),
    }
}

/// Runs `hotlift methods`.
pub fn run(args: &MethodsArgs) -> Result<(), CommandError> {
    let output = &args.output;
    let is_watched = !output.quiet && std::io::stderr().is_terminal();
    let result = measured(args, &|step| {
        if is_watched {
            output::progress(&progress::rewritten(step));
        }
    });
    if is_watched {
        progress::clear();
    }
    match result? {
        Some(result) => output.print(&result, || result.text())?,
        None => output.print(&list(), table)?,
    }
    Ok(())
}

/// Sample of memory, and the results of all methods with it.
#[derive(Debug, Serialize)]
struct OnMemory {
    sample: Sample,
    threads: usize,
    methods: Vec<Measured>,
}

/// Measures all methods on the memory that `args` choose; `None` if they choose no memory. `step` is called with a description
/// of each step.
fn measured(args: &MethodsArgs, step: &dyn Fn(&str)) -> Result<Option<OnMemory>, HostError> {
    let draw = |memory: &dyn Memory| {
        step("sampling memory");
        Sample::draw(memory, args.sample, args.seed)
    };
    let sample = match &args.memory {
        MemoryArgs {
            measure: Some(path),
            ..
        } => draw(&*of_path(path, args)?)?,
        MemoryArgs { pid: Some(pid), .. } => draw(&Process::open(*pid, None)?)?,
        MemoryArgs { qmp: Some(qmp), .. } => draw(&qemu::memory(qmp)?)?,
        _ => return Ok(None),
    };
    step("measuring every method on the sample: about 10 s at most");
    Ok(Some(OnMemory {
        methods: measure(&sample, !args.no_accelerators)?,
        threads: threads(&sample),
        sample,
    }))
}

/// Opens the image at `path`, or reads the files if `path` is a folder.
fn of_path(path: &Path, args: &MethodsArgs) -> Result<Box<dyn Memory>, HostError> {
    Ok(match path.is_dir() {
        true => Box::new(Folder::read(path, args.sample, args.seed)?),
        false => Box::new(Image::open(path)?),
    })
}

impl OnMemory {
    fn text(&self) -> String {
        let sample = &self.sample;
        let percent = |pages| 100.0 * sample.share(pages);
        let memory = format!(
            "{}: {} sampled, {:.0} % never touched, {:.0} % zero",
            sample.memory,
            bytes((sample.pages * PAGE_SIZE) as u64),
            percent(sample.untouched),
            percent(sample.zero),
        );
        if self.methods.is_empty() {
            return format!("{memory}\nno page has content: there is nothing to compress");
        }
        let mut table = new_table(&[
            "method",
            "level",
            "ratio",
            "compress\nMB/s",
            "core-s\n/GiB",
            "decompress\nMB/s",
            "core-s\n/GiB",
        ]);
        for method in &self.methods {
            let of = |cost: Cost| {
                let Cost {
                    mb_per_s,
                    core_s_per_gib,
                } = cost;
                [format!("{mb_per_s:.0}"), format!("{core_s_per_gib:.2}")]
            };
            let [compress, its_cpu] = of(method.compress);
            let [decompress, cpu] = of(method.decompress);
            table.add_row([
                method.method.to_owned(),
                method
                    .level
                    .map_or("-".to_owned(), |level| level.to_string()),
                format!("{:.2}", method.ratio),
                compress,
                its_cpu,
                decompress,
                cpu,
            ]);
        }
        align(&mut table);
        let mut text = format!(
            "{memory}\nby pages with content; MB/s of one thread, with {} at work\n{table}",
            self.threads
        );
        let mut last = "";
        for method in &self.methods {
            if method.method != last {
                last = method.method;
                text.push_str(&format!("\n{last:8}{}", method.done_by));
            }
        }
        text
    }
}

/// A method in the output of `--json`.
#[derive(Debug, Serialize)]
struct Listed {
    method: &'static str,
    unit: &'static str,
    /// Lowest and highest compression level; `null` if the method has no levels.
    levels: Option<[u8; 2]>,
    default_level: Option<u8>,
    /// Accelerator that can run the method; `null` if there is none.
    hardware: Option<&'static str>,
    library: String,
    interoperates_with: &'static str,
    summary: &'static str,
}

impl From<&MethodInfo> for Listed {
    fn from(method: &MethodInfo) -> Self {
        let levels = method.levels.as_ref();
        Self {
            method: method.name,
            unit: match (method.stateful, method.unit) {
                (true, _) => "channel",
                (false, Unit::Packet) => "packet",
                (false, Unit::Page) => "page",
            },
            levels: levels.map(|levels| [*levels.start(), *levels.end()]),
            default_level: levels.map(|_| method.default_level),
            hardware: method.hardware,
            library: (method.library)(),
            interoperates_with: method.interoperates_with,
            summary: method.summary,
        }
    }
}

fn list() -> Vec<Listed> {
    METHODS.iter().map(Listed::from).collect()
}

/// Returns the table of all methods, one line for each.
fn table() -> String {
    let mut table = new_table(&[
        "method",
        "unit",
        "levels",
        "hardware",
        "software here",
        "at the peer",
    ]);
    width::wrap_all(&mut table);
    let list = list();
    for method in &list {
        let levels = method.levels.zip(method.default_level);
        table.add_row([
            method.method.to_owned(),
            method.unit.to_owned(),
            levels.map_or("-".to_owned(), |([least, most], usual)| {
                format!("{least}-{most} ({usual})")
            }),
            method.hardware.unwrap_or("-").to_owned(),
            method.library.clone(),
            method.interoperates_with.to_owned(),
        ]);
    }
    let mut text = table.to_string();
    for method in &list {
        text.push_str(&format!("\n{:8}{}", method.method, method.summary));
    }
    text.push_str("\n\n'hotlift accel' lists what the hardware lacks here");
    text
}

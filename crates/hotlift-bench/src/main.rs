//! The `hotlift-bench` program.

#![forbid(unsafe_code)]

use std::path::PathBuf;
use std::process::ExitCode;

use clap::{Args, CommandFactory, Parser};
use hotlift_bench::BenchArgs;
use hotlift_bench::error::BenchError;
use hotlift_command::manual;
use hotlift_command::program::Program;
use hotlift_terminal::output;

/// Compare migrations with many settings; also with a QEMU, to another host, or over a limited link
///
/// Runs every combination of the listed values several times, in random order, and appends each run
/// to DIR/runs.jsonl. Ctrl-C keeps the completed runs. A combination that fails prints one line, and
/// the others run.
///
///   hotlift-bench --method none,zstd --channels 2,4 --workload idle,random
///
///   hotlift-bench --suite iaa --fill /data/silesia --with-qemu /usr/bin/qemu-system-x86_64
///
///   hotlift-bench --serve tcp::4444     and on another host     hotlift-bench --to tcp:HOST:4444
#[derive(Parser)]
#[command(name = "hotlift-bench", version, verbatim_doc_comment)]
struct Cli {
    #[command(flatten)]
    bench: BenchArgs,
}

// Not in `Cli`: completions are made of `Cli`, and they show hidden options, too.
#[derive(Args)]
struct Hidden {
    /// Write the manual page and the shells' completions of this program into a folder like /usr/share
    #[arg(long, value_name = "DIR", hide = true, exclusive = true)]
    manual: Option<PathBuf>,
}

fn main() -> ExitCode {
    let program = Program::start(Hidden::augment_args(Cli::command()));
    let outcome = match program.read::<Hidden>().manual {
        Some(dir) => manual::write(&dir, &Cli::command()).map_err(BenchError::from),
        None => hotlift_bench::run(&program.read::<Cli>().bench),
    };
    let code = match outcome {
        Ok(()) => ExitCode::SUCCESS,
        Err(error) => {
            program.fail(&error.line(), error.advice(), error.is_usage());
            error.exit_code()
        }
    };
    output::finish();
    code
}

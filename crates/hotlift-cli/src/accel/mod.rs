//! `hotlift accel`: the accelerators of this host, and what is missing to use them.

mod text;

use std::path::PathBuf;

use clap::Args;
use hotlift_console::error::ConsoleError;
use hotlift_console::output;
use hotlift_host::accel::accelerators;

use crate::error::CommandError;

/// Flags of `hotlift accel`.
#[derive(Debug, Args)]
pub struct AccelArgs {
    /// Write JSON
    #[arg(long)]
    json: bool,
    /// Look at the /sys, /dev and /proc of this folder in place of the host's; libraries are not tried
    #[arg(long, value_name = "DIR", default_value = "/", hide = true)]
    root: PathBuf,
}

/// Lists the accelerators.
pub fn run(args: &AccelArgs) -> Result<(), CommandError> {
    let accelerators = accelerators(&args.root)?;
    let text = if args.json {
        let text = serde_json::to_string_pretty(&accelerators);
        text.map_err(|error| ConsoleError::Output(error.into()))?
    } else {
        text::listing(&accelerators)
    };
    Ok(output::result(&text).map_err(ConsoleError::Output)?)
}

//! `hotlift accel`: lists the accelerators of this host, and what is missing to use them.

use std::path::PathBuf;

use clap::Args;
use hotlift_host::accel::{Accelerator, Gap, Part, accelerators};
use hotlift_terminal::error::TerminalError;
use hotlift_terminal::output;

use crate::error::CommandError;

/// Flags of `hotlift accel`.
#[derive(Debug, Args)]
pub struct AccelArgs {
    /// Print JSON
    #[arg(long)]
    json: bool,
    /// Inspect the /sys, /dev and /proc of this folder instead of the host's, without trying libraries
    #[arg(long, value_name = "DIR", default_value = "/", hide = true)]
    root: PathBuf,
}

/// Runs `hotlift accel`: prints the accelerators as text or as JSON.
pub fn run(args: &AccelArgs) -> Result<(), CommandError> {
    let accelerators = accelerators(&args.root)?;
    let text = if args.json {
        let text = serde_json::to_string_pretty(&accelerators);
        text.map_err(|error| TerminalError::Output(error.into()))?
    } else {
        listing(&accelerators)
    };
    Ok(output::result(&text).map_err(TerminalError::Output)?)
}

/// Returns a description of all existing accelerators; if there are none, a line that reports this.
fn listing(accelerators: &[Accelerator]) -> String {
    let there: Vec<_> = accelerators.iter().filter(|one| one.is_there()).collect();
    let mut lines = Vec::new();
    for accelerator in &there {
        lines.extend(section(accelerator));
        lines.push(String::new());
    }
    let absent: Vec<_> = accelerators
        .iter()
        .filter(|one| !one.is_there())
        .map(|one| one.name)
        .collect();
    if !absent.is_empty() {
        lines.push(format!("Not on this host: {}.", absent.join(", ")));
    }
    if !there.iter().any(|one| one.usable) {
        lines.push(
            "Every method runs in software; 'hotlift methods' lists the libraries.".to_owned(),
        );
    }
    lines.join("\n").trim_end().to_owned()
}

fn section(accelerator: &Accelerator) -> Vec<String> {
    let usable = if accelerator.usable {
        "usable"
    } else {
        "NOT usable"
    };
    let mut lines = vec![format!(
        "{}, for {}: {usable}",
        accelerator.name, accelerator.serves
    )];
    let library = accelerator
        .library
        .as_ref()
        .map(|library| ("library", library.line()));
    let width = accelerator
        .parts
        .iter()
        .map(|part| part.name.len())
        .chain(library.as_ref().map(|(name, _)| name.len()))
        .max()
        .unwrap_or(0);
    let row = |name: &str, what: &str| format!("  {name:width$}  {what}");
    let described = described(accelerator);
    for part in &accelerator.parts {
        let reason = part.gaps.iter().find(|gap| gap.blocks);
        let below = described.is_some_and(|other| std::ptr::eq(other, part));
        let line = match reason.filter(|_| !below) {
            Some(gap) => format!("{}; {}", part.what, gap.problem),
            None => part.what.clone(),
        };
        lines.push(row(&part.name, &line));
    }
    lines.extend(library.iter().map(|(name, what)| row(name, what)));
    let gaps = described.map_or(&[][..], |part| &part.gaps[..]);
    lines.extend(gaps.iter().chain(&accelerator.gaps).flat_map(describe));
    lines
}

/// Returns the part (device or queue) whose gaps are described in detail: the one with the fewest gaps. `None` if a part works.
fn described(accelerator: &Accelerator) -> Option<&Part> {
    if accelerator.parts.iter().any(|part| part.usable) {
        return None;
    }
    let lacks =
        |part: &&Part| -> usize { part.gaps.iter().map(|gap| 1 + gap.commands.len()).sum() };
    let lacking = accelerator
        .parts
        .iter()
        .filter(|part| !part.gaps.is_empty());
    lacking.min_by_key(lacks)
}

fn describe(gap: &Gap) -> Vec<String> {
    let mark = if gap.blocks { "missing" } else { "note" };
    let mut lines = vec![format!("  {mark}: {}", gap.problem)];
    lines.extend(
        gap.commands
            .iter()
            .map(|command| format!("    # {command}")),
    );
    lines
}

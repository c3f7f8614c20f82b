//! Flags for the output of a command.

use clap::Args;
use hotlift_terminal::error::TerminalError;
use hotlift_terminal::output;
use serde::Serialize;

/// How a command shows what it does and what came of it.
#[derive(Debug, Args)]
pub struct OutputArgs {
    /// Print the figures as one line of JSON instead of a table
    #[arg(long)]
    json: bool,
    /// Show no progress
    #[arg(long)]
    pub quiet: bool,
}

impl OutputArgs {
    /// Prints `figures` as JSON if `--json` was given, or else the text of `text`.
    ///
    /// # Errors
    /// If standard output was closed, or the disk is full.
    pub fn print(
        &self,
        figures: &impl Serialize,
        table: impl FnOnce() -> String,
    ) -> Result<(), TerminalError> {
        print(self.json, figures, table)
    }
}

/// Prints `figures` as a line of JSON if `json`, or else the text of `text`.
///
/// # Errors
/// If standard output was closed, or the disk is full.
pub fn print(
    json: bool,
    figures: &impl Serialize,
    text: impl FnOnce() -> String,
) -> Result<(), TerminalError> {
    let text = if json {
        let line = serde_json::to_string(figures);
        line.map_err(|error| TerminalError::Output(error.into()))?
    } else {
        text()
    };
    output::result(&text).map_err(TerminalError::Output)
}

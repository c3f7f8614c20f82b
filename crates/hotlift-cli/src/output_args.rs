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
    /// Prints the figures, or their table.
    ///
    /// # Errors
    /// No process reads them, or the disk is full.
    pub fn print(
        &self,
        figures: &impl Serialize,
        table: impl FnOnce() -> String,
    ) -> Result<(), TerminalError> {
        print(self.json, figures, table)
    }
}

/// Prints the figures as a line of JSON, or as `text` formats them.
///
/// # Errors
/// No process reads them, or the disk is full.
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

//! Flags of what a command shows.

use clap::Args;
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
    /// Prints the figures, or the table of them.
    pub fn print(&self, figures: &impl Serialize, table: impl FnOnce() -> String) {
        if !self.json {
            println!("{}", table());
        } else if let Ok(line) = serde_json::to_string(figures) {
            println!("{line}");
        }
    }
}

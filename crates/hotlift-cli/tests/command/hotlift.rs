//! Runs the `hotlift` command as a user does.

pub use hotlift_testkit::running::{Running, errors};

/// The command as a program.
pub struct Hotlift;

impl Hotlift {
    /// Starts the command.
    pub fn start(args: &[&str]) -> Running {
        Self::start_with(args, &[])
    }

    /// Starts the command with environment variables.
    pub fn start_with(args: &[&str], variables: &[(&str, &str)]) -> Running {
        Running::start(env!("CARGO_BIN_EXE_hotlift"), args, variables)
    }
}

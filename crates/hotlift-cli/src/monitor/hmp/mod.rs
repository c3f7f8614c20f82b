//! The human monitor (HMP): lines that people type, carried out by QMP's [`Commands`].

use std::io::{self, Read, Write};

use super::commands::Commands;

/// Runs one line and gives back what it prints, as `human-monitor-command` does: nothing waits.
pub fn run_line(commands: &dyn Commands, line: &str) -> String {
    let _ = (commands, line);
    String::new()
}

/// Serves a client of a socket until it leaves or says `quit`.
///
/// # Errors
/// Those of the connection.
pub fn serve_client(
    commands: &dyn Commands,
    input: &mut dyn Read,
    output: &mut dyn Write,
) -> io::Result<()> {
    let _ = (commands, input, output);
    Ok(())
}

/// Serves the terminal on standard input and output, with history and completion, until the end of
/// its input or `quit`.
///
/// # Errors
/// Those of the terminal.
pub fn serve_terminal(commands: &dyn Commands) -> io::Result<()> {
    let _ = commands;
    Ok(())
}

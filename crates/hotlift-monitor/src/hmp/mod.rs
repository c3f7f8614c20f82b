//! The human monitor (HMP): executes typed lines with QMP's [`Commands`].
//!
//! Commands, answers and error messages match QEMU 10.0; forms from older documents are also accepted. The terminal's prompt is
//! Hotlift's; a socket's is QEMU's, because scripts wait for it.

mod complete;
mod line;
mod run;
mod session;
mod show;
mod table;
mod terminal;

use hotlift_qmp::server::Commands;
use run::Answer;

pub use session::serve_client;
pub use terminal::{TerminalSettings, serve_terminal};

/// Runs one line and returns its output, as `human-monitor-command` does: does not wait for a migration.
pub fn run_line(commands: &dyn Commands, line: &str) -> String {
    let text = match run::run(commands, line) {
        Answer::Text(text) => text,
        Answer::Started => {
            "terminal does not allow synchronous migration, continuing detached\n".to_owned()
        }
        Answer::Quit => String::new(),
    };
    text.replace('\n', "\r\n")
}

#[cfg(test)]
mod tests;

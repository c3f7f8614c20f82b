//! The human monitor (HMP): executes lines that an operator types, through the QMP [`Commands`].
//!
//! Commands, answers and error messages match QEMU 10.0. Forms in older documents are also accepted. The prompt on a terminal
//! is Hotlift's; the prompt on a socket is QEMU's, because scripts wait for it.

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

/// Executes one line and returns its output, as QMP's `human-monitor-command` does. Does not wait for the end of a migration.
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

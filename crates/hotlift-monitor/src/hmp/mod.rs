//! The human monitor (HMP): lines that people type, carried out by QMP's [`Commands`].
//!
//! Commands, answers and complaints are those of QEMU 10.0, and the forms of older documents are taken too. The
//! terminal's prompt says whose monitor it is; a socket's is QEMU's, because scripts wait for it.

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

/// Runs one line and gives back what it prints, as `human-monitor-command` does: nothing waits.
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

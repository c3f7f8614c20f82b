//! What is being measured, on a terminal: one line of standard error that is rewritten. Elsewhere nothing.

use std::cell::Cell;
use std::io::{IsTerminal, Write};

/// The line. It goes away with its owner.
#[derive(Debug)]
pub struct Steps {
    wanted: bool,
    shown: Cell<bool>,
}

impl Steps {
    /// Nothing is shown if it is to be `quiet`, or nobody watches.
    pub fn new(quiet: bool) -> Self {
        Self {
            wanted: !quiet && std::io::stderr().is_terminal(),
            shown: Cell::new(false),
        }
    }

    /// Shows what is done now.
    pub fn show(&self, what: &str) {
        if self.wanted {
            self.shown.set(true);
            let mut stderr = std::io::stderr().lock();
            let _ = write!(stderr, "\r\x1b[K{what}").and_then(|()| stderr.flush());
        }
    }
}

impl Drop for Steps {
    fn drop(&mut self) {
        if self.shown.get() {
            eprint!("\r\x1b[K");
        }
    }
}

//! What is being measured, on a terminal: one line of standard error that is rewritten. Elsewhere nothing.

use std::cell::Cell;
use std::io::IsTerminal;

use hotlift_console::output;
use hotlift_console::progress;

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
            output::progress(&progress::rewritten(what));
        }
    }
}

impl Drop for Steps {
    fn drop(&mut self) {
        if self.shown.get() {
            output::progress("\r\x1b[K");
        }
    }
}

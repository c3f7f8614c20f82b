//! The log: lines on standard error, for the journal or for a terminal.

use std::sync::Arc;
use std::sync::atomic::{AtomicU8, Ordering};

use hotlift_console::output;

use crate::config::LogLevel;

/// Where lines go, and which. Copies change their level together.
#[derive(Debug, Clone)]
pub struct Log {
    /// Of the most verbose lines that are said.
    priority: Arc<AtomicU8>,
    /// The journal reads: it has the time, and takes the priority from the line.
    to_journal: bool,
}

impl Log {
    /// One that says what `level` says.
    #[must_use]
    pub fn new(level: LogLevel) -> Self {
        Self {
            priority: Arc::new(AtomicU8::new(priority(level))),
            // systemd.exec(5): set if standard output or standard error goes to the journal.
            to_journal: std::env::var_os("JOURNAL_STREAM").is_some(),
        }
    }

    /// From now on says what `level` says.
    pub fn set_level(&self, level: LogLevel) {
        self.priority.store(priority(level), Ordering::Relaxed);
    }

    fn says(&self, level: LogLevel) -> bool {
        priority(level) <= self.priority.load(Ordering::Relaxed)
    }

    /// Says `text`, in one line.
    pub fn say(&self, level: LogLevel, text: &str) {
        if !self.says(level) {
            return;
        }
        let line = hotlift_qmp::one_line(text);
        if self.to_journal {
            output::err(&format!("<{}>{line}", priority(level)));
        } else {
            output::err(&line);
        }
    }
}

/// As of sd-daemon(3).
fn priority(level: LogLevel) -> u8 {
    match level {
        LogLevel::Error => 3,
        LogLevel::Warning => 4,
        LogLevel::Info => 6,
        LogLevel::Debug => 7,
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn a_level_that_is_set_holds_for_all_copies() {
        let log = Log::new(LogLevel::Warning);
        let copy = log.clone();
        let says = || [LogLevel::Error, LogLevel::Info, LogLevel::Debug].map(|one| copy.says(one));
        assert_eq!(says(), [true, false, false]);
        log.set_level(LogLevel::Info);
        assert_eq!(says(), [true, true, false]);
    }
}

//! The log: lines on standard error, for the journal or for a terminal.

use hotlift_console::output;

use crate::config::LogLevel;

/// Where lines go, and which.
#[derive(Debug, Clone)]
pub struct Log {
    level: LogLevel,
    /// The journal reads: it has the time, and takes the priority from the line.
    to_journal: bool,
}

impl Log {
    /// One that says what `level` says.
    #[must_use]
    pub fn new(level: LogLevel) -> Self {
        Self {
            level,
            // systemd.exec(5): set if standard output or standard error goes to the journal.
            to_journal: std::env::var_os("JOURNAL_STREAM").is_some(),
        }
    }

    /// Says `text`, in one line.
    pub fn say(&self, level: LogLevel, text: &str) {
        if level > self.level {
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

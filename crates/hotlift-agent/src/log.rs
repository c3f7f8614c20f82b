//! The log of the agent: lines on standard error, for the journal or for a terminal.

use std::sync::Arc;
use std::sync::atomic::{AtomicU8, Ordering};
use std::time::{Duration, Instant};

use hotlift_terminal::output;

use crate::config::LogLevel;

/// Writes log lines up to a level. Clones share the level.
#[derive(Debug, Clone)]
pub struct Log {
    /// Syslog priority of the most verbose lines that are printed.
    priority: Arc<AtomicU8>,
    /// True if systemd's journal reads the lines. The journal adds the time, and takes the priority from each line.
    to_journal: bool,
}

impl Log {
    /// Creates a log of this level.
    #[must_use]
    pub fn new(level: LogLevel) -> Self {
        Self {
            priority: Arc::new(AtomicU8::new(priority(level))),
            // systemd.exec(5): set if standard output or standard error goes to the journal.
            to_journal: std::env::var_os("JOURNAL_STREAM").is_some(),
        }
    }

    /// Changes the level.
    pub fn set_level(&self, level: LogLevel) {
        self.priority.store(priority(level), Ordering::Relaxed);
    }

    fn is_enabled(&self, level: LogLevel) -> bool {
        priority(level) <= self.priority.load(Ordering::Relaxed)
    }

    /// Logs `text`, in one line.
    pub fn write(&self, level: LogLevel, text: &str) {
        if !self.is_enabled(level) {
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

/// A log line that any client can cause, written at most once per interval. Counts the suppressed lines.
#[derive(Debug, Default)]
pub struct RateLimited {
    last_written: Option<Instant>,
    /// Number of suppressed lines since the last written one.
    kept_back: u64,
}

/// Shortest interval between two lines of a [`RateLimited`].
const RATE_LIMIT_INTERVAL: Duration = Duration::from_secs(60);

impl RateLimited {
    /// Logs `text` if the interval since the last line is over at `now`; counts it otherwise.
    pub fn write(&mut self, log: &Log, text: &str, now: Instant) {
        if let Some(line) = self.line(text, now) {
            log.write(LogLevel::Warning, &line);
        }
    }

    fn line(&mut self, text: &str, now: Instant) -> Option<String> {
        if self
            .last_written
            .is_some_and(|last_written| now - last_written < RATE_LIMIT_INTERVAL)
        {
            self.kept_back += 1;
            return None;
        }
        self.last_written = Some(now);
        Some(match std::mem::take(&mut self.kept_back) {
            0 => text.to_owned(),
            more => format!("{text} (and {more} more since the last such line)"),
        })
    }
}

/// Returns the syslog priority of `level`, as in sd-daemon(3).
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
        let enabled =
            || [LogLevel::Error, LogLevel::Info, LogLevel::Debug].map(|one| copy.is_enabled(one));
        assert_eq!(enabled(), [true, false, false]);
        log.set_level(LogLevel::Info);
        assert_eq!(enabled(), [true, true, false]);
    }

    #[test]
    fn a_line_that_any_client_can_cause_is_logged_once_a_minute_with_a_count() {
        let mut seldom = RateLimited::default();
        let begun = Instant::now();
        let mut lines = (0..120).filter_map(|second| {
            let now = begun + Duration::from_secs(second);
            seldom.line("a client connected", now)
        });
        assert_eq!(lines.next().as_deref(), Some("a client connected"));
        let counted = "a client connected (and 59 more since the last such line)";
        assert_eq!(lines.next().as_deref(), Some(counted));
        assert_eq!(lines.next(), None);
    }
}

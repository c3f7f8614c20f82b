//! The guest's clock after a restore: it continues at the time of the save. The guest agent (qemu-ga) can set it.

use std::path::{Path, PathBuf};
use std::sync::Mutex;
use std::sync::atomic::{AtomicBool, Ordering};
use std::thread::{self, JoinHandle};
use std::time::{Duration, SystemTime, UNIX_EPOCH};

use hotlift_qmp::{GuestAgentError, RunState, set_guest_time};
use hotlift_terminal::error::error_line;
use hotlift_terminal::output::warn;

/// Timeout for the guest agent's answer. In a lazily restored guest, the pages of the agent are loaded first; the agent then
/// answers within milliseconds.
const AGENT_TIMEOUT: Duration = Duration::from_secs(20);

/// Returns the time of this host's clock, since 1970.
pub fn now() -> Duration {
    let since = SystemTime::now().duration_since(UNIX_EPOCH);
    since.unwrap_or_default()
}

/// Time when a VM was saved, in seconds since 1970.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub enum SavedAt {
    /// Time of the save, as recorded in the file.
    Kept(u64),
    /// Modification time of the file: a file in the format `mapped-ram` records no time.
    Modified(u64),
}

impl SavedAt {
    /// Returns the modification time of the file at `path`; `None` if it cannot be read.
    pub fn modified(path: &Path) -> Option<Self> {
        let modified = std::fs::metadata(path).and_then(|metadata| metadata.modified());
        let since = modified.ok()?.duration_since(UNIX_EPOCH).ok()?;
        Some(Self::Modified(since.as_secs()))
    }

    /// Describes how late a guest's clock is after a restore at `now`; `None` if the clock is less than a second late.
    pub fn lag(self, now: Duration) -> Option<String> {
        let (Self::Kept(at) | Self::Modified(at)) = self;
        let behind = now.as_secs().checked_sub(at).filter(|behind| *behind > 0)?;
        let source = match self {
            Self::Kept(_) => "the time since the save",
            Self::Modified(_) => "by the file's modification time",
        };
        Some(format!("{} behind ({source})", span(behind)))
    }
}

/// Formats a duration in seconds with its two largest units.
fn span(seconds: u64) -> String {
    match (
        seconds / 86_400,
        seconds / 3600 % 24,
        seconds / 60 % 60,
        seconds % 60,
    ) {
        (0, 0, 0, seconds) => format!("{seconds} s"),
        (0, 0, minutes, seconds) => format!("{minutes} min {seconds} s"),
        (0, hours, minutes, _) => format!("{hours} h {minutes} min"),
        (days, hours, ..) => format!("{days} d {hours} h"),
    }
}

/// Clock of a guest that is being restored.
pub struct GuestClock {
    saved: Option<SavedAt>,
    agent: Option<PathBuf>,
    /// True once a QEMU has loaded the guest.
    is_here: AtomicBool,
    /// Thread in which the guest agent sets the clock; `None` before it starts.
    setting: Mutex<Option<JoinHandle<Result<(), GuestAgentError>>>>,
}

impl GuestClock {
    /// Creates the clock of a guest that was saved at the time `saved`. `agent` is the socket of the guest agent, if there is
    /// one.
    pub fn new(saved: Option<SavedAt>, agent: Option<PathBuf>) -> Self {
        Self {
            saved,
            agent,
            is_here: AtomicBool::new(false),
            setting: Mutex::new(None),
        }
    }

    /// Records that a QEMU has the guest in the run state `state`. If the guest runs, starts a thread in which the guest agent
    /// sets the clock. Only the first such call starts a thread.
    pub fn is_here(&self, state: &RunState) {
        self.is_here.store(true, Ordering::Relaxed);
        let Some(path) = self.agent.clone().filter(|_| *state == RunState::Running) else {
            return;
        };
        if let Ok(mut setting) = self.setting.lock()
            && setting.is_none()
        {
            let set = move || set_guest_time(&path, now, AGENT_TIMEOUT);
            *setting = thread::Builder::new()
                .name("guest-agent".to_owned())
                .spawn(set)
                .ok();
        }
    }

    /// Prints how late the guest's clock is, or that the guest agent set it. Prints nothing if no QEMU has the guest. An error
    /// of the guest agent is only printed.
    pub fn report(self) {
        if !self.is_here.into_inner() {
            return;
        }
        let setting = self.setting.into_inner().ok().flatten();
        let outcome = setting.and_then(|setting| setting.join().ok());
        match outcome {
            Some(Ok(())) => {
                warn!("the guest's clock was set by its agent");
                return;
            }
            Some(Err(error)) => {
                warn!(
                    "hotlift: cannot set the guest's clock: {}",
                    error_line(&error)
                );
            }
            None => {}
        }
        if let Some(behind) = self.saved.and_then(|saved| saved.lag(now())) {
            let cure = match self.agent {
                Some(_) => "",
                None => ", or restore with --sync-time and the socket of its guest agent",
            };
            warn!(
                "the guest's clock is {behind}: set it in the guest ('chronyc makestep', 'hwclock --hctosys'){cure}"
            );
        }
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn a_clock_lags_by_the_time_since_the_save_and_is_never_ahead() {
        let now = Duration::from_secs(1_000_000);
        for (seconds, expected) in [
            (1, "1 s"),
            (59, "59 s"),
            (60, "1 min 0 s"),
            (3599, "59 min 59 s"),
            (7980, "2 h 13 min"),
            (86_399, "23 h 59 min"),
            (90_000, "1 d 1 h"),
        ] {
            let behind = SavedAt::Kept(1_000_000 - seconds).lag(now);
            assert_eq!(
                behind.as_deref(),
                Some(&*format!("{expected} behind (the time since the save)"))
            );
        }
        assert_eq!(SavedAt::Kept(1_000_000).lag(now), None);
        assert_eq!(SavedAt::Kept(1_000_001).lag(now), None);
        let modified = SavedAt::Modified(999_999).lag(now);
        assert_eq!(
            modified.as_deref(),
            Some("1 s behind (by the file's modification time)")
        );
    }
}

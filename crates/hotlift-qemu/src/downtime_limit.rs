//! The downtime limit of one migration: set as its ramp decides, unless another client changes it. The caller reads and sets
//! it, over QMP or through libvirt.

use std::time::{Duration, Instant};

use hotlift_terminal::progress::Line;
use serde::Serialize;

use crate::downtime_ramp::{DowntimeRamp, Figures};

/// Downtime limit of a command.
#[derive(Debug, Clone, Copy)]
pub struct LimitArgs {
    /// The limit for this migration; `None` if QEMU keeps its own.
    pub own: Option<Duration>,
    /// True if the limit begins low, and rises as far as needed.
    pub ramps: bool,
}

impl LimitArgs {
    /// Returns the limit for this migration in milliseconds, if QEMU does not keep its own.
    #[must_use]
    pub fn own_ms(self) -> Option<u64> {
        let ms = |limit: Duration| u64::try_from(limit.as_millis()).unwrap_or(u64::MAX);
        self.own.map(ms)
    }
}

/// Latest downtime limit of a migration whose limit began below the operator's.
#[derive(Debug, Clone, PartialEq, Eq, Serialize)]
pub struct DowntimeLimit {
    /// The limit in milliseconds; `None` if another client has set it.
    pub ms: Option<u64>,
    /// The operator's limit in milliseconds.
    pub most_ms: u64,
    /// Reason for the limit.
    pub reason: String,
}

impl std::fmt::Display for DowntimeLimit {
    fn fmt(&self, f: &mut std::fmt::Formatter<'_>) -> std::fmt::Result {
        match self.ms {
            Some(ms) => write!(f, "{ms} of {} ms, {}", self.most_ms, self.reason),
            None => f.write_str(&self.reason),
        }
    }
}

/// Downtime limit that follows a ramp.
#[derive(Debug)]
pub struct RampedLimit {
    ramp: DowntimeRamp,
    /// The limit that QEMU has, in milliseconds; `None` if another client has set it.
    applied: Option<u64>,
    /// The limit that was last shown as a remark; `None` before the ramp has set any.
    shown: Option<Option<u64>>,
}

impl RampedLimit {
    /// Creates the limit of a QEMU that has the ramp's first one.
    #[must_use]
    pub fn of_first(ramp: DowntimeRamp) -> Self {
        let first = Some(ramp.limit());
        Self {
            ramp,
            applied: first,
            shown: Some(first),
        }
    }

    /// Creates the limit of a QEMU that has another one so far, `applied` in milliseconds.
    #[must_use]
    pub fn to_begin(ramp: DowntimeRamp, applied: u64) -> Self {
        Self {
            ramp,
            applied: Some(applied),
            shown: None,
        }
    }

    /// Returns the ramp.
    #[must_use]
    pub fn ramp(&self) -> &DowntimeRamp {
        &self.ramp
    }

    /// Returns the limit that QEMU has, in milliseconds; `None` if another client has set it.
    #[must_use]
    pub fn applied(&self) -> Option<u64> {
        self.applied
    }

    /// Returns true if no more limit will be set.
    #[must_use]
    pub fn has_ended(&self) -> bool {
        self.ramp.is_left() || (self.ramp.has_ended() && self.applied == Some(self.ramp.limit()))
    }

    /// Passes QEMU's figures to the ramp, and applies its limit: `set` sets a limit in milliseconds, or only checks the present
    /// one. It returns false if another client has changed the limit.
    pub fn poll<E>(
        &mut self,
        now: Instant,
        figures: Figures,
        set: impl FnOnce(Option<u64>) -> Result<bool, E>,
    ) {
        if self.ramp.is_left() {
            return;
        }
        self.ramp.poll(now, figures);
        let limit = Some(self.ramp.limit());
        match set(limit.filter(|_| self.applied != limit)) {
            Ok(true) => {
                self.applied = limit;
                self.shown.get_or_insert(limit);
            }
            Ok(false) => {
                self.ramp.leave();
                self.applied = None;
            }
            // It is temporary, or ends the migration: the next call tries again.
            Err(_) => {}
        }
    }

    /// Returns the limit for the operator; `None` before the ramp has set any, or if it is constant.
    #[must_use]
    pub fn report(&self) -> Option<DowntimeLimit> {
        let is_left = self.ramp.is_left();
        let is_constant = self.ramp.steps().len() == 1;
        (!is_constant && (is_left || self.shown.is_some())).then(|| DowntimeLimit {
            ms: (!is_left).then(|| self.ramp.limit()),
            most_ms: self.ramp.most(),
            reason: self.ramp.reason().to_string(),
        })
    }

    /// Returns the limit as a remark if it has changed since the last call.
    pub fn remark(&mut self) -> Option<String> {
        let limit = self.report()?;
        let before = self.shown.replace(self.applied);
        (before != Some(self.applied)).then(|| format!("downtime-limit {limit}"))
    }

    /// Adds the limit to a line of progress, and a change of it as a remark.
    pub fn show(&mut self, line: &mut Line) {
        if let Some(limit) = self.report() {
            line.text.push_str(&format!(", downtime-limit {limit}"));
        }
        if let Some(remark) = self.remark() {
            line.remark.get_or_insert(remark);
        }
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    /// Figures of a guest whose rounds do not shrink.
    fn figures(rounds: u64) -> Figures {
        Figures {
            rounds,
            ..Figures::default()
        }
    }

    fn ramp() -> DowntimeRamp {
        DowntimeRamp::new(300, None).expect("a ramp")
    }

    #[test]
    fn a_limit_is_set_once_and_reported_only_from_then_on() {
        let mut limit = RampedLimit::to_begin(ramp(), 300);
        assert_eq!((limit.report(), limit.remark()), (None, None));
        let now = Instant::now();
        let mut asked = Vec::new();
        for answer in [Err(()), Ok(true), Ok(true)] {
            limit.poll(now, figures(1), |set| {
                asked.push(set);
                answer
            });
        }
        assert_eq!(asked, [Some(9), Some(9), None]);
        assert_eq!(limit.report().expect("a limit").ms, Some(9));
        assert_eq!(limit.remark(), None, "the first limit is no change");
    }

    #[test]
    fn a_raised_limit_is_a_remark_once_and_ends_the_ramp() {
        let mut limit = RampedLimit::of_first(ramp());
        let begin = Instant::now();
        for rounds in 1..5 {
            assert!(!limit.has_ended());
            let now = begin + Duration::from_secs(10 * rounds);
            limit.poll(now, figures(rounds), |_| Ok::<_, ()>(true));
        }
        assert!(limit.has_ended());
        assert_eq!(limit.applied(), Some(300));
        let remark = limit.remark().expect("a change");
        assert!(remark.starts_with("downtime-limit 300 of 300 ms, raised"));
        assert_eq!(limit.remark(), None);
    }

    #[test]
    fn a_limit_of_another_client_is_shown_and_never_replaced() {
        let mut limit = RampedLimit::to_begin(ramp(), 300);
        let now = Instant::now();
        limit.poll(now, figures(1), |_| Ok::<_, ()>(false));
        assert!(limit.has_ended());
        assert_eq!(limit.report().expect("a limit").ms, None);
        limit.poll(now, figures(9), |_| -> Result<bool, ()> {
            panic!("it is not ours any more")
        });
        let mut line = Line::from("migration".to_owned());
        limit.show(&mut line);
        assert_eq!(
            line.text,
            "migration, downtime-limit as another client has set it"
        );
    }
}

//! Capability `auto-converge`: throttles the guest while it dirties pages faster than they are sent.
//!
//! The rule and its numbers are QEMU's. Dirty log syncs are combined into periods of at least one second. In a fast period, the
//! guest dirties more than `throttle-trigger-threshold` percent of the bytes sent. After two fast periods the guest loses
//! `cpu-throttle-initial` percent of its CPU time. After each further two it loses `cpu-throttle-increment` percent more, up to
//! `max-cpu-throttle`.

use std::time::{Duration, Instant};

use hotlift_mem::PAGE_SIZE;

use crate::figures::to_f64;
use crate::options::AutoConvergeOptions;

/// Minimum length of a period. In a shorter period, the last change of the throttling would have no visible effect.
const PERIOD: Duration = Duration::from_secs(1);

/// Count of fast periods before the throttling is increased.
const PERIODS_BEFORE_THROTTLING: u32 = 2;

/// Throttles a guest. Ends the throttling when dropped.
pub(crate) struct AutoConverge<'a> {
    /// Calls [`Guest::throttle`](crate::guest::Guest::throttle) of the guest.
    throttle: Box<dyn Fn(u8) -> bool + 'a>,
    period: Period,
    /// Count of fast periods since the last increase of the throttling.
    too_fast: u32,
    percent: u8,
    highest: u8,
    refused: bool,
}

/// Activity in the current period.
struct Period {
    since: Instant,
    dirtied_pages: u64,
    /// Total count of bytes sent before the period.
    sent_before: u64,
}

impl<'a> AutoConverge<'a> {
    /// Starts the first period at the time `now`, when nothing has been sent.
    pub(crate) fn new(throttle: impl Fn(u8) -> bool + 'a, now: Instant) -> Self {
        Self {
            throttle: Box::new(throttle),
            period: Period {
                since: now,
                dirtied_pages: 0,
                sent_before: 0,
            },
            too_fast: 0,
            percent: 0,
            highest: 0,
            refused: false,
        }
    }

    /// Processes a dirty log sync, and increases the throttling if necessary. `dirtied_pages` counts since the last sync,
    /// `sent_bytes` since the start.
    pub(crate) fn synced(
        &mut self,
        dirtied_pages: u64,
        sent_bytes: u64,
        now: Instant,
        options: &AutoConvergeOptions,
    ) {
        self.period.dirtied_pages += dirtied_pages;
        if !options.on || self.refused || now - self.period.since < PERIOD {
            return;
        }
        let dirtied = to_f64(self.period.dirtied_pages * PAGE_SIZE as u64);
        let allowed = to_f64(sent_bytes.saturating_sub(self.period.sent_before))
            * f64::from(options.trigger_threshold)
            / 100.0;
        self.period = Period {
            since: now,
            dirtied_pages: 0,
            sent_before: sent_bytes,
        };
        if dirtied > allowed {
            self.too_fast += 1;
            if self.too_fast == PERIODS_BEFORE_THROTTLING {
                self.too_fast = 0;
                self.set(next(self.percent, allowed / dirtied, options));
            }
        }
    }

    fn set(&mut self, percent: u8) {
        if percent == self.percent {
            return;
        }
        if (self.throttle)(percent) {
            self.percent = percent;
            self.highest = self.highest.max(percent);
        } else {
            self.refused = true;
        }
    }

    /// Ends the throttling of the guest.
    pub(crate) fn release(&mut self) {
        if self.percent > 0 {
            (self.throttle)(0);
            self.percent = 0;
        }
    }

    /// Returns the current throttling: percentage of the vCPUs' time.
    pub(crate) fn percent(&self) -> u8 {
        self.percent
    }

    /// Returns the highest throttling so far: percentage of the vCPUs' time.
    pub(crate) fn highest(&self) -> u8 {
        self.highest
    }

    /// Returns true if the guest should be throttled, but does not support it.
    pub(crate) fn is_refused(&self) -> bool {
        self.refused
    }
}

impl Drop for AutoConverge<'_> {
    fn drop(&mut self) {
        self.release();
    }
}

/// Returns the next throttling in percent. The guest is throttled by `percent`, and still dirties too many pages. `allowed` is
/// the acceptable fraction of these pages, below 1.
fn next(percent: u8, allowed: f64, options: &AutoConvergeOptions) -> u8 {
    let wanted = match percent {
        0 => options.initial,
        _ => percent.saturating_add(match options.tailslow {
            false => options.increment,
            true => {
                // Assumes that the guest dirties pages in proportion to its CPU time.
                let has = 100 - percent.min(100);
                let may_keep = f64::from(has) * allowed;
                let keeps = (1..=has).filter(|kept| f64::from(*kept) <= may_keep).max();
                options.increment.min(has - keeps.unwrap_or(0))
            }
        }),
    };
    wanted.min(options.max).max(percent)
}

#[cfg(test)]
mod tests {
    use std::cell::RefCell;

    use super::*;

    /// Returns options with auto-converge.
    fn on() -> AutoConvergeOptions {
        AutoConvergeOptions {
            on: true,
            ..AutoConvergeOptions::default()
        }
    }

    /// Returns the throttling calls in periods where the guest dirties these counts of pages while 100 pages are sent. `can` is
    /// false if the guest cannot be throttled.
    fn asked(dirtied: &[u64], can: bool, options: &AutoConvergeOptions) -> (Vec<u8>, u8, bool) {
        let percents = RefCell::default();
        let guest = |percent| {
            Vec::push(&mut percents.borrow_mut(), percent);
            can
        };
        let mut now = Instant::now();
        let mut throttle = AutoConverge::new(guest, now);
        let mut sent = 0;
        for pages in dirtied {
            // Two syncs make a period.
            for part in [pages / 2, pages.div_ceil(2)] {
                now += PERIOD / 2;
                sent += 50 * 4096;
                throttle.synced(part, sent, now, options);
            }
        }
        let state = (throttle.highest(), throttle.is_refused());
        drop(throttle);
        (percents.into_inner(), state.0, state.1)
    }

    #[test]
    fn every_second_period_above_the_threshold_increases_throttling_up_to_the_maximum() {
        assert_eq!(asked(&[51, 50, 20, 51], true, &on()).0, [20, 0]);
        assert_eq!(asked(&[50; 20], true, &on()).0, Vec::<u8>::new());
        let options = AutoConvergeOptions { max: 45, ..on() };
        assert_eq!(
            asked(&[60; 12], true, &options),
            (vec![20, 30, 40, 45, 0], 45, false),
            "and all is given back in the end"
        );
        assert_eq!(
            asked(&[200; 20], true, &AutoConvergeOptions::default()).0,
            Vec::<u8>::new()
        );
    }

    #[test]
    fn tailslow_throttles_no_more_than_needed() {
        let options = AutoConvergeOptions {
            initial: 50,
            tailslow: true,
            ..on()
        };
        // A tenth too much: the guest loses a tenth of the half that it has.
        assert_eq!(next(50, 0.9, &options), 55);
        assert_eq!(next(50, 0.1, &options), 60, "no more than the increment");
        assert_eq!(next(0, 0.9, &options), 50);
    }

    #[test]
    fn a_guest_that_cannot_be_throttled_is_tried_once() {
        assert_eq!(asked(&[200; 20], false, &on()), (vec![20], 0, true));
    }
}

//! What the guest waits for, and for how long it did.

use std::collections::VecDeque;
use std::sync::{Condvar, Mutex, PoisonError};
use std::time::{Duration, Instant};

use crate::figures::percentiles;
use crate::lock::lock;

/// Latencies that are kept: of more, the latest.
const KEPT: usize = 1 << 20;

/// A page that is waited for.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub(crate) struct Request {
    /// Index of the RAM block.
    pub block: usize,
    pub page: usize,
    /// When it was read.
    pub since: Instant,
}

/// The pages that are waited for, first come, first served.
#[derive(Debug, Default)]
pub(crate) struct Requests {
    state: Mutex<State>,
    changed: Condvar,
}

#[derive(Debug, Default)]
struct State {
    waiting: VecDeque<Request>,
    /// One is being answered.
    under_way: bool,
    ended: bool,
    served: u64,
    /// In microseconds.
    latencies: VecDeque<u32>,
}

impl Requests {
    /// Adds a page whose request was read at `now`.
    pub(crate) fn add(&self, block: usize, page: usize, now: Instant) {
        let request = Request {
            block,
            page,
            since: now,
        };
        let mut state = lock(&self.state);
        // Who answers may have gone.
        if !state.ended {
            state.waiting.push_back(request);
            self.changed.notify_all();
        }
    }

    /// The next one; `None` if there will be none.
    pub(crate) fn next(&self) -> Option<Request> {
        let mut state = self
            .changed
            .wait_while(lock(&self.state), |state| {
                state.waiting.is_empty() && !state.ended
            })
            .unwrap_or_else(PoisonError::into_inner);
        let next = state.waiting.pop_front();
        state.under_way = next.is_some();
        next
    }

    /// Whether somebody waits behind the one that is being answered.
    pub(crate) fn is_waiting(&self) -> bool {
        !lock(&self.state).waiting.is_empty()
    }

    /// The one that was handed out last is done; its page was sent for it, or was on its way.
    pub(crate) fn done(&self, request: &Request, sent: bool, now: Instant) {
        let mut state = lock(&self.state);
        state.under_way = false;
        if sent {
            state.served += 1;
            let took = now.saturating_duration_since(request.since).as_micros();
            let took = u32::try_from(took).unwrap_or(u32::MAX);
            if state.latencies.len() == KEPT {
                state.latencies.pop_front();
            }
            state.latencies.push_back(took);
        }
        self.changed.notify_all();
    }

    /// No more is handed out.
    pub(crate) fn end(&self) {
        let mut state = lock(&self.state);
        state.ended = true;
        self.changed.notify_all();
    }

    /// Nobody answers any more.
    pub(crate) fn abandon(&self) {
        let mut state = lock(&self.state);
        state.ended = true;
        state.under_way = false;
        state.waiting.clear();
        self.changed.notify_all();
    }

    /// No more is waited for; returns when the one that is being answered is.
    pub(crate) fn end_and_drain(&self) {
        self.end();
        let _state = self
            .changed
            .wait_while(lock(&self.state), |state| {
                state.under_way || !state.waiting.is_empty()
            })
            .unwrap_or_else(PoisonError::into_inner);
    }

    /// Waits for the end for `time`; whether it has come.
    pub(crate) fn wait_for_end(&self, time: Duration) -> bool {
        let (state, _) = self
            .changed
            .wait_timeout_while(lock(&self.state), time, |state| !state.ended)
            .unwrap_or_else(PoisonError::into_inner);
        state.ended
    }

    /// How many were answered with a page.
    pub(crate) fn served(&self) -> u64 {
        lock(&self.state).served
    }

    /// The median, one in a hundred, and the longest, in microseconds; 0 without any.
    pub(crate) fn latencies(&self) -> [f64; 3] {
        percentiles(lock(&self.state).latencies.iter().copied().collect())
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn requests_come_out_in_order_and_what_is_left_at_the_end_too() {
        let (requests, now) = (Requests::default(), Instant::now());
        requests.add(0, 5, now);
        requests.add(1, 6, now);
        let first = requests.next().unwrap();
        assert_eq!((first.block, first.page), (0, 5));
        requests.done(&first, true, now + Duration::from_micros(7));
        requests.end();
        requests.add(2, 7, now);
        let second = requests.next().unwrap();
        assert_eq!((second.block, second.page), (1, 6));
        requests.done(&second, false, now);
        assert_eq!(requests.next(), None);
        requests.end_and_drain();
        assert_eq!(requests.served(), 1);
        assert_eq!(requests.latencies(), [7.0; 3]);
    }
}

//! What the guest waits for, and for how long it did.

use std::collections::VecDeque;
use std::io::Read;
use std::sync::{Condvar, Mutex, PoisonError};
use std::time::{Duration, Instant};

use hotlift_wire::main_channel::postcopy;
use hotlift_wire::return_path::ReturnMessage;
use hotlift_wire::{Reader, WireError};

use crate::control::Control;
use crate::error::MigrationError;
use crate::threads::lock;
use crate::transport::Stream;

/// Latencies that are kept: of more, the latest.
const KEPT: usize = 1 << 20;

/// A page that is waited for.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub(super) struct Request {
    /// Index of the RAM block.
    pub block: usize,
    pub page: usize,
    /// When it was read.
    pub since: Instant,
}

/// The pages that are waited for, first come, first served.
#[derive(Debug, Default)]
pub(super) struct Requests {
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
    pub(super) fn add(&self, block: usize, page: usize) {
        let request = Request {
            block,
            page,
            since: Instant::now(),
        };
        let mut state = lock(&self.state);
        // Who answers may have gone.
        if !state.ended {
            state.waiting.push_back(request);
            self.changed.notify_all();
        }
    }

    /// The next one; `None` if there will be none.
    pub(super) fn next(&self) -> Option<Request> {
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

    /// The one that was handed out last is done; its page was sent for it, or was on its way.
    pub(super) fn done(&self, request: &Request, sent: bool) {
        let mut state = lock(&self.state);
        state.under_way = false;
        if sent {
            state.served += 1;
            let took = u32::try_from(request.since.elapsed().as_micros()).unwrap_or(u32::MAX);
            if state.latencies.len() == KEPT {
                state.latencies.pop_front();
            }
            state.latencies.push_back(took);
        }
        self.changed.notify_all();
    }

    /// No more is handed out.
    pub(super) fn end(&self) {
        let mut state = lock(&self.state);
        state.ended = true;
        self.changed.notify_all();
    }

    /// Nobody answers any more.
    pub(super) fn abandon(&self) {
        let mut state = lock(&self.state);
        state.ended = true;
        state.under_way = false;
        state.waiting.clear();
        self.changed.notify_all();
    }

    /// No more is waited for; returns when the one that is being answered is.
    pub(super) fn end_and_drain(&self) {
        self.end();
        let _state = self
            .changed
            .wait_while(lock(&self.state), |state| {
                state.under_way || !state.waiting.is_empty()
            })
            .unwrap_or_else(PoisonError::into_inner);
    }

    /// Waits for the end for `time`; whether it has come.
    pub(super) fn wait_for_end(&self, time: Duration) -> bool {
        let (state, _) = self
            .changed
            .wait_timeout_while(lock(&self.state), time, |state| !state.ended)
            .unwrap_or_else(PoisonError::into_inner);
        state.ended
    }

    /// How many were answered with a page.
    pub(super) fn served(&self) -> u64 {
        lock(&self.state).served
    }

    /// The median, one in a hundred, and the longest, in microseconds; 0 without any.
    pub(super) fn latencies(&self) -> [f64; 3] {
        let mut all: Vec<u32> = lock(&self.state).latencies.iter().copied().collect();
        all.sort_unstable();
        let at = |share: usize| {
            let index = (all.len() * share / 100).min(all.len().saturating_sub(1));
            all.get(index).copied().map_or(0.0, f64::from)
        };
        [at(50), at(99), at(100)]
    }
}

/// What a QEMU answers whose guest waits for pages, before requests may come.
pub(super) struct Reading<'a> {
    from: &'a Stream,
    control: &'a Control,
    /// Read, and not taken.
    pending: Vec<u8>,
    deadline: Instant,
}

impl<'a> Reading<'a> {
    /// How long all answers may take.
    const PATIENCE: Duration = Duration::from_secs(60);
    const TICK: Duration = Duration::from_millis(100);

    pub(super) fn new(from: &'a Stream, control: &'a Control) -> Self {
        Self {
            from,
            control,
            pending: Vec::new(),
            deadline: Instant::now() + Self::PATIENCE,
        }
    }

    /// The pages of a RAM block that it has, as the answer to a request for them.
    pub(super) fn bitmap(&mut self, block: &str, pages: usize) -> Result<Vec<u8>, MigrationError> {
        self.take(|bytes| bitmap(bytes, block, pages))
    }

    /// Its word that it goes on.
    pub(super) fn resumed(&mut self) -> Result<(), MigrationError> {
        self.take(|bytes| match ReturnMessage::decode(bytes)? {
            (ReturnMessage::ResumeAck(1), length) => Ok(((), length)),
            _ => Err(WireError::OutOfOrder {
                got: "a message",
                expected: "QEMU's word that it goes on",
            }),
        })
    }

    /// What was read behind the answers.
    pub(super) fn rest(self) -> Vec<u8> {
        self.pending
    }

    fn take<T>(
        &mut self,
        decode: impl Fn(&[u8]) -> Result<(T, usize), WireError>,
    ) -> Result<T, MigrationError> {
        let mut buffer = [0; 64 << 10];
        loop {
            match decode(&self.pending) {
                Ok((answer, length)) => {
                    self.pending.drain(..length);
                    return Ok(answer);
                }
                Err(WireError::Truncated { .. }) => {}
                Err(source) => return Err(MigrationError::main_wire(source)),
            }
            let mut from = self.from;
            while !from
                .wait_readable(Self::TICK)
                .map_err(MigrationError::opening)?
            {
                if self.control.is_cancelled() {
                    return Err(MigrationError::Cancelled);
                }
                if Instant::now() > self.deadline {
                    return Err(MigrationError::Timeout {
                        waiting_for: "what QEMU says of the pages that it has".to_owned(),
                        waited: Self::PATIENCE,
                    });
                }
            }
            match from.read(&mut buffer).map_err(MigrationError::opening)? {
                0 => return Err(MigrationError::main_closed()),
                read => self.pending.extend_from_slice(&buffer[..read]),
            }
        }
    }
}

fn bitmap(bytes: &[u8], block: &str, pages: usize) -> Result<(Vec<u8>, usize), WireError> {
    let (message, length) = ReturnMessage::decode(bytes)?;
    if message != (ReturnMessage::RecvBitmap { block }) {
        return Err(WireError::OutOfOrder {
            got: "a message",
            expected: "the bitmap of the RAM block that was asked for",
        });
    }
    let mut reader = Reader::new(&bytes[length..]);
    let bits = postcopy::read_bitmap(&mut reader, pages)?.to_vec();
    Ok((bits, length + reader.position()))
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn requests_come_out_in_order_and_what_is_left_at_the_end_too() {
        let requests = Requests::default();
        requests.add(0, 5);
        requests.add(1, 6);
        let first = requests.next().unwrap();
        assert_eq!((first.block, first.page), (0, 5));
        requests.done(&first, true);
        requests.end();
        requests.add(2, 7);
        let second = requests.next().unwrap();
        assert_eq!((second.block, second.page), (1, 6));
        requests.done(&second, false);
        assert_eq!(requests.next(), None);
        requests.end_and_drain();
        assert_eq!(requests.served(), 1);
        assert!(requests.latencies()[2] >= requests.latencies()[0]);
    }
}

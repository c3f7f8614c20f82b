//! Guest RAM whose pages come as they are touched: which have come, and who waits for which.

use std::collections::{HashMap, VecDeque};
use std::sync::Mutex;
use std::sync::atomic::{AtomicU64, Ordering};
use std::time::{Duration, Instant};

use hotlift_mem::{DirtyBitmap, Fault, MissingPages, PAGE_SIZE, Placed};
use rustix::event::{PollFd, PollFlags, poll};

use super::empty_gaps;
use crate::ends::guest_sink::session::Session;
use crate::error::{Channel, MigrationError};
use crate::figures::{PostcopyFigures, percentiles};
use crate::threads::lock;
use crate::transport::Stream;

/// Waits that are kept for the figures: of more, the latest.
const KEPT: usize = 1 << 20;

/// RAM that is not all there.
pub(crate) struct LazyRam<'a> {
    missing: MissingPages,
    received: &'a [DirtyBitmap],
    waits: Mutex<Waits>,
    pages: AtomicU64,
}

#[derive(Default)]
struct Waits {
    /// Pages that were asked for, and since when.
    open: HashMap<Fault, Instant>,
    /// How long others were waited for, in microseconds.
    over: VecDeque<u32>,
    requests: u64,
}

impl<'a> LazyRam<'a> {
    /// Whatever has not come by now is missing.
    pub(super) fn new(session: &'a Session<'a>) -> Result<Self, MigrationError> {
        for (ram, written) in session.guest.ram().iter().zip(&session.written) {
            empty_gaps(ram, written)?;
        }
        Ok(Self {
            missing: MissingPages::register(session.guest.ram())?,
            received: &session.received,
            waits: Mutex::default(),
            pages: AtomicU64::new(0),
        })
    }

    /// Puts a page there that the source has sent; `None` for zeros.
    ///
    /// # Errors
    /// [`MigrationError::Protocol`] for one that has come before: the guest may have changed it.
    pub(super) fn place(
        &self,
        block: usize,
        offset: u64,
        content: Option<&[u8; PAGE_SIZE]>,
    ) -> Result<(), MigrationError> {
        let page = usize::try_from(offset).unwrap_or(usize::MAX) / PAGE_SIZE;
        let twice = || {
            Err(MigrationError::Protocol {
                channel: Channel::Main,
                got: format!("page {page} of RAM block {block} a second time"),
                doing: "bringing pages to a guest that runs",
            })
        };
        if self.received[block].test(page) {
            return twice();
        }
        if self.missing.place(block, page, content)? == Placed::Before {
            return twice();
        }
        // Behind the page itself: whoever sees the mark finds it.
        self.received[block].set(page);
        self.pages.fetch_add(1, Ordering::Relaxed);
        self.over(Fault { block, page });
        Ok(())
    }

    fn over(&self, page: Fault) {
        let mut waits = lock(&self.waits);
        if let Some(since) = waits.open.remove(&page) {
            let took = u32::try_from(since.elapsed().as_micros()).unwrap_or(u32::MAX);
            if waits.over.len() == KEPT {
                waits.over.pop_front();
            }
            waits.over.push_back(took);
        }
    }

    /// Has `ask` ask for each page that the guest touches and that is not there, until the other end of `stop` is closed.
    pub(super) fn tell_faults(
        &self,
        stop: &Stream,
        ask: impl Fn(Fault),
    ) -> Result<(), MigrationError> {
        let mut faults = Vec::new();
        loop {
            let mut fds = [
                PollFd::new(&self.missing, PollFlags::IN),
                PollFd::new(stop, PollFlags::IN),
            ];
            match poll(&mut fds, None) {
                Ok(_) | Err(rustix::io::Errno::INTR) => {}
                Err(source) => return Err(MigrationError::opening(source.into())),
            }
            if !fds[1].revents().is_empty() {
                return Ok(());
            }
            self.missing.faults(&mut faults)?;
            for fault in faults.drain(..) {
                if self.wants(fault)? {
                    ask(fault);
                }
            }
        }
    }

    /// Whether a page that is waited for is still to be asked for.
    fn wants(&self, fault: Fault) -> Result<bool, MigrationError> {
        let Fault { block, page } = fault;
        let has_come = || self.received[block].test(page);
        if !has_come() {
            let mut waits = lock(&self.waits);
            if waits.open.contains_key(&fault) {
                return Ok(false);
            }
            waits.open.insert(fault, Instant::now());
            waits.requests += 1;
            drop(waits);
            if !has_come() {
                return Ok(true);
            }
            self.over(fault);
        }
        // A zero page of precopy has come without memory. Any other is there, and whoever waits for it is woken.
        let _ = self.missing.place(block, page, None)?;
        Ok(false)
    }

    /// Pages that are waited for.
    pub(super) fn open(&self) -> Vec<Fault> {
        lock(&self.waits).open.keys().copied().collect()
    }

    /// The mark of 64 pages of a block, whether they have come.
    pub(super) fn received_word(&self, block: usize, word: usize) -> u64 {
        let has_come = |bit: &u32| {
            let page = usize::try_from(*bit).map_or(usize::MAX, |bit| word * 64 + bit);
            self.received[block].test(page)
        };
        let bits = (0..u64::BITS).filter(has_come);
        bits.fold(0, |bits, bit| bits | 1 << bit)
    }

    /// All has come: what did not is zero, and nobody waits any more. Also for a guest that never ran.
    pub(super) fn end(&self) {
        self.missing.end();
    }

    /// What the guest's waits have come to so far.
    pub(super) fn figures(&self, complete: Duration) -> PostcopyFigures {
        let waits = lock(&self.waits);
        PostcopyFigures {
            complete_ms: complete.as_secs_f64() * 1e3,
            pages: self.pages.load(Ordering::Relaxed),
            requests: waits.requests,
            wait_us: percentiles(waits.over.iter().copied().collect()),
        }
    }
}

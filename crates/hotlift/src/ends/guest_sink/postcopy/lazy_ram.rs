//! Guest RAM whose pages come as they are touched: which have come, and who waits for which.

use std::collections::VecDeque;
use std::sync::atomic::{AtomicU64, Ordering};
use std::time::{Duration, Instant};

use hotlift_mem::{DirtyBitmap, Fault, MissingPages, PAGE_SIZE, Placed, Touch};
use rustix::event::{PollFd, PollFlags, poll};

use super::blocktime::{Blocktime, KEPT};
use super::empty_gaps;
use crate::ends::guest_sink::session::Session;
use crate::error::{Channel, MigrationError};
use crate::figures::{PostcopyFigures, percentiles};
use crate::life::gate::Gate;
use crate::stream::main_recv::Waiting;
use crate::transport::Stream;

/// RAM that is not all there.
pub(crate) struct LazyRam<'a> {
    missing: MissingPages,
    received: &'a [DirtyBitmap],
    waits: Gate<Waits>,
    pages: AtomicU64,
}

#[derive(Default)]
struct Waits {
    /// Who waits for a page that was asked for: few, as each is a thread.
    open: Vec<(Touch, Instant)>,
    /// How long others were waited for, in microseconds.
    over: VecDeque<u32>,
    requests: u64,
    /// Whose the waits are, if that is to be told.
    blocktime: Option<Blocktime>,
}

impl Waits {
    /// A thread waits for a page; true if it is the first to do so.
    fn begin(&mut self, touch: Touch, now: Instant) -> bool {
        // The kernel may tell of one more than once.
        if self.open.iter().any(|(other, _)| *other == touch) {
            return false;
        }
        let is_first = self
            .open
            .iter()
            .all(|(other, _)| other.fault != touch.fault);
        self.open.push((touch, now));
        self.requests += u64::from(is_first);
        if let Some(blocktime) = &mut self.blocktime {
            blocktime.begins(touch.thread, now);
        }
        is_first
    }
}

impl<'a> LazyRam<'a> {
    /// Whatever has not come by now is missing.
    pub(super) fn new(session: &'a Session<'a>) -> Result<Self, MigrationError> {
        for (ram, written) in session.guest.ram().iter().zip(&session.written) {
            empty_gaps(ram, written)?;
        }
        let blocktime = session.options.postcopy_blocktime;
        let waits = Waits {
            blocktime: blocktime
                .then(|| Blocktime::new(&session.guest.vcpu_threads(), Instant::now())),
            ..Waits::default()
        };
        Ok(Self {
            missing: MissingPages::register(session.guest.ram())?,
            received: &session.received,
            waits: Gate::new(session.control.life(), waits),
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
        let mut waits = self.waits.lock();
        let Waits {
            open,
            over,
            blocktime,
            ..
        } = &mut *waits;
        let now = Instant::now();
        open.retain(|(touch, since)| {
            if touch.fault != page {
                return true;
            }
            let took = now.saturating_duration_since(*since).as_micros();
            if over.len() == KEPT {
                over.pop_front();
            }
            over.push_back(u32::try_from(took).unwrap_or(u32::MAX));
            if let Some(blocktime) = blocktime {
                blocktime.ends(touch.thread, *since, now);
            }
            false
        });
        let is_met = open.is_empty();
        drop(waits);
        if is_met {
            self.waits.notify();
        }
    }

    /// Waits until nothing is waited for any more that was asked for.
    ///
    /// # Errors
    /// [`MigrationError::Closed`] if `over` says before that nothing will come; [`MigrationError::Timeout`] if no page has come
    /// for `patience`; what `waiting` says.
    pub(super) fn wait_until_met(
        &self,
        patience: Duration,
        waiting: &dyn Waiting,
        over: impl Fn() -> bool,
    ) -> Result<(), MigrationError> {
        let goes_on = || match over() {
            true => Err(MigrationError::main_closed()),
            false => waiting.check(),
        };
        let is_met = |waits: &mut Waits| waits.open.is_empty().then_some(());
        loop {
            let before = self.pages.load(Ordering::Relaxed);
            let deadline = Instant::now() + patience;
            if self
                .waits
                .wait_until(Some(deadline), goes_on, is_met)?
                .is_some()
            {
                return Ok(());
            }
            if self.pages.load(Ordering::Relaxed) == before {
                return Err(MigrationError::Timeout {
                    waiting_for: "pages on the preempt channel that the guest has touched"
                        .to_owned(),
                    waited: patience,
                });
            }
        }
    }

    /// Has `ask` ask for each page that the guest touches and that is not there, until the other end of `stop` is closed.
    pub(super) fn tell_faults(
        &self,
        stop: &Stream,
        ask: impl Fn(Fault),
    ) -> Result<(), MigrationError> {
        let mut touches = Vec::new();
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
            self.missing.faults(&mut touches)?;
            for touch in touches.drain(..) {
                if self.wants(touch)? {
                    ask(touch.fault);
                }
            }
        }
    }

    /// Whether a page that is waited for is still to be asked for.
    fn wants(&self, touch: Touch) -> Result<bool, MigrationError> {
        let Fault { block, page } = touch.fault;
        let has_come = || self.received[block].test(page);
        if !has_come() {
            let is_first = self.waits.lock().begin(touch, Instant::now());
            if !has_come() {
                return Ok(is_first);
            }
            self.over(touch.fault);
        }
        // A zero page of precopy has come without memory. Any other is there, and whoever waits for it is woken.
        let _ = self.missing.place(block, page, None)?;
        Ok(false)
    }

    /// Pages that are waited for.
    pub(super) fn open(&self) -> Vec<Fault> {
        let mut pages: Vec<_> = self.waits.lock().open.iter().map(|it| it.0.fault).collect();
        pages.sort_unstable();
        pages.dedup();
        pages
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
        let waits = self.waits.lock();
        PostcopyFigures {
            complete_ms: complete.as_secs_f64() * 1e3,
            pages: self.pages.load(Ordering::Relaxed),
            requests: waits.requests,
            wait_us: percentiles(waits.over.iter().copied().collect()),
            blocktime: waits.blocktime.as_ref().map(Blocktime::figures),
        }
    }
}

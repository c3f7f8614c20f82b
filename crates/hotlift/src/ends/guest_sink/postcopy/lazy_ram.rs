//! Guest RAM whose pages are fetched on access.

use std::time::Duration;

use hotlift_mem::{DirtyBitmap, Fault, MissingPages, PAGE_SIZE, Placed, Touch};
use hotlift_net::transport::Stream;
use rustix::event::{PollFd, PollFlags, poll};

use super::blocktime::Blocktime;
use super::empty_gaps;
use super::waits::Waits;
use crate::ends::guest_sink::sink::GuestSink;
use crate::error::{Channel, MigrationError};
use crate::life::wait_mutex::WaitMutex;
use crate::stream::main_recv::WaitCondition;

/// RAM with missing pages.
pub(crate) struct LazyRam<'a> {
    missing: MissingPages,
    received: &'a [DirtyBitmap],
    pub(super) waits: WaitMutex<Waits>,
}

impl<'a> LazyRam<'a> {
    /// Registers all pages that have not arrived yet as missing.
    pub(super) fn new(sink: &'a GuestSink<'a>) -> Result<Self, MigrationError> {
        for (ram, written) in sink.guest.ram().iter().zip(&sink.written) {
            empty_gaps(ram, written)?;
        }
        let life = sink.control.life();
        let blocktime = sink.options.postcopy.blocktime;
        let blocktime = blocktime.then(|| Blocktime::new(&sink.guest.vcpu_threads(), life.now()));
        Ok(Self {
            missing: MissingPages::register(sink.guest.ram())?,
            received: &sink.received,
            waits: WaitMutex::new(life, Waits::new(blocktime)),
        })
    }

    /// Places a page from the source in guest RAM; `content` is `None` for a zero page.
    ///
    /// # Errors
    /// [`MigrationError::Protocol`] for a page that has already arrived: the guest may have changed it.
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
                got: format!("page {page} of RAM block {block} again"),
                doing: "receiving pages of a running guest",
            })
        };
        if self.received[block].test(page) {
            return twice();
        }
        if self.missing.place(block, page, content)? == Placed::Before {
            return twice();
        }
        // Set after the page is placed: a thread that sees the bit finds the page.
        self.received[block].set(page);
        let mut waits = self.waits.lock();
        waits.page_arrived(Fault { block, page }, self.waits.now());
        if waits.all_arrived() {
            self.waits.notify();
        }
        Ok(())
    }

    /// Waits until all requested pages have arrived.
    ///
    /// # Errors
    /// - [`MigrationError::Closed`] if `over` returns true before all pages have arrived.
    /// - [`MigrationError::Timeout`] if no page arrives for `timeout`.
    /// - The error of `waiting`.
    pub(super) fn wait_until_met(
        &self,
        timeout: Duration,
        waiting: &dyn WaitCondition,
        over: impl Fn() -> bool,
    ) -> Result<(), MigrationError> {
        let keep_waiting = || match over() {
            true => Err(MigrationError::main_closed()),
            false => waiting.check(),
        };
        let all_arrived = |waits: &mut Waits| waits.all_arrived().then_some(());
        let met = self.waits.wait_with_progress(
            timeout,
            |waits| waits.latest,
            keep_waiting,
            all_arrived,
        )?;
        met.ok_or_else(|| MigrationError::Timeout {
            waiting_for: "pages requested by the guest on the preempt channel".to_owned(),
            waited: timeout,
        })
    }

    /// Calls `ask` for each missing page that the guest touches, until the other end of `stop` is closed.
    pub(super) fn report_faults(
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

    /// Returns true if the touched page must be requested.
    fn wants(&self, touch: Touch) -> Result<bool, MigrationError> {
        let Fault { block, page } = touch.fault;
        {
            // Tested under this lock, because a page is marked as received before its waits end.
            let mut waits = self.waits.lock();
            if !self.received[block].test(page) {
                return Ok(waits.begin(touch, self.waits.now()));
            }
        }
        // The page has arrived. If it was a zero page in precopy, it has no memory yet, and is placed now. For any other page,
        // this call wakes the waiting threads.
        let _ = self.missing.place(block, page, None)?;
        Ok(false)
    }

    /// Returns one bit for each of 64 pages of a RAM block: 1 if the page has arrived. The first page is `word` × 64.
    pub(super) fn received_word(&self, block: usize, word: usize) -> u64 {
        let has_arrived = |bit: &u32| {
            let page = usize::try_from(*bit).map_or(usize::MAX, |bit| word * 64 + bit);
            self.received[block].test(page)
        };
        let bits = (0..u64::BITS).filter(has_arrived);
        bits.fold(0, |bits, bit| bits | 1 << bit)
    }

    /// Ends postcopy: missing pages become zero, and all waiting threads wake. Also used for a guest that never ran.
    pub(super) fn end(&self) {
        self.missing.end();
    }
}

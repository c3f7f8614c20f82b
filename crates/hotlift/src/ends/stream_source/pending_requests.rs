//! Pages that the guest at the destination of a postcopy waits for, and pages already sent. `receive` forwards the requests.
//!
//! In postcopy, a source's main channel has requested pages between background pages. Each requested page is forwarded at once
//! and alone; background pages go into batches.

use std::collections::HashSet;
use std::time::{Duration, Instant};

use hotlift_mem::PAGE_SIZE;
use hotlift_methods::MemoryLimit;
use hotlift_wire::RamBlockEntry;
use hotlift_wire::return_path::ReturnMessage;

use crate::ends::page_set::PageSet;
use crate::error::{Channel, MigrationError};
use crate::life::Life;
use crate::life::wait_mutex::WaitMutex;
use crate::stream::main_recv::WaitCondition;

/// Maximum number of awaited pages. A QEMU has one for each thread that may touch RAM. Requested pages beyond this limit are
/// sent like background pages.
const WAITING: usize = 1 << 16;

/// Pages that the peer has requested, and pages sent to it.
pub(crate) struct PendingRequests {
    /// Names and lengths of the RAM blocks.
    blocks: Vec<(String, u64)>,
    state: WaitMutex<State>,
}

struct State {
    /// RAM block that a request without a block name refers to.
    block: Option<usize>,
    /// RAM blocks and byte offsets of requested pages that were not sent yet.
    waiting: HashSet<(usize, u64)>,
    /// Time when the latest requested page was sent.
    latest: Option<Instant>,
    /// Pages sent since the switch, by RAM block.
    sent: Vec<PageSet>,
}

impl PendingRequests {
    /// Creates an empty record for a guest with these RAM blocks. Its bitmaps are charged to `memory`.
    pub(crate) fn new(blocks: &[RamBlockEntry], memory: &MemoryLimit, life: &Life) -> Self {
        let sets = blocks
            .iter()
            .map(|block| PageSet::new(block.used_length, memory));
        let state = State {
            block: None,
            waiting: HashSet::new(),
            latest: None,
            sent: sets.collect(),
        };
        Self {
            blocks: blocks
                .iter()
                .map(|block| (block.name.clone(), block.used_length))
                .collect(),
            state: WaitMutex::new(life, state),
        }
    }

    /// Records a request that is forwarded to the source. Ignores other messages, and requests for invalid pages, which the
    /// source rejects.
    pub(crate) fn record(&self, message: &ReturnMessage<'_>) {
        let mut state = self.state.lock();
        let Some((name, start, length)) = message.requested_pages() else {
            return;
        };
        if let Some(name) = name {
            state.block = self.blocks.iter().position(|(block, _)| block == name);
        }
        let Some(block) = state.block else { return };
        let page = PAGE_SIZE as u64;
        let end = start
            .saturating_add(length.into())
            .min(self.blocks[block].1);
        if !start.is_multiple_of(page) {
            return;
        }
        for offset in (start..end).step_by(PAGE_SIZE) {
            if state.waiting.len() < WAITING && !state.sent[block].contains(offset) {
                state.waiting.insert((block, offset));
            }
        }
    }

    /// Records a page from the source as sent. Returns true if the page was requested.
    ///
    /// # Errors
    /// - [`MigrationError::Protocol`] if the page has already arrived.
    /// - [`MigrationError::MemoryLimit`] if the memory limit is reached.
    pub(crate) fn take(&self, block: usize, offset: u64) -> Result<bool, MigrationError> {
        let asked = self.claim(block, offset)?;
        if asked {
            self.done(block, offset);
        }
        Ok(asked)
    }

    /// Records a page like [`PendingRequests::take`]. But a requested page stays awaited until [`PendingRequests::done`] is
    /// called.
    ///
    /// # Errors
    /// The errors of [`PendingRequests::take`].
    pub(crate) fn claim(&self, block: usize, offset: u64) -> Result<bool, MigrationError> {
        let state = self.state.lock();
        if !state.sent[block].insert(offset)? {
            return Err(MigrationError::Protocol {
                channel: Channel::Main,
                got: format!(
                    "page {offset:#x} of RAM block '{}' again",
                    self.blocks[block].0
                ),
                doing: "forwarding pages in postcopy",
            });
        }
        Ok(state.waiting.contains(&(block, offset)))
    }

    /// Records that a requested page was forwarded.
    pub(crate) fn done(&self, block: usize, offset: u64) {
        let mut state = self.state.lock();
        if state.waiting.remove(&(block, offset)) {
            state.latest = Some(self.state.now());
            self.state.notify();
        }
    }

    /// Records all these pages with [`PendingRequests::take`].
    pub(crate) fn take_all<'p>(
        &self,
        block: usize,
        offsets: impl Iterator<Item = &'p u64>,
    ) -> Result<(), MigrationError> {
        for offset in offsets {
            self.take(block, *offset)?;
        }
        Ok(())
    }

    /// Allocates the memory for all pages now. In postcopy the migration cannot be cancelled any more, so memory must not be
    /// missing then.
    pub(crate) fn reserve(&self) -> Result<(), MigrationError> {
        self.state.lock().sent.iter().try_for_each(PageSet::reserve)
    }

    /// Returns true after the first request.
    pub(crate) fn has_begun(&self) -> bool {
        self.state.lock().block.is_some()
    }

    /// Returns true if this page was requested and has not arrived.
    pub(crate) fn has(&self, block: usize, offset: u64) -> bool {
        self.state.lock().waiting.contains(&(block, offset))
    }

    /// Returns true if all requested pages have arrived.
    pub(crate) fn all_arrived(&self) -> bool {
        self.state.lock().waiting.is_empty()
    }

    /// Waits until all requested pages have arrived; `timeout` limits the time between two arrivals.
    ///
    /// # Errors
    /// [`MigrationError::Timeout`] if no requested page arrives for `timeout`, or the error of `waiting`.
    pub(crate) fn wait_until_met(
        &self,
        timeout: Duration,
        waiting: &dyn WaitCondition,
    ) -> Result<(), MigrationError> {
        let all_arrived = |state: &mut State| state.waiting.is_empty().then_some(());
        let keep_waiting = || waiting.check();
        let met = self.state.wait_with_progress(
            timeout,
            |state| state.latest,
            keep_waiting,
            all_arrived,
        )?;
        met.ok_or_else(|| MigrationError::Timeout {
            waiting_for: format!(
                "{} pages that the guest requested from its source",
                self.state.lock().waiting.len()
            ),
            waited: timeout,
        })
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    struct Never;

    impl WaitCondition for Never {
        fn check(&self) -> Result<(), MigrationError> {
            Err(MigrationError::Cancelled)
        }
    }

    fn pending_requests() -> PendingRequests {
        let block = |name: &str, pages: u64| RamBlockEntry::new(name, pages * 4096);
        let memory = MemoryLimit::new(1 << 20);
        PendingRequests::new(
            &[block("pc.ram", 16), block("vga", 4)],
            &memory,
            &Life::default(),
        )
    }

    #[test]
    fn a_page_request_uses_the_block_named_last() {
        let pending_requests = pending_requests();
        let (start, length) = (4096, 8192);
        pending_requests.record(&ReturnMessage::ReqPages { start, length });
        assert!(!pending_requests.has(0, 4096), "no block was named");
        pending_requests.record(&ReturnMessage::ReqPagesId {
            start: 0,
            length: 4096,
            block: "vga",
        });
        pending_requests.record(&ReturnMessage::ReqPages { start, length });
        assert!(
            pending_requests
                .wait_until_met(Duration::ZERO, &Never)
                .is_err()
        );
        for offset in [0, 4096, 8192] {
            assert!(pending_requests.take(1, offset).unwrap());
            assert!(!pending_requests.take(0, offset).unwrap());
        }
        pending_requests
            .wait_until_met(Duration::ZERO, &Never)
            .unwrap();
    }

    struct Always;

    impl WaitCondition for Always {
        fn check(&self) -> Result<(), MigrationError> {
            Ok(())
        }
    }

    #[test]
    fn a_wait_for_a_missing_page_has_a_limit() {
        let pending_requests = pending_requests();
        assert!(!pending_requests.has_begun());
        pending_requests.record(&ReturnMessage::ReqPagesId {
            start: 0,
            length: 4096,
            block: "pc.ram",
        });
        assert!(
            pending_requests.has_begun()
                && pending_requests.has(0, 0)
                && !pending_requests.has(0, 4096)
        );
        let waited = pending_requests.wait_until_met(Duration::ZERO, &Always);
        assert!(matches!(waited, Err(MigrationError::Timeout { .. })));
        // The timeout counts from the latest page that was requested.
        assert!(!pending_requests.take(0, 4096).unwrap());
        assert_eq!(pending_requests.state.lock().latest, None);
        assert!(pending_requests.take(0, 0).unwrap());
        assert!(pending_requests.state.lock().latest.is_some());
    }

    #[test]
    fn a_page_already_in_transit_is_not_requested_again() {
        let pending_requests = pending_requests();
        assert!(!pending_requests.take(0, 0).unwrap());
        assert!(pending_requests.take(0, 0).is_err(), "it has come before");
        pending_requests.record(&ReturnMessage::ReqPagesId {
            start: 0,
            length: 4096,
            block: "pc.ram",
        });
        pending_requests
            .wait_until_met(Duration::ZERO, &Never)
            .unwrap();
        pending_requests.record(&ReturnMessage::ReqPages {
            start: u64::MAX - 4095,
            length: u32::MAX,
        });
        // Half a page, and pages beyond the end.
        for (start, length) in [(2048, 4096), (16 * 4096, 4096)] {
            pending_requests.record(&ReturnMessage::ReqPages { start, length });
        }
        assert!(pending_requests.all_arrived());
    }
}

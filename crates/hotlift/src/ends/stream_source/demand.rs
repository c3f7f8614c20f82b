//! Which pages the guest on the other side of a postcopy waits for, and which were sent. Requests themselves go on in `receive`.
//!
//! Behind the switch a source's main channel has pages that were asked for between many that were not. The former go on at
//! once and alone, the latter into batches as before.

use std::collections::HashSet;
use std::time::{Duration, Instant};

use hotlift_mem::PAGE_SIZE;
use hotlift_methods::MemoryLimit;
use hotlift_wire::RamBlockEntry;
use hotlift_wire::return_path::ReturnMessage;

use crate::ends::page_set::PageSet;
use crate::error::{Channel, MigrationError};
use crate::life::Life;
use crate::life::gate::Gate;
use crate::stream::main_recv::Waiting;

/// Pages that are waited for at once, at most: a QEMU has one for each thread that may touch RAM. Others go on with the
/// rest.
const WAITING: usize = 1 << 16;

/// What the other side has asked for, and what was sent to it.
pub(crate) struct Demand {
    /// Name and length of the RAM blocks.
    blocks: Vec<(String, u64)>,
    state: Gate<State>,
}

struct State {
    /// RAM block that the next request without a name means.
    block: Option<usize>,
    /// RAM block and byte offset of what was asked for, and has not been sent.
    waiting: HashSet<(usize, u64)>,
    /// When the latest of it was sent.
    latest: Option<Instant>,
    /// What was sent since the switch, by RAM block.
    sent: Vec<PageSet>,
}

impl Demand {
    /// Of a guest with these RAM blocks. What it asks for takes its memory from `memory`.
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
            state: Gate::new(life, state),
        }
    }

    /// Takes note of a request on its way to the source. Any other message, and what is no page of the guest's, is nothing
    /// to it: the source judges that.
    pub(crate) fn note(&self, message: &ReturnMessage<'_>) {
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

    /// A page has come from the source, which is on its way then: whether it was asked for.
    ///
    /// # Errors
    /// If it has come before, or if there is no memory to keep that it was sent.
    pub(crate) fn take(&self, block: usize, offset: u64) -> Result<bool, MigrationError> {
        let asked = self.claim(block, offset)?;
        if asked {
            self.done(block, offset);
        }
        Ok(asked)
    }

    /// The same, but the page is waited for until it is [`Demand::done`].
    ///
    /// # Errors
    /// As of [`Demand::take`].
    pub(crate) fn claim(&self, block: usize, offset: u64) -> Result<bool, MigrationError> {
        let state = self.state.lock();
        if !state.sent[block].insert(offset)? {
            return Err(MigrationError::Protocol {
                channel: Channel::Main,
                got: format!(
                    "page {offset:#x} of RAM block '{}' once more",
                    self.blocks[block].0
                ),
                doing: "passing on pages in postcopy",
            });
        }
        Ok(state.waiting.contains(&(block, offset)))
    }

    /// A page that was asked for is on its way.
    pub(crate) fn done(&self, block: usize, offset: u64) {
        let mut state = self.state.lock();
        if state.waiting.remove(&(block, offset)) {
            state.latest = Some(self.state.now());
            self.state.notify();
        }
    }

    /// The same of all these pages.
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

    /// Takes the memory for all pages that may be sent: later it would be missing when nothing can be called off.
    pub(crate) fn reserve(&self) -> Result<(), MigrationError> {
        self.state.lock().sent.iter().try_for_each(PageSet::reserve)
    }

    /// Whether anything was asked for.
    pub(crate) fn has_begun(&self) -> bool {
        self.state.lock().block.is_some()
    }

    /// Whether this page was asked for, and has not come.
    pub(crate) fn has(&self, block: usize, offset: u64) -> bool {
        self.state.lock().waiting.contains(&(block, offset))
    }

    /// Whether everything that was asked for has come.
    pub(crate) fn is_met(&self) -> bool {
        self.state.lock().waiting.is_empty()
    }

    /// Waits until everything that was asked for has come, as long as nothing comes for no longer than `patience`.
    ///
    /// # Errors
    /// [`MigrationError::Timeout`]; what `waiting` says.
    pub(crate) fn wait_until_met(
        &self,
        patience: Duration,
        waiting: &dyn Waiting,
    ) -> Result<(), MigrationError> {
        let is_met = |state: &mut State| state.waiting.is_empty().then_some(());
        let goes_on = || waiting.check();
        let met = self
            .state
            .wait_patiently(patience, |state| state.latest, goes_on, is_met)?;
        met.ok_or_else(|| MigrationError::Timeout {
            waiting_for: format!(
                "{} pages that the guest asked its source for",
                self.state.lock().waiting.len()
            ),
            waited: patience,
        })
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    struct Never;

    impl Waiting for Never {
        fn check(&self) -> Result<(), MigrationError> {
            Err(MigrationError::Cancelled)
        }
    }

    fn demand() -> Demand {
        let block = |name: &str, pages: u64| RamBlockEntry::new(name, pages * 4096);
        let memory = MemoryLimit::new(1 << 20);
        Demand::new(
            &[block("pc.ram", 16), block("vga", 4)],
            &memory,
            &Life::default(),
        )
    }

    #[test]
    fn a_page_is_asked_for_by_the_block_that_was_named_last() {
        let demand = demand();
        let (start, length) = (4096, 8192);
        demand.note(&ReturnMessage::ReqPages { start, length });
        assert!(!demand.has(0, 4096), "no block was named");
        demand.note(&ReturnMessage::ReqPagesId {
            start: 0,
            length: 4096,
            block: "vga",
        });
        demand.note(&ReturnMessage::ReqPages { start, length });
        assert!(demand.wait_until_met(Duration::ZERO, &Never).is_err());
        for offset in [0, 4096, 8192] {
            assert!(demand.take(1, offset).unwrap());
            assert!(!demand.take(0, offset).unwrap());
        }
        demand.wait_until_met(Duration::ZERO, &Never).unwrap();
    }

    struct Always;

    impl Waiting for Always {
        fn check(&self) -> Result<(), MigrationError> {
            Ok(())
        }
    }

    #[test]
    fn a_page_that_never_comes_is_not_waited_for_for_ever() {
        let demand = demand();
        assert!(!demand.has_begun());
        demand.note(&ReturnMessage::ReqPagesId {
            start: 0,
            length: 4096,
            block: "pc.ram",
        });
        assert!(demand.has_begun() && demand.has(0, 0) && !demand.has(0, 4096));
        let waited = demand.wait_until_met(Duration::ZERO, &Always);
        assert!(matches!(waited, Err(MigrationError::Timeout { .. })));
        // Patience lasts from the latest page that was asked for.
        assert!(!demand.take(0, 4096).unwrap());
        assert_eq!(demand.state.lock().latest, None);
        assert!(demand.take(0, 0).unwrap());
        assert!(demand.state.lock().latest.is_some());
    }

    #[test]
    fn a_page_that_is_on_its_way_is_not_waited_for() {
        let demand = demand();
        assert!(!demand.take(0, 0).unwrap());
        assert!(demand.take(0, 0).is_err(), "it has come before");
        demand.note(&ReturnMessage::ReqPagesId {
            start: 0,
            length: 4096,
            block: "pc.ram",
        });
        demand.wait_until_met(Duration::ZERO, &Never).unwrap();
        demand.note(&ReturnMessage::ReqPages {
            start: u64::MAX - 4095,
            length: u32::MAX,
        });
        // Half a page, and pages behind the end.
        for (start, length) in [(2048, 4096), (16 * 4096, 4096)] {
            demand.note(&ReturnMessage::ReqPages { start, length });
        }
        assert!(demand.is_met());
    }
}

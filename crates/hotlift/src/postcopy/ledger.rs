//! What one connection carries: which pages are sent, and which are asked for.

use hotlift_mem::{DirtyBitmap, PAGE_SIZE};
use hotlift_wire::RamBlockEntry;
use hotlift_wire::return_path::ReturnMessage;

use super::requests::Requests;
use crate::error::{Channel, MigrationError};

/// Kept by the thread that listens, and by those that send.
pub(crate) struct Ledger {
    blocks: Vec<RamBlockEntry>,
    /// A bit a page of each RAM block: it was sent, or is on its way.
    sent: Vec<DirtyBitmap>,
    /// The same: it was asked for.
    asked: Vec<DirtyBitmap>,
    pub requests: Requests,
}

impl Ledger {
    /// Nothing is sent of these RAM blocks.
    pub(crate) fn new(blocks: &[RamBlockEntry]) -> Self {
        let page_size = PAGE_SIZE as u64;
        let pages = |block: &RamBlockEntry| usize::try_from(block.used_length / page_size);
        let bitmaps = || {
            let pages = blocks.iter().map(|block| pages(block).unwrap_or(0));
            pages.map(DirtyBitmap::new).collect()
        };
        Self {
            blocks: blocks.to_vec(),
            sent: bitmaps(),
            asked: bitmaps(),
            requests: Requests::default(),
        }
    }

    /// The RAM blocks.
    pub(crate) fn blocks(&self) -> &[RamBlockEntry] {
        &self.blocks
    }

    /// Pages of a RAM block.
    pub(crate) fn pages(&self, block: usize) -> usize {
        self.sent[block].pages()
    }

    /// The destination has these pages of a RAM block, a bit a page, the lowest first.
    pub(crate) fn has(&self, block: usize, bits: &[u8]) {
        let words = bits.as_chunks::<8>().0.iter();
        let words: Vec<u64> = words.map(|word| u64::from_le_bytes(*word)).collect();
        self.sent[block].or_words(0, &words);
    }

    /// Whether this page was sent, or is on its way.
    pub(crate) fn is_sent(&self, block: usize, page: usize) -> bool {
        self.sent[block].test(page)
    }

    /// Whether it is the caller who sends this page. Who asks for a page that is claimed waits for that.
    pub(crate) fn claim(&self, block: usize, page: usize) -> bool {
        self.sent[block].set(page)
    }

    /// Takes a message that is a request; `current` is the RAM block that the last one was for.
    pub(crate) fn note(
        &self,
        current: &mut Option<usize>,
        message: &ReturnMessage<'_>,
    ) -> Result<(), MigrationError> {
        let (start, length) = match *message {
            ReturnMessage::ReqPagesId {
                start,
                length,
                block,
            } => {
                *current = self.blocks.iter().position(|one| one.name == block);
                (start, length)
            }
            ReturnMessage::ReqPages { start, length } => (start, length),
            _ => return Ok(()),
        };
        let block = current.ok_or_else(|| MigrationError::Protocol {
            channel: Channel::Main,
            got: "a request for pages of a RAM block that the VM does not have".to_owned(),
            doing: "listening to the destination",
        })?;
        let page_size = PAGE_SIZE as u64;
        let end = start.saturating_add(length.into()).div_ceil(page_size);
        for page in start / page_size..end {
            let number = usize::try_from(page).unwrap_or(usize::MAX);
            if number >= self.pages(block) {
                break;
            }
            // Each page waits once, however often it is asked for.
            if !self.is_sent(block, number) && self.asked[block].set(number) {
                self.requests.add(block, number);
            }
        }
        Ok(())
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    fn ledger() -> Ledger {
        let block = |name| RamBlockEntry::new(name, 8 * PAGE_SIZE as u64);
        Ledger::new(&[block("a"), block("b")])
    }

    fn ask(block: Option<&str>, start: u64, length: u32) -> ReturnMessage<'_> {
        match block {
            Some(block) => ReturnMessage::ReqPagesId {
                start,
                length,
                block,
            },
            None => ReturnMessage::ReqPages { start, length },
        }
    }

    #[test]
    fn a_page_waits_once_and_not_at_all_if_it_is_on_its_way() {
        let ledger = ledger();
        assert!(ledger.claim(1, 2) && !ledger.claim(1, 2));
        let mut current = None;
        ledger
            .note(&mut current, &ask(Some("b"), 4096, 8192))
            .unwrap();
        ledger.note(&mut current, &ask(None, 4096, 4096)).unwrap();
        // Past the end: there is nothing to wait for.
        ledger
            .note(&mut current, &ask(None, 1 << 40, u32::MAX))
            .unwrap();
        ledger.requests.end();
        let request = ledger.requests.next().unwrap();
        assert_eq!((request.block, request.page), (1, 1));
        assert_eq!(ledger.requests.next(), None);
    }

    #[test]
    fn a_request_for_no_block_of_the_guest_is_refused() {
        let mut current = None;
        for message in [ask(None, 0, 4096), ask(Some("c"), 0, 4096)] {
            assert!(ledger().note(&mut current, &message).is_err());
        }
    }
}

//! Sends each page once, to whoever asks for it first: a request, or the background.

use std::sync::Mutex;
use std::sync::atomic::{AtomicU64, Ordering};

use hotlift_mem::{DirtyBitmap, PAGE_SIZE};

use crate::cpu_limit::CpuShare;
use crate::ends::file::{BlockFile, Blocks, Entry, Shares};
use crate::error::MigrationError;
use crate::ops::lazy::Shared;
use crate::ops::lazy::requests::Request;
use crate::stream::main_send::{MainSend, PageRecords};
use crate::threads::lock;

/// Pages that a thread of the background takes at a time: 1 MiB.
const SHARE: usize = 256;

/// The same of a file on another host, where each share costs a round trip: 4 MiB.
const FAR_SHARE: usize = 1024;

/// The same of what the guest wrote last: one page each of so many blocks.
const WRITTEN: usize = 32;

/// Which pages are sent.
pub(super) struct Sender {
    /// A bit a page of each RAM block: it was sent, or is on its way.
    sent: Vec<DirtyBitmap>,
    /// The same: it was asked for.
    asked: Vec<DirtyBitmap>,
    normal: AtomicU64,
    zero: AtomicU64,
    /// What the background has taken.
    shares: Shares,
    /// What the guest has written last, the latest at the end; `None` before the first thread has looked for it.
    written_last: Mutex<Option<Vec<(usize, usize)>>>,
}

impl Sender {
    pub(super) fn new(file: &BlockFile) -> Self {
        let bitmaps = || {
            let blocks = 0..file.blocks();
            blocks
                .map(|block| DirtyBitmap::new(file.pages(block)))
                .collect()
        };
        Self {
            sent: bitmaps(),
            asked: bitmaps(),
            normal: AtomicU64::new(0),
            zero: AtomicU64::new(0),
            shares: Shares::of(file.remote().map_or(SHARE, |_| FAR_SHARE)),
            written_last: Mutex::new(None),
        }
    }

    /// The destination has these pages of a RAM block, a bit a page, the lowest first.
    pub(super) fn has(&self, block: usize, bits: &[u8]) {
        let words = bits.as_chunks::<8>().0.iter();
        let words: Vec<u64> = words.map(|word| u64::from_le_bytes(*word)).collect();
        self.sent[block].or_words(0, &words);
    }

    /// Pages with content and zero pages that were sent.
    pub(super) fn counts(&self) -> (u64, u64) {
        let read = |count: &AtomicU64| count.load(Ordering::Relaxed);
        (read(&self.normal), read(&self.zero))
    }

    /// The guest asks for this page; whether it is not on its way, and has not been asked for.
    pub(super) fn is_asked_for(&self, block: usize, page: usize) -> bool {
        !self.sent[block].test(page) && self.asked[block].set(page)
    }

    /// Whether it is the caller who sends this page.
    fn claim(&self, block: usize, page: usize) -> bool {
        self.sent[block].set(page)
    }

    /// The next pages that no thread has taken, and their RAM block.
    fn next_share(&self) -> Option<(usize, std::ops::Range<usize>)> {
        self.shares.next(self.sent.iter().map(DirtyBitmap::pages))
    }
}

/// Pages of one block of the file that are to be sent.
#[derive(Default)]
struct Picked {
    offsets: Vec<u64>,
    content: Vec<u8>,
}

impl Shared<'_> {
    fn blocks(&self) -> Result<Blocks<'_>, MigrationError> {
        let mut blocks = Blocks::new(self.file.seed(), &self.memory, self.control);
        blocks.prepare(
            self.file
                .contents()
                .shares
                .iter()
                .map(|share| share.method.as_str()),
        )?;
        Ok(blocks)
    }

    /// What the thread does that answers requests.
    pub(super) fn answer_requests(&self) -> Result<(), MigrationError> {
        let mut blocks = self.blocks()?;
        let mut picked = Picked::default();
        while let Some(request) = self.requests.next() {
            let answered = self.answer(&request, &mut blocks, &mut picked);
            if answered.is_err() {
                self.requests.done(&request, false);
            }
            self.unless_damaged(answered)?;
        }
        Ok(())
    }

    fn answer(
        &self,
        request: &Request,
        blocks: &mut Blocks<'_>,
        picked: &mut Picked,
    ) -> Result<(), MigrationError> {
        let Request { block, page, .. } = *request;
        let offset = (page * PAGE_SIZE) as u64;
        let entry = self.file.entry(block, page)?;
        if let Some(entry) = entry {
            // Before the page is claimed: one that cannot be read must not look sent.
            self.load(blocks, entry, block, page)?;
        }
        if !self.sender.claim(block, page) {
            self.requests.done(request, false);
            return Ok(());
        }
        let mut main = self.main.take_urgently();
        let Some(entry) = entry else {
            self.sender.zero.fetch_add(1, Ordering::Relaxed);
            let sent = write(&mut main, block, &[offset], &[], &[]);
            self.requests.done(request, true);
            return sent;
        };
        self.sender.normal.fetch_add(1, Ordering::Relaxed);
        write(&mut main, block, &[], &[offset], blocks.page(entry.place))?;
        self.requests.done(request, true);
        // Its neighbours, which are decoded: a guest that needs one page soon needs those around it.
        self.pick(blocks, entry, block, picked)?;
        write(&mut main, block, &[], &picked.offsets, &picked.content)
    }

    /// Keeps what is wrong with a part of the file: the guest waits for the pages in there, and gets all others.
    fn unless_damaged(&self, outcome: Result<(), MigrationError>) -> Result<(), MigrationError> {
        match outcome {
            Err(MigrationError::File(error)) if error.is_final() => Err(error.into()),
            Err(error @ (MigrationError::File(_) | MigrationError::Method { .. })) => {
                self.damaged.keep(error);
                Ok(())
            }
            outcome => outcome,
        }
    }

    fn load(
        &self,
        blocks: &mut Blocks<'_>,
        entry: Entry,
        block: usize,
        page: usize,
    ) -> Result<(), MigrationError> {
        let read = |into: &mut [u8], position| self.file.read_at(into, position);
        blocks.load(entry, (block, page as u64), read)
    }

    /// Claims the pages of the block that was read last which nobody has sent.
    fn pick(
        &self,
        blocks: &Blocks<'_>,
        entry: Entry,
        block: usize,
        picked: &mut Picked,
    ) -> Result<(), MigrationError> {
        picked.offsets.clear();
        picked.content.clear();
        for (number, content) in blocks.pages() {
            let page = usize::try_from(number).unwrap_or(usize::MAX);
            // What the guest has written since is in another block.
            let is_last = self
                .file
                .entry(block, page)?
                .is_some_and(|last| last.position == entry.position);
            if is_last && self.sender.claim(block, page) {
                picked.offsets.push(number * PAGE_SIZE as u64);
                picked.content.extend_from_slice(content);
            }
        }
        self.sender
            .normal
            .fetch_add(picked.offsets.len() as u64, Ordering::Relaxed);
        Ok(())
    }

    /// What the threads do that send what nobody has asked for.
    pub(super) fn send_the_rest(&self) -> Result<(), MigrationError> {
        let mut blocks = self.blocks()?;
        let mut picked = Picked::default();
        let budget = self.control.cpu_budget(self.options);
        let mut cpu = CpuShare::new(&budget);
        // A block that could not be used is not tried again for each of its pages.
        let mut unusable = None;
        let mut send =
            |blocks: &mut Blocks<'_>, block: usize, page: usize| -> Result<(), MigrationError> {
                if self.is_over() || self.sender.sent[block].test(page) {
                    return Ok(());
                }
                let Some(entry) = self.file.entry(block, page)? else {
                    return Ok(());
                };
                if unusable == Some(entry.position) {
                    return Ok(());
                }
                unusable = Some(entry.position);
                self.load(blocks, entry, block, page)?;
                unusable = None;
                // Claimed only now that they can be written: who asks for a page that is claimed waits for that.
                let mut main = self.main.take_after_urgent();
                self.pick(blocks, entry, block, &mut picked)?;
                write(&mut main, block, &[], &picked.offsets, &picked.content)?;
                drop(main);
                self.pace.wait(picked.content.len(), &self.sleeps);
                cpu.spend(&self.sleeps);
                Ok(())
            };
        while let Some(share) = self.next_share()? {
            if self.is_over() {
                break;
            }
            let missing = share.iter().copied();
            let missing = missing.filter(|(block, page)| !self.sender.sent[*block].test(*page));
            self.file.read_ahead(&mut blocks, missing)?;
            for (block, page) in share {
                self.unless_damaged(send(&mut blocks, block, page))?;
            }
        }
        Ok(())
    }

    /// The next pages that no thread has taken: what the guest wrote last, before others know of it, and then all.
    fn next_share(&self) -> Result<Option<Vec<(usize, usize)>>, MigrationError> {
        let mut known = lock(&self.sender.written_last);
        if known.is_none() {
            let from = self.file.contents().written_last;
            let mut pages = Vec::new();
            if from < u64::MAX {
                for block in 0..self.file.blocks() {
                    for page in 0..self.file.pages(block) {
                        let entry = self.file.entry(block, page)?;
                        let entry = entry.filter(|entry| entry.position >= from);
                        pages.extend(entry.map(|entry| (entry.position, block, page)));
                    }
                }
            }
            pages.sort_unstable();
            pages.dedup_by_key(|(position, _, _)| *position);
            let places = pages.into_iter().map(|(_, block, page)| (block, page));
            *known = Some(places.collect());
        }
        if let Some(written) = known.as_mut().filter(|written| !written.is_empty()) {
            let mut last = written.split_off(written.len().saturating_sub(WRITTEN));
            last.reverse();
            return Ok(Some(last));
        }
        drop(known);
        let share = self.sender.next_share();
        Ok(share.map(|(block, pages)| pages.map(|page| (block, page)).collect()))
    }
}

/// A section of RAM with these pages; none if there are none.
fn write(
    main: &mut MainSend,
    block: usize,
    zero: &[u64],
    normal: &[u64],
    content: &[u8],
) -> Result<(), MigrationError> {
    if zero.is_empty() && normal.is_empty() {
        return Ok(());
    }
    main.pages(PageRecords {
        block,
        zero,
        normal,
        content,
    })
}

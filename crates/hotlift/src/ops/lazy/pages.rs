//! Pages of a save file. For each requested page, decodes the whole block of the file that contains the page.

use std::ops::Range;
use std::sync::Mutex;

use hotlift_methods::MemoryLimit;

use crate::control::Control;
use crate::ends::file::{BlockFile, Blocks, Entry, LostPages, RemoteReader, Shares, is_of_a_part};
use crate::error::MigrationError;
use crate::life::failure::Failure;
use crate::lock::lock;
use crate::options::Options;
use crate::postcopy::{Batch, Ledger, Pages, Place, PrefetchQueue, Reader};

/// Pages that a background thread takes at a time from a local file: 256 KiB. A requested page near them waits no longer than
/// these pages take.
const SHARE: usize = 64;

/// Pages that a background thread takes at a time from a file on another host: 4 MiB. Each read then costs a round trip.
const FAR_SHARE: usize = 1024;

/// Blocks of the file that a background thread takes at a time, of the blocks with the pages that the guest wrote last.
const WRITTEN: usize = 32;

/// Callback that receives each damaged part of a file.
type OnLost<'a> = &'a (dyn Fn(&LostPages) + Sync);

/// A save file, as a source of requested pages and of background pages.
pub(super) struct FilePages<'a> {
    file: &'a BlockFile,
    control: &'a Control,
    /// Called for each damaged part of the file. Set if damaged pages are sent as zero.
    on_lost: Option<OnLost<'a>>,
    memory: MemoryLimit,
    /// Error of the first damaged part of the file. The other parts are still sent.
    pub damaged: Failure,
    near: PrefetchQueue,
    /// Position of the background in RAM: which pages the background threads have taken.
    shares: Shares,
    /// Pages that the guest wrote last, one for each block of the file. The latest is at the end. `None` before the search for
    /// them.
    written_last: Mutex<Option<Vec<Place>>>,
}

impl<'a> FilePages<'a> {
    pub(super) fn new(
        file: &'a BlockFile,
        options: &Options,
        control: &'a Control,
        on_lost: Option<OnLost<'a>>,
    ) -> Self {
        Self {
            file,
            control,
            on_lost,
            memory: options.limits.memory(0),
            damaged: Failure::default(),
            near: PrefetchQueue::new((0..file.blocks()).map(|block| file.pages(block))),
            shares: Shares::of(file.remote().map_or(SHARE, |_| FAR_SHARE)),
            written_last: Mutex::new(None),
        }
    }

    /// Returns the damaged pages, which are zero in the guest.
    pub(super) fn lost(&self) -> Vec<LostPages> {
        self.file.lost()
    }

    /// Returns true while the connection to the file's server is lost and is being restored.
    pub(super) fn is_lost(&self) -> bool {
        self.file.remote().is_some_and(RemoteReader::is_lost)
    }

    /// Returns the next pages of `written_last`, the latest first; `None` if there are no more. The first caller searches the
    /// file for these pages, and other callers wait.
    fn next_written_last(&self) -> Result<Option<Vec<Place>>, MigrationError> {
        let mut known = lock(&self.written_last);
        if known.is_none() {
            let from = self.file.contents().written_last;
            let mut pages = Vec::new();
            if from < u64::MAX {
                for block in 0..self.file.blocks() {
                    for page in 0..self.file.pages(block) {
                        let entry = match self.file.entry(block, page) {
                            // The same error occurs again when the background reads all of RAM.
                            Err(error) if !error.is_final() => None,
                            entry => entry?,
                        };
                        let entry = entry.filter(|entry| entry.position >= from);
                        let position = entry.map(|entry| entry.position);
                        // Most pages of a block are adjacent in RAM: this check shortens the list.
                        let last = pages.last().map(|(last, _, _)| *last);
                        let position = position.filter(|position| last != Some(*position));
                        pages.extend(position.map(|position| (position, block, page)));
                    }
                }
            }
            pages.sort_unstable();
            pages.dedup_by_key(|(position, _, _)| *position);
            let places = pages.into_iter().map(|(_, block, page)| (block, page));
            *known = Some(places.collect());
        }
        let written = known.as_mut().filter(|written| !written.is_empty());
        Ok(written.map(|written| {
            let mut last = written.split_off(written.len().saturating_sub(WRITTEN));
            last.reverse();
            last
        }))
    }
}

impl Pages for FilePages<'_> {
    type Reader<'p>
        = FileReader<'p>
    where
        Self: 'p;

    fn reader(&self) -> Result<FileReader<'_>, MigrationError> {
        let mut blocks = Blocks::new(self.file.seed(), &self.memory, self.control);
        let shares = self.file.contents().shares.iter();
        blocks.prepare(shares.map(|share| share.method.as_str()))?;
        Ok(FileReader {
            file: self.file,
            on_lost: self.on_lost,
            blocks,
            loaded: None,
            unusable: None,
        })
    }

    /// Returns the next pages for the background; `None` after the last page. The order:
    ///
    /// - pages that the guest wrote last
    /// - pages near requested pages
    /// - all of RAM, from the lowest page on
    fn next(&self) -> Result<Option<Vec<Place>>, MigrationError> {
        if let Some(written) = self.next_written_last()? {
            return Ok(Some(written));
        }
        if let near @ Some(_) = self.near.next() {
            return Ok(near);
        }
        let blocks = 0..self.file.blocks();
        let share = self.shares.next(blocks.map(|block| self.file.pages(block)));
        Ok(share.map(|(block, pages)| pages.map(|page| (block, page)).collect()))
    }

    fn record_request(&self, block: usize, page: usize) {
        self.near.record_request(block, page);
    }

    fn abandon(&self) {
        if let Some(remote) = self.file.remote() {
            remote.cancel_reads();
        }
    }

    /// Records an error of a damaged part of the file, and returns success: only the pages in that part are not sent. Returns
    /// any other error.
    fn unless_damaged(&self, outcome: Result<(), MigrationError>) -> Result<(), MigrationError> {
        match outcome {
            Err(error) if is_of_a_part(&error) => {
                self.damaged.keep(error);
                Ok(())
            }
            outcome => outcome,
        }
    }
}

/// Reads and decodes blocks of the file for one thread.
pub(super) struct FileReader<'a> {
    file: &'a BlockFile,
    on_lost: Option<OnLost<'a>>,
    blocks: Blocks<'a>,
    /// Index of the RAM block, and entry of the file's block that was read last.
    loaded: Option<(usize, Entry)>,
    /// Position of the last damaged block, so that it is not read again for each of its pages.
    unusable: Option<u64>,
}

impl FileReader<'_> {
    /// Decodes the block of the file that contains a page. Returns the page's index in the block. Returns `None` for a zero
    /// page, and for a damaged page that becomes zero.
    fn find(&mut self, block: usize, page: usize) -> Result<Option<usize>, MigrationError> {
        let found = match self.file.entry(block, page) {
            Ok(Some(entry)) => self.load(entry, block, page).map(|()| Some(entry.place)),
            Ok(None) => Ok(None),
            Err(error) => Err(error.into()),
        };
        found.or_else(|error| {
            let lost = self.file.skip_lost_pages((block, page), error)?;
            if let (Some(lost), Some(on_lost)) = (lost, self.on_lost) {
                on_lost(&lost);
            }
            Ok(None)
        })
    }

    /// Adds the pages of the block that was read last to `batch`. Omits outdated pages.
    fn add_loaded(&self, batch: &mut Batch) -> Result<(), MigrationError> {
        let Some((block, entry)) = self.loaded else {
            return Ok(());
        };
        for (number, content) in self.blocks.pages() {
            if self.is_current(block, number, entry)? {
                batch.add(usize::try_from(number).unwrap_or(usize::MAX), content);
            }
        }
        Ok(())
    }

    /// Returns true if the block of `entry` has the final content of `page`. If the guest wrote the page again, a later block
    /// has it.
    fn is_current(&self, block: usize, page: u64, entry: Entry) -> Result<bool, MigrationError> {
        let page = usize::try_from(page).unwrap_or(usize::MAX);
        let last = self.file.entry(block, page)?;
        Ok(last.is_some_and(|last| last.position == entry.position))
    }

    fn load(&mut self, entry: Entry, block: usize, page: usize) -> Result<(), MigrationError> {
        self.unusable = Some(entry.position);
        let read = |into: &mut [u8], position| self.file.read_at(into, position);
        self.blocks.load(entry, (block, page as u64), read)?;
        self.unusable = None;
        self.loaded = Some((block, entry));
        Ok(())
    }
}

impl Reader for FileReader<'_> {
    fn page(&mut self, block: usize, page: usize) -> Result<Option<&[u8]>, MigrationError> {
        let place = self.find(block, page)?;
        Ok(place.map(|place| self.blocks.page(place).as_slice()))
    }

    /// Adds pages in the order of the file. A block can contain pages that are not adjacent in RAM; in this order each block is
    /// decoded once.
    fn add_all(
        &mut self,
        block: usize,
        pages: Range<usize>,
        batch: &mut Batch,
    ) -> Result<(), MigrationError> {
        // Most requests are for one page: no need to look up its place twice.
        if pages.len() == 1 {
            return self.add(block, pages.start, batch);
        }
        let places = pages.clone().map(|page| (block, page));
        self.file.read_ahead(&mut self.blocks, places)?;
        // An error of the index is ignored here: it occurs again when the page is read.
        let entry = |page| self.file.entry(block, page).ok().flatten();
        let mut pages: Vec<_> = pages
            .map(|page| (entry(page).map(|entry| entry.position), page))
            .collect();
        pages.sort_unstable();
        let mut pages = pages.into_iter();
        pages.try_for_each(|(_, page)| self.add(block, page, batch))
    }

    /// Adds the other pages of the decoded block: a guest that needs one page soon needs the pages around it.
    fn follow(&mut self, batch: &mut Batch) -> Result<(), MigrationError> {
        self.add_loaded(batch)
    }

    fn read_ahead(&mut self, share: &[Place], ledger: &Ledger) -> Result<(), MigrationError> {
        // Excludes huge pages: `add_all` reads ahead all parts of a huge page.
        let missing = share.iter().copied().filter(|(block, page)| {
            !ledger.has_huge_pages(*block) && !ledger.is_sent(*block, *page)
        });
        Ok(self.file.read_ahead(&mut self.blocks, missing)?)
    }

    /// Returns true if the background must send the page. Returns false for a zero page, and for a page in a damaged block.
    fn prepare(&mut self, block: usize, page: usize, _: &Ledger) -> Result<bool, MigrationError> {
        if let (Some(unusable), Ok(Some(entry))) = (self.unusable, self.file.entry(block, page))
            && entry.position == unusable
        {
            return Ok(false);
        }
        Ok(self.find(block, page)?.is_some())
    }

    fn take(&mut self, ledger: &Ledger, batch: &mut Batch) -> Result<(), MigrationError> {
        let Some((block, entry)) = self.loaded else {
            return Ok(());
        };
        let mut are_current = true;
        for (number, _) in self.blocks.pages() {
            are_current &= self.is_current(block, number, entry)?;
        }
        match are_current {
            // The decoded pages can be moved out of the reader, because the background reads each block once.
            true => {
                self.loaded = None;
                self.blocks.take_pages(batch);
            }
            false => self.add_loaded(batch)?,
        }
        batch.claim(block, ledger);
        Ok(())
    }
}

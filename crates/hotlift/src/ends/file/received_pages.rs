//! Tracks which pages of a stream have arrived. A save with missing pages fails.

use std::sync::Mutex;

use hotlift_mem::{DirtyBitmap, PAGE_SIZE};
use hotlift_methods::MemoryLimit;
use hotlift_wire::RamBlockEntry;
use hotlift_wire::main_channel::PluggableMemory;

use super::FileError;
use crate::error::{Channel, MigrationError};
use crate::lock::lock;
use crate::pipe::batch::Batch;
use crate::pipe::settings::UnusedRam;

/// Number of pages in a part: 128 MiB of RAM, whose bitmap has 4 KiB. The bitmap exists only while the part is incomplete. A
/// source sends RAM in order, so only few bitmaps exist at a time.
const PART: u64 = 1 << 15;

const PART_BYTES: usize = 4 << 10;

/// Pages received so far, with content or as zero pages.
pub(super) struct ReceivedPages {
    blocks: Vec<Block>,
    memory: MemoryLimit,
}

struct Block {
    name: String,
    length: u64,
    parts: Vec<Mutex<Part>>,
}

/// State of a part: no page, some pages, or all pages received.
enum Part {
    None,
    Some {
        arrived: DirtyBitmap,
        /// Number of missing pages.
        missing: u64,
    },
    All,
}

impl Block {
    /// Returns the number of pages of a part.
    fn pages(&self, part: usize) -> u64 {
        let before = PART * part as u64;
        let all = self.length.div_ceil(PAGE_SIZE as u64);
        all.saturating_sub(before).min(PART)
    }

    /// Returns true if all plugged pages of this block have arrived. `memory` is the virtio-mem device of the block.
    fn has_all_of(&self, memory: &PluggableMemory) -> bool {
        let offset = |page: u64| page * PAGE_SIZE as u64;
        (0..).zip(&self.parts).all(|(index, part)| {
            let first = PART * index as u64;
            let is_unplugged = |page: u64| !memory.is_plugged(offset(first + page));
            match &*lock(part) {
                Part::All => true,
                Part::None => {
                    let step = (memory.block_size / PAGE_SIZE as u64).max(1);
                    // A block of the device may begin before this part.
                    let mut pages = (0..self.pages(index))
                        .step_by(usize::try_from(step.min(PART)).unwrap_or(1));
                    pages.all(is_unplugged)
                }
                Part::Some { arrived, .. } => {
                    (0..arrived.pages()).all(|page| arrived.test(page) || is_unplugged(page as u64))
                }
            }
        })
    }

    /// Returns the number of missing bytes, and the byte offset of the first missing page; `None` if no page is missing.
    fn missing(&self) -> (u64, Option<u64>) {
        let (mut count, mut first) = (0, None);
        for (index, part) in self.parts.iter().enumerate() {
            let (missing, place) = match &*lock(part) {
                Part::All => continue,
                Part::None => (self.pages(index), 0),
                Part::Some { arrived, missing } => {
                    let place = (0..arrived.pages()).find(|page| !arrived.test(*page));
                    (*missing, place.unwrap_or(0) as u64)
                }
            };
            count += missing;
            first.get_or_insert(PART * index as u64 + place);
        }
        let bytes = |pages: u64| pages * PAGE_SIZE as u64;
        (bytes(count), first.map(bytes))
    }
}

impl ReceivedPages {
    /// Creates the record for these RAM blocks; no page has arrived yet. The bitmaps are charged to `memory`.
    pub fn new(blocks: &[RamBlockEntry], memory: &MemoryLimit) -> Self {
        let part_length = PART * PAGE_SIZE as u64;
        let blocks = blocks.iter().map(|block| Block {
            name: block.name.clone(),
            length: block.used_length,
            parts: (0..block.used_length.div_ceil(part_length))
                .map(|_| Mutex::new(Part::None))
                .collect(),
        });
        Self {
            blocks: blocks.collect(),
            memory: memory.clone(),
        }
    }

    /// Records the pages of a batch as received. They must be within their RAM block.
    ///
    /// # Errors
    /// Returns an error if the memory limit is reached.
    pub fn record(&self, batch: &Batch) -> Result<(), MigrationError> {
        let block = &self.blocks[batch.block];
        let page = |offset: &u64| offset / PAGE_SIZE as u64;
        let are_in_one = |a: &u64, b: &u64| page(a) / PART == page(b) / PART;
        for offsets in [&batch.normal, &batch.zero] {
            for run in offsets.chunk_by(are_in_one) {
                let index = usize::try_from(page(&run[0]) / PART).unwrap_or(usize::MAX);
                self.note_in(block, index, run.iter().map(|offset| page(offset) % PART))?;
            }
        }
        Ok(())
    }

    /// Records pages of one part.
    fn note_in(
        &self,
        block: &Block,
        index: usize,
        pages: impl Iterator<Item = u64>,
    ) -> Result<(), MigrationError> {
        let Some(part) = block.parts.get(index) else {
            return Ok(());
        };
        let mut part = lock(part);
        if matches!(*part, Part::None) {
            let taken = self.memory.take(PART_BYTES);
            taken.map_err(|source| MigrationError::memory(Channel::Main, source))?;
            let missing = block.pages(index);
            let arrived = DirtyBitmap::new(usize::try_from(missing).unwrap_or(0));
            *part = Part::Some { arrived, missing };
        }
        let Part::Some { arrived, missing } = &mut *part else {
            return Ok(());
        };
        for page in pages {
            let is_new = arrived.set(usize::try_from(page).unwrap_or(usize::MAX));
            *missing -= u64::from(is_new);
        }
        if *missing == 0 {
            *part = Part::All;
            self.memory.give_back(PART_BYTES);
        }
        Ok(())
    }

    /// Checks that all pages have arrived, except pages that the source has left out:
    ///
    /// - unplugged pages of a virtio-mem device, which the stream reports for each page (`memory_devices`); this report has
    ///   precedence
    /// - other unused pages that `unused_ram` permits
    ///
    /// # Errors
    /// [`FileError::Incomplete`] with the first RAM block that lacks pages.
    pub fn check(
        &self,
        unused_ram: &[UnusedRam],
        memory_devices: &[PluggableMemory],
    ) -> Result<(), FileError> {
        for block in &self.blocks {
            let (missing, first) = block.missing();
            if first.is_none() {
                continue;
            }
            let mut devices = memory_devices.iter();
            let device = devices.find(|device| device.is_in(&block.name, block.length));
            if device.is_some_and(|device| block.has_all_of(device)) {
                continue;
            }
            let may_lack = |unused_ram: &UnusedRam| match unused_ram {
                UnusedRam::Unplugged { .. } => {
                    let unplugged = unused_ram.unplugged(&block.name);
                    device.is_none() && unplugged.is_some_and(|bytes| missing <= bytes)
                }
                // A block without any page lacks more than the guest's free pages.
                UnusedRam::Free => missing < block.length,
            };
            if let Some(offset) = first
                && !unused_ram.iter().any(may_lack)
            {
                return Err(FileError::Incomplete {
                    block: block.name.clone(),
                    missing,
                    offset,
                });
            }
        }
        Ok(())
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    const PAGE: u64 = 4096;

    /// Checks two blocks of 8 pages each, with all pages of the first and these of the second.
    fn check(pages: &[u64], unused_ram: &[UnusedRam]) -> Option<String> {
        check_with(pages, unused_ram, &[])
    }

    fn check_with(
        pages: &[u64],
        unused_ram: &[UnusedRam],
        devices: &[PluggableMemory],
    ) -> Option<String> {
        let blocks = ["pc.ram", "/objects/mem0"].map(|name| RamBlockEntry::new(name, 8 * PAGE));
        let complete = ReceivedPages::new(&blocks, &MemoryLimit::new(1 << 20));
        let mut batch = Batch::new();
        batch.start(0);
        batch.zero.extend((0..8).map(|page| page * PAGE));
        complete.record(&batch).unwrap();
        batch.start(1);
        for page in pages {
            match page % 2 {
                0 => batch.push(page * PAGE, &[1; 4096]),
                _ => batch.zero.push(page * PAGE),
            }
        }
        complete.record(&batch).unwrap();
        complete
            .check(unused_ram, devices)
            .err()
            .map(|error| error.to_string())
    }

    fn unplugged(block: &str, pages: u64) -> UnusedRam {
        UnusedRam::Unplugged {
            block: block.to_owned(),
            bytes: pages * PAGE,
        }
    }

    #[test]
    fn every_page_must_arrive_as_content_or_as_zero() {
        assert_eq!(check(&[0, 1, 2, 3, 4, 5, 6, 7], &[]), None);
        let lacks = check(&[0, 1, 2, 4, 5, 7], &[]).unwrap();
        let place = format!("byte {}", 3 * PAGE);
        assert!(
            lacks.contains("/objects/mem0") && lacks.contains(&place),
            "{lacks}"
        );
        assert!(check(&[], &[]).is_some());
    }

    /// Returns a device with blocks of 2 pages, whose RAM block is `mem0` of this path.
    fn device_at(device: &str, pages: u64, plugged: u64) -> PluggableMemory {
        PluggableMemory {
            device: device.to_owned(),
            region_size: pages * PAGE,
            block_size: 2 * PAGE,
            plugged: vec![plugged],
        }
    }

    fn device(pages: u64, plugged: u64) -> PluggableMemory {
        device_at("/objects", pages, plugged)
    }

    #[test]
    fn only_unplugged_memory_of_a_device_may_be_missing() {
        // Pages 0, 1, 6 and 7 are plugged.
        let plugged = device(8, 0b1001);
        let check = |pages: &[u64], devices: &[PluggableMemory]| check_with(pages, &[], devices);
        assert_eq!(check(&[0, 1, 6, 7], std::slice::from_ref(&plugged)), None);
        assert_eq!(
            check(&[0, 1, 3, 6, 7], std::slice::from_ref(&plugged)),
            None
        );
        assert!(check(&[0, 1, 6], std::slice::from_ref(&plugged)).is_some());
        // Another device has more unplugged memory.
        let other = device_at("/other", 8, 0b0001);
        assert!(check(&[0, 1, 6], &[other, plugged.clone()]).is_some());
        assert!(check(&[0, 1, 6, 7], &[device(6, 0b0001)]).is_some());
        // `unused_ram` cannot extend a report in the stream.
        let beside = [unplugged("mem0", 8)];
        assert!(check_with(&[0, 1, 6], &beside, &[plugged]).is_some());
        assert_eq!(check_with(&[0, 1, 6], &beside, &[device(6, 0)]), None);
    }

    #[test]
    fn a_device_may_omit_its_unplugged_memory_of_one_block() {
        // The path of the first device is a prefix of the other.
        let blocks = ["a/mem0", "a:b/mem0"].map(|name| RamBlockEntry::new(name, 8 * PAGE));
        let complete = ReceivedPages::new(&blocks, &MemoryLimit::new(1 << 20));
        let [first, second] = ["a", "a:b"].map(|path| device_at(path, 8, 0));
        assert!(complete.check(&[], std::slice::from_ref(&first)).is_err());
        assert!(
            complete
                .check(&[], &[first.clone(), first.clone()])
                .is_err()
        );
        assert!(complete.check(&[], &[device_at("", 8, 0)]).is_err());
        complete.check(&[], &[second, first]).unwrap();
    }

    #[test]
    fn a_device_of_many_parts_is_compared_in_each() {
        let pages = 3 * PART;
        let blocks = [RamBlockEntry::new("/objects/mem0", pages * PAGE)];
        let complete = ReceivedPages::new(&blocks, &MemoryLimit::new(1 << 20));
        let mut batch = Batch::new();
        batch.start(0);
        batch.zero.extend((PART..2 * PART).map(|page| page * PAGE));
        complete.record(&batch).unwrap();
        for (plugged, is_complete) in [(0b0_1100, true), (0b1_1100, false), (0b0_1110, false)] {
            let device = PluggableMemory {
                device: "/objects".to_owned(),
                region_size: pages * PAGE,
                block_size: PART * PAGE / 2,
                plugged: vec![plugged],
            };
            assert_eq!(complete.check(&[], &[device]).is_ok(), is_complete);
        }
    }

    #[test]
    fn memory_is_used_only_for_partly_received_ranges() {
        let pages = 3 * PART + 5;
        let blocks = [RamBlockEntry::new("pc.ram", pages * PAGE)];
        let memory = MemoryLimit::new(2 * PART_BYTES);
        let complete = ReceivedPages::new(&blocks, &memory);
        let missing = |count, first: Option<u64>| {
            let expected = (count * PAGE, first.map(|page| page * PAGE));
            assert_eq!(complete.blocks[0].missing(), expected);
        };
        let note = |pages: std::ops::Range<u64>| {
            let mut batch = Batch::new();
            batch.start(0);
            batch.zero.extend(pages.map(|page| page * PAGE));
            complete.record(&batch)
        };
        missing(pages, Some(0));
        // Across parts, and twice.
        for _ in 0..2 {
            note(0..PART + 7).unwrap();
            missing(pages - PART - 7, Some(PART + 7));
            assert_eq!(memory.used(), PART_BYTES);
        }
        note(3 * PART..pages - 1).unwrap();
        missing(2 * PART - 7 + 1, Some(PART + 7));
        assert!(note(2 * PART..2 * PART + 1).is_err(), "more than there is");
        note(PART + 7..2 * PART).unwrap();
        note(2 * PART..pages).unwrap();
        missing(0, None);
        assert_eq!(memory.used(), 0);
    }

    #[test]
    fn memory_that_a_device_reports_as_unplugged_or_free_may_be_missing() {
        let half = [0, 1, 2, 3];
        assert_eq!(check(&half, &[unplugged("mem0", 4)]), None);
        assert!(
            check(&half, &[unplugged("mem0", 3)]).is_some(),
            "more is missing"
        );
        assert!(
            check(&half, &[unplugged("em0", 4)]).is_some(),
            "another block"
        );
        assert_eq!(check(&half, &[UnusedRam::Free]), None);
        assert!(check(&[], &[UnusedRam::Free]).is_some(), "the whole block");
        assert_eq!(check(&[], &[unplugged("mem0", 8)]), None);
    }
}

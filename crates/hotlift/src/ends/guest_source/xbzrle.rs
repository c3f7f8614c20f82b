//! Capability `xbzrle`: a page that was sent before is sent as a delta.
//!
//! The cache has pages as they were sent, so a cached page equals the page at the destination. The cache is direct-mapped, as
//! in QEMU: each page has one slot, chosen by its number. A new page replaces the page in its slot only if that page was not
//! used for two rounds.

use hotlift_mem::{PAGE_SIZE, RamBlock};
use hotlift_methods::legacy::xbzrle::{Delta, encode};

use crate::error::MigrationError;
use crate::figures::{XbzrleFigures, ratio, to_f64};
use crate::guest::Guest;
use crate::options::Options;

/// Rounds for which an unused page keeps its slot (QEMU's `CACHED_PAGE_LIFETIME`).
const LIFETIME: u64 = 2;

/// Form in which a page is sent.
#[derive(Debug, PartialEq, Eq)]
pub(crate) enum Form<'a> {
    /// Nothing: the destination has this content.
    Same,
    /// A delta.
    Delta(&'a [u8]),
    /// A copy of the whole page.
    Whole(&'a [u8; PAGE_SIZE]),
}

/// Encoder of pages against their last sent content.
pub(crate) struct Xbzrle {
    cache: Cache,
    /// Number of the first page of each RAM block.
    first_pages: Vec<u64>,
    /// Current round; pages are cached from the second round on.
    round: u64,
    last: bool,
    figures: XbzrleFigures,
    round_start: RoundStart,
    /// Copy of the current page.
    page: Box<[u8; PAGE_SIZE]>,
    delta: Vec<u8>,
}

/// Figures at the start of a round.
#[derive(Default)]
struct RoundStart {
    lookups: u64,
    figures: XbzrleFigures,
}

impl Xbzrle {
    /// Creates the encoder, or returns `None` if the options do not enable XBZRLE. The cache has the size of the option, but at
    /// most the size of RAM.
    ///
    /// # Errors
    /// [`MigrationError::XbzrleCache`] if there is not enough memory for the cache.
    pub(crate) fn new(
        guest: &dyn Guest,
        options: &Options,
    ) -> Result<Option<Self>, MigrationError> {
        if !options.stream.xbzrle {
            return Ok(None);
        }
        let mut pages = 0;
        let mut first_pages = Vec::new();
        for block in guest.ram() {
            first_pages.push(pages);
            pages += block.pages() as u64;
        }
        let wanted = options.xbzrle_cache_size / PAGE_SIZE as u64;
        let slots = wanted.min(pages.next_power_of_two());
        let slots = usize::try_from(slots).unwrap_or(usize::MAX);
        Self::with_slots(slots, first_pages, options.xbzrle_cache_size).map(Some)
    }

    /// Creates the encoder; `slots` is a power of two.
    fn with_slots(
        slots: usize,
        first_pages: Vec<u64>,
        cache_bytes: u64,
    ) -> Result<Self, MigrationError> {
        Ok(Self {
            cache: Cache::new(slots.max(1))?,
            first_pages,
            round: 0,
            last: false,
            figures: XbzrleFigures {
                cache_bytes,
                ..XbzrleFigures::default()
            },
            round_start: RoundStart::default(),
            page: Box::new([0; PAGE_SIZE]),
            delta: Vec::with_capacity(PAGE_SIZE),
        })
    }

    /// Begins a round. `last` means the last round: its pages are not cached, because they are never looked up again.
    pub(crate) fn start_round(&mut self, last: bool) {
        self.round += 1;
        self.last = last;
        self.round_start = RoundStart {
            lookups: 0,
            figures: self.figures,
        };
    }

    /// Returns the statistics.
    pub(crate) fn figures(&self) -> XbzrleFigures {
        let RoundStart {
            lookups,
            figures: before,
        } = &self.round_start;
        let sent = to_f64(self.figures.bytes - before.bytes);
        let pages = to_f64(self.figures.pages - before.pages) * to_f64(PAGE_SIZE as u64);
        XbzrleFigures {
            cache_miss_rate: ratio(
                to_f64(self.figures.cache_misses - before.cache_misses),
                to_f64(*lookups),
            ),
            encoding_rate: ratio(pages, sent),
            ..self.figures
        }
    }

    /// Records a page that is sent as zero.
    pub(crate) fn zero_page(&mut self, block: usize, page: usize) {
        let number = self.first_pages[block] + page as u64;
        if self.round > 1 && !self.last && self.cache.take_slot(number, self.round) {
            self.cache.put(number, &[0; PAGE_SIZE]);
        }
    }

    /// Encodes a page with content, whose dirty bit was cleared. Returns `None` in the first round, which sends pages as they
    /// are.
    pub(crate) fn page(
        &mut self,
        ram: &RamBlock,
        block: usize,
        page: usize,
    ) -> Result<Option<Form<'_>>, MigrationError> {
        if self.round < 2 {
            return Ok(None);
        }
        // A copy, because the guest may write the page: the sent content must be the cached content.
        ram.read(page * PAGE_SIZE, &mut self.page[..])?;
        let number = self.first_pages[block] + page as u64;
        self.round_start.lookups += 1;
        let Some(old) = self.cache.get(number) else {
            self.figures.cache_misses += 1;
            if !self.last && self.cache.take_slot(number, self.round) {
                self.cache.put(number, &self.page);
            }
            return Ok(Some(Form::Whole(&self.page)));
        };
        self.delta.clear();
        let delta = encode(old, &self.page, PAGE_SIZE, &mut self.delta);
        if !self.last {
            *old = *self.page;
            self.cache.take_slot(number, self.round);
        }
        Ok(Some(match delta {
            Delta::Same => Form::Same,
            Delta::Encoded => {
                self.figures.pages += 1;
                // With the byte for the encoding and two bytes for the length, as QEMU counts.
                self.figures.bytes += self.delta.len() as u64 + 3;
                Form::Delta(&self.delta)
            }
            Delta::Overflow => {
                self.figures.overflows += 1;
                self.figures.bytes += PAGE_SIZE as u64;
                Form::Whole(&self.page)
            }
        }))
    }
}

/// Cache of pages by number.
struct Cache {
    slots: Vec<Slot>,
    /// The slots' pages, one after another.
    pages: Vec<u8>,
}

#[derive(Clone, Copy)]
struct Slot {
    /// Page number plus one; 0 for an empty slot.
    tag: u64,
    /// Round of the last use.
    used: u64,
}

impl Cache {
    /// Creates the cache. Memory for a page is allocated when the page is stored. The available memory is checked here, before
    /// the migration begins: a system that overcommits never refuses memory, and later kills the process with its guest.
    fn new(slots: usize) -> Result<Self, MigrationError> {
        let bytes = slots as u64 * PAGE_SIZE as u64;
        let available = available_bytes();
        let too_much = || MigrationError::XbzrleCache { bytes, available };
        // The address space may have its own limit.
        let has_room = || {
            Vec::<u8>::new()
                .try_reserve_exact(slots * PAGE_SIZE)
                .is_ok()
        };
        if bytes > available || !has_room() {
            return Err(too_much());
        }
        Ok(Self {
            slots: vec![Slot { tag: 0, used: 0 }; slots],
            // Bytes, not pages: only then does the allocator return untouched zero memory (`calloc`).
            pages: vec![0; slots * PAGE_SIZE],
        })
    }

    /// Returns the slot of a page. The number of slots is a power of two, so neighbours never collide.
    fn index(&self, number: u64) -> usize {
        usize::try_from(number).unwrap_or(0) & (self.slots.len() - 1)
    }

    /// Assigns the slot to a page, and returns true, if the slot already has this page, is free, or was not used for
    /// [`LIFETIME`] rounds.
    fn take_slot(&mut self, number: u64, round: u64) -> bool {
        let index = self.index(number);
        let slot = &mut self.slots[index];
        let may = slot.tag == number + 1 || slot.tag == 0 || slot.used + LIFETIME <= round;
        if may {
            *slot = Slot {
                tag: number + 1,
                used: round,
            };
        }
        may
    }

    /// Stores the sent content of a page, if the page has a slot.
    fn put(&mut self, number: u64, page: &[u8; PAGE_SIZE]) {
        if let Some(slot) = self.get(number) {
            *slot = *page;
        }
    }

    /// Returns the sent content of a page; `None` if the page has no slot.
    fn get(&mut self, number: u64) -> Option<&mut [u8; PAGE_SIZE]> {
        let index = self.index(number);
        (self.slots[index].tag == number + 1).then(|| &mut self.pages.as_chunks_mut().0[index])
    }
}

/// Returns the bytes of memory that this host can provide without paging (`MemAvailable`); the maximum if unknown.
fn available_bytes() -> u64 {
    let meminfo = std::fs::read_to_string("/proc/meminfo").unwrap_or_default();
    let line = meminfo
        .lines()
        .find_map(|line| line.strip_prefix("MemAvailable:")?.strip_suffix("kB"));
    let kib = line.and_then(|kib| kib.trim().parse::<u64>().ok());
    kib.map_or(u64::MAX, |kib| kib << 10)
}

#[cfg(test)]
mod tests {
    use hotlift_testkit::alone::resident;

    use super::*;

    fn page(byte: u8) -> [u8; PAGE_SIZE] {
        [byte; PAGE_SIZE]
    }

    /// Returns a cache of two pages, and RAM of four.
    fn two_of_four() -> (Xbzrle, RamBlock) {
        let mut xbzrle = Xbzrle::with_slots(2, vec![0], 2 * PAGE_SIZE as u64).unwrap();
        let ram = RamBlock::new("ram", 4 * PAGE_SIZE, hotlift_mem::Backing::Private).unwrap();
        xbzrle.start_round(false);
        assert_eq!(xbzrle.page(&ram, 0, 0).unwrap(), None, "the first round");
        xbzrle.start_round(false);
        (xbzrle, ram)
    }

    #[test]
    fn a_page_is_sent_whole_first_and_then_as_deltas() {
        let (mut xbzrle, ram) = two_of_four();
        ram.write(0, &page(1)).unwrap();
        assert_eq!(
            xbzrle.page(&ram, 0, 0).unwrap(),
            Some(Form::Whole(&page(1)))
        );
        assert_eq!(xbzrle.page(&ram, 0, 0).unwrap(), Some(Form::Same));
        ram.write(16, &[9]).unwrap();
        let delta = Form::Delta(&[16, 1, 9]);
        assert_eq!(xbzrle.page(&ram, 0, 0).unwrap(), Some(delta));
        assert_eq!(xbzrle.page(&ram, 0, 0).unwrap(), Some(Form::Same));
        // Every second byte changes: the delta would be longer than the page.
        let mut striped = page(1);
        striped.iter_mut().step_by(2).for_each(|byte| *byte = 7);
        ram.write(0, &striped).unwrap();
        assert_eq!(
            xbzrle.page(&ram, 0, 0).unwrap(),
            Some(Form::Whole(&striped))
        );
        assert_eq!(xbzrle.page(&ram, 0, 0).unwrap(), Some(Form::Same));
        let figures = xbzrle.figures();
        assert_eq!(
            (figures.pages, figures.bytes, figures.overflows),
            (1, 6 + 4096, 1)
        );
        assert_eq!((figures.cache_misses, figures.cache_bytes), (1, 8192));
        assert!((figures.cache_miss_rate - 1.0 / 6.0).abs() < 1e-9);
    }

    #[test]
    fn deltas_after_a_zero_page_are_against_zeros() {
        let (mut xbzrle, ram) = two_of_four();
        ram.write(0, &page(5)).unwrap();
        xbzrle.page(&ram, 0, 0).unwrap();
        xbzrle.zero_page(0, 0);
        ram.write(0, &page(0)).unwrap();
        ram.write(3, &[1]).unwrap();
        let delta = Form::Delta(&[3, 1, 1]);
        assert_eq!(xbzrle.page(&ram, 0, 0).unwrap(), Some(delta));
    }

    #[test]
    fn a_page_keeps_its_slot_until_unused_for_two_rounds() {
        let (mut xbzrle, ram) = two_of_four();
        let whole = |xbzrle: &mut Xbzrle, page| {
            matches!(xbzrle.page(&ram, 0, page).unwrap(), Some(Form::Whole(_)))
        };
        assert!(whole(&mut xbzrle, 0) && whole(&mut xbzrle, 2));
        assert!(!whole(&mut xbzrle, 0), "2 has not taken its slot");
        xbzrle.start_round(false);
        assert!(whole(&mut xbzrle, 2) && !whole(&mut xbzrle, 0));
        xbzrle.start_round(false);
        xbzrle.start_round(false);
        assert!(whole(&mut xbzrle, 2) && !whole(&mut xbzrle, 2));
        assert!(whole(&mut xbzrle, 0));
    }

    #[test]
    fn the_last_round_caches_no_page() {
        let (mut xbzrle, ram) = two_of_four();
        xbzrle.start_round(true);
        for _ in 0..2 {
            let form = xbzrle.page(&ram, 0, 1).unwrap();
            assert!(matches!(form, Some(Form::Whole(_))));
        }
    }

    #[test]
    fn a_cache_that_does_not_fit_into_memory_is_an_error() {
        // A system that overcommits would grant the second one.
        let too_large = available_bytes().saturating_mul(2) / PAGE_SIZE as u64;
        for slots in [1 << 45, too_large.next_power_of_two()] {
            let slots = usize::try_from(slots).unwrap();
            let error = Xbzrle::with_slots(slots, vec![0], 0).err().unwrap();
            let words = error.to_string();
            let bytes = (slots * PAGE_SIZE).to_string();
            assert!(
                words.contains("xbzrle-cache-size") && words.contains(&bytes),
                "{words}"
            );
        }
    }

    #[test]
    fn an_empty_cache_takes_no_memory() {
        hotlift_testkit::alone!();
        let bytes = 512 << 20;
        let before = resident();
        let cache = Cache::new(bytes / PAGE_SIZE).unwrap();
        let taken = resident().saturating_sub(before);
        // Memory of the table of slots.
        assert!(taken < bytes as u64 / 100, "{taken} bytes of {bytes}");
        drop(cache);
    }
}

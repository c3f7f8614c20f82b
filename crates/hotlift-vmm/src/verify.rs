//! Proves that a guest's memory matches the state of its vCPUs: no write was lost, and no write was repeated.
//!
//! A paused guest is checked in two ways:
//!
//! - *Replay.* The number of writes in each vCPU's state determines every record in the working set and in the table.
//!   All records are compared. A vCPU may be paused in the middle of a write. Its state counts the stores of this write
//!   that are already in memory.
//! - *Digest.* Memory outside the records never changes after the fill. Sums of page hashes are computed at the fill
//!   and migrated as device state. They are compared with new sums.

use std::ops::Range;
use std::sync::atomic::{AtomicU64, Ordering};

use hotlift_mem::{MemError, PAGE_SIZE, RamBlock, zero};
use xxhash_rust::xxh3::xxh3_64_with_seed;

use crate::bytes::{to_u64, to_usize};
use crate::layout::{Layout, RECORD_LEN, Record, filled_offset};
use crate::settings::Program;
use crate::workload::{Generator, Position};

/// Maximum number of page groups in a [`Digest`]; limits the digest in the device state to 4 KiB.
const MAX_GROUPS: u64 = 512;

/// Maximum number of writes of one vCPU that are replayed, some minutes of work. The number comes from the network, and
/// must not keep the destination busy forever.
pub const MAX_WRITES: u64 = 1 << 36;

/// Pages per unit of work, 2 MiB. No group of a digest is smaller.
pub(crate) const STRIDE: u64 = STRIDE_LEN as u64;

const STRIDE_LEN: usize = 512;

/// Counts from a successful check.
#[derive(Debug, Clone, Copy, PartialEq, Eq, Default)]
pub struct Verified {
    /// Number of pages whose bytes were compared, including pages of the table.
    pub pages_checked: u64,
    /// Number of pages that were never touched. Untouched pages are zero without a read.
    pub pages_untouched: u64,
    /// Number of replayed writes of all vCPUs; all were found in memory.
    pub writes_replayed: u64,
    /// Number of incomplete writes of paused vCPUs. Their stores in memory match the vCPUs' state.
    pub incomplete_writes: u64,
}

/// A mismatch between a guest's memory and the state of its vCPUs, or a failed check.
#[derive(Debug, thiserror::Error)]
#[non_exhaustive]
pub enum VerifyError {
    /// A page of the working set lacks the record that the vCPU's state requires.
    #[error(
        "page {page} of the working set (RAM offset {offset:#x}, vCPU {vcpu}) must carry {expected:x?}, got {got:x?}"
    )]
    Page {
        /// Number of the page in the working set.
        page: u64,
        /// Offset of the record in RAM.
        offset: u64,
        /// Number of the vCPU that owns the page.
        vcpu: u8,
        /// Record computed from the vCPU's state.
        expected: Record,
        /// Record found in the page.
        got: Record,
    },
    /// A table entry lacks the record that the vCPU's state requires.
    #[error(
        "table entry of page {page} (RAM offset {offset:#x}, vCPU {vcpu}) must be {expected:x?}, got {got:x?}"
    )]
    Table {
        /// Page of the working set to which the entry belongs.
        page: u64,
        /// Offset of the entry in RAM.
        offset: u64,
        /// Number of the vCPU that owns the page.
        vcpu: u8,
        /// Record computed from the vCPU's state.
        expected: Record,
        /// Record found in the entry.
        got: Record,
    },
    /// Bytes changed after the fill, although only the fill may write them.
    #[error(
        "bytes between RAM offsets {start:#x} and {end:#x} must have digest {expected:#018x}, got {got:#018x}"
    )]
    Fill {
        /// RAM offset of the start of the changed group of pages.
        start: u64,
        /// RAM offset of the end of the group.
        end: u64,
        /// Hash sum computed at the fill.
        expected: u64,
        /// Hash sum of the present bytes.
        got: u64,
    },
    /// The digest has another number of sums than this RAM requires.
    #[error("digest must have {expected} sums, got {got}")]
    Digest {
        /// Number of sums that this RAM requires.
        expected: usize,
        /// Number of sums in the digest.
        got: usize,
    },
    /// The write count in a vCPU's block in memory differs from its registers.
    #[error("vCPU {vcpu} published {expected} writes, its memory has {got}")]
    Published {
        /// Number of the vCPU.
        vcpu: u8,
        /// Write count in the vCPU's registers.
        expected: u64,
        /// Write count in the vCPU's block in memory.
        got: u64,
    },
    /// The guest program itself found records that differ from its table.
    #[error("vCPU {vcpu} found {errors} wrong records")]
    Guest {
        /// Number of the vCPU that found the records.
        vcpu: u8,
        /// Number of differing records.
        errors: u64,
    },
    /// The write count of a vCPU exceeds [`MAX_WRITES`], the limit of a replay.
    #[error("vCPU {vcpu} claims {writes} writes, at most {MAX_WRITES} can be replayed")]
    TooManyWrites {
        /// Number of the vCPU.
        vcpu: u8,
        /// Write count in the vCPU's state.
        writes: u64,
    },
    /// The guest's memory could not be read.
    #[error("cannot read guest memory")]
    Memory(#[from] MemError),
    /// The guest is in a state in which it cannot be checked: it runs, or a vCPU has failed.
    #[error("guest cannot be checked")]
    State(#[from] hotlift::guest::GuestError),
}

/// Sums of page hashes over the filled range, without the write records. The hash of a zero page is 0, so untouched
/// pages need not be read. The order does not change a sum, so several threads can add.
#[derive(Debug, Clone, PartialEq, Eq)]
pub struct Digest {
    sums: Vec<u64>,
}

impl Digest {
    /// Returns the digest of RAM that was not filled.
    pub fn zero(layout: &Layout) -> Self {
        Self {
            sums: vec![0; groups(layout)],
        }
    }

    /// Creates a digest from the sums in a device state.
    ///
    /// # Errors
    /// [`VerifyError::Digest`] if the number of sums does not fit the layout.
    pub fn from_sums(layout: &Layout, sums: Vec<u64>) -> Result<Self, VerifyError> {
        let expected = groups(layout);
        if sums.len() == expected {
            Ok(Self { sums })
        } else {
            Err(VerifyError::Digest {
                expected,
                got: sums.len(),
            })
        }
    }

    /// Returns the hash sums, one per group of pages.
    pub fn sums(&self) -> &[u64] {
        &self.sums
    }
}

/// A [`Digest`] while several threads compute it.
pub(crate) struct Digester<'a> {
    layout: &'a Layout,
    group_pages: u64,
    sums: Vec<AtomicU64>,
}

impl<'a> Digester<'a> {
    pub fn new(layout: &'a Layout) -> Self {
        let sums = (0..groups(layout)).map(|_| AtomicU64::new(0)).collect();
        Self {
            layout,
            group_pages: group_pages(layout),
            sums,
        }
    }

    /// Adds the hash of page `index` of the filled range. Overwrites the write record in `page` with zeros first.
    pub fn add(&self, index: u64, page: &mut [u8; PAGE_SIZE]) {
        if let Some(record) = self.layout.record_in_page(index) {
            page[record].fill(0);
        }
        if !zero::is_zero(page) {
            let hash = xxh3_64_with_seed(page, index);
            self.sums[to_usize(index / self.group_pages)].fetch_add(hash, Ordering::Relaxed);
        }
    }

    pub fn finish(self) -> Digest {
        Digest {
            sums: self.sums.into_iter().map(AtomicU64::into_inner).collect(),
        }
    }
}

fn group_pages(layout: &Layout) -> u64 {
    layout
        .filled_pages()
        .div_ceil(MAX_GROUPS)
        .next_multiple_of(STRIDE)
}

fn groups(layout: &Layout) -> usize {
    to_usize(layout.filled_pages().div_ceil(group_pages(layout)))
}

/// Runs `work` on each stride (a range of 2 MiB) of `0..pages`, with one thread per CPU, at most 8. Stops at the first
/// error.
pub(crate) fn in_strides<E: Send>(
    pages: u64,
    work: impl Fn(Range<u64>) -> Result<(), E> + Sync,
) -> Result<(), E> {
    let threads = std::thread::available_parallelism()
        .map_or(1, usize::from)
        .min(8);
    let next = AtomicU64::new(0);
    let run = || {
        loop {
            let start = next.fetch_add(STRIDE, Ordering::Relaxed);
            if start >= pages {
                return Ok(());
            }
            if let Err(error) = work(start..(start + STRIDE).min(pages)) {
                next.store(pages, Ordering::Relaxed);
                return Err(error);
            }
        }
    };
    std::thread::scope(|scope| {
        let helpers: Vec<_> = (1..threads).map(|_| scope.spawn(run)).collect();
        let mine = run();
        helpers.into_iter().fold(mine, |so_far, helper| {
            let theirs = helper
                .join()
                .unwrap_or_else(|panic| std::panic::resume_unwind(panic));
            so_far.and(theirs)
        })
    })
}

/// Checks all memory of a paused guest against the positions (write counts) of its vCPUs and the digest of the fill.
pub(crate) fn verify(
    ram: &RamBlock,
    program: &Program,
    positions: &[Position],
    digest: &Digest,
) -> Result<Verified, VerifyError> {
    let layout = &program.layout;
    for (vcpu, position) in (0u8..).zip(positions) {
        if position.writes > MAX_WRITES {
            let writes = position.writes;
            return Err(VerifyError::TooManyWrites { vcpu, writes });
        }
    }
    let expected: Vec<Expected> = std::thread::scope(|scope| {
        let replays: Vec<_> = (0u8..)
            .zip(positions)
            .map(|(vcpu, &position)| scope.spawn(move || Expected::new(program, vcpu, position)))
            .collect();
        replays
            .into_iter()
            .map(|replay| {
                replay
                    .join()
                    .unwrap_or_else(|panic| std::panic::resume_unwind(panic))
            })
            .collect()
    });
    let owner = |page: u64| {
        let vcpu = page % u64::from(layout.vcpus());
        (
            u8::try_from(vcpu).unwrap_or(u8::MAX),
            &expected[to_usize(vcpu)],
        )
    };

    let table = layout.table();
    let entries = layout.pages();
    in_strides(entries, |pages| -> Result<(), VerifyError> {
        let mut bytes = vec![0; to_usize((pages.end - pages.start) * RECORD_LEN)];
        ram.read(to_usize(layout.entry(pages.start)), &mut bytes)?;
        for (page, entry) in pages.zip(bytes.chunks_exact(to_usize(RECORD_LEN))) {
            let (vcpu, owner) = owner(page);
            let (expected, got) = (owner.entry(page), Record::from_bytes(entry));
            if got != expected {
                let offset = layout.entry(page);
                return Err(VerifyError::Table {
                    page,
                    offset,
                    vcpu,
                    expected,
                    got,
                });
            }
        }
        Ok(())
    })?;
    let gap = layout.entry(entries)..table.end;
    let mut bytes = vec![0; to_usize(gap.end - gap.start)];
    ram.read(to_usize(gap.start), &mut bytes)?;
    if !zero::is_zero(&bytes) {
        let got = xxh3_64_with_seed(&bytes, 0);
        return Err(VerifyError::Fill {
            start: gap.start,
            end: gap.end,
            expected: 0,
            got,
        });
    }

    let digester = Digester::new(layout);
    let untouched_pages = AtomicU64::new(0);
    let first = to_usize(layout.filled().start) / PAGE_SIZE;
    in_strides(layout.filled_pages(), |pages| -> Result<(), VerifyError> {
        let mut untouched = [0; STRIDE_LEN / 64];
        let count = to_usize(pages.end - pages.start);
        let words = &mut untouched[..count.div_ceil(64)];
        if !ram.untouched(first + to_usize(pages.start), count, words)? {
            words.fill(0);
        }
        let mut page = [0; PAGE_SIZE];
        for (i, index) in pages.enumerate() {
            let is_untouched = untouched[i / 64] >> (i % 64) & 1 == 1;
            if is_untouched {
                untouched_pages.fetch_add(1, Ordering::Relaxed);
                page.fill(0);
            } else {
                ram.read(filled_offset(layout, index), &mut page)?;
            }
            if let Some(record) = layout.record_in_page(index) {
                let (vcpu, owner) = owner(index);
                let (expected, got) = (owner.record(index), Record::from_bytes(&page[record]));
                if got != expected {
                    let offset = layout.record(index);
                    return Err(VerifyError::Page {
                        page: index,
                        offset,
                        vcpu,
                        expected,
                        got,
                    });
                }
            }
            if !is_untouched {
                digester.add(index, &mut page);
            }
        }
        Ok(())
    })?;
    let group_bytes = digester.group_pages * to_u64(PAGE_SIZE);
    let found = digester.finish();
    for (group, (&expected, &got)) in (0u64..).zip(digest.sums.iter().zip(&found.sums)) {
        if got != expected {
            let start = layout.filled().start + group * group_bytes;
            let end = (start + group_bytes).min(layout.filled().end);
            return Err(VerifyError::Fill {
                start,
                end,
                expected,
                got,
            });
        }
    }

    let pages_untouched = untouched_pages.into_inner();
    Ok(Verified {
        pages_checked: layout.filled_pages() - pages_untouched
            + (table.end - table.start) / to_u64(PAGE_SIZE),
        pages_untouched,
        writes_replayed: positions.iter().map(|position| position.writes).sum(),
        incomplete_writes: positions
            .iter()
            .map(|position| u64::from(position.stores > 0))
            .sum(),
    })
}

/// Write records that the pages of one vCPU must have.
struct Expected {
    vcpus: u64,
    records: Vec<Record>,
    incomplete: Option<IncompleteWrite>,
}

/// An incomplete write: only some of its stores are in memory.
struct IncompleteWrite {
    own_page: u64,
    entry: Record,
    record: Record,
}

impl Expected {
    fn new(program: &Program, vcpu: u8, position: Position) -> Self {
        let generator = Generator::new(program.workload, program.seed, &program.layout, vcpu);
        let records = generator.replay(vcpu, position.writes);
        let incomplete = (position.stores > 0).then(|| {
            let number = position.writes + 1;
            let own_page = generator.own_page(number);
            let old = records[to_usize(own_page)];
            let new = old.next(vcpu, number);
            let after = |stores: u8| Record {
                version: if position.stores > stores {
                    new.version
                } else {
                    old.version
                },
                sequence: if position.stores > stores + 1 {
                    new.sequence
                } else {
                    old.sequence
                },
            };
            IncompleteWrite {
                own_page,
                entry: after(0),
                record: after(2),
            }
        });
        Self {
            vcpus: u64::from(program.layout.vcpus()),
            records,
            incomplete,
        }
    }

    fn entry(&self, page: u64) -> Record {
        self.look_up(page, |incomplete| incomplete.entry)
    }

    fn record(&self, page: u64) -> Record {
        self.look_up(page, |incomplete| incomplete.record)
    }

    fn look_up(&self, page: u64, partial: impl Fn(&IncompleteWrite) -> Record) -> Record {
        let own = page / self.vcpus;
        match &self.incomplete {
            Some(incomplete) if incomplete.own_page == own => partial(incomplete),
            // The last pages of the working set may have no owner. They are never written.
            _ => self.records.get(to_usize(own)).copied().unwrap_or_default(),
        }
    }
}

//! Content of RAM before a guest starts.
//!
//! The settings and the page number alone determine each page of the filled range. Threads can therefore fill in any
//! order. A file with the same bytes can be written for another VMM.
//!
//! Zero pages are not written, so the kernel need not allocate them. They are in runs of 1 to 64 pages, spread evenly:
//! a real guest has both single zero pages and free ranges.

mod corpus;
mod generated;
mod image;
mod mixed;

use std::fs::File;
use std::os::unix::fs::FileExt;
use std::path::{Path, PathBuf};
use std::sync::atomic::{AtomicU64, Ordering};

use hotlift_mem::{FileError, MemError, PAGE_SIZE, RamBlock, zero};

use crate::bytes::{reduce, to_u64, to_usize};
use crate::layout::{Layout, filled_offset};
use crate::verify::{Digest, Digester, in_strides};
use crate::workload::nth;
use corpus::Corpus;
use image::Image;
use mixed::Mixed;

/// Source of the bytes that fill RAM.
#[derive(Debug, Clone, PartialEq, Eq, Default)]
pub enum FillSource {
    /// No bytes: every page is zero.
    #[default]
    Zero,
    /// Seeded random pages that resemble a server's memory: text, program code, heap (pointers), and random bytes.
    Generated,
    /// Text and random bytes, half and half, in alternating runs of 64 KiB to 16 MiB. Each doubling of the run length
    /// is equally frequent. zstd 1 compresses the text to a third. Seeded.
    Mixed,
    /// A file, or all files below a folder, concatenated in the order of their names. A `.zst` file is decompressed.
    /// Files shorter than RAM are repeated. Each repetition is XORed with another constant and starts at another
    /// offset. A repetition compresses as well as the files, but neither compression windows nor deduplication detect
    /// it.
    Folder(PathBuf),
    /// The pages of a file, such as a memory image, in their order. A `.zst` file is decompressed. Zero pages keep
    /// their positions, and [`FillSettings::zero_share`] is ignored. A file larger than RAM is truncated. A smaller
    /// file is repeated as a folder is, but its zero pages stay zero.
    Image(PathBuf),
}

/// Settings that determine the content of RAM.
#[derive(Debug, Clone, PartialEq, Default)]
pub struct FillSettings {
    /// Source of the bytes that fill RAM.
    pub source: FillSource,
    /// Share of pages that stay zero, 0 to 1. The source may contain further zero pages.
    pub zero_share: f64,
    /// True if zero pages are written too, so that the host allocates them.
    pub zero_touched: bool,
    /// Seed of the random numbers.
    pub seed: u64,
}

/// Result of filling RAM.
#[derive(Debug, Clone, PartialEq)]
pub struct Filled {
    /// Number of pages that are not zero.
    pub data_pages: u64,
    /// Number of zero pages.
    pub zero_pages: u64,
    /// Number of copies of the source in RAM: above 1 if repeated, below 1 if truncated. 1 for a generated source.
    pub copies: f64,
    /// Page hash sums after the fill, which [`crate::verify`] compares with later sums.
    pub digest: Digest,
}

/// An error while RAM is filled.
#[derive(Debug, thiserror::Error)]
#[non_exhaustive]
pub enum FillError {
    /// The share of zero pages is not between 0 and 1.
    #[error("share of zero pages must be between 0 and 1, got {got}")]
    ZeroShare {
        /// Requested share.
        got: f64,
    },
    /// The guest was already filled, started or loaded.
    #[error("RAM is already in use")]
    NotFresh,
    /// The folder or file has no bytes.
    #[error("cannot fill memory from {}: it is empty", path.display())]
    Empty {
        /// The folder or file.
        path: PathBuf,
    },
    /// A file or folder cannot be read or written.
    #[error(transparent)]
    File(#[from] FileError),
    /// Guest memory could not be written.
    #[error("cannot write guest memory")]
    Memory(#[from] MemError),
}

/// Fills the filled range of `ram`, which must not have been written.
///
/// # Errors
/// [`FillError`]. RAM may be partially filled after an error.
pub fn fill(ram: &RamBlock, layout: &Layout, settings: &FillSettings) -> Result<Filled, FillError> {
    let pages = Pages::new(layout.filled_pages(), settings)?;
    let digester = Digester::new(layout);
    let data_pages = each_page(&pages, layout, |index, page| {
        match page {
            Some(page) => {
                ram.write(filled_offset(layout, index), page)?;
                digester.add(index, page);
            }
            None if settings.zero_touched => {
                ram.write(filled_offset(layout, index), &[0; PAGE_SIZE])?;
            }
            None => {}
        }
        Ok(())
    })?;
    let zero_pages = layout.filled_pages() - data_pages;
    Ok(Filled {
        data_pages,
        zero_pages,
        copies: pages.copies(layout),
        digest: digester.finish(),
    })
}

/// Writes a file with the bytes that [`fill`] writes to RAM. The file has the bytes of the range [`Layout::filled`].
/// Zero pages become holes.
///
/// # Errors
/// [`FillError`]. The file may be incomplete after an error.
pub fn write_fill(
    path: &Path,
    layout: &Layout,
    settings: &FillSettings,
) -> Result<Filled, FillError> {
    let pages = Pages::new(layout.filled_pages(), settings)?;
    let digester = Digester::new(layout);
    let failed = FileError::writing(path);
    let file = File::create(path).map_err(failed)?;
    file.set_len(layout.filled().end - layout.filled().start)
        .map_err(failed)?;
    let data_pages = each_page(&pages, layout, |index, page| {
        if let Some(page) = page {
            file.write_all_at(page, index * to_u64(PAGE_SIZE))
                .map_err(failed)?;
            digester.add(index, page);
        }
        Ok(())
    })?;
    let zero_pages = layout.filled_pages() - data_pages;
    Ok(Filled {
        data_pages,
        zero_pages,
        copies: pages.copies(layout),
        digest: digester.finish(),
    })
}

/// Calls `put` for each page from several threads, with `None` for a zero page. Returns the number of nonzero pages.
/// The write records in the pages are zero, as before the first write.
fn each_page(
    pages: &Pages,
    layout: &Layout,
    put: impl Fn(u64, Option<&mut [u8; PAGE_SIZE]>) -> Result<(), FillError> + Sync,
) -> Result<u64, FillError> {
    let data_pages = AtomicU64::new(0);
    in_strides(layout.filled_pages(), |range| -> Result<(), FillError> {
        let mut page = [0; PAGE_SIZE];
        let first_block = range.start / BLOCK;
        for block in first_block..range.end.div_ceil(BLOCK) {
            let places = pages.zeros.places(block);
            for index in block * BLOCK..((block + 1) * BLOCK).min(range.end) {
                let Some(number) = places[to_usize(index % BLOCK)] else {
                    put(index, None)?;
                    continue;
                };
                pages.source.page(number, &mut page)?;
                if let Some(record) = layout.record_in_page(index) {
                    page[record].fill(0);
                }
                if zero::is_zero(&page) {
                    put(index, None)?;
                } else {
                    put(index, Some(&mut page))?;
                    data_pages.fetch_add(1, Ordering::Relaxed);
                }
            }
        }
        Ok(())
    })?;
    Ok(data_pages.into_inner())
}

/// Source of the bytes of all pages, and the positions of the zero pages.
struct Pages {
    zeros: Zeros,
    source: Source,
}

enum Source {
    Zero,
    Generated { seed: u64 },
    Mixed(Mixed),
    Corpus(Corpus),
    Image(Image),
}

impl Source {
    /// Writes the content of data page `number` to `page`.
    fn page(&self, number: u64, page: &mut [u8; PAGE_SIZE]) -> Result<(), FillError> {
        match self {
            Self::Zero => page.fill(0),
            Self::Generated { seed } => generated::page(*seed, number, page),
            Self::Mixed(mixed) => mixed.page(number, page),
            Self::Corpus(corpus) => corpus.page(number, page),
            Self::Image(image) => image.page(number, page)?,
        }
        Ok(())
    }
}

impl Pages {
    fn new(pages: u64, settings: &FillSettings) -> Result<Self, FillError> {
        let share = match settings.source {
            // A memory image has its own zero pages.
            FillSource::Image(_) => 0.0,
            _ => settings.zero_share,
        };
        let zeros = Zeros::new(share, settings.seed)?;
        let enough = pages.saturating_mul(to_u64(PAGE_SIZE));
        let source = match &settings.source {
            FillSource::Zero => Source::Zero,
            FillSource::Generated => Source::Generated {
                seed: settings.seed,
            },
            FillSource::Mixed => Source::Mixed(Mixed::new(pages, settings.seed)),
            FillSource::Folder(path) => Source::Corpus(Corpus::read(path, enough, settings.seed)?),
            FillSource::Image(path) => Source::Image(Image::open(path, enough, settings.seed)?),
        };
        Ok(Self { zeros, source })
    }

    /// Returns the number of copies of the source that fill RAM of this layout.
    fn copies(&self, layout: &Layout) -> f64 {
        let pages = layout.filled_pages();
        let (filled, all) = match &self.source {
            Source::Zero | Source::Generated { .. } | Source::Mixed(_) => return 1.0,
            Source::Corpus(corpus) => (pages - self.zeros.of(pages), corpus.pages()),
            Source::Image(image) => (pages, image.pages()),
        };
        #[expect(clippy::cast_precision_loss, reason = "counts stay below 2^53")]
        let quotient = filled as f64 / all as f64;
        quotient
    }
}

/// Number of pages whose zero runs are drawn together; divides the stride of [`in_strides`].
const BLOCK: u64 = BLOCK_LEN as u64;

const BLOCK_LEN: usize = 256;

/// Lengths of runs of zero pages and of data pages. Every entry has the same probability, so short runs are common.
const RUNS: [usize; 8] = [1, 1, 2, 4, 8, 16, 32, 64];

/// Positions of the zero pages.
struct Zeros {
    /// Number of zero pages per 2^32 pages.
    share: u64,
    seed: u64,
}

impl Zeros {
    fn new(share: f64, seed: u64) -> Result<Self, FillError> {
        if !(0.0..=1.0).contains(&share) {
            return Err(FillError::ZeroShare { got: share });
        }
        #[allow(clippy::cast_possible_truncation, clippy::cast_sign_loss)] // 0 to 2^32
        let share = (share * 4_294_967_296.0).round() as u64;
        Ok(Self { share, seed })
    }

    /// Returns the number of zero pages before block `block`: the requested share of all pages before this block.
    fn before(&self, block: u64) -> u64 {
        self.of(block.saturating_mul(BLOCK))
    }

    /// Returns the number of zero pages among the first `pages` pages.
    fn of(&self, pages: u64) -> u64 {
        let zeros = (u128::from(pages) * u128::from(self.share)) >> 32;
        u64::try_from(zeros).unwrap_or(u64::MAX)
    }

    /// Returns for each page of a block the number of its data page; `None` for a zero page.
    fn places(&self, block: u64) -> [Option<u64>; BLOCK_LEN] {
        let mut places = [None; BLOCK_LEN];
        let mut zeros = to_usize(self.before(block + 1) - self.before(block));
        let mut number = block * BLOCK - self.before(block);
        let mut at = 0;
        for draw in 0.. {
            let left = places.len() - at;
            if left == 0 {
                break;
            }
            let random = nth(self.seed ^ 0x7a65_726f, block * BLOCK + draw);
            let run = RUNS[to_usize(random % to_u64(RUNS.len()))];
            // The probability that a run is zero is the share of zero pages among the remaining pages.
            if to_usize(reduce(random, to_u64(left))) < zeros {
                let run = run.min(zeros);
                zeros -= run;
                at += run;
            } else {
                let run = run.min(left - zeros);
                for place in &mut places[at..at + run] {
                    *place = Some(number);
                    number += 1;
                }
                at += run;
            }
        }
        places
    }
}

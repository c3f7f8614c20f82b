//! Detection of pages that the guest never touched.
//!
//! The kernel can list untouched pages without reading their bytes: private memory without a page table entry, and holes of a
//! memfd, read as zero. All three methods in this file count a page in an unknown state as touched.
//!
//! States that do *not* mean untouched, or cannot be queried:
//! - Not present is not enough: a page that is in swap, is being moved, or is poisoned has no present entry either. Both page
//!   table methods require an empty entry.
//! - The page tables of a shared mapping only show the accesses of *this* process. So shared memory is queried by its file, and
//!   only on tmpfs (the file system of memfds): other file systems may report a dirty page without a block as a hole. Shared
//!   memory without a file cannot be queried.
//! - An untouched private mapping of a file has the file's content.
//! - The kernel sets the soft-dirty bit even in empty entries of a new mapping, so this bit is ignored.
//! - One written byte touches all 512 pages of a transparent huge page. A read of an untouched huge page may map the huge zero
//!   page, which the scan does not distinguish from memory. In both cases the pages must be read.

use std::fs::File;
use std::io;
use std::os::fd::{AsRawFd, BorrowedFd};
use std::os::unix::fs::FileExt;
use std::sync::OnceLock;

use rustix::fs::{SeekFrom, fstatfs, seek};
use rustix::io::Errno;

use crate::PAGE_SIZE;

/// Sets the bits of untouched pages of the private anonymous memory at address `start`, a page boundary. `out` must be clear
/// and have a bit for each of `pages`. Returns false, with all bits clear, if the kernel cannot report this.
pub(crate) fn in_page_tables(start: usize, pages: usize, out: &mut [u64]) -> bool {
    let Some(pagemap) = pagemap() else {
        return false;
    };
    scan(pagemap, start, pages, out)
        .or_else(|_| {
            out.fill(0);
            read_entries(pagemap, start, pages, out)
        })
        .is_ok()
        || mark_touched(out)
}

/// Sets the bits as [`in_page_tables`] does, for shared memory that maps `file` from byte `start` on.
pub(crate) fn in_file(file: BorrowedFd<'_>, start: u64, pages: usize, out: &mut [u64]) -> bool {
    holes(file, start, pages, out).is_ok() || mark_touched(out)
}

fn mark_touched(out: &mut [u64]) -> bool {
    out.fill(0);
    false
}

/// Opens `/proc/self/pagemap` once, because opening takes longer than a query. After a fork the file still describes the
/// parent's memory, so a child gets `None`.
fn pagemap() -> Option<&'static File> {
    static OPENED: OnceLock<Option<(u32, File)>> = OnceLock::new();
    let pid = std::process::id();
    let opened = OPENED.get_or_init(|| Some((pid, File::open("/proc/self/pagemap").ok()?)));
    match opened {
        Some((opener, file)) if *opener == pid => Some(file),
        _ => None,
    }
}

/// `struct pm_scan_arg` of linux/fs.h.
#[repr(C)]
#[derive(Default)]
struct PmScanArg {
    size: u64,
    flags: u64,
    start: u64,
    end: u64,
    walk_end: u64,
    vec: u64,
    vec_len: u64,
    max_pages: u64,
    category_inverted: u64,
    category_mask: u64,
    category_anyof_mask: u64,
    return_mask: u64,
}

/// `struct page_region` of linux/fs.h.
#[repr(C)]
#[derive(Default, Clone, Copy)]
struct PageRegion {
    start: u64,
    end: u64,
    categories: u64,
}

const PAGE_IS_PRESENT: u64 = 1 << 3;
const PAGE_IS_SWAPPED: u64 = 1 << 4;
const PAGE_IS_PFNZERO: u64 = 1 << 5;

/// `_IOWR('f', 16, struct pm_scan_arg)`, Linux 6.7 and later.
const PAGEMAP_SCAN: libc::Ioctl =
    (3 << 30) | ((size_of::<PmScanArg>() as libc::Ioctl) << 16) | (0x66 << 8) | 16;

/// Maximum number of ranges per call: 1.5 KiB of stack, and one call for most answers.
const REGIONS: usize = 64;

/// Uses the ioctl `PAGEMAP_SCAN`. The kernel skips empty page tables as a whole, so untouched gigabytes take microseconds.
fn scan(pagemap: &File, start: usize, pages: usize, out: &mut [u64]) -> io::Result<()> {
    let base = start as u64;
    let end = base + (pages * PAGE_SIZE) as u64;
    let mut at = base;
    while at < end {
        let mut touched = [PageRegion::default(); REGIONS];
        // Touched: present or in swap, and not the shared zero page that a read has mapped.
        let mut arg = PmScanArg {
            size: size_of::<PmScanArg>() as u64,
            start: at,
            end,
            vec: touched.as_mut_ptr().expose_provenance() as u64,
            vec_len: REGIONS as u64,
            category_inverted: PAGE_IS_PFNZERO,
            category_mask: PAGE_IS_PFNZERO,
            category_anyof_mask: PAGE_IS_PRESENT | PAGE_IS_SWAPPED,
            return_mask: PAGE_IS_PRESENT | PAGE_IS_SWAPPED,
            ..PmScanArg::default()
        };
        // SAFETY: the argument has the layout and the size that the request number states, and `vec`
        // is valid for `vec_len` regions during the call.
        let found = unsafe { libc::ioctl(pagemap.as_raw_fd(), PAGEMAP_SCAN, &mut arg) };
        let Ok(found) = usize::try_from(found) else {
            match io::Error::last_os_error() {
                e if e.kind() == io::ErrorKind::Interrupted => continue,
                e => return Err(e),
            }
        };
        // The kernel has examined everything before `walk_end`. Without this check, a lack of progress would loop forever.
        if arg.walk_end <= at || arg.walk_end > end {
            return Err(io::ErrorKind::InvalidData.into());
        }
        for region in touched.iter().take(found) {
            mark(out, base, at, region.start);
            at = at.max(region.end);
        }
        mark(out, base, at, arg.walk_end);
        at = at.max(arg.walk_end);
    }
    Ok(())
}

/// Reads the entries of the pagemap, eight bytes for each page. For kernels without the ioctl, before Linux 6.7.
fn read_entries(pagemap: &File, start: usize, pages: usize, out: &mut [u64]) -> io::Result<()> {
    const ENTRIES: usize = 512;
    let mut entries = [0; ENTRIES * 8];
    let mut page = 0;
    while page < pages {
        let chunk = &mut entries[..(pages - page).min(ENTRIES) * 8];
        pagemap.read_exact_at(chunk, ((start / PAGE_SIZE + page) * 8) as u64)?;
        for entry in chunk.as_chunks().0 {
            if is_empty(u64::from_ne_bytes(*entry)) {
                out[page / 64] |= 1 << (page % 64);
            }
            page += 1;
        }
    }
    Ok(())
}

/// Returns true for the pagemap entry of a page without memory, swap, or marker.
fn is_empty(entry: u64) -> bool {
    const SOFT_DIRTY: u64 = 1 << 55;
    entry & !SOFT_DIRTY == 0
}

/// `f_type` of tmpfs (linux/magic.h).
const TMPFS_MAGIC: u64 = 0x0102_1994;

/// Uses the holes of a file. Seeking moves the file's position, which no code uses for a memory file. Concurrent callers do not
/// interfere, since each seek has an absolute start.
fn holes(file: BorrowedFd<'_>, start: u64, pages: usize, out: &mut [u64]) -> io::Result<()> {
    if u64::try_from(fstatfs(file)?.f_type) != Ok(TMPFS_MAGIC) {
        return Err(io::ErrorKind::Unsupported.into());
    }
    let end = start + (pages * PAGE_SIZE) as u64;
    let mut at = start;
    while at < end {
        let data = match seek(file, SeekFrom::Data(at)) {
            // The rest of the file is a hole.
            Err(Errno::NXIO) => end,
            other => other?,
        };
        mark(out, start, at, data.min(end));
        if data >= end {
            break;
        }
        at = seek(file, SeekFrom::Hole(data))?;
        if at <= data {
            return Err(io::ErrorKind::InvalidData.into());
        }
    }
    Ok(())
}

/// Sets the bits of the whole pages from byte `from` to byte `to`; bit 0 is the page at `base`.
fn mark(out: &mut [u64], base: u64, from: u64, to: u64) {
    let page = PAGE_SIZE as u64;
    for i in (from - base).div_ceil(page)..to.saturating_sub(base) / page {
        if let Some(word) = usize::try_from(i / 64).ok().and_then(|w| out.get_mut(w)) {
            *word |= 1 << (i % 64);
        }
    }
}

#[cfg(test)]
mod tests {
    use std::os::fd::AsFd;
    use std::sync::Arc;

    use rustix::fs::{MemfdFlags, memfd_create};
    use rustix::mm::{Advice, madvise};
    use vm_memory::{FileOffset, MmapRegion};

    use super::*;
    use crate::{Backing, RamBlock};

    const PAGES: usize = 2048 + 7;

    type ReadUntouched = fn(&File, usize, usize, &mut [u64]) -> io::Result<()>;
    const READERS: [(&str, ReadUntouched); 2] = [("scan", scan), ("entries", read_entries)];

    /// Returns each method's answer about all of `block`; methods that this kernel lacks are omitted.
    fn answers(block: &RamBlock) -> Vec<(&'static str, Vec<bool>)> {
        let file = pagemap().expect("/proc/self/pagemap");
        let answer = |(name, read): (&'static str, ReadUntouched)| {
            let mut out = vec![0; PAGES.div_ceil(64)];
            match read(file, block.host_addr().addr(), PAGES, &mut out) {
                Ok(()) => Some((name, bits(&out))),
                Err(e) => {
                    hotlift_testkit::skip!("pagemap", "no {name} on this kernel: {e}");
                    None
                }
            }
        };
        READERS.into_iter().filter_map(answer).collect()
    }

    fn bits(out: &[u64]) -> Vec<bool> {
        (0..out.len() * 64)
            .map(|i| out[i / 64] >> (i % 64) & 1 == 1)
            .collect()
    }

    fn private(advice: Advice) -> RamBlock {
        let block = RamBlock::new("ram", PAGES * PAGE_SIZE, Backing::Private).expect("map");
        // SAFETY: the block's own mapping; the advice changes no byte.
        unsafe { madvise(block.host_addr().cast(), block.len(), advice) }.expect("advise");
        block
    }

    /// Selects every third page of the first half, so that the answer has more ranges than one call returns.
    fn written(page: usize) -> bool {
        page.is_multiple_of(3) && page < PAGES / 2
    }

    fn write(block: &RamBlock) {
        for page in (0..PAGES).filter(|page| written(*page)) {
            block
                .write(page * PAGE_SIZE + page, &[1])
                .expect("in the block");
        }
    }

    #[test]
    fn fresh_private_memory_is_all_untouched() {
        for (read, answer) in answers(&private(Advice::LinuxNoHugepage)) {
            assert!(answer[..PAGES].iter().all(|bit| *bit), "{read}");
            assert!(
                !answer[PAGES..].iter().any(|bit| *bit),
                "{read}: past the end"
            );
        }
    }

    #[test]
    fn without_huge_pages_each_written_page_is_reported() {
        let block = private(Advice::LinuxNoHugepage);
        write(&block);
        for (read, answer) in answers(&block) {
            for (page, untouched) in answer[..PAGES].iter().enumerate() {
                assert_eq!(*untouched, !written(page), "{read}: page {page}");
            }
        }
    }

    #[test]
    fn with_huge_pages_no_written_page_is_called_untouched() {
        let block = private(Advice::LinuxHugepage);
        write(&block);
        for (read, answer) in answers(&block) {
            for (page, untouched) in answer[..PAGES].iter().enumerate() {
                assert!(!(*untouched && written(page)), "{read}: page {page}");
            }
            // Nothing was written in the last unit, which is too short for a huge page.
            assert!(answer[PAGES - 7..PAGES].iter().all(|bit| *bit), "{read}");
        }
    }

    #[test]
    fn pages_that_were_only_read_stay_untouched_to_the_scan() {
        let block = private(Advice::LinuxNoHugepage);
        assert!((0..PAGES).all(|page| block.page_is_zero(page)));
        write(&block);
        for (read, answer) in answers(&block) {
            for (page, untouched) in answer[..PAGES].iter().enumerate() {
                assert!(!(*untouched && written(page)), "{read}: page {page}");
                assert!(*untouched != written(page) || read != "scan", "page {page}");
            }
        }
    }

    #[test]
    fn an_entry_with_anything_but_soft_dirty_is_touched() {
        assert!(is_empty(0) && is_empty(1 << 55));
        for bit in (0..64).filter(|bit| *bit != 55) {
            assert!(!is_empty(1 << bit), "bit {bit}");
        }
    }

    #[test]
    fn a_part_of_a_block_is_answered_from_its_own_first_page() {
        for backing in [Backing::Private, Backing::Shared] {
            let block = RamBlock::new("ram", PAGES * PAGE_SIZE, backing).expect("map");
            block.write(1000 * PAGE_SIZE, &[1]).expect("in the block");
            let mut out = [u64::MAX; 2];
            assert!(block.untouched(990, 70, &mut out).expect("in the block"));
            let bits = bits(&out);
            assert!(!bits[10], "{backing:?}: the written page");
            assert!(
                !bits[70..].iter().any(|bit| *bit),
                "{backing:?}: past the part"
            );
            let mut out = [0; 1];
            assert!(
                block
                    .untouched(PAGES - 3, 3, &mut out)
                    .expect("in the block")
            );
            assert_eq!(out, [7], "{backing:?}");
        }
    }

    #[test]
    fn untouched_shared_memory_is_known_by_its_file_whichever_process_wrote() {
        let block = RamBlock::new("ram", PAGES * PAGE_SIZE, Backing::Shared).expect("map");
        let file = File::from(
            block
                .fd()
                .expect("memfd")
                .try_clone_to_owned()
                .expect("dup"),
        );
        let mut out = vec![0; PAGES.div_ceil(64)];
        assert!(block.untouched(0, PAGES, &mut out).expect("in the block"));
        assert!(bits(&out)[..PAGES].iter().all(|bit| *bit), "fresh");
        // Not through this process's page tables.
        for page in (0..PAGES).filter(|page| written(*page)) {
            file.write_all_at(&[1], (page * PAGE_SIZE) as u64)
                .expect("write");
        }
        assert!(block.untouched(0, PAGES, &mut out).expect("in the block"));
        for (page, untouched) in bits(&out)[..PAGES].iter().enumerate() {
            assert_eq!(*untouched, !written(page), "page {page}");
        }
    }

    #[test]
    fn memory_without_known_state_has_no_untouched_page() {
        let file = || {
            let file = File::from(memfd_create("file", MemfdFlags::CLOEXEC).expect("memfd"));
            file.write_all_at(&[1; 2 * PAGE_SIZE], 0).expect("write");
            FileOffset::new(file, 0)
        };
        let rw = libc::PROT_READ | libc::PROT_WRITE;
        for (what, file, flags) in [
            ("private file", Some(file()), libc::MAP_PRIVATE),
            (
                "shared without a file",
                None,
                libc::MAP_SHARED | libc::MAP_ANONYMOUS,
            ),
        ] {
            let region = MmapRegion::<()>::build(file, 2 * PAGE_SIZE, rw, flags).expect("map");
            let block = RamBlock::from_region("ram", Arc::new(region)).expect("a block");
            let mut out = [u64::MAX];
            assert!(
                !block.untouched(0, 2, &mut out).expect("in the block"),
                "{what}"
            );
            assert_eq!(out, [0], "{what}");
        }
    }

    #[test]
    fn a_file_system_whose_holes_are_not_known_is_refused() {
        let file = File::open(std::env::current_exe().expect("a path")).expect("open");
        if u64::try_from(fstatfs(&file).expect("statfs").f_type) == Ok(TMPFS_MAGIC) {
            hotlift_testkit::skip!("tmpfs", "the test itself lies on tmpfs");
            return;
        }
        let mut out = [u64::MAX];
        assert!(!in_file(file.as_fd(), 0, 64, &mut out));
        assert_eq!(out, [0]);
    }
}

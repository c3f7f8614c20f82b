//! Allocates memory before its first use.

use std::sync::atomic::{AtomicU8, Ordering};

use rustix::io::Errno;
use rustix::mm::{Advice, madvise};

use crate::{GuestRun, PAGE_SIZE};

/// Allocates the memory of `run`, which starts on a page boundary.
pub(crate) fn populate(run: GuestRun<'_>) -> rustix::io::Result<()> {
    loop {
        // SAFETY: the range is mapped; populating changes no byte of it.
        match unsafe { madvise(run.as_ptr().cast(), run.len(), Advice::LinuxPopulateWrite) } {
            Err(Errno::INTR | Errno::AGAIN) => {}
            // Linux before 5.14, and mappings without support.
            Err(Errno::INVAL) => {
                touch(run);
                return Ok(());
            }
            other => return other,
        }
    }
}

/// Allocates each page by a write that does not change it, even with concurrent writers.
///
/// Exchanges a zero byte for zero, which is a write. A nonzero byte shows that the page is already allocated. `fetch_or(0)`
/// would not work: the compiler turns it into a plain load, which only maps the zero page.
fn touch(run: GuestRun<'_>) {
    for offset in (0..run.len()).step_by(PAGE_SIZE) {
        // SAFETY: the byte is in the run; a byte is always aligned, and access to it is atomic.
        let byte = unsafe { AtomicU8::from_ptr(run.as_ptr().add(offset)) };
        let _ = byte.compare_exchange(0, 0, Ordering::Relaxed, Ordering::Relaxed);
    }
}

#[cfg(test)]
mod tests {
    use std::thread;

    use crate::{Backing, MemError, PAGE_SIZE, RamBlock};

    const PAGES: usize = 1100;

    fn touched(block: &RamBlock) -> bool {
        let mut out = [0; PAGES.div_ceil(64)];
        block.untouched(0, PAGES, &mut out).expect("inside") && out.iter().all(|word| *word == 0)
    }

    #[test]
    fn populated_memory_is_allocated_and_unchanged() {
        for backing in [Backing::Private, Backing::Shared] {
            for by_touch in [false, true] {
                let block = RamBlock::new("ram", PAGES * PAGE_SIZE, backing).expect("map");
                block.write(5000, b"kept").expect("inside");
                assert!(!touched(&block), "{backing:?}: fresh");
                thread::scope(|scope| {
                    for half in 0..2 {
                        let (offset, len) = (half * block.len() / 2, block.len() / 2);
                        let block = &block;
                        scope.spawn(move || match by_touch {
                            true => super::touch(block.run(offset, len).expect("inside")),
                            false => block.populate(offset, len).expect("populate"),
                        });
                    }
                });
                assert!(touched(&block), "{backing:?}, by touch: {by_touch}");
                let mut kept = [0; 4];
                block.read(5000, &mut kept).expect("inside");
                assert_eq!(&kept, b"kept");
            }
        }
    }

    #[test]
    fn only_whole_pages_inside_the_block_are_populated() {
        let block = RamBlock::new("ram", 4 * PAGE_SIZE, Backing::Private).expect("map");
        for (offset, len) in [(1, PAGE_SIZE), (0, PAGE_SIZE + 1)] {
            let refused = block.populate(offset, len);
            assert!(matches!(
                refused,
                Err(MemError::Unaligned {
                    align: PAGE_SIZE,
                    ..
                })
            ));
        }
        let refused = block.populate(PAGE_SIZE, 4 * PAGE_SIZE);
        assert!(matches!(refused, Err(MemError::OutOfBounds { .. })));
        block.populate(PAGE_SIZE, 0).expect("nothing to do");
    }
}

//! Memory that reveals errors of a decoder: reads beyond the input, writes outside the pages, and large allocations.

use std::alloc::{GlobalAlloc, Layout, System};
use std::cell::RefCell;
use std::sync::atomic::{AtomicUsize, Ordering};

use hotlift_mem::{Backing, GuestRun, PAGE_SIZE, RamBlock};
use rustix::mm::{MapFlags, MprotectFlags, ProtFlags, mmap_anonymous, mprotect};

/// Maximum length of an input, in bytes; the fuzzer has the same limit.
pub const INPUT_MAX: usize = 1 << 20;

/// Calls `use_it` with a copy of `bytes` at the end of accessible memory. A read beyond the end causes SIGSEGV.
pub fn at_the_end<T>(bytes: &[u8], use_it: impl FnOnce(&[u8]) -> T) -> T {
    thread_local! {
        static EDGE: RefCell<Vec<&'static mut [u8]>> = const { RefCell::new(Vec::new()) };
    }
    // Calls may be nested, so each call needs separate memory.
    let edge = EDGE.with_borrow_mut(Vec::pop).unwrap_or_else(edge);
    let (_, end) = edge.split_at_mut(INPUT_MAX - bytes.len());
    end.copy_from_slice(bytes);
    let result = use_it(end);
    EDGE.with_borrow_mut(|all| all.push(edge));
    result
}

fn edge() -> &'static mut [u8] {
    let access = ProtFlags::READ | ProtFlags::WRITE;
    let size = INPUT_MAX + PAGE_SIZE;
    // SAFETY: a new mapping at an address that the kernel chooses. Its last page becomes inaccessible before any
    // reference to the mapping exists. Only the returned slice refers to the other pages.
    unsafe {
        let start = mmap_anonymous(std::ptr::null_mut(), size, access, MapFlags::PRIVATE);
        let start = start.expect("memory for the input").cast::<u8>();
        mprotect(
            start.add(INPUT_MAX).cast(),
            PAGE_SIZE,
            MprotectFlags::empty(),
        )
        .expect("a page that nobody may touch");
        std::slice::from_raw_parts_mut(start, INPUT_MAX)
    }
}

/// Value of every byte of guest memory before a decoder writes.
const CANARY: u8 = 0xa5;

/// Length of the first of two runs in each page, in bytes, for [`Order::Pieces`].
const PIECE: usize = 1000;

/// Maximum number of pages in a [`Place`].
pub const PAGES_MAX: usize = 16;

/// Guest memory that contains the pages of a packet, surrounded by canary bytes that detect wrong writes.
pub struct Place {
    block: RamBlock,
    all: Vec<u8>,
}

/// Layout of a packet's pages in guest memory. A run is a contiguous range.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub enum Order {
    /// All pages in one run.
    Whole,
    /// One run per page, in ascending order without gaps.
    Adjacent,
    /// One run per page, in descending order, with an unused page between each two.
    Scattered,
    /// Two runs per page, in the order of [`Order::Scattered`].
    Pieces,
}

impl Order {
    /// Returns the layout that `byte` selects.
    pub fn of(byte: u8) -> Self {
        [Self::Whole, Self::Adjacent, Self::Scattered, Self::Pieces][usize::from(byte % 4)]
    }

    fn offset(self, page: usize, pages: usize) -> usize {
        match self {
            Self::Whole | Self::Adjacent => (1 + page) * PAGE_SIZE,
            Self::Scattered | Self::Pieces => (2 * (pages - page) - 1) * PAGE_SIZE,
        }
    }
}

impl Place {
    /// Calls `use_it` with the only place of the calling thread.
    pub fn with<T>(use_it: impl FnOnce(&mut Self) -> T) -> T {
        thread_local! {
            static PLACE: RefCell<Option<Place>> = const { RefCell::new(None) };
        }
        PLACE.with_borrow_mut(|place| {
            use_it(place.get_or_insert_with(|| {
                let bytes = (2 * PAGES_MAX + 1) * PAGE_SIZE;
                let block = RamBlock::new("ram", bytes, Backing::Private).expect("guest memory");
                block.write(0, &vec![CANARY; bytes]).expect("canaries");
                Self {
                    block,
                    all: vec![0; bytes],
                }
            }))
        })
    }

    /// Calls `decode` with the runs of `pages` pages in the layout `order`. Returns the result of `decode`, and the
    /// content of the pages. Panics if a byte outside the pages was written.
    pub fn decoded<T>(
        &mut self,
        pages: usize,
        order: Order,
        decode: impl FnOnce(&[GuestRun<'_>]) -> T,
    ) -> (T, Vec<u8>) {
        let run = |offset, len| self.block.run(offset, len).expect("a run in the block");
        let runs: Vec<_> = match order {
            Order::Whole => vec![run(PAGE_SIZE, pages * PAGE_SIZE)],
            Order::Pieces => (0..pages)
                .flat_map(|page| {
                    let at = order.offset(page, pages);
                    [run(at, PIECE), run(at + PIECE, PAGE_SIZE - PIECE)]
                })
                .collect(),
            _ => (0..pages)
                .map(|page| run(order.offset(page, pages), PAGE_SIZE))
                .collect(),
        };
        let result = decode(&runs);
        let reach = (2 * pages + 1) * PAGE_SIZE;
        let all = &mut self.all[..reach];
        self.block.read(0, all).expect("read the block");
        let mut content = Vec::with_capacity(pages * PAGE_SIZE);
        for page in 0..pages {
            let page = &mut all[order.offset(page, pages)..][..PAGE_SIZE];
            content.extend_from_slice(page);
            page.fill(CANARY);
        }
        let written = all.iter().position(|&byte| byte != CANARY);
        assert_eq!(written, None, "a byte outside of the pages was written");
        self.block.write(0, all).expect("canaries again");
        (result, content)
    }
}

/// Counts the allocations of Rust code. The fuzzer's own memory limit covers allocations of C code.
struct Counting;

static LIVE: AtomicUsize = AtomicUsize::new(0);
static LIMIT: AtomicUsize = AtomicUsize::new(usize::MAX);

#[global_allocator]
static ALLOCATOR: Counting = Counting;

// SAFETY: the system's allocator does all the work, and the counters do not affect it.
unsafe impl GlobalAlloc for Counting {
    unsafe fn alloc(&self, layout: Layout) -> *mut u8 {
        let live = LIVE.fetch_add(layout.size(), Ordering::Relaxed) + layout.size();
        if live > LIMIT.load(Ordering::Relaxed) {
            // Printing the error message also allocates.
            LIMIT.store(usize::MAX, Ordering::Relaxed);
            eprintln!(
                "a decoder allocates {} bytes, beyond its limit",
                layout.size()
            );
            std::process::abort();
        }
        // SAFETY: the caller's contract is the same.
        unsafe { System.alloc(layout) }
    }

    unsafe fn dealloc(&self, ptr: *mut u8, layout: Layout) {
        LIVE.fetch_sub(layout.size(), Ordering::Relaxed);
        // SAFETY: the caller's contract is the same, and the memory came from `System`.
        unsafe { System.dealloc(ptr, layout) }
    }
}

/// Calls `decode`. Aborts the process if `decode` has more than `bytes` bytes allocated at any time.
pub fn bounded<T>(bytes: usize, decode: impl FnOnce() -> T) -> T {
    LIMIT.store(LIVE.load(Ordering::Relaxed) + bytes, Ordering::Relaxed);
    let result = decode();
    LIMIT.store(usize::MAX, Ordering::Relaxed);
    result
}

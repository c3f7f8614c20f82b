//! Memory that makes a decoder's errors visible.

use std::alloc::{GlobalAlloc, Layout, System};
use std::cell::RefCell;
use std::sync::atomic::{AtomicUsize, Ordering};

use hotlift_mem::{Backing, GuestRun, PAGE_SIZE, RamBlock};
use rustix::mm::{MapFlags, MprotectFlags, ProtFlags, mmap_anonymous, mprotect};

/// Longest input, in bytes. The fuzzer has the same limit.
pub const INPUT_MAX: usize = 1 << 20;

/// Calls `use_it` with a copy of `bytes` at the end of accessible memory: a read beyond them is a SIGSEGV.
pub fn at_the_end<T>(bytes: &[u8], use_it: impl FnOnce(&[u8]) -> T) -> T {
    thread_local! {
        static EDGE: RefCell<Vec<&'static mut [u8]>> = const { RefCell::new(Vec::new()) };
    }
    // Calls nest, so each needs its own memory.
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
    // SAFETY: a new mapping at an address that the kernel chooses. Its last page becomes inaccessible
    // before any reference to it exists, and only the returned slice refers to the rest.
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

/// Value of every byte before a decoder writes.
const CANARY: u8 = 0xa5;

/// Bytes of a page's first run in [`Order::Pieces`].
const PIECE: usize = 1000;

/// Maximum pages of a [`Place`].
pub const PAGES_MAX: usize = 16;

/// Guest memory with the pages of a packet in it, and canaries around them.
pub struct Place {
    block: RamBlock,
    all: Vec<u8>,
}

/// Layout of a packet's pages in memory.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub enum Order {
    /// One run.
    Whole,
    /// One run per page, in ascending order without gaps.
    Adjacent,
    /// One run per page, in descending order, with an unused page between any two.
    Scattered,
    /// As scattered, with two runs per page.
    Pieces,
}

impl Order {
    /// Returns the order that `byte` selects.
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
    /// Calls `use_it` with the thread's only place.
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

    /// Calls `decode` with runs of `pages` pages. Returns its result and the content of the pages.
    /// Panics if a byte outside of them was written.
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

/// Counts the allocations of Rust code. (The fuzzer's own memory limit covers allocations of C.)
struct Counting;

static LIVE: AtomicUsize = AtomicUsize::new(0);
static LIMIT: AtomicUsize = AtomicUsize::new(usize::MAX);

#[global_allocator]
static ALLOCATOR: Counting = Counting;

// SAFETY: the system's allocator does all the work; the counters do not affect it.
unsafe impl GlobalAlloc for Counting {
    unsafe fn alloc(&self, layout: Layout) -> *mut u8 {
        let live = LIVE.fetch_add(layout.size(), Ordering::Relaxed) + layout.size();
        if live > LIMIT.load(Ordering::Relaxed) {
            // Printing the message allocates, too.
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

/// Calls `decode`, and aborts the process if it holds more than `bytes` additional bytes at any time.
pub fn bounded<T>(bytes: usize, decode: impl FnOnce() -> T) -> T {
    LIMIT.store(LIVE.load(Ordering::Relaxed) + bytes, Ordering::Relaxed);
    let result = decode();
    LIMIT.store(usize::MAX, Ordering::Relaxed);
    result
}

//! A RAM block: named guest memory, mapped in this process.

use std::any::Any;
use std::fs::File;
use std::os::fd::{AsFd, BorrowedFd, OwnedFd};
use std::ptr::{self, NonNull};
use std::sync::Arc;
use std::sync::atomic::{AtomicU64, Ordering};

use rustix::fs::{MemfdFlags, SealFlags, fcntl_add_seals, ftruncate, memfd_create};
use rustix::mm::{Advice, MapFlags, ProtFlags, madvise, mmap, mmap_anonymous, munmap};
use vm_memory::bitmap::Bitmap;
use vm_memory::{Address, FileOffset, GuestMemoryBackend, GuestMemoryMmap, GuestMemoryRegion};
use vm_memory::{MmapRegion, VolatileSlice};

use crate::{GuestRun, MemError, PAGE_SIZE, populate, untouched};

/// Longest name of a RAM block in bytes: its length is one byte in the stream.
const NAME_MAX: usize = 255;

/// Size of a huge page on x86-64 in bytes, and alignment of mappings. The kernel backs only whole aligned units by huge pages,
/// and only recent kernels choose such addresses themselves.
const HUGE_PAGE: usize = 2 << 20;

/// Kind of memory of a RAM block.
#[derive(Debug, Clone, Copy, PartialEq, Eq, Default)]
pub enum Backing {
    /// Private anonymous memory, transparent huge pages advised (QEMU's memory-backend-ram).
    #[default]
    Private,
    /// A memfd mapped shared, for guests that run in another process (QEMU's memory-backend-memfd).
    Shared,
}

/// Named guest memory, mapped for the life of the value (QEMU's RAMBlock).
///
/// The guest shares the memory: all access is by copies and tolerates concurrent writers. Writes through a block do not appear
/// in a vm-memory bitmap of its region.
#[derive(Debug)]
pub struct RamBlock {
    name: String,
    addr: NonNull<u8>,
    len: usize,
    backing: Backing,
    /// The file of a shared mapping, if there is one.
    file: Option<FileOffset>,
    /// True for private anonymous memory: a page without an entry in the page tables reads as zero.
    untouched_is_zero: bool,
    /// Keeps the memory mapped.
    _owner: Arc<dyn Any + Send + Sync>,
}

// SAFETY: the mapping belongs to no thread, and is accessed by raw copies that tolerate concurrent writers.
unsafe impl Send for RamBlock {}
// SAFETY: as for `Send`; no method changes the value itself.
unsafe impl Sync for RamBlock {}

impl RamBlock {
    /// Maps `len` bytes (a positive multiple of 4096) of zeroed memory under `name` (1 to 255 bytes). Memory is only allocated
    /// when touched, and not reserved.
    pub fn new(name: &str, len: usize, backing: Backing) -> Result<Self, MemError> {
        check_shape(name, len)?;
        let failed = |action| {
            move |source: rustix::io::Errno| MemError::Kernel {
                action,
                block: name.to_owned(),
                len,
                source: source.into(),
            }
        };
        let file = match backing {
            Backing::Private => None,
            Backing::Shared => {
                let fd = sealed_memfd(name, len).map_err(failed("create the memfd of"))?;
                Some(FileOffset::new(File::from(fd), 0))
            }
        };
        let fd = file.as_ref().map(|f| f.file().as_fd());
        let mapping = Mapping::new(len, fd).map_err(failed("map"))?;
        mapping.advise();
        Ok(Self {
            name: name.to_owned(),
            addr: mapping.addr,
            len,
            backing,
            file,
            untouched_is_zero: backing == Backing::Private,
            _owner: Arc::new(mapping),
        })
    }

    /// Creates a block over memory that a vm-memory region maps; the region lives as long as the block.
    pub fn from_region<B>(name: &str, region: Arc<MmapRegion<B>>) -> Result<Self, MemError>
    where
        B: Bitmap + Send + Sync + 'static,
    {
        let len = region.size();
        check_shape(name, len)?;
        let address = region.as_ptr();
        let Some(addr) = NonNull::new(address).filter(|a| a.addr().get() % PAGE_SIZE == 0) else {
            return Err(MemError::Address {
                block: name.to_owned(),
                address: address.addr(),
            });
        };
        let prot = region.prot();
        let needed = libc::PROT_READ | libc::PROT_WRITE;
        if prot & needed != needed {
            return Err(MemError::Protection {
                block: name.to_owned(),
                prot,
            });
        }
        let shared = region.flags() & libc::MAP_SHARED != 0;
        Ok(Self {
            name: name.to_owned(),
            addr,
            len,
            backing: if shared {
                Backing::Shared
            } else {
                Backing::Private
            },
            file: region.file_offset().filter(|_| shared).cloned(),
            untouched_is_zero: !shared && region.flags() & libc::MAP_ANONYMOUS != 0,
            _owner: region,
        })
    }

    /// Returns the name of the block, the same on both sides of a migration.
    pub fn name(&self) -> &str {
        &self.name
    }

    /// Returns the length of the block in bytes.
    #[allow(clippy::len_without_is_empty)] // a block has at least one page
    pub fn len(&self) -> usize {
        self.len
    }

    /// Returns the number of pages of the block.
    pub fn pages(&self) -> usize {
        self.len / PAGE_SIZE
    }

    /// Returns the kind of memory.
    pub fn backing(&self) -> Backing {
        self.backing
    }

    /// Returns the address of the mapping in this process, for KVM's memory slots. A user must not create references from it:
    /// the guest may write the bytes at any time.
    pub fn host_addr(&self) -> *mut u8 {
        self.addr.as_ptr()
    }

    /// Returns the file of a shared block, for another process; `None` if the block has no file.
    pub fn fd(&self) -> Option<BorrowedFd<'_>> {
        self.file.as_ref().map(|f| f.file().as_fd())
    }

    /// Returns the start of the block in [`fd`](Self::fd), in bytes; 0 if the block has no file.
    pub fn fd_offset(&self) -> u64 {
        self.file.as_ref().map_or(0, FileOffset::start)
    }

    /// Returns the whole block as vm-memory's slice, for loaders and device models that need it.
    pub fn as_volatile_slice(&self) -> VolatileSlice<'_> {
        // SAFETY: the mapping is valid for the slice's life, which borrows the block, and volatile
        // slices hand out no references.
        unsafe { VolatileSlice::new(self.host_addr(), self.len) }
    }

    /// Returns the run of `len` bytes from `offset` on; [`MemError::OutOfBounds`] if it is not inside the block.
    pub fn run(&self, offset: usize, len: usize) -> Result<GuestRun<'_>, MemError> {
        if offset > self.len || len > self.len - offset {
            return Err(MemError::OutOfBounds {
                block: self.name.clone(),
                offset,
                len,
                block_len: self.len,
            });
        }
        // SAFETY: the range is inside the mapping, which lives as long as the block is borrowed, and
        // no references to it exist anywhere in this crate.
        Ok(unsafe { GuestRun::new(self.host_addr().add(offset), len) })
    }

    /// Copies bytes from `offset` on, until `to` is full.
    pub fn read(&self, offset: usize, to: &mut [u8]) -> Result<(), MemError> {
        self.run(offset, to.len()).map(|run| run.copy_to(to))
    }

    /// Copies `from` to the block, at `offset` in bytes.
    pub fn write(&self, offset: usize, from: &[u8]) -> Result<(), MemError> {
        self.run(offset, from.len()).map(|run| run.copy_from(from))
    }

    /// Sets `len` bytes from `offset` on to zero.
    pub fn zero(&self, offset: usize, len: usize) -> Result<(), MemError> {
        self.run(offset, len).map(|run| run.fill_zero())
    }

    /// Reads the 64-bit word at `offset` (a multiple of 8) atomically, in native byte order and with relaxed ordering.
    pub fn load_u64(&self, offset: usize) -> Result<u64, MemError> {
        Ok(self.word(offset)?.load(Ordering::Relaxed))
    }

    /// Writes the 64-bit word at `offset` (a multiple of 8) atomically, in native byte order and with relaxed ordering.
    pub fn store_u64(&self, offset: usize, value: u64) -> Result<(), MemError> {
        self.word(offset)?.store(value, Ordering::Relaxed);
        Ok(())
    }

    fn word(&self, offset: usize) -> Result<&AtomicU64, MemError> {
        const ALIGN: usize = align_of::<AtomicU64>();
        let run = self.run(offset, size_of::<u64>())?;
        if !offset.is_multiple_of(ALIGN) {
            return Err(MemError::Unaligned {
                block: self.name.clone(),
                offset,
                align: ALIGN,
            });
        }
        // SAFETY: the word is mapped as long as the block is borrowed. It is aligned, as the mapping starts on a page.
        // Concurrent writes to an atomic are allowed.
        Ok(unsafe { AtomicU64::from_ptr(run.as_ptr().cast()) })
    }

    /// Returns true if every byte of page `page` was zero when it was read; false past the end.
    pub fn page_is_zero(&self, page: usize) -> bool {
        page.checked_mul(PAGE_SIZE)
            .and_then(|offset| self.run(offset, PAGE_SIZE).ok())
            .is_some_and(|run| run.is_zero())
    }

    /// Asks the kernel which of `pages` pages from `first_page` on were never written, and so are zero. Sets their bits in
    /// `out`, and clears all other bits. The lowest bit of `out[0]` is `first_page`. Returns false, with all bits clear, if the
    /// kernel cannot report this.
    ///
    /// A set bit proves only that the page was zero at the time of the call. The caller must clear the page's dirty bit before
    /// the call: a later write then marks the page again. A clear bit proves nothing.
    ///
    /// # Errors
    ///
    /// If the pages are outside the block, or `out` has fewer bits than `pages`.
    pub fn untouched(
        &self,
        first_page: usize,
        pages: usize,
        out: &mut [u64],
    ) -> Result<bool, MemError> {
        let run = self.run(
            first_page.saturating_mul(PAGE_SIZE),
            pages.saturating_mul(PAGE_SIZE),
        )?;
        let needed = pages.div_ceil(64);
        if out.len() < needed {
            return Err(MemError::AnswerTooShort {
                pages,
                needed,
                got: out.len(),
            });
        }
        out.fill(0);
        Ok(match &self.file {
            Some(file) => {
                let start = file.start() + (first_page * PAGE_SIZE) as u64;
                untouched::in_file(file.file().as_fd(), start, pages, out)
            }
            None if self.untouched_is_zero => {
                untouched::in_page_tables(run.as_ptr().addr(), pages, out)
            }
            None => false,
        })
    }

    /// Returns true if the block's pages can be removed. A removed page reads as zero, or is missing for userfaultfd.
    pub(crate) fn can_be_emptied(&self) -> bool {
        // Pages removed from a private mapping of a file have the file's content again.
        self.untouched_is_zero || self.backing == Backing::Shared
    }

    /// Removes the memory of `len` bytes from `offset` on (whole pages). The next read returns zeros, or a userfaultfd reports
    /// the pages as missing. Shared memory is removed for all processes that share it.
    ///
    /// # Errors
    /// [`MemError::NotLazy`] for a private mapping of a file; [`MemError::Unaligned`] or [`MemError::OutOfBounds`] for a bad
    /// range; [`MemError::Kernel`] if the kernel rejects the call.
    pub fn discard(&self, offset: usize, len: usize) -> Result<(), MemError> {
        self.check_pages(offset, len)?;
        let run = self.run(offset, len)?;
        if !self.can_be_emptied() {
            return Err(MemError::NotLazy {
                block: self.name.clone(),
                source: None,
            });
        }
        let advice = match self.backing {
            Backing::Private => Advice::LinuxDontNeed,
            Backing::Shared => Advice::LinuxRemove,
        };
        if len == 0 {
            return Ok(());
        }
        // SAFETY: the range is mapped. The caller wants its bytes to become zero, as if the guest wrote zeros.
        unsafe { madvise(run.as_ptr().cast(), len, advice) }.map_err(|source| MemError::Kernel {
            action: "discard a part of",
            block: self.name.clone(),
            len,
            source: source.into(),
        })
    }

    /// Enables or disables transparent huge pages for the block.
    pub(crate) fn advise_huge_pages(&self, huge: bool) {
        let advice = match huge {
            true => Advice::LinuxHugepage,
            false => Advice::LinuxNoHugepage,
        };
        // A kernel without huge pages refuses, which is harmless.
        // SAFETY: the range is mapped, and no byte of it changes.
        let _ = unsafe { madvise(self.host_addr().cast(), self.len, advice) };
    }

    fn check_pages(&self, offset: usize, len: usize) -> Result<(), MemError> {
        for value in [offset, len] {
            if !value.is_multiple_of(PAGE_SIZE) {
                return Err(MemError::Unaligned {
                    block: self.name.clone(),
                    offset: value,
                    align: PAGE_SIZE,
                });
            }
        }
        Ok(())
    }

    /// Allocates the memory of `len` bytes from `offset` on (whole pages) without changing it. Several threads may populate
    /// parts of one block concurrently.
    pub fn populate(&self, offset: usize, len: usize) -> Result<(), MemError> {
        self.check_pages(offset, len)?;
        populate::populate(self.run(offset, len)?).map_err(|source| MemError::Kernel {
            action: "populate",
            block: self.name.clone(),
            len,
            source: source.into(),
        })
    }
}

/// Creates a RAM block for each region of `memory`, in its order, named after the region's guest address (`ram@100000000`). If
/// source and destination have equal layouts, the names are equal too.
pub fn ram_blocks_of<B>(memory: &GuestMemoryMmap<B>) -> Result<Vec<RamBlock>, MemError>
where
    B: Bitmap + Send + Sync + 'static,
{
    memory
        .iter()
        .map(|region| {
            let name = format!("ram@{:x}", region.start_addr().raw_value());
            RamBlock::from_region(&name, region.get_mmap())
        })
        .collect()
}

fn check_shape(name: &str, len: usize) -> Result<(), MemError> {
    if !(1..=NAME_MAX).contains(&name.len()) {
        return Err(MemError::Name { got: name.len() });
    }
    if len == 0 || !len.is_multiple_of(PAGE_SIZE) {
        return Err(MemError::Length {
            block: name.to_owned(),
            got: len,
        });
    }
    Ok(())
}

/// Creates a memfd of `len` bytes that no process can shrink: access past the end of a file is a SIGBUS.
fn sealed_memfd(name: &str, len: usize) -> rustix::io::Result<OwnedFd> {
    let size = u64::try_from(len).map_err(|_| rustix::io::Errno::FBIG)?;
    // The kernel accepts 249 bytes without NUL; the name is only visible in /proc.
    let label: String = name.chars().filter(|c| *c != '\0').take(60).collect();
    let fd = memfd_create(label, MemfdFlags::CLOEXEC | MemfdFlags::ALLOW_SEALING)?;
    ftruncate(&fd, size)?;
    fcntl_add_seals(&fd, SealFlags::SHRINK | SealFlags::GROW | SealFlags::SEAL)?;
    Ok(fd)
}

/// A mapping aligned to huge pages, unmapped on drop.
#[derive(Debug)]
struct Mapping {
    addr: NonNull<u8>,
    len: usize,
}

// SAFETY: a mapping belongs to no thread.
unsafe impl Send for Mapping {}
// SAFETY: a shared reference gives no access to the memory.
unsafe impl Sync for Mapping {}

impl Mapping {
    /// Maps `len` bytes, from `file` or anonymous.
    ///
    /// vm-memory cannot map at a chosen address. So this function reserves address space with room for alignment, and then maps
    /// the memory inside it.
    fn new(len: usize, file: Option<BorrowedFd<'_>>) -> rustix::io::Result<Self> {
        let room = len.checked_add(HUGE_PAGE).ok_or(rustix::io::Errno::NOMEM)?;
        let reserve = MapFlags::PRIVATE | MapFlags::NORESERVE;
        // SAFETY: a new mapping at an address of the kernel's choice touches nothing that exists.
        let start =
            unsafe { mmap_anonymous(ptr::null_mut(), room, ProtFlags::empty(), reserve) }?.cast();
        let reserved = Mapping {
            addr: NonNull::new(start).ok_or(rustix::io::Errno::NOMEM)?,
            len: room,
        };
        let lead = start.addr().next_multiple_of(HUGE_PAGE) - start.addr();
        // SAFETY: at most HUGE_PAGE - 1 of the room is skipped.
        let at: *mut u8 = unsafe { start.add(lead) };
        let rw = ProtFlags::READ | ProtFlags::WRITE;
        let flags = MapFlags::FIXED | MapFlags::NORESERVE;
        // SAFETY: the target lies in the reservation, which no other code uses.
        unsafe {
            match file {
                None => mmap_anonymous(at.cast(), len, rw, flags | MapFlags::PRIVATE)?,
                Some(fd) => mmap(at.cast(), len, rw, flags | MapFlags::SHARED, fd, 0)?,
            }
        };
        std::mem::forget(reserved);
        let addr = NonNull::new(at).ok_or(rustix::io::Errno::NOMEM)?;
        for (edge, edge_len) in [(start, lead), (at.wrapping_add(len), room - lead - len)] {
            if edge_len != 0 {
                // SAFETY: no other code uses the edges of the reservation, and they are empty. If it fails they stay reserved,
                // which costs only address space.
                let _ = unsafe { munmap(edge.cast(), edge_len) };
            }
        }
        Ok(Self { addr, len })
    }

    /// Gives the kernel QEMU's hints for guest RAM.
    fn advise(&self) {
        // Huge pages reduce faults and TLB misses. A child process gets no copy: between fork and exec, writes would copy the
        // whole guest, and a page spliced to a socket could stay with the child.
        for advice in [Advice::LinuxHugepage, Advice::LinuxDontFork] {
            // A kernel without huge pages refuses; both hints only affect speed.
            // SAFETY: the range is our own mapping, and no byte of it changes.
            let _ = unsafe { madvise(self.addr.as_ptr().cast(), self.len, advice) };
        }
    }
}

impl Drop for Mapping {
    fn drop(&mut self) {
        // Fails only for a range that is not mapped.
        // SAFETY: the mapping is ours, and all borrows from it have ended.
        let _ = unsafe { munmap(self.addr.as_ptr().cast(), self.len) };
    }
}

#[cfg(test)]
mod tests {
    use std::os::unix::fs::FileExt;

    use rustix::fs::MemfdFlags;
    use vm_memory::{Bytes, GuestAddress};

    use super::*;

    const LEN: usize = 3 * PAGE_SIZE;
    const BACKINGS: [Backing; 2] = [Backing::Private, Backing::Shared];

    fn block(backing: Backing) -> RamBlock {
        RamBlock::new("pc.ram", LEN, backing).expect("map")
    }

    #[test]
    fn a_block_is_fresh_zeroed_memory_of_its_name_and_length() {
        for backing in BACKINGS {
            let block = block(backing);
            assert_eq!(
                (block.name(), block.len(), block.pages()),
                ("pc.ram", LEN, 3)
            );
            assert_eq!(block.backing(), backing);
            assert_eq!(block.fd().is_some(), backing == Backing::Shared);
            assert!(block.run(0, LEN).expect("inside").is_zero());
        }
    }

    #[test]
    fn names_and_lengths_that_the_stream_cannot_carry_are_refused() {
        for backing in BACKINGS {
            for len in [0, 1, PAGE_SIZE - 1, PAGE_SIZE + 1] {
                let refused = RamBlock::new("ram", len, backing);
                assert!(matches!(refused, Err(MemError::Length { got, .. }) if got == len));
            }
            for len in [0, 256] {
                let refused = RamBlock::new(&"n".repeat(len), LEN, backing);
                assert!(matches!(refused, Err(MemError::Name { got }) if got == len));
            }
            for name in ["n".repeat(255), "ö\0ö".repeat(40)] {
                assert_eq!(
                    RamBlock::new(&name, LEN, backing).expect("map").name(),
                    name
                );
            }
        }
    }

    #[test]
    fn a_length_beyond_the_address_space_is_an_error() {
        for backing in BACKINGS {
            for len in [usize::MAX - PAGE_SIZE + 1, 1 << 60] {
                let refused = RamBlock::new("ram", len, backing);
                assert!(matches!(refused, Err(MemError::Kernel { .. })), "{len:#x}");
            }
        }
    }

    #[test]
    fn access_ends_at_the_end_of_the_block() {
        for backing in BACKINGS {
            let block = block(backing);
            block.write(LEN - 4, b"last").expect("inside");
            let mut last = [0; 4];
            block.read(LEN - 4, &mut last).expect("inside");
            assert_eq!(&last, b"last");
            assert_eq!(block.run(LEN, 0).expect("inside").len(), 0);
            for (offset, len) in [
                (LEN, 1),
                (LEN + 1, 0),
                (0, LEN + 1),
                (1, usize::MAX),
                (usize::MAX, 2),
            ] {
                let refused = block.run(offset, len);
                assert!(
                    matches!(refused, Err(MemError::OutOfBounds { .. })),
                    "{offset}, {len}"
                );
            }
            assert!(block.write(LEN - 3, b"last").is_err());
            assert!(block.read(LEN - 3, &mut last).is_err());
            assert!(block.zero(LEN - 3, 4).is_err());
            assert!(block.load_u64(LEN - 4).is_err());
            assert!(block.untouched(0, 4, &mut [0]).is_err());
            assert!(block.untouched(usize::MAX, 1, &mut [0]).is_err());
            block.zero(LEN - 4, 4).expect("inside");
            assert!(block.run(0, LEN).expect("inside").is_zero());
        }
    }

    #[test]
    fn words_are_whole_and_aligned() {
        let block = block(Backing::Private);
        block
            .store_u64(LEN - 8, 0x0102_0304_0506_0708)
            .expect("inside");
        assert_eq!(
            block.load_u64(LEN - 8).expect("inside"),
            0x0102_0304_0506_0708
        );
        let mut bytes = [0; 8];
        block.read(LEN - 8, &mut bytes).expect("inside");
        assert_eq!(u64::from_ne_bytes(bytes), 0x0102_0304_0506_0708);
        let refused = block.store_u64(4, 1);
        assert!(matches!(
            refused,
            Err(MemError::Unaligned {
                offset: 4,
                align: 8,
                ..
            })
        ));
    }

    #[test]
    fn a_page_is_zero_until_any_byte_of_it_is_set() {
        let block = block(Backing::Private);
        for at in [0, 1, PAGE_SIZE - 1] {
            block.write(PAGE_SIZE + at, &[1]).expect("inside");
            assert!(!block.page_is_zero(1), "byte {at}");
            assert!(block.page_is_zero(0) && block.page_is_zero(2));
            block.zero(PAGE_SIZE + at, 1).expect("inside");
            assert!(block.page_is_zero(1));
        }
        assert!(!block.page_is_zero(3));
        assert!(!block.page_is_zero(usize::MAX));
    }

    #[test]
    fn a_buffer_of_the_wrong_length_is_refused() {
        let block = RamBlock::new("ram", 65 * PAGE_SIZE, Backing::Private).expect("map");
        let refused = block.untouched(0, 65, &mut [0]);
        assert!(matches!(
            refused,
            Err(MemError::AnswerTooShort {
                needed: 2,
                got: 1,
                ..
            })
        ));
    }

    #[test]
    fn mappings_start_where_huge_pages_can() {
        for backing in BACKINGS {
            for len in [
                PAGE_SIZE,
                HUGE_PAGE - PAGE_SIZE,
                HUGE_PAGE,
                3 * HUGE_PAGE + PAGE_SIZE,
            ] {
                let block = RamBlock::new("ram", len, backing).expect("map");
                assert_eq!(block.host_addr().addr() % HUGE_PAGE, 0);
                // All of it is mapped; removing the edges has not removed anything around it.
                block.populate(0, len).expect("populate");
            }
        }
    }

    #[test]
    fn a_dropped_block_gives_its_address_space_back() {
        // Four times the 128 TiB that a process has.
        for _ in 0..512 {
            match RamBlock::new("ram", 1 << 40, Backing::Private) {
                Ok(_) => {}
                Err(MemError::Kernel { source, .. }) => panic!("{source}"),
                Err(e) => panic!("{e}"),
            }
        }
    }

    #[test]
    fn shared_memory_is_backed_by_the_file_that_is_returned() {
        let block = block(Backing::Shared);
        let file = File::from(
            block
                .fd()
                .expect("memfd")
                .try_clone_to_owned()
                .expect("dup"),
        );
        file.write_all_at(b"theirs", 5000).expect("write");
        let mut bytes = [0; 6];
        block.read(5000, &mut bytes).expect("inside");
        assert_eq!(&bytes, b"theirs");
        block.write(5000, b"ours!!").expect("inside");
        file.read_exact_at(&mut bytes, 5000).expect("read");
        assert_eq!(&bytes, b"ours!!");
    }

    #[test]
    fn the_file_of_shared_memory_cannot_be_truncated() {
        let block = block(Backing::Shared);
        let file = File::from(
            block
                .fd()
                .expect("memfd")
                .try_clone_to_owned()
                .expect("dup"),
        );
        assert!(file.set_len(0).is_err());
    }

    #[test]
    fn a_region_of_vm_memory_lives_as_long_as_its_block() {
        let region = Arc::new(MmapRegion::<()>::new(LEN).expect("map"));
        let gone = Arc::downgrade(&region);
        let block = RamBlock::from_region("ram", region).expect("a block");
        assert_eq!(block.backing(), Backing::Private);
        block.write(LEN - 1, &[1]).expect("inside");
        assert!(gone.upgrade().is_some());
        drop(block);
        assert!(gone.upgrade().is_none());
    }

    #[test]
    fn regions_that_cannot_be_guest_ram_are_refused() {
        let region = |len, prot| {
            let flags = libc::MAP_PRIVATE | libc::MAP_ANONYMOUS;
            Arc::new(MmapRegion::<()>::build(None, len, prot, flags).expect("map"))
        };
        let rw = libc::PROT_READ | libc::PROT_WRITE;
        let odd = RamBlock::from_region("ram", region(LEN + 1, rw));
        assert!(matches!(odd, Err(MemError::Length { .. })));
        let read_only = RamBlock::from_region("ram", region(LEN, libc::PROT_READ));
        assert!(matches!(read_only, Err(MemError::Protection { .. })));
        let unnamed = RamBlock::from_region("", region(LEN, rw));
        assert!(matches!(unnamed, Err(MemError::Name { got: 0 })));
    }

    #[test]
    fn a_guest_memory_becomes_blocks_over_the_same_bytes() {
        let fd = memfd_create("ram", MemfdFlags::CLOEXEC).expect("memfd");
        ftruncate(&fd, 5 * PAGE_SIZE as u64).expect("size");
        let file = FileOffset::new(File::from(fd), PAGE_SIZE as u64);
        let memory: GuestMemoryMmap = GuestMemoryMmap::from_ranges_with_files([
            (GuestAddress(0), LEN, None),
            (GuestAddress(1 << 32), LEN, Some(file)),
        ])
        .expect("map");
        let blocks = ram_blocks_of(&memory).expect("blocks");
        let names: Vec<_> = blocks.iter().map(RamBlock::name).collect();
        assert_eq!(names, ["ram@0", "ram@100000000"]);
        assert_eq!(
            (blocks[0].fd_offset(), blocks[1].fd_offset()),
            (0, PAGE_SIZE as u64)
        );
        assert_eq!(blocks[1].backing(), Backing::Shared);
        let high = GuestAddress((1 << 32) + 100);
        memory.write_slice(b"seen", high).expect("write");
        let mut bytes = [0; 4];
        blocks[1].read(100, &mut bytes).expect("inside");
        assert_eq!(&bytes, b"seen");
        // The file starts a page before the memory, and the answer must not be shifted by it.
        let mut out = [0];
        assert!(blocks[1].untouched(0, 3, &mut out).expect("inside"));
        assert_eq!(out, [0b110]);
    }

    #[test]
    fn the_volatile_slice_is_the_block() {
        let block = block(Backing::Private);
        let slice = block.as_volatile_slice();
        assert_eq!(slice.len(), LEN);
        slice.write_slice(b"loaded", LEN - 6).expect("inside");
        let mut bytes = [0; 6];
        block.read(LEN - 6, &mut bytes).expect("inside");
        assert_eq!(&bytes, b"loaded");
    }
}

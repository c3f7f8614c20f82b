//! Loads pages when they are touched: userfaultfd over RAM blocks.
//!
//! A thread that touches a missing page sleeps in the kernel until the page is [placed](MissingPages::place). It may be a vCPU,
//! a device's thread, or a thread in a system call.

use std::fs::OpenOptions;
use std::io;
use std::os::fd::{AsFd, BorrowedFd, FromRawFd, OwnedFd};
use std::sync::Arc;
use std::sync::atomic::{AtomicBool, Ordering};

use linux_raw_sys::general as sys;
use linux_raw_sys::ioctl as request;
use rustix::io::Errno;
use rustix::ioctl::{Ioctl, IoctlOutput, Opcode, Setter, Updater, ioctl};
use rustix::mm::{UserfaultfdFlags, userfaultfd};

use crate::{MemError, PAGE_SIZE, RamBlock};

/// Device of userfaultfd. A process that may open it can handle kernel faults, which KVM's vCPUs need, without root privileges.
const DEVICE: &str = "/dev/userfaultfd";

/// Ioctl `USERFAULTFD_IOC_NEW` of that device, `_IO(0xaa, 0)`.
const NEW: Opcode = 0xaa00;

/// Maximum number of events per read: usually one for each vCPU.
const EVENTS: usize = 64;

/// Capabilities of userfaultfd on this host.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub struct UserfaultSupport {
    /// True if opened through `/dev/userfaultfd`. False if opened by the system call, which needs root unless
    /// `vm.unprivileged_userfaultfd` is 1.
    pub by_device: bool,
    /// True if pages of shared memory can be missing. Pages of private memory always can.
    pub missing_shared: bool,
    /// True if faults of shared pages that exist but are not mapped yet are reported.
    pub minor_shared: bool,
    /// True if first writes to private pages are reported.
    pub write_protect: bool,
    /// True if first writes to shared pages are reported.
    pub write_protect_shared: bool,
    /// True if a fault reports its thread.
    pub thread_id: bool,
}

impl UserfaultSupport {
    fn of(by_device: bool, features: u64) -> Self {
        let has = |feature: u32| features & u64::from(feature) != 0;
        Self {
            by_device,
            missing_shared: has(sys::UFFD_FEATURE_MISSING_SHMEM),
            minor_shared: has(sys::UFFD_FEATURE_MINOR_SHMEM),
            write_protect: has(sys::UFFD_FEATURE_PAGEFAULT_FLAG_WP),
            write_protect_shared: has(sys::UFFD_FEATURE_WP_HUGETLBFS_SHMEM),
            thread_id: has(sys::UFFD_FEATURE_THREAD_ID),
        }
    }
}

/// Queries the kernel's capabilities of userfaultfd.
///
/// # Errors
/// The system's error if this process cannot use userfaultfd.
pub fn probe_userfault() -> io::Result<UserfaultSupport> {
    let (fd, by_device) = open()?;
    Ok(UserfaultSupport::of(by_device, agree(&fd, 0)?))
}

fn open() -> rustix::io::Result<(OwnedFd, bool)> {
    let flags = UserfaultfdFlags::CLOEXEC | UserfaultfdFlags::NONBLOCK;
    if let Ok(device) = OpenOptions::new().read(true).write(true).open(DEVICE)
        // SAFETY: the call creates a descriptor, and does not access memory.
        && let Ok(fd) = unsafe { ioctl(&device, New(flags)) }
    {
        return Ok((fd, true));
    }
    // SAFETY: a descriptor without a registered range does nothing.
    unsafe { userfaultfd(flags) }.map(|fd| (fd, false))
}

/// The device's only ioctl, which returns a descriptor.
struct New(UserfaultfdFlags);

// SAFETY: the ioctl takes flags by value, and returns a new descriptor.
unsafe impl Ioctl for New {
    type Output = OwnedFd;
    const IS_MUTATING: bool = false;

    fn opcode(&self) -> Opcode {
        NEW
    }

    fn as_ptr(&mut self) -> *mut rustix::ffi::c_void {
        std::ptr::without_provenance_mut(usize::try_from(self.0.bits()).unwrap_or_default())
    }

    unsafe fn output_from_ptr(
        out: IoctlOutput,
        _: *mut rustix::ffi::c_void,
    ) -> rustix::io::Result<OwnedFd> {
        // SAFETY: the kernel created the descriptor for this call.
        Ok(unsafe { OwnedFd::from_raw_fd(out) })
    }
}

/// Enables the requested `features`; returns all features of the kernel.
fn agree(fd: &OwnedFd, features: u64) -> rustix::io::Result<u64> {
    let mut api = sys::uffdio_api {
        api: sys::UFFD_API.into(),
        features,
        ioctls: 0,
    };
    update::<{ opcode(request::UFFDIO_API) }, _>(fd, &mut api)?;
    Ok(api.features)
}

/// Converts a request of the kernel's headers, which always has 32 bits.
const fn opcode(request: u32) -> Opcode {
    request as Opcode
}

/// Calls an ioctl whose argument the kernel reads and changes. `T` must be the ioctl's own type. The ioctls in this file at
/// most fill missing pages of this process, which is equivalent to a write by the guest.
fn update<const OPCODE: Opcode, T>(fd: &OwnedFd, argument: &mut T) -> rustix::io::Result<()> {
    // SAFETY: all callers are in this file, with the type that belongs to the request.
    unsafe { ioctl(fd, Updater::<OPCODE, T>::new(argument)) }
}

/// Calls an ioctl on a range, which the kernel only reads.
fn control<const OPCODE: Opcode>(fd: &OwnedFd, range: sys::uffdio_range) -> rustix::io::Result<()> {
    // SAFETY: all callers are in this file, with requests that take a range.
    unsafe { ioctl(fd, Setter::<OPCODE, sys::uffdio_range>::new(range)) }
}

fn range(block: &RamBlock, offset: usize, len: usize) -> Result<sys::uffdio_range, MemError> {
    let run = block.run(offset, len)?;
    Ok(sys::uffdio_range {
        start: run.as_ptr().addr() as u64,
        len: len as u64,
    })
}

/// A page that a thread waits for.
#[derive(Debug, Clone, Copy, PartialEq, Eq, PartialOrd, Ord)]
pub struct Fault {
    /// Index of the RAM block in the registered list.
    pub block: usize,
    /// Index of the page in the block.
    pub page: usize,
}

/// A thread that waits for a page.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub struct Touch {
    /// The page that the thread waits for.
    pub fault: Fault,
    /// Kernel's thread id.
    pub thread: u32,
}

/// Result of placing a page.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
#[must_use]
pub enum Placed {
    /// The page was placed, and waiting threads continue.
    Now,
    /// The page existed already, and is unchanged.
    Before,
}

/// RAM blocks whose missing pages [`MissingPages::place`] fills.
///
/// A guest that waits for a page must never continue with zeros. So a value that is dropped without [`MissingPages::end`] stays
/// registered in the kernel until the process ends.
#[derive(Debug)]
pub struct MissingPages {
    fd: std::mem::ManuallyDrop<OwnedFd>,
    blocks: Vec<Arc<RamBlock>>,
    ended: AtomicBool,
}

impl MissingPages {
    /// Registers `blocks`: from now on, a touch of a page without memory waits until the page is placed. Transparent huge pages
    /// are disabled for the blocks until [`MissingPages::end`]: a huge page would fill the neighbours of the touched page.
    ///
    /// # Errors
    /// [`MemError::NoUserfault`] if this process cannot use userfaultfd; [`MemError::NotLazy`] for a block whose kind of memory
    /// does not support missing pages.
    pub fn register(blocks: &[Arc<RamBlock>]) -> Result<Self, MemError> {
        let no_userfault = |source: Errno| MemError::NoUserfault {
            source: source.into(),
        };
        let (fd, _) = open().map_err(no_userfault)?;
        // Linux 4.14 and newer.
        agree(&fd, sys::UFFD_FEATURE_THREAD_ID.into()).map_err(no_userfault)?;
        let missing = Self {
            fd: std::mem::ManuallyDrop::new(fd),
            blocks: blocks.to_vec(),
            ended: AtomicBool::new(false),
        };
        let registered = blocks.iter().try_for_each(|block| missing.add(block));
        if registered.is_err() {
            missing.end();
        }
        registered.map(|()| missing)
    }

    fn add(&self, block: &RamBlock) -> Result<(), MemError> {
        let not_lazy = |source: Option<Errno>| MemError::NotLazy {
            block: block.name().to_owned(),
            source: source.map(io::Error::from),
        };
        if !block.can_be_emptied() {
            return Err(not_lazy(None));
        }
        block.advise_huge_pages(false);
        let mut register = sys::uffdio_register {
            range: range(block, 0, block.len())?,
            mode: sys::UFFDIO_REGISTER_MODE_MISSING.into(),
            ioctls: 0,
        };
        update::<{ opcode(request::UFFDIO_REGISTER) }, _>(&self.fd, &mut register)
            .map_err(|source| not_lazy(Some(source)))?;
        // hugetlbfs memory has no zero pages, and only accepts whole huge pages.
        let needed = 1 << sys::_UFFDIO_COPY | 1 << sys::_UFFDIO_ZEROPAGE;
        match register.ioctls & needed == needed {
            true => Ok(()),
            false => Err(not_lazy(None)),
        }
    }

    /// Appends the threads that newly wait for a page to `into`, without blocking. Poll [`AsFd::as_fd`] to wait for such
    /// threads.
    ///
    /// # Errors
    /// [`MemError::NoUserfault`] with the system's error.
    pub fn faults(&self, into: &mut Vec<Touch>) -> Result<(), MemError> {
        const LEN: usize = size_of::<sys::uffd_msg>();
        let mut bytes = [0_u8; EVENTS * LEN];
        let read = match rustix::io::read(&*self.fd, &mut bytes) {
            Ok(read) => read,
            Err(Errno::AGAIN | Errno::INTR) => 0,
            Err(source) => {
                return Err(MemError::NoUserfault {
                    source: source.into(),
                });
            }
        };
        let (events, _) = bytes[..read].as_chunks::<LEN>();
        // Event, padding up to 8, flags, address, thread.
        let touch = |event: &[u8; LEN]| {
            let address = event[16..].first_chunk().copied().map(u64::from_ne_bytes);
            let thread = event[24..].first_chunk().copied().map(u32::from_ne_bytes);
            let is_fault = u32::from(event[0]) == sys::UFFD_EVENT_PAGEFAULT;
            Some(Touch {
                fault: self.find(usize::try_from(address.filter(|_| is_fault)?).ok()?)?,
                thread: thread?,
            })
        };
        into.extend(events.iter().filter_map(touch));
        Ok(())
    }

    fn find(&self, address: usize) -> Option<Fault> {
        let mut blocks = self.blocks.iter().enumerate();
        blocks.find_map(|(index, block)| {
            let offset = address.checked_sub(block.host_addr().addr())?;
            (offset < block.len()).then_some(Fault {
                block: index,
                page: offset / PAGE_SIZE,
            })
        })
    }

    /// Fills a missing page with `content` (`None`: zeros), and wakes the threads that wait for it. After
    /// [`MissingPages::end`], zeros return [`Placed::Before`], and any other content is an error.
    ///
    /// # Errors
    /// [`MemError::OutOfBounds`] for a page outside the block; [`MemError::Kernel`] if the kernel rejects the call.
    pub fn place(
        &self,
        block: usize,
        page: usize,
        content: Option<&[u8; PAGE_SIZE]>,
    ) -> Result<Placed, MemError> {
        let ram = &self.blocks[block];
        let range = range(ram, page.saturating_mul(PAGE_SIZE), PAGE_SIZE)?;
        loop {
            let placed = match content {
                Some(bytes) => update::<{ opcode(request::UFFDIO_COPY) }, _>(
                    &self.fd,
                    &mut sys::uffdio_copy {
                        dst: range.start,
                        src: bytes.as_ptr().expose_provenance() as u64,
                        len: range.len,
                        mode: 0,
                        copy: 0,
                    },
                ),
                None => update::<{ opcode(request::UFFDIO_ZEROPAGE) }, _>(
                    &self.fd,
                    &mut sys::uffdio_zeropage {
                        range,
                        mode: 0,
                        zeropage: 0,
                    },
                ),
            };
            match placed {
                Ok(()) => return Ok(Placed::Now),
                // The mappings of the process are changing.
                Err(Errno::AGAIN) => {}
                Err(Errno::EXIST) => {
                    // A thread that touched the page may have missed its arrival.
                    let _ = control::<{ opcode(request::UFFDIO_WAKE) }>(&self.fd, range);
                    return Ok(Placed::Before);
                }
                // After the end, untouched memory is zero, and no thread waits.
                Err(Errno::NOENT) if content.is_none() && self.ended.load(Ordering::Acquire) => {
                    return Ok(Placed::Before);
                }
                Err(source) => {
                    return Err(MemError::Kernel {
                        action: "place a page in",
                        block: ram.name().to_owned(),
                        len: PAGE_SIZE,
                        source: source.into(),
                    });
                }
            }
        }
    }

    /// Ends the registration: pages that never arrived are zero, and waiting threads continue.
    pub fn end(&self) {
        if self.ended.swap(true, Ordering::AcqRel) {
            return;
        }
        for block in &self.blocks {
            // Fails only for an unregistered block.
            if let Ok(range) = range(block, 0, block.len()) {
                let _ = control::<{ opcode(request::UFFDIO_UNREGISTER) }>(&self.fd, range);
            }
            block.advise_huge_pages(true);
        }
    }
}

impl AsFd for MissingPages {
    fn as_fd(&self) -> BorrowedFd<'_> {
        self.fd.as_fd()
    }
}

impl Drop for MissingPages {
    fn drop(&mut self) {
        if *self.ended.get_mut() {
            // SAFETY: it is not used after this.
            unsafe { std::mem::ManuallyDrop::drop(&mut self.fd) };
        }
    }
}

#[cfg(test)]
mod tests {
    use std::thread;
    use std::time::Duration;

    use rustix::event::{PollFd, PollFlags, Timespec, poll};

    use super::*;
    use crate::Backing;

    const PAGES: usize = 1024;
    const BACKINGS: [Backing; 2] = [Backing::Private, Backing::Shared];

    fn blocks(backing: Backing) -> Vec<Arc<RamBlock>> {
        ["rom", "ram"]
            .iter()
            .map(|name| Arc::new(RamBlock::new(name, PAGES * PAGE_SIZE, backing).expect("map")))
            .collect()
    }

    /// Registers the blocks; `None` on a host without userfaultfd for this process.
    fn registered(blocks: &[Arc<RamBlock>]) -> Option<MissingPages> {
        match MissingPages::register(blocks) {
            Err(MemError::NoUserfault { source }) => {
                #[allow(clippy::print_stderr)] // a skipped test says so
                {
                    eprintln!("skip: userfaultfd: {source}");
                }
                None
            }
            other => Some(other.expect("registered")),
        }
    }

    /// Waits for the next fault.
    fn next(missing: &MissingPages) -> Touch {
        let mut faults = Vec::new();
        while faults.is_empty() {
            let mut fds = [PollFd::new(missing, PollFlags::IN)];
            let timeout = Timespec::try_from(Duration::from_secs(30)).expect("short");
            assert_ne!(poll(&mut fds, Some(&timeout)).expect("poll"), 0, "a fault");
            missing.faults(&mut faults).expect("read");
        }
        faults[0]
    }

    fn byte(block: &RamBlock, page: usize) -> u8 {
        let mut byte = [0];
        block.read(page * PAGE_SIZE + 7, &mut byte).expect("inside");
        byte[0]
    }

    #[test]
    fn access_to_a_missing_page_waits_and_reads_the_placed_content() {
        for backing in BACKINGS {
            let blocks = blocks(backing);
            let Some(missing) = registered(&blocks) else {
                return;
            };
            thread::scope(|scope| {
                let touched = |block: usize, page| {
                    let block = &blocks[block];
                    let id = || rustix::thread::gettid().as_raw_nonzero().get();
                    scope.spawn(move || (byte(block, page), id().cast_unsigned()))
                };
                let reader = touched(1, 600);
                let touch = next(&missing);
                let fault = Fault {
                    block: 1,
                    page: 600,
                };
                assert_eq!(touch.fault, fault, "{backing:?}");
                let bytes = [5; PAGE_SIZE];
                assert_eq!(missing.place(1, 600, Some(&bytes)).unwrap(), Placed::Now);
                assert_eq!(reader.join().expect("read"), (5, touch.thread));
                let reader = touched(0, 0);
                assert_eq!(next(&missing).fault, Fault { block: 0, page: 0 });
                assert_eq!(missing.place(0, 0, None).unwrap(), Placed::Now);
                assert_eq!(reader.join().expect("read").0, 0);
                // Its neighbour was not filled with it.
                let reader = touched(1, 601);
                assert_eq!(next(&missing).fault.page, 601);
                missing.end();
                assert_eq!(reader.join().expect("read").0, 0, "the rest is zero");
            });
        }
    }

    #[test]
    fn a_present_page_is_not_overwritten() {
        for backing in BACKINGS {
            let blocks = blocks(backing);
            blocks[0].write(3 * PAGE_SIZE, &[1; PAGE_SIZE]).expect("in");
            // An earlier write may have filled its neighbours (transparent huge pages): they are discarded.
            let rest = (PAGES - 4) * PAGE_SIZE;
            blocks[0].discard(0, 3 * PAGE_SIZE).expect("discard");
            blocks[0].discard(4 * PAGE_SIZE, rest).expect("discard");
            let Some(missing) = registered(&blocks) else {
                return;
            };
            let bytes = [2; PAGE_SIZE];
            for content in [Some(&bytes), None] {
                assert_eq!(missing.place(0, 3, content).unwrap(), Placed::Before);
            }
            assert_eq!(byte(&blocks[0], 3), 1, "{backing:?}");
            for page in [2, 4] {
                assert_eq!(missing.place(0, page, Some(&bytes)).unwrap(), Placed::Now);
                assert_eq!(
                    missing.place(0, page, Some(&bytes)).unwrap(),
                    Placed::Before
                );
            }
            let outside = missing.place(0, PAGES, None);
            assert!(matches!(outside, Err(MemError::OutOfBounds { .. })));
            missing.end();
        }
    }

    #[test]
    fn after_the_end_missing_pages_are_zero_and_none_can_be_placed() {
        for backing in BACKINGS {
            let blocks = blocks(backing);
            let Some(missing) = registered(&blocks) else {
                return;
            };
            missing.end();
            assert_eq!(missing.place(0, 5, None).unwrap(), Placed::Before);
            assert_eq!(byte(&blocks[0], 5), 0, "{backing:?}");
            let late = missing.place(0, 6, Some(&[1; PAGE_SIZE]));
            assert!(matches!(late, Err(MemError::Kernel { .. })), "{backing:?}");
        }
    }

    #[test]
    fn a_discarded_page_is_missing_again() {
        for backing in BACKINGS {
            let blocks = blocks(backing);
            blocks[0].write(0, &[1; 2 * PAGE_SIZE]).expect("in");
            blocks[0].discard(PAGE_SIZE, PAGE_SIZE).expect("discard");
            let Some(missing) = registered(&blocks) else {
                return;
            };
            assert_eq!(missing.place(0, 0, None).unwrap(), Placed::Before);
            let bytes = [9; PAGE_SIZE];
            assert_eq!(missing.place(0, 1, Some(&bytes)).unwrap(), Placed::Now);
            assert_eq!((byte(&blocks[0], 0), byte(&blocks[0], 1)), (1, 9));
            missing.end();
        }
    }

    #[test]
    fn memory_that_can_have_no_missing_pages_is_refused_by_name() {
        // A private mapping of a file: discarded pages have the file's content again.
        let fd = rustix::fs::memfd_create("rom", rustix::fs::MemfdFlags::CLOEXEC).expect("memfd");
        rustix::fs::ftruncate(&fd, PAGE_SIZE as u64).expect("length");
        let region = vm_memory::MmapRegion::<()>::build(
            Some(vm_memory::FileOffset::new(fd.into(), 0)),
            PAGE_SIZE,
            libc::PROT_READ | libc::PROT_WRITE,
            libc::MAP_PRIVATE,
        );
        let block = RamBlock::from_region("rom", Arc::new(region.expect("map"))).expect("block");
        assert!(matches!(
            block.discard(0, PAGE_SIZE),
            Err(MemError::NotLazy { .. })
        ));
        match MissingPages::register(&[Arc::new(block)]) {
            Err(MemError::NotLazy { block, .. }) => assert_eq!(block, "rom"),
            Err(MemError::NoUserfault { .. }) => {}
            other => panic!("{other:?}"),
        }
    }

    #[test]
    fn the_probe_returns_features() {
        match probe_userfault() {
            Ok(support) => assert!(support.missing_shared, "{support:?}"),
            Err(error) => assert_ne!(error.raw_os_error(), None),
        }
    }
}

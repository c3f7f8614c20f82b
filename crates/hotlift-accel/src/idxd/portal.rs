//! Submission of descriptors to a queue.
//!
//! | way | queue | needs |
//! |---|---|---|
//! | [`Enqcmd`] | shared | mapped portal, ENQCMD |
//! | [`Movdir64b`] | dedicated | mapped portal, MOVDIR64B |
//! | [`Written`] | either | only the open node: the kernel submits; no batches on most hardware |
//!
//! The choice depends on the queue's mode, CPUID and the kernel's permission; no instruction is ever executed as a test.

use std::fs::File;
use std::io;
use std::os::fd::AsFd;
use std::ptr::NonNull;
use std::sync::atomic::{AtomicU32, AtomicUsize, Ordering};

use rustix::io::Errno;
use rustix::mm::{MapFlags, ProtFlags};

use super::descriptor::{DESCRIPTOR, Descriptor};

/// Bytes of a portal: one page, each 64 bytes of which accept a descriptor.
const PORTAL: usize = 4096;

/// Result of a submission.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub enum Submitted {
    /// The device accepted the descriptor.
    Accepted,
    /// The queue is full; a retry may succeed.
    Full,
}

/// Submission interface of one queue.
pub trait Portal: Send + Sync {
    /// Submits `descriptor` to the device.
    ///
    /// # Errors
    ///
    /// The system's error, after which the queue is unusable.
    ///
    /// # Safety
    ///
    /// All memory at addresses in the descriptor, and in the descriptors of a batch, must stay mapped until the record is
    /// complete. Until then, memory that the device writes to must not be used otherwise.
    unsafe fn submit(&self, descriptor: &Descriptor) -> io::Result<Submitted>;

    /// Reports that an accepted descriptor is complete: the portal of a dedicated queue counts descriptors in flight.
    fn completed(&self) {}
}

/// The portal of a queue, mapped into this process.
struct Mapping {
    page: NonNull<u8>,
    /// Count of submissions: each uses the next 64 bytes of the page, to avoid contention on one cache line.
    next: AtomicUsize,
}

// SAFETY: the page takes stores of 64 bytes from any thread; it is never read.
unsafe impl Send for Mapping {}
// SAFETY: as above.
unsafe impl Sync for Mapping {}

impl Mapping {
    fn new(node: &File) -> io::Result<Self> {
        // SAFETY: a new mapping at an address of the kernel's choice touches no other memory.
        let page = unsafe {
            rustix::mm::mmap(
                std::ptr::null_mut(),
                PORTAL,
                ProtFlags::WRITE,
                MapFlags::SHARED | MapFlags::POPULATE,
                node.as_fd(),
                0,
            )
        }?;
        let page = NonNull::new(page.cast()).ok_or(io::ErrorKind::OutOfMemory)?;
        Ok(Self {
            page,
            next: AtomicUsize::new(0),
        })
    }

    /// Returns the address for the next descriptor.
    fn slot(&self) -> *mut u8 {
        let slot = self.next.fetch_add(1, Ordering::Relaxed) % (PORTAL / DESCRIPTOR);
        self.page.as_ptr().wrapping_add(slot * DESCRIPTOR)
    }
}

impl Drop for Mapping {
    fn drop(&mut self) {
        // SAFETY: the mapping is this value's own, and no address of it is kept elsewhere.
        let _ = unsafe { rustix::mm::munmap(self.page.as_ptr().cast(), PORTAL) };
    }
}

/// Portal of a shared queue. ENQCMD reports if the device accepted the descriptor.
pub struct Enqcmd(Mapping);

impl Enqcmd {
    /// Maps the portal of a shared queue whose node is open.
    ///
    /// # Errors
    ///
    /// The system's error; EPERM if CAP_SYS_RAWIO is required.
    ///
    /// # Safety
    ///
    /// The CPU must have ENQCMD.
    pub unsafe fn map(node: &File) -> io::Result<Self> {
        Mapping::new(node).map(Self)
    }
}

impl Portal for Enqcmd {
    unsafe fn submit(&self, descriptor: &Descriptor) -> io::Result<Submitted> {
        // SAFETY: the portal is mapped, the CPU has the instruction, and the descriptor is 64 aligned bytes.
        let full = unsafe { instructions::enqcmd(self.0.slot(), descriptor) };
        Ok(if full {
            Submitted::Full
        } else {
            Submitted::Accepted
        })
    }
}

/// Portal of a dedicated queue. MOVDIR64B is a store without an answer, so this type counts the descriptors in flight.
pub struct Movdir64b {
    mapping: Mapping,
    size: u32,
    in_flight: AtomicU32,
}

impl Movdir64b {
    /// Maps the portal of a dedicated queue of `size` entries whose node is open.
    ///
    /// # Errors
    ///
    /// The system's error; EPERM if CAP_SYS_RAWIO is required.
    ///
    /// # Safety
    ///
    /// The CPU must have MOVDIR64B.
    pub unsafe fn map(node: &File, size: u32) -> io::Result<Self> {
        Ok(Self {
            mapping: Mapping::new(node)?,
            size,
            in_flight: AtomicU32::new(0),
        })
    }
}

impl Portal for Movdir64b {
    unsafe fn submit(&self, descriptor: &Descriptor) -> io::Result<Submitted> {
        let room = |in_flight| (in_flight < self.size).then_some(in_flight + 1);
        let taken = self
            .in_flight
            .fetch_update(Ordering::Relaxed, Ordering::Relaxed, room);
        if taken.is_err() {
            return Ok(Submitted::Full);
        }
        // SAFETY: the portal is mapped, the CPU has the instruction, and the descriptor is 64 aligned bytes.
        unsafe { instructions::movdir64b(self.mapping.slot(), descriptor) };
        Ok(Submitted::Accepted)
    }

    fn completed(&self) {
        self.in_flight.fetch_sub(1, Ordering::Relaxed);
    }
}

/// Portal of a shared or dedicated queue, through `write`: the kernel submits the descriptor.
pub struct Written(File);

impl Written {
    /// Returns the portal of an open queue node. In tests, `node` is another file that accepts descriptors as bytes.
    #[must_use]
    pub fn new(node: File) -> Self {
        Self(node)
    }
}

impl Portal for Written {
    unsafe fn submit(&self, descriptor: &Descriptor) -> io::Result<Submitted> {
        match rustix::io::write(&self.0, &descriptor.to_bytes()) {
            Ok(DESCRIPTOR) => Ok(Submitted::Accepted),
            // The driver retries for a while before it reports this.
            Ok(0) | Err(Errno::AGAIN | Errno::BUSY) => Ok(Submitted::Full),
            Ok(_) => Err(io::ErrorKind::WriteZero.into()),
            Err(error) => Err(error.into()),
        }
    }
}

#[cfg(target_arch = "x86_64")]
mod instructions {
    use std::arch::asm;

    use super::Descriptor;

    /// Submits `descriptor`; returns true if the queue was full.
    ///
    /// # Safety
    ///
    /// `portal` must be the aligned 64 bytes of a mapped portal of a shared queue, and the CPU must have ENQCMD.
    pub(super) unsafe fn enqcmd(portal: *mut u8, descriptor: &Descriptor) -> bool {
        let full: u8;
        // SAFETY: guaranteed by the caller. The fence makes earlier writes visible to the device.
        unsafe {
            asm!(
                "sfence",
                "enqcmd {portal}, [{descriptor}]",
                "setz {full}",
                portal = in(reg) portal,
                descriptor = in(reg) descriptor,
                full = out(reg_byte) full,
                options(nostack),
            );
        }
        full != 0
    }

    /// # Safety
    ///
    /// `portal` must be 64 aligned bytes that may be written, and the CPU must have MOVDIR64B.
    pub(super) unsafe fn movdir64b(portal: *mut u8, descriptor: &Descriptor) {
        // SAFETY: guaranteed by the caller. The fence makes earlier writes visible to the device.
        unsafe {
            asm!(
                "sfence",
                "movdir64b {portal}, [{descriptor}]",
                portal = in(reg) portal,
                descriptor = in(reg) descriptor,
                options(nostack, preserves_flags),
            );
        }
    }
}

#[cfg(test)]
mod tests {
    use std::io::Read;
    use std::os::unix::net::UnixStream;

    use super::super::record::Record;
    use super::*;

    #[test]
    fn a_written_descriptor_is_its_bytes() {
        let (node, mut kernel) = UnixStream::pair().expect("a pair");
        let portal = Written::new(File::from(std::os::fd::OwnedFd::from(node)));
        let record = Record::default();
        let descriptor = Descriptor::noop(&raw const record);
        // SAFETY: the descriptor is never executed.
        let submitted = unsafe { portal.submit(&descriptor) };
        assert_eq!(submitted.expect("written"), Submitted::Accepted);
        let mut bytes = [0; DESCRIPTOR];
        kernel.read_exact(&mut bytes).expect("a descriptor");
        assert_eq!(bytes, descriptor.to_bytes());
    }

    #[test]
    fn a_node_that_takes_no_more_is_full() {
        let (node, _kernel) = UnixStream::pair().expect("a pair");
        node.set_nonblocking(true).expect("non-blocking");
        let portal = Written::new(File::from(std::os::fd::OwnedFd::from(node)));
        let record = Record::default();
        let descriptor = Descriptor::noop(&raw const record);
        for _ in 0..1 << 20 {
            // SAFETY: the descriptor is never executed.
            if unsafe { portal.submit(&descriptor) }.expect("a pair") == Submitted::Full {
                return;
            }
        }
        panic!("a socket without end");
    }

    #[test]
    #[cfg(target_arch = "x86_64")]
    fn movdir64b_stores_the_descriptor_whole() {
        if !super::super::CpuFeatures::of_this_cpu().movdir64b {
            hotlift_testkit::skip!("cpu", "no MOVDIR64B");
            return;
        }
        #[repr(align(64))]
        struct Line([u8; DESCRIPTOR]);
        let mut line = Line([0; DESCRIPTOR]);
        let record = Record::default();
        let descriptor = Descriptor::is_zero(line.0.as_ptr(), 64, &raw const record);
        // SAFETY: the line is 64 aligned bytes of this test's, and the CPU has the instruction.
        unsafe { instructions::movdir64b(line.0.as_mut_ptr(), &descriptor) };
        assert_eq!(line.0, descriptor.to_bytes());
    }
}

//! A run of guest bytes. Only its functions copy bytes into and out of guest memory.

use std::marker::PhantomData;
use std::ptr;

use crate::{RamBlock, stream_copy, zero};

/// Contiguous bytes of a [`RamBlock`], borrowed from it.
///
/// A run is an address and a length, not a slice: the guest, the kernel and other threads may write the same bytes at any time,
/// and several runs may overlap. Every method makes one pass over the bytes and never assumes that bytes it has read are
/// unchanged.
#[derive(Debug, Clone, Copy)]
pub struct GuestRun<'a> {
    ptr: *mut u8,
    len: usize,
    block: PhantomData<&'a RamBlock>,
}

// SAFETY: the run borrows a `RamBlock`, which is `Sync`, or exclusively a buffer, and accesses its bytes as `RamBlock` itself
// does: by raw copies that tolerate concurrent writers. Moving it to a thread, or sharing it, adds no access that two
// `&RamBlock` do not already have.
unsafe impl Send for GuestRun<'_> {}
// SAFETY: as for `Send`; no method changes the run itself.
unsafe impl Sync for GuestRun<'_> {}

impl<'a> GuestRun<'a> {
    /// Creates a run of `len` bytes from `ptr` on.
    ///
    /// # Safety
    ///
    /// The bytes must be mapped readable and writable for `'a`, and no reference to them may exist.
    pub(crate) unsafe fn new(ptr: *mut u8, len: usize) -> Self {
        Self {
            ptr,
            len,
            block: PhantomData,
        }
    }

    /// Creates a run over a borrowed buffer, for functions that take guest memory.
    pub fn of_buffer(buffer: &'a mut [u8]) -> Self {
        Self {
            ptr: buffer.as_mut_ptr(),
            len: buffer.len(),
            block: PhantomData,
        }
    }

    /// Returns the address of the first byte, for system calls and codecs that take raw memory. A user must not create
    /// references from it: other threads may write the bytes at any time.
    pub fn as_ptr(&self) -> *mut u8 {
        self.ptr
    }

    /// Returns the length of the run in bytes.
    pub fn len(&self) -> usize {
        self.len
    }

    /// Returns true if the run is empty.
    pub fn is_empty(&self) -> bool {
        self.len == 0
    }

    /// Returns true if every byte was zero when it was read.
    pub fn is_zero(&self) -> bool {
        // SAFETY: the run's bytes are mapped for `'a` (contract of `new`).
        unsafe { zero::is_zero_raw(self.ptr, self.len) }
    }

    /// Copies the run to `to`, as `memcpy` does.
    ///
    /// # Panics
    ///
    /// If `to` is not exactly as long as the run.
    pub fn copy_to(&self, to: &mut [u8]) {
        assert_eq!(to.len(), self.len, "copy out of a guest run");
        // SAFETY: both sides are valid for `len` bytes. They cannot overlap: `to` is an exclusive reference, and no reference
        // to guest memory exists. The guest may write during the copy, which is then torn; callers expect this, see the crate's
        // documentation.
        unsafe { ptr::copy_nonoverlapping(self.ptr, to.as_mut_ptr(), self.len) }
    }

    /// Copies `from` to the run, as `memcpy` does.
    ///
    /// # Panics
    ///
    /// If `from` is not exactly as long as the run.
    pub fn copy_from(&self, from: &[u8]) {
        assert_eq!(from.len(), self.len, "copy into a guest run");
        // SAFETY: both sides are valid for `len` bytes, and do not overlap since no reference to guest memory exists.
        // Concurrent readers copy, and tolerate torn bytes.
        unsafe { ptr::copy_nonoverlapping(from.as_ptr(), self.ptr, self.len) }
    }

    /// Copies `from` to the run with stores that bypass the caches: for pages that are not read soon.
    ///
    /// # Panics
    ///
    /// If `from` is not exactly as long as the run.
    pub fn stream_from(&self, from: &[u8]) {
        assert_eq!(from.len(), self.len, "copy into a guest run");
        // SAFETY: as in `copy_from`.
        unsafe { stream_copy::copy(from.as_ptr(), self.ptr, self.len) }
    }

    /// Sets every byte to zero.
    pub fn fill_zero(&self) {
        // SAFETY: the run's bytes are mapped writable for `'a` (contract of `new`).
        unsafe { ptr::write_bytes(self.ptr, 0, self.len) }
    }

    /// Splits the run into the first `n` bytes and the rest.
    ///
    /// # Panics
    ///
    /// If the run has fewer than `n` bytes.
    pub fn split_at(&self, n: usize) -> (GuestRun<'a>, GuestRun<'a>) {
        assert!(n <= self.len, "split of a guest run at {n} of {}", self.len);
        // SAFETY: both parts lie in this run, `n` being at most its length.
        unsafe {
            (
                Self::new(self.ptr, n),
                Self::new(self.ptr.add(n), self.len - n),
            )
        }
    }
}

#[cfg(test)]
mod tests {
    use crate::{Backing, PAGE_SIZE, RamBlock};

    fn block() -> RamBlock {
        RamBlock::new("ram", 2 * PAGE_SIZE, Backing::Private).expect("map")
    }

    #[test]
    fn copies_move_exactly_the_run() {
        let block = block();
        let text: Vec<u8> = (1..=100).collect();
        block.run(4050, 100).expect("inside").copy_from(&text);
        let mut around = [0xff; 102];
        block.run(4049, 102).expect("inside").copy_to(&mut around);
        assert_eq!(around[1..101], text);
        assert_eq!((around[0], around[101]), (0, 0));
        block.run(4060, 80).expect("inside").fill_zero();
        block
            .run(4050, 100)
            .expect("inside")
            .copy_to(&mut around[..100]);
        assert_eq!(around[..10], text[..10]);
        assert_eq!(around[10..90], [0; 80]);
        assert_eq!(around[90..100], text[90..]);
    }

    #[test]
    fn the_parts_of_a_split_are_the_run() {
        let block = block();
        block.write(10, &[1, 2, 3]).expect("inside");
        for n in 0..=3 {
            let (head, tail) = block.run(10, 3).expect("inside").split_at(n);
            let mut bytes = [0; 3];
            head.copy_to(&mut bytes[..n]);
            tail.copy_to(&mut bytes[n..]);
            assert_eq!(bytes, [1, 2, 3], "split at {n}");
            assert_eq!((head.is_empty(), tail.is_empty()), (n == 0, n == 3));
        }
    }

    #[test]
    fn a_run_is_zero_if_all_its_bytes_are_zero() {
        let block = block();
        block.write(PAGE_SIZE - 1, &[1]).expect("inside");
        let zero = |offset, len| block.run(offset, len).expect("inside").is_zero();
        assert!(zero(0, PAGE_SIZE - 1));
        assert!(!zero(0, PAGE_SIZE));
        assert!(zero(PAGE_SIZE, PAGE_SIZE));
        assert!(zero(PAGE_SIZE - 1, 0));
    }

    #[test]
    #[should_panic = "copy out of a guest run"]
    fn a_copy_out_of_another_length_is_refused() {
        block().run(0, 8).expect("inside").copy_to(&mut [0; 9]);
    }

    #[test]
    #[should_panic = "copy into a guest run"]
    fn a_copy_in_of_another_length_is_refused() {
        block().run(0, 8).expect("inside").copy_from(&[0; 7]);
    }

    #[test]
    #[should_panic = "split of a guest run at 9 of 8"]
    fn a_split_beyond_the_run_is_refused() {
        let _ = block().run(0, 8).expect("inside").split_at(9);
    }
}

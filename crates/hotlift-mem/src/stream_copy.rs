//! Copies to memory with stores that bypass the caches, for data that is not read soon.
//!
//! A normal store first loads the overwritten line into the cache, and evicts another line. For received pages both are
//! useless: the guest reads them much later, or never.

/// Length in bytes below which a copy uses the caches: the same cache line is probably written again soon.
const SHORT: usize = 512;

/// Copies `len` bytes. Threads that are notified after the call see them.
///
/// # Safety
///
/// `from` must be readable and `to` writable for `len` bytes, and they must not overlap.
pub(crate) unsafe fn copy(from: *const u8, to: *mut u8, len: usize) {
    if len < SHORT {
        // SAFETY: guaranteed by the caller.
        return unsafe { std::ptr::copy_nonoverlapping(from, to, len) };
    }
    #[cfg(target_arch = "x86_64")]
    // SAFETY: guaranteed by the caller.
    unsafe {
        x86::copy(from, to, len);
    }
    #[cfg(not(target_arch = "x86_64"))]
    // SAFETY: guaranteed by the caller.
    unsafe {
        std::ptr::copy_nonoverlapping(from, to, len);
    }
}

#[cfg(target_arch = "x86_64")]
mod x86 {
    use std::arch::x86_64::{__m128i, _mm_loadu_si128, _mm_sfence, _mm_stream_si128};
    use std::ptr;

    /// Size of a cache line in bytes: the CPU writes a line in one piece if all its bytes are stored.
    const LINE: usize = 64;

    /// Size of one store in bytes; every x86-64 CPU has such stores (SSE2).
    const STORE: usize = size_of::<__m128i>();

    /// Copies as [`super::copy`] does, with SSE2.
    ///
    /// # Safety
    ///
    /// As of [`super::copy`].
    pub(super) unsafe fn copy(from: *const u8, to: *mut u8, len: usize) {
        let head = to.align_offset(LINE).min(len);
        let lines = (len - head) / LINE;
        let streamed = lines * LINE;
        // SAFETY: all offsets are below `len`, and `to` is aligned to a line after the head.
        unsafe {
            ptr::copy_nonoverlapping(from, to, head);
            let (source, target) = (from.add(head), to.add(head));
            for line in 0..lines {
                for part in 0..LINE / STORE {
                    let at = line * LINE + part * STORE;
                    let bytes = _mm_loadu_si128(source.add(at).cast());
                    _mm_stream_si128(target.add(at).cast(), bytes);
                }
            }
            // Stores past the cache are unordered. A thread that takes a lock afterwards must see them.
            _mm_sfence();
            let done = head + streamed;
            ptr::copy_nonoverlapping(from.add(done), to.add(done), len - done);
        }
    }
}

#[cfg(test)]
mod tests {
    #[test]
    fn every_length_at_every_alignment_is_copied_without_overrun() {
        let of = |i: usize| u8::try_from((i * 7 + i / 256) % 256).unwrap();
        let from: Vec<u8> = (0..6000).map(of).collect();
        for len in [0, 1, 511, 512, 513, 575, 640, 1000, 4096, 5000] {
            for (source, target) in [(0, 0), (1, 0), (0, 1), (13, 63), (64, 17)] {
                let mut to = vec![0xee; 6000];
                // SAFETY: both vectors are longer than the copied range.
                unsafe { super::copy(from.as_ptr().add(source), to.as_mut_ptr().add(target), len) };
                assert_eq!(to[target..target + len], from[source..source + len]);
                assert!(to[..target].iter().all(|&byte| byte == 0xee));
                assert!(to[target + len..].iter().all(|&byte| byte == 0xee));
            }
        }
    }
}

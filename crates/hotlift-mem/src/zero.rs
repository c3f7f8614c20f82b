//! Is it all zero?

/// True if every byte of `bytes` is zero.
pub fn is_zero(bytes: &[u8]) -> bool {
    // SAFETY: a slice is readable for its length.
    unsafe { is_zero_raw(bytes.as_ptr(), bytes.len()) }
}

/// As [`is_zero`], of memory that others may write meanwhile.
///
/// # Safety
///
/// `len` bytes from `ptr` on must be mapped readable.
pub unsafe fn is_zero_raw(ptr: *const u8, len: usize) -> bool {
    // SAFETY: the caller's.
    (0..len).all(|i| unsafe { ptr.add(i).read_volatile() } == 0)
}

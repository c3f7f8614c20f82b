//! The C library's heap, for a process that serves for months.

/// Has the C library return freed memory to the system, in place of keeping it for later. To be called before the process has
/// threads.
///
/// glibc keeps a heap for each thread, and raises its own thresholds with each large buffer that is freed: the memory of
/// the largest load would stay for ever. Others than glibc do neither.
pub fn give_back_freed_memory() {
    #[cfg(target_env = "gnu")]
    {
        // Heaps of all threads together: a relay's buffers are large and few.
        const HEAPS: libc::c_int = 2;
        // Bytes from which a buffer is a mapping of its own, and free bytes at a heap's end that go back: glibc's initial
        // values of both. Set explicitly, they do not grow.
        const THRESHOLD: libc::c_int = 128 << 10;
        for (parameter, value) in [
            (libc::M_ARENA_MAX, HEAPS),
            (libc::M_MMAP_THRESHOLD, THRESHOLD),
            (libc::M_TRIM_THRESHOLD, THRESHOLD),
        ] {
            // SAFETY: mallopt changes settings of the allocator under its own lock, and takes any value.
            unsafe { libc::mallopt(parameter, value) };
        }
    }
}

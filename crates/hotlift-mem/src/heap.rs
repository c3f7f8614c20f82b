//! The C library's heap, for a process that serves for months.

/// Makes the C library return freed memory to the system instead of keeping it. Must be called before the process has threads.
///
/// glibc keeps a heap for each thread, and raises its own thresholds with each large freed buffer: the memory of the largest
/// load would never be returned. Other C libraries do neither.
pub fn give_back_freed_memory() {
    #[cfg(target_env = "gnu")]
    {
        // Maximum number of heaps of all threads: a relay's buffers are large and few.
        const HEAPS: libc::c_int = 2;
        // Size in bytes from which a buffer is a separate mapping, and from which free memory at a heap's end is returned:
        // glibc's initial values of both. Explicit values do not grow.
        const THRESHOLD: libc::c_int = 128 << 10;
        for (parameter, value) in [
            (libc::M_ARENA_MAX, HEAPS),
            (libc::M_MMAP_THRESHOLD, THRESHOLD),
            (libc::M_TRIM_THRESHOLD, THRESHOLD),
        ] {
            // SAFETY: mallopt changes settings of the allocator under its own lock, and accepts any value.
            unsafe { libc::mallopt(parameter, value) };
        }
    }
}

//! Settings of the C library's heap, for a process that runs for months.

/// Makes the C library return freed memory to the system instead of keeping it. Must be called before the process has threads.
///
/// glibc keeps a heap for each thread, and raises its own thresholds whenever a large buffer is freed. So the memory of the
/// largest load would never be returned. Other C libraries do neither.
pub fn give_back_freed_memory() {
    #[cfg(target_env = "gnu")]
    {
        // Maximum number of heaps, shared by all threads. A relay's buffers are large and few.
        const HEAPS: libc::c_int = 2;
        // Two limits in bytes: a larger buffer gets its own mapping, and more free memory at a heap's end is returned. These
        // are glibc's initial values; explicit values do not grow.
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

//! The part of libqpl's C interface that Hotlift uses, after the public headers of QPL 1.2 to 1.9 (`qpl/c_api/job.h`, `defs.h`,
//! `status.h`; MIT). The headers of all these versions agree in this part.

use std::ffi::{CStr, c_char, c_void};

use hotlift_methods::functions;

/// Soname that guarantees the layouts below.
pub(super) const SONAME: &str = "libqpl.so.1";
/// Environment variable that can name another file for the library.
pub(super) const VARIABLE: &str = "HOTLIFT_LIBQPL";

/// `qpl_path_hardware`. (`qpl_path_auto` is never used: it does not report the path of a job.)
pub(super) const PATH_HARDWARE: u32 = 1;
/// `qpl_path_software`: the library's own software.
pub(super) const PATH_SOFTWARE: u32 = 2;

/// `qpl_op_decompress`.
pub(super) const OP_DECOMPRESS: u32 = 0;
/// `qpl_op_compress`.
pub(super) const OP_COMPRESS: u32 = 1;

/// `QPL_FLAG_FIRST`: the job begins a stream.
pub(super) const FLAG_FIRST: u32 = 0x1;
/// `QPL_FLAG_LAST`: the job ends a stream.
pub(super) const FLAG_LAST: u32 = 0x2;
/// `QPL_FLAG_OMIT_VERIFY`: the device does not verify its output.
pub(super) const FLAG_OMIT_VERIFY: u32 = 0x4000;

/// `qpl_default_level`: the compression level.
pub(super) const LEVEL: u32 = 1;

/// `QPL_STS_OK`: the job succeeded.
pub(super) const OK: u32 = 0;
/// `QPL_STS_BEING_PROCESSED`: the job has not ended.
pub(super) const BEING_PROCESSED: u32 = 1;
/// `QPL_STS_MORE_OUTPUT_NEEDED`: the output does not fit.
pub(super) const MORE_OUTPUT_NEEDED: u32 = 2;
/// `QPL_STS_QUEUES_ARE_BUSY_ERR`: all queues are full.
pub(super) const QUEUES_ARE_BUSY: u32 = 5;

/// The first fields of `qpl_job`; no others are used. The library reports the total size and owns the rest.
#[repr(C)]
pub(super) struct Job {
    pub(super) next_in: *const u8,
    pub(super) available_in: u32,
    pub(super) total_in: u32,
    pub(super) next_out: *mut u8,
    pub(super) available_out: u32,
    pub(super) total_out: u32,
    pub(super) op: u32,
    pub(super) flags: u32,
    pub(super) crc: u32,
    pub(super) xor_checksum: u32,
    pub(super) last_bit_offset: u32,
    pub(super) level: u32,
    pub(super) statistics_mode: u32,
    pub(super) huffman_table: *mut c_void,
    pub(super) dictionary: *mut c_void,
}

functions! {
    /// libqpl. Its constructors only fill its own tables.
    pub(super) struct Library(SONAME, Some(VARIABLE)) {
        /// `const char *qpl_get_library_version(void)`.
        qpl_get_library_version: fn() -> *const c_char,
        /// `qpl_status qpl_get_job_size(qpl_path_t, uint32_t *)`.
        qpl_get_job_size: fn(u32, *mut u32) -> u32,
        /// `qpl_status qpl_init_job(qpl_path_t, qpl_job *)`.
        qpl_init_job: fn(u32, *mut Job) -> u32,
        /// `qpl_status qpl_submit_job(qpl_job *)`; the others likewise.
        qpl_submit_job: fn(*mut Job) -> u32,
        qpl_check_job: fn(*mut Job) -> u32,
        qpl_execute_job: fn(*mut Job) -> u32,
        qpl_fini_job: fn(*mut Job) -> u32,
    }
}

impl Library {
    /// Returns name and version, as in "libqpl 1.9.0".
    pub(super) fn name(&self) -> String {
        // SAFETY: a call without conditions.
        let version = unsafe { (self.qpl_get_library_version)() };
        let version = if version.is_null() {
            c"of no version"
        } else {
            // SAFETY: the version is a constant that ends with a NUL.
            unsafe { CStr::from_ptr(version) }
        };
        format!("libqpl {}", version.to_string_lossy())
    }
}

/// Returns the meaning of a code that occurs without a device.
pub(super) fn meaning(code: u32) -> &'static str {
    match code {
        101 => "out of memory",
        500 => "the hardware path is not supported here",
        501 => "libaccel-config.so.1 is missing",
        502 => "libaccel-config failed",
        503 => "no shared work queue of an IAA device can be used",
        _ => "see qpl/c_api/status.h",
    }
}

#[cfg(test)]
mod tests {
    use std::mem::offset_of;

    use super::*;

    #[test]
    fn the_head_of_a_job_is_laid_out_as_in_every_release() {
        let ours = [
            offset_of!(Job, next_in),
            offset_of!(Job, available_in),
            offset_of!(Job, total_in),
            offset_of!(Job, next_out),
            offset_of!(Job, available_out),
            offset_of!(Job, total_out),
            offset_of!(Job, op),
            offset_of!(Job, flags),
            offset_of!(Job, crc),
            offset_of!(Job, xor_checksum),
            offset_of!(Job, last_bit_offset),
            offset_of!(Job, level),
            offset_of!(Job, statistics_mode),
            offset_of!(Job, huffman_table),
            offset_of!(Job, dictionary),
            size_of::<Job>(),
        ];
        let theirs = [0, 8, 12, 16, 24, 28, 32, 36, 40, 44, 48, 52, 56, 64, 72, 80];
        assert_eq!(ours, theirs);
    }
}

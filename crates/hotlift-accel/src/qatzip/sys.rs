//! The part of libqatzip's interface that Hotlift uses. Layouts and codes are the same in 1.3.1 and 2.0.0, which share the
//! soname.

use std::ffi::{c_int, c_void};

use hotlift_methods::functions;

/// Soname that guarantees the layouts below.
pub(super) const SONAME: &str = "libqatzip.so.3";
/// Environment variable that can name another file for the library.
pub(super) const VARIABLE: &str = "HOTLIFT_LIBQATZIP";

/// `QZ_OK`. As a session's status: the session runs on the hardware.
pub(super) const OK: c_int = 0;
/// `QZ_DUPLICATE`: the process initialised the library already.
pub(super) const DUPLICATE: c_int = 1;
/// `QZ_NO_HW`: the library's own software does the work.
pub(super) const NO_HARDWARE: i64 = 11;
/// `QZ_TIMEOUT`: the device did not answer in time.
pub(super) const TIMEOUT: c_int = -5;
/// `QZ_NOSW_NO_INST_ATTACH`: other sessions use all instances of the device, or the device is dead.
pub(super) const NO_INSTANCE: c_int = -103;

/// `QZ_DIR_COMPRESS`, `QZ_DIR_DECOMPRESS`: directions of a session.
pub(super) const COMPRESS: u32 = 0;
pub(super) const DECOMPRESS: u32 = 1;
/// `QZ_DEFLATE_GZIP_EXT`: gzip members with QAT's extra field.
pub(super) const GZIP_EXT: u32 = 2;
/// `COMMON_MEM`, `PINNED_MEM`: kinds of memory for `qzMalloc`.
pub(super) const COMMON: c_int = 0;
pub(super) const PINNED: c_int = 1;

/// `QzSession_T`: zeroes before `qzInit`.
#[repr(C)]
pub(super) struct Session {
    /// `OK`, or a code for the reason why the session is not on the hardware.
    pub(super) hw_session_stat: i64,
    thread_state: c_int,
    internal: *mut c_void,
    total_in: u64,
    total_out: u64,
}

impl Session {
    pub(super) fn zeroed() -> Self {
        Self {
            hw_session_stat: 0,
            thread_state: 0,
            internal: std::ptr::null_mut(),
            total_in: 0,
            total_out: 0,
        }
    }
}

/// `QzSessionParamsDeflate_T`: filled by `qzGetDefaultsDeflate`.
#[repr(C)]
#[derive(Default)]
pub(super) struct Params {
    pub(super) direction: u32,
    /// Compression level, 1 to 9.
    pub(super) level: u32,
    algorithm: u8,
    max_forks: u32,
    /// 1: falls back to software if the hardware fails.
    pub(super) sw_backup: u8,
    /// Bytes of a member, a power of two from 1 KiB to 512 KiB.
    pub(super) hw_buff_sz: u32,
    strm_buff_sz: u32,
    /// Members with fewer bytes never use the hardware.
    pub(super) input_threshold: u32,
    request_threshold: u32,
    wait_threshold: u32,
    polling_mode: u32,
    sensitive_mode: u32,
    huffman_header: u32,
    pub(super) data_format: u32,
}

functions! {
    /// libqatzip. Its only constructors are those of the C runtime, so opening it is sound.
    #[expect(non_snake_case, reason = "each function has its name in C")]
    pub(super) struct Library(SONAME, Some(VARIABLE)) {
        /// `int qzInit(QzSession_T *, unsigned char sw_backup)`.
        qzInit: fn(*mut Session, u8) -> c_int,
        /// `int qzGetDefaultsDeflate(QzSessionParamsDeflate_T *)`.
        qzGetDefaultsDeflate: fn(*mut Params) -> c_int,
        /// `int qzSetupSessionDeflate(QzSession_T *, QzSessionParamsDeflate_T *)`.
        qzSetupSessionDeflate: fn(*mut Session, *mut Params) -> c_int,
        /// `unsigned int qzMaxCompressedLength(unsigned int, QzSession_T *)`.
        qzMaxCompressedLength: fn(u32, *mut Session) -> u32,
        /// `int qzCompress(QzSession_T *, const unsigned char *, unsigned int *src_len, unsigned char *,
        /// unsigned int *dest_len, unsigned int last)`.
        qzCompress: fn(*mut Session, *const u8, *mut u32, *mut u8, *mut u32, u32) -> c_int,
        /// `int qzDecompress(QzSession_T *, const unsigned char *, unsigned int *src_len, unsigned char *,
        /// unsigned int *dest_len)`.
        qzDecompress: fn(*mut Session, *const u8, *mut u32, *mut u8, *mut u32) -> c_int,
        /// `void *qzMalloc(size_t, int numa, int force_pinned)`.
        qzMalloc: fn(usize, c_int, c_int) -> *mut c_void,
        /// `void qzFree(void *)`.
        qzFree: fn(*mut c_void),
        /// `int qzTeardownSession(QzSession_T *)`, `qzClose` likewise.
        qzTeardownSession: fn(*mut Session) -> c_int,
        qzClose: fn(*mut Session) -> c_int,
    }
}

/// Returns the meaning of a code of the library, for messages.
pub(super) fn meaning(code: i64) -> &'static str {
    match code {
        1 => "initialised already",
        2 => "forced to software",
        11 | -101 => "no hardware",
        12 | -102 => "no memory driver",
        13 | -103 => "no free instance of the hardware",
        14 | -104 => "not enough pinned memory",
        15 => "not enough memory for the output",
        -1 => "bad parameters",
        -2 => "the hardware failed",
        -3 => "no room in a buffer",
        -4 => "bad data",
        -5 => "no answer in time",
        -100 => "the results are invalid",
        -105 => "no software to fall back to",
        -116 => "unknown format",
        _ => "unknown",
    }
}

#[cfg(test)]
mod tests {
    use std::mem::offset_of;

    use super::*;

    #[test]
    fn layouts_are_those_of_the_header() {
        let session = [
            offset_of!(Session, hw_session_stat),
            offset_of!(Session, thread_state),
            offset_of!(Session, internal),
            offset_of!(Session, total_in),
            offset_of!(Session, total_out),
            size_of::<Session>(),
        ];
        assert_eq!(session, [0, 8, 16, 24, 32, 40]);
        let params = [
            offset_of!(Params, direction),
            offset_of!(Params, level),
            offset_of!(Params, algorithm),
            offset_of!(Params, max_forks),
            offset_of!(Params, sw_backup),
            offset_of!(Params, hw_buff_sz),
            offset_of!(Params, strm_buff_sz),
            offset_of!(Params, input_threshold),
            offset_of!(Params, request_threshold),
            offset_of!(Params, wait_threshold),
            offset_of!(Params, polling_mode),
            offset_of!(Params, sensitive_mode),
            offset_of!(Params, huffman_header),
            offset_of!(Params, data_format),
            size_of::<Params>(),
        ];
        let header = [0, 4, 8, 12, 16, 20, 24, 28, 32, 36, 40, 44, 48, 52, 56];
        assert_eq!(params, header);
    }
}

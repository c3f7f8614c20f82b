//! The part of libwd_comp's C interface that Hotlift uses, after the public headers of Linaro/uadk (`include/wd_comp.h` of
//! commit 020bb7d, `wd_alg_common.h` of 00026b6, `wd.h` and `wd_sched.h` of 00efb97; Apache-2.0).
//!
//! Later headers have longer structures, whose new fields are zero by default.

use std::ffi::{c_char, c_int, c_void};

use hotlift_methods::functions;

/// Soname that guarantees the layouts below.
pub(super) const SONAME: &str = "libwd_comp.so.2";
/// Environment variable that can name another file for the library.
pub(super) const VARIABLE: &str = "HOTLIFT_LIBWD";

/// Zero bytes after each structure, for a later library that reads more. In later headers, the setup continues with a table of
/// memory functions.
pub(super) const SLACK: usize = 256;

/// `SCHED_POLICY_RR`: round robin over the contexts.
pub(super) const SCHED_ROUND_ROBIN: u32 = 0;
/// `TASK_HW`: on the device, not by CPU instructions.
pub(super) const TASK_HARDWARE: c_int = 1;
/// `WD_ZLIB`: zlib streams.
pub(super) const ALG_ZLIB: u32 = 1;
/// `WD_COMP_L1`: compression level 1.
pub(super) const LEVEL_1: u32 = 1;
/// `WD_COMP_WS_4K`: a compression window of 4 KiB.
pub(super) const WINDOW_4K: u32 = 0;
/// `WD_DIR_COMPRESS`.
pub(super) const COMPRESS: u32 = 0;
/// `WD_DIR_DECOMPRESS`.
pub(super) const DECOMPRESS: u32 = 1;

/// `-WD_EBUSY`: the device's queue is full.
pub(super) const BUSY: c_int = -16;
/// `-WD_EEXIST`: the process initialised the library before.
pub(super) const EXISTS: c_int = -17;
/// `-WD_ENODEV`: the host has no such device.
pub(super) const NO_DEVICE: c_int = -19;
/// `-WD_ETIMEDOUT`: the library polled 200 million times.
pub(super) const TIMED_OUT: c_int = -110;

/// `WD_STREAM_END`, in a request's status: the stream is completely decompressed.
pub(super) const STREAM_END: u32 = 1;

/// `struct sched_params`.
#[repr(C)]
pub(super) struct SchedParams {
    pub(super) numa_id: c_int,
    pub(super) op_type: u8,
    pub(super) mode: u8,
    pub(super) begin: u32,
    pub(super) end: u32,
    pub(super) slack: [u8; SLACK],
}

/// `struct wd_comp_sess_setup`.
#[repr(C)]
pub(super) struct Setup {
    pub(super) alg_type: u32,
    pub(super) level: u32,
    pub(super) window: u32,
    pub(super) op_type: u32,
    pub(super) sched_params: *mut SchedParams,
    pub(super) slack: [u8; SLACK],
}

/// `struct wd_comp_req`.
#[repr(C)]
pub(super) struct Request {
    pub(super) src: *const u8,
    pub(super) src_len: u32,
    pub(super) dst: *mut u8,
    pub(super) dst_len: u32,
    pub(super) callback: *mut c_void,
    pub(super) callback_param: *mut c_void,
    pub(super) op_type: u32,
    pub(super) data_fmt: u32,
    pub(super) last: u32,
    pub(super) status: u32,
    pub(super) private: *mut c_void,
    pub(super) slack: [u8; SLACK],
}

functions! {
    /// libwd_comp. Its constructors open its drivers.
    pub(super) struct Library(SONAME, Some(VARIABLE)) {
        /// `int wd_comp_init2_(char *, __u32, int, struct wd_ctx_params *)`.
        wd_comp_init2_: fn(*mut c_char, u32, c_int, *mut c_void) -> c_int,
        /// `handle_t wd_comp_alloc_sess(struct wd_comp_sess_setup *)`, 0 if it failed.
        wd_comp_alloc_sess: fn(*mut Setup) -> usize,
        /// `void wd_comp_free_sess(handle_t)`.
        wd_comp_free_sess: fn(usize),
        /// `int wd_do_comp_sync(handle_t, struct wd_comp_req *)`.
        wd_do_comp_sync: fn(usize, *mut Request) -> c_int,
    }
}

#[cfg(test)]
mod tests {
    use std::mem::offset_of;

    use super::*;

    #[test]
    fn structures_are_laid_out_as_in_the_headers() {
        let request = [
            offset_of!(Request, src),
            offset_of!(Request, src_len),
            offset_of!(Request, dst),
            offset_of!(Request, dst_len),
            offset_of!(Request, callback),
            offset_of!(Request, callback_param),
            offset_of!(Request, op_type),
            offset_of!(Request, data_fmt),
            offset_of!(Request, last),
            offset_of!(Request, status),
            offset_of!(Request, private),
            offset_of!(Request, slack),
        ];
        assert_eq!(request, [0, 8, 16, 24, 32, 40, 48, 52, 56, 60, 64, 72]);
        let setup = [
            offset_of!(Setup, alg_type),
            offset_of!(Setup, level),
            offset_of!(Setup, window),
            offset_of!(Setup, op_type),
            offset_of!(Setup, sched_params),
            offset_of!(Setup, slack),
        ];
        assert_eq!(setup, [0, 4, 8, 12, 16, 24]);
        let params = [
            offset_of!(SchedParams, numa_id),
            offset_of!(SchedParams, op_type),
            offset_of!(SchedParams, mode),
            offset_of!(SchedParams, begin),
            offset_of!(SchedParams, end),
            offset_of!(SchedParams, slack),
        ];
        assert_eq!(params, [0, 4, 5, 8, 12, 16]);
    }
}

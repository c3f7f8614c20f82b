//! libwd_comp's C interface, limited to what QEMU's `uadk` uses. Only layout and codes are used, after Linaro/uadk's public
//! headers (`include/wd_comp.h` of commit 020bb7d, `wd.h` and `wd_sched.h` of 00efb97, `libwd_comp.map` of 0ad1f5c).
//!
//! Only sessions of zlib streams are supported. The device writes the header `78 9c`. It skips the header of an input stream
//! without reading it, as HiSilicon's driver does.

use std::ffi::{CStr, c_char, c_int, c_void};
use std::sync::atomic::{AtomicBool, Ordering};
use std::time::Instant;

use libdeflate_sys::libdeflate_adler32;

use crate::behaviour::{Behaviour, Fate};
use crate::deflate;

const EIO: c_int = 5;
const EBUSY: c_int = 16;
const EEXIST: c_int = 17;
const ENODEV: c_int = 19;
const EINVAL: c_int = 22;
const ETIMEDOUT: c_int = 110;
/// `WD_HW_EACCESS`: the device is being reset.
const HW_EACCESS: c_int = 62;
/// `WD_ADDR_ERR`, `WD_OUT_EPARA` and `WD_IN_EPARA`, in a request's status.
const ADDRESS: u32 = 61;
const OUTPUT: u32 = 66;
const INPUT: u32 = 67;

const ZLIB: u32 = 1;
const COMPRESS: u32 = 0;
const DECOMPRESS: u32 = 1;
const ZLIB_HEADER: [u8; 2] = [0x78, 0x9c];

/// Missing output bytes of a job that wrongly reports success.
const MISSING: u32 = 19;

static INITIALISED: AtomicBool = AtomicBool::new(false);

/// The first fields of `wd_comp_sess_setup`.
#[repr(C)]
pub struct Setup {
    alg_type: u32,
    level: u32,
    window: u32,
    op_type: u32,
    sched_param: *mut c_void,
}

/// `wd_comp_req`.
#[repr(C)]
pub struct Request {
    src: *const u8,
    src_len: u32,
    dst: *mut u8,
    dst_len: u32,
    callback: *mut c_void,
    callback_param: *mut c_void,
    op_type: u32,
    data_fmt: u32,
    last: u32,
    status: u32,
    private: *mut c_void,
}

struct Session {
    op_type: u32,
}

/// Initialises the device for the process.
///
/// # Safety
///
/// `alg` must be a string that ends with a NUL.
#[unsafe(no_mangle)]
pub unsafe extern "C" fn wd_comp_init2_(
    alg: *const c_char,
    _sched_type: u32,
    _task_type: c_int,
    _ctx_params: *mut c_void,
) -> c_int {
    // SAFETY: guaranteed by the caller.
    if alg.is_null() || unsafe { CStr::from_ptr(alg) } != c"zlib" {
        return -EINVAL;
    }
    let behaviour = Behaviour::now();
    if behaviour.absent || behaviour.is_dead() {
        return -ENODEV;
    }
    if INITIALISED.swap(true, Ordering::Relaxed) {
        return -EEXIST;
    }
    0
}

/// Releases the device.
#[unsafe(no_mangle)]
pub extern "C" fn wd_comp_uninit2() {
    INITIALISED.store(false, Ordering::Relaxed);
}

/// Creates a session; returns 0 on failure.
///
/// # Safety
///
/// `setup` must be readable.
#[unsafe(no_mangle)]
pub unsafe extern "C" fn wd_comp_alloc_sess(setup: *const Setup) -> usize {
    // SAFETY: guaranteed by the caller.
    let Some(setup) = (unsafe { setup.as_ref() }) else {
        return 0;
    };
    let behaviour = Behaviour::now();
    let refused = setup.alg_type != ZLIB
        || setup.op_type > DECOMPRESS
        || setup.sched_param.is_null()
        || !INITIALISED.load(Ordering::Relaxed)
        || behaviour.absent
        || behaviour.is_dead();
    if refused {
        return 0;
    }
    let session = Box::new(Session {
        op_type: setup.op_type,
    });
    Box::into_raw(session).expose_provenance()
}

/// Ends a session.
///
/// # Safety
///
/// The session must be live.
#[unsafe(no_mangle)]
pub unsafe extern "C" fn wd_comp_free_sess(session: usize) {
    let session: *mut Session = std::ptr::with_exposed_provenance_mut(session);
    if !session.is_null() {
        // SAFETY: made by `wd_comp_alloc_sess`; guaranteed by the caller.
        drop(unsafe { Box::from_raw(session) });
    }
}

/// Executes a request. Returns 0 or a negative error code.
///
/// # Safety
///
/// The session must be live and the request's pointers valid.
#[unsafe(no_mangle)]
pub unsafe extern "C" fn wd_do_comp_sync(session: usize, request: *mut Request) -> c_int {
    let session: *const Session = std::ptr::with_exposed_provenance(session);
    // SAFETY: guaranteed by the caller.
    let (Some(session), Some(request)) = (unsafe { (session.as_ref(), request.as_mut()) }) else {
        return -EINVAL;
    };
    let refused = request.op_type != session.op_type
        || request.src.is_null()
        || request.src_len == 0
        || request.dst.is_null();
    if refused {
        return -EINVAL;
    }
    let behaviour = Behaviour::now();
    if behaviour.is_dead() {
        return -HW_EACCESS;
    }
    let Some((fate, end)) = behaviour.admit() else {
        return -EBUSY;
    };
    std::thread::sleep(end.saturating_duration_since(Instant::now()));
    match fate {
        Fate::Succeeds | Fate::IsWrong => {
            // SAFETY: guaranteed by the caller.
            request.status = unsafe { request.run() };
            if fate == Fate::IsWrong {
                // Except for 0, every length of a compressed page looks valid.
                request.dst_len = match request.op_type {
                    COMPRESS => 0,
                    _ => request.dst_len.saturating_sub(MISSING),
                };
            }
            0
        }
        Fate::Faults => {
            request.status = ADDRESS;
            0
        }
        Fate::Fails => -EIO,
        Fate::Dies => -HW_EACCESS,
        // The real library returns this after its own timeout.
        Fate::Hangs => -ETIMEDOUT,
    }
}

impl Request {
    /// Executes the request; returns its status.
    ///
    /// # Safety
    ///
    /// The request's pointers must be valid.
    unsafe fn run(&mut self) -> u32 {
        let (Ok(src_len), Ok(dst_len)) =
            (usize::try_from(self.src_len), usize::try_from(self.dst_len))
        else {
            return INPUT;
        };
        // SAFETY: guaranteed by the caller.
        let (input, room) = unsafe {
            (
                std::slice::from_raw_parts(self.src, src_len),
                std::slice::from_raw_parts_mut(self.dst, dst_len),
            )
        };
        let written = match self.op_type {
            COMPRESS => compress(input, room).ok_or(OUTPUT),
            _ => input
                .get(ZLIB_HEADER.len()..)
                .and_then(|stream| deflate::decompress(stream, room).ok())
                .ok_or(INPUT),
        };
        match written {
            Ok(written) => {
                self.dst_len = u32::try_from(written).unwrap_or(u32::MAX);
                0
            }
            Err(status) => status,
        }
    }
}

/// Writes a zlib stream to the start of `room`; returns the stream's length, or `None` if the stream does not fit.
fn compress(input: &[u8], room: &mut [u8]) -> Option<usize> {
    let (header, deflate) = room.split_at_mut_checked(ZLIB_HEADER.len())?;
    header.copy_from_slice(&ZLIB_HEADER);
    let written = deflate::compress(input, deflate).ok()?;
    // SAFETY: reads the slice; 1 is the checksum of nothing.
    let adler = unsafe { libdeflate_adler32(1, input.as_ptr().cast(), input.len()) };
    let trailer = deflate.get_mut(written..)?.first_chunk_mut::<4>()?;
    *trailer = adler.to_be_bytes();
    Some(ZLIB_HEADER.len() + written + trailer.len())
}

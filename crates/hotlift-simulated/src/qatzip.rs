//! libqatzip's interface over a simulated QAT.
//!
//! A call is a job: the library submits a packet's members to the device together, and returns one code for all. Differences
//! from the other devices:
//!
//! | behaviour | here |
//! |---|---|
//! | `absent` | `qzInit` without software returns -101; with it sessions run in software (11) |
//! | `busy`, `depth` | -103: other sessions use the device's instances |
//! | `fault`, `error` | -2; with corrupt data to decompress -4. The session is unusable until its teardown |
//! | `wrong` | 0, with half of input and output, as if the output were full; a single page is decompressed, with a wrong byte |
//! | `die` | -2, and no session is set up any more (-103) |
//! | `hang` | -5 after the latency, since calls wait |

use std::ffi::{c_int, c_uint, c_void};
use std::time::Instant;

use libdeflate_sys::libdeflate_crc32;

use crate::behaviour::{Behaviour, Fate};
use crate::deflate::{self, Failed};

const OK: c_int = 0;
const PARAMS: c_int = -1;
const FAIL: c_int = -2;
const BUFFER: c_int = -3;
const DATA: c_int = -4;
const TIMEOUT: c_int = -5;
const NOSW_NO_HARDWARE: c_int = -101;
const NOSW_NO_INSTANCE: c_int = -103;
/// `hw_session_stat` of a session that runs in software.
const NO_HARDWARE: i64 = 11;

/// Bytes before and after a member's deflate stream.
const HEAD: usize = 24;
const TRAILER: usize = 8;
const PAGE: usize = 4096;

/// `QzSession_T`.
#[repr(C)]
pub struct Session {
    hw_session_stat: i64,
    thread_state: c_int,
    internal: *mut State,
    total_in: u64,
    total_out: u64,
}

/// `QzSessionParamsDeflate_T`.
#[repr(C)]
#[derive(Clone, Copy)]
pub struct Params {
    direction: u32,
    level: u32,
    algorithm: u8,
    max_forks: u32,
    sw_backup: u8,
    hw_buff_sz: u32,
    strm_buff_sz: u32,
    input_threshold: u32,
    request_threshold: u32,
    wait_threshold: u32,
    polling_mode: u32,
    sensitive_mode: u32,
    huffman_header: u32,
    data_format: u32,
}

/// State of a session that is set up.
struct State {
    params: Params,
    spoiled: bool,
}

unsafe extern "C" {
    fn malloc(bytes: usize) -> *mut c_void;
    fn free(memory: *mut c_void);
}

/// Initialises a session; the first one also initialises the process.
///
/// # Safety
///
/// `session` must be null or a session of zeroes.
#[unsafe(no_mangle)]
pub unsafe extern "C" fn qzInit(session: *mut Session, sw_backup: u8) -> c_int {
    if session.is_null() || sw_backup > 1 {
        return PARAMS;
    }
    match (Behaviour::now().absent, sw_backup) {
        (true, 0) => NOSW_NO_HARDWARE,
        _ => OK,
    }
}

/// Writes the defaults of libqatzip 1.3.1.
///
/// # Safety
///
/// `params` must be null or room for parameters.
#[unsafe(no_mangle)]
pub unsafe extern "C" fn qzGetDefaultsDeflate(params: *mut Params) -> c_int {
    if params.is_null() {
        return PARAMS;
    }
    let defaults = Params {
        direction: 2,
        level: 1,
        algorithm: 8,
        max_forks: 3,
        sw_backup: 1,
        hw_buff_sz: 64 * 1024,
        strm_buff_sz: 64 * 1024,
        input_threshold: 1024,
        request_threshold: 32,
        wait_threshold: 8,
        polling_mode: 0,
        sensitive_mode: 0,
        huffman_header: 0,
        data_format: 2,
    };
    // SAFETY: room for parameters, guaranteed by the caller.
    unsafe { params.write(defaults) };
    OK
}

/// Sets a session up.
///
/// # Safety
///
/// Each pointer must be null or valid; the session must be initialised.
#[unsafe(no_mangle)]
pub unsafe extern "C" fn qzSetupSessionDeflate(
    session: *mut Session,
    params: *const Params,
) -> c_int {
    // SAFETY: guaranteed by the caller.
    let (Some(session), Some(params)) = (unsafe { session.as_mut() }, unsafe { params.as_ref() })
    else {
        return PARAMS;
    };
    let size = params.hw_buff_sz;
    if !(1..=9).contains(&params.level)
        || !size.is_power_of_two()
        || !(1024..=512 * 1024).contains(&size)
        || params.data_format != 2
        || params.direction > 2
        || params.sw_backup > 1
    {
        return PARAMS;
    }
    if !session.internal.is_null() {
        return 1;
    }
    let behaviour = Behaviour::now();
    let software = params.sw_backup == 1;
    if behaviour.is_dead() && !software {
        return NOSW_NO_INSTANCE;
    }
    if behaviour.absent && !software {
        return NOSW_NO_HARDWARE;
    }
    let state = State {
        params: *params,
        spoiled: false,
    };
    session.internal = Box::into_raw(Box::new(state));
    session.hw_session_stat = if behaviour.absent { NO_HARDWARE } else { 0 };
    OK
}

/// Returns the maximum compressed size of `bytes` bytes.
///
/// # Safety
///
/// None: the session is not read.
#[unsafe(no_mangle)]
pub unsafe extern "C" fn qzMaxCompressedLength(bytes: c_uint, _session: *mut Session) -> c_uint {
    bytes.saturating_add(bytes / 8).saturating_add(1024)
}

/// Compresses the source to gzip members of `hw_buff_sz` uncompressed bytes each.
///
/// # Safety
///
/// The session must be set up. `source_len` and `destination_len` must be the lengths of the buffers.
#[unsafe(no_mangle)]
pub unsafe extern "C" fn qzCompress(
    session: *mut Session,
    source: *const u8,
    source_len: *mut c_uint,
    destination: *mut u8,
    destination_len: *mut c_uint,
    _last: c_uint,
) -> c_int {
    // SAFETY: guaranteed by the caller.
    unsafe {
        call(
            session,
            source,
            source_len,
            destination,
            destination_len,
            compress,
        )
    }
}

/// Decompresses the gzip members of the source.
///
/// # Safety
///
/// The session must be set up. `source_len` and `destination_len` must be the lengths of the buffers.
#[unsafe(no_mangle)]
pub unsafe extern "C" fn qzDecompress(
    session: *mut Session,
    source: *const u8,
    source_len: *mut c_uint,
    destination: *mut u8,
    destination_len: *mut c_uint,
) -> c_int {
    // SAFETY: guaranteed by the caller.
    unsafe {
        call(
            session,
            source,
            source_len,
            destination,
            destination_len,
            decompress,
        )
    }
}

/// Allocates ordinary memory, even if pinned memory is requested.
///
/// # Safety
///
/// None; the memory must be freed by [`qzFree`].
#[unsafe(no_mangle)]
pub unsafe extern "C" fn qzMalloc(bytes: usize, _node: c_int, _pinned: c_int) -> *mut c_void {
    // SAFETY: no preconditions.
    unsafe { malloc(bytes) }
}

/// Frees memory of [`qzMalloc`].
///
/// # Safety
///
/// The pointer must be null or from [`qzMalloc`], and not freed yet.
#[unsafe(no_mangle)]
pub unsafe extern "C" fn qzFree(memory: *mut c_void) {
    // SAFETY: guaranteed by the caller.
    unsafe { free(memory) };
}

/// Does nothing, as in libqatzip 1.3.1.
///
/// # Safety
///
/// None: nothing is read.
#[unsafe(no_mangle)]
pub unsafe extern "C" fn qzGetStatus(session: *mut Session, status: *mut c_void) -> c_int {
    if session.is_null() || status.is_null() {
        return PARAMS;
    }
    OK
}

/// Releases the memory that [`qzSetupSessionDeflate`] allocated for a session.
///
/// # Safety
///
/// `session` must be null or an initialised session, with no call in progress.
#[unsafe(no_mangle)]
pub unsafe extern "C" fn qzTeardownSession(session: *mut Session) -> c_int {
    // SAFETY: guaranteed by the caller.
    let Some(session) = (unsafe { session.as_mut() }) else {
        return PARAMS;
    };
    if !session.internal.is_null() {
        // SAFETY: from Box::into_raw in the setup, and exclusive.
        drop(unsafe { Box::from_raw(session.internal) });
        session.internal = std::ptr::null_mut();
    }
    OK
}

/// Ends a session.
///
/// # Safety
///
/// None: the session is not read.
#[unsafe(no_mangle)]
pub unsafe extern "C" fn qzClose(session: *mut Session) -> c_int {
    if session.is_null() { PARAMS } else { OK }
}

/// Function that compresses or decompresses. Returns the code, and the number of bytes read and written.
type Work = fn(&mut State, &[u8], &mut [u8]) -> (c_int, usize, usize);

/// Executes a call of [`qzCompress`] or [`qzDecompress`].
///
/// # Safety
///
/// The session must be set up. `source_len` and `destination_len` must be the lengths of the buffers.
unsafe fn call(
    session: *mut Session,
    source: *const u8,
    source_len: *mut c_uint,
    destination: *mut u8,
    destination_len: *mut c_uint,
    work: Work,
) -> c_int {
    // SAFETY: guaranteed by the caller.
    let (session, source_len, destination_len) = unsafe {
        match (
            session.as_mut(),
            source_len.as_mut(),
            destination_len.as_mut(),
        ) {
            (Some(session), Some(source), Some(destination)) => (session, source, destination),
            _ => return PARAMS,
        }
    };
    // SAFETY: buffers of those lengths, guaranteed by the caller.
    let (source, destination) = unsafe {
        (
            std::slice::from_raw_parts(source, *source_len as usize),
            std::slice::from_raw_parts_mut(destination, *destination_len as usize),
        )
    };
    // SAFETY: null or a state that is live until the session is torn down.
    let Some(state) = (unsafe { session.internal.as_mut() }) else {
        return PARAMS;
    };
    let (code, used, given) = if session.hw_session_stat == NO_HARDWARE {
        work(state, source, destination)
    } else {
        by_device(state, source, destination, work)
    };
    state.spoiled |= code == FAIL || code == DATA;
    let length = |bytes: usize| c_uint::try_from(bytes).unwrap_or(c_uint::MAX);
    (*source_len, *destination_len) = (length(used), length(given));
    session.total_in += used as u64;
    session.total_out += given as u64;
    code
}

fn by_device(
    state: &mut State,
    source: &[u8],
    destination: &mut [u8],
    work: Work,
) -> (c_int, usize, usize) {
    if state.spoiled {
        return (DATA, 0, 0);
    }
    let Some((fate, end)) = Behaviour::now().admit() else {
        return (NOSW_NO_INSTANCE, 0, 0);
    };
    std::thread::sleep(end.saturating_duration_since(Instant::now()));
    match fate {
        Fate::Succeeds => work(state, source, destination),
        Fate::Faults | Fate::Fails | Fate::Dies => (FAIL, 0, 0),
        Fate::Hangs => (TIMEOUT, 0, 0),
        Fate::IsWrong => {
            let (code, used, given) = work(state, source, destination);
            if given == PAGE {
                destination[0] ^= 1;
                return (code, used, given);
            }
            (code, used / 2, given / 2)
        }
    }
}

fn compress(state: &mut State, source: &[u8], destination: &mut [u8]) -> (c_int, usize, usize) {
    let mut given = 0;
    for member in source.chunks(state.params.hw_buff_sz as usize) {
        let Some((room, rest)) = destination[given..]
            .split_at_mut_checked(HEAD)
            .filter(|(_, rest)| rest.len() > TRAILER)
        else {
            return (BUFFER, 0, 0);
        };
        let most = rest.len() - TRAILER;
        let Ok(written) = deflate::compress(member, &mut rest[..most]) else {
            return (BUFFER, 0, 0);
        };
        let size = |bytes: usize| u32::try_from(bytes).unwrap_or(u32::MAX).to_le_bytes();
        room[..16].copy_from_slice(b"\x1f\x8b\x08\x04\0\0\0\0\0\xff\x0c\0QZ\x08\0");
        room[16..20].copy_from_slice(&size(member.len()));
        room[20..].copy_from_slice(&size(written));
        rest[written..][..4].copy_from_slice(&crc32(member).to_le_bytes());
        rest[written + 4..][..4].copy_from_slice(&size(member.len()));
        given += HEAD + written + TRAILER;
    }
    (OK, source.len(), given)
}

fn decompress(_state: &mut State, source: &[u8], destination: &mut [u8]) -> (c_int, usize, usize) {
    let (mut used, mut given) = (0, 0);
    while used < source.len() {
        match member(&source[used..], &mut destination[given..]) {
            Ok((taken, bytes)) => {
                used += taken;
                given += bytes;
            }
            // The library reports success for the members before the one that does not fit.
            Err(Failed::DoesNotFit) => return (OK, used, given),
            Err(Failed::Damaged) => return (DATA, used, given),
        }
    }
    (OK, used, given)
}

/// Decompresses the member at the start of `source`; returns the bytes read and written.
fn member(source: &[u8], destination: &mut [u8]) -> Result<(usize, usize), Failed> {
    let (head, body) = source.split_at_checked(HEAD).ok_or(Failed::Damaged)?;
    let size = |at: usize| {
        let bytes = head[at..].first_chunk().ok_or(Failed::Damaged)?;
        Ok(u32::from_le_bytes(*bytes) as usize)
    };
    let (plain, packed) = (size(16)?, size(20)?);
    let (stream, rest) = body.split_at_checked(packed).ok_or(Failed::Damaged)?;
    let trailer = rest.first_chunk::<TRAILER>().ok_or(Failed::Damaged)?;
    let room = destination.get_mut(..plain).ok_or(Failed::DoesNotFit)?;
    let written = deflate::decompress(stream, room).map_err(|_| Failed::Damaged)?;
    if written != plain || trailer[..4] != crc32(room).to_le_bytes() {
        return Err(Failed::Damaged);
    }
    Ok((HEAD + packed + TRAILER, plain))
}

fn crc32(bytes: &[u8]) -> u32 {
    // SAFETY: reads the slice; 0 is the checksum of nothing.
    unsafe { libdeflate_crc32(0, bytes.as_ptr().cast(), bytes.len()) }
}

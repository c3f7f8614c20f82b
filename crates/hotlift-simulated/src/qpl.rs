//! libqpl's C interface, with the layout and the codes of the public headers of QPL 1.2 to 1.9 (`qpl/c_api/job.h`,
//! `status.h`).
//!
//! A job of the hardware path ends after its latency, counted from its submission. It writes its output at the next poll. The
//! streams are made by libdeflate, with any kind of block.

use std::ffi::c_char;
use std::time::{Duration, Instant};

use crate::behaviour::{Behaviour, Fate};
use crate::deflate::{self, Failed};

const OK: u32 = 0;
const BEING_PROCESSED: u32 = 1;
const MORE_OUTPUT_NEEDED: u32 = 2;
const QUEUES_ARE_BUSY: u32 = 5;
/// An invalid parameter: 50 plus the parameter's number, here the job's pointer.
const BAD_PARAMETER: u32 = 51;
const BAD_STREAM: u32 = 216;
const PAGE_FAULT_ON_READ: u32 = 303;
const PAGE_FAULT_ON_WRITE: u32 = 431;
const NO_HARDWARE: u32 = 501;
const HARDWARE_ERROR: u32 = 502;
const NO_QUEUE: u32 = 503;

const PATH_HARDWARE: u32 = 1;
const PATH_SOFTWARE: u32 = 2;
const OP_DECOMPRESS: u32 = 0;
const OP_COMPRESS: u32 = 1;

/// Missing output bytes of a job that wrongly reports success.
const MISSING: u32 = 19;

/// The first fields of `qpl_job`, and this library's own fields from byte 240 on.
#[repr(C)]
pub struct Job {
    next_in: *const u8,
    available_in: u32,
    total_in: u32,
    next_out: *mut u8,
    available_out: u32,
    total_out: u32,
    op: u32,
    flags: u32,
    rest: [u32; 50],
    path: u32,
    state: State,
}

/// State of a job.
enum State {
    /// Not submitted, or ended.
    Idle,
    /// Submitted, with the result and the end time of the job.
    Running(Fate, Instant),
}

impl Job {
    /// Executes the job and returns its status.
    ///
    /// # Safety
    ///
    /// The job's pointers must be valid for the job's lengths.
    unsafe fn run(&mut self) -> u32 {
        let (Ok(available_in), Ok(available_out)) = (
            usize::try_from(self.available_in),
            usize::try_from(self.available_out),
        ) else {
            return BAD_PARAMETER;
        };
        if self.next_in.is_null() || self.next_out.is_null() {
            return BAD_PARAMETER;
        }
        // SAFETY: guaranteed by the caller.
        let (input, room) = unsafe {
            (
                std::slice::from_raw_parts(self.next_in, available_in),
                std::slice::from_raw_parts_mut(self.next_out, available_out),
            )
        };
        let result = match self.op {
            OP_COMPRESS => deflate::compress(input, room),
            OP_DECOMPRESS => deflate::decompress(input, room),
            _ => return BAD_PARAMETER,
        };
        match result {
            Ok(written) => {
                self.total_in = self.available_in;
                self.total_out = u32::try_from(written).unwrap_or(u32::MAX);
                OK
            }
            Err(Failed::DoesNotFit) => MORE_OUTPUT_NEEDED,
            Err(Failed::Damaged) => BAD_STREAM,
        }
    }

    /// Ends the job with this result, and returns its status.
    ///
    /// # Safety
    ///
    /// As for `run`.
    unsafe fn end(&mut self, fate: Fate) -> u32 {
        self.total_in = 0;
        self.total_out = 0;
        match fate {
            // SAFETY: guaranteed by the caller.
            Fate::Succeeds => unsafe { self.run() },
            Fate::IsWrong => {
                // SAFETY: guaranteed by the caller.
                let status = unsafe { self.run() };
                // Except for 0, every length of a compressed page looks valid.
                self.total_out = match self.op {
                    OP_COMPRESS => 0,
                    _ => self.total_out.saturating_sub(MISSING),
                };
                status
            }
            Fate::Faults if self.op == OP_COMPRESS => PAGE_FAULT_ON_WRITE,
            Fate::Faults => PAGE_FAULT_ON_READ,
            Fate::Fails => HARDWARE_ERROR,
            Fate::Dies | Fate::Hangs => NO_QUEUE,
        }
    }
}

/// Returns the library's version.
#[unsafe(no_mangle)]
pub extern "C" fn qpl_get_library_version() -> *const c_char {
    c"1.9.0-simulated".as_ptr()
}

/// Writes the size of a job.
///
/// # Safety
///
/// `size` must be writable.
#[unsafe(no_mangle)]
pub unsafe extern "C" fn qpl_get_job_size(path: u32, size: *mut u32) -> u32 {
    if ![PATH_HARDWARE, PATH_SOFTWARE].contains(&path) || size.is_null() {
        return BAD_PARAMETER;
    }
    // SAFETY: guaranteed by the caller.
    unsafe { *size = u32::try_from(size_of::<Job>()).unwrap_or(u32::MAX) };
    OK
}

/// Initialises a job in zeroed memory.
///
/// # Safety
///
/// `job` must have the size that `qpl_get_job_size` reports, aligned to 8.
#[unsafe(no_mangle)]
pub unsafe extern "C" fn qpl_init_job(path: u32, job: *mut Job) -> u32 {
    if job.is_null() {
        return BAD_PARAMETER;
    }
    let behaviour = Behaviour::now();
    match path {
        PATH_HARDWARE if behaviour.absent => return NO_HARDWARE,
        PATH_HARDWARE if behaviour.is_dead() => return NO_QUEUE,
        PATH_HARDWARE | PATH_SOFTWARE => {}
        _ => return BAD_PARAMETER,
    }
    // SAFETY: guaranteed by the caller; the field may be uninitialised, and needs no drop.
    unsafe {
        (&raw mut (*job).path).write(path);
        (&raw mut (*job).state).write(State::Idle);
    }
    OK
}

/// Submits a job. On the software path, also executes the job.
///
/// # Safety
///
/// `job` must be initialised, its pointers valid until it has ended.
#[unsafe(no_mangle)]
pub unsafe extern "C" fn qpl_submit_job(job: *mut Job) -> u32 {
    // SAFETY: guaranteed by the caller.
    let Some(job) = (unsafe { job.as_mut() }) else {
        return BAD_PARAMETER;
    };
    if job.path == PATH_SOFTWARE {
        // SAFETY: guaranteed by the caller.
        return unsafe { job.end(Fate::Succeeds) };
    }
    let behaviour = Behaviour::now();
    if behaviour.is_dead() {
        return NO_QUEUE;
    }
    let Some((fate, end)) = behaviour.admit() else {
        return QUEUES_ARE_BUSY;
    };
    job.state = State::Running(fate, end);
    OK
}

/// Returns the status of a job, also before its end.
///
/// # Safety
///
/// As for `qpl_submit_job`.
#[unsafe(no_mangle)]
pub unsafe extern "C" fn qpl_check_job(job: *mut Job) -> u32 {
    // SAFETY: guaranteed by the caller.
    let Some(job) = (unsafe { job.as_mut() }) else {
        return BAD_PARAMETER;
    };
    let State::Running(fate, end) = job.state else {
        return OK;
    };
    let fate = match fate {
        Fate::Hangs => return BEING_PROCESSED,
        // Jobs in flight when the device died are lost.
        _ if Behaviour::now().is_dead() => Fate::Dies,
        _ if Instant::now() < end => return BEING_PROCESSED,
        fate => fate,
    };
    job.state = State::Idle;
    // SAFETY: guaranteed by the caller.
    unsafe { job.end(fate) }
}

/// Waits for a job.
///
/// # Safety
///
/// As for `qpl_submit_job`.
#[unsafe(no_mangle)]
pub unsafe extern "C" fn qpl_wait_job(job: *mut Job) -> u32 {
    loop {
        // SAFETY: guaranteed by the caller.
        match unsafe { qpl_check_job(job) } {
            BEING_PROCESSED => std::thread::sleep(Duration::from_micros(10)),
            status => return status,
        }
    }
}

/// Submits a job and waits for it.
///
/// # Safety
///
/// As for `qpl_submit_job`.
#[unsafe(no_mangle)]
pub unsafe extern "C" fn qpl_execute_job(job: *mut Job) -> u32 {
    // SAFETY: guaranteed by the caller.
    unsafe {
        match qpl_submit_job(job) {
            OK if (*job).path == PATH_HARDWARE => qpl_wait_job(job),
            status => status,
        }
    }
}

/// Releases a job, which must have ended.
///
/// # Safety
///
/// `job` must be initialised.
#[unsafe(no_mangle)]
pub unsafe extern "C" fn qpl_fini_job(job: *mut Job) -> u32 {
    // SAFETY: guaranteed by the caller.
    match unsafe { job.as_ref() } {
        None => BAD_PARAMETER,
        Some(Job {
            state: State::Running(..),
            ..
        }) => std::process::abort(),
        Some(_) => OK,
    }
}

const _: () = {
    use std::mem::offset_of;
    assert!(offset_of!(Job, next_out) == 16 && offset_of!(Job, flags) == 36);
    assert!(offset_of!(Job, path) == 240);
};

//! A channel's session with the device. It processes one page at a time, and the library waits for the device.
//!
//! The library also defines the timeout: 200 million polls, which take seconds. Another timeout would need our own contexts and
//! scheduler.

use std::ffi::c_int;
use std::sync::OnceLock;

use hotlift_mem::PAGE_SIZE;
use hotlift_methods::device::{Collected, Direction, PageDevice, PageFailure, Submitted};

use super::sys::{self, Library};

/// Room for a page's output (as in QEMU): the output may be larger than the input.
const ROOM: usize = 2 * PAGE_SIZE;

/// Open session of the library, for one direction.
pub(super) struct Session {
    library: &'static Library,
    handle: usize,
    direction: Direction,
    /// Output of the device. All pages are touched in advance.
    output: Box<[u8; ROOM]>,
    /// Code, status and output length of the last request, until it is collected.
    done: (c_int, u32, u32),
}

impl Session {
    /// Opens a session for that direction.
    ///
    /// # Errors
    ///
    /// The library's error.
    pub(super) fn open(direction: Direction) -> Result<Box<dyn PageDevice>, String> {
        let library = ready()?;
        let op_type = op_type(direction);
        let mut params = sys::SchedParams {
            // As in QEMU: a device of the first node, or of the next node.
            numa_id: 0,
            op_type: u8::try_from(op_type).unwrap_or(0),
            mode: 0,
            begin: 0,
            end: 0,
            slack: [0; sys::SLACK],
        };
        let mut setup = sys::Setup {
            alg_type: sys::ALG_ZLIB,
            level: sys::LEVEL_1,
            window: sys::WINDOW_4K,
            op_type,
            sched_params: &raw mut params,
            slack: [0; sys::SLACK],
        };
        // SAFETY: both structures are those of the header, followed by zeroes, and not kept.
        let handle = unsafe { (library.wd_comp_alloc_sess)(&raw mut setup) };
        if handle == 0 {
            return Err("no session".to_owned());
        }
        Ok(Box::new(Self {
            library,
            handle,
            direction,
            output: Box::new([0xff; ROOM]),
            done: (0, 0, 0),
        }))
    }
}

/// Returns the library. The first call in the process also initialises the device. The process keeps the device's contexts.
/// QEMU releases the contexts at the end of each channel, and so takes them from the other channels.
pub(super) fn ready() -> Result<&'static Library, String> {
    static READY: OnceLock<Result<(), String>> = OnceLock::new();
    let library = Library::get()?;
    let ready = READY.get_or_init(|| {
        let mut algorithm = *b"zlib\0";
        // SAFETY: the algorithm ends with a NUL and is not kept.
        let code = unsafe {
            (library.wd_comp_init2_)(
                algorithm.as_mut_ptr().cast(),
                sys::SCHED_ROUND_ROBIN,
                sys::TASK_HARDWARE,
                std::ptr::null_mut(),
            )
        };
        match code {
            0 | sys::EXISTS => Ok(()),
            sys::NO_DEVICE => Err("libwd_comp: no device for zlib".to_owned()),
            code => Err(format!("libwd_comp: no device for zlib: code {code}")),
        }
    });
    ready.clone().map(|()| library)
}

fn op_type(direction: Direction) -> u32 {
    match direction {
        Direction::Compress => sys::COMPRESS,
        Direction::Decompress => sys::DECOMPRESS,
    }
}

impl PageDevice for Session {
    fn slots(&self) -> usize {
        1
    }

    unsafe fn submit(&mut self, _slot: usize, input: &[u8]) -> Submitted {
        let room = match self.direction {
            Direction::Compress => ROOM,
            Direction::Decompress => PAGE_SIZE,
        };
        let (Ok(src_len), Ok(dst_len)) = (u32::try_from(input.len()), u32::try_from(room)) else {
            return Submitted::Failed(PageFailure::Length(input.len()));
        };
        let mut request = sys::Request {
            src: input.as_ptr(),
            src_len,
            dst: self.output.as_mut_ptr(),
            dst_len,
            callback: std::ptr::null_mut(),
            callback_param: std::ptr::null_mut(),
            op_type: op_type(self.direction),
            // One flat buffer.
            data_fmt: 0,
            last: 1,
            status: 0,
            private: std::ptr::null_mut(),
            slack: [0; sys::SLACK],
        };
        // SAFETY: the session is live and exclusive (`&mut self`); source and destination have the given lengths.
        let code = unsafe { (self.library.wd_do_comp_sync)(self.handle, &raw mut request) };
        if code == sys::BUSY {
            return Submitted::Busy;
        }
        self.done = (code, request.status, request.dst_len);
        Submitted::Accepted
    }

    fn collect(&mut self, _slot: usize) -> Collected {
        let (code, status, written) = self.done;
        let status = match self.direction {
            Direction::Decompress if status == sys::STREAM_END => 0,
            _ => status,
        };
        match (code, status, usize::try_from(written)) {
            (sys::TIMED_OUT, ..) => Collected::NoAnswer,
            (0, 0, Ok(written)) if written <= PAGE_SIZE => Collected::Done(written),
            (0, 0, Ok(written)) if written <= ROOM => Collected::DoesNotFit,
            (0, 0, written) => {
                Collected::Failed(PageFailure::Length(written.unwrap_or(usize::MAX)))
            }
            (0, status, _) => Collected::Failed(PageFailure::Code(status.into())),
            (code, ..) => Collected::Failed(PageFailure::Code(code.into())),
        }
    }

    fn output(&self, _slot: usize, len: usize) -> &[u8] {
        &self.output[..len]
    }

    fn abandon(self: Box<Self>) {
        std::mem::forget(self);
    }
}

impl Drop for Session {
    fn drop(&mut self) {
        // SAFETY: the session is live, and freed only here.
        unsafe { (self.library.wd_comp_free_sess)(self.handle) };
    }
}

//! Sessions with the hardware.
//!
//! A packet is one call: the library sends its members to the device one behind the other and waits
//! for all, so that they are compressed side by side. A call a member would wait for each alone.
//!
//! The library copies whatever does not lie in its pinned memory. We copy once instead, to buffers of
//! our own there: neither it nor the device ever gets a pointer into guest memory or a payload, and
//! what the device still writes after a call that failed reaches nobody.
//!
//! A call waits for the device without end. The library watches the device's heartbeat in a thread of
//! its own, and ends the calls of one that has stopped.

use std::ffi::c_void;
use std::fmt;
use std::ptr::NonNull;

use hotlift_mem::PAGE_SIZE;

use super::members;
use super::sys::{self, Library};

/// Bytes of the largest packet of a QEMU; buffers begin with room for it.
const PACKET: usize = 128 * PAGE_SIZE;

/// What does a session's work.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub(super) enum Backend {
    /// The device, or nothing: what it fails to do fails.
    Hardware,
    /// The library's own software, unless there is a device: for tests of the library's interface,
    /// and to compare with. It is slower than ours, and without a device every call uses up one of the
    /// process's thread keys.
    LibrarySoftware,
}

impl Backend {
    fn sw_backup(self) -> u8 {
        u8::from(self == Self::LibrarySoftware)
    }

    /// Most bytes of a member: the software makes a single one of a packet.
    pub(super) fn largest_member(self) -> usize {
        match self {
            Self::Hardware => members::LARGEST,
            Self::LibrarySoftware => usize::MAX,
        }
    }
}

#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub(super) enum Direction {
    Compress,
    Decompress,
}

/// Why a call gave nothing.
#[derive(Debug)]
pub(super) enum Failure {
    /// Other sessions have the device's instances at the moment.
    Busy,
    /// No answer in time: whether the device still writes is not known.
    NoAnswer,
    /// Anything else: the session may be spoiled.
    Failed(String),
}

impl fmt::Display for Failure {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        match self {
            Self::Busy => f.write_str(sys::meaning(sys::NO_INSTANCE.into())),
            Self::NoAnswer => f.write_str(sys::meaning(sys::TIMEOUT.into())),
            Self::Failed(reason) => f.write_str(reason),
        }
    }
}

impl From<String> for Failure {
    fn from(reason: String) -> Self {
        Self::Failed(reason)
    }
}

/// One direction of one channel.
pub(super) struct Session {
    library: &'static Library,
    backend: Backend,
    direction: Direction,
    /// The library holds its address.
    raw: Box<sys::Session>,
    input: Buffer,
    output: Buffer,
}

// SAFETY: the session and its buffers are owned by this value alone, and the library ties neither to
// a thread.
unsafe impl Send for Session {}

impl Session {
    /// A session of that level, 1 to 9, which only compressing makes use of.
    ///
    /// # Errors
    ///
    /// What the library said; that it would work in software, if `backend` is the hardware.
    pub(super) fn new(
        library: &'static Library,
        backend: Backend,
        direction: Direction,
        level: u8,
    ) -> Result<Self, String> {
        let mut raw = Box::new(sys::Session::zeroed());
        let mut params = sys::Params::default();
        // SAFETY: a session of zeroes.
        let code = unsafe { (library.qzInit)(&raw mut *raw, backend.sw_backup()) };
        if code != sys::OK && code != sys::DUPLICATE {
            return Err(told("qzInit", code));
        }
        // SAFETY: parameters for the library to fill.
        let code = unsafe { (library.qzGetDefaultsDeflate)(&raw mut params) };
        if code != sys::OK {
            return Err(told("qzGetDefaultsDeflate", code));
        }
        params.direction = match direction {
            Direction::Compress => sys::COMPRESS,
            Direction::Decompress => sys::DECOMPRESS,
        };
        params.level = level.into();
        params.sw_backup = backend.sw_backup();
        // Both far below 2^32.
        params.hw_buff_sz = u32::try_from(members::LARGEST).unwrap_or(u32::MAX);
        params.input_threshold = u32::try_from(members::SMALLEST).unwrap_or(u32::MAX);
        params.data_format = sys::GZIP_EXT;
        // SAFETY: an initialised session that is not set up, and parameters.
        let code = unsafe { (library.qzSetupSessionDeflate)(&raw mut *raw, &raw mut params) };
        let on_hardware = code == sys::OK && raw.hw_session_stat == 0;
        if code < 0 || (backend == Backend::Hardware && !on_hardware) {
            let state = raw.hw_session_stat;
            // SAFETY: the session is initialised, and is not used again.
            unsafe { end(library, &raw mut *raw) };
            return Err(match code {
                sys::OK => format!("a session would run in software: {}", with_code(state)),
                code => told("qzSetupSessionDeflate", code),
            });
        }
        let buffers = Buffer::new(library, PACKET)
            .and_then(|a| Buffer::new(library, PACKET + PACKET / 8 + PAGE_SIZE).map(|b| (a, b)));
        let (plain, packed) = buffers.inspect_err(|_| {
            // SAFETY: the session is set up, and is not used again.
            unsafe { end(library, &raw mut *raw) };
        })?;
        let (input, output) = match direction {
            Direction::Compress => (plain, packed),
            Direction::Decompress => (packed, plain),
        };
        Ok(Self {
            library,
            backend,
            direction,
            raw,
            input,
            output,
        })
    }

    /// Compresses or decompresses `bytes`, which are or become `pages` bytes of pages; what came out.
    /// All of the input was used for it.
    pub(super) fn run(&mut self, bytes: &[u8], pages: usize) -> Result<&[u8], Failure> {
        let length = |bytes: usize| u32::try_from(bytes).map_err(|_| "too large".to_owned());
        let mut taken = length(bytes.len())?;
        let room = match self.direction {
            Direction::Compress => self.compressed_length(length(pages)?, pages)?,
            Direction::Decompress => pages,
        };
        let mut given = length(room)?;
        self.input.hold(self.library, bytes.len())?;
        self.output.hold(self.library, room)?;
        self.input.bytes()[..bytes.len()].copy_from_slice(bytes);
        let (session, from) = (&raw mut *self.raw, self.input.ptr.as_ptr());
        let to = self.output.ptr.as_ptr();
        // SAFETY: a session that is set up, and buffers with as many bytes as are told.
        let code = unsafe {
            match self.direction {
                Direction::Compress => {
                    (self.library.qzCompress)(session, from, &raw mut taken, to, &raw mut given, 1)
                }
                Direction::Decompress => {
                    (self.library.qzDecompress)(session, from, &raw mut taken, to, &raw mut given)
                }
            }
        };
        match code {
            sys::OK => {}
            sys::NO_INSTANCE => return Err(Failure::Busy),
            sys::TIMEOUT => return Err(Failure::NoAnswer),
            code => return Err(told(self.call(), code).into()),
        }
        // Whatever was not to go to software and went there after all.
        if self.backend == Backend::Hardware && self.raw.hw_session_stat == sys::NO_HARDWARE {
            return Err(format!("{}: {}", self.call(), with_code(sys::NO_HARDWARE)).into());
        }
        let (taken, given) = (taken as usize, given as usize);
        // A call that ran out of room says that it succeeded.
        if taken != bytes.len() || given > room {
            return Err(format!(
                "{} took {taken} of {} bytes and gave {given}",
                self.call(),
                bytes.len()
            )
            .into());
        }
        Ok(&self.output.bytes()[..given])
    }

    /// Forgets the session and its memory, which the device may still write to.
    pub(super) fn leak(self) {
        std::mem::forget(self);
    }

    fn compressed_length(&mut self, bytes: u32, pages: usize) -> Result<usize, String> {
        // SAFETY: a session that is set up.
        let room = unsafe { (self.library.qzMaxCompressedLength)(bytes, &raw mut *self.raw) };
        let room = room as usize;
        // 9/8 and a little more in 1.3.1 and 2.0.0.
        if (pages..=2 * pages + PAGE_SIZE).contains(&room) {
            Ok(room)
        } else {
            Err(format!("qzMaxCompressedLength said {room} of {pages}"))
        }
    }

    fn call(&self) -> &'static str {
        match self.direction {
            Direction::Compress => "qzCompress",
            Direction::Decompress => "qzDecompress",
        }
    }
}

impl Drop for Session {
    fn drop(&mut self) {
        // SAFETY: the session is set up, no call is under way, and it is not used again.
        unsafe { end(self.library, &raw mut *self.raw) };
    }
}

/// Ends a session. What the library answers is of no use to anybody.
///
/// # Safety
///
/// The session must be initialised, and not be used again.
unsafe fn end(library: &Library, session: *mut sys::Session) {
    // SAFETY: the caller's promise; in this order, says the header.
    unsafe {
        (library.qzTeardownSession)(session);
        (library.qzClose)(session);
    }
}

fn told(call: &str, code: i32) -> String {
    format!("{call}: {}", with_code(code.into()))
}

fn with_code(code: i64) -> String {
    format!("{} ({code})", sys::meaning(code))
}

/// Memory of the library's: pinned, or common if there is no pinned memory left, which the library
/// then copies.
struct Buffer {
    library: &'static Library,
    ptr: NonNull<u8>,
    len: usize,
}

impl Buffer {
    fn new(library: &'static Library, len: usize) -> Result<Self, String> {
        // Node 0, as QEMU asks for: the value for any node is unknown to libraries before 1.3.
        let node = 0;
        let ptr = [sys::PINNED, sys::COMMON].into_iter().find_map(|kind| {
            // SAFETY: the library is initialised.
            NonNull::new(unsafe { (library.qzMalloc)(len, node, kind) }.cast::<u8>())
        });
        let ptr = ptr.ok_or_else(|| format!("qzMalloc has no {len} bytes"))?;
        // A device should meet no page that is not there.
        // SAFETY: fresh memory of that length.
        unsafe { ptr.write_bytes(0, len) };
        Ok(Self { library, ptr, len })
    }

    /// Makes room for `len` bytes. What it held is lost if it had less.
    fn hold(&mut self, library: &'static Library, len: usize) -> Result<(), String> {
        if len > self.len {
            *self = Self::new(library, len)?;
        }
        Ok(())
    }

    fn bytes(&mut self) -> &mut [u8] {
        // SAFETY: allocated with that length, written since, and borrowed with `self`.
        unsafe { std::slice::from_raw_parts_mut(self.ptr.as_ptr(), self.len) }
    }
}

impl Drop for Buffer {
    fn drop(&mut self) {
        // SAFETY: from the library's malloc, and freed only here.
        unsafe { (self.library.qzFree)(self.ptr.as_ptr().cast::<c_void>()) };
    }
}

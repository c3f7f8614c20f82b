//! Sessions with the hardware.
//!
//! A packet is one call: the library submits all members of the packet before it waits, and the device compresses them in
//! parallel. With a call per member, each member would be compressed alone.
//!
//! The library copies input that is outside its pinned memory. To avoid this, a packet is copied once, to buffers of this
//! module in pinned memory. The library and the device never get a pointer into guest memory or a payload. So late writes of
//! the device after a failed call do no damage.
//!
//! A call waits for the device without timeout. A thread of the library watches the device's heartbeat, and ends the calls of a
//! stopped device.

use std::ffi::c_void;
use std::ptr::NonNull;

use hotlift_mem::PAGE_SIZE;
use hotlift_methods::device::{Direction, MemberDevice, MemberFailure};
use hotlift_methods::qatzip::{LARGEST_MEMBER, SMALLEST_MEMBER};

use super::sys::{self, Library};

/// Bytes of QEMU's largest packet, the initial size of buffers.
const PACKET: usize = 128 * PAGE_SIZE;

/// Executor of a session's calls.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub(super) enum Backend {
    /// The device only, without a software fallback.
    Hardware,
    /// The library's own software if the host has no device: for tests of the library's interface and for comparisons. It is
    /// slower than the software of `hotlift-methods`. Without a device, every call uses up one of the process's thread keys.
    LibrarySoftware,
}

impl Backend {
    fn sw_backup(self) -> u8 {
        u8::from(self == Self::LibrarySoftware)
    }
}

/// Session of libqatzip, for one direction of one channel.
pub(super) struct Session {
    library: &'static Library,
    backend: Backend,
    direction: Direction,
    /// Boxed, because the library keeps its address.
    raw: Box<sys::Session>,
    input: Buffer,
    output: Buffer,
}

// SAFETY: the session and its buffers are owned by this value alone, and the library ties neither to a thread.
unsafe impl Send for Session {}

impl Session {
    /// Opens a session of that level, 1 to 9; decompression ignores the level.
    ///
    /// # Errors
    ///
    /// The library's error. With [`Backend::Hardware`], also an error if the session would run in software.
    pub(super) fn open(
        backend: Backend,
        direction: Direction,
        level: u8,
    ) -> Result<Box<dyn MemberDevice>, String> {
        let library = Library::get()?;
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
        // Both are far below 2^32.
        params.hw_buff_sz = u32::try_from(LARGEST_MEMBER).unwrap_or(u32::MAX);
        params.input_threshold = u32::try_from(SMALLEST_MEMBER).unwrap_or(u32::MAX);
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
        Ok(Box::new(Self {
            library,
            backend,
            direction,
            raw,
            input,
            output,
        }))
    }

    fn compressed_length(&mut self, bytes: u32, uncompressed_len: usize) -> Result<usize, String> {
        // SAFETY: a session that is set up.
        let room = unsafe { (self.library.qzMaxCompressedLength)(bytes, &raw mut *self.raw) };
        let room = room as usize;
        // libqatzip 1.3.1 and 2.0.0 return 9/8 of the input and a little more.
        if (uncompressed_len..=2 * uncompressed_len + PAGE_SIZE).contains(&room) {
            Ok(room)
        } else {
            Err(format!(
                "qzMaxCompressedLength returned {room} for {uncompressed_len}"
            ))
        }
    }

    fn call(&self) -> &'static str {
        match self.direction {
            Direction::Compress => "qzCompress",
            Direction::Decompress => "qzDecompress",
        }
    }
}

impl MemberDevice for Session {
    /// Returns the maximum uncompressed bytes of a member. The library's software has no limit: it makes one member per packet.
    fn largest_member(&self) -> usize {
        match self.backend {
            Backend::Hardware => LARGEST_MEMBER,
            Backend::LibrarySoftware => usize::MAX,
        }
    }

    fn run(&mut self, bytes: &[u8], uncompressed_len: usize) -> Result<&[u8], MemberFailure> {
        let length = |bytes: usize| u32::try_from(bytes).map_err(|_| "too large".to_owned());
        let mut taken = length(bytes.len())?;
        let room = match self.direction {
            Direction::Compress => {
                self.compressed_length(length(uncompressed_len)?, uncompressed_len)?
            }
            Direction::Decompress => uncompressed_len,
        };
        let mut given = length(room)?;
        self.input.hold(self.library, bytes.len())?;
        self.output.hold(self.library, room)?;
        self.input.bytes()[..bytes.len()].copy_from_slice(bytes);
        let (session, from) = (&raw mut *self.raw, self.input.ptr.as_ptr());
        let to = self.output.ptr.as_ptr();
        // SAFETY: a session that is set up, and buffers of the given lengths.
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
            sys::NO_INSTANCE => return Err(MemberFailure::Busy),
            sys::TIMEOUT => return Err(MemberFailure::NoAnswer),
            code => return Err(told(self.call(), code).into()),
        }
        // Detects a fallback to software that was not permitted.
        if self.backend == Backend::Hardware && self.raw.hw_session_stat == sys::NO_HARDWARE {
            return Err(format!("{}: {}", self.call(), with_code(sys::NO_HARDWARE)).into());
        }
        let (taken, given) = (taken as usize, given as usize);
        // A call whose output does not fit also reports success.
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

    fn abandon(self: Box<Self>) {
        std::mem::forget(self);
    }
}

impl Drop for Session {
    fn drop(&mut self) {
        // SAFETY: the session is set up, no call is under way, and it is not used again.
        unsafe { end(self.library, &raw mut *self.raw) };
    }
}

/// Ends a session. The library's return codes are ignored: there is no recovery.
///
/// # Safety
///
/// The session must be initialised, and not be used again.
unsafe fn end(library: &Library, session: *mut sys::Session) {
    // SAFETY: guaranteed by the caller; the header demands this order.
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

/// Memory allocated by the library: pinned, or common if no pinned memory is left. The library copies data from common memory.
struct Buffer {
    library: &'static Library,
    ptr: NonNull<u8>,
    len: usize,
}

impl Buffer {
    fn new(library: &'static Library, len: usize) -> Result<Self, String> {
        // Node 0, as QEMU requests: libraries before 1.3 do not know the value for any node.
        let node = 0;
        let ptr = [sys::PINNED, sys::COMMON].into_iter().find_map(|kind| {
            // SAFETY: the library is initialised.
            NonNull::new(unsafe { (library.qzMalloc)(len, node, kind) }.cast::<u8>())
        });
        let ptr = ptr.ok_or_else(|| format!("qzMalloc has no {len} bytes"))?;
        // The pages must be present before the device uses them. SAFETY: fresh memory of that length.
        unsafe { ptr.write_bytes(0, len) };
        Ok(Self { library, ptr, len })
    }

    /// Enlarges the buffer to at least `len` bytes. A buffer that grows loses its content.
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

//! Compression by ISA-L's igzip, found at run time.
//!
//! The distributions ship it as `libisal2`; building it needs autotools and an assembler. So it is
//! opened when the first encoder is made, tried on a sample, and left aside if anything is odd about
//! it. Only our own pages go through it: what a peer sends is never shown to a library that was
//! picked up at run time.

use std::alloc::{Layout, alloc_zeroed, handle_alloc_error};
use std::ffi::{CStr, c_void};
use std::mem::MaybeUninit;
use std::path::PathBuf;
use std::sync::OnceLock;

use super::isal_sys::{
    self as sys, COMP_OK, DeflateInit, FULL_FLUSH, LEVEL_2_BUFFER, SONAME, Stream,
};
use super::{Compress, NAME, trial};
use crate::MethodError;

/// The library's name in messages.
pub(super) const LIBRARY: &str = "ISA-L";

/// The opened library.
pub(super) struct Isal {
    deflate_init: DeflateInit,
    deflate: sys::Deflate,
    version: String,
}

impl Isal {
    /// The library, opened and tried once in the process's life.
    ///
    /// # Errors
    ///
    /// [`MethodError::Unavailable`] with what the loader or the trial said.
    pub(super) fn get() -> Result<&'static Self, MethodError> {
        static LOADED: OnceLock<Result<Isal, String>> = OnceLock::new();
        static TRIED: OnceLock<Result<(), String>> = OnceLock::new();
        let unavailable = |reason: &String| MethodError::Unavailable {
            method: NAME,
            library: LIBRARY,
            reason: reason.clone(),
        };
        let isal = LOADED
            .get_or_init(Self::open)
            .as_ref()
            .map_err(unavailable)?;
        TRIED
            .get_or_init(|| trial(&mut Deflate::with(isal)))
            .as_ref()
            .map_err(unavailable)?;
        Ok(isal)
    }

    fn open() -> Result<Self, String> {
        let reason = |error: libloading::Error| {
            // libloading's own text names neither file nor cause.
            let source = std::error::Error::source(&error).map(ToString::to_string);
            source.unwrap_or_else(|| error.to_string())
        };
        // SAFETY: libisal has no constructors beyond those of the C runtime.
        let library = unsafe { libloading::Library::new(SONAME) }.map_err(reason)?;
        // SAFETY: the types are those of the header for this soname.
        let (init, deflate) = unsafe {
            let init = library.get::<DeflateInit>(b"isal_deflate_init\0");
            let deflate = library.get::<sys::Deflate>(b"isal_deflate\0");
            (*init.map_err(reason)?, *deflate.map_err(reason)?)
        };
        // The functions are kept for the life of the process, so the library must be, too.
        std::mem::forget(library);
        Ok(Self {
            deflate_init: init,
            deflate,
            version: version_of(deflate as *const c_void),
        })
    }

    /// Name and version, as in "ISA-L 2.30".
    pub(super) fn name(&self) -> String {
        format!("{LIBRARY}{}", self.version)
    }
}

/// The version with a space before it, from the name of the file that holds `symbol`: the library has
/// no call that tells it, and the file `libisal.so.2.0.30` is that of release 2.30. Empty if the file
/// has no such name.
fn version_of(symbol: *const c_void) -> String {
    let mut info = MaybeUninit::<libc::Dl_info>::zeroed();
    // SAFETY: `symbol` is the address of a function of a loaded library, `info` is ours to write.
    if unsafe { libc::dladdr(symbol, info.as_mut_ptr()) } == 0 {
        return String::new();
    }
    // SAFETY: dladdr succeeded, so the structure is filled (and all-zero was valid before).
    let file = unsafe { info.assume_init() }.dli_fname;
    if file.is_null() {
        return String::new();
    }
    // SAFETY: a NUL-terminated path that lives as long as the library, which is never closed.
    let file = unsafe { CStr::from_ptr(file) };
    let path = PathBuf::from(file.to_string_lossy().into_owned());
    let real = path.canonicalize().unwrap_or(path);
    let name = real.file_name().unwrap_or_default().to_string_lossy();
    match name.strip_prefix("libisal.so.").map(|rest| rest.split('.')) {
        Some(mut parts) => match (parts.next(), parts.next_back()) {
            (Some(major), Some(minor)) => format!(" {major}.{minor}"),
            _ => String::new(),
        },
        None => String::new(),
    }
}

/// A raw deflate stream, one full flush a packet.
pub(super) struct Deflate {
    isal: &'static Isal,
    stream: Box<Stream>,
    /// Where the stream keeps the tokens of a block; it points here.
    _level_buffer: Box<[u8]>,
}

// SAFETY: the pointers inside the stream lead to its own level buffer (next_in and next_out are set
// anew at each call), and the library keeps nothing per thread.
unsafe impl Send for Deflate {}

impl Deflate {
    /// A stream of igzip's level 2.
    ///
    /// # Errors
    ///
    /// [`MethodError::Unavailable`] if the library is.
    pub(super) fn new() -> Result<Self, MethodError> {
        Ok(Self::with(Isal::get()?))
    }

    fn with(isal: &'static Isal) -> Self {
        let mut level_buffer = vec![0u8; LEVEL_2_BUFFER].into_boxed_slice();
        let mut stream = zeroed_stream();
        // SAFETY: the stream is zeroed memory of the library's layout with room to spare.
        unsafe { (isal.deflate_init)(&raw mut *stream) };
        stream.level = 2;
        stream.level_buf = level_buffer.as_mut_ptr();
        stream.level_buf_size = u32::try_from(level_buffer.len()).unwrap_or(u32::MAX);
        // Raw deflate: zlib's wrapper is two bytes, which `mod` writes, and an Adler-32 over all the
        // data for a trailer that no migration reaches.
        stream.gzip_flag = 0;
        stream.end_of_stream = 0;
        stream.flush = FULL_FLUSH;
        Self {
            isal,
            stream,
            _level_buffer: level_buffer,
        }
    }
}

impl Compress for Deflate {
    fn packet(&mut self, pages: &[u8], out: &mut Vec<u8>) -> Result<(), MethodError> {
        let failed = |reason: String| MethodError::Library {
            method: NAME,
            library: LIBRARY,
            operation: "compress a packet",
            reason,
        };
        let avail_in = u32::try_from(pages.len())
            .map_err(|_| failed(format!("packet of {} bytes is too large", pages.len())))?;
        // The stream takes a copy of the history it needs when it returns, so `pages` need not live
        // on.
        self.stream.next_in = pages.as_ptr();
        self.stream.avail_in = avail_in;
        // Pages that do not shrink are stored, at 5 bytes in 64 KiB; the rest is for small packets.
        out.reserve(pages.len() + pages.len() / 64 + 1024);
        loop {
            let free = u32::try_from(out.spare_capacity_mut().len()).unwrap_or(u32::MAX);
            self.stream.next_out = out.spare_capacity_mut().as_mut_ptr().cast();
            self.stream.avail_out = free;
            // SAFETY: the stream was initialised by the library and is ours alone (`&mut self`);
            // next_in and next_out are valid for avail_in and avail_out bytes.
            let code = unsafe { (self.isal.deflate)(&raw mut *self.stream) };
            let written = free.saturating_sub(self.stream.avail_out);
            // SAFETY: the library has written that many bytes of the spare capacity.
            unsafe { out.set_len(out.len() + written as usize) };
            if code != COMP_OK {
                return Err(failed(format!("code {code}")));
            }
            // Output space left over is the library's sign that the flush is complete.
            if self.stream.avail_out > 0 {
                break;
            }
            out.reserve(pages.len() / 4 + 1024);
        }
        if self.stream.avail_in > 0 {
            return Err(failed(format!("{} bytes not read", self.stream.avail_in)));
        }
        Ok(())
    }
}

fn zeroed_stream() -> Box<Stream> {
    let layout = Layout::new::<Stream>();
    // SAFETY: the layout has a size. All-zero bytes are a valid `Stream`: integers and raw pointers.
    // The box is made of memory of its own layout. (By a `Box::new` the 150 KB would go over the
    // stack.)
    unsafe {
        let stream = alloc_zeroed(layout).cast::<Stream>();
        if stream.is_null() {
            handle_alloc_error(layout);
        }
        Box::from_raw(stream)
    }
}

//! igzip, the deflate compressor of Intel's ISA-L, opened at run time.
//!
//! The library is not linked: a build of our own would need autotools and an assembler. Distributions ship it as `libisal2`.
//! The first encoder opens it, and each method tests it on a sample before use. A failed test disables it for the process. The
//! library only compresses: a peer's data never reaches a library that was found at run time.

mod stateless;
mod sys;

use std::alloc::{Layout, alloc_zeroed, handle_alloc_error};
use std::ffi::{CStr, c_void};
use std::mem::MaybeUninit;
use std::path::PathBuf;

pub(crate) use stateless::Stateless;
pub(crate) use sys::{COMP_OK, FULL_FLUSH, Isal, LEVEL_2_BUFFER, Stream};

use crate::MethodError;

/// The library's name in messages.
pub(crate) const LIBRARY: &str = "ISA-L";

impl Isal {
    /// Returns the library. `method` is the method's name for the error.
    ///
    /// # Errors
    ///
    /// [`MethodError::Unavailable`] with the loader's message.
    pub(crate) fn for_method(method: &'static str) -> Result<&'static Self, MethodError> {
        Self::get().map_err(|reason| unavailable(method, &reason))
    }

    /// Returns name and version, as in "ISA-L 2.30".
    pub(crate) fn name(&self) -> String {
        format!(
            "{LIBRARY}{}",
            version_of(self.isal_deflate as *const c_void)
        )
    }
}

/// Returns the error that the method called `method` cannot use the library, with the reason.
pub(crate) fn unavailable(method: &'static str, reason: &str) -> MethodError {
    MethodError::Unavailable {
        method,
        library: LIBRARY,
        reason: reason.to_owned(),
    }
}

/// Returns a space and the library's version, as in " 2.30"; an empty string if it is unknown. The library has no call for its
/// version. So the version comes from the name of the file that contains `symbol`: `libisal.so.2.0.30` is release 2.30.
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

/// Returns a stream for `isal_deflate_init` or `isal_deflate_stateless_init`.
pub(crate) fn zeroed_stream() -> Box<Stream> {
    // SAFETY: all-zero bytes are a valid `Stream`: integers and raw pointers.
    unsafe { zeroed() }
}

/// Returns a zeroed box. (With `Box::new` the 150 KB of a stream would be copied over the stack.)
///
/// # Safety
///
/// All-zero bytes must be a valid `T`, and `T` must not be zero-sized.
unsafe fn zeroed<T>() -> Box<T> {
    let layout = Layout::new::<T>();
    // SAFETY: the layout has a size; the box is made of memory of its own layout, and zeroes are a
    // valid value, guaranteed by the caller.
    unsafe {
        let value = alloc_zeroed(layout).cast::<T>();
        if value.is_null() {
            handle_alloc_error(layout);
        }
        Box::from_raw(value)
    }
}

//! libwd_comp, found at run time.

use std::sync::{Arc, OnceLock};

use super::session::Session;
use super::sys;
use crate::pagewise::{self, Wrapper};
use crate::{Hardware, library};

/// What does `uadk` where there is one.
pub(crate) static HARDWARE: Hardware = Hardware {
    device: "HiSilicon ZIP",
    library: "libwd_comp.so.2",
    variable: "HOTLIFT_LIBWD",
    probe,
};

/// The opened library, with the device in use.
pub(super) struct Library {
    pub(super) alloc_session: sys::AllocSession,
    pub(super) free_session: sys::FreeSession,
    pub(super) do_sync: sys::DoSync,
}

impl Library {
    /// The library, opened once in the process's life. The device's contexts stay with the process:
    /// QEMU gives them up at the end of each channel, which takes them from the others.
    ///
    /// # Errors
    ///
    /// What the loader or the library said.
    pub(super) fn get() -> Result<&'static Self, String> {
        static LOADED: OnceLock<Result<Library, String>> = OnceLock::new();
        LOADED
            .get_or_init(Self::open)
            .as_ref()
            .map_err(Clone::clone)
    }

    fn open() -> Result<Self, String> {
        // SAFETY: libwd_comp's constructors open its drivers; who names another file vouches for it.
        let library = unsafe { library::open(HARDWARE.library, Some(HARDWARE.variable)) }?;
        let mut algorithm = *b"zlib\0";
        // SAFETY: the types are those of the headers for this soname; the algorithm ends with a NUL and
        // is not kept.
        let (opened, code) = unsafe {
            let init: sys::Init = library.function(b"wd_comp_init2_\0")?;
            let opened = Self {
                alloc_session: library.function(b"wd_comp_alloc_sess\0")?,
                free_session: library.function(b"wd_comp_free_sess\0")?,
                do_sync: library.function(b"wd_do_comp_sync\0")?,
            };
            let code = init(
                algorithm.as_mut_ptr().cast(),
                sys::SCHED_ROUND_ROBIN,
                sys::TASK_HARDWARE,
                std::ptr::null_mut(),
            );
            (opened, code)
        };
        // Even if there is no device: the library's threads and handlers may be there already.
        library.keep();
        match code {
            0 | sys::EXISTS => Ok(opened),
            sys::NO_DEVICE => Err("libwd_comp: no device for zlib".to_owned()),
            code => Err(format!("libwd_comp: no device for zlib: code {code}")),
        }
    }
}

/// A page through a session and back, once in the process's life.
fn probe() -> Result<Arc<str>, Arc<str>> {
    static TRIED: OnceLock<Result<Arc<str>, Arc<str>>> = OnceLock::new();
    let tried = TRIED.get_or_init(|| {
        Library::get()?;
        pagewise::trial(Wrapper::Zlib, Session::open)
            .map_err(|reason| format!("libwd_comp: {reason}"))?;
        // The library does not tell its version.
        let file = library::file(HARDWARE.library, Some(HARDWARE.variable));
        Ok(file.to_string_lossy().into())
    });
    tried.clone()
}

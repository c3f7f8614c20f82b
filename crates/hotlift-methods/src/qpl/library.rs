//! libqpl, found at run time.

use std::ffi::CStr;
use std::sync::{Arc, OnceLock};

use super::jobs::Pool;
use super::{Path, sys};
use crate::pagewise::{self, Wrapper};
use crate::{Hardware, library};

/// What does `qpl` where there is one.
pub(crate) static HARDWARE: Hardware = Hardware {
    device: "Intel IAA",
    library: "libqpl.so.1",
    variable: "HOTLIFT_LIBQPL",
    probe,
};

/// The opened library.
pub(super) struct Library {
    pub(super) get_job_size: sys::GetJobSize,
    pub(super) init_job: sys::InitJob,
    pub(super) submit_job: sys::RunJob,
    pub(super) check_job: sys::RunJob,
    pub(super) execute_job: sys::RunJob,
    pub(super) fini_job: sys::RunJob,
    /// Name and version, as in "libqpl 1.9.0".
    name: Arc<str>,
}

impl Library {
    /// The library, opened once in the process's life.
    ///
    /// # Errors
    ///
    /// What the loader said.
    pub(super) fn get() -> Result<&'static Self, String> {
        static LOADED: OnceLock<Result<Library, String>> = OnceLock::new();
        LOADED
            .get_or_init(Self::open)
            .as_ref()
            .map_err(Clone::clone)
    }

    fn open() -> Result<Self, String> {
        // SAFETY: libqpl's constructors fill tables of its own; who names another file vouches for it.
        let library = unsafe { library::open(HARDWARE.library, Some(HARDWARE.variable)) }?;
        // SAFETY: the types are those of the header for this soname. The version is a constant that
        // ends with a NUL.
        let opened = unsafe {
            let get_version: sys::GetVersion = library.function(b"qpl_get_library_version\0")?;
            let version = get_version();
            let version = match version.is_null() {
                true => c"of no version",
                false => CStr::from_ptr(version),
            };
            Self {
                get_job_size: library.function(b"qpl_get_job_size\0")?,
                init_job: library.function(b"qpl_init_job\0")?,
                submit_job: library.function(b"qpl_submit_job\0")?,
                check_job: library.function(b"qpl_check_job\0")?,
                execute_job: library.function(b"qpl_execute_job\0")?,
                fini_job: library.function(b"qpl_fini_job\0")?,
                name: format!("libqpl {}", version.to_string_lossy()).into(),
            }
        };
        library.keep();
        Ok(opened)
    }

    pub(super) fn name(&self) -> Arc<str> {
        Arc::clone(&self.name)
    }
}

/// A page through a hardware job and back, once in the process's life.
fn probe() -> Result<Arc<str>, Arc<str>> {
    static TRIED: OnceLock<Result<Arc<str>, Arc<str>>> = OnceLock::new();
    let tried = TRIED.get_or_init(|| {
        let library = Library::get()?;
        let trial = pagewise::trial(Wrapper::Raw, |direction| {
            Pool::open(Path::Hardware, direction)
        });
        trial.map_err(|reason| format!("{}: {reason}", library.name))?;
        Ok(library.name())
    });
    tried.clone()
}

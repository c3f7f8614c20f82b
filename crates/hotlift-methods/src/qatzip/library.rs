//! libqatzip, found at run time.

use std::sync::{Arc, OnceLock};

use super::members;
use super::session::{Backend, Direction, Session};
use super::sys;
use crate::{Hardware, library};

/// What serves the method beside the CPU.
pub(crate) static HARDWARE: Hardware = Hardware {
    device: "Intel QAT",
    library: sys::SONAME,
    variable: "HOTLIFT_LIBQATZIP",
    probe,
};

/// The opened library.
pub(super) struct Library {
    pub(super) init: sys::Init,
    pub(super) get_defaults: sys::GetDefaults,
    pub(super) setup: sys::Setup,
    pub(super) max_compressed_length: sys::MaxCompressedLength,
    pub(super) compress: sys::Compress,
    pub(super) decompress: sys::Decompress,
    pub(super) malloc: sys::Malloc,
    pub(super) free: sys::Free,
    pub(super) teardown: sys::End,
    pub(super) close: sys::End,
}

impl Library {
    /// The library, opened once in the process's life; or what the loader said.
    pub(super) fn get() -> Result<&'static Self, Arc<str>> {
        static LOADED: OnceLock<Result<Library, Arc<str>>> = OnceLock::new();
        let loaded = LOADED.get_or_init(|| Self::open().map_err(Arc::from));
        loaded.as_ref().map_err(Arc::clone)
    }

    fn open() -> Result<Self, String> {
        // SAFETY: libqatzip has no constructors beyond those of the C runtime.
        let library = unsafe { library::open(HARDWARE.library, Some(HARDWARE.variable)) }?;
        // SAFETY: the types are those of the header for this soname.
        let opened = unsafe {
            Self {
                init: library.function(b"qzInit\0")?,
                get_defaults: library.function(b"qzGetDefaultsDeflate\0")?,
                setup: library.function(b"qzSetupSessionDeflate\0")?,
                max_compressed_length: library.function(b"qzMaxCompressedLength\0")?,
                compress: library.function(b"qzCompress\0")?,
                decompress: library.function(b"qzDecompress\0")?,
                malloc: library.function(b"qzMalloc\0")?,
                free: library.function(b"qzFree\0")?,
                teardown: library.function(b"qzTeardownSession\0")?,
                close: library.function(b"qzClose\0")?,
            }
        };
        library.keep();
        Ok(opened)
    }
}

/// Tries the hardware, once in the process's life: without one the library's second `qzInit` says
/// that all is well.
pub(super) fn probe() -> Result<Arc<str>, Arc<str>> {
    static TRIED: OnceLock<Result<Arc<str>, Arc<str>>> = OnceLock::new();
    TRIED
        .get_or_init(|| match trial() {
            Ok(()) => {
                // The library does not tell its version.
                let file = library::file(HARDWARE.library, Some(HARDWARE.variable));
                Ok(file.to_string_lossy().into())
            }
            Err(reason) => Err(reason.into()),
        })
        .clone()
}

/// Two members and back.
fn trial() -> Result<(), String> {
    let library = Library::get().map_err(|reason| reason.to_string())?;
    let sample: Vec<u8> = (0..members::LARGEST + members::LARGEST / 2)
        .map(|i| ((i * i) >> 7).to_le_bytes()[0])
        .collect();
    let run = |direction, bytes: &[u8]| -> Result<Vec<u8>, String> {
        let mut session = Session::new(library, Backend::Hardware, direction, 1)?;
        let output = session.run(bytes, sample.len()).map(<[u8]>::to_vec);
        output.map_err(|failure| {
            // It may have work under way.
            session.leak();
            failure.to_string()
        })
    };
    let payload = run(Direction::Compress, &sample)?;
    if members::count(&payload, sample.len(), members::LARGEST).is_none() {
        return Err("a trial gave no members of what went in".to_owned());
    }
    if run(Direction::Decompress, &payload)? != sample {
        return Err("a trial did not give back what went in".to_owned());
    }
    Ok(())
}

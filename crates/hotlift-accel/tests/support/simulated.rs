//! Opens the simulated accelerators: the library of `hotlift-simulated` instead of the vendors' libraries.
//!
//! Cargo builds this library because the package is a dependency of the tests, and puts it into the same folder.
#![allow(dead_code)]

use std::ffi::{CString, c_char, c_int};
use std::path::PathBuf;
use std::sync::{Mutex, MutexGuard, PoisonError};

use libloading::Library;

/// Environment variables that name a vendor's library.
pub const VARIABLES: [&str; 3] = ["HOTLIFT_LIBQPL", "HOTLIFT_LIBQATZIP", "HOTLIFT_LIBWD"];

/// Returns the library's file.
pub fn library() -> PathBuf {
    let test = std::env::current_exe().expect("the test's own file");
    let file = test.with_file_name("libhotlift_simulated.so");
    assert!(file.exists(), "{} was not built", file.display());
    file
}

/// Exclusive access to the process's accelerators: their behaviour is global in the process.
pub struct Simulated {
    library: Library,
    _alone: MutexGuard<'static, ()>,
}

impl Simulated {
    /// Returns the accelerators of this process, without faults. The first call must precede any use of a library by a method,
    /// so every test of a file with this call begins with it.
    pub fn take() -> Self {
        static ALONE: Mutex<()> = Mutex::new(());
        let alone = ALONE.lock().unwrap_or_else(PoisonError::into_inner);
        let file = library();
        for variable in VARIABLES {
            // SAFETY: tests of the file wait for each other here, and their harness reads no variable by C while tests run.
            unsafe { std::env::set_var(variable, &file) };
        }
        // SAFETY: the library has no constructors.
        let library = unsafe { Library::new(&file) }.expect("the simulated library");
        let simulated = Self {
            library,
            _alone: alone,
        };
        simulated.behave("");
        simulated
    }

    /// Sets the devices' behaviour, see `hotlift_simulated::behaviour`, and resets all counts.
    pub fn behave(&self, text: &str) {
        let text = CString::new(text).expect("no NUL");
        // SAFETY: the type is the function's.
        let code = unsafe {
            let simulate = self
                .library
                .get::<unsafe extern "C" fn(*const c_char) -> c_int>(b"hotlift_simulate\0")
                .expect("hotlift_simulate");
            simulate(text.as_ptr())
        };
        assert_eq!(code, 0, "{text:?} is no behaviour");
    }

    /// Returns the jobs that the devices have accepted since.
    pub fn jobs(&self) -> u64 {
        // SAFETY: the type is the function's.
        unsafe {
            let jobs = self
                .library
                .get::<unsafe extern "C" fn() -> u64>(b"hotlift_simulated_jobs\0")
                .expect("hotlift_simulated_jobs");
            jobs()
        }
    }
}

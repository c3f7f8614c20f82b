//! Whether this process may take settings from its environment.
//!
//! The kernel marks a process that runs with more rights than who has started it (file capabilities,
//! set-user-ID) by `AT_SECURE`. Its environment is a stranger's word: a path in it would run the
//! stranger's code with those rights. The dynamic loader leaves out `LD_LIBRARY_PATH` then; everything of
//! Hotlift that reads a variable asks here.

use std::ffi::OsString;

/// True unless the process has more rights than who has started it.
#[must_use]
pub fn is_trusted() -> bool {
    // SAFETY: reads the auxiliary vector, which the kernel has written before the process began. Linux
    // has the entry since 2.6; 0 for none is "not marked".
    let secure = unsafe { libc::getauxval(libc::AT_SECURE) };
    secure == 0
}

/// The environment variable; `None` if it is not set, is empty, or may not be trusted.
#[must_use]
pub fn variable(name: &str) -> Option<OsString> {
    let value = is_trusted().then(|| std::env::var_os(name)).flatten();
    value.filter(|value| !value.is_empty())
}

//! Permission to read settings from the environment.
//!
//! The kernel sets `AT_SECURE` if a process has more rights than the user who started it (file capabilities, set-user-ID). In
//! this case the environment is untrusted: a path in it could run foreign code with those rights. The dynamic loader then
//! ignores `LD_LIBRARY_PATH`, and this module ignores all variables. All of Hotlift's reads of environment variables use this
//! module.

use std::ffi::OsString;

/// Returns true unless the process has more rights than the user who started it.
#[must_use]
pub fn is_trusted() -> bool {
    // SAFETY: reads the auxiliary vector, which the kernel writes before the process begins. Linux has the entry since 2.6; 0
    // means "not marked".
    let secure = unsafe { libc::getauxval(libc::AT_SECURE) };
    secure == 0
}

/// Returns the value of an environment variable; `None` if it is unset or empty, or if the environment is untrusted.
#[must_use]
pub fn variable(name: &str) -> Option<OsString> {
    let value = is_trusted().then(|| std::env::var_os(name)).flatten();
    value.filter(|value| !value.is_empty())
}

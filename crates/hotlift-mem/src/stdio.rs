//! State of standard output at the start of the process. Rust's runtime replaces a closed one by /dev/null before `main`, so
//! writes succeed, and the output is lost.

use std::sync::atomic::{AtomicBool, Ordering};

static STDOUT_WAS_CLOSED: AtomicBool = AtomicBool::new(false);

// SAFETY: The C library calls the functions of this section once each, before `main` and Rust's runtime. `check_stdout` has the
// C ABI, reads none of the arguments that it may get, and does not use that runtime.
#[used]
#[unsafe(link_section = ".init_array")]
static CHECK_STDOUT: extern "C" fn() = check_stdout;

extern "C" fn check_stdout() {
    // SAFETY: F_GETFD takes no pointer, and changes nothing.
    let flags = unsafe { libc::fcntl(libc::STDOUT_FILENO, libc::F_GETFD) };
    // EBADF is its only error.
    STDOUT_WAS_CLOSED.store(flags == -1, Ordering::Relaxed);
}

/// Returns true if the process was started with its standard output closed.
#[must_use]
pub fn stdout_was_closed() -> bool {
    STDOUT_WAS_CLOSED.load(Ordering::Relaxed)
}

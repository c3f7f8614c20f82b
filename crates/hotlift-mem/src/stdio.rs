//! Standard output as the process got it. Rust's runtime opens /dev/null in the place of a closed one before `main`, so that a
//! write to it succeeds, and the output is lost.

use std::sync::atomic::{AtomicBool, Ordering};

static STDOUT_WAS_CLOSED: AtomicBool = AtomicBool::new(false);

// SAFETY: The C library calls the functions of this section once each, before `main` and Rust's runtime. `look` is one of C's,
// reads none of the arguments that it may get, and needs nothing of that runtime.
#[used]
#[unsafe(link_section = ".init_array")]
static LOOK: extern "C" fn() = look;

extern "C" fn look() {
    // SAFETY: F_GETFD takes no pointer, and changes nothing.
    let flags = unsafe { libc::fcntl(libc::STDOUT_FILENO, libc::F_GETFD) };
    // EBADF is its only error.
    STDOUT_WAS_CLOSED.store(flags == -1, Ordering::Relaxed);
}

/// Returns whether the process was started with its standard output closed.
#[must_use]
pub fn stdout_was_closed() -> bool {
    STDOUT_WAS_CLOSED.load(Ordering::Relaxed)
}

//! Waits for descriptors, with a deadline.

use std::io;
use std::os::fd::{BorrowedFd, OwnedFd};
use std::process::Child;
use std::time::Instant;

use rustix::event::{PollFd, PollFlags, Timespec, poll};
use rustix::io::Errno;
use rustix::process::{Pid, PidfdFlags, pidfd_open};

/// Polls `fds` until one of them has an event, or until `deadline`; waits forever without a deadline. Returns the number of
/// ready descriptors. A signal does not end the wait.
///
/// # Errors
/// The kernel has no memory for the call.
pub fn poll_until(fds: &mut [PollFd<'_>], deadline: Option<Instant>) -> io::Result<usize> {
    loop {
        let left = deadline.map(|end| end.saturating_duration_since(Instant::now()));
        // A timeout out of range is treated as none.
        let left = left.and_then(|left| Timespec::try_from(left).ok());
        match poll(fds, left.as_ref()) {
            Err(Errno::INTR) => {}
            polled => return Ok(polled?),
        }
    }
}

/// Waits until one of `fds` is readable or closed by its peer, or until `deadline`; waits forever without a deadline. Returns
/// true if the first descriptor of `fds` is ready.
pub fn wait_readable(fds: &[BorrowedFd<'_>], deadline: Option<Instant>) -> bool {
    let polled = |fd: &_| PollFd::from_borrowed_fd(*fd, PollFlags::IN);
    let mut polled: Vec<_> = fds.iter().map(polled).collect();
    // An error means that the kernel has no memory for the call: the caller then checks its condition itself.
    let waited = poll_until(&mut polled, deadline).is_ok();
    waited && polled.first().is_some_and(|fd| !fd.revents().is_empty())
}

/// Returns true if `fd` is readable or closed by its peer.
pub fn is_readable(fd: BorrowedFd<'_>) -> bool {
    wait_readable(&[fd], Some(Instant::now()))
}

/// Returns a descriptor that is readable once `child` has ended, even if it ended before.
///
/// # Errors
/// The system's error, also if the child's end was already collected (`wait`).
pub fn end_of_process(child: &Child) -> io::Result<OwnedFd> {
    Ok(pidfd_open(Pid::from_child(child), PidfdFlags::empty())?)
}

#[cfg(test)]
mod tests {
    use std::io::pipe;
    use std::os::fd::AsFd;
    use std::thread;

    use super::*;

    #[test]
    fn a_wait_ends_at_its_deadline_or_with_the_first_ready_descriptor() {
        assert!(!wait_readable(&[], Some(Instant::now())));
        let ((first, first_end), (other, other_end)) = (pipe().unwrap(), pipe().unwrap());
        let fds = [first.as_fd(), other.as_fd()];
        assert!(!wait_readable(&fds, Some(Instant::now())));
        thread::scope(|scope| {
            let waits = scope.spawn(|| wait_readable(&fds, None));
            drop(other_end);
            assert!(!waits.join().unwrap());
        });
        assert!(is_readable(other.as_fd()) && !is_readable(first.as_fd()));
        drop(first_end);
        assert!(wait_readable(&fds, None));
    }
}

//! A wait for descriptors, with a deadline.

use std::os::fd::BorrowedFd;
use std::time::Instant;

use rustix::event::{PollFd, PollFlags, Timespec, poll};
use rustix::io::Errno;

/// Waits until one of `fds` is readable or has ended, or `deadline` is over; without a deadline for as long as that takes.
/// Returns true if the first of them is.
pub fn wait_readable(fds: &[BorrowedFd<'_>], deadline: Option<Instant>) -> bool {
    let polled = |fd: &_| PollFd::from_borrowed_fd(*fd, PollFlags::IN);
    let mut polled: Vec<_> = fds.iter().map(polled).collect();
    loop {
        let left = deadline.map(|end| end.saturating_duration_since(Instant::now()));
        // A time that does not fit is as good as none.
        let left = left.and_then(|left| Timespec::try_from(left).ok());
        match poll(&mut polled, left.as_ref()) {
            Err(Errno::INTR) => {}
            // The kernel has no memory for it: the caller checks what it waits for.
            Err(_) => return false,
            Ok(_) => return polled.first().is_some_and(|fd| !fd.revents().is_empty()),
        }
    }
}

/// Returns true if `fd` is readable or has ended.
pub fn is_readable(fd: BorrowedFd<'_>) -> bool {
    wait_readable(&[fd], Some(Instant::now()))
}

#[cfg(test)]
mod tests {
    use std::io::pipe;
    use std::os::fd::AsFd;
    use std::thread;

    use super::*;

    #[test]
    fn a_wait_ends_at_its_deadline_or_with_a_descriptor_and_tells_the_first() {
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

//! Guest pages to and from blocking stream sockets, without a copy in this process.

use std::io;
use std::mem;
use std::os::fd::{AsRawFd, BorrowedFd};
use std::ptr;

use libc::{c_int, iovec, msghdr};

use crate::GuestRun;
pub use crate::splice::Splicer;

/// Most segments that one system call takes (`IOV_MAX`, the same on every Linux).
pub(crate) const IOV_MAX: usize = 1024;

/// The segment array of the calls below, kept from call to call so that none of them allocates.
#[derive(Debug, Default)]
pub struct IoScratch {
    segments: Vec<iovec>,
}

// SAFETY: the addresses are used only inside the call that put them there.
unsafe impl Send for IoScratch {}

impl IoScratch {
    /// An empty scratch; it grows to the largest call made with it.
    pub fn new() -> Self {
        Self::default()
    }

    /// The segments of `parts` and then `runs`, neighbours in memory joined and empty ones left out.
    pub(crate) fn fill(&mut self, parts: &[&[u8]], runs: &[GuestRun<'_>]) -> &mut [iovec] {
        self.segments.clear();
        let parts = parts.iter().map(|p| (p.as_ptr().cast_mut(), p.len()));
        let runs = runs.iter().map(|r| (r.as_ptr(), r.len()));
        for (start, len) in parts.chain(runs).filter(|(_, len)| *len != 0) {
            match self.segments.last_mut() {
                Some(last) if last.iov_base.addr() + last.iov_len == start.addr() => {
                    last.iov_len += len;
                }
                _ => self.segments.push(iovec {
                    iov_base: start.cast(),
                    iov_len: len,
                }),
            }
        }
        &mut self.segments
    }
}

/// Sends `head` and then `runs`, all of it. A peer that is gone is an error (`BrokenPipe`,
/// `ConnectionReset`), never a signal.
///
/// The socket must be blocking; a send timeout set on it ends in `WouldBlock`, and the stream is then
/// cut at an unknown place.
pub fn send(
    fd: BorrowedFd<'_>,
    head: &[u8],
    runs: &[GuestRun<'_>],
    scratch: &mut IoScratch,
) -> io::Result<()> {
    send_segments(fd, scratch.fill(&[head], runs), 0)
}

/// Sends the `parts` one after the other, as [`send`] does: a packet's header and its compressed
/// pages.
pub fn send_parts(fd: BorrowedFd<'_>, parts: &[&[u8]], scratch: &mut IoScratch) -> io::Result<()> {
    send_segments(fd, scratch.fill(parts, &[]), 0)
}

/// Fills `runs` from the socket, all of them. The peer's end inside is `UnexpectedEof`.
///
/// The socket must be blocking; a receive timeout set on it ends in `WouldBlock`.
pub fn recv(fd: BorrowedFd<'_>, runs: &[GuestRun<'_>], scratch: &mut IoScratch) -> io::Result<()> {
    let mut left = scratch.fill(&[], runs);
    while !left.is_empty() {
        let (mut message, _) = message_of(left);
        // SAFETY: the segments are guest memory, mapped writable while `runs` borrow it.
        let got = unsafe { libc::recvmsg(fd.as_raw_fd(), &mut message, libc::MSG_WAITALL) };
        match check(got)? {
            None => {}
            Some(0) => return Err(io::ErrorKind::UnexpectedEof.into()),
            Some(n) => left = advance(left, n),
        }
    }
    Ok(())
}

/// Sends all of `left` with `sendmsg` and `flags`.
pub(crate) fn send_segments(
    fd: BorrowedFd<'_>,
    mut left: &mut [iovec],
    flags: c_int,
) -> io::Result<()> {
    while !left.is_empty() {
        let (message, all) = message_of(left);
        let more = if all { flags } else { libc::MSG_MORE };
        // SAFETY: the segments are slices and guest memory, mapped and borrowed by the caller.
        let sent = unsafe { libc::sendmsg(fd.as_raw_fd(), &message, libc::MSG_NOSIGNAL | more) };
        match check(sent)? {
            None => {}
            Some(0) => return Err(io::ErrorKind::WriteZero.into()),
            Some(n) => left = advance(left, n),
        }
    }
    Ok(())
}

/// A message of as many segments as one call takes, and whether these are all.
fn message_of(segments: &mut [iovec]) -> (msghdr, bool) {
    let count = segments.len().min(IOV_MAX);
    // SAFETY: a message header of zeros has no name, no control data and no segments.
    let mut message: msghdr = unsafe { mem::zeroed() };
    message.msg_name = ptr::null_mut();
    message.msg_iov = segments.as_mut_ptr();
    message.msg_iovlen = count;
    (message, count == segments.len())
}

/// Bytes that a call moved; `None` if a signal came first.
pub(crate) fn check(result: isize) -> io::Result<Option<usize>> {
    match usize::try_from(result) {
        Ok(n) => Ok(Some(n)),
        Err(_) => match io::Error::last_os_error() {
            e if e.kind() == io::ErrorKind::Interrupted => Ok(None),
            e => Err(e),
        },
    }
}

/// The segments without their first `n` bytes.
pub(crate) fn advance(mut segments: &mut [iovec], mut n: usize) -> &mut [iovec] {
    while let Some(first) = segments.first_mut() {
        if n < first.iov_len {
            first.iov_base = first.iov_base.cast::<u8>().wrapping_add(n).cast();
            first.iov_len -= n;
            break;
        }
        n -= first.iov_len;
        segments = &mut segments[1..];
    }
    segments
}

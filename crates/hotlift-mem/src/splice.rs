//! Sends guest pages to a socket by reference: not even the kernel copies them on the sender's side.
//!
//! The sender's CPU seconds per GiB over loopback, in packets of 512 KiB, copied and by reference:
//!
//! | pages | TCP | UNIX socket |
//! |---|---|---|
//! | adjacent huge pages | 0.25, 0.04 | 0.13, 0.04 |
//! | scattered 4 KiB pages | 0.29, 0.10 | 0.16, 0.07 |
//!
//! The receiver needs 0.04 to 0.1 more, as the sender no longer loads the pages into the cache. The example `memory_speed
//! sockets` repeats this measurement.

use std::io;
use std::os::fd::{AsRawFd, BorrowedFd, OwnedFd};

use libc::iovec;
use rustix::io::retry_on_intr;
use rustix::pipe::{PipeFlags, SpliceFlags, fcntl_setpipe_size, pipe_with, splice};

use crate::GuestRun;
use crate::sock::{IOV_MAX, IoScratch, advance, check, send_segments};

/// Capacity of a splicer's pipe in bytes: the kernel's maximum for an unprivileged process (its default for
/// `/proc/sys/fs/pipe-max-size`). The pipe has room for two packets of the usual size.
const PIPE_SIZE: usize = 1 << 20;

/// Sends guest pages through a pipe of references (`vmsplice`, then `splice`), for the rounds of an uncompressed migration in
/// which the guest runs.
///
/// The socket's queue refers to the guest's own pages until the peer has read them, and the peer reads their content at *that*
/// time. So a page must either stay unchanged until the peer has answered, or be sent again after a change. A page that the
/// guest writes after the splice is dirty. Its next copy comes later in the same stream, or in another stream after a sync
/// point. A checksum of the pages cannot be sent with them.
///
/// A splice to a closed socket raises SIGPIPE: the process must ignore it, which is the default of Rust programs.
#[derive(Debug)]
pub struct Splicer {
    /// `None` after an error, since the pipe may then contain a part of a packet.
    pipe: Option<Pipe>,
    scratch: IoScratch,
}

#[derive(Debug)]
pub(crate) struct Pipe {
    from: OwnedFd,
    pub(crate) into: OwnedFd,
}

impl Pipe {
    pub(crate) fn new() -> io::Result<Self> {
        let (from, into) = pipe_with(PipeFlags::CLOEXEC)?;
        // Fails if the user's pipes are too large in total: the pipe then keeps its size.
        let _ = fcntl_setpipe_size(&into, PIPE_SIZE);
        Ok(Self { from, into })
    }

    /// Moves the `held` bytes of the pipe to a socket.
    pub(crate) fn empty(&self, to: BorrowedFd<'_>, mut held: usize, more: bool) -> io::Result<()> {
        // If the last piece had this flag, TCP would delay it and wait for more data.
        let flags = if more {
            SpliceFlags::MORE
        } else {
            SpliceFlags::empty()
        };
        while held > 0 {
            match retry_on_intr(|| splice(&self.from, None, to, None, held, flags))? {
                0 => return Err(io::ErrorKind::WriteZero.into()),
                sent => held -= sent,
            }
        }
        Ok(())
    }
}

impl Splicer {
    /// Creates a splicer with its own pipe.
    pub fn new() -> io::Result<Self> {
        Ok(Self {
            pipe: Some(Pipe::new()?),
            scratch: IoScratch::new(),
        })
    }

    /// Sends a copy of `head`, and then all `runs` by reference. Otherwise as [`sock::send`].
    ///
    /// [`sock::send`]: crate::sock::send
    pub fn send(
        &mut self,
        fd: BorrowedFd<'_>,
        head: &[u8],
        runs: &[GuestRun<'_>],
    ) -> io::Result<()> {
        let pipe = match self.pipe.take() {
            Some(pipe) => pipe,
            None => Pipe::new()?,
        };
        let pages_follow = runs.iter().any(|run| !run.is_empty());
        // Without this flag, TCP would send the head as a packet of its own.
        let flags = if pages_follow { libc::MSG_MORE } else { 0 };
        send_segments(fd, self.scratch.fill(&[head], &[]), flags)?;
        splice_segments(fd, &pipe, self.scratch.fill(&[], runs))?;
        self.pipe = Some(pipe);
        Ok(())
    }
}

/// Sends all of `left`, at most the pipe's capacity at a time.
fn splice_segments(fd: BorrowedFd<'_>, pipe: &Pipe, mut left: &mut [iovec]) -> io::Result<()> {
    while !left.is_empty() {
        // No other thread empties the pipe: waiting for space would never end. Pages are not gifted, as the guest continues to
        // use them.
        // SAFETY: the segments are guest memory, mapped and borrowed by the caller; the kernel only reads them, and keeps the
        // pages themselves as long as it refers to them.
        let referred = unsafe {
            libc::vmsplice(
                pipe.into.as_raw_fd(),
                left.as_ptr(),
                left.len().min(IOV_MAX),
                libc::SPLICE_F_NONBLOCK,
            )
        };
        let Some(held) = check(referred)? else {
            continue;
        };
        left = advance(left, held);
        pipe.empty(fd, held, !left.is_empty())?;
    }
    Ok(())
}

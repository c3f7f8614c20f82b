//! Guest pages to a socket without copying them.

use std::io;
use std::os::fd::BorrowedFd;

use crate::GuestRun;
use crate::sock::{self, IoScratch};

/// Sends guest pages by reference.
#[derive(Debug)]
pub struct Splicer {
    scratch: IoScratch,
}

impl Splicer {
    /// A splicer with a pipe of its own.
    pub fn new() -> io::Result<Self> {
        Ok(Self {
            scratch: IoScratch::new(),
        })
    }

    /// Sends `head` and then `runs`.
    pub fn send(
        &mut self,
        fd: BorrowedFd<'_>,
        head: &[u8],
        runs: &[GuestRun<'_>],
    ) -> io::Result<()> {
        sock::send(fd, head, runs, &mut self.scratch)
    }
}

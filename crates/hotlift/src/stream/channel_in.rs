//! Where a channel's bytes come from: a socket, or a save file.

use std::io;
use std::net::Shutdown;
use std::time::Duration;

use hotlift_mem::GuestRun;
use hotlift_mem::sock::IoScratch;

use crate::ends::file::FileChannel;
use crate::transport::Stream;

/// The incoming end of a channel. One thread reads it; any thread may end it.
pub(crate) trait ChannelIn: Send + Sync {
    /// Reads what there is into `buffer`, waiting for at least a byte; 0 at the end of the channel.
    fn read_some(&self, buffer: &mut [u8]) -> io::Result<usize>;

    /// Fills `runs`, all of them. The channel's end inside is `UnexpectedEof`.
    fn read_pages(&self, runs: &[GuestRun<'_>], scratch: &mut IoScratch) -> io::Result<()>;

    /// Waits until there is something to read, or the channel has ended; false if neither came within `timeout`.
    fn wait_readable(&self, timeout: Duration) -> io::Result<bool>;

    /// Ends every wait in here, now and later.
    fn shut_down(&self);

    /// The connection, if it is one.
    fn socket(&self) -> Option<&Stream>;

    /// Fills `buffer`. The channel's end inside is `UnexpectedEof`.
    fn read_exact(&self, mut buffer: &mut [u8]) -> io::Result<()> {
        while !buffer.is_empty() {
            match self.read_some(buffer)? {
                0 => return Err(io::ErrorKind::UnexpectedEof.into()),
                read => buffer = &mut buffer[read..],
            }
        }
        Ok(())
    }
}

impl ChannelIn for Stream {
    fn read_some(&self, buffer: &mut [u8]) -> io::Result<usize> {
        Stream::read_some(self, buffer)
    }

    fn read_pages(&self, runs: &[GuestRun<'_>], scratch: &mut IoScratch) -> io::Result<()> {
        Stream::read_pages(self, runs, scratch)
    }

    fn wait_readable(&self, timeout: Duration) -> io::Result<bool> {
        Stream::wait_readable(self, timeout)
    }

    fn shut_down(&self) {
        self.shutdown(Shutdown::Both);
    }

    fn socket(&self) -> Option<&Stream> {
        Some(self)
    }
}

impl ChannelIn for FileChannel {
    fn read_some(&self, buffer: &mut [u8]) -> io::Result<usize> {
        Self::read_some(self, buffer)
    }

    fn read_pages(&self, runs: &[GuestRun<'_>], _: &mut IoScratch) -> io::Result<()> {
        runs.iter().try_for_each(|run| {
            let mut left = *run;
            self.read_pieces(run.len(), |piece| {
                let (now, later) = left.split_at(piece.len());
                now.copy_from(piece);
                left = later;
            })
        })
    }

    fn wait_readable(&self, timeout: Duration) -> io::Result<bool> {
        Self::wait_readable(self, timeout)
    }

    fn shut_down(&self) {
        self.stop();
    }

    fn socket(&self) -> Option<&Stream> {
        None
    }
}

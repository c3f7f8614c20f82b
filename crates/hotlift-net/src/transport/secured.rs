//! TLS of a connection: encrypts for its writers, and decrypts for its readers.
//!
//! Each direction has its own lock, because different threads read and write. So a thread that waits for bytes does not block a
//! sender.

use std::io::{self, Read, Write};
use std::os::fd::{AsFd, BorrowedFd};
use std::sync::{Mutex, MutexGuard, PoisonError};

use hotlift_mem::GuestRun;
use hotlift_tls::{
    Exporter, Identity, Plaintext, Profile, RecordError, RecordOpener, RecordSealer, Session,
    Slices,
};
use rustix::io::Errno;
use rustix::net::{RecvFlags, SendFlags, recv, send};

/// TLS state of both directions, after the handshake.
#[derive(Debug)]
pub(super) struct Secured {
    reader: Mutex<Reading>,
    writer: Mutex<RecordSealer>,
    /// True if a missing `close_notify` is not an error. A QEMU sends no `close_notify`, and its migration stream itself shows
    /// if data is missing.
    may_lack_close: bool,
    /// Verified identity in the peer's certificate; `None` for a QEMU that was not asked for a certificate.
    pub peer: Option<Identity>,
    pub exporter: Exporter,
}

/// State of the receiving direction.
#[derive(Debug)]
struct Reading {
    records: RecordOpener,
    /// Error that [`Secured::answers_at_once`] found, and that the next read returns.
    error: Option<RecordError>,
}

impl Reading {
    /// Returns decrypted bytes ([`RecordOpener::plaintext`]), or the stored error.
    fn plaintext(&mut self, from: &mut impl Read) -> Result<&[u8], RecordError> {
        match self.error.take() {
            Some(error) => Err(error),
            None => self.records.plaintext(from),
        }
    }
}

impl Secured {
    pub(super) fn new(session: Session, profile: Profile) -> Self {
        Self {
            may_lack_close: profile == Profile::Qemu,
            reader: Mutex::new(Reading {
                records: session.opener,
                error: None,
            }),
            writer: Mutex::new(session.sealer),
            peer: session.peer,
            exporter: session.exporter,
        }
    }

    pub(super) fn is_of_a_qemu(&self) -> bool {
        self.may_lack_close
    }

    fn reader(&self) -> MutexGuard<'_, Reading> {
        self.reader.lock().unwrap_or_else(PoisonError::into_inner)
    }

    /// Reads available bytes, and waits for the first byte. Returns 0 after `close_notify`.
    pub(super) fn read(&self, mut from: impl Read, into: &mut [u8]) -> io::Result<usize> {
        let mut reader = self.reader();
        let plaintext = match reader.plaintext(&mut from) {
            Err(RecordError::Truncated) if self.may_lack_close => return Ok(0),
            plaintext => plaintext.map_err(io_error)?,
        };
        let length = plaintext.len().min(into.len());
        into[..length].copy_from_slice(&plaintext[..length]);
        reader.records.consume(length);
        Ok(length)
    }

    /// Returns true if a read does not block, because bytes, the end of the stream or an error are available. A part of a
    /// record does not suffice: the rest may never arrive. Returns `None` if another thread is reading.
    pub(super) fn answers_at_once(&self, socket: impl AsFd) -> Option<bool> {
        let mut reader = self.reader.try_lock().ok()?;
        if reader.error.is_some() {
            return Some(true);
        }
        match reader
            .records
            .plaintext(&mut Direct::at_once(socket.as_fd()))
        {
            Ok(_) => Some(true),
            Err(RecordError::Io(error)) if error.kind() == io::ErrorKind::WouldBlock => Some(false),
            Err(error) => {
                reader.error = Some(error);
                Some(true)
            }
        }
    }

    /// Fills `runs`, which are guest memory. Bytes are decrypted in the receive buffer, and then copied into guest memory.
    pub(super) fn read_pages(&self, socket: impl AsFd, runs: &[GuestRun<'_>]) -> io::Result<()> {
        let mut from = Direct::waiting(socket.as_fd());
        let mut reader = self.reader();
        for run in runs {
            let mut left = *run;
            while !left.is_empty() {
                let plaintext = reader.plaintext(&mut from).map_err(io_error)?;
                if plaintext.is_empty() {
                    return Err(io::ErrorKind::UnexpectedEof.into());
                }
                let length = plaintext.len().min(left.len());
                let (now, later) = left.split_at(length);
                now.stream_from(&plaintext[..length]);
                reader.records.consume(length);
                left = later;
            }
        }
        Ok(())
    }

    /// Peeks at decrypted bytes without waiting. Returns their number, 0 at the end of the stream, or `None` if nothing has
    /// arrived.
    pub(super) fn peek(&self, socket: impl AsFd, into: &mut [u8]) -> io::Result<Option<usize>> {
        let mut reader = self.reader();
        match reader.plaintext(&mut Direct::at_once(socket.as_fd())) {
            Ok(plaintext) => {
                let length = plaintext.len().min(into.len());
                into[..length].copy_from_slice(&plaintext[..length]);
                Ok(Some(length))
            }
            Err(RecordError::Io(error)) if error.kind() == io::ErrorKind::WouldBlock => Ok(None),
            Err(RecordError::Truncated) if self.may_lack_close => Ok(Some(0)),
            Err(error) => Err(io_error(error)),
        }
    }

    /// Returns true if decrypted bytes are buffered, which a poll of the socket does not report.
    pub(super) fn has_plaintext(&self) -> bool {
        // If another thread is reading, that thread takes the bytes.
        self.reader
            .try_lock()
            .is_ok_and(|reader| reader.error.is_some() || reader.records.is_ready())
    }

    /// Sends all bytes of `from`.
    pub(super) fn send(&self, mut to: impl Write, from: &mut impl Plaintext) -> io::Result<()> {
        let mut writer = self.writer.lock().unwrap_or_else(PoisonError::into_inner);
        writer.send(&mut to, from).map_err(io_error)
    }

    /// Sends `close_notify`, unless this would block: a thread is blocked in a write, or the socket is full.
    pub(super) fn close(&self, socket: impl AsFd) {
        if let Ok(mut writer) = self.writer.try_lock() {
            let _ = writer.close(&mut Direct::at_once(socket.as_fd()));
        }
    }
}

/// Plaintext of a packet: its header, followed by guest memory.
pub(crate) struct PacketPlaintext<'p, 'm> {
    head: &'p [u8],
    runs: &'p [GuestRun<'m>],
    /// Unsent part of the current run, a contiguous range of guest memory.
    first: Option<GuestRun<'m>>,
    remaining: usize,
}

impl<'p, 'm> PacketPlaintext<'p, 'm> {
    pub(crate) fn new(head: &'p [u8], runs: &'p [GuestRun<'m>]) -> Self {
        let remaining = head.len() + runs.iter().map(GuestRun::len).sum::<usize>();
        Self {
            head,
            runs,
            first: None,
            remaining,
        }
    }
}

impl Plaintext for PacketPlaintext<'_, '_> {
    fn remaining(&self) -> usize {
        self.remaining
    }

    fn take(&mut self, to: &mut [u8]) {
        let head = self.head.len().min(to.len());
        to[..head].copy_from_slice(&self.head[..head]);
        self.head = &self.head[head..];
        self.remaining -= head;
        let mut to = &mut to[head..];
        while !to.is_empty() {
            let run = match self.first.take() {
                Some(run) => run,
                None => match self.runs.split_first() {
                    Some((run, rest)) => {
                        self.runs = rest;
                        *run
                    }
                    None => return,
                },
            };
            let length = run.len().min(to.len());
            let (now, later) = run.split_at(length);
            let (here, rest) = to.split_at_mut(length);
            now.copy_to(here);
            to = rest;
            self.remaining -= length;
            self.first = Some(later).filter(|later| !later.is_empty());
        }
    }
}

/// A socket with direct system calls. The calls of libc are cancellation points, which took 5 % of the CPU time of a channel's
/// receiver.
struct Direct<'a> {
    socket: BorrowedFd<'a>,
    receive: RecvFlags,
    send: SendFlags,
}

impl<'a> Direct<'a> {
    fn waiting(socket: BorrowedFd<'a>) -> Self {
        Self {
            socket,
            receive: RecvFlags::empty(),
            send: SendFlags::NOSIGNAL,
        }
    }

    fn at_once(socket: BorrowedFd<'a>) -> Self {
        Self {
            socket,
            receive: RecvFlags::DONTWAIT,
            send: SendFlags::NOSIGNAL | SendFlags::DONTWAIT,
        }
    }
}

impl Read for Direct<'_> {
    fn read(&mut self, to: &mut [u8]) -> io::Result<usize> {
        match rustix::io::retry_on_intr(|| recv(self.socket, &mut *to, self.receive)) {
            Ok((_, length)) => Ok(length),
            Err(Errno::AGAIN) => Err(io::ErrorKind::WouldBlock.into()),
            Err(errno) => Err(errno.into()),
        }
    }
}

impl Write for Direct<'_> {
    fn write(&mut self, bytes: &[u8]) -> io::Result<usize> {
        Ok(rustix::io::retry_on_intr(|| {
            send(self.socket, bytes, self.send)
        })?)
    }

    fn flush(&mut self) -> io::Result<()> {
        Ok(())
    }
}

/// Returns a plaintext that consists of `parts` in order.
pub(super) fn parts<'a, 'p>(parts: &'a [&'p [u8]]) -> Slices<'a, &'p [u8]> {
    Slices::new(parts)
}

fn io_error(error: RecordError) -> io::Error {
    match error {
        RecordError::Io(error) => error,
        error => io::Error::other(error),
    }
}

#[cfg(test)]
mod tests {
    use std::os::unix::net::UnixStream;
    use std::thread;
    use std::time::Duration;

    use hotlift_testkit::pki::Pki;

    use crate::transport::Stream;

    use super::*;

    #[test]
    fn half_a_record_is_not_readable_and_blocks_no_reader() {
        let tls = Pki::new().tls("localhost");
        let (here, there) = UnixStream::pair().unwrap();
        let beside = there.try_clone().unwrap();
        let (here, there) = thread::scope(|scope| {
            let there = scope.spawn(|| Stream::from(there).accept_secured(&tls).unwrap());
            let here = Stream::from(here).secure(&tls, Some("localhost"));
            (here.unwrap(), there.join().unwrap())
        });
        (&there).write_all(b"whole").unwrap();
        let mut bytes = [0; 8];
        let long = Duration::from_secs(10);
        assert_eq!(here.read_within(&mut bytes, long).unwrap(), 5);
        // The header of a TLS record, without its content.
        (&beside).write_all(&[23, 3, 3, 1, 0, 9, 9]).unwrap();
        let short = Duration::from_millis(20);
        assert!(!here.wait_readable(short).unwrap());
        let late = here.read_within(&mut bytes, short).unwrap_err();
        assert_eq!(late.kind(), io::ErrorKind::TimedOut);
        // The end of the connection without `close_notify` makes the connection readable. The read then returns an error.
        drop((there, beside));
        assert!(here.wait_readable(long).unwrap());
        assert!(here.read_within(&mut bytes, long).is_err());
        assert!(here.read_within(&mut bytes, long).is_err());
    }
}

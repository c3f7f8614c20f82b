//! Forwards bytes from one socket to another by reference: a relay does not copy them.

use std::io;
use std::os::fd::BorrowedFd;

use rustix::io::retry_on_intr;
use rustix::pipe::{SpliceFlags, splice};

use crate::sock::{IoScratch, send_segments};
use crate::splice::Pipe;

/// Moves bytes between two sockets through a pipe of references (`splice` both ways).
///
/// With method `none`, a relay's main cost is two copies, into and out of a buffer. With references only the system calls
/// remain (measured between a UNIX socket and TCP over loopback, in packets of 512 KiB). Only the kernel refers to received
/// pages, so nothing can change them on the way.
///
/// A splice to a closed socket raises SIGPIPE: the process must ignore it, which is the default of Rust programs.
#[derive(Debug)]
pub struct Forwarder {
    /// `None` after an error, since the pipe may then contain a part of a packet.
    pipe: Option<Pipe>,
    scratch: IoScratch,
}

impl Forwarder {
    /// Creates a forwarder with its own pipe.
    pub fn new() -> io::Result<Self> {
        Ok(Self {
            pipe: Some(Pipe::new()?),
            scratch: IoScratch::new(),
        })
    }

    /// Sends a copy of `head` to `to`, and then exactly `bytes` bytes from `from`. Both sockets must be blocking. Fails with
    /// `UnexpectedEof` if `from` ends early.
    pub fn forward(
        &mut self,
        from: BorrowedFd<'_>,
        to: BorrowedFd<'_>,
        head: &[u8],
        bytes: usize,
    ) -> io::Result<()> {
        // Without this flag, TCP would send the head as a packet of its own.
        let flags = if bytes > 0 { libc::MSG_MORE } else { 0 };
        send_segments(to, self.scratch.fill(&[head], &[]), flags)?;
        if bytes == 0 {
            return Ok(());
        }
        let pipe = match self.pipe.take() {
            Some(pipe) => pipe,
            None => Pipe::new()?,
        };
        let mut left = bytes;
        while left > 0 {
            let flags = SpliceFlags::MOVE;
            let held = retry_on_intr(|| splice(from, None, &pipe.into, None, left, flags))?;
            if held == 0 {
                return Err(io::ErrorKind::UnexpectedEof.into());
            }
            left -= held;
            pipe.empty(to, held, left > 0)?;
        }
        self.pipe = Some(pipe);
        Ok(())
    }
}

#[cfg(test)]
mod tests {
    use super::*;
    use std::io::{Read, Write};
    use std::net::{TcpListener, TcpStream};
    use std::os::fd::AsFd;
    use std::os::unix::net::UnixStream;

    fn tcp_pair() -> (TcpStream, TcpStream) {
        let listener = TcpListener::bind("127.0.0.1:0").unwrap();
        let near = TcpStream::connect(listener.local_addr().unwrap()).unwrap();
        (near, listener.accept().unwrap().0)
    }

    #[test]
    fn heads_and_bytes_arrive_in_order_and_later_bytes_are_not_consumed() {
        let (mut source, from) = UnixStream::pair().unwrap();
        let (to, mut sink) = tcp_pair();
        let data: Vec<u8> = (0..3_000_000_u32).map(|i| (i % 251) as u8).collect();
        std::thread::scope(|scope| {
            scope.spawn(|| source.write_all(&data).unwrap());
            let reader = scope.spawn(move || {
                let mut got = Vec::new();
                sink.read_to_end(&mut got).unwrap();
                got
            });
            let mut forwarder = Forwarder::new().unwrap();
            let mut expected = Vec::new();
            let mut at = 0;
            for length in [0, 1, 4096, 700_000, 2_000_000] {
                let head = format!("head of {length}");
                forwarder
                    .forward(from.as_fd(), to.as_fd(), head.as_bytes(), length)
                    .unwrap();
                expected.extend_from_slice(head.as_bytes());
                expected.extend_from_slice(&data[at..at + length]);
                at += length;
            }
            let mut rest = vec![0; data.len() - at];
            (&from).read_exact(&mut rest).unwrap();
            assert_eq!(rest, data[at..]);
            drop(to);
            assert!(reader.join().unwrap() == expected);
        });
    }

    #[test]
    fn a_truncated_source_is_an_error_and_the_forwarder_stays_usable() {
        let mut forwarder = Forwarder::new().unwrap();
        for _ in 0..2 {
            let (mut source, from) = UnixStream::pair().unwrap();
            let (to, _sink) = tcp_pair();
            source.write_all(&[7; 5000]).unwrap();
            drop(source);
            let error = forwarder
                .forward(from.as_fd(), to.as_fd(), b"head", 5001)
                .unwrap_err();
            assert_eq!(error.kind(), io::ErrorKind::UnexpectedEof);
        }
    }
}

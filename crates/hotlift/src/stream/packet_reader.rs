//! Reads headers and payloads of one multifd channel.
//!
//! Packets without payload come in long sequences (a guest full of zero pages). So after a packet without payload, several
//! headers are read at once. After a payload exactly one header is read. Then the next payload can be read from the socket
//! directly into guest memory.

use std::io::{self, Read};

use hotlift_mem::GuestRun;
use hotlift_mem::sock::IoScratch;
use hotlift_net::transport::Stream;

/// Maximum count of headers in one read.
const READ_AHEAD_HEADERS: usize = 48;

pub(super) struct PacketReader<'a> {
    channel: &'a Stream,
    header_len: usize,
    buffer: Vec<u8>,
    /// Range of `buffer` that was read, but not taken yet.
    unread: std::ops::Range<usize>,
    had_payload: bool,
    scratch: IoScratch,
}

impl<'a> PacketReader<'a> {
    pub(super) fn new(channel: &'a Stream, header_len: usize) -> Self {
        Self {
            channel,
            header_len,
            buffer: vec![0; header_len * READ_AHEAD_HEADERS],
            unread: 0..0,
            had_payload: true,
            scratch: IoScratch::new(),
        }
    }

    /// Reads the next header. Returns `None` if the channel has ended between two packets.
    pub(super) fn header(&mut self) -> io::Result<Option<&[u8]>> {
        if self.unread.len() < self.header_len {
            self.buffer.copy_within(self.unread.clone(), 0);
            self.unread = 0..self.unread.len();
            let want = if self.had_payload {
                self.header_len
            } else {
                self.buffer.len()
            };
            while self.unread.len() < self.header_len {
                let read = self
                    .channel
                    .read_some(&mut self.buffer[self.unread.end..want])?;
                if read == 0 {
                    return if self.unread.is_empty() {
                        Ok(None)
                    } else {
                        Err(io::ErrorKind::UnexpectedEof.into())
                    };
                }
                self.unread.end += read;
            }
        }
        self.had_payload = false;
        let start = self.unread.start;
        self.unread.start += self.header_len;
        Ok(Some(&self.buffer[start..start + self.header_len]))
    }

    /// Reads a payload of pages directly into guest memory.
    pub(super) fn pages(&mut self, runs: &mut [GuestRun<'_>]) -> io::Result<()> {
        self.had_payload = true;
        let mut filled = 0;
        while filled < runs.len() && !self.unread.is_empty() {
            let here = runs[filled].len().min(self.unread.len());
            let (now, later) = runs[filled].split_at(here);
            now.copy_from(&self.buffer[self.unread.start..self.unread.start + here]);
            self.unread.start += here;
            runs[filled] = later;
            if later.is_empty() {
                filled += 1;
            }
        }
        self.channel.read_pages(&runs[filled..], &mut self.scratch)
    }

    /// Returns true if no bytes after the current header were read ahead.
    pub(super) fn has_nothing_ahead(&self) -> bool {
        self.unread.is_empty()
    }

    /// Records that the caller has read the payload directly from the socket.
    pub(super) fn payload_was_taken(&mut self) {
        self.had_payload = true;
    }

    /// Reads the payload of the current packet.
    pub(super) fn payload(&mut self, payload: &mut [u8]) -> io::Result<()> {
        self.had_payload = true;
        let buffered = payload.len().min(self.unread.len());
        let (first, rest) = payload.split_at_mut(buffered);
        first.copy_from_slice(&self.buffer[self.unread.start..self.unread.start + buffered]);
        self.unread.start += buffered;
        let mut channel = self.channel;
        channel.read_exact(rest)
    }
}

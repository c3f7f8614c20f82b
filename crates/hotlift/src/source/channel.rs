//! A multifd channel's thread on the source: takes chunks, finds zero pages, copies, encodes, frames
//! and sends.
//!
//! ```text
//! take chunk -> fetch and clear dirty bits -> zero? -> offsets of the packet
//! packet full -> method none: header + pages straight from guest memory to the socket
//!             -> other methods: private copy -> encode -> header + payload to the socket
//! ```
//!
//! A page is copied before it is encoded, since a codec that sees its input change may write a
//! stream that does not decode. With method none the kernel reads guest memory, and with
//! `zero-copy-send` it does so as late as the destination reads the socket; a page that the guest
//! changes meanwhile is dirty again by that very write, and is sent once more. Nothing is left in a
//! socket when the guest is handed over: the destination has answered for all of it by then.

use std::os::fd::AsFd;
use std::sync::atomic::Ordering;

use hotlift_mem::sock::{self, IoScratch, Splicer};
use hotlift_mem::{GuestRun, PAGE_SIZE};
use hotlift_wire::multifd::{PacketFields, PacketWriter, ZeroPageDetection};

use super::gate::Job;
use super::normal_share::NormalShare;
use super::ram::{Chunk, offsets};
use super::session::Session;
use super::zero_devices::Pipeline;
use crate::codec::Encoder;
use crate::error::{Channel, MigrationError};
use crate::transport::Stream;

/// Headers without payload (zero pages only) are gathered up to this many bytes before they are
/// written: a system call for each would cost more than the scan of its pages.
const GATHERED_HEADERS: usize = 48 << 10;

/// One channel's working state; everything that a packet needs is kept from packet to packet.
pub(super) struct ChannelSender<'a> {
    session: &'a Session<'a>,
    id: u8,
    stream: &'a Stream,
    writer: PacketWriter,
    /// `None` for method none, whose pages are not copied.
    encoder: Option<Encoder>,
    block: usize,
    /// Pages that a packet holds.
    packet_pages: usize,
    normal_share: NormalShare,
    normal: Vec<u64>,
    zero: Vec<u64>,
    runs: Vec<GuestRun<'a>>,
    /// Private copy of the packet's pages.
    pages: Vec<u8>,
    payload: Vec<u8>,
    /// Headers on their way; the last may be followed by a payload.
    headers: Vec<u8>,
    scratch: IoScratch,
    /// Sends guest pages by reference, with method none.
    splicer: Option<Splicer>,
    /// Devices that look for zero pages, in place of this thread.
    pipeline: Option<Pipeline<'a>>,
    dirty_words: Vec<u64>,
    untouched_words: Vec<u64>,
}

impl<'a> ChannelSender<'a> {
    pub(super) fn new(
        session: &'a Session<'a>,
        id: u8,
        stream: &'a Stream,
    ) -> Result<Self, MigrationError> {
        let method = session.method;
        let encoder = Encoder::new(id, session.options, true, &session.control)?;
        let layout = session.options.packet_layout();
        let packet_pages = session.options.packet_pages();
        Ok(Self {
            session,
            id,
            stream,
            writer: PacketWriter::new(layout, method, true),
            // A pipe may be refused (`pipe-user-pages-soft`); copying always works.
            splicer: (encoder.is_none() && session.options.zero_copy_send)
                .then(|| Splicer::new().ok())
                .flatten(),
            pages: vec![
                0;
                if encoder.is_some() {
                    packet_pages * PAGE_SIZE
                } else {
                    0
                }
            ],
            encoder,
            block: 0,
            packet_pages,
            normal_share: NormalShare::new(session.options.multifd_normal_page_ratio),
            normal: Vec::with_capacity(packet_pages),
            zero: Vec::with_capacity(packet_pages),
            runs: Vec::with_capacity(packet_pages),
            payload: Vec::new(),
            headers: Vec::with_capacity(GATHERED_HEADERS + layout.header_len()),
            scratch: IoScratch::new(),
            pipeline: session
                .zero_devices
                .as_ref()
                .map(|devices| Pipeline::new(devices, packet_pages)),
            dirty_words: Vec::new(),
            untouched_words: Vec::new(),
        })
    }

    /// Does jobs until told to exit.
    pub(super) fn run(&mut self) -> Result<(), MigrationError> {
        let mut generation = 0;
        loop {
            match self.session.gate.next_job(&mut generation) {
                Job::Round => {
                    self.round()?;
                    self.send_sync()?;
                }
                Job::Sync => self.send_sync()?,
                Job::Exit => return Ok(()),
            }
            self.session.gate.finish();
        }
    }

    /// Works on chunks until the round has no more.
    fn round(&mut self) -> Result<(), MigrationError> {
        while let Some(chunk) = self.session.ram.take() {
            if self.session.control.is_stopped() {
                return Ok(());
            }
            self.chunk(chunk)?;
        }
        if self.pipeline.is_some() {
            // What is filled, and then what the device still has.
            self.turn()?;
            self.turn()?;
        }
        self.send_packet()
    }

    /// Hands the gathered pages to a device, and sends those that it had before.
    fn turn(&mut self) -> Result<(), MigrationError> {
        if let Some(pipeline) = &mut self.pipeline {
            self.block = pipeline.turn(&mut self.normal_share, &mut self.normal, &mut self.zero);
        }
        self.send_packet()
    }

    fn chunk(&mut self, chunk: Chunk) -> Result<(), MigrationError> {
        let mut dirty = std::mem::take(&mut self.dirty_words);
        let mut untouched = std::mem::take(&mut self.untouched_words);
        let session = self.session;
        // With `legacy` detection the migration thread has been here before and cleared the log.
        let any = if session.options.zero_page_detection == ZeroPageDetection::Legacy {
            session.ram.fetch(chunk, &mut dirty)
        } else {
            session.ram.fetch_and_clear(chunk, &mut dirty)?
        };
        if any {
            let waiting = self.pipeline.as_ref().map(Pipeline::block);
            match waiting {
                Some(Some(block)) if block != chunk.block => self.turn()?,
                Some(_) => {}
                None if chunk.block != self.block => {
                    self.send_packet()?;
                    self.block = chunk.block;
                }
                None => {}
            }
            let detect = session.options.zero_page_detection == ZeroPageDetection::Multifd;
            if detect {
                session.ram.untouched(chunk, &mut untouched);
            }
            let ram = &session.guest.ram()[chunk.block];
            let mut looked_at = 0;
            for (page, offset) in offsets(chunk, &dirty) {
                let is_untouched = detect && untouched[page / 64] >> (page % 64) & 1 == 1;
                if let Some(pipeline) = &mut self.pipeline {
                    if pipeline.add(chunk.block, ram, offset, is_untouched)? {
                        self.turn()?;
                    }
                    continue;
                }
                let look = detect && !is_untouched;
                looked_at += u64::from(look);
                let is_zero = is_untouched || (look && ram.page_is_zero(chunk.first_page + page));
                let list = if is_zero && !self.normal_share.takes() {
                    &mut self.zero
                } else {
                    &mut self.normal
                };
                list.push(offset as u64);
                if self.normal.len() + self.zero.len() == self.packet_pages {
                    self.send_packet()?;
                }
            }
            session.looked_at.fetch_add(looked_at, Ordering::Relaxed);
        }
        self.dirty_words = dirty;
        self.untouched_words = untouched;
        Ok(())
    }

    /// Sends the pages gathered so far, if any.
    fn send_packet(&mut self) -> Result<(), MigrationError> {
        if self.normal.is_empty() && self.zero.is_empty() {
            return Ok(());
        }
        let session = self.session;
        let ram = &session.guest.ram()[self.block];
        let packet_num = session.packet_num.fetch_add(1, Ordering::Relaxed);

        self.runs.clear();
        for (offset, len) in contiguous(&self.normal) {
            self.runs.push(ram.run(offset, len)?);
        }
        let mut payload_len = self.normal.len() * PAGE_SIZE;
        let mut payload_crc = 0;
        if let Some(encoder) = &mut self.encoder {
            self.payload.clear();
            if !self.normal.is_empty() {
                let mut filled = 0;
                for run in self.runs.drain(..) {
                    run.copy_to(&mut self.pages[filled..filled + run.len()]);
                    filled += run.len();
                }
                encoder.encode(
                    packet_num,
                    ram.name(),
                    &self.pages[..filled],
                    &mut self.payload,
                )?;
                payload_crc = crc32fast::hash(&self.payload);
            }
            payload_len = self.payload.len();
        }
        let fields = PacketFields {
            sync: false,
            packet_num,
            block: ram.name(),
            normal: &self.normal,
            zero: &self.zero,
            payload_len: u32::try_from(payload_len).unwrap_or(u32::MAX),
            payload_crc,
        };
        frame(&mut self.writer, self.id, &fields, &mut self.headers)?;
        if payload_len > 0 || self.headers.len() >= GATHERED_HEADERS {
            self.write(payload_len)?;
        }
        session.counters[usize::from(self.id)].add_pages(self.normal.len(), self.zero.len());
        self.normal.clear();
        self.zero.clear();
        Ok(())
    }

    /// Sends a SYNC packet: everything before it on this channel belongs before the barrier.
    fn send_sync(&mut self) -> Result<(), MigrationError> {
        let fields = PacketFields {
            sync: true,
            packet_num: self.session.packet_num.fetch_add(1, Ordering::Relaxed),
            ..PacketFields::default()
        };
        frame(&mut self.writer, self.id, &fields, &mut self.headers)?;
        self.runs.clear();
        self.payload.clear();
        self.write(0)
    }

    /// Writes the gathered headers and the last one's payload of `payload_len` bytes: the guest's
    /// own pages in `runs` with method none, else what the encoder made of them.
    fn write(&mut self, payload_len: usize) -> Result<(), MigrationError> {
        let bytes = self.headers.len() + payload_len;
        self.session.pacer.wait(bytes, &self.session.control);
        let fd = self.stream.as_fd();
        let sent = if let Some(splicer) = self.splicer.as_mut().filter(|_| payload_len > 0) {
            splicer.send(fd, &self.headers, &self.runs)
        } else if self.encoder.is_none() {
            sock::send(fd, &self.headers, &self.runs, &mut self.scratch)
        } else {
            sock::send_parts(fd, &[&self.headers, &self.payload], &mut self.scratch)
        };
        sent.map_err(|source| MigrationError::Connection {
            channel: Channel::Multifd(self.id),
            doing: "sending pages",
            source,
        })?;
        self.session.counters[usize::from(self.id)].add_bytes(bytes);
        self.headers.clear();
        self.runs.clear();
        self.payload.clear();
        Ok(())
    }
}

/// Appends the header of a packet of channel `id` to `headers`.
fn frame(
    writer: &mut PacketWriter,
    id: u8,
    fields: &PacketFields<'_>,
    headers: &mut Vec<u8>,
) -> Result<(), MigrationError> {
    let header = writer
        .header(fields)
        .map_err(|source| MigrationError::Wire {
            channel: Channel::Multifd(id),
            source,
        })?;
    headers.extend_from_slice(header);
    Ok(())
}

/// Joins page offsets that follow each other: (offset, length) in bytes.
fn contiguous(offsets: &[u64]) -> impl Iterator<Item = (usize, usize)> + '_ {
    let page = PAGE_SIZE as u64;
    offsets
        .chunk_by(move |a, b| a + page == *b)
        .map(|run| (to_usize(run[0]), run.len() * PAGE_SIZE))
}

/// An offset inside mapped memory, hence inside the address space.
fn to_usize(offset: u64) -> usize {
    usize::try_from(offset).unwrap_or(usize::MAX)
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn neighbouring_pages_become_one_run_and_order_is_kept() {
        let page = PAGE_SIZE as u64;
        let offsets = [0, page, 2 * page, 5 * page, 4 * page, 7 * page];
        let runs: Vec<_> = contiguous(&offsets).collect();
        assert_eq!(
            runs,
            [
                (0, 3 * PAGE_SIZE),
                (5 * PAGE_SIZE, PAGE_SIZE),
                (4 * PAGE_SIZE, PAGE_SIZE),
                (7 * PAGE_SIZE, PAGE_SIZE)
            ]
        );
    }
}

//! An outgoing multifd channel: encodes batches and sends them as packets.

use std::os::fd::AsFd;
use std::sync::Mutex;
use std::sync::PoisonError;
use std::sync::atomic::Ordering;

use hotlift_mem::PAGE_SIZE;
use hotlift_mem::sock::{Forwarder, IoScratch};
use hotlift_methods::MethodError;
use hotlift_methods::legacy::compress::Deflater;
use hotlift_wire::multifd::{Method, PacketFields, PacketLayout, PacketWriter};

use super::super::batch::Batch;
use super::super::sink::{ForwardPackets, WritePages};
use super::main_out::Compressed;
use super::{StreamSink, ZeroPlace};
use crate::codec::Encoder;
use crate::error::{Channel, MigrationError};
use crate::transport::Stream;

/// One channel's working state; everything that a packet needs is kept from packet to packet.
pub(super) struct ChannelWriter<'s, 'a> {
    sink: &'s StreamSink<'a>,
    id: u8,
    writer: PacketWriter,
    /// `None` for method none.
    encoder: Option<Encoder>,
    payload: Vec<u8>,
    scratch: IoScratch,
}

impl<'s, 'a> ChannelWriter<'s, 'a> {
    pub(super) fn new(sink: &'s StreamSink<'a>, id: u8) -> Result<Self, MigrationError> {
        let options = &sink.settings.outgoing;
        let encoder = Encoder::new(id, options, sink.other_side().is_relay, &sink.control)?;
        Ok(Self {
            sink,
            id,
            writer: PacketWriter::new(PacketLayout::QEMU, sink.wire_method, true),
            encoder,
            payload: Vec::new(),
            scratch: IoScratch::new(),
        })
    }
}

impl WritePages for ChannelWriter<'_, '_> {
    fn write(&mut self, batch: &mut Batch) -> Result<(), MigrationError> {
        let came = batch.zero.len();
        if came > 0 {
            self.sink.source_finds_zeros();
        }
        if self.sink.looks_for_zeros() {
            batch.find_zero_pages();
        }
        let in_packet = match self.sink.zero_place() {
            ZeroPlace::Packets => batch.zero.len(),
            ZeroPlace::Main => 0,
            ZeroPlace::AsTheyCame if batch.from_main => 0,
            ZeroPlace::AsTheyCame => came,
        };
        self.sink
            .keep_zeros(batch.block, &batch.zero[in_packet..])?;
        batch.zero.truncate(in_packet);
        if batch.len() == 0 {
            return Ok(());
        }
        let packet_num = self.sink.packet_num.fetch_add(1, Ordering::Relaxed);
        let block = self.sink.block_name(batch.block);
        let mut payload_crc = 0;
        let mut payload: &[u8] = batch.pages();
        if let Some(encoder) = &mut self.encoder
            && !payload.is_empty()
        {
            encoder.encode(packet_num, block, payload, &mut self.payload)?;
            payload = &self.payload;
            payload_crc = crc32fast::hash(payload);
        }
        let fields = PacketFields {
            sync: false,
            packet_num,
            block,
            normal: &batch.normal,
            zero: &batch.zero,
            payload_len: u32::try_from(payload.len()).unwrap_or(u32::MAX),
            payload_crc,
        };
        let header = self
            .writer
            .header(&fields)
            .map_err(|source| MigrationError::Wire {
                channel: Channel::Multifd(self.id),
                source,
            })?;
        self.sink
            .send(self.id, &[header, payload], &mut self.scratch)
    }
}

impl StreamSink<'_> {
    /// Writes to a multifd channel.
    pub(super) fn send(
        &self,
        id: u8,
        parts: &[&[u8]],
        scratch: &mut IoScratch,
    ) -> Result<(), MigrationError> {
        let index = usize::from(id);
        let bytes = parts.iter().map(|part| part.len()).sum();
        self.pacer.wait(bytes, &self.control);
        let _turn = lock(&self.turns[index]);
        self.multifd[index].send(Channel::Multifd(id), parts, scratch)?;
        self.counters[index].add_bytes(bytes);
        Ok(())
    }

    /// SYNC on every channel.
    pub(super) fn sync_channels(&self) -> Result<(), MigrationError> {
        let mut writer = PacketWriter::new(PacketLayout::QEMU, self.wire_method, true);
        let mut scratch = IoScratch::new();
        for id in (0..=u8::MAX).take(self.multifd.len()) {
            let fields = PacketFields {
                sync: true,
                packet_num: self.packet_num.fetch_add(1, Ordering::Relaxed),
                ..PacketFields::default()
            };
            let header = writer
                .header(&fields)
                .map_err(|source| MigrationError::Wire {
                    channel: Channel::Multifd(id),
                    source,
                })?;
            self.send(id, &[header], &mut scratch)?;
        }
        Ok(())
    }
}

/// Passes packets of method none on without looking at their pages.
pub(super) struct PacketForwarder<'s, 'a> {
    sink: &'s StreamSink<'a>,
    id: u8,
    writer: PacketWriter,
    forwarder: Forwarder,
}

impl<'s, 'a> PacketForwarder<'s, 'a> {
    /// Where it can be done: pages go out as they came in, and the source looks for zero pages.
    pub(super) fn new(sink: &'s StreamSink<'a>, channel: u8) -> Option<Self> {
        let id = usize::from(channel).checked_rem(sink.multifd.len())?;
        let sockets = sink.multifd[id].socket().is_some();
        if sink.wire_method != Method::None || sink.looks_for_zeros() || !sockets {
            return None;
        }
        Some(Self {
            sink,
            id: u8::try_from(id).ok()?,
            writer: PacketWriter::new(PacketLayout::QEMU, Method::None, true),
            // A pipe may be refused (`pipe-user-pages-soft`); copying always works.
            forwarder: Forwarder::new().ok()?,
        })
    }
}

impl ForwardPackets for PacketForwarder<'_, '_> {
    fn forward(
        &mut self,
        from: &Stream,
        block: usize,
        normal: &[u64],
        zero: &[u64],
    ) -> Result<(), MigrationError> {
        let sink = self.sink;
        let channel = Channel::Multifd(self.id);
        let in_packet = match sink.zero_place() {
            ZeroPlace::Main => 0,
            ZeroPlace::Packets | ZeroPlace::AsTheyCame => zero.len(),
        };
        sink.keep_zeros(block, &zero[in_packet..])?;
        let zero = &zero[..in_packet];
        if normal.len() + zero.len() == 0 {
            return Ok(());
        }
        let length = normal.len() * PAGE_SIZE;
        let fields = PacketFields {
            packet_num: sink.packet_num.fetch_add(1, Ordering::Relaxed),
            block: sink.block_name(block),
            normal,
            zero,
            payload_len: u32::try_from(length).unwrap_or(u32::MAX),
            ..PacketFields::default()
        };
        let header = self
            .writer
            .header(&fields)
            .map_err(|source| MigrationError::Wire { channel, source })?;
        let bytes = header.len() + length;
        sink.pacer.wait(bytes, &sink.control);
        let index = usize::from(self.id);
        if let Some(to) = sink.multifd[index].socket() {
            let _turn = lock(&sink.turns[index]);
            self.forwarder
                .forward(from.as_fd(), to.as_fd(), header, length)
                .map_err(|source| MigrationError::Connection {
                    channel,
                    doing: "passing pages on",
                    source,
                })?;
        }
        sink.counters[index].add_bytes(bytes);
        Ok(())
    }
}

/// A stream without multifd: pages are records of main.
pub(super) struct MainWriter<'s, 'a> {
    sink: &'s StreamSink<'a>,
    /// With `compress`: each writer compresses in its own thread, and only then takes its turn on main.
    compress: Option<(Deflater, Compressed)>,
}

impl<'s, 'a> MainWriter<'s, 'a> {
    pub(super) fn new(sink: &'s StreamSink<'a>) -> Result<Self, MigrationError> {
        let options = &sink.settings.outgoing;
        let compress = if options.compress {
            let deflater = Deflater::new(options.compress_level);
            let deflater = deflater.map_err(|source| page_failed("", 0, source))?;
            Some((deflater, Compressed::default()))
        } else {
            None
        };
        Ok(Self { sink, compress })
    }
}

impl WritePages for MainWriter<'_, '_> {
    fn write(&mut self, batch: &mut Batch) -> Result<(), MigrationError> {
        if self.sink.looks_for_zeros() {
            batch.find_zero_pages();
        }
        let Some((deflater, pages)) = &mut self.compress else {
            return self.sink.lock_main().pages(batch);
        };
        pages.streams.clear();
        pages.lengths.clear();
        for (page, offset) in batch.pages().as_chunks().0.iter().zip(&batch.normal) {
            let before = pages.streams.len();
            let block = self.sink.block_name(batch.block);
            deflater
                .deflate(page, &mut pages.streams)
                .map_err(|source| page_failed(block, *offset, source))?;
            pages.lengths.push(pages.streams.len() - before);
        }
        self.sink.lock_main().compressed_pages(batch, pages)
    }
}

fn page_failed(block: &str, offset: u64, source: MethodError) -> MigrationError {
    MigrationError::Page {
        block: block.to_owned(),
        offset: usize::try_from(offset).unwrap_or(usize::MAX),
        source,
    }
}

/// A lock whose holder cannot have left anything half done.
pub(super) fn lock<T>(mutex: &Mutex<T>) -> std::sync::MutexGuard<'_, T> {
    mutex.lock().unwrap_or_else(PoisonError::into_inner)
}

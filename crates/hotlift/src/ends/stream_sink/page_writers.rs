//! Writes the pages of batches: zero pages on main or in packets, other pages on a channel.

use hotlift_methods::MethodError;
use hotlift_methods::legacy::compress::Deflater;
use hotlift_net::transport::Stream;

use crate::ends::stream_sink::{StreamSink, ZeroPlace};
use crate::error::MigrationError;
use crate::pipe::batch::Batch;
use crate::pipe::sink::{ForwardPackets, WritePages};
use crate::stream::main_send::{CompressedPages, PageRecords};
use crate::stream::multifd_send::{PacketForwarder, PacketSender};
use crate::stream::pages::Pages;

/// Writer to a multifd channel.
pub(crate) struct ChannelWriter<'s, 'a> {
    sink: &'s StreamSink<'a>,
    packets: PacketSender<'s>,
}

impl<'s, 'a> ChannelWriter<'s, 'a> {
    pub(crate) fn new(sink: &'s StreamSink<'a>, id: u8) -> Result<Self, MigrationError> {
        let options = &sink.settings.outgoing;
        let to_relay = sink.is_hotlift();
        // The main thread writes the SYNC packets, so that they do not wait for a worker.
        let packets = PacketSender::new(&sink.out.multifd, id, options, to_relay, false)?;
        Ok(Self { sink, packets })
    }
}

impl WritePages for ChannelWriter<'_, '_> {
    fn write(&mut self, batch: &mut Batch) -> Result<(), MigrationError> {
        let came = batch.zero.len();
        if came > 0 {
            self.sink.source_finds_zeros();
        }
        if self.sink.detects_zeros() {
            batch.find_zero_pages();
        }
        let in_packet = match self.sink.zero_place() {
            // In postcopy, zero pages are not kept for a later section, because the guest may wait for them.
            _ if self.sink.is_switched() => batch.zero.len(),
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
        let block = self.sink.block_name(batch.block);
        let pages = Pages::Private(batch.pages());
        self.packets.begin();
        self.packets.send(block, &batch.normal, &batch.zero, pages)
    }
}

/// Writer to a multifd channel that forwards packets without decoding.
pub(crate) struct Forwarding<'s, 'a> {
    sink: &'s StreamSink<'a>,
    packets: PacketForwarder<'s>,
}

impl<'s, 'a> Forwarding<'s, 'a> {
    /// Creates the forwarder. Returns `None` if packets cannot be sent unchanged, or if this side must detect zero pages.
    pub(crate) fn new(sink: &'s StreamSink<'a>, channel: u8) -> Option<Self> {
        if sink.detects_zeros() {
            return None;
        }
        let packets = PacketForwarder::new(&sink.out.multifd, channel)?;
        Some(Self { sink, packets })
    }
}

impl ForwardPackets for Forwarding<'_, '_> {
    fn forward(
        &mut self,
        from: &Stream,
        block: usize,
        normal: &[u64],
        zero: &[u64],
    ) -> Result<(), MigrationError> {
        let in_packet = match self.sink.zero_place() {
            ZeroPlace::Main => 0,
            ZeroPlace::Packets | ZeroPlace::AsTheyCame => zero.len(),
        };
        self.sink.keep_zeros(block, &zero[in_packet..])?;
        let zero = &zero[..in_packet];
        if normal.len() + zero.len() == 0 {
            return Ok(());
        }
        let block = self.sink.block_name(block);
        self.packets.forward(from, block, normal, zero)
    }
}

/// Writer for a stream without multifd: pages are records of main.
pub(crate) struct MainWriter<'s, 'a> {
    sink: &'s StreamSink<'a>,
    /// With `compress`: compressor and its output. A writer compresses in its own thread, and only then locks main.
    compress: Option<(Deflater, CompressedPages)>,
}

impl<'s, 'a> MainWriter<'s, 'a> {
    pub(crate) fn new(sink: &'s StreamSink<'a>) -> Result<Self, MigrationError> {
        let options = &sink.settings.outgoing;
        let compress = if options.compress {
            let deflater = Deflater::new(options.levels.compress);
            let deflater = deflater.map_err(|source| page_failed("", 0, source))?;
            Some((deflater, CompressedPages::default()))
        } else {
            None
        };
        Ok(Self { sink, compress })
    }
}

impl WritePages for MainWriter<'_, '_> {
    fn write(&mut self, batch: &mut Batch) -> Result<(), MigrationError> {
        if self.sink.detects_zeros() {
            batch.find_zero_pages();
        }
        let Some((deflater, pages)) = &mut self.compress else {
            return self.sink.lock_main().pages(records(batch));
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
        let counters = &self.sink.out.link.counters;
        counters.add_pages(batch.normal.len(), batch.zero.len());
        let mut main = self.sink.lock_main();
        main.compressed_pages(records(batch), pages)?;
        match self.sink.facts.is_guest {
            // A guest's rounds end the sections. At each end, a destination waits for its decompression threads.
            true => Ok(()),
            false => main.end_section(false),
        }
    }
}

/// Returns the pages of a batch unchanged.
pub(super) fn records(batch: &Batch) -> PageRecords<'_> {
    PageRecords {
        block: batch.block,
        zero: &batch.zero,
        normal: &batch.normal,
        content: batch.pages(),
    }
}

fn page_failed(block: &str, offset: u64, source: MethodError) -> MigrationError {
    MigrationError::Page {
        block: block.to_owned(),
        offset: usize::try_from(offset).unwrap_or(usize::MAX),
        source,
    }
}

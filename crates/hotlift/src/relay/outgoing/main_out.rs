//! The outgoing main channel: whole sections, by whichever thread has one.

use std::sync::Arc;

use hotlift_mem::PAGE_SIZE;
use hotlift_mem::sock::IoScratch;
use hotlift_wire::WireError;
use hotlift_wire::main_channel::{Command, Configuration, MainEncoder};

use super::super::batch::Batch;
use super::super::sink::RamLayout;
use super::lane::Lane;
use crate::control::Control;
use crate::error::{Channel, MigrationError};
use crate::figures::Counters;
use crate::pacing::Pacer;

/// Records are gathered up to this many bytes before they are written.
const GATHERED: usize = 64 << 10;

/// Whether a section of `ram` is one more or the last.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub(super) enum Section {
    Part,
    End,
}

/// The connection of the main channel.
#[derive(Debug)]
pub(super) struct MainLink {
    pub lane: Lane,
    pub counters: Counters,
    pub pacer: Arc<Pacer>,
    pub control: Control,
}

/// Pages of a batch as zlib streams.
#[derive(Debug, Default)]
pub(super) struct Compressed {
    /// One after the other.
    pub streams: Vec<u8>,
    /// Length of each page's stream; 0 for a page that goes as it is.
    pub lengths: Vec<usize>,
}

pub(super) struct MainOut {
    link: Arc<MainLink>,
    encoder: MainEncoder,
    out: Vec<u8>,
    scratch: IoScratch,
    /// Of every byte written, until it is known that nobody will ask.
    crc: Option<crc32fast::Hasher>,
}

impl MainOut {
    /// Starts a stream; nothing is sent before [`MainOut::flush`].
    pub(super) fn new(
        link: Arc<MainLink>,
        configuration: &Configuration,
    ) -> Result<Self, MigrationError> {
        let mut out = Vec::with_capacity(2 * GATHERED);
        Ok(Self {
            link,
            encoder: MainEncoder::new(configuration, &mut out).map_err(wire)?,
            out,
            scratch: IoScratch::new(),
            crc: Some(crc32fast::Hasher::new()),
        })
    }

    /// The other side is no relay: it does not ask for a checksum.
    pub(super) fn drop_checksum(&mut self) {
        self.crc = None;
    }

    /// CRC-32 of everything written.
    pub(super) fn crc(&self) -> Option<u32> {
        self.crc.clone().map(crc32fast::Hasher::finalize)
    }

    pub(super) fn command(&mut self, command: Command) -> Result<(), MigrationError> {
        self.encoder.command(command, &mut self.out).map_err(wire)?;
        self.flush()
    }

    pub(super) fn ram_start(&mut self, ram: &RamLayout, flush: bool) -> Result<(), MigrationError> {
        self.encoder.set_ram_id(ram.section_id).map_err(wire)?;
        self.encoder
            .ram_start(&ram.blocks, flush, &mut self.out)
            .map_err(wire)?;
        self.flush()
    }

    /// A section of RAM that holds the `zero` pages and, with `flush`, a mark.
    pub(super) fn section(
        &mut self,
        section: Section,
        zero: impl Iterator<Item = (usize, u64)>,
        flush: bool,
    ) -> Result<(), MigrationError> {
        self.open_section(section)?;
        for (block, offset) in zero {
            self.encoder
                .zero_page(block, offset, &mut self.out)
                .map_err(wire)?;
            if self.out.len() >= GATHERED {
                self.flush()?;
            }
        }
        if flush {
            self.encoder.multifd_flush(&mut self.out).map_err(wire)?;
        }
        self.encoder.ram_eos(&mut self.out).map_err(wire)?;
        self.flush()
    }

    fn open_section(&mut self, section: Section) -> Result<(), MigrationError> {
        match section {
            Section::Part => self.encoder.ram_part(&mut self.out),
            Section::End => self.encoder.ram_end(&mut self.out),
        }
        .map_err(wire)
    }

    /// A section with one XBZRLE delta.
    pub(super) fn delta(
        &mut self,
        block: usize,
        offset: u64,
        delta: &[u8],
    ) -> Result<(), MigrationError> {
        self.open_section(Section::Part)?;
        self.encoder
            .xbzrle_page(block, offset, delta, &mut self.out)
            .map_err(wire)?;
        self.encoder.ram_eos(&mut self.out).map_err(wire)?;
        self.flush()
    }

    /// A section with the batch's pages, which go to the socket from where they are.
    pub(super) fn pages(&mut self, batch: &Batch) -> Result<(), MigrationError> {
        self.open_section(Section::Part)?;
        for offset in &batch.zero {
            self.encoder
                .zero_page(batch.block, *offset, &mut self.out)
                .map_err(wire)?;
        }
        let mut heads = Vec::with_capacity(batch.normal.len() + 1);
        let mut from = 0;
        for offset in &batch.normal {
            self.encoder
                .normal_page_head(batch.block, *offset, &mut self.out)
                .map_err(wire)?;
            heads.push(from..self.out.len());
            from = self.out.len();
        }
        self.encoder.ram_eos(&mut self.out).map_err(wire)?;
        let mut parts = Vec::with_capacity(2 * heads.len() + 1);
        for (head, page) in heads.into_iter().zip(batch.pages().chunks(PAGE_SIZE)) {
            parts.push(&self.out[head]);
            parts.push(page);
        }
        parts.push(&self.out[from..]);
        let bytes = self.out.len() + batch.pages().len();
        self.link.pacer.wait(bytes, &self.link.control);
        if let Some(crc) = &mut self.crc {
            parts.iter().for_each(|part| crc.update(part));
        }
        let scratch = &mut self.scratch;
        self.link.lane.send(Channel::Main, &parts, scratch)?;
        self.link.counters.add_bytes(bytes);
        self.out.clear();
        Ok(())
    }

    /// A section with the batch's pages as `pages` has them.
    pub(super) fn compressed_pages(
        &mut self,
        batch: &Batch,
        pages: &Compressed,
    ) -> Result<(), MigrationError> {
        self.open_section(Section::Part)?;
        let (encoder, out) = (&mut self.encoder, &mut self.out);
        for offset in &batch.zero {
            encoder.zero_page(batch.block, *offset, out).map_err(wire)?;
        }
        let mut rest = pages.streams.as_slice();
        let contents = batch.pages().chunks(PAGE_SIZE).zip(&pages.lengths);
        for (offset, (page, length)) in batch.normal.iter().zip(contents) {
            let (stream, behind) = rest.split_at(*length);
            rest = behind;
            if stream.is_empty() {
                let head = encoder.normal_page_head(batch.block, *offset, out);
                head.map_err(wire)?;
                out.extend_from_slice(page);
            } else {
                let record = encoder.compressed_page(batch.block, *offset, stream, out);
                record.map_err(wire)?;
            }
        }
        self.encoder.ram_eos(&mut self.out).map_err(wire)?;
        self.flush()
    }

    /// Bytes as they are, behind everything gathered.
    pub(super) fn raw(&mut self, bytes: &[u8]) -> Result<(), MigrationError> {
        self.flush()?;
        self.write(bytes)
    }

    /// Writes what was gathered.
    pub(super) fn flush(&mut self) -> Result<(), MigrationError> {
        let out = std::mem::take(&mut self.out);
        let written = self.write(&out);
        self.out = out;
        self.out.clear();
        written
    }

    fn write(&mut self, bytes: &[u8]) -> Result<(), MigrationError> {
        if let Some(crc) = &mut self.crc {
            crc.update(bytes);
        }
        self.link.pacer.wait(bytes.len(), &self.link.control);
        let scratch = &mut self.scratch;
        self.link.lane.send(Channel::Main, &[bytes], scratch)?;
        self.link.counters.add_bytes(bytes.len());
        Ok(())
    }
}

pub(super) fn wire(source: WireError) -> MigrationError {
    MigrationError::Wire {
        channel: Channel::Main,
        source,
    }
}

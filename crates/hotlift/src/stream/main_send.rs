//! Sending end of the main channel: start of the stream, RAM sections, device state, EOF.

use std::sync::Arc;

use hotlift_mem::sock::IoScratch;
use hotlift_mem::{GuestRun, PAGE_SIZE};
use hotlift_net::transport::Stream;
use hotlift_wire::main_channel::{
    Command, Configuration, MainEncoder, postcopy, put_device_part_head, put_packaged_head,
};
use hotlift_wire::{RamBlockEntry, WireError};

use crate::error::{Channel, MigrationError};
use crate::figures::Counters;
use crate::guest::DeviceState;
use crate::life::Life;
use crate::pacing::Pacer;
use crate::stream::channel_out::send;

/// Maximum count of bytes of records that are collected before a write.
const GATHERED: usize = 64 << 10;

/// Connection of the main channel.
#[derive(Debug)]
pub(crate) struct MainLink {
    pub transport: Stream,
    pub counters: Arc<Counters>,
    pub pacer: Arc<Pacer>,
    pub life: Life,
}

/// Writer of the main channel.
pub(crate) struct MainSend {
    link: Arc<MainLink>,
    encoder: MainEncoder,
    out: Vec<u8>,
    scratch: IoScratch,
    /// CRC-32 of all written bytes; `None` if the destination will not ask for it.
    crc: Option<crc32fast::Hasher>,
    in_section: bool,
    /// True once the last RAM section has begun, or is the next one.
    completing: bool,
}

/// Pages of one RAM block. No thread changes their content during the call.
#[derive(Debug, Clone, Copy)]
pub(crate) struct PageRecords<'p> {
    /// Index of the RAM block.
    pub block: usize,
    /// Byte offsets of the zero pages.
    pub zero: &'p [u64],
    /// Byte offsets of the pages with content.
    pub normal: &'p [u64],
    /// Content of the pages in `normal`, one after another.
    pub content: &'p [u8],
}

impl<'p> PageRecords<'p> {
    /// Iterates over the pages, zero pages first. Yields the byte offset and the content; `None` for a zero page.
    pub(crate) fn each(
        &self,
    ) -> impl Iterator<Item = (u64, Option<&'p [u8; PAGE_SIZE]>)> + use<'p> {
        let zero = self.zero.iter().map(|offset| (*offset, None));
        let contents = self.content.as_chunks().0.iter();
        let normal = self.normal.iter().zip(contents);
        zero.chain(normal.map(|(offset, content)| (*offset, Some(content))))
    }
}

/// Pages compressed as zlib streams (capability `compress`).
#[derive(Debug, Default)]
pub(crate) struct CompressedPages {
    /// The zlib streams, one after another.
    pub streams: Vec<u8>,
    /// Length of each page's zlib stream in bytes; 0 for an uncompressed page.
    pub lengths: Vec<usize>,
}

/// Value of the PING after the devices in a package. QEMU uses the same number.
pub(crate) const LOADED: u32 = 3;

/// Completes a postcopy package, which contains LISTEN and device sections: appends a PING and RUN. `ping` computes the PING's
/// value from all bytes before the PING. Returns the package and the PING's value.
fn close_package(
    package: &[u8],
    ping: impl FnOnce(&[u8]) -> u32,
) -> Result<(Vec<u8>, u32), MigrationError> {
    let mut behind = Vec::new();
    Command::Ping(0).encode(&mut behind);
    let ping_len = behind.len();
    postcopy::put_run(&mut behind);
    let length = package.len() + behind.len();
    let mut bytes = Vec::with_capacity(length + 16);
    put_packaged_head(length as u64, &mut bytes).map_err(MigrationError::main_wire)?;
    bytes.extend_from_slice(package);
    let value = ping(&bytes);
    Command::Ping(value).encode(&mut bytes);
    bytes.extend_from_slice(&behind[ping_len..]);
    Ok((bytes, value))
}

impl MainSend {
    /// Starts a stream. The start of the stream is sent together with the first command.
    pub(crate) fn new(
        link: Arc<MainLink>,
        configuration: &Configuration,
    ) -> Result<Self, MigrationError> {
        let mut out = Vec::with_capacity(2 * GATHERED);
        Ok(Self {
            link,
            encoder: MainEncoder::new(configuration, &mut out)
                .map_err(MigrationError::main_wire)?,
            out,
            scratch: IoScratch::new(),
            crc: Some(crc32fast::Hasher::new()),
            in_section: false,
            completing: false,
        })
    }

    /// Continues a stream within RAM on a new connection, after the old connection has ended. Does not send the start of the
    /// stream again.
    pub(crate) fn resume(
        link: Arc<MainLink>,
        configuration: &Configuration,
        section_id: Option<u32>,
        blocks: &[RamBlockEntry],
    ) -> Result<Self, MigrationError> {
        let mut main = Self::new(link, configuration)?;
        main.record(|encoder, out| {
            if let Some(id) = section_id {
                encoder.set_ram_id(id)?;
            }
            encoder.ram_start(blocks, false, out)
        })?;
        main.out.clear();
        main.crc = None;
        Ok(main)
    }

    /// Stops computing the CRC-32, because the destination will not ask for it.
    pub(crate) fn drop_checksum(&mut self) {
        self.crc = None;
    }

    /// Returns the CRC-32 of all written bytes; `None` if the destination will not ask for it.
    pub(crate) fn crc(&self) -> Option<u32> {
        self.crc.clone().map(crc32fast::Hasher::finalize)
    }

    /// Sends all collected records, and then a command between two sections.
    pub(crate) fn command(&mut self, command: Command) -> Result<(), MigrationError> {
        self.record(|encoder, out| encoder.command(command, out))?;
        self.flush()
    }

    /// Sends the RAM block list in a section with id `section_id`. With `flush`, a multifd flush follows the list.
    pub(crate) fn ram_start(
        &mut self,
        section_id: Option<u32>,
        blocks: &[RamBlockEntry],
        flush: bool,
    ) -> Result<(), MigrationError> {
        if let Some(id) = section_id {
            self.encoder
                .set_ram_id(id)
                .map_err(MigrationError::main_wire)?;
        }
        self.record(|encoder, out| encoder.ram_start(blocks, flush, out))?;
        self.flush()
    }

    /// Makes the next RAM section the last one.
    pub(crate) fn complete(&mut self) {
        self.completing = true;
    }

    /// Returns true after [`MainSend::complete`].
    pub(crate) fn is_completing(&self) -> bool {
        self.completing
    }

    /// Adds a zero page to the RAM section.
    pub(crate) fn zero_page(&mut self, block: usize, offset: u64) -> Result<(), MigrationError> {
        self.page_record(|encoder, out| encoder.zero_page(block, offset, out))
    }

    /// Adds a copy of a page of guest memory to the RAM section. If the guest writes the page during the copy, the page is
    /// dirty again and is sent later.
    pub(crate) fn guest_page(
        &mut self,
        block: usize,
        offset: u64,
        page: GuestRun<'_>,
    ) -> Result<(), MigrationError> {
        self.page_record(|encoder, out| {
            encoder.normal_page_head(block, offset, out)?;
            let start = out.len();
            out.resize(start + page.len(), 0);
            page.copy_to(&mut out[start..]);
            Ok(())
        })
    }

    /// Adds a page to the RAM section, from a copy of its content.
    pub(crate) fn copied_page(
        &mut self,
        block: usize,
        offset: u64,
        page: &[u8],
    ) -> Result<(), MigrationError> {
        self.page_record(|encoder, out| {
            encoder.normal_page_head(block, offset, out)?;
            out.extend_from_slice(page);
            Ok(())
        })
    }

    /// Adds a page to the RAM section, as an XBZRLE delta from its last sent content.
    pub(crate) fn xbzrle_page(
        &mut self,
        block: usize,
        offset: u64,
        delta: &[u8],
    ) -> Result<(), MigrationError> {
        self.page_record(|encoder, out| encoder.xbzrle_page(block, offset, delta, out))
    }

    /// Adds a page to the RAM section, as a zlib stream.
    pub(crate) fn compressed_page(
        &mut self,
        block: usize,
        offset: u64,
        stream: &[u8],
    ) -> Result<(), MigrationError> {
        self.page_record(|encoder, out| encoder.compressed_page(block, offset, stream, out))
    }

    /// Ends the RAM section. If none was begun, sends an empty one. With `flush`, a multifd flush precedes the section's end.
    pub(crate) fn end_section(&mut self, flush: bool) -> Result<(), MigrationError> {
        self.open_section()?;
        if flush {
            self.record(MainEncoder::multifd_flush)?;
        }
        self.record(MainEncoder::ram_eos)?;
        self.in_section = false;
        self.flush()
    }

    /// Sends `pages` in a RAM section, directly from their memory, without copying them.
    pub(crate) fn pages(&mut self, pages: PageRecords<'_>) -> Result<(), MigrationError> {
        self.pace(pages.content.len());
        self.pages_at_once(pages)
    }

    /// Sends `pages` like [`MainSend::pages`], but without the bandwidth limit.
    pub(crate) fn pages_at_once(&mut self, pages: PageRecords<'_>) -> Result<(), MigrationError> {
        self.open_section()?;
        let (encoder, out) = (&mut self.encoder, &mut self.out);
        for offset in pages.zero {
            encoder
                .zero_page(pages.block, *offset, out)
                .map_err(MigrationError::main_wire)?;
        }
        let mut heads = Vec::with_capacity(pages.normal.len() + 1);
        let mut from = 0;
        for offset in pages.normal {
            let head = encoder.normal_page_head(pages.block, *offset, out);
            head.map_err(MigrationError::main_wire)?;
            heads.push(from..out.len());
            from = out.len();
        }
        encoder.ram_eos(out).map_err(MigrationError::main_wire)?;
        self.in_section = false;
        let out = std::mem::take(&mut self.out);
        let mut parts = Vec::with_capacity(2 * heads.len() + 1);
        for (head, page) in heads.into_iter().zip(pages.content.chunks(PAGE_SIZE)) {
            parts.push(&out[head]);
            parts.push(page);
        }
        parts.push(&out[from..]);
        let written = self.put(&parts);
        self.out = out;
        self.out.clear();
        written
    }

    /// Adds `pages` to the RAM section, compressed where `compressed` has a zlib stream. Begins the section if necessary.
    pub(crate) fn compressed_pages(
        &mut self,
        pages: PageRecords<'_>,
        compressed: &CompressedPages,
    ) -> Result<(), MigrationError> {
        for offset in pages.zero {
            self.zero_page(pages.block, *offset)?;
        }
        let mut rest = compressed.streams.as_slice();
        let contents = pages.content.chunks(PAGE_SIZE).zip(&compressed.lengths);
        for (offset, (page, length)) in pages.normal.iter().zip(contents) {
            let (stream, behind) = rest.split_at(*length);
            rest = behind;
            if stream.is_empty() {
                self.copied_page(pages.block, *offset, page)?;
            } else {
                self.compressed_page(pages.block, *offset, stream)?;
            }
        }
        Ok(())
    }

    /// Adds the state of a device, in a separate section.
    pub(crate) fn device(&mut self, device: &DeviceState) -> Result<(), MigrationError> {
        self.record(|encoder, out| {
            encoder.device(
                &device.idstr,
                device.instance_id,
                device.version_id,
                &device.payload,
                out,
            )
        })?;
        self.flush()
    }

    /// Returns the package that starts the guest in a postcopy: the devices, a PING and RUN. The PING's value is the CRC-32 of
    /// all bytes before it if the destination requires a checksum, otherwise `ping`. Also returns this value. Sends nothing.
    pub(crate) fn package(
        &mut self,
        devices: &[DeviceState],
        ping: u32,
    ) -> Result<(Vec<u8>, u32), MigrationError> {
        let mut package = Vec::new();
        postcopy::put_listen(&mut package);
        let encoder = &mut self.encoder;
        let mut encode = || {
            encoder.begin_package()?;
            for device in devices {
                let (name, instance) = (&device.idstr, device.instance_id);
                let (version, payload) = (device.version_id, &device.payload);
                encoder.device(name, instance, version, payload, &mut package)?;
            }
            encoder.end_package()
        };
        encode().map_err(MigrationError::main_wire)?;
        close_package(&package, |before| {
            let crc = self.crc.clone();
            crc.map_or(ping, |mut crc| {
                crc.update(before);
                crc.finalize()
            })
        })
    }

    /// Ends the stream with EOF. Send errors are ignored, because the commit may also be sent on other connections. The reader
    /// of the return path reports the failure.
    pub(crate) fn end_of_file(&mut self) {
        if self.record(MainEncoder::eof).is_ok() && self.record(MainEncoder::vm_description).is_ok()
        {
            let _ = self.flush();
        }
    }

    /// For a relay: sends a part of a QEMU's device sections, with the checksum of everything up to the part's end. A part has
    /// at most [`DEVICE_PART`](hotlift_wire::limits::DEVICE_PART) bytes.
    pub(crate) fn device_part(&mut self, part: &[u8]) -> Result<(), MigrationError> {
        self.flush()?;
        let mut head = Vec::new();
        put_device_part_head(part.len(), &mut head).map_err(MigrationError::main_wire)?;
        let mut crc = self.crc.clone().unwrap_or_default();
        crc.update(&head);
        crc.update(part);
        self.write(&[&head, part, &crc.finalize().to_be_bytes()])
    }

    /// Sends all collected records, and then `bytes` unchanged.
    pub(crate) fn raw(&mut self, bytes: &[u8]) -> Result<(), MigrationError> {
        self.flush()?;
        self.write(&[bytes])
    }

    fn open_section(&mut self) -> Result<(), MigrationError> {
        if self.in_section {
            return Ok(());
        }
        self.in_section = true;
        if self.completing {
            self.record(MainEncoder::ram_end)
        } else {
            self.record(MainEncoder::ram_part)
        }
    }

    fn page_record(
        &mut self,
        write: impl FnOnce(&mut MainEncoder, &mut Vec<u8>) -> Result<(), WireError>,
    ) -> Result<(), MigrationError> {
        self.open_section()?;
        self.record(write)?;
        if self.out.len() >= GATHERED {
            self.flush()?;
        }
        Ok(())
    }

    fn record(
        &mut self,
        write: impl FnOnce(&mut MainEncoder, &mut Vec<u8>) -> Result<(), WireError>,
    ) -> Result<(), MigrationError> {
        write(&mut self.encoder, &mut self.out).map_err(MigrationError::main_wire)
    }

    /// Writes the collected records to the socket.
    fn flush(&mut self) -> Result<(), MigrationError> {
        let out = std::mem::take(&mut self.out);
        let written = self.write(&[&out]);
        self.out = out;
        self.out.clear();
        written
    }

    fn write(&mut self, parts: &[&[u8]]) -> Result<(), MigrationError> {
        self.pace(parts.iter().map(|part| part.len()).sum());
        self.put(parts)
    }

    fn pace(&self, bytes: usize) {
        self.link.pacer.wait(bytes, &self.link.life);
    }

    fn put(&mut self, parts: &[&[u8]]) -> Result<(), MigrationError> {
        if let Some(crc) = &mut self.crc {
            parts.iter().for_each(|part| crc.update(part));
        }
        let bytes = parts.iter().map(|part| part.len()).sum();
        let transport = &self.link.transport;
        send(transport, Channel::Main, parts, &mut self.scratch)?;
        self.link.counters.add_bytes(bytes);
        Ok(())
    }
}

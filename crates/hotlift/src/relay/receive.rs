//! An incoming multifd channel's thread: reads packets and decodes their pages into batches.

use std::io::{self, Read};

use hotlift_mem::GuestRun;
use hotlift_methods::METHODS;
use hotlift_wire::RamBlockEntry;
use hotlift_wire::multifd::{Method, PacketHeader, PacketLayout, PacketRules};

use super::memory::Held;
use super::session::Session;
use super::sink::ForwardPackets;
use crate::codec::Decoder;
use crate::error::{Channel, MigrationError};
use crate::transport::Stream;

pub(super) struct ChannelReceiver<'a> {
    session: &'a Session<'a>,
    blocks: &'a [RamBlockEntry],
    stream: &'a Stream,
    id: u8,
    rules: PacketRules,
    header: PacketHeader,
    header_bytes: Vec<u8>,
    /// Made when the first packet says its method; all others must then have the same.
    decoder: Option<Decoder>,
    payload: Held,
    /// The SYNC of the set-up has come, and with it everything that pages need.
    synced: bool,
    /// Passes uncompressed packets on where that may be done.
    forwarder: Option<Box<dyn ForwardPackets + 'a>>,
}

impl<'a> ChannelReceiver<'a> {
    pub(super) fn new(
        session: &'a Session<'a>,
        blocks: &'a [RamBlockEntry],
        stream: &'a Stream,
        id: u8,
        from_relay: bool,
    ) -> Self {
        let layout = PacketLayout::QEMU;
        Self {
            session,
            blocks,
            stream,
            id,
            rules: PacketRules {
                layout,
                method: None,
                checksum_required: from_relay,
            },
            header: PacketHeader::new(layout),
            header_bytes: vec![0; layout.header_len()],
            decoder: None,
            payload: Held::new(&session.memory),
            synced: false,
            forwarder: None,
        }
    }

    /// Works until the channel ends, between packets, or the relay does.
    pub(super) fn run(&mut self) -> Result<(), MigrationError> {
        while self.read_header()? {
            self.header
                .decode(&self.header_bytes, &self.rules, self.blocks)
                .map_err(|source| self.wire(source))?;
            let pages = self.header.normal().len() + self.header.zero().len();
            if pages > 0 && !self.synced {
                return Err(MigrationError::Protocol {
                    channel: Channel::Multifd(self.id),
                    got: "pages before the first SYNC".to_owned(),
                    doing: "opening the migration",
                });
            }
            if pages > 0 && !self.pages()? {
                return Ok(());
            }
            if self.header.sync() && !self.session.barrier.channel_arrives() {
                return Ok(());
            }
            self.synced |= self.header.sync();
        }
        // A relay closes its channels when everything is over: one that ends before was cut, and may
        // be quiet for long before anybody writes to it.
        if self.rules.checksum_required && !self.session.is_committed() {
            return Err(MigrationError::Closed {
                channel: Channel::Multifd(self.id),
            });
        }
        self.session.barrier.channel_ends();
        Ok(())
    }

    /// Reads the next header; false if the channel ends before it.
    fn read_header(&mut self) -> Result<bool, MigrationError> {
        let mut filled = 0;
        while filled < self.header_bytes.len() {
            let read = self
                .stream
                .read_some(&mut self.header_bytes[filled..])
                .map_err(|source| self.broken("reading a packet header", source))?;
            if read == 0 && filled == 0 {
                return Ok(false);
            }
            if read == 0 {
                let source = io::ErrorKind::UnexpectedEof.into();
                return Err(self.broken("reading a packet header", source));
            }
            filled += read;
        }
        self.session.received[usize::from(self.id)].add_bytes(filled);
        Ok(true)
    }

    /// Hands the packet's pages on; false if the relay has ended.
    fn pages(&mut self) -> Result<bool, MigrationError> {
        if self.header.method() == Method::None && self.forward()? {
            return Ok(true);
        }
        let Some(mut batch) = self.session.flow.take() else {
            return Ok(false);
        };
        batch.start(self.header.block());
        batch.normal.extend_from_slice(self.header.normal());
        batch.zero.extend_from_slice(self.header.zero());
        if !self.header.normal().is_empty() {
            self.normal_pages(batch.pages_mut())?;
        }
        self.session.flow.submit(batch);
        Ok(true)
    }

    /// Passes the packet on as it is; false if that may not be done.
    fn forward(&mut self) -> Result<bool, MigrationError> {
        if self.forwarder.is_none() {
            self.forwarder = self.session.sink.forwarder(self.id);
        }
        let Some(forwarder) = &mut self.forwarder else {
            return Ok(false);
        };
        let header = &self.header;
        if !header.normal().is_empty() {
            self.rules.method = Some(Method::None);
        }
        forwarder.forward(self.stream, header.block(), header.normal(), header.zero())?;
        self.session.received[usize::from(self.id)].add_bytes(header.payload_len());
        self.session
            .pages
            .add_pages(header.normal().len(), header.zero().len());
        Ok(true)
    }

    fn normal_pages(&mut self, pages: &mut [u8]) -> Result<(), MigrationError> {
        let length = self.header.payload_len();
        self.session.received[usize::from(self.id)].add_bytes(length);
        let method = *self.rules.method.get_or_insert(self.header.method());
        let mut stream = self.stream;
        if method == Method::None {
            return stream
                .read_exact(pages)
                .map_err(|source| self.broken("reading pages", source));
        }
        let grown = self.payload.grow_to(length);
        grown.map_err(|source| MigrationError::memory(Channel::Multifd(self.id), source))?;
        if let Err(source) = stream.read_exact(&mut self.payload.as_mut()[..length]) {
            return Err(self.broken("reading a payload", source));
        }
        let payload = &self.payload[..length];
        self.header
            .check_payload(payload)
            .map_err(|source| self.wire(source))?;
        if self.decoder.is_none() {
            let known = METHODS.iter().find(|info| info.flag == method.flag());
            let info = known.ok_or_else(|| MigrationError::Protocol {
                channel: Channel::Multifd(self.id),
                got: format!("method {}", method.name()),
                doing: "reading pages (this build has no decoder for it)",
            })?;
            let session = self.session;
            self.decoder = Decoder::new(
                self.id,
                info,
                session.accelerator,
                &session.memory,
                &session.control,
            )?;
        }
        let block = &self.blocks[self.header.block()].name;
        match &mut self.decoder {
            Some(decoder) => decoder.decode(
                self.header.packet_num(),
                block,
                payload,
                &[GuestRun::of_buffer(pages)],
            ),
            None => Ok(()),
        }
    }

    fn wire(&self, source: hotlift_wire::WireError) -> MigrationError {
        MigrationError::Wire {
            channel: Channel::Multifd(self.id),
            source,
        }
    }

    fn broken(&self, doing: &'static str, source: io::Error) -> MigrationError {
        MigrationError::Connection {
            channel: Channel::Multifd(self.id),
            doing,
            source,
        }
    }
}

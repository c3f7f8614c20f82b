//! A multifd channel's thread on the destination: reads packets and puts their pages into guest RAM.
//!
//! With method none the pages go from the socket straight to their place; other methods decode into
//! it. A zero page is cleared unless nothing was ever put there: RAM that is fresh reads as zero, and
//! writing zeros would only make the kernel allocate it.

use hotlift_mem::{GuestRun, PAGE_SIZE};
use hotlift_wire::multifd::{PacketHeader, PacketRules};

use super::packets::PacketReader;
use super::session::Session;
use crate::codec::Decoder;
use crate::error::{Channel, MigrationError};
use crate::handover::DestinationSide;

pub(super) struct ChannelReceiver<'a> {
    session: &'a Session<'a>,
    id: u8,
    packets: PacketReader<'a>,
    rules: PacketRules,
    header: PacketHeader,
    /// `None` for method none.
    decoder: Option<Decoder>,
    payload: Vec<u8>,
    runs: Vec<GuestRun<'a>>,
}

impl<'a> ChannelReceiver<'a> {
    pub(super) fn new(session: &'a Session<'a>, id: u8) -> Result<Self, MigrationError> {
        let layout = session.accepted.layout;
        let options = session.options;
        let decoder = Decoder::new(
            id,
            options.multifd_compression,
            options.accelerator,
            &session.memory,
            &session.control,
        )?;
        Ok(Self {
            session,
            id,
            packets: PacketReader::new(
                &session.accepted.multifd[usize::from(id)],
                layout.header_len(),
            ),
            rules: PacketRules {
                layout,
                method: Some(session.method),
                checksum_required: session.is_hotlift(),
            },
            header: PacketHeader::new(layout),
            decoder,
            payload: Vec::new(),
            runs: Vec::with_capacity(layout.pages()),
        })
    }

    /// Works until the channel ends.
    pub(super) fn run(&mut self) -> Result<(), MigrationError> {
        loop {
            let id = self.id;
            let header = self.packets.header();
            let Some(bytes) =
                header.map_err(|source| broken(id, "reading a packet header", source))?
            else {
                return self.ended();
            };
            self.session.counters[usize::from(self.id)].add_bytes(bytes.len());
            self.header
                .decode(bytes, &self.rules, &self.session.blocks)
                .map_err(|source| MigrationError::Wire {
                    channel: Channel::Multifd(self.id),
                    source,
                })?;
            if !self.header.normal().is_empty() {
                self.normal_pages()?;
            }
            self.zero_pages()?;
            self.session.counters[usize::from(self.id)]
                .add_pages(self.header.normal().len(), self.header.zero().len());
            if self.header.sync() {
                if self.session.taking.side() == DestinationSide::Loading {
                    if !self.session.barrier.channel_arrives() {
                        return Ok(());
                    }
                } else {
                    // No barrier is left after everything has arrived: the source has committed. What
                    // it says behind that is for whoever waits until it knows the outcome.
                    return self.session.take_over();
                }
            }
        }
    }

    /// The channel ends between packets.
    fn ended(&self) -> Result<(), MigrationError> {
        if self.session.taking.side() == DestinationSide::Loading && self.session.is_hotlift() {
            return Err(MigrationError::Closed {
                channel: Channel::Multifd(self.id),
            });
        }
        self.session.barrier.channel_ends();
        Ok(())
    }

    fn normal_pages(&mut self) -> Result<(), MigrationError> {
        let session = self.session;
        let ram = &session.guest.ram()[self.header.block()];
        self.runs.clear();
        for run in self
            .header
            .normal()
            .chunk_by(|a, b| a + PAGE_SIZE as u64 == *b)
        {
            let offset = usize::try_from(run[0]).unwrap_or(usize::MAX);
            self.runs.push(ram.run(offset, run.len() * PAGE_SIZE)?);
            session.written[self.header.block()].set_range(offset / PAGE_SIZE, run.len());
        }
        let length = self.header.payload_len();
        session.counters[usize::from(self.id)].add_bytes(length);
        let Some(decoder) = &mut self.decoder else {
            return self
                .packets
                .pages(&mut self.runs)
                .map_err(|source| broken(self.id, "reading pages", source));
        };
        let payload = self
            .packets
            .payload(length, &mut self.payload)
            .map_err(|source| broken(self.id, "reading a payload", source))?;
        self.header
            .check_payload(payload)
            .map_err(|source| MigrationError::Wire {
                channel: Channel::Multifd(self.id),
                source,
            })?;
        decoder.decode(self.header.packet_num(), ram.name(), payload, &self.runs)
    }

    fn zero_pages(&self) -> Result<(), MigrationError> {
        let block = self.header.block();
        for offset in self.header.zero() {
            let offset = usize::try_from(*offset).unwrap_or(usize::MAX);
            if self.session.written[block].test(offset / PAGE_SIZE) {
                self.session.guest.ram()[block].zero(offset, PAGE_SIZE)?;
            }
        }
        Ok(())
    }
}

fn broken(id: u8, doing: &'static str, source: std::io::Error) -> MigrationError {
    MigrationError::Connection {
        channel: Channel::Multifd(id),
        doing,
        source,
    }
}

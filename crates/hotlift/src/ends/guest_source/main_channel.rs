//! The main channel on the source: what a guest has to send on it, and the PINGs between.
//!
//! QEMU's format has no checksum. Between two Hotlifts each PING on main carries the CRC-32 of every byte sent on main
//! before it, and the destination compares; a QEMU just answers PONG.

use std::sync::Arc;

use hotlift_mem::PAGE_SIZE;
use hotlift_wire::RamBlockEntry;
use hotlift_wire::handshake::Offer;
use hotlift_wire::main_channel::{Command, Configuration};

use crate::ends::guest_source::session::Session;
use crate::error::MigrationError;
use crate::guest::DeviceState;
use crate::stream::main_send::MainSend;

/// Writes the main channel.
pub(crate) struct MainSender<'a> {
    session: &'a Session<'a>,
    pub send: MainSend,
}

impl<'a> MainSender<'a> {
    pub(crate) fn new(session: &'a Session<'a>) -> Result<Self, MigrationError> {
        Ok(Self {
            session,
            send: MainSend::new(Arc::clone(&session.main), &configuration(session))?,
        })
    }

    /// What the stream begins with.
    pub(crate) fn configuration(&self) -> Configuration {
        configuration(self.session)
    }

    /// File header, configuration, the return path, and the PING that a Hotlift takes for `offer`.
    pub(crate) fn send_opening(&mut self, offer: Offer) -> Result<(), MigrationError> {
        self.send.command(Command::OpenReturnPath)?;
        self.send_ping(offer.ping())
    }

    /// The RAM blocks as the stream has them.
    pub(crate) fn blocks(&self) -> Vec<RamBlockEntry> {
        let ram = self.session.guest.ram().iter();
        ram.map(|block| RamBlockEntry::new(block.name(), block.len() as u64))
            .collect()
    }

    /// The RAM blocks; pairs with the first SYNC of every channel.
    pub(crate) fn send_ram_blocks(&mut self) -> Result<(), MigrationError> {
        let blocks = self.blocks();
        if self.session.options.postcopy_ram {
            let page_size = PAGE_SIZE as u64;
            self.send.command(Command::PostcopyAdvise {
                page_sizes: Some((page_size, page_size)),
            })?;
        }
        let multifd = self.session.options.multifd();
        self.send.ram_start(None, &blocks, multifd)?;
        self.section_sent()
    }

    /// The multifd flush that pairs with the round's SYNC packets, and the end of its section.
    pub(crate) fn send_flush(&mut self) -> Result<(), MigrationError> {
        self.send.end_section(self.session.options.multifd())?;
        self.section_sent()
    }

    /// All devices and a PING, whose answer says that they were loaded.
    pub(crate) fn send_devices(&mut self, devices: &[DeviceState]) -> Result<(), MigrationError> {
        for device in devices {
            self.send.device(device)?;
        }
        self.ping()
    }

    /// Closes what was sent with a checksum, for a peer that compares it. Behind the end of RAM a PING asks whether all
    /// is loaded, which is not to be asked before the devices are sent.
    fn section_sent(&mut self) -> Result<(), MigrationError> {
        if self.session.answers.id().is_some() && !self.send.is_completing() {
            return self.ping();
        }
        Ok(())
    }

    /// A PING with the CRC-32 of everything before it.
    pub(crate) fn ping(&mut self) -> Result<(), MigrationError> {
        self.send_ping(self.send.crc().unwrap_or_default())
    }

    fn send_ping(&mut self, value: u32) -> Result<(), MigrationError> {
        self.session.answers.ask(value);
        self.send.command(Command::Ping(value))
    }
}

fn configuration(session: &Session<'_>) -> Configuration {
    Configuration {
        machine: session.guest.machine().to_owned(),
        ..Configuration::default()
    }
}

//! The main channel on the source: what a guest has to send on it, and the PINGs between.
//!
//! QEMU's format has no checksum. Between two Hotlifts each PING on main carries the CRC-32 of every byte sent on main
//! before it, and the destination compares; a QEMU just answers PONG.

use std::collections::VecDeque;
use std::sync::Arc;
use std::sync::atomic::Ordering;

use hotlift_wire::RamBlockEntry;
use hotlift_wire::handshake::Offer;
use hotlift_wire::main_channel::{Command, Configuration};

use super::session::Session;
use crate::error::MigrationError;
use crate::guest::DeviceState;
use crate::hello;
use crate::stream::main_send::MainSend;

/// Writes the main channel.
pub(super) struct MainSender<'a> {
    session: &'a Session<'a>,
    pub send: MainSend,
    /// Values of the PINGs that have not been answered, oldest first.
    unanswered: VecDeque<u32>,
    peer_is_hotlift: bool,
}

impl<'a> MainSender<'a> {
    pub(super) fn new(session: &'a Session<'a>) -> Result<Self, MigrationError> {
        let configuration = Configuration {
            machine: session.guest.machine().to_owned(),
            ..Configuration::default()
        };
        Ok(Self {
            session,
            send: MainSend::new(Arc::clone(&session.main), &configuration)?,
            unanswered: VecDeque::new(),
            peer_is_hotlift: false,
        })
    }

    /// Whether the destination has said that it is a Hotlift.
    pub(super) fn peer_is_hotlift(&self) -> bool {
        self.peer_is_hotlift
    }

    pub(super) fn set_peer_is_hotlift(&mut self) {
        self.peer_is_hotlift = true;
    }

    /// Value of the oldest PING that has not been answered.
    pub(super) fn next_pong(&self) -> Option<u32> {
        self.unanswered.front().copied()
    }

    /// The oldest PING has been answered.
    pub(super) fn take_pong(&mut self) {
        self.unanswered.pop_front();
    }

    /// File header, configuration, the return path, and the PING that a Hotlift takes for an offer.
    pub(super) fn send_opening(&mut self) -> Result<(), MigrationError> {
        let features = hello::features(self.session.options);
        self.send.command(Command::OpenReturnPath)?;
        self.send_ping(Offer::new(features).ping())
    }

    /// The RAM blocks; pairs with the first SYNC of every channel.
    pub(super) fn send_ram_blocks(&mut self) -> Result<(), MigrationError> {
        let ram = self.session.guest.ram().iter();
        let blocks: Vec<_> = ram
            .map(|block| RamBlockEntry::new(block.name(), block.len() as u64))
            .collect();
        let multifd = self.session.options.multifd();
        self.send.ram_start(None, &blocks, multifd)?;
        self.section_sent()
    }

    /// The multifd flush that pairs with the round's SYNC packets, and the end of its section.
    pub(super) fn send_flush(&mut self) -> Result<(), MigrationError> {
        self.send.end_section(self.session.options.multifd())?;
        self.section_sent()
    }

    /// All devices and a PING, whose answer says that they were loaded.
    pub(super) fn send_devices(&mut self, devices: &[DeviceState]) -> Result<(), MigrationError> {
        for device in devices {
            self.send.device(device)?;
        }
        self.ping()
    }

    /// Closes what was sent with a checksum, for a peer that compares it. Behind the end of RAM a PING asks whether all
    /// is loaded, which is not to be asked before the devices are sent.
    fn section_sent(&mut self) -> Result<(), MigrationError> {
        if self.peer_is_hotlift && !self.send.is_completing() {
            return self.ping();
        }
        Ok(())
    }

    /// A PING with the CRC-32 of everything before it.
    pub(super) fn ping(&mut self) -> Result<(), MigrationError> {
        self.send_ping(self.send.crc().unwrap_or_default())
    }

    fn send_ping(&mut self, value: u32) -> Result<(), MigrationError> {
        self.unanswered.push_back(value);
        self.session.pings.fetch_add(1, Ordering::AcqRel);
        self.send.command(Command::Ping(value))
    }
}

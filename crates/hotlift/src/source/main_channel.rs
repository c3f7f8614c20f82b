//! The main channel on the source: set-up, marks between rounds, device state, end.
//!
//! QEMU's format has no checksum. Between two Hotlifts each PING on main carries the CRC-32 of every
//! byte sent on main before it, and the destination compares; a QEMU just answers PONG.

use std::collections::VecDeque;
use std::io::Write;
use std::sync::atomic::Ordering;

use hotlift_mem::GuestRun;
use hotlift_wire::RamBlockEntry;
use hotlift_wire::main_channel::{Command, Configuration, MainEncoder};

use super::session::Session;
use crate::error::{Channel, MigrationError};
use crate::guest::DeviceState;
use crate::hello::OPENING_PING;

/// Records are gathered up to this many bytes before they are written.
const GATHERED: usize = 64 << 10;

/// Writes the main channel.
pub(super) struct MainSender<'a> {
    session: &'a Session<'a>,
    encoder: Option<MainEncoder>,
    out: Vec<u8>,
    /// Of every byte written so far.
    crc: crc32fast::Hasher,
    /// Values of the PINGs that have not been answered, oldest first.
    unanswered: VecDeque<u32>,
    peer_is_hotlift: bool,
    in_section: bool,
    completing: bool,
}

impl<'a> MainSender<'a> {
    pub(super) fn new(session: &'a Session<'a>) -> Self {
        Self {
            session,
            encoder: None,
            out: Vec::with_capacity(2 * GATHERED),
            crc: crc32fast::Hasher::new(),
            unanswered: VecDeque::new(),
            peer_is_hotlift: false,
            in_section: false,
            completing: false,
        }
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

    /// File header, configuration, the return path, and a PING that a Hotlift knows.
    pub(super) fn send_opening(&mut self) -> Result<(), MigrationError> {
        let configuration = Configuration {
            machine: self.session.guest.machine().to_owned(),
            ..Configuration::default()
        };
        self.encoder = Some(MainEncoder::new(&configuration, &mut self.out).map_err(wire)?);
        self.record(|encoder, out| encoder.command(Command::OpenReturnPath, out))?;
        self.send_ping(OPENING_PING)
    }

    /// The RAM blocks; pairs with the first SYNC of every channel.
    pub(super) fn send_ram_blocks(&mut self) -> Result<(), MigrationError> {
        let blocks: Vec<_> = self
            .session
            .guest
            .ram()
            .iter()
            .map(|block| RamBlockEntry::new(block.name(), block.len() as u64))
            .collect();
        let multifd = self.session.options.multifd();
        self.record(|encoder, out| encoder.ram_start(&blocks, multifd, out))?;
        self.section_sent()
    }

    /// A page of zeros, in the round's section.
    pub(super) fn zero_page(&mut self, block: usize, offset: u64) -> Result<(), MigrationError> {
        self.open_section()?;
        self.record(|encoder, out| encoder.zero_page(block, offset, out))?;
        self.flush_if_full()
    }

    /// A page with its content, in the round's section. A page that changes while it is copied is
    /// dirty again.
    pub(super) fn normal_page(
        &mut self,
        block: usize,
        offset: u64,
        page: GuestRun<'_>,
    ) -> Result<(), MigrationError> {
        self.open_section()?;
        self.record(|encoder, out| encoder.normal_page_head(block, offset, out))?;
        let start = self.out.len();
        self.out.resize(start + page.len(), 0);
        page.copy_to(&mut self.out[start..]);
        self.flush_if_full()
    }

    /// The same of a page that has been copied.
    pub(super) fn copied_page(
        &mut self,
        block: usize,
        offset: u64,
        page: &[u8],
    ) -> Result<(), MigrationError> {
        self.open_section()?;
        self.record(|encoder, out| encoder.normal_page_head(block, offset, out))?;
        self.out.extend_from_slice(page);
        self.flush_if_full()
    }

    /// A page as what has changed of it since it was sent, in the round's section.
    pub(super) fn xbzrle_page(
        &mut self,
        block: usize,
        offset: u64,
        delta: &[u8],
    ) -> Result<(), MigrationError> {
        self.open_section()?;
        self.record(|encoder, out| encoder.xbzrle_page(block, offset, delta, out))?;
        self.flush_if_full()
    }

    /// A page as a zlib stream, in the round's section.
    pub(super) fn compressed_page(
        &mut self,
        block: usize,
        offset: u64,
        stream: &[u8],
    ) -> Result<(), MigrationError> {
        self.open_section()?;
        self.record(|encoder, out| encoder.compressed_page(block, offset, stream, out))?;
        self.flush_if_full()
    }

    /// The mark that pairs with the round's SYNC packets, and the end of its section.
    pub(super) fn send_flush(&mut self) -> Result<(), MigrationError> {
        self.open_section()?;
        if self.session.options.multifd() {
            self.record(|encoder, out| encoder.multifd_flush(out))?;
        }
        self.record(|encoder, out| encoder.ram_eos(out))?;
        self.in_section = false;
        self.section_sent()
    }

    /// The next section is the last of RAM.
    pub(super) fn complete(&mut self) {
        self.completing = true;
    }

    /// All devices and a PING, whose answer says that they were loaded.
    pub(super) fn send_devices(&mut self, devices: &[DeviceState]) -> Result<(), MigrationError> {
        for device in devices {
            self.record(|encoder, out| {
                encoder.device(
                    &device.idstr,
                    device.instance_id,
                    device.version_id,
                    &device.payload,
                    out,
                )
            })?;
            self.flush()?;
        }
        self.ping()
    }

    /// The end of the stream. Errors are for whoever waits for the answer: by now the same word goes
    /// out on every socket.
    pub(super) fn send_end_of_file(&mut self) {
        let Some(mut encoder) = self.encoder.take() else {
            return;
        };
        if encoder.eof(&mut self.out).is_ok() && encoder.vm_description(&mut self.out).is_ok() {
            let _ = self.flush();
        }
    }

    fn open_section(&mut self) -> Result<(), MigrationError> {
        if !self.in_section {
            let completing = self.completing;
            self.record(|encoder, out| {
                if completing {
                    encoder.ram_end(out)
                } else {
                    encoder.ram_part(out)
                }
            })?;
            self.in_section = true;
        }
        Ok(())
    }

    /// Closes what was sent with a checksum, for a peer that compares it. Behind the end of RAM a
    /// PING asks whether all is loaded, which is not to be asked before the devices are sent.
    fn section_sent(&mut self) -> Result<(), MigrationError> {
        if self.peer_is_hotlift && !self.completing {
            self.ping()
        } else {
            self.flush()
        }
    }

    /// A PING with the CRC-32 of everything before it.
    fn ping(&mut self) -> Result<(), MigrationError> {
        self.flush()?;
        self.send_ping(self.crc.clone().finalize())
    }

    fn send_ping(&mut self, value: u32) -> Result<(), MigrationError> {
        self.record(|encoder, out| encoder.command(Command::Ping(value), out))?;
        self.unanswered.push_back(value);
        self.session.pings.fetch_add(1, Ordering::AcqRel);
        self.flush()
    }

    fn record(
        &mut self,
        write: impl FnOnce(&mut MainEncoder, &mut Vec<u8>) -> Result<(), hotlift_wire::WireError>,
    ) -> Result<(), MigrationError> {
        match &mut self.encoder {
            Some(encoder) => write(encoder, &mut self.out).map_err(wire),
            None => Ok(()),
        }
    }

    fn flush_if_full(&mut self) -> Result<(), MigrationError> {
        if self.out.len() >= GATHERED {
            self.flush()?;
        }
        Ok(())
    }

    /// Writes what was gathered.
    fn flush(&mut self) -> Result<(), MigrationError> {
        self.crc.update(&self.out);
        self.session
            .pacer
            .wait(self.out.len(), &self.session.control);
        let mut stream = &self.session.connections.main;
        stream
            .write_all(&self.out)
            .map_err(|source| MigrationError::Connection {
                channel: Channel::Main,
                doing: "sending",
                source,
            })?;
        self.session.main_counters().add_bytes(self.out.len());
        self.out.clear();
        Ok(())
    }
}

fn wire(source: hotlift_wire::WireError) -> MigrationError {
    MigrationError::Wire {
        channel: Channel::Main,
        source,
    }
}

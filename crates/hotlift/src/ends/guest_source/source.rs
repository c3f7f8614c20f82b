//! What the threads of one outgoing migration share of its guest, and what each of them does.

use std::net::Shutdown;
use std::sync::atomic::{AtomicU64, Ordering};
use std::sync::{Arc, Mutex, OnceLock};
use std::time::{Duration, Instant};

use hotlift_wire::RamBlockEntry;
use hotlift_wire::return_path::ReturnMessage;

use crate::control::Control;
use crate::ends::guest_source::channel::ChannelSender;
use crate::ends::guest_source::rounds::Rounds;
use crate::ends::guest_source::zero_devices::ZeroDevices;
use crate::error::{Channel, MigrationError};
use crate::figures::{ByteFigures, JobFigures};
use crate::guest::Guest;
use crate::life::failure::Failure;
use crate::lock::lock;
use crate::options::Options;
use crate::pipe::session::Session;
use crate::pipe::source::Source;
use crate::pipe::stream_out::StreamOut;
use crate::postcopy::Ledger;
use crate::precopy::ram::RamState;
use crate::status::Status;

/// Time between two samples of the bytes that are sent while the guest is paused.
const STANDSTILL_SAMPLE: Duration = Duration::from_millis(100);

/// A guest that leaves.
pub(crate) struct GuestSource<'a> {
    pub guest: &'a dyn Guest,
    pub options: &'a Options,
    pub control: &'a Control,
    /// Where its pages go.
    pub out: &'a StreamOut,
    /// Devices that look for zero pages.
    pub zero_devices: Option<ZeroDevices>,
    pub ram: RamState<'a>,
    pub rounds: Rounds,
    /// Bytes that had been written to main when the guest was stopped.
    main_at_stop: OnceLock<u64>,
    /// The same when it was told to run at the destination, of a postcopy.
    main_at_postcopy: OnceLock<u64>,
    /// Of a postcopy, what the connection carries over which it has begun.
    pub ledger: OnceLock<Arc<Ledger>>,
    /// Why that connection was lost.
    pub lost: Failure,
    /// RAM block of the last request for pages on it.
    asked_block: Mutex<Option<usize>>,
    /// Pages that were asked for, over all connections.
    pub postcopy_requests: AtomicU64,
    /// Pages that channels have looked at, where devices were to.
    pub looked_at: AtomicU64,
    /// Bytes written while the guest stands still, and when there were more last.
    moved: Mutex<(u64, Instant)>,
}

/// What one of its threads does.
enum Reader {
    /// Sends the pages of a multifd channel.
    Channel(u8),
    /// Takes what devices have found.
    Devices,
    /// Is such a device.
    Simulated(usize),
}

impl<'a> GuestSource<'a> {
    pub(crate) fn new(
        guest: &'a dyn Guest,
        options: &'a Options,
        control: &'a Control,
        out: &'a StreamOut,
        zero_devices: Option<ZeroDevices>,
    ) -> Self {
        Self {
            guest,
            options,
            control,
            out,
            zero_devices,
            ram: RamState::new(guest),
            rounds: Rounds::new(out.multifd.len(), control.life()),
            main_at_stop: OnceLock::new(),
            main_at_postcopy: OnceLock::new(),
            ledger: OnceLock::new(),
            lost: Failure::default(),
            asked_block: Mutex::default(),
            postcopy_requests: AtomicU64::new(0),
            looked_at: AtomicU64::new(0),
            moved: Mutex::new((0, Instant::now())),
        }
    }

    /// The RAM blocks as the stream has them.
    pub(crate) fn blocks(&self) -> Vec<RamBlockEntry> {
        let ram = self.guest.ram().iter();
        ram.map(|block| RamBlockEntry::new(block.name(), block.len() as u64))
            .collect()
    }

    fn main_bytes(&self) -> u64 {
        self.out.link.counters.read().transferred_bytes
    }

    /// The guest has been stopped.
    pub(crate) fn guest_stopped(&self) {
        let _ = self.main_at_stop.set(self.main_bytes());
        // The watch looks at what is sent from here on.
        self.control.life().wake();
    }

    /// Whether [`Self::guest_stopped`] has come.
    pub(crate) fn is_guest_stopped(&self) -> bool {
        self.main_at_stop.get().is_some()
    }

    /// Whether what is left of a round is to be sent when the guest runs at the destination.
    pub(crate) fn cuts_round(&self) -> bool {
        self.options.postcopy_ram && self.control.wants_postcopy() && !self.is_guest_stopped()
    }

    /// From now on what is written gives a guest its pages that runs at the destination.
    pub(crate) fn postcopy_begins(&self) {
        let _ = self.main_at_postcopy.set(self.main_bytes());
    }

    /// The connection of a postcopy has ended before its time. Before the commit, which it then keeps from coming, that is a
    /// failure as any other.
    fn lose(&self, session: &Session<'_>, error: MigrationError) {
        if session.giving.is_committed() {
            self.lost.keep(error);
        } else {
            session.fail(error);
            // Unless the commit came first.
            if !session.giving.is_committed() {
                return;
            }
        }
        self.out.answers.end();
        if let Some(ledger) = self.ledger.get() {
            ledger.requests.abandon();
        }
        self.out.link.transport.shutdown(Shutdown::Both);
    }

    /// Bytes written, by where and when.
    pub(crate) fn bytes(&self) -> ByteFigures {
        let all = self.out.counts().transferred_bytes;
        let main = self.main_bytes();
        let precopy = self.main_at_stop.get().copied().unwrap_or(main);
        let postcopy = self.main_at_postcopy.get();
        let postcopy = postcopy.map_or(0, |before| main.saturating_sub(*before));
        ByteFigures {
            // The main channel may have grown since.
            multifd: all.saturating_sub(main),
            precopy,
            downtime: main - precopy - postcopy,
            postcopy,
        }
    }

    /// Shows what devices have found, or the CPU in their place.
    pub(crate) fn show_zero_jobs(&self) {
        let stats = self.control.accelerator_stats();
        if let Some(devices) = &self.zero_devices {
            stats.set_zero(devices.figures());
        } else if self.options.zero_page_devices {
            stats.set_zero(JobFigures {
                software: self.looked_at.load(Ordering::Relaxed),
                ..stats.read_zero()
            });
        }
    }

    /// What a thread does.
    fn reader(&self, number: usize) -> Reader {
        let channels = self.out.multifd.len();
        if let Ok(id) = u8::try_from(number)
            && number < channels
        {
            Reader::Channel(id)
        } else if number == channels {
            Reader::Devices
        } else {
            Reader::Simulated(number - channels - 1)
        }
    }
}

impl Source for GuestSource<'_> {
    fn readers(&self) -> usize {
        let devices = self.zero_devices.as_ref();
        let devices = devices.map_or(0, |devices| 1 + devices.models.len());
        self.out.multifd.len() + devices
    }

    fn thread_name(&self, reader: usize) -> String {
        match self.reader(reader) {
            Reader::Channel(id) => self.name(&format!("send_{id}")),
            // QEMU's series calls it so.
            Reader::Devices => "dsa_completion".to_owned(),
            Reader::Simulated(_) => "dsa_simulated".to_owned(),
        }
    }

    fn name(&self, thread: &str) -> String {
        format!("mig/src/{thread}")
    }

    fn worker_name(&self, worker: usize) -> String {
        format!("compress_{worker}")
    }

    fn read(&self, _: &Session<'_>, reader: usize) -> Result<(), MigrationError> {
        match (self.reader(reader), &self.zero_devices) {
            (Reader::Channel(id), _) => ChannelSender::new(self, id)?.run()?,
            (Reader::Devices, Some(devices)) => devices.finder.listen(),
            (Reader::Simulated(number), Some(devices)) => devices.models[number].run(),
            (Reader::Devices | Reader::Simulated(_), None) => {}
        }
        Ok(())
    }

    fn answer(
        &self,
        session: &Session<'_>,
        channel: Channel,
        message: &ReturnMessage<'_>,
        _: &[u8],
    ) -> Result<(), MigrationError> {
        if let (Channel::Main, Some(ledger)) = (channel, self.ledger.get()) {
            ledger.note(&mut lock(&self.asked_block), message, Instant::now())?;
        }
        if session.giving.is_committed() {
            // The word may still come behind it.
            return Ok(());
        }
        Err(match (message, self.out.answers.next_pong()) {
            (ReturnMessage::Pong(pong), Some(ping)) => MigrationError::Mismatch {
                what: "the value of PING and PONG".to_owned(),
                source_has: format!("{ping:#x}"),
                destination_has: format!("{pong:#x}"),
            },
            (other, _) => MigrationError::Protocol {
                channel,
                got: format!("{other:?}"),
                doing: "a precopy migration",
            },
        })
    }

    fn lost(&self, session: &Session<'_>, channel: Channel, error: MigrationError) {
        match self.ledger.get() {
            // Requests come on main alone.
            Some(_) if channel == Channel::Main => self.lose(session, error),
            // Behind the commit the word may come on the other connections; before it, this is the end.
            _ => session.fail(error),
        }
    }

    /// Ends what no other thread can: one that is blocked in a write while the guest stands still for a destination that
    /// takes nothing.
    fn look(&self, session: &Session<'_>, now: Instant) -> Option<Instant> {
        if !self.is_guest_stopped() {
            return None;
        }
        let transferred = self.out.counts().transferred_bytes;
        let mut moved = lock(&self.moved);
        if transferred != moved.0 || self.control.status() != Status::Device {
            *moved = (transferred, now);
        }
        let limit = self.options.handshake_timeout;
        if now.saturating_duration_since(moved.1) > limit {
            session.fail(MigrationError::Timeout {
                waiting_for: "any progress while the guest stands still".to_owned(),
                waited: limit,
            });
        }
        Some(now + STANDSTILL_SAMPLE)
    }

    fn shut_down(&self) {
        self.over();
    }

    fn over(&self) {
        self.rounds.end();
        // Whoever takes one sees that it is over.
        self.ram.release_all();
        if let Some(devices) = &self.zero_devices {
            devices.close();
        }
    }
}

//! State of the guest that the threads of one outgoing migration share.

use std::net::Shutdown;
use std::sync::atomic::{AtomicU64, Ordering};
use std::sync::{Arc, Mutex, OnceLock};
use std::time::Instant;

use crate::control::Control;
use crate::ends::guest_source::rounds::Rounds;
use crate::ends::guest_source::zero_devices::ZeroDevices;
use crate::error::MigrationError;
use crate::figures::{ByteFigures, JobFigures};
use crate::guest::Guest;
use crate::life::failure::Failure;
use crate::options::Options;
use crate::pipe::session::Session;
use crate::pipe::stream_out::StreamOut;
use crate::postcopy::Ledger;
use crate::precopy::ram::RamState;

/// An outgoing guest: the state of its migration at the source.
pub(crate) struct GuestSource<'a> {
    pub guest: &'a dyn Guest,
    pub options: &'a Options,
    pub control: &'a Control,
    /// Stream to the destination.
    pub out: &'a StreamOut,
    /// Devices for zero-page detection.
    pub zero_devices: Option<ZeroDevices>,
    pub ram: RamState<'a>,
    pub rounds: Rounds,
    /// Bytes written to main before the guest was stopped.
    main_at_stop: OnceLock<u64>,
    /// Bytes written to main before the guest started at the destination, in postcopy.
    main_at_postcopy: OnceLock<u64>,
    /// Pages sent over the current connection of a postcopy.
    pub ledger: OnceLock<Arc<Ledger>>,
    /// Error that ended the current connection of a postcopy.
    pub lost: Failure,
    /// RAM block of the last page request on the current connection of a postcopy.
    pub(super) asked_block: Mutex<Option<usize>>,
    /// Number of requested pages, over all connections.
    pub postcopy_requests: AtomicU64,
    /// Pages checked for zeros by channels instead of devices.
    pub checked_pages: AtomicU64,
    /// Bytes written while the guest is paused, and the time of their last increase.
    pub(super) last_progress: Mutex<(u64, Instant)>,
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
            checked_pages: AtomicU64::new(0),
            last_progress: Mutex::new((0, Instant::now())),
        }
    }

    fn main_bytes(&self) -> u64 {
        self.out.link.counters.read().transferred_bytes
    }

    /// Records that the guest has been stopped.
    pub(crate) fn guest_stopped(&self) {
        let _ = self.main_at_stop.set(self.main_bytes());
        // The watch thread checks for stalls from now on.
        self.control.life().wake();
    }

    /// Returns true after [`Self::guest_stopped`].
    pub(crate) fn is_guest_stopped(&self) -> bool {
        self.main_at_stop.get().is_some()
    }

    /// Returns true if the channels must stop the round, because postcopy begins and sends its remaining pages.
    pub(crate) fn cuts_round(&self) -> bool {
        self.options.postcopy.ram && self.control.wants_postcopy() && !self.is_guest_stopped()
    }

    /// Records that bytes written to main from now on belong to postcopy.
    pub(crate) fn postcopy_begins(&self) {
        let _ = self.main_at_postcopy.set(self.main_bytes());
    }

    /// Handles the loss of a postcopy's connection. Before the commit, the loss fails the migration, and there will be no
    /// commit. After it, another connection can replace the lost one.
    pub(super) fn lose(&self, session: &Session<'_>, error: MigrationError) {
        if session.source_handover.is_committed() {
            self.lost.keep(error);
        } else {
            session.fail(error);
            // The commit may have happened first.
            if !session.source_handover.is_committed() {
                return;
            }
        }
        self.out.answers.end();
        if let Some(ledger) = self.ledger.get() {
            ledger.life.close();
        }
        self.out.link.transport.shutdown(Shutdown::Both);
    }

    /// Returns the bytes written, by channel and phase.
    pub(crate) fn bytes(&self) -> ByteFigures {
        let all = self.out.counts().transferred_bytes;
        let main = self.main_bytes();
        let precopy = self.main_at_stop.get().copied().unwrap_or(main);
        let postcopy = self.main_at_postcopy.get();
        let postcopy = postcopy.map_or(0, |before| main.saturating_sub(*before));
        ByteFigures {
            // The main channel may have grown since the first reading.
            multifd: all.saturating_sub(main),
            precopy,
            downtime: main - precopy - postcopy,
            postcopy,
        }
    }

    /// Updates the statistics of zero-page detection: by the devices, or by the CPU as their replacement.
    pub(crate) fn show_zero_jobs(&self) {
        let stats = self.control.accelerator_stats();
        if let Some(devices) = &self.zero_devices {
            stats.set_zero(devices.figures());
        } else if self.options.zero_pages.devices {
            stats.set_zero(JobFigures {
                software: self.checked_pages.load(Ordering::Relaxed),
                ..stats.read_zero()
            });
        }
    }
}

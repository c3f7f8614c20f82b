//! What the threads of one outgoing migration share of its guest, and what each of them does.

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
    pub(super) asked_block: Mutex<Option<usize>>,
    /// Pages that were asked for, over all connections.
    pub postcopy_requests: AtomicU64,
    /// Pages that channels have looked at, where devices were to.
    pub looked_at: AtomicU64,
    /// Bytes written while the guest stands still, and when there were more last.
    pub(super) moved: Mutex<(u64, Instant)>,
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
    pub(super) fn lose(&self, session: &Session<'_>, error: MigrationError) {
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
            ledger.life.close();
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
}

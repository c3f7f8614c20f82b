//! What the threads of one outgoing migration share, and how any of them ends it.

use std::net::Shutdown;
use std::sync::atomic::{AtomicU64, Ordering};
use std::sync::{Arc, OnceLock};

use hotlift_wire::multifd::Hello;

use crate::control::Control;
use crate::ends::guest_source::compress_threads::CompressThreads;
use crate::ends::guest_source::zero_devices::ZeroDevices;
use crate::error::MigrationError;
use crate::failure::Failure;
use crate::figures::{ByteFigures, Counts, JobFigures, ThreadTimes};
use crate::guest::Guest;
use crate::handover::Giving;
use crate::options::Options;
use crate::pacing::Pacer;
use crate::pipe::gate::Gate;
use crate::postcopy::Ledger;
use crate::precopy::ram::RamState;
use crate::stream::main_send::MainLink;
use crate::stream::multifd_send::MultifdSend;
use crate::stream::return_path::Answers;
use crate::transport::Stream;

/// One outgoing migration.
pub(crate) struct Session<'a> {
    pub guest: &'a dyn Guest,
    pub options: &'a Options,
    pub control: Control,
    pub main: Arc<MainLink>,
    pub multifd: MultifdSend,
    /// Devices that look for zero pages.
    pub zero_devices: Option<ZeroDevices>,
    pub ram: RamState<'a>,
    pub gate: Gate,
    pub compress: CompressThreads,
    pub pacer: Arc<Pacer>,
    /// Bytes that had been written to main when the guest was stopped.
    main_at_stop: OnceLock<u64>,
    /// The same when it was told to run at the destination, of a postcopy.
    main_at_postcopy: OnceLock<u64>,
    /// Of a postcopy, what the connection carries over which it has begun.
    pub ledger: OnceLock<Arc<Ledger>>,
    /// Why that connection was lost.
    pub lost: Failure,
    /// Pages that were asked for, over all connections.
    pub postcopy_requests: AtomicU64,
    /// Pages that channels have looked at, where devices were to.
    pub looked_at: AtomicU64,
    /// CPU time of the threads that have ended.
    pub threads: ThreadTimes,
    pub giving: Giving,
    pub answers: Answers,
}

impl<'a> Session<'a> {
    pub(crate) fn new(
        guest: &'a dyn Guest,
        options: &'a Options,
        control: Control,
        hello: &Hello,
        (main, multifd): (Stream, Vec<Stream>),
        zero_devices: Option<ZeroDevices>,
    ) -> Self {
        let pacer = control.steering().pacer(options);
        let multifd = MultifdSend::new(multifd, hello, control.sending(options, &pacer));
        Self {
            guest,
            options,
            main: Arc::new(MainLink {
                transport: main,
                counters: Arc::default(),
                pacer: Arc::clone(&pacer),
                life: control.life().clone(),
            }),
            zero_devices,
            ram: RamState::new(guest),
            gate: Gate::new(multifd.len()),
            compress: CompressThreads::new(options),
            multifd,
            pacer,
            main_at_stop: OnceLock::new(),
            main_at_postcopy: OnceLock::new(),
            ledger: OnceLock::new(),
            lost: Failure::default(),
            postcopy_requests: AtomicU64::new(0),
            looked_at: AtomicU64::new(0),
            threads: ThreadTimes::default(),
            giving: Giving::default(),
            answers: Answers::new(control.life()),
            control,
        }
    }

    /// All counters together.
    pub(crate) fn counts(&self) -> Counts {
        [self.multifd.counts(), self.main.counters.read()]
            .into_iter()
            .sum()
    }

    /// The guest has been stopped.
    pub(crate) fn guest_stopped(&self) {
        let main = self.main.counters.read().transferred_bytes;
        let _ = self.main_at_stop.set(main);
    }

    /// Whether what is left of a round is to be sent when the guest runs at the destination.
    pub(crate) fn cuts_round(&self) -> bool {
        self.options.postcopy_ram
            && self.control.wants_postcopy()
            && self.main_at_stop.get().is_none()
    }

    /// From now on what is written gives a guest its pages that runs at the destination.
    pub(crate) fn postcopy_begins(&self) {
        let main = self.main.counters.read().transferred_bytes;
        let _ = self.main_at_postcopy.set(main);
    }

    /// The connection of a postcopy has ended before its time. Before the commit, which it then keeps from coming, that is a
    /// failure as any other.
    pub(crate) fn lose(&self, error: MigrationError) {
        if self.giving.is_committed() {
            self.lost.keep(error);
        } else {
            self.fail(error);
            // Unless the commit came first.
            if !self.giving.is_committed() {
                return;
            }
        }
        self.answers.end();
        if let Some(ledger) = self.ledger.get() {
            ledger.requests.abandon();
        }
        self.main.transport.shutdown(Shutdown::Both);
    }

    /// Bytes written, by where and when.
    pub(crate) fn bytes(&self) -> ByteFigures {
        let all = self.counts().transferred_bytes;
        let main = self.main.counters.read().transferred_bytes;
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

    /// Keeps `error` if it is the first, and ends every thread's waiting. What the other side has to say about the
    /// failure can still be read. After the commit this does nothing (see [`Giving::fail`]).
    pub(crate) fn fail(&self, error: MigrationError) {
        if self.giving.fail(error) {
            self.release_all();
        }
    }

    /// The same after the commit, when no answer is to be expected any more.
    pub(crate) fn end(&self, error: MigrationError) {
        self.giving.end(error);
        self.release_all();
    }

    /// Ends all waiting and sending.
    fn release_all(&self) {
        self.control.life().stop();
        self.answers.abort();
        self.gate.break_up();
        self.compress.end();
        self.ram.abandon();
        self.multifd.shut_down();
        self.main.transport.shutdown(Shutdown::Write);
    }

    /// Tells what devices have found, or the CPU in their place.
    pub(crate) fn tell_zero_jobs(&self) {
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

    /// A thread has panicked: frees all others.
    pub(crate) fn abort(&self) {
        if let Some(devices) = &self.zero_devices {
            devices.close();
        }
        self.end(MigrationError::panicked_here());
        self.shut_down();
    }

    /// The point of no return. False if the migration has failed; nothing fails it any more once this is true.
    pub(crate) fn commit(&self) -> bool {
        let may = self.giving.commit(|| !self.control.life().is_stopped());
        if may {
            self.answers.commit();
        }
        self.control.set_too_late(may);
        may
    }

    /// The point of no return of a postcopy, see [`Session::commit`].
    pub(crate) fn serve(&self) -> bool {
        let may = self.giving.serve(|| !self.control.life().is_stopped());
        if may {
            self.answers.serve();
        }
        self.control.set_too_late(may);
        may
    }

    /// Closes every connection in both directions.
    pub(crate) fn shut_down(&self) {
        for stream in self.streams() {
            stream.shutdown(Shutdown::Both);
        }
    }

    /// All connections, the main channel first.
    pub(crate) fn streams(&self) -> impl Iterator<Item = &Stream> {
        std::iter::once(&self.main.transport).chain(self.multifd.sockets())
    }
}

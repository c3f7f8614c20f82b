//! What the threads of one outgoing migration share, and how any of them ends it.

use std::net::Shutdown;
use std::sync::atomic::{AtomicU64, Ordering};
use std::sync::{Arc, Mutex, MutexGuard, OnceLock, PoisonError};

use hotlift_wire::multifd::{Hello, Method};
use hotlift_wire::settle::MigrationId;

use super::compress_threads::CompressThreads;
use super::gate::Gate;
use super::ram::RamState;
use super::zero_devices::ZeroDevices;
use crate::control::Control;
use crate::error::MigrationError;
use crate::failure::Failure;
use crate::figures::{ByteFigures, Counters, Counts, JobFigures, ThreadTimes};
use crate::guest::Guest;
use crate::handover::{SourceSide, Verdict, Word};
use crate::options::Options;
use crate::pacing::Pacer;
use crate::stream::channel_transport::ChannelTransport;
use crate::stream::main_send::MainLink;
use crate::stream::multifd_send::MultifdSend;
use crate::transport::Stream;

/// One outgoing migration.
pub(super) struct Session<'a> {
    pub guest: &'a dyn Guest,
    pub options: &'a Options,
    pub control: Control,
    /// The wire's number of `options.multifd_compression`.
    pub method: Method,
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
    /// PINGs sent on main; the destination has no more PONGs to send.
    pub pings: AtomicU64,
    /// Pages that channels have looked at, where devices were to.
    pub looked_at: AtomicU64,
    /// CPU time of the threads that have ended.
    pub threads: ThreadTimes,
    pub failure: Failure,
    /// Why the destination gave up, in its words.
    reason: Mutex<Option<String>>,
    side: Mutex<SourceSide>,
    /// What the destination calls this migration, once it has said so.
    id: OnceLock<MigrationId>,
}

impl<'a> Session<'a> {
    pub(super) fn new(
        guest: &'a dyn Guest,
        options: &'a Options,
        control: Control,
        hello: &Hello,
        (main, multifd): (Stream, Vec<ChannelTransport>),
        zero_devices: Option<ZeroDevices>,
    ) -> Self {
        let pacer = control.pacer(options);
        let multifd = MultifdSend::new(multifd, hello, &pacer, &control);
        Self {
            guest,
            options,
            method: hello.method,
            main: Arc::new(MainLink {
                transport: ChannelTransport::Socket(main),
                counters: Counters::default(),
                pacer: Arc::clone(&pacer),
                control: control.clone(),
            }),
            zero_devices,
            ram: RamState::new(guest),
            gate: Gate::new(multifd.len()),
            compress: CompressThreads::new(options),
            multifd,
            pacer,
            main_at_stop: OnceLock::new(),
            control,
            pings: AtomicU64::new(0),
            looked_at: AtomicU64::new(0),
            threads: ThreadTimes::default(),
            failure: Failure::default(),
            reason: Mutex::new(None),
            side: Mutex::default(),
            id: OnceLock::new(),
        }
    }

    /// All counters together.
    pub(super) fn counts(&self) -> Counts {
        [self.multifd.counts(), self.main.counters.read()]
            .into_iter()
            .sum()
    }

    /// The guest has been stopped.
    pub(super) fn guest_stopped(&self) {
        let main = self.main.counters.read().transferred_bytes;
        let _ = self.main_at_stop.set(main);
    }

    /// Bytes written, by where and when.
    pub(super) fn bytes(&self) -> ByteFigures {
        let all = self.counts().transferred_bytes;
        let main = self.main.counters.read().transferred_bytes;
        let precopy = self.main_at_stop.get().copied().unwrap_or(main);
        ByteFigures {
            // The main channel may have grown since.
            multifd: all.saturating_sub(main),
            precopy,
            downtime: main - precopy,
        }
    }

    /// Keeps `error` if it is the first, and ends every thread's waiting. What the other side has to
    /// say about the failure can still be read from the main channel. After [`Session::commit`] this
    /// does nothing: the sockets that are left may bring the destination's answer, and what ends behind a
    /// refusal is not the reason.
    pub(super) fn fail(&self, error: MigrationError) {
        let mut failure = self.failure.lock();
        let verdict = {
            let mut side = self.lock_side();
            side.fail();
            side.verdict()
        };
        if verdict == Some(Verdict::Kept) {
            failure.get_or_insert(error);
            self.release_all();
        }
    }

    /// The same after [`Session::commit`], when no answer is to be expected any more.
    pub(super) fn end(&self, error: MigrationError) {
        self.failure.keep(error);
        self.release_all();
    }

    /// Ends all waiting and sending.
    fn release_all(&self) {
        self.control.stop();
        self.gate.break_up();
        self.compress.end();
        self.ram.abandon();
        self.multifd.shut_down();
        self.main.transport.shut_down(Shutdown::Write);
    }

    /// Tells what devices have found, or the CPU in their place.
    pub(super) fn tell_zero_jobs(&self) {
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
    pub(super) fn abort(&self) {
        if let Some(devices) = &self.zero_devices {
            devices.close();
        }
        self.end(MigrationError::panicked_here());
        self.shut_down();
    }

    /// Keeps what the destination says about a failure.
    pub(super) fn explain(&self, reason: String) {
        self.reason
            .lock()
            .unwrap_or_else(PoisonError::into_inner)
            .get_or_insert(reason);
    }

    /// Takes the error that ended the migration, if one has: what the destination said in place of
    /// what its going away looked like from here. (After a time-out here it only says that it was
    /// left.)
    pub(super) fn take_failure(&self) -> Option<MigrationError> {
        let reason = self.take_reason();
        match (self.failure.take()?, reason) {
            (MigrationError::Connection { .. } | MigrationError::Closed { .. }, Some(reason)) => {
                Some(MigrationError::Destination { reason })
            }
            (error, _) => Some(error),
        }
    }

    /// The point of no return: from here on the guest is the destination's, and no cut connection
    /// may bring it back to life here. False if the migration has failed; nothing fails it any more
    /// once this is true.
    pub(super) fn commit(&self) -> bool {
        let failure = self.failure.lock();
        let may = failure.is_none() && !self.control.is_stopped() && self.lock_side().commit();
        self.control.set_too_late(may);
        may
    }

    /// True after [`Session::commit`], unless the destination has said that it never runs the guest.
    pub(super) fn is_committed(&self) -> bool {
        self.lock_side().is_committed()
    }

    /// What became of the guest, by the destination's word or for want of one.
    pub(super) fn settle(&self, word: Option<Word>) {
        let mut side = self.lock_side();
        match word {
            Some(word) => side.hear(word),
            None => side.give_up(),
        };
    }

    fn lock_side(&self) -> MutexGuard<'_, SourceSide> {
        self.side.lock().unwrap_or_else(PoisonError::into_inner)
    }

    /// The destination is a Hotlift that calls the migration so.
    pub(super) fn set_id(&self, id: MigrationId) {
        let _ = self.id.set(id);
    }

    /// What a destination that is a Hotlift calls the migration.
    pub(super) fn id(&self) -> Option<MigrationId> {
        self.id.get().copied()
    }

    /// What the destination has given for a reason.
    pub(super) fn take_reason(&self) -> Option<String> {
        let mut reason = self.reason.lock().unwrap_or_else(PoisonError::into_inner);
        reason.take()
    }

    /// Closes every connection in both directions.
    pub(super) fn shut_down(&self) {
        for stream in self.streams() {
            stream.shutdown(Shutdown::Both);
        }
    }

    /// All connections, the main channel first.
    pub(super) fn streams(&self) -> impl Iterator<Item = &Stream> {
        let main = self.main.transport.socket();
        main.into_iter().chain(self.multifd.sockets())
    }
}

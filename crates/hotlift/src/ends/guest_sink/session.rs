//! What the threads of one incoming migration share, and how any of them ends it.

use std::io::Write;
use std::net::Shutdown;
use std::sync::atomic::{AtomicBool, Ordering};
use std::sync::{Arc, Mutex, OnceLock};
use std::time::{Duration, Instant};

use hotlift_mem::DirtyBitmap;
use hotlift_methods::MemoryLimit;
use hotlift_wire::RamBlockEntry;
use hotlift_wire::return_path::ReturnMessage;
use hotlift_wire::settle::MigrationId;

use crate::control::Control;
use crate::cpu_limit::CpuBudget;
use crate::ends::guest_sink::announce;
use crate::ends::guest_sink::decompress_threads::{DecompressThreads, Target};
use crate::error::{Channel, MigrationError};
use crate::figures::{Counters, Counts, PostcopyFigures};
use crate::guest::Guest;
use crate::handover::{DestinationSide, Taking};
use crate::life::threads::{OnPanic, ThreadTimes};
use crate::liveness::Liveness;
use crate::options::{CHANNEL_MEMORY, Options};
use crate::pipe::barrier::Barrier;
use crate::pipe::stream_in::StreamIn;
use crate::status::{MigrationEvent, Status};
use crate::stream::door::{Arrival, Asked, Door, Kind};
use crate::stream::main_recv::Waiting;
use crate::stream::preempt::PreemptIn;
use crate::stream::return_path::encode;
use crate::transport::Stream;

/// One incoming migration.
pub(crate) struct Session<'a> {
    pub guest: &'a dyn Guest,
    pub options: &'a Options,
    pub control: Control,
    /// What the source can make this side take.
    pub memory: MemoryLimit,
    /// CPU time that its channels may take.
    pub cpu: Arc<CpuBudget>,
    pub source: StreamIn,
    /// When the first of its connections was accepted.
    pub since: Instant,
    /// The guest's RAM blocks, as packets name them.
    pub blocks: Vec<RamBlockEntry>,
    /// Pages that hold something: received, or not known to be fresh.
    pub written: Vec<DirtyBitmap>,
    /// With `postcopy-ram`: pages that have come, also those that are zero.
    pub received: Vec<DirtyBitmap>,
    /// Pages come as they are asked for.
    listening: AtomicBool,
    /// With `postcopy-preempt`: where pages come that are waited for.
    pub preempt: PreemptIn,
    /// The source has made that connection, or does not make it any more.
    awaits_preempt: AtomicBool,
    /// Of a postcopy, the latest connection in the place of main.
    pub recovered: Mutex<Option<Arc<Stream>>>,
    /// What the guest's waits for pages came to.
    pub postcopy: OnceLock<PostcopyFigures>,
    pub barrier: Barrier,
    pub counters: Vec<Counters>,
    /// What this side calls the migration.
    pub id: MigrationId,
    pub taking: Taking,
    pub decompress: DecompressThreads,
    /// CPU time of the threads that have ended.
    pub threads: ThreadTimes,
}

impl<'a> Session<'a> {
    pub(crate) fn new(
        guest: &'a dyn Guest,
        options: &'a Options,
        control: Control,
        id: MigrationId,
        source: StreamIn,
        since: Instant,
    ) -> Self {
        let channels = source.multifd.len();
        let written: Vec<_> = guest
            .ram()
            .iter()
            .map(|block| DirtyBitmap::new(block.pages()))
            .collect();
        if !guest.ram_is_fresh() {
            written.iter().for_each(DirtyBitmap::set_all);
        }
        let received = match options.postcopy_ram {
            true => written
                .iter()
                .map(|one| DirtyBitmap::new(one.pages()))
                .collect(),
            false => Vec::new(),
        };
        let memory = options.memory(channels);
        // Larger packets than QEMU's have larger payloads.
        let larger = source.layout.max_payload().saturating_sub(CHANNEL_MEMORY);
        memory.raise(channels * larger);
        let blocks = guest
            .ram()
            .iter()
            .map(|block| RamBlockEntry::new(block.name(), block.len() as u64))
            .collect();
        Self {
            guest,
            options,
            cpu: control.steering().cpu_budget(options),
            memory,
            blocks,
            written,
            received,
            listening: AtomicBool::new(false),
            preempt: PreemptIn::new(control.life()),
            awaits_preempt: AtomicBool::new(false),
            recovered: Mutex::default(),
            postcopy: OnceLock::new(),
            barrier: Barrier::new(channels, control.life()),
            counters: Counters::of_side(channels),
            source,
            since,
            id,
            taking: Taking::new(channels + 1, control.life()),
            decompress: DecompressThreads::new(options, control.life()),
            threads: ThreadTimes::default(),
            control,
        }
    }

    /// What questions are about; `refuse` ends the migration.
    pub(crate) fn asked<'s>(&'s self, refuse: &'s (dyn Fn() + Sync)) -> Asked<'s> {
        Asked {
            id: self.id,
            taking: &self.taking,
            refuse,
        }
    }

    /// The source has released the guest, says one of the connections; the first to say so makes the guest run.
    pub(crate) fn take_over(&self) -> Result<(), MigrationError> {
        if !self.taking.commit() {
            return match self.taking.side() {
                DestinationSide::Loading => Err(MigrationError::Protocol {
                    channel: Channel::Main,
                    got: "the end of the stream".to_owned(),
                    doing: "loading the guest",
                }),
                _ => Ok(()),
            };
        }
        let _unsure = OnPanic(|| self.taking.unsure());
        if !self.run_guest(Status::Completed) {
            return Ok(());
        }
        // On every socket, so that one that is cut or garbled leaves the source no doubt. A QEMU reads none but main.
        let running = encode(&[ReturnMessage::Shut(0)]);
        let is_read = |number| number == 0 || self.source.is_hotlift();
        for (_, mut stream) in self.source.streams().enumerate().filter(|it| is_read(it.0)) {
            let _ = stream.write_all(&running);
        }
        self.taking.taken();
        announce::start(self.guest, self.options);
        Ok(())
    }

    /// Makes the guest run, in a migration whose state is `status` from here on; false if it cannot.
    pub(crate) fn run_guest(&self, status: Status) -> bool {
        if let Err(error) = self.guest.resume() {
            self.fail(error.into());
            self.taking.refused();
            return false;
        }
        self.control.tell(MigrationEvent::Resumed);
        self.control.set_status(status);
        true
    }

    /// These pages have come.
    pub(crate) fn note_received(&self, block: usize, first: usize, pages: usize) {
        if let Some(received) = self.received.get(block) {
            received.set_range(first, pages);
        }
    }

    /// From here on multifd channels bring no pages.
    pub(crate) fn set_listening(&self) {
        self.listening.store(true, Ordering::Release);
    }

    pub(crate) fn is_listening(&self) -> bool {
        self.listening.load(Ordering::Acquire)
    }

    /// The connection that has come for pages that are waited for, with `waiting` for it.
    ///
    /// # Errors
    /// [`MigrationError::Timeout`]; what `waiting` says.
    pub(crate) fn await_preempt(
        &self,
        waiting: &dyn Waiting,
    ) -> Result<Arc<Stream>, MigrationError> {
        self.awaits_preempt.store(true, Ordering::Release);
        // The thread at the door looks for it only now.
        self.control.life().wake();
        // Half of the source's patience, so that it hears the reason before it runs out.
        let patience = self.options.handshake_timeout / 2;
        self.preempt.wait_for(patience, waiting)
    }

    /// Takes that connection out of what has come at `door`. A Hotlift says what it is; a QEMU has made it before this side
    /// waits for it, and says nothing.
    pub(crate) fn find_preempt(
        &self,
        door: &mut Door<'_>,
        arrivals: &mut Vec<Arrival>,
    ) -> Option<Stream> {
        let named = |arrival: &mut Arrival| matches!(arrival.kind, Kind::Named);
        let of_hotlift = arrivals.extract_if(.., named).last();
        match self.source.is_hotlift() {
            true => of_hotlift.map(|arrival| arrival.stream),
            false => door.take_silent(&self.source.main.host()),
        }
    }

    /// The same while precopy is under way.
    pub(crate) fn look_for_preempt(&self, door: &mut Door<'_>, arrivals: &mut Vec<Arrival>) {
        let may_come = self.source.is_hotlift() || self.awaits_preempt.load(Ordering::Acquire);
        if self.options.postcopy_preempt
            && may_come
            && !self.preempt.is_here()
            && let Some(stream) = self.find_preempt(door, arrivals)
        {
            self.preempt.put(stream);
        }
    }

    /// Fails if the source is lost before everything has arrived; by its keepalive in postcopy.
    pub(crate) fn look_for_silence(&self, liveness: &mut Liveness) {
        if let Err(error) = liveness.look_for(&self.control, self.source.streams())
            && self.taking.side() == DestinationSide::Loading
            && !self.is_listening()
        {
            self.fail(error);
        }
    }

    /// Waits until the guest runs here, or cannot any more; true if it runs.
    pub(crate) fn is_decided_to_run(&self) -> bool {
        let called_off = || self.control.life().is_stopped();
        self.taking.wait_for_decision(called_off)
    }

    /// Keeps `error` if it is the first, and ends every thread's waiting. The main channel stays
    /// open, to tell the source.
    pub(crate) fn fail(&self, error: MigrationError) {
        self.control.life().fail(error);
        self.taking.abandon();
        self.source.shut_channels();
    }

    /// Where decompressed pages go.
    pub(crate) fn target(&self) -> Target<'_> {
        Target {
            guest: self.guest,
            written: &self.written,
        }
    }

    pub(crate) fn counts(&self) -> Counts {
        self.counters.iter().map(Counters::read).sum()
    }

    /// From the first connection until the guest ran here.
    pub(crate) fn total(&self) -> Duration {
        let end = self.taking.taken_at().unwrap_or_else(Instant::now);
        end.saturating_duration_since(self.since)
    }

    /// Counters of the main channel.
    pub(crate) fn main_counters(&self) -> &Counters {
        &self.counters[self.counters.len() - 1]
    }

    /// A channel's thread has ended. Once everything has arrived a lost channel is no failure, as
    /// long as another can bring the source's word.
    pub(crate) fn channel_ended(
        &self,
        outcome: Result<(), MigrationError>,
    ) -> Result<(), MigrationError> {
        let is_loading = self.taking.side() == DestinationSide::Loading;
        self.taking.connection_ended();
        if is_loading { outcome } else { Ok(()) }
    }

    /// Closes every connection in both directions.
    pub(crate) fn shut_down(&self) {
        self.preempt.end();
        self.source.main.shutdown(Shutdown::Both);
        self.source.shut_channels();
    }
}

//! The guest of this process as the destination of a migration, with its received pages and devices.

use std::io::Write;
use std::sync::atomic::{AtomicBool, Ordering};
use std::sync::{Arc, Mutex, OnceLock};

use hotlift_mem::{DirtyBitmap, PAGE_SIZE};
use hotlift_methods::legacy::xbzrle;
use hotlift_net::admission::{Admitted, ConnectionClass};
use hotlift_net::transport::Stream;
use hotlift_wire::RamBlockEntry;
use hotlift_wire::main_channel::{Command, EarlySection};
use hotlift_wire::return_path::ReturnMessage;
use hotlift_wire::settle::GuestActivity;

use crate::control::Control;
use crate::ends::guest_sink::announce;
use crate::ends::guest_sink::decompress_threads::{DecompressThreads, Target, failed};
use crate::error::{Channel, MigrationError};
use crate::figures::PostcopyFigures;
use crate::guest::{DeviceState, Guest};
use crate::handover::DestinationSide;
use crate::life::threads::OnPanic;
use crate::lock::lock;
use crate::options::Options;
use crate::pipe::session::Session;
use crate::pipe::sink::{HasTaken, Sink, WritePages};
use crate::pipe::stream_in::StreamIn;
use crate::status::{MigrationEvent, Status};
use crate::stream::accept_loop::AcceptLoop;
use crate::stream::main_channel::unexpected;
use crate::stream::main_recv::WaitCondition;
use crate::stream::preempt::PreemptIn;
use crate::stream::return_path::encode;

/// An incoming guest: its connections, and the record of its received pages and devices.
pub(crate) struct GuestSink<'a> {
    pub guest: &'a dyn Guest,
    pub options: &'a Options,
    pub control: &'a Control,
    /// Connections to the source.
    pub source: StreamIn,
    /// The guest's RAM blocks, with the names used in packets.
    pub blocks: Vec<RamBlockEntry>,
    /// Pages that may have content: received with content, or not known to be fresh (never written).
    pub written: Vec<DirtyBitmap>,
    /// With `postcopy-ram`: received pages, including zero pages.
    pub received: Vec<DirtyBitmap>,
    /// Received devices that are not loaded yet.
    pub devices: Mutex<Vec<DeviceState>>,
    /// With `postcopy-preempt`: channel for the pages that the guest waits for.
    pub preempt: PreemptIn,
    /// True once the destination waits for the preempt channel. A QEMU has connected this channel by then.
    awaits_preempt: AtomicBool,
    /// In postcopy: the latest connection that replaces main.
    pub recovered: Mutex<Option<Arc<Stream>>>,
    /// Statistics of the guest's page faults.
    pub postcopy: OnceLock<PostcopyFigures>,
    pub decompress: DecompressThreads,
    /// Bytes on main after the end of the stream, which were read together with it.
    pub read_ahead: Mutex<Vec<u8>>,
}

impl<'a> GuestSink<'a> {
    pub(crate) fn new(
        guest: &'a dyn Guest,
        options: &'a Options,
        control: &'a Control,
        source: StreamIn,
    ) -> Self {
        let bitmaps = || -> Vec<_> {
            let blocks = guest.ram().iter();
            let bitmaps = blocks.map(|block| DirtyBitmap::new(block.pages()));
            bitmaps.collect()
        };
        let written = bitmaps();
        if !guest.ram_is_fresh() {
            written.iter().for_each(DirtyBitmap::set_all);
        }
        let blocks = guest.ram().iter();
        Self {
            guest,
            options,
            control,
            source,
            blocks: blocks
                .map(|block| RamBlockEntry::new(block.name(), block.len() as u64))
                .collect(),
            written,
            received: match options.postcopy.ram {
                true => bitmaps(),
                false => Vec::new(),
            },
            devices: Mutex::default(),
            preempt: PreemptIn::new(control.life()),
            awaits_preempt: AtomicBool::new(false),
            recovered: Mutex::default(),
            postcopy: OnceLock::new(),
            decompress: DecompressThreads::new(options, control.life()),
            read_ahead: Mutex::default(),
        }
    }

    /// Checks that the source has the same machine as this guest.
    pub(crate) fn check_machine(&self, theirs: &str) -> Result<(), MigrationError> {
        compare("the machine", theirs, self.guest.machine())
    }

    /// Checks that the source's RAM blocks equal this guest's in number, names, order and lengths.
    pub(crate) fn check_blocks(&self, theirs: &[RamBlockEntry]) -> Result<(), MigrationError> {
        compare(
            "the number of RAM blocks",
            &theirs.len().to_string(),
            &self.blocks.len().to_string(),
        )?;
        for (number, (theirs, ours)) in theirs.iter().zip(&self.blocks).enumerate() {
            compare(
                &format!("the name of RAM block {number}"),
                &theirs.name,
                &ours.name,
            )?;
            compare(
                &format!("the size of RAM block '{}'", ours.name),
                &theirs.used_length.to_string(),
                &ours.used_length.to_string(),
            )?;
        }
        self.control.set_status(Status::Active);
        Ok(())
    }

    /// Starts the guest after the source has released it. Each connection may report the release; only the first report has an
    /// effect.
    pub(crate) fn take_over(&self, session: &Session<'_>) -> Result<(), MigrationError> {
        let destination_handover = &session.destination_handover;
        if !destination_handover.commit() {
            return match destination_handover.side() {
                DestinationSide::Loading => Err(MigrationError::Protocol {
                    channel: Channel::Main,
                    got: "the end of the stream".to_owned(),
                    doing: "loading the guest",
                }),
                _ => Ok(()),
            };
        }
        let _unsure = OnPanic(|| destination_handover.unsure());
        if !self.run(session, Status::Completed) {
            return Ok(());
        }
        // Sent on every socket, because one may be cut or garbled. A QEMU reads only main.
        let running = encode(&[ReturnMessage::Shut(0)]);
        let is_read = |number| number == 0 || self.source.is_hotlift();
        for (_, mut stream) in self.source.streams().enumerate().filter(|it| is_read(it.0)) {
            let _ = stream.write_all(&running);
        }
        destination_handover.record_run();
        announce::start(self.guest, &self.options.announce);
        Ok(())
    }

    /// Starts the guest and sets the migration's state to `status`; returns false if the guest cannot start.
    pub(crate) fn run(&self, session: &Session<'_>, status: Status) -> bool {
        match self.commit(&[], None) {
            Err(error) => {
                session.fail(error);
                session.destination_handover.refused();
                false
            }
            Ok(_) => {
                self.control.set_status(status);
                true
            }
        }
    }

    /// Discards old content of guest RAM, so that all content comes from this source.
    fn empty_ram(&self) -> Result<(), MigrationError> {
        for (block, written) in self.guest.ram().iter().zip(&self.written) {
            if !self.guest.ram_is_fresh() {
                block.discard(0, block.len())?;
            }
            written.clear_range(0, written.pages());
        }
        Ok(())
    }

    /// Records these pages as received.
    pub(crate) fn note_received(&self, block: usize, first: usize, pages: usize) {
        if let Some(received) = self.received.get(block) {
            received.set_range(first, pages);
        }
    }

    /// Writes a page with content to guest RAM.
    pub(crate) fn put_page(
        &self,
        block: usize,
        offset: usize,
        bytes: &[u8; PAGE_SIZE],
    ) -> Result<(), MigrationError> {
        self.guest.ram()[block].write(offset, bytes)?;
        self.written[block].set(offset / PAGE_SIZE);
        Ok(())
    }

    /// Returns the destination of decompressed pages.
    pub(crate) fn target(&self) -> Target<'_> {
        Target {
            guest: self.guest,
            written: &self.written,
        }
    }

    /// Waits for the preempt channel as long as `waiting` permits, and returns it.
    ///
    /// # Errors
    /// [`MigrationError::Timeout`] after half of the handshake timeout, or the error of `waiting`.
    pub(crate) fn await_preempt(
        &self,
        waiting: &dyn WaitCondition,
    ) -> Result<Arc<Stream>, MigrationError> {
        self.awaits_preempt.store(true, Ordering::Release);
        // The accept loop's thread accepts the channel only from now on.
        self.control.life().wake();
        // Half of the source's timeout, so that the source receives the reason before its own timeout.
        let timeout = self.options.limits.handshake_timeout / 2;
        self.preempt.wait_for(timeout, waiting)
    }

    /// Finds the preempt channel among new connections, and returns it; `None` if it is not among them. A Hotlift sends a
    /// header on this channel. A QEMU sends nothing, and connects the channel before this side waits for it.
    pub(crate) fn find_preempt(
        &self,
        accept_loop: &mut AcceptLoop<'_>,
        arrivals: &mut Vec<Admitted>,
    ) -> Option<Stream> {
        let named = |arrival: &mut Admitted| matches!(arrival.head(), ConnectionClass::Token(_));
        let of_hotlift = arrivals.extract_if(.., named).last();
        match self.source.is_hotlift() {
            true => of_hotlift.map(|arrival| arrival.stream),
            false => accept_loop.take_silent(&self.source.main.host()),
        }
    }

    /// Accepts the preempt channel during precopy.
    pub(crate) fn accept_preempt(
        &self,
        accept_loop: &mut AcceptLoop<'_>,
        arrivals: &mut Vec<Admitted>,
    ) {
        let may_come = self.source.is_hotlift() || self.awaits_preempt.load(Ordering::Acquire);
        if self.options.postcopy.preempt
            && may_come
            && !self.preempt.is_here()
            && let Some(stream) = self.find_preempt(accept_loop, arrivals)
        {
            self.preempt.put(stream);
        }
    }
}

impl Sink for GuestSink<'_> {
    fn is_guest(&self) -> bool {
        true
    }

    fn workers(&self) -> usize {
        0
    }

    fn page_writer(&self, _: usize) -> Result<Box<dyn WritePages + '_>, MigrationError> {
        Err(unexpected("batches of pages"))
    }

    fn command(&self, command: Command) -> Result<(), MigrationError> {
        match command {
            Command::PostcopyAdvise { .. } => self.empty_ram(),
            _ => Ok(()),
        }
    }

    fn early_section(&self, _: &EarlySection) -> Result<(), MigrationError> {
        Err(unexpected("a device before the end of RAM"))
    }

    fn barrier(&self) -> Result<(), MigrationError> {
        Ok(())
    }

    fn delta(&self, block: usize, offset: u64, delta: &[u8]) -> Result<(), MigrationError> {
        let offset = usize::try_from(offset).unwrap_or(usize::MAX);
        let mut bytes = [0; PAGE_SIZE];
        self.guest.ram()[block].read(offset, &mut bytes)?;
        xbzrle::apply(delta, &mut bytes)
            .map_err(|source| failed(self.guest, block, offset, source))?;
        self.put_page(block, offset, &bytes)
    }

    fn ram_end(&self) -> Result<(), MigrationError> {
        Ok(())
    }

    fn devices(&self, _: &[u8]) -> Result<(), MigrationError> {
        Err(unexpected("a part of the devices"))
    }

    /// Loads the devices into the guest. All device state must have arrived.
    fn await_loaded(&self) -> Result<(), MigrationError> {
        let devices = std::mem::take(&mut *lock(&self.devices));
        Ok(self.guest.load_devices(devices)?)
    }

    /// Starts the guest.
    fn commit(&self, _: &[u8], _: Option<HasTaken<'_>>) -> Result<GuestActivity, MigrationError> {
        self.guest.resume()?;
        self.control.report(MigrationEvent::Resumed);
        Ok(GuestActivity::Unknown)
    }

    /// Does nothing: each connection to the source ends with the thread that reads it.
    fn abort(&self) {}

    fn sent_bytes(&self) -> u64 {
        0
    }

    fn method(&self) -> &'static str {
        self.options.stream.multifd_compression.name
    }
}

/// Wait condition before the source's commit. It fails after a cancel, and after a commit on another connection.
pub(crate) struct PreCommitWait<'a>(pub &'a Session<'a>);

impl WaitCondition for PreCommitWait<'_> {
    fn check(&self) -> Result<(), MigrationError> {
        let Session {
            control,
            destination_handover,
            ..
        } = self.0;
        if control.life().is_stopped() && destination_handover.abandon() {
            return Err(MigrationError::Cancelled);
        }
        // The source's commit may have arrived on another connection.
        match destination_handover.side() {
            DestinationSide::Loading | DestinationSide::Loaded => Ok(()),
            _ => Err(MigrationError::main_closed()),
        }
    }
}

fn compare(what: &str, source_has: &str, destination_has: &str) -> Result<(), MigrationError> {
    if source_has == destination_has {
        return Ok(());
    }
    Err(MigrationError::Mismatch {
        what: what.to_owned(),
        source_has: format!("'{source_has}'"),
        destination_has: format!("'{destination_has}'"),
    })
}

//! Streams as the destination of pages: a main channel and N multifd channels, or main alone.
//!
//! | file | content |
//! |---|---|
//! | `page_writers` | writes the pages of batches: zero pages on main or in packets, other pages on a channel |
//! | `postcopy` | pages of a guest that already runs at the destination |
//! | `host_pages` | collects huge pages in postcopy, because a QEMU accepts them only as a whole |
//!
//! A guest of this process sends pages and device sections through [`StreamSink::out`]. Everything else is the same for a guest
//! and a relay.

mod host_pages;
mod page_writers;
mod postcopy;

use std::net::Shutdown;
use std::sync::atomic::{AtomicBool, AtomicUsize, Ordering};
use std::sync::{Mutex, OnceLock};
use std::time::Duration;

use hotlift_methods::MemoryLimit;
use hotlift_net::transport::{Address, Stream};
use hotlift_qmp::{LAST_FLUSHED_BY_SECTION, machine_version};
use hotlift_wire::handshake::{CONNECTED, Features, Offer};
use hotlift_wire::limits;
use hotlift_wire::main_channel::{Command, Configuration, EarlySection, RunStateSearch};
use hotlift_wire::multifd::{Hello, PacketLayout, ZeroPageDetection};
use hotlift_wire::return_path::ReturnMessage;
use hotlift_wire::settle::GuestActivity;

use crate::auto::{Auto, Reader};
use crate::control::Control;
use crate::ends::file::{BlockSink, FileFormat, MappedRamSink};
use crate::ends::page_set::PageSet;
use crate::ends::request::{Outgoing, Request};
use crate::ends::stream_sink::host_pages::HostPages;
use crate::ends::stream_sink::page_writers::{ChannelWriter, Forwarding, MainWriter};
use crate::ends::stream_sink::postcopy::Background;
use crate::error::{Channel, MigrationError};
use crate::figures::MethodFigures;
use crate::handover::{
    DestinationStatement, OwnershipWait, QemuGuestState, await_statement, confirm_outcome,
    notify_not_committed,
};
use crate::life::LONG;
use crate::lock::lock;
use crate::pipe::settings::RelaySettings;
use crate::pipe::sink::{
    Forward, ForwardPackets, HasTaken, Opening, Postcopy, RamLayout, Sink, WritePages,
};
use crate::pipe::stream_out::StreamOut;
use crate::postcopy::priority_lock::PriorityLockGuard;
use crate::remote::Remote;
use crate::stream::handshake;
use crate::stream::main_send::MainSend;
use crate::stream::multifd_send::{ChannelOpening, MultifdSend};
use crate::stream::preempt::PreemptOut;
use crate::stream::return_path::listen;

/// Time limit for loading the devices at the destination of a relay or of a postcopy. In postcopy, the devices may have to wait
/// for pages.
pub(crate) const LOADING: Duration = Duration::from_secs(60);

/// Name of the message awaited after the devices, for the timeout error.
const LOADED: &str = "the destination's message that it loaded the guest";

/// Possible reason why a QEMU rejects a stream. QEMU reports the true reason only in its log.
const GUESSED_SYNC_POINTS: &str = "it could not load the guest; its log has the reason. The stream does not show how this \
                                   machine type synchronises multifd: if QEMU's log has 'migration flags: 0x200', use \
                                   --multifd-flush-after-each-section=on; if QEMU waited, use the other value";

/// Version of the newest machine type that sends no configuration.
const LAST_WITHOUT_CONFIGURATION: (u32, u32) = (2, 3);

/// Interval of the QMP queries for the state of the guest.
const POLL_INTERVAL: Duration = Duration::from_millis(200);

/// Name of the answer awaited after the opening, for the timeout error.
const OPENED: &str = "the destination's answer to the start of the stream (check that both sides have the same machine, \
                      multifd-channels and method)";

/// Reason reported if the destination's QEMU was ended and never ran the guest.
const DID_NOT_RUN: &str = "its QEMU did not run the guest, and was ended";

/// Name of the answer awaited before a postcopy starts the guest, for the timeout error.
const READY: &str =
    "the destination's message that it is ready for postcopy (check its capability postcopy-ram)";

/// Name of the answer that a relay must send after the RAM blocks, for the timeout error.
const CONFIRMATION: &str =
    "the report of the destination's relay that its QEMU is connected (see that relay's log)";

/// Time to wait for the peer's error message after the peer closed a connection.
const REASON_WAIT: Duration = Duration::from_millis(200);

/// Time as in [`REASON_WAIT`], for a guest of this process: the guest already runs again, so the wait may be longer.
const REASON_WAIT_OF_GUEST: Duration = Duration::from_secs(2);

/// Place of zero pages in a stream. Packets list their zero pages since QEMU 9.0. An older QEMU ignores this list, and would
/// keep the old content of the pages.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
enum ZeroPlace {
    Packets,
    /// Records of main, which every QEMU reads.
    Main,
    /// The place that the source uses; main for zero pages that the relay detects.
    AsTheyCame,
}

/// Kind of the sync points of a stream with multifd.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub(crate) struct SyncPoints {
    /// True if every RAM section ends with a sync point. False if each sync point is a separate record.
    pub each_section: bool,
    /// True if a QEMU has shown this kind; false if a relay has guessed it.
    pub are_shown: bool,
}

impl SyncPoints {
    /// Returns the kind that a QEMU has shown.
    pub(crate) fn shown(each_section: bool) -> Self {
        Self {
            each_section,
            are_shown: true,
        }
    }

    /// Returns true if each RAM section ends with a sync point: set by the operator's option, or shown by the source's QEMU.
    /// Returns `None` if neither is known.
    fn known(settings: &RelaySettings, seen: Option<Self>) -> Option<bool> {
        let shown = seen.filter(|seen| seen.are_shown);
        let shown = shown.map(|seen| seen.each_section);
        settings.flush_after_each_section.or(shown)
    }

    /// Decides the kind for the destination's QEMU, by the first known fact of this list:
    ///
    /// - the operator's option
    /// - the kind of the source's QEMU
    /// - the report of the destination's QEMU
    /// - the version of the machine type (a guess)
    fn of_destination(
        settings: &RelaySettings,
        seen: Option<Self>,
        configuration: &Configuration,
    ) -> Self {
        let known = Self::known(settings, seen);
        if let Some(each_section) = known.or(settings.qemu_flushes_after_each_section) {
            return Self::shown(each_section);
        }
        let by_version =
            || version_of(configuration).is_some_and(|version| version <= LAST_FLUSHED_BY_SECTION);
        Self {
            each_section: seen.map_or_else(by_version, |seen| seen.each_section),
            are_shown: false,
        }
    }
}

/// Facts about the source that the sink needs.
#[derive(Debug, Clone, Copy, Default)]
pub(crate) struct SourceFacts {
    /// Sync points of the source; `None` without multifd.
    pub sync_points: Option<SyncPoints>,
    /// True if the source detects zero pages.
    pub zeros_were_detected: bool,
    /// True if the source is the guest of this process, whose channel threads send a SYNC packet after each round themselves.
    pub is_guest: bool,
    /// True if the guest of this process has `postcopy-preempt`.
    pub preempts: bool,
}

impl SourceFacts {
    /// Returns the facts for the guest of this process.
    pub(crate) fn guest(preempts: bool) -> Self {
        Self {
            sync_points: Some(SyncPoints::shown(false)),
            zeros_were_detected: true,
            is_guest: true,
            preempts,
        }
    }
}

pub(crate) struct StreamSink<'a> {
    settings: &'a RelaySettings,
    pub out: StreamOut,
    /// True after the peer was asked whether everything is loaded, until the commit. If the migration fails in this time, the
    /// peer must learn that there was no commit.
    asked_whether_loaded: AtomicBool,
    control: Control,
    facts: SourceFacts,
    sync_points: SyncPoints,
    /// Version of the machine type.
    version: Option<(u32, u32)>,
    /// True once the source has sent a zero page without content: it detects zero pages.
    finds_zeros: AtomicBool,
    /// True once postcopy has begun.
    switched: AtomicBool,
    /// Preempt channel to the destination's QEMU: a separate connection for pages that the guest waits for.
    preempt: OnceLock<PreemptOut>,
    /// True if the peer is a Hotlift.
    is_hotlift: AtomicBool,
    ram: RamLayout,
    /// Pages in postcopy that wait until all pages of their huge page have arrived.
    host_pages: HostPages,
    /// Zero pages that wait for the next section on main.
    zeros: Vec<PageSet>,
    /// Number of zero pages added since the last section of zero pages.
    zeros_since_section: AtomicUsize,
    /// Run state of the guest before the migration, found in its device state.
    run_state: OnceLock<String>,
    run_state_search: Mutex<RunStateSearch>,
}

/// Opens the sink: connects to the peer or creates the file, as the request selects.
pub(crate) fn open<'a>(
    request: Request<'a>,
    facts: SourceFacts,
    opening: Opening<'_>,
    memory: &MemoryLimit,
) -> Result<Box<dyn Sink + 'a>, MigrationError> {
    let Request {
        settings, control, ..
    } = request;
    match request.outgoing {
        Outgoing::Address(to) => {
            let sink = StreamSink::connect(to, settings, facts, opening, memory, control)?;
            Ok(Box::new(sink))
        }
        Outgoing::File {
            path,
            format: FileFormat::Hotlift,
        } => {
            let flushes = SyncPoints::known(settings, facts.sync_points);
            let sink = BlockSink::create(path, settings, (opening, flushes), memory, control)?;
            Ok(Box::new(sink))
        }
        Outgoing::File {
            path,
            format: FileFormat::MappedRam,
        } => {
            let sink = MappedRamSink::create(path, settings, opening, memory, control)?;
            Ok(Box::new(sink))
        }
    }
}

/// Returns the settings for the opening packets of the channels, which a relay at the destination checks.
fn hello_of(settings: &RelaySettings) -> Hello {
    let options = &settings.outgoing;
    Hello {
        channels: options.channels(),
        method: options.packet_method(),
        layout: options.packet_layout(),
        zero_page_detection: settings.zero_pages.unwrap_or(ZeroPageDetection::Multifd),
    }
}

impl<'a> StreamSink<'a> {
    /// Opens the connections to `to`.
    pub(crate) fn connect(
        to: &Address,
        settings: &'a RelaySettings,
        facts: SourceFacts,
        opening: Opening<'_>,
        memory: &MemoryLimit,
        control: &Control,
    ) -> Result<Self, MigrationError> {
        let Opening {
            configuration, ram, ..
        } = opening;
        let channels = ChannelOpening {
            uuid: opening.uuid,
            hello: hello_of(settings),
        };
        let out = StreamOut::connect(
            Remote::new(to, settings.outgoing_tls.clone()),
            settings.outgoing_pass.as_ref(),
            &channels,
            configuration,
            (&settings.outgoing, settings.limits.handshake_timeout),
            control,
        )?;
        let blocks = ram.blocks.iter();
        let zeros = blocks.map(|block| PageSet::new(block.used_length, memory));
        Ok(Self {
            settings,
            out,
            asked_whether_loaded: AtomicBool::new(false),
            control: control.clone(),
            facts,
            sync_points: SyncPoints::of_destination(settings, facts.sync_points, configuration),
            version: version_of(configuration),
            finds_zeros: AtomicBool::new(facts.zeros_were_detected),
            switched: AtomicBool::new(false),
            preempt: OnceLock::new(),
            is_hotlift: AtomicBool::new(false),
            ram: ram.clone(),
            host_pages: HostPages::new(&ram.blocks, memory),
            zeros: zeros.collect(),
            zeros_since_section: AtomicUsize::new(0),
            run_state: OnceLock::new(),
            run_state_search: Mutex::default(),
        })
    }

    /// Returns the connections on which the peer reports the outcome, and receives the confirmation. For a guest of this
    /// process these are all connections, because one may be lost.
    fn outcome_streams(&self) -> impl Iterator<Item = &Stream> {
        let streams = if self.facts.is_guest { usize::MAX } else { 1 };
        self.out.streams().take(streams)
    }

    /// Waits for the answer to the last PING of this side.
    fn await_answer(&self, timeout: Duration, waiting_for: &str) -> Result<(), MigrationError> {
        let keep_waiting = || self.control.life().check();
        let limit = Some((timeout, waiting_for));
        self.out.answers.await_answers(limit, LONG, keep_waiting)
    }

    /// Waits for the peer's statement about the guest, and returns it with the state of the guest. The statement is a message
    /// on main, the answer to an outcome query, or a report of the hook `has_taken`. Returns `None` without a statement.
    fn await_statement(
        &self,
        has_taken: Option<HasTaken<'_>>,
    ) -> Option<(DestinationStatement, GuestActivity)> {
        let timeout = self.settings.limits.settle_timeout;
        let on_stream = &mut |wait| self.out.answers.wait_statement(wait);
        let to_ask = self.out.answers.id().map(|id| (&self.out.to, id));
        let Some(has_taken) = has_taken.filter(|_| to_ask.is_none()) else {
            return await_statement(timeout, to_ask, &mut |wait| {
                self.out.answers.wait_statement_and_activity(wait)
            });
        };
        let life = self.control.life();
        let mut wait = OwnershipWait::new(life.now(), timeout);
        let was = self.run_state.get().map(String::as_str);
        wait.state(on_stream(wait.first_wait()));
        while wait.keeps_waiting(life.now()) {
            let taken = has_taken(was);
            // The peer's own statement before its end has precedence.
            if wait.statement().is_none() {
                wait.state(on_stream(POLL_INTERVAL));
            }
            if taken == QemuGuestState::Ended {
                self.out.answers.explain(DID_NOT_RUN);
            }
            let combined = wait.combine(taken);
            if combined.is_some() {
                return combined;
            }
            std::thread::sleep(POLL_INTERVAL);
        }
        wait.statement()
            .map(|statement| (statement, GuestActivity::Unknown))
    }

    /// Returns the features of the stream, for a Hotlift at the destination.
    fn offer(&self) -> Offer {
        if self.facts.is_guest {
            return Offer::new(handshake::features(
                &self.settings.outgoing,
                self.facts.preempts,
            ));
        }
        let mut features = Features::RELAYED
            | Features::PACKAGE_CHECKED
            | Features::CONNECTED_PING
            | Features::GUEST_ACTIVITY;
        features.set(Features::MULTIFD, !self.out.multifd.is_empty());
        features.set(
            Features::METHOD_BY_PACKET,
            self.out.multifd.auto().is_some(),
        );
        features.set(Features::SYNC_POINTS_SHOWN, self.sync_points.are_shown);
        Offer::new(features)
    }

    fn lock_main(&self) -> PriorityLockGuard<'_, MainSend> {
        self.out.main.take()
    }

    /// Sends a PING with the checksum of everything written to main; a Hotlift compares it.
    fn ping(&self) -> Result<(), MigrationError> {
        let mut main = self.lock_main();
        let value = main.crc().unwrap_or_default();
        self.out.answers.ask(value);
        main.command(Command::Ping(value))
    }

    /// Sends a PING to a Hotlift after a section of a guest's RAM. After the last section it sends none: the PING after the
    /// devices asks whether everything is loaded.
    fn section_sent(&self) -> Result<(), MigrationError> {
        match self.out.answers.id() {
            Some(_) if !self.lock_main().is_completing() => self.ping(),
            _ => Ok(()),
        }
    }

    /// Returns true if the peer is a Hotlift; false before its first answer.
    fn is_hotlift(&self) -> bool {
        self.is_hotlift.load(Ordering::Acquire)
    }

    fn block_name(&self, block: usize) -> &str {
        &self.ram.blocks[block].name
    }

    fn detects_zeros(&self) -> bool {
        match self.settings.zero_pages {
            Some(mode) => mode != ZeroPageDetection::None,
            // In postcopy a QEMU with multifd does not detect zero pages (10.1 and newer).
            None if self.is_switched() => !self.facts.zeros_were_detected,
            None => !self.finds_zeros.load(Ordering::Relaxed),
        }
    }

    /// Records that the source has sent a zero page without content.
    fn source_finds_zeros(&self) {
        if !self.finds_zeros.load(Ordering::Relaxed) {
            self.finds_zeros.store(true, Ordering::Relaxed);
        }
    }

    /// Returns a place for zero pages that the peer can read.
    fn zero_place(&self) -> ZeroPlace {
        match (self.settings.zero_pages, self.version) {
            (Some(ZeroPageDetection::Legacy), _) => ZeroPlace::Main,
            (Some(ZeroPageDetection::Multifd), _) => ZeroPlace::Packets,
            (_, Some(_)) if self.is_hotlift() => ZeroPlace::Packets,
            (_, Some(version)) if version >= (9, 0) => ZeroPlace::Packets,
            (_, Some(_)) => ZeroPlace::Main,
            // A machine type without a version (microvm) changes with QEMU, so both QEMUs have the same version: the peer reads
            // zero pages where the source sends them.
            (_, None) => ZeroPlace::AsTheyCame,
        }
    }

    /// Keeps zero pages for the next section on main.
    fn keep_zeros(&self, block: usize, offsets: &[u64]) -> Result<(), MigrationError> {
        for offset in offsets {
            self.zeros[block].insert(*offset)?;
        }
        self.zeros_since_section
            .fetch_add(offsets.len(), Ordering::Relaxed);
        Ok(())
    }

    /// Sends SYNC on all channels, and a section of RAM with the multifd flush.
    fn sync_point(&self) -> Result<(), MigrationError> {
        self.out.multifd.sync()?;
        self.zero_section(self.flushes())
    }

    /// Sends a section of RAM with all kept zero pages; `flush` adds a multifd flush.
    fn zero_section(&self, flush: bool) -> Result<(), MigrationError> {
        let mut main = self.lock_main();
        for (block, zeros) in self.zeros.iter().enumerate() {
            for offset in zeros.take() {
                main.zero_page(block, offset)?;
            }
        }
        main.end_section(flush)
    }

    /// Returns true if a multifd flush is a separate record; false if the end of each RAM section is a sync point.
    fn flushes(&self) -> bool {
        !self.out.multifd.is_empty() && !self.sync_points.each_section
    }

    /// Returns true if the peer is a QEMU with multifd, and the kind of its sync points is a guess.
    fn has_guessed_sync_points(&self) -> bool {
        let is_guess = self.version.is_none() && !self.sync_points.are_shown;
        is_guess && !self.is_hotlift() && !self.out.multifd.is_empty()
    }
}

/// Returns the version of the QEMU machine type in a stream; `None` for a name without a version.
pub(crate) fn version_of(configuration: &Configuration) -> Option<(u32, u32)> {
    match configuration.is_absent() {
        true => Some(LAST_WITHOUT_CONFIGURATION),
        false => machine_version(&configuration.machine),
    }
}

impl Sink for StreamSink<'_> {
    fn workers(&self) -> usize {
        let options = &self.settings.outgoing;
        if options.compress {
            options.compress_threads.into()
        } else if self.facts.is_guest {
            0
        } else {
            self.out.multifd.len().max(1)
        }
    }

    fn page_writer(&self, worker: usize) -> Result<Box<dyn WritePages + '_>, MigrationError> {
        let before: Box<dyn WritePages + '_> = match self.out.multifd.is_empty() {
            true => Box::new(MainWriter::new(self)?),
            false => {
                let id = u8::try_from(worker).unwrap_or(u8::MAX);
                Box::new(ChannelWriter::new(self, id)?)
            }
        };
        Ok(Box::new(Background::new(self, before)))
    }

    fn forwarder(&self, channel: u8) -> Option<Box<dyn ForwardPackets + '_>> {
        Some(Box::new(Forwarding::new(self, channel)?))
    }

    fn open(&self, opening: Opening<'_>) -> Result<(), MigrationError> {
        let offer = self.offer();
        let (settings, answers) = (&self.settings.outgoing, &self.out.answers);
        {
            let mut main = self.lock_main();
            main.command(Command::OpenReturnPath)?;
            answers.ask(offer.ping());
            main.command(Command::Ping(offer.ping()))?;
        }
        let waiting_for = match self.facts.is_guest {
            true => format!(
                "the destination's answer to the start of the stream (check that it expects {} multifd channels too)",
                settings.channels()
            ),
            false => OPENED.to_owned(),
        };
        self.await_answer(self.settings.limits.handshake_timeout, &waiting_for)?;
        let is_hotlift = answers.opened(offer)?;
        self.is_hotlift.store(is_hotlift, Ordering::Release);
        self.out.multifd.reader_is(match is_hotlift {
            true => Reader::Hotlift,
            false => Reader::Qemu(settings.qemu_reads()),
        })?;
        if !is_hotlift && settings.packet_layout() != PacketLayout::QEMU {
            return Err(MigrationError::Mismatch {
                what: "multifd-packet-size".to_owned(),
                source_has: format!("{} bytes", settings.multifd_packet_size),
                destination_has: format!(
                    "room for {}: it is a QEMU",
                    PacketLayout::QEMU.pages() * PacketLayout::QEMU.page_size()
                ),
            });
        }
        if !is_hotlift && !self.facts.is_guest {
            self.lock_main().drop_checksum();
        }
        if self.has_guessed_sync_points() {
            self.out.answers.explain(GUESSED_SYNC_POINTS);
        }
        for command in opening.commands {
            self.lock_main().command(*command)?;
        }
        let mut early = opening.early.before_ram.iter();
        early.try_for_each(|section| self.early_section(section))
    }

    fn command(&self, command: Command) -> Result<(), MigrationError> {
        self.lock_main().command(command)
    }

    fn early_section(&self, section: &EarlySection) -> Result<(), MigrationError> {
        self.lock_main().raw(&section.bytes)
    }

    fn ram_start(&self) -> Result<(), MigrationError> {
        self.out.multifd.sync()?;
        let flush = self.flushes();
        let id = Some(self.ram.section_id);
        self.lock_main().ram_start(id, &self.ram.blocks, flush)?;
        if self.facts.is_guest {
            return self.section_sent();
        }
        if !self.out.answers.takes(Features::CONNECTED_PING) {
            return Ok(());
        }
        self.out.answers.ask(CONNECTED);
        self.lock_main().command(Command::Ping(CONNECTED))?;
        // The other relay waits for its channels, for a connection, and for its QEMU's answer. This time covers all three
        // waits, so that its more exact error arrives first.
        let timeout = 3 * self.settings.limits.handshake_timeout;
        self.await_answer(timeout, CONFIRMATION)
    }

    fn section_end(&self) -> Result<(), MigrationError> {
        // If each section is a sync point, there may be no other sections.
        let each = self.sync_points.each_section && !self.out.multifd.is_empty();
        if each || self.zeros_since_section.swap(0, Ordering::Relaxed) == 0 {
            return Ok(());
        }
        self.zero_section(false)
    }

    fn barrier(&self) -> Result<(), MigrationError> {
        if self.facts.is_guest {
            self.lock_main().end_section(self.flushes())?;
            return self.section_sent();
        }
        // No sync point is needed: records on main are in order.
        if self.pages_on_main() {
            return Ok(());
        }
        self.sync_point()
    }

    fn catch_up(
        &self,
        every: Duration,
        doing: &mut dyn FnMut() -> Result<(), MigrationError>,
    ) -> Result<(), MigrationError> {
        let answers = &self.out.answers;
        // A Hotlift has already received a PING after the barrier, with the checksum.
        if answers.id().is_none() {
            self.ping()?;
        }
        answers.await_answers(None, every, doing)
    }

    fn delta(&self, block: usize, offset: u64, delta: &[u8]) -> Result<(), MigrationError> {
        let each_section = !self.out.multifd.is_empty() && self.sync_points.each_section;
        if each_section {
            self.out.multifd.sync()?;
        }
        let mut main = self.lock_main();
        main.xbzrle_page(block, offset, delta)?;
        main.end_section(false)
    }

    fn ram_end(&self) -> Result<(), MigrationError> {
        // Checked before END, because the destination turns pages that are missing at END into zero pages.
        self.host_pages.are_whole()?;
        self.preempt.get().map_or(Ok(true), PreemptOut::is_taken)?;
        self.lock_main().complete();
        match self.pages_on_main() {
            true => self.zero_section(false),
            false => self.sync_point(),
        }
    }

    fn postcopy(&self) -> Option<&dyn Postcopy> {
        Some(self)
    }

    fn devices(&self, part: &[u8]) -> Result<(), MigrationError> {
        let mut main = self.lock_main();
        if self.is_hotlift() {
            let mut parts = part.chunks(limits::DEVICE_PART);
            return parts.try_for_each(|part| main.device_part(part));
        }
        main.raw(part)?;
        // This runs while the destination loads the part.
        if self.run_state.get().is_none()
            && let Some(state) = lock(&self.run_state_search).find(part)
        {
            let _ = self.run_state.set(state);
        }
        Ok(())
    }

    fn await_loaded(&self) -> Result<(), MigrationError> {
        let mut main = self.lock_main();
        // A QEMU does not compare the value. The value for a QEMU is never the value of a source's own PING.
        let value = main.crc().unwrap_or_else(|| self.offer().ping());
        self.asked_whether_loaded.store(true, Ordering::Release);
        self.out.answers.ask(value);
        let mut ping = Vec::new();
        Command::Ping(value).encode(&mut ping);
        main.raw(&ping)?;
        let waiting_for = match self.has_guessed_sync_points() {
            true => format!("{LOADED} ({GUESSED_SYNC_POINTS})"),
            false => LOADED.to_owned(),
        };
        let limit = match self.facts.is_guest {
            true => self.settings.limits.handshake_timeout,
            false => LOADING,
        };
        self.await_answer(limit, &waiting_for)
    }

    fn commit(
        &self,
        end: &[u8],
        has_taken: Option<HasTaken<'_>>,
    ) -> Result<GuestActivity, MigrationError> {
        let StreamOut {
            main,
            link,
            multifd,
            answers,
            ..
        } = &self.out;
        answers.commit();
        self.asked_whether_loaded.store(false, Ordering::Release);
        let id = answers.id();
        // Send errors are ignored from here on: a connection that is lost now may have delivered EOF.
        if self.facts.is_guest {
            main.take().end_of_file();
            if id.is_some() {
                // SYNC on a channel has the same meaning as EOF on main. It is sent on every channel, because each connection
                // may fail.
                let _ = multifd.sync();
            }
        } else {
            let _ = main.take().raw(end);
            if end.len() == 1 && id.is_none() {
                // There is no VM description, but a QEMU may wait for one: closing ends its wait.
                link.transport.shutdown(Shutdown::Write);
            }
        }
        let statement = self.await_statement(has_taken);
        if let (Some(_), Some(id)) = (statement, id) {
            self.outcome_streams()
                .for_each(|stream| confirm_outcome(stream, id));
        }
        match statement {
            Some((DestinationStatement::Runs | DestinationStatement::HasAll, doing)) => Ok(doing),
            Some((DestinationStatement::Never, _)) => Err(self.out.answers.refusal()),
            None => Err(MigrationError::InDoubt),
        }
    }

    fn return_path(&self, forward: Forward<'_>, failed: &dyn Fn(Channel, MigrationError)) {
        let others = |channel, message: &ReturnMessage<'_>, bytes: &[u8]| match message {
            ReturnMessage::Hello { .. } if !self.facts.is_guest => Err(MigrationError::Protocol {
                channel,
                got: "a second HELLO".to_owned(),
                doing: "receiving from the destination",
            }),
            ReturnMessage::Load(load) => {
                if let Some(auto) = self.out.multifd.auto() {
                    auto.destination(load);
                }
                Ok(())
            }
            _ => forward(channel, message, bytes),
        };
        listen(self.outcome_streams(), &self.out.answers, others, failed);
    }

    fn streams(&self) -> Vec<&Stream> {
        self.out.streams().collect()
    }

    fn lost_channel(&self) -> Option<Channel> {
        // Channels of a guest have threads that detect their loss.
        let sampled = Some(&self.out.multifd).filter(|_| !self.facts.is_guest);
        sampled.and_then(MultifdSend::lost_channel)
    }

    fn abort(&self) {
        self.out.answers.abort();
        self.out.multifd.shut_down();
        if let Some(channel) = self.preempt.get() {
            channel.shut();
        }
        self.out.link.transport.shutdown(Shutdown::Write);
    }

    fn shows_loading(&self) -> bool {
        true
    }

    fn refuses_with_text(&self) -> bool {
        self.out.answers.id().is_some()
    }

    fn closing_reason(&self) -> Option<String> {
        self.out.answers.wait_reason(match self.facts.is_guest {
            true => REASON_WAIT_OF_GUEST,
            false => REASON_WAIT,
        })
    }

    fn close(&self) {
        self.abort();
        self.out.link.transport.shutdown(Shutdown::Both);
        if self.asked_whether_loaded.load(Ordering::Acquire)
            && let Some(id) = self.out.answers.id()
        {
            notify_not_committed(&self.out.to, id);
        }
    }

    fn sent_bytes(&self) -> u64 {
        self.out.counts().transferred_bytes
    }

    fn method(&self) -> &'static str {
        self.settings.outgoing.method_name()
    }

    fn methods(&self) -> Vec<MethodFigures> {
        let auto = self.out.multifd.auto();
        auto.map(Auto::figures).unwrap_or_default()
    }
}

#[cfg(test)]
mod tests {
    use std::io::{Read, Write};
    use std::net::TcpListener;

    use hotlift_wire::main_channel::{DeviceLengths, MainDecoder, MainEvent, Step};
    use hotlift_wire::settle::MigrationId;

    use super::*;
    use crate::options::StreamOptions;
    use crate::stream::return_path::encode;

    /// Runs a Hotlift that answers all PINGs of a connection to `listener`, until the connection ends.
    fn answer_pings(listener: &TcpListener) {
        let (mut main, _) = listener.accept().unwrap();
        let mut decoder = MainDecoder::new(DeviceLengths::LengthPrefixed);
        let (mut unread, mut here) = (Vec::new(), [0; 4096]);
        while let Ok(read @ 1..) = main.read(&mut here) {
            unread.extend_from_slice(&here[..read]);
            while let Step::Event { event, consumed } = decoder.next(&unread).unwrap() {
                let answer = match event {
                    MainEvent::Command(Command::Ping(value)) => match Offer::of_ping(value) {
                        Some(offer) => {
                            let id = MigrationId([7; 16]);
                            encode(&handshake::answer(offer, offer.features, id))
                        }
                        None => encode(&[ReturnMessage::Pong(value)]),
                    },
                    _ => Vec::new(),
                };
                unread.drain(..consumed);
                main.write_all(&answer).unwrap();
            }
        }
    }

    #[test]
    fn only_a_destination_that_cannot_run_the_guest_accepts_not_committed() {
        let settings = RelaySettings {
            outgoing: StreamOptions {
                multifd: Some(false),
                ..StreamOptions::default()
            },
            ..RelaySettings::default()
        };
        let configuration = Configuration {
            machine: "hotlift".to_owned(),
            ..Configuration::default()
        };
        let ram = RamLayout::default();
        let opening = Opening::bare(&configuration, &ram);
        for commits in [false, true] {
            let listener = TcpListener::bind("127.0.0.1:0").unwrap();
            let to = format!("tcp:{}", listener.local_addr().unwrap());
            let (to, memory) = (to.parse().unwrap(), MemoryLimit::new(1 << 20));
            let (facts, control) = (SourceFacts::guest(false), Control::new());
            let sink = StreamSink::connect(&to, &settings, facts, opening, &memory, &control);
            let sink = sink.unwrap();
            std::thread::scope(|scope| {
                scope.spawn(|| answer_pings(&listener));
                scope.spawn(|| sink.return_path(&|_, _, _| Ok(()), &|_, _| ()));
                sink.open(opening).unwrap();
                sink.await_ready().unwrap();
                if commits {
                    sink.guest_may_run();
                }
                sink.close();
            });
            listener.set_nonblocking(true).unwrap();
            assert_eq!(listener.accept().is_ok(), !commits);
        }
    }

    #[test]
    fn the_version_of_a_machine_type_is_parsed() {
        assert_eq!(machine_version("pc-i440fx-7.2"), Some((7, 2)));
        assert_eq!(machine_version("pc-q35-10.0"), Some((10, 0)));
        assert_eq!(machine_version("microvm"), None);
        assert_eq!(machine_version("s390-ccw-virtio"), None);
        for name in ["pc-q35-rhel9.2.0", "pc-i440fx-jammy", "pc-q35-9.0+pve1"] {
            assert_eq!(machine_version(name), None, "{name}");
        }
        assert_eq!(version_of(&Configuration::default()), Some((2, 3)));
    }

    #[test]
    fn sync_points_come_from_the_option_then_source_then_destination_then_an_estimate() {
        let named = |machine: &str| Configuration {
            machine: machine.to_owned(),
            ..Configuration::default()
        };
        let of_relay = |each_section| SyncPoints {
            each_section,
            are_shown: false,
        };
        let shown = SyncPoints::shown;
        let cases = [
            (
                "pc-q35-rhel9.2.0",
                Some(false),
                Some(shown(true)),
                Some(true),
                shown(false),
            ),
            (
                "pc-q35-rhel9.2.0",
                None,
                Some(shown(true)),
                Some(false),
                shown(true),
            ),
            (
                "pc-q35-9.0+pve1",
                None,
                Some(of_relay(false)),
                Some(true),
                shown(true),
            ),
            ("pc-i440fx-jammy", None, None, Some(true), shown(true)),
            ("microvm", None, None, Some(false), shown(false)),
            (
                "pc-i440fx-10.0",
                None,
                Some(of_relay(true)),
                None,
                of_relay(true),
            ),
            ("microvm", None, None, None, of_relay(false)),
            ("pc-i440fx-8.0", None, None, None, of_relay(true)),
            ("", None, None, None, of_relay(true)),
        ];
        for (machine, option, seen, by_qmp, expected) in cases {
            let settings = RelaySettings {
                flush_after_each_section: option,
                qemu_flushes_after_each_section: by_qmp,
                ..RelaySettings::default()
            };
            let got = SyncPoints::of_destination(&settings, seen, &named(machine));
            assert_eq!(got, expected, "{machine}, {option:?}, {seen:?}, {by_qmp:?}");
        }
    }
}

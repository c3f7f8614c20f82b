//! The incoming main channel: sync points between rounds, and what else is not a page.

use std::io;
use std::time::Duration;

use hotlift_wire::handshake::{CONNECTED, Features, PREEMPT};
use hotlift_wire::main_channel::postcopy::{
    LOADED_DEVICES_END, PostcopyCommand, asks_for_loaded_devices,
};
use hotlift_wire::main_channel::{
    Command, EarlyLengths, EarlySection, MainDecoder, MainEvent, PageContent, SectionKind, Step,
};
use hotlift_wire::return_path::ReturnMessage;

use crate::ends::stream_source::damage::broken;
use crate::ends::stream_source::device_state::{self, EOF};
use crate::ends::stream_source::main_pages::MainPages;
use crate::ends::stream_source::setup::Setup;
use crate::ends::stream_source::upstream::Upstream;
use crate::error::{Channel, MigrationError};
use crate::life::LONG;
use crate::life::threads::{OnPanic, Yielding};
use crate::pipe::hooks::Hooks;
use crate::pipe::session::{Call, Session};
use crate::pipe::sink::{Opening, Postcopy};
use crate::status::Status;
use crate::stream::main_recv::{MainInput, Waiting, event_name};
use crate::stream::return_path::encode;
use crate::transport::TransportError;

/// How long pages on a preempt channel may be behind main's END, which was sent after them: TCP sends a lost segment again
/// within 200 ms at the earliest.
const UNDER_WAY: Duration = Duration::from_secs(1);

/// How long a source may send nothing of what was asked for, behind its last page on main.
const SILENT: Duration = Duration::from_secs(30);

/// How long a relay may send nothing within a package, which its QEMU has whole when it begins. If the length is damaged, the rest
/// never comes, and a postcopy cannot be cancelled. Longer than a loss takes to be noticed.
const PACKAGE: Duration = Duration::from_secs(60);

/// The main thread's own state.
pub(crate) struct MainReader<'a> {
    session: &'a Session<'a>,
    upstream: &'a Upstream,
    setup: &'a Setup,
    input: MainInput<'a>,
    decoder: MainDecoder,
    pages: MainPages<'a>,
    section: SectionKind,
    /// What the devices' sections before the end of RAM are compared with at the end of the stream.
    early: EarlyLengths,
    /// Postcopy has begun: each page comes once, and nothing is a sync point.
    switched: bool,
    /// The other side knows that there is a preempt channel.
    preempt_is_known: bool,
    /// A relay's sync point behind the package is still to come.
    awaits_sync: bool,
    /// Once the preempt channel is found, main has what nobody waits for.
    yielding: Yielding,
}

/// What an event leaves to be done once its bytes have been taken.
enum Then {
    Nothing,
    SyncPoint,
    SectionEnd,
    Command(Command),
    Early(EarlySection),
    /// Ranges that the other side is to have nothing in, as the command's bytes.
    Discard(Vec<u8>),
    /// So many bytes follow, with the devices and the command that the guest may run.
    Package(u32),
    /// A relay's source has a preempt channel.
    Preempt,
    /// A guest has asked with this value whether everything so far has come, or a relay whether QEMU is connected.
    Pong(u32),
    RamEnded,
}

impl<'a> MainReader<'a> {
    /// A reader behind the START section of `ram`.
    pub(crate) fn new(
        session: &'a Session<'a>,
        upstream: &'a Upstream,
        setup: &'a Setup,
        input: MainInput<'a>,
        decoder: MainDecoder,
    ) -> Self {
        Self {
            session,
            upstream,
            setup,
            input,
            decoder,
            pages: MainPages::new(
                session,
                &setup.ram,
                upstream.multifd.is_empty(),
                &upstream.demand,
            ),
            section: SectionKind::Start,
            early: EarlyLengths::default(),
            switched: false,
            preempt_is_known: false,
            awaits_sync: false,
            yielding: Yielding::default(),
        }
    }

    /// Passes the whole stream on.
    pub(crate) fn run(
        &mut self,
        opening: &Opening,
        hooks: Hooks<'_>,
        further: &dyn Further,
    ) -> Result<(), MigrationError> {
        self.open(opening)?;
        let unsure = || {
            if self.session.may_run_there() {
                self.session.taking.unsure();
            }
        };
        let _unsure = OnPanic(unsure);
        let outcome = self.pass_all_on(hooks, further);
        if outcome.is_err() {
            unsure();
        }
        outcome
    }

    fn pass_all_on(
        &mut self,
        hooks: Hooks<'_>,
        further: &dyn Further,
    ) -> Result<(), MigrationError> {
        while !self.next(hooks, further)? {}
        if self.switched {
            return self.end_of_postcopy(hooks);
        }
        if self.upstream.is_guest {
            let (input, decoder) = (&mut self.input, &mut self.decoder);
            device_state::from_guest(self.session, self.upstream, input, decoder, hooks)
        } else if self.upstream.is_relay {
            device_state::from_relay(self.session, self.upstream, &mut self.input, hooks)
        } else {
            let input = &mut self.input;
            let late_channel = || further.late_channel();
            let has_footers = !self.setup.configuration.is_absent();
            let early = &self.early;
            device_state::from_qemu(
                self.session,
                self.upstream,
                input,
                (has_footers, early),
                hooks,
                &late_channel,
            )
        }
    }

    /// Opens the other side, up to the RAM blocks.
    fn open(&mut self, opening: &Opening) -> Result<(), MigrationError> {
        let session = self.session;
        session.sink.open(opening)?;
        for command in &self.setup.commands {
            session.sink.command(*command)?;
        }
        let early = &self.setup.early;
        for section in early.all() {
            self.early.note(section);
        }
        session.start_ram(early, &self.setup.ram)
    }

    /// Handles the next event; true behind the END section of `ram`.
    fn next(&mut self, hooks: Hooks<'_>, further: &dyn Further) -> Result<bool, MigrationError> {
        let step = self
            .decoder
            .next(self.input.unread())
            .map_err(|error| broken(error, &self.early))?;
        let (event, consumed) = match step {
            Step::Event { event, consumed } => (event, consumed),
            Step::Need(needed) => {
                // A page that was gathered may be waited for; without postcopy nobody does.
                if self.switched && !self.input.is_readable()? {
                    self.pages.submit();
                }
                let looking = Looking {
                    call: self.session.call(),
                    further: Some(further).filter(|_| self.setup.postcopy),
                    switched: self.switched,
                };
                if !self.input.fill(needed, &looking)? {
                    return Err(MigrationError::main_closed());
                }
                // A destination that takes one loads nothing before it has it, and asks for nothing.
                if self.switched && !self.upstream.demand.has_begun() {
                    self.tell_of_preempt()?;
                }
                self.yielding.once(self.upstream.preempt.is_found());
                return Ok(false);
            }
        };
        let then = match event {
            MainEvent::SectionStart {
                kind: kind @ (SectionKind::Part | SectionKind::End),
                ..
            } => {
                self.section = kind;
                Then::Nothing
            }
            MainEvent::RamPage {
                block,
                offset,
                content,
            } => {
                let asked = self.switched && self.upstream.demand.take(block, offset)?;
                match (asked, content) {
                    (true, PageContent::Normal(page)) => {
                        postcopy(self.session)?.page(block, offset, Some(page))?;
                        self.session.pages.add_pages(1, 0);
                    }
                    (true, PageContent::Zero) => {
                        postcopy(self.session)?.page(block, offset, None)?;
                        self.session.pages.add_pages(0, 1);
                    }
                    (_, content) => self.pages.add(block, offset, content)?,
                }
                Then::Nothing
            }
            MainEvent::Postcopy(PostcopyCommand::Discard { .. }) if self.setup.postcopy => {
                Then::Discard(self.input.unread()[..consumed].to_vec())
            }
            MainEvent::Postcopy(PostcopyCommand::Packaged(length))
                if self.setup.postcopy && !self.session.may_run_there() =>
            {
                Then::Package(length)
            }
            MainEvent::EarlySection(section) => Then::Early(section),
            MainEvent::MultifdFlush => Then::SyncPoint,
            MainEvent::RamEos => Then::SectionEnd,
            MainEvent::Command(Command::Ping(value)) if self.upstream.is_guest => {
                let checked = self.input.check_crc(value);
                checked.map_err(MigrationError::main_wire)?;
                Then::Pong(value)
            }
            // The other side has answered the opening before.
            MainEvent::Command(Command::Ping(CONNECTED)) if self.upstream.is_relay => {
                Then::Pong(CONNECTED)
            }
            MainEvent::Command(Command::Ping(PREEMPT)) if self.upstream.is_relay => Then::Preempt,
            MainEvent::Command(command) => Then::Command(command),
            MainEvent::SectionFooter if self.section == SectionKind::End => Then::RamEnded,
            MainEvent::SectionFooter => Then::Nothing,
            other => {
                return Err(MigrationError::Protocol {
                    channel: Channel::Main,
                    got: event_name(&other),
                    doing: "reading RAM",
                });
            }
        };
        self.input.take(consumed);
        match then {
            Then::Nothing => {}
            Then::SyncPoint => self.barrier()?,
            Then::SectionEnd => self.section_end()?,
            Then::Pong(value) => self.upstream.answer(&encode(&[ReturnMessage::Pong(value)])),
            Then::Preempt => self.make_preempt()?,
            Then::Discard(bytes) => {
                self.switch(further)?;
                postcopy(self.session)?.command(&bytes)?;
            }
            Then::Package(length) => {
                self.switch(further)?;
                self.package(length, hooks)?;
            }
            Then::Command(command) => self.session.sink.command(command)?,
            Then::Early(section) => {
                self.early.note(&section);
                self.session.sink.early_section(&section)?;
            }
            Then::RamEnded => return Ok(true),
        }
        Ok(false)
    }

    /// EOS. With machine types up to 8.0 and multifd it is a sync point, too.
    fn section_end(&mut self) -> Result<(), MigrationError> {
        let is_last = self.section == SectionKind::End;
        let is_sync_point = !self.upstream.multifd.is_empty()
            && !self.setup.flush
            && (!self.switched
                || (is_last && self.upstream.is_relay)
                || std::mem::take(&mut self.awaits_sync));
        match (is_sync_point, is_last) {
            (true, false) => self.barrier()?,
            // The source may rest now; its pages need not.
            (false, false) => {
                self.pages.submit();
                self.session.sink.section_end()?;
            }
            (_, true) => {
                // Without a sync point here the channels have had their last one: only main's own pages
                // are left.
                if is_sync_point {
                    self.session.meet_readers()?;
                }
                self.await_urgent_pages()?;
                self.pages.settle()?;
                self.session.sink.ram_end()?;
                self.pages.barrier_passed();
                if is_sync_point {
                    self.session.barrier.pass();
                }
            }
        }
        Ok(())
    }

    /// Waits for what is still on its way on a preempt channel.
    fn await_urgent_pages(&self) -> Result<(), MigrationError> {
        let Upstream {
            preempt, demand, ..
        } = self.upstream;
        if !preempt.is_any() {
            return Ok(());
        }
        let call = self.session.call();
        match demand.wait_until_met(UNDER_WAY, &call) {
            // Those who have come are strangers, and a QEMU does not answer what it hears behind its last page.
            Err(MigrationError::Timeout { .. }) if !preempt.is_found() => Ok(()),
            Err(MigrationError::Timeout { .. }) => demand.wait_until_met(SILENT, &call),
            waited => waited,
        }
    }

    /// A sync point of the source.
    fn barrier(&mut self) -> Result<(), MigrationError> {
        self.pages.submit();
        self.session.meet_readers()?;
        self.pages.settle()?;
        self.session.sink.barrier()?;
        self.pages.barrier_passed();
        self.session.barrier.pass();
        Ok(())
    }

    /// Postcopy begins, unless it has: everything of precopy is on the other side before.
    fn switch(&mut self, further: &dyn Further) -> Result<(), MigrationError> {
        if self.switched {
            return Ok(());
        }
        // The source has made its last sync point, and sends no packets behind it.
        self.pages.settle()?;
        self.session.sink.barrier()?;
        self.pages.barrier_passed();
        let postcopy = postcopy(self.session)?;
        // The source is in postcopy: it does not go on by itself.
        self.session.switch();
        // Nothing but requests goes there from here on.
        self.upstream.main.notice_loss();
        // The source has made that connection before it has sent this.
        if further.preempt_for_sure() {
            self.tell_of_preempt()?;
        }
        postcopy.begin();
        self.input.read_little();
        self.pages.switch();
        self.switched = true;
        Ok(())
    }

    /// Gives the other side its preempt channel.
    fn make_preempt(&self) -> Result<(), MigrationError> {
        match postcopy(self.session)?.preempt() {
            // Who takes one listens until it has it: what has come to the source's relay is a stranger's.
            Err(error) if is_closed_to_all(&error) => Ok(()),
            made => made,
        }
    }

    /// The other side has to know of a preempt channel before the package.
    fn tell_of_preempt(&mut self) -> Result<(), MigrationError> {
        if self.upstream.preempt.is_any() && !self.preempt_is_known {
            self.preempt_is_known = true;
            self.make_preempt()?;
        }
        Ok(())
    }

    /// Has the other side run the guest. The package is passed on as it comes, but its end only once all of it is here and
    /// checked: a QEMU uses nothing of a package that it has not whole, so that a source that is lost on the way, or a damaged
    /// byte, runs no guest there.
    fn package(&mut self, length: u32, hooks: Hooks<'_>) -> Result<(), MigrationError> {
        // A postcopy has no description to compare lengths with.
        self.early
            .check(&[])
            .map_err(|error| broken(error, &self.early))?;
        let postcopy = postcopy(self.session)?;
        self.session.control.set_status(Status::Device);
        postcopy.begin_package(length)?;
        let length = usize::try_from(length).unwrap_or(usize::MAX);
        let end = self.pass_package(postcopy, length)?;
        let is_checked = |features: Features| features.contains(Features::PACKAGE_CHECKED);
        if self.setup.relay.is_some_and(is_checked) {
            self.check()?;
        }
        if asks_for_loaded_devices(&end) {
            self.session.note_source_resumes();
        }
        self.session.switch_over(hooks)?;
        if self.upstream.is_relay {
            // Whoever asks from here on must not hear that the guest never runs there.
            if !(self.session.taking.loaded() && self.session.taking.commit()) {
                return Err(device_state::unexpected("the switch behind a failure"));
            }
            self.awaits_sync = !self.upstream.multifd.is_empty() && !self.setup.flush;
        }
        postcopy.end_package(&end)?;
        self.session.control.set_status(Status::PostcopyActive);
        Ok(())
    }

    /// Passes a package of `length` bytes on, but for its end, which it returns. A relay that sends nothing for [`PACKAGE`] counts as
    /// closed.
    fn pass_package(
        &mut self,
        postcopy: &dyn Postcopy,
        length: usize,
    ) -> Result<Vec<u8>, MigrationError> {
        let patience = self.upstream.is_relay.then_some(PACKAGE);
        let mut missing = length;
        loop {
            let unread = self.input.unread();
            let come = unread.len().min(missing);
            if come == missing && missing <= LOADED_DEVICES_END {
                let end = unread[..missing].to_vec();
                self.input.take(missing);
                return Ok(end);
            }
            let passed = come.min(missing.saturating_sub(LOADED_DEVICES_END));
            if passed > 0 {
                postcopy.package_part(&unread[..passed])?;
                self.input.take(passed);
                missing -= passed;
                continue;
            }
            if !self.input.fill_some(1, patience, &self.session.call())? {
                return Err(MigrationError::main_closed());
            }
        }
    }

    /// Reads the PING behind a package: everything so far is as the source's relay has written it.
    fn check(&mut self) -> Result<(), MigrationError> {
        loop {
            let step = self.decoder.next(self.input.unread());
            match step.map_err(MigrationError::main_wire)? {
                Step::Event {
                    event: MainEvent::Command(Command::Ping(value)),
                    consumed,
                } => {
                    let checked = self.input.check_crc(value);
                    self.input.take(consumed);
                    return checked.map_err(MigrationError::main_wire);
                }
                Step::Event { .. } => {
                    return Err(device_state::unexpected(
                        "something else than the checksum of the package",
                    ));
                }
                Step::Need(needed) => {
                    let call = self.session.call();
                    if !self.input.fill_some(needed, Some(PACKAGE), &call)? {
                        return Err(MigrationError::main_closed());
                    }
                }
            }
        }
    }

    /// All pages are on the other side: the end of the stream, and its word that it has them.
    fn end_of_postcopy(&mut self, hooks: Hooks<'_>) -> Result<(), MigrationError> {
        let session = self.session;
        if self.input.unread().is_empty() && !self.input.fill(1, &session.call())? {
            return Err(MigrationError::main_closed());
        }
        if self.input.unread()[0] != EOF || !session.may_run_there() {
            return Err(device_state::unexpected("something else than EOF"));
        }
        self.input.take(1);
        if !session.commit(hooks) {
            return Err(MigrationError::Cancelled);
        }
        let doing = device_state::hand_over(session, &[EOF], hooks)?;
        device_state::report_taken(session, self.upstream, doing);
        Ok(())
    }
}

/// What else may connect while main is read.
pub(crate) trait Further {
    /// Takes a preempt channel in, if one has come; before the switch only where the source waits for it.
    fn preempt(&self, switched: bool);

    /// The same, if it may be on its way; whether there is one.
    fn preempt_for_sure(&self) -> bool;

    /// Whether a multifd channel has come too late to be counted.
    fn late_channel(&self) -> bool;
}

/// A wait for main that looks for a preempt channel: over TLS the source waits for its handshake.
struct Looking<'a> {
    call: Call<'a>,
    further: Option<&'a dyn Further>,
    switched: bool,
}

impl Waiting for Looking<'_> {
    fn check(&self) -> Result<(), MigrationError> {
        if let Some(further) = self.further {
            further.preempt(self.switched);
        }
        self.call.check()
    }

    fn every(&self) -> Duration {
        /// How soon a preempt channel is let in: its source waits for the handshake.
        const LOOK: Duration = Duration::from_millis(100);
        self.further.map_or(LONG, |_| LOOK)
    }
}

/// Whether nobody listens there.
fn is_closed_to_all(error: &MigrationError) -> bool {
    let MigrationError::Transport(TransportError::Connect { source, .. }) = error else {
        return false;
    };
    matches!(
        source.kind(),
        io::ErrorKind::ConnectionRefused | io::ErrorKind::NotFound
    )
}

fn postcopy<'s>(session: &'s Session<'_>) -> Result<&'s dyn Postcopy, MigrationError> {
    session.sink.postcopy().ok_or(MigrationError::Protocol {
        channel: Channel::Main,
        got: "postcopy".to_owned(),
        doing: "saving a guest",
    })
}

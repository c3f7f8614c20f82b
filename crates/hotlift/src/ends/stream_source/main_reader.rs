//! The incoming main channel of a relay: executes the actions of [`MainChannel`] on the sink and towards the source.

use std::io;
use std::time::Duration;

use hotlift_net::transport::TransportError;
use hotlift_wire::main_channel::postcopy::asks_for_loaded_devices;
use hotlift_wire::main_channel::{Command, PageContent};
use hotlift_wire::return_path::ReturnMessage;

use crate::ends::stream_source::device_state::{await_release, hand_over, report_run};
use crate::ends::stream_source::main_pages::MainPages;
use crate::ends::stream_source::read_setup::Setup;
use crate::ends::stream_source::upstream::Upstream;
use crate::error::{Channel, MigrationError};
use crate::life::LONG;
use crate::life::threads::{DetachableThread, OnPanic};
use crate::pipe::hooks::Hooks;
use crate::pipe::session::{Session, WaitCheck};
use crate::pipe::sink::{Opening, Postcopy};
use crate::status::{MigrationEvent, Status};
use crate::stream::main_channel::{Action, EOF, EndCause, MainChannel, Step, unexpected};
use crate::stream::main_recv::{MainInput, WaitCondition};
use crate::stream::return_path::encode;

/// Time to wait for pages on a preempt channel after END on main. The source has sent them before END, but TCP repeats a lost
/// segment only after at least 200 ms.
const UNDER_WAY: Duration = Duration::from_secs(1);

/// Time limit for the next requested page, after a source's last page on main.
const SILENT: Duration = Duration::from_secs(30);

/// Reads main, and forwards it.
pub(crate) struct MainReader<'a> {
    input: MainInput<'a>,
    machine: MainChannel,
    relay: Relay<'a>,
}

/// State that the main thread needs to execute actions.
struct Relay<'a> {
    session: &'a Session<'a>,
    upstream: &'a Upstream,
    setup: &'a Setup,
    pages: MainPages<'a>,
    /// True once the stream has shown that the source has paused its guest.
    is_paused: bool,
    /// True once postcopy has begun.
    switched: bool,
    /// True once this relay has connected a preempt channel to the peer, or has tried to.
    preempt_is_known: bool,
    /// Lowers this thread's priority once the preempt channel is found. From then on, the guest does not wait for pages on
    /// main.
    yielding: DetachableThread,
}

/// Continuation after an action.
enum Next {
    GoOn,
    /// The remaining bytes end the stream, and the source has released the guest.
    End,
    /// Everything is done.
    Done,
}

impl<'a> MainReader<'a> {
    /// Creates a reader that begins after the START section of `ram`.
    pub(crate) fn new(
        session: &'a Session<'a>,
        upstream: &'a Upstream,
        setup: &'a Setup,
        input: MainInput<'a>,
        mut machine: MainChannel,
    ) -> Self {
        machine.set_shows_loading(session.sink.shows_loading());
        Self {
            input,
            machine,
            relay: Relay {
                session,
                upstream,
                setup,
                pages: MainPages::new(
                    session,
                    &setup.ram,
                    upstream.source.multifd.is_empty(),
                    &upstream.pending_requests,
                ),
                is_paused: false,
                switched: false,
                preempt_is_known: false,
                yielding: DetachableThread::default(),
            },
        }
    }

    /// Forwards the whole stream.
    pub(crate) fn run(
        &mut self,
        opening: Opening<'_>,
        hooks: Hooks<'_>,
        further: &dyn LateConnections,
    ) -> Result<(), MigrationError> {
        let session = self.relay.session;
        self.relay.open(opening)?;
        // Has an effect only while the guest is being started.
        let _unsure = OnPanic(|| session.destination_handover.unsure());
        let outcome = self.pass_all_on(hooks, further);
        if outcome.is_err() {
            session.destination_handover.unsure();
        }
        outcome
    }

    fn pass_all_on(
        &mut self,
        hooks: Hooks<'_>,
        further: &dyn LateConnections,
    ) -> Result<(), MigrationError> {
        loop {
            let unread = self.input.unread();
            match self.machine.next(unread)? {
                Step::Need(needed) => self.read(needed, further)?,
                Step::Do(action, consumed) => {
                    let taken = &unread[..consumed];
                    match self.relay.act(action, taken, hooks, further)? {
                        Next::GoOn => self.input.take(consumed),
                        Next::End => return self.relay.end_of_qemu(unread, hooks),
                        Next::Done => return Ok(()),
                    }
                }
            }
        }
    }

    fn read(&mut self, needed: usize, further: &dyn LateConnections) -> Result<(), MigrationError> {
        let Self {
            input,
            machine,
            relay,
        } = self;
        if relay.switched {
            input.read_little();
            // In postcopy the guest may wait for a collected page.
            if !input.is_readable()? {
                relay.pages.submit();
            }
        }
        let main_wait = MainWait {
            call: relay.session.call(),
            further: Some(further).filter(|_| relay.setup.postcopy),
            switched: relay.switched,
        };
        match input.fill(machine, needed, &main_wait) {
            // A failed read after the commit must not fail the migration: the guest is handed over without the VM description.
            Err(_) if relay.session.source_handover.is_committed() => {
                machine.ended(EndCause::Closed)
            }
            filled => filled?,
        }
        // A destination with a preempt channel loads nothing and requests nothing before it has this channel.
        if relay.switched && !relay.upstream.pending_requests.has_begun() {
            relay.connect_preempt()?;
        }
        relay.yielding.once(relay.upstream.preempt.is_found());
        Ok(())
    }
}

impl Relay<'_> {
    /// Opens the stream to the peer, up to the RAM blocks.
    fn open(&self, opening: Opening<'_>) -> Result<(), MigrationError> {
        self.session.sink.open(opening)?;
        self.session.start_ram(opening.early)
    }

    /// Executes an action of the machine. `bytes` are the bytes that the action has consumed.
    fn act(
        &mut self,
        action: Action<'_>,
        bytes: &[u8],
        hooks: Hooks<'_>,
        further: &dyn LateConnections,
    ) -> Result<Next, MigrationError> {
        let session = self.session;
        match action {
            Action::Nothing => {}
            Action::Page {
                block,
                offset,
                content,
            } => self.page(block, offset, content)?,
            Action::SyncPoint => self.barrier()?,
            // The source may pause now; its pages must not wait.
            Action::SectionEnd => {
                self.pages.submit();
                session.sink.section_end()?;
            }
            Action::LastSection => self.source_paused(),
            Action::RamEnd { is_sync_point } => self.ram_end(is_sync_point)?,
            Action::Pong(value) => {
                let pong = encode(&[ReturnMessage::Pong(value)]);
                self.upstream.answer(&pong);
            }
            Action::Command(command) => {
                if command == Command::SwitchoverStart {
                    self.source_paused();
                }
                session.sink.command(command)?;
            }
            Action::Early(section) => session.sink.early_section(&section)?,
            Action::Preempt => self.make_preempt()?,
            Action::Discard { .. } => {
                self.source_paused();
                self.switch(further)?;
                postcopy(session)?.raw(bytes)?;
            }
            Action::Package(length) => {
                self.source_paused();
                self.switch(further)?;
                session.control.set_status(Status::Device);
                postcopy(session)?.begin_package(length)?;
            }
            Action::PackagePart(part) => postcopy(session)?.raw(part)?,
            Action::PackageEnd(end) => self.run_there(end, hooks)?,
            Action::Devices(part) => {
                session.control.set_status(Status::Device);
                session.sink.devices(part)?;
            }
            Action::Load(asked) => {
                session.sink.await_loaded()?;
                if !session.destination_handover.loaded() {
                    return Err(MigrationError::Cancelled);
                }
                let pong = encode(&[ReturnMessage::Pong(asked)]);
                self.upstream.answer(&pong);
            }
            Action::DevicesEnd => {
                self.offer(further)?;
                if let Some(ownership) = hooks.ownership {
                    await_release(session, ownership)?;
                    return Ok(Next::End);
                }
            }
            Action::Released => return Ok(Next::End),
            Action::Eof { .. } if self.switched => {
                if !session.commit(hooks) {
                    return Err(MigrationError::Cancelled);
                }
                let doing = hand_over(session, &[EOF], hooks)?;
                report_run(session, self.upstream, doing);
                return Ok(Next::Done);
            }
            Action::Eof { .. } => self.commit(hooks)?,
            Action::End(end) => {
                let outcome = hand_over(session, end, hooks);
                match &outcome {
                    Ok(doing) => report_run(session, self.upstream, *doing),
                    Err(MigrationError::Destination { .. } | MigrationError::File(_)) => {
                        session.destination_handover.refused();
                    }
                    Err(_) => session.destination_handover.unsure(),
                }
                return outcome.map(|_| Next::Done);
            }
            _ => return Err(unexpected("a record for guests")),
        }
        Ok(Next::GoOn)
    }

    fn page(
        &mut self,
        block: usize,
        offset: u64,
        content: PageContent<'_>,
    ) -> Result<(), MigrationError> {
        let session = self.session;
        let asked = self.switched && self.upstream.pending_requests.take(block, offset)?;
        match (asked, content) {
            (true, PageContent::Normal(page)) => {
                postcopy(session)?.page(block, offset, Some(page))?;
                session.pages.add_pages(1, 0);
                Ok(())
            }
            (true, PageContent::Zero) => {
                postcopy(session)?.page(block, offset, None)?;
                session.pages.add_pages(0, 1);
                Ok(())
            }
            (_, content) => self.pages.add(block, offset, content),
        }
    }

    /// Reports, once, that the source has paused its guest.
    fn source_paused(&mut self) {
        if !std::mem::replace(&mut self.is_paused, true) {
            self.session.control.report(MigrationEvent::Stopped);
        }
    }

    /// Ends RAM. Without a sync point here, the channels have already passed their last sync point, and only main has pages
    /// left.
    fn ram_end(&mut self, is_sync_point: bool) -> Result<(), MigrationError> {
        if is_sync_point {
            self.session.await_readers()?;
        }
        self.await_urgent_pages()?;
        self.pages.settle()?;
        self.session.sink.ram_end()?;
        self.pages.barrier_passed();
        if is_sync_point {
            self.session.barrier.pass();
        }
        // In postcopy, and in a relay's stream, this state is set elsewhere: with the package, and with the first device part.
        if !self.switched && (self.upstream.is_guest || !self.upstream.source.is_hotlift()) {
            self.session.control.set_status(Status::Device);
        }
        Ok(())
    }

    /// Waits for pages that are still on their way on a preempt channel.
    fn await_urgent_pages(&self) -> Result<(), MigrationError> {
        let Upstream {
            preempt,
            pending_requests,
            ..
        } = self.upstream;
        if !preempt.is_any() {
            return Ok(());
        }
        let call = self.session.call();
        match pending_requests.wait_until_met(UNDER_WAY, &call) {
            // None of the candidates is the channel, and a QEMU answers no requests after its last page: nothing more will
            // come.
            Err(MigrationError::Timeout { .. }) if !preempt.is_found() => Ok(()),
            Err(MigrationError::Timeout { .. }) => pending_requests.wait_until_met(SILENT, &call),
            waited => waited,
        }
    }

    /// Handles a sync point of the source.
    fn barrier(&mut self) -> Result<(), MigrationError> {
        self.pages.submit();
        self.session.await_readers()?;
        self.pages.settle()?;
        self.session.sink.barrier()?;
        self.pages.barrier_passed();
        self.session.barrier.pass();
        Ok(())
    }

    /// Begins postcopy, unless it has already begun. First, all data of precopy is sent to the peer.
    fn switch(&mut self, further: &dyn LateConnections) -> Result<(), MigrationError> {
        if self.switched {
            return Ok(());
        }
        // The source has sent its last sync point, and sends no packets after it.
        self.pages.settle()?;
        self.session.sink.barrier()?;
        self.pages.barrier_passed();
        let postcopy = postcopy(self.session)?;
        // The source is in postcopy: it does not resume its guest by itself.
        self.session.switch();
        // From now on this side only sends requests to the source.
        self.upstream.source.main.notice_loss();
        // The source has made the preempt connection before it sent this command.
        if further.preempt_for_sure() {
            self.connect_preempt()?;
        }
        postcopy.begin();
        self.pages.switch();
        self.switched = true;
        Ok(())
    }

    /// Connects the preempt channel to the peer.
    fn make_preempt(&self) -> Result<(), MigrationError> {
        match postcopy(self.session)?.preempt() {
            // A peer that uses a preempt channel listens until it has the channel. No process listens, so the connection at
            // this relay came from an unknown client.
            Err(error) if is_closed_to_all(&error) => Ok(()),
            made => made,
        }
    }

    /// Connects the peer's preempt channel, if there is a candidate: the peer must have it before the package.
    fn connect_preempt(&mut self) -> Result<(), MigrationError> {
        if self.upstream.preempt.is_any() && !self.preempt_is_known {
            self.preempt_is_known = true;
            self.make_preempt()?;
        }
        Ok(())
    }

    /// Makes the peer start the guest: sends the end of a complete package.
    fn run_there(&self, end: &[u8], hooks: Hooks<'_>) -> Result<(), MigrationError> {
        let session = self.session;
        if asks_for_loaded_devices(end) {
            session.note_source_resumes();
        }
        session.switch_over(hooks)?;
        // From now on an outcome query must not be answered with "never".
        if self.upstream.source.is_hotlift()
            && !(session.destination_handover.loaded() && session.destination_handover.commit())
        {
            return Err(unexpected("the switchover after a failure"));
        }
        postcopy(session)?.end_package(end)?;
        session.control.set_status(Status::PostcopyActive);
        Ok(())
    }

    /// Asks a QEMU, whose devices are loaded at the destination, to release the guest.
    fn offer(&self, further: &dyn LateConnections) -> Result<(), MigrationError> {
        let (session, upstream) = (self.session, self.upstream);
        session.sink.await_loaded()?;
        if further.late_channel() {
            return Err(MigrationError::Protocol {
                channel: Channel::Main,
                got: "a further multifd channel at the end of the stream".to_owned(),
                doing: "reading RAM (its connection arrived too late to be counted)",
            });
        }
        // A source that reads answers releases the guest at SHUT(0), and not before. If its connection is closed already, it
        // was cancelled or has died.
        if upstream.return_path && upstream.source.main.is_hung_up() {
            return Err(MigrationError::main_closed());
        }
        if !session.offer() {
            return Err(MigrationError::Cancelled);
        }
        upstream.answer_or_fail(&encode(&[ReturnMessage::Shut(0)]))
    }

    /// Handles the release of the guest by a QEMU. Sends `end`, the end of the stream, after which the peer runs the guest.
    fn end_of_qemu(&self, end: &[u8], hooks: Hooks<'_>) -> Result<(), MigrationError> {
        self.session.source_handover.released();
        if !self.session.commit(hooks) {
            return Err(MigrationError::Cancelled);
        }
        hand_over(self.session, end, hooks).map(drop)
    }

    /// Handles the release of the guest by a Hotlift, or by the source of that Hotlift.
    fn commit(&self, hooks: Hooks<'_>) -> Result<(), MigrationError> {
        let session = self.session;
        // If this side has answered that the guest never runs here, the source keeps the guest.
        if !session.destination_handover.commit() {
            return Err(unexpected("EOF of a source that keeps the guest"));
        }
        if !session.commit(hooks) {
            session.destination_handover.refused();
            return Err(MigrationError::Cancelled);
        }
        Ok(())
    }
}

/// Other connections that may arrive while main is read.
pub(crate) trait LateConnections {
    /// Accepts a preempt channel, if one has arrived. Before postcopy (`switched` is false), only if the source waits for the
    /// accept.
    fn preempt(&self, switched: bool);

    /// Accepts a preempt channel that may be on its way; returns true if there is one.
    fn preempt_for_sure(&self) -> bool;

    /// Returns true if a multifd channel has arrived too late to be counted.
    fn late_channel(&self) -> bool;
}

/// A wait for main that also accepts a preempt channel, because with TLS the source waits for its handshake.
struct MainWait<'a> {
    call: WaitCheck<'a>,
    further: Option<&'a dyn LateConnections>,
    switched: bool,
}

impl WaitCondition for MainWait<'_> {
    fn check(&self) -> Result<(), MigrationError> {
        if let Some(further) = self.further {
            further.preempt(self.switched);
        }
        self.call.check()
    }

    fn every(&self) -> Duration {
        /// Interval of checks for a new preempt channel. It delays the channel's handshake, for which the source waits.
        const POLL_INTERVAL: Duration = Duration::from_millis(100);
        self.further.map_or(LONG, |_| POLL_INTERVAL)
    }
}

/// Returns true if no process listens at the address.
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

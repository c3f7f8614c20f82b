//! The incoming main channel on its way through: does what [`MainChannel`] asks for, at the sink and towards the source.

use std::io;
use std::time::Duration;

use hotlift_net::transport::TransportError;
use hotlift_wire::main_channel::PageContent;
use hotlift_wire::main_channel::postcopy::asks_for_loaded_devices;
use hotlift_wire::return_path::ReturnMessage;

use crate::ends::stream_source::device_state::{await_release, hand_over, report_taken};
use crate::ends::stream_source::main_pages::MainPages;
use crate::ends::stream_source::read_setup::Setup;
use crate::ends::stream_source::upstream::Upstream;
use crate::error::{Channel, MigrationError};
use crate::life::LONG;
use crate::life::threads::{OnPanic, Yielding};
use crate::pipe::hooks::Hooks;
use crate::pipe::session::{Call, Session};
use crate::pipe::sink::{Opening, Postcopy};
use crate::status::Status;
use crate::stream::main_channel::{Action, EOF, Ended, MainChannel, Step, unexpected};
use crate::stream::main_recv::{MainInput, Waiting};
use crate::stream::return_path::encode;

/// How long pages on a preempt channel may be behind main's END, which was sent after them: TCP sends a lost segment again
/// within 200 ms at the earliest.
const UNDER_WAY: Duration = Duration::from_secs(1);

/// How long a source may send nothing of what was asked for, behind its last page on main.
const SILENT: Duration = Duration::from_secs(30);

/// Reads main, and passes it on.
pub(crate) struct MainReader<'a> {
    input: MainInput<'a>,
    machine: MainChannel,
    relay: Relay<'a>,
}

/// What the main thread does with what it reads.
struct Relay<'a> {
    session: &'a Session<'a>,
    upstream: &'a Upstream,
    setup: &'a Setup,
    pages: MainPages<'a>,
    /// Postcopy has begun.
    switched: bool,
    /// The other side knows that there is a preempt channel.
    preempt_is_known: bool,
    /// Once the preempt channel is found, main has what no guest waits for.
    yielding: Yielding,
}

/// What follows an action.
enum Next {
    GoOn,
    /// What is not taken yet ends the stream, and the source has released the guest.
    End,
    /// Everything is done.
    Done,
}

impl<'a> MainReader<'a> {
    /// A reader behind the START section of `ram`.
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
                    &upstream.demand,
                ),
                switched: false,
                preempt_is_known: false,
                yielding: Yielding::default(),
            },
        }
    }

    /// Passes the whole stream on.
    pub(crate) fn run(
        &mut self,
        opening: Opening<'_>,
        hooks: Hooks<'_>,
        further: &dyn Further,
    ) -> Result<(), MigrationError> {
        let session = self.relay.session;
        self.relay.open(opening)?;
        // Nothing but a guest that is being taken becomes unsure.
        let _unsure = OnPanic(|| session.taking.unsure());
        let outcome = self.pass_all_on(hooks, further);
        if outcome.is_err() {
            session.taking.unsure();
        }
        outcome
    }

    fn pass_all_on(
        &mut self,
        hooks: Hooks<'_>,
        further: &dyn Further,
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

    fn read(&mut self, needed: usize, further: &dyn Further) -> Result<(), MigrationError> {
        let Self {
            input,
            machine,
            relay,
        } = self;
        if relay.switched {
            input.read_little();
            // The guest may wait for a page that was gathered; without postcopy it does not.
            if !input.is_readable()? {
                relay.pages.submit();
            }
        }
        let looking = Looking {
            call: relay.session.call(),
            further: Some(further).filter(|_| relay.setup.postcopy),
            switched: relay.switched,
        };
        match input.fill(machine, needed, &looking) {
            // Nothing may fail any more: without memory for the description, the guest goes without.
            Err(_) if relay.session.giving.is_committed() => machine.ended(Ended::Closed),
            filled => filled?,
        }
        // A destination that takes one loads nothing before it has it, and asks for nothing.
        if relay.switched && !relay.upstream.demand.has_begun() {
            relay.tell_of_preempt()?;
        }
        relay.yielding.once(relay.upstream.preempt.is_found());
        Ok(())
    }
}

impl Relay<'_> {
    /// Opens the other side, up to the RAM blocks.
    fn open(&self, opening: Opening<'_>) -> Result<(), MigrationError> {
        self.session.sink.open(opening)?;
        self.session.start_ram(opening.early)
    }

    /// Does what the machine asks for; `bytes` are those that it took.
    fn act(
        &mut self,
        action: Action<'_>,
        bytes: &[u8],
        hooks: Hooks<'_>,
        further: &dyn Further,
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
            // The source may rest now; its pages need not.
            Action::SectionEnd => {
                self.pages.submit();
                session.sink.section_end()?;
            }
            Action::RamEnd { is_sync_point } => self.ram_end(is_sync_point)?,
            Action::Pong(value) => {
                let pong = encode(&[ReturnMessage::Pong(value)]);
                self.upstream.answer(&pong);
            }
            Action::Command(command) => session.sink.command(command)?,
            Action::Early(section) => session.sink.early_section(&section)?,
            Action::Preempt => self.make_preempt()?,
            Action::Discard { .. } => {
                self.switch(further)?;
                postcopy(session)?.raw(bytes)?;
            }
            Action::Package(length) => {
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
                if !session.taking.loaded() {
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
                report_taken(session, self.upstream, doing);
                return Ok(Next::Done);
            }
            Action::Eof { .. } => self.commit(hooks)?,
            Action::End(end) => {
                let outcome = hand_over(session, end, hooks);
                match &outcome {
                    Ok(doing) => report_taken(session, self.upstream, *doing),
                    Err(MigrationError::Destination { .. } | MigrationError::File(_)) => {
                        session.taking.refused();
                    }
                    Err(_) => session.taking.unsure(),
                }
                return outcome.map(|_| Next::Done);
            }
            _ => return Err(unexpected("what only a guest takes")),
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
        let asked = self.switched && self.upstream.demand.take(block, offset)?;
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

    /// The end of RAM. Without a sync point here the channels have had their last one: only main's own pages are left.
    fn ram_end(&mut self, is_sync_point: bool) -> Result<(), MigrationError> {
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
        // Everything of a postcopy's devices, and a relay's first part of them, comes at another time.
        if !self.switched && (self.upstream.is_guest || !self.upstream.source.is_hotlift()) {
            self.session.control.set_status(Status::Device);
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
            // What has come are strangers, and a QEMU does not answer what comes behind its last page.
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
        self.upstream.source.main.notice_loss();
        // The source has made that connection before it has sent this.
        if further.preempt_for_sure() {
            self.tell_of_preempt()?;
        }
        postcopy.begin();
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

    /// Has the other side run the guest, by the end of a package that is whole.
    fn run_there(&self, end: &[u8], hooks: Hooks<'_>) -> Result<(), MigrationError> {
        let session = self.session;
        if asks_for_loaded_devices(end) {
            session.note_source_resumes();
        }
        session.switch_over(hooks)?;
        // From here on a question must not be answered with: the guest never runs there.
        if self.upstream.source.is_hotlift()
            && !(session.taking.loaded() && session.taking.commit())
        {
            return Err(unexpected("the switch behind a failure"));
        }
        postcopy(session)?.end_package(end)?;
        session.control.set_status(Status::PostcopyActive);
        Ok(())
    }

    /// Asks a QEMU to release the guest, whose devices are loaded.
    fn offer(&self, further: &dyn Further) -> Result<(), MigrationError> {
        let (session, upstream) = (self.session, self.upstream);
        session.sink.await_loaded()?;
        if further.late_channel() {
            return Err(MigrationError::Protocol {
                channel: Channel::Main,
                got: "a further multifd channel at the end of the stream".to_owned(),
                doing: "reading RAM (its connection came too late to be counted)",
            });
        }
        // A source that takes answers releases the guest at SHUT(0), and not before: one that has gone already was
        // cancelled, or has died.
        if upstream.return_path && upstream.source.main.is_hung_up() {
            return Err(MigrationError::main_closed());
        }
        if !session.offer() {
            return Err(MigrationError::Cancelled);
        }
        upstream.answer_surely(&encode(&[ReturnMessage::Shut(0)]))
    }

    /// A QEMU has released the guest: the other side runs it, by the `end` of the stream.
    fn end_of_qemu(&self, end: &[u8], hooks: Hooks<'_>) -> Result<(), MigrationError> {
        self.session.giving.released();
        if !self.session.commit(hooks) {
            return Err(MigrationError::Cancelled);
        }
        hand_over(self.session, end, hooks).map(drop)
    }

    /// A Hotlift has released the guest, or its source has.
    fn commit(&self, hooks: Hooks<'_>) -> Result<(), MigrationError> {
        let session = self.session;
        // A source that has had the answer that the guest never runs here has it.
        if !session.taking.commit() {
            return Err(unexpected("EOF of a source that has kept the guest"));
        }
        if !session.commit(hooks) {
            session.taking.refused();
            return Err(MigrationError::Cancelled);
        }
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

/// Whether nothing listens there.
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

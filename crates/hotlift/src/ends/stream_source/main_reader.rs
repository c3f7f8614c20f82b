//! The incoming main channel: sync points between rounds, and what else is not a page.

use hotlift_wire::main_channel::{Command, MainDecoder, MainEvent, SectionKind, Step};

use crate::control::Status;
use crate::ends::stream_source::device_state;
use crate::ends::stream_source::main_pages::MainPages;
use crate::ends::stream_source::setup::Setup;
use crate::ends::stream_source::upstream::Upstream;
use crate::error::{Channel, MigrationError};
use crate::pipe::hooks::Hooks;
use crate::pipe::session::Session;
use crate::pipe::sink::Opening;
use crate::stream::main_recv::{MainInput, event_name};

/// The main thread's own state.
pub(crate) struct MainReader<'a> {
    session: &'a Session<'a>,
    upstream: &'a Upstream,
    setup: &'a Setup,
    input: MainInput<'a>,
    decoder: MainDecoder,
    pages: MainPages<'a>,
    section: SectionKind,
}

/// What an event leaves to be done once its bytes have been taken.
enum Then {
    Nothing,
    SyncPoint,
    SectionEnd,
    Command(Command),
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
            pages: MainPages::new(session, &setup.ram, upstream.multifd.is_empty()),
            section: SectionKind::Start,
        }
    }

    /// Passes the whole stream on.
    pub(crate) fn run(
        &mut self,
        opening: &Opening,
        hooks: Hooks<'_>,
        late_channel: &dyn Fn() -> bool,
    ) -> Result<(), MigrationError> {
        self.open(opening)?;
        while !self.next()? {}
        if self.upstream.is_relay {
            device_state::from_relay(self.session, self.upstream, &mut self.input, hooks)
        } else {
            let input = &mut self.input;
            device_state::from_qemu(self.session, self.upstream, input, hooks, late_channel)
        }
    }

    /// Opens the other side, up to the RAM blocks.
    fn open(&mut self, opening: &Opening) -> Result<(), MigrationError> {
        let session = self.session;
        session.sink.open(opening)?;
        for command in &self.setup.commands {
            session.sink.command(*command)?;
        }
        self.session.meet_readers()?;
        session.sink.ram_start(&self.setup.ram)?;
        session.barrier.pass();
        session.control.set_status(Status::Active);
        Ok(())
    }

    /// Handles the next event; true behind the END section of `ram`.
    fn next(&mut self) -> Result<bool, MigrationError> {
        let step = self
            .decoder
            .next(self.input.unread())
            .map_err(MigrationError::main_wire)?;
        let (event, consumed) = match step {
            Step::Event { event, consumed } => (event, consumed),
            Step::Need(needed) => {
                if !self.input.fill(needed, &self.session.call())? {
                    return Err(MigrationError::main_closed());
                }
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
                self.pages.add(block, offset, content)?;
                Then::Nothing
            }
            MainEvent::MultifdFlush => Then::SyncPoint,
            MainEvent::RamEos => Then::SectionEnd,
            MainEvent::Command(command) => Then::Command(command),
            MainEvent::SectionFooter if self.section == SectionKind::End => Then::RamEnded,
            MainEvent::SectionFooter => Then::Nothing,
            other => {
                return Err(MigrationError::Protocol {
                    channel: Channel::Main,
                    got: event_name(&other),
                    doing: "reading RAM (this stream cannot be relayed: migrate without the relay)",
                });
            }
        };
        self.input.take(consumed);
        match then {
            Then::Nothing => {}
            Then::SyncPoint => self.barrier()?,
            Then::SectionEnd => self.section_end()?,
            Then::Command(command) => self.session.sink.command(command)?,
            Then::RamEnded => return Ok(true),
        }
        Ok(false)
    }

    /// EOS. With machine types up to 8.0 and multifd it is a sync point, too.
    fn section_end(&mut self) -> Result<(), MigrationError> {
        let is_sync_point = !self.upstream.multifd.is_empty() && !self.setup.flush;
        let is_last = self.section == SectionKind::End;
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
}

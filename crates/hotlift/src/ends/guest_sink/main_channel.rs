//! The main channel at the destination: executes the actions of [`MainChannel`] on the guest and towards the source.

use hotlift_mem::PAGE_SIZE;
use hotlift_methods::legacy::compress::Inflater;
use hotlift_wire::main_channel::{Command, PageContent};
use hotlift_wire::return_path::ReturnMessage;

use crate::ends::guest_sink::decompress_threads;
use crate::ends::guest_sink::decompress_threads::{DecompressQueue, failed};
use crate::ends::guest_sink::postcopy;
use crate::ends::guest_sink::sink::{GuestSink, PreCommitWait};
use crate::error::{Channel, MigrationError};
use crate::handover::DestinationSide;
use crate::lock::lock;
use crate::pipe::session::Session;
use crate::pipe::sink::Sink;
use crate::stream::handshake;
use crate::stream::main_channel::{
    Action, GuestRules, MainChannel, SilenceLimit, StreamConsumer, unexpected,
};
use crate::stream::main_recv::MainInput;
use crate::stream::return_path::encode;

/// Continuation after an action.
enum Next {
    Go,
    /// The source has released the guest.
    Committed,
    /// Postcopy: the guest must start before its pages have arrived. PINGs with these values must be answered.
    Run(Vec<u32>),
}

pub(crate) struct MainReceiver<'a> {
    machine: MainChannel,
    input: MainInput<'a>,
    state: State<'a>,
}

/// State for executing actions.
struct State<'a> {
    session: &'a Session<'a>,
    sink: &'a GuestSink<'a>,
    /// Decompression threads, with `compress`.
    threads: Option<DecompressQueue<'a>>,
    /// Decoder for compressed pages if there are no decompression threads; created on first use.
    inflater: Option<Inflater>,
}

impl<'a> MainReceiver<'a> {
    pub(crate) fn new(
        session: &'a Session<'a>,
        sink: &'a GuestSink<'a>,
    ) -> Result<Self, MigrationError> {
        let options = sink.options;
        let rules = GuestRules {
            takes: handshake::features(&options.stream, options.postcopy.preempt),
            postcopy_ram: options.postcopy.ram,
            is_hotlift: options.stream.multifd().then(|| sink.source.is_hotlift()),
        };
        // Half of the source's timeout, so that the source receives the reason before its own timeout.
        let silence = SilenceLimit::WithinRecords(options.limits.handshake_timeout / 2);
        Ok(Self {
            machine: MainChannel::new(StreamConsumer::Guest(rules), silence),
            input: MainInput::new(
                &sink.source.main,
                &session.received[sink.source.multifd.len()],
                &session.memory,
                session.control.life(),
            )?,
            state: State {
                session,
                sink,
                threads: DecompressQueue::new(&sink.decompress, sink.guest, options),
                inflater: None,
            },
        })
    }

    /// Reads main until the destination owns the guest, or an error occurs.
    pub(crate) fn run(&mut self) -> Result<(), MigrationError> {
        let (session, sink) = (self.state.session, self.state.sink);
        let decided = |error| {
            let is_cancelled = || session.control.life().is_stopped();
            match session.destination_handover.wait_for_decision(is_cancelled) {
                true => Ok(()),
                false => Err(error),
            }
        };
        loop {
            let state = &mut self.state;
            let act = |action: Action<'_>, _: &[u8]| state.act(action);
            match self
                .input
                .step(&mut self.machine, &PreCommitWait(session), act)
            {
                Ok(None | Some(Next::Go)) => {}
                Ok(Some(Next::Run(pings))) => {
                    let (machine, input) = (&mut self.machine, &mut self.input);
                    return postcopy::run(session, sink, machine, input, &pings);
                }
                Ok(Some(Next::Committed)) => {
                    sink.take_over(session)?;
                    return decided(MigrationError::Cancelled);
                }
                Err(error) => {
                    return match session.destination_handover.side() {
                        DestinationSide::Loading | DestinationSide::Never => Err(error),
                        // The source's commit may have arrived, or may still arrive, on another connection. So this thread
                        // waits for the decision.
                        DestinationSide::Loaded
                        | DestinationSide::Starting
                        | DestinationSide::Runs
                        | DestinationSide::Unsure => {
                            session.destination_handover.connection_ended();
                            decided(error)
                        }
                    };
                }
            }
        }
    }

    /// Returns bytes that were read from the connection but not consumed.
    pub(crate) fn read_ahead(&self) -> &[u8] {
        self.input.unread()
    }
}

impl State<'_> {
    fn act(&mut self, action: Action<'_>) -> Result<Next, MigrationError> {
        let (session, sink) = (self.session, self.sink);
        match action {
            Action::Nothing => {}
            Action::Page {
                block,
                offset,
                content,
            } => self.page(block, offset, content)?,
            Action::Machine(configuration) => sink.check_machine(&configuration.machine)?,
            Action::RamBlocks(blocks) => sink.check_blocks(&blocks)?,
            // Answered even if the source is rejected, so that the source can read the reason.
            Action::Greet { offer, takes } => {
                sink.source.set_is_hotlift();
                self.answer(&handshake::answer(offer, takes, session.id))?;
                handshake::check(offer, takes)?;
            }
            Action::Pong(value) => self.answer(&[ReturnMessage::Pong(value)])?,
            Action::Advised => sink.command(Command::PostcopyAdvise { page_sizes: None })?,
            Action::SyncPoint => {
                session.await_readers()?;
                sink.barrier()?;
                session.barrier.pass();
            }
            Action::SectionEnd => {
                if let Some(threads) = &mut self.threads {
                    threads.settle()?;
                }
            }
            Action::Device(device) => lock(&sink.devices).push(device),
            // The only PING after the end of RAM asks whether everything is loaded.
            Action::Load(value) => {
                self.load_devices()?;
                self.answer(&[ReturnMessage::Pong(value)])?;
            }
            Action::Eof { unasked } => {
                if unasked {
                    self.load_devices()?;
                }
                return Ok(Next::Committed);
            }
            Action::Discard { block, ranges } => {
                // After the answer to this command the source commits, and may then ask for the outcome.
                session.destination_handover.expect_questions();
                postcopy::discard(sink, block, ranges)?;
            }
            Action::Run(pings) => return Ok(Next::Run(pings)),
            _ => return Err(unexpected("a record for relays")),
        }
        Ok(Next::Go)
    }

    fn answer(&self, messages: &[ReturnMessage<'_>]) -> Result<(), MigrationError> {
        let answered = self.sink.source.answer(&encode(messages));
        answered.map_err(|source| MigrationError::Connection {
            channel: Channel::Main,
            doing: "communicating with the source",
            source,
        })
    }

    /// Handles a page on main: a zero page of `legacy` detection, or any page of a source without multifd.
    fn page(
        &mut self,
        block: usize,
        offset: u64,
        content: PageContent<'_>,
    ) -> Result<(), MigrationError> {
        let sink = self.sink;
        let at = offset;
        let offset = usize::try_from(offset).unwrap_or(usize::MAX);
        if let Some(threads) = &mut self.threads {
            threads.wait_for(block, offset)?;
        }
        sink.note_received(block, offset / PAGE_SIZE, 1);
        match content {
            PageContent::Zero => {
                if sink.written[block].test(offset / PAGE_SIZE) {
                    sink.guest.ram()[block].zero(offset, PAGE_SIZE)?;
                }
            }
            PageContent::Normal(bytes) => sink.put_page(block, offset, bytes)?,
            PageContent::Xbzrle(delta) => sink.delta(block, at, delta)?,
            PageContent::Compressed(stream) => match &mut self.threads {
                Some(threads) => threads.page(block, offset, stream)?,
                None => self.inflate(block, offset, stream)?,
            },
        }
        let zero = usize::from(content == PageContent::Zero);
        let counters = &self.session.received[sink.source.multifd.len()];
        counters.add_pages(1 - zero, zero);
        Ok(())
    }

    fn inflate(
        &mut self,
        block: usize,
        offset: usize,
        stream: &[u8],
    ) -> Result<(), MigrationError> {
        let sink = self.sink;
        let inflater = match &mut self.inflater {
            Some(inflater) => inflater,
            none => none.insert(
                Inflater::new().map_err(|source| failed(sink.guest, block, offset, source))?,
            ),
        };
        decompress_threads::inflate(sink.target(), inflater, block, offset, stream)
    }

    /// Loads the devices into the guest, and records that they are loaded. All device state must have arrived.
    fn load_devices(&self) -> Result<(), MigrationError> {
        self.sink.await_loaded()?;
        self.session.destination_handover.loaded();
        Ok(())
    }
}

//! The main channel on the destination: does what [`MainChannel`] asks for, with the guest and towards the source.

use hotlift_mem::PAGE_SIZE;
use hotlift_methods::legacy::{compress::Inflater, xbzrle};
use hotlift_wire::RamBlockEntry;
use hotlift_wire::main_channel::PageContent;
use hotlift_wire::return_path::ReturnMessage;

use crate::ends::guest_sink::decompress_threads;
use crate::ends::guest_sink::decompress_threads::{HandOver, failed};
use crate::ends::guest_sink::postcopy;
use crate::ends::guest_sink::session::Session;
use crate::error::{Channel, MigrationError};
use crate::guest::DeviceState;
use crate::handover::DestinationSide;
use crate::status::Status;
use crate::stream::handshake;
use crate::stream::main_channel::{Action, GuestRules, MainChannel, Silence, Taker, unexpected};
use crate::stream::main_recv::{MainInput, Waiting};
use crate::stream::return_path::encode;

/// What follows an action.
enum Next {
    Go,
    /// The source has released the guest.
    Committed,
    /// The guest runs before its pages are there; these PINGs are answered then.
    Run(Vec<u32>),
}

pub(crate) struct MainReceiver<'a> {
    machine: MainChannel,
    input: MainInput<'a>,
    state: State<'a>,
}

/// What the actions so far amount to.
struct State<'a> {
    session: &'a Session<'a>,
    devices: Vec<DeviceState>,
    /// Threads for compressed pages, with `compress`.
    threads: Option<HandOver<'a>>,
    /// Made for the first compressed page, without.
    inflater: Option<Inflater>,
}

impl<'a> MainReceiver<'a> {
    pub(crate) fn new(session: &'a Session<'a>) -> Result<Self, MigrationError> {
        let options = session.options;
        let rules = GuestRules {
            takes: handshake::features(options),
            postcopy_ram: options.postcopy_ram,
            is_hotlift: options.multifd().then(|| session.source.is_hotlift()),
        };
        // Half of the source's patience, so that the reason reaches it before that runs out.
        let silence = Silence::WithinRecords(options.handshake_timeout / 2);
        Ok(Self {
            machine: MainChannel::new(Taker::Guest(rules), silence),
            input: MainInput::new(
                &session.source.main,
                session.main_counters(),
                &session.memory,
                session.control.life(),
            )?,
            state: State {
                session,
                devices: Vec::new(),
                threads: HandOver::new(&session.decompress, session.guest, options),
                inflater: None,
            },
        })
    }

    /// Reads until the guest is this side's, or until something is wrong.
    pub(crate) fn run(&mut self) -> Result<(), MigrationError> {
        let session = self.state.session;
        let decided = |error| match session.is_decided_to_run() {
            true => Ok(()),
            false => Err(error),
        };
        loop {
            let state = &mut self.state;
            let act = |action: Action<'_>, _: &[u8]| state.act(action);
            match self.input.step(&mut self.machine, session, act) {
                Ok(None | Some(Next::Go)) => {}
                Ok(Some(Next::Run(pings))) => {
                    let devices = std::mem::take(&mut self.state.devices);
                    let (machine, input) = (&mut self.machine, &mut self.input);
                    return postcopy::run(session, machine, input, (devices, &pings));
                }
                Ok(Some(Next::Committed)) => {
                    session.take_over()?;
                    return decided(MigrationError::Cancelled);
                }
                Err(error) => {
                    return match session.taking.side() {
                        DestinationSide::Loading | DestinationSide::Never => Err(error),
                        // The word may come on another connection; this one brings none.
                        DestinationSide::Loaded
                        | DestinationSide::Taking
                        | DestinationSide::Taken
                        | DestinationSide::Unsure => {
                            session.taking.connection_ended();
                            decided(error)
                        }
                    };
                }
            }
        }
    }

    /// What was read of the connection and not taken.
    pub(crate) fn read_ahead(&self) -> &[u8] {
        self.input.unread()
    }
}

impl Waiting for Session<'_> {
    fn check(&self) -> Result<(), MigrationError> {
        if self.control.life().is_stopped() && self.taking.abandon() {
            return Err(MigrationError::Cancelled);
        }
        // Another connection may have brought the source's word.
        match self.taking.side() {
            DestinationSide::Loading | DestinationSide::Loaded => Ok(()),
            _ => Err(MigrationError::main_closed()),
        }
    }
}

impl State<'_> {
    fn act(&mut self, action: Action<'_>) -> Result<Next, MigrationError> {
        let session = self.session;
        match action {
            Action::Nothing => {}
            Action::Page {
                block,
                offset,
                content,
            } => self.page(block, offset, content)?,
            Action::Machine(configuration) => {
                let ours = session.guest.machine();
                compare("the machine", &configuration.machine, ours)?;
            }
            Action::RamBlocks(blocks) => self.ram_blocks(&blocks)?,
            // Also one that is refused is answered, so that it can read why.
            Action::Greet { offer, takes } => {
                session.source.set_is_hotlift();
                self.answer(&handshake::answer(offer, takes, session.id))?;
                handshake::check(offer, takes)?;
            }
            Action::Pong(value) => self.answer(&[ReturnMessage::Pong(value)])?,
            Action::Advised => postcopy::empty_ram(session)?,
            Action::SyncPoint => {
                let called_off = || session.control.is_cancelled();
                if !session.barrier.main_arrives(called_off) {
                    return Err(MigrationError::Protocol {
                        channel: Channel::Main,
                        got: "the end of a multifd channel before its SYNC".to_owned(),
                        doing: "a multifd precopy migration",
                    });
                }
            }
            Action::SectionEnd => {
                if let Some(threads) = &mut self.threads {
                    threads.settle()?;
                }
            }
            Action::Device(device) => self.devices.push(device),
            // The one PING behind the end of RAM asks whether all is loaded.
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
                // The source commits once it knows that this was done.
                session.taking.expect_questions();
                postcopy::discard(session, block, ranges)?;
            }
            Action::Run(pings) => return Ok(Next::Run(pings)),
            _ => return Err(unexpected("what only a relay takes")),
        }
        Ok(Next::Go)
    }

    fn answer(&self, messages: &[ReturnMessage<'_>]) -> Result<(), MigrationError> {
        let answered = self.session.source.answer(&encode(messages));
        answered.map_err(|source| MigrationError::Connection {
            channel: Channel::Main,
            doing: "talking to the source",
            source,
        })
    }

    /// Compares the source's RAM blocks with this guest's: same names in the same order, same
    /// lengths.
    fn ram_blocks(&self, theirs: &[RamBlockEntry]) -> Result<(), MigrationError> {
        let ours = &self.session.blocks;
        compare(
            "the number of RAM blocks",
            &theirs.len().to_string(),
            &ours.len().to_string(),
        )?;
        for (number, (theirs, ours)) in theirs.iter().zip(ours).enumerate() {
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
        self.session.control.set_status(Status::Active);
        Ok(())
    }

    /// A page on main: a zero page of `legacy` detection, or any page of a source without multifd.
    fn page(
        &mut self,
        block: usize,
        offset: u64,
        content: PageContent<'_>,
    ) -> Result<(), MigrationError> {
        let session = self.session;
        let ram = &session.guest.ram()[block];
        let offset = usize::try_from(offset).unwrap_or(usize::MAX);
        if let Some(threads) = &mut self.threads {
            threads.wait_for(block, offset)?;
        }
        session.note_received(block, offset / PAGE_SIZE, 1);
        match content {
            PageContent::Zero => {
                if self.session.written[block].test(offset / PAGE_SIZE) {
                    ram.zero(offset, PAGE_SIZE)?;
                }
                self.session.main_counters().add_pages(0, 1);
            }
            PageContent::Normal(bytes) => self.put_page(block, offset, bytes)?,
            PageContent::Xbzrle(delta) => {
                let mut bytes = [0; PAGE_SIZE];
                ram.read(offset, &mut bytes)?;
                xbzrle::apply(delta, &mut bytes)
                    .map_err(|source| failed(session.guest, block, offset, source))?;
                self.put_page(block, offset, &bytes)?;
            }
            PageContent::Compressed(stream) => {
                match &mut self.threads {
                    Some(threads) => threads.page(block, offset, stream)?,
                    None => self.inflate(block, offset, stream)?,
                }
                session.main_counters().add_pages(1, 0);
            }
        }
        Ok(())
    }

    fn put_page(
        &self,
        block: usize,
        offset: usize,
        bytes: &[u8; PAGE_SIZE],
    ) -> Result<(), MigrationError> {
        self.session.guest.ram()[block].write(offset, bytes)?;
        self.session.written[block].set(offset / PAGE_SIZE);
        self.session.main_counters().add_pages(1, 0);
        Ok(())
    }

    fn inflate(
        &mut self,
        block: usize,
        offset: usize,
        stream: &[u8],
    ) -> Result<(), MigrationError> {
        let session = self.session;
        let inflater = match &mut self.inflater {
            Some(inflater) => inflater,
            none => none.insert(
                Inflater::new().map_err(|source| failed(session.guest, block, offset, source))?,
            ),
        };
        decompress_threads::inflate(session.target(), inflater, block, offset, stream)
    }

    /// Loads the devices; they are all there.
    fn load_devices(&mut self) -> Result<(), MigrationError> {
        let devices = std::mem::take(&mut self.devices);
        self.session.guest.load_devices(devices)?;
        self.session.taking.loaded();
        Ok(())
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

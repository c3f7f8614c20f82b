//! The main channel on the destination: checks what the source is, keeps the barrier's other side,
//! loads devices, and learns that the guest is this side's.

use hotlift_mem::PAGE_SIZE;
use hotlift_methods::legacy::{compress::Inflater, xbzrle};
use hotlift_wire::handshake::Offer;
use hotlift_wire::main_channel::postcopy::PostcopyCommand;
use hotlift_wire::main_channel::{
    Command, DeviceLengths, MainDecoder, MainEvent, PageContent, SectionKind, Step,
};
use hotlift_wire::return_path::ReturnMessage;
use hotlift_wire::{RamBlockEntry, WireError};

use crate::ends::guest_sink::decompress_threads;
use crate::ends::guest_sink::decompress_threads::{HandOver, failed};
use crate::ends::guest_sink::postcopy::{self, Stage};
use crate::ends::guest_sink::session::Session;
use crate::error::{Channel, MigrationError};
use crate::guest::DeviceState;
use crate::handover::DestinationSide;
use crate::status::Status;
use crate::stream::handshake;
use crate::stream::main_recv::{MainInput, Silence, Waiting};

/// Bytes of state that all devices together may have. The built-in guests have some KiB a vCPU; a
/// large VM with many devices some MiB.
const DEVICE_BYTES: usize = 256 << 20;

/// What to do after an event.
enum Next {
    Go,
    /// The source has released the guest.
    Committed,
    /// A package of so many bytes follows.
    Package(u32),
}

pub(crate) struct MainReceiver<'a> {
    session: &'a Session<'a>,
    decoder: MainDecoder,
    input: MainInput<'a>,
    state: State<'a>,
}

/// What the events so far amount to.
struct State<'a> {
    session: &'a Session<'a>,
    /// The source takes answers.
    return_path: bool,
    /// A Hotlift has said that it is one; its later PINGs carry checksums.
    opened: bool,
    /// The stream has named the machine, which is the guest's.
    is_named: bool,
    /// The kind of the section that is open, and whether it had a multifd flush.
    section: Option<SectionKind>,
    flushed: bool,
    /// RAM has ended, and every channel has delivered what belongs before that.
    ram_complete: bool,
    device: Option<DeviceState>,
    devices: Vec<DeviceState>,
    device_bytes: usize,
    /// Threads for compressed pages, with `compress`.
    threads: Option<HandOver<'a>>,
    /// Made for the first compressed page, without.
    inflater: Option<Inflater>,
    /// How far it has come towards postcopy.
    stage: Stage,
}

impl<'a> MainReceiver<'a> {
    pub(crate) fn new(session: &'a Session<'a>) -> Result<Self, MigrationError> {
        let decoder = MainDecoder::new(DeviceLengths::LengthPrefixed);
        Ok(Self {
            session,
            decoder: match session.options.postcopy_ram {
                true => decoder.taking_postcopy(),
                false => decoder,
            },
            input: MainInput::new(
                &session.accepted.main,
                session.main_counters(),
                // Half of the source's patience, so that it hears the reason before it runs out.
                Silence::WithinRecords(session.options.handshake_timeout / 2),
                &session.memory,
                session.control.life(),
            )?,
            state: State {
                session,
                return_path: false,
                opened: false,
                is_named: false,
                section: None,
                flushed: false,
                ram_complete: false,
                device: None,
                devices: Vec::new(),
                device_bytes: 0,
                threads: HandOver::new(&session.decompress, session.guest, session.options),
                inflater: None,
                stage: Stage::default(),
            },
        })
    }

    /// Reads until the guest is this side's, or until something is wrong.
    pub(crate) fn run(&mut self) -> Result<(), MigrationError> {
        loop {
            match self.next_event() {
                Ok(Next::Go) => {}
                Ok(Next::Package(length)) => {
                    let crc = self.input.crc().filter(|_| self.session.is_hotlift());
                    let package = self.package(length)?;
                    return postcopy::run(
                        self.session,
                        &mut self.decoder,
                        &mut self.input,
                        (crc.as_ref(), &package),
                    );
                }
                Ok(Next::Committed) => {
                    self.session.take_over()?;
                    return if self.session.is_decided_to_run() {
                        Ok(())
                    } else {
                        Err(MigrationError::Cancelled)
                    };
                }
                Err(error) => {
                    return match self.session.taking.side() {
                        DestinationSide::Loading | DestinationSide::Never => Err(error),
                        // The word may come on another connection; this one brings none.
                        DestinationSide::Loaded
                        | DestinationSide::Taking
                        | DestinationSide::Taken
                        | DestinationSide::Unsure => {
                            self.session.taking.connection_ended();
                            if self.session.is_decided_to_run() {
                                Ok(())
                            } else {
                                Err(error)
                            }
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

    /// Reads a package to its end. It takes memory as it comes, not as its length says.
    fn package(&mut self, length: u32) -> Result<Vec<u8>, MigrationError> {
        let length = length as usize;
        if length > DEVICE_BYTES {
            return Err(too_many_devices("length of a package of devices", length));
        }
        let mut package = Vec::new();
        while package.len() < length {
            if self.input.unread().is_empty() && !self.input.fill(1, self.state.session)? {
                return Err(MigrationError::main_closed());
            }
            let more = self.input.unread();
            let taken = more.len().min(length - package.len());
            package.extend_from_slice(&more[..taken]);
            self.input.take(taken);
        }
        Ok(package)
    }

    fn next_event(&mut self) -> Result<Next, MigrationError> {
        match self
            .decoder
            .next(self.input.unread())
            .map_err(MigrationError::main_wire)?
        {
            Step::Need(needed) => {
                if !self.input.fill(needed, self.state.session)? {
                    return Err(MigrationError::main_closed());
                }
                Ok(Next::Go)
            }
            Step::Event { event, consumed } => {
                let next = self.state.handle(event, &self.input);
                self.input.take(consumed);
                next
            }
        }
    }
}

impl Waiting for Session<'_> {
    fn check(&self) -> Result<(), MigrationError> {
        let called_off = self.failure.is_set() || self.control.is_cancelled();
        if called_off && self.taking.abandon() {
            return Err(MigrationError::Cancelled);
        }
        // Another connection may have brought the source's word meanwhile.
        match self.taking.side() {
            DestinationSide::Loading | DestinationSide::Loaded => Ok(()),
            _ => Err(MigrationError::main_closed()),
        }
    }
}

impl State<'_> {
    fn handle(
        &mut self,
        event: MainEvent<'_>,
        input: &MainInput<'_>,
    ) -> Result<Next, MigrationError> {
        let multifd = self.session.options.multifd();
        match event {
            MainEvent::Configuration(configuration) => {
                compare(
                    "the machine",
                    &configuration.machine,
                    self.session.guest.machine(),
                )?;
                self.is_named = true;
            }
            MainEvent::RamBlocks(_) if !self.is_named => {
                return Err(protocol("a stream that does not name its machine"));
            }
            MainEvent::Command(command) => self.command(command, input)?,
            MainEvent::RamBlocks(blocks) => self.ram_blocks(&blocks)?,
            MainEvent::RamPage {
                block,
                offset,
                content,
            } => self.page(block, offset, content)?,
            MainEvent::MultifdFlush => {
                let session = self.session;
                let called_off = || session.control.is_cancelled();
                if !session.barrier.main_arrives(called_off) {
                    return Err(protocol("the end of a multifd channel before its SYNC"));
                }
                self.flushed = true;
            }
            MainEvent::SectionStart {
                kind,
                idstr,
                instance_id,
                version_id,
                ..
            } => {
                self.section = Some(kind);
                self.flushed = false;
                if kind == SectionKind::Full {
                    let loading = self.session.taking.side() == DestinationSide::Loading;
                    if !self.ram_complete || !loading {
                        return Err(protocol(
                            "a device before the end of RAM, or behind the last",
                        ));
                    }
                    self.device = Some(DeviceState {
                        idstr: idstr.to_owned(),
                        instance_id,
                        version_id,
                        payload: Vec::new(),
                    });
                }
            }
            MainEvent::RamEos => {
                if let Some(threads) = &mut self.threads {
                    threads.settle()?;
                }
                match self.section {
                    Some(SectionKind::Start) if multifd && !self.flushed => {
                        return Err(protocol(
                            "a stream with a barrier in each section (machine types up to 8.0)",
                        ));
                    }
                    Some(SectionKind::End) if multifd && !self.flushed => {
                        return Err(protocol("the end of RAM without a barrier"));
                    }
                    Some(SectionKind::End) => self.ram_complete = true,
                    _ => {}
                }
            }
            MainEvent::DevicePayload(payload) => {
                self.device_bytes += payload.len();
                if self.device_bytes > DEVICE_BYTES {
                    let what = "length of all device payloads";
                    return Err(too_many_devices(what, self.device_bytes));
                }
                if let Some(mut device) = self.device.take() {
                    device.payload = payload.to_vec();
                    self.devices.push(device);
                }
            }
            MainEvent::Eof => {
                // A Hotlift has had its answer that all is loaded before it ends the stream. Without
                // that no byte, however it came about, may make the guest run here.
                if !self.session.is_hotlift() && self.ram_complete {
                    self.load_devices()?;
                }
                return Ok(Next::Committed);
            }
            MainEvent::Postcopy(command) => return self.postcopy(command),
            // Its decoder does not take them.
            MainEvent::EarlySection(_) => return Err(protocol("a device before RAM")),
            MainEvent::Header | MainEvent::SectionFooter | MainEvent::VmDescription(_) => {}
        }
        Ok(Next::Go)
    }

    fn command(&mut self, command: Command, input: &MainInput<'_>) -> Result<(), MigrationError> {
        match command {
            Command::OpenReturnPath => self.return_path = true,
            Command::Ping(value) if !self.opened => match Offer::of_ping(value) {
                // Without channels a Hotlift has had no other place to say that it is one.
                Some(offer) if self.session.is_hotlift() || !self.session.options.multifd() => {
                    self.open(offer)?;
                }
                None if !self.session.is_hotlift() => {
                    self.answer(&[ReturnMessage::Pong(value)])?;
                }
                _ => {
                    return Err(protocol(
                        "the first PING of another source than the channels'",
                    ));
                }
            },
            Command::Ping(value) => {
                input.check_crc(value).map_err(MigrationError::main_wire)?;
                // The one PING behind the end of RAM asks whether all is loaded.
                if self.ram_complete {
                    self.load_devices()?;
                }
                self.answer(&[ReturnMessage::Pong(value)])?;
            }
            Command::SwitchoverStart => {}
            Command::PostcopyAdvise { page_sizes } => self.advise(page_sizes)?,
        }
        Ok(())
    }

    /// Postcopy may follow: nothing that RAM holds now is the source's.
    fn advise(&mut self, page_sizes: Option<(u64, u64)>) -> Result<(), MigrationError> {
        let session = self.session;
        let differs = |what: &str, source_has: &str, destination_has: &str| {
            Err(MigrationError::Mismatch {
                what: what.to_owned(),
                source_has: source_has.to_owned(),
                destination_has: destination_has.to_owned(),
            })
        };
        let page = PAGE_SIZE as u64;
        match page_sizes {
            _ if !session.options.postcopy_ram => differs("postcopy-ram", "on", "off"),
            _ if self.section.is_some() || self.stage != Stage::Precopy => Err(protocol(
                "POSTCOPY_ADVISE behind the RAM blocks, or a second",
            )),
            Some((host, target)) if (host, target) != (page, page) => differs(
                "the size of pages (all of the host's, and the guest's)",
                &format!("{host:#x}, {target:#x}"),
                &format!("{page:#x}, {page:#x}"),
            ),
            None => differs("postcopy-ram", "off, and postcopy of bitmaps alone", "on"),
            Some(_) => {
                self.stage = Stage::Advised;
                postcopy::empty_ram(session)
            }
        }
    }

    /// A command of postcopy that is not in a package.
    fn postcopy(&mut self, command: PostcopyCommand<'_>) -> Result<Next, MigrationError> {
        let loading = self.session.taking.side() == DestinationSide::Loading;
        match command {
            PostcopyCommand::Discard { block, ranges }
                if self.stage != Stage::Precopy && !self.ram_complete =>
            {
                self.stage = Stage::Discarding;
                // The source commits once it knows that this was done.
                self.session.taking.expect_questions();
                postcopy::discard(self.session, block, ranges)?;
                Ok(Next::Go)
            }
            // QEMU hangs without a DISCARD before: no source is tried that does without.
            PostcopyCommand::Packaged(length)
                if self.stage == Stage::Discarding && !self.ram_complete && loading =>
            {
                Ok(Next::Package(length))
            }
            other => Err(protocol(&format!("{other:?}"))),
        }
    }

    /// Answers the offer of a Hotlift, also of one that is refused, so that it can read why.
    fn open(&mut self, offer: Offer) -> Result<(), MigrationError> {
        self.session.set_is_hotlift();
        let takes = handshake::features(self.session.options);
        self.answer(&handshake::answer(offer, takes, self.session.id))?;
        handshake::check(offer, takes)?;
        self.opened = true;
        Ok(())
    }

    fn answer(&self, messages: &[ReturnMessage<'_>]) -> Result<(), MigrationError> {
        if !self.return_path {
            return Err(protocol("PING without an open return path"));
        }
        let mut bytes = Vec::new();
        for message in messages {
            message
                .encode(&mut bytes)
                .map_err(MigrationError::main_wire)?;
        }
        self.session.answer(&bytes).map_err(broken)
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
        self.session
            .guest
            .load_devices(std::mem::take(&mut self.devices))?;
        self.session.loaded();
        Ok(())
    }
}

fn too_many_devices(what: &'static str, got: usize) -> MigrationError {
    MigrationError::main_wire(WireError::OverLimit {
        what,
        limit: DEVICE_BYTES as u64,
        got: got as u64,
    })
}

fn protocol(got: &str) -> MigrationError {
    MigrationError::Protocol {
        channel: Channel::Main,
        got: got.to_owned(),
        doing: "a multifd precopy migration",
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

fn broken(source: std::io::Error) -> MigrationError {
    MigrationError::Connection {
        channel: Channel::Main,
        doing: "talking to the source",
        source,
    }
}

//! Records before the first page, and the decision if a relay can parse the stream.

use hotlift_mem::PAGE_SIZE;
use hotlift_net::admission::RESUMED_MAGIC;
use hotlift_wire::handshake::{Features, Offer};
use hotlift_wire::main_channel::{
    self as wire, Command, Configuration, EarlyLengths, EarlySection, MainEvent, PluggableMemory,
    SectionKind,
};
use hotlift_wire::{RamBlockEntry, WireError, limits};

use super::{
    Action, GuestRules, MainChannel, Phase, SilenceLimit, Source, Stage, Step, StreamConsumer,
    event_name, protocol,
};
use crate::error::{Channel, MigrationError};

/// Size in bytes of the largest supported host page in postcopy. A host page is sent as one piece, and must fit in memory. The
/// next size of x86 is 1 GiB: a guest with such pages should be migrated without postcopy.
pub(crate) const LARGEST_PAGE: usize = 2 << 20;

/// Section type START: the first section of a device that sends several sections.
const START: u8 = 0x01;

/// Section type FULL: the only section of a device. Early sections have this type.
const FULL: u8 = 0x04;

/// Activity that errors name, for records of the set-up.
const OPENING: &str = "opening the migration";

/// Activity that errors name, for records of a guest's stream.
pub(super) const PRECOPY: &str = "a multifd precopy migration";

/// Reason to pass a stream through unparsed: a device other than RAM has sent a START section.
const LIVE_DEVICE: &str =
    "a device other than RAM sends state while the guest runs (VFIO, block bitmaps)";

/// Layout of the VM's RAM.
#[derive(Debug, Clone, Default, PartialEq)]
pub(crate) struct RamLayout {
    /// Section id of `ram` at the source. All other sections have different ids.
    pub section_id: u32,
    /// RAM blocks in the source's order.
    pub blocks: Vec<RamBlockEntry>,
}

impl RamLayout {
    /// Returns true if the host has any RAM block in huge pages.
    pub(crate) fn has_huge_pages(&self) -> bool {
        let mut blocks = self.blocks.iter();
        blocks.any(|block| block.page_size > PAGE_SIZE as u64)
    }
}

/// Device sections before the end of RAM, in the order of the stream.
#[derive(Debug, Clone, Default, PartialEq)]
pub(crate) struct EarlySections {
    /// Sections before the START section of `ram`.
    pub before_ram: Vec<EarlySection>,
    /// Sections after the START section of `ram`.
    pub behind_start: Vec<EarlySection>,
}

impl EarlySections {
    /// Returns the memory that virtio-mem devices have plugged in. Reads it from the sections before RAM.
    pub(crate) fn plugged(&self) -> Vec<PluggableMemory> {
        let before_ram = self.before_ram.iter();
        before_ram
            .filter_map(|section| section.memory.clone())
            .collect()
    }

    /// Iterates over all sections.
    pub(crate) fn all(&self) -> impl Iterator<Item = &EarlySection> {
        self.before_ram.iter().chain(&self.behind_start)
    }

    /// Adds the next section. `ram_has_begun` is true after the START section of `ram`.
    pub(crate) fn push(&mut self, section: EarlySection, ram_has_begun: bool) {
        match ram_has_begun {
            true => self.behind_start.push(section),
            false => self.before_ram.push(section),
        }
    }
}

/// Content of the stream before its first page.
#[derive(Debug, Clone, Default, PartialEq)]
pub(crate) struct Setup {
    pub configuration: Configuration,
    /// Commands that the destination must receive.
    pub commands: Vec<Command>,
    pub ram: RamLayout,
    /// Device sections that have arrived so far.
    pub early: EarlySections,
    /// True if the set-up contained a multifd flush record. If false, with multifd, every section's end is a sync point.
    pub flush: bool,
    /// Features of the stream if the source is a Hotlift; `None` for a QEMU.
    pub relay: Option<Features>,
    pub return_path: bool,
    /// True if postcopy may follow: the guest may run at the destination before its pages have arrived.
    pub postcopy: bool,
}

impl Setup {
    /// Returns true if the source is a Hotlift's own guest.
    pub(crate) fn is_guest(&self) -> bool {
        self.relay
            .is_some_and(|features| !features.contains(Features::RELAYED))
    }
}

impl MainChannel {
    /// Continues after the set-up. `multifd` is true if the source has multifd channels. For a QEMU without multifd, first
    /// checks if a device that cannot be parsed follows; [`Action::Opened`] reports the end of this check.
    pub(crate) fn begin(&mut self, multifd: bool) {
        self.multifd = multifd;
        // With multifd, no check is possible here: the source may write nothing on main before its channels are read. A device
        // that cannot be parsed is rejected when it arrives. The assumed end of an unknown layout is checked at the end of the
        // stream.
        self.phase = Phase::Others {
            section_has_ended: false,
        };
        if multifd || self.is_hotlift() {
            self.open();
        }
    }

    /// Sets if the reader of the stream can prove that it has loaded the devices. A file cannot, because it accepts any bytes.
    pub(crate) fn set_shows_loading(&mut self, shows: bool) {
        self.shows_loading = shows;
    }

    /// Returns true while the check for other devices (see [`MainChannel::begin`]) is in progress.
    pub(crate) fn is_unopened(&self) -> bool {
        matches!(self.phase, Phase::Others { .. })
    }

    fn open(&mut self) {
        self.phase = Phase::Ram;
        self.silence = SilenceLimit::Unlimited;
        if !self.is_hotlift() {
            self.crc = None;
        }
    }

    /// Handles the first bytes. A stream that resumes an interrupted postcopy is passed through.
    pub(super) fn first(&mut self, bytes: &[u8]) -> Step<'static> {
        let missing = RESUMED_MAGIC.len().saturating_sub(bytes.len());
        if missing > 0 {
            return Step::Need(missing);
        }
        if bytes.starts_with(&RESUMED_MAGIC) {
            let why = "it resumes an interrupted postcopy".to_owned();
            let is_answered = false;
            return Step::Do(Action::PassThrough { why, is_answered }, 0);
        }
        self.phase = Phase::SetUp;
        Step::Do(Action::Nothing, 0)
    }

    fn pass_through(&self, why: String) -> Action<'static> {
        Action::PassThrough {
            why,
            is_answered: self.return_path,
        }
    }

    /// Handles bytes that cannot be decoded: rejects the stream, or passes it through.
    pub(super) fn undecoded(&mut self, error: WireError) -> Result<Step<'static>, MigrationError> {
        let is_guest = matches!(self.taker, StreamConsumer::Guest(_));
        let why = match (self.phase, error) {
            (_, error) if is_guest => return Err(MigrationError::main_wire(error)),
            (Phase::SetUp, WireError::UnknownDevice { idstr, .. }) => {
                format!("device '{idstr}' sends state while the guest runs")
            }
            (Phase::SetUp | Phase::Others { .. }, WireError::NoSectionEnd { idstr, .. }) => {
                before_ram(&idstr)
            }
            (Phase::SetUp, WireError::Unsupported { what }) => format!("it has {what}"),
            (Phase::SetUp | Phase::Others { .. } | Phase::Devices, error) => {
                return Err(MigrationError::main_wire(error));
            }
            (_, error) => return Err(broken(error, &self.early)),
        };
        Ok(Step::Do(self.pass_through(why), 0))
    }

    /// Handles a record of the set-up. `length` is the size of the record in bytes.
    pub(super) fn set_up<'a>(
        &mut self,
        event: MainEvent<'a>,
        length: usize,
    ) -> Result<Action<'a>, MigrationError> {
        self.set_up_bytes += length;
        let into_stream = match self.taker {
            StreamConsumer::Guest(_) => return self.set_up_of_guest(event),
            StreamConsumer::Relay { into_stream } => into_stream,
        };
        over_limit(
            self.set_up_bytes,
            limits::MAIN_RECORD,
            "length of the set-up",
        )?;
        match event {
            MainEvent::Configuration(configuration) => self.set_up.configuration = configuration,
            MainEvent::Command(command) => return self.set_up_command(command, into_stream),
            MainEvent::SectionStart {
                kind: SectionKind::Start,
                id,
                ..
            } => self.set_up.ram.section_id = id,
            MainEvent::EarlySection(section) => {
                self.early.record(&section);
                self.set_up.early.push(section, false);
            }
            MainEvent::RamBlocks(blocks) => self.set_up.ram.blocks = blocks,
            MainEvent::MultifdFlush if !self.set_up.flush => self.set_up.flush = true,
            MainEvent::Header => {}
            // Does not wait for the section's footer, which may stay in the source's buffer until its channels are read.
            MainEvent::RamEos => {
                let set_up = Setup {
                    return_path: self.return_path,
                    postcopy: self.takes_postcopy,
                    ..std::mem::take(&mut self.set_up)
                };
                self.has_footers = !set_up.configuration.is_absent();
                self.has_flushes = set_up.flush;
                self.section = Some(SectionKind::Start);
                self.phase = Phase::Chosen;
                return Ok(Action::SetUp(Box::new(set_up)));
            }
            other => return Err(protocol(&event_name(&other), OPENING)),
        }
        Ok(Action::Nothing)
    }

    fn set_up_command(
        &mut self,
        command: Command,
        into_stream: bool,
    ) -> Result<Action<'static>, MigrationError> {
        match command {
            Command::OpenReturnPath => {
                self.return_path = true;
                return Ok(Action::Nothing);
            }
            Command::PostcopyAdvise { page_sizes } if !page_sizes.is_some_and(are_carried) => {
                let why = match page_sizes {
                    Some(_) => {
                        "with host pages of more than 2 MiB, or target pages that are not of 4 KiB"
                    }
                    None => "of bitmaps alone",
                };
                let why = format!("postcopy may follow (capability postcopy-ram), {why}");
                return Ok(self.pass_through(why));
            }
            Command::Ping(ping)
                if !self.is_hotlift()
                    && self.set_up.commands.is_empty()
                    && let Some(offer) = Offer::of_ping(ping) =>
            {
                return Ok(self.handle_offer(offer, into_stream));
            }
            Command::PostcopyAdvise { .. } if !into_stream => {
                let why = "postcopy may follow (capability postcopy-ram)".to_owned();
                return Ok(self.pass_through(why));
            }
            _ => {}
        }
        let commands = &mut self.set_up.commands;
        over_limit(
            commands.len() + 1,
            limits::SETUP_COMMANDS,
            "number of commands in the set-up",
        )?;
        commands.push(command);
        if !matches!(command, Command::PostcopyAdvise { .. }) {
            return Ok(Action::Nothing);
        }
        self.takes_postcopy = true;
        if !self.return_path || self.is_hotlift() {
            return Ok(Action::Nothing);
        }
        // PINGs of a QEMU are answered here, and not forwarded to the destination. A QEMU that switches over at once waits for
        // the answer before it sends its RAM blocks. Without the RAM blocks, no stream to the destination can be opened.
        let commands = &mut self.set_up.commands;
        let pings = commands.extract_if(.., |command| matches!(command, Command::Ping(_)));
        let values = pings.filter_map(|command| match command {
            Command::Ping(value) => Some(value),
            _ => None,
        });
        Ok(Action::Pongs(values.collect()))
    }

    /// Handles a Hotlift's offer to a relay. The stream of a Hotlift's guest is accepted only for a file, because a QEMU at the
    /// destination cannot run that guest.
    fn handle_offer(&mut self, offer: Offer, into_stream: bool) -> Action<'static> {
        self.set_up.relay = Some(offer.features);
        self.source = match offer.features.contains(Features::RELAYED) {
            true => Source::Relay,
            false => Source::Guest,
        };
        self.package_is_checked = offer.features.contains(Features::PACKAGE_CHECKED);
        let relayed = match into_stream {
            true => Features::RELAYED,
            false => offer.features & Features::RELAYED,
        };
        let known = Features::MULTIFD | Features::PACKAGE_CHECKED | Features::CONNECTED_PING;
        let takes = relayed | (offer.features & known);
        Action::Greet { offer, takes }
    }

    /// Checks if another device sends state while the guest runs, or has sent state of an unknown layout before RAM. Sections
    /// of such a device follow the footer of `ram`.
    pub(super) fn others<'a>(
        &mut self,
        bytes: &'a [u8],
        section_has_ended: bool,
    ) -> Result<Step<'a>, MigrationError> {
        if let Some(idstr) = self.early.searched() {
            return Ok(Step::Do(self.pass_through(before_ram(idstr)), 0));
        }
        if section_has_ended {
            match bytes.first() {
                None => return Ok(Step::Need(1)),
                Some(&START) => {
                    return Ok(Step::Do(self.pass_through(LIVE_DEVICE.to_owned()), 0));
                }
                Some(&FULL) => {}
                Some(_) => {
                    self.open();
                    return Ok(Step::Do(Action::Opened, 0));
                }
            }
        }
        match self.decode(bytes) {
            Ok(wire::Step::Need(needed)) => Ok(Step::Need(needed)),
            Ok(wire::Step::Event { event, consumed }) => {
                let action = match event {
                    MainEvent::EarlySection(section) => {
                        self.early.record(&section);
                        Action::Early(section)
                    }
                    _ => {
                        self.phase = Phase::Others {
                            section_has_ended: true,
                        };
                        Action::Nothing
                    }
                };
                Ok(Step::Do(action, consumed))
            }
            Err(error) => self.undecoded(error),
        }
    }

    fn set_up_of_guest<'a>(&mut self, event: MainEvent<'a>) -> Result<Action<'a>, MigrationError> {
        match event {
            MainEvent::Configuration(configuration) => {
                self.is_named = true;
                Ok(Action::Machine(configuration))
            }
            MainEvent::RamBlocks(_) if !self.is_named => {
                Err(protocol("a stream that does not name its machine", PRECOPY))
            }
            MainEvent::RamBlocks(blocks) => {
                self.phase = Phase::Ram;
                if !self.is_hotlift() {
                    self.crc = None;
                }
                Ok(Action::RamBlocks(blocks))
            }
            MainEvent::Header => Ok(Action::Nothing),
            other => self.ram(other),
        }
    }

    /// Handles a PING from a guest's source, before or after the start of the stream.
    pub(super) fn ping_of_guest(
        &mut self,
        rules: GuestRules,
        value: u32,
    ) -> Result<Action<'static>, MigrationError> {
        if !self.return_path {
            return Err(protocol("PING without an open return path", PRECOPY));
        }
        if self.is_hotlift() {
            self.check_crc(&[], value)?;
            return Ok(Action::Pong(value));
        }
        match (Offer::of_ping(value), rules.is_hotlift) {
            // Without multifd channels, a Hotlift can identify itself only here.
            (Some(offer), Some(true) | None) => {
                self.source = Source::Guest;
                let takes = rules.takes;
                Ok(Action::Greet { offer, takes })
            }
            (None, Some(false) | None) => Ok(Action::Pong(value)),
            _ => Err(protocol(
                "the first PING of another source than the channels'",
                PRECOPY,
            )),
        }
    }

    /// Handles the command that announces postcopy. [`Action::Advised`] empties RAM, so that every page comes from the source.
    pub(super) fn advise_guest(
        &mut self,
        rules: GuestRules,
        page_sizes: Option<(u64, u64)>,
    ) -> Result<Action<'static>, MigrationError> {
        let differs = |what: &str, source_has: &str, destination_has: &str| {
            Err(MigrationError::Mismatch {
                what: what.to_owned(),
                source_has: source_has.to_owned(),
                destination_has: destination_has.to_owned(),
            })
        };
        let page = PAGE_SIZE as u64;
        match page_sizes {
            _ if !rules.postcopy_ram => differs("postcopy-ram", "on", "off"),
            _ if self.section.is_some() || self.stage != Stage::Precopy => Err(protocol(
                "POSTCOPY_ADVISE after the RAM blocks, or a second one",
                PRECOPY,
            )),
            Some((host, target)) if (host, target) != (page, page) => differs(
                "the size of pages (all of the host's, and the guest's)",
                &format!("{host:#x}, {target:#x}"),
                &format!("{page:#x}, {page:#x}"),
            ),
            None => differs("postcopy-ram", "off, and postcopy of bitmaps alone", "on"),
            Some(_) => {
                self.stage = Stage::Advised;
                Ok(Action::Advised)
            }
        }
    }
}

/// Returns the reason to pass a stream through unparsed: the device `idstr` has an early section of an unknown layout.
fn before_ram(idstr: &str) -> String {
    format!("device '{idstr}' sends state before RAM in an unknown layout")
}

/// Returns true if postcopy supports the host page sizes (ORed together) and the target page size.
fn are_carried((host, target): (u64, u64)) -> bool {
    let page = PAGE_SIZE as u64;
    target == page && (page..2 * LARGEST_PAGE as u64).contains(&host)
}

fn over_limit(got: usize, limit: usize, what: &'static str) -> Result<(), MigrationError> {
    match got > limit {
        true => Err(MigrationError::main_wire(WireError::OverLimit {
            what,
            limit: limit as u64,
            got: got as u64,
        })),
        false => Ok(()),
    }
}

/// Returns the error for bytes of main that cannot be decoded. If the cause is a device whose state a relay cannot parse, the
/// error names this device.
pub(super) fn broken(error: WireError, early: &EarlyLengths) -> MigrationError {
    let got = match (&error, early.searched()) {
        (WireError::UnknownDevice { idstr, .. }, _) => {
            format!("the state of device '{idstr}', which sends it while the guest runs")
        }
        (WireError::NoSectionEnd { .. } | WireError::SectionLength { .. }, _) => error.to_string(),
        // The assumed end of that device's state may have been wrong.
        (_, Some(idstr)) => format!("{error}, after device '{idstr}', whose state has no length"),
        _ => return MigrationError::main_wire(error),
    };
    MigrationError::Protocol {
        channel: Channel::Main,
        got,
        doing: "reading RAM (turn multifd off at both QEMUs, 'hotlift migrate --multifd off', or migrate without the relay)",
    }
}

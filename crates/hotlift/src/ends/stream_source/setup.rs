//! What a stream says before its first page, and whether it can be relayed page by page.

use std::io::{self, Write};

use hotlift_mem::PAGE_SIZE;
use hotlift_wire::handshake::{Features, Offer};
use hotlift_wire::main_channel::{
    Command, Configuration, MainDecoder, MainEvent, SectionKind, Step,
};
use hotlift_wire::return_path::ReturnMessage;
use hotlift_wire::settle::MigrationId;
use hotlift_wire::{WireError, limits};

use crate::error::{Channel, MigrationError};
use crate::pipe::session::Call;
use crate::pipe::sink::{EarlySections, RamLayout};
use crate::postcopy::LARGEST_PAGE;
use crate::stream::graceful_close;
use crate::stream::handshake;
use crate::stream::main_recv::MainInput;
use crate::stream::main_recv::event_name;
use crate::stream::return_path::encode;
use crate::transport::Stream;

/// The section type of a device that sends more than one section: START.
const START: u8 = 0x01;

/// The section type of an early section: FULL.
const FULL: u8 = 0x04;

/// What the stream says before its first page.
pub(crate) struct Setup {
    pub configuration: Configuration,
    /// Commands for the other side.
    pub commands: Vec<Command>,
    pub ram: RamLayout,
    /// Sections of devices that have come so far.
    pub early: EarlySections,
    /// The multifd flush of the set-up is a record; else, with multifd, every section's end is a sync point.
    pub flush: bool,
    /// What a Hotlift has said of its stream, a relay or a guest; `None` of a QEMU.
    pub relay: Option<Features>,
    pub return_path: bool,
    /// The guest may be switched over before its pages are there.
    pub postcopy: bool,
}

impl Setup {
    /// Whether the source is a guest of Hotlift's own.
    pub(crate) fn is_guest(&self) -> bool {
        self.relay
            .is_some_and(|features| !features.contains(Features::RELAYED))
    }
}

/// How the stream begins.
pub(crate) enum StreamSetup {
    /// It can be relayed page by page.
    PageByPage(Box<Setup>),
    /// It cannot: why, and whether the source takes answers.
    PassThrough(String, bool),
}

/// Why a stream without multifd has to be passed through after all: another device sends state while the guest runs, or
/// before RAM in a layout that is not known. Their sections follow the footer of `ram`'s; those of a known layout are
/// added to `early`. (With multifd the source may write nothing more on main before its channels are read; there such a
/// device is refused when it comes, and what was taken for the end of an unknown layout is checked at the end.)
pub(crate) fn other_devices(
    input: &mut MainInput<'_>,
    decoder: &mut MainDecoder,
    early: &mut EarlySections,
    call: &Call<'_>,
) -> Result<Option<String>, MigrationError> {
    let mut section_has_ended = false;
    loop {
        if let Some(section) = early.all().find(|section| section.memory.is_none()) {
            return Ok(Some(before_ram(&section.idstr)));
        }
        if section_has_ended {
            if input.unread().is_empty() && !input.fill(1, call)? {
                return Err(MigrationError::main_closed());
            }
            match input.unread()[0] {
                START => return Ok(Some(LIVE_DEVICE.to_owned())),
                FULL => {}
                _ => return Ok(None),
            }
        }
        let (event, consumed) = match decoder.next(input.unread()) {
            Ok(Step::Event { event, consumed }) => (event, consumed),
            Ok(Step::Need(needed)) => {
                if !input.fill(needed, call)? {
                    return Err(MigrationError::main_closed());
                }
                continue;
            }
            Err(WireError::NoSectionEnd { idstr, .. }) => return Ok(Some(before_ram(&idstr))),
            Err(source) => return Err(MigrationError::main_wire(source)),
        };
        match event {
            MainEvent::EarlySection(section) => early.push(section, true),
            _ => section_has_ended = true,
        }
        input.take(consumed);
    }
}

/// Why a stream is passed through in which a device with a START section follows `ram`.
const LIVE_DEVICE: &str =
    "a device besides RAM sends state while the guest runs (VFIO, block bitmaps)";

/// Why a stream is passed through in which this device has an early section of an unknown layout.
fn before_ram(idstr: &str) -> String {
    format!("device '{idstr}' sends state before RAM in a layout that is not known")
}

/// Whether postcopy is carried for all these sizes of host pages, ORed, and this one of the target's.
fn are_carried((host, target): (u64, u64)) -> bool {
    let page = PAGE_SIZE as u64;
    target == page && (page..2 * LARGEST_PAGE as u64).contains(&host)
}

/// Answers a Hotlift's offer; one of another version is told so, and so is a guest that is not saved: nobody who takes a
/// QEMU's stream runs it.
fn greet(
    mut main: &Stream,
    offer: Offer,
    id: MigrationId,
    into_stream: bool,
) -> Result<(), MigrationError> {
    let relayed = match into_stream {
        true => Features::RELAYED,
        false => offer.features & Features::RELAYED,
    };
    let known = Features::MULTIFD | Features::PACKAGE_CHECKED | Features::CONFIRMED;
    let takes = relayed | (offer.features & known);
    main.write_all(&encode(&handshake::answer(offer, takes, id)))
        .map_err(answering)?;
    handshake::check(offer, takes).inspect_err(|error| graceful_close::refuse(&[main], error))
}

/// Answers the PINGs of a QEMU in place of the destination, which does not get them then. One that is to switch over to postcopy
/// at once waits for that before it sends its RAM blocks, without which nobody knows what to say to a destination.
fn answer_pings(mut main: &Stream, commands: &mut Vec<Command>) -> Result<(), MigrationError> {
    let pings = commands.extract_if(.., |command| matches!(command, Command::Ping(_)));
    let pongs = pings.filter_map(|command| match command {
        Command::Ping(value) => Some(ReturnMessage::Pong(value)),
        _ => None,
    });
    let pongs: Vec<_> = pongs.collect();
    main.write_all(&encode(&pongs)).map_err(answering)
}

fn answering(source: io::Error) -> MigrationError {
    MigrationError::Connection {
        channel: Channel::Main,
        doing: "answering the source",
        source,
    }
}

/// Reads up to the last record of the START section of `ram`. A Hotlift is told that the migration is called `id`
/// here. `into_stream`: somebody takes the guest who can run it.
pub(crate) fn read_setup(
    input: &mut MainInput<'_>,
    decoder: &mut MainDecoder,
    id: MigrationId,
    into_stream: bool,
    call: &Call<'_>,
) -> Result<StreamSetup, MigrationError> {
    let mut configuration = Configuration::default();
    let mut commands = Vec::new();
    let mut early = EarlySections::default();
    let mut ram = None;
    let mut section_id = 0;
    let mut flush = false;
    let mut relay = None;
    let mut return_path = false;
    loop {
        let (event, consumed) = match decoder.next(input.unread()) {
            Ok(Step::Event { event, consumed }) => (event, consumed),
            Ok(Step::Need(needed)) => {
                if !input.fill(needed, call)? {
                    return Err(MigrationError::main_closed());
                }
                continue;
            }
            Err(WireError::UnknownDevice { idstr, .. }) => {
                let why = format!("device '{idstr}' sends state while the guest runs");
                return Ok(StreamSetup::PassThrough(why, return_path));
            }
            Err(WireError::NoSectionEnd { idstr, .. }) => {
                return Ok(StreamSetup::PassThrough(before_ram(&idstr), return_path));
            }
            Err(WireError::Unsupported { what }) => {
                let why = format!("it has {what}");
                return Ok(StreamSetup::PassThrough(why, return_path));
            }
            Err(source) => return Err(MigrationError::main_wire(source)),
        };
        if input.everything().len() > limits::MAIN_RECORD {
            return Err(MigrationError::main_wire(WireError::OverLimit {
                what: "length of the set-up",
                limit: limits::MAIN_RECORD as u64,
                got: input.everything().len() as u64,
            }));
        }
        let mut offer = None;
        let mut is_advice = false;
        // The footer may stay in the source's buffer until its channels are read.
        let ended = event == MainEvent::RamEos;
        match event {
            MainEvent::Configuration(said) => configuration = said,
            MainEvent::Command(Command::OpenReturnPath) => return_path = true,
            MainEvent::Command(Command::PostcopyAdvise { page_sizes })
                if !page_sizes.is_some_and(are_carried) =>
            {
                let why = format!(
                    "postcopy may follow (capability postcopy-ram), {}",
                    match page_sizes {
                        Some(_) =>
                            "with host pages of more than 2 MiB, or target pages that are not of 4 KiB",
                        None => "of bitmaps alone",
                    }
                );
                return Ok(StreamSetup::PassThrough(why, return_path));
            }
            MainEvent::Command(Command::Ping(ping))
                if relay.is_none()
                    && commands.is_empty()
                    && let Some(said) = Offer::of_ping(ping) =>
            {
                relay = Some(said.features);
                offer = Some(said);
            }
            MainEvent::Command(Command::PostcopyAdvise { .. }) if !into_stream => {
                let why = "postcopy may follow (capability postcopy-ram)".to_owned();
                return Ok(StreamSetup::PassThrough(why, return_path));
            }
            MainEvent::Command(_) if commands.len() == limits::SETUP_COMMANDS => {
                return Err(MigrationError::main_wire(WireError::OverLimit {
                    what: "number of commands in the set-up",
                    limit: limits::SETUP_COMMANDS as u64,
                    got: commands.len() as u64 + 1,
                }));
            }
            MainEvent::Command(command) => {
                is_advice = matches!(command, Command::PostcopyAdvise { .. });
                commands.push(command);
            }
            MainEvent::SectionStart {
                kind: SectionKind::Start,
                id,
                ..
            } => section_id = id,
            MainEvent::EarlySection(section) => early.push(section, ram.is_some()),
            MainEvent::RamBlocks(blocks) => ram = Some(blocks),
            MainEvent::MultifdFlush if !flush => flush = true,
            MainEvent::Header | MainEvent::RamEos => {}
            other => {
                return Err(MigrationError::Protocol {
                    channel: Channel::Main,
                    got: event_name(&other),
                    doing: "opening the migration",
                });
            }
        }
        input.take(consumed);
        if let Some(offer) = offer {
            greet(input.socket(), offer, id, into_stream)?;
        }
        if is_advice && return_path && relay.is_none() {
            answer_pings(input.socket(), &mut commands)?;
        }
        let (true, Some(blocks)) = (ended, &ram) else {
            continue;
        };
        let is_advice = |command: &Command| matches!(command, Command::PostcopyAdvise { .. });
        return Ok(StreamSetup::PageByPage(Box::new(Setup {
            postcopy: commands.iter().any(is_advice),
            configuration,
            commands,
            ram: RamLayout {
                section_id,
                blocks: blocks.clone(),
            },
            early,
            flush,
            relay,
            return_path,
        })));
    }
}

//! The main channel of an incoming stream as a state machine without I/O: bytes and time in, actions out.
//!
//! It decides order, state and rejections, for a relay and for a guest of this process; its decoder rejects sections that are
//! out of QEMU's order. The driver reads the bytes ([`MainInput`](super::main_recv::MainInput)), and performs each [`Action`].
//!
//! | file | decisions |
//! |---|---|
//! | `set_up` | records before the first page, and whether a relay can parse the stream |
//! | `ram` | RAM sections, sync points, commands, the switch to postcopy, packages |
//! | `after_ram` | devices, the PING that asks whether they are loaded, the last byte, the release of the guest |
//! | `running` | pages of a running guest, and a connection that replaces a lost one |
//!
//! ```text
//! relay   FIRST ─ SET_UP ─ CHOSEN ─┬──────────┬─ RAM ⇄ PACKAGE ─┬─ QEMU_DEVICES ─ RELEASE ─────────────┐
//!                                  └─ OTHERS ─┘                 ├─ PARTS ───┬─ LOADED ─ DESCRIPTION ───┼─ OVER
//!                                                               ├─ DEVICES ─┘                          │
//!                                                               └─ LAST (postcopy) ────────────────────┤
//! guest                     SET_UP ────────────────── RAM ──────┬─ DEVICES ─── LOADED ─────────────────┤
//!                                                               └─ PACKAGE ─ PAGES ⇄ AGREEING ─────────┘
//! ```

mod after_ram;
mod ram;
mod running;
mod set_up;
#[cfg(test)]
mod tests;

use std::time::{Duration, Instant};

use crc32fast::Hasher;
use hotlift_wire::handshake::{Features, Offer};
use hotlift_wire::main_channel::postcopy::Ranges;
use hotlift_wire::main_channel::{
    self as wire, Command, Configuration, DeviceLengths, EarlyLengths, EarlySection, EofSearch,
    MainDecoder, MainEvent, PageContent, SectionKind,
};
use hotlift_wire::{RamBlockEntry, WireError, limits};

use crate::error::{Channel, MigrationError};
use crate::guest::DeviceState;

pub(crate) use set_up::{EarlySections, LARGEST_PAGE, RamLayout, Setup};

/// Section type that ends QEMU's format (`QEMU_VM_EOF`).
pub(crate) const EOF: u8 = 0x00;

/// Limit of the state of all devices of a guest. The built-in guests have some KiB per vCPU; a large VM with many devices some
/// MiB.
const DEVICE_BYTES: usize = 256 << 20;

/// Longest pause of a source's relay within a package: the QEMU behind it has the whole package before it sends any of it.
/// After a damaged length the rest never comes, and a postcopy cannot be cancelled. Longer than the detection of a lost
/// connection.
const PACKAGE: Duration = Duration::from_secs(60);

/// Silence after RAM that marks the last byte of a stream without VM description (machines with `suppress-vmdesc`). One second
/// was too short: QEMU flushes its disks between the last device and EOF.
const SILENCE: Duration = Duration::from_secs(30);

/// Time limit of the source's release of the guest, once it knows that all is loaded.
pub(crate) const RELEASE: Duration = Duration::from_secs(60);

/// Longest delay of a VM description after EOF in a relay's stream; both are sent together.
const DESCRIPTION: Duration = Duration::from_secs(1);

/// Activity named in errors after RAM of a Hotlift's stream.
const ENDING: &str = "reading the end of a Hotlift stream";

/// Limit of the source's silence.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub(crate) enum SilenceLimit {
    /// Limit at any time.
    Always(Duration),
    /// Limit within a record. A source writes records in one piece: an incomplete one has a damaged length, and its rest never
    /// comes. Between records silence is normal.
    WithinRecords(Duration),
    /// No limit.
    Unlimited,
}

/// Party that reads the stream, which decides what the stream may contain.
#[derive(Debug, Clone, Copy)]
pub(crate) enum StreamConsumer {
    /// A relay; into a stream, whose peer can run the guest, or into a file.
    Relay { into_stream: bool },
    /// A guest of this process.
    Guest(GuestRules),
}

/// Requirements on the stream of a guest.
#[derive(Debug, Clone, Copy)]
pub(crate) struct GuestRules {
    /// Features that this side accepts.
    pub takes: Features,
    pub postcopy_ram: bool,
    /// True if the channels identify the source as a Hotlift; `None` without channels.
    pub is_hotlift: Option<bool>,
}

/// Kind of the source.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
enum Source {
    Qemu,
    /// A Hotlift that forwards a QEMU's stream.
    Relay,
    /// A Hotlift's own guest.
    Guest,
}

/// Result of a step.
#[derive(Debug, PartialEq)]
pub(crate) enum Step<'a> {
    /// At least this many more bytes are required, until [`MainChannel::deadline`].
    Need(usize),
    /// An action to perform before the next step, and the count of input bytes that it consumed.
    Do(Action<'a>, usize),
}

/// Action that the driver must perform.
#[derive(Debug, Clone, PartialEq)]
pub(crate) enum Action<'a> {
    Nothing,
    /// Answer a Hotlift's offer with the features accepted here, and reject it if they differ.
    Greet {
        offer: Offer,
        takes: Features,
    },
    /// Compare the source's machine.
    Machine(Configuration),
    /// Compare its RAM blocks.
    RamBlocks(Vec<RamBlockEntry>),
    /// For a relay: everything before the first page; [`MainChannel::begin`] comes next.
    SetUp(Box<Setup>),
    /// For a relay: the stream cannot be parsed, with the reason. Its source may accept answers.
    PassThrough {
        why: String,
        is_answered: bool,
    },
    /// For a relay: no other device sends state while the guest runs.
    Opened,
    /// Empty the RAM of a guest: postcopy may follow.
    Advised,
    /// Send these answers to the source.
    Pong(u32),
    Pongs(Vec<u32>),
    Command(Command),
    Early(EarlySection),
    Page {
        block: usize,
        offset: u64,
        content: PageContent<'a>,
    },
    SyncPoint,
    /// End of a RAM section that is not the last.
    SectionEnd,
    /// End of RAM, with or without a sync point.
    RamEnd {
        is_sync_point: bool,
    },
    /// The source has a preempt channel.
    Preempt,
    /// Discard the pages in these ranges.
    Discard {
        block: usize,
        ranges: Ranges<'a>,
    },
    /// For a relay: the length of a package, its parts, and its end, which starts the guest.
    Package(u32),
    PackagePart(&'a [u8]),
    PackageEnd(&'a [u8]),
    /// For a guest: run with the received devices, and then answer these PINGs.
    Run(Vec<u32>),
    /// For a guest: a device.
    Device(DeviceState),
    /// For a relay: bytes of device sections.
    Devices(&'a [u8]),
    /// Answer this PING once all devices are loaded.
    Load(u32),
    /// For a relay: all devices of a QEMU have arrived. It releases the guest once it knows that they are loaded.
    DevicesEnd,
    /// A QEMU has closed its stream, which releases the guest.
    Released,
    /// The source has released the guest. `unasked`: it did not ask first whether all is loaded.
    Eof {
        unasked: bool,
    },
    /// For a relay: the last bytes of the stream, from EOF on.
    End(&'a [u8]),
    /// Report the received pages of this RAM block.
    Bitmap(usize),
    /// Continue an interrupted postcopy.
    Resume,
}

/// Cause of the end of the bytes.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub(crate) enum EndCause {
    /// [`MainChannel::deadline`] has passed.
    Silent,
    /// The source has closed its side.
    Closed,
}

#[derive(Debug, Clone, Copy, PartialEq, Eq)]
enum Phase {
    /// The first bytes may belong to an interrupted postcopy.
    First,
    SetUp,
    /// The driver has the set-up.
    Chosen,
    /// QEMU without multifd: the bytes after the section show whether another device sends state while the guest runs.
    Others {
        section_has_ended: bool,
    },
    Ram,
    /// A package that lacks `missing` bytes.
    Package {
        missing: usize,
    },
    /// Sections of a Hotlift's guest.
    Devices,
    /// A relay's parts of a QEMU's device sections.
    Parts {
        any: bool,
    },
    QemuDevices,
    /// The remaining bytes are the end of a QEMU's stream.
    QemuEnd,
    /// The source is about to release the guest; `held` bytes are held back.
    Release {
        held: usize,
    },
    /// EOF comes next.
    Last,
    /// EOF comes next, after the PING that asks whether all is loaded.
    Loaded,
    Description,
    Pages,
    Agreeing,
    Over,
}

/// Progress of a guest's source towards postcopy, by its commands.
#[derive(Debug, Clone, Copy, PartialEq, Eq, PartialOrd, Ord, Default)]
enum Stage {
    #[default]
    Precopy,
    /// Postcopy may follow.
    Advised,
    /// Postcopy has begun: pages were discarded.
    Begun,
    /// The guest may be running here.
    Ran,
}

/// State machine of the main channel.
pub(crate) struct MainChannel {
    decoder: MainDecoder,
    taker: StreamConsumer,
    source: Source,
    phase: Phase,
    stage: Stage,
    silence: SilenceLimit,
    /// CRC-32 of every byte consumed, as long as a checksum may follow.
    crc: Option<Hasher>,
    /// Input length, and the time since when it has not grown.
    silent: Option<(usize, Instant)>,
    needed: usize,
    ended: Option<EndCause>,
    /// Set-up of the source, for a relay's driver.
    set_up: Setup,
    set_up_bytes: usize,
    /// True once the stream has named its machine.
    is_named: bool,
    return_path: bool,
    /// True if there are multifd channels.
    multifd: bool,
    /// The open section, or the last one.
    section: Option<SectionKind>,
    /// True if it had a multifd flush.
    flushed: bool,
    /// True if sync points are records; otherwise each section's end is one.
    has_flushes: bool,
    /// True while a relay's sync point after the package is missing.
    awaits_sync: bool,
    takes_postcopy: bool,
    /// True if a PING with the checksum follows the package.
    package_is_checked: bool,
    has_footers: bool,
    /// True if the stream's consumer proves that it loads the devices.
    shows_loading: bool,
    /// Lengths of the early device sections, compared at the end of the stream.
    early: EarlyLengths,
    device: Option<DeviceState>,
    device_bytes: usize,
    /// True once the package has brought LISTEN.
    listens: bool,
    pings: Vec<u32>,
    search: EofSearch,
}

impl MainChannel {
    /// Creates the machine at the first byte of a stream.
    pub(crate) fn new(taker: StreamConsumer, silence: SilenceLimit) -> Self {
        let decoder = MainDecoder::new(DeviceLengths::LengthPrefixed);
        let (decoder, phase, multifd) = match taker {
            StreamConsumer::Relay { .. } => {
                let decoder = decoder.taking_postcopy().taking_early_sections();
                (decoder, Phase::First, false)
            }
            StreamConsumer::Guest(rules) => {
                let decoder = match rules.postcopy_ram {
                    true => decoder.taking_postcopy(),
                    false => decoder,
                };
                let multifd = rules.takes.contains(Features::MULTIFD);
                (decoder, Phase::SetUp, multifd)
            }
        };
        Self {
            decoder,
            taker,
            source: Source::Qemu,
            phase,
            stage: Stage::default(),
            silence,
            crc: Some(Hasher::new()),
            silent: None,
            needed: 0,
            ended: None,
            set_up: Setup::default(),
            set_up_bytes: 0,
            is_named: false,
            return_path: false,
            multifd,
            section: None,
            flushed: false,
            has_flushes: false,
            awaits_sync: false,
            takes_postcopy: false,
            package_is_checked: false,
            has_footers: true,
            shows_loading: false,
            early: EarlyLengths::default(),
            device: None,
            device_bytes: 0,
            listens: false,
            pings: Vec::new(),
            search: EofSearch::default(),
        }
    }

    /// Performs the next step with `bytes`, which begin where the last step's ended.
    ///
    /// # Errors
    /// The error in the stream. It cannot be used any further.
    pub(crate) fn next<'a>(&mut self, bytes: &'a [u8]) -> Result<Step<'a>, MigrationError> {
        let mut step = self.step(bytes)?;
        if let (Step::Need(needed), Some(how)) = (&step, self.ended) {
            self.needed = *needed;
            step = self.at_the_end(bytes, how)?;
        }
        match step {
            Step::Need(needed) => self.needed = needed,
            Step::Do(_, consumed) => {
                self.silent = None;
                if let Some(crc) = &mut self.crc {
                    crc.update(&bytes[..consumed]);
                }
            }
        }
        Ok(step)
    }

    /// Returns the time by which more than the last `arrived` bytes must arrive, if there is a limit.
    pub(crate) fn deadline(&mut self, now: Instant, arrived: usize) -> Option<Instant> {
        let since = match self.silent {
            Some((before, since)) if before == arrived => since,
            _ => self.silent.insert((arrived, now)).1,
        };
        self.limit(arrived).map(|limit| since + limit)
    }

    /// Records that no more bytes come; the next step evaluates this.
    pub(crate) fn ended(&mut self, how: EndCause) {
        self.ended = Some(how);
    }

    /// Continues on a new connection of the same stream, on which the source negotiates the missing pages. Each silence may
    /// last `limit`.
    pub(crate) fn reconnect(&mut self, limit: Duration) {
        self.decoder.reconnect();
        self.phase = Phase::Agreeing;
        self.silence = SilenceLimit::Always(limit);
        self.silent = None;
        self.ended = None;
    }

    fn step<'a>(&mut self, bytes: &'a [u8]) -> Result<Step<'a>, MigrationError> {
        match self.phase {
            Phase::First => Ok(self.first(bytes)),
            Phase::SetUp | Phase::Ram | Phase::Devices | Phase::Pages | Phase::Agreeing => {
                self.event(bytes)
            }
            Phase::Others { section_has_ended } => self.others(bytes, section_has_ended),
            Phase::Package { missing } => match self.taker {
                StreamConsumer::Relay { .. } => self.pass_package(bytes, missing),
                StreamConsumer::Guest(_) => self.take_package(bytes, missing),
            },
            Phase::Parts { any } => self.part(bytes, any),
            Phase::QemuDevices => self.qemu_devices(bytes),
            Phase::QemuEnd => self.qemu_end(bytes),
            Phase::Release { held } => release(bytes, held),
            Phase::Last | Phase::Loaded => self.last(bytes),
            Phase::Description => Ok(self.description(bytes)),
            Phase::Chosen | Phase::Over => Ok(Step::Do(Action::Nothing, 0)),
        }
    }

    /// Performs a step with the next event of the stream.
    fn event<'a>(&mut self, bytes: &'a [u8]) -> Result<Step<'a>, MigrationError> {
        let (event, consumed) = match self.decode(bytes) {
            Ok(wire::Step::Event { event, consumed }) => (event, consumed),
            Ok(wire::Step::Need(needed)) => return Ok(Step::Need(needed)),
            Err(error) => return self.undecoded(error),
        };
        let whole = &bytes[..consumed];
        let action = match self.phase {
            Phase::SetUp => self.set_up(event, consumed)?,
            Phase::Devices => self.device(event, whole)?,
            Phase::Pages => self.running(event)?,
            Phase::Agreeing => self.agree(event)?,
            _ => self.ram(event)?,
        };
        let takes_nothing = matches!(action, Action::PassThrough { .. });
        Ok(Step::Do(action, if takes_nothing { 0 } else { consumed }))
    }

    fn decode<'a>(&mut self, bytes: &'a [u8]) -> Result<wire::Step<'a>, WireError> {
        let step = self.decoder.next(bytes)?;
        if let wire::Step::Need(needed) = step
            && bytes.len() + needed > limits::MAIN_RECORD
        {
            return Err(WireError::OverLimit {
                what: "record of the main channel",
                limit: limits::MAIN_RECORD as u64,
                got: (bytes.len() + needed) as u64,
            });
        }
        Ok(step)
    }

    /// Returns true if the source is a Hotlift.
    fn is_hotlift(&self) -> bool {
        self.source != Source::Qemu
    }

    /// Returns the source's silence limit; `arrived` bytes are unparsed.
    fn limit(&self, arrived: usize) -> Option<Duration> {
        match (self.phase, self.silence) {
            (Phase::Package { .. }, _) => self.passes_from_hotlift().then_some(PACKAGE),
            (Phase::QemuDevices, _) => Some(SILENCE),
            (Phase::Release { .. }, _) => Some(RELEASE),
            (Phase::Description, _) => Some(DESCRIPTION),
            (_, SilenceLimit::Always(limit)) => Some(limit),
            (_, SilenceLimit::WithinRecords(limit)) => (arrived > 0).then_some(limit),
            (_, SilenceLimit::Unlimited) => None,
        }
    }

    fn passes_from_hotlift(&self) -> bool {
        matches!(self.taker, StreamConsumer::Relay { .. }) && self.is_hotlift()
    }

    /// Evaluates the end of the stream after `bytes`.
    fn at_the_end<'a>(
        &mut self,
        bytes: &'a [u8],
        how: EndCause,
    ) -> Result<Step<'a>, MigrationError> {
        let arrived = bytes.len();
        match (self.phase, how) {
            (Phase::QemuDevices, _) => self.last_byte(bytes, how),
            (Phase::Description, _) => Ok(self.without_description(bytes)),
            (Phase::Release { .. }, EndCause::Closed) => Ok(Step::Do(Action::Released, 0)),
            (Phase::Release { .. }, EndCause::Silent) => Err(not_released()),
            // A relay that pauses too long within a package counts as closed.
            (Phase::Package { .. }, _) | (_, EndCause::Closed) => {
                Err(MigrationError::main_closed())
            }
            (_, EndCause::Silent) => Err(MigrationError::Timeout {
                waiting_for: match self.silence {
                    SilenceLimit::WithinRecords(_) => {
                        let wanted = arrived + self.needed;
                        format!(
                            "the rest of a record of the main channel ({arrived} of {wanted} bytes arrived)"
                        )
                    }
                    _ => "the rest of the source's set-up on the main channel".to_owned(),
                },
                waited: self.limit(arrived).unwrap_or_default(),
            }),
        }
    }

    /// Compares the CRC-32 of everything consumed and of `more` with the source's, if checksums are in use.
    fn check_crc(&self, more: &[u8], expected: u32) -> Result<(), MigrationError> {
        let Some(mut crc) = self.crc.clone() else {
            return Ok(());
        };
        crc.update(more);
        match crc.finalize() {
            got if got == expected => Ok(()),
            got => Err(MigrationError::main_wire(WireError::Checksum {
                what: "the main channel",
                expected,
                got,
            })),
        }
    }
}

/// Returns the error for a rejected record.
fn protocol(got: &str, doing: &'static str) -> MigrationError {
    MigrationError::Protocol {
        channel: Channel::Main,
        got: got.to_owned(),
        doing,
    }
}

/// Returns the name of an event, without its content.
fn event_name(event: &MainEvent<'_>) -> String {
    let text = format!("{event:?}");
    let end = text.find([' ', '(', '{']).unwrap_or(text.len());
    text[..end].to_owned()
}

/// Returns the error for a record in a wrong place of a Hotlift's stream.
pub(crate) fn unexpected(got: &str) -> MigrationError {
    protocol(got, ENDING)
}

/// Returns the error for a source that has exceeded [`RELEASE`].
pub(crate) fn not_released() -> MigrationError {
    MigrationError::Timeout {
        waiting_for: "the source to release the guest (it received the report that all is loaded; check its query-migrate)"
            .to_owned(),
        waited: RELEASE,
    }
}

fn too_many_devices(what: &'static str, got: usize) -> MigrationError {
    MigrationError::main_wire(WireError::OverLimit {
        what,
        limit: DEVICE_BYTES as u64,
        got: got as u64,
    })
}

/// Waits for a QEMU to release its guest: only the end may follow the `held` bytes.
fn release(bytes: &[u8], held: usize) -> Result<Step<'_>, MigrationError> {
    match bytes.len() > held {
        true => Err(protocol(
            "bytes after the VM description",
            "waiting for the source to release the guest",
        )),
        false => Ok(Step::Need(1)),
    }
}

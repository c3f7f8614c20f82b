//! The main channel of an incoming stream as a state machine without I/O: its input is bytes and time, its output is actions.
//!
//! The machine decides order, state and rejections, for a relay and for a guest of this process. Its decoder rejects sections
//! that are not in QEMU's order. The driver reads the bytes ([`MainInput`](super::main_recv::MainInput)), and performs each
//! [`Action`].
//!
//! | file | decisions |
//! |---|---|
//! | `set_up` | records before the first page, and if a relay can parse the stream |
//! | `ram` | RAM sections, sync points, commands, the switch to postcopy, packages |
//! | `after_ram` | devices, the PING that asks if they are loaded, the last byte, the release of the guest |
//! | `running` | pages of a guest that already runs, and a connection that replaces a lost one |
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

/// Marker byte at the end of a stream (`QEMU_VM_EOF`).
pub(crate) const EOF: u8 = 0x00;

/// Maximum size of the state of all devices of a guest, in bytes. The built-in guests have some KiB per vCPU. A large VM with
/// many devices has some MiB.
const DEVICE_BYTES: usize = 256 << 20;

/// Maximum silence of a source's relay within a package. That relay has the whole package of its QEMU before it sends any of
/// it. With a damaged length the missing bytes never come, and a postcopy cannot be cancelled. The limit is longer than the
/// detection of a lost connection takes.
const PACKAGE: Duration = Duration::from_secs(60);

/// Silence after RAM that marks the last byte of a stream without VM description (machines with `suppress-vmdesc`). One second
/// was too short, because QEMU flushes its disks between the last device and EOF.
const SILENCE: Duration = Duration::from_secs(30);

/// Time limit for the source to release the guest, once the source knows that all is loaded.
pub(crate) const RELEASE: Duration = Duration::from_secs(60);

/// Maximum time between EOF and the VM description in a relay's stream. A relay sends both together.
const DESCRIPTION: Duration = Duration::from_secs(1);

/// Activity that errors name, for the part of a Hotlift's stream after RAM.
const ENDING: &str = "reading the end of a Hotlift stream";

/// Time limit for a silent source.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub(crate) enum SilenceLimit {
    /// The limit always applies.
    Always(Duration),
    /// The limit applies only within a record. A source writes each record in one piece. An incomplete record has a damaged
    /// length, and the missing bytes never come. Between records, silence is normal.
    WithinRecords(Duration),
    /// The source may be silent without a limit.
    Unlimited,
}

/// Reader of the stream. It determines what the stream may contain.
#[derive(Debug, Clone, Copy)]
pub(crate) enum StreamConsumer {
    /// A relay. With `into_stream`, it forwards to a peer that can run the guest; otherwise it saves to a file.
    Relay { into_stream: bool },
    /// A guest of this process.
    Guest(GuestRules),
}

/// Requirements that a guest of this process has on its stream.
#[derive(Debug, Clone, Copy)]
pub(crate) struct GuestRules {
    /// Features of streams that this process accepts.
    pub takes: Features,
    pub postcopy_ram: bool,
    /// True if the source has identified itself as a Hotlift on its multifd channels; `None` without channels.
    pub is_hotlift: Option<bool>,
}

/// Program that sends the stream.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
enum Source {
    Qemu,
    /// A Hotlift that forwards a QEMU's stream.
    Relay,
    /// A Hotlift that sends its own guest.
    Guest,
}

/// Result of [`MainChannel::next`].
#[derive(Debug, PartialEq)]
pub(crate) enum Step<'a> {
    /// At least this many more bytes are needed, before [`MainChannel::deadline`].
    Need(usize),
    /// The driver must perform this action before the next step. The number is the count of consumed bytes.
    Do(Action<'a>, usize),
}

/// Action that the driver must perform.
#[derive(Debug, Clone, PartialEq)]
pub(crate) enum Action<'a> {
    Nothing,
    /// Answer a Hotlift's offer with the features that this process accepts. Reject the source if the features are
    /// incompatible.
    Greet {
        offer: Offer,
        takes: Features,
    },
    /// Compare the source's machine with the destination's.
    Machine(Configuration),
    /// Compare the source's RAM blocks with the destination's.
    RamBlocks(Vec<RamBlockEntry>),
    /// For a relay: everything before the first page. The driver then calls [`MainChannel::begin`].
    SetUp(Box<Setup>),
    /// For a relay: pass the stream through, because it cannot be parsed. `is_answered` is true if the source reads answers.
    PassThrough {
        why: String,
        is_answered: bool,
    },
    /// For a relay: the check is over, and no device other than RAM sends state while the guest runs.
    Opened,
    /// For a guest: empty its RAM, because postcopy may follow.
    Advised,
    /// Answer the PING of this value with a PONG.
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
    /// A RAM section has ended that is not the last one.
    SectionEnd,
    /// For a relay: the last section of RAM begins, so the source has paused its guest. Not in postcopy.
    LastSection,
    /// RAM has ended, with or without a sync point.
    RamEnd {
        is_sync_point: bool,
    },
    /// The source makes a separate connection for requested pages (`postcopy-preempt`).
    Preempt,
    /// Discard the pages in these ranges of a RAM block, because the source will send newer content.
    Discard {
        block: usize,
        ranges: Ranges<'a>,
    },
    /// For a relay: a package of this length starts. Its parts follow, then its end, which starts the guest.
    Package(u32),
    PackagePart(&'a [u8]),
    PackageEnd(&'a [u8]),
    /// For a guest: load the received devices and run. Then answer the PINGs of these values.
    Run(Vec<u32>),
    /// For a guest: the state of a device.
    Device(DeviceState),
    /// For a relay: bytes of device sections, to forward.
    Devices(&'a [u8]),
    /// Answer the PING of this value once all devices are loaded.
    Load(u32),
    /// For a relay: all devices of a QEMU have arrived. The QEMU releases the guest once it knows that they are loaded.
    DevicesEnd,
    /// A QEMU has closed its stream, and thereby released the guest.
    Released,
    /// The source has released the guest. `unasked` is true if the source did not ask before if all is loaded.
    Eof {
        unasked: bool,
    },
    /// For a relay: forward the last bytes of the stream, which begin with EOF.
    End(&'a [u8]),
    /// Report to the source the received pages of the RAM block with this index.
    Bitmap(usize),
    /// Continue an interrupted postcopy on this connection.
    Resume,
}

/// Reason why no more bytes arrive.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub(crate) enum EndCause {
    /// The source was silent until [`MainChannel::deadline`].
    Silent,
    /// The source has closed its sending direction.
    Closed,
}

#[derive(Debug, Clone, Copy, PartialEq, Eq)]
enum Phase {
    /// The first bytes are awaited. They show if the stream resumes an interrupted postcopy.
    First,
    SetUp,
    /// The driver has received the set-up, and must call [`MainChannel::begin`].
    Chosen,
    /// A QEMU without multifd: the bytes after the first RAM section show if another device sends state while the guest runs.
    Others {
        section_has_ended: bool,
    },
    Ram,
    /// Within a package; `missing` bytes have not arrived.
    Package {
        missing: usize,
    },
    /// Device sections of a Hotlift's guest.
    Devices,
    /// Parts with a QEMU's device sections, sent by a relay.
    Parts {
        any: bool,
    },
    QemuDevices,
    /// Only the end of a QEMU's stream is left.
    QemuEnd,
    /// The source should release the guest next. The last `held` bytes were not forwarded.
    Release {
        held: usize,
    },
    /// Postcopy: EOF comes next.
    Last,
    /// The PING that asks if all is loaded has arrived. EOF comes next.
    Loaded,
    Description,
    Pages,
    Agreeing,
    Over,
}

/// Progress of a source towards postcopy, by its commands.
#[derive(Debug, Clone, Copy, PartialEq, Eq, PartialOrd, Ord, Default)]
enum Stage {
    #[default]
    Precopy,
    /// The source has announced that postcopy may follow.
    Advised,
    /// Postcopy has begun: the source has sent DISCARD.
    Begun,
    /// The source has sent RUN: the guest may be running here.
    Ran,
}

/// State machine of an incoming main channel.
pub(crate) struct MainChannel {
    decoder: MainDecoder,
    taker: StreamConsumer,
    source: Source,
    phase: Phase,
    stage: Stage,
    silence: SilenceLimit,
    /// CRC-32 of all consumed bytes; `None` once no checksum can follow.
    crc: Option<Hasher>,
    /// Length of the input, and the time since when it has not grown.
    silent: Option<(usize, Instant)>,
    needed: usize,
    ended: Option<EndCause>,
    /// Content of the set-up, which a relay's driver receives.
    set_up: Setup,
    set_up_bytes: usize,
    /// True once the source's machine is known from the stream.
    is_named: bool,
    return_path: bool,
    /// True if there are multifd channels.
    multifd: bool,
    /// Kind of the current RAM section, or of the last one.
    section: Option<SectionKind>,
    /// True if this section contained a multifd flush.
    flushed: bool,
    /// True if a sync point is a separate record (multifd flush). If false, each section's end is a sync point.
    has_flushes: bool,
    /// True while the sync point that a relay sends after the package has not arrived.
    awaits_sync: bool,
    takes_postcopy: bool,
    /// True if a PING with a checksum follows the package.
    package_is_checked: bool,
    has_footers: bool,
    /// True if the reader of the stream can prove that it has loaded the devices.
    shows_loading: bool,
    /// Lengths of the early device sections. They are checked against the VM description at the end of the stream.
    early: EarlyLengths,
    device: Option<DeviceState>,
    device_bytes: usize,
    /// True once the package has contained LISTEN.
    listens: bool,
    pings: Vec<u32>,
    search: EofSearch,
}

impl MainChannel {
    /// Creates the state machine for the first byte of a stream.
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

    /// Performs the next step. `bytes` begin after the bytes that the last step consumed.
    ///
    /// # Errors
    /// The error in the stream. Afterwards the stream must not be used.
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

    /// Returns the time by which more bytes must arrive, or `None` without a limit. `arrived` is the count of unconsumed bytes.
    pub(crate) fn deadline(&mut self, now: Instant, arrived: usize) -> Option<Instant> {
        let since = match self.silent {
            Some((before, since)) if before == arrived => since,
            _ => self.silent.insert((arrived, now)).1,
        };
        self.limit(arrived).map(|limit| since + limit)
    }

    /// Records that no more bytes arrive, and why. The next step handles this.
    pub(crate) fn ended(&mut self, how: EndCause) {
        self.ended = Some(how);
    }

    /// Continues the same stream on a new connection, on which the source asks for the missing pages. The source may be silent
    /// for at most `limit`.
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

    /// Returns the limit of the source's silence; `None` without a limit. `arrived` is the count of unconsumed bytes.
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

    /// Handles the end of the stream; `bytes` are the unconsumed bytes before the end.
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
            // Silence within a package counts as a closed connection.
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

    /// Checks the CRC-32 of all consumed bytes and of `more` against the source's value `expected`. Does nothing if no
    /// checksums are used.
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

/// Returns the error for a record `got` that is rejected. `doing` names the activity.
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

/// Returns the error for a record that is not allowed at this place in a Hotlift's stream.
pub(crate) fn unexpected(got: &str) -> MigrationError {
    protocol(got, ENDING)
}

/// Returns the error for a source that did not release the guest within [`RELEASE`].
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

/// Waits for a QEMU to release its guest. No bytes other than the `held` bytes may arrive.
fn release(bytes: &[u8], held: usize) -> Result<Step<'_>, MigrationError> {
    match bytes.len() > held {
        true => Err(protocol(
            "bytes after the VM description",
            "waiting for the source to release the guest",
        )),
        false => Ok(Step::Need(1)),
    }
}

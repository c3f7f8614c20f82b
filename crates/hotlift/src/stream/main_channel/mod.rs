//! The main channel of an incoming stream, as a machine without I/O: bytes and the time in, what to do out.
//!
//! It decides everything that is order, state or refusal, for a relay and for a guest of this process; the decoder below it
//! refuses sections out of QEMU's order. Its driver reads the bytes ([`MainInput`](super::main_recv::MainInput)), and does
//! what an [`Action`] asks for.
//!
//! | file | what it decides |
//! |---|---|
//! | `set_up` | what a stream has before its first page, and whether a relay can take it apart |
//! | `ram` | sections of RAM, sync points, commands, the switch to postcopy, packages |
//! | `behind_ram` | devices, the question whether they are loaded, the last byte, the release of the guest |
//! | `running` | pages of a guest that runs, and a connection in the place of one that was lost |
//!
//! ```text
//! relay   FIRST ─ SET_UP ─ CHOSEN ─┬──────────┬─ RAM ⇄ PACKAGE ─┬─ QEMU_DEVICES ─ RELEASE ─────────────┐
//!                                  └─ OTHERS ─┘                 ├─ PARTS ───┬─ LOADED ─ DESCRIPTION ───┼─ OVER
//!                                                               ├─ DEVICES ─┘                          │
//!                                                               └─ LAST (postcopy) ────────────────────┤
//! guest                     SET_UP ────────────────── RAM ──────┬─ DEVICES ─── LOADED ─────────────────┤
//!                                                               └─ PACKAGE ─ PAGES ⇄ AGREEING ─────────┘
//! ```

mod behind_ram;
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

/// The section type behind the last section of QEMU's format (`QEMU_VM_EOF`).
pub(crate) const EOF: u8 = 0x00;

/// Bytes of state that all devices of a guest together may have. The built-in guests have some KiB a vCPU; a
/// large VM with many devices some MiB.
const DEVICE_BYTES: usize = 256 << 20;

/// How long a relay may send nothing within a package, which its QEMU has whole when it begins. If the length is damaged, the rest
/// never comes, and a postcopy cannot be cancelled. Longer than a loss takes to be noticed.
const PACKAGE: Duration = Duration::from_secs(60);

/// A source that sends nothing for so long behind RAM has sent its last byte, though there is no VM
/// description to show it (machines with `suppress-vmdesc`). A second was too short: QEMU flushes its
/// disks between the last device and EOF.
const SILENCE: Duration = Duration::from_secs(30);

/// How long a source may take to release the guest, once it knows that all is loaded.
pub(crate) const RELEASE: Duration = Duration::from_secs(60);

/// How long a VM description may be behind the EOF of a relay, which sends both in one go.
const DESCRIPTION: Duration = Duration::from_secs(1);

/// What a Hotlift's stream is read for behind RAM.
const ENDING: &str = "reading the end of a hotlift's stream";

/// For how long the source may be silent.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub(crate) enum Silence {
    /// At any time.
    Always(Duration),
    /// Within a record. A source writes records whole: one that stays a part has a damaged length, and what is awaited
    /// will never come. Between records silence is usual.
    WithinRecords(Duration),
    /// As long as it likes.
    Unlimited,
}

/// Who takes the stream.
#[derive(Debug, Clone, Copy)]
pub(crate) enum Taker {
    /// A relay; into a stream, whose other side can run the guest, or into a file.
    Relay { into_stream: bool },
    /// A guest of this process.
    Guest(GuestRules),
}

/// What the stream of a guest has to be.
#[derive(Debug, Clone, Copy)]
pub(crate) struct GuestRules {
    /// What this side can take.
    pub takes: Features,
    pub postcopy_ram: bool,
    /// Whether the source is a Hotlift, as its channels show; `None` without channels.
    pub is_hotlift: Option<bool>,
}

/// What a source is.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
enum Source {
    Qemu,
    /// A Hotlift that passes a QEMU's stream on.
    Relay,
    /// A Hotlift's own guest.
    Guest,
}

/// What the machine made of its input.
#[derive(Debug, PartialEq)]
pub(crate) enum Step<'a> {
    /// So many more bytes at least, until [`MainChannel::deadline`].
    Need(usize),
    /// Something to do, before the next step; it took so many bytes of the input.
    Do(Action<'a>, usize),
}

/// What the driver has to do.
#[derive(Debug, Clone, PartialEq)]
pub(crate) enum Action<'a> {
    Nothing,
    /// A Hotlift's offer, to be answered with what this side takes, and to be refused if that is something else.
    Greet {
        offer: Offer,
        takes: Features,
    },
    /// The source's machine, to be compared.
    Machine(Configuration),
    /// Its RAM blocks, to be compared.
    RamBlocks(Vec<RamBlockEntry>),
    /// To a relay: everything before the first page; [`MainChannel::begin`] comes next.
    SetUp(Box<Setup>),
    /// To a relay: the stream cannot be taken apart, with the reason. Its source may take answers.
    PassThrough {
        why: String,
        is_answered: bool,
    },
    /// To a relay: no other device sends state while the guest runs.
    Opened,
    /// RAM of a guest is to be empty: postcopy may follow.
    Advised,
    /// The source asks for these answers.
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
    /// A section of RAM has ended that is not the last.
    SectionEnd,
    /// RAM has ended, with a sync point or without.
    RamEnd {
        is_sync_point: bool,
    },
    /// The source has a preempt channel.
    Preempt,
    /// Nothing is to be in these ranges.
    Discard {
        block: usize,
        ranges: Ranges<'a>,
    },
    /// To a relay: a package of so many bytes, its parts, and its end, at which the guest runs.
    Package(u32),
    PackagePart(&'a [u8]),
    PackageEnd(&'a [u8]),
    /// To a guest: it runs with the devices that have come, and these PINGs are answered then.
    Run(Vec<u32>),
    /// To a guest: a device.
    Device(DeviceState),
    /// To a relay: bytes of device sections.
    Devices(&'a [u8]),
    /// Once all devices are loaded this PING is answered.
    Load(u32),
    /// To a relay: all devices of a QEMU have come. It releases the guest once it knows that they are loaded.
    DevicesEnd,
    /// A QEMU has closed its stream: the guest is released.
    Released,
    /// The source has released the guest. `unasked`: it has not asked before whether all is loaded.
    Eof {
        unasked: bool,
    },
    /// To a relay: the last bytes of the stream, from EOF on.
    End(&'a [u8]),
    /// Which pages of this RAM block have come.
    Bitmap(usize),
    /// An interrupted postcopy goes on.
    Resume,
}

/// Why no more bytes come.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub(crate) enum Ended {
    /// [`MainChannel::deadline`] has passed.
    Silent,
    /// The source has closed its side.
    Closed,
}

#[derive(Debug, Clone, Copy, PartialEq, Eq)]
enum Phase {
    /// The first bytes may be those of an interrupted postcopy.
    First,
    SetUp,
    /// The driver has the set-up.
    Chosen,
    /// Of a QEMU without multifd: whether another device sends state while the guest runs shows behind the section.
    Others {
        section_has_ended: bool,
    },
    Ram,
    /// Of a package so many bytes are missing.
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
    /// The rest of the bytes is the end of a QEMU's stream.
    QemuEnd,
    /// So many bytes are held; the source releases the guest.
    Release {
        held: usize,
    },
    /// EOF comes next.
    Last,
    /// The same behind the question whether all is loaded.
    Loaded,
    Description,
    Pages,
    Agreeing,
    Over,
}

/// How far the source of a guest is towards postcopy, by its commands.
#[derive(Debug, Clone, Copy, PartialEq, Eq, PartialOrd, Ord, Default)]
enum Stage {
    #[default]
    Precopy,
    /// It may follow.
    Advised,
    /// It has begun: pages have been taken back.
    Begun,
    /// The guest may run here.
    Ran,
}

/// The machine.
pub(crate) struct MainChannel {
    decoder: MainDecoder,
    taker: Taker,
    source: Source,
    phase: Phase,
    stage: Stage,
    silence: Silence,
    /// CRC-32 of every byte taken, until it is known that no checksum comes.
    crc: Option<Hasher>,
    /// Since when no byte has come, behind so many.
    silent: Option<(usize, Instant)>,
    needed: usize,
    ended: Option<Ended>,
    /// Of the source; a relay's driver gets it.
    set_up: Setup,
    set_up_bytes: usize,
    /// The stream has named its machine.
    is_named: bool,
    return_path: bool,
    /// There are multifd channels.
    multifd: bool,
    /// The section that is open, or the last that was.
    section: Option<SectionKind>,
    /// It had a multifd flush.
    flushed: bool,
    /// Sync points are records; else each section's end is one.
    has_flushes: bool,
    /// A relay's sync point behind the package is still to come.
    awaits_sync: bool,
    takes_postcopy: bool,
    /// A PING behind the package has the checksum of it.
    package_is_checked: bool,
    has_footers: bool,
    /// The taker shows that it loads the devices.
    shows_loading: bool,
    /// What the devices' sections before the end of RAM are compared with at the end of the stream.
    early: EarlyLengths,
    device: Option<DeviceState>,
    device_bytes: usize,
    /// What a package has had.
    listens: bool,
    pings: Vec<u32>,
    search: EofSearch,
}

impl MainChannel {
    /// The machine at the first byte of a stream.
    pub(crate) fn new(taker: Taker, silence: Silence) -> Self {
        let decoder = MainDecoder::new(DeviceLengths::LengthPrefixed);
        let (decoder, phase, multifd) = match taker {
            Taker::Relay { .. } => {
                let decoder = decoder.taking_postcopy().taking_early_sections();
                (decoder, Phase::First, false)
            }
            Taker::Guest(rules) => {
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

    /// Does the next step with `bytes`, which begin where the last step's ended.
    ///
    /// # Errors
    /// What is wrong with the stream. Nothing of it can be used any further.
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

    /// Until when more has to come than the `come` bytes of the last step's input, if there is a limit.
    pub(crate) fn deadline(&mut self, now: Instant, come: usize) -> Option<Instant> {
        let since = match self.silent {
            Some((before, since)) if before == come => since,
            _ => self.silent.insert((come, now)).1,
        };
        self.limit(come).map(|limit| since + limit)
    }

    /// No more bytes come; the next step decides what that means.
    pub(crate) fn ended(&mut self, how: Ended) {
        self.ended = Some(how);
    }

    /// Goes on at the start of a new connection of the same stream, on which the source agrees what is missing. It may
    /// be silent for `limit` each time.
    pub(crate) fn reconnect(&mut self, limit: Duration) {
        self.decoder.reconnect();
        self.phase = Phase::Agreeing;
        self.silence = Silence::Always(limit);
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
                Taker::Relay { .. } => self.pass_package(bytes, missing),
                Taker::Guest(_) => self.take_package(bytes, missing),
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

    /// Does a step with the next event of the stream.
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

    /// Whether the source is a Hotlift.
    fn is_hotlift(&self) -> bool {
        self.source != Source::Qemu
    }

    /// For how long the source may be silent behind `come` bytes.
    fn limit(&self, come: usize) -> Option<Duration> {
        match (self.phase, self.silence) {
            (Phase::Package { .. }, _) => self.passes_from_hotlift().then_some(PACKAGE),
            (Phase::QemuDevices, _) => Some(SILENCE),
            (Phase::Release { .. }, _) => Some(RELEASE),
            (Phase::Description, _) => Some(DESCRIPTION),
            (_, Silence::Always(limit)) => Some(limit),
            (_, Silence::WithinRecords(limit)) => (come > 0).then_some(limit),
            (_, Silence::Unlimited) => None,
        }
    }

    fn passes_from_hotlift(&self) -> bool {
        matches!(self.taker, Taker::Relay { .. }) && self.is_hotlift()
    }

    /// Decides what it means that nothing comes behind `bytes`.
    fn at_the_end<'a>(&mut self, bytes: &'a [u8], how: Ended) -> Result<Step<'a>, MigrationError> {
        let come = bytes.len();
        match (self.phase, how) {
            (Phase::QemuDevices, _) => self.last_byte(bytes, how),
            (Phase::Description, _) => Ok(self.without_description(bytes)),
            (Phase::Release { .. }, Ended::Closed) => Ok(Step::Do(Action::Released, 0)),
            (Phase::Release { .. }, Ended::Silent) => Err(not_released()),
            // A relay that sends nothing within a package counts as closed.
            (Phase::Package { .. }, _) | (_, Ended::Closed) => Err(MigrationError::main_closed()),
            (_, Ended::Silent) => Err(MigrationError::Timeout {
                waiting_for: match self.silence {
                    Silence::WithinRecords(_) => {
                        let wanted = come + self.needed;
                        format!(
                            "the rest of a record of the main channel ({come} of {wanted} bytes have come)"
                        )
                    }
                    _ => "the rest of the source's set-up on main".to_owned(),
                },
                waited: self.limit(come).unwrap_or_default(),
            }),
        }
    }

    /// Compares the CRC-32 of everything taken and of `more` with the source's, where it is summed up.
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

/// What a step refuses.
fn protocol(got: &str, doing: &'static str) -> MigrationError {
    MigrationError::Protocol {
        channel: Channel::Main,
        got: got.to_owned(),
        doing,
    }
}

/// An event's name, without what is in it.
fn event_name(event: &MainEvent<'_>) -> String {
    let text = format!("{event:?}");
    let end = text.find([' ', '(', '{']).unwrap_or(text.len());
    text[..end].to_owned()
}

/// What a Hotlift's stream has in a wrong place.
pub(crate) fn unexpected(got: &str) -> MigrationError {
    protocol(got, ENDING)
}

/// The source has taken [`RELEASE`] and more.
pub(crate) fn not_released() -> MigrationError {
    MigrationError::Timeout {
        waiting_for: "the source to release the guest (it was told that all is loaded; ask its \
                      query-migrate)"
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

/// Waits for a QEMU to release its guest: nothing follows the `held` bytes but the end.
fn release(bytes: &[u8], held: usize) -> Result<Step<'_>, MigrationError> {
    match bytes.len() > held {
        true => Err(protocol(
            "bytes behind the VM description",
            "waiting for the source to release the guest",
        )),
        false => Ok(Step::Need(1)),
    }
}

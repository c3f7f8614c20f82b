//! Parses the stream between two Hotlifts into units (a record of the main channel, a packet header, an answer). Damages one of
//! them, or cuts the connection there.

use std::collections::HashMap;
use std::sync::{Mutex, PoisonError};

use hotlift_wire::main_channel::{Command, DeviceLengths, MainDecoder, MainEvent, Step};
use hotlift_wire::multifd::{HEADER_LEN, INITIAL_PACKET_LEN};
use hotlift_wire::return_path::ReturnMessage;
use hotlift_wire::settle::CONFIRMATION_LEN;

use super::rule::{Flow, Rule, Socket, Stop};

/// First bytes of the source's message that it knows the outcome.
const CONFIRMATION: [u8; 4] = *b"HLOK";

/// One unit on the wire.
#[derive(Debug, Clone, PartialEq, Eq, Hash)]
pub struct Unit {
    /// `None` for data packets, which use any channel.
    pub socket: Option<Socket>,
    /// True from the destination to the source.
    pub back: bool,
    /// Kind, and index among its kind.
    pub name: String,
}

/// Effect on a unit.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub enum Action {
    /// Changes bits of a byte.
    Flip {
        /// Index; the last byte if the unit is shorter.
        byte: usize,
        /// The bits.
        mask: u8,
    },
    /// Both directions end before this byte.
    Cut {
        /// Bytes of the unit that pass.
        byte: usize,
    },
    /// This direction ends before this byte, the other continues.
    HalfCut {
        /// Bytes of the unit that pass.
        byte: usize,
    },
    /// This direction is held before the unit, until [`Proxy::release`](super::Proxy::release).
    Hold,
}

/// A fault at a unit. It happens once.
#[derive(Debug, Clone, PartialEq, Eq)]
pub struct Fault {
    /// Unit.
    pub unit: Unit,
    /// Effect.
    pub action: Action,
}

/// Log of the carried stream.
#[derive(Debug, Default)]
pub struct Log {
    /// Every unit with its length, in the order of their first bytes on each connection.
    pub units: Vec<(Unit, usize)>,
    /// Bytes towards the destination.
    pub bytes: u64,
    /// True if the fault has happened.
    pub fired: bool,
}

/// The rule.
#[derive(Debug, Default)]
pub struct Units {
    fault: Option<Fault>,
    log: Mutex<Log>,
}

impl Units {
    /// Creates the rule. It records, and applies `fault` when its unit passes.
    #[must_use]
    pub fn new(fault: Option<Fault>) -> Self {
        Self {
            fault,
            log: Mutex::default(),
        }
    }

    /// Returns the log.
    #[must_use]
    pub fn into_log(self) -> Log {
        self.log
            .into_inner()
            .unwrap_or_else(PoisonError::into_inner)
    }

    /// Records a unit; returns its action.
    fn note(&self, unit: Unit, length: usize) -> Option<Action> {
        let mut log = super::lock(&self.log);
        let here = self.fault.as_ref().filter(|fault| fault.unit == unit);
        let action = here.filter(|_| !log.fired).map(|fault| fault.action);
        log.fired |= action.is_some();
        log.units.push((unit, length));
        action
    }
}

impl Rule for Units {
    type Direction = Option<Splitter>;

    fn apply(
        &self,
        splitter: &mut Option<Splitter>,
        came: &mut Vec<u8>,
        flow: &Flow<'_>,
    ) -> Result<(), Stop> {
        let splitter = match (splitter, flow.is_back(), flow.socket()) {
            // The connection does not belong to the migration.
            (_, _, Some(Socket::Question)) => return flow.pass_all(came),
            (Some(splitter), ..) => splitter,
            (none, true, _) => none.insert(Splitter::answers()),
            (none, false, Some(Socket::Main)) => none.insert(Splitter::main()),
            (none, false, Some(Socket::Channel(_))) => none.insert(Splitter::channel()),
            (None, false, None) => return Ok(()),
        };
        let mut done = 0;
        while let Some((name, length)) = splitter.next(&came[done..]) {
            let bytes = &mut came[done..done + length];
            done += length;
            // Not part of the counted answers.
            let is_counted = !flow.is_back() && !name.starts_with("confirmation");
            let unit = Unit {
                socket: flow.socket().filter(|_| !name.starts_with("data")),
                back: flow.is_back(),
                name,
            };
            let action = self.note(unit, length);
            if action == Some(Action::Hold) {
                flow.hold();
            }
            // The length of a payload varies between migrations.
            let rest = match action {
                None | Some(Action::Hold) => length,
                Some(Action::Flip { byte, mask }) => {
                    bytes[byte.min(length - 1)] ^= mask;
                    length
                }
                Some(Action::Cut { byte } | Action::HalfCut { byte }) => byte.min(length),
            };
            if is_counted {
                super::lock(&self.log).bytes += rest as u64;
            }
            let passed = flow.pass(&bytes[..rest]);
            match action {
                Some(Action::Cut { .. }) => return Err(Stop::Cut),
                Some(Action::HalfCut { .. }) => return Err(Stop::HalfCut),
                _ => passed?,
            }
        }
        came.drain(..done);
        Ok(())
    }
}

/// Parser of the units of one direction.
#[derive(Debug)]
pub struct Splitter {
    kind: Kind,
    counts: HashMap<String, usize>,
}

#[derive(Debug)]
enum Kind {
    Main(Box<MainDecoder>),
    /// With the SYNC packets so far, and the pending payload.
    Channel {
        opened: bool,
        syncs: usize,
        payload: usize,
    },
    Answers,
}

impl Splitter {
    fn new(kind: Kind) -> Self {
        Self {
            kind,
            counts: HashMap::new(),
        }
    }

    fn main() -> Self {
        Self::new(Kind::Main(Box::new(MainDecoder::new(
            DeviceLengths::LengthPrefixed,
        ))))
    }

    fn channel() -> Self {
        Self::new(Kind::Channel {
            opened: false,
            syncs: 0,
            payload: 0,
        })
    }

    fn answers() -> Self {
        Self::new(Kind::Answers)
    }

    /// Returns name and length of the unit at the start of `bytes`, if it is complete.
    fn next(&mut self, bytes: &[u8]) -> Option<(String, usize)> {
        let (name, length) = match &mut self.kind {
            Kind::Main(decoder) => match decoder.next(bytes) {
                Ok(Step::Event { event, consumed }) => (record_name(&event), consumed),
                _ => return None,
            },
            Kind::Channel {
                opened,
                syncs,
                payload,
            } => {
                if !*opened {
                    bytes.get(..INITIAL_PACKET_LEN)?;
                    *opened = true;
                    ("opening".to_owned(), INITIAL_PACKET_LEN)
                } else if *payload > 0 {
                    let length = *payload;
                    bytes.get(..length)?;
                    *payload = 0;
                    (format!("data payload of round {syncs}"), length)
                } else if bytes.starts_with(&CONFIRMATION) {
                    // Sent by another thread than the packets: before or after the last SYNC.
                    bytes.get(..CONFIRMATION_LEN)?;
                    ("confirmation".to_owned(), CONFIRMATION_LEN)
                } else {
                    let header = bytes.get(..HEADER_LEN)?;
                    let be32 = |at: usize| u32::from_be_bytes(*header[at..].first_chunk().unwrap());
                    let round = *syncs;
                    let is_sync = be32(8) & 1 == 1;
                    if is_sync {
                        *syncs += 1;
                        (format!("sync of round {round}"), HEADER_LEN)
                    } else {
                        *payload = usize::try_from(be32(20)).unwrap();
                        (format!("data header of round {round}"), HEADER_LEN)
                    }
                }
            }
            Kind::Answers => match ReturnMessage::decode(bytes) {
                Ok((message, length)) => (answer_name(&message).to_owned(), length),
                Err(_) => return None,
            },
        };
        let number = self.counts.entry(name.clone()).or_default();
        *number += 1;
        Some((format!("{name} #{number}"), length))
    }
}

fn record_name(event: &MainEvent<'_>) -> String {
    match event {
        MainEvent::Header => "file header",
        MainEvent::Configuration(_) => "configuration",
        MainEvent::Command(Command::Ping(_)) => "PING",
        MainEvent::Command(_) | MainEvent::Postcopy(_) => "command",
        MainEvent::SectionStart { kind, .. } => return format!("{kind:?} section"),
        MainEvent::RamBlocks(_) => "list of RAM blocks",
        MainEvent::RamPage { .. } => "page",
        MainEvent::MultifdFlush => "flush",
        MainEvent::RamEos => "EOS",
        MainEvent::EarlySection(_) => "early section",
        MainEvent::DevicePayload(_) => "device payload",
        MainEvent::SectionFooter => "footer",
        MainEvent::Eof => "EOF",
        MainEvent::VmDescription(_) => "VM description",
    }
    .to_owned()
}

fn answer_name(message: &ReturnMessage<'_>) -> &'static str {
    match message {
        ReturnMessage::Hello { .. } => "HELLO",
        ReturnMessage::Pong(_) => "PONG",
        ReturnMessage::Shut(_) => "SHUT",
        ReturnMessage::ErrorText(_) => "ERROR_TEXT",
        _ => "another answer",
    }
}

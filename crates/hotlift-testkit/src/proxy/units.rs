//! Rule of a proxy that splits the stream between two Hotlifts into units: records of main, packet headers, and
//! answers. It damages one unit, or cuts the connection there.

use std::collections::HashMap;
use std::sync::{Mutex, PoisonError};

use hotlift_wire::main_channel::{Command, DeviceLengths, MainDecoder, MainEvent, Step};
use hotlift_wire::multifd::{HEADER_LEN, INITIAL_PACKET_LEN};
use hotlift_wire::return_path::ReturnMessage;
use hotlift_wire::settle::CONFIRMATION_LEN;

use super::rule::{Flow, Rule, Socket, Stop};

/// First bytes of the message by which the source confirms that it knows the outcome.
const CONFIRMATION: [u8; 4] = *b"HLOK";

/// A unit of the stream: a record, a packet header, or an answer.
#[derive(Debug, Clone, PartialEq, Eq, Hash)]
pub struct Unit {
    /// Connection of the unit; `None` for data packets, which may use any channel.
    pub socket: Option<Socket>,
    /// Direction of the unit: true from the destination to the source.
    pub back: bool,
    /// Kind of the unit, and its index among units of this kind.
    pub name: String,
}

/// Change that the proxy makes at a unit.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub enum Action {
    /// Changes bits of a byte.
    Flip {
        /// Index of the byte in the unit; if the unit is shorter, the last byte is changed.
        byte: usize,
        /// Bits to change.
        mask: u8,
    },
    /// Both directions of the connection end within the unit.
    Cut {
        /// Number of bytes of the unit that still pass.
        byte: usize,
    },
    /// The direction of the unit ends within the unit; the opposite direction continues.
    HalfCut {
        /// Number of bytes of the unit that still pass.
        byte: usize,
    },
    /// The direction of the unit is paused before the unit, until [`Proxy::release`](super::Proxy::release).
    Hold,
}

/// A fault at one unit. The fault occurs once.
#[derive(Debug, Clone, PartialEq, Eq)]
pub struct Fault {
    /// The unit at which the fault occurs.
    pub unit: Unit,
    /// Change that the proxy makes at the unit.
    pub action: Action,
}

/// Units and bytes that passed, and whether the fault has occurred.
#[derive(Debug, Default)]
pub struct Log {
    /// Every unit with its length in bytes, in the order in which the units begin on each connection.
    pub units: Vec<(Unit, usize)>,
    /// Number of bytes from the source to the destination.
    pub bytes: u64,
    /// True if the fault has occurred.
    pub fired: bool,
}

/// Rule that records the units of a stream, and damages one.
#[derive(Debug, Default)]
pub struct Units {
    fault: Option<Fault>,
    log: Mutex<Log>,
}

impl Units {
    /// Creates the rule. It applies `fault` when the unit of the fault passes; `None` only records.
    #[must_use]
    pub fn new(fault: Option<Fault>) -> Self {
        Self {
            fault,
            log: Mutex::default(),
        }
    }

    /// Returns the log of all units.
    #[must_use]
    pub fn into_log(self) -> Log {
        self.log
            .into_inner()
            .unwrap_or_else(PoisonError::into_inner)
    }

    /// Records a unit of `length` bytes, and returns the change at this unit.
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
            // This connection does not belong to the migration.
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
            // Confirmations do not belong to the counted bytes.
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

/// Splits the bytes of one direction into units.
#[derive(Debug)]
pub struct Splitter {
    kind: Kind,
    counts: HashMap<String, usize>,
}

#[derive(Debug)]
enum Kind {
    Main(Box<MainDecoder>),
    /// A multifd channel: the number of SYNC packets so far, and the length of the payload that follows.
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

    /// Returns name and length of the unit at the start of `bytes`; `None` if the unit is incomplete.
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
                    // Another thread sends this message, so it may come before or after the last SYNC.
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

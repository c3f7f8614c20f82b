//! The records after the END section of `ram`: devices, EOF, VM description.
//!
//! QEMU's device states have no length, so the data after RAM cannot be split into sections while it arrives. But its end can
//! be recognised: EOF, then a VM description whose length reaches to the last received byte ([`EofSearch`]). So a relay sends
//! the device sections to another relay in parts that may begin and end anywhere. Each part is the payload of QEMU's command
//! PACKAGED, with a length and a checksum ([`next_device_state`]):
//!
//! ```text
//! QEMU:     FULL...  EOF  VM description
//! Hotlift:  PACKAGED { part of FULL...  be32 CRC } ...  PING  EOF  VM description
//! ```
//!
//! The CRC-32 covers all earlier bytes of the main channel. A part is forwarded only after this check. Otherwise a damaged byte
//! that looks like EOF could make a QEMU run a guest that its source still owns.

use std::cmp::Ordering;

use memchr::memmem;

use super::command::{PACKAGED, PING};
use super::section::{COMMAND, EOF, VM_DESCRIPTION};
use crate::{Reader, WireError, limits};

/// Number of bytes between EOF and the text of the description.
const DESCRIPTION_HEAD: usize = 5;

/// Number of bytes of the checksum after a part.
const CRC_LEN: usize = 4;

/// An event after RAM, in a stream between two Hotlifts.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub enum DeviceStateEvent<'a> {
    /// A part of the device sections, and its checksum.
    Part {
        /// Bytes of the part, at most [`limits::DEVICE_PART`].
        sections: &'a [u8],
        /// CRC-32 of all earlier bytes of the main channel, including `sections`.
        crc: u32,
    },
    /// PING with this value.
    Ping(u32),
    /// EOF. An optional VM description follows, up to the end of the stream.
    Eof,
}

/// Result of [`next_device_state`].
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub enum DeviceStateStep<'a> {
    /// At least this number of further bytes is needed.
    Need(usize),
    /// An event, and its length in bytes.
    Event(DeviceStateEvent<'a>, usize),
}

/// Decodes the next event at the start of `input`.
///
/// # Errors
///
/// If the input is none of the three events, or a part exceeds [`limits::DEVICE_PART`].
pub fn next_device_state(input: &[u8]) -> Result<DeviceStateStep<'_>, WireError> {
    let mut reader = Reader::new(input);
    match read(&mut reader) {
        Ok(event) => Ok(DeviceStateStep::Event(event, reader.position())),
        Err(WireError::Truncated { needed, .. }) => Ok(DeviceStateStep::Need(needed)),
        Err(error) => Err(error),
    }
}

fn read<'a>(reader: &mut Reader<'a>) -> Result<DeviceStateEvent<'a>, WireError> {
    match reader.u8("section type")? {
        EOF => return Ok(DeviceStateEvent::Eof),
        COMMAND => {}
        other => {
            return Err(WireError::Unknown {
                what: "section type behind RAM",
                got: u64::from(other),
            });
        }
    }
    let command = reader.be16("command")?;
    let length = reader.be16("length of a command")?;
    if length != 4 || ![PACKAGED, PING].contains(&command) {
        return Err(WireError::Unknown {
            what: "command behind RAM",
            got: u64::from(command),
        });
    }
    if command == PING {
        return Ok(DeviceStateEvent::Ping(reader.be32("PING")?));
    }
    let length = reader.length(limits::DEVICE_PART + CRC_LEN, "length of PACKAGED")?;
    let sections = length.checked_sub(CRC_LEN).ok_or(WireError::Unknown {
        what: "length of PACKAGED",
        got: length as u64,
    })?;
    Ok(DeviceStateEvent::Part {
        sections: reader.take(sections, "device sections")?,
        crc: reader.be32("checksum of device sections")?,
    })
}

/// Appends the command PACKAGED, which must be followed by `length` bytes of content.
///
/// # Errors
///
/// If the length exceeds 32 bits.
pub fn put_packaged_head(length: u64, out: &mut Vec<u8>) -> Result<(), WireError> {
    let fitting = u32::try_from(length).map_err(|_| WireError::OverLimit {
        what: "length of PACKAGED",
        limit: u64::from(u32::MAX),
        got: length,
    })?;
    out.push(COMMAND);
    out.extend_from_slice(&PACKAGED.to_be_bytes());
    out.extend_from_slice(&4_u16.to_be_bytes());
    out.extend_from_slice(&fitting.to_be_bytes());
    Ok(())
}

/// Appends the command that must be followed by a part of `length` bytes and its checksum.
///
/// # Errors
///
/// If the length exceeds [`limits::DEVICE_PART`].
pub fn put_device_part_head(length: usize, out: &mut Vec<u8>) -> Result<(), WireError> {
    if length > limits::DEVICE_PART {
        return Err(WireError::OverLimit {
            what: "length of a part of the device sections",
            limit: limits::DEVICE_PART as u64,
            got: length as u64,
        });
    }
    put_packaged_head((length + CRC_LEN) as u64, out)
}

/// EOF and an empty VM description, for a stream that has no description. QEMU does not use the description, but reads it
/// before it runs the guest.
pub const EOF_WITHOUT_DESCRIPTION: [u8; 8] = [EOF, VM_DESCRIPTION, 0, 0, 0, 2, b'{', b'}'];

/// Finds EOF in the device states of a QEMU while they arrive, so that all bytes before EOF can be forwarded.
///
/// The input consists of the received bytes that were not forwarded yet. A byte may be EOF while the following bytes may be the
/// start of a VM description, or a complete one up to the end of the input. A description is JSON text, in which QEMU escapes
/// control characters, so a few bytes distinguish it from binary device state. The caller must limit the number of bytes that
/// are not forwarded.
#[derive(Debug, Default)]
pub struct EofSearch {
    /// Number of input bytes before the first byte that may be EOF.
    before: usize,
    /// Number of bytes of the description's text that were checked.
    checked: usize,
}

impl EofSearch {
    /// Returns the position of EOF if a complete description follows it up to the end of `input`; `None` otherwise. `input` is
    /// the input of the last call without the forwarded bytes, plus new bytes.
    pub fn find(&mut self, input: &[u8]) -> Option<usize> {
        loop {
            let rest = &input[self.before..];
            let is_last = rest.last() == Some(&EOF);
            let next = memmem::find(rest, &[EOF, VM_DESCRIPTION]);
            let next = next.unwrap_or(rest.len() - usize::from(is_last));
            if next > 0 {
                self.move_to(self.before + next);
            }
            match self.description(&rest[next..]) {
                Description::None => self.move_to(self.before + 1),
                Description::Part => return None,
                Description::Whole => return Some(self.before),
            }
        }
    }

    /// Returns the number of bytes at the start of the input that are certainly before EOF, and can be forwarded.
    #[must_use]
    pub fn before(&self) -> usize {
        self.before
    }

    /// Records that the first `length` bytes of the input were forwarded. `length` must not exceed [`EofSearch::before`].
    pub fn passed_on(&mut self, length: usize) {
        self.before -= length;
    }

    fn move_to(&mut self, position: usize) {
        (self.before, self.checked) = (position, 0);
    }

    /// Checks if a description follows the first byte of `rest`, which may be EOF.
    fn description(&mut self, rest: &[u8]) -> Description {
        let Some((head, text)) = rest.split_at_checked(1 + DESCRIPTION_HEAD) else {
            return Description::Part;
        };
        if text.first().is_some_and(|byte| *byte != b'{') {
            return Description::None;
        }
        let is_text = |byte: &u8| *byte >= b' ' || byte.is_ascii_whitespace();
        if !text[self.checked..].iter().all(is_text) {
            return Description::None;
        }
        self.checked = text.len();
        let length = u32::from_be_bytes([head[2], head[3], head[4], head[5]]);
        match (text.len() as u64).cmp(&u64::from(length)) {
            Ordering::Less => Description::Part,
            Ordering::Equal if is_json(text) => Description::Whole,
            Ordering::Equal | Ordering::Greater => Description::None,
        }
    }
}

/// Kind of data after a byte that may be EOF.
enum Description {
    /// Not a description.
    None,
    /// The beginning of a description; also if no data follows yet.
    Part,
    Whole,
}

fn is_json(text: &[u8]) -> bool {
    serde_json::from_slice::<serde::de::IgnoredAny>(text).is_ok()
}

#[cfg(test)]
mod tests {
    use super::*;

    fn device_state_of(devices: &[u8], json: &str) -> Vec<u8> {
        let mut input = devices.to_vec();
        input.extend_from_slice(&[EOF, VM_DESCRIPTION]);
        input.extend_from_slice(&u32::try_from(json.len()).unwrap().to_be_bytes());
        input.extend_from_slice(json.as_bytes());
        input
    }

    /// Device state that resembles the start of a description: a part of it, with more text after it, with another length.
    const DEVICES: &[u8] =
        b"\x04abc\0\x06\0\0\0\x05{....\0\x06\0\0\xff\xff{x\0\x06\0\0\x06\0{\0{\0\x06\x7f\0\0\0{}\0\0\x7e";

    const JSON: &str = r#"{"page_size":4096,"devices":[]}"#;

    #[test]
    fn eof_is_found_at_the_last_byte_and_nothing_after_it_is_passed_on_early() {
        let input = device_state_of(DEVICES, JSON);
        for step in 1..input.len() {
            let (mut search, mut passed) = (EofSearch::default(), 0);
            for end in (0..input.len()).step_by(step) {
                let found = search.find(&input[passed..end]);
                assert_eq!(found, None, "{end} by {step}");
                let before = search.before();
                assert!(passed + before <= DEVICES.len(), "{end} by {step}");
                search.passed_on(before);
                passed += before;
            }
            let found = search.find(&input[passed..]);
            assert_eq!(found.map(|at| passed + at), Some(DEVICES.len()), "{step}");
        }
    }

    #[test]
    fn bytes_that_cannot_be_the_end_are_not_held_back() {
        let mut search = EofSearch::default();
        for (bytes, held) in [
            (&b"\0\0\0\0"[..], 1),
            (b"\0\x06", 2),
            (b"\0\x06\0\0\xff\xff{", 7),
            (b"\0\x06\0\0\xff\xff{text\x01", 0),
            (b"\0\x06\0\0\0\x02{} more", 0),
            (b"\0\x06\0\0\0\x02{[", 0),
        ] {
            assert_eq!(search.find(bytes), None, "{bytes:?}");
            assert_eq!(bytes.len() - search.before(), held, "{bytes:?}");
            search = EofSearch::default();
        }
        // A description of any length is not forwarded, since its EOF must not be sent.
        let mut long = b"\0\x06\xff\xff\xff\xff{".to_vec();
        long.resize(1 << 20, b' ');
        assert_eq!(search.find(&long), None);
        assert_eq!(search.before(), 0);
    }

    #[test]
    fn a_description_without_content_completes_a_tail() {
        assert_eq!(EofSearch::default().find(&EOF_WITHOUT_DESCRIPTION), Some(0));
    }

    #[test]
    fn a_description_that_is_no_json_does_not_end_device_state() {
        let input = device_state_of(b"\x04abc", r#"{"page_size":4096,"devices":[}"#);
        assert_eq!(EofSearch::default().find(&input), None);
    }

    #[test]
    fn a_part_and_a_ping_are_read_back_and_every_prefix_asks_for_more() {
        let mut bytes = Vec::new();
        put_device_part_head(3, &mut bytes).unwrap();
        bytes.extend_from_slice(b"abc\0\0\x01\x02");
        let whole = bytes.len();
        for length in 0..whole {
            let step = next_device_state(&bytes[..length]).unwrap();
            assert!(
                matches!(step, DeviceStateStep::Need(1..)),
                "{length}: {step:?}"
            );
        }
        let step = next_device_state(&bytes).unwrap();
        let (sections, crc) = (&b"abc"[..], 0x102);
        assert_eq!(
            step,
            DeviceStateStep::Event(DeviceStateEvent::Part { sections, crc }, whole)
        );
        bytes.clear();
        super::super::Command::Ping(9).encode(&mut bytes);
        let step = next_device_state(&bytes).unwrap();
        assert_eq!(
            step,
            DeviceStateStep::Event(DeviceStateEvent::Ping(9), bytes.len())
        );
        let step = next_device_state(&[EOF, VM_DESCRIPTION]).unwrap();
        assert_eq!(step, DeviceStateStep::Event(DeviceStateEvent::Eof, 1));
    }

    #[test]
    fn a_message_that_is_too_long_or_unknown_is_refused() {
        let mut bytes = vec![];
        assert!(put_device_part_head(limits::DEVICE_PART + 1, &mut bytes).is_err());
        assert!(put_packaged_head(1 << 32, &mut bytes).is_err());
        let packaged = |length: u32| [&[COMMAND, 0, 7, 0, 4][..], &length.to_be_bytes()].concat();
        let most = u32::try_from(limits::DEVICE_PART + CRC_LEN).unwrap();
        assert!(next_device_state(&packaged(most)).is_ok());
        for length in [0, 3, most + 1, u32::MAX] {
            assert!(next_device_state(&packaged(length)).is_err(), "{length}");
        }
        assert!(next_device_state(&[COMMAND, 0, 4, 0, 0]).is_err());
        assert!(next_device_state(&[2]).is_err());
    }
}

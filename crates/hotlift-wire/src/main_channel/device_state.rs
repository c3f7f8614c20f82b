//! What follows the END section of `ram`: devices, EOF, VM description.
//!
//! A QEMU's device payloads carry no length, so that nothing behind RAM can be taken apart while it
//! arrives. Its end can be seen, though: EOF, then a VM description whose length reaches to the last
//! byte that came ([`complete_device_state`]). Two Hotlifts that pass on such a stream wrap the device
//! sections in QEMU's command PACKAGED, which has a length ([`next_device_state`]):
//!
//! ```text
//! QEMU:     FULL...  EOF  VM description
//! Hotlift:  PACKAGED { FULL... }  PING  EOF  VM description
//! ```

use super::command::{PACKAGED, PING};
use super::section::{COMMAND, EOF, VM_DESCRIPTION};
use crate::{Reader, WireError, limits};

/// Bytes between EOF and the text of the description.
const DESCRIPTION_HEAD: usize = 5;

/// One thing behind RAM in a stream between two Hotlifts.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub enum DeviceStateEvent {
    /// So many bytes of device sections follow, at most [`limits::DEVICE_SECTIONS`].
    Packaged(usize),
    /// PING with this value.
    Ping(u32),
    /// EOF; the description, if any, follows to the end of the stream.
    Eof,
}

/// What [`next_device_state`] made of its input.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub enum DeviceStateStep {
    /// So many more bytes are needed.
    Need(usize),
    /// An event, made of so many bytes.
    Event(DeviceStateEvent, usize),
}

/// Reads the next event at the start of `input`.
///
/// # Errors
///
/// Anything but the three events, and a package above [`limits::DEVICE_SECTIONS`].
pub fn next_device_state(input: &[u8]) -> Result<DeviceStateStep, WireError> {
    let mut reader = Reader::new(input);
    match read(&mut reader) {
        Ok(event) => Ok(DeviceStateStep::Event(event, reader.position())),
        Err(WireError::Truncated { needed, .. }) => Ok(DeviceStateStep::Need(needed)),
        Err(error) => Err(error),
    }
}

fn read(reader: &mut Reader<'_>) -> Result<DeviceStateEvent, WireError> {
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
    let length = reader.length(limits::DEVICE_SECTIONS, "length of PACKAGED")?;
    Ok(DeviceStateEvent::Packaged(length))
}

/// Appends the command that `length` bytes of device sections follow.
///
/// # Errors
///
/// A length above [`limits::DEVICE_SECTIONS`].
pub fn put_packaged_head(length: usize, out: &mut Vec<u8>) -> Result<(), WireError> {
    let fitting = u32::try_from(length)
        .ok()
        .filter(|_| length <= limits::DEVICE_SECTIONS)
        .ok_or(WireError::OverLimit {
            what: "length of all device sections",
            limit: limits::DEVICE_SECTIONS as u64,
            got: length as u64,
        })?;
    out.push(COMMAND);
    out.extend_from_slice(&PACKAGED.to_be_bytes());
    out.extend_from_slice(&4_u16.to_be_bytes());
    out.extend_from_slice(&fitting.to_be_bytes());
    Ok(())
}

/// EOF and a description without content, in place of one that did not come: nobody makes use of it, but a QEMU
/// reads it to its end before it runs the guest.
pub const EOF_WITHOUT_DESCRIPTION: [u8; 8] = [EOF, VM_DESCRIPTION, 0, 0, 0, 2, b'{', b'}'];

/// Where EOF is in the device state of a QEMU that has come completely; `None` while more must come.
///
/// It is complete when some EOF is followed by a description whose length reaches exactly to
/// the last byte, and which is a JSON text. `from` is the position up to which an earlier, shorter
/// input was searched for candidates, whose positions `candidates` keeps: every byte is looked at once. Of
/// more candidates than [`limits::DESCRIPTION_STARTS`] the later ones do not end it.
pub fn complete_device_state(
    input: &[u8],
    from: &mut usize,
    candidates: &mut Vec<usize>,
) -> Option<usize> {
    let end = input.len().saturating_sub(1 + DESCRIPTION_HEAD);
    while *from < end {
        let at = *from;
        *from += 1;
        if input[at] == EOF
            && input[at + 1] == VM_DESCRIPTION
            && input[at + 1 + DESCRIPTION_HEAD] == b'{'
            && candidates.len() < limits::DESCRIPTION_STARTS
        {
            candidates.push(at);
        }
    }
    let reaches_the_end = |at: usize| {
        let length = input.get(at + 2..at + 1 + DESCRIPTION_HEAD)?;
        let length = u32::from_be_bytes(length.try_into().ok()?);
        let length = usize::try_from(length).ok()?;
        (length <= limits::VM_DESCRIPTION && at + 1 + DESCRIPTION_HEAD + length == input.len())
            .then_some(())?;
        let text = &input[at + 1 + DESCRIPTION_HEAD..];
        serde_json::from_slice::<serde::de::IgnoredAny>(text).ok()?;
        Some(at)
    };
    candidates.iter().find_map(|&at| reaches_the_end(at))
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

    #[test]
    fn device_state_is_complete_at_its_last_byte_and_not_before() {
        // Device bytes that look like the start of a description, twice.
        let devices = b"\x04abc\0\x06\0\0\0\x05{....\0\x06\0\0\xff\xff{x\x7e";
        let input = device_state_of(devices, r#"{"page_size":4096,"devices":[]}"#);
        let (mut from, mut candidates) = (0, Vec::new());
        for length in 0..input.len() {
            let found = complete_device_state(&input[..length], &mut from, &mut candidates);
            assert_eq!(found, None, "{length}");
        }
        let found = complete_device_state(&input, &mut from, &mut candidates);
        assert_eq!(found, Some(devices.len()));
    }

    #[test]
    fn a_description_without_content_completes_a_tail() {
        let found = complete_device_state(&EOF_WITHOUT_DESCRIPTION, &mut 0, &mut Vec::new());
        assert_eq!(found, Some(0));
    }

    #[test]
    fn a_description_that_is_no_json_does_not_end_device_state() {
        let input = device_state_of(b"\x04abc", r#"{"page_size":4096,"devices":[}"#);
        assert_eq!(complete_device_state(&input, &mut 0, &mut Vec::new()), None);
    }

    #[test]
    fn a_package_and_a_ping_are_read_back_and_every_part_of_them_asks_for_the_rest() {
        let mut bytes = Vec::new();
        put_packaged_head(77, &mut bytes).unwrap();
        let whole = bytes.len();
        for length in 0..whole {
            let step = next_device_state(&bytes[..length]).unwrap();
            assert!(
                matches!(step, DeviceStateStep::Need(1..)),
                "{length}: {step:?}"
            );
        }
        let step = next_device_state(&bytes).unwrap();
        assert_eq!(
            step,
            DeviceStateStep::Event(DeviceStateEvent::Packaged(77), whole)
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
    fn what_is_too_long_or_unknown_is_refused() {
        let mut bytes = vec![];
        assert!(put_packaged_head(limits::DEVICE_SECTIONS + 1, &mut bytes).is_err());
        assert!(next_device_state(&[COMMAND, 0, 7, 0, 4, 0xff, 0xff, 0xff, 0xff]).is_err());
        assert!(next_device_state(&[COMMAND, 0, 4, 0, 0]).is_err());
        assert!(next_device_state(&[2]).is_err());
    }
}

//! The run state that a QEMU's guest had at the switchover: the device `globalstate`.
//!
//! ```text
//! FULL  be32 id  "globalstate"  be32 instance 0  be32 version 1 | be32 size  state, zero padded (100) | 0x7e  be32 id
//! ```

use super::section::{FULL, SectionHeader, read_footer};
use crate::Reader;

/// The section's name in front of it, with what follows up to the payload: instance 0, version 1.
const HEAD: &[u8] = b"\x0bglobalstate\0\0\0\0\0\0\0\x01";

/// Bytes of the type and the id in front of [`HEAD`].
const TYPE_AND_ID: usize = 5;

/// Bytes of the payload behind its size.
const STATE: usize = 100;

/// QEMU's name of the run state (`RunState`) among device sections. A machine without it (types up to 2.3) runs its guest.
///
/// Device sections have no length. Another device that holds these very bytes is taken for it, so no guest may be harmed
/// by what this returns.
#[must_use]
pub fn run_state(sections: &[u8]) -> Option<&str> {
    let mut from = 0;
    while let Some(found) = sections
        .get(from..)?
        .windows(HEAD.len())
        .position(|bytes| bytes == HEAD)
    {
        let at = from + found;
        from = at + 1;
        let begin = at.checked_sub(TYPE_AND_ID);
        if let Some(state) = begin.and_then(|begin| read(&sections[begin..])) {
            return Some(state);
        }
    }
    None
}

/// The state of a section at the start of `bytes`, if it is this one to its end.
fn read(bytes: &[u8]) -> Option<&str> {
    let mut reader = Reader::new(bytes);
    if reader.u8("section type").ok()? != FULL {
        return None;
    }
    let header = SectionHeader::decode(&mut reader).ok()?;
    reader.be32("size of the run state").ok()?;
    let state: &[u8; STATE] = reader.array("run state").ok()?;
    read_footer(&mut reader, header.id).ok()?;
    let name = state.split(|byte| *byte == 0).next()?;
    let is_name = !name.is_empty()
        && name
            .iter()
            .all(|byte| b"abcdefghijklmnopqrstuvwxyz-".contains(byte));
    is_name.then(|| std::str::from_utf8(name).ok()).flatten()
}

#[cfg(test)]
mod tests {
    use super::*;

    fn section(state: &[u8]) -> Vec<u8> {
        let mut bytes = vec![FULL, 0, 0, 0, 9];
        bytes.extend_from_slice(HEAD);
        bytes.extend_from_slice(&[0, 0, 0, 7]);
        let mut padded = state.to_vec();
        padded.resize(STATE, 0);
        bytes.extend_from_slice(&padded);
        bytes.extend_from_slice(&[0x7e, 0, 0, 0, 9]);
        bytes
    }

    #[test]
    fn the_state_is_found_between_other_devices_and_only_in_a_whole_section() {
        let whole = section(b"paused");
        let between = [b"xyz".as_slice(), HEAD, &whole, b"more"].concat();
        assert_eq!(run_state(&between), Some("paused"));
        assert_eq!(
            run_state(&section(b"guest-panicked")),
            Some("guest-panicked")
        );
        for end in 0..whole.len() {
            assert_eq!(run_state(&whole[..end]), None, "cut at {end}");
        }
        for bad in [&b""[..], b"Paused", b"\xff\xfe", &[b'a'; STATE]] {
            let expected = std::str::from_utf8(bad).ok().filter(|_| bad.len() == STATE);
            assert_eq!(run_state(&section(bad)), expected, "{bad:?}");
        }
        let mut footer = whole;
        *footer.last_mut().unwrap() = 8;
        assert_eq!(run_state(&footer), None, "another footer");
    }
}

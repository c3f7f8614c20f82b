//! Run state of a QEMU's guest at the switchover, read from the section of the device `globalstate`.
//!
//! ```text
//! FULL  be32 id  "globalstate"  be32 instance 0  be32 version 1 | be32 size  state, zero padded (100) | 0x7e  be32 id
//! ```

use memchr::memmem;

use super::section::{FULL, SectionHeader, read_footer};
use crate::Reader;

/// Name of the section with its length, instance 0 and version 1: the bytes before the payload.
const HEAD: &[u8] = b"\x0bglobalstate\0\0\0\0\0\0\0\x01";

/// Number of bytes of the section type and the section id before [`HEAD`].
const TYPE_AND_ID: usize = 5;

/// Number of bytes of the state in the payload.
const STATE: usize = 100;

/// Number of bytes of the whole section, including the size of the state and the footer.
const SECTION: usize = TYPE_AND_ID + HEAD.len() + 4 + STATE + 5;

/// Finds QEMU's name of the run state (`RunState`) in device sections. Returns `None` if the section is absent, as with machine
/// types up to 2.3: then the guest runs.
///
/// Device sections have no length, so the bytes are searched. If the state of a device contains the same bytes, it is mistaken
/// for the section. So a wrong result must not harm a guest.
fn run_state(sections: &[u8]) -> Option<&str> {
    let mut from = 0;
    while let Some(found) = memmem::find(sections.get(from..)?, HEAD) {
        let at = from + found;
        from = at + 1;
        let begin = at.checked_sub(TYPE_AND_ID);
        if let Some(state) = begin.and_then(|begin| read(&sections[begin..])) {
            return Some(state);
        }
    }
    None
}

/// Finds the run state in device sections that arrive in parts.
#[derive(Debug, Default)]
pub struct RunStateSearch {
    /// Last received bytes, which may contain the beginning of the section.
    last: Vec<u8>,
}

impl RunStateSearch {
    /// Returns the run state if the section ends in `part`, the next bytes of the device sections; `None` otherwise.
    pub fn find(&mut self, part: &[u8]) -> Option<String> {
        // The section may begin in the last bytes, and end in this part.
        let (end, _) = part.split_at(part.len().min(SECTION - 1));
        self.last.extend_from_slice(end);
        let found = run_state(&self.last).or_else(|| run_state(part));
        let found = found.map(str::to_owned);
        if part.len() >= SECTION {
            self.last.clear();
            self.last
                .extend_from_slice(&part[part.len() - (SECTION - 1)..]);
        }
        let excess = self.last.len().saturating_sub(SECTION - 1);
        self.last.drain(..excess);
        found
    }
}

/// Returns the run state if `bytes` begin with the complete section; `None` otherwise.
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
        for step in [1, 2, 7, 133, 134, 135, 200] {
            let mut search = RunStateSearch::default();
            let found = between.chunks(step).filter_map(|part| search.find(part));
            assert_eq!(found.collect::<Vec<_>>(), ["paused"], "parts of {step}");
        }
        let mut footer = whole;
        *footer.last_mut().unwrap() = 8;
        assert_eq!(run_state(&footer), None, "another footer");
    }
}

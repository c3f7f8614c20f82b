//! The reader for all bytes from a peer.

use crate::WireError;

/// A read position in untrusted bytes.
///
/// Every read takes the name of the field, for errors. A read past the end returns [`WireError::Truncated`] with the number of
/// missing bytes.
#[derive(Debug, Clone)]
pub struct Reader<'a> {
    bytes: &'a [u8],
    position: usize,
}

impl<'a> Reader<'a> {
    /// Creates a reader at the start of `bytes`.
    pub fn new(bytes: &'a [u8]) -> Self {
        Self { bytes, position: 0 }
    }

    /// Returns the number of bytes read so far.
    pub fn position(&self) -> usize {
        self.position
    }

    /// Returns the number of unread bytes.
    pub fn remaining(&self) -> usize {
        self.bytes.len() - self.position
    }

    /// Returns the next byte without consuming it.
    pub fn peek(&self, what: &'static str) -> Result<u8, WireError> {
        self.bytes
            .get(self.position)
            .copied()
            .ok_or(WireError::Truncated { what, needed: 1 })
    }

    /// Reads `length` bytes.
    pub fn take(&mut self, length: usize, what: &'static str) -> Result<&'a [u8], WireError> {
        let rest = &self.bytes[self.position..];
        let taken = rest.get(..length).ok_or_else(|| WireError::Truncated {
            what,
            needed: length - rest.len(),
        })?;
        self.position += length;
        Ok(taken)
    }

    /// Reads `N` bytes.
    pub fn array<const N: usize>(&mut self, what: &'static str) -> Result<&'a [u8; N], WireError> {
        let rest = &self.bytes[self.position..];
        let taken = rest.first_chunk().ok_or_else(|| WireError::Truncated {
            what,
            needed: N - rest.len(),
        })?;
        self.position += N;
        Ok(taken)
    }

    /// Reads one byte.
    pub fn u8(&mut self, what: &'static str) -> Result<u8, WireError> {
        self.array(what).map(|&[byte]| byte)
    }

    /// Reads a big-endian 16-bit number.
    pub fn be16(&mut self, what: &'static str) -> Result<u16, WireError> {
        self.array(what).map(|&bytes| u16::from_be_bytes(bytes))
    }

    /// Reads a big-endian 32-bit number.
    pub fn be32(&mut self, what: &'static str) -> Result<u32, WireError> {
        self.array(what).map(|&bytes| u32::from_be_bytes(bytes))
    }

    /// Reads a big-endian 64-bit number.
    pub fn be64(&mut self, what: &'static str) -> Result<u64, WireError> {
        self.array(what).map(|&bytes| u64::from_be_bytes(bytes))
    }

    /// Reads a big-endian 32-bit length or count. Fails if the number exceeds `limit`.
    pub fn length(&mut self, limit: usize, what: &'static str) -> Result<usize, WireError> {
        let got = self.be32(what)?;
        usize::try_from(got)
            .ok()
            .filter(|&length| length <= limit)
            .ok_or(WireError::OverLimit {
                what,
                limit: as_u64(limit),
                got: u64::from(got),
            })
    }

    /// Reads a counted string (`qemu_put_counted_string`): one byte with the length, at least 1, then the UTF-8 text.
    pub fn counted_string(&mut self, what: &'static str) -> Result<&'a str, WireError> {
        let length = usize::from(self.u8(what)?);
        if length == 0 {
            return Err(WireError::Empty { what });
        }
        self.text(length, what)
    }

    /// Reads a UTF-8 text of `length` bytes.
    pub fn text(&mut self, length: usize, what: &'static str) -> Result<&'a str, WireError> {
        let bytes = self.take(length, what)?;
        std::str::from_utf8(bytes).map_err(|source| WireError::NotUtf8 { what, source })
    }

    /// Fails if unread bytes of `what` are left.
    pub fn finish(self, what: &'static str) -> Result<(), WireError> {
        match self.remaining() {
            0 => Ok(()),
            extra => Err(WireError::Trailing { what, extra }),
        }
    }
}

/// Converts `value` to 64 bits; `usize` is never larger on Rust's platforms.
pub(crate) fn as_u64(value: usize) -> u64 {
    u64::try_from(value).unwrap_or(u64::MAX)
}

/// Appends a counted string, which [`Reader::counted_string`] reads.
pub(crate) fn put_counted_string(
    out: &mut Vec<u8>,
    text: &str,
    what: &'static str,
) -> Result<(), WireError> {
    let length = u8::try_from(text.len()).map_err(|_| WireError::OverLimit {
        what,
        limit: u64::from(u8::MAX),
        got: as_u64(text.len()),
    })?;
    if length == 0 {
        return Err(WireError::Empty { what });
    }
    out.push(length);
    out.extend_from_slice(text.as_bytes());
    Ok(())
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn a_short_read_names_the_missing_bytes_and_consumes_nothing() {
        let mut reader = Reader::new(&[1, 2, 3]);
        let error = reader.be64("number").unwrap_err();
        assert!(matches!(
            error,
            WireError::Truncated {
                what: "number",
                needed: 5
            }
        ));
        assert_eq!(reader.position(), 0);
        assert_eq!(reader.be16("number").unwrap(), 0x0102);
        assert!(matches!(
            reader.take(3, "bytes"),
            Err(WireError::Truncated { needed: 2, .. })
        ));
        assert!(matches!(
            reader.finish("record"),
            Err(WireError::Trailing { extra: 1, .. })
        ));
    }

    #[test]
    fn a_counted_string_is_one_to_255_bytes_of_utf8() {
        let mut out = Vec::new();
        for length in [1, 255] {
            let text = "n".repeat(length);
            out.clear();
            put_counted_string(&mut out, &text, "name").unwrap();
            assert_eq!(Reader::new(&out).counted_string("name").unwrap(), text);
        }
        for length in [0, 256] {
            assert!(put_counted_string(&mut out, &"n".repeat(length), "name").is_err());
        }
        assert!(matches!(
            Reader::new(&[0]).counted_string("name"),
            Err(WireError::Empty { .. })
        ));
        assert!(matches!(
            Reader::new(&[2, 0xc3, 0x28]).counted_string("name"),
            Err(WireError::NotUtf8 { .. })
        ));
    }

    #[test]
    fn a_length_above_its_limit_is_refused_before_its_bytes_are_awaited() {
        assert!(matches!(
            Reader::new(&[0xff; 4]).length(16, "text"),
            Err(WireError::OverLimit { limit: 16, .. })
        ));
        assert_eq!(Reader::new(&[0, 0, 0, 16]).length(16, "text").unwrap(), 16);
    }
}

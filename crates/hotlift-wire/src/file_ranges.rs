//! Messages with which a host reads ranges of a save file from a file server on another host.
//!
//! ```text
//! client                                            server
//!   open     "HLFO"  be32 version  visitor (8)
//!            be16 length  name                  -->
//!                                               <--   opened   "HLFA"  u8 0  be64 length  be64 id
//!                                                     refused  "HLFA"  u8 why  be16 length  text, then closes
//!   read     be64 position  be32 length         -->
//!                                               <--   bytes    be32 length  `length` bytes
//!                                                     failed   be32 2^32 - 1  be16 length  text
//! ```
//!
//! A client may send several reads before it receives the first answer. Answers have the order of the reads. An answer is
//! shorter than the requested length only at the end of the file. The ranges have no checksums: the content of a save file has
//! its own.

use crate::reader::as_u64;
use crate::{Reader, WireError, limits};

/// Version of these messages. A server refuses another version with an error that reports this.
pub const VERSION: u32 = 1;

const OPEN_MAGIC: [u8; 4] = *b"HLFO";
const REPLY_MAGIC: [u8; 4] = *b"HLFA";

/// Length of a [`Read`] in bytes.
pub const READ_LEN: usize = 12;

/// Length field of an answer to a read that failed. No bytes of the file follow.
const FAILED: u32 = u32::MAX;

/// Request that opens a file. [`Read`] requests follow on the same connection.
#[derive(Debug, Clone, PartialEq, Eq)]
pub struct Open<'a> {
    /// [`VERSION`] of the client.
    pub version: u32,
    /// Random number that one client uses for all its connections. The server counts them as one client.
    pub visitor: u64,
    /// Name of the file, without a path.
    pub name: &'a str,
}

/// Reason why a server refuses to open a file.
#[derive(Debug, Clone, Copy, PartialEq, Eq, Hash)]
#[repr(u8)]
pub enum Refusal {
    /// The file does not exist, or the server does not export it.
    NotThere = 1,
    /// Too many connections are open, or the server's system lacks a resource. A later retry may succeed.
    NotNow = 2,
    /// The client uses another [`VERSION`].
    Version = 3,
}

/// Answer of a server to [`Open`].
#[derive(Debug, Clone, PartialEq, Eq)]
pub enum Reply<'a> {
    /// The file is open.
    Opened {
        /// Length of the file in bytes.
        length: u64,
        /// Id of the file, unique among files.
        id: u64,
    },
    /// The file was not opened.
    Refused {
        /// Reason for programs.
        why: Refusal,
        /// Reason as text for an operator.
        text: &'a str,
    },
}

/// Request to read a range of the open file.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub struct Read {
    /// Position of the first byte.
    pub position: u64,
    /// Number of bytes, at most [`limits::FILE_READ`].
    pub length: usize,
}

/// Head of the answer to a [`Read`].
#[derive(Debug, Clone, PartialEq, Eq)]
pub enum Answer<'a> {
    /// The read has succeeded: this number of bytes follows.
    Bytes(usize),
    /// The read has failed, for this reason. No bytes follow.
    Failed(&'a str),
}

impl<'a> Open<'a> {
    /// Appends the encoded message to `out`.
    ///
    /// # Errors
    /// A name that is empty or longer than [`limits::FILE_NAME`].
    pub fn encode(&self, out: &mut Vec<u8>) -> Result<(), WireError> {
        const WHAT: &str = "the name of a file";
        if self.name.is_empty() {
            return Err(WireError::Empty { what: WHAT });
        }
        if self.name.len() > limits::FILE_NAME {
            return Err(WireError::OverLimit {
                what: WHAT,
                limit: as_u64(limits::FILE_NAME),
                got: as_u64(self.name.len()),
            });
        }
        out.extend_from_slice(&OPEN_MAGIC);
        out.extend_from_slice(&self.version.to_be_bytes());
        out.extend_from_slice(&self.visitor.to_be_bytes());
        put_text(out, self.name, limits::FILE_NAME);
        Ok(())
    }

    /// Decodes the message at the start of `bytes`. Returns the message and its length in bytes.
    ///
    /// # Errors
    /// [`WireError::Truncated`] if more bytes may complete the message; any other error is final. If the client has another
    /// version, only the version is decoded.
    pub fn decode(bytes: &'a [u8]) -> Result<(Self, usize), WireError> {
        const WHAT: &str = "the opening of a file";
        let mut reader = Reader::new(bytes);
        magic(&mut reader, OPEN_MAGIC, WHAT)?;
        let version = reader.be32(WHAT)?;
        if version != VERSION {
            let open = Self {
                version,
                visitor: 0,
                name: "",
            };
            return Ok((open, reader.position()));
        }
        let visitor = reader.be64(WHAT)?;
        let name = text(&mut reader, limits::FILE_NAME, "the name of a file")?;
        if name.is_empty() {
            return Err(WireError::Empty {
                what: "the name of a file",
            });
        }
        let open = Self {
            version,
            visitor,
            name,
        };
        Ok((open, reader.position()))
    }
}

impl<'a> Reply<'a> {
    /// Appends the encoded message to `out`. The text is cut to [`limits::FILE_TEXT`].
    pub fn encode(&self, out: &mut Vec<u8>) {
        out.extend_from_slice(&REPLY_MAGIC);
        match *self {
            Self::Opened { length, id } => {
                out.push(0);
                out.extend_from_slice(&length.to_be_bytes());
                out.extend_from_slice(&id.to_be_bytes());
            }
            Self::Refused { why, text } => {
                out.push(why as u8);
                put_text(out, text, limits::FILE_TEXT);
            }
        }
    }

    /// Decodes the message at the start of `bytes`. Returns the message and its length in bytes.
    ///
    /// # Errors
    /// [`WireError::Truncated`] if more bytes may complete the message; any other error is final.
    pub fn decode(bytes: &'a [u8]) -> Result<(Self, usize), WireError> {
        const WHAT: &str = "the answer to the opening of a file";
        let mut reader = Reader::new(bytes);
        magic(&mut reader, REPLY_MAGIC, WHAT)?;
        let code = reader.u8(WHAT)?;
        let reply = match code {
            0 => Self::Opened {
                length: reader.be64(WHAT)?,
                id: reader.be64(WHAT)?,
            },
            _ => Self::Refused {
                why: [Refusal::NotThere, Refusal::NotNow, Refusal::Version]
                    .into_iter()
                    .find(|why| *why as u8 == code)
                    .ok_or(WireError::Unknown {
                        what: WHAT,
                        got: code.into(),
                    })?,
                text: text(&mut reader, limits::FILE_TEXT, "a refusal")?,
            },
        };
        Ok((reply, reader.position()))
    }
}

impl Read {
    /// Encodes the message.
    #[must_use]
    pub fn encode(self) -> [u8; READ_LEN] {
        let mut bytes = [0; READ_LEN];
        bytes[..8].copy_from_slice(&self.position.to_be_bytes());
        let length = u32::try_from(self.length).unwrap_or(FAILED);
        bytes[8..].copy_from_slice(&length.to_be_bytes());
        bytes
    }

    /// Decodes the message.
    ///
    /// # Errors
    /// A length above [`limits::FILE_READ`], or a range that ends after the highest possible position.
    pub fn decode(bytes: &[u8; READ_LEN]) -> Result<Self, WireError> {
        let mut reader = Reader::new(bytes);
        let position = reader.be64("the position of a read")?;
        let length = reader.length(limits::FILE_READ, "the length of a read")?;
        let end = position.checked_add(as_u64(length));
        if end.is_none_or(|end| end > i64::MAX.unsigned_abs()) {
            return Err(WireError::OverLimit {
                what: "the position of a read",
                limit: i64::MAX.unsigned_abs(),
                got: position,
            });
        }
        Ok(Self { position, length })
    }
}

impl<'a> Answer<'a> {
    /// Appends the encoded head to `out`. The text is cut to [`limits::FILE_TEXT`].
    ///
    /// # Errors
    /// A length above [`limits::FILE_READ`].
    pub fn encode(&self, out: &mut Vec<u8>) -> Result<(), WireError> {
        match *self {
            Self::Bytes(length) => {
                let what = "the length of an answer";
                let length = u32::try_from(length)
                    .ok()
                    .filter(|_| length <= limits::FILE_READ);
                let length = length.ok_or(WireError::OverLimit {
                    what,
                    limit: as_u64(limits::FILE_READ),
                    got: u64::MAX,
                })?;
                out.extend_from_slice(&length.to_be_bytes());
                Ok(())
            }
            Self::Failed(text) => {
                out.extend_from_slice(&FAILED.to_be_bytes());
                put_text(out, text, limits::FILE_TEXT);
                Ok(())
            }
        }
    }

    /// Decodes the head of the answer to a read of `asked` bytes. Returns the head and its length, without the file's bytes
    /// that follow.
    ///
    /// # Errors
    /// [`WireError::Truncated`] if more bytes may complete the head; any other error is final, such as a length above `asked`.
    pub fn decode(bytes: &'a [u8], asked: usize) -> Result<(Self, usize), WireError> {
        let mut reader = Reader::new(bytes);
        let length = reader.clone().be32("an answer")?;
        let answer = match length {
            FAILED => {
                reader.be32("an answer")?;
                Self::Failed(text(&mut reader, limits::FILE_TEXT, "a failure")?)
            }
            _ => Self::Bytes(reader.length(asked, "the length of an answer")?),
        };
        Ok((answer, reader.position()))
    }
}

fn magic(reader: &mut Reader<'_>, magic: [u8; 4], what: &'static str) -> Result<(), WireError> {
    let expected = u32::from_be_bytes(magic);
    let got = reader.be32(what)?;
    if got != expected {
        return Err(WireError::Mismatch {
            what,
            expected: expected.into(),
            got: got.into(),
        });
    }
    Ok(())
}

/// Reads a be16 length, at most `limit`, and a UTF-8 text of this length in bytes.
fn text<'a>(
    reader: &mut Reader<'a>,
    limit: usize,
    what: &'static str,
) -> Result<&'a str, WireError> {
    let length = usize::from(reader.be16(what)?);
    if length > limit {
        return Err(WireError::OverLimit {
            what,
            limit: as_u64(limit),
            got: as_u64(length),
        });
    }
    reader.text(length, what)
}

/// Appends `text` in the format that [`text`] reads, cut to `limit` bytes. `limit` must fit a be16.
fn put_text(out: &mut Vec<u8>, text: &str, limit: usize) {
    let mut cut = text.len().min(limit);
    while !text.is_char_boundary(cut) {
        cut -= 1;
    }
    let length = u16::try_from(cut).unwrap_or(u16::MAX);
    out.extend_from_slice(&length.to_be_bytes());
    out.extend_from_slice(&text.as_bytes()[..usize::from(length)]);
}

#[cfg(test)]
mod tests {
    use super::*;

    /// Decodes longer and longer prefixes of the message, as they arrive on a connection.
    fn comes_piece_by_piece<T: std::fmt::Debug>(
        bytes: &[u8],
        decode: impl Fn(&[u8]) -> Result<(T, usize), WireError>,
    ) {
        let mut there = 0;
        loop {
            match decode(&bytes[..there]) {
                Ok((_, length)) => {
                    assert_eq!((length, there), (bytes.len(), bytes.len()));
                    return;
                }
                Err(WireError::Truncated { needed, .. }) => {
                    assert!(needed > 0);
                    there += needed;
                    assert!(there <= bytes.len(), "more than there is");
                }
                Err(error) => panic!("{error}"),
            }
        }
    }

    #[test]
    fn messages_are_read_as_they_were_written_and_never_past_their_end() {
        let open = Open {
            version: VERSION,
            visitor: 7,
            name: "vm.save",
        };
        let mut bytes = Vec::new();
        open.encode(&mut bytes).unwrap();
        assert_eq!(Open::decode(&bytes).unwrap().0, open);
        comes_piece_by_piece(&bytes, |bytes| Open::decode(bytes).map(|(_, n)| ((), n)));
        for reply in [
            Reply::Opened {
                length: 1 << 40,
                id: u64::MAX,
            },
            Reply::Refused {
                why: Refusal::NotNow,
                text: "later",
            },
        ] {
            bytes.clear();
            reply.encode(&mut bytes);
            assert_eq!(Reply::decode(&bytes).unwrap().0, reply);
            comes_piece_by_piece(&bytes, |bytes| Reply::decode(bytes).map(|(_, n)| ((), n)));
        }
        for answer in [Answer::Bytes(4096), Answer::Failed("an I/O error")] {
            bytes.clear();
            answer.encode(&mut bytes).unwrap();
            assert_eq!(Answer::decode(&bytes, 4096).unwrap().0, answer);
            let decode = |bytes: &[u8]| Answer::decode(bytes, 4096).map(|(_, n)| ((), n));
            comes_piece_by_piece(&bytes, decode);
        }
        let read = Read {
            position: 99,
            length: limits::FILE_READ,
        };
        assert_eq!(Read::decode(&read.encode()).unwrap(), read);
    }

    #[test]
    fn a_length_above_the_limit_is_refused_before_its_bytes_are_read() {
        let mut bytes = OPEN_MAGIC.to_vec();
        bytes.extend_from_slice(&VERSION.to_be_bytes());
        bytes.extend_from_slice(&[0; 8]);
        bytes.extend_from_slice(&[0xff, 0xff]);
        assert!(matches!(
            Open::decode(&bytes),
            Err(WireError::OverLimit { got: 0xffff, .. })
        ));
        let too_long = Read {
            position: 0,
            length: limits::FILE_READ + 1,
        };
        assert!(Read::decode(&too_long.encode()).is_err());
        let too_far = Read {
            position: u64::MAX - 1,
            length: 8,
        };
        assert!(Read::decode(&too_far.encode()).is_err());
        let mut answer = Vec::new();
        Answer::Bytes(9).encode(&mut answer).unwrap();
        assert!(Answer::decode(&answer, 8).is_err());
        assert!(
            Answer::Bytes(limits::FILE_READ + 1)
                .encode(&mut answer)
                .is_err()
        );
        let name = "n".repeat(limits::FILE_NAME + 1);
        for name in ["", name.as_str()] {
            let open = Open {
                version: VERSION,
                visitor: 0,
                name,
            };
            assert!(open.encode(&mut Vec::new()).is_err());
        }
    }

    #[test]
    fn a_reason_that_is_too_long_is_cut_between_two_characters() {
        let long = format!("x{}", "\u{fc}".repeat(limits::FILE_TEXT));
        let mut bytes = Vec::new();
        Answer::Failed(&long).encode(&mut bytes).unwrap();
        let (answer, length) = Answer::decode(&bytes, 1).unwrap();
        assert_eq!(length, bytes.len());
        assert_eq!(answer, Answer::Failed(&long[..limits::FILE_TEXT - 1]));
    }

    #[test]
    fn an_unknown_magic_version_or_code_is_named() {
        assert!(Open::decode(b"QEVM\0\0\0\x03").is_err());
        let (open, _) = Open::decode(b"HLFO\0\0\0\x09").unwrap();
        assert_eq!(open.version, 9);
        assert!(Reply::decode(b"HLFA\x09").is_err());
        assert!(Reply::decode(b"HLFO\0").is_err());
        let mut refused = b"HLFA\x01\0\x02".to_vec();
        refused.extend_from_slice(&[0xc3, 0x28]);
        assert!(matches!(
            Reply::decode(&refused),
            Err(WireError::NotUtf8 { .. })
        ));
    }
}

//! The return path: messages from the destination to the source, on the main channel's socket.
//!
//! A message consists of be16 type, be16 length and payload. Types 1 to 7 are QEMU's (`MIG_RP_MSG_*`). Types 0x4801 to 0x4804
//! are Hotlift's. Hotlift's types are sent only to a Hotlift, or to make a peer's migration fail: an unknown type ends the
//! migration of a QEMU.

use crate::handshake::{Accepted, Features, VERSION};
use crate::multifd::Method;
use crate::reader::{as_u64, put_counted_string};
use crate::settle::{GuestActivity, MigrationId};
use crate::{Reader, WireError, limits};

const SHUT: u16 = 1;
const PONG: u16 = 2;
const REQ_PAGES_ID: u16 = 3;
const REQ_PAGES: u16 = 4;
const RECV_BITMAP: u16 = 5;
const RESUME_ACK: u16 = 6;
const SWITCHOVER_ACK: u16 = 7;
const ERROR_TEXT: u16 = 0x4801;
const HELLO: u16 = 0x4802;
const LOAD: u16 = 0x4803;
const DOING: u16 = 0x4804;

/// Length of the payload of LOAD (load of the channel threads) in bytes: elapsed time, busy time, pages and time of each
/// method, and a CRC-32 of all of them.
const LOAD_LEN: usize = 16 + 16 * Method::ALL.len() + 4;

/// Length of the payload of DOING (state of the guest) in bytes: the code of a [`GuestActivity`] and its CRC-32. The checksum
/// is needed because the code decides if an operator must intervene.
const DOING_LEN: usize = 5;

/// Length of the payload of HELLO (identifies a Hotlift) in bytes: version, features, migration id, and a CRC-32 of all of
/// them. With a damaged id a source could not query the outcome of the migration.
const HELLO_LEN: usize = 28;
/// Length in bytes of HELLO's first field, the version, which HELLO has in every version.
const HELLO_VERSION_LEN: usize = 4;

/// One message of the return path.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub enum ReturnMessage<'a> {
    /// SHUT: the destination has finished. 0 if the guest was loaded, any other value if not.
    Shut(u32),
    /// PONG: answers the PING with the same value. Answers may arrive in another order than the PINGs.
    Pong(u32),
    /// Postcopy: requests pages of the RAM block `block`. Later [`ReturnMessage::ReqPages`] refer to the same block.
    ReqPagesId {
        /// Byte offset in the block.
        start: u64,
        /// Length in bytes.
        length: u32,
        /// RAM block.
        block: &'a str,
    },
    /// Postcopy: requests pages of the RAM block that the last [`ReturnMessage::ReqPagesId`] named.
    ReqPages {
        /// Byte offset in the block.
        start: u64,
        /// Length in bytes.
        length: u32,
    },
    /// Postcopy recovery: announces the bitmap of received pages of `block`. After this message follow be64 size, the bitmap,
    /// and be64 0x0123456789abcdef.
    RecvBitmap {
        /// RAM block.
        block: &'a str,
    },
    /// Postcopy recovery: the value is 1 if the destination is ready to continue.
    ResumeAck(u32),
    /// The destination is ready for the switchover (capability `switchover-ack`).
    SwitchoverAck,
    /// Hotlift: reason of the failure, sent before a SHUT other than 0. At most [`limits::ERROR_TEXT`] bytes.
    ErrorText(&'a str),
    /// Hotlift: identifies the destination as a Hotlift.
    Hello {
        /// Version of the destination's protocol.
        version: u32,
        /// The other fields; `None` if the destination does not have this [`VERSION`], and their format is unknown.
        accepted: Option<Accepted>,
    },
    /// Hotlift: load of the destination's channel threads. Sent only to a source whose packets each name their method (method
    /// auto).
    Load(Load),
    /// Hotlift: state of the guest at the destination. Sent before SHUT(0), only if the source offers to accept it.
    GuestActivity(GuestActivity),
}

/// Load of a destination's channel threads since the start of the migration.
#[derive(Debug, Clone, Copy, Default, PartialEq, Eq)]
pub struct Load {
    /// Elapsed time in ns, summed over the threads.
    pub elapsed: u64,
    /// Part of `elapsed` in which the threads did not wait for the source's data, in ns.
    pub busy: u64,
    /// Costs of the methods, in the order of [`Method::ALL`].
    pub methods: [MethodLoad; Method::ALL.len()],
}

/// Cost of receiving packets of one method.
#[derive(Debug, Clone, Copy, Default, PartialEq, Eq)]
pub struct MethodLoad {
    /// Number of pages with content.
    pub pages: u64,
    /// CPU time to read and decode the pages, in ns.
    pub nanos: u64,
}

impl<'a> ReturnMessage<'a> {
    /// Returns RAM block, offset and length of a page request; `None` for other messages. The block is `None` if the request is
    /// for the same block as the previous request.
    #[must_use]
    pub fn requested_pages(&self) -> Option<(Option<&'a str>, u64, u32)> {
        match *self {
            Self::ReqPagesId {
                start,
                length,
                block,
            } => Some((Some(block), start, length)),
            Self::ReqPages { start, length } => Some((None, start, length)),
            _ => None,
        }
    }

    /// Appends the encoded message to `out`. An error text that is too long is cut at a character boundary.
    ///
    /// # Errors
    ///
    /// If a block name is empty or longer than 255 bytes. `out` is then unchanged.
    pub fn encode(&self, out: &mut Vec<u8>) -> Result<(), WireError> {
        let start = out.len();
        out.extend_from_slice(&self.kind().to_be_bytes());
        out.extend_from_slice(&[0, 0]);
        let body = out.len();
        if let Err(error) = self.put_payload(out) {
            out.truncate(start);
            return Err(error);
        }
        // The longest payloads are REQ_PAGES_ID with a name of 255 bytes, 268 bytes, and an error text, 500 bytes.
        let length = u16::try_from(out.len() - body).unwrap_or(u16::MAX);
        out[body - 2..body].copy_from_slice(&length.to_be_bytes());
        Ok(())
    }

    /// Decodes the message at the start of `input`. Returns the message and its length in bytes.
    ///
    /// [`WireError::Truncated`] contains the number of bytes to read next. A caller that reads exactly this number never reads
    /// a byte after the message.
    pub fn decode(input: &'a [u8]) -> Result<(Self, usize), WireError> {
        let mut reader = Reader::new(input);
        let kind = reader.be16("return path message")?;
        let length = usize::from(reader.be16("return path message")?);
        if length > limits::RETURN_PATH_PAYLOAD {
            return Err(WireError::OverLimit {
                what: "length of a return path message",
                limit: as_u64(limits::RETURN_PATH_PAYLOAD),
                got: as_u64(length),
            });
        }
        check_length(kind, length)?;
        let payload = reader.take(length, "return path message")?;
        Ok((Self::read_payload(kind, payload)?, reader.position()))
    }

    fn kind(&self) -> u16 {
        match self {
            Self::Shut(_) => SHUT,
            Self::Pong(_) => PONG,
            Self::ReqPagesId { .. } => REQ_PAGES_ID,
            Self::ReqPages { .. } => REQ_PAGES,
            Self::RecvBitmap { .. } => RECV_BITMAP,
            Self::ResumeAck(_) => RESUME_ACK,
            Self::SwitchoverAck => SWITCHOVER_ACK,
            Self::ErrorText(_) => ERROR_TEXT,
            Self::Hello { .. } => HELLO,
            Self::Load(_) => LOAD,
            Self::GuestActivity(_) => DOING,
        }
    }

    fn put_payload(&self, out: &mut Vec<u8>) -> Result<(), WireError> {
        match *self {
            Self::Shut(value) | Self::Pong(value) | Self::ResumeAck(value) => {
                out.extend_from_slice(&value.to_be_bytes());
            }
            Self::Hello { version, accepted } => {
                let start = out.len();
                out.extend_from_slice(&version.to_be_bytes());
                if let Some(Accepted { features, id }) = accepted {
                    out.extend_from_slice(&features.bits().to_be_bytes());
                    out.extend_from_slice(&id.0);
                    let crc = crc32fast::hash(&out[start..]);
                    out.extend_from_slice(&crc.to_be_bytes());
                }
            }
            Self::Load(load) => {
                let start = out.len();
                let rows = load.methods.iter().flat_map(|row| [row.pages, row.nanos]);
                for value in [load.elapsed, load.busy].into_iter().chain(rows) {
                    out.extend_from_slice(&value.to_be_bytes());
                }
                let crc = crc32fast::hash(&out[start..]);
                out.extend_from_slice(&crc.to_be_bytes());
            }
            Self::GuestActivity(doing) => {
                let code = [doing as u8];
                out.extend_from_slice(&code);
                out.extend_from_slice(&crc32fast::hash(&code).to_be_bytes());
            }
            Self::ReqPagesId {
                start,
                length,
                block,
            } => {
                out.extend_from_slice(&start.to_be_bytes());
                out.extend_from_slice(&length.to_be_bytes());
                put_counted_string(out, block, "RAM block name of a page request")?;
            }
            Self::ReqPages { start, length } => {
                out.extend_from_slice(&start.to_be_bytes());
                out.extend_from_slice(&length.to_be_bytes());
            }
            Self::RecvBitmap { block } => {
                put_counted_string(out, block, "RAM block name of a received bitmap")?;
            }
            Self::SwitchoverAck => {}
            Self::ErrorText(text) => {
                let mut cut = text.len().min(limits::ERROR_TEXT);
                while !text.is_char_boundary(cut) {
                    cut -= 1;
                }
                out.extend_from_slice(&text.as_bytes()[..cut]);
            }
        }
        Ok(())
    }

    fn read_payload(kind: u16, payload: &'a [u8]) -> Result<Self, WireError> {
        // The payload is complete. If it is too short for its fields, more input does not help.
        let short = |error| match error {
            WireError::Truncated { what, .. } => WireError::Mismatch {
                what,
                expected: as_u64(payload.len()) + 1,
                got: as_u64(payload.len()),
            },
            other => other,
        };
        let mut reader = Reader::new(payload);
        let message = match kind {
            SHUT => Self::Shut(reader.be32("SHUT")?),
            PONG => Self::Pong(reader.be32("PONG")?),
            REQ_PAGES_ID => Self::ReqPagesId {
                start: reader.be64("length of REQ_PAGES_ID").map_err(short)?,
                length: reader.be32("length of REQ_PAGES_ID").map_err(short)?,
                block: reader
                    .counted_string("length of REQ_PAGES_ID")
                    .map_err(short)?,
            },
            REQ_PAGES => Self::ReqPages {
                start: reader.be64("REQ_PAGES")?,
                length: reader.be32("REQ_PAGES")?,
            },
            RECV_BITMAP => Self::RecvBitmap {
                block: reader
                    .counted_string("length of RECV_BITMAP")
                    .map_err(short)?,
            },
            RESUME_ACK => Self::ResumeAck(reader.be32("RESUME_ACK")?),
            SWITCHOVER_ACK => Self::SwitchoverAck,
            LOAD => {
                let mut load = Load {
                    elapsed: reader.be64("LOAD").map_err(short)?,
                    busy: reader.be64("LOAD").map_err(short)?,
                    ..Load::default()
                };
                for row in &mut load.methods {
                    row.pages = reader.be64("LOAD").map_err(short)?;
                    row.nanos = reader.be64("LOAD").map_err(short)?;
                }
                let expected = reader.be32("LOAD").map_err(short)?;
                let got = crc32fast::hash(&payload[..LOAD_LEN - 4]);
                WireError::check_crc("LOAD", expected, got)?;
                Self::Load(load)
            }
            DOING => {
                let code = reader.u8("DOING")?;
                let expected = reader.be32("DOING").map_err(short)?;
                WireError::check_crc("DOING", expected, crc32fast::hash(&[code]))?;
                Self::GuestActivity(GuestActivity::of_code(code).ok_or(WireError::Unknown {
                    what: "state of a guest",
                    got: code.into(),
                })?)
            }
            ERROR_TEXT => Self::ErrorText(reader.text(payload.len(), "ERROR_TEXT")?),
            HELLO => {
                let version = reader.be32("HELLO")?;
                if version != u32::from(VERSION) {
                    return Ok(Self::Hello {
                        version,
                        accepted: None,
                    });
                }
                let features = Features::from_bits_retain(reader.be32("HELLO").map_err(short)?);
                let id = MigrationId(*reader.array("HELLO").map_err(short)?);
                let expected = reader.be32("HELLO").map_err(short)?;
                let got = crc32fast::hash(&payload[..HELLO_LEN - 4]);
                WireError::check_crc("HELLO", expected, got)?;
                Self::Hello {
                    version,
                    accepted: Some(Accepted { features, id }),
                }
            }
            _ => return Err(unknown(kind)),
        };
        reader.finish("return path message")?;
        Ok(message)
    }
}

/// Fails if `length` is invalid for a message of type `kind`. Called before the payload has arrived.
fn check_length(kind: u16, length: usize) -> Result<(), WireError> {
    let (what, expected) = match kind {
        SHUT => ("length of SHUT", 4),
        PONG => ("length of PONG", 4),
        REQ_PAGES => ("length of REQ_PAGES", 12),
        RESUME_ACK => ("length of RESUME_ACK", 4),
        SWITCHOVER_ACK => ("length of SWITCHOVER_ACK", 0),
        LOAD => ("length of LOAD", LOAD_LEN),
        DOING => ("length of DOING", DOING_LEN),
        HELLO if length >= HELLO_VERSION_LEN => return Ok(()),
        HELLO => ("length of HELLO", HELLO_LEN),
        REQ_PAGES_ID | RECV_BITMAP => return Ok(()),
        ERROR_TEXT if length <= limits::ERROR_TEXT => return Ok(()),
        ERROR_TEXT => {
            return Err(WireError::OverLimit {
                what: "length of ERROR_TEXT",
                limit: as_u64(limits::ERROR_TEXT),
                got: as_u64(length),
            });
        }
        _ => return Err(unknown(kind)),
    };
    if length == expected {
        return Ok(());
    }
    Err(WireError::Mismatch {
        what,
        expected: as_u64(expected),
        got: as_u64(length),
    })
}

fn unknown(kind: u16) -> WireError {
    WireError::Unknown {
        what: "return path message type",
        got: u64::from(kind),
    }
}

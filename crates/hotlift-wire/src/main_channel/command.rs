//! Commands on the main channel: be16 id, be16 payload length, payload; no footer.

use super::section::COMMAND;
use crate::{Reader, WireError};

const OPEN_RETURN_PATH: u16 = 1;
pub(super) const PING: u16 = 2;
const POSTCOPY_ADVISE: u16 = 3;
pub(super) const POSTCOPY_LISTEN: u16 = 4;
pub(super) const POSTCOPY_RUN: u16 = 5;
pub(super) const POSTCOPY_RAM_DISCARD: u16 = 6;
pub(super) const PACKAGED: u16 = 7;
pub(super) const POSTCOPY_RESUME: u16 = 9;
pub(super) const RECV_BITMAP: u16 = 10;
const SWITCHOVER_START: u16 = 11;

/// A command of a precopy stream (`MIG_CMD_*`).
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub enum Command {
    /// OPEN_RETURN_PATH: from now on the destination may send on the return path.
    OpenReturnPath,
    /// PING: the destination must answer with a PONG of the same value.
    Ping(u32),
    /// POSTCOPY_ADVISE: a postcopy may follow (capability `postcopy-ram` is on).
    PostcopyAdvise {
        /// Bitwise OR of the host page sizes of all RAM blocks, and page size of the target, both in bytes. `None` if postcopy
        /// is only possible for dirty bitmaps.
        page_sizes: Option<(u64, u64)>,
    },
    /// SWITCHOVER_START: the source has stopped its vCPUs, and sends the rest (QEMU 10.0, machine types from 10.0).
    SwitchoverStart,
}

impl Command {
    /// Appends the encoded command with its section type byte to `out`.
    pub fn encode(&self, out: &mut Vec<u8>) {
        out.push(COMMAND);
        let mut put = |id: u16, length: u16| {
            out.extend_from_slice(&id.to_be_bytes());
            out.extend_from_slice(&length.to_be_bytes());
        };
        match *self {
            Self::OpenReturnPath => put(OPEN_RETURN_PATH, 0),
            Self::Ping(value) => {
                put(PING, 4);
                out.extend_from_slice(&value.to_be_bytes());
            }
            Self::PostcopyAdvise { page_sizes: None } => put(POSTCOPY_ADVISE, 0),
            Self::PostcopyAdvise {
                page_sizes: Some((host, target)),
            } => {
                put(POSTCOPY_ADVISE, 16);
                out.extend_from_slice(&host.to_be_bytes());
                out.extend_from_slice(&target.to_be_bytes());
            }
            Self::SwitchoverStart => put(SWITCHOVER_START, 0),
        }
    }

    /// Decodes a command, whose section type byte was already read.
    ///
    /// # Errors
    ///
    /// - [`WireError::Unsupported`] for commands that are not part of precopy.
    /// - [`WireError::Unknown`] for ids that QEMU does not define.
    /// - [`WireError::Mismatch`] for a wrong length of the payload.
    pub fn decode(reader: &mut Reader<'_>) -> Result<Self, WireError> {
        let id = reader.be16("command")?;
        let length = reader.be16("length of a command")?;
        let fixed = |expected: u16| {
            if length == expected {
                return Ok(());
            }
            Err(WireError::Mismatch {
                what: "length of a command",
                expected: u64::from(expected),
                got: u64::from(length),
            })
        };
        let unsupported = |what| Err(WireError::Unsupported { what });
        match id {
            OPEN_RETURN_PATH => fixed(0).map(|()| Self::OpenReturnPath),
            PING => {
                fixed(4)?;
                Ok(Self::Ping(reader.be32("PING")?))
            }
            POSTCOPY_ADVISE if length == 0 => Ok(Self::PostcopyAdvise { page_sizes: None }),
            POSTCOPY_ADVISE => {
                fixed(16)?;
                let host = reader.be64("POSTCOPY_ADVISE")?;
                let target = reader.be64("POSTCOPY_ADVISE")?;
                Ok(Self::PostcopyAdvise {
                    page_sizes: Some((host, target)),
                })
            }
            SWITCHOVER_START => fixed(0).map(|()| Self::SwitchoverStart),
            POSTCOPY_LISTEN => unsupported("command POSTCOPY_LISTEN"),
            POSTCOPY_RUN => unsupported("command POSTCOPY_RUN"),
            POSTCOPY_RAM_DISCARD => unsupported("command POSTCOPY_RAM_DISCARD"),
            PACKAGED => unsupported("command PACKAGED"),
            8 => unsupported("command ENABLE_COLO"),
            POSTCOPY_RESUME => unsupported("command POSTCOPY_RESUME"),
            RECV_BITMAP => unsupported("command RECV_BITMAP"),
            _ => Err(WireError::Unknown {
                what: "command",
                got: u64::from(id),
            }),
        }
    }
}

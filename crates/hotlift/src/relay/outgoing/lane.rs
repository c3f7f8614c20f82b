//! Where a channel's bytes go: a socket, or a save file.

use std::net::Shutdown;
use std::os::fd::AsFd;
use std::sync::Arc;

use hotlift_mem::sock::{self, IoScratch};

use crate::error::{Channel, MigrationError};
use crate::relay::file::ContainerWriter;
use crate::transport::Stream;

#[derive(Debug)]
pub(super) enum Lane {
    Socket(Stream),
    File(Arc<ContainerWriter>),
}

impl Lane {
    /// Sends `parts`, one after the other, as what `channel` has to say.
    pub(super) fn send(
        &self,
        channel: Channel,
        parts: &[&[u8]],
        scratch: &mut IoScratch,
    ) -> Result<(), MigrationError> {
        match self {
            Self::Socket(stream) => {
                sock::send_parts(stream.as_fd(), parts, scratch).map_err(|source| {
                    MigrationError::Connection {
                        channel,
                        doing: "sending to the destination",
                        source,
                    }
                })
            }
            Self::File(file) => {
                let number = match channel {
                    Channel::Main => 0,
                    Channel::Multifd(id) => 1 + u16::from(id),
                };
                Ok(file.append(number, false, parts)?)
            }
        }
    }
}

impl Lane {
    /// Ends one or both directions; nothing is left of a file.
    pub(super) fn shut_down(&self, how: Shutdown) {
        match self {
            Self::Socket(stream) => stream.shutdown(how),
            Self::File(file) => file.abort(),
        }
    }

    /// The socket, if it is one.
    pub(super) fn socket(&self) -> Option<&Stream> {
        match self {
            Self::Socket(stream) => Some(stream),
            Self::File(_) => None,
        }
    }
}

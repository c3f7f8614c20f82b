//! Where a channel's bytes go: a socket, or a save file.

use std::net::Shutdown;
use std::os::fd::AsFd;
use std::sync::Arc;

use hotlift_mem::GuestRun;
use hotlift_mem::sock::{IoScratch, Splicer};

use crate::ends::file::ContainerWriter;
use crate::error::{Channel, MigrationError};
use crate::transport::Stream;

/// The outgoing end of a channel.
#[derive(Debug)]
pub(crate) enum ChannelOut {
    Socket(Stream),
    File(Arc<ContainerWriter>),
}

impl ChannelOut {
    /// Sends `parts`, one after the other, as what `channel` has to say.
    pub(crate) fn send(
        &self,
        channel: Channel,
        parts: &[&[u8]],
        scratch: &mut IoScratch,
    ) -> Result<(), MigrationError> {
        match self {
            Self::Socket(stream) => stream
                .send_parts(parts, scratch)
                .map_err(|source| broken(channel, source)),
            Self::File(file) => {
                let number = match channel {
                    Channel::Main => 0,
                    Channel::Multifd(id) => 1 + u16::from(id),
                };
                Ok(file.append(number, false, parts)?)
            }
        }
    }

    /// Ends one or both directions; nothing is left of a file.
    pub(crate) fn shut_down(&self, how: Shutdown) {
        match self {
            Self::Socket(stream) => stream.shutdown(how),
            Self::File(file) => file.abort(),
        }
    }

    /// The socket, if it is one.
    pub(crate) fn socket(&self) -> Option<&Stream> {
        match self {
            Self::Socket(stream) => Some(stream),
            Self::File(_) => None,
        }
    }
}

/// Sends `head` and guest memory behind it to a socket; by reference with a `splicer`.
pub(super) fn send_guest_memory(
    stream: &Stream,
    channel: Channel,
    head: &[u8],
    runs: &[GuestRun<'_>],
    splicer: Option<&mut Splicer>,
    scratch: &mut IoScratch,
) -> Result<(), MigrationError> {
    match splicer {
        Some(splicer) => splicer.send(stream.as_fd(), head, runs),
        None => stream.send_guest_memory(head, runs, scratch),
    }
    .map_err(|source| broken(channel, source))
}

fn broken(channel: Channel, source: std::io::Error) -> MigrationError {
    MigrationError::Connection {
        channel,
        doing: "sending to the destination",
        source,
    }
}

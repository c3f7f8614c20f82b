//! Writes a channel's bytes to its socket.

use std::os::fd::AsFd;

use hotlift_mem::GuestRun;
use hotlift_mem::Splicer;
use hotlift_mem::sock::IoScratch;
use hotlift_net::transport::Stream;

use crate::error::{Channel, MigrationError};

/// Sends `parts` one after another. An error names the channel `channel`.
pub(super) fn send(
    stream: &Stream,
    channel: Channel,
    parts: &[&[u8]],
    scratch: &mut IoScratch,
) -> Result<(), MigrationError> {
    stream
        .send_parts(parts, scratch)
        .map_err(|source| broken(channel, source))
}

/// Sends `head` and then guest memory to a socket. With a `splicer`, sends guest memory by reference, without a copy.
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

//! An admitted connection and its classification.

use std::io::Read;
use std::os::fd::{AsFd, BorrowedFd};
use std::time::Instant;

use hotlift_wire::multifd::INITIAL_PACKET_LEN;
use hotlift_wire::settle::TOKEN_LEN;

use super::connection_class::{BROKEN, ConnectionClass, peek_class};
use crate::transport::Stream;

/// An accepted connection. With TLS, its handshake is complete. The listener that reads the first bytes classifies the
/// connection once.
#[derive(Debug)]
pub struct Admitted {
    /// The connection.
    pub stream: Stream,
    /// Time at which the current listener accepted the connection.
    pub since: Instant,
    pub(crate) head: ConnectionClass,
    /// True if the peer has presented the token of this migration (see [`ConnectionToken`](super::ConnectionToken)).
    pub has_passed: bool,
}

impl Admitted {
    /// Creates an unclassified connection.
    #[must_use]
    pub fn new(stream: Stream, since: Instant) -> Self {
        Self {
            stream,
            since,
            head: ConnectionClass::Partial,
            has_passed: false,
        }
    }

    /// Creates a connection whose class `head` is already known.
    #[must_use]
    pub fn seen(stream: Stream, since: Instant, head: ConnectionClass) -> Self {
        Self {
            head,
            ..Self::new(stream, since)
        }
    }

    /// Classifies the connection by the bytes that have arrived. Peeks at the bytes, and stops once the class is known.
    pub fn classify(&mut self) -> ConnectionClass {
        match self.head {
            ConnectionClass::Partial => self.head = peek_class(&self.stream),
            // After a reset the peeked bytes are lost.
            _ if self.stream.is_reset() => self.head = ConnectionClass::Gone(BROKEN),
            _ => {}
        }
        self.head
    }

    /// Returns the class that the last [`Self::classify`] found.
    #[must_use]
    pub fn head(&self) -> ConnectionClass {
        self.head
    }

    /// Consumes the presented token ([`ConnectionToken::is_presented_by`](super::ConnectionToken::is_presented_by)) and sets
    /// [`Self::has_passed`]. The bytes after the token determine the class from now on. Returns false if the connection is
    /// broken.
    pub fn consume_token(&mut self) -> bool {
        self.head = ConnectionClass::Partial;
        self.has_passed = self.take_token();
        self.has_passed
    }

    /// Consumes the connection's token. Returns false if the connection is broken.
    pub fn take_token(&self) -> bool {
        self.take([0; TOKEN_LEN])
    }

    /// Consumes the opening packet of a multifd channel. Returns false if the connection is broken.
    pub fn take_opening(&self) -> bool {
        self.take([0; INITIAL_PACKET_LEN])
    }

    fn take<const LENGTH: usize>(&self, mut bytes: [u8; LENGTH]) -> bool {
        (&self.stream).read_exact(&mut bytes).is_ok()
    }
}

impl AsFd for Admitted {
    fn as_fd(&self) -> BorrowedFd<'_> {
        self.stream.as_fd()
    }
}

//! A connection that was let in, with all that is known of it.

use std::io::Read;
use std::os::fd::{AsFd, BorrowedFd};
use std::time::Instant;

use hotlift_wire::multifd::INITIAL_PACKET_LEN;
use hotlift_wire::settle::TOKEN_LEN;

use super::head::{BROKEN, Head, peek_head};
use crate::transport::Stream;

/// A connection that was accepted; with TLS, after its handshake. It is classified once, by the first door that sees its first
/// bytes.
#[derive(Debug)]
pub struct Admitted {
    /// The connection.
    pub stream: Stream,
    /// When it was accepted by the door that it waits at.
    pub since: Instant,
    pub(crate) head: Head,
    /// It has shown the pass of the migration that it was handed to.
    pub has_passed: bool,
}

impl Admitted {
    /// One of which no byte was read.
    #[must_use]
    pub fn new(stream: Stream, since: Instant) -> Self {
        Self {
            stream,
            since,
            head: Head::Partial,
            has_passed: false,
        }
    }

    /// The same whose first bytes were seen already.
    #[must_use]
    pub fn seen(stream: Stream, since: Instant, head: Head) -> Self {
        Self {
            head,
            ..Self::new(stream, since)
        }
    }

    /// Returns the meaning of its first bytes, as far as they have come. They are read only while it is not known.
    pub fn look(&mut self) -> Head {
        match self.head {
            Head::Partial => self.head = peek_head(&self.stream),
            // A reset loses what was seen.
            _ if self.stream.is_reset() => self.head = Head::Gone(BROKEN),
            _ => {}
        }
        self.head
    }

    /// Returns the meaning of its first bytes at the last look.
    #[must_use]
    pub fn head(&self) -> Head {
        self.head
    }

    /// Takes the token off that it has shown ([`Pass::is_shown_by`](super::Pass::is_shown_by)), and lets it pass; false if
    /// it has broken.
    pub fn let_pass(&mut self) -> bool {
        self.head = Head::Partial;
        self.has_passed = self.take_token();
        self.has_passed
    }

    /// Takes the token off that it begins with; false if it has broken.
    pub fn take_token(&self) -> bool {
        self.take([0; TOKEN_LEN])
    }

    /// Takes a channel's opening off; false if it has broken.
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

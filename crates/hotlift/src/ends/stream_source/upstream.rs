//! The source of a relay: its connections, the answers to it, and its close.

use std::time::Duration;

use crate::ends::stream_source::candidates::Candidates;
use crate::ends::stream_source::pending_requests::PendingRequests;
use crate::error::{Channel, MigrationError};
use crate::pipe::stream_in::StreamIn;
use crate::stream::graceful_close;

/// Time that a source may leave answers unread before its connection is cut.
const ANSWERING: Duration = Duration::from_secs(5);

/// The source of a relay.
pub(crate) struct Upstream {
    pub source: StreamIn,
    /// The source is a guest of a Hotlift, which is saved.
    pub is_guest: bool,
    /// The source accepts messages about the guest's state at the destination.
    pub takes_activity: bool,
    /// The source reads answers.
    pub return_path: bool,
    /// Pages that the peer has requested in postcopy.
    pub pending_requests: PendingRequests,
    /// Connections that may be a QEMU's preempt channel, on which it sends requested pages.
    pub preempt: Candidates,
}

impl Upstream {
    pub(crate) fn new(
        source: StreamIn,
        (is_guest, takes_activity, return_path): (bool, bool, bool),
        pending_requests: PendingRequests,
    ) -> Self {
        // Ignored: a socket that rejects the timeout is closed.
        let _ = source.main.set_write_timeout(ANSWERING);
        Self {
            source,
            is_guest,
            takes_activity,
            return_path,
            pending_requests,
            preempt: Candidates::default(),
        }
    }

    /// Sends answers, if the source reads any. Errors are ignored: the reader of the connection detects the loss of the source.
    pub(crate) fn answer(&self, bytes: &[u8]) {
        let _ = self.answer_or_fail(bytes);
    }

    /// Sends answers like [`Upstream::answer`], but reports errors.
    ///
    /// # Errors
    /// [`MigrationError::Connection`] if the source is gone, or reads nothing.
    pub(crate) fn answer_or_fail(&self, bytes: &[u8]) -> Result<(), MigrationError> {
        if !self.return_path {
            return Ok(());
        }
        let answered = self.source.answer_or_cut(bytes);
        answered.map_err(|source| MigrationError::Connection {
            channel: Channel::Main,
            doing: "answering the source",
            source,
        })
    }

    /// Unblocks the threads that read multifd channels or a preempt channel.
    pub(crate) fn shut_channels(&self) {
        self.preempt.end();
        self.source.shut_channels();
    }

    pub(crate) fn shut_down(&self) {
        self.source.main.cut();
        self.shut_channels();
    }

    /// Closes all connections. The last messages on main still arrive if the source reads answers.
    pub(crate) fn close(&self) {
        self.shut_channels();
        match self.return_path {
            true => graceful_close::close(&[&self.source.main]),
            // A source that reads no answers gets no message. It must not believe that its further writes arrive.
            false => self.shut_down(),
        }
    }
}

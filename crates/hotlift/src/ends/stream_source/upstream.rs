//! The source of a relay: its connections, what answers go to, and what is closed in the end.

use std::time::Duration;

use crate::ends::stream_source::candidates::Candidates;
use crate::ends::stream_source::demand::Demand;
use crate::error::{Channel, MigrationError};
use crate::pipe::stream_in::StreamIn;
use crate::stream::graceful_close;

/// How long a source may leave answers unread before it is given up.
const ANSWERING: Duration = Duration::from_secs(5);

/// The source of a relay.
pub(crate) struct Upstream {
    pub source: StreamIn,
    /// It is a guest of a Hotlift's, which is saved.
    pub is_guest: bool,
    /// It takes what the guest does on the other side.
    pub takes_doing: bool,
    /// The source takes answers.
    pub return_path: bool,
    /// What the other side has asked for in postcopy.
    pub demand: Demand,
    /// Where a QEMU may send that.
    pub preempt: Candidates,
}

impl Upstream {
    pub(crate) fn new(
        source: StreamIn,
        (is_guest, takes_doing, return_path): (bool, bool, bool),
        demand: Demand,
    ) -> Self {
        // A socket that refuses the time-out is one that has gone.
        let _ = source.main.set_write_timeout(ANSWERING);
        Self {
            source,
            is_guest,
            takes_doing,
            return_path,
            demand,
            preempt: Candidates::default(),
        }
    }

    /// Sends answers, if the source takes any. One that has gone cannot be told; its going is noticed
    /// where it is read from.
    pub(crate) fn answer(&self, bytes: &[u8]) {
        let _ = self.answer_surely(bytes);
    }

    /// The same, where it matters.
    ///
    /// # Errors
    /// [`MigrationError::Connection`] if the source has gone, or reads nothing.
    pub(crate) fn answer_surely(&self, bytes: &[u8]) -> Result<(), MigrationError> {
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

    /// Frees the threads that read multifd channels, or a preempt channel.
    pub(crate) fn shut_channels(&self) {
        self.preempt.end();
        self.source.shut_channels();
    }

    pub(crate) fn shut_down(&self) {
        self.source.main.cut();
        self.shut_channels();
    }

    /// Closes all connections, main so that what was said on it last arrives.
    pub(crate) fn close(&self) {
        self.shut_channels();
        match self.return_path {
            true => graceful_close::close(&[&self.source.main]),
            // It hears nothing, and what it writes on must not look taken.
            false => self.shut_down(),
        }
    }
}

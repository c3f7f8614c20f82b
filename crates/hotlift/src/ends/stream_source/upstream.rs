//! The source's channels, as what answers go to, and what is closed in the end.

use std::io::Write;
use std::net::Shutdown;
use std::sync::{Mutex, PoisonError};
use std::time::Duration;

use crate::ends::stream_source::candidates::Candidates;
use crate::ends::stream_source::postcopy::Demand;
use crate::error::{Channel, MigrationError};
use crate::stream::graceful_close;
use crate::transport::Stream;

/// How long a source may leave answers unread before it is given up.
const ANSWERING: Duration = Duration::from_secs(5);

/// The source's channels.
pub(crate) struct Upstream {
    pub main: Stream,
    /// By channel id.
    pub multifd: Vec<Stream>,
    /// The source is a Hotlift: a relay, or a guest.
    pub is_relay: bool,
    /// It is a guest, which is saved.
    pub is_guest: bool,
    /// It takes what the guest does on the other side.
    pub takes_doing: bool,
    /// It chooses the method of each packet.
    pub method_by_packet: bool,
    /// The source takes answers.
    pub return_path: bool,
    /// What the other side has asked for in postcopy.
    pub demand: Demand,
    /// Where a QEMU may send that.
    pub preempt: Candidates,
    /// Keeps answers of different threads apart.
    answering: Mutex<()>,
}

impl Upstream {
    pub(crate) fn new(
        main: Stream,
        multifd: Vec<Stream>,
        (is_relay, is_guest, takes_doing, method_by_packet): (bool, bool, bool, bool),
        return_path: bool,
        demand: Demand,
    ) -> Self {
        // A socket that refuses the time-out is one that has gone.
        let _ = main.set_write_timeout(ANSWERING);
        Self {
            main,
            multifd,
            is_relay,
            is_guest,
            takes_doing,
            method_by_packet,
            return_path,
            demand,
            preempt: Candidates::default(),
            answering: Mutex::new(()),
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
        let mut main = &self.main;
        let _one = self
            .answering
            .lock()
            .unwrap_or_else(PoisonError::into_inner);
        main.write_all(bytes).map_err(|source| {
            // A part of a message may be on its way: nothing can follow it.
            self.main.cut();
            MigrationError::Connection {
                channel: Channel::Main,
                doing: "answering the source",
                source,
            }
        })
    }

    /// Whether the source has closed its main channel.
    pub(crate) fn is_closed(&self) -> bool {
        self.main.is_hung_up()
    }

    /// All connections but a preempt channel's, the main channel first.
    pub(crate) fn streams(&self) -> impl Iterator<Item = &Stream> {
        std::iter::once(&self.main).chain(&self.multifd)
    }

    /// Frees the threads that read multifd channels, or a preempt channel.
    pub(crate) fn shut_channels(&self) {
        self.preempt.end();
        for channel in &self.multifd {
            channel.shutdown(Shutdown::Both);
        }
    }

    pub(crate) fn shut_down(&self) {
        self.main.cut();
        self.shut_channels();
    }

    /// Closes all connections, main so that what was said on it last arrives.
    pub(crate) fn close(&self) {
        self.shut_channels();
        match self.return_path {
            true => graceful_close::close(&[&self.main]),
            // It hears nothing, and what it writes on must not look taken.
            false => self.shut_down(),
        }
    }
}

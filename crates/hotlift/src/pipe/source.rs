//! Interface of the incoming sides; each kind has its own file.
//!
//! | file | source |
//! |---|---|
//! | `stream_source/receive` | the multifd channels of a stream, each with a thread |
//! | `guest_sink/source` | the same for a guest's destination, which puts pages into guest memory |
//! | `file/source` | a file, read from any place |
//! | `guest_source` | the guest of this process, whose threads send pages directly |
//!
//! Its threads fill batches, and pause at the session's barrier when the main thread requires it. The main thread handles all
//! other data: `main_reader` and `device_state` read it from a stream, `restore` from a file.

use std::time::Instant;

use hotlift_net::admission::Admitted;
use hotlift_net::transport::Stream;
use hotlift_wire::return_path::ReturnMessage;

use crate::error::{Channel, MigrationError};
use crate::pipe::session::Session;
use crate::stream::accept_loop::AcceptLoop;

/// Incoming side of a migration.
pub(crate) trait Source: Sync {
    /// Returns the count of threads that fill batches, or place pages; may be 0.
    fn readers(&self) -> usize;

    /// Returns the name of `reader`'s thread for the accounting of its CPU time.
    fn thread_name(&self, reader: usize) -> String;

    /// Returns the name of a thread that is not a reader.
    fn name(&self, thread: &str) -> String {
        format!("relay/{thread}")
    }

    /// Returns the name of a thread that writes batches.
    fn worker_name(&self, worker: usize) -> String {
        format!("relay/send_{worker}")
    }

    /// Fills batches, or sends pages, until the pages of `reader`, from 0, have ended. Runs in its own thread.
    ///
    /// # Errors
    /// Invalid pages, or an error of the source.
    fn read(&self, session: &Session<'_>, reader: usize) -> Result<(), MigrationError>;

    /// Takes an answer of the destination that is meant for a source, and its bytes.
    ///
    /// # Errors
    /// The reason why the answer is invalid: nothing more is read on this connection.
    fn answer(
        &self,
        session: &Session<'_>,
        channel: Channel,
        message: &ReturnMessage<'_>,
        bytes: &[u8],
    ) -> Result<(), MigrationError> {
        let _ = (session, channel, message, bytes);
        Ok(())
    }

    /// Reports that a connection to the destination has ended early, or has brought invalid data.
    fn lost(&self, session: &Session<'_>, channel: Channel, error: MigrationError) {
        let _ = channel;
        session.fail(error);
    }

    /// Checks at `now` for events that end no wait. Returns the time of the next call.
    fn poll(&self, session: &Session<'_>, now: Instant) -> Option<Instant> {
        let _ = (session, now);
        None
    }

    /// Takes further connections of the migration from the arrivals at `accept_loop`.
    fn accept_late(
        &self,
        session: &Session<'_>,
        accept_loop: &mut AcceptLoop<'_>,
        arrivals: &mut Vec<Admitted>,
    ) {
        let _ = (session, accept_loop, arrivals);
    }

    /// Answers queries at `accept_loop` until the source knows the outcome.
    fn linger(&self, session: &Session<'_>, accept_loop: &mut AcceptLoop<'_>) {
        let _ = (session, accept_loop);
    }

    /// Returns the connection that the source must keep open until the last answer. If it ends earlier, the migration fails.
    fn kept_open(&self) -> Option<&Stream> {
        None
    }

    /// Returns true if a QEMU releases the guest to this relay before the destination runs it.
    fn releases_guest(&self) -> bool {
        false
    }

    /// Returns the connections of a source on another host.
    fn streams(&self) -> Vec<&Stream> {
        Vec::new()
    }

    /// Ends every wait of the readers for the source that `over` does not end; from any thread.
    fn free_readers(&self, session: &Session<'_>) {
        let _ = session;
    }

    /// Ends every wait for the source.
    fn shut_down(&self) {}

    /// Sends the source the reason of a failed migration, whose guest it keeps.
    fn refuse(&self, session: &Session<'_>, reason: &str) {
        let _ = (session, reason);
    }

    /// Reports that the migration is over at the destination.
    fn over(&self, session: &Session<'_>) {
        let _ = session;
    }
}

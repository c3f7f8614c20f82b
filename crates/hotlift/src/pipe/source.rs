//! Interface of a migration's incoming side. Each kind of source has its own file.
//!
//! | file | source |
//! |---|---|
//! | `stream_source/receive` | the multifd channels of a stream, each with a thread |
//! | `guest_sink/source` | the multifd channels of a stream; writes pages into the memory of a guest of this process |
//! | `file/source` | a file; pages can be read in any order |
//! | `guest_source` | the guest of this process; its threads send pages directly |
//!
//! A source's threads fill batches, and pause at the session's barrier when the main thread requires it. The main thread
//! processes all other data: `main_reader` and `device_state` read it from a stream, `restore` from a file.

use std::time::Instant;

use hotlift_net::admission::Admitted;
use hotlift_net::transport::Stream;
use hotlift_wire::return_path::ReturnMessage;

use crate::error::{Channel, MigrationError};
use crate::pipe::session::Session;
use crate::stream::accept_loop::AcceptLoop;

/// The incoming side of a migration.
pub(crate) trait Source: Sync {
    /// Returns the count of reader threads, which fill batches, send pages, or write them into guest memory. May be 0.
    fn readers(&self) -> usize;

    /// Returns the name of reader thread `reader`, under which its CPU time is recorded.
    fn thread_name(&self, reader: usize) -> String;

    /// Returns the full name of the thread `thread`, which is not a reader.
    fn name(&self, thread: &str) -> String {
        format!("relay/{thread}")
    }

    /// Returns the name of worker thread `worker`, which writes batches.
    fn worker_name(&self, worker: usize) -> String {
        format!("relay/send_{worker}")
    }

    /// Processes the pages of reader thread `reader`, counted from 0, until there are no more pages. Runs in the reader's own
    /// thread.
    ///
    /// # Errors
    /// Pages are invalid, or the source has failed.
    fn read(&self, session: &Session<'_>, reader: usize) -> Result<(), MigrationError>;

    /// Processes an answer of the destination that is meant for the source. Also receives the answer's bytes.
    ///
    /// # Errors
    /// The reason why the answer is invalid. Then the connection is not read any further.
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

    /// Called when a connection to the destination has ended early, or has received invalid data.
    fn lost(&self, session: &Session<'_>, channel: Channel, error: MigrationError) {
        let _ = channel;
        session.fail(error);
    }

    /// Checks, at the time `now`, for events that do not wake any thread. Returns the time of the next check; `None` if none is
    /// needed.
    fn poll(&self, session: &Session<'_>, now: Instant) -> Option<Instant> {
        let _ = (session, now);
        None
    }

    /// Accepts additional connections of the migration that arrive at `accept_loop`.
    fn accept_late(
        &self,
        session: &Session<'_>,
        accept_loop: &mut AcceptLoop<'_>,
        arrivals: &mut Vec<Admitted>,
    ) {
        let _ = (session, accept_loop, arrivals);
    }

    /// Answers outcome queries that arrive at `accept_loop`, until the source knows the outcome.
    fn linger(&self, session: &Session<'_>, accept_loop: &mut AcceptLoop<'_>) {
        let _ = (session, accept_loop);
    }

    /// Returns the connection that the source must keep open until the last answer; `None` if there is none. If this connection
    /// ends earlier, the migration fails.
    fn kept_open(&self) -> Option<&Stream> {
        None
    }

    /// Returns true if the source is a QEMU that releases the guest to this relay before the destination runs it.
    fn releases_guest(&self) -> bool {
        false
    }

    /// Returns all connections to the source; empty if the source is on this host.
    fn streams(&self) -> Vec<&Stream> {
        Vec::new()
    }

    /// After a failure, ends those waits of the readers that [`Source::over`] does not end. May be called from any thread.
    fn free_readers(&self, session: &Session<'_>) {
        let _ = session;
    }

    /// Ends every wait for data from the source.
    fn shut_down(&self) {}

    /// Sends the source the reason of a failed migration. The source keeps its guest.
    fn refuse(&self, session: &Session<'_>, reason: &str) {
        let _ = (session, reason);
    }

    /// Called when the migration has ended at the destination.
    fn over(&self, session: &Session<'_>) {
        let _ = session;
    }
}

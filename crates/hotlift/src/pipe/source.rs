//! Where the pages come from: what every incoming side does, one file a kind.
//!
//! | file | the source is |
//! |---|---|
//! | `stream_source/receive` | a stream's multifd channels, each with a thread |
//! | `guest_sink/source` | the same of a guest's destination, which puts pages where they belong |
//! | `file/source` | a file, read from any place |
//! | `guest_source` | the guest of this process, whose threads send pages by themselves |
//!
//! Its threads fill batches, and stand still at the session's barrier where the main thread wants them to. What is no
//! page is the main thread's: `main_reader` and `device_state` read it from a stream, `restore` from a file.

use std::time::Instant;

use hotlift_net::admission::Admitted;
use hotlift_net::transport::Stream;
use hotlift_wire::return_path::ReturnMessage;

use crate::error::{Channel, MigrationError};
use crate::pipe::session::Session;
use crate::stream::door::Door;

/// An incoming side.
pub(crate) trait Source: Sync {
    /// Threads that fill batches, or put pages where they belong; may be 0.
    fn readers(&self) -> usize;

    /// What the thread of `reader` does, by which its CPU time is booked.
    fn thread_name(&self, reader: usize) -> String;

    /// Name of a thread that is none of its readers.
    fn name(&self, thread: &str) -> String {
        format!("relay/{thread}")
    }

    /// Name of a thread that writes batches.
    fn worker_name(&self, worker: usize) -> String {
        format!("relay/send_{worker}")
    }

    /// Fills batches until the pages of `reader`, from 0, have ended; or sends the pages. Runs in a thread of its own.
    ///
    /// # Errors
    /// What is wrong with the pages, or with what they come from.
    fn read(&self, session: &Session<'_>, reader: usize) -> Result<(), MigrationError>;

    /// Takes an answer of the other side that is meant for a source, and its bytes.
    ///
    /// # Errors
    /// Why it can be none: nothing more is read on this connection.
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

    /// A connection to the other side has ended before its time, or has brought what is wrong.
    fn lost(&self, session: &Session<'_>, channel: Channel, error: MigrationError) {
        let _ = channel;
        session.fail(error);
    }

    /// Checks at `now` for what no wait notices; returns when it must be called again.
    fn look(&self, session: &Session<'_>, now: Instant) -> Option<Instant> {
        let _ = (session, now);
        None
    }

    /// Takes what else is the migration's out of what has come at `door`.
    fn at_door(&self, session: &Session<'_>, door: &mut Door<'_>, arrivals: &mut Vec<Admitted>) {
        let _ = (session, door, arrivals);
    }

    /// Answers at `door` until the source knows what became of the guest.
    fn linger(&self, session: &Session<'_>, door: &mut Door<'_>) {
        let _ = (session, door);
    }

    /// The connection that a source keeps open until it has had the last answer: its end before ends the migration.
    fn kept_open(&self) -> Option<&Stream> {
        None
    }

    /// Whether a QEMU gives the guest up to this relay, before the other side runs it.
    fn releases_guest(&self) -> bool {
        false
    }

    /// The connections of a source on another host.
    fn streams(&self) -> Vec<&Stream> {
        Vec::new()
    }

    /// Ends every wait of the readers for the source; from any thread.
    fn free_readers(&self) {}

    /// Ends every wait for the source.
    fn shut_down(&self) {}

    /// The migration has failed, and the guest is the source's: why.
    fn refuse(&self, session: &Session<'_>, reason: &str) {
        let _ = (session, reason);
    }

    /// Everything is over on the other side.
    fn over(&self) {}
}

//! Interface of a migration's outgoing side. Each kind of sink has its own file.
//!
//! One thread (the relay's main thread) calls the methods of [`Sink`], in this order:
//!
//! ```text
//! open  ram_start  (section_end | barrier | delta | command)*  ram_end  devices*  await_loaded  commit
//! ```
//!
//! An early section may be sent at any point from `ram_start` to `ram_end`. A sink receives the start of the stream, with the
//! RAM blocks, when it is created. No call depends on the result of an earlier call.
//!
//! With postcopy, the calls of [`Postcopy`] follow a barrier: `begin`, `raw*`, `begin_package`, `raw*`, `end_package`; then
//! pages, `ram_end` and `commit`.
//!
//! If the source is a guest of this process, worker threads exist only for `compress`. Between two barriers the guest's channel
//! threads send their own packets, and the migration thread writes records. They write through the sink's
//! [`StreamOut`](crate::pipe::stream_out::StreamOut). After a barrier, the migration thread calls `catch_up`.
//!
//! If the sink is a guest of this process, there are no workers: the reading threads write each page into guest memory.
//!
//! Worker threads write batches concurrently, each through its own [`WritePages`]. Before `barrier`, `delta` and `ram_end`, the
//! caller ensures that all workers are idle. Then every page since the last barrier has been written.

use std::time::Duration;

use hotlift_mem::PAGE_SIZE;
use hotlift_net::transport::Stream;
use hotlift_wire::main_channel::{Command, Configuration, EarlySection};
use hotlift_wire::return_path::ReturnMessage;
use hotlift_wire::settle::GuestActivity;

use crate::error::{Channel, MigrationError};
use crate::figures::MethodFigures;
use crate::pipe::batch::Batch;
pub(crate) use crate::pipe::hooks::HasTaken;
pub(crate) use crate::stream::main_channel::{EarlySections, RamLayout};

/// Content of the stream before its first page.
#[derive(Debug, Clone, Copy)]
pub(crate) struct Opening<'o> {
    /// Machine type and capabilities of the source.
    pub configuration: &'o Configuration,
    /// UUID of the VM; all zero if it has none.
    pub uuid: [u8; 16],
    /// Commands that the source has sent before RAM.
    pub commands: &'o [Command],
    /// Device sections before RAM, and device sections directly after the RAM section's START.
    pub early: &'o EarlySections,
    /// List of RAM blocks.
    pub ram: &'o RamLayout,
}

/// The outgoing side of a migration: a stream, a file, or a guest of this process.
pub(crate) trait Sink: Sync {
    /// Returns true if the sink is a guest of this process. Then every connection of the source can carry the commit, and a
    /// cancel ends all waits for the source.
    fn is_guest(&self) -> bool {
        false
    }

    /// Returns the count of worker threads; 0 if the sink needs none.
    fn workers(&self) -> usize;

    /// Returns the page writer of the worker with index `worker`. Called in the worker's thread, after `ram_start`.
    fn page_writer(&self, worker: usize) -> Result<Box<dyn WritePages + '_>, MigrationError>;

    /// Returns a forwarder for packets that need only a new header. Used by the thread of the incoming channel `channel`.
    /// Returns `None` if this sink cannot forward packets.
    fn forwarder(&self, channel: u8) -> Option<Box<dyn ForwardPackets + '_>> {
        let _ = channel;
        None
    }

    /// Sends the start of the stream up to RAM. Returns once the destination has accepted header and configuration. A file
    /// already contains the start of the stream when it is created.
    fn open(&self, opening: Opening<'_>) -> Result<(), MigrationError> {
        let _ = opening;
        Ok(())
    }

    /// Sends a command of the source between two sections.
    fn command(&self, command: Command) -> Result<(), MigrationError>;

    /// Sends, unchanged, a device section that comes between the start and the end of RAM.
    fn early_section(&self, section: &EarlySection) -> Result<(), MigrationError>;

    /// Sends the list of RAM blocks.
    fn ram_start(&self) -> Result<(), MigrationError> {
        Ok(())
    }

    /// Called when the source has ended a RAM section and may pause. Workers may still write.
    fn section_end(&self) -> Result<(), MigrationError> {
        Ok(())
    }

    /// Sends a barrier: the destination applies all pages written so far before any later page.
    fn barrier(&self) -> Result<(), MigrationError>;

    /// Waits, without a time limit, until the destination has processed everything written. Calls `doing` at least once per
    /// `every`; an error of `doing` ends the wait.
    fn catch_up(
        &self,
        every: Duration,
        doing: &mut dyn FnMut() -> Result<(), MigrationError>,
    ) -> Result<(), MigrationError> {
        let _ = (every, doing);
        Ok(())
    }

    /// Sends an XBZRLE delta, then a barrier. The content that the delta refers to must have been written before.
    fn delta(&self, block: usize, offset: u64, delta: &[u8]) -> Result<(), MigrationError>;

    /// Returns the postcopy interface; `None` if the destination does not run a guest.
    fn postcopy(&self) -> Option<&dyn Postcopy> {
        None
    }

    /// Ends RAM. All pages must have been written.
    fn ram_end(&self) -> Result<(), MigrationError>;

    /// Sends, unchanged, the next part of the sections after RAM. The destination may load it at once.
    fn devices(&self, part: &[u8]) -> Result<(), MigrationError>;

    /// Waits until the destination has permanently accepted all data: devices are loaded, or the file is on disk.
    fn await_loaded(&self) -> Result<(), MigrationError>;

    /// Sends EOF and then `end`, the bytes after EOF; `end` is empty for a guest of this process. If the guest should run, this
    /// starts it at the destination. Returns the guest's state after the start is confirmed. `has_taken` supplies the state
    /// that a QEMU does not report in its stream.
    ///
    /// # Errors
    /// [`MigrationError::Destination`] if the destination states that it will never run the guest; [`MigrationError::InDoubt`]
    /// without a statement.
    fn commit(
        &self,
        end: &[u8],
        has_taken: Option<HasTaken<'_>>,
    ) -> Result<GuestActivity, MigrationError>;

    /// Processes the destination's answers until the connections end. Calls `forward` with each answer for the source. Calls
    /// `failed` for an invalid message or an early end of a connection, before it ends any wait for an answer. Runs in its own
    /// thread. A sink without answers returns at once.
    fn return_path(&self, forward: Forward<'_>, failed: &dyn Fn(Channel, MigrationError)) {
        let _ = (forward, failed);
    }

    /// Returns a multifd channel that the destination has closed; `None` if all are open. The other channels may still carry
    /// pages.
    fn lost_channel(&self) -> Option<Channel> {
        None
    }

    /// Returns the connections to the destination: main first, then the multifd channels.
    fn streams(&self) -> Vec<&Stream> {
        Vec::new()
    }

    /// Aborts: ends every waiting call. May be called from any thread. A file is left in a state that cannot be mistaken for
    /// complete. The destination's messages can still be read.
    fn abort(&self);

    /// After a failure, waits briefly for the destination's reason. Returns `None` if no reason arrives.
    fn closing_reason(&self) -> Option<String> {
        None
    }

    /// Returns true if an error text from the destination proves that it will never run the guest. A Hotlift guarantees this.
    fn refuses_with_text(&self) -> bool {
        false
    }

    /// Returns true if [`Sink::await_loaded`] proves that a machine has loaded the devices. A file proves nothing: it accepts
    /// any bytes.
    fn shows_loading(&self) -> bool {
        false
    }

    /// Closes all connections, which also ends [`Sink::return_path`].
    fn close(&self) {
        self.abort();
    }

    /// Returns the count of bytes written so far on all channels.
    fn sent_bytes(&self) -> u64;

    /// Returns the name of the page compression method.
    fn method(&self) -> &'static str;

    /// Returns the statistics of each method; empty if all packets have the same method.
    fn methods(&self) -> Vec<MethodFigures> {
        Vec::new()
    }
}

/// Outgoing side in postcopy: the destination runs the guest, and requests the pages that the guest needs.
pub(crate) trait Postcopy: Sync {
    /// Waits until the destination is ready for postcopy. Then the destination has accepted everything that was sent before.
    /// Does nothing for a source that is a stream, because that source asks the destination itself.
    fn await_ready(&self) -> Result<(), MigrationError>;

    /// Called at the end of a migration whose guest may run at the destination. Without this call, [`Sink::close`] informs a
    /// destination that was asked if it is ready that there was no commit.
    fn guest_may_run(&self);

    /// Starts postcopy. From now on every page is written at most once, in any order, without barriers.
    fn begin(&self);

    /// Makes a separate connection for requested pages, as the source does: a QEMU at the destination waits for it.
    fn preempt(&self) -> Result<(), MigrationError>;

    /// Returns true if requested pages have a separate connection, so that writers of other pages cannot delay them.
    fn has_separate_connection(&self) -> bool;

    /// Sends, unchanged, a command of the source or the next bytes of the package.
    fn raw(&self, bytes: &[u8]) -> Result<(), MigrationError>;

    /// Starts a package of `length` bytes: the devices, and the command that allows the guest to run. The destination reads the
    /// whole package before it processes any part.
    fn begin_package(&self, length: u32) -> Result<(), MigrationError>;

    /// Sends the last bytes of the package. From then on the guest may run.
    fn end_package(&self, bytes: &[u8]) -> Result<(), MigrationError>;

    /// Sends a requested page, with priority over the writes of other threads.
    fn page(
        &self,
        block: usize,
        offset: u64,
        content: Option<&[u8; PAGE_SIZE]>,
    ) -> Result<(), MigrationError>;
}

/// Callback that receives an answer of the destination for the source: the connection, the message, and its bytes.
pub(crate) type Forward<'a> =
    &'a dyn Fn(Channel, &ReturnMessage<'_>, &[u8]) -> Result<(), MigrationError>;

/// Page writer of one worker thread.
pub(crate) trait WritePages {
    /// Writes the batch's pages. May change the batch: the caller empties it afterwards.
    fn write(&mut self, batch: &mut Batch) -> Result<(), MigrationError>;
}

/// Forwards uncompressed packets from socket to socket, without a change of their pages.
pub(crate) trait ForwardPackets {
    /// Forwards one packet of RAM block `block`. The content of its pages `normal` is the next bytes of `from`.
    fn forward(
        &mut self,
        from: &Stream,
        block: usize,
        normal: &[u64],
        zero: &[u64],
    ) -> Result<(), MigrationError>;
}

#[cfg(test)]
impl<'o> Opening<'o> {
    pub(crate) fn bare(configuration: &'o Configuration, ram: &'o RamLayout) -> Self {
        static NONE: EarlySections = EarlySections {
            before_ram: Vec::new(),
            behind_start: Vec::new(),
        };
        Self {
            configuration,
            uuid: [7; 16],
            commands: &[],
            early: &NONE,
            ram,
        }
    }
}

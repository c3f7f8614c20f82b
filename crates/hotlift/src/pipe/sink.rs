//! Interface of the outgoing sides; each kind has its own file.
//!
//! One thread (the relay's main thread) calls the methods of [`Sink`], in this order:
//!
//! ```text
//! open  ram_start  (section_end | barrier | delta | command)*  ram_end  devices*  await_loaded  commit
//! ```
//!
//! An early section may come at any point from `ram_start` to `ram_end`. A sink receives the stream's opening, with the RAM
//! blocks, at its creation: no call depends on the result of an earlier one.
//!
//! With postcopy, the calls of [`Postcopy`] follow a barrier: `begin`, `raw*`, `begin_package`, `raw*`, `end_package`; then
//! pages, `ram_end` and `commit`.
//!
//! For the guest of this process as the source, there are workers only for `compress`. Between two barriers its channel threads
//! send their own packets, and the migration thread writes records, both through the sink's
//! [`StreamOut`](crate::pipe::stream_out::StreamOut). `catch_up` follows a barrier there.
//!
//! A guest of this process as a sink has no workers: the reading threads put each page into guest memory.
//!
//! Concurrently, worker threads write batches, each through its own [`WritePages`]. Before `barrier`, `delta` and `ram_end` the
//! caller ensures that all workers are idle: every page of the interval before has been written.

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
    /// Machine and capabilities of the source.
    pub configuration: &'o Configuration,
    /// UUID of the VM; all zero if it has none.
    pub uuid: [u8; 16],
    /// Commands of the source before RAM.
    pub commands: &'o [Command],
    /// Device sections around the start of RAM.
    pub early: &'o EarlySections,
    /// RAM blocks.
    pub ram: &'o RamLayout,
}

/// Outgoing side of a migration.
pub(crate) trait Sink: Sync {
    /// Returns true for a guest of this process: every connection of its source can bring the commit, and all waits for the
    /// source react to a cancel.
    fn is_guest(&self) -> bool {
        false
    }

    /// Returns the count of worker threads; 0 if it needs none.
    fn workers(&self) -> usize;

    /// Returns the writer of worker `worker`, from 0. Called in the worker's thread, after `ram_start`.
    fn page_writer(&self, worker: usize) -> Result<Box<dyn WritePages + '_>, MigrationError>;

    /// Returns a forwarder of packets that only need a new header, for the thread of incoming channel `channel`; `None` if
    /// forwarding is never possible.
    fn forwarder(&self, channel: u8) -> Option<Box<dyn ForwardPackets + '_>> {
        let _ = channel;
        None
    }

    /// Opens the stream up to RAM, and returns when the destination has accepted header and configuration. A file contains them
    /// from its creation.
    fn open(&self, opening: Opening<'_>) -> Result<(), MigrationError> {
        let _ = opening;
        Ok(())
    }

    /// Sends a command of the source, between sections.
    fn command(&self, command: Command) -> Result<(), MigrationError>;

    /// Sends a device's section between the start and the end of RAM unchanged.
    fn early_section(&self, section: &EarlySection) -> Result<(), MigrationError>;

    /// Sends the RAM blocks.
    fn ram_start(&self) -> Result<(), MigrationError> {
        Ok(())
    }

    /// Reports that the source has ended a RAM section and may pause. Workers need not be idle.
    fn section_end(&self) -> Result<(), MigrationError> {
        Ok(())
    }

    /// Orders all pages written so far before all later ones.
    fn barrier(&self) -> Result<(), MigrationError>;

    /// Waits without limit until the destination has processed everything written. Calls `doing`, which may end the wait, at
    /// least once per `every`.
    fn catch_up(
        &self,
        every: Duration,
        doing: &mut dyn FnMut() -> Result<(), MigrationError>,
    ) -> Result<(), MigrationError> {
        let _ = (every, doing);
        Ok(())
    }

    /// Sends an XBZRLE delta to a page whose current content was written, and a barrier after it.
    fn delta(&self, block: usize, offset: u64, delta: &[u8]) -> Result<(), MigrationError>;

    /// Returns the postcopy interface; `None` if the destination runs no guest.
    fn postcopy(&self) -> Option<&dyn Postcopy> {
        None
    }

    /// Ends RAM: all pages are written.
    fn ram_end(&self) -> Result<(), MigrationError>;

    /// Sends the next part of the sections after RAM unchanged. The destination may load it at once.
    fn devices(&self, part: &[u8]) -> Result<(), MigrationError>;

    /// Returns when the destination has accepted everything so far permanently: devices are loaded, or the file is on disk.
    fn await_loaded(&self) -> Result<(), MigrationError>;

    /// Sends EOF and the following bytes (`end`, empty for a guest of this process), which start the guest at the destination
    /// if it should run. Returns the guest's state once the start is confirmed. `has_taken` supplies what a QEMU does not
    /// report.
    ///
    /// # Errors
    /// [`MigrationError::Destination`] if the destination states that it never runs the guest; [`MigrationError::InDoubt`] if
    /// there is no statement.
    fn commit(
        &self,
        end: &[u8],
        has_taken: Option<HasTaken<'_>>,
    ) -> Result<GuestActivity, MigrationError>;

    /// Processes the destination's answers until the connections end, and passes those for the source to `forward`. `failed`
    /// takes an invalid message or the early end of a connection, before any wait for an answer ends. Runs in its own thread; a
    /// sink without answers returns at once.
    fn return_path(&self, forward: Forward<'_>, failed: &dyn Fn(Channel, MigrationError)) {
        let _ = (forward, failed);
    }

    /// Returns a multifd channel that the destination has closed. Pages may still be in transit on the others.
    fn lost_channel(&self) -> Option<Channel> {
        None
    }

    /// Returns the connections to the destination: main, then those of [`Sink::lost_channel`].
    fn streams(&self) -> Vec<&Stream> {
        Vec::new()
    }

    /// Ends every waiting call; from any thread. No file remains that looks complete. The destination's messages may still be
    /// read.
    fn abort(&self);

    /// Returns, after a failure, the destination's reason, if it arrives soon.
    fn closing_reason(&self) -> Option<String> {
        None
    }

    /// Returns true if the destination sends an error text only if it never runs the guest, as a Hotlift does.
    fn refuses_with_text(&self) -> bool {
        false
    }

    /// Returns true if [`Sink::await_loaded`] returns only after a machine has loaded the devices. A file accepts any bytes.
    fn shows_loading(&self) -> bool {
        false
    }

    /// Closes all connections, which also ends [`Sink::return_path`].
    fn close(&self) {
        self.abort();
    }

    /// Returns the bytes written so far on all channels.
    fn sent_bytes(&self) -> u64;

    /// Returns the name of the page compression method, for the report.
    fn method(&self) -> &'static str;

    /// Returns the statistics of each method, if packets differ in it.
    fn methods(&self) -> Vec<MethodFigures> {
        Vec::new()
    }
}

/// Outgoing side in postcopy: the guest runs there, and requests the pages that it needs.
pub(crate) trait Postcopy: Sync {
    /// Returns when the destination is ready for postcopy, so that it can reject nothing that was sent before. A source that is
    /// a stream asks by itself.
    fn await_ready(&self) -> Result<(), MigrationError>;

    /// Reports that the guest of the ended migration may run at the destination. Otherwise [`Sink::close`] notifies a
    /// destination that was asked whether it is ready that there was no commit.
    fn settled(&self);

    /// From now on every page is written at most once, in any order, and no barrier is needed.
    fn begin(&self);

    /// Opens a separate connection for requested pages, because the source uses one: a QEMU waits for it.
    fn preempt(&self) -> Result<(), MigrationError>;

    /// Returns true if requested pages have a connection of their own: writers of other pages cannot delay them.
    fn is_apart(&self) -> bool;

    /// Sends a command of the source, or the next bytes of the package, unchanged.
    fn raw(&self, bytes: &[u8]) -> Result<(), MigrationError>;

    /// Starts a package of `length` bytes with the devices and the command that allows the guest to run. The destination reads
    /// all of it before it uses any.
    fn begin_package(&self, length: u32) -> Result<(), MigrationError>;

    /// Sends the last bytes of the package: the guest may run.
    fn end_package(&self, bytes: &[u8]) -> Result<(), MigrationError>;

    /// Sends a requested page, before everything that other threads write.
    fn page(
        &self,
        block: usize,
        offset: u64,
        content: Option<&[u8; PAGE_SIZE]>,
    ) -> Result<(), MigrationError>;
}

/// Callback for an answer on a connection that is meant for a source, and its bytes.
pub(crate) type Forward<'a> =
    &'a dyn Fn(Channel, &ReturnMessage<'_>, &[u8]) -> Result<(), MigrationError>;

/// Writer of one worker.
pub(crate) trait WritePages {
    /// Writes the batch's pages. May change the batch: it is emptied next.
    fn write(&mut self, batch: &mut Batch) -> Result<(), MigrationError>;
}

/// Forwarder of uncompressed packets whose pages stay unchanged.
pub(crate) trait ForwardPackets {
    /// Sends a packet of RAM block `block` whose `normal` pages are the next bytes of `from`.
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

//! Where the pages go: what every outgoing side does, one file a kind.
//!
//! One thread (the relay's main thread) calls the methods of [`Sink`], in this order:
//!
//! ```text
//! open  ram_start  (section_end | barrier | delta | command)*  ram_end  devices*  await_loaded  commit
//! ```
//!
//! An early section may come between any two of them from `ram_start` to `ram_end`. A sink has what the stream begins with when it
//! is made, RAM blocks among it: none of its calls depends on what an earlier one has left.
//!
//! With postcopy, behind a barrier, those of [`Postcopy`] come between: `begin`, `raw*`, `begin_package`, `raw*`,
//! `end_package`; then pages, `ram_end` and `commit`.
//!
//! A guest of this process has workers for `compress` alone: between two barriers the threads of its channels send packets
//! of their own, and the migration thread writes records, both by the [`StreamOut`](crate::pipe::stream_out::StreamOut) of the sink.
//! `catch_up` follows a barrier there.
//!
//! A guest of this process as a sink has no workers: the threads that read put each page where it belongs.
//!
//! Worker threads meanwhile write batches, each by a [`WritePages`] of its own. Before `barrier`,
//! `delta` and `ram_end` the caller has seen to it that all workers are idle: every page of the
//! interval before has been written.

use std::time::Duration;

use hotlift_mem::PAGE_SIZE;
use hotlift_net::transport::Stream;
use hotlift_wire::main_channel::{Command, Configuration, EarlySection};
use hotlift_wire::return_path::ReturnMessage;
use hotlift_wire::settle::Doing;

use crate::error::{Channel, MigrationError};
use crate::figures::MethodFigures;
use crate::pipe::batch::Batch;
pub(crate) use crate::pipe::hooks::HasTaken;
pub(crate) use crate::stream::main_channel::{EarlySections, RamLayout};

/// What a stream has before its first page.
#[derive(Debug, Clone, Copy)]
pub(crate) struct Opening<'o> {
    /// The source's machine and capabilities.
    pub configuration: &'o Configuration,
    /// The VM's UUID; all zero if it has none.
    pub uuid: [u8; 16],
    /// Commands of the source before RAM.
    pub commands: &'o [Command],
    /// Sections of devices around the start of RAM.
    pub early: &'o EarlySections,
    /// The RAM blocks.
    pub ram: &'o RamLayout,
}

/// An outgoing side.
pub(crate) trait Sink: Sync {
    /// Whether it is a guest of this process: every connection of its source can bring the commit, and all that waits for
    /// the source notices a cancel.
    fn is_guest(&self) -> bool {
        false
    }

    /// Worker threads that it wants; 0 for a source that needs none.
    fn workers(&self) -> usize;

    /// The writer of worker `worker`, from 0. Called in the worker's thread, after `ram_start`.
    fn page_writer(&self, worker: usize) -> Result<Box<dyn WritePages + '_>, MigrationError>;

    /// A way for packets that need no change but for their header, for the thread of incoming channel
    /// `channel`; `None` if there is none, now or ever.
    fn forwarder(&self, channel: u8) -> Option<Box<dyn ForwardPackets + '_>> {
        let _ = channel;
        None
    }

    /// Opens the stream up to RAM, and returns when the other side has taken header and configuration. A file has them from the
    /// beginning.
    fn open(&self, opening: Opening<'_>) -> Result<(), MigrationError> {
        let _ = opening;
        Ok(())
    }

    /// A command of the source, between sections.
    fn command(&self, command: Command) -> Result<(), MigrationError>;

    /// A device's section between the start and the end of RAM, which goes out unchanged.
    fn early_section(&self, section: &EarlySection) -> Result<(), MigrationError>;

    /// Sends the RAM blocks.
    fn ram_start(&self) -> Result<(), MigrationError> {
        Ok(())
    }

    /// The source has ended a section of RAM and may rest. Nothing has to be idle.
    fn section_end(&self) -> Result<(), MigrationError> {
        Ok(())
    }

    /// All pages written so far come before all pages written later.
    fn barrier(&self) -> Result<(), MigrationError>;

    /// Waits until the other side has worked through all that was written, however long that takes. Meanwhile `doing` is
    /// called, which may end the wait: at least `every` so often.
    fn catch_up(
        &self,
        every: Duration,
        doing: &mut dyn FnMut() -> Result<(), MigrationError>,
    ) -> Result<(), MigrationError> {
        let _ = (every, doing);
        Ok(())
    }

    /// An XBZRLE delta to a page whose present content has been written, and a barrier after it.
    fn delta(&self, block: usize, offset: u64, delta: &[u8]) -> Result<(), MigrationError>;

    /// What it can do in postcopy; `None` if the other side runs no guest.
    fn postcopy(&self) -> Option<&dyn Postcopy> {
        None
    }

    /// RAM has ended: all pages are written.
    fn ram_end(&self) -> Result<(), MigrationError>;

    /// The next part of the sections behind RAM, byte for byte. The other side may load it at once.
    fn devices(&self, part: &[u8]) -> Result<(), MigrationError>;

    /// Returns when the other side has taken everything so far, for good: devices are loaded, or the
    /// file is on disk.
    fn await_loaded(&self) -> Result<(), MigrationError>;

    /// EOF and what follows it (`end`, which is empty for a guest of this process), at which the other side runs the guest (if it is to run); returns
    /// when it is known to, with what the guest does. `has_taken` knows what a QEMU does not say.
    ///
    /// # Errors
    /// [`MigrationError::Destination`] if it never runs the guest, by its own word;
    /// [`MigrationError::InDoubt`] if there is no word of it.
    fn commit(&self, end: &[u8], has_taken: Option<HasTaken<'_>>) -> Result<Doing, MigrationError>;

    /// Carries answers of the other side, with `forward` for those meant for the source, until the connections end.
    /// `failed` takes what the other side has sent that is wrong, or how a connection ended before its time, and
    /// takes it before any wait for an answer ends. Runs in a thread of its own; a side that gives no answers
    /// returns at once.
    fn return_path(&self, forward: Forward<'_>, failed: &dyn Fn(Channel, MigrationError)) {
        let _ = (forward, failed);
    }

    /// A multifd channel that the other side has closed. Pages may still be on their way in the others.
    fn lost_channel(&self) -> Option<Channel> {
        None
    }

    /// The connections to the other side: the main channel, then those of [`Sink::lost_channel`].
    fn streams(&self) -> Vec<&Stream> {
        Vec::new()
    }

    /// Ends every call that waits; from any thread. Nothing of a file is left that looks whole. What
    /// the other side says may still be read.
    fn abort(&self);

    /// After a failure: what the other side has to say about it, if it says it soon.
    fn closing_reason(&self) -> Option<String> {
        None
    }

    /// Whether the other side says why it fails only if it never runs the guest, as a Hotlift does.
    fn refuses_in_words(&self) -> bool {
        false
    }

    /// Whether [`Sink::await_loaded`] returns only once a machine has loaded the devices. A file takes whatever comes.
    fn shows_loading(&self) -> bool {
        false
    }

    /// Closes everything, [`Sink::return_path`] too.
    fn close(&self) {
        self.abort();
    }

    /// Bytes written so far, all channels.
    fn sent_bytes(&self) -> u64;

    /// Name of the page compression method, for the report.
    fn method(&self) -> &'static str;

    /// What went by which method, where each packet has its own.
    fn methods(&self) -> Vec<MethodFigures> {
        Vec::new()
    }
}

/// What an outgoing side does in postcopy: the guest runs there, and asks for the pages that it needs.
pub(crate) trait Postcopy: Sync {
    /// Returns when the other side is ready for postcopy, so that nothing of what was sent can be refused behind it. A
    /// source that is a stream asks by itself.
    fn await_ready(&self) -> Result<(), MigrationError>;

    /// The other side may run the guest whose migration has ended: it is asked nothing more. Without this one that was asked
    /// whether it is ready learns at the end that no question comes any more.
    fn settled(&self);

    /// From now on every page is written once at most, in any order, and no barrier is needed.
    fn begin(&self);

    /// The source sends the pages that were asked for on a connection of their own, and so this side is to: a QEMU waits
    /// for it.
    fn preempt(&self) -> Result<(), MigrationError>;

    /// Whether pages that the guest waits for go out where nothing else does: whoever writes the others may take its time.
    fn is_apart(&self) -> bool;

    /// A command of the source, or the next bytes of the package, as they came.
    fn raw(&self, bytes: &[u8]) -> Result<(), MigrationError>;

    /// A package of `length` bytes follows, with the devices and the command that the guest may run. The other side reads
    /// all of them before it uses the first.
    fn begin_package(&self, length: u32) -> Result<(), MigrationError>;

    /// The last bytes of the package: the guest may run.
    fn end_package(&self, bytes: &[u8]) -> Result<(), MigrationError>;

    /// A page that the guest waits for: before all that others write.
    fn page(
        &self,
        block: usize,
        offset: u64,
        content: Option<&[u8; PAGE_SIZE]>,
    ) -> Result<(), MigrationError>;
}

/// Takes an answer on a connection that is meant for a source, and its bytes.
pub(crate) type Forward<'a> =
    &'a dyn Fn(Channel, &ReturnMessage<'_>, &[u8]) -> Result<(), MigrationError>;

/// One worker's half of a sink.
pub(crate) trait WritePages {
    /// Writes the batch's pages. The batch may be changed: it is emptied next.
    fn write(&mut self, batch: &mut Batch) -> Result<(), MigrationError>;
}

/// What a sink does with uncompressed packets that may stay as they are.
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
    /// Makes one with neither commands nor sections of devices.
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

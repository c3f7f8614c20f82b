//! The connection only for requested pages (capability `postcopy-preempt`). If no page was requested, one page is sent on it at
//! the end.
//!
//! The source makes the connection just before the switch to postcopy. Its records are not in sections. A QEMU sends nothing on
//! it before the first record. A source whose peer is a Hotlift first sends the migration's id.

use std::net::Shutdown;
use std::sync::atomic::{AtomicBool, Ordering};
use std::sync::{Arc, Mutex, TryLockError};
use std::time::{Duration, Instant};

use hotlift_mem::PAGE_SIZE;
use hotlift_mem::sock::IoScratch;
use hotlift_net::transport::Stream;
use hotlift_wire::main_channel::postcopy::{
    PREEMPT_HEAD_LEN, PreemptDecoder, PreemptRecord, put_preempt_end, put_preempt_page,
};
use hotlift_wire::{RamBlockEntry, WireError};

use crate::error::{Channel, MigrationError};
use crate::figures::Counters;
use crate::life::Life;
use crate::life::wait_mutex::WaitMutex;
use crate::lock::lock;
use crate::stream::main_recv::WaitCondition;
use crate::stream::main_send::PageRecords;

/// Size of one read in bytes: some pages.
const READ: usize = 64 << 10;

/// Incoming connection for requested pages. It may arrive later.
#[derive(Debug)]
pub(crate) struct PreemptIn(WaitMutex<Option<Arc<Stream>>>);

impl PreemptIn {
    /// Creates the state before the connection arrives. Changes of `life` end its waits.
    pub(crate) fn new(life: &Life) -> Self {
        Self(WaitMutex::new(life, None))
    }

    /// Stores the connection, and wakes the thread that waits for it.
    pub(crate) fn put(&self, stream: Stream) {
        self.0.change(|arrived| *arrived = Some(Arc::new(stream)));
    }

    /// Returns true if the connection has arrived.
    pub(crate) fn is_here(&self) -> bool {
        self.0.lock().is_some()
    }

    /// Shuts the connection down, because no more data is expected.
    pub(crate) fn end(&self) {
        if let Some(stream) = &*self.0.lock() {
            stream.shutdown(Shutdown::Both);
        }
    }

    /// Waits, for at most `timeout`, until the connection arrives.
    ///
    /// # Errors
    /// The error of `waiting`; [`MigrationError::Timeout`] after `timeout`.
    pub(crate) fn wait_for(
        &self,
        timeout: Duration,
        waiting: &dyn WaitCondition,
    ) -> Result<Arc<Stream>, MigrationError> {
        let deadline = Instant::now() + timeout;
        let arrived = |arrived: &mut Option<Arc<Stream>>| arrived.clone();
        let arrived = self
            .0
            .wait_until(Some(deadline), || waiting.check(), arrived)?;
        arrived.ok_or_else(|| missing_preempt(timeout))
    }
}

/// Returns the error for a peer that did not make the connection within the time `waited`.
pub(crate) fn missing_preempt(waited: Duration) -> MigrationError {
    MigrationError::Timeout {
        waiting_for: "the preempt channel (check the source's capability postcopy-preempt)"
            .to_owned(),
        waited,
    }
}

/// Reads pages from `stream` until it ends. Calls `take` with each page: RAM block, byte offset and content.
///
/// # Errors
/// [`MigrationError::Connection`], [`MigrationError::Wire`] for an invalid record, [`MigrationError::Closed`] if the stream
/// ends within a record, and the error of `take`.
pub(crate) fn read_pages(
    stream: &Stream,
    blocks: &[RamBlockEntry],
    counters: &Counters,
    mut take: impl FnMut(usize, u64, Option<&[u8; PAGE_SIZE]>) -> Result<(), MigrationError>,
) -> Result<(), MigrationError> {
    let mut decoder = PreemptDecoder::new(blocks.to_vec());
    let mut unread = Vec::with_capacity(2 * READ);
    let mut buffer = vec![0; READ];
    loop {
        let read = stream.read_some(&mut buffer);
        let read =
            read.map_err(|source| broken("reading pages that the guest waits for", source))?;
        if read == 0 {
            return match unread.is_empty() {
                true => Ok(()),
                false => Err(MigrationError::main_closed()),
            };
        }
        counters.add_bytes(read);
        unread.extend_from_slice(&buffer[..read]);
        let mut taken = 0;
        loop {
            match decoder.next(&unread[taken..]) {
                Ok((record, length)) => {
                    if let PreemptRecord::Page {
                        block,
                        offset,
                        content,
                    } = record
                    {
                        take(block, offset, content)?;
                    }
                    taken += length;
                }
                Err(WireError::Truncated { .. }) => break,
                Err(source) => return Err(MigrationError::main_wire(source)),
            }
        }
        unread.drain(..taken);
    }
}

/// Outgoing connection for requested pages.
pub(crate) struct PreemptOut {
    stream: Stream,
    counters: Arc<Counters>,
    /// Buffer of the records to write. Its lock allows one writer at a time.
    out: Mutex<Vec<u8>>,
    /// True once a page was sent on this connection.
    is_used: AtomicBool,
    /// True once the peer has read a page from this connection.
    was_read: AtomicBool,
}

impl PreemptOut {
    /// Creates the state of a connection. `counters` counts its bytes.
    pub(crate) fn new(stream: Stream, counters: Arc<Counters>) -> Self {
        Self {
            stream,
            counters,
            out: Mutex::default(),
            is_used: AtomicBool::new(false),
            was_read: AtomicBool::new(false),
        }
    }

    /// Returns true if the peer keeps the connection open. A QEMU without `postcopy-preempt` accepts the connection, then
    /// closes it. A QEMU with `postcopy-preempt` keeps it open until main's END.
    ///
    /// # Errors
    /// [`MigrationError::Closed`] if the connection was closed after pages were sent on it, because these pages are lost.
    pub(crate) fn is_taken(&self) -> Result<bool, MigrationError> {
        match (self.stream.is_hung_up(), self.is_used()) {
            (false, _) => Ok(true),
            (true, false) => Ok(false),
            (true, true) => Err(MigrationError::main_closed()),
        }
    }

    /// Returns true if pages were sent on this connection.
    pub(crate) fn is_used(&self) -> bool {
        self.is_used.load(Ordering::Acquire)
    }

    /// Returns true once the peer has read all data sent before this call or an earlier call. Over TCP, it is enough that the
    /// peer's kernel has received the data. Also returns true if the peer has closed the connection.
    pub(crate) fn is_read(&self) -> bool {
        // A write in progress means that the peer cannot have read everything.
        let is_whole =
            self.is_used() && !matches!(self.out.try_lock(), Err(TryLockError::WouldBlock));
        if is_whole && self.stream.is_delivered() {
            self.was_read.store(true, Ordering::Release);
        }
        self.was_read.load(Ordering::Acquire) || self.stream.is_hung_up()
    }

    /// Sends pages of RAM block `block`.
    ///
    /// # Errors
    /// [`MigrationError::Connection`].
    pub(crate) fn pages(&self, block: &str, pages: &PageRecords<'_>) -> Result<(), MigrationError> {
        let mut out = lock(&self.out);
        // Checks between two writes, because a thread that writes without pause leaves no other time to check.
        if self.is_used.swap(true, Ordering::AcqRel) && self.stream.is_delivered() {
            self.was_read.store(true, Ordering::Release);
        }
        out.clear();
        out.reserve(
            pages.content.len() + (pages.zero.len() + pages.normal.len()) * PREEMPT_HEAD_LEN,
        );
        for (offset, content) in pages.each() {
            put_preempt_page(block, offset, content, &mut out)
                .map_err(MigrationError::main_wire)?;
        }
        self.write(&out)
    }

    /// Sends the message that no more pages follow. Needed for a QEMU that waits for this message.
    ///
    /// # Errors
    /// [`MigrationError::Connection`].
    pub(crate) fn end(&self) -> Result<(), MigrationError> {
        let mut out = lock(&self.out);
        out.clear();
        put_preempt_end(&mut out);
        self.write(&out)
    }

    /// Shuts the connection down, which ends every wait for data on it.
    pub(crate) fn shut(&self) {
        self.stream.shutdown(Shutdown::Both);
    }

    fn write(&self, bytes: &[u8]) -> Result<(), MigrationError> {
        let sent = self.stream.send_parts(&[bytes], &mut IoScratch::new());
        sent.map_err(|source| broken("sending a page that the guest waits for", source))?;
        self.counters.add_bytes(bytes.len());
        Ok(())
    }
}

fn broken(doing: &'static str, source: std::io::Error) -> MigrationError {
    MigrationError::Connection {
        channel: Channel::Main,
        doing,
        source,
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    const PAGE: PageRecords<'_> = PageRecords {
        block: 0,
        zero: &[0],
        normal: &[],
        content: &[],
    };

    #[test]
    fn a_destination_that_read_one_page_counts_as_reading() {
        let (stream, other) = Stream::pair().unwrap();
        let channel = PreemptOut::new(stream, Arc::default());
        channel.pages("pc.ram", &PAGE).unwrap();
        assert!(!channel.is_read());
        other.read_some(&mut [0; 64]).unwrap();
        channel.pages("pc.ram", &PAGE).unwrap();
        assert!(channel.is_read());
        let being_written = lock(&channel.out);
        assert!(channel.is_read());
        drop(being_written);

        let (stream, other) = Stream::pair().unwrap();
        let channel = PreemptOut::new(stream, Arc::default());
        channel.is_used.store(true, Ordering::Release);
        let being_written = lock(&channel.out);
        assert!(!channel.is_read(), "nothing of it is in the socket yet");
        drop((being_written, other));
        assert!(channel.is_read(), "it never will be");
    }

    #[test]
    fn no_page_is_sent_to_an_unread_preempt_channel_and_an_unread_one_is_detected() {
        let open = || {
            let (stream, other) = Stream::pair().unwrap();
            (PreemptOut::new(stream, Arc::default()), other)
        };
        let (unused, other) = open();
        assert!(unused.is_taken().unwrap());
        drop(other);
        assert!(!unused.is_taken().unwrap());
        let (used, other) = open();
        used.pages("pc.ram", &PAGE).unwrap();
        assert!(used.is_taken().unwrap());
        drop(other);
        assert!(used.is_taken().is_err());
    }
}

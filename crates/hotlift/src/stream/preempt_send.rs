//! The connection on which a QEMU takes pages that its guest waits for, and nothing else (capability `postcopy-preempt`):
//! records of pages without sections around them.

use std::net::Shutdown;
use std::sync::{Arc, Mutex};

use hotlift_mem::PAGE_SIZE;
use hotlift_mem::sock::IoScratch;
use hotlift_wire::main_channel::postcopy::{put_preempt_end, put_preempt_page};

use crate::error::{Channel, MigrationError};
use crate::figures::Counters;
use crate::stream::main_send::PageRecords;
use crate::threads::lock;
use crate::transport::Stream;

/// Bytes of a record beside its page at most: place, length and name of the RAM block.
const RECORD_HEAD: usize = 8 + 1 + 255;

/// The connection.
pub(crate) struct PreemptSend {
    stream: Stream,
    counters: Arc<Counters>,
    /// One record after the other, in one buffer.
    out: Mutex<Vec<u8>>,
}

impl PreemptSend {
    /// One whose bytes `counters` count.
    pub(crate) fn new(stream: Stream, counters: Arc<Counters>) -> Self {
        Self {
            stream,
            counters,
            out: Mutex::default(),
        }
    }

    /// Sends pages of the RAM block called `block`.
    pub(crate) fn pages(&self, block: &str, pages: &PageRecords<'_>) -> Result<(), MigrationError> {
        let mut out = lock(&self.out);
        out.clear();
        out.reserve(pages.content.len() + (pages.zero.len() + pages.normal.len()) * RECORD_HEAD);
        let zero = pages.zero.iter().map(|offset| (offset, None));
        let (contents, _) = pages.content.as_chunks::<PAGE_SIZE>();
        let normal = pages.normal.iter().zip(contents.iter().map(Some));
        for (offset, content) in zero.chain(normal) {
            put_preempt_page(block, *offset, content, &mut out)
                .map_err(MigrationError::main_wire)?;
        }
        self.write(&out)
    }

    /// Says that no more comes, to a QEMU that waits for this word.
    pub(crate) fn end(&self) -> Result<(), MigrationError> {
        let mut out = lock(&self.out);
        out.clear();
        put_preempt_end(&mut out);
        self.write(&out)
    }

    /// Ends the connection, and every wait for it.
    pub(crate) fn shutdown(&self) {
        self.stream.shutdown(Shutdown::Both);
    }

    fn write(&self, bytes: &[u8]) -> Result<(), MigrationError> {
        let sent = self.stream.send_parts(&[bytes], &mut IoScratch::new());
        sent.map_err(|source| MigrationError::Connection {
            channel: Channel::Main,
            doing: "sending a page that the guest waits for",
            source,
        })?;
        self.counters.add_bytes(bytes.len());
        Ok(())
    }
}

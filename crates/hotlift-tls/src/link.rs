//! State that the two directions of a connection share.

use std::sync::atomic::{AtomicBool, Ordering};
use std::sync::{Mutex, MutexGuard};

use rustls::kernel::KernelConnection;

use crate::cipher::Cipher;
use crate::error::RecordError;
use crate::record::{MAX_RECORD, OVERHEAD, RECORD_PLAINTEXT};
use hotlift_mem::lock;

/// Buffer size of the direction with bulk data: three records of [`crate::RECORD_PLAINTEXT`], with overhead. Buffers of two
/// records took 5 % more CPU time on both sides; one of four does not fit into 64 KiB with [`SMALL_BUFFER`].
pub(crate) const BULK_BUFFER: usize = 3 * (RECORD_PLAINTEXT + OVERHEAD);

/// Buffer size of a direction without bulk data: the longest record of any peer.
pub(crate) const SMALL_BUFFER: usize = MAX_RECORD;

/// Limit of a connection's buffers, in bytes, for both directions together. The keys and the peer's certificates need
/// some more kilobytes; all fit into 64 KiB.
pub const CONNECTION_MEMORY: usize = BULK_BUFFER + SMALL_BUFFER;

const _: () = assert!(CONNECTION_MEMORY + (4 << 10) <= 64 << 10);

/// Source of the next keys: rustls, which keeps the secrets.
pub(crate) trait Keys: Send {
    /// Returns the next sending key.
    fn next_to_send(&mut self) -> Result<Cipher, RecordError>;

    /// Returns the next receiving key.
    fn next_to_receive(&mut self) -> Result<Cipher, RecordError>;
}

impl<Data: Send> Keys for KernelConnection<Data> {
    fn next_to_send(&mut self) -> Result<Cipher, RecordError> {
        Cipher::new(self.update_tx_secret().map_err(|_| RecordError::Keys)?)
    }

    fn next_to_receive(&mut self) -> Result<Cipher, RecordError> {
        Cipher::new(self.update_rx_secret().map_err(|_| RecordError::Keys)?)
    }
}

/// State of a connection that its reader and its writer share.
pub(crate) struct Link {
    keys: Mutex<Box<dyn Keys>>,
    /// True if the peer requested a KeyUpdate (RFC 8446, section 4.6.3).
    update_is_wanted: AtomicBool,
    /// True if a direction uses [`BULK_BUFFER`].
    has_bulk: AtomicBool,
}

impl std::fmt::Debug for Link {
    fn fmt(&self, f: &mut std::fmt::Formatter<'_>) -> std::fmt::Result {
        // Omits the keys.
        f.debug_struct("Link").finish_non_exhaustive()
    }
}

impl Link {
    pub(crate) fn new(keys: impl Keys + 'static) -> Self {
        Self {
            keys: Mutex::new(Box::new(keys)),
            update_is_wanted: AtomicBool::new(false),
            has_bulk: AtomicBool::new(false),
        }
    }

    /// Returns the next sending key.
    pub(crate) fn next_to_send(&self) -> Result<Cipher, RecordError> {
        self.keys().next_to_send()
    }

    /// Returns the next receiving key.
    pub(crate) fn next_to_receive(&self) -> Result<Cipher, RecordError> {
        self.keys().next_to_receive()
    }

    fn keys(&self) -> MutexGuard<'_, Box<dyn Keys>> {
        lock(&self.keys)
    }

    /// Records the peer's request for a KeyUpdate.
    pub(crate) fn want_update(&self) {
        self.update_is_wanted.store(true, Ordering::Relaxed);
    }

    /// Returns true if a KeyUpdate was requested, and clears the request.
    pub(crate) fn take_wanted_update(&self) -> bool {
        // The load avoids writing to the cache line of the other thread.
        self.update_is_wanted.load(Ordering::Relaxed)
            && self.update_is_wanted.swap(false, Ordering::Relaxed)
    }

    /// Returns the buffer limit of a direction with bulk data: [`BULK_BUFFER`] for the first direction that calls this, and
    /// [`SMALL_BUFFER`] for the second one.
    pub(crate) fn claim_bulk(&self) -> usize {
        match self.has_bulk.swap(true, Ordering::Relaxed) {
            false => BULK_BUFFER,
            true => SMALL_BUFFER,
        }
    }
}

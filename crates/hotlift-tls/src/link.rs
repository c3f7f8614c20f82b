//! What the two directions of a connection share.

use std::sync::atomic::{AtomicBool, Ordering};
use std::sync::{Mutex, MutexGuard};

use rustls::kernel::KernelConnection;

use crate::cipher::Cipher;
use crate::error::RecordError;
use crate::record::{MAX_RECORD, OVERHEAD, RECORD_PLAINTEXT};
use hotlift_mem::lock;

/// Buffer of the direction that has much to say: three records of [`crate::RECORD_PLAINTEXT`], each with what seals it. Two
/// to a system call took 5 % more of both sides' CPU; a fourth does not fit into 64 KiB with [`SMALL_BUFFER`].
pub(crate) const BULK_BUFFER: usize = 3 * (RECORD_PLAINTEXT + OVERHEAD);

/// Buffer of the other one: a record of any peer's.
pub(crate) const SMALL_BUFFER: usize = MAX_RECORD;

/// Bytes that a connection takes at most: the buffers of both directions. The keys and the other side's certificates, some
/// kilobytes, come on top; both fit 64 KiB.
pub const CONNECTION_MEMORY: usize = BULK_BUFFER + SMALL_BUFFER;

const _: () = assert!(CONNECTION_MEMORY + (4 << 10) <= 64 << 10);

/// What makes each next key: rustls, which keeps the secrets for it.
pub(crate) trait Keys: Send {
    /// The next one of what this side sends.
    fn next_to_send(&mut self) -> Result<Cipher, RecordError>;

    /// The next one of what it receives.
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

/// Of one connection, shared by its reader and its writer.
pub(crate) struct Link {
    keys: Mutex<Box<dyn Keys>>,
    /// The other side has asked for a KeyUpdate of ours (RFC 8446, section 4.6.3).
    update_is_wanted: AtomicBool,
    /// A direction has taken [`BULK_BUFFER`].
    has_bulk: AtomicBool,
}

impl std::fmt::Debug for Link {
    fn fmt(&self, f: &mut std::fmt::Formatter<'_>) -> std::fmt::Result {
        // Nothing of the keys.
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

    /// The next key of what this side sends.
    pub(crate) fn next_to_send(&self) -> Result<Cipher, RecordError> {
        self.keys().next_to_send()
    }

    /// The next key of what it receives.
    pub(crate) fn next_to_receive(&self) -> Result<Cipher, RecordError> {
        self.keys().next_to_receive()
    }

    fn keys(&self) -> MutexGuard<'_, Box<dyn Keys>> {
        lock(&self.keys)
    }

    /// The reader has met a request.
    pub(crate) fn want_update(&self) {
        self.update_is_wanted.store(true, Ordering::Relaxed);
    }

    /// Whether the writer owes an update; it does no longer.
    pub(crate) fn take_wanted_update(&self) -> bool {
        // The load spares the other thread's cache line.
        self.update_is_wanted.load(Ordering::Relaxed)
            && self.update_is_wanted.swap(false, Ordering::Relaxed)
    }

    /// How large a buffer may become whose direction turns out to have much to say.
    pub(crate) fn claim_bulk(&self) -> usize {
        match self.has_bulk.swap(true, Ordering::Relaxed) {
            false => BULK_BUFFER,
            true => SMALL_BUFFER,
        }
    }
}

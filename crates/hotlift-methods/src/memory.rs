//! Limit of the memory that a peer can make its receiver allocate.
//!
//! Every allocation whose size the peer chooses is counted before it is made. Memory that the receiver needs anyway is not
//! counted.

use std::sync::Arc;
use std::sync::atomic::{AtomicUsize, Ordering};

/// Counter of allocated bytes, with a limit. Clones share the counter and the limit.
#[derive(Debug, Clone)]
pub struct MemoryLimit(Arc<Counts>);

#[derive(Debug)]
struct Counts {
    limit: AtomicUsize,
    used: AtomicUsize,
}

/// Error: a request exceeds the memory limit.
#[derive(Debug, Clone, Copy, PartialEq, Eq, thiserror::Error)]
#[error(
    "{wanted} more bytes, with {used} in use, exceed the memory limit of {limit} bytes (raise --memory-limit)"
)]
pub struct OverMemoryLimit {
    /// Bytes of the rejected request.
    pub wanted: usize,
    /// Bytes in use at that time.
    pub used: usize,
    /// The limit, in bytes.
    pub limit: usize,
}

impl MemoryLimit {
    /// Returns a limit of `limit` bytes, with no bytes in use.
    #[must_use]
    pub fn new(limit: usize) -> Self {
        Self(Arc::new(Counts {
            limit: AtomicUsize::new(limit),
            used: AtomicUsize::new(0),
        }))
    }

    /// Raises the limit by `bytes`.
    pub fn raise(&self, bytes: usize) {
        self.0.limit.fetch_add(bytes, Ordering::Relaxed);
    }

    /// Returns the number of bytes in use.
    #[must_use]
    pub fn used(&self) -> usize {
        self.0.used.load(Ordering::Relaxed)
    }

    /// Counts `bytes` bytes as in use, before they are allocated.
    ///
    /// # Errors
    /// [`OverMemoryLimit`] if the limit would be exceeded. Then nothing is counted.
    pub fn take(&self, bytes: usize) -> Result<(), OverMemoryLimit> {
        let limit = self.0.limit.load(Ordering::Relaxed);
        let more = |used: usize| used.checked_add(bytes).filter(|sum| *sum <= limit);
        let taken = self
            .0
            .used
            .fetch_update(Ordering::Relaxed, Ordering::Relaxed, more);
        taken.map(|_| ()).map_err(|used| OverMemoryLimit {
            wanted: bytes,
            used,
            limit,
        })
    }

    /// Counts `bytes` bytes as no longer in use.
    pub fn give_back(&self, bytes: usize) {
        self.0.used.fetch_sub(bytes, Ordering::Relaxed);
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn what_does_not_fit_takes_nothing_and_what_is_given_back_can_be_taken() {
        let memory = MemoryLimit::new(100);
        let other = memory.clone();
        memory.take(60).unwrap();
        let over = OverMemoryLimit {
            wanted: 41,
            used: 60,
            limit: 100,
        };
        assert_eq!(other.take(41), Err(over));
        assert!(other.take(usize::MAX).is_err());
        other.take(40).unwrap();
        memory.give_back(60);
        assert_eq!(other.used(), 40);
        memory.raise(1);
        other.take(61).unwrap();
        assert!(memory.take(1).is_err());
    }
}

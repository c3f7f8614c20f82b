//! How much memory a peer may make its receiver take.
//!
//! What a peer can choose the size of is counted before it is allocated, by all who allocate for that peer;
//! what the receiver has anyway is not.

use std::sync::Arc;
use std::sync::atomic::{AtomicUsize, Ordering};

/// A count of bytes with a limit. Clones share both.
#[derive(Debug, Clone)]
pub struct MemoryLimit(Arc<Counts>);

#[derive(Debug)]
struct Counts {
    limit: AtomicUsize,
    used: AtomicUsize,
}

/// Bytes that do not fit.
#[derive(Debug, Clone, Copy, PartialEq, Eq, thiserror::Error)]
#[error(
    "{wanted} bytes do not fit beside {used} in the {limit} bytes that a source may choose to take \
     (raise --memory-limit)"
)]
pub struct OverMemoryLimit {
    /// Bytes asked for.
    pub wanted: usize,
    /// Bytes taken at that time.
    pub used: usize,
    /// All bytes that there are.
    pub limit: usize,
}

impl MemoryLimit {
    /// Nothing is taken of `limit` bytes.
    #[must_use]
    pub fn new(limit: usize) -> Self {
        Self(Arc::new(Counts {
            limit: AtomicUsize::new(limit),
            used: AtomicUsize::new(0),
        }))
    }

    /// Lets `bytes` more be taken.
    pub fn raise(&self, bytes: usize) {
        self.0.limit.fetch_add(bytes, Ordering::Relaxed);
    }

    /// Bytes that are taken.
    #[must_use]
    pub fn used(&self) -> usize {
        self.0.used.load(Ordering::Relaxed)
    }

    /// Takes `bytes`.
    ///
    /// # Errors
    /// [`OverMemoryLimit`]; nothing is taken then.
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

    /// Gives back `bytes` of those taken.
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

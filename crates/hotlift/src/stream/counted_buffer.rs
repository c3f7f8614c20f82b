//! Buffers whose size depends on the peer's data. A memory limit protects this process.

use std::ops::Deref;

use hotlift_methods::{MemoryLimit, OverMemoryLimit};

/// Buffer whose size counts towards a [`MemoryLimit`].
#[derive(Debug)]
pub(crate) struct CountedBuffer {
    bytes: Vec<u8>,
    counted: usize,
    limit: MemoryLimit,
}

impl CountedBuffer {
    /// Creates an empty buffer. Its size counts towards `limit`.
    pub(crate) fn new(limit: &MemoryLimit) -> Self {
        Self::with_own(Vec::new(), limit)
    }

    /// Creates a buffer from `bytes`, whose size the receiver has chosen. Only later growth counts towards `limit`.
    pub(crate) fn with_own(bytes: Vec<u8>, limit: &MemoryLimit) -> Self {
        Self {
            bytes,
            counted: 0,
            limit: limit.clone(),
        }
    }

    /// Increases the capacity to `room` bytes in total, if it is smaller.
    fn make_room(&mut self, room: usize) -> Result<(), OverMemoryLimit> {
        let capacity = self.bytes.capacity();
        if room <= capacity {
            return Ok(());
        }
        let more = room - capacity;
        self.limit.take(more)?;
        self.counted += more;
        self.bytes.reserve_exact(capacity + more - self.bytes.len());
        Ok(())
    }

    /// Increases the length to `length` bytes, if it is smaller. New bytes are zero.
    ///
    /// # Errors
    /// The additional bytes exceed the memory limit.
    pub(crate) fn grow_to(&mut self, length: usize) -> Result<(), OverMemoryLimit> {
        if length > self.bytes.len() {
            self.make_room(length)?;
            self.bytes.resize(length, 0);
        }
        Ok(())
    }

    pub(crate) fn as_mut(&mut self) -> &mut [u8] {
        &mut self.bytes
    }
}

impl Deref for CountedBuffer {
    type Target = [u8];

    fn deref(&self) -> &[u8] {
        &self.bytes
    }
}

impl Drop for CountedBuffer {
    fn drop(&mut self) {
        self.limit.give_back(self.counted);
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn reserved_capacity_is_counted_until_the_buffer_is_dropped() {
        let limit = MemoryLimit::new(2000);
        let mut buffer = CountedBuffer::with_own(vec![7; 100], &limit);
        buffer.grow_to(100).unwrap();
        assert_eq!(limit.used(), 0, "its own");
        buffer.grow_to(1100).unwrap();
        assert_eq!((buffer.len(), limit.used()), (1100, 1000));
        assert!(buffer.grow_to(2101).is_err());
        assert_eq!((buffer.len(), buffer[99], buffer[1099]), (1100, 7, 0));
        drop(buffer);
        assert_eq!(limit.used(), 0);
    }
}

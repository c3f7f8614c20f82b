//! Mutexes without poisoning.

pub(crate) use hotlift_mem::lock;

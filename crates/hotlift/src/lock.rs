//! Locks a mutex, also after a thread has panicked with the lock.

pub(crate) use hotlift_mem::lock;

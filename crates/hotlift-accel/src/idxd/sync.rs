//! Types that the threads of [`zero`](super::zero) and of the [model](super::model) share, and their clock. They are
//! re-exported here, so that `tests/schedules.rs` can replace the scheduler below both.

pub(crate) use std::sync::atomic::{AtomicU32, AtomicU64, AtomicUsize, Ordering};
pub(crate) use std::sync::{Arc, Condvar, Mutex, MutexGuard, OnceLock, PoisonError};
pub(crate) use std::time::Instant;

pub(crate) use std::hint::spin_loop;

//! What the threads of [`zero`](crate::zero) and of the [model](crate::model) share, and their clock. All of it
//! comes through here, so that `tests/schedules.rs` can put a scheduler of its own under both.

pub(crate) use std::sync::atomic::{AtomicU32, AtomicU64, AtomicUsize, Ordering};
pub(crate) use std::sync::{Arc, Condvar, Mutex, MutexGuard, OnceLock, PoisonError};
pub(crate) use std::time::Instant;

pub(crate) use std::hint::spin_loop;

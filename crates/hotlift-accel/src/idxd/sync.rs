//! Synchronisation types and the clock of [`zero`](super::zero) and of the [model](super::model). Both import them from here:
//! `tests/schedules.rs` replaces this module to control the order of the threads.

pub(crate) use std::sync::atomic::{AtomicU32, AtomicU64, AtomicUsize, Ordering};
pub(crate) use std::sync::{Arc, Condvar, Mutex, MutexGuard, OnceLock, PoisonError};
pub(crate) use std::time::Instant;

pub(crate) use std::hint::spin_loop;

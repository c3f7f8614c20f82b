//! Counts the memory that libzstd's decoder allocates.
//!
//! libzstd allocates a frame's window after it has read the frame's header, and frees the previous window. All allocations of a
//! context use this module, so the count is exact even if a frame is split over packets.

use std::ffi::c_void;
use std::ptr::{self, NonNull};

use zstd_sys::ZSTD_customMem;

use crate::memory::{MemoryLimit, OverMemoryLimit};

/// Bytes before each allocated block, in which its counted size is stored. 16 bytes keep the alignment of `malloc`.
const HEAD: usize = 16;

/// Memory count of one libzstd context. It must be dropped after the context. Only one thread at a time may use the context and
/// this value.
pub(super) struct Memory(NonNull<State>);

struct State {
    /// Limit that counts allocations, from the moment it is set. Earlier allocations are the context's own tables: the peer
    /// does not choose their size.
    limit: Option<MemoryLimit>,
    refused: Option<OverMemoryLimit>,
}

// SAFETY: the state is owned by this value and the context beside it, which move together.
unsafe impl Send for Memory {}

impl Memory {
    pub(super) fn new() -> Self {
        let state = Box::new(State {
            limit: None,
            refused: None,
        });
        Self(NonNull::from(Box::leak(state)))
    }

    /// Returns the allocator for a context, which must be freed before this value is dropped.
    pub(super) fn custom(&self) -> ZSTD_customMem {
        ZSTD_customMem {
            customAlloc: Some(allocate),
            customFree: Some(free),
            opaque: self.0.as_ptr().cast(),
        }
    }

    pub(super) fn limit(&mut self, limit: &MemoryLimit) {
        // SAFETY: the state lives as long as this value, and the context is not in a call (`&mut self`).
        unsafe { self.0.as_mut() }.limit = Some(limit.clone());
    }

    /// Returns the allocation that the limit refused since the last call; `None` if none was refused.
    pub(super) fn refused(&mut self) -> Option<OverMemoryLimit> {
        // SAFETY: as in `limit`.
        unsafe { self.0.as_mut() }.refused.take()
    }
}

impl Drop for Memory {
    fn drop(&mut self) {
        // SAFETY: made by `Box::leak`, and dropped only here.
        drop(unsafe { Box::from_raw(self.0.as_ptr()) });
    }
}

/// Implements `ZSTD_allocFunction`.
///
/// # Safety
///
/// `opaque` is the state of [`Memory::custom`], used exclusively by this call.
unsafe extern "C" fn allocate(opaque: *mut c_void, size: usize) -> *mut c_void {
    // SAFETY: guaranteed by the caller.
    let state = unsafe { &mut *opaque.cast::<State>() };
    let Some(all) = size.checked_add(HEAD) else {
        return ptr::null_mut();
    };
    let mut counted = 0;
    if let Some(limit) = &state.limit {
        if let Err(over) = limit.take(all) {
            state.refused = Some(over);
            return ptr::null_mut();
        }
        counted = all;
    }
    // SAFETY: no preconditions; null is checked.
    let block = unsafe { libc::malloc(all) };
    if block.is_null() {
        if let Some(limit) = &state.limit {
            limit.give_back(counted);
        }
        return block;
    }
    // SAFETY: the block has room for its head, and `malloc` aligns it for a `usize`.
    unsafe {
        block.cast::<usize>().write(counted);
        block.byte_add(HEAD)
    }
}

/// Implements `ZSTD_freeFunction`.
///
/// # Safety
///
/// As for [`allocate`]; `address` is null or was returned by it, and is freed only once.
unsafe extern "C" fn free(opaque: *mut c_void, address: *mut c_void) {
    if address.is_null() {
        return;
    }
    // SAFETY: guaranteed by the caller: the state is live, and the block begins `HEAD` bytes earlier.
    unsafe {
        let block = address.byte_sub(HEAD);
        let counted = block.cast::<usize>().read();
        if let Some(limit) = &(*opaque.cast::<State>()).limit {
            limit.give_back(counted);
        }
        libc::free(block);
    }
}

//! Memory of libzstd's decoder, counted.
//!
//! The library takes a frame's window when it has read the frame's header, and frees the one before. Every
//! allocation of a context goes through here, so that what is counted is what there is, whatever a
//! frame says and in whatever pieces it comes.

use std::ffi::c_void;
use std::ptr::{self, NonNull};

use zstd_sys::ZSTD_customMem;

use crate::memory::{MemoryLimit, OverMemoryLimit};

/// Bytes before each block, for its size: as many as keep the alignment of `malloc`.
const HEAD: usize = 16;

/// What one context's memory is counted with. It has one owner, who ends it behind the context, and is
/// used by one thread at a time, as the context is.
pub(super) struct Memory(NonNull<State>);

struct State {
    /// What is counted, from when it is set on: a context's own tables are no peer's choice.
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

    /// What a context is made with. It must end before this value does.
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

    /// What was refused since the last call.
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

/// `ZSTD_allocFunction`.
///
/// # Safety
///
/// `opaque` is the state of [`Memory::custom`], which nobody else uses during the call.
unsafe extern "C" fn allocate(opaque: *mut c_void, size: usize) -> *mut c_void {
    // SAFETY: the caller's promise.
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

/// `ZSTD_freeFunction`.
///
/// # Safety
///
/// As [`allocate`]; `address` is null or from there, and not freed before.
unsafe extern "C" fn free(opaque: *mut c_void, address: *mut c_void) {
    if address.is_null() {
        return;
    }
    // SAFETY: the caller's promise: the state is there, and the block begins a head before.
    unsafe {
        let block = address.byte_sub(HEAD);
        let counted = block.cast::<usize>().read();
        if let Some(limit) = &(*opaque.cast::<State>()).limit {
            limit.give_back(counted);
        }
        libc::free(block);
    }
}

//! Decodes frames to pages, in both framings.
//!
//! ```text
//!              payload is exactly one frame: decoded in one call, directly into the pages
//!              +------------+
//!              v            |
//!          BETWEEN FRAMES --+------ payload begins a frame that it does not end ------> IN A FRAME
//!              ^                                                                            |
//!              +----- payload ends the frame -----------------------------------------------+
//! ```
//!
//! While a frame is open, libzstd copies all output through a window buffer. A frame that is exactly one packet needs no
//! buffer, because the pages are its window. That is the main reason why Hotlift's packets cost less time to receive than
//! QEMU's.

use std::ptr::NonNull;

use hotlift_mem::GuestRun;
use zstd_sys::{
    ZSTD_DCtx, ZSTD_DCtx_setParameter, ZSTD_createDCtx_advanced, ZSTD_dParameter,
    ZSTD_decompressDCtx, ZSTD_decompressStream, ZSTD_findFrameCompressedSize, ZSTD_freeDCtx,
    ZSTD_getFrameContentSize, ZSTD_inBuffer, ZSTD_outBuffer,
};

use super::memory::Memory;
use super::{NAME, WINDOW_LOG_MAX, check, failed};
use crate::target::{Extent, Target};
use crate::{Decode, MemoryLimit, MethodError};

/// A channel's decompressor.
pub(super) struct Decoder {
    context: NonNull<ZSTD_DCtx>,
    state: State,
    /// Number of input bytes that the streaming decoder expects next, from its last call.
    expected_input: usize,
    /// Buffer for the pages of a closed frame if they are not contiguous. Grows to the largest packet.
    scratch: Vec<u8>,
    /// Declared after the context, which must be dropped first.
    memory: Memory,
}

#[derive(Debug, Clone, Copy, PartialEq, Eq)]
enum State {
    BetweenFrames,
    InFrame,
    Failed,
}

/// libzstd's hint that the frame is complete.
const FRAME_ENDED: usize = 0;

/// libzstd's hint between two blocks, where a flush leaves the stream: it expects a block header (RFC 8878, 3.1.1.2) and has
/// read none of it. In a block or another header the hint is larger.
const BLOCK_HEADER: usize = 3;

// SAFETY: the context is owned by this value alone, and libzstd ties none to a thread.
unsafe impl Send for Decoder {}

impl Decoder {
    pub(super) fn new() -> Result<Self, MethodError> {
        let memory = Memory::new();
        // SAFETY: the functions are a pair for this state, which outlives the context; null is checked.
        let context = NonNull::new(unsafe { ZSTD_createDCtx_advanced(memory.custom()) })
            .ok_or_else(|| failed("make a decompression context", "out of memory"))?;
        let decoder = Self {
            context,
            state: State::BetweenFrames,
            expected_input: 0,
            scratch: Vec::new(),
            memory,
        };
        // SAFETY: the context is live and owned.
        let set = unsafe {
            ZSTD_DCtx_setParameter(
                context.as_ptr(),
                ZSTD_dParameter::ZSTD_d_windowLogMax,
                i32::from(WINDOW_LOG_MAX),
            )
        };
        check(set).map_err(|reason| failed("limit the window", reason))?;
        Ok(decoder)
    }

    fn packet(&mut self, payload: &[u8], target: Target<'_>) -> Result<(), MethodError> {
        if self.state == State::BetweenFrames && is_one_frame(payload) {
            self.closed_frame(payload, target)
        } else {
            self.open_frame(payload, target)
        }
    }

    fn closed_frame(&mut self, payload: &[u8], target: Target<'_>) -> Result<(), MethodError> {
        match target.contiguous() {
            Some(extent) => self.frame_into(payload, extent),
            None => {
                // Decoding to the scratch with a copy takes 14 % more time. Decoding run by run through the library's own
                // window takes as much; a copy with stores past the cache takes more.
                let bytes = target.bytes();
                if self.scratch.len() < bytes {
                    self.scratch.resize(bytes, 0);
                }
                let extent = Extent {
                    ptr: self.scratch.as_mut_ptr(),
                    len: bytes,
                };
                self.frame_into(payload, extent)?;
                target.scatter(&self.scratch[..bytes]);
                Ok(())
            }
        }
    }

    /// Decodes `payload`, which is exactly one frame, into all of `extent`.
    fn frame_into(&mut self, payload: &[u8], extent: Extent) -> Result<(), MethodError> {
        if let Some(content) = content_size(payload)
            && usize::try_from(content).map_or(true, |content| content > extent.len)
        {
            return Err(MethodError::long(NAME, payload, extent.len));
        }
        // SAFETY: the context is live and exclusive (`&mut self`); the extent is memory that this call may write for its whole
        // length: guest runs or our scratch.
        let written = check(unsafe {
            ZSTD_decompressDCtx(
                self.context.as_ptr(),
                extent.ptr.cast(),
                extent.len,
                payload.as_ptr().cast(),
                payload.len(),
            )
        })
        .map_err(damaged)?;
        if written < extent.len {
            return Err(MethodError::short(NAME, payload, extent.len, written));
        }
        Ok(())
    }

    fn open_frame(&mut self, payload: &[u8], target: Target<'_>) -> Result<(), MethodError> {
        let mut input = ZSTD_inBuffer {
            src: payload.as_ptr().cast(),
            size: payload.len(),
            pos: 0,
        };
        let mut got = 0;
        for extent in target.extents() {
            let written = self.stream(&mut input, extent)?;
            got += written;
            if written < extent.len {
                return Err(MethodError::short(NAME, payload, target.bytes(), got));
            }
        }
        // The pages are full. The rest of the payload may only be the end of a frame, without output. Any output byte is an
        // error.
        let mut beyond = [0u8; 1];
        let extent = Extent {
            ptr: beyond.as_mut_ptr(),
            len: beyond.len(),
        };
        if self.stream(&mut input, extent)? > 0 {
            return Err(MethodError::long(NAME, payload, target.bytes()));
        }
        if input.pos < input.size {
            return Err(MethodError::Leftover {
                method: NAME,
                payload: payload.len(),
                left: input.size - input.pos,
            });
        }
        if self.expected_input != FRAME_ENDED && self.expected_input != BLOCK_HEADER {
            return Err(MethodError::NotFlushed {
                method: NAME,
                payload: payload.len(),
            });
        }
        Ok(())
    }

    /// Decodes input into `extent` until the extent is full or the input is used up. Returns the bytes written.
    fn stream(&mut self, input: &mut ZSTD_inBuffer, extent: Extent) -> Result<usize, MethodError> {
        let mut output = ZSTD_outBuffer {
            dst: extent.ptr.cast(),
            size: extent.len,
            pos: 0,
        };
        while output.pos < output.size {
            let before = (input.pos, output.pos);
            // SAFETY: the context is live and exclusive (`&mut self`); `input` is a slice that outlives the call, and the
            // extent is memory that this call may write.
            let expected_input = check(unsafe {
                ZSTD_decompressStream(self.context.as_ptr(), &raw mut output, &raw mut *input)
            })
            .map_err(|reason| match self.memory.refused() {
                Some(source) => MethodError::Memory {
                    method: NAME,
                    source,
                },
                None => damaged(reason),
            })?;
            // No progress: libzstd has neither input nor buffered output. Such calls are errors of the caller, and their result
            // is undefined between frames. So they must not change the state.
            if (input.pos, output.pos) == before {
                break;
            }
            self.expected_input = expected_input;
            self.state = if expected_input == FRAME_ENDED {
                State::BetweenFrames
            } else {
                State::InFrame
            };
        }
        Ok(output.pos)
    }
}

impl Decode for Decoder {
    fn decode(&mut self, payload: &[u8], pages: &[GuestRun<'_>]) -> Result<(), MethodError> {
        if self.state == State::Failed {
            return Err(MethodError::Failed { method: NAME });
        }
        let result = self.packet(payload, Target::new(pages));
        if result.is_err() {
            self.state = State::Failed;
        }
        result
    }

    fn limit_memory(&mut self, limit: &MemoryLimit) {
        self.memory.limit(limit);
    }
}

impl Drop for Decoder {
    fn drop(&mut self) {
        // SAFETY: the context is live, and freed only here.
        unsafe { ZSTD_freeDCtx(self.context.as_ptr()) };
    }
}

/// Returns true if `payload` is exactly one frame. Reads block headers only.
fn is_one_frame(payload: &[u8]) -> bool {
    // SAFETY: reads the slice only.
    let size = unsafe { ZSTD_findFrameCompressedSize(payload.as_ptr().cast(), payload.len()) };
    check(size) == Ok(payload.len())
}

/// `ZSTD_CONTENTSIZE_ERROR`; only `ZSTD_CONTENTSIZE_UNKNOWN` is larger.
const CONTENT_SIZE_ERROR: u64 = u64::MAX - 1;

/// Returns the decoded size from a frame's header; `None` if the header has no size.
fn content_size(frame: &[u8]) -> Option<u64> {
    // SAFETY: reads the slice only.
    let size = unsafe { ZSTD_getFrameContentSize(frame.as_ptr().cast(), frame.len()) };
    (size < CONTENT_SIZE_ERROR).then_some(size)
}

fn damaged(reason: &'static str) -> MethodError {
    MethodError::Damaged {
        method: NAME,
        reason,
    }
}

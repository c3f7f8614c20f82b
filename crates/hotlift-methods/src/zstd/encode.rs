//! Encodes packets to frames.

use std::ptr::NonNull;

use zstd_sys::{
    ZSTD_CCtx, ZSTD_CCtx_setParameter, ZSTD_EndDirective, ZSTD_cParameter, ZSTD_compress2,
    ZSTD_compressBound, ZSTD_compressStream2, ZSTD_createCCtx, ZSTD_freeCCtx, ZSTD_getCParams,
    ZSTD_inBuffer, ZSTD_outBuffer,
};

use super::{NAME, check, failed};
use crate::{Encode, EncoderSettings, MethodError};

/// A channel's compressor. libzstd's context, with its tables, is kept for the whole migration.
pub(super) struct Encoder {
    context: NonNull<ZSTD_CCtx>,
    framing: Framing,
}

/// Minimum window of libzstd, in bytes (`ZSTD_WINDOWLOG_MIN`).
const WINDOW_MIN: usize = 1 << 10;

/// Number of packets in a frame: one, or all packets of a channel.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
enum Framing {
    /// One frame per packet. libzstd buffers no window at either end, and its tables have the size of the packet. But no match
    /// refers to an earlier packet.
    Closed,
    /// One frame per channel that is never ended, as in QEMU.
    Open,
}

/// Returns the framing of a level.
///
/// With closed frames, level 1 takes 0.80 of the time to write and to read: libzstd needs no window if it knows the size. Level
/// 1 loses 1 % of the ratio, because no match refers to an earlier packet. Higher levels lose more: 2.7 % of the ratio at level
/// 3, 4.5 % at 5, 7 % at 9 (nine Silesia files, 512 KiB a packet). Hotlift accepts a loss of at most 3 %.
fn framing(level: u8) -> Framing {
    if level <= 3 {
        Framing::Closed
    } else {
        Framing::Open
    }
}

// SAFETY: the context is owned by this value alone, and libzstd ties none to a thread.
unsafe impl Send for Encoder {}

impl Encoder {
    pub(super) fn new(settings: &EncoderSettings) -> Result<Self, MethodError> {
        let level = settings.level;
        // SAFETY: no preconditions; null is checked.
        let context = NonNull::new(unsafe { ZSTD_createCCtx() })
            .ok_or_else(|| failed("make a compression context", "out of memory"))?;
        let encoder = Self {
            context,
            framing: framing(level),
        };
        encoder.use_level(level.into())?;
        if encoder.framing == Framing::Open
            && let Some(window_log) = smaller_window(level, settings.window_max)
        {
            let window = ZSTD_cParameter::ZSTD_c_windowLog;
            encoder.set(window, window_log, "limit the window")?;
        }
        Ok(encoder)
    }

    fn use_level(&self, level: i32) -> Result<(), MethodError> {
        let parameter = ZSTD_cParameter::ZSTD_c_compressionLevel;
        self.set(parameter, level, "set the level")
    }

    fn set(
        &self,
        parameter: ZSTD_cParameter,
        value: i32,
        doing: &'static str,
    ) -> Result<(), MethodError> {
        // SAFETY: the context is live and owned.
        let set = unsafe { ZSTD_CCtx_setParameter(self.context.as_ptr(), parameter, value) };
        check(set).map_err(|reason| failed(doing, reason))?;
        Ok(())
    }

    fn closed_frame(&mut self, pages: &[u8], out: &mut Vec<u8>) -> Result<(), &'static str> {
        // SAFETY: the context is live and exclusive (`&mut self`); the source is a slice, and the destination is the vector's
        // own capacity.
        let written = check(unsafe {
            ZSTD_compress2(
                self.context.as_ptr(),
                out.as_mut_ptr().cast(),
                out.capacity(),
                pages.as_ptr().cast(),
                pages.len(),
            )
        })?;
        // SAFETY: libzstd wrote this number of bytes from the start, within the capacity.
        unsafe { out.set_len(written) };
        Ok(())
    }

    fn flush_into_frame(&mut self, pages: &[u8], out: &mut Vec<u8>) -> Result<(), &'static str> {
        let mut input = ZSTD_inBuffer {
            src: pages.as_ptr().cast(),
            size: pages.len(),
            pos: 0,
        };
        loop {
            let mut output = ZSTD_outBuffer {
                dst: out.as_mut_ptr().cast(),
                size: out.capacity(),
                pos: out.len(),
            };
            // SAFETY: as in `closed_frame`; `pos` is the filled part, so only free capacity is
            // written.
            let left = check(unsafe {
                ZSTD_compressStream2(
                    self.context.as_ptr(),
                    &raw mut output,
                    &raw mut input,
                    ZSTD_EndDirective::ZSTD_e_flush,
                )
            })?;
            // SAFETY: libzstd wrote up to `pos`, within the capacity.
            unsafe { out.set_len(output.pos) };
            if left == 0 && input.pos == input.size {
                return Ok(());
            }
            out.reserve(left.max(1));
        }
    }
}

/// Returns the log2 of the window that `most` bytes permit; `None` if the level's window is not larger.
fn smaller_window(level: u8, most: usize) -> Option<i32> {
    // SAFETY: a pure function; size 0 means unknown.
    let levels = unsafe { ZSTD_getCParams(level.into(), 0, 0) }.windowLog;
    let most = most.max(WINDOW_MIN).ilog2();
    (most < levels).then(|| most.cast_signed())
}

impl Encode for Encoder {
    fn encode(&mut self, pages: &[u8], out: &mut Vec<u8>) -> Result<(), MethodError> {
        crate::check::whole_pages(NAME, pages)?;
        out.clear();
        // SAFETY: a pure function of the size.
        out.reserve(unsafe { ZSTD_compressBound(pages.len()) });
        match self.framing {
            Framing::Closed => self.closed_frame(pages, out),
            Framing::Open => self.flush_into_frame(pages, out),
        }
        .map_err(|reason| failed("compress a packet", reason))
    }

    /// Accepts levels from -7 on; libzstd replaces a level that it lacks by the nearest one. From this call on, each packet is
    /// a closed frame.
    fn set_level(&mut self, level: i8) -> Result<(), MethodError> {
        self.framing = Framing::Closed;
        self.use_level(level.into())
    }
}

impl Drop for Encoder {
    fn drop(&mut self) {
        // SAFETY: the context is live, and freed only here.
        unsafe { ZSTD_freeCCtx(self.context.as_ptr()) };
    }
}

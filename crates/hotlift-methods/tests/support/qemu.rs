//! Unmodified zlib and zstd, called as QEMU's multifd code calls them.

use std::ffi::c_int;

use hotlift_mem::PAGE_SIZE;
use libz_sys as z;
use zstd_sys as zs;

/// QEMU's limit of a payload: twice the packet.
pub const PAYLOAD_LIMIT: usize = 2 * 128 * PAGE_SIZE;

fn stream() -> Box<z::z_stream> {
    extern "C" fn alloc(_: z::voidpf, items: z::uInt, size: z::uInt) -> z::voidpf {
        // SAFETY: calloc has no preconditions.
        unsafe { libc::calloc(items as usize, size as usize) }
    }
    extern "C" fn free(_: z::voidpf, memory: z::voidpf) {
        // SAFETY: zlib frees what `alloc` gave it.
        unsafe { libc::free(memory) }
    }
    Box::new(z::z_stream {
        next_in: std::ptr::null_mut(),
        avail_in: 0,
        total_in: 0,
        next_out: std::ptr::null_mut(),
        avail_out: 0,
        total_out: 0,
        msg: std::ptr::null_mut(),
        state: std::ptr::null_mut(),
        zalloc: alloc,
        zfree: free,
        opaque: std::ptr::null_mut(),
        data_type: 0,
        adler: 0,
        reserved: 0,
    })
}

/// `sizeof(z_stream)` on 64-bit systems, as the init calls require it.
const STREAM_SIZE: c_int = 112;
const _: () = assert!(size_of::<z::z_stream>() == 112);

/// Returns a length in zlib's type.
fn length(bytes: &[u8]) -> z::uInt {
    z::uInt::try_from(bytes.len()).expect("buffers are small")
}

/// Decodes the first stream of `input` by stock zlib; returns its content, and the bytes of input used. The window is zlib's
/// `windowBits`: negative for raw deflate, above 15 for gzip.
pub fn inflate(input: &[u8], window: c_int) -> (Vec<u8>, usize) {
    let mut stream = stream();
    let mut out = vec![0; PAYLOAD_LIMIT];
    stream.next_in = input.as_ptr().cast_mut();
    stream.avail_in = length(input);
    stream.next_out = out.as_mut_ptr();
    stream.avail_out = length(&out);
    // SAFETY: the stream is set up as zlib asks, and both slices outlive it.
    let code = unsafe {
        let version = z::zlibVersion();
        assert_eq!(
            z::inflateInit2_(&raw mut *stream, window, version, STREAM_SIZE),
            z::Z_OK
        );
        let code = z::inflate(&raw mut *stream, z::Z_FINISH);
        z::inflateEnd(&raw mut *stream);
        code
    };
    assert_eq!(code, z::Z_STREAM_END, "a whole stream");
    let left = |avail: z::uInt| usize::try_from(avail).expect("64 bits");
    out.truncate(out.len() - left(stream.avail_out));
    (out, input.len() - left(stream.avail_in))
}

/// Stock zlib, compressing page by page into one stream, flushed at the packet's end.
pub struct ZlibWriter {
    stream: Box<z::z_stream>,
    flush: c_int,
}

impl ZlibWriter {
    pub fn new(level: u8, flush: c_int) -> Self {
        let mut stream = stream();
        // SAFETY: the stream is set up as zlib asks.
        let code = unsafe {
            z::deflateInit_(
                &raw mut *stream,
                level.into(),
                z::zlibVersion(),
                STREAM_SIZE,
            )
        };
        assert_eq!(code, z::Z_OK);
        Self { stream, flush }
    }

    pub fn packet(&mut self, pages: &[u8]) -> Vec<u8> {
        self.packet_flushed_by(pages, self.flush)
    }

    pub fn packet_flushed_by(&mut self, pages: &[u8], end: c_int) -> Vec<u8> {
        let mut out = vec![0; PAYLOAD_LIMIT];
        let len = self.write(pages, end, &mut out);
        out.truncate(len);
        out
    }

    /// Compresses into `out`; returns the bytes written.
    pub fn write(&mut self, pages: &[u8], end: c_int, out: &mut [u8]) -> usize {
        self.stream.next_out = out.as_mut_ptr();
        self.stream.avail_out = length(out);
        let last = pages.len() / PAGE_SIZE - 1;
        for (i, page) in pages.chunks(PAGE_SIZE).enumerate() {
            self.stream.next_in = page.as_ptr().cast_mut();
            self.stream.avail_in = length(page);
            let flush = if i == last { end } else { z::Z_NO_FLUSH };
            while self.stream.avail_in > 0 {
                // SAFETY: the stream is initialised; both buffers are slices of the given sizes.
                let code = unsafe { z::deflate(&raw mut *self.stream, flush) };
                assert!(code == z::Z_OK || code == z::Z_STREAM_END && end == z::Z_FINISH);
            }
        }
        out.len() - self.stream.avail_out as usize
    }
}

impl Drop for ZlibWriter {
    fn drop(&mut self) {
        // SAFETY: initialised in `new`.
        unsafe { z::deflateEnd(&raw mut *self.stream) };
    }
}

/// Stock zlib, decompressing page by page and dropping the rest of a payload.
pub struct ZlibReader {
    stream: Box<z::z_stream>,
}

impl ZlibReader {
    pub fn new() -> Self {
        let mut stream = stream();
        // SAFETY: the stream is set up as zlib asks.
        let code = unsafe { z::inflateInit_(&raw mut *stream, z::zlibVersion(), STREAM_SIZE) };
        assert_eq!(code, z::Z_OK);
        Self { stream }
    }

    pub fn packet(&mut self, payload: &[u8], pages: usize) -> Result<Vec<u8>, String> {
        if payload.len() > PAYLOAD_LIMIT {
            return Err(format!("payload of {} bytes", payload.len()));
        }
        let mut out = vec![0; pages * PAGE_SIZE];
        // A separate buffer that does not outlive the call, as for each packet.
        let payload = Vec::from(payload);
        self.read(&payload, &mut out)?;
        Ok(out)
    }

    /// Decompresses into `out`, page by page.
    pub fn read(&mut self, payload: &[u8], out: &mut [u8]) -> Result<(), String> {
        let pages = out.len() / PAGE_SIZE;
        self.stream.next_in = payload.as_ptr().cast_mut();
        self.stream.avail_in = length(payload);
        for (i, page) in out.chunks_mut(PAGE_SIZE).enumerate() {
            let flush = if i + 1 == pages {
                z::Z_SYNC_FLUSH
            } else {
                z::Z_NO_FLUSH
            };
            self.stream.next_out = page.as_mut_ptr();
            self.stream.avail_out = length(page);
            loop {
                // SAFETY: the stream is initialised; both buffers are slices of the given sizes.
                let code = unsafe { z::inflate(&raw mut *self.stream, flush) };
                if code != z::Z_OK {
                    return Err(format!("page {i}: inflate gives {code}"));
                }
                if self.stream.avail_in == 0 || self.stream.avail_out == 0 {
                    break;
                }
            }
            if self.stream.avail_out > 0 {
                return Err(format!("page {i}: {} bytes missing", self.stream.avail_out));
            }
        }
        Ok(())
    }
}

impl Drop for ZlibReader {
    fn drop(&mut self) {
        // SAFETY: initialised in `new`.
        unsafe { z::inflateEnd(&raw mut *self.stream) };
    }
}

/// libzstd, compressing page by page into one frame that stays open.
pub struct ZstdWriter {
    context: *mut zs::ZSTD_CCtx,
}

impl ZstdWriter {
    pub fn new(level: i32) -> Self {
        // SAFETY: no preconditions; checked below.
        let context = unsafe { zs::ZSTD_createCCtx() };
        assert!(!context.is_null());
        // SAFETY: the context is live.
        let code = unsafe {
            zs::ZSTD_CCtx_setParameter(context, zs::ZSTD_cParameter::ZSTD_c_compressionLevel, level)
        };
        assert_eq!(is_error(code), 0);
        Self { context }
    }

    pub fn packet(&mut self, pages: &[u8]) -> Vec<u8> {
        self.packet_ended_by(pages, zs::ZSTD_EndDirective::ZSTD_e_flush)
    }

    /// Returns a packet that closes the frame.
    pub fn last_packet(&mut self, pages: &[u8]) -> Vec<u8> {
        self.packet_ended_by(pages, zs::ZSTD_EndDirective::ZSTD_e_end)
    }

    fn packet_ended_by(&mut self, pages: &[u8], end: zs::ZSTD_EndDirective) -> Vec<u8> {
        let mut out = vec![0; PAYLOAD_LIMIT];
        let len = self.write(pages, end, &mut out);
        out.truncate(len);
        out
    }

    /// Compresses into `out`; returns the bytes written.
    pub fn write(&mut self, pages: &[u8], end: zs::ZSTD_EndDirective, out: &mut [u8]) -> usize {
        let mut output = zs::ZSTD_outBuffer {
            dst: out.as_mut_ptr().cast(),
            size: out.len(),
            pos: 0,
        };
        let last = pages.len() / PAGE_SIZE - 1;
        for (i, page) in pages.chunks(PAGE_SIZE).enumerate() {
            let mut input = zs::ZSTD_inBuffer {
                src: page.as_ptr().cast(),
                size: page.len(),
                pos: 0,
            };
            let directive = if i == last {
                end
            } else {
                zs::ZSTD_EndDirective::ZSTD_e_continue
            };
            loop {
                // SAFETY: the context is live; both buffers are slices of the given sizes.
                let left = unsafe {
                    zs::ZSTD_compressStream2(
                        self.context,
                        &raw mut output,
                        &raw mut input,
                        directive,
                    )
                };
                assert_eq!(is_error(left), 0);
                if input.pos == input.size && (i != last || left == 0) {
                    break;
                }
            }
        }
        output.pos
    }
}

impl Drop for ZstdWriter {
    fn drop(&mut self) {
        // SAFETY: made in `new`.
        unsafe { zs::ZSTD_freeCCtx(self.context) };
    }
}

/// libzstd, decompressing page by page.
pub struct ZstdReader {
    context: *mut zs::ZSTD_DCtx,
}

impl ZstdReader {
    pub fn new() -> Self {
        // SAFETY: no preconditions; checked below.
        let context = unsafe { zs::ZSTD_createDCtx() };
        assert!(!context.is_null());
        Self { context }
    }

    pub fn packet(&mut self, payload: &[u8], pages: usize) -> Result<Vec<u8>, String> {
        if payload.len() > PAYLOAD_LIMIT {
            return Err(format!("payload of {} bytes", payload.len()));
        }
        let mut out = vec![0; pages * PAGE_SIZE];
        self.read(payload, &mut out)?;
        Ok(out)
    }

    /// Decompresses into `out`, page by page.
    pub fn read(&mut self, payload: &[u8], out: &mut [u8]) -> Result<(), String> {
        let mut input = zs::ZSTD_inBuffer {
            src: payload.as_ptr().cast(),
            size: payload.len(),
            pos: 0,
        };
        for (i, page) in out.chunks_mut(PAGE_SIZE).enumerate() {
            let mut output = zs::ZSTD_outBuffer {
                dst: page.as_mut_ptr().cast(),
                size: page.len(),
                pos: 0,
            };
            let mut hint;
            loop {
                // SAFETY: the context is live; both buffers are slices of the given sizes.
                hint = unsafe {
                    zs::ZSTD_decompressStream(self.context, &raw mut output, &raw mut input)
                };
                if is_error(hint) != 0 {
                    return Err(format!("page {i}: zstd gives {hint}"));
                }
                if hint == 0 || input.pos == input.size || output.pos == output.size {
                    break;
                }
            }
            if output.pos < output.size {
                return Err(format!("page {i}: {} of 4096 bytes", output.pos));
            }
        }
        Ok(())
    }
}

impl Drop for ZstdReader {
    fn drop(&mut self) {
        // SAFETY: made in `new`.
        unsafe { zs::ZSTD_freeDCtx(self.context) };
    }
}

fn is_error(code: usize) -> u32 {
    // SAFETY: a pure function of the code.
    unsafe { zs::ZSTD_isError(code) }
}

/// Returns a frame header with that window log and no content: a window above that of any level.
pub fn zstd_frame_with_window_log(log: u8) -> Vec<u8> {
    let mut frame = vec![0x28, 0xb5, 0x2f, 0xfd, 0x00, (log - 10) << 3];
    // One raw block of a page, not the last one.
    let header = 4096u32 << 3;
    frame.extend_from_slice(&header.to_le_bytes()[..3]);
    frame.resize(frame.len() + PAGE_SIZE, b'w');
    frame
}

//! The part of ISA-L's compression interface that is used, after `igzip_lib.h` (BSD-3-Clause) of 2.30.
//!
//! The header fixes these layouts for all of `libisal.so.2`; the tests compare them with the header
//! itself where it is installed.

use std::ffi::c_int;

/// Soname that promises the layouts below.
pub(super) const SONAME: &str = "libisal.so.2";

/// `COMP_OK`.
pub(super) const COMP_OK: c_int = 0;
/// `FULL_FLUSH`.
pub(super) const FULL_FLUSH: u16 = 2;
/// `ISAL_DEF_LVL2_EXTRA_LARGE`: room for 128 Ki tokens, so that most packets are one block. `SMALL`
/// costs 5 % more time in both directions for 0.6 % of ratio.
pub(super) const LEVEL_2_BUFFER: usize = 593_920;

/// `sizeof(struct isal_zstream)`.
const STREAM_SIZE: usize = 82_384;
/// Offset of `internal_state`.
const INTERNAL_STATE: usize = 64;
/// Room behind the state, should a later library of the same soname want more. It costs address
/// space, and memory only if touched.
const SLACK: usize = 64 * 1024;

/// `struct isal_zstream`.
///
/// Aligned to a cache line, as the header asks for the hash table inside.
#[repr(C, align(64))]
pub(super) struct Stream {
    pub(super) next_in: *const u8,
    pub(super) avail_in: u32,
    pub(super) total_in: u32,
    pub(super) next_out: *mut u8,
    pub(super) avail_out: u32,
    pub(super) total_out: u32,
    pub(super) hufftables: *mut u8,
    pub(super) level: u32,
    pub(super) level_buf_size: u32,
    pub(super) level_buf: *mut u8,
    pub(super) end_of_stream: u16,
    pub(super) flush: u16,
    pub(super) gzip_flag: u16,
    pub(super) hist_bits: u16,
    internal_state: [u8; STREAM_SIZE - INTERNAL_STATE + SLACK],
}

/// `void isal_deflate_init(struct isal_zstream *)`.
pub(super) type DeflateInit = unsafe extern "C" fn(*mut Stream);
/// `int isal_deflate(struct isal_zstream *)`.
pub(super) type Deflate = unsafe extern "C" fn(*mut Stream) -> c_int;

#[cfg(test)]
mod tests {
    use std::mem::offset_of;
    use std::process::Command;

    use super::*;

    /// What a C compiler says of the header: one number a line, in the order of the program below.
    fn header_says() -> Result<Vec<usize>, String> {
        let dir = tempfile::tempdir().map_err(|error| error.to_string())?;
        let source = dir.path().join("layout.c");
        let program = dir.path().join("layout");
        let text = r#"
            #include <stddef.h>
            #include <stdio.h>
            #include <isa-l/igzip_lib.h>
            #define AT(field) printf("%zu\n", offsetof(struct isal_zstream, field))
            int main(void)
            {
                printf("%zu\n", sizeof(struct isal_zstream));
                AT(next_in); AT(avail_in); AT(total_in); AT(next_out); AT(avail_out); AT(total_out);
                AT(hufftables); AT(level); AT(level_buf_size); AT(level_buf);
                AT(end_of_stream); AT(flush); AT(gzip_flag); AT(hist_bits); AT(internal_state);
                printf("%d\n%d\n", COMP_OK, FULL_FLUSH);
                printf("%d\n", ISAL_DEF_LVL2_EXTRA_LARGE);
                return 0;
            }"#;
        std::fs::write(&source, text).map_err(|error| error.to_string())?;
        let cc = Command::new("cc")
            .arg("-o")
            .args([&program, &source])
            .output()
            .map_err(|error| format!("no C compiler: {error}"))?;
        if !cc.status.success() {
            return Err(format!(
                "no <isa-l/igzip_lib.h>: {}",
                String::from_utf8_lossy(&cc.stderr)
            ));
        }
        let run = Command::new(&program)
            .output()
            .map_err(|error| error.to_string())?;
        String::from_utf8_lossy(&run.stdout)
            .lines()
            .map(|line| line.parse::<usize>().map_err(|error| error.to_string()))
            .collect()
    }

    #[test]
    fn layouts_are_those_of_the_header() {
        let header = match header_says() {
            Ok(header) => header,
            Err(reason) => {
                eprintln!("skipped: {reason}");
                return;
            }
        };
        let ours = [
            STREAM_SIZE,
            offset_of!(Stream, next_in),
            offset_of!(Stream, avail_in),
            offset_of!(Stream, total_in),
            offset_of!(Stream, next_out),
            offset_of!(Stream, avail_out),
            offset_of!(Stream, total_out),
            offset_of!(Stream, hufftables),
            offset_of!(Stream, level),
            offset_of!(Stream, level_buf_size),
            offset_of!(Stream, level_buf),
            offset_of!(Stream, end_of_stream),
            offset_of!(Stream, flush),
            offset_of!(Stream, gzip_flag),
            offset_of!(Stream, hist_bits),
            offset_of!(Stream, internal_state),
            usize::try_from(COMP_OK).expect("COMP_OK is 0"),
            usize::from(FULL_FLUSH),
            LEVEL_2_BUFFER,
        ];
        assert_eq!(header, ours);
        assert!(size_of::<Stream>() >= STREAM_SIZE + SLACK);
    }
}

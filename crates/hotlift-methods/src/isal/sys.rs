//! The part of ISA-L's compression interface that Hotlift uses, after `igzip_lib.h` (BSD-3-Clause) of 2.30.
//!
//! The layouts are the same in all versions of `libisal.so.2`. The tests compare them with the header if it is installed.

use std::ffi::c_int;

use crate::functions;

/// Soname that guarantees the layouts below.
pub(crate) const SONAME: &str = "libisal.so.2";

/// `COMP_OK`: the call succeeded.
pub(crate) const COMP_OK: c_int = 0;
/// `STATELESS_OVERFLOW`: no room for the output.
pub(crate) const STATELESS_OVERFLOW: c_int = -1;
/// `NO_FLUSH`: the stream ends without a flush.
pub(crate) const NO_FLUSH: u16 = 0;
/// `IGZIP_HUFFTABLE_CUSTOM`: Huffman codes of the caller.
pub(crate) const HUFFTABLE_CUSTOM: c_int = 0;
/// `FULL_FLUSH`: each call ends with a full flush.
pub(crate) const FULL_FLUSH: u16 = 2;
/// `ISAL_DEF_LVL2_EXTRA_LARGE`: a buffer for 128 Ki literals and matches ("tokens"), so most packets are one block. The `SMALL`
/// buffer costs 5 % more time in both directions for 0.6 % of ratio.
pub(crate) const LEVEL_2_BUFFER: usize = 593_920;

/// `sizeof(struct isal_zstream)`.
const STREAM_SIZE: usize = 82_384;
/// Offset of `internal_state` in `struct isal_zstream`.
const INTERNAL_STATE: usize = 64;
/// `sizeof(struct isal_hufftables)`.
const HUFFTABLES_SIZE: usize = 2_232;
/// `sizeof(struct isal_huff_histogram)`.
const HISTOGRAM_SIZE: usize = 18_912;
/// Offset of `dist_histogram`, after a `u64` for each literal and length.
const DISTANCES: usize = 2_288;
/// Offset of `hash_table`, the field after `dist_histogram`.
const DISTANCES_END: usize = 2_528;
/// Bytes after each structure, for a later library with the same soname and larger structures. Untouched bytes use only address
/// space.
const SLACK: usize = 64 * 1024;

/// `struct isal_zstream`.
///
/// Aligned to a cache line, as the header requires for the hash table inside.
#[repr(C, align(64))]
pub(crate) struct Stream {
    pub(crate) next_in: *const u8,
    pub(crate) avail_in: u32,
    pub(crate) total_in: u32,
    pub(crate) next_out: *mut u8,
    pub(crate) avail_out: u32,
    pub(crate) total_out: u32,
    pub(crate) hufftables: *mut u8,
    pub(crate) level: u32,
    pub(crate) level_buf_size: u32,
    pub(crate) level_buf: *mut u8,
    pub(crate) end_of_stream: u16,
    pub(crate) flush: u16,
    pub(crate) gzip_flag: u16,
    pub(crate) hist_bits: u16,
    internal_state: [u8; STREAM_SIZE - INTERNAL_STATE + SLACK],
}

/// `struct isal_hufftables`: Huffman codes with their block header, opaque.
#[repr(C, align(64))]
pub(crate) struct Hufftables([u8; HUFFTABLES_SIZE + SLACK]);

/// `struct isal_huff_histogram`: all zero before the first use.
#[repr(C, align(64))]
pub(crate) struct Histogram([u8; HISTOGRAM_SIZE + SLACK]);

impl Histogram {
    /// Clears all counts.
    pub(crate) fn clear(&mut self) {
        self.0[..HISTOGRAM_SIZE].fill(0);
    }

    /// Raises low counts to a minimum: `1 / literal` of the sum of all literals and lengths, `1 / distance` of the sum of all
    /// distances.
    pub(crate) fn raise(&mut self, literal: u64, distance: u64) {
        let (literals, rest) = self.0.split_at_mut(DISTANCES);
        for (counts, rarest) in [
            (literals, literal),
            (&mut rest[..DISTANCES_END - DISTANCES], distance),
        ] {
            let (counts, _) = counts.as_chunks_mut::<8>();
            let all: u64 = counts.iter().map(|&count| u64::from_ne_bytes(count)).sum();
            for count in counts {
                let raised = u64::from_ne_bytes(*count).max(all / rarest);
                *count = raised.to_ne_bytes();
            }
        }
    }
}

functions! {
    /// The opened library. Its only constructors are those of the C runtime, so opening it is sound.
    pub(crate) struct Isal(SONAME, None) {
        /// `void isal_deflate_init(struct isal_zstream *)`.
        isal_deflate_init: fn(*mut Stream),
        /// `int isal_deflate(struct isal_zstream *)`.
        isal_deflate: fn(*mut Stream) -> c_int,
        /// `void isal_deflate_stateless_init(struct isal_zstream *)`.
        isal_deflate_stateless_init: fn(*mut Stream),
        /// `int isal_deflate_stateless(struct isal_zstream *)`.
        isal_deflate_stateless: fn(*mut Stream) -> c_int,
        /// `int isal_deflate_set_hufftables(struct isal_zstream *, struct isal_hufftables *, int)`.
        isal_deflate_set_hufftables: fn(*mut Stream, *mut Hufftables, c_int) -> c_int,
        /// `void isal_update_histogram(uint8_t *, int, struct isal_huff_histogram *)`.
        isal_update_histogram: fn(*const u8, c_int, *mut Histogram),
        /// `int isal_create_hufftables(struct isal_hufftables *, struct isal_huff_histogram *)`.
        isal_create_hufftables: fn(*mut Hufftables, *mut Histogram) -> c_int,
    }
}

#[cfg(test)]
mod tests {
    use std::mem::offset_of;
    use std::process::Command;

    use super::*;

    /// Returns the header's values as a C compiler computes them, in the order of the program below.
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
                printf("%zu\n", sizeof(struct isal_hufftables));
                printf("%zu\n", sizeof(struct isal_huff_histogram));
                printf("%zu\n", offsetof(struct isal_huff_histogram, dist_histogram));
                printf("%zu\n", offsetof(struct isal_huff_histogram, hash_table));
                printf("%d\n%d\n%d\n", -STATELESS_OVERFLOW, NO_FLUSH, IGZIP_HUFFTABLE_CUSTOM);
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
                hotlift_testkit::skip!("isal", "{reason}");
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
            HUFFTABLES_SIZE,
            HISTOGRAM_SIZE,
            DISTANCES,
            DISTANCES_END,
            usize::try_from(-STATELESS_OVERFLOW).expect("STATELESS_OVERFLOW is -1"),
            usize::from(NO_FLUSH),
            usize::try_from(HUFFTABLE_CUSTOM).expect("IGZIP_HUFFTABLE_CUSTOM is 0"),
        ];
        assert_eq!(header, ours);
        assert!(size_of::<Stream>() >= STREAM_SIZE + SLACK);
    }

    #[test]
    fn the_rarest_symbols_of_a_histogram_are_raised_and_no_others() {
        let mut histogram = Histogram([0; HISTOGRAM_SIZE + SLACK]);
        let put = |histogram: &mut Histogram, at: usize, count: u64| {
            histogram.0[at..at + 8].copy_from_slice(&count.to_ne_bytes());
        };
        put(&mut histogram, 0, 990);
        put(&mut histogram, DISTANCES - 8, 10);
        put(&mut histogram, DISTANCES, 99);
        put(&mut histogram, DISTANCES_END - 8, 1);
        put(&mut histogram, DISTANCES_END, 7);
        histogram.raise(50, 50);
        let counts: Vec<u64> = histogram.0[..DISTANCES_END + 16]
            .chunks(8)
            .map(|count| u64::from_ne_bytes(count.try_into().expect("8 bytes")))
            .collect();
        let mut expected = vec![20; 286];
        expected[0] = 990;
        expected.extend([99]);
        expected.extend([2; 29]);
        expected.extend([7, 0]);
        assert_eq!(counts, expected);
    }
}

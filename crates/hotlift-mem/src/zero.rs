//! Detection of zero pages.
//!
//! For pages outside the caches, memory bandwidth limits every variant. So a page that is *not* zero must be recognised
//! quickly: its first cache line is tested before any variant is called. This tests four times the pages per second of the
//! widest variant alone. The wide variants help when pages are in cache. Software prefetch, of this page or the next, gained
//! nothing on zero pages and cost a tenth on others. A test before a copy is free, since the copy then finds the page in cache.

use std::ptr;
use std::sync::OnceLock;

/// A variant of the zero test, for one instruction set. It accepts memory of any length and alignment.
#[derive(Debug)]
pub struct Detector {
    /// Name of the required instruction set, as shown to users.
    pub name: &'static str,
    available: fn() -> bool,
    scan: unsafe fn(*const u8, usize) -> bool,
}

/// All variants, best first. The last one runs everywhere.
pub static DETECTORS: &[Detector] = &[
    #[cfg(target_arch = "x86_64")]
    Detector {
        name: "avx512",
        available: || std::arch::is_x86_feature_detected!("avx512f"),
        scan: x86::avx512,
    },
    #[cfg(target_arch = "x86_64")]
    Detector {
        name: "avx2",
        available: || std::arch::is_x86_feature_detected!("avx2"),
        scan: x86::avx2,
    },
    Detector {
        name: "portable",
        available: || true,
        scan: portable,
    },
];

impl Detector {
    /// Returns true if this machine has the instructions that the variant requires.
    pub fn available(&self) -> bool {
        (self.available)()
    }

    /// Returns true if every byte of `bytes` is zero, false if not; `None` if this machine lacks the instructions.
    pub fn is_zero(&self, bytes: &[u8]) -> Option<bool> {
        // SAFETY: a slice is readable for its length, and the instructions are available.
        self.available()
            .then(|| unsafe { (self.scan)(bytes.as_ptr(), bytes.len()) })
    }
}

/// Returns the variant that this process uses.
pub fn detector() -> &'static Detector {
    static CHOSEN: OnceLock<&'static Detector> = OnceLock::new();
    CHOSEN.get_or_init(|| {
        let available = DETECTORS.iter().find(|d| d.available());
        available.unwrap_or(&DETECTORS[DETECTORS.len() - 1])
    })
}

/// Returns true if every byte of `bytes` is zero, or if `bytes` is empty.
#[inline]
pub fn is_zero(bytes: &[u8]) -> bool {
    // SAFETY: a slice is readable for its length.
    unsafe { is_zero_raw(bytes.as_ptr(), bytes.len()) }
}

/// Returns true if every byte is zero. Other threads may write the memory: bytes written during the call count with their old
/// or new value.
///
/// # Safety
///
/// `len` bytes from `ptr` on must be mapped readable.
#[inline]
pub unsafe fn is_zero_raw(ptr: *const u8, len: usize) -> bool {
    if len >= CACHE_LINE {
        // SAFETY: this number of bytes is readable.
        let first: [u64; CACHE_LINE / 8] = unsafe { ptr::read_unaligned(ptr.cast()) };
        if first.iter().fold(0, |all, word| all | word) != 0 {
            return false;
        }
    }
    // SAFETY: guaranteed by the caller; the chosen variant runs on this machine.
    unsafe { (detector().scan)(ptr, len) }
}

/// Number of bytes that memory delivers together: reading all of them costs no more than reading one.
const CACHE_LINE: usize = 64;

/// Bytes tested by the portable variant between two early exits: enough for the compiler to use whole vectors, and few enough
/// that an early nonzero byte ends the test at once.
const STEP: usize = 256;

/// # Safety
///
/// As [`is_zero_raw`].
unsafe fn portable(mut ptr: *const u8, mut len: usize) -> bool {
    // SAFETY: every read lies in the `len` bytes left.
    unsafe {
        while len >= STEP {
            let words: [u64; STEP / 8] = ptr::read_unaligned(ptr.cast());
            if words.iter().fold(0, |all, word| all | word) != 0 {
                return false;
            }
            ptr = ptr.add(STEP);
            len -= STEP;
        }
        short(ptr, len)
    }
}

/// Tests the rest, which is shorter than a step.
///
/// # Safety
///
/// As [`is_zero_raw`].
unsafe fn short(ptr: *const u8, len: usize) -> bool {
    // SAFETY: the words end at or before `len`, and so do the single bytes after them.
    unsafe {
        let words = len / 8;
        (0..words).all(|i| ptr.cast::<u64>().add(i).read_unaligned() == 0)
            && (words * 8..len).all(|i| ptr.add(i).read() == 0)
    }
}

#[cfg(target_arch = "x86_64")]
mod x86 {
    use std::arch::x86_64::*;

    use super::short;

    /// Tests with AVX2, 256 bytes between two early exits.
    ///
    /// # Safety
    ///
    /// As [`super::is_zero_raw`], on a machine with AVX2.
    #[target_feature(enable = "avx2")]
    pub(super) unsafe fn avx2(mut ptr: *const u8, mut len: usize) -> bool {
        const STEP: usize = 256;
        while len >= STEP {
            // SAFETY: STEP bytes are readable from `ptr` on; the loads need no alignment.
            let v: [__m256i; 8] = std::array::from_fn(|i| unsafe {
                _mm256_loadu_si256(ptr.cast::<__m256i>().add(i))
            });
            let low = _mm256_or_si256(_mm256_or_si256(v[0], v[1]), _mm256_or_si256(v[2], v[3]));
            let high = _mm256_or_si256(_mm256_or_si256(v[4], v[5]), _mm256_or_si256(v[6], v[7]));
            let all = _mm256_or_si256(low, high);
            if _mm256_testz_si256(all, all) == 0 {
                return false;
            }
            // SAFETY: STEP bytes were available.
            ptr = unsafe { ptr.add(STEP) };
            len -= STEP;
        }
        // SAFETY: `len` bytes are left.
        unsafe { short(ptr, len) }
    }

    /// Tests with AVX-512, 512 bytes between two early exits.
    ///
    /// # Safety
    ///
    /// As [`super::is_zero_raw`], on a machine with AVX-512F.
    #[target_feature(enable = "avx512f")]
    pub(super) unsafe fn avx512(mut ptr: *const u8, mut len: usize) -> bool {
        const STEP: usize = 512;
        while len >= STEP {
            // SAFETY: STEP bytes are readable from `ptr` on; the loads need no alignment.
            let v: [__m512i; 8] = std::array::from_fn(|i| unsafe {
                _mm512_loadu_si512(ptr.cast::<__m512i>().add(i))
            });
            let low = _mm512_or_si512(_mm512_or_si512(v[0], v[1]), _mm512_or_si512(v[2], v[3]));
            let high = _mm512_or_si512(_mm512_or_si512(v[4], v[5]), _mm512_or_si512(v[6], v[7]));
            let all = _mm512_or_si512(low, high);
            if _mm512_test_epi64_mask(all, all) != 0 {
                return false;
            }
            // SAFETY: STEP bytes were available.
            ptr = unsafe { ptr.add(STEP) };
            len -= STEP;
        }
        // SAFETY: `len` bytes are left.
        unsafe { short(ptr, len) }
    }
}

#[cfg(test)]
mod tests {
    use super::*;
    use crate::PAGE_SIZE;

    /// Checks every variant that this machine can run, and the one that the process uses.
    fn each(mut check: impl FnMut(&str, &dyn Fn(&[u8]) -> bool)) {
        for d in DETECTORS {
            if d.available() {
                check(d.name, &|bytes| d.is_zero(bytes) == Some(true));
            } else {
                hotlift_testkit::skip!("cpu", "no instructions for {}", d.name);
            }
        }
        check("chosen", &is_zero);
    }

    #[test]
    fn a_page_of_zeros_is_zero() {
        each(|name, zero| assert!(zero(&[0; PAGE_SIZE]), "{name}"));
    }

    #[test]
    fn one_set_bit_anywhere_makes_a_page_non_zero() {
        each(|name, zero| {
            let mut page = [0; PAGE_SIZE];
            for at in 0..PAGE_SIZE {
                page[at] = 1 << (at % 8);
                assert!(!zero(&page), "{name}: byte {at}");
                page[at] = 0;
            }
            assert!(zero(&page), "{name}");
        });
    }

    #[test]
    fn lengths_and_alignments_are_exact_to_the_byte() {
        each(|name, zero| {
            let mut bytes = [0xff; 1400];
            for start in [0, 1, 7, 8, 63] {
                for len in (0..=600).chain([1023, 1024, 1025, 1100]) {
                    let range = start..start + len;
                    bytes[range.clone()].fill(0);
                    assert!(zero(&bytes[range.clone()]), "{name}: {range:?}");
                    for at in [start, start + len / 2, (start + len).saturating_sub(1)] {
                        if range.contains(&at) {
                            bytes[at] = 0x80;
                            assert!(!zero(&bytes[range.clone()]), "{name}: {range:?}, {at}");
                            bytes[at] = 0;
                        }
                    }
                    bytes[range].fill(0xff);
                }
            }
        });
    }

    #[test]
    fn the_chosen_variant_is_the_first_available() {
        let first = DETECTORS.iter().find(|d| d.available()).map(|d| d.name);
        assert_eq!(first, Some(detector().name));
        assert!(DETECTORS.last().is_some_and(Detector::available));
    }
}

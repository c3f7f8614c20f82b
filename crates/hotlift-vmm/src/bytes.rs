//! Number conversions that cannot fail on this crate's targets.

/// Converts `n` to u64 without loss, because usize has at most 64 bits on every target of Rust.
pub(crate) fn to_u64(n: usize) -> u64 {
    n as u64
}

/// Converts `n` to usize without loss, because the crate is for 64-bit hosts only (see `lib.rs`).
#[allow(clippy::cast_possible_truncation)]
pub(crate) fn to_usize(n: u64) -> usize {
    n as usize
}

/// Returns the low 32 bits of `n`.
#[allow(clippy::cast_possible_truncation)]
pub(crate) fn low_u32(n: u64) -> u32 {
    n as u32
}

/// Returns the low 8 bits of `n`.
pub(crate) fn low_u8(n: u64) -> u8 {
    n.to_le_bytes()[0]
}

/// Maps `random` evenly to `0..bound`; returns 0 if `bound` is 0. The result is the high half of the product. The guest
/// program uses the instruction `mul`, which stores the high half in rdx.
pub(crate) fn reduce(random: u64, bound: u64) -> u64 {
    let product = u128::from(random) * u128::from(bound);
    u64::try_from(product >> 64).unwrap_or(0)
}

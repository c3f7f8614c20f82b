//! XBZRLE, capability `xbzrle`: a page as its difference from the destination's copy.
//!
//! ```text
//! delta  = repeated (keep, replace, `replace` new bytes); bytes after the last one are kept
//! length = one byte below 0x80, or 0x80 | low 7 bits and a byte with the next 7 bits
//! ```
//!
//! Only the first `keep` may be 0. No `replace` may be 0. The new bytes are sent as they are: despite the format's name they
//! are not XORed.

use hotlift_mem::PAGE_SIZE;

use crate::MethodError;

const NAME: &str = "xbzrle";

/// Applies `delta` to `page`, which contains the old content. After an error the page's content is undefined.
///
/// # Errors
///
/// [`MethodError::Damaged`] with the rule of the format that the delta violates.
pub fn apply(delta: &[u8], page: &mut [u8; PAGE_SIZE]) -> Result<(), MethodError> {
    let mut rest = delta;
    let mut position = 0;
    while !rest.is_empty() || position == 0 {
        let keep = take_length(&mut rest)?;
        if keep == 0 && position > 0 {
            return Err(damaged("a run of nothing to keep"));
        }
        let replace = take_length(&mut rest)?;
        if replace == 0 {
            return Err(damaged("a run of nothing to replace"));
        }
        let (literals, behind) = rest
            .split_at_checked(replace)
            .ok_or(damaged("new bytes are missing"))?;
        let start = position + keep;
        position = start + replace;
        page.get_mut(start..position)
            .ok_or(damaged("a run reaches over the end of the page"))?
            .copy_from_slice(literals);
        rest = behind;
    }
    Ok(())
}

/// Reads a length of at most 14 bits from the start of `rest`, and removes it from `rest`.
fn take_length(rest: &mut &[u8]) -> Result<usize, MethodError> {
    let (length, behind) = match **rest {
        [low @ ..0x80, ref behind @ ..] => (usize::from(low), behind),
        [low, high @ ..0x80, ref behind @ ..] => {
            (usize::from(low & 0x7f) | usize::from(high) << 7, behind)
        }
        [_, _, ..] => return Err(damaged("a length of more than 14 bits")),
        _ => return Err(damaged("a length is missing")),
    };
    *rest = behind;
    Ok(length)
}

fn damaged(reason: &'static str) -> MethodError {
    MethodError::Damaged {
        method: NAME,
        reason,
    }
}

/// Result of [`encode`].
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub enum Delta {
    /// Old and new page are the same; there is nothing to send.
    Same,
    /// The delta was appended to `out`.
    Encoded,
    /// The delta would not be shorter than a page, or than the limit of [`encode`]; the page must be sent uncompressed.
    Overflow,
}

/// Appends the delta from `old` to `new` to `out`, if the delta is shorter than `limit` bytes and shorter than a page.
/// Otherwise `out` is unchanged.
pub fn encode(
    old: &[u8; PAGE_SIZE],
    new: &[u8; PAGE_SIZE],
    limit: usize,
    out: &mut Vec<u8>,
) -> Delta {
    let before = out.len();
    let limit = before + limit.min(PAGE_SIZE);
    let mut position = 0;
    loop {
        let keep = common_prefix(&old[position..], &new[position..]);
        let start = position + keep;
        if start == PAGE_SIZE {
            return match out.len() == before {
                true => Delta::Same,
                false => Delta::Encoded,
            };
        }
        let differing = old[start..].iter().zip(&new[start..]);
        let replace = differing.take_while(|(old, new)| old != new).count();
        position = start + replace;
        put_length(keep, out);
        put_length(replace, out);
        out.extend_from_slice(&new[start..position]);
        if out.len() >= limit {
            out.truncate(before);
            return Delta::Overflow;
        }
    }
}

/// Returns the length of the common prefix. Compares eight bytes at a time, since most of a page is equal.
fn common_prefix(a: &[u8], b: &[u8]) -> usize {
    let words = a.as_chunks::<8>().0.iter().zip(b.as_chunks::<8>().0);
    let whole = 8 * words.take_while(|(a, b)| a == b).count();
    let rest = a[whole..].iter().zip(&b[whole..]);
    whole + rest.take_while(|(a, b)| a == b).count()
}

fn put_length(length: usize, out: &mut Vec<u8>) {
    let [low, high, ..] = (length << 1).to_le_bytes();
    let low = low >> 1;
    match high {
        0 => out.push(low),
        _ => out.extend_from_slice(&[low | 0x80, high]),
    }
}

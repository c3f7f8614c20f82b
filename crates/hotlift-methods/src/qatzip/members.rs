//! Structure of members: headers, trailers, and their sizes.

use super::{EXTRA, HEADER, MAGIC, SUBFIELD, TRAILER, crc32};

/// Maximum bytes of a member (QATzip's default `hw_buff_sz`), the unit of the hardware.
pub const LARGEST: usize = 64 * 1024;
/// Minimum bytes of a member for the hardware (QATzip's default); the library rejects smaller ones.
pub const SMALLEST: usize = 1024;

/// A member with its sizes.
struct Member {
    sizes: Sizes,
    checksum: u32,
    /// Bytes of the whole member, with header and trailer.
    len: usize,
}

impl Member {
    /// Returns the member at the start of `input`; `None` if it is incomplete, has no sizes, or its header and trailer
    /// disagree.
    fn read(input: &[u8]) -> Option<Self> {
        let header = Header::read(input).ok()?;
        let sizes = header.sizes?;
        let trailer = input.get(header.len..)?.get(sizes.deflate..)?;
        let &[a, b, c, d, e, f, g, h] = trailer.first_chunk::<TRAILER>()?;
        let size = usize::try_from(u32::from_le_bytes([e, f, g, h])).ok()?;
        (size == sizes.uncompressed).then_some(Self {
            sizes,
            checksum: u32::from_le_bytes([a, b, c, d]),
            len: header.len + sizes.deflate + TRAILER,
        })
    }
}

/// Returns the number of members in `payload`; `None` if the hardware may not get this payload. It may if:
/// - All members are complete and contain their sizes.
/// - Each has [`SMALLEST`] to `largest` uncompressed bytes.
/// - All together have `expected` uncompressed bytes.
pub(super) fn count(payload: &[u8], expected: usize, largest: usize) -> Option<u64> {
    // The library's maximum output: the input, an eighth more, and 1 KiB.
    let most = largest.saturating_add(largest / 8 + 1024);
    let mut rest = payload;
    let (mut members, mut bytes) = (0, 0);
    while !rest.is_empty() {
        let member = Member::read(rest)?;
        let fits = (SMALLEST..=largest).contains(&member.sizes.uncompressed)
            && member.sizes.deflate <= most;
        bytes += member.sizes.uncompressed;
        if !fits || bytes > expected {
            return None;
        }
        members += 1;
        rest = &rest[member.len..];
    }
    (bytes == expected).then_some(members)
}

/// Returns true if the decoded `bytes` match the checksums of all members of `payload`.
pub(super) fn checksums_fit(payload: &[u8], bytes: &[u8]) -> bool {
    let (mut members, mut bytes) = (payload, bytes);
    while let Some(member) = Member::read(members) {
        let Some((own, rest)) = bytes.split_at_checked(member.sizes.uncompressed) else {
            return false;
        };
        if crc32(own) != member.checksum {
            return false;
        }
        (members, bytes) = (&members[member.len..], rest);
    }
    members.is_empty() && bytes.is_empty()
}

/// Defect of a member.
pub(super) enum Bad {
    Long,
    Short,
    Magic([u8; 2]),
    Damaged(&'static str),
}

/// A member's header (RFC 1952, 2.3).
pub(super) struct Header {
    /// Bytes of the header.
    pub(super) len: usize,
    /// Sizes from QAT's extra field, if present.
    pub(super) sizes: Option<Sizes>,
}

#[derive(Clone, Copy)]
pub(super) struct Sizes {
    pub(super) uncompressed: usize,
    pub(super) deflate: usize,
}

/// Flags of a header: a CRC-16 after it, an extra field, a file's name, a comment, and reserved bits.
const FHCRC: u8 = 0x02;
const FEXTRA: u8 = 0x04;
const FNAME: u8 = 0x08;
const FCOMMENT: u8 = 0x10;
const RESERVED: u8 = 0xe0;

impl Header {
    pub(super) fn read(input: &[u8]) -> Result<Self, Bad> {
        let fixed = input.first_chunk::<HEADER>().ok_or(Bad::Short)?;
        if !fixed.starts_with(&MAGIC) {
            return Err(Bad::Magic([fixed[0], fixed[1]]));
        }
        let flags = fixed[3];
        if fixed[2] != 8 || flags & RESERVED != 0 {
            return Err(Bad::Damaged("a member is compressed in no known way"));
        }
        let mut len = HEADER;
        let mut sizes = None;
        if flags & FEXTRA != 0 {
            let field = input[len..].first_chunk::<2>().ok_or(Bad::Short)?;
            len += 2;
            let field = usize::from(u16::from_le_bytes(*field));
            sizes = Sizes::find(input[len..].get(..field).ok_or(Bad::Short)?);
            len += field;
        }
        for text in [FNAME, FCOMMENT] {
            if flags & text != 0 {
                let end = input[len..].iter().position(|&byte| byte == 0);
                len += end.ok_or(Bad::Short)? + 1;
            }
        }
        if flags & FHCRC != 0 {
            let sum = input[len..].first_chunk::<2>().ok_or(Bad::Short)?;
            let crc = crc32(&input[..len]).to_le_bytes();
            if *sum != crc[..2] {
                return Err(Bad::Damaged("a member's header has a wrong checksum"));
            }
            len += 2;
        }
        Ok(Self { len, sizes })
    }
}

impl Sizes {
    /// Returns the sizes in QAT's subfield of an extra field; `None` if there is no such subfield. Skips other and malformed
    /// subfields.
    fn find(mut field: &[u8]) -> Option<Self> {
        while let Some((&[a, b, low, high], rest)) = field.split_first_chunk::<4>() {
            let (data, rest) = rest.split_at_checked(u16::from_le_bytes([low, high]).into())?;
            if [a, b] == SUBFIELD
                && let (&[uncompressed, deflate], &[]) = data.as_chunks::<4>()
                && data.len() == EXTRA
            {
                let size = |bytes| usize::try_from(u32::from_le_bytes(bytes)).ok();
                return Some(Self {
                    uncompressed: size(uncompressed)?,
                    deflate: size(deflate)?,
                });
            }
            field = rest;
        }
        None
    }
}

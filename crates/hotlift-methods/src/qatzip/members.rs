//! The structure of members: headers, trailers, and what they say of sizes.

use super::{EXTRA, HEADER, MAGIC, SUBFIELD, TRAILER, crc32};

/// Most bytes of a member (QATzip's default `hw_buff_sz`): what the hardware takes at once.
pub(super) const LARGEST: usize = 64 * 1024;
/// Fewest bytes of a member that go to the hardware (QATzip's default): the library refuses others.
pub(super) const SMALLEST: usize = 1024;

/// A member that says its sizes.
struct Member {
    sizes: Sizes,
    checksum: u32,
    /// Bytes of all of it.
    len: usize,
}

impl Member {
    /// The member at the beginning of `input`, if it is there as a whole and header and trailer say
    /// the same of it.
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

/// The number of members, if `payload` is nothing but whole ones that say their sizes, together
/// `expected` bytes, and none is larger than `largest` or too small for the hardware.
pub(super) fn count(payload: &[u8], expected: usize, largest: usize) -> Option<u64> {
    // What the library has room for: a ninth more, and 1 KiB.
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

/// True if `bytes` are what the members of a counted payload say by their checksums.
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

/// What is wrong with a member.
pub(super) enum Bad {
    Long,
    Short,
    Magic([u8; 2]),
    Damaged(&'static str),
}

/// A member's header (RFC 1952, 2.3).
pub(super) struct Header {
    /// Bytes of it.
    pub(super) len: usize,
    /// What QAT's extra field says, if it is there.
    pub(super) sizes: Option<Sizes>,
}

#[derive(Clone, Copy)]
pub(super) struct Sizes {
    pub(super) uncompressed: usize,
    pub(super) deflate: usize,
}

/// Flags of a header: a CRC-16 behind it, an extra field, a file's name, a comment, and those that
/// must be 0.
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
    /// QAT's subfield of an extra field. Others are passed over; what is none is nobody's.
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

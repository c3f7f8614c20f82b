//! The payload of `ram` sections: the RAM block list, then page records up to EOS.
//!
//! A record starts with a be64: the low bits are flags, the others a byte offset in a RAM block. A record with CONTINUE refers
//! to the block of the previous record, which [`RamRecords`] remembers across sections, as QEMU does.

use crate::block::{self, RamBlockEntry};
use crate::reader::{as_u64, put_counted_string};
use crate::{PAGE_SIZE, Reader, WireError, limits};

/// Version of the `ram` sections; QEMU refuses other versions.
pub(super) const RAM_VERSION: u32 = 4;

pub(super) const ZERO: u64 = 0x002;
pub(super) const MEM_SIZE: u64 = 0x004;
pub(super) const PAGE: u64 = 0x008;
pub(super) const EOS: u64 = 0x010;
const CONTINUE: u64 = 0x020;
const XBZRLE: u64 = 0x040;
const HOOK: u64 = 0x080;
const COMPRESS_PAGE: u64 = 0x100;
const MULTIFD_FLUSH: u64 = 0x200;

/// Mask of the flag bits in the first be64 of a record.
pub(super) const FLAG_MASK: u64 = 0xfff;

/// First byte of an XBZRLE delta (`ENCODING_FLAG_XBZRLE`).
const ENCODING_XBZRLE: u8 = 1;

/// Content of a page record.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub enum PageContent<'a> {
    /// Zero page: all bytes are zero.
    Zero,
    /// The bytes of the page.
    Normal(&'a [u8; PAGE_SIZE]),
    /// An XBZRLE delta to the destination's content of the page, 2 to 4096 bytes, not decoded.
    Xbzrle(&'a [u8]),
    /// A page as one complete zlib stream, 1 to 4109 bytes, not decoded (capability `compress`, QEMU up to 9.0).
    Compressed(&'a [u8]),
}

/// A record after the RAM block list.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub(super) enum RamRecord<'a> {
    Page {
        block: usize,
        offset: u64,
        content: PageContent<'a>,
    },
    MultifdFlush,
    Eos,
}

/// Optional fields that follow the length of each block in the RAM block list.
#[derive(Debug, Clone, Copy, Default)]
pub(super) struct BlockFields {
    /// Bitwise OR of the page sizes that a block may have. QEMU writes the size of a block only if it is not the page size of
    /// the main channel (`postcopy-ram`, `ram_save_setup`).
    pub(super) page_sizes: u64,
    /// True if every block has an address.
    pub(super) addresses: bool,
}

/// Reads the RAM block list at the start of the START section.
pub(super) fn read_block_list(
    reader: &mut Reader<'_>,
    fields: BlockFields,
) -> Result<Vec<RamBlockEntry>, WireError> {
    if fields.addresses && fields.page_sizes != 0 {
        // The two fields could not be distinguished: an address may have the value of a page size.
        let what = "huge pages together with capability x-ignore-shared";
        return Err(WireError::Unsupported { what });
    }
    // This first loop copies nothing, because it is repeated each time that more bytes of the list arrive.
    let mut names = reader.clone();
    walk_block_list(&mut names, fields, |_| Ok(()))?;

    let mut blocks: Vec<RamBlockEntry> = Vec::new();
    walk_block_list(reader, fields, |block| {
        if blocks.iter().any(|earlier| earlier.name == block.name) {
            return Err(WireError::DuplicateBlock {
                block: block.name.to_owned(),
            });
        }
        blocks.push(RamBlockEntry {
            name: block.name.to_owned(),
            used_length: block.used_length,
            page_size: block.page_size,
            guest_address: block.guest_address,
        });
        Ok(())
    })?;
    Ok(blocks)
}

struct ListedBlock<'a> {
    name: &'a str,
    used_length: u64,
    page_size: u64,
    guest_address: Option<u64>,
}

/// Calls `each` for every block in the list. Fails if a length exceeds the rest of the total: QEMU subtracts until zero, and
/// its subtraction would overflow.
fn walk_block_list<'a>(
    reader: &mut Reader<'a>,
    fields: BlockFields,
    mut each: impl FnMut(ListedBlock<'a>) -> Result<(), WireError>,
) -> Result<(), WireError> {
    let first = reader.be64("RAM block list")?;
    if first & FLAG_MASK != MEM_SIZE {
        return Err(WireError::Mismatch {
            what: "flags of the RAM block list",
            expected: MEM_SIZE,
            got: first & FLAG_MASK,
        });
    }
    let mut remaining = first & !FLAG_MASK;
    if remaining > limits::RAM {
        return Err(WireError::OverLimit {
            what: "length of all RAM blocks",
            limit: limits::RAM,
            got: remaining,
        });
    }
    let mut count = 0;
    while remaining > 0 {
        count += 1;
        if count > limits::RAM_BLOCKS {
            return Err(WireError::OverLimit {
                what: "number of RAM blocks",
                limit: as_u64(limits::RAM_BLOCKS),
                got: as_u64(count),
            });
        }
        let name = reader.counted_string("RAM block name")?;
        let used_length = reader.be64("RAM block length")?;
        let page_size = read_page_size(reader, fields.page_sizes)?;
        let guest_address = match fields.addresses {
            true => Some(reader.be64("RAM block address")?),
            false => None,
        };
        let left = remaining.checked_sub(used_length);
        remaining = match left {
            Some(left) if used_length > 0 && used_length.is_multiple_of(page_size) => left,
            _ => {
                return Err(WireError::BadBlockLength {
                    block: name.to_owned(),
                    length: used_length,
                    remaining,
                });
            }
        };
        each(ListedBlock {
            name,
            used_length,
            page_size,
            guest_address,
        })?;
    }
    Ok(())
}

/// Reads the page size of a block if the next be64 is one of `sizes`. Otherwise returns [`PAGE_SIZE`] and reads nothing. Other
/// data cannot be mistaken for a page size: the name of the next block begins with a length above zero, and a record has flags,
/// which are below all page sizes.
fn read_page_size(reader: &mut Reader<'_>, sizes: u64) -> Result<u64, WireError> {
    let size = match sizes {
        0 => 0,
        _ => reader.clone().be64("page size of a RAM block")?,
    };
    if !size.is_power_of_two() || size & sizes == 0 {
        return Ok(as_u64(PAGE_SIZE));
    }
    reader.be64("page size of a RAM block")
}

/// Checks the lengths of all blocks, and returns their sum.
pub(super) fn check_lengths(blocks: &[RamBlockEntry]) -> Result<u64, WireError> {
    let mut total: u64 = 0;
    for block in blocks {
        let sum = total.checked_add(block.used_length);
        total = match sum {
            Some(sum) if block.used_length > 0 && block.used_length & FLAG_MASK == 0 => sum,
            _ => {
                return Err(WireError::BadBlockLength {
                    block: block.name.clone(),
                    length: block.used_length,
                    remaining: u64::MAX - total,
                });
            }
        };
    }
    Ok(total)
}

/// Appends the RAM block list. A block's page size is written if it is not 4 KiB, an address if the block has one.
pub(super) fn put_block_list(blocks: &[RamBlockEntry], out: &mut Vec<u8>) -> Result<(), WireError> {
    let total = check_lengths(blocks)?;
    out.extend_from_slice(&(total | MEM_SIZE).to_be_bytes());
    for block in blocks {
        put_counted_string(out, &block.name, "RAM block name")?;
        out.extend_from_slice(&block.used_length.to_be_bytes());
        if block.page_size != as_u64(PAGE_SIZE) {
            out.extend_from_slice(&block.page_size.to_be_bytes());
        }
        if let Some(address) = block.guest_address {
            out.extend_from_slice(&address.to_be_bytes());
        }
    }
    Ok(())
}

/// State of the receiver across all RAM records: the blocks, and the block of the last record.
#[derive(Debug, Default)]
pub(super) struct RamRecords {
    pub(super) blocks: Vec<RamBlockEntry>,
    current: Option<usize>,
}

impl RamRecords {
    pub(super) fn new(blocks: Vec<RamBlockEntry>) -> Self {
        Self {
            blocks,
            current: None,
        }
    }

    /// Forgets the block of the last record. The next record must name its block.
    pub(super) fn forget_current(&mut self) {
        self.current = None;
    }

    /// Reads one record. Changes the state only if the record is complete and valid.
    pub(super) fn read<'a>(&mut self, reader: &mut Reader<'a>) -> Result<RamRecord<'a>, WireError> {
        let first = reader.be64("RAM record")?;
        let kind = first & FLAG_MASK & !CONTINUE;
        match kind {
            ZERO | PAGE | XBZRLE | COMPRESS_PAGE => {}
            EOS if first == EOS => return Ok(RamRecord::Eos),
            MULTIFD_FLUSH if first == MULTIFD_FLUSH => return Ok(RamRecord::MultifdFlush),
            MEM_SIZE => {
                return Err(WireError::OutOfOrder {
                    got: "a second RAM block list",
                    expected: "a page record",
                });
            }
            HOOK => {
                return Err(WireError::Unsupported {
                    what: "RDMA (RAM record HOOK)",
                });
            }
            _ => {
                return Err(WireError::Unknown {
                    what: "RAM record",
                    got: first,
                });
            }
        }

        let (block, offset) = self.read_place(first, reader)?;
        let content = read_content(kind, reader)?;
        self.current = Some(block);
        Ok(RamRecord::Page {
            block,
            offset,
            content,
        })
    }

    /// Returns RAM block (an index) and byte offset of the page whose record begins with the be64 `first`. Does not read the
    /// content.
    pub(super) fn read_place(
        &self,
        first: u64,
        reader: &mut Reader<'_>,
    ) -> Result<(usize, u64), WireError> {
        let (flags, offset) = (first & FLAG_MASK, first & !FLAG_MASK);
        let block = if flags & CONTINUE != 0 {
            self.current.ok_or(WireError::NoCurrentBlock)?
        } else {
            let name = reader.counted_string("RAM block name of a page")?;
            block::find(&self.blocks, name.as_bytes(), self.current.unwrap_or(0))?
        };
        self.blocks[block].check_page(offset, PAGE_SIZE)?;
        Ok((block, offset))
    }
}

fn read_content<'a>(kind: u64, reader: &mut Reader<'a>) -> Result<PageContent<'a>, WireError> {
    let expect = |got: u8, expected: u8, what| {
        if got == expected {
            return Ok(());
        }
        Err(WireError::Mismatch {
            what,
            expected: u64::from(expected),
            got: u64::from(got),
        })
    };
    match kind {
        ZERO => {
            expect(reader.u8("zero page")?, 0, "fill byte of a zero page")?;
            Ok(PageContent::Zero)
        }
        PAGE => Ok(PageContent::Normal(reader.array("page")?)),
        XBZRLE => {
            let encoding = reader.u8("XBZRLE page")?;
            expect(encoding, ENCODING_XBZRLE, "encoding of an XBZRLE page")?;
            let length = usize::from(reader.be16("length of an XBZRLE page")?);
            if length < 2 {
                return Err(WireError::Empty {
                    what: "XBZRLE page",
                });
            }
            if length > PAGE_SIZE {
                return Err(WireError::OverLimit {
                    what: "length of an XBZRLE page",
                    limit: as_u64(PAGE_SIZE),
                    got: as_u64(length),
                });
            }
            Ok(PageContent::Xbzrle(reader.take(length, "XBZRLE page")?))
        }
        _ => {
            let what = "compressed page";
            let length = reader.length(limits::COMPRESSED_PAGE, what)?;
            if length == 0 {
                return Err(WireError::Empty { what });
            }
            Ok(PageContent::Compressed(reader.take(length, what)?))
        }
    }
}

/// Appends the head of a page record. `name` is the name of the block; `None` if the previous record has the same block.
fn put_page_head(kind: u64, offset: u64, name: Option<&str>, out: &mut Vec<u8>) {
    match name {
        None => out.extend_from_slice(&(offset | kind | CONTINUE).to_be_bytes()),
        Some(name) => {
            out.extend_from_slice(&(offset | kind).to_be_bytes());
            // Names have at most 255 bytes, which was checked when the block list was written.
            out.push(u8::try_from(name.len()).unwrap_or(u8::MAX));
            out.extend_from_slice(name.as_bytes());
        }
    }
}

/// Appends the record of a zero page.
pub(super) fn put_zero_page(offset: u64, name: Option<&str>, out: &mut Vec<u8>) {
    put_page_head(ZERO, offset, name, out);
    out.push(0);
}

/// Appends the head of a PAGE record. The bytes of the page must follow.
pub(super) fn put_normal_page_head(offset: u64, name: Option<&str>, out: &mut Vec<u8>) {
    put_page_head(PAGE, offset, name, out);
}

/// Appends the head of an XBZRLE record. `length` bytes of delta must follow.
pub(super) fn put_xbzrle_head(offset: u64, name: Option<&str>, length: u16, out: &mut Vec<u8>) {
    put_page_head(XBZRLE, offset, name, out);
    out.push(ENCODING_XBZRLE);
    out.extend_from_slice(&length.to_be_bytes());
}

/// Appends the head of a COMPRESS_PAGE record. `length` bytes of a zlib stream must follow.
pub(super) fn put_compressed_head(offset: u64, name: Option<&str>, length: u32, out: &mut Vec<u8>) {
    put_page_head(COMPRESS_PAGE, offset, name, out);
    out.extend_from_slice(&length.to_be_bytes());
}

/// Appends a multifd flush.
pub(super) fn put_flush(out: &mut Vec<u8>) {
    out.extend_from_slice(&MULTIFD_FLUSH.to_be_bytes());
}

/// Reads the EOS of a section without records.
pub(super) fn read_eos(reader: &mut Reader<'_>) -> Result<(), WireError> {
    let got = reader.be64("end of an empty section of ram")?;
    if got != EOS {
        return Err(WireError::Mismatch {
            what: "end of an empty section of ram",
            expected: EOS,
            got,
        });
    }
    Ok(())
}

/// Appends EOS, the end of a section's records.
pub(super) fn put_eos(out: &mut Vec<u8>) {
    out.extend_from_slice(&EOS.to_be_bytes());
}

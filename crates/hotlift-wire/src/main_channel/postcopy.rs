//! Messages that the source sends in a postcopy: the destination runs the guest before it has the pages, and requests them.

use super::command::{
    Command, PACKAGED, POSTCOPY_LISTEN, POSTCOPY_RAM_DISCARD, POSTCOPY_RESUME, POSTCOPY_RUN,
    RECV_BITMAP,
};
use super::ram::{self, PageContent, RamRecord, RamRecords};
use super::section::COMMAND;
use crate::reader::put_counted_string;
use crate::{RamBlockEntry, Reader, WireError, block};

/// Value after a bitmap, which confirms that the length is correct (QEMU: `RAMBLOCK_RECV_BITMAP_ENDING`).
const BITMAP_ENDS: u64 = 0x0123_4567_89ab_cdef;

/// Version of the DISCARD command.
const DISCARD_VERSION: u8 = 0;

/// A command of postcopy, from a [`MainDecoder`](super::MainDecoder) with `taking_postcopy`.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub enum PostcopyCommand<'a> {
    /// DISCARD: the destination must discard these pages, although it has received them.
    Discard {
        /// Index into the RAM block list.
        block: usize,
        /// Ranges inside the block, in whole pages.
        ranges: Ranges<'a>,
    },
    /// PACKAGED: a package of this number of bytes follows, with commands and device sections. The package must be received
    /// completely before its first command is decoded. The same decoder decodes the package, or the caller skips it.
    Packaged(u32),
    /// LISTEN: from now on the destination may request pages.
    Listen,
    /// RUN: the destination may run the guest.
    Run,
    /// RESUME: an interrupted postcopy continues.
    Resume,
    /// RECV_BITMAP: the source asks which pages of a RAM block have arrived. Contains the block's index in the RAM block list.
    RecvBitmap(usize),
}

/// Ranges of a RAM block in the stream. Each consists of be64 start and be64 length, in bytes.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub struct Ranges<'a>(&'a [[u8; RANGE]]);

/// Length of a range in the stream, in bytes.
const RANGE: usize = 16;

impl Ranges<'_> {
    /// Iterates over the ranges: start and length of each, in bytes.
    pub fn iter(&self) -> impl Iterator<Item = (u64, u64)> + '_ {
        self.0.iter().map(|range| {
            let (start, length) = range.split_at(RANGE / 2);
            let be64 = |bytes: &[u8]| {
                bytes
                    .iter()
                    .fold(0, |value, &byte| value << 8 | u64::from(byte))
            };
            (be64(start), be64(length))
        })
    }
}

impl<'a> PostcopyCommand<'a> {
    /// Decodes a command, whose section type byte was already read. Returns `None`, and reads nothing, for a command of
    /// precopy.
    pub(super) fn decode(
        reader: &mut Reader<'a>,
        records: &RamRecords,
    ) -> Result<Option<Self>, WireError> {
        const LENGTH: &str = "length of a postcopy command";
        let mut ahead = reader.clone();
        let id = ahead.be16("command")?;
        let without_payload = match id {
            POSTCOPY_LISTEN => Some(Self::Listen),
            POSTCOPY_RUN => Some(Self::Run),
            POSTCOPY_RESUME => Some(Self::Resume),
            POSTCOPY_RAM_DISCARD | PACKAGED | RECV_BITMAP => None,
            _ => return Ok(None),
        };
        let length = usize::from(ahead.be16(LENGTH)?);
        let mut payload = Reader::new(ahead.take(length, "postcopy command")?);
        let whole = |error| match error {
            // The payload is complete: more input does not help.
            WireError::Truncated { needed, .. } => WireError::Mismatch {
                what: LENGTH,
                expected: (length + needed) as u64,
                got: length as u64,
            },
            other => other,
        };
        let command = match without_payload {
            Some(command) => command,
            None => Self::decode_payload(id, &mut payload, records).map_err(whole)?,
        };
        payload.finish("postcopy command")?;
        *reader = ahead;
        Ok(Some(command))
    }

    fn decode_payload(
        id: u16,
        payload: &mut Reader<'a>,
        records: &RamRecords,
    ) -> Result<Self, WireError> {
        let find = |name: &str| block::find(&records.blocks, name.as_bytes(), 0);
        match id {
            PACKAGED => Ok(Self::Packaged(payload.be32("length of PACKAGED")?)),
            RECV_BITMAP => Ok(Self::RecvBitmap(find(
                payload.counted_string("block of RECV_BITMAP")?,
            )?)),
            _ => {
                let version = payload.u8("version of RAM_DISCARD")?;
                check_byte(version, DISCARD_VERSION, "version of RAM_DISCARD")?;
                let block = find(payload.counted_string("block of RAM_DISCARD")?)?;
                check_byte(
                    payload.u8("end of a block's name")?,
                    0,
                    "end of a block's name",
                )?;
                let (ranges, rest) = payload
                    .take(payload.remaining(), "ranges of RAM_DISCARD")?
                    .as_chunks();
                if !rest.is_empty() {
                    return Err(WireError::Trailing {
                        what: "ranges of RAM_DISCARD",
                        extra: rest.len(),
                    });
                }
                let ranges = Ranges(ranges);
                for (start, length) in ranges.iter() {
                    records.blocks[block].check_range(start, length)?;
                }
                Ok(Self::Discard { block, ranges })
            }
        }
    }
}

fn check_byte(got: u8, expected: u8, what: &'static str) -> Result<(), WireError> {
    if got == expected {
        return Ok(());
    }
    Err(WireError::Mismatch {
        what,
        expected: u64::from(expected),
        got: u64::from(got),
    })
}

/// Decodes a preempt channel (the connection for requested pages), which consists of page records without sections.
#[derive(Debug)]
pub struct PreemptDecoder(RamRecords);

/// Maximum number of bytes before the content of a page: offset, length byte and name of the RAM block.
pub const PREEMPT_HEAD_LEN: usize = 8 + 1 + 255;

/// A record of a preempt channel.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub enum PreemptRecord<'a> {
    /// A requested page.
    Page {
        /// Index into the RAM block list.
        block: usize,
        /// Byte offset in the block, a multiple of the page size. The whole page is inside the block.
        offset: u64,
        /// Bytes of the page; `None` if all are zero.
        content: Option<&'a [u8; crate::PAGE_SIZE]>,
    },
    /// End of the records. QEMU 7.2 sends this record; later versions only close the connection.
    Eos,
}

impl PreemptDecoder {
    /// Creates a decoder for a migration with these RAM blocks.
    #[must_use]
    pub fn new(blocks: Vec<RamBlockEntry>) -> Self {
        Self(RamRecords::new(blocks))
    }

    /// Returns RAM block (an index) and byte offset of the page whose record is at the start of `input`. The record may be
    /// incomplete: [`PREEMPT_HEAD_LEN`] bytes suffice.
    ///
    /// # Errors
    /// [`WireError::Truncated`] until the head has arrived; any other [`WireError`] if the page is invalid.
    pub fn place(&self, input: &[u8]) -> Result<(usize, u64), WireError> {
        let mut reader = Reader::new(input);
        let first = reader.be64("RAM record")?;
        if first & (ram::PAGE | ram::ZERO) == 0 {
            let what = "another record than a page on the preempt channel";
            return Err(WireError::Unsupported { what });
        }
        self.0.read_place(first, &mut reader)
    }

    /// Decodes the record at the start of `input`. Returns the record and its length in bytes.
    ///
    /// # Errors
    /// [`WireError::Truncated`] while the record is incomplete; any other error is final.
    pub fn next<'a>(&mut self, input: &'a [u8]) -> Result<(PreemptRecord<'a>, usize), WireError> {
        let mut reader = Reader::new(input);
        let unsupported = |what| Err(WireError::Unsupported { what });
        let record = match self.0.read(&mut reader)? {
            RamRecord::Eos => PreemptRecord::Eos,
            RamRecord::MultifdFlush => {
                return unsupported("a multifd flush on the preempt channel");
            }
            RamRecord::Page {
                block,
                offset,
                content,
            } => PreemptRecord::Page {
                block,
                offset,
                content: match content {
                    PageContent::Zero => None,
                    PageContent::Normal(bytes) => Some(bytes),
                    PageContent::Xbzrle(_) | PageContent::Compressed(_) => {
                        return unsupported("a compressed page on the preempt channel");
                    }
                },
            },
        };
        Ok((record, reader.position()))
    }
}

/// Appends a record of a preempt channel with the page at byte `offset` of RAM block `block`. If `content` is `None`, the page
/// is zero.
///
/// # Errors
/// If the block name does not have 1 to 255 bytes.
pub fn put_preempt_page(
    block: &str,
    offset: u64,
    content: Option<&[u8; crate::PAGE_SIZE]>,
    out: &mut Vec<u8>,
) -> Result<(), WireError> {
    let kind = match content {
        Some(_) => ram::PAGE,
        None => ram::ZERO,
    };
    out.extend_from_slice(&(offset | kind).to_be_bytes());
    put_counted_string(out, block, "name of a RAM block")?;
    match content {
        Some(content) => out.extend_from_slice(content),
        None => out.push(0),
    }
    Ok(())
}

/// Appends the end of a preempt channel. QEMU 7.2 waits for this record; later versions only need the close of the connection.
pub fn put_preempt_end(out: &mut Vec<u8>) {
    out.extend_from_slice(&ram::EOS.to_be_bytes());
}

fn put_head(id: u16, length: usize, out: &mut Vec<u8>) {
    out.push(COMMAND);
    out.extend_from_slice(&id.to_be_bytes());
    // The block name has at most 255 bytes, so the length fits.
    out.extend_from_slice(&u16::try_from(length).unwrap_or(u16::MAX).to_be_bytes());
}

/// Maximum number of ranges in a DISCARD command, as in QEMU (`MAX_DISCARDS_PER_COMMAND`).
const RANGES: usize = 12;

/// Appends a command to discard `length` bytes of RAM block `block`, from byte `start` on. At least one such command must
/// precede [`put_listen`]: without it QEMU waits forever.
///
/// # Errors
/// If the block name does not have 1 to 255 bytes.
pub fn put_discard(
    block: &str,
    start: u64,
    length: u64,
    out: &mut Vec<u8>,
) -> Result<(), WireError> {
    put_discards(block, &[(start, length)], out)
}

/// Appends commands to discard many ranges of a block, see [`put_discard`]. Each range has a start and a length, in bytes.
///
/// # Errors
/// If the block name does not have 1 to 255 bytes.
pub fn put_discards(
    block: &str,
    ranges: &[(u64, u64)],
    out: &mut Vec<u8>,
) -> Result<(), WireError> {
    for ranges in ranges.chunks(RANGES) {
        let mut payload = vec![DISCARD_VERSION];
        put_counted_string(&mut payload, block, "name of a RAM block")?;
        payload.push(0);
        for (start, length) in ranges {
            payload.extend_from_slice(&start.to_be_bytes());
            payload.extend_from_slice(&length.to_be_bytes());
        }
        put_head(POSTCOPY_RAM_DISCARD, payload.len(), out);
        out.extend_from_slice(&payload);
    }
    Ok(())
}

/// Appends LISTEN: from now on the destination may request pages.
pub fn put_listen(out: &mut Vec<u8>) {
    put_head(POSTCOPY_LISTEN, 0, out);
}

/// Appends RUN: the destination may run the guest.
pub fn put_run(out: &mut Vec<u8>) {
    put_head(POSTCOPY_RUN, 0, out);
}

/// Appends the end of a package: PING with `value`, which is answered after the devices are loaded, and RUN.
pub fn put_package_end(value: u32, out: &mut Vec<u8>) {
    Command::Ping(value).encode(out);
    put_run(out);
}

/// Value of the PING before RUN with which QEMU 10.2 and newer asks if the devices are loaded (`QEMU_VM_PING_PACKAGED_LOADED`).
/// Until the answer the source is in state `postcopy-device`. If the connection ends in this state, the source continues its
/// guest.
pub const DEVICES_LOADED: u32 = 0x42;

/// Number of bytes at the end of a package that [`asks_for_loaded_devices`] examines: those of PING and RUN.
pub const LOADED_DEVICES_END: usize = 14;

/// Returns true if `package` ends with a PING that asks if the devices are loaded. The source may then run the guest again
/// before the answer.
#[must_use]
pub fn asks_for_loaded_devices(package: &[u8]) -> bool {
    let mut end = Vec::new();
    put_package_end(DEVICES_LOADED, &mut end);
    package.ends_with(&end)
}

/// Appends RESUME: an interrupted postcopy continues.
pub fn put_resume(out: &mut Vec<u8>) {
    put_head(POSTCOPY_RESUME, 0, out);
}

/// Appends RECV_BITMAP: asks which pages of RAM block `block` the destination has received.
///
/// # Errors
/// If the block name does not have 1 to 255 bytes.
pub fn put_bitmap_request(block: &str, out: &mut Vec<u8>) -> Result<(), WireError> {
    let mut payload = Vec::new();
    put_counted_string(&mut payload, block, "name of a RAM block")?;
    put_head(RECV_BITMAP, payload.len(), out);
    out.extend_from_slice(&payload);
    Ok(())
}

/// Returns the length in bytes of a bitmap of `pages` pages: a whole number of 64-bit words.
#[must_use]
pub fn bitmap_len(pages: usize) -> usize {
    pages.div_ceil(64) * 8
}

/// Appends the data after a RECV_BITMAP message about a RAM block of `pages` pages. `received` returns the n-th word of the
/// bitmap: 64 bits, each set if its page was received.
pub fn put_bitmap(pages: usize, received: impl Fn(usize) -> u64, out: &mut Vec<u8>) {
    let length = bitmap_len(pages);
    out.extend_from_slice(&(length as u64).to_be_bytes());
    for word in 0..length / 8 {
        out.extend_from_slice(&received(word).to_le_bytes());
    }
    out.extend_from_slice(&BITMAP_ENDS.to_be_bytes());
}

/// Reads the data after a RECV_BITMAP message about a RAM block of `pages` pages. Returns the bitmap. The lowest bit of its
/// first byte is the first page.
///
/// # Errors
/// [`WireError::Mismatch`] if the bitmap has another length, or its end mark is missing.
pub fn read_bitmap<'a>(reader: &mut Reader<'a>, pages: usize) -> Result<&'a [u8], WireError> {
    let mismatch = |what, expected, got| {
        Err(WireError::Mismatch {
            what,
            expected,
            got,
        })
    };
    let expected = bitmap_len(pages);
    let length = reader.be64("bitmap of received pages")?;
    if length != expected as u64 {
        return mismatch(
            "length of a bitmap of received pages",
            expected as u64,
            length,
        );
    }
    let bits = reader.take(expected, "bitmap of received pages")?;
    match reader.be64("bitmap of received pages")? {
        BITMAP_ENDS => Ok(bits),
        other => mismatch("end of a bitmap of received pages", BITMAP_ENDS, other),
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn a_package_shows_whether_its_source_may_take_the_guest_back() {
        // Ends of packages of QEMU 11.1 and 10.0.
        let newer =
            b"\x7e\0\0\0\x2a\x08\0\x02\0\x04\0\0\0\x03\x08\0\x02\0\x04\0\0\0\x42\x08\0\x05\0\0";
        let older = b"\x7e\0\0\0\x2a\x08\0\x02\0\x04\0\0\0\x03\x08\0\x05\0\0";
        assert!(asks_for_loaded_devices(newer));
        let (_, end) = newer.split_at(newer.len() - LOADED_DEVICES_END);
        assert!(asks_for_loaded_devices(end));
        assert!(!asks_for_loaded_devices(older));
    }

    #[test]
    fn encoded_commands_equal_those_of_qemu() {
        // The last range in a command that QEMU 10.0 sent for a small ROM block.
        let mut out = Vec::new();
        put_discard("vga.rom", 0, 0x10000, &mut out).unwrap();
        let expected = [
            &b"\x08\0\x06\0\x1a\0\x07vga.rom\0"[..],
            &[0; 8],
            &[0, 0, 0, 0, 0, 1, 0, 0],
        ];
        assert_eq!(out, expected.concat());
        out.clear();
        put_listen(&mut out);
        put_run(&mut out);
        put_resume(&mut out);
        assert_eq!(out, b"\x08\0\x04\0\0\x08\0\x05\0\0\x08\0\x09\0\0");
        out.clear();
        put_bitmap_request("pc.ram", &mut out).unwrap();
        assert_eq!(out, b"\x08\0\x0a\0\x07\x06pc.ram");
        assert!(put_discard("", 0, 0, &mut out).is_err());

        // 13 ranges need two commands: one with QEMU's maximum of ranges, and one with the rest.
        out.clear();
        put_discards("pc.ram", &[(0, 4096); 13], &mut out).unwrap();
        assert_eq!(&out[..5], [8, 0, 6, 0, 201]);
        assert_eq!(&out[5 + 201..][..5], [8, 0, 6, 0, 25]);
        assert_eq!(out.len(), 5 + 201 + 5 + 25);
    }

    /// Decodes a command for RAM blocks `a` of two pages and `b` of one page.
    fn decode(bytes: &[u8]) -> Result<Option<PostcopyCommand<'_>>, WireError> {
        let blocks = [("a", 2), ("b", 1)];
        let blocks = blocks.map(|(name, pages)| RamBlockEntry::new(name, pages * 4096));
        let mut reader = Reader::new(&bytes[1..]);
        let command = PostcopyCommand::decode(&mut reader, &RamRecords::new(blocks.to_vec()));
        if matches!(command, Ok(Some(_))) {
            assert_eq!(reader.remaining(), 0);
        }
        command
    }

    #[test]
    fn written_commands_are_read_back() {
        let mut out = Vec::new();
        put_discard("b", 0, 4096, &mut out).unwrap();
        let Ok(Some(PostcopyCommand::Discard { block: 1, ranges })) = decode(&out) else {
            panic!("no discard");
        };
        assert_eq!(ranges.iter().collect::<Vec<_>>(), [(0, 4096)]);
        let written = |put: fn(&mut Vec<u8>), command| {
            let mut out = Vec::new();
            put(&mut out);
            assert_eq!(decode(&out).unwrap(), Some(command));
        };
        written(put_listen, PostcopyCommand::Listen);
        written(put_run, PostcopyCommand::Run);
        written(put_resume, PostcopyCommand::Resume);
        written(
            |out| put_bitmap_request("a", out).unwrap(),
            PostcopyCommand::RecvBitmap(0),
        );
        written(
            |out| crate::main_channel::put_packaged_head(300, out).unwrap(),
            PostcopyCommand::Packaged(300),
        );
        let ping = b"\x08\0\x02\0\x04\0\0\0\x01";
        assert_eq!(decode(ping).unwrap(), None, "one of precopy");
    }

    #[test]
    fn a_command_discards_pages_of_its_block_only_and_has_its_length() {
        let discard = |name: &str, start, length| {
            let mut out = Vec::new();
            put_discard(name, start, length, &mut out).unwrap();
            out
        };
        for (start, length) in [
            (0, 3 * 4096),
            (4096, 2 * 4096),
            (1, 4096),
            (0, 4095),
            (u64::MAX - 4095, 4096),
            (4096, u64::MAX - 4095),
        ] {
            let bytes = discard("a", start, length);
            assert!(
                matches!(decode(&bytes), Err(WireError::BadRange { .. })),
                "{start:#x} {length:#x}"
            );
        }
        let bytes = discard("c", 0, 0);
        assert!(matches!(
            decode(&bytes),
            Err(WireError::UnknownBlock { .. })
        ));
        assert!(decode(&discard("a", 8192, 0)).unwrap().is_some(), "nothing");
        for bytes in [
            &b"\x08\0\x04\0\x01\0"[..],
            b"\x08\0\x06\0\x00",
            b"\x08\0\x06\0\x03\0\x01a",
            b"\x08\0\x06\0\x04\x01\x01a\0",
            b"\x08\0\x06\0\x04\0\x01a\x01",
            b"\x08\0\x06\0\x05\0\x01a\0\0",
            b"\x08\0\x07\0\x03\0\0\0",
            b"\x08\0\x0a\0\x00",
            b"\x08\0\x0a\0\x03\x01aa",
        ] {
            let error = decode(bytes).unwrap_err();
            assert!(!matches!(error, WireError::Truncated { .. }), "{bytes:?}");
        }
        let cut = b"\x08\0\x07\0\x04\0";
        assert!(matches!(decode(cut), Err(WireError::Truncated { .. })));
    }

    #[test]
    fn a_preempt_channel_has_whole_and_zero_pages_of_the_blocks() {
        let blocks = vec![RamBlockEntry::new("a", 2 * 4096)];
        let mut decoder = PreemptDecoder::new(blocks);
        let continued = 0x1022_u64.to_be_bytes();
        assert!(decoder.next(&[&continued[..], b"\0"].concat()).is_err());
        let page = [&8_u64.to_be_bytes()[..], b"\x01a", &[7; 4096]].concat();
        assert!(matches!(
            decoder.next(&page[..page.len() - 1]),
            Err(WireError::Truncated { needed: 1, .. })
        ));
        assert_eq!(decoder.place(&page[..10]).unwrap(), (0, 0));
        assert!(matches!(
            decoder.place(&page[..9]),
            Err(WireError::Truncated { .. })
        ));
        assert!(decoder.place(&0x10_u64.to_be_bytes()).is_err());
        let whole = PreemptRecord::Page {
            block: 0,
            offset: 0,
            content: Some(&[7; 4096]),
        };
        assert_eq!(decoder.next(&page).unwrap(), (whole, page.len()));
        let zero = PreemptRecord::Page {
            block: 0,
            offset: 4096,
            content: None,
        };
        let bytes = [&continued[..], b"\0"].concat();
        assert_eq!(decoder.next(&bytes).unwrap(), (zero, 9));
        let mut eos = Vec::new();
        put_preempt_end(&mut eos);
        assert_eq!(decoder.next(&eos).unwrap(), (PreemptRecord::Eos, 8));
        for flags in [0x200_u64, 0x4, 0x80] {
            assert!(decoder.next(&flags.to_be_bytes()).is_err());
        }
        let compressed = [&0x120_u64.to_be_bytes()[..], b"\0\0\0\x01x"].concat();
        assert!(decoder.next(&compressed).is_err());
    }

    #[test]
    fn a_bitmap_has_its_length_and_its_end() {
        let bits = [0xaa; 16];
        let mut bytes = Vec::new();
        put_bitmap(65, |_| 0xaaaa_aaaa_aaaa_aaaa, &mut bytes);
        let read = |bytes: &[u8], pages| {
            let mut reader = Reader::new(bytes);
            read_bitmap(&mut reader, pages).map(<[u8]>::to_vec)
        };
        assert_eq!(read(&bytes, 128).unwrap(), bits);
        assert_eq!(read(&bytes, 65).unwrap(), bits);
        assert!(read(&bytes, 129).is_err());
        assert!(matches!(
            read(&bytes[..31], 128),
            Err(WireError::Truncated { .. })
        ));
        let mut other = bytes;
        other[31] ^= 1;
        assert!(matches!(read(&other, 128), Err(WireError::Mismatch { .. })));
    }
}

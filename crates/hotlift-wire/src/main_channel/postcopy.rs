//! What a source of postcopy says: the destination runs the guest before it has the pages, and asks for them.

use super::command::{
    POSTCOPY_LISTEN, POSTCOPY_RAM_DISCARD, POSTCOPY_RESUME, POSTCOPY_RUN, RECV_BITMAP,
};
use super::section::COMMAND;
use crate::reader::put_counted_string;
use crate::{Reader, WireError};

/// Behind a bitmap, to show that it has its length (QEMU: `RAMBLOCK_RECV_BITMAP_ENDING`).
const BITMAP_ENDS: u64 = 0x0123_4567_89ab_cdef;

/// Version of the ranges that are discarded.
const DISCARD_VERSION: u8 = 0;

fn put_head(id: u16, length: usize, out: &mut Vec<u8>) {
    out.push(COMMAND);
    out.extend_from_slice(&id.to_be_bytes());
    // A name has at most 255 bytes.
    out.extend_from_slice(&u16::try_from(length).unwrap_or(u16::MAX).to_be_bytes());
}

/// The destination is to have nothing in `length` bytes of RAM block `block` from `start` on. At least one such command
/// comes before [`put_listen`]: a QEMU without any waits for ever.
///
/// # Errors
/// A block name that is not 1 to 255 bytes.
pub fn put_discard(
    block: &str,
    start: u64,
    length: u64,
    out: &mut Vec<u8>,
) -> Result<(), WireError> {
    let mut payload = vec![DISCARD_VERSION];
    put_counted_string(&mut payload, block, "name of a RAM block")?;
    payload.push(0);
    payload.extend_from_slice(&start.to_be_bytes());
    payload.extend_from_slice(&length.to_be_bytes());
    put_head(POSTCOPY_RAM_DISCARD, payload.len(), out);
    out.extend_from_slice(&payload);
    Ok(())
}

/// From now on pages come as they are asked for.
pub fn put_listen(out: &mut Vec<u8>) {
    put_head(POSTCOPY_LISTEN, 0, out);
}

/// The guest may run.
pub fn put_run(out: &mut Vec<u8>) {
    put_head(POSTCOPY_RUN, 0, out);
}

/// A postcopy that was interrupted goes on.
pub fn put_resume(out: &mut Vec<u8>) {
    put_head(POSTCOPY_RESUME, 0, out);
}

/// Asks which pages of RAM block `block` the destination has.
///
/// # Errors
/// A block name that is not 1 to 255 bytes.
pub fn put_bitmap_request(block: &str, out: &mut Vec<u8>) -> Result<(), WireError> {
    let mut payload = Vec::new();
    put_counted_string(&mut payload, block, "name of a RAM block")?;
    put_head(RECV_BITMAP, payload.len(), out);
    out.extend_from_slice(&payload);
    Ok(())
}

/// Bytes of the bitmap of `pages` pages: whole words of 64.
#[must_use]
pub fn bitmap_len(pages: usize) -> usize {
    pages.div_ceil(64) * 8
}

/// Reads what follows the message with the bitmap of a RAM block of `pages` pages: a bit a page, the lowest first.
///
/// # Errors
/// [`WireError::Mismatch`] for a bitmap of another length, or without its end.
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
    fn commands_are_those_that_a_qemu_sends() {
        // The last range of a command that QEMU 10.0 has sent for a small ROM block.
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
    }

    #[test]
    fn a_bitmap_has_its_length_and_its_end() {
        let bits = [0xaa; 16];
        let bytes = [&16_u64.to_be_bytes()[..], &bits, &BITMAP_ENDS.to_be_bytes()].concat();
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

//! Fuzz target for QEMU's `mapped-ram` file.

use hotlift_wire::limits;
use hotlift_wire::main_channel::{MappedEvent, MappedRamDecoder, MappedStep};

use crate::memory::{at_the_end, bounded};

const fn memory(input: &[u8]) -> usize {
    (64 << 10) + 64 * input.len()
}

/// Reads a file that begins with the input and continues with zeros. The first two bytes of the input give the file's
/// length in MiB. Zeros are used because most of a RAM file is a hole.
pub fn walk(data: &[u8]) {
    let Some((mib, data)) = data.split_first_chunk() else {
        return;
    };
    let length = (u64::from(u16::from_be_bytes(*mib)) << 20).max(data.len() as u64);
    at_the_end(data, |data| bounded(memory(data), || read(data, length)));
}

fn read(data: &[u8], file_len: u64) {
    /// Content of a hole in the file: zeros.
    static HOLE: [u8; limits::MAPPED_RAM_RECORD] = [0; limits::MAPPED_RAM_RECORD];
    let mut decoder = MappedRamDecoder::new(0, file_len);
    loop {
        let position = decoder.position();
        assert!(position <= file_len, "outside of the file");
        let rest = usize::try_from(position).ok().and_then(|at| data.get(at..));
        let left = usize::try_from(file_len - position).unwrap_or(usize::MAX);
        let rest = match rest {
            Some(rest) if !rest.is_empty() => rest,
            _ => &HOLE[..left.min(HOLE.len())],
        };
        match decoder.next(rest) {
            Ok(MappedStep::Event(MappedEvent::Block(block))) => {
                assert!(position <= block.bitmap_offset);
                let bitmap_end = block.bitmap_offset.checked_add(block.bitmap_len());
                assert!(bitmap_end.expect("64 bits") <= block.pages_offset);
                assert!(block.end() <= file_len, "pages outside of the file");
                assert_eq!(decoder.position(), block.end());
            }
            Ok(MappedStep::Event(MappedEvent::RamEnd)) | Err(_) => return,
            Ok(MappedStep::Event(_)) => assert!(decoder.position() > position, "no way on"),
            Ok(MappedStep::Need(more)) => {
                assert!(more > 0, "needs nothing, and says nothing");
                return;
            }
        }
    }
}

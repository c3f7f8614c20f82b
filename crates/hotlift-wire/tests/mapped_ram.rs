//! Tests the stream of a `mapped-ram` file: its layout, decoding, and checks against the file.

use hotlift_wire::main_channel::{
    Command, Configuration, FILE_HEADER, MAPPED_RAM, MappedBlock, MappedEvent, MappedLayout,
    MappedRamDecoder, MappedStep, put_mapped_end,
};
use hotlift_wire::{RamBlockEntry, WireError};
use proptest::prelude::*;

const RAM_ID: u32 = 2;

/// The stream of a file with only zero pages, and the position of the end of RAM.
struct File {
    bytes: Vec<u8>,
    blocks: Vec<MappedBlock>,
    end: u64,
}

fn configuration(capabilities: &[&str]) -> Configuration {
    Configuration {
        machine: "pc-i440fx-10.0".to_owned(),
        capabilities: capabilities.iter().map(|&name| name.to_owned()).collect(),
        ..Configuration::default()
    }
}

fn file(start: usize, blocks: &[(&str, u64)]) -> File {
    let mut bytes = vec![0xee; start];
    bytes.extend_from_slice(&FILE_HEADER);
    configuration(&[MAPPED_RAM]).encode(&mut bytes).unwrap();
    let entries: Vec<_> = blocks
        .iter()
        .map(|&(name, length)| RamBlockEntry::new(name, length))
        .collect();
    let position = u64::try_from(bytes.len()).unwrap();
    let layout = MappedLayout::new(RAM_ID, &entries, position).unwrap();
    for (position, piece) in &layout.pieces {
        bytes.resize(usize::try_from(*position).unwrap(), 0);
        bytes.extend_from_slice(piece);
    }
    assert_eq!(u64::try_from(bytes.len()).unwrap(), layout.end);
    Command::SwitchoverStart.encode(&mut bytes);
    put_mapped_end(RAM_ID, &mut bytes);
    let end = u64::try_from(bytes.len()).unwrap();
    bytes.extend_from_slice(b"devices");
    File {
        bytes,
        blocks: layout.blocks,
        end,
    }
}

/// Reads a file up to its devices; extends the decoder's input byte by byte, as `Need` requests.
fn walk(start: u64, bytes: &[u8]) -> Result<(Vec<MappedEvent>, u64), WireError> {
    let file_len = u64::try_from(bytes.len()).unwrap();
    let mut decoder = MappedRamDecoder::new(start, file_len);
    let mut events = Vec::new();
    let mut length = 0;
    loop {
        let rest = usize::try_from(decoder.position())
            .ok()
            .and_then(|position| bytes.get(position..))
            .expect("a position in the file");
        match decoder.next(&rest[..length.min(rest.len())])? {
            MappedStep::Need(_) if length >= rest.len() => {
                return Err(WireError::Truncated {
                    what: "file",
                    needed: 1,
                });
            }
            MappedStep::Need(needed) => {
                assert!(needed > 0);
                length += needed;
            }
            MappedStep::Event(event) => {
                length = 0;
                let ended = event == MappedEvent::RamEnd;
                events.push(event);
                if ended {
                    return Ok((events, decoder.position()));
                }
            }
        }
    }
}

#[test]
fn a_layout_is_walked_back_to_its_blocks_over_all_areas() {
    let blocks = [("pc.ram", 2 << 20), ("pc.bios", 64 << 10), ("vga", 4096)];
    for start in [0, 777] {
        let file = file(start, &blocks);
        let (events, end) = walk(start as u64, &file.bytes).unwrap();
        assert_eq!(end, file.end);
        let expected: Vec<_> = [
            MappedEvent::Header,
            MappedEvent::Configuration(configuration(&[MAPPED_RAM])),
            MappedEvent::RamStart { section_id: RAM_ID },
        ]
        .into_iter()
        .chain(file.blocks.iter().cloned().map(MappedEvent::Block))
        .chain([
            MappedEvent::RamEos,
            MappedEvent::Command(Command::SwitchoverStart),
            MappedEvent::RamEnd,
        ])
        .collect();
        assert_eq!(events, expected);
    }
}

#[test]
fn blocks_lie_where_qemu_puts_them() {
    // 512 pages have 8 words of bitmap; pages start at the next MiB, and the next entry follows them.
    let entries = [("a", 2 << 20), ("b", 4096)].map(|(name, len)| RamBlockEntry::new(name, len));
    let layout = MappedLayout::new(0, &entries, 100).unwrap();
    let [a, b] = &layout.blocks[..] else {
        panic!("two blocks")
    };
    // Type, id, "ram", instance, version; the total; name, length; 28 bytes of header.
    let head = 1 + 4 + 4 + 4 + 4 + 8 + (2 + 8) + 28;
    assert_eq!((a.bitmap_offset, a.bitmap_len()), (100 + head, 64));
    assert_eq!((a.pages_offset, a.end()), (1 << 20, 3 << 20));
    assert_eq!((b.bitmap_offset, b.bitmap_len()), ((3 << 20) + 38, 8));
    assert_eq!(b.pages_offset, 4 << 20);
    assert_eq!(layout.end, (4 << 20) + 4096 + 8 + 5);
}

/// Changes the header of the first block and returns the decoder's error.
fn with_header(change: impl Fn(&mut [u8])) -> WireError {
    let mut file = file(0, &[("a", 8192), ("b", 4096)]);
    let bitmap = usize::try_from(file.blocks[0].bitmap_offset).unwrap();
    change(&mut file.bytes[bitmap - 36..bitmap]);
    walk(0, &file.bytes).expect_err("a damaged header")
}

#[test]
fn a_header_with_false_values_is_refused() {
    let put = |at: usize, value: u64| {
        move |bytes: &mut [u8]| bytes[at..at + 8].copy_from_slice(&value.to_be_bytes())
    };
    for length in [0, 1, 4097, 16384, u64::MAX, u64::MAX - 4095] {
        let error = with_header(put(0, length));
        assert!(matches!(error, WireError::BadBlockLength { .. }), "{error}");
    }
    for page_size in [0, 1, 2048, 8192, u64::MAX] {
        let error = with_header(put(12, page_size));
        assert!(matches!(error, WireError::Mismatch { .. }), "{error}");
    }
    for (at, value) in [
        (20, 0),
        (20, 60),
        (20, 1 << 20),
        (20, u64::MAX - 3),
        (28, 0),
        (28, 4096 - 1),
        (28, (1 << 20) + 8),
        (28, 1 << 40),
        (28, u64::MAX - 4095),
        (28, u64::MAX - 8191),
    ] {
        let error = with_header(put(at, value));
        assert!(matches!(error, WireError::BadMappedBlock { .. }), "{error}");
    }
    let error = with_header(|bytes| bytes[11] = 2);
    assert!(
        matches!(error, WireError::Mismatch { got: 2, .. }),
        "{error}"
    );
}

#[test]
fn only_a_mapped_ram_stream_is_read() {
    for capabilities in [
        &[][..],
        &["x-ignore-shared"],
        &["x-ignore-shared", MAPPED_RAM],
        &[MAPPED_RAM, "x-ignore-shared"],
    ] {
        let mut bytes = FILE_HEADER.to_vec();
        configuration(capabilities).encode(&mut bytes).unwrap();
        bytes.push(0);
        let error = walk(0, &bytes).unwrap_err();
        assert!(matches!(error, WireError::Unsupported { .. }), "{error}");
    }
}

#[test]
fn a_record_in_a_later_section_is_refused() {
    // A PAGE, a FLUSH and a ZERO record in place of EOS.
    for record in [0x008_u64, 0x200, 0x002, 0x1010] {
        let mut file = file(0, &[("a", 8192)]);
        let end = usize::try_from(file.end).unwrap();
        file.bytes[end - 13..end - 5].copy_from_slice(&record.to_be_bytes());
        let error = walk(0, &file.bytes).unwrap_err();
        assert!(matches!(error, WireError::Mismatch { .. }), "{error}");
    }
}

#[test]
fn a_cut_file_is_refused() {
    let file = file(0, &[("a", 8192), ("b", 4096)]);
    let end = usize::try_from(file.end).unwrap();
    let interesting = (0..200)
        .chain((end - 3000)..end)
        .chain((1..end / 1000).map(|n| n * 1000));
    for length in interesting {
        let error = walk(0, &file.bytes[..length]).unwrap_err();
        let expected = matches!(
            error,
            WireError::Truncated { .. } | WireError::BadMappedBlock { .. }
        );
        assert!(expected, "{length}: {error}");
    }
}

#[test]
fn blocks_of_an_invalid_list_are_not_laid_out() {
    for entries in [
        vec![RamBlockEntry::new("a", 4096), RamBlockEntry::new("a", 4096)],
        vec![RamBlockEntry::new("a", 4095)],
        vec![RamBlockEntry::new("a", 0)],
        vec![RamBlockEntry::new("", 4096)],
        vec![RamBlockEntry::new("a", u64::MAX - 4095)],
    ] {
        assert!(MappedLayout::new(0, &entries, 0).is_err(), "{entries:?}");
    }
}

proptest! {
    #[test]
    fn damage_before_the_devices_is_an_error_or_yields_a_valid_file(
        at in 0..400_usize,
        byte in any::<u8>(),
    ) {
        let mut file = file(0, &[("a", 8192), ("b", 4096)]);
        file.bytes[at] = byte;
        if let Ok((events, end)) = walk(0, &file.bytes) {
            prop_assert!(end <= file.bytes.len() as u64);
            let mut last = 0;
            for event in events {
                if let MappedEvent::Block(block) = event {
                    prop_assert!(last < block.bitmap_offset);
                    prop_assert!(block.bitmap_offset + block.bitmap_len() <= block.pages_offset);
                    last = block.end();
                }
            }
            prop_assert!(last <= end);
        }
    }
}

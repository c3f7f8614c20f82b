//! Tests that channels recorded from QEMU 7.2 and 10.0 are decoded to the guest's pages.

mod support;

use std::collections::BTreeSet;

use hotlift_mem::PAGE_SIZE;
use support::stream::{RAM_PAGES, Stream, ram_page};

#[test]
fn channels_of_qemu_decode_to_the_guests_pages() {
    for name in [
        "7.2-none",
        "10.0-none",
        "7.2-zlib",
        "10.0-zlib",
        "7.2-zstd",
        "10.0-zstd",
    ] {
        let stream = Stream::recorded(name);
        let mut seen = BTreeSet::new();
        for (_, packets) in &stream.channels {
            for packet in packets {
                if stream.blocks[packet.block].name != "pc.ram" {
                    continue;
                }
                for (offset, page) in packet.normal.iter().zip(packet.pages.chunks(PAGE_SIZE)) {
                    let number = usize::try_from(*offset).expect("a small block") / PAGE_SIZE;
                    let counted = if (1..16).contains(&number) { 2 } else { 0 };
                    assert!(
                        page[counted..] == ram_page(number)[counted..],
                        "{name}: page {number} differs"
                    );
                    seen.insert(number);
                }
            }
        }
        let normal: BTreeSet<usize> = (0..RAM_PAGES).filter(|n| n / 8 % 2 == 0).collect();
        assert!(seen.is_superset(&normal), "{name}: pages are missing");
    }
}

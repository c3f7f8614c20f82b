//! Tests that the decoder finds the end of device sections before the end of RAM, whatever their content.

mod common;

use common::{connection, decoder_for};
use hotlift_wire::main_channel::{
    Configuration, DeviceLengths, EarlyLengths, EarlySection, MainDecoder, MainEncoder, MainEvent,
    Step,
};
use hotlift_wire::{RamBlockEntry, WireError, limits};

const FULL: u8 = 4;
const ID: u32 = 0x27;
const RAM: u32 = 2;
const BLOCKS: u64 = 192;
const BLOCK: u64 = 2 << 20;

fn footer() -> Vec<u8> {
    [&[0x7e][..], &ID.to_be_bytes()].concat()
}

fn section(idstr: &str, payload: &[u8]) -> Vec<u8> {
    let mut out = vec![FULL];
    out.extend(ID.to_be_bytes());
    out.push(u8::try_from(idstr.len()).unwrap());
    out.extend(idstr.as_bytes());
    out.extend([0, 0, 0, 0, 0, 0, 0, 1]);
    out.extend(payload);
    out.extend(footer());
    out
}

/// Returns a PART or END of RAM, up to its payload.
fn ram(kind: u8) -> Vec<u8> {
    [&[kind][..], &RAM.to_be_bytes()].concat()
}

/// Returns the state of virtio-mem in which these blocks are plugged.
fn virtio_mem(plugged: &[u64]) -> Vec<u8> {
    let mut words = [0_u64; 3];
    for block in plugged {
        words[usize::try_from(block / 64).unwrap()] |= 1 << (block % 64);
    }
    let mut out = Vec::new();
    for field in [4 << 30, BLOCKS * BLOCK, BLOCK] {
        out.extend(field.to_be_bytes());
    }
    out.extend([0; 4]);
    let bytes = u64::try_from(plugged.len()).unwrap() * BLOCK;
    out.extend(bytes.to_be_bytes());
    words.iter().for_each(|word| out.extend(word.to_be_bytes()));
    out
}

/// Creates a decoder after START of `ram`, or before it.
fn decoder(has_ram: bool) -> MainDecoder {
    let mut start = Vec::new();
    let configuration = Configuration {
        machine: "hotlift".into(),
        ..Default::default()
    };
    let mut encoder = MainEncoder::new(&configuration, &mut start).unwrap();
    if has_ram {
        encoder.set_ram_id(RAM).unwrap();
        let blocks = [RamBlockEntry::new("a", 4096)];
        encoder.ram_start(&blocks, true, &mut start).unwrap();
    }
    let mut decoder = MainDecoder::new(DeviceLengths::LengthPrefixed).taking_early_sections();
    let (mut at, end) = (0, start.len());
    // The configuration ends before the first foreign byte.
    start.push(FULL);
    while at < end {
        match decoder.next(&start[at..]).unwrap() {
            Step::Event { consumed, .. } => at += consumed,
            Step::Need(needed) => panic!("waits for {needed} bytes at {at}"),
        }
    }
    decoder
}

/// Reads `section` and then `next`, which arrive byte by byte.
fn trickles_into(
    mut decoder: MainDecoder,
    section: &[u8],
    next: &[u8],
) -> Result<EarlySection, WireError> {
    let stream = [section, next].concat();
    for length in 1..=stream.len() {
        match decoder.next(&stream[..length])? {
            Step::Need(needed) => {
                assert!(needed > 0 && length + needed <= stream.len(), "at {length}");
            }
            Step::Event {
                event: MainEvent::EarlySection(read),
                consumed,
            } => {
                assert_eq!(consumed, section.len());
                return Ok(read);
            }
            other => panic!("{other:?}"),
        }
    }
    panic!("no end of the section");
}

#[test]
fn the_state_of_virtio_mem_ends_by_its_layout_and_names_what_is_plugged() {
    // The guest plugs blocks so that the bitmap contains a footer and the head of a PART.
    let forged = [footer(), ram(2)].concat();
    let bits = forged.iter().enumerate().flat_map(|(at, byte)| {
        let set = (0..8).filter(move |bit| byte >> bit & 1 == 1);
        // Words are big-endian.
        set.map(move |bit| u64::try_from(at / 8 * 64 + (7 - at % 8) * 8 + bit).unwrap())
    });
    let plugged: Vec<u64> = bits.collect();
    let payload = virtio_mem(&plugged);
    assert!(payload.windows(forged.len()).any(|bytes| bytes == forged));
    let bytes = section("0000:00:01.0/virtio-mem-device-early", &payload);
    for has_ram in [false, true] {
        let read = trickles_into(decoder(has_ram), &bytes, &[]).unwrap();
        assert_eq!(read.bytes, bytes);
        assert_eq!(read.payload_len, u64::try_from(payload.len()).unwrap());
        let memory = read.memory.unwrap();
        assert!(memory.is_in("0000:00:01.0/vm0", BLOCKS * BLOCK));
        assert!(!memory.is_in("0000:00:01.0:00.0/vm0", BLOCKS * BLOCK));
        assert!(!memory.is_in("0000:00:01.0/vm0", BLOCK));
        for block in 0..BLOCKS {
            let is_plugged = plugged.contains(&block);
            assert_eq!(memory.is_plugged(block * BLOCK), is_plugged, "{block}");
            assert_eq!(memory.is_plugged((block + 1) * BLOCK - 1), is_plugged);
        }
        assert!(!memory.is_plugged(u64::MAX));
    }
}

#[test]
fn a_bitmap_that_does_not_agree_with_the_plugged_bytes_is_of_another_layout() {
    let mut payload = virtio_mem(&[1, 2, 3]);
    payload[35] ^= 1;
    let bytes = section("virtio-mem-device-early", &payload);
    let read = trickles_into(decoder(true), &bytes, &ram(2)).unwrap();
    assert_eq!((read.memory, read.bytes), (None, bytes));
}

#[test]
fn an_unknown_payload_ends_at_its_footer_before_a_head_that_may_follow() {
    let own = section("other", b"");
    let mut other = own.clone();
    other[4] = 0x28;
    let nexts = [
        ram(2),
        ram(3),
        other,
        // PING; DISCARD.
        b"\x08\0\x02\0\x04\0\0\0\x01".to_vec(),
        b"\x08\0\x06\0\x10".to_vec(),
    ];
    // After a footer: nothing, a PART of another id, a section of its own id, an unknown command, EOF.
    for inner in [&b""[..], b"\x02\0\0\0\x03", &own, b"\x08\0\x77\0\0", b"\0"] {
        let payload = [b"state", &footer()[..], inner, b"more"].concat();
        let bytes = section("device", &payload);
        for next in &nexts {
            let read = trickles_into(decoder(true), &bytes, next).unwrap();
            let got = (&read.bytes, &read.memory);
            assert_eq!(got, (&bytes, &None), "{inner:?} {next:?}");
        }
    }
}

#[test]
fn a_section_without_end_is_refused_at_the_limit() {
    let bytes = section("device", &vec![0x7e; limits::DEVICE_PAYLOAD + 10]);
    let fault = decoder(true).next(&bytes[..bytes.len() - 5]).unwrap_err();
    assert!(matches!(fault, WireError::NoSectionEnd { idstr, .. } if idstr == "device"));
}

#[test]
fn all_sections_together_have_a_limit() {
    let first = section("device", &vec![1; limits::DEVICE_PAYLOAD / 2]);
    let mut second = section("other", &vec![1; limits::DEVICE_PAYLOAD / 2 + 1024]);
    second[4] = 0x28;
    let last = second.len() - 1;
    second[last] = 0x28;
    let mut decoder = decoder(true);
    let stream = [&first[..], &second, &ram(2)].concat();
    let step = decoder.next(&stream).unwrap();
    assert!(matches!(step, Step::Event { consumed, .. } if consumed == first.len()));
    let fault = decoder.next(&stream[first.len()..]).unwrap_err();
    assert!(matches!(fault, WireError::OverLimit { .. }), "{fault:?}");
}

/// Returns EOF and a description of a device with this name and size in bytes.
fn end_of_stream(size: usize, name: &str) -> Vec<u8> {
    let fields = format!(r#"[{{"name":"a","type":"b","size":{size}}}]"#);
    let json = format!(r#"{{"devices":[{{"name":"{name}","fields":{fields}}}]}}"#);
    let mut end = vec![0, 6];
    end.extend(u32::try_from(json.len()).unwrap().to_be_bytes());
    end.extend(json.as_bytes());
    end
}

#[test]
fn a_payload_that_was_searched_must_have_the_length_in_the_description() {
    let mut lengths = EarlyLengths::default();
    lengths.record(&trickles_into(decoder(true), &section("device", b"state"), &ram(2)).unwrap());
    lengths.check(&end_of_stream(5, "device")).unwrap();
    for wrong in [
        end_of_stream(6, "device"),
        end_of_stream(5, "other"),
        Vec::new(),
    ] {
        let fault = lengths.check(&wrong).unwrap_err();
        assert!(matches!(fault, WireError::SectionLength { got: 5, .. }));
    }
}

#[test]
fn a_payload_of_a_known_layout_may_lack_a_description_and_must_not_contradict_it() {
    let name = "virtio-mem-device-early";
    let payload = virtio_mem(&[3]);
    let mut lengths = EarlyLengths::default();
    lengths.record(&trickles_into(decoder(true), &section(name, &payload), &[]).unwrap());
    lengths.check(&[]).unwrap();
    lengths.check(&end_of_stream(payload.len(), name)).unwrap();
    assert!(lengths.check(&end_of_stream(5, name)).is_err());
}

#[test]
fn recorded_early_sections_have_the_lengths_in_their_descriptions() {
    for name in ["10.0-none-virtio-mem", "11.1-none-virtio-mem"] {
        let main = connection(name, "main");
        let mut decoder = decoder_for(&main).taking_early_sections();
        let (mut at, mut lengths, mut has_ram) = (0, EarlyLengths::default(), Vec::new());
        let mut ram_began = false;
        while let Step::Event { event, consumed } = decoder.next(&main[at..]).unwrap() {
            match event {
                MainEvent::RamBlocks(_) => ram_began = true,
                MainEvent::EarlySection(section) => {
                    assert!(section.memory.is_some(), "{name}");
                    lengths.record(&section);
                    has_ram.push(ram_began);
                }
                MainEvent::Eof => lengths.check(&main[at..]).unwrap(),
                _ => {}
            }
            at += consumed;
        }
        assert_eq!(at, main.len());
        assert_eq!(has_ram, [name.starts_with("10.0")], "{name}");
    }
}

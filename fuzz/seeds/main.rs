//! Writes the first corpus into fuzz/corpus: output of our encoders and of QEMU's libraries.
//!
//!     cargo run --manifest-path fuzz/Cargo.toml --example seeds
//!     HOTLIFT_FUZZ_MINIMISE=1 scripts/fuzz

use std::fs;
use std::path::Path;

use hotlift_mem::PAGE_SIZE;
use hotlift_methods::legacy::compress::Deflater;
use hotlift_methods::legacy::xbzrle;
use hotlift_methods::{EncoderSettings, METHODS};
use hotlift_wire::RamBlockEntry;
use hotlift_wire::file_ranges::{self, Answer, Open, Refusal, Reply};
use hotlift_wire::handshake::{Accepted, Features, VERSION};
use hotlift_wire::main_channel::{
    Command, Configuration, FILE_HEADER, MAPPED_RAM, MainEncoder, MappedLayout,
    put_device_part_head, put_mapped_end,
};
use hotlift_wire::multifd::{
    Hello, InitialPacket, Method, PacketFields, PacketLayout, PacketWriter, ZeroPageDetection,
};
use hotlift_wire::return_path::ReturnMessage;
use hotlift_wire::settle::{GuestActivity, MigrationId};

#[path = "../../crates/hotlift-methods/tests/support/qemu.rs"]
#[allow(dead_code, reason = "its readers are for tests")]
mod qemu;

fn put(target: &str, name: &str, bytes: &[u8]) {
    let folder = Path::new(env!("CARGO_MANIFEST_DIR"))
        .join("corpus")
        .join(target);
    fs::create_dir_all(&folder).expect("make the folder");
    fs::write(folder.join(name), bytes).expect("write the seed");
}

/// Returns pages of text, numbers, noise and zeros, in turn.
fn pages(n: usize) -> Vec<u8> {
    let mut noise = 0x9e37_79b9_7f4a_7c15_u64;
    let page = |page: usize| -> Vec<u8> {
        match page % 4 {
            0 => (0..)
                .flat_map(|i| format!("line {i} of page {page}, ").into_bytes())
                .take(PAGE_SIZE)
                .collect(),
            1 => (0..PAGE_SIZE / 8)
                .flat_map(|i| (0xffff_8880_0000_0000 | (i * i) as u64).to_le_bytes())
                .collect(),
            2 => vec![0; PAGE_SIZE],
            _ => (0..PAGE_SIZE / 8)
                .flat_map(|_| {
                    noise ^= noise << 13;
                    noise ^= noise >> 7;
                    noise ^= noise << 17;
                    noise.to_le_bytes()
                })
                .collect(),
        }
    };
    (0..n).flat_map(page).collect()
}

/// Returns an input of `methods::decode`.
fn packets(pages: usize, order: u8, payloads: &[Vec<u8>]) -> Vec<u8> {
    let mut input = vec![u8::try_from(pages - 1).expect("16 at most") | order << 4];
    for payload in payloads {
        let length = u16::try_from(payload.len()).expect("a small payload");
        input.extend_from_slice(&length.to_be_bytes());
        input.extend_from_slice(payload);
    }
    input
}

fn methods() {
    for (which, method) in METHODS.iter().enumerate() {
        for n in [1, 2, 3] {
            let settings = EncoderSettings::software(method.default_level);
            let mut encoder = (method.encoder)(&settings).expect(method.name);
            let mut payload = Vec::new();
            let payloads: Vec<_> = (0..2)
                .map(|_| {
                    encoder.encode(&pages(n), &mut payload).expect(method.name);
                    payload.clone()
                })
                .collect();
            let order = u8::try_from(n - 1).expect("small");
            put(
                method.name,
                &format!("ours-{n}"),
                &packets(n, order, &payloads),
            );
        }
        let which = u8::try_from(which).expect("few methods");
        for (level, content) in [
            (1, &b"a page of text, "[..]),
            (0, &[0]),
            (9, &pages(4)[3 * PAGE_SIZE..]),
        ] {
            let input = [&[which, level, level], content].concat();
            put("round_trip", &format!("{}-{level}", method.name), &input);
        }
    }
    for n in [1, 3] {
        let mut zlib = qemu::ZlibWriter::new(1, libz_sys::Z_SYNC_FLUSH);
        let mut zstd = qemu::ZstdWriter::new(1);
        let from_zlib = [zlib.packet(&pages(n)), zlib.packet(&pages(n))];
        let from_zstd = [
            zstd.packet(&pages(n)),
            zstd.packet(&pages(n)),
            zstd.last_packet(&pages(n)),
        ];
        put("zlib", &format!("qemus-{n}"), &packets(n, 0, &from_zlib));
        put("zstd", &format!("qemus-{n}"), &packets(n, 0, &from_zstd));
    }
    put(
        "zstd",
        "window",
        &packets(1, 0, &[qemu::zstd_frame_with_window_log(27)]),
    );
    put(
        "zstd",
        "window-too-large",
        &packets(1, 0, &[qemu::zstd_frame_with_window_log(28)]),
    );
}

fn records() {
    let all = pages(2);
    let (first, second) = all.split_at(PAGE_SIZE);
    let first: &[u8; PAGE_SIZE] = first.first_chunk().expect("a page");
    let second: &[u8; PAGE_SIZE] = second.first_chunk().expect("a page");
    for level in [1, 4, 6, 9] {
        let mut stream = Vec::new();
        Deflater::new(level)
            .expect("a level")
            .deflate(first, &mut stream)
            .expect("deflate");
        put("compress", &format!("level-{level}"), &stream);
    }
    put("compress", "page", second);
    for (name, every) in [("dense", 3), ("sparse", 700)] {
        let mut new = *first;
        new.iter_mut().step_by(every).for_each(|byte| *byte ^= 1);
        let mut delta = Vec::new();
        xbzrle::encode(first, &new, PAGE_SIZE, &mut delta);
        put("xbzrle", name, &delta);
    }
    put("xbzrle", "whole", &[&[0, 0x80, 0x20][..], second].concat());
}

fn main_channel() {
    let blocks = [
        RamBlockEntry::new("pc.ram", 1 << 20),
        RamBlockEntry::new("vga", 8192),
    ];
    let configuration = Configuration {
        machine: "pc-i440fx-10.0".to_owned(),
        ..Configuration::default()
    };
    let mut out = vec![0];
    let mut encoder = MainEncoder::new(&configuration, &mut out).expect("a stream");
    encoder
        .command(Command::Ping(7), &mut out)
        .expect("a command");
    encoder.ram_start(&blocks, true, &mut out).expect("START");
    encoder.ram_part(&mut out).expect("PART");
    encoder.zero_page(0, 4096, &mut out).expect("a zero page");
    encoder.zero_page(0, 8192, &mut out).expect("a zero page");
    encoder.multifd_flush(&mut out).expect("a mark");
    encoder.ram_eos(&mut out).expect("EOS");
    let before_pages = out.len();
    encoder.ram_part(&mut out).expect("PART");
    encoder
        .normal_page(1, 4096, pages(1).first_chunk().expect("a page"), &mut out)
        .expect("a page");
    encoder
        .compressed_page(0, 12288, &[0x78, 1, 3, 0, 0, 0, 0, 1], &mut out)
        .expect("a stream");
    encoder
        .xbzrle_page(0, 4096, &[1, 3, 9, 9, 9], &mut out)
        .expect("a delta");
    encoder.ram_eos(&mut out).expect("EOS");
    encoder.ram_end(&mut out).expect("END");
    encoder.ram_eos(&mut out).expect("EOS");
    let devices = out.len();
    encoder
        .device("cpu", 0, 12, &[7; 40], &mut out)
        .expect("a device");
    encoder
        .device("timer", 1, 2, &[], &mut out)
        .expect("a device");
    encoder.eof(&mut out).expect("EOF");
    encoder.vm_description(&mut out).expect("a description");
    put("main_channel", "whole", &out);
    put("main_channel", "ram", &out[..before_pages]);

    // The same device state as QEMU writes it: payloads without lengths, and a description with the lengths.
    let json = br#"{"page_size":4096,"devices":[{"name":"cpu","instance_id":0,"vmsd_name":"cpu","version":12,"fields":[{"name":"x","type":"buffer","size":40}]}]}"#;
    let mut recorded = out[..devices].to_vec();
    recorded[0] = 1;
    recorded.extend_from_slice(&[4, 0, 0, 0, 1, 3]);
    recorded.extend_from_slice(b"cpu\0\0\0\0\0\0\0\x0c");
    recorded.extend_from_slice(&[7; 40]);
    recorded.extend_from_slice(&[0x7e, 0, 0, 0, 1, 0, 6]);
    recorded.extend_from_slice(&u32::try_from(json.len()).expect("short").to_be_bytes());
    recorded.extend_from_slice(json);
    put("main_channel", "described", &recorded);
    put("tail", "of-qemu", &recorded[devices..]);

    let mut tail = Vec::new();
    put_device_part_head(4, &mut tail).expect("a part");
    tail.extend_from_slice(&[4, 1, 2, 3, 0, 0, 0, 7]);
    Command::Ping(1).encode(&mut tail);
    tail.push(0);
    put("tail", "of-hotlift", &tail);
}

fn mapped_ram() {
    let configuration = Configuration {
        machine: "pc-i440fx-10.0".to_owned(),
        capabilities: vec![MAPPED_RAM.to_owned()],
        ..Configuration::default()
    };
    // Three MiB, all of it in the hole after the input, except the head.
    for (name, blocks) in [
        ("one", &[("pc.ram", 1 << 20)][..]),
        (
            "three",
            &[("pc.ram", 64 << 10), ("vga", 4096), ("rom", 8192)],
        ),
    ] {
        let entries: Vec<_> = blocks
            .iter()
            .map(|(name, length)| RamBlockEntry::new(*name, *length))
            .collect();
        let mut file = FILE_HEADER.to_vec();
        configuration.encode(&mut file).expect("a configuration");
        let layout = MappedLayout::new(2, &entries, file.len() as u64).expect("a layout");
        for (_, piece) in layout.pieces.iter().take(1) {
            file.extend_from_slice(piece);
        }
        put("mapped_ram", name, &[&[0, 9][..], &file].concat());
    }
    let mut end = FILE_HEADER.to_vec();
    configuration.encode(&mut end).expect("a configuration");
    put_mapped_end(2, &mut end);
    put("mapped_ram", "no-ram", &[&[0, 9][..], &end].concat());
}

fn channels() {
    let layout = PacketLayout::new(4096, 8).expect("a layout");
    for (name, method, checksummed, rules) in [
        ("plain", Method::None, false, 0),
        ("checked", Method::Zstd, true, 4),
        ("zlib", Method::Zlib, false, 0x12),
    ] {
        let mut writer = PacketWriter::new(layout, method, checksummed);
        let mut input = vec![rules, 40, 1];
        for (sync, normal, zero) in [
            (false, &[0, 4096, 12288][..], &[8192][..]),
            (false, &[], &[0, 4096]),
            (true, &[], &[]),
        ] {
            let payload_len = u32::try_from(normal.len() * 4096).expect("small");
            let fields = PacketFields {
                sync,
                packet_num: 3,
                block: if normal.len() + zero.len() > 0 {
                    "pc.ram"
                } else {
                    ""
                },
                normal,
                zero,
                payload_len,
                payload_crc: if method == Method::None || normal.is_empty() {
                    0
                } else {
                    1
                },
            };
            input.extend_from_slice(writer.header(&fields).expect("a header"));
        }
        put("packet", name, &input);
    }
    let packet = InitialPacket {
        uuid: [7; 16],
        id: 1,
        hello: None,
    };
    put("initial_packet", "of-qemu", &packet.encode());
    for (name, layout) in [("of-hotlift", PacketLayout::QEMU), ("large", layout)] {
        let hello = Some(Hello {
            channels: 2,
            method: Some(Method::Lz4),
            layout,
            zero_page_detection: ZeroPageDetection::Multifd,
        });
        put(
            "initial_packet",
            name,
            &InitialPacket { hello, ..packet }.encode(),
        );
    }
}

fn return_path() {
    let all = [
        ReturnMessage::Hello {
            version: VERSION.into(),
            accepted: Some(Accepted {
                features: Features::MULTIFD,
                id: MigrationId([7; 16]),
            }),
        },
        ReturnMessage::Pong(7),
        ReturnMessage::ReqPagesId {
            start: 4096,
            length: 4096,
            block: "pc.ram",
        },
        ReturnMessage::ReqPages {
            start: 8192,
            length: 4096,
        },
        ReturnMessage::RecvBitmap { block: "pc.ram" },
        ReturnMessage::ResumeAck(1),
        ReturnMessage::SwitchoverAck,
        ReturnMessage::ErrorText("no room"),
        ReturnMessage::GuestActivity(GuestActivity::Runs),
        ReturnMessage::Shut(1),
    ];
    let mut out = Vec::new();
    for (i, message) in all.iter().enumerate() {
        let start = out.len();
        message.encode(&mut out).expect("a message");
        put("return_path", &format!("message-{i}"), &out[start..]);
    }
    put("return_path", "all", &out);
}

fn file_ranges() {
    let mut out = Vec::new();
    let open = Open {
        version: file_ranges::VERSION,
        visitor: 7,
        name: "vm.save",
    };
    open.encode(&mut out).expect("a message");
    put("file_ranges", "open", &out);
    let replies = [
        Reply::Opened {
            length: 1 << 30,
            id: 7,
        },
        Reply::Refused {
            why: Refusal::NotNow,
            text: "later",
        },
    ];
    for (i, reply) in replies.iter().enumerate() {
        out.clear();
        reply.encode(&mut out);
        put("file_ranges", &format!("reply-{i}"), &out);
    }
    let read = file_ranges::Read {
        position: 4096,
        length: 4096,
    };
    put("file_ranges", "read", &read.encode());
    out.clear();
    let failed = Answer::Failed("an I/O error").encode(&mut out);
    failed.expect("a message");
    put("file_ranges", "failed", &out);
}

/// Writes a VM of 64 pages, four of which have content, as QEMU saves it.
fn mapped_ram_vm(path: &std::path::Path) {
    let configuration = Configuration {
        machine: "pc-i440fx-10.0".to_owned(),
        capabilities: vec![MAPPED_RAM.to_owned()],
        ..Configuration::default()
    };
    let mut start = FILE_HEADER.to_vec();
    configuration.encode(&mut start).expect("a configuration");
    let entries = [RamBlockEntry::new("pc.ram", 64 * 4096)];
    let layout = MappedLayout::new(2, &entries, start.len() as u64).expect("a layout");
    let file = std::fs::File::create(path).expect("a file");
    let write = |bytes: &[u8], at| {
        std::os::unix::fs::FileExt::write_all_at(&file, bytes, at).expect("written");
    };
    write(&start, 0);
    for (position, piece) in &layout.pieces {
        write(piece, *position);
    }
    let place = &layout.blocks[0];
    write(&[0b11, 0, 0b101, 0, 0, 0, 0, 0], place.bitmap_offset);
    for page in [0_u8, 1, 16, 18] {
        write(
            &[page + 1; 4096],
            place.pages_offset + u64::from(page) * 4096,
        );
    }
    let mut end = Vec::new();
    put_mapped_end(2, &mut end);
    end.extend_from_slice(b"\x04device\0\x06\0\0\0\x02{}");
    write(&end, layout.end);
}

/// Writes a whole file of `hotlift save`, of a VM with some pages; and a truncated file.
fn save_file() {
    let folder = tempfile::tempdir().expect("a folder");
    let [from, to] = ["qemu", "vm"].map(|name| folder.path().join(name));
    mapped_ram_vm(&from);
    let settings = hotlift::relay::RelaySettings::default();
    let saved = hotlift::relay::relay(
        hotlift::relay::Incoming::File {
            path: &from,
            offset: 0,
        },
        &hotlift::relay::Outgoing::File {
            path: &to,
            format: hotlift::file::FileFormat::Hotlift,
        },
        &settings,
        &hotlift::Control::new(),
        hotlift::relay::Hooks::default(),
    );
    saved.expect("it is saved");
    let whole = std::fs::read(&to).expect("the file");
    let marked = [&[1], &whole[..]].concat();
    put("save_file", "whole", &marked);
    put("save_file", "cut", &marked[..marked.len() - 40]);
}

/// Writes lists of records for the target to seal, and raw bytes.
fn tls_records() {
    let list = |records: &[(u8, &[u8])]| {
        let mut input = Vec::new();
        for (kind, content) in records {
            let length = u16::try_from(content.len()).expect("short");
            input.push(*kind);
            input.extend_from_slice(&length.to_be_bytes());
            input.extend_from_slice(content);
        }
        input
    };
    // The target's numbers of the types: alert, handshake, data.
    let (alert, handshake, data) = (1, 2, 3);
    let whole = list(&[
        (data, b"data"),
        (handshake, &[4, 0, 0, 2, 1]),
        (handshake, &[1, 4, 0, 0, 0]),
        (handshake, &[24, 0, 0, 1, 1]),
        (data, &[]),
        (data, &[7; 3000]),
        (alert, &[1, 0]),
    ]);
    for first in [8, 9 + 16, 10 + 32, 12 + 64] {
        put(
            "tls_records",
            &format!("listed-{first}"),
            &[&[first], &whole[..]].concat(),
        );
    }
    put(
        "tls_records",
        "refused",
        &[&[8][..], &list(&[(alert, &[2, 48])])].concat(),
    );
    // Raw bytes.
    put(
        "tls_records",
        "of-nobody",
        &[&[0, 23, 3, 3, 0, 17][..], &[0; 40]].concat(),
    );
    put("tls_records", "unsealed-alert", &[0, 21, 3, 3, 0, 2, 2, 40]);
}

fn main() {
    methods();
    records();
    main_channel();
    mapped_ram();
    channels();
    return_path();
    file_ranges();
    save_file();
    tls_records();
}

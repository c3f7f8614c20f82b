//! Tests that options limit the memory that a source can make a relay allocate, whatever the source sends.
//!
//! Each test needs its own process, because the kernel reports the peak memory of the whole process. Two effects of an
//! earlier test would distort the result: memory that glibc keeps, and thresholds that glibc has adapted.

use std::io::Write;
use std::net::Shutdown;
use std::os::unix::net::UnixStream;

use hotlift::file::FileFormat;
use hotlift::options::StreamOptions;
use hotlift::relay::{Hooks, Incoming, Outgoing, RelaySettings, relay};
use hotlift::transport::Address;
use hotlift::{Control, Options};
use hotlift_testkit::alone;
use hotlift_testkit::alone::peak;
use hotlift_wire::main_channel::{Command, MainEncoder};
use hotlift_wire::multifd::{InitialPacket, Method, PacketFields, PacketLayout, PacketWriter};
use hotlift_wire::{PAGE_SIZE, RamBlockEntry};

#[path = "relay/recording.rs"]
#[allow(dead_code, reason = "its other users need the rest")]
mod recording;

use recording::{UUID, configuration, put_sync};

const MIB: u64 = 1 << 20;

/// Count of pages in a packet.
const PAGES: u64 = 128;

/// Memory of a relay itself: stacks, its own buffers, and memory that the allocator keeps.
const ITS_OWN: u64 = 24 * MIB;

/// Memory of a channel's thread and decoder, plus two packets in transit, 516 KiB each.
const PER_CHANNEL: u64 = 2 * MIB;

/// Returns the result of a relay into a file that receives these connections, and the peak growth of this process. The
/// connections' bytes are created and dropped here.
fn relayed(
    connections: impl FnOnce() -> Vec<Vec<u8>>,
    options: &[(&str, &str)],
) -> (Result<(), String>, u64) {
    let connections = connections();
    let mut all = Options::default();
    all.stream.max_bandwidth = 0;
    for (name, value) in options {
        all.set(name, value).unwrap();
    }
    let settings = RelaySettings {
        outgoing: all.stream,
        limits: all.limits,
        ..RelaySettings::default()
    };
    let folder = tempfile::tempdir().unwrap();
    let path = folder.path().join("vm");
    let _ = peak();
    let before = peak();
    let socket = folder.path().join("socket");
    let address = Address::Unix {
        path: socket.clone(),
    };
    let listener = address.listen().unwrap();
    let outcome = std::thread::scope(|scope| {
        // Dropped at the end of this scope, with the pending connections, for whose end their threads wait.
        let listener = listener;
        for bytes in &connections {
            let mut ours = UnixStream::connect(&socket).unwrap();
            scope.spawn(move || {
                // The relay may have closed already.
                let _ = ours.write_all(bytes);
                let _ = ours.shutdown(Shutdown::Write);
                let _ = std::io::copy(&mut ours, &mut std::io::sink());
            });
        }
        let to = Outgoing::File {
            path: &path,
            format: FileFormat::Hotlift,
        };
        let incoming = Incoming::Listener(&listener);
        let outcome = relay(incoming, &to, &settings, &Control::new(), Hooks::default());
        drop(listener);
        outcome
    });
    let outcome = outcome.map(|_| ()).map_err(|error| error.chain());
    (outcome, peak().saturating_sub(before))
}

/// Returns a stream up to its RAM blocks.
fn start(block_bytes: u64, multifd: bool) -> (MainEncoder, Vec<u8>) {
    let mut main = Vec::new();
    let mut encoder = MainEncoder::new(&configuration(), &mut main).unwrap();
    encoder.command(Command::Ping(1), &mut main).unwrap();
    let blocks = [RamBlockEntry::new("pc.ram", block_bytes)];
    encoder.ram_start(&blocks, multifd, &mut main).unwrap();
    encoder.ram_part(&mut main).unwrap();
    if multifd {
        // Main waits until all channels end.
        encoder.multifd_flush(&mut main).unwrap();
    }
    (encoder, main)
}

/// Returns the opening packet of channel `id`.
fn opened(id: u8, writer: &mut PacketWriter) -> Vec<u8> {
    let opening = InitialPacket {
        uuid: UUID,
        id,
        hello: None,
    };
    let mut bytes = opening.encode().to_vec();
    put_sync(writer, &mut bytes);
    bytes
}

/// Returns a channel with packets of one zstd frame, until its window of `1 << window_log` bytes is full: a few bytes per
/// packet, which decode to 512 KiB.
fn zstd_channel(id: u8, window_log: u8) -> Vec<u8> {
    let mut writer = PacketWriter::new(PacketLayout::QEMU, Method::Zstd, false);
    let mut bytes = opened(id, &mut writer);
    let normal: Vec<u64> = (0..PAGES).map(|page| page * PAGE_SIZE as u64).collect();
    // RFC 8878: magic, a descriptor without sizes, the window; then blocks of 128 KiB of one byte.
    let mut payload = vec![0x28, 0xb5, 0x2f, 0xfd, 0, (window_log - 10) << 3];
    let block = ((128_u32 << 10) << 3 | 1 << 1).to_le_bytes();
    for _ in 0..(1_u64 << window_log) / (PAGES * PAGE_SIZE as u64) + 2 {
        for _ in 0..4 {
            payload.extend_from_slice(&block[..3]);
            payload.push(7);
        }
        let fields = PacketFields {
            block: "pc.ram",
            normal: &normal,
            payload_len: u32::try_from(payload.len()).unwrap(),
            ..PacketFields::default()
        };
        bytes.extend_from_slice(writer.header(&fields).unwrap());
        bytes.append(&mut payload);
    }
    put_sync(&mut writer, &mut bytes);
    bytes
}

/// Returns a main channel and `count` such channels.
fn zstd_channels(count: u8, window_log: u8) -> Vec<Vec<u8>> {
    let (_, main) = start(PAGES * PAGE_SIZE as u64, true);
    let channels = (0..count).map(|id| zstd_channel(id, window_log));
    std::iter::once(main).chain(channels).collect()
}

/// Returns the stated limit of a relay's memory with these options, with [`ITS_OWN`].
fn stated(channels: u64, memory_limit: u64) -> u64 {
    let workers = u64::from(StreamOptions::default().channels());
    ITS_OWN + memory_limit + channels * MIB + (channels + workers) * PER_CHANNEL
}

#[test]
fn windows_of_all_channels_together_are_bounded_and_the_option_is_named() {
    alone!();
    let (outcome, grown) = relayed(|| zstd_channels(24, 27), &[]);
    let line = outcome.unwrap_err();
    assert!(
        line.contains("zstd") && line.contains("--memory-limit"),
        "{line}"
    );
    let stated = stated(24, 64 * MIB);
    assert!(grown < stated, "{grown} of {stated} bytes");
}

#[test]
fn windows_that_fit_are_accepted_and_stay_within_the_stated_size() {
    alone!();
    // 24 windows of 2 MiB fit; those of 4 MiB only with the higher limit.
    for (window_log, options, limit) in [
        (21, &[][..], 64 * MIB),
        (22, &[("memory-limit", "96M")][..], 96 * MIB),
        (22, &[][..], 64 * MIB),
    ] {
        let (outcome, grown) = relayed(|| zstd_channels(24, window_log), options);
        // The stream is truncated.
        let line = outcome.unwrap_err();
        let refused = line.contains("--memory-limit");
        assert_eq!(refused, window_log == 22 && limit == 64 * MIB, "{line}");
        let stated = stated(24, limit);
        assert!(grown < stated, "{grown} of {stated} bytes");
    }
}

#[test]
fn more_channels_than_max_channels_are_refused_by_name() {
    alone!();
    let channels = |count: u8| {
        let (_, main) = start(PAGES * PAGE_SIZE as u64, true);
        let mut writer = PacketWriter::new(PacketLayout::QEMU, Method::None, false);
        let mut connections = vec![main];
        connections.extend((0..count).map(|id| opened(id, &mut writer)));
        connections
    };
    for (count, options, refused) in [
        (64, &[][..], false),
        (65, &[][..], true),
        (65, &[("max-channels", "65")][..], false),
        (3, &[("max-channels", "2")][..], true),
    ] {
        let (outcome, _) = relayed(|| channels(count), options);
        let line = outcome.unwrap_err();
        assert_eq!(line.contains("--max-channels"), refused, "{count}: {line}");
    }
}

#[test]
fn records_of_received_pages_are_bounded() {
    alone!();
    let gib = 1 << 30;
    let zero_pages = || {
        let (mut encoder, mut main) = start((16 << 40) - gib, false);
        // One page in each GiB, which requires a bitmap for the whole GiB.
        for part in 0..(16 << 10) - 1 {
            encoder.zero_page(0, part * gib, &mut main).unwrap();
        }
        vec![main]
    };
    let (outcome, grown) = relayed(zero_pages, &[]);
    let line = outcome.unwrap_err();
    assert!(line.contains("--memory-limit"), "{line}");
    let stated = stated(0, 64 * MIB);
    assert!(grown < stated, "{grown} of {stated} bytes");
}

/// Returns a stream with `begins` after its RAM, followed by 200 MiB of `byte`.
fn after_ram(begins: &[u8], byte: u8) -> Vec<Vec<u8>> {
    let (mut encoder, mut main) = start(PAGES * PAGE_SIZE as u64, false);
    for page in 0..PAGES {
        let offset = page * PAGE_SIZE as u64;
        encoder.zero_page(0, offset, &mut main).unwrap();
    }
    encoder.ram_eos(&mut main).unwrap();
    encoder.ram_end(&mut main).unwrap();
    encoder.ram_eos(&mut main).unwrap();
    main.extend_from_slice(begins);
    main.resize(main.len() + (200 << 20), byte);
    vec![main]
}

#[test]
fn device_state_of_any_length_uses_no_memory() {
    alone!();
    let (outcome, grown) = relayed(|| after_ram(&[], 4), &[("memory-limit", "1M")]);
    // The stream is truncated.
    let line = outcome.unwrap_err();
    assert!(!line.contains("--memory-limit"), "{line}");
    let stated = stated(0, MIB);
    assert!(grown < stated, "{grown} of {stated} bytes");
}

#[test]
fn a_vm_description_that_does_not_end_is_bounded() {
    alone!();
    let (outcome, grown) = relayed(|| after_ram(b"\0\x06\xff\0\0\0{", b' '), &[]);
    let line = outcome.unwrap_err();
    assert!(line.contains("--memory-limit"), "{line}");
    let stated = stated(0, 64 * MIB);
    assert!(grown < stated, "{grown} of {stated} bytes");
}

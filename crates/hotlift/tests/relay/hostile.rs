//! Tests streams that no correct source sends. Each causes an early error that names the fault, and leaves no thread,
//! socket or file.

use std::fs;
use std::io::Write;
use std::net::Shutdown;
use std::time::Duration;

use hotlift::relay::RelaySettings;
use hotlift::transport::Stream;
use hotlift_testkit::alone;
use hotlift_testkit::alone::peak;
use hotlift_wire::PAGE_SIZE;
use hotlift_wire::main_channel::{Command, MainEncoder, MainEvent, SectionKind, postcopy};
use hotlift_wire::multifd::{
    Hello, InitialPacket, MAGIC, Method, PacketFields, PacketLayout, PacketWriter,
    ZeroPageDetection,
};
use rustix::net::sockopt::set_socket_linger;

use super::log::{Event, Log};
use super::recording::{Recording, UUID, configuration, opening_of_another_version, put_sync};
use super::rig::{Relay, destination, settings, until};

/// Memory that a relay and this test may use, whatever is sent. Bitmaps for 16 TiB would take half a GiB each.
const SPARE: u64 = 96 << 20;

/// Wait of the concurrent cases that stay silent: long enough to process what they have sent, and less than the 2 s after which
/// a silent connection counts as one more channel.
const SILENT: Duration = Duration::from_secs(1);

/// Returns settings of a relay with long timeouts, unless the case tests a timeout.
fn way(case: &Case) -> RelaySettings {
    let mut way = settings(&[("multifd", "off")]);
    if case.wanted.ends_with("sent no complete opening") || case.times_out() {
        way.limits.handshake_timeout = SILENT;
    }
    way
}

/// Returns the names of this process's threads.
fn relay_threads() -> Vec<String> {
    let tasks = fs::read_dir("/proc/self/task").unwrap();
    tasks
        .filter_map(|task| fs::read_to_string(task.ok()?.path().join("comm")).ok())
        .filter(|name| name.starts_with("relay/"))
        .collect()
}

/// One kind of input from a source.
struct Case {
    name: String,
    /// Bytes of the connections, in the order of their creation.
    connections: Vec<Vec<u8>>,
    /// True if the connections end, false if they stay silent.
    ends: bool,
    /// Text that the error contains.
    wanted: &'static str,
}

impl Case {
    /// Returns true if the relay ends by a timeout, and not because it rejected a connection.
    fn times_out(&self) -> bool {
        let what = ["did not arrive within", "arrived)", "of the source"];
        what.iter().any(|what| self.wanted.ends_with(what))
    }
}

fn case(name: &str, connections: &[&[u8]], wanted: &'static str) -> Case {
    Case {
        name: name.to_owned(),
        connections: connections.iter().map(|bytes| bytes.to_vec()).collect(),
        ends: false,
        wanted,
    }
}

/// Asserts that all `cases`, run concurrently, end in an error that names the cause, and leave no threads and little memory.
fn assert_refused(cases: &[Case]) {
    let _ = peak();
    let before = peak();
    std::thread::scope(|scope| {
        for case in cases {
            scope.spawn(|| {
                let line = ended_with(case);
                assert!(line.contains(case.wanted), "{}: {line}", case.name);
                assert!(!line.contains('\n'), "{}: {line}", case.name);
            });
        }
    });
    until("threads are left", || relay_threads().is_empty());
    let grown = peak().saturating_sub(before);
    let allowed = SPARE * u64::try_from(cases.len()).unwrap();
    assert!(grown < allowed, "{grown} bytes by {}", cases[0].name);
}

/// Returns the error line of a relay.
fn ended_with(case: &Case) -> String {
    let name = &case.name;
    let log = Log::default();
    let (_folder, destination) = destination(&Recording::small(), 0, None, &log);
    let relay = Relay::start(&destination.address, &way(case), false);
    let to = relay.address.clone();
    std::thread::scope(|scope| {
        let arriving = scope.spawn(|| destination.run());
        let connect = |_| to.connect(Duration::from_secs(10)).unwrap();
        let streams: Vec<Stream> = case.connections.iter().map(connect).collect();
        for (mut stream, bytes) in streams.iter().zip(&case.connections) {
            // The relay may have closed already.
            let _ = stream.write_all(bytes);
            if case.ends {
                stream.shutdown(Shutdown::Write);
            }
        }
        let line = match case.times_out() {
            true => relay.outcome(name).expect_err(name).chain(),
            false => relay.ended_or_turned_away(name),
        };
        log.note(Event::RelaysEnded);
        drop(streams);
        assert!(
            !arriving.join().unwrap().eof,
            "{name}: the guest was started"
        );
        line
    })
}

#[test]
fn a_connection_without_migration_stream_is_named() {
    alone!();
    let main = Recording::small().main;
    let mut version = main.clone();
    version[7] = 2;
    let mut cases = vec![
        case("TLS", &[b"\x16\x03\x01\x02\0\x01\0\x01\xfc\x03\x03"], "TLS"),
        case(
            "HTTP",
            &[b"GET / HTTP/1.1\r\n\r\n"],
            "does not start as a migration stream",
        ),
        case("silence", &[b""], "sent no complete opening"),
        case("half a word", &[b"QE"], "sent no complete opening"),
        case("magic", &[&main[..4]], "sent no complete opening"),
        case(
            "magic and version",
            &[&main[..8]],
            "sent no complete opening",
        ),
        case("an old stream", &[&version], "stream version"),
        // After its set-up a source waits until the destination accepts the stream.
        case(
            "two sources",
            &[&main[..4096], &main],
            "a second main channel",
        ),
    ];
    for length in [9, 20, 60] {
        let name = format!("{length} bytes of a set-up");
        cases.push(case(&name, &[&main[..length]], "did not arrive within"));
    }
    assert_refused(&cases);
}

#[test]
fn random_bytes_are_refused_without_waiting_for_their_end() {
    alone!();
    let mut state = 0x9e37_79b9_7f4a_7c15_u64;
    let mut noise = |length: usize| -> Vec<u8> {
        let bytes = (0..length).map(|_| {
            state = state
                .wrapping_mul(6_364_136_223_846_793_005)
                .wrapping_add(1);
            state.to_be_bytes()[1]
        });
        bytes.collect()
    };
    let small = Recording::small();
    let starts = small.boundaries();
    let mut cases = Vec::new();
    for round in 0..24_usize {
        // After an increasing part of a valid stream.
        let good = &small.main[..starts[round % 16]];
        let main = [good, &noise(20_000)].concat();
        let name = format!("noise behind record {}", round % 16);
        cases.push(case(&name, &[&main], ""));
    }
    let multifd = Recording::small_multifd(2);
    for length in [0, 4, 64, 64 + 1344, 64 + 1344 + 12, 64 + 2 * 1344 + 5000] {
        let channel = [&multifd.channels[1][..length], &noise(40_000)].concat();
        // Pages of method none may contain anything; headers may not.
        let connections: [&[u8]; 3] = [&multifd.main, &multifd.channels[0], &channel];
        let name = format!("noise behind {length} bytes of a channel");
        cases.push(case(&name, &connections, ""));
    }
    for case in &mut cases {
        case.ends = true;
    }
    assert_refused(&cases);
}

#[test]
fn postcopy_commands_are_refused_in_the_wrong_place() {
    alone!();
    let small = Recording::small();
    let ram = small.position(|event| matches!(event, MainEvent::SectionStart { .. }));
    let last = small.position(
        |event| matches!(event, MainEvent::SectionStart { kind, .. } if *kind == SectionKind::End),
    );
    let advise = |pages: (u64, u64)| {
        let mut bytes = Vec::new();
        let page_sizes = Some(pages);
        Command::PostcopyAdvise { page_sizes }.encode(&mut bytes);
        bytes
    };
    let page = PAGE_SIZE as u64;
    let stream = |advise: &[u8], before_the_end: &[u8]| {
        let main = &small.main;
        [&main[..ram], advise, &main[ram..last], before_the_end].concat()
    };
    let discard = |start: u64, length: u64| {
        let mut bytes = Vec::new();
        postcopy::put_discard("pc.ram", start, length, &mut bytes).unwrap();
        bytes
    };
    let mut listen = Vec::new();
    postcopy::put_listen(&mut listen);
    let advised = advise((page, page));
    let package = |length: u32| [&b"\x08\0\x07\0\x04"[..], &length.to_be_bytes()].concat();
    let cases = [
        ("not announced", stream(&[], &discard(0, page)), "Postcopy"),
        ("LISTEN alone", stream(&advised, &listen), "Postcopy"),
        (
            "behind a block",
            stream(&advised, &discard(47 * page, 2 * page)),
            "are no pages of RAM block \"pc.ram\"",
        ),
        (
            "half a page",
            stream(&advised, &discard(0, page / 2)),
            "are no pages of RAM block \"pc.ram\"",
        ),
        (
            "a package of 4 GiB",
            stream(&advised, &package(u32::MAX)),
            "the main channel was closed by the other side",
        ),
    ];
    let cases: Vec<Case> = cases
        .iter()
        .map(|(name, main, wanted)| case(name, &[main], wanted))
        .collect();
    assert_refused(&cases);
}

#[test]
fn packets_larger_than_a_relays_buffers_are_refused() {
    alone!();
    let main = Recording::small_multifd(1).main;
    let opening = InitialPacket {
        uuid: UUID,
        id: 0,
        hello: Some(Hello {
            channels: 1,
            method: Some(Method::None),
            layout: PacketLayout::new(PAGE_SIZE, 129).unwrap(),
            zero_page_detection: ZeroPageDetection::Multifd,
        }),
    };
    let channel = opening.encode();
    assert_refused(&[case(
        "129 pages",
        &[&main, &channel],
        "multifd-packet-size differs: the source has 528384 bytes",
    )]);
}

#[test]
fn a_channel_of_another_version_of_hotlift_is_refused_with_both_values() {
    alone!();
    let main = Recording::small_multifd(1).main;
    let other = opening_of_another_version();
    let wanted = "the source has 255, the destination has ";
    assert_refused(&[
        case("behind main", &[&main, &other], wanted),
        case("before main", &[&other], wanted),
    ]);
}

#[test]
fn channels_of_different_migrations_are_named() {
    alone!();
    let recording = Recording::small_multifd(2);
    let (main, channels) = (&recording.main[..], &recording.channels);
    let mut foreign = channels[1].clone();
    foreign[9] ^= 1;
    let output = MAGIC.to_be_bytes();
    let twice = "a second channel with this id";
    assert_refused(&[
        case("an id twice", &[main, &channels[0], &channels[0]], twice),
        case(
            "another VM's",
            &[main, &channels[0], &foreign],
            "another VM",
        ),
        case(
            "a gap",
            &[main, &channels[1]],
            "multifd channel 0 of 2 of the source",
        ),
        case("none", &[main], "0 arrived)"),
        case("a silent one", &[main, &channels[0], b""], "1 arrived)"),
        case(
            "a half-open one",
            &[main, &channels[0], &output],
            "1 arrived)",
        ),
    ]);
}

/// Returns a stream up to its list of RAM blocks, written manually: no encoder writes these.
fn block_list(blocks: &[(&str, u64)], total: u64) -> Vec<u8> {
    let mut main = Vec::new();
    let mut encoder = MainEncoder::new(&configuration(), &mut main).unwrap();
    encoder.command(Command::OpenReturnPath, &mut main).unwrap();
    main.extend_from_slice(b"\x01\0\0\0\x02\x03ram\0\0\0\0\0\0\0\x04");
    main.extend_from_slice(&(total | 4).to_be_bytes());
    for (name, length) in blocks {
        main.push(u8::try_from(name.len()).unwrap());
        main.extend_from_slice(name.as_bytes());
        main.extend_from_slice(&length.to_be_bytes());
    }
    main.extend_from_slice(&0x10_u64.to_be_bytes());
    main.extend_from_slice(b"\x7e\0\0\0\x02");
    // The next section: no other device sends anything.
    main.extend_from_slice(b"\x02\0\0\0\x02");
    main
}

#[test]
fn impossible_ram_blocks_are_refused_without_allocating_memory() {
    alone!();
    let page = PAGE_SIZE as u64;
    let all = u64::MAX - 4095;
    let wanted = "length of all RAM blocks";
    let half = (all / 2) & !4095;
    let two = [("a", half), ("b", half)];
    let total = two[0].1 * 2;
    let more = (16 << 40) + page;
    let names: Vec<String> = (0..4097).map(|number| number.to_string()).collect();
    let many: Vec<(&str, u64)> = names.iter().map(|name| (name.as_str(), page)).collect();
    let list = |name, blocks: &[(&str, u64)], total, wanted| {
        case(name, &[&block_list(blocks, total)], wanted)
    };
    let wraps = [("a", all), ("b", 2 * page)];
    let mut cases = vec![
        list("one of 2^64", &[("a", all)], all, wanted),
        list("two of 2^63", &two, total, wanted),
        list("16 TiB and a page", &[("a", more)], more, wanted),
        list("a sum that wraps", &wraps, page, "RAM block"),
        list("a length of 0", &[("a", 0), ("b", page)], page, "RAM block"),
        list("half a page", &[("a", page / 2)], page, "RAM block"),
        list("more than all", &[("a", 2 * page)], page, "RAM block"),
        list(
            "a name twice",
            &[("a", page), ("a", page)],
            2 * page,
            "\"a\"",
        ),
        list("4097 blocks", &many, 4097 * page, "number of RAM blocks"),
    ];
    // The maximum count and size, with a page outside all of them.
    for blocks in [&many[..4096], &[("a", 16 << 40)]] {
        let total = blocks.iter().map(|block| block.1).sum();
        let list = block_list(blocks, total);
        let main = [
            &list[..],
            &(1_u64 << 50 | 8).to_be_bytes(),
            b"\x01a",
            &[0; PAGE_SIZE],
        ];
        cases.push(case("the most that may be", &[&main.concat()], ""));
    }
    assert_refused(&cases);
}

#[test]
fn pages_that_are_in_no_block_are_named() {
    alone!();
    let list = block_list(&[("a", 16 << 12)], 16 << 12);
    let record = |first: u64, rest: &[u8]| [&list[..], &first.to_be_bytes(), rest].concat();
    let zero = 2;
    let cases = [
        (
            "behind the end",
            record(16 << 12 | zero, b"\x01a\0"),
            "\"a\"",
        ),
        ("far behind", record(!4095 | zero, b"\x01a\0"), "\"a\""),
        ("of another block", record(zero, b"\x01b\0"), "\"b\""),
        ("of no block", record(zero | 0x20, b"\0"), "block"),
        ("filled with ones", record(zero, b"\x01a\x01"), "zero page"),
        ("of no kind", record(0x800, b"\x01a\0"), "RAM record"),
        ("an empty delta", record(0x40, b"\x01a\x01\0\0"), "XBZRLE"),
        ("a long delta", record(0x40, b"\x01a\x01\xff\xff"), "XBZRLE"),
        (
            // Threads decompress what was gathered up to the section's end.
            "no zlib",
            record(0x100, b"\x01a\0\0\0\x04abcd\0\0\0\0\0\0\0\x10"),
            "the page at 0x0 of RAM block 'a' failed: compress",
        ),
        (
            "a long zlib",
            record(0x100, b"\x01a\xff\xff\xff\xff"),
            "compressed page",
        ),
    ];
    let cases = cases.map(|(name, main, wanted)| case(name, &[&main], wanted));
    assert_refused(&cases);
}

/// Returns a channel of `small_multifd(1)` whose second header is `change`d.
fn damaged_header(change: impl Fn(&mut [u8])) -> Vec<u8> {
    let opening = InitialPacket {
        uuid: UUID,
        id: 0,
        hello: None,
    };
    let mut bytes = opening.encode().to_vec();
    let mut writer = PacketWriter::new(PacketLayout::QEMU, Method::None, false);
    put_sync(&mut writer, &mut bytes);
    let fields = PacketFields {
        block: "pc.ram",
        normal: &[0],
        payload_len: 4096,
        ..PacketFields::default()
    };
    let mut header = writer.header(&fields).unwrap().to_vec();
    change(&mut header);
    bytes.extend_from_slice(&header);
    bytes.extend_from_slice(&[7; PAGE_SIZE]);
    bytes
}

#[test]
fn packet_headers_with_false_values_are_named() {
    alone!();
    let main = Recording::small_multifd(1).main;
    type Change = fn(&mut [u8]);
    let cases: [(&str, Change, &str); 11] = [
        ("no magic", |header| header[0] = 9, "magic"),
        ("another version", |header| header[7] = 2, "version"),
        ("device state", |header| header[11] = 0x40, "device state"),
        ("two methods", |header| header[11] = 6, "flags"),
        ("pages_alloc", |header| header[12] = 0xff, "pages_alloc"),
        ("too many pages", |header| header[18] = 1, "normal pages"),
        ("too many zero pages", |header| header[34] = 1, "zero pages"),
        ("a long payload", |header| header[20] = 0xff, "payload"),
        ("another block", |header| header[64] = b'q', "qc.ram"),
        ("far behind", |header| header[320] = 0xff, "pc.ram"),
        ("half a page", |header| header[327] = 1, "pc.ram"),
    ];
    let cases = cases.map(|(name, change, wanted)| {
        let channel = damaged_header(change);
        case(name, &[&main, &channel], wanted)
    });
    assert_refused(&cases);
}

#[test]
fn a_setup_without_end_is_aborted() {
    alone!();
    let mut main = Vec::new();
    let mut encoder = MainEncoder::new(&configuration(), &mut main).unwrap();
    while main.len() < 17 << 20 {
        encoder.command(Command::Ping(7), &mut main).unwrap();
    }
    let wanted = "number of commands in the set-up";
    assert_refused(&[case("17 MiB of PINGs", &[&main], wanted)]);
}

#[test]
fn a_client_that_only_probes_the_port_is_not_awaited() {
    alone!();
    let log = Log::default();
    let recording = Recording::small();
    let (_folder, destination) = destination(&recording, 2, None, &log);
    let relay = Relay::start(&destination.address, &settings(&[]), true);
    let to = relay.address.clone();
    // Closed or reset, without data or with the start of a stream.
    for number in 0..20 {
        let mut stream = &to.connect(Duration::from_secs(10)).unwrap();
        let output: &[u8] = if number % 4 < 2 { b"" } else { b"\x11\x22" };
        stream.write_all(output).unwrap();
        if number % 2 == 0 {
            set_socket_linger(stream, Some(Duration::ZERO)).unwrap();
        }
    }
    std::thread::scope(|scope| {
        let arriving = scope.spawn(|| destination.run());
        super::source::play(&recording, &to, super::source::Ending::LetsGo, &log);
        relay.outcome("looked at").unwrap();
        assert!(arriving.join().unwrap().eof);
    });
}

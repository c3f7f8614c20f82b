//! Tests the relay from file to file. The restored content equals the saved content. A damaged file causes an error,
//! and leaves no output file.

use std::fs::{self, File};
use std::os::unix::fs::FileExt;
use std::path::Path;

use hotlift::file::{FileError, FileFormat, describe};
use hotlift::options::StreamOptions;
use hotlift::relay::{Hooks, Incoming, Outgoing, RelayReport, RelaySettings, UnusedRam, relay};
use hotlift::{Control, MigrationError};
use hotlift_wire::RamBlockEntry;
use hotlift_wire::main_channel::{
    Command, Configuration, FILE_HEADER, MAPPED_RAM, MappedBlock, MappedEvent, MappedLayout,
    MappedRamDecoder, MappedStep, put_mapped_end,
};
use proptest::prelude::*;
use tempfile::TempDir;

const PAGE: usize = 4096;

/// Content of a `mapped-ram` file.
#[derive(Debug, Clone, PartialEq, Eq)]
struct Saved {
    configuration: Configuration,
    switchover_start: bool,
    /// Name, and the content byte of each page; `None` for a zero page.
    blocks: Vec<(String, Vec<Option<u8>>)>,
    /// Device sections before and after the blocks.
    early: [Vec<u8>; 2],
    /// Devices, EOF, VM description.
    tail: Vec<u8>,
}

/// Creates a folder, in memory if possible: every file is synced to disk before it gets its name.
fn folder() -> TempDir {
    let memory = Path::new("/dev/shm");
    match memory.is_dir() {
        true => tempfile::tempdir_in(memory),
        false => tempfile::tempdir(),
    }
    .expect("a folder")
}

/// Returns a page with content that distinguishes it from others.
fn page(content: u8) -> Vec<u8> {
    let mut page = vec![content; PAGE];
    page[..8].copy_from_slice(b"hotlift ");
    page
}

fn small(machine: &str) -> Saved {
    let pages = |n: u8| (0..n).map(|i| (i % 3 != 0).then_some(i)).collect();
    Saved {
        configuration: Configuration {
            machine: machine.to_owned(),
            capabilities: vec![MAPPED_RAM.to_owned()],
            ..Configuration::default()
        },
        switchover_start: false,
        blocks: vec![
            ("pc.ram".to_owned(), pages(200)),
            ("rom".to_owned(), pages(3)),
        ],
        early: [Vec::new(), Vec::new()],
        tail: b"\x04device\0\x06\0\0\0\x15{\"a description\": []}".to_vec(),
    }
}

impl Saved {
    /// Writes a file as QEMU does, starting at byte `offset`.
    fn write(&self, path: &Path, offset: u64) {
        let file = File::create(path).expect("a file");
        let mut start = FILE_HEADER.to_vec();
        self.configuration.encode(&mut start).expect("encode");
        start.extend_from_slice(&self.early[0]);
        file.write_all_at(&start, offset).expect("write");
        let entries: Vec<_> = self
            .blocks
            .iter()
            .map(|(name, pages)| RamBlockEntry::new(name, (pages.len() * PAGE) as u64))
            .collect();
        let layout = MappedLayout::new(7, &entries, offset + start.len() as u64).expect("layout");
        for (position, piece) in &layout.pieces {
            file.write_all_at(piece, *position).expect("write");
        }
        for (place, (_, pages)) in layout.blocks.iter().zip(&self.blocks) {
            let mut bitmap = vec![0_u8; usize::try_from(place.bitmap_len()).expect("small")];
            for (number, content) in pages.iter().enumerate() {
                if let Some(content) = content {
                    bitmap[number / 8] |= 1 << (number % 8);
                    let position = place.pages_offset + (number * PAGE) as u64;
                    file.write_all_at(&page(*content), position).expect("write");
                }
            }
            file.write_all_at(&bitmap, place.bitmap_offset)
                .expect("write");
        }
        let mut end = self.early[1].clone();
        if self.switchover_start {
            Command::SwitchoverStart.encode(&mut end);
        }
        put_mapped_end(7, &mut end);
        end.extend_from_slice(&self.tail);
        file.write_all_at(&end, layout.end).expect("write");
    }

    /// Reads a file, using only the rules of the format.
    fn read(path: &Path) -> Self {
        let bytes = fs::read(path).expect("the file");
        let mut saved = Self {
            configuration: Configuration::default(),
            switchover_start: false,
            blocks: Vec::new(),
            early: [Vec::new(), Vec::new()],
            tail: Vec::new(),
        };
        let mut decoder = MappedRamDecoder::new(0, bytes.len() as u64);
        loop {
            let at = |position: u64| usize::try_from(position).expect("small");
            let step = decoder.next(&bytes[at(decoder.position())..]);
            match step.expect("a good file") {
                MappedStep::Event(MappedEvent::Configuration(output)) => {
                    saved.configuration = output
                }
                MappedStep::Event(MappedEvent::Command(Command::SwitchoverStart)) => {
                    saved.switchover_start = true;
                }
                MappedStep::Event(MappedEvent::Block(place)) => {
                    saved.blocks.push(read_block(&bytes, &place));
                }
                MappedStep::Event(MappedEvent::EarlySection(section)) => {
                    let early = &mut saved.early[usize::from(!saved.blocks.is_empty())];
                    early.extend_from_slice(&section.bytes);
                }
                MappedStep::Event(MappedEvent::RamEnd) => {
                    saved.tail = bytes[at(decoder.position())..].to_vec();
                    return saved;
                }
                MappedStep::Event(_) => {}
                MappedStep::Need(_) => panic!("the file is cut short"),
            }
        }
    }
}

fn read_block(bytes: &[u8], place: &MappedBlock) -> (String, Vec<Option<u8>>) {
    let at = |position: u64| usize::try_from(position).expect("small");
    let pages = (0..at(place.entry.used_length) / PAGE).map(|number| {
        let word = bytes[at(place.bitmap_offset) + number / 8];
        (word >> (number % 8) & 1 == 1).then(|| {
            let got = &bytes[at(place.pages_offset) + number * PAGE..][..PAGE];
            assert!(got == page(got[8]), "page {number} is torn");
            got[8]
        })
    });
    (place.entry.name.clone(), pages.collect())
}

fn settings(method: &str, channels: u8) -> RelaySettings {
    RelaySettings {
        outgoing: StreamOptions {
            multifd: Some(channels > 0),
            multifd_channels: channels.max(1),
            multifd_compression: hotlift_methods::method(method).expect("a method"),
            max_bandwidth: 0,
            ..StreamOptions::default()
        },
        ..RelaySettings::default()
    }
}

fn carry(
    (from, offset): (&Path, u64),
    to: &Path,
    format: FileFormat,
    settings: &RelaySettings,
) -> Result<RelayReport, MigrationError> {
    relay(
        Incoming::File { path: from, offset },
        &Outgoing::File { path: to, format },
        settings,
        &Control::default(),
        Hooks::default(),
    )
}

/// Converts from QEMU's format into ours and back.
fn there_and_back(saved: &Saved, method: &str, channels: u8) -> Saved {
    let folder = folder();
    let path = |name: &str| folder.path().join(name);
    saved.write(&path("qemu"), 0);
    // Records of main are not compressed.
    let method = if channels > 0 { method } else { "none" };
    let settings = |method| settings(method, channels);
    let explained = |result: Result<RelayReport, MigrationError>| {
        result.unwrap_or_else(|error| panic!("{}", error.chain()))
    };
    let from = (&*path("qemu"), 0);
    let ours = path("ours");
    let report = explained(carry(from, &ours, FileFormat::Hotlift, &settings(method)));
    let pages = || saved.blocks.iter().flat_map(|(_, pages)| pages);
    let normal = pages().flatten().count();
    let zero = pages().count() - normal;
    // Pages that are missing in the file are reported as zero: a destination may have other content there.
    let reported = (report.normal_pages, report.zero_pages);
    assert_eq!(reported, (normal as u64, zero as u64));
    let (from, to) = ((&*ours, 0), path("again"));
    if method != "none" {
        let refused = carry(from, &to, FileFormat::MappedRam, &settings(method));
        let words = refused.expect_err("it has no compressed pages").chain();
        assert!(
            words.contains(&format!("multifd-compression={method}")),
            "{words}"
        );
        assert!(words.contains("uncompressed") && !to.exists(), "{words}");
    }
    explained(carry(from, &to, FileFormat::MappedRam, &settings("none")));
    assert_eq!(fs::read_dir(folder.path()).expect("a folder").count(), 3);
    Saved::read(&path("again"))
}

proptest! {
    #![proptest_config(ProptestConfig::with_cases(24))]

    #[test]
    fn a_vm_is_restored_unchanged_from_either_format(
        method in prop::sample::select(&["none", "zlib", "zstd"][..]),
        channels in 0..4_u8,
        // Barriers by section and by round.
        machine in prop::sample::select(&["pc-i440fx-7.2", "pc-i440fx-10.0", "microvm"][..]),
        switchover_start in any::<bool>(),
        uuid in prop::option::of(any::<[u8; 16]>()),
        blocks in prop::collection::vec(
            prop::collection::vec(prop::option::weighted(0.7, any::<u8>()), 1..700),
            1..5,
        ),
        devices in prop::collection::vec(1..255_u8, 0..3000),
    ) {
        let mut saved = small(machine);
        saved.switchover_start = switchover_start;
        saved.configuration.uuid = uuid;
        saved.blocks = blocks
            .into_iter()
            .enumerate()
            .map(|(number, pages)| (format!("block {number}"), pages))
            .collect();
        saved.tail.splice(0..0, devices);
        let back = there_and_back(&saved, method, channels);
        prop_assert!(back == saved, "{:?} became {:?}", saved.configuration, back.configuration);
    }
}

/// Returns the section of device `id` with 16 blocks of 4 pages; the bits of `plugged` select the plugged ones.
fn virtio_mem(id: u32, plugged: u16) -> Vec<u8> {
    let name = format!("0000:00:{id:02}.0/virtio-mem-device-early");
    let page = PAGE as u64;
    let fields = [4 << 30, 64 * page, 4 * page].map(u64::to_be_bytes);
    let plugged_bytes = u64::from(plugged.count_ones()) * 4 * page;
    let behind_node = [plugged_bytes, plugged.into()].map(u64::to_be_bytes);
    [
        &[4][..],
        &id.to_be_bytes(),
        &[u8::try_from(name.len()).expect("short")],
        name.as_bytes(),
        &[0, 0, 0, 0, 0, 0, 0, 1],
        fields.as_flattened(),
        &[0; 4],
        behind_node.as_flattened(),
        &[0x7e],
        &id.to_be_bytes(),
    ]
    .concat()
}

#[test]
fn unplugged_memory_is_omitted_in_every_conversion_between_files() {
    // Both devices have the same size: only the path of a device identifies its RAM block. The order of their sections differs
    // from that of the blocks.
    let devices = [(8, 0x8007_u16), (9, 0x0ff0)];
    let is_plugged = |plugged: u16, page: u8| plugged >> (page / 4) & 1 == 1;
    let mut saved = small("pc-i440fx-10.0");
    for (id, plugged) in devices {
        let pages = (0..64).map(|page| {
            let has_content = is_plugged(plugged, page) && page % 3 != 0;
            has_content.then_some(page + 1)
        });
        let name = format!("0000:00:{id:02}.0/vm");
        saved.blocks.push((name, pages.collect()));
    }
    saved.tail = b"\x04device\0\x06\0\0\0\x0e{\"devices\":[]}".to_vec();
    let sections = devices.map(|(id, plugged)| virtio_mem(id, plugged));
    let [first, second] = &sections;
    for early in [
        [[&second[..], first].concat(), Vec::new()],
        [Vec::new(), [&second[..], first].concat()],
    ] {
        saved.early = early;
        let folder = folder();
        let path = |name: &str| folder.path().join(name);
        saved.write(&path("qemu"), 0);
        let settings = settings("none", 2);
        let zeros = saved.blocks[..2].iter().flat_map(|(_, pages)| pages);
        let zeros = zeros.filter(|page| page.is_none()).count();
        let plugged_zeros = devices.map(|(_, plugged)| {
            let pages = (0..64).filter(|&page| is_plugged(plugged, page));
            pages.filter(|page| page % 3 == 0).count()
        });
        let plugged_zeros: usize = plugged_zeros.iter().sum();
        let ways = [
            ("qemu", "ours", FileFormat::Hotlift),
            ("ours", "again", FileFormat::MappedRam),
            ("again", "ours", FileFormat::Hotlift),
            ("qemu", "mapped", FileFormat::MappedRam),
        ];
        for (from, to, format) in ways {
            let carried = carry((&path(from), 0), &path(to), format, &settings);
            let report = carried.unwrap_or_else(|error| panic!("{}", error.chain()));
            assert_eq!(
                report.zero_pages,
                (zeros + plugged_zeros) as u64,
                "{from} to {to}"
            );
        }
        assert!(Saved::read(&path("again")) == saved);
        assert!(Saved::read(&path("mapped")) == saved);
    }
}

#[test]
fn zero_pages_are_not_sent_for_unplugged_memory() {
    let mut saved = small("pc-i440fx-7.2");
    let pages = (0..64).map(|page| (page % 3 == 0).then_some(page + 1));
    saved
        .blocks
        .push(("0000:00:08.0/vm".to_owned(), pages.collect()));
    let zeros = saved.blocks[..2].iter().flat_map(|(_, pages)| pages);
    let zeros = zeros.filter(|page| page.is_none()).count();
    let folder = folder();
    let path = |name: &str| folder.path().join(name);
    saved.write(&path("qemu"), 0);
    let plugged_zeros = saved.blocks[2].1.iter().filter(|page| page.is_none());
    for (unplugged, expected) in [(64, zeros), (63, zeros + plugged_zeros.count())] {
        let settings = RelaySettings {
            unused_ram: vec![UnusedRam::Unplugged {
                block: "vm".to_owned(),
                bytes: (unplugged * PAGE) as u64,
            }],
            ..settings("none", 2)
        };
        let carried = carry(
            (&path("qemu"), 0),
            &path("again"),
            FileFormat::MappedRam,
            &settings,
        );
        let report = carried.unwrap_or_else(|error| panic!("{}", error.chain()));
        assert_eq!(report.zero_pages, expected as u64, "{unplugged}");
        assert!(Saved::read(&path("again")) == saved);
    }
}

#[test]
fn a_file_in_which_a_device_has_another_length_than_its_description_is_refused() {
    let mut saved = small("pc-i440fx-10.0");
    let section = b"\x04\0\0\0\x09\x06device\0\0\0\0\0\0\0\x01state\x7e\0\0\0\x09";
    saved.early[1] = section.to_vec();
    for (size, is_right) in [(5, true), (6, false)] {
        let fields = format!(r#"[{{"name":"a","type":"b","size":{size}}}]"#);
        let json = format!(r#"{{"devices":[{{"name":"device","fields":{fields}}}]}}"#);
        saved.tail = b"\0\x06".to_vec();
        let length = u32::try_from(json.len()).expect("short");
        saved.tail.extend_from_slice(&length.to_be_bytes());
        saved.tail.extend_from_slice(json.as_bytes());
        let folder = folder();
        let path = folder.path().join("qemu");
        saved.write(&path, 0);
        match is_right {
            true => {
                let to = folder.path().join("again");
                let settings = settings("none", 2);
                carry((&path, 0), &to, FileFormat::MappedRam, &settings).expect("carried");
                assert!(Saved::read(&to) == saved);
            }
            false => assert_refused(&path, "another length"),
        }
    }
}

#[test]
fn a_stream_may_start_inside_a_file() {
    let folder = folder();
    let path = |name: &str| folder.path().join(name);
    let saved = small("pc-i440fx-10.0");
    saved.write(&path("qemu"), 5000);
    let settings = settings("none", 2);
    let to = path("again");
    carry((&path("qemu"), 5000), &to, FileFormat::MappedRam, &settings).expect("carried");
    assert_eq!(Saved::read(&to), saved);
    let error = carry((&path("qemu"), 0), &to, FileFormat::MappedRam, &settings);
    assert!(matches!(
        error,
        Err(MigrationError::File(FileError::NotASave))
    ));
}

#[test]
fn a_zero_page_of_one_file_takes_no_space_in_another() {
    let folder = folder();
    let path = |name: &str| folder.path().join(name);
    let saved = small("pc-i440fx-10.0");
    saved.write(&path("qemu"), 0);
    // Page 1 is all zeros, although its bit marks content.
    let file = File::options()
        .read(true)
        .write(true)
        .open(path("qemu"))
        .expect("the file");
    let place = {
        let bytes = fs::read(path("qemu")).expect("the file");
        let mut decoder = MappedRamDecoder::new(0, bytes.len() as u64);
        loop {
            let from = usize::try_from(decoder.position()).expect("small");
            if let MappedStep::Event(MappedEvent::Block(place)) =
                decoder.next(&bytes[from..]).expect("a good file")
            {
                break place;
            }
        }
    };
    let at = place.pages_offset + PAGE as u64;
    file.write_all_at(&[0; PAGE], at).expect("write");
    let to = path("again");
    carry(
        (&path("qemu"), 0),
        &to,
        FileFormat::MappedRam,
        &settings("none", 2),
    )
    .expect("carried");
    let mut expected = saved;
    expected.blocks[0].1[1] = None;
    assert_eq!(Saved::read(&to), expected);
}

/// Asserts that a file causes an error about the file, and leaves nothing that looks like a VM.
fn assert_refused(from: &Path, what: &str) {
    let to = from.with_file_name("to");
    for format in [FileFormat::MappedRam, FileFormat::Hotlift] {
        let error = carry((from, 0), &to, format, &settings("none", 2)).expect_err(what);
        assert!(
            matches!(error, MigrationError::File(_)),
            "{what}: {}",
            error.chain()
        );
        let folder = from.parent().expect("a folder");
        let left = fs::read_dir(folder).expect("a folder").count();
        assert_eq!(left, 1, "{what}: something is left");
    }
}

#[test]
fn a_mapped_ram_file_that_was_cut_is_refused() {
    let folder = folder();
    let path = folder.path().join("qemu");
    small("pc-i440fx-10.0").write(&path, 0);
    let length = fs::metadata(&path).expect("the file").len();
    let mut cuts: Vec<u64> = (0..200).step_by(7).collect();
    cuts.extend((0..length).step_by(100_000));
    // In the sections after RAM, and in the tail.
    cuts.extend(length - 70..length);
    for cut in cuts.into_iter().rev() {
        File::options()
            .write(true)
            .open(&path)
            .and_then(|file| file.set_len(cut))
            .expect("cut");
        assert_refused(&path, &format!("{cut} of {length} bytes"));
    }
}

#[test]
fn a_mapped_ram_file_is_described_as_far_as_it_can_be_read() {
    let folder = folder();
    let path = folder.path().join("qemu");
    small("pc-i440fx-10.0").write(&path, 0);
    let described = describe(&path, true, &Control::new()).expect("a good file");
    assert_eq!(described.format, FileFormat::MappedRam);
    assert_eq!(described.info.machine, "pc-i440fx-10.0");
    let blocks: Vec<_> = described
        .ram
        .iter()
        .map(|block| (block.name.as_str(), block.bytes, block.pages))
        .collect();
    let page = PAGE as u64;
    assert_eq!(blocks, [("pc.ram", 200 * page, 133), ("rom", 3 * page, 2)]);
    assert!(described.problem.is_none() && described.modified.is_some());
    assert_eq!(described.verified_blocks, None, "it has no checksums");

    let cut = described.file_bytes - 5;
    let file = File::options().write(true).open(&path);
    file.and_then(|file| file.set_len(cut)).expect("cut");
    let described = describe(&path, false, &Control::new()).expect("its RAM can be read");
    let problem = described.problem.expect("a problem");
    assert!(problem.contains("cut short"), "{problem}");
    assert_eq!(described.ram.len(), 2);
    fs::write(&path, "something else entirely").expect("write");
    let error = describe(&path, false, &Control::new()).expect_err("no file of QEMU's");
    assert!(
        matches!(error, MigrationError::File(FileError::NotASave)),
        "{}",
        error.chain()
    );
}

#[test]
fn a_sparse_file_of_more_ram_than_any_host_has_is_refused() {
    let folder = folder();
    let path = folder.path().join("qemu");
    let saved = small("pc-i440fx-10.0");
    let mut bytes = FILE_HEADER.to_vec();
    saved.configuration.encode(&mut bytes).expect("encode");
    let entries = [RamBlockEntry::new("ram", 1 << 55)];
    let layout = MappedLayout::new(1, &entries, bytes.len() as u64).expect("layout");
    bytes.extend_from_slice(&layout.pieces[0].1);
    fs::write(&path, bytes).expect("write");
    let file = File::options().write(true).open(&path).expect("the file");
    // If the system supports no file of this length, the file is only truncated.
    let _ = file.set_len(layout.end + 100);
    assert_refused(&path, "a sparse file");
}

#[test]
fn a_damaged_mapped_ram_file_causes_no_panic_and_leaves_no_file() {
    let folder = folder();
    let (path, to) = (folder.path().join("qemu"), folder.path().join("to"));
    small("pc-i440fx-10.0").write(&path, 0);
    let whole = fs::read(&path).expect("the file");
    let stream = (0..160).chain(whole.len() - 80..whole.len());
    for at in stream {
        let file = File::options().write(true).open(&path).expect("the file");
        let at_byte = at as u64;
        file.write_all_at(&[whole[at] ^ 1 << (at % 8)], at_byte)
            .expect("write");
        // The format has no checksum: a flipped bit of a page or a bitmap is not detected.
        let outcome = carry((&path, 0), &to, FileFormat::MappedRam, &settings("none", 1));
        match outcome {
            Ok(_) => fs::remove_file(&to).expect("it is there"),
            Err(error) => {
                let expected = matches!(error, MigrationError::File(_));
                assert!(expected, "byte {at}: {}", error.chain());
            }
        }
        assert_eq!(fs::read_dir(folder.path()).expect("a folder").count(), 1);
        file.write_all_at(&whole[at..=at], at_byte).expect("write");
    }
}

/// Returns the range of a finished save file that is never read: it only marks a file whose save ended before the rename.
fn unread(whole: &[u8]) -> std::ops::Range<usize> {
    let foot = whole.len() - 16;
    let length = u32::from_be_bytes(whole[foot..foot + 4].try_into().expect("four bytes"));
    let json = &whole[foot - length as usize..foot];
    let contents: serde_json::Value = serde_json::from_slice(json).expect("JSON");
    let number = |part: &str, name: &str| {
        let number = contents[part][name].as_u64().expect("a number");
        usize::try_from(number).expect("small")
    };
    number("checks", "position") + number("checks", "length")..number("end", "position")
}

#[test]
fn a_damaged_save_file_is_refused_wherever_the_damage_is() {
    let (outer, inner) = (folder(), folder());
    let (qemu, path) = (outer.path().join("qemu"), inner.path().join("ours"));
    small("pc-i440fx-10.0").write(&qemu, 0);
    carry((&qemu, 0), &path, FileFormat::Hotlift, &settings("zstd", 2)).expect("saved");
    let whole = fs::read(&path).expect("the file");
    let places = (0..whole.len()).step_by(whole.len() / 60);
    let unread = unread(&whole);
    for at in places.chain(whole.len() - 40..whole.len()) {
        if unread.contains(&at) {
            continue;
        }
        let mut bytes = whole.clone();
        bytes[at] ^= 0x40;
        fs::write(&path, bytes).expect("write");
        assert_refused(&path, &format!("byte {at}"));
        fs::write(&path, &whole[..at]).expect("write");
        assert_refused(&path, &format!("{at} bytes"));
    }
}

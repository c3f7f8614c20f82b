//! The save file by itself: what was written comes back, and nothing else is taken for it.

use std::fs;
use std::os::unix::fs::MetadataExt;
use std::path::Path;

use tempfile::TempDir;

use super::container::{CHUNK_HEADER_LEN, CHUNK_MAX, TRAILER_LEN};
use super::read::ContainerReader;
use super::{ContainerWriter, FileError, FileInfo, inspect};

/// What a reader hands on: channel and bytes.
type Handed = Vec<(u16, Vec<u8>)>;

/// A folder in memory where there is one: most files here live for a moment.
fn folder() -> TempDir {
    let memory = Path::new("/dev/shm");
    match memory.is_dir() {
        true => tempfile::tempdir_in(memory),
        false => tempfile::tempdir(),
    }
    .unwrap()
}

fn info() -> FileInfo {
    FileInfo {
        machine: "pc-i440fx-10.0".to_owned(),
        uuid: "0".repeat(32),
        channels: 2,
        method: "zstd".to_owned(),
        begun: 1_800_000_000,
        hotlift: "0.1.0".to_owned(),
    }
}

const CHUNKS: [(u16, &[&[u8]]); 5] = [
    (1, &[b"opening 0"]),
    (2, &[b"opening 1"]),
    (0, &[b"QEVM", b"", b" and so on"]),
    (2, &[b"header", &[7; 300]]),
    (0, &[b"devices"]),
];
const END: &[u8] = b"\0description";

fn write(path: &Path) {
    let file = ContainerWriter::create(path, &info()).unwrap();
    for (channel, parts) in CHUNKS {
        file.append(channel, false, parts).unwrap();
    }
    file.sync().unwrap();
    file.append(0, true, &[END]).unwrap();
    file.finish().unwrap();
}

fn expected() -> Handed {
    let chunks = CHUNKS.iter();
    chunks
        .map(|(channel, parts)| (*channel, parts.concat()))
        .chain([(0, END.to_vec())])
        .collect()
}

/// Reads a file; with what was handed on before an error, if there was one.
fn read(path: &Path) -> (Handed, Result<(), FileError>) {
    let mut handed = Vec::new();
    let outcome = ContainerReader::open(path).and_then(|mut reader| {
        reader.read_all(|channel, bytes| {
            handed.push((channel, bytes.to_vec()));
            Ok(())
        })
    });
    (handed, outcome)
}

/// Asserts that a changed file is refused, and that nothing of its end was handed on.
fn assert_refused(path: &Path, bytes: &[u8], what: &str) {
    fs::write(path, bytes).unwrap();
    let (handed, outcome) = read(path);
    assert!(outcome.is_err(), "{what}: taken for whole");
    let expected = expected();
    assert!(
        handed.len() < expected.len() && expected.starts_with(&handed),
        "{what}: {handed:?} was handed on"
    );
}

#[test]
fn what_was_written_comes_back_in_order_under_its_name_alone() {
    let folder = folder();
    let path = folder.path().join("vm");
    write(&path);
    let (handed, outcome) = read(&path);
    outcome.unwrap();
    assert_eq!(handed, expected());
    assert_eq!(inspect(&path).unwrap(), info());
    let names: Vec<_> = fs::read_dir(folder.path()).unwrap().collect();
    assert_eq!(names.len(), 1, "the partial file is gone");
    let about = fs::metadata(&path).unwrap();
    assert_eq!(
        about.mode() & 0o777,
        0o600,
        "a guest's memory is its owner's"
    );
    // 512 bytes each; what was set aside for the end is MiBs.
    assert!(about.blocks() < 256, "{} blocks are kept", about.blocks());
}

#[test]
fn every_damaged_byte_is_refused() {
    let folder = folder();
    let path = folder.path().join("vm");
    write(&path);
    let whole = fs::read(&path).unwrap();
    for at in 0..whole.len() {
        // One bit, a different one from byte to byte, and all.
        for mask in [1 << (at % 8), 0xff] {
            let mut bytes = whole.clone();
            bytes[at] ^= mask;
            assert_refused(&path, &bytes, &format!("byte {at}, bits {mask:#04x}"));
        }
    }
}

#[test]
fn every_truncation_and_every_addition_is_refused() {
    let folder = folder();
    let path = folder.path().join("vm");
    write(&path);
    let whole = fs::read(&path).unwrap();
    for length in 0..whole.len() {
        assert_refused(&path, &whole[..length], &format!("{length} bytes"));
    }
    assert_refused(&path, &[&whole[..], &[0]].concat(), "a byte more");
    assert_refused(&path, &[&whole[..], &whole[..]].concat(), "twice");
}

/// Byte ranges of header, chunks and trailer.
fn ranges(whole: &[u8]) -> Vec<std::ops::Range<usize>> {
    let chunks = expected();
    let body: usize = chunks
        .iter()
        .map(|(_, bytes)| CHUNK_HEADER_LEN + bytes.len())
        .sum();
    let mut at = whole.len() - TRAILER_LEN - body;
    let mut ranges = Vec::new();
    ranges.push(0..at);
    for (_, bytes) in &chunks {
        ranges.push(at..at + CHUNK_HEADER_LEN + bytes.len());
        at += CHUNK_HEADER_LEN + bytes.len();
    }
    ranges.push(at..whole.len());
    ranges
}

#[test]
fn chunks_moved_doubled_or_left_out_are_refused() {
    let folder = folder();
    let path = folder.path().join("vm");
    write(&path);
    let whole = fs::read(&path).unwrap();
    let ranges = ranges(&whole);
    let put_together = |order: &[usize]| -> Vec<u8> {
        order
            .iter()
            .flat_map(|&part| whole[ranges[part].clone()].to_vec())
            .collect()
    };
    let all: Vec<usize> = (0..ranges.len()).collect();
    assert_eq!(put_together(&all), whole);
    for a in 1..all.len() - 1 {
        let mut without = all.clone();
        without.remove(a);
        assert_refused(&path, &put_together(&without), &format!("without {a}"));
        let mut doubled = all.clone();
        doubled.insert(a, a);
        assert_refused(&path, &put_together(&doubled), &format!("{a} twice"));
        for b in a + 1..all.len() - 1 {
            let mut swapped = all.clone();
            swapped.swap(a, b);
            assert_refused(
                &path,
                &put_together(&swapped),
                &format!("{a} and {b} swapped"),
            );
        }
    }
}

#[test]
fn a_chunk_of_another_file_is_refused_by_the_trailer() {
    let folder = folder();
    let (path, other) = (folder.path().join("vm"), folder.path().join("other"));
    write(&path);
    let file = ContainerWriter::create(&other, &info()).unwrap();
    for (channel, parts) in CHUNKS {
        // As long as the other's, with another content.
        let bytes = parts.concat().to_ascii_uppercase();
        file.append(channel, false, &[&bytes]).unwrap();
    }
    file.append(0, true, &[END]).unwrap();
    file.finish().unwrap();
    let (mut bytes, other) = (fs::read(&path).unwrap(), fs::read(&other).unwrap());
    let devices = ranges(&bytes)[5].clone();
    bytes[devices.clone()].copy_from_slice(&other[devices]);
    fs::write(&path, bytes).unwrap();
    let (handed, outcome) = read(&path);
    assert!(matches!(
        outcome,
        Err(FileError::Damaged {
            what: "the trailer",
            ..
        })
    ));
    assert!(!handed.contains(&(0, END.to_vec())), "the guest would run");
}

#[test]
fn a_file_that_was_not_finished_leaves_nothing() {
    let folder = folder();
    let path = folder.path().join("vm");
    fs::write(&path, "what was there before").unwrap();
    for abort in [true, false] {
        let file = ContainerWriter::create(&path, &info()).unwrap();
        file.append(0, false, &[b"QEVM"]).unwrap();
        if abort {
            file.abort();
            assert!(file.append(0, false, &[b"more"]).is_err());
            assert!(file.finish().is_err());
        }
        drop(file);
        let names = fs::read_dir(folder.path()).unwrap().count();
        assert_eq!(names, 1);
        assert_eq!(fs::read(&path).unwrap(), b"what was there before");
    }
}

#[test]
fn a_file_that_is_being_written_is_left_alone_and_a_dead_ones_rest_is_not() {
    let folder = folder();
    let path = folder.path().join("vm");
    fs::write(folder.path().join("vm.partial"), [0xee; 1 << 20]).unwrap();
    let file = ContainerWriter::create(&path, &info()).unwrap();
    assert!(matches!(
        ContainerWriter::create(&path, &info()),
        Err(FileError::InUse { .. })
    ));
    file.append(0, true, &[END]).unwrap();
    file.finish().unwrap();
    assert_eq!(read(&path).0, [(0, END.to_vec())]);
}

#[test]
fn threads_write_beside_each_other_and_each_channel_keeps_its_order() {
    const EACH: u16 = 300;
    let folder = folder();
    let path = folder.path().join("vm");
    let file = ContainerWriter::create(&path, &info()).unwrap();
    std::thread::scope(|scope| {
        for channel in 0..=2_u16 {
            let file = &file;
            scope.spawn(move || {
                for number in 0..EACH {
                    let rest = vec![channel.to_be_bytes()[1]; usize::from(number) * 7];
                    let parts: [&[u8]; 2] = [&number.to_be_bytes(), &rest];
                    file.append(channel, false, &parts).unwrap();
                }
            });
        }
    });
    file.finish().unwrap();
    let (handed, outcome) = read(&path);
    outcome.unwrap();
    for channel in 0..=2 {
        let mut number = 0_u16;
        for (_, bytes) in handed.iter().filter(|(from, _)| *from == channel) {
            assert_eq!(bytes[..2], number.to_be_bytes());
            assert_eq!(bytes.len(), 2 + usize::from(number) * 7);
            number += 1;
        }
        assert_eq!(number, EACH);
    }
}

#[test]
fn what_is_too_long_for_a_chunk_comes_back_in_several() {
    let folder = folder();
    let path = folder.path().join("vm");
    let file = ContainerWriter::create(&path, &info()).unwrap();
    let long: Vec<u8> = (0..=u8::MAX).cycle().take(2 * CHUNK_MAX + 77).collect();
    file.append(0, false, &[&long]).unwrap();
    // More parts than the kernel takes at once.
    let parts: Vec<&[u8]> = long[..100_000].chunks(33).collect();
    file.append(1, false, &parts).unwrap();
    file.finish().unwrap();
    let (handed, outcome) = read(&path);
    outcome.unwrap();
    let of = |channel| {
        let chunks = handed.iter().filter(move |(from, _)| *from == channel);
        chunks
            .flat_map(|(_, bytes)| bytes.clone())
            .collect::<Vec<u8>>()
    };
    assert!(of(0) == long);
    assert!(of(1) == long[..100_000]);
}

#[test]
fn other_files_are_told_apart() {
    let folder = folder();
    let path = folder.path().join("vm");
    assert!(matches!(inspect(&path), Err(FileError::Read { .. })));
    fs::write(&path, "#!/bin/sh\necho no save file\n").unwrap();
    assert!(matches!(inspect(&path), Err(FileError::NotASave)));
    fs::write(
        &path,
        [&super::container::MAGIC[..], &[0, 0, 0, 2, 0, 0, 0, 0]].concat(),
    )
    .unwrap();
    assert!(matches!(
        inspect(&path),
        Err(FileError::Version { version: 2 })
    ));
}

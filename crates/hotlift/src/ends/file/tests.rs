//! The save file by itself: what was written comes back, and nothing else is taken for it.

use std::fs;
use std::os::unix::fs::{MetadataExt, PermissionsExt, chown, symlink};
use std::path::Path;
use std::process::Command;
use std::sync::Arc;
use std::time::Duration;

use tempfile::TempDir;

use crate::ends::file::container::{CHUNK_HEADER_LEN, CHUNK_MAX, TRAILER_LEN};
use crate::ends::file::{ContainerWriter, FileError, FileInfo, SavedChannels, inspect};

/// Somebody else: `nobody`, on every Linux.
const STRANGER: u32 = 65534;

/// The bytes of the channels, main first.
type Handed = [Vec<u8>; 3];

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

/// All chunks, in the file's order.
fn chunks() -> Vec<(u16, Vec<u8>)> {
    let chunks = CHUNKS.iter();
    chunks
        .map(|(channel, parts)| (*channel, parts.concat()))
        .chain([(0, END.to_vec())])
        .collect()
}

fn expected() -> Handed {
    let mut expected = Handed::default();
    for (channel, bytes) in chunks() {
        expected[usize::from(channel)].extend(bytes);
    }
    expected
}

/// Reads a file, main last; with what was handed on before an error, if there was one.
fn read(path: &Path) -> (Handed, Result<(), FileError>) {
    let mut handed = Handed::default();
    let saved = match SavedChannels::open(path) {
        Ok(saved) => Arc::new(saved),
        Err(error) => return (handed, Err(error)),
    };
    let mut buffer = [0; 1000];
    for number in [1, 2, 0] {
        let channel = saved.channel(number);
        while let Ok(true) = channel.wait_readable(Duration::ZERO) {
            match channel.read_some(&mut buffer) {
                Ok(read @ 1..) => handed[usize::from(number)].extend(&buffer[..read]),
                _ => break,
            }
        }
    }
    (handed, saved.take_error().map_or(Ok(()), Err))
}

/// Asserts that a changed file is refused, and that nothing of its end was handed on.
fn assert_refused(path: &Path, bytes: &[u8], what: &str) {
    fs::write(path, bytes).unwrap();
    let (handed, outcome) = read(path);
    assert!(outcome.is_err(), "{what}: taken for whole");
    let expected = expected();
    let mut all = handed.iter().zip(&expected);
    assert!(
        all.all(|(handed, expected)| expected.starts_with(handed))
            && handed[0].len() <= expected[0].len() - END.len(),
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
    let chunks = chunks();
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
    assert!(!handed[0].ends_with(END), "the guest would run");
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

/// Names in a folder.
fn names(folder: &Path) -> Vec<String> {
    let entries = fs::read_dir(folder).unwrap();
    let mut names: Vec<_> = entries
        .map(|entry| entry.unwrap().file_name().into_string().unwrap())
        .collect();
    names.sort();
    names
}

#[test]
fn nothing_has_a_name_while_it_is_written_and_the_last_of_two_writers_has_it() {
    let folder = folder();
    let path = folder.path().join("vm");
    let [one, other] = [(); 2].map(|()| ContainerWriter::create(&path, &info()).unwrap());
    one.append(0, true, &[b"one"]).unwrap();
    other.append(0, true, &[b"other"]).unwrap();
    // A process that is killed here leaves nothing.
    assert_eq!(names(folder.path()), [""; 0]);
    other.finish().unwrap();
    assert_eq!(read(&path).0[0], b"other");
    one.finish().unwrap();
    assert_eq!(read(&path).0[0], b"one");
    assert_eq!(names(folder.path()), ["vm"]);
}

/// Saves into a folder where somebody has put something under the name that partial files once had.
fn save_beside(put: impl FnOnce(&Path, &Path)) -> (TempDir, fs::Metadata) {
    let folder = folder();
    let victim = folder.path().join("victim");
    fs::write(&victim, "of somebody").unwrap();
    put(&folder.path().join("vm.partial"), &victim);
    write(&folder.path().join("vm"));
    assert_eq!(read(&folder.path().join("vm")).0, expected());
    assert_eq!(fs::read(&victim).unwrap(), b"of somebody");
    assert_eq!(names(folder.path()), ["victim", "vm", "vm.partial"]);
    let about = fs::symlink_metadata(folder.path().join("vm")).unwrap();
    (folder, about)
}

#[test]
fn what_somebody_has_put_into_the_folder_does_not_become_the_file() {
    for mode in [0o600, 0o666] {
        let (_folder, about) = save_beside(|partial, _| {
            fs::write(partial, [0xee; 1 << 20]).unwrap();
            fs::set_permissions(partial, fs::Permissions::from_mode(mode)).unwrap();
            if rustix::process::geteuid().is_root() {
                chown(partial, Some(STRANGER), Some(STRANGER)).unwrap();
            }
        });
        assert_eq!(about.uid(), rustix::process::geteuid().as_raw());
        assert_eq!((about.mode() & 0o7777, about.nlink()), (0o600, 1));
    }
}

#[test]
fn a_link_that_somebody_has_put_into_the_folder_is_not_followed() {
    let (_folder, about) = save_beside(|partial, victim| symlink(victim, partial).unwrap());
    assert!(about.is_file());
    let (_folder, about) = save_beside(|partial, victim| fs::hard_link(victim, partial).unwrap());
    assert_eq!(about.nlink(), 1);
}

/// Asserts that a save to `path` is refused by name before and after it was written, and leaves nothing.
fn assert_not_replaced(path: &Path, is: &str, put: impl Fn()) {
    let refused = |outcome: Result<(), FileError>| {
        let error = outcome.unwrap_err().to_string();
        assert!(error.contains(is), "{error}");
        assert!(error.contains(&path.display().to_string()), "{error}");
    };
    let file = ContainerWriter::create(path, &info()).unwrap();
    file.append(0, true, &[END]).unwrap();
    file.sync().unwrap();
    put();
    let before = names(path.parent().unwrap());
    assert_eq!(before.len(), 3, "{before:?}");
    refused(file.finish());
    refused(ContainerWriter::create(path, &info()).map(|_| ()));
    drop(file);
    assert_eq!(names(path.parent().unwrap()), ["other", "vm"]);
}

#[test]
fn only_a_regular_file_of_this_user_is_replaced() {
    let of_another = |put: &dyn Fn(&Path, &Path), is| {
        let folder = folder();
        let (path, other) = (folder.path().join("vm"), folder.path().join("other"));
        fs::write(&other, "of somebody").unwrap();
        assert_not_replaced(&path, is, || put(&path, &other));
        assert_eq!(fs::read(&other).unwrap(), b"of somebody");
    };
    of_another(
        &|path, other| symlink(other, path).unwrap(),
        "a symbolic link",
    );
    of_another(
        &|path, _| symlink("nowhere", path).unwrap(),
        "a symbolic link",
    );
    of_another(&|path, _| fs::create_dir(path).unwrap(), "no regular file");
    if !rustix::process::geteuid().is_root() {
        hotlift_testkit::skip!("root", "only root can make files of another user");
        return;
    }
    let give = |path: &Path, _: &Path| {
        fs::write(path, "of somebody").unwrap();
        chown(path, Some(STRANGER), None).unwrap();
    };
    of_another(&give, "a file of another user");
}

/// A small file system of its own; gone with the value.
struct Disk(TempDir);

impl Disk {
    fn new() -> Option<Self> {
        let disk = Self(TempDir::new().unwrap());
        disk.mount(&["-t", "tmpfs", "-o", "size=1M", "tmpfs"])
            .then_some(disk)
    }

    fn mount(&self, arguments: &[&str]) -> bool {
        let mut mount = Command::new("mount");
        let ran = mount.args(arguments).arg(self.0.path()).output();
        let mounted = ran.is_ok_and(|output| output.status.success());
        if !mounted {
            hotlift_testkit::skip!("root", "only root can mount a file system");
        }
        mounted
    }
}

impl Drop for Disk {
    fn drop(&mut self) {
        let _ = Command::new("umount").arg("-l").arg(self.0.path()).status();
    }
}

#[test]
fn a_full_disk_is_told_before_the_end_and_leaves_nothing() {
    let Some(disk) = Disk::new() else { return };
    let path = disk.0.path().join("vm");
    fs::write(&path, "what was there before").unwrap();
    let file = ContainerWriter::create(&path, &info()).unwrap();
    file.append(0, false, &[&vec![1; 256 << 10]]).unwrap();
    // There is no room for the 4 MiB that are set aside.
    assert!(matches!(file.sync(), Err(FileError::Write { .. })));
    assert!(file.append(0, false, &[&vec![1; 1 << 20]]).is_err());
    file.abort();
    drop(file);
    assert_eq!(names(disk.0.path()), ["vm"]);
    assert_eq!(fs::read(&path).unwrap(), b"what was there before");
}

#[test]
fn a_folder_that_cannot_be_written_to_is_told_at_once_by_name() {
    let Some(disk) = Disk::new() else { return };
    if !disk.mount(&["-o", "remount,ro"]) {
        return;
    }
    let path = disk.0.path().join("vm");
    let error = ContainerWriter::create(&path, &info()).unwrap_err();
    assert!(error.to_string().contains(&path.display().to_string()));
    let nowhere = disk.0.path().join("nowhere/vm");
    assert!(ContainerWriter::create(&nowhere, &info()).is_err());
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
    for (channel, bytes) in handed.iter().enumerate() {
        let mut rest = bytes.as_slice();
        for number in 0..EACH {
            let (first, behind) = rest.split_at(2);
            assert_eq!(first, number.to_be_bytes());
            let (same, behind) = behind.split_at(usize::from(number) * 7);
            assert!(same.iter().all(|byte| usize::from(*byte) == channel));
            rest = behind;
        }
        assert!(rest.is_empty());
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
    assert!(handed[0] == long);
    assert!(handed[1] == long[..100_000]);
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
        [&super::container::MAGIC[..], &[0, 0, 0, 1, 0, 0, 0, 0]].concat(),
    )
    .unwrap();
    assert!(matches!(
        inspect(&path),
        Err(FileError::Version { version: 1 })
    ));
}

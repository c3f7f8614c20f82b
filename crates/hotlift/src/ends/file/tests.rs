//! Tests of the save file alone: it returns what was written, and rejects everything else.

mod remote;
mod salvage;

use std::fs;
use std::ops::Range;
use std::os::unix::fs::{FileExt, MetadataExt, PermissionsExt, chown, symlink};
use std::os::unix::net::UnixListener;
use std::path::Path;
use std::process::Command;

use hotlift_mem::PAGE_SIZE;
use hotlift_wire::RamBlockEntry;
use hotlift_wire::main_channel::{Configuration, MainEncoder};
use tempfile::TempDir;

use crate::control::Control;
use crate::ends::file::block_sink::Stream;
use crate::ends::file::layout::FOOT_LEN;
use crate::ends::file::partial::PartialFile;
use crate::ends::file::{
    BlockFile, BlockSink, Blocks, FileError, PageMap, SavedVm, describe, inspect,
};
use crate::error::MigrationError;
use crate::lock::lock;
use crate::options::{Levels, Limits, StreamOptions};
use crate::pipe::batch::Batch;
use crate::pipe::settings::RelaySettings;
use crate::pipe::sink::{Opening, RamLayout, Sink, WritePages};

/// User id of `nobody`, on every Linux.
const OTHER_USER: u32 = 65534;

/// Pages of the saved RAM block; a second block has 3.
const PAGES: usize = 700;

const DEVICES: &[u8] = b"\x04devices";
const END: &[u8] = b"\0description";

/// Creates a folder, in memory if possible: most files here are short-lived.
fn folder() -> TempDir {
    let memory = Path::new("/dev/shm");
    match memory.is_dir() {
        true => tempfile::tempdir_in(memory),
        false => tempfile::tempdir(),
    }
    .unwrap()
}

/// Returns a page with distinguishable bytes; all zero for 0.
fn page(content: u8) -> [u8; PAGE_SIZE] {
    let mut page = [content; PAGE_SIZE];
    let noise = page.iter_mut().step_by(3).zip((0..=u8::MAX).cycle());
    noise.for_each(|(byte, noise)| {
        *byte = if content == 0 {
            0
        } else {
            noise.wrapping_mul(content)
        }
    });
    page
}

fn sink(path: &Path, name: &str) -> BlockSink {
    let options = StreamOptions {
        multifd_compression: hotlift_methods::selection(name).unwrap(),
        ..StreamOptions::default()
    };
    sink_with(path, &options)
}

fn sink_with(path: &Path, options: &StreamOptions) -> BlockSink {
    let sink = empty_sink(path, options, &[]);
    // All pages arrive, most of them as zero pages.
    let mut writer = sink.page_writer(0).unwrap();
    put_zeros(&mut *writer, 0, 0..PAGES);
    put_zeros(&mut *writer, 1, 0..3);
    drop(writer);
    sink
}

/// Returns a sink without any pages, whose stream has these capabilities.
fn empty_sink(path: &Path, options: &StreamOptions, capabilities: &[&str]) -> BlockSink {
    let mut configuration = Configuration {
        machine: "pc-i440fx-10.0".to_owned(),
        ..Configuration::default()
    };
    let mut ram = RamLayout {
        section_id: 3,
        blocks: [("ram", PAGES), ("rom", 3)]
            .map(|(name, pages)| RamBlockEntry::new(name, (pages * PAGE_SIZE) as u64))
            .into(),
    };
    let opening = Opening::bare(&configuration, &ram);
    let control = Control::default();
    let settings = RelaySettings {
        outgoing: options.clone(),
        ..RelaySettings::default()
    };
    let memory = settings.limits.memory(0);
    let sink = BlockSink::create(path, &settings, (opening, None), &memory, &control).unwrap();
    if !capabilities.is_empty() {
        let capabilities = capabilities.iter().map(|name| (*name).to_owned());
        configuration.capabilities = capabilities.collect();
        let blocks = ram.blocks.iter_mut();
        blocks.for_each(|block| block.guest_address = Some(0));
        let opening = Opening::bare(&configuration, &ram);
        *lock(&sink.stream) = Stream::new(opening).unwrap();
    }
    sink
}

/// Writes zero pages of RAM block `block`.
fn put_zeros(writer: &mut dyn WritePages, block: usize, pages: Range<usize>) {
    let mut batch = Batch::new();
    batch.start(block);
    batch
        .zero
        .extend(pages.map(|page| (page * PAGE_SIZE) as u64));
    writer.write(&mut batch).unwrap();
}

fn finish(sink: &BlockSink) -> Result<(), MigrationError> {
    sink.ram_end()?;
    sink.devices(DEVICES)?;
    sink.await_loaded()?;
    sink.commit(END, None).map(drop)
}

/// Writes pages of RAM block `block`, all in one batch.
fn put(writer: &mut dyn WritePages, block: usize, pages: &[(usize, u8)]) {
    let mut batch = Batch::new();
    batch.start(block);
    for (number, content) in pages {
        batch.push((number * PAGE_SIZE) as u64, &page(*content));
    }
    writer.write(&mut batch).unwrap();
}

/// Returns the content of the pages of a RAM block.
fn read(file: &BlockFile, block: usize) -> Result<Vec<u8>, MigrationError> {
    let (limits, control) = (Limits::default(), Control::default());
    let memory = limits.memory(0);
    let mut blocks = Blocks::new(file.seed(), &memory, &control);
    let mut contents = Vec::new();
    for number in 0..file.pages(block) {
        if number % 64 == 0 {
            let pages = number..file.pages(block).min(number + 64);
            file.read_ahead(&mut blocks, pages.map(|page| (block, page)))?;
        }
        let Some(entry) = file.entry(block, number)? else {
            contents.push(0);
            continue;
        };
        blocks.load(entry, (block, number as u64), |into, at| {
            file.read_at(into, at)
        })?;
        let got = blocks.page(entry.place);
        assert!(*got == page(got[1]), "page {number}");
        contents.push(got[1]);
    }
    Ok(contents)
}

/// Saves a VM, and writes some of its pages twice. Returns the final content of its pages.
fn save(path: &Path, name: &str) -> Vec<u8> {
    let sink = sink(path, name);
    let mut writer = sink.page_writer(0).unwrap();
    let mut expected = vec![0; PAGES];
    for (first, step, content) in [(0, 1, 5), (3, 2, 6), (512, 1, 9), (40, 7, 0)] {
        let numbers: Vec<usize> = (first..PAGES.min(first + 120)).step_by(step).collect();
        let pages: Vec<(usize, u8)> = numbers.iter().map(|number| (*number, content)).collect();
        put(&mut *writer, 0, &pages);
        numbers
            .iter()
            .for_each(|number| expected[*number] = content);
    }
    put(&mut *writer, 1, &[(2, 77)]);
    drop(writer);
    finish(&sink).unwrap();
    expected
}

#[test]
fn a_stream_that_lacks_a_page_makes_no_file() {
    let folder = folder();
    let path = folder.path().join("vm");
    let sink = empty_sink(&path, &StreamOptions::default(), &[]);
    let mut writer = sink.page_writer(0).unwrap();
    put_zeros(&mut *writer, 0, 0..PAGES);
    put(&mut *writer, 1, &[(0, 5), (2, 6)]);
    drop(writer);
    let error = finish(&sink).unwrap_err().chain();
    assert!(error.contains("4096 bytes of RAM block 'rom'"), "{error}");
    sink.abort();
    assert!(!path.exists());
}

#[test]
fn a_file_without_shared_ram_is_refused_by_every_reader() {
    let folder = folder();
    let path = folder.path().join("vm");
    // As earlier versions wrote it: without the pages of a shared block.
    let sink = empty_sink(&path, &StreamOptions::default(), &["x-ignore-shared"]);
    let mut writer = sink.page_writer(0).unwrap();
    put_zeros(&mut *writer, 0, 0..PAGES);
    put_zeros(&mut *writer, 1, 0..3);
    drop(writer);
    finish(&sink).unwrap();
    let control = Control::default();
    let error = inspect(&*path, &control).unwrap_err();
    assert!(matches!(error, FileError::WithoutSharedRam), "{error}");
    let described = describe(&*path, true, &control).unwrap_err();
    assert!(described.chain().contains("x-ignore-shared"));
    let configuration = Configuration {
        machine: "pc".to_owned(),
        capabilities: vec!["x-ignore-shared".to_owned()],
        ..Configuration::default()
    };
    let ram = RamLayout::default();
    let opening = Opening::bare(&configuration, &ram);
    let settings = RelaySettings::default();
    let memory = settings.limits.memory(0);
    let created = BlockSink::create(&path, &settings, (opening, None), &memory, &control);
    assert!(created.err().unwrap().chain().contains("x-ignore-shared"));
}

#[test]
fn every_page_has_its_latest_content_with_every_method() {
    let folder = folder();
    for name in [
        "none", "zlib", "zstd", "lz4", "qpl", "uadk", "qatzip", "auto",
    ] {
        let path = folder.path().join(name);
        let expected = save(&path, name);
        let file = BlockFile::open(&path).unwrap();
        assert!(read(&file, 0).unwrap() == expected, "{name}");
        assert_eq!(read(&file, 1).unwrap(), [0, 0, 77]);
        let stream = file.stream();
        assert_eq!(stream.end, END);
        assert_eq!(devices(&file).unwrap(), DEVICES);
        assert_eq!((stream.ram.section_id, stream.uuid), (3, Some([7; 16])));
        let [first, last] = [0, 512].map(|number| file.entry(0, number).unwrap().unwrap());
        assert!(
            first.position < file.contents().written_last
                && last.position > file.contents().written_last
        );
        let pages: u64 = file.contents().shares.iter().map(|share| share.pages).sum();
        assert_eq!(pages, 120 + 60 + 120 + 1);
    }
}

#[test]
fn device_state_of_any_length_is_read_back_in_intact_parts() {
    let folder = folder();
    let path = folder.path().join("vm");
    let sink = sink(&path, "none");
    sink.ram_end().unwrap();
    let parts = (0..300_u32).map(|part| part.to_be_bytes().repeat(4000));
    let written: Vec<_> = parts.collect();
    written.iter().for_each(|part| sink.devices(part).unwrap());
    sink.await_loaded().unwrap();
    sink.commit(END, None).unwrap();
    let written = written.concat();
    let file = BlockFile::open(&path).unwrap();
    assert_eq!(file.stream().device_bytes(), written.len() as u64);
    assert!(devices(&file).unwrap() == written);
    // The file is damaged after it was opened.
    let at = file.stream().devices.start + (3 << 20);
    let on_disk = fs::File::options().write(true).open(&path).unwrap();
    on_disk.write_all_at(&[0xff; 5], at).unwrap();
    let (mut came, mut largest) = (Vec::new(), 0);
    let read = file.devices(&mut |part| {
        largest = largest.max(part.len());
        came.extend_from_slice(part);
        Ok(())
    });
    let error = read.unwrap_err().chain();
    assert!(error.contains("the VM's state"), "{error}");
    assert!(came.len() > 1 << 20 && written.starts_with(&came));
    assert!(largest <= 1 << 20, "{largest} bytes at once");
    let error = BlockFile::open(&path).err().unwrap().to_string();
    assert!(error.contains("the VM's state"), "{error}");
}

#[test]
fn every_level_of_every_method_is_read_back() {
    let folder = folder();
    for info in hotlift_methods::METHODS {
        let Some(levels) = info.levels.clone() else {
            continue;
        };
        for level in levels {
            let path = folder.path().join(format!("{}-{level}", info.name));
            let options = StreamOptions {
                multifd_compression: info,
                levels: Levels {
                    zlib: level,
                    zstd: level,
                    qatzip: level,
                    ..Levels::default()
                },
                ..StreamOptions::default()
            };
            let sink = sink_with(&path, &options);
            let mut writer = sink.page_writer(0).unwrap();
            for round in 1..5 {
                let pages: Vec<_> = (0..40).map(|page| (page * 3 % 50, round)).collect();
                put(&mut *writer, 0, &pages);
            }
            drop(writer);
            finish(&sink).unwrap();
            let file = BlockFile::open(&path).unwrap();
            let got = read(&file, 0).unwrap();
            assert_eq!(got[3], 4, "{} {level}", info.name);
        }
    }
}

#[test]
fn a_delta_applies_to_the_current_content_of_its_page() {
    let folder = folder();
    let path = folder.path().join("vm");
    let sink = sink(&path, "zstd");
    let mut writer = sink.page_writer(0).unwrap();
    put(&mut *writer, 0, &[(1, 7), (2, 8)]);
    // One byte stays, and one is new.
    let delta = [0x01, 0x01, 0xee];
    sink.delta(0, PAGE_SIZE as u64, &delta).unwrap();
    sink.delta(0, 5 * PAGE_SIZE as u64, &delta).unwrap();
    assert!(sink.delta(0, 2 * PAGE_SIZE as u64, &[0, 0]).is_err());
    drop(writer);
    finish(&sink).unwrap();
    let file = BlockFile::open(&path).unwrap();
    let (limits, control) = (Limits::default(), Control::default());
    let memory = limits.memory(0);
    let mut blocks = Blocks::new(file.seed(), &memory, &control);
    for (number, mut expected) in [(1, page(7)), (2, page(8)), (5, page(0))] {
        if number != 2 {
            expected[1] = 0xee;
        }
        let entry = file.entry(0, number).unwrap().unwrap();
        let read = |into: &mut [u8], at| file.read_at(into, at);
        blocks.load(entry, (0, number as u64), read).unwrap();
        assert!(*blocks.page(entry.place) == expected, "page {number}");
    }
}

/// Returns the device sections of a file.
fn devices(file: &BlockFile) -> Result<Vec<u8>, MigrationError> {
    let mut devices = Vec::new();
    file.devices(&mut |part| {
        devices.extend_from_slice(part);
        Ok(())
    })?;
    Ok(devices)
}

/// Reads all content of a file.
fn read_all(path: &Path) -> Result<(), MigrationError> {
    let file = BlockFile::open(path)?;
    for block in 0..file.blocks() {
        read(&file, block)?;
    }
    Ok(())
}

#[test]
fn every_damaged_byte_and_every_truncation_is_refused() {
    let folder = folder();
    let path = folder.path().join("vm");
    let sink = sink(&path, "zstd");
    let mut writer = sink.page_writer(0).unwrap();
    put(&mut *writer, 0, &[(0, 1), (1, 2), (17, 3)]);
    drop(writer);
    finish(&sink).unwrap();
    read_all(&path).unwrap();
    let whole = fs::read(&path).unwrap();
    // This part is only for a process that ends before the file has its name: no reader uses it.
    let contents = BlockFile::open(&path).unwrap().contents().clone();
    let end_of_checks = contents.checks.position + contents.checks.length;
    let unread = end_of_checks..contents.end.unwrap().position;
    // An index without entries is one run of zeros, so a sample of its bytes is sufficient.
    let places = (0..whole.len())
        .filter(|at| whole[*at] != 0 || at % 13 == 0)
        .filter(|at| !unread.contains(&(*at as u64)));
    for at in places {
        let mut bytes = whole.clone();
        bytes[at] ^= 1 << (at % 8);
        fs::write(&path, bytes).unwrap();
        assert!(read_all(&path).is_err(), "byte {at}");
    }
    let ends = (0..whole.len()).step_by(97);
    for end in ends.chain(whole.len() - 2 * FOOT_LEN..whole.len()) {
        fs::write(&path, &whole[..end]).unwrap();
        assert!(read_all(&path).is_err(), "{end} bytes");
    }
    fs::write(&path, [&whole[..], b"\0"].concat()).unwrap();
    assert!(read_all(&path).is_err(), "a byte more");
}

#[test]
fn a_block_of_another_file_in_the_same_place_is_refused() {
    let folder = folder();
    let [path, other] = ["vm", "other"].map(|name| folder.path().join(name));
    save(&path, "none");
    save(&other, "none");
    let block_of = |path: &Path| {
        let file = BlockFile::open(path).unwrap();
        let entry = file.entry(0, 0).unwrap().unwrap();
        let at = usize::try_from(entry.position).unwrap();
        (fs::read(path).unwrap(), at..at + entry.length)
    };
    let [(mut bytes, here), (foreign, there)] = [&path, &other].map(|path| block_of(path));
    bytes[here].copy_from_slice(&foreign[there]);
    fs::write(&path, bytes).unwrap();
    let error = read_all(&path).unwrap_err();
    assert!(matches!(
        error,
        MigrationError::File(FileError::Damaged { .. })
    ));
}

#[test]
fn an_abandoned_save_leaves_no_file() {
    let folder = folder();
    let path = folder.path().join("vm");
    fs::write(&path, "what was there before").unwrap();
    for abort in [true, false] {
        let sink = sink(&path, "zstd");
        put(&mut *sink.page_writer(0).unwrap(), 0, &[(1, 1)]);
        if abort {
            sink.abort();
            assert!(finish(&sink).is_err());
        }
        drop(sink);
        assert_eq!(names(folder.path()), ["vm"]);
        assert_eq!(fs::read(&path).unwrap(), b"what was there before");
    }
}

#[test]
fn pages_that_the_vm_does_not_have_are_refused() {
    let folder = folder();
    let sink = sink(&folder.path().join("vm"), "none");
    let mut batch = Batch::new();
    batch.start(0);
    batch.push((PAGES * PAGE_SIZE) as u64, &page(1));
    assert!(sink.page_writer(0).unwrap().write(&mut batch).is_err());
}

/// Creates a file of a few bytes, which is incomplete.
fn begin(path: &Path, content: &[u8]) -> Result<PartialFile, FileError> {
    let file = PartialFile::create(path)?;
    file.write_at(&[content], 0)?;
    Ok(file)
}

fn write(path: &Path) {
    let file = begin(path, END).unwrap();
    file.settle(END.len() as u64).unwrap();
    file.publish(END.len() as u64).unwrap();
}

/// Returns the names in a folder.
fn names(folder: &Path) -> Vec<String> {
    let entries = fs::read_dir(folder).unwrap();
    let mut names: Vec<_> = entries
        .map(|entry| entry.unwrap().file_name().into_string().unwrap())
        .collect();
    names.sort();
    names
}

#[test]
fn a_file_has_no_name_until_complete_and_the_last_of_two_writers_gets_it() {
    let folder = folder();
    let path = folder.path().join("vm");
    let [one, other] = [&b"one"[..], b"other"].map(|content| begin(&path, content).unwrap());
    // A process that is killed here leaves nothing.
    assert_eq!(names(folder.path()), [""; 0]);
    other.publish(5).unwrap();
    assert_eq!(fs::read(&path).unwrap(), b"other");
    one.publish(3).unwrap();
    assert_eq!(fs::read(&path).unwrap(), b"one");
    assert_eq!(names(folder.path()), ["vm"]);
}

/// Saves into a folder in which another file has the name that partial files formerly had.
fn save_beside(put: impl FnOnce(&Path, &Path)) -> (TempDir, fs::Metadata) {
    let folder = folder();
    let victim = folder.path().join("victim");
    fs::write(&victim, "of another user").unwrap();
    put(&folder.path().join("vm.partial"), &victim);
    write(&folder.path().join("vm"));
    assert_eq!(fs::read(folder.path().join("vm")).unwrap(), END);
    assert_eq!(fs::read(&victim).unwrap(), b"of another user");
    assert_eq!(names(folder.path()), ["victim", "vm", "vm.partial"]);
    let about = fs::symlink_metadata(folder.path().join("vm")).unwrap();
    (folder, about)
}

#[test]
fn a_file_planted_in_the_folder_does_not_become_the_save_file() {
    for mode in [0o600, 0o666] {
        let (_folder, about) = save_beside(|partial, _| {
            fs::write(partial, [0xee; 1 << 20]).unwrap();
            fs::set_permissions(partial, fs::Permissions::from_mode(mode)).unwrap();
            if rustix::process::geteuid().is_root() {
                chown(partial, Some(OTHER_USER), Some(OTHER_USER)).unwrap();
            }
        });
        assert_eq!(about.uid(), rustix::process::geteuid().as_raw());
        assert_eq!((about.mode() & 0o7777, about.nlink()), (0o600, 1));
    }
}

#[test]
fn a_link_planted_in_the_folder_is_not_followed() {
    let (_folder, about) = save_beside(|partial, victim| symlink(victim, partial).unwrap());
    assert!(about.is_file());
    let (_folder, about) = save_beside(|partial, victim| fs::hard_link(victim, partial).unwrap());
    assert_eq!(about.nlink(), 1);
}

/// Asserts that a save to `path` is rejected with `is` before and after the writing, and leaves nothing.
fn assert_not_replaced(path: &Path, is: &str, put: impl Fn()) {
    let refused = |outcome: Result<(), FileError>| {
        let error = outcome.unwrap_err().to_string();
        assert!(error.contains(is), "{error}");
        assert!(error.contains(&path.display().to_string()), "{error}");
    };
    let file = begin(path, END).unwrap();
    file.settle(END.len() as u64).unwrap();
    put();
    let before = names(path.parent().unwrap());
    assert_eq!(before.len(), 3, "{before:?}");
    refused(file.publish(1));
    refused(PartialFile::create(path).map(|_| ()));
    drop(file);
    assert_eq!(names(path.parent().unwrap()), ["other", "vm"]);
}

#[test]
fn only_a_regular_file_of_this_user_is_replaced() {
    let of_another = |put: &dyn Fn(&Path, &Path), is| {
        let folder = folder();
        let (path, other) = (folder.path().join("vm"), folder.path().join("other"));
        fs::write(&other, "of another user").unwrap();
        assert_not_replaced(&path, is, || put(&path, &other));
        assert_eq!(fs::read(&other).unwrap(), b"of another user");
    };
    of_another(
        &|path, other| symlink(other, path).unwrap(),
        "a symbolic link",
    );
    of_another(
        &|path, _| symlink("nowhere", path).unwrap(),
        "a symbolic link",
    );
    of_another(&|path, _| fs::create_dir(path).unwrap(), "a directory");
    if !rustix::process::geteuid().is_root() {
        hotlift_testkit::skip!("root", "only root can make files of another user");
        return;
    }
    let give = |path: &Path, _: &Path| {
        fs::write(path, "of another user").unwrap();
        chown(path, Some(OTHER_USER), None).unwrap();
    };
    of_another(&give, "a file of another user");
}

#[test]
fn a_file_without_random_access_is_refused_by_its_kind_without_waiting() {
    let folder = folder();
    let of = |name: &str| folder.path().join(name);
    let made = Command::new("mkfifo").arg(of("fifo")).status();
    assert!(made.unwrap().success());
    let _listener = UnixListener::bind(of("socket")).unwrap();
    fs::create_dir(of("folder")).unwrap();
    symlink("/dev/zero", of("device")).unwrap();
    symlink("fifo", of("link")).unwrap();
    for (name, is) in [
        ("fifo", "a FIFO"),
        ("socket", "a socket"),
        ("folder", "a directory"),
        ("device", "a character device"),
        ("link", "a FIFO"),
    ] {
        let path = of(name);
        let inspected = inspect(&path, &Control::new()).map(drop);
        let opened = SavedVm::open(&path, 0, false).map(drop);
        for refused in [inspected, opened, crate::file::open(&path).map(drop)] {
            let error = refused.unwrap_err().to_string();
            assert!(error.contains(&format!("{name} is {is}, ")), "{error}");
        }
    }
}

/// A small separate file system, removed on drop.
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
fn a_full_disk_is_reported_early_and_leaves_no_file() {
    let Some(disk) = Disk::new() else { return };
    let path = disk.0.path().join("vm");
    fs::write(&path, "what was there before").unwrap();
    let sink = sink(&path, "none");
    put(&mut *sink.page_writer(0).unwrap(), 0, &[(1, 1)]);
    // There is no room for the 4 MiB that are reserved.
    let error = finish(&sink).unwrap_err();
    assert!(matches!(
        error,
        MigrationError::File(FileError::Write { .. })
    ));
    sink.abort();
    drop(sink);
    assert_eq!(names(disk.0.path()), ["vm"]);
    assert_eq!(fs::read(&path).unwrap(), b"what was there before");
}

#[test]
fn an_unwritable_folder_is_reported_at_once_by_name() {
    let Some(disk) = Disk::new() else { return };
    if !disk.mount(&["-o", "remount,ro"]) {
        return;
    }
    let path = disk.0.path().join("vm");
    let error = PartialFile::create(&path).unwrap_err();
    assert!(error.to_string().contains(&path.display().to_string()));
    let nowhere = disk.0.path().join("nowhere/vm");
    assert!(PartialFile::create(&nowhere).is_err());
}

#[test]
fn foreign_file_formats_are_named() {
    let folder = folder();
    let path = folder.path().join("vm");
    assert!(matches!(
        inspect(&path, &Control::new()),
        Err(FileError::Read { .. })
    ));
    fs::write(&path, "#!/bin/sh\necho no save file\n").unwrap();
    assert!(matches!(
        inspect(&path, &Control::new()),
        Err(FileError::NotASave)
    ));
    for (first, words) in [
        (&b"\x1f\x8b"[..], "this is a gzip file, not a save file"),
        (b"\x28\xb5\x2f\xfd", "decompress it first ('zstd -d')"),
        (b"QFI\xfb", "a qcow2 disk image"),
        (b"LibvirtQemudSave", "virsh restore FILE"),
    ] {
        fs::write(&path, [first, &[0; 32]].concat()).unwrap();
        let inspected = inspect(&path, &Control::new()).unwrap_err();
        assert!(inspected.to_string().contains(words), "{inspected}");
        let opened = SavedVm::open(&path, 0, false).err().unwrap();
        assert_eq!(opened.to_string(), inspected.to_string());
    }
    let mut stream = Vec::new();
    let configuration = Configuration {
        machine: "pc".to_owned(),
        ..Configuration::default()
    };
    MainEncoder::new(&configuration, &mut stream).unwrap();
    fs::write(&path, [&stream[..], &[0; 64]].concat()).unwrap();
    let error = SavedVm::open(&path, 0, false).err().unwrap();
    assert!(matches!(error, FileError::PlainStream), "{error}");
    fs::write(
        &path,
        [&super::layout::MAGIC[..], &[0, 0, 0, 1, 0, 0, 0, 0]].concat(),
    )
    .unwrap();
    assert!(matches!(
        inspect(&path, &Control::new()),
        Err(FileError::Version { version: 1, .. })
    ));
}

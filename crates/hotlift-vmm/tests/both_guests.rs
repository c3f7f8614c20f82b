//! Tests the properties that all built-in guests share.

use std::time::{Duration, Instant};

use hotlift::error::error_line;
use hotlift::guest::DeviceState;
use hotlift_mem::{Backing, DirtyBitmap, PAGE_SIZE, RamBlock};
use hotlift_vmm::fill::{FillSettings, FillSource};
use hotlift_vmm::verify::VerifyError;
use hotlift_vmm::workload::{Pace, Workload};
use hotlift_vmm::{BuiltinGuest, GuestKind, GuestSettings, best_kind, create};

/// Returns the guests that this machine can run; prints the others.
fn kinds() -> Vec<GuestKind> {
    match best_kind() {
        (GuestKind::Kvm, _) => GuestKind::ALL.to_vec(),
        (GuestKind::Threads, why) => {
            hotlift_testkit::skip!("kvm", "{why:?}");
            vec![GuestKind::Threads]
        }
    }
}

fn settings(vcpus: u8, workload: Workload) -> GuestSettings {
    GuestSettings {
        ram_bytes: 24 << 20,
        backing: Backing::Private,
        vcpus,
        workload,
        rate: 400_000,
        working_set: Some(6 << 20),
        seed: 7,
        uuid: [0; 16],
    }
}

fn some_fill() -> FillSettings {
    FillSettings {
        source: FillSource::Generated,
        zero_share: 0.3,
        zero_touched: false,
        seed: 3,
    }
}

fn started(kind: GuestKind, settings: &GuestSettings) -> Box<dyn BuiltinGuest> {
    let guest = create(kind, settings).unwrap();
    guest.fill(&some_fill()).unwrap();
    guest.start().unwrap();
    guest
}

/// Waits until the guest has made `more` further writes. Fails after a minute, far beyond the usual time.
fn let_write(guest: &dyn BuiltinGuest, more: u64) {
    let (goal, start) = (guest.writes() + more, Instant::now());
    while guest.writes() < goal {
        guest.health().unwrap();
        assert!(
            start.elapsed() < Duration::from_secs(60),
            "the guest does not write"
        );
        std::thread::sleep(Duration::from_millis(1));
    }
}

fn ram(guest: &dyn BuiltinGuest) -> &RamBlock {
    &guest.ram()[0]
}

fn page_of(guest: &dyn BuiltinGuest, page: usize) -> [u8; PAGE_SIZE] {
    let mut bytes = [0; PAGE_SIZE];
    ram(guest).read(page * PAGE_SIZE, &mut bytes).unwrap();
    bytes
}

fn all_of(guest: &dyn BuiltinGuest) -> Vec<u8> {
    let mut bytes = vec![0; ram(guest).len()];
    ram(guest).read(0, &mut bytes).unwrap();
    bytes
}

/// Returns the pages of the dirty log.
fn fetch_dirty(guest: &dyn BuiltinGuest) -> Vec<usize> {
    let dirty = DirtyBitmap::new(ram(guest).pages());
    guest.sync_dirty_log(0, &dirty).unwrap();
    (0..dirty.pages())
        .filter(|&page| dirty.test(page))
        .collect()
}

fn clear_dirty(guest: &dyn BuiltinGuest) {
    guest.clear_dirty_log(0, 0, ram(guest).pages()).unwrap();
}

/// Fetches and clears the dirty log; returns its pages.
fn take_dirty(guest: &dyn BuiltinGuest) -> Vec<usize> {
    let dirty = fetch_dirty(guest);
    clear_dirty(guest);
    dirty
}

fn copy_pages(from: &dyn BuiltinGuest, to: &dyn BuiltinGuest, pages: &[usize]) {
    for &page in pages {
        ram(to)
            .write(page * PAGE_SIZE, &page_of(from, page))
            .unwrap();
    }
}

fn every_page(guest: &dyn BuiltinGuest) -> Vec<usize> {
    (0..ram(guest).pages()).collect()
}

#[test]
fn a_started_guest_keeps_writing_and_its_memory_passes_the_check() {
    for kind in kinds() {
        for vcpus in [1, 2, 8] {
            let guest = started(kind, &settings(vcpus, Workload::Random));
            let_write(&*guest, 20_000);
            guest.pause().unwrap();
            let verified = guest.verify().unwrap();
            assert!(
                verified.writes_replayed >= 20_000,
                "{kind} {vcpus}: {verified:?}"
            );
            let before = guest.writes();
            guest.resume().unwrap();
            let_write(&*guest, 1000);
            assert!(guest.writes() > before);
        }
    }
}

/// Runs at full speed, with a table of 1 KiB that reveals a write made a microsecond after the pause.
#[test]
fn a_paused_guest_writes_nothing() {
    for kind in kinds() {
        let settings = GuestSettings {
            ram_bytes: 8 << 20,
            working_set: Some(64 * 4096),
            rate: Pace::MAX_RATE,
            ..settings(2, Workload::Random)
        };
        let guest = create(kind, &settings).unwrap();
        guest.start().unwrap();
        let table = || {
            let mut bytes = [0; 1024];
            let start = usize::try_from(guest.layout().table().start).unwrap();
            ram(&*guest).read(start, &mut bytes).unwrap();
            bytes
        };
        for _ in 0..50 {
            let_write(&*guest, 1);
            guest.pause().unwrap();
            let (at_once, writes) = (table(), guest.writes());
            let bytes = all_of(&*guest);
            std::thread::sleep(Duration::from_millis(3));
            assert!(
                all_of(&*guest) == bytes,
                "{kind}: memory changed under pause"
            );
            assert!(
                table() == at_once,
                "{kind}: memory changed right after the pause"
            );
            assert_eq!(guest.writes(), writes);
            guest.pause().unwrap();
            guest.resume().unwrap();
            guest.resume().unwrap();
        }
    }
}

#[test]
fn a_moved_guest_continues_where_it_stopped() {
    for kind in kinds() {
        for workload in Workload::ALL {
            for vcpus in [1, 3] {
                let settings = settings(vcpus, workload);
                let source = started(kind, &settings);
                if workload != Workload::Idle {
                    let_write(&*source, 5000);
                }
                source.pause().unwrap();

                // Two hops, so that loaded state is saved again.
                let mut from = source;
                for _ in 0..2 {
                    let to = create(kind, &settings).unwrap();
                    assert!(to.ram_is_fresh());
                    copy_pages(&*from, &*to, &every_page(&*from));
                    to.load_devices(from.save_devices().unwrap()).unwrap();
                    assert!(!to.ram_is_fresh());
                    assert_eq!(to.writes(), from.writes());
                    to.verify().unwrap();
                    to.resume().unwrap();
                    if workload != Workload::Idle {
                        let_write(&*to, 5000);
                    }
                    to.pause().unwrap();
                    to.verify().unwrap();
                    from = to;
                }
            }
        }
    }
}

/// Runs at full speed, so that most stops are in the middle of a write.
#[test]
fn a_guest_stopped_in_the_middle_of_a_write_is_checked_exactly() {
    for kind in kinds() {
        let settings = GuestSettings {
            ram_bytes: 8 << 20,
            working_set: Some(1 << 20),
            rate: Pace::MAX_RATE,
            ..settings(1, Workload::Random)
        };
        let mut from = create(kind, &settings).unwrap();
        from.start().unwrap();
        let mut incomplete = 0;
        // The threads guest stops between writes only.
        let stops = if kind == GuestKind::Kvm { 4000 } else { 3 };
        for _ in 0..stops {
            if incomplete > 2 {
                break;
            }
            from.pause().unwrap();
            let verified = from.verify().unwrap();
            if verified.incomplete_writes > 0 {
                incomplete += 1;
                // The destination finishes the write.
                let to = create(kind, &settings).unwrap();
                copy_pages(&*from, &*to, &every_page(&*from));
                to.load_devices(from.save_devices().unwrap()).unwrap();
                let there = to.verify().unwrap();
                assert_eq!(there.incomplete_writes, verified.incomplete_writes);
                assert_eq!(there.writes_replayed, verified.writes_replayed);
                from = to;
            }
            from.resume().unwrap();
        }
        from.pause().unwrap();
        from.verify().unwrap();
        if kind == GuestKind::Kvm {
            assert!(incomplete > 0, "no stop was in the middle of a write");
        }
    }
}

#[test]
fn a_destination_continues_the_workload_of_its_source() {
    for kind in kinds() {
        let source = started(kind, &settings(2, Workload::Hotset));
        let_write(&*source, 2000);
        source.pause().unwrap();
        let other = GuestSettings {
            workload: Workload::Idle,
            rate: 0,
            working_set: None,
            seed: 99,
            ..settings(2, Workload::Idle)
        };
        let to = create(kind, &other).unwrap();
        copy_pages(&*source, &*to, &every_page(&*source));
        to.load_devices(source.save_devices().unwrap()).unwrap();
        assert_eq!(to.layout(), source.layout());
        to.resume().unwrap();
        let_write(&*to, 2000);
        to.pause().unwrap();
        to.verify().unwrap();
    }
}

/// A guest and its copy, both paused and equal.
struct Copied {
    _source: Box<dyn BuiltinGuest>,
    to: Box<dyn BuiltinGuest>,
    /// Pages of the last dirty log.
    dirty: Vec<usize>,
    /// The copy's RAM before the pages of the dirty log were copied.
    before: Vec<u8>,
}

/// Copies a guest after some writes, lets it continue, and then copies the pages of the dirty log.
fn copied_by_dirty_log(kind: GuestKind, workload: Workload) -> Copied {
    let settings = settings(2, workload);
    let source = started(kind, &settings);
    let_write(&*source, 3000);
    source.start_dirty_log().unwrap();
    source.pause().unwrap();
    take_dirty(&*source);
    let to = create(kind, &settings).unwrap();
    copy_pages(&*source, &*to, &every_page(&*source));
    let before = all_of(&*to);
    source.resume().unwrap();
    let_write(&*source, 3000);
    source.pause().unwrap();
    let dirty = take_dirty(&*source);
    copy_pages(&*source, &*to, &dirty);
    to.load_devices(source.save_devices().unwrap()).unwrap();
    Copied {
        _source: source,
        to,
        dirty,
        before,
    }
}

#[test]
fn the_check_finds_a_dropped_dirty_page() {
    for kind in kinds() {
        for workload in [Workload::Random, Workload::Sequential, Workload::Hotset] {
            let Copied {
                _source,
                to,
                dirty,
                before,
            } = copied_by_dirty_log(kind, workload);
            to.verify().unwrap();
            let old = |page: usize| &before[page * PAGE_SIZE..(page + 1) * PAGE_SIZE];
            let table = usize::try_from(to.layout().table().start).unwrap() / PAGE_SIZE;
            let (written, unchanged): (Vec<usize>, Vec<usize>) = dirty
                .into_iter()
                .filter(|&page| page >= table)
                .partition(|&page| page_of(&*to, page) != old(page));
            // A vCPU may be stopped when KVM has marked the page that it is about to write.
            assert!(unchanged.len() <= 2, "{kind} {workload}: {unchanged:?}");
            assert!(written.len() > 100);
            for &page in written.iter().step_by(written.len() / 25) {
                let new = page_of(&*to, page);
                ram(&*to).write(page * PAGE_SIZE, old(page)).unwrap();
                match to.verify() {
                    Err(VerifyError::Page { offset, .. } | VerifyError::Table { offset, .. }) => {
                        assert_eq!(usize::try_from(offset).unwrap() / PAGE_SIZE, page)
                    }
                    other => panic!("{kind} {workload}: page {page} is old, but {other:?}"),
                }
                ram(&*to).write(page * PAGE_SIZE, &new).unwrap();
            }
            to.verify().unwrap();
        }
    }
}

#[test]
fn a_dropped_page_of_the_fill_is_found_whatever_the_workload() {
    for kind in kinds() {
        for workload in Workload::ALL {
            let guest = started(kind, &settings(1, workload));
            guest.pause().unwrap();
            guest.verify().unwrap();
            let filled = guest.layout().filled();
            let filled = usize::try_from(filled.start).unwrap() / PAGE_SIZE
                ..usize::try_from(filled.end).unwrap() / PAGE_SIZE;
            for page in filled.step_by(301) {
                let right = page_of(&*guest, page);
                let mut wrong = right;
                wrong[77] ^= 1; // no record begins below byte 64 of an odd line
                ram(&*guest).write(page * PAGE_SIZE, &wrong).unwrap();
                let outcome = guest.verify();
                assert!(
                    outcome.is_err(),
                    "{kind} {workload}: page {page} went unnoticed"
                );
                ram(&*guest).write(page * PAGE_SIZE, &right).unwrap();
            }
            guest.verify().unwrap();
        }
    }
}

#[test]
fn the_dirty_log_misses_no_page() {
    for kind in kinds() {
        for workload in [Workload::Random, Workload::Sequential, Workload::Hotset] {
            let settings = settings(2, workload);
            let source = started(kind, &settings);
            let to = create(kind, &settings).unwrap();
            source.start_dirty_log().unwrap();
            // As in the engine: everything once, cleared range by range before it is read.
            for first in (0..ram(&*source).pages()).step_by(64) {
                source.clear_dirty_log(0, first, 64).unwrap();
                let pages: Vec<usize> = (first..first + 64).collect();
                copy_pages(&*source, &*to, &pages);
            }
            for _ in 0..10 {
                let_write(&*source, 500);
                let dirty = fetch_dirty(&*source);
                assert!(!dirty.is_empty());
                // Writes between fetch and clear belong to the next fetch.
                let_write(&*source, 300);
                clear_dirty(&*source);
                copy_pages(&*source, &*to, &dirty);
            }
            source.pause().unwrap();
            copy_pages(&*source, &*to, &take_dirty(&*source));
            assert!(
                take_dirty(&*source).is_empty(),
                "{kind}: dirty while paused"
            );
            let (a, b) = (all_of(&*source), all_of(&*to));
            let differs = a.iter().zip(&b).position(|(a, b)| a != b);
            assert_eq!(differs, None, "{kind} {workload}");
            source.stop_dirty_log().unwrap();

            // A second migration from the same source begins like the first.
            source.resume().unwrap();
            source.start_dirty_log().unwrap();
            source.pause().unwrap();
            take_dirty(&*source);
            copy_pages(&*source, &*to, &every_page(&*source));
            source.resume().unwrap();
            let_write(&*source, 500);
            source.pause().unwrap();
            let dirty = take_dirty(&*source);
            assert!(
                dirty.len() < ram(&*source).pages() / 2,
                "the log has more pages than were written"
            );
            copy_pages(&*source, &*to, &dirty);
            assert!(all_of(&*source) == all_of(&*to), "{kind} {workload}");
            source.stop_dirty_log().unwrap();
        }
    }
}

#[test]
fn calls_out_of_order_are_refused() {
    for kind in kinds() {
        let guest = create(kind, &settings(1, Workload::Random)).unwrap();
        assert!(guest.ram_is_fresh());
        guest.pause().unwrap();
        guest.resume().unwrap_err();
        guest.save_devices().unwrap_err();
        guest.verify().unwrap_err();
        guest.fill(&some_fill()).unwrap();
        assert!(!guest.ram_is_fresh());
        guest.fill(&some_fill()).unwrap_err();
        guest.start().unwrap();
        guest.start().unwrap_err();
        guest.save_devices().unwrap_err();
        guest.verify().unwrap_err();
        guest.pause().unwrap();
        let devices = guest.save_devices().unwrap();
        guest.load_devices(devices).unwrap_err();
        guest.verify().unwrap();
    }
}

#[test]
fn a_device_state_of_another_guest_is_refused_by_name() {
    for kind in kinds() {
        let source = started(kind, &settings(2, Workload::Random));
        source.pause().unwrap();
        let devices = source.save_devices().unwrap();
        let refused = |settings: &GuestSettings, devices: Vec<DeviceState>, why: &str| {
            let to = create(kind, settings).unwrap();
            let error = to.load_devices(devices).unwrap_err();
            assert!(
                error_line(&error).contains(why),
                "{kind}: {}",
                error_line(&error)
            );
            to.resume().unwrap_err();
        };
        let same = settings(2, Workload::Random);
        let (fewer, more) = (settings(1, Workload::Random), settings(3, Workload::Random));
        refused(
            &fewer,
            devices.clone(),
            "number of vCPUs must be 1 as here, got 2",
        );
        refused(
            &more,
            devices.clone(),
            "number of vCPUs must be 3 as here, got 2",
        );
        let larger = GuestSettings {
            ram_bytes: 32 << 20,
            ..same.clone()
        };
        refused(
            &larger,
            devices.clone(),
            "bytes of RAM must be 33554432 as here, got 25165824",
        );
        let mut newer = devices.clone();
        newer[1].version_id += 1;
        refused(&same, newer, "version 2, must be 1");
        let mut twice = devices.clone();
        twice.push(devices[2].clone());
        refused(&same, twice, "arrived twice");
        refused(&same, devices[1..].to_vec(), "hotlift/guest 0 is missing");
    }
}

#[test]
fn a_hostile_device_state_never_panics() {
    for kind in kinds() {
        let settings = GuestSettings {
            ram_bytes: 8 << 20,
            working_set: Some(1 << 20),
            ..settings(1, Workload::Random)
        };
        let source = create(kind, &settings).unwrap();
        source.start().unwrap();
        source.pause().unwrap();
        let devices = source.save_devices().unwrap();
        let mut to = create(kind, &settings).unwrap();
        for device in 0..devices.len() {
            let len = devices[device].payload.len();
            // Every byte near the heads, a sample of the rest (a vCPU has some 10 KiB).
            for at in (0..len).filter(|at| *at < 64 || at % 97 == 0) {
                let mut cut = devices.clone();
                cut[device].payload.truncate(at);
                to.load_devices(cut).unwrap_err();
                for flip in [0x01, 0x80, 0xff] {
                    let mut flipped = devices.clone();
                    flipped[device].payload[at] ^= flip;
                    if to.load_devices(flipped).is_ok() {
                        // A state different from the source's, but valid. (Counts that would take long to replay are not
                        // replayed here.)
                        if to.writes() < 1_000_000 {
                            let _ = to.verify();
                        }
                        to = create(kind, &settings).unwrap();
                    }
                }
            }
            let mut longer = devices.clone();
            longer[device].payload.extend([0xff; 16]);
            to.load_devices(longer).unwrap_err();
            let mut unknown = devices.clone();
            unknown[device].payload.extend([0, 0, 0, 99, 0, 0, 0, 0]);
            to.load_devices(unknown).unwrap_err();
            let mut repeated = devices.clone();
            repeated[device].payload.extend([0, 0, 0, 1, 0, 0, 0, 0]);
            to.load_devices(repeated).unwrap_err();
        }
        to.load_devices(devices).unwrap();
    }
}

#[test]
fn a_dropped_guest_leaves_no_thread_behind() {
    fn threads() -> usize {
        let named = |entry: std::io::Result<std::fs::DirEntry>| {
            let comm = std::fs::read_to_string(entry.ok()?.path().join("comm")).ok()?;
            comm.starts_with("vcpu-7").then_some(())
        };
        std::fs::read_dir("/proc/self/task")
            .unwrap()
            .filter_map(named)
            .count()
    }
    // Other tests of this process also have guests of eight vCPUs: compare in a child process.
    if std::env::var_os("HOTLIFT_ALONE").is_none() {
        let status = std::process::Command::new(std::env::current_exe().unwrap())
            .args(["--exact", "a_dropped_guest_leaves_no_thread_behind"])
            .env("HOTLIFT_ALONE", "1")
            .status()
            .unwrap();
        assert!(status.success());
        return;
    }
    for kind in kinds() {
        let guest = started(kind, &settings(8, Workload::Random));
        let_write(&*guest, 100);
        assert_eq!(threads(), 1);
        drop(guest);
        assert_eq!(threads(), 0);
        drop(create(kind, &settings(8, Workload::Random)).unwrap());
        assert_eq!(threads(), 0);
    }
}

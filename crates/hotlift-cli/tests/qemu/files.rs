//! Tests machines that are saved to a file and restored, in Hotlift's own format and in QEMU's `mapped-ram`.

use std::fs;
use std::os::unix::fs::FileExt;
use std::path::Path;

use hotlift::file::{FileFormat, describe, inspect};
use hotlift::options::StreamOptions;
use hotlift::relay::{Hooks, Incoming, Outgoing, RelayReport, RelaySettings, relay};
use hotlift::transport::Address;
use hotlift::{Control, MigrationError};
use serde_json::{Value, json};

use crate::guest::Guest;
use crate::need;
use crate::route::{Multifd, Side, differ};
use crate::vm::{Accelerator, Machine, Memory, PC_7, PC_10, PC_11, Release, Vm, folder, until};

pub fn machine(name: &'static str, accelerator: Accelerator) -> Machine {
    Machine {
        name,
        accelerator,
        memory: Memory::File,
        guest: Guest::program(),
    }
}

pub fn settings(method: &str, channels: Multifd) -> RelaySettings {
    let channels = match channels {
        Multifd::Off => 0,
        Multifd::Channels(channels) => channels,
    };
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

/// Saves a machine's state in the file `to`. The machine has then released its guest.
pub fn save(
    vm: &mut Vm,
    source: Side,
    to: &Path,
    format: FileFormat,
    settings: &RelaySettings,
) -> RelayReport {
    source.with("return-path").apply(vm);
    let uri = vm.uri("save.sock");
    let address: Address = uri.parse().expect("a URI");
    let listener = address.listen().expect("it listens");
    let outgoing = Outgoing::File { path: to, format };
    let report = std::thread::scope(|scope| {
        let relaying = scope.spawn(|| {
            relay(
                Incoming::Listener(&listener),
                &outgoing,
                settings,
                &Control::default(),
                Hooks::default(),
            )
        });
        vm.qmp.migrate(&uri).expect("migrate");
        relaying.join().expect("no panic")
    });
    let report = report.unwrap_or_else(|error| panic!("save: {}", error.chain()));
    vm.reaches("completed");
    assert!(!vm.is_running(), "it keeps running after the save");
    report
}

/// Starts a machine from the file `from`.
fn restore(
    from: &Path,
    release: Release,
    machine: &Machine,
    multifd: Multifd,
) -> Option<(Vm, Result<RelayReport, MigrationError>)> {
    let mut vm = Vm::waiting(release, machine)?;
    Side::new(multifd).apply(&mut vm);
    let uri = vm.uri("incoming");
    vm.qmp.migrate_incoming(&uri, true).expect("it listens");
    let address: Address = uri.parse().expect("a URI");
    // A file of a source without multifd does not contain it.
    let uuid = vm.qmp.query_uuid().expect("its UUID");
    let settings = RelaySettings {
        uuid: Some(uuid.0),
        ..settings("none", multifd)
    };
    let report = relay(
        Incoming::File {
            path: from,
            offset: 0,
        },
        &Outgoing::Address(&address),
        &settings,
        &Control::default(),
        Hooks::default(),
    );
    Some((vm, report))
}

/// Returns a save file with a changed byte in a page, and its position. Skips bytes of a page that a later block of the file
/// replaces, which are not read.
pub fn altered(whole: &[u8]) -> (Vec<u8>, usize) {
    let folder = folder();
    let path = folder.path().join("altered");
    let places = (1..40).map(|part| whole.len() * part / 50);
    for at in places {
        let mut bytes = whole.to_vec();
        bytes[at] ^= 0x10;
        fs::write(&path, &bytes).expect("a file");
        let is_open = describe(&path, false, &Control::new()).is_ok();
        if is_open && describe(&path, true, &Control::new()).is_err() {
            return (bytes, at);
        }
    }
    panic!("no page of the file is read");
}

/// Checks that a guest saved with `before` writes continues.
pub fn keeps_running(vm: &mut Vm, before: u64) {
    vm.reaches("completed");
    vm.continues_from(before);
    let proven = vm.prove();
    vm.qmp.cont().expect("cont");
    vm.continues_from(proven);
}

#[test]
fn a_running_machine_continues_from_its_file() {
    let folder = folder();
    let file = folder.path().join("vm");
    use Accelerator::{Kvm, Tcg};
    use Multifd::{Channels, Off};
    use Release::{V7, V10, V11};
    let (two, four) = (Channels(2), Channels(4));
    for (from, to, name, accelerator, saved_from, channels, method, restored_to) in [
        (V10, V10, PC_10, Kvm, four, two, "zstd", two),
        (V7, V10, PC_7, Kvm, Off, two, "zlib", Channels(1)),
        (V10, V7, PC_7, Kvm, Off, Off, "none", Off),
        (V10, V10, PC_10, Tcg, Channels(1), Channels(3), "none", Off),
        (V11, V11, PC_11, Kvm, four, two, "zstd", two),
    ] {
        println!("{from:?} {saved_from} -> {channels} {method} -> {to:?} {restored_to}");
        let machine = machine(name, accelerator);
        let mut here = need!(Vm::running(from, &machine));
        let before = here.count().expect("the guest counts");
        let settings = settings(method, channels);
        let report = save(
            &mut here,
            Side::new(saved_from),
            &file,
            FileFormat::Hotlift,
            &settings,
        );
        let info = inspect(&file, &Control::new()).expect("a save file");
        assert_eq!(
            (info.machine.as_str(), info.method.as_str()),
            (name, method)
        );
        let length = fs::metadata(&file).expect("the file").len();
        assert!(report.normal_pages > 1000 && length >= report.sent_bytes);
        // A quarter of the fill is zero, the rest compresses by itself.
        if method != "none" {
            assert!(length < report.normal_pages * 4096, "{length}");
        }
        let before = before.max(here.count().expect("the guest has counted"));
        let (mut there, report) = need!(restore(&file, to, &machine, restored_to));
        report.unwrap_or_else(|error| panic!("restore: {}", error.chain()));
        keeps_running(&mut there, before);
        // The file can be used repeatedly.
        let (mut again, report) = need!(restore(&file, to, &machine, restored_to));
        report.unwrap_or_else(|error| panic!("restore: {}", error.chain()));
        keeps_running(&mut again, before);
    }
}

#[test]
fn qemu_loads_a_mapped_ram_file_written_by_hotlift() {
    let folder = folder();
    let file = folder.path().join("vm");
    use Multifd::{Channels, Off};
    use Release::{V7, V10, V11};
    for (from, to, name, multifd, live) in [
        (V10, V10, PC_10, Channels(4), true),
        (V10, V10, PC_10, Off, false),
        (V7, V10, PC_7, Channels(2), false),
        (V7, V10, PC_7, Off, true),
        (V11, V11, PC_11, Channels(2), true),
    ] {
        println!("{from:?} -> {to:?} {multifd} live: {live}");
        let machine = machine(name, Accelerator::Kvm);
        let mut here = need!(Vm::running(from, &machine));
        let before = match live {
            true => here.count().expect("the guest counts"),
            false => here.prove(),
        };
        let settings = settings("none", Multifd::Channels(2));
        save(
            &mut here,
            Side::new(multifd),
            &file,
            FileFormat::MappedRam,
            &settings,
        );
        for loaded_with in [Off, Channels(2)] {
            let mut there = need!(Vm::waiting(to, &machine));
            Side::new(loaded_with).with("mapped-ram").apply(&mut there);
            let uri = format!("file:{}", file.display());
            there.qmp.migrate_incoming(&uri, true).expect("it loads");
            there.reaches("completed");
            if !live {
                differ(&here.ram(), &there.ram());
                there.qmp.cont().expect("cont");
            }
            keeps_running(&mut there, before);
        }
    }
}

#[test]
fn a_mapped_ram_file_of_qemu_is_read_to_its_last_page() {
    let folder = folder();
    let file = folder.path().join("vm");
    use Multifd::{Channels, Off};
    use Release::{V7, V10, V11};
    for (from, name, multifd, to, restored_to, live) in [
        (V10, PC_10, Off, V10, Channels(2), false),
        (V10, PC_10, Channels(4), V10, Off, true),
        (V10, PC_7, Off, V7, Channels(2), false),
        (V11, PC_11, Channels(2), V11, Channels(2), true),
    ] {
        println!("{from:?} {name} {multifd} -> {to:?} {restored_to} live: {live}");
        let machine = machine(name, Accelerator::Kvm);
        let mut here = need!(Vm::running(from, &machine));
        let before = match live {
            true => here.count().expect("the guest counts"),
            false => here.prove(),
        };
        Side::new(multifd).with("mapped-ram").apply(&mut here);
        let uri = format!("file:{}", file.display());
        here.qmp.migrate(&uri).expect("migrate");
        here.reaches("completed");
        let (mut there, report) = need!(restore(&file, to, &machine, restored_to));
        report.unwrap_or_else(|error| panic!("restore: {}", error.chain()));
        there.reaches("completed");
        if !live {
            differ(&here.ram(), &there.ram());
            there.qmp.cont().expect("cont");
        }
        keeps_running(&mut there, before);
    }
}

/// XBZRLE deltas change pages that are already in the file.
#[test]
fn older_sources_are_saved() {
    let folder = folder();
    let file = folder.path().join("vm");
    for (capability, figures, parameters) in [
        // Slow, so that some rounds resend pages.
        (
            "xbzrle",
            "xbzrle-cache",
            json!({ "max-bandwidth": 48 << 20, "downtime-limit": 8 }),
        ),
        (
            "compress",
            "compression",
            json!({ "downtime-limit": 3000, "compress-threads": 2 }),
        ),
    ] {
        for (format, method) in [
            (FileFormat::Hotlift, "zstd"),
            (FileFormat::MappedRam, "none"),
        ] {
            println!("{capability} -> {format:?}");
            let machine = Machine {
                guest: Guest::program_that_keeps_its_rate(),
                ..machine(PC_7, Accelerator::Kvm)
            };
            let mut here = need!(Vm::running(Release::V7, &machine));
            let before = here.count().expect("the guest counts");
            let source = Side::new(Multifd::Off)
                .with(capability)
                .parameters(parameters.clone());
            let settings = settings(method, Multifd::Channels(2));
            save(&mut here, source, &file, format, &settings);
            let output = here.qmp.client().execute("query-migrate", &Value::Null);
            let output = output.expect("query-migrate");
            assert!(
                output[figures]["pages"].as_u64() > Some(0),
                "no such page was sent: {output}"
            );
            let (mut there, report) =
                need!(restore(&file, Release::V10, &machine, Multifd::Channels(2)));
            report.unwrap_or_else(|error| panic!("restore: {}", error.chain()));
            keeps_running(&mut there, before);
        }
    }
}

#[test]
fn a_damaged_file_is_refused_and_no_guest_starts() {
    let folder = folder();
    let (file, damaged) = (folder.path().join("vm"), folder.path().join("damaged"));
    let machine = machine(PC_10, Accelerator::Kvm);
    let mut here = need!(Vm::running(Release::V10, &machine));
    let multifd = Multifd::Channels(2);
    let settings = settings("zstd", multifd);
    save(
        &mut here,
        Side::new(multifd),
        &file,
        FileFormat::Hotlift,
        &settings,
    );
    let length = fs::metadata(&file).expect("the file").len();
    let flip = |at: u64| {
        fs::copy(&file, &damaged).expect("a copy");
        let file = fs::File::options().read(true).write(true).open(&damaged);
        let file = file.expect("the copy");
        let mut byte = [0];
        file.read_exact_at(&mut byte, at).expect("a byte");
        file.write_all_at(&[byte[0] ^ 0x10], at).expect("a byte");
    };
    let cut = |at: u64| {
        fs::copy(&file, &damaged).expect("a copy");
        let file = fs::File::options().write(true).open(&damaged);
        file.expect("the copy").set_len(at).expect("a length");
    };
    let page = altered(&fs::read(&file).expect("the file")).1 as u64;
    let places = [100, page, length - 70_000, length - 40, length - 1];
    for (what, damage) in [("flipped", &flip as &dyn Fn(u64)), ("cut", &cut)] {
        for at in places {
            damage(at);
            let (mut vm, report) = need!(restore(&damaged, Release::V10, &machine, multifd));
            let error = report.expect_err("a damaged file");
            assert!(
                matches!(error, MigrationError::File(_)),
                "{what} at {at}: {}",
                error.chain()
            );
            until(
                || format!("{what} at {at}: the destination does not abort"),
                || {
                    let info = vm.migration();
                    // All but the pages is read first: QEMU has received nothing.
                    let is_page = what == "flipped" && at == page;
                    (info.has_failed() || !is_page).then_some(())
                },
            );
            assert!(!vm.is_running(), "{what} at {at}: the guest runs");
        }
    }
    // The file itself is unchanged.
    let (mut vm, report) = need!(restore(&file, Release::V10, &machine, multifd));
    report.unwrap_or_else(|error| panic!("restore: {}", error.chain()));
    vm.reaches("completed");
}

#[test]
fn a_failed_save_leaves_the_guest_running_and_no_file() {
    let folder = folder();
    let file = folder.path().join("vm");
    let mut here = need!(Vm::running(Release::V10, &machine(PC_10, Accelerator::Kvm)));
    for format in [FileFormat::Hotlift, FileFormat::MappedRam] {
        Side::new(Multifd::Channels(2))
            .with("return-path")
            .apply(&mut here);
        let uri = here.uri("save.sock");
        let address: Address = uri.parse().expect("a URI");
        let listener = address.listen().expect("it listens");
        let control = Control::default();
        let outgoing = Outgoing::File {
            path: &file,
            format,
        };
        let error = std::thread::scope(|scope| {
            let relaying = scope.spawn(|| {
                let on_progress = |progress: &hotlift::relay::RelayProgress| {
                    if progress.normal_pages > 0 {
                        control.cancel();
                    }
                };
                let hooks = Hooks {
                    on_progress: Some(&on_progress),
                    ..Hooks::default()
                };
                relay(
                    Incoming::Listener(&listener),
                    &outgoing,
                    // Slow enough to be cancelled before the end.
                    &RelaySettings {
                        outgoing: StreamOptions {
                            max_bandwidth: 8 << 20,
                            ..settings("none", Multifd::Channels(2)).outgoing
                        },
                        ..RelaySettings::default()
                    },
                    &control,
                    hooks,
                )
            });
            here.qmp.migrate(&uri).expect("migrate");
            relaying.join().expect("no panic").expect_err("cancelled")
        });
        assert!(matches!(error, MigrationError::Cancelled), "{error}");
        until(
            || "the source does not abort".to_owned(),
            || here.migration().has_failed().then_some(()),
        );
        let count = here.count().expect("the guest counts");
        here.continues_from(count);
        assert_eq!(fs::read_dir(folder.path()).expect("a folder").count(), 0);
    }
    here.prove();
}

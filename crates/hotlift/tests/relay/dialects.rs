//! Tests differences between QEMU versions: sync points of multifd, and machine types that send no configuration.

use std::path::Path;
use std::thread;

use hotlift::file::{FileFormat, describe, inspect};
use hotlift::relay::{Hooks, Incoming, Outgoing, RelayReport, RelaySettings, relay};
use hotlift::{Control, MigrationError};

use super::destination::Arrived;
use super::log::Log;
use super::recording::{Recording, UUID};
use super::rig::{destination, migrate, migrate_to, settings};
use super::source::{Ending, play};

/// Machine type names without a QEMU version: of distributions, and of unversioned machines.
const UNVERSIONED: [&str; 4] = [
    "pc-q35-rhel9.2.0",
    "pc-i440fx-jammy",
    "pc-q35-9.0+pve1",
    "microvm",
];

/// Returns settings of a relay with two channels.
fn channels() -> RelaySettings {
    RelaySettings {
        uuid: Some(UUID),
        ..settings(&[("multifd-channels", "2")])
    }
}

/// Returns settings of a relay without multifd.
fn off() -> RelaySettings {
    RelaySettings {
        uuid: Some(UUID),
        ..settings(&[("multifd", "off")])
    }
}

fn recorded(name: &str, machine: &str) -> Recording {
    Recording::load(name).with_return_path().renamed(machine)
}

/// Asserts that a recording arrives at a destination with these sync points.
fn assert_comes(recording: &Recording, way: &[RelaySettings], each_section: bool) {
    let what = format!("{}, {} relays, {each_section}", recording.name, way.len());
    let to = Some(each_section);
    let outcome = migrate_to(recording, way, None, Ending::LetsGo, to);
    outcome.assert_handed_over(&what);
    let expected = migrate(recording, &[], None, Ending::LetsGo).arrived.guest;
    assert!(
        outcome.arrived.guest == expected,
        "{what}: the guest differs"
    );
}

#[test]
fn sync_points_of_the_source_apply_to_the_destination_for_any_machine_name() {
    for machine in UNVERSIONED {
        for (name, each_section) in [("7.2-none", true), ("10.0-none", false)] {
            let recording = recorded(name, machine);
            for way in [&[channels()][..], &[channels(), channels()]] {
                assert_comes(&recording, way, each_section);
            }
        }
    }
}

#[test]
fn sync_points_absent_from_the_stream_come_from_the_destinations_qemu() {
    for machine in UNVERSIONED {
        for each_section in [true, false] {
            let reported = RelaySettings {
                qemu_flushes_after_each_section: Some(each_section),
                ..channels()
            };
            let recording = recorded("7.2-off", machine);
            for way in [
                &[reported.clone()][..],
                &[off(), reported.clone()],
                // The first relay creates its own sync points.
                &[channels(), reported.clone()],
            ] {
                assert_comes(&recording, way, each_section);
            }
        }
    }
}

#[test]
fn unknown_sync_points_are_estimated_and_the_error_names_the_option() {
    for way in [&[channels()][..], &[off(), channels()]] {
        let recording = recorded("7.2-off", "microvm");
        let outcome = migrate_to(&recording, way, None, Ending::LetsGo, Some(true));
        let error = outcome.relays.last().expect("a relay").as_ref();
        let error = error.expect_err("it refuses flags 0x200").chain();
        assert!(
            error.contains("--multifd-flush-after-each-section=on"),
            "{error}"
        );
    }
    for each_section in [true, false] {
        let given = RelaySettings {
            flush_after_each_section: Some(each_section),
            // The operator's setting has priority.
            qemu_flushes_after_each_section: Some(!each_section),
            ..channels()
        };
        let recording = recorded("7.2-off", "microvm");
        assert_comes(&recording, &[given], each_section);
    }
}

/// Saves a source's stream.
fn save(recording: &Recording, path: &Path) {
    let log = Log::default();
    let folder = tempfile::tempdir().unwrap();
    let uri = format!("unix:{}", folder.path().join("socket").display());
    let address: hotlift::Address = uri.parse().unwrap();
    let listener = address.listen().unwrap();
    let report = thread::scope(|scope| {
        let saving = scope.spawn(|| {
            relay(
                Incoming::Listener(&listener),
                &Outgoing::File {
                    path,
                    format: FileFormat::Hotlift,
                },
                &channels(),
                &Control::new(),
                Hooks::default(),
            )
        });
        play(recording, &address, Ending::LetsGo, &log);
        saving.join().unwrap()
    });
    if let Err(error) = report {
        panic!("{}: {}", recording.name, error.chain());
    }
}

/// Restores a save file into a destination with these sync points.
fn restore(
    recording: &Recording,
    path: &Path,
    settings: &RelaySettings,
    each_section: Option<bool>,
) -> (Arrived, Result<RelayReport, MigrationError>) {
    let log = Log::default();
    let channels = settings.outgoing.channels();
    let (_folder, mut to) = destination(recording, channels, None, &log);
    to.flushes_each_section = each_section;
    let address = to.address.clone();
    thread::scope(|scope| {
        let arriving = scope.spawn(|| to.run());
        let report = relay(
            Incoming::File { path, offset: 0 },
            &Outgoing::Address(&address),
            settings,
            &Control::new(),
            Hooks::default(),
        );
        (arriving.join().unwrap(), report)
    })
}

#[test]
fn a_save_file_keeps_the_sync_points_of_its_source() {
    let folder = tempfile::tempdir().unwrap();
    let path = folder.path().join("vm");
    for machine in UNVERSIONED {
        for (name, shown) in [
            ("7.2-none", Some(true)),
            ("10.0-none", Some(false)),
            ("7.2-off", None),
        ] {
            let recording = recorded(name, machine);
            let what = &recording.name;
            save(&recording, &path);
            let info = inspect(&path, &Control::new()).unwrap();
            assert_eq!(info.flush_after_each_section, shown, "{what}");
            assert!(info.paused >= Some(info.begun), "{what}: {info:?}");
            let each_section = shown.unwrap_or(true);
            let reported = RelaySettings {
                // The file has the source's value; without it the destination's QEMU is queried.
                qemu_flushes_after_each_section: shown.is_none().then_some(true),
                ..channels()
            };
            let (arrived, report) = restore(&recording, &path, &reported, Some(each_section));
            if let Err(error) = report {
                panic!("{what}: {}, {:?}", error.chain(), arrived.ended);
            }
            let expected = migrate(&recording, &[], None, Ending::LetsGo).arrived.guest;
            assert!(arrived.guest == expected, "{what}: the guest differs");
        }
    }
}

#[test]
fn a_stream_without_configuration_and_footers_is_carried_saved_and_restored_as_it_is() {
    let recording = Recording::small_without_configuration();
    let expected = migrate(&recording, &[], None, Ending::LetsGo).arrived.guest;
    let ways = [
        vec![off()],
        vec![channels()],
        vec![off(), off()],
        vec![channels(), channels()],
    ];
    for way in ways {
        let what = format!("{} relays", way.len());
        let outcome = migrate(&recording, &way, None, Ending::LetsGo);
        outcome.assert_handed_over(&what);
        assert!(
            outcome.arrived.guest == expected,
            "{what}: the guest differs"
        );
    }
    let folder = tempfile::tempdir().unwrap();
    let path = folder.path().join("vm");
    save(&recording, &path);
    let described = describe(&path, true, &Control::new()).unwrap();
    assert_eq!(described.info.machine, "");
    assert_eq!(described.devices, Some(2));
    for settings in [off(), channels()] {
        let (arrived, report) = restore(&recording, &path, &settings, None);
        if let Err(error) = report {
            panic!("{}, {:?}", error.chain(), arrived.ended);
        }
        assert!(arrived.guest == expected, "the restored guest differs");
    }
}

//! Sends the same lines to the human monitors of QEMU 10.0 and of Hotlift.

use hotlift_testkit::qemu::Release;
use serde_json::json;

use crate::machine::{Machine, Program};

/// Returns the output of a line.
fn types(machine: &mut Machine, line: &str) -> String {
    let printed = machine.execute("human-monitor-command", &json!({ "command-line": line }));
    printed.as_str().expect("text").replace("\r\n", "\n")
}

/// Returns the label of each labelled line, and the text after it.
fn labels(text: &str) -> Vec<(&str, &str)> {
    text.lines()
        .filter_map(|line| line.split_once(": "))
        .collect()
}

/// Returns the items of `these` that are also in `others`.
fn shared<'a>(these: &[(&'a str, &'a str)], others: &[(&str, &str)]) -> Vec<(&'a str, &'a str)> {
    let known = |label: &str| others.iter().any(|(other, _)| *other == label);
    let shared = these.iter().filter(|(label, _)| known(label));
    shared.copied().collect()
}

#[test]
fn the_human_monitor_prints_what_qemu_prints() {
    if Release::V10.program().is_none() {
        return;
    }
    let mut qemu = Machine::start(Program::Qemu, &[]);
    let mut hotlift = Machine::start(Program::Hotlift, &[]);
    let mut differ = Vec::new();
    for line in [
        "",
        "foo",
        "info foo",
        "help foo",
        "INFO status",
        "info status",
        "info status x",
        "stop",
        "info status",
        "cont",
        "c extra",
        "info status",
        "migrate",
        "migrate -d",
        "migrate -x tcp:1:1",
        "migrate foo",
        "migrate_continue",
        "migrate_continue foo",
        "migrate_continue pre-switchover",
        "migrate_start_postcopy",
        "migrate_pause",
        "migrate_recover",
        "migrate_recover tcp:127.0.0.1:0",
        "migrate_cancel",
        "migrate_incoming tcp:127.0.0.1:0",
        "migrate_set_capability multifd",
        "migrate_set_capability multifd maybe",
        "migrate_set_capability foo on",
        "migrate_set_capability multifd on",
        "migrate_set_capability multifd off",
        "migrate_set_parameter",
        "migrate_set_parameter foo 1",
        "migrate_set_parameter max-bandwidth",
        "migrate_set_parameter max-bandwidth 1x",
        "migrate_set_parameter max-bandwidth \"1 G\"",
        "migrate_set_parameter max-bandwidth 1.5G",
        "migrate_set_parameter avail-switchover-bandwidth 3",
        "migrate_set_parameter downtime-limit 3000000",
        "migrate_set_parameter downtime-limit 1k",
        "migrate_set_parameter multifd-channels 0",
        "migrate_set_parameter multifd-channels 300",
        "migrate_set_parameter multifd-channels -1",
        "migrate_set_parameter multifd-channels abc",
        "migrate_set_parameter multifd-channels 0x4",
        "migrate_set_parameter multifd-channels 4 x",
        "migrate_set_parameter multifd-compression foo",
        "migrate_set_parameter multifd-compression zlib",
        "migrate_set_parameter xbzrle-cache-size 3k",
        "migrate_set_parameter xbzrle-cache-size 64k",
        "migrate_set_parameter announce-step 0",
        "migrate_set_parameter cpu-throttle-tailslow maybe",
        "migrate_set_parameter cpu-throttle-tailslow on",
        "migrate_set_parameter max-cpu-throttle 5",
    ] {
        let (ours, theirs) = (types(&mut hotlift, line), types(&mut qemu, line));
        if ours != theirs {
            differ.push((line, ours, theirs));
        }
    }
    assert!(differ.is_empty(), "{differ:#?}");
    for (line, at_least) in [
        ("info migrate_parameters", 16),
        ("info migrate_capabilities", 7),
    ] {
        let (ours, theirs) = (types(&mut hotlift, line), types(&mut qemu, line));
        let (ours, theirs) = (labels(&ours), labels(&theirs));
        let both = shared(&ours, &theirs);
        assert!(both.len() >= at_least, "{line}: {both:?}");
        assert_eq!(both, shared(&theirs, &ours), "{line}");
    }
}

#[test]
fn a_migration_is_shown_under_qemus_labels_in_qemus_order() {
    if Release::V10.program().is_none() {
        return;
    }
    let [ours, theirs] = [Program::Hotlift, Program::Qemu].map(|program| {
        let mut source = Machine::start(program, &[]);
        let mut destination = Machine::waiting(program);
        for machine in [&mut source, &mut destination] {
            machine.set_capabilities(&["multifd"]);
        }
        let address = destination.listen();
        types(&mut source, &format!("migrate -d {address}"));
        source.reaches("completed");
        let stopped = types(&mut source, "info status");
        assert_eq!(stopped, "VM status: paused (postmigrate)\n", "{program:?}");
        types(&mut source, "info migrate")
    });
    let names = |these: &str, others: &str| -> Vec<String> {
        let shared = shared(&labels(these), &labels(others));
        shared
            .iter()
            .map(|(label, _)| (*label).to_owned())
            .collect()
    };
    let both = names(&ours, &theirs);
    assert_eq!(both, names(&theirs, &ours), "{ours}\n{theirs}");
    assert!(both.len() >= 15, "{ours}\n{theirs}");
    // The unit is the end of the line.
    let unit = |text: &str, label: &str| {
        let line = labels(text).into_iter().find(|(one, _)| *one == label);
        line.and_then(|(_, value)| value.split_once(' ').map(|(_, unit)| unit.to_owned()))
    };
    for label in &both {
        assert_eq!(unit(&ours, label), unit(&theirs, label), "{label}");
    }
}

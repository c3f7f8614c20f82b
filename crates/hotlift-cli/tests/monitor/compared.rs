//! Sends the same script to QEMU 10.0 and to Hotlift. `docs/qmp-differences.md` must list exactly the differences in
//! the answers.

use std::collections::BTreeMap;
use std::path::Path;

use hotlift_testkit::qemu::Release;
use serde_json::{Value, json};

use crate::machine::{Machine, Program};

/// Bytes per second at which the first pass does not end by itself on a slow machine: 4096 zero pages take 36 KiB.
const FIRST_PASS_LASTS: u64 = 100;

/// Commands sent to an idle machine.
fn idle_script() -> Vec<(&'static str, Value)> {
    let mut script: Vec<_> = [
        "query-status",
        "query-version",
        "query-name",
        "query-uuid",
        "query-migrate",
        "query-migrate-capabilities",
        "query-migrate-parameters",
        "query-migrationthreads",
        "migrate_cancel",
        "migrate-start-postcopy",
        "migrate-pause",
        "migrate-recover",
        "migrate-continue",
        "migrate-set-capabilities",
        "migrate",
        "nope",
    ]
    .map(|command| (command, json!({})))
    .into();
    script.push(("query-status", json!({ "x": 1 })));
    script.push(("migrate-incoming", json!({ "uri": "tcp:127.0.0.1:0" })));
    for state in ["active", "pre-switchover", "foo"] {
        script.push(("migrate-continue", json!({ "state": state })));
    }
    for uri in [json!("nope:1"), json!("tcp:127.0.0.1"), json!(5)] {
        script.push(("migrate", json!({ "uri": uri })));
    }
    script.push((
        "migrate",
        json!({ "uri": "tcp:127.0.0.1:1", "resume": true }),
    ));
    script.push(("migrate", json!({ "channels": [] })));
    let inet = |kind, transport| {
        let addr = json!({ "transport": transport, "type": "inet", "host": "h" });
        json!({ "channels": [{ "channel-type": kind, "addr": addr }] })
    };
    for (kind, transport) in [("main", "socket"), ("x", "socket"), ("main", "nope")] {
        script.push(("migrate", inet(kind, transport)));
    }
    for capabilities in [
        json!(3),
        json!([{ "capability": "nope", "state": true }]),
        json!([{ "capability": "multifd" }]),
        json!([{ "capability": "multifd", "state": "on" }]),
        json!([{ "capability": "multifd", "state": true }, { "capability": "xbzrle", "state": true }]),
        json!([{ "capability": "zero-copy-send", "state": true }]),
    ] {
        let arguments = json!({ "capabilities": capabilities });
        script.push(("migrate-set-capabilities", arguments));
    }
    script.push(("stop", json!({})));
    script.push(("query-status", json!({})));
    script.push(("cont", json!({})));
    script
}

/// Returns commands with every common parameter: values just inside and outside of its range, and other types.
fn parameter_script() -> Vec<(&'static str, Value)> {
    let ranges = [
        ("announce-initial", 0, 100_000),
        ("announce-max", 0, 100_000),
        ("announce-rounds", 0, 1000),
        ("announce-step", 1, 10_000),
        ("throttle-trigger-threshold", 1, 100),
        ("cpu-throttle-initial", 1, 99),
        ("cpu-throttle-increment", 1, 99),
        ("max-cpu-throttle", 1, 99),
        ("downtime-limit", 0, 2_000_000),
        ("multifd-channels", 1, 255),
        ("multifd-zlib-level", 0, 9),
        ("multifd-zstd-level", 0, 20),
        ("multifd-qatzip-level", 1, 9),
    ];
    let mut settings = Vec::new();
    for (name, lowest, highest) in ranges {
        for value in [lowest, highest, lowest - 1, highest + 1] {
            settings.push((name, json!(value)));
        }
        for value in [json!("1"), json!(1.5), json!(true), json!(null)] {
            settings.push((name, value));
        }
    }
    for name in [
        "max-bandwidth",
        "avail-switchover-bandwidth",
        "max-postcopy-bandwidth",
    ] {
        let beyond: Value = serde_json::from_str("18446744073709551616").unwrap();
        for value in [json!(u64::MAX), json!(-1), beyond, json!("1G")] {
            settings.push((name, value));
        }
    }
    for value in [4096, 2048, 3] {
        settings.push(("xbzrle-cache-size", json!(value)));
    }
    for name in ["multifd-compression", "zero-page-detection"] {
        for value in [json!("none"), json!("nope"), json!(1)] {
            settings.push((name, value));
        }
    }
    for value in [json!(true), json!(false), json!(1), json!("on")] {
        settings.push(("cpu-throttle-tailslow", value));
    }
    settings.push(("nope", json!(1)));
    settings
        .into_iter()
        .map(|(name, value)| ("migrate-set-parameters", json!({ name: value })))
        .collect()
}

/// Compared part of an answer: members and their types, or class and text of a refusal.
type Shape = BTreeMap<String, String>;

fn shape(answer: &Result<Value, (String, String)>) -> Shape {
    let mut shape = Shape::new();
    match answer {
        Ok(value) => look(value, "", &mut shape),
        Err((class, desc)) => {
            shape.insert("refused".to_owned(), format!("{class}: {desc}"));
        }
    }
    shape
}

fn look(value: &Value, path: &str, shape: &mut Shape) {
    let here = if path.is_empty() { "answer" } else { path };
    let kind = match value {
        Value::Null => "null",
        Value::Bool(_) => "bool",
        Value::Number(_) => "number",
        Value::String(_) => "string",
        Value::Array(items) => {
            for item in items {
                // Capabilities are identified by their names, all other lists by their first item.
                match item["capability"].as_str() {
                    Some(name) => look(&item["state"], name, shape),
                    None => look(item, &format!("{path}[]"), shape),
                }
            }
            "array"
        }
        Value::Object(members) => {
            for (name, member) in members {
                // Members of Hotlift alone are present only while they have a value.
                if name.starts_with("x-hotlift-") {
                    shape.insert("x-hotlift-*".to_owned(), String::new());
                    continue;
                }
                let path = match path {
                    "" => name.clone(),
                    _ => format!("{path}.{name}"),
                };
                look(member, &path, shape);
            }
            "object"
        }
    };
    shape.insert(here.to_owned(), kind.to_owned());
}

/// Runs one side's whole script; returns commands and results.
fn run(program: Program) -> Vec<(String, Shape)> {
    let mut seen = Vec::new();
    let mut source = Machine::start(program, &[]);
    for (command, arguments) in idle_script().into_iter().chain(parameter_script()) {
        let answer = source.ask(command, &arguments);
        let name = match arguments.as_object() {
            Some(members) if members.is_empty() => command.to_owned(),
            _ => format!("{command} {arguments}"),
        };
        seen.push((name, shape(&answer)));
    }
    drop(source);
    seen.extend(fails(program));
    seen.extend(cancels(program));
    seen.extend(completes(program));
    seen
}

/// Returns the events so far: states and run states, with repeated passes as one.
fn order(machine: &mut Machine) -> Shape {
    let mut order = Vec::new();
    for (name, data) in machine.take_events() {
        let text = match data["status"].as_str() {
            Some(status) => status.to_owned(),
            None => name.clone(),
        };
        if order.last() != Some(&text) {
            order.push(text);
        }
    }
    Shape::from_iter([("events".to_owned(), order.join(" "))])
}

fn fails(program: Program) -> Vec<(String, Shape)> {
    let mut source = Machine::start(program, &[]);
    source.set_capabilities(&["events"]);
    // No process listens on port 1, which needs root rights.
    source.execute("migrate", &json!({ "uri": "tcp:127.0.0.1:1" }));
    let info = source.reaches("failed");
    let words = info["error-desc"].as_str().unwrap_or_default().to_owned();
    let output = Shape::from_iter([("error-desc".to_owned(), words)]);
    let status = source.ask("query-status", &json!({}));
    vec![
        ("failed: query-migrate".to_owned(), shape(&Ok(info))),
        ("failed: words".to_owned(), output),
        ("failed: query-status".to_owned(), shape(&status)),
        ("failed: events".to_owned(), order(&mut source)),
    ]
}

fn cancels(program: Program) -> Vec<(String, Shape)> {
    let mut source = Machine::start(program, &[]);
    let mut destination = Machine::waiting(program);
    source.set_capabilities(&["events"]);
    source.execute(
        "migrate-set-parameters",
        &json!({ "max-bandwidth": FIRST_PASS_LASTS }),
    );
    let uri = destination.listen();
    source.execute("migrate", &json!({ "uri": uri }));
    source.reaches("active");
    source.execute("migrate_cancel", &json!({}));
    let info = source.reaches("cancelled");
    let run_state = source.execute("query-status", &json!({}));
    assert_eq!(run_state["status"], "running");
    vec![
        ("cancelled: query-migrate".to_owned(), shape(&Ok(info))),
        ("cancelled: events".to_owned(), order(&mut source)),
    ]
}

fn completes(program: Program) -> Vec<(String, Shape)> {
    let mut seen = Vec::new();
    let mut source = Machine::start(program, &[]);
    let mut destination = Machine::waiting(program);
    let mut note = |when: &str, shape: Shape| seen.push((when.to_owned(), shape));
    note(
        "before: query-status of the destination",
        shape(&destination.ask("query-status", &json!({}))),
    );
    note(
        "before: query-migrate of the destination",
        shape(&destination.ask("query-migrate", &json!({}))),
    );
    note(
        "before: migrate of the destination",
        shape(&destination.ask("migrate", &json!({ "uri": "tcp:127.0.0.1:1" }))),
    );
    source.set_capabilities(&["events", "pause-before-switchover"]);
    destination.set_capabilities(&["events"]);
    source.execute(
        "migrate-set-parameters",
        &json!({ "max-bandwidth": FIRST_PASS_LASTS }),
    );
    let uri = destination.listen();
    note(
        "listening: query-migrate of the destination",
        shape(&destination.ask("query-migrate", &json!({}))),
    );
    let again = json!({ "uri": "tcp:127.0.0.1:0" });
    note(
        "listening: migrate-incoming",
        shape(&destination.ask("migrate-incoming", &again)),
    );
    source.execute("migrate", &json!({ "uri": uri }));
    let info = source.reaches("active");
    note("active: query-migrate", shape(&Ok(info)));
    for (command, arguments) in [
        ("migrate", json!({ "uri": uri })),
        ("query-migrationthreads", json!({})),
        (
            "migrate-set-capabilities",
            json!({ "capabilities": [{ "capability": "multifd", "state": true }] }),
        ),
        ("migrate-set-parameters", json!({ "multifd-channels": 3 })),
        ("migrate-set-parameters", json!({ "downtime-limit": 2000 })),
        ("migrate-continue", json!({ "state": "pre-switchover" })),
        ("migrate-set-parameters", json!({ "max-bandwidth": 0 })),
    ] {
        // A program's own port would be a difference.
        let name = match command {
            "migrate" => "active: migrate".to_owned(),
            _ => format!("active: {command} {arguments}"),
        };
        note(&name, shape(&source.ask(command, &arguments)));
    }
    let info = source.reaches("pre-switchover");
    note("pre-switchover: query-migrate", shape(&Ok(info)));
    note(
        "pre-switchover: query-status",
        shape(&source.ask("query-status", &json!({}))),
    );
    note(
        "pre-switchover: cont",
        shape(&source.ask("cont", &json!({}))),
    );
    source.execute("migrate-continue", &json!({ "state": "pre-switchover" }));
    let info = source.reaches("completed");
    note("completed: query-migrate", shape(&Ok(info)));
    let info = destination.reaches("completed");
    note(
        "completed: query-migrate of the destination",
        shape(&Ok(info)),
    );
    for (whose, machine, state) in [
        ("source", &mut source, "postmigrate"),
        ("destination", &mut destination, "running"),
    ] {
        // QEMU's main loop stops and starts the machine slightly after its migration ends.
        let start = std::time::Instant::now();
        while machine.execute("query-status", &json!({}))["status"] != state {
            assert!(start.elapsed() < crate::machine::DEADLINE, "not {state}");
            std::thread::sleep(std::time::Duration::from_millis(5));
        }
        note(&format!("completed: events of the {whose}"), order(machine));
        machine.events.clear();
        machine.execute("quit", &json!({}));
        assert_eq!(machine.wait_end(), Some(0));
    }
    seen
}

/// Returns the differences, a line each: the place and the difference.
fn differences(qemu: &[(String, Shape)], hotlift: &[(String, Shape)]) -> Vec<(String, String)> {
    let mut found = Vec::new();
    for ((place, theirs), (other, ours)) in qemu.iter().zip(hotlift) {
        assert_eq!(place, other, "the same script");
        let only = |one: &Shape, other: &Shape| {
            let names = one
                .keys()
                .filter(|name| !other.contains_key(*name))
                .cloned();
            names.collect::<Vec<_>>().join(", ")
        };
        for (whose, names) in [
            ("QEMU", only(theirs, ours)),
            ("Hotlift", only(ours, theirs)),
        ] {
            if names == "refused" {
                let shape = if whose == "QEMU" { theirs } else { ours };
                found.push((
                    place.clone(),
                    format!("only {whose} refuses: {}", shape["refused"]),
                ));
            } else if !names.is_empty() && names != "answer" {
                found.push((place.clone(), format!("only {whose} has: {names}")));
            }
        }
        for (name, kind) in theirs {
            if let Some(our_kind) = ours.get(name)
                && our_kind != kind
            {
                found.push((
                    place.clone(),
                    format!("{name}: QEMU '{kind}', Hotlift '{our_kind}'"),
                ));
            }
        }
    }
    found
}

/// Head of the table in the docs.
const HEAD: &str = "| where | what differs | why |\n|---|---|---|\n";

#[test]
fn replies_equal_those_of_qemu_except_for_documented_differences() {
    if Release::V10.program().is_none() {
        return;
    }
    let found = differences(&run(Program::Qemu), &run(Program::Hotlift));
    let file = Path::new(env!("CARGO_MANIFEST_DIR")).join("../../docs/qmp-differences.md");
    let text = std::fs::read_to_string(&file).unwrap_or_default();
    let (_, table) = text.split_once(HEAD).unwrap_or_default();
    let rows: Vec<(String, String)> = table
        .lines()
        .map_while(|line| line.strip_prefix("| "))
        .map(|line| {
            let cells: Vec<_> = line.trim_end_matches(" |").split(" | ").collect();
            assert!(
                cells.len() == 3 && !cells[2].is_empty(),
                "no reason: {line}"
            );
            (cells[0].replace('`', ""), cells[1].replace('`', ""))
        })
        .collect();
    let new: Vec<_> = found.iter().filter(|row| !rows.contains(row)).collect();
    let old: Vec<_> = rows.iter().filter(|row| !found.contains(row)).collect();
    let lines = |rows: &[&(String, String)]| {
        rows.iter()
            .map(|(place, what)| format!("| `{place}` | {what} |\n"))
            .collect::<String>()
    };
    assert!(
        new.is_empty() && old.is_empty(),
        "{}: is not in the list:\n{}is no difference any more:\n{}",
        file.display(),
        lines(&new),
        lines(&old)
    );
}

//! Methods on accelerators, as a user sees them: what ran is told, and a device that fails costs no page.
//! The devices are simulated.

use std::path::PathBuf;

use hotlift_methods::{METHODS, MethodInfo};
use serde_json::Value;

use crate::hotlift::Hotlift;

/// The library of `hotlift-simulated`, which cargo has put beside the tests.
fn simulated() -> PathBuf {
    let test = std::env::current_exe().expect("the test's own file");
    let file = test.with_file_name("libhotlift_simulated.so");
    assert!(file.exists(), "{} was not built", file.display());
    file
}

/// Methods that an accelerator may do, with the variable that names its library.
fn accelerated() -> impl Iterator<Item = (&'static MethodInfo, &'static str)> {
    METHODS
        .iter()
        .filter_map(|method| Some((method, method.hardware?.variable)))
}

/// Migrates the built-in guest on a device that behaves so; the run's figures, and all that was said.
fn demo(method: &str, variables: &[(&str, &str)], flags: &[&str]) -> (Value, String) {
    let folder = tempfile::tempdir().expect("a folder");
    let file = folder.path().join("run.json");
    let (json, method) = (
        format!("--json={}", file.display()),
        format!("--method={method}"),
    );
    let mut args = vec!["demo", "--ram=64M", "--rate=2000", &json, &method];
    args.extend(flags);
    let (status, said) = Hotlift::start_with(&args, variables).wait();
    let said = said.join("\n");
    assert!(status.success(), "{said}");
    let text = std::fs::read_to_string(&file).expect("the JSON was written");
    let mut runs: Vec<Value> = serde_json::from_str(&text).expect("runs");
    let run = runs.pop().expect("a run");
    assert_eq!(run["verified"], true, "{said}");
    (run, said)
}

fn count(run: &Value, side: &str, what: &str) -> u64 {
    run[side]["jobs"][what].as_u64().expect("a count")
}

#[test]
fn a_sound_device_does_it_all_and_is_named() {
    let library = simulated();
    let library = library.to_str().expect("a path");
    for (method, variable) in accelerated() {
        let (run, said) = demo(method.name, &[(variable, library)], &[]);
        for side in ["source", "destination"] {
            assert!(count(&run, side, "hardware") > 100, "{side}: {said}");
            // The receiver copies a page that has come as it is.
            let raw = match side {
                "source" => 0,
                _ => count(&run, side, "raw_pages"),
            };
            assert_eq!(count(&run, side, "software"), raw, "{side}: {said}");
            assert_eq!(run[side]["jobs"]["fallback"], Value::Null, "{said}");
            let devices = run[side]["jobs"]["devices"].to_string();
            assert!(devices.contains("simulated"), "{side}: {devices}");
        }
        assert!(!said.contains("runs on the CPU"), "{said}");
    }
}

#[test]
fn a_device_that_dies_in_a_round_ends_in_software_and_no_page_is_lost() {
    let library = simulated();
    let library = library.to_str().expect("a path");
    for (method, variable) in accelerated() {
        for how in ["die=300", "error=5 fault=3", "wrong=7 busy=4"] {
            // Members are fewer than pages.
            let how = match method.name {
                "qatzip" => how.replace("300", "40"),
                _ => how.to_owned(),
            };
            let variables = [(variable, library), ("HOTLIFT_SIMULATED", &how)];
            let (run, said) = demo(method.name, &variables, &[]);
            for side in ["source", "destination"] {
                let hardware = count(&run, side, "hardware");
                let software = count(&run, side, "software");
                assert!(
                    hardware > 0 && software > 0,
                    "{} {how} {side}: {said}",
                    method.name
                );
            }
            if how.starts_with("die") {
                let why = run["source"]["jobs"]["fallback"]
                    .as_str()
                    .expect("a reason");
                assert!(said.contains("the CPU goes on"), "{said}");
                assert!(said.contains(why), "{said}");
            }
        }
    }
}

#[test]
fn without_a_device_the_cpu_does_it_and_that_is_said_once() {
    for (method, variable) in accelerated() {
        let variables = [(variable, "/nonexistent/library.so")];
        let (run, said) = demo(method.name, &variables, &[]);
        assert_eq!(count(&run, "source", "hardware"), 0);
        assert!(count(&run, "source", "software") > 100);
        let warnings = said.lines().filter(|line| line.contains("runs on the CPU"));
        let warnings: Vec<_> = warnings.collect();
        assert_eq!(warnings.len(), 1, "{said}");
        assert!(warnings[0].contains("/nonexistent/library.so"), "{said}");

        let (run, said) = demo(method.name, &variables, &["--accelerator=off"]);
        assert_eq!(run["source"]["jobs"]["fallback"], Value::Null);
        assert!(!said.contains("runs on the CPU"), "{said}");
    }
}

#[test]
fn what_is_required_and_missing_is_refused_before_anything_is_opened() {
    for (method, variable) in accelerated() {
        let method = format!("--method={}", method.name);
        let args = ["demo", "--ram=64M", "--accelerator=required", &method];
        let variables = [(variable, "/nonexistent/library.so")];
        let (status, said) = Hotlift::start_with(&args, &variables).wait();
        assert_eq!(status.code(), Some(2), "{}", said.join("\n"));
        let said = said.join("\n");
        assert!(said.contains("/nonexistent/library.so"), "{said}");
        assert!(said.contains("hotlift accel"), "{said}");
    }
    let args = [
        "demo",
        "--ram=64M",
        "--accelerator=required",
        "--method=zstd",
    ];
    let (status, said) = Hotlift::start(&args).wait();
    assert_eq!(status.code(), Some(2), "{}", said.join("\n"));
    let said = said.join("\n");
    assert!(said.contains("hotlift methods"), "{said}");
}

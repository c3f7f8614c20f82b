//! Tests methods on simulated accelerators. Reports name the engine that did the work, and a failing device loses no
//! page.

use std::path::PathBuf;

use hotlift_accel::HARDWARE;
use hotlift_methods::{METHODS, MethodInfo, method};
use serde_json::Value;

use crate::hotlift::Hotlift;

/// Returns the library of `hotlift-simulated`, which cargo puts beside the tests.
fn simulated() -> PathBuf {
    let test = std::env::current_exe().expect("the test's own file");
    let file = test.with_file_name("libhotlift_simulated.so");
    assert!(file.exists(), "{} was not built", file.display());
    file
}

/// Returns the methods with accelerators, and the variables that name their libraries.
fn accelerated() -> impl Iterator<Item = (&'static MethodInfo, &'static str)> {
    HARDWARE
        .iter()
        .filter_map(|hardware| Some((method(hardware.method)?, hardware.variable)))
}

/// Migrates the built-in guest with a simulated device; returns the run's figures and all output.
fn demo(method: &str, variables: &[(&str, &str)], flags: &[&str]) -> (Value, String) {
    let folder = tempfile::tempdir().expect("a folder");
    let file = folder.path().join("run.json");
    let (json, method) = (
        format!("--json={}", file.display()),
        format!("--method={method}"),
    );
    let mut args = vec!["demo", "--ram=64M", &json, &method];
    if !flags
        .iter()
        .any(|flag| flag.starts_with("--rate") || flag.starts_with("--workload"))
    {
        args.push("--rate=2000");
    }
    args.extend(flags);
    let (status, output) = Hotlift::start_with(&args, variables).wait();
    let output = output.join("\n");
    assert!(status.success(), "{output}");
    let text = std::fs::read_to_string(&file).expect("the JSON was written");
    let mut runs: Vec<Value> = serde_json::from_str(&text).expect("runs");
    let run = runs.pop().expect("a run");
    assert_eq!(run["verified"], true, "{output}");
    (run, output)
}

fn count(run: &Value, side: &str, what: &str) -> u64 {
    run[side]["jobs"][what].as_u64().expect("a count")
}

#[test]
fn a_working_device_does_all_jobs_and_is_named() {
    let library = simulated();
    let library = library.to_str().expect("a path");
    for (method, variable) in accelerated() {
        let (run, output) = demo(method.name, &[(variable, library)], &[]);
        for side in ["source", "destination"] {
            assert!(count(&run, side, "hardware") > 100, "{side}: {output}");
            // The receiver copies a page that arrives uncompressed.
            let raw = match side {
                "source" => 0,
                _ => count(&run, side, "raw_pages"),
            };
            assert_eq!(count(&run, side, "software"), raw, "{side}: {output}");
            assert_eq!(run[side]["jobs"]["fallback"], Value::Null, "{output}");
            let devices = run[side]["jobs"]["devices"].to_string();
            assert!(devices.contains("simulated"), "{side}: {devices}");
        }
        assert!(!output.contains("CPU is used instead"), "{output}");
    }
}

#[test]
fn a_device_lost_in_a_round_falls_back_to_software_without_losing_pages() {
    let library = simulated();
    let library = library.to_str().expect("a path");
    for (method, variable) in accelerated() {
        for how in ["die=300", "error=5 fault=3", "wrong=7 busy=4"] {
            // There are fewer members than pages.
            let how = match method.name {
                "qatzip" => how.replace("300", "40"),
                _ => how.to_owned(),
            };
            let variables = [(variable, library), ("HOTLIFT_SIMULATED", &how)];
            let (run, output) = demo(method.name, &variables, &[]);
            for side in ["source", "destination"] {
                let hardware = count(&run, side, "hardware");
                let software = count(&run, side, "software");
                assert!(
                    hardware > 0 && software > 0,
                    "{} {how} {side}: {output}",
                    method.name
                );
            }
            if how.starts_with("die") {
                let why = run["source"]["jobs"]["fallback"]
                    .as_str()
                    .expect("a reason");
                assert!(output.contains("accelerator failed"), "{output}");
                assert!(output.contains(why), "{output}");
            }
        }
    }
}

#[test]
fn without_a_device_the_cpu_is_used_and_this_is_reported_once() {
    for (method, variable) in accelerated() {
        let variables = [(variable, "/nonexistent/library.so")];
        let (run, output) = demo(method.name, &variables, &[]);
        assert_eq!(count(&run, "source", "hardware"), 0);
        assert!(count(&run, "source", "software") > 100);
        let warnings = output
            .lines()
            .filter(|line| line.contains("CPU is used instead"));
        let warnings: Vec<_> = warnings.collect();
        assert_eq!(warnings.len(), 1, "{output}");
        assert!(warnings[0].contains("/nonexistent/library.so"), "{output}");

        let (run, output) = demo(method.name, &variables, &["--accelerator=off"]);
        assert_eq!(run["source"]["jobs"]["fallback"], Value::Null);
        assert!(!output.contains("CPU is used instead"), "{output}");
    }
}

#[test]
fn a_required_device_that_is_missing_is_refused_before_anything_is_opened() {
    for (method, variable) in accelerated() {
        let method = format!("--method={}", method.name);
        let args = ["demo", "--ram=64M", "--accelerator=required", &method];
        let variables = [(variable, "/nonexistent/library.so")];
        let (status, output) = Hotlift::start_with(&args, &variables).wait();
        assert_eq!(status.code(), Some(2), "{}", output.join("\n"));
        let output = output.join("\n");
        assert!(output.contains("/nonexistent/library.so"), "{output}");
        assert!(output.contains("hotlift accel"), "{output}");
    }
    let args = [
        "demo",
        "--ram=64M",
        "--accelerator=required",
        "--method=zstd",
    ];
    let (status, output) = Hotlift::start(&args).wait();
    assert_eq!(status.code(), Some(2), "{}", output.join("\n"));
    let output = output.join("\n");
    assert!(output.contains("hotlift methods"), "{output}");
}

/// Checks that simulated devices and the CPU find the same zero pages in the same guest.
#[test]
fn devices_find_the_same_zero_pages_as_the_cpu() {
    let still = ["--workload=idle", "--seed=7"];
    let (by_cpu, _) = demo("none", &[], &still);
    for (paths, all_by_devices) in [
        ("dsa-model:", true),
        ("dsa-model:shuffled=1:max-batch=16 dsa-model:seed=2", true),
        ("dsa-model:fault=50:full=200:seed=3", false),
        (
            "dsa-model:list-fault=300:seed=4 dsa-model:max-batch=0",
            false,
        ),
        ("dsa-model:fail=20:seed=5", false),
        ("dsa-model:silent=100:seed=6", false),
    ] {
        let path = format!("--accel-path={paths}");
        let mut flags = vec!["--zero-page-detection=dsa-accel", &path];
        flags.extend(still);
        let (run, output) = demo("zstd", &[], &flags);
        assert_eq!(run["zero_pages"], by_cpu["zero_pages"], "{paths}: {output}");
        let jobs = &run["source"]["zero_jobs"];
        assert!(jobs["hardware"].as_u64() > Some(0), "{paths}: {output}");
        assert_eq!(jobs["software"] == 0, all_by_devices, "{paths}: {output}");
        assert!(output.contains("simulated DSA"), "{output}");
        assert!(output.contains("dsa_completion"), "{output}");
    }
}

/// Random numbers from a seed that a failure prints; `HOTLIFT_SEED=N` repeats them.
struct Draws(u64);

impl Draws {
    fn new() -> Self {
        let given = std::env::var("HOTLIFT_SEED").ok();
        let now = || std::time::UNIX_EPOCH.elapsed().expect("a clock").as_secs();
        let seed = given.map_or_else(now, |text| text.parse().expect("HOTLIFT_SEED is a number"));
        println!("HOTLIFT_SEED={seed}");
        Self(seed | 1 << 40)
    }

    fn below(&mut self, n: u64) -> u64 {
        // xorshift64: Marsaglia 2003.
        self.0 ^= self.0 << 13;
        self.0 ^= self.0 >> 7;
        self.0 ^= self.0 << 17;
        self.0 % n
    }

    /// Returns a device with a mix of all faults. The faults that end its service alternate, so that a few runs cover all of
    /// them.
    fn device(&mut self, turn: usize) -> String {
        let mut path = format!(
            "dsa-model:seed={}:fault={}:list-fault={}:full={}:shuffled={}:max-batch={}",
            self.below(1 << 30),
            self.below(200),
            self.below(300),
            self.below(400),
            self.below(2),
            [0, 2, 16, 128, 1024][usize::try_from(self.below(5)).expect("below 5")],
        );
        path += &match turn % 6 {
            0 => format!(":fail={}", 1 + self.below(20)),
            1 => format!(":silent={}", 1 + self.below(100)),
            2 => format!(":dies={}", 1 + self.below(60)),
            3 => format!(":late={}", 1 + self.below(200)),
            4 => ":late=1300000".to_owned(),
            _ => ":unmapped=1:unbatched=1".to_owned(),
        };
        path
    }
}

/// Page faults, failing members, faulting lists, full queues, late, overdue, reordered or lost answers, death, and a refusing
/// kernel: the zero pages match the CPU's, and the guest is intact.
#[test]
fn faults_at_random_change_neither_the_zero_pages_nor_the_guest() {
    let still = ["--workload=idle", "--seed=11", "--zero-touched"];
    let (by_cpu, _) = demo("none", &[], &still);
    let mut draws = Draws::new();
    for turn in 0..6 {
        let path = format!(
            "--accel-path={} {}",
            draws.device(turn),
            draws.device(turn + 3)
        );
        println!("{path}");
        let method = ["none", "zstd", "lz4"][turn % 3];
        let mut flags = vec!["--zero-page-detection=dsa-accel", &path];
        let (run, output) = demo(method, &[], &[&flags[..], &still].concat());
        assert_eq!(run["zero_pages"], by_cpu["zero_pages"], "{path}: {output}");
        let jobs = &run["source"]["zero_jobs"];
        assert!(jobs["software"].as_u64() > Some(0), "{path}: {output}");
        flags.push("--rate=20000");
        demo(method, &[], &flags);
    }
}

#[test]
fn a_failing_device_is_dropped_and_the_others_continue() {
    let path = "--accel-path=dsa-model:fail=1000 dsa-model:";
    let flags = ["--zero-page-detection=dsa-accel", path, "--rate=20000"];
    let (run, output) = demo("none", &[], &flags);
    let jobs = &run["source"]["zero_jobs"];
    assert_eq!(jobs["fallback"], "simulated DSA: status 0x20", "{output}");
    let count = |what: &str| jobs[what].as_u64().expect("a count");
    // Jobs that were in the device when it was abandoned.
    assert!(count("software") <= 4 * 128, "{output}");
    assert!(count("hardware") > 10 * count("software"), "{output}");
}

#[test]
fn a_writing_guest_arrives_intact_whatever_its_zero_page_devices_do() {
    for paths in [
        "dsa-model:",
        "dsa-model:fault=100:full=100:list-fault=100:shuffled=1",
    ] {
        let path = format!("--accel-path={paths}");
        for method in ["none", "zstd"] {
            let flags = ["--zero-page-detection=dsa-accel", &path, "--rate=20000"];
            demo(method, &[], &flags);
        }
    }
}

#[test]
fn a_missing_work_queue_means_the_cpu_or_an_error_as_configured() {
    let flags = [
        "--zero-page-detection=dsa-accel",
        "--accel-path=dsa:/dev/dsa/wq99.0",
    ];
    let (run, output) = demo("none", &[], &flags);
    assert!(run["zero_pages"].as_u64() > Some(1000), "{output}");
    assert!(output.contains("wq99.0 is not a work queue"), "{output}");
    let jobs = &run["source"]["zero_jobs"];
    assert_eq!(jobs["hardware"], 0, "{output}");
    assert!(jobs["software"].as_u64() > Some(1000), "{output}");

    let required = [
        "demo",
        "--ram=64M",
        flags[0],
        flags[1],
        "--accelerator=required",
    ];
    let (status, output) = Hotlift::start(&required).wait();
    assert_eq!(status.code(), Some(1), "{}", output.join("\n"));
    assert!(output.join("\n").contains("wq99.0 is not a work queue"));

    let (status, output) = Hotlift::start(&required[..3]).wait();
    assert_eq!(status.code(), Some(2), "{}", output.join("\n"));
    assert!(output.join("\n").contains("accel-path"));
}

#[test]
fn a_relay_refuses_options_that_need_access_to_guest_memory() {
    for command in [
        &[
            "relay",
            "source",
            "--listen=tcp:127.0.0.1:0",
            "--connect=tcp:127.0.0.1:1",
            "--forever",
        ][..],
        &[
            "migrate",
            "--quiet",
            "--qmp=/nonexistent",
            "--to=tcp:127.0.0.1:1",
        ],
        &["save", "--quiet", "--qmp=/nonexistent", "/nonexistent/file"],
    ] {
        for asked in [
            &["--zero-page-detection=dsa-accel", "--accel-path=dsa-model:"][..],
            &["--zero-page-detection=dsa-accel"],
            &["--multifd-packet-size=1M"],
            &["--multifd-packet-size=64K"],
            &["--multifd-normal-page-ratio=50"],
        ] {
            let args = [command, asked].concat();
            let (status, output) = Hotlift::start(&args).wait();
            let output = output.join("\n");
            assert_eq!(status.code(), Some(2), "{args:?}: {output}");
            assert!(
                output.contains("' does not take --")
                    || output.contains("this command does not accept"),
                "{args:?}: {output}"
            );
            let name = args.iter().take_while(|word| !word.starts_with("--"));
            let name: Vec<_> = name.copied().take(2).collect();
            assert!(
                output.contains(&format!("hotlift {} --help", name.join(" "))),
                "{output}"
            );
        }
    }
}

#[test]
fn auto_uses_the_available_devices() {
    let library = simulated();
    let library = library.to_str().expect("a path");
    let variables: Vec<_> = accelerated().map(|(_, named)| (named, library)).collect();
    let slow = ["--max-bandwidth=8M", "--rate=0", "--workload=idle"];
    let moved = |flags: &[&str]| {
        let flags: Vec<&str> = slow.iter().chain(flags).copied().collect();
        demo("auto", &variables, &flags)
    };
    let (run, output) = moved(&[]);
    let devices = run["source"]["jobs"]["devices"].to_string();
    for device in METHODS.iter().filter_map(|method| method.hardware) {
        assert!(devices.contains(device), "{devices}: {output}");
    }
    let (run, _) = moved(&["--accelerator=off"]);
    assert_eq!(count(&run, "source", "hardware"), 0);
}

//! Tests `hotlift demo` as a user runs it.

use crate::hotlift::{Hotlift, errors};
use hotlift_methods::{AUTO, METHODS};
use rustix::process::Signal;
use serde_json::{Value, json};

/// Every key that a run in the JSON must have.
const KEYS: &[&str] = &[
    "guest",
    "workload",
    "method",
    "level",
    "channels",
    "zero_page_detection",
    "max_bandwidth",
    "ram_bytes",
    "status",
    "verified",
    "total_ms",
    "setup_ms",
    "downtime_ms",
    "rounds",
    "transferred_bytes",
    "throughput_mbps",
    "pages_per_second",
    "normal_pages",
    "zero_pages",
    "ratio",
    "source",
    "destination",
];

fn runs(path: &std::path::Path) -> Vec<Value> {
    let text = std::fs::read_to_string(path).expect("the JSON was written");
    serde_json::from_str::<Vec<Value>>(&text).expect("an array of runs")
}

#[test]
fn without_flags_every_method_migrates_and_the_figures_are_kept() {
    let folder = tempfile::tempdir().unwrap();
    let json = folder.path().join("runs.json");
    let flags = format!("--json={}", json.display());
    let demo = Hotlift::start(&["demo", "--ram=64M", "--quiet", &flags]);
    let (status, output) = demo.wait();
    assert!(status.success(), "{}", output.join("\n"));
    let runs = runs(&json);
    let methods: Vec<_> = runs.iter().map(|run| run["method"].clone()).collect();
    let known: Vec<_> = METHODS
        .iter()
        .chain([&AUTO])
        .map(|method| method.name)
        .collect();
    assert_eq!(methods, known);
    for run in &runs {
        for key in KEYS {
            assert!(run.get(key).is_some(), "{key} is missing");
        }
        assert_eq!(run["verified"], true);
        assert_eq!(run["status"], "completed");
        for side in ["source", "destination"] {
            let threads = run[side]["threads"].as_array().unwrap();
            let sum: f64 = threads.iter().map(|t| t["cpu_s"].as_f64().unwrap()).sum();
            let whole = run[side]["cpu_s"].as_f64().unwrap();
            assert!((sum - whole).abs() < 1e-6, "{side}: {sum} of {whole}");
            assert!(threads.len() >= 3, "{side}: {threads:?}");
        }
        let pages = run["normal_pages"].as_u64().unwrap() + run["zero_pages"].as_u64().unwrap();
        assert!(pages >= (64 << 20) / 4096, "{pages} pages");
        assert!(run["rounds"].as_u64().unwrap() >= 2);
    }
    let table = output.join("\n");
    for words in ["mig/src/send_0", "mig/dst/recv_1", "core-s/GiB", "verified"] {
        assert!(table.contains(words), "no {words} in\n{table}");
    }
}

#[test]
fn one_setting_migrates_as_often_as_asked_with_either_guest() {
    let folder = tempfile::tempdir().unwrap();
    for guest in ["threads", "auto"] {
        let json = folder.path().join(format!("{guest}.json"));
        let (guest, file) = (
            format!("--guest={guest}"),
            format!("--json={}", json.display()),
        );
        let demo = Hotlift::start(&[
            "demo",
            "--ram=32M",
            "--method=zstd",
            "--level=3",
            "--channels=3",
            "--repeat=2",
            "--vcpus=2",
            "--workload=hotset",
            "--mem-prealloc=on",
            "--quiet",
            &guest,
            &file,
        ]);
        let (status, output) = demo.wait();
        assert!(status.success(), "{}", output.join("\n"));
        let runs = runs(&json);
        assert_eq!(runs.len(), 2);
        for run in runs {
            assert_eq!(
                (&run["channels"], &run["level"], &run["verified"]),
                (&3.into(), &3.into(), &true.into())
            );
            assert_eq!(run["options"], json!({ "mem-prealloc": "on" }));
        }
        assert!(
            output.contains(&"with mem-prealloc=on".to_owned()),
            "{output:?}"
        );
    }
}

#[test]
fn values_out_of_range_are_refused_with_the_range() {
    for (flag, expected) in [
        ("--channels=0", "between 1 and 255"),
        ("--multifd-zlib-level=10", "between 0 and 9"),
        ("--multifd-zstd-level=21", "between 0 and 20"),
        ("--downtime-limit=2000001", "between 0 and 2000000"),
        ("--max-bandwidth=fast", "suffix K, M, G or T"),
        ("--zero-page-detection=dsa", "none, legacy, multifd"),
        ("--method=lz5", "none, zlib, zstd"),
        ("--multifd=perhaps", "on, off"),
        ("--vcpus=9", "1..=8"),
        ("--vcpus=0", "1..=8"),
        ("--zero-share=1.5", "from 0 to 1"),
        ("--repeat=0", "1.."),
        ("--ram=1M", "8.0 MiB"),
        ("--working-set=2G", "working set of 2147483648 bytes"),
        ("--zero-copy-send=on", "needs multifd-compression=none"),
        (
            "--accel-path=dsa-model:",
            "needs zero-page-detection=dsa-accel",
        ),
    ] {
        let (status, output) = Hotlift::start(&["demo", flag]).wait();
        assert_eq!(status.code(), Some(2), "{flag}: {output:?}");
        let line = errors(&output)[0];
        assert!(line.contains(expected), "{flag}: {line}");
        let text = output.join("\n");
        assert!(text.contains("'hotlift demo --help'"), "{flag}: {text}");
        assert!(!text.contains("verified"), "{flag}: {text}");
    }
}

#[test]
fn an_interrupted_demo_shows_measured_values_and_the_reason() {
    let folder = tempfile::tempdir().unwrap();
    let json = folder.path().join("runs.json");
    let file = format!("--json={}", json.display());
    let slow = [
        "demo",
        "--guest=threads",
        "--ram=64M",
        "--method=none",
        "--max-bandwidth=2M",
        &file,
    ];
    let mut demo = Hotlift::start(&slow);
    // The child prints each report before it sends it.
    for _ in 0..2 {
        demo.wait_for("none active: round 1");
    }
    demo.signal(Signal::INT);
    let (status, output) = demo.wait();
    assert_eq!(status.code(), Some(130), "{output:?}");
    assert_eq!(errors(&output), ["hotlift: interrupted"]);
    let row = output
        .iter()
        .find(|line| line.contains("interrupted "))
        .unwrap();
    assert!(
        !output.iter().any(|line| line.contains("failed")),
        "{output:?}"
    );
    let shown: Vec<_> = row.split('┆').map(str::trim).collect();
    assert_eq!(shown[3], "-", "no downtime: {row}");
    let runs = runs(&json);
    assert_eq!(runs[0]["status"], "interrupted");
    assert!(runs[0]["transferred_bytes"].as_u64() > Some(0));
}

#[test]
fn a_demo_that_cannot_start_fails_with_the_reason() {
    for (flags, expected) in [
        (["--fill=/nonexistent", "--quiet"], "/nonexistent"),
        (
            ["--json=/nonexistent/x.json", "--ram=16M"],
            "/nonexistent/x.json",
        ),
    ] {
        let args = ["demo", "--method=none", flags[0], flags[1]];
        let (status, output) = Hotlift::start(&args).wait();
        assert_eq!(status.code(), Some(1), "{flags:?}");
        let errors = errors(&output);
        assert!(
            errors.iter().any(|line| line.contains(expected)),
            "{flags:?}: {errors:?}"
        );
    }
}

use std::collections::BTreeMap;
use std::path::Path;
use std::process::Command;

use hotlift::figures::SideFigures;

use super::super::record::tests::example;
use super::super::record::{Completed, Engine, Outcome, Record};
use super::*;

/// A name that would run a script if the report did not escape it.
const HOSTILE: &str =
    "</title><script>console.error('ran')</script><img src=x onerror=alert(1)>&\"'";

fn side(cpu_s: f64, core_s_per_gib: f64) -> SideFigures {
    SideFigures {
        cpu_s,
        cpu_percent: 80.0,
        core_s_per_gib,
        ..SideFigures::default()
    }
}

/// Returns invented runs, in the proportions of real ones: methods, bandwidths, repeats, a QEMU, a failed run.
fn records() -> Vec<Record> {
    let methods = [
        ("none", None, 0.35, 0.55, 1.0),
        ("lz4", None, 2.4, 1.0, 2.05),
        ("zlib", Some(1), 4.0, 2.6, 3.1),
        ("zstd", Some(1), 5.2, 2.1, 3.3),
    ];
    let rates = [25_000_000, 125_000_000, 1_250_000_000, 0];
    let mut records = Vec::new();
    for repeat in 1..=3 {
        for (method, level, source, destination, ratio) in methods {
            for rate in rates {
                for engine in [Engine::Hotlift, Engine::Qemu] {
                    let known = ["none", "zstd"].contains(&method) && rate == 0;
                    if engine == Engine::Qemu && !known {
                        continue;
                    }
                    let slower =
                        if engine == Engine::Qemu { 1.3 } else { 1.0 } + f64::from(repeat) / 50.0;
                    let gib = 0.75;
                    let wire = if rate == 0 {
                        0.0
                    } else {
                        gib * 1_073_741_824.0 / ratio / rate as f64
                    };
                    let total = wire.max((source + destination) * gib / 2.0) * slower;
                    let mut record = example();
                    record.repeat = repeat;
                    record.row.engine = engine;
                    record.row.method = method.to_owned();
                    record.row.level = level;
                    record.row.max_bandwidth = rate;
                    let mut run = Completed {
                        verified: Some(true),
                        ..Completed::default()
                    };
                    run.source.total_ms = total * 1e3;
                    run.source.downtime_ms = 20.0 + 10.0 * source * slower;
                    run.source.rounds = 3;
                    run.source.ratio = ratio;
                    run.source.transferred_bytes = 300_000_000;
                    run.source.side = side(source * slower * gib, source * slower);
                    run.destination.side = side(destination * slower * gib, destination * slower);
                    record.outcome = Outcome::Completed(Box::new(run));
                    records.push(record);
                }
            }
        }
    }
    let mut failed = example();
    failed.row.method = "qatzip".to_owned();
    failed.outcome = Outcome::Failed {
        error: HOSTILE.to_owned(),
    };
    records.push(failed);
    records
}

fn count(text: &str, what: &str) -> usize {
    text.matches(what).count()
}

#[test]
fn the_report_has_every_chart_with_its_table_and_no_external_resource() {
    let html = html(&records());
    // Two crossover pictures with a line for each method.
    assert_eq!(count(&html, "<svg class=\"lines\""), 2);
    assert_eq!(count(&html, "<path class=\"line\""), 4 + 4);
    // Total time, downtime and CPU at four link rates.
    assert_eq!(count(&html, "<table class=\"bars\""), 4 * 3);
    for words in [
        "Where methods cross",
        "Fastest, by wire: zstd 1, 2 ch (200 Mbit/s); zlib 1, 2 ch (1 Gbit/s); none, 2 ch (10 Gbit/s to no limit).",
        "54 of 55 runs completed, all of them verified",
        "Hotlift / QEMU",
        "QEMU zstd 1, 2 ch",
        "no limit",
        "200 Mbit/s",
        "a CPU, 2 cores",
        "25 % zero (never touched)",
        "hotlift-bench",
    ] {
        assert!(html.contains(words), "{words}");
    }
    assert!(count(&html, "<details>") >= 6);
    for picture in html.split("<svg class=").skip(1) {
        assert!(picture.contains("role=\"img\" aria-labelledby=") && picture.contains("<desc id="));
    }
    for outside in [
        "http:", "https:", "src=\"", "href=\"h", "url(", "@import", "<script", "<img", "NaN", "inf",
    ] {
        assert!(!html.to_owned().contains(outside), "{outside}");
    }
}

#[test]
fn the_fastest_run_over_one_link_is_named() {
    let mut records = records();
    records.retain(|record| record.row.max_bandwidth == 125_000_000);
    let html = html(&records);
    assert!(html.contains("Fastest: zlib 1, 2 ch ("), "{html}");
    assert!(!html.contains("by wire"));
}

#[test]
fn results_of_different_machines_are_kept_apart() {
    let ours = records();
    let mut others = ours.clone();
    for record in &mut others {
        record.machine.cpu = "another CPU".to_owned();
        record.machine.load = 77.0;
    }
    let text = html(&[ours.clone(), others].concat());
    let (first, second) = text.split_once("Machine 2 of 2").expect("a part each");
    assert!(first.contains("Machine 1 of 2") && !first.contains("another CPU"));
    assert!(second.contains("another CPU") && !second.contains(">a CPU"));
    assert!(!first.contains("<dd>77.0</dd>") && second.contains("<dd>77.0</dd>"));
    // Medians of three runs, not of six.
    let bars = |text: &str| count(text, "<span class=\"bar\"");
    assert_eq!(bars(first), bars(&html(&ours)));
    assert_eq!(bars(first), bars(second));
}

#[test]
fn rows_that_differ_only_in_an_option_have_their_own_names_and_bars() {
    let mut records = records();
    let mut others = records.clone();
    for record in &mut others {
        let option = ("multifd-packet-size".to_owned(), "1M".to_owned());
        record.row.options = BTreeMap::from([option]);
    }
    let before = count(&html(&records), "<span class=\"bar\"");
    records.extend(others);
    let text = html(&records);
    assert!(text.contains("zstd 1, 2 ch, multifd-packet-size=1M"));
    // CPU time by thread is drawn for a limited number of rows only.
    assert!(count(&text, "<span class=\"bar\"") > before * 3 / 2);
}

#[test]
fn a_guest_of_almost_only_zero_pages_has_cpu_time_per_gib_of_all_pages() {
    let mut records = records();
    for record in &mut records {
        record.row.guest.zero_share = Some(1.0);
        if let Outcome::Completed(run) = &mut record.outcome {
            (run.source.normal_pages, run.source.zero_pages) = (3, 262_144);
            run.source.side.core_s_per_gib = 31556.0;
        }
    }
    let text = html(&records);
    assert!(text.contains("GiB of all pages"), "{text}");
    assert!(!text.contains("31556"));
}

#[test]
fn names_of_runs_cannot_become_markup() {
    let mut record = example();
    record.suite = HOSTILE.to_owned();
    record.time = HOSTILE.to_owned();
    record.row.method = HOSTILE.to_owned();
    record.row.zero_page_detection = HOSTILE.to_owned();
    record.row.link = Some(HOSTILE.to_owned());
    record.row.guest.fill = HOSTILE.to_owned();
    record.row.guest.kind = HOSTILE.to_owned();
    record.row.guest.workload = HOSTILE.to_owned();
    record.row.options = BTreeMap::from([(HOSTILE.to_owned(), HOSTILE.to_owned())]);
    record.machine.cpu = HOSTILE.to_owned();
    record.machine.kernel = HOSTILE.to_owned();
    record.machine.command = vec![HOSTILE.to_owned()];
    record.machine.destination = Some(HOSTILE.to_owned());
    record.machine.versions = BTreeMap::from([(HOSTILE.to_owned(), HOSTILE.to_owned())]);
    let mut run = Completed::default();
    run.source.side.jobs.devices = vec![HOSTILE.to_owned()];
    let mut failed = record.clone();
    failed.outcome = Outcome::Skipped {
        reason: HOSTILE.to_owned(),
    };
    record.outcome = Outcome::Completed(Box::new(run));
    let html = html(&[record, failed]);
    assert!(
        !html.contains("<script") && !html.contains("<img"),
        "{html}"
    );
    assert!(html.matches("&lt;script&gt;").count() > 10);
}

#[test]
fn a_report_without_successful_runs_is_complete() {
    let mut failed = example();
    failed.outcome = Outcome::Failed {
        error: "the link is down".to_owned(),
    };
    for records in [vec![], vec![failed]] {
        let html = html(&records);
        assert!(html.contains("What the figures are"));
        assert_eq!(html.contains("the link is down"), !records.is_empty());
    }
}

/// The report first states that a device was simulated, because its work is no measurement.
#[test]
fn simulated_devices_are_called_simulated() {
    let mut records = records();
    if let Outcome::Completed(run) = &mut records[0].outcome {
        run.source.side.jobs.devices = vec!["libqpl, simulated".to_owned()];
    }
    assert!(html(&records).contains("Simulated devices took part"));
}

#[test]
fn a_browser_shows_the_report_without_errors() {
    let Some(browser) = ["chromium", "chromium-browser", "google-chrome"]
        .into_iter()
        .find(|name| {
            let path = std::env::var_os("PATH").unwrap_or_default();
            std::env::split_paths(&path).any(|folder| folder.join(name).is_file())
        })
    else {
        hotlift_testkit::skip!("chromium", "not in PATH (package chromium, 80 MB)");
        return;
    };
    let folder = tempfile::TempDir::new().expect("a folder");
    let page = folder.path().join("report.html");
    std::fs::write(&page, html(&records())).expect("write");
    let run = |flags: &[&str]| {
        let output = Command::new(browser)
            .args([
                "--headless",
                "--no-sandbox",
                "--disable-gpu",
                "--disable-dev-shm-usage",
                "--enable-logging=stderr",
            ])
            .args([
                "--virtual-time-budget=2000",
                "--no-first-run",
                "--hide-scrollbars",
            ])
            .arg(format!(
                "--user-data-dir={}",
                folder.path().join("profile").display()
            ))
            .args(flags)
            .arg(format!("file://{}", page.display()))
            .output()
            .expect("the browser starts");
        let printed = String::from_utf8_lossy(&output.stderr).into_owned();
        assert!(output.status.success(), "{printed}");
        // A page that violates its own policy, or requests a missing file, logs an error on the console.
        let complaint =
            |line: &&str| line.contains(":CONSOLE") && !line.contains("source: chrome://");
        assert_eq!(printed.lines().find(complaint), None);
        String::from_utf8_lossy(&output.stdout).into_owned()
    };
    let dom = run(&["--dump-dom"]);
    assert_eq!(count(&dom, "<path class=\"line\""), 8, "{dom}");
    assert_eq!(count(&dom, "<svg class=\"lines\""), 2);
    assert!(count(&dom, "<span class=\"bar\"") > 30);
    assert!(!dom.contains("<script"));
    for (name, flags) in [
        ("light.png", ["--window-size=1200,2400", ""]),
        ("narrow.png", ["--window-size=420,2400", ""]),
        ("dark.png", ["--window-size=1200,2400", "--force-dark-mode"]),
    ] {
        let file = folder.path().join(name);
        let mut flags: Vec<&str> = flags.into_iter().filter(|flag| !flag.is_empty()).collect();
        let screenshot = format!("--screenshot={}", file.display());
        flags.push(&screenshot);
        run(&flags);
        let picture = std::fs::read(&file).expect("a picture");
        assert!(
            picture.starts_with(b"\x89PNG") && picture.len() > 20_000,
            "{name}: {} bytes",
            picture.len()
        );
    }
    // For a manual check.
    if let Some(keep) = std::env::var_os("HOTLIFT_KEEP_REPORT") {
        for entry in std::fs::read_dir(folder.path())
            .expect("a folder")
            .flatten()
        {
            if entry.path().is_file() {
                let _ = std::fs::copy(entry.path(), Path::new(&keep).join(entry.file_name()));
            }
        }
    }
}

//! `hotlift bench`, as a user runs it: small, and never for speed.

use std::path::Path;
use std::process::Command;

use serde_json::Value;

use crate::hotlift::{Hotlift, errors};

/// The smallest work that has more than one round.
const SMALL: &[&str] = &["bench", "--ram=32M", "--guest=threads", "--working-set=4M"];

/// A bench of [`SMALL`] with more flags, whose runs are kept in `folder`.
fn bench(folder: &Path, flags: &[&str]) -> Hotlift {
    let out = format!("--out={}", folder.display());
    let flags: Vec<&str> = SMALL.iter().chain(flags).copied().chain([&*out]).collect();
    Hotlift::start(&flags)
}

/// The kept runs; panics if a line is not whole.
fn kept(folder: &Path) -> Vec<Value> {
    let text = std::fs::read_to_string(folder.join("runs.jsonl")).expect("runs were kept");
    text.lines()
        .map(|line| serde_json::from_str(line).expect("a run a line"))
        .collect()
}

fn number(value: &Value) -> f64 {
    value
        .as_f64()
        .unwrap_or_else(|| panic!("{value} is no number"))
}

/// CPU sums, pages and bytes of a run that completed.
fn assert_adds_up(run: &Value) {
    let completed = &run["outcome"]["completed"];
    assert_eq!(completed["verified"], true, "{run}");
    let (source, destination) = (&completed["source"], &completed["destination"]);
    for side in [source, destination] {
        let threads = side["side"]["threads"].as_array().expect("threads");
        let sum: f64 = threads.iter().map(|one| number(&one["cpu_s"])).sum();
        assert!(
            (sum - number(&side["side"]["cpu_s"])).abs() < 1e-6,
            "{side}"
        );
    }
    for pages in ["normal_pages", "zero_pages"] {
        assert_eq!(source[pages], destination[pages], "{pages}");
    }
    let pages = number(&source["normal_pages"]) + number(&source["zero_pages"]);
    assert!(
        pages >= number(&run["row"]["guest"]["ram_bytes"]) / 4096.0 * 0.8,
        "{pages}"
    );
    let sent = number(&source["transferred_bytes"]);
    let content = number(&source["normal_pages"]) * 4096.0;
    assert!((number(&source["ratio"]) * sent - content).abs() <= content * 1e-6 + 1.0);
    let mut before = 0.0;
    for moment in completed["timeline"].as_array().expect("a timeline") {
        let now = number(&moment["transferred_bytes"]);
        assert!(before <= now && now <= sent * 1.01, "{moment}");
        before = now;
    }
}

#[test]
fn a_matrix_runs_every_cell_as_often_as_asked_and_its_figures_add_up() {
    let folder = tempfile::tempdir().unwrap();
    let flags = [
        "--method=none,zstd",
        "--workload=idle,random",
        "--repeats=2",
    ];
    let (status, said) = bench(folder.path(), &flags).wait();
    let said = said.join("\n");
    assert!(status.success(), "{said}");
    let runs = kept(folder.path());
    assert_eq!(runs.len(), 8);
    for (index, run) in runs.iter().enumerate() {
        assert_eq!(run["number"], index + 1);
        assert_adds_up(run);
        for key in ["cpu", "cores", "kernel", "load", "versions", "command"] {
            assert!(!run["machine"][key].is_null(), "{key}");
        }
    }
    // Interleaved: all cells of a repeat before any of the next.
    assert!(runs[..4].iter().all(|run| run["repeat"] == 1), "{said}");
    for words in ["[8/8]", "left", "zstd 1 random", "none idle", "median"] {
        assert!(said.contains(words), "no {words} in\n{said}");
    }
    // The same runs, the same table and the same report, from the file alone.
    let report = folder.path().join("report.html");
    let first = std::fs::read(&report).expect("a report");
    std::fs::remove_file(&report).unwrap();
    let file = format!("--kept={}", folder.path().join("runs.jsonl").display());
    let out = format!("--out={}", folder.path().display());
    let (status, again) = Hotlift::start(&["bench", &file, &out]).wait();
    assert!(status.success());
    for line in &again {
        assert!(said.contains(line.as_str()), "{line} is not in\n{said}");
    }
    assert!(std::fs::read(&report).unwrap() == first);
}

#[test]
fn a_dry_run_lists_cells_and_memory_and_runs_none() {
    let folder = tempfile::tempdir().unwrap();
    let out = folder.path().join("none");
    let (status, said) = bench(&out, &["--dry-run", "--channels=1,2"]).wait();
    assert!(status.success() && !out.exists(), "{said:?}");
    let last = said.last().expect("a sum");
    assert!(
        last.contains("8 cells, 24 runs") && last.contains("free"),
        "{last}"
    );
}

#[test]
fn a_cell_that_fails_costs_a_line_and_the_rest_goes_on() {
    let folder = tempfile::tempdir().unwrap();
    let flags = [
        "--method=none",
        "--fill=generated,/nonexistent",
        "--repeats=2",
    ];
    let (status, said) = bench(folder.path(), &flags).wait();
    assert_eq!(status.code(), Some(1));
    let why = errors(&said);
    let failed: Vec<_> = why
        .iter()
        .filter(|line| line.contains("/nonexistent"))
        .collect();
    assert_eq!(failed.len(), 1, "said once: {said:#?}");
    let runs = kept(folder.path());
    let good = runs
        .iter()
        .filter(|run| !run["outcome"]["completed"].is_null());
    assert_eq!((runs.len(), good.count()), (4, 2));
}

#[test]
fn a_signal_keeps_what_is_done_and_shows_it() {
    let folder = tempfile::tempdir().unwrap();
    let mut bench = bench(folder.path(), &["--method=none,zlib", "--repeats=1000"]);
    bench.wait_for("[3/2000]");
    bench.signal(rustix::process::Signal::INT);
    let (status, said) = bench.wait();
    assert_eq!(status.code(), Some(130), "{said:?}");
    assert!(kept(folder.path()).len() >= 3);
    assert!(said.iter().any(|line| line.contains("zlib 1")), "{said:#?}");
}

/// A small file system in memory, gone when it goes out of scope.
struct Tmpfs<'a>(&'a Path);

impl<'a> Tmpfs<'a> {
    /// At `folder`; says why not if it cannot be.
    fn mount(folder: &'a Path, size: &str) -> Option<Self> {
        let mut mount = Command::new("mount");
        mount.args(["-t", "tmpfs", "-o", &format!("size={size}"), "tmpfs"]);
        let mounted = mount
            .arg(folder)
            .status()
            .is_ok_and(|status| status.success());
        if !mounted {
            println!("not tested: a file system can be mounted by root only");
        }
        mounted.then_some(Self(folder))
    }
}

impl Drop for Tmpfs<'_> {
    fn drop(&mut self) {
        let _ = Command::new("umount").arg("-l").arg(self.0).status();
    }
}

#[test]
fn a_full_disk_costs_a_line_and_leaves_whole_lines() {
    let folder = tempfile::tempdir().unwrap();
    let Some(_tmpfs) = Tmpfs::mount(folder.path(), "8k") else {
        return;
    };
    let (status, said) = bench(folder.path(), &["--method=none", "--repeats=6"]).wait();
    assert_eq!(status.code(), Some(1));
    let full = said
        .iter()
        .filter(|line| line.contains("the bench goes on"));
    assert_eq!(full.count(), 1, "{said:#?}");
    assert!(kept(folder.path()).len() < 6);
    assert!(said.iter().any(|line| line.contains("[6/6]")), "{said:#?}");
}

#[test]
fn the_dsa_suite_has_threads_beside_the_published_and_says_what_is_no_device() {
    let folder = tempfile::tempdir().unwrap();
    let (status, said) = bench(folder.path(), &["--suite=dsa", "--repeats=1"]).wait();
    let said = said.join("\n");
    assert!(status.success(), "{said}");
    for words in [
        "live_migration",
        "multifdsend_7",
        "5657.58",
        "saving",
        "22 %",
    ] {
        assert!(said.contains(words), "no {words} in\n{said}");
    }
    if !Path::new("/dev/dsa").exists() {
        assert!(said.contains("no DSA device here"), "{said}");
    }
    let model = ["--suite=dsa", "--repeats=1", "--with=accel-path=dsa-model:"];
    let (status, said) = bench(folder.path(), &model).wait();
    let said = said.join("\n");
    assert!(status.success() && said.contains("simulated"), "{said}");
    kept(folder.path()).iter().for_each(assert_adds_up);
}

#[test]
fn the_other_suites_run_small() {
    let folder = tempfile::tempdir().unwrap();
    for (suite, words) in [
        ("multithread", "original way"),
        ("legacy-rework", "page faults"),
    ] {
        let suite = format!("--suite={suite}");
        let flags = [&*suite, "--repeats=1", "--rate=200"];
        let (status, said) = bench(folder.path(), &flags).wait();
        let said = said.join("\n");
        assert!(status.success() && said.contains(words), "{said}");
    }
    kept(folder.path()).iter().for_each(assert_adds_up);
    for suite in ["iaa", "qat"] {
        let suite = format!("--suite={suite}");
        let flags = [&*suite, "--dry-run"];
        let (status, said) = bench(folder.path(), &flags).wait();
        assert!(status.success(), "{said:#?}");
    }
}

#[test]
fn another_host_takes_the_guests_and_one_that_is_gone_costs_a_line() {
    let folder = tempfile::tempdir().unwrap();
    let mut serve = Hotlift::start(&["bench", "--serve=tcp:127.0.0.1:0"]);
    let line = serve.wait_for("waiting for");
    let port = line
        .split(';')
        .next()
        .and_then(|words| words.trim_end_matches('\'').rsplit(':').next())
        .expect("a port");
    let to = format!("--to=tcp:127.0.0.1:{port}");
    let flags = ["--method=none,zstd", "--repeats=1", &to];
    let (status, said) = bench(folder.path(), &flags).wait();
    assert!(status.success(), "{said:#?}");
    let runs = kept(folder.path());
    assert_eq!(runs.len(), 2);
    runs.iter().for_each(assert_adds_up);
    serve.wait_for("a run with");
    drop(serve);
    let (status, said) = bench(folder.path(), &flags).wait();
    assert_eq!(status.code(), Some(1));
    let why = errors(&said);
    assert!(
        why[0].contains("cannot reach 'hotlift bench --serve'"),
        "{why:?}"
    );
}

#[test]
fn a_link_is_no_faster_than_it_was_made() {
    let folder = tempfile::tempdir().unwrap();
    let flags = ["--method=none", "--repeats=1", "--link=200mbit"];
    let (status, said) = bench(folder.path(), &flags).wait();
    if said.iter().any(|line| line.contains("--link needs root")) {
        println!("not tested: network namespaces need root");
        return;
    }
    assert!(status.success(), "{said:#?}");
    let run = &kept(folder.path())[0];
    assert_adds_up(run);
    let source = &run["outcome"]["completed"]["source"];
    // The bucket and the queue may hold a tenth of so short a migration.
    assert!(number(&source["throughput_mbps"]) < 260.0, "{source}");
    let (status, said) = bench(folder.path(), &["--method=none", "--link=1gbit,2ms"]).wait();
    let no_netem = said.iter().any(|line| line.contains("no netem"));
    assert!(status.success() || no_netem, "{said:#?}");
}

#[test]
fn a_real_qemu_does_the_same_work_and_says_what_it_lacks() {
    let default = Path::new("/usr/bin/qemu-system-x86_64").to_owned();
    let ten = std::env::var_os("HOTLIFT_QEMU10").filter(|path| !path.is_empty());
    let ten = ten.map(|folder| Path::new(&folder).join("qemu-system-x86_64"));
    for program in [Some(default), ten].into_iter().flatten() {
        if !program.exists() || hotlift_vmm::kvm::usable().is_err() {
            println!("not tested: no {} or no KVM", program.display());
            continue;
        }
        let folder = tempfile::tempdir().unwrap();
        let qemu = format!("--with-qemu={}", program.display());
        let flags = [
            "--method=none,zstd,lz4,compress",
            "--workload=idle,random",
            "--rate=200",
            "--repeats=1",
            &qemu,
        ];
        let (status, said) = bench(folder.path(), &flags).wait();
        assert!(status.success(), "{}: {said:#?}", program.display());
        let runs = kept(folder.path());
        assert_eq!(runs.len(), 16);
        let of_qemu = |run: &&Value| run["row"]["engine"] == "qemu";
        let completed = |run: &&Value| !run["outcome"]["completed"].is_null();
        let good: Vec<&Value> = runs.iter().filter(of_qemu).filter(completed).collect();
        assert!(good.len() >= 4, "{said:#?}");
        for run in good {
            assert_eq!(run["outcome"]["completed"]["verified"], true, "{run}");
            let side = &run["outcome"]["completed"]["source"]["side"];
            let threads = side["threads"].as_array().expect("threads");
            let sum: f64 = threads.iter().map(|one| number(&one["cpu_s"])).sum();
            assert!((sum - number(&side["cpu_s"])).abs() < 1e-6, "{side}");
        }
        let lacks = errors(&said).iter().any(|line| line.contains("lz4"));
        assert!(lacks, "{said:#?}");
        assert!(
            said.iter().any(|line| line.contains("Hotlift / QEMU")),
            "{said:#?}"
        );
    }
}

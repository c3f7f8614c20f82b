//! Tests `hotlift-bench` as a user runs it. The runs are small, and their speed is not checked.

use std::path::Path;
use std::process::Command;

use hotlift_testkit::qemu::{self, Release};
use hotlift_testkit::running::{Running, errors};
use serde_json::Value;

/// The program. It finds the `hotlift` in its folder, which `cargo test --workspace` builds.
const PROGRAM: &str = env!("CARGO_BIN_EXE_hotlift-bench");

/// The smallest work that has more than one round.
const SMALL: &[&str] = &["--ram=32M", "--guest=threads", "--working-set=4M"];

/// Starts a bench of [`SMALL`] with more flags, which keeps its runs in `folder`.
fn bench(folder: &Path, flags: &[&str]) -> Running {
    let hotlift = Path::new(PROGRAM).with_file_name("hotlift");
    assert!(hotlift.exists(), "first: cargo build --package hotlift-cli");
    let out = format!("--out={}", folder.display());
    let flags: Vec<&str> = SMALL.iter().chain(flags).copied().chain([&*out]).collect();
    Running::start(PROGRAM, &flags, &[])
}

/// Returns the kept runs; panics if a line is incomplete.
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

/// Returns CPU seconds by name, from a list of threads.
fn threads(list: &Value) -> Vec<(&str, f64)> {
    let list = list.as_array().expect("threads");
    let thread = |one: &'_ Value| number(&one["cpu_s"]);
    list.iter()
        .map(|one| (one["name"].as_str().expect("a name"), thread(one)))
        .collect()
}

/// Checks the reported CPU time of threads against the kernel's count. The kernel's count is sampled every
/// 20 ms, so the end of a thread is missing.
fn assert_threads_are_the_kernels(reported: &[(&str, f64)], counted: &[(&str, f64)]) {
    for (name, seconds) in counted {
        let same = reported.iter().find(|(other, _)| other == name);
        let (_, output) = same.unwrap_or_else(|| panic!("{name} is not among {reported:?}"));
        assert!(
            *seconds <= output * 1.05 + 0.005,
            "{name}: {output} s, and the kernel has {seconds}"
        );
    }
    // A loaded machine samples less often; half a second is always seen in part.
    for (name, seconds) in reported.iter().filter(|(_, seconds)| *seconds > 0.5) {
        let same = counted.iter().find(|(other, _)| other == name);
        let (_, seen) = same.unwrap_or_else(|| panic!("the kernel does not have {name}"));
        assert!(*seen > seconds / 10.0, "{name}: {seconds} s, {seen} seen");
    }
}

/// Checks CPU, pages and bytes of a run that completed against independent counts: by the kernel, by the fill, by
/// the other side.
fn assert_adds_up(run: &Value) {
    let completed = &run["outcome"]["completed"];
    assert_eq!(completed["verified"], true, "{run}");
    let (source, destination) = (&completed["source"], &completed["destination"]);
    for (side, counted) in [
        (source, &completed["source_threads"]),
        (destination, &completed["destination_threads"]),
    ] {
        let reported = threads(&side["side"]["threads"]);
        assert_threads_are_the_kernels(&reported, &threads(counted));
        let sum: f64 = reported.iter().map(|(_, seconds)| seconds).sum();
        let cpu = number(&side["side"]["cpu_s"]);
        assert!((sum - cpu).abs() < 1e-6, "{side}");
    }
    let pages = |side: &Value| [&side["normal_pages"], &side["zero_pages"]].map(number);
    let [normal, zero] = pages(source);
    assert_eq!([normal, zero], pages(destination));
    let guest = &run["row"]["guest"];
    assert!(
        normal + zero >= number(&guest["ram_bytes"]) / 4096.0,
        "{run}"
    );
    let [data, empty] = ["data_pages", "zero_pages"].map(|name| number(&completed["filled"][name]));
    assert!(normal >= data, "{data} pages were filled, {normal} sent");
    if let Some(share) = guest["zero_share"].as_f64() {
        let counted = empty / (data + empty);
        assert!((counted - share).abs() < 0.01, "{counted} of the pages");
    }
    let sent = number(&source["transferred_bytes"]);
    let content = normal * 4096.0;
    // Headers take less than 2 %, zero pages 8 bytes each; the generated mix shrinks to half or less.
    let overhead = content * 0.02 + zero * 16.0 + f64::from(1 << 16);
    let (least, most) = match run["row"]["method"].as_str() {
        Some("none") => (content, content + overhead),
        _ => (content / 6.0, content * 0.75 + overhead),
    };
    assert!(
        (least..=most).contains(&sent),
        "{sent} bytes, {content} of pages"
    );
    let mut before = 0.0;
    for moment in completed["timeline"].as_array().expect("a timeline") {
        let now = number(&moment["transferred_bytes"]);
        assert!(before <= now && now <= sent, "{moment}");
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
    let (status, output) = bench(folder.path(), &flags).wait();
    let output = output.join("\n");
    assert!(status.success(), "{output}");
    let runs = kept(folder.path());
    assert_eq!(runs.len(), 8);
    for (index, run) in runs.iter().enumerate() {
        assert_eq!(run["number"], index + 1);
        assert_adds_up(run);
        for key in ["cpu", "cores", "kernel", "load", "versions", "command"] {
            assert!(!run["machine"][key].is_null(), "{key}");
        }
    }
    // Interleaved: all cells of a repeat run before any of the next.
    assert!(runs[..4].iter().all(|run| run["repeat"] == 1), "{output}");
    for words in ["[8/8]", "left", "zstd 1 random", "none idle", "median"] {
        assert!(output.contains(words), "no {words} in\n{output}");
    }
    // The file alone gives the same runs, table and report.
    let report = folder.path().join("report.html");
    let first = std::fs::read(&report).expect("a report");
    std::fs::remove_file(&report).unwrap();
    let file = format!("--kept={}", folder.path().join("runs.jsonl").display());
    let out = format!("--out={}", folder.path().display());
    let (status, again) = Running::start(PROGRAM, &[&file, &out], &[]).wait();
    assert!(status.success());
    for line in &again {
        assert!(output.contains(line.as_str()), "{line} is not in\n{output}");
    }
    assert!(std::fs::read(&report).unwrap() == first);
}

#[test]
fn the_command_is_found_next_to_the_program_or_on_path_or_by_its_flag() {
    let folder = tempfile::tempdir().unwrap();
    let alone = folder.path().join("hotlift-bench");
    std::fs::copy(PROGRAM, &alone).unwrap();
    let out = format!("--out={}", folder.path().join("out").display());
    let start = |flags: &[&str], path: &str| {
        let flags = [SMALL, &["--method=none", "--repeats=1", &out], flags].concat();
        Running::start(alone.to_str().unwrap(), &flags, &[("PATH", path)]).wait()
    };
    let (status, output) = start(&[], "/nonexistent");
    assert_eq!(status.code(), Some(1), "{output:?}");
    let why = errors(&output);
    assert!(why[0].contains("no program 'hotlift'"), "{why:?}");
    assert!(why[1].contains("--hotlift PATH"), "{why:?}");
    for (flag, problem) in [
        (
            "--hotlift=/nonexistent",
            "cannot run /nonexistent: No such file",
        ),
        (
            "--hotlift=/bin/true",
            "/bin/true does not print the version",
        ),
    ] {
        let (status, output) = start(&[flag], "/nonexistent");
        assert_eq!(status.code(), Some(1), "{output:?}");
        assert!(errors(&output)[0].contains(problem), "{output:?}");
    }
    let beside = Path::new(PROGRAM).parent().unwrap().to_str().unwrap();
    let by_flag = format!("--hotlift={beside}/hotlift");
    for (flags, path) in [(&[][..], beside), (&[&*by_flag], "/nonexistent")] {
        let (status, output) = start(flags, path);
        assert!(status.success(), "{output:#?}");
    }
}

#[test]
fn help_has_every_flag_and_the_manual_page_and_completions_too() {
    let (status, long) = Running::start(PROGRAM, &["--help"], &[]).wait();
    assert!(status.success(), "{long:?}");
    let (_, short) = Running::start(PROGRAM, &["-h"], &[]).wait();
    assert!(short.len() < long.len());
    let more = |output: &[String]| output.iter().any(|line| line.contains("shows all options"));
    assert!(more(&short) && !more(&long), "{short:#?}");
    let folder = tempfile::tempdir().unwrap();
    let manual = format!("--manual={}", folder.path().display());
    let (status, output) = Running::start(PROGRAM, &[&manual], &[]).wait();
    assert!(status.success() && output.is_empty(), "{output:?}");
    let flags = long.iter().filter_map(|line| {
        let flag = line.trim_start().strip_prefix("--")?;
        flag.split([' ', '[', ',']).next()
    });
    let flags: Vec<&str> = flags.collect();
    assert!(flags.len() > 20 && !flags.contains(&"manual"), "{flags:?}");
    for file in [
        "man/man1/hotlift-bench.1",
        "bash-completion/completions/hotlift-bench.bash",
        "zsh/site-functions/_hotlift-bench",
        "fish/vendor_completions.d/hotlift-bench.fish",
    ] {
        let text = std::fs::read_to_string(folder.path().join(file)).expect(file);
        let text = text.replace("\\-", "-");
        assert!(!text.contains("--manual"), "{file}");
        for flag in &flags {
            assert!(text.contains(flag), "{file}: {flag}");
        }
    }
}

#[test]
fn pause_before_switchover_is_refused_where_no_client_can_continue() {
    let flag = "--with=pause-before-switchover=off,on";
    let (status, output) = Running::start(PROGRAM, &[flag], &[]).wait();
    assert_eq!(status.code(), Some(2), "{output:?}");
    assert!(errors(&output)[0].contains("needs a monitor"), "{output:?}");
    let help = "'hotlift-bench --help'";
    assert!(output.iter().any(|line| line.contains(help)), "{output:?}");
}

#[test]
fn a_dry_run_lists_cells_and_memory_and_runs_none() {
    let folder = tempfile::tempdir().unwrap();
    let out = folder.path().join("none");
    let (status, output) = bench(&out, &["--dry-run", "--channels=1,2"]).wait();
    assert!(status.success() && !out.exists(), "{output:?}");
    let last = output.last().expect("a sum");
    assert!(
        last.contains("8 cells, 24 runs") && last.contains("free"),
        "{last}"
    );
}

#[test]
fn a_failed_cell_is_one_line_and_the_others_run() {
    let folder = tempfile::tempdir().unwrap();
    let flags = [
        "--method=none",
        "--fill=generated,/nonexistent",
        "--repeats=2",
    ];
    let (status, output) = bench(folder.path(), &flags).wait();
    assert_eq!(status.code(), Some(1));
    let why = errors(&output);
    let failed: Vec<_> = why
        .iter()
        .filter(|line| line.contains("/nonexistent"))
        .collect();
    assert_eq!(failed.len(), 1, "printed once: {output:#?}");
    let runs = kept(folder.path());
    let good = runs
        .iter()
        .filter(|run| !run["outcome"]["completed"].is_null());
    assert_eq!((runs.len(), good.count()), (4, 2));
}

#[test]
fn a_signal_keeps_and_shows_the_finished_runs() {
    let folder = tempfile::tempdir().unwrap();
    let mut bench = bench(folder.path(), &["--method=none,zlib", "--repeats=1000"]);
    bench.wait_for("[3/2000]");
    bench.signal(rustix::process::Signal::INT);
    let (status, output) = bench.wait();
    assert_eq!(status.code(), Some(130), "{output:?}");
    assert!(kept(folder.path()).len() >= 3);
    // In the table, not only in the progress.
    let shown = |line: &String| line.starts_with('│') && line.contains("zlib 1");
    assert!(output.iter().any(shown), "{output:#?}");
    assert!(folder.path().join("report.html").exists());
}

/// A small file system in memory, unmounted on drop.
struct Tmpfs<'a>(&'a Path);

impl<'a> Tmpfs<'a> {
    /// Mounts it at `folder`; prints the reason if that fails.
    fn mount(folder: &'a Path, size: &str) -> Option<Self> {
        let mut mount = Command::new("mount");
        mount.args(["-t", "tmpfs", "-o", &format!("size={size}"), "tmpfs"]);
        let mounted = mount
            .arg(folder)
            .status()
            .is_ok_and(|status| status.success());
        if !mounted {
            hotlift_testkit::skip!("root", "only root can mount a file system");
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
fn a_full_disk_loses_one_line_and_leaves_no_partial_line() {
    let folder = tempfile::tempdir().unwrap();
    let Some(_tmpfs) = Tmpfs::mount(folder.path(), "8k") else {
        return;
    };
    let (status, output) = bench(folder.path(), &["--method=none", "--repeats=6"]).wait();
    assert_eq!(status.code(), Some(1));
    let full = output
        .iter()
        .filter(|line| line.contains("the bench continues"));
    assert_eq!(full.count(), 1, "{output:#?}");
    assert!(kept(folder.path()).len() < 6);
    assert!(
        output.iter().any(|line| line.contains("[6/6]")),
        "{output:#?}"
    );
}

/// Writes a memory image of 16 MiB, in which every other page is zero.
fn image(path: &Path) {
    let page = |number: u32| match number % 2 {
        0 => [0; 4096],
        _ => std::array::from_fn(|at| [number.to_le_bytes()[at % 4], b"image"[at % 5]][at % 2]),
    };
    let bytes: Vec<u8> = (0..4096).flat_map(page).collect();
    std::fs::write(path, bytes).unwrap();
}

#[test]
fn a_memory_image_keeps_its_own_zero_pages_and_runs_and_report_mention_it() {
    let folder = tempfile::tempdir().unwrap();
    let path = folder.path().join("ram.img");
    image(&path);
    let fill = format!("--fill={}", path.display());
    let flags = ["--method=none", "--repeats=1", &fill];
    let (status, output) = bench(folder.path(), &flags).wait();
    assert!(status.success(), "{output:#?}");
    let run = &kept(folder.path())[0];
    assert_adds_up(run);
    let guest = &run["row"]["guest"];
    assert_eq!(guest["fill"], path.display().to_string());
    assert!(guest["zero_share"].is_null());
    let filled = &run["outcome"]["completed"]["filled"];
    let [data, zero] = ["data_pages", "zero_pages"].map(|name| number(&filled[name]));
    assert!((data / zero - 1.0).abs() < 0.02, "{filled}");
    assert!((1.5..2.1).contains(&number(&filled["laid"])), "{filled}");
    let report = std::fs::read_to_string(folder.path().join("report.html")).unwrap();
    for words in ["ram.img", "50.0 % zero pages", "perturbed"] {
        assert!(report.contains(words), "no {words}");
    }
    // With a given share of zero pages, the image is treated as the files of a folder.
    let flags = ["--method=none", "--repeats=1", &fill, "--zero-share=0.75"];
    let (status, output) = bench(folder.path(), &flags).wait();
    assert!(status.success(), "{output:#?}");
    let filled = &kept(folder.path())[1]["outcome"]["completed"]["filled"];
    assert!(number(&filled["zero_pages"]) > 3.0 * number(&filled["data_pages"]));
    std::fs::write(&path, "").unwrap();
    let (status, output) = bench(folder.path(), &["--method=none", &fill]).wait();
    assert_eq!(status.code(), Some(1));
    let why = errors(&output);
    assert!(
        why[0].contains("ram.img") && why[0].contains("is empty"),
        "{why:?}"
    );
}

#[test]
fn a_signal_ends_the_wait_for_a_host_that_does_not_answer() {
    let folder = tempfile::tempdir().unwrap();
    // The listener never accepts, and the queue is full: the next connection gets no answer.
    let listener = rustix::net::socket(
        rustix::net::AddressFamily::INET,
        rustix::net::SocketType::STREAM,
        None,
    )
    .unwrap();
    let local = std::net::SocketAddrV4::new(std::net::Ipv4Addr::LOCALHOST, 0);
    rustix::net::bind(&listener, &local).unwrap();
    rustix::net::listen(&listener, 0).unwrap();
    let listener = std::net::TcpListener::from(listener);
    let address = listener.local_addr().unwrap();
    let answered = |_| {
        let time = std::time::Duration::from_millis(200);
        std::net::TcpStream::connect_timeout(&address, time).ok()
    };
    let _queue: Vec<_> = (0..64).map_while(answered).collect();
    let to = format!("--to=tcp:{address}");
    let bench = bench(folder.path(), &["--method=none", "--repeats=1", &to]);
    let pid = bench.pid();
    let connects = |pid: i32| {
        let sockets = std::fs::read_to_string(format!("/proc/{pid}/net/tcp")).unwrap_or_default();
        let port = format!(":{:04X} 02", address.port());
        sockets.lines().any(|line| line.contains(&port))
    };
    let deadline = std::time::Instant::now() + std::time::Duration::from_secs(60);
    while !connects(pid) {
        assert!(std::time::Instant::now() < deadline, "it does not connect");
        std::thread::yield_now();
    }
    bench.signal(rustix::process::Signal::INT);
    let (status, output) = bench.wait();
    assert_eq!(status.code(), Some(130), "{output:?}");
}

#[test]
fn the_dsa_suite_compares_threads_with_published_ones_and_marks_rows_without_device() {
    let folder = tempfile::tempdir().unwrap();
    let (status, output) = bench(folder.path(), &["--suite=dsa", "--repeats=1"]).wait();
    let output = output.join("\n");
    assert!(status.success(), "{output}");
    for words in [
        "live_migration",
        "multifdsend_7",
        "5657.58",
        "saving",
        "22 %",
    ] {
        assert!(output.contains(words), "no {words} in\n{output}");
    }
    if !Path::new("/dev/dsa").exists() {
        assert!(output.contains("no DSA device here"), "{output}");
    }
    let model = ["--suite=dsa", "--repeats=1", "--with=accel-path=dsa-model:"];
    let (status, output) = bench(folder.path(), &model).wait();
    let output = output.join("\n");
    assert!(status.success() && output.contains("simulated"), "{output}");
    kept(folder.path()).iter().for_each(assert_adds_up);
}

#[test]
fn the_other_suites_run_at_a_small_size() {
    let folder = tempfile::tempdir().unwrap();
    for (suite, words) in [
        ("multithread", "original way"),
        ("legacy-rework", "page faults"),
        ("tls", "AES-128-GCM alone"),
    ] {
        let suite = format!("--suite={suite}");
        let flags = [&*suite, "--repeats=1", "--rate=200"];
        let (status, output) = bench(folder.path(), &flags).wait();
        let output = output.join("\n");
        assert!(status.success() && output.contains(words), "{output}");
    }
    kept(folder.path()).iter().for_each(assert_adds_up);
    let cells = |suite: &str| {
        let suite = format!("--suite={suite}");
        let (status, output) = bench(folder.path(), &[&suite, "--dry-run"]).wait();
        assert!(status.success(), "{output:#?}");
        // Lines of standard error are mixed in at any place.
        let count = output.iter().find_map(|line| {
            let (count, _) = line.split_once(" cells, ")?;
            count.parse::<usize>().ok()
        });
        count.unwrap_or_else(|| panic!("no number of cells in {output:#?}"))
    };
    let each = ["dsa", "multithread", "iaa", "qat", "legacy-rework", "tls"].map(cells);
    assert!(each.iter().all(|count| *count > 0), "{each:?}");
    assert_eq!(cells("all"), each.iter().sum::<usize>());
}

#[test]
fn a_remote_host_takes_the_guests_and_a_lost_host_is_one_line() {
    let folder = tempfile::tempdir().unwrap();
    let mut serve = Running::start(PROGRAM, &["--serve=tcp:127.0.0.1:0"], &[]);
    let line = serve.wait_for("waiting for");
    let port = line
        .split(';')
        .next()
        .and_then(|words| words.trim_end_matches('\'').rsplit(':').next())
        .expect("a port");
    let to = format!("--to=tcp:127.0.0.1:{port}");
    let flags = ["--method=none,zstd", "--repeats=1", &to];
    let (status, output) = bench(folder.path(), &flags).wait();
    assert!(status.success(), "{output:#?}");
    let runs = kept(folder.path());
    assert_eq!(runs.len(), 2);
    runs.iter().for_each(assert_adds_up);
    serve.wait_for("a run with");
    drop(serve);
    let (status, output) = bench(folder.path(), &flags).wait();
    assert_eq!(status.code(), Some(1));
    let why = errors(&output);
    assert!(
        why[0].contains("cannot reach 'hotlift-bench --serve'"),
        "{why:?}"
    );
}

#[test]
fn a_link_is_no_faster_than_its_configured_rate() {
    let folder = tempfile::tempdir().unwrap();
    let flags = ["--method=none", "--repeats=1", "--link=200mbit"];
    let (status, output) = bench(folder.path(), &flags).wait();
    if output.iter().any(|line| line.contains("--link needs root")) {
        hotlift_testkit::skip!("root", "network namespaces need it");
        return;
    }
    assert!(status.success(), "{output:#?}");
    let run = &kept(folder.path())[0];
    assert_adds_up(run);
    let source = &run["outcome"]["completed"]["source"];
    // In so short a migration, the bucket and the queue may hold a tenth of the bytes.
    assert!(number(&source["throughput_mbps"]) < 260.0, "{source}");
    let flags = [
        "--method=none,zstd",
        "--repeats=1",
        "--fill=mixed",
        "--link=100mbit,1gbit@200ms",
        "--neighbour=100ms",
        "--only=none",
    ];
    let (status, output) = bench(folder.path(), &flags).wait();
    assert!(status.success(), "{output:#?}");
    let runs = kept(folder.path());
    assert_eq!(runs.len(), 2, "zstd was not asked for");
    assert_eq!(runs[1]["outcome"]["completed"]["verified"], true);
    let row = &runs[1]["row"];
    assert_eq!(row["link"], "100mbit,1gbit@200ms");
    assert_eq!(
        [&row["neighbour"], &row["guest"]["fill"]],
        ["100ms", "mixed"]
    );
    let (status, output) = bench(folder.path(), &["--method=none", "--link=1gbit,2ms"]).wait();
    if output.iter().any(|line| line.contains("no netem")) {
        hotlift_testkit::skip!("netem", "the kernel has none");
        return;
    }
    assert!(status.success(), "{output:#?}");
}

#[test]
fn a_real_qemu_does_the_same_work_and_missing_features_are_reported() {
    if !qemu::has_kvm() {
        return;
    }
    let programs = [Release::V7, Release::V10].map(Release::program);
    for program in programs.into_iter().flatten() {
        let folder = tempfile::tempdir().unwrap();
        let qemu = format!("--with-qemu={}", program.display());
        let flags = [
            "--method=none,zstd,lz4,compress",
            "--workload=idle,random",
            "--rate=200",
            "--repeats=1",
            &qemu,
        ];
        let (status, output) = bench(folder.path(), &flags).wait();
        assert!(status.success(), "{}: {output:#?}", program.display());
        let runs = kept(folder.path());
        assert_eq!(runs.len(), 16);
        let of_qemu = |run: &&Value| run["row"]["engine"] == "qemu";
        let completed = |run: &&Value| !run["outcome"]["completed"].is_null();
        let good: Vec<&Value> = runs.iter().filter(of_qemu).filter(completed).collect();
        assert!(good.len() >= 4, "{output:#?}");
        for run in good {
            assert_eq!(run["outcome"]["completed"]["verified"], true, "{run}");
            let side = &run["outcome"]["completed"]["source"]["side"];
            let threads = side["threads"].as_array().expect("threads");
            let sum: f64 = threads.iter().map(|one| number(&one["cpu_s"])).sum();
            assert!((sum - number(&side["cpu_s"])).abs() < 1e-6, "{side}");
        }
        let lacks = errors(&output).iter().any(|line| line.contains("lz4"));
        assert!(lacks, "{output:#?}");
        assert!(
            output.iter().any(|line| line.contains("Hotlift / QEMU")),
            "{output:#?}"
        );
        let path = folder.path().join("ram.img");
        image(&path);
        let fill = format!("--fill={}", path.display());
        let flags = ["--method=none", "--repeats=1", &fill, &qemu];
        let (status, output) = bench(folder.path(), &flags).wait();
        assert!(status.success(), "{output:#?}");
        let runs = kept(folder.path()).split_off(16);
        let filled = |run: &Value| run["outcome"]["completed"]["filled"].clone();
        assert_eq!(filled(&runs[0]), filled(&runs[1]));
        assert!(
            runs.iter()
                .all(|run| run["outcome"]["completed"]["verified"] == true)
        );
    }
}

#[test]
fn relays_between_two_qemus_do_the_same_work() {
    if !qemu::has_kvm() {
        return;
    }
    let programs = [Release::V7, Release::V10].map(Release::program);
    for program in programs.into_iter().flatten() {
        let folder = tempfile::tempdir().unwrap();
        let qemu = format!("--with-qemu={}", program.display());
        let flags = ["--method=none,zstd", "--relays", "--repeats=1", &qemu];
        let (status, output) = bench(folder.path(), &flags).wait();
        assert!(status.success(), "{}: {output:#?}", program.display());
        let runs = kept(folder.path());
        let relayed = |run: &&Value| run["row"]["engine"] == "relay";
        let relayed: Vec<&Value> = runs.iter().filter(relayed).collect();
        assert_eq!((runs.len(), relayed.len()), (6, 2), "{output:#?}");
        for run in relayed {
            let completed = &run["outcome"]["completed"];
            assert_eq!(completed["verified"], true, "{run}");
            let source = &completed["source"];
            let content = number(&source["normal_pages"]) * 4096.0;
            let sent = number(&source["transferred_bytes"]);
            // The relays compress, not the QEMUs.
            let packed = run["row"]["method"] == "zstd";
            assert_eq!(sent < content * 0.75, packed, "{sent} of {content}: {run}");
        }
        for words in ["relayed QEMU", "zstd"] {
            assert!(
                output.iter().any(|line| line.contains(words)),
                "{output:#?}"
            );
        }
    }
}

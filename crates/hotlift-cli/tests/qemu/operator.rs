//! Tests the operator's commands: `migrate` and `serve`, `save` and `restore`.

use std::fs;
use std::sync::Arc;

use hotlift_qmp::{Qemu, QmpAddress};
use rustix::process::{Pid, Signal, kill_process};
use serde_json::Value;
use tempfile::TempDir;

use crate::guest::{FIRMWARE_STACK_END, Guest};
use crate::hotlift::{Hotlift, Running, errors};
use crate::need;
use crate::route::differ;
use crate::vm::{
    Accelerator, DEADLINE, Machine, Memory, PC_7, PC_10, PC_11, Release, Vm, command_line,
    count_in, folder, until,
};

pub fn machine(name: &'static str) -> Machine {
    Machine {
        name,
        accelerator: Accelerator::Kvm,
        memory: Memory::File,
        guest: Guest::program(),
    }
}

/// Starts `serve` with the given target, and returns its address.
pub fn serve(arguments: &[&str]) -> (Running, String) {
    let mut serve = Hotlift::start(&[&["serve", "--listen=tcp:127.0.0.1:0"], arguments].concat());
    let line = serve.wait_for("listening on ");
    let uri = line.rsplit(' ').next().expect("a word").to_owned();
    (serve, uri)
}

pub fn succeeds(command: Running) -> String {
    let (status, output) = command.wait();
    let output = output.join("\n");
    assert!(status.success(), "{status}\n{output}");
    output
}

/// Checks that the guest of `here` has moved to `there` and counts on.
pub fn has_moved(here: &mut Vm, there: &mut Vm) {
    assert!(!here.is_running(), "the source runs, too");
    assert!(there.is_running());
    let before = here.count().expect("the guest has counted");
    let counted = there.continues_from(before);
    let proven = match *here.machine.guest {
        Guest::Firmware => {
            there.qmp.stop().expect("stop");
            let ends = [here.ram(), there.ram()];
            differ(
                &ends[0][FIRMWARE_STACK_END..],
                &ends[1][FIRMWARE_STACK_END..],
            );
            counted
        }
        _ => there.prove(),
    };
    there.qmp.cont().expect("cont");
    there.continues_from(proven);
}

#[test]
fn migrate_moves_a_guest_to_the_qemu_of_serve() {
    use Release::{V7, V10, V11};
    for (from, to, name, options) in [
        (V10, V10, PC_10, ["--method=zstd", "--channels=4"]),
        (V7, V10, PC_7, ["--method=none", "--multifd=off"]),
        (V10, V7, PC_7, ["--method=zlib", "--channels=1"]),
        (V11, V11, PC_11, ["--method=zstd", "--channels=2"]),
    ] {
        println!("{from:?} -> {to:?} {options:?}");
        let mut here = need!(Vm::running(from, &machine(name)));
        let mut there = need!(Vm::waiting(to, &machine(name)));
        let settings = here.qmp.query_parameters().expect("parameters");
        let (serve, uri) = serve(&["--qmp", &there.free_qmp()]);
        let qmp = here.free_qmp();
        let migrate = [&["migrate", "--qmp", &qmp, "--to", &uri][..], &options].concat();
        succeeds(Hotlift::start(&migrate));
        succeeds(serve);
        has_moved(&mut here, &mut there);
        let now = here.qmp.query_parameters().expect("parameters");
        assert_eq!(now, settings, "settings were not put back");
    }
}

/// A QEMU that outlives the command that starts it, but not this value.
pub struct Adopted {
    pub machine: Machine,
    pub folder: TempDir,
}

impl Adopted {
    pub fn new(machine: Machine) -> Self {
        let folder = folder();
        Self { machine, folder }
    }

    pub fn path(&self, name: &str) -> String {
        self.folder.path().join(name).display().to_string()
    }

    /// Returns the command line as typed. `None`: it cannot be tested here.
    pub fn line(&self, release: Release) -> Option<Vec<String>> {
        let program = release.program()?;
        let mut line = vec![program.display().to_string()];
        line.extend(command_line(&self.machine, self.folder.path()));
        Some(line)
    }

    /// Waits for the end of the command that started it, and of its output, which must follow at once; checks that the guest
    /// counts on from `before`, and ends it.
    fn continues_from(self, before: u64, mut command: Running) {
        command.wait_for("the guest runs");
        succeeds(command);
        let address = QmpAddress::Unix(self.folder.path().join("test.qmp"));
        let mut qmp = Qemu::connect(&address, DEADLINE).expect("it keeps running");
        let console = self.path("console");
        let output = || fs::read_to_string(&console).unwrap_or_default();
        until(
            || format!("it does not count on from {before}"),
            || count_in(&output(), &self.machine.guest).filter(|&count| count > before),
        );
        assert!(qmp.query_status().expect("a status").running);
        qmp.quit().expect("quit");
    }
}

impl Drop for Adopted {
    fn drop(&mut self) {
        let pid = fs::read_to_string(self.path("pid")).unwrap_or_default();
        // QEMU removes the file when it ends by itself.
        if let Some(pid) = pid.trim().parse().ok().and_then(Pid::from_raw) {
            let _ = kill_process(pid, Signal::KILL);
        }
    }
}

#[test]
fn serve_starts_the_qemu_that_it_was_given_and_leaves_it_with_the_guest() {
    let machine = machine(PC_10);
    let mut here = need!(Vm::running(Release::V10, &machine));
    let there = Adopted::new(machine);
    let line = need!(there.line(Release::V10));
    let mut arguments = vec!["--"];
    arguments.extend(line.iter().map(String::as_str));
    let (serve, uri) = serve(&arguments);
    let (qmp, method) = (here.free_qmp(), "--method=zstd");
    let migrate = ["migrate", "--qmp", &qmp, "--to", &uri, method];
    succeeds(Hotlift::start(&migrate));
    assert!(!here.is_running(), "the source runs, too");
    there.continues_from(here.count().expect("the guest has counted"), serve);
}

#[test]
fn ctrl_c_of_migrate_leaves_the_guest_running_where_it_was() {
    for release in [Release::V10, Release::V7] {
        let mut here = need!(Vm::running(release, &machine(PC_7)));
        let mut there = need!(Vm::waiting(release, &machine(PC_7)));
        let (serve, uri) = serve(&["--qmp", &there.free_qmp()]);
        let qmp = here.free_qmp();
        let migrate =
            Hotlift::start(&["migrate", "--qmp", &qmp, "--to", &uri, "--max-bandwidth=2M"]);
        until(
            || "no pages are sent".to_owned(),
            || {
                let info = here.migration();
                info.ram.is_some_and(|ram| ram.normal > 200).then_some(())
            },
        );
        migrate.signal(Signal::INT);
        let (status, output) = migrate.wait();
        assert_eq!(status.code(), Some(130), "{}", output.join("\n"));
        assert!(here.is_running(), "the guest was not left running");
        let proven = here.prove();
        here.qmp.cont().expect("cont");
        here.continues_from(proven);
        let (status, output) = serve.wait();
        let output = output.join("\n");
        assert_eq!(status.code(), Some(1), "{output}");
        assert!(output.contains("the source: interrupted"), "{output}");
        assert_eq!(there.count(), None, "the guest has run at the destination");
        if there.ended().is_none() {
            assert!(!there.is_running());
        }
    }
}

/// Waits until pages of the guest are being sent.
fn sends_pages(here: &mut Vm) {
    until(
        || "no pages are sent".to_owned(),
        || {
            let info = here.migration();
            info.ram.is_some_and(|ram| ram.normal > 200).then_some(())
        },
    );
}

/// Starts `serve` and `migrate` at this rate, and waits until pages are being sent.
fn moves_at(here: &mut Vm, there: &Vm, rate: &str) -> (Running, Running) {
    let (serve, uri) = serve(&["--qmp", &there.free_qmp()]);
    let qmp = here.free_qmp();
    let rate = format!("--max-bandwidth={rate}");
    let migrate = Hotlift::start(&["migrate", "--qmp", &qmp, "--to", &uri, &rate]);
    sends_pages(here);
    (serve, migrate)
}

/// Powers the machine off as its guest would: SLP_EN, and type 0, into PM1a_CNT of the chip set (PIIX4's ports are at 0x600).
fn power_off(here: &mut Vm) {
    here.hmp("o /h 0x604 0x2000");
}

#[test]
fn a_guest_that_powers_off_while_it_moves_or_is_saved_is_reported_as_ended() {
    let files = folder();
    let file = files.path().join("vm.save").display().to_string();
    for release in [Release::V10, Release::V7, Release::V11] {
        println!("{release:?}");
        let machine = machine(release.machine());
        let mut here = need!(Vm::running(release, &machine));
        let there = need!(Vm::waiting(release, &machine));
        let (serve, migrate) = moves_at(&mut here, &there, "2M");
        power_off(&mut here);
        let (status, output) = migrate.wait();
        let output = output.join("\n");
        assert_eq!(status.code(), Some(1), "{output}");
        assert!(
            output.contains("the guest powered off during the migration"),
            "{output}"
        );
        let (status, output) = serve.wait();
        let output = output.join("\n");
        assert_eq!(status.code(), Some(1), "{output}");
        assert!(
            output.contains("the source: the guest powered off"),
            "{output}"
        );
        assert_eq!(there.count(), None, "the guest has run at the destination");

        let mut here = need!(Vm::running(release, &machine));
        let save = [
            "save",
            "--qmp",
            &here.free_qmp(),
            &file,
            "--max-bandwidth=2M",
        ];
        let save = Hotlift::start(&save);
        sends_pages(&mut here);
        power_off(&mut here);
        let (status, output) = save.wait();
        let output = output.join("\n");
        assert_eq!(status.code(), Some(1), "{output}");
        assert!(output.contains("the guest powered off"), "{output}");
        let left = fs::read_dir(files.path()).expect("it is there").count();
        assert_eq!(left, 0, "a file is left");
    }
}

#[test]
fn a_cancel_does_not_continue_a_powered_off_guest() {
    for release in [Release::V10, Release::V7, Release::V11] {
        println!("{release:?}");
        let machine = machine(release.machine());
        let kept = ["-no-shutdown".to_owned()];
        let mut here = need!(Vm::running_with(release, &machine, &kept));
        let there = need!(Vm::waiting(release, &machine));
        let (serve, migrate) = moves_at(&mut here, &there, "2M");
        power_off(&mut here);
        let cancel = here.qmp.client().execute("migrate_cancel", &Value::Null);
        cancel.expect("it is cancelled");
        let (status, output) = migrate.wait();
        let output = output.join("\n");
        assert_eq!(status.code(), Some(1), "{output}");
        assert!(output.contains("the guest powered off"), "{output}");
        let (status, output) = serve.wait();
        assert_eq!(status.code(), Some(1), "{output:?}");
        let state = here.qmp.query_status().expect("QEMU answers");
        assert_eq!(state.run_state().name(), "shutdown");
    }
}

#[test]
fn a_guest_that_is_reset_while_it_moves_runs_at_the_destination() {
    let machine = machine(PC_10);
    let mut here = need!(Vm::running(Release::V10, &machine));
    let there = need!(Vm::waiting(Release::V10, &machine));
    let (serve, migrate) = moves_at(&mut here, &there, "20M");
    let reset = here.qmp.client().execute("system_reset", &Value::Null);
    reset.expect("a reset");
    let output = succeeds(migrate);
    assert!(!output.contains("during the migration"), "{output}");
    succeeds(serve);
    // A reset within a write leaves the page and the guest's table different, which the guest detects once.
    let errors_of_last_line = || {
        let console = there.console();
        let line = console.lines().rfind(|line| line.contains(" errors="))?;
        let (_, errors) = line.split_once(" errors=")?;
        errors.trim().parse::<u64>().ok()
    };
    let errors = until(|| "it does not start again".to_owned(), errors_of_last_line);
    assert!(errors <= 1, "{}", there.console());
}

#[test]
fn a_save_that_is_interrupted_at_once_leaves_no_folder() {
    let mut here = need!(Vm::running(Release::V7, &machine(PC_7)));
    let files = folder();
    let tmpdir = files.path().join("tmp");
    fs::create_dir(&tmpdir).expect("a folder");
    let count = || fs::read_dir(&tmpdir).expect("it is there").count();
    let file = files.path().join("vm.save").display().to_string();
    let qmp = here.free_qmp();
    let save = Hotlift::start_with(
        &["save", "--qmp", &qmp, &file, "--max-bandwidth=1M"],
        &[("TMPDIR", &tmpdir.display().to_string())],
    );
    until(
        || "no pages are sent".to_owned(),
        || {
            let info = here.migration();
            info.ram.is_some_and(|ram| ram.normal > 200).then_some(())
        },
    );
    assert_eq!(count(), 1, "its folder");
    // The second command finds the first one waiting for a QEMU that does not answer.
    here.signal(Signal::STOP);
    save.signal(Signal::INT);
    save.signal(Signal::TERM);
    let (status, output) = save.wait();
    assert_eq!(status.code(), Some(130), "{}", output.join("\n"));
    assert!(
        errors(&output).is_empty(),
        "it waited: {}",
        output.join("\n")
    );
    assert_eq!(count(), 0, "left behind");
    here.signal(Signal::CONT);
}

/// Starts `migrate` to a `serve` that starts a QEMU with `line`; returns the errors of `migrate`.
fn fails_to_move(here: &Vm, line: &[String], options: &[&str]) -> String {
    let mut arguments = vec!["--"];
    arguments.extend(line.iter().map(String::as_str));
    let (serve, uri) = serve(&arguments);
    let qmp = here.free_qmp();
    let migrate = [&["migrate", "--qmp", &qmp, "--to", &uri][..], options].concat();
    let migrate = Hotlift::start(&migrate);
    let (status, output) = migrate.wait();
    let output = output.join("\n");
    assert_eq!(status.code(), Some(1), "{output}");
    serve.signal(Signal::INT);
    serve.wait();
    output
}

/// Returns `line` with `from` replaced in one argument.
fn with(line: &[String], from: &str, to: &str) -> Vec<String> {
    let changed: Vec<_> = line.iter().map(|word| word.replace(from, to)).collect();
    assert_ne!(changed, line, "{from} is not in {line:?}");
    changed
}

#[test]
fn a_vm_of_another_size_is_refused_before_anything_is_sent() {
    let machine = machine(PC_7);
    let mut here = need!(Vm::running(Release::V7, &machine));
    let there = Adopted::new(machine.clone());
    let line = need!(there.line(Release::V7));
    let bytes = machine.guest.ram_bytes();
    let more = with(&line, &bytes.to_string(), &(2 * bytes).to_string());
    let more = with(
        &more,
        &format!("{}k", bytes >> 10),
        &format!("{}k", bytes >> 9),
    );
    let output = fails_to_move(&here, &more, &[]);
    let words = format!(
        "RAM size: the source has {bytes} bytes, the destination has {} bytes",
        2 * bytes
    );
    assert!(output.contains(&words), "{output}");

    let mut more = line;
    more.extend(["-smp", "2"].map(str::to_owned));
    let output = fails_to_move(&here, &more, &[]);
    let words = "number of vCPUs: the source has 1, the destination has 2";
    assert!(output.contains(words), "{output}");
    assert_eq!(here.migration().status(), "none");
    assert!(here.is_running());
}

#[test]
fn the_error_of_the_destinations_qemu_is_reported_at_the_source() {
    for release in [Release::V10, Release::V7] {
        let machine = machine(PC_7);
        let mut here = need!(Vm::running(release, &machine));
        let there = Adopted::new(machine);
        let line = need!(there.line(release));
        let line = with(&line, "graphics=off", "graphics=off,hpet=off");
        let output = fails_to_move(&here, &line, &["--ignore-differences"]);
        let warning = "warning: device hpet: the source has hpet, the destination has none";
        assert!(output.contains(warning), "{output}");
        assert!(output.contains("'hpet'"), "{output}");
        assert!(here.is_running());
    }
}

#[test]
fn a_saved_guest_continues_from_its_file_and_a_damaged_file_is_refused() {
    let machine = machine(PC_10);
    let files = folder();
    let path = |name: &str| files.path().join(name).display().to_string();
    let mut here = need!(Vm::running(Release::V10, &machine));
    let qmp = here.free_qmp();
    let file = path("vm.save");
    succeeds(Hotlift::start(&[
        "save",
        "--qmp",
        &qmp,
        &file,
        "--method=zstd",
        "--channels=2",
    ]));
    assert!(!here.is_running(), "it keeps running after the save");
    let before = here.count().expect("the guest has counted");

    // One byte shorter; a changed byte in the middle.
    let whole = fs::read(&file).expect("the file");
    let (altered, _) = crate::files::altered(&whole);
    for (name, bytes) in [("cut", &whole[..whole.len() - 1]), ("altered", &altered)] {
        fs::write(path(name), bytes).expect("a damaged file");
        let mut there = need!(Vm::waiting(Release::V10, &machine));
        let restore = Hotlift::start(&["restore", &path(name), "--qmp", &there.free_qmp()]);
        let (status, output) = restore.wait();
        assert_eq!(status.code(), Some(1), "{name}: {}", output.join("\n"));
        // One line has the cause; if only pages are damaged, another has the way to continue without them.
        let salvage = errors(&output)
            .iter()
            .any(|line| line.contains("--salvage"));
        assert_eq!(salvage, name == "altered", "{}", output.join("\n"));
        let lines = 1 + usize::from(salvage);
        assert_eq!(
            errors(&output).len(),
            lines,
            "{name}: {}",
            output.join("\n")
        );
        assert!(
            there.ended().is_some() || !there.is_running(),
            "{name}: the guest runs"
        );
        assert_eq!(there.count(), None, "{name}: the guest has run");
    }

    let mut there = need!(Vm::waiting(Release::V10, &machine));
    succeeds(Hotlift::start(&[
        "restore",
        &file,
        "--qmp",
        &there.free_qmp(),
    ]));
    has_moved(&mut here, &mut there);

    // Into a QEMU that the command starts.
    let again = Adopted::new(machine);
    let line = need!(again.line(Release::V10));
    let mut arguments = vec!["restore", &file, "--"];
    arguments.extend(line.iter().map(String::as_str));
    let tmpdir = path("tmp");
    fs::create_dir(&tmpdir).expect("a folder");
    let restore = Hotlift::start_with(&arguments, &[("TMPDIR", &tmpdir)]);
    again.continues_from(before, restore);
    let left: Vec<_> = fs::read_dir(&tmpdir).expect("it is there").collect();
    assert!(left.is_empty(), "{left:?}");
}

#[test]
fn mapped_ram_files_go_both_ways_between_the_commands_and_qemu() {
    let machine = machine(PC_10);
    let files = folder();
    let path = |name: &str| files.path().join(name).display().to_string();

    // Hotlift's file, loaded by QEMU.
    let mut here = need!(Vm::running(Release::V10, &machine));
    let qmp = here.free_qmp();
    succeeds(Hotlift::start(&[
        "save",
        "--qmp",
        &qmp,
        &path("ours"),
        "--format=mapped-ram",
    ]));
    let mut there = need!(Vm::waiting(Release::V10, &machine));
    there
        .qmp
        .set_capabilities(&[("mapped-ram", true)])
        .expect("mapped-ram");
    let uri = format!("file:{}", path("ours"));
    there
        .qmp
        .migrate_incoming(&uri, true)
        .expect("migrate-incoming");
    there.reaches("completed");
    has_moved(&mut here, &mut there);

    // QEMU's file, loaded by Hotlift.
    there
        .qmp
        .set_capabilities(&[("mapped-ram", true)])
        .expect("mapped-ram");
    there
        .qmp
        .migrate(&format!("file:{}", path("theirs")))
        .expect("migrate");
    there.reaches("completed");
    let mut back = need!(Vm::waiting(Release::V10, &machine));
    succeeds(Hotlift::start(&[
        "restore",
        &path("theirs"),
        "--qmp",
        &back.free_qmp(),
    ]));
    has_moved(&mut there, &mut back);
}

#[test]
fn a_save_can_keep_the_guest_running() {
    let machine = machine(PC_7);
    let files = folder();
    let file = files.path().join("vm.save").display().to_string();
    let mut here = need!(Vm::running(Release::V7, &machine));
    let qmp = here.free_qmp();
    succeeds(Hotlift::start(&[
        "save",
        "--qmp",
        &qmp,
        &file,
        "--method=zlib",
        "--keep-running",
    ]));
    let count = here.count().expect("the guest has counted");
    here.continues_from(count);
    here.prove();
    let guest: Arc<Guest> = Arc::clone(&machine.guest);
    let mut there = need!(Vm::waiting(Release::V7, &machine));
    succeeds(Hotlift::start(&[
        "restore",
        &file,
        "--qmp",
        &there.free_qmp(),
    ]));
    until(
        || "it does not count".to_owned(),
        || count_in(&there.console(), &guest),
    );
    there.prove();
}

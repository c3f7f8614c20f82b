//! Tests that a QEMU that may have its guest keeps running, whatever happens to the command that started the QEMU.

use std::io::{BufRead, BufReader};
use std::process::{Child, Command, Stdio};
use std::time::{Duration, Instant};

use hotlift_qmp::{Client, Qemu, QmpAddress};
use rustix::process::{Pid, Signal, kill_process, test_kill_process};
use serde_json::{Value, json};

use crate::hotlift::Hotlift;
use crate::need;
use crate::operator::{Adopted, machine, serve, succeeds};
use crate::qmp_proxy::{QmpProxy, Trick};
use crate::vm::{DEADLINE, Machine, PC_7, Release, Vm, count_in, folder, until};

/// Time during which a QEMU that must keep running is watched: a command acts on a signal within 50 ms.
const WATCHED: Duration = Duration::from_secs(2);

impl Adopted {
    fn qmp(&self) -> Qemu {
        let address = QmpAddress::Unix(self.folder.path().join("test.qmp"));
        Qemu::connect(&address, DEADLINE).expect("it keeps running")
    }

    /// Checks that the guest runs and its count exceeds `before`, and ends its QEMU.
    pub fn has_the_guest(&self, before: u64) {
        let console = self.path("console");
        let output = || std::fs::read_to_string(&console).unwrap_or_default();
        until(
            || format!("it does not count on from {before}"),
            || count_in(&output(), &self.machine.guest).filter(|&count| count > before),
        );
        let mut qmp = self.qmp();
        assert!(qmp.query_status().expect("a status").running);
        qmp.quit().expect("quit");
    }

    fn pid(&self) -> Pid {
        let pid = std::fs::read_to_string(self.path("pid")).expect("it was started");
        Pid::from_raw(pid.trim().parse().expect("a number")).expect("a process id")
    }

    /// Checks that it keeps running.
    fn keeps_running(&self, what: &str) {
        let (start, pid) = (Instant::now(), self.pid());
        while start.elapsed() < WATCHED {
            assert!(test_kill_process(pid).is_ok(), "{what}: QEMU was ended");
            std::thread::sleep(Duration::from_millis(10));
        }
    }
}

/// Starts a guest, and a QEMU for it behind a proxy.
fn moving(trick: Trick) -> Option<(Vm, Adopted, QmpProxy, Vec<String>)> {
    let machine: Machine = machine(PC_7);
    let here = Vm::running(Release::V7, &machine)?;
    let there = Adopted::new(machine);
    let proxy = QmpProxy::start(there.folder.path(), trick);
    let line = proxy.line(&there.line(Release::V7)?);
    Some((here, there, proxy, line))
}

fn with(arguments: &[&str], line: &[String]) -> Vec<String> {
    let mut all: Vec<_> = arguments.iter().map(|word| (*word).to_owned()).collect();
    all.push("--".to_owned());
    all.extend_from_slice(line);
    all
}

fn words(line: &[String]) -> Vec<&str> {
    line.iter().map(String::as_str).collect()
}

#[test]
fn a_qemu_without_qmp_replies_after_the_handover_keeps_its_guest() {
    let (here, there, _proxy, line) = need!(moving(Trick::Silence));
    let (mut serve, uri) = serve(&words(&with(&[], &line)));
    let qmp = here.free_qmp();
    let migrate = Hotlift::start(&["migrate", "--qmp", &qmp, "--to", &uri]);
    serve.wait_for("cannot determine whether the guest runs here");
    let (status, output) = migrate.wait();
    assert_eq!(status.code(), Some(3), "{}", output.join("\n"));
    there.keeps_running("serve");
    there.has_the_guest(here.count().expect("the guest has counted"));
    let (status, output) = serve.wait();
    assert_eq!(status.code(), Some(3), "{}", output.join("\n"));
}

#[test]
fn a_restored_qemu_without_qmp_replies_keeps_its_guest() {
    let (here, there, _proxy, line) = need!(moving(Trick::Silence));
    let file = there.path("vm.save");
    succeeds(Hotlift::start(&["save", "--qmp", &here.free_qmp(), &file]));
    let mut restore = Hotlift::start(&words(&with(&["restore", &file], &line)));
    restore.wait_for("cannot determine whether the guest runs here");
    there.keeps_running("restore");
    there.has_the_guest(here.count().expect("the guest has counted"));
    let (status, output) = restore.wait();
    assert_eq!(status.code(), Some(3), "{}", output.join("\n"));
}

/// Event that comes too late once EOF has been sent.
#[derive(Debug, Clone, Copy)]
enum Late {
    Signal(Signal),
    /// A command at the monitor of `serve`.
    Command(&'static str),
    /// Loss of the connection to `migrate`.
    LostControl,
}

#[test]
fn nothing_ends_a_qemu_that_still_reads_the_end_of_its_stream() {
    let all = [
        Late::Signal(Signal::INT),
        Late::Signal(Signal::TERM),
        Late::Signal(Signal::HUP),
        Late::Command("migrate_cancel"),
        Late::Command("quit"),
        Late::LostControl,
    ];
    for late in all {
        let (here, there, proxy, line) = need!(moving(Trick::HoldDescription));
        let socket = there.folder.path().join("control");
        let control = format!("--control={}", socket.display());
        let (mut serve, uri) = serve(&words(&with(&[&control], &line)));
        let mut client = Client::connect(&QmpAddress::Unix(socket), DEADLINE).expect("QMP");
        let qmp = here.free_qmp();
        let migrate = Hotlift::start(&["migrate", "--qmp", &qmp, "--to", &uri]);
        proxy.wait_held();
        match late {
            Late::Signal(signal) => serve.signal(signal),
            Late::Command(command) => {
                let answer = client.execute(command, &Value::Null);
                assert_eq!(answer.expect("an answer"), json!({}), "{command}");
            }
            Late::LostControl => migrate.signal(Signal::KILL),
        }
        there.keeps_running(&format!("{late:?}"));
        proxy.release();
        serve.wait_for("the guest runs here");
        if !matches!(late, Late::LostControl) {
            succeeds(migrate);
        }
        there.has_the_guest(here.count().expect("the guest has counted"));
        let (status, output) = serve.wait();
        assert!(
            status.success(),
            "{late:?}: {status}\n{}",
            output.join("\n")
        );
    }
}

/// Returns true if there is a guard of a QEMU with QMP socket `qmp`.
fn has_guard(qmp: &str) -> bool {
    let processes = std::fs::read_dir("/proc").expect("it is mounted");
    processes.flatten().any(|process| {
        // A process that ends in the meantime has none.
        let line = std::fs::read(process.path().join("cmdline")).unwrap_or_default();
        let line = String::from_utf8_lossy(&line).into_owned();
        line.contains("guard") && line.contains(qmp)
    })
}

#[test]
fn a_serve_killed_after_eof_leaves_no_guard_that_kills_its_qemu() {
    let (here, there, proxy, line) = need!(moving(Trick::HoldDescription));
    let (serve, uri) = serve(&words(&with(&[], &line)));
    let qmp = here.free_qmp();
    let migrate = Hotlift::start(&["migrate", "--qmp", &qmp, "--to", &uri]);
    proxy.wait_held();
    let socket = std::fs::read_to_string(there.path("wanted")).expect("it was started");
    serve.signal(Signal::KILL);
    until(
        || "the guard does not end".to_owned(),
        || (!has_guard(&socket)).then_some(()),
    );
    assert!(test_kill_process(there.pid()).is_ok(), "QEMU was ended");
    proxy.release();
    there.has_the_guest(here.count().expect("the guest has counted"));
    drop((migrate, serve));
    // No process was left to remove it.
    let _ = std::fs::remove_file(socket);
}

/// A `serve` with unread standard error; killed on drop.
struct Unread(Child);

impl Drop for Unread {
    fn drop(&mut self) {
        let _ = self.0.kill();
        let _ = self.0.wait();
    }
}

#[test]
fn a_closed_stderr_and_stdout_of_serve_end_neither_the_migration_nor_the_guest() {
    let machine = machine(PC_7);
    let mut here = need!(Vm::running(Release::V7, &machine));
    let there = Adopted::new(machine);
    let line = need!(there.line(Release::V7));
    let (reader, writer) = rustix::pipe::pipe().expect("a pipe");
    drop(reader);
    let mut serve = Unread(
        Command::new(env!("CARGO_BIN_EXE_hotlift"))
            .args(with(&["serve", "--listen=tcp:127.0.0.1:0"], &line))
            .stdin(Stdio::null())
            .stdout(Stdio::piped())
            .stderr(writer)
            .spawn()
            .expect("hotlift starts"),
    );
    let mut output = String::new();
    let stdout = serve.0.stdout.take().expect("it is piped");
    BufReader::new(stdout)
        .read_line(&mut output)
        .expect("a line");
    let uri = output.trim().rsplit(' ').next().expect("an address");
    let qmp = here.free_qmp();
    let migrate = Hotlift::start(&["migrate", "--qmp", &qmp, "--to", uri, "--max-bandwidth=2M"]);
    // It does not converge until `serve` has printed several lines of progress.
    until(
        || "no migration is seen".to_owned(),
        || (here.migration().total_time? > 2500).then_some(()),
    );
    let limit = json!({ "downtime-limit": 60_000 });
    // An ended one will not have moved.
    let _ = here.qmp.set_parameters(&limit);
    succeeds(migrate);
    there.has_the_guest(here.count().expect("the guest has counted"));
    assert!(serve.0.wait().expect("it was started").success());
}

#[test]
fn a_qemu_that_was_left_running_leaves_nothing_behind_when_it_ends() {
    let machine = machine(PC_7);
    let here = need!(Vm::running(Release::V7, &machine));
    let there = Adopted::new(machine);
    let mut line = need!(there.line(Release::V7));
    // A monitor without '-qmp': the socket that the command adds is kept.
    let at = line
        .iter()
        .position(|word| word == "-qmp")
        .expect("it has one");
    let socket = line[at + 1].replacen("unix:", "socket,id=test,path=", 1);
    line.splice(
        at..at + 2,
        ["-chardev", &socket, "-mon", "chardev=test,mode=control"].map(str::to_owned),
    );
    let temporary = folder();
    let variable = [("TMPDIR", temporary.path().to_str().expect("a name"))];
    let arguments = with(&["serve", "--listen=tcp:127.0.0.1:0"], &line);
    let mut serve = Hotlift::start_with(&words(&arguments), &variable);
    let output = serve.wait_for("listening on ");
    let uri = output.rsplit(' ').next().expect("an address").to_owned();
    let qmp = here.free_qmp();
    succeeds(Hotlift::start(&["migrate", "--qmp", &qmp, "--to", &uri]));
    let output = serve.wait_for("the guest runs here");
    let kept = output.rsplit(' ').next().expect("a path");
    let mut kept = Qemu::connect(&kept.parse().expect("an address"), DEADLINE).expect("it is kept");
    assert!(kept.query_status().expect("a status").running);
    there.has_the_guest(here.count().expect("the guest has counted"));
    until(
        || {
            let left = std::fs::read_dir(temporary.path()).expect("it is there");
            format!("left: {:?}", left.flatten().collect::<Vec<_>>())
        },
        || {
            let mut left = std::fs::read_dir(temporary.path()).ok()?;
            left.next().is_none().then_some(())
        },
    );
    let (status, output) = serve.wait();
    assert!(status.success(), "{}", output.join("\n"));
}

#[test]
fn a_save_that_loses_its_terminal_leaves_the_guest_running_and_nothing_else() {
    let mut here = need!(Vm::running(Release::V7, &machine(PC_7)));
    let (temporary, files) = (folder(), folder());
    let settings = here.qmp.query_parameters().expect("parameters");
    let capabilities = here.qmp.query_capabilities().expect("capabilities");
    let file = files.path().join("vm.save").display().to_string();
    let variable = [("TMPDIR", temporary.path().to_str().expect("a name"))];
    let qmp = here.free_qmp();
    let arguments = ["save", "--qmp", &qmp, &file, "--max-bandwidth=2M"];
    let save = Hotlift::start_with(&arguments, &variable);
    until(
        || "no pages are saved".to_owned(),
        || {
            let info = here.migration();
            info.ram.is_some_and(|ram| ram.normal > 200).then_some(())
        },
    );
    // Like a closing terminal: more than once.
    let pid = Pid::from_raw(save.pid()).expect("a process id");
    for _ in 0..2 {
        let _ = kill_process(pid, Signal::HUP);
    }
    let (status, output) = save.wait();
    assert_eq!(status.code(), Some(130), "{}", output.join("\n"));
    assert!(here.is_running(), "the guest was not left running");
    for folder in [&temporary, &files] {
        let left: Vec<_> = std::fs::read_dir(folder.path())
            .expect("it is there")
            .collect();
        assert!(left.is_empty(), "{left:?}");
    }
    assert_eq!(here.qmp.query_parameters().expect("parameters"), settings);
    assert_eq!(
        here.qmp.query_capabilities().expect("capabilities"),
        capabilities
    );
}

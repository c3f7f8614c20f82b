//! Tests capabilities and parameters of QEMU: which are rejected, which a command changes, and that the command
//! restores them.

use std::fs;
use std::path::Path;

use hotlift_qemu::capabilities::{capability, parameter};
use hotlift_testkit::proxy::{Flow, Proxy, Rule, Stop};
use rustix::process::{Pid, Resource, Rlimit, Signal, prlimit};
use serde_json::{Map, Value, json};

use crate::hotlift::{Hotlift, Running};
use crate::need;
use crate::operator::{Adopted, machine, serve, succeeds};
use crate::vm::{PC_7, PC_10, PC_11, Release, Vm, folder, until};

const RELEASES: [(Release, &str); 3] = [
    (Release::V7, PC_7),
    (Release::V10, PC_10),
    (Release::V11, PC_11),
];

const IGNORE_SHARED: &str = "x-ignore-shared";

/// Address without 'hotlift serve': a command that connects fails for another reason.
const NOWHERE: &str = "tcp:127.0.0.1:9";

/// Waits for the failure of a command whose guest stays.
fn fails(command: Running) -> String {
    let (status, lines) = command.wait();
    let lines = lines.join("\n");
    assert_eq!(status.code(), Some(1), "{lines}");
    lines
}

type Settings = (Vec<(String, bool)>, Map<String, Value>);

fn settings(vm: &mut Vm) -> Settings {
    let capabilities = vm.qmp.query_capabilities().expect("capabilities");
    let parameters = vm.qmp.query_parameters().expect("parameters");
    (capabilities, parameters)
}

/// Starts a slow save into `file`, and waits until pages are saved.
fn slow_save(here: &mut Vm, file: &Path) -> Running {
    let (qmp, file) = (here.free_qmp(), file.display().to_string());
    let save = Hotlift::start(&["save", "--qmp", &qmp, &file, "--max-bandwidth=2M"]);
    until(
        || "no pages are saved".to_owned(),
        || {
            let info = here.migration();
            info.ram.is_some_and(|ram| ram.normal > 200).then_some(())
        },
    );
    save
}

#[test]
fn every_capability_and_parameter_of_a_qemu_has_a_row() {
    for (release, name) in RELEASES {
        let Some(mut vm) = Vm::waiting(release, &machine(name)) else {
            continue;
        };
        let (capabilities, parameters) = settings(&mut vm);
        for (name, _) in &capabilities {
            assert!(capability(name).is_some(), "{release:?}: {name}");
        }
        for name in parameters.keys() {
            assert!(parameter(name).is_some(), "{release:?}: {name}");
        }
    }
}

#[test]
fn an_unsupported_setting_is_named_before_anything_is_sent() {
    let folder = folder();
    for (release, name) in RELEASES {
        println!("{release:?}");
        let Some(mut here) = Vm::running(release, &machine(name)) else {
            continue;
        };
        let file = folder.path().join(name).display().to_string();
        let qmp = here.free_qmp();
        let save = ["save", "--qmp", &qmp, &file];
        let migrate = ["migrate", "--qmp", &qmp, "--to", NOWHERE];
        let check = [&migrate[..], &["--check"]].concat();
        let before = settings(&mut here);
        for (capability, commands) in [
            (IGNORE_SHARED, &[&save[..], &migrate, &check][..]),
            ("dirty-bitmaps", &[&save[..]]),
        ] {
            here.qmp
                .set_capabilities(&[(capability, true)])
                .expect("on");
            for command in commands {
                let lines = fails(Hotlift::start(command));
                assert!(lines.contains(&format!("'{capability}'")), "{lines}");
            }
            here.qmp
                .set_capabilities(&[(capability, false)])
                .expect("off");
        }
        if before.1.contains_key("mode") {
            here.qmp
                .set_parameters(&json!({ "mode": "cpr-reboot" }))
                .expect("a mode");
            for command in [&save[..], &migrate, &check] {
                let lines = fails(Hotlift::start(command));
                assert!(lines.contains("'mode'"), "{lines}");
            }
            here.qmp
                .set_parameters(&json!({ "mode": "normal" }))
                .expect("a mode");
        }
        assert_eq!(here.migration().status(), "none");
        assert!(here.is_running() && !Path::new(&file).exists());
        assert_eq!(settings(&mut here), before);
        // At the other end.
        succeeds(Hotlift::start(&save));
        for lazy in [&["--lazy"][..], &[]] {
            let mut there = need!(Vm::waiting(release, &machine(name)));
            there
                .qmp
                .set_capabilities(&[(IGNORE_SHARED, true)])
                .expect("on");
            let qmp = there.free_qmp();
            let restore = [&["restore", &file, "--qmp", &qmp][..], lazy].concat();
            let lines = fails(Hotlift::start(&restore));
            assert!(lines.contains(&format!("'{IGNORE_SHARED}'")), "{lines}");
            assert_eq!(there.migration().status(), "none");
        }
    }
}

/// Handler of QMP: renames QEMU's capability rdma-pin-all to one that no version has.
struct Future;

impl Rule for Future {
    type Direction = ();

    fn apply(&self, (): &mut (), came: &mut Vec<u8>, flow: &Flow<'_>) -> Result<(), Stop> {
        if !flow.is_back() {
            return flow.pass_all(came);
        }
        while let Some(end) = came.iter().position(|&byte| byte == b'\n') {
            let line: Vec<u8> = came.drain(..=end).collect();
            let line = String::from_utf8(line).expect("JSON");
            flow.pass(line.replace("rdma-pin-all", "x-future-one").as_bytes())?;
        }
        Ok(())
    }
}

#[test]
fn an_unknown_capability_is_refused_only_if_it_is_on() {
    let mut here = need!(Vm::running(Release::V10, &machine(PC_10)));
    let folder = folder();
    let (socket, file) = (folder.path().join("qmp"), folder.path().join("vm.save"));
    let real = here.free_qmp();
    let _proxy = Proxy::unix_with(&socket, Path::new(&real), Future).expect("a socket");
    let qmp = socket.display().to_string();
    let file = file.display().to_string();
    let save = ["save", "--qmp", &qmp, &file, "--keep-running"];
    here.qmp
        .set_capabilities(&[("rdma-pin-all", true)])
        .expect("on");
    let lines = fails(Hotlift::start(&save));
    assert!(lines.contains("'x-future-one'"), "{lines}");
    assert_eq!(here.migration().status(), "none");
    here.qmp
        .set_capabilities(&[("rdma-pin-all", false)])
        .expect("off");
    succeeds(Hotlift::start(&save));
}

#[test]
fn settings_changed_by_a_killed_command_are_restored_by_the_next() {
    let folder = folder();
    let file = folder.path().join("vm.save");
    for (release, name) in RELEASES {
        println!("{release:?}");
        let Some(mut here) = Vm::running(release, &machine(name)) else {
            continue;
        };
        // The operator's settings: kept, and restored.
        let own = json!({ "max-bandwidth": 1 << 30, "multifd-channels": 3 });
        here.qmp.set_parameters(&own).expect("parameters");
        let before = settings(&mut here);
        let qmp = here.free_qmp();
        let path = file.display().to_string();
        for next in [
            &["migrate", "--qmp", &qmp, "--to", NOWHERE][..],
            &["save", "--qmp", &qmp, &path, "--keep-running"],
        ] {
            let save = slow_save(&mut here, &file);
            save.signal(Signal::KILL);
            drop(save);
            until(
                || "the migration does not end".to_owned(),
                || here.migration().has_failed().then_some(()),
            );
            assert_ne!(settings(&mut here), before, "nothing was changed");
            let (status, lines) = Hotlift::start(next).wait();
            let lines = lines.join("\n");
            assert_eq!(status.success(), next[0] == "save", "{lines}");
            assert!(
                lines.contains("an earlier command left settings"),
                "{lines}"
            );
            assert_eq!(settings(&mut here), before);
        }
        let (status, lines) = Hotlift::start(&["save", "--qmp", &qmp, &path]).wait();
        let lines = lines.join("\n");
        assert!(
            status.success() && !lines.contains("earlier command"),
            "{lines}"
        );
        assert_eq!(settings(&mut here), before);
    }
}

#[test]
fn a_save_beyond_the_file_size_limit_fails_with_a_write_error() {
    let mut here = need!(Vm::running(Release::V10, &machine(PC_10)));
    let folder = folder();
    let before = settings(&mut here);
    let save = slow_save(&mut here, &folder.path().join("vm.save"));
    let limit = Rlimit {
        current: Some(4096),
        maximum: None,
    };
    prlimit(Pid::from_raw(save.pid()), Resource::Fsize, limit).expect("a limit");
    let lines = fails(save);
    assert!(lines.contains("File too large"), "{lines}");
    assert!(here.is_running());
    assert_eq!(settings(&mut here), before);
    let left: Vec<_> = fs::read_dir(folder.path()).expect("a folder").collect();
    assert!(left.is_empty(), "{left:?}");
}

#[test]
fn ram_in_a_shared_file_is_not_sent_if_both_commands_ignore_it() {
    for (release, name) in RELEASES {
        println!("{release:?}");
        let machine = machine(name);
        let Some(mut here) = Vm::running(release, &machine) else {
            continue;
        };
        let there = Adopted::new(machine);
        fs::hard_link(here.path("ram"), there.path("ram")).expect("one file of two names");
        let line = need!(there.line(release));
        let mut arguments = vec!["--ignore-shared", "--"];
        arguments.extend(line.iter().map(String::as_str));
        let (mut serve, uri) = serve(&arguments);
        let before = settings(&mut here);
        let qmp = here.free_qmp();
        let migrate = ["migrate", "--qmp", &qmp, "--to", &uri, "--ignore-shared"];
        succeeds(Hotlift::start(&migrate));
        serve.wait_for("the guest runs here");
        succeeds(serve);
        let moved = here.migration().ram.expect("figures").normal;
        // No file contains firmware and video memory.
        let pages = here.machine.guest.ram_bytes() / 4096;
        assert!(moved < pages / 10, "{moved} of {pages} pages were moved");
        assert_eq!(settings(&mut here), before);
        there.has_the_guest(here.count().expect("the guest has counted"));
    }
}

#[test]
fn ram_is_left_in_files_only_if_both_qemus_map_the_same() {
    let machine = machine(PC_10);
    let mut here = need!(Vm::running(Release::V10, &machine));
    let qmp = here.free_qmp();
    for (at_source, at_destination, problem) in [
        (true, false, "'hotlift migrate' has --ignore-shared"),
        (false, true, "'hotlift serve' has --ignore-shared"),
        (true, true, "map different files"),
    ] {
        let there = need!(Vm::waiting(Release::V10, &machine));
        let held = there.free_qmp();
        let flag = |is_given| {
            if is_given {
                &["--ignore-shared"][..]
            } else {
                &[]
            }
        };
        let (_serve, uri) = serve(&[&["--qmp", &held][..], flag(at_destination)].concat());
        let migrate = ["migrate", "--qmp", &qmp, "--to", &uri];
        let lines = fails(Hotlift::start(&[&migrate[..], flag(at_source)].concat()));
        assert!(lines.contains(problem), "{lines}");
    }
    assert_eq!(here.migration().status(), "none");
    assert!(here.is_running());
}

#[test]
fn a_guest_that_may_hint_free_pages_is_saved() {
    let machine = machine(PC_10);
    let balloon = "virtio-balloon-pci,free-page-hint=on,iothread=io";
    let devices = ["-object", "iothread,id=io", "-device", balloon].map(str::to_owned);
    let mut here = need!(Vm::running_with(Release::V10, &machine, &devices));
    assert!(here.qmp.hints_free_pages().expect("an answer"));
    let folder = folder();
    let file = folder.path().join("vm.save").display().to_string();
    succeeds(Hotlift::start(&["save", "--qmp", &here.free_qmp(), &file]));
    let mut other = need!(Vm::waiting(Release::V10, &machine));
    assert!(!other.qmp.hints_free_pages().expect("an answer"));
}

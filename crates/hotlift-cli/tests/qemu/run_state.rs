//! Tests that both QEMUs report the same run state of the guest, before and after a migration. Among the cases are:
//!
//! - a disk that the destination cannot lock,
//! - a destination started with `-S`,
//! - a paused guest,
//! - a lost final message of `serve`.

use std::fs;
use std::io::{self, BufRead, BufReader, Write};
use std::net::{Shutdown, TcpListener, TcpStream};
use std::thread;

use hotlift_qmp::{Qemu, QmpAddress};
use serde_json::json;

use crate::hotlift::{Hotlift, Running};
use crate::need;
use crate::operator::{Adopted, machine, serve, succeeds};
use crate::vm::{DEADLINE, PC_7, PC_10, PC_11, Release, Vm, folder, until};

const ALL: [(Release, &str); 3] = [
    (Release::V7, PC_7),
    (Release::V10, PC_10),
    (Release::V11, PC_11),
];

/// QEMU's error for a disk that another process has locked.
const LOCKED: &str = "Failed to get \"write\" lock";

/// Returns a machine's disk in the image `file`, which a QEMU locks while it runs its guest.
fn disk(file: &str) -> Vec<String> {
    let image = fs::File::create(file).expect("an image");
    image.set_len(1 << 20).expect("its size");
    let node = format!("driver=raw,node-name=d0,file.driver=file,file.filename={file}");
    let device = "virtio-blk-pci,drive=d0".to_owned();
    ["-blockdev".to_owned(), node, "-device".to_owned(), device].to_vec()
}

/// Returns the state in which a QEMU leaves a guest that it cannot run.
fn stopped(release: Release) -> &'static str {
    match release {
        Release::V7 => "'paused'",
        _ => "'inmigrate'",
    }
}

fn status(qmp: &mut Qemu) -> String {
    qmp.query_status().expect("a status").status
}

/// Returns the exit code of a command, and its output.
fn ends(command: Running) -> (Option<i32>, String) {
    let (status, output) = command.wait();
    (status.code(), output.join("\n"))
}

/// Checks that the guest of `here` runs and counts.
fn runs_on(here: &mut Vm) {
    assert!(here.is_running(), "the guest does not run at the source");
    let count = here.count().expect("the guest has counted");
    here.continues_from(count);
    let proven = here.prove();
    here.qmp.cont().expect("cont");
    here.continues_from(proven);
}

impl Adopted {
    /// Returns the command line, followed by `more`, as arguments of a command.
    fn arguments(&self, release: Release, more: &[String]) -> Option<Vec<String>> {
        let mut arguments = vec!["--".to_owned()];
        arguments.extend(self.line(release)?);
        arguments.extend_from_slice(more);
        Some(arguments)
    }

    /// Returns true also for a zombie: a process that adopts it from a killed wrapper may never reap it.
    fn has_ended(&self) -> bool {
        let pid = fs::read_to_string(self.path("pid")).expect("it was started");
        let stat = fs::read_to_string(format!("/proc/{}/stat", pid.trim())).unwrap_or_default();
        // The state follows the name, which may contain a parenthesis.
        let state = stat
            .rsplit(')')
            .next()
            .and_then(|rest| rest.trim().chars().next());
        matches!(state, None | Some('Z'))
    }

    fn own_qmp(&self) -> Qemu {
        let address = QmpAddress::Unix(self.folder.path().join("test.qmp"));
        Qemu::connect(&address, DEADLINE).expect("it keeps running")
    }
}

/// Forwards the messages of the `serve` at `uri`, up to the message `last`, which is lost with the connection; returns the
/// address for `migrate`.
fn losing(uri: &str, last: &str) -> String {
    let listener = TcpListener::bind("127.0.0.1:0").expect("a port");
    let address = listener.local_addr().expect("an address");
    let to = uri.trim_start_matches("tcp:").to_owned();
    let last = format!("\"message\":\"{last}\"");
    thread::spawn(move || {
        let (near, _) = listener.accept().expect("a connection");
        let far = TcpStream::connect(to).expect("it listens");
        let ends = [&near, &far].map(|end| end.try_clone().expect("another one"));
        thread::spawn(move || {
            let [mut near, mut far] = ends;
            // Ends with the connection.
            let _ = io::copy(&mut near, &mut far);
        });
        let mut lines = BufReader::new(far.try_clone().expect("another one"));
        let mut line = Vec::new();
        while matches!(lines.read_until(b'\n', &mut line), Ok(1..)) {
            if String::from_utf8_lossy(&line).contains(&last) {
                break;
            }
            (&near).write_all(&line).expect("it is open");
            line.clear();
        }
        for end in [near, far] {
            let _ = end.shutdown(Shutdown::Both);
        }
    });
    format!("tcp:{address}")
}

fn words(arguments: &[String]) -> Vec<&str> {
    arguments.iter().map(String::as_str).collect()
}

#[test]
fn a_guest_whose_disk_is_locked_at_the_destination_keeps_running_at_the_source() {
    let images = folder();
    let image = |name: &str| images.path().join(name).display().to_string();
    for (release, name) in ALL {
        println!("{release:?}");
        let machine = machine(name);
        let (source_disk, locked_disk) = (disk(&image("source")), disk(&image("locked")));
        let _holder = need!(Vm::running_with(release, &machine, &locked_disk));
        let mut here = need!(Vm::running_with(release, &machine, &source_disk));

        // A QEMU that 'serve' started is ended.
        let there = Adopted::new(machine.clone());
        let line = need!(there.arguments(release, &locked_disk));
        let (serving, uri) = serve(&words(&line));
        let migrate = Hotlift::start(&["migrate", "--qmp", &here.free_qmp(), "--to", &uri]);
        for (code, output) in [ends(migrate), ends(serving)] {
            assert_eq!(code, Some(1), "{output}");
            assert!(output.contains(LOCKED), "{output}");
            assert!(output.contains(stopped(release)), "{output}");
        }
        assert!(there.has_ended(), "its QEMU lives on");
        runs_on(&mut here);

        // Another owner's QEMU has the guest, and an operator decides.
        let there = need!(Vm::waiting_with(release, &machine, &locked_disk));
        let (serving, uri) = serve(&["--qmp", &there.free_qmp()]);
        let migrate = Hotlift::start(&["migrate", "--qmp", &here.free_qmp(), "--to", &uri]);
        let (code, output) = ends(migrate);
        assert_eq!(code, Some(3), "{output}");
        let line = format!("hotlift settle --qmp unix:{} --here", here.free_qmp());
        for word in ["'running'", stopped(release), &line] {
            assert!(output.contains(word), "{word}: {output}");
        }
        let (code, output) = ends(serving);
        assert_eq!(code, Some(3), "{output}");
        for word in ["'running'", stopped(release), "--here"] {
            assert!(output.contains(word), "{word}: {output}");
        }
        assert_eq!(there.count(), None, "the guest has run at the destination");
        assert!(!here.is_running(), "the guest runs at the source");
        drop(there);
        let qmp = here.free_qmp();
        succeeds(Hotlift::start(&["settle", "--qmp", &qmp, "--here"]));
        runs_on(&mut here);
    }
}

#[test]
fn a_guest_is_not_restored_into_a_qemu_that_cannot_lock_its_disk() {
    let files = folder();
    let path = |name: &str| files.path().join(name).display().to_string();
    for (release, name) in ALL {
        let machine = machine(name);
        let disk = disk(&path("image"));
        let mut here = need!(Vm::running_with(release, &machine, &disk));
        let (file, qmp) = (path("vm.save"), here.free_qmp());
        let save = ["save", "--qmp", &qmp, &file, "--keep-running"];
        succeeds(Hotlift::start(&save));
        for lazy in [&[][..], &["--lazy"]] {
            println!("{release:?} {lazy:?}");
            let restore = [&["restore", &file][..], lazy].concat();
            let there = Adopted::new(machine.clone());
            let line = need!(there.arguments(release, &disk));
            let (code, output) = ends(Hotlift::start(&[&restore[..], &words(&line)].concat()));
            assert_eq!(code, Some(1), "{output}");
            assert!(output.contains(LOCKED), "{output}");
            assert!(!output.contains("the guest runs"), "{output}");
            assert!(there.has_ended(), "its QEMU lives on");

            let there = need!(Vm::waiting_with(release, &machine, &disk));
            let held = ["--qmp", &there.free_qmp()];
            let (code, output) = ends(Hotlift::start(&[&restore[..], &held].concat()));
            // Only the former's 'cont' can run the guest.
            let expected = if release == Release::V7 { 3 } else { 1 };
            assert_eq!(code, Some(expected), "{output}");
            assert!(output.contains(stopped(release)), "{output}");
            assert!(!output.contains("the guest runs"), "{output}");
            assert_eq!(there.count(), None, "the guest has run");
        }
        runs_on(&mut here);
    }
}

#[test]
fn a_guest_that_should_be_paused_stays_paused_and_is_reported_so() {
    for (release, name) in ALL {
        for (pauses, option) in [(true, &[][..]), (false, &["-S".to_owned()])] {
            println!("{release:?} {option:?}");
            let machine = machine(name);
            let mut here = need!(Vm::running(release, &machine));
            if pauses {
                here.qmp.stop().expect("stop");
            }
            let there = Adopted::new(machine.clone());
            let line = need!(there.arguments(release, option));
            let (serving, uri) = serve(&words(&line));
            let qmp = here.free_qmp();
            let output = succeeds(Hotlift::start(&["migrate", "--qmp", &qmp, "--to", &uri]));
            assert!(
                output.contains("the guest is paused at the destination"),
                "{output}"
            );
            let output = succeeds(serving);
            assert!(output.contains("the guest is paused here"), "{output}");
            let address = QmpAddress::Unix(there.folder.path().join("test.qmp"));
            let mut qmp = Qemu::connect(&address, DEADLINE).expect("it keeps running");
            assert_eq!(status(&mut qmp), "paused");
            assert!(!here.is_running());

            // The same with a held QEMU; the guest comes from a paused one, or is started with '-S'.
            let mut back = need!(Vm::waiting_with(release, &machine, option));
            let (serving, uri) = serve(&["--qmp", &back.free_qmp()]);
            if !pauses {
                qmp.cont().expect("cont");
            }
            drop(qmp);
            let there_qmp = there.path("test.qmp");
            let migrate = ["migrate", "--qmp", &there_qmp, "--to", &uri];
            let output = succeeds(Hotlift::start(&migrate));
            assert!(
                output.contains("the guest is paused at the destination"),
                "{output}"
            );
            succeeds(serving);
            assert_eq!(status(&mut back.qmp), "paused");
            let before = here.count().expect("the guest has counted");
            back.qmp.cont().expect("cont");
            back.continues_from(before);
        }
    }
}

#[test]
fn a_lost_final_message_of_serve_does_not_change_where_the_guest_is() {
    let (release, machine) = (Release::V10, machine(PC_10));
    let images = folder();
    let image = |name: &str| images.path().join(name).display().to_string();
    let (source_disk, locked_disk) = (disk(&image("source")), disk(&image("locked")));
    let _holder = need!(Vm::running_with(release, &machine, &locked_disk));

    // It runs there, or is paused there as expected.
    for (option, word) in [(&[][..], "runs there"), (&["-S".to_owned()], "as expected")] {
        println!("{option:?}");
        let mut here = need!(Vm::running(release, &machine));
        let there = Adopted::new(machine.clone());
        let line = need!(there.arguments(release, option));
        let (serving, uri) = serve(&words(&line));
        let to = losing(&uri, "completed");
        let migrate = Hotlift::start(&["migrate", "--qmp", &here.free_qmp(), "--to", &to]);
        let (code, output) = ends(migrate);
        assert_eq!(code, Some(0), "{output}");
        for word in [
            "the guest is at the destination",
            "the connection to 'hotlift serve' failed",
            word,
        ] {
            assert!(output.contains(word), "{word}: {output}");
        }
        succeeds(serving);
        assert!(!here.is_running(), "the guest runs at the source");
        let mut qmp = there.own_qmp();
        assert_eq!(
            qmp.query_status().expect("a status").running,
            option.is_empty()
        );
        qmp.quit().expect("quit");
    }

    // That QEMU was ended, and never ran it.
    let mut here = need!(Vm::running_with(release, &machine, &source_disk));
    let there = Adopted::new(machine.clone());
    let line = need!(there.arguments(release, &locked_disk));
    let (serving, uri) = serve(&words(&line));
    let to = losing(&uri, "failed");
    let migrate = Hotlift::start(&["migrate", "--qmp", &here.free_qmp(), "--to", &to]);
    let (code, output) = ends(migrate);
    assert_eq!(code, Some(1), "{output}");
    let (code, output) = ends(serving);
    assert_eq!(code, Some(1), "{output}");
    assert!(there.has_ended(), "its QEMU lives on");
    runs_on(&mut here);

    // Another owner's QEMU has it, and does not run it.
    let there = need!(Vm::waiting_with(release, &machine, &locked_disk));
    let (serving, uri) = serve(&["--qmp", &there.free_qmp()]);
    let to = losing(&uri, "failed");
    let migrate = Hotlift::start(&["migrate", "--qmp", &here.free_qmp(), "--to", &to]);
    let (code, output) = ends(migrate);
    assert_eq!(code, Some(3), "{output}");
    assert!(
        output.contains("the destination's QEMU has the guest, but does not run it"),
        "{output}"
    );
    let (code, output) = ends(serving);
    assert_eq!(code, Some(3), "{output}");
    assert!(!here.is_running(), "the guest runs at the source");
}

#[test]
fn a_guest_that_is_stopped_while_its_stream_is_passed_through_keeps_its_qemu() {
    let images = folder();
    let image = |name: &str| images.path().join(name).display().to_string();
    let machine = machine(PC_10);
    let release = Release::V10;
    let (here_disk, there_disk) = (disk(&image("here")), disk(&image("there")));
    let mut here = need!(Vm::running_with(release, &machine, &here_disk));
    // A block bitmap sends state while the guest runs.
    let bitmap = json!({ "node": "d0", "name": "b0" });
    let added = here.qmp.client().execute("block-dirty-bitmap-add", &bitmap);
    added.expect("a bitmap");
    let bitmaps = [("dirty-bitmaps", true)];
    here.qmp.set_capabilities(&bitmaps).expect("capabilities");
    let there = Adopted::new(machine);
    let line = need!(there.arguments(release, &there_disk));
    let (serving, uri) = serve(&words(&line));
    let qmp = here.free_qmp();
    let slowly = ["--multifd=off", "--max-bandwidth=2M"];
    let migrate = [&["migrate", "--qmp", &qmp, "--to", &uri][..], &slowly].concat();
    let migrate = Hotlift::start(&migrate);
    until(
        || "no pages are sent".to_owned(),
        || {
            let info = here.migration();
            info.ram.is_some_and(|ram| ram.normal > 0).then_some(())
        },
    );
    here.qmp.stop().expect("stop");
    for (code, output) in [ends(migrate), ends(serving)] {
        assert_eq!(code, Some(3), "{output}");
        assert!(output.contains("passed through unread"), "{output}");
    }
    // Only its operator knows that this is the expected state.
    let before = here.count().expect("the guest has counted");
    let mut qmp = there.own_qmp();
    assert_eq!(status(&mut qmp), "paused");
    assert!(!here.is_running(), "the guest runs at the source");
    qmp.cont().expect("cont");
    drop(qmp);
    there.has_the_guest(before);
}

#[test]
fn a_qemu_in_a_wrapper_that_cannot_lock_its_disk_is_ended_with_it() {
    let images = folder();
    let image = |name: &str| images.path().join(name).display().to_string();
    let (source_disk, locked_disk) = (disk(&image("source")), disk(&image("locked")));
    let (release, machine) = (Release::V10, machine(PC_10));
    let _holder = need!(Vm::running_with(release, &machine, &locked_disk));
    let mut here = need!(Vm::running_with(release, &machine, &source_disk));
    let there = Adopted::new(machine);
    let mut line = need!(there.arguments(release, &locked_disk));
    // A shell forks a command that another one follows.
    let wrapper = ["sh", "-c", "\"$@\"; :", "sh"].map(str::to_owned);
    line.splice(1..1, wrapper);
    let (serving, uri) = serve(&words(&line));
    let migrate = Hotlift::start(&["migrate", "--qmp", &here.free_qmp(), "--to", &uri]);
    for (code, output) in [ends(migrate), ends(serving)] {
        assert_eq!(code, Some(1), "{output}");
        assert!(output.contains(LOCKED), "{output}");
    }
    assert!(there.has_ended(), "its QEMU lives on");
    runs_on(&mut here);
}

/// Saves a guest in a file.
fn saved(release: Release, name: &'static str, file: &str) -> Option<()> {
    let here = Vm::running(release, &machine(name))?;
    succeeds(Hotlift::start(&["save", "--qmp", &here.free_qmp(), file]));
    Some(())
}

#[test]
fn a_guest_that_should_stay_paused_is_restored_lazily_and_not_reported_running() {
    let files = folder();
    let file = files.path().join("vm.save").display().to_string();
    for (release, name) in ALL {
        println!("{release:?}");
        need!(saved(release, name, &file));
        let there = Adopted::new(machine(name));
        let line = need!(there.arguments(release, &["-S".to_owned()]));
        let restore = [&["restore", "--lazy", &file][..], &words(&line)].concat();
        let output = succeeds(Hotlift::start(&restore));
        assert!(output.contains("the guest is paused after"), "{output}");
        assert!(!output.contains("guest runs"), "{output}");
        let mut qmp = there.own_qmp();
        assert_eq!(status(&mut qmp), "paused");
        qmp.quit().expect("quit");
    }
}

#[test]
fn a_qemu_that_quits_after_it_has_the_guest_is_a_failure() {
    let files = folder();
    let file = files.path().join("vm.save").display().to_string();
    need!(saved(Release::V10, PC_10, &file));
    let there = Adopted::new(machine(PC_10));
    let line = need!(there.arguments(Release::V10, &[]));
    // So slow that the end is far away.
    let restore = ["restore", "--lazy", "--max-bandwidth=1M", &file];
    let mut restore = Hotlift::start(&[&restore[..], &words(&line)].concat());
    restore.wait_for("the guest runs after");
    there.own_qmp().quit().expect("quit");
    let (code, output) = ends(restore);
    assert_eq!(code, Some(1), "{output}");
    assert!(output.contains("ended by 'quit'"), "{output}");
}

//! What a guest does at the end is what it did at the start, as both QEMUs show it: with a disk that the destination cannot
//! lock, with `-S`, and paused.

use std::fs;

use hotlift_qmp::{Qemu, QmpAddress};
use rustix::process::{Pid, test_kill_process};

use crate::hotlift::Hotlift;
use crate::need;
use crate::operator::{Adopted, machine, serve, succeeds};
use crate::vm::{DEADLINE, PC_7, PC_10, PC_11, Release, Vm, folder};

const ALL: [(Release, &str); 3] = [
    (Release::V7, PC_7),
    (Release::V10, PC_10),
    (Release::V11, PC_11),
];

/// What QEMU says of a disk that another process has.
const LOCKED: &str = "Failed to get \"write\" lock";

/// A machine's disk in the image `file`, which a QEMU that runs its guest locks.
fn disk(file: &str) -> Vec<String> {
    let image = fs::File::create(file).expect("an image");
    image.set_len(1 << 20).expect("its size");
    let node = format!("driver=raw,node-name=d0,file.driver=file,file.filename={file}");
    let device = "virtio-blk-pci,drive=d0".to_owned();
    ["-blockdev".to_owned(), node, "-device".to_owned(), device].to_vec()
}

/// The state that a QEMU leaves a guest in which it cannot run.
fn stopped(release: Release) -> &'static str {
    match release {
        Release::V7 => "'paused'",
        _ => "'inmigrate'",
    }
}

fn status(qmp: &mut Qemu) -> String {
    qmp.query_status().expect("a status").status
}

/// How a command ended, and what it has said.
fn ends(command: Hotlift) -> (Option<i32>, String) {
    let (status, said) = command.wait();
    (status.code(), said.join("\n"))
}

/// Checks that the guest of `here` runs and counts.
fn runs_on(here: &mut Vm) {
    assert!(here.is_running(), "the guest does not run at the source");
    let count = here.count().expect("the guest has counted");
    here.counts_on_from(count);
    let proven = here.prove();
    here.qmp.cont().expect("cont");
    here.counts_on_from(proven);
}

impl Adopted {
    /// The command line with `more` behind it, as arguments of a command.
    fn arguments(&self, release: Release, more: &[String]) -> Option<Vec<String>> {
        let mut arguments = vec!["--".to_owned()];
        arguments.extend(self.line(release)?);
        arguments.extend_from_slice(more);
        Some(arguments)
    }

    fn has_ended(&self) -> bool {
        let pid = fs::read_to_string(self.path("pid")).expect("it was started");
        let pid = Pid::from_raw(pid.trim().parse().expect("a number")).expect("a process id");
        test_kill_process(pid).is_err()
    }
}

fn words(arguments: &[String]) -> Vec<&str> {
    arguments.iter().map(String::as_str).collect()
}

#[test]
fn a_guest_whose_disk_is_locked_at_the_destination_runs_on_at_the_source() {
    let images = folder();
    let image = |name: &str| images.path().join(name).display().to_string();
    for (release, name) in ALL {
        println!("{release:?}");
        let machine = machine(name);
        let (source_disk, locked_disk) = (disk(&image("source")), disk(&image("locked")));
        let _holder = need!(Vm::running_with(release, &machine, &locked_disk));
        let mut here = need!(Vm::running_with(release, &machine, &source_disk));

        // A QEMU that 'serve' has started is ended.
        let there = Adopted::new(machine.clone());
        let line = need!(there.arguments(release, &locked_disk));
        let (serving, uri) = serve(&words(&line));
        let migrate = Hotlift::start(&["migrate", "--qmp", &here.free_qmp(), "--to", &uri]);
        for (code, said) in [ends(migrate), ends(serving)] {
            assert_eq!(code, Some(1), "{said}");
            assert!(said.contains(LOCKED), "{said}");
            assert!(said.contains(stopped(release)), "{said}");
        }
        assert!(there.has_ended(), "its QEMU lives on");
        runs_on(&mut here);

        // One of somebody else has the guest, and an operator decides.
        let there = need!(Vm::waiting_with(release, &machine, &locked_disk));
        let (serving, uri) = serve(&["--qmp", &there.free_qmp()]);
        let migrate = Hotlift::start(&["migrate", "--qmp", &here.free_qmp(), "--to", &uri]);
        let (code, said) = ends(migrate);
        assert_eq!(code, Some(3), "{said}");
        let line = format!("hotlift settle --qmp unix:{} --here", here.free_qmp());
        for word in ["'running'", stopped(release), &line] {
            assert!(said.contains(word), "{word}: {said}");
        }
        let (code, said) = ends(serving);
        assert_eq!(code, Some(3), "{said}");
        for word in ["'running'", stopped(release), "--here"] {
            assert!(said.contains(word), "{word}: {said}");
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
            let (code, said) = ends(Hotlift::start(&[&restore[..], &words(&line)].concat()));
            assert_eq!(code, Some(1), "{said}");
            assert!(said.contains(LOCKED), "{said}");
            assert!(!said.contains("the guest runs"), "{said}");
            assert!(there.has_ended(), "its QEMU lives on");

            let there = need!(Vm::waiting_with(release, &machine, &disk));
            let held = ["--qmp", &there.free_qmp()];
            let (code, said) = ends(Hotlift::start(&[&restore[..], &held].concat()));
            // Only the former's 'cont' can run the guest.
            let expected = if release == Release::V7 { 3 } else { 1 };
            assert_eq!(code, Some(expected), "{said}");
            assert!(said.contains(stopped(release)), "{said}");
            assert!(!said.contains("the guest runs"), "{said}");
            assert_eq!(there.count(), None, "the guest has run");
        }
        runs_on(&mut here);
    }
}

#[test]
fn a_guest_that_is_paused_or_is_to_be_stays_paused_and_is_said_to_be() {
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
            let said = succeeds(Hotlift::start(&["migrate", "--qmp", &qmp, "--to", &uri]));
            assert!(
                said.contains("the guest is paused at the destination"),
                "{said}"
            );
            let said = succeeds(serving);
            assert!(said.contains("the guest is paused here"), "{said}");
            let address = QmpAddress::Unix(there.folder.path().join("test.qmp"));
            let mut qmp = Qemu::connect(&address, DEADLINE).expect("it runs on");
            assert_eq!(status(&mut qmp), "paused");
            assert!(!here.is_running());

            // The same of a QEMU that is held; it comes from a paused one, or is started with '-S', too.
            let mut back = need!(Vm::waiting_with(release, &machine, option));
            let (serving, uri) = serve(&["--qmp", &back.free_qmp()]);
            if !pauses {
                qmp.cont().expect("cont");
            }
            drop(qmp);
            let there_qmp = there.path("test.qmp");
            let migrate = ["migrate", "--qmp", &there_qmp, "--to", &uri];
            let said = succeeds(Hotlift::start(&migrate));
            assert!(
                said.contains("the guest is paused at the destination"),
                "{said}"
            );
            succeeds(serving);
            assert_eq!(status(&mut back.qmp), "paused");
            let before = here.count().expect("the guest has counted");
            back.qmp.cont().expect("cont");
            back.counts_on_from(before);
        }
    }
}

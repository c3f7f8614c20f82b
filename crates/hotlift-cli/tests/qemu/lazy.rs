//! Tests lazy restores: guests run before their pages are loaded.

use std::path::Path;

use hotlift::file::FileFormat;
use hotlift::lazy::{Hooks, LazyReport, restore};
use hotlift::options::StreamOptions;
use hotlift::{Address, Control, MigrationError, Options};
use rustix::process::Signal;

use crate::files::{altered, keeps_running, machine, save, settings};
use crate::hotlift::{Hotlift, Running};
use crate::need;
use crate::operator::succeeds;
use crate::route::{Multifd, Side};
use crate::tls::{Certificates, flag};
use crate::vm::{Accelerator, Machine, PC_7, PC_10, PC_11, Release, Vm, folder};

/// Bytes per second of unrequested pages: so slow that the guest requests pages before they arrive, and so fast that the
/// program has all its pages after two seconds.
pub const BACKGROUND: u64 = 24 << 20;

/// Lets a machine listen for the VM in the file `from`, and restores it.
fn restore_lazily(
    from: &Path,
    release: Release,
    machine: &Machine,
) -> Option<(Vm, Result<LazyReport, MigrationError>)> {
    let mut vm = Vm::waiting(release, machine)?;
    let address = listens_for_pages(&mut vm);
    let options = Options {
        stream: StreamOptions {
            max_bandwidth: BACKGROUND,
            ..StreamOptions::default()
        },
        ..Options::default()
    };
    let control = Control::default();
    let report = restore(from, &address, false, &options, &control, Hooks::default());
    Some((vm, report))
}

/// Lets a waiting machine listen for a VM whose pages follow later; returns the address.
pub fn listens_for_pages(vm: &mut Vm) -> Address {
    Side::new(Multifd::Off).with("postcopy-ram").apply(vm);
    let uri = vm.uri("incoming");
    vm.qmp.migrate_incoming(&uri, true).expect("it listens");
    uri.parse().expect("a URI")
}

#[test]
fn a_guest_runs_before_it_has_its_pages_and_gets_them_all() {
    let folder = folder();
    let file = folder.path().join("vm");
    use Accelerator::{Kvm, Tcg};
    use Release::{V7, V10, V11};
    for (from, to, name, accelerator, method) in [
        (V10, V10, PC_10, Kvm, "zstd"),
        (V7, V7, PC_7, Kvm, "zlib"),
        (V7, V10, PC_7, Kvm, "none"),
        (V10, V10, PC_10, Tcg, "lz4"),
        (V11, V11, PC_11, Kvm, "zstd"),
        (V7, V11, PC_7, Kvm, "none"),
        (V11, V10, PC_10, Kvm, "zlib"),
    ] {
        println!("{from:?} {method} -> {to:?}");
        let machine = machine(name, accelerator);
        let mut here = need!(Vm::running(from, &machine));
        let before = here.count().expect("the guest counts");
        let settings = settings(method, Multifd::Channels(2));
        let source = Side::new(Multifd::Off);
        save(&mut here, source, &file, FileFormat::Hotlift, &settings);
        let before = before.max(here.count().expect("the guest has counted"));
        // The file can be used repeatedly.
        for _ in 0..2 {
            let (mut there, report) = need!(restore_lazily(&file, to, &machine));
            let report = report.unwrap_or_else(|error| panic!("restore: {}", error.chain()));
            assert!(
                report.normal_pages > 1000 && report.requests > 0,
                "{report:?}"
            );
            keeps_running(&mut there, before);
        }
    }
}

/// Saves a guest; returns the file, and a lower bound of its writes.
pub fn saved(files: &Path, machine: &Machine) -> Option<(String, u64)> {
    saved_as(files, "vm.save", machine)
}

fn saved_as(files: &Path, name: &str, machine: &Machine) -> Option<(String, u64)> {
    let here = Vm::running(Release::V10, machine)?;
    let file = files.join(name).display().to_string();
    let save = ["save", "--qmp", &here.free_qmp(), &file, "--method=zstd"];
    succeeds(Hotlift::start(&save));
    let count = here.count().expect("the guest has counted");
    Some((file, count))
}

#[test]
fn a_guest_whose_restore_is_killed_waits_for_its_pages_and_gets_them() {
    let files = folder();
    for release in [Release::V10, Release::V7, Release::V11] {
        let machine = machine(PC_7, Accelerator::Kvm);
        let (file, before) = need!(saved(files.path(), &machine));
        let mut there = need!(Vm::waiting(release, &machine));
        let qmp = there.free_qmp();
        // So slow that the end is far away.
        let slowly = ["--max-bandwidth=1M", "--cpu-limit=0.5"];
        let lazy = ["restore", "--lazy", &file, "--qmp", &qmp];
        let mut restore = Hotlift::start(&[&lazy[..], &slowly].concat());
        restore.wait_for("the guest runs after");
        // QEMU exits if the connection ends between its last message and the guest's first step.
        there.continues_from(before);
        restore.signal(Signal::KILL);
        let _ = restore.wait();
        there.wait_for_status("postcopy-paused");
        let (status, output) = Hotlift::start(&lazy).wait();
        assert_eq!(status.code(), Some(1), "{output:?}");
        assert!(output.join("\n").contains("--lazy --resume"), "{output:?}");

        // Again, and then to the end.
        let resume = [&lazy[..], &["--resume"]].concat();
        let mut again = Hotlift::start(&[&resume[..], &slowly].concat());
        again.wait_for("the guest continues");
        again.signal(Signal::INT);
        again.wait_for("leaves the guest waiting");
        again.signal(Signal::INT);
        let (status, output) = again.wait();
        assert_eq!(status.code(), Some(3), "{output:?}");
        let line = format!("hotlift restore --lazy --resume {file} --qmp unix:{qmp}");
        assert!(output.join("\n").contains(&line), "{output:?}");
        there.wait_for_status("postcopy-paused");
        let output = succeeds(Hotlift::start(&resume));
        assert!(output.contains("has all pages"), "{output:?}");
        keeps_running(&mut there, before);
        let refused = Hotlift::start(&resume).wait();
        assert_eq!(refused.0.code(), Some(1), "{:?}", refused.1);
    }
}

#[test]
fn a_damaged_page_pauses_the_guest_until_a_good_file_is_available() {
    let files = folder();
    let machine = machine(PC_10, Accelerator::Kvm);
    let (file, before) = need!(saved(files.path(), &machine));
    let shown = succeeds(Hotlift::start(&["show", &file, "--verify"]));
    assert!(shown.contains("no damage"), "{shown:?}");
    let whole = std::fs::read(&file).expect("the file");
    std::fs::write(&file, altered(&whole).0).expect("a damaged file");
    let (status, output) = Hotlift::start(&["show", &file, "--verify"]).wait();
    assert_eq!(status.code(), Some(1), "{output:?}");

    let mut there = need!(Vm::waiting(Release::V10, &machine));
    let qmp = there.free_qmp();
    let lazy = ["restore", "--lazy", &file, "--qmp", &qmp];
    let (status, output) = Hotlift::start(&lazy).wait();
    assert_eq!(status.code(), Some(3), "{output:?}");
    let words = output.join("\n");
    assert!(words.contains("a block of pages at byte"), "{words}");
    there.wait_for_status("postcopy-paused");

    // Another VM's pages do not help.
    let [other, resume] = ["other.save", "vm.save"].map(|name| {
        let file = files.path().join(name).display().to_string();
        ["restore", "--lazy", "--resume", "--qmp", &qmp, &file].map(str::to_owned)
    });
    std::fs::write(&file, &whole).expect("the good file");
    let _ = need!(saved_as(files.path(), "other.save", &machine));
    let arguments: Vec<&str> = other.iter().map(String::as_str).collect();
    let (status, output) = Hotlift::start(&arguments).wait();
    assert_eq!(status.code(), Some(3), "{output:?}");
    assert!(
        output.join("\n").contains("pages of a different file"),
        "{output:?}"
    );

    let arguments: Vec<&str> = resume.iter().map(String::as_str).collect();
    succeeds(Hotlift::start(&arguments));
    keeps_running(&mut there, before);
}

#[test]
fn a_file_that_cannot_be_restored_lazily_is_refused_before_the_guest_runs() {
    let files = folder();
    let machine = machine(PC_10, Accelerator::Kvm);
    let (file, _) = need!(saved(files.path(), &machine));
    let whole = std::fs::read(&file).expect("the file");
    let cut = files.path().join("cut");
    std::fs::write(&cut, &whole[..whole.len() - 1]).expect("a file");
    let mapped = files.path().join("mapped");
    std::fs::write(&mapped, b"QEVM\0\0\0\x03 and so on").expect("a file");
    for (file, reason) in [
        (&cut, "cut short"),
        (&mapped, "--lazy needs a file of 'hotlift save'"),
    ] {
        let there = need!(Vm::waiting(Release::V10, &machine));
        let file = file.display().to_string();
        let (status, output) =
            Hotlift::start(&["restore", "--lazy", &file, "--qmp", &there.free_qmp()]).wait();
        assert_eq!(status.code(), Some(1), "{output:?}");
        assert!(output.join("\n").contains(reason), "{output:?}");
        assert_eq!(there.count(), None, "the guest has run");
    }
}

#[test]
fn a_restore_whose_devices_qemu_refuses_quotes_qemu_and_does_not_advise_to_resume() {
    let files = folder();
    for (release, words) in [
        (Release::V10, &["load of migration failed"][..]),
        (Release::V7, &["never ran the guest"]),
        // Its main loop hangs after the failure, sometimes before it can answer.
        (
            Release::V11,
            &[
                "QEMU: loadvm failed during postcopy",
                "QEMU: it failed before it ran the guest",
            ],
        ),
    ] {
        println!("{release:?}");
        let machine = machine(release.machine(), Accelerator::Kvm);
        let more = ["-device", "virtio-rng-pci"].map(str::to_owned);
        let here = need!(Vm::running_with(release, &machine, &more));
        let file = files.path().join(release.name()).display().to_string();
        succeeds(Hotlift::start(&["save", "--qmp", &here.free_qmp(), &file]));
        let there = need!(Vm::waiting(release, &machine));
        let qmp = there.free_qmp();
        let accepted = "--ignore-differences";
        let lazy = ["restore", "--lazy", &file, accepted, "--qmp", &qmp];
        let (status, output) = Hotlift::start(&lazy).wait();
        let output = output.join("\n");
        assert_eq!(status.code(), Some(1), "{output}");
        assert!(words.iter().any(|words| output.contains(words)), "{output}");
        assert!(!output.contains("--resume"), "{output}");
        assert!(!output.contains("the guest runs"), "{output}");
        assert_eq!(there.count(), None, "the guest has run");
    }
}

#[test]
fn a_restore_resumes_though_another_client_has_started_a_migration() {
    let files = folder();
    // QEMU 11.1 exits at that request.
    for release in [Release::V10, Release::V7] {
        let machine = machine(PC_7, Accelerator::Kvm);
        let (file, before) = need!(saved(files.path(), &machine));
        let mut there = need!(Vm::waiting(release, &machine));
        let qmp = there.free_qmp();
        let lazy = ["restore", "--lazy", &file, "--qmp", &qmp];
        let mut restore = Hotlift::start(&[&lazy[..], &["--max-bandwidth=1M"]].concat());
        restore.wait_for("the guest runs after");
        there.continues_from(before);
        let nowhere = there.uri("nowhere");
        there
            .qmp
            .migrate(&nowhere)
            .expect_err("a migration that QEMU refuses");
        // After this, the wait for pages is no longer reported.
        assert_eq!(there.migration().status(), "setup");
        restore.signal(Signal::KILL);
        let _ = restore.wait();
        there.wait_for_status("postcopy-paused");
        let output = succeeds(Hotlift::start(&[&lazy[..], &["--resume"]].concat()));
        assert!(output.contains("has all pages"), "{output}");
        there.wait_for_status("completed");
        there.continues_from(before);
        let proven = there.prove();
        there.qmp.cont().expect("cont");
        there.continues_from(proven);
    }
}

#[test]
fn a_smaller_machines_refusal_of_a_file_is_quoted_and_no_running_guest_is_reported() {
    let files = folder();
    let machine = machine(PC_10, Accelerator::Kvm);
    let (file, _) = need!(saved(files.path(), &machine));
    let program = need!(Release::V10.program()).display().to_string();
    let accepted = "--ignore-differences";
    let restore = [
        "restore", "--lazy", &file, accepted, "--", &program, "-accel", "tcg",
    ];
    let smaller = [
        "-machine",
        PC_10,
        "-m",
        "16",
        "-uuid",
        hotlift_testkit::qemu::UUID,
        "-nodefaults",
        "-display",
        "none",
    ];
    let (status, output) = Hotlift::start(&[&restore[..], &smaller].concat()).wait();
    assert_eq!(status.code(), Some(1), "{output:?}");
    let output = output.join("\n");
    assert!(output.contains("mismatch: pc.ram: "), "{output}");
    assert!(!output.contains("the guest runs"), "{output}");
}

/// Starts a server of the save files in a folder, and returns its address.
pub fn serve(files: &Path, listen: &str, tls: &str) -> (Running, String) {
    let listen = format!("--listen={listen}");
    let mut serve = Hotlift::start(&["serve", &listen, &flag("files", files), tls]);
    let line = serve.wait_for("listening on ");
    (serve, line.rsplit(' ').next().expect("a word").to_owned())
}

#[test]
fn a_guest_restored_from_another_host_waits_while_that_host_is_down() {
    let certificates = Certificates::make();
    let tls = flag("tls", &certificates.dir());
    let files = folder();
    let machine = machine(PC_7, Accelerator::Kvm);
    let (_, before) = need!(saved(files.path(), &machine));
    let (mut server, at) = serve(files.path(), "tcp:127.0.0.1:0", &tls);
    let remote = format!("{at}/vm.save");
    let shown = succeeds(Hotlift::start(&["show", &remote, "--verify", &tls]));
    assert!(shown.contains("no damage"), "{shown:?}");
    for release in [Release::V10, Release::V7] {
        // With all pages first, and with none.
        let mut there = need!(Vm::waiting(release, &machine));
        let eager = ["restore", &remote, "--qmp", &there.free_qmp(), &tls];
        succeeds(Hotlift::start(&eager));
        keeps_running(&mut there, before);

        let mut there = need!(Vm::waiting(release, &machine));
        let qmp = there.free_qmp();
        let lazy = ["restore", "--lazy", &remote, "--qmp", &qmp, &tls];
        // So slow that the end is far away.
        let mut restore = Hotlift::start(&[&lazy[..], &["--max-bandwidth=3M"]].concat());
        restore.wait_for("the guest runs after");
        there.continues_from(before);
        server.signal(Signal::KILL);
        let _ = server.wait();
        restore.wait_for(&format!("lost {at}; trying again"));
        (server, _) = serve(files.path(), &at, &tls);
        restore.wait_for(&format!("{at} is back"));
        let (status, output) = restore.wait();
        assert!(status.success(), "{output:?}");
        keeps_running(&mut there, before);
    }
    server.signal(Signal::TERM);
    let (status, output) = server.wait();
    assert!(status.success(), "{output:?}");
    assert!(output.join("\n").contains("127.0.0.1 read "), "{output:?}");
}

#[test]
fn pages_of_a_file_that_replaced_the_first_do_not_reach_the_guest() {
    let certificates = Certificates::make();
    let tls = flag("tls", &certificates.dir());
    let files = folder();
    let machine = machine(PC_10, Accelerator::Kvm);
    let (file, before) = need!(saved(files.path(), &machine));
    let aside = files.path().join("aside");
    let (server, at) = serve(files.path(), "tcp:127.0.0.1:0", &tls);
    let remote = format!("{at}/vm.save");
    let mut there = need!(Vm::waiting(Release::V10, &machine));
    let qmp = there.free_qmp();
    let lazy = ["restore", "--lazy", &remote, "--qmp", &qmp, &tls];
    let mut restore = Hotlift::start(&[&lazy[..], &["--max-bandwidth=1M"]].concat());
    restore.wait_for("the guest runs after");
    there.continues_from(before);
    server.signal(Signal::KILL);
    let _ = server.wait();
    std::fs::rename(&file, &aside).expect("the file");
    let _ = need!(saved(files.path(), &machine));
    let (_server, _) = serve(files.path(), &at, &tls);
    let (status, output) = restore.wait();
    assert_eq!(status.code(), Some(3), "{output:?}");
    assert!(output.join("\n").contains("another file"), "{output:?}");
    there.wait_for_status("postcopy-paused");

    std::fs::rename(&aside, &file).expect("the file");
    succeeds(Hotlift::start(&[&lazy[..], &["--resume"]].concat()));
    keeps_running(&mut there, before);
}

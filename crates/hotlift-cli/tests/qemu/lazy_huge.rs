//! Tests lazy restores (guests run before their pages are loaded) in RAM of huge pages.

use std::fs;
use std::path::Path;
use std::thread;

use hotlift::file::FileFormat;
use hotlift::lazy::{Hooks, Preempt, restore};
use hotlift::options::StreamOptions;
use hotlift::{Control, MigrationError, Options};
use rustix::process::Signal;

use crate::files::{altered, keeps_running, machine, save, settings};
use crate::guest::Guest;
use crate::hotlift::Hotlift;
use crate::lazy::{BACKGROUND, listens_for_pages, serve};
use crate::need;
use crate::operator::succeeds;
use crate::route::{Multifd, Side};
use crate::tls::{Certificates, flag};
use crate::vm::Memory::{File, HugePages};
use crate::vm::{Accelerator, Machine, Memory, PC_7, Release, Vm, folder};

const RELEASES: [Release; 3] = [Release::V10, Release::V7, Release::V11];

/// Bytes of a huge page.
const HUGE: usize = 2 << 20;

/// Returns the machine type that all releases have.
fn with(memory: Memory) -> Machine {
    Machine {
        memory,
        ..machine(PC_7, Accelerator::Kvm)
    }
}

#[test]
fn a_guest_in_huge_pages_runs_before_it_has_them_and_gets_them_all() {
    let folder = folder();
    let file = folder.path().join("vm");
    let [small, huge] = [File, HugePages].map(with);
    // The source's kind of RAM does not matter.
    for (from, method) in [(&huge, "zstd"), (&small, "none")] {
        let mut here = need!(Vm::running(Release::V10, from));
        let method = settings(method, Multifd::Channels(2));
        let source = Side::new(Multifd::Off);
        save(&mut here, source, &file, FileFormat::Hotlift, &method);
        let before = here.count().expect("the guest has counted");
        for (to, preempt) in RELEASES.map(|to| [(to, false), (to, true)]).concat() {
            println!("{:?} into {to:?}, preempt: {preempt}", from.memory);
            let mut there = need!(Vm::waiting(to, &huge));
            if preempt {
                let preempt = Side::new(Multifd::Off).with("postcopy-ram");
                preempt.with("postcopy-preempt").apply(&mut there);
            }
            let address = listens_for_pages(&mut there);
            let page_sizes = there.qmp.page_sizes().expect("it answers");
            let page_sizes = page_sizes.expect("reported page sizes");
            let moment = match to {
                Release::V7 => Preempt::First,
                Release::V10 | Release::V11 => Preempt::BeforeRun,
            };
            let hooks = Hooks {
                preempt: preempt.then_some(moment),
                page_sizes: &page_sizes,
                ..Hooks::default()
            };
            let options = Options {
                stream: StreamOptions {
                    max_bandwidth: BACKGROUND,
                    ..StreamOptions::default()
                },
                ..Options::default()
            };
            let report = restore(&file, &address, false, &options, &Control::new(), hooks);
            let report = report.unwrap_or_else(|error| panic!("restore: {}", error.chain()));
            assert!(
                report.normal_pages > 1000 && report.requests > 0,
                "{report:?}"
            );
            // Only whole ones, except for RAM blocks of firmware: these are at most 512 KiB.
            let beside = (report.normal_pages + report.zero_pages) % 512;
            assert!(beside <= 128, "{report:?}");
            keeps_running(&mut there, before);
        }
    }
}

/// Saves a guest in the file `vm.save`; returns a lower bound of its writes.
fn saved(files: &Path) -> Option<(String, u64)> {
    let here = Vm::running(Release::V10, &with(File))?;
    let file = files.join("vm.save").display().to_string();
    let save = ["save", "--qmp", &here.free_qmp(), &file, "--method=zstd"];
    succeeds(Hotlift::start(&save));
    Some((file, here.count().expect("the guest has counted")))
}

#[test]
fn a_guest_in_huge_pages_whose_restore_is_killed_gets_the_rest_of_them() {
    let files = folder();
    let (file, before) = need!(saved(files.path()));
    let certificates = Certificates::make();
    let tls = flag("tls", &certificates.dir());
    let (_server, at) = serve(files.path(), "tcp:127.0.0.1:0", &tls);
    let remote = [format!("{at}/vm.save"), tls];
    for (to, is_remote) in RELEASES.map(|to| [(to, false), (to, true)]).concat() {
        println!("{to:?} from another host: {is_remote}");
        let mut there = need!(Vm::waiting(to, &with(HugePages)));
        let qmp = there.free_qmp();
        let mut lazy = vec!["restore", "--lazy", "--qmp", &qmp];
        match is_remote {
            true => lazy.extend(remote.iter().map(String::as_str)),
            false => lazy.push(&file),
        }
        // So slow that the end is far away.
        let mut restore = Hotlift::start(&[&lazy[..], &["--max-bandwidth=4M"]].concat());
        restore.wait_for("the guest runs after");
        there.continues_from(before);
        restore.signal(Signal::KILL);
        let _ = restore.wait();
        there.wait_for_status("postcopy-paused");
        let output = succeeds(Hotlift::start(&[&lazy[..], &["--resume"]].concat()));
        assert!(output.contains("has all pages"), "{output:?}");
        keeps_running(&mut there, before);
    }
}

#[test]
fn a_partly_damaged_huge_page_pauses_the_guest_until_a_good_file_is_available() {
    let files = folder();
    let (file, before) = need!(saved(files.path()));
    let whole = fs::read(&file).expect("the file");
    let damaged = altered(&whole).0;
    for to in RELEASES {
        println!("{to:?}");
        fs::write(&file, &damaged).expect("a damaged file");
        let mut there = need!(Vm::waiting(to, &with(HugePages)));
        let qmp = there.free_qmp();
        let lazy = ["restore", "--lazy", &file, "--qmp", &qmp];
        let (status, output) = Hotlift::start(&lazy).wait();
        assert_eq!(status.code(), Some(3), "{output:?}");
        assert!(
            output.join("\n").contains("a block of pages at byte"),
            "{output:?}"
        );
        there.wait_for_status("postcopy-paused");
        fs::write(&file, &whole).expect("the good file");
        succeeds(Hotlift::start(&[&lazy[..], &["--resume"]].concat()));
        keeps_running(&mut there, before);
    }
}

#[test]
fn a_linux_in_zero_huge_pages_gets_them_on_demand() {
    let small = Machine {
        name: PC_7,
        accelerator: Accelerator::Tcg,
        memory: File,
        guest: need!(Guest::linux()),
    };
    let huge = Machine {
        memory: HugePages,
        ..small.clone()
    };
    let folder = folder();
    let file = folder.path().join("vm");
    let mut here = need!(Vm::running(Release::V10, &small));
    let (source, method) = (
        Side::new(Multifd::Off),
        settings("zstd", Multifd::Channels(2)),
    );
    save(&mut here, source, &file, FileFormat::Hotlift, &method);
    let before = here.count().expect("the guest has counted");
    let ram = here.ram();
    let mut huge_pages = ram.chunks(HUGE);
    let is_zero = |page: &[u8]| page.iter().all(|&byte| byte == 0);
    let zero = HUGE * huge_pages.rposition(is_zero).expect("RAM that is not used");
    for to in RELEASES {
        println!("{to:?}");
        let mut there = need!(Vm::waiting(to, &huge));
        let address = listens_for_pages(&mut there);
        let page_sizes = there.qmp.page_sizes().expect("it answers");
        let hooks = Hooks {
            page_sizes: &page_sizes.expect("reported page sizes"),
            ..Hooks::default()
        };
        // Requested pages come at once, all others much later.
        let options = Options {
            stream: StreamOptions {
                max_bandwidth: 1 << 20,
                ..StreamOptions::default()
            },
            ..Options::default()
        };
        let control = Control::new();
        let report = thread::scope(|scope| {
            let restoring =
                scope.spawn(|| restore(&file, &address, false, &options, &control, hooks));
            there.wait_for_status("postcopy-active");
            there.continues_from(before);
            // The page arrives only on request: QEMU's main thread waits until it is there.
            let there_is = there.hmp(&format!("xp /2gx {zero:#x}"));
            assert!(there_is.contains(": 0x0000000000000000 0x0000000000000000"));
            control.change(&Options::default());
            restoring.join().expect("no panic")
        });
        let report = report.unwrap_or_else(|error| panic!("restore: {}", error.chain()));
        assert!(report.zero_pages >= 512, "{report:?}");
        keeps_running(&mut there, before);
    }
}

#[test]
fn pages_too_large_for_a_lazy_restore_are_refused_before_the_guest_runs() {
    let folder = folder();
    let file = folder.path().join("vm");
    let machine = with(File);
    let mut here = need!(Vm::running(Release::V10, &machine));
    let (source, method) = (Side::new(Multifd::Off), settings("none", Multifd::Off));
    save(&mut here, source, &file, FileFormat::Hotlift, &method);
    let mut there = need!(Vm::waiting(Release::V10, &machine));
    let address = listens_for_pages(&mut there);
    let hooks = Hooks {
        page_sizes: &[("pc.ram".to_owned(), 1 << 30)],
        ..Hooks::default()
    };
    let (options, control) = (Options::default(), Control::new());
    let error = restore(&file, &address, false, &options, &control, hooks).unwrap_err();
    let is_refused = |error: &MigrationError| match error {
        MigrationError::PageSize { block, size } => block == "pc.ram" && *size == 1 << 30,
        _ => false,
    };
    assert!(is_refused(&error), "{error}");
    assert_eq!(there.count(), None, "the guest has run");
}

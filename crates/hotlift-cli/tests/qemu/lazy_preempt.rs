//! Tests the separate connection for pages that a guest waits for (postcopy-preempt).

use std::io;
use std::net::Shutdown;
use std::os::unix::net::{UnixListener, UnixStream};
use std::path::{Path, PathBuf};
use std::sync::Arc;
use std::sync::atomic::{AtomicU64, Ordering};
use std::thread;

use hotlift::file::FileFormat;
use hotlift::lazy::{Hooks, Preempt, restore};
use hotlift::{Address, Control, Options};
use rustix::process::Signal;

use crate::files::{keeps_running, machine, save, settings};
use crate::hotlift::Hotlift;
use crate::need;
use crate::operator::succeeds;
use crate::route::{Multifd, Side};
use crate::vm::{Accelerator, PC_7, PC_10, PC_11, Release, Vm, folder};

/// Bytes of a record beside the page: its address, and the longest name of a RAM block here.
const RECORD_HEAD: u64 = 8 + 1 + 32;

/// End marker, which QEMU 7.2 requires.
const END: u64 = 8;

/// Forwards connections from a socket at `at` to QEMU's at `to`; counts the bytes of each, in the order of connecting.
fn count_between(at: &Path, to: PathBuf) -> Arc<[AtomicU64; 3]> {
    let sent = Arc::<[AtomicU64; 3]>::default();
    let counts = Arc::clone(&sent);
    let listener = UnixListener::bind(at).expect("a socket");
    thread::spawn(move || {
        for (number, here) in listener.incoming().enumerate() {
            let (here, counts) = (here.expect("a connection"), Arc::clone(&counts));
            let there = UnixStream::connect(&to).expect("QEMU listens");
            let both = || {
                let clone = |one: &UnixStream| one.try_clone().expect("a descriptor");
                (clone(&here), clone(&there))
            };
            let (forth, back) = (both(), both());
            thread::spawn(move || pass(forth, &counts[number.min(2)]));
            thread::spawn(move || pass((back.1, back.0), &AtomicU64::new(0)));
        }
    });
    sent
}

/// Copies until either side closes.
fn pass((mut from, mut to): (UnixStream, UnixStream), count: &AtomicU64) {
    let mut buffer = vec![0; 64 << 10];
    while let Ok(read @ 1..) = io::Read::read(&mut from, &mut buffer) {
        count.fetch_add(read as u64, Ordering::Relaxed);
        if io::Write::write_all(&mut to, &buffer[..read]).is_err() {
            break;
        }
    }
    let _ = from.shutdown(Shutdown::Read);
    let _ = to.shutdown(Shutdown::Write);
}

#[test]
fn requested_pages_use_the_preempt_channel_of_every_qemu_that_has_one() {
    use Release::{V7, V10, V11};
    let files = folder();
    for (from, name, to) in [
        (V7, PC_7, &[V7, V10, V11][..]),
        (V10, PC_10, &[V10]),
        (V11, PC_11, &[V11]),
    ] {
        let machine = machine(name, Accelerator::Kvm);
        let mut here = need!(Vm::running(from, &machine));
        let file = files.path().join(name);
        let method = settings("zstd", Multifd::Channels(2));
        save(
            &mut here,
            Side::new(Multifd::Off),
            &file,
            FileFormat::Hotlift,
            &method,
        );
        let before = here.count().expect("the guest has counted");
        for to in to {
            println!("{name} into {to:?}");
            let mut there = need!(Vm::waiting(*to, &machine));
            let side = Side::new(Multifd::Off).with("postcopy-ram");
            side.with("postcopy-preempt").apply(&mut there);
            let uri = there.uri("incoming");
            there.qmp.migrate_incoming(&uri, true).expect("it listens");
            let between = there.path("between");
            let sent = count_between(&between, there.path("incoming"));
            let address = Address::Unix { path: between };
            let preempt = match to {
                V7 => Preempt::First,
                V10 | V11 => Preempt::BeforeRun,
            };
            let hooks = Hooks {
                preempt: Some(preempt),
                ..Hooks::default()
            };
            let (options, control) = (Options::default(), Control::default());
            let report = restore(&file, &address, false, &options, &control, hooks);
            let report = report.unwrap_or_else(|error| panic!("restore: {}", error.chain()));
            let [main, alone, others] = sent.each_ref().map(|sent| sent.load(Ordering::Relaxed));
            assert!(report.requests > 0 && alone > 4096, "{report:?} {alone}");
            // At the end, QEMU does not wait for further data.
            let most = report.requests * (4096 + RECORD_HEAD) + END;
            assert!(alone <= most, "{alone} bytes for {} pages", report.requests);
            assert!(main > alone && others == 0, "{main} {alone} {others}");
            keeps_running(&mut there, before);
        }
    }
}

#[test]
fn a_restore_enables_the_preempt_channel_and_restores_the_capability() {
    use Release::{V7, V10, V11};
    let files = folder();
    let machine = machine(PC_7, Accelerator::Kvm);
    let here = need!(Vm::running(V10, &machine));
    let file = files.path().join("vm.save").display().to_string();
    succeeds(Hotlift::start(&["save", "--qmp", &here.free_qmp(), &file]));
    let before = here.count().expect("the guest has counted");
    let preempt = |there: &mut Vm| {
        let capabilities = there.qmp.query_capabilities().expect("capabilities");
        let mut preempt = capabilities.into_iter();
        preempt.any(|capability| capability == ("postcopy-preempt".to_owned(), true))
    };
    for release in [V10, V7, V11] {
        let mut there = need!(Vm::waiting(release, &machine));
        let qmp = there.free_qmp();
        let lazy = ["restore", "--lazy", &file, "--qmp", &qmp];
        // So slow that the end is far away.
        let mut restore = Hotlift::start(&[&lazy[..], &["--max-bandwidth=1M"]].concat());
        restore.wait_for("the guest runs after");
        there.continues_from(before);
        assert!(preempt(&mut there), "{release:?}");
        restore.signal(Signal::KILL);
        let _ = restore.wait();
        there.wait_for_status("postcopy-paused");
        succeeds(Hotlift::start(&[&lazy[..], &["--resume"]].concat()));
        assert!(!preempt(&mut there), "{release:?}");
        keeps_running(&mut there, before);
    }
}

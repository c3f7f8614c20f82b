//! Tests that waiting processes sleep until an event, and do not poll.

use std::io::Write;
use std::net::TcpListener;
use std::path::Path;
use std::thread;

use hotlift::lazy::{Hooks, restore};
use hotlift::options::StreamOptions;
use hotlift::{Control, Options, Status};
use hotlift_testkit::alone;
use hotlift_testkit::wake_ups::sleep_through;

use crate::agent::Hosts;
use crate::files::machine;
use crate::hotlift::{Hotlift, Running};
use crate::lazy::{listens_for_pages, saved};
use crate::need;
use crate::vm::{Accelerator, PC_7, Release, Vm, folder, until};

#[test]
fn idle_commands_and_the_idle_agent_never_wake() {
    alone!();
    let hosts = need!(Hosts::new());
    let files = folder();
    let machine = machine(PC_7, Accelerator::Kvm);
    let (file, _) = need!(saved(files.path(), &machine));
    let mut vm = need!(Vm::waiting(Release::V10, &machine));
    let address = listens_for_pages(&mut vm);
    // The other pages take years. The guest soon has those that it requests.
    let options = Options {
        stream: StreamOptions {
            max_bandwidth: 1,
            ..StreamOptions::default()
        },
        ..Options::default()
    };
    let control = Control::default();
    let agent = hosts.source("");
    let mut waits = Hotlift::start(&["serve", "--listen=tcp:127.0.0.1:0", "--", "false"]);
    waits.wait_for("listening on tcp:");
    let listen = format!("--listen=unix:{}", files.path().join("socket").display());
    let folder = format!("--files={}", files.path().display());
    let mut file_server = Hotlift::start(&["serve", &listen, &folder]);
    file_server.wait_for("listening");
    let pid = |it: &Running| u32::try_from(it.pid()).expect("a process id");
    let hooks = Hooks::default();
    let restores = || restore(Path::new(&file), &address, false, &options, &control, hooks);
    thread::scope(|scope| {
        let restored = scope.spawn(restores);
        until(
            || "it does not run".to_owned(),
            || (control.status() == Status::Active).then_some(()),
        );
        // A running guest requests pages.
        vm.qmp.stop().expect("stop");
        let threads = [
            (std::process::id(), "lazy/"),
            (pid(&agent.agent), ""),
            (pid(&waits), ""),
            (pid(&file_server), ""),
        ];
        sleep_through(&threads, &[]);
        drop(vm);
        assert!(
            restored.join().expect("a thread").is_err(),
            "its guest has gone"
        );
    });
    agent.end();
}

#[test]
fn a_migrate_whose_destination_gets_its_qemu_ready_never_wakes() {
    alone!();
    let vm = need!(Vm::running(Release::V10, &machine(PC_7, Accelerator::Kvm)));
    let listener = TcpListener::bind("127.0.0.1:0").expect("a listener");
    let to = format!("--to=tcp:{}", listener.local_addr().expect("an address"));
    let qmp = format!("--qmp={}", vm.free_qmp());
    let mut migrate = Hotlift::start(&["migrate", &qmp, &to]);
    let (mut serve, _) = listener.accept().expect("a connection");
    let has_hello = b"{\"message\":\"progress\",\"received-bytes\":0}\n";
    serve.write_all(has_hello).expect("a message");
    migrate.wait_for("its QEMU is not ready");
    let pid = u32::try_from(migrate.pid()).expect("a process id");
    sleep_through(&[(pid, "")], &[]);
    drop(serve);
    migrate.wait_for("the other side closed the connection");
}

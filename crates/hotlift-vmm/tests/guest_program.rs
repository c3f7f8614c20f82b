//! The guest program runs under other VMMs, too.

use std::io::{BufRead, BufReader};
use std::process::{Child, Command, Stdio};
use std::sync::mpsc;
use std::time::Duration;

use hotlift_testkit::qemu;
use hotlift_vmm::kvm;

/// Far beyond what either accelerator takes.
const LIMIT: Duration = Duration::from_secs(60);

/// Killed however the test ends.
struct Qemu(Child);

impl Drop for Qemu {
    fn drop(&mut self) {
        let _ = self.0.kill();
        let _ = self.0.wait();
    }
}

/// Value of `name=number` in a line of the guest.
fn value(line: &str, name: &str) -> Option<u64> {
    line.split_whitespace()
        .find_map(|word| word.strip_prefix(name)?.strip_prefix('=')?.parse().ok())
}

fn counts_up_under(accelerator: &str) {
    let Some(program) = qemu::installed() else {
        return;
    };
    let folder = tempfile::tempdir().unwrap();
    let elf = folder.path().join("hotlift.elf");
    std::fs::write(&elf, kvm::ELF).unwrap();
    let mut qemu = Qemu(
        Command::new(program)
            .args([
                "-accel",
                accelerator,
                "-M",
                "microvm,isa-serial=on",
                "-m",
                "64",
            ])
            .args([
                "-nodefaults",
                "-display",
                "none",
                "-serial",
                "stdio",
                "-kernel",
            ])
            .arg(&elf)
            .args([
                "-append",
                "workload=hotset rate=20000 ws=33554432 seed=5 tsc_khz=1000000",
            ])
            .stdin(Stdio::null())
            .stdout(Stdio::piped())
            .stderr(Stdio::null())
            .spawn()
            .unwrap(),
    );
    let output = BufReader::new(qemu.0.stdout.take().unwrap());
    let (send, lines) = mpsc::channel();
    let reader = std::thread::spawn(move || {
        for line in output.lines().map_while(Result::ok) {
            if send.send(line).is_err() {
                return;
            }
        }
    });
    let mut counts = Vec::new();
    while counts.len() < 4 {
        let line = lines.recv_timeout(LIMIT).expect("the guest says nothing");
        if let Some(writes) = value(&line, "writes") {
            assert_eq!(value(&line, "errors"), Some(0), "{line}");
            assert_eq!(value(&line, "vcpu"), Some(0), "{line}");
            counts.push(writes);
        }
    }
    assert!(counts.is_sorted_by(|a, b| a < b), "{counts:?}");
    drop(lines);
    drop(qemu);
    reader.join().unwrap();
}

#[test]
fn the_program_counts_up_under_qemu_tcg() {
    counts_up_under("tcg");
}

#[test]
fn the_program_counts_up_under_qemu_kvm() {
    if qemu::has_kvm() {
        counts_up_under("kvm");
    }
}

//! Tests that the guest program also runs under other VMMs.

use std::time::{Duration, Instant};

use hotlift_testkit::qemu::{self, Launched, PATIENCE};
use hotlift_vmm::kvm;

/// Returns the value of `name=number` in a line of the guest.
fn value(line: &str, name: &str) -> Option<u64> {
    line.split_whitespace()
        .find_map(|word| word.strip_prefix(name)?.strip_prefix('=')?.parse().ok())
}

fn counts_up_under(accelerator: &str) {
    let Some(program) = qemu::installed() else {
        return;
    };
    let folder = qemu::folder().unwrap();
    let elf = folder.path().join("hotlift.elf");
    std::fs::write(&elf, kvm::ELF).unwrap();
    let mut line = qemu::bare(&folder.path().join(qemu::QMP));
    for (flag, value) in [
        ("-accel", accelerator),
        ("-machine", "microvm,isa-serial=on"),
        ("-m", "64"),
        ("-serial", "stdio"),
        ("-kernel", &*elf.display().to_string()),
        (
            "-append",
            "workload=hotset rate=20000 ws=33554432 seed=5 tsc_khz=1000000",
        ),
    ] {
        line.extend([flag, value].map(str::to_owned));
    }
    let mut qemu = Launched::start(&program, &line, folder).unwrap();
    let deadline = Instant::now() + PATIENCE;
    let counts = loop {
        let output = qemu.process().output_lines();
        let lines = output
            .iter()
            .filter_map(|line| Some((line, value(line, "writes")?)));
        let counts: Vec<_> = lines.collect();
        if counts.len() >= 4 {
            for (line, _) in &counts {
                assert_eq!(value(line, "errors"), Some(0), "{line}");
                assert_eq!(value(line, "vcpu"), Some(0), "{line}");
            }
            break counts.iter().map(|(_, count)| *count).collect::<Vec<_>>();
        }
        let ended = qemu.process_mut().ended();
        assert!(ended.is_none() && Instant::now() < deadline, "{output:?}");
        std::thread::sleep(Duration::from_millis(5));
    };
    assert!(counts.is_sorted_by(|a, b| a < b), "{counts:?}");
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

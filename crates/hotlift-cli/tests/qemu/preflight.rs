//! Tests that differences between the two VMs are detected before the first page. Each difference is rejected, reported
//! or printed.

use std::fs;
use std::io::ErrorKind;
use std::net::TcpListener;
use std::path::Path;

use hotlift_testkit::qemu::Launched;
use rustix::process::Signal;

use crate::hotlift::Hotlift;
use crate::need;
use crate::operator::{has_moved, machine, serve, succeeds};
use crate::vm::{Release, Vm, folder, until};

const RELEASES: [Release; 3] = [Release::V7, Release::V10, Release::V11];

/// Splits a command line into arguments.
fn words(line: &str) -> Vec<String> {
    line.split_whitespace().map(str::to_owned).collect()
}

/// Lets the guest's firmware use the ACPI device for vCPU hotplug, like an operating system: a write of 0 to the first port of
/// PIIX4's device.
fn use_cpu_hotplug(here: &mut Vm) {
    here.hmp("o /b 0xaf00 0");
}

/// Returns true if a VM waits for a migration that has not started.
fn waits(there: &mut Vm) -> bool {
    let state = there.qmp.query_status().expect("a status");
    state.status == "inmigrate" && there.migration().status() == "none"
}

/// Runs a command to its end, and returns its exit code and all output.
fn run(arguments: &[&str]) -> (Option<i32>, String) {
    let (status, output) = Hotlift::start(arguments).wait();
    (status.code(), output.join("\n"))
}

#[test]
fn a_difference_that_qemu_refuses_is_refused_before_the_first_page() {
    let files = folder();
    let rom = files.path().join("rom");
    // QEMU rounds it up to 512 KiB; its own ROM of this device has 256 KiB.
    fs::write(&rom, vec![0; (256 << 10) + 1]).expect("a ROM");
    let other_rom = format!(",romfile={}", rom.display());
    let line = |maxcpus: u32, dimm: &str, rom: &str| {
        words(&format!(
            "-smp 1,maxcpus={maxcpus} -m slots=2,maxmem=1G -device virtio-net-pci{rom} {dimm}"
        ))
    };
    let dimm = "-object memory-backend-ram,id=dimm0,size=64M -device pc-dimm,memdev=dimm0";
    for release in RELEASES {
        println!("{release:?}");
        let machine = machine(release.machine());
        let mut here = need!(Vm::running_with(release, &machine, &line(8, dimm, "")));
        use_cpu_hotplug(&mut here);
        let qmp = here.free_qmp();
        let settings = here.qmp.query_parameters().expect("parameters");
        for (other, expected) in [
            (
                line(4, dimm, ""),
                "number of possible vCPUs: the source has 8, the destination has 4 (start the destination's QEMU with \
                 -smp …,maxcpus=8)",
            ),
            (
                line(8, "", ""),
                "RAM block dimm0: the source has 67108864 bytes, the destination has none",
            ),
            (
                line(8, dimm, &other_rom),
                "virtio-net-pci.rom: the source has 262144 bytes, the destination has 524288 bytes",
            ),
        ] {
            let mut there = need!(Vm::waiting_with(release, &machine, &other));
            let (mut serve, uri) = serve(&["--qmp", &there.free_qmp()]);
            let check = ["migrate", "--qmp", &qmp, "--to", &uri, "--check"];
            let (status, lines) = Hotlift::start_with(&check, &[("COLUMNS", "")]).wait();
            let output = lines.join("\n");
            assert_eq!(status.code(), Some(1), "{output}");
            assert!(output.contains("of the differences above"), "{output}");
            let table: Vec<_> = output
                .lines()
                .filter(|line| line.contains(['│', '┆']))
                .collect();
            assert!(table.len() > 10, "{output}");
            assert!(
                table.iter().all(|line| line.chars().count() <= 80),
                "{output}"
            );
            for result in ["same", "refused"] {
                assert!(table.iter().any(|line| line.contains(result)), "{output}");
            }
            serve.wait_for("compared its VM");

            let (code, output) = run(&["migrate", "--qmp", &qmp, "--to", &uri]);
            assert_eq!(code, Some(1), "{output}");
            assert!(output.contains(expected), "{output}");
            assert!(waits(&mut there));
            serve.signal(Signal::INT);
            serve.wait();
        }
        assert_eq!(here.migration().status(), "none");
        assert_eq!(here.qmp.query_parameters().expect("parameters"), settings);
        assert!(here.is_running());
    }
}

#[test]
fn a_difference_that_qemu_accepts_is_a_warning_and_the_guest_moves() {
    for release in RELEASES {
        println!("{release:?}");
        let machine = machine(release.machine());
        // QEMU 11.1 sends the state of all possible vCPUs, whatever the guest has done, and refuses another number.
        let smp = match release {
            Release::V11 => "",
            Release::V7 | Release::V10 => "-smp 1,maxcpus=2",
        };
        let more = words(&format!("{smp} -cpu qemu64,-cx16 -device virtio-rng-pci"));
        let mut here = need!(Vm::running(release, &machine));
        let mut there = need!(Vm::waiting_with(release, &machine, &more));
        let (serve, uri) = serve(&["--qmp", &there.free_qmp()]);
        let qmp = here.free_qmp();
        let mut expected = vec![
            // With two vCPUs, QEMU on an AMD shows cmp-legacy.
            "CPU flags: the source has cx16, the destination has ",
            "the source has none, the destination has virtio-rng-pci",
        ];
        if !smp.is_empty() {
            expected.push("number of possible vCPUs: the source has 1, the destination has 2");
        }
        let (code, output) = run(&["migrate", "--qmp", &qmp, "--to", &uri, "--check", "--json"]);
        assert_eq!(code, Some(0), "{output}");
        assert!(output.contains(r#""outcome":"different""#), "{output}");
        assert!(waits(&mut there) && here.is_running());
        let output = succeeds(Hotlift::start(&["migrate", "--qmp", &qmp, "--to", &uri]));
        for words in expected {
            let is_warned = |line: &str| line.starts_with("warning: ") && line.contains(words);
            assert!(output.lines().any(is_warned), "{words}\n{output}");
        }
        succeeds(serve);
        has_moved(&mut here, &mut there);
    }
}

#[test]
fn a_saved_vm_is_compared_with_the_one_that_gets_its_guest() {
    let files = folder();
    for release in RELEASES {
        println!("{release:?}");
        let machine = machine(release.machine());
        let file = files.path().join(release.name()).display().to_string();
        let devices = words("-smp 2 -device virtio-rng-pci,addr=0x7");
        let mut here = need!(Vm::running_with(release, &machine, &devices));
        succeeds(Hotlift::start(&["save", "--qmp", &here.free_qmp(), &file]));

        let fewer = words("-smp 1 -device virtio-rng-pci,addr=0x8");
        let mut there = need!(Vm::waiting_with(release, &machine, &fewer));
        for how in [&[][..], &["--lazy"]] {
            let qmp = there.free_qmp();
            let (code, output) = run(&[&["restore", &file, "--qmp", &qmp][..], how].concat());
            assert_eq!(code, Some(1), "{output}");
            for words in [
                "number of vCPUs: the source has 2, the destination has 1",
                "device i440FX-pcihost/07.0: the source has virtio-rng-pci",
            ] {
                assert!(output.contains(words), "{output}");
            }
            assert!(waits(&mut there), "{how:?}");
        }

        let mut there = need!(Vm::waiting_with(release, &machine, &devices));
        let restore = ["restore", &file, "--qmp", &there.free_qmp()];
        let output = succeeds(Hotlift::start(&restore));
        assert!(!output.contains("warning: "), "{output}");
        has_moved(&mut here, &mut there);
        until(
            || "it does not run".to_owned(),
            || there.is_running().then_some(()),
        );
    }
}

#[test]
fn a_vm_that_qemu_does_not_migrate_is_refused_before_the_destination_is_asked() {
    let files = folder();
    let memory = files.path().join("memory");
    let file = files.path().join("vm").display().to_string();
    // A peer shares the memory of another machine.
    let peer = words(&format!(
        "-object memory-backend-file,id=m,size=4M,share=on,mem-path={} -device ivshmem-plain,memdev=m",
        memory.display()
    ));
    for release in RELEASES {
        println!("{release:?}");
        let machine = machine(release.machine());
        let mut here = need!(Vm::running_with(release, &machine, &peer));
        let mut there = need!(Vm::waiting_with(release, &machine, &peer));
        let (serve, uri) = serve(&["--qmp", &there.free_qmp()]);
        let qmp = here.free_qmp();
        let migrate = ["migrate", "--qmp", &qmp, "--to", &uri];
        for line in [
            &[&migrate[..], &["--check"]].concat()[..],
            &migrate,
            &["save", "--qmp", &qmp, &file],
        ] {
            let (code, output) = run(line);
            assert_eq!(code, Some(1), "{line:?}: {output}");
            let expected = "cannot migrate this VM: Migration is disabled when using feature 'peer mode' in device 'ivshmem'";
            assert!(output.contains(expected), "{line:?}: {output}");
            assert!(here.is_running());
        }
        assert!(waits(&mut there));
        assert!(!Path::new(&file).exists());
        serve.signal(Signal::INT);
        let (_, output) = serve.wait();
        assert!(!output.join("\n").contains("the source"), "{output:?}");
    }
}

#[test]
fn the_vm_is_described_before_the_destination_is_connected() {
    let program = need!(Release::V7.program());
    let folder = folder();
    let qmp = folder.path().join("qmp").display().to_string();
    let socket = format!("unix:{qmp},server=on,wait=off");
    // It has no shared memory, so its description for --ignore-shared fails.
    let line = ["-accel", "tcg", "-S", "-qmp", &socket];
    let here = Launched::bare(&program, &line).expect("a QEMU");
    here.connect().expect("it answers");
    let listener = TcpListener::bind("127.0.0.1:0").expect("a listener");
    let uri = format!("tcp:{}", listener.local_addr().expect("its address"));
    let (code, output) = run(&["migrate", "--ignore-shared", "--qmp", &qmp, "--to", &uri]);
    assert_eq!(code, Some(1), "{output}");
    assert!(
        output.contains("no memory backend with share=on"),
        "{output}"
    );
    listener.set_nonblocking(true).expect("a listener");
    let connected = listener.accept().map_err(|error| error.kind());
    assert_eq!(connected.err(), Some(ErrorKind::WouldBlock));
}

#[test]
fn cpu_flags_from_known_registers_equal_those_read_one_by_one() {
    // The first changes a CPUID register. The others change none, so that they are read even if the registers are known.
    const CPUS: [(&str, bool); 3] = [
        ("qemu64,-sse3", false),
        ("qemu64,kvm-pv-enforce-cpuid=on,l3-cache=off", true),
        (
            "qemu64,tcg-cpuid=off,vmware-cpuid-freq=off,hv-relaxed=on",
            true,
        ),
    ];
    for release in RELEASES {
        println!("{release:?}");
        let program = need!(release.program());
        let launched = |cpu| Launched::bare(&program, &["-accel", "tcg", "-S", "-cpu", cpu]);
        let vm = |cpu, known| {
            let launched = launched(cpu).expect("a QEMU");
            let vm = hotlift_qemu::vm::Vm::of(&mut launched.connect().expect("it answers"), known);
            vm.expect("a description")
        };
        let known = vm("qemu64", None);
        assert!(known.cpu_registers.is_some());
        for (cpu, has_its_registers) in CPUS {
            let read = vm(cpu, None);
            assert_eq!(
                read.cpu_registers == known.cpu_registers,
                has_its_registers,
                "{cpu}"
            );
            assert_ne!(read.cpu_flags, known.cpu_flags, "{cpu}");
            assert_eq!(vm(cpu, Some(&known)).cpu_flags, read.cpu_flags, "{cpu}");
        }
    }
}

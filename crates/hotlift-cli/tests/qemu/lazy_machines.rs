//! Tests lazy restores (guests run before their pages are loaded) of machines with several vCPUs and virtio devices.
//! QEMU's own threads also access missing pages, in addition to the vCPU that runs the guest.
//!
//! The guest program runs on the first of eight vCPUs, and the others are not started. A Linux uses all vCPUs.

use std::fs::{self, File};
use std::io::{BufRead, BufReader, Write};
use std::os::unix::net::UnixStream;
use std::path::Path;
use std::thread;

use hotlift::file::FileFormat;
use hotlift::lazy::{Hooks, LazyReport, restore};
use hotlift::options::StreamOptions;
use hotlift::{Control, Options};

use crate::files::{keeps_running, machine, save, settings};
use crate::guest::Guest;
use crate::lazy::{BACKGROUND, listens_for_pages};
use crate::need;
use crate::route::{Multifd, Side};
use crate::vm::{Accelerator, DEADLINE, Machine, Memory, PC_7, Release, Vm, folder};

/// Bytes of a disk: a Linux uses the first 64 KiB.
const DISK: u64 = 4 << 20;

/// Returns a device of each kind that needs nothing of the host; `disk` is the content of the disk.
fn virtio(disk: &Path) -> Vec<String> {
    let drive = format!("file={},format=raw,if=none,id=disk", disk.display());
    [
        "-drive",
        &drive,
        "-device",
        "virtio-blk-pci,drive=disk",
        "-netdev",
        "hubport,id=net,hubid=0",
        "-device",
        // Without the boot firmware, which some packages of QEMU lack.
        "virtio-net-pci,netdev=net,romfile=",
        "-chardev",
        "null,id=port",
        "-device",
        "virtio-serial-pci",
        "-device",
        "virtserialport,chardev=port",
        "-device",
        "virtio-balloon-pci",
    ]
    .map(str::to_owned)
    .into()
}

fn vcpus(count: u8) -> [String; 2] {
    ["-smp".to_owned(), count.to_string()]
}

/// Creates an empty disk.
fn make_disk(path: &Path) {
    let disk = File::create(path).expect("a disk");
    disk.set_len(DISK).expect("its length");
}

/// Returns options with a limit of unrequested bytes per second; 0 is no limit.
fn options(max_bandwidth: u64) -> Options {
    Options {
        stream: StreamOptions {
            max_bandwidth,
            ..StreamOptions::default()
        },
        ..Options::default()
    }
}

/// Restores the VM in the file `from` into the waiting `vm`.
fn restore_into(vm: &mut Vm, from: &Path) -> LazyReport {
    let address = listens_for_pages(vm);
    let (options, control) = (options(BACKGROUND), Control::new());
    let report = restore(from, &address, false, &options, &control, Hooks::default());
    let report = report.unwrap_or_else(|error| panic!("restore: {}", error.chain()));
    assert!(
        report.normal_pages > 1000 && report.requests > 0,
        "{report:?}"
    );
    report
}

/// Returns the interrupts that the firmware assigned to the devices, which are part of their state.
fn interrupts(vm: &mut Vm) -> Vec<String> {
    let devices = vm.hmp("info pci");
    let lines = devices.lines().map(str::trim);
    // Releases show all other lines differently.
    let interrupts = lines.filter(|line| line.starts_with("IRQ "));
    interrupts.map(str::to_owned).collect()
}

/// Machine that is saved and restored.
#[derive(Debug, Clone, Copy)]
pub struct Row {
    pub from: Release,
    pub to: Release,
    pub accelerator: Accelerator,
    pub vcpus: u8,
    pub has_virtio: bool,
    /// True if the guest runs while it is saved.
    pub live: bool,
    pub method: &'static str,
}

impl Row {
    /// Returns the newest machine type that both releases have.
    pub fn machine(&self) -> &'static str {
        let older = [Release::V7, Release::V10];
        let older = older
            .into_iter()
            .find(|release| [self.from, self.to].contains(release));
        older.unwrap_or(Release::V11).machine()
    }

    /// Runs the row. `None`: it cannot be tested here.
    fn take(&self) -> Option<()> {
        println!("{self:?}");
        let machine = machine(self.machine(), self.accelerator);
        let folder = folder();
        let [file, disk] = ["vm", "disk"].map(|name| folder.path().join(name));
        make_disk(&disk);
        let mut devices = vcpus(self.vcpus).to_vec();
        if self.has_virtio {
            devices.extend(virtio(&disk));
        }
        let mut here = Vm::running_with(self.from, &machine, &devices)?;
        let before = match self.live {
            true => here.count().expect("the guest counts"),
            false => here.prove(),
        };
        let settings = settings(self.method, Multifd::Channels(2));
        let source = Side::new(Multifd::Off);
        save(&mut here, source, &file, FileFormat::Hotlift, &settings);
        let before = before.max(here.count().expect("the guest has counted"));
        let given = interrupts(&mut here);
        let mut there = Vm::waiting_with(self.to, &machine, &devices)?;
        assert_ne!(interrupts(&mut there), given, "nothing would be seen");
        restore_into(&mut there, &file);
        // QEMU lets a guest run even if it was stopped.
        keeps_running(&mut there, before);
        assert_eq!(interrupts(&mut there), given);
        Some(())
    }
}

/// Rows of every test run.
pub const ROWS: [Row; 4] = {
    use Release::{V7, V10, V11};
    const fn all(release: Release, method: &'static str) -> Row {
        Row {
            from: release,
            to: release,
            accelerator: Accelerator::Kvm,
            vcpus: 8,
            has_virtio: true,
            live: true,
            method,
        }
    }
    let stands_still = Row {
        to: V11,
        vcpus: 1,
        has_virtio: false,
        live: false,
        ..all(V10, "zlib")
    };
    [
        all(V10, "zstd"),
        all(V7, "none"),
        all(V11, "lz4"),
        stands_still,
    ]
};

#[test]
fn a_guest_of_eight_vcpus_and_virtio_devices_runs_before_it_has_its_pages() {
    for row in ROWS {
        need!(row.take());
    }
}

#[test]
#[ignore = "takes minutes: make qemu-matrix"]
fn guests_run_before_their_pages_in_every_combination_of_machines() {
    use Accelerator::{Kvm, Tcg};
    use Release::{V7, V10, V11};
    let methods = ["zstd", "none", "zlib", "lz4"];
    let mut methods = methods.iter().cycle();
    for (from, to) in [V7, V10, V11]
        .map(|from| [V7, V10, V11].map(|to| (from, to)))
        .concat()
    {
        for (accelerator, live) in [(Kvm, true), (Kvm, false), (Tcg, true), (Tcg, false)] {
            // QEMU 7.2 was seen to lose dirty pages of a running guest under TCG by itself.
            if live && from == V7 && accelerator == Tcg {
                continue;
            }
            for (vcpus, has_virtio) in [(1, false), (8, false), (1, true), (8, true)] {
                let row = Row {
                    from,
                    to,
                    accelerator,
                    vcpus,
                    has_virtio,
                    live,
                    method: methods.next().expect("it goes round"),
                };
                need!(row.take());
            }
        }
    }
}

/// Release where a Linux is saved, and releases where it is restored.
pub const LINUX: (Release, [Release; 3]) = {
    use Release::{V7, V10, V11};
    (V10, [V10, V7, V11])
};

/// Returns the last number that the guest printed after `name`.
pub fn reported_count(vm: &Vm, name: &str) -> Option<u64> {
    let console = vm.console();
    let (lines, _) = console.rsplit_once('\n')?;
    let numbers = lines.split_whitespace().rev();
    numbers
        .filter_map(|word| word.strip_prefix(name)?.strip_prefix('='))
        .find_map(|number| number.parse().ok())
}

/// Writes a line to the guest's second serial port, and waits for its answer.
fn answers(port: &Path, word: &str) {
    let mut stream = UnixStream::connect(port).expect("a serial port");
    stream.set_read_timeout(Some(DEADLINE)).expect("a time-out");
    writeln!(stream, "{word}").expect("it is taken");
    let answer = format!("heard {word}");
    let received = BufReader::new(stream)
        .lines()
        .map(|line| line.expect("an answer"))
        .any(|line| line.trim_end() == answer);
    assert!(received, "no answer");
}

#[test]
fn a_linux_answers_and_uses_its_disk_before_it_has_its_pages() {
    let guest = need!(Guest::linux());
    let machine = Machine {
        name: PC_7,
        accelerator: Accelerator::Tcg,
        memory: Memory::File,
        guest,
    };
    let folder = folder();
    let path = |name: &str| folder.path().join(name);
    let (file, disk) = (path("vm"), path("disk"));
    make_disk(&disk);
    let devices = |disk: &Path, port: &Path| {
        let serial = format!("unix:{},server=on,wait=off", port.display());
        let mut devices = virtio(disk);
        devices.extend(["-serial".to_owned(), serial]);
        devices.extend(vcpus(2));
        devices
    };
    let devices_here = devices(&disk, &path("port"));
    let mut here = need!(Vm::running_with(LINUX.0, &machine, &devices_here));
    let settings = settings("zstd", Multifd::Channels(2));
    let source = Side::new(Multifd::Off);
    save(&mut here, source, &file, FileFormat::Hotlift, &settings);
    let before = here.count().expect("the guest has counted");
    let read = reported_count(&here, "disk").expect("it has a disk");
    assert!(read > 0, "it has not used its disk");
    for to in LINUX.1 {
        println!("{to:?}");
        // Each continues from the disk at the time of the save.
        let copy = path(&format!("disk of {}", to.name()));
        let port = path(&format!("port of {}", to.name()));
        fs::copy(&disk, &copy).expect("a copy of the disk");
        let devices = devices(&copy, &port);
        let mut there = need!(Vm::waiting_with(to, &machine, &devices));
        let address = listens_for_pages(&mut there);
        let control = Control::new();
        // Requested pages come at once, all others much later.
        let slow = options(1 << 20);
        let report = thread::scope(|scope| {
            let restoring =
                scope.spawn(|| restore(&file, &address, false, &slow, &control, Hooks::default()));
            there.wait_for_status("postcopy-active");
            answers(&port, "the question before the pages have arrived");
            there.continues_from(before);
            assert!(
                reported_count(&there, "disk") > Some(read),
                "no use of the disk"
            );
            let state = there.migration();
            assert!(state.is_running(), "it has all pages: {state:?}");
            control.change(&options(0));
            restoring.join().expect("no panic")
        });
        report.unwrap_or_else(|error| panic!("restore: {}", error.chain()));
        keeps_running(&mut there, before);
        answers(&port, "the question after they have arrived");
    }
}

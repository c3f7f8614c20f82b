//! Tests machines with each kind of memory and device, in each QEMU, by each transport of Hotlift. The guests' memory
//! is compared.
//!
//! The guest uses no device. The stream nevertheless contains the device: a RAM block, a section before RAM, or device
//! sections.

use std::fmt;
use std::fs::File;
use std::os::unix::fs::FileExt;
use std::panic::{AssertUnwindSafe, catch_unwind, resume_unwind};
use std::path::Path;
use std::sync::Arc;

use tempfile::TempDir;

use crate::guest::Guest;
use crate::hotlift::Hotlift;
use crate::machine_types::{MICROVM, WITHOUT_A_NAME};
use crate::matrix::{Results, panic_message};
use crate::operator::{has_moved, serve, succeeds};
use crate::route::{Multifd, RelayOptions, Relays, Side, differ};
use crate::vm::{Accelerator, Machine, Memory, PC_7, PC_10, PC_11, Release, Vm, folder};

/// Kind of machine.
#[derive(Debug, Clone, Copy)]
pub struct Kind {
    pub name: &'static str,
    /// `None`: pc-i440fx of the older release of both.
    machine: Option<&'static str>,
    /// Additional arguments; `FILE` is the file of the device's memory.
    devices: &'static str,
    /// Size of that file in MiB.
    mib: u64,
    /// Command of the human monitor before the migration.
    before: Option<&'static str>,
}

impl Kind {
    const fn new(name: &'static str, devices: &'static str, mib: u64) -> Self {
        Self {
            name,
            machine: None,
            devices,
            mib,
            before: None,
        }
    }

    const fn on(name: &'static str, machine: &'static str) -> Self {
        Self {
            machine: Some(machine),
            ..Self::new(name, "", 0)
        }
    }

    /// Returns true if its guest is the firmware, and only QEMU 7.2 has it.
    fn is_old(&self) -> bool {
        self.machine.is_some_and(|it| WITHOUT_A_NAME.contains(&it))
    }
}

const SIX_OUTPUTS: &str = "virtio-gpu of six outputs";

pub const KINDS: [Kind; 13] = [
    Kind::new(
        "virtio-mem",
        "-m maxmem=1G -object memory-backend-ram,id=m,size=64M -device virtio-mem-pci,memdev=m",
        0,
    ),
    Kind::new("virtio-gpu", "-device virtio-gpu-pci", 0),
    Kind::new(SIX_OUTPUTS, "-device virtio-gpu-pci,max_outputs=6", 0),
    Kind::new(
        "pc-dimm",
        "-m slots=2,maxmem=1G -object memory-backend-file,id=m,size=32M,share=on,mem-path=FILE -device pc-dimm,memdev=m",
        32,
    ),
    Kind::new(
        "nvdimm",
        "-machine nvdimm=on -m slots=2,maxmem=1G -object memory-backend-file,id=m,size=32M,share=on,mem-path=FILE \
         -device nvdimm,memdev=m,label-size=128K",
        32,
    ),
    Kind::new(
        "ivshmem as master",
        "-object memory-backend-file,id=m,size=4M,share=on,mem-path=FILE -device ivshmem-plain,memdev=m,master=on",
        4,
    ),
    Kind::new(
        "ivshmem as peer",
        "-object memory-backend-file,id=m,size=4M,share=on,mem-path=FILE -device ivshmem-plain,memdev=m",
        4,
    ),
    Kind {
        before: Some("balloon 48"),
        ..Kind::new("balloon", "-device virtio-balloon-pci", 0)
    },
    Kind {
        before: Some("balloon 48"),
        ..Kind::new(
            "balloon with hints",
            "-object iothread,id=t -device virtio-balloon-pci,free-page-hint=on,iothread=t,free-page-reporting=on",
            0,
        )
    },
    Kind::new(
        "all in one machine",
        "-machine nvdimm=on -m slots=2,maxmem=1G -object memory-backend-file,id=m,size=32M,share=on,mem-path=FILE \
         -device nvdimm,memdev=m -object memory-backend-ram,id=v,size=64M -device virtio-mem-pci,memdev=v \
         -object memory-backend-ram,id=d,size=32M -device pc-dimm,memdev=d -device virtio-gpu-pci \
         -object memory-backend-ram,id=i,size=4M,share=on -device ivshmem-plain,memdev=i,master=on \
         -device virtio-balloon-pci",
        32,
    ),
    Kind::on("microvm", MICROVM),
    Kind::on("pc-i440fx-2.3", WITHOUT_A_NAME[0]),
    Kind::on("pc-i440fx-1.4", WITHOUT_A_NAME[1]),
];

/// Source, destination, and the newest machine type that both have.
const RELEASES: [(Release, Release, &str); 6] = {
    use Release::{V7, V10, V11};
    [
        (V7, V7, PC_7),
        (V10, V10, PC_10),
        (V11, V11, PC_11),
        (V7, V10, PC_7),
        (V10, V7, PC_7),
        (V10, V11, PC_10),
    ]
};

/// Transport from one QEMU to another.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub enum Way {
    Relays,
    Migrate,
    Restore,
    RestoreLazily,
    MappedRam,
    MappedRamByQemu,
}

impl Way {
    pub const ALL: [Self; 6] = [
        Self::Relays,
        Self::Migrate,
        Self::Restore,
        Self::RestoreLazily,
        Self::MappedRam,
        Self::MappedRamByQemu,
    ];

    pub fn name(self) -> &'static str {
        match self {
            Self::Relays => "relays",
            Self::Migrate => "migrate, serve",
            Self::Restore => "save, restore",
            Self::RestoreLazily => "save, restore --lazy",
            Self::MappedRam => "save --format mapped-ram, restore",
            Self::MappedRamByQemu => "save --format mapped-ram, loaded by QEMU",
        }
    }

    /// Moves the guest of `here` to the waiting `there`.
    fn take(self, here: &mut Vm, there: &mut Vm) {
        match self {
            Self::Relays => through_relays(here, there),
            Self::Migrate => {
                let (serve, uri) = serve(&["--qmp", &there.free_qmp()]);
                let (qmp, method) = (here.free_qmp(), "--method=zstd");
                let line = ["migrate", "--qmp", &qmp, "--to", &uri, method];
                succeeds(Hotlift::start(&line));
                succeeds(serve);
            }
            Self::Restore => from_file(here, there, "hotlift", &[]),
            Self::RestoreLazily => from_file(here, there, "hotlift", &["--lazy"]),
            Self::MappedRam => from_file(here, there, "mapped-ram", &[]),
            Self::MappedRamByQemu => {
                let folder = folder();
                let file = save(here, &folder, "mapped-ram");
                let loads = Side::new(Multifd::Channels(2)).with("mapped-ram");
                loads.apply(there);
                let uri = format!("file:{file}");
                there.qmp.migrate_incoming(&uri, true).expect("it loads");
                there.reaches("completed");
            }
        }
    }
}

fn through_relays(here: &mut Vm, there: &mut Vm) {
    let two = Multifd::Channels(2);
    // Without it, the source releases its guest although the destination cannot load it.
    Side::new(two).with("return-path").apply(here);
    Side::new(two).apply(there);
    let waiting_at = there.uri("incoming");
    there
        .qmp
        .migrate_incoming(&waiting_at, true)
        .expect("migrate-incoming");
    let relays = Relays::start(here, &waiting_at, &RelayOptions::new("zstd", two, two));
    here.qmp.migrate(relays.uri()).expect("migrate");
    here.reaches("completed");
    relays.finish();
    there.reaches("completed");
}

/// Saves the guest, and returns the path of its file.
fn save(here: &Vm, folder: &TempDir, format: &str) -> String {
    let file = folder.path().join("vm").display().to_string();
    let (qmp, format) = (here.free_qmp(), format!("--format={format}"));
    let line = ["save", "--qmp", &qmp, &file, &format];
    succeeds(Hotlift::start(&line));
    file
}

fn from_file(here: &Vm, there: &Vm, format: &str, options: &[&str]) {
    let folder = folder();
    let file = save(here, &folder, format);
    let restore = ["restore", &file, "--qmp", &there.free_qmp()];
    succeeds(Hotlift::start(&[&restore[..], options].concat()));
}

/// One cell of the matrix.
#[derive(Debug, Clone, Copy)]
pub struct Cell {
    pub from: Release,
    pub to: Release,
    machine: &'static str,
    pub kind: Kind,
    pub way: Way,
}

impl fmt::Display for Cell {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        let (from, to) = (self.from.name(), self.to.name());
        let machine = self.machine.split(',').next().unwrap_or_default();
        let (kind, way) = (self.kind.name, self.way.name());
        write!(f, "{from} -> {to}; {machine}; {kind}; {way}")
    }
}

impl Cell {
    /// Returns a part of the expected error, for a cell that cannot move. The guest then continues at the source.
    pub fn refusal(&self) -> Option<&'static str> {
        let Self { kind, way, .. } = self;
        let is_mapped = [Way::MappedRam, Way::MappedRamByQemu].contains(way);
        match kind.name {
            // A peer's memory belongs to another machine.
            "ivshmem as peer" => Some("'peer mode' in device 'ivshmem'"),
            // The state of the second output has another layout in each of these releases, also without Hotlift.
            SIX_OUTPUTS if self.from != self.to => Some(match way {
                Way::Relays => {
                    "waited for 'completed', got MigrationInfo { status: Some(\"failed\")"
                }
                Way::Migrate => "migration failed: ",
                Way::MappedRamByQemu => "load of migration failed",
                Way::Restore | Way::RestoreLazily | Way::MappedRam => {
                    "the guest was not restored: "
                }
            }),
            // Such a file contains the machine's name.
            _ if kind.is_old() && is_mapped => {
                Some("mapped-ram does not support machine types up to 2.3")
            }
            _ => None,
        }
    }

    /// Moves its machine, and describes the result; `None` if it cannot be tested here.
    fn take(&self) -> Option<String> {
        let Self { kind, way, .. } = *self;
        let (accelerator, guest) = match kind.is_old() {
            true => (Accelerator::Tcg, Arc::new(Guest::Firmware)),
            false => (Accelerator::Kvm, Guest::program()),
        };
        let machine = Machine {
            name: self.machine,
            accelerator,
            memory: Memory::File,
            guest,
        };
        let folder = folder();
        let [source, destination] = ["source", "destination"].map(|it| folder.path().join(it));
        let content = content(kind.mib);
        write(&source, &content);
        write(&destination, &vec![0; content.len()]);
        let devices = |file: &Path| -> Vec<String> {
            let words = kind.devices.split_whitespace();
            words
                .map(|word| word.replace("FILE", &file.display().to_string()))
                .collect()
        };
        let mut here = Vm::running_with(self.from, &machine, &devices(&source))?;
        let ticks = here.count().expect("the guest counts");
        // After two more ticks the firmware has ended its search for a disk.
        here.continues_from(ticks + 1);
        if let Some(line) = kind.before {
            let answer = here.hmp(line);
            assert!(answer.is_empty(), "{answer}");
        }
        let mut there = Vm::waiting_with(self.to, &machine, &devices(&destination))?;
        let moved = catch_unwind(AssertUnwindSafe(|| way.take(&mut here, &mut there)));
        match (moved, self.refusal()) {
            (Ok(()), None) => {
                has_moved(&mut here, &mut there);
                differ(&content, &read(&destination, content.len()));
                let pages = content.len() / 4096 + machine.guest.compared_pages();
                Some(format!("moved, {pages} pages compared"))
            }
            (Err(panic), Some(reason)) if panic_message(&*panic).contains(reason) => {
                assert!(!there.is_running(), "it runs at the destination");
                // A saved guest is in its file, and paused at the source.
                let is_saved = here.migration().status() == "completed";
                if !is_saved || [Way::Relays, Way::Migrate].contains(&way) {
                    let before = here.count().expect("the guest has counted");
                    here.continues_from(before);
                }
                Some(format!("refused as expected: {reason}"))
            }
            (Err(panic), _) => resume_unwind(panic),
            (Ok(()), Some(reason)) => panic!("it moved without {reason:?}"),
        }
    }
}

/// Returns content for a device's memory: one page in four is zero, the others differ.
fn content(mib: u64) -> Vec<u8> {
    let words = (0..mib << 17).map(|word| match word / 512 % 4 {
        0 => 0,
        _ => (word / 16 + 1).wrapping_mul(0x9e37_79b9_7f4a_7c15),
    });
    words.flat_map(u64::to_le_bytes).collect()
}

fn write(path: &Path, content: &[u8]) {
    let file = File::create(path).expect("a file");
    file.write_all_at(content, 0).expect("its content");
}

/// Reads the first bytes of a file.
fn read(path: &Path, bytes: usize) -> Vec<u8> {
    let mut content = vec![0; bytes];
    let file = File::open(path).expect("a file");
    file.read_exact_at(&mut content, 0).expect("its content");
    content
}

/// Lists all cells.
pub fn cells() -> Vec<Cell> {
    let mut cells = Vec::new();
    for (from, to, newest) in RELEASES {
        for kind in KINDS {
            if kind.is_old() && (from, to) != (Release::V7, Release::V7) {
                continue;
            }
            // It differs between releases, and its name has no version.
            if kind.name == "microvm" && from != to {
                continue;
            }
            for way in Way::ALL {
                // QEMU loads such files from 9.0 on.
                if way == Way::MappedRamByQemu && to == Release::V7 {
                    continue;
                }
                cells.push(Cell {
                    from,
                    to,
                    machine: kind.machine.unwrap_or(newest),
                    kind,
                    way,
                });
            }
        }
    }
    cells
}

/// Takes all cells, for `make qemu-matrix`. `HOTLIFT_QEMU_MATRIX` selects some; `HOTLIFT_MATRIX_RESULT` names the file.
#[test]
#[ignore = "takes half an hour: make qemu-matrix"]
fn devices_move_in_every_qemu_by_every_method() {
    let mut results = Results::open();
    for cell in cells() {
        results.add(&cell.to_string(), || cell.take());
    }
    results.finish();
}

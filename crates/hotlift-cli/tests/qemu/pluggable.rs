//! Tests a Linux with memory plugged by virtio-mem. It migrates between QEMUs by each transport, and keeps exactly this
//! memory.

use std::fmt;
use std::fs;
use std::os::unix::fs::MetadataExt;

use serde_json::json;

use crate::guest::Guest;
use crate::hotlift::Hotlift;
use crate::lazy_machines::reported_count;
use crate::need;
use crate::operator::{serve, succeeds};
use crate::route::{Multifd, RelayOptions, Relays, Route, Side};
use crate::vm::{Accelerator, Machine, Memory, PC_7, PC_10, Release, Vm, folder, until};

const MIB: u64 = 1 << 20;

/// Bytes of a device's RAM block, nearly all unplugged: they would dominate a QEMU's memory.
pub const REGION: u64 = 1 << 30;

/// Plugged bytes: a whole block of Linux (128 MiB), and a part of the next one.
pub const PLUGGED: u64 = 160 * MIB;

/// Returns two devices of one size, above 4 GiB; the first must plug `requested` bytes.
fn devices(requested: u64) -> Vec<String> {
    let first = format!("virtio-mem-pci,id=vmem0,memdev=vm0,requested-size={requested}");
    let second = "virtio-mem-pci,id=vmem1,memdev=vm1";
    let line = ["-m", "maxmem=4G", "-device", &first, "-device", second];
    line.map(str::to_owned).to_vec()
}

/// Transport of a machine to the next QEMU.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub enum Way {
    /// `migrate` and `serve`, with this option of `migrate`.
    Migrate(&'static str),
    /// Two relays with 2 channels.
    Relays,
    /// Two relays, with most pages after the guest runs at the destination.
    Postcopy,
    /// `save` in this format and `restore`, with this option of `restore`.
    File(&'static str, &'static str),
    /// `save --format mapped-ram`, which QEMU loads by itself.
    LoadedByQemu,
}

impl fmt::Display for Way {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        match self {
            Self::Migrate(option) => write!(f, "`migrate {option}`, `serve`"),
            Self::Relays => f.write_str("two relays, zstd, 2 channels each"),
            Self::Postcopy => f.write_str("two relays, zstd, postcopy"),
            Self::File(format, option) => {
                write!(f, "`save --format={format}`, `restore {option}`")
            }
            Self::LoadedByQemu => f.write_str("`save --format=mapped-ram`, loaded by QEMU itself"),
        }
    }
}

/// Release where it boots.
pub const STARTS_IN: Release = Release::V10;

/// Machines with their destinations and transports.
pub const JOURNEYS: [(&str, &[(Release, Way)]); 2] = [(PC_10, &WAYS), (PC_7, &OLDER_WAYS)];

/// Returns true if the guest runs while it leaves such a QEMU: not a 7.2 under TCG (see `matrix::PAIRS`).
pub fn runs_in(release: Release) -> bool {
    release != Release::V7
}

const WAYS: [(Release, Way); 10] = {
    use Release::{V10, V11};
    [
        (V11, Way::Migrate("--method=zstd")),
        (V10, Way::Relays),
        (V11, Way::Postcopy),
        (V10, Way::Migrate("--multifd=off")),
        (V11, Way::File("hotlift", "--channels=2")),
        (V11, Way::File("hotlift", "--channels=0")),
        (V10, Way::File("hotlift", "--lazy")),
        (V11, Way::File("hotlift", "--lazy")),
        (V10, Way::File("mapped-ram", "--channels=2")),
        (V11, Way::LoadedByQemu),
    ]
};

/// Transports of a machine type whose virtio-mem sends no state before RAM.
const OLDER_WAYS: [(Release, Way); 4] = {
    use Release::{V7, V10};
    [
        (V7, Way::Migrate("--method=zstd")),
        (V10, Way::Relays),
        (V7, Way::File("hotlift", "--channels=2")),
        (V7, Way::File("hotlift", "--lazy")),
    ]
};

impl Way {
    fn take(self, mut here: Vm, to: Release) -> Option<Vm> {
        let live = runs_in(here.release);
        if let Self::Relays = self {
            let two = Multifd::Channels(2);
            let route = Route {
                source: Side::new(two).with("return-path"),
                destination: Side::new(two),
                relays: Some(RelayOptions::new("zstd", two, two)),
                live,
            };
            return Some(route.take_with(here, to, &devices(0))?.there);
        }
        if !live {
            here.prove();
        }
        let mut there = Vm::waiting_with(to, &here.machine, &devices(0))?;
        let files = folder();
        let file = files.path().join("vm").display().to_string();
        let qmp = here.free_qmp();
        let save = |format: &str| {
            let format = format!("--format={format}");
            succeeds(Hotlift::start(&["save", "--qmp", &qmp, &file, &format]));
        };
        match self {
            Self::Relays => {}
            Self::Postcopy => switches_over(&mut here, &mut there),
            Self::Migrate(option) => {
                let (serve, uri) = serve(&["--qmp", &there.free_qmp()]);
                let migrate = ["migrate", "--qmp", &qmp, "--to", &uri, option];
                succeeds(Hotlift::start(&migrate));
                succeeds(serve);
            }
            Self::File(format, option) => {
                save(format);
                let restore = ["restore", &file, "--qmp", &there.free_qmp(), option];
                succeeds(Hotlift::start(&restore));
            }
            Self::LoadedByQemu => {
                save("mapped-ram");
                let side = Side::new(Multifd::Off).with("mapped-ram");
                side.apply(&mut there);
                let incoming = there.qmp.migrate_incoming(&format!("file:{file}"), true);
                incoming.expect("it loads");
            }
        }
        there.reaches("completed");
        assert!(!here.is_running(), "the source runs, too");
        let before = here.count().expect("the guest has counted");
        if !there.is_running() {
            assert!(!live, "the guest does not run");
            there.qmp.cont().expect("cont");
        }
        there.continues_from(before);
        Some(there)
    }
}

/// Moves a guest that continues at the destination before most of its pages are there.
fn switches_over(here: &mut Vm, there: &mut Vm) {
    let slow = json!({ "max-bandwidth": MIB, "max-postcopy-bandwidth": MIB });
    let side = Side::new(Multifd::Off).with("return-path");
    let side = side.with("postcopy-ram").parameters(slow);
    side.apply(here);
    side.apply(there);
    let incoming = there.uri("incoming");
    let listens = there.qmp.migrate_incoming(&incoming, true);
    listens.expect("migrate-incoming");
    let mut options = RelayOptions::new("zstd", Multifd::Channels(2), Multifd::Off);
    options.configure_uuid(Multifd::Off, Multifd::Channels(2));
    let relays = Relays::start(here, &incoming, &options);
    here.qmp.migrate(relays.uri()).expect("migrate");
    here.reaches("active");
    here.start_postcopy();
    there.wait_for_status("postcopy-active");
    let fast = json!({ "max-bandwidth": 1_u64 << 40, "max-postcopy-bandwidth": 1_u64 << 40 });
    here.qmp.set_parameters(&fast).expect("parameters");
    here.reaches("completed");
    relays.finish();
}

/// Checks that the first device has plugged `bytes`, and that QEMU never used memory for more.
fn has_plugged(vm: &mut Vm, bytes: u64) {
    assert_eq!(sizes(vm), [bytes, 0]);
    let memory = vm.memfds().into_iter();
    let taken: u64 = memory
        .map(|file| 512 * fs::metadata(file).expect("it is open").blocks())
        .sum();
    assert!(taken <= bytes, "it has taken {taken} bytes");
    let status = fs::read_to_string(format!("/proc/{}/status", vm.pid())).expect("it runs");
    let peak = status.split_once("VmHWM:").expect("its peak").1;
    let peak: u64 = peak
        .split_whitespace()
        .next()
        .and_then(|kib| kib.parse().ok())
        .expect("in KiB");
    // RAM, plugged memory, and QEMU's own, which is far below a quarter of a device's unplugged memory.
    let limit = vm.machine.guest.ram_bytes() + bytes + (REGION - bytes) / 4;
    assert!(peak << 10 <= limit, "it has had {peak} KiB");
}

/// Returns the plugged bytes of the devices.
fn sizes(vm: &mut Vm) -> Vec<u64> {
    let mut devices = vm.qmp.virtio_mem().expect("its devices");
    devices.sort_by(|a, b| a.memdev.cmp(&b.memdev));
    devices.iter().map(|device| device.size).collect()
}

fn moves((name, ways): (&'static str, &[(Release, Way)])) -> Option<()> {
    let machine = Machine {
        name,
        accelerator: Accelerator::Tcg,
        memory: Memory::File,
        guest: Guest::linux_with_plugged(PLUGGED, REGION)?,
    };
    let mut here = Vm::running_with(STARTS_IN, &machine, &devices(PLUGGED))?;
    has_plugged(&mut here, PLUGGED);
    let used = reported_count(&here, "plugged").expect("it uses plugged memory") * 4096;
    assert!(used > PLUGGED / 2, "it uses {used} bytes of it");
    for &(to, way) in ways {
        println!("{way:?} -> {to:?}");
        here = way.take(here, to)?;
        has_plugged(&mut here, PLUGGED);
        assert_eq!(
            reported_count(&here, "plugged").map(|pages| pages * 4096),
            Some(used)
        );
    }
    // The device also continues.
    let more = PLUGGED + 32 * MIB;
    let request = json!({
        "path": "/machine/peripheral/vmem0", "property": "requested-size", "value": more,
    });
    let set = here.qmp.client().execute("qom-set", &request);
    set.expect("more is requested");
    until(
        || "the guest plugs no more".to_owned(),
        || (sizes(&mut here) == [more, 0]).then_some(()),
    );
    Some(())
}

#[test]
fn a_linux_keeps_exactly_its_plugged_memory_by_every_method() {
    need!(moves(JOURNEYS[0]));
}

#[test]
fn plugged_memory_of_an_older_machine_type_is_moved() {
    need!(moves(JOURNEYS[1]));
}

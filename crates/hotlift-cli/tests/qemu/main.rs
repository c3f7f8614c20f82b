//! Real QEMUs, and real virtual machines that move from one to another through `hotlift`.
//!
//! | file | what |
//! |---|---|
//! | `vm`, `guest` | a QEMU; what runs in it, and the proof that its memory is right |
//! | `route` | how a machine goes from one QEMU to another |
//! | `direct` | the same without us: what all this is worth |
//! | `matrix`, `linux_moves` | machines that move through relays |
//! | `device_matrix` | machines with each kind of memory and device, by every way |
//! | `dialect` | QEMU's own compression on either side of a relay |
//! | `faults` | whatever is killed or cut |
//! | `custody`, `qmp_proxy` | a started QEMU outlives whatever fails after the commit |
//! | `back_and_forth` | fifty migrations through the same relays |
//! | `operator` | the commands that steer QEMUs: migrate, serve, save, restore |
//! | `preflight` | differences of two VMs, before the first page |
//! | `run_state` | what a guest does at the end is what it did at the start |
//! | `watched` | `serve` over QMP |
//! | `table` | docs/qemu-compatibility.md, of what all these say |
//! | `tls` | QEMUs that have TLS, relays and commands that have it between them |
//! | `postcopy` | what the relays carry untouched |
//! | `files` | machines that go on from a file |
//! | `lazy`, `lazy_machines` | guests that run before they have their pages; the machines that they have |
//! | `agent`, `agent_table` | two hosts with an agent each; the rules that bring migrations to them |
//! | `lazy_preempt` | those that they wait for, on a connection of their own |
//! | `lazy_huge` | the same of RAM of huge pages |
//! | `salvage` | damaged files |
//! | `clock` | the clock of a restored guest |
//! | `machine_types` | machine types whose names show no version, or are not in the stream |
//! | `pluggable` | a Linux with memory that virtio-mem has plugged |
//! | `large_devices` | devices with more state than a relay keeps in memory |
//! | `settings` | capabilities and parameters: refused, changed, restored |

#![allow(
    clippy::print_stdout,
    clippy::print_stderr,
    reason = "a test says what it does"
)]

mod agent;
mod agent_table;
mod back_and_forth;
mod clock;
mod custody;
mod device_matrix;
mod dialect;
mod direct;
mod faults;
mod files;
mod guest;
#[path = "../command/hotlift.rs"]
#[allow(dead_code, reason = "its other users need the rest")]
mod hotlift;
mod idle;
mod large_devices;
mod lazy;
mod lazy_huge;
mod lazy_machines;
mod lazy_preempt;
mod linux_moves;
mod machine_types;
mod matrix;
mod operator;
mod pluggable;
mod postcopy;
mod preflight;
mod qmp_proxy;
mod route;
mod run_state;
mod salvage;
mod settings;
mod table;
mod tls;
mod vm;
mod watched;

/// What there is, or the end of the test: whoever returned `None` has said why.
macro_rules! need {
    ($there:expr) => {
        match $there {
            Some(there) => there,
            None => return,
        }
    };
}
use need;

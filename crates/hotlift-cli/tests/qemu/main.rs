//! Tests real virtual machines that migrate between real QEMUs through `hotlift`.
//!
//! | file | subject |
//! |---|---|
//! | `vm`, `guest` | a QEMU; its guest, and the verification of its memory |
//! | `route` | a machine's route from one QEMU to another |
//! | `direct` | the same without Hotlift: validates the harness |
//! | `matrix`, `linux_moves` | machines that move through relays |
//! | `device_matrix` | machines with each kind of memory and device, by every transport |
//! | `dialect` | QEMU's own compression on either side of a relay |
//! | `faults` | killed processes and cut connections |
//! | `custody`, `qmp_proxy` | a started QEMU outlives all failures after the commit |
//! | `back_and_forth` | fifty migrations through the same relays |
//! | `operator` | the commands that control QEMUs: migrate, serve, save, restore |
//! | `preflight` | differences of two VMs, before the first page |
//! | `run_state` | a guest's run state is the same before and after |
//! | `watched` | `serve` over QMP |
//! | `table` | docs/qemu-compatibility.md, generated from these tests |
//! | `tls` | QEMUs with TLS; relays and commands with TLS between them |
//! | `postcopy` | postcopy through relays |
//! | `files` | machines restored from a file |
//! | `lazy`, `lazy_machines` | guests that run before their pages are loaded; their machines |
//! | `agent`, `agent_table` | two hosts with an agent each; the rules that redirect migrations to them |
//! | `lazy_preempt` | requested pages on a separate connection |
//! | `lazy_huge` | lazy restores in RAM of huge pages |
//! | `salvage` | damaged files |
//! | `clock` | the clock of a restored guest |
//! | `machine_types` | machine types whose names show no version, or are not in the stream |
//! | `pluggable` | a Linux with memory plugged by virtio-mem |
//! | `large_devices` | devices with more state than a relay keeps in memory |
//! | `settings` | capabilities and parameters: refused, changed, restored |
//! | `downtime` | the downtime limit: begins low, rises, is restored |

#![allow(
    clippy::print_stdout,
    clippy::print_stderr,
    reason = "a test prints its progress"
)]

mod agent;
mod agent_table;
mod back_and_forth;
mod clock;
mod custody;
mod device_matrix;
mod dialect;
mod direct;
mod downtime;
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

/// Returns the value, or ends the test: the function that returned `None` has printed the reason.
macro_rules! need {
    ($there:expr) => {
        match $there {
            Some(there) => there,
            None => return,
        }
    };
}
use need;

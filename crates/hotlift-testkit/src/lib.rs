//! Test machinery, and the fault campaign that uses it.
//!
//! | module | subject |
//! |---|---|
//! | [`mod@alone`] | a test in a process of its own, and the memory of a process |
//! | [`namespace`] | two hosts as network namespaces, and outages of their link |
//! | [`proxy`] | a proxy that records, damages, pauses, delays and cuts connections, and turns RST into FIN |
//! | [`pki`] | a CA, and the certificates of hosts |
//! | [`process`] | a process whose output is read, closed or left to fill |
//! | [`running`] | a program started as a user does, and its output lines |
//! | [`program`] | the program in a QEMU, and the proof that its memory is right |
//! | [`libvirt`] | two hosts with a libvirtd each, and their domains |
//! | [`machine`] | a guest in its process, QEMU or Hotlift's own, with its queries and commands |
//! | [`qemu`] | the QEMUs for tests: their location and their start |
//! | [`mod@skip`] | tests that this machine cannot run |
//! | [`disk_lock`] | another user of a disk image |
//! | [`strangers`] | connections that belong to no migration |
//! | [`case`] | pair, network and faults of a case, drawn from a seed |
//! | [`rig`] | processes of a case |
//! | [`drive`] | execution of the faults at their moments |
//! | [`verdict`] | permitted outcomes of a case, and its actual outcome |
//! | [`summary`] | counts at the end |
//! | [`generated`] | pages of the docs that tests generate |
//! | [`wake_ups`] | wake-ups of idle threads |
//! | [`error`] | errors of setup and queries |
#![forbid(unsafe_code)]

pub mod alone;
pub mod case;
pub mod disk_lock;
pub mod drive;
pub mod error;
pub mod generated;
pub mod libvirt;
pub mod machine;
pub mod namespace;
pub mod pki;
pub mod process;
pub mod program;
pub mod proxy;
pub mod qemu;
pub mod rig;
pub mod running;
pub mod skip;
pub mod strangers;
pub mod summary;
pub mod verdict;
pub mod wake_ups;

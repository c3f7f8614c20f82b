//! Test machinery, and the fault campaign that uses it.
//!
//! | module | what it is |
//! |---|---|
//! | [`mod@alone`] | a test in a process of its own, and the memory of a process |
//! | [`namespace`] | two hosts as network namespaces, and outages of their link |
//! | [`proxy`] | a proxy that records, damages, holds, delays, cuts, and turns RST into FIN |
//! | [`pki`] | a CA, and the certificates of hosts |
//! | [`process`] | a process whose output is read, closed or left to fill |
//! | [`running`] | a program as a user starts it, and the lines that it prints |
//! | [`program`] | what runs in a QEMU, and the proof that its memory is right |
//! | [`libvirt`] | two hosts with a libvirtd each, and their domains |
//! | [`machine`] | a guest in its process, QEMU or Hotlift's own, and what can be asked of it |
//! | [`qemu`] | the QEMUs that tests run: where they are, and how they are started |
//! | [`mod@skip`] | what a test cannot do on this machine |
//! | [`disk_lock`] | another user of a disk image |
//! | [`strangers`] | connections that belong to no migration |
//! | [`case`] | who migrates, over what, and what fails when: drawn from a seed |
//! | [`rig`] | the processes of a case |
//! | [`drive`] | makes the faults happen in their moments |
//! | [`verdict`] | what may come of a case, and what did |
//! | [`summary`] | the count at the end |
//! | [`wake_ups`] | wake-ups of threads that have nothing to do |
//! | [`error`] | why something could not be set up |
#![forbid(unsafe_code)]

pub mod alone;
pub mod case;
pub mod disk_lock;
pub mod drive;
pub mod error;
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

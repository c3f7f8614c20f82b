//! Access to libvirt of this host and of other hosts, through its command `virsh`.

pub mod downtime;
pub mod guest_location;
pub mod virsh;
mod virsh_run;

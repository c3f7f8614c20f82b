//! libvirt of this host and of others, through virsh.

pub mod guest_location;
pub mod virsh;
mod virsh_run;

//! libvirt of this host and of others, through virsh.

pub mod virsh;
mod virsh_run;
pub mod whereabouts;

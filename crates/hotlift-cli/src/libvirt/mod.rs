//! libvirt of this host and of others: asked by virsh.

pub mod virsh;
mod virsh_run;
pub mod whereabouts;

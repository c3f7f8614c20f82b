//! Driving and watching whatever moves memory, as QEMU is: by tools over QMP, by people at a monitor.

pub mod commands;
pub mod hmp;

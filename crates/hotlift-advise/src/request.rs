//! What is asked.

use std::path::PathBuf;
use std::sync::Arc;

use hotlift::Address;
use hotlift::tls::Tls;
use hotlift_qmp::{QmpAddress, Version};

use crate::choose::Goal;

/// Whose memory is to move, where to, and what matters.
#[derive(Debug, Clone)]
pub struct Request {
    /// Where the memory is.
    pub origin: Origin,
    /// Bytes that the methods are measured on at most; four times as many are looked at for zero pages.
    pub sample_bytes: u64,
    /// What the migration is to be.
    pub goal: Goal,
    /// Where the other host waits to be measured; `None`: it is taken to be like this one.
    pub to: Option<Address>,
    /// What is said to it goes over TLS.
    pub tls: Option<Arc<Tls>>,
    /// Names and values of the options that say so, for the command that is recommended.
    pub security: Vec<(String, String)>,
    /// Bytes a second of the link to the other host; `None`: as it is measured, or no limit.
    pub bandwidth: Option<f64>,
    /// Both ends are on this host and share its cores, though the bandwidth is limited.
    pub same_host: bool,
    /// Cores that each host can spare; `None`: what was free while measuring.
    pub cores: Option<f64>,
    /// Channels at most; `None`: as many as this host has cores.
    pub channels: Option<u8>,
    /// Pages that the guest dirties in a second; `None`: a QEMU is asked, else 0.
    pub dirty_rate: Option<u64>,
    /// Bytes that the guest writes to at all; `None`: all of its RAM.
    pub working_set_bytes: Option<u64>,
    /// Bytes of RAM; `None`: those of what is sampled.
    pub ram_bytes: Option<u64>,
    /// How long the guest may stand still, in milliseconds.
    pub downtime_limit_ms: u32,
    /// The other side is a QEMU of this version, not a Hotlift.
    pub to_qemu: Option<Version>,
    /// The destination's memory is allocated before the migration.
    pub mem_prealloc: bool,
    /// The guest passes a relay at each host, also if it is not known to be a QEMU's.
    pub relays: bool,
    /// Accelerators are measured, too.
    pub accelerators: bool,
    /// Start of all random numbers.
    pub seed: u64,
}

/// Where the memory is.
#[derive(Debug, Clone)]
pub enum Origin {
    /// In a process: its largest mappings are taken for RAM.
    Process(u32),
    /// In the QEMU, or the built-in guest, behind a QMP socket.
    Qmp(QmpAddress),
    /// In a memory image, or in the files of a folder as they would fill RAM.
    File(PathBuf),
}

impl Request {
    /// Channels at most, on a host with so many `cores`.
    pub(crate) fn most_channels(&self, cores: usize) -> u8 {
        let cores = u8::try_from(cores).unwrap_or(u8::MAX);
        self.channels.unwrap_or(cores)
    }
}

//! Settings of a relay.

use std::sync::Arc;

use hotlift_net::admission::ConnectionToken;
use serde_json::Value;

use crate::options::{Limits, StreamOptions, ZeroPageDetection};
use crate::tls::Tls;

/// RAM that a QEMU omits because a device reports it as unused by the guest. In a file it reads as zero.
#[derive(Debug, Clone, PartialEq, Eq)]
pub enum UnusedRam {
    /// Up to `bytes` of a RAM block are unplugged (virtio-mem).
    Unplugged {
        /// Name of the RAM block, or the last part of it.
        block: String,
        /// Size in bytes.
        bytes: u64,
    },
    /// Pages anywhere that the guest reports as free (free page hints of virtio-balloon).
    Free,
}

impl UnusedRam {
    /// Returns how many bytes of this RAM block may be unplugged; `None` for another block.
    pub(crate) fn unplugged(&self, name: &str) -> Option<u64> {
        let Self::Unplugged { block, bytes } = self else {
            return None;
        };
        let is_this = name == block || name.ends_with(&format!("/{block}"));
        is_this.then_some(*bytes)
    }
}

/// Settings of a relay.
#[derive(Debug, Clone)]
pub struct RelaySettings {
    /// Multifd channels, method, level and bandwidth of the outgoing side.
    pub outgoing: StreamOptions,
    /// Limits for the source and the destination.
    pub limits: Limits,
    /// Encoding of zero pages: in packets (`Multifd`), as records of main (`Legacy`), or unchanged and without detection
    /// (`None`). Default: detected unless the source has done so, and sent in a form that the destination can read.
    pub zero_pages: Option<ZeroPageDetection>,
    /// UUID of the VM, if the incoming side has no multifd channels that carry it.
    pub uuid: Option<[u8; 16]>,
    /// QEMU's property `multifd-flush-after-each-section` of the outgoing side. Default: as the source's QEMU shows it in its
    /// stream or file; otherwise `qemu_flushes_after_each_section`; otherwise on for machine types up to 8.0.
    pub flush_after_each_section: Option<bool>,
    /// The same property as the destination's QEMU reports it over QMP; `None` if it is not reported or was not queried.
    pub qemu_flushes_after_each_section: Option<bool>,
    /// True if the destination is a QEMU with multifd as in `outgoing`. If false, it may also be a relay, which accepts either.
    pub to_qemu: bool,
    /// Reads damaged pages of a save file as zero. Without it such a file is rejected.
    pub salvage: bool,
    /// Description of the source's VM, stored in the header of a save file for the process that restores it.
    pub vm: Option<Value>,
    /// RAM that this relay's local QEMU omits. When saving, every other page must arrive, with content or as zero. When
    /// restoring, a fully unplugged RAM block receives only content: a zero page would make QEMU allocate memory for it.
    pub unused_ram: Vec<UnusedRam>,
    /// Token that each incoming connection must begin with, given to the permitted source over a separate conversation.
    /// Default: any client that uses the format is accepted.
    pub incoming_pass: Option<ConnectionToken>,
    /// Token that each outgoing connection begins with, as the destination has requested.
    pub outgoing_pass: Option<ConnectionToken>,
    /// Set if the source's connections use TLS.
    pub incoming_tls: Option<Arc<Tls>>,
    /// Set if the connections to the destination use TLS. (The options' `tls-creds` has no effect here: only the caller knows
    /// which side is the other Hotlift.)
    pub outgoing_tls: Option<Arc<Tls>>,
}

impl Default for RelaySettings {
    /// Returns the default options, but without a bandwidth limit: the source limits itself.
    fn default() -> Self {
        Self {
            outgoing: StreamOptions {
                max_bandwidth: 0,
                ..StreamOptions::default()
            },
            limits: Limits::default(),
            zero_pages: None,
            uuid: None,
            flush_after_each_section: None,
            qemu_flushes_after_each_section: None,
            to_qemu: false,
            salvage: false,
            vm: None,
            unused_ram: Vec::new(),
            incoming_pass: None,
            outgoing_pass: None,
            incoming_tls: None,
            outgoing_tls: None,
        }
    }
}

//! Settings of a relay.

use std::sync::Arc;

use hotlift_net::admission::ConnectionToken;
use serde_json::Value;

use crate::options::{Limits, StreamOptions, ZeroPageDetection};
use crate::tls::Tls;

/// RAM that a QEMU does not send, because a device reports that the guest does not use it. After a save and restore it is zero.
#[derive(Debug, Clone, PartialEq, Eq)]
pub enum UnusedRam {
    /// Up to `bytes` bytes of a RAM block are unplugged (virtio-mem).
    Unplugged {
        /// Name of the RAM block, or the end of the name.
        block: String,
        /// Maximum size of the unplugged memory, in bytes.
        bytes: u64,
    },
    /// Any page that the guest reports as free (free page hints of virtio-balloon).
    Free,
}

impl UnusedRam {
    /// Returns the maximum count of unplugged bytes in the RAM block `name`. Returns `None` if this entry is about another
    /// block.
    pub(crate) fn unplugged(&self, name: &str) -> Option<u64> {
        let Self::Unplugged { block, bytes } = self else {
            return None;
        };
        let is_this = name == block || name.ends_with(&format!("/{block}"));
        is_this.then_some(*bytes)
    }
}

/// Settings of a relay for one migration.
#[derive(Debug, Clone)]
pub struct RelaySettings {
    /// Options of the outgoing stream: multifd channels, method, level and bandwidth.
    pub outgoing: StreamOptions,
    /// Limits for the source and the destination.
    pub limits: Limits,
    /// Form of zero pages in the outgoing stream:
    ///
    /// - `Multifd`: listed in packets
    /// - `Legacy`: records of the main channel
    /// - `None`: as in the incoming stream, without detection
    ///
    /// Default (unset): a form that the destination can read. Zero pages are detected unless the source has already done so.
    pub zero_pages: Option<ZeroPageDetection>,
    /// UUID of the VM, if the incoming stream has no multifd channels, which would carry the UUID.
    pub uuid: Option<[u8; 16]>,
    /// QEMU's property `multifd-flush-after-each-section` for the outgoing stream. If unset, the first known value applies:
    ///
    /// - the value that the source's QEMU shows in its stream or file
    /// - `qemu_flushes_after_each_section`
    /// - on for machine types up to 8.0, off for later ones
    pub flush_after_each_section: Option<bool>,
    /// Property `multifd-flush-after-each-section` that the destination's QEMU reports over QMP; `None` if unknown.
    pub qemu_flushes_after_each_section: Option<bool>,
    /// True if the destination is a QEMU with the same multifd setting as `outgoing`. If false, the destination may also be a
    /// relay, which accepts both settings.
    pub to_qemu: bool,
    /// True if damaged pages of a save file are restored as zero. If false, a damaged file is rejected.
    pub salvage: bool,
    /// Description of the source's VM. A save stores it in the file's header, for the program that restores the VM.
    pub vm: Option<Value>,
    /// RAM that the QEMU beside this relay omits. In a save, every other page must arrive, with content or as zero. In a
    /// restore, a fully unplugged RAM block receives only pages with content: for a zero page, QEMU would allocate memory.
    pub unused_ram: Vec<UnusedRam>,
    /// Token that each incoming connection must begin with. The permitted source received it over a separate conversation.
    /// Without a token, any client with the right format is accepted.
    pub incoming_pass: Option<ConnectionToken>,
    /// Token that each outgoing connection begins with, as the destination has requested.
    pub outgoing_pass: Option<ConnectionToken>,
    /// TLS of the source's connections; `None` for connections without TLS.
    pub incoming_tls: Option<Arc<Tls>>,
    /// TLS of the connections to the destination; `None` for connections without TLS. The option `tls-creds` has no effect
    /// here, because only the caller knows if a peer is the local QEMU or the other Hotlift.
    pub outgoing_tls: Option<Arc<Tls>>,
}

impl Default for RelaySettings {
    /// Returns the default options, but without a bandwidth limit, because the source limits itself.
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

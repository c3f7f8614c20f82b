//! How a relay passes a stream on.

use std::sync::Arc;

use hotlift_net::admission::Pass;
use serde_json::Value;

use crate::options::{Options, ZeroPageDetection};
use crate::tls::Tls;

/// RAM that a QEMU leaves out, because one of its devices reports that the guest does not use it. It reads as zero in a file.
#[derive(Debug, Clone, PartialEq, Eq)]
pub enum LeftOut {
    /// Up to `bytes` of a RAM block are unplugged (virtio-mem).
    Unplugged {
        /// Name of the RAM block, or the last part of it.
        block: String,
        /// How many, in bytes.
        bytes: u64,
    },
    /// Pages that the guest reports as free, anywhere (free page hints of virtio-balloon).
    Free,
}

impl LeftOut {
    /// How many bytes of this RAM block may be unplugged; `None` if it is not the block that this names.
    pub(crate) fn unplugged(&self, name: &str) -> Option<u64> {
        let Self::Unplugged { block, bytes } = self else {
            return None;
        };
        let is_this = name == block || name.ends_with(&format!("/{block}"));
        is_this.then_some(*bytes)
    }
}

/// How to pass the stream on.
#[derive(Debug, Clone)]
pub struct RelaySettings {
    /// Multifd channels, method, level and bandwidth of the outgoing side.
    pub outgoing: Options,
    /// How zero pages are sent: in packets (`Multifd`), as records of main (`Legacy`), or as they
    /// came, without looking for them (`None`). Not given: looked for where the source has not, and
    /// sent as the other side can read them.
    pub zero_pages: Option<ZeroPageDetection>,
    /// The VM's UUID, where the incoming side has no multifd channels to say it.
    pub uuid: Option<[u8; 16]>,
    /// QEMU's property `multifd-flush-after-each-section` of the outgoing side. Not given: as the
    /// source's QEMU has shown it in its stream, or in the file; otherwise as `qemu_flushes_after_each_section`; otherwise on for
    /// machine types up to 8.0.
    pub flush_after_each_section: Option<bool>,
    /// The same property as the destination's QEMU reports it over QMP; `None` if it does not, or was not asked.
    pub qemu_flushes_after_each_section: Option<bool>,
    /// The other side is a QEMU, which has multifd as `outgoing` has it. Not known: it may as well be a relay, which takes either.
    pub to_qemu: bool,
    /// Pages of a save file that are damaged are zero in the guest. Without it such a file is refused.
    pub salvage: bool,
    /// Description of the source's VM, kept in the header of a save file for the caller that restores it.
    pub vm: Option<Value>,
    /// RAM that the QEMU beside this relay leaves out. Into a file, every other page must come: as content, or as zero. Out of
    /// a file, a RAM block that is unplugged as a whole gets content alone: a zero page would have QEMU take memory for it.
    pub left_out: Vec<LeftOut>,
    /// What each incoming connection must begin with: given to the one source that may connect, over a
    /// conversation of its own. Not given: whoever speaks the format is taken in.
    pub incoming_pass: Option<Pass>,
    /// What each outgoing connection begins with, as the destination has asked for.
    pub outgoing_pass: Option<Pass>,
    /// The source's connections are TLS ones.
    pub incoming_tls: Option<Arc<Tls>>,
    /// The connections to the destination are TLS ones. (`tls-creds` of the options says nothing here: which of the two
    /// sides is the other Hotlift, the caller knows.)
    pub outgoing_tls: Option<Arc<Tls>>,
}

impl Default for RelaySettings {
    /// Options of the table, but for the bandwidth: the source paces itself.
    fn default() -> Self {
        Self {
            outgoing: Options {
                max_bandwidth: 0,
                ..Options::default()
            },
            zero_pages: None,
            uuid: None,
            flush_after_each_section: None,
            qemu_flushes_after_each_section: None,
            to_qemu: false,
            salvage: false,
            vm: None,
            left_out: Vec::new(),
            incoming_pass: None,
            outgoing_pass: None,
            incoming_tls: None,
            outgoing_tls: None,
        }
    }
}

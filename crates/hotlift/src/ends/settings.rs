//! Which ends a relay joins, and how.

use std::path::Path;
use std::sync::Arc;

use serde_json::Value;

use crate::control::Control;
use crate::ends::file::{FileFormat, RemoteFile};
use crate::options::{Options, ZeroPageDetection};
use crate::pipe::hooks::Hooks;
use crate::stream::pass::Pass;
use crate::tls::Tls;
use crate::transport::{Address, Listener};

/// Where the stream comes from.
#[derive(Debug, Clone, Copy)]
pub enum Incoming<'a> {
    /// The source connects here.
    Listener(&'a Listener),
    /// A VM that was saved: a file of Hotlift's or a `mapped-ram` file of QEMU's, which is found out.
    File {
        /// The file.
        path: &'a Path,
        /// Byte where its content starts, as in QEMU's `file:PATH,offset=N`; 0 for Hotlift's own.
        offset: u64,
    },
    /// A VM that was saved, in a file that a server hands out.
    Remote(&'a RemoteFile),
}

/// Where it goes.
#[derive(Debug)]
pub enum Outgoing<'a> {
    /// To a relay or QEMU that listens there.
    Address(&'a Address),
    /// Into a file, which appears under its name when it is whole and on disk.
    File {
        /// The file; one that has this name is replaced.
        path: &'a Path,
        /// How it is written.
        format: FileFormat,
    },
}

/// RAM that a source leaves out of its stream, because one of its devices reports that the guest does not use it. It reads as
/// zero in a file.
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
    /// RAM that the source leaves out. Into a file, every other page must come: as content, or as zero.
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

/// All that the caller of a relay says, but for where the stream comes from.
#[derive(Clone, Copy)]
pub(crate) struct Request<'a> {
    pub outgoing: &'a Outgoing<'a>,
    pub settings: &'a RelaySettings,
    pub control: &'a Control,
    pub hooks: Hooks<'a>,
}

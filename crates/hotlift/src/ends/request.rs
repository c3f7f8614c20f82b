//! Which ends a relay joins.

use std::path::Path;

use hotlift_net::admission::Listener;
use hotlift_net::transport::Address;

use crate::control::Control;
use crate::ends::file::{FileFormat, RemoteFile};
use crate::pipe::hooks::Hooks;
use crate::pipe::settings::RelaySettings;

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

/// The caller's request to a relay, without the source of the stream.
#[derive(Clone, Copy)]
pub(crate) struct Request<'a> {
    pub outgoing: &'a Outgoing<'a>,
    pub settings: &'a RelaySettings,
    pub control: &'a Control,
    pub hooks: Hooks<'a>,
}

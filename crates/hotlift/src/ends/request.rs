//! Source and destination of a relay.

use std::path::Path;

use hotlift_net::admission::Listener;
use hotlift_net::transport::Address;

use crate::control::Control;
use crate::ends::file::{FileFormat, RemoteFile};
use crate::pipe::hooks::Hooks;
use crate::pipe::settings::RelaySettings;

/// Source of the stream.
#[derive(Debug, Clone, Copy)]
pub enum Incoming<'a> {
    /// Listener to which the source connects.
    Listener(&'a Listener),
    /// Saved VM: a file of Hotlift or a `mapped-ram` file of QEMU. The relay detects the format.
    File {
        /// Path of the file.
        path: &'a Path,
        /// Byte offset of the content, as in QEMU's `file:PATH,offset=N`; 0 for a file of Hotlift.
        offset: u64,
    },
    /// Saved VM in a file on a file server.
    Remote(&'a RemoteFile),
}

/// Destination of the stream.
#[derive(Debug)]
pub enum Outgoing<'a> {
    /// Listening relay or QEMU at this address.
    Address(&'a Address),
    /// File that appears under its name when it is complete and on disk.
    File {
        /// Path of the file; an existing file is replaced.
        path: &'a Path,
        /// Format of the file.
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

//! Why a migration ended before its time, in families that a caller can act on.

pub(crate) mod file;

use std::io;
use std::time::Duration;

use hotlift_idxd::queue::QueueError;
use hotlift_mem::MemError;
pub use hotlift_mem::error_line;
use hotlift_methods::{MethodError, OverMemoryLimit};
use hotlift_net::transport::TransportError;
use hotlift_wire::WireError;
use hotlift_wire::multifd::Method;

use crate::error::file::FileError;
use crate::guest::GuestError;
use crate::options::OptionError;
use crate::tls::{TlsError, TlsSetupError};

/// Which connection of a migration.
#[derive(Debug, Clone, Copy, PartialEq, Eq, PartialOrd, Ord)]
pub enum Channel {
    /// The main channel: stream setup, sync points, device state.
    Main,
    /// A multifd channel, by its id.
    Multifd(u8),
}

impl std::fmt::Display for Channel {
    fn fmt(&self, f: &mut std::fmt::Formatter<'_>) -> std::fmt::Result {
        match self {
            Self::Main => write!(f, "the main channel"),
            Self::Multifd(id) => write!(f, "multifd channel {id}"),
        }
    }
}

/// A failed (or cancelled) migration. Unless it is [`MigrationError::InDoubt`] (or, of a relay,
/// [`MigrationError::Released`]), the guest goes on
/// where it was.
#[derive(Debug, thiserror::Error)]
#[non_exhaustive]
pub enum MigrationError {
    /// [`crate::control::Control::cancel`] was called.
    #[error("the migration was cancelled")]
    Cancelled,
    /// The options do not go together.
    #[error("the options do not go together")]
    Option(#[from] OptionError),
    /// An address is wrong or cannot be used.
    #[error("cannot reach the other side")]
    Transport(#[from] TransportError),
    /// TLS was asked for, and cannot be had.
    #[error("cannot use TLS")]
    TlsSetup(#[from] TlsSetupError),
    /// A connection was made, and is no TLS one, or not one to who it should be to.
    #[error("the TLS handshake with {host} failed")]
    Tls {
        /// Address of the other host.
        host: String,
        /// Why.
        #[source]
        source: Box<TlsError>,
    },
    /// A connection could not be made, though others of the migration were.
    #[error("{channel} could not be opened")]
    Opening {
        /// Which connection.
        channel: Channel,
        /// Why.
        #[source]
        source: Box<MigrationError>,
    },
    /// The other side takes TLS connections only.
    #[error("the other side speaks TLS only: give '--tls DIR', or the parameter tls-creds")]
    SpeaksTls,
    /// A connection broke.
    #[error("{channel} broke while {doing}")]
    Connection {
        /// Which connection.
        channel: Channel,
        /// What was going on, as a gerund phrase.
        doing: &'static str,
        /// The system's reason.
        #[source]
        source: io::Error,
    },
    /// The other side closed a connection before the migration was over.
    #[error("{channel} was closed by the other side")]
    Closed {
        /// Which connection.
        channel: Channel,
    },
    /// A host has answered nothing for `silence-timeout`.
    #[error(
        "nothing was received from {host} for {waited:?}: check that the host is up, that the network reaches it, and that \
         the path carries packets of the MTU"
    )]
    Silent {
        /// Address of the host.
        host: String,
        /// Time since the last answer.
        waited: Duration,
    },
    /// The other side said what is wrong.
    #[error("the destination gave up: {reason}")]
    Destination {
        /// Its own words, cut to the protocol's limit and without control characters.
        reason: String,
    },
    /// The other side did not answer.
    #[error("{waiting_for} did not arrive within {waited:?}")]
    Timeout {
        /// What was missing, and what to check.
        waiting_for: String,
        /// How long it was waited for.
        waited: Duration,
    },
    /// The destination has RAM in pages of a size that a lazy restore does not send.
    #[error(
        "RAM block '{block}' is in pages of {size} bytes at the destination; a guest that runs before it has its pages can \
         have them of 4 KiB to 2 MiB"
    )]
    PageSize {
        /// The RAM block.
        block: String,
        /// Of its pages, in bytes.
        size: u64,
    },
    /// The stream is not what the format allows.
    #[error("bad data on {channel}")]
    Wire {
        /// Where it was read.
        channel: Channel,
        /// What is wrong with it.
        #[source]
        source: WireError,
    },
    /// A device that is required to look for zero pages cannot be used.
    #[error("zero-page-detection=dsa-accel")]
    ZeroDevice {
        /// Why not.
        #[source]
        source: QueueError,
    },
    /// A channel's half of the method could not be made.
    #[error("the method of {channel} cannot be set up")]
    MethodSetup {
        /// The channel.
        channel: Channel,
        /// The method's reason.
        #[source]
        source: MethodError,
    },
    /// A packet's pages did not decode, or did not encode.
    #[error("packet {packet} of {channel} (RAM block '{block}') failed")]
    Method {
        /// The packet's channel.
        channel: Channel,
        /// The packet's number.
        packet: u64,
        /// The RAM block it is for.
        block: String,
        /// The method's reason.
        #[source]
        source: MethodError,
    },
    /// What a source sends does not fit in the memory that it may choose to take.
    #[error("what {channel} sends takes too much memory")]
    MemoryLimit {
        /// The channel.
        channel: Channel,
        /// What it takes, and what there is.
        #[source]
        source: OverMemoryLimit,
    },
    /// A page on the main channel (XBZRLE, `compress`) did not decode.
    #[error("the page at {offset:#x} of RAM block '{block}' failed")]
    Page {
        /// The RAM block.
        block: String,
        /// Byte offset in the block.
        offset: usize,
        /// What is wrong with the record.
        #[source]
        source: MethodError,
    },
    /// The file that a VM is saved in or restored from cannot be used.
    #[error("the file cannot be used")]
    File(#[from] FileError),
    /// The two sides do not agree.
    #[error("{what}: the source has {source_has}, the destination has {destination_has}")]
    Mismatch {
        /// What was compared.
        what: String,
        /// The source's value.
        source_has: String,
        /// The destination's value.
        destination_has: String,
    },
    /// The order of messages is not that of a migration.
    #[error("unexpected {got} on {channel} while {doing}")]
    Protocol {
        /// Where it was read.
        channel: Channel,
        /// What arrived.
        got: String,
        /// What was going on.
        doing: &'static str,
    },
    /// The last round, with the guest stopped, left pages behind: the guest still writes, or its
    /// dirty log does not hold still.
    #[error("{pages} pages were dirty after the last round, though the guest was stopped")]
    Incomplete {
        /// How many.
        pages: u64,
    },
    /// The guest did not do as asked.
    #[error("the guest failed")]
    Guest(#[from] GuestError),
    /// Guest memory could not be used.
    #[error("guest memory failed")]
    Memory(#[from] MemError),
    /// There is no memory for XBZRLE's cache.
    #[error(
        "no memory for an xbzrle cache of {bytes} bytes (this host has {available} available): choose a \
         smaller xbzrle-cache-size"
    )]
    XbzrleCache {
        /// Bytes that were asked for.
        bytes: u64,
        /// Bytes that this host has (`MemAvailable`).
        available: u64,
    },
    /// A thread could not be started.
    #[error("thread '{name}' could not be started")]
    Thread {
        /// The thread's name.
        name: String,
        /// The system's reason.
        #[source]
        source: io::Error,
    },
    /// A thread panicked: a bug. The migration was ended as by any other error.
    #[error(
        "thread '{thread}' has panicked, which is a bug of Hotlift's or of the guest's: what it printed says \
         where"
    )]
    Panicked {
        /// The thread's name.
        thread: String,
    },
    /// The source was told that it may release the guest, and the destination was not told to run it: if the source
    /// has released it, the guest stands still there, whole.
    #[error(
        "the destination does not run the guest, but the source may have released it: if the \
         source says 'completed', 'cont' it there"
    )]
    Released {
        /// What came between.
        #[source]
        source: Box<MigrationError>,
    },
    /// A postcopy has ended while the destination loaded the devices. The source's QEMU (10.2 and newer) has not had the answer
    /// that they are loaded, and lets its guest run again.
    #[error(
        "the migration ended while the destination loaded the devices: the source's QEMU lets its guest run again"
    )]
    GivenBack {
        /// What came between.
        #[source]
        source: Box<MigrationError>,
    },
    /// The destination runs the guest, and has not all of its pages.
    #[error("the guest runs, and not all of its pages are there")]
    PagesMissing {
        /// Why no more came.
        #[source]
        source: Box<MigrationError>,
    },
    /// The destination had everything and was told to run the guest, and then no word came back.
    /// The guest stands still here: letting it run could make two of it.
    #[error(
        "the destination had the whole guest and was told to run it, but did not confirm: the \
         guest is left paused here; resume it only if it does not run there"
    )]
    InDoubt,
}

impl MigrationError {
    /// The main channel has ended before its time.
    pub(crate) fn main_closed() -> Self {
        Self::Closed {
            channel: Channel::Main,
        }
    }

    /// What is wrong with the bytes of the main channel.
    pub(crate) fn main_wire(source: WireError) -> Self {
        Self::Wire {
            channel: Channel::Main,
            source,
        }
    }

    /// A connection failed before the migration was open.
    pub(crate) fn opening(source: std::io::Error) -> Self {
        Self::Connection {
            channel: Channel::Main,
            doing: "opening the migration",
            source,
        }
    }

    /// The current thread has panicked.
    pub(crate) fn panicked_here() -> Self {
        let thread = std::thread::current();
        Self::Panicked {
            thread: thread.name().unwrap_or_default().to_owned(),
        }
    }

    /// What comes on `channel` does not fit in what a source may choose to take.
    pub(crate) fn memory(channel: Channel, source: OverMemoryLimit) -> Self {
        Self::MemoryLimit { channel, source }
    }

    /// A connection began with something that opens no migration.
    pub(crate) fn opened_with(channel: Channel, got: &str) -> Self {
        Self::Protocol {
            channel,
            got: got.to_owned(),
            doing: "opening the migration",
        }
    }

    /// Both sides are Hotlifts whose additions to QEMU's stream have different versions.
    pub(crate) fn other_version(source: u32, destination: u32) -> Self {
        Self::Mismatch {
            what: "the version of Hotlift's protocol (use the same hotlift on both hosts)"
                .to_owned(),
            source_has: source.to_string(),
            destination_has: destination.to_string(),
        }
    }

    /// The destination is a QEMU, and no QEMU has `method`.
    pub(crate) fn not_qemus(method: Method) -> Self {
        Self::Mismatch {
            what: "multifd-compression".to_owned(),
            source_has: method.name().to_owned(),
            destination_has: "none of that name: it is a QEMU".to_owned(),
        }
    }

    /// Whether a file is to blame whose bytes are not those that were written.
    #[must_use]
    pub fn is_damage(&self) -> bool {
        match self {
            Self::File(FileError::Damaged { .. }) | Self::Method { .. } => true,
            Self::PagesMissing { source } | Self::GivenBack { source } => source.is_damage(),
            _ => false,
        }
    }

    /// The error and its causes as one line, outermost first.
    #[must_use]
    pub fn chain(&self) -> String {
        error_line(self)
    }
}

/// A peer's words, without what could steer a terminal.
pub(crate) fn printable(text: &str) -> String {
    text.chars().filter(|c| !c.is_control()).collect()
}

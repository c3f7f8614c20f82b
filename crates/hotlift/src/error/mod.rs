//! Errors that end a migration, in families that a caller can act on.

pub(crate) mod file;

use std::io;
use std::time::Duration;

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

/// A connection of a migration.
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

/// Error of a failed or cancelled migration. The guest continues at the source, with three exceptions:
///
/// - [`MigrationError::InDoubt`]: the guest may run at the destination.
/// - [`MigrationError::PagesMissing`]: the guest runs at the destination.
/// - [`MigrationError::Released`], of a relay: the guest may be paused at the source.
#[derive(Debug, thiserror::Error)]
#[non_exhaustive]
pub enum MigrationError {
    /// [`crate::control::Control::cancel`] was called.
    #[error("the migration was cancelled")]
    Cancelled,
    /// Two or more options conflict.
    #[error("incompatible options")]
    Option(#[from] OptionError),
    /// An address is wrong or cannot be used.
    #[error(transparent)]
    Transport(#[from] TransportError),
    /// TLS was requested, but could not be set up.
    #[error("cannot use TLS")]
    TlsSetup(#[from] TlsSetupError),
    /// A TLS handshake failed: the peer does not use TLS, or is not the expected peer.
    #[error("the TLS handshake with {host} failed")]
    Tls {
        /// Address of the peer.
        host: String,
        /// Cause.
        #[source]
        source: Box<TlsError>,
    },
    /// A connection could not be opened, although an earlier connection of the migration was.
    #[error("cannot open {channel}")]
    Opening {
        /// The connection.
        channel: Channel,
        /// Cause.
        #[source]
        source: Box<MigrationError>,
    },
    /// The peer accepts TLS connections only.
    #[error("the other side accepts only TLS; give '--tls DIR', or set the parameter tls-creds")]
    SpeaksTls,
    /// A connection broke.
    #[error("{channel} broke while {doing}")]
    Connection {
        /// The connection.
        channel: Channel,
        /// Activity, as a gerund phrase.
        doing: &'static str,
        /// The system's reason.
        #[source]
        source: io::Error,
    },
    /// The peer closed a connection before the migration was over.
    #[error("{channel} was closed by the other side")]
    Closed {
        /// The connection.
        channel: Channel,
    },
    /// A host has sent no answer for `silence-timeout`.
    #[error(
        "nothing was received from {host} for {waited:?}; check that the host is up, that the network reaches it, and that \
         the path carries packets of the MTU"
    )]
    Silent {
        /// Address of the host.
        host: String,
        /// Time since the last answer.
        waited: Duration,
    },
    /// The destination reported an error.
    #[error("the destination aborted: {reason}")]
    Destination {
        /// Its error message, cut to the protocol's limit and without control characters.
        reason: String,
    },
    /// An awaited message of the peer did not arrive in time.
    #[error("{waiting_for} did not arrive within {waited:?}")]
    Timeout {
        /// The missing message, and what to check.
        waiting_for: String,
        /// Time waited.
        waited: Duration,
    },
    /// RAM at the destination has pages of a size that postcopy and lazy restore do not support.
    #[error(
        "RAM block '{block}' has pages of {size} bytes at the destination; postcopy and lazy restore need pages of 4 KiB to 2 \
         MiB"
    )]
    PageSize {
        /// The RAM block.
        block: String,
        /// Size of its pages, in bytes.
        size: u64,
    },
    /// The stream violates the format.
    #[error("bad data on {channel}")]
    Wire {
        /// Channel that the data was read from.
        channel: Channel,
        /// Cause.
        #[source]
        source: WireError,
    },
    /// A device that zero page detection requires cannot be used.
    #[error("cannot use DSA (zero-page-detection=dsa-accel)")]
    ZeroDevice {
        /// Cause.
        #[source]
        source: Box<dyn std::error::Error + Send + Sync>,
    },
    /// The encoder or decoder of a channel's method could not be created.
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
        /// RAM block of the packet.
        block: String,
        /// The method's reason.
        #[source]
        source: MethodError,
    },
    /// The source's data needs more memory than the receiver may allocate for one source.
    #[error("the data of {channel} needs too much memory")]
    MemoryLimit {
        /// The channel.
        channel: Channel,
        /// Needed memory, and the limit.
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
        /// Cause.
        #[source]
        source: MethodError,
    },
    /// The file that a VM is saved in or restored from cannot be used.
    #[error(transparent)]
    File(#[from] FileError),
    /// A property differs between the source and the destination.
    #[error("{what} differs: the source has {source_has}, the destination has {destination_has}")]
    Mismatch {
        /// The compared property.
        what: String,
        /// The source's value.
        source_has: String,
        /// The destination's value.
        destination_has: String,
    },
    /// A message arrived in the wrong order.
    #[error("unexpected {got} on {channel} while {doing}")]
    Protocol {
        /// Channel that the message was read from.
        channel: Channel,
        /// The message.
        got: String,
        /// Activity, as a gerund phrase.
        doing: &'static str,
    },
    /// Pages were dirty after the last round, although the guest was stopped. The guest still writes, or its dirty log still
    /// changes.
    #[error("{pages} pages were dirty after the last round, although the guest was stopped")]
    Incomplete {
        /// Number of pages.
        pages: u64,
    },
    /// The guest reported a failure.
    #[error("the guest failed")]
    Guest(#[from] GuestError),
    /// Guest memory could not be used.
    #[error("guest memory failed")]
    Memory(#[from] MemError),
    /// There is not enough memory for the XBZRLE cache.
    #[error(
        "no memory for an xbzrle cache of {bytes} bytes (this host has {available} bytes available); choose a smaller \
         xbzrle-cache-size"
    )]
    XbzrleCache {
        /// Bytes requested.
        bytes: u64,
        /// Bytes that this host has (`MemAvailable`).
        available: u64,
    },
    /// A thread could not be started.
    #[error("cannot start thread '{name}'")]
    Thread {
        /// The thread's name.
        name: String,
        /// The system's reason.
        #[source]
        source: io::Error,
    },
    /// A thread panicked, which is a bug. The migration ended as after any other error.
    #[error(
        "thread '{thread}' panicked, which is a bug of Hotlift or of the guest; standard error shows the place in the code"
    )]
    Panicked {
        /// The thread's name.
        thread: String,
    },
    /// Of a relay: the source may have released the guest, but the destination never received the commit. If the source has
    /// released the guest, it is paused there, without loss of data.
    #[error(
        "the destination does not run the guest, but the source may have released it (if the source reports 'completed', send \
         'cont' there)"
    )]
    Released {
        /// Error before the commit.
        #[source]
        source: Box<MigrationError>,
    },
    /// A postcopy ended while the destination loaded the devices. The source's QEMU (10.2 and newer) did not receive the answer
    /// that the devices are loaded, so it runs its guest again.
    #[error(
        "the migration ended while the destination loaded the devices, so the source's QEMU runs its guest again"
    )]
    GivenBack {
        /// Error that ended it.
        #[source]
        source: Box<MigrationError>,
    },
    /// The destination runs the guest without all of its pages.
    #[error("the guest runs, but some of its pages have not arrived")]
    PagesMissing {
        /// Reason why the missing pages did not arrive.
        #[source]
        source: Box<MigrationError>,
    },
    /// The destination received the whole guest and the commit, but did not report whether it runs the guest. The guest is
    /// paused at the source. If it were resumed there, it could run twice.
    #[error(
        "the destination received the whole guest and the request to run it, but did not confirm; the guest is left paused \
         here; resume it only if it does not run there"
    )]
    InDoubt,
}

impl MigrationError {
    /// Returns the error of a main channel that ended early.
    pub(crate) fn main_closed() -> Self {
        Self::Closed {
            channel: Channel::Main,
        }
    }

    /// Returns the error of invalid bytes on the main channel.
    pub(crate) fn main_wire(source: WireError) -> Self {
        Self::Wire {
            channel: Channel::Main,
            source,
        }
    }

    /// Returns the error of a connection that failed before the migration was open.
    pub(crate) fn opening(source: std::io::Error) -> Self {
        Self::Connection {
            channel: Channel::Main,
            doing: "opening the migration",
            source,
        }
    }

    /// Returns the error of a panic in the current thread.
    pub(crate) fn panicked_here() -> Self {
        let thread = std::thread::current();
        Self::Panicked {
            thread: thread.name().unwrap_or_default().to_owned(),
        }
    }

    /// Returns the error of data on `channel` that exceeds the memory limit of a source.
    pub(crate) fn memory(channel: Channel, source: OverMemoryLimit) -> Self {
        Self::MemoryLimit { channel, source }
    }

    /// Returns the error of a connection whose first message opens no migration.
    pub(crate) fn opened_with(channel: Channel, got: &str) -> Self {
        Self::Protocol {
            channel,
            got: got.to_owned(),
            doing: "opening the migration",
        }
    }

    /// Returns the error for two Hotlifts with different versions of their additions to QEMU's stream.
    pub(crate) fn other_version(source: u32, destination: u32) -> Self {
        Self::Mismatch {
            what: "the version of Hotlift's protocol (use the same hotlift on both hosts)"
                .to_owned(),
            source_has: source.to_string(),
            destination_has: destination.to_string(),
        }
    }

    /// Returns the error for a `method` that a QEMU at the destination does not have.
    pub(crate) fn not_qemus(method: Method) -> Self {
        Self::Mismatch {
            what: "multifd-compression".to_owned(),
            source_has: method.name().to_owned(),
            destination_has: "no such method: it is a QEMU".to_owned(),
        }
    }

    /// Returns true if the cause is damaged data: a damaged part of a file, or a packet that cannot be decoded.
    #[must_use]
    pub fn is_damage(&self) -> bool {
        match self {
            Self::File(FileError::Damaged { .. }) | Self::Method { .. } => true,
            Self::PagesMissing { source } | Self::GivenBack { source } => source.is_damage(),
            _ => false,
        }
    }

    /// Returns the error and its causes as one line, outermost first.
    #[must_use]
    pub fn chain(&self) -> String {
        error_line(self)
    }
}

/// Returns a peer's text without control characters, which could change the state of a terminal.
pub(crate) fn printable(text: &str) -> String {
    text.chars().filter(|c| !c.is_control()).collect()
}

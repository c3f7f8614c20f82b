//! Rules for the bytes that a proxy carries.

use hotlift_wire::settle::QUESTION_MAGIC;

use super::{Connection, Core, socket};

/// Bytes of a multifd channel's first packet up to its number, after magic, version and UUID.
const CHANNEL_NUMBER: usize = 24;

/// Kind of a migration's connection, from its first bytes.
#[derive(Debug, Clone, Copy, PartialEq, Eq, Hash, PartialOrd, Ord)]
pub enum Socket {
    /// The main channel.
    Main,
    /// A multifd channel, with its number.
    Channel(u8),
    /// A query of a migration's outcome, without migration data.
    Question,
}

impl Socket {
    /// Returns the kind of a connection that begins with `first`; `None` if that takes more bytes.
    #[must_use]
    pub fn of(first: &[u8]) -> Option<Self> {
        match first.first_chunk::<4>()? {
            b"QEVM" => Some(Self::Main),
            &QUESTION_MAGIC => Some(Self::Question),
            _ => first.get(CHANNEL_NUMBER).copied().map(Self::Channel),
        }
    }

    /// With this many bytes [`Socket::of`] never returns `None`.
    pub(super) const KNOWN_BY: usize = CHANNEL_NUMBER + 1;
}

/// Decides about the bytes of all connections of a proxy. Called by the thread of each direction.
pub trait Rule: Send + Sync + 'static {
    /// State of one direction of one connection.
    type Direction: Default;

    /// Handles `came`, the received bytes neither passed nor dropped yet. Remaining bytes come again with the next ones, and
    /// pass at the end of the direction.
    ///
    /// # Errors
    /// The reason why nothing more of this direction passes.
    fn apply(
        &self,
        direction: &mut Self::Direction,
        came: &mut Vec<u8>,
        flow: &Flow<'_>,
    ) -> Result<(), Stop>;
}

/// Reason why nothing more of a direction passes.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub enum Stop {
    /// The connection ends, in order, in both directions.
    Cut,
    /// This direction ends. Later bytes are read and dropped, so that only its reader notices.
    HalfCut,
    /// Its reader is gone.
    Gone,
    /// The proxy has ended the connection.
    Ended,
}

/// One direction of one connection.
#[derive(Clone, Copy)]
pub struct Flow<'a> {
    pub(super) core: &'a Core,
    pub(super) connection: &'a Connection,
    pub(super) back: bool,
}

impl Flow<'_> {
    /// Returns true if the direction is from the server to the client.
    #[must_use]
    pub fn is_back(&self) -> bool {
        self.back
    }

    /// Returns the kind of the connection, once its first bytes have arrived.
    #[must_use]
    pub fn socket(&self) -> Option<Socket> {
        self.connection.socket.get().copied()
    }

    /// Writes `bytes` to the reader of this direction.
    ///
    /// # Errors
    /// If the reader is gone, or the proxy ends the connection here.
    pub fn pass(&self, bytes: &[u8]) -> Result<(), Stop> {
        let allowed = match self.back {
            true => self.core.count(bytes.len()),
            false => bytes.len(),
        };
        let (_, to) = self.connection.sockets(self.back);
        let written = socket::write_all(to, &bytes[..allowed]);
        if self.core.is_due() || allowed < bytes.len() {
            return Err(Stop::Ended);
        }
        written.then_some(()).ok_or(Stop::Gone)
    }

    /// Passes all of `came`.
    ///
    /// # Errors
    /// As for [`Flow::pass`].
    pub fn pass_all(&self, came: &mut Vec<u8>) -> Result<(), Stop> {
        self.pass(came)?;
        came.clear();
        Ok(())
    }

    /// Waits until [`Proxy::release`](super::Proxy::release), or the end of the proxy.
    pub fn hold(&self) {
        self.core.hold();
    }
}

/// Passes everything on arrival.
#[derive(Debug, Clone, Copy, Default)]
pub struct AsTheyCome;

impl Rule for AsTheyCome {
    type Direction = ();

    fn apply(&self, (): &mut (), came: &mut Vec<u8>, flow: &Flow<'_>) -> Result<(), Stop> {
        flow.pass_all(came)
    }
}

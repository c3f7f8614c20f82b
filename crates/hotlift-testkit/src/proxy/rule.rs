//! Rules of a proxy: they decide which bytes pass.

use hotlift_wire::settle::QUESTION_MAGIC;

use super::{Connection, Core, socket};

/// Offset of the channel number in a multifd channel's first packet, after magic, version and UUID.
const CHANNEL_NUMBER: usize = 24;

/// Kind of a connection of a migration, identified by its first bytes.
#[derive(Debug, Clone, Copy, PartialEq, Eq, Hash, PartialOrd, Ord)]
pub enum Socket {
    /// The main channel.
    Main,
    /// A multifd channel, with the channel number.
    Channel(u8),
    /// A source's query of a migration's outcome, without pages.
    Question,
}

impl Socket {
    /// Returns the kind of a connection that begins with `first`; `None` if more bytes are needed.
    #[must_use]
    pub fn of(first: &[u8]) -> Option<Self> {
        match first.first_chunk::<4>()? {
            b"QEVM" => Some(Self::Main),
            &QUESTION_MAGIC => Some(Self::Question),
            _ => first.get(CHANNEL_NUMBER).copied().map(Self::Channel),
        }
    }

    /// Number of bytes with which [`Socket::of`] never returns `None`.
    pub(super) const KNOWN_BY: usize = CHANNEL_NUMBER + 1;
}

/// Decides which bytes of a proxy's connections pass. Each direction of a connection calls the rule from its own
/// thread.
pub trait Rule: Send + Sync + 'static {
    /// State of the rule for one direction of one connection.
    type Direction: Default;

    /// Handles `came`: received bytes that were neither passed nor dropped yet. The rule removes bytes from `came`.
    /// Remaining bytes are handled again when more arrive, and pass at the end of the direction.
    ///
    /// # Errors
    /// The reason why no more bytes of this direction pass.
    fn apply(
        &self,
        direction: &mut Self::Direction,
        came: &mut Vec<u8>,
        flow: &Flow<'_>,
    ) -> Result<(), Stop>;
}

/// Reason why no more bytes of a direction pass.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub enum Stop {
    /// Both directions of the connection end by FIN.
    Cut,
    /// This direction ends. Later bytes are read and dropped, so only the reader of this direction notices.
    HalfCut,
    /// The reader of this direction has closed the connection.
    Gone,
    /// The proxy has ended the connection.
    Ended,
}

/// One direction of one connection, to which a rule writes.
#[derive(Clone, Copy)]
pub struct Flow<'a> {
    pub(super) core: &'a Core,
    pub(super) connection: &'a Connection,
    pub(super) back: bool,
}

impl Flow<'_> {
    /// Returns true for the direction from the server to the client.
    #[must_use]
    pub fn is_back(&self) -> bool {
        self.back
    }

    /// Returns the kind of the connection; `None` until its first bytes identify it.
    #[must_use]
    pub fn socket(&self) -> Option<Socket> {
        self.connection.socket.get().copied()
    }

    /// Writes `bytes` to the reader of this direction.
    ///
    /// # Errors
    /// If the reader has closed the connection, or the proxy ends the connection here.
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

    /// Writes all bytes of `came` to the reader of this direction, and clears `came`.
    ///
    /// # Errors
    /// As for [`Flow::pass`].
    pub fn pass_all(&self, came: &mut Vec<u8>) -> Result<(), Stop> {
        self.pass(came)?;
        came.clear();
        Ok(())
    }

    /// Waits until [`Proxy::release`](super::Proxy::release) is called, or the proxy ends.
    pub fn hold(&self) {
        self.core.hold();
    }
}

/// Rule that passes all bytes unchanged as they arrive.
#[derive(Debug, Clone, Copy, Default)]
pub struct AsTheyCome;

impl Rule for AsTheyCome {
    type Direction = ();

    fn apply(&self, (): &mut (), came: &mut Vec<u8>, flow: &Flow<'_>) -> Result<(), Stop> {
        flow.pass_all(came)
    }
}

//! What becomes of the bytes that a proxy carries.

use hotlift_wire::settle::QUESTION_MAGIC;

use super::{Connection, Core, socket};

/// Bytes of a multifd channel's first packet up to its number, which follows magic, version and UUID.
const CHANNEL_NUMBER: usize = 24;

/// What a connection of a migration is, by its first bytes.
#[derive(Debug, Clone, Copy, PartialEq, Eq, Hash, PartialOrd, Ord)]
pub enum Socket {
    /// The main channel.
    Main,
    /// A multifd channel, with its number.
    Channel(u8),
    /// It asks what became of a migration, and carries none.
    Question,
}

impl Socket {
    /// What a connection is that begins with `first`; `None` if that takes more bytes.
    #[must_use]
    pub fn of(first: &[u8]) -> Option<Self> {
        match first.first_chunk::<4>()? {
            b"QEVM" => Some(Self::Main),
            &QUESTION_MAGIC => Some(Self::Question),
            _ => first.get(CHANNEL_NUMBER).copied().map(Self::Channel),
        }
    }

    /// [`Socket::of`] is never `None` of so many bytes.
    pub(super) const KNOWN_BY: usize = CHANNEL_NUMBER + 1;
}

/// Decides what becomes of the bytes of all connections of a proxy. Called by the thread of each direction.
pub trait Rule: Send + Sync + 'static {
    /// What is remembered of one direction of one connection.
    type Direction: Default;

    /// `came` is what has come and was neither passed nor dropped yet. What is left in it comes again, with what follows
    /// it, and passes at the end of the direction.
    ///
    /// # Errors
    /// Why nothing more of this direction passes.
    fn apply(
        &self,
        direction: &mut Self::Direction,
        came: &mut Vec<u8>,
        flow: &Flow<'_>,
    ) -> Result<(), Stop>;
}

/// Why nothing more of a direction passes.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub enum Stop {
    /// The connection ends, in order, both ways.
    Cut,
    /// This direction ends. What still comes is read and dropped, so that only its reader notices.
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
    /// From the one that was connected to, to the one that connected.
    #[must_use]
    pub fn is_back(&self) -> bool {
        self.back
    }

    /// What the connection is, once its first bytes have come.
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

    /// Passes everything in `came`.
    ///
    /// # Errors
    /// As [`Flow::pass`].
    pub fn pass_all(&self, came: &mut Vec<u8>) -> Result<(), Stop> {
        self.pass(came)?;
        came.clear();
        Ok(())
    }

    /// Stands still until [`Proxy::release`](super::Proxy::release), or the end of the proxy.
    pub fn hold(&self) {
        self.core.hold();
    }
}

/// Everything passes as it comes.
#[derive(Debug, Clone, Copy, Default)]
pub struct AsTheyCome;

impl Rule for AsTheyCome {
    type Direction = ();

    fn apply(&self, (): &mut (), came: &mut Vec<u8>, flow: &Flow<'_>) -> Result<(), Stop> {
        flow.pass_all(came)
    }
}

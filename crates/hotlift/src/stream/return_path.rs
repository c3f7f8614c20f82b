//! The return path that is read: the destination's messages, as they come.

use hotlift_wire::return_path::ReturnMessage;
use hotlift_wire::{WireError, limits};

use crate::error::{Channel, MigrationError};
use crate::transport::Stream;

/// The messages of one connection.
#[derive(Debug)]
pub(crate) struct Messages {
    channel: Channel,
    /// Bytes of a message that is not complete.
    pending: Vec<u8>,
}

impl Messages {
    pub(crate) fn new(channel: Channel) -> Self {
        Self {
            channel,
            pending: Vec::with_capacity(2 * limits::RETURN_PATH_PAYLOAD),
        }
    }

    /// Waits for bytes, and hands every message that is complete to `each`, with its bytes; false at the end of the
    /// connection.
    ///
    /// # Errors
    /// [`MigrationError::Connection`], and [`MigrationError::Wire`] for what is no message: nothing more can be read
    /// then.
    pub(crate) fn read(
        &mut self,
        stream: &Stream,
        mut each: impl FnMut(ReturnMessage<'_>, &[u8]),
    ) -> Result<bool, MigrationError> {
        let mut here = [0; limits::RETURN_PATH_PAYLOAD];
        let read = stream
            .read_some(&mut here)
            .map_err(|source| MigrationError::Connection {
                channel: self.channel,
                doing: "listening to the destination",
                source,
            })?;
        self.pending.extend_from_slice(&here[..read]);
        let mut taken = 0;
        loop {
            match ReturnMessage::decode(&self.pending[taken..]) {
                Ok((message, length)) => {
                    each(message, &self.pending[taken..taken + length]);
                    taken += length;
                }
                Err(WireError::Truncated { .. }) => break,
                Err(source) => {
                    return Err(MigrationError::Wire {
                        channel: self.channel,
                        source,
                    });
                }
            }
        }
        self.pending.drain(..taken);
        Ok(read > 0)
    }
}

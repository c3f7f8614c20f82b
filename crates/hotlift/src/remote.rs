//! The other side of a connection that this side makes.

use std::sync::Arc;
use std::time::Duration;

use crate::error::MigrationError;
use crate::life::Life;
use crate::tls::Tls;
use crate::transport::{Address, Stream};

/// Where the other side listens, and how it is spoken to.
#[derive(Debug, Clone)]
pub(crate) struct Remote {
    address: Address,
    tls: Option<Arc<Tls>>,
}

impl Remote {
    pub(crate) fn new(address: &Address, tls: Option<Arc<Tls>>) -> Self {
        Self {
            address: address.clone(),
            tls,
        }
    }

    /// A connection, unless `life` is cancelled meanwhile.
    pub(crate) fn connect_for(
        &self,
        life: &Life,
        timeout: Duration,
    ) -> Result<Stream, MigrationError> {
        self.connect_unless(timeout, &|| life.is_cancelled())
    }

    /// The same, unless it is `stopped` meanwhile.
    pub(crate) fn connect_unless(
        &self,
        timeout: Duration,
        stopped: &dyn Fn() -> bool,
    ) -> Result<Stream, MigrationError> {
        let connected = self.address.connect_unless(timeout, stopped);
        let secured = connected
            .map_err(MigrationError::from)
            .and_then(|stream| self.secure(stream, timeout, stopped));
        match stopped() {
            true => Err(MigrationError::Cancelled),
            false => secured,
        }
    }

    /// A connection that nobody cancels; it is there, or has failed, within twice this time.
    pub(crate) fn connect(&self, timeout: Duration) -> Result<Stream, MigrationError> {
        let stream = self.address.connect(timeout)?;
        self.secure(stream, timeout, &|| false)
    }

    fn secure(
        &self,
        stream: Stream,
        timeout: Duration,
        stopped: &dyn Fn() -> bool,
    ) -> Result<Stream, MigrationError> {
        let host = Some(self.address.host());
        match &self.tls {
            Some(tls) => {
                let peer = stream.peer_host();
                let secured = stream.secure_unless(&tls.within(timeout), host, stopped);
                secured.map_err(|source| MigrationError::Tls {
                    host: peer,
                    source: Box::new(source),
                })
            }
            None => Ok(stream),
        }
    }
}

//! Peer of a connection that this side makes.

use std::sync::{Arc, Mutex};
use std::time::{Duration, Instant};

use hotlift_net::transport::{Address, Stop, Stream};

use crate::error::MigrationError;
use crate::life::Life;
use crate::life::wake_fd::WakeFd;
use crate::lock::lock;
use crate::tls::Tls;

/// Time limit for each address of the other host to accept a connection. A host that is up answers within a round trip; three
/// lost SYN packets are sent again in this time.
const CONNECT: Duration = Duration::from_secs(10);

/// Connection attempt in progress, for display; clones share it.
#[derive(Debug, Clone, Default)]
pub(crate) struct Connecting(Arc<Mutex<Option<(Address, Instant)>>>);

impl Connecting {
    /// Returns the address of the attempt, and its duration so far.
    pub(crate) fn address(&self) -> Option<(Address, Duration)> {
        let connecting = lock(&self.0);
        let (address, since) = connecting.as_ref()?;
        Some((address.clone(), since.elapsed()))
    }

    fn set(&self, address: Option<&Address>) {
        *lock(&self.0) = address.map(|address| (address.clone(), Instant::now()));
    }
}

/// Lifetime and display of the connections that a migration makes.
#[derive(Debug, Clone, Default)]
pub(crate) struct Dialing {
    pub life: Life,
    pub connecting: Connecting,
}

/// Address of the peer, and the TLS settings for it.
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

    /// Connects, unless the migration is cancelled; `dialing` shows the attempt until its end. `timeout` limits the TLS
    /// handshake.
    pub(crate) fn connect_for(
        &self,
        dialing: &Dialing,
        timeout: Duration,
    ) -> Result<Stream, MigrationError> {
        dialing.connecting.set(Some(&self.address));
        let times = (timeout.min(CONNECT), timeout);
        let wake_fd = WakeFd::new(&dialing.life).map_err(MigrationError::opening)?;
        let cancelled = || dialing.life.is_cancelled();
        let connected = self.connect_within(times, wake_fd.stop(&cancelled));
        dialing.connecting.set(None);
        connected
    }

    /// Connects, unless `stop` ends the attempt.
    pub(crate) fn connect_unless(
        &self,
        timeout: Duration,
        stop: Stop<'_>,
    ) -> Result<Stream, MigrationError> {
        self.connect_within((timeout, timeout), stop)
    }

    fn connect_within(
        &self,
        (accepting, handshake): (Duration, Duration),
        stop: Stop<'_>,
    ) -> Result<Stream, MigrationError> {
        let connected = self.address.connect_unless(accepting, stop);
        let secured = connected
            .map_err(MigrationError::from)
            .and_then(|stream| self.secure(stream, handshake, stop));
        match stop.is_stopped() {
            true => Err(MigrationError::Cancelled),
            false => secured,
        }
    }

    /// Connects without a cancel; ends within twice `timeout`.
    pub(crate) fn connect(&self, timeout: Duration) -> Result<Stream, MigrationError> {
        let stream = self.address.connect(timeout)?;
        self.secure(stream, timeout, Stop::NEVER)
    }

    fn secure(
        &self,
        stream: Stream,
        timeout: Duration,
        stop: Stop<'_>,
    ) -> Result<Stream, MigrationError> {
        let host = Some(self.address.host());
        match &self.tls {
            Some(tls) => {
                let peer = stream.peer_host();
                let secured = stream.secure_unless(&tls.within(timeout), host, stop);
                secured.map_err(|source| MigrationError::Tls {
                    host: peer,
                    source: Box::new(source),
                })
            }
            None => Ok(stream),
        }
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn an_unaccepted_connection_is_shown_until_cancelled() {
        // A listener whose queue is full answers no SYN.
        let family = rustix::net::AddressFamily::INET;
        let full = rustix::net::socket(family, rustix::net::SocketType::STREAM, None).unwrap();
        rustix::net::bind(&full, &std::net::SocketAddr::from(([127, 0, 0, 1], 0))).unwrap();
        rustix::net::listen(&full, 0).unwrap();
        let full = std::net::TcpListener::from(full);
        let port = full.local_addr().unwrap().port();
        let _only = std::net::TcpStream::connect(("127.0.0.1", port)).unwrap();
        let address: Address = format!("tcp:127.0.0.1:{port}").parse().unwrap();
        let remote = Remote::new(&address, None);
        let dialing = Dialing::default();
        assert_eq!(dialing.connecting.address(), None);
        std::thread::scope(|scope| {
            let connecting = scope.spawn(|| remote.connect_for(&dialing, CONNECT));
            while dialing.connecting.address().is_none() {
                assert!(!connecting.is_finished(), "it was never shown");
                std::thread::yield_now();
            }
            let shown = dialing.connecting.address().map(|(to, _)| to);
            assert_eq!(shown, Some(address));
            dialing.life.cancel();
            let error = connecting.join().unwrap().unwrap_err();
            assert!(matches!(error, MigrationError::Cancelled), "{error}");
        });
        assert_eq!(dialing.connecting.address(), None);
    }
}

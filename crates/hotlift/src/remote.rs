//! Connects to a peer by address, with or without TLS.

use std::sync::{Arc, Mutex};
use std::time::{Duration, Instant};

use hotlift_net::transport::{Address, Stop, Stream};

use crate::error::MigrationError;
use crate::life::Life;
use crate::life::wake_fd::WakeFd;
use crate::lock::lock;
use crate::tls::Tls;

/// Time limit for a host to accept a connection, per address of the host. A host that is up accepts within a round trip. In
/// this time, SYN packets are sent again up to three times.
const CONNECT: Duration = Duration::from_secs(10);

/// Connection attempt in progress, for progress reports. All clones share the same state.
#[derive(Debug, Clone, Default)]
pub(crate) struct Connecting(Arc<Mutex<Option<(Address, Instant)>>>);

impl Connecting {
    /// Returns the address of the current attempt, and its duration so far. Returns `None` if no attempt is in progress.
    pub(crate) fn address(&self) -> Option<(Address, Duration)> {
        let connecting = lock(&self.0);
        let (address, since) = connecting.as_ref()?;
        Some((address.clone(), since.elapsed()))
    }

    fn set(&self, address: Option<&Address>) {
        *lock(&self.0) = address.map(|address| (address.clone(), Instant::now()));
    }
}

/// Lifetime of a migration, and its current connection attempt.
#[derive(Debug, Clone, Default)]
pub(crate) struct Dialing {
    pub life: Life,
    pub connecting: Connecting,
}

/// A peer to connect to: its address, and the TLS settings for this address.
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

    /// Connects to the peer. A cancel of the migration ends the attempt. During the attempt, `dialing` has its address.
    /// `timeout` limits the TLS handshake.
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

    /// Connects to the peer. The stop condition `stop` can end the attempt.
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

    /// Connects to the peer. The attempt cannot be cancelled, and ends within twice `timeout`.
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
        // A listener whose queue is full does not answer a SYN.
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

//! Byte streams between two hosts, addressed by QEMU's migration URIs. Each transport has one file.
//!
//! A migration opens N + 1 connections to one address: the main channel and N multifd channels. All are blocking sockets. A
//! cancel or a failure calls [`Stream::shutdown`], which wakes a thread that is blocked in the socket.

mod attempts;
mod carry;
mod secured;
mod tcp;
mod unix;

use std::io::{self, Read, Write};
use std::net::{IpAddr, Ipv6Addr, Shutdown, TcpStream};
use std::os::fd::{AsFd, BorrowedFd};
use std::os::unix::net::UnixStream;
use std::time::{Duration, Instant};

use hotlift_mem::GuestRun;
use hotlift_mem::poll_until;
use hotlift_mem::sock::{self, IoScratch, TcpSending};
use hotlift_tls::{Exporter, Identity, Tls, TlsError};
use rustix::event::{PollFd, PollFlags, Timespec};
use rustix::net::sockopt::socket_peercred;

pub use carry::carry;
pub use tcp::MAX_UNSENT;
pub(crate) use tcp::listen as listen_tcp;
pub use unix::UnixSocketFile;
pub(crate) use unix::listen as listen_unix;

use secured::{PacketPlaintext, Secured};

/// Error of an address or of a connection.
#[derive(Debug, thiserror::Error)]
pub enum TransportError {
    /// The scheme before the first colon is unknown, or cannot carry multifd channels.
    #[error("unknown migration protocol in '{uri}'; expected {known}")]
    UnknownScheme {
        /// The URI as given.
        uri: String,
        /// The known forms of a URI.
        known: String,
    },
    /// The part after the scheme is invalid.
    #[error("invalid address '{address}'; expected {expected}")]
    BadAddress {
        /// The part after the scheme.
        address: String,
        /// The expected form.
        expected: &'static str,
    },
    /// A link-local address without its network interface.
    #[error(
        "'{host}' is a link-local address, which needs an interface; add it, as in tcp:[{host}%eth0]:PORT"
    )]
    NoZone {
        /// The address.
        host: String,
    },
    /// Port 0 in the address of a peer, on which no process can listen.
    #[error("cannot connect to port 0 ('{uri}'); give the port on which the peer listens")]
    NoPort {
        /// The URI as given.
        uri: String,
    },
    /// The connection could not be opened.
    #[error("cannot connect to '{uri}'")]
    Connect {
        /// The URI as given.
        uri: String,
        /// The system's error.
        #[source]
        source: io::Error,
    },
    /// The address could not be listened on.
    #[error("cannot listen on '{uri}'")]
    Listen {
        /// The URI as given.
        uri: String,
        /// The system's error.
        #[source]
        source: io::Error,
    },
}

/// A kind of address: its scheme, form and parser.
trait Transport: Sync {
    /// Scheme of the URI, without the colon.
    fn scheme(&self) -> &'static str;
    /// Form of the addresses, for messages.
    fn form(&self) -> &'static str;
    /// Returns a description of a valid address, for errors.
    fn expected(&self) -> &'static str {
        self.form()
    }
    /// Parses the part of a URI after the scheme; `None` if it is invalid.
    fn parse(&self, rest: &str) -> Option<Address>;
}

/// All transports.
static TRANSPORTS: &[&dyn Transport] = &[&tcp::Tcp, &unix::Unix];

/// A parsed migration URI.
#[derive(Debug, Clone, PartialEq, Eq)]
pub enum Address {
    /// `tcp:HOST:PORT`. HOST is a name or an address; empty for all addresses of this host. IPv6 addresses are in brackets.
    Tcp {
        /// Name or address; empty for all addresses of this host.
        host: String,
        /// Port. If it is 0, the system chooses one when listening.
        port: u16,
    },
    /// `unix:PATH`.
    Unix {
        /// Path of the socket.
        path: std::path::PathBuf,
    },
}

impl std::str::FromStr for Address {
    type Err = TransportError;

    fn from_str(uri: &str) -> Result<Self, TransportError> {
        let known = || {
            TRANSPORTS
                .iter()
                .map(|transport| transport.form())
                .collect::<Vec<_>>()
                .join(" or ")
        };
        let unknown = || TransportError::UnknownScheme {
            uri: uri.to_owned(),
            known: known(),
        };
        let (scheme, rest) = uri.split_once(':').ok_or_else(unknown)?;
        let transport = TRANSPORTS
            .iter()
            .find(|transport| transport.scheme() == scheme)
            .ok_or_else(unknown)?;
        let address = transport
            .parse(rest)
            .ok_or_else(|| TransportError::BadAddress {
                address: rest.to_owned(),
                expected: transport.expected(),
            })?;
        match address {
            Self::Tcp { host, .. } if is_link_local(&host) => Err(TransportError::NoZone { host }),
            address => Ok(address),
        }
    }
}

impl std::fmt::Display for Address {
    fn fmt(&self, f: &mut std::fmt::Formatter<'_>) -> std::fmt::Result {
        match self {
            Self::Tcp { host, port } if host.contains(':') => write!(f, "tcp:[{host}]:{port}"),
            Self::Tcp { host, port } => write!(f, "tcp:{host}:{port}"),
            Self::Unix { path } => write!(f, "unix:{}", path.display()),
        }
    }
}

impl Address {
    /// Parses the address of a peer to connect to.
    ///
    /// # Errors
    /// As [`str::parse`]; [`TransportError::NoPort`] for port 0.
    pub fn of_peer(uri: &str) -> Result<Self, TransportError> {
        match uri.parse()? {
            Self::Tcp { port: 0, .. } => Err(TransportError::NoPort {
                uri: uri.to_owned(),
            }),
            address => Ok(address),
        }
    }

    /// Returns the address of all interfaces of this host, with port 0: the system chooses the port.
    #[must_use]
    pub fn any() -> Self {
        Self::Tcp {
            host: String::new(),
            port: 0,
        }
    }

    /// Returns the host name or IP address; "localhost" for a UNIX socket or an empty host name.
    #[must_use]
    pub fn host(&self) -> &str {
        match self {
            Self::Tcp { host, .. } if !host.is_empty() => host,
            Self::Tcp { .. } | Self::Unix { .. } => "localhost",
        }
    }

    /// Returns true if the address is on this host: a UNIX socket, or a loopback address or name.
    #[must_use]
    pub fn is_on_this_host(&self) -> bool {
        match self {
            Self::Unix { .. } => true,
            Self::Tcp { host, .. } => is_this_host(host),
        }
    }

    /// Connects to the first address of the host that accepts. Each attempt may take `timeout`. Attempts begin 250 ms after
    /// each other, or at once after a failure (RFC 8305).
    ///
    /// # Errors
    /// [`TransportError::Connect`] with the system's error of each address.
    pub fn connect(&self, timeout: Duration) -> Result<Stream, TransportError> {
        self.connect_unless(timeout, Stop::NEVER)
    }

    /// Connects as [`Self::connect`] does, until `stop` interrupts it. The system's resolver cannot be interrupted.
    ///
    /// # Errors
    /// As [`Self::connect`]; `Interrupted` after an interruption.
    pub fn connect_unless(
        &self,
        timeout: Duration,
        stop: Stop<'_>,
    ) -> Result<Stream, TransportError> {
        let connected = match self {
            Self::Tcp { host, port } => tcp::connect(host, *port, timeout, stop),
            Self::Unix { path } => unix::connect(path, timeout, stop),
        };
        connected.map_err(|source| TransportError::Connect {
            uri: self.to_string(),
            source,
        })
    }
}

/// Returns true if `host` is an IPv6 link-local address. Such an address identifies a host only together with an interface.
fn is_link_local(host: &str) -> bool {
    host.parse::<Ipv6Addr>()
        .is_ok_and(|address| address.is_unicast_link_local())
}

/// Returns true if `host` is a loopback address, or a name such as "localhost".
fn is_this_host(host: &str) -> bool {
    match host.parse::<IpAddr>() {
        Ok(address) => address.to_canonical().is_loopback(),
        // RFC 6761, section 6.3.
        Err(_) => host == "localhost" || host.ends_with(".localhost"),
    }
}

/// Condition that interrupts a wait or a connection attempt.
#[derive(Clone, Copy)]
pub struct Stop<'a> {
    /// Descriptor that is readable when `when` may have become true; `None` if none exists.
    pub wake_fd: Option<BorrowedFd<'a>>,
    /// Returns true when the wait must end.
    pub when: &'a dyn Fn() -> bool,
}

impl<'a> Stop<'a> {
    /// A condition that never interrupts.
    pub const NEVER: Self = Self {
        wake_fd: None,
        when: &|| false,
    };

    /// Returns true when the wait must end.
    pub fn is_stopped(&self) -> bool {
        // The descriptor is emptied before the check, so that the check sees the cause of every earlier wake-up.
        let _ = self
            .wake_fd
            .map(|wake_fd| rustix::io::read(wake_fd, &mut [0; 8]));
        (self.when)()
    }

    /// Waits for an event on `fds` or on the wake descriptor, up to `wait`. Fails if the condition is true at the start.
    fn poll<'f>(&'f self, fds: &mut Vec<PollFd<'f>>, wait: Duration) -> io::Result<()> {
        if self.is_stopped() {
            let why = "it was cancelled";
            return Err(io::Error::new(io::ErrorKind::Interrupted, why));
        }
        let wake_fd = self.wake_fd.as_ref();
        fds.extend(wake_fd.map(|wake_fd| PollFd::new(wake_fd, PollFlags::IN)));
        let wait = Timespec::try_from(wait).map_err(io::Error::other)?;
        match rustix::event::poll(fds, Some(&wait)) {
            Ok(_) | Err(rustix::io::Errno::INTR) => Ok(()),
            Err(errno) => Err(errno.into()),
        }
    }

    /// Waits up to `wait` until `stream` can be read without blocking. Returns false if a read may still block.
    ///
    /// # Errors
    /// The system's error; `Interrupted` if the condition is true.
    pub fn wait_readable(&self, stream: &Stream, wait: Duration) -> io::Result<bool> {
        if stream.has_plaintext() {
            return Ok(true);
        }
        let mut fds = Vec::with_capacity(2);
        fds.push(PollFd::new(stream, PollFlags::IN));
        self.poll(&mut fds, wait)?;
        stream.is_readable(&fds[0])
    }
}

/// Waits until `fd` is readable or closed. Returns false after `timeout`.
///
/// # Errors
/// The system's error.
pub fn wait_readable(fd: BorrowedFd<'_>, timeout: Duration) -> io::Result<bool> {
    wait_for(fd, PollFlags::IN, timeout)
}

/// Waits until one of the events `flags` occurs on `fd`. Returns false after `timeout`.
fn wait_for(fd: BorrowedFd<'_>, flags: PollFlags, timeout: Duration) -> io::Result<bool> {
    let mut fds = [PollFd::new(&fd, flags)];
    // If the sum overflows, the wait has no limit.
    let until = Instant::now().checked_add(timeout);
    Ok(poll_until(&mut fds, until)? > 0)
}

/// A connection. With TLS, its handshake is complete.
#[derive(Debug)]
pub struct Stream {
    socket: Socket,
    tls: Option<Box<Secured>>,
}

/// The host at the other end of a connection, identified by its certificate. All hosts without a certificate count as the same
/// host.
#[derive(Debug, Clone)]
pub struct Host(Option<Identity>);

impl Host {
    /// Returns true if this host is the peer of `stream`.
    pub fn is_at_the_end_of(&self, stream: &Stream) -> bool {
        match (&self.0, stream.peer()) {
            (Some(host), Some(peer)) => host.is_of_the_host_of(peer),
            (None, None) => true,
            _ => false,
        }
    }
}

#[derive(Debug)]
enum Socket {
    Tcp(TcpStream),
    Unix(UnixStream),
}

impl From<TcpStream> for Stream {
    fn from(stream: TcpStream) -> Self {
        Self {
            socket: Socket::Tcp(stream),
            tls: None,
        }
    }
}

impl From<UnixStream> for Stream {
    fn from(stream: UnixStream) -> Self {
        Self {
            socket: Socket::Unix(stream),
            tls: None,
        }
    }
}

impl Stream {
    /// Returns two ends of a connection within this process.
    ///
    /// # Errors
    /// The system's error.
    pub fn pair() -> io::Result<(Self, Self)> {
        UnixStream::pair().map(|(one, other)| (one.into(), other.into()))
    }

    /// Wraps a TCP connection, and sets the same socket options as for connections of this module.
    ///
    /// # Errors
    /// The system's error.
    pub fn of_tcp(stream: TcpStream) -> io::Result<Self> {
        tcp::prepare(&stream)?;
        Ok(stream.into())
    }

    /// Does the client's TLS handshake, before any data is sent. `host` is the name of the peer.
    ///
    /// # Errors
    /// [`TlsError`] with the side at fault and the problem.
    pub fn secure(self, tls: &Tls, host: Option<&str>) -> Result<Self, TlsError> {
        self.secure_unless(tls, host, Stop::NEVER)
    }

    /// Does the client's TLS handshake as [`Self::secure`] does, until `stop` interrupts it.
    ///
    /// # Errors
    /// [`TlsError`] with the side at fault and the problem.
    pub fn secure_unless(
        mut self,
        tls: &Tls,
        host: Option<&str>,
        stop: Stop<'_>,
    ) -> Result<Self, TlsError> {
        let session = tls.connect_unless(&self, host, stop.wake_fd, &|| stop.is_stopped())?;
        self.tls = Some(Box::new(Secured::new(session, tls.profile())));
        Ok(self)
    }

    /// Does the server's TLS handshake on an accepted connection.
    ///
    /// # Errors
    /// [`TlsError`] with the side at fault and the problem.
    pub fn accept_secured(mut self, tls: &Tls) -> Result<Self, TlsError> {
        let session = tls.accept(&self)?;
        self.tls = Some(Box::new(Secured::new(session, tls.profile())));
        Ok(self)
    }

    /// Returns true if the connection does not use TLS. System calls can then move the data directly between sockets and
    /// memory.
    #[must_use]
    pub fn is_plain(&self) -> bool {
        self.tls.is_none()
    }

    /// Returns the identity in the peer's certificate; `None` without a certificate.
    #[must_use]
    pub fn peer(&self) -> Option<&Identity> {
        self.tls.as_ref()?.peer.as_ref()
    }

    /// Returns true if the peer is a QEMU with TLS.
    pub fn is_of_a_qemu(&self) -> bool {
        self.tls.as_ref().is_some_and(|tls| tls.is_of_a_qemu())
    }

    /// Returns the host at the other end.
    pub fn host(&self) -> Host {
        Host(self.peer().cloned())
    }

    /// Returns true if the peers of both connections have the same IP address (TCP) or user (UNIX). Certificates are more
    /// precise, see [`Host`].
    pub fn has_same_peer_host(&self, other: &Self) -> bool {
        let user = |stream| socket_peercred(stream).map(|peer| peer.uid);
        match (&self.socket, &other.socket) {
            (Socket::Unix(one), Socket::Unix(other)) => {
                matches!((user(one), user(other)), (Ok(one), Ok(other)) if one == other)
            }
            (Socket::Tcp(_), Socket::Tcp(_)) => {
                let ip = |stream: &Self| stream.peer_ip().map(|ip| ip.to_canonical());
                ip(self).is_some() && ip(self) == ip(other)
            }
            _ => false,
        }
    }

    /// Returns the IP address of the peer, or text that describes the peer.
    #[must_use]
    pub fn peer_host(&self) -> String {
        match &self.socket {
            Socket::Tcp(stream) => match stream.peer_addr() {
                Ok(peer) => peer.ip().to_canonical().to_string(),
                Err(_) => "a host that is gone".to_owned(),
            },
            Socket::Unix(_) => "this host".to_owned(),
        }
    }

    /// Returns the IP address of this end; `None` for a UNIX socket.
    #[must_use]
    pub fn local_ip(&self) -> Option<IpAddr> {
        match &self.socket {
            Socket::Tcp(stream) => stream.local_addr().ok().map(|local| local.ip()),
            Socket::Unix(_) => None,
        }
    }

    /// Returns the IP address of the other end; `None` for a UNIX socket.
    #[must_use]
    pub fn peer_ip(&self) -> Option<IpAddr> {
        match &self.socket {
            Socket::Tcp(stream) => stream.peer_addr().ok().map(|peer| peer.ip()),
            Socket::Unix(_) => None,
        }
    }

    /// Returns the TLS exporter: keying material that only the two ends of this connection know. `None` without TLS.
    #[must_use]
    pub fn exporter(&self) -> Option<&Exporter> {
        self.tls.as_ref().map(|tls| &tls.exporter)
    }

    /// Shuts down one or both directions. Threads that are blocked in a read or write return.
    pub fn shutdown(&self, how: Shutdown) {
        if let (Some(tls), Shutdown::Write | Shutdown::Both) = (&self.tls, how) {
            tls.close(self);
        }
        // Fails with ENOTCONN if the peer has already closed the connection; then nothing must be done.
        let _ = match &self.socket {
            Socket::Tcp(stream) => stream.shutdown(how),
            Socket::Unix(stream) => stream.shutdown(how),
        };
    }

    /// Shuts down both directions without TLS's `close_notify`, so that the peer sees an error.
    pub fn shut_down_abruptly(&self) {
        let _ = match &self.socket {
            Socket::Tcp(stream) => stream.shutdown(Shutdown::Both),
            Socket::Unix(stream) => stream.shutdown(Shutdown::Both),
        };
    }

    /// Shuts down both directions, and resets the connection on drop. Data that was not sent is discarded.
    ///
    /// After reading is shut down, the kernel no longer enlarges the receive window, even if data is read. A peer that sees a
    /// full window would wait until the kernel forgets the connection (`tcp_fin_timeout`, one minute). The reset ends this
    /// wait.
    pub fn cut(&self) {
        self.reset_on_drop();
        self.shutdown(Shutdown::Both);
    }

    /// Waits until a read does not block. Returns false after `timeout`.
    ///
    /// # Errors
    /// The system's error.
    pub fn wait_readable(&self, timeout: Duration) -> io::Result<bool> {
        let Some(tls) = &self.tls else {
            return wait_readable(self.as_fd(), timeout);
        };
        let begun = Instant::now();
        loop {
            let left = timeout.saturating_sub(begun.elapsed());
            match tls.answers_at_once(self) {
                Some(true) => return Ok(true),
                Some(false) if left.is_zero() => return Ok(false),
                Some(false) if wait_readable(self.as_fd(), left)? => {}
                Some(false) => return Ok(false),
                None => return wait_readable(self.as_fd(), left),
            }
        }
    }

    /// Returns true if a read does not block, after a poll with the result `polled`. With TLS a readable socket does not
    /// suffice: it may contain only a part of a TLS record.
    ///
    /// # Errors
    /// The system's error.
    pub fn is_readable(&self, polled: &PollFd<'_>) -> io::Result<bool> {
        Ok(!polled.revents().is_empty()
            && (self.is_plain() || self.wait_readable(Duration::ZERO)?))
    }

    /// Returns true if some pages can be written without blocking: most of the send buffer is free.
    pub fn is_writable(&self) -> bool {
        // If the connection is broken, the following write returns the error.
        wait_for(self.as_fd(), PollFlags::OUT, Duration::ZERO).unwrap_or(true)
    }

    /// Reads available bytes into `buffer`. Waits up to `timeout` for the first byte. Returns 0 at the end of the stream.
    ///
    /// # Errors
    /// The system's error; `TimedOut` after `timeout`.
    pub fn read_within(&self, buffer: &mut [u8], timeout: Duration) -> io::Result<usize> {
        match self.wait_readable(timeout)? {
            true => self.read_some(buffer),
            false => Err(io::ErrorKind::TimedOut.into()),
        }
    }

    /// Returns true if decrypted data is buffered in this process, which a poll of the socket does not report.
    #[must_use]
    pub fn has_plaintext(&self) -> bool {
        self.tls.as_ref().is_some_and(|tls| tls.has_plaintext())
    }

    /// Sends the slices in order.
    ///
    /// # Errors
    /// The system's error.
    pub fn send_parts(&self, slices: &[&[u8]], scratch: &mut IoScratch) -> io::Result<()> {
        match &self.tls {
            Some(tls) => tls.send(&self.socket, &mut secured::parts(slices)),
            None => sock::send_parts(self.as_fd(), slices, scratch),
        }
    }

    /// Sends `head`, then guest memory.
    ///
    /// # Errors
    /// The system's error.
    pub fn send_guest_memory(
        &self,
        head: &[u8],
        runs: &[GuestRun<'_>],
        scratch: &mut IoScratch,
    ) -> io::Result<()> {
        match &self.tls {
            Some(tls) => tls.send(&self.socket, &mut PacketPlaintext::new(head, runs)),
            None => sock::send(self.as_fd(), head, runs, scratch),
        }
    }

    /// Reads from the stream into guest memory until all `runs` are full.
    ///
    /// # Errors
    /// The system's error; `UnexpectedEof` if the stream ends first.
    pub fn read_pages(&self, runs: &[GuestRun<'_>], scratch: &mut IoScratch) -> io::Result<()> {
        match &self.tls {
            Some(tls) => tls.read_pages(self, runs),
            None => sock::recv(self.as_fd(), runs, scratch),
        }
    }

    /// Returns the kernel's state of the send direction; `None` for a UNIX socket.
    pub fn tcp_sending(&self) -> Option<TcpSending> {
        match &self.socket {
            Socket::Tcp(stream) => TcpSending::of(stream.as_fd()).ok(),
            Socket::Unix(_) => None,
        }
    }

    /// Returns the number of written bytes that the peer has not acknowledged; `None` for a UNIX socket.
    pub fn unacknowledged(&self) -> Option<u32> {
        match &self.socket {
            Socket::Tcp(stream) => sock::unacknowledged(stream.as_fd()).ok(),
            Socket::Unix(_) => None,
        }
    }

    /// Returns true if all written bytes were read by the peer (UNIX), or received by its kernel (TCP).
    pub fn is_delivered(&self) -> bool {
        !sock::unacknowledged(self.as_fd()).is_ok_and(|bytes| bytes > 0)
    }

    /// Returns true if the peer has closed the connection. Data that the peer sent before may still be unread.
    pub fn is_hung_up(&self) -> bool {
        matches!(
            wait_for(self.as_fd(), PollFlags::RDHUP, Duration::ZERO),
            Ok(true)
        )
    }

    /// Makes a drop reset the connection. The peer notices this immediately, even if buffers contain data.
    pub fn reset_on_drop(&self) {
        // A UNIX socket has no such option, and needs none: its peer notices every close.
        if let Socket::Tcp(stream) = &self.socket {
            let _ = rustix::net::sockopt::set_socket_linger(stream, Some(Duration::ZERO));
        }
    }

    /// Returns true if the peer has reset the connection. A part of its data may be lost.
    pub fn is_reset(&self) -> bool {
        let mut fds = [PollFd::new(self, PollFlags::empty())];
        matches!(
            rustix::event::poll(&mut fds, Some(&Timespec::default())),
            Ok(1..)
        ) && fds[0].revents().contains(PollFlags::ERR)
    }

    /// Sets the maximum time for which a write may wait until the peer reads.
    ///
    /// # Errors
    /// The system's error.
    pub fn set_write_timeout(&self, timeout: Duration) -> io::Result<()> {
        match &self.socket {
            Socket::Tcp(stream) => stream.set_write_timeout(Some(timeout)),
            Socket::Unix(stream) => stream.set_write_timeout(Some(timeout)),
        }
    }

    /// Removes the timeout of writes, as in a new connection.
    ///
    /// # Errors
    /// The system's error.
    pub fn lift_write_timeout(&self) -> io::Result<()> {
        match &self.socket {
            Socket::Tcp(stream) => stream.set_write_timeout(None),
            Socket::Unix(stream) => stream.set_write_timeout(None),
        }
    }

    /// Makes the kernel end the connection if the peer does not acknowledge data for 30 s, even after a power failure of the
    /// peer. For connections with little data, which the peer reads immediately.
    pub fn notice_loss(&self) {
        if let Socket::Tcp(stream) = &self.socket {
            tcp::notice_loss(stream);
        }
    }

    /// Sets the time without any sign of the peer after which the kernel's keepalive ends the connection. Zero means never.
    pub fn set_silence_limit(&self, limit: Duration) {
        if let Socket::Tcp(stream) = &self.socket {
            // If the kernel refuses, the settings do not change.
            let _ = tcp::set_silence_limit(stream, limit);
        }
    }

    /// Sets the maximum time for which a read may wait.
    ///
    /// # Errors
    /// The system's error.
    pub fn set_read_timeout(&self, timeout: Duration) -> io::Result<()> {
        match &self.socket {
            Socket::Tcp(stream) => stream.set_read_timeout(Some(timeout)),
            Socket::Unix(stream) => stream.set_read_timeout(Some(timeout)),
        }
    }

    /// Sets the maximum time for which a read or a write may wait.
    ///
    /// # Errors
    /// The system's error.
    pub fn set_timeouts(&self, timeout: Duration) -> io::Result<()> {
        self.set_read_timeout(timeout)?;
        self.set_write_timeout(timeout)
    }

    /// Reads available bytes into `buffer`. Waits without a limit for the first byte. Returns 0 at the end of the stream.
    ///
    /// # Errors
    /// The system's error.
    pub fn read_some(&self, buffer: &mut [u8]) -> io::Result<usize> {
        let mut stream = self;
        loop {
            match stream.read(buffer) {
                Err(error) if error.kind() == io::ErrorKind::Interrupted => {}
                result => return result,
            }
        }
    }

    /// Peeks at the first bytes without waiting. Returns their number, 0 at the end of the stream, or `None` if nothing has
    /// arrived.
    ///
    /// # Errors
    /// The system's error.
    pub fn peek(&self, into: &mut [u8]) -> io::Result<Option<usize>> {
        use rustix::net::{RecvFlags, recv};
        if let Some(tls) = &self.tls {
            return tls.peek(self, into);
        }
        let flags = RecvFlags::PEEK | RecvFlags::DONTWAIT;
        match rustix::io::retry_on_intr(|| recv(self.as_fd(), &mut *into, flags)) {
            Ok((_, length)) => Ok(Some(length.min(into.len()))),
            Err(rustix::io::Errno::AGAIN) => Ok(None),
            Err(errno) => Err(errno.into()),
        }
    }
}

impl AsFd for Stream {
    fn as_fd(&self) -> BorrowedFd<'_> {
        match &self.socket {
            Socket::Tcp(stream) => stream.as_fd(),
            Socket::Unix(stream) => stream.as_fd(),
        }
    }
}

impl Read for &Socket {
    fn read(&mut self, buffer: &mut [u8]) -> io::Result<usize> {
        match self {
            Socket::Tcp(stream) => (&*stream).read(buffer),
            Socket::Unix(stream) => (&*stream).read(buffer),
        }
    }
}

impl Write for &Socket {
    fn write(&mut self, buffer: &[u8]) -> io::Result<usize> {
        match self {
            Socket::Tcp(stream) => (&*stream).write(buffer),
            Socket::Unix(stream) => (&*stream).write(buffer),
        }
    }

    fn flush(&mut self) -> io::Result<()> {
        Ok(())
    }
}

impl Read for &Stream {
    fn read(&mut self, buffer: &mut [u8]) -> io::Result<usize> {
        match &self.tls {
            Some(tls) => tls.read(&self.socket, buffer),
            None => (&self.socket).read(buffer),
        }
    }
}

impl Write for &Stream {
    fn write(&mut self, buffer: &[u8]) -> io::Result<usize> {
        match &self.tls {
            Some(tls) => {
                tls.send(&self.socket, &mut secured::parts(&[buffer]))?;
                Ok(buffer.len())
            }
            None => (&self.socket).write(buffer),
        }
    }

    fn flush(&mut self) -> io::Result<()> {
        Ok(())
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn qemu_uri_forms_parse_and_print_back() {
        for uri in [
            "tcp:127.0.0.1:4444",
            "tcp:[::1]:4444",
            "tcp::0",
            "tcp:host.example:1",
            "unix:/run/hotlift.sock",
        ] {
            assert_eq!(uri.parse::<Address>().unwrap().to_string(), uri);
        }
    }

    #[test]
    fn a_peer_has_a_port_and_a_link_local_address_its_interface() {
        let error = Address::of_peer("tcp:192.0.2.2:0").unwrap_err();
        assert_eq!(
            error.to_string(),
            "cannot connect to port 0 ('tcp:192.0.2.2:0'); give the port on which the peer listens"
        );
        assert!(Address::of_peer("tcp:192.0.2.2:1").is_ok());
        assert!(Address::of_peer("unix:/run/s").is_ok());
        let error = "tcp:[fe80::1]:4444".parse::<Address>().unwrap_err();
        assert_eq!(
            error.to_string(),
            "'fe80::1' is a link-local address, which needs an interface; add it, as in tcp:[fe80::1%eth0]:PORT"
        );
        assert!("tcp:[fe80::1%eth0]:4444".parse::<Address>().is_ok());
    }

    #[test]
    fn a_bad_address_is_refused_with_the_form_that_was_expected() {
        for uri in [
            "tcp:4444",
            "tcp:host:",
            "tcp:host:70000",
            "tcp:[::1:44",
            "tcp:::1:44",
            "unix:",
        ] {
            let error = uri.parse::<Address>().unwrap_err();
            assert!(
                matches!(error, TransportError::BadAddress { .. }),
                "{uri}: {error}"
            );
        }
        for uri in ["rdma:host:1", "host", "", "exec:cat", "fd:4"] {
            let error = uri.parse::<Address>().unwrap_err();
            assert!(
                matches!(error, TransportError::UnknownScheme { .. }),
                "{uri}: {error}"
            );
            assert!(error.to_string().contains("tcp:HOST:PORT"));
        }
    }

    #[test]
    fn every_transport_carries_bytes_both_ways_and_is_unblocked_by_shutdown() {
        let folder = tempfile::tempdir().unwrap();
        let socket = folder.path().join("s");
        for address in [
            "tcp:127.0.0.1:0".to_owned(),
            format!("unix:{}", socket.display()),
        ] {
            let listener = address.parse::<Address>().unwrap().listen().unwrap();
            let ours = listener
                .address()
                .unwrap()
                .connect(Duration::from_secs(10))
                .unwrap();
            let wait = Duration::from_secs(10);
            assert!(wait_readable(listener.as_fd(), wait).unwrap());
            let theirs = listener.accept(Instant::now()).unwrap().unwrap().stream;
            (&ours).write_all(b"QEVM").unwrap();
            let mut peeked = [0; 4];
            assert!(wait_readable(theirs.as_fd(), Duration::from_secs(10)).unwrap());
            assert_eq!(theirs.peek(&mut peeked).unwrap(), Some(4));
            let mut read = [0; 4];
            (&theirs).read_exact(&mut read).unwrap();
            assert_eq!((peeked, read), (*b"QEVM", *b"QEVM"));
            std::thread::scope(|scope| {
                let blocked = scope.spawn(|| (&theirs).read(&mut [0; 1]));
                theirs.shutdown(Shutdown::Both);
                assert_eq!(blocked.join().unwrap().unwrap(), 0);
            });
        }
    }

    #[test]
    fn a_unix_socket_file_is_removed_with_its_listener_and_a_stale_one_is_replaced() {
        let folder = tempfile::tempdir().unwrap();
        let path = folder.path().join("s");
        let address = Address::Unix { path: path.clone() };
        drop(std::os::unix::net::UnixListener::bind(&path).unwrap());
        assert!(path.exists(), "a dropped std listener leaves its file");
        let listener = address.listen().unwrap();
        assert!(
            address.listen().is_err(),
            "an address in use is not taken over"
        );
        drop(listener);
        assert!(!path.exists());
        std::fs::write(&path, "data").unwrap();
        assert!(address.listen().is_err(), "a file is no socket");
        assert_eq!(std::fs::read(&path).unwrap(), b"data");
    }
}

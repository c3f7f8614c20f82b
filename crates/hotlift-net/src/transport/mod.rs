//! Byte streams between two hosts: QEMU's URI forms, one file a transport.
//!
//! A migration opens N + 1 connections to one address: the main channel and N multifd channels.
//! They are plain blocking sockets; a thread that is blocked in one is set free by
//! [`Stream::shutdown`] from any other thread, which is how cancel and failure work.

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
pub use tcp::UNSENT;
pub(crate) use tcp::listen as listen_tcp;
pub use unix::UnixSocketFile;
pub(crate) use unix::listen as listen_unix;

use secured::{GuestParts, Secured};

/// Why an address could not be used.
#[derive(Debug, thiserror::Error)]
pub enum TransportError {
    /// The part before the first colon is no transport that carries multifd channels.
    #[error("unknown migration protocol in '{uri}': expected one of {known}")]
    UnknownScheme {
        /// The URI as given.
        uri: String,
        /// The forms that are understood.
        known: String,
    },
    /// The part after the scheme does not parse.
    #[error("error parsing address '{address}': expected {expected}")]
    BadAddress {
        /// The part after the scheme.
        address: String,
        /// The form that was expected.
        expected: &'static str,
    },
    /// A link-local address without its interface.
    #[error(
        "'{host}' is a link-local address, which each network has one of: add the interface, as in tcp:[{host}%eth0]:PORT"
    )]
    NoZone {
        /// The address.
        host: String,
    },
    /// A peer's port that no process can listen at.
    #[error(
        "no process can be reached at port 0 ('{uri}'): give the port that the peer listens at"
    )]
    NoPort {
        /// The URI as given.
        uri: String,
    },
    /// Connecting failed.
    #[error("failed to connect to '{uri}'")]
    Connect {
        /// The URI as given.
        uri: String,
        /// The system's reason.
        #[source]
        source: io::Error,
    },
    /// Listening failed.
    #[error("failed to listen on '{uri}'")]
    Listen {
        /// The URI as given.
        uri: String,
        /// The system's reason.
        #[source]
        source: io::Error,
    },
}

/// One kind of address.
trait Transport: Sync {
    /// The URI's first part, without the colon.
    fn scheme(&self) -> &'static str;
    /// The form of its addresses, for messages.
    fn form(&self) -> &'static str;
    /// What an address that does not parse lacks.
    fn expected(&self) -> &'static str {
        self.form()
    }
    /// Parses what follows the scheme.
    fn parse(&self, rest: &str) -> Option<Address>;
}

/// All transports.
static TRANSPORTS: &[&dyn Transport] = &[&tcp::Tcp, &unix::Unix];

/// A parsed migration URI.
#[derive(Debug, Clone, PartialEq, Eq)]
pub enum Address {
    /// `tcp:HOST:PORT`; HOST may be empty (any address) or an IPv6 address in brackets.
    Tcp {
        /// Name or address; empty for all of this host's.
        host: String,
        /// Port; 0 lets the system choose when listening.
        port: u16,
    },
    /// `unix:PATH`.
    Unix {
        /// The socket's path.
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
                .join(", ")
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
    /// Parses the address of a peer that is connected to.
    ///
    /// # Errors
    /// As [`str::parse`]; [`TransportError::NoPort`].
    pub fn of_peer(uri: &str) -> Result<Self, TransportError> {
        match uri.parse()? {
            Self::Tcp { port: 0, .. } => Err(TransportError::NoPort {
                uri: uri.to_owned(),
            }),
            address => Ok(address),
        }
    }

    /// All addresses of this host, at a port that the system chooses.
    #[must_use]
    pub fn any() -> Self {
        Self::Tcp {
            host: String::new(),
            port: 0,
        }
    }

    /// The name or IP address of the host; this one's for a socket's path.
    #[must_use]
    pub fn host(&self) -> &str {
        match self {
            Self::Tcp { host, .. } if !host.is_empty() => host,
            Self::Tcp { .. } | Self::Unix { .. } => "localhost",
        }
    }

    /// Whether nothing that goes there leaves this host: a UNIX socket, and loopback.
    #[must_use]
    pub fn is_on_this_host(&self) -> bool {
        match self {
            Self::Unix { .. } => true,
            Self::Tcp { host, .. } => is_this_host(host),
        }
    }

    /// Opens one connection to the first address of the host that answers. Each may take `timeout`; the next is tried 250 ms
    /// after the one before (RFC 8305).
    ///
    /// # Errors
    /// [`TransportError::Connect`] with the system's reason of each address.
    pub fn connect(&self, timeout: Duration) -> Result<Stream, TransportError> {
        self.connect_unless(timeout, Stop::NEVER)
    }

    /// The same, unless it is stopped. Only a lookup of a name by the system's resolver is not interrupted.
    ///
    /// # Errors
    /// As [`Self::connect`]; `Interrupted` once it is stopped.
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

/// Returns whether `host` is an address that each network has one of.
fn is_link_local(host: &str) -> bool {
    host.parse::<Ipv6Addr>()
        .is_ok_and(|address| address.is_unicast_link_local())
}

/// Whether `host` is loopback's address or name.
fn is_this_host(host: &str) -> bool {
    match host.parse::<IpAddr>() {
        Ok(address) => address.to_canonical().is_loopback(),
        // RFC 6761, section 6.3.
        Err(_) => host == "localhost" || host.ends_with(".localhost"),
    }
}

/// What ends the making of a connection early.
#[derive(Clone, Copy)]
pub struct Stop<'a> {
    /// Readable once `when` may have become true.
    pub bell: Option<BorrowedFd<'a>>,
    /// Returns true once the connection is not wanted any more.
    pub when: &'a dyn Fn() -> bool,
}

impl<'a> Stop<'a> {
    /// For a connection that cannot be cancelled.
    pub const NEVER: Self = Self {
        bell: None,
        when: &|| false,
    };

    /// Returns true once the connection is not wanted any more.
    pub fn is_stopped(&self) -> bool {
        // The check sees what has rung so far.
        let _ = self.bell.map(|bell| rustix::io::read(bell, &mut [0; 8]));
        (self.when)()
    }

    /// Waits until something happens on `fds`, `wait` is over, or it is stopped.
    fn poll<'f>(&'f self, fds: &mut Vec<PollFd<'f>>, wait: Duration) -> io::Result<()> {
        if self.is_stopped() {
            let why = "it was cancelled";
            return Err(io::Error::new(io::ErrorKind::Interrupted, why));
        }
        let bell = self.bell.as_ref();
        fds.extend(bell.map(|bell| PollFd::new(bell, PollFlags::IN)));
        let wait = Timespec::try_from(wait).map_err(io::Error::other)?;
        match rustix::event::poll(fds, Some(&wait)) {
            Ok(_) | Err(rustix::io::Errno::INTR) => Ok(()),
            Err(errno) => Err(errno.into()),
        }
    }

    /// Waits until a read of `stream` comes back at once; false if it may not, or `wait` is over.
    ///
    /// # Errors
    /// The system's reason; `Interrupted` once it is stopped.
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

/// Waits until `fd` has something to read (or has ended); false if nothing came within `timeout`.
///
/// # Errors
/// The system's reason.
pub fn wait_readable(fd: BorrowedFd<'_>, timeout: Duration) -> io::Result<bool> {
    wait_for(fd, PollFlags::IN, timeout)
}

/// Waits until `fd` is ready for what `flags` say; false if it was not within `timeout`.
fn wait_for(fd: BorrowedFd<'_>, flags: PollFlags, timeout: Duration) -> io::Result<bool> {
    let mut fds = [PollFd::new(&fd, flags)];
    // A time that does not fit has no limit.
    let until = Instant::now().checked_add(timeout);
    Ok(poll_until(&mut fds, until)? > 0)
}

/// One connection; with TLS, once its handshake is done.
#[derive(Debug)]
pub struct Stream {
    socket: Socket,
    tls: Option<Box<Secured>>,
}

/// A host at the other end of connections, as far as certificates say. All without a certificate are of one.
#[derive(Debug, Clone)]
pub struct Host(Option<Identity>);

impl Host {
    /// Whether `stream` is a connection with it.
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
    /// Two ends of a connection within this process.
    ///
    /// # Errors
    /// The system's reason.
    pub fn pair() -> io::Result<(Self, Self)> {
        UnixStream::pair().map(|(one, other)| (one.into(), other.into()))
    }

    /// A TCP connection, set up as this module sets up its own.
    ///
    /// # Errors
    /// The system's reason.
    pub fn of_tcp(stream: TcpStream) -> io::Result<Self> {
        tcp::prepare(&stream)?;
        Ok(stream.into())
    }

    /// Makes the connection, on which nothing was said yet, a TLS one, as the side that has made it. `host` is the name
    /// that the other side is known by.
    ///
    /// # Errors
    /// [`TlsError`]: whose fault, and what is wrong.
    pub fn secure(self, tls: &Tls, host: Option<&str>) -> Result<Self, TlsError> {
        self.secure_unless(tls, host, Stop::NEVER)
    }

    /// The same, which fails once it is stopped.
    ///
    /// # Errors
    /// [`TlsError`]: whose fault, and what is wrong.
    pub fn secure_unless(
        mut self,
        tls: &Tls,
        host: Option<&str>,
        stop: Stop<'_>,
    ) -> Result<Self, TlsError> {
        let session = tls.connect_unless(&self, host, stop.bell, &|| stop.is_stopped())?;
        self.tls = Some(Box::new(Secured::new(session, tls.profile())));
        Ok(self)
    }

    /// The same as the side that has accepted it.
    ///
    /// # Errors
    /// [`TlsError`]: whose fault, and what is wrong.
    pub fn accept_secured(mut self, tls: &Tls) -> Result<Self, TlsError> {
        let session = tls.accept(&self)?;
        self.tls = Some(Box::new(Secured::new(session, tls.profile())));
        Ok(self)
    }

    /// Whether the socket's bytes are those that were sent, so that system calls may move them.
    #[must_use]
    pub fn is_plain(&self) -> bool {
        self.tls.is_none()
    }

    /// The other side's certificate, of a TLS connection in which it has shown one.
    #[must_use]
    pub fn peer(&self) -> Option<&Identity> {
        self.tls.as_ref()?.peer.as_ref()
    }

    /// Whether a QEMU with TLS is at the other end.
    pub fn is_of_a_qemu(&self) -> bool {
        self.tls.as_ref().is_some_and(|tls| tls.is_of_a_qemu())
    }

    /// The host that the connection is with.
    pub fn host(&self) -> Host {
        Host(self.peer().cloned())
    }

    /// Whether both were made by the same host (TCP) or user (unix), as far as the kernel tells. With certificates those
    /// tell more, see [`Host`].
    pub fn is_from_where(&self, other: &Self) -> bool {
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

    /// Whom the connection is with, without a port.
    #[must_use]
    pub fn peer_host(&self) -> String {
        match &self.socket {
            Socket::Tcp(stream) => match stream.peer_addr() {
                Ok(peer) => peer.ip().to_canonical().to_string(),
                Err(_) => "a host that has gone".to_owned(),
            },
            Socket::Unix(_) => "this host".to_owned(),
        }
    }

    /// This end's address, of a TCP connection.
    #[must_use]
    pub fn local_ip(&self) -> Option<IpAddr> {
        match &self.socket {
            Socket::Tcp(stream) => stream.local_addr().ok().map(|local| local.ip()),
            Socket::Unix(_) => None,
        }
    }

    /// The other end's address, of a TCP connection.
    #[must_use]
    pub fn peer_ip(&self) -> Option<IpAddr> {
        match &self.socket {
            Socket::Tcp(stream) => stream.peer_addr().ok().map(|peer| peer.ip()),
            Socket::Unix(_) => None,
        }
    }

    /// What only the two ends of a TLS connection know.
    #[must_use]
    pub fn exporter(&self) -> Option<&Exporter> {
        self.tls.as_ref().map(|tls| &tls.exporter)
    }

    /// Ends one or both directions; threads blocked in them return.
    pub fn shutdown(&self, how: Shutdown) {
        if let (Some(tls), Shutdown::Write | Shutdown::Both) = (&self.tls, how) {
            tls.close(self);
        }
        // A socket that the peer has closed already answers ENOTCONN: it is as shut as asked for.
        let _ = match &self.socket {
            Socket::Tcp(stream) => stream.shutdown(how),
            Socket::Unix(stream) => stream.shutdown(how),
        };
    }

    /// Ends both directions without saying that nothing follows.
    pub fn break_off(&self) {
        let _ = match &self.socket {
            Socket::Tcp(stream) => stream.shutdown(Shutdown::Both),
            Socket::Unix(stream) => stream.shutdown(Shutdown::Both),
        };
    }

    /// Ends both directions, and resets the connection when it is dropped: nothing that is still to be sent matters.
    ///
    /// The kernel announces no more room once reading is shut, whatever is read then. A peer that saw none left would wait for
    /// it until the kernel forgets the connection (`tcp_fin_timeout`, a minute), were it not reset.
    pub fn cut(&self) {
        self.reset_on_drop();
        self.shutdown(Shutdown::Both);
    }

    /// Waits until a read would come back at once; false if that was not so within `timeout`.
    ///
    /// # Errors
    /// The system's reason.
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

    /// Returns true if a read comes back at once, after a poll. With TLS a part of a record may have come.
    ///
    /// # Errors
    /// The system's reason.
    pub fn is_readable(&self, polled: &PollFd<'_>) -> io::Result<bool> {
        Ok(!polled.revents().is_empty()
            && (self.is_plain() || self.wait_readable(Duration::ZERO)?))
    }

    /// Whether a write of some pages would come back at once: most of the room for what is not yet taken is free.
    pub fn is_writable(&self) -> bool {
        // One that is broken says so to whoever writes.
        wait_for(self.as_fd(), PollFlags::OUT, Duration::ZERO).unwrap_or(true)
    }

    /// Reads what there is into `buffer`, waiting for at least a byte for up to `timeout`; 0 at end of stream.
    ///
    /// # Errors
    /// The system's reason; `TimedOut`.
    pub fn read_within(&self, buffer: &mut [u8], timeout: Duration) -> io::Result<usize> {
        match self.wait_readable(timeout)? {
            true => self.read_some(buffer),
            false => Err(io::ErrorKind::TimedOut.into()),
        }
    }

    /// Whether something has come that the socket does not show any more.
    #[must_use]
    pub fn has_plaintext(&self) -> bool {
        self.tls.as_ref().is_some_and(|tls| tls.has_plaintext())
    }

    /// Sends `slices`, one after the other.
    ///
    /// # Errors
    /// The system's reason.
    pub fn send_parts(&self, slices: &[&[u8]], scratch: &mut IoScratch) -> io::Result<()> {
        match &self.tls {
            Some(tls) => tls.send(&self.socket, &mut secured::parts(slices)),
            None => sock::send_parts(self.as_fd(), slices, scratch),
        }
    }

    /// Sends `head` and guest memory behind it.
    ///
    /// # Errors
    /// The system's reason.
    pub fn send_guest_memory(
        &self,
        head: &[u8],
        runs: &[GuestRun<'_>],
        scratch: &mut IoScratch,
    ) -> io::Result<()> {
        match &self.tls {
            Some(tls) => tls.send(&self.socket, &mut GuestParts::new(head, runs)),
            None => sock::send(self.as_fd(), head, runs, scratch),
        }
    }

    /// Fills `runs`.
    ///
    /// # Errors
    /// The system's reason; `UnexpectedEof` at an end inside.
    pub fn read_pages(&self, runs: &[GuestRun<'_>], scratch: &mut IoScratch) -> io::Result<()> {
        match &self.tls {
            Some(tls) => tls.read_pages(self, runs),
            None => sock::recv(self.as_fd(), runs, scratch),
        }
    }

    /// What the kernel knows of what was sent; `None` for a socket that is not TCP.
    pub fn tcp_sending(&self) -> Option<TcpSending> {
        match &self.socket {
            Socket::Tcp(stream) => TcpSending::of(stream.as_fd()).ok(),
            Socket::Unix(_) => None,
        }
    }

    /// Bytes that were written and not acknowledged; `None` for a socket that is not TCP.
    pub fn unacknowledged(&self) -> Option<u32> {
        match &self.socket {
            Socket::Tcp(stream) => sock::unacknowledged(stream.as_fd()).ok(),
            Socket::Unix(_) => None,
        }
    }

    /// UNIX: the peer has read all that was written; TCP: the peer's kernel has all.
    pub fn is_delivered(&self) -> bool {
        !sock::unacknowledged(self.as_fd()).is_ok_and(|bytes| bytes > 0)
    }

    /// True if the peer has closed the connection, whatever it has sent before.
    pub fn is_hung_up(&self) -> bool {
        matches!(
            wait_for(self.as_fd(), PollFlags::RDHUP, Duration::ZERO),
            Ok(true)
        )
    }

    /// Resets the connection when it is dropped: the peer learns of it at once, whatever waits in the buffers.
    pub fn reset_on_drop(&self) {
        // A UNIX socket has no such state: its peer always learns of the close.
        if let Socket::Tcp(stream) = &self.socket {
            let _ = rustix::net::sockopt::set_socket_linger(stream, Some(Duration::ZERO));
        }
    }

    /// Returns true if the peer has reset the connection, which may have lost a part of what it sent.
    pub fn is_reset(&self) -> bool {
        let mut fds = [PollFd::new(self, PollFlags::empty())];
        matches!(
            rustix::event::poll(&mut fds, Some(&Timespec::default())),
            Ok(1..)
        ) && fds[0].revents().contains(PollFlags::ERR)
    }

    /// Limits how long a write may wait for the peer to read.
    ///
    /// # Errors
    /// The system's reason.
    pub fn set_write_timeout(&self, timeout: Duration) -> io::Result<()> {
        match &self.socket {
            Socket::Tcp(stream) => stream.set_write_timeout(Some(timeout)),
            Socket::Unix(stream) => stream.set_write_timeout(Some(timeout)),
        }
    }

    /// Lets writes wait for as long as the peer takes, as they do at first.
    ///
    /// # Errors
    /// The system's reason.
    pub fn lift_write_timeout(&self) -> io::Result<()> {
        match &self.socket {
            Socket::Tcp(stream) => stream.set_write_timeout(None),
            Socket::Unix(stream) => stream.set_write_timeout(None),
        }
    }

    /// From here on the other side counts as lost if nothing arrives there for 30 s that was sent, also by a host that has lost
    /// its power. For connections on which little is sent, which its reader takes at once.
    pub fn notice_loss(&self) {
        if let Socket::Tcp(stream) = &self.socket {
            tcp::notice_loss(stream);
        }
    }

    /// Lets the keepalive end the connection of a peer that is silent for longer than `limit`; zero is never.
    pub fn set_silence_limit(&self, limit: Duration) {
        if let Socket::Tcp(stream) = &self.socket {
            // A kernel that refuses only leaves things as they were.
            let _ = tcp::set_silence_limit(stream, limit);
        }
    }

    /// Limits how long a read may wait.
    ///
    /// # Errors
    /// The system's reason.
    pub fn set_read_timeout(&self, timeout: Duration) -> io::Result<()> {
        match &self.socket {
            Socket::Tcp(stream) => stream.set_read_timeout(Some(timeout)),
            Socket::Unix(stream) => stream.set_read_timeout(Some(timeout)),
        }
    }

    /// Limits how long a read or a write may wait.
    ///
    /// # Errors
    /// The system's reason.
    pub fn set_timeouts(&self, timeout: Duration) -> io::Result<()> {
        self.set_read_timeout(timeout)?;
        self.set_write_timeout(timeout)
    }

    /// Reads what there is into `buffer`, waiting for at least a byte; 0 at end of stream.
    ///
    /// # Errors
    /// The system's reason.
    pub fn read_some(&self, buffer: &mut [u8]) -> io::Result<usize> {
        let mut stream = self;
        loop {
            match stream.read(buffer) {
                Err(error) if error.kind() == io::ErrorKind::Interrupted => {}
                result => return result,
            }
        }
    }

    /// Looks at the first bytes without taking them and without waiting for them: how many there
    /// are (0 at end of stream), or `None` if nothing has come.
    ///
    /// # Errors
    /// The system's reason.
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
            "no process can be reached at port 0 ('tcp:192.0.2.2:0'): give the port that the peer listens at"
        );
        assert!(Address::of_peer("tcp:192.0.2.2:1").is_ok());
        assert!(Address::of_peer("unix:/run/s").is_ok());
        let error = "tcp:[fe80::1]:4444".parse::<Address>().unwrap_err();
        assert_eq!(
            error.to_string(),
            "'fe80::1' is a link-local address, which each network has one of: add the interface, as in \
             tcp:[fe80::1%eth0]:PORT"
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
    fn a_unix_socket_file_goes_with_its_listener_and_a_stale_one_is_replaced() {
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

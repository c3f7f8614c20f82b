//! `tcp:HOST:PORT`.

use std::io;
use std::net::{TcpListener, TcpStream, ToSocketAddrs};
use std::os::fd::AsFd;
use std::time::Duration;

use hotlift_mem::sock::limit_unsent;
use rustix::net::sockopt;

use super::{Address, Listener, Stream, Transport};

/// Between probes of a connection on which nothing comes.
const KEEPALIVE: Duration = Duration::from_secs(10);

/// Probes without an answer after which the other side is gone.
const KEEPALIVE_PROBES: u32 = 3;

/// Bytes that may wait in a socket for their turn: half a packet of method none. 64 KiB made the source
/// wake up more often and cost it a fifth more; both measured by `bench/pair.py --case none`.
const UNSENT: u32 = 256 << 10;

/// TCP over IPv4 or IPv6.
pub(super) struct Tcp;

impl Transport for Tcp {
    fn scheme(&self) -> &'static str {
        "tcp"
    }

    fn form(&self) -> &'static str {
        "tcp:HOST:PORT"
    }

    fn parse(&self, rest: &str) -> Option<Address> {
        let (host, port) = rest.rsplit_once(':')?;
        let host = match host.strip_prefix('[') {
            Some(v6) => v6.strip_suffix(']')?,
            None if host.contains(':') => return None,
            None => host,
        };
        Some(Address::Tcp {
            host: host.to_owned(),
            port: port.parse().ok()?,
        })
    }
}

pub(super) fn connect(host: &str, port: u16, timeout: Duration) -> io::Result<Stream> {
    let host = if host.is_empty() { "localhost" } else { host };
    let mut failed = io::ErrorKind::AddrNotAvailable.into();
    for address in (host, port).to_socket_addrs()? {
        match TcpStream::connect_timeout(&address, timeout) {
            Ok(stream) => {
                prepare(&stream)?;
                return Ok(Stream::Tcp(stream));
            }
            Err(error) => failed = error,
        }
    }
    Err(failed)
}

/// Sets up a connection that was made or accepted.
pub(super) fn prepare(stream: &TcpStream) -> io::Result<()> {
    // A packet is written whole by one call; waiting for more to fill a segment only adds to the
    // time in which the guest stands still.
    stream.set_nodelay(true)?;
    // On one host the destination of method none needs a tenth less CPU with it, and the source no
    // more: without it the source runs far ahead, and its queue is pushed out in the destination's
    // time. A kernel that refuses only leaves things as they were.
    let _ = limit_unsent(stream.as_fd(), UNSENT);
    // A host that lost its power closes nothing. No time-out on unacknowledged data beside it
    // (TCP_USER_TIMEOUT): it would also end a connection whose reader is only slow.
    sockopt::set_socket_keepalive(stream, true)?;
    sockopt::set_tcp_keepidle(stream, KEEPALIVE)?;
    sockopt::set_tcp_keepintvl(stream, KEEPALIVE)?;
    sockopt::set_tcp_keepcnt(stream, KEEPALIVE_PROBES)?;
    Ok(())
}

pub(super) fn listen(host: &str, port: u16) -> io::Result<Listener> {
    // An empty host is all addresses of both families, where the kernel has IPv6.
    let listener = if host.is_empty() {
        TcpListener::bind(("::", port)).or_else(|_| TcpListener::bind(("0.0.0.0", port)))?
    } else {
        let addresses: Vec<_> = (host, port).to_socket_addrs()?.collect();
        TcpListener::bind(addresses.as_slice())?
    };
    Ok(Listener::Tcp(listener))
}

//! `tcp:HOST:PORT`.

use std::io;
use std::net::{TcpListener, TcpStream, ToSocketAddrs};

use super::{Address, Listener, Stream, Transport};

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

pub(super) fn connect(host: &str, port: u16) -> io::Result<Stream> {
    let host = if host.is_empty() { "localhost" } else { host };
    let stream = TcpStream::connect((host, port))?;
    // A packet is written whole by one call; waiting for more to fill a segment only adds to the
    // time in which the guest stands still.
    stream.set_nodelay(true)?;
    Ok(Stream::Tcp(stream))
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

//! Connections that bypass the redirect, and the original destination of a redirected connection.

use std::io;
use std::net::{IpAddr, SocketAddr, TcpStream};
use std::os::fd::{AsFd, OwnedFd};
use std::time::Duration;

use hotlift::transport::Stream;
use nix::ifaddrs::getifaddrs;
use nix::sys::socket::{SockaddrStorage, getsockopt, sockopt};
use rustix::event::{PollFd, PollFlags, Timespec, poll};
use rustix::io::Errno;
use rustix::net::{AddressFamily, SocketFlags, SocketType, socket_with};

use crate::rules;

/// Connects to `to` within `timeout`. The socket carries the agent's mark, which exempts it from the redirect.
///
/// # Errors
/// The system's error.
pub fn connect(to: SocketAddr, timeout: Duration) -> io::Result<Stream> {
    let family = match to {
        SocketAddr::V4(_) => AddressFamily::INET,
        SocketAddr::V6(_) => AddressFamily::INET6,
    };
    let flags = SocketFlags::CLOEXEC | SocketFlags::NONBLOCK;
    let socket = socket_with(family, SocketType::STREAM, flags, None)?;
    // Errors are ignored: where the agent may not mark sockets, the rules do not require the mark (see `rules`).
    let _ = rules::mark(&socket);
    Stream::of_tcp(connect_within(socket, to, timeout)?)
}

/// Connects a non-blocking socket within `timeout`; returns a blocking stream.
///
/// # Errors
/// The system's error.
pub(crate) fn connect_within(
    socket: OwnedFd,
    to: SocketAddr,
    timeout: Duration,
) -> io::Result<TcpStream> {
    match rustix::net::connect(&socket, &to) {
        Ok(()) => {}
        Err(Errno::INPROGRESS) => {
            let time = Timespec::try_from(timeout).ok();
            let mut polled = [PollFd::new(&socket, PollFlags::OUT)];
            if rustix::io::retry_on_intr(|| poll(&mut polled, time.as_ref()))? == 0 {
                return Err(io::ErrorKind::TimedOut.into());
            }
            rustix::net::sockopt::socket_error(&socket)??;
        }
        Err(errno) => return Err(errno.into()),
    }
    let stream = TcpStream::from(socket);
    stream.set_nonblocking(false)?;
    Ok(stream)
}

/// Returns the original destination of a connection that nftables redirected to this host. `v6` is true for an IPv6 socket.
///
/// # Errors
/// The system's error if the connection was not redirected.
pub fn original_destination(stream: &Stream, v6: bool) -> io::Result<SocketAddr> {
    let fd = stream.as_fd();
    if v6 {
        let address = getsockopt(&fd, sockopt::Ip6tOriginalDst)?;
        let ip = IpAddr::from(address.sin6_addr.s6_addr);
        return Ok(SocketAddr::new(ip, u16::from_be(address.sin6_port)));
    }
    let address = getsockopt(&fd, sockopt::OriginalDst)?;
    let ip = IpAddr::from(address.sin_addr.s_addr.to_ne_bytes());
    Ok(SocketAddr::new(ip, u16::from_be(address.sin_port)))
}

/// Returns true if `address` belongs to this host. Compares `address` with the interfaces. A test by bind would be wrong: with
/// `net.ipv4.ip_nonlocal_bind` the kernel binds a socket to any address.
///
/// # Errors
/// The system's error.
pub fn is_of_this_host(address: IpAddr) -> io::Result<bool> {
    let address = address.to_canonical();
    // All of 127.0.0.0/8 is local, but the interface lists only one address of it.
    if address.is_loopback() {
        return Ok(true);
    }
    let mut own = getifaddrs()?.filter_map(|interface| ip_of(&interface.address?));
    Ok(own.any(|own| own == address))
}

/// Returns the IP address in `address`; `None` for another family.
pub(crate) fn ip_of(address: &SockaddrStorage) -> Option<IpAddr> {
    let v4 = address.as_sockaddr_in().map(|it| IpAddr::from(it.ip()));
    v4.or_else(|| address.as_sockaddr_in6().map(|it| IpAddr::from(it.ip())))
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn own_addresses_are_distinguished_from_others() {
        for (address, is_own) in [
            ("127.0.0.1", true),
            ("127.4.5.6", true),
            ("::ffff:127.0.0.1", true),
            ("::1", true),
            ("192.0.2.77", false),
            ("0.0.0.0", false),
            ("224.0.0.1", false),
            ("::", false),
            ("2001:db8::77", false),
        ] {
            assert_eq!(
                is_of_this_host(address.parse().unwrap()).unwrap(),
                is_own,
                "{address}"
            );
        }
    }
}

//! Detects that a QEMU on this host has closed its end of a redirected connection.
//!
//! If the agent does not read a stream, the sending QEMU fills the socket buffers. If this QEMU then aborts, its FIN queues
//! after the unread data, and the agent sees no close. But the kernel reports the state of the QEMU's socket (sock_diag(7)).

use std::io;
use std::net::{IpAddr, SocketAddr};
use std::os::fd::OwnedFd;

use hotlift::transport::Stream;
use rustix::net::{
    AddressFamily, RecvFlags, SendFlags, SocketFlags, SocketType, getpeername, netlink, recv, send,
    socket_with,
};

/// `SOCK_DIAG_BY_FAMILY` of linux/sock_diag.h.
const BY_FAMILY: u16 = 20;

/// `NLM_F_REQUEST` of linux/netlink.h.
const REQUEST: u16 = 1;

/// `IPPROTO_TCP`.
const TCP: u8 = 6;

/// `AF_INET`.
const INET: u8 = 2;

/// `AF_INET6`.
const INET6: u8 = 10;

/// Size of `struct nlmsghdr`, in bytes.
const HEAD: usize = 16;

/// Size of the netlink header and `struct inet_diag_req_v2`, in bytes.
const LENGTH: u32 = 16 + 56;

/// Size of the answer buffer, in bytes; an answer without extensions has fewer than 100.
const ANSWER: usize = 4096;

/// TCP states of a socket that is closed or sends no more data (net/tcp_states.h): `FIN_WAIT1`, `FIN_WAIT2`, `TIME_WAIT`,
/// `CLOSE`, `LAST_ACK` and `CLOSING`.
const CLOSED: [u8; 6] = [4, 5, 6, 7, 9, 11];

/// Netlink socket that returns the state of TCP sockets in this host's network namespace.
pub struct Sockets(OwnedFd);

impl Sockets {
    /// Opens the netlink socket.
    ///
    /// # Errors
    /// The system's error.
    pub fn open() -> io::Result<Self> {
        let protocol = Some(netlink::SOCK_DIAG);
        let flags = SocketFlags::CLOEXEC;
        let socket = socket_with(AddressFamily::NETLINK, SocketType::DGRAM, flags, protocol)?;
        Ok(Self(socket))
    }

    /// Returns true if the source has closed its end of the connection `stream`. `to` is the destination before the redirect.
    /// Returns false if the kernel does not know that end: then `stream` itself shows the close.
    #[must_use]
    pub fn has_closed(&self, stream: &Stream, to: SocketAddr) -> bool {
        let from = getpeername(stream).ok();
        let from = from.and_then(|from| SocketAddr::try_from(from?).ok());
        let state = from.and_then(|from| self.state(from, to).ok().flatten());
        state.is_some_and(|state| CLOSED.contains(&state))
    }

    /// Returns the TCP state of the socket from `local` to `remote`; `None` if the kernel does not know it.
    fn state(&self, local: SocketAddr, remote: SocketAddr) -> io::Result<Option<u8>> {
        send(&self.0, &question(local, remote), SendFlags::empty())?;
        let mut answer = [0; ANSWER];
        // When `send` returns, the kernel has queued its answer.
        let (_, length) = recv(&self.0, &mut answer, RecvFlags::DONTWAIT)?;
        let answer = &answer[..length.min(ANSWER)];
        let kind = answer.get(4..6) == Some(&BY_FAMILY.to_ne_bytes());
        // `idiag_state` follows the family.
        Ok(answer.get(HEAD + 1).copied().filter(|_| kind))
    }
}

/// Returns a request for the state of one socket: a netlink header and `struct inet_diag_req_v2`.
fn question(local: SocketAddr, remote: SocketAddr) -> Vec<u8> {
    let family = match local {
        SocketAddr::V4(_) => INET,
        SocketAddr::V6(_) => INET6,
    };
    let mut bytes = Vec::new();
    bytes.extend(LENGTH.to_ne_bytes());
    bytes.extend(BY_FAMILY.to_ne_bytes());
    bytes.extend(REQUEST.to_ne_bytes());
    // Sequence number and port id of the sender: not needed, since there is only one query at a time.
    bytes.extend([0; 8]);
    // No extensions; all states.
    bytes.extend([family, TCP, 0, 0]);
    bytes.extend(u32::MAX.to_ne_bytes());
    bytes.extend(local.port().to_be_bytes());
    bytes.extend(remote.port().to_be_bytes());
    bytes.extend(padded(local.ip()));
    bytes.extend(padded(remote.ip()));
    // Any interface, and no cookie (`INET_DIAG_NOCOOKIE`).
    bytes.extend(0_u32.to_ne_bytes());
    bytes.extend([0xff; 8]);
    bytes
}

/// Returns an address as 16 bytes, zero-padded after an IPv4 address.
fn padded(ip: IpAddr) -> [u8; 16] {
    match ip {
        IpAddr::V6(ip) => ip.octets(),
        IpAddr::V4(ip) => {
            let mut bytes = [0; 16];
            bytes[..4].copy_from_slice(&ip.octets());
            bytes
        }
    }
}

#[cfg(test)]
mod tests {
    use super::*;
    use crate::fixture::{connection, fill, until};

    #[test]
    fn a_socket_closed_with_unread_bytes_is_detected() {
        let (accepted, source) = connection();
        let to = source.peer_addr().unwrap();
        assert_eq!(question(to, to).len(), usize::try_from(LENGTH).unwrap());
        let sockets = Sockets::open().unwrap();
        fill(&source);
        assert!(!sockets.has_closed(&accepted, to), "it is there");
        drop(source);
        until("its end is known", || sockets.has_closed(&accepted, to));
        let elsewhere = "192.0.2.2:49152".parse().unwrap();
        assert!(
            !sockets.has_closed(&accepted, elsewhere),
            "there is no such"
        );
    }
}

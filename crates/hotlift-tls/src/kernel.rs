//! kTLS: whether the kernel of this host can seal a socket's records itself. Only asked, not used.

use std::io;
use std::os::fd::AsFd;

use nix::sys::socket::{setsockopt, sockopt::TcpUlp};

/// The kernel does not do TLS on this socket.
#[derive(Debug, thiserror::Error)]
#[error(
    "the kernel does no TLS on this socket: it lacks CONFIG_TLS (module 'tls'), or the socket is not a connected TCP one"
)]
pub struct NoKernelTls(#[source] io::Error);

/// Attaches the kernel's TLS to a connected TCP socket (`TCP_ULP`, "tls"). Until keys are given to it the socket works as
/// before, so that asking costs nothing; but it stays attached, and a socket on which records are sealed by this crate
/// should not be asked.
///
/// # Errors
/// The system's reason: `ENOENT` where the kernel has no such protocol, `ENOTSUPP` for other sockets.
pub fn probe_kernel_tls(socket: impl AsFd) -> Result<(), NoKernelTls> {
    let fd = socket.as_fd();
    setsockopt(&fd, TcpUlp::default(), b"tls")
        .map_err(|error| NoKernelTls(io::Error::from_raw_os_error(error as i32)))
}

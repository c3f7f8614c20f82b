//! The kernel's statistics of a TCP connection: queued data, the limiting side, and the last activity of the peer.

use std::io;
use std::mem;
use std::os::fd::{AsRawFd, BorrowedFd};
use std::ptr;
use std::time::Duration;

/// Statistics of a sending TCP socket since its creation (`TCP_INFO`, Linux 4.10 and later).
///
/// Times are counted in the kernel's ticks of 1 to 10 ms: exact on average, coarse over a few of them.
#[derive(Debug, Clone, Copy, Default, PartialEq, Eq)]
pub struct TcpSending {
    /// Bytes acknowledged by the peer, plus one for the SYN and one for the FIN.
    pub acknowledged: u64,
    /// Shortest recent round-trip time.
    pub min_rtt: Duration,
    /// Time in which data waited to be sent or acknowledged.
    pub busy: Duration,
    /// Part of `busy` in which the peer's receive buffer was full: the peer's process does not read.
    pub receiver_limited: Duration,
    /// Segments that were sent and not acknowledged; 0 while the peer's receive buffer is full.
    pub in_flight: u32,
    /// Unanswered probes of a full window or of an idle connection.
    pub probes: u8,
    /// Bytes in the send queue that were not sent yet.
    pub not_sent: u32,
    /// Time since the last acknowledgement or data from the peer.
    pub since_last_packet: Duration,
}

/// The kernel's `struct tcp_info` up to `tcpi_rwnd_limited`; unused fields have no name.
#[repr(C)]
#[derive(Clone, Copy, Default)]
struct TcpInfo {
    states: [u8; 3],
    probes: u8,
    settings: [u8; 4],
    timeouts: [u32; 4],
    unacked: u32,
    segment_counts: [u32; 4],
    last_sent: [u32; 2],
    last_data_recv: u32,
    last_ack_recv: u32,
    sizes: [u32; 11],
    rates: [u64; 2],
    bytes_acked: u64,
    bytes_received: u64,
    segments: [u32; 2],
    not_sent: u32,
    min_rtt: u32,
    data_segments: [u32; 2],
    delivery_rate: u64,
    busy_time: u64,
    rwnd_limited: u64,
}

const _: () = {
    assert!(mem::offset_of!(TcpInfo, unacked) == 24);
    assert!(mem::offset_of!(TcpInfo, last_data_recv) == 52);
    assert!(mem::offset_of!(TcpInfo, bytes_acked) == 120);
    assert!(mem::offset_of!(TcpInfo, min_rtt) == 148);
    assert!(mem::offset_of!(TcpInfo, busy_time) == 168);
    assert!(mem::size_of::<TcpInfo>() == 184);
};

impl TcpSending {
    /// Queries the statistics of a socket.
    ///
    /// # Errors
    /// The system's error, such as for a socket that is not TCP; `Unsupported` if the kernel reports fewer fields.
    pub fn of(fd: BorrowedFd<'_>) -> io::Result<Self> {
        let mut info = TcpInfo::default();
        let mut length = libc::socklen_t::try_from(mem::size_of::<TcpInfo>()).unwrap_or(0);
        let given = length;
        // SAFETY: the kernel writes at most `length` bytes of plain numbers to `info`, and both outlive the call.
        let answer = unsafe {
            libc::getsockopt(
                fd.as_raw_fd(),
                libc::IPPROTO_TCP,
                libc::TCP_INFO,
                ptr::from_mut(&mut info).cast(),
                &raw mut length,
            )
        };
        if answer != 0 {
            return Err(io::Error::last_os_error());
        }
        if length < given {
            return Err(io::ErrorKind::Unsupported.into());
        }
        Ok(Self {
            acknowledged: info.bytes_acked,
            min_rtt: Duration::from_micros(info.min_rtt.into()),
            busy: Duration::from_micros(info.busy_time),
            receiver_limited: Duration::from_micros(info.rwnd_limited),
            in_flight: info.unacked,
            probes: info.probes,
            not_sent: info.not_sent,
            // A segment with data and without a new acknowledgement changes only the time of the last data.
            since_last_packet: Duration::from_millis(
                info.last_ack_recv.min(info.last_data_recv).into(),
            ),
        })
    }
}

/// Returns the bytes written to a TCP socket that the peer has not acknowledged (`SIOCOUTQ`). For a UNIX socket: 0 if the peer
/// has read everything, and otherwise more than the number of unread bytes.
///
/// # Errors
/// The system's error.
pub fn unacknowledged(fd: BorrowedFd<'_>) -> io::Result<u32> {
    let mut bytes: libc::c_int = 0;
    // SAFETY: SIOCOUTQ, which has TIOCOUTQ's number, writes an int, which outlives the call.
    let answer = unsafe { libc::ioctl(fd.as_raw_fd(), libc::TIOCOUTQ, &raw mut bytes) };
    match answer {
        0 => Ok(bytes.try_into().unwrap_or(0)),
        _ => Err(io::Error::last_os_error()),
    }
}

#[cfg(test)]
mod tests {
    use std::io::{Read, Write};
    use std::net::{TcpListener, TcpStream};
    use std::os::fd::AsFd;
    use std::os::unix::net::UnixStream;

    use super::*;

    #[test]
    fn a_receiver_that_does_not_read_is_distinguished_from_a_full_link() {
        let listener = TcpListener::bind("127.0.0.1:0").unwrap();
        let mut sender = TcpStream::connect(listener.local_addr().unwrap()).unwrap();
        let (mut receiver, _) = listener.accept().unwrap();
        let fresh = TcpSending::of(sender.as_fd()).unwrap();
        // The SYN counts.
        assert_eq!(fresh.acknowledged, 1);
        assert_eq!(unacknowledged(sender.as_fd()).unwrap(), 0);

        // Writes until the socket is full: then the receiver is the limit.
        sender.set_nonblocking(true).unwrap();
        let mut written = 0;
        let limited = loop {
            written += sender.write(&[0; 1 << 16]).unwrap_or(0);
            let now = TcpSending::of(sender.as_fd()).unwrap();
            if now.receiver_limited > Duration::ZERO {
                break now;
            }
        };
        assert!(unacknowledged(sender.as_fd()).unwrap() > 0);
        // A full window: nothing is in flight, data waits, and the last acknowledgement ages until the probe.
        let full = loop {
            // The window may have grown in the meantime.
            written += sender.write(&[0; 1 << 16]).unwrap_or(0);
            let now = TcpSending::of(sender.as_fd()).unwrap();
            if now.in_flight == 0 && now.not_sent > 0 && now.since_last_packet > Duration::ZERO {
                break now;
            }
        };
        assert!(full.since_last_packet < Duration::from_secs(60), "{full:?}");
        assert!(limited.busy >= limited.receiver_limited);

        sender.shutdown(std::net::Shutdown::Write).unwrap();
        let mut all = Vec::new();
        receiver.read_to_end(&mut all).unwrap();
        assert_eq!(all.len(), written);
        // The FIN counts, too.
        let all = fresh.acknowledged + written as u64;
        while TcpSending::of(sender.as_fd()).unwrap().acknowledged < all {}
        assert!(unacknowledged(sender.as_fd()).unwrap() <= 1);
    }

    #[test]
    fn a_unix_socket_reports_only_its_unread_bytes() {
        let (mut unix, mut other) = UnixStream::pair().unwrap();
        TcpSending::of(unix.as_fd()).unwrap_err();
        unix.write_all(&[1; 16]).unwrap();
        assert!(unacknowledged(unix.as_fd()).unwrap() >= 16);
        other.read_exact(&mut [0; 16]).unwrap();
        assert_eq!(unacknowledged(unix.as_fd()).unwrap(), 0);
    }
}

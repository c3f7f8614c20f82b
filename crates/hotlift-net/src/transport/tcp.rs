//! `tcp:HOST:PORT`.

use std::io;
use std::net::{SocketAddr, TcpListener, TcpStream, ToSocketAddrs};
use std::os::fd::{AsFd, OwnedFd};
use std::time::{Duration, Instant};

use hotlift_mem::sock::{limit_retransmission_interval, limit_unsent};
use rustix::event::{PollFd, PollFlags};
use rustix::io::Errno;
use rustix::net::{AddressFamily, SocketFlags, SocketType, socket_with, sockopt};

use super::attempts::{Failed, Schedule, check_zone};
use super::{Address, Stop, Stream, Transport};

/// Idle time before the first keepalive probe, and interval between probes.
const KEEPALIVE: Duration = Duration::from_secs(10);

const SECOND: Duration = Duration::from_secs(1);

/// Longest retransmission interval that the kernel accepts, and its default.
const LONGEST_RETRANSMISSION: Duration = Duration::from_secs(120);

/// Number of unanswered keepalive probes after which the peer counts as lost.
const KEEPALIVE_PROBES: u32 = 3;

/// Value of TCP_USER_TIMEOUT in [`notice_loss`], in milliseconds: the time that three keepalive probes take.
const USER_TIMEOUT_MS: u32 = 30_000;

/// Maximum number of unsent bytes in a socket: half a packet of method none. With 64 KiB the source woke up more often and
/// needed a fifth more CPU time. Measured with method none over loopback.
pub const MAX_UNSENT: u32 = 256 << 10;

/// TCP over IPv4 or IPv6.
pub(super) struct Tcp;

impl Transport for Tcp {
    fn scheme(&self) -> &'static str {
        "tcp"
    }

    fn form(&self) -> &'static str {
        "tcp:HOST:PORT"
    }

    fn expected(&self) -> &'static str {
        "tcp:HOST:PORT, with a port up to 65535"
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

/// Connects to the first address of the host that accepts. Each attempt may take `timeout`.
pub(super) fn connect(
    host: &str,
    port: u16,
    timeout: Duration,
    stop: Stop<'_>,
) -> io::Result<Stream> {
    let host = if host.is_empty() { "localhost" } else { host };
    // A name of this host must resolve only to loopback addresses, because connections to this host may go without TLS.
    let stays = super::is_this_host(host);
    let addresses = (host, port).to_socket_addrs()?;
    let addresses = addresses.filter(|address| !stays || address.ip().to_canonical().is_loopback());
    let stream = connect_to_first(Schedule::new(addresses), host, timeout, stop)?;
    prepare(&stream)?;
    Ok(stream.into())
}

/// A TCP connection attempt in progress.
struct Attempt {
    address: SocketAddr,
    socket: OwnedFd,
    deadline: Instant,
}

/// Tries the addresses of `host` in the order of `schedule`, until one accepts.
fn connect_to_first(
    mut schedule: Schedule,
    host: &str,
    timeout: Duration,
    stop: Stop<'_>,
) -> io::Result<TcpStream> {
    let mut attempts: Vec<Attempt> = Vec::new();
    let mut failed = Failed::default();
    loop {
        let now = Instant::now();
        while let Some(address) = schedule.next(now) {
            match begin(&address) {
                Ok(socket) => attempts.push(Attempt {
                    address,
                    socket,
                    deadline: now + timeout,
                }),
                Err(error) => {
                    failed.add(address, error);
                    schedule.failed();
                }
            }
        }
        if attempts.is_empty() {
            return Err(failed.into_error(host));
        }
        let left = attempts.iter().map(|attempt| attempt.deadline);
        let left = left.map(|deadline| deadline.saturating_duration_since(now));
        let wait = left.chain(schedule.wait(now)).min().unwrap_or_default();
        let answered = wait_for_any(&attempts, wait, stop)?;
        for index in (0..attempts.len()).rev() {
            let outcome = if answered[index] {
                sockopt::socket_error(&attempts[index].socket)?.map_err(io::Error::from)
            } else if Instant::now() >= attempts[index].deadline {
                Err(io::Error::new(
                    io::ErrorKind::TimedOut,
                    format!("no answer within {timeout:?}"),
                ))
            } else {
                continue;
            };
            let attempt = attempts.remove(index);
            match outcome {
                Ok(()) => {
                    let stream = TcpStream::from(attempt.socket);
                    stream.set_nonblocking(false)?;
                    return Ok(stream);
                }
                Err(error) => {
                    failed.add(attempt.address, error);
                    schedule.failed();
                }
            }
        }
    }
}

/// Starts to connect to `address`, without waiting for the end of the attempt.
fn begin(address: &SocketAddr) -> io::Result<OwnedFd> {
    check_zone(address)?;
    let family = match address {
        SocketAddr::V4(_) => AddressFamily::INET,
        SocketAddr::V6(_) => AddressFamily::INET6,
    };
    let flags = SocketFlags::CLOEXEC | SocketFlags::NONBLOCK;
    let socket = socket_with(family, SocketType::STREAM, flags, None)?;
    match rustix::net::connect(&socket, address) {
        Ok(()) | Err(Errno::INPROGRESS) => Ok(socket),
        Err(errno) => Err(errno.into()),
    }
}

/// Waits until at least one attempt has ended. Returns one value for each attempt: true if the attempt has ended.
fn wait_for_any(attempts: &[Attempt], time: Duration, stop: Stop<'_>) -> io::Result<Vec<bool>> {
    let polled = attempts.iter();
    let polled = polled.map(|attempt| PollFd::new(&attempt.socket, PollFlags::OUT));
    let mut polled: Vec<_> = polled.collect();
    stop.poll(&mut polled, time)?;
    let ended = polled[..attempts.len()]
        .iter()
        .map(|one| !one.revents().is_empty());
    Ok(ended.collect())
}

/// Sets the socket options of a connection.
pub(super) fn prepare(stream: &TcpStream) -> io::Result<()> {
    // One call writes a whole packet. If the kernel waited for more data to fill a segment, it would only add to the downtime.
    stream.set_nodelay(true)?;
    // With this limit the destination of method none on the same host needs a tenth less CPU time, and the source no more.
    // Without the limit the source fills the queue, and the destination spends its time with emptying it. If the kernel
    // refuses, the settings do not change.
    let _ = limit_unsent(stream.as_fd(), MAX_UNSENT);
    // A host that loses power closes no connection, so keepalive is needed. TCP_USER_TIMEOUT is not used: it would also end a
    // connection whose peer reads slowly (see the engine's `liveness`).
    keep_alive(stream)
}

fn keep_alive(stream: &TcpStream) -> io::Result<()> {
    sockopt::set_socket_keepalive(stream, true)?;
    sockopt::set_tcp_keepidle(stream, KEEPALIVE)?;
    sockopt::set_tcp_keepintvl(stream, KEEPALIVE)?;
    sockopt::set_tcp_keepcnt(stream, KEEPALIVE_PROBES)?;
    Ok(())
}

/// Configures the keepalive for the silence limit `limit`; zero disables it. The kernel ends the connection somewhat after the
/// limit. So the process first reports the lost peer, with the name of its host.
pub(super) fn set_silence_limit(stream: &TcpStream, limit: Duration) -> io::Result<()> {
    if limit.is_zero() {
        return Ok(sockopt::set_socket_keepalive(stream, false)?);
    }
    // By default the kernel doubles the retransmission interval: it sends nothing between 25 s and 51 s. If an outage ends in
    // this time, a live peer could not answer before the limit of 40 s. Kernels before 6.15 refuse the setting, and keep the
    // default.
    let interval = (limit / 8).clamp(SECOND, LONGEST_RETRANSMISSION);
    if let Ok(interval) = u32::try_from(interval.as_millis()) {
        let _ = limit_retransmission_interval(stream.as_fd(), interval);
    }
    // Idle time and each of the three probes take a quarter of the limit, in whole seconds, up to the kernel's maximum of
    // 32767.
    let quarter = (limit / (KEEPALIVE_PROBES + 1)).clamp(SECOND, Duration::from_secs(32_766));
    sockopt::set_tcp_keepidle(stream, quarter)?;
    sockopt::set_tcp_keepintvl(stream, quarter + SECOND)?;
    Ok(())
}

/// Makes the kernel end the connection if data is not acknowledged for [`USER_TIMEOUT_MS`]. Keepalive probes are sent only
/// while no data waits for an acknowledgment. Otherwise the kernel would detect a lost peer after 15 minutes (tcp_retries2).
pub(super) fn notice_loss(stream: &TcpStream) {
    // If the kernel refuses, the settings do not change.
    let _ = keep_alive(stream);
    let _ = sockopt::set_tcp_user_timeout(stream, USER_TIMEOUT_MS);
}

/// Length of the accept queue; the limit of Linux since 5.4 (net.core.somaxconn).
const BACKLOG: i32 = 4096;

pub(crate) fn listen(host: &str, port: u16) -> io::Result<TcpListener> {
    // An empty host means all addresses: IPv6 and IPv4, or only IPv4 if the kernel has no IPv6.
    let listener = if host.is_empty() {
        TcpListener::bind(("::", port)).or_else(|_| TcpListener::bind(("0.0.0.0", port)))?
    } else {
        let addresses: Vec<_> = (host, port).to_socket_addrs()?.collect();
        addresses.iter().try_for_each(check_zone)?;
        TcpListener::bind(addresses.as_slice())?
    };
    // The standard library's queue of 128 can be filled by unauthenticated clients. The kernel would then drop a SYN, and a
    // source would wait for seconds.
    rustix::net::listen(&listener, BACKLOG)?;
    Ok(listener)
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn a_second_address_is_tried_while_the_first_one_does_not_answer() {
        let listener = TcpListener::bind("127.0.0.1:0").unwrap();
        let there = listener.local_addr().unwrap();
        // A listener with a full accept queue does not answer a SYN.
        let full = socket_with(
            AddressFamily::INET6,
            SocketType::STREAM,
            SocketFlags::CLOEXEC,
            None,
        )
        .unwrap();
        rustix::net::bind(&full, &"[::1]:0".parse::<SocketAddr>().unwrap()).unwrap();
        rustix::net::listen(&full, 0).unwrap();
        let silent = TcpListener::from(full);
        let silent = (silent.local_addr().unwrap(), silent);
        let _only = TcpStream::connect(silent.0).unwrap();
        let schedule = Schedule::new([silent.0, there]);
        let never = Duration::from_secs(600);
        let stream = connect_to_first(schedule, "name", never, Stop::NEVER).unwrap();
        assert_eq!(stream.peer_addr().unwrap(), there);

        let schedule = Schedule::new([silent.0]);
        let error = connect_to_first(schedule, "name", Duration::from_millis(20), Stop::NEVER);
        let error = error.unwrap_err();
        assert_eq!(error.kind(), io::ErrorKind::TimedOut);
        let silent = silent.0;
        assert_eq!(
            error.to_string(),
            format!("{silent} (this host): no answer within 20ms")
        );
        let schedule = Schedule::new([silent]);
        let stop = Stop {
            wake_fd: None,
            when: &|| true,
        };
        let error = connect_to_first(schedule, "name", never, stop).unwrap_err();
        assert_eq!(error.kind(), io::ErrorKind::Interrupted);
    }

    #[test]
    fn a_connection_with_loss_detection_does_not_wait_for_the_kernel() {
        let listener = TcpListener::bind("127.0.0.1:0").unwrap();
        let stream = TcpStream::connect(listener.local_addr().unwrap()).unwrap();
        prepare(&stream).unwrap();
        assert_eq!(sockopt::tcp_user_timeout(&stream).unwrap(), 0);
        super::super::Stream::from(stream.try_clone().unwrap()).notice_loss();
        assert_eq!(sockopt::tcp_user_timeout(&stream).unwrap(), USER_TIMEOUT_MS);
    }

    #[test]
    fn the_kernel_closes_an_idle_connection_after_the_silence_limit() {
        let listener = TcpListener::bind("127.0.0.1:0").unwrap();
        let stream = TcpStream::connect(listener.local_addr().unwrap()).unwrap();
        prepare(&stream).unwrap();
        let timeout = || {
            let interval = sockopt::tcp_keepintvl(&stream).unwrap();
            sockopt::tcp_keepidle(&stream).unwrap() + KEEPALIVE_PROBES * interval
        };
        for seconds in [1, 5, 40, 86_400] {
            let limit = Duration::from_secs(seconds);
            set_silence_limit(&stream, limit).unwrap();
            assert!(timeout() > limit, "{limit:?}");
            assert!(timeout() <= limit + 7 * SECOND, "{limit:?}");
        }
        set_silence_limit(&stream, Duration::ZERO).unwrap();
        assert!(!sockopt::socket_keepalive(&stream).unwrap());
        notice_loss(&stream);
        assert!(sockopt::socket_keepalive(&stream).unwrap());
        assert_eq!(timeout(), 4 * KEEPALIVE);
    }
}

//! Tunnels: each connection is copied unchanged to the other host. Used for byte streams other than migrations, and for hosts
//! without an agent.

use std::io::Write;
use std::sync::atomic::{AtomicU64, AtomicUsize, Ordering};
use std::thread;
use std::time::{Duration, Instant};

use hotlift::Listener;
use hotlift::Liveness;
use hotlift::control::SharedRate;
use hotlift::relay::RelayProgress;
use hotlift::transport::{Stream, carry};
use rustix::event::{PollFd, PollFlags};

use crate::agent::Agent;
use crate::config::LogLevel;
use crate::error::CarryError;
use crate::session::Session;

/// Connection to the other host, and the bytes already read from it.
pub type RemoteEnd = (Stream, Vec<u8>);

/// Interval of progress reports.
const REPORT: Duration = Duration::from_millis(500);

/// Bytes that a session has carried so far.
#[derive(Default)]
struct Carried {
    /// Bytes to the other host.
    sent: AtomicU64,
    /// Bytes from the other host.
    received: AtomicU64,
}

impl Carried {
    fn progress(&self, session: &Session) -> RelayProgress {
        RelayProgress {
            elapsed: session.age(Instant::now()),
            sent_bytes: self.sent.load(Ordering::Relaxed),
            received_bytes: self.received.load(Ordering::Relaxed),
            ..RelayProgress::default()
        }
    }
}

/// Limits of the connections of a tunnel.
pub struct Limits<'a> {
    /// Rate limiter for all bytes that the agent sends to other hosts.
    pub rate: &'a SharedRate,
    /// Longest silence of either end of a connection; zero means the kernel's own limit.
    pub silence_timeout: Duration,
}

impl<'a> Limits<'a> {
    /// Returns the limits of `agent`'s current configuration.
    pub fn of(agent: &'a Agent) -> Self {
        Self {
            rate: &agent.shares.rate,
            silence_timeout: agent.config().silence_timeout.0,
        }
    }
}

/// Accepts the connections of `listener`, and copies each to a connection that `open` makes. Returns when all have ended.
/// Respects `limits` and the bandwidth share of `session`.
///
/// # Errors
/// The error of `open`, which also ends the running connections; a cancel; an error of the system.
pub fn carry_all(
    session: &Session,
    listener: &Listener,
    limits: &Limits<'_>,
    open: &dyn Fn() -> Result<RemoteEnd, CarryError>,
) -> Result<(), CarryError> {
    let live = AtomicUsize::new(0);
    let carried = Carried::default();
    let wake_fd = session
        .control
        .wake_fd()
        .map_err(CarryError::system("descriptor"))?;
    let outcome = thread::scope(|scope| {
        let (live, carried) = (&live, &carried);
        let mut report_at = Instant::now() + REPORT;
        let mut has_begun = false;
        let mut ends: Vec<CarriedConnection> = Vec::new();
        let outcome = loop {
            if session.control.is_cancelled() {
                break Err(CarryError::Cancelled);
            }
            let now = Instant::now();
            if now >= report_at {
                report_at = now + REPORT;
                session.record_progress(&carried.progress(session));
            }
            let next =
                end_silent(session, &mut ends, now).map_or(report_at, |at| at.min(report_at));
            // Read before the accept: when a connection ends, its thread first decrements this count, then wakes this thread.
            let is_over = has_begun && live.load(Ordering::Acquire) == 0;
            let near = match listener
                .accept(now)
                .map_err(CarryError::system("connection"))
            {
                Err(error) => break Err(error),
                Ok(Some(near)) => near.stream,
                // Connections that arrive later start another session.
                Ok(None) if is_over => break Ok(()),
                Ok(None) => {
                    let mut fds = vec![PollFd::new(listener, PollFlags::IN)];
                    let waited = wake_fd.poll(&mut fds, next.saturating_duration_since(now));
                    match waited.map_err(CarryError::system("wait")) {
                        Err(error) => break Err(error),
                        Ok(()) => continue,
                    }
                }
            };
            has_begun = true;
            let (far, begun) = match open() {
                Ok(far) => far,
                Err(error) => break Err(error),
            };
            if (&near).write_all(&begun).is_err() {
                continue;
            }
            session.log(LogLevel::Debug, "a connection is forwarded");
            let pair = std::sync::Arc::new((near, far));
            ends.push(CarriedConnection {
                pair: std::sync::Arc::downgrade(&pair),
                liveness: Liveness::new(limits.silence_timeout, [&pair.0, &pair.1].into_iter()),
            });
            for back in [false, true] {
                live.fetch_add(1, Ordering::AcqRel);
                let pair = std::sync::Arc::clone(&pair);
                let started = thread::Builder::new()
                    .name("agent/tunnel".to_owned())
                    .spawn_scoped(scope, move || {
                        let count = |of: &AtomicU64, bytes: &[u8]| {
                            // The length of a slice always fits u64.
                            of.fetch_add(bytes.len() as u64, Ordering::Relaxed);
                        };
                        match back {
                            true => carry(&pair.1, &pair.0, &mut |bytes| {
                                count(&carried.received, bytes);
                            }),
                            false => carry(&pair.0, &pair.1, &mut |bytes| {
                                let control = &session.control;
                                control.wait_for_rate(&session.rate, bytes.len());
                                control.wait_for_rate(limits.rate, bytes.len());
                                count(&carried.sent, bytes);
                            }),
                        };
                        live.fetch_sub(1, Ordering::AcqRel);
                        session.control.wake();
                    });
                if started.is_err() {
                    live.fetch_sub(1, Ordering::AcqRel);
                    pair_end(&ends);
                }
            }
        };
        if outcome.is_err() {
            pair_end(&ends);
        }
        outcome
    });
    session.record_progress(&carried.progress(session));
    outcome
}

/// A connection of the source and its connection to the other host; both close when no direction is open.
struct CarriedConnection {
    pair: std::sync::Weak<(Stream, Stream)>,
    liveness: Liveness,
}

/// Ends each connection whose other host is lost at `now`, and reports the longest stall to the session's control. Returns when
/// to call this function again; `None` without connections.
fn end_silent(
    session: &Session,
    ends: &mut Vec<CarriedConnection>,
    now: Instant,
) -> Option<Instant> {
    ends.retain(|end| end.pair.strong_count() > 0);
    let stalls = ends.iter_mut().filter_map(|end| {
        let pair = end.pair.upgrade()?;
        let found = end
            .liveness
            .poll([&pair.0, &pair.1].into_iter(), now, false);
        found.unwrap_or_else(|error| {
            session.log(LogLevel::Warning, &error.chain());
            pair.0.shutdown(std::net::Shutdown::Both);
            pair.1.shutdown(std::net::Shutdown::Both);
            None
        })
    });
    session
        .control
        .set_stall(stalls.max_by_key(|stall| stall.time));
    ends.iter().filter_map(|end| end.liveness.next(now)).min()
}

/// Closes all connections that the tunnel still carries.
fn pair_end(ends: &[CarriedConnection]) {
    for pair in ends.iter().filter_map(|end| end.pair.upgrade()) {
        pair.0.shutdown(std::net::Shutdown::Both);
        pair.1.shutdown(std::net::Shutdown::Both);
    }
}

#[cfg(test)]
mod tests {
    use std::cell::RefCell;
    use std::io::Read;

    use super::*;
    use crate::fixture::{admitted, connection, session, subject};
    use crate::messages::Kind;
    use crate::session::Direction;

    /// Time in which bytes without a rate limit certainly arrive.
    const ARRIVES: Duration = Duration::from_millis(300);

    #[test]
    fn a_tunnel_keeps_the_rates_and_counts_its_bytes() {
        // First the limit of all sessions, then the limit of the tunnel.
        for (whole, own) in [(1, 0), (0, 1)] {
            let rate = SharedRate::default();
            rate.set(whole);
            let (session, listener) = session(subject(1, Direction::Outgoing, Kind::Tunnel));
            session.rate.set(own);
            let (near, mut source) = admitted();
            let (far, mut server) = connection();
            session.deliver(near).unwrap();
            let mut bytes = [0; 1000];
            let (late, carries) = thread::scope(|scope| {
                let far = far;
                let carries = scope.spawn(|| {
                    let far = RefCell::new(Some(far));
                    let open = || {
                        far.take()
                            .map(|far| (far, Vec::new()))
                            .ok_or(CarryError::Silent)
                    };
                    let limits = Limits {
                        rate: &rate,
                        silence_timeout: Duration::ZERO,
                    };
                    carry_all(&session, &listener, &limits, &open)
                });
                // The first write delays only the next one, not itself.
                source.write_all(&bytes).unwrap();
                server.read_exact(&mut bytes).unwrap();
                source.write_all(&bytes).unwrap();
                server.set_read_timeout(Some(ARRIVES)).unwrap();
                let late = server.read(&mut bytes).map_err(|error| error.kind());
                server.write_all(&bytes).unwrap();
                source.read_exact(&mut bytes).unwrap();
                session.control.cancel();
                (late, carries.join().unwrap())
            });
            let what = format!("{whole} of the host, {own} of the tunnel");
            assert_eq!(late, Err(std::io::ErrorKind::WouldBlock), "{what}");
            assert!(matches!(carries, Err(CarryError::Cancelled)), "{carries:?}");
            let progress = session.snapshot().progress;
            assert!(progress.sent_bytes >= 1000, "{progress:?}");
            assert_eq!(progress.received_bytes, 1000);
        }
    }
}

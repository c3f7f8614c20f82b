//! TLS handshakes of accepted connections. Each has its own thread, since an unauthenticated peer may delay it for seconds.

use std::io::{self, Read, Write};
use std::os::fd::{AsFd, OwnedFd};
use std::os::unix::net::UnixStream;
use std::sync::Arc;
use std::sync::mpsc::{Receiver, Sender, channel};
use std::thread::{self, JoinHandle};
use std::time::{Duration, Instant};

use hotlift_tls::{Tls, TlsError};
use rustix::net::RecvFlags;

use super::admitted::Admitted;
use super::handshake_slots::HandshakeSlots;
use super::limits::HANDSHAKES;
use crate::transport::wait_readable;

/// Number of a handshake, and its result.
type Ended = (u64, Accepted);

/// A connection whose TLS handshake failed.
#[derive(Debug, thiserror::Error)]
#[error("a connection from {from}")]
pub struct Refused {
    /// IP address of the peer, or "this host" for a UNIX socket.
    pub from: String,
    /// Reason why the handshake failed.
    pub source: TlsError,
}

/// An admitted connection, or the reason for its refusal.
pub(super) type Accepted = Result<Admitted, Refused>;

/// Handshakes in progress.
pub(super) struct Handshakes {
    tls: Arc<Tls>,
    pub(super) slots: HandshakeSlots<RunningHandshake>,
    ended: (Sender<Ended>, Receiver<Ended>),
    /// Socket pair: the first is readable after the end of a handshake.
    wake: (UnixStream, UnixStream),
}

pub(super) struct RunningHandshake {
    /// Duplicate of the socket, whose shutdown interrupts the handshake.
    socket: OwnedFd,
    thread: JoinHandle<()>,
}

impl Handshakes {
    pub(super) fn new(tls: Arc<Tls>) -> io::Result<Self> {
        let wake = UnixStream::pair()?;
        wake.0.set_nonblocking(true)?;
        wake.1.set_nonblocking(true)?;
        Ok(Self {
            tls,
            slots: HandshakeSlots::new(),
            ended: channel(),
            wake,
        })
    }

    /// Returns the descriptor that is readable after the end of a handshake.
    pub(super) fn wake(&self) -> &UnixStream {
        &self.wake.0
    }

    /// Starts the handshake of `one` in a new thread. Must be called only if a slot is available.
    ///
    /// # Errors
    /// If the system has no file descriptor or thread left.
    pub(super) fn begin(&mut self, one: Admitted, now: Instant) -> io::Result<()> {
        let Admitted { stream, since, .. } = one;
        if let Some(oldest) = self.slots.make_room(now) {
            oldest.end();
        }
        let number = self.slots.number();
        let socket = rustix::io::dup(&stream)?;
        let from = stream.peer_host();
        let (tls, ended) = (Arc::clone(&self.tls), self.ended.0.clone());
        let wake = self.wake.1.try_clone()?;
        let thread = thread::Builder::new()
            .name("tls/accept".to_owned())
            .spawn(move || {
                let from = stream.peer_host();
                let socket = rustix::io::dup(&stream);
                let secured = stream.accept_secured(&tls).map_err(|source| {
                    if let Ok(socket) = &socket {
                        linger(socket);
                    }
                    Refused { from, source }
                });
                let admitted = secured.map(|stream| Admitted::new(stream, since));
                let _ = ended.send((number, admitted));
                // If the wake socket is full, the reader wakes up in any case.
                let _ = (&wake).write(&[0]);
            })?;
        self.slots
            .take(number, from, since, RunningHandshake { socket, thread });
        Ok(())
    }

    /// Returns the results of the handshakes that have finished since the last call.
    pub(super) fn take_ended(&mut self) -> Vec<Accepted> {
        let mut bytes = [0; HANDSHAKES];
        while matches!((&self.wake.0).read(&mut bytes), Ok(1..)) {}
        let mut ended = Vec::new();
        while let Ok((number, accepted)) = self.ended.1.try_recv() {
            match self.slots.free(number) {
                Some(handshake) => drop(handshake.thread.join()),
                // The handshake succeeded, but was interrupted for a new connection, so its socket is shut down.
                None if accepted.is_ok() => continue,
                None => {}
            }
            ended.push(accepted);
        }
        ended
    }
}

impl RunningHandshake {
    /// Interrupts the handshake, and waits for its thread.
    fn end(self) {
        let _ = rustix::net::shutdown(&self.socket, rustix::net::Shutdown::Both);
        let _ = self.thread.join();
    }
}

impl Drop for Handshakes {
    fn drop(&mut self) {
        self.slots.free_all().for_each(RunningHandshake::end);
    }
}

/// Maximum time to wait until a refused peer has read the reason.
const READING: Duration = Duration::from_millis(500);

/// Waits until the peer of a refused connection has read the reason. Without the wait, closing a socket with unread data would
/// discard the reason.
fn linger(socket: &OwnedFd) {
    let deadline = Instant::now() + READING;
    let _ = rustix::net::shutdown(socket, rustix::net::Shutdown::Write);
    let mut unread = [0; 4096];
    loop {
        let left = deadline.saturating_duration_since(Instant::now());
        if left.is_zero() || !wait_readable(socket.as_fd(), left).unwrap_or(false) {
            return;
        }
        match rustix::net::recv(socket, &mut unread, RecvFlags::DONTWAIT) {
            Ok((_, 1..)) => {}
            _ => return,
        }
    }
}

#[cfg(test)]
mod tests {
    use hotlift_testkit::pki::Pki;

    use super::*;

    #[test]
    fn a_stalled_handshake_is_evicted_for_the_next() {
        let mut handshakes = Handshakes::new(Pki::new().tls("localhost")).unwrap();
        let now = Instant::now();
        let long_ago = now.checked_sub(Duration::from_secs(60)).unwrap();
        let mut others = Vec::new();
        for number in 0..=HANDSHAKES {
            assert!(handshakes.slots.has_room(now));
            let (here, there) = UnixStream::pair().unwrap();
            others.push(there);
            let since = if number == 0 { long_ago } else { now };
            let one = Admitted::new(here.into(), since);
            handshakes.begin(one, now).unwrap();
        }
        let ended = handshakes.take_ended();
        assert!(matches!(ended[..], [Err(_)]));
        assert!(!handshakes.slots.has_room(now), "all others are new");
    }
}

//! Graceful close by a destination: sends the reason of a failure, and ends the connections so that the source can read it.
//!
//! If a socket is closed while bytes are unread, the kernel resets the connection, and the reset may discard the reason. So
//! first only the sending direction is closed. Incoming bytes are read and dropped until the source closes, too.

use std::io::Write;
use std::net::Shutdown;
use std::time::{Duration, Instant};

use hotlift_net::transport::Stream;
use hotlift_wire::return_path::ReturnMessage;
use rustix::event::{PollFd, PollFlags, Timespec, poll};
use rustix::io::Errno;
use rustix::net::{RecvFlags, recv};

use crate::error::MigrationError;

/// Time limit for the source to close its connections.
const LINGER: Duration = Duration::from_secs(2);

/// Time limit for a QEMU to close its multifd channels after the end of its main channel. QEMU first ends its current round.
const CHANNELS_CLOSE: Duration = Duration::from_secs(5);

/// Maximum count of bytes that one read of a channel drops.
const DROPPED: usize = 64 << 10;

/// Sends `reason` on each of `streams`. The source must be a Hotlift.
pub(crate) fn send_reason(streams: &[&Stream], reason: &str) {
    let mut words = Vec::new();
    for message in [ReturnMessage::ErrorText(reason), ReturnMessage::Shut(1)] {
        if message.encode(&mut words).is_err() {
            return;
        }
    }
    for mut stream in streams.iter().copied() {
        let _ = stream.write_all(&words);
    }
}

/// Sends a Hotlift source the reason of its rejection on each of `streams`, and closes them.
pub(crate) fn refuse(streams: &[&Stream], error: &MigrationError) {
    send_reason(streams, &error.chain());
    close(streams);
}

/// Closes `streams`, after the source has had time to read the last messages: at most [`LINGER`].
pub(crate) fn close(streams: &[&Stream]) {
    close_within(streams, LINGER);
}

/// Closes a QEMU's `main` channel. Then reads and drops the content of the multifd `channels`, until QEMU closes them.
///
/// If a QEMU finds a multifd channel closed at a sync point, it may wait forever for that channel's thread. (QEMU 7.2 did so in
/// 6 of 160 saves that were rejected at their start.) Then the migration never ends, and this QEMU accepts no other migration.
/// If only main is closed, QEMU ends the round, finds the error, and closes the multifd channels itself.
pub(crate) fn leave_qemu(main: &Stream, channels: &[Stream]) {
    main.cut();
    let deadline = Instant::now() + CHANNELS_CLOSE;
    let mut open: Vec<_> = channels.iter().collect();
    let mut dropped = vec![0; DROPPED];
    while !open.is_empty() {
        let Some(left) = deadline.checked_duration_since(Instant::now()) else {
            return;
        };
        let mut fds: Vec<_> = open
            .iter()
            .map(|stream| PollFd::new(*stream, PollFlags::IN))
            .collect();
        match poll(&mut fds, Timespec::try_from(left).ok().as_ref()) {
            Ok(_) | Err(Errno::INTR) => {}
            Err(_) => return,
        }
        let ready: Vec<_> = fds.iter().map(|fd| !fd.revents().is_empty()).collect();
        let mut ready = ready.into_iter();
        open.retain(|stream| {
            // Bytes within TLS records are dropped, too.
            !ready.next().unwrap_or(false)
                || match recv(*stream, &mut dropped[..], RecvFlags::DONTWAIT) {
                    Ok((_, length)) => length > 0,
                    Err(errno) => matches!(errno, Errno::AGAIN | Errno::INTR),
                }
        });
    }
}

fn close_within(streams: &[&Stream], linger: Duration) {
    for stream in streams {
        stream.shutdown(Shutdown::Write);
    }
    let deadline = Instant::now() + linger;
    for stream in streams {
        match drain(stream, deadline) {
            true => stream.shutdown(Shutdown::Both),
            false => stream.cut(),
        }
    }
}

/// Reads and drops incoming bytes until the source closes. Returns false if the source has not closed before `deadline`.
fn drain(stream: &Stream, deadline: Instant) -> bool {
    let mut dropped = [0; 16 << 10];
    while let Some(left) = deadline.checked_duration_since(Instant::now()) {
        if !matches!(stream.wait_readable(left), Ok(true)) {
            return false;
        }
        match stream.read_some(&mut dropped) {
            Ok(0) => return true,
            Ok(_) => {}
            Err(_) => return false,
        }
    }
    false
}

#[cfg(test)]
mod tests {
    use std::io::{ErrorKind, Read};
    use std::net::{TcpListener, TcpStream};

    use super::*;

    /// Longer than a close takes on loopback, and less than `tcp_fin_timeout`.
    const CLOSE_TIMEOUT: Duration = Duration::from_secs(20);

    #[test]
    fn a_source_with_a_full_send_buffer_learns_of_the_close_at_once() {
        sees_close_after(&|ours| close_within(&[ours], Duration::ZERO));
        sees_close_after(&Stream::cut);
    }

    /// Closes a connection whose source has sent more than the buffer can store. `shut` ends reading first.
    fn sees_close_after(shut: &dyn Fn(&Stream)) {
        let listener = TcpListener::bind("127.0.0.1:0").unwrap();
        // The smallest buffer: the first bytes fill it, and the window is exactly 0.
        rustix::net::sockopt::set_socket_recv_buffer_size(&listener, 1).unwrap();
        let mut source = TcpStream::connect(listener.local_addr().unwrap()).unwrap();
        let ours = Stream::from(listener.accept().unwrap().0);
        source.set_nonblocking(true).unwrap();
        // Bytes are acknowledged, or wait forever for room.
        while source.write(&[0; 4096]).is_ok() || !is_full(&source) {}
        // With reading shut down, and then with the queue drained by a close.
        shut(&ours);
        close_within(&[&ours], LINGER);
        drop(ours);
        source.set_nonblocking(false).unwrap();
        source.set_read_timeout(Some(CLOSE_TIMEOUT)).unwrap();
        let mut ended = source.read(&mut [0]);
        if matches!(ended, Ok(0)) {
            // Only this direction has ended; the source does not treat this as the end of its own direction.
            source.set_write_timeout(Some(CLOSE_TIMEOUT)).unwrap();
            ended = std::iter::repeat_with(|| source.write(&[0; 4096]))
                .find(Result::is_err)
                .unwrap();
        }
        let kind = ended.unwrap_err().kind();
        assert!(
            matches!(kind, ErrorKind::ConnectionReset | ErrorKind::BrokenPipe),
            "{kind:?}"
        );
    }

    /// Returns true if the count of unacknowledged bytes stays constant: only bytes without room at the receiver are left.
    fn is_full(source: &TcpStream) -> bool {
        let stream = Stream::from(source.try_clone().unwrap());
        let before = stream.unacknowledged();
        std::thread::yield_now();
        before == stream.unacknowledged()
    }
}

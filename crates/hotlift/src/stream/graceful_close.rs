//! The graceful close of a destination: why it gives up, and the end of its connections.
//!
//! Closing a socket with unread bytes in it resets the connection, and a reset may take the reason
//! with it. So only the sending half is closed at first, and what still comes is read and dropped
//! until the source has closed, too.

use std::io::Write;
use std::net::Shutdown;
use std::time::{Duration, Instant};

use hotlift_wire::return_path::ReturnMessage;

use crate::error::MigrationError;
use crate::transport::Stream;

/// How long the source is waited for.
const LINGER: Duration = Duration::from_secs(2);

/// Says `reason` on each of `streams`, whose source is a Hotlift.
pub(crate) fn say_reason(streams: &[&Stream], reason: &str) {
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

/// Tells a source that is a Hotlift, on each of `streams`, why it is refused, and closes them.
pub(crate) fn refuse(streams: &[&Stream], error: &MigrationError) {
    say_reason(streams, &error.chain());
    close(streams);
}

/// Closes `streams` after the source has had the time to read what was said.
pub(crate) fn close(streams: &[&Stream]) {
    for stream in streams {
        stream.shutdown(Shutdown::Write);
    }
    let deadline = Instant::now() + LINGER;
    let mut dropped = [0; 16 << 10];
    for stream in streams {
        while let Some(left) = deadline.checked_duration_since(Instant::now()) {
            let ready = stream.wait_readable(left);
            if !matches!(ready, Ok(true)) || !matches!(stream.read_some(&mut dropped), Ok(1..)) {
                break;
            }
        }
    }
    for stream in streams {
        stream.shutdown(Shutdown::Both);
    }
}

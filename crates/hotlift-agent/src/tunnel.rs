//! Bytes that are no migration stream, or go to a host without an agent: carried as they are, connection by connection.

use std::io::Write;
use std::sync::atomic::{AtomicUsize, Ordering};
use std::thread;
use std::time::Duration;

use hotlift::Listener;
use hotlift::transport::{Stream, carry};

use crate::config::LogLevel;
use crate::error::CarryError;
use crate::session::Session;

/// How often it is looked for another connection, and for a cancel, while some are carried.
const LOOK: Duration = Duration::from_millis(100);

/// The other end of a connection, and what was read of it already.
pub type Far = (Stream, Vec<u8>);

/// Carries each connection of `listener` to what `open` makes for it, one after the other as they came, until none is left.
///
/// # Errors
/// Why the other end of one could not be opened; those that are carried have ended then.
pub fn carry_all(
    session: &Session,
    listener: &Listener,
    open: &dyn Fn() -> Result<Far, CarryError>,
) -> Result<(), CarryError> {
    let live = AtomicUsize::new(0);
    thread::scope(|scope| {
        let live = &live;
        let mut ends: Vec<std::sync::Weak<(Stream, Stream)>> = Vec::new();
        let outcome = loop {
            if session.control.is_cancelled() {
                break Err(CarryError::Cancelled);
            }
            let accepted = listener.accept(LOOK);
            let accepted = accepted.map_err(|source| CarryError::System {
                what: "connection",
                source,
            });
            let near = match accepted {
                Err(error) => break Err(error),
                Ok(Some(near)) => near,
                // Nobody is given to it any more once this has ended, and the next begins another one.
                Ok(None) if live.load(Ordering::Acquire) == 0 => break Ok(()),
                Ok(None) => continue,
            };
            let (far, begun) = match open() {
                Ok(far) => far,
                Err(error) => break Err(error),
            };
            if (&near).write_all(&begun).is_err() {
                continue;
            }
            session.say(LogLevel::Debug, "a connection is carried");
            let pair = std::sync::Arc::new((near, far));
            ends.retain(|pair| pair.strong_count() > 0);
            ends.push(std::sync::Arc::downgrade(&pair));
            for back in [false, true] {
                live.fetch_add(1, Ordering::AcqRel);
                let pair = std::sync::Arc::clone(&pair);
                let started = thread::Builder::new()
                    .name("agent/tunnel".to_owned())
                    .spawn_scoped(scope, move || {
                        match back {
                            true => carry(&pair.1, &pair.0, &mut |_| ()),
                            false => carry(&pair.0, &pair.1, &mut |_| ()),
                        };
                        live.fetch_sub(1, Ordering::AcqRel);
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
    })
}

/// Ends connections that are carried.
fn pair_end(ends: &[std::sync::Weak<(Stream, Stream)>]) {
    for pair in ends.iter().filter_map(std::sync::Weak::upgrade) {
        pair.0.shutdown(std::net::Shutdown::Both);
        pair.1.shutdown(std::net::Shutdown::Both);
    }
}

//! A stream that cannot be carried page by page goes through byte for byte: postcopy, and devices
//! other than RAM that send state while the guest runs.
//!
//! Every connection of the source becomes one to the other side, with bytes both ways, and each end is
//! passed on. Nothing is compressed, and EOF is not held back.

use std::io::Write;
use std::net::Shutdown;
use std::sync::atomic::{AtomicBool, Ordering};
use std::thread;

use super::accept::Arrivals;
use super::main_input::MainInput;
use super::session::{Call, Carried};
use super::{RelaySettings, closed};
use crate::control::{Control, Status};
use crate::error::{Channel, MigrationError};
use crate::figures::{Counters, Counts, ThreadTimes};
use crate::threads::spawn;
use crate::transport::{Address, Stream};

/// Bytes copied at once.
const COPY: usize = 256 << 10;

/// Passes the stream on whose first bytes are in `input`, because of `why`.
pub(super) fn run(
    mut arrivals: Arrivals<'_>,
    input: &MainInput<'_>,
    to: &Address,
    settings: &RelaySettings,
    control: &Control,
    why: String,
) -> Result<Carried, MigrationError> {
    if arrivals.has_channels() {
        return Err(MigrationError::Protocol {
            channel: Channel::Main,
            got: format!("a stream with multifd that cannot be taken apart ({why})"),
            doing: "opening the migration (switch multifd off on the source, or migrate without the relay)",
        });
    }
    let timeout = settings.outgoing.handshake_timeout;
    let since = arrivals.since;
    let first = to.connect(timeout)?;
    (&first)
        .write_all(input.everything())
        .map_err(|source| broken(source, "sending to the destination"))?;
    control.set_status(Status::Active);
    let counters = (Counters::default(), Counters::default());
    counters.0.add_bytes(input.everything().len());
    counters.1.add_bytes(input.everything().len());
    let threads = ThreadTimes::default();
    let over = AtomicBool::new(false);
    let source = input.stream();
    let outcome = thread::scope(|scope| {
        let counters = &counters;
        let (threads, over) = (&threads, &over);
        spawn(scope, "relay/return".to_owned(), || {
            // Answers are in neither figure.
            copy(&first, source, &Counters::default(), None);
            threads.book("relay/return");
        })?;
        let forward = spawn(scope, "relay/main".to_owned(), || {
            let ended = copy(source, &first, &counters.0, Some(&counters.1));
            threads.book("relay/main");
            over.store(true, Ordering::Release);
            ended
        })?;
        // The preempt channel of postcopy comes late, and may say nothing for long.
        let mut extra = Vec::new();
        let call = Call::early(control);
        let outcome = loop {
            if let Err(error) = call.check() {
                break Err(error);
            }
            if over.load(Ordering::Acquire) {
                break Ok(());
            }
            match arrivals.another() {
                Ok(None) => {}
                Err(error) => break Err(error),
                Ok(Some(stream)) => match to.connect(timeout) {
                    Err(error) => break Err(error.into()),
                    Ok(other) => {
                        let pair = std::sync::Arc::new((stream, other));
                        for (name, back) in [("relay/extra", false), ("relay/extra_r", true)] {
                            let ends = std::sync::Arc::clone(&pair);
                            spawn(scope, name.to_owned(), move || {
                                let (a, b) = if back {
                                    (&ends.1, &ends.0)
                                } else {
                                    (&ends.0, &ends.1)
                                };
                                let count = if back { None } else { Some(&counters.1) };
                                let unread = Counters::default();
                                let received = if back { &unread } else { &counters.0 };
                                copy(a, b, received, count);
                            })?;
                        }
                        extra.push(pair);
                    }
                },
            }
        };
        if outcome.is_err() {
            source.shutdown(Shutdown::Both);
            first.shutdown(Shutdown::Both);
        }
        let whole = forward.join().unwrap_or(false);
        // The destination's last answers are on their way; its close ends the return thread.
        source.shutdown(Shutdown::Read);
        for pair in &extra {
            pair.0.shutdown(Shutdown::Both);
            pair.1.shutdown(Shutdown::Both);
        }
        outcome?;
        if whole { Ok(()) } else { Err(closed()) }
    });
    outcome?;
    Ok(Carried {
        since,
        received_bytes: counters.0.read().transferred_bytes,
        sent_bytes: counters.1.read().transferred_bytes,
        pages: Counts::default(),
        barriers: 0,
        machine: String::new(),
        method: "none",
        passed_through: Some(why),
        threads: threads.read(),
    })
}

/// Copies until the end of `from`, and ends `to`; false if either broke.
fn copy(from: &Stream, to: &Stream, received: &Counters, sent: Option<&Counters>) -> bool {
    let mut buffer = vec![0; COPY];
    loop {
        let read = match from.read_some(&mut buffer) {
            Ok(0) => {
                to.shutdown(Shutdown::Write);
                return true;
            }
            Ok(read) => read,
            Err(_) => break,
        };
        let mut out = to;
        if out.write_all(&buffer[..read]).is_err() {
            break;
        }
        received.add_bytes(read);
        if let Some(sent) = sent {
            sent.add_bytes(read);
        }
    }
    from.shutdown(Shutdown::Both);
    to.shutdown(Shutdown::Both);
    false
}

fn broken(source: std::io::Error, doing: &'static str) -> MigrationError {
    MigrationError::Connection {
        channel: Channel::Main,
        doing,
        source,
    }
}

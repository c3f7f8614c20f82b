//! Copies a stream that cannot be relayed page by page, byte for byte:
//!
//! - postcopy in layouts that `main_channel/set_up.rs` lists
//! - devices other than RAM that send state while the guest runs
//!
//! For each connection of the source, the relay opens a connection to the destination. It copies bytes in both directions, and
//! forwards the end of each direction. Nothing is compressed, and EOF is forwarded at once. `max-bandwidth` limits the source's
//! data.

use std::io::Write;
use std::net::Shutdown;
use std::sync::Arc;
use std::sync::atomic::{AtomicBool, AtomicUsize, Ordering};
use std::thread;
use std::time::{Duration, Instant};

use hotlift_net::transport::{Stream, carry};
use hotlift_wire::limits;
use hotlift_wire::multifd::Method;
use hotlift_wire::return_path::ReturnMessage;

use crate::control::Control;
use crate::ends::file::FileError;
use crate::ends::request::{Outgoing, Request};
use crate::ends::stream_source::accept::QemuConnections;
use crate::ends::stream_source::candidates::NO_PREEMPT;
use crate::error::{Channel, MigrationError, printable};
use crate::figures::{Counters, Counts};
use crate::life::LONG;
use crate::life::threads::{ThreadTimes, spawn};
use crate::liveness::Liveness;
use crate::options::StreamOptions;
use crate::pacing::Pacer;
use crate::pipe::hooks::{RelayProgress, SourceStream};
use crate::pipe::session::{Relayed, WaitCheck};
use crate::pipe::watch::REPORT;
use crate::remote::Remote;
use crate::status::Status;
use crate::stream::graceful_close;
use crate::stream::main_recv::WaitCondition;
use crate::stream::multifd_send::connect_with;

/// Maximum number of additional connections: QEMU has one, the preempt channel of postcopy.
const MAX_EXTRA: usize = 4;

/// The same limit, including connections that the source has closed and the destination has not.
const MAX_EXTRA_OPEN: usize = 16;

/// Pause after a connection that could not be accepted.
const RETRY: Duration = Duration::from_millis(100);

/// Number of last bytes kept of each direction: the heads of two messages, the longest error text, and the value of a SHUT.
const LAST: usize = 2 * 4 + limits::ERROR_TEXT + 4;

/// Last message of a destination that has the guest: SHUT(0).
const SHUT_0: [u8; 8] = [0, 1, 0, 4, 0, 0, 0, 0];

/// Name of an awaited message: a QEMU answers the first PING as soon as it reads its stream.
const ANSWER: &str = "the destination's first answer to a stream that is passed through unread (this stream has no multifd \
                      channels, for which a QEMU with multifd on waits: turn multifd off at the destination QEMU)";

/// A source whose stream is passed through.
pub(crate) struct PassedThroughSource<'a> {
    pub main: &'a Stream,
    /// Bytes already read from main.
    pub first_bytes: &'a [u8],
    /// Preempt channel, if the source has connected it before it sent more bytes on main.
    pub preempt: Option<Stream>,
    /// Reason why the stream cannot be decoded.
    pub why: String,
    /// True if the first bytes ask the destination for an answer.
    pub is_answered: bool,
}

/// Copies the stream of `source`, which connected at `since`.
pub(crate) fn run(
    arrivals: QemuConnections<'_>,
    source: PassedThroughSource<'_>,
    request: Request<'_>,
    since: Instant,
) -> Result<Relayed, MigrationError> {
    let main = source.main;
    carry_all(arrivals, source, request, since).map_err(|refused| match refused {
        NotPassedThrough::BeforeTheFirstByte(error) => {
            // A relay receives the reason, and a QEMU a message that ends its migration.
            graceful_close::refuse(&[main], &error);
            error
        }
        NotPassedThrough::Later(error) => {
            main.reset_on_drop();
            error
        }
    })
}

/// Error of a stream to pass through, by the time when it occurred.
enum NotPassedThrough {
    /// Error before the first byte was sent to the destination.
    BeforeTheFirstByte(MigrationError),
    Later(MigrationError),
}

impl From<MigrationError> for NotPassedThrough {
    fn from(error: MigrationError) -> Self {
        Self::Later(error)
    }
}

/// Returns the error for a QEMU whose `options` do not fit a stream without channels that is passed through because of `why`.
fn unfit(options: &StreamOptions, why: &str) -> Option<MigrationError> {
    let channels = options.channels();
    (channels > 0).then(|| MigrationError::Protocol {
        channel: Channel::Main,
        got: format!(
            "a stream without multifd channels that cannot be parsed ({why}), for a QEMU that waits for {channels} channels"
        ),
        doing: "opening the migration (turn multifd off at the destination QEMU too, and start its relay with --multifd off)",
    })
}

fn carry_all(
    mut arrivals: QemuConnections<'_>,
    source: PassedThroughSource<'_>,
    request: Request<'_>,
    since: Instant,
) -> Result<Relayed, NotPassedThrough> {
    let PassedThroughSource {
        main: source,
        first_bytes,
        preempt,
        why,
        is_answered,
    } = source;
    if arrivals.has_channels() {
        return Err(NotPassedThrough::BeforeTheFirstByte(
            MigrationError::Protocol {
                channel: Channel::Main,
                got: format!("a stream with multifd that cannot be parsed ({why})"),
                doing: "opening the migration (turn multifd off at both QEMUs, 'hotlift migrate --multifd off', or migrate \
                    without the relay)",
            },
        ));
    }
    let Request {
        outgoing: Outgoing::Address(to),
        settings,
        control,
        hooks,
    } = request
    else {
        return Err(MigrationError::from(FileError::CannotBeSaved { reason: why }).into());
    };
    if settings.to_qemu
        && let Some(error) = unfit(&settings.outgoing, &why)
    {
        return Err(NotPassedThrough::BeforeTheFirstByte(error));
    }
    let timeout = settings.limits.handshake_timeout;
    let to = &Remote::new(to, settings.outgoing_tls.clone());
    let connect = || {
        connect_with(
            settings.outgoing_pass.as_ref(),
            to,
            timeout,
            &control.dialing(),
        )
    };
    if let Some(on_source) = hooks.on_source {
        on_source(&SourceStream {
            channels: 0,
            method: Method::None.name(),
        });
    }
    let first = connect().map_err(NotPassedThrough::BeforeTheFirstByte)?;
    // Before the first byte: a QEMU 7.2 reads nothing before it also has the preempt channel.
    let mut extra = Vec::new();
    if let Some(stream) = preempt {
        extra.push(Arc::new((stream, connect()?)));
    }
    // EOF cannot be found in this stream, so the commit is reported at the start.
    if let Some(on_commit) = hooks.on_commit {
        on_commit();
    }
    control.set_status(Status::Active);
    let flow = Flow::new(control, &settings.outgoing);
    flow.received.add_bytes(first_bytes.len());
    let threads = ThreadTimes::default();
    let ended = AtomicUsize::new(0);
    let has_answered = AtomicBool::new(!is_answered);
    let answered_by = control.life().now() + timeout;
    let outcome = thread::scope(|scope| {
        let flow = &flow;
        let (threads, ended, has_answered) = (&threads, &ended, &has_answered);
        let backward = spawn(scope, "relay/return".to_owned(), || {
            let on_answer = |_: &[u8]| has_answered.store(true, Ordering::Release);
            let copied = copy(&first, source, &on_answer);
            threads.record_cpu_time("relay/return");
            ended.fetch_add(1, Ordering::AcqRel);
            control.life().wake();
            copied
        })?;
        let forward = spawn(scope, "relay/main".to_owned(), || {
            // Written in this thread, so that the main thread can end a write to a destination that reads nothing.
            let copied = match (&first).write_all(first_bytes) {
                Ok(()) => {
                    flow.sent.add_bytes(first_bytes.len());
                    copy(source, &first, &|bytes| flow.pass(bytes.len()))
                }
                Err(_) => {
                    source.shutdown(Shutdown::Both);
                    first.shutdown(Shutdown::Both);
                    CopyResult::default()
                }
            };
            threads.record_cpu_time("relay/main");
            ended.fetch_add(1, Ordering::AcqRel);
            control.life().wake();
            copied
        })?;
        // The preempt channel of postcopy arrives late, and may be silent for long.
        for pair in &extra {
            carry_both(scope, pair, flow)?;
        }
        let call = WaitCheck::early(control);
        let mut report_at = hooks.on_progress.map(|_| control.life().now() + REPORT);
        // The relay does not know whether the guest runs at the destination. Ending a connection to a lost host is safe in
        // every phase: each QEMU detects the end, and the kernel would end the connection later.
        let streams = || [&first, source].into_iter();
        let mut liveness = Liveness::new(settings.limits.silence_timeout, streams());
        let outcome = loop {
            if let Err(error) = call.check() {
                break Err(error);
            }
            if let Err(error) = liveness.poll_for(control, streams()) {
                break Err(error);
            }
            let now = control.life().now();
            if let Some(on_progress) = hooks.on_progress
                && report_at.is_some_and(|at| now >= at)
            {
                report_at = Some(now + REPORT);
                on_progress(&flow.progress(since));
            }
            if ended.load(Ordering::Acquire) == 2 {
                break Ok(());
            }
            let answer_at = (!has_answered.load(Ordering::Acquire)).then_some(answered_by);
            if answer_at.is_some_and(|at| now > at) {
                break Err(MigrationError::Timeout {
                    waiting_for: ANSWER.to_owned(),
                    waited: timeout,
                });
            }
            let deadlines = [report_at, answer_at, liveness.next(now)];
            let next = deadlines.into_iter().flatten().min();
            let wait = next.map_or(LONG, |next| next.saturating_duration_since(now));
            let another = arrivals.another(source, wait, None);
            // Drops connections that no thread copies any more. Connections of unknown clients end soon, and must not use up
            // the source's quota.
            extra.retain(|pair: &Arc<(Stream, Stream)>| Arc::strong_count(pair) > 1);
            let open = extra.iter().filter(|pair| !pair.0.is_hung_up()).count();
            let is_full = open >= MAX_EXTRA || extra.len() >= MAX_EXTRA_OPEN;
            match another {
                Ok(None) => {}
                // An unknown client's connection; the migration continues without it.
                Err(_) => thread::sleep(RETRY),
                Ok(Some(stream)) if stream.is_hung_up() => control.rejections().reject(NO_PREEMPT),
                Ok(Some(_)) if is_full => {
                    control
                        .rejections()
                        .reject("more connections than a passed-through stream has");
                }
                Ok(Some(stream)) => match connect() {
                    Err(_) => {}
                    Ok(other) => {
                        let pair = Arc::new((stream, other));
                        carry_both(scope, &pair, flow)?;
                        extra.push(pair);
                    }
                },
            }
        };
        if outcome.is_err() {
            source.shutdown(Shutdown::Both);
            first.shutdown(Shutdown::Both);
        }
        let (there, back) = (forward.join(), backward.join());
        for pair in &extra {
            pair.0.shutdown(Shutdown::Both);
            pair.1.shutdown(Shutdown::Both);
        }
        outcome?;
        let (there, back) = (there?, back?);
        if let Some(reason) = back.refusal() {
            return Err(MigrationError::Destination { reason });
        }
        // A destination that sends anything ends with SHUT(0) if it has the guest.
        let has_success = back.last.ends_with(&SHUT_0);
        let refused = !back.last.is_empty() && !has_success;
        // A source that received SHUT(0) may close with unread data, which ends its direction with a reset.
        if (back.is_whole && has_success) || (there.is_whole && !refused) {
            Ok(())
        } else {
            Err(MigrationError::main_closed())
        }
    });
    outcome?;
    Ok(Relayed {
        total: since.elapsed(),
        received_bytes: flow.received.read().transferred_bytes,
        sent_bytes: flow.sent.read().transferred_bytes,
        pages: Counts::default(),
        barriers: 0,
        machine: String::new(),
        method: "none",
        methods: Vec::new(),
        passed_through: Some(why),
        threads: threads.read(),
    })
}

/// Statistics and rate limit of the source's data. Answers are not included.
struct Flow<'a> {
    received: Counters,
    sent: Counters,
    pacer: Arc<Pacer>,
    control: &'a Control,
}

impl<'a> Flow<'a> {
    fn new(control: &'a Control, options: &StreamOptions) -> Self {
        Self {
            received: Counters::default(),
            sent: Counters::default(),
            pacer: control.steering().pacer(options),
            control,
        }
    }

    /// Waits until the rate limit permits `bytes` more bytes, and counts them. The limit also applies while the guest is
    /// paused, because the relay cannot see the pause.
    fn pass(&self, bytes: usize) {
        self.received.add_bytes(bytes);
        self.pacer.wait(bytes, self.control.life());
        self.sent.add_bytes(bytes);
    }

    fn progress(&self, since: Instant) -> RelayProgress {
        RelayProgress {
            elapsed: since.elapsed(),
            received_bytes: self.received.read().transferred_bytes,
            sent_bytes: self.sent.read().transferred_bytes,
            ..RelayProgress::default()
        }
    }
}

/// Copies bytes between the source's and the destination's end of an additional connection, in both directions.
fn carry_both<'scope, 'env>(
    scope: &'scope thread::Scope<'scope, 'env>,
    pair: &Arc<(Stream, Stream)>,
    flow: &'env Flow<'env>,
) -> Result<(), MigrationError> {
    for (name, back) in [("relay/extra", false), ("relay/extra_r", true)] {
        let ends = Arc::clone(pair);
        spawn(scope, name.to_owned(), move || {
            match back {
                true => copy(&ends.1, &ends.0, &|_| ()),
                false => copy(&ends.0, &ends.1, &|bytes| flow.pass(bytes.len())),
            };
            drop(ends);
            flow.control.life().wake();
        })?;
    }
    Ok(())
}

/// Result of copying one direction of a connection.
#[derive(Debug, Default)]
struct CopyResult {
    /// True if the direction ended with a regular close.
    is_whole: bool,
    /// Last bytes of the direction, at most [`LAST`].
    last: Vec<u8>,
}

impl CopyResult {
    /// Returns the error text, if the last messages are those of a relay that aborts the stream.
    fn refusal(&self) -> Option<String> {
        let starts = 0..self.last.len();
        starts.into_iter().find_map(|at| {
            let (message, length) = ReturnMessage::decode(&self.last[at..]).ok()?;
            let ReturnMessage::ErrorText(reason) = message else {
                return None;
            };
            let rest = &self.last[at + length..];
            let is_end = matches!(ReturnMessage::decode(rest), Ok((ReturnMessage::Shut(1), shut)) if shut == rest.len());
            is_end.then(|| printable(reason))
        })
    }
}

/// Copies bytes until `from` ends, and then ends `to`. Calls `each` with the copied bytes.
fn copy(from: &Stream, to: &Stream, each: &dyn Fn(&[u8])) -> CopyResult {
    let mut last = Vec::new();
    let is_whole = carry(from, to, &mut |bytes| {
        last.extend_from_slice(&bytes[bytes.len() - bytes.len().min(LAST)..]);
        let excess = last.len().saturating_sub(LAST);
        last.drain(..excess);
        each(bytes);
    });
    CopyResult { is_whole, last }
}

#[cfg(test)]
mod tests {
    use std::io::Read;

    use super::*;

    /// Time in which unlimited data arrives.
    const ARRIVES: Duration = Duration::from_millis(300);

    #[test]
    fn passed_through_bytes_keep_the_rate_limit_and_answers_are_exempt() {
        let slow = StreamOptions {
            max_bandwidth: 1,
            ..StreamOptions::default()
        };
        let control = Control::new();
        control.set_status(Status::Active);
        let flow = Flow::new(&control, &slow);
        let ((source, near), (far, destination)) =
            (Stream::pair().unwrap(), Stream::pair().unwrap());
        let mut bytes = [0; 1000];
        let (late, sent) = thread::scope(|scope| {
            scope.spawn(|| copy(&near, &far, &|bytes| flow.pass(bytes.len())));
            scope.spawn(|| copy(&far, &near, &|_| ()));
            // The first write delays the data after it.
            (&source).write_all(&bytes).unwrap();
            (&destination).read_exact(&mut bytes).unwrap();
            (&source).write_all(&bytes).unwrap();
            let late = destination.read_within(&mut bytes, ARRIVES);
            for _ in 0..2 {
                (&destination).write_all(&bytes).unwrap();
                (&source).read_exact(&mut bytes).unwrap();
            }
            let sent = flow.progress(Instant::now()).sent_bytes;
            control.life().close();
            source.shutdown(Shutdown::Both);
            destination.shutdown(Shutdown::Both);
            (late.map_err(|error| error.kind()), sent)
        });
        assert_eq!(late, Err(std::io::ErrorKind::TimedOut));
        assert_eq!(sent, 1000);
    }
}

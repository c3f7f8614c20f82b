//! The side that answers: a sink for some connections, and a measurement of this host on what arrived.

use std::io::{self, ErrorKind};
use std::net::IpAddr;
use std::sync::Arc;
use std::sync::atomic::{AtomicBool, AtomicU64, Ordering};
use std::thread;
use std::time::{Duration, Instant};

use hotlift::Address;
use hotlift::relay::Pass;
use hotlift::tls::Tls;
use hotlift::transport::{Acceptor, Stream};
use hotlift_console::conversation::{Conversation, ConversationError};
use hotlift_console::error::error_line;
use hotlift_console::progress::{bytes, rounded};
use hotlift_console::signals::{Interrupt, TICK};
use rustix::net::{RecvFlags, recv};

use super::{Answer, COUNTED, Decoder, GREETING, Host, Request, TOKEN, WARM_UP, boot};
use crate::cost::Work;
use crate::error::HostError;
use crate::measure::{self, timed};
use crate::sample::{PACKET, Packet, Sample};

/// Bytes of what arrives that are kept: a core of a Cascade Lake Xeon measures all methods on them in a second.
const KEPT: usize = 8 << 20;

/// Bytes that a connection is received into, in turn: more than a core's caches hold, as guest RAM is.
const RING: usize = 16 << 20;

/// How long a connection may take until it has said its token.
const SAY_TOKEN: Duration = Duration::from_secs(2);

/// Where the connections of a survey are taken.
pub struct At {
    /// The address that the conversation is with.
    pub here: IpAddr,
    /// The port; 0 is any that is free.
    pub port: u16,
    /// They are TLS ones.
    pub tls: Option<Arc<Tls>>,
}

/// Answers a request: measures the link, and then this host.
///
/// # Errors
/// If the other side is not heard or reached any more.
pub fn answer(
    conversation: &mut Conversation,
    request: &Result<Request, String>,
    at: At,
    interrupt: &Interrupt,
) -> Result<String, ConversationError> {
    let connections = match request {
        Ok(request) => usize::from(request.connections),
        Err(reason) => return refuse(conversation, reason),
    };
    let address = Address::Tcp {
        host: at.here.to_string(),
        port: at.port,
    };
    let listener = match address.listen() {
        Ok(listener) => listener,
        Err(error) => return refuse(conversation, &error_line(&error)),
    };
    let port = match listener.address()? {
        Address::Tcp { port, .. } => port,
        Address::Unix { .. } => 0,
    };
    let token: [u8; TOKEN] = fastrand::u128(..).to_be_bytes();
    conversation.say(&Answer::Ready {
        port,
        token: token.map(|byte| format!("{byte:02x}")).concat(),
        boot: boot(),
    })?;
    let acceptor = Acceptor::new(&listener, at.tls)?;
    let streams = accept(acceptor, connections, &conversation.pass(token), interrupt)?;
    // The port may be wanted for a migration.
    drop(listener);
    if streams.len() < connections {
        let reason = format!("{} connections came", streams.len());
        return refuse(conversation, &reason);
    }
    let burst = take(&streams, interrupt);
    drop(streams);
    if interrupt.is_raised() {
        return refuse(conversation, "it has something else to do now");
    }
    conversation.say(&burst.answer)?;
    match host(&burst.kept) {
        Ok(host) => conversation.say(&Answer::Measured(host))?,
        Err(error) => return refuse(conversation, &error.to_string()),
    }
    let rate = bytes(rounded(burst.bytes_per_second));
    Ok(format!("a survey: {rate}/s have arrived"))
}

/// Says that there is no survey.
///
/// # Errors
/// If the other side is not reached any more.
pub fn refuse(conversation: &mut Conversation, reason: &str) -> Result<String, ConversationError> {
    let reason = format!("the other host has not measured: {reason}");
    conversation.say(&Answer::Refused {
        reason: reason.clone(),
    })?;
    Ok(reason)
}

/// The first `count` connections that say the token.
fn accept(
    mut acceptor: Acceptor<'_>,
    count: usize,
    pass: &Pass,
    interrupt: &Interrupt,
) -> io::Result<Vec<Stream>> {
    let deadline = Instant::now() + GREETING;
    let mut streams = Vec::with_capacity(count);
    while streams.len() < count && Instant::now() < deadline && !interrupt.is_raised() {
        let accepted = acceptor.take()?;
        if accepted.is_empty() {
            thread::sleep(TICK);
        }
        // One whose handshake has failed is missed in the end.
        for stream in accepted.into_iter().filter_map(|(stream, _)| stream.ok()) {
            if hear_token(&stream, interrupt).is_ok_and(|said| said == pass.token_on(&stream)) {
                streams.push(stream);
            }
        }
    }
    Ok(streams)
}

/// What a connection says first.
fn hear_token(stream: &Stream, interrupt: &Interrupt) -> io::Result<[u8; TOKEN]> {
    let deadline = Instant::now() + SAY_TOKEN;
    let (mut said, mut length) = ([0; TOKEN], 0);
    while length < TOKEN {
        match stream.read_within(&mut said[length..], TICK) {
            Ok(0) => return Err(ErrorKind::UnexpectedEof.into()),
            Ok(count) => length += count,
            Err(error) if error.kind() == ErrorKind::TimedOut => {}
            Err(error) => return Err(error),
        }
        if Instant::now() >= deadline || interrupt.is_raised() {
            return Err(ErrorKind::TimedOut.into());
        }
    }
    Ok(said)
}

/// What has arrived.
struct Burst {
    answer: Answer,
    bytes_per_second: f64,
    kept: Vec<u8>,
}

/// Takes what comes, for a time.
fn take(streams: &[Stream], interrupt: &Interrupt) -> Burst {
    let (received, over) = (AtomicU64::new(0), AtomicBool::new(false));
    thread::scope(|scope| {
        let threads: Vec<_> = streams
            .iter()
            .enumerate()
            .map(|(i, stream)| {
                let keep = if i == 0 { KEPT } else { 0 };
                let (received, over) = (&received, &over);
                scope.spawn(move || drain(stream, keep, received, over))
            })
            .collect();
        interrupt.sleep(Some(WARM_UP));
        let (before, begun) = (received.load(Ordering::Relaxed), Instant::now());
        let goes_on = || threads.iter().any(|thread| !thread.is_finished());
        while goes_on() && begun.elapsed() < COUNTED && !interrupt.is_raised() {
            thread::sleep(TICK.min(COUNTED.saturating_sub(begun.elapsed())));
        }
        let counted = received.load(Ordering::Relaxed) - before;
        let seconds = begun.elapsed().as_secs_f64();
        over.store(true, Ordering::Relaxed);
        let (mut cpu_s, mut kept) = (0.0, Vec::new());
        for (work, of_this) in threads.into_iter().filter_map(|thread| thread.join().ok()) {
            cpu_s += work.cpu;
            kept.extend(of_this);
        }
        Burst {
            answer: Answer::Received {
                bytes: counted,
                seconds,
                all_bytes: received.load(Ordering::Relaxed),
                cpu_s,
            },
            bytes_per_second: counted as f64 / seconds.max(1e-3),
            kept,
        }
    })
}

/// Fills `packet`, or what of it has come by the timeout.
fn receive(stream: &Stream, packet: &mut [u8]) -> io::Result<usize> {
    match stream.is_plain() {
        true => Ok(recv(stream, packet, RecvFlags::WAITALL)?.1),
        false => stream.read_within(packet, TICK),
    }
}

/// Reads a connection until it ends or it is over, and keeps some of it.
fn drain(stream: &Stream, keep: usize, received: &AtomicU64, over: &AtomicBool) -> (Work, Vec<u8>) {
    let mut kept = Vec::with_capacity(keep);
    let mut buffer = vec![0; RING];
    let mut at = 0;
    let mut work = Work::NOTHING;
    timed(&mut work, || {
        let _ = stream.set_read_timeout(TICK);
        while !over.load(Ordering::Relaxed) {
            // Whole packets, as the engine receives them; what has come by the timeout counts all the same.
            match receive(stream, &mut buffer[at..at + PACKET]) {
                Ok(0) => break,
                Ok(count) => {
                    received.fetch_add(count as u64, Ordering::Relaxed);
                    let wanted = count.min(keep - kept.len());
                    kept.extend_from_slice(&buffer[at..at + wanted]);
                    at = (at + PACKET) % RING;
                }
                Err(error)
                    if matches!(
                        error.kind(),
                        ErrorKind::WouldBlock | ErrorKind::TimedOut | ErrorKind::Interrupted
                    ) => {}
                Err(_) => break,
            }
        }
    });
    (work, kept)
}

/// This host, measured on pages that have arrived.
fn host(kept: &[u8]) -> Result<Host, HostError> {
    let packets = kept.chunks_exact(PACKET).map(<[u8]>::to_vec);
    let sample = Sample {
        packets: packets.map(Packet::full).collect(),
        ..Sample::default()
    };
    let measured = measure::measure(&sample, true)?;
    let decoders = measured.candidates.into_iter().skip(1);
    Ok(Host {
        cores: measured.cores,
        cores_free: measured.cores_free,
        first_touch: measured.loopback.first_touch,
        decoders: decoders
            .map(|candidate| Decoder {
                method: candidate.method.to_owned(),
                level: candidate.level,
                decode: candidate.costs.content.decode,
            })
            .collect(),
    })
}

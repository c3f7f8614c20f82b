//! The side that asks: opens the connections, fills the link, and checks what it is told.

use std::io::Write;
use std::net::Shutdown;
use std::sync::atomic::{AtomicBool, AtomicU64, Ordering};
use std::thread;
use std::time::{Duration, Instant};

use hotlift::Address;
use hotlift::relay::Pass;
use hotlift::tls::Tls;
use hotlift::transport::Stream;
use hotlift_console::conversation::Conversation;
use hotlift_console::error::ConsoleError;
use hotlift_qmp::one_line;
use serde::Serialize;

use super::{
    Answer, COUNTED, GREETING, Host, MOST_CONNECTIONS, PROTOCOL, Request, TOKEN, WARM_UP, boot,
};
use crate::cost::{GIB, Work};
use crate::error::HostError;
use crate::measure::timed;
use crate::sample::{Packet, Sample};

/// How long the other host may measure itself: it takes seconds, and more among other work.
const MEASURING: Duration = Duration::from_secs(60);

/// Fewer bytes than these say little about what a byte costs.
const ENOUGH_FOR_CPU: u64 = 16 << 20;

/// No cost is this many seconds for a GiB, and no host has this many cores.
const MOST: f64 = 1e4;

/// The other host, and the link to it.
#[derive(Debug, Clone, PartialEq, Serialize)]
pub struct Far {
    /// Where it was asked.
    pub address: String,
    /// Bytes a second that have arrived there.
    pub bandwidth: f64,
    /// Over so many connections.
    pub connections: u8,
    /// Seconds to it and back.
    pub round_trip: f64,
    /// Seconds of a core for a GiB over this link: to send, and to receive. `None` if too little passed to tell.
    pub cpu_a_gib: Option<(f64, f64)>,
    /// It is this host.
    pub same_host: bool,
    /// Over this host's own loopback, which its cores alone limit.
    pub over_loopback: bool,
    /// The host.
    #[serde(flatten)]
    pub host: Host,
}

/// Asks the host where `hotlift serve` or `hotlift bench --serve` waits.
///
/// # Errors
/// If nobody answers as such a host does.
pub fn ask(
    to: &Address,
    sample: &Sample,
    channels: u8,
    tls: Option<&Tls>,
) -> Result<Far, HostError> {
    let Address::Tcp { host, .. } = to else {
        return Err(ConsoleError::OnlyTcp { flag: "--to" }.into());
    };
    let connections = channels.clamp(1, MOST_CONNECTIONS);
    let mut other = Conversation::connect(to, "--to", tls)?;
    other.say(&Request {
        hotlift_survey: PROTOCOL,
        connections,
    })?;
    let Answer::Ready {
        port,
        token,
        boot: theirs,
    } = hear(&mut other, GREETING)?
    else {
        return Err(HostError::Strange {
            what: "its first answer",
        });
    };
    let port = Address::Tcp {
        host: host.clone(),
        port,
    };
    let token = token_of(&token).ok_or(HostError::Strange { what: "its token" })?;
    let (streams, round_trip) = connect(&port, connections, &other.pass(token), tls)?;
    let over_loopback = streams
        .iter()
        .all(|stream| stream.peer_ip().is_some_and(|peer| peer.is_loopback()));
    let (sent, received) = fill(&streams, sample, || {
        hear(&mut other, WARM_UP + COUNTED + GREETING)
    });
    drop(streams);
    let Answer::Received {
        bytes,
        seconds,
        all_bytes,
        cpu_s,
    } = received?
    else {
        return Err(HostError::Strange {
            what: "its second answer",
        });
    };
    let in_time = (0.01..MOST).contains(&seconds) && (0.0..MOST).contains(&cpu_s);
    if !in_time || bytes == 0 || bytes > all_bytes || all_bytes > sent.bytes {
        return Err(HostError::Strange {
            what: "what it says that it received",
        });
    }
    let Answer::Measured(host) = hear(&mut other, MEASURING)? else {
        return Err(HostError::Strange {
            what: "its last answer",
        });
    };
    if !is_sound(&host) {
        return Err(HostError::Strange {
            what: "what it says of itself",
        });
    }
    let gib = all_bytes as f64 / GIB;
    let ours = boot();
    Ok(Far {
        address: to.to_string(),
        bandwidth: bytes as f64 / seconds,
        connections,
        round_trip,
        cpu_a_gib: (all_bytes >= ENOUGH_FOR_CPU).then(|| (sent.cpu_s / gib, cpu_s / gib)),
        over_loopback,
        same_host: !ours.is_empty() && theirs == ours,
        host,
    })
}

/// The next answer; a refusal is an error.
fn hear(other: &mut Conversation, limit: Duration) -> Result<Answer, HostError> {
    match other.hear(limit)? {
        Some(Answer::Refused { reason }) => Err(ConsoleError::Refused {
            reason: one_line(&reason),
        }
        .into()),
        Some(answer) => Ok(answer),
        None => Err(ConsoleError::Silent { waited: limit }.into()),
    }
}

fn token_of(text: &str) -> Option<[u8; TOKEN]> {
    let digits = text.len() == 2 * TOKEN && text.bytes().all(|byte| byte.is_ascii_hexdigit());
    let number = digits.then(|| u128::from_str_radix(text, 16).ok())?;
    number.map(u128::to_be_bytes)
}

/// The connections, and the shortest time that one took to be made: once there and back.
fn connect(
    to: &Address,
    connections: u8,
    pass: &Pass,
    tls: Option<&Tls>,
) -> Result<(Vec<Stream>, f64), HostError> {
    let failed = |source| HostError::Connections {
        address: to.to_string(),
        source,
    };
    let mut shortest = f64::INFINITY;
    let mut streams = Vec::new();
    for _ in 0..connections {
        let begun = Instant::now();
        let stream = to.connect(GREETING).map_err(failed)?;
        shortest = shortest.min(begun.elapsed().as_secs_f64());
        let stream = match tls {
            Some(tls) => stream
                .secure(tls, Some(to.host()))
                .map_err(ConsoleError::from)?,
            None => stream,
        };
        (&stream)
            .write_all(&pass.token_on(&stream))
            .map_err(HostError::Survey)?;
        streams.push(stream);
    }
    Ok((streams, shortest))
}

/// What was sent.
struct Sent {
    bytes: u64,
    cpu_s: f64,
}

/// Sends the sample over all connections, again and again, until `heard` has heard.
fn fill<T>(streams: &[Stream], sample: &Sample, heard: impl FnOnce() -> T) -> (Sent, T) {
    let (sent, over) = (AtomicU64::new(0), AtomicBool::new(false));
    let zeros = [Packet::of_zeros()];
    let packets = match sample.packets.is_empty() {
        true => &zeros[..],
        false => &sample.packets,
    };
    thread::scope(|scope| {
        let threads: Vec<_> = streams
            .iter()
            .enumerate()
            .map(|(i, stream)| {
                let (sent, over) = (&sent, &over);
                // Each another part of it: what one has fetched is not in the cache of all.
                let packets = packets
                    .iter()
                    .cycle()
                    .skip(i * packets.len() / streams.len());
                scope.spawn(move || send(stream, packets, sent, over))
            })
            .collect();
        let answer = heard();
        over.store(true, Ordering::Relaxed);
        // Threads that are blocked in a write return.
        for stream in streams {
            stream.shutdown(Shutdown::Both);
        }
        let works = threads.into_iter().filter_map(|thread| thread.join().ok());
        let cpu_s = works.map(|work| work.cpu).sum();
        let bytes = sent.load(Ordering::Relaxed);
        (Sent { bytes, cpu_s }, answer)
    })
}

/// Sends until it is over, or the other side has had enough.
fn send<'a>(
    stream: &Stream,
    packets: impl Iterator<Item = &'a Packet>,
    sent: &AtomicU64,
    over: &AtomicBool,
) -> Work {
    let mut work = Work::NOTHING;
    timed(&mut work, || {
        for packet in packets {
            let content = &packet.content[..];
            // Before it is: the other side may have counted a part of it.
            sent.fetch_add(content.len() as u64, Ordering::Relaxed);
            if over.load(Ordering::Relaxed) || (&*stream).write_all(content).is_err() {
                return;
            }
        }
    });
    work
}

/// Whether a host's numbers are numbers.
fn is_sound(host: &Host) -> bool {
    let cost = |number: f64| (0.0..MOST).contains(&number);
    let decoders = host.decoders.iter();
    (1e-3..MOST).contains(&host.cores_free)
        && cost(host.first_touch)
        && decoders
            .map(|decoder| decoder.decode)
            .all(|decode| cost(decode.cpu) && cost(decode.thread))
}

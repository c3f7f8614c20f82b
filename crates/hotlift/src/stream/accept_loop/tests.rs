//! Tests of the accept loop against a model, on a virtual clock, with random arrivals of every kind from a seed.

use std::collections::BTreeMap;

use hotlift_net::admission::read_class;
use hotlift_wire::multifd::InitialPacket;
use hotlift_wire::settle::{TOKEN_LEN, question, token};

use super::*;

const TIMEOUT: Duration = Duration::from_secs(10);
const PASS: [u8; 16] = [9; 16];
const SEEDS: u64 = 100;
const ARRIVALS: u64 = 100;

/// Milliseconds since the start.
type Time = u64;

/// A client: the bytes that it has sent at a given time, and the time when it closes its side.
struct Client {
    stream: Stream,
    comes: Time,
    bytes: Vec<u8>,
    /// Pairs: a time, and the count of bytes that the client has sent from that time on.
    plan: Vec<(Time, usize)>,
    closes: Option<Time>,
    sent: usize,
    is_closed: bool,
    /// True if a byte of the client's token is wrong.
    has_no_token: bool,
}

/// Outcome of a client in the model.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
enum Outcome {
    Arrived,
    Answered,
    TurnedAway,
}

/// A pending connection in the model.
struct Waiting {
    client: usize,
    since: Time,
    /// Count of the token's bytes that were consumed.
    taken: usize,
}

#[derive(Default)]
struct Model {
    needs_pass: bool,
    waiting: Vec<Waiting>,
    outcomes: BTreeMap<usize, Outcome>,
    turned_away: BTreeMap<String, u64>,
}

impl Model {
    fn reject(&mut self, client: usize, why: &str) {
        *self.turned_away.entry(why.to_owned()).or_default() += 1;
        self.outcomes.insert(client, Outcome::TurnedAway);
    }

    fn drop_late(&mut self, now: Time) {
        let timeout = u64::try_from(TIMEOUT.as_millis()).unwrap();
        while let Some(at) = (self.waiting.iter()).position(|one| now - one.since >= timeout) {
            let client = self.waiting.remove(at).client;
            self.reject(client, "a connection that sent no complete opening in time");
        }
    }

    fn enter(&mut self, client: usize, now: Time) {
        if self.waiting.len() == 64 {
            let oldest = self.waiting.remove(0).client;
            self.reject(oldest, "too many waiting connections");
        }
        self.waiting.push(Waiting {
            client,
            since: now,
            taken: 0,
        });
    }

    /// Classifies the received bytes of all pending connections.
    fn poll(&mut self, clients: &[Client]) {
        let mut at = 0;
        while let Some(one) = self.waiting.get_mut(at) {
            let client = &clients[one.client];
            let seen = &client.bytes[one.taken..client.sent];
            let head = match read_class(seen) {
                ConnectionClass::Partial if client.is_closed && seen.is_empty() => {
                    ConnectionClass::Gone("a connection that was closed before its first byte")
                }
                ConnectionClass::Partial if client.is_closed => {
                    ConnectionClass::Other("a connection that was closed in its first bytes")
                }
                head => head,
            };
            let has_passed = one.taken > 0 || !self.needs_pass;
            match head {
                ConnectionClass::Partial => {
                    at += 1;
                    continue;
                }
                ConnectionClass::Token(PASS) if !has_passed => {
                    one.taken = TOKEN_LEN;
                    continue;
                }
                _ => {}
            }
            let client = self.waiting.remove(at).client;
            match head {
                ConnectionClass::Main
                | ConnectionClass::Resumed
                | ConnectionClass::Channel(_)
                | ConnectionClass::OtherVersion(_) => match has_passed {
                    true => _ = self.outcomes.insert(client, Outcome::Arrived),
                    false => {
                        self.reject(client, "a connection without this migration's token");
                    }
                },
                ConnectionClass::Question(_) => _ = self.outcomes.insert(client, Outcome::Answered),
                ConnectionClass::Token(_) => {
                    self.reject(client, "a connection with another migration's token");
                }
                ConnectionClass::Hello => self.reject(client, NO_STREAM),
                ConnectionClass::Other(why) | ConnectionClass::Gone(why) => {
                    self.reject(client, why)
                }
                ConnectionClass::Partial => unreachable!("it waits"),
            }
        }
    }
}

/// Creates a client. Also returns the server's end of the client's connection.
fn client(rng: &mut fastrand::Rng, needs_pass: bool, comes: Time) -> (Client, Stream) {
    let opening = InitialPacket {
        uuid: [7; 16],
        id: rng.u8(0..4),
        hello: None,
    };
    let own = match needs_pass && rng.u8(0..8) > 0 {
        true => token(PASS).to_vec(),
        false => Vec::new(),
    };
    let head = match rng.u8(0..9) {
        0 | 1 => b"QEVM\0\0\0\x03\x01".to_vec(),
        2 | 3 => opening.encode().to_vec(),
        4 => b"\x08\x00\x0a\x00".to_vec(),
        5 => question(MigrationId([5; 16])).to_vec(),
        6 => token([1; 16]).to_vec(),
        7 => b"\x16\x03\x01\x02\x00\x01".to_vec(),
        _ => [&b"{\"hotlift\":6}"[..], b"GET / HTTP/1.1", b"", b"\0"][rng.usize(0..4)].to_vec(),
    };
    let mut bytes = [own.clone(), head].concat();
    let mut has_no_token = false;
    if !bytes.is_empty() && rng.u8(0..4) == 0 {
        let flipped = rng.usize(0..bytes.len());
        bytes[flipped] ^= rng.u8(1..);
        has_no_token = flipped < own.len();
    }
    let length = bytes.len();
    let timeout = u64::try_from(TIMEOUT.as_millis()).unwrap();
    let plan = match rng.u8(0..6) {
        // At once; never; a part; byte by byte; the last byte within a millisecond of the limit.
        0 | 1 => vec![(comes, length)],
        2 => Vec::new(),
        3 => vec![(comes, rng.usize(0..=length))],
        4 => {
            let pause = rng.u64(1..400);
            (0..=length)
                .map(|sent| (comes + sent as u64 * pause, sent))
                .collect()
        }
        _ => {
            let last = comes + timeout + rng.u64(0..3) - 1;
            vec![(comes, length.saturating_sub(1)), (last, length)]
        }
    };
    let closes = (rng.u8(0..4) == 0).then(|| comes + rng.u64(0..2 * timeout));
    let (here, stream) = Stream::pair().unwrap();
    let client = Client {
        stream,
        comes,
        bytes,
        plan,
        closes,
        sent: 0,
        is_closed: false,
        has_no_token,
    };
    (client, here)
}

impl Client {
    /// Sends all bytes that the client's plan has for times up to `now`.
    fn act(&mut self, now: Time) {
        if self.is_closed {
            return;
        }
        let due = self.plan.iter().filter(|(at, _)| *at <= now);
        let due = due.map(|(_, sent)| *sent).max().unwrap_or(0);
        if due > self.sent {
            // The server may have closed the connection.
            let _ = (&self.stream).write_all(&self.bytes[self.sent..due]);
            self.sent = due;
        }
        if self.closes.is_some_and(|at| at <= now) {
            self.is_closed = true;
            self.stream.shutdown(std::net::Shutdown::Write);
        }
    }

    /// Returns the time of the client's next action after `now`; `None` if there is none.
    fn next(&self, now: Time) -> Option<Time> {
        let times = self.plan.iter().map(|(at, _)| *at);
        let times = times.chain(self.closes).chain([self.comes]);
        times.filter(|at| *at > now).min()
    }

    /// Returns the outcome that the client sees; `None` while the client's connection is open.
    fn outcome(&self) -> Option<Outcome> {
        let mut first = [0; 2];
        match self.stream.peek(&mut first) {
            Ok(None) => None,
            Ok(Some(1)) if first[0] == b'A' => Some(Outcome::Arrived),
            Ok(Some(1..)) => Some(Outcome::Answered),
            Ok(Some(0)) | Err(_) => Some(Outcome::TurnedAway),
        }
    }
}

/// Runs the test with one seed. Returns the count of arrivals.
fn run(seed: u64) -> usize {
    let mut rng = fastrand::Rng::with_seed(seed);
    let life = Life::default();
    life.stop_clock();
    let rejections = Rejections::default();
    let (listener, sender) = Listener::queue(true).unwrap();
    let needs_pass = rng.bool();
    let pass = needs_pass.then(|| ConnectionToken::new(PASS, None));
    let mut accept_loop =
        AcceptLoop::new(&listener, None, pass, TIMEOUT, (&rejections, &life)).unwrap();
    let mut model = Model {
        needs_pass,
        ..Model::default()
    };
    // All at once, or a few per second.
    let spread = [1, 1000, 60_000][rng.usize(0..3)];
    let mut times: Vec<Time> = (0..ARRIVALS).map(|_| rng.u64(0..spread)).collect();
    times.sort_unstable();
    let made = times.iter().map(|at| client(&mut rng, needs_pass, *at));
    let (mut clients, here): (Vec<_>, Vec<_>) = made.unzip();
    let mut here = here.into_iter().map(Some).collect::<Vec<_>>();
    let mut arrived = Vec::new();
    let mut now = 0;
    loop {
        clients.iter_mut().for_each(|client| client.act(now));
        let new: Vec<_> = (0..clients.len())
            .filter(|client| here[*client].is_some() && clients[*client].comes <= now)
            .collect();
        for client in &new {
            let one = Admitted::new(here[*client].take().unwrap(), life.now());
            sender.send(one).unwrap();
        }
        // A step first examines connections, and then accepts one.
        for _ in 0..new.len() + 2 {
            let (arrivals, _) = accept_loop.step(Duration::ZERO, &[], None).unwrap();
            for arrival in arrivals {
                let _ = (&arrival.stream).write_all(b"A");
                arrived.push(arrival);
            }
            assert!(
                accept_loop.admission.pending.iter().count() <= 64,
                "seed {seed}"
            );
        }
        model.drop_late(now);
        model.poll(&clients);
        for client in new {
            model.enter(client, now);
            model.poll(&clients);
        }
        let deadline = model.waiting.iter().map(|one| one.since + 10_000).min();
        let left = accept_loop.admission.shortened(Duration::MAX, life.now());
        let expected = deadline.map_or(Duration::MAX, |at| Duration::from_millis(at - now));
        assert_eq!(left, expected, "seed {seed} at {now} ms");
        let next = clients.iter().filter_map(|client| client.next(now));
        let Some(next) = next.chain(deadline).min() else {
            break;
        };
        life.advance(Duration::from_millis(next - now));
        now = next;
    }
    assert_eq!(rejections.counts(), model.turned_away, "seed {seed}");
    assert_eq!(model.outcomes.len(), clients.len(), "seed {seed}");
    for (client, outcome) in &model.outcomes {
        let client = &clients[*client];
        assert_eq!(client.outcome(), Some(*outcome), "seed {seed}");
        assert!(
            !client.has_no_token || *outcome != Outcome::Arrived,
            "seed {seed}"
        );
    }
    // No pending connection is left.
    life.advance(CONFIRMATIONS.max_wait);
    accept_loop.step(Duration::ZERO, &[], None).unwrap();
    assert_eq!(
        accept_loop.admission.since().count() + accept_loop.unconfirmed.iter().count(),
        0
    );
    clients.len()
}

#[test]
fn ten_thousand_connections_end_as_in_the_model_and_free_all_slots() {
    let arrivals: usize = (0..SEEDS).map(run).sum();
    assert_eq!(arrivals, 10_000);
}

#[test]
fn a_connection_classified_by_another_accept_loop_keeps_its_first_bytes_and_token() {
    let life = Life::default();
    let rejections = Rejections::default();
    let (listener, sender) = Listener::queue(true).unwrap();
    let pass = Some(ConnectionToken::new(PASS, None));
    let mut accept_loop =
        AcceptLoop::new(&listener, None, pass.clone(), TIMEOUT, (&rejections, &life)).unwrap();
    let (here, there) = Stream::pair().unwrap();
    (&there).write_all(&token(PASS)).unwrap();
    let mut one = Admitted::new(here, life.now());
    one.classify();
    assert!(pass.is_some_and(|pass| pass.is_presented_by(&one)) && one.consume_token());
    (&there).write_all(b"QEVM\0\0\0\x03\x01").unwrap();
    assert_eq!(one.classify(), ConnectionClass::Main);
    // The following bytes are not examined.
    (&one.stream).read_exact(&mut [0; 9]).unwrap();
    sender.send(one).unwrap();
    let mut arrivals = Vec::new();
    while arrivals.is_empty() {
        arrivals = accept_loop.step(Duration::ZERO, &[], None).unwrap().0;
    }
    assert_eq!(arrivals[0].head(), ConnectionClass::Main);
    // The next migration at this listener has another pass.
    accept_loop.keep(arrivals);
    drop(accept_loop);
    let next = listener.accept(life.now()).unwrap().unwrap();
    assert_eq!(
        (next.head(), next.has_passed),
        (ConnectionClass::Main, false)
    );
    assert!(rejections.counts().is_empty());
}

//! Both sides of a resumed postcopy, on a virtual clock, over a connection that delays, cuts and flips.

use std::collections::VecDeque;
use std::io::Read;
use std::sync::Arc;

use fastrand::Rng;
use hotlift_mem::{DirtyBitmap, PAGE_SIZE};
use hotlift_net::transport::Stream;
use hotlift_wire::RamBlockEntry;
use hotlift_wire::main_channel::postcopy::PostcopyCommand;
use hotlift_wire::main_channel::{
    Configuration, DeviceLengths, MainDecoder, MainEvent, Step as Decoded,
};

use super::*;
use crate::life::Life;
use crate::pacing::Pacer;
use crate::postcopy::Ledger;
use crate::postcopy::recovery::{Recovery, Step};
use crate::stream::main_send::{MainLink, MainSend};

const MS: Duration = Duration::from_millis(1);
const HANDSHAKE: Duration = Duration::from_secs(30);
/// Time limit for answers at the source.
const ANSWERS: Duration = Duration::from_secs(60);

fn blocks() -> Vec<RamBlockEntry> {
    let block = |name, pages: usize| RamBlockEntry::new(name, (pages * PAGE_SIZE) as u64);
    vec![block("pc.ram", 130), block("vga", 64), block("rom", 3)]
}

/// Returns a decoder that has read the opening of a stream with these blocks.
fn decoder() -> MainDecoder {
    let (here, there) = Stream::pair().unwrap();
    let link = Arc::new(MainLink {
        transport: here,
        counters: Arc::default(),
        pacer: Arc::new(Pacer::new(0)),
        life: Life::default(),
    });
    let configuration = Configuration {
        machine: "hotlift".to_owned(),
        ..Configuration::default()
    };
    let mut main = MainSend::new(Arc::clone(&link), &configuration).unwrap();
    main.ram_start(None, &blocks(), false).unwrap();
    drop((main, link));
    let mut opening = Vec::new();
    (&there).read_to_end(&mut opening).unwrap();
    let mut decoder = MainDecoder::new(DeviceLengths::LengthPrefixed).taking_postcopy();
    let mut at = 0;
    while let Decoded::Event { consumed, .. } = decoder.next(&opening[at..]).unwrap() {
        at += consumed;
    }
    assert_eq!(at, opening.len());
    decoder
}

/// Fault of one direction, at this byte.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
enum Fault {
    Flip { byte: usize, mask: u8 },
    Cut { byte: usize },
}

/// One direction of a connection.
#[derive(Default)]
struct Wire {
    sent: usize,
    fault: Option<Fault>,
    /// Pieces, and their times of arrival.
    under_way: VecDeque<(Duration, Vec<u8>)>,
    is_cut: bool,
}

impl Wire {
    fn send(&mut self, bytes: &[u8], now: Duration, rng: &mut Rng, delay: u64) {
        let mut bytes = bytes.to_vec();
        let range = self.sent..self.sent + bytes.len();
        self.sent = range.end;
        match self.fault {
            Some(Fault::Flip { byte, mask }) if range.contains(&byte) => {
                bytes[byte - range.start] ^= mask;
            }
            Some(Fault::Cut { byte }) if range.contains(&byte) => {
                bytes.truncate(byte - range.start);
            }
            _ => {}
        }
        if self.is_cut {
            return;
        }
        self.is_cut = matches!(self.fault, Some(Fault::Cut { byte }) if byte < range.end);
        while !bytes.is_empty() {
            let rest = bytes.split_off(rng.usize(1..=bytes.len()));
            let last = self.under_way.back().map_or(now, |(at, _)| *at);
            let at = last.max(now) + MS * u32::try_from(rng.u64(0..=delay)).unwrap();
            self.under_way
                .push_back((at, std::mem::replace(&mut bytes, rest)));
        }
    }
}

/// Returns the action of the main channel's machine for an event.
fn action(event: &MainEvent<'_>) -> Action<'static> {
    match event {
        MainEvent::Postcopy(PostcopyCommand::RecvBitmap(block)) => Action::Bitmap(*block),
        MainEvent::Postcopy(PostcopyCommand::Resume) => Action::Resume,
        _ => Action::Nothing,
    }
}

struct Pair<'l> {
    rng: Rng,
    epoch: Instant,
    now: Duration,
    /// Longest delay of a piece, in milliseconds.
    delay: u64,
    recovery: Recovery<'l>,
    source: Option<Result<Vec<u8>, MigrationError>>,
    is_prepared: bool,
    agreement: Agreement,
    decoder: MainDecoder,
    unread: Vec<u8>,
    received: Vec<DirtyBitmap>,
    destination: Option<Result<(), MigrationError>>,
    /// Requests of the destination before its answers, and after them.
    requests: [Vec<u8>; 2],
    /// To the destination, and to the source.
    wires: [Wire; 2],
}

fn request(block: Option<&'static str>, page: usize) -> Vec<u8> {
    let (start, length) = ((page * PAGE_SIZE) as u64, 4096);
    encode(&[match block {
        Some(block) => ReturnMessage::ReqPagesId {
            start,
            length,
            block,
        },
        None => ReturnMessage::ReqPages { start, length },
    }])
}

impl<'l> Pair<'l> {
    fn new(seed: u64, ledger: &'l Ledger) -> Self {
        let mut rng = Rng::with_seed(seed);
        let epoch = Instant::now();
        let received = (0..blocks().len()).map(|index| {
            let bitmap = DirtyBitmap::new(ledger.pages(index));
            for page in 0..bitmap.pages() {
                if rng.bool() {
                    bitmap.set(page);
                }
            }
            bitmap
        });
        let received = received.collect();
        let mut decoder = decoder();
        decoder.reconnect();
        Self {
            epoch,
            now: Duration::ZERO,
            delay: rng.u64(0..20),
            recovery: Recovery::new(ledger, epoch),
            source: None,
            is_prepared: false,
            agreement: Agreement::new(epoch, HANDSHAKE, false),
            decoder,
            unread: Vec::new(),
            received,
            destination: None,
            requests: [
                [request(Some("vga"), 3), request(None, 4)].concat(),
                [request(None, 5), request(Some("rom"), 1)].concat(),
            ],
            wires: [Wire::default(), Wire::default()],
            rng,
        }
    }

    fn send(&mut self, to: usize, bytes: &[u8]) {
        let wire = &mut self.wires[to];
        wire.send(bytes, self.now, &mut self.rng, self.delay);
    }

    /// Runs the source until it waits; returns the end of the wait.
    fn advance_source(&mut self) -> Option<Duration> {
        while self.source.is_none() {
            match self.recovery.next(self.epoch + self.now) {
                Ok(Step::Send(bytes)) => self.send(0, &bytes),
                Ok(Step::Prepare) => self.is_prepared = true,
                Ok(Step::Receive(left)) => return Some(self.now + left),
                Ok(Step::Resumed(rest)) => self.source = Some(Ok(rest)),
                Err(error) => self.source = Some(Err(error)),
            }
        }
        None
    }

    /// Runs the destination with the bytes that have arrived.
    fn advance_destination(&mut self) {
        while self.destination.is_none() {
            let now = self.epoch + self.now;
            let next = self.decoder.next(&self.unread);
            let outcome = match next.map_err(MigrationError::main_wire) {
                Ok(Decoded::Need(_)) => return,
                Ok(Decoded::Event { event, consumed }) => {
                    let answer = self.agreement.take(&action(&event), now);
                    answer.map(|it| (it, consumed))
                }
                Err(error) => Err(error),
            };
            match outcome {
                Ok((Answer::Bitmap(block), consumed)) => {
                    self.unread.drain(..consumed);
                    let late = std::mem::take(&mut self.requests[0]);
                    let received = &self.received[block];
                    let word = |word: usize| {
                        let bits = (0..64).filter(|bit| {
                            let page = word * 64 + bit;
                            page < received.pages() && received.test(page)
                        });
                        bits.fold(0, |bits, bit| bits | 1_u64 << bit)
                    };
                    let answer = bitmap(&blocks()[block].name, received.pages(), word);
                    self.send(1, &[late, answer].concat());
                }
                Ok(_) => {
                    let acknowledged = encode(&[ReturnMessage::ResumeAck(1)]);
                    let after = std::mem::take(&mut self.requests[1]);
                    self.send(1, &[acknowledged, after].concat());
                    self.destination = Some(Ok(()));
                }
                Err(error) => self.destination = Some(Err(error)),
            }
        }
    }

    /// Runs both sides to their ends.
    fn run(&mut self) {
        loop {
            let until = self.advance_source();
            self.advance_destination();
            let first = |wire: &Wire| wire.under_way.front().map(|(at, _)| *at);
            let [to_destination, to_source] = self.wires.each_ref().map(first);
            let cut = (self.agreement.until() - self.epoch).max(self.now);
            let limit = self.destination.is_none().then_some(cut);
            let times = [to_destination, to_source, until, limit];
            let Some(next) = times.into_iter().flatten().min() else {
                return;
            };
            self.now = next;
            if to_destination == Some(next) {
                let piece = self.wires[0].under_way.pop_front();
                self.unread.extend(piece.unwrap().1);
            } else if to_source == Some(next) {
                let piece = self.wires[1].under_way.pop_front();
                self.recovery.receive(&piece.unwrap().1);
            } else if limit == Some(next) {
                self.destination = Some(Err(MigrationError::main_closed()));
            }
            let is_closed = |wire: &Wire| wire.is_cut && wire.under_way.is_empty();
            // The end of the connection is read after the bytes sent before.
            let failed = matches!(self.destination, Some(Err(_)));
            if (failed || is_closed(&self.wires[1])) && self.wires[1].under_way.is_empty() {
                self.advance_source();
                self.source
                    .get_or_insert_with(|| Err(MigrationError::main_closed()));
            }
            let failed = matches!(self.source, Some(Err(_)));
            if (failed || is_closed(&self.wires[0])) && self.wires[0].under_way.is_empty() {
                self.advance_destination();
                self.destination
                    .get_or_insert_with(|| Err(MigrationError::main_closed()));
            }
        }
    }

    /// Returns true if the source knows the destination's pages.
    fn is_agreed(&self, ledger: &Ledger) -> bool {
        self.received.iter().enumerate().all(|(block, bitmap)| {
            (0..bitmap.pages()).all(|page| bitmap.test(page) == ledger.is_sent(block, page))
        })
    }
}

#[test]
fn a_source_learns_the_received_pages_in_any_fragments() {
    for seed in 0..2000 {
        let ledger = Ledger::new(&blocks());
        let mut pair = Pair::new(seed, &ledger);
        pair.run();
        assert!(matches!(pair.destination, Some(Ok(()))), "seed {seed}");
        assert!(pair.is_prepared && pair.is_agreed(&ledger), "seed {seed}");
        let Some(Ok(mut rest)) = pair.source.take() else {
            panic!("seed {seed}: {:?}", pair.source);
        };
        // The reader after the agreement gets the bytes that have not arrived yet.
        rest.extend(pair.wires[1].under_way.drain(..).flat_map(|it| it.1));
        let pieces = [
            request(Some("vga"), 3),
            request(None, 5),
            request(Some("rom"), 1),
        ];
        let whole = pieces.concat();
        assert!(whole.starts_with(&rest), "seed {seed}: {rest:?}");
    }
}

#[test]
fn a_connection_that_is_cut_at_any_byte_ends_both_sides_and_a_flipped_byte_makes_no_other_message()
{
    // Bytes of a whole run in each direction, and the positions of the bitmaps' own bits.
    let ledger = Ledger::new(&blocks());
    let mut pair = Pair::new(1, &ledger);
    pair.run();
    let lengths = pair.wires.each_ref().map(|wire| wire.sent);
    let mut cases = 0;
    for (to, length) in lengths.into_iter().enumerate() {
        for byte in 0..length {
            let flips = (0..8).map(|bit| Fault::Flip {
                byte,
                mask: 1 << bit,
            });
            for fault in flips.chain([Fault::Cut { byte }]) {
                let ledger = Ledger::new(&blocks());
                let mut pair = Pair::new(1, &ledger);
                pair.wires[to].fault = Some(fault);
                pair.run();
                let what = format!("{fault:?} in direction {to}");
                let (source, destination) = (pair.source.as_ref(), pair.destination.as_ref());
                let (source, destination) = (source.expect(&what), destination.expect(&what));
                if source.is_ok() {
                    assert!(pair.is_prepared && destination.is_ok(), "{what}");
                    // The bits of a bitmap have no checksum in QEMU's format.
                    let missed = (0..pair.received.len()).map(|block| {
                        let pages = 0..pair.received[block].pages();
                        let differs = |page: &usize| {
                            pair.received[block].test(*page) != ledger.is_sent(block, *page)
                        };
                        pages.filter(differs).count()
                    });
                    assert!(missed.sum::<usize>() <= 1, "{what}");
                }
                assert!(pair.now <= ANSWERS + 2 * HANDSHAKE, "{what}");
                cases += 1;
            }
        }
    }
    assert!(cases > 2000, "{cases}");
}

#[test]
fn each_limit_of_a_recovery_holds_to_the_millisecond() {
    let (ledger, begun) = (Ledger::new(&blocks()), Instant::now());
    let mut recovery = Recovery::new(&ledger, begun);
    assert!(matches!(recovery.next(begun), Ok(Step::Send(_))));
    let late = begun + ANSWERS - MS;
    assert_eq!(recovery.next(late).unwrap(), Step::Receive(MS));
    // Bytes of an incomplete answer do not extend the time.
    recovery.receive(&bitmap("pc.ram", 130, |_| 0)[..20]);
    assert_eq!(recovery.next(late).unwrap(), Step::Receive(MS));
    let error = recovery.next(begun + ANSWERS).unwrap_err();
    assert!(matches!(error, MigrationError::Timeout { .. }), "{error}");
    // An answer that has arrived by then counts.
    recovery.receive(&bitmap("pc.ram", 130, |_| 0)[20..]);
    assert!(matches!(recovery.next(begun + ANSWERS), Ok(Step::Send(_))));

    let resume = Action::Resume;
    let agreement = Agreement::new(begun, HANDSHAKE, false);
    assert_eq!(agreement.until(), begun + 2 * HANDSHAKE);
    assert_eq!(agreement.take(&resume, begun).unwrap(), Answer::Agreed);
    let agreement = Agreement::new(begun, HANDSHAKE, true);
    for (resumed, limit) in [
        (begun, begun + HANDSHAKE / 2),
        // Not later than the limit for everything.
        (begun + 2 * HANDSHAKE - MS, begun + 2 * HANDSHAKE),
    ] {
        let answer = agreement.take(&resume, resumed).unwrap();
        assert_eq!(answer, Answer::AwaitPreempt(limit));
    }
}

#[test]
fn duplicate_answers_and_events_out_of_order_end_the_recovery() {
    let (ledger, now) = (Ledger::new(&blocks()), Instant::now());
    let mut recovery = Recovery::new(&ledger, now);
    recovery.next(now).unwrap();
    let answer = bitmap("pc.ram", 130, |_| 0);
    recovery.receive(&[&answer[..], &answer].concat());
    assert!(matches!(recovery.next(now), Ok(Step::Send(_))));
    let error = recovery.next(now).unwrap_err();
    assert!(matches!(error, MigrationError::Wire { .. }), "{error}");

    let agreement = Agreement::new(now, HANDSHAKE, false);
    for action in [Action::Run(Vec::new()), Action::Eof { unasked: false }] {
        assert!(agreement.take(&action, now).is_err(), "{action:?}");
    }
    // Repeated requests are answered each time.
    let again = Action::Bitmap(1);
    for _ in 0..2 {
        assert_eq!(agreement.take(&again, now).unwrap(), Answer::Bitmap(1));
    }
}

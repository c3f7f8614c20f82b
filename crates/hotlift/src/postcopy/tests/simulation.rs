//! A guest that asks for pages, a source that answers and sends the others, and connections that are lost, on a virtual
//! clock: with the ledger, the requests and the neighbours of the product.

use std::collections::{BTreeSet, VecDeque};
use std::time::{Duration, Instant};

use fastrand::Rng;
use hotlift_mem::PAGE_SIZE;
use hotlift_wire::RamBlockEntry;
use hotlift_wire::return_path::ReturnMessage;

use crate::postcopy::requests::Request;
use crate::postcopy::{Ledger, Near, Place};

/// Pages of each RAM block, and of one of its huge pages.
const BLOCKS: [(&str, usize, usize); 2] = [("small", 150, 1), ("huge", 64, 8)];

fn ledger() -> Ledger {
    let blocks = BLOCKS.map(|(name, pages, together)| RamBlockEntry {
        page_size: (together * PAGE_SIZE) as u64,
        ..RamBlockEntry::new(name, (pages * PAGE_SIZE) as u64)
    });
    Ledger::new(&blocks)
}

fn near() -> Near {
    Near::new(BLOCKS.iter().map(|(_, pages, _)| *pages))
}

struct World {
    rng: Rng,
    epoch: Instant,
    now: Duration,
    // The source's.
    ledger: Ledger,
    near: Near,
    /// Pages that the background takes next.
    share: VecDeque<Place>,
    rest: VecDeque<Place>,
    named: Option<usize>,
    latencies: Vec<Duration>,
    // The destination's.
    received: BTreeSet<Place>,
    /// First pages of those that the guest waits for.
    waits: BTreeSet<Place>,
    asked: Option<usize>,
    // On their way.
    requests: VecDeque<(Option<usize>, Place)>,
    pages: VecDeque<Vec<Place>>,
}

impl World {
    fn new(seed: u64) -> Self {
        let mut world = Self {
            rng: Rng::with_seed(seed),
            epoch: Instant::now(),
            now: Duration::ZERO,
            ledger: ledger(),
            near: near(),
            share: VecDeque::new(),
            rest: VecDeque::new(),
            named: None,
            latencies: Vec::new(),
            received: BTreeSet::new(),
            waits: BTreeSet::new(),
            asked: None,
            requests: VecDeque::new(),
            pages: VecDeque::new(),
        };
        world.connect();
        world
    }

    /// Another connection in the place of a lost one: the source learns what has come, and the guest asks again.
    fn connect(&mut self) {
        self.requests.clear();
        self.pages.clear();
        (self.named, self.asked) = (None, None);
        self.ledger = ledger();
        self.near = near();
        self.share.clear();
        self.latencies.clear();
        self.rest.clear();
        for (block, (_, pages, _)) in BLOCKS.iter().enumerate() {
            let mut bits = vec![0; pages.div_ceil(64) * 8];
            for (_, page) in self.received.iter().filter(|(other, _)| *other == block) {
                bits[page / 8] |= 1 << (page % 8);
            }
            self.ledger.has(block, &bits);
            self.rest.extend((0..*pages).map(|page| (block, page)));
        }
        for place in self.waits.clone() {
            self.ask(place);
        }
    }

    fn ask(&mut self, place: Place) {
        let name = (self.asked != Some(place.0)).then_some(place.0);
        self.asked = Some(place.0);
        self.requests.push_back((name, place));
    }

    /// The guest needs a page.
    fn touch(&mut self) {
        let block = self.rng.usize(0..BLOCKS.len());
        let (_, pages, together) = BLOCKS[block];
        let page = self.rng.usize(0..pages);
        let place = (block, page / together * together);
        if !self.received.contains(&place) && self.waits.insert(place) {
            self.ask(place);
        }
    }

    fn deliver_request(&mut self) {
        let Some((name, (block, page))) = self.requests.pop_front() else {
            return;
        };
        let (start, length) = ((page * PAGE_SIZE) as u64, 4096);
        let message = match name {
            None => ReturnMessage::ReqPages { start, length },
            Some(_) => ReturnMessage::ReqPagesId {
                start,
                length,
                block: BLOCKS[block].0,
            },
        };
        let now = self.epoch + self.now;
        self.ledger.note(&mut self.named, &message, now).unwrap();
        // The network may double what a thread says twice.
        if self.rng.u8(0..8) == 0 {
            self.ledger.note(&mut self.named, &message, now).unwrap();
        }
    }

    fn send(&mut self, block: usize, page: usize) {
        let pages = self.ledger.together(block, page);
        self.pages
            .push_back(pages.map(|page| (block, page)).collect());
    }

    fn answer(&mut self) {
        if !self.ledger.requests.is_waiting() {
            return;
        }
        let request = self.ledger.requests.next().unwrap();
        let Request { block, page, since } = request;
        self.near.asked_for(block, page);
        let sent = self.ledger.claim(block, page);
        if sent {
            self.send(block, page);
            self.latencies.push(self.epoch + self.now - since);
        }
        let now = self.epoch + self.now;
        self.ledger.requests.done(&request, sent, now);
    }

    /// One step of the background; false once it has looked at all.
    fn send_one(&mut self) -> bool {
        if self.share.is_empty() {
            let share = self.near.next().unwrap_or_else(|| {
                let share = self.rest.len().min(16);
                self.rest.drain(..share).collect()
            });
            self.share.extend(share);
        }
        let Some((block, page)) = self.share.pop_front() else {
            return false;
        };
        if !self.ledger.is_sent(block, page) && self.ledger.claim(block, page) {
            self.send(block, page);
        }
        true
    }

    fn deliver_pages(&mut self, what: &str) {
        for place in self.pages.pop_front().unwrap_or_default() {
            assert!(self.received.insert(place), "{what}: {place:?} comes twice");
            self.waits.remove(&place);
        }
    }
}

#[test]
fn each_page_comes_once_a_connection_and_no_request_is_left_however_often_it_is_lost() {
    for seed in 0..2000 {
        let what = format!("seed {seed}");
        let mut world = World::new(seed);
        for _ in 0..world.rng.usize(0..600) {
            world.now += Duration::from_micros(world.rng.u64(0..50));
            match world.rng.u8(0..100) {
                0..20 => world.touch(),
                20..40 => world.deliver_request(),
                40..60 => world.answer(),
                60..75 => drop(world.send_one()),
                75..99 => world.deliver_pages(&what),
                _ => world.connect(),
            }
        }
        // The guest rests, and all gets on.
        while !world.requests.is_empty() {
            world.deliver_request();
        }
        while world.ledger.requests.is_waiting() {
            world.answer();
        }
        while world.send_one() {}
        while !world.pages.is_empty() {
            world.deliver_pages(&what);
        }
        let all: usize = BLOCKS.iter().map(|(_, pages, _)| pages).sum();
        assert_eq!(world.received.len(), all, "{what}");
        assert!(world.waits.is_empty(), "{what}: {:?}", world.waits);
        let served = world.latencies.len();
        assert_eq!(world.ledger.requests.served(), served as u64, "{what}");
        let longest = world.latencies.iter().max().copied().unwrap_or_default();
        let noted = world.ledger.requests.latencies()[2];
        let longest = u32::try_from(longest.as_micros()).unwrap();
        assert_eq!(noted, f64::from(longest), "{what}");
    }
}

#[test]
fn what_is_beside_a_requested_page_goes_out_before_the_rest() {
    let mut world = World::new(7);
    world.ask((0, 100));
    world.deliver_request();
    world.answer();
    let mut sent = Vec::new();
    while world.send_one() {
        while let Some(pages) = world.pages.pop_front() {
            sent.extend(pages);
        }
    }
    let near = (101..128).chain(64..100).map(|page| (0, page));
    let expected: Vec<Place> = std::iter::once((0, 100)).chain(near).collect();
    assert_eq!(sent[..64], expected);
}

//! Both sides of a postcopy on a virtual clock: a guest whose threads touch pages, a source that answers and sends the others,
//! and lost connections. Requests and pages arrive late, doubled, cut, and in another order over two connections.

use std::collections::{BTreeMap, BTreeSet, VecDeque};

use fastrand::Rng;
use hotlift_mem::PAGE_SIZE;
use hotlift_wire::RamBlockEntry;
use hotlift_wire::return_path::ReturnMessage;

use super::*;
use crate::ends::guest_sink::postcopy::agreement::bitmap;
use crate::postcopy::recovery::{Recovery, Step};
use crate::postcopy::request_queue::{Request, RequestQueue};
use crate::postcopy::{Batch, Ledger, Next, Place, PrefetchQueue};
use crate::stream::return_path::encode;

const US: Duration = Duration::from_micros(1);

/// Name, number of pages, and pages in a huge page of each RAM block.
const BLOCKS: [(&str, usize, usize); 2] = [("small", 150, 1), ("huge", 64, 8)];

/// Pages that are decoded together with a requested one, including it.
const DECODED: usize = 4;

/// A piece of data on a connection: these pages, or the end of main.
enum Sent {
    Pages(Vec<Place>),
    End,
}

struct World {
    rng: Rng,
    epoch: Instant,
    now: Duration,
    // State of the source.
    ledger: Ledger,
    near: PrefetchQueue,
    share: std::vec::IntoIter<Place>,
    rest: VecDeque<Place>,
    named: Option<usize>,
    /// A request that is being answered.
    answering: Option<Request>,
    longest: Duration,
    has_ended: bool,
    // State of the destination.
    has_preempt: bool,
    received: BTreeSet<Place>,
    waits: Waits,
    /// Page of each waiting thread, and the begin of its wait.
    threads: BTreeMap<u32, (Place, Duration)>,
    longest_wait: Duration,
    asked: Option<usize>,
    is_lost: bool,
    main_has_ended: bool,
    // Messages in flight.
    requests: VecDeque<Vec<u8>>,
    main: VecDeque<Sent>,
    urgent: VecDeque<Vec<Place>>,
}

fn blocks() -> Vec<RamBlockEntry> {
    let block = |(name, pages, together)| RamBlockEntry {
        page_size: (together * PAGE_SIZE) as u64,
        ..RamBlockEntry::new(name, (pages * PAGE_SIZE) as u64)
    };
    BLOCKS.map(block).to_vec()
}

fn near() -> PrefetchQueue {
    PrefetchQueue::new(BLOCKS.iter().map(|(_, pages, _)| *pages))
}

fn all() -> impl Iterator<Item = Place> {
    let pages = |(block, (_, pages, _))| (0..pages).map(move |page| (block, page));
    BLOCKS.into_iter().enumerate().flat_map(pages)
}

/// Returns the first of the pages that are sent with this one.
fn first((block, page): Place) -> Place {
    (block, page / BLOCKS[block].2 * BLOCKS[block].2)
}

/// Returns true if a page has content. All pages of a huge page are equal in this.
fn has_content(place: Place) -> bool {
    let (_, page) = first(place);
    !(page / BLOCKS[place.0].2).is_multiple_of(5)
}

fn fault((block, page): Place) -> Fault {
    Fault { block, page }
}

impl World {
    fn new(seed: u64) -> Self {
        let mut rng = Rng::with_seed(seed);
        let has_preempt = rng.bool();
        Self {
            rng,
            epoch: Instant::now(),
            now: Duration::ZERO,
            ledger: Ledger::new(&blocks()),
            near: near(),
            share: Vec::new().into_iter(),
            rest: all().collect(),
            named: None,
            answering: None,
            longest: Duration::ZERO,
            has_ended: false,
            has_preempt,
            received: BTreeSet::new(),
            waits: Waits::default(),
            threads: BTreeMap::new(),
            longest_wait: Duration::ZERO,
            asked: None,
            is_lost: false,
            main_has_ended: false,
            requests: VecDeque::new(),
            main: VecDeque::new(),
            urgent: VecDeque::new(),
        }
    }

    fn time(&self) -> Instant {
        self.epoch + self.now
    }

    /// Drops everything in flight, except a random part that the kernels had delivered.
    fn lose(&mut self) {
        for queue in [self.main.len(), self.urgent.len()] {
            for _ in 0..self.rng.usize(0..=queue) {
                self.deliver();
            }
        }
        self.is_lost = true;
    }

    /// Replaces a lost connection: the source learns which pages have arrived, and the guest requests again.
    fn connect(&mut self) {
        self.requests.clear();
        self.main.clear();
        self.urgent.clear();
        self.ledger = Ledger::new(&blocks());
        let (epoch, mut answers) = (self.epoch, 0);
        let mut recovery = Recovery::new(&self.ledger, epoch);
        let rest = loop {
            match recovery.next(epoch).unwrap() {
                Step::Prepare => {}
                Step::Receive(_) => panic!("all is answered"),
                Step::Resumed(rest) => break rest,
                Step::Send(_) => {
                    // A thread that slept through the interruption requests before the answer, and again after it.
                    if self.rng.bool() {
                        recovery.receive(&request(Some("small"), 3));
                    }
                    let received = &self.received;
                    recovery.receive(&match BLOCKS.get(answers) {
                        None => encode(&[ReturnMessage::ResumeAck(1)]),
                        Some((name, pages, _)) => bitmap(name, *pages, |word| {
                            let has = |bit| received.contains(&(answers, word * 64 + bit));
                            (0..64).fold(0, |bits, bit| bits | u64::from(has(bit)) << bit)
                        }),
                    });
                    answers += 1;
                }
            }
        };
        (self.near, self.rest) = (near(), all().collect());
        self.share = Vec::new().into_iter();
        (self.named, self.asked, self.answering) = (None, None, None);
        (self.longest, self.has_ended) = (Duration::ZERO, false);
        (self.is_lost, self.main_has_ended) = (false, false);
        if !rest.is_empty() {
            self.requests.push_back(rest);
        }
        for page in self.waits.open() {
            self.ask((page.block, page.page));
        }
    }

    fn ask(&mut self, (block, page): Place) {
        let name = (self.asked != Some(block)).then_some(BLOCKS[block].0);
        self.asked = Some(block);
        self.requests.push_back(request(name, page));
    }

    /// A thread of the guest touches a page.
    fn touch(&mut self, what: &str) {
        let thread = self.rng.u32(0..6);
        let block = self.rng.usize(0..BLOCKS.len());
        let place = first((block, self.rng.usize(0..BLOCKS[block].1)));
        let (place, is_known) = match self.threads.get(&thread) {
            // The kernel reports it again.
            Some((place, _)) => (*place, true),
            None => (place, false),
        };
        if self.received.contains(&place) {
            return;
        }
        let fault = fault(place);
        let is_first = self.waits.begin(Touch { fault, thread }, self.time());
        let is_asked = self.threads.values().any(|(other, _)| *other == place);
        assert_eq!(is_first, !is_asked, "{what}: {place:?}");
        if !is_known {
            self.threads.insert(thread, (place, self.now));
        }
        if is_first && !self.is_lost {
            self.ask(place);
        }
    }

    fn deliver_request(&mut self) {
        let Some(mut bytes) = self.requests.pop_front().filter(|_| !self.is_lost) else {
            return;
        };
        // A request may arrive twice.
        if self.rng.u8(0..8) == 0 {
            bytes.extend_from_within(..);
        }
        let mut unread = &bytes[..];
        while !unread.is_empty() {
            let (message, length) = ReturnMessage::decode(unread).unwrap();
            let now = self.epoch + self.now;
            self.ledger.record(&mut self.named, &message, now).unwrap();
            unread = &unread[length..];
        }
    }

    fn send(&mut self, block: usize, page: usize) {
        let pages = self.ledger.pages_of_group(block, page);
        self.send_on_main(pages.map(|page| (block, page)).collect());
    }

    fn send_on_main(&mut self, pages: Vec<Place>) {
        assert!(pages.is_empty() || !self.has_ended, "{pages:?} behind END");
        self.main.push_back(Sent::Pages(pages));
    }

    /// The answering thread takes a request.
    fn take_request(&mut self) {
        if self.answering.is_none() && self.ledger.order.lock().is_waiting() {
            self.answering = self.ledger.next_request();
        }
    }

    /// The answering thread sends its answer.
    fn answer(&mut self) {
        let Some(request) = self.answering.take() else {
            return;
        };
        let Request { block, page, since } = request;
        self.near.record_request(block, page);
        let is_sent = !self.ledger.claim(block, page);
        let now = self.time();
        let order = &self.ledger.order;
        order.change(|order| order.done(&request, (!is_sent).then_some(now)));
        if is_sent {
            return;
        }
        self.longest = self.longest.max(now - since);
        match self.has_preempt {
            true => {
                let pages = self.ledger.pages_of_group(block, page);
                self.urgent
                    .push_back(pages.map(|page| (block, page)).collect());
            }
            false => self.send(block, page),
        }
        if has_content((block, page)) && !self.ledger.has_huge_pages(block) {
            let mut batch = Batch::default();
            let decoded = page..self.ledger.pages(block).min(page + DECODED);
            let decoded = decoded.filter(|page| has_content((block, *page)));
            decoded.for_each(|page| batch.add(page, &[1; PAGE_SIZE]));
            match self.rng.bool() {
                true => self.send_batch(block, batch),
                false => self.ledger.order.lock().queue_neighbours(block, batch),
            }
        }
    }

    fn send_batch(&mut self, block: usize, mut batch: Batch) {
        batch.claim(block, &self.ledger);
        self.send_on_main(batch.pages().map(|page| (block, page)).collect());
    }

    /// Runs one step of the background; returns false once it has visited all pages.
    fn send_one(&mut self) -> bool {
        match self.ledger.next_of(&mut self.share) {
            Some(Next::Neighbours(block, batch)) => self.send_batch(block, batch),
            Some(Next::From((block, page))) => {
                if has_content((block, page)) && self.ledger.claim(block, page) {
                    self.send(block, page);
                }
            }
            None => {
                let share = self.near.next().unwrap_or_else(|| {
                    let share = self.rest.len().min(16);
                    self.rest.drain(..share).collect()
                });
                if share.is_empty() {
                    return false;
                }
                self.share = share.into_iter();
            }
        }
        true
    }

    /// Ends main, as soon as the source may.
    fn end(&mut self) {
        if self.is_lost || self.has_ended {
            return;
        }
        if !self.has_preempt {
            self.ledger.order.change(RequestQueue::end);
            if !self.ledger.order.lock().is_drained() {
                return;
            }
        }
        self.has_ended = true;
        self.main.push_back(Sent::End);
    }

    /// Delivers pages, over one of the two connections.
    fn deliver(&mut self) {
        if self.is_lost {
            return;
        }
        let pages = match self.rng.bool() {
            true => self.urgent.pop_front(),
            false => match self.main.pop_front() {
                Some(Sent::Pages(pages)) => Some(pages),
                Some(Sent::End) => {
                    self.main_has_ended = true;
                    None
                }
                None => None,
            },
        };
        for place in pages.into_iter().flatten() {
            assert!(self.received.insert(place), "{place:?} comes twice");
            self.waits.page_arrived(fault(place), self.epoch + self.now);
            let now = self.now;
            let longest = &mut self.longest_wait;
            self.threads.retain(|_, (other, since)| {
                let waits = *other != place;
                if !waits {
                    *longest = now.saturating_sub(*since).max(*longest);
                }
                waits
            });
        }
    }

    /// Returns true if the destination considers itself complete.
    fn is_complete(&self) -> bool {
        self.main_has_ended && (!self.has_preempt || self.waits.all_arrived())
    }
}

fn request(block: Option<&'static str>, page: usize) -> Vec<u8> {
    let (start, length) = ((page * PAGE_SIZE) as u64, 4096);
    encode(&[match block {
        None => ReturnMessage::ReqPages { start, length },
        Some(block) => ReturnMessage::ReqPagesId {
            start,
            length,
            block,
        },
    }])
}

#[test]
fn each_page_arrives_once_and_no_thread_stays_after_any_number_of_lost_connections() {
    for seed in 0..3000 {
        let what = format!("seed {seed}");
        let mut world = World::new(seed);
        for _ in 0..world.rng.usize(0..800) {
            world.now += US * world.rng.u32(0..50);
            match world.rng.u8(0..100) {
                0..20 => world.touch(&what),
                20..35 => world.deliver_request(),
                35..45 => world.take_request(),
                45..55 => world.answer(),
                55..75 if !world.is_lost => drop(world.send_one()),
                75..97 => world.deliver(),
                97..99 => match world.is_lost {
                    true => world.connect(),
                    false => world.lose(),
                },
                _ if !world.is_lost && !world.send_one() => world.end(),
                _ => {}
            }
            if world.is_complete() {
                break;
            }
        }
        // No connection is lost any more, and the guest soon stops touching pages.
        if world.is_lost && !world.is_complete() {
            world.connect();
        }
        for step in 0..50_000 {
            if world.is_complete() {
                break;
            }
            match world.rng.u8(0..6) {
                0 => world.deliver_request(),
                1 => world.take_request(),
                2 => world.answer(),
                3 if !world.send_one() => world.end(),
                4 => world.deliver(),
                5 if step < 1500 => world.touch(&what),
                _ => {}
            }
        }
        assert!(world.is_complete(), "{what}");
        let missing = all().filter(|place| has_content(*place) && !world.received.contains(place));
        assert_eq!(missing.count(), 0, "{what}");
        // Pages that were never sent are zero.
        let mut open = world.threads.values();
        assert!(open.all(|(place, _)| !has_content(*place)), "{what}");
        assert!(!world.has_preempt || world.threads.is_empty(), "{what}");
        let longest = |took: Duration| f64::from(u32::try_from(took.as_micros()).unwrap());
        let latencies = world.ledger.order.lock().latencies();
        assert_eq!(latencies[2], longest(world.longest), "{what}");
        let figures = world.waits.figures(Duration::ZERO);
        assert_eq!(figures.pages, world.received.len() as u64, "{what}");
        assert_eq!(figures.wait_us[2], longest(world.longest_wait), "{what}");
    }
}

#[test]
fn neighbours_of_a_requested_page_are_sent_before_the_rest() {
    let mut world = World::new(7);
    world.has_preempt = false;
    world.ask((0, 101));
    world.deliver_request();
    world.take_request();
    world.answer();
    while world.send_one() {}
    let sent = world.main.iter().flat_map(|sent| match sent {
        Sent::Pages(pages) => pages.clone(),
        Sent::End => Vec::new(),
    });
    let near = (101..128).chain(64..101).map(|page| (0, page));
    let near: Vec<Place> = near.filter(|place| has_content(*place)).collect();
    let sent: Vec<Place> = sent.take(near.len()).collect();
    assert_eq!(sent, near);
}

#[test]
fn a_thread_requests_a_page_once_and_its_arrival_ends_all_waits() {
    let (mut waits, now) = (Waits::default(), Instant::now());
    let touch = |page, thread| Touch {
        fault: fault((0, page)),
        thread,
    };
    assert!(waits.begin(touch(3, 1), now) && !waits.begin(touch(3, 1), now));
    assert!(!waits.begin(touch(3, 2), now) && waits.begin(touch(1, 3), now));
    assert_eq!(waits.open(), [fault((0, 1)), fault((0, 3))]);
    assert_eq!(waits.latest, None);
    waits.page_arrived(fault((0, 3)), now + US);
    assert_eq!(waits.open(), [fault((0, 1))]);
    assert!(!waits.all_arrived());
    waits.page_arrived(fault((0, 1)), now + 2 * US);
    assert!(waits.all_arrived() && waits.latest == Some(now + 2 * US));
    let figures = waits.figures(Duration::ZERO);
    assert_eq!((figures.pages, figures.requests), (2, 2));
}

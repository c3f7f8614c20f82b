//! Fills RAM with generated pages that resemble a server's memory, from a seed only.

use hotlift_mem::PAGE_SIZE;

use crate::bytes::{low_u8, low_u32, reduce, to_u64, to_usize};
use crate::workload::nth;

/// Words of the text pages, frequent words first.
const WORDS: [&str; 48] = [
    "the",
    "of",
    "and",
    "to",
    "in",
    "a",
    "is",
    "that",
    "for",
    "it",
    "was",
    "on",
    "with",
    "as",
    "be",
    "page",
    "memory",
    "guest",
    "from",
    "channel",
    "state",
    "error",
    "while",
    "before",
    "request",
    "value",
    "thread",
    "connection",
    "2024",
    "INFO",
    "WARN",
    "status=200",
    "GET",
    "user",
    "session",
    "{\"id\":",
    "},",
    "null",
    "true",
    "bytes",
    "migration",
    "started",
    "finished",
    "timeout",
    "192.168.0.",
    "retry",
    "cache",
    "\n",
];

/// Frequent opcodes and operands of compiled x86-64 code, the most frequent first.
const CODE: [u8; 32] = [
    0x48, 0x00, 0x8b, 0xff, 0x89, 0x0f, 0xe8, 0x24, 0x4c, 0x85, 0xc0, 0x83, 0x41, 0x44, 0x74, 0xc7,
    0x8d, 0x05, 0x45, 0x08, 0x10, 0x20, 0x75, 0x49, 0x31, 0xc3, 0x5d, 0xeb, 0x18, 0x90, 0xf6, 0x01,
];

/// Writes generated page `number` to `page`; its kind is random under `seed`: 35 % text, 30 % code, 25 % heap, 10 %
/// random.
pub(super) fn page(seed: u64, number: u64, page: &mut [u8; PAGE_SIZE]) {
    let mut random = Numbers::new(nth(seed, number));
    match random.below(100) {
        0..35 => text(&mut random, page),
        35..65 => code(&mut random, page),
        65..90 => heap(&mut random, page),
        _ => random.fill(page),
    }
}

/// Random number generator with a seed.
pub(super) struct Numbers {
    start: u64,
    count: u64,
}

impl Numbers {
    /// Returns a generator with the seed `start`.
    pub fn new(start: u64) -> Self {
        Self { start, count: 0 }
    }

    fn next(&mut self) -> u64 {
        self.count += 1;
        nth(self.start, self.count)
    }

    /// Returns the next random number, in `0..bound`.
    pub fn below(&mut self, bound: u64) -> u64 {
        reduce(self.next(), bound)
    }

    /// Returns the next random number in `0..bound`, as usize for lengths and offsets.
    pub fn below_len(&mut self, bound: usize) -> usize {
        to_usize(self.below(to_u64(bound)))
    }

    /// Fills a page with random bits.
    pub fn fill(&mut self, page: &mut [u8; PAGE_SIZE]) {
        page.chunks_exact_mut(8)
            .for_each(|to| to.copy_from_slice(&self.next().to_le_bytes()));
    }
}

/// Returns a number in `0..64` from twelve random bits. Small numbers are more frequent.
fn low_of_64(bits: u64) -> usize {
    to_usize((bits & 63).min(bits >> 6 & 63))
}

/// Writes words, each followed by a space, and sometimes a number. One random number gives five choices.
fn text(random: &mut Numbers, page: &mut [u8; PAGE_SIZE]) {
    let mut at = 0;
    while at < PAGE_SIZE {
        let bits = random.next();
        for choice in 0..5 {
            at = match WORDS.get(low_of_64(bits >> (12 * choice))) {
                Some(word) => put(page, at, word.as_bytes()),
                None => put(page, at, (bits & 0xffff).to_string().as_bytes()),
            };
            at = put(page, at, b" ");
        }
    }
}

/// Writes imitated machine code: random opcodes with mostly empty operands, and recurring sequences such as prologues.
fn code(random: &mut Numbers, page: &mut [u8; PAGE_SIZE]) {
    let mut at = 0;
    while at < PAGE_SIZE {
        let bits = random.next();
        let back = to_usize(bits >> 48 & 511);
        if bits >> 60 < 8 && (8..=at).contains(&back) {
            let run = (6 + to_usize(bits & 15)).min(PAGE_SIZE - at).min(back);
            page.copy_within(at - back..at - back + run, at);
            at += run;
        } else {
            let opcode = |choice: u32| CODE[low_of_64(bits >> (12 * choice)) / 2];
            let operand = if bits >> 60 > 12 {
                low_u8(bits >> 40)
            } else {
                0
            };
            at = put(page, at, &[opcode(0), opcode(1), opcode(2), operand]);
        }
    }
}

/// Writes `bytes` at offset `at`, cut at the end of the page. Returns the end offset.
pub(super) fn put(page: &mut [u8; PAGE_SIZE], at: usize, bytes: &[u8]) -> usize {
    let room = &mut page[at..];
    let len = bytes.len().min(room.len());
    room[..len].copy_from_slice(&bytes[..len]);
    at + len
}

/// Writes imitated heap objects of one size: pointers into one region, counters, and empty fields.
fn heap(random: &mut Numbers, page: &mut [u8; PAGE_SIZE]) {
    let arena = 0x7f00_0000_0000 + (u64::from(low_u32(random.next())) << 12);
    let fields = 4 + random.below(12);
    let kinds = random.next();
    for (field, to) in (0u64..).zip(page.chunks_exact_mut(8)) {
        // The first field is the type of the object, so no page of objects is all zero.
        let kind = if field % fields == 0 {
            10
        } else {
            (kinds >> (field % fields * 4)) & 15
        };
        let value = match kind {
            0..6 => 0,
            6..11 => arena + random.below(1 << 16) * 16,
            11..14 => random.below(1000),
            14 => 0xffff_ffff_ffff_ffff,
            _ => random.next(),
        };
        to.copy_from_slice(&value.to_le_bytes());
    }
}

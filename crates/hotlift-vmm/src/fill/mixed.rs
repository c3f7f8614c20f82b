//! Fills RAM with alternating runs of text and incompressible data. Such data occurs where caches of pictures,
//! encrypted files and databases are adjacent. No single compression method is best for all of it.

use hotlift_mem::PAGE_SIZE;

use super::generated::{Numbers, put};
use crate::workload::nth;

/// Length of the shortest run in pages: 64 KiB.
const SHORTEST: u64 = (64 << 10) / PAGE_SIZE as u64;

/// Number of doublings between the shortest run and the longest, which is below 16 MiB.
const OCTAVES: usize = 8;

/// Number of words in the text: as many as in a few megabytes of prose. Each word occurs at least once per 512 KiB
/// packet.
const WORDS: u64 = 1 << 12;

/// Parts of words. Syllables are used instead of letters, so that different words share parts, as in a natural
/// language.
const SYLLABLES: [&str; 32] = [
    "an", "be", "con", "de", "er", "ti", "in", "ly", "ma", "no", "or", "per", "re", "st", "the",
    "un", "al", "ca", "di", "en", "for", "ing", "lo", "me", "ous", "pro", "ra", "sion", "ter",
    "ver", "y", "s",
];

/// Runs of text pages and runs of random pages, half and half.
pub(super) struct Mixed {
    seed: u64,
    words: Vec<String>,
    /// End of each run, in pages. Text runs and random runs alternate; the first is a text run.
    ends: Vec<u64>,
}

impl Mixed {
    /// Creates the alternating runs for `pages` pages of RAM.
    pub fn new(pages: u64, seed: u64) -> Self {
        let mut random = Numbers::new(nth(seed, 0x6d69_7865));
        let words = (1..=WORDS).map(|rank| word(&mut random, rank)).collect();
        let mut ends = Vec::new();
        let mut end = 0;
        while end < pages {
            // Text runs and random runs have the same lengths in different orders: equal shares without a fixed
            // pattern.
            let lengths = lengths(&mut random);
            let mut others = lengths;
            shuffle(&mut random, &mut others);
            for length in lengths.into_iter().zip(others).flat_map(<[u64; 2]>::from) {
                end += length;
                ends.push(end);
            }
        }
        Self { seed, words, ends }
    }

    /// Writes the content of page `number` to `page`.
    pub fn page(&self, number: u64, page: &mut [u8; PAGE_SIZE]) {
        let mut random = Numbers::new(nth(self.seed, number));
        let run = self.ends.partition_point(|&end| end <= number);
        match run.is_multiple_of(2) {
            true => self.text(&mut random, page),
            false => random.fill(page),
        }
    }

    /// Writes sentences to a page, with occasional numbers and repetitions of earlier text, as in records and markup.
    fn text(&self, random: &mut Numbers, page: &mut [u8; PAGE_SIZE]) {
        let mut at = 0;
        while at < PAGE_SIZE {
            at = match random.below(64) {
                0..6 if at > 512 => {
                    let from = random.below_len(at - 64);
                    let run = (12 + random.below_len(40)).min(PAGE_SIZE - at);
                    page.copy_within(from..from + run, at);
                    at + run
                }
                6..8 => put(page, at, (random.below(10_000)).to_string().as_bytes()),
                8..11 => put(page, at, b", "),
                11..13 => put(page, at, b".\n"),
                _ => put(page, at, self.words[rank(random)].as_bytes()),
            };
        }
    }
}

/// Returns a random word rank by Zipf's law: the first rank, the next two ranks, the next four and so on are equally
/// frequent.
fn rank(random: &mut Numbers) -> usize {
    let octave = 1 << random.below_len(WORDS.ilog2() as usize);
    octave - 1 + random.below_len(octave)
}

/// Returns the word with rank `rank`, and a space. Frequent words are short.
fn word(random: &mut Numbers, rank: u64) -> String {
    let most = 1 + u64::from(rank.ilog2()) / 4;
    let syllables = (0..=random.below(most)).map(|_| SYLLABLES[random.below_len(SYLLABLES.len())]);
    syllables.chain([" "]).collect()
}

/// Returns random run lengths in pages, one between each power of two and the next, in random order.
fn lengths(random: &mut Numbers) -> [u64; OCTAVES] {
    let mut octave = SHORTEST;
    let mut lengths = [(); OCTAVES].map(|()| {
        let length = octave + random.below(octave);
        octave *= 2;
        length
    });
    shuffle(random, &mut lengths);
    lengths
}

fn shuffle(random: &mut Numbers, values: &mut [u64]) {
    for i in (1..values.len()).rev() {
        values.swap(i, random.below_len(i + 1));
    }
}

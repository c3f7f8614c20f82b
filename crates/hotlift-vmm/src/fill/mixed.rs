//! A fill of alternating stretches: text, then incompressible data, as where caches of pictures, encrypted files and databases
//! are adjacent. No single method is the best for all of it.

use hotlift_mem::PAGE_SIZE;

use super::generated::{Numbers, put};
use crate::workload::nth;

/// Pages of the shortest run: 64 KiB.
const SHORTEST: u64 = (64 << 10) / PAGE_SIZE as u64;

/// Doublings from the shortest run to the longest, which is below 16 MiB.
const OCTAVES: usize = 8;

/// Words of the text: as many as in a few megabytes of prose; each occurs at least once per 512 KiB packet.
const WORDS: u64 = 1 << 12;

/// Parts of words. Syllables, not letters, so that different words share parts, as in a natural language.
const SYLLABLES: [&str; 32] = [
    "an", "be", "con", "de", "er", "ti", "in", "ly", "ma", "no", "or", "per", "re", "st", "the",
    "un", "al", "ca", "di", "en", "for", "ing", "lo", "me", "ous", "pro", "ra", "sion", "ter",
    "ver", "y", "s",
];

/// Pages of text and random ones, half and half, in runs.
pub(super) struct Mixed {
    seed: u64,
    words: Vec<String>,
    /// End of each run, in pages. Text and random runs alternate; the first is text.
    ends: Vec<u64>,
}

impl Mixed {
    /// Returns a fill of that number of pages.
    pub fn new(pages: u64, seed: u64) -> Self {
        let mut random = Numbers::new(nth(seed, 0x6d69_7865));
        let words = (1..=WORDS).map(|rank| word(&mut random, rank)).collect();
        let mut ends = Vec::new();
        let mut end = 0;
        while end < pages {
            // Both kinds have the same lengths, in different orders: equal shares without a rhythm.
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

    /// Writes page `number`.
    pub fn page(&self, number: u64, page: &mut [u8; PAGE_SIZE]) {
        let mut random = Numbers::new(nth(self.seed, number));
        let run = self.ends.partition_point(|&end| end <= number);
        match run.is_multiple_of(2) {
            true => self.text(&mut random, page),
            false => random.fill(page),
        }
    }

    /// Writes sentences, sometimes with a number, and sometimes with a repetition of earlier text, as in records and markup.
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

/// Returns the rank of a word: the first, the next two, the next four … are equally frequent, by Zipf's law.
fn rank(random: &mut Numbers) -> usize {
    let octave = 1 << random.below_len(WORDS.ilog2() as usize);
    octave - 1 + random.below_len(octave)
}

/// Returns a word and a space; frequent words are short.
fn word(random: &mut Numbers, rank: u64) -> String {
    let most = 1 + u64::from(rank.ilog2()) / 4;
    let syllables = (0..=random.below(most)).map(|_| SYLLABLES[random.below_len(SYLLABLES.len())]);
    syllables.chain([" "]).collect()
}

/// Returns a length of each octave, in any order: logarithms of lengths are spread evenly.
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

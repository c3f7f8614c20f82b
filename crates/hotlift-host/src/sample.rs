//! Samples random pages of memory, in packets of adjacent pages: a packet is compressed together, as in a migration.

use std::collections::HashSet;

use hotlift_mem::{PAGE_SIZE, zero};
use serde::Serialize;

use super::error::HostError;

/// Number of pages in a packet: 512 KiB, as QEMU's `MULTIFD_PACKET_SIZE`.
pub const PACKET_PAGES: usize = 128;

/// Size of a packet's pages, in bytes.
pub const PACKET: usize = PACKET_PAGES * PAGE_SIZE;

/// Maximum number of packets read for each packet of content that is wanted. Without a limit, memory that is mostly zero would
/// be read completely.
const MAX_READS_PER_PACKET: u64 = 16;

/// Memory that can be sampled, packet by packet.
pub trait Memory {
    /// Returns a description of the memory for the operator.
    fn name(&self) -> &str;
    /// Returns the size of the memory in bytes.
    fn bytes(&self) -> u64;
    /// Reads the pages of the packet with number `packet` into `to`, which must be empty. Returns which pages were never
    /// touched; these read as zero. Returns `None` if the memory no longer exists. The last packet may be shorter.
    fn read(&self, packet: u64, to: &mut Vec<u8>) -> Result<Option<Untouched>, HostError>;
}

/// One flag for each page of a packet: true if the page was never touched.
pub type Untouched = [bool; PACKET_PAGES];

/// The pages of a packet that are not zero.
#[derive(Debug, Clone, Default)]
pub struct Packet {
    /// Content of these pages, one after another.
    pub content: Vec<u8>,
    /// Runs of adjacent pages: offset in the packet and length of each, in bytes.
    pub runs: Vec<(usize, usize)>,
}

impl Packet {
    fn push(&mut self, at: usize, page: &[u8; PAGE_SIZE]) {
        self.content.extend_from_slice(page);
        match self.runs.last_mut() {
            Some((start, len)) if *start + *len == at => *len += PAGE_SIZE,
            _ => self.runs.push((at, PAGE_SIZE)),
        }
    }
}

/// A random sample of memory.
#[derive(Debug, Clone, Default, Serialize)]
pub struct Sample {
    /// Description of the sampled memory.
    pub memory: String,
    /// Size of the whole memory, in bytes.
    pub memory_bytes: u64,
    /// Number of pages read.
    pub pages: usize,
    /// Number of pages read that were never touched.
    pub untouched: usize,
    /// Number of pages read that were touched, but are zero.
    pub zero: usize,
    /// All other pages read, by packet.
    #[serde(skip)]
    pub packets: Vec<Packet>,
}

impl Sample {
    /// Reads random packets of `memory`. Stops after the packet that completes `limit` bytes of pages that are not zero. Also
    /// stops after all packets, or after 16 times the packets of `limit`. `seed` determines the choice.
    ///
    /// # Errors
    /// If the memory cannot be read.
    pub fn draw(memory: &dyn Memory, limit: u64, seed: u64) -> Result<Self, HostError> {
        let mut sample = Self {
            memory: memory.name().to_owned(),
            memory_bytes: memory.bytes(),
            ..Self::default()
        };
        let packets = memory.bytes().div_ceil(PACKET as u64);
        let enough = limit.div_ceil(PACKET as u64).max(1);
        let mut content = 0;
        for packet in order(packets, enough.saturating_mul(MAX_READS_PER_PACKET), seed) {
            let mut pages = Vec::with_capacity(PACKET);
            let Some(untouched) = memory.read(packet, &mut pages)? else {
                continue;
            };
            content += sample.keep(&pages, &untouched) as u64;
            if content >= limit {
                break;
            }
        }
        Ok(sample)
    }

    /// Counts the pages of a packet, and stores those that are not zero; returns their size in bytes.
    fn keep(&mut self, pages: &[u8], untouched: &Untouched) -> usize {
        let mut packet = Packet::default();
        for (i, page) in pages.as_chunks::<PAGE_SIZE>().0.iter().enumerate() {
            self.pages += 1;
            if untouched[i] {
                self.untouched += 1;
            } else if zero::is_zero(page) {
                self.zero += 1;
            } else {
                packet.push(i * PAGE_SIZE, page);
            }
        }
        let content = packet.content.len();
        if content > 0 {
            self.packets.push(packet);
        }
        content
    }

    /// Returns `pages` divided by the number of pages read.
    pub fn share(&self, pages: usize) -> f64 {
        pages as f64 / self.pages.max(1) as f64
    }

    /// Returns the size of the sampled pages that are not zero, in bytes.
    pub fn content(&self) -> usize {
        self.packets.iter().map(|packet| packet.content.len()).sum()
    }
}

/// Returns `most` different numbers below `packets`, in random order; all numbers below `packets` if there are fewer than
/// `most`.
fn order(packets: u64, most: u64, seed: u64) -> Vec<u64> {
    let mut noise = seed | 1;
    let mut below = |end: u64| {
        noise ^= noise << 13;
        noise ^= noise >> 7;
        noise ^= noise << 17;
        u64::try_from((u128::from(noise) * u128::from(end)) >> 64).unwrap_or(0)
    };
    if packets <= most.saturating_mul(2) {
        let mut all: Vec<u64> = (0..packets).collect();
        for i in (1..packets).rev() {
            if let (Ok(i), Ok(other)) = (usize::try_from(i), usize::try_from(below(i + 1))) {
                all.swap(i, other);
            }
        }
        all.truncate(usize::try_from(most).unwrap_or(usize::MAX));
        return all;
    }
    let mut seen = HashSet::new();
    let mut drawn = Vec::new();
    while (drawn.len() as u64) < most {
        let packet = below(packets);
        if seen.insert(packet) {
            drawn.push(packet);
        }
    }
    drawn
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn packets_are_sampled_once_each_and_never_beyond_the_end() {
        for (packets, most) in [(0, 5), (1, 5), (10, 5), (10, 10), (100_000, 50)] {
            let drawn = order(packets, most, 7);
            let different: HashSet<_> = drawn.iter().collect();
            assert_eq!(different.len(), drawn.len(), "{packets} {most}");
            assert_eq!(drawn.len() as u64, packets.min(most));
            assert!(drawn.iter().all(|packet| *packet < packets));
        }
        assert_ne!(order(1000, 10, 1), order(1000, 10, 3), "seeds differ");
    }

    struct Striped;

    impl Memory for Striped {
        fn name(&self) -> &str {
            "stripes"
        }
        fn bytes(&self) -> u64 {
            (40 * PACKET) as u64
        }
        /// In each packet, a quarter of the pages is untouched, and a quarter is zero.
        fn read(&self, packet: u64, to: &mut Vec<u8>) -> Result<Option<Untouched>, HostError> {
            to.resize(64 * PAGE_SIZE, 0);
            to.resize(128 * PAGE_SIZE, 7);
            let untouched = std::array::from_fn(|page| page < 32);
            Ok((packet != 3).then_some(untouched))
        }
    }

    #[test]
    fn sample_shares_match_the_memory_and_the_limit_is_kept() {
        let sample = Sample::draw(&Striped, 2 * PACKET as u64, 1).unwrap();
        assert_eq!(sample.packets.len(), 4);
        assert!((sample.share(sample.untouched) - 0.25).abs() < 1e-9);
        assert!((sample.share(sample.zero) - 0.25).abs() < 1e-9);
        assert_eq!(sample.content(), 4 * 64 * PAGE_SIZE);
        assert_eq!(sample.packets[0].runs, [(64 * PAGE_SIZE, 64 * PAGE_SIZE)]);
        let all = Sample::draw(&Striped, u64::MAX, 1).unwrap();
        assert_eq!(all.packets.len(), 39, "all but the one that has gone");
    }
}

//! Random pages from memory, in batches of a packet: pages that are compressed together are neighbours.

use std::collections::HashSet;

use hotlift_mem::{PAGE_SIZE, zero};
use serde::Serialize;

use super::error::HostError;

/// Pages of a packet (QEMU's `MULTIFD_PACKET_SIZE` of 512 KiB).
pub const PACKET_PAGES: usize = 128;

/// Bytes of a packet's pages.
pub const PACKET: usize = PACKET_PAGES * PAGE_SIZE;

/// Maximum packets read per wanted packet, so that mostly zero memory also yields enough content.
const MAX_READS_PER_PACKET: u64 = 16;

/// Memory to sample.
pub trait Memory {
    /// Returns a description for the operator.
    fn name(&self) -> &str;
    /// Returns its size in bytes.
    fn bytes(&self) -> u64;
    /// Reads a packet's pages into the empty `to`; returns the untouched pages, which are zero, or `None` if the memory is
    /// gone. The last packet may be shorter.
    fn read(&self, packet: u64, to: &mut Vec<u8>) -> Result<Option<Untouched>, HostError>;
}

/// For each page of a packet, true if it was never touched.
pub type Untouched = [bool; PACKET_PAGES];

/// The pages with content of a packet.
#[derive(Debug, Clone, Default)]
pub struct Packet {
    /// Content of the pages, concatenated.
    pub content: Vec<u8>,
    /// Offset in the packet and length of each run of neighbours.
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

/// Random sample of memory.
#[derive(Debug, Clone, Default, Serialize)]
pub struct Sample {
    /// Description of the memory.
    pub memory: String,
    /// Size of the whole memory in bytes.
    pub memory_bytes: u64,
    /// Pages read.
    pub pages: usize,
    /// Untouched pages among them.
    pub untouched: usize,
    /// Touched zero pages among them.
    pub zero: usize,
    /// The other pages, per packet.
    #[serde(skip)]
    pub packets: Vec<Packet>,
}

impl Sample {
    /// Reads random packets until `limit` bytes of pages with content are found, rounded up to a packet, or all are read.
    ///
    /// # Errors
    /// The memory cannot be read.
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

    /// Counts a packet's pages and keeps those with content; returns the bytes of the latter.
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

    /// Returns `pages` as a share of the pages read.
    pub fn share(&self, pages: usize) -> f64 {
        pages as f64 / self.pages.max(1) as f64
    }

    /// Returns the bytes of the pages with content.
    pub fn content(&self) -> usize {
        self.packets.iter().map(|packet| packet.content.len()).sum()
    }
}

/// Returns at most `most` different numbers below `packets`, in random order; all of them if there are few more.
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
        /// A quarter of each packet is untouched, a quarter zero.
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

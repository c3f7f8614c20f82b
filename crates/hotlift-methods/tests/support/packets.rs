//! Packets, and guest memory to decode them into. The tests of hotlift-accel also use this file.
#![allow(dead_code)]

use hotlift_mem::{Backing, GuestRun, PAGE_SIZE, RamBlock};

/// Value of every byte of a target before a packet is decoded into it.
pub const CANARY: u8 = 0xa5;

/// A seeded generator (xorshift64*).
pub struct Noise(u64);

impl Noise {
    pub fn new(seed: u64) -> Self {
        Self(seed.wrapping_mul(0x9e37_79b9_7f4a_7c15) | 1)
    }

    pub fn next(&mut self) -> u64 {
        self.0 ^= self.0 >> 12;
        self.0 ^= self.0 << 25;
        self.0 ^= self.0 >> 27;
        self.0.wrapping_mul(0x2545_f491_4f6c_dd1d)
    }

    pub fn below(&mut self, n: usize) -> usize {
        usize::try_from(self.next() >> 33).expect("31 bits") % n
    }

    pub fn byte(&mut self) -> u8 {
        self.next().to_be_bytes()[0]
    }
}

/// Kinds of page contents.
pub const CONTENTS: [&str; 5] = ["zero", "text", "binary", "random", "alternating"];

/// Returns `pages` pages of that kind, different for each packet number.
pub fn contents(kind: &str, pages: usize, packet: u64) -> Vec<u8> {
    let mut noise = Noise::new(packet + 1);
    (0..pages)
        .flat_map(|page| {
            let kind = match kind {
                "alternating" => CONTENTS[page % 4],
                kind => kind,
            };
            page_of(kind, page, &mut noise)
        })
        .collect()
}

fn page_of(kind: &str, page: usize, noise: &mut Noise) -> Vec<u8> {
    const WORDS: [&str; 12] = [
        "page",
        "round",
        "packet",
        "channel",
        "dirty",
        "guest",
        "the",
        "of",
        "switchover",
        "a",
        "precopy",
        "\n",
    ];
    let mut bytes = Vec::with_capacity(PAGE_SIZE + 16);
    while bytes.len() < PAGE_SIZE {
        match kind {
            "zero" => bytes.resize(PAGE_SIZE, 0),
            "text" => {
                bytes.extend_from_slice(WORDS[noise.below(WORDS.len())].as_bytes());
                bytes.push(b' ');
            }
            // Records with a counter, a pointer and a few flags.
            "binary" => {
                bytes.extend_from_slice(&(page * PAGE_SIZE + bytes.len()).to_le_bytes());
                bytes
                    .extend_from_slice(&(0xffff_8880_0000_0000 | noise.next() >> 40).to_le_bytes());
                bytes.extend_from_slice(&[noise.byte() & 3, 0, 0, 1]);
            }
            "random" => bytes.extend_from_slice(&noise.next().to_le_bytes()),
            kind => panic!("no such kind of contents: {kind}"),
        }
    }
    bytes.truncate(PAGE_SIZE);
    bytes
}

/// Layout of a packet's pages in a block.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub enum Layout {
    /// One run.
    Whole,
    /// One run per page, adjacent.
    Adjacent,
    /// One run per page, backwards and with a page between any two.
    Scattered,
}

pub const LAYOUTS: [Layout; 3] = [Layout::Whole, Layout::Adjacent, Layout::Scattered];

/// Guest memory with a packet's pages in it, and bytes around them that must not change.
pub struct Place {
    block: RamBlock,
    offsets: Vec<usize>,
    layout: Layout,
}

impl Place {
    pub fn new(pages: usize, layout: Layout) -> Self {
        let block = RamBlock::new("ram", (2 * pages + 2) * PAGE_SIZE, Backing::Private)
            .expect("a RAM block");
        let offsets = match layout {
            Layout::Whole | Layout::Adjacent => (1..=pages).map(|page| page * PAGE_SIZE).collect(),
            Layout::Scattered => (1..=pages)
                .rev()
                .map(|page| 2 * page * PAGE_SIZE - PAGE_SIZE)
                .collect(),
        };
        let place = Self {
            block,
            offsets,
            layout,
        };
        place.clear();
        place
    }

    pub fn clear(&self) {
        self.block
            .write(0, &vec![CANARY; self.block.len()])
            .expect("write the block");
    }

    pub fn runs(&self) -> Vec<GuestRun<'_>> {
        match self.layout {
            Layout::Whole => vec![
                self.block
                    .run(PAGE_SIZE, self.offsets.len() * PAGE_SIZE)
                    .expect("a run"),
            ],
            _ => self
                .offsets
                .iter()
                .map(|&offset| self.block.run(offset, PAGE_SIZE).expect("a run"))
                .collect(),
        }
    }

    /// Returns the pages in their order.
    pub fn pages(&self) -> Vec<u8> {
        let mut pages = vec![0; self.offsets.len() * PAGE_SIZE];
        for (page, &offset) in pages.chunks_mut(PAGE_SIZE).zip(&self.offsets) {
            self.block.read(offset, page).expect("read a page");
        }
        pages
    }

    /// Panics if a byte outside of the pages was written.
    pub fn assert_rest_untouched(&self, what: &str) {
        let mut all = vec![0; self.block.len()];
        self.block.read(0, &mut all).expect("read the block");
        for (page, bytes) in all.chunks(PAGE_SIZE).enumerate() {
            if !self.offsets.contains(&(page * PAGE_SIZE)) {
                let at = bytes.iter().position(|&byte| byte != CANARY);
                assert_eq!(at, None, "{what}: page {page} outside the runs was written");
            }
        }
    }
}

/// Returns a complete stream of stock zlib, with header and Adler-32.
pub fn zlib_stream(bytes: &[u8]) -> Vec<u8> {
    let mut stream = vec![0; bytes.len() + 64];
    let mut len = u64::try_from(stream.len()).expect("64 bits");
    let in_len = u64::try_from(bytes.len()).expect("64 bits");
    // SAFETY: both are slices of the lengths given.
    let code = unsafe {
        libz_sys::compress2(stream.as_mut_ptr(), &raw mut len, bytes.as_ptr(), in_len, 6)
    };
    assert_eq!(code, libz_sys::Z_OK);
    stream.truncate(usize::try_from(len).expect("64 bits"));
    stream
}

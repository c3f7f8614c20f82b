//! Blocks of a save file, read from any place.

use hotlift_mem::{GuestRun, PAGE_SIZE};
use hotlift_methods::{Accelerator, METHODS, MemoryLimit};
use hotlift_wire::multifd::Method;

use super::FileError;
use super::ahead::Ahead;
use super::layout::{BlockHead, Entry, damaged};
use crate::control::Control;
use crate::error::MigrationError;
use crate::stream::codec::{ByMethod, Decoder};

/// One thread's reader: it has the pages of the block that was read last.
pub(crate) struct Blocks<'a> {
    seed: u32,
    memory: &'a MemoryLimit,
    control: &'a Control,
    decoders: ByMethod<Decoder>,
    bytes: Vec<u8>,
    /// Where the block is, and what it says of itself.
    block: Option<(u64, BlockHead)>,
    pages: Vec<u8>,
    /// Blocks that will be read soon.
    pub(super) ahead: Ahead,
}

impl<'a> Blocks<'a> {
    /// Of the file whose header has the CRC `seed`.
    pub(crate) fn new(seed: u32, memory: &'a MemoryLimit, control: &'a Control) -> Self {
        Self {
            seed,
            memory,
            control,
            decoders: ByMethod::new(0),
            bytes: Vec::new(),
            block: None,
            pages: Vec::new(),
            ahead: Ahead::default(),
        }
    }

    /// Makes the decoders of these methods, which the first block would have to wait for.
    pub(crate) fn prepare<'n>(
        &mut self,
        methods: impl Iterator<Item = &'n str>,
    ) -> Result<(), MigrationError> {
        for name in methods {
            let info = METHODS.iter().find(|info| info.name == name);
            if let Some(method) = info.and_then(|info| Method::from_flag(info.flag)) {
                self.decoder(method)?;
            }
        }
        Ok(())
    }

    fn decoder(&mut self, method: Method) -> Result<&mut Decoder, MigrationError> {
        let (memory, control) = (self.memory, self.control);
        self.decoders.get(method, |info| {
            let mut decoder = Decoder::of(info, 0, Accelerator::Auto, memory, control)?;
            decoder.read_header(info)?;
            Ok(decoder)
        })
    }

    /// Reads the block of `entry`, in which the index has the page `wanted` (RAM block and number), by `read` (into a
    /// buffer, from a position; how much there was), unless it is the one that was read last.
    ///
    /// # Errors
    /// [`FileError::Damaged`] for one that is not what was written, or not where the page is.
    pub(crate) fn load(
        &mut self,
        entry: Entry,
        wanted: (usize, u64),
        read: impl FnOnce(&mut [u8], u64) -> Result<usize, FileError>,
    ) -> Result<(), MigrationError> {
        let position = entry.position;
        let bad = || damaged("a block of pages", position);
        if self.block.is_none_or(|(at, _)| at != position) {
            self.block = None;
            // The last one may lie at the end of the file, and its length is rounded up.
            self.bytes.resize(entry.length, 0);
            let got = match self.ahead.copy(&mut self.bytes, position) {
                Some(got) => got,
                None => read(&mut self.bytes, position)?,
            };
            let bytes = std::mem::take(&mut self.bytes);
            let decoded = self.decode(bytes.get(..got).unwrap_or(&bytes), position);
            self.bytes = bytes;
            self.block = Some((position, decoded?));
        }
        let is_there = self.block.is_some_and(|(_, head)| {
            head.ram_block == wanted.0 && head.pages().nth(entry.place) == Some(wanted.1)
        });
        if !is_there {
            return Err(bad().into());
        }
        Ok(())
    }

    fn decode(&mut self, bytes: &[u8], position: u64) -> Result<BlockHead, MigrationError> {
        let decoded = BlockHead::decode(bytes, self.seed, position);
        let (head, payload) = decoded.ok_or_else(|| damaged("a block of pages", position))?;
        self.decode_payload(&head, payload)?;
        Ok(head)
    }

    /// The pages of a block with that payload.
    pub(crate) fn decode_payload(
        &mut self,
        head: &BlockHead,
        payload: &[u8],
    ) -> Result<&[u8], MigrationError> {
        let length = head.len() * PAGE_SIZE;
        let mut pages = std::mem::take(&mut self.pages);
        pages.resize(length, 0);
        let decoded = match head.method {
            Method::None if payload.len() == length => {
                pages.copy_from_slice(payload);
                Ok(())
            }
            Method::None => Err(damaged("the length of a block of pages", head.first).into()),
            method => self.decoder(method).and_then(|decoder| {
                decoder.decode(
                    head.first,
                    "a save file",
                    payload,
                    &[GuestRun::of_buffer(&mut pages)],
                )
            }),
        };
        self.pages = pages;
        decoded.map(|()| &*self.pages)
    }

    /// The page at a place of the block that was read last.
    pub(crate) fn page(&self, place: usize) -> &[u8; PAGE_SIZE] {
        &self.pages.as_chunks().0[place]
    }

    /// All pages of the block that was read last, by number.
    pub(crate) fn pages(&self) -> impl Iterator<Item = (u64, &[u8; PAGE_SIZE])> {
        let numbers = self.block.map(|(_, head)| head.pages());
        numbers.into_iter().flatten().zip(self.pages.as_chunks().0)
    }
}

//! Random access to the blocks of a save file.

use hotlift_mem::{GuestRun, PAGE_SIZE};
use hotlift_methods::{Accelerator, METHODS, MemoryLimit};
use hotlift_wire::multifd::Method;

use super::FileError;
use super::layout::{BlockHead, Entry, damaged};
use super::prefetch::PrefetchedRanges;
use crate::accelerators::HARDWARE;
use crate::control::Control;
use crate::error::MigrationError;
use crate::postcopy::Batch;
use crate::stream::codec::{ByMethod, Decoder};

/// Reader of blocks for one thread. It caches the pages of the block that was decoded last.
pub(crate) struct Blocks<'a> {
    seed: u32,
    memory: &'a MemoryLimit,
    control: &'a Control,
    decoders: ByMethod<Decoder>,
    bytes: Vec<u8>,
    /// File position and head of the cached block.
    block: Option<(u64, BlockHead)>,
    pages: Vec<u8>,
    /// Prefetched blocks.
    pub(super) ahead: PrefetchedRanges,
}

impl<'a> Blocks<'a> {
    /// Creates the reader of a file whose header has the CRC `seed`.
    pub(crate) fn new(seed: u32, memory: &'a MemoryLimit, control: &'a Control) -> Self {
        Self {
            seed,
            memory,
            control,
            decoders: ByMethod::new(0),
            bytes: Vec::new(),
            block: None,
            pages: Vec::new(),
            ahead: PrefetchedRanges::default(),
        }
    }

    /// Creates the decoders of these methods now, to save this time when the first block is read.
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
            let mut decoder = Decoder::of(
                info,
                0,
                Accelerator::Auto(&HARDWARE),
                memory,
                control.accelerator_stats(),
            )?;
            decoder.read_header(info)?;
            Ok(decoder)
        })
    }

    /// Loads the block of `entry`, which must contain the page `wanted` (RAM block, page number). Does nothing if this block is
    /// cached. `read` fills a buffer from a file position, and returns the number of bytes.
    ///
    /// # Errors
    /// [`FileError::Damaged`] for a block that is damaged or does not contain the page.
    pub(crate) fn load(
        &mut self,
        entry: Entry,
        wanted: (usize, u64),
        read: impl FnOnce(&mut [u8], u64) -> Result<usize, FileError>,
    ) -> Result<(), MigrationError> {
        let position = entry.position;
        if self.block.is_none_or(|(at, _)| at != position) {
            self.block = None;
            let head = self.with_block(entry, read, |reader, head, payload| {
                reader.decode_payload(head, payload).map(|_| *head)
            })?;
            self.block = Some((position, head));
        }
        let is_there = self.block.is_some_and(|(_, head)| {
            head.ram_block == wanted.0 && head.pages().nth(entry.place) == Some(wanted.1)
        });
        if !is_there {
            return Err(damaged("a block of pages", position).into());
        }
        Ok(())
    }

    /// Decodes the block of `entry` to `into`, and returns true, if the block has exactly the pages `wanted` (RAM block, page
    /// numbers). Otherwise returns false.
    ///
    /// # Errors
    /// The errors of [`Blocks::load`].
    pub(crate) fn load_to(
        &mut self,
        into: &mut [u8],
        entry: Entry,
        wanted: (usize, impl Iterator<Item = u64>),
        read: impl FnOnce(&mut [u8], u64) -> Result<usize, FileError>,
    ) -> Result<bool, MigrationError> {
        self.with_block(entry, read, |reader, head, payload| {
            if head.ram_block != wanted.0 || !head.pages().eq(wanted.1) {
                return Ok(false);
            }
            reader.decode_to(into, head, payload).map(|()| true)
        })
    }

    /// Reads and verifies the block of `entry`, and passes its head and payload to `take`.
    fn with_block<T>(
        &mut self,
        entry: Entry,
        read: impl FnOnce(&mut [u8], u64) -> Result<usize, FileError>,
        take: impl FnOnce(&mut Self, &BlockHead, &[u8]) -> Result<T, MigrationError>,
    ) -> Result<T, MigrationError> {
        let position = entry.position;
        // The index rounds lengths up, so the last block of the file may have fewer bytes than its entry.
        self.bytes.resize(entry.length, 0);
        let got = match self.ahead.copy(&mut self.bytes, position) {
            Some(got) => got,
            None => read(&mut self.bytes, position)?,
        };
        let bytes = std::mem::take(&mut self.bytes);
        let block = BlockHead::decode(bytes.get(..got).unwrap_or(&bytes), self.seed, position);
        let taken = match block {
            Some((head, payload)) => take(self, &head, payload),
            None => Err(damaged("a block of pages", position).into()),
        };
        self.bytes = bytes;
        taken
    }

    /// Decodes a payload and returns the pages of the block.
    pub(crate) fn decode_payload(
        &mut self,
        head: &BlockHead,
        payload: &[u8],
    ) -> Result<&[u8], MigrationError> {
        let mut pages = std::mem::take(&mut self.pages);
        pages.resize(head.len() * PAGE_SIZE, 0);
        let decoded = self.decode_to(&mut pages, head, payload);
        self.pages = pages;
        decoded.map(|()| &*self.pages)
    }

    /// Decodes all pages of a block to `into`, which has their length.
    fn decode_to(
        &mut self,
        into: &mut [u8],
        head: &BlockHead,
        payload: &[u8],
    ) -> Result<(), MigrationError> {
        match head.method {
            Method::None if payload.len() == into.len() => {
                into.copy_from_slice(payload);
                Ok(())
            }
            Method::None => Err(damaged("the length of a block of pages", head.first).into()),
            method => {
                let was_used = self.decoders.has(method);
                match self.decode_by(method, head.first, into, payload) {
                    // An earlier block may have left a bad state in the decoder: try again with a new one.
                    Err(_) if was_used => self.decode_by(method, head.first, into, payload),
                    decoded => decoded,
                }
            }
        }
    }

    /// Decodes with `method`. A decoder that fails is dropped, because it would fail for every later block.
    fn decode_by(
        &mut self,
        method: Method,
        first: u64,
        into: &mut [u8],
        payload: &[u8],
    ) -> Result<(), MigrationError> {
        let pages = [GuestRun::of_buffer(into)];
        let decoder = self.decoder(method)?;
        let decoded = decoder.decode(first, "a save file", payload, &pages);
        if decoded.is_err() {
            self.decoders.drop(method);
        }
        decoded
    }

    /// Moves all pages of the cached block to the empty `batch`. Afterwards no block is cached.
    pub(crate) fn take_pages(&mut self, batch: &mut Batch) {
        if let Some((_, head)) = self.block.take() {
            batch.fill(head.pages(), &mut self.pages);
        }
    }

    /// Returns the page at index `place` of the cached block.
    pub(crate) fn page(&self, place: usize) -> &[u8; PAGE_SIZE] {
        &self.pages.as_chunks().0[place]
    }

    /// Returns all pages of the cached block, with their page numbers.
    pub(crate) fn pages(&self) -> impl Iterator<Item = (u64, &[u8; PAGE_SIZE])> {
        let numbers = self.block.map(|(_, head)| head.pages());
        numbers.into_iter().flatten().zip(self.pages.as_chunks().0)
    }
}

#[cfg(test)]
mod tests {
    use hotlift_methods::EncoderSettings;

    use super::*;
    use crate::stream::codec::Encoder;

    #[test]
    fn a_block_that_cannot_be_decoded_does_not_affect_others() {
        let (memory, control) = (MemoryLimit::new(64 << 20), Control::new());
        for info in METHODS.iter().filter(|info| info.flag != 0) {
            let Some(method) = Method::from_flag(info.flag) else {
                continue;
            };
            let settings = EncoderSettings::software(info.default_level);
            let encoder = || Encoder::of(info, 0, &settings, control.accelerator_stats()).unwrap();
            let page: Vec<u8> = (0..=255).cycle().take(PAGE_SIZE).collect();
            let (mut good, mut open) = (Vec::new(), Vec::new());
            let mut alone = encoder();
            alone.write_alone(info.default_level).unwrap();
            alone.encode(0, "", &page, &mut good).unwrap();
            // As in a migration: the next frame continues this one.
            encoder().encode(0, "", &page, &mut open).unwrap();
            let mut reader = Blocks::new(0, &memory, &control);
            let (mut head, _) = BlockHead::of(0, [0].into_iter()).unwrap();
            head.method = method;
            for before in [&b"no page"[..], &open] {
                let _ = reader.decode_payload(&head, before);
                let decoded = reader.decode_payload(&head, &good);
                assert!(decoded.is_ok_and(|got| got == page), "{}", info.name);
            }
            reader.decode_payload(&head, b"no page").unwrap_err();
        }
    }
}

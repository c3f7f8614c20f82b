//! Reads a `mapped-ram` file of QEMU.

use std::ops::Range;
use std::path::Path;

use hotlift_mem::PAGE_SIZE;
use hotlift_wire::main_channel::{
    Command, EofSearch, MAPPED_RAM, MappedBlock, MappedEvent, MappedRamDecoder, MappedStep,
    WITHOUT_MAPPED_RAM,
};
use hotlift_wire::{WireError, limits};

use super::foreign::not_a_save;
use super::open_file::OpenFile;
use super::source::{PIECE, PageMap, SavedStream, TakePart, piece_len};
use super::{FileError, check_ram};
use crate::error::MigrationError;
use crate::pipe::batch::Batch;
use crate::pipe::session::Session;

/// A file whose stream was read and verified.
pub(crate) struct MappedFile {
    file: OpenFile,
    stream: SavedStream,
    blocks: Vec<Block>,
}

struct Block {
    place: MappedBlock,
    /// One bit per page: 1 if the page is in the file.
    bitmap: Vec<u64>,
}

impl Block {
    fn is_in_file(&self, page: usize) -> bool {
        self.bitmap[page / 64] >> (page % 64) & 1 == 1
    }
}

impl MappedFile {
    /// Opens the file, and reads its stream except the pages. The stream starts at byte `offset`, and must reach to the last
    /// byte.
    pub(crate) fn open(path: &Path, offset: u64) -> Result<Self, FileError> {
        let mut source = Self::unread(path)?;
        source.read(offset)?;
        Ok(source)
    }

    /// Opens a file that may be damaged or truncated. Reads up to the first error, and returns this error; `None` for an
    /// undamaged file.
    ///
    /// # Errors
    /// [`FileError`] if not even the machine can be read.
    pub(crate) fn open_partly(
        path: &Path,
        offset: u64,
    ) -> Result<(Self, Option<FileError>), FileError> {
        let mut source = Self::unread(path)?;
        match source.read(offset) {
            Ok(()) => Ok((source, None)),
            Err(error) if source.stream.configuration.is_absent() => Err(error),
            Err(error) => Ok((source, Some(error))),
        }
    }

    fn unread(path: &Path) -> Result<Self, FileError> {
        Ok(Self {
            file: OpenFile::open(path)?,
            stream: SavedStream::default(),
            blocks: Vec::new(),
        })
    }

    fn read(&mut self, offset: u64) -> Result<(), FileError> {
        let length = self.file.length();
        let devices_at = self.walk(offset, length)?;
        self.find_end(devices_at, length)
    }

    /// Returns the length of the file, in bytes.
    pub(crate) fn length(&self) -> u64 {
        self.file.length()
    }

    /// Returns the number of pages in the file for each RAM block, in the order of the blocks.
    pub(crate) fn pages_in_file(&self) -> impl Iterator<Item = u64> {
        self.blocks.iter().map(|block| {
            let pages = block.place.entry.used_length / PAGE_SIZE as u64;
            let pages = usize::try_from(pages).unwrap_or(usize::MAX);
            (0..pages).filter(|page| block.is_in_file(*page)).count() as u64
        })
    }

    /// Reads the stream up to the device state, and returns the position of the device state.
    fn walk(&mut self, offset: u64, length: u64) -> Result<u64, FileError> {
        let mut decoder = MappedRamDecoder::new(offset, length);
        let mut input = vec![0; limits::MAPPED_RAM_RECORD];
        loop {
            let position = decoder.position();
            let available = self.file.read_some(&mut input, position)?;
            let step = decoder.next(&input[..available]);
            let event = match step {
                Ok(MappedStep::Event(event)) => event,
                // Only an early section is longer than the read buffer.
                Ok(MappedStep::Need(_))
                    if available == input.len() && available < limits::MAIN_RECORD =>
                {
                    input.resize((2 * available).min(limits::MAIN_RECORD), 0);
                    continue;
                }
                Ok(MappedStep::Need(_)) => return Err(FileError::Truncated { position }),
                Err(WireError::Mismatch {
                    what: "stream magic",
                    ..
                }) => return Err(not_a_save(&input[..available])),
                Err(WireError::Unsupported {
                    what: WITHOUT_MAPPED_RAM,
                }) => return Err(FileError::PlainStream),
                Err(source) => return Err(FileError::Stream { position, source }),
            };
            input.truncate(limits::MAPPED_RAM_RECORD);
            match event {
                MappedEvent::Configuration(mut configuration) => {
                    configuration.capabilities.retain(|name| name != MAPPED_RAM);
                    self.stream.configuration = configuration;
                }
                // Ignored: a file has no source that waits for an answer.
                MappedEvent::Command(Command::OpenReturnPath | Command::Ping(_)) => {}
                MappedEvent::Command(Command::PostcopyAdvise { .. }) => {
                    let source = WireError::Unsupported {
                        what: "postcopy in a file",
                    };
                    return Err(FileError::Stream { position, source });
                }
                MappedEvent::Command(command) => self.stream.commands.push(command),
                MappedEvent::RamStart { section_id } => self.stream.ram.section_id = section_id,
                MappedEvent::Block(place) => {
                    let bitmap = self.read_bitmap(&place)?;
                    self.stream.ram.blocks.push(place.entry.clone());
                    self.blocks.push(Block { place, bitmap });
                }
                MappedEvent::EarlySection(section) => {
                    self.stream.early.push(section, !self.blocks.is_empty());
                }
                MappedEvent::Header | MappedEvent::RamEos => {}
                MappedEvent::RamEnd => return Ok(decoder.position()),
            }
        }
    }

    /// Reads the bitmap of a RAM block. The decoder has checked that the bitmap is within the file. The size is checked here
    /// too, because a sparse file can have any length.
    fn read_bitmap(&self, place: &MappedBlock) -> Result<Vec<u64>, FileError> {
        let before = self.blocks.iter().map(|block| &block.place.entry);
        check_ram(before.chain([&place.entry])).map_err(|source| FileError::Stream {
            position: place.bitmap_offset,
            source,
        })?;
        let length = usize::try_from(place.bitmap_len()).unwrap_or(usize::MAX);
        let mut bytes = vec![0; length];
        self.file.read_exact(&mut bytes, place.bitmap_offset)?;
        let words = bytes.as_chunks::<8>().0;
        Ok(words.iter().map(|word| u64::from_le_bytes(*word)).collect())
    }

    /// Finds EOF after the device state, and reads it and the VM description, which must end the file.
    fn find_end(&mut self, position: u64, length: u64) -> Result<(), FileError> {
        let mut search = EofSearch::default();
        let (mut held, mut at) = (Vec::new(), position);
        while at < length {
            let before = held.len();
            held.resize(before + piece_len(length - at), 0);
            self.file.read_exact(&mut held[before..], at)?;
            at += (held.len() - before) as u64;
            if let Some(eof) = search.find(&held)
                && at == length
            {
                self.stream.end = held.split_off(eof);
                self.stream.devices = position..at - self.stream.end.len() as u64;
                let checked = self.stream.check_early();
                return checked.map_err(|source| FileError::Stream { position, source });
            }
            held.drain(..search.before());
            search.passed_on(search.before());
            if held.len() > limits::VM_DESCRIPTION + PIECE {
                return Err(FileError::Stream {
                    position,
                    source: WireError::OverLimit {
                        what: "length of the VM description",
                        limit: limits::VM_DESCRIPTION as u64,
                        got: held.len() as u64,
                    },
                });
            }
        }
        // The VM description is the only proof that the devices are complete. A machine without it (suppress-vmdesc) writes
        // files that look like truncated ones.
        Err(FileError::Truncated { position })
    }
}

impl PageMap for MappedFile {
    type Reader<'r> = ();

    fn stream(&self) -> &SavedStream {
        &self.stream
    }

    fn devices(&self, take: TakePart<'_>) -> Result<(), MigrationError> {
        let Range { start, end } = self.stream.devices;
        let mut piece = Vec::new();
        for position in (start..end).step_by(PIECE) {
            piece.resize(piece_len(end - position), 0);
            self.file.read_exact(&mut piece, position)?;
            take(&piece)?;
        }
        Ok(())
    }

    fn reader<'r>(&'r self, _: &'r Session<'_>) -> Result<(), MigrationError> {
        Ok(())
    }

    /// Reads pages that are neighbours in the file with one read.
    fn fill(
        &self,
        (): &mut (),
        batch: &mut Batch,
        block: usize,
        pages: Range<usize>,
    ) -> Result<usize, MigrationError> {
        let block = &self.blocks[block];
        for page in pages {
            let offset = (page * PAGE_SIZE) as u64;
            match block.is_in_file(page) {
                true => batch.normal.push(offset),
                false => batch.zero.push(offset),
            }
        }
        let (normal, mut room) = batch.normal_mut();
        for run in normal.chunk_by(|a, b| *b == *a + PAGE_SIZE as u64) {
            let (into, rest) = room.split_at_mut(run.len() * PAGE_SIZE);
            self.file
                .read_exact(into, block.place.pages_offset + run[0])?;
            room = rest;
        }
        Ok(batch.pages().len())
    }
}

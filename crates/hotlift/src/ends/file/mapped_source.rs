//! Reads a `mapped-ram` file of QEMU.

use std::fs::File;
use std::io;
use std::os::unix::fs::FileExt;
use std::path::{Path, PathBuf};
use std::sync::atomic::{AtomicUsize, Ordering};
use std::thread;

use hotlift_mem::PAGE_SIZE;
use hotlift_wire::main_channel::{
    Command, Configuration, MAPPED_RAM, MappedBlock, MappedEvent, MappedRamDecoder, MappedStep,
    complete_device_state,
};
use hotlift_wire::{WireError, limits};

use super::{FileError, check_ram};
use crate::ends::stream_sink::machine_version;
use crate::error::MigrationError;
use crate::pipe::batch::{BATCH_PAGES, Batch};
use crate::pipe::session::Session;
use crate::pipe::sink::RamLayout;
use crate::pipe::source::Source;

/// Pages that a thread takes at a time: 4 MiB.
const SHARE: usize = 1024;

/// Threads that read at once; one alone keeps a disk busy, and two a page cache.
const THREADS: usize = 4;

/// A file whose stream was walked and found good.
pub(crate) struct MappedSource {
    file: File,
    path: PathBuf,
    configuration: Configuration,
    commands: Vec<Command>,
    section_id: u32,
    blocks: Vec<Block>,
    /// Device sections, EOF, VM description.
    device_state: Vec<u8>,
    /// Where EOF is in `device_state`.
    eof: usize,
    threads: usize,
    /// Shares of RAM that threads have taken.
    cursor: AtomicUsize,
}

struct Block {
    place: MappedBlock,
    /// A bit a page: 1 if it is in the file.
    bitmap: Vec<u64>,
}

impl Block {
    fn pages(&self) -> usize {
        usize::try_from(self.place.entry.used_length).unwrap_or(usize::MAX) / PAGE_SIZE
    }

    fn is_in_file(&self, page: usize) -> bool {
        self.bitmap[page / 64] >> (page % 64) & 1 == 1
    }
}

impl MappedSource {
    /// Walks the stream that starts at byte `offset` of the file, over the pages to its last byte.
    pub(crate) fn open(path: &Path, offset: u64) -> Result<Self, FileError> {
        let failed = |source| FileError::Read {
            path: path.to_owned(),
            source,
        };
        let file = File::open(path).map_err(failed)?;
        let length = file.metadata().map_err(failed)?.len();
        let threads = thread::available_parallelism().map_or(1, usize::from);
        let mut source = Self {
            file,
            path: path.to_owned(),
            configuration: Configuration::default(),
            commands: Vec::new(),
            section_id: 0,
            blocks: Vec::new(),
            device_state: Vec::new(),
            eof: 0,
            threads: threads.min(THREADS),
            cursor: AtomicUsize::new(0),
        };
        let devices_at = source.walk(offset, length)?;
        source.read_device_state(devices_at, length)?;
        Ok(source)
    }

    /// The source's machine and capabilities.
    pub(crate) fn configuration(&self) -> &Configuration {
        &self.configuration
    }

    /// Commands between the RAM blocks and the devices.
    pub(crate) fn commands(&self) -> &[Command] {
        &self.commands
    }

    /// The RAM of the VM.
    pub(crate) fn ram(&self) -> RamLayout {
        let blocks = self.blocks.iter();
        RamLayout {
            section_id: self.section_id,
            blocks: blocks.map(|block| block.place.entry.clone()).collect(),
        }
    }

    /// The device sections; EOF and the VM description.
    pub(crate) fn device_state(&self) -> (&[u8], &[u8]) {
        self.device_state.split_at(self.eof)
    }

    /// Threads that read pages.
    pub(crate) fn threads(&self) -> usize {
        self.threads
    }

    /// Reads everything before the devices; returns where they are.
    fn walk(&mut self, offset: u64, length: u64) -> Result<u64, FileError> {
        let mut decoder = MappedRamDecoder::new(offset, length);
        let mut input = vec![0; limits::MAPPED_RAM_RECORD];
        loop {
            let position = decoder.position();
            let available = self.read_some(&mut input, position)?;
            let step = decoder.next(&input[..available]);
            let event = match step {
                Ok(MappedStep::Event(event)) => event,
                Ok(MappedStep::Need(_)) => return Err(FileError::Truncated { position }),
                Err(WireError::Mismatch {
                    what: "stream magic",
                    ..
                }) => return Err(FileError::NotASave),
                Err(source) => return Err(FileError::Stream { position, source }),
            };
            match event {
                MappedEvent::Configuration(mut configuration) => {
                    configuration.capabilities.retain(|name| name != MAPPED_RAM);
                    self.configuration = configuration;
                }
                // Nobody reads the answers.
                MappedEvent::Command(Command::OpenReturnPath | Command::Ping(_)) => {}
                MappedEvent::Command(Command::PostcopyAdvise { .. }) => {
                    let source = WireError::Unsupported {
                        what: "postcopy in a file",
                    };
                    return Err(FileError::Stream { position, source });
                }
                MappedEvent::Command(command) => self.commands.push(command),
                MappedEvent::RamStart { section_id } => self.section_id = section_id,
                MappedEvent::Block(place) => {
                    let bitmap = self.read_bitmap(&place)?;
                    self.blocks.push(Block { place, bitmap });
                }
                MappedEvent::Header | MappedEvent::RamEos => {}
                MappedEvent::RamEnd => return Ok(decoder.position()),
            }
        }
    }

    /// Reads a block's bitmap. The decoder has seen that it lies in the file, with its pages; but a
    /// sparse file can have any length.
    fn read_bitmap(&self, place: &MappedBlock) -> Result<Vec<u64>, FileError> {
        let before: u64 = self
            .blocks
            .iter()
            .map(|block| block.place.entry.used_length)
            .sum();
        check_ram(before.saturating_add(place.entry.used_length)).map_err(|source| {
            FileError::Stream {
                position: place.bitmap_offset,
                source,
            }
        })?;
        let length = usize::try_from(place.bitmap_len()).unwrap_or(usize::MAX);
        let mut bytes = vec![0; length];
        self.read_exact(&mut bytes, place.bitmap_offset)?;
        let words = bytes.as_chunks::<8>().0;
        Ok(words.iter().map(|word| u64::from_le_bytes(*word)).collect())
    }

    /// Reads devices, EOF and VM description, to the file's last byte.
    fn read_device_state(&mut self, position: u64, length: u64) -> Result<(), FileError> {
        let bytes = length - position;
        let limit = limits::DEVICE_SECTIONS + limits::VM_DESCRIPTION;
        let fitting = usize::try_from(bytes).ok().filter(|bytes| *bytes <= limit);
        let fitting = fitting.ok_or(FileError::Stream {
            position,
            source: WireError::OverLimit {
                what: "length of all device sections",
                limit: limit as u64,
                got: bytes,
            },
        })?;
        self.device_state = vec![0; fitting];
        let mut device_state = std::mem::take(&mut self.device_state);
        self.read_exact(&mut device_state, position)?;
        self.device_state = device_state;
        // The only sign that the devices are whole; a file of a machine that writes no description
        // (suppress-vmdesc) cannot be told from one that was cut short.
        self.eof = complete_device_state(&self.device_state, &mut 0, &mut Vec::new())
            .ok_or(FileError::Truncated { position })?;
        Ok(())
    }

    /// Whether multifd flushes are records of their own, as this machine's QEMU makes and expects them.
    pub(crate) fn flushes(&self) -> bool {
        machine_version(&self.configuration.machine).is_none_or(|version| version > (8, 0))
    }

    /// The next pages that no thread has taken: RAM block and number of the first.
    fn next_share(&self) -> Option<(usize, usize)> {
        let mut share = self.cursor.fetch_add(1, Ordering::Relaxed);
        self.blocks.iter().enumerate().find_map(|(index, block)| {
            let shares = block.pages().div_ceil(SHARE);
            if share < shares {
                return Some((index, share * SHARE));
            }
            share -= shares;
            None
        })
    }

    /// Puts `pages` of a RAM block into a batch, neighbours in the file at once.
    fn fill(
        &self,
        batch: &mut Batch,
        block: usize,
        pages: std::ops::Range<usize>,
    ) -> Result<(), FileError> {
        batch.start(block);
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
            self.read_exact(into, block.place.pages_offset + run[0])?;
            room = rest;
        }
        Ok(())
    }

    fn read_some(&self, into: &mut [u8], position: u64) -> Result<usize, FileError> {
        let mut filled = 0;
        while filled < into.len() {
            match self
                .file
                .read_at(&mut into[filled..], position + filled as u64)
            {
                Ok(0) => break,
                Ok(read) => filled += read,
                Err(error) if error.kind() == io::ErrorKind::Interrupted => {}
                Err(source) => return Err(self.failed(source)),
            }
        }
        Ok(filled)
    }

    fn read_exact(&self, into: &mut [u8], position: u64) -> Result<(), FileError> {
        let wanted = into.len();
        if self.read_some(into, position)? < wanted {
            return Err(FileError::Truncated { position });
        }
        Ok(())
    }

    fn failed(&self, source: io::Error) -> FileError {
        FileError::Read {
            path: self.path.clone(),
            source,
        }
    }
}

impl Source for MappedSource {
    fn readers(&self) -> usize {
        self.threads
    }

    fn thread_name(&self, reader: usize) -> String {
        format!("relay/file_{reader}")
    }

    fn read(&self, session: &Session<'_>, reader: usize) -> Result<(), MigrationError> {
        if !session.barrier.channel_arrives() {
            return Ok(());
        }
        while let Some((block, first)) = self.next_share() {
            let end = self.blocks[block].pages().min(first + SHARE);
            for start in (first..end).step_by(BATCH_PAGES) {
                let Some(mut batch) = session.flow.take() else {
                    return Ok(());
                };
                self.fill(&mut batch, block, start..end.min(start + BATCH_PAGES))?;
                session.received[reader].add_bytes(batch.pages().len());
                session.flow.submit(batch);
            }
        }
        session.barrier.channel_arrives();
        Ok(())
    }
}

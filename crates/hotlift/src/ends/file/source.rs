//! Reads all pages of a file. RAM is divided into shares; each thread takes the next free share.

use std::ops::Range;
use std::sync::atomic::{AtomicUsize, Ordering};
use std::thread;

use hotlift_mem::PAGE_SIZE;
use hotlift_wire::main_channel::{Command, Configuration, EarlyLengths, PluggableMemory};
use hotlift_wire::{RamBlockEntry, WireError, limits};

use crate::error::MigrationError;
use crate::pipe::batch::{BATCH_PAGES, Batch};
use crate::pipe::session::Session;
use crate::pipe::sink::{EarlySections, RamLayout};
use crate::pipe::source::Source;

/// Pages of a share: 4 MiB.
const SHARE: usize = 1024;

/// Maximum number of concurrent reader threads. One thread is enough for a disk, and two for the page cache.
const THREADS: usize = 4;

/// Content of a file except the pages.
#[derive(Debug, Default)]
pub(crate) struct SavedStream {
    /// Machine and capabilities of the source.
    pub configuration: Configuration,
    /// UUID of the VM, if the configuration does not have it.
    pub uuid: Option<[u8; 16]>,
    /// Commands between the RAM blocks and the devices.
    pub commands: Vec<Command>,
    /// RAM of the VM.
    pub ram: RamLayout,
    /// Device sections before the end of RAM.
    pub early: EarlySections,
    /// QEMU's property `multifd-flush-after-each-section`, if the source's stream has shown it.
    pub flush_after_each_section: Option<bool>,
    /// File positions of the device sections.
    pub devices: Range<u64>,
    /// EOF and the VM description.
    pub end: Vec<u8>,
}

impl SavedStream {
    /// Returns the length of the device sections, in bytes.
    pub(crate) fn device_bytes(&self) -> u64 {
        self.devices.end - self.devices.start
    }

    /// Checks the lengths of the early sections (devices before RAM) against the VM description, which must have been read.
    pub(crate) fn check_early(&self) -> Result<(), WireError> {
        let mut lengths = EarlyLengths::default();
        self.early.all().for_each(|section| lengths.record(section));
        lengths.check(&self.end)
    }

    /// Returns the virtio-mem device whose memory is this RAM block, or `None` for ordinary RAM.
    fn memory_device(&self, block: usize) -> Option<&PluggableMemory> {
        let block = &self.ram.blocks[block];
        let sections = self.early.all();
        let mut devices = sections.filter_map(|section| section.memory.as_ref());
        devices.find(|device| device.is_in(&block.name, block.used_length))
    }
}

/// Bytes in one read of a file's device sections.
pub(crate) const PIECE: usize = limits::FILE_READ;

/// Returns the length of the next piece, if `left` bytes are not read yet.
pub(crate) fn piece_len(left: u64) -> usize {
    usize::try_from(left).map_or(PIECE, |left| left.min(PIECE))
}

/// Consumer of the parts of a file's device sections.
pub(crate) type TakePart<'a> = &'a mut dyn FnMut(&[u8]) -> Result<(), MigrationError>;

/// A file with an index of its pages.
pub(crate) trait PageMap: Sync {
    /// State of one reading thread.
    type Reader<'r>
    where
        Self: 'r;

    fn stream(&self) -> &SavedStream;

    /// Reads the device sections, and passes them to `take` in parts. If the format has checksums, verifies each part first.
    ///
    /// # Errors
    /// The error of `take`, and errors of a file that cannot be read or is damaged.
    fn devices(&self, take: TakePart<'_>) -> Result<(), MigrationError>;

    fn reader<'r>(&'r self, session: &'r Session<'_>) -> Result<Self::Reader<'r>, MigrationError>;

    /// Puts `pages` of a RAM block into the empty `batch`, and returns the number of bytes read from the file.
    fn fill(
        &self,
        reader: &mut Self::Reader<'_>,
        batch: &mut Batch,
        block: usize,
        pages: Range<usize>,
    ) -> Result<usize, MigrationError>;
}

/// Divides RAM into shares. Each share goes to one thread.
pub(crate) struct Shares {
    /// Pages of a share.
    pages: usize,
    /// Number of shares taken.
    taken: AtomicUsize,
}

impl Shares {
    /// Creates shares of `pages` pages each.
    pub(crate) fn of(pages: usize) -> Self {
        Self {
            pages,
            taken: AtomicUsize::new(0),
        }
    }

    /// Returns the RAM block and the pages of the next share; `None` after the last. `blocks` is the number of pages of each
    /// block.
    pub(crate) fn next(
        &self,
        blocks: impl Iterator<Item = usize>,
    ) -> Option<(usize, Range<usize>)> {
        let mut share = self.taken.fetch_add(1, Ordering::Relaxed);
        for (block, pages) in blocks.enumerate() {
            let shares = pages.div_ceil(self.pages);
            if share < shares {
                let first = share * self.pages;
                return Some((block, first..pages.min(first + self.pages)));
            }
            share -= shares;
        }
        None
    }
}

/// A file as a source of pages.
pub(crate) struct FileSource<P> {
    file: P,
    threads: usize,
    shares: Shares,
}

impl<P: PageMap> FileSource<P> {
    pub(crate) fn new(file: P) -> Self {
        let threads = thread::available_parallelism().map_or(1, usize::from);
        Self {
            file,
            threads: threads.min(THREADS),
            shares: Shares::of(SHARE),
        }
    }

    pub(crate) fn file(&self) -> &P {
        &self.file
    }

    pub(crate) fn stream(&self) -> &SavedStream {
        self.file.stream()
    }

    /// See [`PageMap::devices`].
    pub(crate) fn devices(&self, take: TakePart<'_>) -> Result<(), MigrationError> {
        self.file.devices(take)
    }

    /// Returns the RAM block and the pages of the next share; `None` after the last.
    fn next_share(&self) -> Option<(usize, Range<usize>)> {
        let blocks = self.stream().ram.blocks.iter();
        self.shares.next(
            blocks
                .map(|block| usize::try_from(block.used_length).unwrap_or(usize::MAX) / PAGE_SIZE),
        )
    }
}

impl<P: PageMap> Source for FileSource<P> {
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
        let mut places = self.file.reader(session)?;
        while let Some((block, share)) = self.next_share() {
            let device = self.stream().memory_device(block);
            let RamBlockEntry {
                name, used_length, ..
            } = &self.stream().ram.blocks[block];
            let mut unused_ram = session.unused_ram.iter();
            let is_empty = unused_ram.any(|it| it.unplugged(name) >= Some(*used_length));
            for start in share.clone().step_by(BATCH_PAGES) {
                let Some(mut batch) = session.flow.take() else {
                    return Ok(());
                };
                batch.start(block);
                let pages = start..share.end.min(start + BATCH_PAGES);
                let read = self.file.fill(&mut places, &mut batch, block, pages)?;
                session.received[reader].add_bytes(read);
                // Pages that the VM does not use are left out, not sent as zero pages. QEMU would touch them, and its host
                // would allocate memory.
                match device {
                    Some(device) => batch.zero.retain(|offset| device.is_plugged(*offset)),
                    None if is_empty => batch.zero.clear(),
                    None => {}
                }
                match batch.len() {
                    0 => session.flow.release(batch),
                    _ => session.flow.submit(batch),
                }
            }
        }
        session.barrier.channel_arrives();
        Ok(())
    }
}

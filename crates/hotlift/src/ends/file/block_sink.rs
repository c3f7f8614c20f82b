//! Writes a VM as a save file. All threads write compressed blocks of neighbouring pages concurrently; the index follows the
//! blocks.

use std::collections::BTreeMap;
use std::os::unix::fs::FileExt;
use std::path::Path;
use std::sync::atomic::{AtomicU64, Ordering};
use std::sync::{Arc, Mutex};
use std::time::{SystemTime, UNIX_EPOCH};

use hotlift_mem::PAGE_SIZE;
use hotlift_methods::{MemoryLimit, MethodInfo, method};
use hotlift_wire::main_channel::{
    Command, EOF_WITHOUT_DESCRIPTION, EarlySection, MainEncoder, PluggableMemory,
};
use hotlift_wire::multifd::Method;
use hotlift_wire::settle::GuestActivity;
use hotlift_wire::{RamBlockEntry, WireError};

use super::block_reader::Blocks;
use super::index::{CHUNK_LEN, Index};
use super::layout::{self, BLOCK_HEAD_LEN, BlockHead, Contents, Entry, FileInfo, Part, Share};
use super::partial::PartialFile;
use super::received_pages::ReceivedPages;
use super::{FileError, IGNORE_SHARED, apply_delta, check_ram};
use crate::control::Control;
use crate::error::{Channel, MigrationError};
use crate::figures::MethodFigures;
use crate::lock::lock;
use crate::options::StreamOptions;
use crate::pacing::Pacer;
use crate::pipe::batch::Batch;
use crate::pipe::settings::{RelaySettings, UnusedRam};
use crate::pipe::sink::{HasTaken, Opening, Sink, WritePages};
use crate::stream::codec::Encoder;
use crate::stream::handshake;

/// Method that replaces `auto` in a file. `auto` adapts to the speed of a link, which a file does not have. This method has the
/// best ratio for its CPU time.
const AUTO: &str = "zstd";

/// A save file under construction.
pub(crate) struct BlockSink {
    file: PartialFile,
    /// CRC of the header.
    seed: u32,
    /// Position of the next block.
    position: AtomicU64,
    /// Main channel without pages, up to the device state.
    pub(super) stream: Mutex<Stream>,
    /// The part of the file that has the main channel and the device state; `None` before its first byte is written.
    state: Mutex<Option<State>>,
    blocks: Vec<RamBlockEntry>,
    index: Index,
    complete: ReceivedPages,
    /// File position of the first block that rewrites a page.
    written_last: AtomicU64,
    shares: Mutex<BTreeMap<&'static str, Share>>,
    contents: Mutex<Contents>,
    method: &'static MethodInfo,
    /// The requested method, possibly `auto`.
    chosen: &'static MethodInfo,
    options: StreamOptions,
    unused_ram: Vec<UnusedRam>,
    /// Plugged memory of virtio-mem devices.
    memory_devices: Mutex<Vec<PluggableMemory>>,
    pacer: Arc<Pacer>,
    control: Control,
    memory: MemoryLimit,
    sent_bytes: AtomicU64,
}

/// Main channel of the file, as far as it is encoded.
pub(super) struct Stream {
    encoder: MainEncoder,
    bytes: Vec<u8>,
}

impl Stream {
    /// Encodes everything before the first page. A PING is left out, because a file cannot answer it.
    pub(super) fn new(opening: Opening<'_>) -> Result<Self, WireError> {
        let mut bytes = Vec::new();
        let mut encoder = MainEncoder::new(opening.configuration, &mut bytes)?;
        if opening.commands.contains(&Command::SwitchoverStart) {
            encoder.command(Command::SwitchoverStart, &mut bytes)?;
        }
        for section in &opening.early.before_ram {
            bytes.extend_from_slice(&section.bytes);
        }
        encoder.set_ram_id(opening.ram.section_id)?;
        encoder.ram_start(&opening.ram.blocks, false, &mut bytes)?;
        Ok(Self { encoder, bytes })
    }
}

/// The `state` part of the file (main channel without pages) while it is written.
struct State {
    position: u64,
    length: u64,
    crc: crc32fast::Hasher,
}

impl BlockSink {
    /// Creates the file that later gets the name `path`. One thread writes for each multifd channel of the options.
    ///
    /// `flushes` is QEMU's property `multifd-flush-after-each-section`; `None` if the source's stream has not shown it.
    pub(crate) fn create(
        path: &Path,
        settings: &RelaySettings,
        (opening, flushes): (Opening<'_>, Option<bool>),
        memory: &MemoryLimit,
        control: &Control,
    ) -> Result<Self, MigrationError> {
        let capabilities = &opening.configuration.capabilities;
        if capabilities.iter().any(|name| name == IGNORE_SHARED) {
            let reason = format!("capability {IGNORE_SHARED} is on, which omits shared RAM");
            return Err(FileError::CannotBeSaved { reason }.into());
        }
        let options = &settings.outgoing;
        let chosen = options.multifd_compression;
        let method = match chosen.is_auto() {
            true => method(AUTO).unwrap_or(chosen),
            false => chosen,
        };
        let id = handshake::new_id().map_err(MigrationError::opening)?.0;
        let info = FileInfo {
            machine: opening.configuration.machine.clone(),
            uuid: FileInfo::uuid_text(opening.uuid),
            method: method.name.to_owned(),
            begun: seconds_now(),
            hotlift: env!("CARGO_PKG_VERSION").to_owned(),
            id: id.iter().fold(0, |id, byte| id << 8 | u64::from(*byte)),
            vm: settings.vm.clone(),
            base: None,
            flush_after_each_section: flushes,
            paused: None,
        };
        let (header, seed) = layout::header(&info)?;
        let blocks = &opening.ram.blocks;
        check_ram(blocks).map_err(MigrationError::main_wire)?;
        // Only the table is charged. The chunks need no more memory than the pages received for them.
        let table = Index::chunks_of(blocks).saturating_mul(24);
        let table = memory.take(usize::try_from(table).unwrap_or(usize::MAX));
        table.map_err(|source| MigrationError::memory(Channel::Main, source))?;
        let stream = Stream::new(opening).map_err(MigrationError::main_wire)?;
        let file = PartialFile::create(path)?;
        file.write_at(&[&header], 0)?;
        Ok(Self {
            file,
            seed,
            position: AtomicU64::new(header.len() as u64),
            stream: Mutex::new(stream),
            state: Mutex::default(),
            blocks: blocks.clone(),
            index: Index::new(blocks),
            complete: ReceivedPages::new(blocks, memory),
            written_last: AtomicU64::new(u64::MAX),
            shares: Mutex::default(),
            contents: Mutex::default(),
            method,
            chosen,
            options: StreamOptions {
                multifd_compression: method,
                ..options.clone()
            },
            unused_ram: settings.unused_ram.clone(),
            memory_devices: Mutex::new(opening.early.plugged()),
            pacer: control.steering().pacer(options),
            control: control.clone(),
            memory: memory.clone(),
            sent_bytes: AtomicU64::new(header.len() as u64),
        })
    }

    /// Reserves `length` bytes at the end of the file, and returns their position.
    fn reserve(&self, length: usize) -> Result<u64, MigrationError> {
        let position = self.position.fetch_add(length as u64, Ordering::Relaxed);
        if position > Entry::LAST_POSITION {
            let reason = format!("the file is longer than {} bytes", Entry::LAST_POSITION);
            return Err(FileError::CannotBeSaved { reason }.into());
        }
        self.sent_bytes.fetch_add(length as u64, Ordering::Relaxed);
        Ok(position)
    }

    /// Appends a part to the file, and returns its position, length and CRC.
    fn append(&self, bytes: &[u8]) -> Result<Part, MigrationError> {
        let position = self.reserve(bytes.len())?;
        self.file.write_at(&[bytes], position)?;
        Ok(Part {
            position,
            length: bytes.len() as u64,
            crc: layout::crc_of(self.seed, &[bytes]),
        })
    }

    /// Writes a block with this payload, and enters the block's pages into the index.
    fn put(&self, head: &BlockHead, payload: &[u8]) -> Result<(), MigrationError> {
        let length = BLOCK_HEAD_LEN + payload.len();
        self.pacer.wait(length, self.control.life());
        let position = self.reserve(length)?;
        let bytes = head.encode(self.seed, position, payload);
        self.file.write_at(&[&bytes, payload], position)?;
        let mut was_there = false;
        for (place, page) in head.pages().enumerate() {
            let entry = Entry {
                position,
                length,
                place,
            };
            let before = self.set(head.ram_block, page, Some(entry))?;
            was_there |= before.is_some();
        }
        if was_there {
            self.written_last.fetch_min(position, Ordering::Relaxed);
        }
        let mut shares = lock(&self.shares);
        let name = head.method.name();
        let share = shares.entry(name).or_insert_with(|| Share {
            method: name.to_owned(),
            blocks: 0,
            pages: 0,
            bytes: 0,
        });
        share.blocks += 1;
        share.pages += head.len() as u64;
        share.bytes += length as u64;
        Ok(())
    }

    fn set(
        &self,
        block: usize,
        page: u64,
        entry: Option<Entry>,
    ) -> Result<Option<Entry>, MigrationError> {
        let page = usize::try_from(page).unwrap_or(usize::MAX);
        match self.index.place(block, page) {
            Some(place) => Ok(self.index.set(place, entry)),
            None => Err(MigrationError::Protocol {
                channel: Channel::Main,
                got: format!("page {page} of RAM block {block}"),
                doing: "writing pages",
            }),
        }
    }

    /// Appends records to the saved main channel. `write` encodes the records.
    fn record(
        &self,
        write: impl FnOnce(&mut MainEncoder, &mut Vec<u8>) -> Result<(), WireError>,
    ) -> Result<(), MigrationError> {
        let mut stream = lock(&self.stream);
        let Stream { encoder, bytes } = &mut *stream;
        write(encoder, bytes).map_err(MigrationError::main_wire)
    }

    /// Writes the index, and the CRC of each index chunk.
    fn write_index(&self) -> Result<(), MigrationError> {
        let index = &self.index;
        let position = self.position.load(Ordering::Relaxed);
        let mut checks = Vec::with_capacity(4 * index.chunks());
        let of_zeros = layout::crc_of(self.seed, &[&[0; CHUNK_LEN]]);
        let mut at = position;
        for chunk in 0..index.chunks() {
            // A chunk that was never written is a hole: it reads as zeros and takes no space.
            let bytes = index.bytes(chunk);
            let crc = match &bytes {
                Some(bytes) => {
                    self.file.write_at(&[bytes], at)?;
                    layout::crc_of(self.seed, &[bytes])
                }
                None => of_zeros,
            };
            checks.extend_from_slice(&crc.to_be_bytes());
            at += CHUNK_LEN as u64;
        }
        self.position.store(at, Ordering::Relaxed);
        let mut contents = lock(&self.contents);
        contents.index = position;
        contents.checks = self.append(&checks)?;
        contents.written_last = self.written_last.load(Ordering::Relaxed);
        contents.shares = lock(&self.shares).values().cloned().collect();
        Ok(())
    }

    /// Appends to the `state` part. The part is contiguous: nothing else may be written to the file between two calls.
    fn append_state(&self, bytes: &[u8]) -> Result<(), MigrationError> {
        let position = self.reserve(bytes.len())?;
        self.file.write_at(&[bytes], position)?;
        let mut state = lock(&self.state);
        let state = state.get_or_insert_with(|| State {
            position,
            length: 0,
            crc: layout::hasher(self.seed),
        });
        state.length += bytes.len() as u64;
        state.crc.update(bytes);
        Ok(())
    }

    /// Ends the `state` part with an EOF without a VM description.
    fn end_state(&self) -> Result<(), MigrationError> {
        let devices = lock(&self.state).as_ref().map(|state| state.length);
        self.append_state(&EOF_WITHOUT_DESCRIPTION)?;
        let mut contents = lock(&self.contents);
        contents.eof = devices.unwrap_or_default();
        if let Some(state) = lock(&self.state).take() {
            contents.state = Part {
                position: state.position,
                length: state.length,
                crc: state.crc.finalize(),
            };
        }
        Ok(())
    }

    /// Writes the table of contents, which makes the file complete.
    fn write_contents(&self) -> Result<(), MigrationError> {
        let contents = lock(&self.contents).encode(self.seed)?;
        self.append(&contents).map(|_| ())
    }
}

impl Sink for BlockSink {
    fn workers(&self) -> usize {
        usize::from(self.options.channels()).max(1)
    }

    fn page_writer(&self, worker: usize) -> Result<Box<dyn WritePages + '_>, MigrationError> {
        let id = u8::try_from(worker).unwrap_or(u8::MAX);
        let mut encoder = Encoder::new(id, &self.options, true, self.control.accelerator_stats())?;
        if let Some(encoder) = &mut encoder {
            encoder.write_alone(self.options.encoder_settings(true).level)?;
        }
        Ok(Box::new(Writer {
            sink: self,
            encoder,
            payload: Vec::new(),
            is_checked: false,
        }))
    }

    /// A PING is left out, because a file cannot answer it.
    fn command(&self, command: Command) -> Result<(), MigrationError> {
        match command {
            Command::SwitchoverStart => {
                self.record(|encoder, bytes| encoder.command(command, bytes))
            }
            _ => Ok(()),
        }
    }

    fn early_section(&self, section: &EarlySection) -> Result<(), MigrationError> {
        lock(&self.stream).bytes.extend_from_slice(&section.bytes);
        lock(&self.memory_devices).extend(section.memory.clone());
        Ok(())
    }

    /// No barrier is needed: the index always points to the latest content of a page.
    fn barrier(&self) -> Result<(), MigrationError> {
        Ok(())
    }

    fn delta(&self, block: usize, offset: u64, delta: &[u8]) -> Result<(), MigrationError> {
        let number = offset / PAGE_SIZE as u64;
        let known = usize::try_from(number)
            .ok()
            .and_then(|page| self.index.place(block, page));
        let mut page = [0; PAGE_SIZE];
        if let Some(entry) = known.and_then(|place| self.index.get(place)) {
            let read = |into: &mut [u8], position| {
                let read = self.file.file().read_at(into, position);
                read.map_err(|source| self.file.failed(source))
            };
            let mut blocks = Blocks::new(self.seed, &self.memory, &self.control);
            blocks.load(entry, (block, number), read)?;
            page = *blocks.page(entry.place);
        }
        apply_delta(delta, &mut page, (&self.blocks[block].name, offset))?;
        match BlockHead::of(block, std::iter::once(number)) {
            Some((head, _)) => self.put(&head, &page),
            None => Ok(()),
        }
    }

    fn ram_end(&self) -> Result<(), MigrationError> {
        let memory_devices = lock(&self.memory_devices);
        self.complete.check(&self.unused_ram, &memory_devices)?;
        self.record(|encoder, bytes| {
            encoder.ram_end(bytes)?;
            encoder.ram_eos(bytes)
        })?;
        let stream = std::mem::take(&mut lock(&self.stream).bytes);
        self.append_state(&stream)
    }

    /// Takes this time as the time of the pause, because a source pauses its guest before it sends devices.
    fn devices(&self, part: &[u8]) -> Result<(), MigrationError> {
        lock(&self.contents).paused.get_or_insert_with(seconds_now);
        self.append_state(part)
    }

    /// Writes all parts that make the file restorable, and syncs them to disk. The file gets its name later, in the commit.
    fn await_loaded(&self) -> Result<(), MigrationError> {
        self.end_state()?;
        self.write_index()?;
        self.write_contents()?;
        Ok(self.file.settle(self.position.load(Ordering::Relaxed))?)
    }

    fn commit(&self, end: &[u8], _: Option<HasTaken<'_>>) -> Result<GuestActivity, MigrationError> {
        // Appended, not overwritten: the file must stay complete until it has its name.
        let end = self.append(end)?;
        lock(&self.contents).end = Some(end);
        self.write_contents()?;
        let length = self.position.load(Ordering::Relaxed);
        self.file.publish(length)?;
        Ok(GuestActivity::Unknown)
    }

    fn abort(&self) {
        self.file.discard();
    }

    fn sent_bytes(&self) -> u64 {
        self.sent_bytes.load(Ordering::Relaxed)
    }

    fn method(&self) -> &'static str {
        self.chosen.name
    }

    /// Returns the figures of each method that `auto` chose for the blocks; empty for a fixed method.
    fn methods(&self) -> Vec<MethodFigures> {
        if !self.chosen.is_auto() {
            return Vec::new();
        }
        let shares = lock(&self.shares);
        let figures = shares.values().map(|share| MethodFigures {
            name: share.method.clone(),
            packets: share.blocks,
            pages: share.pages,
            bytes_in: share.pages * PAGE_SIZE as u64,
            bytes_out: share.bytes,
            ..MethodFigures::default()
        });
        figures.collect()
    }
}

/// Returns the seconds since 1970 by the clock of this host.
fn seconds_now() -> u64 {
    let since = SystemTime::now().duration_since(UNIX_EPOCH);
    since.map_or(0, |since| since.as_secs())
}

struct Writer<'a> {
    sink: &'a BlockSink,
    encoder: Option<Encoder>,
    payload: Vec<u8>,
    /// True once the first encoded block was decoded again and compared.
    is_checked: bool,
}

impl Writer<'_> {
    /// Checks that the first block decodes to its pages. After the save, this file is the only copy of the guest.
    fn check(&mut self, head: &BlockHead, pages: &[u8]) -> Result<(), MigrationError> {
        let (memory, control) = (&self.sink.memory, &self.sink.control);
        let mut blocks = Blocks::new(self.sink.seed, memory, control);
        self.is_checked = blocks.decode_payload(head, &self.payload)? == pages;
        if !self.is_checked {
            let reason = format!(
                "output of method {} does not decode to its input",
                self.sink.method.name
            );
            return Err(FileError::CannotBeSaved { reason }.into());
        }
        Ok(())
    }

    fn block(&mut self, mut head: BlockHead, pages: &[u8]) -> Result<(), MigrationError> {
        if let Some(encoder) = &mut self.encoder {
            let name = &self.sink.blocks[head.ram_block].name;
            encoder.encode(head.first, name, pages, &mut self.payload)?;
            if self.payload.len() < pages.len() {
                let flag = self.sink.method.flag;
                head.method = Method::from_flag(flag).unwrap_or(Method::None);
                if !self.is_checked {
                    self.check(&head, pages)?;
                }
                return self.sink.put(&head, &self.payload);
            }
        }
        self.sink.put(&head, pages)
    }
}

impl WritePages for Writer<'_> {
    fn write(&mut self, batch: &mut Batch) -> Result<(), MigrationError> {
        // Zero pages must take no space, even if the source did not detect them.
        batch.find_zero_pages();
        self.sink.complete.record(batch)?;
        let mut pages = batch.pages();
        let mut rest = batch.normal.as_slice();
        let number = |offset: &u64| *offset / PAGE_SIZE as u64;
        while let Some((head, count)) = BlockHead::of(batch.block, rest.iter().map(number)) {
            let (here, behind) = pages.split_at(count * PAGE_SIZE);
            self.block(head, here)?;
            (pages, rest) = (behind, &rest[count..]);
        }
        for offset in &batch.zero {
            self.sink.set(batch.block, number(offset), None)?;
        }
        Ok(())
    }
}

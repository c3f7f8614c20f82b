//! Writes a VM as QEMU's `mapped-ram` file.

use std::os::unix::fs::FileExt;
use std::path::Path;
use std::sync::atomic::{AtomicU64, Ordering};
use std::sync::{Arc, Mutex};

use hotlift_mem::{DirtyBitmap, PAGE_SIZE};
use hotlift_methods::MemoryLimit;
use hotlift_wire::main_channel::{
    Command, Configuration, EarlySection, FILE_HEADER, MAPPED_RAM, MappedBlock, MappedLayout,
    PluggableMemory, put_mapped_end,
};
use hotlift_wire::settle::GuestActivity;

use super::partial::PartialFile;
use super::received_pages::ReceivedPages;
use super::{FileError, apply_delta, check_ram};
use crate::control::Control;
use crate::error::{Channel, MigrationError};
use crate::lock::lock;
use crate::pacing::Pacer;
use crate::pipe::batch::Batch;
use crate::pipe::settings::{RelaySettings, UnusedRam};
use crate::pipe::sink::{HasTaken, Opening, Sink, WritePages};

/// Bitmap words in one write.
const WORDS: usize = 8192;

/// A file under construction. Pages are written directly to their offsets.
pub(crate) struct MappedRamSink {
    file: PartialFile,
    /// Position of the next bytes of the stream.
    position: AtomicU64,
    section_id: u32,
    blocks: Vec<Block>,
    complete: ReceivedPages,
    workers: usize,
    unused_ram: Vec<UnusedRam>,
    /// Plugged memory of virtio-mem devices.
    memory_devices: Mutex<Vec<PluggableMemory>>,
    pacer: Arc<Pacer>,
    control: Control,
    sent_bytes: AtomicU64,
}

struct Block {
    place: MappedBlock,
    /// Pages whose content is in the file.
    bitmap: DirtyBitmap,
}

impl MappedRamSink {
    /// Creates the file that later gets the name `path`, and writes the stream up to the device state. One thread writes for
    /// each multifd channel of the options.
    pub(crate) fn create(
        path: &Path,
        settings: &RelaySettings,
        opening: Opening<'_>,
        memory: &MemoryLimit,
        control: &Control,
    ) -> Result<Self, MigrationError> {
        let options = &settings.outgoing;
        let mut head = head(opening.configuration)?;
        if opening.commands.contains(&Command::SwitchoverStart) {
            Command::SwitchoverStart.encode(&mut head);
        }
        for section in &opening.early.before_ram {
            head.extend_from_slice(&section.bytes);
        }
        let ram_bytes = check_ram(&opening.ram.blocks).map_err(MigrationError::main_wire)?;
        let bitmaps = memory.take(page_of(ram_bytes) / 8);
        bitmaps.map_err(|source| MigrationError::memory(Channel::Main, source))?;
        let section_id = opening.ram.section_id;
        let layout = MappedLayout::new(section_id, &opening.ram.blocks, head.len() as u64)
            .map_err(MigrationError::main_wire)?;
        let blocks = layout.blocks.into_iter().map(|place| Block {
            bitmap: DirtyBitmap::new(page_of(place.entry.used_length)),
            place,
        });
        let sink = Self {
            file: PartialFile::create(path)?,
            position: AtomicU64::new(layout.end),
            section_id,
            blocks: blocks.collect(),
            complete: ReceivedPages::new(&opening.ram.blocks, memory),
            workers: usize::from(options.channels()).max(1),
            unused_ram: settings.unused_ram.clone(),
            memory_devices: Mutex::new(opening.early.plugged()),
            pacer: control.steering().pacer(options),
            control: control.clone(),
            sent_bytes: AtomicU64::new(0),
        };
        sink.write(&head, 0)?;
        for (position, piece) in &layout.pieces {
            sink.write(piece, *position)?;
        }
        Ok(sink)
    }

    fn write(&self, bytes: &[u8], position: u64) -> Result<(), MigrationError> {
        self.pacer.wait(bytes.len(), self.control.life());
        self.file.write_at(&[bytes], position)?;
        let bytes = bytes.len() as u64;
        self.sent_bytes.fetch_add(bytes, Ordering::Relaxed);
        Ok(())
    }

    /// Appends `bytes` to the stream in the file.
    fn append(&self, bytes: &[u8]) -> Result<(), MigrationError> {
        let position = self
            .position
            .fetch_add(bytes.len() as u64, Ordering::Relaxed);
        self.write(bytes, position)
    }

    fn write_bitmap(&self, block: &Block) -> Result<(), MigrationError> {
        let mut position = block.place.bitmap_offset;
        let mut bytes = Vec::with_capacity(WORDS * 8);
        for first in (0..block.bitmap.words()).step_by(WORDS) {
            bytes.clear();
            for word in first..block.bitmap.words().min(first + WORDS) {
                bytes.extend_from_slice(&block.bitmap.take_word(word).to_le_bytes());
            }
            self.write(&bytes, position)?;
            position += bytes.len() as u64;
        }
        Ok(())
    }
}

/// Encodes the file header and the configuration. A machine type or a capability that `mapped-ram` does not support is an
/// error.
fn head(configuration: &Configuration) -> Result<Vec<u8>, MigrationError> {
    let refused = |reason| Err(FileError::CannotBeSaved { reason }.into());
    if configuration.is_absent() {
        let why = "mapped-ram does not support machine types up to 2.3: use format hotlift";
        return refused(why.to_owned());
    }
    if let Some(name) = configuration.capabilities.first() {
        return refused(format!("mapped-ram does not support capability {name}"));
    }
    let mut configuration = configuration.clone();
    configuration.capabilities.push(MAPPED_RAM.to_owned());
    let mut head = FILE_HEADER.to_vec();
    let encoded = configuration.encode(&mut head);
    encoded.map_err(MigrationError::main_wire)?;
    Ok(head)
}

impl Sink for MappedRamSink {
    fn workers(&self) -> usize {
        self.workers
    }

    fn page_writer(&self, _: usize) -> Result<Box<dyn WritePages + '_>, MigrationError> {
        Ok(Box::new(Writer(self)))
    }

    /// A PING is left out: a file cannot answer it, and QEMU rejects a PING without a return path.
    fn command(&self, command: Command) -> Result<(), MigrationError> {
        if command != Command::SwitchoverStart {
            return Ok(());
        }
        let mut bytes = Vec::new();
        command.encode(&mut bytes);
        self.append(&bytes)
    }

    fn early_section(&self, section: &EarlySection) -> Result<(), MigrationError> {
        lock(&self.memory_devices).extend(section.memory.clone());
        self.append(&section.bytes)
    }

    /// No barrier is needed: each page has a fixed offset in the file, and a later write replaces the earlier content.
    fn barrier(&self) -> Result<(), MigrationError> {
        Ok(())
    }

    fn delta(&self, block: usize, offset: u64, delta: &[u8]) -> Result<(), MigrationError> {
        let block = &self.blocks[block];
        let position = block.place.pages_offset + offset;
        let mut page = [0; PAGE_SIZE];
        if block.bitmap.test(page_of(offset)) {
            let read = self.file.file().read_exact_at(&mut page, position);
            read.map_err(|source| self.file.failed(source))?;
        }
        apply_delta(delta, &mut page, (&block.place.entry.name, offset))?;
        self.write(&page, position)?;
        block.bitmap.set(page_of(offset));
        Ok(())
    }

    fn ram_end(&self) -> Result<(), MigrationError> {
        let memory_devices = lock(&self.memory_devices);
        self.complete.check(&self.unused_ram, &memory_devices)?;
        let mut bytes = Vec::new();
        put_mapped_end(self.section_id, &mut bytes);
        self.append(&bytes)
    }

    fn devices(&self, part: &[u8]) -> Result<(), MigrationError> {
        self.append(part)
    }

    fn await_loaded(&self) -> Result<(), MigrationError> {
        for block in &self.blocks {
            self.write_bitmap(block)?;
        }
        Ok(self.file.settle(self.position.load(Ordering::Relaxed))?)
    }

    fn commit(&self, end: &[u8], _: Option<HasTaken<'_>>) -> Result<GuestActivity, MigrationError> {
        self.append(end)?;
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
        "none"
    }
}

struct Writer<'a>(&'a MappedRamSink);

impl WritePages for Writer<'_> {
    fn write(&mut self, batch: &mut Batch) -> Result<(), MigrationError> {
        // Zero pages must take no space, even if the source did not detect them.
        batch.find_zero_pages();
        self.0.complete.record(batch)?;
        let block = &self.0.blocks[batch.block];
        let is_next = |a: &u64, b: &u64| *b == *a + PAGE_SIZE as u64;
        let mut pages = batch.pages();
        for run in batch.normal.chunk_by(is_next) {
            let (bytes, rest) = pages.split_at(run.len() * PAGE_SIZE);
            pages = rest;
            self.0.write(bytes, block.place.pages_offset + run[0])?;
            block.bitmap.set_range(page_of(run[0]), run.len());
        }
        for offset in &batch.zero {
            block.bitmap.clear_range(page_of(*offset), 1);
        }
        Ok(())
    }
}

fn page_of(offset: u64) -> usize {
    usize::try_from(offset).unwrap_or(usize::MAX) / PAGE_SIZE
}

#[cfg(test)]
mod tests {
    use std::fs;

    use super::*;
    use hotlift_wire::RamBlockEntry;

    use crate::pipe::sink::RamLayout;

    /// Creates a file of a VM with these capabilities and this RAM.
    fn create(
        path: &Path,
        capabilities: &[&str],
        blocks: &[(&str, u64)],
    ) -> Result<MappedRamSink, MigrationError> {
        let settings = RelaySettings::default();
        let memory = settings.limits.memory(0);
        let capabilities = capabilities.iter().map(|name| (*name).to_owned());
        let blocks = blocks.iter();
        let blocks = blocks.map(|(name, length)| RamBlockEntry::new(*name, *length));
        let configuration = Configuration {
            machine: "pc".to_owned(),
            capabilities: capabilities.collect(),
            ..Configuration::default()
        };
        let ram = RamLayout {
            section_id: 1,
            blocks: blocks.collect(),
        };
        let opening = Opening::bare(&configuration, &ram);
        MappedRamSink::create(path, &settings, opening, &memory, &Control::default())
    }

    /// Returns the first pages of the first block in the file after `write`.
    fn written(write: impl FnOnce(&MappedRamSink, &mut Writer<'_>)) -> Vec<Option<Vec<u8>>> {
        let folder = tempfile::tempdir().unwrap();
        let path = folder.path().join("vm");
        let sink = create(&path, &[], &[("ram", 8 * 4096), ("rom", 8 * 4096)]).unwrap();
        // All pages arrive, most of them as zero pages.
        for page in 0..16_u64 {
            put(
                &mut Writer(&sink),
                usize::from(page >= 8),
                page % 8 * 4096,
                0,
            );
        }
        write(&sink, &mut Writer(&sink));
        sink.ram_end().unwrap();
        sink.await_loaded().unwrap();
        assert!(!path.exists(), "the file has its name before it is whole");
        sink.commit(b"end", None).unwrap();
        let bytes = fs::read(&path).unwrap();
        assert!(bytes.ends_with(b"end"));
        let place = &sink.blocks[0].place;
        let at = |position: u64| usize::try_from(position).unwrap();
        let bitmap = bytes[at(place.bitmap_offset)];
        let page = |number: usize| bytes[at(place.pages_offset) + number * 4096..][..4096].to_vec();
        (0..4)
            .map(|number| (bitmap >> number & 1 == 1).then(|| page(number)))
            .collect()
    }

    fn put(writer: &mut Writer<'_>, block: usize, offset: u64, content: u8) {
        let mut batch = Batch::new();
        batch.start(block);
        match content {
            0 => batch.zero.push(offset),
            _ => batch.push(offset, &[content; PAGE_SIZE]),
        }
        writer.write(&mut batch).unwrap();
    }

    #[test]
    fn the_latest_write_of_a_page_counts() {
        let pages = written(|_, writer| {
            for (offset, content) in [(0, 1), (4096, 2), (8192, 3), (4096, 0), (0, 9)] {
                put(writer, 0, offset, content);
            }
            for (offset, content) in [(12288, 0), (12288, 5)] {
                put(writer, 0, offset, content);
            }
            // The pages of the other block are separate.
            put(writer, 1, 8192, 0);
        });
        let [nine, three, five] = [9, 3, 5].map(|content| Some(vec![content; 4096]));
        assert!(pages == [nine, None, three, five]);
    }

    #[test]
    fn a_delta_applies_to_the_current_content_of_its_page() {
        let delta = [0x10, 0x02, 0xaa, 0xbb];
        let pages = written(|sink, writer| {
            put(writer, 0, 0, 7);
            sink.delta(0, 0, &delta).unwrap();
            // A page that has become zero, with its old content still in the file.
            put(writer, 0, 4096, 7);
            put(writer, 0, 4096, 0);
            sink.delta(0, 4096, &delta).unwrap();
            // A page that was never written.
            sink.delta(0, 8192, &delta).unwrap();
            assert!(sink.delta(0, 12288, &[0, 0]).is_err());
        });
        let expected = |content| {
            let mut page = vec![content; 4096];
            page[16..18].copy_from_slice(&[0xaa, 0xbb]);
            Some(page)
        };
        assert!(pages == [expected(7), expected(0), expected(0), None]);
    }

    #[test]
    fn streams_that_qemu_would_not_load_are_not_written() {
        let folder = tempfile::tempdir().unwrap();
        let path = folder.path().join("vm");
        let created = create(&path, &["x-ignore-shared"], &[("ram", 4096)]);
        let error = created.err().unwrap();
        assert!(
            error.chain().contains("x-ignore-shared"),
            "{}",
            error.chain()
        );
    }

    #[test]
    fn more_ram_than_any_host_has_is_refused_before_memory_is_taken_for_it() {
        let folder = tempfile::tempdir().unwrap();
        let path = folder.path().join("vm");
        assert!(create(&path, &[], &[("ram", 1 << 62)]).is_err());
    }
}

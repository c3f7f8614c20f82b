//! Reads a `mapped-ram` file of QEMU, and plays it as a relay that sends method none.

use std::fs::File;
use std::io::{self, Write};
use std::os::fd::AsFd;
use std::os::unix::fs::FileExt;
use std::os::unix::net::UnixStream;
use std::path::{Path, PathBuf};
use std::sync::atomic::{AtomicU64, AtomicUsize, Ordering};
use std::thread;

use hotlift_mem::PAGE_SIZE;
use hotlift_mem::sock::{self, IoScratch};
use hotlift_wire::handshake::{Features, Offer};
use hotlift_wire::main_channel::{
    Command, Configuration, MAPPED_RAM, MainEncoder, MappedBlock, MappedEvent, MappedRamDecoder,
    MappedStep, complete_device_state, put_packaged_head,
};
use hotlift_wire::multifd::{
    Hello, InitialPacket, Method, PacketFields, PacketLayout, PacketWriter, ZeroPageDetection,
};
use hotlift_wire::{RamBlockEntry, WireError, limits};

use super::super::outgoing::machine_version;
use super::{FileError, Stopped, check_ram};
use crate::threads::OnPanic;

/// Pages that a thread takes at a time: 4 MiB.
const SHARE: usize = 1024;

/// Threads that read at once; one alone keeps a disk busy, and two a page cache.
const THREADS: usize = 4;

/// A file whose stream was walked and found good.
pub(super) struct MappedSource {
    file: File,
    path: PathBuf,
    configuration: Configuration,
    commands: Vec<Command>,
    section_id: u32,
    blocks: Vec<Block>,
    /// Device sections, EOF, VM description.
    tail: Vec<u8>,
    /// Where EOF is in `tail`.
    eof: usize,
    channels: u8,
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
    pub(super) fn open(path: &Path, offset: u64) -> Result<Self, FileError> {
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
            tail: Vec::new(),
            eof: 0,
            channels: u8::try_from(threads.min(THREADS)).unwrap_or(1),
        };
        let tail_at = source.walk(offset, length)?;
        source.read_tail(tail_at, length)?;
        Ok(source)
    }

    pub(super) fn channels(&self) -> u8 {
        self.channels
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
    fn read_tail(&mut self, position: u64, length: u64) -> Result<(), FileError> {
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
        self.tail = vec![0; fitting];
        let mut tail = std::mem::take(&mut self.tail);
        self.read_exact(&mut tail, position)?;
        self.tail = tail;
        // The only sign that the devices are whole; a file of a machine that writes no description
        // (suppress-vmdesc) cannot be told from one that was cut short.
        self.eof = complete_device_state(&self.tail, &mut 0, &mut Vec::new())
            .ok_or(FileError::Truncated { position })?;
        Ok(())
    }

    /// Plays the file; `lanes` are main and [`MappedSource::channels`] multifd channels.
    pub(super) fn play(&self, lanes: &[UnixStream]) -> Result<(), Stopped> {
        let (main, channels) = lanes.split_first().ok_or(Stopped::Relay)?;
        let mut out = Vec::new();
        let mut encoder = self
            .put_setup(&mut out)
            .map_err(|source| self.bad(source))?;
        let cursor = AtomicUsize::new(0);
        let packet_num = AtomicU64::new(0);
        thread::scope(|scope| {
            let mut senders = Vec::new();
            for (id, lane) in (0..).zip(channels) {
                let sender = thread::Builder::new()
                    .name(format!("relay/file_{id}"))
                    .spawn_scoped(scope, {
                        let (cursor, packet_num) = (&cursor, &packet_num);
                        move || {
                            let _ends = OnPanic(|| close_all(lanes));
                            let sent = Sender::new(self, lane, packet_num).run(id, cursor);
                            if sent.is_err() {
                                // The relay would wait for this channel without end.
                                close_all(lanes);
                            }
                            sent
                        }
                    })
                    .map_err(|source| Stopped::File(self.failed(source)));
                match sender {
                    Ok(sender) => senders.push(sender),
                    Err(error) => {
                        close_all(lanes);
                        return Err(error);
                    }
                }
            }
            // The channels' first SYNC waits for this, and the relay for theirs.
            let opened = write(main, &out);
            let sent = senders
                .into_iter()
                .map(|sender| match sender.join() {
                    Ok(outcome) => outcome,
                    Err(panic) => std::panic::resume_unwind(panic),
                })
                .fold(Ok(()), worse);
            worse(opened, sent)
        })?;
        let mut crc = crc32fast::Hasher::new();
        crc.update(&out);
        out.clear();
        self.put_end(&mut encoder, crc, &mut out)
            .map_err(|source| self.bad(source))?;
        write(main, &out)
    }

    /// Whether multifd flushes are records of their own, as this machine's QEMU makes and expects them.
    fn flushes(&self) -> bool {
        machine_version(&self.configuration.machine).is_none_or(|version| version > (8, 0))
    }

    fn put_setup(&self, out: &mut Vec<u8>) -> Result<MainEncoder, WireError> {
        let mut encoder = MainEncoder::new(&self.configuration, out)?;
        encoder.command(Command::OpenReturnPath, out)?;
        let offer = Offer::new(Features::RELAYED | Features::MULTIFD);
        encoder.command(Command::Ping(offer.ping()), out)?;
        let entries: Vec<RamBlockEntry> = self
            .blocks
            .iter()
            .map(|block| block.place.entry.clone())
            .collect();
        encoder.set_ram_id(self.section_id)?;
        encoder.ram_start(&entries, self.flushes(), out)?;
        Ok(encoder)
    }

    /// Everything behind the pages; `crc` is that of all before on main.
    fn put_end(
        &self,
        encoder: &mut MainEncoder,
        mut crc: crc32fast::Hasher,
        out: &mut Vec<u8>,
    ) -> Result<(), WireError> {
        for command in &self.commands {
            encoder.command(*command, out)?;
        }
        encoder.ram_end(out)?;
        if self.flushes() {
            encoder.multifd_flush(out)?;
        }
        encoder.ram_eos(out)?;
        put_packaged_head(self.eof, out)?;
        out.extend_from_slice(&self.tail[..self.eof]);
        crc.update(out);
        encoder.command(Command::Ping(crc.finalize()), out)?;
        out.extend_from_slice(&self.tail[self.eof..]);
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

    /// What was read cannot be said again.
    fn bad(&self, source: WireError) -> Stopped {
        Stopped::File(FileError::Stream {
            position: 0,
            source,
        })
    }
}

/// One channel's thread.
struct Sender<'a> {
    source: &'a MappedSource,
    lane: &'a UnixStream,
    packet_num: &'a AtomicU64,
    writer: PacketWriter,
    scratch: IoScratch,
    normal: Vec<u64>,
    zero: Vec<u64>,
    pages: Vec<u8>,
}

impl<'a> Sender<'a> {
    fn new(source: &'a MappedSource, lane: &'a UnixStream, packet_num: &'a AtomicU64) -> Self {
        Self {
            source,
            lane,
            packet_num,
            writer: PacketWriter::new(PacketLayout::QEMU, Method::None, true),
            scratch: IoScratch::new(),
            normal: Vec::new(),
            zero: Vec::new(),
            pages: vec![0; PacketLayout::QEMU.pages() * PAGE_SIZE],
        }
    }

    /// Sends shares of RAM until all are taken.
    fn run(&mut self, id: u8, cursor: &AtomicUsize) -> Result<(), Stopped> {
        let source = self.source;
        let opening = InitialPacket {
            uuid: source.configuration.uuid.unwrap_or_default(),
            id,
            hello: Some(Hello {
                channels: source.channels,
                method: Method::None,
                layout: PacketLayout::QEMU,
                zero_page_detection: ZeroPageDetection::Multifd,
            }),
        };
        write(self.lane, &opening.encode())?;
        self.packet(None)?;
        loop {
            let mut share = cursor.fetch_add(1, Ordering::Relaxed);
            let found = source.blocks.iter().find_map(|block| {
                let shares = block.pages().div_ceil(SHARE);
                if share < shares {
                    return Some((block, share));
                }
                share -= shares;
                None
            });
            let Some((block, share)) = found else {
                return self.packet(None);
            };
            self.share(block, share * SHARE)?;
        }
    }

    /// Sends the pages from `first` on.
    fn share(&mut self, block: &Block, first: usize) -> Result<(), Stopped> {
        let end = block.pages().min(first + SHARE);
        for start in (first..end).step_by(PacketLayout::QEMU.pages()) {
            let end = end.min(start + PacketLayout::QEMU.pages());
            self.normal.clear();
            self.zero.clear();
            for page in start..end {
                let offset = (page * PAGE_SIZE) as u64;
                match block.is_in_file(page) {
                    true => self.normal.push(offset),
                    false => self.zero.push(offset),
                }
            }
            self.read_pages(block)?;
            self.packet(Some(&block.place.entry.name))?;
        }
        Ok(())
    }

    /// Reads the normal pages, neighbours at once.
    fn read_pages(&mut self, block: &Block) -> Result<(), FileError> {
        let mut filled = 0;
        let is_next = |a: &u64, b: &u64| *b == *a + PAGE_SIZE as u64;
        for run in self.normal.chunk_by(is_next) {
            let length = run.len() * PAGE_SIZE;
            let into = &mut self.pages[filled..filled + length];
            let position = block.place.pages_offset + run[0];
            self.source.read_exact(into, position)?;
            filled += length;
        }
        Ok(())
    }

    /// Sends the pages of `block` as a packet; without one, a SYNC.
    fn packet(&mut self, block: Option<&str>) -> Result<(), Stopped> {
        if block.is_none() {
            self.normal.clear();
            self.zero.clear();
        }
        let payload = &self.pages[..self.normal.len() * PAGE_SIZE];
        let fields = PacketFields {
            sync: block.is_none(),
            packet_num: self.packet_num.fetch_add(1, Ordering::Relaxed),
            block: block.unwrap_or_default(),
            normal: &self.normal,
            zero: &self.zero,
            payload_len: u32::try_from(payload.len()).unwrap_or(u32::MAX),
            ..PacketFields::default()
        };
        let header = self
            .writer
            .header(&fields)
            .map_err(|source| self.source.bad(source))?;
        sock::send_parts(self.lane.as_fd(), &[header, payload], &mut self.scratch)
            .map_err(|_| Stopped::Relay)
    }
}

fn write(mut lane: &UnixStream, bytes: &[u8]) -> Result<(), Stopped> {
    lane.write_all(bytes).map_err(|_| Stopped::Relay)
}

fn close_all(lanes: &[UnixStream]) {
    for lane in lanes {
        let _ = lane.shutdown(std::net::Shutdown::Both);
    }
}

/// The outcome that says more.
fn worse(a: Result<(), Stopped>, b: Result<(), Stopped>) -> Result<(), Stopped> {
    match (a, b) {
        (Ok(()), other) | (other, Ok(())) | (Err(Stopped::Relay), other) => other,
        (file, _) => file,
    }
}

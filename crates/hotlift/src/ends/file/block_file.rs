//! An open save file: its parts, and the positions of its pages.

use std::collections::BTreeSet;
use std::ops::Range;
use std::path::Path;
use std::sync::Mutex;
use std::time::Duration;

use hotlift_mem::PAGE_SIZE;
use hotlift_wire::main_channel::{
    Command, DeviceLengths, EOF_WITHOUT_DESCRIPTION, MainDecoder, MainEvent, SectionKind, Step,
};
use hotlift_wire::{WireError, limits};

use super::block_reader::Blocks;
use super::index::WORDS;
use super::index::{CHUNK_LEN, Index};
use super::layout::WINDOW;
use super::layout::{self, Contents, Entry, FOOT_LEN, FileInfo, HEAD_LEN, Part, crc_of, damaged};
use super::location::Location;
use super::lost::{Lost, LostPages, is_of_a_part};
use super::open_file::OpenFile;
use super::remote::RemoteReader;
use super::source::{PIECE, PageMap, SavedStream, TakePart, piece_len};
use super::{FileError, IGNORE_SHARED, check_ram};
use crate::control::Control;
use crate::error::MigrationError;
use crate::lock::lock;
use crate::pipe::batch::Batch;
use crate::pipe::session::Session;

/// Number of index chunks that one read from another host fetches: 256 KiB, which cover 128 MiB of RAM. The index of 8 GiB of
/// RAM takes 64 round trips.
const CHUNKS_AHEAD: usize = 64;

/// Maximum length of EOF and the VM description after it, in bytes.
const END_MAX: usize = limits::VM_DESCRIPTION + EOF_WITHOUT_DESCRIPTION.len();

/// An open save file. All its parts were verified, except the index and the pages, which are verified when they are read.
pub(crate) struct BlockFile {
    file: OpenFile,
    info: FileInfo,
    /// CRC of the header, which is the seed of all other CRCs.
    seed: u32,
    contents: Contents,
    stream: SavedStream,
    state: State,
    index: Index,
    /// CRC that each index chunk must have, as stored in the file.
    checks: Vec<u8>,
    /// Index chunks that were found damaged. They are not read again.
    damaged: Mutex<BTreeSet<usize>>,
    /// Lost pages, which are read as zero pages. If `None`, a damaged page is an error.
    lost: Option<Lost>,
}

impl BlockFile {
    /// Opens the file, and verifies everything except the index and the pages.
    pub(crate) fn open(path: &Path) -> Result<Self, FileError> {
        Self::read(OpenFile::open(path)?)
    }

    /// Opens the file at `location`: on this host, or on a file server. Cancelling `control` ends the wait for the server.
    pub(crate) fn open_at(location: &Location, control: &Control) -> Result<Self, FileError> {
        Self::read(OpenFile::open_at(location, control)?)
    }

    fn read(file: OpenFile) -> Result<Self, FileError> {
        let (info, seed, contents) = read_ends(&file)?;
        let at = contents.state.position;
        let (state, mut stream) = State::read(&file, &contents, seed)?;
        let mut capabilities = stream.configuration.capabilities.iter();
        if capabilities.any(|name| name == IGNORE_SHARED) {
            return Err(FileError::WithoutSharedRam);
        }
        stream.uuid = info.uuid_bytes();
        stream.flush_after_each_section = info.flush_after_each_section;
        check_ram(&stream.ram.blocks).map_err(|source| FileError::Stream {
            position: at,
            source,
        })?;
        // Checked before memory is allocated: a file that claims a large RAM must have an index of that size.
        let chunks = Index::chunks_of(&stream.ram.blocks);
        let index_end = contents.index.checked_add(chunks * CHUNK_LEN as u64);
        let fits = index_end.is_some_and(|end| end <= contents.checks.position);
        if contents.checks.length != chunks * 4 || !fits {
            return Err(damaged("the index", contents.index));
        }
        let checks = read_part(
            &file,
            "the checks of the index",
            contents.checks,
            usize::MAX,
            seed,
        )?;
        let index = Index::new(&stream.ram.blocks);
        Ok(Self {
            file,
            info,
            seed,
            contents,
            stream,
            state,
            index,
            checks,
            damaged: Mutex::default(),
            lost: None,
        })
    }

    /// Returns the facts about the VM and the save that the file's header stores.
    pub(crate) fn info(&self) -> &FileInfo {
        &self.info
    }

    /// Returns the length of the file, in bytes.
    pub(crate) fn length(&self) -> u64 {
        self.file.length()
    }

    /// Returns the remote reader, if the file is on another host.
    pub(crate) fn remote(&self) -> Option<&RemoteReader> {
        self.file.remote()
    }

    /// Sets the time for which reads retry after the connection to the file server is lost. Does nothing for a local file.
    pub(crate) fn persist(&self, timeout: Duration) {
        self.file.persist(timeout);
    }

    /// From now on, damaged pages are read as zero pages, and are recorded as lost.
    pub(crate) fn salvage(&mut self) {
        self.lost = Some(Lost::default());
    }

    /// Returns the lost pages recorded so far; always empty without [`BlockFile::salvage`].
    pub(crate) fn lost(&self) -> Vec<LostPages> {
        self.lost.as_ref().map(Lost::all).unwrap_or_default()
    }

    /// Records the pages that are lost because a read of one page failed with `error`. Returns these pages, or `None` if they
    /// were already recorded.
    ///
    /// # Errors
    /// Returns `error` itself if reads must not continue: without [`BlockFile::salvage`], or if the error affects the whole
    /// file.
    pub(crate) fn skip_lost_pages(
        &self,
        (block, page): (usize, usize),
        error: MigrationError,
    ) -> Result<Option<LostPages>, MigrationError> {
        let Some(lost) = self.lost.as_ref().filter(|_| is_of_a_part(&error)) else {
            return Err(error);
        };
        // A damaged block affects only neighbouring pages; a damaged chunk of the index loses all of its pages.
        let entry = self.entry(block, page);
        let (position, group) = match &entry {
            Ok(Some(entry)) => (entry.position, usize::try_from(WINDOW).unwrap_or(1)),
            Ok(None) => return Err(error),
            Err(_) => (self.index_position(block, page), WORDS),
        };
        let first = page / group * group;
        let pages = first..self.pages(block).min(first + group);
        let is_lost = |page: &usize| match (&entry, self.entry(block, *page)) {
            (Ok(_), Ok(other)) => other.is_some_and(|other| other.position == position),
            (lost, other) => lost.is_err() && other.is_err(),
        };
        Ok(lost.keep(position, || LostPages {
            reason: error.chain(),
            position,
            block: self.stream().ram.blocks[block].name.clone(),
            offsets: pages
                .filter(is_lost)
                .map(|page| (page * PAGE_SIZE) as u64)
                .collect(),
        }))
    }

    /// Returns the file position of the index chunk with this page.
    pub(super) fn index_position(&self, block: usize, page: usize) -> u64 {
        let chunk = self.index.place(block, page).map_or(0, |(chunk, _)| chunk);
        self.chunk_position(chunk)
    }

    /// Makes `reader` prefetch the blocks of `pages`, except zero pages. Does nothing for a local file, where reads have no
    /// round trip.
    pub(crate) fn read_ahead(
        &self,
        reader: &mut Blocks<'_>,
        pages: impl Iterator<Item = (usize, usize)>,
    ) -> Result<(), FileError> {
        let Some(remote) = self.remote() else {
            return Ok(());
        };
        let entry = |(block, page)| match self.entry(block, page) {
            // Not reported here: the later read of the page reports an index error.
            Err(error) if !error.is_final() => None,
            entry => entry.transpose(),
        };
        let entries = pages.filter_map(entry).collect::<Result<Vec<_>, _>>()?;
        reader.ahead.fill(remote, entries.into_iter())
    }

    /// Returns the CRC of the header, which seeds all other CRCs.
    pub(crate) fn seed(&self) -> u32 {
        self.seed
    }

    /// Returns the table of contents: positions and CRCs of all parts.
    pub(crate) fn contents(&self) -> &Contents {
        &self.contents
    }

    /// Returns the number of pages of a RAM block.
    pub(crate) fn pages(&self, block: usize) -> usize {
        self.index.pages(block)
    }

    /// Returns the number of RAM blocks.
    pub(crate) fn blocks(&self) -> usize {
        self.index.blocks()
    }

    /// Returns the position of a page, or `None` for a zero page.
    ///
    /// # Errors
    /// [`FileError::Damaged`] for a damaged part of the index, or for a page that the VM does not have.
    pub(crate) fn entry(&self, block: usize, page: usize) -> Result<Option<Entry>, FileError> {
        let place = self.index.place(block, page);
        let place = place.ok_or(damaged("the index", self.contents.index))?;
        let chunk = place.0;
        if !self.index.has(chunk) {
            if lock(&self.damaged).contains(&chunk) {
                return Err(damaged("the index", self.chunk_position(chunk)));
            }
            self.read_index(chunk)?;
        }
        Ok(self.index.get(place))
    }

    /// Reads and verifies index chunk `first`. From another host, also reads the chunks after it, to save round trips.
    fn read_index(&self, first: usize) -> Result<(), FileError> {
        let most = self.remote().map_or(1, |_| CHUNKS_AHEAD);
        let last = self.index.chunks().min(first + most);
        let count = (first..last).take_while(|chunk| !self.index.has(*chunk));
        let mut bytes = vec![[0; CHUNK_LEN]; count.count().max(1)];
        self.file
            .read_exact(bytes.as_flattened_mut(), self.chunk_position(first))?;
        for (chunk, bytes) in (first..).zip(&bytes) {
            let crc = crc_of(self.seed, &[bytes]).to_be_bytes();
            match self.checks[4 * chunk..][..4] == crc {
                true => self.index.fill(chunk, bytes),
                false => {
                    lock(&self.damaged).insert(chunk);
                    if chunk == first {
                        return Err(damaged("the index", self.chunk_position(chunk)));
                    }
                    // Not an error yet: a later read that needs this chunk reports the damage.
                    break;
                }
            }
        }
        Ok(())
    }

    fn chunk_position(&self, chunk: usize) -> u64 {
        self.contents.index + (chunk * CHUNK_LEN) as u64
    }

    /// Reads bytes from `position` on into `into`, and returns their number. It is less than `into.len()` only at the end of
    /// the file.
    pub(crate) fn read_at(&self, into: &mut [u8], position: u64) -> Result<usize, FileError> {
        self.file.read_some(into, position)
    }
}

impl PageMap for BlockFile {
    type Reader<'r> = Blocks<'r>;

    fn stream(&self) -> &SavedStream {
        &self.stream
    }

    fn devices(&self, take: TakePart<'_>) -> Result<(), MigrationError> {
        self.state.each(&self.file, &self.stream.devices, take)
    }

    fn reader<'r>(&'r self, session: &'r Session<'_>) -> Result<Blocks<'r>, MigrationError> {
        Ok(Blocks::new(self.seed, &session.memory, &session.control))
    }

    fn fill(
        &self,
        reader: &mut Blocks<'_>,
        batch: &mut Batch,
        block: usize,
        pages: Range<usize>,
    ) -> Result<usize, MigrationError> {
        let mut wanted = Vec::with_capacity(pages.len());
        for page in pages {
            let entry = match self.entry(block, page) {
                Ok(entry) => entry,
                Err(error) => {
                    self.skip_lost_pages((block, page), error.into())?;
                    None
                }
            };
            match entry {
                Some(entry) => wanted.push((entry, page)),
                None => batch.zero.push((page * PAGE_SIZE) as u64),
            }
        }
        if let Some(remote) = self.remote() {
            let entries = wanted.iter().map(|(entry, _)| *entry);
            reader.ahead.fill(remote, entries)?;
        }
        // Blocks with rewritten pages are later in the file. The sort makes the pages of a block neighbours, so each block is
        // decoded only once.
        wanted.sort_unstable_by_key(|(entry, _)| (entry.position, entry.place));
        let mut bytes = 0;
        for run in wanted.chunk_by(|(a, _), (b, _)| a.position == b.position) {
            let (first, _) = run[0];
            bytes += first.length;
            let read = |into: &mut [u8], position| self.read_at(into, position);
            // Usually the run has all pages of its block, which are then decoded into the batch without a copy.
            let before = batch.normal.len();
            let offsets = run.iter().map(|(_, page)| (page * PAGE_SIZE) as u64);
            batch.normal.extend(offsets);
            let room = &mut batch.pages_mut()[before * PAGE_SIZE..];
            let pages = run.iter().map(|(_, page)| *page as u64);
            match reader.load_to(room, first, (block, pages), read) {
                Ok(true) => continue,
                Ok(false) => batch.normal.truncate(before),
                Err(error) => {
                    self.skip_lost_pages((block, run[0].1), error)?;
                    batch.zero.extend(batch.normal.drain(before..));
                    continue;
                }
            }
            for (entry, page) in run {
                let offset = (page * PAGE_SIZE) as u64;
                match reader.load(*entry, (block, *page as u64), read) {
                    Ok(()) => batch.push(offset, reader.page(entry.place)),
                    Err(error) => {
                        self.skip_lost_pages((block, *page), error)?;
                        batch.zero.push(offset);
                    }
                }
            }
        }
        Ok(bytes)
    }
}

/// Reads the header and the table of contents, and returns the facts, the header's CRC, and the table. A file with a valid
/// header and a valid table is complete.
pub(super) fn read_ends(file: &OpenFile) -> Result<(FileInfo, u32, Contents), FileError> {
    let mut head = [0; HEAD_LEN];
    file.read_exact(&mut head, 0)?;
    let mut rest = vec![0; layout::info_len(&head)? + 4];
    file.read_exact(&mut rest, HEAD_LEN as u64)?;
    let (mut info, seed) = layout::read_info(&head, &rest)?;
    if info.base.is_some() {
        let reason = "it depends on another file, which this version does not read".to_owned();
        return Err(FileError::CannotBeSaved { reason });
    }
    let contents = read_contents(file, seed)?;
    info.paused = contents.paused;
    Ok((info, seed, contents))
}

fn read_contents(file: &OpenFile, seed: u32) -> Result<Contents, FileError> {
    let at = file.length().saturating_sub(FOOT_LEN as u64);
    let mut foot = [0; FOOT_LEN];
    file.read_exact(&mut foot, at)?;
    let length = Contents::length(&foot, at)?;
    let start = at - length as u64;
    let mut json = vec![0; length];
    file.read_exact(&mut json, start)?;
    Contents::decode(&json, &foot, seed, start)
}

fn is_inside(file: &OpenFile, part: Part) -> bool {
    let end = part.position.checked_add(part.length);
    end.is_some_and(|end| end <= file.length())
}

/// Reads and verifies a part of the file. A part longer than `most` bytes is an error.
fn read_part(
    file: &OpenFile,
    what: &'static str,
    part: Part,
    most: usize,
    seed: u32,
) -> Result<Vec<u8>, FileError> {
    let position = part.position;
    let length = usize::try_from(part.length).ok();
    let length = length
        .filter(|length| is_inside(file, part) && *length <= most)
        .ok_or(damaged("the table of contents", position))?;
    let mut bytes = vec![0; length];
    file.read_exact(&mut bytes, position)?;
    if crc_of(seed, &[&bytes]) != part.crc {
        return Err(damaged(what, position));
    }
    Ok(bytes)
}

/// The saved main channel. Only one piece of it is in memory, because device state can have any length.
struct State {
    part: Part,
    /// CRC of each piece, computed when the file is opened. A later read of the piece must have the same CRC.
    crcs: Vec<u32>,
    /// First piece; usually the whole main channel.
    first: Vec<u8>,
    seed: u32,
}

impl State {
    /// Reads and verifies the whole main channel, and decodes it up to the devices.
    fn read(
        file: &OpenFile,
        contents: &Contents,
        seed: u32,
    ) -> Result<(Self, SavedStream), FileError> {
        let part = contents.state;
        let whole = WireError::Truncated {
            what: "main channel",
            needed: 1,
        };
        let stream_error = |source| FileError::Stream {
            position: part.position,
            source,
        };
        if !is_inside(file, part) {
            return Err(damaged("the table of contents", part.position));
        }
        let mut state = Self {
            part,
            crcs: Vec::new(),
            first: Vec::new(),
            seed,
        };
        let mut head = StreamHead::default();
        let mut taken_apart = Ok(());
        let (mut crc, mut piece) = (layout::hasher(seed), Vec::new());
        for position in (part.position..part.position + part.length).step_by(PIECE) {
            state.crcs.push(state.load(file, position, &mut piece)?);
            crc.update(&piece);
            if taken_apart.is_ok() {
                taken_apart = head.take(&piece);
            }
            if state.first.is_empty() {
                state.first.append(&mut piece);
            }
        }
        if crc.finalize() != part.crc {
            return Err(damaged("the VM's state", part.position));
        }
        taken_apart.map_err(stream_error)?;
        let eof = contents.eof;
        if !head.is_whole || head.length > eof || eof >= part.length {
            return Err(stream_error(whole));
        }
        let mut stream = head.stream;
        if stream.ram.blocks.is_empty() {
            return Err(stream_error(whole));
        }
        stream.devices = part.position + head.length..part.position + eof;
        stream.end = match contents.end {
            Some(end) => read_part(file, "the VM description", end, END_MAX, seed)?,
            None => {
                let length = usize::try_from(part.length - eof).unwrap_or(usize::MAX);
                if length > END_MAX {
                    return Err(damaged("the table of contents", part.position));
                }
                let mut end = vec![0; length];
                file.read_exact(&mut end, part.position + eof)?;
                end
            }
        };
        stream.check_early().map_err(stream_error)?;
        Ok((state, stream))
    }

    /// Reads the piece at `position` of the file, and returns its CRC.
    fn load(&self, file: &OpenFile, position: u64, piece: &mut Vec<u8>) -> Result<u32, FileError> {
        let rest = self.part.position + self.part.length - position;
        piece.resize(piece_len(rest), 0);
        file.read_exact(piece, position)?;
        Ok(crc_of(self.seed, &[piece]))
    }

    /// Passes the bytes of `range` (positions in the file) to `take`, piece by piece. Each piece is verified first.
    fn each(
        &self,
        file: &OpenFile,
        range: &Range<u64>,
        take: TakePart<'_>,
    ) -> Result<(), MigrationError> {
        let mut read = Vec::new();
        let pieces = (self.part.position..).step_by(PIECE).zip(&self.crcs);
        for (number, (position, crc)) in pieces.enumerate() {
            let place =
                |at: u64| usize::try_from(at.saturating_sub(position)).unwrap_or(usize::MAX);
            let (from, to) = (place(range.start), place(range.end).min(PIECE));
            if from >= to {
                continue;
            }
            let piece = match number {
                0 => &self.first,
                _ if self.load(file, position, &mut read)? == *crc => &read,
                _ => return Err(damaged("the VM's state", position).into()),
            };
            take(&piece[from..to])?;
        }
        Ok(())
    }
}

/// Incremental decoder of the main channel in a file, up to the devices.
struct StreamHead {
    decoder: MainDecoder,
    stream: SavedStream,
    /// Bytes that were read and not decoded yet.
    input: Vec<u8>,
    /// Bytes decoded.
    length: u64,
    is_last_section: bool,
    /// True once the devices follow.
    is_whole: bool,
}

impl Default for StreamHead {
    fn default() -> Self {
        Self {
            decoder: MainDecoder::new(DeviceLengths::LengthPrefixed).taking_early_sections(),
            stream: SavedStream::default(),
            input: Vec::new(),
            length: 0,
            is_last_section: false,
            is_whole: false,
        }
    }
}

impl StreamHead {
    fn take(&mut self, bytes: &[u8]) -> Result<(), WireError> {
        if self.is_whole {
            return Ok(());
        }
        self.input.extend_from_slice(bytes);
        let mut at = 0;
        while !self.is_whole {
            let (event, consumed) = match self.decoder.next(&self.input[at..])? {
                Step::Need(_) => break,
                Step::Event { event, consumed } => (event, consumed),
            };
            let stream = &mut self.stream;
            match event {
                MainEvent::Configuration(configuration) => stream.configuration = configuration,
                MainEvent::Command(command @ Command::SwitchoverStart) => {
                    stream.commands.push(command);
                }
                MainEvent::SectionStart { kind, id, .. } => {
                    stream.ram.section_id = id;
                    self.is_last_section = kind == SectionKind::End;
                }
                MainEvent::RamBlocks(blocks) => stream.ram.blocks = blocks,
                MainEvent::EarlySection(section) => {
                    stream.early.push(section, !stream.ram.blocks.is_empty());
                }
                MainEvent::SectionFooter => self.is_whole = self.is_last_section,
                MainEvent::Header | MainEvent::RamEos => {}
                _ => {
                    return Err(WireError::OutOfOrder {
                        got: "a record",
                        expected: "a main channel without pages",
                    });
                }
            }
            at += consumed;
        }
        self.length += at as u64;
        self.input.drain(..at);
        Ok(())
    }
}

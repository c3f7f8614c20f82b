//! The stream inside a `mapped-ram` file (QEMU 9.0 and later). In the START section of `ram`, each block's entry is followed by
//! a bitmap and by space for all pages of the block. The other `ram` sections are empty. In all other respects the stream is an
//! ordinary one.
//!
//! ```text
//! header  configuration  [commands]  [early FULL...]  START ram: total
//!   name  used_length  28-byte header | bitmap | hole | pages      for each block; the next entry
//!                                                                  follows the last page
//! EOS footer  [early FULL...]  PART: EOS footer   END: EOS footer   FULL...  EOF  VM description
//! ```
//!
//! Page k of a block is at `pages_offset` + k × 4096 if its bit is set; otherwise the page is zero. Offsets are counted from
//! the first byte of the file, even if the stream starts later.

use super::command::Command;
use super::configuration::{self, Configuration, MACHINE_PAGE_BITS, MAPPED_RAM};
use super::early::{self, EarlySection, Ids};
use super::ram::{FLAG_MASK, MEM_SIZE, RAM_VERSION, check_lengths, put_eos, read_eos};
use super::section::{self, SectionHeader};
use crate::reader::{as_u64, put_counted_string};
use crate::{PAGE_SIZE, RamBlockEntry, Reader, WireError, limits};

/// The only known version of a block's header.
const VERSION: u32 = 1;

/// Text of [`WireError::Unsupported`] for a file that can only be read from its beginning.
pub const WITHOUT_MAPPED_RAM: &str = "a file without capability mapped-ram";

/// Length in bytes of the header after a block's entry.
const HEADER_LEN: u64 = 28;

/// Alignment of a block's pages in QEMU's files, in bytes (`MAPPED_RAM_FILE_OFFSET_ALIGNMENT`).
const ALIGNMENT: u64 = 1 << 20;

/// A RAM block in a `mapped-ram` file. Bitmap and pages are inside the file, in this order, before those of the next block.
#[derive(Debug, Clone, PartialEq, Eq)]
pub struct MappedBlock {
    /// Name and length of the block.
    pub entry: RamBlockEntry,
    /// File position of the bitmap. The bitmap has one bit for each page, in little-endian 64-bit words.
    pub bitmap_offset: u64,
    /// File position of the first page, a multiple of the page size.
    pub pages_offset: u64,
}

impl MappedBlock {
    /// Returns the length of the bitmap in bytes, a multiple of 8.
    #[must_use]
    pub fn bitmap_len(&self) -> u64 {
        bitmap_len(self.entry.used_length)
    }

    /// Returns the file position after the last page, where the stream continues.
    #[must_use]
    pub fn end(&self) -> u64 {
        self.pages_offset + self.entry.used_length
    }
}

fn bitmap_len(used_length: u64) -> u64 {
    (used_length / as_u64(PAGE_SIZE)).div_ceil(64) * 8
}

/// An event of a [`MappedRamDecoder`]. The events end before the devices.
#[derive(Debug, Clone, PartialEq, Eq)]
pub enum MappedEvent {
    /// Magic and version of the stream.
    Header,
    /// The source's machine.
    Configuration(Configuration),
    /// A command.
    Command(Command),
    /// The START section of `ram` begins, with this id.
    RamStart {
        /// Section id of `ram`.
        section_id: u32,
    },
    /// The next RAM block of the list.
    Block(MappedBlock),
    /// A device's section before the END section of `ram`.
    EarlySection(EarlySection),
    /// A section of `ram` has ended.
    RamEos,
    /// The END section of `ram` has ended. Only devices, EOF and the VM description remain.
    RamEnd,
}

/// Result of [`MappedRamDecoder::next`].
#[derive(Debug, PartialEq, Eq)]
pub enum MappedStep {
    /// The next event needs at least this number of bytes after the input.
    Need(usize),
    /// An event. The input of the next call must start at [`MappedRamDecoder::position`].
    Event(MappedEvent),
}

#[derive(Debug, Clone, Copy, PartialEq, Eq)]
enum State {
    FileHeader,
    Configuration,
    Between,
    Blocks { id: u32, remaining: u64 },
    Devices,
}

/// Decodes a `mapped-ram` file from the first byte of the stream to its devices. Skips bitmaps and pages.
#[derive(Debug)]
pub struct MappedRamDecoder {
    state: State,
    position: u64,
    file_len: u64,
    ram_id: Option<u32>,
    /// Section ids of the early sections (devices before the end of RAM).
    early: Vec<u32>,
    /// Total number of bytes of the early sections.
    early_bytes: usize,
    blocks: Vec<MappedBlock>,
}

type Parsed = Result<(MappedEvent, State), WireError>;

impl MappedRamDecoder {
    /// Creates a decoder of a stream that starts at file position `start`. The file has `file_len` bytes.
    #[must_use]
    pub fn new(start: u64, file_len: u64) -> Self {
        Self {
            state: State::FileHeader,
            position: start,
            file_len,
            ram_id: None,
            early: Vec::new(),
            early_bytes: 0,
            blocks: Vec::new(),
        }
    }

    /// Returns the file position at which the input of the next call must start.
    #[must_use]
    pub fn position(&self) -> u64 {
        self.position
    }

    /// Returns the RAM blocks read so far.
    #[must_use]
    pub fn blocks(&self) -> &[MappedBlock] {
        &self.blocks
    }

    /// Decodes the next event from `input`, the bytes at [`MappedRamDecoder::position`]. An early section needs at most
    /// [`limits::MAIN_RECORD`] bytes, any other event at most [`limits::MAPPED_RAM_RECORD`].
    ///
    /// # Errors
    ///
    /// All of [`WireError`], except `Truncated`, which becomes [`MappedStep::Need`]. Any call after [`MappedEvent::RamEnd`]
    /// fails.
    pub fn next(&mut self, input: &[u8]) -> Result<MappedStep, WireError> {
        let mut reader = Reader::new(input);
        match self.read(&mut reader) {
            Ok((event, state)) => {
                self.state = state;
                self.position = match &event {
                    MappedEvent::Block(block) => block.end(),
                    _ => self.position.saturating_add(as_u64(reader.position())),
                };
                Ok(MappedStep::Event(event))
            }
            Err(WireError::Truncated { needed, .. }) => Ok(MappedStep::Need(needed)),
            Err(error) => Err(error),
        }
    }

    // As in `MainDecoder`, `self` changes only after the complete record was read.
    fn read(&mut self, reader: &mut Reader<'_>) -> Parsed {
        match self.state {
            State::FileHeader => {
                configuration::read_file_header(reader)?;
                Ok((MappedEvent::Header, State::Configuration))
            }
            State::Configuration => {
                let configuration = Configuration::decode(reader)?;
                check_configuration(&configuration)?;
                Ok((MappedEvent::Configuration(configuration), State::Between))
            }
            State::Between => self.read_section(reader),
            State::Blocks { id, remaining: 0 } => {
                read_end(id, reader)?;
                Ok((MappedEvent::RamEos, State::Between))
            }
            State::Blocks { id, remaining } => {
                let block = self.read_block(remaining, reader)?;
                self.blocks.push(block.clone());
                let remaining = remaining - block.entry.used_length;
                Ok((MappedEvent::Block(block), State::Blocks { id, remaining }))
            }
            State::Devices => Err(WireError::OutOfOrder {
                got: "another record",
                expected: "the devices",
            }),
        }
    }

    fn read_section(&mut self, reader: &mut Reader<'_>) -> Parsed {
        let whole = reader.clone();
        match reader.u8("section type")? {
            section::START => {
                let header = SectionHeader::decode(reader)?;
                let total = reader.be64("RAM block list")?;
                if header.idstr != "ram" || self.ram_id.is_some() {
                    return Err(unknown_device(&header));
                }
                for (what, expected, got) in [
                    (
                        "version of ram",
                        u64::from(RAM_VERSION),
                        u64::from(header.version_id),
                    ),
                    ("flags of the RAM block list", MEM_SIZE, total & FLAG_MASK),
                ] {
                    expect(what, expected, got)?;
                }
                let id = header.id;
                self.ram_id = Some(id);
                let remaining = total & !FLAG_MASK;
                let start = MappedEvent::RamStart { section_id: id };
                Ok((start, State::Blocks { id, remaining }))
            }
            kind @ (section::PART | section::END) => {
                let id = reader.be32("section id")?;
                if self.ram_id != Some(id) {
                    return Err(WireError::UnknownSectionId { id });
                }
                read_end(id, reader)?;
                Ok(match kind {
                    section::END => (MappedEvent::RamEnd, State::Devices),
                    _ => (MappedEvent::RamEos, State::Between),
                })
            }
            section::FULL if self.early.len() < limits::SECTIONS => {
                let (ram, early) = (self.ram_id, &self.early);
                let is_taken = |id| ram == Some(id) || early.contains(&id);
                let ids = Ids {
                    ram,
                    is_taken: &is_taken,
                };
                let (section, header) = early::read(&whole, reader, &mut 0, ids)?;
                let early_bytes = self.early_bytes + section.bytes.len();
                early::check_all(early_bytes)?;
                self.early.push(header.id);
                self.early_bytes = early_bytes;
                Ok((MappedEvent::EarlySection(section), State::Between))
            }
            section::COMMAND => {
                let command = Command::decode(reader)?;
                Ok((MappedEvent::Command(command), State::Between))
            }
            other => Err(WireError::Unknown {
                what: "section type before the end of RAM",
                got: u64::from(other),
            }),
        }
    }

    /// Reads a block's entry and header. Bitmap and pages must follow the areas of the previous block, and must end inside the
    /// file. So no two areas overlap.
    fn read_block(
        &self,
        remaining: u64,
        reader: &mut Reader<'_>,
    ) -> Result<MappedBlock, WireError> {
        if self.blocks.len() == limits::RAM_BLOCKS {
            return Err(WireError::OverLimit {
                what: "number of RAM blocks",
                limit: as_u64(limits::RAM_BLOCKS),
                got: as_u64(limits::RAM_BLOCKS) + 1,
            });
        }
        let name = reader.counted_string("RAM block name")?;
        let used_length = reader.be64("RAM block length")?;
        let version = reader.be32("version of a mapped-ram header")?;
        let page_size = reader.be64("page size of a mapped-ram header")?;
        let bitmap_offset = reader.be64("bitmap offset of a mapped-ram header")?;
        let pages_offset = reader.be64("pages offset of a mapped-ram header")?;
        for (what, expected, got) in [
            (
                "version of a mapped-ram header",
                u64::from(VERSION),
                u64::from(version),
            ),
            (
                "page size of a mapped-ram header",
                as_u64(PAGE_SIZE),
                page_size,
            ),
        ] {
            expect(what, expected, got)?;
        }
        if used_length == 0 || used_length & FLAG_MASK != 0 || used_length > remaining {
            return Err(WireError::BadBlockLength {
                block: name.to_owned(),
                length: used_length,
                remaining,
            });
        }
        if self.blocks.iter().any(|other| other.entry.name == name) {
            return Err(WireError::DuplicateBlock {
                block: name.to_owned(),
            });
        }
        let behind_header = self.position.checked_add(as_u64(reader.position()));
        let in_order = behind_header.is_some_and(|end| end <= bitmap_offset)
            && bitmap_offset
                .checked_add(bitmap_len(used_length))
                .is_some_and(|end| end <= pages_offset)
            && pages_offset.is_multiple_of(as_u64(PAGE_SIZE))
            && pages_offset
                .checked_add(used_length)
                .is_some_and(|end| end <= self.file_len);
        if !in_order {
            return Err(WireError::BadMappedBlock {
                block: name.to_owned(),
                bitmap_offset,
                pages_offset,
                length: used_length,
                file_len: self.file_len,
            });
        }
        Ok(MappedBlock {
            entry: RamBlockEntry::new(name, used_length),
            bitmap_offset,
            pages_offset,
        })
    }
}

fn expect(what: &'static str, expected: u64, got: u64) -> Result<(), WireError> {
    match got == expected {
        true => Ok(()),
        false => Err(WireError::Mismatch {
            what,
            expected,
            got,
        }),
    }
}

fn read_end(id: u32, reader: &mut Reader<'_>) -> Result<(), WireError> {
    read_eos(reader)?;
    section::read_footer(reader, id)
}

fn unknown_device(header: &SectionHeader<'_>) -> WireError {
    WireError::UnknownDevice {
        idstr: header.idstr.to_owned(),
        instance_id: header.instance_id,
    }
}

fn check_configuration(configuration: &Configuration) -> Result<(), WireError> {
    let bits = configuration.page_bits.unwrap_or(MACHINE_PAGE_BITS);
    expect(
        "target page bits",
        u64::from(MACHINE_PAGE_BITS),
        u64::from(bits),
    )?;
    // If both capabilities are on, QEMU 10.0 writes a file that it cannot read.
    match configuration.capabilities.as_slice() {
        [name] if name == MAPPED_RAM => Ok(()),
        [] => Err(WireError::Unsupported {
            what: WITHOUT_MAPPED_RAM,
        }),
        _ => Err(WireError::Unsupported {
            what: "a file without capability mapped-ram, or with another one",
        }),
    }
}

/// Layout of the START section of `ram` in a file.
#[derive(Debug, Clone, PartialEq, Eq)]
pub struct MappedLayout {
    /// The RAM blocks.
    pub blocks: Vec<MappedBlock>,
    /// Bytes of the section, in pieces with their file positions.
    pub pieces: Vec<(u64, Vec<u8>)>,
    /// File position after the section, where the stream continues.
    pub end: u64,
}

impl MappedLayout {
    /// Creates the layout of a section that starts at file position `position`. As in QEMU 10.0, each bitmap directly follows
    /// its header, and the pages start at the next multiple of 1 MiB.
    ///
    /// # Errors
    ///
    /// - A name that is repeated, or does not have 1 to 255 bytes.
    /// - A length that is not a positive multiple of the page size.
    /// - More blocks than [`limits::RAM_BLOCKS`].
    /// - A file length above 64 bits.
    pub fn new(
        section_id: u32,
        entries: &[RamBlockEntry],
        position: u64,
    ) -> Result<Self, WireError> {
        let total = check_blocks(entries)?;
        let header = SectionHeader {
            id: section_id,
            idstr: "ram",
            instance_id: 0,
            version_id: RAM_VERSION,
        };
        let mut piece = Vec::new();
        header.encode(section::START, &mut piece)?;
        piece.extend_from_slice(&(total | MEM_SIZE).to_be_bytes());

        let mut layout = Self {
            blocks: Vec::new(),
            pieces: Vec::new(),
            end: position,
        };
        for entry in entries {
            put_counted_string(&mut piece, &entry.name, "RAM block name")?;
            piece.extend_from_slice(&entry.used_length.to_be_bytes());
            let placed =
                (layout.end.checked_add(as_u64(piece.len()) + HEADER_LEN)).and_then(|bitmap| {
                    let behind = bitmap.checked_add(bitmap_len(entry.used_length))?;
                    let pages = behind.checked_next_multiple_of(ALIGNMENT)?;
                    Some((bitmap, pages, pages.checked_add(entry.used_length)?))
                });
            let (bitmap_offset, pages_offset, end) = placed.ok_or_else(|| too_long(entry))?;
            piece.extend_from_slice(&VERSION.to_be_bytes());
            piece.extend_from_slice(&as_u64(PAGE_SIZE).to_be_bytes());
            piece.extend_from_slice(&bitmap_offset.to_be_bytes());
            piece.extend_from_slice(&pages_offset.to_be_bytes());
            layout.pieces.push((layout.end, std::mem::take(&mut piece)));
            layout.blocks.push(MappedBlock {
                entry: entry.clone(),
                bitmap_offset,
                pages_offset,
            });
            layout.end = end;
        }
        put_eos(&mut piece);
        section::put_footer(section_id, &mut piece);
        let start = layout.end;
        layout.end += as_u64(piece.len());
        layout.pieces.push((start, piece));
        Ok(layout)
    }
}

/// Appends the END section of `ram` to `out`.
pub fn put_mapped_end(section_id: u32, out: &mut Vec<u8>) {
    out.push(section::END);
    out.extend_from_slice(&section_id.to_be_bytes());
    put_eos(out);
    section::put_footer(section_id, out);
}

fn check_blocks(entries: &[RamBlockEntry]) -> Result<u64, WireError> {
    if entries.len() > limits::RAM_BLOCKS {
        return Err(WireError::OverLimit {
            what: "number of RAM blocks",
            limit: as_u64(limits::RAM_BLOCKS),
            got: as_u64(entries.len()),
        });
    }
    for (index, entry) in entries.iter().enumerate() {
        if entry.guest_address.is_some() {
            return Err(WireError::Unsupported {
                what: "mapped-ram with capability x-ignore-shared",
            });
        }
        if entries[..index]
            .iter()
            .any(|other| other.name == entry.name)
        {
            return Err(WireError::DuplicateBlock {
                block: entry.name.clone(),
            });
        }
    }
    check_lengths(entries)
}

fn too_long(entry: &RamBlockEntry) -> WireError {
    WireError::BadBlockLength {
        block: entry.name.clone(),
        length: entry.used_length,
        remaining: 0,
    }
}

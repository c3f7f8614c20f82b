//! Decodes the main channel, one event at a time, from a buffer that grows as bytes arrive.

use super::command::Command;
use super::configuration::{self, Configuration, MACHINE_PAGE_BITS};
use super::description::{DeviceLengths, LENGTH_CHECK};
use super::early::{self, EarlySection};
use super::postcopy::PostcopyCommand;
use super::ram::{self, BlockFields, PageContent, RAM_VERSION, RamRecord, RamRecords};
use super::section::{self, SectionHeader, SectionKind};
use crate::block::RamBlockEntry;
use crate::reader::as_u64;
use crate::{PAGE_SIZE, Reader, WireError, limits};

/// Result of [`MainDecoder::next`].
#[derive(Debug, PartialEq, Eq)]
pub enum Step<'a> {
    /// The next event needs at least this number of bytes after the input, never 0. The state has not changed: the caller
    /// appends bytes, and calls again with input from the same position.
    Need(usize),
    /// An event in the first `consumed` bytes of the input. The input of the next call must start after them. `consumed` is 0
    /// only for an empty [`MainEvent::DevicePayload`], and for a [`MainEvent::SectionFooter`] of a stream without footers.
    Event {
        /// The event.
        event: MainEvent<'a>,
        /// Length of the event in bytes.
        consumed: usize,
    },
}

/// An event of the main channel.
#[derive(Debug, Clone, PartialEq, Eq)]
pub enum MainEvent<'a> {
    /// Magic and version of the stream.
    Header,
    /// Configuration of the source's machine. Machine types up to 2.3 send none.
    Configuration(Configuration),
    /// A command.
    Command(Command),
    /// A command of postcopy. Only if the decoder was created with [`taking_postcopy`](MainDecoder::taking_postcopy).
    Postcopy(PostcopyCommand<'a>),
    /// A section begins. For PART and END, `idstr`, instance and version are those of the START with the same id.
    SectionStart {
        /// Kind of the section.
        kind: SectionKind,
        /// Section id, which identifies the device.
        id: u32,
        /// Name of the device, `ram` for RAM.
        idstr: &'a str,
        /// Distinguishes devices with the same name.
        instance_id: u32,
        /// Version of the layout of the device's state.
        version_id: u32,
    },
    /// The RAM block list, in the sender's order. The names are unique, and the lengths have the announced sum.
    RamBlocks(Vec<RamBlockEntry>),
    /// A page.
    RamPage {
        /// Index into the list in [`MainEvent::RamBlocks`].
        block: usize,
        /// Byte offset in the block, a multiple of the page size. The whole page is inside the block.
        offset: u64,
        /// Content of the page.
        content: PageContent<'a>,
    },
    /// The multifd flush: a sync point, which all multifd channels must reach with their next SYNC (machine types from 8.1).
    MultifdFlush,
    /// End of the RAM records in this section. With machine types up to 8.0 and multifd, this is also a sync point.
    RamEos,
    /// State of a device. With [`DeviceLengths::LengthPrefixed`], the preceding length is removed.
    DevicePayload(&'a [u8]),
    /// A complete section of a device before the END of `ram`. Only if the decoder was created with
    /// [`taking_early_sections`](MainDecoder::taking_early_sections).
    EarlySection(EarlySection),
    /// A section has ended. A stream without a configuration has no footers; then this event has no bytes.
    SectionFooter,
    /// EOF: all sections have ended. Only an optional [`MainEvent::VmDescription`] may follow.
    Eof,
    /// The VM description: JSON text about the device states.
    VmDescription(&'a [u8]),
}

#[derive(Debug, Clone, Copy, PartialEq, Eq)]
enum State {
    FileHeader,
    Configuration,
    Between,
    BlockList { id: u32 },
    RamRecords { id: u32 },
    Device { id: u32, payload: Payload },
    Footer { id: u32 },
    Description,
    End,
}

#[derive(Debug, Clone, Copy, PartialEq, Eq)]
enum Payload {
    Prefixed,
    Known(usize),
}

#[derive(Debug, Clone, Copy, PartialEq, Eq)]
enum Ram {
    Awaited,
    Open { id: u32, instance_id: u32 },
    Ended { id: u32, instance_id: u32 },
}

#[derive(Debug)]
struct KnownSection {
    id: u32,
    idstr: String,
    instance_id: u32,
}

/// Decodes a main channel from its first byte to its last.
///
/// The caller owns the buffer and the socket. Between calls the decoder remembers the RAM blocks, the sections, and the RAM
/// block that was named last. Events borrow only from the input. After an error the stream cannot be decoded further.
#[derive(Debug)]
pub struct MainDecoder {
    state: State,
    lengths: DeviceLengths,
    fields: BlockFields,
    takes_postcopy: bool,
    /// True if sections end with a footer; false for a stream without a configuration.
    has_footers: bool,
    takes_early_sections: bool,
    /// Position in the current early section (a device before RAM) from which the search for its end continues.
    searched: usize,
    /// Total number of bytes of all early sections.
    early_bytes: usize,
    ram: Ram,
    records: RamRecords,
    sections: Vec<KnownSection>,
}

/// Result of decoding one event: the event and the next state.
type Parsed<'a> = Result<(MainEvent<'a>, State), WireError>;

impl MainDecoder {
    /// Creates a decoder at the start of a stream. `lengths` is the source of the lengths of device states.
    pub fn new(lengths: DeviceLengths) -> Self {
        Self {
            state: State::FileHeader,
            lengths,
            fields: BlockFields::default(),
            takes_postcopy: false,
            has_footers: true,
            takes_early_sections: false,
            searched: 0,
            early_bytes: 0,
            ram: Ram::Awaited,
            records: RamRecords::default(),
            sections: Vec::new(),
        }
    }

    /// Accepts commands of postcopy, which are otherwise refused. The order of these commands is not checked here.
    #[must_use]
    pub fn taking_postcopy(mut self) -> Self {
        self.takes_postcopy = true;
        self
    }

    /// Decodes each FULL section before the END of `ram` as one event. The ends of these sections are found without `lengths`,
    /// since QEMU sends no length.
    #[must_use]
    pub fn taking_early_sections(mut self) -> Self {
        self.takes_early_sections = true;
        self
    }

    /// Continues the same stream at the start of a new connection. There is no header, no open section and no previous page
    /// record.
    pub fn reconnect(&mut self) {
        self.state = State::Between;
        self.records.forget_current();
        if let Ram::Ended { id, instance_id } = self.ram {
            self.ram = Ram::Open { id, instance_id };
        }
    }

    /// Returns the RAM blocks; empty before [`MainEvent::RamBlocks`].
    pub fn blocks(&self) -> &[RamBlockEntry] {
        &self.records.blocks
    }

    /// Decodes the next event from `input`, which must start at the end of the last event. No event needs more than
    /// [`limits::MAIN_RECORD`] bytes.
    ///
    /// # Errors
    ///
    /// All of [`WireError`], except `Truncated`, which becomes [`Step::Need`].
    pub fn next<'a>(&mut self, input: &'a [u8]) -> Result<Step<'a>, WireError> {
        let mut reader = Reader::new(input);
        match self.read(&mut reader) {
            Ok((event, state)) => {
                self.state = state;
                self.searched = 0;
                Ok(Step::Event {
                    event,
                    consumed: reader.position(),
                })
            }
            Err(WireError::Truncated { needed, .. }) => Ok(Step::Need(needed)),
            Err(error) => Err(error),
        }
    }

    /// Checks that the stream may end here, after EOF or the VM description.
    pub fn finish(&self) -> Result<(), WireError> {
        match self.state {
            State::Description | State::End => Ok(()),
            _ => Err(WireError::Truncated {
                what: "main channel",
                needed: 1,
            }),
        }
    }

    // The whole record is read before `self` changes, so an incomplete record has no effect. The only exception is `searched`.
    fn read<'a>(&mut self, reader: &mut Reader<'a>) -> Parsed<'a> {
        match self.state {
            State::FileHeader => {
                configuration::read_file_header(reader)?;
                Ok((MainEvent::Header, State::Configuration))
            }
            State::Configuration if reader.peek("configuration")? == section::CONFIGURATION => {
                self.read_configuration(reader)
            }
            State::Configuration => {
                let read = self.read_section_type(reader)?;
                self.has_footers = false;
                Ok(read)
            }
            State::Between => self.read_section_type(reader),
            State::BlockList { id } => {
                let blocks = ram::read_block_list(reader, self.fields)?;
                self.records = RamRecords::new(blocks.clone());
                Ok((MainEvent::RamBlocks(blocks), State::RamRecords { id }))
            }
            State::RamRecords { id } => Ok(match self.records.read(reader)? {
                RamRecord::Eos => (MainEvent::RamEos, State::Footer { id }),
                RamRecord::MultifdFlush => (MainEvent::MultifdFlush, self.state),
                RamRecord::Page {
                    block,
                    offset,
                    content,
                } => {
                    let page = MainEvent::RamPage {
                        block,
                        offset,
                        content,
                    };
                    (page, self.state)
                }
            }),
            State::Device { id, payload } => {
                let length = match payload {
                    Payload::Known(length) => length,
                    Payload::Prefixed => read_prefix(reader)?,
                };
                let payload = reader.take(length, "device payload")?;
                Ok((MainEvent::DevicePayload(payload), State::Footer { id }))
            }
            State::Footer { id } => {
                if self.has_footers {
                    section::read_footer(reader, id)?;
                }
                Ok((MainEvent::SectionFooter, State::Between))
            }
            State::Description => read_description(reader),
            State::End => match reader.remaining() {
                0 => Err(WireError::Truncated {
                    what: "main channel",
                    needed: 1,
                }),
                extra => Err(WireError::Trailing {
                    what: "main channel",
                    extra,
                }),
            },
        }
    }

    fn read_configuration<'a>(&mut self, reader: &mut Reader<'a>) -> Parsed<'a> {
        let configuration = Configuration::decode(reader)?;
        if let Some(bits) = configuration.page_bits
            && bits != MACHINE_PAGE_BITS
        {
            return Err(WireError::Mismatch {
                what: "target page bits",
                expected: u64::from(MACHINE_PAGE_BITS),
                got: u64::from(bits),
            });
        }
        if configuration
            .capabilities
            .iter()
            .any(|name| name != configuration::IGNORE_SHARED)
        {
            return Err(WireError::Unsupported {
                what: "a stream with capability mapped-ram or an unknown one",
            });
        }
        self.fields.addresses = configuration.has_addresses();
        Ok((MainEvent::Configuration(configuration), State::Between))
    }

    fn read_section_type<'a>(&mut self, reader: &mut Reader<'a>) -> Parsed<'a> {
        let misplaced = |got| {
            Err(WireError::OutOfOrder {
                got,
                expected: "a section, command or EOF",
            })
        };
        let whole = reader.clone();
        match reader.u8("section type")? {
            section::START => self.read_ram_start(reader),
            section::PART => self.read_ram_again(SectionKind::Part, reader),
            section::END => self.read_ram_again(SectionKind::End, reader),
            section::FULL
                if self.takes_early_sections && !matches!(self.ram, Ram::Ended { .. }) =>
            {
                self.read_early_section(&whole, reader)
            }
            section::FULL => self.read_device_start(reader),
            section::COMMAND => {
                let postcopy = match self.takes_postcopy {
                    true => PostcopyCommand::decode(reader, &self.records)?,
                    false => None,
                };
                let event = match postcopy {
                    Some(command) => MainEvent::Postcopy(command),
                    None => MainEvent::Command(Command::decode(reader)?),
                };
                if let MainEvent::Command(Command::PostcopyAdvise {
                    page_sizes: Some((host, _)),
                }) = event
                {
                    // QEMU writes the page size of a block only if it is larger than that of the main channel.
                    self.fields.page_sizes = host & !(2 * as_u64(PAGE_SIZE) - 1);
                }
                Ok((event, State::Between))
            }
            section::EOF if matches!(self.ram, Ram::Ended { .. }) => {
                Ok((MainEvent::Eof, State::Description))
            }
            section::EOF => Err(WireError::OutOfOrder {
                got: "EOF",
                expected: "the END section of ram",
            }),
            section::SUBSECTION => misplaced("a subsection"),
            section::VM_DESCRIPTION => misplaced("the VM description"),
            section::CONFIGURATION => misplaced("a second configuration"),
            section::FOOTER => misplaced("a footer"),
            unknown => Err(WireError::Unknown {
                what: "section type",
                got: u64::from(unknown),
            }),
        }
    }

    fn read_ram_start<'a>(&mut self, reader: &mut Reader<'a>) -> Parsed<'a> {
        let header = SectionHeader::decode(reader)?;
        if header.idstr != "ram" {
            return Err(WireError::UnknownDevice {
                idstr: header.idstr.to_owned(),
                instance_id: header.instance_id,
            });
        }
        if header.version_id != RAM_VERSION {
            return Err(WireError::Mismatch {
                what: "version of ram",
                expected: u64::from(RAM_VERSION),
                got: u64::from(header.version_id),
            });
        }
        self.remember(&header)?;
        if self.ram != Ram::Awaited {
            return Err(WireError::OutOfOrder {
                got: "a second START section of ram",
                expected: "a PART or END section",
            });
        }
        self.ram = Ram::Open {
            id: header.id,
            instance_id: header.instance_id,
        };
        let start = section_start(SectionKind::Start, &header);
        Ok((start, State::BlockList { id: header.id }))
    }

    fn read_ram_again<'a>(&mut self, kind: SectionKind, reader: &mut Reader<'a>) -> Parsed<'a> {
        let got = reader.be32("section id")?;
        let (id, instance_id) = match self.ram {
            Ram::Open { id, instance_id } if id == got => (id, instance_id),
            _ => return Err(WireError::UnknownSectionId { id: got }),
        };
        if kind == SectionKind::End {
            self.ram = Ram::Ended { id, instance_id };
        }
        let header = SectionHeader {
            id,
            idstr: "ram",
            instance_id,
            version_id: RAM_VERSION,
        };
        Ok((section_start(kind, &header), State::RamRecords { id }))
    }

    fn read_early_section<'a>(
        &mut self,
        whole: &Reader<'a>,
        reader: &mut Reader<'a>,
    ) -> Parsed<'a> {
        let sections = &self.sections;
        let ids = early::Ids {
            ram: match self.ram {
                Ram::Open { id, .. } => Some(id),
                Ram::Awaited | Ram::Ended { .. } => None,
            },
            is_taken: &|id| sections.iter().any(|known| known.id == id),
        };
        let (section, header) = early::read(whole, reader, &mut self.searched, ids)?;
        let early_bytes = self.early_bytes + section.bytes.len();
        early::check_all(early_bytes)?;
        self.remember(&header)?;
        self.early_bytes = early_bytes;
        Ok((MainEvent::EarlySection(section), State::Between))
    }

    fn read_device_start<'a>(&mut self, reader: &mut Reader<'a>) -> Parsed<'a> {
        let header = SectionHeader::decode(reader)?;
        let payload = match &self.lengths {
            DeviceLengths::LengthPrefixed => Payload::Prefixed,
            DeviceLengths::Description(description) => {
                let length = description
                    .payload_len(header.idstr, header.instance_id)
                    .ok_or_else(|| WireError::UnknownDevice {
                        idstr: header.idstr.to_owned(),
                        instance_id: header.instance_id,
                    })?;
                let fitting = usize::try_from(length)
                    .ok()
                    .filter(|&length| length <= limits::DEVICE_PAYLOAD);
                Payload::Known(fitting.ok_or(WireError::OverLimit {
                    what: "length of a device payload",
                    limit: as_u64(limits::DEVICE_PAYLOAD),
                    got: length,
                })?)
            }
        };
        self.remember(&header)?;
        let start = section_start(SectionKind::Full, &header);
        Ok((
            start,
            State::Device {
                id: header.id,
                payload,
            },
        ))
    }

    fn remember(&mut self, header: &SectionHeader<'_>) -> Result<(), WireError> {
        if self.sections.len() == limits::SECTIONS {
            return Err(WireError::OverLimit {
                what: "number of sections",
                limit: as_u64(limits::SECTIONS),
                got: as_u64(limits::SECTIONS) + 1,
            });
        }
        let repeats = |known: &KnownSection| {
            known.id == header.id
                || (known.instance_id == header.instance_id && known.idstr == header.idstr)
        };
        if self.sections.iter().any(repeats) {
            return Err(WireError::DuplicateSection {
                id: header.id,
                idstr: header.idstr.to_owned(),
                instance_id: header.instance_id,
            });
        }
        self.sections.push(KnownSection {
            id: header.id,
            idstr: header.idstr.to_owned(),
            instance_id: header.instance_id,
        });
        Ok(())
    }
}

fn section_start<'a>(kind: SectionKind, header: &SectionHeader<'a>) -> MainEvent<'a> {
    MainEvent::SectionStart {
        kind,
        id: header.id,
        idstr: header.idstr,
        instance_id: header.instance_id,
        version_id: header.version_id,
    }
}

/// Reads the length before a device's state. Fails if the second copy of the length does not match.
fn read_prefix(reader: &mut Reader<'_>) -> Result<usize, WireError> {
    const WHAT: &str = "length of a device payload";
    let length = reader.be32(WHAT)?;
    let again = reader.be32(WHAT)? ^ LENGTH_CHECK;
    if length != again {
        return Err(WireError::Mismatch {
            what: "second copy of the length of a device payload",
            expected: u64::from(length),
            got: u64::from(again),
        });
    }
    usize::try_from(length)
        .ok()
        .filter(|&length| length <= limits::DEVICE_PAYLOAD)
        .ok_or(WireError::OverLimit {
            what: WHAT,
            limit: as_u64(limits::DEVICE_PAYLOAD),
            got: u64::from(length),
        })
}

fn read_description<'a>(reader: &mut Reader<'a>) -> Parsed<'a> {
    let marker = reader.u8("VM description")?;
    if marker != section::VM_DESCRIPTION {
        return Err(WireError::Mismatch {
            what: "marker of the VM description",
            expected: u64::from(section::VM_DESCRIPTION),
            got: u64::from(marker),
        });
    }
    let length = reader.length(limits::VM_DESCRIPTION, "length of the VM description")?;
    let text = reader.take(length, "VM description")?;
    Ok((MainEvent::VmDescription(text), State::End))
}

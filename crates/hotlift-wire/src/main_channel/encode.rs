//! The main channel, written record by record.

use serde_json::{Value, json};

use super::command::Command;
use super::configuration::{Configuration, FILE_HEADER};
use super::description::LENGTH_CHECK;
use super::ram::{self, RAM_VERSION};
use super::section::{self, SectionHeader};
use crate::block::RamBlockEntry;
use crate::reader::as_u64;
use crate::{PAGE_SIZE, WireError, limits};

/// Section id of `ram` unless told otherwise; devices count on from it. Receivers only use ids to tie
/// sections together.
const RAM_ID: u32 = 0;

/// Bytes before a device's payload: its length, twice.
const PREFIX_LEN: u64 = 8;

#[derive(Debug, Clone, Copy, PartialEq, Eq)]
enum State {
    /// Before the START section of `ram`.
    Setup,
    /// Between sections, `ram` not ended.
    Live,
    /// Inside a `ram` section; `last` if it is the END.
    Ram { last: bool },
    /// Behind the END section of `ram`.
    Stopped,
    /// In a package of postcopy, where devices come before RAM has ended.
    Packaged,
    /// Behind EOF.
    Eof,
    /// Behind the VM description.
    Described,
}

/// Writes a main channel, in the order that [`MainDecoder`](super::MainDecoder) reads.
///
/// Every method appends to `out`, which the caller sends and clears as it likes. A call out of order
/// is [`WireError::OutOfOrder`]. After any error the stream is not to be continued.
#[derive(Debug)]
pub struct MainEncoder {
    state: State,
    ram_id: u32,
    with_addresses: bool,
    with_footers: bool,
    blocks: Vec<RamBlockEntry>,
    current: Option<usize>,
    devices: Vec<Value>,
}

impl MainEncoder {
    /// Starts a stream: file header and configuration. Without a configuration no section has a footer.
    pub fn new(configuration: &Configuration, out: &mut Vec<u8>) -> Result<Self, WireError> {
        out.extend_from_slice(&FILE_HEADER);
        if !configuration.is_absent() {
            configuration.encode(out)?;
        }
        Ok(Self {
            state: State::Setup,
            ram_id: RAM_ID,
            with_addresses: configuration.has_addresses(),
            with_footers: !configuration.is_absent(),
            blocks: Vec::new(),
            current: None,
            devices: Vec::new(),
        })
    }

    /// A command, between sections.
    pub fn command(&mut self, command: Command, out: &mut Vec<u8>) -> Result<(), WireError> {
        self.require(
            &[State::Setup, State::Live, State::Stopped, State::Packaged],
            "a command",
            "the rest of the section",
        )?;
        command.encode(out);
        Ok(())
    }

    /// Gives the sections of `ram` this id, before the first: for streams whose device sections are
    /// another encoder's, with ids of its own.
    pub fn set_ram_id(&mut self, id: u32) -> Result<(), WireError> {
        self.require(&[State::Setup], "another id of ram", "none after its START")?;
        self.ram_id = id;
        Ok(())
    }

    /// The whole START section of `ram`: the block list and, with `multifd`, the flush that pairs with
    /// each channel's first SYNC. Without a flush here a receiver expects one SYNC a section.
    ///
    /// # Errors
    ///
    /// Names not 1 to 255 bytes or repeated, lengths not a positive multiple of the page size, more
    /// blocks than [`limits::RAM_BLOCKS`], addresses without capability `x-ignore-shared` or the
    /// other way round.
    pub fn ram_start(
        &mut self,
        blocks: &[RamBlockEntry],
        multifd: bool,
        out: &mut Vec<u8>,
    ) -> Result<(), WireError> {
        self.require(&[State::Setup], "the START section of ram", "another one")?;
        if blocks.len() > limits::RAM_BLOCKS {
            return Err(WireError::OverLimit {
                what: "number of RAM blocks",
                limit: as_u64(limits::RAM_BLOCKS),
                got: as_u64(blocks.len()),
            });
        }
        for (index, block) in blocks.iter().enumerate() {
            if block.guest_address.is_some() != self.with_addresses {
                return Err(WireError::Mismatch {
                    what: "presence of a RAM block's address",
                    expected: u64::from(self.with_addresses),
                    got: u64::from(block.guest_address.is_some()),
                });
            }
            if blocks[..index].iter().any(|other| other.name == block.name) {
                return Err(WireError::DuplicateBlock {
                    block: block.name.clone(),
                });
            }
        }
        let header = SectionHeader {
            id: self.ram_id,
            idstr: "ram",
            instance_id: 0,
            version_id: RAM_VERSION,
        };
        header.encode(section::START, out)?;
        ram::put_block_list(blocks, out)?;
        if multifd {
            ram::put_flush(out);
        }
        ram::put_eos(out);
        self.put_footer(self.ram_id, out);
        self.blocks = blocks.to_vec();
        self.state = State::Live;
        Ok(())
    }

    /// Opens a PART section of `ram`.
    pub fn ram_part(&mut self, out: &mut Vec<u8>) -> Result<(), WireError> {
        self.open_ram(section::PART, out)
    }

    /// Opens the END section of `ram`.
    pub fn ram_end(&mut self, out: &mut Vec<u8>) -> Result<(), WireError> {
        self.open_ram(section::END, out)
    }

    fn open_ram(&mut self, kind: u8, out: &mut Vec<u8>) -> Result<(), WireError> {
        self.require(
            &[State::Live],
            "a section of ram",
            "START first, END last, one at a time",
        )?;
        out.push(kind);
        out.extend_from_slice(&self.ram_id.to_be_bytes());
        self.state = State::Ram {
            last: kind == section::END,
        };
        Ok(())
    }

    /// A page of zeros, in an open `ram` section. `block` is an index into the list of
    /// [`MainEncoder::ram_start`], `offset` a page-aligned byte offset inside it.
    pub fn zero_page(
        &mut self,
        block: usize,
        offset: u64,
        out: &mut Vec<u8>,
    ) -> Result<(), WireError> {
        let name = self.name_page(block, offset)?;
        ram::put_zero_page(offset, name, out);
        Ok(())
    }

    /// The head of a page's record, in an open `ram` section; the page's 4096 bytes must follow on
    /// the wire, from wherever they are.
    pub fn normal_page_head(
        &mut self,
        block: usize,
        offset: u64,
        out: &mut Vec<u8>,
    ) -> Result<(), WireError> {
        let name = self.name_page(block, offset)?;
        ram::put_normal_page_head(offset, name, out);
        Ok(())
    }

    /// A page with its bytes, in an open `ram` section.
    pub fn normal_page(
        &mut self,
        block: usize,
        offset: u64,
        page: &[u8; PAGE_SIZE],
        out: &mut Vec<u8>,
    ) -> Result<(), WireError> {
        self.normal_page_head(block, offset, out)?;
        out.extend_from_slice(page);
        Ok(())
    }

    /// An XBZRLE delta against what the receiver has in that page, 2 to 4096 bytes, in an open `ram`
    /// section.
    pub fn xbzrle_page(
        &mut self,
        block: usize,
        offset: u64,
        delta: &[u8],
        out: &mut Vec<u8>,
    ) -> Result<(), WireError> {
        let length = u16::try_from(delta.len())
            .ok()
            .filter(|_| delta.len() <= PAGE_SIZE)
            .ok_or(WireError::OverLimit {
                what: "length of an XBZRLE delta",
                limit: as_u64(PAGE_SIZE),
                got: as_u64(delta.len()),
            })?;
        let name = self.name_page(block, offset)?;
        ram::put_xbzrle_head(offset, name, length, out);
        out.extend_from_slice(delta);
        Ok(())
    }

    /// A page as one complete zlib stream of 1 to [`limits::COMPRESSED_PAGE`] bytes, in an open `ram`
    /// section. QEMU reads it up to 9.0.
    pub fn compressed_page(
        &mut self,
        block: usize,
        offset: u64,
        stream: &[u8],
        out: &mut Vec<u8>,
    ) -> Result<(), WireError> {
        let what = "compressed page";
        if stream.is_empty() {
            return Err(WireError::Empty { what });
        }
        let length = u32::try_from(stream.len())
            .ok()
            .filter(|_| stream.len() <= limits::COMPRESSED_PAGE)
            .ok_or(WireError::OverLimit {
                what,
                limit: as_u64(limits::COMPRESSED_PAGE),
                got: as_u64(stream.len()),
            })?;
        let name = self.name_page(block, offset)?;
        ram::put_compressed_head(offset, name, length, out);
        out.extend_from_slice(stream);
        Ok(())
    }

    /// Checks a page and returns the name its record needs, none if the block was named last.
    fn name_page(&mut self, block: usize, offset: u64) -> Result<Option<&str>, WireError> {
        self.require_ram("a page")?;
        let entry = self.blocks.get(block).ok_or(WireError::OverLimit {
            what: "index of a RAM block",
            limit: as_u64(self.blocks.len()).saturating_sub(1),
            got: as_u64(block),
        })?;
        entry.check_page(offset, PAGE_SIZE)?;
        let named = self.current.replace(block) == Some(block);
        Ok((!named).then_some(entry.name.as_str()))
    }

    /// The multifd flush that pairs with the next SYNC of every channel, in an open `ram` section.
    pub fn multifd_flush(&mut self, out: &mut Vec<u8>) -> Result<(), WireError> {
        self.require_ram("a multifd flush")?;
        ram::put_flush(out);
        Ok(())
    }

    /// Ends the open `ram` section: EOS and footer.
    pub fn ram_eos(&mut self, out: &mut Vec<u8>) -> Result<(), WireError> {
        let last = self.require_ram("EOS")?;
        ram::put_eos(out);
        self.put_footer(self.ram_id, out);
        self.state = match last {
            true => State::Stopped,
            false => State::Live,
        };
        Ok(())
    }

    /// A device's whole section; the payload goes out with its length before it, twice, see
    /// [`DeviceLengths::LengthPrefixed`](super::DeviceLengths).
    ///
    /// # Errors
    ///
    /// `idstr` not 1 to 255 bytes, a payload above [`limits::DEVICE_PAYLOAD`], more sections than
    /// [`limits::SECTIONS`]. That names do not repeat is the receiver's to check.
    pub fn device(
        &mut self,
        idstr: &str,
        instance_id: u32,
        version_id: u32,
        payload: &[u8],
        out: &mut Vec<u8>,
    ) -> Result<(), WireError> {
        self.require(
            &[State::Stopped, State::Packaged],
            "a device section",
            "the END section of ram",
        )?;
        let over = |what, limit, got| WireError::OverLimit {
            what,
            limit: as_u64(limit),
            got: as_u64(got),
        };
        let (limit, got) = (limits::DEVICE_PAYLOAD, payload.len());
        let length = u32::try_from(got)
            .ok()
            .filter(|_| got <= limit)
            .ok_or(over("length of a device payload", limit, got))?;
        // `ram` has a section, too.
        let number = self.devices.len() + 1;
        let id = u32::try_from(number)
            .ok()
            .filter(|_| number < limits::SECTIONS)
            .ok_or(over("number of sections", limits::SECTIONS, number + 1))?;

        let header = SectionHeader {
            id,
            idstr,
            instance_id,
            version_id,
        };
        header.encode(section::FULL, out)?;
        out.extend_from_slice(&length.to_be_bytes());
        out.extend_from_slice(&(length ^ LENGTH_CHECK).to_be_bytes());
        out.extend_from_slice(payload);
        self.put_footer(id, out);

        let size = u64::from(length) + PREFIX_LEN;
        self.devices.push(json!({
            "name": idstr,
            "instance_id": instance_id,
            "size": size,
            "fields": [{ "name": "data", "size": size, "type": "buffer" }],
        }));
        Ok(())
    }

    /// What follows until [`MainEncoder::end_package`] is the content of a package of postcopy: devices, and commands.
    pub fn begin_package(&mut self) -> Result<(), WireError> {
        self.require(&[State::Live], "a package", "a place between sections")?;
        self.state = State::Packaged;
        Ok(())
    }

    /// The package is whole: sections of `ram` go on.
    pub fn end_package(&mut self) -> Result<(), WireError> {
        self.require(&[State::Packaged], "the end of a package", "its beginning")?;
        self.state = State::Live;
        Ok(())
    }

    /// EOF. Between two Hotlifts this is the byte that commits the migration.
    pub fn eof(&mut self, out: &mut Vec<u8>) -> Result<(), WireError> {
        self.require(&[State::Stopped], "EOF", "the END section of ram")?;
        out.push(section::EOF);
        self.state = State::Eof;
        Ok(())
    }

    /// The description of the devices written, behind EOF: the last record of the stream.
    pub fn vm_description(&mut self, out: &mut Vec<u8>) -> Result<(), WireError> {
        self.require(&[State::Eof], "the VM description", "EOF")?;
        let text = json!({ "page_size": PAGE_SIZE, "devices": self.devices }).to_string();
        let length = u32::try_from(text.len())
            .ok()
            .filter(|_| text.len() <= limits::VM_DESCRIPTION)
            .ok_or(WireError::OverLimit {
                what: "length of the VM description",
                limit: as_u64(limits::VM_DESCRIPTION),
                got: as_u64(text.len()),
            })?;
        out.push(section::VM_DESCRIPTION);
        out.extend_from_slice(&length.to_be_bytes());
        out.extend_from_slice(text.as_bytes());
        self.state = State::Described;
        Ok(())
    }

    fn put_footer(&self, id: u32, out: &mut Vec<u8>) {
        if self.with_footers {
            section::put_footer(id, out);
        }
    }

    fn require(
        &self,
        allowed: &[State],
        got: &'static str,
        expected: &'static str,
    ) -> Result<(), WireError> {
        if allowed.contains(&self.state) {
            return Ok(());
        }
        Err(WireError::OutOfOrder { got, expected })
    }

    fn require_ram(&self, got: &'static str) -> Result<bool, WireError> {
        match self.state {
            State::Ram { last } => Ok(last),
            _ => Err(WireError::OutOfOrder {
                got,
                expected: "an open section of ram",
            }),
        }
    }
}

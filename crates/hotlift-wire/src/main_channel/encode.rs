//! Writes the main channel record by record.

use serde_json::{Value, json};

use super::command::Command;
use super::configuration::{Configuration, FILE_HEADER};
use super::description::LENGTH_CHECK;
use super::ram::{self, RAM_VERSION};
use super::section::{self, SectionHeader};
use crate::block::RamBlockEntry;
use crate::reader::as_u64;
use crate::{PAGE_SIZE, WireError, limits};

/// Default section id of `ram`; devices have the ids after it. Receivers only use ids to match sections.
const RAM_ID: u32 = 0;

/// Bytes before a device's payload: its length, twice.
const PREFIX_LEN: u64 = 8;

#[derive(Debug, Clone, Copy, PartialEq, Eq)]
enum State {
    /// Before the START section of `ram`.
    Setup,
    /// Between sections, before the end of `ram`.
    Live,
    /// Inside a `ram` section; `last` if it is the END.
    Ram { last: bool },
    /// After the END section of `ram`.
    Stopped,
    /// In a package of postcopy, where devices come before the end of RAM.
    Packaged,
    /// After EOF.
    Eof,
    /// After the VM description.
    Described,
}

/// Writes a main channel, in the order that [`MainDecoder`](super::MainDecoder) reads.
///
/// Every method appends to `out`, which the caller sends and clears. A call out of order is [`WireError::OutOfOrder`]. After
/// any error the stream must not be continued.
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
    /// Starts a stream: file header and configuration. Without a configuration, sections have no footers.
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

    /// Writes a command, between sections.
    pub fn command(&mut self, command: Command, out: &mut Vec<u8>) -> Result<(), WireError> {
        self.require(
            &[State::Setup, State::Live, State::Stopped, State::Packaged],
            "a command",
            "the rest of the section",
        )?;
        command.encode(out);
        Ok(())
    }

    /// Sets the id of `ram` sections, before the first: for streams whose device sections come from another encoder with its
    /// own ids.
    pub fn set_ram_id(&mut self, id: u32) -> Result<(), WireError> {
        self.require(&[State::Setup], "another id of ram", "none after its START")?;
        self.ram_id = id;
        Ok(())
    }

    /// Writes the whole START section of `ram`: the block list and, with `multifd`, the flush that pairs with each channel's
    /// first SYNC. Without this flush a receiver expects one SYNC for each section.
    ///
    /// # Errors
    ///
    /// Names not 1 to 255 bytes or repeated, lengths not a positive multiple of the page size, more blocks than
    /// [`limits::RAM_BLOCKS`], or addresses that do not match capability `x-ignore-shared`.
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

    /// Writes a zero page, in an open `ram` section. `block` is an index into the list of [`MainEncoder::ram_start`], `offset`
    /// a page-aligned byte offset inside it.
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

    /// Writes the head of a page's record, in an open `ram` section. The caller must send the page's 4096 bytes after it.
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

    /// Writes a page with its bytes, in an open `ram` section.
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

    /// Writes an XBZRLE delta to the receiver's content of that page, 2 to 4096 bytes, in an open `ram` section.
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

    /// Writes a page as one complete zlib stream of 1 to [`limits::COMPRESSED_PAGE`] bytes, in an open `ram` section. QEMU up
    /// to 9.0 reads it.
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

    /// Checks a page and returns the name for its record; `None` if the previous record has the same block.
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

    /// Writes the multifd flush that pairs with the next SYNC of every channel, in an open `ram` section.
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

    /// Writes a device's whole section, with the length of the payload before it, twice; see
    /// [`DeviceLengths::LengthPrefixed`](super::DeviceLengths).
    ///
    /// # Errors
    ///
    /// `idstr` not 1 to 255 bytes, a payload above [`limits::DEVICE_PAYLOAD`], more sections than [`limits::SECTIONS`]. The
    /// receiver checks for repeated names.
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
        // The section of `ram` counts, too.
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

    /// Begins a package of postcopy: devices and commands up to [`MainEncoder::end_package`] belong to it.
    pub fn begin_package(&mut self) -> Result<(), WireError> {
        self.require(&[State::Live], "a package", "a place between sections")?;
        self.state = State::Packaged;
        Ok(())
    }

    /// Ends the package; further sections of `ram` may follow.
    pub fn end_package(&mut self) -> Result<(), WireError> {
        self.require(&[State::Packaged], "the end of a package", "its beginning")?;
        self.state = State::Live;
        Ok(())
    }

    /// Writes EOF. Between two Hotlifts this byte commits the migration.
    pub fn eof(&mut self, out: &mut Vec<u8>) -> Result<(), WireError> {
        self.require(&[State::Stopped], "EOF", "the END section of ram")?;
        out.push(section::EOF);
        self.state = State::Eof;
        Ok(())
    }

    /// Writes the description of the written devices, after EOF: the last record of the stream.
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

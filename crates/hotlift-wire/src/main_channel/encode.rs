//! Encodes the main channel, one record at a time.

use serde_json::{Value, json};

use super::command::Command;
use super::configuration::{Configuration, FILE_HEADER};
use super::description::LENGTH_CHECK;
use super::ram::{self, RAM_VERSION};
use super::section::{self, SectionHeader};
use crate::block::RamBlockEntry;
use crate::reader::as_u64;
use crate::{PAGE_SIZE, WireError, limits};

/// Default section id of `ram`; devices have the ids from 1 on. Receivers use ids only to match sections.
const RAM_ID: u32 = 0;

/// Number of bytes that precede a device's state: two be32 copies of the length of the state.
const PREFIX_LEN: u64 = 8;

#[derive(Debug, Clone, Copy, PartialEq, Eq)]
enum State {
    /// Before the START section of `ram`.
    Setup,
    /// Between sections, before the end of `ram`.
    Live,
    /// Inside a `ram` section; `last` is true in the END section.
    Ram { last: bool },
    /// After the END section of `ram`.
    Stopped,
    /// Inside a package of postcopy, where devices come before the end of RAM.
    Packaged,
    /// After EOF.
    Eof,
    /// After the VM description.
    Described,
}

/// Encodes a main channel, in the order that [`MainDecoder`](super::MainDecoder) accepts.
///
/// Every method appends to `out`, which the caller sends and clears. A call out of order returns [`WireError::OutOfOrder`].
/// After an error the stream must not be continued.
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
    /// Starts a stream with file header and configuration. If the configuration is absent, sections have no footers.
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

    /// Writes a command. Must be called between sections.
    pub fn command(&mut self, command: Command, out: &mut Vec<u8>) -> Result<(), WireError> {
        self.require(
            &[State::Setup, State::Live, State::Stopped, State::Packaged],
            "a command",
            "the rest of the section",
        )?;
        command.encode(out);
        Ok(())
    }

    /// Sets the id of `ram` sections; must be called before the first `ram` section. Used for streams whose device sections
    /// come from another encoder, which has its own ids.
    pub fn set_ram_id(&mut self, id: u32) -> Result<(), WireError> {
        self.require(&[State::Setup], "another id of ram", "none after its START")?;
        self.ram_id = id;
        Ok(())
    }

    /// Writes the whole START section of `ram`: the RAM block list and, with `multifd`, the flush of the first sync point.
    /// Without this flush a receiver expects that each section ends with a sync point.
    ///
    /// # Errors
    ///
    /// - A name that is repeated, or does not have 1 to 255 bytes.
    /// - A length that is not a positive multiple of the page size.
    /// - More blocks than [`limits::RAM_BLOCKS`].
    /// - Addresses that do not match the capability `x-ignore-shared`.
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

    /// Begins a PART section of `ram`.
    pub fn ram_part(&mut self, out: &mut Vec<u8>) -> Result<(), WireError> {
        self.open_ram(section::PART, out)
    }

    /// Begins the END section of `ram`.
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

    /// Writes a zero page into the open `ram` section. `block` is an index into the list given to [`MainEncoder::ram_start`].
    /// `offset` is the byte offset in the block, a multiple of the page size.
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

    /// Writes the head of a page record into the open `ram` section. The caller must send the 4096 bytes of the page after the
    /// head.
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

    /// Writes a page with its content into the open `ram` section.
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

    /// Writes an XBZRLE delta of 2 to 4096 bytes into the open `ram` section. The receiver applies it to its content of the
    /// page.
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

    /// Writes a page as one complete zlib stream of 1 to [`limits::COMPRESSED_PAGE`] bytes into the open `ram` section. Only
    /// QEMU up to 9.0 can read it.
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

    /// Checks a page, and returns the name of its block for the record. Returns `None` if the previous record has the same
    /// block.
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

    /// Writes a multifd flush into the open `ram` section: a sync point, which every channel must reach with its next SYNC.
    pub fn multifd_flush(&mut self, out: &mut Vec<u8>) -> Result<(), WireError> {
        self.require_ram("a multifd flush")?;
        ram::put_flush(out);
        Ok(())
    }

    /// Ends the open `ram` section with EOS and the footer.
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

    /// Writes the complete section of a device. The length of its state precedes the state twice, see
    /// [`DeviceLengths::LengthPrefixed`](super::DeviceLengths).
    ///
    /// # Errors
    ///
    /// - An `idstr` that does not have 1 to 255 bytes.
    /// - A state above [`limits::DEVICE_PAYLOAD`].
    /// - More sections than [`limits::SECTIONS`].
    ///
    /// Repeated names are not checked here; the receiver refuses them.
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
        // The `ram` section counts as one.
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

    /// Begins a package of postcopy. All devices and commands up to [`MainEncoder::end_package`] belong to it.
    pub fn begin_package(&mut self) -> Result<(), WireError> {
        self.require(&[State::Live], "a package", "a place between sections")?;
        self.state = State::Packaged;
        Ok(())
    }

    /// Ends the package. Further sections of `ram` may follow.
    pub fn end_package(&mut self) -> Result<(), WireError> {
        self.require(&[State::Packaged], "the end of a package", "its beginning")?;
        self.state = State::Live;
        Ok(())
    }

    /// Writes EOF. Between two Hotlifts this byte is the commit of the migration: the source releases the guest.
    pub fn eof(&mut self, out: &mut Vec<u8>) -> Result<(), WireError> {
        self.require(&[State::Stopped], "EOF", "the END section of ram")?;
        out.push(section::EOF);
        self.state = State::Eof;
        Ok(())
    }

    /// Writes the VM description of the written devices after EOF. The description is the last record of the stream.
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

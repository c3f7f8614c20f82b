//! The first bytes of the main channel: file header and configuration.
//!
//! ```text
//! "QEVM"  be32 3 | 0x07  be32 length  machine name | subsections
//! subsection: 0x05  counted name  be32 version  fields
//! ```
//!
//! The configuration has no length and no footer. The configuration ends before the first byte that is not the start of a
//! subsection (0x05). Machine types up to 2.3 send no configuration, and no footers after sections (QEMU's properties
//! `send-configuration` and `send-section-footer`).

use super::section::{CONFIGURATION, SUBSECTION};
use crate::reader::{as_u64, put_counted_string};
use crate::{Reader, WireError, limits};

/// The file header: `QEMU_VM_FILE_MAGIC` and `QEMU_VM_FILE_VERSION`.
pub const FILE_HEADER: [u8; 8] = *b"QEVM\0\0\0\x03";

/// Page bits of the only supported page size, 4 KiB. Streams of x86 machines do not contain the page bits.
pub const MACHINE_PAGE_BITS: u32 = 12;

/// Capability with which each entry of the RAM block list has an address. No other capability changes the decoding here.
pub(super) const IGNORE_SHARED: &str = "x-ignore-shared";

/// Capability of a file that stores each page at a fixed position, see [`super::MappedRamDecoder`].
pub const MAPPED_RAM: &str = "mapped-ram";

const PAGE_BITS: &str = "configuration/target-page-bits";
const CAPABILITIES: &str = "configuration/capabilities";
const UUID: &str = "configuration/uuid";

/// Description of the source's machine, which the destination compares with its own.
#[derive(Debug, Clone, PartialEq, Eq, Default)]
pub struct Configuration {
    /// Machine name, such as `pc-i440fx-7.2`, at most [`limits::MACHINE_NAME`] bytes. Empty if the stream has no configuration
    /// (see [`Configuration::is_absent`]).
    pub machine: String,
    /// Page bits; `None` for CPU families with only one page size.
    pub page_bits: Option<u32>,
    /// Names of the capabilities that change the stream: `x-ignore-shared`, `mapped-ram`.
    pub capabilities: Vec<String>,
    /// UUID of the VM; `None` unless capability `validate-uuid` is on.
    pub uuid: Option<[u8; 16]>,
}

/// Reads and checks the file header at the start of the stream.
pub(super) fn read_file_header(reader: &mut Reader<'_>) -> Result<(), WireError> {
    let (magic, version) = FILE_HEADER.split_at(4);
    for (what, part) in [("stream magic", magic), ("stream version", version)] {
        let expected = Reader::new(part).be32(what)?;
        let got = reader.be32(what)?;
        if got != expected {
            return Err(WireError::Mismatch {
                what,
                expected: u64::from(expected),
                got: u64::from(got),
            });
        }
    }
    Ok(())
}

impl Configuration {
    /// Returns true if the stream has no configuration and no section footers, as with machine types up to 2.3.
    #[must_use]
    pub fn is_absent(&self) -> bool {
        self.machine.is_empty()
    }

    /// Returns true if each entry of the RAM block list has a guest physical address.
    pub(super) fn has_addresses(&self) -> bool {
        self.capabilities.iter().any(|name| name == IGNORE_SHARED)
    }

    /// Appends the encoded configuration record to `out`.
    ///
    /// # Errors
    ///
    /// Names or lists above the limits of [`Configuration::decode`]. `out` is then partly written.
    pub fn encode(&self, out: &mut Vec<u8>) -> Result<(), WireError> {
        let machine = "machine name";
        check_length(self.machine.len(), limits::MACHINE_NAME, machine)?;
        out.push(CONFIGURATION);
        put_length(self.machine.len(), out);
        out.extend_from_slice(self.machine.as_bytes());

        if let Some(bits) = self.page_bits {
            put_subsection(PAGE_BITS, out)?;
            out.extend_from_slice(&bits.to_be_bytes());
        }
        if !self.capabilities.is_empty() {
            check_length(
                self.capabilities.len(),
                limits::CAPABILITIES,
                "capability list",
            )?;
            put_subsection(CAPABILITIES, out)?;
            put_length(self.capabilities.len(), out);
            for name in &self.capabilities {
                put_counted_string(out, name, "capability name")?;
            }
        }
        if let Some(uuid) = self.uuid {
            put_subsection(UUID, out)?;
            out.extend_from_slice(&uuid);
        }
        Ok(())
    }

    /// Decodes the record. The first byte after it must be present, to detect the end of the record; a stream never ends here.
    /// Each subsection appears at most once, in QEMU's order.
    pub fn decode(reader: &mut Reader<'_>) -> Result<Self, WireError> {
        let marker = reader.u8("configuration")?;
        if marker != CONFIGURATION {
            return Err(WireError::Mismatch {
                what: "configuration marker",
                expected: u64::from(CONFIGURATION),
                got: u64::from(marker),
            });
        }
        let what = "machine name";
        let length = reader.length(limits::MACHINE_NAME, what)?;
        if length == 0 {
            return Err(WireError::Empty { what });
        }
        let machine = reader.text(length, what)?.to_owned();

        let mut configuration = Self {
            machine,
            ..Self::default()
        };
        let mut order = [PAGE_BITS, CAPABILITIES, UUID].into_iter();
        while reader.peek("configuration subsection")? == SUBSECTION {
            reader.u8("configuration subsection")?;
            let name = reader.counted_string("configuration subsection")?;
            if !order.any(|expected| expected == name) {
                return Err(WireError::Unsupported {
                    what: "an unknown, repeated or misplaced configuration subsection",
                });
            }
            let version = reader.be32("version of a configuration subsection")?;
            if version != 1 {
                return Err(WireError::Mismatch {
                    what: "version of a configuration subsection",
                    expected: 1,
                    got: u64::from(version),
                });
            }
            match name {
                PAGE_BITS => configuration.page_bits = Some(reader.be32("target page bits")?),
                UUID => configuration.uuid = Some(*reader.array("configuration UUID")?),
                _ => configuration.capabilities = read_capabilities(reader)?,
            }
        }
        Ok(configuration)
    }
}

fn read_capabilities(reader: &mut Reader<'_>) -> Result<Vec<String>, WireError> {
    let count = reader.length(limits::CAPABILITIES, "capability list")?;
    (0..count)
        .map(|_| reader.counted_string("capability name").map(str::to_owned))
        .collect()
}

fn put_subsection(name: &str, out: &mut Vec<u8>) -> Result<(), WireError> {
    out.push(SUBSECTION);
    put_counted_string(out, name, "configuration subsection")?;
    out.extend_from_slice(&1u32.to_be_bytes());
    Ok(())
}

fn check_length(got: usize, limit: usize, what: &'static str) -> Result<(), WireError> {
    match got {
        0 => Err(WireError::Empty { what }),
        _ if got <= limit => Ok(()),
        _ => Err(WireError::OverLimit {
            what,
            limit: as_u64(limit),
            got: as_u64(got),
        }),
    }
}

/// Appends a length, which was already compared with a limit below 32 bits.
fn put_length(length: usize, out: &mut Vec<u8>) {
    let length = u32::try_from(length).unwrap_or(u32::MAX);
    out.extend_from_slice(&length.to_be_bytes());
}

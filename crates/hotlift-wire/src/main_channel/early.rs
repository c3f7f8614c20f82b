//! Sections of devices before the end of RAM: state that a destination needs before it has the pages.
//!
//! ```text
//! FULL  be32 id  counted idstr  be32 instance  be32 version | payload | 0x7e  be32 id
//! ```
//!
//! QEMU 10.0 writes them between START of `ram` and the first PART, QEMU 11.1 before START. The stream has no payload length.
//! There are two ways to find the end:
//!
//! - **By its layout**, which determines the length. QEMU's only early device is virtio-mem ([`PluggableMemory`]). Its payload
//!   has the plugged bytes twice, as a number and as a bitmap; in another layout these would not match.
//! - **By a search**: the end is the first position with this section's own footer, followed by a valid head. The true end is
//!   such a position, so the result is never too long. It is too short only if the payload itself contains a footer with this
//!   id, followed by a valid head. Chance does not produce these bytes, but a guest that controls a device's state can. So a
//!   searched length counts only once the VM description at the end of the stream confirms it ([`EarlyLengths::check`]). Until
//!   then the source keeps the guest.

use super::command::Command;
use super::description::VmDescription;
use super::section::{self, SectionHeader};
use crate::reader::as_u64;
use crate::{PAGE_SIZE, Reader, WireError, limits};

/// Name of virtio-mem's early section, after the device's path (`virtio_mem_device_realize`).
const VIRTIO_MEM: &str = "virtio-mem-device-early";

/// Version of its layout.
const VIRTIO_MEM_VERSION: u32 = 1;

/// Bytes of a footer.
const FOOTER_LEN: usize = 5;

/// Section of a device before the end of RAM.
#[derive(Debug, Clone, PartialEq, Eq)]
pub struct EarlySection {
    /// Name of the device.
    pub idstr: String,
    /// Distinguishes devices of one name.
    pub instance_id: u32,
    /// The whole section, from its type to its footer.
    pub bytes: Vec<u8>,
    /// Length of its payload in bytes.
    pub payload_len: u64,
    /// The described memory; `None` for a device of unknown layout, whose end was searched.
    pub memory: Option<PluggableMemory>,
}

/// Memory that a virtio-mem device has plugged.
///
/// ```text
/// be64 guest address  be64 region size  be64 block size  be32 node
/// be64 plugged bytes  be64 bitmap words: bit n of word m is block 64 m + n
/// ```
#[derive(Debug, Clone, PartialEq, Eq)]
pub struct PluggableMemory {
    /// Path of the device, the prefix of its section's name; empty if it has none.
    pub device: String,
    /// Bytes of the device's RAM block.
    pub region_size: u64,
    /// Bytes of memory for each bit of the bitmap, a power of two.
    pub block_size: u64,
    /// The bitmap.
    pub plugged: Vec<u64>,
}

impl PluggableMemory {
    /// Reads the payload of a section with this header. Returns `None`, and reads nothing, if its layout is unknown.
    fn read(
        header: &SectionHeader<'_>,
        reader: &mut Reader<'_>,
    ) -> Result<Option<Self>, WireError> {
        const WHAT: &str = "state of virtio-mem";
        let (device, name) = header.idstr.rsplit_once('/').unwrap_or(("", header.idstr));
        if name != VIRTIO_MEM || header.version_id != VIRTIO_MEM_VERSION {
            return Ok(None);
        }
        let mut ahead = reader.clone();
        ahead.be64(WHAT)?;
        let (region_size, block_size) = (ahead.be64(WHAT)?, ahead.be64(WHAT)?);
        ahead.be32(WHAT)?;
        let plugged_bytes = ahead.be64(WHAT)?;
        let are_sizes = block_size.is_power_of_two()
            && block_size >= as_u64(PAGE_SIZE)
            && region_size.is_multiple_of(block_size)
            && plugged_bytes <= region_size;
        let words = usize::try_from((region_size / block_size.max(1)).div_ceil(64));
        let bytes = words.ok().and_then(|words| words.checked_mul(8));
        let Some(bytes) = bytes.filter(|bytes| are_sizes && *bytes <= limits::DEVICE_PAYLOAD)
        else {
            return Ok(None);
        };
        let (words, _) = ahead.take(bytes, WHAT)?.as_chunks();
        let memory = Self {
            device: device.to_owned(),
            region_size,
            block_size,
            plugged: words.iter().map(|word| u64::from_be_bytes(*word)).collect(),
        };
        let agrees = memory.plugged_bytes() == Some(plugged_bytes);
        if agrees {
            *reader = ahead;
        }
        Ok(agrees.then_some(memory))
    }

    /// Returns the number of plugged bytes; `None` above 64 bits.
    #[must_use]
    pub fn plugged_bytes(&self) -> Option<u64> {
        let blocks = self.plugged.iter().map(|word| u64::from(word.count_ones()));
        blocks.sum::<u64>().checked_mul(self.block_size)
    }

    /// Returns true if the device owns the RAM block with this name and length: QEMU prefixes both names with the device's path
    /// (`qemu_ram_set_idstr`, `vmstate_register`).
    #[must_use]
    pub fn is_in(&self, block: &str, length: u64) -> bool {
        let name = block.strip_prefix(&self.device);
        let has_path = name.is_some_and(|name| name.starts_with('/'));
        has_path && !self.device.is_empty() && length == self.region_size
    }

    /// Returns true if the guest has the byte at this offset of the region.
    #[must_use]
    pub fn is_plugged(&self, offset: u64) -> bool {
        let block = offset / self.block_size;
        let word = usize::try_from(block / 64).ok();
        let word = word.and_then(|word| self.plugged.get(word));
        word.is_some_and(|word| word >> (block % 64) & 1 == 1)
    }
}

/// Position where the search for the end of a section continues, in bytes after the start of its payload.
pub(super) type Searched = usize;

/// Reads a section after its type byte, which is the first byte of `whole`.
pub(super) fn read<'a>(
    whole: &Reader<'a>,
    reader: &mut Reader<'a>,
    searched: &mut Searched,
    ids: Ids<'_>,
) -> Result<(EarlySection, SectionHeader<'a>), WireError> {
    let header = SectionHeader::decode(reader)?;
    let start = reader.position();
    let memory = PluggableMemory::read(&header, reader)?;
    if memory.is_none() {
        let length = search(&header, reader.clone(), searched, ids)?;
        reader.take(length, "state of a device")?;
    }
    let payload_len = as_u64(reader.position() - start);
    section::read_footer(reader, header.id)?;
    let length = reader.position() - whole.position();
    let section = EarlySection {
        idstr: header.idstr.to_owned(),
        instance_id: header.instance_id,
        bytes: whole.clone().take(length, "section of a device")?.to_vec(),
        payload_len,
        memory,
    };
    Ok((section, header))
}

/// Checks the total length of a stream's early sections, which a save keeps in memory.
pub(super) fn check_all(length: usize) -> Result<(), WireError> {
    if length <= limits::MAIN_RECORD {
        return Ok(());
    }
    Err(WireError::OverLimit {
        what: "length of all sections before RAM",
        limit: as_u64(limits::MAIN_RECORD),
        got: as_u64(length),
    })
}

/// Searches for the end of a payload whose layout is unknown; returns the payload's length.
fn search(
    header: &SectionHeader<'_>,
    mut payload: Reader<'_>,
    searched: &mut Searched,
    ids: Ids<'_>,
) -> Result<usize, WireError> {
    let bytes = payload.take(payload.remaining(), "state of a device")?;
    let mut footer = Vec::with_capacity(FOOTER_LEN);
    section::put_footer(header.id, &mut footer);
    let from = (*searched).min(bytes.len());
    let places = bytes[from..].windows(FOOTER_LEN).enumerate();
    for (at, _) in places.filter(|(_, window)| *window == footer) {
        // The bytes after the footer may be incomplete: the next search continues here.
        *searched = from + at;
        if may_follow(
            Reader::new(&bytes[*searched + FOOTER_LEN..]),
            header.id,
            ids,
        )? {
            return Ok(*searched);
        }
    }
    *searched = from.max(bytes.len().saturating_sub(FOOTER_LEN - 1));
    if *searched > limits::DEVICE_PAYLOAD {
        return Err(WireError::NoSectionEnd {
            idstr: header.idstr.to_owned(),
            limit: as_u64(limits::DEVICE_PAYLOAD),
        });
    }
    Err(WireError::Truncated {
        what: "state of a device",
        needed: 1,
    })
}

/// The section ids at a position of the stream.
#[derive(Clone, Copy)]
pub(super) struct Ids<'a> {
    /// Id of `ram`, if it has begun.
    pub(super) ram: Option<u32>,
    /// Returns true if a section has this id.
    pub(super) is_taken: &'a dyn Fn(u32) -> bool,
}

/// Returns true if `reader` starts with a head that may follow the footer of section `own` before the end of RAM.
fn may_follow(mut reader: Reader<'_>, own: u32, ids: Ids<'_>) -> Result<bool, WireError> {
    let follows = match reader.u8("section type")? {
        section::PART | section::END => {
            let id = reader.be32("section id")?;
            Ok(ids.ram == Some(id))
        }
        section::START | section::FULL => SectionHeader::decode(&mut reader).map(|next| {
            let is_name = next.idstr.bytes().all(|byte| byte.is_ascii_graphic());
            is_name && next.id != own && !(ids.is_taken)(next.id)
        }),
        section::COMMAND => match Command::decode(&mut reader) {
            // Commands of postcopy are also valid.
            Ok(_) | Err(WireError::Unsupported { .. }) => Ok(true),
            Err(error) => Err(error),
        },
        _ => Ok(false),
    };
    match follows {
        Err(error @ WireError::Truncated { .. }) => Err(error),
        follows => Ok(follows.unwrap_or(false)),
    }
}

/// The lengths of early payloads, for comparison with the VM description at the end of their stream.
#[derive(Debug, Clone, Default)]
pub struct EarlyLengths(Vec<EarlyLength>);

#[derive(Debug, Clone)]
struct EarlyLength {
    idstr: String,
    instance_id: u32,
    length: u64,
    was_searched: bool,
}

impl EarlyLengths {
    /// Records the length of a section.
    pub fn record(&mut self, section: &EarlySection) {
        self.0.push(EarlyLength {
            idstr: section.idstr.clone(),
            instance_id: section.instance_id,
            length: section.payload_len,
            was_searched: section.memory.is_none(),
        });
    }

    /// Returns the first device whose end was searched.
    #[must_use]
    pub fn searched(&self) -> Option<&str> {
        let searched = self.0.iter().find(|section| section.was_searched);
        searched.map(|section| section.idstr.as_str())
    }

    /// Checks the lengths against the description in `end`, the last bytes of the stream from EOF on; it may be empty.
    ///
    /// # Errors
    ///
    /// [`WireError::SectionLength`] for a device with another length there, or for a searched device that is missing there.
    pub fn check(&self, end: &[u8]) -> Result<(), WireError> {
        if self.0.is_empty() {
            return Ok(());
        }
        let description = VmDescription::find(end).map(VmDescription::parse);
        let description = description.transpose()?.unwrap_or_default();
        for section in &self.0 {
            let described = description.payload_len(&section.idstr, section.instance_id);
            let is_right = match described {
                Some(described) => described == section.length,
                None => !section.was_searched,
            };
            if !is_right {
                return Err(WireError::SectionLength {
                    idstr: section.idstr.clone(),
                    described,
                    got: section.length,
                });
            }
        }
        Ok(())
    }
}

//! Sections of devices that come before RAM has ended: the state that a destination needs before it has the pages.
//!
//! ```text
//! FULL  be32 id  counted idstr  be32 instance  be32 version | payload | 0x7e  be32 id
//! ```
//!
//! QEMU 10.0 writes them between START of `ram` and the first PART, QEMU 11.1 before START. The stream has no length of a
//! payload. There are two ways to its end:
//!
//! - **By its layout**, which says how long it is. The one early device of QEMU is virtio-mem ([`PluggableMemory`]). Its
//!   number of plugged bytes is there twice, as a number and as a bitmap, and another layout does not have them agree.
//! - **By a search**: the end is the first place with this section's own footer and, behind it, a head that may follow.
//!   The true end is such a place, so no payload is read too long. It is read too short only if it has those bytes itself:
//!   5 of the footer with its id, and the type, id and name, or the type and number, of what follows. No chance makes
//!   them, but a guest may that chooses a device's state. So a payload that was searched counts only once the VM
//!   description at the end of the stream has its length ([`EarlyLengths::check`]). Until then the source keeps the guest.

use super::command::Command;
use super::description::VmDescription;
use super::section::{self, SectionHeader};
use crate::reader::as_u64;
use crate::{PAGE_SIZE, Reader, WireError, limits};

/// Name of virtio-mem's early section, behind the device's path (`virtio_mem_device_realize`).
const VIRTIO_MEM: &str = "virtio-mem-device-early";

/// Version of its layout.
const VIRTIO_MEM_VERSION: u32 = 1;

/// Bytes of a footer.
const FOOTER_LEN: usize = 5;

/// A device's section before the end of RAM.
#[derive(Debug, Clone, PartialEq, Eq)]
pub struct EarlySection {
    /// Name of the device.
    pub idstr: String,
    /// Tells devices of one name apart.
    pub instance_id: u32,
    /// The whole section, from its type to its footer.
    pub bytes: Vec<u8>,
    /// Bytes of its payload.
    pub payload_len: u64,
    /// The memory that it describes; `None` of a device of an unknown layout, whose end was searched for.
    pub memory: Option<PluggableMemory>,
}

/// Which memory a virtio-mem device has plugged.
///
/// ```text
/// be64 guest address  be64 region size  be64 block size  be32 node
/// be64 plugged bytes  be64 bitmap words: bit n of word m is block 64 m + n
/// ```
#[derive(Debug, Clone, PartialEq, Eq)]
pub struct PluggableMemory {
    /// Path of the device, which its section's name begins with; empty if it has none.
    pub device: String,
    /// Bytes of the device's RAM block.
    pub region_size: u64,
    /// Bytes that one bit of the bitmap stands for, a power of two.
    pub block_size: u64,
    /// The bitmap.
    pub plugged: Vec<u64>,
}

impl PluggableMemory {
    /// Reads the payload of a section with this header; `None`, with nothing read, if it has another layout.
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

    /// Bytes that are plugged; `None` if they are more than 64 bits count.
    #[must_use]
    pub fn plugged_bytes(&self) -> Option<u64> {
        let blocks = self.plugged.iter().map(|word| u64::from(word.count_ones()));
        blocks.sum::<u64>().checked_mul(self.block_size)
    }

    /// Whether the RAM block with this name and length is the device's: QEMU puts the device's path before both names
    /// (`qemu_ram_set_idstr`, `vmstate_register`).
    #[must_use]
    pub fn is_in(&self, block: &str, length: u64) -> bool {
        let name = block.strip_prefix(&self.device);
        let has_path = name.is_some_and(|name| name.starts_with('/'));
        has_path && !self.device.is_empty() && length == self.region_size
    }

    /// Whether the guest has the byte at this offset of the region.
    #[must_use]
    pub fn is_plugged(&self, offset: u64) -> bool {
        let block = offset / self.block_size;
        let word = usize::try_from(block / 64).ok();
        let word = word.and_then(|word| self.plugged.get(word));
        word.is_some_and(|word| word >> (block % 64) & 1 == 1)
    }
}

/// Where the search for the end of a section goes on, in bytes behind the start of its payload.
pub(super) type Searched = usize;

/// Reads a section behind its type byte, which is the first of `whole`.
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

/// Checks the length of all early sections of a stream together: whatever writes a file keeps them in memory.
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

/// Returns the length of a payload whose layout is unknown.
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
        // What follows may be cut short: the search goes on here.
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

/// The section ids that a stream has at some place.
#[derive(Clone, Copy)]
pub(super) struct Ids<'a> {
    /// That of `ram`, if it has begun.
    pub(super) ram: Option<u32>,
    /// Whether a section has this one.
    pub(super) is_taken: &'a dyn Fn(u32) -> bool,
}

/// Whether the bytes behind the footer of section `own` are the head of what may follow it before RAM has ended.
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
            // Those of postcopy exist, too.
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

/// The lengths of early payloads, to be compared with the VM description at the end of their stream.
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
    /// Notes the length of a section.
    pub fn note(&mut self, section: &EarlySection) {
        self.0.push(EarlyLength {
            idstr: section.idstr.clone(),
            instance_id: section.instance_id,
            length: section.payload_len,
            was_searched: section.memory.is_none(),
        });
    }

    /// The first device whose end was searched for.
    #[must_use]
    pub fn searched(&self) -> Option<&str> {
        let searched = self.0.iter().find(|section| section.was_searched);
        searched.map(|section| section.idstr.as_str())
    }

    /// Checks the lengths against the description in `end`, the last bytes of the stream from EOF on; in none if it is
    /// empty.
    ///
    /// # Errors
    ///
    /// [`WireError::SectionLength`] for a device that has another length there, or that was searched for and is not there.
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

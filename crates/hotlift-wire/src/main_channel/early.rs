//! Early sections: device states before the end of RAM, which a destination needs before it receives the pages.
//!
//! ```text
//! FULL  be32 id  counted idstr  be32 instance  be32 version | payload | 0x7e  be32 id
//! ```
//!
//! QEMU 10.0 writes early sections between the START of `ram` and the first PART, QEMU 11.1 before the START. The stream does
//! not contain the length of their payload. There are two ways to find the end:
//!
//! - **By the layout**, which determines the length. QEMU's only early device is virtio-mem ([`PluggableMemory`]). Its payload
//!   contains the plugged bytes twice, as a number and as a bitmap. In another layout these two would not match.
//! - **By a search** for the first position with the footer of this section, followed by a valid section head. The true end is
//!   such a position, so the result is never too long. It is too short only if the payload itself contains this footer and a
//!   valid head. This does not occur by chance, but a guest that controls the state of a device can cause it. So a searched
//!   length is valid only after the VM description at the end of the stream has confirmed it ([`EarlyLengths::check`]). Until
//!   then the source keeps the guest.

use super::command::Command;
use super::description::VmDescription;
use super::section::{self, SectionHeader};
use crate::reader::as_u64;
use crate::{PAGE_SIZE, Reader, WireError, limits};

/// Name of virtio-mem's early section, without the device's path (`virtio_mem_device_realize`).
const VIRTIO_MEM: &str = "virtio-mem-device-early";

/// Version of the layout of virtio-mem's early section.
const VIRTIO_MEM_VERSION: u32 = 1;

/// Length of a section footer in bytes.
const FOOTER_LEN: usize = 5;

/// A device's section before the end of RAM.
#[derive(Debug, Clone, PartialEq, Eq)]
pub struct EarlySection {
    /// Name of the device.
    pub idstr: String,
    /// Distinguishes devices with the same name.
    pub instance_id: u32,
    /// All bytes of the section, from the type byte to the footer.
    pub bytes: Vec<u8>,
    /// Length of the payload in bytes.
    pub payload_len: u64,
    /// The plugged memory of a virtio-mem device; `None` for another device, whose layout is unknown and whose end was
    /// searched.
    pub memory: Option<PluggableMemory>,
}

/// Plugged memory of a virtio-mem device.
///
/// ```text
/// be64 guest address  be64 region size  be64 block size  be32 node
/// be64 plugged bytes  be64 bitmap words: bit n of word m is block 64 m + n
/// ```
#[derive(Debug, Clone, PartialEq, Eq)]
pub struct PluggableMemory {
    /// Path of the device, which is the prefix of the section's name; empty if the device has none.
    pub device: String,
    /// Size of the device's RAM block in bytes.
    pub region_size: u64,
    /// Bytes of memory that each bit of the bitmap stands for, a power of two.
    pub block_size: u64,
    /// Bitmap of plugged memory, 64 bits in each word.
    pub plugged: Vec<u64>,
}

impl PluggableMemory {
    /// Reads the payload of a section with this header. If its layout is unknown, returns `None` and reads nothing.
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

    /// Returns the number of plugged bytes; `None` if it exceeds 64 bits.
    #[must_use]
    pub fn plugged_bytes(&self) -> Option<u64> {
        let blocks = self.plugged.iter().map(|word| u64::from(word.count_ones()));
        blocks.sum::<u64>().checked_mul(self.block_size)
    }

    /// Returns true if the RAM block with this name and length belongs to the device. QEMU prefixes the names of both with the
    /// device's path (`qemu_ram_set_idstr`, `vmstate_register`).
    #[must_use]
    pub fn is_in(&self, block: &str, length: u64) -> bool {
        let name = block.strip_prefix(&self.device);
        let has_path = name.is_some_and(|name| name.starts_with('/'));
        has_path && !self.device.is_empty() && length == self.region_size
    }

    /// Returns true if the byte at this offset of the region is plugged.
    #[must_use]
    pub fn is_plugged(&self, offset: u64) -> bool {
        let block = offset / self.block_size;
        let word = usize::try_from(block / 64).ok();
        let word = word.and_then(|word| self.plugged.get(word));
        word.is_some_and(|word| word >> (block % 64) & 1 == 1)
    }
}

/// Position from which the search for the end of a section continues, in bytes after the start of its payload.
pub(super) type Searched = usize;

/// Reads a section, whose type byte was already read from `reader`. `whole` starts at this type byte.
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

/// Fails if the total length of a stream's early sections exceeds the limit. A save keeps all of them in memory.
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

/// Searches for the end of a payload of unknown layout. Returns the length of the payload.
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
        // The bytes after the footer may not have arrived. Then the next search continues at this footer.
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

/// The section ids that were used up to a position of the stream.
#[derive(Clone, Copy)]
pub(super) struct Ids<'a> {
    /// Id of `ram`; `None` before its START.
    pub(super) ram: Option<u32>,
    /// Returns true if an earlier section has this id.
    pub(super) is_taken: &'a dyn Fn(u32) -> bool,
}

/// Returns true if `reader` starts with a section head or command that may follow section `own` before the end of RAM.
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
            // Commands of postcopy may also follow.
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

/// Lengths of early sections' payloads, to be compared with the VM description at the end of the stream.
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
    /// Records the length of a section's payload.
    pub fn record(&mut self, section: &EarlySection) {
        self.0.push(EarlyLength {
            idstr: section.idstr.clone(),
            instance_id: section.instance_id,
            length: section.payload_len,
            was_searched: section.memory.is_none(),
        });
    }

    /// Returns the first device whose end was found by a search; `None` if there is none.
    #[must_use]
    pub fn searched(&self) -> Option<&str> {
        let searched = self.0.iter().find(|section| section.was_searched);
        searched.map(|section| section.idstr.as_str())
    }

    /// Compares the lengths with the VM description. `end`, which may be empty, contains the last bytes of the stream, from EOF
    /// on.
    ///
    /// # Errors
    ///
    /// [`WireError::SectionLength`] if the description has another length for a device, or lacks a device whose end was
    /// searched.
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

//! What is in a save file: read without a VM.

use std::path::Path;
use std::time::UNIX_EPOCH;

use hotlift_wire::main_channel::VmDescription;
use serde::Serialize;

use super::block_file::BlockFile;
use super::block_reader::Blocks;
use super::layout::{FileInfo, Share};
use super::location::Location;
use super::mapped_file::MappedFile;
use super::source::{Places, SavedStream};
use super::{FileError, FileFormat};
use crate::control::Control;
use crate::error::{MigrationError, error_line};
use crate::options::Options;

/// What a save file has.
#[derive(Debug, Clone, PartialEq, Serialize)]
pub struct Description {
    /// Whose format it has.
    pub format: FileFormat,
    /// Facts that the file states. A `mapped-ram` file states the machine, and perhaps the UUID.
    pub info: FileInfo,
    /// Of a `mapped-ram` file, which keeps no time: seconds from 1970 to its last modification.
    #[serde(skip_serializing_if = "Option::is_none")]
    pub modified: Option<u64>,
    /// Of a `mapped-ram` file that can be read in part: why no further.
    #[serde(skip_serializing_if = "Option::is_none")]
    pub problem: Option<String>,
    /// Bytes of the file.
    pub file_bytes: u64,
    /// The VM's RAM blocks.
    pub ram: Vec<RamDescription>,
    /// Sections of devices that come before RAM.
    pub early: Vec<EarlyDescription>,
    /// Devices, by the VM description at the end of the stream; `None` if it has none.
    pub devices: Option<usize>,
    /// vCPUs, by the same.
    pub vcpus: Option<usize>,
    /// Bytes of the devices' state.
    pub device_bytes: u64,
    /// Blocks of pages by method, with those whose pages have changed since they were written.
    pub shares: Vec<Share>,
    /// Blocks whose pages were read, and found to be what was written; `None` if that was not asked for.
    pub verified_blocks: Option<u64>,
}

/// A RAM block of a save file.
#[derive(Debug, Clone, PartialEq, Eq, Serialize)]
pub struct RamDescription {
    /// Its name.
    pub name: String,
    /// Its length, in bytes.
    pub bytes: u64,
    /// Pages of it that have content.
    pub pages: u64,
}

/// A device's section before RAM.
#[derive(Debug, Clone, PartialEq, Eq, Serialize)]
pub struct EarlyDescription {
    /// Name of the device.
    pub name: String,
    /// Bytes of its state.
    pub bytes: u64,
    /// Bytes that a virtio-mem device has plugged, and bytes of its RAM block; `None` of another device.
    #[serde(skip_serializing_if = "Option::is_none")]
    pub plugged: Option<(u64, u64)>,
}

impl Description {
    /// Returns when the guest's clock stopped, in seconds from 1970: as the file keeps it, or by its last modification.
    #[must_use]
    pub fn saved_at(&self) -> u64 {
        self.modified.unwrap_or_else(|| self.info.saved_at())
    }

    /// Bytes of pages that have content.
    #[must_use]
    pub fn content_bytes(&self) -> u64 {
        self.ram.iter().map(|block| block.pages * 4096).sum()
    }
}

/// Reads what is in a save file; with `verify` every page, too. A `mapped-ram` file, which has no checksums, is read as far as it
/// can be.
///
/// # Errors
/// [`MigrationError::File`] for a file that cannot be read, is of another format, or is not what was written. What a cancel
/// of `control` says.
pub fn describe(
    at: impl Into<Location>,
    verify: bool,
    control: &Control,
) -> Result<Description, MigrationError> {
    let read = read(&at.into(), verify, control);
    match control.is_cancelled() {
        true => Err(MigrationError::Cancelled),
        false => read,
    }
}

fn read(at: &Location, verify: bool, control: &Control) -> Result<Description, MigrationError> {
    let file = match (BlockFile::open_at(at, control), at) {
        (Err(FileError::NotASave), Location::Path(path)) => return read_mapped(path),
        (file, _) => file?,
    };
    let memory = Options::default().memory(0);
    let mut blocks = Blocks::new(file.seed(), &memory, control);
    let mut verified = 0;
    let mut ram = Vec::new();
    let stream = file.stream();
    for (index, block) in stream.ram.blocks.iter().enumerate() {
        let mut pages = 0;
        let mut entries = Vec::new();
        for page in 0..file.pages(index) {
            let entry = file.entry(index, page)?;
            pages += u64::from(entry.is_some());
            entries.extend(entry.map(|entry| (entry, page as u64)));
            // No block has pages of two of these.
            let is_last = page % 64 == 63 || page + 1 == file.pages(index);
            if !is_last {
                continue;
            }
            if control.is_cancelled() {
                return Err(MigrationError::Cancelled);
            }
            entries.sort_unstable_by_key(|(entry, _)| entry.position);
            if verify {
                let pages = entries.iter().map(|(_, page)| *page);
                let pages = pages.filter_map(|page| usize::try_from(page).ok());
                file.read_ahead(&mut blocks, pages.map(|page| (index, page)))?;
            }
            let runs = entries.chunk_by(|(a, _), (b, _)| a.position == b.position);
            for run in runs.filter(|_| verify) {
                for (entry, page) in run {
                    let read = |into: &mut [u8], position| file.read_at(into, position);
                    blocks.load(*entry, (index, *page), read)?;
                }
                verified += 1;
            }
            entries.clear();
        }
        ram.push(RamDescription {
            name: block.name.clone(),
            bytes: block.used_length,
            pages,
        });
    }
    Ok(Description {
        info: file.info().clone(),
        file_bytes: file.length(),
        shares: file.contents().shares.clone(),
        verified_blocks: verify.then_some(verified),
        ..of_stream(FileFormat::Hotlift, stream, ram)
    })
}

/// What the stream in a file shows, and its RAM.
fn of_stream(format: FileFormat, stream: &SavedStream, ram: Vec<RamDescription>) -> Description {
    let early = stream.early.all().map(|section| EarlyDescription {
        name: section.idstr.clone(),
        bytes: section.payload_len,
        plugged: (section.memory.as_ref())
            .and_then(|memory| Some((memory.plugged_bytes()?, memory.region_size))),
    });
    let json = VmDescription::find(&stream.end);
    let description = json.and_then(|json| VmDescription::parse(json).ok());
    let description = description.as_ref();
    Description {
        format,
        info: FileInfo::default(),
        modified: None,
        problem: None,
        file_bytes: 0,
        ram,
        early: early.collect(),
        devices: description.map(VmDescription::devices),
        // QEMU's section of each vCPU.
        vcpus: description.map(|description| description.instances("cpu_common")),
        device_bytes: stream.device_bytes(),
        shares: Vec::new(),
        verified_blocks: None,
    }
}

fn read_mapped(path: &Path) -> Result<Description, MigrationError> {
    let (file, problem) = MappedFile::open_partly(path, 0)?;
    let metadata = std::fs::metadata(path).map_err(|source| FileError::read(path, source))?;
    let modified = metadata.modified().ok();
    let modified = modified.and_then(|time| time.duration_since(UNIX_EPOCH).ok());
    let stream = file.stream();
    let uuid = stream.configuration.uuid;
    let ram = stream.ram.blocks.iter().zip(file.pages_in_file());
    let ram = ram.map(|(block, pages)| RamDescription {
        name: block.name.clone(),
        bytes: block.used_length,
        pages,
    });
    Ok(Description {
        info: FileInfo {
            machine: stream.configuration.machine.clone(),
            uuid: uuid.map_or_else(String::new, FileInfo::uuid_text),
            method: "none".to_owned(),
            ..FileInfo::default()
        },
        modified: modified.map(|since| since.as_secs()),
        problem: problem.as_ref().map(|error| error_line(error)),
        file_bytes: file.length(),
        ..of_stream(FileFormat::MappedRam, stream, ram.collect())
    })
}

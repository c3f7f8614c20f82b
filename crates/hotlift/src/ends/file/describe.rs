//! Content of a save file, read without a VM.

use std::path::Path;
use std::time::UNIX_EPOCH;

use hotlift_wire::main_channel::VmDescription;
use serde::Serialize;

use super::block_file::BlockFile;
use super::block_reader::Blocks;
use super::layout::{FileInfo, Share};
use super::location::Location;
use super::mapped_file::MappedFile;
use super::source::{PageMap, SavedStream};
use super::{FileError, FileFormat};
use crate::control::Control;
use crate::error::{MigrationError, error_line};
use crate::options::Limits;

/// Content of a save file.
#[derive(Debug, Clone, PartialEq, Serialize)]
pub struct Description {
    /// Format of the file.
    pub format: FileFormat,
    /// Facts stored in the file. A `mapped-ram` file stores only the machine, and the UUID if the source sends it.
    pub info: FileInfo,
    /// Last modification of a `mapped-ram` file, in seconds since 1970: the file itself stores no time.
    #[serde(skip_serializing_if = "Option::is_none")]
    pub modified: Option<u64>,
    /// Error at which the read of a damaged `mapped-ram` file stopped; `None` if the whole file was read.
    #[serde(skip_serializing_if = "Option::is_none")]
    pub problem: Option<String>,
    /// Length of the file, in bytes.
    pub file_bytes: u64,
    /// RAM blocks of the VM.
    pub ram: Vec<RamDescription>,
    /// Device sections before RAM.
    pub early: Vec<EarlyDescription>,
    /// Number of devices, from the VM description at the end of the stream; `None` without a description.
    pub devices: Option<usize>,
    /// Number of vCPUs, from the VM description; `None` without a description.
    pub vcpus: Option<usize>,
    /// Length of the device state, in bytes.
    pub device_bytes: u64,
    /// Counts of blocks, pages and bytes for each method. Blocks whose pages were rewritten later are included.
    pub shares: Vec<Share>,
    /// Number of blocks that were read and verified; `None` without verification.
    pub verified_blocks: Option<u64>,
}

/// A RAM block of a save file.
#[derive(Debug, Clone, PartialEq, Eq, Serialize)]
pub struct RamDescription {
    /// Name of the block.
    pub name: String,
    /// Length in bytes.
    pub bytes: u64,
    /// Number of pages with content (not zero).
    pub pages: u64,
}

/// A device section before RAM.
#[derive(Debug, Clone, PartialEq, Eq, Serialize)]
pub struct EarlyDescription {
    /// Name of the device.
    pub name: String,
    /// Length of its state, in bytes.
    pub bytes: u64,
    /// For a virtio-mem device: its plugged bytes, and the bytes of its RAM block. `None` for any other device.
    #[serde(skip_serializing_if = "Option::is_none")]
    pub plugged: Option<(u64, u64)>,
}

impl Description {
    /// Returns the time when the guest was paused, in seconds since 1970. For a `mapped-ram` file, which does not store this
    /// time, returns the time of its last modification.
    #[must_use]
    pub fn saved_at(&self) -> u64 {
        self.modified.unwrap_or_else(|| self.info.saved_at())
    }

    /// Returns the total size of all pages with content, in bytes.
    #[must_use]
    pub fn content_bytes(&self) -> u64 {
        self.ram.iter().map(|block| block.pages * 4096).sum()
    }
}

/// Reads a save file and describes its content. With `verify`, also reads and verifies every page.
///
/// A `mapped-ram` file has no checksums. If it is damaged, the part before the damage is described.
///
/// # Errors
/// - [`MigrationError::File`] for a file that cannot be read, has another format, or is damaged.
/// - [`MigrationError::Cancelled`] after `control` is cancelled.
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
    let memory = Limits::default().memory(0);
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
            // A block has pages of one aligned run of 64 only.
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

/// Builds the description from a file's main channel and its RAM blocks.
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
        // The stream has one section `cpu_common` for each vCPU.
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

//! What is in a save file: read without a VM.

use hotlift_wire::main_channel::VmDescription;
use serde::Serialize;

use super::block_file::BlockFile;
use super::block_reader::Blocks;
use super::layout::{FileInfo, Share};
use super::location::Location;
use super::source::Places;
use crate::control::Control;
use crate::error::MigrationError;
use crate::options::Options;

/// What a save file has.
#[derive(Debug, Clone, PartialEq, Serialize)]
pub struct Description {
    /// What it says of itself.
    pub info: FileInfo,
    /// Bytes of the file.
    pub file_bytes: u64,
    /// The VM's RAM blocks.
    pub ram: Vec<RamDescription>,
    /// Devices, by the VM description at the end of the stream; `None` if it has none.
    pub devices: Option<usize>,
    /// Bytes of the devices' state.
    pub device_bytes: usize,
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

impl Description {
    /// Bytes of pages that have content.
    #[must_use]
    pub fn content_bytes(&self) -> u64 {
        self.ram.iter().map(|block| block.pages * 4096).sum()
    }
}

/// Reads what is in a save file; with `verify` every page, too.
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
    let file = BlockFile::open_at(at, control)?;
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
    let (devices, end) = stream.devices();
    let description = VmDescription::find(end).and_then(|json| VmDescription::parse(json).ok());
    Ok(Description {
        info: file.info().clone(),
        file_bytes: file.length(),
        ram,
        devices: description.map(|description| description.devices()),
        device_bytes: devices.len(),
        shares: file.contents().shares.clone(),
        verified_blocks: verify.then_some(verified),
    })
}

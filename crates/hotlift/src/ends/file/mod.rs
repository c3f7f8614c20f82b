//! Saved VMs: writes the stream of a migration to a file, and replays it later.
//!
//! | file | purpose |
//! |---|---|
//! | `layout` | layout of the save file, as bytes and values |
//! | `index` | position of each page, in memory |
//! | `block_sink` | writes a save file, from all worker threads concurrently |
//! | `block_file`, `block_reader` | an open save file: its parts; random access to its pages |
//! | `received_pages` | tracks which pages have arrived |
//! | `lost` | pages that a damaged file has lost |
//! | `describe` | human-readable summary of a file |
//! | `mapped_sink` | writes QEMU's `mapped-ram` file |
//! | `mapped_file` | an open `mapped-ram` file |
//! | `source` | all pages of either format, for an eager restore |
//! | `location` | location of a file: a path, or a name at a server |
//! | `open_file` | random access to a file |
//! | `remote`, `exchange`, `prefetch` | a file on another host: retries; one connection; prefetch in few large reads |
//! | `server` | serves the files of a folder |
//! | `partial` | a file that gets its name when it is complete |
//! | `kind` | kinds of files that can hold a save file |
//! | `foreign` | files of other programs, recognised by their first bytes |
//!
//! An eager restore starts the guest only after the whole file was read and verified. A lazy restore starts it at once, and
//! verifies each page before the guest gets it.

mod block_file;
mod block_reader;
mod block_sink;
mod describe;
mod exchange;
mod foreign;
mod index;
mod kind;
mod layout;
mod location;
mod lost;
mod mapped_file;
mod mapped_sink;
mod open_file;
mod partial;
mod prefetch;
mod received_pages;
mod remote;
mod server;
mod source;
#[cfg(test)]
mod tests;

use std::io::Read;
use std::path::Path;

pub use crate::error::file::{FileError, ServerError};
pub(crate) use block_file::BlockFile;
pub(crate) use block_reader::Blocks;
pub(crate) use block_sink::BlockSink;
pub use describe::{Description, EarlyDescription, RamDescription, describe};
pub use kind::{check_target, open};
pub(crate) use layout::Entry;
pub use layout::{FileInfo, Share};
pub use location::{Location, RemoteFile};
pub use lost::LostPages;
pub(crate) use lost::is_of_a_part;
pub(crate) use mapped_sink::MappedRamSink;
pub(crate) use remote::RemoteReader;
pub use server::{ServerEvent, Visit, serve};
pub(crate) use source::{FileSource, PageMap, SavedStream, Shares};

use hotlift_mem::PAGE_SIZE;
use hotlift_methods::legacy::xbzrle;
use hotlift_wire::{RamBlockEntry, WireError};

use crate::control::Control;
use crate::error::MigrationError;
use crate::options::{OptionError, StreamOptions};
use mapped_file::MappedFile;

/// Maximum RAM of a VM in a file, in bytes: 16 TiB, as in the largest hosts. The page bitmaps of a `mapped-ram` file are all in
/// memory, and then take 512 MiB.
const RAM_MAX: u64 = 16 << 40;

/// Returns the total length of all RAM blocks, in bytes. More than [`RAM_MAX`] is an error.
fn check_ram<'a>(blocks: impl IntoIterator<Item = &'a RamBlockEntry>) -> Result<u64, WireError> {
    let lengths = blocks.into_iter().map(|block| block.used_length);
    let got = lengths.fold(0, u64::saturating_add);
    if got > RAM_MAX {
        return Err(WireError::OverLimit {
            what: "RAM of a VM in a file",
            limit: RAM_MAX,
            got,
        });
    }
    Ok(got)
}

/// Applies an XBZRLE delta to a page of the RAM block `name`.
fn apply_delta(
    delta: &[u8],
    page: &mut [u8; PAGE_SIZE],
    (name, offset): (&str, u64),
) -> Result<(), MigrationError> {
    xbzrle::apply(delta, page).map_err(|source| MigrationError::Page {
        block: name.to_owned(),
        offset: usize::try_from(offset).unwrap_or(usize::MAX),
        source,
    })
}

/// Capability of a stream that leaves out shared RAM.
const IGNORE_SHARED: &str = "x-ignore-shared";

/// Format of a VM in a file.
#[derive(Debug, Clone, Copy, PartialEq, Eq, serde::Serialize)]
#[serde(rename_all = "kebab-case")]
pub enum FileFormat {
    /// Hotlift's format: compressed with the options' method; checksums cover everything that is read.
    Hotlift,
    /// QEMU's format (capability `mapped-ram`, from 9.0): uncompressed pages at fixed offsets, which QEMU loads without
    /// Hotlift. It has no checksums.
    MappedRam,
}

impl FileFormat {
    /// Checks that the format supports the options.
    ///
    /// # Errors
    /// [`OptionError::Conflict`] if the options request a compression that the format does not have.
    pub fn check(self, options: &StreamOptions) -> Result<(), OptionError> {
        let method = options.multifd_compression;
        let asked = match self {
            _ if options.compress => {
                return Err(OptionError::Conflict {
                    option: "compress=on".to_owned(),
                    needs: "a stream: in a file, multifd-compression sets the compression of pages",
                });
            }
            Self::MappedRam if method.flag != 0 => format!("multifd-compression={}", method.name),
            Self::Hotlift | Self::MappedRam => return Ok(()),
        };
        Err(OptionError::Conflict {
            option: asked,
            needs: "format hotlift: pages of QEMU's mapped-ram files are uncompressed",
        })
    }
}

/// Reads the facts in the header of a save file in Hotlift's format. Reads no pages. Cancelling `control` ends the wait for a
/// file server.
///
/// # Errors
/// [`FileError`] for a file that cannot be read, has another format, or has a damaged header.
pub fn inspect(at: impl Into<Location>, control: &Control) -> Result<FileInfo, FileError> {
    Ok(BlockFile::open_at(&at.into(), control)?.info().clone())
}

/// An open file whose header was verified.
pub(crate) enum SavedVm {
    /// Hotlift's format.
    Blocks(Box<FileSource<BlockFile>>),
    /// QEMU's format.
    MappedRam(Box<FileSource<MappedFile>>),
}

impl SavedVm {
    /// Opens the file at `path`, whose content starts at byte `offset`. With `salvage`, damaged pages become zero pages.
    pub(crate) fn open(path: &Path, offset: u64, salvage: bool) -> Result<Self, FileError> {
        let failed = |source| FileError::Read {
            path: path.to_owned(),
            source,
        };
        let mut first = [0; 8];
        let mut file = open(path)?;
        match file.read_exact(&mut first) {
            Ok(()) => {}
            Err(error) if error.kind() == std::io::ErrorKind::UnexpectedEof => {
                return Err(FileError::NotASave);
            }
            Err(source) => return Err(failed(source)),
        }
        if offset == 0 && first == layout::MAGIC {
            return Ok(Self::of(BlockFile::open(path)?, salvage));
        }
        let file = FileSource::new(MappedFile::open(path, offset)?);
        Ok(Self::MappedRam(Box::new(file)))
    }

    /// Opens a file on a file server, which serves only files of Hotlift's format.
    pub(crate) fn open_remote(
        file: &RemoteFile,
        control: &Control,
        salvage: bool,
    ) -> Result<Self, FileError> {
        let file = BlockFile::open_at(&Location::Server(file.clone()), control)?;
        Ok(Self::of(file, salvage))
    }

    fn of(mut file: BlockFile, salvage: bool) -> Self {
        if salvage {
            file.salvage();
        }
        Self::Blocks(Box::new(FileSource::new(file)))
    }

    /// Returns the lost pages recorded so far; always empty for a `mapped-ram` file.
    pub(crate) fn lost(&self) -> Vec<LostPages> {
        match self {
            Self::Blocks(file) => file.file().lost(),
            Self::MappedRam(_) => Vec::new(),
        }
    }
}

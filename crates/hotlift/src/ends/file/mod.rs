//! VMs in files: what a migration sends, kept, and played back later.
//!
//! | file | what it does |
//! |---|---|
//! | `layout` | the save file's layout, as bytes and values |
//! | `index` | where each page is, in memory |
//! | `block_sink` | writes it, from all worker threads at once |
//! | `block_file`, `block_reader` | an open one: its parts; its pages, from any place |
//! | `complete` | which pages have come |
//! | `lost` | pages that a damaged one has lost |
//! | `describe` | what is in one, for people |
//! | `mapped_sink` | writes QEMU's `mapped-ram` file |
//! | `mapped_file` | an open one |
//! | `source` | all pages of either, for an eager restore |
//! | `location` | where a file is: a path, or a name at a server |
//! | `place_reader` | a file that is read from any place |
//! | `remote`, `exchange`, `ahead` | the same on another host: what is tried again; one connection; few large reads for many small ones |
//! | `server` | hands the files of a folder out |
//! | `partial` | a file that gets its name when it is whole |
//! | `kind` | which kinds of files can hold a save file |
//! | `foreign` | files of other programs, recognised by their first bytes |
//!
//! Restored eagerly, the guest does not run before the whole file was read and found good. Restored lazily, it runs at once,
//! and no page reaches it that is not what was written.

mod ahead;
mod block_file;
mod block_reader;
mod block_sink;
mod complete;
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
mod partial;
mod place_reader;
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
pub(crate) use source::{FileSource, Places, SavedStream, Shares};

use hotlift_mem::PAGE_SIZE;
use hotlift_methods::legacy::xbzrle;
use hotlift_wire::{RamBlockEntry, WireError};

use crate::control::Control;
use crate::error::MigrationError;
use crate::options::{OptionError, Options};
use mapped_file::MappedFile;

/// Most RAM of a VM in a `mapped-ram` file, in bytes: 16 TiB, of which the bitmaps, all in memory, are
/// 512 MiB. The largest hosts have that.
const RAM_MAX: u64 = 16 << 40;

/// Returns the bytes of all RAM blocks together, of which a VM in a file has no more than [`RAM_MAX`].
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

/// The capability that leaves shared RAM out of a stream.
const IGNORE_SHARED: &str = "x-ignore-shared";

/// How a VM is kept in a file.
#[derive(Debug, Clone, Copy, PartialEq, Eq, serde::Serialize)]
#[serde(rename_all = "kebab-case")]
pub enum FileFormat {
    /// Hotlift's own: compressed by the options' method, all that is read of it covered by checksums.
    Hotlift,
    /// QEMU's (capability `mapped-ram`, from 9.0 on): pages uncompressed at fixed places, which QEMU
    /// loads by itself. It has no checksums.
    MappedRam,
}

impl FileFormat {
    /// Whether the format can have what the options ask for.
    ///
    /// # Errors
    /// [`OptionError::Conflict`] where pages were to be compressed, and are not.
    pub fn check(self, options: &Options) -> Result<(), OptionError> {
        let method = options.multifd_compression;
        let asked = match self {
            _ if options.compress => {
                return Err(OptionError::Conflict {
                    option: "compress=on".to_owned(),
                    needs: "a stream: in a file multifd-compression says how pages are compressed",
                });
            }
            Self::MappedRam if method.flag != 0 => format!("multifd-compression={}", method.name),
            Self::Hotlift | Self::MappedRam => return Ok(()),
        };
        Err(OptionError::Conflict {
            option: asked,
            needs: "format hotlift: QEMU's mapped-ram file has its pages uncompressed",
        })
    }
}

/// What a save file of Hotlift's own format says of itself; its pages are not looked at. A cancel of `control` ends the wait
/// for a server.
///
/// # Errors
/// [`FileError`] for a file that cannot be read, is of another format, or has a damaged header.
pub fn inspect(at: impl Into<Location>, control: &Control) -> Result<FileInfo, FileError> {
    Ok(BlockFile::open_at(&at.into(), control)?.info().clone())
}

/// A file that was opened and whose first bytes are good.
pub(crate) enum SavedVm {
    /// Of Hotlift's own format.
    Blocks(Box<FileSource<BlockFile>>),
    /// Of QEMU's.
    MappedRam(Box<FileSource<MappedFile>>),
}

impl SavedVm {
    /// Opens the file at `path`, whose content starts at byte `offset`. With `salvage` what is damaged of its pages is zero.
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

    /// The same of a file that a server hands out: none but Hotlift's own are.
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

    /// Pages that were lost so far.
    pub(crate) fn lost(&self) -> Vec<LostPages> {
        match self {
            Self::Blocks(file) => file.file().lost(),
            Self::MappedRam(_) => Vec::new(),
        }
    }
}

//! VMs in files: what a migration sends, kept, and played back later.
//!
//! | file | what it does |
//! |---|---|
//! | `container` | the save file's layout, as bytes and values |
//! | `write` | writes it, from all worker threads at once |
//! | `channels` | reads it, each channel by itself, checking every chunk |
//! | `mapped_sink` | writes QEMU's `mapped-ram` file |
//! | `mapped_source` | reads it |
//! | `partial` | a file that gets its name when it is whole |
//!
//! A save file is the record of a relay's stream, and its channels are read as a relay's connections are, so that
//! restoring it is a migration like any other, with the same checks. A `mapped-ram` file has no order: it is another kind
//! of source. Either way the guest does not run before the whole file was read and found good.

mod channels;
mod container;
mod error;
mod mapped_sink;
mod mapped_source;
mod partial;
#[cfg(test)]
mod tests;
mod write;

use std::fs::File;
use std::io::Read;
use std::path::Path;
use std::sync::Arc;

pub(crate) use channels::{FileChannel, SavedChannels};
pub use container::FileInfo;
pub use error::FileError;
pub(crate) use mapped_sink::MappedRamSink;
pub(crate) use write::ContainerWriter;

use crate::options::{OptionError, Options};
use hotlift_wire::WireError;
pub(crate) use mapped_source::MappedSource;

/// Most RAM of a VM in a `mapped-ram` file, in bytes: 16 TiB, of which the bitmaps, all in memory, are
/// 512 MiB. The largest hosts have that.
const RAM_MAX: u64 = 16 << 40;

fn check_ram(bytes: u64) -> Result<(), WireError> {
    if bytes > RAM_MAX {
        return Err(WireError::OverLimit {
            what: "RAM of a VM in a mapped-ram file",
            limit: RAM_MAX,
            got: bytes,
        });
    }
    Ok(())
}

/// How a VM is kept in a file.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub enum FileFormat {
    /// Hotlift's own: compressed by the options' method, every byte covered by a checksum.
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
            Self::MappedRam if options.compress => "compress=on".to_owned(),
            Self::MappedRam if method.flag != 0 => format!("multifd-compression={}", method.name),
            Self::Hotlift | Self::MappedRam => return Ok(()),
        };
        Err(OptionError::Conflict {
            option: asked,
            needs: "format hotlift: QEMU's mapped-ram file has its pages uncompressed",
        })
    }
}

/// What a save file of Hotlift's own format says of itself; its chunks are not looked at.
///
/// # Errors
/// [`FileError`] for a file that cannot be read, is of another format, or has a damaged header.
pub fn inspect(path: &Path) -> Result<FileInfo, FileError> {
    Ok(SavedChannels::open(path)?.info().clone())
}

/// A file that was opened and whose first bytes are good.
pub(crate) enum SavedVm {
    /// Of Hotlift's own format.
    Container(Arc<SavedChannels>),
    /// Of QEMU's.
    MappedRam(Box<MappedSource>),
}

impl SavedVm {
    /// Opens the file at `path`, whose content starts at byte `offset`.
    pub(crate) fn open(path: &Path, offset: u64) -> Result<Self, FileError> {
        let failed = |source| FileError::Read {
            path: path.to_owned(),
            source,
        };
        let mut first = [0; 8];
        let mut file = File::open(path).map_err(failed)?;
        match file.read_exact(&mut first) {
            Ok(()) => {}
            Err(error) if error.kind() == std::io::ErrorKind::UnexpectedEof => {
                return Err(FileError::NotASave);
            }
            Err(source) => return Err(failed(source)),
        }
        if offset == 0 && first == container::MAGIC {
            return Ok(Self::Container(Arc::new(SavedChannels::open(path)?)));
        }
        Ok(Self::MappedRam(Box::new(MappedSource::open(path, offset)?)))
    }
}

//! VMs in files: what a migration sends, kept, and played back later.
//!
//! | file | what it does |
//! |---|---|
//! | `container` | the save file's layout, as bytes and values |
//! | `write` | writes it, from all worker threads at once |
//! | `read` | reads it, checking every chunk |
//! | `mapped_sink` | writes QEMU's `mapped-ram` file |
//! | `mapped_source` | reads it |
//! | `partial` | a file that gets its name when it is whole |
//!
//! A save file is the record of a stream, and is played back to an ordinary incoming side through pairs of sockets, so
//! that restoring it is a migration like any other, with the same checks. A `mapped-ram` file has no order: it is
//! another kind of source. Either way the guest does not run before the whole file was read and found good.

mod container;
mod error;
mod mapped_sink;
mod mapped_source;
mod partial;
mod read;
#[cfg(test)]
mod tests;
mod write;

use std::fs::File;
use std::io::Read;
use std::net::Shutdown;
use std::os::unix::net::UnixStream;
use std::path::Path;
use std::thread;

pub use container::FileInfo;
pub use error::FileError;
pub(super) use mapped_sink::MappedRamSink;
pub(crate) use write::ContainerWriter;

use crate::error::{Channel, MigrationError};
use crate::options::{OptionError, Options};
use crate::threads::spawn;
use crate::transport::Stream;
use hotlift_wire::WireError;
pub(super) use mapped_source::MappedSource;
use read::ContainerReader;

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
    Ok(ContainerReader::open(path)?.info().clone())
}

/// Why playing a file ended early.
enum Stopped {
    /// The file is to blame.
    File(FileError),
    /// The relay has closed its connections, and knows why.
    Relay,
}

impl From<FileError> for Stopped {
    fn from(error: FileError) -> Self {
        Self::File(error)
    }
}

/// A file that was opened and whose first bytes are good.
pub(super) enum SavedVm {
    /// Of Hotlift's own format.
    Container(Box<ContainerReader>),
    /// Of QEMU's.
    MappedRam(Box<MappedSource>),
}

impl SavedVm {
    /// Opens the file at `path`, whose content starts at byte `offset`.
    pub(super) fn open(path: &Path, offset: u64) -> Result<Self, FileError> {
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
            return Ok(Self::Container(Box::new(ContainerReader::open(path)?)));
        }
        Ok(Self::MappedRam(Box::new(MappedSource::open(path, offset)?)))
    }
}

/// Plays a save file to `relay`, which gets the connections of a source.
pub(super) fn play<T>(
    mut reader: ContainerReader,
    relay: impl FnOnce(Vec<Stream>) -> Result<T, MigrationError>,
) -> Result<T, MigrationError> {
    let mut ours = Vec::new();
    let mut theirs = Vec::new();
    for _ in 0..=reader.info().channels {
        let (our_end, their_end) =
            UnixStream::pair().map_err(|source| MigrationError::Connection {
                channel: Channel::Main,
                doing: "opening the file",
                source,
            })?;
        ours.push(our_end);
        theirs.push(Stream::Unix(their_end));
    }
    thread::scope(|scope| {
        let playing = spawn(scope, "relay/file".to_owned(), move || {
            let played = reader.read_all(|channel, bytes| {
                let mut connection = &ours[usize::from(channel)];
                std::io::Write::write_all(&mut connection, bytes).map_err(|_| Stopped::Relay)
            });
            end(&ours, played.is_err());
            played
        })?;
        let relayed = relay(theirs);
        match playing.join()? {
            Err(Stopped::File(error)) => Err(error.into()),
            _ => relayed,
        }
    })
}

/// Ends the connections: at once, or when the relay has said its last word on main.
fn end(ours: &[UnixStream], at_once: bool) {
    if !at_once && let Some(mut main) = ours.first() {
        // Answers to a source; a file does not need them. A connection that broke has ended, too.
        let _ = main.shutdown(Shutdown::Write);
        let _ = std::io::copy(&mut main, &mut std::io::sink());
    }
    for connection in ours {
        let _ = connection.shutdown(Shutdown::Both);
    }
}

//! Writes a save file: chunks of all channels, from several threads.

use std::path::Path;
use std::sync::{Mutex, MutexGuard, PoisonError};

use super::FileError;
use super::container::{self, CHUNK_HEADER_LEN, CHUNK_MAX, Chunk, FileInfo, TRAILER_LEN, Totals};
use super::partial::PartialFile;

/// Space set aside for what is written after the source was told that its guest is safe: a VM
/// description, 100 KB to some MB, and the trailer.
const END: u64 = 4 << 20;

#[derive(Debug)]
pub(crate) struct ContainerWriter {
    file: PartialFile,
    state: Mutex<State>,
}

#[derive(Debug)]
struct State {
    /// Where the next chunk goes.
    position: u64,
    totals: Totals,
    /// A chunk could not be written, or the file is complete: nothing more is taken.
    closed: bool,
}

impl ContainerWriter {
    /// Begins the file that will be called `path`.
    pub(crate) fn create(path: &Path, info: &FileInfo) -> Result<Self, FileError> {
        let header = container::header(info)?;
        let file = PartialFile::create(path)?;
        file.write_at(&[&header], 0)?;
        Ok(Self {
            file,
            state: Mutex::new(State {
                position: header.len() as u64,
                totals: Totals::default(),
                closed: false,
            }),
        })
    }

    fn lock(&self) -> MutexGuard<'_, State> {
        self.state.lock().unwrap_or_else(PoisonError::into_inner)
    }

    /// Appends what `channel` (0 is main) sends in one go. Chunks of different threads follow each
    /// other as their calls do; only the place is taken under the lock, the bytes are written beside
    /// each other.
    pub(crate) fn append(
        &self,
        channel: u16,
        held_back: bool,
        parts: &[&[u8]],
    ) -> Result<(), FileError> {
        let length: usize = parts.iter().map(|part| part.len()).sum();
        if length > CHUNK_MAX {
            let pieces = parts.iter().flat_map(|part| part.chunks(CHUNK_MAX));
            return pieces
                .into_iter()
                .try_for_each(|piece| self.append(channel, held_back, &[piece]));
        }
        if length == 0 {
            return Ok(());
        }
        let mut crc = crc32fast::Hasher::new();
        parts.iter().for_each(|part| crc.update(part));
        let (position, header) = self.place(channel, held_back, length, crc.finalize())?;
        let written = self.file.write_at(&[&header], position).and_then(|()| {
            self.file
                .write_at(parts, position + CHUNK_HEADER_LEN as u64)
        });
        if written.is_err() {
            self.lock().closed = true;
        }
        written
    }

    /// The next chunk's place and header.
    fn place(
        &self,
        channel: u16,
        held_back: bool,
        length: usize,
        crc: u32,
    ) -> Result<(u64, [u8; CHUNK_HEADER_LEN]), FileError> {
        let mut state = self.lock();
        if state.closed {
            return Err(FileError::Closed);
        }
        let chunk = Chunk {
            channel,
            held_back,
            number: state.totals.chunks,
            length,
            crc,
        };
        let header = chunk.encode();
        let position = state.position;
        state.totals.add(&chunk, &header);
        state.position += (CHUNK_HEADER_LEN + length) as u64;
        Ok((position, header))
    }

    /// Returns when all chunks are on disk, and there is room for the end.
    pub(crate) fn sync(&self) -> Result<(), FileError> {
        let position = self.lock().position;
        self.file.reserve(position, END)?;
        self.file.sync()
    }

    /// Writes the trailer, and gives the file its name once it is on disk. No other call may be under
    /// way.
    pub(crate) fn finish(&self) -> Result<(), FileError> {
        let mut state = self.lock();
        if state.closed {
            return Err(FileError::Closed);
        }
        state.closed = true;
        let trailer = state.totals.trailer();
        self.file.write_at(&[&trailer], state.position)?;
        self.file.publish(state.position + TRAILER_LEN as u64)
    }

    /// Removes the file, unless it is finished; later calls fail.
    pub(crate) fn abort(&self) {
        self.lock().closed = true;
        self.file.give_up();
    }
}

//! Reads a save file, checking every chunk before it hands it on.

use std::fs::File;
use std::io::Read;
use std::path::{Path, PathBuf};

use super::FileError;
use super::container::{
    self, CHUNK_HEADER_LEN, CHUNK_MAX, Chunk, FileInfo, HEAD_LEN, Next, TRAILER_LEN, Totals,
    damaged,
};

/// Most bytes that are held back until the trailer was checked: EOF and the VM description.
const HELD_BACK_MAX: usize = 2 * hotlift_wire::limits::VM_DESCRIPTION;

#[derive(Debug)]
pub(crate) struct ContainerReader {
    file: File,
    path: PathBuf,
    info: FileInfo,
    /// Of the next byte to read.
    position: u64,
    totals: Totals,
    chunk: Vec<u8>,
}

impl ContainerReader {
    /// Opens the file and reads its header.
    pub(super) fn open(path: &Path) -> Result<Self, FileError> {
        let failed = |source| FileError::Read {
            path: path.to_owned(),
            source,
        };
        let mut reader = Self {
            file: File::open(path).map_err(failed)?,
            path: path.to_owned(),
            info: FileInfo::default(),
            position: 0,
            totals: Totals::default(),
            chunk: Vec::new(),
        };
        let mut head = [0; HEAD_LEN];
        reader.read_exact(&mut head)?;
        let mut rest = vec![0; container::info_len(&head)? + 4];
        reader.read_exact(&mut rest)?;
        reader.info = container::read_info(&head, &rest)?;
        Ok(reader)
    }

    pub(crate) fn info(&self) -> &FileInfo {
        &self.info
    }

    /// Hands every chunk on, in the file's order: its channel (0 is main) and its bytes. What is held
    /// back comes last, once the file has proved to be whole.
    pub(super) fn read_all<E: From<FileError>>(
        &mut self,
        mut each: impl FnMut(u16, &[u8]) -> Result<(), E>,
    ) -> Result<(), E> {
        let mut held_back: Vec<(u16, Vec<u8>)> = Vec::new();
        let mut held_bytes = 0;
        while let Some(chunk) = self.next_chunk()? {
            let bytes = &self.chunk[..chunk.length];
            if chunk.held_back {
                held_bytes += bytes.len();
                if held_bytes > HELD_BACK_MAX {
                    return Err(damaged("the end of the stream", self.position).into());
                }
                held_back.push((chunk.channel, bytes.to_vec()));
            } else if held_back.is_empty() {
                each(chunk.channel, bytes)?;
            } else {
                return Err(damaged("the order of the chunks", self.position).into());
            }
        }
        held_back
            .iter()
            .try_for_each(|(channel, bytes)| each(*channel, bytes))
    }

    /// Reads and checks the next chunk; `None` behind the trailer, which is the end of the file.
    fn next_chunk(&mut self) -> Result<Option<Chunk>, FileError> {
        let channels = 1 + u16::from(self.info.channels);
        let start = self.position;
        let mut header = [0; CHUNK_HEADER_LEN];
        self.read_exact(&mut header)?;
        let chunk = match container::next(&header, &self.totals, channels, start)? {
            Next::Chunk(chunk) => chunk,
            Next::Trailer => {
                let mut trailer = [0; TRAILER_LEN];
                trailer[..CHUNK_HEADER_LEN].copy_from_slice(&header);
                self.read_exact(&mut trailer[CHUNK_HEADER_LEN..])?;
                let length = self.file.metadata().map_err(|source| self.failed(source))?;
                if trailer != self.totals.trailer() || length.len() != self.position {
                    return Err(damaged("the trailer", start));
                }
                return Ok(None);
            }
        };
        if self.chunk.is_empty() {
            self.chunk = vec![0; CHUNK_MAX];
        }
        let mut bytes = std::mem::take(&mut self.chunk);
        let read = self.read_exact(&mut bytes[..chunk.length]);
        self.chunk = bytes;
        read?;
        if crc32fast::hash(&self.chunk[..chunk.length]) != chunk.crc {
            return Err(damaged("a chunk", start));
        }
        self.totals.add(&chunk, &header);
        Ok(Some(chunk))
    }

    fn read_exact(&mut self, into: &mut [u8]) -> Result<(), FileError> {
        match self.file.read_exact(into) {
            Ok(()) => {
                self.position += into.len() as u64;
                Ok(())
            }
            Err(error) if error.kind() == std::io::ErrorKind::UnexpectedEof => {
                Err(FileError::Truncated {
                    position: self.position,
                })
            }
            Err(source) => Err(self.failed(source)),
        }
    }

    fn failed(&self, source: std::io::Error) -> FileError {
        FileError::Read {
            path: self.path.clone(),
            source,
        }
    }
}

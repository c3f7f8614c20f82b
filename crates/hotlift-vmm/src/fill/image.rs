//! A fill from one file, page by page.

use std::fs::File;
use std::io;
use std::os::unix::fs::FileExt;
use std::path::{Path, PathBuf};

use hotlift_mem::{FileError, PAGE_SIZE, zero};

use super::FillError;
use super::corpus::{append, perturbation};
use crate::bytes::{to_u64, to_usize};

/// The pages of a file; the last one is padded with zeros.
pub(super) struct Image {
    path: PathBuf,
    bytes: Bytes,
    len: u64,
    seed: u64,
}

/// Read on demand: a memory image may be as large as the RAM. A compressed file can be unpacked from its start only.
enum Bytes {
    File(File),
    Unpacked(Vec<u8>),
}

impl Image {
    /// Opens the file `path`; at most `enough` bytes of it are used.
    pub fn open(path: &Path, enough: u64, seed: u64) -> Result<Self, FillError> {
        let failed = FileError::reading(path);
        let (bytes, len) = if path.extension().is_some_and(|extension| extension == "zst") {
            let mut bytes = Vec::new();
            append(path, enough, &mut bytes).map_err(failed)?;
            let len = to_u64(bytes.len());
            (Bytes::Unpacked(bytes), len)
        } else {
            let file = File::open(path).map_err(failed)?;
            let metadata = file.metadata().map_err(failed)?;
            if !metadata.is_file() {
                let problem = io::Error::other("neither a folder nor a regular file");
                return Err(failed(problem).into());
            }
            (Bytes::File(file), metadata.len())
        };
        if len == 0 {
            return Err(FillError::Empty {
                path: path.to_owned(),
            });
        }
        Ok(Self {
            path: path.to_owned(),
            bytes,
            len,
            seed,
        })
    }

    /// Returns the pages of the whole file; of a compressed one, the needed pages.
    pub fn pages(&self) -> u64 {
        self.len.div_ceil(to_u64(PAGE_SIZE))
    }

    /// Writes page `number`: of repetition `number / pages` of the file. A zero page is zero in all repetitions.
    pub fn page(&self, number: u64, page: &mut [u8; PAGE_SIZE]) -> Result<(), FillError> {
        let pages = self.pages();
        let (start, constant) = perturbation(number / pages, self.seed, pages);
        let at = (start + number % pages) % pages * to_u64(PAGE_SIZE);
        let filled = to_usize((self.len - at).min(to_u64(PAGE_SIZE)));
        page[filled..].fill(0);
        match &self.bytes {
            Bytes::Unpacked(bytes) => {
                page[..filled].copy_from_slice(&bytes[to_usize(at)..to_usize(at) + filled]);
            }
            Bytes::File(file) => {
                let read = file.read_exact_at(&mut page[..filled], at);
                read.map_err(FileError::reading(&self.path))?;
            }
        }
        if constant != 0 && !zero::is_zero(page) {
            page.iter_mut().for_each(|byte| *byte ^= constant);
        }
        Ok(())
    }
}

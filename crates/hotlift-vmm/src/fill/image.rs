//! Fills RAM with the pages of one file, in their order.

use std::fs::File;
use std::io;
use std::os::unix::fs::FileExt;
use std::path::{Path, PathBuf};

use hotlift_mem::{FileError, PAGE_SIZE, zero};

use super::FillError;
use super::corpus::{append, perturbation};
use crate::bytes::{to_u64, to_usize};

/// The pages of a file; the last page is padded with zeros.
pub(super) struct Image {
    path: PathBuf,
    bytes: Bytes,
    len: u64,
    seed: u64,
}

/// Content of the file. A plain file is read on demand, because it may be as large as RAM. A compressed file is
/// unpacked at once, because it can be unpacked from its start only.
enum Bytes {
    File(File),
    Unpacked(Vec<u8>),
}

impl Image {
    /// Opens the file `path`, of which at most `enough` bytes are used.
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

    /// Returns the number of pages in the file. For a compressed file, only the unpacked pages count.
    pub fn pages(&self) -> u64 {
        self.len.div_ceil(to_u64(PAGE_SIZE))
    }

    /// Writes page `number` of the endlessly repeated file to `page`. A zero page stays zero in all repetitions.
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

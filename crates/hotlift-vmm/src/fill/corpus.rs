//! Fills RAM with the bytes of files.

use std::fs::{self, File};
use std::io::{self, Read};
use std::path::{Path, PathBuf};

use hotlift_mem::{FileError, PAGE_SIZE};

use super::FillError;
use crate::bytes::{low_u8, to_u64, to_usize};
use crate::workload::nth;

/// The bytes of all files of a folder, up to the number that RAM needs.
pub(super) struct Corpus {
    bytes: Vec<u8>,
    seed: u64,
}

impl Corpus {
    /// Reads the files under `folder`, or the file `folder`, until `enough` bytes are read.
    pub fn read(folder: &Path, enough: u64, seed: u64) -> Result<Self, FillError> {
        let mut files = Vec::new();
        match folder.is_file() {
            true => files.push(folder.to_owned()),
            false => list(folder, &mut files)?,
        }
        let mut bytes = Vec::new();
        for path in files {
            let left = enough.saturating_sub(to_u64(bytes.len()));
            if left == 0 {
                break;
            }
            append(&path, left, &mut bytes).map_err(FileError::reading(&path))?;
        }
        if bytes.is_empty() {
            return Err(FillError::Empty {
                path: folder.to_owned(),
            });
        }
        Ok(Self { bytes, seed })
    }

    /// Returns the number of pages read from all files.
    pub fn pages(&self) -> u64 {
        to_u64(self.bytes.len().div_ceil(PAGE_SIZE))
    }

    /// Writes page `number` of the endlessly repeated files to `page`. The page is in repetition `number / pages`.
    pub fn page(&self, number: u64, page: &mut [u8; PAGE_SIZE]) {
        let len = self.bytes.len();
        let pages = self.pages();
        let (repetition, number) = (number / pages, to_usize(number % pages));
        let (start, constant) = perturbation(repetition, self.seed, to_u64(len));
        let start = to_usize(start);
        let mut at = (start + number * PAGE_SIZE) % len;
        let mut filled = 0;
        while filled < PAGE_SIZE {
            let run = (PAGE_SIZE - filled).min(len - at);
            page[filled..filled + run].copy_from_slice(&self.bytes[at..at + run]);
            filled += run;
            at = (at + run) % len;
        }
        if constant != 0 {
            page.iter_mut().for_each(|byte| *byte ^= constant);
        }
    }
}

/// Returns start offset and XOR constant of repetition `repetition`, for a source of `len` bytes or pages. Repetition 0
/// is the source itself; the next 255 have different constants. XOR with a constant keeps all matches and frequencies,
/// so the data stays as compressible.
pub(super) fn perturbation(repetition: u64, seed: u64, len: u64) -> (u64, u8) {
    if repetition == 0 {
        return (0, 0);
    }
    let start = nth(seed, repetition) % len;
    // 83 is coprime to 255, so every constant occurs once in 255 repetitions.
    (start, low_u8((repetition * 83) % 255 + 1))
}

/// Adds the regular files under `folder` to `files`, sorted by path. Does not follow symbolic links.
fn list(folder: &Path, files: &mut Vec<PathBuf>) -> Result<(), FillError> {
    let failed = FileError::reading(folder);
    let mut entries = fs::read_dir(folder)
        .and_then(Iterator::collect::<io::Result<Vec<_>>>)
        .map_err(failed)?;
    entries.sort_by_key(fs::DirEntry::file_name);
    for entry in entries {
        let kind = entry.file_type().map_err(failed)?;
        if kind.is_dir() {
            list(&entry.path(), files)?;
        } else if kind.is_file() {
            files.push(entry.path());
        }
    }
    Ok(())
}

pub(super) fn append(path: &Path, most: u64, bytes: &mut Vec<u8>) -> io::Result<()> {
    let file = File::open(path)?;
    if path.extension().is_some_and(|extension| extension == "zst") {
        zstd::Decoder::new(file)?.take(most).read_to_end(bytes)?;
    } else {
        file.take(most).read_to_end(bytes)?;
    }
    Ok(())
}

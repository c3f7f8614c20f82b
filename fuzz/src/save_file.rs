//! Fuzz target for Hotlift's save file.

use std::fs::File;
use std::os::fd::AsRawFd;
use std::os::unix::fs::FileExt;
use std::path::PathBuf;

use hotlift::Control;
use hotlift::file::describe;
use rustix::fs::{MemfdFlags, memfd_create};

use crate::memory::bounded;

/// Allocation limit in bytes: parts of a file, one block, the block's decoder, and a reserve.
const MEMORY: usize = 16 << 20;

/// Reads a save file with the input as content, up to its last page. If the first byte is odd, the checksums of header
/// and foot are corrected first, because a fuzzer rarely finds a valid checksum.
pub fn read(data: &[u8]) {
    let Some((&[first], data)) = data.split_first_chunk() else {
        return;
    };
    let mut bytes = data.to_vec();
    if first % 2 == 1 {
        mend(&mut bytes);
    }
    let file: File = memfd_create("save", MemfdFlags::CLOEXEC)
        .expect("a file")
        .into();
    file.write_all_at(&bytes, 0).expect("write the file");
    let path = PathBuf::from(format!("/proc/self/fd/{}", file.as_raw_fd()));
    bounded(MEMORY, || {
        if let Ok(file) = describe(&path, true, &Control::new()) {
            assert_eq!(file.file_bytes, bytes.len() as u64);
        }
    });
}

/// Corrects the checksums in the header and the foot of a save file. Returns `None` if the file is too short for them.
/// The seeds of the corpus have correct checksums in all other parts.
fn mend(bytes: &mut [u8]) -> Option<()> {
    let be32 = |bytes: &[u8], at: usize| {
        let word = bytes.get(at..at + 4)?.try_into().ok()?;
        usize::try_from(u32::from_be_bytes(word)).ok()
    };
    let end = 16 + be32(bytes, 12)?.min(bytes.len());
    let seed = crc32fast::hash(bytes.get(..end)?);
    bytes
        .get_mut(end..end + 4)?
        .copy_from_slice(&seed.to_be_bytes());
    let foot = bytes.len().checked_sub(16)?;
    let start = foot.checked_sub(be32(bytes, foot)?)?;
    let mut crc = crc32fast::Hasher::new_with_initial(seed);
    crc.update(bytes.get(start..foot)?);
    bytes
        .get_mut(foot + 4..foot + 8)?
        .copy_from_slice(&crc.finalize().to_be_bytes());
    Some(())
}

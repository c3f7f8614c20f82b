//! Hotlift's save file. Its reader is not public, so its sources are taken in here.

#[path = "../../crates/hotlift/src/ends/file/channels.rs"]
#[allow(dead_code, reason = "pages are the engine's")]
mod channels;
#[path = "../../crates/hotlift/src/ends/file/container.rs"]
#[allow(dead_code, reason = "the writer's half is for the engine")]
mod container;
#[path = "../../crates/hotlift/src/ends/file/error.rs"]
#[allow(dead_code, reason = "most errors are the engine's")]
mod error;

use std::fs::File;
use std::os::fd::AsRawFd;
use std::os::unix::fs::FileExt;
use std::path::PathBuf;
use std::sync::Arc;
use std::time::Duration;

use channels::SavedChannels;
pub use error::FileError;
use rustix::fs::{MemfdFlags, memfd_create};

use crate::memory::bounded;

/// The reader's chunk, what it holds back, and some.
const MEMORY: usize = 8 << 20;

/// Reads a file that holds the input; with every checksum mended if the first byte is odd, since a
/// fuzzer does not find any.
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
        let Ok(saved) = SavedChannels::open(&path).map(Arc::new) else {
            return;
        };
        let mut handed_on = 0;
        let mut buffer = [0; 4 << 10];
        // Main last: its end comes when all others were good.
        for number in (1..=u16::from(saved.info().channels)).chain([0]) {
            let channel = saved.channel(number);
            while let Ok(true) = channel.wait_readable(Duration::ZERO) {
                match channel.read_some(&mut buffer) {
                    Ok(read @ 1..) => handed_on += read,
                    _ => break,
                }
            }
        }
        assert!(handed_on <= bytes.len(), "more than there is");
        if saved.take_error().is_none() {
            assert!(first % 2 == 1 || handed_on < bytes.len());
        }
    });
}

/// Puts the right checksums into a file as far as it can be read.
fn mend(bytes: &mut [u8]) -> Option<()> {
    let be32 = |bytes: &[u8], at: usize| {
        let word = bytes.get(at..at + 4)?.try_into().ok()?;
        usize::try_from(u32::from_be_bytes(word)).ok()
    };
    let seal = |bytes: &mut [u8], from: usize, to: usize| {
        let crc = crc32fast::hash(bytes.get(from..to)?).to_be_bytes();
        bytes.get_mut(to..to + 4)?.copy_from_slice(&crc);
        Some(())
    };
    let mut at = container::HEAD_LEN + be32(bytes, 12)?.min(bytes.len());
    seal(bytes, 0, at)?;
    at += 4;
    let mut headers = crc32fast::Hasher::new();
    loop {
        let header = container::CHUNK_HEADER_LEN;
        if bytes.get(at..at + 4)? == b"HLen" {
            let sum = headers.finalize().to_be_bytes();
            bytes.get_mut(at + 24..at + 28)?.copy_from_slice(&sum);
            return seal(bytes, at, at + 28);
        }
        let length = be32(bytes, at + 16)?;
        let content = bytes.get(at + header..)?;
        let content = content.get(..length).unwrap_or(content);
        let crc = crc32fast::hash(content).to_be_bytes();
        bytes.get_mut(at + 20..at + 24)?.copy_from_slice(&crc);
        seal(bytes, at, at + header - 4)?;
        headers.update(&bytes[at..at + header]);
        at = at.checked_add(header + length)?;
    }
}

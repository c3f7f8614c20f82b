//! Memory that can be sampled: of a process, or of an image.

use std::fs::{self, File};
use std::io::{self, ErrorKind};
use std::os::unix::fs::FileExt;
use std::path::{Path, PathBuf};

use hotlift_mem::{FileError, PAGE_SIZE};
use rustix::io::Errno;

use super::error::HostError;
use super::sample::{Memory, PACKET, PACKET_PAGES, Untouched};

/// Divisor of the largest mapping's size: smaller mappings are no RAM, but heaps, stacks or buffers.
const RAM_SHARE: u64 = 4;

/// A writable memory mapping of a process.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
struct Mapping {
    start: u64,
    len: u64,
    /// True for private memory without a file: an empty page table entry then means a zero page.
    anonymous: bool,
}

/// Memory of a process: its largest mappings.
pub struct Process {
    pid: u32,
    name: String,
    mem: File,
    /// Page table entries of the process; `None` if they cannot be read. Then all pages are read.
    pagemap: Option<File>,
    mappings: Vec<Mapping>,
}

impl Process {
    /// Opens the memory of the process `pid`. If a mapping has exactly `ram_bytes`, takes only this one: other large mappings
    /// are not RAM, such as the translated code of a QEMU without KVM. Otherwise takes the largest mappings.
    pub fn open(pid: u32, ram_bytes: Option<u64>) -> Result<Self, HostError> {
        let folder = PathBuf::from(format!("/proc/{pid}"));
        let failed = |file: &str, source: io::Error| match source.kind() {
            ErrorKind::NotFound => HostError::NoProcess { pid },
            ErrorKind::PermissionDenied => HostError::NotAllowed { pid },
            _ => HostError::Process {
                pid,
                path: folder.join(file),
                source,
            },
        };
        let maps =
            fs::read_to_string(folder.join("maps")).map_err(|error| failed("maps", error))?;
        let ram = maps.lines().filter_map(mapping);
        let ram = ram
            .filter(|mapping| Some(mapping.len) == ram_bytes)
            .max_by_key(|mapping| mapping.start);
        let mappings = ram.map_or_else(|| largest(&maps), |ram| vec![ram]);
        if mappings.is_empty() {
            return Err(HostError::NoMemory { pid });
        }
        let mem = File::open(folder.join("mem")).map_err(|error| failed("mem", error))?;
        let command = name_of(pid).unwrap_or_default();
        let count = match mappings.len() {
            1 => "its largest mapping".to_owned(),
            more => format!("its {more} largest mappings"),
        };
        Ok(Self {
            pid,
            name: format!("process {pid} ({command}), {count}"),
            mem,
            pagemap: File::open(folder.join("pagemap")).ok(),
            mappings,
        })
    }

    /// Returns the mapping that contains the packet with this number, and the packet's offset in this mapping, in bytes. `None`
    /// if the number is too large.
    fn find(&self, packet: u64) -> Option<(Mapping, u64)> {
        let mut packet = packet;
        for mapping in &self.mappings {
            let packets = mapping.len.div_ceil(PACKET as u64);
            if packet < packets {
                return Some((*mapping, packet * PACKET as u64));
            }
            packet -= packets;
        }
        None
    }

    /// Returns one flag for each page: true if the process never touched the page.
    fn untouched(&self, mapping: Mapping, start: u64, pages: usize) -> Untouched {
        /// Linux sets this bit also on empty entries of new mappings, so the bit shows nothing.
        const SOFT_DIRTY: u64 = 1 << 55;
        let mut untouched = [false; PACKET_PAGES];
        let mut entries = [0; PACKET_PAGES * 8];
        let page = start / PAGE_SIZE as u64;
        if let Some(pagemap) = &self.pagemap
            && mapping.anonymous
            && pagemap
                .read_exact_at(&mut entries[..pages * 8], page * 8)
                .is_ok()
        {
            for (untouched, entry) in untouched[..pages].iter_mut().zip(entries.as_chunks().0) {
                *untouched = u64::from_ne_bytes(*entry) & !SOFT_DIRTY == 0;
            }
        }
        untouched
    }
}

impl Memory for Process {
    fn name(&self) -> &str {
        &self.name
    }

    fn bytes(&self) -> u64 {
        self.mappings.iter().map(|mapping| mapping.len).sum()
    }

    fn read(&self, packet: u64, to: &mut Vec<u8>) -> Result<Option<Untouched>, HostError> {
        let Some((mapping, offset)) = self.find(packet) else {
            return Ok(None);
        };
        let start = mapping.start + offset;
        let len = usize::try_from((mapping.len - offset).min(PACKET as u64)).unwrap_or(PACKET);
        let pages = len / PAGE_SIZE;
        let untouched = self.untouched(mapping, start, pages);
        to.resize(len, 0);
        for (page, bytes) in to.chunks_mut(PAGE_SIZE).enumerate() {
            if untouched[page] {
                continue;
            }
            let at = start + (page * PAGE_SIZE) as u64;
            match self.mem.read_exact_at(bytes, at) {
                Ok(()) => {}
                // The process has ended, or has unmapped this memory in the meantime.
                Err(error)
                    if error.kind() == ErrorKind::UnexpectedEof
                        || error.raw_os_error() == Some(Errno::IO.raw_os_error()) =>
                {
                    return Ok(None);
                }
                Err(source) if source.kind() == ErrorKind::PermissionDenied => {
                    return Err(HostError::NotAllowed { pid: self.pid });
                }
                Err(source) => {
                    return Err(HostError::Process {
                        pid: self.pid,
                        path: format!("/proc/{}/mem", self.pid).into(),
                        source,
                    });
                }
            }
        }
        Ok(Some(untouched))
    }
}

/// Returns the name of a process; `None` if the process does not exist.
pub fn name_of(pid: u32) -> Option<String> {
    let name = fs::read_to_string(format!("/proc/{pid}/comm")).ok()?;
    Some(name.trim_end().to_owned())
}

/// Returns the largest writable mapping in `maps` (`/proc/PID/maps`), and other mappings of at least a quarter of its size.
fn largest(maps: &str) -> Vec<Mapping> {
    let mut mappings: Vec<Mapping> = maps.lines().filter_map(mapping).collect();
    let most = mappings
        .iter()
        .map(|mapping| mapping.len)
        .max()
        .unwrap_or(0);
    mappings.retain(|mapping| mapping.len >= most.div_ceil(RAM_SHARE));
    mappings
}

/// Parses a line of `maps`: `start-end rw-p offset device inode  path`; `None` if it is not writable memory.
fn mapping(line: &str) -> Option<Mapping> {
    let mut words = line.split_ascii_whitespace();
    let (start, end) = words.next()?.split_once('-')?;
    let mode = words.next()?;
    let inode = words.nth(2)?;
    let start = u64::from_str_radix(start, 16).ok()?;
    let len = u64::from_str_radix(end, 16).ok()?.checked_sub(start)?;
    (mode.starts_with("rw") && len > 0).then_some(Mapping {
        start,
        len,
        anonymous: mode.ends_with('p') && inode == "0",
    })
}

/// A file with the content of memory, page by page.
pub struct Image {
    path: PathBuf,
    name: String,
    file: File,
    len: u64,
}

impl Image {
    /// Opens an image; an error if it has no complete page.
    pub fn open(path: &Path) -> Result<Self, HostError> {
        let failed = FileError::reading(path);
        let file = File::open(path).map_err(failed)?;
        let page = PAGE_SIZE as u64;
        let len = file.metadata().map_err(failed)?.len() / page * page;
        if len == 0 {
            return Err(HostError::Empty {
                path: path.to_owned(),
            });
        }
        Ok(Self {
            path: path.to_owned(),
            name: format!("file {}", path.display()),
            file,
            len,
        })
    }
}

impl Memory for Image {
    fn name(&self) -> &str {
        &self.name
    }

    fn bytes(&self) -> u64 {
        self.len
    }

    fn read(&self, packet: u64, to: &mut Vec<u8>) -> Result<Option<Untouched>, HostError> {
        let at = packet * PACKET as u64;
        let len = usize::try_from((self.len - at).min(PACKET as u64)).unwrap_or(PACKET);
        to.resize(len, 0);
        self.file
            .read_exact_at(to, at)
            .map_err(FileError::reading(&self.path))?;
        Ok(Some([false; PACKET_PAGES]))
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn ram_is_the_largest_writable_mapping_and_those_of_similar_size() {
        let maps = "\
55d0c0000000-55d0c0100000 r-xp 00000000 fe:00 1234   /usr/bin/qemu
55d0c1000000-55d0c1100000 rw-p 00000000 00:00 0      [heap]
7f0000000000-7f0080000000 rw-p 00000000 00:00 0
7f0100000000-7f0140000000 rw-s 00000000 00:01 42     /memfd:pc.ram (deleted)
7f0200000000-7f0400000000 ---p 00000000 00:00 0
not a line
7ffc00000000-7ffc00021000 rw-p 00000000 00:00 0      [stack]
";
        let mappings = largest(maps);
        let lens: Vec<_> = mappings.iter().map(|m| (m.len, m.anonymous)).collect();
        assert_eq!(lens, [(2 << 30, true), (1 << 30, false)]);
        assert_eq!(largest(""), []);
    }
}

//! Reads the files of a folder into memory, on which methods are measured.

use std::path::Path;

use hotlift_host::error::HostError;
use hotlift_host::sample::{Memory, PACKET, PACKET_PAGES, Untouched};
use hotlift_mem::{Backing, PAGE_SIZE, RamBlock};
use hotlift_vmm::fill::{FillSettings, FillSource, fill};
use hotlift_vmm::layout::Layout;

/// Memory filled with the files of a folder, as the RAM of a built-in guest is filled.
pub struct Folder {
    name: String,
    ram: RamBlock,
    filled: std::ops::Range<u64>,
}

impl Folder {
    /// Fills `bytes` of memory with the files in the folder `path`.
    pub fn read(path: &Path, bytes: u64, seed: u64) -> Result<Self, HostError> {
        /// Size of additional data that the layout of a built-in guest needs, in bytes.
        const OVERHEAD: u64 = 8 << 20;
        let packet = PACKET as u64;
        let bytes = bytes.div_ceil(packet) * packet + OVERHEAD;
        let layout = Layout::new(bytes, 1, Some(PAGE_SIZE as u64));
        let layout = layout.map_err(|error| HostError::Folder(error.into()))?;
        let len = usize::try_from(layout.ram_bytes()).unwrap_or(usize::MAX);
        let ram = RamBlock::new("sample", len, Backing::Private)?;
        let settings = FillSettings {
            source: FillSource::Folder(path.to_owned()),
            seed,
            ..FillSettings::default()
        };
        fill(&ram, &layout, &settings).map_err(|error| HostError::Folder(error.into()))?;
        Ok(Self {
            name: format!("folder {}", path.display()),
            ram,
            filled: layout.filled(),
        })
    }
}

impl Memory for Folder {
    fn name(&self) -> &str {
        &self.name
    }

    fn bytes(&self) -> u64 {
        self.filled.end - self.filled.start
    }

    fn read(&self, packet: u64, to: &mut Vec<u8>) -> Result<Option<Untouched>, HostError> {
        let at = self.filled.start + packet * PACKET as u64;
        let len = usize::try_from((self.filled.end - at).min(PACKET as u64)).unwrap_or(PACKET);
        to.resize(len, 0);
        self.ram
            .read(usize::try_from(at).unwrap_or(usize::MAX), to)?;
        Ok(Some([false; PACKET_PAGES]))
    }
}

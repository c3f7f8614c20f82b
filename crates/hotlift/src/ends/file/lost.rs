//! Pages lost in a damaged file. If the operator allows it, a restore replaces them with zero pages.

use std::collections::BTreeMap;
use std::fmt;
use std::sync::Mutex;

use hotlift_mem::PAGE_SIZE;
use serde::{Deserialize, Serialize};

use crate::error::MigrationError;
use crate::lock::lock;

/// Pages whose content is lost with one part of a file.
#[derive(Debug, Clone, Default, PartialEq, Eq, Serialize, Deserialize)]
pub struct LostPages {
    /// Description of the damage.
    pub reason: String,
    /// File position of the part.
    pub position: u64,
    /// Name of the RAM block.
    pub block: String,
    /// Byte offsets of the pages in the RAM block.
    pub offsets: Vec<u64>,
}

impl fmt::Display for LostPages {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        let (count, block, position) = (self.offsets.len(), &self.block, self.position);
        write!(f, "{count} pages of {block} are zero, at")?;
        let page = PAGE_SIZE as u64;
        for (number, run) in self.offsets.chunk_by(|a, b| a + page == *b).enumerate() {
            let comma = if number == 0 { "" } else { "," };
            write!(f, "{comma} {:#x}", run[0])?;
            if let [_, .., last] = run {
                write!(f, " to {last:#x}")?;
            }
        }
        write!(f, ": byte {position} of the file: {}", self.reason)
    }
}

/// Lost pages, by the file position of the damaged part.
#[derive(Debug, Default)]
pub(crate) struct Lost(Mutex<BTreeMap<u64, LostPages>>);

impl Lost {
    /// Records the result of `lost` for the damaged part at file position `position`, and returns it. Returns `None` if this
    /// part is already recorded.
    pub(super) fn keep(
        &self,
        position: u64,
        lost: impl FnOnce() -> LostPages,
    ) -> Option<LostPages> {
        let mut known = lock(&self.0);
        if known.contains_key(&position) {
            return None;
        }
        let lost = lost();
        known.insert(position, lost.clone());
        Some(lost)
    }

    /// Returns all lost pages.
    pub(crate) fn all(&self) -> Vec<LostPages> {
        lock(&self.0).values().cloned().collect()
    }
}

/// Returns true if an error affects only a part of a file, and other parts are still readable.
pub(crate) fn is_of_a_part(error: &MigrationError) -> bool {
    match error {
        MigrationError::File(error) => !error.is_final(),
        MigrationError::Method { .. } => true,
        _ => false,
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn every_page_that_is_lost_is_named() {
        let lost = LostPages {
            reason: "damaged".to_owned(),
            position: 77,
            block: "pc.ram".to_owned(),
            offsets: vec![0x1000, 0x2000, 0x3000, 0x5000],
        };
        assert_eq!(
            lost.to_string(),
            "4 pages of pc.ram are zero, at 0x1000 to 0x3000, 0x5000: byte 77 of the file: damaged"
        );
    }
}

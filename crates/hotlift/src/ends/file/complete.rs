//! Which pages of a stream have come, so that no file is taken for whole that lacks some.

use hotlift_methods::MemoryLimit;
use hotlift_wire::RamBlockEntry;

use super::FileError;
use crate::ends::page_set::PageSet;
use crate::ends::settings::LeftOut;
use crate::error::MigrationError;
use crate::pipe::batch::Batch;

/// Pages that have come so far, as content or as zero.
pub(super) struct Complete {
    blocks: Vec<Block>,
}

struct Block {
    name: String,
    length: u64,
    came: PageSet,
}

impl Complete {
    /// No pages of these RAM blocks. Those that come take their memory from `memory`: a bit each.
    pub fn new(blocks: &[RamBlockEntry], memory: &MemoryLimit) -> Self {
        let blocks = blocks.iter().map(|block| Block {
            name: block.name.clone(),
            length: block.used_length,
            came: PageSet::new(block.used_length, memory),
        });
        Self {
            blocks: blocks.collect(),
        }
    }

    /// Notes the pages of a batch.
    ///
    /// # Errors
    /// If there is no memory for it.
    pub fn note(&self, batch: &Batch) -> Result<(), MigrationError> {
        let came = &self.blocks[batch.block].came;
        for offset in batch.normal.iter().chain(&batch.zero) {
            came.insert(*offset)?;
        }
        Ok(())
    }

    /// Checks that every page has come, but for those that the source leaves out.
    ///
    /// # Errors
    /// [`FileError::Incomplete`] with the first RAM block that lacks pages.
    pub fn check(&self, left_out: &[LeftOut]) -> Result<(), FileError> {
        for block in &self.blocks {
            let (missing, first) = block.came.missing(block.length);
            let may_lack = |left_out: &LeftOut| match left_out {
                LeftOut::Unplugged { block: name, bytes } => {
                    let is_this = block.name == *name || block.name.ends_with(&format!("/{name}"));
                    is_this && missing <= *bytes
                }
                // A block of which nothing came is more than the guest's free pages.
                LeftOut::Free => missing < block.length,
            };
            if let Some(offset) = first
                && !left_out.iter().any(may_lack)
            {
                return Err(FileError::Incomplete {
                    block: block.name.clone(),
                    missing,
                    offset,
                });
            }
        }
        Ok(())
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    const PAGE: u64 = 4096;

    /// Checks two blocks of 8 pages each, of which these pages of the second came.
    fn check(pages: &[u64], left_out: &[LeftOut]) -> Option<String> {
        let blocks = ["pc.ram", "/objects/mem0"].map(|name| RamBlockEntry::new(name, 8 * PAGE));
        let complete = Complete::new(&blocks, &MemoryLimit::new(1 << 20));
        let mut batch = Batch::new();
        batch.start(0);
        batch.zero.extend((0..8).map(|page| page * PAGE));
        complete.note(&batch).unwrap();
        batch.start(1);
        for page in pages {
            match page % 2 {
                0 => batch.push(page * PAGE, &[1; 4096]),
                _ => batch.zero.push(page * PAGE),
            }
        }
        complete.note(&batch).unwrap();
        complete
            .check(left_out)
            .err()
            .map(|error| error.to_string())
    }

    fn unplugged(block: &str, pages: u64) -> LeftOut {
        LeftOut::Unplugged {
            block: block.to_owned(),
            bytes: pages * PAGE,
        }
    }

    #[test]
    fn every_page_must_come_as_content_or_as_zero() {
        assert_eq!(check(&[0, 1, 2, 3, 4, 5, 6, 7], &[]), None);
        let lacks = check(&[0, 1, 2, 4, 5, 7], &[]).unwrap();
        let place = format!("byte {}", 3 * PAGE);
        assert!(
            lacks.contains("/objects/mem0") && lacks.contains(&place),
            "{lacks}"
        );
        assert!(check(&[], &[]).is_some());
    }

    #[test]
    fn what_a_device_reports_as_unplugged_or_free_may_be_left_out() {
        let half = [0, 1, 2, 3];
        assert_eq!(check(&half, &[unplugged("mem0", 4)]), None);
        assert!(
            check(&half, &[unplugged("mem0", 3)]).is_some(),
            "more is missing"
        );
        assert!(
            check(&half, &[unplugged("em0", 4)]).is_some(),
            "another block"
        );
        assert_eq!(check(&half, &[LeftOut::Free]), None);
        assert!(check(&[], &[LeftOut::Free]).is_some(), "the whole block");
        assert_eq!(check(&[], &[unplugged("mem0", 8)]), None);
    }
}

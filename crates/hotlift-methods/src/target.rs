//! Guest memory that a payload is decoded into; adjacent pages are joined.

use hotlift_mem::GuestRun;

/// Guest memory for the pages of one packet.
#[derive(Clone, Copy)]
pub(crate) struct Target<'a> {
    runs: &'a [GuestRun<'a>],
    bytes: usize,
}

/// Guest bytes at consecutive addresses.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub(crate) struct Extent {
    /// Address of the first byte.
    pub(crate) ptr: *mut u8,
    /// Number of bytes, never 0.
    pub(crate) len: usize,
}

impl<'a> Target<'a> {
    /// Returns a target of the bytes of `runs`, in their order.
    pub(crate) fn new(runs: &'a [GuestRun<'a>]) -> Self {
        let bytes = runs.iter().map(GuestRun::len).sum();
        Self { runs, bytes }
    }

    /// Returns the size of all runs.
    pub(crate) fn bytes(&self) -> usize {
        self.bytes
    }

    /// Returns all runs as one extent; `None` if they are not adjacent in memory.
    pub(crate) fn contiguous(&self) -> Option<Extent> {
        let mut extents = self.extents();
        let first = extents.next()?;
        (first.len == self.bytes).then_some(first)
    }

    /// Returns the runs with adjacent ones joined, each byte once.
    ///
    /// All runs of a packet are borrowed from one RAM block, which is one mapping. So an address derived from the first run of
    /// an extent is valid for the whole extent.
    pub(crate) fn extents(&self) -> impl Iterator<Item = Extent> + use<'a> {
        let mut runs = self.runs.iter().filter(|run| !run.is_empty()).peekable();
        std::iter::from_fn(move || {
            let first = runs.next()?;
            let mut extent = Extent {
                ptr: first.as_ptr(),
                len: first.len(),
            };
            while let Some(run) =
                runs.next_if(|run| run.as_ptr() == extent.ptr.wrapping_add(extent.len))
            {
                extent.len += run.len();
            }
            Some(extent)
        })
    }

    /// Copies `bytes` into the runs.
    ///
    /// # Panics
    ///
    /// If there are fewer bytes than the runs hold.
    pub(crate) fn scatter(&self, mut bytes: &[u8]) {
        for run in self.runs {
            let (head, rest) = bytes.split_at(run.len());
            run.copy_from(head);
            bytes = rest;
        }
    }

    /// Copies `bytes` into the runs. `offset` counts bytes from the start of the first run.
    ///
    /// # Panics
    ///
    /// If `bytes` reaches beyond the end of the runs.
    pub(crate) fn write_at(&self, mut offset: usize, mut bytes: &[u8]) {
        for run in self.runs {
            let n = run.len().saturating_sub(offset).min(bytes.len());
            if n > 0 {
                let (head, rest) = bytes.split_at(n);
                run.split_at(offset).1.split_at(n).0.copy_from(head);
                bytes = rest;
            }
            offset = offset.saturating_sub(run.len());
        }
        assert!(bytes.is_empty(), "bytes beyond the runs");
    }

    /// Fills `end` with the last bytes of the runs.
    ///
    /// # Panics
    ///
    /// If the runs hold fewer bytes than `end`.
    pub(crate) fn copy_end(&self, end: &mut [u8]) {
        let mut to = end;
        for run in self.runs.iter().rev() {
            let n = run.len().min(to.len());
            let (rest, tail) = to.split_at_mut(to.len() - n);
            run.split_at(run.len() - n).1.copy_to(tail);
            to = rest;
        }
        assert!(to.is_empty(), "end of fewer bytes than asked for");
    }
}

#[cfg(test)]
mod tests {
    use super::*;
    use hotlift_mem::{Backing, RamBlock};

    #[test]
    fn neighbours_are_joined_and_order_is_kept() {
        let block = RamBlock::new("ram", 8 * 4096, Backing::Private).expect("RAM block");
        let run = |page: usize| block.run(page * 4096, 4096).expect("run");
        let runs = [run(2), run(3), run(1), run(4), run(5), run(5)];
        let target = Target::new(&runs);
        let base = block.host_addr();
        let at = |page: usize, pages: usize| Extent {
            ptr: base.wrapping_add(page * 4096),
            len: pages * 4096,
        };
        let got: Vec<Extent> = target.extents().collect();
        assert_eq!(got, [at(2, 2), at(1, 1), at(4, 2), at(5, 1)]);
        assert_eq!(target.contiguous(), None);
        assert_eq!(Target::new(&runs[..2]).contiguous(), Some(at(2, 2)));
        assert_eq!(Target::new(&[]).contiguous(), None);
    }
}

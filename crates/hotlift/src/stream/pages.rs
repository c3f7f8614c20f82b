//! Content of a packet's pages: guest memory, or a copy.

use hotlift_mem::{GuestRun, PAGE_SIZE};

/// Content of a packet's pages, in the order of their offsets.
#[derive(Debug, Clone, Copy)]
pub(crate) enum Pages<'p, 'm> {
    /// Guest memory, which the guest may change during a read.
    Guest(&'p [GuestRun<'m>]),
    /// Memory that no other thread writes.
    Private(&'p [u8]),
}

impl Pages<'_, '_> {
    /// Appends the content of `pages` pages to `into`, evenly spread over the packet.
    pub(crate) fn sample(&self, pages: usize, into: &mut Vec<u8>) {
        let length = match self {
            Self::Guest(runs) => runs.iter().map(GuestRun::len).sum(),
            Self::Private(bytes) => bytes.len(),
        };
        let all = length / PAGE_SIZE;
        let step = all.div_ceil(pages.max(1)).max(1);
        for page in (0..all).skip(step / 2).step_by(step) {
            let offset = page * PAGE_SIZE;
            match self {
                Self::Private(bytes) => into.extend_from_slice(&bytes[offset..offset + PAGE_SIZE]),
                Self::Guest(runs) => {
                    let mut before = 0;
                    for run in *runs {
                        if offset < before + run.len() {
                            let here = run.split_at(offset - before).1.split_at(PAGE_SIZE).0;
                            let filled = into.len();
                            into.resize(filled + PAGE_SIZE, 0);
                            here.copy_to(&mut into[filled..]);
                            break;
                        }
                        before += run.len();
                    }
                }
            }
        }
    }
}

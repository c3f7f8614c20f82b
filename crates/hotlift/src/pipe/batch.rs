//! Batch of pages on their way to a sink: decoded content of a packet, or a guest's pages for compression threads.

use hotlift_mem::{GuestRun, PAGE_SIZE};
use hotlift_methods::MethodError;
use hotlift_methods::legacy::compress::Inflater;
use hotlift_wire::multifd::PacketLayout;

/// Maximum count of pages in a batch: as many as in a packet of QEMU.
pub(crate) const BATCH_PAGES: usize = PacketLayout::QEMU.pages();

/// Up to [`BATCH_PAGES`] pages of one RAM block. Batches are allocated once and reused. Their count limits the memory that
/// pages in the relay use.
#[derive(Debug)]
pub(crate) struct Batch {
    /// Index of the RAM block.
    pub block: usize,
    /// Byte offsets, within the RAM block, of the pages with content. They have the same order as [`Batch::pages`].
    pub normal: Vec<u64>,
    /// Byte offsets, within the RAM block, of the zero pages.
    pub zero: Vec<u64>,
    /// True if the pages have arrived as records of the main channel.
    pub from_main: bool,
    pages: Box<[u8]>,
    /// Pages that capability `compress` has compressed: byte offset, and length of the page's zlib stream.
    compressed: Vec<(u64, usize)>,
    /// Concatenated zlib streams of the pages in `compressed`.
    streams: Vec<u8>,
}

impl Batch {
    pub(crate) fn new() -> Self {
        Self {
            block: 0,
            normal: Vec::with_capacity(BATCH_PAGES),
            zero: Vec::with_capacity(BATCH_PAGES),
            from_main: false,
            pages: vec![0; BATCH_PAGES * PAGE_SIZE].into_boxed_slice(),
            compressed: Vec::new(),
            streams: Vec::new(),
        }
    }

    /// Empties the batch, and assigns it to RAM block `block`.
    pub(crate) fn start(&mut self, block: usize) {
        self.block = block;
        self.from_main = false;
        self.normal.clear();
        self.zero.clear();
        self.compressed.clear();
        self.streams.clear();
    }

    /// Returns the count of all pages: with content, zero, and compressed.
    pub(crate) fn len(&self) -> usize {
        self.normal.len() + self.zero.len() + self.compressed.len()
    }

    /// Returns the content of the normal pages, one after another.
    pub(crate) fn pages(&self) -> &[u8] {
        &self.pages[..self.normal.len() * PAGE_SIZE]
    }

    /// Returns the buffer for the content of the pages in `normal`. The pages always fit: a relay rejects a source with larger
    /// packets at the start (`unfit`).
    pub(crate) fn pages_mut(&mut self) -> &mut [u8] {
        &mut self.pages[..self.normal.len() * PAGE_SIZE]
    }

    /// Returns the offsets of the normal pages, and the buffer for their content.
    pub(crate) fn normal_mut(&mut self) -> (&[u64], &mut [u8]) {
        (
            &self.normal,
            &mut self.pages[..self.normal.len() * PAGE_SIZE],
        )
    }

    /// Adds a page with content; the batch must not be full.
    pub(crate) fn push(&mut self, offset: u64, content: &[u8; PAGE_SIZE]) {
        let at = self.normal.len() * PAGE_SIZE;
        self.pages[at..at + PAGE_SIZE].copy_from_slice(content);
        self.normal.push(offset);
    }

    /// Adds a copy of a page of guest memory; the batch must not be full. If the guest writes the page during the copy, the
    /// page is dirty again and is sent later.
    pub(crate) fn push_guest(&mut self, offset: u64, page: GuestRun<'_>) {
        let at = self.normal.len() * PAGE_SIZE;
        page.copy_to(&mut self.pages[at..at + PAGE_SIZE]);
        self.normal.push(offset);
    }

    /// Adds a compressed page; the batch must not be full.
    pub(crate) fn push_compressed(&mut self, offset: u64, stream: &[u8]) {
        self.compressed.push((offset, stream.len()));
        self.streams.extend_from_slice(stream);
    }

    /// Returns true if the batch has pages that must be decompressed.
    pub(crate) fn is_compressed(&self) -> bool {
        !self.compressed.is_empty()
    }

    /// Decompresses the compressed pages, and appends them to the normal pages in the same order.
    ///
    /// # Errors
    ///
    /// Byte offset of the page that cannot be decompressed, and the cause.
    pub(crate) fn inflate(&mut self, inflater: &mut Inflater) -> Result<(), (u64, MethodError)> {
        let mut rest = self.streams.as_slice();
        for (offset, length) in self.compressed.drain(..) {
            let (stream, behind) = rest.split_at(length);
            rest = behind;
            let at = self.normal.len() * PAGE_SIZE;
            let page = GuestRun::of_buffer(&mut self.pages[at..at + PAGE_SIZE]);
            inflater
                .inflate(stream, page)
                .map_err(|source| (offset, source))?;
            self.normal.push(offset);
        }
        self.streams.clear();
        Ok(())
    }

    /// Turns every normal page whose bytes are all zero into a zero page.
    pub(crate) fn find_zero_pages(&mut self) {
        let mut kept = 0;
        for index in 0..self.normal.len() {
            let at = index * PAGE_SIZE;
            if hotlift_mem::zero::is_zero(&self.pages[at..at + PAGE_SIZE]) {
                self.zero.push(self.normal[index]);
                continue;
            }
            if kept != index {
                self.pages.copy_within(at..at + PAGE_SIZE, kept * PAGE_SIZE);
                self.normal[kept] = self.normal[index];
            }
            kept += 1;
        }
        self.normal.truncate(kept);
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn removing_zero_pages_keeps_the_order_of_the_rest() {
        let mut batch = Batch::new();
        batch.start(3);
        for page in 0..6_u64 {
            let byte = [0, 7, 0, 9, 8, 0][usize::try_from(page).unwrap()];
            batch.push(page * 4096, &[byte; PAGE_SIZE]);
        }
        batch.find_zero_pages();
        assert_eq!(batch.normal, [4096, 3 * 4096, 4 * 4096]);
        assert_eq!(batch.zero, [0, 2 * 4096, 5 * 4096]);
        let firsts: Vec<u8> = batch
            .pages()
            .chunks(PAGE_SIZE)
            .map(|page| page[0])
            .collect();
        assert_eq!(firsts, [7, 9, 8]);
        assert_eq!((batch.block, batch.len()), (3, 6));
    }
}

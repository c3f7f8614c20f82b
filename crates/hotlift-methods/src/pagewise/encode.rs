//! Packets to tables and streams.

use hotlift_mem::PAGE_SIZE;

use super::{ENTRY, Wrapper};
use crate::software::Software;
use crate::{Encode, MethodError, table};

/// A channel's compressor.
pub(crate) struct Encoder {
    method: &'static str,
    wrapper: Wrapper,
    software: Software,
}

impl Encoder {
    pub(crate) fn new(method: &'static str, wrapper: Wrapper) -> Result<Self, MethodError> {
        Ok(Self {
            method,
            wrapper,
            software: Software::pages(method)?,
        })
    }

    /// Appends `page` as a stream, if that is shorter than the page.
    fn stream(&mut self, page: &[u8], out: &mut Vec<u8>) -> Result<bool, MethodError> {
        let begin = out.len();
        out.extend_from_slice(self.wrapper.header());
        // One byte less than a page, so that the length tells it from a page as it is.
        let room = PAGE_SIZE - 1 - self.wrapper.header().len() - self.wrapper.trailer_len();
        let Some(spare) = out.spare_capacity_mut().get_mut(..room) else {
            unreachable!("room for every page was reserved");
        };
        let Some(written) = self.software.compress(self.method, page, spare)? else {
            out.truncate(begin);
            return Ok(false);
        };
        // SAFETY: that many bytes of the spare capacity are written, and never more than there is
        // room for.
        unsafe { out.set_len(out.len() + written.min(room)) };
        self.wrapper.put_trailer(page, out);
        Ok(true)
    }
}

impl Encode for Encoder {
    fn encode(&mut self, pages: &[u8], out: &mut Vec<u8>) -> Result<(), MethodError> {
        table::check_whole_pages(self.method, pages)?;
        let table = pages.len() / PAGE_SIZE * ENTRY;
        out.clear();
        out.reserve(table + pages.len());
        out.resize(table, 0);
        self.software.begin(self.method, pages)?;
        for (i, page) in pages.chunks(PAGE_SIZE).enumerate() {
            let begin = out.len();
            if !self.stream(page, out)? {
                out.extend_from_slice(page);
            }
            // At most a page.
            let length = u32::try_from(out.len() - begin).unwrap_or(u32::MAX);
            out[i * ENTRY..][..ENTRY].copy_from_slice(&length.to_be_bytes());
        }
        Ok(())
    }
}

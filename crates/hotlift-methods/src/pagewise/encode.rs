//! Encodes packets: a table of lengths, and a stream per page.

use hotlift_mem::PAGE_SIZE;

use super::device::{Done, Service};
use super::{ENTRY, Wrapper};
use crate::software::Software;
use crate::{Encode, Jobs, MethodError, RunsOn, check};

/// A channel's compressor.
pub(crate) struct Encoder {
    method: &'static str,
    service: Service,
    cpu: Cpu,
}

/// Compressor for pages that the device does not process.
struct Cpu {
    method: &'static str,
    wrapper: Wrapper,
    /// Compression library; `None` leaves pages uncompressed.
    software: Option<Software>,
    /// True after the packet's pages were sampled for Huffman codes.
    begun: bool,
}

impl Encoder {
    /// Returns an encoder that uses the device. The CPU compresses the pages that the device does not process.
    pub(crate) fn new(
        method: &'static str,
        wrapper: Wrapper,
        service: Service,
    ) -> Result<Self, MethodError> {
        Ok(Self {
            method,
            service,
            cpu: Cpu {
                method,
                wrapper,
                software: Some(Software::pages(method)?),
                begun: false,
            },
        })
    }

    /// Returns an encoder that uses the device. Pages that the device does not process are sent uncompressed.
    pub(crate) fn without_software(
        method: &'static str,
        wrapper: Wrapper,
        service: Service,
    ) -> Self {
        Self {
            method,
            service,
            cpu: Cpu {
                method,
                wrapper,
                software: None,
                begun: false,
            },
        }
    }

    fn packet(&mut self, pages: &[u8], out: &mut Vec<u8>) -> Result<(), MethodError> {
        let inputs = pages.chunks(PAGE_SIZE);
        let mut packet = self.service.packet(inputs.clone().map(Some));
        for (i, page) in inputs.enumerate() {
            let begin = out.len();
            let shrunk = match packet.next() {
                Done::Output(stream) => {
                    out.extend_from_slice(stream);
                    true
                }
                Done::DoesNotFit => false,
                Done::ByCpu => self.cpu.stream(pages, page, out)?,
            };
            if !shrunk {
                out.extend_from_slice(page);
                packet.is_raw();
            }
            // At most a page.
            let length = u32::try_from(out.len() - begin).unwrap_or(u32::MAX);
            out[i * ENTRY..][..ENTRY].copy_from_slice(&length.to_be_bytes());
        }
        Ok(())
    }
}

impl Cpu {
    /// Compresses `page`, one of `pages`, appends the stream to `out` and returns true. Returns false, with `out` unchanged, if
    /// the stream is not shorter than the page.
    fn stream(
        &mut self,
        pages: &[u8],
        page: &[u8],
        out: &mut Vec<u8>,
    ) -> Result<bool, MethodError> {
        let Some(software) = &mut self.software else {
            return Ok(false);
        };
        if !std::mem::replace(&mut self.begun, true) {
            software.begin(self.method, pages)?;
        }
        let begin = out.len();
        out.extend_from_slice(self.wrapper.header());
        // One byte less than a page: the length distinguishes it from an uncompressed page.
        let room = PAGE_SIZE - 1 - self.wrapper.header().len() - self.wrapper.trailer_len();
        let Some(spare) = out.spare_capacity_mut().get_mut(..room) else {
            unreachable!("room for every page was reserved");
        };
        let Some(written) = software.compress(self.method, page, spare)? else {
            out.truncate(begin);
            return Ok(false);
        };
        // SAFETY: this number of bytes of the spare capacity is written, never more than the room.
        unsafe { out.set_len(out.len() + written.min(room)) };
        self.wrapper.put_trailer(page, out);
        Ok(true)
    }
}

impl Encode for Encoder {
    fn encode(&mut self, pages: &[u8], out: &mut Vec<u8>) -> Result<(), MethodError> {
        check::whole_pages(self.method, pages)?;
        let table = pages.len() / PAGE_SIZE * ENTRY;
        out.clear();
        out.reserve(table + pages.len());
        out.resize(table, 0);
        self.cpu.begun = false;
        self.packet(pages, out)
    }

    fn jobs(&self) -> Jobs {
        self.service.jobs()
    }

    fn runs_on(&self) -> RunsOn {
        self.service.runs_on()
    }
}

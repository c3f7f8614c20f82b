//! Tables and streams to pages.

use hotlift_mem::{GuestRun, PAGE_SIZE};

use super::{ENTRY, Wrapper};
use crate::libdeflate::{self, Decompressor, Outcome};
use crate::target::{Extent, Target};
use crate::{Decode, MethodError, zlib};

/// A channel's decompressor.
pub(crate) struct Decoder {
    method: &'static str,
    wrapper: Wrapper,
    decompressor: Decompressor,
    /// For pages that lie in pieces.
    scratch: Box<[u8; PAGE_SIZE]>,
    failed: bool,
}

impl Decoder {
    pub(crate) fn new(method: &'static str, wrapper: Wrapper) -> Result<Self, MethodError> {
        Ok(Self {
            method,
            wrapper,
            decompressor: Decompressor::new(method)?,
            scratch: Box::new([0; PAGE_SIZE]),
            failed: false,
        })
    }

    fn packet(&mut self, payload: &[u8], target: Target<'_>) -> Result<(), MethodError> {
        let expected = target.bytes();
        let pages = expected / PAGE_SIZE;
        if pages * PAGE_SIZE != expected {
            // A payload gives whole pages.
            return Err(MethodError::short(
                self.method,
                payload,
                expected,
                pages * PAGE_SIZE,
            ));
        }
        let Some((table, streams)) = payload.split_at_checked(pages * ENTRY) else {
            return Err(MethodError::short(self.method, payload, expected, 0));
        };
        let (table, _) = table.as_chunks::<ENTRY>();
        self.check_table(table, payload, streams.len())?;

        let mut streams = streams;
        let mut done = 0;
        for extent in target.extents() {
            let mut at = 0;
            while at < extent.len {
                if (done + at) % PAGE_SIZE != 0 || extent.len - at < PAGE_SIZE {
                    // Runs that are not whole pages: nobody's, but allowed.
                    return self.in_pieces(payload, &table[..pages], target);
                }
                let (page, rest) = streams.split_at(length(table[(done + at) / PAGE_SIZE]));
                let place = Extent {
                    ptr: extent.ptr.wrapping_add(at),
                    len: PAGE_SIZE,
                };
                // SAFETY: inside the extent, which is guest runs of the packet.
                unsafe { self.page(page, place) }?;
                streams = rest;
                at += PAGE_SIZE;
            }
            done += extent.len;
        }
        Ok(())
    }

    /// Refuses a table whose entries are none of a page's or do not add up, before a page is written.
    fn check_table(
        &self,
        table: &[[u8; ENTRY]],
        payload: &[u8],
        streams: usize,
    ) -> Result<(), MethodError> {
        let mut sum = 0;
        for (page, &entry) in table.iter().enumerate() {
            let length = length(entry);
            if length == 0 || length > PAGE_SIZE {
                return Err(self.damaged("a length in the table is no page's"));
            }
            sum += length;
            if sum > streams {
                return Err(MethodError::short(
                    self.method,
                    payload,
                    table.len() * PAGE_SIZE,
                    page * PAGE_SIZE,
                ));
            }
        }
        if sum < streams {
            return Err(MethodError::Leftover {
                method: self.method,
                payload: payload.len(),
                left: streams - sum,
            });
        }
        Ok(())
    }

    /// Decodes every page to the scratch, and from there to its pieces.
    fn in_pieces(
        &mut self,
        payload: &[u8],
        table: &[[u8; ENTRY]],
        target: Target<'_>,
    ) -> Result<(), MethodError> {
        let mut streams = &payload[table.len() * ENTRY..];
        for (i, &entry) in table.iter().enumerate() {
            let (page, rest) = streams.split_at(length(entry));
            let place = Extent {
                ptr: self.scratch.as_mut_ptr(),
                len: PAGE_SIZE,
            };
            // SAFETY: all of the scratch.
            unsafe { self.page(page, place) }?;
            target.write_at(i * PAGE_SIZE, &self.scratch[..]);
            streams = rest;
        }
        Ok(())
    }

    /// Decodes one page.
    ///
    /// # Safety
    ///
    /// The caller may write the place, which has a page's size.
    unsafe fn page(&mut self, page: &[u8], place: Extent) -> Result<(), MethodError> {
        if page.len() == PAGE_SIZE {
            // SAFETY: both have a page's size; the place is the caller's to write, and payloads are
            // no guest memory.
            unsafe { std::ptr::copy(page.as_ptr(), place.ptr, PAGE_SIZE) };
            return Ok(());
        }
        let stream = self.skip_header(page)?;
        // SAFETY: the caller's promise.
        let outcome = unsafe {
            self.decompressor
                .decompress(libdeflate::Wrapper::Raw, stream, place)
        };
        match outcome {
            Outcome::Done { written, .. } if written < PAGE_SIZE => {
                Err(MethodError::short(self.method, page, PAGE_SIZE, written))
            }
            Outcome::Done { read, .. } if stream.len() - read > self.wrapper.trailer_len() => {
                Err(MethodError::Leftover {
                    method: self.method,
                    payload: page.len(),
                    left: stream.len() - read,
                })
            }
            // An Adler-32 is neither demanded nor checked: whether the accelerator writes a right one
            // is not known, and its driver reads none.
            Outcome::Done { .. } => Ok(()),
            Outcome::TooLong => Err(MethodError::long(self.method, page, PAGE_SIZE)),
            Outcome::Invalid => Err(self.damaged("a page is no complete deflate stream")),
        }
    }

    /// What follows the header of a page's stream.
    fn skip_header<'a>(&self, page: &'a [u8]) -> Result<&'a [u8], MethodError> {
        match self.wrapper {
            Wrapper::Raw => Ok(page),
            Wrapper::Zlib => zlib::skip_header(self.method, page)?
                .ok_or_else(|| MethodError::short(self.method, page, PAGE_SIZE, 0)),
        }
    }

    fn damaged(&self, reason: &'static str) -> MethodError {
        MethodError::Damaged {
            method: self.method,
            reason,
        }
    }
}

impl Decode for Decoder {
    fn decode(&mut self, payload: &[u8], pages: &[GuestRun<'_>]) -> Result<(), MethodError> {
        if self.failed {
            return Err(MethodError::Failed {
                method: self.method,
            });
        }
        let result = self.packet(payload, Target::new(pages));
        self.failed = result.is_err();
        result
    }
}

/// An entry's value. One that does not fit is no page's either.
fn length(entry: [u8; ENTRY]) -> usize {
    usize::try_from(u32::from_be_bytes(entry)).unwrap_or(usize::MAX)
}

//! Decodes payloads: a table of lengths, and a stream per page.

use hotlift_mem::{GuestRun, PAGE_SIZE};

use super::device::{Done, Service};
use super::{ENTRY, Wrapper};
use crate::libdeflate::{self, Decompressor, Outcome};
use crate::target::{Extent, Target};
use crate::{Decode, Jobs, MethodError, RunsOn};

/// A channel's decompressor.
pub(crate) struct Decoder {
    method: &'static str,
    service: Service,
    cpu: Cpu,
    /// Buffer for pages that are not contiguous.
    scratch: Box<[u8; PAGE_SIZE]>,
    failed: bool,
}

/// Decompressor for pages that the device does not process.
struct Cpu {
    method: &'static str,
    wrapper: Wrapper,
    decompressor: Decompressor,
}

impl Decoder {
    /// Returns a decoder that uses the device. The CPU decompresses the pages that the device does not process.
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
                decompressor: Decompressor::new(method)?,
            },
            scratch: Box::new([0; PAGE_SIZE]),
            failed: false,
        })
    }

    fn packet(&mut self, payload: &[u8], target: Target<'_>) -> Result<(), MethodError> {
        let expected = target.bytes();
        let pages = expected / PAGE_SIZE;
        if pages * PAGE_SIZE != expected {
            // A payload contains whole pages only.
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

        let streams = Streams {
            table,
            rest: streams,
        };
        let (method, wrapper) = (self.method, self.cpu.wrapper);
        let inputs = streams.map(|page| {
            // The device gets only pages with a valid header: some devices ignore the header.
            let deflated = || matches!(wrapper.skip_header(method, page), Ok(Some(_)));
            (page.len() < PAGE_SIZE && deflated()).then_some(page)
        });
        let mut packet = self.service.packet(inputs);
        let cpu = &mut self.cpu;
        // SAFETY of both calls: a place is all of the scratch, or inside an extent, which is guest runs
        // of the packet.
        let mut page = |stream: &[u8], place: Extent| {
            if stream.len() == PAGE_SIZE {
                packet.is_raw();
            }
            match packet.next() {
                // SAFETY: see above.
                Done::Output(page) => unsafe { fill(place, page) },
                // SAFETY: see above.
                Done::ByCpu | Done::DoesNotFit => unsafe { cpu.page(stream, place) }?,
            }
            Ok(())
        };
        let mut extents = target.extents();
        if extents.all(|extent| extent.len.is_multiple_of(PAGE_SIZE)) {
            let places = target.extents().flat_map(|extent| {
                (0..extent.len / PAGE_SIZE).map(move |i| Extent {
                    ptr: extent.ptr.wrapping_add(i * PAGE_SIZE),
                    len: PAGE_SIZE,
                })
            });
            for (stream, place) in streams.zip(places) {
                page(stream, place)?;
            }
        } else {
            // Runs of partial pages: the engine passes none, but `Decode::decode` permits them.
            for (i, stream) in streams.enumerate() {
                let place = Extent {
                    ptr: self.scratch.as_mut_ptr(),
                    len: PAGE_SIZE,
                };
                page(stream, place)?;
                target.write_at(i * PAGE_SIZE, &self.scratch[..]);
            }
        }
        Ok(())
    }

    /// Rejects a table with invalid lengths or a wrong sum of lengths. Called before any page is written.
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

    fn damaged(&self, reason: &'static str) -> MethodError {
        damaged(self.method, reason)
    }
}

impl Cpu {
    /// Decodes one page into `place`.
    ///
    /// # Safety
    ///
    /// `place` must be writable, and have the size of a page.
    unsafe fn page(&mut self, page: &[u8], place: Extent) -> Result<(), MethodError> {
        if page.len() == PAGE_SIZE {
            // SAFETY: guaranteed by the caller.
            unsafe { fill(place, page) };
            return Ok(());
        }
        let stream = self.wrapper.skip_header(self.method, page)?;
        let stream = stream.ok_or_else(|| MethodError::short(self.method, page, PAGE_SIZE, 0))?;
        // SAFETY: guaranteed by the caller.
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
            // An Adler-32 may be missing or wrong: the accelerator may not write a correct one, and its driver reads none.
            Outcome::Done { .. } => Ok(()),
            Outcome::TooLong => Err(MethodError::long(self.method, page, PAGE_SIZE)),
            Outcome::Invalid => Err(damaged(self.method, "a page is no complete deflate stream")),
        }
    }
}

/// Copies `page` to `place`.
///
/// # Safety
///
/// `place` must be writable, and have the size of a page.
unsafe fn fill(place: Extent, page: &[u8]) {
    let len = place.len.min(page.len());
    // SAFETY: guaranteed by the caller.
    unsafe { std::ptr::copy(page.as_ptr(), place.ptr, len) };
}

fn damaged(method: &'static str, reason: &'static str) -> MethodError {
    MethodError::Damaged { method, reason }
}

/// Iterator over the pages of a payload with a valid table.
#[derive(Clone, Copy)]
struct Streams<'a> {
    table: &'a [[u8; ENTRY]],
    rest: &'a [u8],
}

impl<'a> Iterator for Streams<'a> {
    type Item = &'a [u8];

    fn next(&mut self) -> Option<&'a [u8]> {
        let (&entry, table) = self.table.split_first()?;
        let (stream, rest) = self.rest.split_at_checked(length(entry))?;
        *self = Self { table, rest };
        Some(stream)
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

    fn jobs(&self) -> Jobs {
        self.service.jobs()
    }

    fn runs_on(&self) -> RunsOn {
        self.service.runs_on()
    }
}

/// Returns the length in a table entry. A length that does not fit becomes the maximum, which is invalid too.
fn length(entry: [u8; ENTRY]) -> usize {
    usize::try_from(u32::from_be_bytes(entry)).unwrap_or(usize::MAX)
}

//! Decodes gzip members to pages.
//!
//! Each member is decoded to a buffer. It is copied to guest memory only after its checksum and sizes are verified, so guest
//! memory gets no byte of a damaged member. The copy takes less than a tenth of the decode time, because a member of 64 KiB
//! stays in the cache.
//!
//! The hardware gets a packet only if all its headers and trailers are valid: the vendor's code must not parse malformed data.
//! The hardware's results are verified. If it fails, the CPU decodes the packet again from the start. Only the CPU's decoder
//! reports a damaged stream.

use hotlift_mem::GuestRun;

use super::device::Device;
use super::members::{self, Bad, Header};
use super::{MAGIC, NAME, TRAILER, crc32};
use crate::libdeflate::{Decompressor, Outcome, Wrapper};
use crate::target::{Extent, Target};
use crate::{Decode, Jobs, MethodError, RunsOn};

/// A channel's decompressor.
pub(super) struct Decoder {
    device: Device,
    jobs: Jobs,
    decompressor: Decompressor,
    /// Buffer for one member. Grows to the largest packet: without QAT's extra field, a member's size is unknown before it is
    /// decoded.
    scratch: Vec<u8>,
    failed: bool,
}

impl Decoder {
    pub(super) fn new(device: Device) -> Result<Self, MethodError> {
        Ok(Self {
            device,
            jobs: Jobs::default(),
            decompressor: Decompressor::new(NAME)?,
            scratch: Vec::new(),
            failed: false,
        })
    }

    /// Decodes a packet on the device. Returns false if there is no device, or if it cannot decode the packet.
    fn by_device(&mut self, payload: &[u8], target: Target<'_>) -> bool {
        let expected = target.bytes();
        let Some(largest) = self.device.largest_member() else {
            return false;
        };
        let Some(members) = members::count(payload, expected, largest) else {
            return false;
        };
        let done = self.device.run(payload, expected, |bytes| {
            if bytes.len() != expected {
                return Err("fewer bytes than the members hold");
            }
            if !members::checksums_fit(payload, bytes) {
                return Err("bytes with other checksums than the members'");
            }
            target.scatter(bytes);
            Ok(())
        });
        if done {
            self.jobs.hardware += members;
        }
        done
    }

    fn packet(&mut self, payload: &[u8], target: Target<'_>) -> Result<(), MethodError> {
        if self.by_device(payload, target) {
            return Ok(());
        }
        let expected = target.bytes();
        if self.scratch.len() < expected {
            self.scratch.resize(expected, 0);
        }
        let mut rest = payload;
        let mut done = 0;
        while !rest.is_empty() {
            if done == expected {
                return Err(if rest.starts_with(&MAGIC) {
                    MethodError::long(NAME, payload, expected)
                } else {
                    MethodError::Leftover {
                        method: NAME,
                        payload: payload.len(),
                        left: rest.len(),
                    }
                });
            }
            let (taken, given) = self
                .member(rest, expected - done)
                .map_err(|bad| match bad {
                    Bad::Long => MethodError::long(NAME, payload, expected),
                    Bad::Short => MethodError::short(NAME, payload, expected, done),
                    Bad::Magic(got) => MethodError::Header { method: NAME, got },
                    Bad::Damaged(reason) => MethodError::Damaged {
                        method: NAME,
                        reason,
                    },
                })?;
            target.write_at(done, &self.scratch[..given]);
            self.jobs.software += 1;
            done += given;
            rest = &rest[taken..];
        }
        if done < expected {
            return Err(MethodError::short(NAME, payload, expected, done));
        }
        Ok(())
    }

    /// Decodes the member at the start of `input` into the scratch; the output may have at most `room` bytes. Returns the
    /// number of bytes read and written.
    fn member(&mut self, input: &[u8], room: usize) -> Result<(usize, usize), Bad> {
        let header = Header::read(input)?;
        let body = &input[header.len..];
        let deflate = match header.sizes {
            Some(sizes) if sizes.uncompressed > room => return Err(Bad::Long),
            Some(sizes) => body.get(..sizes.deflate).ok_or(Bad::Short)?,
            None => body,
        };
        let extent = Extent {
            ptr: self.scratch.as_mut_ptr(),
            len: room,
        };
        // SAFETY: the scratch has the size of a packet, and `room` is at most that.
        let outcome = unsafe { self.decompressor.decompress(Wrapper::Raw, deflate, extent) };
        let (read, written) = match outcome {
            Outcome::Done { read, written } => (read, written),
            Outcome::TooLong => return Err(Bad::Long),
            Outcome::Invalid => return Err(Bad::Damaged("a member is no complete deflate stream")),
        };
        if let Some(sizes) = header.sizes
            && (sizes.deflate, sizes.uncompressed) != (read, written)
        {
            return Err(Bad::Damaged("the sizes of a member differ from its header"));
        }
        let Some(&[a, b, c, d, e, f, g, h]) = body[read..].first_chunk::<TRAILER>() else {
            return Err(Bad::Short);
        };
        if u32::from_le_bytes([a, b, c, d]) != crc32(&self.scratch[..written]) {
            return Err(Bad::Damaged("a member's checksum is wrong"));
        }
        // The size field is modulo 2^32. The members of a packet are far smaller.
        if usize::try_from(u32::from_le_bytes([e, f, g, h])) != Ok(written) {
            return Err(Bad::Damaged("a member's size is wrong"));
        }
        Ok((header.len + read + TRAILER, written))
    }
}

impl Decode for Decoder {
    fn decode(&mut self, payload: &[u8], pages: &[GuestRun<'_>]) -> Result<(), MethodError> {
        if self.failed {
            return Err(MethodError::Failed { method: NAME });
        }
        let result = self.packet(payload, Target::new(pages));
        self.failed = result.is_err();
        result
    }

    fn jobs(&self) -> Jobs {
        Jobs {
            retries: self.device.retries(),
            ..self.jobs
        }
    }

    fn runs_on(&self) -> RunsOn {
        self.device.runs_on()
    }
}

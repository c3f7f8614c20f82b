//! Encodes packets to gzip members.

use hotlift_mem::PAGE_SIZE;

use super::device::Device;
use super::members::{self, LARGEST as MEMBER};
use super::{EXTRA, LEVELS, MAGIC, NAME, SUBFIELD, crc32};
use crate::software::Software;
use crate::{Encode, Jobs, MethodError, RunsOn, check};

/// Room for a member's deflate stream from the CPU. Stored blocks add 5 bytes per 65,535 bytes; libdeflate's stored blocks 5
/// per 5,000. The hardware does not use this room: it may return up to 9/8 of the input and 1 KiB.
const ROOM: usize = MEMBER + MEMBER / 32;

/// Bytes before a member's deflate stream: the gzip header with QAT's extra field.
const HEAD: usize = 24;

/// A channel's compressor.
pub(super) struct Encoder {
    device: Device,
    software: Software,
    jobs: Jobs,
}

impl Encoder {
    pub(super) fn new(device: Device, level: u8) -> Result<Self, MethodError> {
        check::level(NAME, &LEVELS, level)?;
        Ok(Self {
            device,
            software: Software::members(NAME, level)?,
            jobs: Jobs::default(),
        })
    }

    /// Compresses a packet on the device. Returns false if there is no device, or if it cannot compress the packet.
    fn by_device(&mut self, pages: &[u8], out: &mut Vec<u8>) -> bool {
        let Some(largest) = self.device.largest_member() else {
            return false;
        };
        let mut members = 0;
        let done = self.device.run(pages, pages.len(), |payload| {
            // The checksums are not checked: the CPU would have to read every byte again. The receiver checks them.
            members = members::count(payload, pages.len(), largest)
                .ok_or("output that is no members of the packet's pages")?;
            out.extend_from_slice(payload);
            Ok(())
        });
        if done {
            self.jobs.hardware += members;
        }
        done
    }

    fn member(&mut self, bytes: &[u8], out: &mut Vec<u8>) -> Result<(), MethodError> {
        out.reserve(HEAD + ROOM + super::TRAILER);
        let sizes = out.len() + HEAD - EXTRA;
        out.extend_from_slice(&MAGIC);
        // Deflate; only an extra field; no time; XFL; unknown system.
        out.extend_from_slice(&[8, 4, 0, 0, 0, 0, 0, 255]);
        out.extend_from_slice(&[12, 0]);
        out.extend_from_slice(&SUBFIELD);
        out.extend_from_slice(&[8, 0]);
        out.extend_from_slice(&[0; EXTRA]);
        let room = &mut out.spare_capacity_mut()[..ROOM];
        let Some(written) = self.software.compress(NAME, bytes, room)? else {
            return Err(MethodError::Library {
                method: NAME,
                library: self.software.name(),
                operation: "compress a member",
                reason: format!("it does not fit into {ROOM} bytes"),
            });
        };
        // SAFETY: this number of bytes of the spare capacity is written, never more than the room.
        unsafe { out.set_len(out.len() + written.min(ROOM)) };
        // Both are below 2^17.
        let size = |bytes: usize| u32::try_from(bytes).unwrap_or(u32::MAX).to_le_bytes();
        out[sizes..][..4].copy_from_slice(&size(bytes.len()));
        out[sizes + 4..][..4].copy_from_slice(&size(written));
        out.extend_from_slice(&crc32(bytes).to_le_bytes());
        out.extend_from_slice(&size(bytes.len()));
        Ok(())
    }
}

impl Encode for Encoder {
    fn encode(&mut self, pages: &[u8], out: &mut Vec<u8>) -> Result<(), MethodError> {
        check::whole_pages(NAME, pages)?;
        out.clear();
        if self.by_device(pages, out) {
            return Ok(());
        }
        for member in pages.chunks(MEMBER) {
            self.member(member, out)?;
            self.jobs.software += 1;
        }
        Ok(())
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

const _: () = assert!(MEMBER.is_multiple_of(PAGE_SIZE));

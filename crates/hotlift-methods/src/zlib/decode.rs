//! Decodes payloads to pages.
//!
//! ```text
//! FIRST PACKET --header--> WITHOUT HISTORY --a packet refers to earlier ones--> WITH HISTORY
//! ```
//!
//! A Hotlift's encoder ends each packet with a full flush: no packet refers to an earlier one, and each is decoded alone
//! (`whole`). QEMU's packets refer to earlier packets, usually from the second on. From the first such packet on, zlib-rs
//! decodes the channel as one stream. For this switch, the last 32 KiB before each packet are kept.

use hotlift_mem::GuestRun;
use zlib_rs::{Inflate, InflateFlush, Status};

use super::whole::{Outcome, Whole};
use super::{NAME, portable, skip_header};
use crate::target::{Extent, Target};
use crate::{Decode, MethodError};

/// Deflate's largest distance (RFC 1951, 3.2.5).
const WINDOW: usize = 32 * 1024;

/// End of every flush, sync or full: an empty stored block at a byte boundary.
const FLUSHED: [u8; 4] = [0x00, 0x00, 0xff, 0xff];

/// A channel's decompressor.
pub(super) struct Decoder {
    state: State,
    whole: Whole,
    inflate: Inflate,
    history: History,
    /// Buffer for one packet's pages and one more byte. It is used for decoding with history, and for non-contiguous pages.
    /// Grows to the largest packet.
    scratch: Vec<u8>,
}

#[derive(Debug, Clone, Copy, PartialEq, Eq)]
enum State {
    FirstPacket,
    WithoutHistory,
    WithHistory,
    Failed,
}

impl Decoder {
    pub(super) fn new() -> Result<Self, MethodError> {
        Ok(Self {
            state: State::FirstPacket,
            whole: Whole::new()?,
            inflate: Inflate::new(false, 15),
            history: History::new(),
            scratch: Vec::new(),
        })
    }

    fn packet(&mut self, payload: &[u8], target: Target<'_>) -> Result<(), MethodError> {
        let mut deflate = payload;
        if self.state == State::FirstPacket {
            deflate = skip_header(NAME, payload)?.ok_or(MethodError::NotFlushed {
                method: NAME,
                payload: payload.len(),
            })?;
            self.state = State::WithoutHistory;
        }
        if !deflate.ends_with(&FLUSHED) {
            return Err(MethodError::NotFlushed {
                method: NAME,
                payload: payload.len(),
            });
        }
        if self.state == State::WithoutHistory {
            if self.without_history(deflate, target)? {
                self.history.remember(target);
                return Ok(());
            }
            self.inflate
                .set_dictionary(self.history.bytes())
                .map_err(|error| MethodError::Library {
                    method: NAME,
                    library: portable::LIBRARY,
                    operation: "take up the history",
                    reason: error.as_str().to_owned(),
                })?;
            self.state = State::WithHistory;
        }
        self.with_history(deflate, target)
    }

    /// Returns the scratch, with room for `pages` bytes and one more.
    fn scratch_for(&mut self, pages: usize) -> &mut [u8] {
        if self.scratch.len() <= pages {
            self.scratch.resize(pages + 1, 0);
        }
        &mut self.scratch
    }

    /// Decodes a packet without history. Returns false if the packet is damaged or refers to earlier packets.
    fn without_history(&mut self, deflate: &[u8], target: Target<'_>) -> Result<bool, MethodError> {
        let expected = target.bytes();
        let in_place = target.contiguous();
        let extent = in_place.unwrap_or_else(|| Extent {
            ptr: self.scratch_for(expected).as_mut_ptr(),
            len: expected,
        });
        match self.whole.decode(deflate, extent) {
            Outcome::Invalid => return Ok(false),
            Outcome::Decoded(got) if got == expected => {}
            Outcome::Decoded(got) => return Err(MethodError::short(NAME, deflate, expected, got)),
            Outcome::TooLong => return Err(MethodError::long(NAME, deflate, expected)),
            Outcome::Ended => return Err(MethodError::StreamEnd { method: NAME }),
        }
        if in_place.is_none() {
            target.scatter(&self.scratch[..expected]);
        }
        Ok(true)
    }

    fn with_history(&mut self, deflate: &[u8], target: Target<'_>) -> Result<(), MethodError> {
        let expected = target.bytes();
        self.scratch_for(expected);
        let (read, written) = (self.inflate.total_in(), self.inflate.total_out());
        // The extra byte makes the library read to the end of the flush, and reveals a payload that is too long.
        let status = self
            .inflate
            .decompress(
                deflate,
                &mut self.scratch[..=expected],
                InflateFlush::SyncFlush,
            )
            .map_err(|error| MethodError::Damaged {
                method: NAME,
                reason: error.as_str(),
            })?;
        let since = |total: u64, before: u64| usize::try_from(total - before).unwrap_or(usize::MAX);
        let got = since(self.inflate.total_out(), written);
        let left = deflate
            .len()
            .saturating_sub(since(self.inflate.total_in(), read));
        if status == Status::StreamEnd {
            return Err(MethodError::StreamEnd { method: NAME });
        }
        if got > expected {
            return Err(MethodError::long(NAME, deflate, expected));
        }
        if got < expected {
            return Err(MethodError::short(NAME, deflate, expected, got));
        }
        if left > 0 {
            return Err(MethodError::Leftover {
                method: NAME,
                payload: deflate.len(),
                left,
            });
        }
        target.scatter(&self.scratch[..expected]);
        Ok(())
    }
}

impl Decode for Decoder {
    fn decode(&mut self, payload: &[u8], pages: &[GuestRun<'_>]) -> Result<(), MethodError> {
        if self.state == State::Failed {
            return Err(MethodError::Failed { method: NAME });
        }
        let result = self.packet(payload, Target::new(pages));
        if result.is_err() {
            self.state = State::Failed;
        }
        result
    }
}

/// The last 32 KiB of the channel's output: a later packet can refer to them.
struct History {
    bytes: Box<[u8]>,
    len: usize,
}

impl History {
    fn new() -> Self {
        Self {
            bytes: vec![0; WINDOW].into_boxed_slice(),
            len: 0,
        }
    }

    fn bytes(&self) -> &[u8] {
        &self.bytes[..self.len]
    }

    /// Appends a packet's pages, and removes the oldest bytes.
    fn remember(&mut self, packet: Target<'_>) {
        let new = packet.bytes().min(WINDOW);
        let old = self.len.min(WINDOW - new);
        self.bytes.copy_within(self.len - old..self.len, 0);
        packet.copy_end(&mut self.bytes[old..old + new]);
        self.len = old + new;
    }
}

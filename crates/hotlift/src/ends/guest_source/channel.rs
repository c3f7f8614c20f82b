//! Thread of a multifd channel at the source: takes chunks, finds zero pages, and sends packets.
//!
//! ```text
//! take chunk -> fetch and clear dirty bits -> zero? -> offsets of the packet -> PacketSender
//! ```

use std::sync::atomic::Ordering;

use hotlift_mem::{GuestRun, PAGE_SIZE};
use hotlift_wire::multifd::ZeroPageDetection;

use crate::ends::guest_source::normal_share::NormalShare;
use crate::ends::guest_source::source::GuestSource;
use crate::ends::guest_source::zero_devices::Pipeline;
use crate::error::MigrationError;
use crate::precopy::ram::{Chunk, offsets};
use crate::stream::multifd_send::PacketSender;
use crate::stream::pages::Pages;

/// State of one channel. The buffers are reused for all packets.
pub(crate) struct ChannelSender<'a> {
    source: &'a GuestSource<'a>,
    packets: PacketSender<'a>,
    block: usize,
    /// Number of pages in a full packet.
    packet_pages: usize,
    normal_share: NormalShare,
    normal: Vec<u64>,
    zero: Vec<u64>,
    runs: Vec<GuestRun<'a>>,
    /// Zero-page detection by devices; `None` if this thread detects zero pages.
    pipeline: Option<Pipeline<'a>>,
    dirty_words: Vec<u64>,
    untouched_words: Vec<u64>,
}

impl<'a> ChannelSender<'a> {
    pub(crate) fn new(source: &'a GuestSource<'a>, id: u8) -> Result<Self, MigrationError> {
        let options = source.options;
        let packet_pages = options.stream.packet_pages();
        Ok(Self {
            source,
            packets: PacketSender::new(&source.out.multifd, id, &options.stream, true, true)?,
            block: 0,
            packet_pages,
            normal_share: NormalShare::new(options.zero_pages.normal_page_ratio),
            normal: Vec::with_capacity(packet_pages),
            zero: Vec::with_capacity(packet_pages),
            runs: Vec::with_capacity(packet_pages),
            pipeline: source
                .zero_devices
                .as_ref()
                .map(|devices| Pipeline::new(devices, packet_pages)),
            dirty_words: Vec::new(),
            untouched_words: Vec::new(),
        })
    }

    /// Sends the pages of each round, and then a SYNC packet, until there are no more rounds.
    pub(crate) fn run(&mut self) -> Result<(), MigrationError> {
        let mut round = 0;
        while self.source.rounds.next(&mut round) {
            self.round()?;
            self.packets.sync()?;
            self.source.rounds.finish();
        }
        Ok(())
    }

    /// Sends chunks until the round has no more.
    fn round(&mut self) -> Result<(), MigrationError> {
        while let Some(chunk) = self.source.ram.take() {
            if self.source.control.life().is_stopped() {
                return Ok(());
            }
            if self.source.cuts_round() {
                break;
            }
            self.chunk(chunk)?;
        }
        if self.pipeline.is_some() {
            // The first call submits the filled batch, the second takes its result.
            self.turn()?;
            self.turn()?;
        }
        self.send_packet()
    }

    /// Submits the gathered pages to a device. Takes the results of the previous batch, and sends its pages.
    fn turn(&mut self) -> Result<(), MigrationError> {
        if let Some(pipeline) = &mut self.pipeline {
            self.block = pipeline.turn(&mut self.normal_share, &mut self.normal, &mut self.zero);
        }
        self.send_packet()
    }

    fn chunk(&mut self, chunk: Chunk) -> Result<(), MigrationError> {
        let mut dirty = std::mem::take(&mut self.dirty_words);
        let mut untouched = std::mem::take(&mut self.untouched_words);
        let source = self.source;
        // With `legacy` detection the migration thread has already scanned the chunk and cleared the log.
        let any = if source.options.zero_pages.detection == ZeroPageDetection::Legacy {
            source.ram.fetch(chunk, &mut dirty)
        } else {
            source.ram.fetch_and_clear(chunk, &mut dirty)?
        };
        if any {
            let waiting = self.pipeline.as_ref().map(Pipeline::block);
            match waiting {
                Some(Some(block)) if block != chunk.block => self.turn()?,
                Some(_) => {}
                None if chunk.block != self.block => {
                    self.send_packet()?;
                    self.block = chunk.block;
                }
                None => {}
            }
            let detect = source.options.zero_pages.detection == ZeroPageDetection::Multifd;
            if detect {
                source.ram.untouched(chunk, &mut untouched);
            }
            let ram = &source.guest.ram()[chunk.block];
            let mut checked_pages = 0;
            for (page, offset) in offsets(chunk, &dirty) {
                if source.cuts_round() {
                    source.ram.put_back(chunk.block, chunk.first_page + page);
                    continue;
                }
                let is_untouched = detect && untouched[page / 64] >> (page % 64) & 1 == 1;
                if let Some(pipeline) = &mut self.pipeline {
                    if pipeline.add(chunk.block, ram, offset, is_untouched)? {
                        self.turn()?;
                    }
                    continue;
                }
                let checks_zero = detect && !is_untouched;
                checked_pages += u64::from(checks_zero);
                let is_zero =
                    is_untouched || (checks_zero && ram.page_is_zero(chunk.first_page + page));
                let list = if is_zero && !self.normal_share.takes() {
                    &mut self.zero
                } else {
                    &mut self.normal
                };
                list.push(offset as u64);
                if self.normal.len() + self.zero.len() == self.packet_pages {
                    self.send_packet()?;
                }
            }
            source
                .checked_pages
                .fetch_add(checked_pages, Ordering::Relaxed);
        }
        self.dirty_words = dirty;
        self.untouched_words = untouched;
        Ok(())
    }

    /// Sends the gathered pages, if any.
    fn send_packet(&mut self) -> Result<(), MigrationError> {
        if self.normal.is_empty() && self.zero.is_empty() {
            return Ok(());
        }
        let ram = &self.source.guest.ram()[self.block];
        self.runs.clear();
        for (offset, len) in contiguous(&self.normal) {
            self.runs.push(ram.run(offset, len)?);
        }
        let pages = Pages::Guest(&self.runs);
        self.packets
            .send(ram.name(), &self.normal, &self.zero, pages)?;
        self.normal.clear();
        self.zero.clear();
        Ok(())
    }
}

/// Joins adjacent pages into runs. Returns the offset and length of each run, in bytes.
fn contiguous(offsets: &[u64]) -> impl Iterator<Item = (usize, usize)> + '_ {
    let page = PAGE_SIZE as u64;
    offsets
        .chunk_by(move |a, b| a + page == *b)
        .map(|run| (to_usize(run[0]), run.len() * PAGE_SIZE))
}

/// Converts an offset inside mapped memory, which always fits the address space.
fn to_usize(offset: u64) -> usize {
    usize::try_from(offset).unwrap_or(usize::MAX)
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn neighbouring_pages_become_one_run_and_order_is_kept() {
        let page = PAGE_SIZE as u64;
        let offsets = [0, page, 2 * page, 5 * page, 4 * page, 7 * page];
        let runs: Vec<_> = contiguous(&offsets).collect();
        assert_eq!(
            runs,
            [
                (0, 3 * PAGE_SIZE),
                (5 * PAGE_SIZE, PAGE_SIZE),
                (4 * PAGE_SIZE, PAGE_SIZE),
                (7 * PAGE_SIZE, PAGE_SIZE)
            ]
        );
    }
}

//! Thread of a multifd channel at the destination: writes the pages of packets into guest RAM.
//!
//! A zero page is cleared only if the page was written before. Fresh RAM reads as zero, and writing zeros would make the kernel
//! allocate it.

use hotlift_mem::{GuestRun, PAGE_SIZE};
use hotlift_wire::multifd::PacketHeader;

use crate::ends::guest_sink::sink::GuestSink;
use crate::error::{Channel, MigrationError};
use crate::handover::DestinationSide;
use crate::pipe::session::Session;
use crate::stream::multifd_recv::{PageSink, ReadDecision};

/// Reads channel `id` until the channel ends, or until this side owns the guest.
pub(crate) fn receive(
    session: &Session<'_>,
    sink: &GuestSink<'_>,
    id: u8,
) -> Result<(), MigrationError> {
    let mut ram = GuestRam {
        session,
        sink,
        id,
        runs: Vec::with_capacity(sink.source.layout.pages()),
    };
    let source = &sink.source;
    source.read_channel(session, id, &sink.blocks, &mut ram)
}

struct GuestRam<'a> {
    session: &'a Session<'a>,
    sink: &'a GuestSink<'a>,
    id: u8,
    /// Ranges of guest RAM for the pages of the current packet.
    runs: Vec<GuestRun<'a>>,
}

impl GuestRam<'_> {
    /// Checks that postcopy has not begun. In postcopy, no multifd channel may carry anything. `got` names the message for the
    /// error.
    fn check_switch(&self, got: &str) -> Result<(), MigrationError> {
        if !self.session.is_switched() {
            return Ok(());
        }
        Err(MigrationError::Protocol {
            channel: Channel::Multifd(self.id),
            got: got.to_owned(),
            doing: "receiving pages of a running guest",
        })
    }
}

impl PageSink for GuestRam<'_> {
    fn put(
        &mut self,
        header: &PacketHeader,
        read: &mut dyn FnMut(&mut [GuestRun<'_>]) -> Result<(), MigrationError>,
    ) -> Result<ReadDecision, MigrationError> {
        let (session, sink) = (self.session, self.sink);
        self.check_switch("pages")?;
        let block = header.block();
        let (ram, written) = (&sink.guest.ram()[block], &sink.written[block]);
        if !header.normal().is_empty() {
            self.runs.clear();
            for run in header.normal().chunk_by(|a, b| a + PAGE_SIZE as u64 == *b) {
                let offset = usize::try_from(run[0]).unwrap_or(usize::MAX);
                self.runs.push(ram.run(offset, run.len() * PAGE_SIZE)?);
                written.set_range(offset / PAGE_SIZE, run.len());
                sink.note_received(block, offset / PAGE_SIZE, run.len());
            }
            read(&mut self.runs)?;
        }
        for offset in header.zero() {
            let offset = usize::try_from(*offset).unwrap_or(usize::MAX);
            if written.test(offset / PAGE_SIZE) {
                ram.zero(offset, PAGE_SIZE)?;
            }
            sink.note_received(block, offset / PAGE_SIZE, 1);
        }
        session.received[usize::from(self.id)]
            .add_pages(header.normal().len(), header.zero().len());
        Ok(ReadDecision::Yes)
    }

    fn report(&mut self, message: &[u8]) {
        // Errors are ignored: the reader of the connection detects the loss of the source.
        let _ = self.sink.source.answer(message);
    }

    fn sync(&mut self) -> Result<ReadDecision, MigrationError> {
        let session = self.session;
        self.check_switch("SYNC")?;
        if session.destination_handover.side() != DestinationSide::Loading {
            // After everything is loaded there are no more barriers, so this SYNC is the source's commit. Another thread
            // answers later outcome queries of the source.
            self.sink.take_over(session)?;
            return Ok(ReadDecision::No);
        }
        Ok(session.barrier.channel_arrives().into())
    }

    fn ended(&mut self) -> Result<(), MigrationError> {
        let session = self.session;
        if session.destination_handover.side() == DestinationSide::Loading
            && self.sink.source.is_hotlift()
        {
            return Err(MigrationError::Closed {
                channel: Channel::Multifd(self.id),
            });
        }
        session.barrier.channel_ends();
        Ok(())
    }
}

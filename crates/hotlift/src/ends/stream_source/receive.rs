//! Incoming multifd channels in a relay: their pages go into batches, or are forwarded without decoding. Also forwards the
//! peer's answers to the source.

use std::time::{Duration, Instant};

use hotlift_mem::GuestRun;
use hotlift_net::transport::Stream;
use hotlift_wire::RamBlockEntry;
use hotlift_wire::multifd::PacketHeader;
use hotlift_wire::return_path::ReturnMessage;

use crate::ends::stream_source::preempt;
use crate::ends::stream_source::read_setup::Setup;
use crate::ends::stream_source::upstream::Upstream;
use crate::error::{Channel, MigrationError};
use crate::life::threads::DetachableThread;
use crate::pipe::batch::Batch;
use crate::pipe::session::Session;
use crate::pipe::sink::ForwardPackets;
use crate::pipe::source::Source;
use crate::stream::accept_loop::AcceptLoop;
use crate::stream::multifd_recv::{PageSink, ReadDecision};
use crate::stream::return_path::encode;
use crate::stream::serve_queries::linger;

/// The connections of a source, as the source of pages.
pub(crate) struct Streams<'a> {
    upstream: &'a Upstream,
    blocks: &'a [RamBlockEntry],
    /// True if a QEMU may connect a preempt channel.
    may_preempt: bool,
}

impl<'a> Streams<'a> {
    /// Creates the source of pages from the connections of a stream.
    pub(crate) fn new(upstream: &'a Upstream, setup: &'a Setup) -> Self {
        Self {
            upstream,
            blocks: &setup.ram.blocks,
            may_preempt: setup.postcopy && !upstream.source.is_hotlift(),
        }
    }
}

impl Source for Streams<'_> {
    fn readers(&self) -> usize {
        self.upstream.source.multifd.len() + usize::from(self.may_preempt)
    }

    fn thread_name(&self, reader: usize) -> String {
        match reader < self.upstream.source.multifd.len() {
            true => format!("relay/recv_{reader}"),
            false => "relay/preempt".to_owned(),
        }
    }

    fn read(&self, session: &Session<'_>, reader: usize) -> Result<(), MigrationError> {
        if reader >= self.upstream.source.multifd.len() {
            return preempt::receive(session, self.blocks, self.upstream);
        }
        // Ids range from 0 to 254.
        let id = u8::try_from(reader).unwrap_or(u8::MAX);
        receive(session, self.blocks, self.upstream, id)
    }

    fn answer(
        &self,
        _: &Session<'_>,
        _: Channel,
        message: &ReturnMessage<'_>,
        bytes: &[u8],
    ) -> Result<(), MigrationError> {
        // Recorded before the request is sent, because the source may answer at once.
        self.upstream.pending_requests.record(message);
        self.upstream.answer(bytes);
        Ok(())
    }

    fn kept_open(&self) -> Option<&Stream> {
        // A QEMU keeps its side open until the last answer; a relay shuts down its own side after the last write.
        let stays = self.upstream.return_path && !self.upstream.source.is_hotlift();
        stays.then_some(&self.upstream.source.main)
    }

    fn releases_guest(&self) -> bool {
        !self.upstream.source.is_hotlift()
    }

    fn streams(&self) -> Vec<&Stream> {
        self.upstream.source.streams().collect()
    }

    fn free_readers(&self, session: &Session<'_>) {
        self.upstream.preempt.end();
        self.upstream.source.free_readers(session);
    }

    fn shut_down(&self) {
        self.upstream.shut_down();
    }

    fn refuse(&self, _: &Session<'_>, reason: &str) {
        let shut = ReturnMessage::Shut(1);
        // A QEMU does not know the text message.
        self.upstream
            .answer(&match self.upstream.source.is_hotlift() {
                true => encode(&[ReturnMessage::ErrorText(reason), shut]),
                false => encode(&[shut]),
            });
    }

    fn linger(&self, session: &Session<'_>, accept_loop: &mut AcceptLoop<'_>) {
        // Before EOF the source of a postcopy sends no outcome query: both QEMUs wait to be reconnected.
        if session.may_run_there() && !session.source_handover.is_committed() {
            return;
        }
        let main = [&self.upstream.source.main];
        linger(
            accept_loop,
            &session.query_subject(&|| ()),
            &main,
            &[],
            session.query_period,
            session.control.life(),
        );
    }

    fn over(&self, session: &Session<'_>) {
        self.upstream.source.leave(session);
        self.upstream.close();
    }
}

/// Reads channel `id` until it ends between packets, or until the relay ends.
fn receive(
    session: &Session<'_>,
    blocks: &[RamBlockEntry],
    upstream: &Upstream,
    id: u8,
) -> Result<(), MigrationError> {
    let mut batches = Batches {
        session,
        upstream,
        id,
        synced: false,
        held_back: Duration::ZERO,
        yielding: DetachableThread::default(),
        forwarder: None,
    };
    let source = &upstream.source;
    source.read_channel(session, id, blocks, &mut batches)
}

struct Batches<'a> {
    session: &'a Session<'a>,
    upstream: &'a Upstream,
    id: u8,
    /// True once the first SYNC, of the stream setup, has arrived. Pages before it are invalid.
    synced: bool,
    /// Time that this thread waited for a free batch, since the last report.
    held_back: Duration,
    /// Lowers this thread's priority in postcopy, because pages that the guest waits for come on main.
    yielding: DetachableThread,
    /// Forwards uncompressed packets where possible.
    forwarder: Option<Box<dyn ForwardPackets + 'a>>,
}

impl Batches<'_> {
    /// Returns a free batch; `None` if the relay ends.
    fn free_batch(&mut self) -> Option<Batch> {
        if let Some(batch) = self.session.flow.try_take() {
            return Some(batch);
        }
        let since = Instant::now();
        let batch = self.session.flow.take();
        self.held_back += since.elapsed();
        batch
    }

    fn check_set_up(&self) -> Result<(), MigrationError> {
        if self.synced {
            return Ok(());
        }
        Err(MigrationError::Protocol {
            channel: Channel::Multifd(self.id),
            got: "pages before the first SYNC".to_owned(),
            doing: "opening the migration",
        })
    }
}

impl PageSink for Batches<'_> {
    fn put(
        &mut self,
        header: &PacketHeader,
        read: &mut dyn FnMut(&mut [GuestRun<'_>]) -> Result<(), MigrationError>,
    ) -> Result<ReadDecision, MigrationError> {
        self.check_set_up()?;
        let Some(mut batch) = self.free_batch() else {
            return Ok(ReadDecision::No);
        };
        batch.start(header.block());
        batch.normal.extend_from_slice(header.normal());
        batch.zero.extend_from_slice(header.zero());
        if self.session.may_run_there() {
            self.yielding.once(true);
            let pages = header.normal().iter().chain(header.zero());
            self.upstream
                .pending_requests
                .take_all(header.block(), pages)?;
        }
        if !header.normal().is_empty() {
            read(&mut [GuestRun::of_buffer(batch.pages_mut())])?;
        }
        self.session.flow.submit(batch);
        Ok(ReadDecision::Yes)
    }

    fn forward(&mut self, header: &PacketHeader, from: &Stream) -> Result<bool, MigrationError> {
        self.check_set_up()?;
        if self.session.may_run_there() {
            // A QEMU accepts no packets in postcopy.
            return Ok(false);
        }
        if self.forwarder.is_none() {
            self.forwarder = self.session.sink.forwarder(self.id);
        }
        let Some(forwarder) = &mut self.forwarder else {
            return Ok(false);
        };
        forwarder.forward(from, header.block(), header.normal(), header.zero())?;
        self.session
            .pages
            .add_pages(header.normal().len(), header.zero().len());
        Ok(true)
    }

    fn held_back(&mut self) -> Duration {
        std::mem::take(&mut self.held_back)
    }

    fn report(&mut self, message: &[u8]) {
        self.upstream.answer(message);
    }

    fn sync(&mut self) -> Result<ReadDecision, MigrationError> {
        self.synced = true;
        Ok(self.session.barrier.channel_arrives().into())
    }

    fn ended(&mut self) -> Result<(), MigrationError> {
        // A Hotlift closes its channels only at the end, so a channel that ends earlier was cut. While main is quiet, no thread
        // would notice the missing SYNC.
        if self.upstream.source.is_hotlift() && !self.session.source_handover.is_committed() {
            return Err(MigrationError::Closed {
                channel: Channel::Multifd(self.id),
            });
        }
        self.session.barrier.channel_ends();
        Ok(())
    }
}

//! Where an incoming multifd channel's pages go in a relay: into batches, or to the other side unread.

use hotlift_mem::GuestRun;
use hotlift_wire::RamBlockEntry;
use hotlift_wire::multifd::{PacketHeader, PacketLayout};

use super::session::Session;
use super::sink::ForwardPackets;
use crate::error::{Channel, MigrationError};
use crate::stream::multifd_recv::{ChannelRules, MultifdReceiver, PageSink, ReadOn};
use crate::transport::Stream;

/// Reads channel `id` until it ends, between packets, or the relay does.
pub(super) fn receive(
    session: &Session<'_>,
    blocks: &[RamBlockEntry],
    stream: &Stream,
    id: u8,
    from_relay: bool,
) -> Result<(), MigrationError> {
    let rules = ChannelRules {
        id,
        layout: PacketLayout::QEMU,
        method: None,
        checksum_required: from_relay,
        accelerator: session.accelerator,
    };
    MultifdReceiver::new(
        rules,
        stream,
        blocks,
        &session.memory,
        &session.received[usize::from(id)],
        &session.control,
    )?
    .run(&mut Batches {
        session,
        id,
        from_relay,
        synced: false,
        forwarder: None,
    })
}

struct Batches<'a> {
    session: &'a Session<'a>,
    id: u8,
    from_relay: bool,
    /// The SYNC of the set-up has come, and with it everything that pages need.
    synced: bool,
    /// Passes uncompressed packets on where that may be done.
    forwarder: Option<Box<dyn ForwardPackets + 'a>>,
}

impl Batches<'_> {
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
        read: impl FnOnce(&mut [GuestRun<'_>]) -> Result<(), MigrationError>,
    ) -> Result<ReadOn, MigrationError> {
        self.check_set_up()?;
        let Some(mut batch) = self.session.flow.take() else {
            return Ok(ReadOn::No);
        };
        batch.start(header.block());
        batch.normal.extend_from_slice(header.normal());
        batch.zero.extend_from_slice(header.zero());
        if !header.normal().is_empty() {
            read(&mut [GuestRun::of_buffer(batch.pages_mut())])?;
        }
        self.session.flow.submit(batch);
        Ok(ReadOn::Yes)
    }

    fn forward(&mut self, header: &PacketHeader, from: &Stream) -> Result<bool, MigrationError> {
        self.check_set_up()?;
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

    fn sync(&mut self) -> Result<ReadOn, MigrationError> {
        self.synced = true;
        Ok(if self.session.barrier.channel_arrives() {
            ReadOn::Yes
        } else {
            ReadOn::No
        })
    }

    fn ended(&mut self) -> Result<(), MigrationError> {
        // A relay closes its channels when everything is over: one that ends before was cut, and may be quiet for long
        // before anybody writes to it.
        if self.from_relay && !self.session.is_committed() {
            return Err(MigrationError::Closed {
                channel: Channel::Multifd(self.id),
            });
        }
        self.session.barrier.channel_ends();
        Ok(())
    }
}

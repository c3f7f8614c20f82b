//! A QEMU's preempt channel at a relay: its pages are forwarded like requested pages on main.

use hotlift_mem::PAGE_SIZE;
use hotlift_wire::RamBlockEntry;

use crate::ends::stream_source::upstream::Upstream;
use crate::error::{Channel, MigrationError};
use crate::pipe::session::Session;
use crate::stream::preempt::read_pages;

/// Finds the preempt channel, and forwards its pages until the channel ends.
pub(crate) fn receive(
    session: &Session<'_>,
    blocks: &[RamBlockEntry],
    upstream: &Upstream,
) -> Result<(), MigrationError> {
    let (candidates, pending_requests) = (&upstream.preempt, &upstream.pending_requests);
    let Some(stream) = candidates.find(blocks, pending_requests, &session.control)? else {
        return Ok(());
    };
    let counters = &session.received[upstream.source.multifd.len()];
    let outcome = read_pages(&stream, blocks, counters, |block, offset, content| {
        pass_on(session, upstream, (block, offset), content)
    });
    let is_end = match &outcome {
        Ok(()) => upstream.pending_requests.all_arrived(),
        Err(MigrationError::Closed { .. }) => false,
        Err(_) => return outcome,
    };
    match is_end || session.source_handover.is_committed() {
        true => Ok(()),
        false => Err(MigrationError::main_closed()),
    }
}

fn pass_on(
    session: &Session<'_>,
    upstream: &Upstream,
    (block, offset): (usize, u64),
    content: Option<&[u8; PAGE_SIZE]>,
) -> Result<(), MigrationError> {
    let Some(postcopy) = session.sink.postcopy().filter(|_| session.may_run_there()) else {
        return Err(MigrationError::Protocol {
            channel: Channel::Main,
            got: "a page before any request".to_owned(),
            doing: "reading a preempt channel",
        });
    };
    // Before forwarding: a page that main has brought in the meantime, or that another client sends, must not be sent twice.
    upstream.pending_requests.claim(block, offset)?;
    postcopy.page(block, offset, content)?;
    let normal = usize::from(content.is_some());
    session.pages.add_pages(normal, 1 - normal);
    // After forwarding: END on main waits for this call.
    upstream.pending_requests.done(block, offset);
    Ok(())
}

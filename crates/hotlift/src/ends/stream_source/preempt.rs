//! The connection on which a QEMU sends nothing but pages that are waited for (capability `postcopy-preempt`).
//!
//! It is made just before the switch, and has no sections around its records. Its pages go on as those of main that were
//! asked for do.

use std::net::Shutdown;
use std::sync::{Arc, Condvar, Mutex, PoisonError};

use hotlift_wire::main_channel::postcopy::{PreemptDecoder, PreemptRecord};
use hotlift_wire::{RamBlockEntry, WireError};

use crate::ends::stream_source::upstream::Upstream;
use crate::error::{Channel, MigrationError};
use crate::pipe::session::Session;
use crate::threads::lock;
use crate::transport::Stream;

/// Bytes read at once: some pages.
const READ: usize = 64 << 10;

/// The connection, which may come.
#[derive(Debug, Default)]
pub(crate) struct Preempt {
    state: Mutex<State>,
    changed: Condvar,
}

#[derive(Debug, Default)]
struct State {
    stream: Option<Arc<Stream>>,
    over: bool,
}

impl Preempt {
    /// It has come.
    pub(crate) fn put(&self, stream: Stream) {
        lock(&self.state).stream = Some(Arc::new(stream));
        self.changed.notify_all();
    }

    /// Whether it has come.
    pub(crate) fn is_here(&self) -> bool {
        lock(&self.state).stream.is_some()
    }

    /// Nothing more is to come on it.
    pub(crate) fn end(&self) {
        let mut state = lock(&self.state);
        state.over = true;
        if let Some(stream) = &state.stream {
            stream.shutdown(Shutdown::Both);
        }
        self.changed.notify_all();
    }

    fn wait(&self) -> Option<Arc<Stream>> {
        let state = self
            .changed
            .wait_while(lock(&self.state), |state| {
                state.stream.is_none() && !state.over
            })
            .unwrap_or_else(PoisonError::into_inner);
        state.stream.clone().filter(|_| !state.over)
    }
}

/// Passes its pages on until it ends.
pub(crate) fn receive(
    session: &Session<'_>,
    blocks: &[RamBlockEntry],
    upstream: &Upstream,
) -> Result<(), MigrationError> {
    let Some(stream) = upstream.preempt.wait() else {
        return Ok(());
    };
    let mut decoder = PreemptDecoder::new(blocks.to_vec());
    let mut unread = Vec::with_capacity(2 * READ);
    let mut buffer = vec![0; READ];
    loop {
        let read = stream
            .read_some(&mut buffer)
            .map_err(|source| MigrationError::Connection {
                channel: Channel::Main,
                doing: "reading pages that the guest waits for",
                source,
            })?;
        if read == 0 {
            let is_whole = unread.is_empty() && upstream.demand.is_met();
            return match is_whole || session.giving.is_committed() {
                true => Ok(()),
                false => Err(MigrationError::main_closed()),
            };
        }
        session.received[upstream.multifd.len()].add_bytes(read);
        unread.extend_from_slice(&buffer[..read]);
        let mut taken = 0;
        loop {
            match decoder.next(&unread[taken..]) {
                Ok((record, length)) => {
                    pass_on(session, upstream, record)?;
                    taken += length;
                }
                Err(WireError::Truncated { .. }) => break,
                Err(source) => return Err(MigrationError::main_wire(source)),
            }
        }
        unread.drain(..taken);
    }
}

fn pass_on(
    session: &Session<'_>,
    upstream: &Upstream,
    record: PreemptRecord<'_>,
) -> Result<(), MigrationError> {
    let PreemptRecord::Page {
        block,
        offset,
        content,
    } = record
    else {
        return Ok(());
    };
    let Some(postcopy) = session.sink.postcopy().filter(|_| session.may_run_there()) else {
        return Err(MigrationError::Protocol {
            channel: Channel::Main,
            got: "a page that nobody can wait for yet".to_owned(),
            doing: "reading a preempt channel",
        });
    };
    postcopy.page(block, offset, content)?;
    let normal = usize::from(content.is_some());
    session.pages.add_pages(normal, 1 - normal);
    // Only now: main's END waits for it.
    upstream.demand.take(block, offset)?;
    Ok(())
}

//! Messages to the source of a postcopy, over the current connection.

use std::io::{self, Write};
use std::net::Shutdown;
use std::sync::{Arc, Mutex};

use hotlift_mem::PAGE_SIZE;
use hotlift_net::transport::Stream;
use hotlift_wire::return_path::ReturnMessage;

use crate::ends::guest_sink::sink::GuestSink;
use crate::lock::lock;

/// Return path of a postcopy, at the destination.
pub(super) struct Link<'a> {
    sink: &'a GuestSink<'a>,
    now: Mutex<LinkState>,
}

#[derive(Default)]
struct LinkState {
    /// Connection that replaces a lost main channel.
    recovered: Option<Arc<Stream>>,
    /// True if there is no connection.
    is_lost: bool,
    /// True while a source that resumes asks which pages have arrived. No page is requested in this time.
    requests_paused: bool,
    /// RAM block of the last request on this connection. The next request for this block leaves out its name.
    named: Option<usize>,
}

impl<'a> Link<'a> {
    pub(super) fn new(sink: &'a GuestSink<'a>) -> Self {
        Self {
            sink,
            now: Mutex::default(),
        }
    }

    /// Shuts the connection down. Its reader gets an error. A write ends even if it is blocked, because the source reads
    /// nothing.
    pub(super) fn cut(&self) {
        // Not under the lock of `now`, which a blocked writer may hold.
        match lock(&self.sink.recovered).as_deref() {
            Some(stream) => stream.shutdown(Shutdown::Both),
            None => self.sink.source.main.shutdown(Shutdown::Both),
        }
    }

    /// Marks the connection as lost: later messages fail.
    pub(super) fn lose(&self) {
        // Before `now` is locked, because a blocked writer may have the lock.
        self.cut();
        let mut now = lock(&self.now);
        now.is_lost = true;
        now.recovered = None;
    }

    /// Replaces the connection by `stream`. No page is requested before [`Link::resume_requests`].
    pub(super) fn recover(&self, stream: Arc<Stream>) {
        *lock(&self.sink.recovered) = Some(Arc::clone(&stream));
        *lock(&self.now) = LinkState {
            recovered: Some(stream),
            requests_paused: true,
            ..LinkState::default()
        };
    }

    /// Resumes requests. The caller must repeat the requests for all missing pages.
    pub(super) fn resume_requests(&self) {
        lock(&self.now).requests_paused = false;
    }

    /// Sends `bytes`, which must be whole messages.
    pub(super) fn send(&self, bytes: &[u8]) -> io::Result<()> {
        self.write(&lock(&self.now), bytes)
    }

    fn write(&self, now: &LinkState, bytes: &[u8]) -> io::Result<()> {
        match &now.recovered {
            _ if now.is_lost => Err(io::ErrorKind::NotConnected.into()),
            Some(stream) => (&**stream).write_all(bytes),
            None => self.sink.source.answer(bytes),
        }
    }

    /// Requests a page, unless [`Link::recover`] has paused the requests. Errors are ignored: after a loss, all requests are
    /// repeated.
    pub(super) fn ask_for(&self, block: usize, page: usize) {
        let mut now = lock(&self.now);
        if now.requests_paused {
            return;
        }
        let start = (page * PAGE_SIZE) as u64;
        let length = u32::try_from(PAGE_SIZE).unwrap_or(u32::MAX);
        let message = match now.named == Some(block) {
            true => ReturnMessage::ReqPages { start, length },
            false => ReturnMessage::ReqPagesId {
                start,
                length,
                block: &self.sink.blocks[block].name,
            },
        };
        let mut bytes = Vec::new();
        // Cannot fail: the stream has limited the length of RAM block names.
        if message.encode(&mut bytes).is_ok() && self.write(&now, &bytes).is_ok() {
            now.named = Some(block);
        }
    }
}

//! What is said to the source of a postcopy, over whichever connection there is.

use std::io::{self, Write};
use std::net::Shutdown;
use std::sync::{Arc, Mutex};

use hotlift_mem::PAGE_SIZE;
use hotlift_net::transport::Stream;
use hotlift_wire::return_path::ReturnMessage;

use crate::ends::guest_sink::sink::GuestSink;
use crate::lock::lock;

/// The return path.
pub(super) struct Link<'a> {
    sink: &'a GuestSink<'a>,
    now: Mutex<Now>,
}

#[derive(Default)]
struct Now {
    /// In the place of the main channel that was lost.
    recovered: Option<Arc<Stream>>,
    /// Nothing can be said.
    is_lost: bool,
    /// The source wants to know what there is before it hears what is missing.
    is_asked: bool,
    /// RAM block of the last request on this connection.
    named: Option<usize>,
}

impl<'a> Link<'a> {
    pub(super) fn new(sink: &'a GuestSink<'a>) -> Self {
        Self {
            sink,
            now: Mutex::default(),
        }
    }

    /// Ends the connection: who reads it finds it lost, and whoever writes to a source that reads nothing goes on.
    pub(super) fn cut(&self) {
        // Apart from `now`, whose lock a writer may have.
        match lock(&self.sink.recovered).as_deref() {
            Some(stream) => stream.shutdown(Shutdown::Both),
            None => self.sink.source.main.shutdown(Shutdown::Both),
        }
    }

    /// The connection is gone: what is said from here on is not heard.
    pub(super) fn lose(&self) {
        // Before the lock, which a writer may have.
        self.cut();
        let mut now = lock(&self.now);
        now.is_lost = true;
        now.recovered = None;
    }

    /// From here on `stream` is the connection. No page is asked for before [`Link::go_on`].
    pub(super) fn recover(&self, stream: Arc<Stream>) {
        *lock(&self.sink.recovered) = Some(Arc::clone(&stream));
        *lock(&self.now) = Now {
            recovered: Some(stream),
            is_asked: true,
            ..Now::default()
        };
    }

    /// The source goes on: whatever is still waited for is to be asked for again.
    pub(super) fn go_on(&self) {
        lock(&self.now).is_asked = false;
    }

    /// Says `bytes`, whole messages.
    pub(super) fn say(&self, bytes: &[u8]) -> io::Result<()> {
        self.write(&lock(&self.now), bytes)
    }

    fn write(&self, now: &Now, bytes: &[u8]) -> io::Result<()> {
        match &now.recovered {
            _ if now.is_lost => Err(io::ErrorKind::NotConnected.into()),
            Some(stream) => (&**stream).write_all(bytes),
            None => self.sink.source.answer(bytes),
        }
    }

    /// Asks for a page. Whether it was heard shows when the page comes.
    pub(super) fn ask_for(&self, block: usize, page: usize) {
        let mut now = lock(&self.now);
        if now.is_asked {
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
        // Names of RAM blocks have the length that the stream takes.
        if message.encode(&mut bytes).is_ok() && self.write(&now, &bytes).is_ok() {
            now.named = Some(block);
        }
    }
}

//! Connections that may be a QEMU's preempt channel at a relay.
//!
//! The channel has no header, so each connection made while the channel may arrive is a candidate. The candidate whose first
//! page was requested is the channel. An unknown client loses only its own connection.

use std::net::Shutdown;
use std::sync::{Arc, Mutex};

use hotlift_net::admission::PendingConnections;
use hotlift_net::admission::limits::CANDIDATES;
use hotlift_net::transport::Stream;
use hotlift_wire::main_channel::postcopy::{PREEMPT_HEAD_LEN, PreemptDecoder};
use hotlift_wire::{RamBlockEntry, WireError};
use rustix::event::{PollFd, PollFlags};

use crate::control::Control;
use crate::ends::stream_source::pending_requests::PendingRequests;
use crate::error::MigrationError;
use crate::life::wake_fd::WakeFd;
use crate::life::{LONG, Life};
use crate::lock::lock;

/// Reason of a rejection.
pub(crate) const NO_PREEMPT: &str = "a connection that is not a preempt channel";

/// Connections that may be the preempt channel.
#[derive(Debug, Default)]
pub(crate) struct Candidates {
    state: Mutex<State>,
    /// Signals changes of the state.
    life: Life,
}

#[derive(Debug, Default)]
struct State {
    /// Candidates since the last check.
    new: Vec<Stream>,
    /// Number of candidates, including the new ones.
    count: usize,
    /// The preempt channel.
    found: Option<Arc<Stream>>,
    /// True once the search has ended.
    over: bool,
}

/// Meaning of a candidate's first bytes.
enum FirstBytes {
    /// Too few bytes to decide.
    Part,
    Page(usize, u64),
    Stranger,
}

impl Candidates {
    /// Adds a candidate. Drops it and returns false if there are too many, or if the search is over.
    pub(crate) fn add(&self, stream: Stream) -> bool {
        let mut state = lock(&self.state);
        let has_room = state.count < CANDIDATES.most && !state.over && state.found.is_none();
        if has_room {
            state.new.push(stream);
            state.count += 1;
            self.life.wake();
        }
        has_room
    }

    /// Returns true if there is a candidate.
    pub(crate) fn is_any(&self) -> bool {
        lock(&self.state).count > 0
    }

    /// Returns true if the preempt channel has been found.
    pub(crate) fn is_found(&self) -> bool {
        lock(&self.state).found.is_some()
    }

    /// Ends the search. Shuts the preempt channel down, if it was found.
    pub(crate) fn end(&self) {
        let mut state = lock(&self.state);
        state.over = true;
        state.new.clear();
        if let Some(found) = &state.found {
            found.shutdown(Shutdown::Both);
        }
        self.life.wake();
    }

    /// Waits for a candidate whose first page is in `pending_requests`, and returns it. Returns `None` after the end of the
    /// search. Drops all other candidates.
    ///
    /// # Errors
    /// If there are no file descriptors, or polling fails.
    pub(super) fn find(
        &self,
        blocks: &[RamBlockEntry],
        pending_requests: &PendingRequests,
        control: &Control,
    ) -> Result<Option<Arc<Stream>>, MigrationError> {
        let wake_fd = WakeFd::new(&self.life).map_err(MigrationError::opening)?;
        let mut room = PendingConnections::new(CANDIDATES).map_err(MigrationError::opening)?;
        let decoder = PreemptDecoder::new(blocks.to_vec());
        while let Some(new) = self.take_new() {
            for stream in new {
                let entered = room.enter(stream, self.life.now());
                entered.map_err(MigrationError::opening)?;
            }
            while let Some(number) = room.next_ready() {
                let request = room
                    .get(number)
                    .map_or(FirstBytes::Part, |one| peek(one, &decoder));
                let is_it = match request {
                    FirstBytes::Part => continue,
                    FirstBytes::Page(block, offset) => pending_requests.has(block, offset),
                    FirstBytes::Stranger => false,
                };
                let Some((stream, _)) = room.remove(number) else {
                    continue;
                };
                if is_it {
                    room.iter().for_each(|(other, _)| reject(other, control));
                    return Ok(self.keep(stream, control));
                }
                reject(&stream, control);
                lock(&self.state).count -= 1;
            }
            let mut fds = vec![PollFd::from_borrowed_fd(room.polled(), PollFlags::IN)];
            wake_fd
                .poll(&mut fds, LONG)
                .map_err(MigrationError::opening)?;
        }
        Ok(None)
    }

    /// Returns the new candidates; `None` after the end.
    fn take_new(&self) -> Option<Vec<Stream>> {
        let mut state = lock(&self.state);
        (!state.over).then(|| std::mem::take(&mut state.new))
    }

    /// Stores the preempt channel, and rejects all other candidates; `None` after the end.
    fn keep(&self, found: Stream, control: &Control) -> Option<Arc<Stream>> {
        let mut state = lock(&self.state);
        if state.over {
            return None;
        }
        for other in state.new.drain(..) {
            reject(&other, control);
        }
        state.count = 1;
        Some(Arc::clone(state.found.insert(Arc::new(found))))
    }
}

fn reject(stream: &Stream, control: &Control) {
    control.rejections().reject(NO_PREEMPT);
    stream.shutdown(Shutdown::Both);
}

/// Checks the first bytes of a candidate without waiting, and leaves them in the socket.
fn peek(stream: &Stream, decoder: &PreemptDecoder) -> FirstBytes {
    let mut head = [0; PREEMPT_HEAD_LEN];
    let seen = match stream.peek(&mut head) {
        Ok(None) => 0,
        Ok(Some(seen @ 1..)) => seen,
        Ok(Some(0)) | Err(_) => return FirstBytes::Stranger,
    };
    match decoder.place(&head[..seen]) {
        Ok((block, offset)) => FirstBytes::Page(block, offset),
        Err(WireError::Truncated { .. }) if !stream.is_hung_up() => FirstBytes::Part,
        Err(_) => FirstBytes::Stranger,
    }
}

#[cfg(test)]
mod tests {
    use std::io::{Read, Write};

    use hotlift_mem::PAGE_SIZE;
    use hotlift_methods::MemoryLimit;
    use hotlift_wire::main_channel::postcopy::put_preempt_page;
    use hotlift_wire::return_path::ReturnMessage;

    use super::*;

    fn page(offset: u64) -> Vec<u8> {
        let mut record = Vec::new();
        put_preempt_page("pc.ram", offset, Some(&[7; PAGE_SIZE]), &mut record).unwrap();
        record
    }

    #[test]
    fn an_unknown_client_is_not_taken_for_the_preempt_channel_and_does_not_hide_it() {
        let blocks = [RamBlockEntry::new("pc.ram", 16 * 4096)];
        let pending_requests =
            PendingRequests::new(&blocks, &MemoryLimit::new(1 << 20), &Life::default());
        pending_requests.record(&ReturnMessage::ReqPagesId {
            start: 8192,
            length: 4096,
            block: "pc.ram",
        });
        let (candidates, control) = (Candidates::default(), Control::new());
        let add = |first_bytes: Option<&[u8]>| {
            let (ours, theirs) = Stream::pair().unwrap();
            assert!(candidates.add(ours));
            (&theirs)
                .write_all(first_bytes.unwrap_or_default())
                .unwrap();
            theirs
        };
        let silent = add(Some(b""));
        // A port probe; bytes that are no page; a page that was not requested; a part of a record.
        drop(add(None));
        let _others = [add(Some(b"GET / HTTP/1.1\r\n")), add(Some(&page(4096)))];
        let _half = add(Some(&page(8192)[..4]));
        // The rest of its first record arrives later.
        let whole = page(8192);
        let (start, rest) = whole.split_at(4);
        let real = add(Some(start));
        let found = std::thread::scope(|scope| {
            let finds = scope.spawn(|| candidates.find(&blocks, &pending_requests, &control));
            (&real).write_all(rest).unwrap();
            finds.join().unwrap().unwrap().unwrap()
        });
        assert!(candidates.is_found());
        drop(found);
        assert_eq!((&silent).read(&mut [0]).unwrap(), 0, "it is dropped");
        assert_eq!(control.rejected_connections()[NO_PREEMPT], 5);
        candidates.end();
        assert!((&real).write_all(&[0]).is_err());
    }

    #[test]
    fn no_preempt_channel_is_searched_after_the_end() {
        let candidates = Candidates::default();
        let (stream, _other) = Stream::pair().unwrap();
        assert!(candidates.add(stream) && candidates.is_any());
        candidates.end();
        let pending_requests = PendingRequests::new(&[], &MemoryLimit::new(0), &Life::default());
        let found = candidates.find(&[], &pending_requests, &Control::new());
        assert!(found.unwrap().is_none());
        let (stream, _other) = Stream::pair().unwrap();
        assert!(!candidates.add(stream), "it is over");
    }
}

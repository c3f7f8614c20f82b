//! Connections that may be a QEMU's preempt channel at a relay.
//!
//! It has no header. Each connection that is made while it may come is a candidate; the one whose first page was asked for
//! is the channel, and a stranger loses its own connection only.

use std::io;
use std::net::Shutdown;
use std::sync::{Arc, Mutex};
use std::time::Duration;

use hotlift_wire::main_channel::postcopy::{PREEMPT_HEAD_LEN, PreemptDecoder};
use hotlift_wire::{RamBlockEntry, WireError};
use rustix::event::{PollFd, PollFlags};

use crate::control::Control;
use crate::ends::stream_source::postcopy::Demand;
use crate::error::MigrationError;
use crate::life::bell::Bell;
use crate::life::{LONG, Life};
use crate::lock::lock;
use crate::transport::Stream;

/// Candidates at most: a QEMU makes one connection, and they wait in memory for as long as the migration takes.
const MOST: usize = 64;

/// Between two checks of a connection that has sent a part of its first record: what has come keeps a poll from waiting.
const HALF_SAID: Duration = Duration::from_millis(2);

/// Why a connection was turned away.
pub(crate) const NO_PREEMPT: &str = "a connection that is no preempt channel";

/// Connections that may be the preempt channel.
#[derive(Debug, Default)]
pub(crate) struct Candidates {
    state: Mutex<State>,
    /// Changes with the state.
    life: Life,
}

#[derive(Debug, Default)]
struct State {
    streams: Vec<Arc<Stream>>,
    /// The only one left is the channel.
    is_found: bool,
    /// Nothing more is to come.
    over: bool,
}

/// Meaning of a candidate's first bytes.
enum Said {
    Nothing,
    Part,
    Page(usize, u64),
    Stranger,
}

impl Candidates {
    /// This may be it; false, and closed, if there are too many.
    pub(crate) fn add(&self, stream: Stream) -> bool {
        let mut state = lock(&self.state);
        let has_room = state.streams.len() < MOST && !state.over && !state.is_found;
        if has_room {
            state.streams.push(Arc::new(stream));
            self.life.wake();
        }
        has_room
    }

    /// Whether there is one.
    pub(crate) fn is_any(&self) -> bool {
        !lock(&self.state).streams.is_empty()
    }

    /// Whether the channel is found.
    pub(crate) fn is_found(&self) -> bool {
        lock(&self.state).is_found
    }

    /// Nothing more is to come on any.
    pub(crate) fn end(&self) {
        let mut state = lock(&self.state);
        state.over = true;
        for stream in &state.streams {
            stream.shutdown(Shutdown::Both);
        }
        self.life.wake();
    }

    /// Waits for the first page of one that `demand` has; that one, or `None` once nothing is to come. Others are dropped.
    ///
    /// # Errors
    /// The system gives no descriptor, or nothing can be waited for.
    pub(super) fn find(
        &self,
        blocks: &[RamBlockEntry],
        demand: &Demand,
        control: &Control,
    ) -> Result<Option<Arc<Stream>>, MigrationError> {
        let bell = Bell::new(&self.life).map_err(MigrationError::opening)?;
        let decoder = PreemptDecoder::new(blocks.to_vec());
        while let Some(streams) = self.open() {
            wait_for_word(&streams, &bell).map_err(MigrationError::opening)?;
            let mut part = false;
            for stream in &streams {
                match said(stream, &decoder) {
                    Said::Nothing => {}
                    Said::Part => part = true,
                    Said::Page(block, offset) if demand.has(block, offset) => {
                        return Ok(self.take(stream, control));
                    }
                    Said::Page(..) | Said::Stranger => self.drop(stream, control),
                }
            }
            if part {
                std::thread::sleep(HALF_SAID);
            }
        }
        Ok(None)
    }

    /// The candidates; `None` once nothing is to come.
    fn open(&self) -> Option<Vec<Arc<Stream>>> {
        let state = lock(&self.state);
        (!state.over).then(|| state.streams.clone())
    }

    fn take(&self, found: &Arc<Stream>, control: &Control) -> Option<Arc<Stream>> {
        let mut state = lock(&self.state);
        for other in state.streams.iter().filter(|it| !Arc::ptr_eq(it, found)) {
            turn_away(other, control);
        }
        state.streams = vec![Arc::clone(found)];
        state.is_found = true;
        (!state.over).then(|| Arc::clone(found))
    }

    fn drop(&self, stream: &Arc<Stream>, control: &Control) {
        turn_away(stream, control);
        let mut state = lock(&self.state);
        state.streams.retain(|it| !Arc::ptr_eq(it, stream));
    }
}

fn turn_away(stream: &Stream, control: &Control) {
    control.strangers().turn_away(NO_PREEMPT);
    stream.shutdown(Shutdown::Both);
}

/// Waits until one of them is readable, or there are others.
fn wait_for_word(streams: &[Arc<Stream>], bell: &Bell) -> io::Result<()> {
    let wait = match streams.iter().any(|stream| stream.has_plaintext()) {
        true => Duration::ZERO,
        false => LONG,
    };
    let fds = streams.iter();
    let mut fds: Vec<_> = fds
        .map(|stream| PollFd::new(&**stream, PollFlags::IN))
        .collect();
    bell.poll(&mut fds, wait)
}

/// Looks at the first bytes of a candidate without waiting and without taking them.
fn said(stream: &Stream, decoder: &PreemptDecoder) -> Said {
    let mut head = [0; PREEMPT_HEAD_LEN];
    let seen = match stream.peek(&mut head) {
        Ok(None) if !stream.is_hung_up() => return Said::Nothing,
        Ok(Some(seen @ 1..)) => seen,
        Ok(_) | Err(_) => return Said::Stranger,
    };
    match decoder.place(&head[..seen]) {
        Ok((block, offset)) => Said::Page(block, offset),
        Err(WireError::Truncated { .. }) if !stream.is_hung_up() => Said::Part,
        Err(_) => Said::Stranger,
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
    fn a_stranger_is_no_preempt_channel_and_keeps_none_from_being_found() {
        let blocks = [RamBlockEntry::new("pc.ram", 16 * 4096)];
        let demand = Demand::new(&blocks, &MemoryLimit::new(1 << 20), &Life::default());
        demand.note(&ReturnMessage::ReqPagesId {
            start: 8192,
            length: 4096,
            block: "pc.ram",
        });
        let (candidates, control) = (Candidates::default(), Control::new());
        let add = |says: Option<&[u8]>| {
            let (ours, theirs) = Stream::pair().unwrap();
            assert!(candidates.add(ours));
            (&theirs).write_all(says.unwrap_or_default()).unwrap();
            theirs
        };
        let silent = add(Some(b""));
        // A port probe; something that is no page; a page that nobody has asked for; a part of a record.
        drop(add(None));
        let _others = [add(Some(b"GET / HTTP/1.1\r\n")), add(Some(&page(4096)))];
        let _half = add(Some(&page(8192)[..4]));
        let real = add(Some(&page(8192)));
        let found = candidates
            .find(&blocks, &demand, &control)
            .unwrap()
            .unwrap();
        assert!(candidates.is_found());
        drop(found);
        assert_eq!((&silent).read(&mut [0]).unwrap(), 0, "it is dropped");
        assert_eq!(control.turned_away()[NO_PREEMPT], 5);
        candidates.end();
        assert!((&real).write_all(&[0]).is_err());
    }

    #[test]
    fn nothing_is_looked_for_once_nothing_is_to_come() {
        let candidates = Candidates::default();
        let (stream, _other) = Stream::pair().unwrap();
        assert!(candidates.add(stream) && candidates.is_any());
        candidates.end();
        let demand = Demand::new(&[], &MemoryLimit::new(0), &Life::default());
        let found = candidates.find(&[], &demand, &Control::new());
        assert!(found.unwrap().is_none());
        let (stream, _other) = Stream::pair().unwrap();
        assert!(!candidates.add(stream), "it is over");
    }
}

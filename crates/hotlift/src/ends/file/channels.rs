//! A save file's channels, each read by a thread of its own.
//!
//! ```text
//! headers   one after the other, by whichever channel needs its next chunk     what belongs to others waits for them
//! chunks    each by its channel's thread, from its place                       checked before a byte of it is used
//! the end   EOF and what follows it, behind the trailer                        when every chunk before was good
//! ```
//!
//! A thread that handed all chunks out would be the limit: reading, checking and passing on takes it as long as it takes
//! the channels' threads to decode.

use std::collections::VecDeque;
use std::fs::File;
use std::io;
use std::os::unix::fs::FileExt;
use std::path::{Path, PathBuf};
use std::sync::{Arc, Condvar, Mutex, MutexGuard, PoisonError};
use std::time::{Duration, Instant};

use super::FileError;
use super::container::{
    self, CHUNK_HEADER_LEN, Chunk, FileInfo, HEAD_LEN, Next, TRAILER_LEN, Totals, damaged,
};
/// Most bytes that are held back until the trailer was checked: EOF and the VM description.
const HELD_BACK_MAX: usize = 2 * hotlift_wire::limits::VM_DESCRIPTION;

/// Chunks that may wait for their channels, 64 MiB of places. A channel is ahead of another by the packets of a round at
/// most: 2 TiB of guest memory.
const WAITING_MAX: usize = 4 << 20;

/// Between two looks of a channel that waits for others.
const TICK: Duration = Duration::from_secs(1);

/// A save file that is open.
#[derive(Debug)]
pub(crate) struct SavedChannels {
    file: File,
    path: PathBuf,
    info: FileInfo,
    state: Mutex<State>,
    changed: Condvar,
}

#[derive(Debug)]
struct State {
    /// Of the next header.
    position: u64,
    totals: Totals,
    /// By channel.
    waiting: Vec<VecDeque<Place>>,
    /// What comes behind the trailer, in its order.
    held_back: VecDeque<Place>,
    held_bytes: usize,
    /// Chunks that are being read and checked.
    under_way: usize,
    /// The trailer was good.
    whole: bool,
    /// Nobody reads any more.
    over: bool,
    error: Option<FileError>,
}

/// Where a chunk's bytes are.
#[derive(Debug, Clone, Copy)]
struct Place {
    position: u64,
    length: u32,
    crc: u32,
}

/// What a channel reads next.
enum Turn {
    Chunk(Place),
    /// There is nothing to be had before others have done their part.
    Wait,
    End,
}

impl SavedChannels {
    /// Opens the file and reads its header.
    pub(crate) fn open(path: &Path) -> Result<Self, FileError> {
        let failed = |source| FileError::Read {
            path: path.to_owned(),
            source,
        };
        let mut saved = Self {
            file: File::open(path).map_err(failed)?,
            path: path.to_owned(),
            info: FileInfo::default(),
            state: Mutex::new(State {
                position: 0,
                totals: Totals::default(),
                waiting: Vec::new(),
                held_back: VecDeque::new(),
                held_bytes: 0,
                under_way: 0,
                whole: false,
                over: false,
                error: None,
            }),
            changed: Condvar::new(),
        };
        let mut head = [0; HEAD_LEN];
        saved.read_at(&mut head, 0)?;
        let mut rest = vec![0; container::info_len(&head)? + 4];
        saved.read_at(&mut rest, HEAD_LEN as u64)?;
        saved.info = container::read_info(&head, &rest)?;
        let channels = 1 + usize::from(saved.info.channels);
        let mut state = saved.lock();
        state.position = (HEAD_LEN + rest.len()) as u64;
        state.waiting.resize_with(channels, VecDeque::new);
        drop(state);
        Ok(saved)
    }

    pub(crate) fn info(&self) -> &FileInfo {
        &self.info
    }

    /// The channel with this number; 0 is main.
    pub(crate) fn channel(self: &Arc<Self>, number: u16) -> FileChannel {
        FileChannel {
            saved: Arc::clone(self),
            number: number.into(),
            chunk: Mutex::default(),
        }
    }

    /// What was wrong with the file, if something was.
    pub(crate) fn take_error(&self) -> Option<FileError> {
        self.lock().error.take()
    }

    fn lock(&self) -> MutexGuard<'_, State> {
        self.state.lock().unwrap_or_else(PoisonError::into_inner)
    }

    /// Ends all reading and waiting.
    fn stop(&self) {
        self.lock().over = true;
        self.changed.notify_all();
    }

    /// The place of the next chunk of `channel`, which is under way from then on. Waits until `deadline` where others
    /// have to do their part.
    fn next_place(&self, channel: usize, deadline: Option<Instant>) -> Result<Turn, FileError> {
        let mut state = self.lock();
        loop {
            if state.over {
                return Ok(Turn::End);
            }
            match self.turn(&mut state, channel)? {
                Some(Turn::Wait) => {}
                Some(turn) => return Ok(turn),
                None => {
                    // Others take their places, and an end is seen, between any two headers.
                    drop(state);
                    state = self.lock();
                    continue;
                }
            }
            let left = deadline.map(|deadline| deadline.saturating_duration_since(Instant::now()));
            if left.is_some_and(|left| left.is_zero()) {
                return Ok(Turn::Wait);
            }
            let left = left.unwrap_or(TICK);
            (state, _) = self
                .changed
                .wait_timeout(state, left)
                .unwrap_or_else(PoisonError::into_inner);
        }
    }

    /// What `channel` does next; `None`: a header was read, and it may look again.
    fn turn(&self, state: &mut State, channel: usize) -> Result<Option<Turn>, FileError> {
        if let Some(place) = state.waiting[channel].pop_front() {
            state.under_way += 1;
            return Ok(Some(Turn::Chunk(place)));
        }
        if !state.whole {
            self.read_header(state)?;
            return Ok(None);
        }
        if channel != 0 || state.held_back.is_empty() {
            return Ok(Some(Turn::End));
        }
        if state.under_way > 0 {
            return Ok(Some(Turn::Wait));
        }
        self.check_the_rest(state)?;
        let place = state.held_back.pop_front();
        state.under_way += 1;
        Ok(Some(place.map_or(Turn::End, Turn::Chunk)))
    }

    /// Reads the next chunk's header, or the trailer.
    fn read_header(&self, state: &mut State) -> Result<(), FileError> {
        let start = state.position;
        let mut header = [0; CHUNK_HEADER_LEN];
        self.read_at(&mut header, start)?;
        let channels = 1 + u16::from(self.info.channels);
        let chunk = match container::next(&header, &state.totals, channels, start)? {
            Next::Chunk(chunk) => chunk,
            Next::Trailer => return self.read_trailer(state),
        };
        state.totals.add(&chunk, &header);
        let position = start + CHUNK_HEADER_LEN as u64;
        state.position = position + chunk.length as u64;
        let place = Place::of(&chunk, position);
        if chunk.held_back {
            state.held_bytes += chunk.length;
            if state.held_bytes > HELD_BACK_MAX || chunk.channel != 0 {
                return Err(damaged("the end of the stream", start));
            }
            state.held_back.push_back(place);
            return Ok(());
        }
        let waiting: usize = state.waiting.iter().map(VecDeque::len).sum();
        if !state.held_back.is_empty() || waiting == WAITING_MAX {
            return Err(damaged("the order of the chunks", start));
        }
        state.waiting[usize::from(chunk.channel)].push_back(place);
        self.changed.notify_all();
        Ok(())
    }

    fn read_trailer(&self, state: &mut State) -> Result<(), FileError> {
        let start = state.position;
        let mut trailer = [0; TRAILER_LEN];
        self.read_at(&mut trailer, start)?;
        let length = self.file.metadata().map_err(|source| self.failed(source))?;
        if trailer != state.totals.trailer() || length.len() != start + TRAILER_LEN as u64 {
            return Err(damaged("the trailer", start));
        }
        state.whole = true;
        self.changed.notify_all();
        Ok(())
    }

    /// Checks the chunks that no channel has read: what is held back, and behind the last sync point there should be no
    /// other. At its first byte a guest may run.
    fn check_the_rest(&self, state: &mut State) -> Result<(), FileError> {
        let mut bytes = Vec::new();
        for place in state.waiting.iter().flatten().chain(&state.held_back) {
            self.read_chunk(*place, &mut bytes)?;
        }
        Ok(())
    }

    /// Reads a chunk that `next_place` has given out, and checks it.
    fn take_chunk(&self, place: Place, into: &mut Vec<u8>) -> Result<(), FileError> {
        let read = self.read_chunk(place, into);
        if read.is_err() {
            into.clear();
        }
        let mut state = self.lock();
        // With the error in one step: the end is not let out in between.
        state.over |= read.is_err();
        state.under_way -= 1;
        drop(state);
        self.changed.notify_all();
        read
    }

    fn read_chunk(&self, place: Place, into: &mut Vec<u8>) -> Result<(), FileError> {
        into.resize(place.length as usize, 0);
        self.read_at(into, place.position)?;
        if crc32fast::hash(into) != place.crc {
            let start = place.position - CHUNK_HEADER_LEN as u64;
            return Err(damaged("a chunk", start));
        }
        Ok(())
    }

    fn read_at(&self, into: &mut [u8], position: u64) -> Result<(), FileError> {
        match self.file.read_exact_at(into, position) {
            Ok(()) => Ok(()),
            Err(error) if error.kind() == io::ErrorKind::UnexpectedEof => {
                Err(FileError::Truncated { position })
            }
            Err(source) => Err(self.failed(source)),
        }
    }

    fn failed(&self, source: io::Error) -> FileError {
        FileError::Read {
            path: self.path.clone(),
            source,
        }
    }

    /// Keeps the first error of the file, and ends all reading: what a channel makes of it says less.
    fn fail(&self, error: FileError) -> io::Error {
        let words = error.to_string();
        self.lock().error.get_or_insert(error);
        self.stop();
        io::Error::other(words)
    }
}

impl Place {
    fn of(chunk: &Chunk, position: u64) -> Self {
        Self {
            position,
            // At most CHUNK_MAX.
            length: u32::try_from(chunk.length).unwrap_or(u32::MAX),
            crc: chunk.crc,
        }
    }
}

/// One channel of a save file.
#[derive(Debug)]
pub(crate) struct FileChannel {
    saved: Arc<SavedChannels>,
    number: usize,
    /// Of the one thread that reads the channel.
    chunk: Mutex<Current>,
}

/// A chunk that was checked, and how much of it was read.
#[derive(Debug, Default)]
struct Current {
    bytes: Vec<u8>,
    read: usize,
}

impl FileChannel {
    fn current(&self) -> MutexGuard<'_, Current> {
        self.chunk.lock().unwrap_or_else(PoisonError::into_inner)
    }

    /// Makes sure that there are bytes to be read; false if none came until `deadline`.
    fn load(&self, current: &mut Current, deadline: Option<Instant>) -> io::Result<bool> {
        if current.read < current.bytes.len() {
            return Ok(true);
        }
        let next = self.saved.next_place(self.number, deadline);
        match next.map_err(|error| self.saved.fail(error))? {
            Turn::Chunk(place) => {
                current.read = 0;
                let taken = self.saved.take_chunk(place, &mut current.bytes);
                taken.map_err(|error| self.saved.fail(error))?;
                Ok(true)
            }
            Turn::Wait => Ok(false),
            Turn::End => {
                *current = Current::default();
                Ok(true)
            }
        }
    }

    /// Reads what there is into `buffer`; 0 at the end of the channel.
    pub(crate) fn read_some(&self, buffer: &mut [u8]) -> io::Result<usize> {
        let mut current = self.current();
        self.load(&mut current, None)?;
        let unread = &current.bytes[current.read..];
        let length = unread.len().min(buffer.len());
        buffer[..length].copy_from_slice(&unread[..length]);
        current.read += length;
        Ok(length)
    }

    /// Hands the next `length` bytes to `each`, in as many pieces as they lie in.
    pub(crate) fn read_pieces(&self, length: usize, mut each: impl FnMut(&[u8])) -> io::Result<()> {
        let mut current = self.current();
        let mut left = length;
        while left > 0 {
            self.load(&mut current, None)?;
            let unread = &current.bytes[current.read..];
            if unread.is_empty() {
                return Err(io::ErrorKind::UnexpectedEof.into());
            }
            let here = unread.len().min(left);
            each(&unread[..here]);
            current.read += here;
            left -= here;
        }
        Ok(())
    }

    /// Waits until there is something to read, or the channel has ended; false if neither came within `timeout`.
    pub(crate) fn wait_readable(&self, timeout: Duration) -> io::Result<bool> {
        let deadline = Instant::now() + timeout;
        self.load(&mut self.current(), Some(deadline))
    }

    /// Ends the reading of all channels.
    pub(crate) fn stop(&self) {
        self.saved.stop();
    }
}

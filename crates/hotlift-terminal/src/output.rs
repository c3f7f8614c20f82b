//! All that a command says after its start, on standard output and standard error.
//!
//! Whoever reads it may go away (EPIPE, EIO of a closed terminal), stop reading (a full pipe), or have no
//! room (ENOSPC). None of that may end, stop or delay what a command does with a guest. So each stream has
//! a thread of its own that writes, and everybody else only puts text into its queue. A time-out around a
//! write in the caller's thread is not enough: a QEMU that was started writes to the same pipe, and fills
//! it between poll and write. The price is that lines that wait are lost when the process is killed, and
//! that lines of the two streams may change places.

use std::collections::VecDeque;
use std::io;
use std::os::fd::BorrowedFd;
use std::sync::mpsc::{RecvTimeoutError, Sender, channel};
use std::sync::{Arc, Condvar, LazyLock, Mutex, MutexGuard, PoisonError};
use std::thread;
use std::time::{Duration, Instant};

use hotlift::Control;
use hotlift_mem::{lock, stdout_was_closed};
use rustix::event::{PollFd, PollFlags, poll};
use rustix::io::Errno;

/// Bytes of progress that may wait: some screens full. More says nothing new.
const WAITING_PROGRESS: usize = 16 << 10;

/// Bytes of messages that may wait: a command says a few kilobytes, a guest's serial port any number.
const WAITING_MESSAGES: usize = 1 << 20;

/// Written at a time, so that a slow reader is told from one that has stopped (`PIPE_BUF`).
const CHUNK: usize = 4096;

/// How long the result of a command waits for a reader that takes nothing.
const RESULT: Duration = Duration::from_secs(10);

/// How long the end of the process waits for one.
const LAST_WORDS: Duration = Duration::from_secs(2);

/// How long a panic waits for one: it may be in a thread that a guest waits for.
const PANIC: Duration = Duration::from_millis(500);

/// How often it is looked whether a reader takes anything.
const LOOK: Duration = Duration::from_millis(20);

static STDOUT: LazyLock<Stream> =
    LazyLock::new(|| Stream::start("stdout", rustix::stdio::stdout()));
static STDERR: LazyLock<Stream> =
    LazyLock::new(|| Stream::start("stderr", rustix::stdio::stderr()));

/// Says a line on standard output, if somebody reads it.
#[macro_export]
macro_rules! say {
    ($($text:tt)*) => { $crate::output::out(&format!($($text)*)) };
}

/// Says a line on standard error, if somebody reads it.
#[macro_export]
macro_rules! complain {
    ($($text:tt)*) => { $crate::output::err(&format!($($text)*)) };
}

pub use crate::{complain, say};

/// Says which connections a migration has turned away, if there were any.
pub fn say_turned_away(control: &Control) {
    for (why, count) in control.turned_away() {
        let what = if count == 1 {
            "connection was"
        } else {
            "connections were"
        };
        complain!("hotlift: {count} {what} turned away: {why}");
    }
}

/// A line on standard output, if somebody reads it.
pub fn out(line: &str) {
    STDOUT.put(format!("{line}\n"), WAITING_MESSAGES, None);
}

/// A line on standard error, if somebody reads it.
pub fn err(line: &str) {
    STDERR.put(format!("{line}\n"), WAITING_MESSAGES, None);
}

/// Progress on standard error, as it is; left out if what was said before still waits to be read.
pub fn progress(text: &str) {
    STDERR.put(text.to_owned(), WAITING_PROGRESS, None);
}

/// The same as a line on standard output.
pub fn progress_line(line: &str) {
    STDOUT.put(format!("{line}\n"), WAITING_PROGRESS, None);
}

/// The result of a command, a line on standard output or many. Returns when it is written.
///
/// # Errors
/// The system's reason; [`io::ErrorKind::TimedOut`] if the reader takes nothing for 10 s.
pub fn result(text: &str) -> io::Result<()> {
    check()?;
    let (done, is_done) = channel();
    STDOUT.put(format!("{text}\n"), usize::MAX, Some(done));
    loop {
        match is_done.recv_timeout(LOOK) {
            Ok(outcome) => return outcome,
            Err(RecvTimeoutError::Timeout) if STDOUT.stands_still(RESULT) => {
                return Err(io::Error::new(
                    io::ErrorKind::TimedOut,
                    "nobody reads standard output",
                ));
            }
            Err(RecvTimeoutError::Timeout) => {}
            Err(RecvTimeoutError::Disconnected) => {
                return Err(io::Error::other("no thread to write it"));
            }
        }
    }
}

/// Checks that the process was started with a standard output. Rust's runtime puts /dev/null in its place, which takes all.
///
/// # Errors
/// That of a write to a closed descriptor.
pub fn check() -> io::Result<()> {
    match stdout_was_closed() {
        true => Err(Errno::BADF.into()),
        false => Ok(()),
    }
}

/// Waits until all is written, or nobody reads it. To be called before the process ends.
pub fn finish() {
    drain(LAST_WORDS);
}

/// Says panics here, too: the default way blocks on a pipe that nobody reads.
pub fn take_panics() {
    std::panic::set_hook(Box::new(|panic| {
        let thread = thread::current();
        let name = thread.name().unwrap_or("without name");
        err(&format!("thread '{name}' {panic}"));
        // The process may end without `finish`.
        drain(PANIC);
    }));
}

fn drain(patience: Duration) {
    for stream in [&STDOUT, &STDERR] {
        while !stream.is_empty() && !stream.stands_still(patience) {
            thread::sleep(LOOK.min(patience / 10));
        }
    }
}

/// One of the two, with the thread that writes it.
struct Stream(Arc<Shared>);

struct Shared {
    queue: Mutex<Queue>,
    filled: Condvar,
}

struct Queue {
    texts: VecDeque<Text>,
    /// Of `texts`.
    bytes: usize,
    /// The thread has taken a text that is not written yet.
    is_writing: bool,
    /// When the reader last took something, or there was nothing to take.
    moved: Instant,
    /// There is a thread.
    is_served: bool,
}

struct Text {
    bytes: Vec<u8>,
    done: Option<Sender<io::Result<()>>>,
}

impl Shared {
    fn lock(&self) -> MutexGuard<'_, Queue> {
        lock(&self.queue)
    }
}

impl Stream {
    fn start(name: &str, to: BorrowedFd<'static>) -> Self {
        let shared = Arc::new(Shared {
            queue: Mutex::new(Queue {
                texts: VecDeque::new(),
                bytes: 0,
                is_writing: false,
                moved: Instant::now(),
                is_served: true,
            }),
            filled: Condvar::new(),
        });
        let of_thread = Arc::clone(&shared);
        let thread = thread::Builder::new().name(name.to_owned());
        if thread.spawn(move || of_thread.serve(to)).is_err() {
            shared.lock().is_served = false;
        }
        Self(shared)
    }

    /// Puts `text` into the queue, unless more than `limit` bytes wait there.
    fn put(&self, text: String, limit: usize, done: Option<Sender<io::Result<()>>>) {
        let mut queue = self.0.lock();
        if queue.bytes > limit || !queue.is_served {
            return;
        }
        if queue.is_empty() {
            queue.moved = Instant::now();
        }
        queue.bytes += text.len();
        queue.texts.push_back(Text {
            bytes: text.into_bytes(),
            done,
        });
        self.0.filled.notify_one();
    }

    fn is_empty(&self) -> bool {
        self.0.lock().is_empty()
    }

    /// True if the reader has taken nothing for `time`.
    fn stands_still(&self, time: Duration) -> bool {
        self.0.lock().moved.elapsed() >= time
    }
}

impl Queue {
    fn is_empty(&self) -> bool {
        self.texts.is_empty() && !self.is_writing
    }
}

impl Shared {
    /// Writes what comes, for ever.
    fn serve(&self, to: BorrowedFd<'_>) {
        loop {
            let mut queue = self.lock();
            let text = loop {
                match queue.texts.pop_front() {
                    Some(text) => break text,
                    None => {
                        queue = self
                            .filled
                            .wait(queue)
                            .unwrap_or_else(PoisonError::into_inner);
                    }
                }
            };
            queue.bytes -= text.bytes.len();
            queue.is_writing = true;
            drop(queue);
            let outcome = self.write(to, &text.bytes);
            let mut queue = self.lock();
            queue.is_writing = false;
            queue.moved = Instant::now();
            drop(queue);
            if let Some(done) = text.done {
                // Whoever waits may have lost patience.
                let _ = done.send(outcome);
            }
        }
    }

    /// What cannot be written is lost; what follows is tried again, for a full disk may get room.
    fn write(&self, to: BorrowedFd<'_>, bytes: &[u8]) -> io::Result<()> {
        let mut left = bytes;
        while !left.is_empty() {
            match rustix::io::write(to, &left[..left.len().min(CHUNK)]) {
                Ok(0) => return Err(io::ErrorKind::WriteZero.into()),
                Ok(count) => {
                    left = &left[count..];
                    self.lock().moved = Instant::now();
                }
                Err(Errno::INTR) => {}
                // Somebody else who has this terminal or pipe has made it non-blocking.
                Err(Errno::AGAIN) => {
                    let _ = poll(&mut [PollFd::from_borrowed_fd(to, PollFlags::OUT)], None);
                }
                Err(error) => return Err(error.into()),
            }
        }
        Ok(())
    }
}

#[cfg(test)]
mod tests {
    use super::*;
    use std::io::Read;
    use std::os::fd::{AsFd, OwnedFd};

    /// A stream into a pipe, and the pipe's end. The write end is never closed, as a process's is not.
    fn piped() -> (Stream, OwnedFd) {
        let (reader, writer) = rustix::pipe::pipe().expect("a pipe");
        let writer: &'static OwnedFd = Box::leak(Box::new(writer));
        (Stream::start("test", writer.as_fd()), reader)
    }

    #[test]
    fn a_reader_that_takes_nothing_holds_nobody_up_and_the_queue_is_bounded() {
        let (stream, reader) = piped();
        for _ in 0..100_000 {
            stream.put("progress\n".to_owned(), WAITING_PROGRESS, None);
        }
        assert!(stream.0.lock().bytes <= WAITING_PROGRESS + CHUNK);
        // A message is not left out for all the progress before it.
        stream.put("message\n".to_owned(), WAITING_MESSAGES, None);
        let mut said = String::new();
        let mut reader = std::fs::File::from(reader);
        while !said.ends_with("message\n") {
            let mut chunk = [0; 4096];
            let length = reader.read(&mut chunk).expect("it is open");
            said.push_str(std::str::from_utf8(&chunk[..length]).expect("text"));
        }
    }

    #[test]
    fn a_reader_that_has_gone_is_an_error_of_the_result_and_nothing_else() {
        let (stream, reader) = piped();
        drop(reader);
        stream.put("message\n".to_owned(), WAITING_MESSAGES, None);
        let (done, is_done) = channel();
        stream.put("result\n".to_owned(), usize::MAX, Some(done));
        let outcome = is_done.recv().expect("the thread lives");
        assert_eq!(
            outcome.expect_err("nobody reads").kind(),
            io::ErrorKind::BrokenPipe
        );
    }
}

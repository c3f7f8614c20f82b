//! Output of a running command on standard output and standard error, which never blocks the threads that handle a guest.
//!
//! The reader of the output can disappear (EPIPE, or EIO of a closed terminal), stop reading (a full pipe), or have no space
//! (ENOSPC). None of these may end, stop or delay the handling of a guest. So each stream has a thread that writes, and all
//! other threads only queue text.
//!
//! A write with a timeout in the calling thread would not suffice: a QEMU that this command started writes to the same pipe,
//! and can fill it between poll and write. The disadvantages: queued lines are lost if the process is killed, and lines of the
//! two streams can change their order.

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

/// Maximum size of queued progress, in bytes: a few screens. Older progress is of no use.
const WAITING_PROGRESS: usize = 16 << 10;

/// Maximum size of queued messages, in bytes. A command prints a few kilobytes; the serial port of a guest has no limit.
const WAITING_MESSAGES: usize = 1 << 20;

/// Maximum number of bytes in one write (`PIPE_BUF`). The number is small: a slow reader must not look like a reader that reads
/// nothing.
const CHUNK: usize = 4096;

/// Maximum time without progress for the result of a command: the reader reads no byte.
const RESULT: Duration = Duration::from_secs(10);

/// Maximum time without progress for queued output at the end of the process.
const FINAL_WRITE_TIMEOUT: Duration = Duration::from_secs(2);

/// Maximum time without progress for the message of a panic: a guest may wait for the thread that panics.
const PANIC: Duration = Duration::from_millis(500);

/// Interval between checks that the reader still reads.
const POLL_INTERVAL: Duration = Duration::from_millis(20);

static STDOUT: LazyLock<Stream> =
    LazyLock::new(|| Stream::start("stdout", rustix::stdio::stdout()));
static STDERR: LazyLock<Stream> =
    LazyLock::new(|| Stream::start("stderr", rustix::stdio::stderr()));

/// Prints a line on standard output, without waiting. If the reader is gone or does not read, the line is lost.
#[macro_export]
macro_rules! print_line {
    ($($text:tt)*) => { $crate::output::out(&format!($($text)*)) };
}

/// Prints a line on standard error, without waiting. If the reader is gone or does not read, the line is lost.
#[macro_export]
macro_rules! warn {
    ($($text:tt)*) => { $crate::output::err(&format!($($text)*)) };
}

pub use crate::{print_line, warn};

/// Prints a summary of the connections that a migration has refused; nothing if there are none.
pub fn print_rejected_connections(control: &Control) {
    for (why, count) in control.rejected_connections() {
        let what = if count == 1 {
            "connection was"
        } else {
            "connections were"
        };
        warn!("hotlift: {count} {what} refused: {why}");
    }
}

/// Prints a line on standard output, without waiting. If the reader is gone or does not read, the line is lost.
pub fn out(line: &str) {
    STDOUT.put(format!("{line}\n"), WAITING_MESSAGES, None);
}

/// Prints a line on standard error, without waiting. If the reader is gone or does not read, the line is lost.
pub fn err(line: &str) {
    STDERR.put(format!("{line}\n"), WAITING_MESSAGES, None);
}

/// Prints progress on standard error unchanged. Drops it if more than `WAITING_PROGRESS` bytes are queued.
pub fn progress(text: &str) {
    STDERR.put(text.to_owned(), WAITING_PROGRESS, None);
}

/// Prints progress as a line on standard output. Drops it if more than `WAITING_PROGRESS` bytes are queued.
pub fn progress_line(line: &str) {
    STDOUT.put(format!("{line}\n"), WAITING_PROGRESS, None);
}

/// Prints the result of a command, one or more lines, on standard output. Returns after it was written.
///
/// # Errors
/// The system's error; [`io::ErrorKind::TimedOut`] if the reader reads nothing for 10 s.
pub fn result(text: &str) -> io::Result<()> {
    check()?;
    let (done, is_done) = channel();
    STDOUT.put(format!("{text}\n"), usize::MAX, Some(done));
    loop {
        match is_done.recv_timeout(POLL_INTERVAL) {
            Ok(outcome) => return outcome,
            Err(RecvTimeoutError::Timeout) if STDOUT.is_stalled(RESULT) => {
                return Err(io::Error::new(
                    io::ErrorKind::TimedOut,
                    "the reader of standard output reads nothing",
                ));
            }
            Err(RecvTimeoutError::Timeout) => {}
            Err(RecvTimeoutError::Disconnected) => {
                return Err(io::Error::other("the thread that writes it has ended"));
            }
        }
    }
}

/// Checks that the process was started with an open standard output. Rust's runtime replaces a closed one by /dev/null.
///
/// # Errors
/// EBADF, as a write to a closed descriptor would return.
pub fn check() -> io::Result<()> {
    match stdout_was_closed() {
        true => Err(Errno::BADF.into()),
        false => Ok(()),
    }
}

/// Waits until all output was written, or the reader has read nothing for 2 s. Must be called before the process ends.
pub fn finish() {
    drain(FINAL_WRITE_TIMEOUT);
}

/// Prints the messages of panics through this module. The default panic hook would block if the reader of a pipe does not read.
pub fn take_panics() {
    std::panic::set_hook(Box::new(|panic| {
        let thread = thread::current();
        let name = thread.name().unwrap_or("without name");
        err(&format!("thread '{name}' {panic}"));
        // The process may end without a call of `finish`.
        drain(PANIC);
    }));
}

fn drain(timeout: Duration) {
    for stream in [&STDOUT, &STDERR] {
        while !stream.is_empty() && !stream.is_stalled(timeout) {
            thread::sleep(POLL_INTERVAL.min(timeout / 10));
        }
    }
}

/// Standard output or standard error, with its writer thread.
struct Stream(Arc<Shared>);

struct Shared {
    queue: Mutex<Queue>,
    filled: Condvar,
}

struct Queue {
    texts: VecDeque<Text>,
    /// Total size of `texts` in bytes.
    bytes: usize,
    /// True while the writer thread writes a text that it has removed from the queue.
    is_writing: bool,
    /// Time of the last write, or of the last text that was queued into an empty queue.
    moved: Instant,
    /// True if the writer thread was started.
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

    /// Queues `text`. Drops it if more than `limit` bytes are queued, or no writer thread exists. `done` receives the result of
    /// the write.
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

    /// Returns true if the reader has read nothing for `time`.
    fn is_stalled(&self, time: Duration) -> bool {
        self.0.lock().moved.elapsed() >= time
    }
}

impl Queue {
    fn is_empty(&self) -> bool {
        self.texts.is_empty() && !self.is_writing
    }
}

impl Shared {
    /// Writes the queued texts in a loop that never ends.
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
                // The caller may have stopped waiting after its timeout.
                let _ = done.send(outcome);
            }
        }
    }

    /// Writes `bytes`. Bytes that cannot be written are lost. Later texts are tried again, because a full disk may have space
    /// later.
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
                // Another process that uses the same terminal or pipe has made it non-blocking.
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

    /// Returns a stream that writes into a pipe, and the read end of the pipe. The write end is never closed, as in a process.
    fn piped() -> (Stream, OwnedFd) {
        let (reader, writer) = rustix::pipe::pipe().expect("a pipe");
        let writer: &'static OwnedFd = Box::leak(Box::new(writer));
        (Stream::start("test", writer.as_fd()), reader)
    }

    #[test]
    fn a_stalled_reader_blocks_no_writer_and_the_queue_is_bounded() {
        let (stream, reader) = piped();
        for _ in 0..100_000 {
            stream.put("progress\n".to_owned(), WAITING_PROGRESS, None);
        }
        assert!(stream.0.lock().bytes <= WAITING_PROGRESS + CHUNK);
        // Queued progress must not cause a message to be dropped.
        stream.put("message\n".to_owned(), WAITING_MESSAGES, None);
        let mut output = String::new();
        let mut reader = std::fs::File::from(reader);
        while !output.ends_with("message\n") {
            let mut chunk = [0; 4096];
            let length = reader.read(&mut chunk).expect("it is open");
            output.push_str(std::str::from_utf8(&chunk[..length]).expect("text"));
        }
    }

    #[test]
    fn a_closed_reader_is_an_error_only_for_the_result() {
        let (stream, reader) = piped();
        drop(reader);
        stream.put("message\n".to_owned(), WAITING_MESSAGES, None);
        let (done, is_done) = channel();
        stream.put("result\n".to_owned(), usize::MAX, Some(done));
        let outcome = is_done.recv().expect("the thread lives");
        assert_eq!(
            outcome.expect_err("no process reads").kind(),
            io::ErrorKind::BrokenPipe
        );
    }
}

//! A log file that a QEMU shares with other writers: finds the parts that this QEMU wrote.
//!
//! A line does not identify its writer: two QEMUs with the same name may share a log. So QEMU gets its own open file
//! description. Its position is the end of QEMU's last write. Everything appended between the last check and this position
//! counts as QEMU's output. A check follows each write (inotify), so only lines that other processes write at the same moment
//! are mistaken for QEMU's.

use hotlift_mem::{lock, wait_readable};
use std::fs::{File, OpenOptions};
use std::io::{self, Seek};
use std::ops::Range;
use std::os::unix::fs::FileExt;
use std::path::Path;
use std::sync::{Arc, Mutex, Weak};
use std::thread;
use std::time::{Duration, Instant};

use rustix::fd::{AsFd, OwnedFd};
use rustix::fs::inotify;

/// Interval between checks that the log file is still used by this process.
const POLL_INTERVAL: Duration = Duration::from_secs(1);

/// Maximum number of remembered parts of the file. The last parts are kept, since only QEMU's last errors are needed.
const PARTS: usize = 64;

/// Maximum number of bytes read from each part, at its end.
const PART: u64 = 16 << 10;

/// A log file to which QEMU and other processes write.
#[derive(Debug)]
pub struct LogFile {
    /// QEMU's open file description.
    file: File,
    seen: Mutex<Seen>,
}

#[derive(Debug, Default)]
struct Seen {
    /// Length of the file at the last check, in bytes.
    end: u64,
    /// File position after QEMU's last write, in bytes.
    position: u64,
    /// Parts of the file that QEMU wrote, in order.
    parts: Vec<Range<u64>>,
}

impl LogFile {
    /// Opens the log at `path`. Its present content does not count as QEMU's output.
    pub fn open(path: &Path) -> io::Result<Arc<Self>> {
        let file = OpenOptions::new().read(true).append(true).open(path)?;
        let seen = Seen {
            end: file.metadata()?.len(),
            ..Seen::default()
        };
        let log = Arc::new(Self {
            file,
            seen: Mutex::new(seen),
        });
        // If the watch fails, only the final check remains. Then all new lines before QEMU's last one count as QEMU's.
        let _ = watch(path, Arc::downgrade(&log));
        Ok(log)
    }

    /// Duplicates the open file description, as QEMU's output.
    pub fn for_qemu(&self) -> io::Result<File> {
        self.file.try_clone()
    }

    /// Returns QEMU's output, as far as its parts are remembered.
    pub fn written(&self) -> Vec<u8> {
        self.poll();
        let seen = lock(&self.seen);
        let mut written = Vec::new();
        for part in &seen.parts {
            let length = (part.end - part.start).min(PART);
            let mut bytes = vec![0; usize::try_from(length).unwrap_or(0)];
            // If another process has truncated the file, fewer bytes are read.
            let read = self.file.read_at(&mut bytes, part.end - length);
            written.extend_from_slice(&bytes[..read.unwrap_or(0)]);
        }
        written
    }

    /// Determines which of the bytes appended since the last check QEMU wrote.
    fn poll(&self) {
        let mut seen = lock(&self.seen);
        // The length is read before the position: bytes that QEMU appends in between are then found by the position.
        let Ok(end) = self.file.metadata().map(|file| file.len()) else {
            return;
        };
        let Ok(position) = (&self.file).stream_position() else {
            return;
        };
        if end < seen.end {
            // Another process has truncated the file; the writer of its new content is unknown.
            *seen = Seen {
                end,
                position,
                parts: Vec::new(),
            };
            return;
        }
        if position == seen.position {
            seen.end = end;
            return;
        }
        if position > seen.end {
            let start = seen.end;
            match seen.parts.last_mut() {
                Some(last) if last.end == start => last.end = position,
                _ => seen.parts.push(start..position),
            }
            let surplus = seen.parts.len().saturating_sub(PARTS);
            seen.parts.drain(..surplus);
        }
        seen.position = position;
        seen.end = end.max(position);
    }
}

/// Starts a thread that checks the log after each write to the file at `path`. The thread ends when `log` has no owner.
fn watch(path: &Path, log: Weak<LogFile>) -> io::Result<()> {
    let events = inotify::init(inotify::CreateFlags::CLOEXEC)?;
    inotify::add_watch(&events, path, inotify::WatchFlags::MODIFY)?;
    thread::Builder::new()
        .name("qemu/log".to_owned())
        .spawn(move || while next(&events, &log).is_some() {})?;
    Ok(())
}

/// Waits for further writes, and checks the file. Returns `None` if the log has no owner.
fn next(events: &OwnedFd, log: &Weak<LogFile>) -> Option<()> {
    let has_written = wait_readable(&[events.as_fd()], Some(Instant::now() + POLL_INTERVAL));
    let log = log.upgrade()?;
    if has_written {
        // The events are discarded: only their arrival matters.
        rustix::io::read(events, &mut [0_u8; 4096]).ok()?;
        log.poll();
    }
    Some(())
}

#[cfg(test)]
mod tests {
    use std::io::Write;

    use super::*;

    /// Opens a log without the watching thread, so that a test decides when to check.
    fn unwatched(path: &Path) -> LogFile {
        let file = OpenOptions::new().read(true).append(true).open(path);
        let file = file.unwrap();
        let end = file.metadata().unwrap().len();
        LogFile {
            file,
            seen: Mutex::new(Seen {
                end,
                ..Seen::default()
            }),
        }
    }

    #[test]
    fn lines_of_other_writers_of_the_log_are_not_taken_for_qemus() {
        let mut others = tempfile::NamedTempFile::new().unwrap();
        others.write_all(b"of before\n").unwrap();
        let log = unwatched(others.path());
        let mut qemu = log.for_qemu().unwrap();
        assert_eq!(log.written(), b"");
        let mut others = OpenOptions::new().append(true).open(others.path()).unwrap();
        for turn in 0..3 {
            writeln!(others, "another's {turn}").unwrap();
            log.poll();
            writeln!(qemu, "own {turn}").unwrap();
            log.poll();
        }
        writeln!(others, "another's after the end").unwrap();
        assert_eq!(log.written(), b"own 0\nown 1\nown 2\n");
    }

    #[test]
    fn a_line_in_pieces_is_whole_though_others_write_between_them() {
        let others = tempfile::NamedTempFile::new().unwrap();
        let log = unwatched(others.path());
        let mut qemu = log.for_qemu().unwrap();
        let mut others = OpenOptions::new().append(true).open(others.path()).unwrap();
        qemu.write_all(b"qemu: ").unwrap();
        log.poll();
        others.write_all(b"another's\n").unwrap();
        log.poll();
        qemu.write_all(b"why\n").unwrap();
        assert_eq!(log.written(), b"qemu: why\n");
    }

    #[test]
    fn each_write_is_checked() {
        let others = tempfile::NamedTempFile::new().unwrap();
        let log = LogFile::open(others.path()).unwrap();
        let mut qemu = log.for_qemu().unwrap();
        let mut others = OpenOptions::new().append(true).open(others.path()).unwrap();
        others.write_all(b"another's\n").unwrap();
        let deadline = Instant::now() + Duration::from_secs(60);
        while log.seen.lock().unwrap().end == 0 {
            assert!(Instant::now() < deadline, "no check is due");
            thread::yield_now();
        }
        qemu.write_all(b"own\n").unwrap();
        assert_eq!(log.written(), b"own\n");
    }

    #[test]
    fn a_log_that_was_emptied_is_read_from_its_new_start() {
        let file = tempfile::NamedTempFile::new().unwrap();
        let log = unwatched(file.path());
        let mut qemu = log.for_qemu().unwrap();
        qemu.write_all(b"long before\n").unwrap();
        log.poll();
        file.as_file().set_len(0).unwrap();
        log.poll();
        let mut others = OpenOptions::new().append(true).open(file.path()).unwrap();
        others.write_all(b"another's\n").unwrap();
        log.poll();
        qemu.write_all(b"own\n").unwrap();
        assert_eq!(log.written(), b"own\n");
    }
}

//! Standard output and standard error of a QEMU that this process has started. The output is shown, and its errors are kept for
//! messages to the source.

use std::collections::VecDeque;
use std::io::{self, BufRead, BufReader, PipeReader, Read};
use std::path::Path;
use std::process::Stdio;
use std::sync::mpsc::{Receiver, channel};
use std::sync::{Arc, Mutex};
use std::thread;
use std::time::Duration;

use hotlift_qmp::one_line;
use rustix::fs::{FileType, OFlags, fcntl_getfl, fcntl_setfl, fstat};

use crate::log_file::LogFile;
use hotlift_mem::lock;

/// Standard error of this process, as a path.
const STDERR: &str = "/proc/self/fd/2";

/// Longest wait for the remaining output of a QEMU that has ended.
const DRAIN: Duration = Duration::from_secs(1);

/// Maximum length of a line of QEMU's output; a longer one is split.
const LINE: u64 = 4096;

/// Number of kept errors, the last ones. For one failure QEMU prints an error for each aborted step.
const KEPT: usize = 4;

/// Output streams of QEMU, and the capture of its errors.
pub struct Streams {
    pub stdout: Stdio,
    pub stderr: Stdio,
    pub errors: ErrorOutput,
}

/// Captured standard error of a QEMU.
#[derive(Debug)]
pub struct ErrorOutput(Captured);

#[derive(Debug)]
enum Captured {
    /// A thread of this command forwards QEMU's output to its own stderr. After the command, the output is lost.
    PassedOn {
        errors: Arc<Mutex<Errors>>,
        /// Channel that is disconnected when all output was forwarded.
        is_done: Receiver<()>,
    },
    /// QEMU writes to the file that is this command's stderr.
    Logged(Arc<LogFile>),
    /// The output is not captured.
    Nothing,
}

impl Streams {
    /// Creates the streams:
    ///
    /// - If this command's stderr is a file, QEMU writes to the file, even after this command.
    /// - If it is a pipe or a socket, this command forwards QEMU's output. The reader of a pipe waits for the last writer,
    ///   which would otherwise be QEMU.
    /// - If it is a terminal, only QEMU's stderr is forwarded.
    pub fn make() -> io::Result<Self> {
        let kind = fstat(io::stderr()).map(|status| FileType::from_raw_mode(status.st_mode));
        if let Ok(FileType::RegularFile) = kind {
            return Ok(Self::logged().unwrap_or_else(|_| Self {
                stdout: io::stderr().into(),
                stderr: Stdio::inherit(),
                errors: ErrorOutput(Captured::Nothing),
            }));
        }
        let (reader, writer) = io::pipe()?;
        let stdout = match kind {
            Ok(FileType::Fifo | FileType::Socket) => writer.try_clone()?.into(),
            _ => io::stderr().into(),
        };
        Ok(Self {
            stdout,
            stderr: writer.into(),
            errors: ErrorOutput(pass_on(reader)),
        })
    }

    /// Creates streams that write to the file that is this command's stderr.
    fn logged() -> io::Result<Self> {
        let log = LogFile::open(Path::new(STDERR))?;
        let (stdout, stderr) = (log.for_qemu()?, log.for_qemu()?);
        // QEMU's open file description has its own position. Without O_APPEND this command would overwrite QEMU's lines.
        let flags = fcntl_getfl(io::stderr())?;
        fcntl_setfl(io::stderr(), flags | OFlags::APPEND)?;
        Ok(Self {
            stdout: stdout.into(),
            stderr: stderr.into(),
            errors: ErrorOutput(Captured::Logged(log)),
        })
    }
}

impl ErrorOutput {
    /// Waits up to a second until all output of a QEMU that has ended was forwarded.
    pub fn finish(&self) {
        if let Captured::PassedOn { is_done, .. } = &self.0 {
            let _ = is_done.recv_timeout(DRAIN);
        }
    }

    /// Returns the last errors of a QEMU that has ended, in one line; `None` if it printed none.
    pub fn last(&self) -> Option<String> {
        self.finish();
        let mut found = Errors::default();
        let errors = match &self.0 {
            Captured::PassedOn { errors, .. } => lock(errors).line(),
            Captured::Logged(log) => {
                for line in String::from_utf8_lossy(&log.written()).lines() {
                    found.take(line);
                }
                found.line()
            }
            Captured::Nothing => String::new(),
        };
        (!errors.is_empty()).then_some(errors)
    }
}

/// The last errors in QEMU's output.
#[derive(Debug, Default)]
struct Errors(VecDeque<String>);

impl Errors {
    /// Keeps `line` if it is an error: QEMU's name, a colon, and a text that is not a warning. With `-msg timestamp=on` a time
    /// stamp precedes the name.
    fn take(&mut self, line: &str) {
        let Some((name, message)) = without_timestamp(line).split_once(": ") else {
            return;
        };
        let is_error = name.starts_with("qemu")
            && !name.contains(' ')
            && !message.starts_with("warning: ")
            && !message.starts_with("info: ");
        if is_error {
            if self.0.len() == KEPT {
                self.0.pop_front();
            }
            self.0.push_back(message.trim_end().to_owned());
        }
    }

    fn line(&self) -> String {
        let all: Vec<_> = self.0.iter().map(String::as_str).collect();
        one_line(&all.join("; "))
    }
}

/// Removes the time stamp of `-msg timestamp=on` from a line, such as `2026-11-23T05:16:37.123456Z`.
fn without_timestamp(line: &str) -> &str {
    const SECONDS: &[u8] = b"0000-00-00T00:00:00";
    let Some((stamp, rest)) = line.split_once(' ') else {
        return line;
    };
    let mut pairs = stamp.bytes().zip(SECONDS);
    let is_stamp = stamp.len() > SECONDS.len()
        && stamp.ends_with('Z')
        && pairs.all(|(byte, like)| match like {
            b'0' => byte.is_ascii_digit(),
            like => byte == *like,
        });
    if is_stamp { rest } else { line }
}

/// Starts a thread that copies QEMU's output to standard error line by line. The thread reads on even if a write fails.
fn pass_on(output: PipeReader) -> Captured {
    let (done, is_done) = channel();
    let errors = Arc::<Mutex<Errors>>::default();
    let kept = Arc::clone(&errors);
    thread::spawn(move || {
        // Dropped at the end of the output, which reports that everything was forwarded.
        let _done = done;
        let mut output = BufReader::new(output);
        let mut line = Vec::new();
        while matches!(
            output.by_ref().take(LINE).read_until(b'\n', &mut line),
            Ok(1..)
        ) {
            let text = String::from_utf8_lossy(&line);
            let text = text.trim_end_matches('\n');
            lock(&kept).take(text);
            hotlift_terminal::output::err(text);
            line.clear();
        }
    });
    Captured::PassedOn { errors, is_done }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn the_last_errors_of_a_qemu_are_kept_and_nothing_else() {
        let mut errors = Errors::default();
        for line in [
            "qemu-system-x86_64: gone: too long ago",
            "qemu-system-x86_64: warning: TCG doesn't support it",
            "Linux version 6.1: a guest's console",
            "hotlift: an error of ours",
            "qemu-system-x86_64: Size mismatch: pc.ram",
            "qemu-kvm: error while loading state\u{1b}[2J\r",
            "qemu-system-x86_64: load failed",
            "qemu-system-x86_64: Input/output error",
        ] {
            errors.take(line);
        }
        assert_eq!(
            errors.line(),
            "Size mismatch: pc.ram; error while loading state [2J; load failed; Input/output error"
        );
    }

    #[test]
    fn errors_with_a_time_stamp_are_found() {
        let mut errors = Errors::default();
        for line in [
            "2026-11-23T05:16:37.123456Z qemu-system-x86_64: load of migration failed",
            "2026-11-23T05:16:37Z qemu-kvm: and why",
            "2026-11-23T05:16:37.123456Z qemu-system-x86_64: warning: TCG doesn't support it",
            "2026-11-23 qemu-system-x86_64: of a guest's console",
            "2026-11-23T05:16:37.123456Z",
            "Once qemu-system-x86_64: of a guest's console",
        ] {
            errors.take(line);
        }
        assert_eq!(errors.line(), "load of migration failed; and why");
    }

    #[test]
    fn errors_are_found_in_a_file_after_its_earlier_content() {
        let mut file = tempfile::NamedTempFile::new().unwrap();
        io::Write::write_all(&mut file, b"qemu-system-x86_64: of another\n").unwrap();
        let log = LogFile::open(file.path()).unwrap();
        let mut qemu = log.for_qemu().unwrap();
        let errors = ErrorOutput(Captured::Logged(log));
        assert_eq!(errors.last(), None);
        io::Write::write_all(&mut qemu, b"listening\nqemu-system-x86_64: its own\n").unwrap();
        assert_eq!(errors.last().as_deref(), Some("its own"));
    }
}

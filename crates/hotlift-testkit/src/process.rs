//! A child process whose outputs are read, or not read, as the test requires.

use std::fs::{File, OpenOptions};
use std::io::{PipeReader, Read, Write, pipe};
use std::os::fd::AsRawFd;
use std::os::unix::fs::OpenOptionsExt;
use std::os::unix::process::ExitStatusExt;
use std::process::{Child, Command, ExitStatus, Stdio};
use std::sync::atomic::{AtomicU8, Ordering};
use std::sync::{Arc, Mutex, PoisonError};
use std::thread::JoinHandle;
use std::time::{Duration, Instant};

use rustix::event::{PollFd, PollFlags, Timespec, poll};
use rustix::process::{Pid, Signal, kill_process};
use serde::{Deserialize, Serialize};

use crate::error::KitError;
use crate::namespace::Namespace;

/// Interval between two polls of an output, or of the end of a process.
const POLL_INTERVAL: Duration = Duration::from_millis(5);

/// Smallest pipe that Linux allows, in bytes, which is filled quickly.
const PIPE: usize = 4096;

/// Maximum number of output lines kept in memory; the oldest are dropped.
const MAX_LINES: usize = 4000;

/// An output of a process: standard output or standard error.
#[derive(Debug, Clone, Copy, PartialEq, Eq, Serialize, Deserialize)]
#[serde(rename_all = "snake_case")]
pub enum Stream {
    /// Standard output.
    Stdout,
    /// Standard error.
    Stderr,
}

/// Defect of an output of a process.
#[derive(Debug, Clone, Copy, PartialEq, Eq, Serialize, Deserialize)]
#[serde(rename_all = "snake_case")]
pub enum Output {
    /// The reader has closed the pipe.
    Closed,
    /// The pipe is full, and not read any more.
    Full,
    /// The output is the device `/dev/full`, from the start of the process.
    Device,
}

const READING: u8 = 0;
const STANDING: u8 = 1;
const CLOSED: u8 = 2;

/// The thread that reads one output of a process.
#[derive(Debug)]
struct Pump {
    state: Arc<AtomicU8>,
    /// Read end of the pipe, which is also used to fill the pipe; `None` after it was closed.
    reader: Arc<Mutex<Option<PipeReader>>>,
    thread: Option<JoinHandle<()>>,
}

/// A child process. It is killed on drop.
#[derive(Debug)]
pub struct Process {
    name: String,
    child: Child,
    exit: Option<ExitStatus>,
    lines: Arc<Mutex<Vec<String>>>,
    pumps: [Option<Pump>; 2],
}

impl Process {
    /// Starts `command` in `namespace`, or in the namespace of the test process without one. The outputs in `devices`
    /// are `/dev/full`.
    ///
    /// # Errors
    /// If the process cannot be started.
    pub fn start(
        name: &str,
        namespace: Option<&Namespace>,
        mut command: Command,
        devices: &[Stream],
    ) -> Result<Self, KitError> {
        let lines = Arc::new(Mutex::new(Vec::new()));
        let mut pumps = [None, None];
        for (stream, pump) in [Stream::Stdout, Stream::Stderr].into_iter().zip(&mut pumps) {
            let to = if devices.contains(&stream) {
                let device = OpenOptions::new().write(true).open("/dev/full");
                Stdio::from(device.map_err(KitError::system("open /dev/full"))?)
            } else {
                let (reader, writer) = pipe().map_err(KitError::system("make a pipe"))?;
                rustix::pipe::fcntl_setpipe_size(&reader, PIPE)
                    .map_err(|error| KitError::system("shrink a pipe")(error.into()))?;
                *pump = Some(Pump::start(reader, Arc::clone(&lines)));
                Stdio::from(writer)
            };
            match stream {
                Stream::Stdout => command.stdout(to),
                Stream::Stderr => command.stderr(to),
            };
        }
        command.stdin(Stdio::null());
        let spawned = match namespace {
            Some(namespace) => namespace.within(|| command.spawn())?,
            None => command.spawn(),
        };
        Ok(Self {
            name: name.to_owned(),
            child: spawned.map_err(KitError::system(format!("start {name}")))?,
            exit: None,
            lines,
            pumps,
        })
    }

    /// Returns the process ID.
    #[must_use]
    pub fn pid(&self) -> Pid {
        Pid::from_child(&self.child)
    }

    /// Returns the lines of standard output and standard error so far.
    #[must_use]
    pub fn output_lines(&self) -> Vec<String> {
        let lines = self.lines.lock().unwrap_or_else(PoisonError::into_inner);
        lines.clone()
    }

    /// Returns true if an output line so far contains `words`.
    #[must_use]
    pub fn has_printed(&self, words: &str) -> bool {
        let lines = self.lines.lock().unwrap_or_else(PoisonError::into_inner);
        lines.iter().any(|line| line.contains(words))
    }

    /// Waits until an output line contains `words`.
    ///
    /// # Errors
    /// If the process ends first, or `timeout` expires.
    pub fn wait_for(&mut self, words: &str, timeout: Duration) -> Result<(), KitError> {
        let deadline = Instant::now() + timeout;
        while !self.has_printed(words) {
            if self.ended().is_some() || Instant::now() >= deadline {
                // The last output may still be in the pipe.
                std::thread::sleep(POLL_INTERVAL * 4);
                if self.has_printed(words) {
                    break;
                }
                return Err(self.late(&format!("said '{words}'"), timeout));
            }
            std::thread::sleep(POLL_INTERVAL);
        }
        Ok(())
    }

    /// Returns the exit status; `None` if the process still runs.
    pub fn ended(&mut self) -> Option<ExitStatus> {
        if self.exit.is_none() {
            self.exit = self.child.try_wait().ok().flatten();
        }
        self.exit
    }

    /// Returns the exit code, or the negative signal number if a signal ended the process. `None` if the process still
    /// runs.
    pub fn exit_code(&mut self) -> Option<i32> {
        let status = self.ended()?;
        status
            .code()
            .or_else(|| status.signal().map(|signal| -signal))
    }

    /// Waits until the process has ended, and returns its exit status.
    ///
    /// # Errors
    /// If `timeout` expires first.
    pub fn wait(&mut self, timeout: Duration) -> Result<ExitStatus, KitError> {
        let deadline = Instant::now() + timeout;
        loop {
            if let Some(status) = self.ended() {
                return Ok(status);
            }
            if Instant::now() >= deadline {
                return Err(self.late("ended", timeout));
            }
            std::thread::sleep(POLL_INTERVAL);
        }
    }

    /// Waits briefly until the outputs end, because the last output may still be in the pipe.
    pub fn read_last_output(&self) {
        let deadline = Instant::now() + Duration::from_secs(1);
        let reads = |pump: &Pump| {
            pump.state.load(Ordering::SeqCst) == READING
                && pump.thread.as_ref().is_some_and(|one| !one.is_finished())
        };
        while self.pumps.iter().flatten().any(reads) && Instant::now() < deadline {
            std::thread::sleep(POLL_INTERVAL);
        }
    }

    /// Sends `signal` to the process, unless it has ended.
    pub fn signal(&mut self, signal: Signal) {
        if self.ended().is_none() {
            // The process may have ended in the meantime, and is reaped by the next poll.
            let _ = kill_process(self.pid(), signal);
        }
    }

    /// Closes the reader of an output, or stops reading and fills the pipe.
    pub fn spoil(&self, stream: Stream, output: Output) {
        let Some(pump) = &self.pumps[stream as usize] else {
            return;
        };
        match output {
            Output::Closed => pump.state.store(CLOSED, Ordering::SeqCst),
            Output::Full => {
                pump.state.store(STANDING, Ordering::SeqCst);
                pump.fill();
            }
            Output::Device => {}
        }
    }

    /// Reads all outputs again that are not closed.
    pub fn read_on(&self) {
        for pump in self.pumps.iter().flatten() {
            let order = Ordering::SeqCst;
            // A closed output remains closed.
            let _ = pump.state.compare_exchange(STANDING, READING, order, order);
        }
    }

    fn late(&self, what: &str, waited: Duration) -> KitError {
        let lines = self.output_lines();
        KitError::Late {
            process: self.name.clone(),
            what: what.to_owned(),
            waited,
            output: lines[lines.len().saturating_sub(5)..].join(" | "),
        }
    }
}

impl Drop for Process {
    fn drop(&mut self) {
        // The calls fail only if the process has ended.
        let _ = self.child.kill();
        let _ = self.child.wait();
        for pump in self.pumps.iter_mut().flatten() {
            pump.state.store(CLOSED, Ordering::SeqCst);
            if let Some(thread) = pump.thread.take() {
                let _ = thread.join();
            }
        }
    }
}

impl Pump {
    fn start(reader: PipeReader, lines: Arc<Mutex<Vec<String>>>) -> Self {
        let state = Arc::new(AtomicU8::new(READING));
        let reader = Arc::new(Mutex::new(Some(reader)));
        let (its_state, its_reader) = (Arc::clone(&state), Arc::clone(&reader));
        let thread = std::thread::spawn(move || pump(&its_state, &its_reader, &lines));
        Self {
            state,
            reader,
            thread: Some(thread),
        }
    }

    /// Writes to the pipe until the pipe is full.
    fn fill(&self) {
        let reader = self.reader.lock().unwrap_or_else(PoisonError::into_inner);
        let Some(reader) = reader.as_ref() else {
            return;
        };
        let path = format!("/proc/self/fd/{}", reader.as_raw_fd());
        // A separately opened descriptor of the pipe can be nonblocking, while the process's own remains blocking.
        let opened: Result<File, _> = OpenOptions::new()
            .write(true)
            .custom_flags(rustix::fs::OFlags::NONBLOCK.bits().cast_signed())
            .open(path);
        if let Ok(mut writer) = opened {
            for length in [PIPE, 1] {
                while writer.write_all(&vec![b'\n'; length]).is_ok() {}
            }
        }
    }
}

/// Reads lines until the pipe ends or the reader is stopped.
fn pump(state: &AtomicU8, reader: &Mutex<Option<PipeReader>>, lines: &Mutex<Vec<String>>) {
    let mut rest = Vec::new();
    let mut chunk = [0; PIPE];
    loop {
        let mut reader = reader.lock().unwrap_or_else(PoisonError::into_inner);
        // The state is read under the lock. After it becomes `STANDING`, `fill` waits for this lock before it fills the
        // pipe.
        match state.load(Ordering::SeqCst) {
            CLOSED => {
                reader.take();
                return;
            }
            STANDING => {
                drop(reader);
                std::thread::sleep(POLL_INTERVAL);
                continue;
            }
            _ => {}
        }
        let Some(reader) = reader.as_mut() else {
            return;
        };
        let mut fds = [PollFd::new(&*reader, PollFlags::IN)];
        let tick = Timespec {
            tv_sec: 0,
            tv_nsec: 5_000_000,
        };
        if !matches!(poll(&mut fds, Some(&tick)), Ok(1..)) {
            continue;
        }
        match reader.read(&mut chunk) {
            Ok(length @ 1..) => rest.extend_from_slice(&chunk[..length]),
            _ => return,
        }
        while let Some(end) = rest.iter().position(|&byte| byte == b'\n') {
            let line: Vec<u8> = rest.drain(..=end).collect();
            let line = String::from_utf8_lossy(&line).trim_end().to_owned();
            if !line.is_empty() {
                let mut lines = lines.lock().unwrap_or_else(PoisonError::into_inner);
                if lines.len() == MAX_LINES {
                    lines.remove(0);
                }
                lines.push(line);
            }
        }
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    const LONG: Duration = Duration::from_secs(60);

    fn shell(script: &str, devices: &[Stream]) -> Process {
        let mut command = Command::new("sh");
        command.args(["-c", script]);
        Process::start("sh", None, command, devices).unwrap()
    }

    #[test]
    fn what_is_said_is_heard_and_how_it_ends_is_known() {
        let mut process = shell("echo one; echo two >&2; exit 3", &[]);
        process.wait_for("one", LONG).unwrap();
        process.wait_for("two", LONG).unwrap();
        process.wait(LONG).unwrap();
        assert_eq!(process.exit_code(), Some(3));
    }

    #[test]
    fn a_full_pipe_holds_its_writer_until_it_is_read_on() {
        let folder = tempfile::tempdir().unwrap();
        let full = folder.path().join("full");
        let script = format!(
            "echo first; until [ -e {} ]; do sleep 0.01; done; echo second; echo done >&2",
            full.display()
        );
        let mut process = shell(&script, &[]);
        process.wait_for("first", LONG).unwrap();
        process.spoil(Stream::Stdout, Output::Full);
        std::fs::write(full, "").unwrap();
        let held = process.wait_for("done", Duration::from_secs(1));
        assert!(held.is_err(), "it wrote to a full pipe");
        process.read_on();
        process.wait_for("done", LONG).unwrap();
    }

    #[test]
    fn a_closed_pipe_and_a_full_device_refuse_their_writer() {
        let mut process = shell("echo word || exit 7", &[Stream::Stdout]);
        process.wait(LONG).unwrap();
        assert_eq!(process.exit_code(), Some(7));
        let mut process = shell("while :; do echo word; done", &[]);
        process.wait_for("word", LONG).unwrap();
        process.spoil(Stream::Stdout, Output::Closed);
        process.wait(LONG).unwrap();
        assert_eq!(process.exit_code(), Some(-13), "SIGPIPE");
    }
}

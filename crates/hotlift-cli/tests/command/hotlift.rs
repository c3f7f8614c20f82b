//! Runs the `hotlift` command as a user would, and watches what it says.

use std::io::{BufRead, BufReader, Read};
use std::process::{Child, Command, ExitStatus, Stdio};
use std::sync::mpsc::{Receiver, channel};
use std::thread;
use std::time::{Duration, Instant};

/// Longer than anything here takes on a machine that does other things besides.
const DEADLINE: Duration = Duration::from_secs(120);

/// Columns of standard output, with room for all of a table: no line is broken between words that a test looks for.
const COLUMNS: &str = "300";

/// A running `hotlift`, killed when it goes out of scope.
pub struct Hotlift {
    child: Child,
    lines: Receiver<String>,
    pub said: Vec<String>,
}

impl Hotlift {
    /// Starts the command; what it says on either stream can be waited for.
    pub fn start(args: &[&str]) -> Self {
        Self::start_with(args, &[])
    }

    /// Starts the command with environment variables.
    pub fn start_with(args: &[&str], variables: &[(&str, &str)]) -> Self {
        // The tests may be run by 'nohup', which a command that is started would take over.
        let mut child = Command::new("env")
            .args(["--default-signal=HUP", env!("CARGO_BIN_EXE_hotlift")])
            .args(args)
            .env("COLUMNS", COLUMNS)
            .envs(variables.iter().copied())
            .stdin(Stdio::null())
            .stdout(Stdio::piped())
            .stderr(Stdio::piped())
            .spawn()
            .expect("hotlift starts");
        let (sender, lines) = channel();
        let streams: [Option<Box<dyn Read + Send>>; 2] = [
            child.stdout.take().map(|s| Box::new(s) as _),
            child.stderr.take().map(|s| Box::new(s) as _),
        ];
        for stream in streams.into_iter().flatten() {
            let sender = sender.clone();
            thread::spawn(move || {
                for line in BufReader::new(stream).lines().map_while(Result::ok) {
                    let _ = sender.send(line);
                }
            });
        }
        Self {
            child,
            lines,
            said: Vec::new(),
        }
    }

    pub fn pid(&self) -> i32 {
        i32::try_from(self.child.id()).expect("a process id is positive and small")
    }

    /// Sends a signal.
    pub fn signal(&self, signal: rustix::process::Signal) {
        let pid = rustix::process::Pid::from_raw(self.pid()).expect("a process id");
        rustix::process::kill_process(pid, signal).expect("the process is there");
    }

    /// Waits for a line that contains `words`, and returns it.
    pub fn wait_for(&mut self, words: &str) -> String {
        let deadline = Instant::now() + DEADLINE;
        loop {
            let left = deadline.saturating_duration_since(Instant::now());
            let line = self.lines.recv_timeout(left).unwrap_or_else(|_| {
                panic!("never said {words:?}, but:\n{}", self.said.join("\n"));
            });
            self.said.push(line.clone());
            if line.contains(words) {
                return line;
            }
        }
    }

    /// Waits for the end, and returns how it ended and all that was said.
    pub fn wait(mut self) -> (ExitStatus, Vec<String>) {
        let deadline = Instant::now() + DEADLINE;
        let mut said = std::mem::take(&mut self.said);
        loop {
            // The streams end with the process (or with its last child).
            let left = deadline.saturating_duration_since(Instant::now());
            match self.lines.recv_timeout(left) {
                Ok(line) => said.push(line),
                Err(std::sync::mpsc::RecvTimeoutError::Disconnected) => break,
                Err(std::sync::mpsc::RecvTimeoutError::Timeout) => {
                    panic!("did not end, but said:\n{}", said.join("\n"))
                }
            }
        }
        (self.child.wait().expect("it was started"), said)
    }
}

impl Drop for Hotlift {
    fn drop(&mut self) {
        let _ = self.child.kill();
        let _ = self.child.wait();
    }
}

/// The lines in which a command says why it failed.
pub fn errors(said: &[String]) -> Vec<&String> {
    said.iter()
        .filter(|line| line.starts_with("hotlift: ") || line.starts_with("error: "))
        .collect()
}

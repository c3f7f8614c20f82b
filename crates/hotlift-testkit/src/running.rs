//! A program that a test starts as a user does, and the lines of its output.

use std::io::{BufRead, BufReader, Read};
use std::process::{Child, Command, ExitStatus, Stdio};
use std::sync::mpsc::{Receiver, channel};
use std::thread;
use std::time::{Duration, Instant};

/// Timeout of every wait, longer than any test takes on a busy machine. Next to eight busy guests, 16 cells of
/// `hotlift-bench` took more than two minutes.
const DEADLINE: Duration = Duration::from_secs(600);

/// Width of standard output in columns. It is large enough for all tables, so that no text a test searches is wrapped.
const COLUMNS: &str = "300";

/// A running program. It is killed on drop.
#[derive(Debug)]
pub struct Running {
    child: Child,
    lines: Receiver<String>,
    output: Vec<String>,
}

impl Running {
    /// Starts `program` with arguments and environment variables, and reads the lines of both outputs.
    ///
    /// # Panics
    /// If the program does not start.
    #[must_use]
    pub fn start(program: &str, args: &[&str], variables: &[(&str, &str)]) -> Self {
        // The tests may run under 'nohup', and the program would inherit its setting for SIGHUP. The path is absolute,
        // because a test may set another PATH.
        let mut child = Command::new("/usr/bin/env")
            .args(["--default-signal=HUP", program])
            .args(args)
            .env("COLUMNS", COLUMNS)
            .envs(variables.iter().copied())
            .stdin(Stdio::null())
            .stdout(Stdio::piped())
            .stderr(Stdio::piped())
            .spawn()
            .expect("the program starts");
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
            output: Vec::new(),
        }
    }

    /// Returns the process ID of the program.
    ///
    /// # Panics
    /// Never: a process ID is positive and small.
    #[must_use]
    pub fn pid(&self) -> i32 {
        i32::try_from(self.child.id()).expect("a process id is positive and small")
    }

    /// Sends a signal to the program.
    ///
    /// # Panics
    /// If the program has ended and was waited for.
    pub fn signal(&self, signal: rustix::process::Signal) {
        let pid = rustix::process::Pid::from_raw(self.pid()).expect("a process id");
        rustix::process::kill_process(pid, signal).expect("the process is there");
    }

    /// Waits for an output line that contains `words`, and returns the line.
    ///
    /// # Panics
    /// If no such line is printed within the timeout.
    pub fn wait_for(&mut self, words: &str) -> String {
        let deadline = Instant::now() + DEADLINE;
        loop {
            let left = deadline.saturating_duration_since(Instant::now());
            let line = self.lines.recv_timeout(left).unwrap_or_else(|_| {
                panic!(
                    "never printed {words:?}; its output:\n{}",
                    self.output.join("\n")
                );
            });
            self.output.push(line.clone());
            if line.contains(words) {
                return line;
            }
        }
    }

    /// Waits for the end of the program, and returns the exit status and all output lines.
    ///
    /// # Panics
    /// If the program does not end within the timeout.
    pub fn wait(mut self) -> (ExitStatus, Vec<String>) {
        let deadline = Instant::now() + DEADLINE;
        let mut output = std::mem::take(&mut self.output);
        loop {
            // The outputs end with the process, or with its last child.
            let left = deadline.saturating_duration_since(Instant::now());
            match self.lines.recv_timeout(left) {
                Ok(line) => output.push(line),
                Err(std::sync::mpsc::RecvTimeoutError::Disconnected) => break,
                Err(std::sync::mpsc::RecvTimeoutError::Timeout) => {
                    panic!("did not end; its output:\n{}", output.join("\n"))
                }
            }
        }
        (self.child.wait().expect("it was started"), output)
    }
}

impl Drop for Running {
    fn drop(&mut self) {
        let _ = self.child.kill();
        let _ = self.child.wait();
    }
}

/// Returns the output lines in which a program reports an error.
#[must_use]
pub fn errors(output: &[String]) -> Vec<&String> {
    let starts = ["hotlift: ", "hotlift-bench: ", "error: "];
    output
        .iter()
        .filter(|line| starts.iter().any(|start| line.starts_with(start)))
        .collect()
}

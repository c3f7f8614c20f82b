//! Runs a child process, and collects its output.

use std::io::{self, Read};
use std::os::fd::{AsFd, BorrowedFd, OwnedFd};
use std::process::{Child, ChildStderr, ChildStdout, Command, ExitStatus};
use std::time::Instant;

use hotlift_mem::{end_of_process, is_readable, wait_readable};
use rustix::io::ioctl_fionbio;

/// A running command; the drop kills it.
///
/// The output is read until the command ends, not until the pipes close. With the SSH option `ControlPersist`, the command
/// starts an SSH that runs longer, and keeps the pipes open.
#[derive(Debug)]
pub struct Run {
    child: Child,
    /// Readable once the child process has ended.
    end: OwnedFd,
    out: Pipe<ChildStdout>,
    err: Pipe<ChildStderr>,
    status: Option<ExitStatus>,
}

impl Run {
    /// Starts the command. Stores at most `most` bytes of standard output, and as many of standard error.
    ///
    /// # Errors
    /// If the command cannot be started.
    pub fn start(mut command: Command, most: usize) -> io::Result<Self> {
        let mut child = command.spawn()?;
        let parts = end_of_process(&child).and_then(|end| {
            let out = Pipe::new(child.stdout.take(), most)?;
            let err = Pipe::new(child.stderr.take(), most)?;
            Ok((end, out, err))
        });
        let (end, out, err) = parts.inspect_err(|_| end_of(&mut child))?;
        Ok(Self {
            child,
            end,
            out,
            err,
            status: None,
        })
    }

    /// Waits for the end of the command, and returns its exit status. Returns `None` at `deadline`, or if one of `others` is
    /// readable first.
    ///
    /// # Errors
    /// The system's error if the process cannot be checked.
    pub fn wait(
        &mut self,
        others: &[BorrowedFd<'_>],
        deadline: Option<Instant>,
    ) -> io::Result<Option<ExitStatus>> {
        let mut is_over = false;
        loop {
            if self.status.is_none() {
                self.status = self.child.try_wait()?;
            }
            // Read after the check of the process: if it has ended, the pipes then contain all its output.
            self.out.read();
            self.err.read();
            if self.status.is_some() || is_over {
                return Ok(self.status);
            }
            let own = [Some(self.end.as_fd()), self.out.open(), self.err.open()];
            let fds: Vec<_> = own
                .into_iter()
                .flatten()
                .chain(others.iter().copied())
                .collect();
            wait_readable(&fds, deadline);
            // The process is checked once more before the return.
            is_over = deadline.is_some_and(|deadline| Instant::now() >= deadline)
                || others.iter().copied().any(is_readable);
        }
    }

    /// Returns standard output and standard error of the command so far.
    pub fn output(&self) -> (String, String) {
        let text = |bytes| String::from_utf8_lossy(bytes).into_owned();
        (text(&self.out.bytes), text(&self.err.bytes))
    }
}

impl Drop for Run {
    fn drop(&mut self) {
        if self.status.is_none() {
            end_of(&mut self.child);
        }
    }
}

fn end_of(child: &mut Child) {
    // Errors are ignored: both calls fail only if the process has already ended.
    let _ = child.kill();
    let _ = child.wait();
}

/// A pipe from the child process, and the bytes read from it.
#[derive(Debug)]
struct Pipe<P> {
    /// The pipe; `None` after its end.
    pipe: Option<P>,
    bytes: Vec<u8>,
    most: usize,
}

impl<P: Read + AsFd> Pipe<P> {
    fn new(pipe: Option<P>, most: usize) -> io::Result<Self> {
        if let Some(pipe) = &pipe {
            ioctl_fionbio(pipe, true)?;
        }
        Ok(Self {
            pipe,
            bytes: Vec::new(),
            most,
        })
    }

    fn open(&self) -> Option<BorrowedFd<'_>> {
        self.pipe.as_ref().map(AsFd::as_fd)
    }

    /// Reads the available bytes. At the limit, closes the pipe.
    fn read(&mut self) {
        let Some(pipe) = &mut self.pipe else { return };
        let left = self.most - self.bytes.len();
        match pipe.take(left as u64).read_to_end(&mut self.bytes) {
            Err(error) if error.kind() == io::ErrorKind::WouldBlock => {}
            // Keeps the bytes that were read before an error.
            Ok(_) | Err(_) => self.pipe = None,
        }
    }
}

#[cfg(test)]
mod tests {
    use std::process::Stdio;

    use rustix::process::Pid;

    use super::*;

    fn end(run: &mut Run) -> ExitStatus {
        run.wait(&[], None).expect("a wait").expect("an end")
    }

    fn shell(line: &str) -> Run {
        let mut command = Command::new("sh");
        command.args(["-c", line]);
        command.stdout(Stdio::piped()).stderr(Stdio::piped());
        Run::start(command, 1 << 17).expect("a shell")
    }

    #[test]
    fn all_output_of_a_process_that_ends_is_kept() {
        let mut run = shell("head -c 100000 /dev/zero; echo why >&2; exit 3");
        let status = end(&mut run);
        assert_eq!(status.code(), Some(3));
        let (out, err) = run.output();
        assert_eq!((out.len(), err.as_str()), (100_000, "why\n"));
    }

    #[test]
    fn a_process_that_ended_is_not_awaited_though_another_holds_its_pipes() {
        let mut run = shell("sleep 600 & echo $!");
        end(&mut run);
        let other = run.output().0.trim().parse().ok();
        let other = other.and_then(Pid::from_raw).expect("the other");
        rustix::process::kill_process(other, rustix::process::Signal::KILL).expect("it runs");
    }

    #[test]
    fn another_descriptor_or_the_deadline_ends_the_wait_for_a_running_process() {
        let mut run = shell("exec sleep 600");
        let (other, ends) = io::pipe().expect("a pipe");
        let wait = |run: &mut Run, deadline| run.wait(&[other.as_fd()], deadline).expect("a wait");
        assert_eq!(wait(&mut run, Some(Instant::now())), None);
        drop(ends);
        assert_eq!(wait(&mut run, None), None);
    }

    #[test]
    fn no_more_output_is_kept_than_requested() {
        let mut run = shell("cat /dev/zero");
        end(&mut run);
        assert_eq!(run.output().0.len(), 1 << 17);
    }
}

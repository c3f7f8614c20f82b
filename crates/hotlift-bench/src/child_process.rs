//! Child processes that are killed when the bench ends.

use std::ffi::OsString;
use std::fs::File;
use std::io;
use std::path::{Path, PathBuf};
use std::process::{Child, Command, Stdio};

/// A child process. It is killed on drop, and by the kernel if the bench is killed.
#[derive(Debug)]
pub struct ChildProcess {
    pub child: Child,
    errors: PathBuf,
}

impl ChildProcess {
    /// Starts the command line `prefix` followed by `words` (program and arguments). Standard error of the process goes
    /// to the file `errors`.
    pub fn start(
        prefix: &[String],
        words: impl IntoIterator<Item = OsString>,
        output: Stdio,
        errors: &Path,
    ) -> io::Result<Self> {
        // setpriv(1) sets the parent-death signal: `Command` has no safe way to set it.
        let tie = ["setpriv", "--pdeathsig", "KILL"].map(str::to_owned);
        let mut all = prefix.iter().cloned().chain(tie).map(OsString::from);
        let child = Command::new(all.next().unwrap_or_default())
            .args(all)
            .args(words)
            .stdin(Stdio::null())
            .stdout(output)
            .stderr(File::create(errors)?)
            .spawn()?;
        Ok(Self {
            child,
            errors: errors.to_owned(),
        })
    }

    /// Returns the last non-empty line of the child's standard error; `None` if there is none.
    pub fn last_line(&self) -> Option<String> {
        let output = std::fs::read_to_string(&self.errors).ok()?;
        let line = output.lines().rfind(|line| !line.trim().is_empty())?;
        Some(line.to_owned())
    }
}

impl Drop for ChildProcess {
    fn drop(&mut self) {
        let _ = self.child.kill();
        let _ = self.child.wait();
    }
}

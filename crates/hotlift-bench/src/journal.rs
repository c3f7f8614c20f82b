//! The file `runs.jsonl`: each run is appended when it ends.

use std::fs::{File, OpenOptions};
use std::io::{self, Write};
use std::path::{Path, PathBuf};

use hotlift_terminal::error::TerminalError;
use hotlift_terminal::output_file;

use super::record::Record;
use hotlift_mem::FileError;

/// The open file `runs.jsonl`, and lines that could not be written yet.
#[derive(Debug)]
pub struct Journal {
    path: PathBuf,
    file: File,
    pending: Vec<Vec<u8>>,
    has_warned: bool,
}

impl Journal {
    /// Opens `runs.jsonl` in `folder`, and creates the folder if it is missing. Earlier runs are kept.
    ///
    /// # Errors
    /// If the folder cannot be created, or the file cannot be opened for writing.
    pub fn open(folder: &Path) -> Result<Self, TerminalError> {
        let path = folder.join("runs.jsonl");
        let open = || {
            std::fs::create_dir_all(folder)?;
            output_file::open(&path, OpenOptions::new().create(true).append(true))
        };
        let file = open().map_err(FileError::writing(&path))?;
        Ok(Self {
            path,
            file,
            pending: Vec::new(),
            has_warned: false,
        })
    }

    /// Returns the path of the file.
    pub fn path(&self) -> &Path {
        &self.path
    }

    /// Appends `record`. If writing fails, the line is kept in memory and written with the next record. Only the first
    /// failure is reported.
    pub fn keep(&mut self, record: &Record) {
        if let Ok(mut line) = serde_json::to_vec(record) {
            line.push(b'\n');
            self.pending.push(line);
        }
        if let Err(error) = self.write_pending()
            && !self.has_warned
        {
            self.has_warned = true;
            super::warn(format!(
                "cannot write {}: {error}; the bench continues, and retries after each run",
                self.path.display()
            ));
        }
    }

    fn write_pending(&mut self) -> io::Result<()> {
        while let Some(line) = self.pending.first() {
            let length = self.file.metadata()?.len();
            let written = self
                .file
                .write_all(line)
                .and_then(|()| self.file.sync_data());
            if let Err(error) = written {
                // A partial line would corrupt the next one.
                self.file.set_len(length)?;
                return Err(error);
            }
            self.pending.remove(0);
        }
        Ok(())
    }

    /// Tries a last time to write the lines that are still in memory.
    ///
    /// # Errors
    /// If lines remain unwritten.
    pub fn finish(&mut self) -> Result<(), TerminalError> {
        let written = self.write_pending();
        Ok(written.map_err(FileError::writing(&self.path))?)
    }
}

#[cfg(test)]
mod tests {
    use super::super::record::{read, tests::example};
    use super::*;

    #[test]
    fn runs_are_appended_to_earlier_ones() {
        let folder = tempfile::tempdir().unwrap();
        for _ in 0..2 {
            let mut journal = Journal::open(&folder.path().join("out")).unwrap();
            journal.keep(&example());
            journal.finish().unwrap();
        }
        let runs = read(&folder.path().join("out/runs.jsonl")).unwrap();
        assert_eq!(runs, [example(), example()]);
    }

    #[test]
    fn lines_that_a_full_disk_refuses_are_written_later() {
        let mut journal = Journal {
            path: "/dev/full".into(),
            file: OpenOptions::new().append(true).open("/dev/full").unwrap(),
            pending: Vec::new(),
            has_warned: false,
        };
        journal.keep(&example());
        journal.keep(&example());
        assert_eq!(journal.pending.len(), 2);
        let error = journal.finish().unwrap_err();
        assert!(error.line().contains("/dev/full"), "{}", error.line());
        let folder = tempfile::tempdir().unwrap();
        let path = folder.path().join("runs.jsonl");
        journal.file = File::create(&path).unwrap();
        journal.finish().unwrap();
        assert_eq!(std::fs::read_to_string(path).unwrap().lines().count(), 2);
    }
}

//! Interface of accelerators: devices for pages and for gzip members.

use std::fmt;
use std::sync::{Arc, OnceLock};

use crate::library;

/// Accelerator of one method. A program passes its accelerators to encoders and decoders in
/// [`Accelerator`](crate::Accelerator).
#[derive(Debug)]
pub struct Hardware {
    /// Name of the method, as in [`METHODS`](crate::METHODS).
    pub method: &'static str,
    /// Soname of the vendor's library, opened at run time.
    pub library: &'static str,
    /// Environment variable that can name another file for the library.
    pub variable: &'static str,
    open: Open,
    trial: fn(&Self) -> Result<String, String>,
    tried: OnceLock<Result<Arc<str>, Arc<str>>>,
}

/// Function that opens a device for one channel. Its error is the reason why no device can be opened.
#[derive(Debug, Clone, Copy)]
pub enum Open {
    /// Opens a device of `qpl` or `uadk` for a direction.
    Pages(fn(Direction) -> Result<Box<dyn PageDevice>, String>),
    /// Opens a device of `qatzip` for a direction and a compression level.
    Members(fn(Direction, u8) -> Result<Box<dyn MemberDevice>, String>),
}

/// Direction of a device: compression at the sender, decompression at the receiver.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub enum Direction {
    /// The device turns pages into compressed streams.
    Compress,
    /// The device turns compressed streams into pages.
    Decompress,
}

/// A device that compresses or decompresses pages for one channel, one job per page.
///
/// No job may be in flight when the device is dropped: collect all jobs first, or [abandon](Self::abandon) the device.
pub trait PageDevice: Send {
    /// Returns the maximum number of jobs in flight, never 0.
    fn slots(&self) -> usize;

    /// Starts a job in a slot that has no job in flight. A slot is an index below [`slots`](Self::slots).
    ///
    /// # Safety
    ///
    /// `input` must stay unchanged until the job is collected or the device abandoned.
    unsafe fn submit(&mut self, slot: usize, input: &[u8]) -> Submitted;

    /// Waits for the job of a slot and returns its result.
    fn collect(&mut self, slot: usize) -> Collected;

    /// Returns the output of a collected job. `len` is the length from [`Collected::Done`].
    fn output(&self, slot: usize, len: usize) -> &[u8];

    /// Leaks the device and all memory that its unfinished jobs may still write to.
    fn abandon(self: Box<Self>);
}

/// Result of a submission.
#[derive(Debug)]
pub enum Submitted {
    /// The job has started and must be collected.
    Accepted,
    /// The queue is full.
    Busy,
    /// The device cannot do the job.
    Failed(PageFailure),
}

/// Result of a job.
#[derive(Debug)]
pub enum Collected {
    /// Done, with the number of output bytes.
    Done(usize),
    /// The output exceeds its buffer: the compressed page is not smaller than the page.
    DoesNotFit,
    /// The job failed. It no longer writes to its output.
    Failed(PageFailure),
    /// Timeout: the job may still write to its output, so the device must be abandoned.
    NoAnswer,
}

/// Reason why the device did not process a page.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub enum PageFailure {
    /// Error code of the vendor's library.
    Code(i64),
    /// The library reports success with this number of output bytes, which is impossible.
    Length(usize),
    /// Not enough memory for a job.
    NoMemory,
}

impl fmt::Display for PageFailure {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        match self {
            Self::Code(code) => write!(f, "code {code}"),
            Self::Length(len) => write!(f, "an output of {len} bytes"),
            Self::NoMemory => f.write_str("no memory for a job"),
        }
    }
}

/// A device that compresses packets to gzip members or decompresses them, for one channel.
pub trait MemberDevice: Send {
    /// Returns the maximum number of uncompressed bytes in one gzip member.
    fn largest_member(&self) -> usize;

    /// Compresses or decompresses all of `bytes` and returns the output. `uncompressed_len` is the uncompressed size in bytes.
    ///
    /// # Errors
    ///
    /// [`MemberFailure`] if the device is busy, does not answer in time, or fails.
    fn run(&mut self, bytes: &[u8], uncompressed_len: usize) -> Result<&[u8], MemberFailure>;

    /// Leaks the device and all memory that it may still write to.
    fn abandon(self: Box<Self>);
}

/// Reason why the device did not process a packet.
#[derive(Debug)]
pub enum MemberFailure {
    /// Other channels use all instances of the device.
    Busy,
    /// Timeout: the device may still write to its output.
    NoAnswer,
    /// Any other error: the device may be unusable.
    Failed(String),
}

impl fmt::Display for MemberFailure {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        f.write_str(match self {
            Self::Busy => "no free instance of the hardware",
            Self::NoAnswer => "no answer in time",
            Self::Failed(reason) => reason,
        })
    }
}

impl From<String> for MemberFailure {
    fn from(reason: String) -> Self {
        Self::Failed(reason)
    }
}

impl Hardware {
    /// Returns the accelerator of `method`. `open` opens a device for a channel. `trial` tests the accelerator once and returns
    /// its description.
    #[must_use]
    pub const fn new(
        method: &'static str,
        [library, variable]: [&'static str; 2],
        open: Open,
        trial: fn(&Self) -> Result<String, String>,
    ) -> Self {
        Self {
            method,
            library,
            variable,
            open,
            trial,
            tried: OnceLock::new(),
        }
    }

    /// Tests the accelerator once per process and returns its description, as in "libqpl 1.9.0".
    ///
    /// # Errors
    ///
    /// The reason why the accelerator is unusable.
    pub fn probe(&self) -> Result<Arc<str>, Arc<str>> {
        let tried = self.tried.get_or_init(|| match (self.trial)(self) {
            Ok(found) => Ok(found.into()),
            Err(reason) => Err(reason.into()),
        });
        tried.clone()
    }

    /// Returns the file name of the library. It is the description of an accelerator whose library reports no version.
    #[must_use]
    pub fn file(&self) -> String {
        let file = library::file(self.library, Some(self.variable));
        file.to_string_lossy().into_owned()
    }

    /// Opens a device that processes single pages.
    pub(crate) fn pages(&self, direction: Direction) -> Result<Box<dyn PageDevice>, String> {
        match self.open {
            Open::Pages(open) => open(direction),
            Open::Members(_) => Err(format!("it has no pages of {}", self.method)),
        }
    }

    /// Opens a device that processes gzip members.
    pub(crate) fn members(
        &self,
        direction: Direction,
        level: u8,
    ) -> Result<Box<dyn MemberDevice>, String> {
        match self.open {
            Open::Members(open) => open(direction, level),
            Open::Pages(_) => Err(format!("it has no members of {}", self.method)),
        }
    }
}

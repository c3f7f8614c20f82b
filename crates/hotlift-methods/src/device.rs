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
    /// Environment variable that names another file for it.
    pub variable: &'static str,
    open: Open,
    trial: fn(&Self) -> Result<String, String>,
    tried: OnceLock<Result<Arc<str>, Arc<str>>>,
}

/// Function that opens a device for one channel; an error is the reason why there is none.
#[derive(Debug, Clone, Copy)]
pub enum Open {
    /// Of qpl or uadk, for that direction.
    Pages(fn(Direction) -> Result<Box<dyn PageDevice>, String>),
    /// Of qatzip, for that direction and level.
    Members(fn(Direction, u8) -> Result<Box<dyn MemberDevice>, String>),
}

/// Direction of the pages.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub enum Direction {
    /// Pages in, streams out.
    Compress,
    /// Streams in, pages out.
    Decompress,
}

/// A device that compresses or decompresses pages for one channel, one job per page.
///
/// Dropping it ends its jobs. No job may be in flight then.
pub trait PageDevice: Send {
    /// Returns the maximum number of jobs in flight, never 0.
    fn slots(&self) -> usize;

    /// Starts the job of a slot, which has none in flight.
    ///
    /// # Safety
    ///
    /// `input` must stay unchanged until the job is collected or the device abandoned.
    unsafe fn submit(&mut self, slot: usize, input: &[u8]) -> Submitted;

    /// Waits for the job of a slot.
    fn collect(&mut self, slot: usize) -> Collected;

    /// Returns the first `len` bytes of the output of a collected job, which reported this length.
    fn output(&self, slot: usize, len: usize) -> &[u8];

    /// Leaks the device with all memory that its jobs may still write to.
    fn abandon(self: Box<Self>);
}

/// Result of a submission.
#[derive(Debug)]
pub enum Submitted {
    /// The job must be collected.
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
    /// The output exceeds its room, so the page does not shrink.
    DoesNotFit,
    /// The job failed, and writes no more.
    Failed(PageFailure),
    /// Timeout. The device must be abandoned.
    NoAnswer,
}

/// Reason why the device did not process a page.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub enum PageFailure {
    /// The library's code.
    Code(i64),
    /// It reports success with this number of output bytes, which is impossible.
    Length(usize),
    /// No memory for a job.
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
    /// Returns the maximum bytes of a member.
    fn largest_member(&self) -> usize;

    /// Compresses `bytes`, or decompresses them; the uncompressed form has `pages` bytes. Returns the output. All input must be
    /// used.
    ///
    /// # Errors
    ///
    /// [`MemberFailure`].
    fn run(&mut self, bytes: &[u8], pages: usize) -> Result<&[u8], MemberFailure>;

    /// Leaks the device with all memory that it may still write to.
    fn abandon(self: Box<Self>);
}

/// Reason why the device did not process a packet.
#[derive(Debug)]
pub enum MemberFailure {
    /// Other channels currently use the device's instances.
    Busy,
    /// Timeout: the device may still write.
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
    /// Returns the accelerator of `method`, whose devices `open` opens, and which `trial` checks with one job. `trial` returns
    /// the description.
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

    /// Returns the library's file name, which replaces the version where the library reports none.
    #[must_use]
    pub fn file(&self) -> String {
        let file = library::file(self.library, Some(self.variable));
        file.to_string_lossy().into_owned()
    }

    /// Opens a device for pages.
    pub(crate) fn pages(&self, direction: Direction) -> Result<Box<dyn PageDevice>, String> {
        match self.open {
            Open::Pages(open) => open(direction),
            Open::Members(_) => Err(format!("it has no pages of {}", self.method)),
        }
    }

    /// Opens a device for members.
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

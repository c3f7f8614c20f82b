//! Accelerators: setting, probe, and counts of jobs.

use std::ops::AddAssign;
use std::sync::{Arc, OnceLock};

use crate::library;

/// Use of a method's accelerator.
#[derive(Debug, Clone, Copy, Default, PartialEq, Eq)]
pub enum Accelerator {
    /// Uses a working accelerator if the host has one. The CPU does the rest, including failed jobs.
    #[default]
    Auto,
    /// Never uses it.
    Off,
    /// Fails the channel if no accelerator is available. The CPU still does jobs that fail later: a device error does not fail
    /// a migration.
    Required,
}

/// Settings of a channel's encoder.
#[derive(Debug, Clone, Copy)]
pub struct EncoderSettings {
    /// Level, of [`MethodInfo::levels`](crate::MethodInfo). Methods without levels ignore it.
    pub level: u8,
    /// Use of the accelerator.
    pub accelerator: Accelerator,
    /// True if the receiver is a Hotlift, which reads all that the method can write. A QEMU without an accelerator reads less
    /// (see `uadk`).
    pub to_hotlift: bool,
    /// Maximum distance of a back-reference in bytes, which the receiver must buffer. Only zstd's levels from 4 on refer to
    /// earlier packets at a distance of their own.
    pub window_max: usize,
}

impl EncoderSettings {
    /// Returns settings for the CPU and a receiving Hotlift.
    #[must_use]
    pub fn software(level: u8) -> Self {
        Self {
            level,
            accelerator: Accelerator::Off,
            to_hotlift: true,
            window_max: usize::MAX,
        }
    }
}

/// Job counts of one channel's encoder or decoder. A job is the unit of its accelerator: a page for qpl and uadk, a gzip member
/// for qatzip. All 0 for methods without accelerators.
#[derive(Debug, Clone, Copy, Default, PartialEq, Eq)]
pub struct Jobs {
    /// Jobs done by the accelerator.
    pub hardware: u64,
    /// Jobs done on the CPU, including jobs that an accelerator refused or failed. A receiver's CPU copies uncompressed pages.
    pub software: u64,
    /// Submissions repeated because the accelerator's queue was full.
    pub retries: u64,
    /// Pages sent uncompressed because they did not shrink. They count as jobs too.
    pub raw_pages: u64,
}

impl AddAssign for Jobs {
    fn add_assign(&mut self, other: Self) {
        self.hardware += other.hardware;
        self.software += other.software;
        self.retries += other.retries;
        self.raw_pages += other.raw_pages;
    }
}

/// Device that an encoder or decoder uses. Only one transition exists: `Hardware` to `Fallback`, which is final.
#[derive(Debug, Clone, Default, PartialEq, Eq)]
pub enum RunsOn {
    /// The CPU, as intended: the method has no accelerator, or it is switched off.
    #[default]
    Software,
    /// The CPU instead of an accelerator, with the reason.
    Fallback(Arc<str>),
    /// The accelerator with this description.
    Hardware(Arc<str>),
}

/// Accelerator of a method.
#[derive(Debug)]
pub struct Hardware {
    /// The device, as in "Intel IAA".
    pub device: &'static str,
    /// Soname of the vendor's library, opened at run time.
    pub library: &'static str,
    /// Environment variable that names another file for it.
    pub variable: &'static str,
    trial: fn() -> Result<String, String>,
    tried: OnceLock<Result<Arc<str>, Arc<str>>>,
}

impl Hardware {
    /// Returns the accelerator `device`, which `trial` checks with one job.
    pub(crate) const fn new(
        device: &'static str,
        library: &'static str,
        variable: &'static str,
        trial: fn() -> Result<String, String>,
    ) -> Self {
        Self {
            device,
            library,
            variable,
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
        let tried = self.tried.get_or_init(|| match (self.trial)() {
            Ok(found) => Ok(found.into()),
            Err(reason) => Err(reason.into()),
        });
        tried.clone()
    }

    /// Returns the library's file name, which replaces the version where the library reports none.
    pub(crate) fn file(&self) -> String {
        let file = library::file(self.library, Some(self.variable));
        file.to_string_lossy().into_owned()
    }
}

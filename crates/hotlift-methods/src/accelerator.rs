//! Accelerators: whether one may run, and what has run.

use std::ops::AddAssign;
use std::sync::{Arc, OnceLock};

use crate::library;

/// Whether a method's accelerator is used.
#[derive(Debug, Clone, Copy, Default, PartialEq, Eq)]
pub enum Accelerator {
    /// If this host has one that works; if not, and for whatever it fails to do, the CPU.
    #[default]
    Auto,
    /// Never.
    Off,
    /// A channel without it is an error. What it then fails to do is still done on the CPU: a
    /// migration is not given up for a device.
    Required,
}

/// How a channel's encoder works.
#[derive(Debug, Clone, Copy)]
pub struct EncoderSettings {
    /// Level, of [`MethodInfo::levels`](crate::MethodInfo); a method without levels takes any.
    pub level: u8,
    /// Whether the accelerator is used.
    pub accelerator: Accelerator,
    /// The receiver is a Hotlift, which reads everything that the method can write. A QEMU reads
    /// less where it lacks an accelerator (see `uadk`).
    pub to_hotlift: bool,
    /// Most bytes behind a page that it refers back to, which its receiver has to keep; only zstd's levels
    /// from 4 on refer to earlier packets at a distance of their own.
    pub window_max: usize,
}

impl EncoderSettings {
    /// On the CPU, for a Hotlift.
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

/// What one channel's half of a method has done so far, counted in the units that its accelerator
/// works on: pages of qpl and uadk, gzip members of qatzip. All 0 for a method that no accelerator
/// serves.
#[derive(Debug, Clone, Copy, Default, PartialEq, Eq)]
pub struct Jobs {
    /// Done by the accelerator.
    pub hardware: u64,
    /// Done on the CPU: all without an accelerator, with one those that it refused or failed. A
    /// receiver's CPU copies the pages that travel as they are.
    pub software: u64,
    /// Submissions repeated because the accelerator's queue was full.
    pub retries: u64,
    /// Pages that did not shrink and travel as they are. They are jobs as well.
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

/// What a half of a method works on at present. It begins with one of the three; `Hardware` may turn
/// into `Fallback`, and that is final.
#[derive(Debug, Clone, Default, PartialEq, Eq)]
pub enum RunsOn {
    /// On the CPU, as intended: the method has no accelerator, or it is switched off.
    #[default]
    Software,
    /// On the CPU in place of an accelerator, and why.
    Fallback(Arc<str>),
    /// On the accelerator described.
    Hardware(Arc<str>),
}

/// What a method's accelerator is.
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
    /// The accelerator `device`, which `trial` uses once.
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

    /// Tries the accelerator, once in the process's life, and describes it, as in "libqpl 1.9.0".
    ///
    /// # Errors
    ///
    /// Why it cannot be used.
    pub fn probe(&self) -> Result<Arc<str>, Arc<str>> {
        let tried = self.tried.get_or_init(|| match (self.trial)() {
            Ok(found) => Ok(found.into()),
            Err(reason) => Err(reason.into()),
        });
        tried.clone()
    }

    /// The file of its library, which stands for the version where the library does not report one.
    pub(crate) fn file(&self) -> String {
        let file = library::file(self.library, Some(self.variable));
        file.to_string_lossy().into_owned()
    }
}

//! Setting that selects accelerators, and counts of their jobs.

use std::ops::AddAssign;
use std::sync::Arc;

use crate::MethodError;
use crate::device::Hardware;

/// Reason reported by a program that is built without accelerators.
pub const NOT_BUILT_IN: &str = "this program is built without accelerators";

/// Setting that decides if a channel uses one of the accelerators that the program passes in.
#[derive(Debug, Clone, Copy)]
pub enum Accelerator {
    /// Uses an accelerator if the host has a working one, and otherwise the CPU. The CPU also repeats failed jobs.
    Auto(&'static [Hardware]),
    /// Uses the CPU only.
    Off,
    /// A channel without a working accelerator fails when it is opened. The CPU repeats jobs that fail later: a device error
    /// does not fail a migration.
    Required(&'static [Hardware]),
}

impl Accelerator {
    /// Tests the accelerator of `method` and returns its description, see [`Hardware::probe`].
    ///
    /// # Errors
    ///
    /// The reason why the accelerator is unusable. For [`Accelerator::Off`] it is always [`NOT_BUILT_IN`].
    pub fn probe(self, method: &str) -> Result<Arc<str>, Arc<str>> {
        self.hardware(method).ok_or(NOT_BUILT_IN)?.probe()
    }

    fn hardware(self, method: &str) -> Option<&'static Hardware> {
        let (Self::Auto(all) | Self::Required(all)) = self else {
            return None;
        };
        all.iter().find(|hardware| hardware.method == method)
    }

    /// Tests the accelerator of `method` and calls `open` for it. Returns `None` if accelerators are off or this one is
    /// unusable. `device` names the accelerator in messages.
    ///
    /// # Errors
    ///
    /// [`MethodError::Unavailable`] if the accelerator is required and unusable.
    pub(crate) fn open<D>(
        self,
        method: &'static str,
        device: &'static str,
        open: impl FnOnce(&'static Hardware) -> Result<D, String>,
    ) -> Result<(Option<D>, RunsOn), MethodError> {
        if matches!(self, Self::Off) {
            return Ok((None, RunsOn::Software));
        }
        let hardware = self.hardware(method);
        let opened: Result<_, Arc<str>> = hardware.ok_or_else(|| NOT_BUILT_IN.into());
        let opened = opened.and_then(|hardware| Ok((hardware.probe()?, open(hardware)?)));
        match (opened, self) {
            (Ok((found, opened)), _) => {
                let what = format!("{device} by {found}");
                Ok((Some(opened), RunsOn::Hardware(what.into())))
            }
            (Err(reason), Self::Required(_)) => Err(MethodError::Unavailable {
                method,
                library: hardware.map_or(device, |hardware| hardware.library),
                reason: reason.to_string(),
            }),
            (Err(reason), _) => Ok((None, RunsOn::Fallback(reason))),
        }
    }
}

/// Settings of a channel's encoder.
#[derive(Debug, Clone, Copy)]
pub struct EncoderSettings {
    /// Compression level, one of [`MethodInfo::levels`](crate::MethodInfo). Methods without levels ignore it.
    pub level: u8,
    /// Accelerators that the encoder may use.
    pub accelerator: Accelerator,
    /// True if the receiver is a Hotlift, which can read all output of the method. False for a QEMU: without its accelerator it
    /// rejects compressed pages of `uadk`.
    pub to_hotlift: bool,
    /// Maximum size of the compression window, in bytes; the receiver buffers the window. Only `zstd` from level 4 on uses this
    /// limit: its window spans packets.
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

/// Job counts of one channel's encoder or decoder. A job processes one page (`qpl`, `uadk`) or one gzip member (`qatzip`). All
/// counts are 0 for methods without accelerators.
#[derive(Debug, Clone, Copy, Default, PartialEq, Eq)]
pub struct Jobs {
    /// Jobs done by the accelerator.
    pub hardware: u64,
    /// Jobs done on the CPU, including jobs that an accelerator refused or failed. At a receiver, uncompressed pages count here
    /// too: the CPU copies them.
    pub software: u64,
    /// Submissions repeated because the accelerator's queue was full.
    pub retries: u64,
    /// Pages sent uncompressed because they did not shrink. Each is also counted as a job.
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

/// Device that an encoder or decoder uses. If an accelerator fails permanently, `Hardware` changes to `Fallback` for the rest
/// of the migration.
#[derive(Debug, Clone, Default, PartialEq, Eq)]
pub enum RunsOn {
    /// The CPU, as configured: the method has no accelerator, or accelerators are switched off.
    #[default]
    Software,
    /// The CPU instead of an accelerator, with the reason.
    Fallback(Arc<str>),
    /// The accelerator with this description.
    Hardware(Arc<str>),
}

#[cfg(test)]
mod tests {
    use super::*;
    use crate::METHODS;

    #[test]
    fn a_program_without_accelerators_uses_the_cpu_and_refuses_to_require_one() {
        for method in METHODS.iter().filter(|method| method.hardware.is_some()) {
            let decoder = (method.decoder)(Accelerator::Auto(&[])).expect(method.name);
            assert_eq!(decoder.runs_on(), RunsOn::Fallback(NOT_BUILT_IN.into()));
            let settings = EncoderSettings {
                accelerator: Accelerator::Required(&[]),
                ..EncoderSettings::software(method.default_level)
            };
            let error = (method.encoder)(&settings).err().expect("no accelerator");
            let device = method.hardware.expect("filtered");
            assert_eq!(
                error.to_string(),
                format!("{}: {device} cannot be used: {NOT_BUILT_IN}", method.name)
            );
        }
    }
}

//! A channel's use of Intel QAT. After a permanent failure the CPU does all the work.

use std::time::Duration;

use super::{DEVICE, NAME, members};
use crate::device::{Direction, Hardware, MemberDevice, MemberFailure};
use crate::{Accelerator, MethodError, RunsOn};

/// Consecutive failures after which the channel stops using the device. Each failure costs the set-up of a new session, and the
/// CPU repeats the packet. Three failures in three sessions are no accident.
const FAILURES: u32 = 3;
/// Maximum retries of a packet while all instances of the device are in use, and the pause before each. A packet of 512 KiB
/// uses an instance for about 100 us: QEMU measured 3.3 GB/s and more with four devices. The CPU would need about 2000 us.
const RETRIES: u32 = 8;
const PAUSE: Duration = Duration::from_micros(100);
/// Consecutive packets without a free instance after which the channel stops using the device: a dead device looks like a busy
/// one.
const REFUSED: u32 = 64;

/// Tests an accelerator before use: one device compresses two members, another decompresses them. The test is necessary: a
/// second `qzInit` of libqatzip reports success even without hardware.
///
/// # Errors
///
/// The reason, if a device cannot be opened, fails, or returns a wrong result.
pub fn trial(hardware: &Hardware) -> Result<(), String> {
    let sample: Vec<u8> = (0..members::LARGEST + members::LARGEST / 2)
        .map(|i| ((i * i) >> 7).to_le_bytes()[0])
        .collect();
    let run = |direction, bytes: &[u8]| -> Result<Vec<u8>, String> {
        let mut device = hardware.members(direction, 1)?;
        let output = device.run(bytes, sample.len()).map(<[u8]>::to_vec);
        output.map_err(|failure| {
            // The device may still be working.
            device.abandon();
            failure.to_string()
        })
    };
    let payload = run(Direction::Compress, &sample)?;
    if members::count(&payload, sample.len(), members::LARGEST).is_none() {
        return Err("a trial did not compress its input into members".to_owned());
    }
    if run(Direction::Decompress, &payload)? != sample {
        return Err("a trial did not restore its input".to_owned());
    }
    Ok(())
}

/// A channel's device, or the reason why it is missing.
pub(super) struct Device {
    session: Option<Box<dyn MemberDevice>>,
    /// Accelerator that opens a new session after a failure.
    hardware: Option<&'static Hardware>,
    direction: Direction,
    level: u8,
    failures: u32,
    refused: u32,
    retries: u64,
    runs_on: RunsOn,
}

impl Device {
    /// Opens the device for one channel. Without a usable device, [`run`](Self::run) always returns false.
    ///
    /// # Errors
    ///
    /// [`MethodError::Unavailable`] if a required device is missing.
    pub(super) fn open(
        accelerator: Accelerator,
        direction: Direction,
        level: u8,
    ) -> Result<Self, MethodError> {
        let (opened, runs_on) = accelerator.open(NAME, DEVICE, |hardware| {
            Ok((hardware.members(direction, level)?, hardware))
        })?;
        let (session, hardware) = opened.unzip();
        Ok(Self {
            session,
            hardware,
            direction,
            level,
            failures: 0,
            refused: 0,
            retries: 0,
            runs_on,
        })
    }

    /// Returns the device's maximum number of uncompressed bytes per member; `None` without a device.
    pub(super) fn largest_member(&self) -> Option<usize> {
        let session = self.session.as_ref()?;
        Some(session.largest_member())
    }

    /// Processes `bytes` on the device, as in [`MemberDevice::run`], and passes the output to `accept`. Returns true if
    /// `accept` accepts the output; false also after a failure, or without a device.
    pub(super) fn run(
        &mut self,
        bytes: &[u8],
        uncompressed_len: usize,
        mut accept: impl FnMut(&[u8]) -> Result<(), &'static str>,
    ) -> bool {
        for offer in 0..=RETRIES {
            let Some(session) = &mut self.session else {
                return false;
            };
            let taken = session.run(bytes, uncompressed_len).and_then(|output| {
                accept(output).map_err(|why| MemberFailure::Failed(why.to_owned()))
            });
            match taken {
                Ok(()) => {
                    (self.failures, self.refused) = (0, 0);
                    return true;
                }
                Err(MemberFailure::Busy) if offer < RETRIES => {
                    self.retries += 1;
                    std::thread::sleep(PAUSE);
                }
                Err(failure) => {
                    self.failed(&failure);
                    return false;
                }
            }
        }
        false
    }

    fn failed(&mut self, failure: &MemberFailure) {
        match failure {
            MemberFailure::Busy => {
                self.refused += 1;
                if self.refused == REFUSED {
                    self.leave(&format!("{failure} for {REFUSED} packets in a row"));
                }
            }
            MemberFailure::NoAnswer => {
                if let Some(session) = self.session.take() {
                    session.abandon();
                }
                self.leave(&failure.to_string());
            }
            MemberFailure::Failed(_) => {
                self.failures += 1;
                if self.failures == FAILURES {
                    self.leave(&format!(
                        "{FAILURES} failures in a row, the last: {failure}"
                    ));
                } else {
                    self.renew();
                }
            }
        }
    }

    /// Replaces a session that may be unusable: after a failed decode, every later call on the session fails too.
    fn renew(&mut self) {
        // The old session must release its instance and memory first.
        self.session = None;
        let Some(hardware) = self.hardware else {
            return;
        };
        match hardware.members(self.direction, self.level) {
            Ok(session) => self.session = Some(session),
            Err(reason) => self.leave(&reason),
        }
    }

    fn leave(&mut self, reason: &str) {
        self.session = None;
        if let RunsOn::Hardware(what) = &self.runs_on {
            self.runs_on = RunsOn::Fallback(format!("{what}: {reason}").into());
        }
    }

    /// Returns the count of repeated submissions.
    pub(super) fn retries(&self) -> u64 {
        self.retries
    }

    pub(super) fn runs_on(&self) -> RunsOn {
        self.runs_on.clone()
    }
}

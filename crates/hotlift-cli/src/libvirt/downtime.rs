//! Downtime limit of a domain's QEMU during its migration by libvirt.
//!
//! As the memory begins to move, libvirt stores QEMU's parameters, and restores them if the migration fails, even if this
//! process is killed. So the limit is changed only from then on.

use std::ffi::OsString;
use std::time::Instant;

use hotlift_qemu::downtime_limit::{DowntimeLimit, LimitArgs, RampedLimit};
use hotlift_qemu::downtime_ramp::{DowntimeRamp, ThrottleTrigger};
use hotlift_terminal::error::error_line;
use hotlift_terminal::output::warn;

use crate::libvirt::virsh::{Domain, Job, Libvirt, Progress, VirshError};

/// Prefixes of the options of `virsh migrate` without a switchover by the downtime limit.
const UNLIMITED: [&str; 2] = ["--offline", "--postcopy"];

/// Downtime limit of a domain's QEMU during its migration.
#[derive(Debug)]
pub struct DomainLimit<'a> {
    libvirt: &'a Libvirt,
    domain: &'a Domain,
    /// The limit before the migration in milliseconds.
    before: u64,
    limit: RampedLimit,
    /// The last value that was sent to libvirt, which may have set it without an answer.
    sent: Option<u64>,
    poll_at: Instant,
}

impl<'a> DomainLimit<'a> {
    /// Reads the domain's limit before a migration with these options of `virsh migrate`. Returns `None` if it will not change.
    pub fn new(
        libvirt: &'a Libvirt,
        domain: &'a Domain,
        args: LimitArgs,
        options: &[OsString],
    ) -> Option<Self> {
        let has = |prefix: &str| {
            let mut words = options.iter().map(|word| word.to_string_lossy());
            words.any(|word| word.starts_with(prefix))
        };
        if (!args.ramps && args.own.is_none()) || UNLIMITED.into_iter().any(has) {
            return None;
        }
        let before = libvirt.downtime_limit(domain).inspect_err(|error| {
            let error = error_line(error);
            warn!(
                "hotlift: the downtime limit of {} stays: {error}",
                domain.name
            );
        });
        let before = before.ok()?;
        let most = args.own_ms().unwrap_or(before);
        let throttle = has("--auto-converge").then(ThrottleTrigger::default);
        let ramp = match args.ramps {
            true => DowntimeRamp::new(most, throttle),
            false => None,
        };
        let ramp = ramp.unwrap_or_else(|| DowntimeRamp::constant(most));
        Some(Self {
            libvirt,
            domain,
            before,
            poll_at: Instant::now() + ramp.interval(),
            limit: RampedLimit::to_begin(ramp, before),
            sent: None,
        })
    }

    /// Returns the time of the next poll; `None` if none is needed any more.
    pub fn poll_at(&self) -> Option<Instant> {
        (!self.limit.has_ended()).then_some(self.poll_at)
    }

    /// Polls libvirt, and sets the limit that the ramp then has. Returns the statistics of the migration.
    pub fn poll(&mut self) -> Option<Job> {
        let Progress {
            job,
            figures,
            downtime_limit,
        } = self.libvirt.progress(self.domain).unwrap_or_default();
        if let (Some(figures), Some(_)) = (figures, downtime_limit) {
            let is_held = [self.limit.applied(), self.sent].contains(&downtime_limit);
            let (libvirt, domain, sent) = (self.libvirt, self.domain, &mut self.sent);
            let set = |limit| match limit {
                _ if !is_held => Ok(false),
                None => Ok(true),
                Some(limit) => {
                    *sent = Some(limit);
                    libvirt.set_downtime_limit(domain, limit).map(|()| true)
                }
            };
            self.limit.poll::<VirshError>(Instant::now(), figures, set);
        }
        self.poll_at = Instant::now() + self.limit.ramp().interval();
        job
    }

    /// Returns the limit as it is shown during the migration.
    pub fn shown(&mut self) -> &mut RampedLimit {
        &mut self.limit
    }

    /// Returns the limit for the operator, if it began low.
    pub fn report(&self) -> Option<DowntimeLimit> {
        self.limit.report()
    }

    /// Restores the limit after a failed migration if libvirt has not.
    pub fn restore(&self) {
        // An error: the domain has ended, or libvirt does not answer, which the caller reports.
        if self.sent.is_none_or(|sent| sent == self.before)
            || self.libvirt.downtime_limit(self.domain).ok() != self.sent
        {
            return;
        }
        if let Err(error) = self.libvirt.set_downtime_limit(self.domain, self.before) {
            let (name, before, error) = (&self.domain.name, self.before, error_line(&error));
            warn!("hotlift: cannot restore the downtime limit of {name} to {before} ms: {error}");
        }
    }
}

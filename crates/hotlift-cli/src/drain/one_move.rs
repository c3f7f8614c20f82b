//! Moves one domain of a drain, in a thread of its own: a slow answer of libvirt then delays no other move.

use std::ffi::OsString;
use std::io::PipeReader;
use std::os::fd::AsFd;
use std::panic::{AssertUnwindSafe, catch_unwind};
use std::thread;
use std::time::{Duration, Instant};

use hotlift_mem::is_readable;
use hotlift_qemu::downtime_limit::{DowntimeLimit, LimitArgs};
use hotlift_terminal::error::error_line;

use crate::drain::display::{MoveProgress, MoveState};
use crate::drain::peers::lost_for;
use crate::drain::plan::Step;
use crate::libvirt::downtime::DomainLimit;
use crate::libvirt::guest_location::{GuestLocation, guest_location};
use crate::libvirt::virsh::{ABORT_AGAIN, Domain, Libvirt, Migrating, State, VirshError};

/// Interval at which a move queries libvirt for statistics.
pub const POLL_INTERVAL: Duration = Duration::from_secs(1);

/// One domain's move.
#[derive(Debug)]
pub struct Move {
    pub here: Libvirt,
    pub step: Step,
    /// Options of `virsh migrate`.
    pub options: Vec<OsString>,
    /// Downtime limit of the domain's QEMU.
    pub limit: LimitArgs,
    /// True if the operator sees statistics during the migration, so they must be queried.
    pub is_displayed: bool,
    /// Readable once the move must not start any more, or must be aborted.
    pub abort: PipeReader,
}

/// Event of a move: its progress, or its end.
#[derive(Debug)]
pub enum MoveEvent {
    /// Figures so far.
    Progress(MoveProgress),
    /// The move ended.
    Ended {
        /// Final state of the domain.
        move_state: MoveState,
        /// Reason why the destination counts as lost; `None` if the destination answers.
        lost: Option<String>,
    },
}

impl Move {
    /// Starts the move in a new thread, and passes its events to `report`; the last one is [`MoveEvent::Ended`].
    pub fn start(self, report: impl Fn(MoveEvent) + Send + 'static) {
        thread::spawn(move || {
            // The drain waits for the end event of each move, so it is also sent after a panic.
            let ended = catch_unwind(AssertUnwindSafe(|| self.follow(&report)));
            report(ended.unwrap_or_else(|_| {
                let reason = "the thread that watches its migration panicked".to_owned();
                let move_state = MoveState::Unknown { reason };
                MoveEvent::Ended {
                    move_state,
                    lost: None,
                }
            }));
        });
    }

    fn follow(&self, report: &impl Fn(MoveEvent)) -> MoveEvent {
        let to = Libvirt::at(self.step.to.as_deref().unwrap_or_default());
        let move_state = self.run(&to, |progress| report(MoveEvent::Progress(progress)));
        let answers = match move_state {
            MoveState::Moved { .. } | MoveState::Waiting => Ok(()),
            _ => to.ask(&["uri"]).map(drop),
        };
        let lost = answers.err().map(|error| lost_for(&to, &error));
        MoveEvent::Ended { move_state, lost }
    }

    fn run(&self, to: &Libvirt, report: impl Fn(MoveProgress)) -> MoveState {
        let domain = &self.step.domain;
        let mut limit = DomainLimit::new(&self.here, domain, self.limit, &self.options);
        let mut migrating = match self.begin(to) {
            Ok(Some(migrating)) => migrating,
            Ok(None) => return MoveState::Waiting,
            Err(error) => {
                let reason = error_line(&error);
                return match self.here.settled_state(domain) {
                    Ok(State::Gone) => MoveState::Ended {
                        reason: self.here.with_end(domain, reason),
                    },
                    _ => MoveState::NotBegun { reason },
                };
            }
        };
        let mut poll_at = Instant::now() + POLL_INTERVAL;
        let mut is_aborted = false;
        loop {
            let abort = self.abort.as_fd();
            let to_abort = is_readable(abort);
            // Repeated until libvirt can abort the migration.
            if to_abort && !is_aborted {
                is_aborted = self.here.abort(domain).is_ok();
            }
            let limit_at = limit.as_ref().filter(|_| !to_abort);
            let limit_at = limit_at.and_then(DomainLimit::poll_at);
            let until = match to_abort && !is_aborted {
                true => Some(Instant::now() + ABORT_AGAIN),
                false => {
                    let shown_at = self.is_displayed.then_some(poll_at);
                    [shown_at, limit_at].into_iter().flatten().min()
                }
            };
            let wakes = &[abort][usize::from(to_abort)..];
            let ended = match migrating.wait(wakes, until) {
                Ok(ended) => ended,
                Err(error) => Some(Err(error_line(&error))),
            };
            if let Some(ended) = ended {
                if ended.is_err() {
                    limit.iter().for_each(DomainLimit::restore);
                }
                let limit = limit.as_ref().and_then(DomainLimit::report);
                return move_state(&self.here, to, domain, ended, limit);
            }
            let now = Instant::now();
            let job = match &mut limit {
                Some(limit) if limit_at.is_some_and(|at| now >= at) => limit.poll(),
                _ if self.is_displayed && now >= poll_at => self.here.job(domain, false),
                _ => continue,
            };
            poll_at = now + POLL_INTERVAL;
            let mut limit = limit.as_mut().map(DomainLimit::shown);
            report(MoveProgress {
                job,
                limit: limit.as_ref().and_then(|limit| limit.report()),
                remark: limit.as_mut().and_then(|limit| limit.remark()),
            });
        }
    }

    /// Starts the migration. Returns `None` if the move must not start any more.
    fn begin(&self, to: &Libvirt) -> Result<Option<Migrating>, VirshError> {
        let mut options = self.options.clone();
        // The domain's definition moves, too: a drained host must not keep it.
        if self.here.is_persistent(&self.step.domain)? {
            options.extend(["--persistent", "--undefinesource"].map(OsString::from));
        }
        match is_readable(self.abort.as_fd()) {
            true => Ok(None),
            false => self.here.migrate(&self.step.domain, to, &options).map(Some),
        }
    }
}

/// Returns the final state of a domain whose migration has ended with the result `ended`.
fn move_state(
    here: &Libvirt,
    to: &Libvirt,
    domain: &Domain,
    ended: Result<(), String>,
    downtime_limit: Option<DowntimeLimit>,
) -> MoveState {
    let Err(reason) = ended else {
        return MoveState::Moved {
            job: to.job(domain, true),
            downtime_limit,
        };
    };
    match guest_location(here, to, domain, State::Running, &reason) {
        GuestLocation::Here => MoveState::Stayed { reason },
        GuestLocation::There => MoveState::Moved {
            job: to.job(domain, true),
            downtime_limit,
        },
        GuestLocation::Ended => MoveState::Ended {
            reason: here.with_end(domain, reason),
        },
        GuestLocation::Unknown { seen } => MoveState::Unknown {
            reason: format!("{seen}: {reason}"),
        },
    }
}

//! A domain of a drain on its way: in a thread of its own, so that no answer of libvirt's holds up another domain.

use std::ffi::OsString;
use std::sync::mpsc::Sender;
use std::thread;
use std::time::Duration;

use hotlift_console::error::error_line;

use crate::drain_display::Fate;
use crate::drain_peers::lost_for;
use crate::drain_plan::Step;
use crate::virsh::{Domain, Job, Libvirt, Migrating, State, VirshError};
use crate::whereabouts::{Whereabouts, whereabouts};

/// Between two looks at what libvirt says of a migration under way.
pub const LOOK: Duration = Duration::from_secs(1);

/// A domain that is to be moved.
#[derive(Debug)]
pub struct Move {
    pub here: Libvirt,
    pub step: Step,
    /// Options of `virsh migrate`.
    pub options: Vec<OsString>,
    /// Somebody sees what its migration costs so far.
    pub is_looked_at: bool,
}

/// What is told of a move.
#[derive(Debug)]
pub enum Told {
    /// What it costs so far.
    Job(Job),
    /// It has ended.
    Ended {
        /// What has become of the domain.
        fate: Fate,
        /// Why its destination is lost, if it is.
        lost: Option<String>,
    },
}

impl Move {
    /// Begins it, and tells of it under `index`; its end comes last.
    pub fn start(self, index: usize, told: Sender<(usize, Told)>) {
        thread::spawn(move || {
            // The command has ended if nobody listens.
            let tell = |what| drop(told.send((index, what)));
            let to = Libvirt::at(self.step.to.as_deref().unwrap_or_default());
            let fate = self.run(&to, |job| tell(Told::Job(job)));
            let answers = match fate {
                Fate::Moved { .. } => Ok(()),
                _ => to.ask(&["uri"]).map(drop),
            };
            let lost = answers.err().map(|error| lost_for(&to, &error));
            tell(Told::Ended { fate, lost });
        });
    }

    fn run(&self, to: &Libvirt, tell: impl Fn(Job)) -> Fate {
        let domain = &self.step.domain;
        let mut migrating = match self.begin(to) {
            Ok(migrating) => migrating,
            Err(error) => {
                let reason = error_line(&error);
                return match self.here.state(domain) {
                    Ok(State::Gone) => Fate::Ended { reason },
                    _ => Fate::NotBegun { reason },
                };
            }
        };
        loop {
            match migrating.wait(LOOK) {
                Ok(Some(ended)) => return fate(&self.here, to, domain, ended),
                Err(error) => return fate(&self.here, to, domain, Err(error_line(&error))),
                Ok(None) if self.is_looked_at => {
                    if let Some(job) = self.here.job(domain, false) {
                        tell(job);
                    }
                }
                Ok(None) => {}
            }
        }
    }

    fn begin(&self, to: &Libvirt) -> Result<Migrating, VirshError> {
        let mut options = self.options.clone();
        // A host that is emptied is to define nothing of what has left it.
        if self.here.is_persistent(&self.step.domain)? {
            options.extend(["--persistent", "--undefinesource"].map(OsString::from));
        }
        self.here.migrate(&self.step.domain, to, &options)
    }
}

/// Where a domain is whose migration has ended.
fn fate(here: &Libvirt, to: &Libvirt, domain: &Domain, ended: Result<(), String>) -> Fate {
    let Err(reason) = ended else {
        return Fate::Moved {
            job: to.job(domain, true),
        };
    };
    match whereabouts(here, to, domain, State::Running) {
        Whereabouts::Here => Fate::Stayed { reason },
        Whereabouts::There => Fate::Moved {
            job: to.job(domain, true),
        },
        Whereabouts::Ended => Fate::Ended { reason },
        Whereabouts::Unknown { seen } => Fate::Unknown {
            reason: format!("{seen}: {reason}"),
        },
    }
}

//! What a drain chooses from: the domains of this host, and the destinations, as their libvirts speak of them.

use std::collections::BTreeSet;
use std::thread;
use std::time::{Duration, Instant};

use hotlift_console::error::error_line;
use hotlift_console::output::complain;
use hotlift_console::signals::TICK;

use crate::drain_plan::{Candidate, Place, Stays, short};
use crate::error::CommandError;
use crate::virsh::{Domain, Libvirt, State, VirshError};

/// How long the samples of what domains write may take after they were begun; they take a second.
const SAMPLES: Duration = Duration::from_secs(10);

/// Domains of this host.
#[derive(Debug, Default)]
pub struct Domains {
    /// Their guests run.
    running: BTreeSet<Domain>,
    /// Their guests stand still, as after a migration of which nobody has said how it ended.
    still: BTreeSet<Domain>,
}

impl Domains {
    /// All that are active here, or those of names and UUIDs. One that is not active here any more is left out, so that the
    /// same command goes on with what is left.
    ///
    /// # Errors
    /// [`CommandError::NoDomain`] for what names nothing, here or at a destination; [`VirshError`].
    pub fn chosen(
        here: &Libvirt,
        typed: &[String],
        places: &[Place],
    ) -> Result<Self, CommandError> {
        let running = here.domains(&["--state-running"])?;
        let still = here.domains(&["--state-paused", "--state-other"])?;
        if typed.is_empty() {
            return Ok(Self {
                running: running.into_iter().collect(),
                still: still.into_iter().collect(),
            });
        }
        let mut chosen = Self::default();
        let mut unknown = Vec::new();
        for typed in typed {
            if let Some(domain) = Domain::find(&running, typed) {
                chosen.running.insert(domain.clone());
            } else if let Some(domain) = Domain::find(&still, typed) {
                chosen.still.insert(domain.clone());
            } else if here.find(typed)?.is_some() {
                complain!("{typed} does not run here, and is left out");
            } else if let Some(place) = places.iter().find(|place| place.has(typed)) {
                complain!("{typed} is at {}, and is left out", short(&place.uri));
            } else {
                unknown.push(format!("'{typed}'"));
            }
        }
        match unknown.is_empty() {
            true => Ok(chosen),
            false => Err(CommandError::NoDomain {
                typed: unknown.join(", "),
            }),
        }
    }

    /// How large they are, and how much they write. One that has ended meanwhile is left out.
    pub fn measured(&self, here: &Libvirt) -> Vec<Candidate> {
        for domain in &self.running {
            // Without it the plan is made without what the domain writes.
            let _ = here.sample_writes(domain);
        }
        let deadline = Instant::now() + SAMPLES;
        let running = self.running.iter().filter_map(|domain| {
            let mut memory = here.memory(domain);
            while matches!(memory, Ok((_, None))) && Instant::now() < deadline {
                thread::sleep(TICK);
                memory = here.memory(domain);
            }
            candidate(here, domain, memory, None)
        });
        let still = self
            .still
            .iter()
            .filter_map(|domain| candidate(here, domain, here.memory(domain), Some(Stays::Still)));
        running.chain(still).collect()
    }
}

fn candidate(
    here: &Libvirt,
    domain: &Domain,
    memory: Result<(u64, Option<u64>), VirshError>,
    stays: Option<Stays>,
) -> Option<Candidate> {
    let (memory, written, stays) = match memory {
        Ok((memory, written)) => (memory, written, stays),
        Err(_) if matches!(here.state(domain), Ok(State::Gone)) => {
            complain!("{} has ended, and is left out", domain.name);
            return None;
        }
        Err(error) => {
            complain!("hotlift: {}: {}", domain.name, error_line(&error));
            (0, None, stays.or(Some(Stays::Unmeasured)))
        }
    };
    Some(Candidate {
        domain: domain.clone(),
        memory,
        written,
        stays,
    })
}

/// The destinations that answer, with their memory.
///
/// # Errors
/// [`VirshError`] if none does.
pub fn places(uris: &[String]) -> Result<Vec<Place>, VirshError> {
    let mut places = Vec::new();
    let mut failed = Vec::new();
    for uri in uris {
        match Libvirt::at(uri).free_memory() {
            Ok(free) => places.push(Place {
                uri: uri.clone(),
                free,
            }),
            Err(error) => failed.push((uri, error)),
        }
    }
    if places.is_empty()
        && let Some((_, error)) = failed.pop()
    {
        return Err(error);
    }
    for (uri, error) in failed {
        complain!("{} is left out: {}", short(uri), error_line(&error));
    }
    Ok(places)
}

impl Place {
    fn has(&self, typed: &str) -> bool {
        // One that does not answer any more has nothing that could be counted on.
        matches!(Libvirt::at(&self.uri).find(typed), Ok(Some(_)))
    }
}

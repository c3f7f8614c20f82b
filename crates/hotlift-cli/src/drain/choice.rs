//! Input of a plan: the domains of this host and the destinations, as their libvirts report them.

use std::collections::{BTreeMap, BTreeSet};
use std::iter::repeat;
use std::panic::resume_unwind;
use std::thread;
use std::time::{Duration, Instant};

use hotlift_terminal::error::error_line;
use hotlift_terminal::output::warn;

use crate::drain::plan::{Candidate, DestinationHost, StayReason, short};
use crate::error::CommandError;
use crate::libvirt::virsh::{Domain, Libvirt, Memory, State, VirshError};

/// Timeout of the write samples of domains, which take a second.
const SAMPLES: Duration = Duration::from_secs(10);

/// Poll interval for the samples.
const SAMPLE: Duration = Duration::from_millis(200);

/// Domains of this host.
#[derive(Debug, Default)]
pub struct Domains {
    /// Domains with running guests.
    running: BTreeSet<Domain>,
    /// Domains with paused guests, as after a migration with an unknown end.
    paused: BTreeSet<Domain>,
}

impl Domains {
    /// Returns all active domains, or those with given names and UUIDs. One that is no longer active here is left out, so that
    /// the same command continues with the rest.
    ///
    /// # Errors
    /// [`CommandError::NoDomain`] for a name that exists neither here nor at a destination; [`VirshError`].
    pub fn chosen(
        here: &Libvirt,
        typed: &[String],
        places: &[DestinationHost],
    ) -> Result<Self, CommandError> {
        let running = here.domains(&["--state-running"])?;
        let paused = here.domains(&["--state-paused", "--state-other"])?;
        if typed.is_empty() {
            return Ok(Self {
                running: running.into_iter().collect(),
                paused: paused.into_iter().collect(),
            });
        }
        let mut chosen = Self::default();
        let mut unknown = Vec::new();
        for typed in typed {
            if let Some(domain) = Domain::find(&running, typed) {
                chosen.running.insert(domain.clone());
            } else if let Some(domain) = Domain::find(&paused, typed) {
                chosen.paused.insert(domain.clone());
            } else if here.find(typed)?.is_some() {
                warn!("skipped {typed}: it does not run here");
            } else if let Some(place) = places.iter().find(|place| place.has(typed)) {
                warn!("skipped {typed}: it is at {}", short(&place.uri));
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

    /// Measures the sizes and write rates of the domains. A domain that has ended in the meantime is left out.
    pub fn measured(&self, here: &Libvirt) -> Vec<Candidate> {
        let deadline = Instant::now() + SAMPLES;
        let memory = self.memory(here, deadline);
        let running = self.running.iter().zip(repeat(None));
        let paused = self.paused.iter().zip(repeat(Some(StayReason::Still)));
        let candidate = |(domain, stays): (&Domain, _)| {
            let of_all = memory.get(&domain.name).copied();
            let memory = of_all.map_or_else(|| alone(here, domain, deadline), Ok);
            candidate(here, domain, memory, stays)
        };
        running.chain(paused).filter_map(candidate).collect()
    }

    /// Returns libvirt's figures of all domains, with write samples of running ones. Returns none after an error: the caller
    /// queries each missing domain separately.
    fn memory(&self, here: &Libvirt, deadline: Instant) -> BTreeMap<String, Memory> {
        let running: Vec<_> = self.running.iter().collect();
        // The plan does not require samples.
        let _ = here.sample_writes(&running);
        sampled(here, None, deadline).unwrap_or_default()
    }
}

/// Returns the memory figures of a domain, or of all, once no sample is running.
fn sampled(
    here: &Libvirt,
    of: Option<&Domain>,
    deadline: Instant,
) -> Result<BTreeMap<String, Memory>, VirshError> {
    loop {
        let memory = here.memory(of)?;
        let waits = memory.values().any(|one| one.is_sampled_now);
        if !waits || Instant::now() >= deadline {
            return Ok(memory);
        }
        thread::sleep(SAMPLE);
    }
}

fn alone(here: &Libvirt, domain: &Domain, deadline: Instant) -> Result<Memory, VirshError> {
    let mut memory = sampled(here, Some(domain), deadline)?;
    let of_it = memory.remove(&domain.name);
    of_it.ok_or_else(|| VirshError::Garbage {
        at: here.uri().to_owned(),
        what: "the memory of a domain",
        output: String::new(),
    })
}

fn candidate(
    here: &Libvirt,
    domain: &Domain,
    memory: Result<Memory, VirshError>,
    stays: Option<StayReason>,
) -> Option<Candidate> {
    let (memory, written, stays) = match memory {
        Ok(memory) => (memory.bytes, memory.written, stays),
        Err(_) if matches!(here.settled_state(domain), Ok(State::Gone)) => {
            warn!("skipped {}: it has ended", domain.name);
            return None;
        }
        Err(error) => {
            warn!("hotlift: {}: {}", domain.name, error_line(&error));
            (0, None, stays.or(Some(StayReason::Unmeasured)))
        }
    };
    Some(Candidate {
        domain: domain.clone(),
        memory,
        written,
        stays,
    })
}

/// Returns the destinations that answer, with their memory.
///
/// # Errors
/// [`VirshError`] if none does.
pub fn destinations(uris: &[String]) -> Result<Vec<DestinationHost>, VirshError> {
    let asked: Vec<_> = uris
        .iter()
        .map(|uri| {
            let libvirt = Libvirt::at(uri);
            (uri, thread::spawn(move || libvirt.free_memory()))
        })
        .collect();
    let mut places = Vec::new();
    let mut failed = Vec::new();
    for (uri, answer) in asked {
        match answer.join().unwrap_or_else(|panic| resume_unwind(panic)) {
            Ok(free) => places.push(DestinationHost {
                uri: uri.clone(),
                free,
            }),
            Err(error) => failed.push((uri, error)),
        }
    }
    // This error ends the command, so it is not printed as a warning.
    let last = match places.is_empty() {
        true => failed.pop(),
        false => None,
    };
    for (uri, error) in failed {
        warn!("skipped {}: {}", short(uri), error_line(&error));
    }
    match last {
        Some((_, error)) => Err(error),
        None => Ok(places),
    }
}

impl DestinationHost {
    fn has(&self, typed: &str) -> bool {
        // A destination that no longer answers does not count.
        matches!(Libvirt::at(&self.uri).find(typed), Ok(Some(_)))
    }
}

//! Input for the plan of a drain: the domains of this host, and the destinations, as libvirt reports them.

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

/// Timeout for the samples of memory writes of all domains; one sample takes a second.
const SAMPLES: Duration = Duration::from_secs(10);

/// Interval of checks whether the samples are complete.
const SAMPLE: Duration = Duration::from_millis(200);

/// Domains of this host that a drain should move.
#[derive(Debug, Default)]
pub struct Domains {
    /// Domains whose guests run.
    running: BTreeSet<Domain>,
    /// Domains whose guests are paused, as after a migration with unknown result.
    paused: BTreeSet<Domain>,
}

impl Domains {
    /// Returns all active domains, or only those whose names or UUIDs are `typed`. Skips domains that are not active here any
    /// more, so that the same command can be repeated.
    ///
    /// # Errors
    /// [`CommandError::NoDomain`] for a name that exists neither here nor at a destination; [`VirshError`] if libvirt fails.
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

    /// Returns the domains with their memory sizes and write rates. Skips domains that have ended in the meantime.
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

    /// Returns libvirt's memory figures of all domains, with write rates of running ones. Returns an empty map after an error:
    /// the caller then queries each domain separately.
    fn memory(&self, here: &Libvirt, deadline: Instant) -> BTreeMap<String, Memory> {
        let running: Vec<_> = self.running.iter().collect();
        // Errors are ignored: a plan is possible without samples.
        let _ = here.sample_writes(&running);
        sampled(here, None, deadline).unwrap_or_default()
    }
}

/// Returns the memory figures of a domain (`of`), or of all. Waits until no sample is running, or until `deadline`.
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

/// Returns the destinations that answer, with their free memory.
///
/// # Errors
/// [`VirshError`] if no destination answers.
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
    // This error ends the command and is printed then, so it is not printed as a warning.
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
        // A destination that does not answer any more counts as one without this domain.
        matches!(Libvirt::at(&self.uri).find(typed), Ok(Some(_)))
    }
}

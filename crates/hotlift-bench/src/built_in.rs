//! Runs one migration of the built-in guest as `demo` does, and adds the kernel's counts for its threads.

use std::time::Duration;

use hotlift::figures::DestinationReport;
use hotlift_command::events::ProgressSnapshot;
use hotlift_command::pair::{
    Pair, PairEvent, PairResult, ProcessPlace, StderrHandling, destination_side,
};
use hotlift_terminal::signals::Interrupt;

use super::cell::Cell;
use super::record::{Completed, Outcome, ThreadCounts};
use super::remote_host::RemoteHost;
use super::threads::Sampler;
use crate::error::BenchError;

/// Prefixes of the names of migration threads. All other threads belong to the guest or to the process.
const MIGRATION_THREADS: &[&str] = &["mig/", "compress", "decompress", "dsa_completion"];

/// Runs `cell` once. `remote` is the destination host; `None` if the destination is on this host.
///
/// # Errors
/// If a process cannot be started.
pub fn run(
    cell: &Cell,
    place: &ProcessPlace,
    remote: Option<&RemoteHost>,
    limit: Duration,
    interrupt: &Interrupt,
    report: &mut dyn FnMut(&ProgressSnapshot),
) -> Result<Outcome, BenchError> {
    let pair = Pair {
        kind: cell.kind,
        guest: &cell.guest,
        migration: &cell.migration,
        label: "bench",
        place,
        limit: Some(limit),
        errors: StderrHandling::Kept,
    };
    let destination = match remote {
        None => pair.destination()?,
        Some(remote) => match remote.destination(cell, limit, interrupt) {
            Ok(destination) => destination,
            Err(error) => {
                return Ok(Outcome::Failed {
                    error: error.line(),
                });
            }
        },
    };
    let mut held = cell.held_memory(remote.is_some());
    let mut sampler = None;
    let mut timeline = Vec::new();
    let moved = pair.migrate(destination, interrupt, &mut |tale| match tale {
        PairEvent::Begun {
            source,
            destination,
        } => {
            let processes: Vec<u32> = std::iter::once(*source).chain(*destination).collect();
            sampler = Some(Sampler::start(&processes));
        }
        PairEvent::Filled => held = None,
        PairEvent::Progress(moment) => {
            report(moment);
            timeline.push((*moment).clone());
        }
    })?;
    let mut counted = sampler.map(Sampler::finish).unwrap_or_default().into_iter();
    let mut threads = || migration_threads(counted.next().unwrap_or_default());
    let (source_threads, destination_threads) = (threads(), threads());
    Ok(outcome(moved, |completed| {
        completed.source_threads = source_threads;
        completed.destination_threads = destination_threads;
        completed.timeline = timeline;
    }))
}

fn migration_threads(threads: Vec<ThreadCounts>) -> Vec<ThreadCounts> {
    let is_ours = |name: &str| {
        MIGRATION_THREADS
            .iter()
            .any(|begin| name.starts_with(begin))
    };
    let mut threads = threads;
    threads.retain(|thread| is_ours(&thread.name));
    threads
}

fn outcome(moved: PairResult, fill_in: impl FnOnce(&mut Completed)) -> Outcome {
    let filled = moved.filled;
    let (source, destination, check) = match moved {
        PairResult {
            source: Some(source),
            destination: Some(destination),
            check: Some(check),
            error: None,
            ..
        } => (source, destination, check),
        PairResult { error, check, .. } => {
            let problem = check.and_then(|check| check.problem);
            let error = error.or(problem);
            return Outcome::Failed {
                error: error.unwrap_or_else(|| "one side did not report how it ended".to_owned()),
            };
        }
    };
    if let Some(problem) = check.problem {
        return Outcome::Failed {
            error: format!("guest check failed after migration: {problem}"),
        };
    }
    let destination = DestinationReport {
        side: destination_side(destination.clone(), source.total_ms),
        ..destination
    };
    let mut completed = Completed {
        verified: Some(check.runs && check.verified),
        filled,
        source,
        destination,
        ..Completed::default()
    };
    fill_in(&mut completed);
    Outcome::Completed(Box::new(completed))
}

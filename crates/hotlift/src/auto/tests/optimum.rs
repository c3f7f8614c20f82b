//! Maximum throughput of a simulated migration.

use super::model::Scenario;
use super::truth::KINDS;
use crate::figures::to_f64;

/// Minimum time of each resource to send one byte of pages, in ns.
#[derive(Debug, Clone, Copy)]
struct Times([f64; 4]);

/// Returns the times of four resources: the source's threads, the destination's threads, the wire, and the CPUs of a shared
/// host.
fn times(scenario: &Scenario, kind: usize, candidate: usize) -> Times {
    let truth = &scenario.truth;
    let left = truth.left(kind, candidate);
    let near = truth.encode(kind, candidate) + left * truth.send();
    let far = truth.decode(kind, candidate);
    let threads = to_f64(u64::try_from(scenario.channels).unwrap_or(1));
    let cores = scenario.cores[0].1;
    let (far_cores, both) = match scenario.far_cores {
        Some(far_cores) => (far_cores, 0.0),
        None => (cores, (near + far) / cores),
    };
    Times([
        near / threads.min(cores),
        far / threads.min(far_cores),
        left / scenario.rate[0].1,
        both,
    ])
}

/// Returns the maximum rate of `candidate`, in bytes of pages per ns. `kinds` is the count of bytes of each kind of content.
pub(super) fn best_of(scenario: &Scenario, candidate: usize, kinds: &[f64; KINDS]) -> f64 {
    let mut sums = [0.0; 4];
    for (kind, bytes) in kinds.iter().enumerate() {
        let Times(times) = times(scenario, kind, candidate);
        for (sum, time) in sums.iter_mut().zip(times) {
            *sum += time * bytes;
        }
    }
    kinds.iter().sum::<f64>() / sums.into_iter().fold(0.0, f64::max)
}

/// Returns the maximum rate of a mix of candidates, in bytes of pages per ns. `kinds` is the count of bytes of each kind of
/// content. Solves the dual of the linear programme: it finds the prices of the resources, with sum 1, at which the cheapest
/// mix costs most.
pub(super) fn most(scenario: &Scenario, kinds: &[f64; KINDS]) -> f64 {
    let candidates = 0..scenario.candidates.len();
    let table: Vec<(f64, Vec<Times>)> = kinds
        .iter()
        .enumerate()
        .filter(|(_, bytes)| **bytes > 0.0)
        .map(|(kind, bytes)| {
            let row = candidates
                .clone()
                .map(|candidate| times(scenario, kind, candidate));
            (*bytes, row.collect())
        })
        .collect();
    let cost = |prices: [f64; 4]| -> f64 {
        let cheapest = |(bytes, row): &(f64, Vec<Times>)| {
            let all = row.iter().map(|Times(times)| -> f64 {
                times
                    .iter()
                    .zip(prices)
                    .map(|(time, price)| time * price)
                    .sum()
            });
            bytes * all.fold(f64::INFINITY, f64::min)
        };
        table.iter().map(cheapest).sum()
    };
    let wire = |near: f64, far: f64, both: f64| {
        highest(|share| {
            let rest = 1.0 - share;
            cost([rest * near, rest * far, share, rest * both])
        })
    };
    let dearest = match scenario.far_cores {
        Some(_) => highest(|far| wire(1.0 - far, far, 0.0)),
        None => highest(|both| {
            let rest = 1.0 - both;
            highest(|far| wire(rest * (1.0 - far), rest * far, both))
        }),
    };
    kinds.iter().sum::<f64>() / dearest
}

/// Returns the maximum of a concave function in the range 0 to 1.
fn highest(function: impl Fn(f64) -> f64) -> f64 {
    let (mut low, mut high) = (0.0, 1.0);
    for _ in 0..16 {
        let third = (high - low) / 3.0;
        if function(low + third) < function(high - third) {
            low += third;
        } else {
            high -= third;
        }
    }
    function(f64::midpoint(low, high))
        .max(function(0.0))
        .max(function(1.0))
}

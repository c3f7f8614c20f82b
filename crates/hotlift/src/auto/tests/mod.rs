//! Tests of the controller against simulated migrations.
//!
//! | file | subject |
//! |---|---|
//! | `model` | hosts, channels, the wire, and the controller's input |
//! | `truth` | real costs in the simulation |
//!
//! `cargo test -p hotlift auto::tests -- --nocapture` prints each cell of the grid, next to the best possible mix.

mod model;
mod optimum;
mod truth;

use model::{Policy, SECOND, SLOT, Scenario, Slot, simulate};
use optimum::{best_of, most};
use truth::{HALF, HOPELESS, KINDS, MIX, Random, TEXT, Truth};

use hotlift_methods::Accelerator;

use crate::auto::candidates::Candidate;
use crate::figures::to_f64;
use crate::options::Goal;

/// One Gbit/s in bytes per ns.
const GBIT: f64 = 0.125;

/// Maximum bytes in a channel's queues before the first write blocks.
const QUEUES: f64 = 524_288.0;

fn number(count: usize) -> f64 {
    to_f64(u64::try_from(count).unwrap_or(u64::MAX))
}

/// Builds a migration over a wire of `gbits` Gbit/s.
fn scenario(
    gbits: f64,
    (cores, channels): (f64, usize),
    far_cores: Option<f64>,
    contents: &'static [usize],
    seed: u64,
) -> Scenario {
    let candidates = Candidate::of_hotlifts(Accelerator::Off);
    Scenario {
        truth: Truth::new(&candidates, seed),
        candidates,
        channels,
        cores: vec![(0.0, cores)],
        far_cores,
        rate: vec![(0.0, gbits * GBIT)],
        window: 131_072.0,
        contents: vec![(0.0, contents)],
        seed,
    }
}

fn run(scenario: &Scenario, policy: Policy, seconds: f64) -> Vec<Slot> {
    simulate(scenario, policy, seconds * SECOND, f64::INFINITY)
}

/// Policy that lets the controller select each packet's encoding.
const AUTO: Policy = Policy::Auto(Goal::Fastest);

/// Returns the slots between two times, in s.
fn between(slots: &[Slot], from: f64, to: f64) -> impl Iterator<Item = &Slot> {
    slots.iter().enumerate().filter_map(move |(index, slot)| {
        let middle = (number(index) + 0.5) * SLOT / SECOND;
        (from..to).contains(&middle).then_some(slot)
    })
}

/// Returns the bytes of pages delivered between two times, in s.
fn delivered(slots: &[Slot], from: f64, to: f64) -> f64 {
    between(slots, from, to).map(|slot| slot.delivered).sum()
}

/// Returns the CPU time of source and destination per byte of pages, in ns.
fn cpu(slots: &[Slot]) -> f64 {
    let work: f64 = slots.iter().map(|slot| slot.cpu).sum();
    work / slots.iter().map(|slot| slot.delivered).sum::<f64>()
}

/// Returns the fraction of the packets that `candidate` sent between two times, in s.
fn share(slots: &[Slot], candidate: usize, from: f64, to: f64) -> f64 {
    let (mut these, mut all) = (0, 0);
    for slot in between(slots, from, to) {
        these += slot.packets[candidate];
        all += slot.packets.iter().sum::<u64>();
    }
    to_f64(these) / to_f64(all.max(1))
}

/// Returns the time when `bytes` bytes of pages had been delivered, in ns.
fn time_of(slots: &[Slot], bytes: f64) -> f64 {
    let mut sum = 0.0;
    for (index, slot) in slots.iter().enumerate() {
        if slot.delivered > 0.0 && sum + slot.delivered >= bytes {
            return SLOT * (number(index) + (bytes - sum) / slot.delivered);
        }
        sum += slot.delivered;
    }
    f64::INFINITY
}

/// Throughputs of one simulated scenario, in bytes per ns.
struct Cell {
    auto: f64,
    best_fixed: f64,
    best_mix: f64,
}

impl Cell {
    /// Measures method auto and the best fixed candidate over the same pages, because rates differ more by content than by
    /// policy. Excludes the start, and packets queued during the start.
    fn of(scenario: &Scenario) -> Self {
        let rate = scenario.rate[0].1;
        let start = (2.0 * number(scenario.channels) * QUEUES / rate / SECOND).max(0.5);
        let seconds = start + if rate < 0.5 * GBIT { 3.5 } else { 1.0 };
        let slots = run(scenario, AUTO, seconds);
        let first = delivered(&slots, 0.0, start);
        let last = delivered(&slots, 0.0, seconds);
        let rate = |slots: &[Slot]| {
            let time = time_of(slots, last) - time_of(slots, first);
            if time.is_finite() {
                (last - first) / time
            } else {
                0.0
            }
        };
        let mut kinds = [0.0; KINDS];
        for slot in between(&slots, start, seconds) {
            for (sum, bytes) in kinds.iter_mut().zip(slot.kinds) {
                *sum += bytes;
            }
        }
        let mut order: Vec<(f64, usize)> = (0..scenario.candidates.len())
            .map(|candidate| (best_of(scenario, candidate, &kinds), candidate))
            .collect();
        order.sort_by(|a, b| b.0.total_cmp(&a.0));
        let mut best_fixed = 0.0_f64;
        for (bound, candidate) in order {
            if bound < best_fixed {
                break;
            }
            let most = seconds * SECOND * 2.0;
            let slots = simulate(scenario, Policy::Fixed(candidate), most, last * 1.01 + 1e6);
            best_fixed = best_fixed.max(rate(&slots));
        }
        Self {
            auto: rate(&slots),
            best_fixed,
            best_mix: most(scenario, &kinds),
        }
    }
}

/// Step through the simulated scenarios in the whole grid, and the first scenario. All scenarios together take minutes.
const CELLS: [usize; 2] = [11, 0];

#[test]
fn it_delivers_at_least_as_much_as_the_best_fixed_candidate() {
    let mut ratios = Vec::new();
    let mut seed = 1;
    for (name, contents) in [
        ("mix", MIX),
        ("text", TEXT),
        ("half", HALF),
        ("hopeless", HOPELESS),
    ] {
        for host in [
            (1.0_f64, 1),
            (2.0, 2),
            (4.0, 4),
            (2.0, 8),
            (16.0, 8),
            (8.0, 16),
            (64.0, 16),
        ] {
            for far_cores in [None, Some(host.0), Some((host.0 / 4.0).max(1.0))] {
                for gbits in [0.05, 0.2, 1.0, 2.5, 10.0, 25.0, 100.0, 400.0] {
                    seed += 1;
                    let [one_in, offset] = CELLS;
                    if Random(seed).index(one_in) != offset {
                        continue;
                    }
                    let cell = Cell::of(&scenario(gbits, host, far_cores, contents, seed));
                    let ratio = cell.auto / cell.best_fixed;
                    println!(
                        "{name:8} {gbits:>6} Gbit/s {host:?} {far_cores:?}: {:.3} GB/s, {ratio:.3} of the best fixed, {:.3} of the best mix",
                        cell.auto,
                        cell.auto / cell.best_mix
                    );
                    ratios.push(ratio);
                }
            }
        }
    }
    ratios.sort_by(f64::total_cmp);
    println!(
        "{} cells, from {:.3} to {:.3}",
        ratios.len(),
        ratios[0],
        ratios[ratios.len() - 1]
    );
    assert!(ratios[0] > 0.85, "the worst cell: {:.3}", ratios[0]);
    let tenth = ratios[ratios.len() / 10];
    assert!(tenth > 0.93, "a tenth of the cells is below {tenth:.3}");
    let better = ratios.iter().filter(|ratio| **ratio > 1.03).count();
    assert!(better >= ratios.len() / 12, "better in {better} cells only");
}

#[test]
fn it_reaches_full_speed_within_a_third_of_a_second() {
    // On a slow wire the price overshoots at first: the queues of the first packets must drain.
    for (gbits, least) in [(1.0, 0.7), (10.0, 0.9), (40.0, 0.9), (400.0, 0.9)] {
        let slots = run(&scenario(gbits, (8.0, 8), Some(8.0), TEXT, 5), AUTO, 2.0);
        let early = delivered(&slots, 0.3, 0.5) / 0.2;
        let steady = delivered(&slots, 0.5, 2.0) / 1.5;
        println!("{gbits} Gbit/s: {:.3}", early / steady);
        assert!(
            early > least * steady,
            "{gbits} Gbit/s: {early} of {steady}"
        );
    }
}

/// Returns the rate from 1 s after a change of conditions, divided by the rate under the final conditions from the start.
fn after_change(before: f64, changed: &Scenario, unchanged: &Scenario) -> f64 {
    let after = run(changed, AUTO, before + 2.0);
    let steady = run(unchanged, AUTO, 3.0);
    delivered(&after, before + 1.0, before + 2.0) / (delivered(&steady, 1.0, 3.0) / 2.0)
}

#[test]
fn it_follows_a_link_whose_rate_changes() {
    for (from, to) in [(1.0, 0.1), (0.1, 1.0), (10.0, 0.5), (0.5, 10.0)] {
        let unchanged = scenario(to, (4.0, 4), Some(4.0), TEXT, 6);
        let mut changed = unchanged.clone();
        changed.rate = vec![(0.0, from * GBIT), (2.0 * SECOND, to * GBIT)];
        let ratio = after_change(2.0, &changed, &unchanged);
        println!("{from} to {to} Gbit/s: {ratio:.3}");
        assert!(ratio > 0.93, "{from} to {to} Gbit/s: {ratio:.3}");
    }
}

#[test]
fn it_follows_a_neighbour_load_that_takes_cores() {
    let unchanged = scenario(5.0, (4.0, 8), Some(8.0), TEXT, 7);
    let mut changed = unchanged.clone();
    changed.cores = vec![(0.0, 8.0), (2.0 * SECOND, 4.0)];
    let ratio = after_change(2.0, &changed, &unchanged);
    println!("{ratio:.3}");
    assert!(ratio > 0.95, "{ratio:.3}");
}

#[test]
fn it_follows_content_that_changes() {
    for (from, to) in [(HOPELESS, TEXT), (TEXT, HOPELESS)] {
        let unchanged = scenario(2.5, (4.0, 4), Some(4.0), to, 8);
        let mut changed = unchanged.clone();
        changed.contents = vec![(0.0, from), (2.0 * SECOND, to)];
        let ratio = after_change(2.0, &changed, &unchanged);
        println!("{ratio:.3}");
        assert!(ratio > 0.95, "{ratio:.3}");
    }
}

#[test]
fn it_does_not_switch_back_and_forth() {
    let slots = run(&scenario(2.5, (4.0, 4), Some(4.0), TEXT, 9), AUTO, 4.0);
    let prices = || between(&slots, 1.0, 4.0).map(|slot| slot.price);
    let band = prices().fold(f64::MIN, f64::max) - prices().fold(f64::MAX, f64::min);
    let mut worst = 0.0_f64;
    for candidate in 0..Candidate::of_hotlifts(Accelerator::Off).len() {
        let usual = share(&slots, candidate, 1.0, 4.0);
        for quarter in 4..16_u32 {
            let from = f64::from(quarter) / 4.0;
            worst = worst.max((share(&slots, candidate, from, from + 0.25) - usual).abs());
        }
    }
    println!("prices within {band:.2} powers, shares within {worst:.2}");
    assert!(band < 2.0, "prices within {band} powers");
    assert!(worst < 0.5, "shares within {worst}");
}

#[test]
fn without_a_bandwidth_limit_it_chooses_raw() {
    let scenario = scenario(400.0, (4.0, 4), Some(4.0), MIX, 10);
    let (auto, raw) = (
        run(&scenario, AUTO, 2.0),
        run(&scenario, Policy::Fixed(0), 2.0),
    );
    let share = share(&auto, 0, 0.5, 2.0);
    let more = cpu(&auto[50..]) / cpu(&raw[50..]);
    println!("raw {share:.4}, CPU {more:.4}");
    assert!(share >= 0.99, "{share}");
    assert!(more < 1.02, "{more}");
}

#[test]
fn content_that_does_not_shrink_costs_nothing() {
    // On a slow wire, a larger share of the packets is explored.
    for (gbits, most) in [(0.2, 1.03), (1.0, 1.02), (10.0, 1.02), (100.0, 1.02)] {
        let scenario = scenario(gbits, (4.0, 4), Some(4.0), HOPELESS, 11);
        let (auto, raw) = (
            run(&scenario, AUTO, 4.0),
            run(&scenario, Policy::Fixed(0), 4.0),
        );
        let rate = delivered(&auto, 0.5, 4.0) / delivered(&raw, 0.5, 4.0);
        let more = cpu(&auto[50..]) / cpu(&raw[50..]);
        println!("{gbits} Gbit/s: rate {rate:.3}, CPU {more:.3}");
        assert!(rate > 0.98, "{gbits} Gbit/s: {rate}");
        assert!(more < most, "{gbits} Gbit/s: {more}");
    }
}

#[test]
fn it_explores_rarely_and_ever_less_often() {
    let slots = run(&scenario(1.0, (4.0, 4), Some(4.0), MIX, 12), AUTO, 8.0);
    let explored = |slot: usize| slots[slot - 1].explored;
    let packets: u64 = slots.iter().flat_map(|slot| &slot.packets).sum();
    println!(
        "{} of {packets}, {} in the second half",
        explored(800),
        explored(800) - explored(400)
    );
    assert!(explored(800) > 0, "it never explores");
    assert!(explored(800) * 16 <= packets);
    assert!((explored(800) - explored(400)) * 4 <= explored(400));
}

#[test]
fn with_the_goal_of_least_cpu_time_it_chooses_raw_on_any_link() {
    let scenario = scenario(0.2, (4.0, 4), Some(4.0), MIX, 13);
    let auto = run(&scenario, Policy::Auto(Goal::LeastCpu), 2.0);
    assert!(share(&auto, 0, 0.0, 2.0) > 0.99);
}

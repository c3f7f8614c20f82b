//! Which method, level and channels for a goal.

use clap::ValueEnum;
use hotlift_host::accel::Devices;
use hotlift_host::measure::{Candidate, Measured};
use hotlift_qmp::Version;
use serde::Serialize;

use crate::model::{Load, Machine, Prediction, Settings, ZeroPages, predict};
use crate::rules::{self, Rule};

/// What a migration is to be.
#[derive(Debug, Clone, Copy, PartialEq, Eq, ValueEnum, Serialize)]
#[serde(rename_all = "kebab-case")]
pub enum Goal {
    /// The least total time
    Fastest,
    /// The least CPU time of both sides together
    LeastCpu,
    /// The guest stands still as short as can be
    ShortestDowntime,
}

/// Predictions that differ by less than this share are alike, and [`second`] decides: measurements of neighbouring runs
/// differ by as much.
pub const ALIKE: f64 = 0.03;

/// Methods on devices that differ by less than this share are alike, and the published rules decide.
const ALIKE_ON_DEVICES: f64 = 0.1;

/// Downtime limits that are tried for [`Goal::ShortestDowntime`], in seconds. Below 30 ms the switchover itself and the
/// scheduling of threads make most of it.
const SHORT_DOWNTIMES: [f64; 3] = [0.03, 0.1, 0.3];

/// A method with the channels and the downtime limit that are best for it, and what is predicted for it.
#[derive(Debug, Clone, Serialize)]
pub struct Choice {
    #[serde(flatten)]
    pub candidate: Candidate,
    /// What to set.
    pub settings: Settings,
    /// What it will take.
    pub prediction: Prediction,
    /// It may be recommended: neither the other side nor a rule is against it.
    pub eligible: bool,
}

/// What is asked for.
#[derive(Debug, Clone, Copy)]
pub struct Question {
    pub goal: Goal,
    /// Channels at most; every number from 1 on is tried.
    pub most_channels: u8,
    /// Seconds.
    pub downtime_limit: f64,
    /// The other side is a QEMU of this version.
    pub to_qemu: Option<Version>,
}

/// The candidates, best first, those that may not be recommended last.
pub fn choose(
    question: &Question,
    measured: &Measured,
    load: &Load,
    machine: &Machine,
    devices: &Devices,
    rules: &[Rule],
    zero_pages: ZeroPages,
) -> Vec<Choice> {
    let mut choices: Vec<Choice> = measured
        .candidates
        .iter()
        .map(|candidate| {
            let (settings, prediction) =
                best_settings(question, candidate, load, machine, zero_pages);
            let known = question
                .to_qemu
                .is_none_or(|version| candidate.is_known_to(version));
            Choice {
                candidate: candidate.clone(),
                settings,
                prediction,
                eligible: known && rules::allows(devices, candidate),
            }
        })
        .collect();
    choices.sort_by(|a, b| {
        let order = (!a.eligible).cmp(&!b.eligible);
        let by = |number: fn(Goal, &Prediction) -> f64| {
            number(question.goal, &a.prediction).total_cmp(&number(question.goal, &b.prediction))
        };
        order.then(by(rank)).then(by(second))
    });
    let eligible = choices.iter().filter(|choice| choice.eligible).count();
    if eligible > 0 {
        let best = first_among_alike(&choices[..eligible], question.goal, rules);
        choices[..=best].rotate_right(1);
    }
    choices
}

/// The best is the first, but for those that are like it.
fn first_among_alike(choices: &[Choice], goal: Goal, rules: &[Rule]) -> usize {
    let best = rank(goal, &choices[0].prediction);
    let alike = |share: f64| {
        choices
            .iter()
            .enumerate()
            .take_while(move |(_, choice)| rank(goal, &choice.prediction) <= best * (1.0 + share))
    };
    if choices[0].candidate.on_device
        && let Some(preferred) = rules::preferred(rules)
        && let Some((i, _)) = alike(ALIKE_ON_DEVICES)
            .find(|(_, choice)| choice.candidate.method == preferred && choice.candidate.on_device)
    {
        return i;
    }
    let second = |choice: &Choice| second(goal, &choice.prediction);
    let least = alike(ALIKE).min_by(|(_, a), (_, b)| second(a).total_cmp(&second(b)));
    least.map_or(0, |(i, _)| i)
}

/// A number that is the smaller the better a prediction serves the goal.
pub fn rank(goal: Goal, prediction: &Prediction) -> f64 {
    /// More than any time: what does not converge comes after all that does, the nearest to it first.
    const NEVER: f64 = 1e12;
    if !prediction.converges {
        return NEVER / prediction.settles_pages_per_s.max(1e-3) + NEVER;
    }
    match goal {
        Goal::Fastest => prediction.total_s,
        Goal::LeastCpu => prediction.cpu_s(),
        Goal::ShortestDowntime => prediction.downtime_s,
    }
}

/// What decides between predictions that are alike: the CPU time; for the shortest downtime, which an idle guest has with
/// every method, the total time.
pub fn second(goal: Goal, prediction: &Prediction) -> f64 {
    match goal {
        Goal::Fastest | Goal::LeastCpu => prediction.cpu_s(),
        Goal::ShortestDowntime => prediction.total_s,
    }
}

/// Whether other settings of a method are better than those found so far, by enough to tell. More channels cost the same
/// CPU: for all goals the time is what they are for.
fn is_better(goal: Goal, other: &Prediction, best: &Prediction) -> bool {
    let goal = match goal {
        Goal::LeastCpu => Goal::Fastest,
        goal => goal,
    };
    let (ours, theirs) = (rank(goal, other), rank(goal, best));
    let is_sooner = goal == Goal::ShortestDowntime
        && ours <= theirs
        && second(goal, other) < second(goal, best) * (1.0 - ALIKE);
    ours < theirs * (1.0 - ALIKE) || is_sooner
}

/// The fewest channels that are as good as more.
fn best_settings(
    question: &Question,
    candidate: &Candidate,
    load: &Load,
    machine: &Machine,
    zero_pages: ZeroPages,
) -> (Settings, Prediction) {
    let limits: &[f64] = match question.goal {
        Goal::ShortestDowntime => &SHORT_DOWNTIMES,
        Goal::Fastest | Goal::LeastCpu => &[question.downtime_limit],
    };
    let mut best: Option<(Settings, Prediction)> = None;
    for &downtime_limit in limits {
        for channels in 1..=question.most_channels.max(1) {
            let settings = Settings {
                channels,
                zero_pages,
                downtime_limit,
            };
            let prediction = predict(load, &candidate.costs, machine, &settings);
            let is_first_or_better = best
                .as_ref()
                .is_none_or(|(_, best)| is_better(question.goal, &prediction, best));
            if is_first_or_better {
                best = Some((settings, prediction));
            }
        }
    }
    best.unwrap_or_else(|| {
        let settings = Settings {
            channels: 1,
            zero_pages,
            downtime_limit: question.downtime_limit,
        };
        (
            settings,
            predict(load, &candidate.costs, machine, &settings),
        )
    })
}

impl Prediction {
    /// CPU time of both sides.
    pub fn cpu_s(&self) -> f64 {
        self.source_cpu_s + self.destination_cpu_s
    }
}

#[cfg(test)]
mod tests {
    use super::*;
    use crate::model::PAGES_OF_A_GIB;
    use hotlift_host::cost::{Codec, Costs, Relays, Work};
    use hotlift_host::loopback::Loopback;

    fn candidate(method: &'static str, encode: f64, decode: f64, ratio: f64) -> Candidate {
        Candidate {
            method,
            level: None,
            runs_on: String::new(),
            on_device: false,
            measured_bytes: 0,
            costs: Costs {
                as_they_are: method == "none",
                content: Codec {
                    encode: Work::of(encode),
                    decode: Work::of(decode),
                    ratio,
                },
                zeros: Codec::NONE,
            },
        }
    }

    /// Costs as in the README's machine.
    fn measured() -> Measured {
        Measured {
            cores: 4,
            cores_free: 4.0,
            zero_scan: 0.1,
            look: 0.02,
            loopback: Loopback {
                first_touch: 0.25,
                send: 0.3,
                receive: 0.25,
                relays: Relays {
                    send: 0.2,
                    near: 0.2,
                    far: 0.2,
                    receive: 0.2,
                },
            },
            candidates: vec![
                candidate("none", 0.0, 0.0, 1.0),
                candidate("zstd", 4.0, 1.4, 3.3),
                candidate("lz4", 2.2, 0.5, 2.05),
                candidate("qpl", 4.3, 3.5, 2.4),
            ],
        }
    }

    fn first(goal: Goal, bandwidth: f64, rate: f64, to_qemu: bool) -> Choice {
        all(goal, bandwidth, rate, to_qemu).remove(0)
    }

    fn all(goal: Goal, bandwidth: f64, rate: f64, to_qemu: bool) -> Vec<Choice> {
        let measured = measured();
        let load = Load {
            pages: 4.0 * PAGES_OF_A_GIB,
            untouched_share: 0.0,
            zero_share: 0.1,
            dirty_rate: rate,
            working_set: PAGES_OF_A_GIB,
        };
        let machine = Machine {
            source_cores: 4.0,
            destination_cores: 4.0,
            source_share: 1.0,
            destination_share: 1.0,
            same_host: false,
            zero_scan: measured.zero_scan,
            look: measured.look,
            send: measured.loopback.send,
            receive: measured.loopback.receive,
            first_touch: measured.loopback.first_touch,
            bandwidth,
            round_trip: 0.0,
            relays: None,
        };
        let question = Question {
            goal,
            most_channels: 4,
            downtime_limit: 0.3,
            to_qemu: to_qemu.then_some(Version {
                major: 10,
                minor: 0,
                micro: 0,
            }),
        };
        let devices = Devices::default();
        let choices = choose(
            &question,
            &measured,
            &load,
            &machine,
            &devices,
            &[],
            ZeroPages::Multifd,
        );
        assert_eq!(choices.len(), 4);
        choices
    }

    #[test]
    fn slow_links_want_ratio_fast_ones_nothing_and_lz4_is_between() {
        let fastest = |mbit: f64| first(Goal::Fastest, mbit * 125e3, 0.0, false);
        assert_eq!(fastest(1000.0).candidate.method, "zstd");
        assert_eq!(fastest(9000.0).candidate.method, "lz4");
        assert_eq!(fastest(100_000.0).candidate.method, "none");
        let qemu = first(Goal::Fastest, 9e9 / 8.0, 0.0, true);
        assert_ne!(qemu.candidate.method, "lz4", "a QEMU does not know it");
    }

    #[test]
    fn no_more_channels_than_help() {
        let slow = first(Goal::Fastest, 125e6, 0.0, false);
        assert_eq!((slow.candidate.method, slow.settings.channels), ("zstd", 2));
        let fast = first(Goal::Fastest, f64::INFINITY, 0.0, false);
        assert_eq!((fast.candidate.method, fast.settings.channels), ("none", 4));
    }

    #[test]
    fn the_least_cpu_is_no_compression_unless_only_that_converges() {
        let idle = first(Goal::LeastCpu, 125e6, 0.0, false);
        assert_eq!(idle.candidate.method, "none");
        let busy = first(Goal::LeastCpu, 125e6, 40_000.0, false);
        assert!(busy.prediction.converges, "{busy:?}");
        assert_ne!(busy.candidate.method, "none");
    }

    #[test]
    fn the_shortest_downtime_is_the_shortest_and_the_sooner_of_those_that_are_alike() {
        for bandwidth in [12.5e6, 125e6, 1.25e9, f64::INFINITY] {
            for rate in [0.0, 5_000.0, 20_000.0, 80_000.0] {
                let choices = all(Goal::ShortestDowntime, bandwidth, rate, false);
                let is_good = |choice: &&Choice| choice.eligible && choice.prediction.converges;
                let good: Vec<_> = choices.iter().filter(is_good).collect();
                let Some(best) = good.first() else { continue };
                let downtime = |choice: &Choice| choice.prediction.downtime_s;
                let of_all = good.iter().map(|choice| downtime(choice));
                let shortest = of_all.fold(f64::INFINITY, f64::min);
                assert!(downtime(best) <= shortest * (1.0 + ALIKE), "{choices:?}");
                let alike = good.iter().filter(|one| downtime(one) <= downtime(best));
                for other in alike {
                    assert!(best.prediction.total_s <= other.prediction.total_s);
                }
            }
        }
        // Of an idle guest all of them are alike, and channels are used.
        let idle = first(Goal::ShortestDowntime, 125e6, 0.0, false);
        assert_eq!((idle.candidate.method, idle.settings.channels), ("zstd", 2));
    }

    #[test]
    fn the_shortest_downtime_sets_the_limit_that_is_reached() {
        let idle = first(Goal::ShortestDowntime, 125e6, 0.0, false);
        assert!(idle.settings.downtime_limit < 0.05, "{idle:?}");
        let all = first(Goal::ShortestDowntime, 125e6, 20_000.0, false);
        assert!(all.prediction.converges);
        assert!(
            all.prediction.downtime_s <= all.settings.downtime_limit + 0.05,
            "{all:?}"
        );
    }
}

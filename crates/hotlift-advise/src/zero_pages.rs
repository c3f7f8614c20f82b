//! Who is to look for zero pages: a look costs CPU, and a zero page that nobody finds is sent, and touched, like any
//! other.

use hotlift_qmp::Version;
use serde::Serialize;

use crate::choose::{ALIKE, Choice, Goal, rank};
use crate::model::{Load, Machine, Settings, ZeroPages, predict};
use crate::rules::{self, Rule};

/// The first QEMU that has `zero-page-detection`, and takes zero pages from multifd channels.
pub const FIRST_WITH_A_CHOICE: (u32, u32) = (9, 0);

/// Who may look.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub struct Finders {
    /// The best that looks.
    pub detect: ZeroPages,
    /// Nobody need look, either.
    may_be_off: bool,
    /// The version that leaves no choice.
    old: Option<Version>,
}

/// The recommendation, and the predictions behind it.
#[derive(Debug, Clone, Serialize)]
pub struct Detection {
    /// Who looks.
    pub mode: ZeroPages,
    /// CPU time of both sides if somebody looks.
    pub cpu_with_s: f64,
    /// CPU time of both sides if nobody does.
    pub cpu_without_s: f64,
    /// Total time if somebody looks.
    pub total_with_s: f64,
    /// Total time if nobody does.
    pub total_without_s: f64,
    /// Why.
    pub reason: String,
}

/// Who may look between QEMUs of which the older is `oldest`, where `rules` holds what is said of devices.
pub fn finders(oldest: Option<Version>, rules: &[Rule]) -> Finders {
    let old = oldest.filter(|version| (version.major, version.minor) < FIRST_WITH_A_CHOICE);
    Finders {
        detect: match old {
            Some(_) => ZeroPages::Legacy,
            None if rules::finds_zeros_by_device(rules) => ZeroPages::DsaAccel,
            None => ZeroPages::Multifd,
        },
        may_be_off: old.is_none(),
        old,
    }
}

/// Decides for the best of `candidates`, which were predicted with somebody who looks.
pub fn decide(
    finders: &Finders,
    candidates: &[Choice],
    goal: Goal,
    load: &Load,
    machine: &Machine,
) -> Detection {
    let with = finders.detect;
    let mut detection = Detection {
        mode: with,
        cpu_with_s: 0.0,
        cpu_without_s: 0.0,
        total_with_s: 0.0,
        total_without_s: 0.0,
        reason: String::new(),
    };
    let Some(best) = candidates.first() else {
        return detection;
    };
    let settings = Settings {
        zero_pages: ZeroPages::None,
        ..best.settings
    };
    let off = predict(load, &best.candidate.costs, machine, &settings);
    let on = &best.prediction;
    detection.cpu_with_s = on.cpu_s();
    detection.cpu_without_s = off.cpu_s();
    detection.total_with_s = on.total_s;
    detection.total_without_s = off.total_s;
    let gains = rank(goal, &off) < rank(goal, on) * (1.0 - ALIKE);
    if finders.may_be_off && gains {
        detection.mode = ZeroPages::None;
    }
    detection.reason = match (finders.old, detection.mode) {
        (Some(old), _) => format!("QEMU {}.{} has no other way", old.major, old.minor),
        (None, ZeroPages::None) => {
            let share = 100.0 * (1.0 - off.cpu_s() / on.cpu_s().max(f64::MIN_POSITIVE));
            format!("looking for them would be {share:.0} % of the CPU")
        }
        (None, mode) => {
            let by = match mode {
                ZeroPages::DsaAccel => "by DSA, as they are many",
                _ => "found by the channels",
            };
            let (cpu, time) = (off.cpu_s() - on.cpu_s(), off.total_s - on.total_s);
            match cpu > 0.0 {
                true => format!(
                    "{by}; sent as they are they would take {cpu:.2} s of CPU and {:.2} s more",
                    time.max(0.0)
                ),
                false => format!("{by}; few as they are, looking takes {:.2} s of CPU", -cpu),
            }
        }
    };
    detection
}

#[cfg(test)]
mod tests {
    use super::*;
    use crate::choose::Goal;
    use crate::model::{PAGES_OF_A_GIB, tests as model};
    use hotlift_host::cost::{Codec, Costs};
    use hotlift_host::measure::Candidate;

    fn machine(look: f64) -> Machine {
        Machine {
            look,
            ..model::machine(2.0, f64::INFINITY)
        }
    }

    fn decided(zero_share: f64, look: f64, oldest: Option<Version>) -> Detection {
        let load = Load {
            pages: PAGES_OF_A_GIB,
            untouched_share: 0.0,
            zero_share,
            dirty_rate: 0.0,
            working_set: 0.0,
        };
        let finders = finders(oldest, &[]);
        let costs = Costs {
            as_they_are: true,
            content: Codec::NONE,
            zeros: Codec::NONE,
        };
        let settings = Settings {
            channels: 2,
            zero_pages: finders.detect,
            downtime_limit: 0.3,
        };
        let machine = machine(look);
        let best = Choice {
            candidate: Candidate {
                method: "none",
                level: None,
                runs_on: String::new(),
                on_device: false,
                measured_bytes: 0,
                costs,
            },
            settings,
            prediction: predict(&load, &costs, &machine, &settings),
            eligible: true,
        };
        decide(&finders, &[best], Goal::LeastCpu, &load, &machine)
    }

    #[test]
    fn zero_pages_are_looked_for_where_that_costs_less_than_sending_them() {
        assert_eq!(decided(0.25, 0.02, None).mode, ZeroPages::Multifd);
        let none = decided(0.0, 0.1, None);
        assert_eq!(none.mode, ZeroPages::None, "{none:?}");
        assert!(none.cpu_without_s < none.cpu_with_s);
        assert!(none.reason.contains("11 % of the CPU"), "{none:?}");
        // A look that costs next to nothing stays: a sample does not see every page.
        assert_eq!(decided(0.0, 0.01, None).mode, ZeroPages::Multifd);
    }

    #[test]
    fn a_qemu_before_9_0_looks_in_its_migration_thread() {
        let of = |major, minor| {
            let version = Version {
                major,
                minor,
                micro: 0,
            };
            decided(0.0, 0.1, Some(version))
        };
        assert_eq!(of(8, 2).mode, ZeroPages::Legacy);
        assert!(of(8, 2).reason.contains("QEMU 8.2 has no other way"));
        assert_eq!(of(9, 0).mode, ZeroPages::None);
    }
}

//! The summary of a campaign: tables of counts, in 80 columns.

use std::collections::BTreeMap;
use std::fmt::Write;

use crate::case::{Kind, Moment};
use crate::verdict::{Outcome, Record, Wrong};

/// Kinds of problems to count, with their names in the table.
const WRONGS: [(Wrong, &str); 9] = [
    (Wrong::TwoGuests, "two guests"),
    (Wrong::NoGuest, "no guest"),
    (Wrong::LostWrites, "lost writes"),
    (Wrong::Leftover, "leftovers"),
    (Wrong::Plaintext, "plaintext sent"),
    (Wrong::Exit, "unexplained exits"),
    (Wrong::Hangs, "hangs"),
    (Wrong::TimedOut, "time-outs"),
    (Wrong::SetUp, "set-up failed"),
];

const OUTCOMES: [(Outcome, &str); 5] = [
    (Outcome::Moved, "moved"),
    (Outcome::Stayed, "stayed"),
    (Outcome::Kept, "kept"),
    (Outcome::Ended, "ended"),
    (Outcome::Wrong, "wrong"),
];

/// Width of the list of case numbers, in columns.
const NAMED: usize = 36;

/// Limit of failed setups: at most one in 100 cases. A case without a setup proves nothing.
const NOT_SET_UP: usize = 100;

/// Limit of timeouts: at most one in 20 cases. Timeouts happen on a busy machine.
const TIMED_OUT: usize = 20;

/// Returns true if no case has a problem, except a small share of failed setups and timeouts.
#[must_use]
pub fn is_clean(records: &[Record]) -> bool {
    WRONGS.into_iter().all(|(wrong, _)| {
        let has_it = |record: &&Record| record.problems.iter().any(|one| one.wrong == wrong);
        let most = match wrong {
            Wrong::SetUp => records.len().div_ceil(NOT_SET_UP),
            Wrong::TimedOut => records.len().div_ceil(TIMED_OUT),
            _ => 0,
        };
        records.iter().filter(has_it).count() <= most
    })
}

/// Returns the tables of a campaign as text.
#[must_use]
pub fn tables(records: &[Record]) -> String {
    let mut text = String::new();
    let drawn: usize = records.iter().map(|record| record.fired.len()).sum();
    let fired = records.iter().flat_map(|record| &record.fired);
    let happened = fired.filter(|fired| **fired).count();
    let _ = writeln!(
        text,
        "{} migrations, {drawn} faults, {happened} of them in time\n",
        records.len()
    );

    let _ = write!(text, "{:<28}{:>10}", "where the guest was", "cases");
    for (_, name) in OUTCOMES {
        let _ = write!(text, "{name:>8}");
    }
    text.push('\n');
    let mut pairs: BTreeMap<&str, BTreeMap<Outcome, usize>> = BTreeMap::new();
    for record in records {
        let outcomes = pairs.entry(record.case.pair.name()).or_default();
        *outcomes.entry(record.outcome).or_default() += 1;
    }
    for (pair, outcomes) in &pairs {
        let _ = write!(text, "{pair:<28}{:>10}", outcomes.values().sum::<usize>());
        for (outcome, _) in OUTCOMES {
            let _ = write!(text, "{:>8}", outcomes.get(&outcome).unwrap_or(&0));
        }
        text.push('\n');
    }

    let mut kinds: BTreeMap<&str, [usize; 2]> = BTreeMap::new();
    for record in records {
        for (fault, fired) in record.case.faults.iter().zip(&record.fired) {
            let counts = kinds.entry(fault.kind.name()).or_default();
            counts[0] += 1;
            counts[1] += usize::from(*fired);
        }
    }
    let _ = writeln!(text, "\n{:<28}{:>10}{:>8}", "fault", "drawn", "in time");
    for (kind, [drawn, happened]) in kinds {
        let _ = writeln!(text, "{kind:<28}{drawn:>10}{happened:>8}");
    }

    text.push_str(&durations(records));

    let mut exits: BTreeMap<Option<i32>, usize> = BTreeMap::new();
    for record in records {
        *exits.entry(record.source_exit).or_default() += 1;
    }
    let exits = exits.into_iter().map(|(code, count)| match code {
        Some(code) if code < 0 => format!("signal {}: {count}", -code),
        Some(code) => format!("{code}: {count}"),
        None => format!("none: {count}"),
    });
    let _ = writeln!(text, "\nexit codes of the source's side");
    let _ = writeln!(text, "  {}", exits.collect::<Vec<_>>().join(", "));

    let _ = writeln!(text, "\n{:<28}{:>10}  cases (--only)", "wrong", "count");
    for (wrong, name) in WRONGS {
        let has_it = |record: &&Record| record.problems.iter().any(|one| one.wrong == wrong);
        let numbers: Vec<_> = records
            .iter()
            .filter(has_it)
            .map(|record| record.case.number.to_string())
            .collect();
        let mut named = String::new();
        for number in &numbers {
            if named.len() + number.len() > NAMED {
                named += "…";
                break;
            }
            named += number;
            named.push(' ');
        }
        let line = format!("{name:<28}{:>10}  {named}", numbers.len());
        let _ = writeln!(text, "{}", line.trim_end());
    }
    text
}

/// Returns a table of the faults that occurred and have a duration, by duration and phase.
fn durations(records: &[Record]) -> String {
    const WHEN: [&str; 6] = ["set-up", "rounds", "switch", "message", "arrived", "after"];
    let mut rows: BTreeMap<(&str, u64), [usize; WHEN.len()]> = BTreeMap::new();
    let mut nets: BTreeMap<(u32, u32), usize> = BTreeMap::new();
    for record in records {
        let faults = record.case.faults.iter().zip(&record.fired);
        for (fault, _) in faults.filter(|(fault, fired)| **fired && !fault.kind.lasts().is_zero()) {
            let column = match fault.moment {
                Moment::Setup => 0,
                Moment::Round => 1,
                Moment::Switchover => 2,
                Moment::Lost(_) => 3,
                Moment::Arrived => 4,
                Moment::After => 5,
            };
            let row = (fault.kind.name(), fault.kind.lasts().as_secs());
            rows.entry(row).or_default()[column] += 1;
            if matches!(fault.kind, Kind::LinkDown { .. }) {
                let net = &record.case.net;
                let net = (u32::from(net.mtu), u32::from(net.orphan_retries));
                *nets.entry(net).or_default() += 1;
            }
        }
    }
    let mut text = format!("\n{:<32}", "how long, from when on");
    WHEN.iter().for_each(|when| text += &format!("{when:>8}"));
    text.push('\n');
    for ((name, secs), counts) in rows {
        let row = match name {
            // A power loss without an end counts as the timeout that its peer uses in a precopy.
            "power loss for ever" => name.to_owned(),
            _ => format!("{name}, {secs} s"),
        };
        let _ = write!(text, "{row:<32}");
        counts
            .iter()
            .for_each(|count| text += &format!("{count:>8}"));
        text.push('\n');
    }
    for ((mtu, retries), count) in nets {
        let _ = writeln!(
            text,
            "link down at MTU {mtu}, tcp_orphan_retries={retries}: {count}"
        );
    }
    text
}

#[cfg(test)]
mod tests {
    use super::*;
    use crate::case::Case;
    use crate::verdict::Problem;

    #[test]
    fn a_campaign_with_too_many_inconclusive_cases_is_not_clean() {
        let record = |wrong: Option<Wrong>| {
            let problem = |wrong| Problem {
                wrong,
                what: String::new(),
            };
            Record {
                outcome: Outcome::Moved,
                problems: wrong.map(problem).into_iter().collect(),
                ..Record::new(1, Case::draw(1, 1))
            }
        };
        for (wrong, count, unproven, clean) in [
            (Wrong::SetUp, 1, 1, true),
            (Wrong::SetUp, 60, 1, true),
            (Wrong::SetUp, 60, 2, false),
            (Wrong::SetUp, 200, 2, true),
            (Wrong::SetUp, 200, 3, false),
            (Wrong::TimedOut, 1, 1, true),
            (Wrong::TimedOut, 60, 3, true),
            (Wrong::TimedOut, 60, 4, false),
            (Wrong::TimedOut, 200, 10, true),
            (Wrong::TimedOut, 200, 11, false),
        ] {
            let records: Vec<Record> = (0..count)
                .map(|number| record((number < unproven).then_some(wrong)))
                .collect();
            assert_eq!(
                is_clean(&records),
                clean,
                "{wrong:?}: {unproven} of {count}"
            );
        }
        assert!(!is_clean(&[record(Some(Wrong::Hangs))]));
    }

    #[test]
    fn the_tables_fit_into_80_columns_and_name_the_failed_cases() {
        let records: Vec<Record> = (990_000..991_000)
            .map(|number| Record {
                outcome: Outcome::Moved,
                problems: vec![Problem {
                    wrong: Wrong::TwoGuests,
                    what: "both".to_owned(),
                }],
                seconds: 1.0,
                ..Record::new(1, Case::draw(1, number))
            })
            .collect();
        assert!(!is_clean(&records));
        let text = tables(&records);
        assert!(text.contains("990000 990001"), "{text}");
        for line in text.lines() {
            assert!(line.chars().count() <= 80, "{line}");
        }
    }
}

//! Tests machines that migrate through two relays, with the settings of QEMUs and relays. By default, a selection of
//! settings covers every pair. On request, all combinations run.

use std::any::Any;
use std::collections::HashSet;
use std::fmt;
use std::fs::{self, File, OpenOptions};
use std::io::Write;
use std::panic::{AssertUnwindSafe, catch_unwind};
use std::time::Instant;

use crate::guest::Guest;
use crate::route::{Multifd, RelayOptions, Route, Side};
use crate::vm::{Accelerator, Machine, Memory, PC_7, PC_10, PC_11, Release, Vm};

/// Source and destination.
#[derive(Debug, Clone, Copy, PartialEq, Eq, Hash)]
pub struct Pair {
    pub from: Release,
    pub to: Release,
    pub machine: &'static str,
    pub accelerator: Accelerator,
    pub live: bool,
}

const fn pair(
    from: Release,
    to: Release,
    machine: &'static str,
    accelerator: Accelerator,
    live: bool,
) -> Pair {
    Pair {
        from,
        to,
        machine,
        accelerator,
        live,
    }
}

/// Pairs of every test run.
///
/// A 7.2 under TCG is moved while it is stopped: QEMU 7.2 was seen to lose dirty pages of a running one by itself (14 to 100
/// pages in 4 of 8 runs, directly from QEMU to QEMU).
pub const PAIRS: &[Pair] = {
    use Accelerator::{Kvm, Tcg};
    use Release::{V7, V10, V11};
    &[
        pair(V10, V10, PC_10, Kvm, true),
        pair(V10, V10, PC_10, Tcg, true),
        pair(V10, V10, PC_10, Kvm, false),
        pair(V7, V7, PC_7, Kvm, true),
        pair(V7, V7, PC_7, Tcg, false),
        pair(V10, V7, PC_7, Kvm, true),
        pair(V10, V7, PC_7, Tcg, true),
        pair(V7, V10, PC_7, Kvm, true),
        pair(V7, V10, PC_7, Tcg, false),
        pair(V11, V11, PC_11, Kvm, true),
        pair(V11, V10, PC_10, Kvm, true),
        pair(V10, V11, PC_10, Kvm, true),
        pair(V11, V7, PC_7, Kvm, true),
        pair(V7, V11, PC_7, Kvm, true),
    ]
};

/// Additional pairs of the whole matrix.
pub const MORE_PAIRS: &[Pair] = {
    use Accelerator::{Kvm, Tcg};
    use Release::{V7, V10, V11};
    &[
        pair(V11, V11, PC_11, Tcg, true),
        pair(V11, V11, PC_11, Kvm, false),
        pair(V11, V10, PC_10, Tcg, true),
        pair(V10, V11, PC_10, Tcg, true),
        pair(V11, V7, PC_7, Tcg, true),
        pair(V7, V11, PC_7, Tcg, false),
    ]
};

const METHODS: [&str; 3] = ["none", "zlib", "zstd"];
/// Multifd of a QEMU.
const MULTIFD: [Multifd; 3] = [Multifd::Off, Multifd::Channels(1), Multifd::Channels(4)];
/// Multifd between the relays.
const BETWEEN: [Multifd; 3] = MULTIFD;
/// Zero page detection of a source that has the parameter.
const ZERO_PAGES: [&str; 3] = ["none", "legacy", "multifd"];

/// One combination of settings.
#[derive(Debug, Clone, Copy, PartialEq, Eq, Hash)]
pub struct Row {
    pub pair: Pair,
    pub source: Multifd,
    pub zero_pages: Option<&'static str>,
    pub return_path: bool,
    pub method: &'static str,
    pub between: Multifd,
    pub destination: Multifd,
}

impl fmt::Display for Row {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        let Pair {
            from,
            to,
            machine,
            accelerator,
            live,
        } = self.pair;
        write!(
            f,
            "{} -> {} {machine} {} {}: source multifd {} zero pages {} return path {}; {} on {}; destination multifd {}",
            from.name(),
            to.name(),
            accelerator.name(),
            if live { "live" } else { "stopped" },
            self.source,
            self.zero_pages.unwrap_or("-"),
            if self.return_path { "on" } else { "off" },
            self.method,
            self.between,
            self.destination,
        )
    }
}

/// Returns all combinations for these pairs.
pub fn rows<'a>(pairs: impl IntoIterator<Item = &'a Pair>) -> Vec<Row> {
    let mut rows = Vec::new();
    for &pair in pairs {
        let modes: Vec<_> = match pair.from {
            Release::V7 => vec![None],
            Release::V10 | Release::V11 => ZERO_PAGES.map(Some).to_vec(),
        };
        for source in MULTIFD {
            for &zero_pages in &modes {
                for return_path in [false, true] {
                    for method in METHODS {
                        for between in BETWEEN {
                            // Pages on the main channel are not compressed.
                            if between == Multifd::Off && method != "none" {
                                continue;
                            }
                            for destination in MULTIFD {
                                rows.push(Row {
                                    pair,
                                    source,
                                    zero_pages,
                                    return_path,
                                    method,
                                    between,
                                    destination,
                                });
                            }
                        }
                    }
                }
            }
        }
    }
    rows
}

/// Returns a few rows such that any two compatible settings occur together in one of them.
pub fn choice(rows: &[Row]) -> Vec<Row> {
    let pairs_of = |row: &Row| {
        let values = [
            format!("{:?}", row.pair),
            format!("source {:?}", row.source),
            format!("zero pages {:?}", row.zero_pages),
            format!("return path {}", row.return_path),
            row.method.to_owned(),
            format!("between {:?}", row.between),
            format!("destination {:?}", row.destination),
        ];
        let with_later = |i: usize| values[i + 1..].iter().map(move |other| (i, other.clone()));
        let pairs = (0..values.len()).flat_map(|i| {
            with_later(i)
                .map(|(i, other)| (values[i].clone(), other))
                .collect::<Vec<_>>()
        });
        pairs.collect::<HashSet<_>>()
    };
    let all: Vec<(Row, HashSet<_>)> = rows.iter().map(|row| (*row, pairs_of(row))).collect();
    let mut left: HashSet<_> = all
        .iter()
        .flat_map(|(_, pairs)| pairs.iter().cloned())
        .collect();
    let mut chosen = Vec::new();
    while !left.is_empty() {
        // The first of equal ones, so that every run has the same rows.
        let best = all
            .iter()
            .rev()
            .max_by_key(|(_, pairs)| pairs.intersection(&left).count());
        let (row, pairs) = best.expect("there are rows");
        left.retain(|pair| !pairs.contains(pair));
        chosen.push(*row);
    }
    chosen
}

impl Row {
    /// Runs the row. `None`: it cannot be tested here.
    fn take(&self) -> Option<()> {
        let Pair {
            from,
            to,
            machine,
            accelerator,
            live,
        } = self.pair;
        let machine = Machine {
            name: machine,
            accelerator,
            memory: Memory::File,
            guest: Guest::program(),
        };
        let mut source = Side::new(self.source).zero_pages(self.zero_pages);
        if self.return_path {
            source = source.with("return-path");
        }
        let mut relays = RelayOptions::new(self.method, self.between, self.destination);
        relays.configure_uuid(self.source, self.between);
        let route = Route {
            source,
            destination: Side::new(self.destination),
            relays: Some(relays),
            live,
        };
        let moved = route.take(Vm::running(from, &machine)?, to)?;
        let reports = moved.reports.expect("relays report");
        assert_eq!(reports[0]["method"], self.method, "{reports:?}");
        Some(())
    }
}

const MOVED: &str = "moved";

/// Returns the result of a row with its duration.
fn outcome(name: &str, take: impl FnOnce() -> Option<String>) -> String {
    let start = Instant::now();
    let outcome = match catch_unwind(AssertUnwindSafe(take)) {
        Ok(Some(moved)) => moved,
        Ok(None) => "skipped".to_owned(),
        Err(panic) => format!("failed: {}", panic_message(&*panic).replace('\n', " | ")),
    };
    format!("{name}: {outcome}, {:.1} s", start.elapsed().as_secs_f64())
}

/// Results of a matrix, one line each, in the file that `HOTLIFT_MATRIX_RESULT` names.
pub struct Results {
    path: String,
    file: File,
    /// Lines of earlier runs.
    known: String,
    /// Selects the rows with this in their names.
    part: String,
    wrong: usize,
}

impl Results {
    pub fn open() -> Self {
        let path = std::env::var("HOTLIFT_MATRIX_RESULT").expect("a file for the result");
        let known = fs::read_to_string(&path).unwrap_or_default();
        let options = OpenOptions::new().create(true).append(true).open(&path);
        Self {
            path,
            file: options.expect("a file for the result"),
            known,
            part: std::env::var("HOTLIFT_QEMU_MATRIX").unwrap_or_default(),
            wrong: 0,
        }
    }

    /// Takes a selected row, unless the file has a good result of it. `take` describes a good result.
    pub fn add(&mut self, name: &str, take: impl FnOnce() -> Option<String>) {
        let is_good = |line: &str| {
            let result = line.strip_prefix(name).and_then(|it| it.strip_prefix(": "));
            result.is_some_and(|it| !it.starts_with("failed: ") && !it.starts_with("skipped"))
        };
        if !name.contains(&self.part) || self.known.lines().any(is_good) {
            return;
        }
        let line = outcome(name, take);
        self.wrong += usize::from(!is_good(&line));
        println!("{line}");
        writeln!(self.file, "{line}").expect("a line");
    }

    /// Panics if any row has failed.
    pub fn finish(self) {
        assert_eq!(self.wrong, 0, "rows that did not move: {}", self.path);
    }
}

/// Returns the message of a panic.
pub fn panic_message(panic: &(dyn Any + Send)) -> &str {
    let text = panic.downcast_ref::<String>().map(String::as_str);
    text.or_else(|| panic.downcast_ref::<&str>().copied())
        .unwrap_or_default()
}

#[test]
fn machines_move_through_relays_however_their_qemus_are_set() {
    let outcomes = choice(&rows(PAIRS)).into_iter().map(|row| {
        let take = || row.take().map(|()| MOVED.to_owned());
        outcome(&row.to_string(), take)
    });
    let failed: Vec<String> = outcomes
        .filter(|line| line.contains(": failed: "))
        .collect();
    assert!(failed.is_empty(), "{}", failed.join("\n"));
}

/// Runs all for `make qemu-matrix`, or those whose names contain the value of `HOTLIFT_QEMU_MATRIX`. The file of
/// `HOTLIFT_MATRIX_RESULT` gets a line for each; rows with a good result in it are skipped.
#[test]
#[ignore = "takes hours: make qemu-matrix"]
fn machines_move_through_relays_in_every_combination_of_settings() {
    let mut results = Results::open();
    for row in rows(PAIRS.iter().chain(MORE_PAIRS)) {
        results.add(&row.to_string(), || row.take().map(|()| MOVED.to_owned()));
    }
    results.finish();
}

#[test]
fn the_selection_covers_every_pair_of_settings_in_few_rows() {
    let all = rows(PAIRS);
    let chosen = choice(&all);
    assert!(
        chosen.len() < 45 && chosen.len() >= PAIRS.len() * 3,
        "{}",
        chosen.len()
    );
    for &pair in PAIRS {
        for method in METHODS {
            assert!(
                chosen
                    .iter()
                    .any(|row| row.pair == pair && row.method == method),
                "{pair:?} {method}"
            );
        }
    }
}

//! `docs/qemu-compatibility.md` is generated from the moves in the tests, so that it matches them exactly.

use std::fmt::Write;
use std::path::Path;

use crate::device_matrix::{self, Cell, Kind, Way};
use crate::dialect::{COMPRESS_FOR_QEMU, COMPRESSED_BY_QEMU, COMPRESSED_FOR_QEMU, OLDER_RECORDS};
use crate::lazy_machines;
use crate::linux_moves::{JOURNEY, STARTS_IN};
use crate::matrix::{MORE_PAIRS, PAIRS, choice, rows};
use crate::pluggable::{self, runs_in};
use crate::vm::Release;

fn render(suite: &str) -> String {
    let mut text = String::from(
        "# Which QEMUs work\n\n\
         Made by the tests in `crates/hotlift-cli/tests/qemu` of what they move: real virtual machines, through a\n\
         relay on each side unless it says otherwise. Each guest checks its memory all the time; after each move the\n\
         harness replays every write of the guest, or compares all of RAM. QEMU 7.2 is Debian 12's, 10.0 that of\n\
         bookworm-backports, 11.1 that of forky.\n\n\
         ## Settings\n\n\
         These combinations of settings are moved by `make test`. Any two settings that go together meet in one of them.\n\n\
         | from → to | machine | guest | source multifd channels | zero-page-detection | return path | between relays | their channels | destination multifd channels |\n\
         |---|---|---|---|---|---|---|---|---|\n",
    );
    for row in choice(&rows(PAIRS)) {
        let pair = row.pair;
        let _ = writeln!(
            text,
            "| {} → {} | {} | {}, {} | {} | {} | {} | {} | {} | {} |",
            pair.from.name(),
            pair.to.name(),
            pair.machine,
            if pair.live { "runs" } else { "stopped" },
            pair.accelerator.name().to_uppercase(),
            row.source,
            row.zero_pages.unwrap_or("its own way"),
            if row.return_path { "on" } else { "off" },
            row.method,
            row.between,
            row.destination,
        );
    }
    let _ = write!(
        text,
        "\nThere are {} combinations. `make qemu-matrix` moves all of them, in some hours, and keeps a line for each in\n\
         `bench/results`; no such result is published.\n\n\
         Channels between relays are off (pages on the main channel) with method none only. A 7.2 source under TCG\n\
         is moved stopped: QEMU 7.2 was seen to lose dirty pages of a running one by itself, straight from QEMU to\n\
         QEMU.\n\n\
         ## QEMU's own compression\n\n\
         | who compresses | method | what else |\n|---|---|---|\n",
        rows(PAIRS.iter().chain(MORE_PAIRS)).len()
    );
    for (from, theirs, ours) in COMPRESSED_BY_QEMU {
        let _ = writeln!(
            text,
            "| QEMU {}, for the relay | multifd {theirs} | {ours} between relays |",
            from.name()
        );
    }
    for capability in OLDER_RECORDS {
        let _ = writeln!(
            text,
            "| QEMU {}, for the relay | {capability}, without multifd | zstd between relays |",
            Release::V7.name()
        );
    }
    for (to, method, two) in COMPRESSED_FOR_QEMU {
        let relays = if two {
            "zstd between relays"
        } else {
            "one relay alone"
        };
        let _ = writeln!(
            text,
            "| the relay, for QEMU {} | multifd {method} | {relays} |",
            to.name()
        );
    }
    for (by_qemu, two, threads) in COMPRESS_FOR_QEMU {
        let source = if by_qemu { "compress" } else { "nothing" };
        let relays = if two {
            "two relays, compress between them"
        } else {
            "one relay alone"
        };
        let _ = writeln!(
            text,
            "| the relay, for QEMU {} | compress by {threads} threads, without multifd | {source} by the source, {relays} |",
            Release::V7.name()
        );
    }
    let _ = write!(
        text,
        "\n## A Linux under way\n\nDebian's cloud kernel under TCG boots in QEMU {} and goes on and on:\n\n\
         | to | guest | source multifd channels | between relays | destination multifd channels |\n|---|---|---|---|---|\n",
        STARTS_IN.name()
    );
    for (to, live, source, method, destination) in JOURNEY {
        let guest = if live { "runs" } else { "stopped" };
        let _ = writeln!(
            text,
            "| {} | {guest} | {source} | {method} | {destination} |",
            to.name()
        );
    }
    text += &plugged();
    text += &lazy();
    text += &devices();
    text += suite;
    text += CHANGED_IN_11;
    text
}

/// Returns the moves of a Linux with memory of virtio-mem.
fn plugged() -> String {
    let mib = |bytes| bytes >> 20;
    let mut text = format!(
        "\n## Memory that virtio-mem has plugged\n\n\
         Debian's cloud kernel under TCG fills memory of a virtio-mem device that has {} of {} MiB plugged. A second one of\n\
         this size has nothing plugged. The guest boots in QEMU {}, and goes from each of these QEMUs to the next. After each\n\
         move it finds its memory right, the devices have their sizes, and QEMU has taken no memory for unplugged pages.\n\n\
         | machine | to | guest | by |\n|---|---|---|---|\n",
        mib(pluggable::PLUGGED),
        mib(pluggable::REGION),
        pluggable::STARTS_IN.name()
    );
    for (machine, ways) in pluggable::JOURNEYS {
        let mut from = pluggable::STARTS_IN;
        for (to, way) in ways {
            let guest = if runs_in(from) { "runs" } else { "stopped" };
            let _ = writeln!(text, "| {machine} | {} | {guest} | {way} |", to.name());
            from = *to;
        }
    }
    text
}

/// Returns the restores in which the guest runs first.
fn lazy() -> String {
    let mut text = String::from(
        "\n## Guests that run before they have their pages\n\n\
         Saved by `hotlift save`, restored with `--lazy`. The virtio devices are a raw disk, a network card, a serial port and a\n\
         balloon. `make qemu-matrix` restores every combination of releases, accelerators, vCPUs and devices.\n\n\
         | saved by | restored into | machine | guest | vCPUs | virtio devices | method |\n|---|---|---|---|---|---|---|\n",
    );
    for row in lazy_machines::ROWS {
        let _ = writeln!(
            text,
            "| {} | {} | {} | {}, {} | {} | {} | {} |",
            row.from.name(),
            row.to.name(),
            row.machine(),
            if row.live { "runs" } else { "stopped" },
            row.accelerator.name().to_uppercase(),
            row.vcpus,
            if row.has_virtio { "yes" } else { "no" },
            row.method,
        );
    }
    let (from, to) = lazy_machines::LINUX;
    let to = to.map(Release::name).join(", ");
    let _ = writeln!(
        text,
        "\nDebian's cloud kernel under TCG, with two vCPUs, is saved by QEMU {} while it runs, and restored into each of\n\
         {to}: it answers on a serial port and uses its virtio disk while most of its pages are missing.",
        from.name()
    );
    text
}

/// Returns the kinds of machines, and the releases between which they move.
fn devices() -> String {
    let moves = |cells: &[&Cell]| {
        let moves = cells.iter().map(|it| (it.from.name(), it.to.name()));
        let mut moves: Vec<_> = moves.map(|(from, to)| format!("{from} → {to}")).collect();
        moves.dedup();
        moves.join(", ")
    };
    let cells = device_matrix::cells();
    let of = |kind: &Kind| -> Vec<&Cell> {
        let is = |cell: &&Cell| cell.kind.name == kind.name;
        cells.iter().filter(is).collect()
    };
    let all = moves(&of(&device_matrix::KINDS[0]));
    let mut text = String::from(
        "\n## Memory and devices\n\n\
         `make qemu-matrix` takes a machine of each kind by each of these ways, and compares memory of guest and device. The guest\n\
         uses no device. One run: [bench/results](../bench/results/README.md#memory-and-devices).\n\n",
    );
    for way in Way::ALL {
        let _ = writeln!(text, "- {}", way.name());
    }
    let _ = write!(
        text,
        "\nAll releases: {all}.\n\n| machine or device | releases | result |\n|---|---|---|\n"
    );
    for kind in &device_matrix::KINDS {
        let cells = of(kind);
        let releases = Some(moves(&cells)).filter(|releases| *releases != all);
        let releases = releases.unwrap_or_else(|| "all".to_owned());
        let refused: Vec<_> = cells.iter().filter(|it| it.refusal().is_some()).collect();
        let reason = |cell: &Cell| cell.refusal().unwrap_or_default();
        let result = match refused[..] {
            [] => "moves".to_owned(),
            [first, ..] if refused.len() == cells.len() => {
                format!("QEMU refuses: {}", reason(first))
            }
            _ if cells.iter().all(|it| it.refusal().is_some() == (it.from != it.to)) => {
                "moves within a release; QEMU does not load it between releases, also without Hotlift".to_owned()
            }
            _ => {
                let ways = refused.iter().map(|it| format!("; {} is refused: {}", it.way.name(), reason(it)));
                format!("moves{}", ways.collect::<String>())
            }
        };
        let _ = writeln!(text, "| {} | {releases} | {result} |", kind.name);
    }
    text
}

/// Changes in QEMU 11 that the tests have found.
const CHANGED_IN_11: &str = "
## What QEMU 11.1 does otherwise

- It has no `query-migrationthreads`: Hotlift waits half a second before it puts a source's settings back, as with 7.2.
- It has no `zero-blocks` and no `detach` of `migrate`; Hotlift never needed them.
- New states: `failing` until all is cleaned up after a failure, then `failed`; `postcopy-device` from the devices on until
  the guest runs. Neither is an end.
- Multifd and `postcopy-ram` go together (from 10.1 on).
- Machine types up to 8.1 work, with a warning that they will go.
";

/// Returns the section of a document that begins with `heading`; `scripts/qemu-suite/suite` writes that of QEMU's own test.
fn section<'a>(document: &'a str, heading: &str) -> &'a str {
    let Some(start) = document.find(heading) else {
        return "";
    };
    let section = &document[start..];
    let end = section[heading.len()..].find("\n## ");
    end.map_or(section, |end| &section[..heading.len() + end])
}

#[test]
fn the_table_in_the_docs_is_what_the_tests_move() {
    let file = Path::new(env!("CARGO_MANIFEST_DIR")).join("../../docs/qemu-compatibility.md");
    let there = std::fs::read_to_string(&file).unwrap_or_default();
    let text = render(section(&there, "\n## QEMU's own migration test\n"));
    if std::env::var_os("HOTLIFT_WRITE_TABLE").is_some() {
        std::fs::write(&file, &text).expect("the table");
    }
    let there = std::fs::read_to_string(&file).unwrap_or_default();
    assert!(
        there == text,
        "{} is old: HOTLIFT_WRITE_TABLE=1 writes it anew",
        file.display()
    );
}

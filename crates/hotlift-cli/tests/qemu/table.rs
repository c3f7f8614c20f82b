//! Generates `docs/qemu-compatibility.md` from the migrations in the tests, so that the page matches the tests exactly.

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
         The tests in `crates/hotlift-cli/tests/qemu` generate this page from their cases. They move real virtual machines,\n\
         through a relay on each side unless a table states otherwise. Each guest checks its memory all the time; after each\n\
         move the harness replays every write of the guest, or compares all of RAM. QEMU 7.2 is from Debian 12, 10.0 from\n\
         bookworm-backports, 11.1 from forky.\n\n\
         ## Settings\n\n\
         `make test` moves a guest with each of these combinations. They contain every compatible pair of settings.\n\n\
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
            row.zero_pages.unwrap_or("built in"),
            if row.return_path { "on" } else { "off" },
            row.method,
            row.between,
            row.destination,
        );
    }
    let _ = write!(
        text,
        "\nThere are {} combinations. `make qemu-matrix` moves a guest with each of them, in some hours, and writes a line for\n\
         each to `bench/results`; no such result is published.\n\n\
         `built in`: QEMU 7.2 has no parameter zero-page-detection. Only method none has no channels between relays (`off`:\n\
         pages on the main channel). A guest of QEMU 7.2 under TCG is stopped before the move: QEMU 7.2 loses dirty pages of\n\
         a running guest, also directly from QEMU to QEMU.\n\n\
         ## QEMU's own compression\n\n\
         | compressing side | method | other settings |\n|---|---|---|\n",
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
            "one relay only"
        };
        let _ = writeln!(
            text,
            "| the relay, for QEMU {} | multifd {method} | {relays} |",
            to.name()
        );
    }
    for (by_qemu, two, threads) in COMPRESS_FOR_QEMU {
        let source = if by_qemu {
            "compress"
        } else {
            "no compression"
        };
        let relays = if two {
            "two relays with compress between them"
        } else {
            "one relay only"
        };
        let _ = writeln!(
            text,
            "| the relay, for QEMU {} | compress with {threads} {}, without multifd | {source} at the source, {relays} |",
            Release::V7.name(),
            if threads == 1 { "thread" } else { "threads" },
        );
    }
    let _ = write!(
        text,
        "\n## A running Linux\n\nDebian's cloud kernel under TCG boots in QEMU {} and moves through these QEMUs in turn:\n\n\
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
        "\n## Plugged memory of virtio-mem\n\n\
         Debian's cloud kernel under TCG fills memory of a virtio-mem device that has {} of {} MiB plugged. A second device of\n\
         the same size has nothing plugged. The guest boots in QEMU {} and moves through these QEMUs in turn. After each move\n\
         its memory is correct, the devices keep their sizes, and QEMU has allocated no memory for unplugged pages.\n\n\
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
        "\n## Guests that run before their pages are loaded\n\n\
         `hotlift save` saves these guests, `hotlift restore --lazy` restores them. The virtio devices are a raw disk, a network\n\
         card, a serial port and a balloon. `make qemu-matrix` restores every combination of releases, accelerators, vCPUs\n\
         and devices.\n\n\
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
        "\nDebian's cloud kernel under TCG, with two vCPUs, is saved by QEMU {} while it runs, and restored into each of QEMU\n\
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
         `make qemu-matrix` moves a machine of each kind in each of these ways, and compares memory of guest and device. The guest\n\
         uses no device. Results of one run: [bench/results](../bench/results/README.md#memory-and-devices).\n\n",
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
            _ if cells
                .iter()
                .all(|it| it.refusal().is_some() == (it.from != it.to)) =>
            {
                "moves within a release; between releases QEMU cannot load it, also without Hotlift"
                    .to_owned()
            }
            _ => {
                let ways = refused
                    .iter()
                    .map(|it| format!("; refused with {}: {}", it.way.name(), reason(it)));
                format!("moves{}", ways.collect::<String>())
            }
        };
        let _ = writeln!(text, "| {} | {releases} | {result} |", kind.name);
    }
    text
}

/// Changes in QEMU 11 that the tests found.
const CHANGED_IN_11: &str = "
## Changes in QEMU 11.1

- It has no `query-migrationthreads`: Hotlift waits half a second before it restores a source's settings, as with 7.2.
- It has no `zero-blocks` and no `detach` of `migrate`; Hotlift does not use them.
- It has new states: `failing` during the clean-up after a failure, before `failed`; `postcopy-device` from the load of the
  devices until the guest runs. Neither is a final state.
- Multifd and `postcopy-ram` can be combined (since 10.1).
- Machine types up to 8.1 work; QEMU warns that they will be removed.
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
fn the_table_in_the_docs_lists_what_the_tests_move() {
    let file = Path::new(env!("CARGO_MANIFEST_DIR")).join("../../docs/qemu-compatibility.md");
    let there = std::fs::read_to_string(&file).unwrap_or_default();
    let text = render(section(&there, "\n## QEMU's own migration test\n"));
    hotlift_testkit::generated::check(&file, &text);
}

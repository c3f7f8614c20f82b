//! Prints the differences between two VMs: as a table for `migrate --check`, as warnings for other commands.

use hotlift_qemu::compare::{Outcome, Row};
use hotlift_terminal::output::warn;
use hotlift_terminal::table::new_table;
use hotlift_terminal::width;

/// Returns the table of all comparisons, and below it one line per remedy.
pub fn table(rows: &[Row]) -> String {
    let mut table = new_table(&["", "source", "destination", "result"]);
    for row in rows {
        let result = match row.outcome {
            Outcome::Same => "same",
            Outcome::Different => "different",
            Outcome::Refused => "refused",
            Outcome::Unknown => "unknown",
        };
        table.add_row([&row.what, &row.source, &row.destination, result]);
    }
    width::wrap_all(&mut table);
    let mut text = table.to_string();
    for row in rows.iter().filter(|row| !row.remedy.is_empty()) {
        let Row { what, remedy, .. } = row;
        let line = format!("{what}: start the destination's QEMU with {remedy}");
        text += &format!("\n{}", width::folded(&line));
    }
    text
}

/// Prints a warning for each difference that did not stop the migration: QEMU accepts it, or had to decide.
pub fn warn(rows: &[Row]) {
    for row in rows {
        match row.outcome {
            Outcome::Same | Outcome::Unknown => {}
            Outcome::Different => warn!("warning: {}; QEMU accepts that", row.line()),
            Outcome::Refused => warn!("warning: {}; QEMU refuses that", row.line()),
        }
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    fn row(what: &str, source: &str, destination: &str, outcome: Outcome) -> Row {
        Row {
            what: what.to_owned(),
            source: source.to_owned(),
            destination: destination.to_owned(),
            outcome,
            remedy: match outcome {
                Outcome::Refused => {
                    "the same romfile= of this device, or romsize=262144 and the rest of it"
                        .to_owned()
                }
                _ => String::new(),
            },
        }
    }

    #[test]
    fn the_table_fits_80_columns_without_lost_text() {
        let flags = "avx, avx2, avx512bw, avx512cd, avx512dq, avx512f, avx512vl, bmi1, bmi2";
        let rows = [
            row("machine type", "pc-q35-10.0", "pc-q35-10.0", Outcome::Same),
            row("CPU flags", flags, "none of its own", Outcome::Different),
            row("disks", "?", "?", Outcome::Unknown),
            row(
                "RAM block 0000:00:02.0/virtio-net-pci.rom",
                "262144 bytes",
                "524288 bytes",
                Outcome::Refused,
            ),
        ];
        let text = table(&rows);
        assert!(
            text.lines().all(|line| line.chars().count() <= 80),
            "{text}"
        );
        let words =
            flags
                .split(' ')
                .chain(["same", "different", "unknown", "refused", "romsize=262144"]);
        for word in words {
            assert!(text.contains(word), "{word} is missing:\n{text}");
        }
    }
}

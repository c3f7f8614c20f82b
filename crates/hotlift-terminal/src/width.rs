//! Fits output to the width of a terminal: cuts lines, and leaves out columns of tables.

use std::os::fd::AsFd;

use comfy_table::{ColumnConstraint, ContentArrangement, Table, Width};
use rustix::termios::tcgetwinsize;
use unicode_width::{UnicodeWidthChar, UnicodeWidthStr};

use crate::table::new_table;

/// Headers of the columns that a table leaves out on a narrow terminal, in this order. All others are always shown: the run,
/// its duration, the guest's downtime, the check.
pub const DISPENSABLE: &[&str] = &[
    "RAM kB",
    "preempted",
    "page faults",
    "QEMU, CPU",
    "core-s/GiB of all pages dst",
    "core-s/GiB of all pages src",
    "core-s/GiB dst",
    "core-s/GiB src",
    "pages/s",
    "rounds",
    "CPU % dst",
    "CPU % src",
    "sent kB",
    "ratio",
    "ch",
    "Mbit/s",
];

/// Returns the number of columns of a terminal; `None` if `of` is not a terminal, or the terminal reports none.
pub fn columns(of: impl AsFd) -> Option<usize> {
    let size = tcgetwinsize(of).ok()?;
    (size.ws_col > 0).then_some(size.ws_col.into())
}

/// Number of columns for output to a file or pipe, unless the environment variable COLUMNS is set. 80 is the default of
/// terminals, and fits an email or a ticket.
const KEPT: usize = 80;

/// Returns the number of columns of standard output: that of the terminal, or of the environment variable COLUMNS. `None` if
/// neither is known.
pub fn of_output() -> Option<usize> {
    columns(rustix::stdio::stdout()).or_else(|| named(std::env::var("COLUMNS").ok()?.as_str()))
}

/// Parses the value of COLUMNS; `None` if it is not a positive number.
fn named(value: &str) -> Option<usize> {
    value.trim().parse().ok().filter(|columns| *columns > 0)
}

/// Returns the number of columns for text that is broken between words.
fn broken_at() -> usize {
    of_output().unwrap_or(KEPT)
}

/// Cuts `text` to `columns`. If it is longer, it ends with an ellipsis.
pub fn cut(text: &str, columns: usize) -> String {
    if text.width() <= columns {
        return text.to_owned();
    }
    let mut room = columns.saturating_sub(1);
    let begin = text.chars().take_while(|char| {
        let width = char.width().unwrap_or(0);
        let fits = width <= room;
        room = room.saturating_sub(width);
        fits
    });
    let mut cut: String = begin.collect();
    if columns > 0 {
        cut.push('…');
    }
    cut
}

/// Breaks `text` between words into lines that fit standard output.
pub fn folded(text: &str) -> String {
    folded_to(broken_at(), text)
}

/// Breaks `text` between words into lines of at most `columns`. Continuation lines keep the indentation of their line.
fn folded_to(columns: usize, text: &str) -> String {
    let mut lines = Vec::new();
    for whole in text.lines() {
        if whole.width() <= columns {
            lines.push(whole.to_owned());
            continue;
        }
        let indent = &whole[..whole.len() - whole.trim_start().len()];
        let mut line = indent.to_owned();
        for word in whole.split_whitespace() {
            let is_first = line.len() == indent.len();
            if !is_first && line.width() + 1 + word.width() > columns {
                lines.push(std::mem::replace(&mut line, indent.to_owned() + word));
                continue;
            }
            if !is_first {
                line.push(' ');
            }
            line.push_str(word);
        }
        lines.push(line);
    }
    lines.join("\n")
}

/// Minimum number of columns for the row names of a table. If the terminal is too narrow, names continue on further lines.
const NAMES: u16 = 10;

/// Returns a table for standard output. Columns that do not fit are left out; a file or pipe without COLUMNS gets all. `finish`
/// formats the table.
pub fn fitted(header: &[&str], rows: &[Vec<String>], finish: impl Fn(&mut Table)) -> String {
    fitted_to(of_output(), header, rows, finish)
}

fn fitted_to(
    columns: Option<usize>,
    header: &[&str],
    rows: &[Vec<String>],
    finish: impl Fn(&mut Table),
) -> String {
    let mut shown: Vec<usize> = (0..header.len()).collect();
    let mut dispensable = DISPENSABLE.iter();
    let mut left_out = Vec::new();
    loop {
        let heads: Vec<&str> = shown.iter().map(|&column| header[column]).collect();
        let mut table = new_table(&heads);
        for row in rows {
            table.add_row(shown.iter().map(|&column| &row[column]));
        }
        finish(&mut table);
        let text = table.to_string();
        let width = text.lines().next().unwrap_or_default().width();
        let too_wide_for = columns.filter(|columns| width > *columns);
        let next = dispensable.find(|name| heads.contains(*name));
        let (Some(_), Some(next)) = (too_wide_for, next) else {
            let text = too_wide_for.map_or(text, |columns| {
                wrap_names(&mut table, columns);
                table.to_string()
            });
            return match left_out.as_slice() {
                [] => text,
                names => format!("{text}\nno room for: {}", names.join(", ")),
            };
        };
        left_out.push(*next);
        shown.retain(|&column| header[column] != *next);
    }
}

/// Breaks the names in the first column into several lines, to make the table fit into `columns`.
fn wrap_names(table: &mut Table, columns: usize) {
    table
        .set_content_arrangement(ContentArrangement::Dynamic)
        .set_width(columns.try_into().unwrap_or(u16::MAX));
    for (index, column) in table.column_iter_mut().enumerate() {
        column.set_constraint(match index {
            0 => ColumnConstraint::LowerBoundary(Width::Fixed(NAMES)),
            _ => ColumnConstraint::ContentWidth,
        });
    }
}

/// Breaks the text in column `words`, counted from 0, into several lines if standard output is too narrow.
pub fn wrap(table: &mut Table, words: usize) {
    wrap_all(table);
    let others = table.column_iter_mut().enumerate();
    for (_, column) in others.filter(|(index, _)| *index != words) {
        column.set_constraint(ColumnConstraint::ContentWidth);
    }
}

/// Breaks the text in every column into several lines if standard output is too narrow.
pub fn wrap_all(table: &mut Table) {
    table
        .set_content_arrangement(ContentArrangement::Dynamic)
        .set_width(broken_at().try_into().unwrap_or(u16::MAX));
}

/// Returns the number of columns of numbers that fit standard output beside a column of names; at least 1. `names` and
/// `figures` are widths of columns. A file or pipe without COLUMNS gets all `number` columns.
pub fn side_by_side(names: usize, figures: usize, number: usize) -> usize {
    // Width of a separator with a blank on both sides.
    const BESIDE: usize = 3;
    match of_output() {
        None => number.max(1),
        Some(columns) => {
            let room = columns.saturating_sub(names + BESIDE + 1);
            (room / (figures + BESIDE)).max(1)
        }
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn columns_of_the_environment_are_a_number_above_zero() {
        for (value, columns) in [
            ("120", Some(120)),
            (" 60\n", Some(60)),
            ("0", None),
            ("-1", None),
            ("", None),
            ("x", None),
        ] {
            assert_eq!(named(value), columns, "{value:?}");
        }
    }

    #[test]
    fn a_line_is_cut_by_its_width_on_the_screen() {
        assert_eq!(cut("zstd: 5 s", 9), "zstd: 5 s");
        assert_eq!(cut("zstd: 5 s", 8), "zstd: 5…");
        assert_eq!(cut("zstd: 5 s", 1), "…");
        assert_eq!(cut("zstd: 5 s", 0), "");
        // Each of these characters has a width of two columns.
        assert_eq!(cut("漢字漢字", 8), "漢字漢字");
        assert_eq!(cut("漢字漢字", 6), "漢字…");
        for columns in 0..40 {
            assert!(cut("migration активна: 漢字, 5 s left", columns).width() <= columns);
        }
    }

    #[test]
    fn lines_are_broken_between_words_and_keep_their_indentation() {
        let text = "one two three\n\n  four five sixteen";
        assert_eq!(folded_to(80, text), text);
        assert_eq!(
            folded_to(11, text),
            "one two\nthree\n\n  four five\n  sixteen"
        );
        assert_eq!(folded_to(1, "one two"), "one\ntwo");
        assert_eq!(folded_to(7, "漢字 漢字"), "漢字\n漢字");
    }

    fn table(columns: Option<usize>) -> String {
        let header = [
            "method",
            "ch",
            "total ms",
            "pages/s",
            "ratio",
            "core-s/GiB src",
            "core-s/GiB dst",
            "verified",
        ];
        let row = header.map(|head| "9".repeat(head.len())).to_vec();
        fitted_to(columns, &header, &[row], |_| {})
    }

    #[test]
    fn long_row_names_wrap_if_no_column_can_be_dropped() {
        let name = "a row with a name of many words".to_owned();
        let rows = [vec![name.clone(), "12345 (11111–13333)".to_owned()]];
        let text = fitted_to(Some(48), &["method", "total ms"], &rows, |_| {});
        assert!(text.lines().all(|line| line.width() <= 48), "{text}");
        assert!(
            text.contains("12345 (11111–13333)") && !text.contains(&name),
            "{text}"
        );
        for word in name.split(' ') {
            assert!(text.contains(word), "{text}");
        }
    }

    #[test]
    fn a_table_drops_the_least_important_columns_first_and_names_them() {
        let whole = table(None);
        assert!(!whole.contains("no room for"), "{whole}");
        let width = whole.lines().next().unwrap().width();
        assert_eq!(table(Some(width)), whole);
        let narrower = table(Some(width - 1));
        assert!(
            narrower.ends_with("no room for: core-s/GiB dst"),
            "{narrower}"
        );
        assert!(
            !narrower.lines().next().unwrap().contains("dst"),
            "{narrower}"
        );
        for columns in 40..width {
            let text = table(Some(columns));
            let rows = text.lines().filter(|line| !line.starts_with("no room"));
            assert!(rows.clone().all(|line| line.width() <= columns), "{text}");
        }
        let narrowest = table(Some(1));
        for kept in ["method", "total ms", "verified"] {
            assert!(narrowest.contains(kept), "{narrowest}");
        }
    }
}

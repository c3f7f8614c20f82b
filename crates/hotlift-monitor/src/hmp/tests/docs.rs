//! Tests that the tables in `docs/control.md` match the tables of this crate and the table of options.

use std::fmt::Write;
use std::path::Path;

use hotlift::options::{Kind, OLDER_NAMES, OPTIONS, QmpType};

use super::super::table::{COMMANDS, HmpCommand, INFO};

/// Escapes vertical bars, which would end a table cell.
fn cell(text: &str) -> String {
    text.replace('|', "\\|")
}

fn commands(prefix: &str, rows: &[HmpCommand]) -> String {
    rows.iter()
        .map(|row| {
            let also: Vec<_> = row.names[1..]
                .iter()
                .map(|name| format!("`{name}`"))
                .collect();
            let typed = format!("{prefix}{} {}", row.names[0], row.arguments);
            let qmp = if row.qmp.is_empty() {
                String::new()
            } else {
                format!("`{}`", row.qmp)
            };
            format!(
                "| `{}` | {} | {qmp} | {} |\n",
                cell(typed.trim_end()),
                also.join(", "),
                cell(row.help)
            )
        })
        .collect()
}

fn options(kinds: &[Kind]) -> String {
    let mut text = String::from(
        "| name | type | values | default | under way | what it does |\n|---|---|---|---|---|---|\n",
    );
    for row in OPTIONS.iter().filter(|row| kinds.contains(&row.kind)) {
        let values = match row.qmp_type() {
            QmpType::Bool => String::new(),
            _ if row.unit.is_empty() => row.values.to_string(),
            _ => format!("{}, in {}", row.values, row.unit),
        };
        let _ = writeln!(
            text,
            "| `{}` | {} | {} | {} | {} | {} |",
            row.qmp_name(),
            row.qmp_type(),
            cell(&values),
            row.default(),
            if row.live { "yes" } else { "" },
            cell(row.help)
        );
    }
    text
}

/// Returns each table with the marker of its position in the document.
fn tables() -> Vec<(&'static str, String)> {
    let head = "| typed | also | QMP | what it does |\n|---|---|---|---|\n";
    let older: String = OLDER_NAMES
        .iter()
        .map(|older| {
            let also = older.also.map_or(String::new(), |(name, value)| {
                format!(", and `{name}` {value}")
            });
            format!("| `{}` | `{}`{also} |\n", older.name, older.now)
        })
        .collect();
    vec![
        (
            "commands",
            format!(
                "{head}{}{}",
                commands("", COMMANDS),
                commands("info ", INFO)
            ),
        ),
        ("capabilities", options(&[Kind::Capability])),
        ("parameters", options(&[Kind::Parameter, Kind::Ours])),
        (
            "older names",
            format!("| name | sets |\n|---|---|\n{older}"),
        ),
    ]
}

#[test]
fn the_tables_in_the_docs_equal_those_of_the_program() {
    let file = Path::new(env!("CARGO_MANIFEST_DIR")).join("../../docs/control.md");
    let mut text = std::fs::read_to_string(&file).unwrap_or_default();
    for (name, table) in tables() {
        let mark = format!("<!-- {name}, made by a test -->\n");
        let start = text
            .find(&mark)
            .unwrap_or_else(|| panic!("no {mark:?} in {}", file.display()))
            + mark.len();
        let lines = text[start..].split_inclusive('\n');
        let length: usize = lines
            .take_while(|line| line.starts_with('|'))
            .map(str::len)
            .sum();
        text.replace_range(start..start + length, &table);
    }
    hotlift_testkit::generated::check(&file, &text);
}

//! Completion of an incomplete line.

use hotlift::options::{Kind, OPTIONS, option};

use super::table::{COMMANDS, HmpCommand, INFO, find};

/// Returns the position in bytes at which the last word of `line` begins, and the possible completions of this word.
pub fn complete(line: &str) -> (usize, Vec<String>) {
    let start = line.rfind(char::is_whitespace).map_or(0, |space| space + 1);
    let before: Vec<&str> = line[..start].split_whitespace().collect();
    let of_kind = |capability: bool| {
        let rows = OPTIONS
            .iter()
            .filter(move |row| (row.kind == Kind::Capability) == capability);
        rows.map(|row| row.qmp_name().into_owned()).collect()
    };
    let names = |table: &'static [_]| {
        let rows: &[HmpCommand] = table;
        rows.iter().map(|row| row.names[0].to_owned()).collect()
    };
    let command = before
        .first()
        .map(|name| find(COMMANDS, name).map_or("", |row| row.names[0]));
    let all: Vec<String> = match (command, before.len()) {
        (None, _) | (Some("help"), 1) => names(COMMANDS),
        (Some("info"), 1) => names(INFO),
        (Some("help"), 2) if before[1] == "info" => names(INFO),
        (Some("migrate_set_capability"), 1) => of_kind(true),
        (Some("migrate_set_capability"), 2) => vec!["on".to_owned(), "off".to_owned()],
        (Some("migrate_set_parameter"), 1) => of_kind(false),
        (Some("migrate_set_parameter"), 2) => option(before[1])
            .map(|row| row.values.names())
            .unwrap_or_default()
            .into_iter()
            .map(str::to_owned)
            .collect(),
        (Some("migrate_continue"), 1) => vec!["pre-switchover".to_owned()],
        (Some("migrate"), _) => ["tcp:", "unix:", "-d"].map(str::to_owned).to_vec(),
        (Some("migrate_incoming" | "migrate_recover"), 1) => {
            ["tcp:", "unix:"].map(str::to_owned).to_vec()
        }
        _ => Vec::new(),
    };
    let word = &line[start..];
    let fitting = all.into_iter().filter(|name| name.starts_with(word));
    (start, fitting.collect())
}

//! Tests that the documented table of timeouts has the values of the constants.

use std::path::Path;

#[test]
fn the_documented_timeouts_equal_the_constants() {
    let crates = Path::new(env!("CARGO_MANIFEST_DIR")).join("..");
    let text = std::fs::read_to_string(crates.join("../docs/timeouts.md")).unwrap();
    let (_, table) = text.split_once("|---|---|---|---|---|\n").unwrap();
    let rows: Vec<_> = table
        .lines()
        .take_while(|line| line.starts_with('|'))
        .collect();
    assert!(rows.len() > 20, "{}", rows.len());
    for row in rows {
        let cells: Vec<_> = row.trim_matches('|').split('|').map(str::trim).collect();
        let (number, unit) = cells[2].split_once(' ').unwrap();
        let (unit, milliseconds) = match unit {
            "s" => ("secs", format!("{number}_000")),
            "ms" => ("millis", number.to_owned()),
            other => panic!("a unit: {other}"),
        };
        let mut constant = cells[4].split('`').skip(1).step_by(2);
        let (file, name) = (constant.next().unwrap(), constant.next().unwrap());
        let source = std::fs::read_to_string(crates.join(file)).unwrap();
        let value = format!("Duration::from_{unit}({number})");
        let is_defined = [
            format!("{name}: Duration = {value};"),
            format!("{name}: Duration = {value},"),
            format!("{name}: {value},"),
            format!("{name}: u32 = {milliseconds};"),
        ]
        .iter()
        .any(|definition| source.contains(definition));
        assert!(is_defined, "{row}");
    }
}

//! Tests that the example configuration in the packages documents every key of the agent.

use std::path::Path;

use hotlift_agent::config::Config;

/// Tables whose entries are examples, not defaults.
const TABLES: [&str; 2] = ["peers", "weights"];

fn example() -> String {
    let file = Path::new(env!("CARGO_MANIFEST_DIR")).join("../../packaging/agent.toml");
    std::fs::read_to_string(&file).unwrap_or_else(|error| panic!("{}: {error}", file.display()))
}

/// Returns the lines with a value, without their comment marks.
fn uncommented(text: &str) -> String {
    let lines = text.lines().map(|line| match line.strip_prefix('#') {
        Some(value) if !value.starts_with(' ') => value,
        _ => line,
    });
    lines.collect::<Vec<_>>().join("\n")
}

fn read(text: &str) -> Config {
    let read = Config::of_text(Path::new("packaging/agent.toml"), text);
    read.unwrap_or_else(|error| panic!("{}", hotlift::error::error_line(&error)))
}

#[test]
fn the_example_has_every_key_with_its_default() {
    let text = example();
    assert_eq!(read(&text), Config::default(), "as it is installed");
    let all = uncommented(&text);
    for key in keys() {
        let is_there = |line: &str| {
            line.split('=').next().map(str::trim) == Some(&key) || line == format!("[{key}]")
        };
        assert!(all.lines().any(is_there), "'{key}' is missing");
    }
    let mut config = read(&all);
    for table in TABLES {
        let examples = match table {
            "peers" => std::mem::take(&mut config.peers).len(),
            _ => std::mem::take(&mut config.weights).len(),
        };
        assert!(examples > 0, "[{table}] has no example");
    }
    assert_eq!(config, Config::default());
}

#[test]
fn the_reference_has_every_key() {
    let file = Path::new(env!("CARGO_MANIFEST_DIR")).join("../../docs/agent-reference.md");
    let text = std::fs::read_to_string(&file).expect("the reference");
    for key in keys() {
        let is_named = text.contains(&format!("`{key}`")) || text.contains(&format!("`[{key}]`"));
        assert!(is_named, "'{key}' is missing");
    }
}

/// Returns the names of all fields.
fn keys() -> Vec<String> {
    let value = serde_json::to_value(Config::default()).expect("a configuration is data");
    let keys = value.as_object().expect("a table").keys();
    keys.cloned().collect()
}

//! Tests that the files that packages install for the agent match the agent's code.

use std::path::Path;

use hotlift_agent::config::Config;
use hotlift_agent::rules::rules;

const EXAMPLE: &str = include_str!("../../../packaging/agent.toml");
const DASHBOARD: &str = include_str!("../../../packaging/grafana-dashboard.json");
const RULES: &str = include_str!("../../../packaging/hotlift-agent.nft");
const SECURITY: &str = include_str!("../../../SECURITY.md");
const TABLE_TESTS: &str = include_str!("../../hotlift-cli/tests/qemu/agent_table.rs");
const METRICS: &str = include_str!("../src/metrics.rs");

/// Returns the example with its defaults set: a value directly follows its "#", text does not.
fn with_values() -> String {
    let set = |line: &str| match line.strip_prefix('#') {
        Some(value) if !value.starts_with([' ', '#']) => value.to_owned() + "\n",
        _ => line.to_owned() + "\n",
    };
    EXAMPLE.lines().map(set).collect()
}

#[test]
fn the_installed_example_equals_the_defaults() {
    let config = Config::of_text(Path::new("agent.toml"), EXAMPLE);
    assert_eq!(config.unwrap(), Config::default());
}

#[test]
fn the_example_has_every_key_with_its_default() {
    let text = with_values();
    let mut config = Config::of_text(Path::new("agent.toml"), &text).unwrap();
    assert!(!config.peers.is_empty() && !config.weights.is_empty());
    let keys = serde_json::to_value(&config).unwrap();
    for key in keys.as_object().unwrap().keys() {
        let has = |line: &str| {
            let name = line.split('=').next().unwrap_or_default().trim();
            name == key || name == format!("[{key}]")
        };
        assert!(
            text.lines().any(has),
            "{key} is not in packaging/agent.toml"
        );
    }
    config.peers.clear();
    config.weights.clear();
    assert_eq!(config, Config::default());
}

#[test]
fn the_dashboard_uses_existing_metrics_only() {
    let begin = ["hotlift_agent_", "hotlift_migration_"];
    let words = DASHBOARD.split(|c: char| !c.is_ascii_alphanumeric() && c != '_');
    let shown: Vec<_> = words
        .filter(|word| begin.iter().any(|begin| word.starts_with(begin)))
        .collect();
    assert!(shown.len() > 10);
    for name in shown {
        // Prometheus's name of a counter.
        let name = name.strip_suffix("_total").unwrap_or(name);
        assert!(
            METRICS.contains(&format!("\"{name}\"")),
            "{name} is no metric"
        );
    }
}

#[test]
fn the_packaged_rules_equal_those_of_the_agent() {
    let lines = RULES.lines().filter(|line| !line.trim().starts_with('#'));
    let text: String = lines.map(|line| line.to_owned() + "\n").collect();
    let config = Config {
        users: ["0", "64055"].map(str::to_owned).to_vec(),
        ..Config::default()
    };
    let rules = rules(&config).unwrap();
    assert_eq!(text.replace("root, libvirt-qemu", "0, 64055"), rules.text);
}

#[test]
fn the_tests_that_the_docs_name_for_the_table_exist() {
    let (_, rows) = SECURITY.split_once("| sentence | test |").unwrap();
    let (rows, _) = rows.split_once("\n\n").unwrap();
    let tests = rows.lines().skip(2);
    let names: Vec<_> = tests
        .map(|row| row.rsplit('`').nth(1).expect("a name"))
        .collect();
    assert!(names.len() > 5);
    for name in names {
        let test = format!("#[test]\nfn {name}() {{");
        assert!(TABLE_TESTS.contains(&test), "{name} is no test");
    }
}

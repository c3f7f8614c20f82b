//! Tests that the engine's modules form layers: each module uses only the layers below it.

use std::fs;
use std::path::Path;

/// Layers from the lowest up. Modules on one line do not use each other.
const FLOORS: &[&[&str]] = &[
    &["accelerators"],
    &["lock", "options", "guest", "figures"],
    &["schedule", "accelerator_stats"],
    &["tls", "auto"],
    &["error"],
    &["life"],
    &["pacing", "cpu_limit", "remote"],
    &["status", "handover", "steering"],
    &["stream", "progress", "precopy"],
    &["control"],
    &["liveness", "postcopy"],
    &["pipe"],
    &["ends/page_set"],
    &["ends/file"],
    &["ends/request"],
    &[
        "ends/guest_source",
        "ends/guest_sink",
        "ends/stream_source",
        "ends/stream_sink",
    ],
    &["ops"],
];

/// Returns the layer of a module; above all others for an unlisted one.
fn floor(module: &str) -> usize {
    let floor = FLOORS.iter().position(|floor| floor.contains(&module));
    floor.unwrap_or(FLOORS.len())
}

/// Returns the module names after each `crate::` in the code of `text`, without comments.
fn used(text: &str) -> impl Iterator<Item = String> {
    let code = text
        .lines()
        .filter(|line| !line.trim_start().starts_with("//"));
    let paths = code.flat_map(|line| line.split("crate::").skip(1));
    paths.map(|path| {
        let mut names = path.split(|c: char| !c.is_alphanumeric() && c != '_' && c != ':');
        let mut names = names.next().unwrap_or_default().split("::");
        let first = names.next().unwrap_or_default();
        match (first, names.next()) {
            ("ends", Some(end)) => format!("ends/{end}"),
            _ => first.to_owned(),
        }
    })
}

/// Adds the upward uses in the files of `module` at `path`.
fn look(module: &str, path: &Path, upward: &mut Vec<String>) {
    if path.is_dir() {
        for entry in fs::read_dir(path).unwrap() {
            look(module, &entry.unwrap().path(), upward);
        }
        return;
    }
    let is_product = path.extension().is_some_and(|extension| extension == "rs")
        && !path.components().any(|part| part.as_os_str() == "tests")
        && !path.ends_with("tests.rs");
    if !is_product {
        return;
    }
    let text = fs::read_to_string(path).unwrap();
    // Tests may use all layers.
    let product = text
        .split("#[cfg(test)]\nmod tests")
        .next()
        .unwrap_or_default();
    let is_module = |name: &String| name.chars().next().is_some_and(char::is_lowercase);
    for name in used(product).filter(is_module) {
        if name != module && floor(&name) >= floor(module) {
            upward.push(format!("{} uses {name}", path.display()));
        }
    }
}

#[test]
fn no_module_uses_one_above_it() {
    let source = Path::new(env!("CARGO_MANIFEST_DIR")).join("src");
    let mut upward = Vec::new();
    for folder in ["", "ends"] {
        for entry in fs::read_dir(source.join(folder)).unwrap() {
            let path = entry.unwrap().path();
            let name = path.file_stem().unwrap().to_str().unwrap();
            if ["lib", "mod", "ends"].contains(&name) {
                continue;
            }
            let module = match folder {
                "" => name.to_owned(),
                _ => format!("{folder}/{name}"),
            };
            look(&module, &path, &mut upward);
        }
    }
    assert!(upward.is_empty(), "{upward:#?}");
}

//! Tests the dependencies between crates and between files. A crate uses only crates below it. No two files of a crate
//! import each other, directly or indirectly, except a module and its submodules.

use std::collections::{BTreeMap, BTreeSet};
use std::fs;
use std::iter::Peekable;
use std::path::Path;
use std::vec::IntoIter;

/// The crates of the product, bottom up. Crates on one line do not use each other. The built-in guests are above the crates
/// that run beside a QEMU, so that an agent links no guest.
const FLOORS: &[&[&str]] = &[
    &["hotlift-wire", "hotlift-mem"],
    &["hotlift-methods", "hotlift-qmp", "hotlift-tls"],
    &["hotlift-accel", "hotlift-net"],
    &["hotlift", "hotlift-host"],
    &["hotlift-terminal"],
    &["hotlift-monitor", "hotlift-qemu"],
    &["hotlift-agent"],
    &["hotlift-vmm"],
    &["hotlift-command"],
    &["hotlift-bench"],
    &["hotlift-cli"],
];

/// Crates that only tests use.
const OF_TESTS: [&str; 2] = ["hotlift-simulated", "hotlift-testkit"];

/// Crates of the terminal interface: no protocol, no guest.
const OF_TERMINAL: [&str; 2] = ["hotlift", "hotlift-mem"];

/// A file of a crate, as the path of its module.
type Module = Vec<String>;

/// Reads each file of product code below `folder`, by its module.
fn read(folder: &Path, module: &Module, files: &mut BTreeMap<Module, String>) {
    for entry in fs::read_dir(folder).unwrap() {
        let path = entry.unwrap().path();
        let name = path.file_stem().unwrap().to_str().unwrap().to_owned();
        let mut own = module.clone();
        if !["lib", "main", "mod"].contains(&&*name) {
            own.push(name.clone());
        }
        if path.is_dir() {
            read(&path, &own, files);
        } else if path.extension().is_some_and(|end| end == "rs") && name != "tests" {
            let text = fs::read_to_string(&path).unwrap();
            // Tests may join separate modules.
            let product = text.split("#[cfg(test)]\nmod tests").next().unwrap();
            let code = product.lines().map(|line| line.split("//").next().unwrap());
            files.insert(own, code.collect::<Vec<_>>().join("\n"));
        }
    }
}

/// Returns words, and each other character separately, without spaces.
fn tokens(code: &str) -> Peekable<IntoIter<String>> {
    let mut tokens: Vec<String> = Vec::new();
    let mut in_word = false;
    for c in code.chars() {
        let is_word = c.is_alphanumeric() || c == '_';
        match tokens.last_mut() {
            Some(word) if is_word && in_word => word.push(c),
            _ if c.is_whitespace() => {}
            _ => tokens.push(c.to_string()),
        }
        in_word = is_word;
    }
    tokens.into_iter().peekable()
}

/// Reads the tokens after `path`, and adds each path that they name.
fn paths(
    tokens: &mut Peekable<IntoIter<String>>,
    mut path: Vec<String>,
    all: &mut Vec<Vec<String>>,
) {
    while tokens.next_if(|token| token == ":").is_some() {
        tokens.next_if(|token| token == ":");
        match tokens.peek().map(String::as_str) {
            Some("{") => {
                tokens.next();
                let mut depth = 1;
                while depth > 0 {
                    let Some(token) = tokens.next() else { return };
                    match &*token {
                        "{" => depth += 1,
                        "}" => depth -= 1,
                        "as" => drop(tokens.next()),
                        "," | "*" => {}
                        _ => {
                            let mut inner = path.clone();
                            inner.extend((token != "self").then_some(token));
                            paths(tokens, inner, all);
                        }
                    }
                }
                return;
            }
            Some(word) if word.chars().all(|c| c.is_alphanumeric() || c == '_') => {
                path.extend(tokens.next());
            }
            _ => break,
        }
    }
    all.push(path);
}

/// Returns the modules that the file of `module` uses, except its ancestors and descendants.
fn used<'a>(
    module: &Module,
    code: &str,
    files: &'a BTreeMap<Module, String>,
) -> BTreeSet<&'a Module> {
    let mut all = Vec::new();
    let mut tokens = tokens(code);
    let mut last = String::new();
    while let Some(token) = tokens.next() {
        if ["crate", "super", "self"].contains(&&*token) && last != ":" {
            paths(&mut tokens, vec![token.clone()], &mut all);
        }
        last = token;
    }
    let of = |path: Vec<String>| {
        let mut at = match &*path[0] {
            "crate" => Vec::new(),
            _ => module.clone(),
        };
        for name in path {
            match &*name {
                "crate" | "self" => {}
                "super" => drop(at.pop()),
                _ => at.push(name),
            }
        }
        // The rest names an item.
        let lengths = (1..=at.len()).rev();
        let found = lengths.filter_map(|length| files.get_key_value(&at[..length]));
        found.map(|(module, _)| module).next()
    };
    let all = all.into_iter().filter_map(of);
    all.filter(|other| !other.starts_with(module) && !module.starts_with(other))
        .collect()
}

/// Returns this workspace's crates that the manifest of the crate in `folder` depends on, without those of tests.
fn dependencies(folder: &Path) -> Vec<String> {
    let manifest = fs::read_to_string(folder.join("Cargo.toml")).unwrap();
    let (_, table) = manifest.split_once("[dependencies]\n").unwrap_or_default();
    let lines = table.lines().take_while(|line| !line.starts_with('['));
    let names = lines.map(|line| line.split(['.', ' ', '=']).next().unwrap_or_default());
    let ours = names.filter(|name| *name == "hotlift" || name.starts_with("hotlift-"));
    ours.map(str::to_owned).collect()
}

#[test]
fn no_crate_uses_one_above_it() {
    let floor = |name: &str| FLOORS.iter().position(|floor| floor.contains(&name));
    let crates = Path::new(env!("CARGO_MANIFEST_DIR")).join("..");
    let mut seen = Vec::new();
    for entry in fs::read_dir(crates).unwrap() {
        let folder = entry.unwrap().path();
        let name = folder.file_name().unwrap().to_str().unwrap().to_owned();
        if OF_TESTS.contains(&&*name) {
            continue;
        }
        let own = floor(&name).unwrap_or_else(|| panic!("{name} has no floor"));
        for used in dependencies(&folder) {
            let is_below = floor(&used).is_some_and(|used| used < own);
            assert!(is_below, "{name} uses {used}");
            let is_printed = OF_TERMINAL.contains(&&*used);
            assert!(
                name != "hotlift-terminal" || is_printed,
                "{name} uses {used}"
            );
        }
        seen.push(name);
    }
    assert_eq!(
        seen.len(),
        FLOORS.iter().flat_map(|floor| floor.iter()).count()
    );
}

#[test]
fn no_files_of_a_crate_import_each_other() {
    let crates = Path::new(env!("CARGO_MANIFEST_DIR")).join("..");
    let mut circles = Vec::new();
    for entry in fs::read_dir(crates).unwrap() {
        let folder = entry.unwrap().path();
        let mut files = BTreeMap::new();
        read(&folder.join("src"), &Vec::new(), &mut files);
        let uses = |(module, code): (_, &String)| (module, used(module, code, &files));
        let mut edges: BTreeMap<&Module, BTreeSet<&Module>> = files.iter().map(uses).collect();
        assert!(edges.values().any(|used| !used.is_empty()) || files.len() < 7);
        // Repeatedly removes modules that use no remaining module, or that none uses: the rest is on circles, or between two.
        loop {
            let left: BTreeSet<&Module> = edges.keys().copied().collect();
            edges.retain(|_, used| {
                used.retain(|module| left.contains(module));
                !used.is_empty()
            });
            let used: BTreeSet<&Module> = edges.values().flatten().copied().collect();
            edges.retain(|module, _| used.contains(module));
            if edges.len() == left.len() {
                break;
            }
        }
        for (module, used) in edges {
            let names: Vec<_> = used.iter().map(|module| module.join("/")).collect();
            circles.push(format!(
                "{}: {} uses {}",
                folder.display(),
                module.join("/"),
                names.join(", ")
            ));
        }
    }
    assert!(circles.is_empty(), "{circles:#?}");
}

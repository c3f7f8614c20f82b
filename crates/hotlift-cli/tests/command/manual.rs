//! Tests the manual pages and shell completions.

use std::fs;
use std::path::Path;

use hotlift::options::{OPTIONS, Role};

use crate::hotlift::Hotlift;

/// Returns the commands that `help` lists for `hotlift COMMANDS`, with their subcommands.
fn commands(of: &[String]) -> Vec<Vec<String>> {
    let mut args: Vec<&str> = of.iter().map(String::as_str).collect();
    args.push("--help");
    let (status, output) = Hotlift::start(&args).wait();
    assert!(status.success(), "{output:?}");
    let mut all = vec![of.to_vec()];
    let listed = output
        .iter()
        .skip_while(|line| *line != "Commands:")
        .skip(1)
        .take_while(|line| !line.is_empty());
    for line in listed {
        let Some(name) = line
            .split_whitespace()
            .next()
            .filter(|_| line.starts_with("  "))
        else {
            continue;
        };
        // Names are in the first column; other lines continue a text.
        if name != "help" && line.starts_with(&format!("  {name}")) {
            let mut below = of.to_vec();
            below.push(name.to_owned());
            all.extend(commands(&below));
        }
    }
    all
}

fn read(file: &Path) -> String {
    fs::read_to_string(file).unwrap_or_else(|error| panic!("{}: {error}", file.display()))
}

#[test]
fn every_command_has_its_page_with_its_options_and_three_shells_complete_them() {
    let dir = tempfile::tempdir().unwrap();
    let share = dir.path().to_str().unwrap();
    let (status, output) = Hotlift::start(&["manual", share]).wait();
    assert!(status.success(), "{output:?}");
    let all = commands(&[]);
    assert!(all.len() > 8, "{all:?}");
    for command in &all {
        let page = format!(
            "man/man1/hotlift{}.1",
            command
                .iter()
                .map(|name| format!("-{name}"))
                .collect::<String>()
        );
        let text = read(&dir.path().join(&page));
        assert!(text.contains(".SH NAME"), "{page}: {text}");
    }
    let page = read(&dir.path().join("man/man1/hotlift-guest-run.1")).replace("\\-", "-");
    let completions = [
        "bash-completion/completions/hotlift.bash",
        "zsh/site-functions/_hotlift",
        "fish/vendor_completions.d/hotlift.fish",
    ]
    .map(|file| read(&dir.path().join(file)));
    for option in OPTIONS {
        for shell in &completions {
            assert!(shell.contains(option.name), "{}", option.name);
        }
        if option.refusal(Role::Guest).is_some() {
            continue;
        }
        assert!(
            page.contains(&format!("--{}", option.name)),
            "{}: {page}",
            option.name
        );
        assert!(
            page.contains(&option.values.to_string()),
            "{}: {page}",
            option.name
        );
    }
}

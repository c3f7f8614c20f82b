//! Tests the help of all commands, and the errors for an option that belongs to another command.

use hotlift::options::{OPTIONS, Role};

use crate::hotlift::Hotlift;

/// Commands that migrate, each with its role.
const COMMANDS: &[(&[&str], Role)] = &[
    (&["demo"], Role::Pair),
    (&["guest", "run"], Role::Guest),
    (&["relay", "source"], Role::Relay),
    (&["relay", "destination"], Role::Relay),
    (&["migrate"], Role::Migrate),
    (&["save"], Role::Save),
    (&["serve"], Role::Receive),
    (&["restore"], Role::Restore),
];

/// Maximum lines of short help: two screens.
const SHORT: usize = 68;

fn help(command: &[&str], flag: &str) -> Vec<String> {
    let (status, output) = Hotlift::start(&[command, &[flag]].concat()).wait();
    assert!(status.success(), "{output:?}");
    output
}

#[test]
fn short_help_is_short_and_names_the_long_help() {
    for (command, role) in COMMANDS {
        let short = help(command, "-h");
        assert!(short.len() <= SHORT, "{command:?}: {} lines", short.len());
        let text = short.join("\n");
        let long = help(command, "--help").join("\n");
        for option in OPTIONS {
            let name = match option.name {
                // A value, if it has one, follows '='.
                "insecure" => "--insecure[".to_owned(),
                name => format!("--{name} "),
            };
            let is_short = option.group.is_in_short_help();
            if option.refusal(*role).is_some() {
                // A command may have its own option of that name.
                assert!(
                    role.only_receives() || !long.contains(&name),
                    "{name}: {long}"
                );
            } else {
                assert!(long.contains(&name), "{name}: {long}");
                assert!(
                    is_short == text.contains(&name) || role.only_receives(),
                    "{text}"
                );
            }
        }
        // The indent of clap.
        let flags = |text: &str| {
            let is_flag = |line: &&str| line.starts_with("      --") || line.starts_with("  -");
            text.lines().filter(is_flag).count()
        };
        assert_eq!(
            text.contains("'--help' shows all options."),
            flags(&long) > flags(&text),
            "{text}"
        );
        assert!(!long.contains("shows all options"), "{long}");
    }
}

#[test]
fn bench_names_the_separate_program() {
    for flag in ["--method=none", "--help"] {
        let (status, output) = Hotlift::start(&["bench", flag]).wait();
        assert_eq!(status.code(), Some(2), "{output:?}");
        assert_eq!(output.len(), 1, "{output:?}");
        assert!(output[0].contains("hotlift-bench"), "{output:?}");
    }
    let listed = help(&[], "--help");
    assert!(
        !listed
            .iter()
            .any(|line| line.trim_start().starts_with("bench")),
        "{listed:?}"
    );
}

#[test]
fn every_option_that_a_command_lacks_is_refused_with_an_alternative() {
    for (command, role) in COMMANDS {
        for option in OPTIONS {
            let Some(instead) = option.refusal(*role) else {
                continue;
            };
            // Flags of this command, with their own description.
            let own = ["multifd-channels", "max-bandwidth", "cpu-limit"];
            if command == &["restore"] && own.contains(&option.name) {
                continue;
            }
            let flag = format!("--{}={}", option.name, option.default());
            let (status, output) = Hotlift::start(&[command, &[flag.as_str()][..]].concat()).wait();
            assert_eq!(status.code(), Some(2), "{output:?}");
            let name = command.join(" ");
            let line = format!(
                "error: 'hotlift {name}' does not take --{}: {instead}",
                option.name
            );
            assert!(output.contains(&line), "{line}\n{output:?}");
        }
    }
}

#[test]
fn flags_of_qemus_tls_need_the_relay_and_the_folder_that_they_are_for() {
    let addresses = ["--listen=unix:/a", "--connect=unix:/b"];
    for (side, flags, reason) in [
        (
            "source",
            &["--qemu-tls=/c", "--qemu-tls-hostname=a"][..],
            "--qemu-tls-hostname needs 'relay destination'",
        ),
        (
            "destination",
            &["--qemu-tls-hostname=a"],
            "--qemu-tls <DIR>",
        ),
        (
            "source",
            &["--qemu-tls-verify-peer=off"],
            "--qemu-tls <DIR>",
        ),
    ] {
        let all = [&["relay", side][..], &addresses, flags].concat();
        let (status, output) = Hotlift::start(&all).wait();
        assert_eq!(status.code(), Some(2), "{output:?}");
        assert!(output.join("\n").contains(reason), "{output:?}");
    }
}

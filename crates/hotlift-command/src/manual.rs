//! Writes manual pages and shell completions from a program's flags.

use std::fs;
use std::path::Path;

use clap::Command;
use clap_complete::Shell;
use hotlift_terminal::error::TerminalError;

/// Each shell with the folder of its completions below /usr/share.
const COMPLETIONS: &[(Shell, &str)] = &[
    (Shell::Bash, "bash-completion/completions"),
    (Shell::Zsh, "zsh/site-functions"),
    (Shell::Fish, "fish/vendor_completions.d"),
];

/// Writes the manual pages and completions of `command` into `dir`, in the layout of /usr/share.
///
/// # Errors
/// If a file cannot be written.
pub fn write(dir: &Path, command: &Command) -> Result<(), TerminalError> {
    write_all(dir, &in_full(command.clone())).map_err(TerminalError::process("manual"))
}

fn write_all(dir: &Path, command: &Command) -> std::io::Result<()> {
    let pages = dir.join("man/man1");
    fs::create_dir_all(&pages)?;
    clap_mangen::generate_to(command.clone(), &pages)?;
    for &(shell, folder) in COMPLETIONS {
        let folder = dir.join(folder);
        fs::create_dir_all(&folder)?;
        clap_complete::generate_to(shell, &mut command.clone(), command.get_name(), &folder)?;
    }
    Ok(())
}

/// Returns `command` with all options in its short help: a manual page has only one kind of help.
fn in_full(command: Command) -> Command {
    command
        .mut_args(|arg| arg.hide_short_help(false))
        .mut_subcommands(in_full)
}

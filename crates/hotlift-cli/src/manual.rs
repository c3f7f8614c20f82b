//! Manual pages and shell completions, made of the command's own flags; `make build` runs this.

use std::fs;
use std::path::{Path, PathBuf};

use clap::{Args, Command};
use clap_complete::Shell;
use hotlift_terminal::error::TerminalError;

use crate::error::CommandError;

/// Flags of `manual`.
#[derive(Debug, Args)]
pub struct ManualArgs {
    /// Folder that becomes like a /usr/share
    dir: PathBuf,
}

/// Where a shell looks for its completions below /usr/share.
const COMPLETIONS: &[(Shell, &str)] = &[
    (Shell::Bash, "bash-completion/completions"),
    (Shell::Zsh, "zsh/site-functions"),
    (Shell::Fish, "fish/vendor_completions.d"),
];

/// Runs the command.
pub fn run(args: &ManualArgs, command: &Command) -> Result<(), CommandError> {
    let failed = |source| TerminalError::Process {
        what: "manual",
        source,
    };
    Ok(write(&args.dir, command).map_err(failed)?)
}

fn write(dir: &Path, command: &Command) -> std::io::Result<()> {
    let pages = dir.join("man/man1");
    fs::create_dir_all(&pages)?;
    let command = &in_full(command.clone());
    clap_mangen::generate_to(command.clone(), &pages)?;
    for &(shell, folder) in COMPLETIONS {
        let folder = dir.join(folder);
        fs::create_dir_all(&folder)?;
        clap_complete::generate_to(shell, &mut command.clone(), "hotlift", &folder)?;
    }
    Ok(())
}

/// `command` with nothing left for long help: a page has one text for each option.
fn in_full(command: Command) -> Command {
    command
        .mut_args(|arg| arg.hide_short_help(false))
        .mut_subcommands(in_full)
}

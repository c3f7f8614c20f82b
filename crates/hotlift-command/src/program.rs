//! Command line of a program: start, parsing, help, and messages for an invalid command line.

use std::ffi::OsString;
use std::path::Path;

use clap::error::{ContextKind, ContextValue, ErrorKind};
use clap::{Command, FromArgMatches};
use hotlift::options::{OPTIONS, Role};
use hotlift_methods::environment;
use hotlift_terminal::error::{TerminalError, error_line};
use hotlift_terminal::output::{self, warn};
use hotlift_terminal::{signals, width};

/// Last line of the short help if a command has more options.
const MORE: &str = "'--help' shows all options.";

/// Exit code for an invalid command line.
pub const USAGE: u8 = 2;

/// Maximum width of help texts, in columns.
const WIDEST: usize = 100;

/// A running program: its command-line definition, and the arguments.
pub struct Program {
    command: Command,
    words: Vec<OsString>,
}

impl Program {
    /// Prepares this process for its output and signals, and reads its arguments.
    pub fn start(command: Command) -> Self {
        if !environment::is_trusted() {
            // TMPDIR is not trusted: it may belong to an unprivileged user. The call fails only if the folder was set before,
            // and no other code sets it.
            let _ = tempfile::env::override_temp_dir(Path::new("/tmp"));
        }
        output::take_panics();
        let program = Self {
            command: fitted(with_hints(command)),
            words: std::env::args_os().collect(),
        };
        if let Err(error) = signals::survive_file_size_limit() {
            program.warn(&error_line(&error));
        }
        program
    }

    /// Lists the subcommands `first` in this order in the program's help, and the others under a separate heading.
    #[must_use]
    pub fn with_first(mut self, first: &[&str]) -> Self {
        // Only for the program's own help: rendering the list takes time, and no subcommand's help contains it.
        if self.path().is_empty() {
            self.command = grouped(self.command, first);
        }
        self
    }

    /// Returns the first argument.
    pub fn first_word(&self) -> Option<&OsString> {
        self.words.get(1)
    }

    /// Parses the command line. Prints the help if it was requested, or an error, and then ends the process.
    pub fn read<T: FromArgMatches>(&self) -> T {
        let matches = self.command.clone().try_get_matches_from(&self.words);
        match matches.and_then(|matches| T::from_arg_matches(&matches)) {
            Ok(read) => read,
            Err(error) if error.use_stderr() => {
                warn!("{}", self.explain(error));
                output::finish();
                std::process::exit(USAGE.into());
            }
            Err(answer) => match output::check() {
                Ok(()) => answer.exit(),
                Err(error) => {
                    self.warn(&error_line(&TerminalError::Output(error)));
                    output::finish();
                    std::process::exit(1);
                }
            },
        }
    }

    /// Prints an error and the next step: `advice`. Without `advice`, and if `is_usage`, prints how to get help.
    pub fn fail(&self, line: &str, advice: Option<&str>, is_usage: bool) {
        self.warn(line);
        if let Some(advice) = advice {
            self.warn(advice);
        } else if is_usage {
            let help = self.help(&self.path());
            self.warn(&format!("for more, try {help}"));
        }
    }

    /// Prints a line that begins with the program's name.
    pub fn warn(&self, line: &str) {
        warn!("{}: {line}", self.command.get_name());
    }

    /// Returns the message for an invalid command line, with the usage of the subcommand.
    fn explain(&self, error: clap::Error) -> String {
        let path = self.path();
        let typed = path.join(" ");
        let shown = match not_taken(&error, &typed) {
            Some(refusal) => clap::Error::raw(ErrorKind::UnknownArgument, refusal),
            None => error,
        };
        let mut command = self.command.clone();
        command.build();
        let last = path.iter().try_fold(&mut command, |command, name| {
            command.find_subcommand_mut(name)
        });
        let shown = match last {
            Some(last) => shown.format(last),
            None => shown,
        };
        let text = shown.render().to_string();
        text.trim_end().replace("'--help'", &self.help(&path))
    }

    /// Returns the command line that shows the help of the subcommand at `path`.
    fn help(&self, path: &[String]) -> String {
        let words = std::iter::once(self.command.get_name()).chain(path.iter().map(String::as_str));
        let words: Vec<_> = words.chain(["--help"]).collect();
        format!("'{}'", words.join(" "))
    }

    /// Returns the names of the subcommands at the start of the command line.
    fn path(&self) -> Vec<String> {
        let mut command = &self.command;
        let mut path = Vec::new();
        for word in self.words.iter().skip(1).filter_map(|word| word.to_str()) {
            let Some(next) = command.find_subcommand(word) else {
                break;
            };
            path.push(word.to_owned());
            command = next;
        }
        path
    }
}

/// Returns `command` with two changes: short help mentions options that it omits, and long help fits any terminal.
fn with_hints(command: Command) -> Command {
    let hides = |command: &Command| {
        command
            .get_arguments()
            .any(|arg| arg.is_hide_short_help_set())
    };
    let mut command = command.mut_subcommands(with_hints);
    if let Some(about) = command.get_long_about().map(ToString::to_string) {
        command = command.long_about(paragraphs(&about));
    }
    if hides(&command) {
        // An empty end for long help: clap would use that of short help, too.
        command = command.after_help(MORE).after_long_help("");
    }
    command
}

/// Returns `text` with one line per paragraph: clap then breaks each at the width of the terminal. Indented examples stay
/// unchanged.
fn paragraphs(text: &str) -> String {
    let join = |paragraph: &str| match paragraph.starts_with("  ") {
        true => paragraph.to_owned(),
        false => paragraph.replace('\n', " "),
    };
    let joined: Vec<_> = text.split("\n\n").map(join).collect();
    joined.join("\n\n")
}

/// Returns `command` with the help width of standard output, measured as for tables. clap's own measurement ignores a terminal
/// that reports a width, but no height.
fn fitted(command: Command) -> Command {
    match width::columns(rustix::stdio::stdout()) {
        Some(columns) => command.term_width(columns.min(WIDEST)),
        None => command.max_term_width(WIDEST),
    }
}

/// Returns `command` with two lists of subcommands in its help: `first` in this order, then the others under a separate
/// heading. clap's own list hides the others, so this is not for manual pages.
fn grouped(command: Command, first: &[&str]) -> Command {
    let place = |name: &str| first.iter().position(|first| *first == name);
    let others = command
        .get_subcommands()
        .filter(|subcommand| place(subcommand.get_name()).is_none() && !subcommand.is_hide_set());
    // clap supports only one heading for the subcommands, so the second list is rendered separately.
    let list = Command::new("others")
        .help_template("{subcommands}")
        .disable_help_subcommand(true)
        .disable_help_flag(true)
        .subcommands(others.cloned());
    let list = fitted(list).render_help().to_string();
    let name = command.get_name().to_owned();
    command
        .mut_subcommands(|subcommand| match place(subcommand.get_name()) {
            Some(place) => subcommand.display_order(place),
            None => subcommand.hide(true),
        })
        .after_help(format!(
            "More commands:\n{}\n\n'{name} COMMAND --help' shows the options of a command.",
            list.trim_end()
        ))
}

/// Returns why the subcommand `typed` does not accept an option that other subcommands accept; `None` for other errors.
fn not_taken(error: &clap::Error, typed: &str) -> Option<String> {
    let Some(ContextValue::String(word)) = error.get(ContextKind::InvalidArg) else {
        return None;
    };
    if error.kind() != ErrorKind::UnknownArgument {
        return None;
    }
    let name = word.strip_prefix("--")?.split('=').next()?;
    let info = OPTIONS
        .iter()
        .find(|info| info.name == name || info.alias == Some(name))?;
    let role = match typed {
        "demo" => Role::Pair,
        "guest run" => Role::Guest,
        "relay source" | "relay destination" => Role::Relay,
        "migrate" => Role::Migrate,
        "save" => Role::Save,
        "serve" => Role::Receive,
        "restore" => Role::Restore,
        _ => return None,
    };
    let instead = info.refusal(role)?;
    Some(format!(
        "'hotlift {typed}' does not take --{name}: {instead}"
    ))
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn long_help_breaks_paragraphs_at_the_terminal_and_examples_nowhere() {
        let text = "Short\n\nOne\ntwo\n\n  hotlift a\n  hotlift b\n\nEnd";
        let kept = "Short\n\nOne two\n\n  hotlift a\n  hotlift b\n\nEnd";
        assert_eq!(paragraphs(text), kept);
    }
}

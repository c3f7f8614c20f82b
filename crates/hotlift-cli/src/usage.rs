//! The command line as it is read: short help, and what is said of a bad one.

use std::ffi::OsString;

use clap::error::{ContextKind, ContextValue, ErrorKind};
use clap::{Command, CommandFactory, FromArgMatches};
use hotlift::options::{OPTIONS, Role};
use hotlift_terminal::error::{TerminalError, error_line};
use hotlift_terminal::output::{self, complain};
use hotlift_terminal::width;

use crate::Cli;

/// Ends the short help of a command that has more to show.
const MORE: &str = "'--help' shows all options.";

/// Exit code of a bad command line.
const USAGE: i32 = 2;

/// `command` whose short help says that there is more, where there is, and whose long help fits any terminal.
pub fn with_hints(command: Command) -> Command {
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
        // Long help would show it, too, if it had no end of its own.
        command = command.after_help(MORE).after_long_help("");
    }
    command
}

/// Commands of the first screen of help, in their order: what an operator comes for.
const FIRST: [&str; 9] = [
    "migrate", "serve", "drain", "save", "restore", "show", "agent", "certs", "demo",
];

/// `command` whose help lists its first subcommands by use, and the others under a heading of their own. Hides those from
/// clap's list, so that this is for reading the command line and help alone.
pub fn grouped(command: Command) -> Command {
    let is_first = |name: &str| FIRST.iter().position(|first| *first == name);
    let others = command.get_subcommands().filter(|subcommand| {
        is_first(subcommand.get_name()).is_none() && !subcommand.is_hide_set()
    });
    // clap has one heading for all subcommands of a command.
    let mut others = Command::new("others")
        .help_template("{subcommands}")
        .disable_help_subcommand(true)
        .disable_help_flag(true)
        .term_width(columns().unwrap_or(WIDEST))
        .subcommands(others.cloned());
    let others = others.render_help();
    let place = |subcommand: Command| match is_first(subcommand.get_name()) {
        Some(place) => subcommand.display_order(place),
        None => subcommand.hide(true),
    };
    command
        .mut_subcommands(place)
        .disable_help_subcommand(false)
        .after_help(format!(
            "More commands:\n{others}\n\n'hotlift COMMAND --help' shows the options of a command."
        ))
}

/// `text` with one line for each paragraph, which clap breaks where the terminal ends. Examples, which are indented, stay as
/// they are.
fn paragraphs(text: &str) -> String {
    let join = |paragraph: &str| match paragraph.starts_with("  ") {
        true => paragraph.to_owned(),
        false => paragraph.replace('\n', " "),
    };
    let joined: Vec<_> = text.split("\n\n").map(join).collect();
    joined.join("\n\n")
}

/// Columns of help where the terminal has more, or there is none.
pub const WIDEST: usize = 100;

/// `command` whose help fits the terminal of standard output by the measure of tables: clap's own takes no terminal that
/// does not know its lines.
pub fn fitted(command: Command) -> Command {
    match columns() {
        Some(columns) => command.term_width(columns),
        None => command,
    }
}

/// Columns of help on the terminal of standard output; `None` if it is none.
fn columns() -> Option<usize> {
    width::columns(rustix::stdio::stdout()).map(|columns| columns.min(WIDEST))
}

/// Reads `words`; ends the process if they are a question for help, or cannot be read.
pub fn read<T: FromArgMatches>(command: &Command, words: &[OsString]) -> T {
    let matches = command.clone().try_get_matches_from(words);
    match matches.and_then(|matches| T::from_arg_matches(&matches)) {
        Ok(read) => read,
        Err(error) if error.use_stderr() => {
            complain!("{}", explain(command.clone(), words, error));
            output::finish();
            std::process::exit(USAGE);
        }
        Err(answer) => match output::check() {
            Ok(()) => answer.exit(),
            Err(error) => {
                complain!("hotlift: {}", error_line(&TerminalError::Output(error)));
                output::finish();
                std::process::exit(1);
            }
        },
    }
}

/// What is wrong, and with which command.
fn explain(mut command: Command, words: &[OsString], error: clap::Error) -> String {
    let path = path(&command, words);
    let typed = path.join(" ");
    let shown = match not_taken(&error, &typed) {
        Some(refusal) => clap::Error::raw(ErrorKind::UnknownArgument, refusal),
        None => error,
    };
    command.build();
    let last = path.iter().try_fold(&mut command, |command, name| {
        command.find_subcommand_mut(name)
    });
    let shown = match last {
        Some(last) => shown.format(last),
        None => shown,
    };
    let text = shown.render().to_string();
    text.trim_end().replace("'--help'", &help(&path))
}

/// What to type for the help of the command that `words` begin with.
pub fn help_of(words: &[OsString]) -> String {
    help(&path(&Cli::command(), words))
}

fn help(path: &[String]) -> String {
    let words = std::iter::once("hotlift").chain(path.iter().map(String::as_str));
    let words: Vec<_> = words.chain(["--help"]).collect();
    format!("'{}'", words.join(" "))
}

/// The subcommands that `words` begin with.
fn path(command: &Command, words: &[OsString]) -> Vec<String> {
    let mut command = command;
    let mut path = Vec::new();
    for word in words.iter().skip(1).filter_map(|word| word.to_str()) {
        let Some(next) = command.find_subcommand(word) else {
            break;
        };
        path.push(word.to_owned());
        command = next;
    }
    path
}

/// Why the command typed does not take an option that others take.
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

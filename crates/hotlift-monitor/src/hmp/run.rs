//! Executes a line of the human monitor.

use hotlift::options::{Kind, OLDER_NAMES, OPTIONS, OptionInfo, QmpType, option};
use hotlift_qmp::server::{Commands, Refusal};
use serde_json::{Map, Value as Json, json};

use super::line::Words;
use super::show;
use super::table::{COMMANDS, HmpCommand, INFO, find};

/// Result of executing a line.
#[derive(Debug, PartialEq, Eq)]
pub enum Answer {
    /// Text to print.
    Text(String),
    /// A migration was started. The session must wait for its end.
    Started,
    /// The process is about to end.
    Quit,
}

/// Reason why a line was not executed.
enum LineError {
    /// QMP or the table of options refused the line, with this reason.
    Refused(String),
    /// The line has wrong arguments: the error message, and the topic of the help to show.
    Usage(String, String),
    /// The command does not exist; contains its name.
    Unknown(String),
}

impl From<Refusal> for LineError {
    fn from(refusal: Refusal) -> Self {
        Self::Refused(refusal.desc)
    }
}

/// Executes `line`.
pub fn run(commands: &dyn Commands, line: &str) -> Answer {
    run_words(commands, Words::new(line)).unwrap_or_else(|complaint| {
        Answer::Text(match complaint {
            LineError::Refused(words) => format!("Error: {words}\n"),
            LineError::Usage(words, name) => {
                format!("{words}\nTry \"help {name}\" for more information\n")
            }
            LineError::Unknown(name) => format!("unknown command: '{name}'\n"),
        })
    })
}

fn run_words(commands: &dyn Commands, mut words: Words<'_>) -> Result<Answer, LineError> {
    let Some(name) = words.next().map_err(|why| usage(why, "help"))? else {
        return Ok(Answer::Text(String::new()));
    };
    let command = find(COMMANDS, &name).ok_or_else(|| LineError::Unknown(name.clone()))?;
    let mut arguments = Arguments::new(command, command.title(), name, words)?;
    let argument = match command.names[0] {
        "info" => return info(commands, arguments.words).map(Answer::Text),
        "help" => return help(arguments.words).map(Answer::Text),
        "migrate" => {
            let uri = arguments.word()?;
            arguments.end()?;
            let mut argument = json!({"uri": uri});
            if arguments.has('r') {
                argument["resume"] = json!(true);
            }
            commands.execute(command.qmp, &argument)?;
            return Ok(if arguments.has('d') {
                Answer::Text(String::new())
            } else {
                Answer::Started
            });
        }
        // By default a failure, such as an invalid URI, would end the process.
        "migrate_incoming" => json!({"uri": arguments.word()?, "exit-on-error": false}),
        "migrate_recover" => json!({"uri": arguments.word()?}),
        "migrate_continue" => {
            let state = arguments.word()?;
            arguments.end()?;
            let refused = commands.execute(command.qmp, &json!({"state": state}));
            return match refused {
                Ok(_) => Ok(Answer::Text(String::new())),
                // In QEMU, HMP itself refuses the name of an unknown state, with another text than QMP.
                Err(refusal) if refusal.desc.contains("does not accept value") => {
                    Err(unknown(&state))
                }
                Err(refusal) => Err(refusal.into()),
            };
        }
        "migrate_set_capability" => capability(commands, &mut arguments)?,
        "migrate_set_parameter" => parameter(commands, &mut arguments)?,
        _ => Json::Null,
    };
    arguments.end()?;
    commands.execute(command.qmp, &argument)?;
    Ok(match command.names[0] {
        "quit" => Answer::Quit,
        _ => Answer::Text(String::new()),
    })
}

/// Arguments of a command, and texts for its errors.
struct Arguments<'a> {
    /// Name of the command in error messages; `help` is the topic of the help.
    title: String,
    help: String,
    flags: Vec<char>,
    words: Words<'a>,
}

impl<'a> Arguments<'a> {
    fn new(
        command: &HmpCommand,
        title: String,
        help: String,
        mut words: Words<'a>,
    ) -> Result<Self, LineError> {
        let flags = if command.flags.is_empty() {
            Vec::new()
        } else {
            words.flags()
        };
        if let Some(flag) = flags.iter().find(|&&flag| !command.flags.contains(flag)) {
            return Err(usage(
                &format!("{title}: unsupported option -{flag}"),
                &help,
            ));
        }
        Ok(Self {
            title,
            help,
            flags,
            words,
        })
    }

    fn has(&self, flag: char) -> bool {
        self.flags.contains(&flag)
    }

    fn word(&mut self) -> Result<String, LineError> {
        match self.words.next() {
            Ok(Some(word)) => Ok(word),
            Ok(None) => Err(usage(
                &format!("{}: string expected", self.title),
                &self.help,
            )),
            Err(why) => Err(usage(why, &self.help)),
        }
    }

    fn end(&self) -> Result<(), LineError> {
        if self.words.is_empty() {
            return Ok(());
        }
        let words = format!("{}: extraneous characters at the end of line", self.title);
        Err(usage(&words, &self.help))
    }
}

fn usage(words: &str, help: &str) -> LineError {
    LineError::Usage(words.to_owned(), help.to_owned())
}

fn unknown(name: &str) -> LineError {
    LineError::Refused(format!("invalid parameter value: {name}"))
}

/// Returns the arguments of `migrate-set-capabilities`.
fn capability(commands: &dyn Commands, arguments: &mut Arguments<'_>) -> Result<Json, LineError> {
    let name = arguments.word()?;
    let state = match arguments.words.next() {
        Ok(Some(word)) if word == "on" => true,
        Ok(Some(word)) if word == "off" => false,
        _ => return Err(usage("Expected 'on' or 'off'", &arguments.help)),
    };
    let ours = option(&name)
        .ok()
        .filter(|row| row.kind == Kind::Capability);
    let name = match ours {
        Some(row) => row.qmp_name().into_owned(),
        // The monitor's table does not have the capability, but the process behind `commands` may have it.
        None => {
            let all = commands.execute("query-migrate-capabilities", &Json::Null)?;
            let dashed = name.replace('_', "-");
            let mut all = all.as_array().into_iter().flatten();
            if !all.any(|one| one["capability"] == *dashed) {
                return Err(unknown(&name));
            }
            dashed
        }
    };
    Ok(json!({"capabilities": [{"capability": name, "state": state}]}))
}

/// Returns the arguments of `migrate-set-parameters`.
fn parameter(commands: &dyn Commands, arguments: &mut Arguments<'_>) -> Result<Json, LineError> {
    let name = arguments.word()?;
    let dashed = name.replace('_', "-");
    let row = option(&name)
        .ok()
        .filter(|row| row.kind != Kind::Capability);
    let (key, value) = match row {
        Some(row) => {
            let text = match row.qmp_type() {
                // A list of strings, separated by spaces, up to the end of the line.
                QmpType::Strings => arguments.words.rest().to_owned(),
                _ => arguments.word()?,
            };
            let value = row
                .typed(&text)
                .map_err(|refusal| LineError::Refused(refusal.to_string()))?;
            // An older name of a parameter is sent unchanged: it may set several parameters.
            let older = OLDER_NAMES.iter().find(|older| older.name == dashed);
            let key = older.map_or_else(|| row.qmp_name().into_owned(), |_| dashed);
            (key, value)
        }
        None => {
            let all = commands.execute("query-migrate-parameters", &Json::Null)?;
            let present = all.get(&dashed).ok_or_else(|| unknown(&name))?;
            let text = arguments.word()?;
            let value = match present {
                Json::Bool(_) => match text.as_str() {
                    "on" => json!(true),
                    "off" => json!(false),
                    _ => json!(text),
                },
                Json::Number(_) => text.parse().map_or_else(|_| json!(text), Json::Number),
                _ => json!(text),
            };
            (dashed, value)
        }
    };
    Ok(Json::Object(Map::from_iter([(key, value)])))
}

fn info(commands: &dyn Commands, mut words: Words<'_>) -> Result<String, LineError> {
    let Some(name) = words.next().map_err(|why| usage(why, "info"))? else {
        return Ok(list(INFO, "info "));
    };
    let what = find(INFO, &name).ok_or_else(|| LineError::Unknown(format!("info {name}")))?;
    let arguments = Arguments::new(what, what.title(), format!("info {name}"), words)?;
    arguments.end()?;
    let answer = commands.execute(what.qmp, &Json::Null)?;
    Ok(match what.names[0] {
        "migrate" => {
            let capabilities = commands.execute("query-migrate-capabilities", &Json::Null)?;
            show::migration(&answer, &capabilities, arguments.has('a'))
        }
        "migrate_capabilities" => show::capabilities(&answer),
        "migrate_parameters" => show::parameters(&answer),
        "status" => show::status(&answer),
        _ => show::version(&answer),
    })
}

/// Executes `help`, `help COMMAND` and `help info TOPIC`.
fn help(mut words: Words<'_>) -> Result<String, LineError> {
    let Some(name) = words.next().map_err(|why| usage(why, "help"))? else {
        return Ok(list(COMMANDS, ""));
    };
    let command = find(COMMANDS, &name).ok_or_else(|| LineError::Unknown(name.clone()))?;
    if command.names[0] == "info" {
        let what = words.next().map_err(|why| usage(why, "help"))?;
        return match what {
            None => Ok(list(INFO, "info ")),
            Some(what) => find(INFO, &what)
                .map(|row| format!("info {}\n", row.usage()))
                .ok_or_else(|| LineError::Unknown(format!("info {what}"))),
        };
    }
    let mut text = format!("{}\n", command.usage());
    let listed: fn(&OptionInfo) -> bool = match command.names[0] {
        "migrate_set_capability" => |row| row.kind == Kind::Capability,
        "migrate_set_parameter" => |row| row.kind != Kind::Capability,
        _ => |_| false,
    };
    for row in OPTIONS.iter().filter(|row| listed(row)) {
        text.push_str(&describe(row));
    }
    Ok(text)
}

fn list(table: &[HmpCommand], prefix: &str) -> String {
    let lines = table.iter().map(|row| format!("{prefix}{}\n", row.usage()));
    lines.collect()
}

/// Formats the help line of an option: its values, its unit, and a note if it may change during a migration.
fn describe(row: &OptionInfo) -> String {
    let unit = if row.is_bandwidth() {
        ", MiB/s without a suffix"
    } else {
        match row.unit {
            "ms" => ", in ms",
            "%" => ", in %",
            _ => "",
        }
    };
    let live = if row.live {
        "; may change during a migration"
    } else {
        ""
    };
    let default = row.default();
    format!(
        "  {} -- {} [{}{unit}; default {}{live}]\n",
        row.qmp_name(),
        row.help,
        row.values,
        if default.is_empty() { "none" } else { &default },
    )
}

//! Command-line flags for the options of a migration, made from the engine's one table.

use clap::{Arg, ArgMatches, Args, Command, FromArgMatches};
use hotlift::Options;
use hotlift::options::{OPTIONS, OptionError, OptionInfo};

/// The options given on the command line, in the order of the table.
#[derive(Debug, Clone, Default)]
pub struct MigrationArgs {
    given: Vec<(String, String)>,
    level: Option<String>,
}

impl MigrationArgs {
    /// True if `name` was given.
    pub fn has(&self, name: &str) -> bool {
        self.given.iter().any(|(given, _)| given == name)
    }

    /// Names and values, as given.
    pub fn given(&self) -> &[(String, String)] {
        &self.given
    }

    /// True if a level was given for whatever method is chosen.
    pub fn has_level(&self) -> bool {
        self.level.is_some()
    }

    /// Refuses the switches `names` where they are on, because nothing would come of them, or no end.
    pub fn refuse(&self, names: &[&str], needs: &'static str) -> Result<(), OptionError> {
        match self
            .given
            .iter()
            .find(|(name, value)| value == "on" && names.contains(&name.as_str()))
        {
            None => Ok(()),
            Some((name, value)) => Err(OptionError::Conflict {
                option: format!("{name}={value}"),
                needs,
            }),
        }
    }

    /// Checks every value against its range.
    pub fn options(&self) -> Result<Options, OptionError> {
        let mut options = Options::default();
        // The level comes last, since it is the chosen method's.
        for (name, value) in &self.given {
            options.set(name, value)?;
        }
        if let Some(level) = &self.level
            && options.compress
        {
            options.set("compress-level", level)?;
        } else if let Some(level) = &self.level {
            let method = options.multifd_compression;
            if method.levels.is_none() {
                return Err(OptionError::Value {
                    name: "level",
                    expected: format!("a method that has levels, and '{}' has none", method.name),
                    got: level.clone(),
                });
            }
            options.set(&format!("multifd-{}-level", method.name), level)?;
        }
        options.check()?;
        Ok(options)
    }

    /// The flags as they would be typed, for a child process.
    pub fn to_flags(&self) -> Vec<String> {
        let flag = |name: &str, value: &str| format!("--{name}={value}");
        self.given
            .iter()
            .map(|(name, value)| flag(name, value))
            .chain(self.level.iter().map(|level| flag("level", level)))
            .collect()
    }

    /// The same with `name` set to `value`, whether it was given or not.
    pub fn with(&self, name: &str, value: &str) -> Self {
        let mut changed = self.clone();
        changed.given.retain(|(given, _)| given != name);
        changed.given.push((name.to_owned(), value.to_owned()));
        changed
    }
}

fn help(option: &OptionInfo) -> String {
    let unit = if option.unit.is_empty() {
        String::new()
    } else {
        format!(", in {}", option.unit)
    };
    format!(
        "{} [{}{unit}; default {}]",
        option.help, option.values, option.default
    )
}

/// The flag of an option.
fn flag(option: &OptionInfo) -> Arg {
    let arg = Arg::new(option.name)
        .long(option.name)
        .value_name("VALUE")
        .help(help(option))
        .help_heading("Migration");
    match option.alias {
        Some(alias) => arg.visible_alias(alias),
        None => arg,
    }
}

/// A value that was refused, as clap shows it.
fn refused(error: &OptionError) -> clap::Error {
    clap::Error::raw(
        clap::error::ErrorKind::ValueValidation,
        format!("{error}\n"),
    )
}

/// What bounds a source, for commands whose other options the source or its file decides.
#[derive(Debug, Clone, Default)]
pub struct LimitArgs(Options);

/// The options among them.
const LIMITS: [&str; 3] = ["max-channels", "memory-limit", "settle-timeout"];

impl LimitArgs {
    /// All other options have their defaults.
    pub fn options(&self) -> Options {
        self.0.clone()
    }
}

impl Args for LimitArgs {
    fn augment_args(command: Command) -> Command {
        let limits = OPTIONS.iter().filter(|one| LIMITS.contains(&one.name));
        command.args(limits.map(flag))
    }

    fn augment_args_for_update(command: Command) -> Command {
        Self::augment_args(command)
    }
}

impl FromArgMatches for LimitArgs {
    fn from_arg_matches(matches: &ArgMatches) -> Result<Self, clap::Error> {
        let mut options = Options::default();
        for name in LIMITS {
            if let Some(value) = matches.get_one::<String>(name) {
                options.set(name, value).map_err(|error| refused(&error))?;
            }
        }
        Ok(Self(options))
    }

    fn update_from_arg_matches(&mut self, matches: &ArgMatches) -> Result<(), clap::Error> {
        *self = Self::from_arg_matches(matches)?;
        Ok(())
    }
}

impl Args for MigrationArgs {
    fn augment_args(command: Command) -> Command {
        command.args(OPTIONS.iter().map(flag)).arg(
            Arg::new("level")
                .long("level")
                .value_name("LEVEL")
                .help("Level of the chosen method; see the level options")
                .help_heading("Migration"),
        )
    }

    fn augment_args_for_update(command: Command) -> Command {
        Self::augment_args(command)
    }
}

impl FromArgMatches for MigrationArgs {
    fn from_arg_matches(matches: &ArgMatches) -> Result<Self, clap::Error> {
        let value = |name: &str| matches.get_one::<String>(name).cloned();
        let args = Self {
            given: OPTIONS
                .iter()
                .filter_map(|option| Some((option.name.to_owned(), value(option.name)?)))
                .collect(),
            level: value("level"),
        };
        args.options().map_err(|error| refused(&error))?;
        Ok(args)
    }

    fn update_from_arg_matches(&mut self, matches: &ArgMatches) -> Result<(), clap::Error> {
        *self = Self::from_arg_matches(matches)?;
        Ok(())
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    fn parse(flags: &[&str]) -> Result<MigrationArgs, clap::Error> {
        let command = MigrationArgs::augment_args(Command::new("t"));
        let matches = command.try_get_matches_from(std::iter::once(&"t").chain(flags))?;
        MigrationArgs::from_arg_matches(&matches)
    }

    #[test]
    fn every_option_of_the_table_is_a_flag_with_its_range_in_the_help() {
        let unwrapped = Command::new("t").term_width(0);
        let text = MigrationArgs::augment_args(unwrapped)
            .render_long_help()
            .to_string();
        for option in OPTIONS {
            assert!(
                text.contains(&format!("--{}", option.name)),
                "{}",
                option.name
            );
            assert!(text.contains(&option.values.to_string()), "{}", option.name);
            parse(&[&format!("--{}", option.name), option.default]).unwrap();
        }
    }

    #[test]
    fn limits_are_the_tables_and_are_checked_alike() {
        let parse = |flags: &[&str]| {
            let command = LimitArgs::augment_args(Command::new("t"));
            let matches = command.try_get_matches_from(std::iter::once(&"t").chain(flags))?;
            LimitArgs::from_arg_matches(&matches).map(|limits| limits.options())
        };
        let options = parse(&["--max-channels=255", "--memory-limit", "1G"]).unwrap();
        assert_eq!((options.max_channels, options.memory_limit), (255, 1 << 30));
        let error = parse(&["--max-channels=0"]).unwrap_err().to_string();
        assert!(error.contains("between 1 and 255"), "{error}");
    }

    #[test]
    fn a_value_out_of_range_is_refused_with_the_range() {
        let error = parse(&["--channels", "256"]).unwrap_err().to_string();
        assert!(error.contains("between 1 and 255"), "{error}");
        let error = parse(&["--method", "none", "--level", "3"]).unwrap_err();
        assert!(error.to_string().contains("'none' has none"), "{error}");
        let error = parse(&["--method", "zlib", "--level", "10"]).unwrap_err();
        assert!(error.to_string().contains("between 0 and 9"), "{error}");
    }

    #[test]
    fn a_switch_without_its_other_half_is_refused_by_name_where_it_is_on() {
        let args = parse(&["--pause-before-switchover=on", "--xbzrle=off"]).unwrap();
        args.refuse(&["xbzrle", "events"], "a monitor").unwrap();
        let error = args.refuse(&["xbzrle", "pause-before-switchover"], "a monitor");
        assert_eq!(
            error.unwrap_err().to_string(),
            "pause-before-switchover=on needs a monitor"
        );
    }

    #[test]
    fn a_level_is_that_of_the_chosen_method_and_flags_survive_the_way_to_a_child() {
        let args = parse(&["--method", "zstd", "--level", "7", "--channels=3"]).unwrap();
        let flags = args.to_flags();
        let again = parse(&flags.iter().map(String::as_str).collect::<Vec<_>>()).unwrap();
        let options = again.options().unwrap();
        assert_eq!(
            (options.multifd_zstd_level, options.multifd_channels),
            (7, 3)
        );
        let options = parse(&["--level=9", "--compress=on"]).unwrap().options();
        assert_eq!(options.unwrap().level(), Some(9));
    }
}

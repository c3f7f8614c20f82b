//! Command-line flags for the options of a migration, made from the engine's one table: the options of each command, their
//! defaults and their place in the help.

use std::marker::PhantomData;
use std::ops::Deref;

use clap::{Arg, ArgMatches, Args, Command, FromArgMatches};
use hotlift::Options;
use hotlift::options::{OPTIONS, OptionError, OptionInfo, Role, option};
use hotlift::relay::{self, RelaySettings};

/// Options given on the command line, in the order of the table.
#[derive(Debug, Clone, Default)]
pub struct MigrationArgs {
    given: Vec<(String, String)>,
    level: Option<String>,
}

/// A command's part in a migration, as a type.
pub trait HasRole {
    /// The role as a value.
    const ROLE: Role;
}

macro_rules! roles {
    ($($name:ident),*) => {
        /// Types for roles.
        pub mod role {
            $(
                /// Role of that name.
                #[derive(Debug, Clone)]
                pub struct $name;

                impl super::HasRole for $name {
                    const ROLE: hotlift::options::Role = hotlift::options::Role::$name;
                }
            )*
        }
    };
}

roles!(Pair, Guest, Relay, Migrate, Save, Receive, Restore);

/// Options that a command of role `R` accepts.
#[derive(Debug, Clone)]
pub struct RoleArgs<R> {
    given: MigrationArgs,
    role: PhantomData<R>,
}

impl<R> Deref for RoleArgs<R> {
    type Target = MigrationArgs;

    fn deref(&self) -> &MigrationArgs {
        &self.given
    }
}

impl<R: HasRole> RoleArgs<R> {
    /// Returns the options with the role's defaults where none were given.
    pub fn complete(&self) -> MigrationArgs {
        let mut all = self.given.clone();
        for option in OPTIONS.iter().filter(|option| !self.has(option.name)) {
            let default = option.role_default(R::ROLE).and_then(|row| row.value);
            if let Some(value) = default {
                all = all.with(option.name, value);
            }
        }
        all
    }

    /// Returns the settings of a relay: zero pages as both ends support them, unless given.
    pub fn relay_settings(&self) -> Result<RelaySettings, OptionError> {
        let all = self.complete();
        // A user who asks for auto next to a QEMU has a QEMU that reads it.
        let asked = self.has("multifd-compression") && !self.has("qemu-reads");
        let all = if asked {
            all.with("qemu-reads", "zstd")
        } else {
            all
        };
        let outgoing = all.options()?;
        relay::check(&outgoing)?;
        let zero_pages = self
            .has("zero-page-detection")
            .then_some(outgoing.zero_page_detection);
        Ok(RelaySettings {
            outgoing,
            zero_pages,
            ..RelaySettings::default()
        })
    }
}

impl MigrationArgs {
    /// Returns true if `name` was given.
    pub fn has(&self, name: &str) -> bool {
        self.given.iter().any(|(given, _)| given == name)
    }

    /// Returns names and values, as given.
    pub fn given(&self) -> &[(String, String)] {
        &self.given
    }

    /// Returns true if a level was given for the chosen method.
    pub fn has_level(&self) -> bool {
        self.level.is_some()
    }

    /// Returns the flag that sets option `name`, if their names differ.
    fn other_flag(&self, name: &str) -> Option<&'static str> {
        if self.has(name) {
            return option(name).ok()?.alias;
        }
        (self.has_level() && name != LEVEL).then_some(LEVEL)
    }

    /// Refuses the switches `names` if they are on: they would have no effect, or never end.
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

    /// Refuses options without effect. For commands without a monitor; a monitor can set the related option later.
    pub fn refuse_idle(&self) -> Result<(), OptionError> {
        self.given
            .iter()
            .try_for_each(|(name, _)| self.refuse_if_idle(name))
    }

    /// Refuses option `name` if it has no effect.
    pub fn refuse_if_idle(&self, name: &str) -> Result<(), OptionError> {
        let idle = self.idle()?;
        match idle.into_iter().find(|(idle, ..)| *idle == name) {
            None => Ok(()),
            Some((name, value, needs)) => Err(OptionError::Conflict {
                option: format!("{name}={value}"),
                needs,
            }),
        }
    }

    /// Returns the options without those that have no effect.
    pub fn without_idle(&self) -> Result<Self, OptionError> {
        let idle = self.idle()?;
        let mut rest = self.clone();
        rest.given
            .retain(|(name, _)| idle.iter().all(|(one, ..)| one != name));
        Ok(rest)
    }

    /// Returns the given options without effect, with the setting that each needs.
    fn idle(&self) -> Result<Vec<(&str, &str, &'static str)>, OptionError> {
        let options = self.options()?;
        let mut idle = Vec::new();
        for (name, value) in &self.given {
            if let Some(needs) = option(name)?.lacks(&options) {
                idle.push((name.as_str(), value.as_str(), needs));
            }
        }
        Ok(idle)
    }

    /// Checks every value against its range, and returns the options.
    pub fn options(&self) -> Result<Options, OptionError> {
        let mut options = Options::default();
        // The level is set last, since it belongs to the chosen method.
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
                    expected: format!(
                        "a method with levels, such as zstd ('{}' has none)",
                        method.name
                    ),
                    got: level.clone(),
                });
            }
            options.set(&format!("multifd-{}-level", method.name), level)?;
        }
        options.check()?;
        Ok(options)
    }

    /// Returns the flags as typed, for a child process.
    pub fn to_flags(&self) -> Vec<String> {
        let flag = |name: &str, value: &str| format!("--{name}={value}");
        self.given
            .iter()
            .map(|(name, value)| flag(name, value))
            .chain(self.level.iter().map(|level| flag("level", level)))
            .collect()
    }

    /// Returns a copy with `name` set to `value`.
    pub fn with(&self, name: &str, value: &str) -> Self {
        let mut changed = self.clone();
        changed.given.retain(|(given, _)| given != name);
        changed.given.push((name.to_owned(), value.to_owned()));
        changed
    }
}

fn help(option: &OptionInfo, role: Role) -> String {
    let default = match option.role_default(role) {
        Some(row) => row.words,
        None => option.default,
    };
    let unit = match option.unit {
        "" => String::new(),
        unit => format!(", in {unit}"),
    };
    let default = match default {
        "" => String::new(),
        default => format!("; default: {default}"),
    };
    let values = option.values_for(role);
    format!("{} [{values}{unit}{default}]", option.help)
}

/// Returns the flag of an option. Short help shows the common ones.
fn flag(option: &OptionInfo, role: Role) -> Arg {
    let arg = Arg::new(option.name)
        .long(option.name)
        .value_name("VALUE")
        // Negative numbers fail as a value of this option, not as an unknown flag.
        .allow_negative_numbers(true)
        .help(help(option, role))
        .help_heading(option.group.title())
        // A command that only receives has no other options.
        .hide_short_help(!option.group.is_in_short_help() && !role.only_receives());
    // Options without a QEMU parameter are typed like other commands' switches.
    let arg = match option.name {
        "insecure" => arg
            .num_args(0..=1)
            .require_equals(true)
            .default_missing_value("on"),
        _ => arg,
    };
    match option.alias {
        Some(alias) => arg.visible_alias(alias),
        None => arg,
    }
}

/// Returns the options of a role, in the order of its help.
fn options_of(role: Role) -> Vec<&'static OptionInfo> {
    let taken = OPTIONS
        .iter()
        .filter(|option| option.refusal(role).is_none());
    let mut options: Vec<_> = taken.collect();
    options.sort_by_key(|option| option.group.rank());
    options
}

/// Returns a refused value as a clap error, with both names of its flag if it has two.
fn refused(given: &MigrationArgs, error: &OptionError) -> clap::Error {
    let text = match error {
        OptionError::Value {
            name,
            expected,
            got,
        } => given
            .other_flag(name)
            .map(|flag| format!("--{flag} (parameter '{name}') expects {expected}, got '{got}'")),
        _ => None,
    };
    let text = text.unwrap_or_else(|| error.to_string());
    clap::Error::raw(clap::error::ErrorKind::ValueValidation, text)
}

/// Limits of a source, for commands whose other options the source or its file determines.
#[derive(Debug, Clone)]
pub struct LimitArgs<R> {
    options: Options,
    role: PhantomData<R>,
}

impl<R> LimitArgs<R> {
    /// Returns the options; all others have their defaults.
    pub fn options(&self) -> Options {
        self.options.clone()
    }
}

impl<R: HasRole> Args for LimitArgs<R> {
    fn augment_args(command: Command) -> Command {
        RoleArgs::<R>::augment_args(command)
    }

    fn augment_args_for_update(command: Command) -> Command {
        Self::augment_args(command)
    }
}

impl<R: HasRole> FromArgMatches for LimitArgs<R> {
    fn from_arg_matches(matches: &ArgMatches) -> Result<Self, clap::Error> {
        let limits = RoleArgs::<R>::from_arg_matches(matches)?;
        let options = limits.options();
        let options = options.map_err(|error| refused(&limits, &error))?;
        Ok(Self {
            options,
            role: PhantomData,
        })
    }

    fn update_from_arg_matches(&mut self, matches: &ArgMatches) -> Result<(), clap::Error> {
        *self = Self::from_arg_matches(matches)?;
        Ok(())
    }
}

/// Flag for the level of any method.
const LEVEL: &str = "level";

impl<R: HasRole> Args for RoleArgs<R> {
    fn augment_args(command: Command) -> Command {
        let mut command = command;
        for option in options_of(R::ROLE) {
            command = command.arg(flag(option, R::ROLE));
            if option.name == "multifd-compression" {
                command = command.arg(
                    Arg::new(LEVEL)
                        .long(LEVEL)
                        .value_name("LEVEL")
                        .help("Level of the chosen method; see the level options")
                        .help_heading(option.group.title()),
                );
            }
        }
        command
    }

    fn augment_args_for_update(command: Command) -> Command {
        Self::augment_args(command)
    }
}

impl<R: HasRole> FromArgMatches for RoleArgs<R> {
    fn from_arg_matches(matches: &ArgMatches) -> Result<Self, clap::Error> {
        let value = |name: &str| matches.get_one::<String>(name).cloned();
        // In the table's order: some options also set others.
        let taken = OPTIONS
            .iter()
            .filter(|option| option.refusal(R::ROLE).is_none());
        let given = MigrationArgs {
            given: taken
                .filter_map(|option| Some((option.name.to_owned(), value(option.name)?)))
                .collect(),
            level: match R::ROLE.only_receives() {
                true => None,
                false => value(LEVEL),
            },
        };
        for (name, value) in &given.given {
            let info = option(name).map_err(|error| refused(&given, &error))?;
            if let Some(instead) = info.value_refusal(R::ROLE, value) {
                return Err(clap::Error::raw(
                    clap::error::ErrorKind::ValueValidation,
                    format!("this command does not accept {name}={value}: {instead}"),
                ));
            }
        }
        let checked = match R::ROLE {
            // At a monitor, the option that this one needs may follow.
            Role::Guest => given.options().map(|_| ()),
            _ => given.refuse_idle(),
        };
        checked.map_err(|error| refused(&given, &error))?;
        Ok(Self {
            given,
            role: PhantomData,
        })
    }

    fn update_from_arg_matches(&mut self, matches: &ArgMatches) -> Result<(), clap::Error> {
        *self = Self::from_arg_matches(matches)?;
        Ok(())
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    fn parse_as<R: HasRole>(flags: &[&str]) -> Result<MigrationArgs, clap::Error> {
        let command = RoleArgs::<R>::augment_args(Command::new("t"));
        let matches = command.try_get_matches_from(std::iter::once(&"t").chain(flags))?;
        RoleArgs::<R>::from_arg_matches(&matches).map(|args| args.complete())
    }

    fn parse(flags: &[&str]) -> Result<MigrationArgs, clap::Error> {
        parse_as::<role::Guest>(flags)
    }

    /// Returns short help and long help.
    fn helps<R: HasRole>() -> [String; 2] {
        let command = || RoleArgs::<R>::augment_args(Command::new("t").term_width(0));
        [
            command().render_help().to_string(),
            command().render_long_help().to_string(),
        ]
    }

    fn shows_what_it_takes<R: HasRole>() {
        let [short, long] = helps::<R>();
        let shows = |help: &str, name: &str| {
            [" ", "["]
                .iter()
                .any(|next| help.contains(&format!("{name}{next}")))
        };
        for option in OPTIONS {
            let name = format!("--{}", option.name);
            let is_taken = option.refusal(R::ROLE).is_none();
            assert_eq!(shows(&long, &name), is_taken, "{:?}: {name}", R::ROLE);
            let is_shown = option.group.is_in_short_help() || R::ROLE.only_receives();
            assert_eq!(
                shows(&short, &name),
                is_taken && is_shown,
                "{:?}: {name}",
                R::ROLE
            );
            if is_taken {
                assert!(long.contains(&option.values_for(R::ROLE)), "{name}");
            } else {
                let refused = parse_as::<R>(&[&name, option.default]);
                assert_eq!(
                    refused.unwrap_err().kind(),
                    clap::error::ErrorKind::UnknownArgument,
                    "{name}"
                );
            }
        }
    }

    #[test]
    fn a_relay_that_was_asked_for_auto_sends_zstd_to_a_qemu_unless_it_reads_something_else() {
        let parsed = |given: &[&str]| {
            let command = RoleArgs::<role::Relay>::augment_args(Command::new("t"));
            let matches = command.try_get_matches_from([&["t"], given].concat());
            RoleArgs::<role::Relay>::from_arg_matches(&matches.unwrap())
        };
        for (given, reads) in [
            (&[][..], "none"),
            (&["--method=auto"], "zstd"),
            (&["--method=auto", "--qemu-reads=zlib"], "zlib"),
            (&["--qemu-reads=zlib"], "zlib"),
        ] {
            let settings = parsed(given).unwrap().relay_settings().unwrap();
            assert_eq!(settings.outgoing.qemu_reads.name, reads, "{given:?}");
        }
        let refused = parsed(&["--qemu-reads=lz4"]).unwrap_err().to_string();
        assert!(refused.contains("qemu-reads=lz4"), "{refused}");
    }

    #[test]
    fn help_shows_what_a_command_takes_and_nothing_that_it_refuses() {
        shows_what_it_takes::<role::Pair>();
        shows_what_it_takes::<role::Guest>();
        shows_what_it_takes::<role::Relay>();
        shows_what_it_takes::<role::Migrate>();
        shows_what_it_takes::<role::Save>();
        shows_what_it_takes::<role::Receive>();
        shows_what_it_takes::<role::Restore>();
    }

    #[test]
    fn what_is_asked_for_every_day_comes_first_and_the_method_before_all() {
        let [_, long] = helps::<role::Guest>();
        let at = |words: &str| {
            long.find(words)
                .unwrap_or_else(|| panic!("{words}: {long}"))
        };
        let order = [
            "Migration:",
            "--multifd-compression",
            "--level",
            "--multifd-channels",
            "--max-bandwidth",
            "--mem-prealloc",
            "Levels of the methods:",
            "Announcements of the guest:",
        ];
        assert!(order.map(at).is_sorted(), "{long}");
    }

    #[test]
    fn help_names_the_default_that_the_command_has() {
        for (help, limit) in [
            (helps::<role::Pair>(), "default: unlimited]"),
            (helps::<role::Migrate>(), "default: unlimited]"),
            (helps::<role::Guest>(), "default: 128M]"),
        ] {
            let [_, help] = help;
            let line = help
                .lines()
                .find(|line| line.contains("Bandwidth limit of all"));
            assert!(line.is_some_and(|line| line.ends_with(limit)), "{line:?}");
        }
        assert_eq!(
            parse_as::<role::Pair>(&[])
                .unwrap()
                .options()
                .unwrap()
                .max_bandwidth,
            0
        );
        assert_eq!(
            parse_as::<role::Relay>(&["--max-bandwidth=5M"])
                .unwrap()
                .options()
                .unwrap()
                .max_bandwidth,
            5 << 20
        );
        assert_eq!(
            parse(&[]).unwrap().options().unwrap().max_bandwidth,
            128 << 20
        );
        let [_, help] = helps::<role::Guest>();
        assert!(help.contains("off with a monitor"), "{help}");
    }

    #[test]
    fn every_option_is_taken_with_its_default_where_it_means_something() {
        for option in OPTIONS
            .iter()
            .filter(|one| one.refusal(Role::Guest).is_none())
        {
            parse(&[&format!("--{}={}", option.name, option.default)]).unwrap();
        }
    }

    #[test]
    fn a_value_that_is_refused_is_named_by_its_flag_and_its_option() {
        for (flags, words) in [
            (
                &["--method=zst"][..],
                "--method (parameter 'multifd-compression') expects one of",
            ),
            (
                &["--method=zstd", "--level=99"],
                "--level (parameter 'multifd-zstd-level') expects a value between 0 and 20",
            ),
            (
                &["--multifd-zstd-level=99"],
                "parameter 'multifd-zstd-level' expects",
            ),
            (
                &["--downtime-limit=3s"],
                "parameter 'downtime-limit' expects a value between 0 and 2000000, in ms, got '3s'",
            ),
            (
                &["--max-bandwidth", "-1"],
                "parameter 'max-bandwidth' expects a number of bytes with an optional suffix K, M, G or T, in bytes/s, got '-1'",
            ),
            (
                &["--method=none", "--level=1"],
                "parameter 'level' expects a method with levels",
            ),
        ] {
            let error = parse(flags).unwrap_err().to_string();
            assert!(error.contains(&format!("error: {words}")), "{error}");
        }
    }

    #[test]
    fn a_switch_without_a_value_leaves_the_next_word_alone() {
        let command = RoleArgs::<role::Restore>::augment_args(Command::new("t"));
        let command = command.arg(Arg::new("file").required(true));
        let parsed = |words: &[&str]| {
            let matches = command
                .clone()
                .try_get_matches_from([&["t"], words].concat());
            RoleArgs::<role::Restore>::from_arg_matches(&matches.unwrap()).unwrap()
        };
        let insecure = |words: &[&str]| parsed(words).complete().options().unwrap().insecure;
        assert!(insecure(&["--insecure", "vm.save"]));
        assert!(insecure(&["--insecure=on", "vm.save"]));
        assert!(!insecure(&["--insecure=off", "vm.save"]));
    }

    #[test]
    fn an_option_without_effect_is_refused_where_no_monitor_could_give_it_one() {
        for (flags, words) in [
            (
                &["--compress=on", "--channels=4"][..],
                "multifd-channels=4 needs multifd=on, which excludes compress=on",
            ),
            (
                &["--accel-path=dsa:/dev/dsa/wq0.0"],
                "needs zero-page-detection=dsa-accel",
            ),
            (
                &["--compress-threads=4"],
                "compress-threads=4 needs compress=on",
            ),
            (&["--cpu-throttle-initial=30"], "needs auto-converge=on"),
        ] {
            let error = parse_as::<role::Pair>(flags).unwrap_err().to_string();
            assert!(error.contains(words), "{error}");
            let kept = parse(flags).unwrap();
            assert!(kept.refuse_idle().is_err(), "{flags:?}");
            let rest = kept.without_idle().unwrap();
            assert_eq!(rest.given().len(), kept.given().len() - 1, "{flags:?}");
            rest.refuse_idle().unwrap();
        }
    }

    #[test]
    fn limits_are_the_tables_and_are_checked_alike() {
        let parse = |flags: &[&str]| {
            let command = LimitArgs::<role::Restore>::augment_args(Command::new("t"));
            let matches = command.try_get_matches_from(std::iter::once(&"t").chain(flags))?;
            LimitArgs::<role::Restore>::from_arg_matches(&matches).map(|limits| limits.options())
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

//! Command-line flags of migration options, made from the engine's table: the options of each command, their defaults, and
//! their order in the help.

use std::marker::PhantomData;
use std::ops::Deref;
use std::time::Duration;

use clap::{Arg, ArgMatches, Args, Command, FromArgMatches};
use hotlift::Options;
use hotlift::options::{
    Limits, OPTIONS, OptionError, OptionInfo, Role, StreamOptions, TlsOptions, Value, option,
};
use hotlift::relay::RelaySettings;

/// An option that was given, with its value.
#[derive(Debug, Clone)]
pub struct Given {
    /// The option's row in the engine's table.
    pub option: &'static OptionInfo,
    /// Value of the option, as typed.
    pub text: String,
    value: Value,
}

impl Given {
    /// Parses `text` as the value of the option `name`.
    ///
    /// # Errors
    /// If no option has this name, or `text` is not a valid value.
    pub fn parse(name: &str, text: &str) -> Result<Self, OptionError> {
        let option = option(name)?;
        Ok(Self {
            option,
            text: text.to_owned(),
            value: option.parse(text)?,
        })
    }
}

/// Options given on the command line, and the resulting values of all options.
#[derive(Debug, Clone, Default)]
pub struct MigrationArgs {
    given: Vec<Given>,
    options: Options,
}

/// Role of a command in a migration, as a type parameter of [`RoleArgs`].
pub trait HasRole {
    /// The role as a value.
    const ROLE: Role;
}

macro_rules! roles {
    ($($name:ident),*) => {
        /// Types for roles.
        pub mod role {
            $(
                /// Type for the role of this name.
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

/// Migration options that a command of role `R` accepts.
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
    /// Returns all options: an option that was not given has the default of the role.
    pub fn complete(&self) -> Result<MigrationArgs, OptionError> {
        let mut all = self.given.clone();
        for option in OPTIONS.iter().filter(|option| !self.has(option.name)) {
            let default = option.role_default(R::ROLE).and_then(|row| row.value);
            if let Some(value) = default {
                all.set(Given::parse(option.name, value)?);
            }
        }
        Ok(all)
    }

    /// Returns the settings of a relay. The relay detects zero pages only if the source does not, unless `zero-page-detection`
    /// was given.
    pub fn relay_settings(&self) -> Result<RelaySettings, OptionError> {
        let mut all = self.complete()?;
        // The given method may be auto. Packets to a QEMU then use zstd.
        if self.has("multifd-compression") && !self.has("qemu-reads") {
            all = all.with("qemu-reads", "zstd")?;
        }
        let options = all.options()?;
        let zero_pages = self
            .has("zero-page-detection")
            .then_some(options.zero_pages.detection);
        Ok(RelaySettings {
            outgoing: options.stream,
            limits: options.limits,
            zero_pages,
            ..RelaySettings::default()
        })
    }
}

impl MigrationArgs {
    /// Returns true if the option `name` was given on the command line.
    pub fn has(&self, name: &str) -> bool {
        self.given.iter().any(|given| given.option.name == name)
    }

    /// Returns the options that were given.
    pub fn given(&self) -> &[Given] {
        &self.given
    }

    /// Returns an error if a given option has no effect, because another option is not set. Only for commands without a
    /// monitor: through a monitor the other option can be set later.
    pub fn reject_ineffective(&self) -> Result<(), OptionError> {
        let mut given = self.given.iter();
        given.try_for_each(|given| self.reject_if_ineffective(given.option.name))
    }

    /// Returns an error if the option `name` was given, but has no effect.
    pub fn reject_if_ineffective(&self, name: &str) -> Result<(), OptionError> {
        let options = self.options()?;
        let given = self.given.iter().find(|given| given.option.name == name);
        match given.and_then(|given| Some((given, given.option.lacks(&options)?))) {
            None => Ok(()),
            Some((given, needs)) => Err(OptionError::Conflict {
                option: format!("{name}={}", given.text),
                needs,
            }),
        }
    }

    /// Returns a copy that contains only the options that have an effect.
    pub fn without_ineffective(&self) -> Result<Self, OptionError> {
        let options = self.options()?;
        let mut rest = Self::default();
        let effective = |given: &&Given| given.option.lacks(&options).is_none();
        for given in self.given.iter().filter(effective) {
            rest.set(given.clone());
        }
        Ok(rest)
    }

    /// Returns the values of all options. Each value is in its range, but some may be incompatible.
    pub fn values(&self) -> &Options {
        &self.options
    }

    /// Returns the values of all options; an error if some are incompatible.
    pub fn options(&self) -> Result<Options, OptionError> {
        self.options.check()?;
        Ok(self.options.clone())
    }

    /// Returns the downtime limit; `None` if it was not given.
    pub fn downtime_limit(&self) -> Option<Duration> {
        let is_given = self.has("downtime-limit");
        is_given.then_some(self.options.switchover.downtime_limit)
    }

    /// Returns the given options as flags for a child process.
    pub fn to_flags(&self) -> Vec<String> {
        let flag = |given: &Given| format!("--{}={}", given.option.name, given.text);
        self.given.iter().map(flag).collect()
    }

    /// Returns a copy in which the option `name` has the value `value`.
    pub fn with(&self, name: &str, value: &str) -> Result<Self, OptionError> {
        let mut changed = self.clone();
        changed.set(Given::parse(name, value)?);
        Ok(changed)
    }

    /// Sets an option; replaces an earlier value.
    pub fn set(&mut self, given: Given) {
        self.given
            .retain(|one| one.option.name != given.option.name);
        self.options.store(given.option, given.value.clone());
        self.given.push(given);
    }

    /// Sets the compression level of `stream`'s method; an error if the method has no levels.
    fn set_level(&mut self, level: &str, stream: &StreamOptions) -> Result<(), OptionError> {
        let Some((name, _)) = stream.level_option() else {
            return Err(OptionError::Value {
                name: LEVEL,
                expected: format!(
                    "a method with levels, such as zstd ('{}' has none)",
                    stream.method_name()
                ),
                got: level.to_owned(),
            });
        };
        self.set(Given::parse(name, level)?);
        Ok(())
    }
}

fn help(option: &OptionInfo, role: Role) -> String {
    let default = match option.role_default(role) {
        Some(row) => row.help_text.to_owned(),
        None => option.default(),
    };
    let unit = match option.unit {
        "" => String::new(),
        unit => format!(", in {unit}"),
    };
    let default = match default.as_str() {
        "" => String::new(),
        default => format!("; default: {default}"),
    };
    let values = option.values_for(role);
    format!("{} [{values}{unit}{default}]", option.help)
}

/// Returns the clap flag of an option for a command of this role. Short help shows only common options.
fn flag(option: &OptionInfo, role: Role) -> Arg {
    let arg = Arg::new(option.name)
        .long(option.name)
        .value_name("VALUE")
        // A negative number is then rejected as a value of this option, not as an unknown flag.
        .allow_negative_numbers(true)
        .help(help(option, role))
        .help_heading(option.group.title())
        // Commands that only receive have no common options, so their short help shows all options.
        .hide_short_help(!option.group.is_in_short_help() && !role.only_receives());
    // This option is a switch, since QEMU has no such parameter: without a value it means `on`.
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

/// Returns the options that a role accepts, in the order of the help.
fn options_of(role: Role) -> Vec<&'static OptionInfo> {
    let taken = OPTIONS
        .iter()
        .filter(|option| option.refusal(role).is_none());
    let mut options: Vec<_> = taken.collect();
    options.sort_by_key(|option| option.group);
    options
}

/// Converts an invalid value to a clap error. The message has both names of the flag, if it has two.
fn refused(error: &OptionError, flag: Option<&str>) -> clap::Error {
    let text = match (error, flag) {
        (
            OptionError::Value {
                name,
                expected,
                got,
            },
            Some(flag),
        ) if *name != flag => {
            format!("--{flag} (parameter '{name}') expects {expected}, got '{got}'")
        }
        _ => error.to_string(),
    };
    clap::Error::raw(clap::error::ErrorKind::ValueValidation, text)
}

/// Limits of a source and TLS, for commands whose other options the source or its file determines.
#[derive(Debug, Clone)]
pub struct LimitArgs<R> {
    /// The limits.
    pub limits: Limits,
    /// Encryption.
    pub tls: TlsOptions,
    role: PhantomData<R>,
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
        let Options { limits, tls, .. } = RoleArgs::<R>::from_arg_matches(matches)?.given.options;
        Ok(Self {
            limits,
            tls,
            role: PhantomData,
        })
    }

    fn update_from_arg_matches(&mut self, matches: &ArgMatches) -> Result<(), clap::Error> {
        *self = Self::from_arg_matches(matches)?;
        Ok(())
    }
}

/// Name of the flag that sets the level of the chosen method.
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
        let value = |name: &str| matches.get_one::<String>(name);
        let mut given = MigrationArgs::default();
        // Stores the values in the order of the table, since some options also set other options.
        for option in OPTIONS {
            let Some(text) = option
                .refusal(R::ROLE)
                .map_or_else(|| value(option.name), |_| None)
            else {
                continue;
            };
            if let Some(instead) = option.value_refusal(R::ROLE, text) {
                return Err(clap::Error::raw(
                    clap::error::ErrorKind::ValueValidation,
                    format!(
                        "this command does not accept {}={text}: {instead}",
                        option.name
                    ),
                ));
            }
            let parsed = Given::parse(option.name, text);
            given.set(parsed.map_err(|error| refused(&error, option.alias))?);
        }
        let mut args = Self {
            given,
            role: PhantomData,
        };
        if !R::ROLE.only_receives()
            && let Some(level) = value(LEVEL)
        {
            let all = args.complete();
            let set = all.and_then(|all| args.given.set_level(level, &all.options.stream));
            set.map_err(|error| refused(&error, Some(LEVEL)))?;
        }
        let checked = match R::ROLE {
            // A built-in guest accepts options without effect: a monitor can set the related option later.
            Role::Guest => args.options().map(|_| ()),
            _ => args.reject_ineffective(),
        };
        checked.map_err(|error| refused(&error, None))?;
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

    fn parse_as<R: HasRole>(flags: &[&str]) -> Result<MigrationArgs, clap::Error> {
        let command = RoleArgs::<R>::augment_args(Command::new("t"));
        let matches = command.try_get_matches_from(std::iter::once(&"t").chain(flags))?;
        Ok(RoleArgs::<R>::from_arg_matches(&matches)?
            .complete()
            .unwrap())
    }

    fn parse(flags: &[&str]) -> Result<MigrationArgs, clap::Error> {
        parse_as::<role::Guest>(flags)
    }

    /// Returns the short and the long help of the flags of role `R`.
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
                let refused = parse_as::<R>(&[&name, &option.default()]);
                assert_eq!(
                    refused.unwrap_err().kind(),
                    clap::error::ErrorKind::UnknownArgument,
                    "{name}"
                );
            }
        }
    }

    #[test]
    fn a_relay_with_auto_sends_zstd_to_a_qemu_unless_it_reads_another_method() {
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
    fn help_shows_exactly_the_options_that_a_command_accepts() {
        shows_what_it_takes::<role::Pair>();
        shows_what_it_takes::<role::Guest>();
        shows_what_it_takes::<role::Relay>();
        shows_what_it_takes::<role::Migrate>();
        shows_what_it_takes::<role::Save>();
        shows_what_it_takes::<role::Receive>();
        shows_what_it_takes::<role::Restore>();
    }

    #[test]
    fn common_options_come_first_in_help_and_the_method_before_all() {
        let [_, long] = helps::<role::Guest>();
        let at = |text: &str| long.find(text).unwrap_or_else(|| panic!("{text}: {long}"));
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
                .values()
                .stream
                .max_bandwidth,
            0
        );
        assert_eq!(
            parse_as::<role::Relay>(&["--max-bandwidth=5M"])
                .unwrap()
                .values()
                .stream
                .max_bandwidth,
            5 << 20
        );
        assert_eq!(
            parse(&[]).unwrap().options().unwrap().stream.max_bandwidth,
            128 << 20
        );
        let [_, help] = helps::<role::Guest>();
        assert!(help.contains("off with a monitor"), "{help}");
    }

    #[test]
    fn every_option_accepts_its_default_where_it_applies() {
        for option in OPTIONS
            .iter()
            .filter(|one| one.refusal(Role::Guest).is_none())
        {
            parse(&[&format!("--{}={}", option.name, option.default())]).unwrap();
        }
    }

    #[test]
    fn a_value_that_is_refused_is_named_by_its_flag_and_its_option() {
        for (flags, expected) in [
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
            assert!(error.contains(&format!("error: {expected}")), "{error}");
        }
    }

    #[test]
    fn a_switch_without_a_value_does_not_consume_the_next_argument() {
        let command = RoleArgs::<role::Restore>::augment_args(Command::new("t"));
        let command = command.arg(Arg::new("file").required(true));
        let parsed = |args: &[&str]| {
            let matches = command
                .clone()
                .try_get_matches_from([&["t"], args].concat());
            RoleArgs::<role::Restore>::from_arg_matches(&matches.unwrap()).unwrap()
        };
        let insecure = |args: &[&str]| parsed(args).values().tls.insecure;
        assert!(insecure(&["--insecure", "vm.save"]));
        assert!(insecure(&["--insecure=on", "vm.save"]));
        assert!(!insecure(&["--insecure=off", "vm.save"]));
    }

    #[test]
    fn an_option_without_effect_is_refused_where_no_monitor_can_change_that() {
        for (flags, expected) in [
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
            assert!(error.contains(expected), "{error}");
            let kept = parse(flags).unwrap();
            assert!(kept.reject_ineffective().is_err(), "{flags:?}");
            let rest = kept.without_ineffective().unwrap();
            assert_eq!(rest.given().len(), kept.given().len() - 1, "{flags:?}");
            rest.reject_ineffective().unwrap();
        }
    }

    #[test]
    fn limits_come_from_the_table_and_are_checked_in_one_place() {
        let parse = |flags: &[&str]| {
            let command = LimitArgs::<role::Restore>::augment_args(Command::new("t"));
            let matches = command.try_get_matches_from(std::iter::once(&"t").chain(flags))?;
            LimitArgs::<role::Restore>::from_arg_matches(&matches).map(|args| args.limits)
        };
        let limits = parse(&["--max-channels=255", "--memory-limit", "1G"]).unwrap();
        assert_eq!((limits.max_channels, limits.memory_limit), (255, 1 << 30));
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
    fn a_level_is_that_of_the_chosen_method_and_flags_reach_a_child_process() {
        let args = parse(&["--method", "zstd", "--level", "7", "--channels=3"]).unwrap();
        let flags = args.to_flags();
        let again = parse(&flags.iter().map(String::as_str).collect::<Vec<_>>()).unwrap();
        let options = again.options().unwrap();
        assert_eq!(
            (options.stream.levels.zstd, options.stream.multifd_channels),
            (7, 3)
        );
        let options = parse(&["--level=9", "--compress=on"]).unwrap().options();
        assert_eq!(options.unwrap().stream.level(), Some(9));
    }
}

//! Table of all migration options: names, units, ranges and defaults as in QEMU 10.0.
//!
//! Command-line flags, help and documentation are generated from [`OPTIONS`]. All values are parsed here, and checked against
//! their ranges, before any file or connection is opened.

mod parts;
mod qmp;
mod roles;
mod table;
mod values;

use std::time::Duration;

pub use parts::{
    AnnounceOptions, AutoConvergeOptions, Levels, Limits, Options, PostcopyOptions, StreamOptions,
    SwitchoverOptions, TlsOptions, ZeroPageOptions,
};
pub use qmp::{OLDER_NAMES, OUR_PREFIX, OlderName, QmpRefusal, QmpType, qmp_option};
pub use roles::{Group, NotFor, Role, RoleDefault, With};
pub use table::OPTIONS;
pub use values::{
    ACCELERATOR, AccelPath, GOAL, Goal, Value, Values, ZERO_PAGE_DETECTION, ZeroPageDetection,
    parse_size,
};

/// Maximum of `silence_timeout`. Every interface that sets this option uses it.
pub const MAX_SILENCE_TIMEOUT: Duration = Duration::from_secs(86_400);

/// Memory in bytes that a source can make its receiver allocate for each channel, in addition to `memory_limit`. A payload can
/// be twice as large as its pages, which are 512 KiB.
pub(crate) const CHANNEL_MEMORY: usize = 1 << 20;

/// Maximum size of a packet's pages in bytes. It limits the option, and the packets that a destination accepts from a Hotlift.
pub(crate) const MAX_PACKET_SIZE: usize = 8 << 20;

/// Rejection of an option, in QEMU's wording.
#[derive(Debug, Clone, PartialEq, Eq, thiserror::Error)]
pub enum OptionError {
    /// No option has the given name.
    #[error("parameter '{name}' is unexpected")]
    Unknown {
        /// The name as given.
        name: String,
    },
    /// The value is invalid, or outside the option's range.
    #[error("parameter '{name}' expects {expected}, got '{got}'")]
    Value {
        /// The option's name.
        name: &'static str,
        /// The values that the option accepts.
        expected: String,
        /// The value as given.
        got: String,
    },
    /// The operator requires an accelerator that cannot be used.
    #[error("accelerator=required, but {device} cannot be used ({reason}); see 'hotlift accel'")]
    NoAccelerator {
        /// Name of the accelerator device.
        device: &'static str,
        /// Reason why the device cannot be used.
        reason: String,
    },
    /// An option cannot be used, because another option lacks a required value.
    #[error("{option} needs {needs}")]
    Conflict {
        /// The option that cannot be used, with its value.
        option: String,
        /// The setting that the option needs, for example `multifd=on`.
        needs: &'static str,
    },
}

/// Kind of an option. It determines the QMP command that sets the option.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub enum Kind {
    /// Set by `migrate-set-capabilities`.
    Capability,
    /// Set by `migrate-set-parameters`.
    Parameter,
    /// An option that QEMU lacks. Set by `migrate-set-parameters`, with the prefix `x-hotlift-`.
    Ours,
}

/// One row of the table of options.
pub struct OptionInfo {
    /// The option's name, as in QMP: with dashes.
    pub name: &'static str,
    /// Shorter name of the option on the command line; `None` if there is none.
    pub alias: Option<&'static str>,
    /// Kind of the option.
    pub kind: Kind,
    /// The values that the option accepts.
    pub values: Values,
    /// Unit of the option's number; empty without a unit.
    pub unit: &'static str,
    /// True if the option can change during a migration.
    pub live: bool,
    /// Section of help that shows the option.
    pub group: Group,
    /// Roles that reject this option or one of its values, in addition to the roles that its group excludes.
    pub not_for: &'static [NotFor],
    /// Defaults of roles that differ from [`OptionInfo::default`].
    pub defaults: &'static [RoleDefault],
    /// Setting without which this option has no effect. QMP does not check this, because the operator may set the other option
    /// later; QEMU does not check it either.
    pub with: Option<With>,
    /// Effect of the option, in one line.
    pub help: &'static str,
    access: Access,
}

impl std::fmt::Debug for OptionInfo {
    fn fmt(&self, f: &mut std::fmt::Formatter<'_>) -> std::fmt::Result {
        f.write_str(self.name)
    }
}

/// Reads and writes an option's field in [`Options`].
struct Access {
    /// Stores a value whose range was checked.
    store: fn(&mut Options, Value),
    read: fn(&Options) -> Value,
}

impl OptionInfo {
    /// Returns the option's value in `options`.
    #[must_use]
    pub fn read(&self, options: &Options) -> Value {
        (self.access.read)(options)
    }

    /// Parses `text` as a value of this option.
    ///
    /// # Errors
    /// [`OptionError::Value`], with the values that the option accepts.
    pub fn parse(&self, text: &str) -> Result<Value, OptionError> {
        self.values.parse(text).ok_or_else(|| OptionError::Value {
            name: self.name,
            expected: match self.unit {
                "" => self.values.to_string(),
                unit => format!("{}, in {unit}", self.values),
            },
            got: text.to_owned(),
        })
    }

    /// Returns the default value as text, in the form that an operator would type.
    #[must_use]
    pub fn default(&self) -> String {
        self.values.typed(&self.read(&Options::default()))
    }
}

/// Returns an option's row in the table. The name may have dashes or underscores. Hotlift's own options may have the prefix
/// `x-hotlift-`. Names of older documents are accepted too ([`OLDER_NAMES`]).
///
/// # Errors
/// [`OptionError::Unknown`] if no option has this name.
pub fn option(name: &str) -> Result<&'static OptionInfo, OptionError> {
    let dashed = name.replace('_', "-");
    OPTIONS
        .iter()
        .find(|option| option.name == dashed)
        .or_else(|| qmp_option(&dashed))
        .ok_or_else(|| OptionError::Unknown {
            name: name.to_owned(),
        })
}

impl Options {
    /// Sets an option by name to a typed value. The name may have dashes or underscores.
    ///
    /// # Errors
    /// [`OptionError`] for an unknown name, or for a value that the option does not accept.
    pub fn set(&mut self, name: &str, value: &str) -> Result<(), OptionError> {
        let option = option(name)?;
        self.store(option, option.parse(value)?);
        self.set_along(&name.replace('_', "-"));
        Ok(())
    }

    /// Sets an option to a value that its own [`OptionInfo::parse`] or [`OptionInfo::read`] returned.
    pub fn store(&mut self, option: &OptionInfo, value: Value) {
        (option.access.store)(self, value);
    }

    /// Copies from `from` the options that may change while a migration runs.
    pub(crate) fn copy_live(&mut self, from: &Self) {
        for option in OPTIONS.iter().filter(|option| option.live) {
            (option.access.store)(self, option.read(from));
        }
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn every_default_of_the_table_is_valid() {
        let mut options = Options::default();
        for option in OPTIONS {
            options.set(option.name, &option.default()).unwrap();
        }
        // Unset, `multifd` depends on other options; above it was set to its default.
        assert_eq!(
            options.stream.multifd.take(),
            Some(options.stream.multifd())
        );
        assert_eq!(format!("{options:?}"), format!("{:?}", Options::default()));
    }

    #[test]
    fn every_number_accepts_exactly_its_range() {
        for option in OPTIONS {
            let Values::Number { lowest, highest } = option.values else {
                continue;
            };
            let mut options = Options::default();
            for good in [lowest, highest] {
                options.set(option.name, &good.to_string()).unwrap();
            }
            let below = lowest.checked_sub(1).map(|number| number.to_string());
            let beside = [
                below.unwrap_or("-1".to_owned()),
                (highest + 1).to_string(),
                String::new(),
                "1x".to_owned(),
            ];
            for bad in beside {
                let error = options.set(option.name, &bad).unwrap_err().to_string();
                assert!(
                    error.contains(&format!("between {lowest} and {highest}")),
                    "{error}"
                );
                assert!(
                    error.contains(option.name) && error.contains(&format!("'{bad}'")),
                    "{error}"
                );
            }
        }
    }

    #[test]
    fn sizes_have_binary_suffixes_and_do_not_overflow() {
        for (text, bytes) in [
            ("0", Some(0)),
            ("17", Some(17)),
            ("1K", Some(1024)),
            ("2g", Some(2 << 30)),
            ("3GiB", Some(3 << 30)),
            ("16777216T", None),
            ("1Q", None),
            ("G", None),
            ("-1", None),
            ("1.5G", Some(3 << 29)),
            ("0.5", None),
            ("1.G", None),
            ("15.9999999999999999999T", Some((16 << 40) - 1)),
            ("111111111111111111111", None),
        ] {
            assert_eq!(parse_size(text), bytes, "{text}");
        }
    }

    #[test]
    fn names_are_taken_with_dashes_and_underscores_and_unknown_ones_are_refused_by_name() {
        let mut options = Options::default();
        options.set("multifd_channels", "7").unwrap();
        assert_eq!(options.stream.multifd_channels, 7);
        let error = options.set("multifd-chanels", "7").unwrap_err();
        assert!(error.to_string().contains("multifd-chanels"));
        let error = options.set("multifd-compression", "lz5").unwrap_err();
        assert!(error.to_string().contains("none, zlib, zstd"), "{error}");
    }

    /// Returns options set in this order, or the error if they contradict each other.
    fn given(options: &[(&str, &str)]) -> Result<Options, OptionError> {
        let mut all = Options::default();
        for (name, value) in options {
            all.set(name, value)?;
        }
        all.check()?;
        Ok(all)
    }

    #[test]
    fn compress_turns_multifd_off_unless_requested() {
        assert_eq!(given(&[("compress", "off")]).unwrap().stream.channels(), 2);
        let options = given(&[("compress", "on"), ("compress_level", "9")]).unwrap();
        let stream = options.stream;
        assert_eq!((stream.channels(), stream.level()), (0, Some(9)));
        assert_eq!(stream.method_name(), "compress");
        given(&[("compress", "on"), ("multifd", "off")]).unwrap();
        for asked in [
            [("multifd", "on"), ("compress", "on")],
            [("compress", "on"), ("multifd", "on")],
            [("compress", "on"), ("multifd-compression", "zstd")],
        ] {
            let error = given(&asked).unwrap_err().to_string();
            assert!(
                error.contains("compress=on") && error.contains("multifd="),
                "{error}"
            );
        }
    }

    #[test]
    fn zero_copy_needs_uncompressed_pages_and_multifd_channels() {
        given(&[("zero-copy-send", "on")]).unwrap();
        for asked in [
            ("multifd-compression", "zstd"),
            ("multifd", "off"),
            ("compress", "on"),
        ] {
            let error = given(&[("zero-copy-send", "on"), asked]).unwrap_err();
            assert!(
                error.to_string().starts_with("zero-copy-send=on needs"),
                "{asked:?}: {error}"
            );
        }
    }

    #[test]
    fn xbzrle_turns_multifd_off_and_excludes_compress() {
        assert_eq!(given(&[("xbzrle", "on")]).unwrap().stream.channels(), 0);
        for asked in [
            [("multifd", "on"), ("xbzrle", "on")],
            [("xbzrle", "on"), ("compress", "on")],
            [("xbzrle", "on"), ("multifd-compression", "zlib")],
        ] {
            let error = given(&asked).unwrap_err().to_string();
            assert!(error.contains("xbzrle=on"), "{error}");
        }
    }
}

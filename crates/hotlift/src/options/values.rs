//! Values of options, and their text form.

use std::fmt;
use std::path::PathBuf;

#[cfg(feature = "simulated")]
use hotlift_accel::idxd::model::Behaviour;
use hotlift_mem::PAGE_SIZE;
use hotlift_methods::{Accelerator, MethodInfo, selection, selections};
pub use hotlift_wire::multifd::ZeroPageDetection;

use crate::accelerators::HARDWARE;

/// All modes of `zero-page-detection`, by QEMU's names. Modes:
///
/// - `none`: no detection
/// - `legacy`: the migration thread detects zero pages, and sends records of the main channel
/// - `multifd`: the channel threads detect zero pages, and list them in packets
/// - `dsa-accel`: as `multifd`, with the devices of `accel-path`; from a QEMU patch series that was not merged
pub const ZERO_PAGE_DETECTION: &[(&str, ZeroPageDetection, bool)] = &[
    ("none", ZeroPageDetection::None, false),
    ("legacy", ZeroPageDetection::Legacy, false),
    ("multifd", ZeroPageDetection::Multifd, false),
    ("dsa-accel", ZeroPageDetection::Multifd, true),
];

/// All values of the option `accelerator`. QEMU has no such option: it uses the accelerator that it finds.
pub static ACCELERATOR: [(&str, Accelerator); 3] = [
    ("auto", Accelerator::Auto(&HARDWARE)),
    ("off", Accelerator::Off),
    ("required", Accelerator::Required(&HARDWARE)),
];

/// Optimization goal of a migration: option `goal`, which QEMU lacks.
#[derive(Debug, Clone, Copy, Default, PartialEq, Eq)]
pub enum Goal {
    /// Shortest total time.
    #[default]
    Fastest,
    /// Least CPU time of source and destination together.
    LeastCpu,
    /// Shortest pause of the guest, below `downtime-limit`, that is possible while the guest dirties pages.
    ShortestDowntime,
}

/// All values of the option `goal`.
pub const GOAL: &[(&str, Goal)] = &[
    ("fastest", Goal::Fastest),
    ("least-cpu", Goal::LeastCpu),
    ("shortest-downtime", Goal::ShortestDowntime),
];

/// Returns the value with this name in a table of named values; `None` if there is none.
fn named_in<T: Copy>(table: &[(&str, T)], name: &str) -> Option<T> {
    let row = table.iter().find(|(one, _)| *one == name);
    row.map(|(_, choice)| *choice)
}

/// Returns the name of a value in a table of named values.
fn name_in<T: PartialEq>(table: &[(&'static str, T)], choice: &T) -> &'static str {
    let row = table.iter().find(|(_, one)| one == choice);
    row.map_or("", |(name, _)| name)
}

/// Maximum of `cpu-limit`, in thousandths of a core: 1024 cores.
const MAX_CORES: u32 = 1_024_000;

/// Parses a number of cores, such as "0.5" or "4". Returns thousandths of a core; `None` for invalid text.
fn parse_cores(text: &str) -> Option<u32> {
    let (whole, fraction) = text.split_once('.').unwrap_or((text, "0"));
    let digits = |text: &str| !text.is_empty() && text.bytes().all(|byte| byte.is_ascii_digit());
    if !digits(whole) || !digits(fraction) || whole.len() > 4 || fraction.len() > 3 {
        return None;
    }
    let thousandths = format!("{fraction:0<3}").parse::<u32>().ok()?;
    let cores = whole.parse::<u32>().ok()? * 1000 + thousandths;
    (cores <= MAX_CORES).then_some(cores)
}

/// A device of `accel-path`.
#[derive(Debug, Clone, PartialEq)]
pub enum AccelPath {
    /// A work queue of DSA: `dsa:/dev/dsa/wqN.M`.
    Dsa(PathBuf),
    /// A simulated work queue for tests: `dsa-model:KEY=N:...`. See `hotlift_accel::idxd::model::Behaviour`.
    #[cfg(feature = "simulated")]
    DsaModel {
        /// Behaviour of the simulated device.
        behaviour: Behaviour,
        /// The parsed text.
        text: String,
    },
}

impl AccelPath {
    /// Parses a device; returns `None` for invalid text. A path alone is a work queue of DSA, as in the DSA series before its
    /// seventh version.
    pub(super) fn parse(text: &str) -> Option<Self> {
        if text.starts_with('/') {
            return Some(Self::Dsa(text.into()));
        }
        match text.split_once(':')? {
            ("dsa", path) if path.starts_with('/') => Some(Self::Dsa(path.into())),
            #[cfg(feature = "simulated")]
            ("dsa-model", text) => Behaviour::parse(text).map(|behaviour| Self::DsaModel {
                behaviour,
                text: text.to_owned(),
            }),
            _ => None,
        }
    }
}

impl fmt::Display for AccelPath {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        match self {
            Self::Dsa(path) => write!(f, "dsa:{}", path.display()),
            #[cfg(feature = "simulated")]
            Self::DsaModel { text, .. } => write!(f, "dsa-model:{text}"),
        }
    }
}

/// Values that an option accepts.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub enum Values {
    /// A whole number from `lowest` to `highest`, both included.
    Number {
        /// Minimum.
        lowest: u64,
        /// Maximum.
        highest: u64,
    },
    /// Bytes, or bytes per second, with an optional suffix K, M, G or T (powers of 1024).
    Size,
    /// Bytes with an optional suffix: a power of two, at least the page size.
    PowerOfTwo,
    /// Bytes with an optional suffix: whole pages, from `lowest` to `highest`, both included.
    Pages {
        /// Minimum in bytes.
        lowest: u64,
        /// Maximum in bytes.
        highest: u64,
    },
    /// `on` or `off`.
    Switch,
    /// A method's name, from [`selections`].
    Method,
    /// A mode's name, from [`ZERO_PAGE_DETECTION`].
    ZeroPages,
    /// A name from [`ACCELERATOR`].
    Accelerator,
    /// A goal's name, from [`GOAL`].
    Goal,
    /// A number of cores, with up to three decimals.
    Cores,
    /// Devices in the form of [`AccelPath`], separated by spaces or commas.
    AccelPath,
    /// Any text; may be empty. The string describes the text for the operator.
    Text(&'static str),
}

/// Value of an option, checked against the option's [`Values`].
#[derive(Debug, Clone)]
pub enum Value {
    /// Value of [`Values::Number`], [`Values::Size`], [`Values::PowerOfTwo`] or [`Values::Pages`].
    Number(u64),
    /// Value of [`Values::Switch`].
    Switch(bool),
    /// Value of [`Values::Method`].
    Method(&'static MethodInfo),
    /// Value of [`Values::ZeroPages`]: the mode, and true if devices detect zero pages.
    ZeroPages(ZeroPageDetection, bool),
    /// Value of [`Values::Accelerator`].
    Accelerator(Accelerator),
    /// Value of [`Values::Goal`].
    Goal(Goal),
    /// Value of [`Values::Cores`]: thousandths of a core.
    Cores(u32),
    /// Value of [`Values::AccelPath`].
    AccelPath(Vec<AccelPath>),
    /// Value of [`Values::Text`].
    Text(String),
}

/// Writes the value in the form in which it is typed.
impl fmt::Display for Value {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        match self {
            Self::Number(number) => write!(f, "{number}"),
            Self::Switch(on) => f.write_str(if *on { "on" } else { "off" }),
            Self::Method(method) => f.write_str(method.name),
            Self::ZeroPages(mode, devices) => {
                let row = ZERO_PAGE_DETECTION
                    .iter()
                    .find(|(_, one, on_devices)| (one, on_devices) == (mode, devices));
                f.write_str(row.map_or("", |(name, ..)| name))
            }
            // Not from the table, because the value may have another set of accelerators.
            Self::Accelerator(Accelerator::Auto(_)) => f.write_str("auto"),
            Self::Accelerator(Accelerator::Off) => f.write_str("off"),
            Self::Accelerator(Accelerator::Required(_)) => f.write_str("required"),
            Self::Goal(goal) => f.write_str(name_in(GOAL, goal)),
            Self::Cores(thousandths) => write!(f, "{}", f64::from(*thousandths) / 1000.0),
            Self::AccelPath(paths) => {
                let paths: Vec<_> = paths.iter().map(ToString::to_string).collect();
                f.write_str(&paths.join(" "))
            }
            Self::Text(text) => f.write_str(text),
        }
    }
}

impl Values {
    /// Parses a typed value; returns `None` for any text that is not one of these values.
    #[must_use]
    pub fn parse(self, text: &str) -> Option<Value> {
        let size = |fits: &dyn Fn(u64) -> bool| {
            parse_size(text)
                .filter(|&bytes| fits(bytes))
                .map(Value::Number)
        };
        match self {
            Self::Number { lowest, highest } => text
                .parse()
                .ok()
                .filter(|number| (lowest..=highest).contains(number))
                .map(Value::Number),
            Self::Size => size(&|_| true),
            Self::PowerOfTwo => size(&|bytes| bytes.is_power_of_two() && bytes >= PAGE_SIZE as u64),
            Self::Pages { lowest, highest } => size(&|bytes| {
                (lowest..=highest).contains(&bytes) && bytes.is_multiple_of(PAGE_SIZE as u64)
            }),
            Self::Switch => match text {
                "on" => Some(Value::Switch(true)),
                "off" => Some(Value::Switch(false)),
                _ => None,
            },
            Self::Method => selection(text).map(Value::Method),
            Self::ZeroPages => ZERO_PAGE_DETECTION
                .iter()
                .find(|(name, ..)| *name == text)
                .map(|(_, mode, devices)| Value::ZeroPages(*mode, *devices)),
            Self::Accelerator => named_in(&ACCELERATOR, text).map(Value::Accelerator),
            Self::Goal => named_in(GOAL, text).map(Value::Goal),
            Self::Cores => parse_cores(text).map(Value::Cores),
            Self::AccelPath => text
                .split([' ', ','])
                .filter(|path| !path.is_empty())
                .map(AccelPath::parse)
                .collect::<Option<_>>()
                .map(Value::AccelPath),
            Self::Text(_) => Some(Value::Text(text.to_owned())),
        }
    }
}

impl Values {
    /// Returns the shortest text that an operator can type for `value`: a size with the largest possible suffix.
    pub(super) fn typed(self, value: &Value) -> String {
        let is_size = matches!(self, Self::Size | Self::PowerOfTwo | Self::Pages { .. });
        let &Value::Number(bytes @ 1..) = value else {
            return value.to_string();
        };
        let suffixes = [(40, "T"), (30, "G"), (20, "M"), (10, "K")];
        let largest = suffixes
            .iter()
            .find(|(shift, _)| bytes.trailing_zeros() >= *shift);
        match largest {
            Some((shift, suffix)) if is_size => format!("{}{suffix}", bytes >> shift),
            _ => value.to_string(),
        }
    }

    /// Returns the names that can be typed; empty if the values are not names.
    #[must_use]
    pub fn names(self) -> Vec<&'static str> {
        match self {
            Self::Switch => vec!["on", "off"],
            Self::Method => selections().map(|method| method.name).collect(),
            Self::ZeroPages => ZERO_PAGE_DETECTION.iter().map(|(n, ..)| *n).collect(),
            Self::Accelerator => ACCELERATOR.iter().map(|(n, _)| *n).collect(),
            Self::Goal => GOAL.iter().map(|(n, _)| *n).collect(),
            _ => Vec::new(),
        }
    }
}

impl fmt::Display for Values {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        match self {
            Self::Number { lowest, highest } => {
                write!(f, "a value between {lowest} and {highest}")
            }
            Self::Size => write!(f, "a number of bytes with an optional suffix K, M, G or T"),
            Self::PowerOfTwo => write!(f, "a power of two no less than the page size"),
            Self::Pages { lowest, highest } => {
                write!(
                    f,
                    "a multiple of {PAGE_SIZE} between {lowest} and {highest}"
                )
            }
            Self::Cores => write!(
                f,
                "cores between 0 and {}, as in 0.5 or 4",
                MAX_CORES / 1000
            ),
            Self::Switch | Self::Method | Self::ZeroPages | Self::Accelerator | Self::Goal => {
                write!(f, "one of {}", self.names().join(", "))
            }
            Self::Text(what) => f.write_str(what),
            Self::AccelPath => write!(f, "dsa:/dev/dsa/wqN.M, several with spaces between"),
        }
    }
}

/// Parses a number of bytes with an optional suffix K, M, G or T (powers of 1024). With a suffix, the number may have a
/// fraction. Returns `None` for any other text, and for a number that needs more than 64 bits.
#[must_use]
pub fn parse_size(text: &str) -> Option<u64> {
    parse_size_in(text, 0)
}

/// Parses text like [`parse_size`]. A number without a suffix is in units of `1 << shift` bytes.
pub(super) fn parse_size_in(text: &str, shift: u32) -> Option<u64> {
    // More digits than 64 bits need, but few enough for 128 bits.
    const MAX_DIGITS: usize = 20;
    let number = text.trim_end_matches(|c: char| c.is_ascii_alphabetic());
    let shift = match text[number.len()..].to_ascii_uppercase().as_str() {
        "" => shift,
        "B" => 0,
        "K" | "KB" | "KIB" => 10,
        "M" | "MB" | "MIB" => 20,
        "G" | "GB" | "GIB" => 30,
        "T" | "TB" | "TIB" => 40,
        _ => return None,
    };
    let (whole, fraction) = number.split_once('.').unwrap_or((number, "0"));
    let digits = |text: &str| {
        let all = !text.is_empty() && text.bytes().all(|byte| byte.is_ascii_digit());
        (all && text.len() <= MAX_DIGITS).then(|| text.parse::<u128>().ok())?
    };
    // A fraction of a byte is invalid.
    if shift == 0 && number.contains('.') {
        return None;
    }
    let places = u32::try_from(fraction.len()).ok()?;
    let part = (digits(fraction)? << shift) / 10_u128.pow(places);
    u64::try_from((digits(whole)? << shift) + part).ok()
}

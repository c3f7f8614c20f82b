//! Values of options, as typed and in JSON.

use std::fmt;
use std::path::PathBuf;

#[cfg(feature = "simulated")]
use hotlift_accel::idxd::model::Behaviour;
use hotlift_mem::PAGE_SIZE;
use hotlift_methods::{Accelerator, MethodInfo, selection, selections};
pub use hotlift_wire::multifd::ZeroPageDetection;

use crate::accelerators::HARDWARE;

/// All modes of `zero-page-detection`, by QEMU's names: nowhere, in the migration thread, or in the channel threads. Zero pages
/// are records of the main channel in the second mode, and listed in packets in the third.
///
/// The last one, from a QEMU series that was not merged, is `multifd` with the devices of `accel-path`.
pub const ZERO_PAGE_DETECTION: &[(&str, ZeroPageDetection, bool)] = &[
    ("none", ZeroPageDetection::None, false),
    ("legacy", ZeroPageDetection::Legacy, false),
    ("multifd", ZeroPageDetection::Multifd, false),
    ("dsa-accel", ZeroPageDetection::Multifd, true),
];

/// All choices of `accelerator`, an option that QEMU lacks: QEMU uses the accelerator that it finds.
pub static ACCELERATOR: [(&str, Accelerator); 3] = [
    ("auto", Accelerator::Auto(&HARDWARE)),
    ("off", Accelerator::Off),
    ("required", Accelerator::Required(&HARDWARE)),
];

/// Optimization goal of a migration: `goal`, an option that QEMU lacks.
#[derive(Debug, Clone, Copy, Default, PartialEq, Eq)]
pub enum Goal {
    /// Shortest total time.
    #[default]
    Fastest,
    /// Least CPU time of both hosts.
    LeastCpu,
    /// Shortest pause of the guest that its writes allow, below `downtime-limit`.
    ShortestDowntime,
}

/// All choices of `goal`.
pub const GOAL: &[(&str, Goal)] = &[
    ("fastest", Goal::Fastest),
    ("least-cpu", Goal::LeastCpu),
    ("shortest-downtime", Goal::ShortestDowntime),
];

/// Returns the choice with that name in a table of choices.
fn named_in<T: Copy>(table: &[(&str, T)], name: &str) -> Option<T> {
    let row = table.iter().find(|(one, _)| *one == name);
    row.map(|(_, choice)| *choice)
}

/// Returns the name of a choice in a table of choices.
fn name_in<T: PartialEq>(table: &[(&'static str, T)], choice: &T) -> &'static str {
    let row = table.iter().find(|(_, one)| one == choice);
    row.map_or("", |(name, _)| name)
}

/// Largest `cpu-limit`, in thousandths of a core: 1024 cores.
const MAX_CORES: u32 = 1_024_000;

/// Returns thousandths of a core for a typed number of cores: "0.5", "4".
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
    /// `dsa:/dev/dsa/wqN.M`: a work queue of DSA.
    Dsa(PathBuf),
    /// `dsa-model:KEY=N:...`: a simulated one, for tests; see `hotlift_accel::idxd::model::Behaviour`.
    #[cfg(feature = "simulated")]
    DsaModel {
        /// Simulated behaviour.
        behaviour: Behaviour,
        /// Text that it was parsed from.
        text: String,
    },
}

impl AccelPath {
    /// Parses a device. A path alone is a work queue of DSA, as in the DSA series before its seventh version.
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

/// Values that an option takes.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub enum Values {
    /// A whole number in a closed range.
    Number {
        /// Lowest value.
        lowest: u64,
        /// Highest value.
        highest: u64,
    },
    /// Bytes (or bytes a second) with an optional suffix K, M, G or T (powers of 1024).
    Size,
    /// Bytes with an optional suffix: a power of two no less than a page.
    PowerOfTwo,
    /// Bytes with an optional suffix: whole pages in a closed range.
    Pages {
        /// Lowest value.
        lowest: u64,
        /// Highest value.
        highest: u64,
    },
    /// `on` or `off`.
    Switch,
    /// A name of one of [`selections`].
    Method,
    /// A name of [`ZERO_PAGE_DETECTION`].
    ZeroPages,
    /// A name of [`ACCELERATOR`].
    Accelerator,
    /// A name of [`GOAL`].
    Goal,
    /// Cores, with up to three decimals.
    Cores,
    /// Devices, as [`AccelPath`] has them, separated by spaces or commas.
    AccelPath,
    /// Any text; empty for none. The string describes it.
    Text(&'static str),
}

/// The value of an option, checked against its [`Values`].
#[derive(Debug, Clone)]
pub enum Value {
    /// Value of [`Values::Number`], and of all that are bytes.
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

/// Writes the value as it is typed.
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
            // Not by the table: the value may hold other accelerators than its rows.
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
    /// Parses a typed value; returns `None` for text that is not one of these values.
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
    /// Returns the shortest text that is typed for `value`: a size with its largest suffix.
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

    /// Returns the names that can be typed; empty if there is no list of them.
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

/// Parses a number of bytes with an optional suffix K, M, G or T (powers of 1024), and with a fraction if it has a suffix.
/// Returns `None` for any other text, and for a number that does not fit 64 bits.
#[must_use]
pub fn parse_size(text: &str) -> Option<u64> {
    parse_size_in(text, 0)
}

/// Parses as [`parse_size`] does, but a number without a suffix is in units of `1 << shift` bytes.
pub(super) fn parse_size_in(text: &str, shift: u32) -> Option<u64> {
    // More digits than matter below 2^64, and few enough for 128 bits.
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

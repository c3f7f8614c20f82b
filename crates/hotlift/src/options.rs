//! The one table of migration options: names, units, ranges and defaults as QEMU 10.0 has them.
//!
//! Command-line flags, help and documentation are made from [`OPTIONS`]; a value is parsed and
//! checked against its range here and nowhere else, before anything is opened.

use std::fmt;
use std::path::PathBuf;
use std::time::Duration;

use hotlift_idxd::model::Behaviour;
use hotlift_methods::legacy::compress;
use hotlift_methods::{Accelerator, EncoderSettings, METHODS, MethodInfo, method};
pub use hotlift_wire::multifd::ZeroPageDetection;

/// All modes of `zero-page-detection`, by QEMU's names: nowhere, in the migration thread (zero pages
/// are records of the main channel), or in the channel threads (they are listed in packets).
///
/// The last one is of a QEMU series that was not merged: as `multifd`, on the devices of `accel-path`.
pub const ZERO_PAGE_DETECTION: &[(&str, ZeroPageDetection, bool)] = &[
    ("none", ZeroPageDetection::None, false),
    ("legacy", ZeroPageDetection::Legacy, false),
    ("multifd", ZeroPageDetection::Multifd, false),
    ("dsa-accel", ZeroPageDetection::Multifd, true),
];

/// All choices of `accelerator`, an option of ours: QEMU uses what it finds.
pub const ACCELERATOR: &[(&str, Accelerator)] = &[
    ("auto", Accelerator::Auto),
    ("off", Accelerator::Off),
    ("required", Accelerator::Required),
];

/// A device of `accel-path`.
#[derive(Debug, Clone, PartialEq)]
pub enum AccelPath {
    /// `dsa:/dev/dsa/wqN.M`: a work queue of DSA.
    Dsa(PathBuf),
    /// `dsa-model:KEY=N:...`: a simulated one, for tests; see `hotlift_idxd::model::Behaviour`.
    DsaModel(Behaviour),
}

impl AccelPath {
    fn parse(text: &str) -> Option<Self> {
        match text.split_once(':')? {
            ("dsa", path) if path.starts_with('/') => Some(Self::Dsa(path.into())),
            ("dsa-model", behaviour) => Behaviour::parse(behaviour).map(Self::DsaModel),
            _ => None,
        }
    }
}

/// The options of one migration, resolved and in range.
#[derive(Debug, Clone)]
pub struct Options {
    /// Whether pages travel on multifd channels; if not, they are records of the main channel. `None`:
    /// on, unless `compress` is. What comes of it is [`Options::multifd`].
    pub multifd: Option<bool>,
    /// Number of multifd channels, 1 to 255.
    pub multifd_channels: u8,
    /// Page compression method.
    pub multifd_compression: &'static MethodInfo,
    /// Level of zlib, 0 to 9.
    pub multifd_zlib_level: u8,
    /// Level of zstd, 1 to 20.
    pub multifd_zstd_level: u8,
    /// Level of qatzip, 1 to 9.
    pub multifd_qatzip_level: u8,
    /// Whether pages on the main channel are compressed by threads (QEMU 2.4 to 9.0).
    pub compress: bool,
    /// Level of `compress`, 0 to 9.
    pub compress_level: u8,
    /// Number of threads that compress, 1 to 255.
    pub compress_threads: u8,
    /// Number of threads that decompress, 1 to 255.
    pub decompress_threads: u8,
    /// Whether pages wait for a thread that compresses; if not, those that find none free go
    /// uncompressed.
    pub compress_wait_thread: bool,
    /// Whether the method's accelerator is used.
    pub accelerator: Accelerator,
    /// Limit over all sockets, in bytes a second; 0 is unlimited.
    pub max_bandwidth: u64,
    /// How long the guest may stand still, 0 to 2,000,000 ms.
    pub downtime_limit: Duration,
    /// Where zero pages are looked for.
    pub zero_page_detection: ZeroPageDetection,
    /// Whether the devices of `accel_path` look for them.
    pub zero_page_devices: bool,
    /// Devices for `zero_page_devices`.
    pub accel_path: Vec<AccelPath>,
    /// Whether method none sends guest pages by reference instead of copying them into the socket.
    pub zero_copy_send: bool,
    /// Whether the destination populates its RAM before the first page arrives.
    pub mem_prealloc: bool,
    /// How long a started handshake or a silent peer is waited for.
    pub handshake_timeout: Duration,
}

impl Default for Options {
    fn default() -> Self {
        Self {
            multifd: None,
            multifd_channels: 2,
            multifd_compression: &METHODS[0],
            multifd_zlib_level: 1,
            multifd_zstd_level: 1,
            multifd_qatzip_level: 1,
            compress: false,
            compress_level: 1,
            compress_threads: 8,
            decompress_threads: 2,
            compress_wait_thread: true,
            accelerator: Accelerator::Auto,
            max_bandwidth: 128 << 20,
            downtime_limit: Duration::from_millis(300),
            zero_page_detection: ZeroPageDetection::Multifd,
            zero_page_devices: false,
            accel_path: Vec::new(),
            zero_copy_send: false,
            mem_prealloc: false,
            handshake_timeout: Duration::from_secs(30),
        }
    }
}

/// Why an option was refused. QEMU's wording, with the range and what was given.
#[derive(Debug, Clone, PartialEq, Eq, thiserror::Error)]
pub enum OptionError {
    /// No option has that name.
    #[error("parameter '{name}' is unexpected")]
    Unknown {
        /// The name as given.
        name: String,
    },
    /// The value is outside the option's range, or is no such value at all.
    #[error("parameter '{name}' expects {expected}, got '{got}'")]
    Value {
        /// The option's name.
        name: &'static str,
        /// The values that it takes.
        expected: String,
        /// The value as given.
        got: String,
    },
    /// The accelerator is required, and cannot be used.
    #[error("accelerator=required: {device} cannot be used: {reason} ('hotlift accel' tells more)")]
    NoAccelerator {
        /// The device.
        device: &'static str,
        /// Why not.
        reason: String,
    },
    /// Two options do not go together.
    #[error("{option} needs {needs}")]
    Conflict {
        /// The option and its value.
        option: String,
        /// What it needs.
        needs: &'static str,
    },
}

/// The values an option takes.
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
    /// `on` or `off`.
    Switch,
    /// A name of a method of [`METHODS`].
    Method,
    /// A name of [`ZERO_PAGE_DETECTION`].
    ZeroPages,
    /// A name of [`ACCELERATOR`].
    Accelerator,
    /// Devices, as [`AccelPath`] has them, with spaces or commas between.
    AccelPath,
}

impl fmt::Display for Values {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        let names = |f: &mut fmt::Formatter<'_>, names: &mut dyn Iterator<Item = &str>| {
            write!(f, "one of {}", names.collect::<Vec<_>>().join(", "))
        };
        match self {
            Self::Number { lowest, highest } => {
                write!(f, "a value between {lowest} and {highest}")
            }
            Self::Size => write!(f, "a number of bytes with an optional suffix K, M, G or T"),
            Self::Switch => write!(f, "one of on, off"),
            Self::Method => names(f, &mut METHODS.iter().map(|method| method.name)),
            Self::ZeroPages => names(f, &mut ZERO_PAGE_DETECTION.iter().map(|(n, ..)| *n)),
            Self::Accelerator => names(f, &mut ACCELERATOR.iter().map(|(n, _)| *n)),
            Self::AccelPath => write!(f, "dsa:/dev/dsa/wqN.M, several with spaces between"),
        }
    }
}

/// One row of the table of options.
#[derive(Debug)]
pub struct OptionInfo {
    /// QEMU's name (QMP's spelling, with dashes).
    pub name: &'static str,
    /// A shorter name for the command line, if it has one.
    pub alias: Option<&'static str>,
    /// The values it takes.
    pub values: Values,
    /// The default, as it would be typed.
    pub default: &'static str,
    /// Unit of a number; empty if it has none.
    pub unit: &'static str,
    /// What it does, in one line.
    pub help: &'static str,
    /// Stores a checked value.
    store: fn(&mut Options, Checked),
}

/// A value that has passed its [`Values`].
enum Checked {
    Number(u64),
    Switch(bool),
    Method(&'static MethodInfo),
    ZeroPages(ZeroPageDetection, bool),
    Accelerator(Accelerator),
    AccelPath(Vec<AccelPath>),
}

/// Makes a `store` function for a number that fits a smaller integer because its range says so.
macro_rules! store_number {
    ($field:ident) => {
        |options, value| {
            if let Checked::Number(number) = value {
                options.$field = number.try_into().unwrap_or(options.$field);
            }
        }
    };
}

/// Every option of a migration.
pub static OPTIONS: &[OptionInfo] = &[
    OptionInfo {
        name: "multifd",
        alias: None,
        values: Values::Switch,
        default: "on",
        unit: "",
        help: "Send pages on multifd channels; off, as with compress, puts them on the main channel",
        store: |options, value| {
            if let Checked::Switch(on) = value {
                options.multifd = Some(on);
            }
        },
    },
    OptionInfo {
        name: "multifd-channels",
        alias: Some("channels"),
        values: Values::Number {
            lowest: 1,
            highest: 255,
        },
        default: "2",
        unit: "",
        help: "Number of multifd channels; both sides must agree",
        store: store_number!(multifd_channels),
    },
    OptionInfo {
        name: "multifd-compression",
        alias: Some("method"),
        values: Values::Method,
        default: "none",
        unit: "",
        help: "Page compression method; both sides must agree",
        store: |options, value| {
            if let Checked::Method(method) = value {
                options.multifd_compression = method;
            }
        },
    },
    OptionInfo {
        name: "multifd-zlib-level",
        alias: None,
        values: Values::Number {
            lowest: 0,
            highest: 9,
        },
        default: "1",
        unit: "",
        help: "Level of method zlib: 0 stores, 1 is fastest, 9 is smallest",
        store: store_number!(multifd_zlib_level),
    },
    OptionInfo {
        name: "multifd-zstd-level",
        alias: None,
        values: Values::Number {
            lowest: 1,
            highest: 20,
        },
        default: "1",
        unit: "",
        help: "Level of method zstd: 1 is fastest, 20 is smallest",
        store: store_number!(multifd_zstd_level),
    },
    OptionInfo {
        name: "multifd-qatzip-level",
        alias: None,
        values: Values::Number {
            lowest: 1,
            highest: 9,
        },
        default: "1",
        unit: "",
        help: "Level of method qatzip: 1 is fastest, 9 is smallest",
        store: store_number!(multifd_qatzip_level),
    },
    OptionInfo {
        name: "compress",
        alias: None,
        values: Values::Switch,
        default: "off",
        unit: "",
        help: "Compress pages on the main channel, for QEMU up to 9.0; both sides must agree",
        store: |options, value| {
            if let Checked::Switch(on) = value {
                options.compress = on;
            }
        },
    },
    OptionInfo {
        name: "compress-level",
        alias: None,
        values: Values::Number {
            lowest: 0,
            highest: 9,
        },
        default: "1",
        unit: "",
        help: "Level of compress: 0 leaves pages as they are, 1 is fastest, 9 is smallest",
        store: store_number!(compress_level),
    },
    OptionInfo {
        name: "compress-threads",
        alias: None,
        values: Values::Number {
            lowest: 1,
            highest: 255,
        },
        default: "8",
        unit: "",
        help: "Number of threads that compress, with compress",
        store: store_number!(compress_threads),
    },
    OptionInfo {
        name: "decompress-threads",
        alias: None,
        values: Values::Number {
            lowest: 1,
            highest: 255,
        },
        default: "2",
        unit: "",
        help: "Number of threads that decompress, with compress",
        store: store_number!(decompress_threads),
    },
    OptionInfo {
        name: "compress-wait-thread",
        alias: None,
        values: Values::Switch,
        default: "on",
        unit: "",
        help: "Wait for a thread that compresses; off sends pages that find none free as they are",
        store: |options, value| {
            if let Checked::Switch(on) = value {
                options.compress_wait_thread = on;
            }
        },
    },
    OptionInfo {
        name: "accelerator",
        alias: None,
        values: Values::Accelerator,
        default: "auto",
        unit: "",
        help: "Accelerator of the method: used if it works, never, or required at the start",
        store: |options, value| {
            if let Checked::Accelerator(choice) = value {
                options.accelerator = choice;
            }
        },
    },
    OptionInfo {
        name: "max-bandwidth",
        alias: None,
        values: Values::Size,
        default: "128M",
        unit: "bytes/s",
        help: "Limit over all channels together; 0 is unlimited",
        store: store_number!(max_bandwidth),
    },
    OptionInfo {
        name: "downtime-limit",
        alias: None,
        values: Values::Number {
            lowest: 0,
            highest: 2_000_000,
        },
        default: "300",
        unit: "ms",
        help: "How long the guest may stand still while it is switched over",
        store: |options, value| {
            if let Checked::Number(ms) = value {
                options.downtime_limit = Duration::from_millis(ms);
            }
        },
    },
    OptionInfo {
        name: "zero-page-detection",
        alias: None,
        values: Values::ZeroPages,
        default: "multifd",
        unit: "",
        help: "Where zero pages are looked for: nowhere, migration thread, channel threads, DSA",
        store: |options, value| {
            if let Checked::ZeroPages(mode, devices) = value {
                options.zero_page_detection = mode;
                options.zero_page_devices = devices;
            }
        },
    },
    OptionInfo {
        name: "accel-path",
        alias: None,
        values: Values::AccelPath,
        default: "",
        unit: "",
        help: "Work queues of DSA that zero-page-detection=dsa-accel uses in turn",
        store: |options, value| {
            if let Checked::AccelPath(paths) = value {
                options.accel_path = paths;
            }
        },
    },
    OptionInfo {
        name: "zero-copy-send",
        alias: None,
        values: Values::Switch,
        default: "off",
        unit: "",
        help: "Send pages of method none by reference (vmsplice), not by copy",
        store: |options, value| {
            if let Checked::Switch(on) = value {
                options.zero_copy_send = on;
            }
        },
    },
    OptionInfo {
        name: "mem-prealloc",
        alias: None,
        values: Values::Switch,
        default: "off",
        unit: "",
        help: "Populate the destination's RAM before the first page arrives",
        store: |options, value| {
            if let Checked::Switch(on) = value {
                options.mem_prealloc = on;
            }
        },
    },
];

/// Parses a number of bytes with an optional suffix K, M, G or T (powers of 1024); `None` if it is
/// none, or does not fit 64 bits.
#[must_use]
pub fn parse_size(text: &str) -> Option<u64> {
    let digits = text.trim_end_matches(|c: char| c.is_ascii_alphabetic());
    let shift = match text[digits.len()..].to_ascii_uppercase().as_str() {
        "" | "B" => 0,
        "K" | "KB" | "KIB" => 10,
        "M" | "MB" | "MIB" => 20,
        "G" | "GB" | "GIB" => 30,
        "T" | "TB" | "TIB" => 40,
        _ => return None,
    };
    digits.parse::<u64>().ok()?.checked_mul(1 << shift)
}

impl Options {
    /// Sets an option by name. Names are taken with dashes or underscores.
    ///
    /// # Errors
    /// [`OptionError`] for an unknown name or a value outside the range, which is named.
    pub fn set(&mut self, name: &str, value: &str) -> Result<(), OptionError> {
        let dashed = name.replace('_', "-");
        let option = OPTIONS
            .iter()
            .find(|option| option.name == dashed)
            .ok_or_else(|| OptionError::Unknown {
                name: name.to_owned(),
            })?;
        let checked = match option.values {
            Values::Number { lowest, highest } => value
                .parse()
                .ok()
                .filter(|number| (lowest..=highest).contains(number))
                .map(Checked::Number),
            Values::Size => parse_size(value).map(Checked::Number),
            Values::Switch => match value {
                "on" => Some(Checked::Switch(true)),
                "off" => Some(Checked::Switch(false)),
                _ => None,
            },
            Values::Method => method(value).map(Checked::Method),
            Values::ZeroPages => ZERO_PAGE_DETECTION
                .iter()
                .find(|(name, ..)| *name == value)
                .map(|(_, mode, devices)| Checked::ZeroPages(*mode, *devices)),
            Values::Accelerator => ACCELERATOR
                .iter()
                .find(|(name, _)| *name == value)
                .map(|(_, choice)| Checked::Accelerator(*choice)),
            Values::AccelPath => value
                .split([' ', ','])
                .filter(|path| !path.is_empty())
                .map(AccelPath::parse)
                .collect::<Option<_>>()
                .map(Checked::AccelPath),
        };
        let checked = checked.ok_or_else(|| OptionError::Value {
            name: option.name,
            expected: option.values.to_string(),
            got: value.to_owned(),
        })?;
        (option.store)(self, checked);
        Ok(())
    }

    /// Whether the options go together, and whether what they require is there.
    ///
    /// # Errors
    /// [`OptionError::Conflict`], [`OptionError::NoAccelerator`].
    pub fn check(&self) -> Result<(), OptionError> {
        let method = self.multifd_compression;
        if self.compress && self.multifd() {
            return Err(OptionError::Conflict {
                option: "compress=on".to_owned(),
                needs: "multifd=off: it compresses pages on the main channel",
            });
        }
        if !self.multifd() && method.flag != 0 {
            return Err(OptionError::Conflict {
                option: format!("multifd-compression={}", method.name),
                needs: if self.compress {
                    "multifd=on, with which compress=on does not go"
                } else {
                    "multifd=on"
                },
            });
        }
        if self.zero_page_devices && (self.accel_path.is_empty() || !self.multifd()) {
            return Err(OptionError::Conflict {
                option: "zero-page-detection=dsa-accel".to_owned(),
                needs: if self.multifd() {
                    "accel-path ('hotlift accel' lists the work queues)"
                } else {
                    "multifd=on"
                },
            });
        }
        // The search for zero pages has devices of its own, which are opened later. Method none may
        // still be one end of a relay whose other end has an accelerator.
        let other = self.zero_page_devices || (method.flag == 0 && !self.compress);
        if self.accelerator != Accelerator::Required || (other && method.hardware.is_none()) {
            return Ok(());
        }
        match method.hardware {
            None => Err(OptionError::Conflict {
                option: "accelerator=required".to_owned(),
                needs: "a method that an accelerator serves ('hotlift methods' lists them)",
            }),
            Some(hardware) => {
                (hardware.probe)()
                    .map(|_| ())
                    .map_err(|reason| OptionError::NoAccelerator {
                        device: hardware.device,
                        reason: reason.to_string(),
                    })
            }
        }
    }

    /// Whether pages travel on multifd channels.
    #[must_use]
    pub fn multifd(&self) -> bool {
        self.multifd.unwrap_or(!self.compress)
    }

    /// Name of what compresses pages: a method's, or `compress`.
    #[must_use]
    pub fn method_name(&self) -> &'static str {
        if self.compress {
            compress::NAME
        } else {
            self.multifd_compression.name
        }
    }

    /// The libraries that do it, by name and version.
    #[must_use]
    pub fn library(&self) -> String {
        if self.compress {
            compress::library(self.compress_level)
        } else {
            (self.multifd_compression.library)()
        }
    }

    /// Number of multifd channels that the migration has; 0 without multifd.
    #[must_use]
    pub fn channels(&self) -> u8 {
        if self.multifd() {
            self.multifd_channels
        } else {
            0
        }
    }

    /// Name of the mode of zero page detection.
    #[must_use]
    pub fn zero_page_detection_name(&self) -> &'static str {
        ZERO_PAGE_DETECTION
            .iter()
            .find(|(_, mode, devices)| {
                (*mode, *devices) == (self.zero_page_detection, self.zero_page_devices)
            })
            .map_or("", |(name, ..)| name)
    }

    /// How a channel's encoder works, for a receiver that is a Hotlift or is not.
    #[must_use]
    pub fn encoder_settings(&self, to_hotlift: bool) -> EncoderSettings {
        EncoderSettings {
            level: self
                .level()
                .unwrap_or(self.multifd_compression.default_level),
            accelerator: self.accelerator,
            to_hotlift,
        }
    }

    /// Level of the chosen method, or of `compress`; `None` if it has no levels.
    #[must_use]
    pub fn level(&self) -> Option<u8> {
        if self.compress {
            return Some(self.compress_level);
        }
        match self.multifd_compression.name {
            "zlib" => Some(self.multifd_zlib_level),
            "zstd" => Some(self.multifd_zstd_level),
            "qatzip" => Some(self.multifd_qatzip_level),
            _ => None,
        }
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn defaults_in_the_table_are_the_defaults() {
        let mut options = Options::default();
        for option in OPTIONS {
            options.set(option.name, option.default).unwrap();
        }
        // Not given, it depends; given, it is what was said.
        assert_eq!(options.multifd.take(), Some(options.multifd()));
        assert_eq!(format!("{options:?}"), format!("{:?}", Options::default()));
    }

    #[test]
    fn every_number_takes_its_range_and_nothing_beside_it() {
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
            ("1.5G", None),
        ] {
            assert_eq!(parse_size(text), bytes, "{text}");
        }
    }

    #[test]
    fn names_are_taken_with_dashes_and_underscores_and_unknown_ones_are_refused_by_name() {
        let mut options = Options::default();
        options.set("multifd_channels", "7").unwrap();
        assert_eq!(options.multifd_channels, 7);
        let error = options.set("multifd-chanels", "7").unwrap_err();
        assert!(error.to_string().contains("multifd-chanels"));
        let error = options.set("multifd-compression", "lz5").unwrap_err();
        assert!(error.to_string().contains("none, zlib, zstd"), "{error}");
    }

    /// Options set in this order, if they go together.
    fn given(options: &[(&str, &str)]) -> Result<Options, OptionError> {
        let mut all = Options::default();
        for (name, value) in options {
            all.set(name, value)?;
        }
        all.check()?;
        Ok(all)
    }

    #[test]
    fn compress_takes_pages_off_multifd_channels_unless_those_were_asked_for() {
        assert_eq!(given(&[("compress", "off")]).unwrap().channels(), 2);
        let options = given(&[("compress", "on"), ("compress_level", "9")]).unwrap();
        assert_eq!((options.channels(), options.level()), (0, Some(9)));
        assert_eq!(options.method_name(), "compress");
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
}

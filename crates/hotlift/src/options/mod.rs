//! The one table of migration options: names, units, ranges and defaults as in QEMU 10.0.
//!
//! Command-line flags, help and documentation are generated from [`OPTIONS`]. Values are parsed and checked against their
//! ranges here and nowhere else, before anything is opened.

mod qmp;
mod roles;
mod table;
mod values;

use std::sync::LazyLock;
use std::time::Duration;

use hotlift_mem::PAGE_SIZE;
use hotlift_methods::legacy::compress;
use hotlift_methods::{Accelerator, EncoderSettings, MemoryLimit, MethodInfo};
use hotlift_tls::RECORDS_PER_KEY;
use hotlift_wire::multifd::{Method, PacketLayout};

pub use qmp::{OLDER_NAMES, OUR_PREFIX, OlderName, QmpRefusal, QmpType, qmp_option};
pub use roles::{Group, NotFor, Role, RoleDefault, With};
pub use table::OPTIONS;
pub use values::{
    ACCELERATOR, AccelPath, GOAL, Goal, Value, Values, ZERO_PAGE_DETECTION, ZeroPageDetection,
    parse_size,
};

/// Declares the struct, and a blank value of it, into which the defaults of [`OPTIONS`] are put.
macro_rules! options {
    (
        $(#[$about:meta])*
        pub struct Options {
            $($(#[$doc:meta])* pub $field:ident: $kind:ty,)*
        }
    ) => {
        $(#[$about])*
        pub struct Options {
            $($(#[$doc])* pub $field: $kind,)*
        }

        impl Options {
            fn blank() -> Self {
                Self { $($field: Default::default(),)* }
            }
        }
    };
}

options! {
    /// The options of one migration, resolved and in range.
    #[derive(Debug, Clone)]
    pub struct Options {
        /// True if pages travel on multifd channels, false if they are records of the main channel. `None`: on, unless
        /// `compress` or `xbzrle` is. [`Options::multifd`] returns the value in effect.
        pub multifd: Option<bool>,
        /// Number of multifd channels, 1 to 255.
        pub multifd_channels: u8,
        /// Page compression method.
        pub multifd_compression: &'static MethodInfo,
        /// Level of zlib, 0 to 9.
        pub multifd_zlib_level: u8,
        /// Level of zstd, 0 to 20; 0 is 3.
        pub multifd_zstd_level: u8,
        /// Level of qatzip, 1 to 9.
        pub multifd_qatzip_level: u8,
        /// True if threads compress pages on the main channel (QEMU 2.4 to 9.0).
        pub compress: bool,
        /// Level of `compress`, 0 to 9.
        pub compress_level: u8,
        /// Number of threads that compress, 1 to 255.
        pub compress_threads: u8,
        /// Number of threads that decompress, 1 to 255.
        pub decompress_threads: u8,
        /// True if pages wait for a free compression thread; if false, pages that find none are sent uncompressed.
        pub compress_wait_thread: bool,
        /// Use of the method's accelerator.
        pub accelerator: Accelerator,
        /// Method that `auto` uses towards a QEMU, which reads one method only; each packet has a level of its own.
        pub qemu_reads: &'static MethodInfo,
        /// Limit over all sockets, in bytes a second; 0 is unlimited.
        pub max_bandwidth: u64,
        /// Limit over this side's channel threads, in thousandths of a core; 0 is unlimited.
        pub cpu_limit: u32,
        /// Optimization goal, where the migration may choose.
        pub goal: Goal,
        /// Longest pause of the guest at the switchover, 0 to 2,000,000 ms.
        pub downtime_limit: Duration,
        /// Threads that detect zero pages.
        pub zero_page_detection: ZeroPageDetection,
        /// True if the devices of `accel_path` detect them.
        pub zero_page_devices: bool,
        /// Devices for `zero_page_devices`.
        pub accel_path: Vec<AccelPath>,
        /// True if method none sends guest pages by reference instead of copying them into the socket.
        pub zero_copy_send: bool,
        /// True if the destination populates its RAM before the first page arrives.
        pub mem_prealloc: bool,
        /// True if a page of the main channel is sent as its difference to the one sent before.
        pub xbzrle: bool,
        /// Size of the cache of pages that `xbzrle` compares with, in bytes; a power of two.
        pub xbzrle_cache_size: u64,
        /// True if the guest is slowed down while it dirties pages faster than they are sent.
        pub auto_converge: bool,
        /// Dirtied bytes over sent bytes of a round above which `auto_converge` slows the guest down, 1 to 100 %.
        pub throttle_trigger_threshold: u8,
        /// Share that `auto_converge` takes from the vCPUs at first, 1 to 99 %.
        pub cpu_throttle_initial: u8,
        /// Share that it adds each time, 1 to 99 %.
        pub cpu_throttle_increment: u8,
        /// True if it adds no more than is needed, at the end.
        pub cpu_throttle_tailslow: bool,
        /// Largest share that it takes, 1 to 99 %.
        pub max_cpu_throttle: u8,
        /// True if the source waits for [`Control::proceed`](crate::Control::proceed) once its guest is stopped.
        pub pause_before_switchover: bool,
        /// True if the guest may run at the destination before all its pages are there.
        pub postcopy_ram: bool,
        /// True if pages that the guest waits for have a connection of their own.
        pub postcopy_preempt: bool,
        /// True if the destination measures how long its vCPUs wait for pages.
        pub postcopy_blocktime: bool,
        /// Rate limit for pages of postcopy that the guest has not requested, in bytes a second; 0 is unlimited.
        pub max_postcopy_bandwidth: u64,
        /// True if a monitor sends each state as an event. The engine does not read it.
        pub events: bool,
        /// Not read by the engine: the destination always answers.
        pub return_path: bool,
        /// Bandwidth assumed for the switchover, in bytes a second; 0 measures it.
        pub avail_switchover_bandwidth: u64,
        /// Time before the second announcement at the destination, in ms.
        pub announce_initial: u32,
        /// Longest time between two announcements, in ms.
        pub announce_max: u32,
        /// Number of announcements.
        pub announce_rounds: u16,
        /// Time that each announcement adds before the next, in ms.
        pub announce_step: u16,
        /// Share of the zero pages that is sent as if they had content, 0 to 100 %.
        pub multifd_normal_page_ratio: u8,
        /// Pages of one packet, in bytes; a multiple of the page size.
        pub multifd_packet_size: u32,
        /// Folder with the certificates for TLS; empty for none.
        pub tls_creds: String,
        /// Name that the destination's certificate must have; empty for that of its address.
        pub tls_hostname: String,
        /// Peers that are allowed, if they also have a certificate of the CA: name patterns, separated by spaces. Empty allows
        /// any peer.
        pub tls_authz: String,
        /// Records that are sent under one TLS key. For tests: the default is the limit of the cipher.
        pub tls_records_per_key: u64,
        /// True if connections to other hosts have no TLS, even where certificates are found.
        pub insecure: bool,
        /// Most multifd channels that a relay accepts from a source, 1 to 255.
        pub max_channels: u8,
        /// Most bytes that a source can make its receiver allocate, in addition to 1 MiB for each channel.
        pub memory_limit: u64,
        /// Time for which a source asks about its guest before it is in doubt, 1 to 86,400 s.
        pub settle_timeout: Duration,
        /// Longest silence of another host in precopy, after which the migration fails; zero for no limit.
        pub silence_timeout: Duration,
        /// Time limit of a started handshake, and of a wait for a silent peer.
        pub handshake_timeout: Duration,
    }
}

/// See [`Options::handshake_timeout`].
const HANDSHAKE_TIMEOUT: Duration = Duration::from_secs(30);

/// The defaults of the table, and of the fields that no row sets.
static DEFAULTS: LazyLock<Options> = LazyLock::new(|| {
    let mut options = Options::blank();
    for option in OPTIONS {
        if let Some(value) = option.values.parse(option.default) {
            (option.access.store)(&mut options, value);
        }
    }
    // Its default depends on the others.
    options.multifd = None;
    options.tls_records_per_key = RECORDS_PER_KEY;
    options.handshake_timeout = HANDSHAKE_TIMEOUT;
    options
});

impl Default for Options {
    fn default() -> Self {
        DEFAULTS.clone()
    }
}

/// Longest `silence_timeout`: the same for every interface that sets it.
pub const MAX_SILENCE_TIMEOUT: Duration = Duration::from_secs(86_400);

/// Memory that a source can make its receiver allocate for each channel, in addition to `memory_limit`: a payload is up to
/// twice its pages, which are 512 KiB.
pub(crate) const CHANNEL_MEMORY: usize = 1 << 20;

/// Most bytes of pages in a packet: limit of the option, and of what a destination accepts from a Hotlift.
pub(crate) const MAX_PACKET_SIZE: usize = 8 << 20;

/// Refusal of an option, in QEMU's wording, with the range and the given value.
#[derive(Debug, Clone, PartialEq, Eq, thiserror::Error)]
pub enum OptionError {
    /// No option has that name.
    #[error("parameter '{name}' is unexpected")]
    Unknown {
        /// The name as given.
        name: String,
    },
    /// The value is outside the option's range, or not a valid value at all.
    #[error("parameter '{name}' expects {expected}, got '{got}'")]
    Value {
        /// The option's name.
        name: &'static str,
        /// The values that it accepts.
        expected: String,
        /// The value as given.
        got: String,
    },
    /// The accelerator is required, and cannot be used.
    #[error("accelerator=required: {device} cannot be used: {reason} (see 'hotlift accel')")]
    NoAccelerator {
        /// The device.
        device: &'static str,
        /// Cause.
        reason: String,
    },
    /// Two options do not go together.
    #[error("{option} needs {needs}")]
    Conflict {
        /// The option and its value.
        option: String,
        /// The option that it needs.
        needs: &'static str,
    },
    /// A relay does not support the option.
    #[error("{option} needs a built-in guest: {instead}")]
    NotForRelay {
        /// The option and its value.
        option: String,
        /// Reason, and the commands that support it.
        instead: &'static str,
    },
}

/// Kind of an option, which decides how it is set over QMP and HMP.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub enum Kind {
    /// `migrate-set-capabilities`.
    Capability,
    /// `migrate-set-parameters`.
    Parameter,
    /// `migrate-set-parameters`, with the prefix `x-hotlift-`: QEMU has no such option.
    Ours,
}

/// One row of the table of options.
pub struct OptionInfo {
    /// QEMU's name (QMP's spelling, with dashes).
    pub name: &'static str,
    /// A shorter name for the command line, if it has one.
    pub alias: Option<&'static str>,
    /// Kind of the option.
    pub kind: Kind,
    /// The values that it accepts.
    pub values: Values,
    /// The default on the command line, as it would be typed.
    pub default: &'static str,
    /// Unit of a number; empty if it has none.
    pub unit: &'static str,
    /// True if a change takes effect in a running migration.
    pub live: bool,
    /// Section of help that shows it.
    pub group: Group,
    /// Roles that do not take it, in addition to those that its group excludes.
    pub not_for: &'static [NotFor],
    /// Defaults that are not [`OptionInfo::default`].
    pub defaults: &'static [RoleDefault],
    /// Option without which it has no effect. QMP accepts it all the same, as QEMU does, because the other may be set later.
    pub with: Option<With>,
    /// Its effect, in one line.
    pub help: &'static str,
    access: Access,
}

/// Access to an option's field.
struct Access {
    /// Stores a checked value.
    store: fn(&mut Options, Value),
    read: fn(&Options) -> Value,
}

impl OptionInfo {
    /// Returns the option's value in `options`.
    #[must_use]
    pub fn read(&self, options: &Options) -> Value {
        (self.access.read)(options)
    }
}

/// Returns the row of an option. Accepts names with dashes or underscores, ours with or without their prefix, and the names of
/// older documents ([`OLDER_NAMES`]).
///
/// # Errors
/// [`OptionError::Unknown`].
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
    /// Sets an option by name. Accepts names with dashes or underscores.
    ///
    /// # Errors
    /// [`OptionError`] for an unknown name or a value outside the range, with that range.
    pub fn set(&mut self, name: &str, value: &str) -> Result<(), OptionError> {
        let option = option(name)?;
        let value = option
            .values
            .parse(value)
            .ok_or_else(|| OptionError::Value {
                name: option.name,
                expected: match option.unit {
                    "" => option.values.to_string(),
                    unit => format!("{}, in {unit}", option.values),
                },
                got: value.to_owned(),
            })?;
        (option.access.store)(self, value);
        self.set_along(&name.replace('_', "-"));
        Ok(())
    }

    /// Copies the options that may change while a migration runs.
    pub(crate) fn take_live(&mut self, from: &Self) {
        for option in OPTIONS.iter().filter(|option| option.live) {
            (option.access.store)(self, option.read(from));
        }
    }

    /// Checks that the options go together, and that what they require is available.
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
        if self.xbzrle && self.multifd() {
            return Err(OptionError::Conflict {
                option: "xbzrle=on".to_owned(),
                needs: "multifd=off: it sends changes of pages on the main channel",
            });
        }
        if self.xbzrle && self.compress {
            return Err(OptionError::Conflict {
                option: "xbzrle=on".to_owned(),
                needs: "compress=off: a page is sent as a change or compressed, not both",
            });
        }
        // Method auto has no effect without packets.
        if !self.multifd() && method.flag != 0 && !method.is_auto() {
            return Err(OptionError::Conflict {
                option: format!("multifd-compression={}", method.name),
                needs: if self.compress {
                    "multifd=on, which excludes compress=on"
                } else if self.xbzrle {
                    "multifd=on, which excludes xbzrle=on"
                } else {
                    "multifd=on"
                },
            });
        }
        if !Method::from_flag(self.qemu_reads.flag).is_some_and(Method::is_qemus) {
            return Err(OptionError::Conflict {
                option: format!("qemu-reads={}", self.qemu_reads.name),
                needs: "a method that QEMU has: zstd or zlib",
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
        let packs = method.flag != 0 && !method.is_auto();
        if self.zero_copy_send && (packs || !self.multifd()) {
            return Err(OptionError::Conflict {
                option: "zero-copy-send=on".to_owned(),
                needs: if self.multifd() {
                    "multifd-compression=none or auto: a compressed page is a copy"
                } else {
                    "multifd=on"
                },
            });
        }
        if self.postcopy_preempt && !self.postcopy_ram {
            return Err(OptionError::Conflict {
                option: "postcopy-preempt=on".to_owned(),
                needs: "postcopy-ram=on",
            });
        }
        if self.zero_copy_send && !self.tls_creds.is_empty() {
            return Err(OptionError::Conflict {
                option: "zero-copy-send=on".to_owned(),
                needs: "no tls-creds: an encrypted page is a copy",
            });
        }
        let given = [
            ("tls-creds", &self.tls_creds),
            ("tls-hostname", &self.tls_hostname),
            ("tls-authz", &self.tls_authz),
        ];
        let given = given.into_iter().find(|(_, value)| !value.is_empty());
        if let (true, Some((name, value))) = (self.insecure, given) {
            return Err(OptionError::Conflict {
                option: format!("{name}={value}"),
                needs: "insecure=off",
            });
        }
        if self.max_cpu_throttle < self.cpu_throttle_initial {
            return Err(OptionError::Conflict {
                option: format!("max-cpu-throttle={}", self.max_cpu_throttle),
                needs: "cpu-throttle-initial at or below it",
            });
        }
        if !self.multifd() && self.multifd_normal_page_ratio > 0 {
            return Err(OptionError::Conflict {
                option: format!(
                    "multifd-normal-page-ratio={}",
                    self.multifd_normal_page_ratio
                ),
                needs: "multifd=on",
            });
        }
        // The detection of zero pages has devices of its own, which are opened later. Method none may still be one end of a
        // relay whose other end has an accelerator.
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
                hardware
                    .probe()
                    .map(|_| ())
                    .map_err(|reason| OptionError::NoAccelerator {
                        device: hardware.device,
                        reason: reason.to_string(),
                    })
            }
        }
    }

    /// Returns true if pages travel on multifd channels.
    #[must_use]
    pub fn multifd(&self) -> bool {
        self.multifd.unwrap_or(!self.compress && !self.xbzrle)
    }

    /// Returns the name of the compression: a method's, or `compress`.
    #[must_use]
    pub fn method_name(&self) -> &'static str {
        if self.compress {
            compress::NAME
        } else {
            self.multifd_compression.name
        }
    }

    /// Returns the names and versions of the libraries that compress.
    #[must_use]
    pub fn library(&self) -> String {
        if self.compress {
            compress::library(self.compress_level)
        } else {
            (self.multifd_compression.library)()
        }
    }

    /// Returns the method that all multifd packets have; `None` if each has its own.
    pub(crate) fn packet_method(&self) -> Option<Method> {
        let method = self.multifd_compression;
        (!method.is_auto()).then(|| Method::from_flag(method.flag).unwrap_or(Method::None))
    }

    /// Returns the method that `auto` uses towards a QEMU.
    pub(crate) fn qemu_reads(&self) -> Method {
        Method::from_flag(self.qemu_reads.flag).unwrap_or(Method::None)
    }

    /// Returns the number of pages that are gathered into a packet.
    #[must_use]
    pub fn packet_pages(&self) -> usize {
        let bytes = usize::try_from(self.multifd_packet_size).unwrap_or(MAX_PACKET_SIZE);
        (bytes / PAGE_SIZE).clamp(1, MAX_PACKET_SIZE / PAGE_SIZE)
    }

    /// Returns the layout of packets on the wire: QEMU's where it is large enough, because a QEMU reads no other. A packet need
    /// not fill it.
    #[must_use]
    pub fn packet_layout(&self) -> PacketLayout {
        let pages = self.packet_pages();
        if pages <= PacketLayout::QEMU.pages() {
            return PacketLayout::QEMU;
        }
        PacketLayout::new(PAGE_SIZE, pages).unwrap_or(PacketLayout::QEMU)
    }

    /// Returns the number of multifd channels that the migration has; 0 without multifd.
    #[must_use]
    pub fn channels(&self) -> u8 {
        if self.multifd() {
            self.multifd_channels
        } else {
            0
        }
    }

    /// Returns the name of the mode of zero page detection.
    #[must_use]
    pub fn zero_page_detection_name(&self) -> String {
        Value::ZeroPages(self.zero_page_detection, self.zero_page_devices).to_string()
    }

    /// Returns the settings of a channel's encoder, for a receiver that is a Hotlift or a QEMU.
    #[must_use]
    pub fn encoder_settings(&self, to_hotlift: bool) -> EncoderSettings {
        EncoderSettings {
            level: self
                .level()
                .unwrap_or(self.multifd_compression.default_level),
            accelerator: self.accelerator,
            to_hotlift,
            window_max: if to_hotlift {
                // The windows of all channels together fit the other side's memory-limit, unless that was lowered. A QEMU has
                // no limit.
                let limit = usize::try_from(DEFAULTS.memory_limit).unwrap_or(usize::MAX);
                limit / usize::from(self.channels().max(1))
            } else {
                usize::MAX
            },
        }
    }

    /// Returns the memory that a source with this number of channels can make its receiver allocate.
    pub(crate) fn memory(&self, channels: usize) -> MemoryLimit {
        let limit = usize::try_from(self.memory_limit).unwrap_or(usize::MAX);
        MemoryLimit::new(limit.saturating_add(channels * CHANNEL_MEMORY))
    }

    /// Returns how long a source may ask about its guest, from the moment when it was informed that all is loaded. It may
    /// commit while it waits for that message, and asks from then on.
    pub(crate) fn time_for_questions(&self) -> Duration {
        self.handshake_timeout + self.settle_timeout
    }

    /// Returns the level of `compress`, or of the method by its option `multifd-NAME-level`; `None` without levels.
    #[must_use]
    pub fn level(&self) -> Option<u8> {
        if self.compress {
            return Some(self.compress_level);
        }
        let name = format!("multifd-{}-level", self.multifd_compression.name);
        match option(&name).ok()?.read(self) {
            Value::Number(level) => u8::try_from(level).ok(),
            _ => None,
        }
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn every_default_of_the_table_is_a_value_that_its_option_takes() {
        let mut options = Options::default();
        for option in OPTIONS {
            options.set(option.name, option.default).unwrap();
        }
        // Unset, it depends on the others; set, it is the given value.
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
        assert_eq!(options.multifd_channels, 7);
        let error = options.set("multifd-chanels", "7").unwrap_err();
        assert!(error.to_string().contains("multifd-chanels"));
        let error = options.set("multifd-compression", "lz5").unwrap_err();
        assert!(error.to_string().contains("none, zlib, zstd"), "{error}");
    }

    /// Returns options set in this order, if they go together.
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

    #[test]
    fn pages_go_by_reference_as_they_are_and_on_multifd_channels_alone() {
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
    fn xbzrle_takes_pages_off_multifd_channels_and_leaves_none_for_compress() {
        assert_eq!(given(&[("xbzrle", "on")]).unwrap().channels(), 0);
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

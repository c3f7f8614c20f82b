//! The options of a migration by subject: fields, defaults, and checks of combinations. Each role uses some subjects:
//!
//! - a guest of this process: all of them ([`Options`])
//! - a relay: [`StreamOptions`] and [`Limits`]
//! - a destination whose source decides everything else: [`Limits`] and [`TlsOptions`]

use std::time::Duration;

use hotlift_mem::PAGE_SIZE;
use hotlift_methods::legacy::compress;
use hotlift_methods::{Accelerator, EncoderSettings, METHODS, MemoryLimit, MethodInfo};
use hotlift_tls::RECORDS_PER_KEY;
use hotlift_wire::multifd::{Method, PacketLayout};

use super::values::{AccelPath, Goal, Value, ZeroPageDetection};
use super::{CHANNEL_MEMORY, MAX_PACKET_SIZE, OptionError, With};
use crate::accelerators::HARDWARE;

/// Declares structs, with a default for each field.
macro_rules! options {
    ($(
        $(#[$about:meta])*
        pub struct $name:ident {
            $($(#[$doc:meta])* pub $field:ident: $kind:ty = $default:expr,)*
        }
    )*) => {$(
        $(#[$about])*
        #[derive(Debug, Clone)]
        pub struct $name {
            $($(#[$doc])* pub $field: $kind,)*
        }

        impl Default for $name {
            fn default() -> Self {
                Self { $($field: $default,)* }
            }
        }
    )*};
}

options! {
    /// All options of the migration of a guest of this process, at source or destination.
    pub struct Options {
        /// Format of the stream.
        pub stream: StreamOptions = StreamOptions::default(),
        /// Limits of the resources and of the time that a peer may use.
        pub limits: Limits = Limits::default(),
        /// TLS encryption.
        pub tls: TlsOptions = TlsOptions::default(),
        /// Detection of zero pages; used at the source.
        pub zero_pages: ZeroPageOptions = ZeroPageOptions::default(),
        /// The switchover; used at the source.
        pub switchover: SwitchoverOptions = SwitchoverOptions::default(),
        /// Throttling of the vCPUs; used at the source.
        pub auto_converge: AutoConvergeOptions = AutoConvergeOptions::default(),
        /// Postcopy; used at both ends.
        pub postcopy: PostcopyOptions = PostcopyOptions::default(),
        /// Network announcements of the guest; used at the destination.
        pub announce: AnnounceOptions = AnnounceOptions::default(),
        /// Size in bytes of the source's cache of sent pages, for `xbzrle`; a power of two.
        pub xbzrle_cache_size: u64 = 64 << 20,
        /// True if the source's pages wait for a free compression thread. If false, a page is sent uncompressed when no thread
        /// is free.
        pub compress_wait_thread: bool = true,
        /// Count of the destination's threads that decompress `compress` pages, 1 to 255.
        pub decompress_threads: u8 = 2,
        /// True if the destination makes the kernel allocate the guest's RAM before the first page arrives.
        pub mem_prealloc: bool = false,
        /// True if a monitor sends each change of the migration's status as an event. The engine does not read it.
        pub events: bool = false,
        /// Capability `return-path`. The engine does not read it: the destination always answers.
        pub return_path: bool = false,
    }

    /// Format of a stream, and limits for the process that sends it.
    pub struct StreamOptions {
        /// True if pages are sent on multifd channels, false if they are records of the main channel. `None` means on, unless
        /// `compress` or `xbzrle` is on. [`StreamOptions::multifd`] returns the effective value.
        pub multifd: Option<bool> = None,
        /// Count of multifd channels, 1 to 255.
        pub multifd_channels: u8 = 2,
        /// Page compression method.
        pub multifd_compression: &'static MethodInfo = &METHODS[0],
        /// Compression levels of the methods.
        pub levels: Levels = Levels::default(),
        /// Size of the pages in a packet, in bytes; a multiple of the page size. A relay uses QEMU's size, the default.
        pub multifd_packet_size: u32 = 512 << 10,
        /// True if method none sends guest pages by reference, without a copy into the socket. A relay always does this.
        pub zero_copy_send: bool = false,
        /// True if threads compress pages of the main channel (capability `compress` of QEMU 2.4 to 9.0).
        pub compress: bool = false,
        /// Count of the source's compression threads for `compress`, 1 to 255.
        pub compress_threads: u8 = 8,
        /// True if a page of the main channel is sent as the difference from its last sent content.
        pub xbzrle: bool = false,
        /// Use of an accelerator for the method: automatic, required, or off.
        pub accelerator: Accelerator = Accelerator::Auto(&HARDWARE),
        /// Method that `auto` uses for a QEMU, which reads only one method. The level may differ between packets.
        pub qemu_reads: &'static MethodInfo = &METHODS[0],
        /// Rate limit over all sockets, in bytes per second; 0 is unlimited.
        pub max_bandwidth: u64 = 128 << 20,
        /// CPU limit over all channel threads of this process, in thousandths of a core; 0 is unlimited.
        pub cpu_limit: u32 = 0,
        /// Optimization goal of the decisions that Hotlift makes by itself.
        pub goal: Goal = Goal::Fastest,
    }

    /// Level of each method that has levels.
    pub struct Levels {
        /// Level of zlib, 0 to 9.
        pub zlib: u8 = 1,
        /// Level of zstd, 0 to 20; 0 selects level 3.
        pub zstd: u8 = 1,
        /// Level of qatzip, 1 to 9.
        pub qatzip: u8 = 1,
        /// Level of `compress`, 0 to 9.
        pub compress: u8 = 1,
    }

    /// Limits of the resources and of the time that a peer may use.
    pub struct Limits {
        /// Maximum count of multifd channels that a relay accepts from a source, 1 to 255.
        pub max_channels: u8 = 64,
        /// Maximum memory in bytes that a source can make its receiver allocate, in addition to 1 MiB for each channel.
        pub memory_limit: u64 = 64 << 20,
        /// Time for which a source asks where its guest runs, before it reports that the guest is in doubt; 1 to 86,400 s.
        pub settle_timeout: Duration = Duration::from_secs(60),
        /// Maximum time in precopy without data from another host. Afterwards the migration fails. Zero means no limit.
        pub silence_timeout: Duration = Duration::from_secs(40),
        /// Time limit of a handshake that has begun, and of a wait for a silent peer. No option sets it.
        pub handshake_timeout: Duration = Duration::from_secs(30),
    }

    /// TLS encryption of connections to other hosts.
    pub struct TlsOptions {
        /// Folder with the certificates for TLS; empty if TLS is off.
        pub creds: String = String::new(),
        /// Host name that the destination's certificate must have; empty for the host name of the destination's address.
        pub hostname: String = String::new(),
        /// Permitted identities: name patterns, separated by spaces. Empty permits any peer. In any case the peer needs a
        /// certificate of the CA.
        pub authz: String = String::new(),
        /// Count of records that are sent with one TLS key. The default is the limit of the cipher. No option sets it; tests
        /// do.
        pub records_per_key: u64 = RECORDS_PER_KEY,
        /// True if connections to other hosts do not use TLS, even if there are certificates.
        pub insecure: bool = false,
    }

    /// Options of zero page detection.
    pub struct ZeroPageOptions {
        /// Threads that detect zero pages; `None` disables detection.
        pub detection: ZeroPageDetection = ZeroPageDetection::Multifd,
        /// True if the devices of `accel_path` detect zero pages.
        pub devices: bool = false,
        /// DSA devices that detect zero pages.
        pub accel_path: Vec<AccelPath> = Vec::new(),
        /// Percentage of the zero pages that are sent with content, 0 to 100. For tests.
        pub normal_page_ratio: u8 = 0,
    }

    /// Options of the switchover, in which the guest stops at the source and starts at the destination.
    pub struct SwitchoverOptions {
        /// Maximum estimated pause of the guest at the switchover, 0 to 2,000,000 ms.
        pub downtime_limit: Duration = Duration::from_millis(300),
        /// Assumed bandwidth of the switchover, in bytes per second; 0 to measure it.
        pub avail_bandwidth: u64 = 0,
        /// True if the source, once its guest is stopped, waits for [`Control::proceed`](crate::Control::proceed).
        pub pause_before: bool = false,
    }

    /// Throttling of the guest's vCPUs (capability `auto-converge`).
    pub struct AutoConvergeOptions {
        /// True if the vCPUs are throttled while the guest dirties pages faster than they are sent.
        pub on: bool = false,
        /// Dirtied bytes per sent byte of a round, 1 to 100 %. Above it the vCPUs are throttled.
        pub trigger_threshold: u8 = 50,
        /// Initial throttling: percentage of the vCPUs' time, 1 to 99.
        pub initial: u8 = 20,
        /// Additional throttling at each further step: percentage of the vCPUs' time, 1 to 99.
        pub increment: u8 = 10,
        /// True if a step adds only as much throttling as necessary.
        pub tailslow: bool = false,
        /// Maximum throttling: percentage of the vCPUs' time, 1 to 99.
        pub max: u8 = 99,
    }

    /// Options of postcopy, in which the guest runs at the destination before all of its pages have arrived.
    pub struct PostcopyOptions {
        /// True if the guest may run at the destination before all of its pages have arrived.
        pub ram: bool = false,
        /// True if requested pages have a separate connection.
        pub preempt: bool = false,
        /// True if the destination measures how long its vCPUs are blocked until missing pages arrive.
        pub blocktime: bool = false,
        /// Rate limit for pages that the guest has not requested, in bytes per second; 0 is unlimited.
        pub max_bandwidth: u64 = 0,
    }

    /// Network announcements of the guest at the destination, which redirect its network traffic.
    pub struct AnnounceOptions {
        /// Time between the first and the second announcement, in ms.
        pub initial: u32 = 50,
        /// Maximum time between two announcements, in ms.
        pub max: u32 = 550,
        /// Count of announcements.
        pub rounds: u16 = 5,
        /// Increase of the time between two announcements at each announcement, in ms.
        pub step: u16 = 100,
    }
}

/// Returns [`OptionError::Conflict`] if `lacks` is true: `option` cannot be used without the setting `needs`.
fn refuse(lacks: bool, option: impl Into<String>, needs: &'static str) -> Result<(), OptionError> {
    if !lacks {
        return Ok(());
    }
    Err(OptionError::Conflict {
        option: option.into(),
        needs,
    })
}

impl Options {
    /// Checks that the options do not contradict each other, and that required accelerators are available.
    ///
    /// # Errors
    /// [`OptionError::Conflict`] for a contradiction; [`OptionError::NoAccelerator`] if a required accelerator cannot be used.
    pub fn check(&self) -> Result<(), OptionError> {
        self.stream.check_form()?;
        self.zero_pages.check(&self.stream)?;
        let lacks = self.postcopy.preempt && !self.postcopy.ram;
        refuse(lacks, "postcopy-preempt=on", "postcopy-ram=on")?;
        let encrypts = !self.tls.creds.is_empty();
        refuse(
            self.stream.zero_copy_send && encrypts,
            "zero-copy-send=on",
            "tls-creds to be unset: TLS encrypts a copy of each page",
        )?;
        self.tls.check()?;
        let throttle = &self.auto_converge;
        refuse(
            throttle.max < throttle.initial,
            format!("max-cpu-throttle={}", throttle.max),
            "cpu-throttle-initial at or below it",
        )?;
        self.stream.check_accelerator(self.zero_pages.devices)
    }

    /// Returns the name of the mode of zero page detection, as in the option `zero-page-detection`.
    #[must_use]
    pub fn zero_page_detection_name(&self) -> String {
        Value::ZeroPages(self.zero_pages.detection, self.zero_pages.devices).to_string()
    }
}

impl StreamOptions {
    /// Checks that the options do not contradict each other, and that a required accelerator is available.
    ///
    /// # Errors
    /// [`OptionError::Conflict`] for a contradiction; [`OptionError::NoAccelerator`] if a required accelerator cannot be used.
    pub fn check(&self) -> Result<(), OptionError> {
        self.check_form()?;
        self.check_accelerator(false)
    }

    fn check_form(&self) -> Result<(), OptionError> {
        let (multifd, method) = (self.multifd(), self.multifd_compression);
        refuse(
            self.compress && multifd,
            "compress=on",
            "multifd=off: it compresses pages on the main channel",
        )?;
        refuse(
            self.xbzrle && multifd,
            "xbzrle=on",
            "multifd=off: it sends changes of pages on the main channel",
        )?;
        refuse(
            self.xbzrle && self.compress,
            "xbzrle=on",
            "compress=off: a page is sent as a change or compressed, not both",
        )?;
        // Method auto has no effect without packets.
        let packs = method.flag != 0 && !method.is_auto();
        refuse(
            packs && !multifd,
            format!("multifd-compression={}", method.name),
            With::Multifd.help_text(self),
        )?;
        refuse(
            !Method::from_flag(self.qemu_reads.flag).is_some_and(Method::is_qemus),
            format!("qemu-reads={}", self.qemu_reads.name),
            "a method that QEMU has: zstd or zlib",
        )?;
        refuse(
            self.zero_copy_send && !multifd,
            "zero-copy-send=on",
            "multifd=on",
        )?;
        refuse(
            self.zero_copy_send && packs,
            "zero-copy-send=on",
            "multifd-compression=none or auto: a compressed page is a copy",
        )
    }

    /// Checks that a required accelerator can be used. With `detects_zero_pages`, devices detect zero pages; they are opened
    /// later.
    fn check_accelerator(&self, detects_zero_pages: bool) -> Result<(), OptionError> {
        let method = self.multifd_compression;
        if !matches!(self.accelerator, Accelerator::Required(_)) {
            return Ok(());
        }
        let Some(device) = method.hardware else {
            // A relay may send with method none, and use the accelerator for the method that it receives.
            let is_other = detects_zero_pages || (method.flag == 0 && !self.compress);
            return refuse(
                !is_other,
                "accelerator=required",
                "a method that an accelerator serves ('hotlift methods' lists them)",
            );
        };
        let found = self.accelerator.probe(method.name).map(|_| ());
        found.map_err(|reason| OptionError::NoAccelerator {
            device,
            reason: reason.to_string(),
        })
    }

    /// Returns true if pages are sent on multifd channels.
    #[must_use]
    pub fn multifd(&self) -> bool {
        self.multifd.unwrap_or(!self.compress && !self.xbzrle)
    }

    /// Returns the count of the migration's multifd channels; 0 without multifd.
    #[must_use]
    pub fn channels(&self) -> u8 {
        if self.multifd() {
            self.multifd_channels
        } else {
            0
        }
    }

    /// Returns the name of the page compression: the method's name, or `compress`.
    #[must_use]
    pub fn method_name(&self) -> &'static str {
        if self.compress {
            compress::NAME
        } else {
            self.multifd_compression.name
        }
    }

    /// Returns the names and versions of the compression libraries in use.
    #[must_use]
    pub fn library(&self) -> String {
        if self.compress {
            compress::library(self.levels.compress)
        } else {
            (self.multifd_compression.library)()
        }
    }

    /// Returns the compression level of `compress` or of the method; `None` if the method has no levels.
    #[must_use]
    pub fn level(&self) -> Option<u8> {
        self.level_option().map(|(_, level)| level)
    }

    /// Returns the compression level with the name of its option; `None` if the method has no levels.
    #[must_use]
    pub fn level_option(&self) -> Option<(&'static str, u8)> {
        if self.compress {
            return Some(("compress-level", self.levels.compress));
        }
        match Method::from_flag(self.multifd_compression.flag)? {
            Method::Zlib => Some(("multifd-zlib-level", self.levels.zlib)),
            Method::Zstd => Some(("multifd-zstd-level", self.levels.zstd)),
            Method::Qatzip => Some(("multifd-qatzip-level", self.levels.qatzip)),
            _ => None,
        }
    }

    /// Returns the method of all multifd packets; `None` with method `auto`, which selects a method for each packet.
    pub(crate) fn packet_method(&self) -> Option<Method> {
        let method = self.multifd_compression;
        (!method.is_auto()).then(|| Method::from_flag(method.flag).unwrap_or(Method::None))
    }

    /// Returns the method that `auto` uses for a QEMU, which reads only one method.
    pub(crate) fn qemu_reads(&self) -> Method {
        Method::from_flag(self.qemu_reads.flag).unwrap_or(Method::None)
    }

    /// Returns the count of pages that a channel collects for one packet.
    #[must_use]
    pub fn packet_pages(&self) -> usize {
        let bytes = usize::try_from(self.multifd_packet_size).unwrap_or(MAX_PACKET_SIZE);
        (bytes / PAGE_SIZE).clamp(1, MAX_PACKET_SIZE / PAGE_SIZE)
    }

    /// Returns the layout of packets on the wire. It is QEMU's layout unless `multifd_packet_size` is larger, because a QEMU
    /// reads no other layout. A packet may have fewer pages than its layout.
    #[must_use]
    pub fn packet_layout(&self) -> PacketLayout {
        let pages = self.packet_pages();
        if pages <= PacketLayout::QEMU.pages() {
            return PacketLayout::QEMU;
        }
        PacketLayout::new(PAGE_SIZE, pages).unwrap_or(PacketLayout::QEMU)
    }

    /// Returns the settings of a channel's encoder. `to_hotlift` is true if the receiver is a Hotlift, false if it is a QEMU.
    #[must_use]
    pub fn encoder_settings(&self, to_hotlift: bool) -> EncoderSettings {
        EncoderSettings {
            level: self
                .level()
                .unwrap_or(self.multifd_compression.default_level),
            accelerator: self.accelerator,
            to_hotlift,
            window_max: if to_hotlift {
                // The windows of all channels together fit the default of the receiver's `memory-limit`. A QEMU has no limit.
                let limit = usize::try_from(Limits::default().memory_limit).unwrap_or(usize::MAX);
                limit / usize::from(self.channels().max(1))
            } else {
                usize::MAX
            },
        }
    }
}

impl ZeroPageOptions {
    fn check(&self, stream: &StreamOptions) -> Result<(), OptionError> {
        let on_devices = "zero-page-detection=dsa-accel";
        let multifd = stream.multifd();
        refuse(self.devices && !multifd, on_devices, "multifd=on")?;
        refuse(
            self.devices && self.accel_path.is_empty(),
            on_devices,
            "accel-path ('hotlift accel' lists the work queues)",
        )?;
        refuse(
            self.normal_page_ratio > 0 && !multifd,
            format!("multifd-normal-page-ratio={}", self.normal_page_ratio),
            "multifd=on",
        )
    }
}

impl TlsOptions {
    fn check(&self) -> Result<(), OptionError> {
        let given = [
            ("tls-creds", &self.creds),
            ("tls-hostname", &self.hostname),
            ("tls-authz", &self.authz),
        ];
        let mut given = given.into_iter().filter(|(_, value)| !value.is_empty());
        given.try_for_each(|(name, value)| {
            refuse(self.insecure, format!("{name}={value}"), "insecure=off")
        })
    }
}

impl Limits {
    /// Returns the limit of the memory that a source with `channels` channels can make its receiver allocate.
    pub(crate) fn memory(&self, channels: usize) -> MemoryLimit {
        let limit = usize::try_from(self.memory_limit).unwrap_or(usize::MAX);
        MemoryLimit::new(limit.saturating_add(channels * CHANNEL_MEMORY))
    }

    /// Returns the time in which a source may ask where its guest runs. It starts when the destination has sent that all is
    /// loaded. The message may take up to `handshake_timeout`. Then the source commits, and asks for up to `settle_timeout`.
    pub(crate) fn time_for_questions(&self) -> Duration {
        self.handshake_timeout + self.settle_timeout
    }
}

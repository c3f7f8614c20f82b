//! The options of a migration by subject: fields, defaults, and the checks that they go together. Each role uses some subjects:
//! a guest all ([`Options`]), a relay [`StreamOptions`] and [`Limits`], and a side whose source decides everything else
//! [`Limits`] and [`TlsOptions`].

use std::time::Duration;

use hotlift_mem::PAGE_SIZE;
use hotlift_methods::legacy::compress;
use hotlift_methods::{Accelerator, EncoderSettings, METHODS, MemoryLimit, MethodInfo};
use hotlift_tls::RECORDS_PER_KEY;
use hotlift_wire::multifd::{Method, PacketLayout};

use super::values::{AccelPath, Goal, Value, ZeroPageDetection};
use super::{CHANNEL_MEMORY, MAX_PACKET_SIZE, OptionError, With};
use crate::accelerators::HARDWARE;

/// Declares structs with a default for each field.
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
    /// All options of a guest's migration, at either end.
    pub struct Options {
        /// Form of the stream.
        pub stream: StreamOptions = StreamOptions::default(),
        /// Limits for the other side.
        pub limits: Limits = Limits::default(),
        /// Encryption.
        pub tls: TlsOptions = TlsOptions::default(),
        /// Detection of zero pages at the source.
        pub zero_pages: ZeroPageOptions = ZeroPageOptions::default(),
        /// Switchover at the source.
        pub switchover: SwitchoverOptions = SwitchoverOptions::default(),
        /// Throttling of the source's vCPUs.
        pub auto_converge: AutoConvergeOptions = AutoConvergeOptions::default(),
        /// Postcopy; both ends.
        pub postcopy: PostcopyOptions = PostcopyOptions::default(),
        /// Announcements of the guest at the destination.
        pub announce: AnnounceOptions = AnnounceOptions::default(),
        /// Size of the source's cache of pages that `xbzrle` compares with, in bytes; a power of two.
        pub xbzrle_cache_size: u64 = 64 << 20,
        /// True if the source's pages wait for a free compression thread; if false, pages that find none are sent uncompressed.
        pub compress_wait_thread: bool = true,
        /// Number of the destination's threads that decompress, 1 to 255.
        pub decompress_threads: u8 = 2,
        /// True if the destination populates its RAM before the first page arrives.
        pub mem_prealloc: bool = false,
        /// True if a monitor sends each state as an event. The engine does not read it.
        pub events: bool = false,
        /// Not read by the engine: the destination always answers.
        pub return_path: bool = false,
    }

    /// Form of a stream, and the rates and cores of the side that sends it.
    pub struct StreamOptions {
        /// True if pages travel on multifd channels, false if they are records of the main channel. `None`: on, unless
        /// `compress` or `xbzrle` is. [`StreamOptions::multifd`] returns the value in effect.
        pub multifd: Option<bool> = None,
        /// Number of multifd channels, 1 to 255.
        pub multifd_channels: u8 = 2,
        /// Page compression method.
        pub multifd_compression: &'static MethodInfo = &METHODS[0],
        /// Levels of the methods.
        pub levels: Levels = Levels::default(),
        /// Pages of one packet, in bytes; a multiple of the page size. A relay has QEMU's, the default.
        pub multifd_packet_size: u32 = 512 << 10,
        /// True if method none sends guest pages by reference instead of copying them into the socket. A relay does so anyway.
        pub zero_copy_send: bool = false,
        /// True if threads compress pages on the main channel (QEMU 2.4 to 9.0).
        pub compress: bool = false,
        /// Number of threads that compress, 1 to 255.
        pub compress_threads: u8 = 8,
        /// True if a guest's page of the main channel is sent as its difference to the one sent before.
        pub xbzrle: bool = false,
        /// Use of the method's accelerator.
        pub accelerator: Accelerator = Accelerator::Auto(&HARDWARE),
        /// Method that `auto` uses towards a QEMU, which reads one method only; each packet has a level of its own.
        pub qemu_reads: &'static MethodInfo = &METHODS[0],
        /// Limit over all sockets, in bytes a second; 0 is unlimited.
        pub max_bandwidth: u64 = 128 << 20,
        /// Limit over this side's channel threads, in thousandths of a core; 0 is unlimited.
        pub cpu_limit: u32 = 0,
        /// Optimization goal, where the migration may choose.
        pub goal: Goal = Goal::Fastest,
    }

    /// Level of each method that has levels.
    pub struct Levels {
        /// Level of zlib, 0 to 9.
        pub zlib: u8 = 1,
        /// Level of zstd, 0 to 20; 0 is 3.
        pub zstd: u8 = 1,
        /// Level of qatzip, 1 to 9.
        pub qatzip: u8 = 1,
        /// Level of `compress`, 0 to 9.
        pub compress: u8 = 1,
    }

    /// Limits for the other side.
    pub struct Limits {
        /// Most multifd channels that a relay accepts from a source, 1 to 255.
        pub max_channels: u8 = 64,
        /// Most bytes that a source can make its receiver allocate, in addition to 1 MiB for each channel.
        pub memory_limit: u64 = 64 << 20,
        /// Time for which a source asks about its guest before it is in doubt, 1 to 86,400 s.
        pub settle_timeout: Duration = Duration::from_secs(60),
        /// Longest silence of another host in precopy, after which the migration fails; zero for no limit.
        pub silence_timeout: Duration = Duration::from_secs(40),
        /// Time limit of a started handshake, and of a wait for a silent peer. No option sets it.
        pub handshake_timeout: Duration = Duration::from_secs(30),
    }

    /// Encryption of connections to other hosts.
    pub struct TlsOptions {
        /// Folder with the certificates for TLS; empty for none.
        pub creds: String = String::new(),
        /// Name that the destination's certificate must have; empty for that of its address.
        pub hostname: String = String::new(),
        /// Peers that are allowed, if they also have a certificate of the CA: name patterns, separated by spaces. Empty allows
        /// any peer.
        pub authz: String = String::new(),
        /// Records that are sent under one TLS key. For tests: the default is the limit of the cipher, and no option sets it.
        pub records_per_key: u64 = RECORDS_PER_KEY,
        /// True if connections to other hosts have no TLS, even where certificates are found.
        pub insecure: bool = false,
    }

    /// Detection of zero pages.
    pub struct ZeroPageOptions {
        /// Threads that detect zero pages.
        pub detection: ZeroPageDetection = ZeroPageDetection::Multifd,
        /// True if the devices of `accel_path` detect them.
        pub devices: bool = false,
        /// Devices for `devices`.
        pub accel_path: Vec<AccelPath> = Vec::new(),
        /// Share of the zero pages that is sent as if they had content, 0 to 100 %.
        pub normal_page_ratio: u8 = 0,
    }

    /// Switchover.
    pub struct SwitchoverOptions {
        /// Longest pause of the guest at the switchover, 0 to 2,000,000 ms.
        pub downtime_limit: Duration = Duration::from_millis(300),
        /// Bandwidth assumed for the switchover, in bytes a second; 0 measures it.
        pub avail_bandwidth: u64 = 0,
        /// True if the source waits for [`Control::proceed`](crate::Control::proceed) once its guest is stopped.
        pub pause_before: bool = false,
    }

    /// Throttling of vCPUs.
    pub struct AutoConvergeOptions {
        /// True if the guest is slowed down while it dirties pages faster than they are sent.
        pub on: bool = false,
        /// Dirtied bytes over sent bytes of a round above which the guest is slowed down, 1 to 100 %.
        pub trigger_threshold: u8 = 50,
        /// Share that is taken from the vCPUs at first, 1 to 99 %.
        pub initial: u8 = 20,
        /// Share that each further step adds, 1 to 99 %.
        pub increment: u8 = 10,
        /// True if a step adds no more than is needed.
        pub tailslow: bool = false,
        /// Largest share that is taken, 1 to 99 %.
        pub max: u8 = 99,
    }

    /// Postcopy.
    pub struct PostcopyOptions {
        /// True if the guest may run at the destination before all its pages are there.
        pub ram: bool = false,
        /// True if pages that the guest waits for have a connection of their own.
        pub preempt: bool = false,
        /// True if the destination measures how long its vCPUs wait for pages.
        pub blocktime: bool = false,
        /// Rate limit for pages that the guest has not requested, in bytes a second; 0 is unlimited.
        pub max_bandwidth: u64 = 0,
    }

    /// Announcements of the guest.
    pub struct AnnounceOptions {
        /// Time before the second announcement, in ms.
        pub initial: u32 = 50,
        /// Longest time between two announcements, in ms.
        pub max: u32 = 550,
        /// Number of announcements.
        pub rounds: u16 = 5,
        /// Time that each announcement adds before the next, in ms.
        pub step: u16 = 100,
    }
}

/// Returns an error if `option` lacks what it `needs`.
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
    /// Checks that the options go together, and that what they require is available.
    ///
    /// # Errors
    /// [`OptionError::Conflict`], [`OptionError::NoAccelerator`].
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

    /// Returns the name of the mode of zero page detection.
    #[must_use]
    pub fn zero_page_detection_name(&self) -> String {
        Value::ZeroPages(self.zero_pages.detection, self.zero_pages.devices).to_string()
    }
}

impl StreamOptions {
    /// Checks that the options go together, and that what they require is available.
    ///
    /// # Errors
    /// [`OptionError::Conflict`], [`OptionError::NoAccelerator`].
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

    /// Checks a required accelerator. `detects_zero_pages` is true if devices detect zero pages; they are opened later.
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

    /// Returns true if pages travel on multifd channels.
    #[must_use]
    pub fn multifd(&self) -> bool {
        self.multifd.unwrap_or(!self.compress && !self.xbzrle)
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
            compress::library(self.levels.compress)
        } else {
            (self.multifd_compression.library)()
        }
    }

    /// Returns the level of `compress`, or of the method; `None` without levels.
    #[must_use]
    pub fn level(&self) -> Option<u8> {
        self.level_option().map(|(_, level)| level)
    }

    /// Returns the name of the option that sets the level, and the level.
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
    /// Returns the memory that a source with this number of channels can make its receiver allocate.
    pub(crate) fn memory(&self, channels: usize) -> MemoryLimit {
        let limit = usize::try_from(self.memory_limit).unwrap_or(usize::MAX);
        MemoryLimit::new(limit.saturating_add(channels * CHANNEL_MEMORY))
    }

    /// Returns how long a source may ask about its guest, from the moment when this side sent that all is loaded. The message
    /// may take up to `handshake_timeout`; the source then commits, and asks for up to `settle_timeout`.
    pub(crate) fn time_for_questions(&self) -> Duration {
        self.handshake_timeout + self.settle_timeout
    }
}

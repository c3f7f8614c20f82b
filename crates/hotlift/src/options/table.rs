//! The table of all options, one row each: capabilities, then parameters in the order of QEMU's `info migrate_parameters`, then
//! options that QEMU lacks.

use std::time::Duration;

use super::roles::{NotFor, Role, RoleDefault, With};
use super::values::{Value, Values};
use super::{Access, Group, Kind, MAX_PACKET_SIZE, MAX_SILENCE_TIMEOUT, OptionInfo};

/// Access to a number field of [`Options`], of any integer type. A checked value fits the type.
macro_rules! number {
    ($($field:ident).+) => {
        Access {
            store: |options, value| {
                if let Value::Number(number) = value {
                    options.$($field).+ = number.try_into().unwrap_or(options.$($field).+);
                }
            },
            read: |options| Value::Number(options.$($field).+.into()),
        }
    };
}

/// Access to a field that has the type of its kind of [`Value`].
macro_rules! plain {
    ($kind:ident, $($field:ident).+) => {
        Access {
            store: |options, value| {
                if let Value::$kind(value) = value {
                    options.$($field).+ = value;
                }
            },
            read: |options| Value::$kind(options.$($field).+.clone()),
        }
    };
}

/// Access to a duration field, as a number of units of `$ms` milliseconds.
macro_rules! time {
    ($ms:literal, $($field:ident).+) => {
        Access {
            store: |options, value| {
                if let Value::Number(number) = value {
                    options.$($field).+ = Duration::from_millis(number * $ms);
                }
            },
            read: |options| {
                let units = options.$($field).+.as_millis() / $ms;
                Value::Number(units.try_into().unwrap_or(u64::MAX))
            },
        }
    };
}

/// Range of `multifd-packet-size`. A packet has at least one page; QEMU's has 512 KiB (`MULTIFD_PACKET_SIZE`). The maximum
/// limits the memory that a channel allocates at the source and at the destination.
const PACKET_SIZE: Values = Values::Pages {
    lowest: 4 << 10,
    highest: MAX_PACKET_SIZE as u64,
};

const fn number(lowest: u64, highest: u64) -> Values {
    Values::Number { lowest, highest }
}

/// Roles that connect to no other host.
const LOCAL: &[Role] = &[Role::Save];

/// Reason why the roles of [`LOCAL`] have no TLS.
const NO_HOST: &str = "it connects to no other host, and a save file is not encrypted";

/// Roles that forward the stream of a QEMU.
const RELAYS: &[Role] = &[Role::Relay, Role::Migrate, Role::Save];

const SLOWS: &str = "the source's QEMU slows its guest down; set it there";
const SWITCHES: &str = "the source's QEMU decides when to switch over; set it there";
const ANNOUNCES: &str = "the destination's QEMU announces its guest; set it there";

/// Roles without a monitor. Only a monitor can start postcopy.
const NO_MONITOR: NotFor = NotFor::any(
    &[Role::Pair],
    "it needs a monitor for 'migrate-start-postcopy'; 'hotlift guest run' has one",
);

/// Roles that do not set postcopy's options, on which source and destination must agree.
const POSTCOPY: &[NotFor] = &[
    NO_MONITOR,
    NotFor::any(RELAYS, "both QEMUs must agree on it; set it there"),
];

/// Returns a row with common values for a capability of QEMU. Rows of the table override values that differ.
const fn capability(name: &'static str, access: Access) -> OptionInfo {
    OptionInfo {
        name,
        alias: None,
        kind: Kind::Capability,
        values: Values::Switch,
        unit: "",
        live: false,
        group: Group::Others,
        not_for: &[],
        defaults: &[],
        with: None,
        help: "",
        access,
    }
}

/// Returns a row with common values for a parameter of QEMU.
const fn parameter(name: &'static str, access: Access) -> OptionInfo {
    OptionInfo {
        kind: Kind::Parameter,
        ..capability(name, access)
    }
}

/// Returns a row with common values for an option that QEMU lacks.
const fn ours(name: &'static str, access: Access) -> OptionInfo {
    OptionInfo {
        kind: Kind::Ours,
        ..capability(name, access)
    }
}

/// All options of a migration.
pub static OPTIONS: &[OptionInfo] = &[
    OptionInfo {
        help: "Send only the changed bytes of a page that was sent before; needs multifd=off",
        group: Group::Main,
        not_for: &[NotFor::any(
            RELAYS,
            "a relay keeps no earlier pages to compare with",
        )],
        ..capability("xbzrle", plain!(Switch, stream.xbzrle))
    },
    OptionInfo {
        help: "Slow the guest down while it dirties pages faster than they are sent",
        group: Group::Everyday(8),
        not_for: &[NotFor::any(RELAYS, SLOWS)],
        ..capability("auto-converge", plain!(Switch, auto_converge.on))
    },
    OptionInfo {
        help: "Send each state of a migration as a QMP event to the clients of the monitor",
        not_for: &[
            NotFor::any(
                &[Role::Pair],
                "it has no monitor; 'hotlift guest run' has one",
            ),
            NotFor::any(
                &[Role::Migrate, Role::Save],
                "it has no monitor; the source's QEMU sends its states on its own monitor",
            ),
        ],
        ..capability("events", plain!(Switch, events))
    },
    OptionInfo {
        help: "Compress pages on the main channel, for QEMU up to 9.0; both sides must agree",
        group: Group::Everyday(9),
        ..capability("compress", plain!(Switch, stream.compress))
    },
    OptionInfo {
        help: "Run the guest at the destination before all its pages have arrived; both sides must agree",
        group: Group::Switchover,
        not_for: POSTCOPY,
        ..capability("postcopy-ram", plain!(Switch, postcopy.ram))
    },
    OptionInfo {
        help: "Has no effect, and exists for QEMU's clients: the destination always answers, as with on",
        ..capability("return-path", plain!(Switch, return_path))
    },
    OptionInfo {
        help: "Pause before the last pages are sent, until a monitor sends migrate-continue",
        group: Group::Switchover,
        not_for: &[
            NotFor::any(
                &[Role::Pair],
                "it needs a monitor for 'migrate-continue'; 'hotlift guest run' has one",
            ),
            NotFor::any(RELAYS, "the source's QEMU pauses its guest; set it there"),
        ],
        ..capability(
            "pause-before-switchover",
            plain!(Switch, switchover.pause_before),
        )
    },
    OptionInfo {
        help: "Send pages on multifd channels; off sends them on the main channel, which compress and xbzrle need",
        group: Group::Channels,
        defaults: &[
            RoleDefault {
                roles: &[Role::Guest],
                value: None,
                help_text: "on; off with a monitor, as in QEMU, and with compress or xbzrle",
            },
            RoleDefault {
                roles: Role::ALL,
                value: None,
                help_text: "on; off with compress or xbzrle",
            },
        ],
        ..capability(
            "multifd",
            Access {
                store: |options, value| {
                    if let Value::Switch(on) = value {
                        options.stream.multifd = Some(on);
                    }
                },
                read: |options| Value::Switch(options.stream.multifd()),
            },
        )
    },
    OptionInfo {
        help: "Measure at the destination how long vCPUs wait for pages",
        group: Group::Switchover,
        not_for: &[
            NO_MONITOR,
            NotFor::any(RELAYS, "the destination's QEMU counts it; set it there"),
        ],
        with: Some(With::PostcopyRam),
        ..capability("postcopy-blocktime", plain!(Switch, postcopy.blocktime))
    },
    OptionInfo {
        help: "Send pages of method none by reference (vmsplice) instead of copying them",
        group: Group::Channels,
        not_for: &[NotFor::any(
            RELAYS,
            "a relay always splices pages of method none from socket to socket",
        )],
        ..capability("zero-copy-send", plain!(Switch, stream.zero_copy_send))
    },
    OptionInfo {
        help: "Send pages that the guest waits for on a separate connection; both sides must agree",
        group: Group::Switchover,
        not_for: POSTCOPY,
        with: Some(With::PostcopyRam),
        ..capability("postcopy-preempt", plain!(Switch, postcopy.preempt))
    },
    OptionInfo {
        help: "Time between the first and the second announcement of the guest to the destination's network",
        group: Group::Announce,
        values: number(0, 100000),
        unit: "ms",
        not_for: &[NotFor::any(RELAYS, ANNOUNCES)],
        ..parameter("announce-initial", number!(announce.initial))
    },
    OptionInfo {
        help: "Longest time between two announcements of the guest to the network",
        group: Group::Announce,
        values: number(0, 100000),
        unit: "ms",
        not_for: &[NotFor::any(RELAYS, ANNOUNCES)],
        ..parameter("announce-max", number!(announce.max))
    },
    OptionInfo {
        help: "Number of announcements of the guest to the network",
        group: Group::Announce,
        values: number(0, 1000),
        not_for: &[NotFor::any(RELAYS, ANNOUNCES)],
        ..parameter("announce-rounds", number!(announce.rounds))
    },
    OptionInfo {
        help: "Increase of the time between two announcements of the guest, after each announcement",
        group: Group::Announce,
        values: number(1, 10000),
        unit: "ms",
        not_for: &[NotFor::any(RELAYS, ANNOUNCES)],
        ..parameter("announce-step", number!(announce.step))
    },
    OptionInfo {
        help: "Level of compress: 0 stores pages uncompressed, 1 is fastest, 9 is smallest",
        group: Group::Levels,
        values: number(0, 9),
        with: Some(With::Compress),
        ..parameter("compress-level", number!(stream.levels.compress))
    },
    OptionInfo {
        help: "Number of threads that compress pages with compress=on",
        group: Group::Main,
        values: number(1, 255),
        with: Some(With::Compress),
        ..parameter("compress-threads", number!(stream.compress_threads))
    },
    OptionInfo {
        help: "on: wait for a free compression thread; off: send pages uncompressed while no thread is free",
        group: Group::Main,
        not_for: &[NotFor::any(
            RELAYS,
            "a relay always waits for a free compression thread",
        )],
        with: Some(With::Compress),
        ..parameter("compress-wait-thread", plain!(Switch, compress_wait_thread))
    },
    OptionInfo {
        help: "Number of threads that decompress pages with compress=on",
        group: Group::Main,
        values: number(1, 255),
        not_for: &[NotFor::any(
            RELAYS,
            "a relay decompresses as it reads; set it at the destination's QEMU",
        )],
        with: Some(With::Compress),
        ..parameter("decompress-threads", number!(decompress_threads))
    },
    OptionInfo {
        help: "Ratio of dirtied to sent bytes in a round, above which auto-converge slows the guest down",
        group: Group::Throttle,
        values: number(1, 100),
        unit: "%",
        live: true,
        not_for: &[NotFor::any(RELAYS, SLOWS)],
        with: Some(With::AutoConverge),
        ..parameter(
            "throttle-trigger-threshold",
            number!(auto_converge.trigger_threshold),
        )
    },
    OptionInfo {
        help: "Share of the vCPUs' time that the first step of auto-converge takes from the guest",
        group: Group::Throttle,
        values: number(1, 99),
        unit: "%",
        live: true,
        not_for: &[NotFor::any(RELAYS, SLOWS)],
        with: Some(With::AutoConverge),
        ..parameter("cpu-throttle-initial", number!(auto_converge.initial))
    },
    OptionInfo {
        help: "Further share of the vCPUs' time that each later step of auto-converge takes from the guest",
        group: Group::Throttle,
        values: number(1, 99),
        unit: "%",
        live: true,
        not_for: &[NotFor::any(RELAYS, SLOWS)],
        with: Some(With::AutoConverge),
        ..parameter("cpu-throttle-increment", number!(auto_converge.increment))
    },
    OptionInfo {
        help: "Let the last steps of auto-converge take only as much of the vCPUs' time as needed",
        group: Group::Throttle,
        live: true,
        not_for: &[NotFor::any(RELAYS, SLOWS)],
        with: Some(With::AutoConverge),
        ..parameter(
            "cpu-throttle-tailslow",
            plain!(Switch, auto_converge.tailslow),
        )
    },
    OptionInfo {
        help: "Highest share of the vCPUs' time that auto-converge takes from the guest",
        group: Group::Throttle,
        values: number(1, 99),
        unit: "%",
        live: true,
        not_for: &[NotFor::any(RELAYS, SLOWS)],
        with: Some(With::AutoConverge),
        ..parameter("max-cpu-throttle", number!(auto_converge.max))
    },
    OptionInfo {
        help: "Encrypt with the certificates in this folder ('hotlift certs' makes them); both sides need TLS",
        group: Group::Tls,
        alias: Some("tls"),
        values: Values::Text("a folder"),
        not_for: &[NotFor::any(LOCAL, NO_HOST)],
        ..parameter("tls-creds", plain!(Text, tls.creds))
    },
    OptionInfo {
        help: "Name that the destination's certificate must have [default: the host of its address]",
        group: Group::TlsNames,
        values: Values::Text("a host name or an IP address"),
        not_for: &[
            NotFor::any(LOCAL, NO_HOST),
            NotFor::any(
                &[Role::Receive],
                "the connecting side checks the name: give it to 'hotlift migrate'",
            ),
        ],
        ..parameter("tls-hostname", plain!(Text, tls.hostname))
    },
    OptionInfo {
        help: "Bandwidth limit of all channels together; 0 is unlimited",
        group: Group::Everyday(4),
        values: Values::Size,
        unit: "bytes/s",
        live: true,
        defaults: &[RoleDefault {
            roles: &[Role::Pair, Role::Relay, Role::Migrate, Role::Save],
            value: Some("0"),
            help_text: "unlimited",
        }],
        ..parameter("max-bandwidth", number!(stream.max_bandwidth))
    },
    OptionInfo {
        help: "Bandwidth assumed for the switchover; 0 uses the measured one",
        group: Group::Switchover,
        values: Values::Size,
        unit: "bytes/s",
        live: true,
        not_for: &[NotFor::any(RELAYS, SWITCHES)],
        ..parameter(
            "avail-switchover-bandwidth",
            number!(switchover.avail_bandwidth),
        )
    },
    OptionInfo {
        help: "Longest time that the guest may be paused for the switchover",
        group: Group::Everyday(5),
        values: number(0, 2000000),
        unit: "ms",
        live: true,
        not_for: &[NotFor::any(&[Role::Relay], SWITCHES)],
        defaults: &[RoleDefault {
            roles: &[Role::Migrate, Role::Save],
            value: None,
            help_text: "the value of the source's QEMU",
        }],
        ..parameter("downtime-limit", time!(1, switchover.downtime_limit))
    },
    OptionInfo {
        help: "Number of multifd channels; both sides must agree",
        group: Group::Everyday(3),
        alias: Some("channels"),
        values: number(1, 255),
        with: Some(With::Multifd),
        ..parameter("multifd-channels", number!(stream.multifd_channels))
    },
    OptionInfo {
        help: "Page compression method; auto chooses one for each packet",
        group: Group::Everyday(1),
        alias: Some("method"),
        values: Values::Method,
        defaults: &[
            RoleDefault {
                roles: &[Role::Pair],
                value: Some("auto"),
                help_text: "auto",
            },
            RoleDefault {
                roles: &[Role::Guest],
                value: None,
                help_text: "auto; none with a monitor, as in QEMU",
            },
            RoleDefault {
                roles: &[Role::Relay, Role::Migrate],
                value: Some("auto"),
                help_text: "auto; none towards a QEMU",
            },
        ],
        ..parameter(
            "multifd-compression",
            plain!(Method, stream.multifd_compression),
        )
    },
    OptionInfo {
        help: "Level of method zlib: 0 stores pages uncompressed, 1 is fastest, 9 is smallest",
        group: Group::Levels,
        values: number(0, 9),
        ..parameter("multifd-zlib-level", number!(stream.levels.zlib))
    },
    OptionInfo {
        help: "Level of method zstd: 1 is fastest, 20 is smallest; 0 means 3",
        group: Group::Levels,
        values: number(0, 20),
        ..parameter("multifd-zstd-level", number!(stream.levels.zstd))
    },
    OptionInfo {
        help: "Level of method qatzip: 1 is fastest, 9 is smallest",
        group: Group::Levels,
        values: number(1, 9),
        ..parameter("multifd-qatzip-level", number!(stream.levels.qatzip))
    },
    OptionInfo {
        help: "Detection of zero pages: none, in the migration thread (legacy), in the channel threads (multifd), or by DSA",
        group: Group::Everyday(6),
        values: Values::ZeroPages,
        not_for: &[NotFor {
            roles: RELAYS,
            value: Some("dsa-accel"),
            // The CPU has just copied the pages from a socket; a device would read them from memory again.
            instead: "a relay has its pages in the CPU's cache, and detects zero pages itself",
        }],
        defaults: &[RoleDefault {
            roles: RELAYS,
            value: None,
            help_text: "the relay detects zero pages if the source does not",
        }],
        ..parameter(
            "zero-page-detection",
            Access {
                store: |options, value| {
                    if let Value::ZeroPages(mode, devices) = value {
                        options.zero_pages.detection = mode;
                        options.zero_pages.devices = devices;
                    }
                },
                read: |options| {
                    Value::ZeroPages(options.zero_pages.detection, options.zero_pages.devices)
                },
            },
        )
    },
    OptionInfo {
        help: "Work queues of DSA that zero-page-detection=dsa-accel uses in turn",
        group: Group::Devices,
        values: Values::AccelPath,
        not_for: &[NotFor::any(
            RELAYS,
            "a relay has its pages in the CPU's cache, and detects zero pages itself",
        )],
        with: Some(With::DsaAccel),
        ..parameter("accel-path", plain!(AccelPath, zero_pages.accel_path))
    },
    OptionInfo {
        help: "Do not encrypt connections to other hosts: anyone on the network can read and change the guest",
        group: Group::Tls,
        not_for: &[NotFor::any(LOCAL, NO_HOST)],
        ..ours("insecure", plain!(Switch, tls.insecure))
    },
    OptionInfo {
        help: "Share of the zero pages that are sent as if they had content, to measure throughput",
        group: Group::Channels,
        values: number(0, 100),
        unit: "%",
        not_for: &[NotFor::any(
            RELAYS,
            "a relay does not change the kind of a page",
        )],
        ..parameter(
            "multifd-normal-page-ratio",
            number!(zero_pages.normal_page_ratio),
        )
    },
    OptionInfo {
        help: "Total size of the pages in one multifd packet; more than 512K needs Hotlift on the other side",
        group: Group::Channels,
        values: PACKET_SIZE,
        unit: "bytes",
        not_for: &[NotFor::any(RELAYS, "a relay carries QEMU's packets")],
        with: Some(With::Multifd),
        ..parameter("multifd-packet-size", number!(stream.multifd_packet_size))
    },
    OptionInfo {
        help: "Size of the cache of sent pages with xbzrle=on",
        group: Group::Main,
        values: Values::PowerOfTwo,
        unit: "bytes",
        not_for: &[NotFor::any(RELAYS, "a relay has no xbzrle")],
        with: Some(With::Xbzrle),
        ..parameter("xbzrle-cache-size", number!(xbzrle_cache_size))
    },
    OptionInfo {
        help: "Bandwidth limit of postcopy for pages that the guest has not requested; 0 is unlimited",
        group: Group::Switchover,
        values: Values::Size,
        live: true,
        not_for: &[
            NO_MONITOR,
            NotFor::any(RELAYS, "the source's QEMU sends its pages; set it there"),
        ],
        with: Some(With::PostcopyRam),
        ..parameter("max-postcopy-bandwidth", number!(postcopy.max_bandwidth))
    },
    OptionInfo {
        help: "Names of allowed peers, as in their certificates, such as '*.example.org 10.0.0.*'",
        group: Group::TlsNames,
        values: Values::Text("patterns of names, separated by spaces"),
        not_for: &[NotFor::any(LOCAL, NO_HOST)],
        ..parameter("tls-authz", plain!(Text, tls.authz))
    },
    OptionInfo {
        help: "Optimization goal of method auto and of the switchover",
        group: Group::Channels,
        values: Values::Goal,
        live: true,
        not_for: &[NotFor {
            roles: RELAYS,
            value: Some("shortest-downtime"),
            instead: SWITCHES,
        }],
        ..ours("goal", plain!(Goal, stream.goal))
    },
    OptionInfo {
        help: "Method that auto uses if the destination is a QEMU; set it to that QEMU's multifd-compression; auto chooses the \
               level of zlib and zstd for each packet",
        group: Group::Channels,
        values: Values::Method,
        not_for: &[NotFor::any(
            &[Role::Save],
            "no QEMU reads a save file; 'hotlift restore' does",
        )],
        defaults: &[RoleDefault {
            roles: &[Role::Relay, Role::Migrate],
            value: None,
            help_text: "zstd where method auto is given, else none",
        }],
        ..ours("qemu-reads", plain!(Method, stream.qemu_reads))
    },
    OptionInfo {
        help: "CPU time that all channels of this side may use together, in cores; 0 is unlimited",
        group: Group::Channels,
        values: Values::Cores,
        live: true,
        ..ours("cpu-limit", plain!(Cores, stream.cpu_limit))
    },
    OptionInfo {
        help: "Accelerator of the method: auto uses it if it works, off never, required fails without it",
        group: Group::Everyday(7),
        values: Values::Accelerator,
        ..ours("accelerator", plain!(Accelerator, stream.accelerator))
    },
    OptionInfo {
        help: "Populate the destination's RAM before the first page arrives",
        group: Group::Everyday(10),
        not_for: &[NotFor::any(
            RELAYS,
            "the destination's QEMU owns the RAM; set prealloc=on of its memory backend",
        )],
        ..ours("mem-prealloc", plain!(Switch, mem_prealloc))
    },
    OptionInfo {
        help: "Highest number of multifd channels that a relay accepts from a source",
        group: Group::Limits,
        values: number(1, 255),
        not_for: &[NotFor::any(
            &[Role::Pair, Role::Guest],
            "a guest accepts the number of multifd-channels",
        )],
        ..ours("max-channels", number!(limits.max_channels))
    },
    OptionInfo {
        help: "Limit of the memory that a source can make its receiver allocate; 1M for each channel, packets in transit and \
               threads do not count",
        group: Group::Limits,
        values: Values::Size,
        unit: "bytes",
        ..ours("memory-limit", number!(limits.memory_limit))
    },
    OptionInfo {
        help: "Time for which a source asks the destination which host runs the guest, after the connections failed at the \
               handover",
        group: Group::Limits,
        values: number(1, 86_400),
        unit: "s",
        not_for: &[NotFor::any(
            &[Role::Save],
            "a save file has no destination to ask",
        )],
        ..ours("settle-timeout", time!(1000, limits.settle_timeout))
    },
    OptionInfo {
        help: "Fail a migration before its switchover if the other host sends no answer for this time, at least 5 s; a host \
               that answers, but does not read, causes no failure; 0 uses the kernel's limit, about 15 minutes with data \
               in transit",
        group: Group::Limits,
        values: number(0, MAX_SILENCE_TIMEOUT.as_secs()),
        unit: "s",
        not_for: &[NotFor::any(&[Role::Save], "a save file has no other host")],
        ..ours("silence-timeout", time!(1000, limits.silence_timeout))
    },
];

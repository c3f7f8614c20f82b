//! Every option, a row each: capabilities, then parameters in the order of QEMU's
//! `info migrate_parameters`, then our own.

use std::time::Duration;

use super::roles::{NotFor, Role, RoleDefault};
use super::values::{Value, Values};
use super::{Access, Group, Kind, MAX_PACKET_SIZE, OptionInfo};

/// Reads and writes a field of [`Options`] that is a number of any width; a value that was checked fits.
macro_rules! number {
    ($field:ident) => {
        Access {
            store: |options, value| {
                if let Value::Number(number) = value {
                    options.$field = number.try_into().unwrap_or(options.$field);
                }
            },
            read: |options| Value::Number(options.$field.into()),
        }
    };
}

/// The same for a field of any other kind of [`Value`].
macro_rules! plain {
    ($kind:ident, $field:ident) => {
        Access {
            store: |options, value| {
                if let Value::$kind(value) = value {
                    options.$field = value;
                }
            },
            read: |options| Value::$kind(options.$field.clone()),
        }
    };
}

/// A packet has at least a page; QEMU takes 512 KiB (`MULTIFD_PACKET_SIZE`). The highest bounds what a
/// channel of either side allocates.
const PACKET_SIZE: Values = Values::Pages {
    lowest: 4 << 10,
    highest: MAX_PACKET_SIZE as u64,
};

const fn number(lowest: u64, highest: u64) -> Values {
    Values::Number { lowest, highest }
}

/// Commands whose guest is a QEMU's, in between.
const RELAYS: &[Role] = &[Role::Relay, Role::Migrate, Role::Save];

const SLOWS: &str = "the source's QEMU slows its guest down; set it there";
const SWITCHES: &str = "the source's QEMU decides when to switch over; set it there";
const ANNOUNCES: &str = "the destination's QEMU announces its guest; set it there";

/// Every option of a migration.
pub static OPTIONS: &[OptionInfo] = &[
    OptionInfo {
        name: "xbzrle",
        alias: None,
        kind: Kind::Capability,
        values: Values::Switch,
        default: "off",
        unit: "",
        live: false,
        group: Group::Main,
        not_for: &[NotFor::any(
            RELAYS,
            "a relay keeps no page that it could compare with",
        )],
        defaults: &[],
        help: "Send what changed of a page that was sent before, without multifd",
        access: plain!(Switch, xbzrle),
    },
    OptionInfo {
        name: "auto-converge",
        alias: None,
        kind: Kind::Capability,
        values: Values::Switch,
        default: "off",
        unit: "",
        live: false,
        group: Group::Everyday(8),
        not_for: &[NotFor::any(RELAYS, SLOWS)],
        defaults: &[],
        help: "Slow the guest down while it dirties pages faster than they are sent",
        access: plain!(Switch, auto_converge),
    },
    OptionInfo {
        name: "events",
        alias: None,
        kind: Kind::Capability,
        values: Values::Switch,
        default: "off",
        unit: "",
        live: false,
        group: Group::Others,
        not_for: &[
            NotFor::any(
                &[Role::Pair],
                "it has no monitor that anybody could hear; 'hotlift guest run' has one",
            ),
            NotFor::any(
                &[Role::Migrate, Role::Save],
                "it has no monitor; the source's QEMU tells its states at its own",
            ),
        ],
        defaults: &[],
        help: "Tell each state of a migration as a QMP event; without a monitor there is nobody to tell",
        access: plain!(Switch, events),
    },
    OptionInfo {
        name: "compress",
        alias: None,
        kind: Kind::Capability,
        values: Values::Switch,
        default: "off",
        unit: "",
        live: false,
        group: Group::Everyday(9),
        not_for: &[],
        defaults: &[],
        help: "Compress pages on the main channel, for QEMU up to 9.0; both sides must agree",
        access: plain!(Switch, compress),
    },
    OptionInfo {
        name: "return-path",
        alias: None,
        kind: Kind::Capability,
        values: Values::Switch,
        default: "off",
        unit: "",
        live: false,
        group: Group::Others,
        not_for: &[],
        defaults: &[],
        help: "Kept for those who set it: the destination always answers, as with on",
        access: plain!(Switch, return_path),
    },
    OptionInfo {
        name: "pause-before-switchover",
        alias: None,
        kind: Kind::Capability,
        values: Values::Switch,
        default: "off",
        unit: "",
        live: false,
        group: Group::Switchover,
        not_for: &[
            NotFor::any(
                &[Role::Pair],
                "it needs a monitor that lets the migration go on; 'hotlift guest run' \
               has one",
            ),
            NotFor::any(RELAYS, "the source's QEMU stops its guest; set it there"),
        ],
        defaults: &[],
        help: "Stop before the last pages are sent, until a monitor says migrate-continue",
        access: plain!(Switch, pause_before_switchover),
    },
    OptionInfo {
        name: "multifd",
        alias: None,
        kind: Kind::Capability,
        values: Values::Switch,
        default: "on",
        unit: "",
        live: false,
        group: Group::Channels,
        not_for: &[],
        defaults: &[
            RoleDefault {
                roles: &[Role::Guest],
                value: None,
                words: "on; off with a monitor, as in QEMU, and with compress or xbzrle",
            },
            RoleDefault {
                roles: Role::ALL,
                value: None,
                words: "on; off with compress or xbzrle",
            },
        ],
        help: "Send pages on multifd channels; off, as with compress, puts them on the main channel",
        access: Access {
            store: |options, value| {
                if let Value::Switch(on) = value {
                    options.multifd = Some(on);
                }
            },
            read: |options| Value::Switch(options.multifd()),
        },
    },
    OptionInfo {
        name: "zero-copy-send",
        alias: None,
        kind: Kind::Capability,
        values: Values::Switch,
        default: "off",
        unit: "",
        live: false,
        group: Group::Channels,
        not_for: &[NotFor::any(
            RELAYS,
            "a relay passes pages of method none from socket to socket by reference \
               anyway",
        )],
        defaults: &[],
        help: "Send pages of method none by reference (vmsplice), not by copy",
        access: plain!(Switch, zero_copy_send),
    },
    OptionInfo {
        name: "announce-initial",
        alias: None,
        kind: Kind::Parameter,
        values: number(0, 100000),
        default: "50",
        unit: "ms",
        live: false,
        group: Group::Announce,
        not_for: &[NotFor::any(RELAYS, ANNOUNCES)],
        defaults: &[],
        help: "Before the second announcement of a guest at its destination",
        access: number!(announce_initial),
    },
    OptionInfo {
        name: "announce-max",
        alias: None,
        kind: Kind::Parameter,
        values: number(0, 100000),
        default: "550",
        unit: "ms",
        live: false,
        group: Group::Announce,
        not_for: &[NotFor::any(RELAYS, ANNOUNCES)],
        defaults: &[],
        help: "Longest time between two announcements",
        access: number!(announce_max),
    },
    OptionInfo {
        name: "announce-rounds",
        alias: None,
        kind: Kind::Parameter,
        values: number(0, 1000),
        default: "5",
        unit: "",
        live: false,
        group: Group::Announce,
        not_for: &[NotFor::any(RELAYS, ANNOUNCES)],
        defaults: &[],
        help: "Number of announcements",
        access: number!(announce_rounds),
    },
    OptionInfo {
        name: "announce-step",
        alias: None,
        kind: Kind::Parameter,
        values: number(1, 10000),
        default: "100",
        unit: "ms",
        live: false,
        group: Group::Announce,
        not_for: &[NotFor::any(RELAYS, ANNOUNCES)],
        defaults: &[],
        help: "What each announcement adds to the time before the next",
        access: number!(announce_step),
    },
    OptionInfo {
        name: "compress-level",
        alias: None,
        kind: Kind::Parameter,
        values: number(0, 9),
        default: "1",
        unit: "",
        live: false,
        group: Group::Levels,
        not_for: &[],
        defaults: &[],
        help: "Level of compress: 0 leaves pages as they are, 1 is fastest, 9 is smallest",
        access: number!(compress_level),
    },
    OptionInfo {
        name: "compress-threads",
        alias: None,
        kind: Kind::Parameter,
        values: number(1, 255),
        default: "8",
        unit: "",
        live: false,
        group: Group::Main,
        not_for: &[],
        defaults: &[],
        help: "Number of threads that compress, with compress",
        access: number!(compress_threads),
    },
    OptionInfo {
        name: "compress-wait-thread",
        alias: None,
        kind: Kind::Parameter,
        values: Values::Switch,
        default: "on",
        unit: "",
        live: false,
        group: Group::Main,
        not_for: &[NotFor::any(
            RELAYS,
            "a relay always waits for a thread that compresses",
        )],
        defaults: &[],
        help: "Wait for a thread that compresses; off sends pages that find none free as they are",
        access: plain!(Switch, compress_wait_thread),
    },
    OptionInfo {
        name: "decompress-threads",
        alias: None,
        kind: Kind::Parameter,
        values: number(1, 255),
        default: "2",
        unit: "",
        live: false,
        group: Group::Main,
        not_for: &[NotFor::any(
            RELAYS,
            "a relay decompresses as it reads; for the destination's QEMU it is set \
               there",
        )],
        defaults: &[],
        help: "Number of threads that decompress, with compress",
        access: number!(decompress_threads),
    },
    OptionInfo {
        name: "throttle-trigger-threshold",
        alias: None,
        kind: Kind::Parameter,
        values: number(1, 100),
        default: "50",
        unit: "%",
        live: true,
        group: Group::Throttle,
        not_for: &[NotFor::any(RELAYS, SLOWS)],
        defaults: &[],
        help: "Dirtied bytes over sent bytes of a round above which auto-converge slows the guest down",
        access: number!(throttle_trigger_threshold),
    },
    OptionInfo {
        name: "cpu-throttle-initial",
        alias: None,
        kind: Kind::Parameter,
        values: number(1, 99),
        default: "20",
        unit: "%",
        live: true,
        group: Group::Throttle,
        not_for: &[NotFor::any(RELAYS, SLOWS)],
        defaults: &[],
        help: "Share of time that auto-converge takes from the vCPUs at first",
        access: number!(cpu_throttle_initial),
    },
    OptionInfo {
        name: "cpu-throttle-increment",
        alias: None,
        kind: Kind::Parameter,
        values: number(1, 99),
        default: "10",
        unit: "%",
        live: true,
        group: Group::Throttle,
        not_for: &[NotFor::any(RELAYS, SLOWS)],
        defaults: &[],
        help: "What auto-converge adds each time that it was not enough",
        access: number!(cpu_throttle_increment),
    },
    OptionInfo {
        name: "cpu-throttle-tailslow",
        alias: None,
        kind: Kind::Parameter,
        values: Values::Switch,
        default: "off",
        unit: "",
        live: true,
        group: Group::Throttle,
        not_for: &[NotFor::any(RELAYS, SLOWS)],
        defaults: &[],
        help: "Add no more than is needed at the end of the throttling",
        access: plain!(Switch, cpu_throttle_tailslow),
    },
    OptionInfo {
        name: "max-cpu-throttle",
        alias: None,
        kind: Kind::Parameter,
        values: number(1, 99),
        default: "99",
        unit: "%",
        live: true,
        group: Group::Throttle,
        not_for: &[NotFor::any(RELAYS, SLOWS)],
        defaults: &[],
        help: "Most that auto-converge takes from the vCPUs",
        access: number!(max_cpu_throttle),
    },
    OptionInfo {
        name: "max-bandwidth",
        alias: None,
        kind: Kind::Parameter,
        values: Values::Size,
        default: "128M",
        unit: "bytes/s",
        live: true,
        group: Group::Everyday(4),
        not_for: &[],
        defaults: &[RoleDefault {
            roles: &[Role::Pair, Role::Relay, Role::Migrate, Role::Save],
            value: Some("0"),
            words: "unlimited",
        }],
        help: "Limit over all channels together; 0 is unlimited",
        access: number!(max_bandwidth),
    },
    OptionInfo {
        name: "avail-switchover-bandwidth",
        alias: None,
        kind: Kind::Parameter,
        values: Values::Size,
        default: "0",
        unit: "bytes/s",
        live: true,
        group: Group::Switchover,
        not_for: &[NotFor::any(RELAYS, SWITCHES)],
        defaults: &[],
        help: "Bandwidth to reckon with for the switchover; 0 measures it",
        access: number!(avail_switchover_bandwidth),
    },
    OptionInfo {
        name: "downtime-limit",
        alias: None,
        kind: Kind::Parameter,
        values: number(0, 2000000),
        default: "300",
        unit: "ms",
        live: true,
        group: Group::Everyday(5),
        not_for: &[NotFor::any(&[Role::Relay], SWITCHES)],
        defaults: &[RoleDefault {
            roles: &[Role::Migrate, Role::Save],
            value: None,
            words: "as the source's QEMU has it",
        }],
        help: "How long the guest may stand still while it is switched over",
        access: Access {
            store: |options, value| {
                if let Value::Number(ms) = value {
                    options.downtime_limit = Duration::from_millis(ms);
                }
            },
            read: |options| {
                Value::Number(
                    options
                        .downtime_limit
                        .as_millis()
                        .try_into()
                        .unwrap_or(u64::MAX),
                )
            },
        },
    },
    OptionInfo {
        name: "multifd-channels",
        alias: Some("channels"),
        kind: Kind::Parameter,
        values: number(1, 255),
        default: "2",
        unit: "",
        live: false,
        group: Group::Everyday(3),
        not_for: &[],
        defaults: &[],
        help: "Number of multifd channels; both sides must agree",
        access: number!(multifd_channels),
    },
    OptionInfo {
        name: "multifd-compression",
        alias: Some("method"),
        kind: Kind::Parameter,
        values: Values::Method,
        default: "none",
        unit: "",
        live: false,
        group: Group::Everyday(1),
        not_for: &[],
        defaults: &[],
        help: "Page compression method; both sides must agree",
        access: plain!(Method, multifd_compression),
    },
    OptionInfo {
        name: "multifd-zlib-level",
        alias: None,
        kind: Kind::Parameter,
        values: number(0, 9),
        default: "1",
        unit: "",
        live: false,
        group: Group::Levels,
        not_for: &[],
        defaults: &[],
        help: "Level of method zlib: 0 stores, 1 is fastest, 9 is smallest",
        access: number!(multifd_zlib_level),
    },
    OptionInfo {
        name: "multifd-zstd-level",
        alias: None,
        kind: Kind::Parameter,
        values: number(0, 20),
        default: "1",
        unit: "",
        live: false,
        group: Group::Levels,
        not_for: &[],
        defaults: &[],
        help: "Level of method zstd: 1 is fastest, 20 is smallest; 0 is 3",
        access: number!(multifd_zstd_level),
    },
    OptionInfo {
        name: "multifd-qatzip-level",
        alias: None,
        kind: Kind::Parameter,
        values: number(1, 9),
        default: "1",
        unit: "",
        live: false,
        group: Group::Levels,
        not_for: &[],
        defaults: &[],
        help: "Level of method qatzip: 1 is fastest, 9 is smallest",
        access: number!(multifd_qatzip_level),
    },
    OptionInfo {
        name: "zero-page-detection",
        alias: None,
        kind: Kind::Parameter,
        values: Values::ZeroPages,
        default: "multifd",
        unit: "",
        live: false,
        group: Group::Everyday(6),
        not_for: &[NotFor {
            roles: RELAYS,
            value: Some("dsa-accel"),
            // They come out of a socket: a device would fetch them from memory.
            instead: "a relay has its pages in the CPU's cache, and looks itself",
        }],
        defaults: &[RoleDefault {
            roles: RELAYS,
            value: None,
            words: "where the source has not looked",
        }],
        help: "Where zero pages are looked for: nowhere, migration thread, channel threads, DSA",
        access: Access {
            store: |options, value| {
                if let Value::ZeroPages(mode, devices) = value {
                    options.zero_page_detection = mode;
                    options.zero_page_devices = devices;
                }
            },
            read: |options| {
                Value::ZeroPages(options.zero_page_detection, options.zero_page_devices)
            },
        },
    },
    OptionInfo {
        name: "accel-path",
        alias: None,
        kind: Kind::Parameter,
        values: Values::AccelPath,
        default: "",
        unit: "",
        live: false,
        group: Group::Devices,
        not_for: &[NotFor::any(
            RELAYS,
            "a relay has its pages in the CPU's cache, and looks for zero pages \
               itself",
        )],
        defaults: &[],
        help: "Work queues of DSA that zero-page-detection=dsa-accel uses in turn",
        access: plain!(AccelPath, accel_path),
    },
    OptionInfo {
        name: "multifd-normal-page-ratio",
        alias: None,
        kind: Kind::Parameter,
        values: number(0, 100),
        default: "0",
        unit: "%",
        live: false,
        group: Group::Channels,
        not_for: &[NotFor::any(
            RELAYS,
            "a relay carries pages as what they are",
        )],
        defaults: &[],
        help: "Share of the zero pages that is sent as if they had content, to measure throughput",
        access: number!(multifd_normal_page_ratio),
    },
    OptionInfo {
        name: "multifd-packet-size",
        alias: None,
        kind: Kind::Parameter,
        values: PACKET_SIZE,
        default: "512K",
        unit: "bytes",
        live: false,
        group: Group::Channels,
        not_for: &[NotFor::any(RELAYS, "a relay carries QEMU's packets")],
        defaults: &[],
        help: "Pages of one multifd packet, in bytes; more than 512K needs a Hotlift on the other side",
        access: number!(multifd_packet_size),
    },
    OptionInfo {
        name: "xbzrle-cache-size",
        alias: None,
        kind: Kind::Parameter,
        values: Values::PowerOfTwo,
        default: "64M",
        unit: "bytes",
        live: false,
        group: Group::Main,
        not_for: &[NotFor::any(RELAYS, "a relay has no xbzrle")],
        defaults: &[],
        help: "Memory that keeps pages as they were sent, with xbzrle",
        access: number!(xbzrle_cache_size),
    },
    OptionInfo {
        name: "accelerator",
        alias: None,
        kind: Kind::Ours,
        values: Values::Accelerator,
        default: "auto",
        unit: "",
        live: false,
        group: Group::Everyday(7),
        not_for: &[],
        defaults: &[],
        help: "Accelerator of the method: used if it works, never, or required at the start",
        access: plain!(Accelerator, accelerator),
    },
    OptionInfo {
        name: "mem-prealloc",
        alias: None,
        kind: Kind::Ours,
        values: Values::Switch,
        default: "off",
        unit: "",
        live: false,
        group: Group::Everyday(10),
        not_for: &[NotFor::any(
            RELAYS,
            "the RAM is that of the destination's QEMU; set prealloc=on of its memory \
               backend",
        )],
        defaults: &[],
        help: "Populate the destination's RAM before the first page arrives",
        access: plain!(Switch, mem_prealloc),
    },
    OptionInfo {
        name: "max-channels",
        alias: None,
        kind: Kind::Ours,
        values: number(1, 255),
        default: "64",
        unit: "",
        live: false,
        group: Group::Limits,
        not_for: &[NotFor::any(
            &[Role::Pair, Role::Guest],
            "a guest takes as many as multifd-channels says",
        )],
        defaults: &[],
        help: "Most multifd channels that a relay takes from a source",
        access: number!(max_channels),
    },
    OptionInfo {
        name: "memory-limit",
        alias: None,
        kind: Kind::Ours,
        values: Values::Size,
        default: "64M",
        unit: "bytes",
        live: false,
        group: Group::Limits,
        not_for: &[],
        defaults: &[],
        help: "Most memory that a source can make its receiver take, with 1M for each channel besides; \
               packets under way and the threads' own are not in it",
        access: number!(memory_limit),
    },
    OptionInfo {
        name: "settle-timeout",
        alias: None,
        kind: Kind::Ours,
        values: number(1, 86_400),
        default: "60",
        unit: "s",
        live: false,
        group: Group::Limits,
        not_for: &[NotFor::any(
            &[Role::Save],
            "a file has nobody who could be asked",
        )],
        defaults: &[],
        help: "How long a source whose connections are lost at the hand-over asks the destination what became of \
               the guest",
        access: Access {
            store: |options, value| {
                if let Value::Number(seconds) = value {
                    options.settle_timeout = Duration::from_secs(seconds);
                }
            },
            read: |options| Value::Number(options.settle_timeout.as_secs()),
        },
    },
];

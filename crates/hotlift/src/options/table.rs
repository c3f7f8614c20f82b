//! All options, one row each: capabilities, then parameters in the order of QEMU's `info migrate_parameters`, then our own.

use std::time::Duration;

use super::roles::{NotFor, Role, RoleDefault, With};
use super::values::{Value, Values};
use super::{Access, Group, Kind, MAX_PACKET_SIZE, MAX_SILENCE_TIMEOUT, OptionInfo};

/// Reads and writes a number field of [`Options`], of any width; a checked value fits.
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

/// Reads and writes a field of any other kind of [`Value`].
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

/// A packet has at least one page; QEMU's has 512 KiB (`MULTIFD_PACKET_SIZE`). The highest value bounds the memory that a
/// channel of either side allocates.
const PACKET_SIZE: Values = Values::Pages {
    lowest: 4 << 10,
    highest: MAX_PACKET_SIZE as u64,
};

const fn number(lowest: u64, highest: u64) -> Values {
    Values::Number { lowest, highest }
}

/// Commands that connect to no other host.
const LOCAL: &[Role] = &[Role::Save];

/// Reason why they have no TLS.
const NO_HOST: &str = "it speaks with no other host, and a save file is not encrypted";

/// Commands that pass on the guest of a QEMU.
const RELAYS: &[Role] = &[Role::Relay, Role::Migrate, Role::Save];

const SLOWS: &str = "the source's QEMU slows its guest down; set it there";
const SWITCHES: &str = "the source's QEMU decides when to switch over; set it there";
const ANNOUNCES: &str = "the destination's QEMU announces its guest; set it there";

/// Roles without a monitor that starts postcopy.
const NO_MONITOR: NotFor = NotFor::any(
    &[Role::Pair],
    "it needs a monitor that says when to switch; 'hotlift guest run' has one",
);

/// Roles that do not set what both sides of a postcopy must have alike.
const POSTCOPY: &[NotFor] = &[
    NO_MONITOR,
    NotFor::any(RELAYS, "the QEMUs agree on it; set it there"),
];

/// Returns a capability of QEMU that is off by default; rows set what differs.
const fn capability(name: &'static str, access: Access) -> OptionInfo {
    OptionInfo {
        name,
        alias: None,
        kind: Kind::Capability,
        values: Values::Switch,
        default: "off",
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

/// Returns the same for a parameter of QEMU.
const fn parameter(name: &'static str, access: Access) -> OptionInfo {
    OptionInfo {
        kind: Kind::Parameter,
        ..capability(name, access)
    }
}

/// Returns the same for an option that QEMU lacks.
const fn ours(name: &'static str, access: Access) -> OptionInfo {
    OptionInfo {
        kind: Kind::Ours,
        ..capability(name, access)
    }
}

/// Every option of a migration.
pub static OPTIONS: &[OptionInfo] = &[
    OptionInfo {
        help: "Send what changed of a page that was sent before, without multifd",
        group: Group::Main,
        not_for: &[NotFor::any(
            RELAYS,
            "a relay keeps no page that it could compare with",
        )],
        ..capability("xbzrle", plain!(Switch, xbzrle))
    },
    OptionInfo {
        help: "Slow the guest down while it dirties pages faster than they are sent",
        group: Group::Everyday(8),
        not_for: &[NotFor::any(RELAYS, SLOWS)],
        ..capability("auto-converge", plain!(Switch, auto_converge))
    },
    OptionInfo {
        help: "Tell each state of a migration as a QMP event; without a monitor there is nobody to tell",
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
        ..capability("events", plain!(Switch, events))
    },
    OptionInfo {
        help: "Compress pages on the main channel, for QEMU up to 9.0; both sides must agree",
        group: Group::Everyday(9),
        ..capability("compress", plain!(Switch, compress))
    },
    OptionInfo {
        help: "Let the guest run at the destination before all its pages are there; both sides must agree",
        group: Group::Switchover,
        not_for: POSTCOPY,
        ..capability("postcopy-ram", plain!(Switch, postcopy_ram))
    },
    OptionInfo {
        help: "Kept for those who set it: the destination always answers, as with on",
        ..capability("return-path", plain!(Switch, return_path))
    },
    OptionInfo {
        help: "Stop before the last pages are sent, until a monitor says migrate-continue",
        group: Group::Switchover,
        not_for: &[
            NotFor::any(
                &[Role::Pair],
                "it needs a monitor that lets the migration go on; 'hotlift guest run' \
               has one",
            ),
            NotFor::any(RELAYS, "the source's QEMU stops its guest; set it there"),
        ],
        ..capability(
            "pause-before-switchover",
            plain!(Switch, pause_before_switchover),
        )
    },
    OptionInfo {
        help: "Send pages on multifd channels; off, as with compress, puts them on the main channel",
        group: Group::Channels,
        default: "on",
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
        ..capability(
            "multifd",
            Access {
                store: |options, value| {
                    if let Value::Switch(on) = value {
                        options.multifd = Some(on);
                    }
                },
                read: |options| Value::Switch(options.multifd()),
            },
        )
    },
    OptionInfo {
        help: "Count at the destination how long vCPUs wait for pages",
        group: Group::Switchover,
        not_for: &[
            NO_MONITOR,
            NotFor::any(RELAYS, "the destination's QEMU counts it; set it there"),
        ],
        with: Some(With::PostcopyRam),
        ..capability("postcopy-blocktime", plain!(Switch, postcopy_blocktime))
    },
    OptionInfo {
        help: "Send pages of method none by reference (vmsplice), not by copy",
        group: Group::Channels,
        not_for: &[NotFor::any(
            RELAYS,
            "a relay passes pages of method none from socket to socket by reference \
               anyway",
        )],
        ..capability("zero-copy-send", plain!(Switch, zero_copy_send))
    },
    OptionInfo {
        help: "Send pages that the guest waits for on a connection of their own; both sides must agree",
        group: Group::Switchover,
        not_for: POSTCOPY,
        with: Some(With::PostcopyRam),
        ..capability("postcopy-preempt", plain!(Switch, postcopy_preempt))
    },
    OptionInfo {
        help: "Before the second announcement of a guest at its destination",
        group: Group::Announce,
        values: number(0, 100000),
        default: "50",
        unit: "ms",
        not_for: &[NotFor::any(RELAYS, ANNOUNCES)],
        ..parameter("announce-initial", number!(announce_initial))
    },
    OptionInfo {
        help: "Longest time between two announcements",
        group: Group::Announce,
        values: number(0, 100000),
        default: "550",
        unit: "ms",
        not_for: &[NotFor::any(RELAYS, ANNOUNCES)],
        ..parameter("announce-max", number!(announce_max))
    },
    OptionInfo {
        help: "Number of announcements",
        group: Group::Announce,
        values: number(0, 1000),
        default: "5",
        not_for: &[NotFor::any(RELAYS, ANNOUNCES)],
        ..parameter("announce-rounds", number!(announce_rounds))
    },
    OptionInfo {
        help: "What each announcement adds to the time before the next",
        group: Group::Announce,
        values: number(1, 10000),
        default: "100",
        unit: "ms",
        not_for: &[NotFor::any(RELAYS, ANNOUNCES)],
        ..parameter("announce-step", number!(announce_step))
    },
    OptionInfo {
        help: "Level of compress: 0 leaves pages as they are, 1 is fastest, 9 is smallest",
        group: Group::Levels,
        values: number(0, 9),
        default: "1",
        with: Some(With::Compress),
        ..parameter("compress-level", number!(compress_level))
    },
    OptionInfo {
        help: "Number of threads that compress, with compress",
        group: Group::Main,
        values: number(1, 255),
        default: "8",
        with: Some(With::Compress),
        ..parameter("compress-threads", number!(compress_threads))
    },
    OptionInfo {
        help: "Wait for a thread that compresses; off sends pages that find none free as they are",
        group: Group::Main,
        default: "on",
        not_for: &[NotFor::any(
            RELAYS,
            "a relay always waits for a thread that compresses",
        )],
        with: Some(With::Compress),
        ..parameter("compress-wait-thread", plain!(Switch, compress_wait_thread))
    },
    OptionInfo {
        help: "Number of threads that decompress, with compress",
        group: Group::Main,
        values: number(1, 255),
        default: "2",
        not_for: &[NotFor::any(
            RELAYS,
            "a relay decompresses as it reads; for the destination's QEMU it is set \
               there",
        )],
        with: Some(With::Compress),
        ..parameter("decompress-threads", number!(decompress_threads))
    },
    OptionInfo {
        help: "Dirtied bytes over sent bytes of a round above which auto-converge slows the guest down",
        group: Group::Throttle,
        values: number(1, 100),
        default: "50",
        unit: "%",
        live: true,
        not_for: &[NotFor::any(RELAYS, SLOWS)],
        with: Some(With::AutoConverge),
        ..parameter(
            "throttle-trigger-threshold",
            number!(throttle_trigger_threshold),
        )
    },
    OptionInfo {
        help: "Share of time that auto-converge takes from the vCPUs at first",
        group: Group::Throttle,
        values: number(1, 99),
        default: "20",
        unit: "%",
        live: true,
        not_for: &[NotFor::any(RELAYS, SLOWS)],
        with: Some(With::AutoConverge),
        ..parameter("cpu-throttle-initial", number!(cpu_throttle_initial))
    },
    OptionInfo {
        help: "What auto-converge adds each time that it was not enough",
        group: Group::Throttle,
        values: number(1, 99),
        default: "10",
        unit: "%",
        live: true,
        not_for: &[NotFor::any(RELAYS, SLOWS)],
        with: Some(With::AutoConverge),
        ..parameter("cpu-throttle-increment", number!(cpu_throttle_increment))
    },
    OptionInfo {
        help: "Add no more than is needed at the end of the throttling",
        group: Group::Throttle,
        live: true,
        not_for: &[NotFor::any(RELAYS, SLOWS)],
        with: Some(With::AutoConverge),
        ..parameter(
            "cpu-throttle-tailslow",
            plain!(Switch, cpu_throttle_tailslow),
        )
    },
    OptionInfo {
        help: "Most that auto-converge takes from the vCPUs",
        group: Group::Throttle,
        values: number(1, 99),
        default: "99",
        unit: "%",
        live: true,
        not_for: &[NotFor::any(RELAYS, SLOWS)],
        with: Some(With::AutoConverge),
        ..parameter("max-cpu-throttle", number!(max_cpu_throttle))
    },
    OptionInfo {
        help: "Encrypt with the certificates in this folder, as 'hotlift certs' makes them; both sides need TLS",
        group: Group::Tls,
        alias: Some("tls"),
        values: Values::Text("a folder"),
        default: "",
        not_for: &[NotFor::any(LOCAL, NO_HOST)],
        ..parameter("tls-creds", plain!(Text, tls_creds))
    },
    OptionInfo {
        help: "Name that the destination's certificate must have, if not that of its address",
        group: Group::TlsNames,
        values: Values::Text("a host name or an IP address"),
        default: "",
        not_for: &[
            NotFor::any(LOCAL, NO_HOST),
            NotFor::any(
                &[Role::Receive],
                "the side that connects looks for a name: give it to 'hotlift migrate'",
            ),
        ],
        ..parameter("tls-hostname", plain!(Text, tls_hostname))
    },
    OptionInfo {
        help: "Limit over all channels together; 0 is unlimited",
        group: Group::Everyday(4),
        values: Values::Size,
        default: "128M",
        unit: "bytes/s",
        live: true,
        defaults: &[RoleDefault {
            roles: &[Role::Pair, Role::Relay, Role::Migrate, Role::Save],
            value: Some("0"),
            words: "unlimited",
        }],
        ..parameter("max-bandwidth", number!(max_bandwidth))
    },
    OptionInfo {
        help: "Bandwidth to reckon with for the switchover; 0 measures it",
        group: Group::Switchover,
        values: Values::Size,
        default: "0",
        unit: "bytes/s",
        live: true,
        not_for: &[NotFor::any(RELAYS, SWITCHES)],
        ..parameter(
            "avail-switchover-bandwidth",
            number!(avail_switchover_bandwidth),
        )
    },
    OptionInfo {
        help: "How long the guest may stand still while it is switched over",
        group: Group::Everyday(5),
        values: number(0, 2000000),
        default: "300",
        unit: "ms",
        live: true,
        not_for: &[NotFor::any(&[Role::Relay], SWITCHES)],
        defaults: &[RoleDefault {
            roles: &[Role::Migrate, Role::Save],
            value: None,
            words: "as the source's QEMU has it",
        }],
        ..parameter(
            "downtime-limit",
            Access {
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
        )
    },
    OptionInfo {
        help: "Number of multifd channels; both sides must agree",
        group: Group::Everyday(3),
        alias: Some("channels"),
        values: number(1, 255),
        default: "2",
        with: Some(With::Multifd),
        ..parameter("multifd-channels", number!(multifd_channels))
    },
    OptionInfo {
        help: "Page compression method; auto chooses one for each packet",
        group: Group::Everyday(1),
        alias: Some("method"),
        values: Values::Method,
        default: "none",
        defaults: &[
            RoleDefault {
                roles: &[Role::Pair],
                value: Some("auto"),
                words: "auto",
            },
            RoleDefault {
                roles: &[Role::Guest],
                value: None,
                words: "auto; none with a monitor, as in QEMU",
            },
            RoleDefault {
                roles: &[Role::Relay, Role::Migrate],
                value: Some("auto"),
                words: "auto; none towards a QEMU",
            },
        ],
        ..parameter("multifd-compression", plain!(Method, multifd_compression))
    },
    OptionInfo {
        help: "Level of method zlib: 0 stores, 1 is fastest, 9 is smallest",
        group: Group::Levels,
        values: number(0, 9),
        default: "1",
        ..parameter("multifd-zlib-level", number!(multifd_zlib_level))
    },
    OptionInfo {
        help: "Level of method zstd: 1 is fastest, 20 is smallest; 0 is 3",
        group: Group::Levels,
        values: number(0, 20),
        default: "1",
        ..parameter("multifd-zstd-level", number!(multifd_zstd_level))
    },
    OptionInfo {
        help: "Level of method qatzip: 1 is fastest, 9 is smallest",
        group: Group::Levels,
        values: number(1, 9),
        default: "1",
        ..parameter("multifd-qatzip-level", number!(multifd_qatzip_level))
    },
    OptionInfo {
        help: "Where zero pages are looked for: nowhere, migration thread, channel threads, DSA",
        group: Group::Everyday(6),
        values: Values::ZeroPages,
        default: "multifd",
        not_for: &[NotFor {
            roles: RELAYS,
            value: Some("dsa-accel"),
            // The pages come from a socket: a device would fetch them from memory.
            instead: "a relay has its pages in the CPU's cache, and looks itself",
        }],
        defaults: &[RoleDefault {
            roles: RELAYS,
            value: None,
            words: "where the source has not looked",
        }],
        ..parameter(
            "zero-page-detection",
            Access {
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
        )
    },
    OptionInfo {
        help: "Work queues of DSA that zero-page-detection=dsa-accel uses in turn",
        group: Group::Devices,
        values: Values::AccelPath,
        default: "",
        not_for: &[NotFor::any(
            RELAYS,
            "a relay has its pages in the CPU's cache, and looks for zero pages \
               itself",
        )],
        with: Some(With::DsaAccel),
        ..parameter("accel-path", plain!(AccelPath, accel_path))
    },
    OptionInfo {
        help: "Do not encrypt connections to other hosts: anyone on the network can read and change the guest",
        group: Group::Tls,
        not_for: &[NotFor::any(LOCAL, NO_HOST)],
        ..ours("insecure", plain!(Switch, insecure))
    },
    OptionInfo {
        help: "Share of the zero pages that is sent as if they had content, to measure throughput",
        group: Group::Channels,
        values: number(0, 100),
        default: "0",
        unit: "%",
        not_for: &[NotFor::any(
            RELAYS,
            "a relay carries pages as what they are",
        )],
        ..parameter(
            "multifd-normal-page-ratio",
            number!(multifd_normal_page_ratio),
        )
    },
    OptionInfo {
        help: "Pages of one multifd packet, in bytes; more than 512K needs a Hotlift on the other side",
        group: Group::Channels,
        values: PACKET_SIZE,
        default: "512K",
        unit: "bytes",
        not_for: &[NotFor::any(RELAYS, "a relay carries QEMU's packets")],
        with: Some(With::Multifd),
        ..parameter("multifd-packet-size", number!(multifd_packet_size))
    },
    OptionInfo {
        help: "Memory that keeps pages as they were sent, with xbzrle",
        group: Group::Main,
        values: Values::PowerOfTwo,
        default: "64M",
        unit: "bytes",
        not_for: &[NotFor::any(RELAYS, "a relay has no xbzrle")],
        with: Some(With::Xbzrle),
        ..parameter("xbzrle-cache-size", number!(xbzrle_cache_size))
    },
    OptionInfo {
        help: "Bytes a second of postcopy for pages that nobody has asked for; 0 is unlimited",
        group: Group::Switchover,
        values: Values::Size,
        default: "0",
        live: true,
        not_for: &[
            NO_MONITOR,
            NotFor::any(RELAYS, "the source's QEMU sends its pages; set it there"),
        ],
        with: Some(With::PostcopyRam),
        ..parameter("max-postcopy-bandwidth", number!(max_postcopy_bandwidth))
    },
    OptionInfo {
        help: "Who may be at the other end, by the names in its certificate, as in '*.example.org 10.0.0.*'",
        group: Group::TlsNames,
        values: Values::Text("patterns of names, with spaces between"),
        default: "",
        not_for: &[NotFor::any(LOCAL, NO_HOST)],
        ..parameter("tls-authz", plain!(Text, tls_authz))
    },
    OptionInfo {
        help: "What the migration is to be good at, where it can choose: with method auto, and at the switchover",
        group: Group::Channels,
        values: Values::Goal,
        default: "fastest",
        live: true,
        not_for: &[NotFor {
            roles: RELAYS,
            value: Some("shortest-downtime"),
            instead: SWITCHES,
        }],
        ..ours("goal", plain!(Goal, goal))
    },
    OptionInfo {
        help: "What method auto sends to a QEMU, as that is set; zlib and zstd at each packet's own level",
        group: Group::Channels,
        values: Values::Method,
        default: "none",
        not_for: &[NotFor::any(
            &[Role::Save],
            "no QEMU reads a save file; 'hotlift restore' does",
        )],
        defaults: &[RoleDefault {
            roles: &[Role::Relay, Role::Migrate],
            value: None,
            words: "zstd where method auto is given, else none",
        }],
        ..ours("qemu-reads", plain!(Method, qemu_reads))
    },
    OptionInfo {
        help: "CPU time that the channels of this side may take, in cores; 0 is no limit",
        group: Group::Channels,
        values: Values::Cores,
        default: "0",
        live: true,
        ..ours("cpu-limit", plain!(Cores, cpu_limit))
    },
    OptionInfo {
        help: "Accelerator of the method: used if it works, never, or required at the start",
        group: Group::Everyday(7),
        values: Values::Accelerator,
        default: "auto",
        ..ours("accelerator", plain!(Accelerator, accelerator))
    },
    OptionInfo {
        help: "Populate the destination's RAM before the first page arrives",
        group: Group::Everyday(10),
        not_for: &[NotFor::any(
            RELAYS,
            "the RAM is that of the destination's QEMU; set prealloc=on of its memory \
               backend",
        )],
        ..ours("mem-prealloc", plain!(Switch, mem_prealloc))
    },
    OptionInfo {
        help: "Most multifd channels that a relay takes from a source",
        group: Group::Limits,
        values: number(1, 255),
        default: "64",
        not_for: &[NotFor::any(
            &[Role::Pair, Role::Guest],
            "a guest takes as many as multifd-channels says",
        )],
        ..ours("max-channels", number!(max_channels))
    },
    OptionInfo {
        help: "Most memory that a source can make its receiver take, with 1M for each channel besides; \
               packets under way and the threads' own are not in it",
        group: Group::Limits,
        values: Values::Size,
        default: "64M",
        unit: "bytes",
        ..ours("memory-limit", number!(memory_limit))
    },
    OptionInfo {
        help: "How long a source whose connections are lost at the hand-over asks the destination what became of \
               the guest",
        group: Group::Limits,
        values: number(1, 86_400),
        default: "60",
        unit: "s",
        not_for: &[NotFor::any(
            &[Role::Save],
            "a file has nobody who could be asked",
        )],
        ..ours(
            "settle-timeout",
            Access {
                store: |options, value| {
                    if let Value::Number(seconds) = value {
                        options.settle_timeout = Duration::from_secs(seconds);
                    }
                },
                read: |options| Value::Number(options.settle_timeout.as_secs()),
            },
        )
    },
    OptionInfo {
        help: "Longest silence of the other host before the switchover, at least 5 s, until the migration fails; a host that \
               answers and does not read is waited for; 0: the kernel's own limit, about 15 minutes with data under way",
        group: Group::Limits,
        values: number(0, MAX_SILENCE_TIMEOUT.as_secs()),
        default: "40",
        unit: "s",
        not_for: &[NotFor::any(&[Role::Save], "a file is on no other host")],
        ..ours(
            "silence-timeout",
            Access {
                store: |options, value| {
                    if let Value::Number(seconds) = value {
                        options.silence_timeout = Duration::from_secs(seconds);
                    }
                },
                read: |options| Value::Number(options.silence_timeout.as_secs()),
            },
        )
    },
];

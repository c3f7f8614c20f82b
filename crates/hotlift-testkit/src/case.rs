//! One case of the fault campaign: the pair of programs, the network and the faults, all drawn from a seed.

use std::time::Duration;

use fastrand::Rng;
use hotlift::options::Limits;
use serde::{Deserialize, Serialize};

use crate::namespace::{End, Message};
use crate::process::{Output, Stream};
use crate::proxy::{EndMapping, Ending};
use crate::qemu::Release;

/// Default time for which a source in doubt queries the outcome of its migration (`settle-timeout`).
pub const SETTLE: Duration = Duration::from_secs(60);

/// The programs on both sides of a migration.
#[derive(Debug, Clone, Copy, PartialEq, Eq, Serialize, Deserialize)]
#[serde(rename_all = "snake_case")]
pub enum Pair {
    /// Two built-in guests: `hotlift guest run` on both sides.
    BuiltIn {
        /// Kind of guest.
        guest: BuiltIn,
        /// Number of vCPUs.
        vcpus: u8,
        /// Number of multifd channels; 0 without multifd.
        channels: u8,
        /// True if the source is controlled over QMP; false if it is started with `--migrate-to`.
        monitored: bool,
    },
    /// `hotlift migrate` at the source and `hotlift serve` at the destination control two QEMUs.
    Steered {
        /// Release of the source's QEMU.
        from: Release,
        /// Release of the destination's QEMU.
        to: Release,
        /// True if `serve` starts the destination's QEMU; false if `serve` gets the QMP socket of a running one.
        started: bool,
    },
    /// Two QEMUs with a `hotlift relay` on each host.
    Relays {
        /// Release of the source's QEMU.
        from: Release,
        /// Release of the destination's QEMU.
        to: Release,
    },
    /// Two QEMUs with a `hotlift agent` on each host; the QEMUs do not know the agents.
    Agents {
        /// Release of the source's QEMU.
        from: Release,
        /// Release of the destination's QEMU.
        to: Release,
        /// Number of QEMU's multifd channels; 0 without multifd.
        channels: u8,
    },
}

/// Kind of Hotlift's built-in guest.
#[derive(Debug, Clone, Copy, PartialEq, Eq, Serialize, Deserialize)]
#[serde(rename_all = "snake_case")]
pub enum BuiltIn {
    /// Worker threads.
    Threads,
    /// A KVM virtual machine.
    Kvm,
}

impl Pair {
    /// Returns the short name of the kind.
    #[must_use]
    pub fn name(&self) -> &'static str {
        match self {
            Self::BuiltIn { .. } => "built-in guests",
            Self::Steered { .. } => "migrate and serve",
            Self::Relays { .. } => "bare relays",
            Self::Agents { .. } => "agents",
        }
    }

    /// Returns true if the migration pauses before the switchover until the driver of the test continues it.
    #[must_use]
    pub fn is_held_before_switchover(&self) -> bool {
        match self {
            Self::BuiltIn { monitored, .. } => *monitored,
            Self::Steered { .. } | Self::Agents { .. } => false,
            Self::Relays { .. } => true,
        }
    }

    /// Returns true if the source is a guest without a monitor, which reports progress in its output.
    #[must_use]
    pub fn is_unmonitored(&self) -> bool {
        matches!(
            self,
            Self::BuiltIn {
                monitored: false,
                ..
            }
        )
    }

    /// Returns true if no Hotlift process controls the QEMUs. Their operator must then decide where the guest runs.
    #[must_use]
    pub fn is_steered_by_others(&self) -> bool {
        matches!(self, Self::Relays { .. } | Self::Agents { .. })
    }

    fn has_commands(&self) -> bool {
        !matches!(self, Self::BuiltIn { .. })
    }
}

/// The network between both hosts of a case.
#[derive(Debug, Clone, Copy, PartialEq, Eq, Serialize, Deserialize)]
pub struct Net {
    /// MTU of the link in bytes.
    pub mtu: u16,
    /// Value of the kernel setting `net.ipv4.tcp_orphan_retries` on both hosts.
    pub orphan_retries: u8,
    /// The proxy before the destination, with its handling of connection ends; `None` without a proxy.
    pub proxy: Option<EndMapping>,
    /// Rate of the link from the switchover on, in kbit/s. A low rate makes the handover slower. `None` without a
    /// limit.
    pub slow: Option<u32>,
    /// True if the two sides use TLS.
    #[serde(default)]
    pub tls: bool,
}

/// A process of a migration that a fault can affect.
#[derive(Debug, Clone, Copy, PartialEq, Eq, Serialize, Deserialize)]
#[serde(rename_all = "snake_case")]
pub enum Party {
    /// The QEMU or built-in guest at the source.
    SourceGuest,
    /// The source's command: `migrate` or `relay source`.
    SourceCommand,
    /// The destination's command: `serve` or `relay destination`.
    DestinationCommand,
    /// The QEMU or built-in guest at the destination.
    DestinationGuest,
}

/// A signal that asks a command to end in order.
#[derive(Debug, Clone, Copy, PartialEq, Eq, Serialize, Deserialize)]
#[serde(rename_all = "snake_case")]
pub enum Asking {
    /// SIGINT.
    Int,
    /// SIGTERM.
    Term,
    /// SIGHUP.
    Hup,
}

/// Behaviour of a client that does not belong to the migration.
#[derive(Debug, Clone, Copy, PartialEq, Eq, Serialize, Deserialize)]
#[serde(rename_all = "snake_case")]
pub enum Stranger {
    /// The client sends nothing.
    Idle,
    /// The client sends random bytes.
    Garbage,
    /// The client sends the first bytes of a source, and stops.
    HalfOpening,
}

/// A migration capability of QEMU that a case enables before the migration.
#[derive(Debug, Clone, Copy, PartialEq, Eq, Serialize, Deserialize)]
#[serde(rename_all = "kebab-case")]
#[expect(missing_docs, reason = "QEMU's own names")]
pub enum Capability {
    AutoConverge,
    BackgroundSnapshot,
    Compress,
    DirtyBitmaps,
    DirtyLimit,
    Events,
    LateBlockActivate,
    MappedRam,
    Multifd,
    PauseBeforeSwitchover,
    PostcopyRam,
    RdmaPinAll,
    ReleaseRam,
    ReturnPath,
    SwitchoverAck,
    ValidateUuid,
    XColo,
    XIgnoreShared,
    Xbzrle,
    ZeroCopySend,
}

impl Capability {
    /// All capabilities with their weights. Capabilities that change which pages a stream contains are drawn more
    /// often.
    const ALL: [(u32, Self); 20] = [
        (1, Self::AutoConverge),
        (3, Self::BackgroundSnapshot),
        (1, Self::Compress),
        (1, Self::DirtyBitmaps),
        (1, Self::DirtyLimit),
        (1, Self::Events),
        (1, Self::LateBlockActivate),
        (3, Self::MappedRam),
        (1, Self::Multifd),
        (1, Self::PauseBeforeSwitchover),
        (1, Self::PostcopyRam),
        (1, Self::RdmaPinAll),
        (1, Self::ReleaseRam),
        (1, Self::ReturnPath),
        (1, Self::SwitchoverAck),
        (1, Self::ValidateUuid),
        (1, Self::XColo),
        (4, Self::XIgnoreShared),
        (1, Self::Xbzrle),
        (1, Self::ZeroCopySend),
    ];

    /// Returns the name of the capability in QMP.
    #[must_use]
    pub fn name(self) -> &'static str {
        match self {
            Self::AutoConverge => "auto-converge",
            Self::BackgroundSnapshot => "background-snapshot",
            Self::Compress => "compress",
            Self::DirtyBitmaps => "dirty-bitmaps",
            Self::DirtyLimit => "dirty-limit",
            Self::Events => "events",
            Self::LateBlockActivate => "late-block-activate",
            Self::MappedRam => "mapped-ram",
            Self::Multifd => "multifd",
            Self::PauseBeforeSwitchover => "pause-before-switchover",
            Self::PostcopyRam => "postcopy-ram",
            Self::RdmaPinAll => "rdma-pin-all",
            Self::ReleaseRam => "release-ram",
            Self::ReturnPath => "return-path",
            Self::SwitchoverAck => "switchover-ack",
            Self::ValidateUuid => "validate-uuid",
            Self::XColo => "x-colo",
            Self::XIgnoreShared => "x-ignore-shared",
            Self::Xbzrle => "xbzrle",
            Self::ZeroCopySend => "zero-copy-send",
        }
    }
}

/// A change of the guest's power state.
#[derive(Debug, Clone, Copy, PartialEq, Eq, Serialize, Deserialize)]
#[serde(rename_all = "snake_case")]
pub enum PowerChange {
    /// The guest powers off, and its QEMU ends.
    Off,
    /// The guest powers off, and its QEMU stays (`-no-shutdown`).
    OffKept,
    /// The guest is reset.
    Reset,
}

/// Firewall rules on the source's host that another program loaded, in addition to the agent's rules.
#[derive(Debug, Clone, Copy, PartialEq, Eq, Serialize, Deserialize)]
#[serde(rename_all = "snake_case")]
pub enum ForeignRules {
    /// A `notrack` rule for the ports of migrations.
    Notrack,
    /// A nat chain that runs before the agent's chain and accepts these ports.
    EarlierAccept,
    /// A nat chain that runs before the agent's chain and redirects these ports elsewhere.
    EarlierDnat,
    /// A rule that marks packets to these ports.
    Mark,
    /// A masquerade rule for all outgoing packets.
    Masquerade,
}

impl ForeignRules {
    /// Returns true if the rules prevent the agent's redirect of migrations.
    #[must_use]
    pub fn bypass_redirect(self) -> bool {
        matches!(
            self,
            Self::Notrack | Self::EarlierAccept | Self::EarlierDnat
        )
    }
}

/// Kind of a fault, with its parameters.
#[derive(Debug, Clone, Copy, PartialEq, Eq, Serialize, Deserialize)]
#[serde(rename_all = "snake_case")]
pub enum Kind {
    /// The link between the hosts is down.
    LinkDown {
        /// Duration in seconds.
        secs: u64,
        /// End of the link that is taken down.
        at: End,
    },
    /// The proxy ends all connections.
    Cut {
        /// How the connections end.
        how: Ending,
        /// Number of bytes from the destination that still pass.
        after: u64,
    },
    /// The proxy delays all data.
    Delay {
        /// Delay in milliseconds.
        ms: u64,
    },
    /// A process is killed by SIGKILL.
    Kill {
        /// Process that is killed.
        party: Party,
    },
    /// A process is stopped by SIGSTOP, and continued later by SIGCONT.
    Freeze {
        /// Process that is stopped.
        party: Party,
        /// Duration in seconds.
        secs: u64,
    },
    /// A process receives a signal that asks it to end.
    Signal {
        /// Process that receives the signal.
        party: Party,
        /// Signal that is sent.
        signal: Asking,
    },
    /// The source receives the QMP command `migrate_cancel`.
    Cancel,
    /// A QMP socket stops answering.
    QmpStall {
        /// Side of the migration whose QMP socket stops answering.
        at: End,
        /// Duration in seconds.
        secs: u64,
    },
    /// An output of a process accepts no data.
    Output {
        /// Process with the defective output.
        party: Party,
        /// Standard output or standard error.
        stream: Stream,
        /// Kind of the defect.
        output: Output,
    },
    /// Unknown clients repeatedly connect to the waiting destination.
    Strangers {
        /// Kind of client.
        who: Stranger,
    },
    /// A host loses all packets in both directions, as after a power failure.
    PowerLoss {
        /// Duration in seconds; `None` for a power loss until the end of the case.
        secs: Option<u64>,
        /// Host that loses packets.
        at: End,
    },
    /// Another process locks the destination's disk image, and keeps the lock.
    LockedDisk,
    /// A capability of a QEMU is enabled before the migration.
    CapabilityOn {
        /// Host of the QEMU.
        at: End,
        /// The capability.
        name: Capability,
    },
    /// The guest powers off or is reset.
    Power {
        /// The change of the power state.
        change: PowerChange,
    },
    /// Firewall rules of another program are loaded on the source's host.
    Foreign {
        /// The rules.
        rules: ForeignRules,
    },
}

impl Kind {
    /// Returns the short name of the kind, as tables show it.
    #[must_use]
    pub fn name(&self) -> &'static str {
        match self {
            Self::LinkDown { .. } => "link down",
            Self::Cut {
                how: Ending::Fin, ..
            } => "connections cut, FIN",
            Self::Cut {
                how: Ending::Reset, ..
            } => "connections cut, RST",
            Self::Delay { .. } => "slow proxy",
            Self::Kill { .. } => "process killed",
            Self::Freeze { .. } => "process stopped, continued",
            Self::Signal {
                signal: Asking::Int,
                ..
            } => "SIGINT",
            Self::Signal {
                signal: Asking::Term,
                ..
            } => "SIGTERM",
            Self::Signal {
                signal: Asking::Hup,
                ..
            } => "SIGHUP",
            Self::Cancel => "migrate_cancel",
            Self::QmpStall { .. } => "QMP silent",
            Self::Output {
                output: Output::Closed,
                ..
            } => "output closed",
            Self::Output {
                output: Output::Full,
                ..
            } => "output full",
            Self::Output {
                output: Output::Device,
                ..
            } => "output /dev/full",
            Self::Strangers { .. } => "strangers",
            Self::PowerLoss { secs: Some(_), .. } => "power loss",
            Self::PowerLoss { secs: None, .. } => "power loss for ever",
            Self::LockedDisk => "disk locked",
            Self::CapabilityOn { .. } => "capability on",
            Self::Power {
                change: PowerChange::Reset,
            } => "guest reset",
            Self::Power { .. } => "guest powers off",
            Self::Foreign { .. } => "foreign firewall rules",
        }
    }

    /// Returns the duration of the fault; 0 for a fault without a duration. A permanent power loss counts as the peer's
    /// silence timeout.
    #[must_use]
    pub fn lasts(&self) -> Duration {
        match self {
            Self::LinkDown { secs, .. }
            | Self::Freeze { secs, .. }
            | Self::QmpStall { secs, .. }
            | Self::PowerLoss {
                secs: Some(secs), ..
            } => Duration::from_secs(*secs),
            Self::PowerLoss { secs: None, .. } => Limits::default().silence_timeout,
            _ => Duration::ZERO,
        }
    }

    /// Returns true if the fault is a signal that asks the process `whom` to end.
    #[must_use]
    pub fn asks(&self, whom: Party) -> bool {
        matches!(self, Self::Signal { party, .. } if *party == whom)
    }

    /// Returns true if the fault powers the guest off.
    #[must_use]
    pub fn powers_off(&self) -> bool {
        matches!(self, Self::Power { change } if *change != PowerChange::Reset)
    }

    /// Returns true if the fault lasts longer than a source in doubt queries the outcome (`settle-timeout`).
    #[must_use]
    pub fn outlasts_settling(&self) -> bool {
        matches!(self, Self::PowerLoss { secs: None, .. })
    }

    /// Returns true if the fault must be present before the processes start.
    #[must_use]
    pub fn is_from_the_start(&self) -> bool {
        let device = Output::Device;
        matches!(self, Self::Output { output, .. } if *output == device)
            || matches!(self, Self::CapabilityOn { .. })
    }
}

/// Time of a fault, as a phase of the migration.
#[derive(Debug, Clone, Copy, PartialEq, Eq, Serialize, Deserialize)]
#[serde(rename_all = "snake_case")]
pub enum Moment {
    /// From the request to migrate on.
    Setup,
    /// From the first sent pages on.
    Round,
    /// From the pause of the guest for the last round on.
    Switchover,
    /// When the network has lost this message of the handover.
    Lost(Message),
    /// When the guest runs at the destination. The commands may not have received the report yet.
    Arrived,
    /// When the source's side has ended.
    After,
}

/// A fault: kind and time.
#[derive(Debug, Clone, Copy, PartialEq, Eq, Serialize, Deserialize)]
pub struct Fault {
    /// Kind of the fault.
    pub kind: Kind,
    /// Phase of the migration after which the fault occurs.
    pub moment: Moment,
    /// Delay after the start of the phase, in milliseconds.
    pub delay_ms: u64,
}

/// One case of the fault campaign.
#[derive(Debug, Clone, PartialEq, Eq, Serialize, Deserialize)]
pub struct Case {
    /// Number of the case in the campaign's list.
    pub number: u64,
    /// Seed that the case was drawn from.
    pub seed: u64,
    /// Programs on both sides.
    pub pair: Pair,
    /// Network between the hosts.
    pub net: Net,
    /// Faults of the case.
    pub faults: Vec<Fault>,
}

/// Returns the seed of case `number`. SplitMix64 mixes campaign and number, which makes the seeds of adjacent cases
/// completely different.
fn seed_of(campaign: u64, number: u64) -> u64 {
    let mut z = campaign.wrapping_add(number.wrapping_add(1).wrapping_mul(0x9e37_79b9_7f4a_7c15));
    z = (z ^ (z >> 30)).wrapping_mul(0xbf58_476d_1ce4_e5b9);
    z = (z ^ (z >> 27)).wrapping_mul(0x94d0_49bb_1331_11eb);
    z ^ (z >> 31)
}

/// Returns one of `choices`, with a probability proportional to its weight.
fn weighted<T: Copy>(rng: &mut Rng, choices: &[(u32, T)]) -> T {
    let sum = choices.iter().map(|(weight, _)| weight).sum();
    let mut drawn = rng.u32(0..sum);
    for (weight, choice) in choices {
        if drawn < *weight {
            return *choice;
        }
        drawn -= weight;
    }
    unreachable!("less than the sum")
}

impl Case {
    /// Draws case `number` of the campaign with the seed `campaign`.
    #[must_use]
    pub fn draw(campaign: u64, number: u64) -> Self {
        let seed = seed_of(campaign, number);
        let mut rng = Rng::with_seed(seed);
        let pair = draw_pair(&mut rng);
        let mut net = Net {
            mtu: *rng.choice(&[540, 1500]).unwrap_or(&1500),
            orphan_retries: rng.u8(0..2),
            proxy: None,
            slow: None,
            tls: false,
        };
        // A low rate spreads most handovers over some hundred milliseconds.
        if rng.u8(0..4) > 0 {
            net.slow = Some(*rng.choice(&[4000, 8000, 16_000, 32_000]).unwrap_or(&8000));
        }
        if rng.u8(0..3) == 0 {
            let mappings = [
                EndMapping::AsIs,
                EndMapping::AllToFin,
                EndMapping::AllToReset,
            ];
            net.proxy = rng.choice(&mappings).copied();
        }
        let count = weighted(&mut rng, &[(80, 1), (20, 2)]);
        let mut faults: Vec<Fault> = Vec::new();
        for _ in 0..count {
            let fault = draw_fault(&mut rng, &pair);
            // At most one fault of each name. Only one power change per QEMU, because the command line fixes power-off
            // or reset.
            let is_like = |other: &Fault| {
                let power = |kind| matches!(kind, Kind::Power { .. });
                other.kind.name() == fault.kind.name() || power(other.kind) && power(fault.kind)
            };
            if !faults.iter().any(is_like) {
                faults.push(fault);
            }
        }
        let needs_proxy =
            |fault: &Fault| matches!(fault.kind, Kind::Cut { .. } | Kind::Delay { .. });
        if faults.iter().any(needs_proxy) {
            net.proxy.get_or_insert(EndMapping::AsIs);
        }
        // An encrypted message cannot be recognised, so it cannot be dropped selectively.
        let is_lost = |fault: &Fault| matches!(fault.moment, Moment::Lost(_));
        net.tls = rng.bool() && !faults.iter().any(is_lost);
        if let Pair::Agents { .. } = pair {
            // Agents always use certificates and connect directly.
            (net.proxy, net.tls) = (None, true);
        }
        Self {
            number,
            seed,
            pair,
            net,
            faults,
        }
    }

    /// Returns the faults that occurred; `fired` has an entry for each fault of the case.
    pub fn happened(&self, fired: &[bool]) -> impl Iterator<Item = &Kind> {
        let both = self.faults.iter().zip(fired);
        both.filter(|(_, fired)| **fired)
            .map(|(fault, _)| &fault.kind)
    }

    /// Returns the sum of the durations of all faults.
    #[must_use]
    pub fn lasts(&self) -> Duration {
        self.faults.iter().map(|fault| fault.kind.lasts()).sum()
    }

    /// Returns true if `is_so` returns true for a fault of the case.
    pub fn has(&self, is_so: impl Fn(&Kind) -> bool) -> bool {
        self.faults.iter().any(|fault| is_so(&fault.kind))
    }
}

fn draw_pair(rng: &mut Rng) -> Pair {
    let release = |rng: &mut Rng| {
        let releases = [Release::V7, Release::V10, Release::V11];
        *rng.choice(&releases).unwrap_or(&Release::V10)
    };
    match weighted(rng, &[(10, 0), (8, 1), (4, 2), (2, 3)]) {
        0 => Pair::BuiltIn {
            guest: match rng.bool() {
                true => BuiltIn::Threads,
                false => BuiltIn::Kvm,
            },
            vcpus: *rng.choice(&[1, 8]).unwrap_or(&1),
            channels: weighted(rng, &[(1, 0), (3, 2), (1, 8)]),
            monitored: rng.u8(0..4) > 0,
        },
        1 => Pair::Steered {
            from: release(rng),
            to: release(rng),
            started: rng.bool(),
        },
        2 => Pair::Relays {
            from: release(rng),
            to: release(rng),
        },
        _ => Pair::Agents {
            from: release(rng),
            to: release(rng),
            channels: weighted(rng, &[(1, 0), (1, 2)]),
        },
    }
}

fn draw_moment(rng: &mut Rng) -> (Moment, u64) {
    match weighted(rng, &[(2, 0), (3, 1), (8, 2), (1, 3), (3, 4)]) {
        0 => (Moment::Setup, rng.u64(0..200)),
        1 => (Moment::Round, rng.u64(0..400)),
        2 => (Moment::Switchover, rng.u64(0..400)),
        4 => (Moment::Arrived, rng.u64(0..50)),
        _ => (Moment::After, rng.u64(0..1000)),
    }
}

fn draw_fault(rng: &mut Rng, pair: &Pair) -> Fault {
    let commands = pair.has_commands();
    let (mut moment, mut delay_ms) = draw_moment(rng);
    let ends = [(1, End::Source), (1, End::Destination)];
    let any_party = match commands {
        true => &[
            (1, Party::SourceGuest),
            (2, Party::SourceCommand),
            (2, Party::DestinationCommand),
            (1, Party::DestinationGuest),
        ][..],
        false => &[(1, Party::SourceGuest), (1, Party::DestinationGuest)],
    };
    // Only Hotlift's own processes: QEMU handles signals and output in its own way.
    let ours = match commands {
        true => &[(1, Party::SourceCommand), (1, Party::DestinationCommand)][..],
        false => any_party,
    };
    let agents = matches!(pair, Pair::Agents { .. });
    let steered = matches!(pair, Pair::Steered { .. });
    // `old`: weight of a fault for pairs without agents. `only`: weight of a fault that some pairs cannot have.
    let old = |weight| if agents { 0 } else { weight };
    let only = |has: bool, weight| if has { weight } else { 0 };
    let kind = match weighted(
        rng,
        &[
            (30, 0),
            (old(10), 1),
            (old(2), 2),
            (old(12), 3),
            (old(8), 4),
            (old(12), 5),
            (4, 6),
            (old(only(commands, 12)), 7),
            (old(12), 8),
            (old(8), 9),
            (14, 10),
            (only(steered, 20), 11),
            (only(steered, 30), 12),
            (only(commands, 30), 13),
            (only(agents, 80), 14),
        ],
    ) {
        fault @ (0 | 10) => {
            // Relays and monitored guests wait for the driver of the test before the handover.
            if moment == Moment::Switchover && pair.is_held_before_switchover() && rng.bool() {
                let messages = [
                    Message::Pong,
                    Message::Commit,
                    Message::RestOfCommit,
                    Message::Shut,
                ];
                moment = Moment::Lost(*rng.choice(&messages).unwrap_or(&Message::Shut));
                delay_ms = 0;
            }
            let at = weighted(rng, &ends);
            if fault == 0 {
                let secs = weighted(rng, &[(40, 1), (25, 3), (20, 6), (6, 20), (3, 90)]);
                Kind::LinkDown { secs, at }
            } else {
                // Most durations are shorter than the product's timeouts, so that a campaign has many faults. 32 s is
                // below the silence timeout, but longer than kernels before 6.15 certainly retransmit.
                let secs = weighted(
                    rng,
                    &[
                        (30, Some(5)),
                        (30, Some(20)),
                        (10, Some(32)),
                        (12, Some(60)),
                        (18, None),
                    ],
                );
                Kind::PowerLoss { secs, at }
            }
        }
        1 => {
            let later = rng.u64(1..64);
            Kind::Cut {
                how: weighted(rng, &[(1, Ending::Fin), (1, Ending::Reset)]),
                after: weighted(rng, &[(1, 0), (1, later)]),
            }
        }
        2 => Kind::Delay { ms: rng.u64(1..20) },
        3 => Kind::Kill {
            party: weighted(rng, any_party),
        },
        4 => Kind::Freeze {
            party: weighted(rng, any_party),
            secs: weighted(rng, &[(6, 1), (4, 3), (3, 6), (1, 20)]),
        },
        5 => Kind::Signal {
            party: weighted(rng, ours),
            signal: weighted(
                rng,
                &[(1, Asking::Int), (1, Asking::Term), (1, Asking::Hup)],
            ),
        },
        6 => Kind::Cancel,
        7 => Kind::QmpStall {
            at: weighted(rng, &ends),
            secs: weighted(rng, &[(14, 5), (5, 40), (1, 200)]),
        },
        8 => Kind::Output {
            party: weighted(rng, ours),
            stream: weighted(rng, &[(1, Stream::Stdout), (2, Stream::Stderr)]),
            output: weighted(
                rng,
                &[(2, Output::Closed), (1, Output::Full), (1, Output::Device)],
            ),
        },
        9 => Kind::Strangers {
            who: weighted(
                rng,
                &[
                    (1, Stranger::Idle),
                    (1, Stranger::Garbage),
                    (1, Stranger::HalfOpening),
                ],
            ),
        },
        11 => Kind::LockedDisk,
        12 => Kind::CapabilityOn {
            at: match pair {
                Pair::Steered { started: false, .. } => {
                    weighted(rng, &[(2, End::Source), (1, End::Destination)])
                }
                // Only `serve` starts the QEMU of this side, with all capabilities disabled.
                _ => End::Source,
            },
            name: weighted(rng, &Capability::ALL),
        },
        13 => Kind::Power {
            change: weighted(
                rng,
                &[
                    (1, PowerChange::Off),
                    (1, PowerChange::OffKept),
                    (2, PowerChange::Reset),
                ],
            ),
        },
        _ => Kind::Foreign {
            rules: weighted(
                rng,
                &[
                    (3, ForeignRules::Notrack),
                    (2, ForeignRules::EarlierAccept),
                    (2, ForeignRules::EarlierDnat),
                    (1, ForeignRules::Mark),
                    (1, ForeignRules::Masquerade),
                ],
            ),
        },
    };
    let kind = with_reader_of_standard_output(kind, pair);
    match (kind, moment) {
        // In later phases the destination has already locked its disk.
        (Kind::LockedDisk, Moment::Arrived | Moment::After) => moment = Moment::Round,
        // A power change has no effect on a paused guest.
        (Kind::Power { .. }, Moment::Switchover) => moment = Moment::Round,
        (Kind::Foreign { .. }, Moment::Arrived | Moment::After) => {
            (moment, delay_ms) = (Moment::Setup, 0);
        }
        _ => {}
    }
    // Unknown clients connect throughout. Faults for which `is_from_the_start` is true must precede the processes.
    if matches!(kind, Kind::Strangers { .. }) || kind.is_from_the_start() {
        (moment, delay_ms) = (Moment::Setup, 0);
    }
    Fault {
        kind,
        moment,
        delay_ms,
    }
}

/// Replaces a fault at the standard output of a source without a monitor, because the output reports where the guest
/// is.
fn with_reader_of_standard_output(kind: Kind, pair: &Pair) -> Kind {
    match kind {
        Kind::Output {
            party: Party::SourceGuest,
            output,
            ..
        } if pair.is_unmonitored() => Kind::Output {
            party: Party::SourceGuest,
            stream: Stream::Stderr,
            output,
        },
        kind => kind,
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn a_seed_decides_every_case_and_neighbours_differ() {
        let list = |seed| {
            (0..200)
                .map(move |number| Case::draw(seed, number))
                .collect::<Vec<_>>()
        };
        assert_eq!(list(1), list(1));
        assert_ne!(list(1)[7].faults, list(2)[7].faults);
        let text = serde_json::to_string(&list(1)[7]).unwrap();
        assert_eq!(serde_json::from_str::<Case>(&text).unwrap(), list(1)[7]);
    }

    #[test]
    fn every_kind_of_fault_is_drawn_for_every_possible_pair() {
        let cases: Vec<Case> = (0..5000).map(|number| Case::draw(1, number)).collect();
        for (pair, all) in [
            ("built-in guests", 16),
            ("migrate and serve", 21),
            ("bare relays", 19),
            ("agents", 7),
        ] {
            let mut names: Vec<_> = cases
                .iter()
                .filter(|case| case.pair.name() == pair)
                .flat_map(|case| case.faults.iter().map(|fault| fault.kind.name()))
                .collect();
            names.sort_unstable();
            names.dedup();
            assert_eq!(names.len(), all, "{pair}: {names:?}");
        }
    }

    #[test]
    fn cases_of_older_lists_are_readable() {
        let results = concat!(env!("CARGO_MANIFEST_DIR"), "/../../bench/results");
        for list in ["2026-11-23-campaign", "2026-11-23-campaign-tls"] {
            let text = std::fs::read_to_string(format!("{results}/{list}/cases.jsonl")).unwrap();
            for line in text.lines() {
                serde_json::from_str::<Case>(line).unwrap();
            }
        }
    }

    #[test]
    fn every_release_is_drawn_on_both_sides_of_every_other() {
        let mut drawn: Vec<_> = (0..5000)
            .filter_map(|number| match Case::draw(1, number).pair {
                Pair::BuiltIn { .. } => None,
                Pair::Steered { from, to, .. } => Some((from.name(), to.name(), true)),
                Pair::Relays { from, to } => Some((from.name(), to.name(), false)),
                Pair::Agents { .. } => None,
            })
            .collect();
        drawn.sort_unstable();
        drawn.dedup();
        assert_eq!(drawn.len(), 2 * 3 * 3, "{drawn:?}");
    }
}

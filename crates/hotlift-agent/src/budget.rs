//! Divides the host's bandwidth and cores among its sessions, by weight. A session is a migration or a tunnel.
//!
//! Outgoing migrations get a share of both; tunnels get a share of the bandwidth only. The division is repeated four times a
//! second:
//!
//! - Sessions with a paused guest are served first.
//! - A session that needs less than its share leaves the rest to the other sessions.
//! - The shares of the active sessions never exceed the total.
//! - An idle session also gets a share, which reduces no other share: a tunnel of a disk copy can send immediately.
//!
//! A rate limiter that all sessions use enforces the total bandwidth over any second. The shares alone do not: eight migrations
//! that each send a packet at the same time would exceed the total.

use std::collections::HashMap;
use std::sync::{Arc, Mutex};
use std::time::{Duration, Instant};

use hotlift::control::SharedRate;
use hotlift::options::StreamOptions;
use hotlift_mem::lock;

use crate::config::Config;
use crate::messages::{Id, Kind};
use crate::session::Session;
use crate::snapshot::{Share, Snapshot, State};

/// Interval at which the budget is divided again.
pub(crate) const ROUND: Duration = Duration::from_millis(250);

/// A session needs its whole share if it used at least this percentage of the share.
const NEEDS_ALL: u64 = 80;

/// Next share of a session that did not need its whole share, in percent of the use: the use can grow by half per interval.
const ROOM: u64 = 150;

/// The total divided by this number is the smallest share of a session without priority: enough to show a larger demand.
const MIN_SHARE: u64 = 64;

/// Weight, use and limits of a session. A unit is a byte for bandwidth, and a thousandth of a core for CPU time.
#[derive(Debug, Clone, Copy, Default, PartialEq, Eq)]
pub struct Claim {
    /// Weight of the session in the division; 0 counts as 1.
    pub weight: u32,
    /// Recent use by the session, in units a second.
    pub used: u64,
    /// Current share of the session, in units a second; 0 if the use of this share is unknown.
    pub current_share: u64,
    /// Limit of the session, in units a second; 0 is unlimited.
    pub limit: u64,
    /// True if the session is served before sessions without this flag, since its guest is paused.
    pub is_urgent: bool,
}

impl Claim {
    /// Returns true if the session used nothing of its current share, and has no priority.
    fn is_idle(&self) -> bool {
        self.used == 0 && self.current_share > 0 && !self.is_urgent
    }

    /// Returns the limit of the session; [`u64::MAX`] if it has none.
    fn limit(&self) -> u64 {
        match self.limit {
            0 => u64::MAX,
            limit => limit,
        }
    }

    /// Returns the units a second that the session can use, if all sessions together may use `total`.
    fn want(&self, total: u64) -> u64 {
        let limit = self.limit();
        let needs_all =
            self.current_share == 0 || self.used >= self.current_share / 100 * NEEDS_ALL;
        if self.is_urgent || needs_all {
            return limit;
        }
        limit.min((self.used / 100 * ROOM).max(total / MIN_SHARE))
    }
}

/// Divides `total` units a second among the sessions of `claims`; returns one share for each. A `total` of 0 is unlimited: then
/// each share is the session's own limit. Otherwise each share is at least 1.
#[must_use]
pub fn divide(total: u64, claims: &[Claim]) -> Vec<u64> {
    if total == 0 {
        return claims.iter().map(|claim| claim.limit).collect();
    }
    let wants: Vec<_> = claims
        .iter()
        .map(|claim| (u64::from(claim.weight.max(1)), claim.want(total)))
        .collect();
    let mut parts = vec![0; claims.len()];
    let urgent = |index: &usize| claims[*index].is_urgent;
    let is_idle = |index: &usize| claims[*index].is_idle();
    let (idle, active): (Vec<_>, Vec<_>) = (0..claims.len()).partition(is_idle);
    let (first, others): (Vec<_>, Vec<_>) = active.iter().partition(|index| urgent(index));
    // The total for the first group leaves the smallest shares of the sessions without priority.
    let least = match (first.is_empty(), u64::try_from(others.len())) {
        (false, Ok(others)) => (total / MIN_SHARE).min(total / (others + 1)) * others,
        _ => total,
    };
    let mut left = total;
    for (group, most) in [(&first, total - least.min(total)), (&others, total)] {
        left -= fill(left.min(most), &wants, group, &mut parts);
    }
    // No active session needs the rest, so the active sessions share the rest by weight, as their use may grow. An idle session
    // gets the share that it would have if all sessions needed their shares.
    let all: Vec<_> = (0..claims.len()).collect();
    for (some, among, rest) in [(&active, &active, left), (&idle, &all, total)] {
        let weights = among.iter().map(|index| u128::from(wants[*index].0));
        let weights = weights.sum::<u128>().max(1);
        for index in some {
            let more = u128::from(rest) * u128::from(wants[*index].0) / weights;
            parts[*index] += u64::try_from(more).unwrap_or(u64::MAX);
        }
    }
    let capped = parts.into_iter().zip(claims);
    capped
        .map(|(part, claim)| part.min(claim.limit()).max(1))
        .collect()
}

/// Divides `total` among the sessions of `group` by weight, up to the demand of each session. Writes the shares to `parts`, and
/// returns their sum. `wants` has weight and demand of each session.
fn fill(total: u64, wants: &[(u64, u64)], group: &[usize], parts: &mut [u64]) -> u64 {
    let mut open = group.to_vec();
    let mut left = total;
    while !open.is_empty() {
        let weights: u128 = open.iter().map(|index| u128::from(wants[*index].0)).sum();
        let part = |index: usize| {
            let part = u128::from(left) * u128::from(wants[index].0) / weights;
            u64::try_from(part).unwrap_or(u64::MAX)
        };
        let (content, hungry): (Vec<_>, Vec<_>) = open
            .iter()
            .partition(|index| wants[**index].1 <= part(**index));
        if content.is_empty() {
            let given: Vec<_> = hungry.iter().map(|index| (*index, part(*index))).collect();
            for (index, part) in given {
                parts[index] = part;
                left -= part;
            }
            break;
        }
        for index in content {
            parts[index] = wants[index].1;
            left -= wants[index].1;
        }
        open = hungry;
    }
    total - left
}

/// State of the division between two intervals.
#[derive(Default)]
pub struct Shares {
    usage: Mutex<Usage>,
    /// Rate limiter that all sessions use. It enforces the total bandwidth; the shares only divide it.
    pub rate: SharedRate,
}

/// A session that shares the budget.
struct BudgetUser {
    id: Id,
    snapshot: Snapshot,
    is_urgent: bool,
    /// CPU time that the session has used since its start; `None` if it has no relay: a tunnel, or a migration to a host
    /// without an agent.
    cpu: Option<Duration>,
}

/// CPU use of each session.
#[derive(Default)]
struct Usage(HashMap<Id, Cpu>);

/// Last sample of a session's CPU time.
struct Cpu {
    time: Duration,
    at: Instant,
    /// Recent use, in thousandths of a core.
    used: u64,
}

impl Shares {
    /// Divides the budget of `config` among `sessions`, and sets the share of each session. `options` are the stream options of
    /// outgoing migrations.
    pub fn apply(&self, config: &Config, options: &StreamOptions, sessions: Vec<Arc<Session>>) {
        self.rate.set(config.max_bandwidth.0);
        let users = sessions.into_iter().filter_map(|session| {
            let snapshot = session.snapshot();
            let shares = session.shares_budget() && snapshot.state != State::Waiting;
            let has_relay =
                session.subject.kind == Kind::Migration && snapshot.state != State::PassedThrough;
            let user = BudgetUser {
                id: session.subject.id,
                snapshot,
                is_urgent: session.is_urgent(),
                cpu: has_relay.then(|| session.control.cpu_time()),
            };
            shares.then_some((session, user))
        });
        let (sessions, users): (Vec<_>, Vec<_>) = users.unzip();
        let mut usage = lock(&self.usage);
        let shares = usage.share(config, &users, Instant::now());
        for (session, share) in sessions.iter().zip(shares) {
            session.set_share(share, config.max_bandwidth.0, options);
        }
    }
}

impl Usage {
    /// Returns the share of each session of `users` in the budget of `config` at `now`.
    fn share(&mut self, config: &Config, users: &[BudgetUser], now: Instant) -> Vec<Share> {
        self.0
            .retain(|id, _| users.iter().any(|user| user.id == *id));
        let (mut bandwidth, mut cpu) = (Vec::new(), Vec::new());
        for BudgetUser {
            id,
            snapshot,
            is_urgent,
            cpu: time,
        } in users
        {
            let claim = Claim {
                weight: snapshot.weight,
                is_urgent: *is_urgent,
                ..Claim::default()
            };
            // Before the session's first report, its use is unknown.
            let current_share = |part: u64| match snapshot.progress.elapsed.is_zero() {
                true => 0,
                false => part,
            };
            // The rate is below 2^63 and not negative.
            #[allow(clippy::cast_possible_truncation, clippy::cast_sign_loss)]
            let used = snapshot.rate as u64;
            bandwidth.push(Claim {
                used,
                current_share: current_share(snapshot.share.bandwidth),
                limit: snapshot.limit,
                ..claim
            });
            cpu.push(time.map(|time| Claim {
                // At least 1, so that no session counts as idle: shares of idle sessions are not counted in the total, and no
                // rate limiter enforces the total of the cores.
                used: self.cores(*id, time, now).max(1),
                current_share: current_share(snapshot.share.cpu.into()),
                ..claim
            }));
        }
        // The range check of the configuration excludes a truncation or a negative value.
        #[allow(clippy::cast_possible_truncation, clippy::cast_sign_loss)]
        let cores = (config.cpu_limit * 1000.0).ceil() as u64;
        let claims: Vec<_> = cpu.iter().flatten().copied().collect();
        let mut parts = divide(cores, &claims).into_iter();
        let mut core_part = |claim: &Option<Claim>| claim.and_then(|_| parts.next()).unwrap_or(0);
        let bandwidth = divide(config.max_bandwidth.0, &bandwidth).into_iter();
        let shares = bandwidth.zip(&cpu).map(|(bandwidth, claim)| Share {
            bandwidth,
            cpu: u32::try_from(core_part(claim)).unwrap_or(u32::MAX),
        });
        shares.collect()
    }

    /// Returns the recent CPU use of the session `id`, in thousandths of a core. `time` is the session's CPU time until `now`.
    fn cores(&mut self, id: Id, time: Duration, now: Instant) -> u64 {
        let cpu = self.0.entry(id).or_insert(Cpu {
            time,
            at: now,
            used: 0,
        });
        let since = now.saturating_duration_since(cpu.at);
        if since >= ROUND / 2 {
            let thousandths =
                time.saturating_sub(cpu.time).as_micros() * 1000 / since.as_micros().max(1);
            let used = u64::try_from(thousandths).unwrap_or(u64::MAX);
            *cpu = Cpu {
                time,
                at: now,
                used,
            };
        }
        cpu.used
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    use hotlift::relay::RelayProgress;

    use crate::fixture::{agent, session, subject};
    use crate::session::Direction;

    const WHOLE: u64 = 1_000_000;

    fn claim(weight: u32, used: u64, current_share: u64) -> Claim {
        Claim {
            weight,
            used,
            current_share,
            ..Claim::default()
        }
    }

    #[test]
    fn shares_follow_the_weights_when_all_sessions_need_more() {
        let parts = divide(WHOLE, &[claim(100, 0, 0), claim(300, 0, 0)]);
        assert_eq!(parts, [WHOLE / 4, WHOLE / 4 * 3]);
        let used = [claim(100, 240_000, 250_000), claim(300, 750_000, 750_000)];
        assert_eq!(divide(WHOLE, &used), parts);
    }

    #[test]
    fn an_unused_share_goes_to_the_other_sessions() {
        let parts = divide(
            WHOLE,
            &[claim(100, 100_000, 500_000), claim(100, 500_000, 500_000)],
        );
        assert_eq!(parts, [150_000, 850_000]);
        let grown = divide(
            WHOLE,
            &[claim(100, 150_000, 150_000), claim(100, 850_000, 850_000)],
        );
        assert_eq!(
            grown,
            [500_000, 500_000],
            "one that needs more gets its part again"
        );
    }

    #[test]
    fn bandwidth_that_no_session_uses_stays_available() {
        let parts = divide(
            WHOLE,
            &[claim(100, 100_000, 500_000), claim(100, 50_000, 500_000)],
        );
        assert_eq!(parts.iter().sum::<u64>(), WHOLE);
        assert!(parts[0] > parts[1], "{parts:?}");
    }

    #[test]
    fn an_idle_session_takes_no_share_and_gets_its_own_at_once() {
        let idle = claim(100, 0, 250_000);
        let parts = divide(WHOLE, &[claim(100, 900_000, 900_000), idle, idle, idle]);
        assert_eq!(parts, [WHOLE, WHOLE / 4, WHOLE / 4, WHOLE / 4]);
        let parts = divide(WHOLE, &[idle, idle]);
        assert_eq!(parts, [WHOLE / 2; 2]);
    }

    #[test]
    fn tunnels_share_the_bandwidth_with_migrations_by_weight_while_they_send() {
        let agent = agent(&format!("max-bandwidth = \"{WHOLE}\"\ncpu-limit = 2.0"));
        let of = |id, direction, kind| {
            let (session, _listener) = session(subject(id, direction, kind));
            agent.sessions.add(&session).unwrap();
            session
        };
        let migration = of(1, Direction::Outgoing, Kind::Migration);
        let disk = of(2, Direction::Outgoing, Kind::Tunnel);
        let answers = of(3, Direction::Incoming, Kind::Tunnel);
        of(4, Direction::Incoming, Kind::Migration);
        disk.limit(None, Some(300));
        let mut seconds = 0;
        let mut share = |sent: [u64; 3]| {
            seconds += 1;
            for (session, sent) in [&migration, &disk, &answers].into_iter().zip(sent) {
                let sent_bytes = session.snapshot().progress.sent_bytes + sent;
                session.record_progress(&RelayProgress {
                    elapsed: Duration::from_secs(seconds),
                    sent_bytes,
                    ..RelayProgress::default()
                });
            }
            agent.share();
            [&migration, &disk, &answers].map(|session| session.snapshot().share)
        };
        agent.share();
        // All sessions use their whole share.
        let busy = share([WHOLE, WHOLE, 0]);
        assert_eq!(busy[0].bandwidth, WHOLE / 4);
        assert_eq!(busy[1].bandwidth, WHOLE / 4 * 3);
        assert_eq!(busy.map(|share| share.cpu), [2000, 0, 0]);
        let idle = share([WHOLE / 4, 0, 0]);
        assert_eq!(idle[0].bandwidth, WHOLE, "the disk is idle");
        let again = share([WHOLE, WHOLE / 4 * 3, 0]);
        assert_eq!(again[0].bandwidth, WHOLE / 4, "it sends again");
    }

    #[test]
    fn a_session_with_a_paused_guest_has_priority_and_leaves_the_others_a_minimum() {
        let urgent = Claim {
            is_urgent: true,
            ..claim(1, 10, 1000)
        };
        let parts = divide(
            WHOLE,
            &[urgent, claim(1000, 999_000, 999_000), claim(1000, 1, 1)],
        );
        assert_eq!(parts[0], WHOLE - 2 * (WHOLE / 64), "{parts:?}");
        assert!(
            parts[1..].iter().all(|part| *part >= WHOLE / 64),
            "{parts:?}"
        );
    }

    #[test]
    fn shares_never_exceed_the_budget_and_none_becomes_unlimited() {
        with_numbers(|draw| {
            let claims: Vec<_> = (0..1 + draw(8))
                .map(|_| Claim {
                    weight: u32::try_from(draw(1001)).unwrap(),
                    used: draw(3) * draw(WHOLE),
                    current_share: draw(WHOLE),
                    limit: draw(3) * draw(WHOLE),
                    is_urgent: draw(4) == 0,
                })
                .collect();
            let whole = 16 + draw(WHOLE);
            let parts = divide(whole, &claims);
            let active = parts
                .iter()
                .zip(&claims)
                .filter(|(_, claim)| !claim.is_idle());
            let sum: u64 = active.map(|(part, _)| *part).sum();
            assert!(
                sum <= whole + u64::try_from(parts.len()).unwrap(),
                "{claims:?}: {parts:?} of {whole}"
            );
            assert!(parts.iter().all(|part| *part > 0), "{claims:?} {parts:?}");
            for (claim, part) in claims.iter().zip(&parts) {
                assert!(
                    claim.limit == 0 || *part <= claim.limit.max(1),
                    "{claims:?} {parts:?}"
                );
            }
        });
    }

    /// Runs `test` with a source of numbers below a given bound, from a fixed sequence (xorshift64*).
    fn with_numbers(mut test: impl FnMut(&mut dyn FnMut(u64) -> u64)) {
        let mut state = 0x9e37_79b9_7f4a_7c15_u64;
        for _ in 0..2000 {
            let mut draw = |below: u64| {
                state ^= state >> 12;
                state ^= state << 25;
                state ^= state >> 27;
                state.wrapping_mul(0x2545_f491_4f6c_dd1d) % below.max(1)
            };
            test(&mut draw);
        }
    }

    /// A session with its demand, on a virtual clock.
    struct Host {
        user: BudgetUser,
        /// Bytes a second that the session would use without a limit.
        demand: u64,
        /// Thousandths of a core that the session would use without a limit.
        work: u64,
    }

    /// Runs one division: computes the use of each session since the last division, and its new share.
    fn round(usage: &mut Usage, config: &Config, hosts: &mut [Host], now: Instant) {
        for host in &mut *hosts {
            let Host { user, demand, work } = host;
            let Share { bandwidth, cpu } = user.snapshot.share;
            let may = |share: u64, whole| if whole == 0 { u64::MAX } else { share };
            let sent = (*demand).min(may(bandwidth, config.max_bandwidth.0));
            let progress = RelayProgress {
                elapsed: user.snapshot.progress.elapsed + ROUND,
                sent_bytes: user.snapshot.progress.sent_bytes + sent / 4,
                ..RelayProgress::default()
            };
            user.snapshot.record_progress(&progress, None);
            let used = (*work).min(may(cpu.into(), 1));
            if let Some(time) = &mut user.cpu {
                *time += ROUND * u32::try_from(used).unwrap() / 1000;
            }
        }
        let users: Vec<_> = hosts.iter().map(|host| host.user.again()).collect();
        let shares = usage.share(config, &users, now);
        for (host, share) in hosts.iter_mut().zip(shares) {
            host.user.snapshot.set_share(share, config.max_bandwidth.0);
        }
    }

    impl BudgetUser {
        fn again(&self) -> Self {
            Self {
                id: self.id,
                snapshot: self.snapshot.clone(),
                is_urgent: self.is_urgent,
                cpu: self.cpu,
            }
        }
    }

    #[test]
    fn a_session_that_needs_more_gets_its_share_within_a_few_rounds() {
        let mut config = agent("").config().as_ref().clone();
        config.cpu_limit = 2.0;
        config.max_bandwidth.0 = WHOLE;
        for seed in 0..500 {
            let mut rng = fastrand::Rng::with_seed(seed);
            let mut usage = Usage::default();
            let mut now = Instant::now();
            let mut hosts: Vec<_> = (0..rng.u32(1..6))
                .map(|id| Host {
                    user: BudgetUser {
                        id: Id(id),
                        snapshot: Snapshot {
                            weight: rng.u32(1..=1000),
                            ..Snapshot::default()
                        },
                        is_urgent: false,
                        cpu: (rng.u8(0..3) > 0).then_some(Duration::ZERO),
                    },
                    demand: 0,
                    work: 0,
                })
                .collect();
            // Sessions come and go, and change their demand.
            for _ in 0..30 {
                let chosen = rng.usize(0..hosts.len());
                hosts[chosen].demand = *rng.choice(&[0, WHOLE / 100, 10 * WHOLE]).unwrap();
                hosts[chosen].work = rng.u64(0..4000);
                now += ROUND;
                round(&mut usage, &config, &mut hosts, now);
            }
            // All sessions demand the total.
            for host in &mut hosts {
                (host.demand, host.work) = (10 * WHOLE, 10_000);
            }
            for _ in 0..12 {
                now += ROUND;
                round(&mut usage, &config, &mut hosts, now);
            }
            let weights: u32 = hosts.iter().map(|host| host.user.snapshot.weight).sum();
            let relays = || hosts.iter().filter(|host| host.user.cpu.is_some());
            let of_relays: u32 = relays().map(|host| host.user.snapshot.weight).sum();
            for host in &hosts {
                let Snapshot { weight, share, .. } = host.user.snapshot;
                let part = WHOLE * u64::from(weight) / u64::from(weights);
                assert!(
                    share.bandwidth.abs_diff(part) <= 8,
                    "seed {seed}: {share:?} is not {part}"
                );
                // The use is rounded, and one session gets the remainder of a division.
                let cores = match host.user.cpu {
                    Some(_) => 2000 * weight / of_relays,
                    None => 0,
                };
                assert!(
                    share.cpu.abs_diff(cores) <= 4,
                    "seed {seed}: {share:?} is not {cores}"
                );
            }
            // Ended sessions are removed.
            hosts.truncate(1);
            round(&mut usage, &config, &mut hosts, now + ROUND);
            assert!(usage.0.len() <= 1, "seed {seed}");
        }
    }

    #[test]
    fn cpu_usage_is_measured_over_half_a_round_at_least() {
        const MS: Duration = Duration::from_millis(1);
        let (mut usage, begun) = (Usage::default(), Instant::now());
        let mut used =
            |ms: u64, at: Duration| usage.cores(Id(1), Duration::from_millis(ms), begun + at);
        assert_eq!(used(500, Duration::ZERO), 0, "nothing is known");
        assert_eq!(used(600, ROUND / 2 - MS), 0, "too soon");
        assert_eq!(used(625, ROUND / 2), 1000);
        assert_eq!(used(900, ROUND / 2 + MS), 1000, "kept");
        assert_eq!(used(1125, ROUND), 4000);
    }

    #[test]
    fn without_a_host_limit_each_session_keeps_its_own() {
        let own = Claim {
            limit: 7,
            ..claim(100, 0, 0)
        };
        assert_eq!(divide(0, &[claim(100, 0, 0), own]), [0, 7]);
    }
}

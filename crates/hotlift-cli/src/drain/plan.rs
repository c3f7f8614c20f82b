//! Plans a drain: chooses the destination of each domain, and the order of the moves.
//!
//! Short moves come first: they reduce the load of the host early. The domain with the highest write rate then has the link
//! alone. Several moves run at the same time only if their write rates together need at most half of the link. With more
//! writes, parallel moves extend each other's rounds, and moves one after another are faster.

use std::cmp::Ordering;
use std::fmt;

use hotlift_agent::commands::AgentInfo;
use hotlift_terminal::progress::{bytes, rounded};
use hotlift_terminal::table::{align_with_words, new_table};
use serde::Serialize;

use crate::libvirt::virsh::{Domain, host_of};

/// Default bandwidth of the link, in bytes a second: 1 Gbit/s, the slowest link of today's hosts.
pub const LINK: u64 = 125_000_000;

/// Default number of parallel moves: while one guest is paused for its last pages, the other move uses the link.
const AT_ONCE: usize = 2;

/// Limit of small domains, in seconds: more than `AT_ONCE` of them may move in parallel if the link sends all their memory,
/// uncompressed, within this time. libvirt needs a second for each domain before its first page and after its last one, in
/// which the link would be idle. Eight domains of 256 MiB at 1 Gbit/s took 10.1 s all at once, 11.6 s four at once, and 13 s
/// two at once.
const SMALL_SECONDS: u64 = 20;

/// Default number of parallel moves of small domains.
const AT_ONCE_SMALL: usize = 8;

/// Limits of a drain for parallel moves.
#[derive(Debug, Clone, Copy, PartialEq, Eq, Serialize)]
#[serde(rename_all = "kebab-case")]
pub struct Budget {
    /// Bandwidth of the link, in bytes a second.
    pub bandwidth: u64,
    /// Maximum of parallel moves.
    pub at_once: usize,
    /// Maximum of parallel moves if all the moving domains are small.
    pub at_once_small: usize,
    /// True if an agent runs on this host, and its limits were applied.
    pub agent: bool,
}

impl Budget {
    /// Creates the budget from the given values; the defaults respect the limits of this host's agent. With more migrations
    /// than the agent permits, some would wait in the agent while their QEMUs already migrate. The compression of each
    /// migration takes a core or more.
    pub fn new(bandwidth: Option<u64>, at_once: Option<u8>, agent: Option<&AgentInfo>) -> Self {
        let limit = |limit: fn(&AgentInfo) -> u64| agent.map(limit).filter(|limit| *limit > 0);
        let places = limit(|agent| agent.migrations.into()).unwrap_or(u64::MAX);
        let cores = agent.map_or(0.0, |agent| agent.cpu_limit);
        let most = match cores > 0.0 {
            true => rounded(cores).max(1).min(places),
            false => places,
        };
        let most = usize::try_from(most).unwrap_or(usize::MAX);
        let or_usual = |usual| at_once.map_or(most.min(usual), usize::from);
        Self {
            bandwidth: bandwidth
                .or(limit(|agent| agent.max_bandwidth))
                .unwrap_or(LINK),
            at_once: or_usual(AT_ONCE),
            at_once_small: or_usual(AT_ONCE_SMALL),
            agent: agent.is_some(),
        }
    }

    /// Returns true if the move `step` may start while the moves `under_way` are running.
    pub fn may_begin(&self, step: &Step, under_way: &[&Step]) -> bool {
        let sum = |of: fn(&Step) -> u64| {
            let all = under_way.iter().copied().chain([step]);
            all.map(of).fold(0, u64::saturating_add)
        };
        let written = sum(|step| step.written_per_second.unwrap_or(0));
        let memory = sum(|step| step.memory_bytes);
        let most = match memory <= self.bandwidth.saturating_mul(SMALL_SECONDS) {
            true => self.at_once_small,
            false => self.at_once,
        };
        under_way.is_empty() || (under_way.len() < most && written <= self.bandwidth / 2)
    }
}

impl fmt::Display for Budget {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        let bandwidth = bytes(self.bandwidth);
        let at_once = match (self.at_once, self.at_once_small) {
            (few, more) if few == more => few.to_string(),
            (few, more) => format!("{few}, or {more} small ones"),
        };
        let by = match self.agent {
            true => "as this host's agent allows",
            false => "no agent answers here",
        };
        write!(f, "{at_once} at once, {bandwidth}/s for all; {by}")
    }
}

/// A domain that a drain may move.
#[derive(Debug, Clone, PartialEq, Eq)]
pub struct Candidate {
    /// The domain.
    pub domain: Domain,
    /// Size of the domain's memory, in bytes.
    pub memory: u64,
    /// Write rate of the guest, in bytes a second; `None` if unknown.
    pub written: Option<u64>,
    /// Reason why the domain must stay here; `None` if it may move.
    pub stays: Option<StayReason>,
}

/// Reason why a domain is not moved.
#[derive(Debug, Clone, Copy, PartialEq, Eq, Serialize)]
#[serde(rename_all = "kebab-case")]
pub enum StayReason {
    /// No destination has enough memory.
    NoRoom,
    /// The guest of the domain is paused.
    Still,
    /// libvirt does not report the memory size of the domain.
    Unmeasured,
}

impl StayReason {
    fn label(self) -> &'static str {
        match self {
            Self::NoRoom => "no room",
            Self::Still => "paused",
            Self::Unmeasured => "no answer",
        }
    }

    /// Returns the reason as text for the operator.
    pub fn reason(self) -> &'static str {
        match self {
            Self::NoRoom => "no destination has enough memory",
            // A migration with unknown result leaves a paused copy, and the guest may run elsewhere.
            Self::Still => {
                "it is paused here: check 'virsh list --all' at the destinations; if none runs it, 'virsh resume' continues it"
            }
            Self::Unmeasured => "libvirt does not report its memory size",
        }
    }
}

/// A possible destination of a drain.
#[derive(Debug, Clone, PartialEq, Eq)]
pub struct DestinationHost {
    /// URI of the destination's libvirt.
    pub uri: String,
    /// Free memory of the destination, in bytes.
    pub free: u64,
}

/// A domain in the plan: its move, or the reason why it stays.
#[derive(Debug, Clone, PartialEq, Eq, Serialize)]
#[serde(rename_all = "kebab-case")]
pub struct Step {
    /// The domain.
    #[serde(flatten)]
    pub domain: Domain,
    /// Size of the domain's memory, in bytes.
    pub memory_bytes: u64,
    /// Write rate of the guest, in bytes a second; `null` if unknown.
    pub written_per_second: Option<u64>,
    /// URI of the destination's libvirt; `null` if the domain stays.
    pub to: Option<String>,
    /// Reason why the domain stays; `null` if it moves.
    pub stays: Option<StayReason>,
    /// Expected duration of the move without parallel moves and without compression, in seconds. `null` if the guest writes its
    /// memory faster than the link transfers it.
    pub seconds: Option<u64>,
}

/// Plan of a drain.
#[derive(Debug, Clone, PartialEq, Eq, Serialize)]
#[serde(rename_all = "kebab-case")]
pub struct Plan {
    /// Limits for parallel moves.
    #[serde(flatten)]
    pub budget: Budget,
    /// All domains, in the order of their moves.
    pub steps: Vec<Step>,
}

impl Plan {
    /// Orders `candidates`, and assigns each to the destination that then has the most free memory.
    pub fn new(
        candidates: Vec<Candidate>,
        mut places: Vec<DestinationHost>,
        budget: Budget,
    ) -> Self {
        let mut steps: Vec<Step> = candidates
            .into_iter()
            .map(|one| Step {
                seconds: seconds(&one, budget.bandwidth),
                domain: one.domain,
                memory_bytes: one.memory,
                written_per_second: one.written,
                to: None,
                stays: one.stays,
            })
            .collect();
        steps.sort_by(earlier);
        for step in steps.iter_mut().filter(|step| step.stays.is_none()) {
            let place = places.iter_mut().max_by_key(|place| place.free);
            let Some(place) = place.filter(|place| place.free >= step.memory_bytes) else {
                step.stays = Some(StayReason::NoRoom);
                continue;
            };
            place.free -= step.memory_bytes;
            step.to = Some(place.uri.clone());
        }
        Self { budget, steps }
    }

    /// Returns the limits, and the table of all domains in the plan.
    pub fn table(&self) -> String {
        let mut table = new_table(&["domain", "to", "memory", "written/s", "alone"]);
        for step in &self.steps {
            let to = step.to.as_deref().map(short);
            let stays = step.stays.map_or("-", StayReason::label);
            table.add_row([
                step.domain.name.clone(),
                to.unwrap_or(stays.to_owned()),
                bytes(step.memory_bytes),
                step.written_per_second.map_or("?".to_owned(), bytes),
                step.seconds
                    .map_or("no end".to_owned(), |s| format!("{s} s")),
            ]);
        }
        align_with_words(&mut table, 1);
        format!("{}\n{table}", self.budget)
    }
}

/// Returns the host in a URI of libvirt; the whole URI if it contains no host.
pub fn short(uri: &str) -> String {
    host_of(uri).unwrap_or(uri).to_owned()
}

fn seconds(one: &Candidate, bandwidth: u64) -> Option<u64> {
    let left = bandwidth.checked_sub(one.written.unwrap_or(0))?;
    (left > 0).then(|| one.memory.div_ceil(left))
}

/// Compares two steps by their order in the plan: short moves, moves that would not end, domains that stay. If equal, compares
/// the domains.
fn earlier(one: &Step, other: &Step) -> Ordering {
    let key = |step: &Step| {
        let seconds = step.seconds.unwrap_or(u64::MAX);
        (step.stays.is_some(), seconds, step.memory_bytes)
    };
    key(one)
        .cmp(&key(other))
        .then_with(|| one.domain.cmp(&other.domain))
}

#[cfg(test)]
mod tests {
    use hotlift_agent::config::Plaintext;

    use super::*;

    const GIB: u64 = 1 << 30;
    const MIB: u64 = 1 << 20;

    fn candidate(domain: &str, memory: u64, written: Option<u64>) -> Candidate {
        Candidate {
            domain: Domain {
                name: domain.to_owned(),
                uuid: format!("{domain}'s"),
            },
            memory,
            written,
            stays: None,
        }
    }

    fn place(uri: &str, free: u64) -> DestinationHost {
        DestinationHost {
            uri: uri.to_owned(),
            free,
        }
    }

    fn budget(bandwidth: u64, at_once: usize) -> Budget {
        Budget {
            bandwidth,
            at_once,
            at_once_small: at_once,
            agent: true,
        }
    }

    #[test]
    fn parallel_moves_are_limited_by_the_agents_slots_and_cores_unless_overridden() {
        let of = |max_bandwidth, migrations, cpu_limit| AgentInfo {
            version: String::new(),
            listen: String::new(),
            is_ending: false,
            under_way: 0,
            max_bandwidth,
            cpu_limit,
            migrations,
            completed: 0,
            failed: 0,
            downtime: None,
            refusals: 0,
            tls_failures: 0,
            plaintext: Some(Plaintext::Refuse),
            past_redirect: Vec::new(),
            last_check: None,
        };
        let found = |bandwidth, at_once, agent: Option<AgentInfo>| {
            let budget = Budget::new(bandwidth, at_once, agent.as_ref());
            (budget.bandwidth, budget.at_once, budget.at_once_small)
        };
        for (agent, expected) in [
            (None, (LINK, 2, 8)),
            (Some(of(0, 0, 0.0)), (LINK, 2, 8)),
            (Some(of(50 * MIB, 8, 4.0)), (50 * MIB, 2, 4)),
            (Some(of(0, 1, 0.0)), (LINK, 1, 1)),
            (Some(of(0, 8, 1.9)), (LINK, 1, 1)),
            (Some(of(0, 8, 0.5)), (LINK, 1, 1)),
        ] {
            assert_eq!(found(None, None, agent.clone()), expected, "{agent:?}");
            assert_eq!(found(Some(MIB), Some(4), agent), (MIB, 4, 4));
        }
    }

    #[test]
    fn quick_domains_move_first_and_those_that_do_not_converge_last() {
        let plan = Plan::new(
            vec![
                candidate("endless", GIB, Some(200 * MIB)),
                candidate("large", 8 * GIB, Some(0)),
                candidate("busy", GIB, Some(90 * MIB)),
                candidate("small", GIB, None),
            ],
            vec![place("qemu+ssh://b/system", 64 * GIB)],
            budget(100 * MIB, 4),
        );
        let order: Vec<_> = plan.steps.iter().map(|step| &*step.domain.name).collect();
        assert_eq!(order, ["small", "large", "busy", "endless"]);
        assert_eq!(plan.steps[0].seconds, Some(11));
        assert_eq!(plan.steps[3].seconds, None);
    }

    #[test]
    fn each_domain_moves_to_the_host_with_most_free_memory_or_stays() {
        let plan = Plan::new(
            vec![
                candidate("a", GIB, None),
                candidate("b", GIB, None),
                candidate("c", 3 * GIB, None),
            ],
            vec![place("one", 2 * GIB), place("two", 3 * GIB / 2)],
            budget(LINK, 2),
        );
        let places: Vec<_> = plan.steps.iter().map(|step| step.to.as_deref()).collect();
        assert_eq!(places, [Some("one"), Some("two"), None]);
        assert_eq!(plan.steps[2].stays, Some(StayReason::NoRoom));
    }

    #[test]
    fn a_paused_domain_is_listed_needs_no_room_and_stays() {
        let still = Candidate {
            stays: Some(StayReason::Still),
            ..candidate("still", MIB, None)
        };
        let domains = vec![still, candidate("a", GIB, None)];
        let plan = Plan::new(domains, vec![place("one", GIB)], budget(LINK, 2));
        let places: Vec<_> = plan.steps.iter().map(|step| step.to.as_deref()).collect();
        assert_eq!(places, [Some("one"), None]);
        assert!(plan.table().contains("paused"));
    }

    #[test]
    fn parallel_moves_are_limited_by_dirty_rates_and_the_links_rate() {
        let domains = [
            candidate("a", 4 * GIB, Some(120 * MIB)),
            candidate("b", 4 * GIB, Some(120 * MIB)),
            candidate("c", 6 * GIB, None),
            candidate("d", 2 * GIB, None),
        ];
        let budget = Budget {
            at_once_small: 3,
            ..budget(420 * MIB, 2)
        };
        let plan = Plan::new(domains.into(), vec![place("one", 64 * GIB)], budget);
        let may_begin = |name: &str, under_way: &[&str]| {
            let step = |name: &str| {
                let named = |step: &&Step| step.domain.name == name;
                plan.steps.iter().find(named).unwrap()
            };
            let under_way: Vec<_> = under_way.iter().map(|name| step(name)).collect();
            budget.may_begin(step(name), &under_way)
        };
        assert!(may_begin("a", &[]));
        assert!(!may_begin("b", &["a"]), "240 of 210 MiB/s");
        assert!(may_begin("c", &["a"]));
        assert!(!may_begin("d", &["a", "c"]), "12 GiB are not small");
        assert!(may_begin("d", &["a", "d"]), "8 GiB are");
        assert!(!may_begin("d", &["d", "d", "d"]), "three at once");
    }

    #[test]
    fn the_plan_fits_80_columns() {
        let name = "a-domain-with-a-long-name";
        let uri = "qemu+ssh://root@host.example/system";
        let plan = Plan::new(
            vec![candidate(name, 900 * GIB, Some(900 * MIB))],
            vec![place(uri, 1000 * GIB)],
            Budget::new(None, None, None),
        );
        let table = plan.table();
        let longest = table.lines().map(|line| line.chars().count()).max();
        assert!(longest <= Some(80), "{table}");
        assert!(
            table.contains(" host.example ") && table.contains("no end"),
            "{table}"
        );
    }
}

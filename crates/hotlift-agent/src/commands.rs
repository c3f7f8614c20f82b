//! Commands of the agent's control socket. The protocol is QMP; the commands are the agent's own.

use std::sync::Arc;
use std::time::{Instant, SystemTime};

use hotlift::options::parse_size;
use hotlift_qmp::server::{Commands, Refusal};
use serde::{Deserialize, Serialize};
use serde_json::{Value, json};

use crate::agent::Agent;
use crate::config::Plaintext;
use crate::downtimes::Downtimes;
use crate::messages::{Id, Kind};
use crate::missed_packets::MissedPackets;
use crate::redirect_check::LastCheck;
use crate::session::{Direction, Session};
use crate::snapshot::Share;
use crate::table;

/// Names of the commands.
pub const COMMANDS: [&str; 8] = [
    "query-agent",
    "query-migrations",
    "agent-cancel",
    "agent-limit",
    "agent-reload",
    "agent-checked",
    "query-version",
    "query-commands",
];

/// Answer of the command `query-agent`.
#[derive(Debug, Clone, PartialEq, Serialize, Deserialize)]
#[serde(rename_all = "kebab-case")]
pub struct AgentInfo {
    /// Version of the agent.
    pub version: String,
    /// Listening address for other agents.
    pub listen: String,
    /// True if the agent is ending, and refuses new sessions.
    pub is_ending: bool,
    /// Number of running migrations and tunnels.
    pub under_way: usize,
    /// Limit of all data that the agent sends from this host, in bytes a second; 0 is unlimited.
    pub max_bandwidth: u64,
    /// Limit of the CPU time of all outgoing migrations, in cores; 0 is unlimited.
    pub cpu_limit: f64,
    /// Limit of concurrent outgoing migrations; 0 is unlimited.
    pub migrations: u32,
    /// Number of completed migrations since the agent's start.
    pub completed: u64,
    /// Number of failed and cancelled migrations since the agent's start.
    pub failed: u64,
    /// Percentiles of the downtimes of the latest migrations; `None` from an agent that does not compute them.
    #[serde(default)]
    pub downtime: Option<Downtimes>,
    /// Number of refused connections and migrations since the agent's start.
    pub refusals: u64,
    /// Number of failed TLS handshakes since the agent's start.
    pub tls_failures: u64,
    /// Treatment of connections to a host without an agent, and of packets that missed the redirect.
    #[serde(default)]
    pub plaintext: Option<Plaintext>,
    /// Packets that missed the redirect since the table was created, for each address.
    #[serde(default)]
    pub past_redirect: Vec<MissedPackets>,
    /// Result of the last `hotlift agent check` as root since the agent's start.
    pub last_check: Option<LastCheck>,
}

/// A row of the answer of `query-migrations`.
#[derive(Debug, Clone, PartialEq, Serialize, Deserialize)]
#[serde(rename_all = "kebab-case")]
pub struct MigrationRow {
    /// Id of the session, the same on both hosts.
    pub id: Id,
    /// Direction of the guest's move, seen from this host.
    pub direction: Direction,
    /// Content of the connections: a migration, or other bytes (a tunnel).
    pub kind: Kind,
    /// QEMU's name of the state, or "waiting", "connecting", "passed-through".
    pub status: String,
    /// Original destination of the source's connections.
    pub to: String,
    /// Host of the other agent, or its expected address.
    pub peer: String,
    /// Time since the session's start, in seconds.
    pub seconds: f64,
    /// Bytes sent to the other host.
    pub sent_bytes: u64,
    /// Bytes received from the other host.
    pub received_bytes: u64,
    /// Number of pages with content.
    pub normal_pages: u64,
    /// Number of zero pages.
    pub zero_pages: u64,
    /// Size of the VM's RAM, in bytes.
    pub ram_bytes: u64,
    /// Current rate, in bytes a second.
    pub rate: f64,
    /// CPU time of the relay's channel threads, in seconds.
    pub cpu_seconds: f64,
    /// Weight in the division of bandwidth and cores, 1 to 1000.
    pub weight: u32,
    /// Limit set by the operator, in bytes a second; 0 for none.
    pub limit: u64,
    /// Current share of the bandwidth, in bytes a second; 0 is unlimited.
    pub bandwidth: u64,
    /// Current share of the CPU time, in cores; 0 is unlimited.
    pub cores: f64,
    /// Time that the guest has been paused so far, as seen by the relay, in seconds.
    pub downtime_seconds: f64,
    /// Description of a current stall: the host that causes it (silent, or not reading), and the duration.
    #[serde(default, skip_serializing_if = "Option::is_none")]
    pub stall: Option<String>,
    /// Error of a failed session; `None` otherwise.
    #[serde(default, skip_serializing_if = "Option::is_none")]
    pub error: Option<String>,
}

impl MigrationRow {
    /// Returns the row of `session` at `now`.
    #[must_use]
    pub fn of(session: &Session, now: Instant) -> Self {
        let snapshot = session.snapshot();
        let subject = &session.subject;
        let (progress, report) = (&snapshot.progress, snapshot.report.as_ref());
        let Share { bandwidth, cpu } = snapshot.share;
        Self {
            id: subject.id,
            direction: subject.direction,
            kind: subject.kind,
            status: snapshot.state.name().to_owned(),
            to: subject.to.to_string(),
            peer: subject.peer.clone(),
            seconds: session.age(now).as_secs_f64(),
            sent_bytes: report.map_or(progress.sent_bytes, |report| report.sent_bytes),
            received_bytes: report.map_or(progress.received_bytes, |report| report.received_bytes),
            normal_pages: report.map_or(progress.normal_pages, |report| report.normal_pages),
            zero_pages: report.map_or(progress.zero_pages, |report| report.zero_pages),
            ram_bytes: progress.total_bytes,
            rate: snapshot.rate,
            cpu_seconds: session.control.cpu_time().as_secs_f64(),
            weight: snapshot.weight,
            limit: snapshot.limit,
            bandwidth,
            cores: f64::from(cpu) / 1000.0,
            downtime_seconds: snapshot.paused_time(now).as_secs_f64(),
            // The error of an ended migration already contains the last stall.
            stall: session
                .control
                .stall()
                .filter(|_| snapshot.took.is_none())
                .map(|stall| stall.to_string()),
            error: snapshot.error.clone(),
        }
    }
}

/// Arguments of `agent-cancel` and `agent-limit`.
#[derive(Debug, Deserialize)]
#[serde(deny_unknown_fields, rename_all = "kebab-case")]
struct Change {
    id: Id,
    /// Bytes a second, or a text with a suffix such as "100M", as in the command-line option.
    max_bandwidth: Option<Value>,
    weight: Option<u32>,
}

/// Executes the commands of an agent's control socket.
pub struct AgentCommands(Arc<Agent>);

impl AgentCommands {
    /// Creates the executor of the commands of `agent`.
    #[must_use]
    pub fn new(agent: &Arc<Agent>) -> Self {
        Self(Arc::clone(agent))
    }

    fn info(&self) -> AgentInfo {
        let config = self.0.config();
        let totals = self.0.sessions.totals();
        let ended = |is_completed: bool| {
            let of_migrations = totals.ended.iter().filter(|([_, kind, state], _)| {
                *kind == "migration" && (*state == "completed") == is_completed
            });
            of_migrations.map(|(_, count)| count).sum()
        };
        AgentInfo {
            version: env!("CARGO_PKG_VERSION").to_owned(),
            listen: config.listen.clone(),
            is_ending: self.0.sessions.is_ending(),
            under_way: self.0.sessions.running().len(),
            max_bandwidth: config.max_bandwidth.0,
            cpu_limit: config.cpu_limit,
            migrations: config.migrations,
            completed: ended(true),
            failed: ended(false),
            downtime: Some(totals.downtimes()),
            refusals: totals.refusals,
            tls_failures: totals.tls_failures,
            plaintext: Some(config.plaintext),
            // Without the program nft no table exists either.
            past_redirect: table::counts().unwrap_or_default(),
            last_check: self.0.last_check().clone(),
        }
    }

    fn migrations(&self) -> Vec<MigrationRow> {
        let ended = self.0.sessions.ended();
        let running = self.0.sessions.running();
        let all = ended.iter().chain(&running);
        let now = Instant::now();
        all.map(|session| MigrationRow::of(session, now)).collect()
    }

    fn change(&self, arguments: &Value) -> Result<(Arc<Session>, Change), Refusal> {
        let change: Change = serde_json::from_value(arguments.clone())
            .map_err(|error| Refusal::generic(error.to_string()))?;
        let mut sessions = self.0.sessions.running();
        sessions.retain(|session| session.subject.id == change.id);
        // A migration from this host to itself has two sessions with the same id: the outgoing one is chosen.
        sessions.sort_by_key(|session| session.subject.direction);
        match sessions.into_iter().next() {
            Some(session) => Ok((session, change)),
            None => Err(Refusal::generic(format!(
                "no migration with id {} is under way",
                change.id
            ))),
        }
    }

    fn checked(&self, arguments: &Value) -> Result<Value, Refusal> {
        let found = serde_json::from_value(arguments.clone())
            .map_err(|error| Refusal::generic(error.to_string()))?;
        let at = humantime::format_rfc3339_seconds(SystemTime::now()).to_string();
        *self.0.last_check() = Some(LastCheck { at, found });
        Ok(json!({}))
    }

    fn cancel(&self, arguments: &Value) -> Result<Value, Refusal> {
        let (session, _) = self.change(arguments)?;
        session.control.cancel();
        self.0.sessions.wake();
        Ok(json!({}))
    }

    fn limit(&self, arguments: &Value) -> Result<Value, Refusal> {
        let (session, change) = self.change(arguments)?;
        let refused = |what: &str| Err(Refusal::generic(what));
        if session.subject.direction == Direction::Incoming {
            return refused("this migration arrives here: set its limit on its source host");
        }
        let bandwidth = change.max_bandwidth.as_ref().map(|value| match value {
            Value::String(text) => parse_size(text),
            value => value.as_u64(),
        });
        if bandwidth == Some(None) {
            return refused(
                "max-bandwidth must be bytes a second, such as \"100M\"; 0 is unlimited",
            );
        }
        let allowed = 1..=1000;
        if change
            .weight
            .is_some_and(|weight| !allowed.contains(&weight))
        {
            return refused("weight must be 1 to 1000");
        }
        session.limit(bandwidth.flatten(), change.weight);
        self.0.share();
        Ok(json!({}))
    }
}

impl Commands for AgentCommands {
    fn execute(&self, command: &str, arguments: &Value) -> Result<Value, Refusal> {
        let to_value = |value: serde_json::Result<Value>| {
            value.map_err(|error| Refusal::generic(error.to_string()))
        };
        match command {
            "query-agent" => to_value(serde_json::to_value(self.info())),
            "query-migrations" => to_value(serde_json::to_value(self.migrations())),
            "agent-cancel" => self.cancel(arguments),
            "agent-limit" => self.limit(arguments),
            "agent-reload" => {
                self.0.reload();
                Ok(json!({}))
            }
            "agent-checked" => self.checked(arguments),
            "query-version" => Ok(hotlift_monitor::version()),
            "query-commands" => {
                let rows = COMMANDS.iter().map(|name| json!({ "name": name }));
                Ok(rows.collect())
            }
            _ => Err(Refusal::no_command(command)),
        }
    }
}

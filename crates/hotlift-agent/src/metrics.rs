//! What Prometheus reads: the table of metrics, and a small HTTP server on loopback.

use std::collections::BTreeMap;
use std::fmt;
use std::io::{Read, Write};
use std::net::{TcpListener, TcpStream};
use std::sync::Arc;
use std::time::Duration;

use prometheus_client::collector::Collector;
use prometheus_client::encoding::{DescriptorEncoder, EncodeMetric, MetricEncoder, text::encode};
use prometheus_client::metrics::MetricType;
use prometheus_client::metrics::counter::ConstCounter;
use prometheus_client::metrics::gauge::ConstGauge;
use prometheus_client::registry::Registry;

use crate::agent::Agent;
use crate::messages::Kind;
use crate::session::Session;

/// How long a client may take to ask.
const ASK: Duration = Duration::from_secs(2);

/// Longest request that is read, in bytes.
const REQUEST: usize = 4096;

/// What all that has ended came to.
#[derive(Debug, Clone, Default)]
pub struct Totals {
    /// Migrations and tunnels, by direction, kind and how they ended.
    pub ended: BTreeMap<[&'static str; 3], u64>,
    /// Bytes sent to the other side, by direction.
    pub sent_bytes: BTreeMap<&'static str, u64>,
    /// Bytes received, by direction.
    pub received_bytes: BTreeMap<&'static str, u64>,
    /// Pages with content by method, and "zero".
    pub pages: BTreeMap<String, u64>,
    /// Barriers between rounds.
    pub rounds: u64,
    /// CPU time by the threads' names without numbers, in seconds.
    pub cpu_seconds: BTreeMap<String, f64>,
    /// Connections and migrations that were refused.
    pub refusals: u64,
    /// Handshakes that have failed.
    pub tls_failures: u64,
}

impl Totals {
    /// Adds what `session` came to.
    pub fn add(&mut self, session: &Session) {
        let moment = session.moment();
        let subject = &session.subject;
        let direction = subject.direction.name();
        let outcome = [direction, subject.kind.name(), moment.state];
        *self.ended.entry(outcome).or_default() += 1;
        let sent = moment
            .report
            .as_ref()
            .map_or(moment.progress.sent_bytes, |it| it.sent_bytes);
        let received = moment.report.as_ref();
        let received = received.map_or(moment.progress.received_bytes, |it| it.received_bytes);
        *self.sent_bytes.entry(direction).or_default() += sent;
        *self.received_bytes.entry(direction).or_default() += received;
        let Some(report) = &moment.report else {
            return;
        };
        self.rounds += report.barriers;
        *self.pages.entry("zero".to_owned()).or_default() += report.zero_pages;
        match report.methods.is_empty() {
            true => *self.pages.entry(report.method.clone()).or_default() += report.normal_pages,
            false => {
                for method in &report.methods {
                    *self.pages.entry(method.name.clone()).or_default() += method.pages;
                }
            }
        }
        for thread in &report.side.threads {
            let name = thread.name.trim_end_matches(|c: char| c.is_ascii_digit());
            *self
                .cpu_seconds
                .entry(name.trim_end_matches('_').to_owned())
                .or_default() += thread.cpu_s;
        }
    }
}

/// A row of the table: name, help, kind, and its values with their labels.
struct Row {
    name: &'static str,
    help: &'static str,
    is_counter: bool,
    values: fn(&Seen) -> Values,
}

type Labels = Vec<(&'static str, String)>;
type Values = Vec<(Labels, f64)>;

/// What the rows are made of.
struct Seen {
    totals: Totals,
    migrations: Vec<Arc<Session>>,
    tunnels: usize,
    bandwidth: u64,
    cpu: f64,
    most: u32,
}

/// All metrics. Those of one migration have its id, and go when it ends; the totals take over then.
const TABLE: &[Row] = &[
    counter(
        "hotlift_agent_ended",
        "Migrations and tunnels that have ended, by direction, kind and outcome",
        |seen| {
            let labels = ["direction", "kind", "outcome"];
            let ended = seen.totals.ended.iter();
            let labelled = |values: &[&'static str; 3]| {
                let pairs = labels.iter().zip(values);
                pairs
                    .map(|(label, value)| (*label, (*value).to_owned()))
                    .collect()
            };
            ended
                .map(|(values, count)| (labelled(values), number(*count)))
                .collect()
        },
    ),
    counter(
        "hotlift_agent_sent_bytes",
        "Bytes that ended migrations and tunnels have sent, by direction",
        |seen| by("direction", &seen.totals.sent_bytes),
    ),
    counter(
        "hotlift_agent_received_bytes",
        "Bytes that ended migrations and tunnels have received, by direction",
        |seen| by("direction", &seen.totals.received_bytes),
    ),
    counter(
        "hotlift_agent_pages",
        "Pages of ended migrations, by the method that they went by; zero for zero pages",
        |seen| by("method", &seen.totals.pages),
    ),
    counter(
        "hotlift_agent_rounds",
        "Barriers between the rounds of ended migrations",
        |seen| one(number(seen.totals.rounds)),
    ),
    counter(
        "hotlift_agent_cpu_seconds",
        "CPU time of ended migrations, by the name of their threads",
        |seen| {
            let threads = seen.totals.cpu_seconds.iter();
            threads
                .map(|(name, seconds)| (vec![("thread", name.clone())], *seconds))
                .collect()
        },
    ),
    counter(
        "hotlift_agent_refusals",
        "Connections and migrations that were refused",
        |seen| one(number(seen.totals.refusals)),
    ),
    counter(
        "hotlift_agent_tls_failures",
        "TLS handshakes that have failed, in either direction",
        |seen| one(number(seen.totals.tls_failures)),
    ),
    gauge(
        "hotlift_agent_migrations",
        "Migrations under way, by direction and state",
        |seen| {
            let mut states: BTreeMap<(&str, &str), u64> = BTreeMap::new();
            for session in &seen.migrations {
                let state = (session.subject.direction.name(), session.moment().state);
                *states.entry(state).or_default() += 1;
            }
            let labelled = |(direction, state): (&str, &str)| {
                vec![
                    ("direction", direction.to_owned()),
                    ("state", state.to_owned()),
                ]
            };
            states
                .into_iter()
                .map(|(state, count)| (labelled(state), number(count)))
                .collect()
        },
    ),
    gauge("hotlift_agent_tunnels", "Tunnels under way", |seen| {
        one(number(u64::try_from(seen.tunnels).unwrap_or(u64::MAX)))
    }),
    gauge(
        "hotlift_agent_budget_bandwidth_bytes",
        "Bytes a second that all outgoing migrations may send; 0 is unlimited",
        |seen| one(number(seen.bandwidth)),
    ),
    gauge(
        "hotlift_agent_budget_cores",
        "Cores that they may use; 0 is unlimited",
        |seen| one(seen.cpu),
    ),
    gauge(
        "hotlift_agent_budget_migrations",
        "Outgoing migrations that may go on at once; 0 is unlimited",
        |seen| one(f64::from(seen.most)),
    ),
    gauge(
        "hotlift_migration_sent_bytes",
        "Bytes that a migration has sent",
        |seen| each(seen, |session| number(session.moment().progress.sent_bytes)),
    ),
    gauge(
        "hotlift_migration_received_bytes",
        "Bytes that it has received",
        |seen| {
            each(seen, |session| {
                number(session.moment().progress.received_bytes)
            })
        },
    ),
    gauge(
        "hotlift_migration_normal_pages",
        "Pages with content that it has passed on",
        |seen| {
            each(seen, |session| {
                number(session.moment().progress.normal_pages)
            })
        },
    ),
    gauge(
        "hotlift_migration_zero_pages",
        "Zero pages that it has passed on",
        |seen| each(seen, |session| number(session.moment().progress.zero_pages)),
    ),
    gauge(
        "hotlift_migration_ram_bytes",
        "Bytes of its VM's RAM blocks",
        |seen| {
            each(seen, |session| {
                number(session.moment().progress.total_bytes)
            })
        },
    ),
    gauge(
        "hotlift_migration_rate_bytes",
        "Bytes a second that it sends",
        |seen| each(seen, |session| session.moment().rate),
    ),
    gauge(
        "hotlift_migration_ratio",
        "Bytes of its normal pages over the bytes that it has sent",
        |seen| {
            each(seen, |session| {
                let progress = session.moment().progress;
                let sent = number(progress.sent_bytes);
                if sent > 0.0 {
                    number(progress.normal_pages) * 4096.0 / sent
                } else {
                    0.0
                }
            })
        },
    ),
    gauge(
        "hotlift_migration_share_bandwidth_bytes",
        "Bytes a second that it may send now; 0 is unlimited",
        |seen| each(seen, |session| number(session.moment().share.bandwidth)),
    ),
    gauge(
        "hotlift_migration_share_cores",
        "Cores that it may use now; 0 is unlimited",
        |seen| {
            each(seen, |session| {
                f64::from(session.moment().share.cpu) / 1000.0
            })
        },
    ),
    gauge(
        "hotlift_migration_cpu_seconds",
        "CPU time of its channel threads",
        |seen| each(seen, |session| session.control.cpu_time().as_secs_f64()),
    ),
    gauge("hotlift_migration_seconds", "Since it began", |seen| {
        each(seen, |session| session.age().as_secs_f64())
    }),
];

const fn counter(name: &'static str, help: &'static str, values: fn(&Seen) -> Values) -> Row {
    Row {
        name,
        help,
        is_counter: true,
        values,
    }
}

const fn gauge(name: &'static str, help: &'static str, values: fn(&Seen) -> Values) -> Row {
    Row {
        is_counter: false,
        ..counter(name, help, values)
    }
}

/// As Prometheus has all numbers.
#[allow(clippy::cast_precision_loss)]
fn number(count: u64) -> f64 {
    count as f64
}

fn one(value: f64) -> Values {
    vec![(Vec::new(), value)]
}

fn by<K: ToString>(label: &'static str, of: &BTreeMap<K, u64>) -> Values {
    let labelled = |(key, count): (&K, &u64)| (vec![(label, key.to_string())], number(*count));
    of.iter().map(labelled).collect()
}

fn each(seen: &Seen, value: impl Fn(&Session) -> f64) -> Values {
    let labels = |session: &Session| {
        let subject = &session.subject;
        vec![
            ("id", subject.id.to_string()),
            ("direction", subject.direction.name().to_owned()),
            ("to", subject.to.to_string()),
        ]
    };
    let migrations = seen.migrations.iter();
    migrations
        .map(|session| (labels(session), value(session)))
        .collect()
}

struct Collected(Arc<Agent>);

impl fmt::Debug for Collected {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        f.write_str("Collected")
    }
}

impl Collector for Collected {
    fn encode(&self, mut encoder: DescriptorEncoder<'_>) -> Result<(), fmt::Error> {
        let config = self.0.config();
        let (migrations, tunnels): (Vec<_>, Vec<_>) = (self.0.sessions.under_way().into_iter())
            .partition(|session| session.subject.kind == Kind::Migration);
        let seen = Seen {
            totals: self.0.sessions.totals(),
            migrations,
            tunnels: tunnels.len(),
            bandwidth: config.max_bandwidth.0,
            cpu: config.cpu_limit,
            most: config.migrations,
        };
        for row in TABLE {
            let kind = match row.is_counter {
                true => MetricType::Counter,
                false => MetricType::Gauge,
            };
            let mut metric = encoder.encode_descriptor(row.name, row.help, None, kind)?;
            for (labels, value) in (row.values)(&seen) {
                let encode = |encoder: MetricEncoder<'_>| match row.is_counter {
                    true => ConstCounter::new(value).encode(encoder),
                    false => ConstGauge::new(value).encode(encoder),
                };
                match labels.is_empty() {
                    true => encode(metric.encode_family(&NO_LABELS)?)?,
                    false => encode(metric.encode_family(&labels)?)?,
                }
            }
        }
        Ok(())
    }
}

const NO_LABELS: [(&str, &str); 0] = [];

/// The text that Prometheus reads.
#[must_use]
pub fn text(agent: &Arc<Agent>) -> String {
    let mut registry = Registry::default();
    registry.register_collector(Box::new(Collected(Arc::clone(agent))));
    let mut text = String::new();
    // Writing to a string does not fail.
    let _ = encode(&mut text, &registry);
    text
}

/// Answers on `listener` for as long as the process runs, one client after the other.
pub fn serve(agent: &Arc<Agent>, listener: &TcpListener) {
    for stream in listener.incoming() {
        match stream {
            // A client that has gone needs no answer.
            Ok(stream) => drop(answer(agent, stream)),
            Err(_) => std::thread::sleep(ASK),
        }
    }
}

fn answer(agent: &Arc<Agent>, mut stream: TcpStream) -> std::io::Result<()> {
    stream.set_read_timeout(Some(ASK))?;
    stream.set_write_timeout(Some(ASK))?;
    let mut request = Vec::new();
    let mut buffer = [0; 1024];
    while !request.windows(4).any(|end| end == b"\r\n\r\n") {
        match stream.read(&mut buffer)? {
            0 => return Ok(()),
            _ if request.len() > REQUEST => return Ok(()),
            read => request.extend_from_slice(&buffer[..read]),
        }
    }
    let (status, body) = match request.starts_with(b"GET /metrics ") {
        true => ("200 OK", text(agent)),
        false => ("404 Not Found", "GET /metrics\n".to_owned()),
    };
    // OpenMetrics 1.0.
    let kind = "application/openmetrics-text; version=1.0.0; charset=utf-8";
    let length = body.len();
    let head = format!(
        "HTTP/1.1 {status}\r\nContent-Type: {kind}\r\nContent-Length: {length}\r\nConnection: close\r\n\r\n"
    );
    stream.write_all(head.as_bytes())?;
    stream.write_all(body.as_bytes())
}

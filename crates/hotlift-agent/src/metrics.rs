//! What Prometheus reads: the table of metrics, and a small HTTP server on loopback.

use std::collections::BTreeMap;
use std::fmt;
use std::io::{Read, Write};
use std::net::{TcpListener, TcpStream};
use std::sync::Arc;
use std::time::{Duration, Instant};

use prometheus_client::collector::Collector;
use prometheus_client::encoding::{DescriptorEncoder, EncodeMetric, MetricEncoder, text::encode};
use prometheus_client::metrics::MetricType;
use prometheus_client::metrics::counter::ConstCounter;
use prometheus_client::metrics::gauge::ConstGauge;
use prometheus_client::registry::Registry;

use crate::agent::Agent;
use crate::messages::Kind;
use crate::past::Count;
use crate::session::{Moment, Session};
use crate::table;

/// How long a client may take, from its connection to its last byte: the next one waits meanwhile.
const CLIENT: Duration = Duration::from_secs(2);

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
    /// How long guests stood still, by direction, in seconds.
    pub downtime_seconds: BTreeMap<&'static str, f64>,
    /// Of how many that is known.
    pub downtimes: BTreeMap<&'static str, u64>,
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
        if let Some(downtime) = moment.downtime {
            *self.downtime_seconds.entry(direction).or_default() += downtime.as_secs_f64();
            *self.downtimes.entry(direction).or_default() += 1;
        }
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
    values: Source,
}

/// Where a row's values are from.
enum Source {
    /// All that is seen.
    All(fn(&Seen) -> Values),
    /// Each migration, one value.
    Each(fn(&Session, &Moment) -> f64),
}

type Labels = Vec<(&'static str, String)>;
type Values = Vec<(Labels, f64)>;

/// What the rows are made of.
struct Seen {
    totals: Totals,
    /// With the moment of each at which all its values are.
    migrations: Vec<(Arc<Session>, Moment)>,
    tunnels: usize,
    bandwidth: u64,
    cpu: f64,
    most: u32,
    /// Packets that have gone past the redirect.
    past: Vec<Count>,
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
        "hotlift_agent_downtime_seconds",
        "How long the guests of ended migrations stood still, as far as a relay sees, by direction",
        |seen| {
            let seconds = seen.totals.downtime_seconds.iter();
            seconds
                .map(|(direction, seconds)| {
                    (vec![("direction", (*direction).to_owned())], *seconds)
                })
                .collect()
        },
    ),
    counter(
        "hotlift_agent_downtimes",
        "Ended migrations of which that is known, by direction",
        |seen| by("direction", &seen.totals.downtimes),
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
    counter(
        "hotlift_agent_past_redirect_packets",
        "Packets to ports of migrations that went past the redirect, which the kernel refused, or counted where plaintext is allowed",
        |seen| {
            let packets = seen.past.iter().map(|count| number(count.packets));
            one(packets.sum())
        },
    ),
    counter(
        "hotlift_agent_past_redirect_bytes",
        "Bytes of those packets, with their headers",
        |seen| one(seen.past.iter().map(|count| number(count.bytes)).sum()),
    ),
    gauge(
        "hotlift_agent_migrations",
        "Migrations under way, by direction and state",
        |seen| {
            let mut states: BTreeMap<(&str, &str), u64> = BTreeMap::new();
            for (session, moment) in &seen.migrations {
                let state = (session.subject.direction.name(), moment.state);
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
    of_each(
        "hotlift_migration_sent_bytes",
        "Bytes that a migration has sent",
        |_, moment| number(moment.progress.sent_bytes),
    ),
    of_each(
        "hotlift_migration_received_bytes",
        "Bytes that it has received",
        |_, moment| number(moment.progress.received_bytes),
    ),
    of_each(
        "hotlift_migration_normal_pages",
        "Pages with content that it has passed on",
        |_, moment| number(moment.progress.normal_pages),
    ),
    of_each(
        "hotlift_migration_zero_pages",
        "Zero pages that it has passed on",
        |_, moment| number(moment.progress.zero_pages),
    ),
    of_each(
        "hotlift_migration_ram_bytes",
        "Bytes of its VM's RAM blocks",
        |_, moment| number(moment.progress.total_bytes),
    ),
    of_each(
        "hotlift_migration_rate_bytes",
        "Bytes a second that it sends",
        |_, moment| moment.rate,
    ),
    of_each(
        "hotlift_migration_ratio",
        "Bytes of its normal pages over the bytes that it has sent",
        |_, moment| match number(moment.progress.sent_bytes) {
            sent if sent > 0.0 => number(moment.progress.normal_pages) * 4096.0 / sent,
            _ => 0.0,
        },
    ),
    of_each(
        "hotlift_migration_downtime_seconds",
        "How long its guest stands or stood still, as far as the relay sees",
        |_, moment| moment.still().as_secs_f64(),
    ),
    of_each(
        "hotlift_migration_share_bandwidth_bytes",
        "Bytes a second that it may send now; 0 is unlimited",
        |_, moment| number(moment.share.bandwidth),
    ),
    of_each(
        "hotlift_migration_share_cores",
        "Cores that it may use now; 0 is unlimited",
        |_, moment| f64::from(moment.share.cpu) / 1000.0,
    ),
    of_each(
        "hotlift_migration_cpu_seconds",
        "CPU time of its channel threads",
        |session, _| session.control.cpu_time().as_secs_f64(),
    ),
    of_each(
        "hotlift_migration_seconds",
        "Since it began",
        |session, _| session.age().as_secs_f64(),
    ),
];

const fn counter(name: &'static str, help: &'static str, values: fn(&Seen) -> Values) -> Row {
    Row {
        name,
        help,
        is_counter: true,
        values: Source::All(values),
    }
}

const fn gauge(name: &'static str, help: &'static str, values: fn(&Seen) -> Values) -> Row {
    Row {
        is_counter: false,
        ..counter(name, help, values)
    }
}

const fn of_each(
    name: &'static str,
    help: &'static str,
    value: fn(&Session, &Moment) -> f64,
) -> Row {
    Row {
        name,
        help,
        is_counter: false,
        values: Source::Each(value),
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

fn each(seen: &Seen, value: fn(&Session, &Moment) -> f64) -> Values {
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
        .map(|(session, moment)| (labels(session), value(session, moment)))
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
        let with_moment = |session: Arc<Session>| {
            let moment = session.moment();
            (session, moment)
        };
        let (migrations, tunnels): (Vec<_>, Vec<_>) = (self.0.sessions.under_way().into_iter())
            .partition(|session| session.subject.kind == Kind::Migration);
        let seen = Seen {
            totals: self.0.sessions.totals(),
            migrations: migrations.into_iter().map(with_moment).collect(),
            tunnels: tunnels.len(),
            bandwidth: config.max_bandwidth.0,
            cpu: config.cpu_limit,
            most: config.migrations,
            // Without nft or the table there are none.
            past: table::counts().unwrap_or_default(),
        };
        for row in TABLE {
            let kind = match row.is_counter {
                true => MetricType::Counter,
                false => MetricType::Gauge,
            };
            let mut metric = encoder.encode_descriptor(row.name, row.help, None, kind)?;
            let values = match row.values {
                Source::All(values) => values(&seen),
                Source::Each(value) => each(&seen, value),
            };
            for (labels, value) in values {
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
            Err(_) => std::thread::sleep(CLIENT),
        }
    }
}

fn answer(agent: &Arc<Agent>, mut stream: TcpStream) -> std::io::Result<()> {
    let deadline = Instant::now() + CLIENT;
    let left = || match deadline.saturating_duration_since(Instant::now()) {
        Duration::ZERO => Err(std::io::Error::from(std::io::ErrorKind::TimedOut)),
        left => Ok(Some(left)),
    };
    let mut request = Vec::new();
    let mut buffer = [0; 1024];
    while !request.windows(4).any(|end| end == b"\r\n\r\n") {
        stream.set_read_timeout(left()?)?;
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
    let answer = head + &body;
    let mut rest = answer.as_bytes();
    while !rest.is_empty() {
        stream.set_write_timeout(left()?)?;
        match stream.write(rest)? {
            0 => return Ok(()),
            written => rest = &rest[written..],
        }
    }
    Ok(())
}

#[cfg(test)]
mod tests {
    use hotlift::Status;
    use hotlift::relay::RelayReport;

    use super::*;
    use crate::fixture::{agent, session, subject};
    use crate::session::Direction;

    #[test]
    fn downtime_is_shown_of_each_migration_and_in_total() {
        let agent = agent("");
        let (moved, _listener) = session(subject(1, Direction::Outgoing, Kind::Migration));
        agent.sessions.add(&moved).unwrap();
        moved.follow(Status::Device);
        let under_way = "hotlift_migration_downtime_seconds{id=\"00000001\",direction=\"outgoing\"";
        let shown = text(&agent);
        assert!(shown.contains(under_way), "{shown}");
        moved.follow(Status::Completed);
        let downtime = moved.moment().downtime.unwrap().as_secs_f64();
        agent.ended(&moved, Ok(Some(RelayReport::default())));
        let shown = text(&agent);
        for line in [
            format!("hotlift_agent_downtime_seconds_total{{direction=\"outgoing\"}} {downtime}"),
            "hotlift_agent_downtimes_total{direction=\"outgoing\"} 1".to_owned(),
        ] {
            assert!(shown.contains(&line), "{line} is missing in\n{shown}");
        }
        assert!(!shown.contains(under_way), "{shown}");
    }

    #[test]
    fn a_client_that_asks_byte_by_byte_has_one_deadline_for_all() {
        let agent = agent("");
        let listener = TcpListener::bind("127.0.0.1:0").unwrap();
        let mut slow = TcpStream::connect(listener.local_addr().unwrap()).unwrap();
        let (accepted, _) = listener.accept().unwrap();
        std::thread::scope(|scope| {
            let served = scope.spawn(|| answer(&agent, accepted));
            // Each byte comes long before the deadline, and the last one long behind it.
            for _ in 0..100 * CLIENT.as_secs() {
                if served.is_finished() || slow.write_all(b"x").is_err() {
                    break;
                }
                std::thread::sleep(Duration::from_millis(20));
            }
            assert!(served.is_finished(), "it still waits for the request's end");
            assert!(served.join().unwrap().is_err());
        });
    }
}

//! The agent's metrics for Prometheus: a table of all metrics, and its output in two text formats.

use std::collections::BTreeMap;
use std::fmt;
use std::sync::Arc;
use std::time::Instant;

use prometheus_client::collector::Collector;
use prometheus_client::encoding::{
    DescriptorEncoder, EncodeMetric, MetricEncoder, NoLabelSet, text::encode,
};
use prometheus_client::metrics::MetricType;
use prometheus_client::registry::Registry;

use crate::agent::Agent;
use crate::messages::Kind;
use crate::missed_packets::MissedPackets;
use crate::session::Session;
use crate::snapshot::{Snapshot, State};
use crate::table;
use crate::totals::{Counts, DIRECTIONS, Histograms, Totals, Traffic, number};

/// Text format of the metrics.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub enum Format {
    /// Prometheus's text format, version 0.0.4: the default.
    Text,
    /// OpenMetrics, version 1.0.
    OpenMetrics,
}

impl Format {
    /// Media type by which a client requests OpenMetrics.
    pub const OPEN_METRICS: &str = "application/openmetrics-text";

    /// Returns the format's media type, with its version.
    #[must_use]
    pub fn media_type(self) -> &'static str {
        match self {
            Self::Text => "text/plain; version=0.0.4; charset=utf-8",
            Self::OpenMetrics => "application/openmetrics-text; version=1.0.0; charset=utf-8",
        }
    }
}

/// A row of the table: name without the suffix of samples, help text, and the source of the values.
struct Row {
    name: &'static str,
    help: &'static str,
    values: Source,
}

/// Functions that return the values of a row, by metric type.
enum Source {
    Counter(fn(&Seen) -> Values),
    Gauge(fn(&Seen) -> Values),
    Histogram(fn(&Seen) -> &Histograms),
    /// One value for each running migration, labelled with the migration's id.
    EachCounter(fn(&Session, &Snapshot) -> f64),
    EachGauge(fn(&Session, &Snapshot) -> f64),
}

impl Source {
    fn kind(&self) -> MetricType {
        match self {
            Self::Counter(_) | Self::EachCounter(_) => MetricType::Counter,
            Self::Gauge(_) | Self::EachGauge(_) => MetricType::Gauge,
            Self::Histogram(_) => MetricType::Histogram,
        }
    }
}

type Labels = Vec<(&'static str, String)>;
type Values = Vec<(Labels, f64)>;

/// Data from which all rows get their values.
struct Seen {
    totals: Totals,
    /// Traffic of ended and of running sessions together.
    traffic: Traffic,
    /// Running migrations, each with one consistent snapshot.
    migrations: Vec<(Arc<Session>, Snapshot)>,
    tunnels: usize,
    bandwidth: u64,
    cpu: f64,
    most: u32,
    /// Packets that missed the redirect; `None` if nft cannot be run. Prometheus would take a 0 for a reset of the counter.
    past: Option<Vec<MissedPackets>>,
}

/// All metrics. Metrics of a single migration carry its id, and disappear at its end. Names contain the unit, as Prometheus
/// requires.
const TABLE: &[Row] = &[
    counter(
        "hotlift_agent_ended",
        "Ended migrations and tunnels, by direction, kind and outcome",
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
        "Bytes that migrations and tunnels have sent, by direction",
        |seen| by("direction", &seen.traffic.sent_bytes),
    ),
    counter(
        "hotlift_agent_received_bytes",
        "Bytes that migrations and tunnels have received, by direction",
        |seen| by("direction", &seen.traffic.received_bytes),
    ),
    counter(
        "hotlift_agent_pages",
        "Pages of migrations, by method; zero for zero pages",
        |seen| by("method", &seen.traffic.pages),
    ),
    counter(
        "hotlift_agent_rounds",
        "Barriers between the rounds of migrations",
        |seen| one(seen.traffic.rounds),
    ),
    row(
        "hotlift_agent_migration_duration_seconds",
        "Duration of completed migrations, by direction",
        Source::Histogram(|seen| &seen.totals.durations),
    ),
    row(
        "hotlift_agent_migration_downtime_seconds",
        "Downtime of completed migrations, as measured by the relay, by direction",
        Source::Histogram(|seen| &seen.totals.downtimes),
    ),
    counter(
        "hotlift_agent_downtime_seconds",
        "Sum of these downtimes, by direction",
        |seen| by("direction", &seen.totals.downtime_seconds),
    ),
    counter(
        "hotlift_agent_downtimes",
        "Completed migrations with a known downtime, by direction",
        |seen| by("direction", &seen.totals.downtime_count),
    ),
    counter(
        "hotlift_agent_cpu_seconds",
        "CPU time of migrations, by thread name; channel threads count after each packet, other threads at the end",
        |seen| by("thread", &seen.traffic.cpu_seconds),
    ),
    counter(
        "hotlift_agent_refusals",
        "Refused connections and migrations",
        |seen| one(number(seen.totals.refusals)),
    ),
    counter(
        "hotlift_agent_tls_failures",
        "Failed TLS handshakes, in both directions",
        |seen| one(number(seen.totals.tls_failures)),
    ),
    counter(
        "hotlift_agent_past_redirect_packets",
        "Packets to ports of migrations that bypassed the redirect: refused by the kernel, or only counted if plaintext is \
         allowed",
        |seen| past(seen, |count| count.packets),
    ),
    counter(
        "hotlift_agent_past_redirect_bytes",
        "Bytes of those packets, with their headers",
        |seen| past(seen, |count| count.bytes),
    ),
    gauge(
        "hotlift_agent_migrations",
        "Migrations under way, by direction and state",
        |seen| {
            let mut states: BTreeMap<(&str, &str), u64> = BTreeMap::new();
            for direction in DIRECTIONS {
                let names = State::under_way().map(State::name);
                states.extend(names.map(|state| ((direction.name(), state), 0)));
            }
            for (session, snapshot) in &seen.migrations {
                let state = (session.subject.direction.name(), snapshot.state.name());
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
        "hotlift_agent_budget_bandwidth_bytes_per_second",
        "Bytes a second that the agent may send from this host; 0 is unlimited",
        |seen| one(number(seen.bandwidth)),
    ),
    gauge(
        "hotlift_agent_budget_cores",
        "Cores that outgoing migrations may use; 0 is unlimited",
        |seen| one(seen.cpu),
    ),
    gauge(
        "hotlift_agent_budget_migrations",
        "Outgoing migrations that may run at once; 0 is unlimited",
        |seen| one(f64::from(seen.most)),
    ),
    each_counter(
        "hotlift_migration_sent_bytes",
        "Bytes sent by a migration",
        |_, snapshot| number(snapshot.progress.sent_bytes),
    ),
    each_counter(
        "hotlift_migration_received_bytes",
        "Bytes received by it",
        |_, snapshot| number(snapshot.progress.received_bytes),
    ),
    each_counter(
        "hotlift_migration_normal_pages",
        "Pages with content that it forwarded",
        |_, snapshot| number(snapshot.progress.normal_pages),
    ),
    each_counter(
        "hotlift_migration_zero_pages",
        "Zero pages that it forwarded",
        |_, snapshot| number(snapshot.progress.zero_pages),
    ),
    each_counter(
        "hotlift_migration_cpu_seconds",
        "CPU time of its channel threads",
        |session, _| session.control.cpu_time().as_secs_f64(),
    ),
    each_gauge(
        "hotlift_migration_ram_bytes",
        "Bytes of its VM's RAM blocks",
        |_, snapshot| number(snapshot.progress.total_bytes),
    ),
    each_gauge(
        "hotlift_migration_rate_bytes_per_second",
        "Bytes a second that it sends",
        |_, snapshot| snapshot.rate,
    ),
    each_gauge(
        "hotlift_migration_ratio",
        "Bytes of its normal pages divided by the bytes that it sent",
        |_, snapshot| match number(snapshot.progress.sent_bytes) {
            sent if sent > 0.0 => number(snapshot.progress.normal_pages) * 4096.0 / sent,
            _ => 0.0,
        },
    ),
    each_gauge(
        "hotlift_migration_downtime_seconds",
        "Downtime of its guest so far, as measured by the relay",
        |_, snapshot| snapshot.paused_time(Instant::now()).as_secs_f64(),
    ),
    each_gauge(
        "hotlift_migration_share_bandwidth_bytes_per_second",
        "Bytes a second that it may send now; 0 is unlimited",
        |_, snapshot| number(snapshot.share.bandwidth),
    ),
    each_gauge(
        "hotlift_migration_share_cores",
        "Cores that it may use now; 0 is unlimited",
        |_, snapshot| f64::from(snapshot.share.cpu) / 1000.0,
    ),
    each_gauge(
        "hotlift_migration_seconds",
        "Time since its start",
        |session, _| session.age(Instant::now()).as_secs_f64(),
    ),
];

const fn row(name: &'static str, help: &'static str, values: Source) -> Row {
    Row { name, help, values }
}

const fn counter(name: &'static str, help: &'static str, values: fn(&Seen) -> Values) -> Row {
    row(name, help, Source::Counter(values))
}

const fn gauge(name: &'static str, help: &'static str, values: fn(&Seen) -> Values) -> Row {
    row(name, help, Source::Gauge(values))
}

const fn each_counter(
    name: &'static str,
    help: &'static str,
    value: fn(&Session, &Snapshot) -> f64,
) -> Row {
    row(name, help, Source::EachCounter(value))
}

const fn each_gauge(
    name: &'static str,
    help: &'static str,
    value: fn(&Session, &Snapshot) -> f64,
) -> Row {
    row(name, help, Source::EachGauge(value))
}

/// Returns the sum of `of` over all addresses with packets that missed the redirect; no value if nft cannot be run.
fn past(seen: &Seen, of: fn(&MissedPackets) -> u64) -> Values {
    // Sums integers, since the sum of an empty sequence of f64 is -0.0.
    let sum = |counts: &Vec<MissedPackets>| counts.iter().map(of).fold(0, u64::saturating_add);
    let past = seen.past.as_ref().map(sum);
    past.map_or_else(Vec::new, |sum| one(number(sum)))
}

fn one(value: f64) -> Values {
    vec![(Vec::new(), value)]
}

fn by(label: &'static str, of: &Counts) -> Values {
    let labelled = |(key, count): (&String, &f64)| (vec![(label, key.clone())], *count);
    of.iter().map(labelled).collect()
}

fn each(seen: &Seen, value: fn(&Session, &Snapshot) -> f64) -> Values {
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
        .map(|(session, snapshot)| (labels(session), value(session, snapshot)))
        .collect()
}

impl Seen {
    fn of(agent: &Agent) -> Self {
        let config = agent.config();
        let (totals, under_way) = agent.sessions.snapshot();
        let with_snapshot = |session: Arc<Session>| {
            let snapshot = session.snapshot();
            (session, snapshot)
        };
        let under_way = under_way.into_iter().map(with_snapshot);
        let (migrations, tunnels): (Vec<_>, Vec<_>) =
            under_way.partition(|(session, _)| session.subject.kind == Kind::Migration);
        let mut traffic = totals.traffic.clone();
        for (session, snapshot) in migrations.iter().chain(&tunnels) {
            traffic.add(session, snapshot);
        }
        Self {
            totals,
            traffic,
            migrations,
            tunnels: tunnels.len(),
            bandwidth: config.max_bandwidth.0,
            cpu: config.cpu_limit,
            most: config.migrations,
            past: table::counts().ok(),
        }
    }
}

struct Collected(Seen);

impl fmt::Debug for Collected {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        f.write_str("Collected")
    }
}

impl Collector for Collected {
    fn encode(&self, mut encoder: DescriptorEncoder<'_>) -> Result<(), fmt::Error> {
        let seen = &self.0;
        for row in TABLE {
            let kind = row.values.kind();
            let mut metric = encoder.encode_descriptor(row.name, row.help, None, kind)?;
            let values = match row.values {
                Source::Counter(values) | Source::Gauge(values) => values(seen),
                Source::EachCounter(value) | Source::EachGauge(value) => each(seen, value),
                Source::Histogram(histograms) => {
                    for (direction, histogram) in histograms(seen) {
                        histogram.encode(metric.encode_family(&[("direction", *direction)])?)?;
                    }
                    continue;
                }
            };
            let encode = |encoder: &mut MetricEncoder<'_>, value: f64| match kind {
                MetricType::Counter => encoder.encode_counter::<NoLabelSet, _, f64>(&value, None),
                _ => encoder.encode_gauge(&value),
            };
            for (labels, value) in values {
                if labels.is_empty() {
                    encode(&mut metric, value)?;
                } else {
                    encode(&mut metric.encode_family(&labels)?, value)?;
                }
            }
        }
        Ok(())
    }
}

/// Returns the metrics in `format`.
#[must_use]
pub fn text(agent: &Agent, format: Format) -> String {
    let mut registry = Registry::default();
    registry.register_collector(Box::new(Collected(Seen::of(agent))));
    let mut text = String::new();
    // Writing to a string cannot fail.
    let _ = encode(&mut text, &registry);
    match format {
        Format::OpenMetrics => text,
        Format::Text => of_open_metrics(&text),
    }
}

/// Converts OpenMetrics to Prometheus's text format: counters get the names of their samples, and the final line is removed.
fn of_open_metrics(text: &str) -> String {
    let is_counter = |row: &&Row| matches!(row.values.kind(), MetricType::Counter);
    let counters = TABLE.iter().filter(is_counter);
    let counters: Vec<_> = counters.map(|row| row.name).collect();
    let mut out = String::new();
    for line in text.lines().filter(|line| *line != "# EOF") {
        let described = ["# HELP ", "# TYPE "].into_iter().find_map(|prefix| {
            let (name, rest) = line.strip_prefix(prefix)?.split_once(' ')?;
            counters.contains(&name).then_some((prefix, name, rest))
        });
        match described {
            Some((prefix, name, rest)) => {
                out.extend([prefix, name, "_total ", rest]);
            }
            None => out.push_str(line),
        }
        out.push('\n');
    }
    out
}

#[cfg(test)]
mod tests {
    use std::collections::{HashMap, HashSet};
    use std::io::Write;
    use std::process::{Command, Stdio};
    use std::time::Duration;

    use hotlift::Status;
    use hotlift::relay::{RelayProgress, RelayReport};
    use hotlift_testkit::skip;

    use super::*;
    use crate::downtimes::Downtimes;
    use crate::fixture::{agent, session, subject};
    use crate::session::Direction;

    const FORMATS: [Format; 2] = [Format::Text, Format::OpenMetrics];

    /// Returns the value of each sample; the key is its name with labels.
    fn samples(text: &str) -> HashMap<String, f64> {
        let lines = text.lines().filter(|line| !line.starts_with('#'));
        let sample = |line: &str| {
            let (series, value) = line.rsplit_once(' ').expect(line);
            (series.to_owned(), value.parse().expect(line))
        };
        lines.map(sample).collect()
    }

    /// Creates two agents: without a session, and with sessions of each kind.
    fn agents() -> [Arc<Agent>; 2] {
        let [idle, busy] = [agent(""), agent("")];
        for (id, direction) in [(1, Direction::Outgoing), (2, Direction::Incoming)] {
            for (id, kind) in [(id, Kind::Migration), (id + 2, Kind::Tunnel)] {
                let (under_way, _) = session(subject(id, direction, kind));
                busy.sessions.add(&under_way).unwrap();
                let (ended, _) = session(subject(id + 10, direction, kind));
                busy.sessions.add(&ended).unwrap();
                ended.record_status(Status::Device);
                ended.record_status(Status::Completed);
                let report = (kind == Kind::Migration).then(RelayReport::default);
                busy.ended(&ended, Ok(report));
            }
        }
        [idle, busy]
    }

    /// Checks that `text` follows the rules of `format`, and Prometheus's conventions for names.
    fn assert_well_formed(text: &str, format: Format) {
        let mut families: HashMap<&str, (&str, bool)> = HashMap::new();
        let mut series = HashSet::new();
        for line in text.lines().filter(|line| *line != "# EOF") {
            if let Some(rest) = line.strip_prefix("# HELP ") {
                let (name, help) = rest.split_once(' ').expect(line);
                assert!(help.len() > 3, "{line}");
                assert!(families.insert(name, ("", false)).is_none(), "{line}");
                continue;
            }
            if let Some(rest) = line.strip_prefix("# TYPE ") {
                let (name, kind) = rest.split_once(' ').expect(line);
                assert_eq!(families.insert(name, (kind, false)), Some(("", false)));
                continue;
            }
            let (sample, value) = line.rsplit_once(' ').expect(line);
            assert!(value.parse::<f64>().is_ok_and(f64::is_finite), "{line}");
            assert!(series.insert(sample), "twice: {line}");
            let name = sample.split('{').next().unwrap();
            let is_plain = |c: char| c.is_ascii_lowercase() || c.is_ascii_digit() || c == '_';
            assert!(name.chars().all(is_plain), "{line}");
            let base = ["_bucket", "_sum", "_count"]
                .into_iter()
                .find_map(|suffix| name.strip_suffix(suffix))
                .filter(|base| families.contains_key(base));
            let family = match (base, format) {
                (Some(base), _) => base,
                (None, Format::Text) => name,
                (None, Format::OpenMetrics) => name.strip_suffix("_total").unwrap_or(name),
            };
            let Some((kind, is_seen)) = families.get_mut(family) else {
                panic!("no HELP and TYPE before {line}");
            };
            *is_seen = true;
            assert_eq!(name.ends_with("_total"), *kind == "counter", "{line}");
            assert_eq!(base.is_some(), *kind == "histogram", "{line}");
            let units = ["_ms", "_kib", "_mib", "_percent", "_bits"];
            assert!(!units.iter().any(|unit| name.contains(unit)), "{line}");
        }
        let ends = usize::from(format == Format::OpenMetrics);
        assert_eq!(usize::from(text.ends_with("\n# EOF\n")), ends);
        assert_eq!(text.matches("# EOF").count(), ends);
        // Only metrics of running migrations may have no samples.
        let empty = families.iter().filter(|(_, (_, is_seen))| !is_seen);
        for (name, _) in empty {
            assert!(
                name.starts_with("hotlift_migration_"),
                "no sample of {name}"
            );
        }
    }

    #[test]
    fn both_formats_keep_their_rules_and_the_conventions_for_names() {
        for agent in agents() {
            for format in FORMATS {
                assert_well_formed(&text(&agent, format), format);
            }
        }
    }

    #[test]
    fn promtool_reports_no_problem() {
        for agent in agents() {
            let set = std::env::var_os("HOTLIFT_PROMTOOL").filter(|path| !path.is_empty());
            let promtool = Command::new(set.unwrap_or_else(|| "promtool".into()))
                .args(["check", "metrics"])
                .stdin(Stdio::piped())
                .stdout(Stdio::piped())
                .stderr(Stdio::piped())
                .spawn();
            let Ok(mut promtool) = promtool else {
                return skip!("promtool", "not there; scripts/promtool fetches it");
            };
            let mut stdin = promtool.stdin.take().unwrap();
            stdin
                .write_all(text(&agent, Format::Text).as_bytes())
                .unwrap();
            drop(stdin);
            let output = promtool.wait_with_output().unwrap();
            let words = [output.stdout, output.stderr].concat();
            let words = String::from_utf8_lossy(&words);
            assert!(output.status.success() && words.is_empty(), "{words}");
        }
    }

    #[test]
    fn every_counter_exists_from_the_start_and_keeps_its_labels() {
        let counters = |agent: &Arc<Agent>| {
            let mut names: Vec<_> = samples(&text(agent, Format::Text)).into_keys().collect();
            names.retain(|name| name.starts_with("hotlift_agent_"));
            names.sort();
            names
        };
        let [idle, busy] = agents();
        let names = counters(&idle);
        assert!(!text(&idle, Format::Text).contains(" -0"));
        assert_eq!(names, counters(&busy), "what has happened adds no series");
        for series in [
            "hotlift_agent_ended_total{direction=\"incoming\",kind=\"tunnel\",outcome=\"cancelled\"}",
            "hotlift_agent_pages_total{method=\"zero\"}",
            "hotlift_agent_pages_total{method=\"zstd\"}",
            "hotlift_agent_cpu_seconds_total{thread=\"relay/send\"}",
            "hotlift_agent_migrations{direction=\"outgoing\",state=\"waiting\"}",
            "hotlift_agent_past_redirect_bytes_total",
        ] {
            assert!(
                names.iter().any(|name| name == series),
                "{series}: {names:?}"
            );
        }
    }

    #[test]
    fn counters_grow_while_a_migration_runs_and_never_shrink_at_its_end() {
        const SERIES: [(&str, f64); 5] = [
            (
                "hotlift_agent_sent_bytes_total{direction=\"outgoing\"}",
                100.0,
            ),
            (
                "hotlift_agent_received_bytes_total{direction=\"outgoing\"}",
                300.0,
            ),
            ("hotlift_agent_pages_total{method=\"zstd\"}", 7.0),
            ("hotlift_agent_pages_total{method=\"zero\"}", 5.0),
            ("hotlift_agent_rounds_total", 2.0),
        ];
        let agent = agent("");
        let mut begun = Vec::new();
        for id in [1, 2] {
            let (migration, _) = session(subject(id, Direction::Outgoing, Kind::Migration));
            agent.sessions.add(&migration).unwrap();
            migration.has_method("zstd");
            migration.record_progress(&RelayProgress {
                elapsed: Duration::from_secs(1),
                received_bytes: 300,
                sent_bytes: 100,
                normal_pages: 7,
                zero_pages: 5,
                barriers: 2,
                total_bytes: 1 << 20,
            });
            begun.push(migration);
        }
        let values = || samples(&text(&agent, Format::Text));
        let under_way = values();
        for (series, count) in SERIES {
            assert_eq!(under_way[series], 2.0 * count, "{series}");
        }
        let own = "hotlift_migration_sent_bytes_total{id=\"00000001\",direction=\"outgoing\",to=\"192.0.2.2:49152\"}";
        assert_eq!(under_way[own], 100.0);
        // One session completes with slightly larger counts; the other session fails.
        let report = RelayReport {
            sent_bytes: 101,
            received_bytes: 300,
            normal_pages: 7,
            zero_pages: 5,
            barriers: 2,
            method: "zstd".to_owned(),
            ..RelayReport::default()
        };
        agent.ended(&begun[0], Ok(Some(report)));
        let lost = crate::error::CarryError::Silent;
        agent.ended(&begun[1], Err(lost));
        let ended = values();
        for (series, _) in SERIES {
            assert!(ended[series] >= under_way[series], "{series} shrinks");
        }
        assert!(!ended.contains_key(own));
        let count = "hotlift_agent_migration_duration_seconds_count{direction=\"outgoing\"}";
        assert_eq!(ended[count], 1.0, "a failed migration has no duration");
    }

    #[test]
    fn downtime_is_shown_for_each_migration_and_in_total() {
        let agent = agent("");
        let (moved, _listener) = session(subject(1, Direction::Outgoing, Kind::Migration));
        agent.sessions.add(&moved).unwrap();
        moved.record_status(Status::Device);
        let under_way = "hotlift_migration_downtime_seconds{id=\"00000001\",direction=\"outgoing\"";
        let shown = text(&agent, Format::OpenMetrics);
        assert!(shown.contains(under_way), "{shown}");
        moved.record_status(Status::Completed);
        let downtime = moved.snapshot().downtime.unwrap().as_secs_f64();
        agent.ended(&moved, Ok(Some(RelayReport::default())));
        let shown = text(&agent, Format::OpenMetrics);
        for line in [
            format!("hotlift_agent_downtime_seconds_total{{direction=\"outgoing\"}} {downtime}"),
            "hotlift_agent_downtimes_total{direction=\"outgoing\"} 1".to_owned(),
        ] {
            assert!(shown.contains(&line), "{line} is missing in\n{shown}");
        }
        assert!(!shown.contains(under_way), "{shown}");
        let histogram = "hotlift_agent_migration_downtime_seconds_bucket{le=\"";
        let of_outgoing = |line: &str| {
            let (bound, rest) = line.strip_prefix(histogram)?.split_once('"')?;
            let is_outgoing = rest.contains("direction=\"outgoing\"");
            is_outgoing.then(|| bound.to_owned())
        };
        let bounds: Vec<_> = shown.lines().filter_map(of_outgoing).collect();
        let expected = "0.01 0.02 0.05 0.1 0.2 0.3 0.5 1.0 2.0 5.0 10.0 +Inf";
        assert_eq!(bounds.join(" "), expected, "{shown}");
    }

    #[test]
    fn a_migration_of_unknown_downtime_is_in_no_percentile_and_no_histogram() {
        let agent = agent("");
        let ended = |id, statuses: &[Status], outcome| {
            let (migration, _listener) = session(subject(id, Direction::Incoming, Kind::Migration));
            agent.sessions.add(&migration).unwrap();
            for status in statuses {
                migration.record_status(*status);
            }
            agent.ended(&migration, outcome);
        };
        let completed = || Ok(Some(RelayReport::default()));
        ended(1, &[Status::Active, Status::Completed], completed());
        let lost = Err(crate::error::CarryError::Silent);
        ended(2, &[Status::Device, Status::Failed], lost);
        assert_eq!(agent.sessions.totals().downtimes(), Downtimes::default());
        ended(3, &[Status::Device, Status::Completed], completed());
        let Downtimes { incoming, outgoing } = agent.sessions.totals().downtimes();
        assert_eq!((incoming.migrations, outgoing.migrations), (1, 0));
        assert!(incoming.p50_seconds.is_some() && incoming.p50_seconds == incoming.max_seconds);
        let count = "hotlift_agent_migration_downtime_seconds_count{direction=\"incoming\"}";
        assert_eq!(samples(&text(&agent, Format::Text))[count], 1.0);
    }
}

//! Formats the output of `info` from the JSON answers of QMP. The lines and their order are those of QEMU 10.0.

use std::fmt::Write;

use hotlift::options::{OPTIONS, OUR_PREFIX, Values};
use serde_json::Value as Json;

/// Format of a value.
enum MemberFormat {
    Ms,
    Mbps,
    Kbytes,
    Bytes,
    Pages,
    Number,
    Rate,
    Times,
    /// Numbers separated by commas.
    List,
}

/// A line in the output of `info migrate`.
struct Row {
    label: &'static str,
    /// JSON pointer to the value in the answer of `query-migrate`.
    member: &'static str,
    shown: MemberFormat,
    /// True if the line is also shown for the value 0.
    zero: bool,
}

const fn row(label: &'static str, member: &'static str, shown: MemberFormat, zero: bool) -> Row {
    Row {
        label,
        member,
        shown,
        zero,
    }
}

/// Lines of `info migrate` in QEMU's order. The lines of `compress` are from QEMU up to 9.0.
const ROWS: &[Row] = &[
    row("total time", "/total-time", MemberFormat::Ms, true),
    row(
        "expected downtime",
        "/expected-downtime",
        MemberFormat::Ms,
        true,
    ),
    row("downtime", "/downtime", MemberFormat::Ms, true),
    row("setup", "/setup-time", MemberFormat::Ms, true),
    row(
        "transferred ram",
        "/ram/transferred",
        MemberFormat::Kbytes,
        true,
    ),
    row("throughput", "/ram/mbps", MemberFormat::Mbps, true),
    row(
        "remaining ram",
        "/ram/remaining",
        MemberFormat::Kbytes,
        true,
    ),
    row("total ram", "/ram/total", MemberFormat::Kbytes, true),
    row("duplicate", "/ram/duplicate", MemberFormat::Pages, true),
    row("normal", "/ram/normal", MemberFormat::Pages, true),
    row(
        "normal bytes",
        "/ram/normal-bytes",
        MemberFormat::Kbytes,
        true,
    ),
    row(
        "dirty sync count",
        "/ram/dirty-sync-count",
        MemberFormat::Number,
        true,
    ),
    row("page size", "/ram/page-size", MemberFormat::Kbytes, true),
    row(
        "multifd bytes",
        "/ram/multifd-bytes",
        MemberFormat::Kbytes,
        true,
    ),
    row(
        "pages-per-second",
        "/ram/pages-per-second",
        MemberFormat::Number,
        true,
    ),
    row(
        "dirty pages rate",
        "/ram/dirty-pages-rate",
        MemberFormat::Pages,
        false,
    ),
    row(
        "postcopy request count",
        "/ram/postcopy-requests",
        MemberFormat::Number,
        false,
    ),
    row(
        "precopy ram",
        "/ram/precopy-bytes",
        MemberFormat::Kbytes,
        false,
    ),
    row(
        "downtime ram",
        "/ram/downtime-bytes",
        MemberFormat::Kbytes,
        false,
    ),
    row(
        "postcopy ram",
        "/ram/postcopy-bytes",
        MemberFormat::Kbytes,
        false,
    ),
    row(
        "Zero-copy-send fallbacks happened",
        "/ram/dirty-sync-missed-zero-copy",
        MemberFormat::Times,
        false,
    ),
    row(
        "cache size",
        "/xbzrle-cache/cache-size",
        MemberFormat::Bytes,
        true,
    ),
    row(
        "xbzrle transferred",
        "/xbzrle-cache/bytes",
        MemberFormat::Kbytes,
        true,
    ),
    row(
        "xbzrle pages",
        "/xbzrle-cache/pages",
        MemberFormat::Pages,
        true,
    ),
    row(
        "xbzrle cache miss",
        "/xbzrle-cache/cache-miss",
        MemberFormat::Pages,
        true,
    ),
    row(
        "xbzrle cache miss rate",
        "/xbzrle-cache/cache-miss-rate",
        MemberFormat::Rate,
        true,
    ),
    row(
        "xbzrle encoding rate",
        "/xbzrle-cache/encoding-rate",
        MemberFormat::Rate,
        true,
    ),
    row(
        "xbzrle overflow",
        "/xbzrle-cache/overflow",
        MemberFormat::Number,
        true,
    ),
    row(
        "compression pages",
        "/compression/pages",
        MemberFormat::Pages,
        true,
    ),
    row(
        "compression busy",
        "/compression/busy",
        MemberFormat::Number,
        true,
    ),
    row(
        "compression busy rate",
        "/compression/busy-rate",
        MemberFormat::Rate,
        true,
    ),
    row(
        "compressed size",
        "/compression/compressed-size",
        MemberFormat::Kbytes,
        true,
    ),
    row(
        "compression rate",
        "/compression/compression-rate",
        MemberFormat::Rate,
        true,
    ),
    row(
        "cpu throttle percentage",
        "/cpu-throttle-percentage",
        MemberFormat::Number,
        true,
    ),
    row(
        "postcopy blocktime",
        "/postcopy-blocktime",
        MemberFormat::Number,
        true,
    ),
    row(
        "postcopy vcpu blocktime",
        "/postcopy-vcpu-blocktime",
        MemberFormat::List,
        true,
    ),
];

impl Row {
    fn write(&self, text: &mut String, info: &Json) {
        let Some(member) = info.pointer(self.member) else {
            return;
        };
        let (label, whole) = (self.label, member.as_u64().unwrap_or(0));
        if whole == 0 && !self.zero {
            return;
        }
        let real = member.as_f64().unwrap_or(0.0);
        let _ = match self.shown {
            MemberFormat::Ms => writeln!(text, "{label}: {whole} ms"),
            MemberFormat::Mbps => writeln!(text, "{label}: {real:.2} mbps"),
            MemberFormat::Kbytes => writeln!(text, "{label}: {} kbytes", whole >> 10),
            MemberFormat::Bytes => writeln!(text, "{label}: {whole} bytes"),
            MemberFormat::Pages => writeln!(text, "{label}: {whole} pages"),
            MemberFormat::Number => writeln!(text, "{label}: {whole}"),
            MemberFormat::List => {
                let items: Vec<_> = member.as_array().into_iter().flatten().map(plain).collect();
                writeln!(text, "{label}: {}", items.join(","))
            }
            MemberFormat::Rate => writeln!(text, "{label}: {real:.2}"),
            MemberFormat::Times => writeln!(text, "{label}: {whole} times"),
        };
    }
}

/// Formats `info migrate`. The first line has the capabilities, as in QEMU before 2.12. Later versions print `globals` of
/// machine types there instead.
pub fn migration(info: &Json, capabilities: &Json, all: bool) -> String {
    let mut text = String::from("Capabilities:");
    for (name, state) in states(capabilities) {
        let _ = write!(text, " {name}: {state}");
    }
    text.push('\n');
    if let Some(reasons) = info["blocked-reasons"].as_array() {
        text.push_str("Outgoing migration blocked:\n");
        for reason in reasons.iter().filter_map(Json::as_str) {
            let _ = writeln!(text, "  {reason}");
        }
    }
    if let Some(line) = status_line(info) {
        text.push_str(&line);
    }
    for row in ROWS {
        row.write(&mut text, info);
    }
    if let Some(addresses) = info["socket-address"].as_array() {
        text.push_str("socket address: [\n");
        for address in addresses {
            let _ = writeln!(text, "\t{}", socket_address(address));
        }
        text.push_str("]\n");
    }
    if all && let Some(members) = info.as_object() {
        for (name, member) in members
            .iter()
            .filter(|(name, _)| name.starts_with(OUR_PREFIX))
        {
            let _ = writeln!(text, "{}: {}", name, plain(member));
        }
    }
    text
}

/// Formats the line with the state, and with the reason if the migration has failed. Returns `None` before the first migration.
pub fn status_line(info: &Json) -> Option<String> {
    let status = info["status"].as_str()?;
    Some(match info["error-desc"].as_str() {
        Some(reason) if status == "failed" => format!("Migration status: {status} ({reason})\n"),
        _ => format!("Migration status: {status}\n"),
    })
}

/// Formats the progress of a migration in one line.
pub fn progress_line(info: &Json) -> String {
    let ram = &info["ram"];
    let kbytes = |name: &str| ram[name].as_u64().unwrap_or(0) >> 10;
    let status = info["status"].as_str().unwrap_or("none");
    if !ram.is_object() {
        return status.to_owned();
    }
    format!(
        "{status}: round {}, {} of {} kbytes remain, {} kbytes transferred, {:.2} mbps",
        ram["dirty-sync-count"].as_u64().unwrap_or(0),
        kbytes("remaining"),
        kbytes("total"),
        kbytes("transferred"),
        ram["mbps"].as_f64().unwrap_or(0.0),
    )
}

/// Formats a `SocketAddress` of QAPI in the form that users type.
fn socket_address(address: &Json) -> String {
    let part = |name: &str| address[name].as_str().unwrap_or_default();
    match part("type") {
        "inet" if part("host").contains(':') => format!("tcp:[{}]:{}", part("host"), part("port")),
        "inet" => format!("tcp:{}:{}", part("host"), part("port")),
        "unix" => format!("unix:{}", part("path")),
        _ => plain(address),
    }
}

/// Iterates over the capabilities, each with its value `on` or `off`.
fn states(capabilities: &Json) -> impl Iterator<Item = (&str, &'static str)> {
    let all = capabilities.as_array().into_iter().flatten();
    all.filter_map(|one| {
        let on = one["state"].as_bool()?;
        Some((one["capability"].as_str()?, if on { "on" } else { "off" }))
    })
}

/// Formats `info migrate_capabilities`.
pub fn capabilities(capabilities: &Json) -> String {
    states(capabilities)
        .map(|(name, state)| format!("{name}: {state}\n"))
        .collect()
}

/// Formats `info migrate_parameters`: first the parameters of the table in its order, then all others in the QMP answer.
pub fn parameters(parameters: &Json) -> String {
    let Some(all) = parameters.as_object() else {
        return String::new();
    };
    let mut text = String::new();
    let mut shown = Vec::new();
    for row in OPTIONS {
        let name = row.qmp_name();
        let Some(value) = all.get(&*name) else {
            continue;
        };
        let unit = match row.unit {
            "ms" => " ms",
            "bytes" => " bytes",
            "bytes/s" => " bytes/second",
            _ => "",
        };
        let _ = match (row.values, value) {
            (Values::Text(_), Json::String(string)) => writeln!(text, "{name}: '{string}'"),
            _ => writeln!(text, "{name}: {}{unit}", plain(value)),
        };
        shown.push(name);
    }
    for (name, value) in all
        .iter()
        .filter(|(name, _)| !shown.iter().any(|one| *one == **name))
    {
        let _ = match value {
            Json::String(string) => writeln!(text, "{name}: '{string}'"),
            other => writeln!(text, "{name}: {}", plain(other)),
        };
    }
    text
}

/// Formats a value without quotes. Booleans become `on` or `off`. The strings of a list are separated by spaces.
fn plain(value: &Json) -> String {
    match value {
        Json::Bool(on) => if *on { "on" } else { "off" }.to_owned(),
        Json::String(text) => text.clone(),
        Json::Array(items) if items.iter().all(Json::is_string) => {
            let items: Vec<_> = items.iter().filter_map(Json::as_str).collect();
            items.join(" ")
        }
        other => other.to_string(),
    }
}

/// Formats `info status`.
pub fn status(status: &Json) -> String {
    let running = status["running"].as_bool().unwrap_or(false);
    match status["status"].as_str() {
        _ if running => "VM status: running\n".to_owned(),
        Some(why) if why != "paused" => format!("VM status: paused ({why})\n"),
        _ => "VM status: paused\n".to_owned(),
    }
}

/// Formats `info version`.
pub fn version(version: &Json) -> String {
    let part = |name: &str| version["qemu"][name].as_u64().unwrap_or(0);
    let package = version["package"].as_str().unwrap_or_default();
    format!(
        "{}.{}.{}{package}\n",
        part("major"),
        part("minor"),
        part("micro")
    )
}

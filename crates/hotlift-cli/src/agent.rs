//! `hotlift agent`: runs the agent of a host, or sends it a command over its control socket.

use std::path::PathBuf;

use clap::{Args, Subcommand};
use hotlift_agent::commands::{AgentInfo, MigrationRow};
use hotlift_agent::config::{CONFIG_FILE, Config, Plaintext};
use hotlift_agent::downtimes::{DowntimeFigures, Downtimes};
use hotlift_agent::error::AgentError;
use hotlift_agent::messages::{Id, Kind};
use hotlift_agent::session::Direction;
use hotlift_agent::{redirect_check, rules, table};
use hotlift_terminal::output::{print_line, warn};
use hotlift_terminal::progress::bytes;
use hotlift_terminal::table::align_with_words;
use hotlift_terminal::width::fitted;
use rustix::process::geteuid;
use serde_json::{Value, json};

use crate::agent_control::{ControlArgs, agent_error, of_this_host};
use crate::error::CommandError;
use crate::output_args::print;

/// `hotlift agent`.
#[derive(Debug, Subcommand)]
pub enum AgentCommand {
    /// Run the agent until SIGTERM; after SIGHUP it reads its configuration file again
    Run(RunArgs),
    /// Check the configuration file and the certificates; as root, also check that migrations of this host reach the agent
    Check(ConfigArgs),
    /// Print the nftables table that the agent installs, for use in your own ruleset; or remove the table
    Rules(RulesArgs),
    /// Show the state of the agent, its limits of bandwidth and CPU time, the totals of its migrations, and the downtime of the
    /// latest ones as its relays measured it
    Status(AskArgs),
    /// List the running migrations, and the migrations that ended last
    List(AskArgs),
    /// Cancel a migration; its guest stays on the source host
    Cancel(CancelArgs),
    /// Change the bandwidth limit or the weight of a running migration that leaves this host
    Limit(LimitArgs),
}

/// Where the configuration is.
#[derive(Debug, Args)]
pub struct ConfigArgs {
    /// Configuration file
    #[arg(long, value_name = "FILE", default_value = CONFIG_FILE)]
    config: PathBuf,
}

/// Flags of `agent run`.
#[derive(Debug, Args)]
pub struct RunArgs {
    #[command(flatten)]
    config: ConfigArgs,
    /// Do not change nftables; use this if the host's own ruleset contains the table of 'hotlift agent rules'
    #[arg(long)]
    no_redirect: bool,
}

/// Flags of `agent rules`.
#[derive(Debug, Args)]
pub struct RulesArgs {
    #[command(flatten)]
    config: ConfigArgs,
    /// Remove the nftables table that an ended agent left; migrations then leave this host unencrypted
    #[arg(long)]
    remove: bool,
}

/// Flags of a question.
#[derive(Debug, Args)]
pub struct AskArgs {
    #[command(flatten)]
    control: ControlArgs,
    /// Print one line of JSON instead of a table
    #[arg(long)]
    json: bool,
}

/// Flags of `agent cancel`.
#[derive(Debug, Args)]
pub struct CancelArgs {
    /// Id of the migration, from 'hotlift agent list' or from the log
    id: Id,
    #[command(flatten)]
    control: ControlArgs,
}

/// Flags of `agent limit`.
#[derive(Debug, Args)]
#[group(id = "limits", required = true, multiple = true, args = ["max_bandwidth", "weight"])]
pub struct LimitArgs {
    /// Id of the migration, from 'hotlift agent list' or from the log
    id: Id,
    /// Bandwidth limit of the migration in bytes a second, such as 100M; 0 is unlimited
    #[arg(long, value_name = "RATE")]
    max_bandwidth: Option<String>,
    /// Weight of the migration when the agent divides bandwidth and cores, 1 to 1000; it is 100 unless agent.toml sets it
    #[arg(long, value_name = "N")]
    weight: Option<u32>,
    #[command(flatten)]
    control: ControlArgs,
}

/// Runs `hotlift agent`.
pub fn run(command: &AgentCommand) -> Result<(), CommandError> {
    match command {
        AgentCommand::Run(args) => {
            hotlift_agent::run(&args.config.config, !args.no_redirect).map_err(agent_error)
        }
        AgentCommand::Check(args) => {
            let checked = hotlift_agent::check(&args.config).map_err(agent_error)?;
            for line in checked.warnings.iter().chain(&checked.problems) {
                warn!("hotlift: {line}");
            }
            check_redirect(&checked.config)?;
            let (dir, count) = (checked.folder, checked.problems.len());
            if count > 0 {
                return Err(agent_error(AgentError::Certificates { dir, count }));
            }
            print_line!("{}: no problem found", args.config.display());
            Ok(())
        }
        AgentCommand::Rules(args) if args.remove => {
            table::remove().map_err(|error| agent_error(error.into()))
        }
        AgentCommand::Rules(args) => {
            let config = Config::read(&args.config.config);
            let config = config.map_err(|error| agent_error(error.into()))?;
            let rules = rules::rules(&config).map_err(|error| agent_error(error.into()))?;
            print_line!("{}", rules.text.trim_end());
            Ok(())
        }
        AgentCommand::Status(args) => {
            let info: AgentInfo = args.control.ask("query-agent", &Value::Null)?;
            Ok(print(args.json, &info, || status(&info))?)
        }
        AgentCommand::List(args) => {
            let rows: Vec<MigrationRow> = args.control.ask("query-migrations", &Value::Null)?;
            Ok(print(args.json, &rows, || list(&rows))?)
        }
        AgentCommand::Cancel(args) => {
            let arguments = json!({ "id": args.id });
            args.control.ask::<Value>("agent-cancel", &arguments)?;
            Ok(())
        }
        AgentCommand::Limit(args) => {
            let mut arguments = json!({ "id": args.id });
            if let Some(rate) = &args.max_bandwidth {
                arguments["max-bandwidth"] = json!(rate);
            }
            if let Some(weight) = args.weight {
                arguments["weight"] = json!(weight);
            }
            args.control.ask::<Value>("agent-limit", &arguments)?;
            Ok(())
        }
    }
}

/// Checks that this host's migrations reach the agent, prints the result, and sends it to the agent.
fn check_redirect(config: &Config) -> Result<(), CommandError> {
    let control = ControlArgs {
        control: Some(config.control.clone()),
    };
    // Only for root: another user can neither check nor, most likely, query the agent.
    let has_agent = geteuid().is_root() && of_this_host(&control).is_some();
    let found = redirect_check::check_redirect(config, has_agent)
        .map_err(|error| agent_error(error.into()))?;
    for line in found.notes.iter().chain(&found.problems) {
        warn!("hotlift: {line}");
    }
    if has_agent {
        control.ask::<Value>("agent-checked", &json!(found))?;
    }
    match found.problems.len() {
        0 => Ok(()),
        count => Err(agent_error(AgentError::NotRedirected { count })),
    }
}

fn status(info: &AgentInfo) -> String {
    let or_unlimited = |limit: Option<String>| limit.unwrap_or_else(|| "unlimited".to_owned());
    let bandwidth = (info.max_bandwidth > 0).then(|| format!("{}/s", bytes(info.max_bandwidth)));
    let cores = (info.cpu_limit > 0.0).then(|| info.cpu_limit.to_string());
    let most = (info.migrations > 0).then(|| info.migrations.to_string());
    let row = |name: &str, value: String| vec![name.to_owned(), value];
    let state = match info.is_ending {
        true => "shutting down, accepts no new migrations",
        false => "accepts migrations",
    };
    let plaintext = match info.plaintext {
        Some(Plaintext::Refuse) => "refused",
        Some(Plaintext::Allow) => "allowed",
        None => "not reported by this agent",
    };
    let downtime = |of: fn(&Downtimes) -> DowntimeFigures| match &info.downtime {
        Some(downtimes) => percentiles(&of(downtimes)),
        None => "not reported by this agent".to_owned(),
    };
    let past: Vec<_> = info
        .past_redirect
        .iter()
        .map(|count| {
            format!(
                "{}: {} packets, {}",
                count.to,
                count.packets,
                bytes(count.bytes)
            )
        })
        .collect();
    let past = match past.is_empty() {
        true => "nothing".to_owned(),
        false => past.join("; "),
    };
    let last_check = match &info.last_check {
        None => "none since the start ('hotlift agent check' as root)".to_owned(),
        Some(check) => match check.found.problems.len() {
            0 => format!("{}: no problem found", check.at),
            count => format!("{}: problems found: {count}", check.at),
        },
    };
    let rows = [
        row("version", info.version.clone()),
        row("listens on", info.listen.clone()),
        row("state", state.to_owned()),
        row("under way", info.under_way.to_string()),
        row("bandwidth of all", or_unlimited(bandwidth)),
        row("cores of all", or_unlimited(cores)),
        row("outgoing at once", or_unlimited(most)),
        row("completed", info.completed.to_string()),
        row("failed", info.failed.to_string()),
        row("downtime, outgoing", downtime(|of| of.outgoing)),
        row("downtime, incoming", downtime(|of| of.incoming)),
        row("refused", info.refusals.to_string()),
        row("TLS failures", info.tls_failures.to_string()),
        row("plaintext", plaintext.to_owned()),
        row("bypassed the redirect", past),
        row("last check", last_check),
    ];
    let mut text = fitted(&["agent", ""], &rows, |_| ());
    if let Some(check) = &info.last_check {
        for line in check.found.problems.iter().chain(&check.found.notes) {
            text += &format!("\n{line}");
        }
    }
    text
}

/// Returns the percentiles as text, with the number of migrations that they are of.
fn percentiles(figures: &DowntimeFigures) -> String {
    let DowntimeFigures {
        migrations,
        p50_seconds: Some(p50),
        p95_seconds: Some(p95),
        max_seconds: Some(max),
    } = figures
    else {
        return "no migration with a known downtime".to_owned();
    };
    let [p50, p95, max] = [p50, p95, max].map(|seconds| seconds * 1e3);
    format!("p50 {p50:.0} ms, p95 {p95:.0} ms, max {max:.0} ms, of {migrations}")
}

fn list(rows: &[MigrationRow]) -> String {
    if rows.is_empty() {
        return "no migrations".to_owned();
    }
    let header = [
        "id", "way", "to", "status", "seconds", "sent", "rate", "of RAM",
    ];
    let cells = rows.iter().map(|row| {
        let way = match row.direction {
            Direction::Outgoing => "out",
            Direction::Incoming => "in",
        };
        let pages = row.normal_pages + row.zero_pages;
        let share = (pages * 4096 * 100).checked_div(row.ram_bytes);
        vec![
            row.id.to_string(),
            way.to_owned(),
            row.to.clone(),
            match row.kind {
                Kind::Tunnel => "tunnel".to_owned(),
                Kind::Migration => row.status.clone(),
            },
            format!("{:.1}", row.seconds),
            bytes(row.sent_bytes),
            // Rounded to whole bytes.
            format!("{}/s", bytes(hotlift_terminal::progress::rounded(row.rate))),
            share.map_or_else(String::new, |share| format!("{share} %")),
        ]
    });
    let mut text = fitted(&header, &cells.collect::<Vec<_>>(), |table| {
        align_with_words(table, 1);
        for words in [2, 3] {
            align_left(table, words);
        }
    });
    for row in rows {
        if let Some(stall) = &row.stall {
            text += &format!("\n{}: {stall}", row.id);
        }
        if let Some(error) = &row.error {
            text += &format!("\n{}: {error}", row.id);
        }
    }
    text
}

fn align_left(table: &mut comfy_table::Table, column: usize) {
    if let Some(column) = table.column_mut(column) {
        column.set_cell_alignment(comfy_table::CellAlignment::Left);
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn the_list_names_the_host_that_delays_a_migration() {
        let row = serde_json::json!({
            "id": "1a2b3c4d", "direction": "outgoing", "kind": "migration", "status": "active",
            "to": "192.0.2.2:49152", "peer": "192.0.2.2", "seconds": 20.0, "sent-bytes": 0, "received-bytes": 0,
            "normal-pages": 0, "zero-pages": 0, "ram-bytes": 0, "rate": 0.0, "cpu-seconds": 0.0, "weight": 100,
            "limit": 0, "bandwidth": 0, "cores": 0.0, "downtime-seconds": 0.0,
            "stall": "192.0.2.2 silent for 12 s",
        });
        let row: MigrationRow = serde_json::from_value(row).unwrap();
        let text = list(&[row]);
        assert!(
            text.ends_with("\n1a2b3c4d: 192.0.2.2 silent for 12 s"),
            "{text}"
        );
    }

    #[test]
    fn the_status_shows_the_downtime_of_each_direction_in_80_columns() {
        let mut answer = serde_json::json!({
            "version": "0.1.0", "listen": "any:16520", "is-ending": false, "under-way": 0, "max-bandwidth": 0,
            "cpu-limit": 0.0, "migrations": 0, "completed": 312, "failed": 0, "refusals": 0, "tls-failures": 0,
        });
        let status = |answer: &Value| {
            let info: AgentInfo = serde_json::from_value(answer.clone()).unwrap();
            let text = super::status(&info);
            assert!(
                text.lines().all(|line| line.chars().count() <= 80),
                "{text}"
            );
            text
        };
        let older = status(&answer);
        assert_eq!(
            older.matches("not reported by this agent").count(),
            3,
            "{older}"
        );
        let slow = json!({ "migrations": 100, "p50-seconds": 0.0306, "p95-seconds": 1.25, "max-seconds": 98.7654 });
        let none = json!({ "migrations": 0, "p50-seconds": null, "p95-seconds": null, "max-seconds": null });
        answer["downtime"] = json!({ "outgoing": slow, "incoming": none });
        let text = status(&answer);
        let row = |name| text.lines().find(|line| line.contains(name)).unwrap();
        let outgoing = row("downtime, outgoing");
        assert!(
            outgoing.contains("p50 31 ms, p95 1250 ms, max 98765 ms, of 100"),
            "{text}"
        );
        let incoming = row("downtime, incoming");
        assert!(
            incoming.contains("no migration with a known downtime"),
            "{text}"
        );
        let again =
            serde_json::to_value(serde_json::from_value::<AgentInfo>(answer.clone()).unwrap());
        assert_eq!(again.unwrap()["downtime"], answer["downtime"]);
    }
}

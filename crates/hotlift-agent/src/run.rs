//! Runs an agent, from its start to its end.

use std::net::TcpListener;
use std::path::{Path, PathBuf};
use std::sync::Arc;
use std::thread;
use std::time::Duration;

use hotlift::Address;
use hotlift::error::error_line;
use hotlift::tls::Role;
use hotlift_mem::give_back_freed_memory;
use hotlift_monitor::Sockets;
use hotlift_qmp::QmpAddress;
use hotlift_qmp::server::{Commands, Events};
use signal_hook::consts::{SIGHUP, SIGINT, SIGTERM};
use signal_hook::iterator::Signals;

use crate::agent::{Agent, tls_of};
use crate::commands::AgentCommands;
use crate::config::{Config, LogLevel};
use crate::critical_threads::CriticalThreads;
use crate::error::AgentError;
use crate::log::Log;
use crate::names::OwnNames;
use crate::redirect::Redirected;
use crate::rules::rules;
use crate::table::{self, Changes, Table};
use crate::{budget, drain, http, names, notify, peer_port, redirect, table_watch};

/// Longest wait for the end of cancelled sessions when the agent ends.
const CANCEL_TIMEOUT: Duration = Duration::from_secs(10);

/// Result of the checks of an agent's configuration and certificates.
#[derive(Debug)]
pub struct Checked {
    /// The configuration.
    pub config: Config,
    /// Warnings about certificates: they work, but need attention.
    pub warnings: Vec<String>,
    /// Certificate problems that make a handshake with another agent fail.
    pub problems: Vec<String>,
    /// Folder of the certificates.
    pub folder: PathBuf,
}

/// Checks the configuration in `file`, and its certificates as in a handshake. Starts no agent.
///
/// # Errors
/// [`AgentError`] if an agent could not start with this configuration.
pub fn check(file: &Path) -> Result<Checked, AgentError> {
    let config = Config::read(file)?;
    if config.redirect {
        rules(&config)?;
    }
    let listing = tls_of(&config)?.listing();
    let warnings = listing.warnings.iter().map(ToString::to_string);
    let servers = listing.files.iter();
    let mut servers = servers.filter(|file| file.role == Some(Role::Server));
    let other = servers.find_map(|file| {
        let own = OwnNames::of_this_host(&config.listen);
        names::of_another_host(&file.path, &file.identity, &own, &names::resolve)
    });
    Ok(Checked {
        warnings: warnings.chain(other).collect(),
        problems: listing.problems().collect(),
        folder: listing.dir,
        config,
    })
}

/// Runs the agent with the configuration in `file` until a signal ends it. If `redirect` is false, nftables stays unchanged.
///
/// # Errors
/// [`AgentError`] if the agent cannot start, or if a critical thread ends early.
pub fn run(file: &Path, redirect: bool) -> Result<(), AgentError> {
    let config = Config::read(file).inspect_err(|error| {
        // Without a configuration file, this host is not set up for the agent.
        if redirect && !error.is_missing() {
            let (config, log) = (Config::of_good_keys(file), Log::new(LogLevel::Info));
            if let Err(error) = table::refuse_all(&config, &log) {
                log.write(LogLevel::Error, &error_line(&error));
            }
        }
    })?;
    give_back_freed_memory();
    let signals = Signals::new([SIGHUP, SIGINT, SIGTERM]);
    let mut signals = signals.map_err(AgentError::system("signal handlers"))?;
    let log = Log::new(config.log);
    // Before all other steps that can fail: with plaintext = "refuse", migrations must fail even if the agent does not start.
    let (changes, table) = match config.redirect && redirect {
        true => (Some(Changes::listen()?), Some(Table::new(&config, &log)?)),
        false => (None, None),
    };
    let listen: Address = config.listen.parse().map_err(AgentError::Listen)?;
    let listener = listen.listen().map_err(AgentError::Listen)?;
    let redirected = Redirected::listen(config.redirect_port).map_err(AgentError::Listen)?;
    if let Err(error) = redirected.mark() {
        let text = format!(
            "cannot mark the port of 'redirect-port', which the rules of 'hotlift agent rules' require: {error}"
        );
        log.write(LogLevel::Warning, &text);
    }
    let redirected = Arc::new(redirected);
    let metrics = match config.metrics.as_str() {
        "" => None,
        address => Some(
            TcpListener::bind(address).map_err(AgentError::system("the address of 'metrics'"))?,
        ),
    };
    let agent = Arc::new(Agent::new(file, config, &log, table)?);
    let config = agent.config();
    let commands: Arc<dyn Commands> = Arc::new(AgentCommands::new(&agent));
    let control = QmpAddress::Unix(config.control.clone());
    let _control = Sockets::qmp_at(control).serve(&commands, &Events::new())?;
    log.write(LogLevel::Info, &format!("listening on {}", config.listen));
    let of_parts = Arc::clone(&agent);
    let mut parts = CriticalThreads::new(move || of_parts.sessions.is_ending());
    let served = (|| {
        let of_port = Arc::clone(&agent);
        parts.start("agent/accept", move || {
            if let Err(error) = peer_port::serve(&of_port, &listener) {
                of_port.log.write(LogLevel::Error, &error_line(&error));
            }
        })?;
        let (of_redirect, redirected) = (Arc::clone(&agent), Arc::clone(&redirected));
        parts.start("agent/redirect", move || {
            if let Err(error) = redirect::serve(&of_redirect, &redirected) {
                of_redirect.log.write(LogLevel::Error, &error_line(&error));
            }
        })?;
        let of_budget = Arc::clone(&agent);
        parts.start("agent/budget", move || share(&of_budget))?;
        if let Some(changes) = changes {
            let of_table = Arc::clone(&agent);
            parts.start("agent/table", move || {
                table_watch::keep(&of_table, &changes)
            })?;
        }
        if let Some(listener) = metrics {
            let of_metrics = Arc::clone(&agent);
            parts.start_alone("agent/metrics", move || {
                http::serve(&of_metrics, &listener);
            })?;
        }
        notify::notify(notify::READY);
        run_until_signal(&agent, &mut signals);
        Ok(())
    })();
    agent.end();
    let joined = parts.join();
    // Removes the table before the port to which the table redirects connections.
    drop(agent.table().take());
    drop(redirected);
    log.write(LogLevel::Info, "ended");
    served.and(joined)
}

/// Divides the bandwidth and cores four times a second, as long as sessions share them. Returns when the agent ends.
fn share(agent: &Agent) {
    agent.share();
    while agent.sessions.wait_for_budget_users() && !agent.has_ended() {
        agent.share();
        thread::sleep(budget::ROUND);
    }
}

/// Handles signals until the agent ends. Then waits until all sessions have ended or are cancelled.
fn run_until_signal(agent: &Arc<Agent>, signals: &mut Signals) {
    for number in signals.forever() {
        if number == SIGHUP {
            agent.reload();
            continue;
        }
        break;
    }
    agent.sessions.end();
    let limit = agent.config().drain_limit.0;
    // One timeout for the cancelled sessions, and one for the end of the threads and the removal of the table.
    notify::notify(&notify::stopping(limit.saturating_add(2 * CANCEL_TIMEOUT)));
    let count = agent.sessions.running().len();
    let text = format!(
        "shuts down: accepts no new migrations, and waits up to {limit:?} for {count} running ones"
    );
    agent.log.write(LogLevel::Info, &text);
    let handle = signals.handle();
    thread::scope(|scope| {
        scope.spawn(|| {
            drain::wait(agent, (limit, CANCEL_TIMEOUT));
            handle.close();
        });
        for number in signals.forever() {
            // A second signal: the operator does not want to wait.
            if number != SIGHUP {
                drain::cancel_all(agent);
            }
        }
    });
}

//! The agent itself: what its threads share, and its life from start to end.

use std::net::{SocketAddr, TcpListener};
use std::os::fd::{AsFd, BorrowedFd, OwnedFd};
use std::path::{Path, PathBuf};
use std::sync::atomic::{AtomicBool, Ordering};
use std::sync::{Arc, Mutex, MutexGuard, PoisonError};
use std::thread;
use std::time::Duration;

use hotlift::error::error_line;
use hotlift::relay::RelayReport;
use hotlift::tls::{self, Profile, Role, Tls, TlsSetupError};
use hotlift::transport::Stream;
use hotlift::{Address, Options};
use hotlift_mem::give_back_freed_memory;
use hotlift_monitor::Sockets;
use hotlift_qmp::QmpAddress;
use hotlift_qmp::server::{Commands, Events};
use rustix::event::{EventfdFlags, eventfd};
use signal_hook::consts::{SIGHUP, SIGINT, SIGTERM};
use signal_hook::iterator::Signals;

use crate::budget::Shares;
use crate::commands::{AgentCommands, LastCheck};
use crate::config::{Config, LogLevel};
use crate::error::{AgentError, CarryError};
use crate::log::Log;
use crate::names::OwnNames;
use crate::parts::Parts;
use crate::redirect::Redirected;
use crate::rules::rules;
use crate::session::Session;
use crate::sessions::Sessions;
use crate::table::{self, Changes, Table};
use crate::{door, drain, http, names, notify, redirect};

/// How long what was cancelled at the end may take to end.
const LAST: Duration = Duration::from_secs(10);

/// What the agent's threads share.
pub struct Agent {
    file: PathBuf,
    config: Mutex<Arc<Config>>,
    /// For other agents, in both directions. Its certificates are read again when their files change.
    pub tls: Arc<Tls>,
    /// Where all is said.
    pub log: Log,
    /// All that is carried.
    pub sessions: Sessions,
    /// How the host's budget is shared.
    pub shares: Shares,
    /// Its nftables table, if it has one.
    table: Mutex<Option<Table>>,
    /// What the last `agent check` on this host has found.
    last_check: Mutex<Option<LastCheck>>,
    /// Connections of redirected migrations that the one before has not taken, and where they go.
    returned: Mutex<Vec<(Stream, SocketAddr)>>,
    has_returned: OwnedFd,
    ended: AtomicBool,
    /// Readable once the agent has ended.
    has_ended: OwnedFd,
}

impl Agent {
    pub(crate) fn new(
        file: &Path,
        config: Config,
        log: &Log,
        table: Option<Table>,
    ) -> Result<Self, AgentError> {
        let tls = tls_of(&config)?;
        let listing = tls.listing();
        let warnings = listing.warnings.iter().map(ToString::to_string);
        for line in warnings.chain(listing.problems()) {
            log.say(LogLevel::Warning, &line);
        }
        let flags = EventfdFlags::NONBLOCK | EventfdFlags::CLOEXEC;
        let fd = || {
            let fd = eventfd(0, flags);
            fd.map_err(|errno| AgentError::system("a descriptor")(errno.into()))
        };
        Ok(Self {
            file: file.to_owned(),
            config: Mutex::new(Arc::new(config)),
            tls,
            log: log.clone(),
            sessions: Sessions::default(),
            shares: Shares::default(),
            table: Mutex::new(table),
            last_check: Mutex::default(),
            returned: Mutex::default(),
            has_returned: fd()?,
            ended: AtomicBool::new(false),
            has_ended: fd()?,
        })
    }

    /// The configuration in force.
    #[must_use]
    pub fn config(&self) -> Arc<Config> {
        Arc::clone(&self.config.lock().unwrap_or_else(PoisonError::into_inner))
    }

    /// The options of a migration that leaves this host.
    #[must_use]
    pub fn options(&self) -> Options {
        // Checked when the configuration was read.
        self.config().options().unwrap_or_default()
    }

    /// What the last `agent check` on this host has found, if there was one since the start.
    pub(crate) fn last_check(&self) -> MutexGuard<'_, Option<LastCheck>> {
        let last = self.last_check.lock();
        last.unwrap_or_else(PoisonError::into_inner)
    }

    /// Something or somebody was refused.
    pub fn refuse(&self, text: &str) {
        self.sessions.count(|totals| totals.refusals += 1);
        self.log
            .say(LogLevel::Warning, &format!("state=refused {text}"));
    }

    /// A session has ended.
    pub fn ended(&self, session: &Arc<Session>, outcome: Result<Option<RelayReport>, CarryError>) {
        session.end(outcome.map_err(|error| error_line(&error)));
        self.sessions.remove(session);
    }

    /// A session that was added has not even begun.
    pub fn not_begun(&self, session: &Arc<Session>, error: &CarryError) {
        session.end(Err(error_line(error)));
        self.sessions.remove(session);
    }

    /// Connections to `to` that came while the migration before was under way.
    pub fn give_back(&self, streams: Vec<Stream>, to: SocketAddr) {
        if streams.is_empty() {
            return;
        }
        let mut returned = self.returned.lock().unwrap_or_else(PoisonError::into_inner);
        returned.extend(streams.into_iter().map(|stream| (stream, to)));
        signal(&self.has_returned);
    }

    /// Those that were given back.
    pub(crate) fn take_returned(&self) -> Vec<(Stream, SocketAddr)> {
        let mut returned = self.returned.lock().unwrap_or_else(PoisonError::into_inner);
        let _ = rustix::io::read(&self.has_returned, &mut [0; 8]);
        std::mem::take(&mut returned)
    }

    /// Readable when some were.
    pub(crate) fn returned_fd(&self) -> BorrowedFd<'_> {
        self.has_returned.as_fd()
    }

    /// Whether the agent has ended.
    #[must_use]
    pub fn has_ended(&self) -> bool {
        self.ended.load(Ordering::Acquire)
    }

    /// Readable once it has.
    pub(crate) fn ended_fd(&self) -> BorrowedFd<'_> {
        self.has_ended.as_fd()
    }

    /// Reads the configuration again; a bad one changes nothing.
    pub fn reload(&self) {
        match self.try_to_reload() {
            Ok(()) => self
                .log
                .say(LogLevel::Info, "the configuration was read again"),
            Err(error) => {
                let text = format!("the configuration was not changed: {}", error_line(&error));
                return self.log.say(LogLevel::Error, &text);
            }
        }
        self.shares.apply(self);
        self.sessions.wake();
    }

    fn try_to_reload(&self) -> Result<(), AgentError> {
        // Of two at once the later reads what is there later.
        let mut table = self.table();
        let (new, kept) = Config::read_again(&self.file, &self.config())?;
        if let Some(table) = table.as_mut() {
            table.change(&new)?;
        }
        for key in kept {
            let text = format!("a new value of '{key}' needs a restart of the agent");
            self.log.say(LogLevel::Warning, &text);
        }
        self.log.set_level(new.log);
        *self.config.lock().unwrap_or_else(PoisonError::into_inner) = Arc::new(new);
        Ok(())
    }

    /// The nftables table, which is changed and looked at by one at a time.
    pub(crate) fn table(&self) -> MutexGuard<'_, Option<Table>> {
        self.table.lock().unwrap_or_else(PoisonError::into_inner)
    }
}

fn signal(fd: &OwnedFd) {
    // It counts to 2^64 - 2.
    let _ = rustix::io::write(fd, &1_u64.to_ne_bytes());
}

/// The certificates that `config` names, or those of the usual places.
fn tls_of(config: &Config) -> Result<Arc<Tls>, AgentError> {
    let setup = |error| {
        let error = match error {
            // It advises flags, which the agent has not.
            TlsSetupError::Insecure { source, .. } => TlsSetupError::Credentials(*source),
            error => error,
        };
        AgentError::Tls(Box::new(error))
    };
    let options = Options {
        tls_authz: config.authz.join(" "),
        ..Options::default()
    };
    let tls = match config.tls.as_os_str().is_empty() {
        // All addresses: other hosts come here.
        true => tls::of_options(&options, &Address::any()).map_err(setup)?,
        false => None,
    };
    match tls {
        Some(tls) => Ok(tls),
        None => tls::of_folder(&config.tls, Profile::Hotlift, &options).map_err(setup),
    }
}

/// Configuration and certificates that an agent would start with.
#[derive(Debug)]
pub struct Checked {
    /// The configuration.
    pub config: Config,
    /// Lines about certificates that work, and should be looked after.
    pub warnings: Vec<String>,
    /// Lines about certificates that a handshake with another agent refuses.
    pub problems: Vec<String>,
    /// The folder of the certificates.
    pub folder: PathBuf,
}

/// Reads what the agent would begin with: the configuration in `file`, and certificates, which are verified as in a handshake.
///
/// # Errors
/// [`AgentError`]: the agent would not start.
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

/// Runs the agent with the configuration in `file` until a signal ends it. `redirect` is false to leave nftables alone.
///
/// # Errors
/// [`AgentError`]: why it could not begin, or had to end.
pub fn run(file: &Path, redirect: bool) -> Result<(), AgentError> {
    let config = Config::read(file).inspect_err(|error| {
        // Without a file nobody has said that there is to be an agent.
        if redirect && !error.is_no_file() {
            let (config, log) = (Config::of_good_keys(file), Log::new(LogLevel::Info));
            if let Err(error) = table::refuse_all(&config, &log) {
                log.say(LogLevel::Error, &error_line(&error));
            }
        }
    })?;
    give_back_freed_memory();
    let signals = Signals::new([SIGHUP, SIGINT, SIGTERM]);
    let mut signals = signals.map_err(AgentError::system("signal handlers"))?;
    let log = Log::new(config.log);
    // Before all that may fail: where plaintext is refused, migrations do not wait for an agent that can carry them.
    let (changes, table) = match config.redirect && redirect {
        true => (Some(Changes::listen()?), Some(Table::new(&config, &log)?)),
        false => (None, None),
    };
    let listen: Address = config.listen.parse().map_err(AgentError::Listen)?;
    let listener = listen.listen().map_err(AgentError::Listen)?;
    let redirected = Redirected::listen(config.redirect_port).map_err(AgentError::Listen)?;
    if let Err(error) = redirected.mark() {
        let text = format!(
            "the port of 'redirect-port' has no mark, which the rules of 'hotlift agent rules' ask for: {error}"
        );
        log.say(LogLevel::Warning, &text);
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
    log.say(LogLevel::Info, &format!("listening on {}", config.listen));
    let of_parts = Arc::clone(&agent);
    let mut parts = Parts::new(move || of_parts.sessions.is_ending());
    let served = (|| {
        let of_door = Arc::clone(&agent);
        parts.start("agent/door", move || {
            if let Err(error) = door::serve(&of_door, &listener) {
                of_door.log.say(LogLevel::Error, &error_line(&error));
            }
        })?;
        let (of_redirect, redirected) = (Arc::clone(&agent), Arc::clone(&redirected));
        parts.start("agent/redirect", move || {
            redirect::serve(&of_redirect, &redirected);
        })?;
        let of_budget = Arc::clone(&agent);
        parts.start("agent/budget", move || of_budget.shares.serve(&of_budget))?;
        if let Some(changes) = changes {
            let of_table = Arc::clone(&agent);
            parts.start("agent/table", move || table::keep(&of_table, &changes))?;
        }
        if let Some(listener) = metrics {
            let of_metrics = Arc::clone(&agent);
            parts.start_alone("agent/metrics", move || {
                http::serve(&of_metrics, &listener);
            })?;
        }
        notify::say(notify::READY);
        until_told(&agent, &mut signals);
        Ok(())
    })();
    agent.sessions.end();
    agent.ended.store(true, Ordering::Release);
    signal(&agent.has_ended);
    let joined = parts.join();
    // Before the port that it redirects to.
    drop(agent.table().take());
    drop(redirected);
    log.say(LogLevel::Info, "ended");
    served.and(joined)
}

/// Obeys signals until the agent is to end and all is done or cancelled.
fn until_told(agent: &Arc<Agent>, signals: &mut Signals) {
    for number in signals.forever() {
        if number == SIGHUP {
            agent.reload();
            continue;
        }
        break;
    }
    agent.sessions.end();
    let limit = agent.config().drain_limit.0;
    // Time for the threads and the table, too.
    notify::say(&notify::stopping(limit.saturating_add(2 * LAST)));
    let count = agent.sessions.under_way().len();
    let text =
        format!("is to end: takes nothing new, and waits up to {limit:?} for {count} under way");
    agent.log.say(LogLevel::Info, &text);
    let handle = signals.handle();
    thread::scope(|scope| {
        scope.spawn(|| {
            drain::wait(agent, (limit, LAST));
            handle.close();
        });
        for number in signals.forever() {
            // Somebody insists.
            if number != SIGHUP {
                drain::cancel_all(agent);
            }
        }
    });
}

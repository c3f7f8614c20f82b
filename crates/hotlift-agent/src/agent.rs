//! State that the threads of an agent share.

use std::net::SocketAddr;
use std::os::fd::{AsFd, BorrowedFd, OwnedFd};
use std::path::{Path, PathBuf};
use std::sync::atomic::{AtomicBool, Ordering};
use std::sync::{Arc, Mutex, MutexGuard};
use std::time::{Duration, Instant};

use hotlift::Address;
use hotlift::admission::Admitted;
use hotlift::error::error_line;
use hotlift::options::{Limits, StreamOptions, TlsOptions};
use hotlift::relay::RelayReport;
use hotlift::tls::{self, Profile, Tls, TlsSetupError};
use hotlift_mem::{lock, wait_readable};
use rustix::event::{EventfdFlags, eventfd};

use crate::budget::Shares;
use crate::config::{Config, LogLevel};
use crate::error::{AgentError, CarryError};
use crate::log::Log;
use crate::redirect_check::LastCheck;
use crate::session::Session;
use crate::sessions::Sessions;
use crate::table::Table;

/// State that the agent's threads share.
pub struct Agent {
    file: PathBuf,
    config: Mutex<Arc<Config>>,
    /// TLS settings for connections with other agents, incoming and outgoing. Certificates are read again when their files
    /// change.
    pub tls: Arc<Tls>,
    /// The log of all threads.
    pub log: Log,
    /// All running migrations and tunnels, and the totals of ended ones.
    pub sessions: Sessions,
    /// State of the division of the host's bandwidth and cores among the sessions.
    pub shares: Shares,
    /// The installed nftables table; `None` if the agent does not redirect connections.
    table: Mutex<Option<Table>>,
    /// Result of the last `agent check` on this host.
    last_check: Mutex<Option<LastCheck>>,
    /// Redirected connections that arrived during a migration, but belong to the next migration to the same address. Each has
    /// its original destination.
    returned: Mutex<Vec<(Admitted, SocketAddr)>>,
    has_returned: OwnedFd,
    ended: AtomicBool,
    /// Event descriptor; readable once the agent has ended.
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
            log.write(LogLevel::Warning, &line);
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

    /// Returns the current configuration.
    #[must_use]
    pub fn config(&self) -> Arc<Config> {
        Arc::clone(&lock(&self.config))
    }

    /// Returns the stream options of an outgoing migration.
    #[must_use]
    pub fn options(&self) -> StreamOptions {
        // Checked when the configuration was read.
        self.config().options().unwrap_or_default()
    }

    /// Locks and returns the result of the last `agent check` on this host; `None` if there was none since the agent's start.
    pub(crate) fn last_check(&self) -> MutexGuard<'_, Option<LastCheck>> {
        lock(&self.last_check)
    }

    /// Logs `text` about a refused connection or migration, and counts the refusal.
    pub fn refuse(&self, text: &str) {
        self.sessions.count(|totals| totals.refusals += 1);
        self.log
            .write(LogLevel::Warning, &format!("state=refused {text}"));
    }

    /// Ends `session` with `outcome`, logs the outcome, and moves the session to the ended ones.
    pub fn ended(&self, session: &Arc<Session>, outcome: Result<Option<RelayReport>, CarryError>) {
        session.end(outcome.map_err(|error| error_line(&error)));
        self.sessions.remove(session);
    }

    /// Ends, with `error`, a session that was added but could not start.
    pub fn not_begun(&self, session: &Arc<Session>, error: &CarryError) {
        session.end(Err(error_line(error)));
        self.sessions.remove(session);
    }

    /// Stores `connections` to `to` that arrived during a migration, for the next migration to the same address.
    pub fn give_back(&self, connections: Vec<Admitted>, to: SocketAddr) {
        if connections.is_empty() {
            return;
        }
        let mut returned = lock(&self.returned);
        returned.extend(connections.into_iter().map(|one| (one, to)));
        signal(&self.has_returned);
    }

    /// Takes all connections stored by [`Self::give_back`], with their original destinations.
    pub(crate) fn take_returned(&self) -> Vec<(Admitted, SocketAddr)> {
        let mut returned = lock(&self.returned);
        let _ = rustix::io::read(&self.has_returned, &mut [0; 8]);
        std::mem::take(&mut returned)
    }

    /// Returns an event descriptor that is readable while [`Self::take_returned`] has connections to return.
    pub(crate) fn returned_fd(&self) -> BorrowedFd<'_> {
        self.has_returned.as_fd()
    }

    /// Returns true once the agent has ended.
    #[must_use]
    pub fn has_ended(&self) -> bool {
        self.ended.load(Ordering::Acquire)
    }

    /// Returns an event descriptor that is readable once the agent has ended.
    pub(crate) fn ended_fd(&self) -> BorrowedFd<'_> {
        self.has_ended.as_fd()
    }

    /// Waits until one of `fds` is readable, for up to `time`, or until the agent ends.
    pub(crate) fn wait<'f>(&'f self, fds: impl Iterator<Item = BorrowedFd<'f>>, time: Duration) {
        let fds: Vec<_> = fds.chain([self.ended_fd()]).collect();
        // A sum that does not fit an `Instant` means no time limit.
        wait_readable(&fds, Instant::now().checked_add(time));
    }

    /// Reads the configuration file again and applies it. If the file is invalid, logs the error and changes nothing.
    pub fn reload(&self) {
        match self.try_to_reload() {
            Ok(()) => self
                .log
                .write(LogLevel::Info, "the configuration was read again"),
            Err(error) => {
                let text = format!("the configuration is unchanged: {}", error_line(&error));
                return self.log.write(LogLevel::Error, &text);
            }
        }
        self.share();
        self.sessions.wake();
    }

    /// Divides the host's budget again among the running sessions.
    pub(crate) fn share(&self) {
        let sessions = self.sessions.running();
        self.shares.apply(&self.config(), &self.options(), sessions);
    }

    /// Refuses new sessions, marks the agent as ended, and wakes the threads that wait for its end.
    pub(crate) fn end(&self) {
        self.sessions.end();
        self.ended.store(true, Ordering::Release);
        signal(&self.has_ended);
    }

    fn try_to_reload(&self) -> Result<(), AgentError> {
        // The lock serializes reloads: the last reload applies the newest file.
        let mut table = self.table();
        let (new, kept) = Config::read_again(&self.file, &self.config())?;
        if let Some(table) = table.as_mut() {
            table.change(&new)?;
        }
        for key in kept {
            let text =
                format!("the new value of '{key}' takes effect after a restart of the agent");
            self.log.write(LogLevel::Warning, &text);
        }
        self.log.set_level(new.log);
        *lock(&self.config) = Arc::new(new);
        Ok(())
    }

    /// Locks and returns the nftables table: only one thread at a time reads or changes it.
    pub(crate) fn table(&self) -> MutexGuard<'_, Option<Table>> {
        lock(&self.table)
    }
}

fn signal(fd: &OwnedFd) {
    // The counter's maximum is 2^64 - 2.
    let _ = rustix::io::write(fd, &1_u64.to_ne_bytes());
}

/// Loads the certificates from the folder `config.tls`, or from a default folder if `config.tls` is empty.
pub(crate) fn tls_of(config: &Config) -> Result<Arc<Tls>, AgentError> {
    let setup = |error| {
        let error = match error {
            // This error's message recommends flags that the agent does not have.
            TlsSetupError::Insecure { source, .. } => TlsSetupError::Credentials(*source),
            error => error,
        };
        AgentError::Tls(Box::new(error))
    };
    let options = TlsOptions {
        authz: config.authz.join(" "),
        ..TlsOptions::default()
    };
    let limits = Limits::default();
    let tls = match config.tls.as_os_str().is_empty() {
        // Address "any": other hosts connect to this port, so TLS is required.
        true => tls::of_options(&options, &limits, &Address::any()).map_err(setup)?,
        false => None,
    };
    match tls {
        Some(tls) => Ok(tls),
        None => tls::of_folder(&config.tls, Profile::Hotlift, &options, &limits).map_err(setup),
    }
}

//! `hotlift migrate --domain`: libvirt migrates a domain; its pages go through a relay in this process and the destination's
//! agent.
//!
//! Both QEMUs use only loopback. The source's QEMU connects to this relay. The destination's agent connects to the
//! destination's QEMU, at the same port number. So there is no socket file that would need an owner, an SELinux label or an
//! AppArmor rule. Nothing is redirected.

use std::ffi::OsString;
use std::net::{Ipv4Addr, SocketAddr};
use std::os::fd::{AsFd, BorrowedFd};
use std::path::Path;
use std::sync::Mutex;
use std::time::{Duration, Instant};

use clap::Args;
use hotlift::conversation::Conversation;
use hotlift::options::TlsOptions;
use hotlift::relay::{Hooks, Incoming, Outgoing, RelayProgress, RelaySettings, SourceStream};
use hotlift::{Address, Control, Listener};
use hotlift_agent::config::CONFIG_FILE;
use hotlift_agent::messages::{Hello, Id, Kind, Message};
use hotlift_agent::values::Ports;
use hotlift_command::connect::connect;
use hotlift_command::error::SharedError;
use hotlift_command::security;
use hotlift_mem::is_readable;
use hotlift_qemu::downtime_limit::{DowntimeLimit, LimitArgs};
use hotlift_qmp::one_line;
use hotlift_terminal::error::TerminalError;
use hotlift_terminal::output::warn;
use hotlift_terminal::progress::{Display, Line};
use hotlift_terminal::signals::{Interrupt, run_alongside};

use crate::agent_control::config_in;
use crate::error::CommandError;
use crate::libvirt::downtime::DomainLimit;
use crate::libvirt::guest_location::{GuestLocation, guest_location};
use crate::libvirt::virsh::{ABORT_AGAIN, Domain, Libvirt, Migrating, State, VirshError, host_of};
use crate::output_args::OutputArgs;
use crate::relay_report::{DomainMigration, progress_line};

/// Timeout for the answer of the destination's agent.
const ANSWER: Duration = Duration::from_secs(30);

/// Maximum of ports that are tried if the destination already uses a port.
const PORTS: usize = 4;

/// Text in QEMU's error if a port is already in use.
const IN_USE: &str = "Address already in use";

/// Flags of `migrate` that go with `--domain`.
#[derive(Debug, Args)]
#[command(next_help_heading = "libvirt")]
pub struct DomainArgs {
    /// Number of connections of the domain's QEMU ('virsh migrate --parallel-connections')
    #[arg(long, value_name = "NUMBER", requires = "domain", value_parser = clap::value_parser!(u8).range(1..))]
    parallel: Option<u8>,
    /// URI of this host's libvirt [default: qemu:///system]
    #[arg(long, value_name = "URI", requires = "domain")]
    connect: Option<String>,
    /// Address of the destination's agent: tcp:HOST:PORT [default: the host of --to and port 16520, or as 'peers' and
    /// 'agent-port' in this host's agent.toml set]
    #[arg(long, value_name = "URI", requires = "domain", value_parser = Address::of_peer)]
    agent: Option<Address>,
    /// Range of loopback ports; both QEMUs use one port of it, which the destination's agent must allow [default: 'ports' in
    /// this host's agent.toml, or 49152-49215]
    #[arg(long, value_name = "FIRST-LAST", requires = "domain")]
    ports: Option<Ports>,
    /// More options of 'virsh migrate'
    #[arg(last = true, value_name = "OPTION", requires = "domain")]
    options: Vec<OsString>,
}

impl DomainArgs {
    /// Returns the options of `virsh migrate` for a migration through the loopback port `port`.
    fn options(&self, port: u16) -> Vec<OsString> {
        let mut words = vec![
            "--migrateuri".to_owned(),
            format!("tcp://{}:{port}", Ipv4Addr::LOCALHOST),
            "--listen-address".to_owned(),
            Ipv4Addr::LOCALHOST.to_string(),
        ];
        if let Some(parallel) = self.parallel {
            words.extend(["--parallel", "--parallel-connections"].map(str::to_owned));
            words.push(parallel.to_string());
        }
        let words = words.into_iter().map(OsString::from);
        words.chain(self.options.iter().cloned()).collect()
    }

    /// Returns the address of the agent for the libvirt at `uri`, and the ports that it allows. Values that were not given come
    /// from `file`, the configuration of this host's agent: hosts between which domains move have the same settings.
    fn agent(&self, uri: &str, file: &Path) -> Result<(Address, Ports), CommandError> {
        if let (Some(agent), Some(ports)) = (&self.agent, self.ports) {
            return Ok((agent.clone(), ports));
        }
        let config = config_in(file)?;
        let ports = self.ports.unwrap_or(config.ports);
        let agent = match (&self.agent, host_of(uri)) {
            (Some(agent), _) => agent.clone(),
            (None, Some(host)) => config.agent_of_host(host),
            (None, None) => {
                return Err(CommandError::NoHost {
                    uri: uri.to_owned(),
                });
            }
        };
        Ok((agent, ports))
    }
}

/// Migrates `domain` to the libvirt at `uri`.
pub fn run(
    args: &DomainArgs,
    domain: &str,
    uri: &str,
    (settings, tls): (RelaySettings, &TlsOptions),
    limit: LimitArgs,
    output: &OutputArgs,
) -> Result<(), CommandError> {
    let copies = |word: &OsString| word.to_string_lossy().starts_with("--copy-storage");
    if args.options.iter().any(copies) {
        return Err(CommandError::DiskCopies);
    }
    let interrupt = Interrupt::catch()?;
    let connect = args.connect.as_deref().unwrap_or("qemu:///system");
    let (here, to) = (Libvirt::at(connect), Libvirt::at(uri));
    let no_guest = || CommandError::NoGuest {
        domain: domain.to_owned(),
        uri: connect.to_owned(),
    };
    let domain = &here.find(domain)?.ok_or_else(no_guest)?;
    let was = here.state(domain)?;
    if was == State::Gone {
        return Err(no_guest());
    }
    let (agent, allowed) = args.agent(uri, Path::new(CONFIG_FILE))?;
    let tls = security::tls(tls, &agent)?;
    let settings = RelaySettings {
        outgoing_tls: tls,
        ..settings
    };
    let this = Move {
        args,
        domain,
        limit,
        here: &here,
        to: &to,
        agent: &agent,
        interrupt: &interrupt,
        quiet: output.quiet,
    };
    let mut tried = Vec::new();
    let ended = loop {
        let (listener, port) = listen(allowed, &tried)?;
        tried.push(port);
        let ended = this.run(&listener, port, settings.clone())?;
        match &ended.libvirt {
            Err(reason) if reason.contains(IN_USE) && tried.len() < PORTS => {}
            _ => break ended,
        }
    };
    let mut migration = DomainMigration {
        domain: domain.clone(),
        to: uri.to_owned(),
        libvirt: None,
        downtime_limit: ended.downtime_limit,
        relay: None,
    };
    let theirs = ended
        .theirs
        .map(|reason| format!("; the agent there: {reason}"));
    let theirs = theirs.unwrap_or_default();
    let ours = match ended.relay {
        Ok(report) => {
            migration.relay = Some(report);
            String::new()
        }
        Err(error) => format!("; the relay: {}", error.chain()),
    };
    if let Err(reason) = ended.libvirt {
        let reason = format!("{reason}{ours}{theirs}");
        match guest_location(&here, &to, domain, was, &reason) {
            GuestLocation::Here if interrupt.is_raised() => {
                return Err(TerminalError::Interrupted.into());
            }
            GuestLocation::Here => return Err(CommandError::DomainStayed { reason }),
            GuestLocation::Ended => {
                let reason = here.with_end(domain, reason);
                return Err(CommandError::DomainEnded { reason });
            }
            GuestLocation::Unknown { seen } => {
                let reason = format!("{seen}: {reason}");
                return Err(CommandError::DomainInDoubt { reason });
            }
            GuestLocation::There => warn!("hotlift: {reason}"),
        }
    }
    warn!("the domain is at {uri}");
    migration.libvirt = to.job(domain, true);
    Ok(output.print(&migration, || migration.table())?)
}

/// Listens for the source's QEMU at one of the ports `allowed`. Chooses a port that is free on this host, and that is not in
/// `but`.
fn listen(allowed: Ports, but: &[u16]) -> Result<(Listener, u16), CommandError> {
    let mut ports: Vec<_> = (allowed.first..=allowed.last).collect();
    fastrand::shuffle(&mut ports);
    for port in ports.into_iter().filter(|port| !but.contains(port)) {
        let host = Ipv4Addr::LOCALHOST.to_string();
        if let Ok(listener) = (Address::Tcp { host, port }).listen() {
            return Ok((listener, port));
        }
    }
    Err(CommandError::NoPort { ports: allowed })
}

/// Inputs of the migration of one domain.
struct Move<'a> {
    args: &'a DomainArgs,
    domain: &'a Domain,
    limit: LimitArgs,
    here: &'a Libvirt,
    to: &'a Libvirt,
    agent: &'a Address,
    interrupt: &'a Interrupt,
    quiet: bool,
}

/// Result of one attempt to migrate the domain.
struct Ended {
    libvirt: Result<(), String>,
    relay: Result<hotlift::relay::RelayReport, hotlift::MigrationError>,
    /// Error that the other agent sent; `None` if it sent none.
    theirs: Option<String>,
    /// Downtime limit at the end; `None` if it was constant.
    downtime_limit: Option<DowntimeLimit>,
}

impl Move<'_> {
    fn run(
        &self,
        listener: &Listener,
        port: u16,
        mut settings: RelaySettings,
    ) -> Result<Ended, CommandError> {
        let tls = settings.outgoing_tls.clone();
        let mut conversation =
            connect(self.agent, "--agent", tls.as_deref()).map_err(|source| {
                CommandError::NoAgentThere {
                    agent: self.agent.clone(),
                    source: match source {
                        SharedError::NoServe { source } => source.into(),
                        source => source.into(),
                    },
                }
            })?;
        let token = announce(&mut conversation, port)?;
        settings.outgoing_pass = Some(conversation.pass(token));
        let control = Control::new();
        let display = Display::new("migration", self.quiet, &control);
        let latest = Mutex::new(None);
        let on_progress = |progress: &RelayProgress| {
            if let Ok(mut latest) = latest.lock() {
                *latest = Some(*progress);
            }
        };
        let speaker = conversation.sender();
        let on_source = |source: &SourceStream| {
            // Send errors are ignored: without this message the other relay does not start, and then this relay fails.
            let _ = speaker.send(&Message::Source {
                channels: source.channels,
                method: source.method.to_owned(),
            });
        };
        let hooks = Hooks {
            on_progress: Some(&on_progress),
            on_source: Some(&on_source),
            ..Hooks::default()
        };
        let mut theirs = None;
        let relay = || {
            let (incoming, outgoing) =
                (Incoming::Listener(listener), Outgoing::Address(self.agent));
            hotlift::relay::relay(incoming, &outgoing, &settings, &control, hooks)
        };
        let options = self.args.options(port);
        let mut limit = DomainLimit::new(self.here, self.domain, self.limit, &options);
        let (relay, libvirt) = run_alongside(relay, |ended| {
            let mut is_connected = true;
            let mut wait = |migrating: &mut Migrating,
                            limit: Option<&mut DomainLimit<'_>>,
                            wakes: &[BorrowedFd<'_>],
                            until| {
                let mut wakes = wakes.to_vec();
                wakes.extend(is_connected.then(|| conversation.as_fd()));
                let ended = migrating.wait(&wakes, Some(until))?;
                while is_connected {
                    match conversation.receive(Duration::ZERO) {
                        Ok(Some(Message::Failed { reason })) => theirs = Some(one_line(&reason)),
                        Ok(Some(_)) => {}
                        Ok(None) => break,
                        Err(_) => {
                            is_connected = false;
                            control.suspect_peer();
                        }
                    }
                }
                if let Some(progress) = latest.lock().ok().and_then(|latest| *latest) {
                    display.show_line(0, || {
                        let line = progress_line("migration", &progress, control.stall());
                        let mut line = Line::from(line);
                        if let Some(limit) = limit {
                            limit.shown().show(&mut line);
                        }
                        line
                    });
                }
                Ok(ended)
            };
            let libvirt = self.libvirt(&options, limit.as_mut(), ended, &mut wait);
            // If libvirt has failed or was aborted, no QEMU connects to the relay any more.
            if !matches!(libvirt, Ok(Ok(()))) {
                control.cancel();
                limit.iter().for_each(DomainLimit::restore);
            }
            libvirt
        })?;
        display.finish();
        let message = match &relay {
            Ok(_) => Message::Completed,
            Err(error) => Message::Failed {
                reason: error.chain(),
            },
        };
        // Send errors are ignored: the other agent may have disconnected.
        let _ = conversation.send(&message);
        Ok(Ended {
            libvirt: libvirt?,
            relay,
            theirs,
            downtime_limit: limit.as_ref().and_then(DomainLimit::report),
        })
    }

    /// Runs the migration by libvirt, and returns its result. Calls `wait` to wait for the end, with a time limit and with
    /// descriptors that end the wait early. `relay_ended` is readable once the relay has ended.
    fn libvirt(
        &self,
        options: &[OsString],
        mut limit: Option<&mut DomainLimit<'_>>,
        relay_ended: BorrowedFd<'_>,
        wait: Wait<'_>,
    ) -> Result<Result<(), String>, VirshError> {
        let mut migrating = self.here.migrate(self.domain, self.to, options)?;
        let mut is_aborted = false;
        let mut alone_at = None;
        loop {
            let now = Instant::now();
            let mut wakes = Vec::new();
            if is_readable(relay_ended) {
                // After the end of the relay, libvirt gets some time to end the migration.
                alone_at.get_or_insert(now + ALONE);
            } else {
                wakes.push(relay_ended);
            }
            let is_alone = alone_at.is_some_and(|at| now >= at);
            match self.interrupt.is_raised() {
                false if !is_alone => wakes.push(self.interrupt.wake_fd()),
                // Repeated until libvirt can abort the migration.
                _ if !is_aborted => is_aborted = self.here.abort(self.domain).is_ok(),
                _ => {}
            }
            let limit_at = limit.as_ref().filter(|_| !is_aborted);
            let limit_at = limit_at.and_then(|limit| limit.poll_at());
            let again = now + ABORT_AGAIN;
            let until = limit_at.map_or(again, |at| at.min(again));
            if let Some(ended) = wait(&mut migrating, limit.as_deref_mut(), &wakes, until)? {
                return Ok(ended);
            }
            if let Some(limit) = limit.as_deref_mut()
                && limit_at.is_some_and(|at| Instant::now() >= at)
            {
                limit.poll();
            }
        }
    }
}

/// Waits for the end of libvirt's migration, up to a time, or until one of the descriptors is readable. Returns the result;
/// `None` if the migration still runs.
type Wait<'a> = &'a mut dyn FnMut(
    &mut Migrating,
    Option<&mut DomainLimit<'_>>,
    &[BorrowedFd<'_>],
    Instant,
) -> Result<Option<Result<(), String>>, VirshError>;

/// Longest wait for libvirt to end the migration after the relay has ended; both QEMUs detect this end at once.
const ALONE: Duration = Duration::from_secs(30);

/// Announces a migration to `port` on the agent's host; returns the token with which its connections must begin.
fn announce(conversation: &mut Conversation, port: u16) -> Result<[u8; 16], CommandError> {
    conversation.send_hello(&Hello {
        id: Id(fastrand::u32(..)),
        kind: Kind::Migration,
        to: SocketAddr::from((Ipv4Addr::LOCALHOST, port)),
    })?;
    match conversation.receive::<Message>(ANSWER)? {
        Some(Message::Ready { token }) => Ok(token.0),
        Some(Message::Refused { reason } | Message::Failed { reason }) => {
            let reason = one_line(&reason);
            Err(SharedError::Refused { reason }.into())
        }
        Some(_) => Err(SharedError::Refused {
            reason: "it sent an unexpected message".to_owned(),
        }
        .into()),
        None => Err(CommandError::AgentSilent { limit: ANSWER }),
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    const B: &str = "qemu+ssh://b/system";

    fn args(ports: Option<&str>) -> DomainArgs {
        DomainArgs {
            parallel: None,
            connect: None,
            agent: None,
            ports: ports.map(|ports| ports.parse().unwrap()),
            options: Vec::new(),
        }
    }

    #[test]
    fn ports_come_from_options_then_the_local_agent_then_defaults() {
        let folder = tempfile::tempdir().unwrap();
        let file = folder.path().join("agent.toml");
        let found = |typed| {
            let (agent, ports) = args(typed).agent(B, &file).unwrap();
            (agent.to_string(), ports.to_string())
        };
        let is = |agent: &str, ports: &str| (format!("tcp:b:{agent}"), ports.to_owned());
        assert_eq!(found(None), is("16520", "49152-49215"));
        std::fs::write(&file, "ports = \"50000-50063\"\nagent-port = 17000\n").unwrap();
        assert_eq!(found(None), is("17000", "50000-50063"));
        assert_eq!(found(Some("5000-5006")), is("17000", "5000-5006"));
        std::fs::write(&file, "prots = 1\n").unwrap();
        assert!(args(None).agent(B, &file).is_err());
    }

    #[test]
    fn the_listeners_port_is_an_allowed_one_not_tried_before() {
        // A range of ports, since other processes may use some of them.
        let allowed: Ports = "50100-50131".parse().unwrap();
        let (_first, port) = listen(allowed, &[]).unwrap();
        assert!(allowed.contains(port), "{port}");
        let all: Vec<_> = (allowed.first..=allowed.last).collect();
        let tried = listen(allowed, &all);
        assert!(matches!(tried, Err(CommandError::NoPort { .. })));
    }
}

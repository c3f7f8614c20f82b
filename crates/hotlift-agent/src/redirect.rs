//! The loopback port to which the nftables rules redirect this host's migrations.
//!
//! All connections to one address and port form one migration or one tunnel. Their first bytes decide which. If no bytes
//! arrive, they are a tunnel whose server sends first. Before the decision no connection is made to the destination: QEMU would
//! take the first connection for the main channel.
//! one as the main channel.

use std::collections::HashMap;
use std::io;
use std::net::{Ipv4Addr, Ipv6Addr, SocketAddr};
use std::os::fd::{AsFd, BorrowedFd};
use std::sync::{Arc, Weak};
use std::thread;
use std::time::{Duration, Instant};

use hotlift::admission::limits::{REDIRECTED, SILENCE};
use hotlift::admission::{Admitted, ConnectionClass, Listener, PendingConnections};
use hotlift::error::error_line;
use hotlift::transport::TransportError;
use hotlift::{Address, relay};

use crate::agent::Agent;
use crate::config::LogLevel;
use crate::dial;
use crate::error::CarryError;
use crate::log::RateLimited;
use crate::messages::{Id, Kind};
use crate::outgoing;
use crate::rules;
use crate::session::{Direction, Session, SessionInfo};

/// Delay before the next accept after an accept failed.
const RETRY: Duration = Duration::from_millis(100);

/// A redirected connection that is not classified yet.
struct Waiting {
    one: Admitted,
    to: SocketAddr,
}

impl AsFd for Waiting {
    fn as_fd(&self) -> BorrowedFd<'_> {
        self.one.as_fd()
    }
}

/// Listeners of the redirect port: on IPv4 and, if the host has it, on IPv6. The flag is true for IPv6.
pub struct Redirected(Vec<(Listener, bool)>);

impl Redirected {
    /// Opens the listeners on loopback at `port`.
    ///
    /// # Errors
    /// If the port is in use, or IPv4 fails for another reason.
    pub fn listen(port: u16) -> Result<Self, TransportError> {
        let on = |host: String| Address::Tcp { host, port }.listen();
        let mut listeners = vec![(on(Ipv4Addr::LOCALHOST.to_string())?, false)];
        match on(Ipv6Addr::LOCALHOST.to_string()) {
            Ok(listener) => listeners.push((listener, true)),
            Err(TransportError::Listen { source, .. })
                if source.kind() == std::io::ErrorKind::AddrInUse =>
            {
                let uri = format!("tcp:[::1]:{port}");
                return Err(TransportError::Listen { uri, source });
            }
            // A host without IPv6 has no migrations over IPv6.
            Err(_) => {}
        }
        Ok(Self(listeners))
    }

    /// Sets the agent's mark on the listeners. The rules reset connections to a redirect port without the mark (see `rules`).
    ///
    /// # Errors
    /// Without `CAP_NET_ADMIN`.
    pub fn mark(&self) -> std::io::Result<()> {
        let mut listeners = self.0.iter();
        listeners.try_for_each(|(listener, _)| rules::mark(&listener.as_fd()))
    }
}

/// Classes of all unclassified connections to one address. Each flag is true if at least one connection has this class.
#[derive(Debug, Clone, Copy, Default)]
struct AddressClasses {
    main: bool,
    channel: bool,
    /// True if a connection has sent too little to classify it, and the time limit for this connection is not over.
    silent: bool,
    other: bool,
}

impl AddressClasses {
    /// Returns the kind of the session; `None` if the connections do not show it yet.
    fn kind(&self) -> Option<Kind> {
        match self {
            Self { main: true, .. } => Some(Kind::Migration),
            // QEMU 7.2 sends nothing on the main channel before its multifd channels connect.
            Self {
                channel: true,
                silent: true,
                ..
            } => Some(Kind::Migration),
            Self { other: true, .. } => Some(Kind::Tunnel),
            _ => None,
        }
    }
}

/// Classifies redirected connections, and starts a session for each address.
struct Router<'a> {
    agent: &'a Arc<Agent>,
    waiting: PendingConnections<Waiting>,
    sessions: HashMap<SocketAddr, Weak<Session>>,
    /// Rate limit of the log line about connections that were not redirected: any local user can make them.
    not_redirected: RateLimited,
}

/// Serves the redirect port until the agent ends.
///
/// # Errors
/// If the system has no file descriptors left.
pub fn serve(agent: &Arc<Agent>, redirected: &Redirected) -> io::Result<()> {
    let mut router = Router::new(agent)?;
    while !agent.has_ended() {
        router.wait(redirected);
        for (listener, v6) in &redirected.0 {
            router.accept(listener, *v6);
        }
        // Connections that arrived during a migration that has ended belong to the next one.
        for (one, to) in agent.take_returned() {
            router.keep(one, to);
        }
        router.poll(Instant::now());
    }
    Ok(())
}

impl<'a> Router<'a> {
    fn new(agent: &'a Arc<Agent>) -> io::Result<Self> {
        Ok(Self {
            agent,
            waiting: PendingConnections::new(REDIRECTED)?,
            sessions: HashMap::new(),
            not_redirected: RateLimited::default(),
        })
    }

    /// Waits for a new connection, for bytes on an unclassified one, or for its time limit.
    fn wait(&self, redirected: &Redirected) {
        let listeners = redirected.0.iter().map(|(listener, _)| listener.as_fd());
        let more = [self.agent.returned_fd(), self.waiting.polled()];
        let time = self.waiting.shortened(Duration::MAX, Instant::now());
        self.agent.wait(listeners.chain(more), time);
    }

    fn accept(&mut self, listener: &Listener, v6: bool) {
        let log = &self.agent.log;
        let one = match listener.accept(Instant::now()) {
            Ok(Some(one)) => one,
            Ok(None) => return,
            Err(error) => {
                let text = format!("refused a connection: {}", error_line(&error));
                log.write(LogLevel::Warning, &text);
                thread::sleep(RETRY);
                return;
            }
        };
        let own = listener.address().ok();
        match dial::original_destination(&one.stream, v6) {
            Ok(to) if Some(tcp(to)) != own => {
                log.write(LogLevel::Debug, &format!("a connection to {to}"));
                self.keep(one, to);
            }
            // A connection that was not redirected has no destination.
            _ => {
                let text = "refused a connection that was not redirected";
                self.not_redirected.write(log, text, Instant::now());
            }
        }
    }

    fn keep(&mut self, one: Admitted, to: SocketAddr) {
        let one = Waiting { one, to };
        if self.agent.sessions.is_ending() {
            // While the agent ends, a running session still accepts connections.
            if let Some(_new) = self.deliver(one) {
                let error = CarryError::Ending;
                self.agent.refuse(&format!("to={to} error=\"{error}\""));
            }
            return;
        }
        match self.waiting.enter(one, Instant::now()) {
            Ok(None) => {}
            Ok(Some(_oldest)) => self.agent.refuse("error=\"too many connections wait\""),
            Err(error) => self.agent.refuse(&format!("to={to} error=\"{error}\"")),
        }
    }

    /// Classifies the waiting connections, and passes them to sessions in order of arrival.
    fn poll(&mut self, now: Instant) {
        self.sessions
            .retain(|_, session| session.strong_count() > 0);
        while let Some(number) = self.waiting.next_ready() {
            if let Some(waiting) = self.waiting.get(number) {
                waiting.one.classify();
            }
        }
        let is_late = |since| now.saturating_duration_since(since) >= SILENCE;
        let is_over = |waiting: &Waiting, since| match waiting.one.head() {
            ConnectionClass::Gone(_) => true,
            // No main channel has followed: it came before this channel, and has closed.
            ConnectionClass::Channel(_) | ConnectionClass::OtherVersion(_) => is_late(since),
            _ => false,
        };
        let mut places: HashMap<SocketAddr, AddressClasses> = HashMap::new();
        for (waiting, since) in self.waiting.iter() {
            let place = places.entry(waiting.to).or_default();
            match waiting.one.head() {
                ConnectionClass::Gone(_) => {}
                ConnectionClass::Main | ConnectionClass::Resumed => place.main = true,
                ConnectionClass::Channel(_) | ConnectionClass::OtherVersion(_) => {
                    place.channel = true
                }
                ConnectionClass::Partial if !is_late(since) => place.silent = true,
                _ => place.other = true,
            }
        }
        while self.waiting.take_first(is_over).is_some() {}
        let stays = |to: &SocketAddr, place: &AddressClasses| {
            let under_way = under_way(&self.sessions, *to);
            place.kind().is_some() || under_way.is_some_and(|session| session.accepts_connections())
        };
        places.retain(|to, place| stays(to, place));
        while let Some((one, since)) =
            (self.waiting).take_first(|one, _| places.contains_key(&one.to))
        {
            let kind = places.get(&one.to).and_then(AddressClasses::kind);
            match (self.deliver(one), kind) {
                (None, _) => {}
                (Some(one), Some(kind)) => self.begin(kind, one),
                // The session ended after the last check: the connection may belong to the next session.
                (Some(one), None) => {
                    places.remove(&one.to);
                    let _ = self.waiting.enter(one, since);
                }
            }
        }
    }

    /// Passes a connection to the running session of its address. Returns the connection if no such session runs, or if its
    /// source has closed all connections.
    fn deliver(&self, waiting: Waiting) -> Option<Waiting> {
        let Waiting { one, to } = waiting;
        let Some(session) = under_way(&self.sessions, to) else {
            return Some(Waiting { one, to });
        };
        let given = session.deliver(one);
        given.err().map(|one| Waiting { one, to })
    }

    /// Starts a session of `kind` to the destination of `one`, its first connection.
    fn begin(&mut self, kind: Kind, one: Waiting) {
        let Waiting { one, to } = one;
        match start(self.agent, to, kind) {
            Ok(session) => {
                self.sessions.insert(to, Arc::downgrade(&session));
                // A new session always accepts a connection.
                let _ = session.deliver(one);
            }
            Err(error) => {
                let text = format!("to={to} error=\"{}\"", error_line(&error));
                self.agent.refuse(&text);
            }
        }
    }
}

/// Returns the running session to `to`; `None` if its source has closed all connections. Otherwise the retry of a migration
/// that was cancelled while it waited for a slot would join the old session.
/// join the old session.
fn under_way(
    sessions: &HashMap<SocketAddr, Weak<Session>>,
    to: SocketAddr,
) -> Option<Arc<Session>> {
    let known = sessions.get(&to).and_then(Weak::upgrade);
    known.filter(|session| !session.is_deserted())
}

fn start(agent: &Arc<Agent>, to: SocketAddr, kind: Kind) -> Result<Arc<Session>, CarryError> {
    let (listener, sender) = Listener::queue(true).map_err(CarryError::system("descriptor"))?;
    let token = relay::new_token().map_err(CarryError::system("random number"))?;
    let config = agent.config();
    let [a, b, c, d, ..] = token;
    let subject = SessionInfo {
        id: Id(u32::from_be_bytes([a, b, c, d])),
        direction: Direction::Outgoing,
        kind,
        to,
        peer: config.agent_of(to.ip()).to_string(),
        announcer: None,
    };
    let weight = config.weight_of(to.ip());
    let session = Arc::new(Session::new(subject, sender, None, weight, &agent.log));
    agent.sessions.add(&session)?;
    let (of_thread, carried) = (Arc::clone(agent), Arc::clone(&session));
    let started = thread::Builder::new()
        .name("agent/out".to_owned())
        .spawn(move || {
            let outcome = outgoing::run(&of_thread, &carried, &listener);
            let rest = listener.close();
            if outcome.is_ok() {
                of_thread.give_back(rest, to);
            }
            of_thread.ended(&carried, outcome);
        });
    match started {
        Ok(_) => Ok(session),
        Err(source) => {
            let error = CarryError::system("thread")(source);
            agent.not_begun(&session, &error);
            Err(error)
        }
    }
}

/// Returns `to` as the address type of the relay.
fn tcp(to: SocketAddr) -> Address {
    Address::Tcp {
        host: to.ip().to_string(),
        port: to.port(),
    }
}

#[cfg(test)]
mod tests {
    use super::*;
    use crate::fixture::{admitted, agent, destination, session, subject, until};

    #[test]
    fn a_queued_migration_whose_source_is_gone_gets_no_connection() {
        let agent = agent("");
        let subject = subject(1, Direction::Outgoing, Kind::Migration);
        let (waits, _listener) = session(subject);
        let mut router = Router::new(&agent).unwrap();
        let to = destination();
        router.sessions.insert(to, Arc::downgrade(&waits));
        let offer = |one| router.deliver(Waiting { one, to });
        let (main, source) = admitted();
        assert!(offer(main).is_none(), "it is there");
        drop(source);
        until("the end is seen", || waits.is_deserted());
        let (retried, _source) = admitted();
        assert!(offer(retried).is_some(), "a retry is another migration");
    }

    #[test]
    fn a_stopping_agent_takes_connections_of_running_migrations_only() {
        let agent = agent("");
        let (under_way, listener) = session(subject(1, Direction::Outgoing, Kind::Migration));
        let mut router = Router::new(&agent).unwrap();
        let to = destination();
        router.sessions.insert(to, Arc::downgrade(&under_way));
        agent.sessions.end();
        let (channel, _source) = admitted();
        router.keep(channel, to);
        assert!(listener.accept(Instant::now()).unwrap().is_some());
        let (other, _source) = admitted();
        router.keep(other, SocketAddr::new(to.ip(), to.port() + 1));
        assert_eq!(router.waiting.iter().count(), 0);
        assert_eq!(agent.sessions.totals().refusals, 1);
    }

    #[test]
    fn channels_start_a_migration_only_with_a_possible_main_channel() {
        let kind = |main, channel, silent, other| {
            let place = AddressClasses {
                main,
                channel,
                silent,
                other,
            };
            place.kind()
        };
        assert_eq!(kind(true, false, false, false), Some(Kind::Migration));
        assert_eq!(kind(false, true, true, false), Some(Kind::Migration));
        assert_eq!(
            kind(false, true, false, false),
            None,
            "what a failed one has left"
        );
        assert_eq!(
            kind(false, false, true, false),
            None,
            "it may still send something"
        );
        assert_eq!(kind(false, false, false, true), Some(Kind::Tunnel));
        assert_eq!(kind(false, false, true, true), Some(Kind::Tunnel));
    }
}

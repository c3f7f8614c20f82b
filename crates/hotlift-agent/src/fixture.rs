//! Agents, sessions and connections without threads, for tests of the agent's modules.

use std::io::Write;
use std::net::{Ipv4Addr, SocketAddr, TcpListener, TcpStream};
use std::path::Path;
use std::sync::Arc;
use std::time::{Duration, Instant};

use hotlift::Listener;
use hotlift::admission::Admitted;
use hotlift::transport::Stream;
use hotlift_testkit::pki::Pki;

use crate::agent::Agent;
use crate::config::Config;
use crate::log::Log;
use crate::messages::{Id, Kind};
use crate::session::{Direction, Session, SessionInfo};

/// Returns the destination of the sessions that this module creates.
pub fn destination() -> SocketAddr {
    SocketAddr::from((Ipv4Addr::new(192, 0, 2, 2), 49152))
}

/// Creates an agent with `lines` in its configuration.
pub fn agent(lines: &str) -> Arc<Agent> {
    let pki = Pki::new();
    let text = format!("tls = \"{}\"\n{lines}", pki.host("a.example").display());
    let file = Path::new("agent.toml");
    let config = Config::of_text(file, &text).expect("a configuration");
    let log = Log::new(config.log);
    Arc::new(Agent::new(file, config, &log, None).expect("an agent"))
}

/// Creates a session that no thread carries, and the listener of its connections.
pub fn session(subject: SessionInfo) -> (Arc<Session>, Listener) {
    let (listener, sender) = Listener::queue(true).expect("descriptors");
    let log = Log::new(crate::config::LogLevel::Error);
    let session = Session::new(subject, sender, None, 100, &log);
    (Arc::new(session), listener)
}

/// Creates the fixed properties of a session.
pub fn subject(id: u32, direction: Direction, kind: Kind) -> SessionInfo {
    SessionInfo {
        id: Id(id),
        direction,
        kind,
        to: destination(),
        peer: "a.example".to_owned(),
        announcer: None,
    }
}

/// Creates a connection as admitted at the agent's port; also returns its other end.
pub fn admitted() -> (Admitted, TcpStream) {
    let (here, there) = connection();
    (Admitted::new(here, Instant::now()), there)
}

/// Creates a connection as accepted by the agent; also returns its other end.
pub fn connection() -> (Stream, TcpStream) {
    let listener = TcpListener::bind((Ipv4Addr::LOCALHOST, 0)).expect("a listener");
    let address = listener.local_addr().expect("its address");
    let there = TcpStream::connect(address).expect("a connection");
    let (here, _) = listener.accept().expect("it");
    (Stream::of_tcp(here).expect("its options"), there)
}

/// Waits until `condition` is true; panics with `what` after 30 s.
pub fn until(what: &str, condition: impl Fn() -> bool) {
    assert!(becomes(condition), "not so within 30 s: {what}");
}

/// Waits until `condition` is true; returns false if it is not after 30 s.
pub fn becomes(condition: impl Fn() -> bool) -> bool {
    (0..3000).any(|_| {
        let condition = condition();
        if !condition {
            std::thread::sleep(Duration::from_millis(10));
        }
        condition
    })
}

/// Writes to `source` until the buffers of the connection are full.
pub fn fill(mut source: &TcpStream) {
    source.set_nonblocking(true).expect("its mode");
    while source.write(&[0; 65536]).is_ok() {}
}

//! A proxy that damages, pauses, delays and cuts connections, over TCP or UNIX sockets.
//!
//! Every proxy can delay data and end connections. A [`Rule`] decides which data passes:
//!
//! | module | subject |
//! |---|---|
//! | [`rule`] | interface of a rule; the rule that passes everything |
//! | [`bytes`] | records every byte, and flips one, selected by its offset |
//! | [`units`] | parses the stream between two Hotlifts, and damages, cuts or pauses one of its records |

pub mod bytes;
pub mod records;
pub mod rule;
mod socket;
pub mod units;

use std::net::{SocketAddr, TcpListener};
use std::os::fd::OwnedFd;
use std::os::unix::net::UnixListener;
use std::path::Path;
use std::sync::atomic::{AtomicU64, Ordering};
use std::sync::{Arc, Condvar, Mutex, MutexGuard, OnceLock, PoisonError};
use std::thread::{self, JoinHandle};
use std::time::{Duration, Instant};

use hotlift::Address;
use rustix::event::{EventfdFlags, eventfd};
use serde::{Deserialize, Serialize};

pub use self::rule::{AsTheyCome, Flow, Rule, Socket, Stop};
use self::socket::{Listener, Target, end, end_half, has_data, is_gone, write_all};
use crate::error::KitError;
use crate::namespace::{DESTINATION, Namespace, PROXY};

/// Bytes per read of a connection.
const CHUNK: usize = 64 << 10;

/// How a TCP connection ends.
#[derive(Debug, Clone, Copy, PartialEq, Eq, Serialize, Deserialize)]
#[serde(rename_all = "snake_case")]
pub enum Ending {
    /// FIN: an orderly end after all data.
    Fin,
    /// RST: a reset.
    Reset,
}

/// How a proxy converts the end of one connection for the peer of the other connection.
#[derive(Debug, Clone, Copy, PartialEq, Eq, Serialize, Deserialize)]
#[serde(rename_all = "snake_case")]
pub enum EndMapping {
    /// Unchanged: FIN remains FIN, and RST remains RST.
    AsIs,
    /// Always FIN: a RST becomes a FIN.
    AllToFin,
    /// Always RST: a FIN becomes a RST, which discards data of the other direction.
    AllToReset,
}

/// Forwards connections until it is dropped. The rule `R` may change the data.
pub struct Proxy<R: Rule = AsTheyCome> {
    rule: Arc<R>,
    core: Arc<Core>,
    accepting: Option<JoinHandle<()>>,
}

/// State shared by all threads of a proxy.
struct Core {
    target: Target,
    end_mapping: EndMapping,
    waits: Mutex<Waits>,
    /// Condition variable for changes of `waits`.
    changed: Condvar,
    delay_ms: AtomicU64,
    cut: Mutex<Option<Cut>>,
    /// Kind of the connection that must be cut as soon as its first bytes identify it; `None` if no cut is pending.
    cut_when_recognised: Mutex<Option<Socket>>,
    connections: Mutex<Vec<Arc<Connection>>>,
    threads: Mutex<Vec<JoinHandle<()>>>,
    /// Event descriptor that is readable when the proxy ends.
    ends: OwnedFd,
}

/// Reasons why the threads of a proxy must wait.
#[derive(Default)]
struct Waits {
    /// Time until which no data passes; `None` without a wait.
    until: Option<Instant>,
    /// True if a rule has paused a direction.
    is_held: bool,
    is_released: bool,
    has_ended: bool,
}

/// A pending cut of all connections.
#[derive(Clone, Copy)]
struct Cut {
    how: Ending,
    /// Number of bytes from the destination that still pass, the sum of all connections.
    after: u64,
}

struct Connection {
    client: OwnedFd,
    server: OwnedFd,
    /// Kind of the connection; set once its first bytes identify it.
    socket: OnceLock<Socket>,
}

impl Connection {
    fn end(&self, how: Ending) {
        for socket in [&self.client, &self.server] {
            end(socket, how);
        }
    }

    /// Returns the socket to read and the socket to write for one direction.
    fn sockets(&self, back: bool) -> (&OwnedFd, &OwnedFd) {
        match back {
            false => (&self.client, &self.server),
            true => (&self.server, &self.client),
        }
    }
}

impl Proxy {
    /// Creates a proxy that listens on the UNIX socket `at`, and forwards connections to the UNIX socket `to`.
    ///
    /// # Errors
    /// If the proxy cannot listen.
    pub fn unix(at: &Path, to: &Path) -> Result<Self, KitError> {
        Self::unix_with(at, to, AsTheyCome)
    }

    /// Creates a proxy that listens at `port` of [`PROXY`] in `host`, and forwards connections to [`DESTINATION`].
    ///
    /// # Errors
    /// If the proxy cannot listen.
    pub fn tcp(host: &Namespace, port: u16, end_mapping: EndMapping) -> Result<Self, KitError> {
        let listener = host.within(|| TcpListener::bind((PROXY, port)))?;
        let listener = listener.map_err(KitError::system("listen"))?;
        let target = Target::Tcp(DESTINATION.to_owned(), port, Some(host.again()?));
        Self::start(Listener::Tcp(listener), target, end_mapping, AsTheyCome)
    }
}

impl<R: Rule> Proxy<R> {
    /// Creates a proxy between UNIX sockets like [`Proxy::unix`], which applies `rule`.
    ///
    /// # Errors
    /// If the proxy cannot listen.
    pub fn unix_with(at: &Path, to: &Path, rule: R) -> Result<Self, KitError> {
        let listener = UnixListener::bind(at).map_err(KitError::system("listen"))?;
        let target = Target::Unix(to.to_owned());
        Self::start(Listener::Unix(listener), target, EndMapping::AsIs, rule)
    }

    /// Creates a proxy that listens on a local TCP port, forwards connections to `to`, and applies `rule`. Returns the
    /// proxy with its address. A RST becomes a FIN.
    ///
    /// # Errors
    /// If the proxy cannot listen.
    ///
    /// # Panics
    /// If `to` is not a TCP address.
    pub fn loopback(to: &Address, rule: R) -> Result<(Self, Address), KitError> {
        let Address::Tcp { host, port } = to else {
            panic!("{to} is not of TCP");
        };
        let bound = TcpListener::bind("127.0.0.1:0").and_then(|listener| {
            let address: SocketAddr = listener.local_addr()?;
            Ok((listener, address))
        });
        let (listener, address) = bound.map_err(KitError::system("listen"))?;
        let target = Target::Tcp(host.clone(), *port, None);
        let this = Self::start(Listener::Tcp(listener), target, EndMapping::AllToFin, rule)?;
        let address = Address::Tcp {
            host: address.ip().to_string(),
            port: address.port(),
        };
        Ok((this, address))
    }

    fn start(
        listener: Listener,
        target: Target,
        end_mapping: EndMapping,
        rule: R,
    ) -> Result<Self, KitError> {
        let ends = eventfd(0, EventfdFlags::CLOEXEC)
            .map_err(|error| KitError::system("make an eventfd")(error.into()))?;
        let core = Arc::new(Core {
            target,
            end_mapping,
            waits: Mutex::default(),
            changed: Condvar::new(),
            delay_ms: AtomicU64::new(0),
            cut: Mutex::default(),
            cut_when_recognised: Mutex::default(),
            connections: Mutex::default(),
            threads: Mutex::default(),
            ends,
        });
        let rule = Arc::new(rule);
        let (of_thread, its_rule) = (Arc::clone(&core), Arc::clone(&rule));
        let accepting = spawn(move || accept(&of_thread, &its_rule, &listener))?;
        Ok(Self {
            rule,
            core,
            accepting: Some(accepting),
        })
    }

    /// Holds all data for `time`.
    pub fn hold(&self, time: Duration) {
        lock(&self.core.waits).until = Some(Instant::now() + time);
        self.core.changed.notify_all();
    }

    /// Delays all data by `time` from now on: the proxy waits before each write.
    pub fn delay(&self, time: Duration) {
        let time = u64::try_from(time.as_millis()).unwrap_or(u64::MAX);
        self.core.delay_ms.store(time, Ordering::SeqCst);
    }

    /// Ends all current connections as `how` says, after the destination has sent `after` more bytes.
    pub fn cut(&self, how: Ending, after: u64) {
        if after == 0 {
            self.core.end_all(how);
        } else {
            *lock(&self.core.cut) = Some(Cut { how, after });
        }
    }

    /// Returns true if a connection of this kind has been identified.
    #[must_use]
    pub fn has(&self, socket: Socket) -> bool {
        self.first(socket).is_some()
    }

    /// Cuts the first connection of this kind. Returns false if no connection of this kind has been identified.
    #[must_use]
    pub fn cut_first(&self, socket: Socket) -> bool {
        let found = self.first(socket);
        if let Some(connection) = &found {
            connection.end(Ending::Fin);
        }
        found.is_some()
    }

    /// Cuts the next connection of this kind, before any byte of it passes.
    pub fn cut_when_recognised(&self, socket: Socket) {
        *lock(&self.core.cut_when_recognised) = Some(socket);
    }

    /// Returns true once the cut of [`Proxy::cut_when_recognised`] has been done.
    #[must_use]
    pub fn has_cut_recognised(&self) -> bool {
        lock(&self.core.cut_when_recognised).is_none()
    }

    /// Returns true if the rule has held data.
    #[must_use]
    pub fn is_held(&self) -> bool {
        lock(&self.core.waits).is_held
    }

    /// Releases all data that the rule has paused or will pause.
    pub fn release(&self) {
        lock(&self.core.waits).is_released = true;
        self.core.changed.notify_all();
    }

    /// Waits until all received bytes have passed, closes all open connections, and returns the rule. A peer that has
    /// not closed its connection must keep reading until this function returns.
    ///
    /// # Panics
    /// If a thread of the proxy panicked.
    #[must_use]
    pub fn finish(mut self) -> R {
        self.core.end();
        assert!(self.join(), "a thread of the proxy has panicked");
        self.core.end_all(Ending::Fin);
        let rule = Arc::clone(&self.rule);
        drop(self);
        Arc::into_inner(rule).expect("no thread is left")
    }

    fn first(&self, socket: Socket) -> Option<Arc<Connection>> {
        let connections = lock(&self.core.connections);
        let mut found = connections
            .iter()
            .filter(|one| one.socket.get() == Some(&socket));
        found.next().map(Arc::clone)
    }

    /// Waits for the end of all threads. Returns false if a thread has panicked.
    fn join(&mut self) -> bool {
        let accepting = self.accepting.take();
        let accepted = accepting.is_none_or(|thread| thread.join().is_ok());
        let threads: Vec<_> = lock(&self.core.threads).drain(..).collect();
        let mut carried = true;
        for thread in threads {
            carried &= thread.join().is_ok();
        }
        accepted && carried
    }
}

impl<R: Rule> Drop for Proxy<R> {
    fn drop(&mut self) {
        // Connections are ended before held bytes are released, so that none of the held bytes pass.
        self.core.end_all(Ending::Reset);
        self.core.end();
        if let Some(accepting) = self.accepting.take() {
            let _ = accepting.join();
        }
        self.core.end_all(Ending::Reset);
        self.join();
    }
}

fn accept<R: Rule>(core: &Arc<Core>, rule: &Arc<R>, listener: &Listener) {
    while has_data(listener, &core.ends) && !core.has_ended() {
        let Ok(client) = listener.accept() else {
            continue;
        };
        // If the target refuses the connection, the client receives a reset.
        let Some(server) = core.target.connect() else {
            end(&client, Ending::Reset);
            continue;
        };
        let connection = Arc::new(Connection {
            client,
            server,
            socket: OnceLock::new(),
        });
        lock(&core.connections).push(Arc::clone(&connection));
        for back in [false, true] {
            let (shared, rule) = (Arc::clone(core), Arc::clone(rule));
            let carried = Arc::clone(&connection);
            let carrying = spawn(move || carry(&shared, rule.as_ref(), &carried, back));
            match carrying {
                Ok(thread) => lock(&core.threads).push(thread),
                Err(_) => connection.end(Ending::Reset),
            }
        }
    }
}

/// Forwards one direction of one connection.
fn carry<R: Rule>(core: &Core, rule: &R, connection: &Connection, back: bool) {
    let (from, to) = connection.sockets(back);
    let flow = Flow {
        core,
        connection,
        back,
    };
    let mut direction = R::Direction::default();
    let (mut first, mut came, mut chunk) = (Vec::new(), Vec::new(), vec![0; CHUNK]);
    let mut is_deaf = false;
    while has_data(from, &core.ends) {
        let read = rustix::io::read(from, chunk.as_mut_slice());
        core.wait();
        let ending = match read {
            Ok(1..) if is_deaf => continue,
            Ok(length @ 1..) => {
                came.extend_from_slice(&chunk[..length]);
                if !back && connection.socket.get().is_none() {
                    let missing = Socket::KNOWN_BY - first.len();
                    first.extend_from_slice(&chunk[..length.min(missing)]);
                    match core.recognise(connection, &first) {
                        Recognition::Goes => {}
                        Recognition::Waits => continue,
                        Recognition::Cut => return,
                    }
                }
                match rule.apply(&mut direction, &mut came, &flow) {
                    Ok(()) => {}
                    Err(Stop::HalfCut) => {
                        end_half(to);
                        is_deaf = true;
                    }
                    Err(Stop::Cut) => return connection.end(Ending::Fin),
                    // The writer receives a reset, as on a direct connection.
                    Err(Stop::Gone) => return end(from, Ending::Reset),
                    Err(Stop::Ended) => return,
                }
                continue;
            }
            Ok(_) => Ending::Fin,
            Err(_) => Ending::Reset,
        };
        if !is_deaf {
            write_all(to, &came);
        }
        match (core.end_mapping, ending) {
            // A peer that has closed both directions differs from a half-closed peer. The other peer must see the same
            // difference.
            (EndMapping::AsIs, Ending::Fin) if is_gone(from) => connection.end(Ending::Fin),
            (EndMapping::AsIs | EndMapping::AllToFin, Ending::Fin)
            | (EndMapping::AllToFin, Ending::Reset) => {
                end_half(to);
            }
            (EndMapping::AsIs, Ending::Reset) | (EndMapping::AllToReset, _) => {
                connection.end(Ending::Reset);
            }
        }
        return;
    }
}

/// Decision about a connection after its first bytes.
enum Recognition {
    Goes,
    /// More bytes are needed: this may be the connection to cut.
    Waits,
    Cut,
}

impl Core {
    /// Identifies a connection that begins with `first`, and cuts it if this kind must be cut.
    fn recognise(&self, connection: &Connection, first: &[u8]) -> Recognition {
        let mut cut_when_recognised = lock(&self.cut_when_recognised);
        let Some(socket) = Socket::of(first) else {
            return cut_when_recognised.map_or(Recognition::Goes, |_| Recognition::Waits);
        };
        let _ = connection.socket.set(socket);
        if *cut_when_recognised != Some(socket) {
            return Recognition::Goes;
        }
        connection.end(Ending::Fin);
        *cut_when_recognised = None;
        Recognition::Cut
    }

    /// Waits while data is held or delayed for a time.
    fn wait(&self) {
        let delay = self.delay_ms.load(Ordering::SeqCst);
        if delay > 0 {
            thread::sleep(Duration::from_millis(delay));
        }
        let mut waits = lock(&self.waits);
        while !waits.has_ended
            && let Some(until) = waits.until
            && let Some(left) = until.checked_duration_since(Instant::now())
            && !left.is_zero()
        {
            let waited = self.changed.wait_timeout(waits, left);
            waits = waited.unwrap_or_else(PoisonError::into_inner).0;
        }
    }

    /// Waits until held data is released, or the proxy ends.
    fn hold(&self) {
        let mut waits = lock(&self.waits);
        waits.is_held = true;
        let stands = |waits: &mut Waits| !waits.is_released && !waits.has_ended;
        drop(self.changed.wait_while(waits, stands));
    }

    fn end(&self) {
        lock(&self.waits).has_ended = true;
        self.changed.notify_all();
        let _ = rustix::io::write(&self.ends, &1_u64.to_ne_bytes());
    }

    fn has_ended(&self) -> bool {
        lock(&self.waits).has_ended
    }

    /// Returns how many of `length` bytes from the destination may pass before a pending cut. Without a pending cut,
    /// returns `length`.
    fn count(&self, length: usize) -> usize {
        let mut cut = lock(&self.cut);
        let Some(asked) = cut.as_mut() else {
            return length;
        };
        let bytes = u64::try_from(length).unwrap_or(u64::MAX);
        if asked.after >= bytes {
            asked.after -= bytes;
            return length;
        }
        let left = usize::try_from(asked.after).unwrap_or(0);
        asked.after = 0;
        left
    }

    /// Cuts all connections if a cut is due. Returns true if the cut was done.
    fn is_due(&self) -> bool {
        let mut cut = lock(&self.cut);
        let due = cut.filter(|asked| asked.after == 0);
        if let Some(asked) = due {
            *cut = None;
            drop(cut);
            self.end_all(asked.how);
        }
        due.is_some()
    }

    fn end_all(&self, how: Ending) {
        for connection in lock(&self.connections).drain(..) {
            connection.end(how);
        }
    }
}

fn spawn(work: impl FnOnce() + Send + 'static) -> Result<JoinHandle<()>, KitError> {
    let builder = thread::Builder::new().name("proxy".to_owned());
    builder
        .spawn(work)
        .map_err(KitError::system("start a thread"))
}

fn lock<T>(mutex: &Mutex<T>) -> MutexGuard<'_, T> {
    mutex.lock().unwrap_or_else(PoisonError::into_inner)
}

#[cfg(test)]
mod tests {
    use std::io::{self, Read, Write};
    use std::net::TcpStream;
    use std::os::unix::net::UnixStream;

    use super::bytes::{Bytes, Direction, Flip};
    use super::*;

    /// Returns the first bytes of a multifd channel, up to and including the channel number.
    fn opening(number: u8) -> Vec<u8> {
        let mut bytes = vec![0; Socket::KNOWN_BY];
        bytes[..4].copy_from_slice(&hotlift_wire::multifd::MAGIC.to_be_bytes());
        bytes[Socket::KNOWN_BY - 1] = number;
        bytes
    }

    /// Returns a local listener with a proxy in front of it, and both ends of a connection through the proxy.
    fn before<R: Rule>(rule: R) -> (TcpListener, Proxy<R>, TcpStream, TcpStream) {
        let listener = TcpListener::bind("127.0.0.1:0").unwrap();
        let to = format!("tcp:{}", listener.local_addr().unwrap());
        let (proxy, address) = Proxy::loopback(&to.parse().unwrap(), rule).unwrap();
        let Address::Tcp { host, port } = address else {
            unreachable!()
        };
        let client = TcpStream::connect((host, port)).unwrap();
        let server = listener.accept().unwrap().0;
        (listener, proxy, client, server)
    }

    fn pair(
        end_mapping: EndMapping,
    ) -> Option<(crate::namespace::Link, Proxy, TcpStream, TcpStream)> {
        if !rustix::process::geteuid().is_root() {
            crate::skip!("root", "network namespaces need it");
            return None;
        }
        let link = crate::namespace::Link::new(1500, 0).unwrap();
        let host = &link.destination;
        let listener = host.within(|| TcpListener::bind((DESTINATION, 7000)));
        let listener = listener.unwrap().unwrap();
        let proxy = Proxy::tcp(host, 7000, end_mapping).unwrap();
        let client = host.within(|| TcpStream::connect((PROXY, 7000)));
        let client = client.unwrap().unwrap();
        Some((link, proxy, client, listener.accept().unwrap().0))
    }

    #[test]
    fn a_proxy_makes_fin_of_rst_and_rst_of_fin() {
        for (end_mapping, how, sees) in [
            (EndMapping::AllToFin, Ending::Reset, Ending::Fin),
            (EndMapping::AllToReset, Ending::Fin, Ending::Reset),
            (EndMapping::AsIs, Ending::Reset, Ending::Reset),
            (EndMapping::AsIs, Ending::Fin, Ending::Fin),
        ] {
            let Some((_link, _proxy, mut client, mut server)) = pair(end_mapping) else {
                return;
            };
            client.write_all(b"word").unwrap();
            server.read_exact(&mut [0; 4]).unwrap();
            match how {
                Ending::Fin => client.shutdown(std::net::Shutdown::Write).unwrap(),
                Ending::Reset => rustix::net::connect_unspec(&client).unwrap(),
            }
            server
                .set_read_timeout(Some(Duration::from_secs(60)))
                .unwrap();
            let seen = match server.read(&mut [0; 4]) {
                Ok(0) => Ending::Fin,
                Err(error) if error.kind() == io::ErrorKind::ConnectionReset => Ending::Reset,
                other => panic!("{end_mapping:?} {how:?}: {other:?}"),
            };
            assert_eq!(seen, sees, "{end_mapping:?} {how:?}");
        }
    }

    #[test]
    fn a_cut_happens_after_the_given_bytes_of_the_return_path() {
        let Some((_link, proxy, mut client, mut server)) = pair(EndMapping::AsIs) else {
            return;
        };
        proxy.cut(Ending::Fin, 6);
        client.write_all(b"forth").unwrap();
        server.read_exact(&mut [0; 5]).unwrap();
        server.write_all(b"back, and more").unwrap();
        let mut received = Vec::new();
        client
            .set_read_timeout(Some(Duration::from_secs(60)))
            .unwrap();
        client.read_to_end(&mut received).unwrap();
        assert_eq!(received, b"back, ");
    }

    #[test]
    fn a_connection_is_classified_by_its_first_bytes_and_cut_before_or_after_them() {
        let folder = tempfile::tempdir().unwrap();
        let (at, to) = (folder.path().join("at"), folder.path().join("to"));
        let listener = UnixListener::bind(&to).unwrap();
        let proxy = Proxy::unix(&at, &to).unwrap();
        let pair = || {
            (
                UnixStream::connect(&at).unwrap(),
                listener.accept().unwrap().0,
            )
        };
        let (mut client, mut server) = pair();
        client.write_all(b"QEVM").unwrap();
        server.read_exact(&mut [0; 4]).unwrap();
        let channel = Socket::Channel(1);
        assert!(proxy.has(Socket::Main) && !proxy.has(channel));
        assert!(proxy.cut_first(Socket::Main) && !proxy.cut_first(channel));
        assert_eq!(client.read(&mut [0; 4]).unwrap(), 0);
        proxy.cut_when_recognised(channel);
        let (mut client, mut server) = pair();
        client.write_all(&opening(0)).unwrap();
        server.read_exact(&mut [0; Socket::KNOWN_BY]).unwrap();
        assert!(!proxy.has_cut_recognised(), "it was another");
        let (mut client, mut server) = pair();
        let opening = opening(1);
        let (first, rest) = opening.split_at(4);
        client.write_all(first).unwrap();
        client.write_all(rest).unwrap();
        assert_eq!(server.read(&mut [0; 4]).unwrap(), 0, "it passed");
        assert!(proxy.has_cut_recognised() && proxy.has(channel));
    }

    #[test]
    fn a_closed_peer_is_distinguished_from_a_half_closed_one() {
        let folder = tempfile::tempdir().unwrap();
        let (at, to) = (folder.path().join("at"), folder.path().join("to"));
        let listener = UnixListener::bind(&to).unwrap();
        let _proxy = Proxy::unix(&at, &to).unwrap();
        for gone in [false, true] {
            let client = UnixStream::connect(&at).unwrap();
            let mut server = listener.accept().unwrap().0;
            let client = Some(client).filter(|_| !gone);
            if let Some(client) = &client {
                client.shutdown(std::net::Shutdown::Write).unwrap();
            }
            assert_eq!(server.read(&mut [0; 4]).unwrap(), 0);
            assert_eq!(server.write(b"answer").is_ok(), !gone);
            drop(client);
        }
    }

    #[test]
    fn a_byte_is_flipped_at_the_given_offset_and_recorded_unchanged() {
        let at = Socket::KNOWN_BY + 2;
        let direction = Direction::Forth(Socket::Channel(7));
        let flip = Flip {
            direction,
            at,
            mask: 0x81,
        };
        let (_listener, proxy, mut client, mut server) = before(Bytes::new(Some(flip)));
        let mut output = opening(7);
        output.extend([1, 2, 3, 4]);
        client.write_all(&output).unwrap();
        server.write_all(b"answer").unwrap();
        drop(client);
        let mut received = Vec::new();
        server.read_to_end(&mut received).unwrap();
        drop(server);
        let carried = proxy.finish().into_carried();
        assert_eq!(carried[&direction], output);
        assert_eq!(carried[&Direction::Back], b"answer");
        output[at] ^= 0x81;
        assert_eq!(received, output);
    }

    /// A rule that the received bytes control.
    struct Told;

    impl Rule for Told {
        type Direction = ();

        fn apply(&self, (): &mut (), came: &mut Vec<u8>, flow: &Flow<'_>) -> Result<(), Stop> {
            match came.as_slice() {
                b"keep" => Ok(()),
                b"cut" => Err(Stop::Cut),
                b"half" => Err(Stop::HalfCut),
                b"hold" => {
                    flow.hold();
                    flow.pass_all(came)
                }
                _ => flow.pass_all(came),
            }
        }
    }

    #[test]
    fn a_cut_ends_both_directions_and_a_half_cut_one() {
        for (word, goes_back) in [("half", true), ("cut", false)] {
            let (_listener, _proxy, mut client, mut server) = before(Told);
            client.write_all(word.as_bytes()).unwrap();
            assert_eq!(server.read(&mut [0; 4]).unwrap(), 0, "{word}");
            if goes_back {
                client.write_all(b"this is dropped").unwrap();
                server.write_all(b"back").unwrap();
            }
            drop(server);
            let mut received = Vec::new();
            client.read_to_end(&mut received).unwrap();
            assert_eq!(received.is_empty(), !goes_back, "{word}");
        }
    }

    #[test]
    fn held_bytes_pass_on_release_and_kept_ones_at_the_end() {
        for (word, is_held) in [("hold", true), ("keep", false)] {
            let (_listener, proxy, mut client, mut server) = before(Told);
            client.write_all(word.as_bytes()).unwrap();
            if is_held {
                while !proxy.is_held() {
                    thread::yield_now();
                }
                server.set_nonblocking(true).unwrap();
                let nothing = server.read(&mut [0; 4]).unwrap_err();
                assert_eq!(nothing.kind(), io::ErrorKind::WouldBlock);
                server.set_nonblocking(false).unwrap();
                proxy.release();
            }
            drop(client);
            let mut received = String::new();
            server.read_to_string(&mut received).unwrap();
            assert_eq!(received, word);
        }
    }

    #[test]
    fn a_dropped_proxy_ends_the_connections_that_it_holds() {
        let (_listener, proxy, mut client, mut server) = before(Told);
        client.write_all(b"hold").unwrap();
        while !proxy.is_held() {
            thread::yield_now();
        }
        drop(proxy);
        // FIN or RST, both are accepted.
        assert_eq!(server.read(&mut [0; 4]).unwrap_or(0), 0);
    }
}

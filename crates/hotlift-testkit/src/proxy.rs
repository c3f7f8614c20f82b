//! A proxy that can hold, delay and cut what it carries, over TCP or UNIX sockets.

use std::io;
use std::net::{TcpListener, TcpStream};
use std::os::fd::{AsFd, OwnedFd};
use std::os::unix::net::{UnixListener, UnixStream};
use std::path::{Path, PathBuf};
use std::sync::atomic::{AtomicBool, AtomicU64, Ordering};
use std::sync::{Arc, Mutex, MutexGuard, OnceLock, PoisonError};
use std::thread::{self, JoinHandle};
use std::time::{Duration, Instant};

use rustix::event::{PollFd, PollFlags, Timespec, poll};
use rustix::net::{RecvFlags, Shutdown, shutdown};
use serde::{Deserialize, Serialize};

use crate::error::KitError;
use crate::namespace::{DESTINATION, Namespace, PROXY};

/// How often threads look whether something was asked of them.
const TICK: Duration = Duration::from_millis(5);

/// A read of a proxy.
const CHUNK: usize = 64 << 10;

/// How a TCP connection ends.
#[derive(Debug, Clone, Copy, PartialEq, Eq, Serialize, Deserialize)]
#[serde(rename_all = "snake_case")]
pub enum Ending {
    /// In order: all was said.
    Fin,
    /// Reset.
    Reset,
}

/// What a proxy passes on at the end of a connection.
#[derive(Debug, Clone, Copy, PartialEq, Eq, Serialize, Deserialize)]
#[serde(rename_all = "snake_case")]
pub enum Turns {
    /// The same.
    AsIs,
    /// Always FIN: a RST becomes one.
    AllToFin,
    /// Always RST: a FIN becomes one, and takes away what was said the other way.
    AllToReset,
}

/// What a connection of a migration is, by its first bytes.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub enum Socket {
    /// The main channel.
    Main,
    /// A multifd channel.
    Channel,
}

enum Far {
    Unix(PathBuf),
    Tcp(u16, Namespace),
}

enum Listener {
    Unix(UnixListener),
    Tcp(TcpListener),
}

/// Carries connections until it goes out of scope.
pub struct Proxy {
    shared: Arc<Shared>,
    accepting: Option<JoinHandle<()>>,
}

struct Shared {
    far: Far,
    turns: Turns,
    /// Nothing is passed on before.
    held_until: Mutex<Option<Instant>>,
    delay_ms: AtomicU64,
    cut: Mutex<Option<Cut>>,
    /// To be cut as soon as it is known to be that one.
    on_sight: Mutex<Option<Socket>>,
    connections: Mutex<Vec<Arc<Connection>>>,
    threads: Mutex<Vec<JoinHandle<()>>>,
    ends: AtomicBool,
}

/// Connections are to be cut.
#[derive(Clone, Copy)]
struct Cut {
    how: Ending,
    /// After so many more bytes of the way back, all connections together.
    after: u64,
}

struct Connection {
    near: OwnedFd,
    far: OwnedFd,
    /// Set before its first byte passes.
    socket: OnceLock<Socket>,
}

impl Connection {
    fn end(&self, how: Ending) {
        for socket in [&self.near, &self.far] {
            end(socket, how);
        }
    }
}

/// Ends a connection for its peer. It may have ended by itself.
fn end(socket: &OwnedFd, how: Ending) {
    if how == Ending::Reset {
        // Linux resets a connection that is dissolved so. A UNIX socket has no such thing.
        let _ = rustix::net::connect_unspec(socket);
    }
    let _ = shutdown(socket, Shutdown::Both);
}

impl Proxy {
    /// Listens on the UNIX socket `at` for connections that are to go `to` another.
    ///
    /// # Errors
    /// If it cannot listen.
    pub fn unix(at: &Path, to: &Path) -> Result<Self, KitError> {
        let listener = UnixListener::bind(at).map_err(KitError::system("listen"))?;
        Ok(Self::start(
            Listener::Unix(listener),
            Far::Unix(to.to_owned()),
            Turns::AsIs,
        ))
    }

    /// Listens at `port` of [`PROXY`] in `host` for connections that are to go to [`DESTINATION`].
    ///
    /// # Errors
    /// If it cannot listen.
    pub fn tcp(host: &Namespace, port: u16, turns: Turns) -> Result<Self, KitError> {
        let listener = host.within(|| TcpListener::bind((PROXY, port)))?;
        let listener = listener.map_err(KitError::system("listen"))?;
        let far = Far::Tcp(port, host.again()?);
        Ok(Self::start(Listener::Tcp(listener), far, turns))
    }

    fn start(listener: Listener, far: Far, turns: Turns) -> Self {
        let shared = Arc::new(Shared {
            far,
            turns,
            held_until: Mutex::default(),
            delay_ms: AtomicU64::new(0),
            cut: Mutex::default(),
            on_sight: Mutex::default(),
            connections: Mutex::default(),
            threads: Mutex::default(),
            ends: AtomicBool::new(false),
        });
        let accepting = Arc::clone(&shared);
        let accepting = thread::spawn(move || accepting.accept(&listener));
        Self {
            shared,
            accepting: Some(accepting),
        }
    }

    /// Passes nothing on for so long.
    pub fn hold(&self, time: Duration) {
        *lock(&self.shared.held_until) = Some(Instant::now() + time);
    }

    /// Passes everything on so much later from now on, piece by piece.
    pub fn delay(&self, time: Duration) {
        let time = u64::try_from(time.as_millis()).unwrap_or(u64::MAX);
        self.shared.delay_ms.store(time, Ordering::SeqCst);
    }

    /// Ends the connections that there are, once `after` more bytes have gone the way back.
    pub fn cut(&self, how: Ending, after: u64) {
        if after == 0 {
            self.shared.end_all(how);
        } else {
            *lock(&self.shared.cut) = Some(Cut { how, after });
        }
    }

    /// Whether a connection of a migration has come.
    #[must_use]
    pub fn has(&self, socket: Socket) -> bool {
        self.first(socket).is_some()
    }

    /// Cuts the first connection that is this one; false if none has come.
    #[must_use]
    pub fn cut_first(&self, socket: Socket) -> bool {
        let found = self.first(socket);
        if let Some(connection) = &found {
            connection.end(Ending::Fin);
        }
        found.is_some()
    }

    /// Cuts the next connection that is this one, before anything of it passes.
    pub fn cut_on_sight(&self, socket: Socket) {
        *lock(&self.shared.on_sight) = Some(socket);
    }

    /// True once that was done.
    #[must_use]
    pub fn has_cut_on_sight(&self) -> bool {
        lock(&self.shared.on_sight).is_none()
    }

    fn first(&self, socket: Socket) -> Option<Arc<Connection>> {
        let connections = lock(&self.shared.connections);
        let mut found = connections
            .iter()
            .filter(|one| one.socket.get() == Some(&socket));
        found.next().map(Arc::clone)
    }
}

impl Shared {
    fn accept(self: &Arc<Self>, listener: &Listener) {
        while !self.ends.load(Ordering::SeqCst) {
            let ready = match listener {
                Listener::Unix(listener) => readable(listener),
                Listener::Tcp(listener) => readable(listener),
            };
            if !ready {
                continue;
            }
            let near: io::Result<OwnedFd> = match listener {
                Listener::Unix(listener) => listener.accept().map(|(stream, _)| stream.into()),
                Listener::Tcp(listener) => listener.accept().map(|(stream, _)| {
                    let _ = stream.set_nodelay(true);
                    stream.into()
                }),
            };
            let Ok(near) = near else { continue };
            // One who is gone refuses: the same is said by this end.
            let Some(far) = self.connect() else {
                end(&near, Ending::Reset);
                continue;
            };
            let connection = Arc::new(Connection {
                near,
                far,
                socket: OnceLock::new(),
            });
            lock(&self.connections).push(Arc::clone(&connection));
            for back in [false, true] {
                let (shared, connection) = (Arc::clone(self), Arc::clone(&connection));
                let thread = thread::spawn(move || shared.pass(&connection, back));
                lock(&self.threads).push(thread);
            }
        }
    }

    fn connect(&self) -> Option<OwnedFd> {
        match &self.far {
            Far::Unix(path) => UnixStream::connect(path).ok().map(OwnedFd::from),
            Far::Tcp(port, host) => {
                let connected = host.within(|| TcpStream::connect((DESTINATION, *port)));
                let stream = connected.ok()?.ok()?;
                let _ = stream.set_nodelay(true);
                Some(stream.into())
            }
        }
    }

    fn pass(&self, connection: &Connection, back: bool) {
        let (from, to) = match back {
            false => (&connection.near, &connection.far),
            true => (&connection.far, &connection.near),
        };
        let mut buffer = vec![0; CHUNK];
        while !self.ends.load(Ordering::SeqCst) {
            if !readable(from) {
                continue;
            }
            if !back && connection.socket.get().is_none() && self.is_cut_on_sight(connection) {
                return;
            }
            let read = rustix::io::read(from, buffer.as_mut_slice());
            self.wait();
            let ending = match read {
                Ok(length @ 1..) => {
                    let allowed = if back { self.count(length) } else { length };
                    let written = write_all(to, &buffer[..allowed]);
                    if self.is_due() || allowed < length {
                        return;
                    }
                    if written {
                        continue;
                    }
                    // As a direct connection would tell its writer.
                    end(from, Ending::Reset);
                    return;
                }
                Ok(_) => Ending::Fin,
                Err(_) => Ending::Reset,
            };
            match (self.turns, ending) {
                // One who is gone is told from one who has said all: the other end must see the same.
                (Turns::AsIs, Ending::Fin) if is_gone(from) => connection.end(Ending::Fin),
                (Turns::AsIs | Turns::AllToFin, Ending::Fin) | (Turns::AllToFin, Ending::Reset) => {
                    let _ = shutdown(to, Shutdown::Write);
                }
                (Turns::AsIs, Ending::Reset) | (Turns::AllToReset, _) => {
                    connection.end(Ending::Reset);
                }
            }
            return;
        }
    }

    /// Notes what a connection is that says its first bytes; true if it is cut for that.
    fn is_cut_on_sight(&self, connection: &Connection) -> bool {
        let mut magic = [0; 4];
        let peeked = rustix::net::recv(&connection.near, &mut magic, RecvFlags::PEEK);
        let Ok((length @ 1.., _)) = peeked else {
            return false;
        };
        let socket = match b"QEVM".starts_with(&magic[..length]) {
            true => Socket::Main,
            false => Socket::Channel,
        };
        let mut on_sight = lock(&self.on_sight);
        let is_cut = *on_sight == Some(socket);
        if is_cut {
            connection.end(Ending::Fin);
            *on_sight = None;
        }
        let _ = connection.socket.set(socket);
        is_cut
    }

    /// Waits as long as things are held or delayed.
    fn wait(&self) {
        let delay = self.delay_ms.load(Ordering::SeqCst);
        if delay > 0 {
            thread::sleep(Duration::from_millis(delay));
        }
        while let Some(until) = *lock(&self.held_until)
            && until > Instant::now()
            && !self.ends.load(Ordering::SeqCst)
        {
            thread::sleep(TICK);
        }
    }

    /// How many of `length` bytes of the way back still pass; the cut is made after them.
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

    /// Makes the cut if it is due; true if it was made.
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

impl Drop for Proxy {
    fn drop(&mut self) {
        self.shared.ends.store(true, Ordering::SeqCst);
        self.shared.end_all(Ending::Reset);
        if let Some(accepting) = self.accepting.take() {
            let _ = accepting.join();
        }
        self.shared.end_all(Ending::Reset);
        let threads: Vec<_> = lock(&self.shared.threads).drain(..).collect();
        for thread in threads {
            let _ = thread.join();
        }
    }
}

fn lock<T>(mutex: &Mutex<T>) -> MutexGuard<'_, T> {
    mutex.lock().unwrap_or_else(PoisonError::into_inner)
}

/// Whether there is something to read, or an end, within a tick.
fn readable(socket: &impl AsFd) -> bool {
    let mut fds = [PollFd::new(socket, PollFlags::IN)];
    let tick = Timespec {
        tv_sec: 0,
        tv_nsec: 5_000_000,
    };
    matches!(poll(&mut fds, Some(&tick)), Ok(1..))
}

/// Whether the other end of a socket that has no more to say is closed in both directions.
fn is_gone(socket: &OwnedFd) -> bool {
    let mut fds = [PollFd::new(socket, PollFlags::empty())];
    let polled = poll(&mut fds, Some(&Timespec::default()));
    polled.is_ok() && fds[0].revents().contains(PollFlags::HUP)
}

fn write_all(to: &OwnedFd, mut bytes: &[u8]) -> bool {
    while !bytes.is_empty() {
        match rustix::net::send(to, bytes, rustix::net::SendFlags::NOSIGNAL) {
            Ok(length) => bytes = &bytes[length..],
            Err(rustix::io::Errno::INTR) => {}
            Err(_) => return false,
        }
    }
    true
}

#[cfg(test)]
mod tests {
    use std::io::{Read, Write};

    use super::*;

    fn pair(turns: Turns) -> Option<(crate::namespace::Link, Proxy, TcpStream, TcpStream)> {
        if !rustix::process::geteuid().is_root() {
            crate::skip!("root", "network namespaces need it");
            return None;
        }
        let link = crate::namespace::Link::new(1500, 0).unwrap();
        let host = &link.destination;
        let listener = host.within(|| TcpListener::bind((DESTINATION, 7000)));
        let listener = listener.unwrap().unwrap();
        let proxy = Proxy::tcp(host, 7000, turns).unwrap();
        let near = host.within(|| TcpStream::connect((PROXY, 7000)));
        let near = near.unwrap().unwrap();
        Some((link, proxy, near, listener.accept().unwrap().0))
    }

    #[test]
    fn a_proxy_makes_fin_of_rst_and_rst_of_fin() {
        for (turns, how, sees) in [
            (Turns::AllToFin, Ending::Reset, Ending::Fin),
            (Turns::AllToReset, Ending::Fin, Ending::Reset),
            (Turns::AsIs, Ending::Reset, Ending::Reset),
            (Turns::AsIs, Ending::Fin, Ending::Fin),
        ] {
            let Some((_link, _proxy, mut near, mut far)) = pair(turns) else {
                return;
            };
            near.write_all(b"word").unwrap();
            far.read_exact(&mut [0; 4]).unwrap();
            match how {
                Ending::Fin => near.shutdown(std::net::Shutdown::Write).unwrap(),
                Ending::Reset => rustix::net::connect_unspec(&near).unwrap(),
            }
            far.set_read_timeout(Some(Duration::from_secs(60))).unwrap();
            let seen = match far.read(&mut [0; 4]) {
                Ok(0) => Ending::Fin,
                Err(error) if error.kind() == io::ErrorKind::ConnectionReset => Ending::Reset,
                other => panic!("{turns:?} {how:?}: {other:?}"),
            };
            assert_eq!(seen, sees, "{turns:?} {how:?}");
        }
    }

    #[test]
    fn a_cut_comes_after_so_many_bytes_of_the_way_back() {
        let Some((_link, proxy, mut near, mut far)) = pair(Turns::AsIs) else {
            return;
        };
        proxy.cut(Ending::Fin, 6);
        near.write_all(b"forth").unwrap();
        far.read_exact(&mut [0; 5]).unwrap();
        far.write_all(b"back, and more").unwrap();
        let mut heard = Vec::new();
        near.set_read_timeout(Some(Duration::from_secs(60)))
            .unwrap();
        near.read_to_end(&mut heard).unwrap();
        assert_eq!(heard, b"back, ");
    }

    #[test]
    fn a_connection_is_known_by_its_first_bytes_and_cut_before_they_pass_or_after() {
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
        let (mut near, mut far) = pair();
        near.write_all(b"QEVM").unwrap();
        far.read_exact(&mut [0; 4]).unwrap();
        assert!(proxy.has(Socket::Main) && !proxy.has(Socket::Channel));
        assert!(proxy.cut_first(Socket::Main) && !proxy.cut_first(Socket::Channel));
        assert_eq!(near.read(&mut [0; 4]).unwrap(), 0);
        proxy.cut_on_sight(Socket::Channel);
        let (mut near, mut far) = pair();
        near.write_all(&[0x11, 0x22, 0x33, 0x44]).unwrap();
        assert_eq!(far.read(&mut [0; 4]).unwrap(), 0, "it passed");
        assert!(proxy.has_cut_on_sight() && proxy.has(Socket::Channel));
    }

    #[test]
    fn who_is_gone_is_told_from_who_has_said_all() {
        let folder = tempfile::tempdir().unwrap();
        let (at, to) = (folder.path().join("at"), folder.path().join("to"));
        let listener = UnixListener::bind(&to).unwrap();
        let _proxy = Proxy::unix(&at, &to).unwrap();
        for gone in [false, true] {
            let near = UnixStream::connect(&at).unwrap();
            let mut far = listener.accept().unwrap().0;
            let near = Some(near).filter(|_| !gone);
            if let Some(near) = &near {
                near.shutdown(std::net::Shutdown::Write).unwrap();
            }
            assert_eq!(far.read(&mut [0; 4]).unwrap(), 0);
            assert_eq!(far.write(b"answer").is_ok(), !gone);
            drop(near);
        }
    }
}

//! A proxy that can hold, delay and cut what it carries, over TCP or UNIX sockets.

use std::io;
use std::net::{TcpListener, TcpStream};
use std::os::fd::{AsFd, OwnedFd};
use std::os::unix::net::{UnixListener, UnixStream};
use std::path::{Path, PathBuf};
use std::sync::atomic::{AtomicBool, AtomicU64, Ordering};
use std::sync::{Arc, Mutex, MutexGuard, PoisonError};
use std::thread::{self, JoinHandle};
use std::time::{Duration, Instant};

use rustix::event::{PollFd, PollFlags, Timespec, poll};
use rustix::net::{Shutdown, shutdown};
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
            let connection = Arc::new(Connection { near, far });
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
}

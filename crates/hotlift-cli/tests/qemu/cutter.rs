//! A man in the middle of a link, who cuts one of its sockets when he is told to.

use std::io::{Read, Write};
use std::net::Shutdown;
use std::os::unix::net::{UnixListener, UnixStream};
use std::path::{Path, PathBuf};
use std::sync::atomic::{AtomicBool, Ordering};
use std::sync::{Arc, Mutex, MutexGuard, PoisonError};
use std::thread::{JoinHandle, spawn};

use rustix::event::{PollFd, PollFlags, Timespec, poll};
use tempfile::TempDir;

use crate::vm::{folder, until};

/// Which of a link's connections.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub enum Socket {
    Main,
    /// The multifd channel that comes first.
    Channel,
}

/// Carries the connections of a link, over UNIX sockets.
pub struct Cutter {
    shared: Arc<Shared>,
    folder: TempDir,
    accepting: Option<JoinHandle<()>>,
}

struct Shared {
    to: PathBuf,
    connections: Mutex<Vec<Connection>>,
    /// To be cut as soon as it is known to be that one.
    on_sight: Mutex<Option<Socket>>,
    ends: AtomicBool,
    threads: Mutex<Vec<JoinHandle<()>>>,
}

struct Connection {
    which: Socket,
    near: UnixStream,
    far: UnixStream,
}

impl Connection {
    fn cut(&self) {
        for stream in [&self.near, &self.far] {
            // It may have ended by itself.
            let _ = stream.shutdown(Shutdown::Both);
        }
    }
}

fn lock<T>(mutex: &Mutex<T>) -> MutexGuard<'_, T> {
    mutex.lock().unwrap_or_else(PoisonError::into_inner)
}

impl Cutter {
    /// Listens for connections that are to go `to` another.
    pub fn start(to: &Path) -> Self {
        let folder = folder();
        let listener = UnixListener::bind(folder.path().join("cut")).expect("a socket");
        let shared = Arc::new(Shared {
            to: to.to_owned(),
            connections: Mutex::default(),
            on_sight: Mutex::default(),
            ends: AtomicBool::new(false),
            threads: Mutex::default(),
        });
        let accepting = Arc::clone(&shared);
        Self {
            shared,
            folder,
            accepting: Some(spawn(move || accepting.accept(&listener))),
        }
    }

    /// Where it listens.
    pub fn uri(&self) -> String {
        format!("unix:{}", self.path().display())
    }

    fn path(&self) -> PathBuf {
        self.folder.path().join("cut")
    }

    /// Cuts a connection, and waits for it first.
    pub fn cut(&self, which: Socket) {
        self.wait_for(which);
        let connections = lock(&self.shared.connections);
        let mut found = connections.iter().filter(|one| one.which == which);
        found.next().expect("it was there").cut();
    }

    /// Waits for a connection.
    pub fn wait_for(&self, which: Socket) {
        let what = || format!("there is no {which:?}");
        until(what, || {
            let connections = lock(&self.shared.connections);
            connections
                .iter()
                .any(|one| one.which == which)
                .then_some(())
        });
    }

    /// Cuts a connection as soon as it says what it is.
    pub fn cut_on_sight(&self, which: Socket) {
        *lock(&self.shared.on_sight) = Some(which);
    }

    /// True once that was done.
    pub fn has_cut_on_sight(&self) -> bool {
        lock(&self.shared.on_sight).is_none()
    }
}

impl Shared {
    fn accept(self: &Arc<Self>, listener: &UnixListener) {
        while let Ok((near, _)) = listener.accept() {
            if self.ends.load(Ordering::SeqCst) {
                return;
            }
            // One who is gone refuses: dropping this end says the same.
            let Ok(far) = UnixStream::connect(&self.to) else {
                continue;
            };
            let shared = Arc::clone(self);
            lock(&self.threads).push(spawn(move || shared.carry(&near, &far)));
        }
    }

    fn carry(&self, mut near: &UnixStream, mut far: &UnixStream) {
        let mut magic = [0; 4];
        if near.read_exact(&mut magic).is_err() {
            return;
        }
        let which = match &magic {
            b"QEVM" => Socket::Main,
            _ => Socket::Channel,
        };
        let copy = |stream: &UnixStream| stream.try_clone().expect("a second descriptor");
        let connection = Connection {
            which,
            near: copy(near),
            far: copy(far),
        };
        {
            let mut on_sight = lock(&self.on_sight);
            if *on_sight == Some(which) {
                *on_sight = None;
                connection.cut();
                return;
            }
        }
        lock(&self.connections).push(connection);
        let (back_from, back_to) = (copy(far), copy(near));
        let back = spawn(move || pass(&back_from, &back_to));
        if far.write_all(&magic).is_ok() {
            pass(near, far);
        }
        back.join().expect("the way back");
    }
}

/// Passes bytes on until either end ends.
fn pass(mut from: &UnixStream, mut to: &UnixStream) {
    let mut buffer = vec![0; 256 << 10];
    while let Ok(length @ 1..) = from.read(&mut buffer) {
        if to.write_all(&buffer[..length]).is_err() {
            // As a direct connection would tell its writer.
            let _ = from.shutdown(Shutdown::Both);
            return;
        }
    }
    // One who is gone is told from one who has said all: the other end must see the same.
    let mut ends = [PollFd::new(from, PollFlags::empty())];
    let polled = poll(&mut ends, Some(&Timespec::default()));
    let is_gone = polled.is_ok() && ends[0].revents().contains(PollFlags::HUP);
    let _ = to.shutdown(if is_gone {
        Shutdown::Both
    } else {
        Shutdown::Write
    });
}

impl Drop for Cutter {
    fn drop(&mut self) {
        self.shared.ends.store(true, Ordering::SeqCst);
        // Wakes the thread that waits for connections.
        let _ = UnixStream::connect(self.path());
        if let Some(accepting) = self.accepting.take() {
            let _ = accepting.join();
        }
        for connection in lock(&self.shared.connections).drain(..) {
            connection.cut();
        }
        let threads: Vec<_> = lock(&self.shared.threads).drain(..).collect();
        for thread in threads {
            let _ = thread.join();
        }
    }
}

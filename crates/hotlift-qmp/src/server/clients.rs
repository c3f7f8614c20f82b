//! Accepts the clients of a socket, serves each in its own thread, and disconnects all when the server ends.

use std::io::{self, Write};
use std::net::{Shutdown, TcpListener};
use std::os::fd::{AsFd, BorrowedFd};
use std::os::unix::net::UnixListener;
use std::sync::atomic::{AtomicBool, Ordering};
use std::sync::{Arc, Condvar, Mutex, MutexGuard, PoisonError};
use std::thread;
use std::time::{Duration, Instant};

use crate::Connection;
use crate::lines::Socket;

/// Maximum number of clients of one socket. QEMU serves one. An operator, a manager and some monitoring programs need about
/// five.
pub const MAX_CLIENTS: usize = 64;

/// Timeout of a write to a client; a client that exceeds it is disconnected.
const WRITE_TIMEOUT: Duration = Duration::from_secs(30);

/// Time to send the last answers when the server ends.
const FINAL_WRITE_TIMEOUT: Duration = Duration::from_secs(2);

/// Delay after a failed accept. The system may have no file descriptor left.
const EXHAUSTED: Duration = Duration::from_millis(100);

/// A listening socket.
#[derive(Debug)]
pub enum BoundSocket {
    /// UNIX socket; the caller owns its file.
    Unix(UnixListener),
    /// TCP socket.
    Tcp(TcpListener),
}

impl BoundSocket {
    fn accept(&self) -> io::Result<Socket> {
        let socket = match self {
            Self::Unix(listener) => Socket::Unix(listener.accept()?.0),
            Self::Tcp(listener) => {
                let (stream, _) = listener.accept()?;
                stream.set_nodelay(true)?;
                Socket::Tcp(stream)
            }
        };
        socket.set_write_timeout(WRITE_TIMEOUT)?;
        Ok(socket)
    }
}

impl AsFd for BoundSocket {
    fn as_fd(&self) -> BorrowedFd<'_> {
        match self {
            Self::Unix(listener) => listener.as_fd(),
            Self::Tcp(listener) => listener.as_fd(),
        }
    }
}

/// Function that serves one client, called in a thread of its own.
pub type ServeClient = dyn Fn(Socket) + Send + Sync;

/// The clients of a socket. Dropping this value disconnects them after pending answers are sent, but at the latest after two
/// seconds.
#[derive(Debug)]
pub struct Clients(Arc<Shared>);

#[derive(Debug)]
struct Shared {
    listener: BoundSocket,
    ended: AtomicBool,
    served: Mutex<Vec<Arc<Socket>>>,
    left: Condvar,
}

impl Clients {
    /// Starts to serve the clients of `listener`, at most [`MAX_CLIENTS`] at a time. Further clients receive `refusal` and are
    /// disconnected.
    ///
    /// # Errors
    /// If the system cannot start a thread.
    pub fn serve(
        listener: BoundSocket,
        refusal: &'static [u8],
        serve: Arc<ServeClient>,
    ) -> io::Result<Self> {
        let shared = Arc::new(Shared {
            listener,
            ended: AtomicBool::new(false),
            served: Mutex::default(),
            left: Condvar::new(),
        });
        let accepting = Arc::clone(&shared);
        thread::Builder::new()
            .name("qmp/accept".to_owned())
            .spawn(move || accepting.accept(refusal, &serve))?;
        Ok(Self(shared))
    }
}

impl Drop for Clients {
    fn drop(&mut self) {
        let shared = &self.0;
        shared.ended.store(true, Ordering::Release);
        // Wakes the thread that waits in `accept`. Linux supports this for UNIX and TCP sockets.
        let _ = rustix::net::shutdown(&shared.listener, rustix::net::Shutdown::Both);
        let deadline = Instant::now() + FINAL_WRITE_TIMEOUT;
        let mut served = shared.served();
        for socket in &*served {
            socket.shut(Shutdown::Read);
        }
        while !served.is_empty() {
            let left = deadline.saturating_duration_since(Instant::now());
            if left.is_zero() {
                break;
            }
            served = shared
                .left
                .wait_timeout(served, left)
                .unwrap_or_else(PoisonError::into_inner)
                .0;
        }
        for socket in &*served {
            socket.shut_down();
        }
    }
}

impl Shared {
    fn served(&self) -> MutexGuard<'_, Vec<Arc<Socket>>> {
        self.served.lock().unwrap_or_else(PoisonError::into_inner)
    }

    fn accept(self: Arc<Self>, refusal: &[u8], serve: &Arc<ServeClient>) {
        while !self.ended.load(Ordering::Acquire) {
            match self.listener.accept() {
                Ok(socket) => {
                    if !self.take(&socket, serve) {
                        let _ = (&socket).write_all(refusal);
                    }
                }
                Err(error) if error.kind() == io::ErrorKind::ConnectionAborted => {}
                Err(_) if self.ended.load(Ordering::Acquire) => return,
                Err(_) => thread::sleep(EXHAUSTED),
            }
        }
    }

    /// Starts a thread that serves a client. Returns false if the limit is reached.
    fn take(self: &Arc<Self>, socket: &Socket, serve: &Arc<ServeClient>) -> bool {
        let Ok(ours) = socket.try_clone().map(Arc::new) else {
            return false;
        };
        let Ok(theirs) = socket.try_clone() else {
            return false;
        };
        {
            let mut served = self.served();
            if served.len() >= MAX_CLIENTS || self.ended.load(Ordering::Acquire) {
                return false;
            }
            served.push(Arc::clone(&ours));
        }
        let (shared, serve) = (Arc::clone(self), Arc::clone(serve));
        let leaves = ClientGuard {
            shared,
            socket: ours,
        };
        // If the thread cannot start, its closure is dropped, including the guard, which removes the client from the list.
        thread::Builder::new()
            .name("qmp/client".to_owned())
            .spawn(move || {
                let leaves = leaves;
                serve(theirs);
                drop(leaves);
            })
            .is_ok()
    }
}

/// Removes a client from the list when dropped, even after a panic in its thread.
struct ClientGuard {
    shared: Arc<Shared>,
    socket: Arc<Socket>,
}

impl Drop for ClientGuard {
    fn drop(&mut self) {
        self.socket.shut_down();
        self.shared
            .served()
            .retain(|one| !Arc::ptr_eq(one, &self.socket));
        self.shared.left.notify_all();
    }
}

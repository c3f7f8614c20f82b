//! `unix:PATH`.

use std::io;
use std::os::unix::fs::FileTypeExt;
use std::os::unix::net::{UnixListener, UnixStream};
use std::path::{Path, PathBuf};
use std::time::{Duration, Instant};

use rustix::fs::Mode;
use rustix::io::Errno;
use rustix::net::{AddressFamily, SocketAddrUnix, SocketFlags, SocketType, socket_with};

use super::{Address, Stop, Stream, Transport};

/// Length of the accept queue, the same as in the standard library.
const BACKLOG: i32 = 128;

/// Delay between attempts to connect to a socket whose accept queue is full. No event reports that the queue has space.
const RETRY: Duration = Duration::from_millis(10);

/// UNIX stream sockets.
pub(super) struct Unix;

impl Transport for Unix {
    fn scheme(&self) -> &'static str {
        "unix"
    }

    fn form(&self) -> &'static str {
        "unix:PATH"
    }

    fn parse(&self, rest: &str) -> Option<Address> {
        (!rest.is_empty()).then(|| Address::Unix { path: rest.into() })
    }
}

/// A listening UNIX socket. Its file is removed on drop.
#[derive(Debug)]
pub struct UnixSocketFile {
    listener: UnixListener,
    path: PathBuf,
}

impl UnixSocketFile {
    /// Returns the path of the socket file.
    #[must_use]
    pub fn path(&self) -> &Path {
        &self.path
    }

    /// Listens on a new socket at `path`. `mode` contains the permissions of its file, such as 0o600. If a socket file on which
    /// no process listens exists, it is replaced.
    ///
    /// # Errors
    /// The system's error.
    pub fn bind(path: &Path, mode: u32) -> io::Result<Self> {
        listen(path, Some(Mode::from_raw_mode(mode)))
    }

    /// Returns the socket.
    #[must_use]
    pub fn listener(&self) -> &UnixListener {
        &self.listener
    }
}

impl Drop for UnixSocketFile {
    fn drop(&mut self) {
        let _ = std::fs::remove_file(&self.path);
    }
}

pub(super) fn connect(path: &Path, timeout: Duration, stop: Stop<'_>) -> io::Result<Stream> {
    let begun = Instant::now();
    loop {
        match try_connect(path) {
            Ok(stream) => {
                stream.set_nonblocking(false)?;
                return Ok(stream.into());
            }
            Err(Errno::AGAIN) if begun.elapsed() < timeout => stop.poll(&mut Vec::new(), RETRY)?,
            Err(Errno::AGAIN) => {
                let why = "its queue of connections is full, and its process accepts none";
                return Err(io::Error::new(io::ErrorKind::TimedOut, why));
            }
            Err(errno) => return Err(errno.into()),
        }
    }
}

/// Connects without waiting. Returns [`Errno::AGAIN`] if the accept queue is full.
fn try_connect(path: &Path) -> Result<UnixStream, Errno> {
    let flags = SocketFlags::CLOEXEC | SocketFlags::NONBLOCK;
    let socket = socket_with(AddressFamily::UNIX, SocketType::STREAM, flags, None)?;
    rustix::net::connect(&socket, &SocketAddrUnix::new(path)?)?;
    Ok(socket.into())
}

/// Listens on a new socket, whose file has the permissions `mode`; with `None`, those of the umask.
pub(crate) fn listen(path: &Path, mode: Option<Mode>) -> io::Result<UnixSocketFile> {
    let listener = match bind(path, mode) {
        // A killed process leaves its socket file. If no process accepts connections there, the file is replaced. A socket in
        // use, or a file of another type, must not be removed.
        Err(error) if error.kind() == io::ErrorKind::AddrInUse && is_stale_socket(path) => {
            std::fs::remove_file(path)?;
            bind(path, mode)?
        }
        bound => bound?,
    };
    Ok(UnixSocketFile {
        listener,
        path: path.to_owned(),
    })
}

fn bind(path: &Path, mode: Option<Mode>) -> io::Result<UnixListener> {
    let Some(mode) = mode else {
        return UnixListener::bind(path);
    };
    let flags = SocketFlags::CLOEXEC;
    let socket = socket_with(AddressFamily::UNIX, SocketType::STREAM, flags, None)?;
    // The bind creates the file with the socket's permissions, so it never has wider ones.
    rustix::fs::fchmod(&socket, mode)?;
    rustix::net::bind(&socket, &SocketAddrUnix::new(path)?)?;
    // The umask may have removed permissions.
    rustix::fs::chmod(path, mode)?;
    rustix::net::listen(&socket, BACKLOG)?;
    Ok(socket.into())
}

fn is_stale_socket(path: &Path) -> bool {
    let is_socket = std::fs::symlink_metadata(path).is_ok_and(|meta| meta.file_type().is_socket());
    is_socket && matches!(try_connect(path), Err(Errno::CONNREFUSED))
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn a_socket_with_a_full_backlog_is_awaited_and_not_taken_for_stale() {
        let folder = tempfile::tempdir().unwrap();
        let path = folder.path().join("s");
        let flags = SocketFlags::CLOEXEC;
        let socket = socket_with(AddressFamily::UNIX, SocketType::STREAM, flags, None).unwrap();
        rustix::net::bind(&socket, &SocketAddrUnix::new(&path).unwrap()).unwrap();
        rustix::net::listen(&socket, 0).unwrap();
        let _only = connect(&path, Duration::ZERO, Stop::NEVER).unwrap();

        let error = connect(&path, Duration::from_millis(50), Stop::NEVER).unwrap_err();
        assert_eq!(error.kind(), io::ErrorKind::TimedOut);
        let stop = Stop {
            wake_fd: None,
            when: &|| true,
        };
        let error = connect(&path, Duration::from_secs(600), stop).unwrap_err();
        assert_eq!(error.kind(), io::ErrorKind::Interrupted);
        assert!(listen(&path, None).is_err() && path.exists());

        let waiting = std::thread::spawn(move || {
            connect(&path, Duration::from_secs(60), Stop::NEVER).map(drop)
        });
        let listener = UnixListener::from(socket);
        let (_first, _second) = (listener.accept().unwrap(), listener.accept().unwrap());
        waiting.join().unwrap().unwrap();
    }
}

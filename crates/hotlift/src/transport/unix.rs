//! `unix:PATH`.

use std::io;
use std::os::unix::fs::FileTypeExt;
use std::os::unix::net::{UnixListener, UnixStream};
use std::path::{Path, PathBuf};

use rustix::fs::Mode;
use rustix::net::{AddressFamily, SocketAddrUnix, SocketFlags, SocketType, socket_with};

use super::{Address, Stream, Transport};

/// Connections that wait to be accepted; std's own.
const BACKLOG: i32 = 128;

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

/// A listening socket and its file, which is removed on drop.
#[derive(Debug)]
pub struct UnixSocketFile {
    listener: UnixListener,
    path: PathBuf,
}

impl UnixSocketFile {
    /// Where the socket's file is.
    #[must_use]
    pub fn path(&self) -> &Path {
        &self.path
    }

    /// Listens at `path` on a socket that whoever `mode` (such as 0o600) lets may connect to. The file of
    /// a socket that nobody listens on any more is replaced.
    ///
    /// # Errors
    /// The system's reason.
    pub fn bind(path: &Path, mode: u32) -> io::Result<Self> {
        listen(path, Some(Mode::from_raw_mode(mode)))
    }

    /// The socket.
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

pub(super) fn connect(path: &Path) -> io::Result<Stream> {
    Ok(Stream::Unix(UnixStream::connect(path)?))
}

/// Listens on a socket whose file has `mode`, or what the umask leaves.
pub(super) fn listen(path: &Path, mode: Option<Mode>) -> io::Result<UnixSocketFile> {
    let listener = match bind(path, mode) {
        // A process that was killed leaves its socket's file behind. Nobody answers there, so the
        // name is free to take; a socket that answers belongs to somebody, and a file that is no
        // socket is not ours to remove.
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
    // The file gets the mode that the socket has when it is bound, so that at no moment it has another.
    rustix::fs::fchmod(&socket, mode)?;
    rustix::net::bind(&socket, &SocketAddrUnix::new(path)?)?;
    // The umask may have taken some of it.
    rustix::fs::chmod(path, mode)?;
    rustix::net::listen(&socket, BACKLOG)?;
    Ok(socket.into())
}

fn is_stale_socket(path: &Path) -> bool {
    let is_socket = std::fs::symlink_metadata(path).is_ok_and(|meta| meta.file_type().is_socket());
    is_socket
        && UnixStream::connect(path)
            .is_err_and(|error| error.kind() == io::ErrorKind::ConnectionRefused)
}

//! `unix:PATH`.

use std::io;
use std::os::unix::fs::FileTypeExt;
use std::os::unix::net::{UnixListener, UnixStream};
use std::path::{Path, PathBuf};

use super::{Address, Listener, Stream, Transport};

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

    pub(super) fn listener(&self) -> &UnixListener {
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

pub(super) fn listen(path: &Path) -> io::Result<Listener> {
    let listener = match UnixListener::bind(path) {
        // A process that was killed leaves its socket's file behind. Nobody answers there, so the
        // name is free to take; a socket that answers belongs to somebody, and a file that is no
        // socket is not ours to remove.
        Err(error) if error.kind() == io::ErrorKind::AddrInUse && is_stale_socket(path) => {
            std::fs::remove_file(path)?;
            UnixListener::bind(path)?
        }
        bound => bound?,
    };
    Ok(Listener::Unix(UnixSocketFile {
        listener,
        path: path.to_owned(),
    }))
}

fn is_stale_socket(path: &Path) -> bool {
    let is_socket = std::fs::symlink_metadata(path).is_ok_and(|meta| meta.file_type().is_socket());
    is_socket
        && UnixStream::connect(path)
            .is_err_and(|error| error.kind() == io::ErrorKind::ConnectionRefused)
}

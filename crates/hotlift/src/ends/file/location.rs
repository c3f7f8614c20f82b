//! Location of a save file: in the file system of this host, or on the file server of another host.

use std::ffi::OsStr;
use std::fmt;
use std::path::{Path, PathBuf};
use std::sync::Arc;

use hotlift_net::transport::{Address, TransportError};

use crate::tls::Tls;

/// Location of a save file.
#[derive(Debug, Clone)]
pub enum Location {
    /// Path in the file system of this host.
    Path(PathBuf),
    /// File on a server of `hotlift serve --files`.
    Server(RemoteFile),
}

/// A file on a file server.
#[derive(Debug, Clone)]
pub struct RemoteFile {
    /// Address of the server.
    pub address: Address,
    /// Name of the file on the server, without a path.
    pub name: String,
    /// TLS to the server; `None` for a plain connection.
    pub tls: Option<Arc<Tls>>,
}

impl Location {
    /// Parses a user's argument: `tcp:HOST:PORT/NAME`, `unix:PATH/NAME`, or else a path. Sets no TLS.
    ///
    /// # Errors
    /// [`TransportError`] if the text begins with `tcp:` or `unix:`, but has no valid address or no name.
    pub fn parse(text: &OsStr) -> Result<Self, TransportError> {
        let is_address = |bytes: &[u8]| bytes.starts_with(b"tcp:") || bytes.starts_with(b"unix:");
        let uri = match text.to_str() {
            Some(uri) if is_address(uri.as_bytes()) => uri,
            _ => return Ok(Self::Path(text.into())),
        };
        let bad = || TransportError::BadAddress {
            address: uri.to_owned(),
            expected: "tcp:HOST:PORT/NAME, unix:PATH/NAME, or the path of a file",
        };
        let (address, name) = uri.rsplit_once('/').ok_or_else(bad)?;
        if name.is_empty() {
            return Err(bad());
        }
        Ok(Self::Server(RemoteFile {
            address: Address::of_peer(address).map_err(|error| match error {
                error @ (TransportError::NoPort { .. } | TransportError::NoZone { .. }) => error,
                _ => bad(),
            })?,
            name: name.to_owned(),
            tls: None,
        }))
    }

    /// Returns the server's address, if the file is on a server.
    #[must_use]
    pub fn server(&self) -> Option<&Address> {
        match self {
            Self::Path(_) => None,
            Self::Server(file) => Some(&file.address),
        }
    }

    /// Sets the TLS of the connection to the server; does nothing for a path.
    #[must_use]
    pub fn with_tls(mut self, tls: Option<Arc<Tls>>) -> Self {
        if let Self::Server(file) = &mut self {
            file.tls = tls;
        }
        self
    }
}

impl From<&Path> for Location {
    fn from(path: &Path) -> Self {
        Self::Path(path.to_owned())
    }
}

impl From<&PathBuf> for Location {
    fn from(path: &PathBuf) -> Self {
        Self::Path(path.clone())
    }
}

impl From<&Location> for Location {
    fn from(location: &Location) -> Self {
        location.clone()
    }
}

impl fmt::Display for Location {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        match self {
            Self::Path(path) => path.display().fmt(f),
            Self::Server(file) => file.fmt(f),
        }
    }
}

impl fmt::Display for RemoteFile {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        write!(f, "{}/{}", self.address, self.name)
    }
}

#[cfg(test)]
mod tests {
    use std::os::unix::ffi::OsStrExt;

    use super::*;

    #[test]
    fn a_location_is_a_path_or_an_address_with_a_file_name() {
        let parse = |text: &[u8]| Location::parse(OsStr::from_bytes(text));
        for path in ["vm.save", "/srv/vm.save", "./tcp:host:1/vm", "a:b/c"] {
            assert!(matches!(parse(path.as_bytes()), Ok(Location::Path(_))));
        }
        assert!(matches!(parse(b"tcp:\xff"), Ok(Location::Path(_))));
        for uri in ["tcp:host:1/vm.save", "tcp:[::1]:44/vm", "unix:/run/s/vm"] {
            let location = parse(uri.as_bytes()).unwrap();
            assert!(location.server().is_some(), "{uri}");
            assert_eq!(location.to_string(), uri);
        }
        for bad in [
            "tcp:host:1",
            "tcp:host:1/",
            "tcp:host/vm",
            "unix:vm",
            "tcp:h:1/a/b",
        ] {
            assert!(parse(bad.as_bytes()).is_err(), "{bad}");
        }
    }
}

//! Where a save file is: in this host's file system, or where another host hands it out.

use std::ffi::OsStr;
use std::fmt;
use std::path::{Path, PathBuf};
use std::sync::Arc;

use hotlift_net::transport::{Address, TransportError};

use crate::tls::Tls;

/// Where a save file is.
#[derive(Debug, Clone)]
pub enum Location {
    /// In this host's file system.
    Path(PathBuf),
    /// Where `hotlift serve --files` hands it out.
    Server(RemoteFile),
}

/// A file that a server hands out.
#[derive(Debug, Clone)]
pub struct RemoteFile {
    /// Where the server listens.
    pub address: Address,
    /// The file's name there, without a path.
    pub name: String,
    /// TLS to the server; none if it is `None`.
    pub tls: Option<Arc<Tls>>,
}

impl Location {
    /// What a user gives: `tcp:HOST:PORT/NAME`, `unix:PATH/NAME`, or else a path. No TLS is set.
    ///
    /// # Errors
    /// [`TransportError`] for what begins like an address, and is none with a name behind it.
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

    /// The server's address, of a file that has one.
    #[must_use]
    pub fn server(&self) -> Option<&Address> {
        match self {
            Self::Path(_) => None,
            Self::Server(file) => Some(&file.address),
        }
    }

    /// The same, read over TLS if its server is another host's.
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
    fn a_path_is_a_path_and_an_address_has_a_name_behind_it() {
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

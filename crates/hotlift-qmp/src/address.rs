//! Addresses of QMP sockets.

use std::fmt;
use std::path::PathBuf;
use std::str::FromStr;

use crate::error::QmpError;

/// Address of a QMP socket, as in QEMU's `-qmp` without its options.
#[derive(Debug, Clone, PartialEq, Eq)]
pub enum QmpAddress {
    /// `unix:PATH`, or just `PATH`.
    Unix(PathBuf),
    /// `tcp:HOST:PORT`; stores `HOST:PORT`, with brackets around an IPv6 address.
    Tcp(String),
}

impl FromStr for QmpAddress {
    type Err = QmpError;

    fn from_str(text: &str) -> Result<Self, QmpError> {
        let parsed = match text.split_once(':') {
            Some(("tcp", rest)) => rest
                .rsplit_once(':')
                .filter(|(host, port)| !host.is_empty() && port.parse::<u16>().is_ok())
                .map(|_| Self::Tcp(rest.to_owned())),
            Some(("unix", path)) => (!path.is_empty()).then(|| Self::Unix(path.into())),
            _ => (!text.is_empty()).then(|| Self::Unix(text.into())),
        };
        parsed.ok_or_else(|| QmpError::Address {
            address: text.to_owned(),
        })
    }
}

impl fmt::Display for QmpAddress {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        match self {
            Self::Unix(path) => write!(f, "unix:{}", path.display()),
            Self::Tcp(address) => write!(f, "tcp:{address}"),
        }
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn a_path_needs_no_scheme_and_tcp_needs_host_and_port() {
        let parse = |text: &str| text.parse::<QmpAddress>();
        assert_eq!(parse("/run/q").unwrap(), parse("unix:/run/q").unwrap());
        assert_eq!(parse("tcp:[::1]:4").unwrap().to_string(), "tcp:[::1]:4");
        // Port 0 is valid: a server then lets the system choose the port.
        assert!(parse("tcp:h:0").is_ok());
        for bad in ["", "unix:", "tcp:", "tcp:4444", "tcp::4444", "tcp:h:x"] {
            assert!(parse(bad).is_err(), "{bad}");
        }
    }
}

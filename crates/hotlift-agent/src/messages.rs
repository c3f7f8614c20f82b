//! Messages between two agents about a migration: JSON, one line a message, over a TLS connection that carries only messages.
//!
//! ```text
//! source                  destination
//! hello            ---->  is 'to' an address of this host, and its port one of migrations?
//!                  <----  ready with a token, or refused
//! source           ---->  starts its relay; connections that begin with the token belong to it
//! failed           <--->  (otherwise the connection would only close)
//! completed        <--->
//! ```
//!
//! A tunnel has only hello and ready: the tunnel's bytes follow on the same connection.

use std::fmt;
use std::net::SocketAddr;

use hotlift::conversation::OpeningRequest;
use hotlift_qmp::Uuid;
use serde::{Deserialize, Serialize};

/// Id of a migration or tunnel in the logs of both hosts.
#[derive(Debug, Clone, Copy, PartialEq, Eq, PartialOrd, Ord, Hash, Serialize, Deserialize)]
#[serde(try_from = "String", into = "String")]
pub struct Id(pub u32);

impl fmt::Display for Id {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        write!(f, "{:08x}", self.0)
    }
}

impl std::str::FromStr for Id {
    type Err = String;

    fn from_str(text: &str) -> Result<Self, String> {
        let number = (text.len() == 8).then(|| u32::from_str_radix(text, 16).ok());
        number
            .flatten()
            .map(Self)
            .ok_or_else(|| format!("'{text}' is not an id: expected 8 hexadecimal digits"))
    }
}

impl TryFrom<String> for Id {
    type Error = String;

    fn try_from(text: String) -> Result<Self, String> {
        text.parse()
    }
}

impl From<Id> for String {
    fn from(id: Id) -> Self {
        id.to_string()
    }
}

/// Content of the connections.
#[derive(Debug, Clone, Copy, PartialEq, Eq, Serialize, Deserialize)]
#[serde(rename_all = "kebab-case")]
pub enum Kind {
    /// QEMU's migration stream.
    Migration,
    /// Any other bytes, unchanged.
    Tunnel,
}

impl Kind {
    /// Returns the name of the kind, for logs and metrics.
    #[must_use]
    pub fn name(self) -> &'static str {
        match self {
            Self::Migration => "migration",
            Self::Tunnel => "tunnel",
        }
    }
}

/// First message: the source's agent announces a migration or a tunnel.
#[derive(Debug, Clone, PartialEq, Eq, Serialize, Deserialize)]
#[serde(rename_all = "kebab-case")]
pub struct Hello {
    /// Id of the migration or tunnel, the same on both hosts.
    pub id: Id,
    /// Content of the connections: a migration, or other bytes (a tunnel).
    pub kind: Kind,
    /// Original destination of the source's connections.
    pub to: SocketAddr,
}

/// All messages after the hello.
#[derive(Debug, Clone, PartialEq, Eq, Serialize, Deserialize)]
#[serde(tag = "message", rename_all = "kebab-case")]
pub enum Message {
    /// The destination's agent accepts the migration or tunnel.
    Ready {
        /// Token that the source's relay sends at the start of each connection of the migration.
        token: Uuid,
    },
    /// The destination's agent refuses the migration or tunnel.
    Refused {
        /// The reason, in one line.
        reason: String,
    },
    /// Properties of the source's QEMU; the relay of the destination needs them for its stream to the destination's QEMU.
    Source {
        /// Number of multifd channels; 0 without multifd.
        channels: u8,
        /// Compression method of the multifd packets.
        method: String,
    },
    /// The relay on the sender's host succeeded.
    Completed,
    /// The relay on the sender's host failed.
    Failed {
        /// The reason, in one line.
        reason: String,
    },
}

impl OpeningRequest for Hello {
    const ROLE: &'static str = "agent";
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn a_hello_decodes_to_what_was_encoded() {
        let hello = Hello {
            id: Id(0x1a),
            kind: Kind::Tunnel,
            to: "[2001:db8::1]:49152".parse().unwrap(),
        };
        let text = serde_json::to_string(&hello).unwrap();
        assert_eq!(
            text,
            r#"{"id":"0000001a","kind":"tunnel","to":"[2001:db8::1]:49152"}"#
        );
        assert_eq!(serde_json::from_str::<Hello>(&text).unwrap(), hello);
        assert!("1a".parse::<Id>().is_err());
        assert!("0000001g".parse::<Id>().is_err());
    }
}

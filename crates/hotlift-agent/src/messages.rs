//! What two agents say to each other of a migration: JSON, one line a message, over a TLS connection of its own.
//!
//! ```text
//! source                  destination
//! hello            ---->  is 'to' an address of this host, and its port one of migrations?
//!                  <----  ready with a token, or refused
//! source           ---->  starts its relay; the connections that begin with the token are for it
//! failed           <--->  (in place of a connection that only ends)
//! completed        <--->
//! ```
//!
//! A tunnel has hello and ready alone: what follows on the same connection is its bytes.

use std::fmt;
use std::net::SocketAddr;

use hotlift::conversation::Wish;
use hotlift_qmp::Uuid;
use serde::{Deserialize, Serialize};

/// What names a migration in the logs of both hosts.
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
            .ok_or_else(|| format!("'{text}' is no id: expected 8 hexadecimal digits"))
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

/// What connections carry.
#[derive(Debug, Clone, Copy, PartialEq, Eq, Serialize, Deserialize)]
#[serde(rename_all = "kebab-case")]
pub enum Kind {
    /// QEMU's migration stream.
    Migration,
    /// Anything else, byte for byte.
    Tunnel,
}

impl Kind {
    /// Its name.
    #[must_use]
    pub fn name(self) -> &'static str {
        match self {
            Self::Migration => "migration",
            Self::Tunnel => "tunnel",
        }
    }
}

/// Opens the conversation.
#[derive(Debug, Clone, PartialEq, Eq, Serialize, Deserialize)]
#[serde(rename_all = "kebab-case")]
pub struct Hello {
    /// Of the migration.
    pub id: Id,
    /// What it is.
    pub kind: Kind,
    /// Where the source's connections were to go.
    pub to: SocketAddr,
}

/// What is said after it, by either side.
#[derive(Debug, Clone, PartialEq, Eq, Serialize, Deserialize)]
#[serde(tag = "message", rename_all = "kebab-case")]
pub enum Message {
    /// The destination takes it.
    Ready {
        /// What each connection of the migration begins with.
        token: Uuid,
    },
    /// The destination does not.
    Refused {
        /// Why, in one line.
        reason: String,
    },
    /// What the source's QEMU has, so that of the destination is given the same.
    Source {
        /// Its multifd channels; 0 for none.
        channels: u8,
        /// The method of their packets.
        method: String,
    },
    /// This side's relay has ended well.
    Completed,
    /// It has not.
    Failed {
        /// Why, in one line.
        reason: String,
    },
}

impl Wish for Hello {
    const ROLE: &'static str = "agent";
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn a_hello_reads_as_it_is_written() {
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
